"""What the drafter reads of the target, times what it remembers of the last round: trains every arm and compares them.

    python examples/ablation.py --responses examples/data/responses_0.jsonl.gz --output_dir runs/ablation

For each context (`--fusions` shared: DFlash, layerwise: DFlare, kv and hybrid: KVShot, whose keys keep the target's
RoPE, and kv-reapplied and hybrid-reapplied, where it is taken off before the projection and put on again behind it),
each depth and each seed a stage 1 is trained on the same data for the same steps, and from it two arms: `none`, the
SFT control (carried rounds, no signal), and `corrected`, ReTrace. All are then measured on the same held-out prompts.
Written are results.json, results.md (tau with 95 % intervals, bootstrap over prompts; ReTrace over its control, and
each context over the shared one, paired by prompt, of each seed and of all; parameters; milliseconds a round) and
results.png.

With `--init_from FOLDER` every stage 1 starts from that DFlash (RetraceDrafter.from_dflash says what each context
keeps of it), without it from the target's layers. What is not named here goes to examples/train_retrace.py, for all
arms alike: `--num_anchors 32 --per_device_train_batch_size 4 --loss_type dpace --bf16 True`.

Each arm is a run of train_retrace.py, and goes on where it was stopped; what is measured is kept by the hash of its
weights. The same command goes on, and once all is there only writes the files again.
"""

import argparse
import gc
import json
import statistics
import sys
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch


sys.path.insert(0, str(Path(__file__).parent))  # the two scripts beside this one

import evaluate_drafters
import train_retrace

from retrace_hf import RetraceCandidateGenerator, RetraceConfig, RetraceDrafter
from retrace_hf.configuration_retrace import CONTEXT_FUSIONS, READS_TARGET_KV
from retrace_hf.data.features import target_fingerprint
from retrace_hf.evaluation import AcceptanceStats, KeptLines, bootstrap_ratio, summarize, write_results
from retrace_hf.evaluation.results import describe_drafter, file_hash, provenance
from retrace_hf.files import write_text
from retrace_hf.measure import answer, timed
from retrace_hf.targets import load_target
from retrace_hf.terminal import run_command


# Options of train_retrace.py that differ between the arms or their stages.
SET_HERE = (
    *("max_steps", "learning_rate", "conditioning", "context_fusion", "context_kv_rope", "num_draft_layers"),
    *("init_from_target", "seed"),
)
LEAST = {
    **{"stage1_steps": 1, "stage2_steps": 1, "num_carried_rounds": 1, "max_new_tokens": 2, "limit_prompts": 1},
    **{"eval_batch_size": 1, "timed_prompts": 1, "depths": 1, "seeds": 0},
}
DESTINATIONS = {"limit_prompts": "limit", "eval_batch_size": "batch_size"}  # as evaluate_drafters.py calls them
ARMS = {"none": "SFT control", "corrected": "ReTrace"}
REAPPLIED = "-reapplied"
CONTEXTS = (*CONTEXT_FUSIONS, *(fusion + REAPPLIED for fusion in READS_TARGET_KV))


