"""Every command and every Python block of the documents is run by a test, or is named here with what it needs.

Options, make targets, imports and arguments that the documents name exist; so do the messages of Troubleshooting.
"""

import argparse
import ast
import importlib
import inspect
import json
import re
import runpy
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

import retrace_hf
from retrace_hf import cli
from retrace_hf.generation import AcceptanceStats

from .fixtures import letters_chat_target, randomize, tiny_drafter


ROOT = Path(__file__).parents[1]
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "examples/space/README.md")

# What a command begins with, and the test that runs it: with small settings where the document's take hours.
RUN_BY = {
    "make demo": "test_demo.py::test_command_with_the_shipped_drafter",
    "python examples/ablation.py": "test_examples.py::test_the_ablation_trains_measures_and_goes_on",
    "python examples/draw_round.py": "test_readme.py::test_the_picture_is_drawn_anew",
    "python examples/evaluate_drafters.py": "test_examples.py::test_measuring_and_shipping",
    "python examples/finetune_lora.py": "test_examples.py::test_a_lora_alone_on_its_base_and_merged",
    "python examples/measure_generate.py": "test_readme.py::test_every_measure_of_generate_runs",
    "python examples/measure_training.py": "test_readme.py::test_a_training_step_is_measured",
    "python examples/measure_signal.py": "test_examples.py::test_measuring_the_signal_of_a_drafter",
    "python examples/plot_learning_curve.py": "test_examples.py::test_a_curve_of_tau_against_tokens",
    "python examples/positive_control.py": "test_examples.py::test_retrace_gains_where_states_hold_the_answer",
    "python examples/recommendation.py": "test_recommendation.py::test_every_arm_is_measured_and_no_list_is_changed",
    "python examples/space/app.py": "test_space_browser.py::test_the_shipped_drafter_answers",
    "python examples/train_retrace.py": "test_examples.py::test_training_leaves_a_drafter_and_a_note",
    "python examples/train_retrace.py ...": "test_examples.py::test_ctrl_c_while_training_with_held_out_prompts",
    "retrace-hf benchmark": "test_benchmark.py::test_the_command_takes_several_values_draws_and_makes_a_card",
    "retrace-hf convert": "test_convert.py::test_the_commands_of_the_readme",
    "retrace-hf card": "test_card.py::test_the_command_renders_checks_and_leaves_alone_what_is_written_by_hand",
    "retrace-hf demo": "test_demo.py::test_command_with_the_shipped_drafter",
    "retrace-hf prepare": "test_prepare.py::test_command",
    # Understood as they stand, though not run.
    "accelerate launch": "test_distributed.py::test_the_readmes_commands_for_many_gpus_are_understood",
    "pip install": "test_packaging.py::test_extras_of_the_readme_exist",
}
# What a command begins with, and why no test runs it.
NOT_RUN = {
    "accelerate launch": "GPUs",
    "hf upload": "Hub",
    "make": "runs the tests, or makes an environment first: .ci/run does",
    "pip install": "network",
    "python -m sglang.launch_server": "GPU",
    "retrace-hf benchmark --target Qwen/Qwen3-8B": "Hub and a GPU",
    "retrace-hf prepare HuggingFaceH4/ultrachat_200k": "Hub and a server with a GPU",
    "vllm serve": "GPU",
}
# The first words of a Python block, and the test that runs its lines.
BLOCKS_RUN_BY = {
    "import retrace_hf": "test_packaging.py::test_quickstart_runs",
    "from transformers import AutoModel": "test_hub.py::test_auto_model_loads_and_generates_without_the_package",
    "from retrace_hf import RetraceDrafter, RetraceTrainer": "test_readme.py::test_the_training_block_trains",
    "from retrace_hf import RetraceDrafter\n": "test_push.py::test_one_commit_holds_all_that_a_drafter_is",
    "import evaluate": "test_readme.py::test_the_metrics_block_measures",
}
# Scripts that hand what they do not know on to another.
HANDS_ON = {"ablation.py": "train_retrace.py"}


def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def blocks(document: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text_of(document), re.MULTILINE | re.DOTALL)


# An empty PATH: bash finds no command, and says which words it would have run.
SHELL = """
PATH=/nonexistent
command_not_found_handle() { printf '%s\\037' "$@"; printf '\\036'; }
"""


