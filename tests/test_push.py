"""Drafters pushed to a Hub and read back, with the real client over HTTP against `hub_standin.py`."""

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from io import BytesIO
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from retrace_hf.card import is_rendered, render_card, write_card
from retrace_hf.hub import code_files

from .fixtures import letters_chat_target, randomize, tiny_drafter
from .hub_standin import HubStandIn


ROOT = Path(__file__).parents[1]
TOKEN = "hf_AdaAdaAdaAdaAdaAdaAdaAdaAdaAda"
WRONG = "hf_WrongWrongWrongWrongWrongWrong"
OWN_CARD = "---\nlicense: mit\n---\n# Written by hand\n"


def entry(tau, **more):
    return {"acceptance_length": tau, "rounds": 10, "new_tokens": 21, "acceptance_at": [0.5], "prompts": 2, **more}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A drafter's folder with results, notes and card, for a target with a tokenizer that will be pushed too."""
    home = tmp_path_factory.mktemp("push")
    target, tokenizer = letters_chat_target()
    target.save_pretrained(home / "target")
    tokenizer.save_pretrained(home / "target")
    drafter = randomize(tiny_drafter(target)).half()
    drafter.save_pretrained(home / "measured")
    weights = hashlib.sha256((home / "measured" / "model.safetensors").read_bytes()).hexdigest()
    training = {"seed": 1, "init_from": None, "data": {"chats.jsonl": "sha256:0"}, "script": {"target": "ada/target"}}
    training["command"] = f"python examples/train_retrace.py --hub_token {TOKEN} --mask_token '<mask>'"
    results = {
        "variants": {"corrected": {"all": entry(2.1), "gsm8k": entry(2.125)}},
        "provenance": {
            "command": "python measure.py",
            "hardware": "2 x x86_64",
            "max_new_tokens": 20,
            "arms": {"corrected": {"weights": f"sha256:{weights}", "training": training}},
        },
    }
    (home / "measured" / "training.json").write_text(json.dumps(training))
    (home / "measured" / "results.json").write_text(json.dumps(results))
    write_card(home / "measured", license="apache-2.0")
    return home


CLIENT = """
import json, os, sys, torch
from retrace_hf import RetraceDrafter, record_acceptance
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
from tests.fixtures import plain, prompt_of

torch.set_num_threads(1)
home, wrong = sys.argv[1:]
found = {}

def error(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"

target = AutoModelForCausalLM.from_pretrained(f"{home}/target")
target.push_to_hub("ada/target")
AutoTokenizer.from_pretrained(f"{home}/target").push_to_hub("ada/target")
drafter = RetraceDrafter.from_pretrained(f"{home}/measured", dtype=torch.float32)
drafter.push_to_hub("ada/drafter")

# Read back, by each way and from another branch.
prompt = prompt_of(12)
expected = plain(target, prompt, 20)
state = drafter.state_dict()
for kind in (RetraceDrafter, AutoModel):
    loaded = kind.from_pretrained("ada/drafter", dtype=torch.float32)
    found[kind.__name__] = all(torch.equal(state[name], value) for name, value in loaded.state_dict().items())
drafter.config.proposal = "sample"
drafter.push_to_hub("ada/drafter", revision="sampling")
two = (RetraceDrafter.from_pretrained("ada/drafter", revision=revision) for revision in (None, "sampling"))
found["proposals"] = [loaded.config.proposal for loaded in two]
drafter.config.proposal = "argmax"

# Cards.
with torch.no_grad():
    drafter.fc.weight.add_(0.01)
drafter.push_to_hub("ada/drafter", commit_message="other weights", tags=["mine"])
drafter.push_to_hub("ada/by-hand")
with torch.no_grad():
    drafter.fc.weight.add_(0.01)
found["errors"] = {"the commit fails": error(drafter.push_to_hub, "ada/faulty")}
drafter.push_to_hub("ada/faulty")
own = RetraceDrafter.from_pretrained(f"{home}/by-hand")
own.save_pretrained(f"{home}/by-hand", push_to_hub=True, repo_id="ada/by-hand")
drafter.push_to_hub("ada/by-hand", commit_message="again")
for _ in range(2):
    drafter.save_pretrained(f"{home}/saved", push_to_hub=True, repo_id="ada/saved", private=True)

# What fails says so in a line.
absent = {"input_ids": prompt, "max_new_tokens": 4, "trust_remote_code": True}
found["errors"] |= {
    "another's": error(drafter.push_to_hub, "bob/drafter"),
    "another's, while saving": error(drafter.save_pretrained, f"{home}/no", push_to_hub=True, repo_id="bob/drafter"),
    "wrong token": error(drafter.push_to_hub, "ada/drafter", token=wrong),
    "no repository": error(RetraceDrafter.from_pretrained, "ada/absent"),
    "no revision": error(RetraceDrafter.from_pretrained, "ada/drafter", revision="absent"),
    "no repository to generate with": error(target.generate, custom_generate="ada/absent", **absent),
    "no revision to generate with": error(target.generate, custom_generate="ada/drafter", revision="absent", **absent),
}
del os.environ["HF_TOKEN"]
found["errors"]["no token"] = error(drafter.push_to_hub, "ada/drafter")
found["errors"]["private"] = error(RetraceDrafter.from_pretrained, "ada/saved")

# The card's own lines.
from huggingface_hub import ModelCard
import re
blocks = re.findall("```python\\n(.*?)```", ModelCard.load("ada/drafter").content, re.DOTALL)
names = {}
for block in blocks:
    exec(block, names)
found["card's lines"] = [len(blocks), names["stats"].rounds > 0]
print()
print(json.dumps(found))
"""

