"""
From prompts to data that a drafter can be trained on: the target's responses, and tokens with loss masks.

A folder of it holds, for every shard, `responses_00000.jsonl.gz` (see `responses.py`), `tokens_00000.jsonl.gz` (rows
of `input_ids` and `answers`, what training takes) and `report_00000.json`, which is written last: a shard is whole
where its report is. `prepare.json` says what all of it was made from and with, `left_out.jsonl` what is missing and
why.

In a conversation of several turns every answer is the target's: each is generated behind the ones before it, and the
answers the data had are not used.
"""

import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from filelock import FileLock, Timeout

from .. import __version__
from ..evaluation.results import command_line
from ..files import write_text
from ..targets import DEFAULT_TARGET, load_target, load_target_tokenizer
from .features import target_fingerprint
from .prompts import check_chat_template
from .responses import AnswerBar, TargetAnswers, answer_chats, check_sizes, read_responses, stop_ids, write_responses
from .sources import load_conversations
from .tokenize import MIN_LEARNT_TOKENS, spans_of, tokenize_conversation, tokenize_response, tokenizer_digest


logger = logging.getLogger(__name__)

NOTE = "prepare.json"
LEFT_OUT = "left_out.jsonl"
_RANGES = {"temperature": (0, 100), "top_p": (0, 1), "top_k": (0, 10**9), "seed": (0, 2**63), "retries": (0, 1000)}
_NOTHING = {"reason": "nothing to learn", "detail": "no answer of two tokens, or cut away, or the template changes it"}


@dataclass
class PrepareOptions:
    """
    Options of [`prepare`]; those of the command `retrace-hf prepare`.

    > Parameters that control what is answered

    Args:
        source (`str`): see [`~retrace_hf.data.sources.load_conversations`], as `split`, `config`, `column`, `limit`.
        output_dir (`str`): the folder; made if missing.
        system_prompt (`str`, *optional*): put in front of conversations that have none of their own.
        keep_answers (`bool`, *optional*, defaults to `False`): the answers in the data are the target's already; only
            make tokens of them.

    > Parameters that control who answers

        target (`str`, *optional*): Hub id or folder. With `endpoint` only its tokenizer is loaded.
        dtype (`str`, *optional*, defaults to `"float32"`), device (`str`, *optional*, defaults to `"cpu"`): of it.
        batch_size (`int`, *optional*, defaults to 16): prompts answered at once.
        endpoint (`str`, *optional*): URL of an OpenAI-compatible server that runs the target; `model`, `api_key_env`,
            `concurrency`, `request_timeout` and `retries` are those of
            [`~retrace_hf.data.endpoint.EndpointAnswers`].

    > Parameters that control how

        max_new_tokens (`int`, *optional*, defaults to 224): tokens of an answer at most.
        temperature (`float`, *optional*, defaults to 0.0): 0 is greedy.
        top_p (`float`, *optional*, defaults to 1.0), top_k (`int`, *optional*, defaults to 0): with a temperature.
        seed (`int`, *optional*, defaults to 0): with a temperature.
        enable_thinking (`bool`, *optional*): passed to the chat template; not passed if left out.
        chat_template_kwargs (`dict`, *optional*): what else is.

    > Parameters that control what is written

        max_length (`int`, *optional*): tokens kept of a row.
        shard_size (`int`, *optional*, defaults to 256): prompts of a shard; an interrupt loses one at most.
        progress (`bool`, *optional*, defaults to `True`): show a bar with tokens per second.
    """

    source: str
    output_dir: str
    target: str = DEFAULT_TARGET
    split: str = "train"
    config: str | None = None
    column: str | None = None
    limit: int | None = None
    system_prompt: str | None = None
    keep_answers: bool = False
    dtype: str = "float32"
    device: str = "cpu"
    batch_size: int = 16
    endpoint: str | None = None
    model: str | None = None
    api_key_env: str = "OPENAI_API_KEY"
    concurrency: int = 32
    request_timeout: float = 600.0
    retries: int = 5
    max_new_tokens: int = 224
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    enable_thinking: bool | None = None
    chat_template_kwargs: dict = field(default_factory=dict)
    max_length: int | None = None
    shard_size: int = 256
    progress: bool = True

    def __post_init__(self):
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"dtype must be float32, bfloat16 or float16, got {self.dtype!r}.")
        sizes = ("max_new_tokens", "batch_size", "concurrency", "shard_size", "max_length", "limit")
        check_sizes(**{name: size for name in sizes if (size := getattr(self, name)) is not None})
        for name, (low, high) in _RANGES.items():
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name} must be from {low} to {high}, got {getattr(self, name)}.")
        if self.top_p == 0:
            raise ValueError("top_p must be above 0; temperature 0 is greedy.")
        if not self.temperature and (self.top_p != 1 or self.top_k):
            raise ValueError("top_p and top_k go with a temperature above 0; without one the answers are greedy.")
        if self.keep_answers and self.endpoint is not None:
            raise ValueError("keep_answers asks nobody; give it without an endpoint.")
        if self.endpoint is None and self.model is not None:
            raise ValueError("model is the target's name on a server and goes with an endpoint; name it by target.")

    @property
    def sampling(self) -> dict | None:
        if not self.temperature:
            return None
        return {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}

    @property
    def template_kwargs(self) -> dict:
        thinking = {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}
        return {**self.chat_template_kwargs, **thinking}


