"""Axis 2: what was just rejected, and how it enters the next block (ReTrace, arXiv 2608.29748).

Round t drafts slots 1..B-1, P of them are verified, A are accepted; r = A + 1 is the first rejected slot, and the
correction token there is the next anchor. Slot j of the next block stands at slot r + j of the old one.
"""

from typing import NamedTuple

import torch
from torch import nn

from .configuration_retrace import RetraceConfig


class RejectedTrajectory(NamedTuple):
    """The rejected suffix of a round, aligned to the next block: index j is slot j, index 0 is never valid.

    draft (`torch.Tensor` of shape `[b, Q, D]`): m, the drafter's states after its final norm.
    target (`torch.Tensor` of shape `[b, Q, D]`): u, the target's states after its final norm.
    valid (`torch.BoolTensor` of shape `[b, Q]`): Slots with a signal. What stands elsewhere is never read.
    """

    draft: torch.Tensor
    target: torch.Tensor
    valid: torch.Tensor


def align_trajectory(
    draft_states: torch.Tensor,
    target_states: torch.Tensor,
    first_rejected: int | torch.Tensor,
    num_verified: int | torch.Tensor,
) -> RejectedTrajectory:
    """Aligns a rejected suffix to the next block by absolute position (a shift left by r).

    Slot j of the next block gets `m_j = draft_states[r + j]` and `u_j = target_states[r + j - 1]` for
    1 <= j <= P - r. u_1 is the target's state on the rejected token itself. No draft state of a slot <= r and no
    target state of a slot < r enters.

    Args:
        draft_states (`torch.Tensor` of shape `[b, B, D]`):
            The drafter's last hidden states of the round; row i is slot i.
        target_states (`torch.Tensor` of shape `[b, n, D]`, P < n):
            The target's last hidden states of the verification pass; row 0 is the anchor, row i the draft of slot i.
        first_rejected (`int` or `torch.Tensor` of shape `[b]`):
            r, accepted + 1.
        num_verified (`int` or `torch.Tensor` of shape `[b]`):
            P, proposals that were really verified: B - 1 unless the length or a stop cut them.

    Returns:
        [`RejectedTrajectory`] with Q = B, detached, on the states' device. Nothing is copied to the host.

    Example: B = 8, P = 7, two accepted, so r = 3. Slots 1 to 4 get draft rows 4 to 7 and target rows 3 to 6; slots
    5 to 7 have no signal.

    ```python
    >>> rows = torch.arange(8.0).view(1, 8, 1)
    >>> t = align_trajectory(rows, rows, first_rejected=3, num_verified=7)
    >>> t.valid[0].tolist()
    [False, True, True, True, True, False, False, False]
    >>> t.draft[0, 1:5, 0].tolist(), t.target[0, 1:5, 0].tolist()
    ([4.0, 5.0, 6.0, 7.0], [3.0, 4.0, 5.0, 6.0])

    ```

    Source: ReTrace, section on alignment; here P replaces the paper's count of candidates.
    """
    batch_size, block_size, _ = draft_states.shape
    slots = torch.arange(block_size, device=draft_states.device)[None]  # [1, B]
    if isinstance(first_rejected, torch.Tensor):
        first_rejected = first_rejected[:, None]  # [b, 1]
    if isinstance(num_verified, torch.Tensor):
        num_verified = num_verified[:, None]
    draft_rows = slots + first_rejected
    valid = ((slots >= 1) & (draft_rows <= num_verified)).expand(batch_size, block_size)
    return RejectedTrajectory(
        draft=_take_rows(draft_states.detach(), draft_rows, batch_size),
        target=_take_rows(target_states.detach(), draft_rows - 1, batch_size),
        valid=valid,
    )


def _take_rows(states: torch.Tensor, rows: torch.Tensor, batch_size: int) -> torch.Tensor:
    """`states[b, rows[b, j]]`; rows outside are clamped, their slots are not valid."""
    rows = rows.clamp(0, states.shape[1] - 1).expand(batch_size, -1)
    return states.gather(1, rows[..., None].expand(-1, -1, states.shape[-1]))


class TrajectoryFusion(nn.Module):
    """Admits an aligned trajectory into the slots' input embeddings.

        c_j = Wc [m_j ; u_j],  r_j = m_j + beta * c_j                       (corrected; gated has r_j = m_j)
        e~_j = e_j + (Wv r_j) * sigmoid(Wg [e_j ; r_j])

    Slot 0 and slots without signal keep e_j exactly. Wv starts at zero, so an untrained ReTrace is its DFlash bit for
    bit. Wc starts as [0 ; I], so that r_j goes from m_j to m_j + u_j as beta rises: both states live where the LM
    head reads (the paper leaves Wc's start open). `beta` is 1 at inference; the trainer raises it
    from 0 in the first steps. It is never saved.

    Source: ReTrace, arXiv 2608.29748, correction and gated residual fusion.
    """

    def __init__(self, config: RetraceConfig):
        super().__init__()
        size = config.hidden_size
        self.beta = 1.0
        self.correction = nn.Linear(2 * size, size, bias=False) if config.conditioning == "corrected" else None
        self.value = nn.Linear(size, size, bias=False)
        self.value.start = torch.zeros_like  # `start` is read by RetracePreTrainedModel._init_weights
        if self.correction is not None:
            self.correction.start = _only_second_half
        self.gate = nn.Linear(2 * size, size, bias=False)

    def forward(self, embeds: torch.Tensor, trajectory: RejectedTrajectory, corrected: bool) -> torch.Tensor:
        """
        Args:
            embeds (`torch.Tensor` of shape `[b, Q, D]`): Input embeddings e of the slots.
            trajectory ([`RejectedTrajectory`]): Aligned signal, each of `[b, Q, ...]`.
            corrected (`bool`): Whether target states correct the draft states.

        Returns:
            `torch.Tensor` of shape `[b, Q, D]`.
        """
        valid = trajectory.valid[..., None]
        # Selected, not multiplied: a NaN in a slot without signal must reach neither values nor gradients.
        rejected = trajectory.draft.to(embeds.dtype).masked_fill(~valid, 0.0)
        if corrected:
            target = trajectory.target.to(embeds.dtype).masked_fill(~valid, 0.0)
            beta = self.beta if self.training else 1.0
            rejected = rejected + beta * self.correction(torch.cat([rejected, target], dim=-1))
        admitted = self.value(rejected) * torch.sigmoid(self.gate(torch.cat([embeds, rejected], dim=-1)))
        return torch.where(valid, embeds + admitted, embeds)


def _only_second_half(weight: torch.Tensor) -> torch.Tensor:
    """[0 ; I], shaped as `weight` (`[D, 2 * D]`)."""
    identity = torch.eye(len(weight), dtype=weight.dtype, device=weight.device)
    return torch.cat([torch.zeros_like(identity), identity], dim=1)


def overwrite_embeds(embeds: torch.Tensor, trajectory: RejectedTrajectory) -> torch.Tensor:
    """The ablation without parameters: `e~_j = m_j` where there is a signal. Shapes as [`TrajectoryFusion`]."""
    return torch.where(trajectory.valid[..., None], trajectory.draft.to(embeds.dtype), embeds)
