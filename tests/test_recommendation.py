"""examples/recommendation.py: its parts by hand, and all of it on a folder shaped as ml-100k."""

import json
import random
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Trainer

from retrace_hf import RetraceConfig, RetraceDrafter
from retrace_hf.positions import block_item_slots, item_slots_of

from .test_examples import EXAMPLES, Run


SMALL = ["--levels", 3, "--codes", 4, "--factors", 6, "--history", 6, "--list-items", 3, "--hidden-size", 24]
SMALL += ["--target-epochs", 2, "--lists-per-user", 2, "--stage1-steps", 4, "--stage2-steps", 2, "--anchors", 4]
SMALL += ["--train-batch-size", 4, "--generate-users", 3, "--block-size", 5]


@pytest.fixture(scope="module")
def example():
    """The script's names."""
    return runpy.run_path(str(EXAMPLES / "recommendation.py"), run_name="recommendation")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Twelve users who walk through thirty films, written in no order; one user is too short to split."""
    rng, rows = random.Random(0), []
    for user in range(12):
        start = rng.randrange(30)
        rows += [f"{user}\t{(start + 2 * t) % 30}\t3\t{1000 + t}" for t in range(6 + user % 5)]
    rows += [f"short\t{item}\t3\t{item}" for item in range(3)]
    rng.shuffle(rows)
    folder = tmp_path_factory.mktemp("ml-100k")
    header = "user_id:token\titem_id:token\trating:float\ttimestamp:float"
    (folder / "ml-100k.inter").write_text("\n".join([header, *rows]) + "\n")
    return folder


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("recommendation") / "run"
    Run()("recommendation.py", "--data", data, "--output", output, "--separator", *SMALL)
    return output


# -- its parts -------------------------------------------------------------------------------------------------------


def test_histories_are_in_the_order_of_time(example, data):
    histories = example["read_histories"](data / "ml-100k.inter")
    assert len(histories) == 12 and "short" not in histories
    for items in histories.values():
        steps = {(int(b) - int(a)) % 30 for a, b in zip(items, items[1:])}
        assert steps == {2}


def test_codes_are_unique_and_near_items_share_them(example):
    """Two worlds of films that no user mixes, and films of no history at all."""
    rng, histories = np.random.default_rng(0), []
    for user in range(40):
        world = 20 * (user % 2)
        histories.append((world + rng.permutation(20)[:12]).tolist())
    vectors = example["item_vectors"](histories, 45, 8)
    assert vectors.shape == (45, 8) and not vectors[40:].any() and vectors[:40].any(1).all()
    codes, sizes = example["semantic_ids"](vectors, levels=3, codes=4, seed=0)
    assert len({tuple(one) for one in codes}) == 45 and len(sizes) == 3
    assert all(0 <= code < size for one in codes for code, size in zip(one, sizes))
    first = [one[0] for one in codes]
    assert not set(first[:20]) & set(first[20:40])
    assert (codes, sizes) == example["semantic_ids"](vectors, levels=3, codes=4, seed=0)


@pytest.mark.parametrize("separator", [False, True])
def test_tokens_are_read_back_and_tell_their_slots(example, separator):
    catalogue = example["Catalogue"]([[0, 1], [2, 0], [2, 1]], [3, 2], separator)
    tokens = catalogue.encode([2, 0, 1])
    assert tokens[0] == example["BOS"] and catalogue.decode(tokens[1:]) == [2, 0, 1]
    config = RetraceConfig(vocab_size=catalogue.vocab_size, block_size=3, **catalogue.grammar)
    period = 2 + separator
    slots = item_slots_of(torch.tensor(tokens), config).tolist()
    assert slots == [-1] + [i % period for i in range(3 * period)]
    blocks = block_item_slots(torch.tensor([tokens]), config).view(-1, 3)
    assert blocks[1:].tolist() == [[(i + j) % period for j in range(3)] for i in range(3 * period)]
    assert catalogue.decode([tokens[2], tokens[1], *tokens[1 : 1 + period]])[0] is None  # codes in the wrong order


@pytest.mark.parametrize("separator", [False, True])
def test_only_new_items_are_allowed(example, separator):
    """Walked to the end by chance, a list holds every item that was not seen, once."""
    catalogue = example["Catalogue"]([[i // 4, i % 4] for i in range(12)], [4, 4], separator)
    prompt, rng = [0, 0, *catalogue.encode([3, 5])], random.Random(0)
    allowed = catalogue.allowed([set(), {0, 1, 2, 3, 5}], len(prompt))
    ids = list(prompt)
    for _ in range(7 * catalogue.period):
        ids.append(rng.choice(allowed(1, torch.tensor(ids))))
    assert sorted(catalogue.decode(ids[len(prompt) :])) == [4, 6, 7, 8, 9, 10, 11]
    assert allowed(1, torch.tensor(ids)) == [] and len(allowed(0, torch.tensor(ids))) == 2  # 0 to 3, and 5


def test_measures_of_lists(example):
    measures = example["ranking"]([[5, 9], [1], [4, 2, 8]], [9, 3, 4])
    assert measures["recall@10"] == pytest.approx(2 / 3)
    assert measures["ndcg@10"] == pytest.approx((1 / np.log2(3) + 0 + 1) / 3)
    assert example["most_popular"]({"a": [1, 2], "b": [2, 3]}) == [[3], [1]]


def test_data_that_is_not_there_says_what_to_do(example, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="--data .* holds no ml-100k.inter"):
        example["find_interactions"](str(tmp_path), tmp_path)
    monkeypatch.setattr(example["importlib"].util, "find_spec", lambda name: None)
    # A pip that fails at once.
    monkeypatch.setattr(example["subprocess"], "run", lambda *a, **k: Failed())
    with pytest.raises(ValueError, match="no such host.*pip install --no-deps recbole==1.2.1.*--data FOLDER"):
        example["find_interactions"](None, tmp_path)


class Failed:
    stdout, stderr = "", "ERROR: no such host"


def test_an_installed_package_is_read_and_not_imported(example, data, tmp_path, monkeypatch):
    folder = tmp_path / "recbole" / "dataset_example" / "ml-100k"
    folder.mkdir(parents=True)
    (tmp_path / "recbole" / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / "ml-100k.inter").write_text((data / "ml-100k.inter").read_text())
    monkeypatch.syspath_prepend(str(tmp_path))
    assert example["find_interactions"](None, tmp_path / "out") == folder / "ml-100k.inter"
    assert "recbole" not in sys.modules


# -- the whole -------------------------------------------------------------------------------------------------------


def test_every_arm_is_measured_and_no_list_is_changed(finished):
    results = json.loads((finished / "results.json").read_text())
    arms = ["plain", "slots", "steps", "slots+steps", "retrace", "slots+steps+retrace"]
    variants = results["variants"]
    assert list(variants) == ["target", *arms]
    for entry in variants.values():
        assert entry["prompts"] == 3 and entry["acceptance_length"] >= 1
        assert entry["equal_to_plain"] == entry["equal_to_plain_in_a_batch"] == 3
        assert entry["recommendation"] == variants["target"]["recommendation"]
        assert entry["target_passes"] == entry["rounds"] + 3
    assert variants["target"]["target_passes"] == 3 * 3 * 4  # users, items, tokens with the separator
    added = {arm: variants[arm]["parameters_added"] for arm in arms}
    # Three slots and a separator, and their scalar; four steps, and their gate.
    assert added["slots"] == 4 * 24 + 1 and added["steps"] == 4 * 24 + 25
    assert added["slots+steps"] == added["slots"] + added["steps"]
    assert added["slots+steps+retrace"] == added["slots+steps"] + added["retrace"]
    assert {entry["users"] for entry in results["recommendation"].values()} == {12}
    table = (finished / "results.md").read_text()
    assert all(f"| {arm} |" in table for arm in ("none", *arms))


def test_lists_hold_new_films_once_each(finished, example, data):
    codes = json.loads((finished / "codes.json").read_text())
    catalogue = example["Catalogue"](codes["codes"], codes["sizes"], True)
    histories = example["read_histories"](data / "ml-100k.inter")
    number = {item: i for i, item in enumerate(sorted({i for items in histories.values() for i in items}))}
    lists = [json.loads(line) for line in (finished / "lists.jsonl").read_text().splitlines()]
    assert len(lists) == 12
    for line in lists:
        films, seen = catalogue.decode(line["ids"]), {number[item] for item in histories[line["id"]][:-1]}
        assert len(films) == len(set(films)) == 3 and None not in films and not seen & set(films)


def test_drafters_know_the_grammar(finished):
    config = RetraceDrafter.from_pretrained(finished / "drafters" / "slots+steps+retrace").config
    assert (config.item_slots, config.item_separator_id, config.step_embeddings) == (3, 2, True)
    assert config.conditioning == "corrected" and config.item_token_ranges[0] == [4, 8]


def test_it_goes_on_without_training_anew_and_refuses_other_settings(finished, data, monkeypatch):
    def train(*args, **kwargs):
        raise AssertionError("trained again")

    monkeypatch.setattr(Trainer, "train", train)
    before = json.loads((finished / "results.json").read_text())["variants"]
    options = ["--data", data, "--output", finished, "--separator", *SMALL]
    Run()("recommendation.py", *options)
    assert json.loads((finished / "results.json").read_text())["variants"] == before
    Run().fails("recommendation.py", *options, "--seed", 5, message=r"other settings \(seed\); give another --output")
