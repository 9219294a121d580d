"""Measures drafters of one target on the evaluation prompts and writes results.json.

The target's greedy answers are generated once and kept (`--answers`). The arms are then played over them in batches,
which gives the acceptance that `generate()` would (`retrace_hf.evaluation.roll_out`):

    python examples/evaluate_drafters.py --arm stage1=runs/stage1 --arm sft=runs/sft --arm corrected=runs/corrected

With `--generate NAME` that arm is also run through `generate()`, prompt by prompt, beside plain `generate()` and
transformers' own DFlash generator on the same weights (`signal_off`): equality, rounds, and seconds measured in one
interleaved run. It resumes where it was stopped:

    python examples/evaluate_drafters.py --arm corrected=runs/corrected --generate corrected
"""

import argparse
import json
import os
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import torch
from tqdm.auto import tqdm

from retrace_hf import RetraceCandidateGenerator, RetraceDrafter, record_acceptance
from retrace_hf.data.prompts import read_eval_prompts, render_prompt
from retrace_hf.evaluation import AcceptanceStats, bootstrap_ratio, roll_out, summarize, write_results
from retrace_hf.evaluation.results import provenance
from retrace_hf.targets import load_target


TIE = 1e-4  # two logits closer than this are a tie: which one is the argmax depends on how the matmul was split


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--prompts", default=str(Path(__file__).parent / "data" / "eval_prompts.jsonl"))
    parser.add_argument("--arm", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--baseline", default="sft", help="arm that the others' tau is divided by")
    parser.add_argument("--generate", metavar="NAME", help="arm to run through generate() as well")
    parser.add_argument("--generate-limit", type=int, help="prompts of each kind at most to run through generate()")
    parser.add_argument("--answers", default="runs/eval/answers.jsonl", help="where plain's answers are kept")
    parser.add_argument("--output", default="runs/eval/results.json")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=43)
    parser.add_argument("--limit", type=int, help="prompts of each kind at most")
    return parser.parse_args()


def read_rows(args, tokenizer) -> list[dict]:
    """First turns of the evaluation prompts, rendered."""
    return [
        {
            "id": prompt["id"],
            "kind": prompt["source"],
            "prompt_ids": render_prompt(tokenizer, [{"role": "user", "content": prompt["turns"][0]}]),
        }
        for prompt in read_eval_prompts(args.prompts)
    ]


def first_of_each_kind(rows: list[dict], limit: int | None) -> list[dict]:
    taken, chosen = Counter(), []
    for row in rows:
        taken[row["kind"]] += 1
        if limit is None or taken[row["kind"]] <= limit:
            chosen.append(row)
    return chosen


def append_line(path: Path, row: dict):
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_done(path: Path) -> dict[str, dict]:
    """Whole lines by id; a line that a kill cut short is left out and cut off."""
    if not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8").split("\n")
    whole = [line for line in lines[:-1] if line]
    path.write_text("".join(line + "\n" for line in whole), encoding="utf-8")
    return {row["id"]: row for row in map(json.loads, whole)}


@torch.no_grad()
def plain_answers(args, target, rows: list[dict]) -> dict[str, list[int]]:
    """Plain greedy answers by id, generated in left-padded batches and kept."""
    path = Path(f"{args.answers}.{args.max_new_tokens}")
    path.parent.mkdir(parents=True, exist_ok=True)
    done = read_done(path)
    missing = sorted((r for r in rows if r["id"] not in done), key=lambda r: len(r["prompt_ids"]))
    for start in tqdm(range(0, len(missing), args.batch_size), desc="plain", disable=not missing):
        batch = missing[start : start + args.batch_size]
        width = max(len(r["prompt_ids"]) for r in batch)
        pad = target.generation_config.pad_token_id or 0
        ids = torch.tensor([[pad] * (width - len(r["prompt_ids"])) + r["prompt_ids"] for r in batch])
        mask = torch.tensor([[0] * (width - len(r["prompt_ids"])) + [1] * len(r["prompt_ids"]) for r in batch])
        out = target.generate(ids, attention_mask=mask, max_new_tokens=args.max_new_tokens, do_sample=False)
        for row, answer in zip(batch, out[:, width:].tolist()):
            append_line(path, {"id": row["id"], "ids": up_to_end(answer, target.generation_config.eos_token_id)})
    return {row["id"]: row["ids"] for row in read_done(path).values()}