READER = """
import importlib, json, sys

class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "retrace_hf":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NotInstalled())
import torch
from transformers import AutoModel, AutoModelForCausalLM

torch.set_num_threads(1)
target = AutoModelForCausalLM.from_pretrained("ada/target")
options = {"input_ids": torch.arange(5, 25)[None], "max_new_tokens": 20, "do_sample": False}
plain = target.generate(**options)
remote = {"custom_generate": "ada/drafter", "trust_remote_code": True}
found = {"custom_generate": torch.equal(target.generate(**options, **remote), plain)}
found["revision"] = torch.equal(target.generate(**options, **remote, revision="sampling"), plain)
drafter = AutoModel.from_pretrained("ada/drafter", trust_remote_code=True)
generation = importlib.import_module(type(drafter).__module__.rsplit(".", 1)[0] + ".generation")
with generation.record_acceptance() as stats:
    found["AutoModel"] = torch.equal(target.generate(**options, assistant_model=drafter), plain)
found["rounds"] = stats.rounds
drafter.push_to_hub("ada/copy")
print()
print(json.dumps(found))
"""

TRAINER = """
import json, sys, torch
from datasets import Dataset
from huggingface_hub import HfApi
from transformers import AutoModelForCausalLM, AutoTokenizer
from retrace_hf import RetraceDataCollator, RetraceTrainer, RetraceTrainingArguments
from tests.fixtures import tiny_drafter, prompt_of

home, token = sys.argv[1:]
target = AutoModelForCausalLM.from_pretrained(f"{home}/target")
rows = [{"input_ids": prompt_of(24, seed=i)[0].tolist(), "loss_mask": [0] * 6 + [1] * 18} for i in range(4)]

def make_trainer(model_id, token):
    args = RetraceTrainingArguments(
        f"{home}/trained", max_steps=2, save_steps=1, num_anchors=4, use_cpu=True, report_to="none", push_to_hub=True,
        hub_model_id=model_id, hub_token=token, hub_strategy="every_save", save_total_limit=1,
    )
    return RetraceTrainer(
        model=tiny_drafter(target), target=target, args=args, train_dataset=Dataset.from_list(rows),
        data_collator=RetraceDataCollator(pad_token_id=0),
        processing_class=AutoTokenizer.from_pretrained(f"{home}/target"),
    )

refused = []
for wrong in (("ada/trained", None), ("bob/trained", token)):
    try:
        make_trainer(*wrong)
    except PermissionError as error:
        refused.append(str(error))
trainer = make_trainer("ada/trained", token)
trainer.train()
trainer.push_to_hub(dataset="ada/chats", license="mit")
HfApi(token=token).create_repo("ada/by-hand-trained")
HfApi(token=token).upload_file(
    path_or_fileobj=b"---\\nlicense: mit\\n---\\n# Written by hand\\n",
    path_in_repo="README.md", repo_id="ada/by-hand-trained",
)
make_trainer("ada/by-hand-trained", token).push_to_hub()
print()
print(json.dumps(refused))
"""


