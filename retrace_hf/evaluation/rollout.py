"""Acceptance over text that the target wrote, many prompts at once.

`generate()` runs one prompt; where the target's greedy answer is known already, the same rounds can be played over it
in batches: draft, compare with the text, verify (only where the drafter reads the target's states), go on. The rounds
are those of `generate()`; a test holds them to it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DFlashCache

from ..candidate_generator import check_pairing
from ..context import context_size, new_draft_cache
from ..draft_vocabulary import DraftVocabulary
from ..generation import AcceptanceStats
from ..noise import block_inputs
from ..positions import block_positions
from ..target_head import head_logits
from ..training.rollout import (
    Blocks,
    attention_mask,
    read_clean_text,
    verify_blocks,
    visibility,
)
from ..trajectory import RejectedTrajectory, align_trajectory


class _Batch(NamedTuple):
    """Rows still drafting: tokens `[b, S]`, caches over them, anchors `[b]`, last token's place `[b]`, limit `[b]`."""

    index: torch.Tensor
    input_ids: torch.Tensor
    target_cache: Cache | None
    draft_cache: DFlashCache
    anchors: torch.Tensor
    last: torch.Tensor
    limit: torch.Tensor
    trajectory: RejectedTrajectory | None


@torch.no_grad()
def roll_out(
    target: PreTrainedModel,
    drafter,
    sequences: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int],
    max_new_tokens: int,
    batch_size: int = 43,
) -> list[AcceptanceStats]:
    """Plays the rounds of greedy `generate(assistant_model=drafter)` over known answers.

    Args:
        target (`PreTrainedModel`): The target that wrote the answers, greedily.
        drafter ([`RetraceDrafter`]): The drafter; its `config.conditioning` says whether the signal is on.
        sequences (`Sequence[Sequence[int]]`): Prompt and answer of each, the end token included where there is one.
        prompt_lengths (`Sequence[int]`): Tokens of each prompt.
        max_new_tokens (`int`): The limit under which the answers were written.
        batch_size (`int`, defaults to 43): Sequences at once.

    Returns:
        `list[AcceptanceStats]`: one a sequence, in order.

    Raises:
        ValueError: an answer is empty or longer than `max_new_tokens`, or drafter and target do not belong together.
    """
    check_pairing(drafter, target)
    for i, (sequence, prompt_length) in enumerate(zip(sequences, prompt_lengths)):
        new = len(sequence) - prompt_length
        if not 1 <= new <= max_new_tokens:
            raise ValueError(f"Sequence {i} has {new} new tokens; there must be 1 to max_new_tokens={max_new_tokens}.")
    stats = [AcceptanceStats() for _ in sequences]
    for one in stats:
        one.add_call()
    # Answers of similar length end together.
    order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        batch = _begin(target, drafter, chosen, sequences, prompt_lengths, max_new_tokens)
        while batch is not None and len(batch.index):
            batch = _round(target, drafter, batch, stats)
    return stats


def _begin(target, drafter, chosen, sequences, prompt_lengths, max_new_tokens) -> _Batch | None:
    config, device = drafter.config, target.device
    length = max(len(sequences[i]) for i in chosen)
    input_ids = torch.zeros(len(chosen), length, dtype=torch.long)
    for row, i in enumerate(chosen):
        input_ids[row, : len(sequences[i])] = torch.tensor(sequences[i])
    input_ids = input_ids.to(device)
    prompts = torch.tensor([prompt_lengths[i] for i in chosen], device=device)
    room = config.block_size if config.conditioning == "corrected" else None
    clean = read_clean_text(target, input_ids, config.target_layer_ids, room, config.target_kv_layer_ids)
    batch = _Batch(
        index=torch.tensor(chosen),
        input_ids=input_ids,
        target_cache=clean.cache,
        draft_cache=_context_cache(drafter, clean.features.to(device=drafter.device, dtype=drafter.dtype)),
        anchors=prompts,
        last=torch.tensor([len(sequences[i]) - 1 for i in chosen], device=device),
        limit=prompts + max_new_tokens - 1,
        trajectory=None,
    )
    return _keep(batch, batch.anchors < batch.last)


