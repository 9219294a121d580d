"""
The target's own responses: the file format, and making more of them.

One JSON object a line: `{"id": str, "source": str, "messages": [..., {"role": "assistant", "content": str}],
"response_ids": list[int], "finish": "stop" | "length"}`. `response_ids` are the tokens the target generated, without
the end token. A drafter learns most from text its target would write itself. Two columns more where they are needed:
`end_id`, the token that ended the answer if it was another one than the tokenizer's end token; and, for chats of
several answers, `earlier`, the same three or two columns of each answer before the last.

Text that has tokens only (chats of the target with itself, `self_chat.py`) is `{"id": str, "source": str, "input_ids":
list[int], "answers": [[start, end], ...]}`: the target's greedy tokens stand from start to end, end excluded.
"""

import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm.auto import tqdm

from ..files import write_text, written_whole
from ..seeds import mixed_seed
from .prompts import check_chat_template, open_text, read_jsonl, render_prompt, require


logger = logging.getLogger(__name__)

_CURE = (
    'A response is {"id": text, "source": text, "messages": [..., {"role": "assistant", "content": text}], '
    '"response_ids": [token id, ...], "finish": "stop" or "length"}; `retrace-hf prepare` makes such files of prompts.'
)


def check_response(row: dict, where: str):
    """
    Raises `ValueError`, naming `where` (file and line) and the column, if `row` is not a response in the format above.
    """
    require(row, "id", str, where, _CURE)
    require(row, "source", str, where, _CURE)
    if "input_ids" in row:
        return _check_token_row(row, where)
    messages = require(row, "messages", list, where, _CURE)
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise ValueError(f"{where}: column 'messages' must hold objects with the texts role and content. {_CURE}")
    if len(messages) < 2 or messages[-1]["role"] != "assistant" or messages[-2]["role"] != "user":
        roles = [message["role"] for message in messages]
        raise ValueError(f"{where}: column 'messages' must end with user, assistant; its roles are {roles}. {_CURE}")
    _check_answer(row, where)
    earlier = row.get("earlier", [])
    answers = sum(message["role"] == "assistant" for message in messages)
    if earlier and (not isinstance(earlier, list) or len(earlier) != answers - 1):
        raise ValueError(f"{where}: column 'earlier' must have one object for each of {answers - 1} earlier answers.")
    for answer in earlier:
        _check_answer(answer, f"{where}, column 'earlier'")


def _check_answer(row: dict, where: str):
    ids = require(row, "response_ids", list, where, _CURE)
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ValueError(f"{where}: column 'response_ids' must hold token ids, none negative. {_CURE}")
    if row.get("finish") not in ("stop", "length"):
        raise ValueError(f"{where}: column 'finish' must be 'stop' or 'length', got {row.get('finish')!r}. {_CURE}")
    if "end_id" in row:
        require(row, "end_id", int, where, _CURE)


def _check_token_row(row: dict, where: str):
    cure = 'A row of tokens is {"id": text, "source": text, "input_ids": [id, ...], "answers": [[start, end], ...]}.'
    ids, answers = require(row, "input_ids", list, where, cure), require(row, "answers", list, where, cure)
    if not ids or not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ValueError(f"{where}: column 'input_ids' must hold token ids, none negative. {cure}")
    last = 0
    for span in answers:
        if not isinstance(span, list) or len(span) != 2 or not all(isinstance(i, int) for i in span):
            raise ValueError(f"{where}: column 'answers' must hold pairs [start, end]. {cure}")
        if not last <= span[0] < span[1] <= len(ids):
            raise ValueError(f"{where}: column 'answers' has {span}: out of order or beyond {len(ids)} tokens. {cure}")
        last = span[1]


def read_responses(path: str | Path, with_line_numbers: bool = False) -> Iterator[dict | tuple[int, dict]]:
    """
    Yields the checked rows of a file of responses.

    Args:
        path (`str` or `Path`): a `.jsonl` or `.jsonl.gz` file.
        with_line_numbers (`bool`, *optional*, defaults to `False`): yield `(line number, row)` instead of the row.

    Raises:
        `FileNotFoundError`: there is no such file.
        `ValueError`: a bad row, named by file, line and column.
    """
    for line_number, row in read_jsonl(path):
        check_response(row, f"{path}, line {line_number}")
        yield (line_number, row) if with_line_numbers else row


