"""
The target's own responses: the file format, and making more of them.

One JSON object a line: `{"id": str, "source": str, "messages": [..., {"role": "assistant", "content": str}],
"response_ids": list[int], "finish": "stop" | "length"}`. `response_ids` are the tokens the target generated, without
the end token. A drafter learns most from text its target would write itself.

Text that has tokens only (chats of the target with itself, `self_chat.py`) is `{"id": str, "source": str, "input_ids":
list[int], "answers": [[start, end], ...]}`: the target's greedy tokens stand from start to end, end excluded.
"""

import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from tqdm.auto import tqdm

from ..files import write_text, written_whole
from .prompts import open_text, read_jsonl, render_prompt, require


logger = logging.getLogger(__name__)

_CURE = (
    'A response is {"id": text, "source": text, "messages": [..., {"role": "assistant", "content": text}], '
    '"response_ids": [token id, ...], "finish": "stop" or "length"}; retrace_hf.data.responses.regenerate writes it.'
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
    ids = require(row, "response_ids", list, where, _CURE)
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ValueError(f"{where}: column 'response_ids' must hold token ids, none negative. {_CURE}")
    if row.get("finish") not in ("stop", "length"):
        raise ValueError(f"{where}: column 'finish' must be 'stop' or 'length', got {row.get('finish')!r}. {_CURE}")


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
        seed (`int`, *optional*, defaults to 0): with `do_sample`; every shard has its own stream.
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
    _check_sizes(prompts, tokenizer, max_new_tokens=max_new_tokens, batch_size=batch_size, shard_size=shard_size)
    generate_kwargs = {"max_new_tokens": max_new_tokens, "do_sample": do_sample}
    generate_kwargs |= {"temperature": temperature, "top_p": top_p, "top_k": top_k} if do_sample else {}
    settings = {**generate_kwargs, "shard_size": shard_size, "chat_template_kwargs": chat_template_kwargs or {}}
    settings |= {"seed": seed} if do_sample else {}
    path = Path(path)
    claim_folder(path, {**settings, "prompts_sha256": prompts_digest(prompts)})

    was_training = target.training
    target.eval()
    started, new_tokens = time.monotonic(), 0
    try:
        with tqdm(total=len(prompts), unit="prompt", desc="responses", disable=not progress) as bar:
            for shard, start in enumerate(range(0, len(prompts), shard_size)):
                shard_path = path / f"responses_{shard:05d}.jsonl.gz"
                chunk = prompts[start : start + shard_size]
                if shard_path.is_file():
                    bar.update(len(chunk))
                    continue
                rows = {}
                with torch.random.fork_rng(devices=_cuda_devices(target)):
                    torch.manual_seed(seed + shard)
                    for batch in _batches(chunk, tokenizer, batch_size, chat_template_kwargs or {}):
                        for row in _answer(target, tokenizer, batch, generate_kwargs):
                            rows[row["id"]] = row
                            new_tokens += len(row["response_ids"])
                        bar.update(len(batch))
                        bar.set_postfix_str(f"{new_tokens / (time.monotonic() - started):.0f} tokens/s")
                # In the order of the prompts, whatever order they were answered in.
                write_responses((rows[prompt["id"]] for prompt in chunk if prompt["id"] in rows), shard_path)
    finally:
        target.train(was_training)
    return _count(path, len(prompts))


def _check_sizes(prompts: Sequence[dict], tokenizer, **sizes: int):
    if not prompts:
        raise ValueError("There are no prompts to answer; give at least one.")
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}.")
    if tokenizer.eos_token_id is None:
        raise ValueError("The tokenizer has no eos token; set tokenizer.eos_token to the token that ends an answer.")


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


def _batches(prompts: Sequence[dict], tokenizer, batch_size: int, chat_template_kwargs: dict) -> Iterator[list]:
    """Lists of `(prompt, input_ids)`, prompts of similar length together, so that little is padded."""
    encoded = [
        (prompt, render_prompt(tokenizer, [{"role": "user", "content": prompt["prompt"]}], **chat_template_kwargs))
        for prompt in prompts
    ]
    encoded.sort(key=lambda pair: len(pair[1]))
    for start in range(0, len(encoded), batch_size):
        yield encoded[start : start + batch_size]


def _answer(target, tokenizer, batch: list, generate_kwargs: dict) -> list[dict]:
    """Rows for a batch. If it fails as a whole its prompts are tried one by one, and those that fail are left out."""
    try:
        return _generate_rows(target, tokenizer, batch, generate_kwargs)
    except (RuntimeError, ValueError, IndexError) as error:
        if len(batch) == 1:
            logger.warning("No response for prompt %s: %s", batch[0][0]["id"], error)
            return []
    return [row for pair in batch for row in _answer(target, tokenizer, [pair], generate_kwargs)]


def _generate_rows(target, tokenizer, batch: list, generate_kwargs: dict) -> list[dict]:
    longest = max(len(ids) for _, ids in batch)
    positions = getattr(target.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and longest + generate_kwargs["max_new_tokens"] > positions:
        raise ValueError(
            f"{longest} prompt tokens and {generate_kwargs['max_new_tokens']} new ones exceed the target's "
            f"{positions} positions"
        )
    pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    input_ids = torch.full((len(batch), longest), pad_token_id)
    attention_mask = torch.zeros_like(input_ids)
    for i, (_, ids) in enumerate(batch):
        # On the left: every answer starts in the same column.
        input_ids[i, longest - len(ids) :] = torch.tensor(ids)
        attention_mask[i, longest - len(ids) :] = 1
    output = target.generate(
        input_ids=input_ids.to(target.device),
        attention_mask=attention_mask.to(target.device),
        pad_token_id=pad_token_id,
        **generate_kwargs,
    )
    stop_ids = _stop_ids(target, tokenizer)
    return [_to_row(prompt, ids, tokenizer, stop_ids) for (prompt, _), ids in zip(batch, output[:, longest:].tolist())]


def _stop_ids(target, tokenizer) -> set[int]:
    ids = target.generation_config.eos_token_id
    ids = [] if ids is None else [ids] if isinstance(ids, int) else ids
    return {*ids, tokenizer.eos_token_id}


def _to_row(prompt: dict, ids: list[int], tokenizer, stop_ids: set[int]) -> dict:
    end = next((i for i, token in enumerate(ids) if token in stop_ids), len(ids))
    # "stop" stands for the tokenizer's end token, which training appends. An answer that ended in another one is
    # kept without its end.
    stopped = end < len(ids) and ids[end] == tokenizer.eos_token_id
    return {
        "id": prompt["id"],
        "source": prompt["source"],
        "messages": [
            {"role": "user", "content": prompt["prompt"]},
            {"role": "assistant", "content": tokenizer.decode(ids[:end])},
        ],
        "response_ids": ids[:end],
        "finish": "stop" if stopped else "length",
    }


def _count(path: Path, prompts: int) -> dict[str, int]:
    counts = Counter(prompts=prompts, answered=0, failed=0, stop=0, length=0, tokens=0)
    for shard_path in sorted(path.glob("responses_*.jsonl.gz")):
        for row in read_responses(shard_path):
            counts.update({"answered": 1, row["finish"]: 1, "tokens": len(row["response_ids"])})
    counts["failed"] = prompts - counts["answered"]
    if counts["failed"]:
        logger.warning("%d of %d prompts have no response.", counts["failed"], prompts)
    return dict(counts)
