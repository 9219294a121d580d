"""README, Makefile, constraints and pyproject.toml say the same, and it is true."""

import ast
import importlib
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version


ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FIRST_SCREEN = 25  # lines of an ordinary terminal


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, re.MULTILINE))


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_readme_opens_with_the_two_commands_then_a_short_quickstart():
    lines = README.splitlines()
    first = {
        command: next(i for i, line in enumerate(lines) if line.startswith(command))
        for command in ("make demo", "make test")
    }
    assert max(first.values()) < FIRST_SCREEN and max(first.values()) < lines.index("## Quickstart")
    quickstart = [line for line in code_blocks("python")[0].splitlines() if line.strip()]
    assert len(quickstart) <= 12 and "assistant_model=drafter" in "".join(quickstart)


def test_every_make_command_of_the_readme_exists():
    named = set(
        re.findall(r"\bmake ([a-z][a-z-]*)", "".join(re.findall(r"`[^`]+`", README)) + "".join(code_blocks("bash")))
    )
    assert {"demo", "test", "test-full", "quality", "style"} <= named <= make_targets()
    phony = re.search(r"^\.PHONY:(.*)$", MAKEFILE, re.MULTILINE).group(1).split()
    assert set(phony) == make_targets() >= {"demo", "test", "test-full", "quality", "style", "clean"}


def test_extras_of_the_readme_exist():
    extras = PROJECT["project"]["optional-dependencies"]
    assert set(re.findall(r"\.\[([a-z]+)\]", README)) <= set(extras)
    assert set(extras) >= {"train", "demo", "test", "dev"}


def test_readme_links_lead_somewhere():
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert link.startswith("https://") or (ROOT / link).exists(), link


def test_quickstart_is_the_same_in_readme_and_examples():
    script = (ROOT / "examples" / "quickstart.py").read_text(encoding="utf-8")
    body = script[script.index("import retrace_hf") :]
    assert code_blocks("python")[0].strip() == body.strip()
    assert ast.get_docstring(ast.parse(script))


def test_quickstart_runs(smollm2, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("retrace_hf.targets.load_target", lambda name: smollm2)
    exec(compile(code_blocks("python")[0], "README.md", "exec"), {})
    assert "tokens per target pass" in capsys.readouterr().out


def test_constraints_pin_what_pyproject_asks_for():
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            (pin,) = requirement.specifier
            assert pin.operator == "==", line
            pins[requirement.name.lower()] = pin.version
    project = PROJECT["project"]
    asked = project["dependencies"] + [name for extra in project["optional-dependencies"].values() for name in extra]
    for requirement in map(Requirement, asked):
        if requirement.name != project["name"]:
            assert pins[requirement.name.lower()] in requirement.specifier, requirement.name
    assert f"torch=={pins['torch']}" in MAKEFILE


def test_versions_and_entry_point_agree():
    import retrace_hf

    assert retrace_hf.__version__ == PROJECT["project"]["version"]
    module, function = PROJECT["project"]["scripts"]["retrace-hf"].split(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_importing_the_package_needs_no_extra():
    script = (
        "import sys\n"
        "for name in ('accelerate', 'datasets', 'peft', 'rich', 'typer', 'gguf', 'scipy'):\n"
        "    sys.modules[name] = None\n"  # importing it now raises ImportError
        "import retrace_hf, retrace_hf.data, retrace_hf.data.features, retrace_hf.data.responses, retrace_hf.targets\n"
        "assert retrace_hf.RetraceDataCollator and retrace_hf.RetraceDrafter\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr


def test_ruff_is_configured_and_content():
    ruff = PROJECT["tool"]["ruff"]
    assert ruff["line-length"] == 119
    done = subprocess.run([sys.executable, "-m", "ruff", "check", "."], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_ci_runs_the_tests_and_minds_skips():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text()
    assert subprocess.run(["bash", "-n", script]).returncode == 0


@pytest.fixture
def oldest():
    spec = importlib.util.spec_from_file_location("oldest", ROOT / ".ci" / "oldest.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PYPROJECT = '[project]\ndependencies = ["torch>=2.6", "transformers>={bound},<6", "safetensors>=0.8", {hub!r}]'


@pytest.mark.parametrize(
    ("bound", "pin", "differs"),
    [("5.24", "5.24.0", False), ("5.24.0", "5.24", False), ("5.24", "5.25.0", True), ("5.24.1", "5.24.10", True)],
)
def test_the_oldest_transformers_is_tested_where_it_is_another(oldest, bound, pin, differs):
    pyproject = PYPROJECT.format(bound=bound, hub="huggingface_hub>=1.31,<3")
    constraints = f"# a comment\nhuggingface_hub==2.4.0\ntokenizers==0.23.3\ntorch==2.13.0\ntransformers=={pin}\n"
    assert oldest.differs(pyproject, constraints) is differs
    found = oldest.oldest(pyproject, constraints)
    assert found == {"huggingface_hub": "1.31", "torch": "2.13.0", "transformers": bound, "safetensors": "0.8"}


def test_the_oldest_constraints_are_the_projects_own():
    script = [sys.executable, ROOT / ".ci" / "oldest.py"]
    lines = subprocess.run(script, capture_output=True, text=True, check=True).stdout.splitlines()
    bounds = {r.name: r.specifier for r in map(Requirement, PROJECT["project"]["dependencies"])}
    for requirement in map(Requirement, lines):
        (pin,) = requirement.specifier
        assert pin.version in bounds.get(requirement.name, requirement.specifier), requirement
    (pin,) = Requirement(next(line for line in lines if line.startswith("transformers"))).specifier
    constraints = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    )
    same = Version(pin.version) == Version(constraints["transformers"])
    assert subprocess.run([*script, "--differs"]).returncode == (1 if same else 0)
    assert "test-oldest" in (ROOT / ".ci" / "run").read_text()


def test_the_transformers_that_are_allowed_are_those_that_were_tested(caplog):
    """And one beyond them is no error: it is said once, where the hook is installed."""
    from retrace_hf import generation

    (bound,) = (Requirement(r) for r in PROJECT["project"]["dependencies"] if r.startswith("transformers"))
    first, *_, last = (".".join(map(str, version)) for version in generation.TESTED_VERSIONS)
    constraints = (ROOT / "constraints.txt").read_text()
    assert f"transformers=={last}." in constraints
    assert all(bound.specifier.contains(f"{version}.9") for version in (first, last))
    assert not bound.specifier.contains(f"{last[:-1]}{int(last[-1]) + 1}.0")
    for version, warned in ((f"{last}.7", False), ("5.26.0", True), ("6.0.0.dev0", True)):
        caplog.clear()
        with caplog.at_level("WARNING", logger="retrace_hf"):
            generation._warn_of_untested_version(version)
        assert bool(caplog.records) is warned
        if warned:
            assert f"({first} to {last})" in caplog.text and "tests/test_contracts.py" in caplog.text