class Group(NamedTuple):
    """What stage 1 and the two arms trained from it have in common."""

    context: str  # one of CONTEXTS
    depth: int  # draft layers
    seed: int | None  # of training; None: all of them


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--responses", nargs="+", required=True, help="text that the target wrote, for both stages")
    parser.add_argument("--stage2_responses", nargs="+", help="text of stage 2, where it is to be another")
    parser.add_argument("--target", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--init_from", help="a DFlash that every stage 1 starts from")
    parser.add_argument("--fusions", nargs="+", choices=CONTEXTS, default=list(CONTEXT_FUSIONS))
    parser.add_argument("--depths", nargs="+", type=int, help="draft layers, 3 by default; --init_from brings its own")
    parser.add_argument("--target_layer_ids", nargs="+", type=int, help="tapped layers of new drafters")
    parser.add_argument("--target_kv_layer_ids", nargs="+", type=int, help="layers whose keys and values are read")
    parser.add_argument("--seeds", nargs="+", type=int, default=[42], help="of training; every arm once with each")
    parser.add_argument("--mask_token", help="token for the slots of new drafters")
    parser.add_argument("--stage1_steps", type=int, default=600)
    parser.add_argument("--stage2_steps", type=int, default=150)
    parser.add_argument("--stage1_learning_rate", type=float, default=1e-3)
    parser.add_argument("--stage2_learning_rate", type=float, default=3e-4)
    parser.add_argument("--num_carried_rounds", type=int, default=2, help="of stage 2")
    parser.add_argument("--features_dir", help="folder for target features computed once")
    parser.add_argument("--prompts", default=str(Path(__file__).parent / "data" / "eval_prompts.jsonl"))
    parser.add_argument("--limit_prompts", dest="limit", type=int, help="prompts of each kind at most")
    parser.add_argument("--max_new_tokens", type=int, default=128)
    parser.add_argument("--eval_batch_size", dest="batch_size", type=int, default=43)
    parser.add_argument("--timed_prompts", type=int, default=4, help="prompts that seconds a round are measured on")
    args, args.training = parser.parse_known_args([underscored(one) for one in sys.argv[1:]])
    if args.init_from is not None and args.depths:
        parser.error("--depths goes with new drafters; --init_from brings its own layers.")
    if args.init_from is not None and (args.target_layer_ids or args.mask_token):
        parser.error("--target_layer_ids and --mask_token go with new drafters; --init_from brings its own.")
    options = [one for one in args.training if one.startswith("--")]
    set_here = [one for one in options if one.split("=")[0].removeprefix("--") in SET_HERE]
    if set_here:
        parser.error(f"{set_here[0]} is set here for each arm, and cannot be passed on to train_retrace.py.")
    args.depths = args.depths or [3]
    for option in ("fusions", "depths", "seeds"):
        if len(set(getattr(args, option))) < len(getattr(args, option)):
            parser.error(f"--{option} names one of them twice.")
    for option, least in LEAST.items():
        given = getattr(args, DESTINATIONS.get(option, option))
        if given is not None and min(given if isinstance(given, list) else [given]) < least:
            parser.error(f"--{option} must be at least {least}.")
    return args


def underscored(argument: str) -> str:
    """train_retrace.py takes --max-steps for --max_steps; here an option has one name."""
    name, *value = argument.split("=", 1)
    return "=".join([name.replace("-", "_").replace("__", "--", 1), *value]) if name.startswith("--") else argument


# -- training --------------------------------------------------------------------------------------------------------


def groups(args) -> list[Group]:
    return [Group(*one) for one in product(args.fusions, args.depths, args.seeds)]


def name_of(args, group: Group, *arm: str) -> str:
    """Of a run's folder and its row, or of its group; what is the same for all runs is left out."""
    depth = [str(group.depth)] if len(args.depths) > 1 else []
    seed = [f"seed{group.seed}"] if len(args.seeds) > 1 and group.seed is not None else []
    return "-".join([group.context, *depth, *seed, *arm])


def train(args, name: str, *options) -> Path:
    """Runs train_retrace.py in this process; it leaves a run alone that has ended."""
    folder = args.output_dir / name
    print(f"== {name}", flush=True)
    common = ["--target", args.target, "--output_dir", folder, *args.training]
    argv, sys.argv = sys.argv, ["examples/train_retrace.py", *map(str, [*common, *options])]
    try:
        train_retrace.main()
    finally:
        sys.argv = argv
    gc.collect()  # models and their optimizers refer to each other
    return folder


def new_drafter(args, group: Group) -> list:
    """Options of stage 1 alone: where the drafter comes from and what it reads. Stage 2 takes over both."""
    fusion = group.context.removesuffix(REAPPLIED)
    options = {"init_from": args.init_from, "mask_token": args.mask_token, "context_fusion": fusion}
    if args.init_from is None:
        options["num_draft_layers"] = group.depth
    if fusion != "kv":
        options["target_layer_ids"] = args.target_layer_ids
    if fusion in READS_TARGET_KV:
        rope = "reapplied" if group.context.endswith(REAPPLIED) else None
        options |= {"target_kv_layer_ids": args.target_kv_layer_ids, "context_kv_rope": rope}
    found = []
    for name, value in options.items():
        if value is not None:
            found += [f"--{name}", *(value if isinstance(value, list) else [value])]
    return found


def train_group(args, group: Group) -> dict[str, str]:
    """By arm, its folder. Both arms start from the same stage 1."""
    read = ["--features_dir", args.features_dir] if args.features_dir else []
    name = name_of(args, group, "stage1")
    stage1 = train(
        args,
        name,
        *("--responses", *args.responses, *new_drafter(args, group), *read, "--seed", group.seed),
        *("--conditioning", "none", "--num_carried_rounds", 0),
        *("--max_steps", args.stage1_steps, "--learning_rate", args.stage1_learning_rate),
    )
    arms = {name: str(stage1)}
    for arm in ARMS:
        name = name_of(args, group, arm)
        folder = train(
            args,
            name,
            *("--responses", *(args.stage2_responses or args.responses), "--seed", group.seed),
            *("--init_from", stage1, "--conditioning", arm, "--num_carried_rounds", args.num_carried_rounds),
            *("--max_steps", args.stage2_steps, "--learning_rate", args.stage2_learning_rate),
        )
        arms[name] = str(folder)
    return arms


def train_all(args) -> dict[str, str]:
    return {name: folder for group in groups(args) for name, folder in train_group(args, group).items()}


# -- measuring -------------------------------------------------------------------------------------------------------


def time_rounds(args, target, rows: list[dict]) -> dict[str, dict[str, float]]:
    """By arm, milliseconds a round: the median of the drafter's forward, and of a whole round. The arms take turns on
    each prompt, so that a machine that slows down slows them all."""
    drafters = {name: evaluate_drafters.load_drafter(folder) for name, folder in args.arms.items()}
    forward, whole = {name: [] for name in drafters}, {name: [] for name in drafters}
    chosen = rows[:: max(1, len(rows) // args.timed_prompts)][: args.timed_prompts]
    for number, row in enumerate([chosen[0], *chosen]):  # the first once more before, to warm up
        inputs = {"input_ids": torch.tensor([row["prompt_ids"]], device=target.device)}
        for name, drafter in drafters.items():
            parts, rounds = [], []
            with timed(drafter, "forward", parts), timed(RetraceCandidateGenerator, "get_candidates", rounds):
                answer(target, inputs, args.max_new_tokens, drafter=drafter)
            if number == 0:
                continue
            # The first two belong to the prompt: its prefill, and the context of all of it.
            starts = [start for start, _ in rounds[2:]]
            forward[name] += [end - start for start, end in parts[1:]]
            whole[name] += [later - start for start, later in zip(starts, starts[1:])]
    return {
        name: {
            "drafter_ms": 1000 * statistics.median(forward[name]) if forward[name] else None,
            "round_ms": 1000 * statistics.median(whole[name]) if whole[name] else None,
        }
        for name in drafters
    }


def gates(folder: str) -> list[tuple[int, float]]:
    """Step and mean gate over a run, of a hybrid drafter."""
    state = Path(folder, "trainer_state.json")
    history = json.loads(state.read_text(encoding="utf-8"))["log_history"] if state.is_file() else []
    return [(entry["step"], entry["gate_mean"]) for entry in history if "gate_mean" in entry]


def describe(folder: str) -> dict:
    """Size and context of a drafter."""
    config = RetraceConfig.from_pretrained(folder)
    drafter = RetraceDrafter.from_pretrained(folder)
    return {
        "context_fusion": config.context_fusion,
        "context_kv_rope": config.context_kv_rope if config.context_fusion in READS_TARGET_KV else None,
        "conditioning": config.conditioning,
        "num_hidden_layers": config.num_hidden_layers,
        "target_layer_ids": config.target_layer_ids,
        "target_kv_layer_ids": config.target_kv_layer_ids,
        "parameters": sum(p.numel() for p in drafter.parameters()),
        "gate_mean": gates(folder),
    }


def measure(args) -> dict:
    target, tokenizer = load_target(args.target)
    rows = evaluate_drafters.read_rows(args, tokenizer)
    kinds = [row["kind"] for row in rows]
    described = {name: describe_drafter(folder) for name, folder in args.arms.items()}
    key = {
        "target": target_fingerprint(target),
        "prompts": file_hash(args.prompts),
        "max_new_tokens": args.max_new_tokens,
    }
    kept = KeptLines(args.output_dir / "answers.jsonl", key)
    answers = evaluate_drafters.plain_answers(args, target, rows, kept)
    played = {}
    for name in args.arms:
        kept = KeptLines(args.output_dir / "rounds.jsonl", {**key, **evaluate_drafters.drafter_key(described[name])})
        played[name] = evaluate_drafters.play_arm(args, target, name, rows, answers, kept)
    # Seconds belong to a machine, and to all arms together.
    run = provenance([], threads=torch.get_num_threads())
    del run["command"]
    weights = {name: evaluate_drafters.drafter_key(one) for name, one in described.items()}
    kept = KeptLines(args.output_dir / "seconds.jsonl", {**key, **run, "arms": weights, "rows": args.timed_prompts})
    if "all" not in kept:
        kept.add({"id": "all", "cost": time_rounds(args, target, rows)})
    return {
        "arms": {
            name: {**describe(folder), **kept["all"]["cost"][name], "tau": summarize(played[name], kinds)}
            for name, folder in args.arms.items()
        },
        "corrected_over_none": corrected_over_none(args, played),
        "over_shared": over_shared(args, played),
        "provenance": provenance(
            [args.prompts, *args.responses],
            target=target.name_or_path,
            arms=described,
            threads=torch.get_num_threads(),
            dtype="float32",
            max_new_tokens=args.max_new_tokens,
            note="tau is pooled over rounds, bonus token included; intervals are 95 %, bootstrap over prompts",
        ),
    }


def corrected_over_none(args, played: dict[str, list[AcceptanceStats]]) -> dict[str, dict]:
    """What the signal is worth: tau of every ReTrace over its control's."""
    return ratios(args, played, [(group, "corrected", group, "none") for group in groups(args)])


def over_shared(args, played: dict[str, list[AcceptanceStats]]) -> dict[str, dict]:
    """What a context is worth: tau of every arm over that of the shared context's same arm."""
    if "shared" not in args.fusions:
        return {}
    pairs = product([group for group in groups(args) if group.context != "shared"], ("stage1", *ARMS))
    return ratios(args, played, [(group, arm, group._replace(context="shared"), arm) for group, arm in pairs])


def ratios(args, played: dict[str, list[AcceptanceStats]], pairs: list[tuple[Group, str, Group, str]]) -> dict:
    """One over the other for each pair `(group, arm, group, arm)`, by the name of the first; and with several seeds,
    under the name without one, over the rounds of all of them, prompt by prompt: the interval is over prompts, what
    seeds do stands in `seeds`, one ratio each."""
    found, over_seeds = {}, {}
    for group, arm, other_group, other_arm in pairs:
        name = name_of(args, group, arm)
        one, other = played[name], played[name_of(args, other_group, other_arm)]
        found[name] = bootstrap_ratio(one, other)
        over_seeds.setdefault(name_of(args, group._replace(seed=None), arm), []).append((one, other, found[name]))
    if len(args.seeds) > 1:
        for name, same in over_seeds.items():
            ones, others, each = zip(*same)
            all_seeds = bootstrap_ratio(by_prompt(ones), by_prompt(others))
            found[name] = {**all_seeds, "seeds": [ratio["ratio"] for ratio in each]}
    return found


def by_prompt(played: tuple[list[AcceptanceStats], ...]) -> list[AcceptanceStats]:
    return [AcceptanceStats.pooled(same) for same in zip(*played)]


# -- the table and the plot ------------------------------------------------------------------------------------------


def table(results: dict) -> str:
    """results.md."""

    def ratio(found: dict | None) -> str:
        return (
            "" if found is None else f"{found['ratio']:.3f} [{found['interval'][0]:.3f}, {found['interval'][1]:.3f}]"
        )

    def ms(value: float | None) -> str:
        return "" if value is None else f"{value:.2f}"

    lines = [
        "| arm | layers | parameters | tau [95 %] | over its control | over shared | drafter, ms | round, ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, arm in results["arms"].items():
        tau = arm["tau"]["all"]
        low, high = tau["acceptance_length_interval"]
        cells = [
            name,
            str(arm["num_hidden_layers"]),
            f"{arm['parameters'] / 1e6:.2f} M",
            f"{tau['acceptance_length']:.3f} [{low:.3f}, {high:.3f}]",
            ratio(results["corrected_over_none"].get(name)),
            ratio(results["over_shared"].get(name)),
            ms(arm["drafter_ms"]),
            ms(arm["round_ms"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    tau = next(iter(results["arms"].values()))["tau"]["all"]
    lines += ["", f"{tau['prompts']} prompts; {results['provenance']['note']}; milliseconds are medians over rounds."]
    for title in ("corrected_over_none", "over_shared"):
        for name, found in results[title].items():
            if "seeds" in found:
                each = ", ".join(f"{one:.3f}" for one in found["seeds"])
                lines.append(f"{name}, {title.replace('_', ' ')}, all seeds: {ratio(found)}; of each: {each}.")
    for name, arm in results["arms"].items():
        if arm["gate_mean"]:
            first, last = arm["gate_mean"][0], arm["gate_mean"][-1]
            lines.append(f"Mean gate of {name}: {first[1]:.3f} at step {first[0]}, {last[1]:.3f} at step {last[0]}.")
    return "\n".join(lines) + "\n"


def draw(args, results: dict, output: Path):
    """tau by context and arm, with intervals; and the mean gates over training where there are some."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    arms = results["arms"]
    gated = {name: arm["gate_mean"] for name, arm in arms.items() if arm["gate_mean"]}
    figure, panels = pyplot.subplots(1, 2 if gated else 1, figsize=(12 if gated else 7, 4.5), squeeze=False)
    axes = panels[0][0]
    places = [name_of(args, group) for group in groups(args)]
    for i, (arm, label) in enumerate({"stage1": "stage 1", **ARMS}.items()):
        found = [arms[name_of(args, group, arm)]["tau"]["all"] for group in groups(args)]
        tau = [one["acceptance_length"] for one in found]
        bounds = [one["acceptance_length_interval"] for one in found]
        errors = [[t - low for t, (low, _) in zip(tau, bounds)], [high - t for t, (_, high) in zip(tau, bounds)]]
        axes.errorbar(
            [place + 0.18 * (i - 1) for place in range(len(places))], tau, yerr=errors, fmt="o", capsize=3, label=label
        )
    slanted = {"rotation": 30, "ha": "right"} if len(places) > 4 else {}
    axes.set_xticks(range(len(places)), places, **slanted)
    axes.set(ylabel="tau (tokens a round)")
    axes.grid(alpha=0.3, axis="y")
    axes.legend()
    if gated:
        for name, points in gated.items():
            panels[0][1].plot(*zip(*points), label=name)
        panels[0][1].set(xlabel="step", ylabel="mean gate")
        panels[0][1].grid(alpha=0.3)
        panels[0][1].legend()
    figure.tight_layout()
    figure.savefig(output, dpi=150)
    pyplot.close(figure)


def main():
    args = parse_args()
    args.arms = train_all(args)
    results = measure(args)
    write_results(args.output_dir / "results.json", results)
    write_text(args.output_dir / "results.md", table(results))
    draw(args, results, args.output_dir / "results.png")
    print(table(results))


if __name__ == "__main__":
    run_command(main, "ablation")
