"""From prompts to training data: sources, answers turn by turn, masks, and runs that were stopped."""

import errno
import gzip
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from datasets import Dataset, DatasetDict

from retrace_hf import cli
from retrace_hf.data import prepare as prepare_module
from retrace_hf.data import responses as responses_module
from retrace_hf.data.prepare import PrepareOptions, prepare
from retrace_hf.data.prompts import render_prompt
from retrace_hf.data.responses import read_responses
from retrace_hf.data.sources import load_conversations
from retrace_hf.data.tokenize import (
    has_generation_tags,
    spans_of,
    tokenize_conversation,
    tokenize_response,
    tokenize_responses,
)

from .fixtures import killed_at_random, letters_chat_target, letters_tokenizer, save_letters_target


ROOT = Path(__file__).parents[1]


def words(length: int, seed: int) -> str:
    drawn = random.Random(seed)
    return "".join(chr(97 + drawn.randrange(9)) + chr(97 + drawn.randrange(20)) for _ in range(length))


def conversation(number: int, turns: int) -> dict:
    """User turns with answers between them that are not the target's."""
    messages = []
    for turn in range(turns):
        messages += [
            {"role": "user", "content": words(2 + number % 5, 10 * number + turn)},
            {"role": "assistant", "content": "aaaa"},
        ]
    return {"id": f"p{number}", "source": "chat", "messages": messages[:-1] if number % 2 else messages}


