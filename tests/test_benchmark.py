"""`retrace-hf benchmark`: counts, order, going on, equality, data sets and the table are what they say."""

import json
import math
from types import SimpleNamespace

import matplotlib.axes
import pytest
import torch
from datasets import Dataset
from typer.testing import CliRunner

from retrace_hf import RetraceDrafter, record_acceptance
from retrace_hf.card import render_card
from retrace_hf.cli import app
from retrace_hf.evaluation import benchmark as module
from retrace_hf.evaluation import data_sets
from retrace_hf.evaluation.benchmark import BenchmarkOptions, benchmark, collect, mismatch_report
from retrace_hf.evaluation.data_sets import FORMS, load_data_sets
from retrace_hf.evaluation.equality import first_difference
from retrace_hf.evaluation.results import bootstrap_speedup, file_hash, write_results
from retrace_hf.evaluation.table import benchmark_table, results_markdown
from retrace_hf.measure import PassCounter, answer
from retrace_hf.targets import load_target

from .fixtures import (
    BLOCK_SIZE,
    drafter_of_kind,
    plain,
    prompt_of,
    randomize,
    save_letters_target,
    tiny_drafter,
    tiny_target,
)
from .test_conversion import write, zlab_config


NEW_TOKENS = 1 + 2 * BLOCK_SIZE
QUESTIONS = ("gagbgc", "cacbcc", "dfdgdh", "abacad")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a target that chats in letters, a random drafter of it, `d`, and three prompts of two kinds."""
    place = tmp_path_factory.mktemp("benchmark")
    save_letters_target(place / "target", before_template="{% set thinking = enable_thinking %}")
    target, _ = load_target(place / "target")
    randomize(tiny_drafter(target)).save_pretrained(place / "d")
    randomize(tiny_drafter(target, conditioning="none"), seed=5).save_pretrained(place / "other")
    write_prompts(
        place / "prompts.jsonl", [("code", QUESTIONS[:1]), ("chat", QUESTIONS[1:3]), ("chat", QUESTIONS[3:])]
    )
    write_prompts(place / "one.jsonl", [("chat", QUESTIONS[:1])])
    return place


def write_prompts(path, prompts):
    rows = [
        {"id": f"{kind}-{i}", "source": kind, "category": "x", "turns": list(turns)}
        for i, (kind, turns) in enumerate(prompts)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def options_of(place, out, data="prompts.jsonl", **changed):
    given = {
        "drafter": [str(place / "d")],
        "data": data if isinstance(data, list) else [str(place / data)],
        "target": str(place / "target"),
        "output_dir": str(out),
        "temperature": [0.0],
        "max_new_tokens": 12,
        "threads": torch.get_num_threads(),
        "plots": False,
        "progress": False,
    }
    return BenchmarkOptions(**given | changed)


def lines_of(out):
    return [json.loads(line) for line in (out / module.LINES).read_text().splitlines()]


def texts_of(out):
    """Everything of the lines but the seconds."""
    for line in (lines := {line["id"]: line for line in lines_of(out)}).values():
        for turn in line["turns"]:
            for run in turn["methods"].values():
                del run["seconds"]
    return lines


@pytest.fixture
def calls(monkeypatch):
    """(method's options, prompt's length, new tokens) of every answer that is asked for."""
    log = []

    def watched(target, inputs, max_new_tokens, drafter=None, **given):
        kind = "plain" if drafter is None else given.get("speculation_type", "drafter")
        kind = next((k for k in ("prompt_lookup_num_tokens", "assistant_model") if k in given), kind)
        log.append((kind, inputs["input_ids"][0].tolist(), max_new_tokens))
        return answer(target, inputs, max_new_tokens, drafter=drafter, **given)

    monkeypatch.setattr(module, "answer", watched)
    return log


# -- counts ----------------------------------------------------------------------------------------------------------


def test_counts_are_those_of_hand(place, tmp_path, monkeypatch):
    """Real, oracle and wrong on one prompt of which the answer has 1 + 2 * B tokens."""
    target, tokenizer = load_target(place / "target")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTIONS[0]}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    sequence = plain(target, prompt, NEW_TOKENS)
    assert sequence.shape[1] == prompt.shape[1] + NEW_TOKENS  # it does not end by itself
    kinds = ["real", "oracle", "wrong"]
    for kind in kinds:
        tiny_drafter(target).save_pretrained(tmp_path / kind)
    # A scripted drafter knows the answer, with room behind it for the last block.
    whole = plain(target, prompt, NEW_TOKENS + BLOCK_SIZE, eos_token_id=None)
    monkeypatch.setattr(module, "load_drafter", lambda folder, its: drafter_of_kind(folder.name, target, whole))
    options = options_of(
        place,
        tmp_path / "out",
        "one.jsonl",
        drafter=[str(tmp_path / kind) for kind in kinds],
        max_new_tokens=NEW_TOKENS,
        prompt_lookup=True,
        plots=True,
    )
    benchmark(options)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    variants = results["variants"]
    assert list(variants) == [
        "plain", *(name for kind in kinds for name in (f"{kind}_signal_off", kind)), "prompt_lookup",
    ]  # fmt: skip
    for name, tau, rounds in (
        ("plain", 1.0, 2 * BLOCK_SIZE),
        ("oracle", float(BLOCK_SIZE), 2),
        ("oracle_signal_off", float(BLOCK_SIZE), 2),
        ("wrong", 1.0, 2 * BLOCK_SIZE),
    ):
        entry = variants[name]["chat"]
        assert (entry["acceptance_length"], entry["rounds"], entry["new_tokens"]) == (tau, rounds, NEW_TOKENS), name
        assert entry["acceptance_length_by_request"] == tau and entry == variants[name]["all"]
    assert variants["oracle"]["all"]["acceptance_at"] == [1.0] * (BLOCK_SIZE - 1)
    assert variants["wrong"]["all"]["acceptance_at"] == [0.0] * (BLOCK_SIZE - 1)
    assert variants["oracle"]["all"]["accepted_counts"] == [0] * (BLOCK_SIZE - 1) + [2]
    assert variants["wrong"]["all"]["accepted_counts"] == [2 * BLOCK_SIZE]
    for name, variant in variants.items():
        if name != "plain":
            assert variant["all"]["equal_to_plain"] == 1 and results["mismatches"][name] == 0, name
    # One prompt: every resample is the prompt itself.
    line = lines_of(tmp_path / "out")[0]["turns"][0]["methods"]
    speed = line["plain"]["seconds"] / line["oracle"]["seconds"]
    entry = variants["oracle"]["all"]
    for figure in ("speedup_median", "speedup_total"):
        assert entry[figure] == pytest.approx(speed, rel=1e-5)
        assert entry[f"{figure}_interval"] == pytest.approx([speed] * 2, rel=1e-5)
    over = results["acceptance_length_over_real"]["oracle"]["all"]["ratio"]
    assert over == pytest.approx(BLOCK_SIZE / variants["real"]["all"]["acceptance_length"], rel=1e-5)
    assert {p.name for p in (tmp_path / "out").glob("*.png")} == {
        "acceptance_at.png", "tau_by_kind.png", "accepted_counts.png", "tau_by_context.png",
    }  # fmt: skip
    found = results["prompts"][0]["methods"]["oracle"]
    assert found["rounds"] == 2 and found["new_tokens"] == NEW_TOKENS and found["equal_to_plain"] is True


def line_of(prompt, kind, runs):
    """runs: by method, (prompt's tokens, new tokens, seconds, accepted, proposed) of one turn."""
    turns = {
        method: {"ids": [0] * new, "seconds": seconds, "accepted": accepted, "proposed": proposed, "difference": None}
        for method, (_, new, seconds, accepted, proposed) in runs.items()
    }
    return {
        "prompt": prompt,
        "kind": kind,
        "turns": [{"prompt_tokens": next(iter(runs.values()))[0], "order": list(runs), "methods": turns}],
    }


def test_figures_of_two_prompts_by_hand():
    lines = [
        line_of("a", "x", {"plain": (63, 9, 8.0, [0] * 8, [0] * 8), "d": (63, 9, 4.0, [3, 0, 1, 0], [3] * 4)}),
        line_of("b", "y", {"plain": (128, 3, 3.0, [0] * 2, [0] * 2), "d": (128, 5, 2.5, [1, 1], [3, 2])}),
    ]
    results = collect({0.0: lines, 1.0: lines}, ["plain", "d"], ["d"])
    d = results["variants"]["d"]
    assert d["all"]["acceptance_length"] == 12 / 6 and d["all"]["acceptance_length_by_request"] == 2.0
    assert d["all"]["acceptance_at"] == [4 / 6, 1 / 6, 1 / 5] and d["all"]["accepted_counts"] == [2, 3, 0, 1]
    # a: 8 s against 4 s; b: 1 s a token against 0.5 s a token; a statistics.median is the mean of the two
    assert (d["x"]["speedup_median"], d["y"]["speedup_median"], d["all"]["speedup_median"]) == (2.0, 2.0, 2.0)
    assert d["all"]["speedup_total"] == pytest.approx((11 / 12) / (6.5 / 14))
    # Before a's first anchor stand the 63 tokens of the prompt; its rounds yield 4, 1, 2, 1.
    assert d["x"]["by_context"] == [
        {"up_to": 64, "rounds": 1, "acceptance_length": 4.0},
        {"up_to": 128, "rounds": 3, "acceptance_length": 4 / 3},
    ]
    assert d["y"]["by_context"] == [{"up_to": 256, "rounds": 2, "acceptance_length": 2.0}]
    assert list(results["temperatures"]) == ["0", "1"] and len(results["prompts"]) == 4


def test_the_median_of_an_even_number_is_the_mean_of_two():
    found = bootstrap_speedup([1.0, 1.0, 1.0, 2.0], [4] * 4, [1.0, 2.0, 4.0, 16.0], [4, 4, 4, 4])
    assert found["speedup_median"] == 3.0 and found["speedup_total"] == 23 / 5
    low, high = found["speedup_median_interval"]
    assert low < 3.0 < high
    # The texts of a temperature differ: 10 s for 20 tokens against 2 s for 2.
    assert bootstrap_speedup([10.0], [20], [2.0], [2])["speedup_median"] == 2.0


def test_a_prompt_that_ends_at_once_has_no_tau(tmp_path):
    """And one whose resamples hold no round does not spoil the intervals of the others."""
    empty = ("a", "x", {"plain": (5, 1, 1.0, [], []), "d": (5, 1, 1.0, [], [])})
    lines = [line_of(*empty), line_of("b", "y", {"plain": (5, 3, 1.0, [0, 0], [0, 0]), "d": (5, 3, 1.0, [1], [1])})]
    results = collect({0.0: lines}, ["plain", "d"], ["d"])
    write_results(tmp_path / "r.json", results)
    written = json.loads((tmp_path / "r.json").read_text(), parse_constant=pytest.fail)
    d = written["variants"]["d"]
    assert d["x"]["acceptance_length"] is None and d["x"]["acceptance_length_interval"] == [None, None]
    assert d["all"]["acceptance_length"] == 2.0 and d["all"]["acceptance_length_interval"] == [2.0, 2.0]
    for variants in (written["variants"], results["variants"]):
        row = benchmark_table(variants).splitlines()[-1]
        assert row == "| d | 1.00x | - | 1.00x | 2.00 | 1.00x | - |"


def test_passes_are_counted_as_the_recorder_counts_them():
    target, prompt = tiny_target(), prompt_of(9)
    sequence = plain(target, prompt, 50)
    drafter = drafter_of_kind("mixed", target, sequence)
    with PassCounter(target) as passes, record_acceptance() as stats:
        target.generate(prompt, assistant_model=drafter, max_new_tokens=31, do_sample=False, streamer=passes)
    assert passes.stats == stats and len(set(stats.accepted_per_round)) > 2
    assert not target._forward_pre_hooks
    # The prompt repeats, and so does the text behind it: the lookup proposes to the prefill already.
    prompt = torch.cat([sequence[:, 9:30], sequence[:, 9:20]], dim=1)
    run = answer(target, {"input_ids": prompt}, 20, prompt_lookup_num_tokens=4)
    assert run.ids[0] == plain(target, prompt, 20)[0, prompt.shape[1] :].tolist()
    prefill = 20 - sum(a + 1 for a in run.stats.accepted_per_round)
    assert 1 <= prefill <= 5 and max(run.stats.proposed_per_round) <= 4
    assert all(a <= p for a, p in zip(run.stats.accepted_per_round, run.stats.proposed_per_round))


def test_an_assistant_that_is_the_target_is_right(place, tmp_path, deprecations_allowed):
    found = benchmark(options_of(place, tmp_path, "one.jsonl", assistant_model=str(place / "target")))
    entry = found["variants"]["assistant"]["all"]
    assert entry["equal_to_plain"] == 1 and entry["acceptance_length"] > 1.5
    other = tiny_target("llama", vocab_size=90)
    other.save_pretrained(tmp_path / "small")
    load_target(place / "target")[1].save_pretrained(tmp_path / "small")
    with pytest.raises(ValueError, match="--assistant-model .*small has another vocabulary"):
        benchmark(options_of(place, tmp_path / "b", "one.jsonl", assistant_model=str(tmp_path / "small")))


# -- order, turns, temperatures --------------------------------------------------------------------------------------


def test_methods_take_turns_and_the_first_rotates(place, tmp_path, calls):
    benchmark(options_of(place, tmp_path))
    methods = ["plain", "dflash", "drafter"]
    assert [kind for kind, *_ in calls[:3]] == methods  # the warm-up
    measured = [kind for kind, *_ in calls[3:]]
    # Kinds by name: the chat of two turns, the other chat, the code.
    rotated = [methods[i % 3 :] + methods[: i % 3] for i in (0, 1, 1, 2)]
    assert measured == [kind for order in rotated for kind in order]
    assert [turn["order"][0] for line in lines_of(tmp_path) for turn in line["turns"]] == [
        "plain", "signal_off", "signal_off", "d",
    ]  # fmt: skip
    for i in range(3, len(calls), 3):
        assert len({(tuple(prompt), new) for _, prompt, new in calls[i : i + 3]}) == 1


def test_a_second_turn_follows_plains_answer(place, tmp_path, calls, monkeypatch):
    """Whatever a method that is broken said; thinking is off where the template has it."""
    real = module.answer

    def broken(target, inputs, max_new_tokens, drafter=None, **given):
        run = real(target, inputs, max_new_tokens, drafter=drafter, **given)
        if drafter is not None:
            run.ids[0][-1] = 5
        return run

    monkeypatch.setattr(module, "answer", broken)
    results = benchmark(options_of(place, tmp_path))
    target, tokenizer = load_target(place / "target")
    chat = lines_of(tmp_path)[0]["turns"]
    first = chat[0]["methods"]["plain"]["ids"]
    messages = [
        {"role": "user", "content": QUESTIONS[1]},
        {"role": "assistant", "content": tokenizer.decode(first, skip_special_tokens=True)},
        {"role": "user", "content": QUESTIONS[2]},
    ]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert {tuple(prompt) for _, prompt, _ in calls[6:9]} == {tuple(expected)}
    assert len(expected) == chat[1]["prompt_tokens"]
    assert results["provenance"]["chat_template_kwargs"] == {"enable_thinking": False}
    assert results["mismatches"] == {"signal_off": 4, "d": 4} and results["variants"]["d"]["chat"]["prompts"] == 2
    assert results["variants"]["d"]["chat"]["equal_to_plain"] == 0


def test_temperatures_are_sampled_seeded_and_not_compared(place, tmp_path, monkeypatch):
    options = options_of(place, tmp_path / "a", temperature=[1.0, 0.0], top_k=5)
    assert options.sampling(1.0) == {"do_sample": True, "temperature": 1.0, "top_p": 0.95, "top_k": 5}
    results = benchmark(options)
    assert list(results["temperatures"]) == ["0", "1"]
    assert results["provenance"]["temperature"] == 0.0 and results["variants"] == results["temperatures"]["0"]
    sampled = results["temperatures"]["1"]
    assert "equal_to_plain" not in sampled["d"]["all"] and "difference" not in str(lines_of(tmp_path / "a")[3:])
    lines = texts_of(tmp_path / "a")
    assert len(lines) == 6
    one, other = (
        [t["methods"]["plain"]["ids"] for k, v in lines.items() if k[0] == n for t in v["turns"]] for n in "01"
    )
    assert one != other
    table = (tmp_path / "a" / "results.md").read_text()
    assert "## Temperature 0" in table and "no text is compared" in table.partition("## Temperature 1")[2]
    benchmark(options_of(place, tmp_path / "b", temperature=[1.0], top_k=5, limit=1))
    again = texts_of(tmp_path / "b")
    assert len(again) == 2  # among others, a prompt is sampled as it is here
    for key, line in again.items():
        for turn, other in zip(line["turns"], lines[key]["turns"], strict=True):
            assert turn["methods"] == other["methods"]
    benchmark(options_of(place, tmp_path / "c", temperature=[1.0], top_k=5, limit=1, seed=7))
    assert any(texts_of(tmp_path / "c")[k]["turns"] != again[k]["turns"] for k in again)


def test_answers_end_where_the_context_does(place, tmp_path, calls, monkeypatch):
    monkeypatch.setattr(module.Bench, "check_lengths", lambda self, rows: setattr(self, "context", 26))
    found = benchmark(options_of(place, tmp_path, max_new_tokens=30))
    assert all(new == min(30, 26 - len(prompt)) for _, prompt, new in calls[3:])
    assert [prompt["turns"] for prompt in found["prompts"]] == [1, 1, 1]  # of the chat, one turn had room
    monkeypatch.undo()
    write_prompts(tmp_path / "long.jsonl", [("chat", ["aa" * 600])])
    with pytest.raises(ValueError, match="Prompt chat-0 has .* context 512"):
        benchmark(options_of(place, tmp_path / "b", tmp_path / "long.jsonl"))


# -- going on --------------------------------------------------------------------------------------------------------


def test_a_stopped_run_goes_on_and_does_not_mix(place, tmp_path, calls, monkeypatch):
    benchmark(options_of(place, tmp_path / "whole"))
    whole = texts_of(tmp_path / "whole")
    watched = module.answer

    def killed(*args, **kwargs):
        if len(calls) == 3 + 6 + 1:  # behind the warm-up and the two turns of the chat, amid the next prompt
            raise KeyboardInterrupt
        return watched(*args, **kwargs)

    calls.clear()
    monkeypatch.setattr(module, "answer", killed)
    with pytest.raises(KeyboardInterrupt):
        benchmark(options_of(place, tmp_path / "out"))
    first = lines_of(tmp_path / "out")
    assert len(first) == 1 and not (tmp_path / "out" / "results.json").exists()
    with (tmp_path / "out" / module.LINES).open("a") as file:
        file.write('{"key": "cut sh')
    monkeypatch.setattr(module, "answer", watched)
    calls.clear()
    results = benchmark(options_of(place, tmp_path / "out"))
    assert len(calls) == 3 + 6 and lines_of(tmp_path / "out")[0] == first[0]
    assert texts_of(tmp_path / "out") == whole and results["variants"]["d"]["all"]["prompts"] == 3
    calls.clear()
    benchmark(options_of(place, tmp_path / "out"))
    assert not calls
    benchmark(options_of(place, tmp_path / "out", temperature=[0.0, 1.0], limit=1))  # more of the same
    assert len(calls) == 3 + 9
    for changed, message in (
        ({"max_new_tokens": 13}, "holds another run: max_new_tokens was 12, now 13"),
        ({"drafter": [f"d={place / 'other'}"]}, "holds another run: drafters was"),
        ({"seed": 1}, "seed was 42, now 1"),
        ({"prompt_lookup": True}, "methods was"),
    ):
        with pytest.raises(ValueError, match=message):
            benchmark(options_of(place, tmp_path / "out", **changed))
    monkeypatch.setattr(module, "_code_hash", lambda: "sha256:other")
    with pytest.raises(ValueError, match="code was"):
        benchmark(options_of(place, tmp_path / "out"))


def test_a_prompt_that_was_changed_is_measured_anew(place, tmp_path, calls):
    data = tmp_path / "p.jsonl"
    write_prompts(data, [("chat", QUESTIONS[:1]), ("chat", QUESTIONS[1:2])])
    benchmark(options_of(place, tmp_path / "out", data))
    calls.clear()
    write_prompts(data, [("chat", QUESTIONS[:1]), ("chat", QUESTIONS[2:3])])
    benchmark(options_of(place, tmp_path / "out", data))
    assert len(calls) == 3 + 3


# -- equality --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_broken_method_is_found(place, tmp_path, monkeypatch, dtype):
    """By the command too: loud, and exit status 1 in float32; half precision is told apart by ties."""

    def broken(target, inputs, max_new_tokens, drafter=None, **given):
        run = answer(target, inputs, max_new_tokens, drafter=drafter, **given)
        if drafter is not None and "speculation_type" not in given:
            run.ids[0][3] = (run.ids[0][3] + 1) % 100
        return run

    monkeypatch.setattr(module, "answer", broken)
    command = ["benchmark", "--target", place / "target", "--drafter", place / "d", "--data", place / "one.jsonl"]
    command += ["--temperature", 0, "--max-new-tokens", 8, "--no-plots", "--dtype", dtype]
    done = CliRunner().invoke(app, [*map(str, command), "--output-dir", str(tmp_path)])
    assert done.exit_code == (1 if dtype == "float32" else 0), done.output
    assert "MISMATCH: d, prompt chat-0, turn 1: not plain's from token 4" in done.output and "(no tie)" in done.output
    entry = json.loads((tmp_path / "results.json").read_text())["variants"]["d"]["all"]
    assert entry["equal_to_plain"] == 0 and entry["near_ties"] == 0 and entry["differences"][0]["at"] == 3
    assert "d 0 of 1, 0 of 1 differences at a tie" in (tmp_path / "results.md").read_text()


def test_a_difference_is_a_tie_between_its_two_tokens_only():
    """Not where plain's two best logits are close and the other text has a third token, or breaks off."""

    def target(ids):
        return SimpleNamespace(logits=torch.tensor([[[8.0, 8.0 + gap, 1.0, 3.0]]], dtype=dtype))

    target_of = type("Target", (), {"device": "cpu", "__call__": lambda self, ids: target(ids)})
    for dtype, gap, tie in (
        (torch.float32, 5e-5, True),
        (torch.float32, 1e-3, False),
        (torch.bfloat16, 0.125, True),  # 2 ulp of bfloat16 at 8
        (torch.bfloat16, 0.25, False),
        (torch.float16, 0.0156, True),
        (torch.float16, 0.125, False),
    ):
        one = target_of()
        one.dtype = dtype
        found = first_difference(one, [1], [0], [1])
        assert found["tie"] is tie and found["gap"] == pytest.approx(gap, rel=0.05), (dtype, gap)
        assert first_difference(one, [1], [3], [1])["tie"] is False
        assert first_difference(one, [1], [], [1])["tie"] is False
        assert first_difference(one, [1], [1], [1]) is None


def test_mismatches_name_what_was_found():
    difference = {"id": "a", "turn": 2, "at": 0, "gap": 0.5, "tie": False}
    results = {"temperatures": {"0": {"plain": {"all": {}}, "d": {"all": {"differences": [difference]}}}}}
    assert mismatch_report(results) == [
        "d, prompt a, turn 2: not plain's from token 1, where the two logits are 0.5 apart (no tie)"
    ]
    assert mismatch_report({"temperatures": {"1": {}}}) == []


# -- data sets -------------------------------------------------------------------------------------------------------


BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
ROWS = {  # as the Hub has them, and the prompt that is made of them
    "mt-bench": ({"prompt": ["Write.", "Again."], "category": "writing", "prompt_id": 81}, ["Write.", "Again."]),
    "humaneval": (
        {"task_id": "HumanEval/0", "prompt": "def f():\n", "test": "assert"},
        [
            "Write a solution to the following problem and make sure that it passes the tests:\n"
            "```python\ndef f():\n\n```"
        ],
    ),
    "gsm8k": ({"question": "1 + 1?", "answer": "#### 2"}, ["1 + 1?" + BOXED]),
    "math500": ({"problem": "$1 + 1$", "solution": "2", "unique_id": "x"}, ["$1 + 1$" + BOXED]),
    "alpaca": ({"instruction": "Sum up.", "input": "A text.", "output": ""}, ["Sum up.\n\nInput:\nA text."]),
    "livecodebench": (
        {"question_content": "Add.", "starter_code": "class S:", "private_test_cases": "..."},
        [
            "You are an expert Python programmer. You will be given a question (problem specification) and will "
            "generate a correct Python program that matches the specification and passes all tests. You will NOT "
            "return anything except for the program\n\n### Question:\nAdd.\n\n### Format: Use the following code "
            "structure:\n```python\nclass S:\n```\n\n### Answer: (use the provided format with backticks)"
        ],
    ),
}


@pytest.mark.parametrize("name", list(FORMS))
def test_every_set_has_the_papers_prompts(name, tmp_path, monkeypatch):
    row, turns = ROWS[name]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    rows, hashes = load_data_sets([f"{name}={path}"], None, 42)
    assert rows == [{"id": f"{name}-0", "kind": name, "turns": turns}] and hashes[name].startswith("sha256:")
    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        return Dataset.from_list([row] * 300)

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    rows, _ = load_data_sets([name], None, 42)
    assert len(rows) == FORMS[name].prompts and all(row["turns"] == turns for row in rows)
    ids = {
        "mt-bench": ("HuggingFaceH4/mt_bench_prompts", "default", "train"),
        "humaneval": ("openai/openai_humaneval", "openai_humaneval", "test"),
        "gsm8k": ("openai/gsm8k", "main", "test"),
        "math500": ("HuggingFaceH4/MATH-500", "default", "test"),
        "alpaca": ("tatsu-lab/alpaca", "default", "train"),
    }
    if name in ids:
        assert asked == [(ids[name][:2], {"split": ids[name][2]})]
    else:
        hub = "hf://datasets/livecodebench/code_generation_lite/"
        files = [hub + f"test{n}.jsonl" for n in ("", 2, 3, 4, 5, 6)]
        assert asked == [(("json",), {"data_files": files, "split": "train"})]


def test_rows_without_what_only_some_have():
    alpaca, code = FORMS["alpaca"].turns, FORMS["livecodebench"].turns
    assert alpaca({"instruction": "Sing.", "input": ""}) == ["Sing."]
    for starter in ("", None):
        text = code({"question_content": "Add.", "starter_code": starter})[0]
        assert "### Format: Write your code in the following format:\n```python\n# YOUR CODE HERE\n```" in text


def test_prompts_are_drawn_with_the_seed(tmp_path):
    path = tmp_path / "test.parquet"
    Dataset.from_list([{"question": f"{i}?", "answer": ""} for i in range(300)]).to_parquet(path)
    drawn = {limit: [r["id"] for r in load_data_sets([f"gsm8k={path}"], limit, 42)[0]] for limit in (None, 5, 3)}
    assert len(drawn[None]) == 128 and len(drawn[5]) == 5 and set(drawn[3]) < set(drawn[5]) < set(drawn[None])
    assert drawn[5] == [r["id"] for r in load_data_sets([f"gsm8k={path}"], 5, 42)[0]]
    assert drawn[5] != [r["id"] for r in load_data_sets([f"gsm8k={path}"], 5, 43)[0]]
    assert drawn[5] != [f"gsm8k-{i}" for i in range(5)]
    # A folder as the Hub's clone is one.
    assert [r["id"] for r in load_data_sets([f"gsm8k={tmp_path}"], 5, 42)[0]] == drawn[5]


def test_files_keep_their_order_and_kinds(place):
    rows, hashes = load_data_sets([str(place / "prompts.jsonl")], 1, 42)
    assert [(r["kind"], r["id"]) for r in rows] == [("chat", "chat-1"), ("code", "code-0")]
    assert rows[0]["turns"] == list(QUESTIONS[1:3])
    assert hashes == {"prompts.jsonl": file_hash(place / "prompts.jsonl")}


def test_a_set_that_cannot_be_had_is_named_before_a_model_is_loaded(place, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "load_target", pytest.fail)
    monkeypatch.setattr(module, "load_drafter", pytest.fail)
    # Offline, as all tests are.
    with pytest.raises(
        OSError, match=r"--data gsm8k: openai/gsm8k cannot be had .*--data gsm8k=PATH.*question.*turns"
    ):
        benchmark(options_of(place, tmp_path, ["gsm8k"]))
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "other.jsonl").write_text('{"problem": "x"}\n')
    (tmp_path / "blank.jsonl").write_text('{"question": " "}\n')
    (tmp_path / "gsm8k.jsonl").write_text(json.dumps(ROWS["gsm8k"][0]) + "\n")
    write_prompts(tmp_path / "mine.jsonl", [("gsm8k", ["1?"])])
    mine, rows = str(tmp_path / "mine.jsonl"), f"gsm8k={tmp_path / 'gsm8k.jsonl'}"
    for data, error, message in (
        (["mtbench"], ValueError, "no set of that name.*mt-bench, humaneval, gsm8k, math500, alpaca, livecodebench"),
        ([str(tmp_path / "nowhere.jsonl")], FileNotFoundError, "nowhere.jsonl is not a file"),
        ([f"gsm8k={tmp_path / 'nowhere.jsonl'}"], FileNotFoundError, "there is no such file or folder"),
        ([str(tmp_path / "empty.jsonl")], ValueError, "holds no rows"),
        ([f"gsm8k={tmp_path / 'empty.jsonl'}"], ValueError, "there is no prompt"),
        ([f"gsm8k={tmp_path / 'other.jsonl'}"], ValueError, "no column 'question'; there are 'problem'"),
        ([f"gsm8k={tmp_path / 'blank.jsonl'}"], ValueError, "column 'question' of row 0 is no text"),
        ([mine, rows], ValueError, "both hold prompts of the kind 'gsm8k'"),
    ):
        with pytest.raises(error, match=message):
            benchmark(options_of(place, tmp_path / "out", data))
    assert not (tmp_path / "out").exists()


