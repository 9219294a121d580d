"""Cards are what the files of a folder say, no more."""

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from typer.testing import CliRunner

from retrace_hf.card import card_is_current, is_rendered, render_card, write_card
from retrace_hf.cli import app
from retrace_hf.evaluation.results import command_line
from retrace_hf.redaction import redacted

from .fixtures import tiny_drafter, tiny_target


ROOT = Path(__file__).parents[1]
CARDS = sorted(path.parent for path in (ROOT / "model_cards").glob("*/config.json"))
SHIPPED = ROOT / "model_cards" / "retrace-smollm2-135m"


@pytest.fixture
def folder(tmp_path):
    """A copy of the shipped folder."""
    return Path(shutil.copytree(SHIPPED, tmp_path / SHIPPED.name))


@pytest.fixture(scope="module")
def untold(tmp_path_factory):
    """A drafter of which nothing is known but its weights and config."""
    folder = tmp_path_factory.mktemp("card") / "unknown"
    tiny_drafter(tiny_target(), conditioning="none").save_pretrained(folder)
    return folder


def edit(folder: Path, name: str, change) -> None:
    content = json.loads((folder / name).read_text())
    change(content)
    (folder / name).write_text(json.dumps(content))


@pytest.mark.parametrize("folder", CARDS, ids=lambda folder: folder.name)
def test_every_card_in_the_repository_is_current(folder):
    assert (folder / "README.md").read_bytes() == render_card(folder).encode()


def test_there_are_cards():
    assert SHIPPED in CARDS


def test_metadata_is_what_the_hub_reads(folder):
    results, data = json.loads((folder / "results.json").read_text()), ModelCard.load(folder / "README.md").data
    assert data.base_model == "HuggingFaceTB/SmolLM2-135M-Instruct" and data.license == "apache-2.0"
    assert data.library_name == "transformers" and {"retrace", "dflash", "speculative-decoding"} <= set(data.tags)
    found = {(r.dataset_name, r.metric_type): r for r in data.eval_results}
    names = {"mt-bench": "MT-Bench", "humaneval": "HumanEval", "gsm8k": "GSM8K"}
    assert {dataset for dataset, _ in found} == set(names.values())
    for kind, name in names.items():
        played, generated = results["variants"]["corrected"][kind], results["variants"]["corrected_generate"][kind]
        for metric, value in (
            ("acceptance_length", played["acceptance_length"]),
            ("speculative_speedup", generated["speedup_median"]),
            ("match_rate", generated["equal_to_plain"] / generated["prompts"]),
        ):
            assert found[name, metric].metric_value == pytest.approx(value, abs=5e-4), (name, metric)


def test_every_figure_of_the_results_is_on_the_card_and_follows_them(folder):
    card = (folder / "README.md").read_text()
    results = json.loads((folder / "results.json").read_text())
    for name, variant in results["variants"].items():
        row = next(line for line in card.splitlines() if line.startswith((f"| {name} |", f"| {name} (")))
        assert all(f" {variant[k]['acceptance_length']:.3f} " in row for k in ("mt-bench", "humaneval", "gsm8k")), name
    assert all(f"- {caveat}\n" in card for caveat in results["caveats"])
    edit(folder, "results.json", lambda r: r["variants"]["corrected"]["gsm8k"].update(acceptance_length=7.654))
    changed = render_card(folder)
    assert "| 7.654 |" in changed and "value: 7.654" in changed and not card_is_current(folder)


def test_the_card_says_how_it_was_trained_from_the_first_weights_known(folder):
    card = (folder / "README.md").read_text()
    training = json.loads((folder / "training.json").read_text())
    before = json.loads((folder / "results.json").read_text())["provenance"]["arms"]["stage1"]["training"]
    assert card.index(training["command"]) < card.index(before["command"]) < card.index(before["init_from"])
    assert "Stopped at step 700" in card
    edit(folder, "training.json", lambda note: note.update(command="python train.py --hub_token abc"))  # an older note
    assert "train.py --hub_token ***\n" in render_card(folder)


