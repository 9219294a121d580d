"""Axis 3: slots of items against a loop over text, embeddings against their formulas, and both on every path."""

import doctest
import random

import pytest
import torch
from torch.testing import assert_close

from retrace_hf import RetraceConfig, RetraceDrafter, positions, record_acceptance
from retrace_hf.evaluation import roll_out
from retrace_hf.evaluation import rollout as evaluation_rollout
from retrace_hf.noise import block_inputs
from retrace_hf.positions import ItemSlotEmbedding, StepEmbedding, block_item_slots
from retrace_hf.training import rollout

from .fixtures import (
    BLOCK_SIZE,
    MASK_TOKEN_ID,
    THREE_KINDS,
    drafter_of_kind,
    plain,
    prompt_of,
    randomize,
    script_drafter,
    tiny_drafter,
    tiny_target,
)
from .test_candidate_generator import test_get_candidates_does_not_wait_for_the_device as check_no_waiting
from .test_rollout import check_training_equals_decoding, relative
from .test_trainer import make_trainer, rows_of


# Of the 200 tokens of a tiny target: three slots of unequal size, their ids not in the order of the slots.
ITEMS = {"item_slots": 3, "item_token_ranges": [[60, 110], [5, 60], [110, 170]]}
WITH_SEPARATOR = {**ITEMS, "item_separator_id": 180}
STEPS = {"step_embeddings": True}
AXES = {"slots": WITH_SEPARATOR, "steps": STEPS, "both": {**WITH_SEPARATOR, **STEPS}}


@pytest.fixture(scope="module")
def target():
    return tiny_target("qwen3")


def placed_drafter(target, axis="both", conditioning="none", **config):
    """A drafter all of whose parameters have random values, those of one dimension too."""
    drafter = randomize(tiny_drafter(target, conditioning=conditioning, **{**AXES[axis], **config}))
    return fill_gates(drafter)


@torch.no_grad()
def fill_gates(drafter):
    if drafter.item_slot_embedding is not None:
        drafter.item_slot_embedding.scale.fill_(0.7)
    if drafter.step_embedding is not None:
        drafter.step_embedding.gate.bias.fill_(0.4)
    return drafter


# -- slots -----------------------------------------------------------------------------------------------------------


def test_worked_example_in_the_docstring():
    names = {"torch": torch, "RetraceConfig": RetraceConfig}
    assert doctest.testmod(positions, extraglobs=names).failed == 0


def stream(config, start, length, rng):
    """Tokens of items one behind the other, beginning at slot `start` of one, and the slot of each."""
    period = config.item_slots + (config.item_separator_id is not None)
    slots = [(start + i) % period for i in range(length)]
    tokens = [
        config.item_separator_id if slot == config.item_slots else rng.randrange(*config.item_token_ranges[slot])
        for slot in slots
    ]
    return tokens, slots


@pytest.mark.parametrize("fields", [ITEMS, WITH_SEPARATOR, {"item_slots": 1, "item_token_ranges": [[3, 9]]}])
@pytest.mark.parametrize("block_size", [2, 7, 8])
def test_slots_are_those_of_the_text_wherever_it_starts(fields, block_size):
    config = RetraceConfig(vocab_size=200, block_size=block_size, **fields)
    rng, length = random.Random(0), 40
    for start in range(config.item_slots + (config.item_separator_id is not None)):
        tokens, slots = stream(config, start, length, rng)
        anchors = list(range(length - block_size))
        found = block_item_slots(torch.tensor([[tokens[a] for a in anchors]]), config)
        assert found.shape == (1, len(anchors) * block_size)
        for anchor, block in zip(anchors, found.view(len(anchors), block_size).tolist()):
            assert block == slots[anchor : anchor + block_size]


