"""results.json of a drafter: what was measured, how sure it is, and how to measure it again."""

import hashlib
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from .. import __version__
from ..files import write_text
from ..generation import AcceptanceStats
from ..redaction import redacted


def rows_by_kind(kinds: Sequence[str]) -> dict[str, list[int]]:
    """Which prompts are of each kind, and `"all"` of them."""
    return {kind: [i for i, k in enumerate(kinds) if kind in (k, "all")] for kind in [*sorted(set(kinds)), "all"]}


def limit_each_kind(rows: Sequence[dict], limit: int | None) -> list[dict]:
    """The first `limit` rows of each `"kind"`, in their order; all of them for `None`."""
    taken, chosen = Counter(), []
    for row in rows:
        taken[row["kind"]] += 1
        if limit is None or taken[row["kind"]] <= limit:
            chosen.append(row)
    return chosen


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
    return _middle_95(_over(tokens[picks].sum(1), rounds[picks].sum(1)))


def _over(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """`one / other`, NaN where both are 0: prompts that ended with the token of their prefill have no round."""
    with np.errstate(invalid="ignore"):
        return one / other


def _middle_95(draws: np.ndarray) -> list[float]:
    """95 % interval of resampled figures, `[low, high]`, of those that are numbers; NaN where none is."""
    draws = draws[~np.isnan(draws)]
    return np.percentile(draws, [2.5, 97.5]).tolist() if len(draws) else [float("nan")] * 2


def bootstrap_speedup(
    seconds: Sequence[float],
    tokens: Sequence[int],
    plain_seconds: Sequence[float],
    plain_tokens: Sequence[int],
    draws: int = 2000,
    seed: int = 0,
) -> dict[str, float | list[float]]:
    """How many times as fast as plain `generate()`, for each token, with 95 % intervals over resampled prompts. Texts
    that are equal have as many tokens, so that this is the ratio of the seconds.

    Args:
        seconds, tokens, plain_seconds, plain_tokens (`Sequence`): One a prompt, of a method and of plain.

    Returns:
        `dict`: `speedup_median` and `speedup_median_interval`, of the prompts' own ratios; `speedup_total` and
        `speedup_total_interval`, tokens a second over all prompts.
    """
    spent, new, plain_spent, plain_new = map(np.array, (seconds, tokens, plain_seconds, plain_tokens))
    own = (plain_spent / plain_new) / (spent / new)
    picks = _resamples(len(own), draws, seed)
    totals = (plain_spent[picks].sum(1) / plain_new[picks].sum(1)) / (spent[picks].sum(1) / new[picks].sum(1))
    return {
        "speedup_median": statistics.median(own.tolist()),
        "speedup_median_interval": _middle_95(np.median(own[picks], axis=1)),
        "speedup_total": float((plain_spent.sum() / plain_new.sum()) / (spent.sum() / new.sum())),
        "speedup_total_interval": _middle_95(totals),
    }


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
    base = _over(base_tokens[picks].sum(1), base_rounds[picks].sum(1))
    ratios = _over(tokens[picks].sum(1), rounds[picks].sum(1)) / base
    ratio = _over(tokens.sum(), rounds.sum()) / _over(base_tokens.sum(), base_rounds.sum())
    return {"ratio": float(ratio), "interval": _middle_95(ratios)}


def ratios_over(baseline: str, stats: Mapping[str, Sequence[AcceptanceStats]], kinds: Sequence[str]) -> dict:
    """Every other variant's tau over the baseline's, by kind, paired by prompt: results.json's
    `acceptance_length_over_{baseline}`."""
    return {
        name: {
            kind: bootstrap_ratio([stats[name][i] for i in chosen], [stats[baseline][i] for i in chosen])
            for kind, chosen in rows_by_kind(kinds).items()
        }
        for name in sorted(set(stats) - {baseline})
    }


def describe_drafter(folder: str | os.PathLike) -> dict:
    """Hash of a drafter's weights, one of its config, and how it was trained where the run left a note: an entry of
    the provenance's `arms`."""
    folder = Path(folder)
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        weights = file_hash(files[0])
    else:
        hashes = "".join(file_hash(file) for file in files)
        weights = "sha256:" + hashlib.sha256(hashes.encode()).hexdigest()
    note = folder / "training.json"
    return {
        "weights": weights,
        "config": file_hash(folder / "config.json"),
        "training": json.loads(note.read_text(encoding="utf-8")) if note.is_file() else None,
    }


def provenance(data_files: Sequence[str | os.PathLike], **extra) -> dict:
    """Command, revision, versions, hardware and data hashes of this process's measurement."""
    return {
        "command": command_line(),
        "revision": _git_revision(),
        "versions": {"retrace_hf": __version__, **{name: version(name) for name in ("torch", "transformers")}},
        "python": platform.python_version(),
        "hardware": hardware(),
        "data": {os.path.basename(file): file_hash(file) for file in data_files},
        **extra,
    }


def hardware(device: torch.device | None = None) -> str:
    """The machine, as far as its seconds depend on it: its CPUs, or the GPU where `device` is one."""
    if device is not None and device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{os.cpu_count()} x {platform.processor() or platform.machine()}"


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
    """Floats of nested results to six digits; what is no number (a mean over no round) is `None`, as JSON has it."""
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return float(f"{value:.6g}")  # digits, not decimals: gaps between logits are small
    if isinstance(value, Mapping):
        return {k: rounded(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(v) for v in value]
    return value
