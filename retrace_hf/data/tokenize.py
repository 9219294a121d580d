"""
Responses of the target to token rows with a loss mask.

The prompt goes through the tokenizer's chat template; the answer does not: the target's own tokens are used as they
are. Text tokenised anew may split differently from what the target generated, and the drafter has to predict what the
target generates.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from .prompts import render_prompt
from .responses import check_response, read_responses


logger = logging.getLogger(__name__)

# The first token of an answer comes from the target's prefill, never from a drafter: it is the first anchor. A row
# teaches something from its second learnt token on.
MIN_LEARNT_TOKENS = 2


def tokenize_response(
    row: dict,
    tokenizer,
    max_length: int | None = None,
    end_token_id: int | None = None,
    where: str = "response",
    chat_template_kwargs: dict | None = None,
) -> dict:
    """
    One response of the target to one row of tokens.

    Args:
        row (`dict`): `{"id", "source", "messages", "response_ids", "finish"}`; the last message is the answer.
        tokenizer (`PreTrainedTokenizerBase`): the target's, with a chat template.
        max_length (`int`, *optional*): tokens kept, counted from the start. What is cut has no end token.
        end_token_id (`int`, *optional*, defaults to `tokenizer.eos_token_id`):
            Appended when `finish` is `"stop"`: there the target ended by itself. Never when it is `"length"`.
        where (`str`, *optional*): file and line, for error messages.
        chat_template_kwargs (`dict`, *optional*): passed to the chat template.

    Returns:
        `dict`: `input_ids` (`list[int]`), `loss_mask` (`list[int]`, 1 on the answer and its end token), `source`,
        `id`. Decoding the masked tokens gives the answer and its end token, unless `max_length` cut them.

    Raises:
        `ValueError`: a bad row, a tokenizer without an end token, or a tokenizer that does not decode `response_ids`
        to the answer's text, which is then another model's.
    """
    check_response(row, where)
    if "input_ids" in row:
        return _token_row(row, len(tokenizer), max_length, where)
    if end_token_id is None:
        end_token_id = tokenizer.eos_token_id
    if end_token_id is None:
        raise ValueError("The tokenizer has no eos token; pass end_token_id, the id that ends the target's answers.")
    response_ids = row["response_ids"]
    answer = row["messages"][-1]["content"]
    if max(response_ids, default=0) >= len(tokenizer) or tokenizer.decode(response_ids) != answer:
        raise ValueError(
            f"{where}, column 'response_ids': the tokenizer {tokenizer.name_or_path!r} does not decode these tokens "
            "to the answer in column 'messages'. Use the tokenizer of the target that wrote the responses, or "
            "regenerate them with your target (retrace_hf.data.responses.regenerate)."
        )
    prompt_ids = render_prompt(tokenizer, row["messages"][:-1], **(chat_template_kwargs or {}))
    learnt_ids = response_ids + [end_token_id] if row["finish"] == "stop" else response_ids
    return {
        "input_ids": (prompt_ids + learnt_ids)[:max_length],
        "loss_mask": ([0] * len(prompt_ids) + [1] * len(learnt_ids))[:max_length],
        "source": row["source"],
        "id": row["id"],
    }


def _token_row(row: dict, vocab_size: int, max_length: int | None, where: str) -> dict:
    if max(row["input_ids"]) >= vocab_size:
        raise ValueError(f"{where}, column 'input_ids': token {max(row['input_ids'])} is beyond the vocabulary.")
    mask = [0] * len(row["input_ids"])
    for start, end in row["answers"]:
        mask[start:end] = [1] * (end - start)
    ids = row["input_ids"][:max_length]
    return {"input_ids": ids, "loss_mask": mask[:max_length], "source": row["source"], "id": row["id"]}


def tokenize_responses(
    paths: str | Path | Sequence[str | Path],
    tokenizer,
    max_length: int | None = None,
    end_token_id: int | None = None,
    limit: int | None = None,
    chat_template_kwargs: dict | None = None,
    counts: Counter | None = None,
):
    """
    Files of responses to a dataset of token rows, in the order of the files.

    Args:
        paths (`str`, `Path` or a sequence of them): `.jsonl` or `.jsonl.gz` files of responses.
        tokenizer (`PreTrainedTokenizerBase`): the target's, with a chat template.
        max_length (`int`, *optional*): tokens kept of a row, at least 1.
        end_token_id (`int`, *optional*, defaults to `tokenizer.eos_token_id`): the token that ends an answer.
        limit (`int`, *optional*): rows read at most.
        chat_template_kwargs (`dict`, *optional*): passed to the chat template.
        counts (`collections.Counter`, *optional*):
            Filled with `rows`, `dropped` (nothing to learn), `truncated` (cut at `max_length`), `tokens` and
            `learnt_tokens`.

    Returns:
        `datasets.Dataset`: columns `input_ids`, `loss_mask`, `source`, `id`; see [`tokenize_response`]. Rows with
        nothing to learn (fewer than two learnt tokens: the first comes from the target itself) are dropped; their
        number is logged.

    Raises:
        `ValueError`: a bad row, named by file and line, or no row that teaches anything.
    """
    from datasets import Dataset

    if max_length is not None and max_length < 1:
        raise ValueError(f"max_length must be at least 1, got {max_length}.")
    paths = [paths] if isinstance(paths, (str, Path)) else list(paths)
    counts = Counter() if counts is None else counts
    rows = []
    for path in paths:
        for line_number, response in read_responses(path, with_line_numbers=True):
            if limit is not None and counts["rows"] >= limit:
                break
            row = tokenize_response(
                response,
                tokenizer,
                end_token_id=end_token_id,
                where=f"{path}, line {line_number}",
                chat_template_kwargs=chat_template_kwargs,
            )
            counts["rows"] += 1
            if max_length is not None and len(row["input_ids"]) > max_length:
                counts["truncated"] += 1
                row["input_ids"] = row["input_ids"][:max_length]
                row["loss_mask"] = row["loss_mask"][:max_length]
            if sum(row["loss_mask"]) < MIN_LEARNT_TOKENS:
                counts["dropped"] += 1
                continue
            counts["tokens"] += len(row["input_ids"])
            counts["learnt_tokens"] += sum(row["loss_mask"])
            rows.append(row)

    if not rows:
        raise ValueError(
            f"None of the {counts['rows']} rows of {', '.join(map(str, paths))} has anything to learn: every answer "
            f"is empty or cut away by max_length={max_length}. Raise max_length or give other responses."
        )
    if counts["dropped"]:
        logger.warning("Dropped %d of %d rows with nothing to learn.", counts["dropped"], counts["rows"])
    return Dataset.from_list(rows)
