"""The rollout against naive loops, and against what generate() sees on the same sequence."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask
from torch.testing import assert_close
from transformers.integrations import flex_attention

from retrace_hf import RejectedTrajectory
from retrace_hf.noise import block_tokens
from retrace_hf.training import block_attention, rollout
from retrace_hf.training.rollout import Blocks

from .fixtures import BLOCK_SIZE, MASK_TOKEN_ID, plain, prompt_of, randomize, tiny_drafter, tiny_target


FAMILIES = ["qwen3", "llama", "gemma2"]


def relative(a, b):
    return float((a - b).norm() / b.norm())


def text_of(target, prompt_length=9, new_tokens=60):
    """A prompt with the target's own greedy answer, and the answer's mask, `[1, S]`."""
    prompt = prompt_of(prompt_length)
    ids = plain(target, prompt, max_new_tokens=new_tokens)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[:, prompt_length:] = True
    return ids, mask


def at(*anchors):
    anchors = torch.tensor([anchors])
    return Blocks(anchors, torch.ones_like(anchors, dtype=torch.bool))


# -- anchors, labels, masks ------------------------------------------------------------------------------------------


def test_anchors_are_answer_tokens_with_a_label_behind_them():
    mask = torch.tensor([[0, 0, 1, 1, 1, 0, 0, 1, 0, 1, 1]]).bool()
    assert rollout.eligible_anchors(mask)[0].nonzero().flatten().tolist() == [2, 3, 9]
    blocks = rollout.sample_anchors(mask, 5, [torch.Generator().manual_seed(0)])
    assert blocks.anchors[0, blocks.valid[0]].tolist() == [2, 3, 9] and blocks.valid.sum() == 3
    few = rollout.sample_anchors(mask, 2, [torch.Generator().manual_seed(0)])
    assert few.valid.all() and few.anchors[0, 0] < few.anchors[0, 1]


def test_anchors_of_a_row_do_not_depend_on_its_neighbours():
    mask = torch.ones(2, 40, dtype=torch.bool)
    generators = [torch.Generator().manual_seed(s) for s in (3, 4)]
    both = rollout.sample_anchors(mask, 8, generators)
    alone = rollout.sample_anchors(mask[1:], 8, [torch.Generator().manual_seed(4)])
    assert torch.equal(both.anchors[1:], alone.anchors)


def test_labels_against_a_loop():
    torch.manual_seed(0)
    ids, mask = torch.randint(0, 50, (2, 30)), torch.rand(2, 30) < 0.8
    blocks = Blocks(torch.tensor([[0, 5, 26], [11, 20, 28]]), torch.tensor([[True, True, True], [True, False, True]]))
    labels, supervised = rollout.block_labels(ids, mask, blocks, BLOCK_SIZE)
    for b in range(2):
        for n in range(3):
            anchor, going = int(blocks.anchors[b, n]), bool(blocks.valid[b, n])
            for slot in range(1, BLOCK_SIZE):
                going = going and anchor + slot < 30 and bool(mask[b, anchor + slot])
                assert bool(supervised[b, n, slot - 1]) == going
                if going:
                    assert labels[b, n, slot - 1] == ids[b, anchor + slot]


@pytest.mark.parametrize("window", [None, 3, 1])
def test_mask_against_a_loop(window):
    blocks, length, size = at(3, 4, 9), 12, 4
    rule = rollout.visibility(blocks, length, size, window)
    mask = rollout.dense_mask(rule, 1, 3 * size, length + 3 * size, blocks.anchors.device)[0, 0]
    assert mask.shape == (3 * size, length + 3 * size)
    for n in range(3):
        for slot in range(size):
            for key in range(length + 3 * size):
                if key < length:
                    behind = int(blocks.anchors[0, n]) - key  # tokens back from the anchor
                    expected = 1 <= behind <= (window or length)
                else:
                    expected = (key - length) // size == n
                assert bool(mask[n * size + slot, key]) == expected


@pytest.mark.parametrize("window", [None, 3, 50])
@pytest.mark.parametrize("heads", [2, 6])
def test_block_attention_equals_a_dense_mask(window, heads):
    """In value and gradient, anchors in any order and more of them than are taken at once."""
    torch.manual_seed(0)
    anchors = torch.randint(0, 90, (2, 2 * block_attention._BLOCKS_AT_ONCE + 3))
    blocks, size = Blocks(anchors, torch.ones_like(anchors, dtype=torch.bool)), 4
    slots = anchors.shape[1] * size
    shapes = (heads, slots), (2, 90 + slots), (2, 90 + slots)
    states = [torch.randn(2, *shape, 8, dtype=torch.float64, requires_grad=True) for shape in shapes]
    found = block_attention.BlockAttention(anchors, size, window)(*states, 0.3)
    mask = rollout.dense_mask(rollout.visibility(blocks, 90, size, window), 2, slots, 90 + slots, anchors.device)
    scaled = torch.nn.functional.scaled_dot_product_attention
    expected = scaled(*states, mask, scale=0.3, enable_gqa=True).transpose(1, 2)
    assert_close(found, expected)
    weights = torch.randn_like(found)
    gradients = (torch.autograd.grad((out * weights).sum(), states) for out in (found, expected))
    for one, other in zip(*gradients):
        assert_close(one, other, rtol=1e-5, atol=1e-6)  # those of keys are summed in float32


@pytest.mark.parametrize("window", [None, 3])
def test_the_block_mask_holds_the_same_rule(window):
    """flex_attention's mask, entry by entry, and the blocks that it may skip."""
    blocks = Blocks(torch.tensor([[3, 40, 130], [7, 9, 200]]), torch.ones(2, 3, dtype=torch.bool))
    shape = (2, 3 * BLOCK_SIZE, 210 + 3 * BLOCK_SIZE)
    rule = rollout.visibility(blocks, 210, BLOCK_SIZE, window)
    check_block_mask(rule, shape)
    starts = blocks.anchors.repeat_interleave(BLOCK_SIZE, dim=1)
    places = torch.arange(3 * BLOCK_SIZE).expand(2, -1)
    check_block_mask(rollout.verified_visibility(places, starts, 210, BLOCK_SIZE), shape)


