"""The model card of a drafter: README.md rendered from config.json, results.json and training.json in its folder.

Every figure on it is read from these files. What they cannot know (base model, licence, data sets) is given once and
kept from the card that is there.
"""

import hashlib
import json
import os
import re
from pathlib import Path

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from safetensors import safe_open

from .files import write_text
from .redaction import redacted


CARD = "README.md"
MARKER = (
    "<!-- Rendered by `retrace-hf card` from config.json, results.json and training.json. To keep an edit, delete "
    "this line: the card is then left alone. -->"
)
TAGS = ["speculative-decoding", "retrace", "dflash"]

# By kind of prompt: name, Hub id, config and split.
DATA_SETS = {
    "mt-bench": ("MT-Bench", "HuggingFaceH4/mt_bench_prompts", "default", "train"),
    "humaneval": ("HumanEval", "openai/openai_humaneval", "openai_humaneval", "test"),
    "gsm8k": ("GSM8K", "openai/gsm8k", "main", "test"),
    "math500": ("MATH-500", "HuggingFaceH4/MATH-500", "default", "test"),
    "alpaca": ("Alpaca", "tatsu-lab/alpaca", "default", "train"),
    "livecodebench": ("LiveCodeBench", "livecodebench/code_generation_lite", "default", "test"),
}

CONDITIONINGS = {
    "corrected": "conditioned on its rejected suffix (ReTrace, arXiv 2608.29748)",
    "gated": "conditioned on the drafts of its rejected suffix alone, an ablation of ReTrace (arXiv 2608.29748)",
    "overwrite": "whose next block starts from its rejected drafts, an ablation of ReTrace (arXiv 2608.29748)",
    "none": "without memory of what was rejected",
}

DESCRIPTION = """# {title}

{what}

It serves {target} and no other target: it reads that model's
{reads} and borrows its embeddings and LM head. With greedy decoding in float32 the text is what the target
writes alone, token for token; under sampling the law of the text is the target's.

| | |
|---|---|
{shape}

## How to use it

```python
import retrace_hf
from transformers import AutoModelForCausalLM, AutoTokenizer

target = AutoModelForCausalLM.from_pretrained("{base_model}")
tokenizer = AutoTokenizer.from_pretrained("{base_model}")
drafter = retrace_hf.RetraceDrafter.from_pretrained("{repo_id}")
inputs = tokenizer("Speculative decoding is", return_tensors="pt")
with retrace_hf.record_acceptance() as stats:
    output = target.generate(**inputs, assistant_model=drafter, do_sample=False, max_new_tokens=64)
print(tokenizer.decode(output[0]), stats.acceptance_length)
```

Where retrace_hf is not installed, the code that lies beside the weights does the same:

```python
from transformers import AutoModel

drafter = AutoModel.from_pretrained("{repo_id}", trust_remote_code=True)
target.generate(**inputs, assistant_model=drafter, do_sample=False, max_new_tokens=64)
# or in one step
target.generate(
    **inputs, custom_generate="{repo_id}", trust_remote_code=True, do_sample=False, max_new_tokens=64
)
```
"""

LIMITS = """## Limits

- One sequence at a time: batches and beams are refused, as in transformers' own assisted generation.
- The target's cache must be one that can be cropped; targets with recurrent layers need transformers 5.25 or newer.
- In bfloat16 a pass over several tokens can flip a near-tie between the two most likely tokens, as with any
  speculative decoding.
- How much is accepted depends on the text: another domain, language, chat template or thinking mode than it was
  trained on accepts less. Measure yours with `record_acceptance()`.
"""


def render_card(
    folder: str | os.PathLike,
    base_model: str | None = None,
    license: str | None = None,
    datasets: list[str] | None = None,
    repo_id: str | None = None,
    tags: list[str] | None = None,
) -> str:
    """
    The card of the drafter in a folder.

    Args:
        folder (`str` or `os.PathLike`): Has config.json, and weights, results.json and training.json where they exist.
        base_model (`str`, *optional*): Hub id of the target; training.json's, or the present card's.
        license (`str`, *optional*): As the Hub names it, `apache-2.0` for instance; the present card's.
        datasets (`list[str]`, *optional*): Hub ids of the data it was trained on; the present card's.
        repo_id (`str`, *optional*): Where it is published; the present card's, or the folder's name in `org`.
        tags (`list[str]`, *optional*): More tags than a drafter's own; the present card's.

    Raises:
        ValueError: no drafter is in the folder, its files cannot be read, or its results are those of other weights.
    """
    folder = Path(folder)
    try:
        return _render(folder, base_model, license, datasets, repo_id, tags)
    except KeyError as error:
        raise ValueError(
            f"A file of {folder} lacks the entry {error}, so no card can be made of it; results.json is written by "
            "examples/evaluate_drafters.py or retrace-hf benchmark, training.json by examples/train_retrace.py."
        ) from error


