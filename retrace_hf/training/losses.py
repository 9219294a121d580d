"""Losses over drafted blocks. Per-slot cross entropy first, then how much each slot counts."""

from collections.abc import Callable

import torch


# Decay of the slot weights by block size, as DFlash was trained (arXiv 2602.06036).
_PUBLISHED_GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}


def default_gamma(block_size: int) -> float:
    """gamma of the slot decay: 7, 5, 4 for B = 16, 10, 8 as published, B / 2 elsewhere."""
    return _PUBLISHED_GAMMA.get(block_size, block_size / 2)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Cross entropy by rows whose logits live only chunk by chunk: each chunk's gradient is taken at once.

    A row's loss depends on that row alone, so a chunk's gradient holds every row's own, and backward only scales it.
    """

    @staticmethod
    def forward(ctx, states, labels, logits_fn, chunk_size):
        with_grad = ctx.needs_input_grad[0]
        losses, predictions, grads = [], [], []
        for rows, row_labels in zip(states.split(chunk_size), labels.split(chunk_size)):
            with torch.set_grad_enabled(with_grad):
                rows = rows.detach().requires_grad_(with_grad)
                logits = logits_fn(rows)  # [chunk, V]
            loss, best, grad_logits = _softmax_in_place(logits.detach().float(), row_labels)
            losses.append(loss)
            predictions.append(best)
            if with_grad:
                grads.append(torch.autograd.grad(logits, rows, grad_logits.to(logits.dtype))[0])
        if with_grad:
            ctx.save_for_backward(torch.cat(grads))
        predictions = torch.cat(predictions)
        ctx.mark_non_differentiable(predictions)
        return torch.cat(losses), predictions

    @staticmethod
    def backward(ctx, grad_losses, _):
        (grads,) = ctx.saved_tensors
        return grads * grad_losses[:, None].to(grads.dtype), None, None, None


def _softmax_in_place(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss `[c]`, argmax `[c]` and the loss's gradient `[c, V]`, softmax - one-hot, in few passes over the logits."""
    labels = labels[:, None]
    top, best = logits.max(dim=-1, keepdim=True)
    right = logits.gather(1, labels) - top
    # A copy where the head returned float32 itself: its output must stay as autograd saved it.
    weights = (logits - top).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    weights.div_(total).scatter_add_(1, labels, -torch.ones_like(right))
    return (total.log() - right).squeeze(1), best.squeeze(1), weights


def chunked_cross_entropy(
    states: torch.Tensor,
    labels: torch.Tensor,
    logits_fn: Callable[[torch.Tensor], torch.Tensor],
    chunk_size: int = 1024,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy of each row under a frozen head, and the head's argmax, without an `[n, V]` tensor.

    Args:
        states (`torch.Tensor` of shape `[n, D]`): Last hidden states.
        labels (`torch.LongTensor` of shape `[n]`): Right tokens.
        logits_fn (`Callable`): `[c, D]` to logits `[c, V]`, row by row (the target's head).
        chunk_size (`int`): Rows whose logits exist at once.

    Returns:
        `tuple(torch.Tensor, torch.LongTensor)`: losses `[n]` in float32 (nats), differentiable in `states`; argmax
        `[n]`.
    """
    return _ChunkedCrossEntropy.apply(states, labels, logits_fn, chunk_size)


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


class SeenTokens:
    """A part of the vocabulary: those tokens' rows of a frozen head, and their places in it.

    Args:
        head (`torch.nn.Linear`): The target's LM head, `[V, D]`.
        token_ids (`Iterable[int]`): Tokens to keep.
    """

    def __init__(self, head: torch.nn.Linear, token_ids):
        self.token_ids = torch.tensor(sorted(set(token_ids)), device=head.weight.device)  # [n]
        self.weight = head.weight.detach()[self.token_ids]
        self.bias = None if head.bias is None else head.bias.detach()[self.token_ids]

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """`[c, D]` to logits `[c, n]`."""
        return torch.nn.functional.linear(rows.to(self.weight.dtype), self.weight, self.bias)

    def places(self, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Each label's place among the kept tokens, and whether it is one."""
        places = torch.searchsorted(self.token_ids, labels).clamp(max=len(self.token_ids) - 1)
        return places, self.token_ids[places] == labels
