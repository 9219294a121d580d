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


class SoftTargets(NamedTuple):
    """The target's likeliest next tokens; the mass of all others is what is missing to 1.

    tokens (`torch.LongTensor` of shape `[..., k]`): Their places among the logits.
    probabilities (`torch.Tensor` of shape `[..., k]`, float32): Of these tokens."""

    tokens: torch.Tensor
    probabilities: torch.Tensor


@torch.no_grad()
def soft_targets(
    states: torch.Tensor, logits_fn: Callable[[torch.Tensor], torch.Tensor], count: int, chunk_size: int = 1024
) -> SoftTargets:
    """The `count` likeliest tokens behind each of the target's last states `[n, D]` (all, where there are fewer)."""

    def of_chunk(rows):
        shares = logits_fn(rows).softmax(-1, dtype=torch.float32)
        return shares.topk(min(count, shares.shape[-1]), sorted=False)

    parts = [of_chunk(rows) for rows in states.split(chunk_size)]
    return SoftTargets(torch.cat([part.indices for part in parts]), torch.cat([part.values for part in parts]))


class _ChunkedLoss(torch.autograd.Function):
    """Losses by rows whose logits live only chunk by chunk: each chunk's gradient is taken at once.

    A row's loss depends on that row alone, so a chunk's gradient holds every row's own, and backward only scales it.
    """

    @staticmethod
    def forward(ctx, states, labels, logits_fn, chunk_size, teacher, soft_share):
        with_grad = ctx.needs_input_grad[0]
        parts, grads = [], []
        for start in range(0, len(states), chunk_size):
            chunk = slice(start, start + chunk_size)
            soft = SoftTargets(*(part[chunk] for part in teacher)) if soft_share > 0 else None
            losses, grad = _loss_of_chunk(states[chunk], labels[chunk], logits_fn, soft, soft_share, with_grad)
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


def _loss_of_chunk(states, labels, logits_fn, teacher: SoftTargets | None, soft_share: float, with_grad: bool):
    """Loss, cross entropy and argmax of a chunk's rows, and the loss's gradient. A function of its own, so that one
    chunk's logits are gone before the next's are made."""
    with torch.set_grad_enabled(with_grad):
        rows = states.detach().requires_grad_(with_grad)
        logits = logits_fn(rows)  # [chunk, V]
    scores = logits.detach()
    predictions = _argmax(scores)
    shares = scores.softmax(-1, dtype=torch.float32)
    at_label, at_best = (places[:, None] for places in (labels, predictions))
    # The best token's share is never small, so that its logarithm is exact.
    log_sum = scores.gather(1, at_best).float() - shares.gather(1, at_best).log()
    loss = cross_entropy = (log_sum - scores.gather(1, at_label).float()).squeeze(1)
    error = shares  # of hard labels: softmax - one-hot
    if teacher is not None:
        divergence = _soften(error, scores.gather(1, teacher.tokens).float() - log_sum, teacher, soft_share)
        loss = (1 - soft_share) * cross_entropy + soft_share * divergence
    losses = (loss, cross_entropy, predictions)
    if not with_grad:
        return losses, None
    error.scatter_add_(1, at_label, torch.full_like(loss, soft_share - 1)[:, None])
    return losses, torch.autograd.grad(logits, rows, error.to(logits.dtype))[0]


def _soften(error: torch.Tensor, log_shares: torch.Tensor, teacher: SoftTargets, soft_share: float) -> torch.Tensor:
    """Turns a softmax `[c, V]`, in place, into softmax - share * targets, the loss's gradient but for the hard labels'
    part. Returns KL(target || drafter) `[c]`.

    The target's mass on the tokens that are not named is taken to lie as the drafter's own does, so that there only
    the sum of it counts."""
    wanted = teacher.probabilities
    rest = (1 - wanted.sum(-1)).clamp(min=0)
    own_rest = (1 - log_shares.exp().sum(-1)).clamp(min=1e-6)  # below that it is rounding
    named = error.gather(1, teacher.tokens) - soft_share * wanted
    error.mul_((1 - soft_share * rest / own_rest)[:, None])
    error.scatter_(1, teacher.tokens, named)
    divergence = (torch.xlogy(wanted, wanted) - wanted * log_shares).sum(-1)
    return divergence + torch.xlogy(rest, rest / own_rest)


def _argmax(logits: torch.Tensor, width: int = 1024) -> torch.Tensor:
    """`logits.argmax(-1)` of `[c, V]`. On a CPU that reads bfloat16 a value at a time, where a maximum is read by
    vectors: the best stretch of `width` is found by its maximum, and only that one is searched."""
    size = logits.shape[-1]
    if logits.device.type != "cpu" or size <= width:
        return logits.argmax(-1)
    best = torch.stack([stretch.amax(-1) for stretch in logits.split(width, dim=-1)], dim=-1).argmax(-1)
    places = (best[:, None] * width + torch.arange(width)).clamp(max=size - 1)
    return places.gather(1, logits.gather(1, places).argmax(-1, keepdim=True)).squeeze(1)


def chunked_loss(
    states: torch.Tensor,
    labels: torch.Tensor,
    logits_fn: Callable[[torch.Tensor], torch.Tensor],
    chunk_size: int = 1024,
    teacher: SoftTargets | None = None,
    soft_share: float = 0.0,
) -> SlotLosses:
    """(1 - s) CE(label) + s KL(target || drafter) of each row under a frozen head, without an `[n, V]` tensor.

    Args:
        states (`torch.Tensor` of shape `[n, D]`): Last hidden states.
        labels (`torch.LongTensor` of shape `[n]`): Right tokens.
        logits_fn (`Callable`): `[c, D]` to logits `[c, V]`, row by row (the target's head).
        chunk_size (`int`): Rows whose logits exist at once.
        teacher ([`SoftTargets`] of shapes `[n, k]`, *optional*):
            What the target held likeliest where it scored the labels; needed where `soft_share` is not 0.
        soft_share (`float`, defaults to 0): s.

    Returns:
        [`SlotLosses`].
    """
    if soft_share > 0 and teacher is None:
        raise ValueError("soft_share needs a teacher, the target's likeliest tokens where it scored the labels.")
    return SlotLosses(*_ChunkedLoss.apply(states, labels, logits_fn, chunk_size, teacher, soft_share))


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
