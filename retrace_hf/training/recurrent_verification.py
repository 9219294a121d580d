"""Verification in training over targets whose layers keep a recurrent or a convolution state.

Attention reads all blocks of a text in one row, each behind a mask of its own. A state has one past: here every block
is a row. Copies of the states are kept every `SEGMENT` tokens of the clean text, and a row starts at the last copy
before its anchor: the tokens of the text up to the anchor, then the block. Blocks whose anchors lie in one segment
start behind the same number of tokens, so they are one batch, with the target's own masks. Padding stands behind the
block, where no token that is used sees it.

Shapes as in `rollout.py`: b sequences of S tokens, N anchors each, blocks of B slots.
"""

from collections.abc import Iterator
from copy import deepcopy

import torch
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer, LinearAttentionLayer

from ..recurrent_states import (
    attention_part,
    check_rollback,
    continues_a_cache,
    copied_states,
    is_recurrent,
    positions_behind,
)
from ..roomy_cache import roomy_cache


# Tokens between two copies. Fewer make more passes over the text, more make longer rows: a row reads half a segment
# before its anchor. With blocks of up to 33 a row fits into the 64 tokens that a delta net's scan takes at once.
SEGMENT = 32
# Blocks at once: each row holds K/V of the whole text before it.
_ROWS = 64


def has_recurrent_layers(target: PreTrainedModel) -> bool:
    """Whether a target's blocks must be verified as rows of their own."""
    layers = DynamicCache(config=target.config.get_text_config(decoder=True)).layers
    return any(map(is_recurrent, layers))


class RecurrentText:
    """
    The clean text as such a target has read it, to go on from any of its tokens. It stands where other targets have
    their cache (`TargetPass.cache`).

    Args:
        target (`PreTrainedModel`): Whose cache can be rolled back.
        length (`int`): S.

    Raises:
        ValueError: a target whose states cannot be kept, or that has a sliding window in the same layer as a state.
    """

    def __init__(self, target: PreTrainedModel, length: int):
        check_rollback(target)
        self.target = target
        self.config = target.config.get_text_config(decoder=True)
        self.cache = roomy_cache(self.config, length)
        self.states: list[list[dict | None]] = []  # by segment and layer
        if any(is_recurrent(layer) and isinstance(layer, DynamicSlidingWindowLayer) for layer in self.cache.layers):
            raise ValueError("The target has layers with a sliding window and a state, of which no copy can be kept")

    def read(self, input_ids: torch.LongTensor, captured: list[int]) -> Iterator[tuple[int, int, object]]:
        """Reads the clean tokens `[b, S]`, right-padded; yields start, end and the target's output by segment."""
        for start in range(0, input_ids.shape[1], SEGMENT):
            ids = input_ids[:, start : start + SEGMENT]
            self.states.append([copied_states(x) if is_recurrent(x) else None for x in self.cache.layers])
            yield start, start + ids.shape[1], self._run(ids, self.cache, start, output_hidden_states=captured)

    def _run(self, ids: torch.LongTensor, cache: Cache, start: int, **options):
        """One pass behind `start` tokens in the cache."""
        anew = start > 0 and not continues_a_cache(self.target)
        if anew:  # unless states are to be kept: then it goes token by token, from where it is
            cache.activate_past_recording(recurrent_states_to_keep=ids.shape[1])
        options |= positions_behind(self.target, ids, start)
        out = self.target.get_decoder()(ids, cache=cache, use_cache=True, **options)
        if anew:
            cache.crop(0)  # the states before the last
        return out

    def verify(self, input_ids: torch.LongTensor, block_ids: torch.LongTensor, anchors, valid) -> torch.Tensor:
        """The states after the final norm on the slots of every valid block, zeros on the others.

        Args:
            input_ids (`torch.LongTensor` of shape `[b, S]`): Clean tokens.
            block_ids (`torch.LongTensor` of shape `[b, N, B]`): Anchors and what is drafted behind them.
            anchors, valid (`torch.Tensor` of shape `[b, N]`): As in `Blocks`.

        Returns:
            `torch.Tensor` of shape `[b, N, B, D]`.
        """
        found = torch.zeros(
            *block_ids.shape, self.config.hidden_size, dtype=self.target.dtype, device=block_ids.device
        )
        segments = anchors // SEGMENT
        for segment in segments[valid].unique().tolist():
            places = (valid & (segments == segment)).nonzero()  # [n, 2]
            for rows, columns in (part.unbind(1) for part in places.split(_ROWS)):
                part = self._verify_rows(segment, input_ids, rows, anchors[rows, columns], block_ids[rows, columns])
                found[rows, columns] = part.to(found)
        return found

    def _verify_rows(self, segment: int, input_ids, rows, anchors, block_ids) -> torch.Tensor:
        """States `[n, B, D]` of blocks `[n, B]` that start in one segment; `rows` `[n]` are the texts they are of."""
        start = segment * SEGMENT
        before = anchors - start
        slots = before[:, None] + torch.arange(block_ids.shape[1], device=anchors.device)  # [n, B]
        ids = input_ids.new_zeros(len(rows), int(slots.max()) + 1)
        text = input_ids[rows, start : int(anchors.max())]
        ids[:, : text.shape[1]] = text
        ids.scatter_(1, slots, block_ids)
        last = self._run(ids, self._cache_behind(segment, rows), start).last_hidden_state
        return last[torch.arange(len(rows), device=last.device)[:, None], slots.to(last.device)]

    def _cache_behind(self, segment: int, rows: torch.LongTensor) -> Cache:
        """A cache that holds the tokens before a segment of these texts."""
        cache = DynamicCache(config=self.config)
        if segment == 0:
            return cache
        for layer, read, states in zip(cache.layers, self.cache.layers, self.states[segment]):
            attention = attention_part(layer)
            if attention is not None and read.is_initialized:
                kept = (t[:, :, : segment * SEGMENT] for t in (read.keys, read.values))
                attention.update(layer, *(t.index_select(0, rows.to(t.device)) for t in kept))
            if states is not None:
                vars(layer).update(deepcopy(states))  # which the block goes on to change
                for name in ("conv_kernel_size", "device", "dtype"):
                    setattr(layer, name, getattr(read, name))
                LinearAttentionLayer.reorder_cache(layer, rows)
        return cache

    def batch_select_indices(self, rows: torch.LongTensor) -> None:
        """Keeps these texts alone."""
        for layer in self.cache.layers:
            if attention_part(layer) is not None:
                attention_part(layer).batch_select_indices(layer, rows)
        for states in (s for segment in self.states for s in segment if s is not None):
            for name in ("conv_states", "recurrent_states"):
                kept = states[name].items()
                states[name] = {i: t if t is None else t.index_select(0, rows.to(t.device)) for i, t in kept}
