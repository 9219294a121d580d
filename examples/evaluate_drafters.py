"""Measures drafters of one target on the evaluation prompts and writes results.json.

The target's greedy answers are generated once and kept. The arms are then played over them in batches, which gives the
acceptance that `generate()` would (`retrace_hf.evaluation.roll_out`):

    python examples/evaluate_drafters.py --arm stage1=runs/stage1 --arm sft=runs/sft --arm corrected=runs/corrected

With `--generate NAME` that arm is also run through `generate()`, prompt by prompt, beside plain `generate()` and
transformers' own DFlash generator on the same weights (`signal_off`): equality, rounds, and seconds measured in one
interleaved run:

    python examples/evaluate_drafters.py --arm corrected=runs/corrected --generate corrected

Answers, arms and prompts that are done are kept in the output's folder, each under a hash of the weights and options
that made it: the same command goes on where it was stopped, and changed weights are measured anew.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
from tqdm.auto import tqdm

from retrace_hf import RetraceCandidateGenerator, RetraceDrafter, record_acceptance
from retrace_hf.configuration_retrace import READS_TARGET_KV
from retrace_hf.conversion import local_folder
from retrace_hf.data.features import target_fingerprint
from retrace_hf.data.prompts import read_eval_prompts, render_prompt
from retrace_hf.evaluation import (
    AcceptanceStats,
    KeptLines,
    first_difference,
    roll_out,
    summarize,
    write_results,
)
from retrace_hf.evaluation.results import (
    describe_drafter,
    file_hash,
    limit_each_kind,
    provenance,
    ratios_over,
    rows_by_kind,
)
from retrace_hf.measure import answer, timed
from retrace_hf.targets import load_target
from retrace_hf.terminal import run_command


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--target", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--prompts", default=str(Path(__file__).parent / "data" / "eval_prompts.jsonl"))
    parser.add_argument("--arm", action="append", default=[], metavar="NAME=FOLDER", help="or NAME=HUB_ID")
    parser.add_argument("--baseline", help="arm that the others' tau is divided by; sft where there is one")
    parser.add_argument("--generate", metavar="NAME", help="arm to run through generate() as well")
    parser.add_argument(
        "--generate-limit", "--generate_limit", type=int, help="prompts of each kind at most to run through generate()"
    )
    parser.add_argument(
        "--generate-rest",
        "--generate_rest",
        action="store_true",
        help="run the prompts beyond --generate-limit through generate() too, with that arm alone and untimed",
    )
    parser.add_argument("--output", default="runs/eval/results.json")
    parser.add_argument("--max-new-tokens", "--max_new_tokens", type=int, default=128)
    parser.add_argument("--batch-size", "--batch_size", type=int, default=43)
    parser.add_argument("--limit", type=int, help="prompts of each kind at most")
    args = parser.parse_args()
    if not args.arm or not all("=" in arm for arm in args.arm):
        parser.error("name at least one arm, as --arm NAME=FOLDER.")
    args.arms = dict(arm.split("=", 1) for arm in args.arm)
    for name, place in args.arms.items():
        try:
            folder = args.arms[name] = str(local_folder(place))
        except ValueError as error:
            parser.error(f"--arm {name}={place}: {error}")
        if not all(Path(folder, file).is_file() for file in ("config.json", "model.safetensors")):
            parser.error(f"--arm {name}={place}: {folder} is no folder with a config.json and a model.safetensors.")
    if args.generate is not None and args.generate not in args.arms:
        parser.error(f"--generate {args.generate} names no --arm; arms are {sorted(args.arms)}.")
    if args.generate_rest and args.generate is None:
        parser.error("--generate-rest goes with --generate.")
    if args.baseline is None:
        args.baseline = "sft" if "sft" in args.arms else None
    elif args.baseline not in args.arms:
        parser.error(f"--baseline {args.baseline} names no --arm; arms are {sorted(args.arms)}.")
    for option, least in (("limit", 1), ("generate_limit", 1), ("batch_size", 1), ("max_new_tokens", 2)):
        if getattr(args, option) is not None and getattr(args, option) < least:
            parser.error(f"--{option.replace('_', '-')} must be at least {least}.")
    if Path(args.output).is_dir():
        parser.error(f"--output {args.output} is a folder; name the file to write.")
    return args


def load_drafter(folder: str) -> RetraceDrafter:
    return RetraceDrafter.from_pretrained(folder, dtype=torch.float32).eval()


def read_rows(args, tokenizer) -> list[dict]:
    """First turns of the evaluation prompts, rendered; `--limit` of each kind at most."""
    rows = [
        {
            "id": prompt["id"],
            "kind": prompt["source"],
            "prompt_ids": render_prompt(tokenizer, [{"role": "user", "content": prompt["turns"][0]}]),
        }
        for prompt in read_eval_prompts(args.prompts)
    ]
    return limit_each_kind(rows, args.limit)


# -- plain's answers, and the arms played over them ------------------------------------------------------------------


@torch.no_grad()
def plain_answers(args, target, rows: list[dict], kept: KeptLines) -> dict[str, list[int]]:
    """Plain greedy answers by id, generated in left-padded batches and kept."""
    missing = sorted((r for r in rows if r["id"] not in kept), key=lambda r: len(r["prompt_ids"]))
    pad, eos = target.generation_config.pad_token_id or 0, target.generation_config.eos_token_id
    for start in tqdm(range(0, len(missing), args.batch_size), desc="plain", disable=not missing):
        batch = missing[start : start + args.batch_size]
        width = max(len(r["prompt_ids"]) for r in batch)
        ids = torch.tensor([[pad] * (width - len(r["prompt_ids"])) + r["prompt_ids"] for r in batch])
        mask = torch.tensor([[0] * (width - len(r["prompt_ids"])) + [1] * len(r["prompt_ids"]) for r in batch])
        out = target.generate(ids, attention_mask=mask, max_new_tokens=args.max_new_tokens, do_sample=False)
        for row, new in zip(batch, out[:, width:].tolist()):
            kept.add({"id": row["id"], "ids": up_to_end(new, eos)})
    return {row["id"]: kept[row["id"]]["ids"] for row in rows}


def up_to_end(ids: list[int], eos) -> list[int]:
    ends = set(eos if isinstance(eos, list) else [eos])
    for i, token in enumerate(ids):
        if token in ends:
            return ids[: i + 1]
    return ids


def play_arm(args, target, name: str, rows, answers, kept: KeptLines) -> list[AcceptanceStats]:
    """The arm's rounds on every prompt, played or read from an earlier run."""
    missing = [row for row in rows if f"{name}/{row['id']}" not in kept]
    if missing:
        drafter = load_drafter(args.arms[name])
        sequences = [r["prompt_ids"] + answers[r["id"]] for r in missing]
        lengths = [len(r["prompt_ids"]) for r in missing]
        for row, stats in zip(
            missing, roll_out(target, drafter, sequences, lengths, args.max_new_tokens, args.batch_size)
        ):
            kept.add(
                {
                    "id": f"{name}/{row['id']}",
                    "accepted": stats.accepted_per_round,
                    "proposed": stats.proposed_per_round,
                }
            )
    return [stats_of(kept[f"{name}/{row['id']}"]) for row in rows]