def check_block_mask(rule, shape):
    drafter = tiny_drafter(tiny_target())
    drafter.config._attn_implementation = "flex_attention"
    mask = rollout.attention_mask(drafter, rule, *shape, torch.device("cpu"))
    dense = rollout.dense_mask(rule, *shape, torch.device("cpu"))
    assert torch.equal(create_mask(mask.mask_mod, 2, None, *shape[1:], device="cpu"), dense)
    skipped = ~mask.to_dense().bool().repeat_interleave(128, -1)[..., : shape[2]]
    assert not (dense & skipped).any()


@torch.no_grad()
def test_attention_implementations_draft_and_verify_alike(monkeypatch):
    """SDPA, eager, and flex_attention without the compiler that it has for speed; a CPU has no gradients of it."""

    def uncompiled(*args, training, **kwargs):
        return flex_attention.flex_attention(*args, **kwargs)

    monkeypatch.setattr(flex_attention, "compile_friendly_flex_attention", uncompiled)
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    results = []
    for implementation in ("sdpa", "eager", "flex_attention"):
        target = tiny_target(head_dim=16)
        drafter = randomize(tiny_drafter(target))
        ids, _ = text_of(target)
        blocks, room = at(12, 20, 33), 3 * BLOCK_SIZE
        # By SDPA each time: here upstream would compile a mask of its own.
        clean = rollout.read_clean_text(target, ids, drafter.config.target_layer_ids, room)
        for model in (target, drafter):
            model.set_attn_implementation(implementation)
        states = rollout.draft_blocks(drafter, target.get_input_embeddings(), ids, clean.features, blocks)
        drafted = torch.arange(3 * (BLOCK_SIZE - 1)).view(1, 3, -1)
        results.append((states, rollout.verify_blocks(target, clean.cache, ids, drafted, blocks)))
    for other in results[1:]:
        assert all(relative(found, expected) < 1e-5 for found, expected in zip(other, results[0]))


@pytest.mark.gpu
def test_flex_attention_trains_as_sdpa_does():
    gradients = []
    for implementation in ("sdpa", "flex_attention"):
        target = tiny_target(head_dim=16).cuda()
        drafter = randomize(tiny_drafter(target)).train()
        drafter.set_attn_implementation(implementation)
        ids = text_of(tiny_target(head_dim=16))[0].cuda()
        blocks = Blocks(*(t.cuda() for t in at(12, 20, 33)))
        clean = rollout.read_clean_text(target, ids, drafter.config.target_layer_ids)
        states = rollout.draft_blocks(drafter, target.get_input_embeddings(), ids, clean.features, blocks)
        states.square().mean().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in drafter.parameters() if p.grad is not None]))
    assert relative(gradients[1], gradients[0]) < 1e-5