def _render(folder: Path, base_model, license, datasets, repo_id, tags) -> str:
    config = _read_json(folder / "config.json")
    if config is None or config.get("model_type") != "retrace":
        raise ValueError(f"There is no drafter in {folder}: it needs the config.json of one.")
    results, training = _read_json(folder / "results.json"), _read_json(folder / "training.json")
    kept = _metadata(folder / CARD)
    name = repo_id or kept.get("model_name") or folder.resolve().name
    base_model = base_model or as_hub_id((training or {}).get("script", {}).get("target")) or kept.get("base_model")
    if isinstance(base_model, list):
        base_model = base_model[0]
    arm = None if results is None else _arm_of(folder, results, training)
    data = ModelCardData(
        license=license or kept.get("license"),
        license_name=None if license else kept.get("license_name"),
        license_link=None if license else kept.get("license_link"),
        language=kept.get("language"),
        base_model=base_model,
        datasets=datasets or kept.get("datasets"),
        library_name="transformers",
        tags=list(dict.fromkeys([*TAGS, *(kept.get("tags") or []), *(tags or [])])),
        model_name=name,
        eval_results=None if arm is None else _eval_results(results, arm),
    )
    body = [
        _describe(folder, config, name, base_model),
        "## Results\n\nNot measured.\n" if arm is None else _results(results, arm),
        _training(training, results),
        LIMITS,
    ]
    head = f"---\n{data.to_yaml(line_break=chr(10))}\n---\n{MARKER}\n"
    return redacted(head + "\n".join(part for part in body if part))


def write_card(folder: str | os.PathLike, overwrite: bool = False, **options) -> str:
    """Renders the card of a folder into its README.md, and returns it. Options as in [`render_card`].

    Raises:
        ValueError: as in [`render_card`], or README.md is somebody's own and `overwrite` is not set.
    """
    path, card = Path(folder, CARD), render_card(folder, **options)
    if not overwrite and path.is_file() and not is_rendered(read := path.read_text(encoding="utf-8")) and read.strip():
        raise ValueError(f"{path} was not rendered by retrace-hf card; --overwrite replaces it.")
    write_text(path, card)
    return card


def card_is_current(folder: str | os.PathLike, **options) -> bool:
    """Whether README.md is what [`render_card`] gives."""
    path = Path(folder, CARD)
    return path.is_file() and path.read_bytes() == render_card(folder, **options).encode()


def is_rendered(card: str) -> bool:
    """Whether a card's text was rendered here, and not edited for good since."""
    return MARKER in card


# -- what the files say ----------------------------------------------------------------------------------------------


def _read_json(path: Path) -> dict | None:
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}).") from error


def _metadata(path: Path) -> ModelCardData:
    """Of the card that is there; empty where there is none."""
    if not path.is_file():
        return ModelCardData()
    try:
        return ModelCard.load(path).data
    except ValueError as error:
        raise ValueError(f"The metadata at the head of {path} cannot be read ({error}); mend or delete it.") from error


def as_hub_id(name_or_path: str | None) -> str | None:
    """A model's name if it is one of the Hub, and no folder on somebody's disk."""
    known = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name_or_path or "")
    return name_or_path if known and not os.path.isdir(name_or_path) and not name_or_path.endswith(".gguf") else None


def _arm_of(folder: Path, results: dict, training: dict | None) -> str:
    """Which of the measured arms the drafter in this folder is: the one with its weights. A copy in another dtype is
    known by the note of its training."""
    arms = (results.get("provenance") or {}).get("arms") or {}
    weights = folder / "model.safetensors"
    if weights.is_file():
        found = "sha256:" + hashlib.sha256(weights.read_bytes()).hexdigest()
        for name, arm in arms.items():
            if arm.get("weights") == found and name in results["variants"]:
                return name
    for name, arm in arms.items():
        if training and arm.get("training") == training and name in results["variants"]:
            return name
    raise ValueError(
        f"{folder / 'results.json'} was not measured with the weights of {folder}: none of its arms "
        f"({', '.join(sorted(arms)) or 'there are none'}) has their hash. Measure these weights, or remove the file."
    )