def write_responses(rows: Iterable[dict], path: str | Path) -> int:
    """
    Writes a file of responses, whole or not at all: first under a temporary name, then renamed.

    Args:
        rows (iterable of `dict`): responses in the format above; each is checked.
        path (`str` or `Path`): a `.jsonl` or `.jsonl.gz` file; an old one is replaced.

    Returns:
        `int`: rows written.

    Raises:
        `ValueError`: a row is not in the format.
    """
    written = 0
    # The suffix is the path's, so that open_text sees whether to compress.
    with written_whole(path) as temporary, open_text(temporary, "w") as file:
        for row in rows:
            check_response(row, f"row {written} for {path}")
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            written += 1
    return written


def regenerate(
    target,
    tokenizer,
    prompts: Sequence[dict],
    path: str | Path,
    max_new_tokens: int = 224,
    batch_size: int = 16,
    shard_size: int = 256,
    do_sample: bool = False,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    chat_template_kwargs: dict | None = None,
    progress: bool = True,
) -> dict[str, int]:
    """
    Answers prompts with the target, into shards `responses_00000.jsonl.gz`, ... of a folder. A shard is written whole
    or not at all; called again with the same arguments it goes on with the first shard that is missing.

    Args:
        target (`PreTrainedModel`): the model that will be accelerated; put in eval mode for the time of the call.
        tokenizer (`PreTrainedTokenizerBase`): the target's, with a chat template and an end token.
        prompts (sequence of `dict`): `{"id", "source", "prompt"}`, as [`~retrace_hf.data.prompts.read_prompts`] gives.
        path (`str` or `Path`): the folder; made if missing.
        max_new_tokens (`int`, *optional*, defaults to 224): tokens of an answer at most.
        batch_size (`int`, *optional*, defaults to 16): prompts answered at once, of similar lengths.
        shard_size (`int`, *optional*, defaults to 256): prompts of a shard; an interrupt loses one shard at most.
        do_sample (`bool`, *optional*, defaults to `False`): sample instead of taking the most likely token.
        temperature (`float`, *optional*, defaults to 1.0): with `do_sample`.
        top_p (`float`, *optional*, defaults to 1.0): with `do_sample`; 1.0 keeps the whole law.
        top_k (`int`, *optional*, defaults to 0): with `do_sample`; 0 keeps the whole law.
        seed (`int`, *optional*, defaults to 0): with `do_sample`; every shard and turn has its own stream.
        chat_template_kwargs (`dict`, *optional*): passed to the chat template.
        progress (`bool`, *optional*, defaults to `True`): show a bar with tokens per second.

    Returns:
        `dict[str, int]`: `prompts`, `answered`, `failed`, and of the answered ones `stop` (ended by themselves),
        `length` (cut) and `tokens`, over all shards, those of earlier calls included. A prompt fails when it does not
        fit the target's positions or the target raises on it alone; failures are logged by id.

    Raises:
        `ValueError`: no prompts, a size below 1, a tokenizer without chat template or end token, or a folder whose
        shards were made from other prompts or settings.
    """
    if not prompts:
        raise ValueError("There are no prompts to answer; give at least one.")
    check_sizes(shard_size=shard_size)
    sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k} if do_sample else None
    answer = TargetAnswers(target, tokenizer, max_new_tokens, batch_size, sampling, seed, chat_template_kwargs)
    settings = {**answer.generate_kwargs, "shard_size": shard_size, "chat_template_kwargs": chat_template_kwargs or {}}
    settings |= {"seed": seed} if do_sample else {}
    path = Path(path)
    claim_folder(path, {**settings, "prompts_sha256": prompts_digest(prompts)})
    with AnswerBar(len(prompts), progress) as bar:
        for shard, start in enumerate(range(0, len(prompts), shard_size)):
            shard_path = path / f"responses_{shard:05d}.jsonl.gz"
            chunk = prompts[start : start + shard_size]
            if shard_path.is_file():
                bar.skip(len(chunk))
                continue
            chats = [{**prompt, "messages": [{"role": "user", "content": prompt["prompt"]}]} for prompt in chunk]
            rows, _ = answer_chats(answer, chats, shard, bar.tick)
            write_responses(rows, shard_path)
    return _count(path, len(prompts))