def _context_cache(drafter, features: torch.Tensor) -> DFlashCache:
    """The drafter's K/V over all clean tokens; masks hide what a block may not see yet."""
    block_size = drafter.config.block_size
    cache = new_draft_cache(drafter.config)
    cache.set_previous_accepted_tokens(features.shape[1])
    drafter(
        noise_embeds=features.new_zeros(features.shape[0], block_size, drafter.config.hidden_size),
        context_hidden_states=features,
        cache=cache,
    )
    cache.crop(-block_size)
    cache.set_previous_accepted_tokens(0)
    return cache


def _round(target, drafter, batch: _Batch, stats: list[AcceptanceStats]) -> _Batch | None:
    """One round for every row; rows that reached their last token leave the batch."""
    config = drafter.config
    slots = torch.arange(1, config.block_size, device=batch.anchors.device)
    states = _draft(target, drafter, batch)  # [b, B, D]
    vocabulary = DraftVocabulary.of(drafter, target)
    if vocabulary is not None:
        drafted = vocabulary.most_likely(states[:, 1:])  # [b, B - 1]
    else:
        drafted = head_logits(target, states[:, 1:]).argmax(dim=-1)
    proposed = (batch.limit - batch.anchors - 1).clamp(max=config.block_size - 1)
    places = (batch.anchors[:, None] + slots).clamp(max=batch.input_ids.shape[1] - 1)
    right = (drafted == batch.input_ids.gather(1, places)) & (slots <= proposed[:, None])
    # A round yields accepted + 1 tokens, so at an end token or the limit one accepted token stands for the target's.
    accepted = torch.minimum(right.cumprod(dim=-1).sum(dim=-1), batch.last - batch.anchors - 1)
    for i, p, a in zip(batch.index.tolist(), proposed.tolist(), accepted.tolist()):
        stats[i].add_round(proposed=p, accepted=a)

    trajectory = None
    if config.conditioning != "none":
        verified = states  # gated and overwrite never read the target's states
        if config.conditioning == "corrected":
            blocks = _blocks(batch.anchors)
            verified = verify_blocks(target, batch.target_cache, batch.input_ids, drafted[:, None], blocks)[:, 0]
        trajectory = align_trajectory(states, verified, accepted + 1, proposed)
    batch = batch._replace(anchors=batch.anchors + accepted + 1, trajectory=trajectory)
    return _keep(batch, batch.anchors < batch.last)


def _blocks(anchors: torch.Tensor) -> Blocks:
    return Blocks(anchors[:, None], torch.ones_like(anchors[:, None], dtype=torch.bool))


def _draft(target, drafter, batch: _Batch) -> torch.Tensor:
    config = drafter.config
    blocks = _blocks(batch.anchors)
    inputs = block_inputs(target.get_input_embeddings(), batch.input_ids.gather(1, blocks.anchors), drafter)
    embeds = inputs["noise_embeds"]
    batch_size, length = batch.input_ids.shape
    rule = visibility(blocks, length, config.block_size, config.context_window)
    states = drafter(
        **inputs,
        context_hidden_states=embeds.new_zeros(batch_size, 0, context_size(config)),
        position_ids=block_positions(blocks.anchors, config.block_size),
        attention_mask=attention_mask(
            drafter, rule, batch_size, config.block_size, length + config.block_size, batch.input_ids.device
        ),
        cache=batch.draft_cache,
        trajectory=batch.trajectory,
    ).last_hidden_state
    batch.draft_cache.crop(-config.block_size)
    return states


def _keep(batch: _Batch, going: torch.Tensor) -> _Batch | None:
    """The rows that go on, with their part of the caches."""
    if not going.any():
        return None
    rows = going.nonzero().squeeze(-1)
    for cache in (batch.target_cache, batch.draft_cache):
        if cache is not None and len(rows) < len(going):
            cache.batch_select_indices(rows)
    trajectory = batch.trajectory
    return batch._replace(
        index=batch.index[rows.cpu()],
        input_ids=batch.input_ids[rows],
        anchors=batch.anchors[rows],
        last=batch.last[rows],
        limit=batch.limit[rows],
        trajectory=None if trajectory is None else RejectedTrajectory(*(part[rows] for part in trajectory)),
    )
