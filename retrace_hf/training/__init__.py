"""Training: rollout (draft, verify, shift), losses, [`RetraceTrainer`] and its arguments."""

from .arguments import RetraceTrainingArguments
from .checkpoints import last_whole_checkpoint
from .interrupt import saving_on_interrupt
from .sharding import loading_whole
from .trainer import RetraceTrainer


__all__ = [
    "RetraceTrainer",
    "RetraceTrainingArguments",
    "last_whole_checkpoint",
    "loading_whole",
    "saving_on_interrupt",
]