def commands_of(script: str) -> list[list[str]]:
    """The words of every command in it, as bash reads them: comments, quotes, variables and broken lines."""
    script = re.sub(r"^\. ", "source_ ", script, flags=re.MULTILINE)
    done = subprocess.run(["bash", "-c", SHELL + script], capture_output=True, text=True, check=False, cwd=ROOT)
    assert not done.stderr, done.stderr
    return [command.split("\037")[:-1] for command in done.stdout.split("\036")[:-1]]


def block_commands() -> list[tuple[str, list[str]]]:
    return [
        (document, words)
        for document in DOCUMENTS
        for block in blocks(document, "bash")
        for words in commands_of(block)
    ]


def inline_commands() -> list[tuple[str, list[str]]]:
    found = []
    for document in DOCUMENTS:
        prose = re.sub(r"^```.*?^```", "", text_of(document), flags=re.MULTILINE | re.DOTALL)
        for code in re.findall(r"`([^`]+)`", prose):
            if re.match(
                r"(python (-m |examples/)|retrace-hf [a-z]|make [a-z]|accelerate launch\b|pip install )", code
            ):
                found += [(document, words) for words in commands_of(code)]
    return found


COMMANDS = block_commands()
INLINE = inline_commands()


def name_of(words: list[str]) -> str | None:
    """The longest entry that the command begins with."""
    fitting = [name for name in (*RUN_BY, *NOT_RUN) if words[: len(name.split())] == name.split()]
    return max(fitting, key=lambda name: len(name.split()), default=None)


def test_every_command_is_run_by_a_test_or_says_what_it_needs():
    assert len(COMMANDS) > 20 and len(INLINE) > 10
    missing = [(document, words) for document, words in COMMANDS if name_of(words) is None and words[0] != "source_"]
    assert not missing
    unused = {*RUN_BY, *NOT_RUN} - {name_of(words) for _, words in COMMANDS + INLINE}
    assert not unused


