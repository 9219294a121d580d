"""
The benchmark of a target's drafters: every method answers every prompt, the methods by turns.

A folder of it holds `benchmark.json` (what is measured, and with what), `prompts.jsonl` (a line for each prompt and
temperature, kept as it is measured: a run that was stopped goes on), and at the end `results.json`, `results.md` and
the plots.

A prompt of several turns is a chat: the next turn follows plain's answer, whatever the other methods said, so that all
of them answer the same prompts. Each turn is generated from its whole text, without the cache of the one before.
"""

import hashlib
import importlib.util
import json
import logging
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from tqdm.auto import tqdm

from .. import __version__
from ..candidate_generator import check_pairing
from ..configuration_retrace import READS_TARGET_KV, RetraceConfig
from ..conversion import local_folder
from ..data.features import target_fingerprint
from ..data.prompts import check_chat_template, render_prompt
from ..files import write_text
from ..generation import AcceptanceStats
from ..measure import answer
from ..modeling_retrace import RetraceDrafter
from ..seeds import mixed_seed
from ..targets import DEFAULT_TARGET, load_target
from .data_sets import load_data_sets, rows_hash
from .equality import first_difference
from .kept import KeptLines
from .results import (
    bootstrap_speedup,
    command_line,
    describe_drafter,
    hardware,
    provenance,
    ratios_over,
    rows_by_kind,
    summarize,
    write_results,
)


logger = logging.getLogger(__name__)

NOTE, LINES, RESULTS, TABLE = "benchmark.json", "prompts.jsonl", "results.json", "results.md"
PLAIN, SIGNAL_OFF, PROMPT_LOOKUP, ASSISTANT = "plain", "signal_off", "prompt_lookup", "assistant"
WARM_UP_TOKENS = 16
PROMPT_LOOKUP_TOKENS = 10
CONTEXT_BINS = 64  # tokens of the first bin; each further one ends at twice as many


@dataclass
class BenchmarkOptions:
    """
    Options of [`benchmark`]; those of the command `retrace-hf benchmark`. The defaults are ReTrace's protocol (arXiv
    2608.29748) where it has one.

    > Parameters that control what is compared

    Args:
        drafter (`list[str]`): folders or Hub ids, ours or DFlash's; `NAME=FOLDER` names the row of the table.
        target (`str`, *optional*): Hub id or folder.
        prompt_lookup (`bool`, *optional*, defaults to `False`): transformers' prompt lookup too.
        assistant_model (`str`, *optional*): Hub id or folder of a small draft model, for transformers' assisted
            generation too.
        dtype (`str`, *optional*, defaults to `"float32"`), device (`str`, *optional*, defaults to `"cpu"`): of all.
        threads (`int`, *optional*): of torch; its own choice if left out.

    > Parameters that control on what

        data (`list[str]`): see [`~retrace_hf.evaluation.data_sets.load_data_sets`], as `limit`.
        seed (`int`, *optional*, defaults to 42): of the draw of prompts, and of sampling.
        temperature (`list[float]`, *optional*, defaults to `[0, 1]`): 0 is greedy.
        top_p (`float`, *optional*, defaults to 0.95), top_k (`int`, *optional*, defaults to 20): with a temperature.
        max_new_tokens (`int`, *optional*, defaults to 8192): tokens of an answer at most; fewer where the target's
            context ends before.

    > Parameters that control what is written

        output_dir (`str`): the folder; made if missing.
        plots (`bool`, *optional*, defaults to `True`), progress (`bool`, *optional*, defaults to `True`): show a bar.
    """

    drafter: list[str]
    data: list[str]
    output_dir: str
    target: str = DEFAULT_TARGET
    temperature: list[float] = field(default_factory=lambda: [0.0, 1.0])
    max_new_tokens: int = 8192
    limit: int | None = None
    seed: int = 42
    top_p: float = 0.95
    top_k: int = 20
    prompt_lookup: bool = False
    assistant_model: str | None = None
    dtype: str = "float32"
    device: str = "cpu"
    threads: int | None = None
    plots: bool = True
    progress: bool = True

    def __post_init__(self):
        for name in ("drafter", "data", "temperature"):
            if not getattr(self, name):
                raise ValueError(f"--{name} is missing; give at least one.")
        for name, least in (("max_new_tokens", 2), ("limit", 1), ("threads", 1), ("seed", 0), ("top_k", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                why = ": the prefill gives the first token" if name == "max_new_tokens" else ""
                raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {value}{why}.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"--top-p must be above 0 and at most 1, got {self.top_p}.")
        bad = [t for t in self.temperature if not 0 <= t <= 100]
        if bad:
            raise ValueError(f"--temperature must be from 0 to 100, got {bad[0]:g}; 0 is greedy.")
        self.temperature = sorted(set(map(float, self.temperature)))
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"--dtype must be float32, bfloat16 or float16, got {self.dtype!r}.")
        if self.plots and importlib.util.find_spec("matplotlib") is None:
            raise ImportError("The plots need matplotlib: pip install 'retrace_hf[benchmark]', or give --no-plots.")

    def sampling(self, temperature: float) -> dict:
        """What `generate()` is told at this temperature."""
        if not temperature:
            return {"do_sample": False}
        return {"do_sample": True, "temperature": temperature, "top_p": self.top_p, "top_k": self.top_k}


