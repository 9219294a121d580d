"""Prompts, responses, token rows, batches, features."""

import errno
import functools
import gzip
import json
import pickle
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset

from retrace_hf import RetraceDataCollator
from retrace_hf.data import features as features_module
from retrace_hf.data.features import TargetFeatures, features_key
from retrace_hf.data.prompts import read_eval_prompts, read_prompts, render_prompt
from retrace_hf.data.responses import read_responses, regenerate, write_responses
from retrace_hf.data.tokenize import tokenize_response, tokenize_responses

from .fixtures import tiny_target


DATA = Path(__file__).parents[1] / "examples" / "data"
TAPS = [1, 2, 4]


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    return smollm2[1]


def response(tokenizer, answer="Because of scattering.", finish="stop", **changes):
    row = {
        "id": "a",
        "source": "chat",
        "messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": answer}],
        "response_ids": tokenizer(answer)["input_ids"],
        "finish": finish,
    }
    return row | changes


def write_lines(path, *rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return path


# Prompts


def test_shipped_prompts_are_readable_and_evaluation_is_held_out():
    prompts = read_prompts(DATA / "prompts.jsonl")
    evaluation = read_eval_prompts(DATA / "eval_prompts.jsonl")
    assert {row["source"] for row in prompts} == {"chat", "math", "code", "writing"}
    assert {row["source"] for row in evaluation} == {"mt-bench", "humaneval", "gsm8k"}
    held_out = {turn.strip() for row in evaluation for turn in row["turns"]}
    assert not held_out & {row["prompt"].strip() for row in prompts}
    assert not held_out & {
        row["messages"][0]["content"].strip() for row in read_responses(DATA / "responses_0.jsonl.gz")
    }


GOOD = {"id": "a", "source": "chat", "prompt": "Hi"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": "b", "source"', "line 2, column 21: not JSON"),
        ("[1]", "line 2: a JSON object was expected, got list"),
        ({"id": "b", "source": "chat"}, "line 2: column 'prompt' is missing"),
        ({"id": "b", "source": "chat", "prompt": ["Hi"]}, "line 2: column 'prompt' must be str, got list"),
        ({"id": "b", "source": "chat", "prompt": " "}, "line 2: column 'prompt' is empty"),
        (GOOD, "line 2: column 'id' repeats 'a' of line 1"),
    ],
)
def test_bad_prompt_is_named_by_file_line_and_column(tmp_path, line, message):
    path = write_lines(tmp_path / "prompts.jsonl", GOOD, line)
    with pytest.raises(ValueError, match=message) as error:
        read_prompts(path)
    assert str(path) in str(error.value)


def test_bad_turns_and_files(tmp_path):
    path = write_lines(tmp_path / "e.jsonl", {"id": "a", "source": "s", "category": "c", "turns": ["Hi", ""]})
    with pytest.raises(ValueError, match="line 1: column 'turns'"):
        read_eval_prompts(path)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="holds no rows"):
        read_prompts(tmp_path / "empty.jsonl")
    with pytest.raises(FileNotFoundError, match="is not a file"):
        read_prompts(tmp_path / "nowhere.jsonl")
    whole = gzip.compress(json.dumps(GOOD).encode())
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[:-9])
    with pytest.raises(ValueError, match="damaged gzip"):
        read_prompts(tmp_path / "cut.jsonl.gz")
    (tmp_path / "latin.jsonl").write_bytes('{"id": "é"}'.encode("latin-1"))
    with pytest.raises(ValueError, match="not UTF-8"):
        read_prompts(tmp_path / "latin.jsonl")


# Responses


