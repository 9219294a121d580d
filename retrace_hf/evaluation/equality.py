"""Where two greedy answers part, and whether that is a tie."""

import torch


TIE = 1e-4  # two logits closer than this are a tie: which one is the argmax depends on how the matmul was split


@torch.no_grad()
def first_difference(target, prompt_ids: list[int], ours: list[int], plain: list[int]) -> dict | None:
    """Where two answers part, and how close plain's two best logits are there; `None` for equal ones."""
    if ours == plain:
        return None
    at = next((i for i, (a, b) in enumerate(zip(ours, plain)) if a != b), min(len(ours), len(plain)))
    logits = target(torch.tensor([prompt_ids + plain[:at]], device=target.device)).logits[0, -1]
    top = logits.topk(2).values
    gap = float(top[0] - top[1])
    return {"at": at, "plain": plain[at : at + 1], "ours": ours[at : at + 1], "gap": gap, "tie": gap <= TIE}
