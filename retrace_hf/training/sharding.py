"""Models that are sharded over processes: what FSDP and DeepSpeed's ZeRO-3 do to a frozen target beside a drafter."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel, TrainingArguments
from transformers.integrations.deepspeed import (
    is_deepspeed_zero3_enabled,
    set_hf_deepspeed_config,
    unset_hf_deepspeed_config,
)


@contextmanager
def loading_whole(args: TrainingArguments) -> Iterator[torch.device]:
    """Gives the device on which target and drafter are to be loaded within.

    Under ZeRO-3 that is host memory, and `from_pretrained` reads whole weights, where it would else shard them at
    once: the trainer looks at both models first. Otherwise it is the process's own device.
    """
    if not is_deepspeed_zero3_enabled():
        yield args.device
        return
    config = getattr(args, "hf_deepspeed_config", None) or args.deepspeed_plugin.dschf
    unset_hf_deepspeed_config()
    try:
        yield torch.device("cpu")
    finally:
        set_hf_deepspeed_config(config)


def check_not_sharded(target: PreTrainedModel) -> None:
    """Raises a ValueError where ZeRO-3 has sharded the target as it was read."""
    if any(hasattr(parameter, "ds_id") for parameter in target.parameters()):
        raise ValueError(
            "The target's weights were sharded by ZeRO-3 as they were read; load it, and the drafter, within "
            "`with retrace_hf.training.loading_whole(args) as device:`, and the trainer shards them."
        )


def check_fsdp(plugin) -> None:
    """Raises a ValueError where FSDP's options leave the target's weights to one process."""
    if plugin is not None and plugin.cpu_ram_efficient_loading:
        raise ValueError(
            "fsdp_cpu_ram_efficient_loading is true, with which only one process reads the target's weights and the "
            "others train on empty ones; set it to false, as in examples/accelerate/fsdp2.yaml."
        )


def shard_target(target: PreTrainedModel, args: TrainingArguments) -> None:
    """Shards the target's body over all processes with ZeRO-3, in place. Its head stays whole on each, since the loss
    runs it alone, chunk by chunk."""
    import deepspeed

    head, body = target.get_output_embeddings(), target.get_decoder()
    if head.weight is target.get_input_embeddings().weight:
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    head.to(args.device)
    size = target.config.get_text_config(decoder=True).hidden_size
    offload = args.deepspeed_plugin.deepspeed_config["zero_optimization"].get("offload_param")
    config = {
        # No precision is set: the target keeps its own, its rotary frequencies float32.
        "train_micro_batch_size_per_gpu": args.per_device_train_batch_size,
        "zero_optimization": {
            "stage": 3,
            "offload_param": offload or {"device": "none"},
            # Norms stay whole, which costs less than to gather them.
            "stage3_param_persistence_threshold": 10 * size,
            "stage3_prefetch_bucket_size": size * size,
        },
        "steps_per_print": float("inf"),
    }
    # One weight after the other goes to the device and is cut there. Left to initialize(), all of them would.
    deepspeed.zero.Init(module=body, config_dict_or_path=config)
    for buffer in body.buffers():
        buffer.data = buffer.data.to(args.device)
    deepspeed.initialize(model=body, config=config)[0].eval()
