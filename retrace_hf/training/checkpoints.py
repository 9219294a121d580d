"""Which checkpoint a run goes on from."""

import json
import os
import re
from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME


def is_whole(checkpoint: str | os.PathLike) -> bool:
    """Whether a checkpoint was written to its end: Trainer writes its state last."""
    try:
        json.loads(Path(checkpoint, TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True


def last_whole_checkpoint(folder: str | os.PathLike) -> str | None:
    """The newest checkpoint in `folder` to go on from. One that a kill cut short is passed over."""
    numbered = {int(m[1]): p for p in Path(folder).glob("checkpoint-*") if (m := re.search(r"-(\d+)$", p.name))}
    return next((str(path) for _, path in sorted(numbered.items(), reverse=True) if is_whole(path)), None)