# -- users' errors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"max_new_tokens": 1}, "--max-new-tokens must be at least 2, got 1"),
        ({"limit": 0}, "--limit must be at least 1"),
        ({"temperature": [-1.0]}, "--temperature must be from 0"),
        ({"temperature": []}, "--temperature is missing"),
        ({"temperature": [math.nan]}, "--temperature must be"),
        ({"top_p": 0.0}, "--top-p must be above 0"),
        ({"top_k": -1}, "--top-k must be at least 0"),
        ({"dtype": "bf16"}, "--dtype must be float32"),
        ({"drafter": []}, "--drafter is missing"),
        ({"data": []}, "--data is missing"),
    ],
)
def test_options_that_will_not_do(place, tmp_path, changed, message):
    with pytest.raises(ValueError, match=message):
        options_of(place, tmp_path, **changed)


def test_drafters_and_folders_that_will_not_do(place, tmp_path, calls):
    narrow = tiny_target("llama", hidden_size=64, head_dim=16, vocab_size=205)
    tiny_drafter(narrow).save_pretrained(tmp_path / "narrow")
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "results.json").write_text("{}")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / module.NOTE).write_text("[]")
    (tmp_path / "file").write_text("")
    d = str(place / "d")
    for changed, error, message in (
        ({"drafter": [str(tmp_path / "narrow")]}, ValueError, "narrow: The drafter's hidden size is 64"),
        ({"drafter": [str(tmp_path / "nowhere")]}, ValueError, "neither a folder nor"),
        ({"drafter": [str(tmp_path / "empty")]}, FileNotFoundError, "holds no config.json"),
        ({"drafter": [d, d]}, ValueError, "two drafters are called d; name them"),
        ({"drafter": [f"plain={d}"]}, ValueError, "plain is the name of another row"),
        ({"output_dir": str(tmp_path / "full")}, ValueError, "holds results of something else"),
        ({"output_dir": str(tmp_path / "broken")}, ValueError, "is damaged"),
        ({"output_dir": str(tmp_path / "file")}, ValueError, "is a file; give a folder"),
    ):
        with pytest.raises(error, match=message):
            benchmark(options_of(place, tmp_path / "out", **changed))
    assert not calls  # nothing has run


