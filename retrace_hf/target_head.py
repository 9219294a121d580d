"""The target's LM head, and what its class does to the head's output."""

from itertools import chain

import torch
from torch import nn
from transformers import PreTrainedModel

from .few_rows import apply_linear


# What weights are stored in where they are not quantised (float8 ones are).
_PLAIN_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def draft_logits(target: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    """The target's logits for states after its final norm: its LM head and what its model class does behind it.

    Known: Granite's `logits_scaling` (a divisor), Cohere's `logit_scale`, the `output_multiplier` and
    `lm_head_multiplier` of others (factors), and `final_logit_softcapping` of the Gemma family.

    Args:
        target (`PreTrainedModel`): The target.
        hidden (`torch.Tensor` of shape `[b, k, D]`): On any device, in any floating dtype.

    Returns:
        `torch.Tensor` of shape `[b, k, V]`, where and as the head returns it.
    """
    return transform_logits(target, head_logits(target, hidden))


def transform_logits(target: PreTrainedModel, logits: torch.Tensor) -> torch.Tensor:
    """What the target's class does to its head's output, by logit: scale and softcap. Any shape, `[..., n]`."""
    config = target.config.get_text_config(decoder=True)
    for factor in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if isinstance(getattr(config, factor, None), (int, float)):
            logits = logits * getattr(config, factor)
    if isinstance(getattr(config, "logits_scaling", None), (int, float)):
        logits = logits / config.logits_scaling
    if getattr(config, "final_logit_softcapping", None) is not None:
        cap = config.final_logit_softcapping
        logits = torch.tanh(logits / cap) * cap
    return logits


@torch.no_grad()
def check_head(target: PreTrainedModel) -> None:
    """Runs a few tokens through the target and raises a ValueError unless its logits are those of [`draft_logits`]."""
    last = target.config.get_text_config(decoder=True).num_hidden_layers
    # Several tokens, because the embedding of one may be zero (padding).
    tokens = torch.arange(min(8, target.get_input_embeddings().weight.shape[0]), device=target.device)[None]
    outputs = target(input_ids=tokens, output_hidden_states=[last], use_cache=False)
    expected = outputs.logits.float()
    found = draft_logits(target, outputs.hidden_states[last]).float().to(expected.device)
    tolerance = 1e-3 if outputs.logits.dtype == torch.float32 else 5e-2
    if not torch.linalg.vector_norm(found - expected) < tolerance * torch.linalg.vector_norm(expected):
        raise ValueError(
            f"{type(target).__name__} computes its logits from the last state in a way that is not known here, so "
            "proposals cannot be drawn from the drafter's law; set drafter.config.proposal = 'argmax', which needs "
            "none of it and samples the same law."
        )


def head_logits(target: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    """What the target's LM head gives, `[..., V]`, before its class scales or caps it: the argmax is the logits'."""
    head = target.get_output_embeddings()
    hidden = hidden.to(device=device_of(head, default=hidden.device), dtype=_dtype_of(head, default=target.dtype))
    return apply_linear(head, hidden)


def device_of(module: nn.Module, default: torch.device) -> torch.device:
    """Where a module wants its input. Offloaded weights are on meta, and their hooks move the input themselves."""
    # Any tensor tells: a quantised module may have no `weight`, or one that is a method.
    own = next(chain(module.parameters(), module.buffers()), None)
    return default if own is None or own.is_meta else own.device


def _dtype_of(module: nn.Module, default: torch.dtype) -> torch.dtype:
    """What a module wants its input in: its weight's dtype, and `default` where the weight is quantised."""
    weight = getattr(module, "weight", None)
    return weight.dtype if isinstance(weight, torch.Tensor) and weight.dtype in _PLAIN_DTYPES else default