class Client:
    """Runs scripts in processes that know the stand-in as the Hub; keeps all that they print."""

    def __init__(self, hub: HubStandIn, home: Path):
        self.hub, self.home, self.printed = hub, home, ""

    def __call__(self, script: str, *arguments: str, token: str | None = TOKEN, isolated: bool = False) -> str:
        env = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PYTHON"))}
        env |= {"HF_ENDPOINT": self.hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(self.home / "cache")}
        env |= {"no_proxy": "127.0.0.1", "HF_HUB_VERBOSITY": "debug", "TRANSFORMERS_VERBOSITY": "info"}
        env |= {"HF_HUB_DISABLE_TELEMETRY": "1", "OMP_NUM_THREADS": "1"}
        env |= {"HF_TOKEN": token} if token else {}
        env |= {} if isolated else {"PYTHONPATH": str(ROOT)}
        command = [sys.executable, *(["-I"] if isolated else []), "-c", script, *map(str, arguments)]
        done = subprocess.run(
            command, capture_output=True, text=True, env=env, cwd=self.home, stdin=subprocess.DEVNULL
        )
        self.printed += done.stdout + done.stderr
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout


@pytest.fixture(scope="module")
def hub():
    with HubStandIn({TOKEN: "ada"}) as hub:
        yield hub


@pytest.fixture(scope="module")
def client(hub, home):
    return Client(hub, home)


@pytest.fixture(scope="module")
def pushed(client, hub, home):
    """What the first client found; everything else comes after it."""
    tiny_drafter(letters_chat_target()[0]).save_pretrained(home / "by-hand")
    (home / "by-hand" / "README.md").write_text(OWN_CARD)
    faults = ("POST", "/preupload/", 503), ("PUT", "/lfs/", 500), ("POST", "/commit/", 503)
    hub.faults += [(method, f"ada/faulty{part}", status) for method, part, status in faults]
    return json.loads(client(CLIENT, home, WRONG).splitlines()[-1])


def card_of(hub: HubStandIn, repo_id: str, revision: str = "main") -> str:
    return hub.files(repo_id, revision)["README.md"].decode()


# -- what is pushed --------------------------------------------------------------------------------------------------


def test_one_commit_holds_all_that_a_drafter_is(pushed, hub, home):
    first = hub.repositories["ada/drafter"].branches["main"][1]
    assert first.message == "Upload RetraceDrafter"
    expected = {*code_files(), "config.json", "model.safetensors", "README.md", "results.json", "training.json"}
    assert set(first.files) - {".gitattributes"} == expected
    for name, source in code_files().items():
        assert first.files[name] == source.read_bytes(), name
    assert first.files["model.safetensors"] == (home / "measured" / "model.safetensors").read_bytes()
    results = (home / "measured" / "results.json").read_text()
    assert first.files["results.json"].decode() == results.replace(TOKEN, "***") != results
    assert "auto_map" in json.loads(first.files["config.json"])
    assert hub.commits("ada/drafter") == ["Upload RetraceDrafter", "other weights"]


def test_the_card_is_of_what_was_measured_and_names_where_it_is(pushed, hub, home, tmp_path):
    first = hub.repositories["ada/drafter"].branches["main"][1]
    card = ModelCard(first.files["README.md"].decode())
    assert (card.data.base_model, card.data.license, card.data.model_name) == (
        "ada/target",
        "apache-2.0",
        "ada/drafter",
    )
    assert [result.metric_value for result in card.data.eval_results] == [2.125]
    assert 'from_pretrained("ada/drafter")' in card.content
    for name, content in first.files.items():  # a snapshot's card is current
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert render_card(tmp_path).encode() == first.files["README.md"]


def test_it_is_read_back_as_it_was(pushed):
    assert pushed["RetraceDrafter"] and pushed["AutoModel"]
    assert pushed["proposals"] == ["argmax", "sample"]


def test_the_cards_own_lines_run(pushed):
    assert pushed["card's lines"] == [2, True]


def test_other_weights_do_not_bring_the_results_of_those_before(pushed, hub):
    card = card_of(hub, "ada/drafter")
    assert "Not measured." in card and "2.125" not in card
    assert {"mine", "retrace"} <= set(ModelCard(card).data.tags)
    assert ModelCard(card).data.license == "apache-2.0"
    assert "Not measured." in card_of(hub, "ada/drafter", "sampling")  # another config proposes otherwise


def test_a_card_written_by_hand_stays(pushed, hub):
    assert hub.commits("ada/by-hand") == ["Upload RetraceDrafter"] * 2 + ["again"]
    rendered, *after = (
        commit.files["README.md"].decode() for commit in hub.repositories["ada/by-hand"].branches["main"][1:]
    )
    assert is_rendered(rendered)
    for card in after:
        assert "# Written by hand" in card and not is_rendered(card) and ModelCard(card).data.license == "mit"