@pytest.mark.parametrize("name", ["r.jsonl", "r.jsonl.gz"])
def test_responses_round_trip_and_never_half_written(tmp_path, tokenizer, name):
    rows = [response(tokenizer), response(tokenizer, "Weil … 天空", "length", id="b")]
    assert write_responses(rows, tmp_path / name) == 2
    assert list(read_responses(tmp_path / name)) == rows
    with pytest.raises(ValueError, match="row 1 .*'finish'"):
        write_responses([rows[0], rows[1] | {"finish": "maybe"}], tmp_path / name)
    assert list(read_responses(tmp_path / name)) == rows
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"response_ids": "504"}, "column 'response_ids' must be list"),
        ({"response_ids": [1, -1]}, "column 'response_ids' must hold token ids"),
        ({"response_ids": [1.0]}, "column 'response_ids' must hold token ids"),
        ({"finish": None}, "column 'finish' must be 'stop' or 'length', got None"),
        ({"messages": [{"role": "assistant", "content": "Hi"}]}, "must end with user, assistant"),
        ({"messages": [{"role": "assistant"}, {"role": "user"}]}, "column 'messages' must hold objects"),
        ({"source": 3}, "column 'source' must be str"),
    ],
)
def test_bad_response_is_named(tmp_path, tokenizer, changes, message):
    path = write_lines(tmp_path / "r.jsonl", response(tokenizer), response(tokenizer) | changes)
    with pytest.raises(ValueError, match=f"line 2.*{message}"):
        list(read_responses(path))


def test_prompts_given_as_responses_are_sent_to_prepare(tmp_path):
    path = write_lines(tmp_path / "r.jsonl", {"question": "Name three fruits."})
    with pytest.raises(ValueError, match="line 1.*`retrace-hf prepare` makes such files of prompts"):
        list(read_responses(path))


@pytest.fixture(scope="module")
def reader(tokenizer):
    """A tiny target of SmolLM2's vocabulary, so that the real tokenizer and chat template can be used with it."""
    return tiny_target("llama", vocab_size=len(tokenizer), eos_token_id=2)


PROMPTS = [{"id": f"p{i}", "source": "chat", "prompt": "word " * (3 * i + 1)} for i in range(5)]


def test_regenerated_responses_are_the_targets_own(tmp_path, reader, tokenizer):
    counts = regenerate(
        reader, tokenizer, PROMPTS, tmp_path, max_new_tokens=6, batch_size=2, shard_size=3, progress=False
    )
    rows = [row for path in sorted(tmp_path.glob("*.gz")) for row in read_responses(path)]
    assert [row["id"] for row in rows] == [prompt["id"] for prompt in PROMPTS]
    assert counts == {
        "prompts": 5,
        "answered": 5,
        "failed": 0,
        "stop": sum(row["finish"] == "stop" for row in rows),
        "length": sum(row["finish"] == "length" for row in rows),
        "tokens": sum(len(row["response_ids"]) for row in rows),
    }
    for row in rows:
        prompt_ids = torch.tensor([render_prompt(tokenizer, row["messages"][:-1])])
        plain = reader.generate(input_ids=prompt_ids, attention_mask=torch.ones_like(prompt_ids), max_new_tokens=6)
        expected = plain[0, prompt_ids.shape[1] :].tolist()
        assert row["response_ids"] + [2] * (row["finish"] == "stop") == expected
        tokenize_response(row, tokenizer)  # what is written can be trained on


def test_regeneration_resumes_and_keeps_settings_apart(tmp_path, reader, tokenizer):
    kwargs = {"max_new_tokens": 4, "shard_size": 2, "progress": False, "do_sample": True, "seed": 7}
    regenerate(reader, tokenizer, PROMPTS, tmp_path, **kwargs)
    shards = sorted(tmp_path.glob("*.gz"))
    first, content = shards[0], list(read_responses(shards[1]))
    touched = first.stat().st_mtime_ns
    shards[1].unlink()
    regenerate(reader, tokenizer, PROMPTS, tmp_path, **kwargs)
    assert first.stat().st_mtime_ns == touched
    assert list(read_responses(shards[1])) == content  # the same seed, the same shard
    with pytest.raises(ValueError, match="something else or with other settings"):
        regenerate(reader, tokenizer, PROMPTS[:4], tmp_path, **kwargs)


def test_failed_prompts_are_counted_and_left_out(tmp_path, reader, tokenizer, caplog):
    prompts = [*PROMPTS[:2], {"id": "long", "source": "chat", "prompt": "word " * 600}]
    counts = regenerate(reader, tokenizer, prompts, tmp_path, max_new_tokens=2, progress=False)
    assert (counts["answered"], counts["failed"]) == (2, 1)
    assert "No response for prompt long" in caplog.text
    with pytest.raises(ValueError, match="no prompts"):
        regenerate(reader, tokenizer, [], tmp_path)
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        regenerate(reader, tokenizer, prompts, tmp_path, batch_size=0)


