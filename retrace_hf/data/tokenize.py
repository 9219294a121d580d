"""
Responses of the target to token rows with a loss mask.

The prompt goes through the tokenizer's chat template; the answer does not: the target's own tokens are used as they
are. Text tokenised anew may split differently from what the target generated, and the drafter has to predict what the
target generates.

Answers before the last stand in the prompt as the template renders them. They are learnt where this is what the target
read and wrote in their turn: the prompt of that turn, then its own tokens. A template that drops the thinking of
earlier turns, or trims them, leaves fewer answers to learn.
"""

import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from .prompts import check_chat_template, render_prompt
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
        `dict`: `input_ids` (`list[int]`), `loss_mask` (`list[int]`, 1 on the answers and their end tokens), `source`,
        `id`. Decoding the masked tokens gives the answers and their end tokens, unless `max_length` cut them. Of
        answers before the last, those count whose tokens the row has in `earlier` and the template leaves as they are.

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
    kwargs = chat_template_kwargs or {}
    prompt_ids = render_prompt(tokenizer, row["messages"][:-1], **kwargs)
    learnt_ids = _with_end(row, end_token_id)
    mask = [0] * len(prompt_ids) + [1] * len(learnt_ids)
    turns = [i for i, message in enumerate(row["messages"][:-1]) if message["role"] == "assistant"]
    for turn, answer in zip(turns, row.get("earlier", [])):
        before = render_prompt(tokenizer, row["messages"][:turn], **kwargs)
        start, end = len(before), len(before) + len(answer["response_ids"])
        if prompt_ids[:end] != before + answer["response_ids"]:
            continue
        # The template may end it with another token than the target did, or the target not at all.
        ended = _with_end(answer, end_token_id)[end - start :] == prompt_ids[end : end + 1]
        mask[start : end + ended] = [1] * (end + ended - start)
    return {
        "input_ids": (prompt_ids + learnt_ids)[:max_length],
        "loss_mask": mask[:max_length],
        "source": row["source"],
        "id": row["id"],
    }


def _with_end(answer: dict, end_token_id: int) -> list[int]:
    return answer["response_ids"] + ([answer.get("end_id", end_token_id)] if answer["finish"] == "stop" else [])


def tokenize_conversation(
    messages: Sequence[dict], tokenizer, chat_template_kwargs: dict | None = None
) -> tuple[list[int], list[int]]:
    """
    A whole conversation, answers included, to tokens and loss mask, where the tokens that the target generated are not
    known. What is learnt comes from the generation tags of the chat template (`{% generation %}`), else from
    rendering the conversation turn by turn.

    Args:
        messages (sequence of `dict`): `{"role": str, "content": str}`, the last of them an answer.
        tokenizer (`PreTrainedTokenizerBase`): the target's, with a chat template.
        chat_template_kwargs (`dict`, *optional*): passed to the chat template.

    Returns:
        `tuple[list[int], list[int]]`: `input_ids`, up to the end of the last answer, and `loss_mask`, 1 on the answers
        and the token that the template ends them with. Answers that the template changes are not learnt.
    """
    check_chat_template(tokenizer)
    kwargs = chat_template_kwargs or {}
    find = _tagged_answers if has_generation_tags(tokenizer) else _answers_by_prefix
    ids, spans = find(list(messages), tokenizer, kwargs)
    mask = [0] * len(ids)
    for start, end in spans:
        mask[start:end] = [1] * (end - start)
    return ids, mask


def has_generation_tags(tokenizer) -> bool:
    """Whether the chat template says itself what the assistant writes."""
    return re.search(r"\{%-?\s*generation\s*-?%\}", tokenizer.get_chat_template()) is not None


def _tagged_answers(messages: list[dict], tokenizer, kwargs: dict) -> tuple[list[int], list[tuple[int, int]]]:
    encoded = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **kwargs
    )
    ids, mask = list(encoded["input_ids"]), list(encoded["assistant_masks"])
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    tagged = spans_of(mask)
    if len(tagged) != len(answers):
        return ids, []  # two answers in one span, or one that the template drops: nobody can say which is which
    stops = _end_tokens(tokenizer)
    kept = []
    for (start, end), answer in zip(tagged, answers):
        # Some templates close the tag before the end token, others behind the line break after it.
        stop = next((i for i in range(start, min(end + 1, len(ids))) if ids[i] in stops), None)
        last = end if stop is None else stop
        if tokenizer.decode(ids[start:last]) == answer:
            kept.append((start, last if stop is None else stop + 1))
    return (ids[: kept[-1][1]] if kept else ids), kept


