"""One process of a training run over several, as a script: `python -m tests.distributed_worker JSON` with the
environment that torchrun and accelerate set. `tests/test_distributed.py` starts it."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from datasets import Dataset
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, set_seed

from retrace_hf import RetraceTrainer
from retrace_hf.training import last_whole_checkpoint, saving_on_interrupt

from .fixtures import randomize, tiny_drafter, tiny_target
from .test_trainer import arguments


class PressCtrlC(TrainerCallback):
    """Interrupts, in the middle of a step, the second process alone or the launcher, as a terminal does."""

    def __init__(self, whom: str, step: int):
        self.whom, self.step = whom, step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step and args.process_index == 1:
            os.kill(os.getpid() if self.whom == "process" else os.getppid(), signal.SIGINT)
            if self.whom == "launcher":
                time.sleep(2)  # until it has sent it on


def train(
    folder: str,
    rows: list[dict],
    eval_prompts: list[dict] | None = None,
    interrupt: tuple[str, int] | None = None,
    resume: bool = False,
    fsdp: bool = False,
    lora: bool = False,
    drafter: dict | None = None,
    **kwargs,
) -> RetraceTrainer:
    """Trains a tiny drafter, and saves it to `folder`."""
    target = tiny_target("qwen3")
    model = randomize(tiny_drafter(target, **drafter or {}))
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(target_modules="all-linear", r=4))
    args = arguments(folder, **kwargs)
    if fsdp and args.device.type == "cpu":
        # accelerate shards on accelerators only, by the kind of process; torch itself shards on a CPU as well.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU
    set_seed(args.seed)
    trainer = RetraceTrainer(
        model=model,
        target=target,
        args=args,
        train_dataset=Dataset.from_list(rows),
        eval_prompts=eval_prompts,
        callbacks=[PressCtrlC(*interrupt)] if interrupt else None,
    )
    with saving_on_interrupt(trainer) as stopped:
        trainer.train(resume_from_checkpoint=last_whole_checkpoint(folder) if resume else None)
    assert isinstance(next(trainer.model.parameters()), DTensor) == fsdp
    parts = [p for p in trainer.target.parameters() if hasattr(p, "ds_tensor") and p.ds_tensor.numel() < p.ds_numel]
    assert bool(parts) == (os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE") == "3")
    if not stopped.asked:
        trainer.save_model()
        trainer.save_state()
    return trainer


if __name__ == "__main__":
    torch.set_num_threads(1)
    for options in json.loads(Path(sys.argv[1]).read_text()):
        train(**options)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if "deepspeed" in sys.modules:
        # Its engines hold groups of gloo beyond this point, whose threads abort some interpreters as they end.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
