"""The prompts to measure on: the sets that the papers report, by name, and files of one's own.

A set is taken from the Hub, or, as `NAME=PATH`, from a file or folder with the same columns. The prompts are those of
the DFlash papers' scripts (`z-lab/dflash`), the numbers of them ReTrace's (arXiv 2608.29748).
"""

import hashlib
import json
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..card import DATA_SETS
from ..data.prompts import read_eval_prompts
from ..data.sources import read_rows
from .results import file_hash, limit_each_kind


FILE_FORMAT = '{"id": text, "source": kind of prompt, "category": text, "turns": [text, ...]} a line'
FILES = (".jsonl", ".jsonl.gz")


@dataclass(frozen=True)
class Form:
    """
    How a set's rows become prompts.

    Args:
        turns (`Callable[[dict], list[str]]`): what the user says, from a row.
        columns (`tuple[str]`): of the row, that `turns` reads; the first one must have words.
        prompts (`int`): how many the paper takes.
        files (`tuple[str]`, *optional*): data files on the Hub, where `datasets` cannot load the set by its id.
    """

    turns: Callable[[dict], list[str]]
    columns: tuple[str, ...]
    prompts: int
    files: tuple[str, ...] = ()


def _step_by_step(problem: str) -> list[str]:
    return [f"{problem}\nPlease reason step by step, and put your final answer within \\boxed{{}}."]


def _humaneval(row: dict) -> list[str]:
    task = "Write a solution to the following problem and make sure that it passes the tests:"
    return [f"{task}\n```python\n{row['prompt']}\n```"]


def _alpaca(row: dict) -> list[str]:
    return [f"{row['instruction']}\n\nInput:\n{row['input']}" if row["input"] else row["instruction"]]


def _livecodebench(row: dict) -> list[str]:
    system = (
        "You are an expert Python programmer. You will be given a question (problem specification) and will generate "
        "a correct Python program that matches the specification and passes all tests. You will NOT return anything "
        "except for the program"
    )
    how, code = "Write your code in the following format:", "# YOUR CODE HERE"
    if row["starter_code"]:
        how, code = "Use the following code structure:", row["starter_code"]
    return [
        f"{system}\n\n### Question:\n{row['question_content']}\n\n### Format: {how}\n```python\n{code}\n```\n\n"
        "### Answer: (use the provided format with backticks)"
    ]


FORMS = {
    "mt-bench": Form(lambda row: list(row["prompt"]), ("prompt",), 80),
    "humaneval": Form(_humaneval, ("prompt",), 164),
    "gsm8k": Form(lambda row: _step_by_step(row["question"]), ("question",), 128),
    "math500": Form(lambda row: _step_by_step(row["problem"]), ("problem",), 128),
    "alpaca": Form(_alpaca, ("instruction", "input"), 128),
    "livecodebench": Form(
        _livecodebench,
        ("question_content", "starter_code"),
        128,
        # Its loading script is refused by datasets 4 and later; its data files are some gigabytes of tests.
        files=tuple(f"test{number}.jsonl" for number in ("", 2, 3, 4, 5, 6)),
    ),
}


def load_data_sets(sources: Sequence[str], limit: int | None, seed: int) -> tuple[list[dict], dict[str, str]]:
    """
    Reads prompts.

    Args:
        sources (`Sequence[str]`): names of [`FORMS`], `NAME=PATH` of files or folders with such a set's columns, and
            JSON-lines files as [`~retrace_hf.data.prompts.read_eval_prompts`] takes them.
        limit (`int`, *optional*): prompts of each kind at most; of a named set as many as the paper takes if left
            out, of a file all. Of a named set they are drawn, of a file they are the first.
        seed (`int`): of the draw. A smaller limit draws a part of what a larger one does.

    Returns:
        `tuple[list[dict], dict[str, str]]`: the prompts, `{"id", "kind", "turns"}` each, and a hash by source.

    Raises:
        `ValueError`: an unknown name, a kind of prompt that comes from two sources, or rows that will not do.
        `OSError`: no such file, or a set that cannot be had from the Hub.
    """
    sets = [(source, *_split(source)) for source in sources]  # all names first: a download takes time
    rows, hashes, whence = [], {}, {}
    for source, name, path in sets:
        found = _file_rows(path, limit) if name is None else _set_rows(name, path, limit, seed)
        for kind in sorted({row["kind"] for row in found}):
            if kind in whence:
                raise ValueError(
                    f"--data {source} and --data {whence[kind]} both hold prompts of the kind {kind!r}, which would "
                    "be one column of the table; leave one out, or change the column 'source' of a file."
                )
            whence[kind] = source
        rows += found
        if name is None:
            hashes[path.replace("\\", "/").rpartition("/")[2]] = file_hash(path)
        else:
            hashes[name] = rows_hash(found)
    return rows, hashes