def write_lines(path: Path, *rows) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a tiny target, `target`, and prompts of one to three turns, `prompts.jsonl`."""
    home = tmp_path_factory.mktemp("prepare")
    save_letters_target(home / "target")
    write_lines(home / "prompts.jsonl", *(conversation(i, turns=1 + i % 3) for i in range(12)))
    return home


def options(home: Path, output_dir: Path, **changes) -> PrepareOptions:
    fixed = {"target": str(home / "target"), "max_new_tokens": 12, "shard_size": 4, "batch_size": 4, "progress": False}
    return PrepareOptions(**{"source": str(home / "prompts.jsonl"), "output_dir": str(output_dir), **fixed, **changes})


def contents(folder: Path) -> dict:
    """What a folder of prepared data says, without what the writing of it leaves: times in gzip headers, commands."""
    said = {}
    for path in sorted(folder.iterdir()):
        if path.suffix == ".gz":
            said[path.name] = gzip.decompress(path.read_bytes())
        elif path.name.startswith("report_"):
            said[path.name] = {k: v for k, v in json.loads(path.read_text()).items() if k != "files"}
        elif path.name == "prepare.json":
            said[path.name] = {k: v for k, v in json.loads(path.read_text()).items() if k != "command"}
        elif path.name != ".lock":
            said[path.name] = path.read_bytes()
    return said


@pytest.fixture(scope="module")
def undisturbed(home):
    folder = home / "undisturbed"
    return folder, prepare(options(home, folder))


def rows_of(folder: Path, kind: str) -> list[dict]:
    return [row for path in sorted(folder.glob(f"{kind}_*.jsonl.gz")) for row in read_responses(path)]


# Sources


SHAREGPT = {
    "id": "s",
    "conversations": [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "Hi"},
        {"from": "gpt", "value": "Hello"},
        {"from": "human", "value": "Why?"},
    ],
}
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Why?"},
]


def save_as(kind: str, rows: list[dict], folder: Path) -> Path:
    path = folder / kind
    if kind == "rows.jsonl":
        return write_lines(path, *rows)
    if kind == "rows.jsonl.gz":
        path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    elif kind == "rows.json":
        path.write_text(json.dumps(rows))
    elif kind == "rows.parquet":
        Dataset.from_list(rows).to_parquet(path)
    elif kind == "saved":
        DatasetDict({"train": Dataset.from_list(rows)}).save_to_disk(path)
    else:  # what load_dataset finds in a repository of the Hub
        (path / "data").mkdir(parents=True)
        Dataset.from_list(rows).to_parquet(path / "data" / "train-00000-of-00001.parquet")
    return path


@pytest.mark.parametrize("kind", ["rows.jsonl", "rows.jsonl.gz", "rows.json", "rows.parquet", "saved", "repository"])
def test_conversations_from_every_kind_of_source(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    path = save_as(kind, [SHAREGPT], tmp_path)
    conversations, unusable = load_conversations(path)
    assert conversations == [{"id": "s", "source": kind.split(".")[0], "messages": MESSAGES}] and not unusable
    with pytest.raises(ValueError, match="no column 'prompts'; there are 'id', 'conversations'"):
        load_conversations(path, column="prompts")
    if kind in ("saved", "repository"):
        with pytest.raises(ValueError, match=r"(?s)nowhere.*train.*--split"):
            load_conversations(path, split="nowhere")


def test_a_split_of_one_file_is_refused(tmp_path):
    """It would be left out in silence."""
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"messages": MESSAGES}) + "\n")
    for wrong in ({"split": "test"}, {"config": "en"}):
        with pytest.raises(ValueError, match="one file, without splits and configs"):
            load_conversations(str(file), **wrong)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("Hi", [("user", "Hi")]),
        (["Hi", "Why?"], [("user", "Hi"), ("user", "Why?")]),
        (MESSAGES[1:3], [("user", "Hi"), ("assistant", "Hello")]),
        ([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], [("user", "Hi")]),
        ([{"role": "human", "content": "Hi"}], [("user", "Hi")]),
        ("  ", "empty"),
        ([], "empty"),
        ([{"role": "user", "content": ""}], "empty"),
        (3, "not text"),
        ([{"role": "user", "content": [{"type": "image"}]}], "not text"),
        (["Hi", 3], "not text"),
        ("\ud800", "not text"),
        ([{"role": "tool", "content": "Hi"}], "unknown role"),
        ([{"content": "Hi"}], "unknown role"),
        (MESSAGES[2:], "turns out of order"),
        (MESSAGES[1:2] * 2, "turns out of order"),
        (MESSAGES[:1], "turns out of order"),
    ],
)
def test_forms_of_a_prompt(tmp_path, value, expected):
    path = write_lines(tmp_path / "p.jsonl", {"prompt": "Hi", "id": "good"}, {"prompt": value, "id": "x"})
    conversations, unusable = load_conversations(path, column="prompt")
    assert conversations[0]["messages"] == [{"role": "user", "content": "Hi"}]
    if isinstance(expected, str):
        (entry,) = unusable
        assert (entry["id"], entry["turn"], entry["reason"]) == ("x", 0, expected) and "line 2" in entry["detail"]
    else:
        assert [(m["role"], m["content"]) for m in conversations[1]["messages"]] == expected


def test_ids_are_unique_and_system_prompts_are_put_in(tmp_path):
    path = write_lines(tmp_path / "p.jsonl", SHAREGPT, {**SHAREGPT, "conversations": SHAREGPT["conversations"][1:]})
    conversations, _ = load_conversations(path, system_prompt="Be kind.")
    assert [row["id"] for row in conversations] == ["s", "s#1"]
    assert [row["messages"][0]["content"] for row in conversations] == ["Be brief.", "Be kind."]
    assert len(load_conversations(path, limit=1)[0]) == 1


def test_sources_that_will_not_do(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "bad.parquet").write_text("no parquet")
    (tmp_path / "notes.txt").write_text("Hi")
    write_lines(tmp_path / "broken.jsonl", {"prompt": "Hi"}, '{"prompt": "H')
    write_lines(tmp_path / "unusable.jsonl", {"prompt": ""}, {"prompt": []})
    Dataset.from_dict({"prompt": []}).to_parquet(tmp_path / "empty.parquet")
    for name, error, message in (
        ("empty.jsonl", ValueError, "holds no rows"),
        ("empty.parquet", ValueError, "holds no rows"),
        ("nowhere.jsonl", FileNotFoundError, "is not a file"),
        ("nowhere.parquet", FileNotFoundError, "is not a file"),
        ("nowhere", FileNotFoundError, "neither a file nor a folder"),
        ("bad.parquet", ValueError, "damaged or not a Parquet file"),
        ("notes.txt", ValueError, "was expected"),
        ("broken.jsonl", ValueError, "broken.jsonl, line 2, column 12: not JSON"),
        ("unusable.jsonl", ValueError, "None of the 2 rows .* empty"),
    ):
        with pytest.raises(error, match=message):
            load_conversations(tmp_path / name)
    with pytest.raises((OSError, ValueError), match="org/no-such-dataset"):
        load_conversations("org/no-such-dataset")


# Masks


PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TAGGED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n{% else %}{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "chatml": PLAIN,
    "tags": TAGGED,
    "tags_without_the_end": TAGGED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>"),
    "tags_with_the_line_break": TAGGED.replace("{% endgeneration %}\n", "\n{% endgeneration %}"),
    # With one line break after the header, where Llama 3 has two: SmolLM2's tokenizer splits two before a word.
    "llama3": (
        "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n"
        "{{ m.content | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n{% endif %}"
    ),
}
# As Qwen3's: the thinking of all but the last answer is dropped.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT = [
    {"role": "user", "content": "Why is the sky blue?"},
    {"role": "assistant", "content": "Scattering.\n\nOf light…"},
    {"role": "user", "content": "\nAnd the sea?"},
    {"role": "assistant", "content": "It mirrors the sky."},
]


@pytest.fixture
def tokenizer(smollm2, monkeypatch):
    """SmolLM2's, also with Llama 3's special tokens; its template can be changed."""
    tokenizer = type(smollm2[1])(tokenizer_object=smollm2[1].backend_tokenizer, eos_token="<|im_end|>")
    names = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    tokenizer.add_tokens(names, special_tokens=True)
    return tokenizer


def learnt(tokenizer, ids: list[int], mask: list[int]) -> list[str]:
    return [tokenizer.decode(ids[start:end]) for start, end in spans_of(mask)]


@pytest.mark.parametrize("name", TEMPLATES)
def test_mask_of_a_text_is_the_answers_and_their_end_tokens(tokenizer, name):
    tokenizer.chat_template = TEMPLATES[name]
    end = "<|eot_id|>" if name == "llama3" else "<|im_end|>"
    assert has_generation_tags(tokenizer) == name.startswith("tags")
    ids, mask = tokenize_conversation(CHAT, tokenizer)
    assert learnt(tokenizer, ids, mask) == [CHAT[1]["content"] + end, CHAT[3]["content"] + end]
    assert ids[: mask.index(1)] == render_prompt(tokenizer, CHAT[:1])
    whole = tokenizer.apply_chat_template(CHAT, return_dict=True)["input_ids"]
    assert ids == whole[: len(ids)]


def test_mask_of_generated_answers(tokenizer):
    """The target's own tokens, with whatever token it ended them."""
    for name, template in TEMPLATES.items():
        tokenizer.chat_template = template
        end = "<|eot_id|>" if name == "llama3" else "<|im_end|>"
        answers = [tokenizer(CHAT[i]["content"], add_special_tokens=False)["input_ids"] for i in (1, 3)]
        ended = {"finish": "stop", "end_id": tokenizer.convert_tokens_to_ids(end)}
        row = {"id": "a", "source": "s", "messages": CHAT, "response_ids": answers[1], **ended}
        tokens = tokenize_response({**row, "earlier": [{"response_ids": answers[0], **ended}]}, tokenizer)
        assert learnt(tokenizer, tokens["input_ids"], tokens["loss_mask"]) == [
            CHAT[i]["content"] + end for i in (1, 3)
        ]
        # Cut at the limit: the end that the template writes is not the target's. Split otherwise: not what it wrote.
        cut = tokenize_response({**row, "earlier": [{"response_ids": answers[0], "finish": "length"}]}, tokenizer)
        assert learnt(tokenizer, cut["input_ids"], cut["loss_mask"])[0] == CHAT[1]["content"]
        letters = [
            i for letter in CHAT[1]["content"] for i in tokenizer(letter, add_special_tokens=False)["input_ids"]
        ]
        other = tokenize_response({**row, "earlier": [{"response_ids": letters, **ended}]}, tokenizer)
        assert learnt(tokenizer, other["input_ids"], other["loss_mask"]) == [CHAT[3]["content"] + end]
    with pytest.raises(ValueError, match="'earlier' must have one object for each of 1 earlier answers"):
        tokenize_response({**row, "earlier": [row, row]}, tokenizer)