def up_to_end(ids: list[int], eos) -> list[int]:
    ends = set(eos if isinstance(eos, list) else [eos])
    for i, token in enumerate(ids):
        if token in ends:
            return ids[: i + 1]
    return ids


def play_arm(args, target, folder: str, rows, answers) -> list[AcceptanceStats]:
    drafter = RetraceDrafter.from_pretrained(folder, dtype=torch.float32).eval()
    sequences = [r["prompt_ids"] + answers[r["id"]] for r in rows]
    lengths = [len(r["prompt_ids"]) for r in rows]
    return roll_out(target, drafter, sequences, lengths, args.max_new_tokens, args.batch_size)


@torch.no_grad()
def first_difference(target, prompt_ids, ours: list[int], plain: list[int]) -> dict | None:
    """Where two answers part, and how close plain's two best logits are there."""
    if ours == plain:
        return None
    at = next((i for i, (a, b) in enumerate(zip(ours, plain)) if a != b), min(len(ours), len(plain)))
    logits = target(torch.tensor([prompt_ids + plain[:at]])).logits[0, -1]
    top = logits.topk(2).values
    return {"at": at, "gap": float(top[0] - top[1])}


@torch.no_grad()
def generate_all(args, target, name: str, folder: str, rows) -> dict[str, list[dict]]:
    """plain, `name` and signal_off on each prompt in turn; the order rotates so that none is always first."""
    drafter = RetraceDrafter.from_pretrained(folder, dtype=torch.float32).eval()
    path = Path(f"{args.output}.{name}.generate.jsonl")
    done = read_done(path)
    options = {
        "plain": {},
        name: {"assistant_model": drafter},
        "signal_off": {"assistant_model": drafter, "speculation_type": "dflash"},
    }
    warm = torch.tensor([rows[0]["prompt_ids"]])
    for option in options.values():
        target.generate(warm, max_new_tokens=16, do_sample=False, **option)
    for number, row in enumerate(tqdm(rows, desc="generate")):
        if row["id"] in done:
            continue
        result = {"id": row["id"], "kind": row["kind"]}
        names = list(options)
        for variant in names[number % 3 :] + names[: number % 3]:
            ids = torch.tensor([row["prompt_ids"]])
            start = time.perf_counter()
            with record_acceptance() as stats:
                out = target.generate(ids, max_new_tokens=args.max_new_tokens, do_sample=False, **options[variant])
            result[variant] = {
                "seconds": time.perf_counter() - start,
                "ids": out[0, ids.shape[1] :].tolist(),
                "accepted": stats.accepted_per_round,
                "proposed": stats.proposed_per_round,
            }
        for variant in (name, "signal_off"):
            difference = first_difference(target, row["prompt_ids"], result[variant]["ids"], result["plain"]["ids"])
            result[variant]["difference"] = difference
        append_line(path, result)
        done[row["id"]] = result
    results = [done[row["id"]] for row in rows]
    return {variant: [r[variant] for r in results] for variant in options}


@contextmanager
def timed(owner, name: str, spent: list[float]):
    """Adds the seconds spent in `owner.name` to `spent[0]`."""
    real = getattr(owner, name)

    def timer(*args, **kwargs):
        start = time.perf_counter()
        try:
            return real(*args, **kwargs)
        finally:
            spent[0] += time.perf_counter() - start

    setattr(owner, name, timer)
    try:
        yield
    finally:
        setattr(owner, name, real)


