"""Reading prompts, one JSON object a line, plain or gzip; rendering them as the target sees them."""

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path


def open_text(path: str | Path, mode: str = "r"):
    """Opens a UTF-8 text file, through gzip where the name ends in `.gz`. `mode` is `"r"`, `"w"` or `"a"`."""
    path = Path(path)
    if path.suffix == ".gz":
        return gzip.open(path, mode + "t", encoding="utf-8")
    return open(path, mode, encoding="utf-8")


def read_jsonl(path: str | Path) -> Iterator[tuple[int, dict]]:
    """
    Yields `(line number, object)` for every line that is not blank; lines count from 1.

    Raises:
        `FileNotFoundError`: there is no such file.
        `ValueError`: a line is not a JSON object, or the file is not UTF-8 text or gzip data, or it breaks off.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file; give the path of a .jsonl or .jsonl.gz file.")
    line_number = 0
    try:
        with open_text(path) as file:
            for line_number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line.rstrip("\r\n"))
                except json.JSONDecodeError as error:
                    raise ValueError(
                        f"{path}, line {line_number}, column {error.colno}: not JSON ({error.msg}). Write one JSON "
                        "object a line; if the file was cut short, remove its last line."
                    ) from None
                if not isinstance(row, dict):
                    raise ValueError(
                        f"{path}, line {line_number}: a JSON object was expected, got {type(row).__name__}. Write one "
                        "object a line."
                    )
                yield line_number, row
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}, after line {line_number}: not UTF-8 text ({error.reason}). Re-encode it.") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}, after line {line_number}: damaged gzip data ({error}). Write it again.") from None


def require(row: dict, column: str, kind: type, where: str, cure: str):
    """
    Returns `row[column]` after checking its type.

    Args:
        row (`dict`): one object of a file.
        column (`str`): name of the column.
        kind (`type`): what it must be. A text must not be empty.
        where (`str`): file and line, for the message.
        cure (`str`): what to do about it, for the message.

    Raises:
        `ValueError`: the column is missing, of another type, or an empty text.
    """
    if column not in row:
        raise ValueError(f"{where}: column {column!r} is missing. {cure}")
    value = row[column]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{where}: column {column!r} must be {kind.__name__}, got {type(value).__name__}. {cure}")
    if kind is str and not value.strip():
        raise ValueError(f"{where}: column {column!r} is empty. {cure}")
    return value


def read_prompts(path: str | Path) -> list[dict]:
    """
    Reads training prompts.

    Args:
        path (`str` or `Path`): a `.jsonl` or `.jsonl.gz` file of `{"id": str, "source": str, "prompt": str}`.

    Returns:
        `list[dict]`: the rows in the order of the file.

    Raises:
        `ValueError`: a bad row, named by file, line and column; an id that occurs twice; a file without rows.
    """
    cure = 'A prompt is {"id": text, "source": text, "prompt": text}.'
    rows, seen = [], {}
    for line_number, row in read_jsonl(path):
        where = f"{path}, line {line_number}"
        for column in ("id", "source", "prompt"):
            require(row, column, str, where, cure)
        _check_new_id(row["id"], seen, line_number, where)
        rows.append({column: row[column] for column in ("id", "source", "prompt")})
    return _check_not_empty(rows, path)


def read_eval_prompts(path: str | Path) -> list[dict]:
    """
    Reads evaluation prompts, which may have several turns.

    Args:
        path (`str` or `Path`):
            A `.jsonl` or `.jsonl.gz` file of `{"id": str, "source": str, "category": str, "turns": list[str]}`.

    Returns:
        `list[dict]`: the rows in the order of the file.

    Raises:
        `ValueError`: a bad row, named by file, line and column; an id that occurs twice; a file without rows.
    """
    cure = 'An evaluation prompt is {"id": text, "source": text, "category": text, "turns": [text, ...]}.'
    rows, seen = [], {}
    for line_number, row in read_jsonl(path):
        where = f"{path}, line {line_number}"
        for column in ("id", "source", "category"):
            require(row, column, str, where, cure)
        turns = require(row, "turns", list, where, cure)
        if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
            raise ValueError(f"{where}: column 'turns' must hold at least one text, none of them empty. {cure}")
        _check_new_id(row["id"], seen, line_number, where)
        rows.append({column: row[column] for column in ("id", "source", "category", "turns")})
    return _check_not_empty(rows, path)


def render_prompt(tokenizer, messages: list[dict], **chat_template_kwargs) -> list[int]:
    """
    Token ids of a conversation up to and including the generation prompt.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): the target's, with a chat template.
        messages (`list[dict]`): `{"role": str, "content": str}`, all turns before the answer.
        chat_template_kwargs: passed to the template, for example `enable_thinking=False`.

    Returns:
        `list[int]`: what `generate()` would be given as `input_ids`.

    Raises:
        `ValueError`: the tokenizer has no chat template.
    """
    check_chat_template(tokenizer)
    encoded = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True, **chat_template_kwargs
    )
    return list(encoded["input_ids"])


def check_chat_template(tokenizer):
    """Raises `ValueError` if the tokenizer has none."""
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"The tokenizer {tokenizer.name_or_path!r} has no chat template, so the prompt cannot be rendered as the "
            "target sees it. Load the tokenizer of an instruction-tuned target, or set tokenizer.chat_template."
        )


def _check_new_id(row_id: str, seen: dict[str, int], line_number: int, where: str):
    if row_id in seen:
        raise ValueError(f"{where}: column 'id' repeats {row_id!r} of line {seen[row_id]}. Give every row its own id.")
    seen[row_id] = line_number


def _check_not_empty(rows: list[dict], path: str | Path) -> list[dict]:
    if not rows:
        raise ValueError(f"{path} holds no rows; give a file with at least one JSON object.")
    return rows
