"""Draws tau against tokens seen, of one run or of several, as a PNG. Needs matplotlib.

    python examples/plot_learning_curve.py runs/stage1 runs/corrected --output curve.png

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


TOKENS = "num_input_tokens_seen"
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


def curves(history: list[dict], metrics: list[str] | None, run: Path) -> dict[str, list[tuple[int, float]]]:
    """By metric, tokens seen and value."""
    found = {}
    for entry in history:
        for name, value in entry.items():
            if name in metrics if metrics else re.fullmatch(DEFAULT, name):
                if TOKENS not in entry:
                    raise ValueError(
                        f"{run} logged {name} without {TOKENS}; train with "
                        "include_num_input_tokens_seen='non_padding', RetraceTrainingArguments' default."
                    )
                found.setdefault(name, []).append((entry[TOKENS], value))
    if not found:
        names = ", ".join(metrics or ["eval_tau", "tau_fresh", "tau_carried_*"])
        raise ValueError(f"{run} logged none of {names}; set --logging_steps and --eval_steps smaller, or --metrics.")
    return found


def draw(runs: dict[str, dict[str, list[tuple[int, float]]]], output: Path):
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
    axes.set(xlabel="tokens seen", ylabel="tau (tokens a round)")
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
    args = parser.parse_args()
    if args.output.suffix != ".png":
        parser.error(f"--output {args.output} must end in .png.")
    draw({str(run): curves(read_history(run), args.metrics, run) for run in args.runs}, args.output)
    print(f"Wrote {args.output}.")


if __name__ == "__main__":
    run_command(main, "plot_learning_curve")
