"""The page of examples/space without a browser and without gradio: what it counts, colours, escapes and turns away."""

import importlib.util
import sys
import threading
import time
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
import yaml
from packaging.requirements import Requirement

from retrace_hf import record_acceptance

from .fixtures import KINDS, drafter_of_kind, letters_chat_target, plain


ROOT = Path(__file__).parents[1]
SPACE = ROOT / "examples" / "space"
NEW_TOKENS = 40


def load_side_by_side():
    spec = importlib.util.spec_from_file_location("side_by_side", SPACE / "side_by_side.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


side_by_side = load_side_by_side()
SETTINGS = side_by_side.Settings.from_environment({"RETRACE_MAX_NEW_TOKENS": "64", "RETRACE_MAX_PROMPT_TOKENS": "32"})


def models_of(kind: str, prompt: str = "abcd"):
    """A target that chats in letters, and a drafter for it. Returns them, the inputs and plain's new tokens."""
    target, tokenizer = letters_chat_target(seed=1)
    models = side_by_side.Models(target, tokenizer, None)
    inputs = side_by_side.encode(models, prompt, SETTINGS)
    sequence = plain(target, inputs["input_ids"], max_new_tokens=NEW_TOKENS)
    longer = plain(target, inputs["input_ids"], max_new_tokens=NEW_TOKENS + 16)  # an oracle drafts beyond the limit
    drafter = drafter_of_kind(kind, target, longer)
    return models._replace(drafter=drafter), inputs, sequence[0, inputs["input_ids"].shape[1] :].tolist()


def last_of(iterator):
    last = None
    for last in iterator:  # noqa: B007
        pass
    return last


class Spans(HTMLParser):
    """Class and text of every span; every tag that is there."""

    def __init__(self, source: str):
        super().__init__()
        self.spans, self.tags = [], set()
        self.feed(source)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        if tag == "span":
            self.spans.append([dict(attrs)["class"], ""])

    def handle_data(self, data):
        if self.spans:
            self.spans[-1][1] += data


@pytest.mark.parametrize("kind", KINDS)
def test_live_counts_and_colours_are_those_of_the_rounds(kind):
    models, inputs, expected = models_of(kind)
    answer = last_of(side_by_side.stream(models, inputs, models.drafter, NEW_TOKENS))
    again, _, _ = models_of(kind)  # a scripted drafter counts its rounds
    with record_acceptance() as stats:
        again.target.generate(**inputs, assistant_model=again.drafter, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert answer.ids == expected and answer.seconds > 0
    assert answer.passes == stats.rounds and answer.acceptance_length == pytest.approx(stats.acceptance_length)
    origins = [False]  # the prefill's token
    for accepted in stats.accepted_per_round:
        origins += [True] * accepted + [False]
    shown = [(models.tokenizer.decode([token]), drafted) for token, drafted in zip(expected, origins)]
    special = set(models.tokenizer.all_special_tokens)
    shown = [(text, drafted) for text, drafted in shown if text not in special]
    assert answer.pieces == shown
    spans = Spans(side_by_side.answer_html(answer)).spans
    assert spans == [["drafted" if drafted else "target", text] for text, drafted in shown]
    assert any(origins) == (kind != "wrong") or kind == "real"


def test_counts_are_live():
    models, inputs, _ = models_of("mixed")
    seen = []
    answer = side_by_side.Answer(models.tokenizer)

    class Watcher:
        def put(self, value):
            answer.put(value)
            seen.append((len(answer.ids), answer.passes, answer.acceptance_length))

        def end(self):
            pass

    assert answer.acceptance_length is None
    models.target.generate(
        **inputs, assistant_model=models.drafter, streamer=Watcher(), max_new_tokens=NEW_TOKENS, do_sample=False
    )
    assert seen[:2] == [(0, 0, None), (1, 0, None)] and len(seen) > 4
    for passes, (tokens, counted, tau) in enumerate(seen[2:], start=1):
        assert counted == passes and tau == (tokens - 1) / passes


def test_plain_is_one_token_a_pass_and_none_drafted():
    models, inputs, expected = models_of("real")
    answer = last_of(side_by_side.stream(models, inputs, None, NEW_TOKENS))
    assert answer.ids == expected and answer.passes == len(expected) - 1 and answer.acceptance_length == 1
    assert answer.pieces and not any(drafted for _, drafted in answer.pieces)


def test_both_ways_and_the_verdict():
    models, _, expected = models_of("oracle")
    views = list(side_by_side.answer_twice(models, "abcd", NEW_TOKENS, SETTINGS))
    retrace, plainly = views[-1]
    assert retrace.ids == plainly.ids == expected and views[0][1] is None
    assert side_by_side.verdict(retrace, None) == "" and side_by_side.verdict(None, None) == ""
    retrace.seconds, plainly.seconds = 2.0, 5.0
    assert side_by_side.verdict(retrace, plainly) == (
        "Text equal: yes. ReTrace took 2.00 s and plain generate 5.00 s: 2.50 times as fast."
    )
    plainly.ids[-1] += 1
    assert "equal: no" in side_by_side.verdict(retrace, plainly)
    tau = f"tau {retrace.acceptance_length:.2f}"
    expected_counts = f"{len(expected)} tokens, {retrace.passes} target passes, {tau}, 2.00 s"
    assert side_by_side.counts(retrace) == expected_counts


def test_text_is_escaped():
    answer = side_by_side.Answer(None)
    hostile = ["<img src=x onerror=alert(1)>", "</span>", "&lt;", "\"a\" 'b'", "<scr", "ipt>"]
    answer.pieces = [(text, i % 2 == 0) for i, text in enumerate(hostile)]
    parsed = Spans(side_by_side.answer_html(answer))
    assert parsed.tags == {"div", "span"} and [text for _, text in parsed.spans] == hostile


def test_two_visitors_at_once_each_get_their_own_text(monkeypatch):
    monkeypatch.setattr(side_by_side, "SECONDS_BETWEEN_VIEWS", 0)
    models, inputs, first = models_of("real")
    other_inputs = side_by_side.encode(models, "efghij", SETTINGS)
    second = plain(models.target, other_inputs["input_ids"], max_new_tokens=NEW_TOKENS)
    second = second[0, other_inputs["input_ids"].shape[1] :].tolist()
    assert first != second
    visitors = [side_by_side.stream(models, i, models.drafter, NEW_TOKENS) for i in (inputs, other_inputs)]
    answers = [next(visitor) for visitor in visitors]
    assert all(answer.seconds is None for answer in answers)  # both threads are at work
    for visitor in visitors:
        last_of(visitor)
    assert [answer.ids for answer in answers] == [first, second]


def test_who_leaves_stops_the_generation(monkeypatch):
    monkeypatch.setattr(side_by_side, "SECONDS_BETWEEN_VIEWS", 0)
    models, inputs, expected = models_of("wrong")  # a pass for every token
    passes = []
    models.target.register_forward_hook(lambda *args: passes.append(time.sleep(0.02)))
    threads = threading.active_count()
    leaving = side_by_side.stream(models, inputs, models.drafter, NEW_TOKENS)
    for answer in leaving:
        if len(answer.ids) > 2:
            break
    leaving.close()
    assert answer.seconds is None and threading.active_count() == threads
    assert len(answer.ids) <= len(passes) < len(expected) - 5
    again = models_of("wrong")[0]
    assert last_of(side_by_side.stream(again, inputs, again.drafter, NEW_TOKENS)).ids == expected


def test_an_error_of_generate_reaches_the_page():
    models, inputs, _ = models_of("real")
    models.drafter.config.mask_token_id = None
    with pytest.raises(ValueError, match="mask_token_id"):
        last_of(side_by_side.stream(models, inputs, models.drafter, NEW_TOKENS))


@pytest.mark.parametrize(
    ("prompt", "new_tokens", "message"),
    [
        ("", 8, "prompt is empty"),
        (" \n\t", 8, "prompt is empty"),
        ("ab" * 40, 8, "has 43 tokens and may have 32"),
        ("ab" * 10**6, 8, "2000000 characters"),
        ("abcd", 1, "choose 2 to 64"),
        ("abcd", 65, "choose 2 to 64"),
    ],
)
def test_what_cannot_be_served_is_said_before_the_target_runs(monkeypatch, prompt, new_tokens, message):
    models, _, _ = models_of("real")
    monkeypatch.setattr(type(models.target), "forward", None)
    if len(prompt) > 1000:  # nor is a book tokenised
        monkeypatch.setattr(type(models.tokenizer), "apply_chat_template", None)
    with pytest.raises(ValueError, match=message):
        next(side_by_side.answer_twice(models, prompt, new_tokens, SETTINGS))


def test_settings_come_from_the_environment():
    read = side_by_side.Settings.from_environment
    assert read({"RETRACE_TARGET": "org/target", "RETRACE_DRAFTER": "org/drafter", "RETRACE_DTYPE": "bfloat16"}) == (
        side_by_side.Settings("org/target", "org/drafter", torch.bfloat16, 256, 1024)
    )
    default = read({"RETRACE_TARGET": "", "RETRACE_DRAFTER": ""})
    assert default.target == "HuggingFaceTB/SmolLM2-135M-Instruct" and default.dtype == torch.float32
    assert (Path(default.drafter) / "config.json").is_file()
    for name, value in (
        ("RETRACE_MAX_NEW_TOKENS", "1"),
        ("RETRACE_MAX_PROMPT_TOKENS", "many"),
        ("RETRACE_DTYPE", "int8"),
    ):
        with pytest.raises(ValueError, match=f"{name} is '{value}'"):
            read({name: value})
    models, _, _ = models_of("real")
    models.target.config.max_position_embeddings = 64
    with pytest.raises(ValueError, match="RETRACE_MAX_NEW_TOKENS is 64"):
        side_by_side.encode(models, "abcd", SETTINGS)


def test_the_space_names_what_it_needs():
    front = yaml.safe_load((SPACE / "README.md").read_text(encoding="utf-8").split("---\n")[1])
    lines = (SPACE / "requirements.txt").read_text().splitlines()
    needs = {r.name: r for r in (Requirement(line) for line in lines if line and not line.startswith("#"))}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for asked in map(Requirement, project["dependencies"]):
        assert needs[asked.name].specifier == asked.specifier, asked.name
    browser = {r.name: r for r in map(Requirement, project["optional-dependencies"]["browser"])}
    assert needs["gradio"].specifier == browser["gradio"].specifier
    assert front["sdk"] == "gradio" and (SPACE / front["app_file"]).is_file()
    assert f"gradio=={front['sdk_version']}\n" in (ROOT / "constraints.txt").read_text()
    assert (SPACE / "screenshot.png").stat().st_size < 200_000