@pytest.mark.parametrize("test", sorted({*RUN_BY.values(), *BLOCKS_RUN_BY.values()}))
def test_the_tests_named_here_exist_and_name_what_they_run(test):
    file, name = test.split("::")
    source = (ROOT / "tests" / file).read_text(encoding="utf-8")
    assert name in {node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    for command in (command for command, by in RUN_BY.items() if by == test and command.startswith("python ")):
        assert Path(command.split()[1]).name in source


# -- options and targets ---------------------------------------------------------------------------------------------


class _Parser(Exception):
    pass


@cache
def options_of(script: str) -> frozenset[str]:
    """The options of a script of examples/, from the parser that it makes."""

    def caught(parser, args=None, namespace=None):
        raise _Parser(parser)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_known_args", caught)
        patch.setattr(sys, "argv", [script])
        patch.syspath_prepend(str(ROOT / "examples"))
        with pytest.raises(_Parser) as found:
            runpy.run_path(str(ROOT / "examples" / script), run_name="__main__")
    (parser,) = found.value.args
    options = {name for action in parser._actions for name in action.option_strings}
    if script in HANDS_ON:
        options |= options_of(HANDS_ON[script])
    return frozenset(options)


def typer_options(command: str) -> set[str]:
    parameters = get_command(cli.app).commands[command].params
    return {name for parameter in parameters for name in (*parameter.opts, *parameter.secondary_opts)}


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def check_options(words: list[str]):
    given = {word.split("=")[0] for word in words if word.startswith("--")}
    if words[0] == "make":
        assert {word for word in words[1:] if "=" not in word} <= make_targets(), words
    elif words[0] == "retrace-hf":
        assert given <= typer_options(words[1]), words
    else:
        scripts = [word for word in words if word.startswith("examples/") and word.endswith(".py")]
        for script in scripts:
            assert (ROOT / script).is_file(), script
            behind = words[words.index(script) + 1 :]
            given = {word.split("=")[0] for word in behind if word.startswith("--")}
            if given:
                assert given <= options_of(script.removeprefix("examples/")), words


def test_options_and_targets_of_commands_exist():
    for _, words in COMMANDS + INLINE:
        check_options(words)


def test_options_named_in_prose_exist():
    scripts = [path.name for path in (ROOT / "examples").glob("*.py") if "rgumentParser" in path.read_text()]
    known = set().union(*map(options_of, scripts), *map(typer_options, get_command(cli.app).commands))
    for document in DOCUMENTS:
        named = {option for code in re.findall(r"`(--[^`]+)`", text_of(document)) for option in code.split()}
        assert {option for option in named if option.startswith("--")} <= known, document


def test_a_wrong_option_is_seen():
    for command in ("python examples/ablation.py --no_such 1", "retrace-hf card x --no-such", "make no-such"):
        with pytest.raises(AssertionError):
            check_options(command.split())
    script = 'A="--x 1\n  --y"\n# no\npython a.py $A \\\n  "<|b|>" ...  # no\n'
    assert commands_of(script) == [["python", "a.py", "--x", "1", "--y", "<|b|>", "..."]]


# -- Python blocks ---------------------------------------------------------------------------------------------------


PYTHON = [block for document in DOCUMENTS for block in blocks(document, "python")]


def check_names(block: str):
    """Imports exist; so do attributes of what was imported, and the arguments it is given by name."""
    tree = ast.parse(block)
    known = dict.fromkeys(("RetraceDrafter", "AutoModel"))
    for name in known:
        known[name] = getattr(retrace_hf, name, None) or getattr(sys.modules["transformers"], name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                known[alias.asname or alias.name.split(".")[0]] = importlib.import_module(alias.name)
        elif isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module)
            known |= {alias.asname or alias.name: getattr(module, alias.name) for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not isinstance(node.value, ast.Call):
            _resolve(node, known)
        elif isinstance(node, ast.Call):
            called = _resolve(node.func, known)
            parameters = inspect.signature(called).parameters.values() if callable(called) else ()
            if parameters and all(p.kind is not p.VAR_KEYWORD for p in parameters):
                assert {k.arg for k in node.keywords if k.arg} <= {p.name for p in parameters}, ast.unparse(node)


def _resolve(node: ast.expr, known: dict):
    """What an expression of names and dots stands for; `None` where it begins with a name that is not known."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = _resolve(node.value, known)
        return None if owner is None else getattr(owner, node.attr)
    return None


def test_python_blocks_are_right_and_run_by_a_test():
    begun = {begin: [block for block in PYTHON if block.startswith(begin)] for begin in BLOCKS_RUN_BY}
    assert all(begun.values()) and all(any(block in found for found in begun.values()) for block in PYTHON)
    for block in PYTHON:
        check_names(block)


@pytest.mark.parametrize(
    "block",
    [
        "import retrace_hf\nretrace_hf.no_such()",
        "from retrace_hf import NoSuch",
        "from retrace_hf import RetraceTrainingArguments\nRetraceTrainingArguments(no_such=1)",
        "RetraceDrafter.no_such('x')",
    ],
)
def test_a_wrong_name_is_seen(block):
    with pytest.raises((AttributeError, AssertionError)):
        check_names(block)


def test_the_training_block_trains(tmp_path, monkeypatch):
    (block,) = [block for block in PYTHON if "trainer.train()" in block]
    target, tokenizer = letters_chat_target()
    tiny_drafter(target, conditioning="none").save_pretrained(tmp_path / "runs" / "stage1")
    rows = [
        {
            "id": str(i),
            "source": "chat",
            "messages": [{"role": "user", "content": "abac"}, {"role": "assistant", "content": "adaeafagahai" * 4}],
            "response_ids": tokenizer("adaeafagahai" * 4)["input_ids"],
            "finish": "stop",
        }
        for i in range(2)
    ]
    data = tmp_path / "responses.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for was, now in {
        "examples/data/responses_0.jsonl.gz": str(data),
        "eval_steps=100": "eval_steps=1, max_steps=1, use_cpu=True, report_to='none', num_anchors=4",
    }.items():
        assert was in block
        block = block.replace(was, now)
    monkeypatch.chdir(tmp_path)
    names = {"target": target, "tokenizer": tokenizer}
    exec(compile(block, "README.md", "exec"), names)
    log = names["trainer"].state.log_history
    assert names["trainer"].state.global_step == 1 and any("eval_tau" in entry for entry in log)


def test_the_metrics_block_measures():
    (block,) = [block for block in PYTHON if "metric_path" in block]
    stats = AcceptanceStats(accepted_per_round=[2, 0], proposed_per_round=[3, 3], calls=1)
    tree = ast.parse(block)
    tree.body[-1] = ast.Assign([ast.Name("found", ast.Store())], tree.body[-1].value)
    names = {"stats": stats}
    exec(compile(ast.fix_missing_locations(tree), "README.md", "exec"), names)
    assert names["found"]["acceptance_length"] == stats.acceptance_length == 2.0


# -- scripts that no other test runs ---------------------------------------------------------------------------------


def run_example(name: str, *arguments):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"examples/{name}", *map(str, arguments)])
        patch.syspath_prepend(str(ROOT / "examples"))
        return runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")


def test_every_measure_of_generate_runs(tmp_path):
    target, tokenizer = letters_chat_target()
    # As SmolLM2's; token 0, else taken for padding, stands in answers, and is masked in a second turn.
    target.generation_config.pad_token_id = target.config.pad_token_id = tokenizer.eos_token_id
    folder = tmp_path / "target"
    target.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    randomize(tiny_drafter(target)).save_pretrained(tmp_path / "drafter")
    prompts = tmp_path / "prompts.jsonl"
    turns = ["abacad", "aeaf"]
    rows = [{"id": str(i), "source": "chat", "category": "chat", "turns": turns} for i in range(2)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--target", folder, "--drafter", tmp_path / "drafter", "--prompts", prompts, "--limit", 2]
    sizes = ["--max-new-tokens", 12, "--rounds", 20, "--lengths", 16, "--window", 8]
    run_example("measure_generate.py", *options, *sizes, "--output", tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    assert set(found) == {"turns", "policies", "memory", "context", "provenance"}
    assert found["turns"]["equal_to_plain"] == found["turns"]["prompts"] == 2
    assert found["memory"]["rounds"] == 20 and [row["length"] for row in found["context"]["rows"]] == [16]


def test_a_training_step_is_measured(capsys):
    sizes = ["--anchors", 4, "--chunks", 8, 32, "--vocab-size", 2000, "--length", 32, "--block-size", 4]
    run_example("measure_training.py", *sizes, "--device", "cpu")
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(table) == 3 and table[-1].count("|") == 6


def test_the_picture_is_drawn_anew(tmp_path):
    drawn = run_example("draw_round.py", "--output", tmp_path / "round.png")
    assert (tmp_path / "round.png").read_bytes().startswith(b"\x89PNG")
    # The example of the alignment's own docstring: two accepted of seven.
    assert drawn["carried"](8, 2) == [(1, 4, 3), (2, 5, 4), (3, 6, 5), (4, 7, 6)]
    assert drawn["carried"](8, 7) == []
    assert (ROOT / "examples" / "round.png").stat().st_size < 100_000


# -- prose -----------------------------------------------------------------------------------------------------------


def messages() -> str:
    """All texts of the package, with what is put into them left out."""
    texts = []
    for path in (ROOT / "retrace_hf").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


def section(title: str) -> str:
    return re.search(rf"^## {title}\n(.*?)(?=^## )", text_of("README.md"), re.MULTILINE | re.DOTALL).group(1)


def test_messages_of_troubleshooting_are_the_packages():
    texts = messages()
    symptoms = [line.split("|")[1] for line in section("Troubleshooting").splitlines() if line.startswith("| ")][1:]
    quoted = [code for symptom in symptoms for code in re.findall(r"`([^`]+)`", symptom) if " " in code]
    assert len(quoted) > 10
    for message in quoted:
        assert message in texts, message


def test_links_within_the_documents_lead_somewhere():
    for document in DOCUMENTS:
        text = text_of(document)
        titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles}
        for link in re.findall(r"\]\(([^)]+)\)", text):
            if link.startswith("#"):
                assert link[1:] in anchors, link
            elif not link.startswith("https://"):
                assert ((ROOT / document).parent / link.split("#")[0]).exists(), (document, link)


def test_citations_name_the_papers_that_the_code_cites():
    cited = yaml.safe_load(text_of("CITATION.cff"))
    assert cited["cff-version"] == "1.2.0" and cited["version"] == retrace_hf.__version__
    for paper in cited["references"]:
        number = paper["url"].removeprefix("https://arxiv.org/abs/")
        assert paper["identifiers"][0]["value"] == f"arXiv:{number}" and paper["title"] and paper["authors"]
        assert number in text_of("README.md") or number in messages(), number
    assert len(cited["references"]) == 5
