"""A drafter's folder holds the code that it needs: it runs where this package is not installed."""

import ast
import gc
import importlib.util
import json
import os
import re
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel

import retrace_hf
from retrace_hf import RetraceConfig, RetraceDrafter, record_acceptance
from retrace_hf.hub import AUTO_MAP, code_files, complete_folder

from .fixtures import plain, prompt_of, randomize, tiny_drafter, tiny_target


ROOT = Path(__file__).parents[1]
PACKAGE = Path(retrace_hf.__file__).parent


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def drafter(target):
    return randomize(tiny_drafter(target))


@pytest.fixture(scope="module")
def folders(target, drafter, tmp_path_factory):
    """A target, a drafter as it is saved, and one that examples/ship_drafter.py has shipped, as it is published."""
    spec = importlib.util.spec_from_file_location("ship_drafter", ROOT / "examples" / "ship_drafter.py")
    ship_drafter = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ship_drafter)
    folder = tmp_path_factory.mktemp("hub")
    target.save_pretrained(folder / "target")
    drafter.save_pretrained(folder / "drafter")
    hybrid = tiny_drafter(target, context_fusion="hybrid", context_kv_rope="reapplied")
    randomize(hybrid).save_pretrained(folder / "hybrid")
    ship_drafter.ship_weights(folder / "drafter", folder / "card")
    assert files_of(folder / "card") == {"config.json", "model.safetensors"}
    RetraceDrafter.from_pretrained(folder / "card").save_pretrained(folder / "shipped")
    return folder


def files_of(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


# -- where the package is not installed ------------------------------------------------------------------------------

CLEAN = """
import importlib, json, sys

class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "retrace_hf":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NotInstalled())
import torch
from transformers import AutoModel, AutoModelForCausalLM, GenerationMixin

folder, package = sys.argv[1:]
found = {}
torch.set_num_threads(1)
target = AutoModelForCausalLM.from_pretrained(f"{folder}/target")
options = {"input_ids": torch.arange(5, 25)[None], "max_new_tokens": 40, "do_sample": False}
plain = target.generate(**options)
found["text"] = plain.tolist()

def run(**kwargs):
    return torch.equal(target.generate(**options, **kwargs), plain)

# The generate function first: nothing else has loaded any code yet.
loads, real = [], AutoModel.from_pretrained
AutoModel.from_pretrained = lambda *args, **kwargs: loads.append(args) or real(*args, **kwargs)
generated = [run(custom_generate=f"{folder}/{name}", trust_remote_code=True) for name in 2 * ("drafter", "shipped")]
AutoModel.from_pretrained = real
found["custom_generate"] = {"equal": all(generated), "loads": len(loads)}

try:
    AutoModel.from_pretrained(f"{folder}/drafter")
except ValueError as error:
    found["untrusted"] = str(error)

for name in ("hybrid", "drafter", "shipped"):
    drafter = AutoModel.from_pretrained(f"{folder}/{name}", trust_remote_code=True)
    generation = importlib.import_module(type(drafter).__module__.rsplit(".", 1)[0] + ".generation")
    with generation.record_acceptance() as stats:
        equal = run(assistant_model=drafter)
    found[name] = {"equal": equal, "accepted": stats.accepted_per_round, "dtype": str(drafter.dtype)}

drafter.save_pretrained(f"{folder}/again")
untrained = type(drafter).from_target(target, mask_token_id=199, num_hidden_layers=2, conditioning="none")
found["from_target"] = run(assistant_model=untrained)
found["from_dflash"] = run(assistant_model=type(drafter).from_dflash(untrained))
warm = type(drafter).from_dflash(untrained, context_fusion="hybrid", target=target)
found["other contexts"] = run(assistant_model=warm) and run(
    assistant_model=type(drafter).from_target(target, mask_token_id=199, num_hidden_layers=2, context_fusion="kv")
)
found["package"] = "retrace_hf" in sys.modules

# And beside the package, imported late.
del sys.meta_path[0]
sys.path.insert(0, package)
import retrace_hf
depth, seam = 0, GenerationMixin._assisted_decoding
while hasattr(seam, "__wrapped__"):
    depth, seam = depth + 1, seam.__wrapped__
found["wrapped once"] = depth == len(set(GenerationMixin._retrace_hooks)) > 1
with retrace_hf.record_acceptance() as stats:
    both = [run(assistant_model=d) for d in (drafter, retrace_hf.RetraceDrafter.from_pretrained(f"{folder}/drafter"))]
found["beside"] = {"equal": all(both), "calls": stats.calls}
print()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def clean(folders, tmp_path_factory):
    """What a process found that cannot import this package."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env |= {"HF_MODULES_CACHE": str(tmp_path_factory.mktemp("modules")), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-I", "-c", CLEAN, str(folders), str(ROOT)],
        capture_output=True,
        text=True,
        env=env,
        cwd=folders,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_auto_model_loads_and_generates_without_the_package(clean, target, drafter):
    prompt = torch.arange(5, 25)[None]
    assert clean["package"] is False
    assert clean["text"] == plain(target, prompt, 40).tolist()
    with record_acceptance() as stats:
        plain(target, prompt, 40, assistant_model=drafter)
    assert clean["drafter"] == {"equal": True, "accepted": stats.accepted_per_round, "dtype": "torch.float32"}