def prepare(options: PrepareOptions) -> dict:
    """
    Makes training data, or goes on with it: a shard that is whole is kept, and prompts that a server failed are asked
    again. However often it was stopped, the rows are those of a run that was not.

    Args:
        options ([`PrepareOptions`]): what to do.

    Returns:
        `dict`: counts, as in `prepare.json`; `left_out` holds the number of prompts left out by reason.

    Raises:
        `ValueError`: options or data that will not do, or a folder that holds something else.
        `OSError`: no such file, no room on the disk, or a server that does not answer.
    """
    place = {name: getattr(options, name) for name in ("source", "split", "config", "column", "limit")}
    conversations, unusable = load_conversations(**place, system_prompt=options.system_prompt)
    tokenizer, answer, who = _load_answers(options)
    _check_template(tokenizer, conversations[0], options.template_kwargs)
    settings = {
        **who,
        "data_sha256": _digest(conversations),
        "tokenizer_sha256": tokenizer_digest(tokenizer),
        "chat_template_sha256": hashlib.sha256(tokenizer.get_chat_template().encode()).hexdigest(),
        "chat_template_kwargs": options.template_kwargs,
        "system_prompt": options.system_prompt,
        "shard_size": options.shard_size,
    }
    if not options.keep_answers:
        settings |= {"max_new_tokens": options.max_new_tokens, "temperature": options.temperature}
        settings |= {**options.sampling, "seed": options.seed} if options.sampling else {}
    note = {
        "target": _shown(options.target),
        "settings": settings,
        "data": {**place, "source": _shown(options.source)},
        "max_length": options.max_length,
        "endpoint": options.endpoint,
        "command": command_line(),
        "versions": {"retrace_hf": __version__, **{name: version(name) for name in ("torch", "transformers")}},
        "finished": False,
    }
    folder = Path(options.output_dir)
    _check_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / ".lock", timeout=0):
            _claim(folder, note)
            shards = _Shards(folder, tokenizer, answer, options)
            return _fill(shards, conversations, unusable, note)
    except Timeout:
        raise OSError(f"Another run is writing to {folder}; wait for it, or give another --output-dir.") from None


def _load_answers(options: PrepareOptions):
    """The tokenizer, who answers (`None`: nobody), and what identifies them."""
    if options.keep_answers:
        tokenizer, _ = load_target_tokenizer(options.target)
        check_chat_template(tokenizer)
        return tokenizer, None, {"answers": "kept"}
    how = (options.sampling, options.seed, options.template_kwargs)
    if options.endpoint is None:
        import torch

        target, tokenizer = load_target(options.target, dtype=getattr(torch, options.dtype), device=options.device)
        answer = TargetAnswers(target, tokenizer, options.max_new_tokens, options.batch_size, *how)
        return tokenizer, answer, {"answers": "target", "target_fingerprint": target_fingerprint(target)}
    from .endpoint import EndpointAnswers

    tokenizer, generation_config = load_target_tokenizer(options.target)
    answer = EndpointAnswers(
        options.endpoint,
        tokenizer,
        stop_ids(generation_config, tokenizer),
        options.model,
        options.max_new_tokens,
        *how,
        api_key_env=options.api_key_env,
        concurrency=options.concurrency,
        timeout=options.request_timeout,
        retries=options.retries,
    )
    return tokenizer, answer, {"answers": "server", "model": answer.model}


def _check_template(tokenizer, conversation: dict, kwargs: dict):
    """A template that refuses the system prompt, say, refuses all conversations: found out before the first."""
    start = [m for m in conversation["messages"][:1] if m["role"] == "system"] + [{"role": "user", "content": "Hi"}]
    try:
        tokenizer.apply_chat_template(start, add_generation_prompt=True, tokenize=False, **kwargs)
    except Exception as error:  # a template raises what it likes, and jinja2 for it
        with_system = " with a system prompt" if len(start) > 1 else ""
        raise ValueError(f"The chat template cannot render a conversation{with_system}: {error}") from None


