"""Alignment by hand, fusion against a naive loop, gates at their extremes."""

import doctest

import pytest
import torch
from torch.testing import assert_close

from retrace_hf import RejectedTrajectory, RetraceConfig, align_trajectory, trajectory
from retrace_hf.trajectory import TrajectoryFusion, overwrite_embeds


def small_config(conditioning="corrected"):
    return RetraceConfig(hidden_size=6, conditioning=conditioning)


def random_signal(seed=0, batch=2, slots=8, size=6):
    generator = torch.Generator().manual_seed(seed)
    draft, target = torch.randn(2, batch, slots, size, generator=generator)
    valid = torch.zeros(batch, slots, dtype=torch.bool)
    valid[0, 1:5], valid[1, 1:2] = True, True
    return RejectedTrajectory(draft, target, valid)


def test_worked_example_in_the_docstring():
    assert doctest.testmod(trajectory, extraglobs={"torch": torch}).failed == 0


@pytest.mark.parametrize("num_verified, accepted", [(p, a) for p in (1, 3, 7) for a in range(p + 1)])
def test_alignment_against_a_loop(num_verified, accepted):
    """Every slot by its absolute position: m from the same place, u from one place earlier."""
    block_size, anchor = 8, 100
    draft = torch.arange(anchor, anchor + block_size).float().view(1, -1, 1)  # a state says where it stands
    target = draft[:, : num_verified + 1]
    first_rejected = accepted + 1
    aligned = align_trajectory(draft, target, first_rejected, num_verified)
    next_anchor = anchor + first_rejected
    for slot in range(block_size):
        behind = slot >= 1 and next_anchor + slot <= anchor + num_verified
        assert bool(aligned.valid[0, slot]) == behind
        if behind:
            assert aligned.draft[0, slot, 0] == next_anchor + slot
            assert aligned.target[0, slot, 0] == next_anchor + slot - 1


def test_alignment_of_a_batch_is_that_of_each():
    generator = torch.Generator().manual_seed(0)
    draft, target = torch.randn(2, 3, 8, 4, generator=generator)
    first, verified = torch.tensor([1, 3, 8]), torch.tensor([7, 5, 7])
    batch = align_trajectory(draft, target, first, verified)
    for i in range(3):
        one = align_trajectory(draft[i : i + 1], target[i : i + 1], int(first[i]), int(verified[i]))
        for together, alone in zip(batch, one):
            assert torch.equal(together[i : i + 1], alone)


def test_alignment_is_detached():
    draft = torch.randn(1, 8, 4, requires_grad=True)
    aligned = align_trajectory(draft, draft * 2, 2, 7)
    assert not aligned.draft.requires_grad and not aligned.target.requires_grad


@pytest.mark.parametrize("conditioning", ["gated", "corrected"])
def test_fusion_against_the_formula(conditioning):
    fusion, signal = TrajectoryFusion(small_config(conditioning)), random_signal()
    fusion.beta = 0.7
    embeds = torch.randn(2, 8, 6)
    out = fusion(embeds, signal, corrected=conditioning == "corrected")
    for b in range(2):
        for j in range(8):
            e, m, u = embeds[b, j], signal.draft[b, j], signal.target[b, j]
            r = m
            if conditioning == "corrected":
                r = m + 0.7 * fusion.correction.weight @ torch.cat([m, u])
            gate = torch.sigmoid(fusion.gate.weight @ torch.cat([e, r]))
            expected = e + (fusion.value.weight @ r) * gate if signal.valid[b, j] else e
            assert_close(out[b, j], expected, rtol=1e-5, atol=1e-6)


def test_zero_value_is_no_conditioning_and_beta_zero_is_gated():
    fusion, signal = TrajectoryFusion(small_config()), random_signal()
    embeds = torch.randn(2, 8, 6)
    fusion.beta = 0.0
    assert torch.equal(fusion(embeds, signal, corrected=True), fusion(embeds, signal, corrected=False))
    torch.nn.init.zeros_(fusion.value.weight)
    assert torch.equal(fusion(embeds, signal, corrected=True), embeds)


def test_slots_without_signal_keep_their_embedding_and_let_no_nan_through():
    fusion, signal = TrajectoryFusion(small_config()), random_signal()
    holes = ~signal.valid
    signal.draft[holes], signal.target[holes] = float("nan"), float("inf")
    embeds = torch.randn(2, 8, 6, requires_grad=True)
    out = fusion(embeds, signal, corrected=True)
    assert torch.equal(out[holes], embeds[holes])
    out.sum().backward()
    for parameter in (embeds, *fusion.parameters()):
        assert torch.isfinite(parameter.grad).all()


def test_overwrite_replaces_where_there_is_a_signal():
    signal, embeds = random_signal(), torch.randn(2, 8, 6)
    out = overwrite_embeds(embeds, signal)
    assert torch.equal(out[signal.valid], signal.draft[signal.valid])
    assert torch.equal(out[~signal.valid], embeds[~signal.valid])
