"""Draws tau against tokens or blocks seen, of one run or of several, as a PNG. Needs matplotlib.

    python examples/plot_learning_curve.py runs/stage1 runs/corrected --output curve.png

The checkpoints of one run, measured on held-out prompts, over the blocks they were trained on (a table is printed):

    python examples/evaluate_drafters.py --limit 16 --output runs/curve/results.json \\
        --arm 500=runs/stage1/checkpoint-500 --arm 1000=runs/stage1/checkpoint-1000
    python examples/plot_learning_curve.py runs/stage1 --over blocks --results runs/curve/results.json

A run is a folder that `RetraceTrainer` wrote to (its trainer_state.json is read, or that of its newest checkpoint), or
such a file. Drawn are `eval_tau`, what `generate()` accepted on held-out prompts, and the training text's `tau_fresh`
and `tau_carried_*`; `--metrics eval_tau eval_tau_gsm8k` draws others.
"""

import argparse
import json
import re
from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME

from retrace_hf.terminal import run_command
from retrace_hf.training import last_whole_checkpoint


SEEN = {"tokens": "num_input_tokens_seen", "blocks": "num_blocks_seen"}
DEFAULT = r"eval_tau|tau_fresh|tau_carried_\d+"


def read_history(run: Path) -> list[dict]:
    """What a run has logged."""
    file = run
    if run.is_dir():
        file = run / TRAINER_STATE_NAME
        if not file.is_file():  # written at the end; before that the checkpoints hold it
            newest = last_whole_checkpoint(run)
            if newest is None:
                raise ValueError(f"{run} holds no {TRAINER_STATE_NAME} and no whole checkpoint; name a run's folder.")
            file = Path(newest, TRAINER_STATE_NAME)
    if not file.is_file():
        raise ValueError(f"There is no {run}; name the folder of a run, or its {TRAINER_STATE_NAME}.")
    return json.loads(file.read_text(encoding="utf-8"))["log_history"]


def curves(history: list[dict], metrics: list[str] | None, run: Path, seen: str) -> dict:
    """By metric, tokens or blocks seen and value."""
    found, blocks = {}, 0
    for entry in history:
        blocks = entry.get("num_blocks_seen", blocks)
        at = {"num_blocks_seen": blocks, **entry} if blocks else entry  # evaluations do not count them again
        for name, value in entry.items():
            if name in metrics if metrics else re.fullmatch(DEFAULT, name):
                if seen not in at:
                    raise ValueError(
                        f"{run} logged {name} without {seen}; train with "
                        "include_num_input_tokens_seen='non_padding', RetraceTrainingArguments' default, and with a "
                        "retrace_hf that counts blocks."
                    )
                found.setdefault(name, []).append((at[seen], value))
    if not found:
        names = ", ".join(metrics or ["eval_tau", "tau_fresh", "tau_carried_*"])
        raise ValueError(f"{run} logged none of {names}; set --logging_steps and --eval_steps smaller, or --metrics.")
    return found


def measured(results: Path, history: list[dict], seen: str, run: Path) -> dict[str, list[tuple[int, float]]]:
    """By kind of prompt, tokens or blocks seen and tau of the arms that are named by steps (0: the start)."""
    by_step = {0: 0, **{entry["step"]: entry[seen] for entry in history if seen in entry}}
    variants = json.loads(results.read_text(encoding="utf-8"))["variants"]
    found = {}
    for name, kinds in variants.items():
        if name.isdigit():
            if int(name) not in by_step:
                raise ValueError(f"{run} logged nothing at step {name}, an arm of {results}; set logging_steps so.")
            for kind, tau in kinds.items():
                found.setdefault(f"eval {kind}", []).append((by_step[int(name)], tau["acceptance_length"]))
    if not found:
        raise ValueError(f"No arm of {results} is named by a step; evaluate with --arm STEP=FOLDER.")
    return {name: sorted(points) for name, points in found.items()}


def draw(runs: dict[str, dict[str, list[tuple[int, float]]]], output: Path, over: str):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for i, (run, by_metric) in enumerate(runs.items()):
        for name, points in sorted(by_metric.items()):
            held_out = name.startswith("eval")
            axes.plot(
                *zip(*points),
                color=f"C{i}" if len(runs) > 1 else None,
                marker="o" if held_out else None,
                alpha=1.0 if held_out else 0.6,
                linestyle="-" if held_out or len(runs) == 1 else {"tau_fresh": "--"}.get(name, ":"),
                label=f"{run}: {name}" if len(runs) > 1 else name,
            )
    axes.set(xlabel=f"{over} seen", ylabel="tau (tokens a round)")
    axes.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=150)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, or its trainer_state.json")
    parser.add_argument("--output", type=Path, default=Path("learning_curve.png"), help="the PNG to write")
    parser.add_argument("--metrics", nargs="+", help="what to draw; eval_tau, tau_fresh and tau_carried_* by default")
    parser.add_argument("--over", choices=list(SEEN), default="tokens", help="what the run is measured by")
    parser.add_argument("--results", type=Path, help="results.json whose arms are named by steps of the one run")
    args = parser.parse_args()
    if args.output.suffix != ".png":
        parser.error(f"--output {args.output} must end in .png.")
    if args.results is not None and len(args.runs) != 1:
        parser.error(f"--results goes with one run, not {len(args.runs)}.")
    seen, found = SEEN[args.over], {}
    for run in args.runs:
        history = read_history(run)
        found[str(run)] = curves(history, args.metrics, run, seen)
        if args.results is not None:
            points = measured(args.results, history, seen, run)
            found[str(run)] |= points
            print(f"| {args.over} seen | " + " | ".join(name.removeprefix("eval ") for name in points) + " |")
            print("|--:" * (1 + len(points)) + "|")
            for i, (count, _) in enumerate(next(iter(points.values()))):
                print(f"| {count:,} | " + " | ".join(f"{values[i][1]:.3f}" for values in points.values()) + " |")
    draw(found, args.output, args.over)
    print(f"Wrote {args.output}.")


if __name__ == "__main__":
    run_command(main, "plot_learning_curve")