def benchmark(options: BenchmarkOptions) -> dict:
    """
    Measures, or goes on with it, and writes the folder. See the README's section "Compare".

    Args:
        options ([`BenchmarkOptions`]): what to do.

    Returns:
        `dict`: the content of `results.json`. `mismatches` there counts greedy answers that were not plain's, those
        that part at a tie included.

    Raises:
        `ValueError`: options, data or drafters that will not do, or a folder that holds something else.
        `OSError`: no such file, drafter or target, or a set that cannot be had from the Hub.
    """
    folder = Path(options.output_dir)
    _check_folder(folder)
    rows, data = load_data_sets(options.data, options.limit, options.seed)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    folders = _named_folders(options.drafter)
    arms = {name: describe_drafter(place) for name, place in folders.items()}
    target, tokenizer = load_target(options.target, dtype=dtype, device=options.device)
    drafters = {name: load_drafter(place, target).to(options.device) for name, place in folders.items()}
    check_chat_template(tokenizer)
    for name, drafter in drafters.items():
        try:
            check_pairing(drafter, target, target.generation_config)
        except ValueError as error:
            raise ValueError(f"--drafter {folders[name]}: {error}") from None
    methods = {PLAIN: {}, **_drafted(drafters), **_others(options, target, tokenizer)}
    bench = Bench(target, tokenizer, methods, options)
    bench.check_lengths(rows)
    settings = _settings(options, bench, arms)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / ".lock", timeout=0):
            _claim(folder, settings)
            kept = KeptLines(folder / LINES, settings)
            lines = {t: bench.measure(rows, kept, t) for t in options.temperature}
            results = collect(lines, list(methods), list(drafters))
            results["provenance"] = _provenance(options, bench, settings, data, arms)
            _write(folder, results, options.plots)
            return results
    except Timeout:
        raise OSError(f"Another run is writing to {folder}; wait for it, or give another --output-dir.") from None


# -- who is compared -------------------------------------------------------------------------------------------------


def _named_folders(given: Sequence[str]) -> dict[str, Path]:
    """By name, the folders of the drafters; those on the Hub are fetched."""
    folders = {}
    for one in given:
        name, named, path = one.partition("=")
        if not named or os.path.isdir(one):  # folders of runs are often called lr=0.1
            name, path = "", one
        place = local_folder(path)
        name = name or (place.resolve() if os.path.isdir(path) else Path(path)).name
        if not (place / "config.json").is_file():
            raise FileNotFoundError(f"--drafter {one}: {place} holds no config.json, so there is no drafter in it.")
        if name in (PLAIN, SIGNAL_OFF, PROMPT_LOOKUP, ASSISTANT) or name.endswith(f"_{SIGNAL_OFF}"):
            raise ValueError(f"--drafter {one}: {name} is the name of another row; give it one as NAME={path}.")
        if name in folders:
            raise ValueError(f"--drafter {one}: two drafters are called {name}; name them, as NAME={path}.")
        folders[name] = place
    return folders