def conditioning_cost(args, target, folder: str, rows) -> dict[str, float]:
    """Milliseconds a round that the trajectory costs (alignment and fusion), and a round's, over a few prompts.

    The drafter's and the target's weights are read once a round either way; this is what comes on top.
    """
    drafter = RetraceDrafter.from_pretrained(folder, dtype=torch.float32).eval()
    spent, seconds, rounds = [0.0], 0.0, 0
    for row in rows[:: max(1, len(rows) // 10)]:
        with timed(RetraceCandidateGenerator, "_rejected", spent), timed(drafter, "_admit", spent):
            with record_acceptance() as stats:
                start = time.perf_counter()
                target.generate(
                    torch.tensor([row["prompt_ids"]]),
                    assistant_model=drafter,
                    max_new_tokens=args.max_new_tokens,
                    do_sample=False,
                )
                seconds += time.perf_counter() - start
        rounds += stats.rounds
    return {
        "conditioning_ms": 1000 * spent[0] / rounds,
        "round_ms": 1000 * seconds / rounds,
        "share": spent[0] / seconds,
    }


def stats_of(result: dict) -> AcceptanceStats:
    if not result["accepted"]:  # plain: every token behind the first is a pass of its own
        rounds = len(result["ids"]) - 1
        return AcceptanceStats([0] * rounds, [0] * rounds, calls=1)
    return AcceptanceStats(result["accepted"], result["proposed"], calls=1)


def summarize_generated(generated: dict[str, list[dict]], kinds: list[str], name: str) -> dict:
    """By variant: the summary, seconds, and for the drafted ones equality with plain and the time ratio to it."""
    variants = {}
    plain_seconds = [r["seconds"] for r in generated["plain"]]
    for variant, results in generated.items():
        seconds = [r["seconds"] for r in results]
        summary = summarize([stats_of(r) for r in results], kinds, seconds)
        for kind, entry in summary.items():
            chosen = [i for i, k in enumerate(kinds) if kind in (k, "all")]
            ratios = sorted(plain_seconds[i] / seconds[i] for i in chosen)
            entry["speedup_median"] = ratios[len(ratios) // 2]
            entry["speedup_total"] = sum(plain_seconds[i] for i in chosen) / sum(seconds[i] for i in chosen)
            if variant != "plain":
                differences = [results[i]["difference"] for i in chosen if results[i]["difference"]]
                entry["equal_to_plain"] = len(chosen) - len(differences)
                entry["differences"] = len(differences)
                entry["differences_that_are_ties"] = sum(d["gap"] <= TIE for d in differences)
        variants[variant] = summary
    return variants


def main():
    args = parse_args()
    arms = dict(arm.split("=", 1) for arm in args.arm)
    if args.generate is not None and args.generate not in arms:
        raise SystemExit(f"--generate {args.generate} names no --arm; arms are {sorted(arms)}.")
    Path(args.output).parent.mkdir(parents=True, exist_ok=True)
    target, tokenizer = load_target(args.target)
    target.eval()
    rows = first_of_each_kind(read_rows(args, tokenizer), args.limit)
    kinds = [row["kind"] for row in rows]
    answers = plain_answers(args, target, rows)

    variants, played = {}, {}
    for name, folder in arms.items():
        played[name] = play_arm(args, target, folder, rows, answers)
        variants[name] = summarize(played[name], kinds)
        print(name, {kind: round(entry["acceptance_length"], 3) for kind, entry in variants[name].items()}, flush=True)
    ratios = {}
    if args.baseline in played:
        for name in set(played) - {args.baseline}:
            ratios[name] = {}
            for kind in [*sorted(set(kinds)), "all"]:
                chosen = [i for i, k in enumerate(kinds) if kind in (k, "all")]
                ratios[name][kind] = bootstrap_ratio(
                    [played[name][i] for i in chosen], [played[args.baseline][i] for i in chosen]
                )
    if args.generate is not None:
        chosen = first_of_each_kind(rows, args.generate_limit)
        generated = generate_all(args, target, args.generate, arms[args.generate], chosen)
        generated_kinds = [row["kind"] for row in chosen]
        for variant, summary in summarize_generated(generated, generated_kinds, args.generate).items():
            variants[f"{variant}_generate" if variant == args.generate else variant] = summary

    results = {"variants": variants}
    if args.generate is not None:
        results["conditioning_cost"] = conditioning_cost(args, target, arms[args.generate], rows)
    results |= {
        f"acceptance_length_over_{args.baseline}": ratios,
        "provenance": provenance(
            [args.prompts],
            target=args.target,
            threads=torch.get_num_threads(),
            dtype="float32",
            max_new_tokens=args.max_new_tokens,
            note="acceptance_length is pooled over rounds; intervals are 95 %, bootstrap over prompts",
        ),
    }
    write_results(args.output, results)
    print(args.output)


if __name__ == "__main__":
    main()
