"""Plots of a benchmark's results.json, one panel for each temperature."""

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from ..card import kinds_of, title_of


def draw_all(results: Mapping, folder: str | os.PathLike) -> list[str]:
    """
    Draws every plot as a PNG into a folder, and returns the names of the files.

    Args:
        results (`Mapping`): of [`~retrace_hf.evaluation.benchmark.benchmark`], or read from results.json.
        folder (`str` or `os.PathLike`): where to.

    Raises:
        `ImportError`: matplotlib is missing.
    """
    plots = {
        "acceptance_at.png": _acceptance_at,
        "tau_by_kind.png": _tau_by_kind,
        "accepted_counts.png": _accepted_counts,
        "tau_by_context.png": _tau_by_context,
    }
    for name, panel in plots.items():
        _draw(results, panel, Path(folder, name))
    return list(plots)


def _draw(results: Mapping, panel: Callable, file: Path):
    try:
        from matplotlib.figure import Figure  # without pyplot, whose state is the caller's
    except ImportError as error:
        raise ImportError("The plots need matplotlib: pip install 'retrace_hf[benchmark]'.") from error
    by_temperature = results["temperatures"]
    figure = Figure(figsize=(7 * len(by_temperature), 5), layout="constrained")
    panels = figure.subplots(1, len(by_temperature), squeeze=False, sharey=True)
    for axes, (temperature, variants) in zip(panels[0], by_temperature.items()):
        panel(axes, {method: variant for method, variant in variants.items() if method != "plain"})
        axes.set_title(f"temperature {temperature}")
        axes.grid(alpha=0.3)
    drawn, names = panels[0][0].get_legend_handles_labels()
    figure.legend(drawn, names, loc="outside lower center", ncols=4)
    figure.savefig(file, dpi=150)


def _acceptance_at(axes, variants: Mapping):
    for method, variant in variants.items():
        shares = variant["all"]["acceptance_at"]
        axes.plot(range(1, len(shares) + 1), shares, marker="o", label=method)
    axes.set(xlabel="slot", ylabel="share of rounds accepted up to here", ylim=(0, 1.02))


def _tau_by_kind(axes, variants: Mapping):
    kinds = kinds_of({"variants": variants})
    width = 0.8 / len(variants)
    for number, (method, variant) in enumerate(variants.items()):
        taus = [_number(variant[kind]["acceptance_length"]) for kind in kinds]
        bounds = [variant[kind]["acceptance_length_interval"] for kind in kinds]
        errors = [
            [max(0.0, tau - _number(low)) for tau, (low, _) in zip(taus, bounds)],
            [max(0.0, _number(high) - tau) for tau, (_, high) in zip(taus, bounds)],
        ]
        places = [i + (number - (len(variants) - 1) / 2) * width for i in range(len(kinds))]
        axes.bar(places, taus, width, yerr=errors, capsize=2, label=method)
    axes.set_xticks(range(len(kinds)), [title_of(kind) for kind in kinds])
    axes.set(ylabel="tau (tokens a round), 95 % interval")


def _accepted_counts(axes, variants: Mapping):
    width = 0.8 / len(variants)
    for number, (method, variant) in enumerate(variants.items()):
        counts = variant["all"]["accepted_counts"]
        places = [i + (number - (len(variants) - 1) / 2) * width for i in range(len(counts))]
        axes.bar(places, [count / max(1, sum(counts)) for count in counts], width, label=method)
    axes.set(xlabel="proposals accepted in a round", ylabel="share of rounds")


def _tau_by_context(axes, variants: Mapping):
    for method, variant in variants.items():
        bins = variant["all"]["by_context"]
        axes.plot([one["up_to"] for one in bins], [one["acceptance_length"] for one in bins], marker="o", label=method)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set(xlabel="tokens of context, up to", ylabel="tau (tokens a round)")


def _number(figure: float | None) -> float:
    return math.nan if figure is None else figure


__all__ = ["draw_all"]
