"""Axis 3: where a slot stands.

Both paths, training (many anchors) and generation (one), take their positions from here.
"""

import torch


def block_positions(anchor_positions: torch.Tensor, block_size: int) -> torch.Tensor:
    """Positions of the slots of blocks: slot j of a block stands at `anchor + j`.

    Args:
        anchor_positions (`torch.Tensor` of shape `[b, N]`): Position of each anchor.
        block_size (`int`): Slots `B` of a block.

    Returns:
        `torch.Tensor` of shape `[b, N * B]`.
    """
    slots = torch.arange(block_size, device=anchor_positions.device, dtype=anchor_positions.dtype)
    return (anchor_positions[..., None] + slots).flatten(-2)