def test_a_shipped_folder_runs_without_the_package(clean):
    assert clean["shipped"]["equal"] and clean["shipped"]["dtype"] == "torch.float32"
    assert len(clean["shipped"]["accepted"]) > 0


def test_custom_generate_runs_without_the_package_and_loads_each_folder_once(clean):
    assert clean["custom_generate"] == {"equal": True, "loads": 2}


def test_code_is_not_run_untrusted(clean):
    assert "trust_remote_code=True" in clean["untrusted"]


def test_a_loaded_copy_makes_drafters_too(clean):
    assert clean["from_target"] and clean["from_dflash"] and clean["other contexts"]
    assert clean["hybrid"]["equal"] and len(clean["hybrid"]["accepted"]) > 0


def test_the_package_beside_a_copy_wraps_nothing_twice(clean):
    assert clean["wrapped once"]
    assert clean["beside"] == {"equal": True, "calls": 2}


def test_a_copy_saved_again_is_complete(clean, folders):
    assert files_of(folders / "again") == files_of(folders / "drafter")
    for name in code_files():
        assert (folders / "again" / name).read_text() == (folders / "drafter" / name).read_text(), name
    for name in ("again", "shipped"):
        assert json.loads((folders / name / "config.json").read_text())["auto_map"] == AUTO_MAP


# -- what is in the folder -------------------------------------------------------------------------------------------


def relative_imports(module: Path) -> set[str]:
    """Modules that a file imports relatively, by any form of import, at its top or inside functions."""
    found = set()
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            dots = "." * (node.level - 1)
            found |= {dots + node.module} if node.module else {dots + alias.name for alias in node.names}
    return found


def test_the_folder_holds_all_that_its_code_imports(folders):
    names = {name.removesuffix(".py") for name in code_files() if "/" not in name}
    assert {"modeling_retrace", "configuration_retrace", "candidate_generator", "generation", "hub"} <= names
    assert files_of(folders / "drafter") == {*code_files(), "config.json", "model.safetensors"}
    for name in names:
        assert relative_imports(PACKAGE / f"{name}.py") <= names, f"{name}.py"
    # transformers copies the generate function away from the folder, alone.
    assert not relative_imports(folders / "drafter" / "custom_generate" / "generate.py")