def load_drafter(folder: str | os.PathLike, target) -> RetraceDrafter:
    """A drafter of ours, or a DFlash of another layout as it is, in the target's dtype."""
    raw = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
    if raw.get("model_type") == RetraceConfig.model_type:
        return RetraceDrafter.from_pretrained(folder, dtype=target.dtype).eval()
    return RetraceDrafter.from_dflash(folder, target=target, conditioning="none").to(target.dtype).eval()


def _drafted(drafters: dict[str, RetraceDrafter]) -> dict[str, dict]:
    """Options of each drafter's method, and of transformers' own DFlash generator on the same weights, which gives a
    drafter none of the target's keys."""
    methods = {}
    for name, drafter in drafters.items():
        if drafter.config.context_fusion not in READS_TARGET_KV:
            off = SIGNAL_OFF if len(drafters) == 1 else f"{name}_{SIGNAL_OFF}"
            methods[off] = {"drafter": drafter, "speculation_type": "dflash"}
        methods[name] = {"drafter": drafter}
    return methods


def _others(options: BenchmarkOptions, target, tokenizer) -> dict[str, dict]:
    methods = {}
    if options.prompt_lookup:
        methods[PROMPT_LOOKUP] = {"prompt_lookup_num_tokens": PROMPT_LOOKUP_TOKENS}
    if options.assistant_model is not None:
        small, its = load_target(options.assistant_model, dtype=target.dtype, device=options.device)
        sizes = [model.config.get_text_config(decoder=True).vocab_size for model in (target, small)]
        if its.get_vocab() != tokenizer.get_vocab() or len(set(sizes)) > 1:
            raise ValueError(
                f"--assistant-model {options.assistant_model} has another vocabulary than the target; give a small "
                "model with the target's own tokenizer."
            )
        methods[ASSISTANT] = {"assistant_model": small}
    return methods


# -- measuring -------------------------------------------------------------------------------------------------------