def test_attention_without_masks_is_refused():
    target = tiny_target()
    target.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="'flash_attention_2' .* takes no mask"):
        rollout.attention_mask(target, lambda *index: None, 1, 1, 1, torch.device("cpu"))


def test_shift_goes_behind_the_correction_and_drops_what_has_no_label():
    mask = torch.tensor([[0] * 4 + [1] * 10]).bool()  # answer at 4..13
    shifted = rollout.shift_blocks(at(4, 5, 9, 12), torch.tensor([[0, 7, 2, 0]]), mask)
    assert shifted.anchors[0].tolist() == [5, 13, 12, 13]
    assert shifted.valid[0].tolist() == [True, False, True, False]


def test_accepted_is_the_leading_run():
    drafted, labels = torch.tensor([[[1, 2, 3], [1, 9, 3], [9, 2, 3]]]), torch.tensor([[[1, 2, 3]] * 3])
    supervised = torch.ones(1, 3, 3, dtype=torch.bool)
    assert rollout.count_accepted(drafted, labels, supervised).tolist() == [[3, 1, 0]]
    supervised[0, 0, 1] = False
    assert rollout.count_accepted(drafted, labels, supervised).tolist() == [[1, 1, 0]]


# -- blocks do not leak ----------------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_block_sees_nothing_at_or_behind_its_anchor_but_the_anchor():
    target = tiny_target()
    drafter = randomize(tiny_drafter(target))
    ids, _ = text_of(target)
    blocks = at(20, 33)

    def states(ids):
        clean = rollout.read_clean_text(target, ids, drafter.config.target_layer_ids)
        return rollout.draft_blocks(drafter, target.get_input_embeddings(), ids, clean.features, blocks)

    before, changed = states(ids), ids.clone()
    changed[:, 21:] = (changed[:, 21:] + 7) % 190  # behind the first anchor, before the second
    after = states(changed)
    assert_close(after[:, 0], before[:, 0])
    assert relative(after[:, 1], before[:, 1]) > 1e-2
    changed = ids.clone()
    changed[:, 20] += 1
    assert relative(states(changed)[:, 0], before[:, 0]) > 1e-2