def test_the_code_asks_for_nothing_beyond_the_dependencies():
    allowed = set(sys.stdlib_module_names) | {"torch", "transformers", "huggingface_hub", "safetensors"}
    for name, source in code_files().items():
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported = {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported = {node.module}
            else:
                continue
            assert {module.split(".")[0] for module in imported} <= allowed, name


def test_the_auto_map_names_what_is_there():
    for name, cls in (("AutoConfig", RetraceConfig), ("AutoModel", RetraceDrafter)):
        assert AUTO_MAP[name] == f"{cls.__module__.split('.')[-1]}.{cls.__name__}"


def test_only_the_main_process_writes_code(drafter, tmp_path):
    drafter.save_pretrained(tmp_path, is_main_process=False)
    assert not list(tmp_path.rglob("*.py"))


# -- where it is installed -------------------------------------------------------------------------------------------


def test_the_installed_classes_win_and_no_question_of_trust_appears(folders, target, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked whether the code may run"))
    for trust in ({}, {"trust_remote_code": True}, {"trust_remote_code": False}):
        assert type(AutoConfig.from_pretrained(folders / "drafter", **trust)) is RetraceConfig
        loaded = AutoModel.from_pretrained(folders / "drafter", **trust)
        assert type(loaded) is RetraceDrafter
    assert type(RetraceDrafter.from_pretrained(folders / "drafter")) is RetraceDrafter


@pytest.fixture(scope="module")
def modules_cache(tmp_path_factory):
    """A place of its own for what transformers copies before it runs it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        patch.setattr(sys, "path", list(sys.path))
        yield


@pytest.fixture
def loads(monkeypatch):
    """What AutoModel was asked for."""
    asked, real = [], AutoModel.from_pretrained
    monkeypatch.setattr(
        AutoModel, "from_pretrained", lambda path, **kwargs: asked.append((path, kwargs)) or real(path, **kwargs)
    )
    return asked


def from_folder(folder) -> dict:
    return {"custom_generate": str(folder), "trust_remote_code": True}


def test_custom_generate_is_generate_with_the_folders_drafter(folders, drafter, modules_cache, loads):
    target, prompt = tiny_target(), prompt_of(20)
    expected = plain(target, prompt, 30)
    with record_acceptance() as ours:
        plain(target, prompt, 30, assistant_model=drafter)
    with record_acceptance() as theirs:
        first = plain(target, prompt, 30, **from_folder(folders / "drafter"))
        options = {"return_dict_in_generate": True, "output_scores": True, "revision": "main"}
        second = plain(target, prompt, 30, **options, **from_folder(folders / "drafter"))
    assert torch.equal(first, expected) and torch.equal(second.sequences, expected) and len(second.scores) == 30
    assert theirs.accepted_per_round == 2 * ours.accepted_per_round
    # Once for each target, folder and revision; where it was asked for is no option of generate().
    assert [asked for asked, _ in loads] == 2 * [str(folders / "drafter")]
    assert [kwargs.get("revision") for _, kwargs in loads] == [None, "main"]
    plain(target, prompt, 5, **from_folder(folders / "drafter"))
    assert len(loads) == 2


def test_custom_generate_keeps_no_drafter_longer_than_its_target(folders, modules_cache, loads, monkeypatch):
    kept, real = [], RetraceDrafter.from_pretrained.__func__

    def from_pretrained(cls, *args, **kwargs):
        loaded = real(cls, *args, **kwargs)
        kept.append(weakref.ref(loaded))
        return loaded

    monkeypatch.setattr(RetraceDrafter, "from_pretrained", classmethod(from_pretrained))
    target = tiny_target()
    plain(target, prompt_of(5), 5, **from_folder(folders / "drafter"))
    assert kept[0]() is not None
    del target
    gc.collect()
    assert kept[0]() is None


def test_custom_generate_takes_another_drafter_and_says_what_it_does_not_know(
    folders, target, drafter, modules_cache, loads
):
    prompt = prompt_of(20)
    out = plain(target, prompt, 10, assistant_model=drafter, **from_folder(folders / "shipped"))
    assert torch.equal(out, plain(target, prompt, 10)) and not loads
    generate = target.load_custom_generate(str(folders / "shipped"), trust_remote_code=True)
    with pytest.raises(ValueError, match=re.escape("target.generate(custom_generate=folder")):
        generate(model=target, input_ids=prompt)
    with pytest.raises(ValueError, match="trust_remote_code"):
        target.generate(input_ids=prompt, custom_generate=str(folders / "shipped"), trust_remote_code=False)


def test_half_precision_that_was_asked_for_is_what_is_pushed(tmp_path):
    """The stored weights take the place of what was saved where they are the same in less room, not in more."""
    drafter = tiny_drafter(tiny_target())
    for stored, saved, kept in (
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float32, torch.float16),
    ):
        source, folder = tmp_path / f"{stored}", tmp_path / f"{saved}-of-{stored}"
        drafter.to(stored).save_pretrained(source)
        moved = RetraceDrafter.from_pretrained(source, dtype=saved)
        moved.save_pretrained(folder)
        complete_folder(folder, moved, "ada/moved")
        assert {weight.dtype for weight in load_file(folder / "model.safetensors").values()} == {kept}
        drafter.float()
