"""Data for training a drafter: prompts, the target's own responses to them, tokens with loss masks, batches."""

from .collator import RetraceDataCollator


__all__ = ["RetraceDataCollator"]