def kinds_of(results: dict) -> list[str]:
    """Kinds of prompts, those that papers report first, then `"all"`."""
    found = {kind for variant in results["variants"].values() for kind in variant} - {"all"}
    return [k for k in DATA_SETS if k in found] + sorted(found - set(DATA_SETS)) + ["all"]


def title_of(kind: str) -> str:
    return DATA_SETS[kind][0] if kind in DATA_SETS else kind


def _eval_results(results: dict, arm: str) -> list[EvalResult]:
    played = results["variants"][arm]
    generated = results["variants"].get(f"{arm}_generate", played)
    metrics = []
    for kind in kinds_of(results)[:-1]:
        name, hub_id, config, split = DATA_SETS.get(kind, (kind, kind, None, None))
        for variant, metric, title, value in (
            (played, "acceptance_length", "tau, pooled over rounds", lambda e: e["acceptance_length"]),
            (generated, "speculative_speedup", "times plain generate(), median", lambda e: e.get("speedup_median")),
            (generated, "match_rate", "texts equal to plain generate()'s", _match_rate),
        ):
            entry = variant.get(kind)
            if entry is None or value(entry) is None:
                continue
            metrics.append(
                EvalResult(
                    task_type="text-generation",
                    dataset_type=hub_id,
                    dataset_name=name,
                    dataset_config=config,
                    dataset_split=split,
                    metric_type=metric,
                    metric_name=title,
                    metric_value=round(value(entry), 3),
                    metric_args={"prompts": entry["prompts"]},
                )
            )
    return metrics


def _match_rate(entry: dict) -> float | None:
    return entry["equal_to_plain"] / entry["prompts"] if "equal_to_plain" in entry else None


# -- the parts of the card -------------------------------------------------------------------------------------------


# By context_fusion: what a drafter is built on, and what it reads of its target.
CONTEXTS = {
    "shared": ("DFlash, arXiv 2602.06036", "hidden states"),
    "layerwise": ("DFlash, arXiv 2602.06036, with the context of DFlare, arXiv 2606.02091", "hidden states"),
    "kv": ("DFlash, arXiv 2602.06036, on the target's keys and values as KVShot, arXiv 2604.26412", "keys and values"),
    "hybrid": (
        "DFlash, arXiv 2602.06036, with the target's keys and values beside as KVShot, arXiv 2604.26412",
        "hidden states, keys and values",
    ),
}


def _layers(ids: list[int], config: dict) -> str:
    return f"target layers {', '.join(map(str, ids))} of {config['num_target_layers']}"


def _describe(folder: Path, config: dict, name: str, base_model: str | None) -> str:
    conditioning = CONDITIONINGS.get(config["conditioning"], f"with conditioning {config['conditioning']!r}")
    layers, block = config["num_hidden_layers"], config["block_size"]
    rows = {
        "layers": layers,
        "block": f"{block} slots, {block - 1} of them drafted",
        **({"taps": _layers(config["target_layer_ids"], config)} if config["target_layer_ids"] else {}),
        "mask token": config["mask_token_id"],
        "signal": f"`conditioning={config['conditioning']!r}`",
        "proposals under sampling": f"`proposal={config.get('proposal', 'argmax')!r}`",
    }
    if config.get("context_fusion", "shared") != "shared":
        rows["context"] = f"`context_fusion={config['context_fusion']!r}`"
    if config.get("target_kv_layer_ids"):
        rows["keys and values"] = f"{_layers(config['target_kv_layer_ids'], config)}, RoPE {config['context_kv_rope']}"
    if config.get("context_window"):
        rows["context window"] = f"{config['context_window']} tokens"
    if config.get("item_slots"):
        rows["item slots"] = config["item_slots"]
    if config.get("step_embeddings"):
        rows["step embeddings"] = "one for each slot of a block"
    if config.get("draft_vocab_size"):
        rows["draft vocabulary"] = f"{config['draft_vocab_size']:,} of the target's {config['vocab_size']:,} tokens"
    count, dtypes = _weights(folder)
    if count:
        loaded = config.get("dtype")
        note = f", stored in {' and '.join(dtypes)}"
        size = f"{count / 1e6:.1f} million" if count >= 1e5 else f"{count:,}"
        rows["parameters"] = f"{size}{note}" + (f", loaded as {loaded}" if loaded and [loaded] != dtypes else "")
    built_on, reads = CONTEXTS[config.get("context_fusion", "shared")]
    return DESCRIPTION.format(
        reads=reads,
        title=_heading(config, name, base_model),
        what=f"A block drafter for speculative decoding ({built_on}), {conditioning}.\n"
        "One target pass checks the whole block that it proposes.",
        target=f"[{base_model}](https://huggingface.co/{base_model})"
        if base_model
        else "the model it was trained for",
        shape="\n".join(f"| {key} | {value} |" for key, value in rows.items()),
        base_model=base_model or "TARGET",
        repo_id=name if "/" in name else f"org/{name}",
    )