# Token rows


def test_masked_tokens_are_the_answer_and_its_end_token(tokenizer):
    for finish, end in (("stop", "<|im_end|>"), ("length", "")):
        row = response(tokenizer, finish=finish)
        tokens = tokenize_response(row, tokenizer)
        learnt = [token for token, learn in zip(tokens["input_ids"], tokens["loss_mask"]) if learn]
        prompt = [token for token, learn in zip(tokens["input_ids"], tokens["loss_mask"]) if not learn]
        assert tokenizer.decode(learnt) == "Because of scattering." + end
        assert prompt == render_prompt(tokenizer, row["messages"][:1])
        assert tokens["loss_mask"] == sorted(tokens["loss_mask"])  # the answer stands at the end
        assert tokenizer.decode(prompt).endswith("<|im_start|>assistant\n")


def test_shipped_responses_decode_to_their_answers(tokenizer):
    counts = Counter()
    dataset = tokenize_responses(DATA / "responses_0.jsonl.gz", tokenizer, limit=300, counts=counts)
    assert counts["rows"] == len(dataset) == 300 and not counts["dropped"]
    for tokens, row in zip(dataset, read_responses(DATA / "responses_0.jsonl.gz")):
        learnt = [token for token, learn in zip(tokens["input_ids"], tokens["loss_mask"]) if learn]
        end = "<|im_end|>" if row["finish"] == "stop" else ""
        assert tokenizer.decode(learnt) == row["messages"][-1]["content"] + end
        assert tokens["id"] == row["id"] and tokens["source"] == row["source"]


def test_response_ids_are_used_as_they_are(tokenizer):
    letters = [tokenizer(letter)["input_ids"][0] for letter in "hello"]
    assert letters != tokenizer("hello")["input_ids"]
    tokens = tokenize_response(response(tokenizer, "hello", "length", response_ids=letters), tokenizer)
    assert tokens["input_ids"][-5:] == letters


def test_rows_with_nothing_to_learn_are_counted_and_dropped(tmp_path, tokenizer, caplog):
    path = tmp_path / "r.jsonl"
    empty = response(tokenizer, "", "stop", id="empty")
    write_responses([response(tokenizer), empty], path)
    counts = Counter()
    dataset = tokenize_responses(path, tokenizer, counts=counts)
    assert dataset["id"][:] == ["a"] and counts["dropped"] == 1 and "Dropped 1 of 2" in caplog.text
    (tmp_path / "none.jsonl").write_text("")
    with pytest.raises(ValueError, match="none.jsonl: no rows"):
        tokenize_responses(tmp_path / "none.jsonl", tokenizer)
    with pytest.raises(ValueError, match="None of the 2 rows .* anything to learn"):
        tokenize_responses(path, tokenizer, max_length=10)
    with pytest.raises(ValueError, match="max_length must be at least 1"):
        tokenize_responses(path, tokenizer, max_length=0)


def test_max_length_cuts_the_end(tmp_path, tokenizer):
    write_responses([response(tokenizer)], tmp_path / "r.jsonl")
    whole = tokenize_responses(tmp_path / "r.jsonl", tokenizer)[0]
    counts = Counter()
    length = len(whole["input_ids"]) - 1
    cut = tokenize_responses(tmp_path / "r.jsonl", tokenizer, max_length=length, counts=counts)[0]
    assert cut["input_ids"] == whole["input_ids"][:length] and cut["loss_mask"] == whole["loss_mask"][:length]
    assert counts["truncated"] == 1


def test_responses_of_another_model_are_refused(tmp_path, tokenizer):
    path = tmp_path / "r.jsonl"
    write_responses([response(tokenizer, response_ids=[500, 501])], path)
    with pytest.raises(ValueError, match="line 1, column 'response_ids': .* does not decode"):
        tokenize_responses(path, tokenizer)
    write_responses([response(tokenizer, response_ids=[10**6])], path)
    with pytest.raises(ValueError, match="does not decode"):
        tokenize_responses(path, tokenizer)