def test_a_dflash_of_others_is_measured_as_it_is(place, tmp_path):
    """In the z-lab layout; its own generator and ours draft alike."""
    drafter = RetraceDrafter.from_pretrained(place / "other")
    write(tmp_path / "zlab", zlab_config(drafter), drafter.state_dict())
    results = benchmark(options_of(place, tmp_path / "out", drafter=[f"dflash={tmp_path / 'zlab'}"]))
    ours, theirs = (results["variants"][name]["all"]["rounds"] for name in ("dflash", "signal_off"))
    assert ours == theirs


def test_a_dflash_may_leave_to_the_target_what_that_says(place, tmp_path):
    """speculators does not write how many layers the target has. A folder may have an = in its name."""
    drafter = RetraceDrafter.from_pretrained(place / "other")
    config = zlab_config(drafter)
    del config["num_target_layers"]
    write(tmp_path / "lr=0.1", config, drafter.state_dict())
    for given, name in ((f"{tmp_path}/lr=0.1", "lr=0.1"), (f"dflash={tmp_path}/lr=0.1", "dflash")):
        results = benchmark(options_of(place, tmp_path / name, drafter=[given]))
        assert list(results["variants"]) == ["plain", "signal_off", name]


# -- the table, the card, the command --------------------------------------------------------------------------------


