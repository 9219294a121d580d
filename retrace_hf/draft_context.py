"""The drafter's context kept beside the target's cache, so that the next turn of a chat does not start blind.

A `generate()` call leaves its context K/V on the target's cache, as an attribute: it lives as long as the user keeps
that cache, is copied with it, and goes with it. A later call that is given the cache and a text that begins with the
same tokens goes on from there.
"""

import weakref
from dataclasses import dataclass

import torch
from transformers import Cache
from transformers.cache_utils import DFlashCache


_NAME = "_retrace_draft_context"


@dataclass
class DraftContext:
    """drafter: Whose context it is. cache: Its K/V, `rows` of context and a block behind them. tokens
    (`torch.LongTensor` of shape `[1, n]`): The text that the rows stand for. padding (`torch.LongTensor`): The
    places in it that the call's attention mask left out. position_ids (`torch.LongTensor` of shape `[..., n + 1]`,
    *optional*): The call's, up to the anchor. verified: How many tokens the call has verified, which grows behind the
    draft."""

    drafter: weakref.ref
    cache: DFlashCache
    rows: int
    tokens: torch.LongTensor
    padding: torch.LongTensor
    position_ids: torch.LongTensor | None
    verified: int


def keep_context(
    target_cache: Cache,
    drafter,
    cache: DFlashCache,
    tokens: torch.LongTensor,
    padding: torch.LongTensor,
    position_ids: torch.LongTensor | None,
) -> DraftContext:
    """Leaves the drafter's context, its last block still behind it, on the target's cache."""
    rows, verified = cache.get_seq_length() - drafter.config.block_size, tokens.shape[1]
    kept = DraftContext(weakref.ref(drafter), cache, rows, tokens, padding, position_ids, verified)
    setattr(target_cache, _NAME, kept)
    return kept


def drop_context(target_cache: Cache) -> None:
    """Takes a kept context off the target's cache, if there is one."""
    vars(target_cache).pop(_NAME, None)


def take_context(
    target_cache: Cache,
    drafter,
    cached_ids: torch.LongTensor,
    padding: torch.LongTensor,
    position_ids: torch.LongTensor | None,
) -> DraftContext | None:
    """The context that an earlier call with this drafter left, its block dropped, if the cached tokens `[1, n]` are
    its text or go on from it, and have padding in the same places and the same positions (`position_ids`, of the
    whole text): it was made with those.

    It leaves the target's cache: a call that fails half-way leaves nothing behind that the next one could mistake.
    """
    kept = getattr(target_cache, _NAME, None)
    drop_context(target_cache)
    if not isinstance(kept, DraftContext):  # none, or one that another copy of this code left
        return None
    length = kept.tokens.shape[1]
    block_size = drafter.config.block_size
    if kept.drafter() is not drafter or kept.cache.get_seq_length() != kept.rows + block_size:
        return None
    keys = kept.cache.layers[0].keys
    if (keys.dtype, keys.device) != (drafter.dtype, drafter.device):  # the drafter was moved since
        return None
    if length > cached_ids.shape[1] or not torch.equal(kept.tokens.to(cached_ids.device), cached_ids[:, :length]):
        return None
    if not torch.equal(kept.padding, padding.to(kept.padding.device)):
        return None
    if not _same_positions(kept.position_ids, position_ids, cached_ids.shape[1]):
        return None
    kept.cache.crop(-block_size)
    return kept


def _same_positions(before: torch.LongTensor | None, now: torch.LongTensor | None, length: int) -> bool:
    """Whether `length` tokens have the positions that a call gave them, which counts on behind those that it was
    told."""
    if before is None or now is None:
        return before is now
    further = torch.arange(1, length + 1, device=before.device)
    before = torch.cat([before, before[..., -1:] + further], dim=-1)[..., :length]
    return torch.equal(before, now[..., :length].to(before.device))
