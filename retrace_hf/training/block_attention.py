"""Attention of many drafted blocks over one text, without a mask of all slots by all keys.

A block of a text of S tokens sees some context and its own B slots: (S + B) keys, where a dense mask over N blocks has
S + N * B of them, nearly all hidden. Here blocks are taken a few at a time, by place, over the context they may see.
"""

from typing import NamedTuple

import torch


# Blocks whose scores are made at once: enough for a matrix product, few enough to see nearly the same context.
_BLOCKS_AT_ONCE = 16


class _Chunk(NamedTuple):
    """Some blocks of one text. row (`int`): The text. blocks (`torch.LongTensor` of shape `[G]`): Which of its blocks.
    first, end (`int`): The context that any of them sees. hidden (`torch.BoolTensor` of shape `[G, 1, n]`): What of
    the last n tokens of it each of them does not see."""

    row: int
    blocks: torch.Tensor
    first: int
    end: int
    hidden: torch.Tensor


def visible_context(anchors: torch.Tensor, keys: torch.Tensor, window: int | None = None) -> torch.Tensor:
    """Every slot of a block sees the context strictly before its anchor, or only the last `window` tokens of it."""
    seen = keys < anchors
    return seen if window is None else seen & (keys >= anchors - window)


class BlockAttention:
    """Attention over drafted blocks, to pass to a drafter as its `attention_mask`.

    Args:
        anchors (`torch.LongTensor` of shape `[b, N]`): Where the blocks begin, in any order; on a CPU.
        block_size (`int`): B.
        window (`int`, *optional*): Tokens of context that a block sees at most.
    """

    def __init__(self, anchors: torch.Tensor, block_size: int, window: int | None = None):
        self.block_size = block_size
        self.chunks = []
        for row, order in enumerate(anchors.argsort(dim=1)):
            for blocks in order.split(_BLOCKS_AT_ONCE):
                self.chunks.append(_chunk(row, blocks, anchors[row, blocks], window))

    def __call__(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """
        Args:
            queries (`torch.Tensor` of shape `[b, heads, N * B, head_dim]`): Of the slots.
            keys, values (`torch.Tensor` of shape `[b, kv_heads, S + N * B, head_dim]`): Of the text and the slots.
            scaling (`float`): Factor of the scores.

        Returns:
            `torch.Tensor` of shape `[b, N * B, heads, head_dim]`, in the dtype of autocast where it is on.
        """
        device = queries.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            queries, keys, values = queries.to(dtype), keys.to(dtype), values.to(dtype)
        return _Attend.apply(queries, keys, values, self.chunks, self.block_size, scaling)


def _chunk(row: int, blocks: torch.Tensor, anchors: torch.Tensor, window: int | None) -> _Chunk:
    """`anchors` are those of `blocks`, ascending."""
    start, end = int(anchors[0]), int(anchors[-1])
    first = start if window is None else max(0, start - window)
    places = torch.arange(first, end)
    hidden = ~visible_context(anchors[:, None, None], places, window)
    return _Chunk(row, blocks, 0 if window is None else first, end, hidden)


class _Attend(torch.autograd.Function):
    """Softmax attention of each chunk over its context and each block's own slots, as one row of scores.

    Heads that share keys stand side by side, so that one product serves them all: `[b, N, kv, g, B, d]`."""

    @staticmethod
    def forward(ctx, queries, keys, values, chunks, block_size, scaling):
        kv_heads = keys.shape[1]
        ctx.chunks, ctx.scaling, ctx.block_size = chunks, scaling, block_size
        with torch.autocast(queries.device.type, enabled=False):
            scaled = _by_block((queries * scaling).transpose(1, 2), kv_heads, block_size)
            out = torch.empty_like(scaled)
            saved = []
            for chunk in chunks:
                query = _of_chunk(scaled, chunk)
                context_share, own_share = _shares(query, *_keys_of(keys, chunk, block_size, queries.shape[2]), chunk)
                context, own = _keys_of(values, chunk, block_size, queries.shape[2])
                mixed = own_share @ own
                mixed += (context_share @ context).view_as(mixed)
                _put(out, chunk, mixed)
                saved += [context_share, own_share]
        ctx.save_for_backward(scaled, keys, values, out, *saved)
        return _by_slot(out)

    @staticmethod
    def backward(ctx, grad_out):
        scaled, keys, values, out, *saved = ctx.saved_tensors
        block_size, slots = ctx.block_size, scaled.shape[1] * ctx.block_size
        with torch.autocast(scaled.device.type, enabled=False):
            grad_out = _by_block(grad_out, keys.shape[1], block_size)
            # What a row of shares has in common: sum of share * (its gradient), as flash attention has it
            common = torch.linalg.vecdot(grad_out, out)[..., None]
            grad_queries = torch.empty_like(scaled)
            # float32, since a token's gradient is a sum over many chunks
            grad_keys, grad_values = (torch.zeros_like(states, dtype=torch.float32) for states in (keys, values))
            for chunk, context_share, own_share in zip(ctx.chunks, saved[::2], saved[1::2]):
                query, grad, mean = (_of_chunk(states, chunk) for states in (scaled, grad_out, common))
                context_keys, own_keys = _keys_of(keys, chunk, block_size, slots)
                context_values, own_values = _keys_of(values, chunk, block_size, slots)
                flat_grad, flat_query = grad.flatten(1, 2), query.flatten(1, 2)
                context_error = (flat_grad @ context_values.mT).sub_(mean.flatten(1, 2)).mul_(context_share)
                own_error = (grad @ own_values.mT).sub_(mean).mul_(own_share)
                grad_query = own_error @ own_keys
                grad_query += (context_error @ context_keys).view_as(grad_query)
                _put(grad_queries, chunk, grad_query)
                # (query^T error)^T: the narrow factor is the one that is turned
                _add(grad_keys, chunk, slots, (flat_query.mT @ context_error).mT, own_error.mT @ query)
                _add(grad_values, chunk, slots, (flat_grad.mT @ context_share).mT, own_share.mT @ grad)
            grad_queries = _by_slot(grad_queries).transpose(1, 2) * ctx.scaling
        return grad_queries, grad_keys.to(keys.dtype), grad_values.to(values.dtype), None, None, None


def _by_block(states: torch.Tensor, kv_heads: int, block_size: int) -> torch.Tensor:
    """`[b, N * B, heads, d]` to `[b, N, kv, g, B, d]`, in one piece."""
    return states.unflatten(2, (kv_heads, -1)).unflatten(1, (-1, block_size)).permute(0, 1, 3, 4, 2, 5).contiguous()


def _by_slot(states: torch.Tensor) -> torch.Tensor:
    """`[b, N, kv, g, B, d]` to `[b, N * B, heads, d]`."""
    return states.permute(0, 1, 4, 2, 3, 5).flatten(3, 4).flatten(1, 2)


def _of_chunk(by_block: torch.Tensor, chunk: _Chunk) -> torch.Tensor:
    """`[b, N, kv, g, B, d]` to the chunk's `[kv, G, g * B, d]`."""
    return by_block[chunk.row, chunk.blocks].transpose(0, 1).flatten(2, 3).contiguous()


def _put(by_block: torch.Tensor, chunk: _Chunk, states: torch.Tensor):
    """Writes the chunk's `[kv, G, g * B, d]` into `[b, N, kv, g, B, d]`."""
    by_block[chunk.row, chunk.blocks] = states.transpose(0, 1).unflatten(2, by_block.shape[3:5])


def _keys_of(states: torch.Tensor, chunk: _Chunk, block_size: int, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys or values of the chunk's context, `[kv, n, d]`, and of its blocks' own slots, `[kv, G, B, d]`."""
    own = states[chunk.row, :, -slots:].unflatten(1, (-1, block_size))
    return states[chunk.row, :, chunk.first : chunk.end], own[:, chunk.blocks]


def _add(sums: torch.Tensor, chunk: _Chunk, slots: int, context: torch.Tensor, own: torch.Tensor):
    """Adds the gradients of [`_keys_of`] to those of all keys."""
    sums[chunk.row, :, chunk.first : chunk.end] += context
    sums[chunk.row, :, -slots:].unflatten(1, (-1, own.shape[2]))[:, chunk.blocks] = own.to(sums.dtype)


def _shares(query, context_keys, own_keys, chunk: _Chunk) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax of the scores: shares of the context `[kv, G * g * B, n]`, and of the own slots `[kv, G, g * B, B]`."""
    seen = context_keys.shape[1]
    scores = query.new_empty(*query.shape[:3], seen + own_keys.shape[2])
    scores[..., :seen] = (query.flatten(1, 2) @ context_keys.mT).view(*query.shape[:3], seen)
    scores[..., seen:] = query @ own_keys.mT
    scores[..., seen - chunk.hidden.shape[-1] : seen].masked_fill_(chunk.hidden, float("-inf"))
    shares = scores.softmax(-1)
    return shares[..., :seen].flatten(1, 2).contiguous(), shares[..., seen:].contiguous()