def test_answers_that_the_template_changes_are_not_learnt(tokenizer):
    tokenizer.chat_template = THINKING
    thought = [
        {**m, "content": f"<think>\nHm.\n</think>\n\n{m['content']}"} if i % 2 else m for i, m in enumerate(CHAT)
    ]
    ids, mask = tokenize_conversation(thought, tokenizer)
    assert learnt(tokenizer, ids, mask) == [thought[3]["content"] + "<|im_end|>"]
    assert tokenizer.decode(ids).count("Hm.") == 1  # as the target read it in the last turn
    answers = [tokenizer(thought[i]["content"], add_special_tokens=False)["input_ids"] for i in (1, 3)]
    row = {"id": "a", "source": "s", "messages": thought, "response_ids": answers[1], "finish": "stop"}
    tokens = tokenize_response({**row, "earlier": [{"response_ids": answers[0], "finish": "stop"}]}, tokenizer)
    assert (tokens["input_ids"], tokens["loss_mask"]) == (ids, mask)
    # One that changes the last, too, leaves nothing: the row is dropped where rows are counted.
    tokenizer.chat_template = PLAIN.replace("m.content", "m.content | upper")
    assert not any(tokenize_conversation(CHAT, tokenizer)[1])
    tokenizer.chat_template = TAGGED.replace("m.content", "m.content | upper")
    assert not any(tokenize_conversation(CHAT, tokenizer)[1])


