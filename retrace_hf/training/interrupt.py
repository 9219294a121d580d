"""Ctrl-C while training: the step is finished and saved, and nothing is lost."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import Trainer, TrainerCallback, TrainerState


class SaveOnInterrupt(TrainerCallback):
    """Saves and stops at the end of the step in which `asked` became true, in any process. A second request stops at
    once."""

    def __init__(self):
        self.asked = False

    def ask(self, *_):
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        print("Stopping: this step is finished and saved first. Press Ctrl-C again to stop at once.", file=sys.stderr)

    def on_step_end(self, args, state, control, **kwargs):
        if args.world_size > 1:
            # All processes stop at the same step, whichever of them was asked.
            asked = torch.tensor(float(self.asked), device=args.device)
            torch.distributed.all_reduce(asked, op=torch.distributed.ReduceOp.MAX)
            self.asked = bool(asked)
        if self.asked:
            control.should_save = control.should_training_stop = True

    def exit_if_steps_are_left(self, state: TrainerState):
        """For a script, behind `train()`: ends it with status 130 where the run was cut short."""
        if self.asked and state.global_step < state.max_steps:
            print(f"Stopped and saved at step {state.global_step}; the same command goes on.", file=sys.stderr)
            sys.exit(130)


@contextmanager
def saving_on_interrupt(trainer: Trainer) -> Iterator[SaveOnInterrupt]:
    """Within, Ctrl-C lets `trainer.train()` finish its step, save a checkpoint and return; `asked` then says so. For
    the main thread, as signals are."""
    callback = SaveOnInterrupt()
    trainer.add_callback(callback)
    before = signal.signal(signal.SIGINT, callback.ask)
    try:
        yield callback
    finally:
        signal.signal(signal.SIGINT, before)
        trainer.remove_callback(callback)