class Bench:
    """A target and the methods that answer for it, by name, with their options of [`~retrace_hf.measure.answer`]."""

    def __init__(self, target, tokenizer, methods: dict[str, dict], options: BenchmarkOptions):
        self.target, self.tokenizer, self.methods, self.options = target, tokenizer, methods, options
        self.context = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)
        # Templates without a thinking mode are not told of one.
        self.template_kwargs = {"enable_thinking": False} if "enable_thinking" in self.template else {}

    @property
    def template(self) -> str:
        return self.tokenizer.get_chat_template()

    def check_lengths(self, rows: Sequence[dict]):
        """Raises a `ValueError` if a prompt leaves the target no room for an answer."""
        for row in rows:
            prompt = self._render([{"role": "user", "content": row["turns"][0]}])
            if self._room(prompt) < 2:
                raise ValueError(
                    f"Prompt {row['id']} has {len(prompt)} tokens and the target's context {self.context}, which "
                    "leaves no room for an answer; leave the prompt out."
                )

    def measure(self, rows: Sequence[dict], kept: KeptLines, temperature: float) -> list[dict]:
        """A line for each prompt, measured or read from an earlier run."""
        ids = [f"{temperature:g}/{row['kind']}/{row['id']}/{rows_hash([row])[-8:]}" for row in rows]
        if not all(row_id in kept for row_id in ids):
            self._warm_up(rows[0], temperature)
        title = f"temperature {temperature:g}"
        bar = tqdm(list(zip(ids, rows)), desc=title, unit="prompt", disable=not self.options.progress)
        for number, (row_id, row) in enumerate(bar):
            if row_id not in kept:
                turns = self._chat(row, number, temperature)
                kept.add({"id": row_id, "prompt": row["id"], "kind": row["kind"], "turns": turns})
        return [kept[row_id] for row_id in ids]

    def _warm_up(self, row: dict, temperature: float):
        prompt = self._render([{"role": "user", "content": row["turns"][0]}])
        for method in self.methods:
            self._run(method, prompt, min(WARM_UP_TOKENS, self._room(prompt)), temperature)

    def _chat(self, row: dict, number: int, temperature: float) -> list[dict]:
        """The turns of a chat; those that the target's context has no room for are missing."""
        messages, turns = [], []
        own = int(rows_hash([row])[-8:], 16)  # what is sampled goes by the prompt, not by its place among others
        for turn, question in enumerate(row["turns"]):
            messages.append({"role": "user", "content": question})
            prompt = self._render(messages)
            if self._room(prompt) < 2:
                logger.warning("A chat ends before its turn %d: the target's context is full.", turn + 1)
                break
            seeds = (self.options.seed, own, turn)
            turns.append(self._answer_by_turns(prompt, number + turn, seeds, temperature))
            ids = turns[-1]["methods"][PLAIN]["ids"]
            messages.append({"role": "assistant", "content": self.tokenizer.decode(ids, skip_special_tokens=True)})
        return turns

    def _answer_by_turns(self, prompt: list[int], number: int, seeds: tuple[int, ...], temperature: float) -> dict:
        """All methods on one prompt, one after the other. The order rotates with `number`, so that none is always
        first."""
        names = list(self.methods)
        start = number % len(names)
        order = names[start:] + names[:start]
        found = {}
        for method in order:
            mixed_seed(*seeds)
            run = self._run(method, prompt, self._room(prompt), temperature)
            found[method] = {
                "ids": run.ids[0],
                "seconds": run.seconds,
                "accepted": run.stats.accepted_per_round,
                "proposed": run.stats.proposed_per_round,
            }
        if not temperature:
            for method in names[1:]:
                answers = found[method]["ids"], found[PLAIN]["ids"]
                found[method]["difference"] = first_difference(self.target, prompt, *answers)
        return {"prompt_tokens": len(prompt), "order": order, "methods": found}

    def _run(self, method: str, prompt: list[int], new_tokens: int, temperature: float):
        ids = torch.tensor([prompt], device=self.target.device)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        return answer(self.target, inputs, new_tokens, **self.methods[method], **self.options.sampling(temperature))

    def _render(self, messages: list[dict]) -> list[int]:
        return render_prompt(self.tokenizer, messages, **self.template_kwargs)

    def _room(self, prompt: list[int]) -> int:
        """New tokens that are asked for behind this prompt."""
        wanted = self.options.max_new_tokens
        return wanted if self.context is None else min(wanted, self.context - len(prompt))


# -- the folder ------------------------------------------------------------------------------------------------------


def _settings(options: BenchmarkOptions, bench: Bench, arms: dict) -> dict:
    """All that a line depends on besides its prompt and temperature: seconds belong to a machine, and seconds and
    texts to a state of the code."""
    names = ("max_new_tokens", "top_p", "top_k", "seed", "dtype", "device")
    return {
        "target_fingerprint": target_fingerprint(bench.target),
        "drafters": {name: {"weights": arm["weights"], "config": arm["config"]} for name, arm in arms.items()},
        "methods": list(bench.methods),
        "assistant_fingerprint": target_fingerprint(bench.methods[ASSISTANT]["assistant_model"])
        if ASSISTANT in bench.methods
        else None,
        **{name: getattr(options, name) for name in names},
        "threads": torch.get_num_threads(),
        "hardware": hardware(bench.target.device),
        "python": platform.python_version(),
        "versions": {"retrace_hf": __version__, **{name: version(name) for name in ("torch", "transformers")}},
        "code": _code_hash(),
        "chat_template": "sha256:" + hashlib.sha256(bench.template.encode()).hexdigest(),
        "chat_template_kwargs": bench.template_kwargs,
    }


def _code_hash() -> str:
    """Of this package."""
    digest = hashlib.sha256()
    root = Path(__file__).resolve().parents[1]
    for file in sorted(root.rglob("*.py")):
        digest.update(file.relative_to(root).as_posix().encode() + b"\n" + file.read_bytes())
    return "sha256:" + digest.hexdigest()


def _check_folder(folder: Path):
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output-dir {folder} is a file; give a folder.")
    if not (folder / NOTE).is_file() and any((folder / name).exists() for name in (RESULTS, TABLE, LINES)):
        raise ValueError(f"--output-dir {folder} holds results of something else; give another folder.")