def rows_hash(rows: Sequence[dict]) -> str:
    return "sha256:" + hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()


def _split(source: str) -> tuple[str | None, str | None]:
    """Name of the set and path; one of them may be `None`."""
    name, _, path = source.partition("=")
    if name in FORMS:
        return name, path or None
    if source.endswith(FILES):
        return None, source
    raise ValueError(
        f"--data {source}: there is no set of that name, and it is no .jsonl file. The sets are {', '.join(FORMS)}; a "
        f"file has {FILE_FORMAT}."
    )


def _file_rows(path: str, limit: int | None) -> list[dict]:
    rows = [
        {"id": row["id"], "kind": row["source"], "turns": list(row["turns"])}
        for row in sorted(read_eval_prompts(path), key=lambda row: row["source"])  # kind by kind, each in its order
    ]
    return limit_each_kind(rows, limit)


def _set_rows(name: str, path: str | None, limit: int | None, seed: int) -> list[dict]:
    form = FORMS[name]
    if path is not None and not os.path.exists(path):
        raise FileNotFoundError(f"--data {name}={path}: there is no such file or folder.")
    source = _hub_rows(name) if path is None else [row for _, row in read_rows(path, DATA_SETS[name][3], None)]
    if not len(source):
        raise ValueError(f"--data {name}: {path or DATA_SETS[name][1]} holds no rows, so there is no prompt.")
    missing = [column for column in form.columns if column not in source[0]]
    if missing:
        raise ValueError(
            f"--data {name}: {path or DATA_SETS[name][1]} has no column {missing[0]!r}; there are "
            f"{', '.join(map(repr, source[0]))}. Give rows as {DATA_SETS[name][1]} has them, or a .jsonl file with "
            f"{FILE_FORMAT}."
        )
    order = list(range(len(source)))
    random.Random(seed).shuffle(order)
    chosen = sorted(order[: form.prompts if limit is None else limit])
    empty = [i for i in chosen if not _has_words(source[i][form.columns[0]])]
    if empty:
        raise ValueError(f"--data {name}: column {form.columns[0]!r} of row {empty[0]} is no text, or has no words.")
    return [{"id": f"{name}-{i}", "kind": name, "turns": form.turns(source[i])} for i in chosen]


def _has_words(value) -> bool:
    """A text, or a list of them."""
    texts = value if isinstance(value, list) else [value]
    return bool(texts) and all(isinstance(text, str) and text.strip() for text in texts)


def _hub_rows(name: str):
    """The set's rows on the Hub, or in the Hub's cache."""
    _, hub_id, config, split = DATA_SETS[name]
    form = FORMS[name]
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError(f"--data {name} needs the package datasets: pip install 'retrace_hf[benchmark]'.") from error
    try:
        if form.files:
            files = [f"hf://datasets/{hub_id}/{file}" for file in form.files]
            dataset = load_dataset("json", data_files=files, split="train")
        else:
            dataset = load_dataset(hub_id, config, split=split)
    except Exception as error:  # whatever the libraries of the day raise where there is no line, no id, no disk
        why = (str(error).strip() or "no answer").splitlines()[0]
        raise OSError(
            f"--data {name}: {hub_id} cannot be had from the Hub ({type(error).__name__}: {why}). Where it was "
            f"downloaded, --data {name}=PATH reads it (.jsonl, .json, .parquet, or their folder; columns "
            f"{', '.join(form.columns)}); any other prompts are --data FILE.jsonl with {FILE_FORMAT}."
        ) from error
    # Of the rest nothing is read: LiveCodeBench's tests are large. A column that is missing is named by the caller.
    return dataset.select_columns(list(form.columns)) if set(form.columns) <= set(dataset.column_names) else dataset


__all__ = ["FILE_FORMAT", "FORMS", "load_data_sets", "rows_hash"]
