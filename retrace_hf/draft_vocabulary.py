"""Drafting among the target's most frequent tokens, whose rows of its LM head are a part of the whole.

What is proposed under a draft vocabulary comes from it alone; what the text is made of does not: the target verifies
every proposal, and says any other token itself.

Source: FR-Spec, arXiv 2502.14856; EAGLE-3, arXiv 2503.01840 (`d2t`, `t2d`).
"""

from collections import Counter
from collections.abc import Iterable
from itertools import compress
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from .few_rows import apply_linear, is_plain_linear
from .target_head import device_of, draft_logits, head_logits, transform_logits


# By head and then by drafter, what the rows were gathered from and the rows. Both keys are weak, and the rows are a
# copy, so that neither model is kept alive.
_GATHERED: WeakKeyDictionary[nn.Module, WeakKeyDictionary[nn.Module, tuple[tuple, torch.Tensor, nn.Linear | None]]]
_GATHERED = WeakKeyDictionary()


class DraftVocabulary:
    """Some of a target's tokens, and its frozen LM head over them alone.

    A head that is more than its weight and bias (quantised, wrapped, offloaded, sharded) runs as a whole, and the
    tokens' columns are picked from what it gives.

    Args:
        target (`PreTrainedModel`): The target.
        token_ids (`torch.LongTensor` of shape `[n]`): Its tokens, strictly ascending.
        dtype (`torch.dtype`, *optional*): Of the logits; the head's own by default.

    Raises:
        ValueError: a token beyond the head's rows.
    """

    def __init__(self, target: PreTrainedModel, token_ids: torch.Tensor, dtype: torch.dtype | None = None):
        head = target.get_output_embeddings()
        self.target = target
        self.token_ids = token_ids.to(device_of(head, default=target.device))
        self._rows = _gather_rows(head, self.token_ids)
        if self._rows is not None and dtype is not None:
            self._rows.to(dtype)

    @classmethod
    def of(cls, drafter: nn.Module, target: PreTrainedModel) -> "DraftVocabulary | None":
        """That of a drafter, PEFT-wrapped or not, for its target; `None` where it drafts among all tokens. The rows
        are gathered once for both, and again when the head's weights or the tokens have changed."""
        if drafter.config.draft_vocab_size is None:
            return None
        head, token_ids = target.get_output_embeddings(), drafter.draft_token_ids
        state = (*_state_of(getattr(head, "weight", None)), *_state_of(token_ids), is_plain_linear(head))
        by_drafter = _GATHERED.setdefault(head, WeakKeyDictionary())
        known = by_drafter.get(drafter)
        if known is not None and known[0] == state:
            vocabulary = cls.__new__(cls)
            vocabulary.target, vocabulary.token_ids, vocabulary._rows = target, *known[1:]
            return vocabulary
        vocabulary = cls(target, token_ids)
        by_drafter[drafter] = (state, vocabulary.token_ids, vocabulary._rows)
        return vocabulary

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's logits of these tokens alone for states after its final norm, `[..., D]` to `[..., n]`."""
        return transform_logits(self.target, self._raw(hidden))

    def most_likely(self, hidden: torch.Tensor) -> torch.LongTensor:
        """The most likely of these tokens, `[..., D]` to `[...]`. A scale or softcap moves no argmax: none is
        applied."""
        places = self._raw(hidden).argmax(dim=-1)
        return self.token_ids.to(places.device)[places]

    def whole_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As `logits`, among all of the target's tokens: -inf for those that are not drafted, `[..., V]`."""
        if self._rows is None:
            whole = draft_logits(self.target, hidden)
            outside = torch.ones(whole.shape[-1], dtype=torch.bool, device=whole.device)
            outside[self.token_ids.to(whole.device)] = False
            return whole.masked_fill(outside, -torch.inf)
        logits = self.logits(hidden)
        size = self.target.get_output_embeddings().weight.shape[0]
        whole = logits.new_full((*logits.shape[:-1], size), -torch.inf)
        return whole.index_copy_(-1, self.token_ids, logits)

    def places(self, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Each label's place among these tokens, and whether it is one of them; 0 and less than n where it is not."""
        token_ids = self.token_ids.to(labels.device)
        places = torch.searchsorted(token_ids, labels).clamp(max=len(token_ids) - 1)
        return places, token_ids[places] == labels

    def _raw(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._rows is None:
            logits = head_logits(self.target, hidden)
            return logits[..., self.token_ids.to(logits.device)]
        weight = self._rows.weight
        return apply_linear(self._rows, hidden.to(device=weight.device, dtype=weight.dtype))


def _state_of(tensor) -> tuple:
    """What tells that a tensor was moved, cast, replaced or written to."""
    if not isinstance(tensor, torch.Tensor) or tensor.is_meta:
        return (None,)
    version = None if tensor.is_inference() else tensor._version
    return tensor.data_ptr(), tensor.device, tensor.dtype, version


def _gather_rows(head: nn.Module, token_ids: torch.Tensor) -> nn.Linear | None:
    """Some rows of a head as a head of their own, frozen; `None` where they cannot be had alone."""
    if not is_plain_linear(head) or head.weight.shape != (head.out_features, head.in_features):
        return None
    if int(token_ids[-1]) >= head.out_features:
        raise ValueError(
            f"The draft vocabulary holds token {int(token_ids[-1])} and the target's LM head has {head.out_features} "
            "rows; use the drafter that was trained for this target."
        )
    # generate() may run in inference mode, and what is kept from it must also serve in training.
    with torch.inference_mode(False), torch.no_grad():
        rows = nn.Linear(head.in_features, len(token_ids), bias=head.bias is not None, device="meta")
        rows.weight = nn.Parameter(head.weight.detach()[token_ids], requires_grad=False)
        if head.bias is not None:
            rows.bias = nn.Parameter(head.bias.detach()[token_ids], requires_grad=False)
    return rows


def check_token_ids(token_ids: torch.Tensor, vocab_size: int) -> None:
    """Raises a ValueError unless `draft_token_ids` is a table of different tokens of the target, ascending."""
    if token_ids.ndim != 1 or token_ids.dtype != torch.long or not len(token_ids):
        raise ValueError(
            f"draft_token_ids has shape {tuple(token_ids.shape)} and dtype {token_ids.dtype}; it must be token ids, "
            "int64 of shape [n] with n >= 1."
        )
    if not (token_ids[1:] > token_ids[:-1]).all():
        raise ValueError("draft_token_ids is not strictly ascending; name each token once, in the order of the ids.")
    first, last = int(token_ids[0]), int(token_ids[-1])
    if first < 0 or last >= vocab_size:
        raise ValueError(
            f"draft_token_ids goes from {first} to {last} and the target has {vocab_size} tokens (vocab_size); name "
            "tokens of the target."
        )


def as_token_ids(tokens: Iterable[int], vocab_size: int) -> torch.LongTensor:
    """Tokens in any order as `draft_token_ids`; raises as [`check_token_ids`]."""
    tokens = tokens.tolist() if isinstance(tokens, torch.Tensor) else tokens
    token_ids = torch.tensor(sorted({int(token) for token in tokens}), dtype=torch.long)
    check_token_ids(token_ids, vocab_size)
    return token_ids


def most_frequent_tokens(rows: Iterable[dict], size: int, always: Iterable[int] = ()) -> list[int]:
    """The tokens that stand most often in the answers of tokenised rows, for `draft_token_ids`.

    Args:
        rows (iterable of `dict`): A dataset of `retrace-hf prepare`: `input_ids` and `loss_mask` (1: an answer's).
        size (`int`): Tokens at most. Where fewer stand in the answers, those are all.
        always (iterable of `int`, *optional*): Tokens that are among them however rare, such as the end tokens.

    Returns:
        `list[int]`: ascending. Of tokens that stand as often the smaller id comes first.

    Raises:
        ValueError: no answer, or a `size` without room for `always`.
    """
    counts = Counter()
    for row in rows:
        counts.update(compress(row["input_ids"], row["loss_mask"]))
    if not counts:
        raise ValueError("No row has an answer token (column 'loss_mask'), so there are none to count.")
    chosen = {int(token) for token in always}
    if size < max(1, len(chosen)):
        raise ValueError(
            f"The draft vocabulary has {size} tokens; it needs at least {max(1, len(chosen))}, for its end tokens and "
            "what else is always drafted."
        )
    for token, _ in sorted(counts.items(), key=lambda entry: (-entry[1], entry[0])):
        if len(chosen) == size:
            break
        chosen.add(token)
    return sorted(chosen)