# A whole run


def test_every_answer_is_the_targets_own(home, undisturbed):
    folder, counts = undisturbed
    target, tokenizer = letters_chat_target()
    ends = set(target.generation_config.eos_token_id)
    rows = rows_of(folder, "responses")
    assert [row["id"] for row in rows] == [f"p{i}" for i in range(12)]
    endings = set()
    for row, number in zip(rows, range(12)):
        answers = [*row.get("earlier", []), {k: row[k] for k in ("response_ids", "finish", "end_id") if k in row}]
        assert len(answers) == 1 + number % 3
        for turn, answer in enumerate(answers):
            prompt = torch.tensor([render_prompt(tokenizer, row["messages"][: 2 * turn + 1])])
            plain = target.generate(input_ids=prompt, max_new_tokens=12, do_sample=False, pad_token_id=0)
            end = [answer.get("end_id", tokenizer.eos_token_id)] if answer["finish"] == "stop" else []
            assert answer["response_ids"] + end == plain[0, prompt.shape[1] :].tolist()
            assert set(end) <= ends
            endings.add((end or [None])[0])
    assert endings == {None, *ends}  # the target ends answers in every way there is
    assert counts["answers"] == 24 and counts["prompts"] == counts["answered"] == 12
    assert counts["stop"] + counts["length"] == 24 and counts["learnt_answers"] > counts["rows"]


def test_rows_of_tokens_are_what_training_takes(home, undisturbed):
    folder, counts = undisturbed
    tokenizer = letters_chat_target()[1]
    dataset = tokenize_responses(sorted(folder.glob("tokens_*.jsonl.gz")), tokenizer)
    again = tokenize_responses(sorted(folder.glob("responses_*.jsonl.gz")), tokenizer)
    assert dataset["input_ids"][:] == again["input_ids"][:] and dataset["loss_mask"][:] == again["loss_mask"][:]
    assert len(dataset) == counts["rows"] and sum(map(sum, dataset["loss_mask"])) == counts["learnt_tokens"]
    dropped = counts["left_out"].get("nothing to learn", 0)
    assert counts["rows"] + dropped == 12
    said = {row["id"]: row["messages"] for row in rows_of(folder, "responses")}
    for row in dataset:
        answers = [m["content"] for m in said[row["id"]] if m["role"] == "assistant"]
        spoken = learnt(tokenizer, row["input_ids"], row["loss_mask"])
        assert spoken and all(
            any(text.removesuffix("<|end|>").removesuffix("<|eot|>") == answer for answer in answers)
            for text in spoken
        )


