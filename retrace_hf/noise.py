"""What stands in a block before it is drafted: the anchor's token, and mask tokens behind it; for drafters of items
also at which slot of an item each of them stands.

Training, evaluation and generation all come through here, so that the drafter's input exists once.
"""

import torch
from torch import nn

from .positions import block_item_slots


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


def block_inputs(embedding: nn.Module, anchor_ids: torch.LongTensor, drafter) -> dict[str, torch.Tensor]:
    """What a drafter's forward is told of its blocks, by keyword: `noise_embeds`, and `item_slot_ids` where
    `config.item_slots` is set.

    Args:
        embedding (`nn.Module`): The target's input embedding.
        anchor_ids (`torch.LongTensor` of shape `[b, N]`): Tokens of the anchors.
        drafter ([`RetraceDrafter`]): What they are for.
    """
    config = drafter.config
    tokens = block_tokens(anchor_ids, config.mask_token_id, config.block_size)
    inputs = {"noise_embeds": embed_block(embedding, tokens, drafter)}
    if config.item_slots:
        inputs["item_slot_ids"] = block_item_slots(anchor_ids, config).to(drafter.device)
    return inputs
