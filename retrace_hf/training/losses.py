"""Losses over drafted blocks. Per-slot cross entropy first, then how much each slot counts."""

from collections.abc import Callable
from typing import NamedTuple

import torch


# Decay of the slot weights by block size, as DFlash was trained (arXiv 2602.06036).
_PUBLISHED_GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}


def default_gamma(block_size: int) -> float:
    """gamma of the slot decay: 7, 5, 4 for B = 16, 10, 8 as published, B / 2 elsewhere."""
    return _PUBLISHED_GAMMA.get(block_size, block_size / 2)


class SlotLosses(NamedTuple):
    """loss (`torch.Tensor` of shape `[n]`, float32, nats): Differentiable in the states.
    cross_entropy (`torch.Tensor` of shape `[n]`): Of the labels alone, detached; exp(-cross_entropy) is the label's
    probability.
    predictions (`torch.LongTensor` of shape `[n]`): The head's argmax."""

    loss: torch.Tensor
    cross_entropy: torch.Tensor
    predictions: torch.Tensor


class _ChunkedLoss(torch.autograd.Function):
    """Losses by rows whose logits live only chunk by chunk: each chunk's gradient is taken at once.

    A row's loss depends on that row alone, so a chunk's gradient holds every row's own, and backward only scales it.
    """

    @staticmethod
    def forward(ctx, states, labels, logits_fn, chunk_size, teacher_states, soft_share):
        with_grad = ctx.needs_input_grad[0]
        parts, grads = [], []
        for start in range(0, len(states), chunk_size):
            chunk = slice(start, start + chunk_size)
            teacher = teacher_states[chunk] if soft_share > 0 else None
            losses, grad = _loss_of_chunk(states[chunk], labels[chunk], logits_fn, teacher, soft_share, with_grad)
            parts.append(losses)
            if with_grad:
                grads.append(grad)
        if with_grad:
            ctx.save_for_backward(torch.cat(grads) if grads else torch.zeros_like(states))
        if not parts:
            none = states.new_zeros(0, dtype=torch.float32)
            parts = [(none, none, labels[:0])]
        loss, cross_entropy, predictions = (torch.cat(part) for part in zip(*parts))
        if not soft_share > 0:
            cross_entropy = loss.clone()  # one tensor cannot be both differentiable and not
        ctx.mark_non_differentiable(cross_entropy, predictions)
        return loss, cross_entropy, predictions

    @staticmethod
    def backward(ctx, grad_losses, *_):
        (grads,) = ctx.saved_tensors
        return grads * grad_losses[:, None].to(grads.dtype), None, None, None, None, None


def _loss_of_chunk(states, labels, logits_fn, teacher_states, soft_share: float, with_grad: bool):
    """Loss, cross entropy and argmax of a chunk's rows, and the loss's gradient. A function of its own, so that one
    chunk's logits are gone before the next's are made."""
    with torch.set_grad_enabled(with_grad):
        rows = states.detach().requires_grad_(with_grad)
        logits = logits_fn(rows)  # [chunk, V]
    scores = logits.detach().float()
    # A copy where the head returned float32 itself: its output must stay as autograd saved it.
    log_probs = scores - scores.logsumexp(-1, keepdim=True)
    loss = cross_entropy = -log_probs.gather(1, labels[:, None]).squeeze(1)
    teacher = None
    if teacher_states is not None:
        wanted = logits_fn(teacher_states).float().log_softmax(-1)
        teacher = wanted.exp()
        divergence = wanted.sub_(log_probs).mul_(teacher).sum(-1)
        loss = (1 - soft_share) * cross_entropy + soft_share * divergence
    losses = (loss, cross_entropy, scores.argmax(-1))
    if not with_grad:
        return losses, None
    # softmax - (1 - share) one-hot - share * teacher, in place of the log-probabilities
    error = log_probs.exp_()
    error.scatter_add_(1, labels[:, None], torch.full_like(loss, soft_share - 1)[:, None])
    if teacher is not None:
        error.sub_(teacher, alpha=soft_share)
    return losses, torch.autograd.grad(logits, rows, error.to(logits.dtype))[0]


def chunked_loss(
    states: torch.Tensor,
    labels: torch.Tensor,
    logits_fn: Callable[[torch.Tensor], torch.Tensor],
    chunk_size: int = 1024,
    teacher_states: torch.Tensor | None = None,
    soft_share: float = 0.0,
) -> SlotLosses:
    """(1 - s) CE(label) + s KL(target || drafter) of each row under a frozen head, without an `[n, V]` tensor.

    Args:
        states (`torch.Tensor` of shape `[n, D]`): Last hidden states.
        labels (`torch.LongTensor` of shape `[n]`): Right tokens.
        logits_fn (`Callable`): `[c, D]` to logits `[c, V]`, row by row (the target's head).
        chunk_size (`int`): Rows whose logits exist at once.
        teacher_states (`torch.Tensor` of shape `[n, D]`, *optional*):
            The target's last hidden states that scored the labels; needed where `soft_share` is not 0.
        soft_share (`float`, defaults to 0): s.

    Returns:
        [`SlotLosses`].
    """
    if soft_share > 0 and teacher_states is None:
        raise ValueError("soft_share needs teacher_states, the target's last hidden states that scored the labels.")
    return SlotLosses(*_ChunkedLoss.apply(states, labels, logits_fn, chunk_size, teacher_states, soft_share))


def decay_weights(supervised: torch.Tensor, gamma: float) -> torch.Tensor:
    """w_k = exp(-(k - 1) / gamma) where slot k is supervised, else 0.

    Args:
        supervised (`torch.BoolTensor` of shape `[..., B - 1]`): Slots 1..B-1 with a label.
        gamma (`float`): Decay in slots.

    Source: DFlash, arXiv 2602.06036.
    """
    slots = torch.arange(supervised.shape[-1], device=supervised.device)
    return supervised * torch.exp(-slots / gamma)


def dpace_weights(losses: torch.Tensor, supervised: torch.Tensor, alpha: float = 0.5) -> torch.Tensor:
    """w_j = sum_{k >= j} prod_{i <= k} q~_i with q~ = (1 - alpha) q + alpha, detached: how much slot j's being right
    lengthens the accepted prefix.

    Args:
        losses (`torch.Tensor` of shape `[..., B - 1]`): Cross entropy by slot, so that q = exp(-loss).
        supervised (`torch.BoolTensor` of shape `[..., B - 1]`): Slots with a label; the others count for nothing.
        alpha (`float`): 0.3 to 0.7 is stable, 0 collapses.

    Source: D-PACE, arXiv 2605.18810.
    """
    confidence = (1 - alpha) * torch.exp(-losses.detach()) + alpha
    reach = (confidence * supervised).cumprod(dim=-1)
    return reach.flip(-1).cumsum(-1).flip(-1) * supervised