def test_note_says_what_the_data_is_made_with(home, tmp_path):
    changes = {"temperature": 0.7, "top_k": 5, "system_prompt": "abab", "enable_thinking": False, "seed": 3}
    counts = prepare(options(home, tmp_path, limit=2, max_length=30, **changes))
    note = json.loads((tmp_path / "prepare.json").read_text())
    assert note["finished"] and note["counts"] == counts and counts["prompts"] == 2
    settings = note["settings"]
    for name in ("temperature", "top_k", "system_prompt", "seed"):
        assert settings[name] == changes[name]
    assert settings["chat_template_kwargs"] == {"enable_thinking": False} and settings["max_new_tokens"] == 12
    assert {len(settings[f"{name}_sha256"]) for name in ("data", "tokenizer", "chat_template")} == {64}
    assert len(settings["target_fingerprint"]) == 64 and set(note["versions"]) >= {"torch", "transformers"}
    assert note["command"] and note["target"] and note["max_length"] == 30
    assert rows_of(tmp_path, "responses")[0]["messages"][0] == {"role": "system", "content": "abab"}


def test_sampled_answers_are_repeated_by_their_seed(home, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        prepare(options(home, tmp_path / name, temperature=1.0, seed=seed, limit=5))
    a, b, c = (rows_of(tmp_path / name, "responses") for name in "abc")
    assert a == b and a != c


def test_prompts_that_fail_are_kept_by_reason(home, tmp_path, caplog):
    template = save_letters_target(
        home / "strict",
        "{% for m in messages %}{% if m.content == 'bbbb' %}{{ raise_exception('no b') }}{% endif %}{% endfor %}",
    )
    rows = [
        conversation(2, 1),
        {"id": "long", "messages": [{"role": "user", "content": words(600, 1)}]},
        {"id": "empty", "messages": [{"role": "user", "content": ""}]},
        {"id": "template", "messages": [{"role": "user", "content": "bbbb"}]},
        {"id": "second", "messages": [{"role": "user", "content": text} for text in ("abab", "bbbb")]},
    ]
    rows[-1]["messages"].insert(1, {"role": "assistant", "content": "aa"})
    source = write_lines(tmp_path / "p.jsonl", *rows)
    counts = prepare(options(home, tmp_path / "out", source=str(source), target=str(template)))
    assert counts["left_out"] == {"empty": 1, "too long": 1, "chat template": 2}
    assert (counts["prompts"], counts["answered"]) == (5, 2)
    left = [json.loads(line) for line in (tmp_path / "out" / "left_out.jsonl").read_text().splitlines()]
    assert {(e["id"], e["turn"]): e["reason"] for e in left} == {
        ("empty", 0): "empty",
        ("long", 0): "too long",
        ("template", 0): "chat template",
        ("second", 1): "chat template",  # kept up to its first answer
    }
    assert [len(row["messages"]) for row in rows_of(tmp_path / "out", "responses")] == [2, 2]
    assert "Left out, wholly or in part: 2 chat template" in caplog.text
    only = write_lines(tmp_path / "q.jsonl", rows[1])
    with pytest.raises(ValueError, match="None of the 1 prompts gave a row .* too long"):
        prepare(options(home, tmp_path / "none", source=str(only)))


def test_answers_can_be_kept(home, tmp_path):
    counts = prepare(options(home, tmp_path, keep_answers=True))
    # Of the 12 prompts 4 have one turn and, where their number is odd, no answer.
    assert counts["left_out"] == {"no answer": 2} and counts["answered"] == 10 and counts["rows"] == 10
    tokenizer = letters_chat_target()[1]
    assert not list(tmp_path.glob("responses_*"))
    for row in tokenize_responses(sorted(tmp_path.glob("tokens_*")), tokenizer):
        assert set(learnt(tokenizer, row["input_ids"], row["loss_mask"])) == {"aaaa<|end|>"}


def test_options_that_will_not_do(home, tmp_path):
    for changes, message in (
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"shard_size": 0}, "shard_size must be at least 1"),
        ({"temperature": -1.0}, "temperature must be from 0"),
        ({"top_p": 0.9}, "go with a temperature"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p must be above 0"),
        ({"dtype": "int8"}, "dtype must be"),
        ({"keep_answers": True, "endpoint": "http://localhost"}, "without an endpoint"),
        ({"model": "x"}, "goes with an endpoint"),
    ):
        with pytest.raises(ValueError, match=message):
            options(home, tmp_path / "out", **changes)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file; give a folder"):
        prepare(options(home, tmp_path / "file"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "responses_00000.jsonl.gz").write_bytes(b"")
    with pytest.raises(ValueError, match="holds data of something else"):
        prepare(options(home, tmp_path / "other"))
    no_system = save_letters_target(
        home / "no_system",
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}",
    )
    with pytest.raises(ValueError, match="with a system prompt: System role not supported"):
        prepare(options(home, tmp_path / "out", target=str(no_system), system_prompt="Hi"))
    assert not (tmp_path / "out").exists()  # nothing is claimed by a run that could not start


