"""Where two greedy answers part, and whether that is a tie."""

import math

import torch


TIE = 1e-4  # two logits closer than this are a tie: which one is the argmax depends on how the matmul was split
TIE_ULPS = 2  # and in half precision, two that are this many units in the last place apart


@torch.no_grad()
def first_difference(target, prompt_ids: list[int], ours: list[int], plain: list[int]) -> dict | None:
    """Where two answers part, and how far apart the logits of the two tokens are there; `None` for equal ones. Where
    one answer ends early there is one token only: the gap is that of the two best logits, and it is no tie."""
    if ours == plain:
        return None
    at = next((i for i, (a, b) in enumerate(zip(ours, plain)) if a != b), min(len(ours), len(plain)))
    logits = target(torch.tensor([prompt_ids + plain[:at]], device=target.device)).logits[0, -1].float()
    both = at < min(len(ours), len(plain))
    pair = logits[[plain[at], ours[at]]] if both else logits.topk(2).values
    gap = float((pair[0] - pair[1]).abs())
    tie = both and gap <= tolerance(float(pair.abs().max()), target.dtype)
    return {"at": at, "plain": plain[at : at + 1], "ours": ours[at : at + 1], "gap": gap, "tie": tie}


def tolerance(logit: float, dtype: torch.dtype) -> float:
    """How close another logit may be for the two to be a tie."""
    ulp = torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(max(logit, 1e-30)))
    return max(TIE, TIE_ULPS * ulp)