def stats_of(line: dict) -> AcceptanceStats:
    return AcceptanceStats(line["accepted"], line["proposed"], calls=1)


# -- generate() itself -----------------------------------------------------------------------------------------------


def generate_all(args, target, rows, kept: KeptLines) -> dict[str, list[dict]]:
    """plain, the arm and signal_off on each prompt in turn; the order rotates so that none is always first."""
    name, drafter = args.generate, load_drafter(args.arms[args.generate])
    options = {
        "plain": {},
        name: {"drafter": drafter},
    }
    if drafter.config.context_fusion not in READS_TARGET_KV:  # transformers' generator gives a drafter no keys
        options["signal_off"] = {"drafter": drafter, "speculation_type": "dflash"}
    inputs = {row["id"]: {"input_ids": torch.tensor([row["prompt_ids"]])} for row in rows}
    for option in options.values():
        answer(target, inputs[rows[0]["id"]], 16, **option)
    for number, row in enumerate(tqdm(rows, desc="generate")):
        if row["id"] in kept:
            continue
        result = {"id": row["id"], "kind": row["kind"]}
        names = list(options)
        for variant in names[number % len(names) :] + names[: number % len(names)]:
            run = answer(target, inputs[row["id"]], args.max_new_tokens, **options[variant])
            result[variant] = {
                "seconds": run.seconds,
                "ids": run.ids[0],
                "accepted": run.stats.accepted_per_round,
                "proposed": run.stats.proposed_per_round,
            }
        for variant in (variant for variant in options if variant != "plain"):
            difference = first_difference(target, row["prompt_ids"], result[variant]["ids"], result["plain"]["ids"])
            result[variant]["difference"] = difference
        kept.add(result)
    return {variant: [kept[row["id"]][variant] for row in rows] for variant in options}


