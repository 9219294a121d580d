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
    """Softmax attention of each chunk over its context and each block's own slots, as one row of scores."""

    @staticmethod
    def forward(ctx, queries, keys, values, chunks, block_size, scaling):
        batch_size, num_heads, num_slots, size = queries.shape
        kv_heads, length = keys.shape[1], keys.shape[2] - num_slots
        ctx.shape = (batch_size, num_slots // block_size, kv_heads, num_heads // kv_heads, block_size, size)
        ctx.chunks, ctx.scaling, ctx.length = chunks, scaling, length
        with torch.autocast(queries.device.type, enabled=False):
            # Heads that share keys stand side by side, [b, N, kv, g, B, d]: one product for all of them.
            by_block = queries.unflatten(2, (-1, block_size)).unflatten(1, (kv_heads, -1)).permute(0, 3, 1, 2, 4, 5)
            out = torch.empty_like(by_block, memory_format=torch.contiguous_format)
            shares = []
            for chunk in chunks:
                share = _shares(by_block, keys, chunk, length, block_size, scaling)
                context, own = _values_of(values, chunk, length, block_size)
                seen = chunk.end - chunk.first
                mixed = share[..., seen:] @ own
                mixed += (share[..., :seen].flatten(1, 2) @ context).view_as(mixed)
                out[chunk.row, chunk.blocks] = mixed.unflatten(2, (-1, block_size)).transpose(0, 1)
                shares.append(share)
        ctx.save_for_backward(queries, keys, values, *shares)
        return out.permute(0, 1, 4, 2, 3, 5).reshape(batch_size, num_slots, num_heads, size)

    @staticmethod
    def backward(ctx, grad_out):
        queries, keys, values, *shares = ctx.saved_tensors
        block_size, length = ctx.shape[4], ctx.length
        with torch.autocast(queries.device.type, enabled=False):
            by_block = queries.unflatten(2, (-1, block_size)).unflatten(1, (ctx.shape[2], -1)).permute(0, 3, 1, 2, 4, 5)
            grad_out = grad_out.unflatten(2, (ctx.shape[2], -1)).unflatten(1, (-1, block_size))
            grad_out = grad_out.permute(0, 1, 3, 4, 2, 5)  # [b, N, kv, g, B, d]
            grad_queries = torch.empty(ctx.shape, dtype=queries.dtype, device=queries.device)
            # float32, since a token's gradient is a sum over many chunks
            grad_keys, grad_values = (torch.zeros(t.shape, dtype=torch.float32, device=t.device) for t in (keys, values))
            for chunk, share in zip(ctx.chunks, shares):
                seen = chunk.end - chunk.first
                query, grad = _of_chunk(by_block, chunk), _of_chunk(grad_out, chunk)
                (context_k, own_k), (context_v, own_v) = (
                    _values_of(t, chunk, length, block_size) for t in (keys, values)
                )
                error = torch.empty_like(share)
                error[..., :seen] = (grad.flatten(1, 2) @ context_v.mT).view(*share.shape[:3], seen)
                error[..., seen:] = grad @ own_v.mT
                error = torch._softmax_backward_data(error, share, -1, share.dtype).mul_(ctx.scaling)
                context_error, own_error = error[..., :seen].flatten(1, 2), error[..., seen:]
                grad_query = own_error @ own_k
                grad_query += (context_error @ context_k).view_as(grad_query)
                grad_queries[chunk.row, chunk.blocks] = grad_query.unflatten(2, (-1, block_size)).transpose(0, 1)
                for sums, context, own in (
                    (grad_keys, context_error.mT @ query.flatten(1, 2), own_error.mT @ query),
                    (grad_values, share[..., :seen].flatten(1, 2).mT @ grad.flatten(1, 2), share[..., seen:].mT @ grad),
                ):
                    sums[chunk.row, :, chunk.first : chunk.end] += context
                    sums[chunk.row, :, length:].unflatten(1, (-1, block_size))[:, chunk.blocks] = own.float()
            grad_queries = grad_queries.permute(0, 2, 3, 1, 4, 5).reshape(queries.shape)
        return grad_queries, grad_keys.to(keys.dtype), grad_values.to(values.dtype), None, None, None


def _of_chunk(by_block: torch.Tensor, chunk: _Chunk) -> torch.Tensor:
    """`[b, N, kv, g, B, d]` to the chunk's `[kv, G, g * B, d]`."""
    return by_block[chunk.row, chunk.blocks].transpose(0, 1).flatten(2, 3).contiguous()


def _values_of(states: torch.Tensor, chunk: _Chunk, length: int, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys or values of the chunk's context, `[kv, n, d]`, and of its blocks' own slots, `[kv, G, B, d]`."""
    states = states[chunk.row]
    return states[:, chunk.first : chunk.end], states[:, length:].unflatten(1, (-1, block_size))[:, chunk.blocks]


def _shares(by_block, keys, chunk: _Chunk, length: int, block_size: int, scaling: float) -> torch.Tensor:
    """Softmax of the scores over context and own slots, `[kv, G, g * B, n + B]`."""
    query = _of_chunk(by_block, chunk)
    context, own = _values_of(keys, chunk, length, block_size)
    seen = chunk.end - chunk.first
    scores = query.new_empty(*query.shape[:3], seen + block_size)
    torch.mul((query.flatten(1, 2) @ context.mT).view(*query.shape[:3], seen), scaling, out=scores[..., :seen])
    torch.mul(query @ own.mT, scaling, out=scores[..., seen:])
    scores[..., seen - chunk.hidden.shape[-1] : seen].masked_fill_(chunk.hidden, float("-inf"))
    return scores.softmax(-1)
