"""
Conversations to answer, from wherever people keep them: a dataset of the Hub, a folder, JSON lines, Parquet.

A conversation is `{"id": str, "source": str, "messages": [{"role": str, "content": str}, ...]}`: a system prompt or
none, then the user's turns, with or without answers between and after them.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from .prompts import read_jsonl


# Where conversations usually stand, in the order in which they are looked for.
CHAT_COLUMNS = ("messages", "conversations", "conversation", "prompt")
# ShareGPT's words for it, and others met in datasets of the Hub.
_ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "model", "bot"), "assistant"),
}
_LINES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")


class Unusable(ValueError):
    """A prompt that cannot be used: a `reason` to count by, and what was wrong with it."""

    def __init__(self, reason: str, detail: str):
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


def load_conversations(
    source: str | Path,
    split: str = "train",
    config: str | None = None,
    column: str | None = None,
    limit: int | None = None,
    system_prompt: str | None = None,
) -> tuple[list[dict], list[dict]]:
    """
    Reads conversations.

    Args:
        source (`str` or `Path`): a file (`.jsonl`, `.jsonl.gz`, `.json`, `.parquet`), a folder (of
            `Dataset.save_to_disk`, or of data files), or the id of a dataset on the Hub.
        split (`str`, *optional*, defaults to `"train"`), config (`str`, *optional*): of a dataset.
        column (`str`, *optional*): texts, or lists of messages (`role` and `content`, or ShareGPT's `from` and
            `value`), or lists of a user's turns. The first there is of `messages`, `conversations`, `conversation`,
            `prompt` if left out. A column `id` and a column `source` are kept.
        limit (`int`, *optional*): rows read at most.
        system_prompt (`str`, *optional*): put in front of conversations that have none of their own.

    Returns:
        `tuple[list[dict], list[dict]]`: the conversations, ids unique, in the order of the source; and the rows that
        cannot be used, `{"id", "turn", "reason", "detail"}` each.

    Raises:
        `FileNotFoundError`: there is no such file or dataset.
        `ValueError`: no such column (those there are are named), no such split, a line that is not JSON, no rows, or
            none that can be used.
    """
    if os.path.isfile(source) and (split != "train" or config is not None):
        raise ValueError(f"{source} is one file, without splits and configs; leave out --split and --config.")
    name = Path(source).name.split(".")[0] if os.path.exists(source) else str(source)
    conversations, unusable, seen = [], [], set()
    for number, (where, row) in enumerate(read_rows(str(source), split, config)):
        if limit is not None and number >= limit:
            break
        column = _find_column(row, column, where)
        row_id = row.get("id")
        row_id = str(row_id) if isinstance(row_id, (str, int)) and str(row_id).strip() else str(number)
        if row_id in seen:
            row_id = f"{row_id}#{number}"
        seen.add(row_id)
        try:
            messages = to_messages(row[column])
        except Unusable as error:
            unusable.append({"id": row_id, "turn": 0, "reason": error.reason, "detail": f"{where}: {error.detail}"})
            continue
        if system_prompt is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system_prompt})
        kind = row["source"] if isinstance(row.get("source"), str) and row["source"].strip() else name
        conversations.append({"id": row_id, "source": kind, "messages": messages})
    if not conversations and unusable:
        first = unusable[0]
        raise ValueError(
            f"None of the {len(unusable)} rows of {source} can be used; the first: {first['reason']} "
            f"({first['detail']}). Name the column with the conversations by --column."
        )
    if not conversations:
        raise ValueError(f"{source} holds no rows; give a file or dataset with at least one prompt.")
    return conversations, unusable


def to_messages(value) -> list[dict]:
    """
    What a column holds, as messages of `role` and `content`.

    Raises:
        `Unusable`: it is empty, not text, or its turns are not user and assistant by turns.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": _text(value)}]
    if not isinstance(value, Iterable) or isinstance(value, (dict, bytes)):
        raise Unusable("not text", f"a text or a list of messages was expected, got {type(value).__name__}")
    value = list(value)
    if not value:
        raise Unusable("empty", "no messages")
    if all(isinstance(turn, str) for turn in value):
        return [{"role": "user", "content": _text(turn)} for turn in value]
    messages = [_message(turn) for turn in value]
    turns = [message["role"] for message in messages]
    turns = turns[1:] if turns[0] == "system" else turns
    if not turns or any(role != ("user", "assistant")[i % 2] for i, role in enumerate(turns)):
        roles = ", ".join(message["role"] for message in messages)
        raise Unusable("turns out of order", f"user and assistant by turns were expected, got {roles}")
    return messages