def _claim(folder: Path, settings: dict):
    """Writes down what is measured here, or checks that it is the same. Prompts and temperatures may be added."""
    settings = json.loads(json.dumps(settings))
    if (folder / NOTE).is_file():
        try:
            before = dict(json.loads((folder / NOTE).read_text(encoding="utf-8"))["settings"])
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{folder / NOTE} is damaged or somebody else's; give another --output-dir.") from None
        changed = "; ".join(
            f"{name} was {before.get(name)!r}, now {settings.get(name)!r}"
            for name in {**before, **settings}
            if before.get(name) != settings.get(name)
        )
        if changed:
            raise ValueError(
                f"--output-dir {folder} holds another run: {changed}. Give another folder, or delete this one."
            )
    write_text(folder / NOTE, json.dumps({"settings": settings, "command": command_line()}, indent=2) + "\n")


def _provenance(options: BenchmarkOptions, bench: Bench, settings: dict, data: dict, arms: dict) -> dict:
    names = ("dtype", "device", "threads", "max_new_tokens", "seed", "hardware", "chat_template", "code")
    temperature = options.temperature[0]
    return provenance(
        [],
        data=data,
        target=bench.target.name_or_path,
        arms=arms,
        temperature=temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        chat_template_kwargs=bench.template_kwargs,
        **{name: settings[name] for name in names},
        note=f"variants are those at temperature {temperature:g}; acceptance_length is pooled over rounds, "
        "acceptance_length_by_request the mean of the prompts' own; speed-ups are over plain on the same prompts, by "
        "the seconds of whole generate() calls for each token; intervals are 95 %, bootstrap over prompts",
    )


def _write(folder: Path, results: dict, plots: bool):
    from .table import results_markdown

    write_results(folder / RESULTS, results)
    drawn = []
    if plots:
        from .plots import draw_all

        drawn = draw_all(results, folder)
    write_text(folder / TABLE, results_markdown(results, drawn))


# -- what was measured -----------------------------------------------------------------------------------------------


def collect(lines: dict[float, list[dict]], methods: Sequence[str], drafters: Sequence[str]) -> dict:
    """
    results.json, but for its provenance.

    Args:
        lines (`dict[float, list[dict]]`): by temperature, one for each prompt.
        methods (`Sequence[str]`): all of them, plain first.
        drafters (`Sequence[str]`): those of them that are drafters.

    Returns:
        `dict`: `temperatures.{temperature}.{method}.{kind}`, each as [`summarize`] gives it and with its speed;
        `variants`, which is the first of them; `acceptance_length_over_{drafter}`, the first one's tau under the
        others', where there are several; `mismatches`; and `prompts`, every one of them.
    """
    temperatures = {f"{t:g}": _variants(of_t, methods) for t, of_t in lines.items()}
    first = next(iter(lines))
    kinds = [line["kind"] for line in lines[first]]
    results = {"variants": temperatures[f"{first:g}"]}
    if len(drafters) > 1:
        stats = {name: [_stats(line, name) for line in lines[first]] for name in drafters}
        results[f"acceptance_length_over_{drafters[0]}"] = ratios_over(drafters[0], stats, kinds)
    greedy = temperatures.get("0", {})
    results["mismatches"] = {m: len(v["all"]["differences"]) for m, v in greedy.items() if m != PLAIN}
    results["temperatures"] = temperatures
    results["prompts"] = [_of_prompt(line, t, methods) for t, of_t in lines.items() for line in of_t]
    return results


def _variants(lines: list[dict], methods: Sequence[str]) -> dict:
    kinds = [line["kind"] for line in lines]
    stats = {m: [_stats(line, m) for line in lines] for m in methods}
    seconds = {m: [_seconds(line, m) for line in lines] for m in methods}
    tokens = {m: [_new_tokens(line, m) for line in lines] for m in methods}
    variants = {}
    for method in methods:
        variants[method] = summarize(stats[method], kinds, seconds[method])
        for kind, chosen in rows_by_kind(kinds).items():
            entry = variants[method][kind]
            own = [stats[method][i].acceptance_length for i in chosen if stats[method][i].rounds]
            entry["acceptance_length_by_request"] = sum(own) / len(own) if own else None
            entry["new_tokens"] = sum(tokens[method][i] for i in chosen)
            each = (seconds[method], tokens[method], seconds[PLAIN], tokens[PLAIN])
            entry |= bootstrap_speedup(*([figures[i] for i in chosen] for figures in each))
            entry["accepted_counts"] = _counts(stats[method][i] for i in chosen)
            entry["by_context"] = _by_context([lines[i] for i in chosen], method)
            if method != PLAIN and "difference" in lines[0]["turns"][0]["methods"][method]:
                entry |= _equality([lines[i] for i in chosen], method)
    return variants


