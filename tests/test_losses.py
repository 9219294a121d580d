"""Losses against naive loops; chunked equals whole in value and gradient."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from retrace_hf.measure import PeakMemory
from retrace_hf.training.losses import (
    chunked_loss,
    decay_weights,
    default_gamma,
    dpace_weights,
    soft_targets,
)


@pytest.mark.parametrize("chunk_size", [1, 7, 20, 64])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("soft_share", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("named", [5, 50])
def test_chunked_equals_whole(chunk_size, softcap, soft_share, named):
    """In loss and gradient. Of the target's likeliest tokens are named 5, or all."""
    torch.manual_seed(0)
    head = torch.nn.Linear(16, 50, bias=True).requires_grad_(False)
    labels, weights = torch.randint(0, 50, (20,)), torch.rand(20)

    def logits_fn(rows):
        logits = head(rows) * 3
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    states = torch.randn(20, 16, requires_grad=True)
    teacher_logits = logits_fn(torch.randn(20, 16))
    teacher = soft_targets(teacher_logits, lambda logits: logits, named, chunk_size)
    losses, cross_entropy, predictions = chunked_loss(states, labels, logits_fn, chunk_size, teacher, soft_share)
    (losses * weights).sum().backward()

    whole = states.detach().clone().requires_grad_()
    logits = logits_fn(whole)
    hard = F.cross_entropy(logits, labels, reduction="none")
    mine, wanted = logits.softmax(-1), teacher_logits.softmax(-1)
    is_named = torch.zeros(20, 50, dtype=torch.bool).scatter(1, teacher_logits.topk(named).indices, True)
    rest, own_rest = (p.masked_fill(is_named, 0).sum(-1).clamp(min=1e-30) for p in (wanted, mine))
    soft = (wanted * (wanted / mine).log() * is_named).sum(-1) + rest * (rest / own_rest).log()
    if named == 50:
        assert_close(soft, F.kl_div(logits.log_softmax(-1), wanted, reduction="none").sum(-1))
    expected = (1 - soft_share) * hard + soft_share * soft
    (expected * weights).sum().backward()
    assert_close(losses, expected, rtol=1e-6, atol=1e-6)
    assert_close(states.grad, whole.grad, rtol=1e-5, atol=1e-6)
    assert_close(cross_entropy, hard, rtol=1e-6, atol=1e-6)
    assert not cross_entropy.requires_grad
    assert torch.equal(predictions, logits.argmax(-1))
    assert head.weight.grad is None


@pytest.mark.parametrize("size", [1000, 1024, 5000])
def test_predictions_are_the_first_of_the_largest(size):
    torch.manual_seed(0)
    logits = torch.randn(40, size).bfloat16()  # with ties
    states = torch.zeros(40, 1)
    predictions = chunked_loss(states, torch.zeros(40, dtype=torch.long), lambda rows: logits, 40).predictions
    assert torch.equal(predictions, logits.argmax(-1))


def test_chunked_without_gradient_and_without_rows():
    head = torch.nn.Linear(4, 9)
    with torch.no_grad():
        losses, _, predictions = chunked_loss(torch.randn(5, 4), torch.zeros(5, dtype=torch.long), head, 2)
    assert losses.shape == predictions.shape == (5,) and not losses.requires_grad
    empty = torch.randn(0, 4, requires_grad=True)
    losses, _, predictions = chunked_loss(empty, torch.zeros(0, dtype=torch.long), head, 2)
    losses.sum().backward()
    assert losses.shape == predictions.shape == (0,)


@pytest.mark.parametrize("soft_share", [0.0, 0.4])
def test_memory_grows_with_the_chunk_and_not_with_the_rows(soft_share):
    """No pass keeps more than a chunk's logits: in a large vocabulary four times the rows cost next to nothing."""
    head = torch.nn.Linear(8, 20_000, bias=False).requires_grad_(False)

    def peak(rows, chunk_size):
        states, labels = torch.randn(rows, 8, requires_grad=True), torch.zeros(rows, dtype=torch.long)
        with PeakMemory() as memory:
            teacher = soft_targets(states.detach(), head, 8, chunk_size)
            losses = chunked_loss(states, labels, head, chunk_size, teacher, soft_share).loss
            losses.sum().backward()
        return memory.peak

    logits = 32 * 20_000 * 4  # bytes of one chunk
    assert peak(256, 32) < 1.05 * peak(64, 32) and logits < peak(256, 32) < 8 * logits
    assert peak(64, 64) > 1.8 * peak(64, 32)


def test_decay_against_the_formula():
    supervised = torch.tensor([[True, True, True, False], [True, False, False, False]])
    expected = [[1, math.exp(-1 / 4), math.exp(-2 / 4), 0], [1, 0, 0, 0]]
    assert_close(decay_weights(supervised, 4.0), torch.tensor(expected))
    assert [default_gamma(b) for b in (16, 10, 8, 12)] == [7.0, 5.0, 4.0, 6.0]


def test_dpace_against_a_loop():
    torch.manual_seed(0)
    losses = torch.rand(3, 5) * 3
    supervised = torch.tensor([[True] * 5, [True] * 3 + [False] * 2, [False] * 5])
    weights = dpace_weights(losses, supervised, alpha=0.4)
    for b in range(3):
        n = int(supervised[b].sum())
        confidence = [0.6 * math.exp(-float(losses[b, k])) + 0.4 for k in range(n)]
        for j in range(5):
            expected = sum(math.prod(confidence[: k + 1]) for k in range(j, n)) if j < n else 0.0
            assert_close(float(weights[b, j]), expected, rtol=1e-5, atol=1e-6)
    assert not dpace_weights(losses.requires_grad_(), supervised).requires_grad
