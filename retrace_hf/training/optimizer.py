"""Muon for the matrices, AdamW for the rest, as one optimizer that Trainer can schedule, save and resume."""

import torch
from torch import nn


class MuonWithAdamW(torch.optim.Optimizer):
    """Groups marked `muon` are stepped by [`torch.optim.Muon`], the others by [`torch.optim.AdamW`].

    Args:
        matrices (`list[nn.Parameter]`): 2-D parameters.
        others (`list[dict]`): AdamW's parameter groups.
        lr, weight_decay (`float`): Of the matrices; `lr` of the others too.
        betas (`tuple[float, float]`), eps (`float`): AdamW's.

    Source: Muon, Jordan et al. 2024; the update's scale after Moonlight, arXiv 2502.16982.
    """

    def __init__(self, matrices, others, lr: float, weight_decay: float, betas=(0.9, 0.999), eps: float = 1e-8):
        self._parts = []  # either may have nothing to train: a LoRA has no norms
        if matrices:
            group = {"params": matrices, "muon": True}
            muon = torch.optim.Muon([group], lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
            self._parts.append((muon, True))
        if others:
            adamw = torch.optim.AdamW([{**g, "muon": False} for g in others], lr=lr, betas=betas, eps=eps)
            self._parts.append((adamw, False))
        super().__init__([group for optimizer, _ in self._parts for group in optimizer.param_groups], {})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer, is_muon in self._parts:
            # Read anew at every step: loading a checkpoint replaces both.
            optimizer.param_groups = [group for group in self.param_groups if group["muon"] == is_muon]
            optimizer.state = self.state
            optimizer.step()
        return loss


def is_mixture(name: str) -> bool:
    """Whether a parameter is the softmax's logits of `context_fusion="layerwise"`."""
    return "layer_fusion." in name


def muon_with_adamw(model: nn.Module, decayed: set[str], args) -> MuonWithAdamW:
    """The optimizer for a drafter: every trainable matrix by Muon, the rest by AdamW with decay where `decayed`.

    Embeddings and single rows count as no matrices: what Muon makes of them has a size that their gradients do not.
    Neither do DFlare's mixture weights, which are logits, a row for each layer.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    matrices = {
        id(p) for name, p in named if p.ndim == 2 and len(p) > 1 and id(p) not in tables and not is_mixture(name)
    }
    others = [
        {"params": chosen, "weight_decay": decay}
        for chosen, decay in (
            ([p for name, p in named if id(p) not in matrices and name in decayed], args.weight_decay),
            ([p for name, p in named if id(p) not in matrices and name not in decayed], 0.0),
        )
        if chosen
    ]
    return MuonWithAdamW(
        [p for _, p in named if id(p) in matrices],
        others,
        lr=args.learning_rate,
        weight_decay=args.weight_decay,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
    )
