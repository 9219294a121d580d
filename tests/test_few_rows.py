"""W @ rows^T in place of rows @ W^T."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from retrace_hf.few_rows import apply_linear


@pytest.fixture
def products(monkeypatch):
    """How often a product was turned round."""
    calls, real = [], torch.mm
    monkeypatch.setattr(torch, "mm", lambda *args: calls.append(1) or real(*args))
    return calls


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 8, 16), (2, 3, 16), (7, 16)])
@torch.no_grad()
def test_few_rows_give_the_same(shape, bias, products):
    linear, states = nn.Linear(16, 40, bias=bias), torch.randn(shape)
    assert_close(apply_linear(linear, states), linear(states), rtol=1e-5, atol=1e-6)
    assert products == [1]
    assert torch.equal(apply_linear(linear, torch.zeros(shape)), linear(torch.zeros(shape)))


@torch.no_grad()
def test_what_is_not_turned_round(products):
    """More rows, one row or none, other dtypes, training, autocast, and a module that is more than its weight."""
    linear = nn.Linear(16, 40)
    for rows in (0, 1, 9):
        states = torch.randn(1, rows, 16)
        assert torch.equal(apply_linear(linear, states), linear(states))
    states = torch.randn(1, 4, 16)
    double = nn.Linear(16, 40).double()
    assert torch.equal(apply_linear(double, states.double()), double(states.double()))
    with torch.enable_grad():
        assert apply_linear(linear, states).requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        assert apply_linear(linear, states).dtype == torch.bfloat16
    both = nn.Sequential(linear)
    assert torch.equal(apply_linear(both, states), both(states))
    linear.register_forward_hook(lambda module, args, out: out + 1)
    assert torch.equal(apply_linear(linear, states), linear(states))
    assert products == []