def _heading(config: dict, name: str, base_model: str | None) -> str:
    kind = "DFlash" if config["conditioning"] == "none" else "ReTrace"
    return (
        f"{kind} drafter for {base_model.split('/')[-1]}" if base_model else f"{name.split('/')[-1]}, a {kind} drafter"
    )


def _weights(folder: Path) -> tuple[int, list[str]]:
    """How many parameters the folder's weights have, and their dtypes."""
    names = {"F16": "float16", "F32": "float32", "BF16": "bfloat16"}
    count, dtypes = 0, set()
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as weights:
            for key in weights.keys():  # noqa: SIM118 (safe_open is no dict)
                part = weights.get_slice(key)
                if part.get_dtype() == "I64":  # a table of tokens
                    continue
                size = 1
                for extent in part.get_shape():
                    size *= extent
                count += size
                dtypes.add(names.get(part.get_dtype(), part.get_dtype().lower()))
    return count, sorted(dtypes)


def _results(results: dict, arm: str) -> str:
    source = results["provenance"]
    kinds = ", ".join(title_of(kind) for kind in kinds_of(results)[:-1])
    count = results["variants"][arm]["all"]["prompts"]
    made_of = ", ".join(f"{name} {number}" for name, number in (source.get("versions") or {}).items())
    hashes = "; ".join(f"{name} {digest}" for name, digest in (source.get("data") or {}).items())
    temperature = source.get("temperature", 0)
    how = f"Sampled at temperature {temperature:g}" if temperature else "Greedy"
    protocol = (
        f"{how}, {source.get('dtype', 'float32')}, batch 1, {source['max_new_tokens']} new tokens, {count} prompts "
        f"({kinds}). tau counts the target's token, pooled over rounds; in brackets the 95 % interval over prompts. "
        f"This drafter is the row `{arm}`."
    )
    made = f"Made by `{source['command']}` with {made_of} on {source['hardware']} (data: {hashes}"
    target = source.get("target")
    made += f"; target: {target})." if target and not os.path.isabs(target) else ")."
    parts = [
        protocol,
        results_table(results),
        _rows_note(results, arm),
        _equality_note(results, arm),
        _cost_note(results),
    ]
    parts += ["\n".join(f"- {caveat}" for caveat in results.get("caveats", [])), made]
    return "## Results\n\n" + "\n\n".join(part for part in parts if part) + "\n"