def test_the_table_is_laid_out_as_the_papers():
    def variant(*figures):
        kinds = ("math500", "mt-bench", "mine")
        return {kind: {"speedup_median": s, "acceptance_length": t} for kind, (s, t) in zip(kinds, figures)} | {
            "all": {"speedup_median": 9.0, "acceptance_length": 9.0}
        }

    table = benchmark_table(
        {"plain": variant((1.0, 1.0), (1.0, 1.0), (1.0, 1.0)), "d": variant((6.084, 7.866), (2.75, 4.24), (1.0, 2.0))}
    )
    assert table.splitlines() == [
        "| method | MT-Bench speed-up | MT-Bench tau | MATH-500 speed-up | MATH-500 tau | mine speed-up | mine tau "
        "| average speed-up | average tau |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
        "| plain | 1.00x | 1.00 | 1.00x | 1.00 | 1.00x | 1.00 | 1.00x | 1.00 |",
        "| d | 2.75x | 4.24 | 6.08x | 7.87 | 1.00x | 2.00 | 3.28x | 4.70 |",
    ]


def test_the_command_takes_several_values_draws_and_makes_a_card(place, tmp_path, monkeypatch):
    drawn, real = {}, matplotlib.axes.Axes.plot

    def plot(self, *args, **kwargs):
        drawn.setdefault(kwargs["label"], []).append(args)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(matplotlib.axes.Axes, "plot", plot)
    write_prompts(tmp_path / "more.jsonl", [("math", QUESTIONS[3:])])
    command = ["benchmark", "--target", place / "target", f"--drafter={place / 'd'}", f"b={place / 'other'}"]
    command += ["--data", place / "one.jsonl", tmp_path / "more.jsonl", "--temperature", "0", "1", "--limit", 1]
    command += ["--max-new-tokens", 9, "--output-dir", tmp_path / "out", "--threads", torch.get_num_threads()]
    done = CliRunner().invoke(app, list(map(str, command)))
    assert done.exit_code == 0, (done.output, done.exception)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert list(results["temperatures"]) == ["0", "1"]
    assert list(results["variants"]) == ["plain", "d_signal_off", "d", "b_signal_off", "b"]
    assert {p["kind"] for p in results["prompts"]} == {"chat", "math"}
    d = results["variants"]["d"]["all"]
    assert [list(drawn["d"][0][0]), drawn["d"][0][1]] == [
        list(range(1, len(d["acceptance_at"]) + 1)),
        pytest.approx(d["acceptance_at"], abs=1e-5),
    ]
    assert all(
        (tmp_path / "out" / name).read_bytes()[:4] == b"\x89PNG" for name in ("tau_by_kind.png", "accepted_counts.png")
    )
    table = (tmp_path / "out" / "results.md").read_text()
    assert table == results_markdown(
        results, [f"{n}.png" for n in ("acceptance_at", "tau_by_kind", "accepted_counts", "tau_by_context")]
    )
    repeated = list(map(str, command))
    at = repeated.index("1")
    repeated[at:at] = ["--temperature"]
    done = CliRunner().invoke(app, [*repeated, "--no-plots"])
    assert done.exit_code == 0, done.output

    for folder, name in (("d", "d"), ("other", "b")):
        card_folder = tmp_path / name
        RetraceDrafter.from_pretrained(place / folder).save_pretrained(card_folder)
        (card_folder / "model.safetensors").write_bytes((place / folder / "model.safetensors").read_bytes())
        (card_folder / "results.json").write_text(json.dumps(results))
        card = render_card(card_folder)
        entry = results["variants"][name]["all"]
        assert f"This drafter is the row `{name}`" in card and f"{entry['acceptance_length']:.3f}" in card
        assert "Greedy, float32" in card and "the text is plain's on 2 of 2 prompts" in card


