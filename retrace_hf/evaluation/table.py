"""results.md of a benchmark: the table of ReTrace (arXiv 2608.29748, table 2), a block for each temperature."""

from collections.abc import Mapping, Sequence

from ..card import kinds_of, title_of


MISSING = "-"


def results_markdown(results: Mapping, plots: Sequence[str] = ()) -> str:
    """
    The tables of results.json, and what is to be known of their figures.

    Args:
        results (`Mapping`): of [`~retrace_hf.evaluation.benchmark.benchmark`].
        plots (`Sequence[str]`, *optional*): files of plots, shown below.
    """
    source = results["provenance"]
    parts = [f"# Drafters of {source['target']}"]
    for temperature, variants in results["temperatures"].items():
        parts += [f"## Temperature {temperature}", benchmark_table(variants), _note(temperature, variants, source)]
    parts += [_protocol(results), *(f"![{plot}]({plot})" for plot in plots)]
    return "\n\n".join(parts) + "\n"


def benchmark_table(variants: Mapping) -> str:
    """
    A Markdown table: a row for each method, a speed-up and a tau for each data set, and their macro averages.

    Args:
        variants (`Mapping`): by method and kind of prompt.
    """
    kinds = kinds_of({"variants": variants})[:-1]
    titles = [*map(title_of, kinds), "average"]
    head = ["method", *(f"{title} {figure}" for title in titles for figure in ("speed-up", "tau"))]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "--:|" * (len(head) - 1)]
    for method, variant in variants.items():
        speeds = [variant[kind]["speedup_median"] for kind in kinds]
        taus = [variant[kind]["acceptance_length"] for kind in kinds]
        pairs = zip([*speeds, _mean(speeds)], [*taus, _mean(taus)])
        cells = [text for speed, tau in pairs for text in (_shown(speed, "x"), _shown(tau))]
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _mean(figures: Sequence[float | None]) -> float | None:
    return None if any(_is_missing(figure) for figure in figures) else sum(figures) / len(figures)


def _is_missing(figure: float | None) -> bool:
    """A mean over no round: NaN as it is computed, `None` as it is read from results.json."""
    return figure is None or figure != figure


def _shown(figure: float | None, unit: str = "") -> str:
    return MISSING if _is_missing(figure) else f"{figure:.2f}{unit}"


def _note(temperature: str, variants: Mapping, source: Mapping) -> str:
    if temperature == "0":
        whole = variants["plain"]["all"]["prompts"]
        said = []
        for method, variant in variants.items():
            entry = variant["all"]
            if "differences" in entry:
                ties = f", {entry['near_ties']} of {len(entry['differences'])} differences at a tie"
                ties = ties if entry["differences"] else ""
                said.append(f"{method} {entry['equal_to_plain']} of {whole}{ties}")
        return f"Greedy. Texts equal to plain's: {'; '.join(said)}."
    return (
        f"Sampled, top-p {source['top_p']}, top-k {source['top_k']}. The methods draw from one distribution but write "
        "other texts, so no text is compared: tau is over each method's own texts, and the speed-up is by seconds for "
        "each token."
    )


def _protocol(results: Mapping) -> str:
    source, plain = results["provenance"], results["variants"]["plain"]
    counts = ", ".join(f"{title_of(kind)} {plain[kind]['prompts']}" for kind in kinds_of(results)[:-1])
    thinking = ", thinking off" if source["chat_template_kwargs"] else ""
    made_of = ", ".join(f"{name} {number}" for name, number in source["versions"].items())
    hashes = "; ".join(f"{name} {digest}" for name, digest in source["data"].items())
    return (
        "Speed-up: the median of the prompts' ratios over plain `generate()`, whole calls, prefill included. tau: "
        "tokens a target pass yields, pooled over rounds; the prefill is no round. The average is that of the data "
        f"sets. Prompts: {counts}; the turns of a chat follow plain's answers. At most {source['max_new_tokens']} new "
        f"tokens, batch 1, {source['dtype']}{thinking}, seed {source['seed']}, one warm-up, the methods by turns.\n\n"
        f"Made by `{source['command']}` with {made_of} on {source['hardware']}, {source['threads']} threads (data: "
        f"{hashes}). Intervals, acceptance at each slot and every prompt are in `results.json`."
    )


__all__ = ["benchmark_table", "results_markdown"]