def test_behind_text_without_items_nothing_is_known():
    """A user's words, BOS, the mask token; a separator is of no item where the config names none."""
    config = RetraceConfig(vocab_size=200, block_size=BLOCK_SIZE, **ITEMS)
    anchors = torch.tensor([[0, 4, 170, 180, 199], [5, 59, 60, 109, 169]])
    slots = block_item_slots(anchors, config).view(2, 5, BLOCK_SIZE)
    assert (slots[0] == -1).all() and (slots[1] >= 0).all()
    assert slots[1, :, 0].tolist() == [1, 1, 0, 0, 2]


@pytest.mark.parametrize(
    "fields, fault",
    [
        ({"item_slots": 4}, "item_slots is 4 and item_token_ranges None; give one range"),
        ({**ITEMS, "item_slots": 2}, "give one range"),
        ({**ITEMS, "item_slots": -1}, "item_slots is -1"),
        ({**ITEMS, "item_slots": 0}, "set item_slots"),
        ({"item_separator_id": 3}, "item_separator_id is 3 and item_slots is 0"),
        ({"item_slots": 2, "item_token_ranges": [[0, 5], [4, 9]]}, "overlap"),
        ({"item_slots": 2, "item_token_ranges": [[0, 5], [190, 201]]}, r"\[190, 201\].*200 embedding rows"),
        ({"item_slots": 2, "item_token_ranges": [[0, 5], [9, 9]]}, "not empty"),
        ({"item_slots": 2, "item_token_ranges": [[0, 5], [-3, 0]]}, r"\[-3, 0\]"),
        ({"item_slots": 2, "item_token_ranges": [[0, 5], [6, 7, 8]]}, r"\[first, end\)"),
        ({"item_slots": 2, "item_token_ranges": [["a", 5], [6, 7]]}, "has .'a', 5"),
        ({"item_slots": 2, "item_token_ranges": [[0, 4.5], [6, 7]]}, "has .0, 4.5"),
        ({"item_slots": 2, "item_token_ranges": [0, 5]}, r"has 0; a range is \[first, end\)"),
        ({**ITEMS, "item_separator_id": 200}, "item_separator_id 200 is outside"),
        ({**ITEMS, "item_separator_id": 60}, "item_separator_id 60 is within"),
        ({**ITEMS, "mask_token_id": 169}, "mask_token_id 169 is within"),
        ({**ITEMS, "item_separator_id": 199, "mask_token_id": 199}, "both 199"),
    ],
)
def test_grammars_that_cannot_be(fields, fault):
    with pytest.raises(ValueError, match=fault):
        RetraceConfig(vocab_size=200, **fields)


# -- the formulas ----------------------------------------------------------------------------------------------------


def small_config(**fields):
    items = {"item_slots": 2, "item_token_ranges": [[0, 4], [4, 8]], "item_separator_id": 9}
    return RetraceConfig(vocab_size=12, hidden_size=6, block_size=4, **items, **fields)


@torch.no_grad()
def test_item_slots_against_the_formula():
    embedding = randomize(ItemSlotEmbedding(small_config()))
    embedding.scale.fill_(0.3)
    embeds, ids = torch.randn(2, 5, 6), torch.tensor([[0, 1, 2, 0, -1], [-1, -1, 1, 2, 0]])
    out = embedding(embeds, ids)
    assert embedding.table.weight.shape == (3, 6)  # two slots and the separator
    for b in range(2):
        for j in range(5):
            slot = int(ids[b, j])
            if slot < 0:
                assert torch.equal(out[b, j], embeds[b, j])
            else:
                assert_close(out[b, j], embeds[b, j] + 0.3 * embedding.table.weight[slot])