def _shown(source: str) -> str:
    """A file without the folders in front of the working one: they say nothing to others."""
    return source.replace(os.getcwd() + os.sep, "")


def _digest(conversations: Sequence[dict]) -> str:
    digest = hashlib.sha256()
    for conversation in conversations:
        digest.update(json.dumps(conversation, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()


def _check_folder(folder: Path):
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output-dir {folder} is a file; give a folder.")
    if (folder / NOTE).is_file():
        return
    if any(folder.glob("*.jsonl.gz")):
        raise ValueError(f"{folder} holds data of something else; give another --output-dir, or delete this one.")


def _claim(folder: Path, note: dict):
    """Writes down what the shards are made from and with, or checks that it is the same."""
    for left in folder.glob(".*.tmp.*"):
        left.unlink()  # of a run that was killed; nobody else writes here now
    if (folder / NOTE).is_file():
        try:
            noted = json.loads((folder / NOTE).read_text(encoding="utf-8"))
            before = noted["settings"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{folder / NOTE} is damaged or somebody else's; give another --output-dir.") from None
        now = json.loads(json.dumps(note["settings"]))
        names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        if names:
            if "data_sha256" in names:  # a hash says nothing; what was read does, where that is what changed
                then, here = noted.get("data", {}), note["data"]
                now |= {name: here[name] for name in here if name in then and then[name] != here[name]}
                names = [name for name in here if name in now] + names
                before |= then
            changed = "; ".join(f"{name} was {before.get(name)!r}, now {now.get(name)!r}" for name in names)
            raise ValueError(
                f"{folder} holds data made otherwise: {changed}. Give another --output-dir, or delete this one."
            )
    _write_json(folder / NOTE, note)


def _write_json(path: Path, value):
    write_text(path, json.dumps(value, ensure_ascii=False, indent=2) + "\n")


def _fill(shards: "_Shards", conversations: list[dict], unusable: list[dict], note: dict) -> dict:
    counts, server, left_out = Counter(), Counter(), list(unusable)
    size = shards.options.shard_size
    with AnswerBar(_turns(conversations), shards.options.progress) as bar:
        for number, start in enumerate(range(0, len(conversations), size)):
            try:
                report = shards.fill(number, conversations[start : start + size], bar)
            except OSError as error:
                if error.errno is None:
                    raise
                raise OSError(
                    f"Shard {number} of {shards.folder} could not be written: {error.strerror}. The shards before it "
                    "are kept; make room, and the same command goes on."
                ) from error
            counts.update(report["counts"])
            server.update(report["server"])
            left_out += report["left_out"]
    reasons = Counter(entry["reason"] for entry in left_out)
    totals = {"prompts": len(conversations) + len(unusable), **counts, "left_out": dict(reasons)}
    if server:
        totals["server"] = dict(server)
    lines = "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in left_out)
    write_text(shards.folder / LEFT_OUT, lines)
    _write_json(shards.folder / NOTE, {**note, "counts": totals, "finished": True})
    if not counts["rows"]:
        first = left_out[0]
        raise ValueError(
            f"None of the {totals['prompts']} prompts gave a row to learn from; the first: {first['reason']} "
            f"({first['detail']}). All of them stand in {shards.folder / LEFT_OUT}."
        )
    if left_out:
        why = ", ".join(f"{number} {reason}" for reason, number in reasons.most_common())
        logger.warning("Left out, wholly or in part: %s. See %s.", why, shards.folder / LEFT_OUT)
    return totals


def _turns(conversations: Sequence[dict]) -> int:
    return sum(message["role"] == "user" for conversation in conversations for message in conversation["messages"])


class _Shards:
    """The files of a folder, a shard at a time."""

    def __init__(self, folder: Path, tokenizer, answer, options: PrepareOptions):
        self.folder, self.tokenizer, self.answer, self.options = folder, tokenizer, answer, options
        self.server: Counter = Counter()  # what a server did, in the shard at hand

    def fill(self, number: int, conversations: list[dict], bar: AnswerBar) -> dict:
        """Makes one shard, or what is missing of it. Returns its report."""
        report = self._whole_report(number)
        again = {entry["id"] for entry in (report or {"left_out": []})["left_out"] if entry.get("again")}
        if report is not None and not again and report["max_length"] == self.options.max_length:
            bar.skip(_turns(conversations))
            return report
        self.server = getattr(self.answer, "counts", Counter())
        self.server.clear()
        if self.answer is None:
            rows, left_out = _kept(conversations)
            bar.skip(_turns(conversations))
        elif report is None:
            rows, left_out = answer_chats(self.answer, conversations, number, bar.tick)
        else:
            rows, left_out = self._ask_again(number, conversations, report, again, bar)
            self.server.update(report["server"])
        return self._write(number, rows, left_out)

    def _file(self, kind: str, number: int) -> Path:
        return self.folder / f"{kind}_{number:05d}.{'json' if kind == 'report' else 'jsonl.gz'}"

    def _whole_report(self, number: int) -> dict | None:
        """The report of a shard all files of which are there as they were written."""
        try:
            report = json.loads(self._file("report", number).read_text(encoding="utf-8"))
            whole = all((self.folder / name).stat().st_size == size for name, size in report["files"].items())
        except (OSError, ValueError, KeyError):
            return None
        return report if whole else None

    def _ask_again(self, number: int, conversations: list[dict], report: dict, again: set[str], bar: AnswerBar):
        asked = [conversation for conversation in conversations if conversation["id"] in again]
        bar.skip(_turns(conversations) - _turns(asked))
        new, failed = answer_chats(self.answer, asked, number, bar.tick)
        rows = {row["id"]: row for row in read_responses(self._file("responses", number))}
        rows |= {row["id"]: row for row in new}
        # Rows with nothing to learn have no turn; they are looked for anew.
        kept = [entry for entry in report["left_out"] if entry["id"] not in again and "turn" in entry]
        return [rows[c["id"]] for c in conversations if c["id"] in rows], kept + failed

    def _write(self, number: int, rows: list[dict], left_out: list[dict]) -> dict:
        self._file("report", number).unlink(missing_ok=True)
        counts = Counter(answered=len(rows))
        tokens, dropped = [], []
        for row in rows:
            tokenized = self._tokenize(row, counts)
            if sum(tokenized["loss_mask"]) < MIN_LEARNT_TOKENS:
                dropped.append(row["id"])
                continue
            spans = [list(span) for span in spans_of(tokenized["loss_mask"])]
            counts.update(rows=1, tokens=len(tokenized["input_ids"]), learnt_tokens=sum(tokenized["loss_mask"]))
            counts.update(learnt_answers=len(spans))
            tokens.append({name: tokenized[name] for name in ("id", "source", "input_ids")} | {"answers": spans})
        written = {"tokens": tokens} if self.answer is None else {"responses": rows, "tokens": tokens}
        for kind, lines in written.items():
            write_responses(lines, self._file(kind, number))
        report = {
            "counts": dict(counts),
            "server": dict(self.server),
            "left_out": left_out + [{"id": row_id, **_NOTHING} for row_id in dropped],
            "max_length": self.options.max_length,
            "files": {self._file(kind, number).name: self._file(kind, number).stat().st_size for kind in written},
        }
        _write_json(self._file("report", number), report)
        return report

    def _tokenize(self, row: dict, counts: Counter) -> dict:
        kwargs, where = self.options.template_kwargs, f"prompt {row['id']}"
        counts["answers"] += sum(message["role"] == "assistant" for message in row["messages"])
        if self.answer is None:
            ids, mask = tokenize_conversation(row["messages"], self.tokenizer, kwargs)
            tokenized = {"id": row["id"], "source": row["source"], "input_ids": ids, "loss_mask": mask}
        else:
            tokenized = tokenize_response(row, self.tokenizer, where=where, chat_template_kwargs=kwargs)
            answers = [*row.get("earlier", []), row]
            counts.update(answer["finish"] for answer in answers)
            counts["response_tokens"] += sum(len(answer["response_ids"]) for answer in answers)
        length = self.options.max_length
        if length is not None and len(tokenized["input_ids"]) > length:
            counts["truncated"] += 1
            tokenized |= {name: tokenized[name][:length] for name in ("input_ids", "loss_mask")}
        return tokenized


def _kept(conversations: list[dict]) -> tuple[list[dict], list[dict]]:
    """Conversations up to their last answer."""
    rows, left_out = [], []
    for conversation in conversations:
        messages = conversation["messages"]
        last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=None)
        if last is None:
            left_out.append({"id": conversation["id"], "turn": 0, "reason": "no answer", "detail": "nothing to keep"})
            continue
        rows.append({**conversation, "messages": messages[: last + 1]})
    return rows, left_out