def _stats(line: dict, method: str) -> AcceptanceStats:
    """The rounds of a prompt, its turns pooled."""
    runs = [turn["methods"][method] for turn in line["turns"]]
    return AcceptanceStats.pooled(AcceptanceStats(run["accepted"], run["proposed"], calls=1) for run in runs)


def _seconds(line: dict, method: str) -> float:
    return sum(turn["methods"][method]["seconds"] for turn in line["turns"])


def _new_tokens(line: dict, method: str) -> int:
    return sum(len(turn["methods"][method]["ids"]) for turn in line["turns"])


def _counts(stats) -> list[int]:
    """Rounds that accepted 0, 1, 2, ... proposals."""
    accepted = AcceptanceStats.pooled(stats).accepted_per_round
    return [accepted.count(number) for number in range(max(accepted, default=-1) + 1)]


def _by_context(lines: list[dict], method: str) -> list[dict]:
    """tau of the rounds by how many tokens stood before their anchor, in bins that double."""
    bins: dict[int, list[int]] = {}
    for turn in (turn for line in lines for turn in line["turns"]):
        run = turn["methods"][method]
        # All but what the rounds yielded stood there before the first one: the prompt and what the prefill gave, whose
        # last token is the anchor.
        before = turn["prompt_tokens"] + len(run["ids"]) - sum(run["accepted"]) - len(run["accepted"]) - 1
        for accepted in run["accepted"]:
            end = CONTEXT_BINS
            while end <= before:
                end *= 2
            bins.setdefault(end, []).append(accepted + 1)
            before += accepted + 1
    return [
        {"up_to": end, "rounds": len(yields), "acceptance_length": sum(yields) / len(yields)}
        for end, yields in sorted(bins.items())
    ]


def _equality(lines: list[dict], method: str) -> dict:
    """How many prompts had plain's text in all turns, and where the others part."""
    differences = [
        {"id": line["prompt"], "turn": number, **difference}
        for line in lines
        for number, turn in enumerate(line["turns"], start=1)
        if (difference := turn["methods"][method]["difference"])
    ]
    return {
        "equal_to_plain": len(lines) - len({d["id"] for d in differences}),
        "near_ties": sum(d["tie"] for d in differences),
        "differences": differences,
    }


def _of_prompt(line: dict, temperature: float, methods: Sequence[str]) -> dict:
    found = {}
    for method in methods:
        stats = _stats(line, method)
        found[method] = {
            "new_tokens": _new_tokens(line, method),
            "rounds": stats.rounds,
            "acceptance_length": stats.acceptance_length,
            "acceptance_at": stats.acceptance_at,
            "seconds": _seconds(line, method),
        }
        if method != PLAIN and not temperature:
            found[method]["equal_to_plain"] = not any(t["methods"][method]["difference"] for t in line["turns"])
    about = {"id": line["prompt"], "kind": line["kind"], "temperature": temperature, "turns": len(line["turns"])}
    return {**about, "methods": found}


def mismatch_report(results: dict) -> list[str]:
    """A line for each greedy answer that was not plain's, and whether it parts at a tie."""
    return [
        f"{method}, prompt {d['id']}, turn {d['turn']}: not plain's from token {d['at'] + 1}, where the two logits "
        f"are {d['gap']:.2g} apart ({'a tie' if d['tie'] else 'no tie'})"
        for method, variant in results["temperatures"].get("0", {}).items()
        for d in variant["all"].get("differences", [])
    ]


__all__ = ["BenchmarkOptions", "benchmark", "collect", "mismatch_report"]
