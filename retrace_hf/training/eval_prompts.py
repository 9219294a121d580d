"""Acceptance while training, the real one: held-out prompts that are drafted with `generate()`."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from ..data.prompts import render_prompt
from ..generation import AcceptanceStats, record_acceptance


class EvalPrompt(NamedTuple):
    """ids (`list[int]`): The prompt as the target sees it. kind (`str`, *optional*): What tau is told apart by."""

    ids: list[int]
    kind: str | None


def read_eval_rows(rows: Iterable[dict], tokenizer=None) -> list[EvalPrompt]:
    """Held-out prompts, rendered.

    Args:
        rows (iterable of `dict`):
            Each with `prompt_ids` (tokens), `messages` (a conversation up to its last question) or `prompt` (one
            question); with `source`, its kind, where tau is wanted by kind.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): The target's, for rows without `prompt_ids`.

    Raises:
        ValueError: no row, or a row without a prompt or without a tokenizer to render it.
    """
    prompts = []
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise ValueError(f"Row {number} of eval_prompts is a {type(row).__name__}; give {{'prompt': text}}.")
        ids = row.get("prompt_ids")
        if ids is None:
            messages = row.get("messages")
            if messages is None and row.get("prompt"):
                messages = [{"role": "user", "content": row["prompt"]}]
            if not messages:
                raise ValueError(
                    f"Row {number} of eval_prompts has the columns {sorted(row)}; it needs 'prompt' (text), "
                    "'messages' or 'prompt_ids' (tokens), not empty."
                )
            if tokenizer is None:
                raise ValueError(
                    "eval_prompts holds text and there is no tokenizer to render it; pass the target's as "
                    "processing_class, or rows with 'prompt_ids'."
                )
            ids = render_prompt(tokenizer, messages)
        if not len(ids):
            raise ValueError(f"Row {number} of eval_prompts is an empty prompt; leave it out.")
        prompts.append(EvalPrompt(list(ids), row.get("source")))
    if not prompts:
        raise ValueError("eval_prompts has no rows; leave it out, or give at least one prompt.")
    return prompts


def first_of_each_kind(prompts: list[EvalPrompt], limit: int) -> list[EvalPrompt]:
    """At most `limit` prompts: the first of every kind, then the second of every kind, and so on."""
    by_kind = defaultdict(list)
    for prompt in prompts:
        by_kind[prompt.kind].append(prompt)
    turns = range(max(map(len, by_kind.values()), default=0))
    return [of_kind[turn] for turn in turns for of_kind in by_kind.values() if turn < len(of_kind)][:limit]


def draft_prompts(
    target: PreTrainedModel, drafter, prompts: list[EvalPrompt], max_new_tokens: int
) -> dict[str | None, AcceptanceStats]:
    """Greedy answers of the target, drafted; the rounds by kind."""
    device = target.get_input_embeddings().weight.device
    stats = defaultdict(list)
    for prompt in prompts:
        ids = torch.tensor([prompt.ids], device=device)
        with record_acceptance() as rounds:
            target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                assistant_model=drafter,
                max_new_tokens=max_new_tokens,
                do_sample=False,
                use_cache=True,
            )
        stats[prompt.kind].append(rounds)
    return {kind: AcceptanceStats.pooled(of_kind) for kind, of_kind in stats.items()}