def test_data_of_another_tokenizer_is_refused(home, undisturbed, smollm2):
    folder, _ = undisturbed
    files = sorted(folder.glob("tokens_*.jsonl.gz"))
    with pytest.raises(ValueError, match="tokens_00000.*made with the tokenizer of .*target.*retrace-hf prepare"):
        tokenize_responses(files, smollm2[1])
    with pytest.raises(ValueError, match="made with the tokenizer"):
        tokenize_responses(files, letters_tokenizer())


# Going on


def test_goes_on_where_it_stopped_and_keeps_settings_apart(home, undisturbed, tmp_path, monkeypatch):
    folder, counts = undisturbed
    out = tmp_path / "out"
    asked, real = [], prepare_module.answer_chats

    def stop_at_the_second(answer, conversations, shard, tick):
        asked.extend([shard] * bool(conversations))
        if asked == [0, 1]:
            raise KeyboardInterrupt
        return real(answer, conversations, shard, tick)

    monkeypatch.setattr(prepare_module, "answer_chats", stop_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        prepare(options(home, out))
    assert not json.loads((out / "prepare.json").read_text())["finished"]
    first = (out / "responses_00000.jsonl.gz").stat().st_mtime_ns
    assert prepare(options(home, out)) == counts and asked == [0, 1, 1, 2]
    assert contents(out) == contents(folder) and (out / "responses_00000.jsonl.gz").stat().st_mtime_ns == first
    # A truncated file is found and made again; so are tokens of another length, without asking the target.
    (out / "tokens_00001.jsonl.gz").write_bytes(b"cut")
    assert prepare(options(home, out)) == counts and asked[4:] == [1] and contents(out) == contents(folder)
    short = prepare(options(home, out, max_length=14))
    assert asked[5:] == [] and short["truncated"]
    assert max(len(row["input_ids"]) for row in rows_of(out, "tokens")) == 14
    assert prepare(options(home, out)) == counts and contents(out) == contents(folder)
    with pytest.raises(ValueError, match="made otherwise: max_new_tokens was 12, now 13.*--output-dir"):
        prepare(options(home, out, max_new_tokens=13))
    with pytest.raises(ValueError, match="made otherwise: limit was None, now 2; data_sha256"):
        prepare(options(home, out, limit=2))
    write_lines(tmp_path / "fewer.jsonl", conversation(0, 1))
    with pytest.raises(ValueError, match="made otherwise: source was .*, now .*fewer.jsonl.*data_sha256"):
        prepare(options(home, out, source=str(tmp_path / "fewer.jsonl")))
    assert contents(out) == contents(folder)


def test_a_full_disk_leaves_no_half_shard(home, undisturbed, tmp_path, monkeypatch):
    folder, counts = undisturbed
    real, room = responses_module.open_text, [5]

    class Full:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.file.close()

        def write(self, text):
            room[0] -= 1
            if room[0] < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return self.file.write(text)

    monkeypatch.setattr(
        responses_module, "open_text", lambda path, mode="r": Full(real(path, mode)) if mode == "w" else real(path)
    )
    with pytest.raises(OSError, match="Shard 0 .*No space left on device.*the same command goes on"):
        prepare(options(home, tmp_path))
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {".lock", "prepare.json", "responses_00000.jsonl.gz"}  # written whole, but not yet reported
    room[0] = 10**6
    assert prepare(options(home, tmp_path)) == counts and contents(tmp_path) == contents(folder)


def test_two_runs_do_not_share_a_folder(home, tmp_path, monkeypatch):
    real = prepare_module._fill

    def while_another_starts(*args):
        with pytest.raises(OSError, match="Another run is writing to"):
            prepare(options(home, tmp_path, limit=1))
        return real(*args)

    monkeypatch.setattr(prepare_module, "_fill", while_another_starts)
    prepare(options(home, tmp_path, limit=1))


def _run(fields: dict):
    torch.set_num_threads(1)
    prepare(PrepareOptions(**fields))


def test_killed_runs_end_as_an_undisturbed_one(home, undisturbed, tmp_path):
    folder, _ = undisturbed
    fields = vars(options(home, tmp_path))
    context = multiprocessing.get_context("forkserver")  # the imports are paid once
    context.set_forkserver_preload(["tests.test_prepare", "transformers.models.llama.modeling_llama"])

    def start():
        process = context.Process(target=_run, args=(fields,))
        process.start()
        return process

    # At moments that come on any machine: begun, one shard whole, two.
    hit = 0
    for name in ("prepare.json", "report_00000.json", "report_00001.json"):
        process = start()
        while not (tmp_path / name).exists() and process.is_alive():
            time.sleep(0.001)
        hit += process.is_alive()
        process.kill()
        process.join()
    assert hit
    _run(fields)
    assert contents(tmp_path) == contents(folder)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_commands_end_as_an_undisturbed_one(home, tmp_path):
    source = write_lines(tmp_path / "p.jsonl", *(conversation(i, turns=1 + i % 3) for i in range(60)))
    command = [sys.executable, "-m", "retrace_hf.cli", "prepare", source, "--target", home / "target"]
    command += ["--max-new-tokens", 12, "--shard-size", 2, "--batch-size", 4, "--temperature", 0.8, "--output-dir"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def start(folder=tmp_path / "killed"):
        return subprocess.Popen([*map(str, command), str(folder)], env=env, stderr=subprocess.DEVNULL)

    assert start(tmp_path / "whole").wait() == 0
    hit = killed_at_random(start, begun=tmp_path / "killed" / "prepare.json", kills=10, longest=20.0, seed=1)
    print(f"{hit} of 10 runs were killed before their end")
    assert hit >= 3
    assert start().wait() == 0
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


# The command


def run_command(monkeypatch, *arguments) -> int:
    monkeypatch.setattr(sys, "argv", ["retrace-hf", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    return exit.value.code or 0


def test_command(home, undisturbed, tmp_path, monkeypatch, capsys):
    folder, counts = undisturbed
    fixed = ["--target", home / "target", "--max-new-tokens", 12, "--shard-size", 4, "--batch-size", 4]
    run = ["prepare", home / "prompts.jsonl", "--output-dir", tmp_path / "out", *fixed]
    with monkeypatch.context() as patch:
        # What a shell starts in the background ignores Ctrl-C, these tests too.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        patch.setattr(prepare_module, "answer_chats", lambda *_: signal.raise_signal(signal.SIGINT))
        try:
            assert run_command(patch, *run) == 130
        finally:
            signal.signal(signal.SIGINT, before)
    said = capsys.readouterr()
    assert said.err.splitlines()[-1] == "retrace-hf: stopped; what is written is kept, and the same command goes on."
    assert run_command(monkeypatch, *run) == 0
    said = capsys.readouterr()
    assert json.loads(said.out.splitlines()[0]) == counts and "tokens/s" in said.err
    assert f"--responses {tmp_path / 'out'}/tokens_*.jsonl.gz" in said.out
    assert contents(tmp_path / "out") == {**contents(folder)}
    for changes, message in (
        (["--column", "nope"], "no column 'nope'; there are 'id', 'source', 'messages'"),
        (["--temperature", "-1"], "temperature must be from 0"),
        (["--max-new-tokens", "13"], "max_new_tokens was 12, now 13"),
    ):
        assert run_command(monkeypatch, *run, *changes) == 1
        last = capsys.readouterr().err.splitlines()[-1]
        assert last.startswith("retrace-hf: ") and message in last


def test_commands_of_the_readme_have_the_options_they_name():
    from typer.main import get_command

    known = {
        name
        for option in get_command(cli.app).commands["prepare"].params
        for name in (*option.opts, *option.secondary_opts)
    }
    readme = (ROOT / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    commands = [line.split("#")[0] for line in readme.splitlines() if line.startswith("retrace-hf prepare ")]
    assert len(commands) >= 2
    for command in commands:
        assert {word for word in command.split() if word.startswith("--")} <= known, command