def test_results_of_other_weights_are_refused(folder):
    edit(folder, "training.json", lambda note: note.update(seed=12))
    assert render_card(folder)  # the weights are still those measured
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    with pytest.raises(ValueError, match="not measured with the weights"):
        render_card(folder)


def test_what_is_missing_is_named(folder, tmp_path):
    with pytest.raises(ValueError, match="no drafter in"):
        render_card(tmp_path)
    edit(folder, "results.json", lambda results: results["provenance"].pop("hardware"))
    with pytest.raises(ValueError, match="lacks the entry 'hardware'"):
        render_card(folder)
    (folder / "results.json").write_text("{")
    with pytest.raises(ValueError, match="results.json is no JSON"):
        render_card(folder)


def test_a_drafter_of_which_little_is_known_has_a_card_too(untold):
    card = render_card(untold)
    data = ModelCard(card).data
    assert data.license is None and data.base_model is None and data.eval_results is None
    assert "DFlash" in card and "Not measured." in card and "## Training" not in card and 'org/unknown"' in card
    card = write_card(
        untold, base_model="ada/target", license="mit", datasets=["ada/chats"], repo_id="ada/it", tags=["mine"]
    )
    for again in (card, render_card(untold)):  # said once, kept
        data = ModelCard(again).data
        assert (data.base_model, data.license, data.datasets) == ("ada/target", "mit", ["ada/chats"])
        assert data.model_name == "ada/it" and "mine" in data.tags and 'from_pretrained("ada/it")' in again


def test_the_command_renders_checks_and_leaves_alone_what_is_written_by_hand(folder):
    run, readme = CliRunner().invoke, folder / "README.md"
    rendered = readme.read_bytes()
    assert run(app, ["card", str(folder), "--check"]).exit_code == 0
    readme.write_text(readme.read_text().replace("2.016", "9.016"))
    found = run(app, ["card", str(folder), "--check"])
    assert found.exit_code == 1 and "not current" in found.output and "9.016" in readme.read_text()
    assert run(app, ["card", str(folder)]).exit_code == 0 and readme.read_bytes() == rendered
    assert run(app, ["card", str(folder), "--check", "--base-model", "ada/target"]).exit_code == 1

    readme.write_text("---\nlicense: mit\n---\nBy hand\n")
    found = run(app, ["card", str(folder)])
    assert isinstance(found.exception, ValueError) and "--overwrite" in str(found.exception)
    assert "By hand" in readme.read_text()
    assert run(app, ["card", str(folder), "--overwrite", "--dataset", "a/b", "--dataset", "c/d"]).exit_code == 0
    data = ModelCard.load(readme).data
    assert is_rendered(readme.read_text()) and (data.license, data.datasets) == ("mit", ["a/b", "c/d"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("run.py --hub_token abc --x 1", "run.py --hub_token *** --x 1"),
        ("run.py --hub-token=abc", "run.py --hub-token=***"),
        ("run.py --token 'a b' --api_key=q", "run.py --token *** --api_key=***"),
        ("x hf_abcdefghijklmnopqrstuvwxyz y", "x *** y"),
        ('{"command": "run.py --hub_token abc", "x": 1}', '{"command": "run.py --hub_token ***", "x": 1}'),
        ("--endpoint https://me:pw@host/v1", "--endpoint https://***@host/v1"),
        (r'{"command": "run.py --hub_token \"a b\" -x"}', '{"command": "run.py --hub_token *** -x"}'),
        ('["https://a.org","me@x.org"]', None),
        ("--mask_token '<|fim_pad|>' --num_tokens 5 --api-key-env KEY", None),
        ("retrace_hf_something_that_is_rather_long https://host/a@b", None),
    ],
)
def test_tokens_are_kept_out(text, expected, monkeypatch):
    assert redacted(text) == (text if expected is None else expected)
    monkeypatch.setattr("sys.argv", ["train.py", "--hub_token", "abc"])
    assert command_line().endswith("train.py --hub_token '***'") or command_line().endswith("--hub_token ***")