def generate_rest(args, target, rows, answers, kept: KeptLines) -> list[dict]:
    """The arm alone on each prompt; its text against the answer that plain `generate()` gave in a batch."""
    drafter = load_drafter(args.arms[args.generate])
    for row in tqdm([row for row in rows if row["id"] not in kept], desc="generate, the rest"):
        run = answer(target, {"input_ids": torch.tensor([row["prompt_ids"]])}, args.max_new_tokens, drafter=drafter)
        line = {"id": row["id"], "ids": run.ids[0], "accepted": run.stats.accepted_per_round}
        line["difference"] = first_difference(target, row["prompt_ids"], run.ids[0], answers[row["id"]])
        kept.add(line)
    return [kept[row["id"]] for row in rows]


def compare_with_rollout(rows, generated: list[dict], played: list[AcceptanceStats]) -> dict:
    """generate() against plain's text, and against the rounds that the roll-out counted, on the same prompts."""
    differences = [{"id": r["id"], **g["difference"]} for r, g in zip(rows, generated) if g["difference"]]
    same_rounds = sum(g["accepted"] == p.accepted_per_round for g, p in zip(generated, played))
    return {
        "prompts": len(rows),
        "equal_to_plain": len(rows) - len(differences),
        "differences": differences,
        "rounds_equal_to_rollout": same_rounds,
    }


def summarize_generated(generated: dict[str, list[dict]], rows: list[dict]) -> dict:
    """By variant: the summary with seconds, and for the drafted ones the time ratio to plain and every difference."""
    kinds, variants = [row["kind"] for row in rows], {}
    plain_seconds = [r["seconds"] for r in generated["plain"]]
    for variant, results in generated.items():
        seconds = [r["seconds"] for r in results]
        summary = summarize([stats_of(r) for r in results], kinds, seconds)
        for kind, chosen in rows_by_kind(kinds).items():
            entry = summary[kind]
            entry["speedup_median"] = statistics.median(plain_seconds[i] / seconds[i] for i in chosen)
            entry["speedup_total"] = sum(plain_seconds[i] for i in chosen) / sum(seconds[i] for i in chosen)
            if variant != "plain":
                differences = [
                    {"id": rows[i]["id"], **results[i]["difference"]} for i in chosen if results[i]["difference"]
                ]
                entry["equal_to_plain"] = len(chosen) - len(differences)
                entry["differences"] = differences
        variants[variant] = summary
    return variants


# -- what the signal costs -------------------------------------------------------------------------------------------


