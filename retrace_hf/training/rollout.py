"""What drafting sees, rebuilt over known text: N blocks a sequence drafted at once, verified, and carried on.

Shapes: b sequences of S tokens, N anchors each, blocks of B slots. `Blocks` names the anchors of one round.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn.attention.flex_attention import create_block_mask
from transformers import Cache, PreTrainedModel

from ..context import captured_layers, gather_context_rows
from ..noise import block_inputs
from ..positions import block_positions
from ..roomy_cache import roomy_cache
from ..trajectory import RejectedTrajectory, align_trajectory
from .block_attention import BlockAttention, visible_context
from .recurrent_verification import SEGMENT, RecurrentText, has_recurrent_layers


class Blocks(NamedTuple):
    """anchors (`torch.LongTensor` of shape `[b, N]`): Where the anchors stand in their sequence.
    valid (`torch.BoolTensor` of shape `[b, N]`): Which of them count; the others are padding."""

    anchors: torch.Tensor
    valid: torch.Tensor


class TargetPass(NamedTuple):
    """features (`[b, S, C]`): The rows of context (`context.py`). last (`[b, S, D]`): The states after the final norm.
    cache: The target's K/V over the clean tokens, where asked for, and its recurrent states where it has any."""

    features: torch.Tensor
    last: torch.Tensor
    cache: Cache | RecurrentText | None


def eligible_anchors(loss_mask: torch.Tensor) -> torch.Tensor:
    """`[b, S]` bool: answer tokens behind which another answer token stands, so that slot 1 has a label."""
    eligible = torch.zeros_like(loss_mask)
    eligible[:, :-1] = loss_mask[:, :-1] & loss_mask[:, 1:]
    return eligible


def sample_anchors(loss_mask: torch.Tensor, num_anchors: int, generators: list[torch.Generator]) -> Blocks:
    """Draws up to `num_anchors` different anchors a sequence, ascending; as many columns as the longest row has.

    Args:
        loss_mask (`torch.BoolTensor` of shape `[b, S]`): Answer tokens.
        num_anchors (`int`): N.
        generators (`list[torch.Generator]`): One CPU generator a sequence, so that a sequence's anchors do not depend
            on its neighbours in the batch.
    """
    drawn = []
    for row, generator in zip(eligible_anchors(loss_mask).cpu(), generators):
        places = row.nonzero().squeeze(-1)
        drawn.append(places[torch.randperm(len(places), generator=generator)[:num_anchors]].sort().values)
    # One column at least, so that a process whose rows have no answer still runs its drafter.
    columns = max(1, *(len(places) for places in drawn))
    anchors = torch.zeros(len(drawn), columns, dtype=torch.long)
    valid = torch.zeros(len(drawn), columns, dtype=torch.bool)
    for i, places in enumerate(drawn):
        anchors[i, : len(places)] = places
        valid[i, : len(places)] = True
    return Blocks(anchors.to(loss_mask.device), valid.to(loss_mask.device))


