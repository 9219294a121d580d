"""What stands in a block before it is drafted: the anchor's token, and mask tokens behind it.

Training, evaluation and generation all come through here, so that the drafter's input exists once.
"""

import torch
from torch import nn


def block_tokens(anchor_ids: torch.LongTensor, mask_token_id: int, block_size: int) -> torch.LongTensor:
    """The anchor's token in slot 0, the mask token in all others.

    Args:
        anchor_ids (`torch.LongTensor` of shape `[b, N]`): Tokens of the anchors.

    Returns:
        `torch.LongTensor` of shape `[b, N * B]`.
    """
    masks = anchor_ids.new_full((*anchor_ids.shape, block_size - 1), mask_token_id)
    return torch.cat([anchor_ids[..., None], masks], dim=-1).flatten(1)


@torch.no_grad()
def embed_block(embedding: nn.Module, token_ids: torch.LongTensor, drafter) -> torch.Tensor:
    """The target's embeddings of a block's tokens, without a norm that may be part of them.

    Args:
        embedding (`nn.Module`): The target's input embedding.
        token_ids (`torch.LongTensor` of shape `[b, Q]`): As [`block_tokens`] gives them.
        drafter ([`RetraceDrafter`]): What they are for.

    Returns:
        `torch.Tensor` of shape `[b, Q, D]`, on the drafter's device and in its dtype.
    """
    # Offloaded weights are on meta, and their hooks move the input themselves.
    token_ids = token_ids if embedding.weight.is_meta else token_ids.to(embedding.weight.device)
    if getattr(embedding, "embed_norm", None) is not None:
        # Such modules are an nn.Embedding with a norm behind it. Calling the base class leaves the module as it is,
        # for other threads that use the same target.
        embeds = nn.Embedding.forward(embedding, token_ids)
    else:
        embeds = embedding(token_ids)
    return embeds.to(device=drafter.device, dtype=drafter.dtype)
