"""Puts a trained drafter into a folder of this repository: float16 weights that load as float32, results and a card
whose every figure comes from them. `RetraceDrafter.from_pretrained(folder).push_to_hub(...)` adds the code of the day
that runs it where this package is not installed.

    python examples/ship_drafter.py runs/smollm2/corrected model_cards/retrace-smollm2-135m
    python examples/ship_drafter.py --results runs/smollm2/results.json model_cards/retrace-smollm2-135m

The first line is run once, before the final measurement, so that what is measured is what is shipped.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch

from retrace_hf import RetraceDrafter
from retrace_hf.configuration_retrace import PROPOSALS
from retrace_hf.files import write_text
from retrace_hf.terminal import run_command


CARD = """---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
library_name: transformers
tags:
- speculative-decoding
- retrace
- dflash
---
# ReTrace drafter for SmolLM2-135M-Instruct

A block drafter (DFlash, arXiv 2602.06036) conditioned on its rejected suffix (ReTrace, arXiv 2608.29748):
{layers} layers, block of {block}, {parameters} million parameters. It needs `pip install retrace_hf`.

```python
import retrace_hf

drafter = retrace_hf.RetraceDrafter.from_pretrained("model_cards/retrace-smollm2-135m")
target.generate(**inputs, assistant_model=drafter)
```

Trained on text that SmolLM2 wrote itself{data} by `examples/smollm2.sh`. The weights are stored in float16 and load as
float32.

## Results

{protocol}

{table}

`sft` is the control: the same further training from `stage1`, without the signal. `signal_off` is transformers' own
DFlash generator on this drafter's weights. All figures, with the acceptance at each slot, are in `results.json`.
{notes}"""


def ship_weights(run: Path, folder: Path, proposal: str | None = None):
    drafter = RetraceDrafter.from_pretrained(run, dtype=torch.float32)
    if proposal is not None:
        drafter.config.proposal = proposal
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        drafter.half().save_pretrained(temporary)
        config = json.loads(Path(temporary, "config.json").read_text())
        config["dtype"] = "float32"
        del config["auto_map"]  # it names code, and a copy of the package's would grow old here
        Path(temporary, "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        for file in ("model.safetensors", "config.json"):
            Path(temporary, file).replace(folder / file)
    note = run / "training.json"
    if note.is_file():
        write_text(folder / "training.json", note.read_text())
    else:  # an older one would tell of other weights
        (folder / "training.json").unlink(missing_ok=True)


def ship_results(results_file: Path, folder: Path):
    results = results_file.read_text()
    write_text(folder / "results.json", results)
    note = folder / "training.json"
    training = json.loads(note.read_text()) if note.is_file() else {}
    card = render_card(json.loads(results), RetraceDrafter.from_pretrained(folder), training)
    write_text(folder / "README.md", card)


def render_card(results: dict, drafter: RetraceDrafter, training: dict) -> str:
    source = results["provenance"]
    count = next(iter(results["variants"].values()))["all"]["prompts"]
    return CARD.format(
        layers=drafter.config.num_hidden_layers,
        block=drafter.config.block_size,
        parameters=round(sum(p.numel() for p in drafter.parameters()) / 1e6, 1),
        data=f" ({', '.join(training['data'])}; seed {training['seed']})" if training else "",
        protocol=(
            f"Greedy, float32, batch 1, {source['max_new_tokens']} new tokens, first turns of {count} prompts "
            "(MT-Bench, HumanEval, GSM8K). tau counts the target's token, pooled over rounds; in brackets "
            f"the 95 % interval over prompts. Made by `{source['command']}`."
        ),
        table=results_table(results),
        notes=equality_note(results)
        + cost_note(results)
        + "".join(f"\n- {caveat}" for caveat in results.get("caveats", []))
        + "\n",
    )


def results_table(results: dict) -> str:
    kinds = ["mt-bench", "humaneval", "gsm8k", "all"]
    prefix = "acceptance_length_over_"
    baseline, ratios = next(
        ((k.removeprefix(prefix), v) for k, v in results.items() if k.startswith(prefix)), ("", {})
    )
    lines = ["| variant | " + " | ".join(f"tau {k}" for k in kinds) + f" | tau over {baseline} | x plain (median) |"]
    lines.append("|---" * (len(kinds) + 3) + "|")
    for name, variant in results["variants"].items():
        low, high = variant["all"]["acceptance_length_interval"]
        cells = [f"{variant[k]['acceptance_length']:.3f}" for k in kinds]
        cells[-1] += f" [{low:.3f}, {high:.3f}]"
        ratio = ratios.get(name, {}).get("all")
        interval = "" if ratio is None else " [{:.3f}, {:.3f}]".format(*ratio["interval"])
        cells.append("" if ratio is None else f"{ratio['ratio']:.3f}{interval}")
        speed = variant["all"].get("speedup_median")
        cells.append("" if speed is None else f"{speed:.2f}")
        note = f" ({variant['all']['prompts']} prompts)" if "speedup_median" in variant["all"] else ""
        lines.append(f"| {name}{note} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def equality_note(results: dict) -> str:
    """How often generate()'s text was plain's, and every place where it was not."""
    entry = results.get("generate")
    if entry is None:
        return ""
    lines = [
        f"\n`generate()` with the drafter: the text is plain's on {entry['equal_to_plain']} of {entry['prompts']} "
        f"prompts, the rounds are the roll-out's on {entry['rounds_equal_to_rollout']}."
    ]
    for d in entry["differences"]:
        kind = "a tie" if d["tie"] else "no tie"
        lines.append(
            f"\n- {d['id']} parts at token {d['at']}, where plain's two best logits are {d['gap']:.2g} apart: {kind}"
        )
    return "".join(lines) + "\n"


def cost_note(results: dict) -> str:
    cost = results.get("conditioning_cost")
    if cost is None:
        return ""
    return (
        f"\nThe conditioning costs {cost['conditioning_ms']:.2f} ms of a round of {cost['round_ms']:.1f} ms "
        f"({100 * cost['share']:.2f} %).\n"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", type=Path, help="folder of the trained drafter")
    parser.add_argument("folder", type=Path, help="folder to ship it in")
    parser.add_argument("--proposal", choices=PROPOSALS, help="what it proposes under sampling; as it was by default")
    parser.add_argument("--results", type=Path, help="results.json to ship, with the card made from it")
    args = parser.parse_args()
    if args.run is not None:
        ship_weights(args.run, args.folder, args.proposal)
    if args.results is not None:
        ship_results(args.results, args.folder)


if __name__ == "__main__":
    run_command(main, "ship_drafter")
