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
from retrace_hf.card import write_card
from retrace_hf.configuration_retrace import PROPOSALS
from retrace_hf.files import write_text
from retrace_hf.terminal import run_command


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


def ship_results(results_file: Path, folder: Path, **metadata):
    write_text(folder / "results.json", results_file.read_text())
    write_card(folder, **metadata)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("run", nargs="?", type=Path, help="folder of the trained drafter")
    parser.add_argument("folder", type=Path, help="folder to ship it in")
    parser.add_argument("--proposal", choices=PROPOSALS, help="what it proposes under sampling; as it was by default")
    parser.add_argument("--results", type=Path, help="results.json to ship, with the card made from it")
    parser.add_argument("--license", help="licence of the weights, for the card; what the card says by default")
    args = parser.parse_args()
    if args.run is not None:
        ship_weights(args.run, args.folder, args.proposal)
    if args.results is not None:
        ship_results(args.results, args.folder, license=args.license)


if __name__ == "__main__":
    run_command(main, "ship_drafter")
