"""The metrics as `evaluate` loads them from the package, without a network."""

import doctest
import math
import re
import sys
import tomllib
from pathlib import Path

import evaluate
import pytest
import yaml

from retrace_hf import record_acceptance
from retrace_hf.evaluation import metric_path
from retrace_hf.evaluation.metrics import METRICS

from .fixtures import always_wrong, oracle, plain, prompt_of, tiny_drafter, tiny_target


ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """`evaluate.load` of a metric, with caches of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("evaluate.config.HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        patch.setattr(sys, "path", list(sys.path))
        cache = tmp_path_factory.mktemp("metrics")
        yield lambda name: evaluate.load(metric_path(name), cache_dir=str(cache))


@pytest.mark.parametrize("name", METRICS)
def test_docstrings_and_cards_say_what_happens(load, name):
    metric = load(name)
    found = doctest.testmod(sys.modules[type(metric).__module__])
    assert found.attempted >= 4 and not found.failed
    card = (Path(metric_path(name)) / "README.md").read_text(encoding="utf-8")
    examples = doctest.DocTestParser().get_doctest(card.replace("```", ""), {}, name, None, 0)
    assert len(examples.examples) >= 4 and not doctest.DocTestRunner().run(examples).failed
    assert {"evaluate", "metric"} <= set(yaml.safe_load(card.split("---")[1])["tags"])
    for section in ("Metric Description", "How to Use", "Inputs", "Output Values", "Examples", "Limitations and Bias"):
        assert re.search(rf"^##+ {section}$", card, re.MULTILINE), section
    assert metric.description and metric.inputs_description and metric.module_type == "metric"


def test_an_unknown_metric_is_named_with_those_there_are():
    with pytest.raises(ValueError, match="no metric 'tau' .* acceptance_length"):
        metric_path("tau")


def test_acceptance_length_is_the_recorders(load):
    """With 1 + k * B tokens an oracle has exactly B, an always-wrong drafter exactly 1."""
    target, prompt = tiny_target(), prompt_of(10)
    metric, block = load("acceptance_length"), tiny_drafter(target).config.block_size
    new_tokens = 1 + 3 * block
    sequence = plain(target, prompt, new_tokens)
    for script, tau in ((oracle, block), (always_wrong, 1)):
        with record_acceptance() as stats:
            plain(target, prompt, new_tokens, assistant_model=script(tiny_drafter(target), target, sequence))
        accepted, proposed = stats.accepted_per_round, stats.proposed_per_round
        found = metric.compute(predictions=[accepted], proposed=[proposed])
        assert found.pop("acceptance_at") == stats.acceptance_at
        assert found == {"acceptance_length": tau, "rounds": stats.rounds, "new_tokens": new_tokens}


def test_acceptance_length_over_rounds_and_over_requests(load):
    metric = load("acceptance_length")
    requests = [[4, 0, 1], [], [6]]
    assert metric.compute(predictions=requests)["acceptance_length"] == (5 + 1 + 2 + 7) / 4
    assert metric.compute(predictions=requests)["new_tokens"] == 3 + 11 + 4 - 3 + 3
    mean = metric.compute(predictions=requests, average="requests")["acceptance_length"]
    assert mean == ((5 + 1 + 2) / 3 + 7) / 2
    for request in requests:  # the other way of evaluate: one by one
        metric.add(predictions=request)
    assert metric.compute()["acceptance_length"] == (5 + 1 + 2 + 7) / 4


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"predictions": []}, "no round"),
        ({"predictions": [[], []]}, "no round"),
        ({"predictions": [[1, -1]]}, "Request 0 .* no counts"),
        ({"predictions": [[1], [1.5]]}, "Request 1 .* no counts"),
        ({"predictions": [[1, 3]], "proposed": [[1, 2]]}, "Request 0 accepted 3 .* verified 2"),
        ({"predictions": [[1, 3]], "proposed": [[1]]}, "one number for each round"),
        ({"predictions": [[1]], "average": "tokens"}, "average is 'tokens'"),
        ({"predictions": [1, 2]}, "expected format"),
    ],
)
def test_acceptance_length_refuses(load, inputs, message):
    with pytest.raises(ValueError, match=message):
        load("acceptance_length").compute(**inputs)


def test_speedup_is_the_median_of_the_prompts(load):
    metric = load("speculative_speedup")
    found = metric.compute(predictions=[1, 1, 1, 10], references=[1, 2, 4, 10])
    assert found == {"speculative_speedup": 1.5, "total": 17 / 13, "ratios": [1, 2, 4, 1]}
    by_token = metric.compute(
        predictions=[1, 1], references=[1, 1], prediction_tokens=[20, 30], reference_tokens=[10, 10]
    )
    assert by_token == {"speculative_speedup": 2.5, "total": 2.5, "ratios": [2, 3]}


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"predictions": [], "references": []}, "empty"),
        ({"predictions": [1, 2], "references": [1]}, "Mismatch"),
        ({"predictions": [0.0], "references": [1]}, "predictions has 0"),
        ({"predictions": [1], "references": [-1]}, "references has -1"),
        ({"predictions": [1], "references": [math.nan]}, "references has nan"),
        ({"predictions": [1], "references": [1], "prediction_tokens": [1]}, "go together"),
        ({"predictions": [1], "references": [1], "prediction_tokens": [1], "reference_tokens": []}, "0 entries for 1"),
        ({"predictions": [1], "references": [1], "prediction_tokens": [1], "reference_tokens": [0]}, "tokens has 0"),
    ],
)
def test_speedup_refuses(load, inputs, message):
    with pytest.raises(ValueError, match=message):
        load("speculative_speedup").compute(**inputs)


def test_match_rate_finds_where_outputs_part(load):
    metric = load("match_rate")
    found = metric.compute(predictions=[[1, 2], [1, 2, 3], [1, 9], []], references=[[1, 2], [1, 2], [1, 2], []])
    assert found == {"match_rate": 0.5, "matches": 2, "first_difference": [-1, 2, 1, -1]}
    assert load("match_rate").compute(predictions=["abc", ""], references=["abd", ""])["first_difference"] == [2, -1]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"predictions": [], "references": []}, "empty"),
        ({"predictions": [[1], [2]], "references": [[1]]}, "Mismatch"),
        ({"predictions": [[1]], "references": ["a"]}, "expected format"),
    ],
)
def test_match_rate_refuses(load, inputs, message):
    with pytest.raises(ValueError, match=message):
        load("match_rate").compute(**inputs)


def test_the_package_brings_the_metrics_along():
    """A folder without __init__.py is taken where setuptools looks for namespaces, as it does by default."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    assert setuptools["packages"]["find"].get("namespaces", True)
    assert "**/*.md" in setuptools["package-data"]["retrace_hf"]
    for name in METRICS:
        assert {path.name for path in Path(metric_path(name)).iterdir()} >= {f"{name}.py", "README.md"}