def results_table(results: dict) -> str:
    """Every variant's tau by kind of prompt, its ratio to the baseline's where there is one, and its speed."""
    kinds = kinds_of(results)
    prefix = "acceptance_length_over_"
    baseline, ratios = next(
        ((k.removeprefix(prefix), v) for k, v in results.items() if k.startswith(prefix)), (None, {})
    )
    head = ["variant", *(f"tau {kind}" for kind in kinds)]
    head += [f"tau over {baseline}"] * (baseline is not None) + ["x plain (median)"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    whole = max(variant["all"]["prompts"] for variant in results["variants"].values())
    for name, variant in results["variants"].items():
        taus = [variant.get(k, {}).get("acceptance_length") for k in kinds]  # None: not measured, or not a round
        cells = ["" if tau is None else f"{tau:.3f}" for tau in taus]
        cells[-1] += _interval(variant["all"].get("acceptance_length_interval"))
        if baseline is not None:
            ratio = ratios.get(name, {}).get("all")
            cells.append("" if ratio is None else f"{ratio['ratio']:.3f}{_interval(ratio['interval'])}")
        speed = variant["all"].get("speedup_median")
        cells.append("" if speed is None else f"{speed:.2f}")
        prompts = variant["all"]["prompts"]
        note = f" ({prompts} prompts)" if prompts < whole else ""
        lines.append(f"| {name}{note} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _interval(bounds: list[float] | None) -> str:
    return "" if bounds is None or None in bounds else " [{:.3f}, {:.3f}]".format(*bounds)


def _rows_note(results: dict, arm: str) -> str:
    one = "signal_off"  # where there is one drafter; of several, each has its own
    off = f"{arm}_{one}"
    notes = {
        "stage1": "`stage1` is the DFlash backbone that the further training started from.",
        "sft": "`sft` is the control: the same further training without the signal.",
        f"{arm}_generate": f"`{arm}_generate` is `{arm}` run by `generate()` on the timed prompts.",
        one: f"`{one}` is transformers' own DFlash generator on this drafter's weights.",
        off: f"`{off}` is transformers' own DFlash generator on this drafter's weights.",
        "prompt_lookup": "`prompt_lookup` is transformers' prompt lookup, which needs no drafter.",
        "assistant": "`assistant` is transformers' assisted generation with a small draft model.",
    }
    said = [note for name, note in notes.items() if name in results["variants"]]
    return " ".join([*said, "All figures, with the acceptance at each slot, are in `results.json`."])


def _equality_note(results: dict, arm: str) -> str:
    """How often generate()'s text was plain's, and every place where it was not."""
    entry = results.get("generate", results["variants"][arm]["all"])
    if "equal_to_plain" not in entry:
        return ""
    equal = f"{entry['equal_to_plain']} of {entry['prompts']} prompts"
    told = f"`generate()` with the drafter: the text is plain's on {equal}"
    if "rounds_equal_to_rollout" in entry:
        told += f", the rounds are the roll-out's on {entry['rounds_equal_to_rollout']}"
    lines = [f"{told}."]
    for d in entry["differences"]:
        kind = "a tie" if d["tie"] else "no tie"
        lines.append(
            f"- {d['id']} parts at token {d['at']}, where the two tokens' logits are {d['gap']:.2g} apart: {kind}"
        )
    return "\n".join(lines)


def _cost_note(results: dict) -> str:
    cost = results.get("conditioning_cost")
    if cost is None:
        return ""
    return (
        f"The conditioning costs {cost['conditioning_ms']:.2f} ms of a round of {cost['round_ms']:.1f} ms "
        f"({100 * cost['share']:.2f} %)."
    )


def _training(training: dict | None, results: dict | None) -> str:
    """The run that made the weights, and those before it as far as results.json knows them, last one first."""
    if not training:  # none, or a note that says nothing
        return ""
    arms = ((results or {}).get("provenance") or {}).get("arms") or {}
    before = {arm["weights"]: arm["training"] for arm in arms.values() if arm.get("training")}
    parts, run, seen = ["## Training"], training, set()
    while run is not None:
        parts.append(_run(run))
        start = run.get("init_from")
        run = before.get(start) if start not in seen else None
        seen.add(start)
        if run is not None:
            parts.append("It started from the drafter that this run left:")
        elif start:
            parts.append(f"It started from weights {start}." if start.startswith("sha256:") else f"From {start}.")
    return "\n\n".join(parts) + "\n"


def _run(run: dict) -> str:
    data = f": {', '.join(run['data'])}" if run.get("data") else ""
    seed = f"; seed {run['seed']}" if "seed" in run else ""
    text = f"Trained on text that the target wrote{data}{seed}."
    if not run.get("finished", True):
        text += f" Stopped at step {run['stopped_at_step']}." if "stopped_at_step" in run else " Not finished."
    if run.get("command"):
        text += f"\n\n```bash\n{run['command']}\n```"
    return text


__all__ = [
    "as_hub_id",
    "card_is_current",
    "is_rendered",
    "kinds_of",
    "render_card",
    "results_table",
    "title_of",
    "write_card",
]
