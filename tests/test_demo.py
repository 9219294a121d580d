"""The demo: where text comes from is told rightly, and the table says what was measured."""

import io
import re
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
from rich.console import Console

from retrace_hf import RetraceDrafter, cli
from retrace_hf import demo as demo_module
from retrace_hf.demo import OriginPrinter, OriginStreamer, Run, answer, find_drafter, pool, results_table, run_demo
from retrace_hf.generation import AcceptanceStats

from .fixtures import oracle, plain, tiny_drafter, tiny_target


ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    return smollm2[1]


@pytest.fixture(scope="module")
def target(tokenizer):
    return tiny_target("llama", vocab_size=len(tokenizer))


def piped(width=160) -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=width, highlight=False)


def stream(tokenizer, *puts: list[int]) -> list[tuple[str, bool]]:
    pieces = []
    streamer = OriginStreamer(tokenizer, lambda text, drafted: pieces.append((text, drafted)))
    for ids in puts:
        streamer.put(torch.tensor([ids]))
    streamer.end()
    return pieces


def test_streamer_tells_drafted_tokens_from_the_targets(tokenizer):
    ids = tokenizer("The capital of France is Paris.")["input_ids"]
    assert len(ids) == 7
    pieces = stream(tokenizer, [1, 2, 3], ids[:1], ids[1:4], ids[4:5], ids[5:])
    assert "".join(text for text, _ in pieces) == "The capital of France is Paris."
    assert [drafted for _, drafted in pieces] == [False, True, True, False, False, True, False]
    assert pieces[1] == (" capital", True)


def test_a_streamer_serves_call_after_call(tokenizer):
    """The next prompt is no text of an answer, as transformers' own streamers have it."""
    ids = tokenizer("The capital of France is Paris.")["input_ids"]
    pieces = []
    streamer = OriginStreamer(tokenizer, lambda text, drafted: pieces.append((text, drafted)))
    for _ in range(2):
        for put in ([1, 2, 3], ids[:1], ids[1:]):
            streamer.put(torch.tensor([put]))
        streamer.end()
    half = len(pieces) // 2
    assert pieces[:half] == pieces[half:]
    assert "".join(text for text, _ in pieces[:half]) == "The capital of France is Paris."


def test_characters_spread_over_tokens_are_written_whole(tokenizer):
    text = "天空 🦜!"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) > len(text)
    for cut in range(1, len(ids)):
        pieces = (
            stream(tokenizer, [1], ids[:1], ids[1:cut], ids[cut:])
            if cut > 1
            else stream(tokenizer, [1], *([i] for i in ids))
        )
        assert "".join(piece for piece, _ in pieces) == text
        assert "\ufffd" not in "".join(piece for piece, _ in pieces)
    # A text that ends within a character is not swallowed.
    assert "".join(piece for piece, _ in stream(tokenizer, [1], *([i] for i in ids[:2]))) == tokenizer.decode(ids[:2])


def test_marks_when_piped_and_colour_on_a_terminal():
    pieces = [("A", False), (" b", True), (" c", True), (" d", False), (" e", False), (" f", True)]
    console = piped()
    printer = OriginPrinter(console)
    for piece in pieces:
        printer.write(*piece)
    printer.end()
    assert console.file.getvalue() == "A[[ b c]] d e[[ f]]\n\n"

    console = Console(
        file=io.StringIO(), force_terminal=True, color_system="standard", no_color=False, highlight=False
    )
    printer = OriginPrinter(console)
    for piece in pieces:
        printer.write(*piece)
    printer.end()
    coloured = console.file.getvalue()
    assert "[[" not in coloured and "\x1b[1;32m b\x1b[0m" in coloured and "\x1b[33m d\x1b[0m" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == "A b c d e f\n\n"


def test_table_counts_pooled_rounds():
    def run(seconds, ids, accepted, proposed):
        return Run(seconds, [ids], AcceptanceStats(accepted, proposed, calls=1))

    ids = list(range(8))
    runs = {
        kind: {
            "plain": run(4.0, ids, [0] * 7, [0] * 7),
            "dflash": run(2.0, ids, [1, 0, 1, 0, 0], [3] * 5),
            "retrace": run(1.0, last, [3, 2], [3, 3]),
        }
        for kind, last in (("chat", ids), ("maths", [*ids[:5], 99, 6, 7]))
    }
    console = piped()
    console.print(results_table(runs))
    rows = [line.split() for line in console.file.getvalue().splitlines() if "(" in line]
    text = [" ".join(row) for row in rows]
    assert "chat (a) plain generate 8 7 1.00 4.00 1.00 0.50" in text
    assert "(c) ReTrace yes 8 2 3.50 100 100 50 1.00 4.00 2.00" in text
    assert "(c) ReTrace no, from token 6 8 2 3.50 100 100 50 1.00 4.00 2.00" in text
    assert "(b) DFlash, signal off yes 16 10 1.40 40 0 0 4.00 2.00 1.00" in text
    assert "(c) ReTrace no, 1 of 2 differ 16 4 3.50 100 100 50 2.00 4.00 2.00" in text