def _answers_by_prefix(messages: list[dict], tokenizer, kwargs: dict) -> tuple[list[int], list[tuple[int, int]]]:
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    stops = _end_tokens(tokenizer)
    parts = []
    for turn in turns:
        before = tokenizer.apply_chat_template(messages[:turn], add_generation_prompt=True, tokenize=False, **kwargs)
        whole = tokenizer.apply_chat_template(messages[: turn + 1], tokenize=False, **kwargs)
        answer = messages[turn]["content"]
        if not whole.startswith(before + answer):
            parts.append(None)
            continue
        # The prompt and the answer meet as in decoding: each is tokenised by itself.
        ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
        after = tokenizer(whole[len(before + answer) :], add_special_tokens=False)["input_ids"]
        ids += after[:1] if after and after[0] in stops else []
        parts.append((render_prompt(tokenizer, messages[:turn], **kwargs), ids))
    prompt_ids = render_prompt(tokenizer, messages[: turns[-1]], **kwargs)
    full = prompt_ids if parts[-1] is None else prompt_ids + parts[-1][1]
    spans = []
    for before, ids in filter(None, parts):
        end = len(before) + len(ids)
        if full[:end] == before + ids:
            spans.append((len(before), end))
    return full, spans


def _end_tokens(tokenizer) -> set[int]:
    """Special tokens: a template ends an answer with one of them, not always the eos token."""
    added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return {*added, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])}


def spans_of(mask: Sequence[int]) -> list[tuple[int, int]]:
    """Where the ones of a mask stand: pairs of start and end, end excluded."""
    edges = [i for i in range(len(mask) + 1) if (i < len(mask) and mask[i]) != (i > 0 and mask[i - 1])]
    return list(zip(edges[::2], edges[1::2]))


def tokenizer_digest(tokenizer) -> str:
    """Hex digest of a vocabulary: token ids of one tokenizer mean the same to another with the same digest."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def _check_given_once(paths: Sequence[str | Path]):
    """`retrace-hf prepare` writes each row twice, as text and as tokens; a pattern that is too wide names both."""
    given = [Path(path).absolute() for path in paths]
    twice = [path for path, count in Counter(given).items() if count > 1]
    twice += [p for p in given if p.name.startswith("tokens_") and p.with_name(f"responses_{p.name[7:]}") in given]
    if twice:
        raise ValueError(
            f"The rows of {twice[0]} are given twice; give each file once, and of retrace-hf prepare's files the "
            "tokens_*.jsonl.gz alone."
        )


def _check_same_tokenizer(path: str | Path, tokenizer):
    """Shards of `retrace-hf prepare` have a note beside them of the tokenizer they were made with."""
    note = Path(path).parent / "prepare.json"
    if not note.is_file():
        return
    try:
        noted = json.loads(note.read_text(encoding="utf-8"))
        made_with, name = noted["settings"]["tokenizer_sha256"], noted["target"]
    except (ValueError, KeyError, TypeError):
        return  # somebody else's file of the same name
    if made_with != tokenizer_digest(tokenizer):
        raise ValueError(
            f"{path} was made with the tokenizer of {name}, which is another than {tokenizer.name_or_path!r}. Train "
            "on data of the same target: retrace-hf prepare --target."
        )


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
        `ValueError`: a bad row, named by file and line, no row that teaches anything, or rows that are given twice.
    """
    from datasets import Dataset

    if max_length is not None and max_length < 1:
        raise ValueError(f"max_length must be at least 1, got {max_length}.")
    paths = [paths] if isinstance(paths, (str, Path)) else list(paths)
    _check_given_once(paths)
    counts = Counter() if counts is None else counts
    rows = []
    for path in paths:
        _check_same_tokenizer(path, tokenizer)
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

    if not counts["rows"]:
        raise ValueError(f"{', '.join(map(str, paths))}: no rows; give responses of `retrace-hf prepare`.")
    if not rows:
        raise ValueError(
            f"None of the {counts['rows']} rows of {', '.join(map(str, paths))} has anything to learn: every answer "
            f"is empty or cut away by max_length={max_length}. Raise max_length or give other responses."
        )
    if counts["dropped"]:
        logger.warning("Dropped %d of %d rows with nothing to learn.", counts["dropped"], counts["rows"])
    return Dataset.from_list(rows)