def check_sizes(**sizes: int):
    """Raises `ValueError` for a size below 1."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}.")


class AnswerBar:
    """A progress bar of answers that shows tokens per second. `progress` shows it."""

    def __init__(self, total: int, progress: bool):
        self._bar = tqdm(total=total, unit="answer", desc="responses", disable=not progress)
        self._started, self._tokens = time.monotonic(), 0

    def __enter__(self):
        self._bar.__enter__()
        return self

    def __exit__(self, *error):
        return self._bar.__exit__(*error)

    def skip(self, answers: int):
        """Answers that an earlier run has written."""
        self._bar.update(answers)

    def tick(self, tokens: int):
        """One answer more."""
        self._tokens += tokens
        self._bar.update(1)
        self._bar.set_postfix_str(f"{self._tokens / (time.monotonic() - self._started):.0f} tokens/s", refresh=False)


@dataclass
class Answer:
    """
    One turn of the target.

    Args:
        ids (`list[int]`): its tokens without the end token.
        text (`str`): what they say.
        end_id (`int`, *optional*): the token it ended with; `None` if it was cut.
    """

    ids: list[int]
    text: str
    end_id: int | None


@dataclass
class Failure:
    """
    Why there is no answer.

    Args:
        reason (`str`): a few words to count by.
        detail (`str`): what was wrong with this one.
        again (`bool`, *optional*, defaults to `False`): whether it may go well another time.
    """

    reason: str
    detail: str
    again: bool = False


class _Chat:
    """One conversation: what is said so far, and what the user has still to say."""

    def __init__(self, conversation: dict):
        self.id, self.source = conversation["id"], conversation["source"]
        messages = conversation["messages"]
        self.messages = [message for message in messages[:1] if message["role"] == "system"]
        self.left = [message for message in messages if message["role"] == "user"]
        self.answers: list[Answer] = []
        self.failure: Failure | None = None

    def ask(self) -> list[dict]:
        return [*self.messages, self.left[0]]

    def take(self, result: Answer | Failure):
        if isinstance(result, Failure):
            self.failure, self.left = result, []
            return
        self.messages += [self.left.pop(0), {"role": "assistant", "content": result.text}]
        self.answers.append(result)

    def row(self, eos_token_id: int) -> dict:
        *earlier, last = [_answer_columns(answer, eos_token_id) for answer in self.answers]
        row = {"id": self.id, "source": self.source, "messages": self.messages, **last}
        return {**row, "earlier": earlier} if earlier else row


def _answer_columns(answer: Answer, eos_token_id: int) -> dict:
    columns = {"response_ids": answer.ids, "finish": "length" if answer.end_id is None else "stop"}
    return columns if answer.end_id in (None, eos_token_id) else {**columns, "end_id": answer.end_id}


def answer_chats(answer, conversations: Sequence[dict], shard: int, tick: Callable[[int], None]):
    """
    Every user turn of conversations answered in turn: an answer stands in the next prompt instead of the one that the
    data had there.

    Args:
        answer ([`TargetAnswers`] or the like): called with `(requests, shard, turn, tick)`, `requests` a list of
            `(id, messages)`; gives an [`Answer`] or a [`Failure`] for each.
        conversations (sequence of `dict`): as [`~retrace_hf.data.sources.load_conversations`] gives them.
        shard (`int`): its number, which the random stream depends on.
        tick (`Callable[[int], None]`): called after each answer with its tokens.

    Returns:
        `tuple[list[dict], list[dict]]`: responses in the order of the conversations, and failures, `{"id", "turn",
        "reason", "detail", "again"}`. A conversation that fails behind its first turn is kept up to there.
    """
    chats = [_Chat(conversation) for conversation in conversations]
    turn = 0
    while open_chats := [chat for chat in chats if chat.left]:
        results = answer([(chat.id, chat.ask()) for chat in open_chats], shard, turn, tick)
        for chat, result in zip(open_chats, results, strict=True):
            chat.take(result)
        turn += 1
    failed = [
        {"id": chat.id, "turn": len(chat.answers), **vars(chat.failure)} for chat in chats if chat.failure is not None
    ]
    for failure in failed:
        logger.warning("No response for prompt %s: %s: %s", failure["id"], failure["reason"], failure["detail"])
    # In the order of the prompts, whatever order they were answered in.
    return [chat.row(answer.eos_token_id) for chat in chats if chat.answers], failed


class TargetAnswers:
    """
    Answers of a target in this process, in batches of similar lengths.

    Args:
        target (`PreTrainedModel`): put in eval mode for the time of a call.
        tokenizer (`PreTrainedTokenizerBase`): the target's, with a chat template and an end token.
        max_new_tokens (`int`): tokens of an answer at most.
        batch_size (`int`): prompts answered at once.
        sampling (`dict`, *optional*): `temperature`, `top_p`, `top_k`; greedy without it.
        seed (`int`, *optional*, defaults to 0): every shard has its own stream.
        chat_template_kwargs (`dict`, *optional*): passed to the chat template.
    """

    def __init__(
        self, target, tokenizer, max_new_tokens, batch_size, sampling=None, seed=0, chat_template_kwargs=None
    ):
        check_sizes(max_new_tokens=max_new_tokens, batch_size=batch_size)
        if tokenizer.eos_token_id is None:
            raise ValueError(
                "The tokenizer has no eos token; set tokenizer.eos_token to the token that ends an answer."
            )
        check_chat_template(tokenizer)
        self.target, self.tokenizer, self.batch_size, self.seed = target, tokenizer, batch_size, seed
        self.generate_kwargs = {
            "max_new_tokens": max_new_tokens,
            "do_sample": sampling is not None,
            **(sampling or {}),
        }
        self.template_kwargs = chat_template_kwargs or {}
        self.eos_token_id = tokenizer.eos_token_id
        self.stop_ids = stop_ids(target.generation_config, tokenizer)
        config = target.config.get_text_config(decoder=True)
        self.positions = getattr(config, "max_position_embeddings", None)
        # The tokens both know: models have rows to spare, and some tokenizers a token that their model lacks.
        self.num_tokens = min(len(tokenizer), target.get_input_embeddings().weight.shape[0])

    def __call__(self, requests, shard: int, turn: int, tick: Callable[[int], None]) -> list[Answer | Failure]:
        results, encoded = {}, []
        for number, (_, messages) in enumerate(requests):
            ids = self._render(messages)
            if isinstance(ids, Failure):
                results[number] = ids
            else:
                encoded.append((number, ids))
        # Prompts of similar length together, so that little is padded.
        encoded.sort(key=lambda pair: len(pair[1]))
        was_training = self.target.training
        self.target.eval()
        try:
            with torch.random.fork_rng(devices=_cuda_devices(self.target)):
                mixed_seed(self.seed, shard, turn)
                for start in range(0, len(encoded), self.batch_size):
                    batch = encoded[start : start + self.batch_size]
                    answers = self._answer([ids for _, ids in batch])
                    for (number, _), answer in zip(batch, answers, strict=True):
                        results[number] = answer
                        tick(len(answer.ids) if isinstance(answer, Answer) else 0)
        finally:
            self.target.train(was_training)
        return [results[number] for number in range(len(requests))]

    def _render(self, messages: list[dict]) -> list[int] | Failure:
        try:
            ids = render_prompt(self.tokenizer, messages, **self.template_kwargs)
        except Exception as error:  # a template raises what it likes, and jinja2 for it
            return Failure("chat template", str(error))
        if max(ids, default=0) >= self.num_tokens:
            return self._unknown_token(max(ids))
        needed = len(ids) + self.generate_kwargs["max_new_tokens"]
        if self.positions is not None and needed > self.positions:
            new = self.generate_kwargs["max_new_tokens"]
            return Failure(
                "too long",
                f"{len(ids)} prompt tokens and {new} new ones exceed the target's {self.positions} positions",
            )
        return ids

    def _answer(self, batch: list[list[int]]) -> list[Answer | Failure]:
        """Answers for a batch. If it fails as a whole its prompts are tried one by one."""
        try:
            return self._generate(batch)
        except (RuntimeError, ValueError, IndexError) as error:
            if len(batch) == 1:
                return [Failure("target", f"{type(error).__name__}: {error}")]
        return [answer for ids in batch for answer in self._answer([ids])]

    def _generate(self, batch: list[list[int]]) -> list[Answer | Failure]:
        longest = max(map(len, batch))
        pad_token_id = self.tokenizer.pad_token_id
        pad_token_id = self.eos_token_id if pad_token_id is None else pad_token_id
        input_ids = torch.full((len(batch), longest), pad_token_id)
        attention_mask = torch.zeros_like(input_ids)
        for i, ids in enumerate(batch):
            # On the left: every answer starts in the same column.
            input_ids[i, longest - len(ids) :] = torch.tensor(ids)
            attention_mask[i, longest - len(ids) :] = 1
        output = self.target.generate(
            input_ids=input_ids.to(self.target.device),
            attention_mask=attention_mask.to(self.target.device),
            pad_token_id=pad_token_id,
            **self.generate_kwargs,
        )
        answers = [to_answer(ids, self.tokenizer, self.stop_ids) for ids in output[:, longest:].tolist()]
        unknown = [max(answer.ids, default=0) for answer in answers]
        return [self._unknown_token(i) if i >= self.num_tokens else a for i, a in zip(unknown, answers)]

    def _unknown_token(self, token: int) -> Failure:
        return Failure(
            "beyond the vocabulary",
            f"token {token}, of {self.num_tokens} that the tokenizer and the model share; are they of one target?",
        )


def to_answer(ids: list[int], tokenizer, stop_ids: set[int]) -> Answer:
    """Generated tokens, cut at the first that ends an answer."""
    end = next((i for i, token in enumerate(ids) if token in stop_ids), len(ids))
    return Answer(ids[:end], tokenizer.decode(ids[:end]), ids[end] if end < len(ids) else None)


def stop_ids(generation_config, tokenizer) -> set[int]:
    """The tokens that end an answer."""
    ids = generation_config.eos_token_id
    ids = [] if ids is None else [ids] if isinstance(ids, int) else ids
    return {*ids, tokenizer.eos_token_id}


def prompts_digest(prompts: Sequence[dict]) -> str:
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps([prompt["id"], prompt["source"], prompt["prompt"]]).encode())
    return digest.hexdigest()


def claim_folder(path: Path, settings: dict):
    """Writes down what the shards of a folder are made from, or checks that it is the same."""
    wanted = json.dumps(settings, sort_keys=True, indent=2)
    note = path / "settings.json"
    if note.is_file():
        if note.read_text(encoding="utf-8") != wanted:
            raise ValueError(
                f"The shards in {path} were made from something else or with other settings ({note}). Give another "
                "folder, or delete this one."
            )
        return
    write_text(note, wanted)


def _cuda_devices(target) -> list[int]:
    return list(range(torch.cuda.device_count())) if target.device.type == "cuda" else []


def _count(path: Path, prompts: int) -> dict[str, int]:
    counts = Counter(prompts=prompts, answered=0, failed=0, stop=0, length=0, tokens=0)
    for shard_path in sorted(path.glob("responses_*.jsonl.gz")):
        for row in read_responses(shard_path):
            counts.update({"answered": 1, row["finish"]: 1, "tokens": len(row["response_ids"])})
    counts["failed"] = prompts - counts["answered"]
    if counts["failed"]:
        logger.warning("%d of %d prompts have no response.", counts["failed"], prompts)
    return dict(counts)