def test_pooling_keeps_every_round():
    one = Run(1.0, [[1, 2, 3]], AcceptanceStats([1], [7], calls=1))
    pooled = pool([one, one])
    assert pooled.seconds == 2.0 and pooled.ids == [[1, 2, 3]] * 2
    assert pooled.stats.new_tokens == 6 and pooled.stats.acceptance_length == 2.0


def test_answers_are_counted_alike_with_and_without_a_drafter(target):
    prompt = torch.arange(3, 20)[None]
    inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    expected = plain(target, prompt, max_new_tokens=17)
    right = oracle(tiny_drafter(target), target, expected)
    runs = [answer(target, inputs, 17), answer(target, inputs, 17, drafter=right)]
    assert runs[0].ids == runs[1].ids == [expected[0, 17:].tolist()]
    assert [run.stats.new_tokens for run in runs] == [17, 17]
    assert [run.stats.acceptance_length for run in runs] == [1.0, 8.0]


def test_demo_end_to_end_when_piped(target, tokenizer):
    prompts = {"chat": "Hello there", "maths": "1 + 1", "code": "def f"}
    console = piped()
    runs = run_demo(target, tokenizer, tiny_drafter(target), prompts, 12, console)
    out = console.file.getvalue()
    assert list(runs) == ["chat", "maths", "code"]
    for kind, prompt in prompts.items():
        assert f"{kind}: {prompt}" in out
        assert len({tuple(run.ids[0]) for run in runs[kind].values()}) == 1
        assert tokenizer.decode(runs[kind]["retrace"].ids[0], skip_special_tokens=True) in plain_text(out)
    assert "[[drafted and accepted]] supplied by the target" in out
    assert out.count("(b) DFlash, signal off") == out.count("(c) ReTrace") == 4
    assert "\x1b" not in out


def plain_text(out: str) -> str:
    return out.replace("[[", "").replace("]]", "")


def test_command_reports_what_a_user_can_mend(monkeypatch, capsys):
    for arguments, message in (
        (["--drafter", "nowhere"], "There is no drafter in nowhere"),
        (["--max-new-tokens", "1"], "--max-new-tokens must be at least 2"),
        (["--threads", "0"], "--threads must be at least 1"),
    ):
        monkeypatch.setattr(sys, "argv", ["retrace-hf", "demo", *arguments])
        with pytest.raises(SystemExit) as exit:
            cli.main()
        captured = capsys.readouterr()
        assert exit.value.code == 1 and captured.err.startswith(f"retrace-hf: {message}")
        assert captured.err.count("\n") == 1 and not captured.out


def test_command_with_the_shipped_drafter(monkeypatch, capsys, smollm2):
    """The demo as it ships, shortened."""
    monkeypatch.setattr(demo_module, "load_target", lambda name, dtype: smollm2)
    monkeypatch.setattr(sys, "argv", ["retrace-hf", "demo", "--max-new-tokens", "8"])
    threads = torch.get_num_threads()
    with pytest.raises(SystemExit) as exit:
        cli.main()
    out = capsys.readouterr().out
    assert not exit.value.code and torch.get_num_threads() == threads
    for kind in demo_module.PROMPTS:
        assert re.search(rf"^\s+{kind}\s+\(a\) plain generate", out, re.MULTILINE)
    assert out.count("(c) ReTrace") == 4 and "no, from" not in out


def test_drafter_is_found_from_anywhere(tmp_path, monkeypatch, target):
    tiny_drafter(target).save_pretrained(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    assert find_drafter("mine") == Path("mine")
    assert RetraceDrafter.from_pretrained(find_drafter("mine")).config.block_size == 8
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match="There is no drafter in org/other: .* nor a repository .*--drafter"):
        find_drafter("org/other")
    Path("empty").mkdir()
    with pytest.raises(FileNotFoundError, match="the folder has no config.json"):
        find_drafter("empty")


def test_a_drafter_may_be_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.setattr(demo_module, "local_folder", lambda path: tmp_path / path.replace("/", "--"))
    assert find_drafter("org/drafter") == tmp_path / "org--drafter"
