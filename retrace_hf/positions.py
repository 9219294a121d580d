"""Axis 3: where a slot stands.

Both paths, training (many anchors) and generation (one), take their positions from here.
"""

import torch


# Types of rotary positions whose frequencies change with the length of the text.
GROWING_ROPES = ("dynamic", "longrope")


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


def rope_limits(config) -> list[tuple[str, int]]:
    """The [`GROWING_ROPES`] of a text config, each with the length above which its frequencies change."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope] if "rope_type" in rope else [entry for entry in rope.values() if isinstance(entry, dict)]
    # With `alpha` (HunYuan) "dynamic" is a fixed scale.
    growing = [kind for kind in kinds if kind.get("rope_type") in GROWING_ROPES and not kind.get("alpha")]
    return [
        ("longrope", kind["original_max_position_embeddings"])
        if kind["rope_type"] == "longrope"
        else (kind["rope_type"], config.max_position_embeddings)
        for kind in growing
    ]