def block_labels(
    input_ids: torch.Tensor, loss_mask: torch.Tensor, blocks: Blocks, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The right tokens of slots 1..B-1, `x[a + k]` for slot k, and which of them are supervised.

    A slot is supervised while every token from slot 1 to it is an answer token.

    Returns:
        `tuple(torch.LongTensor, torch.BoolTensor)`, each of shape `[b, N, B - 1]`.
    """
    length = input_ids.shape[1]
    places = blocks.anchors[..., None] + torch.arange(1, block_size, device=input_ids.device)  # [b, N, B - 1]
    inside = places < length
    rows = torch.arange(input_ids.shape[0], device=input_ids.device)[:, None, None]
    places = places.clamp(max=length - 1)
    answers = loss_mask[rows, places] & inside & blocks.valid[..., None]
    return input_ids[rows, places], answers.cumprod(dim=-1).bool()


def scored_places(blocks: Blocks, block_size: int, length: int) -> torch.Tensor:
    """Where in a text of `length` tokens the target scored the labels of slots 1..B-1, `a + k - 1` for slot k.

    Returns:
        `torch.LongTensor` of shape `[b, N, B - 1]`; at slots beyond the text the last place, for no label.
    """
    places = blocks.anchors[..., None] + torch.arange(block_size - 1, device=blocks.anchors.device)
    return places.clamp(max=length - 1)


# Who may look where, by index: the one rule that dense masks and flex_attention's are both built from.
Rule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def visible_block(queries: torch.Tensor, keys: torch.Tensor, block_size: int) -> torch.Tensor:
    """A drafted slot sees its own block and no other. Both are counted over all slots, so that keys of the context are
    negative."""
    return (keys >= 0) & (keys // block_size == queries // block_size)


def visibility(blocks: Blocks, context_length: int, block_size: int, window: int | None = None) -> Rule:
    """The rule `(row, head, query, key) -> bool` of draft blocks, with a context `window` where they have one. Queries
    are the `N * B` slots, keys the context and then the slots."""
    anchors = blocks.anchors

    def sees(row, head, query, key):
        context = visible_context(anchors[row, query // block_size], key, window)
        return context | visible_block(query, key - context_length, block_size)

    return sees


def verified_visibility(places: torch.Tensor, starts: torch.Tensor, context_length: int, block_size: int) -> Rule:
    """The rule of verified slots: each sees the text before the first slot of its block that runs, and the slots
    of its block that run, up to itself.

    Args:
        places (`torch.LongTensor` of shape `[b, M]`): Which slot a query is, counted over all `N * B`.
        starts (`torch.LongTensor` of shape `[b, M]`): Where in the text the first slot of its block that runs stands.
    """
    of_block = places // block_size

    def sees(row, head, query, key):
        own = (key - context_length).clamp(min=0)
        same = (key >= context_length) & (of_block[row, query] == of_block[row, own])
        return visible_context(starts[row, query], key) | (same & visible_slots(query, own))

    return sees


def visible_slots(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """A verified slot sees those before it and itself."""
    return keys <= queries


def dense_mask(rule: Rule, batch_size: int, num_queries: int, num_keys: int, device: torch.device) -> torch.Tensor:
    """`[b, 1, num_queries, num_keys]` bool, True where a query may look."""
    rows = torch.arange(batch_size, device=device)[:, None, None, None]
    queries = torch.arange(num_queries, device=device)[:, None]
    return rule(rows, torch.zeros_like(rows), queries, torch.arange(num_keys, device=device))


def attention_mask(
    model: PreTrainedModel, rule: Rule, batch_size: int, num_queries: int, num_keys: int, device: torch.device
):
    """The rule as the model's attention takes it: flex_attention a `BlockMask`, eager a mask to add, SDPA a bool one.

    Raises:
        ValueError: an attention implementation that takes no mask of one's own.
    """
    implementation = model.config._attn_implementation
    if implementation == "flex_attention":
        # Compiled, the rule is evaluated without a tensor of all queries and keys for each of its steps.
        compiled = device.type == "cuda"
        return create_block_mask(rule, batch_size, None, num_queries, num_keys, device, _compile=compiled)
    if "flash" in implementation:
        raise ValueError(
            f"attn_implementation={implementation!r} of {type(model).__name__} takes no mask, and drafted blocks side "
            "by side need one; load it with attn_implementation='sdpa' or 'flex_attention'"
        )
    mask = dense_mask(rule, batch_size, num_queries, num_keys, device)
    if implementation != "eager":
        return mask
    return torch.zeros_like(mask, dtype=model.dtype).masked_fill(~mask, torch.finfo(model.dtype).min)


# -- the three passes ------------------------------------------------------------------------------------------------


@torch.no_grad()
def read_clean_text(
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    target_layer_ids: list[int],
    room: int | None = None,
    target_kv_layer_ids: list[int] | None = None,
) -> TargetPass:
    """The frozen target over the clean tokens `[b, S]` (right-padded): the drafter's rows of context, and K/V for
    verification with room for so many drafted tokens, where `room` is given."""
    text = target.config.get_text_config(decoder=True)
    layers = text.num_hidden_layers
    length, cache = input_ids.shape[1], None
    if room is not None and has_recurrent_layers(target):
        return _read_in_segments(target, input_ids, target_layer_ids, target_kv_layer_ids)
    if room is not None or target_kv_layer_ids:
        cache = roomy_cache(text, length + (room or 0))
    out = target.get_decoder()(
        input_ids,
        cache=cache,
        use_cache=cache is not None,
        output_hidden_states=captured_layers(target_layer_ids, layers, with_last=False),
    )
    rows = gather_context_rows(out.hidden_states, target_layer_ids, cache, target_kv_layer_ids, 0, length)
    return TargetPass(rows, out.last_hidden_state, None if room is None else cache)


def _read_in_segments(
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    target_layer_ids: list[int],
    target_kv_layer_ids: list[int] | None,
) -> TargetPass:
    text = RecurrentText(target, input_ids.shape[1])
    captured = captured_layers(target_layer_ids, text.config.num_hidden_layers, with_last=False)
    rows, last = [], []
    for start, end, out in text.read(input_ids, captured):
        kv = (text.cache, target_kv_layer_ids, start, end)
        rows.append(gather_context_rows(out.hidden_states, target_layer_ids, *kv))
        last.append(out.last_hidden_state)
    return TargetPass(torch.cat(rows, dim=1), torch.cat(last, dim=1), text)


def draft_blocks(
    drafter,
    embedding: torch.nn.Module,
    input_ids: torch.Tensor,
    features: torch.Tensor,
    blocks: Blocks,
    trajectory: RejectedTrajectory | None = None,
) -> torch.Tensor:
    """Drafts all blocks in one forward: queries N * B, keys S + N * B.

    Args:
        drafter ([`RetraceDrafter`], wrapped or not): With gradient where the caller has it on.
        embedding (`torch.nn.Module`): The target's embedding.
        input_ids (`torch.LongTensor` of shape `[b, S]`): Clean tokens.
        features (`torch.Tensor` of shape `[b, S, C]`): Their rows of context.
        blocks ([`Blocks`]): The anchors.
        trajectory ([`RejectedTrajectory`], *optional*): Signal of the round before, `[b, N * B, ...]`.

    Returns:
        `torch.Tensor` of shape `[b, N, B, D]`: last hidden states after the final norm.
    """
    module = getattr(drafter, "module", drafter)
    config = module.config
    batch_size, num_anchors = blocks.anchors.shape
    inputs = block_inputs(embedding, input_ids.gather(1, blocks.anchors), module)
    context_positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand(batch_size, -1)
    positions = torch.cat([context_positions, block_positions(blocks.anchors, config.block_size)], dim=1)
    states = drafter(
        **inputs,
        context_hidden_states=features.to(device=module.device, dtype=module.dtype),
        position_ids=positions,
        attention_mask=_draft_mask(module, blocks, positions),
        trajectory=trajectory,
    ).last_hidden_state
    return states.view(batch_size, num_anchors, config.block_size, -1)


def _draft_mask(drafter, blocks: Blocks, positions: torch.Tensor):
    """What lets each block see its context and itself, as the drafter's attention takes it; positions of context and
    slots `[b, S + N * B]`."""
    config, device = drafter.config, positions.device
    drops = drafter.training and config.attention_dropout > 0
    if device.type == "cpu" and config._attn_implementation == "sdpa" and not drops:
        return BlockAttention(blocks.anchors, config.block_size, config.context_window)
    num_queries = blocks.anchors.shape[1] * config.block_size
    rule = visibility(blocks, positions.shape[1] - num_queries, config.block_size, config.context_window)
    return attention_mask(drafter, rule, positions.shape[0], num_queries, positions.shape[1], device)


@torch.no_grad()
def verify_blocks(
    target: PreTrainedModel,
    cache: Cache | RecurrentText,
    input_ids: torch.Tensor,
    drafted: torch.Tensor,
    blocks: Blocks,
    first_rejected: torch.Tensor | None = None,
) -> torch.Tensor:
    """The frozen target over drafted blocks in one forward; `cache` is given back as it came.

    Args:
        cache (`Cache` or [`RecurrentText`]): K/V over the `S` clean tokens, with room for the drafted ones.
        input_ids (`torch.LongTensor` of shape `[b, S]`): Clean tokens.
        drafted (`torch.LongTensor` of shape `[b, N, B - 1]`): Proposals of slots 1..B-1.
        first_rejected (`torch.LongTensor` of shape `[b, N]`, *optional*):
            Run only what a signal is made of: the slots from this one to B - 2 of valid blocks. The tokens before it
            are the text's, and so are their K/V. By default all slots are run.

    Returns:
        `torch.Tensor` of shape `[b, N, B, D]`: row j is the state after the final norm on slot j (0 is the anchor); 0
        where the slot is not run.
    """
    block_ids = torch.cat([input_ids.gather(1, blocks.anchors)[..., None], drafted], dim=-1)
    if isinstance(cache, RecurrentText):  # a state has all slots in it
        return cache.verify(input_ids, block_ids, *blocks)
    (batch_size, length), (num_anchors, block_size) = input_ids.shape, (drafted.shape[1], drafted.shape[2] + 1)
    slots = torch.arange(block_size, device=blocks.anchors.device)
    first = torch.zeros_like(blocks.anchors) if first_rejected is None else first_rejected
    runs = slots >= first[..., None]  # [b, N, B]
    if first_rejected is not None:
        runs &= (slots < block_size - 1) & blocks.valid[..., None]
    runs = runs.flatten(1)
    # One at least, so that every process that holds a part of the target runs it.
    count = max(1, int(runs.sum(1).max()))
    # In their order, those that are run before those that are not, which only fill up shorter rows.
    places = runs.int().argsort(dim=1, descending=True, stable=True)[:, :count]
    block_ids = block_ids.flatten(1)
    starts = (blocks.anchors + first)[..., None].expand(-1, -1, block_size).flatten(1).gather(1, places)
    positions = block_positions(blocks.anchors, block_size).gather(1, places)
    rule = verified_visibility(places, starts, length, block_size)
    states = target.get_decoder()(
        block_ids.gather(1, places),
        cache=cache,
        use_cache=True,
        position_ids=positions,
        attention_mask=_verification_masks(target, rule, positions, length),
    ).last_hidden_state
    cache.crop(-count)
    states = states.masked_fill(~runs.gather(1, places)[..., None].to(states.device), 0.0)
    found = states.new_zeros(*block_ids.shape, states.shape[-1])
    found.scatter_(1, places[..., None].expand_as(states).to(states.device), states)
    return found.view(batch_size, num_anchors, block_size, -1)


def _verification_masks(target: PreTrainedModel, full: Rule, positions: torch.Tensor, length: int):
    """The mask of verification by layer type, for targets with sliding-window layers; one for all layers of others.
    Positions of the slots `[b, M]`, behind a text of `length` tokens."""
    text = target.config.get_text_config(decoder=True)
    window = getattr(text, "sliding_window", None)
    kinds = set(getattr(text, "layer_types", None) or [])
    if kinds - {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"The target has layers of {sorted(kinds - {'full_attention', 'sliding_attention'})}, over which drafted "
            "blocks cannot be verified in training"
        )
    context = torch.arange(length, device=positions.device).expand(positions.shape[0], -1)
    key_positions = torch.cat([context, positions], dim=1)  # [b, S + M]

    def sliding(row, head, query, key):
        near = positions[row, query] - key_positions[row, key] < window
        return full(row, head, query, key) & near

    shape = (*positions.shape, key_positions.shape[1], positions.device)
    if not window or kinds == {"full_attention"}:
        return attention_mask(target, full, *shape)
    if len(kinds) < 2:
        return attention_mask(target, sliding, *shape)
    return {
        "full_attention": attention_mask(target, full, *shape),
        "sliding_attention": attention_mask(target, sliding, *shape),
    }


@torch.no_grad()
def check_verification(target: PreTrainedModel) -> None:
    """Verifies two short blocks, and raises a ValueError unless their states are those of a pass over each prefix.

    They are not in a target that does not take its positions from `position_ids` (ALiBi), nor in one whose attention
    has a mask of its own.
    """
    text = target.config.get_text_config(decoder=True)
    device = target.device
    recurrent = has_recurrent_layers(target)
    second = 7 + (SEGMENT if recurrent else 0)  # behind states that were kept
    ids = torch.arange(second + 7, device=device)[None] % text.vocab_size
    anchors = torch.tensor([[4, second]], device=device)
    drafted = ids[:, [1, 9, 2, 0, 3, 10]].view(1, 2, 3)
    decoder = target.get_decoder()
    cure = "use conditioning='gated' or 'none', which need no verification."
    try:
        if recurrent:
            cache = read_clean_text(target, ids, [0], room=8).cache
        else:
            cache = roomy_cache(text, ids.shape[1] + 8)
            decoder(ids, cache=cache, use_cache=True)
        found = verify_blocks(target, cache, ids, drafted, Blocks(anchors, torch.ones_like(anchors, dtype=torch.bool)))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{type(target).__name__} cannot verify drafted blocks in training ({error}); {cure}"
        ) from error
    errors = []
    for n, anchor in enumerate(anchors[0].tolist()):
        whole = torch.cat([ids[:, : anchor + 1], drafted[:, n]], dim=1)
        expected = decoder(whole, use_cache=False).last_hidden_state[0, anchor:].float()
        errors.append((found[0, n].float() - expected).norm(dim=-1) / expected.norm(dim=-1))
    # The middle one of the rows: in half precision an expert or two may be chosen differently.
    if not torch.cat(errors).median() < (1e-3 if target.dtype == torch.float32 else 0.2):
        raise ValueError(
            f"{type(target).__name__} gives other states for blocks verified side by side in training than for each "
            f"behind its own text: it does not take positions or masks as given; {cure}"
        )


# -- from one round to the next --------------------------------------------------------------------------------------


def count_accepted(drafted: torch.Tensor, labels: torch.Tensor, supervised: torch.Tensor) -> torch.Tensor:
    """`[b, N]`: proposals accepted, the leading ones that equal the text. The text is the target's own, so no head is
    needed; where it was sampled, equality with the sample is the law of argmax proposals under sampling."""
    return ((drafted == labels) & supervised).cumprod(dim=-1).sum(dim=-1)


def shift_blocks(blocks: Blocks, accepted: torch.Tensor, loss_mask: torch.Tensor) -> Blocks:
    """Next round's anchors, `a + accepted + 1`; those without an answer token behind them are dropped."""
    anchors = blocks.anchors + accepted + 1
    inside = anchors < loss_mask.shape[1]
    anchors = anchors.clamp(max=loss_mask.shape[1] - 1)
    return Blocks(anchors, blocks.valid & inside & eligible_anchors(loss_mask).gather(1, anchors))


def carried_trajectory(
    draft_states: torch.Tensor, target_states: torch.Tensor, accepted: torch.Tensor
) -> RejectedTrajectory:
    """Aligns every block's rejected suffix to its next block.

    Args:
        draft_states, target_states (`torch.Tensor` of shape `[b, N, B, D]`): The round's states.
        accepted (`torch.LongTensor` of shape `[b, N]`): Proposals accepted.

    Returns:
        [`RejectedTrajectory`] of shapes `[b, N * B, ...]`, as `draft_blocks` takes it.
    """
    batch_size, num_anchors, block_size, _ = draft_states.shape
    aligned = align_trajectory(
        draft_states.flatten(0, 1),
        target_states.flatten(0, 1),
        first_rejected=accepted.flatten() + 1,
        num_verified=block_size - 1,
    )
    return RejectedTrajectory(
        *(part.reshape(batch_size, num_anchors * block_size, *part.shape[2:]) for part in aligned)
    )
