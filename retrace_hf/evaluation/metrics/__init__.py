"""Metrics for the library `evaluate`, each in a folder laid out as its own are: `evaluate.load(metric_path(name))`."""

from pathlib import Path


METRICS = ("acceptance_length", "match_rate", "speculative_speedup")


def metric_path(name: str) -> str:
    """
    Folder of a metric, for `evaluate.load`.

    ```python
    acceptance_length = evaluate.load(metric_path("acceptance_length"))
    ```

    Args:
        name (`str`): `"acceptance_length"`, `"match_rate"` or `"speculative_speedup"`.

    Raises:
        ValueError: there is no such metric here.
    """
    if name not in METRICS:
        raise ValueError(f"There is no metric {name!r} in retrace_hf; there are {', '.join(METRICS)}.")
    return str(Path(__file__).parent / name)


__all__ = ["METRICS", "metric_path"]
