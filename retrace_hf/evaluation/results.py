"""results.json of a drafter: what was measured, how sure it is, and how to measure it again."""

import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np

from .. import __version__
from ..files import write_text
from ..generation import AcceptanceStats
from ..redaction import redacted


def rows_by_kind(kinds: Sequence[str]) -> dict[str, list[int]]:
    """Which prompts are of each kind, and `"all"` of them."""
    return {kind: [i for i, k in enumerate(kinds) if kind in (k, "all")] for kind in [*sorted(set(kinds)), "all"]}


def summarize(
    stats: Sequence[AcceptanceStats], kinds: Sequence[str], seconds: Sequence[float] | None = None
) -> dict[str, dict]:
    """One variant's entry of results.json: by kind of prompt and for `"all"`.

    Args:
        stats (`Sequence[AcceptanceStats]`): One a prompt.
        kinds (`Sequence[str]`): Kind of each prompt.
        seconds (`Sequence[float]`, *optional*): Wall-clock time of each prompt, where it was generated.

    Returns:
        `dict`: by kind, `acceptance_length` (tau, pooled over rounds), `acceptance_length_interval` (95 %, bootstrap
        over prompts), `rounds`, `new_tokens`, `acceptance_at` (slots 1..B-1), `prompts`, `seconds`.
    """
    summary = {}
    for kind, rows in rows_by_kind(kinds).items():
        total = AcceptanceStats.pooled(stats[i] for i in rows)
        summary[kind] = {
            "acceptance_length": total.acceptance_length,
            "acceptance_length_interval": bootstrap_interval([stats[i] for i in rows]),
            "rounds": total.rounds,
            "new_tokens": total.new_tokens,
            "acceptance_at": total.acceptance_at,
            "prompts": len(rows),
            "seconds": None if seconds is None else float(sum(seconds[i] for i in rows)),
        }
    return summary


def _tokens_and_rounds(stats: Sequence[AcceptanceStats]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([s.new_tokens - s.calls for s in stats]), np.array([s.rounds for s in stats])


def _resamples(count: int, draws: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, count, size=(draws, count))


def bootstrap_interval(stats: Sequence[AcceptanceStats], draws: int = 2000, seed: int = 0) -> list[float]:
    """95 % interval of pooled tau over resampled prompts, `[low, high]`."""
    tokens, rounds = _tokens_and_rounds(stats)
    picks = _resamples(len(stats), draws, seed)
    return np.percentile(tokens[picks].sum(1) / rounds[picks].sum(1), [2.5, 97.5]).tolist()


def bootstrap_ratio(
    stats: Sequence[AcceptanceStats], baseline: Sequence[AcceptanceStats], draws: int = 2000, seed: int = 0
) -> dict[str, float | list[float]]:
    """tau over the baseline's tau on the same prompts, with the 95 % interval over resampled prompts (paired).

    Returns:
        `dict`: `ratio` and `interval`.
    """
    tokens, rounds = _tokens_and_rounds(stats)
    base_tokens, base_rounds = _tokens_and_rounds(baseline)
    picks = _resamples(len(stats), draws, seed)
    ratios = (tokens[picks].sum(1) / rounds[picks].sum(1)) / (base_tokens[picks].sum(1) / base_rounds[picks].sum(1))
    ratio = (tokens.sum() / rounds.sum()) / (base_tokens.sum() / base_rounds.sum())
    return {"ratio": float(ratio), "interval": np.percentile(ratios, [2.5, 97.5]).tolist()}


def provenance(data_files: Sequence[str | os.PathLike], **extra) -> dict:
    """Command, revision, versions, hardware and data hashes of this process's measurement."""
    return {
        "command": command_line(),
        "revision": _git_revision(),
        "versions": {"retrace_hf": __version__, **{name: version(name) for name in ("torch", "transformers")}},
        "python": platform.python_version(),
        "hardware": f"{os.cpu_count()} x {platform.processor() or platform.machine()}",
        "data": {os.path.basename(file): file_hash(file) for file in data_files},
        **extra,
    }


def command_line() -> str:
    """This process's command, without the folders in front of the working one, which say nothing to others, and
    without tokens and keys."""
    here = os.getcwd() + os.sep
    return redacted(shlex.join([os.path.basename(sys.executable), *(part.replace(here, "") for part in sys.argv)]))


def file_hash(path: str | os.PathLike) -> str:
    return "sha256:" + hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _git_revision() -> str | None:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def write_results(path: str | os.PathLike, results: Mapping) -> None:
    """Writes results.json whole or not at all."""
    write_text(path, json.dumps(rounded(results), indent=2) + "\n")


def rounded(value):
    """Floats of nested results to six digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")  # digits, not decimals: gaps between logits are small
    if isinstance(value, Mapping):
        return {k: rounded(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(v) for v in value]
    return value
