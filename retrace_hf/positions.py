"""Axis 3: where a slot stands, in the text and in an item (PAD-Rec, arXiv 2604.27747).

Both paths, training (many anchors) and generation (one), take their positions from here.

In generative recommendation an item is `K` tokens, one from each of `K` sets of ids, with a separator behind each item
or without. So the token of an anchor says at which slot of an item it stands, and the slots behind it follow in the
same order for ever: `block_item_slots`. Text without items (a user's words, BOS) has no such order.
"""

import torch
from torch import nn
from torch.nn import functional as F

from .configuration_retrace import RetraceConfig


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


def item_slots_of(token_ids: torch.LongTensor, config: RetraceConfig) -> torch.LongTensor:
    """At which slot of an item each token stands, by `config.item_token_ranges`: 0 to K - 1, K for the separator, -1
    for every other token. Shaped as `token_ids`, on their device; nothing is copied to the host or from it."""
    slots = torch.full_like(token_ids, -1)
    for slot, (first, end) in enumerate(config.item_token_ranges):
        slots = torch.where((token_ids >= first) & (token_ids < end), slot, slots)
    if config.item_separator_id is not None:
        slots = torch.where(token_ids == config.item_separator_id, config.item_slots, slots)
    return slots


def block_item_slots(anchor_ids: torch.LongTensor, config: RetraceConfig) -> torch.LongTensor:
    """At which slot of an item the slots of blocks stand, from the tokens of their anchors alone.

    Behind slot k comes k + 1; behind an item's last token the separator where there is one, and then slot 0. Behind a
    token of no item nothing is known (an item may begin, or more text follow), so that whole block is -1.

    Args:
        anchor_ids (`torch.LongTensor` of shape `[b, N]`): Tokens of the anchors.
        config ([`RetraceConfig`]): Names the ids (`item_slots`, `item_token_ranges`, `item_separator_id`), and `B`.

    Returns:
        `torch.LongTensor` of shape `[b, N * B]`: 0 to K - 1, K for the separator, -1 where nothing is known.

    ```python
    >>> config = RetraceConfig(vocab_size=12, item_slots=2, item_token_ranges=[[0, 4], [4, 8]], item_separator_id=8)
    >>> config.block_size = 5
    >>> block_item_slots(torch.tensor([[5, 8, 11]]), config).view(3, 5).tolist()
    [[1, 2, 0, 1, 2], [2, 0, 1, 2, 0], [-1, -1, -1, -1, -1]]

    ```
    """
    period = config.item_slots + (config.item_separator_id is not None)
    anchors = item_slots_of(anchor_ids, config)[..., None]  # [b, N, 1]
    places = torch.arange(config.block_size, device=anchor_ids.device)
    return torch.where(anchors < 0, -1, (anchors + places) % period).flatten(-2)


class ItemSlotEmbedding(nn.Module):
    """Says at which slot of an item a slot stands: `x = e + g * P_slot`, g one learned scalar.

    P starts at zero and g at one, so that an untrained one changes nothing and P learns from the first step on, g from
    the second. (P at random and g at zero would also change nothing, but P would then learn at the pace of g.)

    Args:
        config ([`RetraceConfig`]): P has `item_slots` rows, and one more where there is a separator.

    Source: PAD-Rec, arXiv 2604.27747, item-slot embeddings (their start is not given there).
    """

    def __init__(self, config: RetraceConfig):
        super().__init__()
        rows = config.item_slots + (config.item_separator_id is not None)
        self.table = nn.Embedding(rows, config.hidden_size)
        self.table.start = torch.zeros_like  # `start` is read by RetracePreTrainedModel._init_weights
        self.scale = nn.Parameter(torch.ones(1))  # of one element: FSDP shards no scalars

    def forward(self, embeds: torch.Tensor, slot_ids: torch.LongTensor) -> torch.Tensor:
        """
        Args:
            embeds (`torch.Tensor` of shape `[b, Q, D]`): Input embeddings e of the slots.
            slot_ids (`torch.LongTensor` of shape `[b, Q]`): As [`block_item_slots`] gives them; -1 keeps e exactly.

        Returns:
            `torch.Tensor` of shape `[b, Q, D]`.
        """
        placed = embeds + self.scale * self.table(slot_ids.clamp(min=0))
        return torch.where((slot_ids >= 0)[..., None], placed, embeds)


class StepEmbedding(nn.Module):
    """Says how far from its anchor a slot stands, behind the last layer: `f + g * S_j`, `g = sigmoid(w . x + b)`, for
    slot j of a block; x is f over its root mean square.

    S starts at zero, so an untrained one changes nothing; w and b learn once S has moved. The anchor's own slot has no
    row: its state is not used. The paper's gate reads the hidden state; here without its size, which differs by orders
    of magnitude between targets and would leave the gate shut or open for good.

    Args:
        config ([`RetraceConfig`]): S has `block_size - 1` rows. Slots of longer blocks are left as they are.

    Source: PAD-Rec, arXiv 2604.27747, step embeddings.
    """

    def __init__(self, config: RetraceConfig):
        super().__init__()
        self.eps = config.rms_norm_eps
        self.table = nn.Embedding(config.block_size - 1, config.hidden_size)
        self.table.start = torch.zeros_like
        self.gate = nn.Linear(config.hidden_size, 1)

    def forward(self, states: torch.Tensor, block_size: int) -> torch.Tensor:
        """
        Args:
            states (`torch.Tensor` of shape `[b, Q, D]`): States f of one or more blocks, before the final norm.
            block_size (`int`): Slots `B` of a block.

        Returns:
            `torch.Tensor` of shape `[b, Q, D]`.
        """
        steps = torch.arange(states.shape[1], device=states.device) % block_size  # [Q]
        rows = self.table.num_embeddings
        gate = torch.sigmoid(self.gate(F.rms_norm(states, states.shape[-1:], eps=self.eps)))  # [b, Q, 1]
        stepped = states + gate * self.table((steps - 1).clamp(0, rows - 1))
        return torch.where(((steps >= 1) & (steps <= rows))[:, None], stepped, states)


def fit_steps(rows: torch.Tensor, block_size: int) -> torch.Tensor:
    """S of a checkpoint for blocks of another size: cut, or with rows of zeros behind it, `[block_size - 1, D]`."""
    missing = max(0, block_size - 1 - len(rows))
    return torch.cat([rows, rows.new_zeros(missing, rows.shape[1])])[: block_size - 1]