def test_tokenizer_without_chat_template_is_refused(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(ValueError, match="no chat template"):
        tokenize_response(response(tokenizer), tokenizer)


# Batches


def test_collator_pads_right():
    rows = [
        {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1], "row": 4, "id": "x"},
        {"input_ids": [8], "loss_mask": [1], "row": 2, "id": "y"},
    ]
    batch = RetraceDataCollator(pad_token_id=9)(rows)
    assert set(batch) == {"input_ids", "attention_mask", "loss_mask", "row"}
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 9, 9]] and batch["input_ids"].dtype == torch.int64
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]] and batch["attention_mask"].dtype == torch.int64
    assert batch["loss_mask"].tolist() == [[False, True, True], [True, False, False]]
    assert batch["row"].tolist() == [4, 2]


def test_collator_looks_features_up_by_row():
    features = {4: np.full((3, 6), 2, np.float16), 2: np.full((1, 6), 3, np.float16)}
    rows = [{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1], "row": 4}, {"input_ids": [8], "loss_mask": [1], "row": 2}]
    states = RetraceDataCollator(features=features)(rows)["context_hidden_states"]
    assert states.shape == (2, 3, 6) and states.dtype == torch.float32
    assert (states[0] == 2).all() and (states[1, 0] == 3).all() and (states[1, 1:] == 0).all()


def test_collator_names_what_is_wrong():
    collator = RetraceDataCollator(features=[np.zeros((2, 6), np.float16)])
    row = {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}
    with pytest.raises(ValueError, match='column "row"'):
        collator([row])
    with pytest.raises(ValueError, match="cover 2 tokens but the row has 3"):
        collator([row | {"row": 0}])
    with pytest.raises(ValueError, match="3 input_ids but 1 loss_mask"):
        collator([row | {"loss_mask": [1]}])
    with pytest.raises(ValueError, match="empty batch"):
        collator([])
    for ids in ([5, 6, 9], [5, -1, 6]):
        with pytest.raises(ValueError, match="vocabulary has 9; tokenise"):
            RetraceDataCollator(vocab_size=9)([row | {"input_ids": ids}])


# Features


@pytest.fixture
def target():
    return tiny_target("qwen3")


@pytest.fixture
def dataset():
    generator = torch.Generator().manual_seed(0)
    lengths = [3, 17, 1, 9, 30, 12]
    return Dataset.from_dict(
        {"input_ids": [torch.randint(3, 199, (n,), generator=generator).tolist() for n in lengths]}
    )


def test_features_are_the_tapped_layers(tmp_path, target, dataset):
    features = TargetFeatures.build(target, dataset, TAPS, tmp_path / "f", batch_size=4, progress=False)
    assert len(features) == len(dataset)
    for row, ids in enumerate(dataset["input_ids"]):
        with torch.no_grad():
            states = target(torch.tensor([ids]), output_hidden_states=True).hidden_states
        expected = torch.cat([states[tap + 1] for tap in TAPS], dim=-1)[0]
        assert features[row].dtype == np.float16 and features[row].shape == expected.shape
        stored = torch.from_numpy(np.asarray(features[row], dtype=np.float32))
        assert (stored - expected).norm() / expected.norm() < 1e-3
    with pytest.raises(IndexError, match="another dataset"):
        features[len(dataset)]
    assert {path.name for path in (tmp_path / "f").iterdir()} == {"features.bin", "index.json", ".lock"}


def test_features_do_not_change_what_the_target_is(tmp_path, target, dataset):
    target.train()
    TargetFeatures.build(target, dataset, TAPS, tmp_path, progress=False)
    assert target.training
    assert all(parameter.grad is None for parameter in target.parameters())


