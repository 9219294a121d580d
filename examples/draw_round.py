"""
Draws one round of ReTrace, the picture at the top of README.md.

    python examples/draw_round.py --output examples/round.png

What goes from a round to the next is taken from the package's own alignment, not drawn by hand. Needs the extra plot.
"""

import argparse
from pathlib import Path

import matplotlib
import torch

from retrace_hf import align_trajectory
from retrace_hf.terminal import run_command


matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch  # noqa: E402


DRAFT = ("it", "bends", "blue", "rays", "far", "more", "than", "red")
ACCEPTED = 2
CORRECTION = "light"
GREEN, YELLOW, RED, GREY, BLUE, PURPLE = "#b7e1c1", "#f6d999", "#f3b9b4", "#e9ecef", "#2f6fb7", "#8b4aa8"
HEIGHTS = {"draft": 4.0, "verify": 2.0, "next": 0.0}
WIDTH, HEIGHT = 0.86, 0.62


def carried(block_size: int, accepted: int) -> list[tuple[int, int, int]]:
    """For each slot of the next block with a signal: the slot, and the rows whose draft and target states it gets."""
    rows = torch.arange(block_size, dtype=torch.float32)[None, :, None]
    trajectory = align_trajectory(rows, rows, first_rejected=accepted + 1, num_verified=block_size - 1)
    slots = trajectory.valid[0].nonzero()[:, 0].tolist()
    return [(slot, int(trajectory.draft[0, slot, 0]), int(trajectory.target[0, slot, 0])) for slot in slots]


def draw(output: Path):
    """Writes the picture. Columns are positions in the text, so what a position keeps stays in its column."""
    block_size, first_rejected = len(DRAFT), ACCEPTED + 1
    figure, axes = plt.subplots(figsize=(10.5, 4.6))
    for position, word in enumerate(DRAFT):
        colour = YELLOW if position == 0 else GREY
        _box(axes, position, "draft", word, colour)
        if position == 0:
            colour = YELLOW
        else:
            colour = GREEN if position <= ACCEPTED else RED
        _box(axes, position, "verify", word, colour, struck=position > ACCEPTED)
    signal = {slot for slot, _, _ in carried(block_size, ACCEPTED)}
    for slot in range(block_size):
        word = CORRECTION if slot == 0 else "mask"
        _box(axes, first_rejected + slot, "next", word, YELLOW if slot == 0 else GREY, framed=slot in signal)
    for slot, draft_row, target_row in carried(block_size, ACCEPTED):
        place = first_rejected + slot
        _arrow(axes, (draft_row + 0.24, "draft"), (place + 0.24, "next"), BLUE)
        _arrow(axes, (target_row + 0.2, "verify"), (place - 0.2, "next"), PURPLE)
    for row, text in {
        "draft": "1  The drafter proposes\na block in one pass",
        "verify": f"2  The target checks it in one pass:\n{ACCEPTED} accepted, then a rejection;\n"
        f"its own token there is “{CORRECTION}”",
        "next": "3  The next block starts at the\ncorrection, and its slots get\nwhat both made of the rest",
    }.items():
        axes.text(-0.75, HEIGHTS[row] + HEIGHT / 2, text, ha="right", va="center", fontsize=10)
    last = first_rejected + block_size - 1
    axes.plot([], [], color=BLUE, label="the drafter's state\nof a rejected position")
    axes.plot([], [], color=PURPLE, label="the target's state\nthat scored it")
    # Beside the first two rows, where the next block has not begun.
    axes.legend(loc="center left", bbox_to_anchor=(0.80, 0.72), frameon=False, fontsize=9)
    axes.set_xlim(-4.6, last + 0.6)
    axes.set_ylim(-0.4, HEIGHTS["draft"] + HEIGHT + 0.1)
    axes.axis("off")
    figure.savefig(output, dpi=110, bbox_inches="tight", facecolor="white", metadata={"Software": None})
    plt.close(figure)


def _box(axes, position: int, row: str, word: str, colour: str, struck: bool = False, framed: bool = False):
    corner = (position - WIDTH / 2, HEIGHTS[row])
    style = {"edgecolor": BLUE if framed else "#6c757d", "linewidth": 2 if framed else 0.8}
    axes.add_patch(
        FancyBboxPatch(corner, WIDTH, HEIGHT, boxstyle="round,pad=0.01", facecolor=colour, zorder=3, **style)
    )
    middle = HEIGHTS[row] + HEIGHT / 2
    axes.text(position, middle, word, ha="center", va="center", fontsize=9, zorder=4)
    if struck:
        axes.plot([position - 0.36, position + 0.36], [middle, middle], color="#9b2c22", linewidth=1, zorder=5)


def _arrow(axes, start: tuple[float, str], end: tuple[float, str], colour: str):
    (x, row), (to_x, to_row) = start, end
    tips = (x, HEIGHTS[row] - 0.02), (to_x, HEIGHTS[to_row] + HEIGHT + 0.03)
    axes.add_patch(FancyArrowPatch(*tips, arrowstyle="-|>", mutation_scale=9, color=colour, linewidth=1.2, zorder=2))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "round.png", help="the PNG to write")
    draw(parser.parse_args().output)


if __name__ == "__main__":
    run_command(main, "draw_round.py")