def conditioning_cost(args, target, rows) -> dict[str, float] | None:
    """Milliseconds a round that the trajectory costs (alignment and fusion), and a round's, over a few prompts.

    The drafter's and the target's weights are read once a round either way; this is what comes on top. The prefill is
    no round and is not counted.
    """
    drafter = load_drafter(args.arms[args.generate])
    spent, seconds, rounds = 0.0, 0.0, 0
    for row in rows[:: max(1, len(rows) // 10)]:
        parts, drafts = [], []
        with (
            timed(RetraceCandidateGenerator, "_rejected", parts),
            timed(drafter, "_admit", parts),
            timed(RetraceCandidateGenerator, "get_candidates", drafts),
            record_acceptance() as stats,
        ):
            target.generate(
                torch.tensor([row["prompt_ids"]]),
                assistant_model=drafter,
                max_new_tokens=args.max_new_tokens,
                do_sample=False,
            )
            end = time.perf_counter()
        spent += sum(stop - start for start, stop in parts)
        if len(drafts) < 2:  # ended with the prefill's token
            continue
        seconds += end - drafts[1][0]  # the first asks for the prefill
        rounds += stats.rounds
    if not rounds:
        return None
    return {
        "conditioning_ms": 1000 * spent / rounds,
        "round_ms": 1000 * seconds / rounds,
        "share": spent / seconds,
    }


# -- the whole -------------------------------------------------------------------------------------------------------


def drafter_key(described: dict) -> dict:
    return {"weights": described["weights"], "config": described["config"]}


def main():
    args = parse_args()
    target, tokenizer = load_target(args.target)
    rows = read_rows(args, tokenizer)
    kinds = [row["kind"] for row in rows]
    described = {name: describe_drafter(folder) for name, folder in args.arms.items()}
    key = {
        "target": target_fingerprint(target),
        "prompts": file_hash(args.prompts),
        "max_new_tokens": args.max_new_tokens,
    }
    answers = plain_answers(args, target, rows, KeptLines(f"{args.output}.answers.jsonl", key))

    variants, played = {}, {}
    for name in args.arms:
        kept = KeptLines(f"{args.output}.arms.jsonl", {**key, **drafter_key(described[name])})
        played[name] = play_arm(args, target, name, rows, answers, kept)
        variants[name] = summarize(played[name], kinds)
        print(name, {kind: round(entry["acceptance_length"], 3) for kind, entry in variants[name].items()}, flush=True)

    results = {"variants": variants}
    if args.baseline is not None:
        results[f"acceptance_length_over_{args.baseline}"] = ratios_over(args.baseline, played, kinds)
    if args.generate is not None:
        chosen = limit_each_kind(rows, args.generate_limit)
        # Seconds belong to a machine, and seconds and texts to a state of the code.
        run = provenance([], threads=torch.get_num_threads(), name=args.generate)
        del run["command"]
        kept_under = {**key, **drafter_key(described[args.generate]), **run}
        kept = KeptLines(f"{args.output}.generate.jsonl", kept_under)
        answered = generate_all(args, target, chosen, kept)
        generated = summarize_generated(answered, chosen)
        compared, texts = list(chosen), list(answered[args.generate])
        if args.generate_rest:
            rest = [row for row in rows if row["id"] not in {r["id"] for r in chosen}]
            kept = KeptLines(f"{args.output}.rest.jsonl", kept_under)
            texts += generate_rest(args, target, rest, answers, kept)
            compared += rest
        by_id = {row["id"]: stats for row, stats in zip(rows, played[args.generate])}
        results["generate"] = compare_with_rollout(compared, texts, [by_id[row["id"]] for row in compared])
        # Where generate() ran on every prompt its figures are the arm's; else they stand beside it.
        partial = len(chosen) < len(rows)
        for variant, summary in generated.items():
            variants[f"{variant}_generate" if partial and variant == args.generate else variant] = summary
        results["conditioning_cost"] = conditioning_cost(args, target, rows)
    results["provenance"] = provenance(
        [args.prompts],
        target=target.name_or_path,
        arms=described,
        threads=torch.get_num_threads(),
        dtype="float32",
        max_new_tokens=args.max_new_tokens,
        note="acceptance_length is pooled over rounds; intervals are 95 %, bootstrap over prompts",
    )
    write_results(args.output, results)
    print(args.output)


if __name__ == "__main__":
    run_command(main, "evaluate_drafters")