def test_features_are_rebuilt_when_anything_they_depend_on_changes(tmp_path, target, dataset, monkeypatch):
    key = features_key(target, dataset, TAPS)
    TargetFeatures.build(target, dataset, TAPS, tmp_path, progress=False)
    assert len(TargetFeatures.open(tmp_path, key)) == len(dataset)
    built = []
    real = features_module._run_target
    monkeypatch.setattr(features_module, "_run_target", lambda *args: built.append(1) or real(*args))
    TargetFeatures.build_or_open(target, dataset, TAPS, tmp_path, progress=False)
    assert not built

    other = dataset.map(lambda row: {"input_ids": row["input_ids"][::-1]})
    moved = tiny_target("qwen3")
    with torch.no_grad():
        moved.model.layers[3].mlp.down_proj.weight.add_(1e-3)
    for arguments in ((target, dataset, [1, 2]), (target, other, TAPS), (moved, dataset, TAPS)):
        new_key = features_key(*arguments)
        assert new_key != key
        with pytest.raises(ValueError, match="another target, dataset or layers"):
            TargetFeatures.open(tmp_path, new_key)
        built.clear()
        TargetFeatures.build_or_open(*arguments, tmp_path, progress=False)
        assert built
        key = new_key


def test_damaged_features_are_found_and_rebuilt(tmp_path, target, dataset):
    TargetFeatures.build(target, dataset, TAPS, tmp_path, progress=False)
    whole = (tmp_path / "features.bin").read_bytes()
    key = features_key(target, dataset, TAPS)
    (tmp_path / "features.bin").write_bytes(whole[:-2])
    with pytest.raises(ValueError, match=f"has {len(whole) - 2} bytes where {len(whole)} were written"):
        TargetFeatures.open(tmp_path, key)
    TargetFeatures.build_or_open(target, dataset, TAPS, tmp_path, progress=False)
    assert (tmp_path / "features.bin").read_bytes() == whole
    (tmp_path / "index.json").write_text('{"key": ')
    with pytest.raises(ValueError, match="damaged"):
        TargetFeatures.open(tmp_path, key)
    with pytest.raises(FileNotFoundError, match="no finished features"):
        TargetFeatures.open(tmp_path / "nowhere", key)