def test_a_card_of_sampled_results_says_so(place, tmp_path):
    benchmark(options_of(place, tmp_path / "out", "one.jsonl", temperature=[0.7]))
    RetraceDrafter.from_pretrained(place / "d").save_pretrained(tmp_path / "d")
    (tmp_path / "d" / "results.json").write_bytes((tmp_path / "out" / "results.json").read_bytes())
    card = render_card(tmp_path / "d")
    assert "Sampled at temperature 0.7, float32" in card and "plain's on" not in card and "match_rate" not in card


def test_ctrl_c_says_that_it_goes_on(place, tmp_path, monkeypatch):
    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "answer", stop)
    command = ["benchmark", "--target", place / "target", "--drafter", place / "d", "--data", place / "one.jsonl"]
    done = CliRunner().invoke(app, list(map(str, [*command, "--no-plots", "--output-dir", tmp_path])))
    assert done.exit_code == 130 and "the same command goes on" in done.output


def test_the_paper_s_protocol_is_the_default(place):
    options = BenchmarkOptions(drafter=["d"], data=["gsm8k"], output_dir="o")
    assert (options.temperature, options.top_p, options.top_k) == ([0.0, 1.0], 0.95, 20)
    assert (options.seed, options.max_new_tokens, options.limit) == (42, 8192, None)
    assert {name: form.prompts for name, form in FORMS.items()} == {
        "mt-bench": 80, "humaneval": 164, "gsm8k": 128, "math500": 128, "alpaca": 128, "livecodebench": 128,
    }  # fmt: skip
    assert set(FORMS) == set(data_sets.DATA_SETS)
