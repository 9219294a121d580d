"""What the states of a rejected suffix know: whether ReTrace has something to gain, before a stage 2 is trained.

    python examples/measure_signal.py --drafter runs/stage1 --limit 30

A DFlash drafter is played over the target's greedy answers. Wherever a slot has a signal from the round before, and
the tokens in front of it are drafted right (so that this slot decides how many are accepted), three guesses are
compared with the token that the target will write there: the drafter's own; u's, the target's state on the rejected
suffix, read by the LM head; and m's, the drafter's old state. What `either` has over the drafter is what a fusion that
always knew whom to believe would gain at that slot; and `mixed` is the simplest one that can be had, u's
log-probabilities added to the drafter's by the best of a few weights (chosen on these same slots, so an upper bound).

Written are results.json and results.md in `--output`; the target's answers are kept there.
"""

import argparse
import sys
from pathlib import Path

import torch
from tqdm.auto import tqdm


sys.path.insert(0, str(Path(__file__).parent))  # the script beside this one

import evaluate_drafters

from retrace_hf import RetraceDrafter
from retrace_hf.data.features import target_fingerprint
from retrace_hf.evaluation import AcceptanceStats, KeptLines, roll_out, write_results
from retrace_hf.evaluation.results import describe_drafter, file_hash, provenance
from retrace_hf.files import write_text
from retrace_hf.target_head import draft_logits
from retrace_hf.targets import load_target
from retrace_hf.terminal import run_command


WEIGHTS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
FEWEST = 30  # slots; shares of fewer are not shown


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--drafter", required=True, help="folder or Hub id of a DFlash drafter")
    parser.add_argument("--target", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--prompts", default=str(Path(__file__).parent / "data" / "eval_prompts.jsonl"))
    parser.add_argument("--output", type=Path, default=Path("runs/signal"))
    parser.add_argument("--max_new_tokens", "--max-new-tokens", type=int, default=128)
    parser.add_argument("--batch_size", "--batch-size", type=int, default=43, help="prompts answered at once")
    parser.add_argument("--limit", type=int, help="prompts of each kind at most")
    args = parser.parse_args()
    for option, least in (("limit", 1), ("batch_size", 1), ("max_new_tokens", 2)):
        if getattr(args, option) is not None and getattr(args, option) < least:
            parser.error(f"--{option} must be at least {least}.")
    return args


class Watched:
    """Sees every block that the drafter drafts for one text after the other (`text`: its ids)."""

    def __init__(self, target, drafter):
        self.target = target
        self.text: torch.Tensor | None = None
        self.slots: list[dict[str, torch.Tensor]] = []  # each of [slots that are looked at], by block
        drafter.register_forward_hook(self._look, with_kwargs=True)

    def _look(self, drafter, args, kwargs, output):
        signal = kwargs.get("trajectory")
        if signal is None:
            return
        places = kwargs["position_ids"][0, 1:]  # of slots 1 to B - 1
        known = signal.valid[0, 1:] & (places < len(self.text))
        labels = self.text[places.clamp(max=len(self.text) - 1)]
        by_guesser = {
            name: draft_logits(self.target, states[:, 1:]).float().log_softmax(dim=-1)[0]  # [B - 1, V]
            for name, states in (("drafter", output.last_hidden_state), ("u", signal.target), ("m", signal.draft))
        }
        right = {name: logits.argmax(dim=-1) == labels for name, logits in by_guesser.items()}
        for weight in WEIGHTS:
            right[weight] = (by_guesser["drafter"] + weight * by_guesser["u"]).argmax(dim=-1) == labels
        in_front = torch.cat([right["drafter"].new_ones(1), right["drafter"][:-1].cumprod(dim=-1).bool()])
        decides = known & in_front
        self.slots.append({"slot": decides.nonzero()[:, 0] + 1, **{k: found[decides] for k, found in right.items()}})


def shares(slots: dict[str, torch.Tensor], chosen: torch.Tensor) -> dict:
    """Of the chosen slots, who is right how often."""
    found = {name: slots[name][chosen] for name in slots if name != "slot"}
    wrong = ~found["drafter"]
    mixed = {weight: float(found[weight].float().mean()) for weight in WEIGHTS}
    best = max(mixed, key=mixed.get)
    return {
        "slots": int(chosen.sum()),
        **{name: float(found[name].float().mean()) for name in ("drafter", "u", "m")},
        "u_where_the_drafter_is_wrong": float(found["u"][wrong].float().mean()) if wrong.any() else None,
        "either": float((found["drafter"] | found["u"]).float().mean()),
        "mixed": mixed[best],
        "weight": best,
    }


def markdown(results: dict) -> str:
    lines = ["| slot | seen | drafter | u | m | u where the drafter is wrong | either | mixed | its weight |"]
    lines.append("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for slot, entry in results["slots"].items():
        names = ("drafter", "u", "m", "u_where_the_drafter_is_wrong", "either", "mixed")
        found = " | ".join("-" if entry[name] is None else f"{entry[name]:.3f}" for name in names)
        lines.append(f"| {slot} | {entry['slots']} | {found} | {entry['weight']:g} |")
    return "\n".join(lines) + "\n"


@torch.no_grad()
def main():
    args = parse_args()
    drafter = RetraceDrafter.from_dflash(args.drafter, conditioning="corrected").float().eval()
    target, tokenizer = load_target(args.target)
    rows = evaluate_drafters.read_rows(args, tokenizer)
    key = {"target": target_fingerprint(target), "prompts": file_hash(args.prompts), "tokens": args.max_new_tokens}
    answers = evaluate_drafters.plain_answers(args, target, rows, KeptLines(args.output / "answers.jsonl", key))
    watched, stats = Watched(target, drafter.to(target.device)), []
    for row in tqdm(rows, desc="rounds"):
        text = row["prompt_ids"] + answers[row["id"]]
        watched.text = torch.tensor(text, device=target.device)
        stats += roll_out(target, drafter, [text], [len(row["prompt_ids"])], args.max_new_tokens)
    if not watched.slots or not sum(len(block["slot"]) for block in watched.slots):
        raise ValueError("No slot had a signal: each block was accepted whole, or its answer ended there.")
    slots = {name: torch.cat([block[name] for block in watched.slots]) for name in watched.slots[0]}
    by_slot = {slot: slots["slot"] == slot for slot in slots["slot"].unique().tolist()}
    chosen = {str(slot): which for slot, which in by_slot.items() if which.sum() >= FEWEST}
    results = {
        "acceptance_length": AcceptanceStats.pooled(stats).acceptance_length,
        "prompts": len(rows),
        "slots": {
            name: shares(slots, which) for name, which in {**chosen, "all": torch.ones_like(slots["u"])}.items()
        },
        "provenance": provenance([args.prompts], target=args.target, drafter=describe_drafter(args.drafter)),
    }
    write_results(args.output / "results.json", results)
    write_text(args.output / "results.md", markdown(results))
    print(f"tau {results['acceptance_length']:.3f} on {len(rows)} prompts\n{markdown(results)}")


if __name__ == "__main__":
    run_command(main, "measure_signal")