@torch.no_grad()
def test_an_anchor_drafts_the_same_alone_and_among_many():
    target = tiny_target()
    drafter = randomize(tiny_drafter(target))
    ids, _ = text_of(target)
    clean = rollout.read_clean_text(target, ids, drafter.config.target_layer_ids, room=3 * BLOCK_SIZE)
    embedding = target.get_input_embeddings()
    many = rollout.draft_blocks(drafter, embedding, ids, clean.features, at(12, 20, 33))
    alone = rollout.draft_blocks(drafter, embedding, ids, clean.features, at(20))
    assert_close(many[:, 1], alone[:, 0], rtol=1e-5, atol=1e-5)
    drafted = torch.randint(0, 190, (1, 3, BLOCK_SIZE - 1))
    many = rollout.verify_blocks(target, clean.cache, ids, drafted, at(12, 20, 33))
    alone = rollout.verify_blocks(target, clean.cache, ids, drafted[:, 1:2], at(20))
    assert_close(many[:, 1], alone[:, 0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES + ["mistral-window"])
@torch.no_grad()
def test_verification_equals_a_pass_over_the_prefix(family):
    """Gemma 2 mixes windowed and full layers, Mistral windows them all; here the window is shorter than the text."""
    overrides = {"sliding_window": 16} if family == "mistral-window" else {}
    target = tiny_target(family.split("-")[0], **overrides)
    ids, _ = text_of(target)
    blocks, drafted = at(12, 40), torch.randint(0, 190, (1, 2, BLOCK_SIZE - 1))
    clean = rollout.read_clean_text(target, ids, [1, 3], room=2 * BLOCK_SIZE)
    length = clean.cache.get_seq_length()
    states = rollout.verify_blocks(target, clean.cache, ids, drafted, blocks)
    assert clean.cache.get_seq_length() == length
    for n, anchor in enumerate((12, 40)):
        whole = torch.cat([ids[:, : anchor + 1], drafted[:, n]], dim=1)
        expected = target.get_decoder()(whole, use_cache=False).last_hidden_state[:, anchor:]
        assert relative(states[:, n], expected) < 1e-5


@pytest.mark.parametrize("family", FAMILIES + ["mistral-window"])
@torch.no_grad()
def test_only_rejected_slots_are_verified(family):
    """With the states that a pass over all slots gives, where the slots before are the text's."""
    overrides = {"sliding_window": 16} if family == "mistral-window" else {}
    target = tiny_target(family.split("-")[0], **overrides)
    ids, mask = text_of(target)
    ids = torch.cat([ids, ids.flip(1)])
    blocks = Blocks(
        torch.tensor([[12, 20, 33, 40], [5, 22, 31, 50]]), torch.tensor([[True] * 4, [True] * 3 + [False]])
    )
    accepted = torch.tensor([[0, 2, BLOCK_SIZE - 1, BLOCK_SIZE - 2], [3, BLOCK_SIZE - 1, 1, 0]])
    labels, _ = rollout.block_labels(ids, torch.ones_like(ids, dtype=torch.bool), blocks, BLOCK_SIZE)
    wrong = torch.arange(BLOCK_SIZE - 1) >= accepted[..., None]
    drafted = torch.where(wrong, (labels + 7) % 190, labels)
    clean = rollout.read_clean_text(target, ids, [1, 3], room=4 * BLOCK_SIZE)
    every = rollout.verify_blocks(target, clean.cache, ids, drafted, blocks)
    found = rollout.verify_blocks(target, clean.cache, ids, drafted, blocks, accepted + 1)
    assert clean.cache.get_seq_length() == ids.shape[1]
    slots = torch.arange(BLOCK_SIZE)
    runs = (slots > accepted[..., None]) & (slots < BLOCK_SIZE - 1) & blocks.valid[..., None]
    assert relative(found[runs], every[runs]) < 1e-5 and not found[~runs].any()
    states = torch.zeros_like(found)
    whole, part = (rollout.carried_trajectory(states, verified, accepted) for verified in (every, found))
    valid = whole.valid & blocks.valid.repeat_interleave(BLOCK_SIZE, dim=1)
    assert valid.any() and relative(part.target[valid], whole.target[valid]) < 1e-5


# -- training sees what generate() sees ------------------------------------------------------------------------------


class Spy:
    """Notes what the drafter is given and gives back in each round of a generate() call."""

    def __init__(self, drafter):
        self.rounds, self.real = [], drafter.forward
        drafter.forward = self

    def __call__(self, **kwargs):
        out = self.real(**kwargs)
        self.rounds.append({**kwargs, "states": out.last_hidden_state})
        return out


def decode_rounds(target, drafter, ids, prompt_length):
    """generate() on the prompt; per round: anchor, what the drafter was given, what it gave."""
    spy = Spy(drafter)
    out = target.generate(
        ids[:, :prompt_length], assistant_model=drafter, max_new_tokens=ids.shape[1] - prompt_length, do_sample=False
    )
    drafter.forward = spy.real
    assert torch.equal(out, ids)
    return [(int(r["position_ids"][0, -BLOCK_SIZE]), r) for r in spy.rounds]


def half_right(target, drafter, ids, seed=0):
    """Bends the drafter's states towards the right ones, so that every number of accepted proposals occurs."""
    last = target.config.num_hidden_layers
    right = target(ids, output_hidden_states=[last]).hidden_states[last]
    right = torch.cat([right, right[:, -1:].expand(-1, 4 * BLOCK_SIZE, -1)], dim=1)
    generator = torch.Generator().manual_seed(seed)
    place_is_right = torch.rand(right.shape[1], generator=generator) < 0.75
    real = drafter.forward

    def forward(**kwargs):
        out = real(**kwargs)
        queries = kwargs["noise_embeds"].shape[1]
        places = kwargs["position_ids"][0, -queries:] - 1
        keep = torch.where(place_is_right[places], 1.0, -1.0)[None, :, None]
        out.last_hidden_state = right[:, places] * keep + 0.01 * out.last_hidden_state
        return out

    drafter.forward = forward


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("conditioning", ["corrected", "gated", "overwrite"])
def test_training_equals_decoding_carried_round_included(family, conditioning):
    check_training_equals_decoding(family, conditioning)


@pytest.mark.parametrize("window", [1, 5, 24])
def test_training_equals_decoding_within_a_context_window(window):
    check_training_equals_decoding("qwen3", "corrected", window)


@torch.no_grad()
def check_training_equals_decoding(family, conditioning, window=None, **fields):
    """Every round of a generate() call, rebuilt by the training path from the anchor before it."""
    target = tiny_target(family)
    ids, mask = text_of(target)
    drafter = randomize(tiny_drafter(target, conditioning=conditioning, context_window=window, **fields))
    half_right(target, drafter, ids)
    rounds = decode_rounds(target, drafter, ids, prompt_length=9)
    config, embedding = drafter.config, target.get_input_embeddings()
    clean = rollout.read_clean_text(target, ids, config.target_layer_ids, BLOCK_SIZE, config.target_kv_layer_ids)
    seen, signals = 0, 0
    for (anchor, decoded), (next_anchor, next_decoded) in zip(rounds, rounds[1:]):
        # Features: all context handed over so far, and nothing else.
        new = decoded["context_hidden_states"].shape[1]
        if window is not None:  # rows before it are not handed over
            assert new == min(anchor - seen, window)
            seen = anchor - new
        assert relative(decoded["context_hidden_states"], clean.features[:, seen : seen + new]) < 1e-5
        seen += new
        assert seen == anchor
        # A fresh round from the same anchor, given the signal that generate() had, and its carried round.
        blocks = at(anchor)
        states = rollout.draft_blocks(drafter, embedding, ids, clean.features, blocks, decoded["trajectory"])
        assert relative(states[:, 0], decoded["states"]) < 1e-5
        drafted = target.lm_head(states[:, :, 1:]).argmax(-1)
        labels, supervised = rollout.block_labels(ids, mask, blocks, BLOCK_SIZE)
        accepted = rollout.count_accepted(drafted, labels, supervised)
        shifted = rollout.shift_blocks(blocks, accepted, mask)
        assert int(shifted.anchors) == next_anchor
        verified = rollout.verify_blocks(target, clean.cache, ids, drafted, blocks, accepted + 1)
        carried = rollout.carried_trajectory(states, verified, accepted)
        signal = next_decoded["trajectory"]
        if signal is None:
            assert not carried.valid.any()
            continue
        signals += 1
        if ids.shape[1] - 1 - anchor >= BLOCK_SIZE:  # all proposals were verified
            assert torch.equal(carried.valid, signal.valid)
        both = carried.valid & signal.valid
        assert relative(carried.draft[both], signal.draft[both]) < 1e-5
        if conditioning == "corrected":
            assert relative(carried.target[both], signal.target[both]) < 1e-5
        again = rollout.draft_blocks(drafter, embedding, ids, clean.features, shifted, signal)
        assert relative(again[:, 0], next_decoded["states"]) < 1e-5
    assert signals >= 3


def test_carried_states_are_detached():
    states = torch.randn(1, 2, 8, 4, requires_grad=True)
    carried = rollout.carried_trajectory(states, states, torch.tensor([[0, 3]]))
    assert isinstance(carried, RejectedTrajectory) and carried.draft.shape == (1, 16, 4)
    assert not carried.draft.requires_grad and not carried.target.requires_grad


def test_noise_is_anchor_then_masks():
    ids = torch.arange(20)[None]
    noise = block_tokens(ids[:, [4, 11]], MASK_TOKEN_ID, 4)
    assert noise.tolist() == [[4, *[MASK_TOKEN_ID] * 3, 11, *[MASK_TOKEN_ID] * 3]]


# -- break it, and see -----------------------------------------------------------------------------------------------

BREAKS = {
    "tap index": (
        rollout,
        "gather_context_rows",
        lambda real: lambda states, ids, *args: real(states, [i - 1 for i in ids], *args),
    ),
    "position offset": (rollout, "block_positions", lambda real: lambda anchors, size: real(anchors + 1, size)),
    "context of a block": (
        block_attention,
        "_chunk",
        lambda real: lambda row, blocks, anchors, window: real(row, blocks, anchors - 1, window),
    ),
    "context of verification": (
        rollout,
        "visible_context",
        lambda real: lambda anchors, *args: real(anchors - 1, *args),
    ),
    "order of verification": (rollout, "visible_slots", lambda real: lambda queries, keys: real(keys, queries)),
    "alignment": (
        rollout,
        "align_trajectory",
        lambda real: lambda *args, first_rejected, **kwargs: real(*args, first_rejected=first_rejected + 1, **kwargs),
    ),
}


@pytest.mark.parametrize("fault", BREAKS)
def test_each_fault_of_the_training_path_is_seen(monkeypatch, fault):
    """The test above is worth something only if it fails when the two paths part."""
    owner, name, broken = BREAKS[fault]
    monkeypatch.setattr(owner, name, broken(getattr(owner, name)))
    if fault == "tap index":
        monkeypatch.setattr(rollout, "captured_layers", lambda ids, layers, with_last: True)
    with pytest.raises(AssertionError):
        test_training_equals_decoding_carried_round_included("qwen3", "corrected")
