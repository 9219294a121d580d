"""Training: rollout (draft, verify, shift), losses, [`RetraceTrainer`] and its arguments."""

from .arguments import RetraceTrainingArguments
from .trainer import RetraceTrainer


__all__ = ["RetraceTrainer", "RetraceTrainingArguments"]