def _message(turn) -> dict:
    if not isinstance(turn, dict):
        raise Unusable("not text", f"a message was expected, got {type(turn).__name__}")
    role = turn.get("role") or turn.get("from")
    content = turn.get("content") if turn.get("role") else turn.get("value")
    if role not in _ROLES:
        raise Unusable("unknown role", f"{role!r}")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(part.get("text") or "" for part in content)
    return {"role": _ROLES[role], "content": _text(content)}


def _text(value) -> str:
    if not isinstance(value, str):
        raise Unusable("not text", f"a text was expected, got {type(value).__name__}")
    if not value.strip():
        raise Unusable("empty", "a turn without words")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise Unusable("not text", f"no valid Unicode ({error.reason})") from None
    return value


def _find_column(row: dict, column: str | None, where: str) -> str:
    found = next((name for name in CHAT_COLUMNS if name in row), None) if column is None else column
    if found is None or found not in row:
        missing = f"no column {column!r}" if column else f"none of the columns {', '.join(CHAT_COLUMNS)}"
        raise ValueError(f"{where}: {missing}; there are {', '.join(map(repr, row))}. Name one by --column.")
    return found


def read_rows(source: str, split: str, config: str | None) -> Iterator[tuple[str, dict]]:
    """Where it stands and what it holds, of every row of a file, a folder or a Hub dataset, as in
    [`load_conversations`]."""
    if source.endswith(_LINES):
        for line, row in read_jsonl(source):
            yield f"{source}, line {line}", row
        return
    dataset = _parquet_rows(source) if source.endswith(".parquet") else _dataset(source, split, config)
    for number, row in enumerate(dataset):
        yield f"{source}, row {number}", row


def _parquet_rows(source: str) -> Iterator[dict]:
    if not os.path.isfile(source):
        raise FileNotFoundError(f"{source} is not a file; give the path of a .parquet file.")
    from pyarrow import ArrowException, parquet

    try:
        # Not through datasets, which would keep a copy of the file in its cache.
        for batch in parquet.ParquetFile(source).iter_batches():
            yield from batch.to_pylist()
    except (ArrowException, OSError) as error:
        raise ValueError(f"{source}: damaged or not a Parquet file ({error}). Write it again.") from None


def _dataset(source: str, split: str, config: str | None):
    try:
        from datasets import DatasetDict, load_dataset, load_from_disk
        from datasets.exceptions import DatasetsError
    except ImportError as error:
        raise ImportError("Reading datasets needs the package datasets: pip install 'retrace_hf[train]'.") from error

    if os.path.isfile(source) and not source.endswith(".json"):
        raise ValueError(f"{source}: a .jsonl, .jsonl.gz, .json or .parquet file was expected.")
    if not os.path.exists(source) and (source.endswith(".json") or source.startswith((".", "/", "~"))):
        raise FileNotFoundError(f"{source} is neither a file nor a folder; give one, or the id of a Hub dataset.")
    try:
        if os.path.isfile(source):
            return load_dataset("json", data_files=source, split="train")
        if any(os.path.isfile(os.path.join(source, name)) for name in ("dataset_info.json", "dataset_dict.json")):
            saved = load_from_disk(source)
            if not isinstance(saved, DatasetDict):
                return saved
            if split not in saved:
                raise ValueError(f"no split {split!r}; there are {', '.join(map(repr, saved))}")
            return saved[split]
        return load_dataset(source, config, split=split)
    except FileNotFoundError:
        raise
    except (ValueError, DatasetsError) as error:
        cause = error.__cause__ or error
        raise ValueError(f"{source}: {cause}. Name what to read by --split and --config.") from error