def test_a_changed_byte_is_found_and_rebuilt(tmp_path, target, dataset, caplog):
    TargetFeatures.build(target, dataset, TAPS, tmp_path, progress=False)
    whole, key = (tmp_path / "features.bin").read_bytes(), features_key(target, dataset, TAPS)
    changed = bytearray(whole)
    changed[len(changed) // 2] ^= 1
    (tmp_path / "features.bin").write_bytes(changed)
    with pytest.raises(ValueError, match="Row 4 of .* is damaged"):
        TargetFeatures.open(tmp_path, key)
    TargetFeatures.build_or_open(target, dataset, TAPS, tmp_path, progress=False)
    assert (tmp_path / "features.bin").read_bytes() == whole and "computed anew. Row 4" in caplog.text
    # Features of before there were checksums open as they are.
    index = json.loads((tmp_path / "index.json").read_text())
    del index["crc32"]
    (tmp_path / "index.json").write_text(json.dumps(index))
    assert len(TargetFeatures.open(tmp_path, key)) == len(dataset)


@pytest.mark.parametrize("moment", ["before", "allocating", "index"])
def test_a_full_disk_leaves_nothing_half(tmp_path, target, dataset, monkeypatch, moment):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    if moment == "before":
        monkeypatch.setattr(features_module.shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    elif moment == "allocating":
        monkeypatch.setattr(features_module.os, "posix_fallocate", full)
    else:
        monkeypatch.setattr(features_module.json, "dumps", full)
    message = "No space left" if moment == "index" else "features need .* GiB .*No space left .* another disk"
    key = features_key(target, dataset, TAPS) if moment != "index" else "k" * 64
    monkeypatch.setattr(features_module, "features_key", lambda *args: key)
    with pytest.raises(OSError, match=message):
        TargetFeatures.build_or_open(target, dataset, TAPS, tmp_path, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    monkeypatch.undo()
    assert len(TargetFeatures.build_or_open(target, dataset, TAPS, tmp_path, progress=False)) == len(dataset)


def test_the_file_has_no_holes_while_it_is_filled(tmp_path, target, dataset, monkeypatch):
    """A page that is written through a memory map where the disk has no block for it kills the process."""
    real, seen = features_module._run_target, []

    def look(*args):
        file = next(tmp_path.glob("features.bin.*.part")).stat()
        seen.append(file.st_blocks * 512 >= file.st_size > 0)
        return real(*args)

    monkeypatch.setattr(features_module, "_run_target", look)
    TargetFeatures.build(target, dataset, TAPS, tmp_path, progress=False)
    assert seen and all(seen)


def test_of_two_that_build_at_once_one_builds(tmp_path, target, dataset, monkeypatch):
    real, running = features_module._run_target, []

    def slow(*args):
        assert not running
        running.append(1)
        time.sleep(0.2)
        calls.append(threading.get_ident())
        running.pop()
        return real(*args)

    calls = []
    monkeypatch.setattr(features_module, "_run_target", slow)
    with ThreadPoolExecutor(2) as pool:
        build = functools.partial(TargetFeatures.build_or_open, target, dataset, TAPS, tmp_path, progress=False)
        features = [future.result() for future in [pool.submit(build) for _ in range(2)]]
    assert len(calls) == 1
    assert all((features[0][row] == features[1][row]).all() for row in range(len(dataset)))


def test_interrupted_build_goes_on_where_it_stopped(tmp_path, target, dataset, monkeypatch):
    expected = TargetFeatures.build(target, dataset, TAPS, tmp_path / "whole", batch_size=2, progress=False)
    real, calls = features_module._run_target, []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(features_module, "SECONDS_BETWEEN_NOTES", -1)
    monkeypatch.setattr(features_module, "_run_target", interrupted)
    with pytest.raises(KeyboardInterrupt):
        TargetFeatures.build(target, dataset, TAPS, tmp_path / "f", batch_size=2, progress=False)
    with pytest.raises(FileNotFoundError):
        TargetFeatures.open(tmp_path / "f", features_key(target, dataset, TAPS))
    features = TargetFeatures.build_or_open(target, dataset, TAPS, tmp_path / "f", batch_size=2, progress=False)
    assert len(calls) == 4  # two batches, the interrupt, and the third batch only
    assert all((features[row] == expected[row]).all() for row in range(len(dataset)))
    assert {path.name for path in (tmp_path / "f").iterdir()} == {"features.bin", "index.json", ".lock"}


def test_values_beyond_float16_are_an_error_and_leave_nothing(tmp_path, target, dataset):
    with torch.no_grad():
        target.get_input_embeddings().weight.mul_(1e7)
    with pytest.raises(ValueError, match="not finite in float16 .* Train without cached features"):
        TargetFeatures.build(target, dataset, TAPS, tmp_path, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_bad_taps_and_rows_are_refused(tmp_path, target, dataset):
    for taps in ([], [5], [-1]):
        with pytest.raises(ValueError, match="target_layer_ids"):
            TargetFeatures.build(target, dataset, taps, tmp_path, progress=False)
    with pytest.raises(ValueError, match="Row 1 of the dataset has no input_ids"):
        TargetFeatures.build(target, Dataset.from_dict({"input_ids": [[1], []]}), TAPS, tmp_path, progress=False)
    with pytest.raises(ValueError, match="dataset is empty"):
        TargetFeatures.build(target, Dataset.from_dict({"input_ids": []}), TAPS, tmp_path, progress=False)


def test_features_reach_worker_processes_without_being_copied(tmp_path, target, dataset):
    features = TargetFeatures.build(target, dataset, TAPS, tmp_path, progress=False)
    pickled = pickle.dumps(features)
    assert len(pickled) < 2000
    assert (pickle.loads(pickled)[4] == features[4]).all()


def test_files_that_hold_the_same_rows_are_refused(tmp_path):
    """`retrace-hf prepare` leaves each row as text and as tokens; `*.jsonl.gz` names both."""
    for name in ("responses_00000.jsonl.gz", "tokens_00000.jsonl.gz"):
        (tmp_path / name).write_bytes(b"")
    for paths in (sorted(tmp_path.iterdir()), [tmp_path / "tokens_00000.jsonl.gz"] * 2):
        with pytest.raises(ValueError, match="tokens_00000.* are given twice; .* alone"):
            tokenize_responses(paths, None)
