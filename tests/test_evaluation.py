"""The batched rollout plays the rounds of generate(); results are counted as they should be."""

import json

import pytest
import torch
from transformers import DynamicCache

from retrace_hf import AcceptanceStats, RetraceDrafter, record_acceptance
from retrace_hf.evaluation import KeptLines, bootstrap_ratio, roll_out, summarize, write_results
from retrace_hf.evaluation.results import command_line
from retrace_hf.roomy_cache import roomy_cache

from .fixtures import plain, prompt_of, randomize, tiny_drafter, tiny_target
from .test_trainer import make_trainer


NEW_TOKENS = 50


@pytest.fixture(scope="module")
def target():
    return tiny_target("qwen3")


@pytest.fixture(scope="module")
def texts(target):
    """Prompts and answers with an end token inside some, so that rows leave the batch early and blocks are cut."""
    prompts = [prompt_of(length, seed=length) for length in (3, 9, 20, 33)]
    end = plain(target, prompts[0], max_new_tokens=NEW_TOKENS)[0, 25].item()
    sequences = [plain(target, p, max_new_tokens=NEW_TOKENS, eos_token_id=end)[0].tolist() for p in prompts]
    assert len({len(s) - p.shape[1] for s, p in zip(sequences, prompts)}) > 1
    return prompts, sequences, end


@pytest.fixture(scope="module")
def backbone(target, texts, tmp_path_factory):
    """A DFlash that has learnt part of the answers, so that every number of accepted proposals occurs."""
    prompts, sequences, _ = texts
    rows = [
        {"input_ids": s, "loss_mask": [0] * p.shape[1] + [1] * (len(s) - p.shape[1])}
        for p, s in zip(prompts, sequences)
    ]
    folder = tmp_path_factory.mktemp("backbone")
    drafter = tiny_drafter(target, conditioning="none")
    trainer = make_trainer(
        drafter, target, folder, rows, max_steps=60, num_anchors=32, num_carried_rounds=0, learning_rate=5e-3
    )
    trainer.train()
    trainer.save_model()
    return folder


@pytest.mark.parametrize(
    ("conditioning", "window"),
    [("none", None), ("overwrite", None), ("gated", None), ("corrected", None), ("corrected", 6)],
)
@torch.no_grad()
def test_rollout_equals_generate(target, texts, backbone, conditioning, window):
    prompts, sequences, end = texts
    drafter = RetraceDrafter.from_dflash(backbone, conditioning=conditioning, context_window=window)
    if drafter.trajectory is not None:
        randomize(drafter.trajectory, std=0.05)
    expected = []
    for prompt, sequence in zip(prompts, sequences):
        with record_acceptance() as stats:
            out = target.generate(
                prompt, assistant_model=drafter, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=end
            )
        assert out[0].tolist() == sequence
        expected.append(stats)
    found = roll_out(target, drafter, sequences, [p.shape[1] for p in prompts], NEW_TOKENS, batch_size=3)
    assert len({a for s in found for a in s.accepted_per_round}) > 3
    for one, other in zip(found, expected):
        assert one.accepted_per_round == other.accepted_per_round
        assert one.proposed_per_round == other.proposed_per_round
        assert one.new_tokens == other.new_tokens


def test_rollout_refuses_answers_that_do_not_fit():
    target = tiny_target()
    with pytest.raises(ValueError, match="Sequence 0 has 5 new tokens"):
        roll_out(target, tiny_drafter(target), [[1, 2, 3, 4, 5, 6]], [1], max_new_tokens=4)


def stats_of(*accepted):
    one = AcceptanceStats()
    one.add_call()
    for a in accepted:
        one.add_round(proposed=7, accepted=a)
    return one


def test_summary_and_ratio():
    stats, base = [stats_of(1, 3), stats_of(0)], [stats_of(0, 0), stats_of(0)]
    summary = summarize(stats, ["chat", "code"], seconds=[1.0, 2.0])
    assert summary["chat"]["acceptance_length"] == 3.0 and summary["chat"]["seconds"] == 1.0
    assert summary["all"]["acceptance_length"] == pytest.approx(7 / 3) and summary["all"]["rounds"] == 3
    assert summary["all"]["acceptance_at"][:3] == pytest.approx([2 / 3, 1 / 3, 1 / 3])
    ratio = bootstrap_ratio(stats, base)
    assert ratio["ratio"] == pytest.approx(7 / 3) and ratio["interval"][0] <= ratio["ratio"] <= ratio["interval"][1]


def test_results_are_written_whole(tmp_path):
    path = tmp_path / "results.json"
    write_results(path, {"a": 1.23456789, "gap": 1.25e-6})
    with pytest.raises(TypeError):
        write_results(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1.23457, "gap": 1.25e-6}


def test_kept_lines_survive_a_kill_and_do_not_mix(tmp_path):
    path = tmp_path / "folder" / "lines.jsonl"
    kept = KeptLines(path, {"weights": "a"})
    assert "x" not in kept and not path.exists()
    kept.add({"id": "x", "value": 1})
    kept.add({"id": "y", "value": 2})
    with path.open("a") as file:
        file.write('{"id": "z", "val')
    again = KeptLines(path, {"weights": "a"})
    assert set(again.rows) == {"x", "y"} and again["y"]["value"] == 2
    again.add({"id": "z", "value": 3})
    other = KeptLines(path, {"weights": "b"})
    assert not other.rows
    other.add({"id": "x", "value": 9})
    assert (
        KeptLines(path, {"weights": "a"})["x"]["value"] == 1 and KeptLines(path, {"weights": "b"})["x"]["value"] == 9
    )


@pytest.mark.parametrize("line", ['{"id": "x", "va', "[]", '{"key": "x"}', "\x00\x00"])
def test_a_damaged_line_is_named(tmp_path, line):
    kept = KeptLines(tmp_path / "lines.jsonl", {})
    kept.add({"id": "x"})
    with kept.path.open("a") as file:
        file.write(line + "\n")
    kept.add({"id": "y"})
    with pytest.raises(ValueError, match=r"Line 2 of .*lines.jsonl is damaged: .* Delete the line"):
        KeptLines(kept.path, {})


def test_commands_name_no_folder_in_front_of_the_working_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["examples/run.py", f"--output={tmp_path}/runs/a b", "runs/c"])
    command = command_line()
    assert str(tmp_path) not in command and command.endswith("examples/run.py '--output=runs/a b' runs/c")


def test_a_cache_with_room_is_a_cache(target):
    """What a pass behind a prefix gives, cropped and picked from as a DynamicCache would be."""
    ids, more = prompt_of(9, batch_size=3), prompt_of(4, seed=5, batch_size=3)
    caches = []
    for cache in (DynamicCache(), roomy_cache(target.config, 9 + 4)):
        with torch.no_grad():
            target(ids, cache=cache, use_cache=True)
            target(more, cache=cache, use_cache=True)
            cache.crop(-4)
            cache.batch_select_indices(torch.tensor([2, 0]))
            caches.append(target(more[[2, 0]], cache=cache, use_cache=True).logits)
    torch.testing.assert_close(*caches, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="14 tokens in a cache with room for 13"), torch.no_grad():
        target(more[[2, 0], :1], cache=cache, use_cache=True)
    roomy_cache(target.config, 5).batch_select_indices(torch.tensor([0]))  # of a layer that was never written: nothing