@torch.no_grad()
@pytest.mark.parametrize("block_size", [3, 4, 6])
def test_steps_against_the_formula(block_size):
    """Made for blocks of 4; of longer ones the slots behind have no step."""
    embedding = randomize(StepEmbedding(small_config()))
    embedding.gate.bias.fill_(-0.2)
    states = 50 * torch.randn(2, 3 * block_size, 6)
    out = embedding(states, block_size)
    for b in range(2):
        for n in range(3 * block_size):
            f, step = states[b, n], n % block_size
            if step == 0 or step > 3:
                assert torch.equal(out[b, n], f)
                continue
            x = f / torch.sqrt((f * f).mean() + 1e-6)
            gate = 1 / (1 + torch.exp(-(embedding.gate.weight[0] @ x - 0.2)))
            assert_close(out[b, n], f + gate * embedding.table.weight[step - 1], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_where_they_enter(target):
    """Slots before the trajectory, steps behind the last layer and before the final norm."""
    drafter, seen = placed_drafter(target, conditioning="corrected"), {}
    for name in ("item_slot_embedding", "trajectory", "step_embedding", "norm"):
        getattr(drafter, name).register_forward_hook(
            lambda module, inputs, out, name=name: seen.update({name: (inputs[0], out)})
        )
    drafter.layers[-1].register_forward_hook(lambda module, inputs, out: seen.update(last=(None, out)))
    size = drafter.config.hidden_size
    signal = torch.arange(BLOCK_SIZE)[None] % 2 == 1
    drafter(
        noise_embeds=torch.randn(1, BLOCK_SIZE, size),
        context_hidden_states=torch.randn(1, 5, 2 * size),
        trajectory=positions_signal(size, signal),
        item_slot_ids=torch.arange(BLOCK_SIZE)[None] % 4,
    )
    assert seen["trajectory"][0] is seen["item_slot_embedding"][1]
    assert seen["step_embedding"][0] is seen["last"][1]
    assert seen["norm"][0] is seen["step_embedding"][1]


def positions_signal(size, valid):
    from retrace_hf import RejectedTrajectory

    return RejectedTrajectory(torch.randn(1, BLOCK_SIZE, size), torch.randn(1, BLOCK_SIZE, size), valid)


# -- what an untrained one drafts, and what is switched off ----------------------------------------------------------


def states_of(drafter, slots=True, seed=0, rows=BLOCK_SIZE):
    generator = torch.Generator().manual_seed(seed)
    size, taps = drafter.config.hidden_size, len(drafter.config.target_layer_ids)
    inputs = {"item_slot_ids": torch.arange(rows)[None] % 4} if slots else {}
    return drafter(
        noise_embeds=torch.randn(1, rows, size, generator=generator),
        context_hidden_states=torch.randn(1, 7, taps * size, generator=generator),
        **inputs,
    ).last_hidden_state


@torch.no_grad()
@pytest.mark.parametrize("conditioning", ["none", "corrected"])
@pytest.mark.parametrize("axis", AXES)
def test_a_dflash_opened_with_them_drafts_as_before_bit_for_bit(target, axis, conditioning, tmp_path):
    dflash = randomize(tiny_drafter(target, conditioning="none"))
    dflash.save_pretrained(tmp_path)
    drafter = RetraceDrafter.from_dflash(tmp_path, conditioning=conditioning, **AXES[axis])
    assert torch.equal(states_of(drafter), states_of(dflash))
    prompt = prompt_of(9)
    counts = []
    for one in (dflash, drafter):
        with record_acceptance() as stats:
            plain(target, prompt, 30, assistant_model=one)
        counts.append(stats.accepted_per_round)
    assert counts[0] == counts[1]


@torch.no_grad()
def test_each_is_read_in_each_forward(target):
    drafter = placed_drafter(target)
    both = states_of(drafter)
    drafter.config.step_embeddings = False
    slots = states_of(drafter)
    drafter.config.item_slots = 0
    neither = states_of(drafter)
    drafter.config.step_embeddings = True
    steps = states_of(drafter)
    found = [both, slots, steps, neither]
    assert all(relative(a, b) > 1e-2 for i, a in enumerate(found) for b in found[:i])
    off = tiny_drafter(target, conditioning="none")
    missing = off.load_state_dict(drafter.state_dict(), strict=False).missing_keys
    assert missing == [] and torch.equal(neither, states_of(off))


def test_a_field_without_its_module_says_so(target):
    drafter = tiny_drafter(target)
    drafter.config.step_embeddings = True
    with pytest.raises(ValueError, match="step_embeddings=True needs step_embedding.*from_dflash"):
        states_of(drafter)
    drafter = tiny_drafter(target)
    drafter.config.item_slots = 3
    with pytest.raises(ValueError, match="item_slots=3 needs item_slot_embedding.*from_dflash"):
        states_of(drafter)


# -- save, load, open as something else ------------------------------------------------------------------------------


@torch.no_grad()
def test_saved_and_loaded_they_are_the_same(target, tmp_path):
    drafter = placed_drafter(target, conditioning="corrected")
    drafter.save_pretrained(tmp_path)
    loaded = RetraceDrafter.from_pretrained(tmp_path)
    assert loaded.config.item_token_ranges == WITH_SEPARATOR["item_token_ranges"]
    assert loaded.config.item_separator_id == 180 and loaded.config.step_embeddings
    assert torch.equal(states_of(loaded), states_of(drafter))


@torch.no_grad()
def test_a_trained_one_becomes_a_retrace_with_all_it_knows(target, tmp_path):
    """Stage 2 of training; also with blocks of another size, whose steps are cut or new."""
    drafter = placed_drafter(target)
    drafter.save_pretrained(tmp_path)
    opened = RetraceDrafter.from_dflash(tmp_path)
    assert opened.config.conditioning == "corrected" and torch.equal(states_of(opened), states_of(drafter))
    rows = drafter.step_embedding.table.weight
    for block_size in (5, 11):
        table = RetraceDrafter.from_dflash(tmp_path, block_size=block_size).step_embedding.table.weight
        kept = min(block_size - 1, BLOCK_SIZE - 1)
        assert table.shape == (block_size - 1, rows.shape[1]) and torch.equal(table[:kept], rows[:kept])
        assert not table[kept:].any()
    with pytest.raises(ValueError, match="unknown: .*step_embedding"):
        RetraceDrafter.from_dflash(tmp_path, step_embeddings=False)


@torch.no_grad()
@pytest.mark.parametrize("block_size", [3, 12])
def test_blocks_of_another_size_keep_the_text(target, block_size):
    drafter, prompt = placed_drafter(target, conditioning="corrected"), prompt_of(9)
    drafter.config.block_size = block_size
    assert torch.equal(plain(target, prompt, 30, assistant_model=drafter), plain(target, prompt, 30))


# -- every path gives the same slots ---------------------------------------------------------------------------------


@pytest.mark.parametrize("conditioning", ["corrected", "gated"])
@pytest.mark.parametrize("axis", AXES)
def test_training_equals_decoding_carried_round_included(axis, conditioning):
    check_training_equals_decoding("qwen3", conditioning, **AXES[axis])


def off_by_one(embedding, anchor_ids, drafter):
    """What a path with a fault would tell the drafter."""
    inputs = block_inputs(embedding, anchor_ids, drafter)
    return {**inputs, "item_slot_ids": inputs["item_slot_ids"].roll(1, dims=1)}


@pytest.mark.parametrize("fault", ["slots", "steps"])
def test_a_fault_of_the_training_path_is_seen(monkeypatch, fault):
    if fault == "slots":
        monkeypatch.setattr(rollout, "block_inputs", off_by_one)
    else:  # the training path gives its blocks to the module side by side
        real = StepEmbedding.forward
        broken = lambda self, states, size: real(self, states, size if states.shape[1] > size else size - 1)  # noqa: E731
        monkeypatch.setattr(StepEmbedding, "forward", broken)
        monkeypatch.setattr(rollout, "draft_blocks", twice(rollout.draft_blocks))
    with pytest.raises(AssertionError):
        check_training_equals_decoding("qwen3", "corrected", **AXES["both"])


def twice(draft_blocks):
    """The same blocks with a second one beside each sequence's, which is dropped again."""

    def doubled(drafter, embedding, ids, features, blocks, trajectory=None):
        both = rollout.Blocks(blocks.anchors.repeat(1, 2), blocks.valid.repeat(1, 2))
        if trajectory is not None:
            trajectory = type(trajectory)(*(part.repeat(1, 2, *[1] * (part.ndim - 2)) for part in trajectory))
        return draft_blocks(drafter, embedding, ids, features, both, trajectory)[:, : blocks.anchors.shape[1]]

    return doubled


def test_many_blocks_side_by_side_equal_decoding(monkeypatch):
    monkeypatch.setattr(rollout, "draft_blocks", twice(rollout.draft_blocks))
    check_training_equals_decoding("qwen3", "corrected", **AXES["both"])


@torch.no_grad()
def test_generate_tells_the_drafter_where_it_stands(target):
    """Every round, from the token of its anchor; transformers' own generator tells nothing, and drafts."""
    drafter, prompt, seen = placed_drafter(target), prompt_of(9), []
    real = drafter.forward

    def forward(**kwargs):
        place = int(kwargs["position_ids"][0, -BLOCK_SIZE])
        seen.append((place, kwargs.get("item_slot_ids")))
        return real(**kwargs)

    drafter.forward = forward
    sequence = plain(target, prompt)
    assert torch.equal(plain(target, prompt, assistant_model=drafter), sequence)
    kinds = set()
    for place, slots in seen:
        assert torch.equal(slots, block_item_slots(sequence[:, place : place + 1], drafter.config))
        kinds.add(int(slots[0, 0]))
    assert {-1, 0, 1, 2} <= kinds
    seen.clear()
    assert torch.equal(plain(target, prompt, assistant_model=drafter, speculation_type="dflash"), sequence)
    assert seen and all(slots is None for _, slots in seen)


def test_rollout_equals_generate(target, tmp_path, monkeypatch):
    prompts = [prompt_of(length, seed=length) for length in (3, 9, 20)]
    lengths = [p.shape[1] for p in prompts]
    sequences = [plain(target, p, max_new_tokens=40)[0].tolist() for p in prompts]
    # Random drafters are seldom right: this one has learnt part of the texts, so that all numbers are accepted.
    rows = [{"input_ids": s, "loss_mask": [0] * n + [1] * (len(s) - n)} for s, n in zip(sequences, lengths)]
    drafter = fill_gates(tiny_drafter(target, **AXES["both"]))
    make_trainer(drafter, target, tmp_path, rows, max_steps=30, num_anchors=24, learning_rate=5e-3).train()
    drafter.eval()
    expected = []
    for prompt, sequence in zip(prompts, sequences):
        with record_acceptance() as stats:
            assert plain(target, prompt, 40, assistant_model=drafter)[0].tolist() == sequence
        expected.append(stats.accepted_per_round)
    found = roll_out(target, drafter, sequences, lengths, 40, batch_size=2)
    assert [one.accepted_per_round for one in found] == expected
    assert len({a for accepted in expected for a in accepted}) > 2
    # And it would be seen if it told the drafter of other slots.
    monkeypatch.setattr(evaluation_rollout, "block_inputs", off_by_one)
    found = roll_out(target, drafter, sequences, lengths, 40, batch_size=2)
    assert [one.accepted_per_round for one in found] != expected


@pytest.mark.parametrize("conditioning", ["none", "corrected"])
@pytest.mark.parametrize("axis", AXES)
def test_greedy_text_is_the_same_whatever_is_proposed(target, axis, conditioning):
    prompt = prompt_of(9)
    sequence = plain(target, prompt, 1 + 3 * BLOCK_SIZE)
    for kind in THREE_KINDS:
        drafter = placed_drafter(target, axis, conditioning)
        if kind != "real":
            right = BLOCK_SIZE if kind == "oracle" else 0
            drafter = script_drafter(drafter, target, sequence, lambda t, right=right: right)
        with record_acceptance() as stats:
            assert torch.equal(plain(target, prompt, 1 + 3 * BLOCK_SIZE, assistant_model=drafter), sequence), kind
        if kind != "real":
            assert stats.acceptance_length == (BLOCK_SIZE if kind == "oracle" else 1)


def test_get_candidates_does_not_wait_for_the_device(target, monkeypatch):
    real = tiny_drafter
    from . import test_candidate_generator as module

    monkeypatch.setattr(module, "tiny_drafter", lambda target: real(target, **AXES["both"]))
    check_no_waiting(target, "argmax", monkeypatch)


# -- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("muon", [False, True])
@pytest.mark.parametrize("conditioning", ["none", "corrected"])
def test_every_parameter_moves(target, tmp_path, conditioning, muon):
    drafter = tiny_drafter(target, conditioning=conditioning, **AXES["both"])
    before = {name: p.detach().clone() for name, p in drafter.named_parameters()}
    trainer = make_trainer(drafter, target, tmp_path, rows_of(target), max_steps=6, muon=muon)
    trainer.train()
    assert {"item_slot_embedding.table.weight", "item_slot_embedding.scale", "step_embedding.gate.bias"} <= set(before)
    assert [name for name, p in drafter.named_parameters() if torch.equal(p, before[name])] == []
    moved = drafter.step_embedding.table.weight
    assert moved.any(dim=1).all()  # each step's row
    if muon:
        by_muon = {id(p) for group in trainer.optimizer.param_groups if group["muon"] for p in group["params"]}
        own = [*drafter.item_slot_embedding.parameters(), *drafter.step_embedding.parameters()]
        assert not by_muon & {id(p) for p in own}


def test_peft_trains_them_whole(target, tmp_path):
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(target_modules=["q_proj"], modules_to_save=["item_slot_embedding", "step_embedding"])
    wrapped = get_peft_model(tiny_drafter(target, **AXES["both"]), lora)
    before = {name: p.detach().clone() for name, p in wrapped.named_parameters()}
    make_trainer(wrapped, target, tmp_path, rows_of(target), max_steps=4).train()
    moved = {name for name, p in wrapped.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name, p in wrapped.named_parameters() if p.requires_grad}
    assert any("scale" in name for name in moved) and any("step_embedding" in name for name in moved)
    prompt = prompt_of(9)
    assert torch.equal(plain(target, prompt, 20, assistant_model=wrapped), plain(target, prompt, 20))


def test_off_is_the_drafter_as_it_was(target):
    """No key, no input and no random number more than before there were such modules."""
    drafter = tiny_drafter(target)
    assert not [key for key in drafter.state_dict() if "item" in key or "step" in key]
    embedding, anchors = target.get_input_embeddings(), prompt_of(4)
    assert set(block_inputs(embedding, anchors, drafter)) == {"noise_embeds"}
    assert set(block_inputs(embedding, anchors, tiny_drafter(target, **STEPS))) == {"noise_embeds"}
    assert drafter.config.mask_token_id == MASK_TOKEN_ID and drafter_of_kind("real", target, anchors) is not None


def test_items_set_on_a_loaded_drafter_are_checked_before_the_target_runs():
    target = tiny_target()
    drafter, prompt = tiny_drafter(target), prompt_of(9)
    target.register_forward_pre_hook(lambda *_: pytest.fail("the target ran"))
    for fields, message in (
        ({"item_slots": 2}, "give one range of token ids"),
        ({"item_token_ranges": [[0, 40], [40, 80]]}, "needs item_slot_embedding, which this checkpoint lacks"),
        ({"item_slots": 0, "item_token_ranges": None, "step_embeddings": True}, "needs step_embedding, which"),
    ):
        for name, value in fields.items():
            setattr(drafter.config, name, value)
        with pytest.raises(ValueError, match=message):
            target.generate(prompt, assistant_model=drafter, max_new_tokens=4)


def test_a_separator_of_id_0_and_the_policy_survive_a_second_stage():
    fields = {"item_slots": 2, "item_token_ranges": [[1, 40], [40, 80]], "item_separator_id": 0}
    first = tiny_drafter(tiny_target(), "none", proposal="sample", **fields)
    second = RetraceDrafter.from_dflash(first, conditioning="corrected")
    assert {name: getattr(second.config, name) for name in fields} == fields
    assert second.config.proposal == "sample"