def test_pushing_while_saving_is_the_same_in_one_commit(pushed, hub, home):
    assert hub.commits("ada/saved") == ["Upload RetraceDrafter"]  # the second one changed nothing
    files = hub.files("ada/saved")
    assert {*code_files(), "config.json", "model.safetensors", "README.md"} <= set(files)
    assert is_rendered(card_of(hub, "ada/saved")) and (home / "saved" / "README.md").read_bytes() == files["README.md"]


# -- where the package is not installed ------------------------------------------------------------------------------


def test_it_runs_without_the_package_and_a_copy_pushes_the_same(pushed, client, hub):
    found = json.loads(client(READER, isolated=True).splitlines()[-1])
    assert found.pop("rounds") > 0 and all(found.values()), found
    ours, copy = hub.files("ada/drafter"), hub.files("ada/copy")
    assert set(copy) == set(ours) - {"results.json", "training.json"} and is_rendered(card_of(hub, "ada/copy"))
    for name in code_files():
        assert copy[name] == ours[name], name


# -- what fails ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "kind", "words"),
    [
        ("no token", "PermissionError", ["ada/drafter", "hf auth login", "HF_TOKEN"]),
        ("wrong token", "PermissionError", ["ada/drafter", "does not know the token"]),
        ("another's", "PermissionError", ["bob/drafter", "of your own"]),
        ("another's, while saving", "PermissionError", ["bob/drafter", "of your own"]),
        ("no repository", "OSError", ["ada/absent"]),
        ("private", "OSError", ["ada/saved"]),
        ("no revision", "OSError", ["ada/drafter", "absent is not a valid git identifier"]),
        ("no repository to generate with", "OSError", ["ada/absent"]),
        ("no revision to generate with", "OSError", ["absent is not a valid git identifier"]),
    ],
)
def test_an_error_is_one_line_that_says_what_to_do(pushed, case, kind, words):
    found = pushed["errors"][case]
    assert found.startswith(f"{kind}: ") and "\n" not in found.strip()
    assert all(word in found for word in words), found


def test_faults_of_the_hub_are_borne_and_a_push_can_be_repeated(pushed, hub):
    assert not hub.faults and hub.commits("ada/faulty") == ["Upload RetraceDrafter"]
    assert "503" in pushed["errors"]["the commit fails"]
    answers = [(method, status) for method, path, status in hub.requests if "ada/faulty" in path]
    # The client itself repeats all but the commit; the second push finds the weights there.
    assert [status for method, status in answers if method == "PUT"] == [500, 200]


# -- the Trainer's ---------------------------------------------------------------------------------------------------


def test_a_trainer_pushes_drafter_code_and_card_and_no_token(client, hub, home):
    refused = json.loads(client(TRAINER, home, TOKEN, token=None).splitlines()[-1])
    messages = hub.commits("ada/trained")
    assert messages[-1] == "End of training" and len(set(messages)) == len(messages)
    expected = {*code_files(), "config.json", "model.safetensors", "README.md", "tokenizer.json", "training_args.bin"}
    last = hub.repositories["ada/trained"].branches["main"][-1]
    assert expected <= set(last.files) and not any("checkpoint-" in name for name in last.files)
    card = ModelCard(card_of(hub, "ada/trained"))
    assert is_rendered(card.content)
    assert (card.data.model_name, card.data.license, card.data.datasets) == ("ada/trained", "mit", ["ada/chats"])
    for commit in hub.repositories["ada/trained"].branches["main"][1:]:
        assert set(code_files()) <= set(commit.files), commit.message
    assert "hf auth login" in refused[0] and "of your own" in refused[1]
    by_hand = hub.repositories["ada/by-hand-trained"].branches["main"][-1].files
    assert set(code_files()) <= set(by_hand) and b"# Written by hand" in by_hand["README.md"]


# -- tokens ----------------------------------------------------------------------------------------------------------


def test_no_token_is_printed_or_pushed(pushed, client, hub):
    """Last, when all has been said and pushed."""
    assert "hub_token ***" in hub.repositories["ada/drafter"].branches["main"][1].files["README.md"].decode()
    everything = {
        f"{repo_id} {name}": content
        for repo_id, repository in hub.repositories.items()
        for history in repository.branches.values()
        for commit in history
        for name, content in commit.files.items()
    }
    for name, content in everything.items():
        if name.endswith("training_args.bin"):
            with zipfile.ZipFile(BytesIO(content)) as archive:
                content = b"".join(archive.read(part) for part in archive.namelist())
        for token in (TOKEN, WRONG):
            assert token.encode() not in content, name
    for token in (TOKEN, WRONG):
        assert token not in client.printed
    assert not hub.unknown
