"""Training over several processes: the same weights as in one, nothing that waits for ever, and shipped configs."""

import json
import os
import runpy
import shutil
import socket
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from safetensors.torch import load_file
from transformers import HfArgumentParser
from transformers.integrations import deepspeed as deepspeed_state

from retrace_hf import RetraceDrafter, RetraceTrainer, RetraceTrainingArguments
from retrace_hf.training import loading_whole, sharding

from .distributed_worker import train
from .fixtures import prompt_of, tiny_drafter, tiny_target
from .test_packaging import code_blocks
from .test_trainer import arguments, without_answer


ROOT = Path(__file__).parents[1]
OPTIONS = {"max_steps": 3, "num_carried_rounds": 2, "logging_steps": 1, "train_sampling_strategy": "sequential"}


@pytest.fixture(scope="module")
def rows():
    """Of several lengths; the third and fourth, which are the second process's first batch, have no answer."""
    rows = []
    for i, length in enumerate((20, 33, 40, 25, 49, 12, 49, 30, 21, 36, 28, 17)):
        ids = prompt_of(length, seed=i)[0].tolist()
        rows.append({"input_ids": ids, "loss_mask": [0] * 9 + [1] * (length - 9)})
    rows[2:4] = map(without_answer, rows[2:4])
    return rows


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def start(folder: Path, runs: list[dict], fails: bool = False, **env: str) -> str:
    """Trains `runs`, one after the other, in two processes, and gives what they printed. What hangs is ended, and
    fails."""
    path = folder / "runs.json"
    path.write_text(json.dumps(runs))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", **env}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*launcher, "--master_port", str(free_port()), "-m", "tests.distributed_worker", str(path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=env,
        timeout=500,
    )
    assert (done.returncode != 0) == fails, done.stderr[-4000:]
    return done.stderr


def weights(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


def history(folder: Path) -> list[dict]:
    """What was logged, without the times."""
    entries = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    timed = ("runtime", "per_second", "total_flos", "grad_norm")
    return [{k: v for k, v in entry.items() if not k.endswith(timed)} for entry in entries]


def assert_same(found: Path, expected: Path, tolerance: float):
    found, expected = weights(found), weights(expected)
    assert set(found) == set(expected)
    for name, weight in expected.items():
        assert (found[name] - weight).abs().max() <= tolerance, name


PROMPTS = [{"prompt_ids": prompt_of(9, seed=20 + i)[0].tolist(), "source": "ab"[i % 2]} for i in range(3)]


def test_two_processes_train_as_one_with_twice_the_batch(rows, tmp_path):
    """One of which has no anchor in its first batch. Logged means and the drafted prompts' tau are over both."""
    evaluated = {"eval_prompts": PROMPTS, "eval_strategy": "steps", "eval_steps": 3, "eval_max_new_tokens": 12}
    whole = {**OPTIONS, **evaluated, "rows": rows, "folder": str(tmp_path / "one")}
    train(**whole, per_device_train_batch_size=4)
    start(tmp_path, [{**whole, "folder": str(tmp_path / "two"), "per_device_train_batch_size": 2}])
    assert_same(tmp_path / "two", tmp_path / "one", tolerance=1e-5)
    found, expected = history(tmp_path / "two"), history(tmp_path / "one")
    assert len(found) == len(expected) and any("eval_tau_b" in entry for entry in found)
    for one, other in zip(found, expected):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-4)


SAVED = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 2}


def cut(source: Path, folder: Path) -> Path:
    """A run that was stopped behind its second step."""
    shutil.copytree(source / "checkpoint-2", folder / "checkpoint-2")
    return folder


@pytest.mark.slow
def test_two_processes_save_resume_and_stop(rows, tmp_path):
    """Resumed, or interrupted in one process alone or through the launcher: the end is an undisturbed run's."""
    whole = {**OPTIONS, **SAVED, "rows": rows, "folder": str(tmp_path / "whole")}
    start(tmp_path, [whole])
    resumed = {**whole, "folder": str(cut(tmp_path / "whole", tmp_path / "resumed")), "resume": True}
    alone = {**whole, "folder": str(tmp_path / "alone"), "interrupt": ["process", 1]}
    start(tmp_path, [resumed, alone, {**alone, "interrupt": None, "resume": True}])
    started = {**whole, "folder": str(tmp_path / "launcher"), "save_strategy": "no"}
    start(tmp_path, [{**started, "interrupt": ["launcher", 2]}], fails=True)
    assert [path.name for path in (tmp_path / "launcher").iterdir()] == ["checkpoint-3"]
    start(tmp_path, [{**started, "resume": True}])
    for name in ("resumed", "alone", "launcher"):
        assert_same(tmp_path / name, tmp_path / "whole", tolerance=0)


@pytest.mark.slow
def test_every_kind_of_run_is_the_same_in_two_processes(rows, tmp_path):
    kinds = {
        "lora": {"lora": True},
        "checkpointed": {"activation_checkpointing": True},
        "fresh rounds alone": {"num_carried_rounds": 0},
        "control": {"drafter": {"conditioning": "none"}, "loss_type": "dpace", "soft_share": 0.3},
        "accumulated": {"gradient_accumulation_steps": 2},
        "muon": {"muon": True, "trajectory_learning_rate": 1e-3},
    }
    runs = [{**OPTIONS, "rows": rows, "folder": str(tmp_path / kind), **own} for kind, own in kinds.items()]
    start(tmp_path, [{**run, "per_device_train_batch_size": 2} for run in runs])
    for kind, run in zip(kinds, runs):
        train(**{**run, "folder": str(tmp_path / "one" / kind)}, per_device_train_batch_size=4)
        # Muon computes its updates in bfloat16.
        assert_same(tmp_path / kind, tmp_path / "one" / kind, tolerance=1e-4 if kind == "muon" else 1e-5)


# -- FSDP2 and ZeRO-3 ------------------------------------------------------------------------------------------------


def launch_arguments(config: str):
    """What `accelerate launch --config_file` makes of a shipped config."""
    path = str(ROOT / "examples" / "accelerate" / f"{config}.yaml")
    arguments = launch_command_parser().parse_args(["--config_file", path, "script.py"])
    arguments, defaults, _ = _validate_launch_command(arguments)
    arguments.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
    return arguments


def fsdp_environment() -> dict[str, str]:
    """The shipped config's, for a CPU."""
    names = ("FSDP_", "ACCELERATE_USE_FSDP")
    return {k: v for k, v in prepare_multi_gpu_env(launch_arguments("fsdp2")).items() if k.startswith(names)}


def check_sharded(rows, folder: Path, environment: dict[str, str], **options) -> dict:
    """Two processes train as one with twice the batch, and resume. Gives their run."""
    one = {**OPTIONS, **SAVED, "rows": rows, "folder": str(folder / "one"), "per_device_train_batch_size": 4}
    train(**one)
    two = {**one, "folder": str(folder / "two"), "per_device_train_batch_size": 2, **options}
    start(folder, [two], **environment)
    assert_same(folder / "two", folder / "one", tolerance=1e-5)
    resumed = {**two, "folder": str(cut(folder / "two", folder / "resumed")), "resume": True}
    start(folder, [resumed], **environment)
    assert_same(folder / "resumed", folder / "two", tolerance=1e-7)
    return two


@pytest.mark.slow
def test_fsdp2_trains_as_one_process_with_twice_the_batch_and_resumes(rows, tmp_path):
    two = check_sharded(rows, tmp_path, fsdp_environment(), fsdp=True)
    # What cannot be is said before a step.
    refused = start(tmp_path, [{**two, "eval_prompts": PROMPTS}], fails=True, **fsdp_environment())
    assert "eval_prompts is set and the models are sharded" in refused
    empty = {**fsdp_environment(), "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
    assert "set it to false" in start(tmp_path, [two], fails=True, **empty)


def zero3_environment() -> dict[str, str]:
    """The shipped config's, for CPUs: float32 on gloo."""
    environment = prepare_deepspeed_cmd_env(launch_arguments("deepspeed_zero3"))[1]
    names = ("ACCELERATE_DEEPSPEED", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_GRADIENT")
    cpu = {"DS_ACCELERATOR": "cpu", "ACCELERATE_MIXED_PRECISION": "no"}
    return {k: v for k, v in environment.items() if k.startswith(names)} | cpu


@pytest.mark.slow
def test_zero3_trains_as_one_process_with_twice_the_batch_and_resumes(rows, tmp_path):
    """DeepSpeed itself, with the target's body sharded over two processes (`pip install -e .[deepspeed]`)."""
    two = check_sharded(rows, tmp_path, zero3_environment())
    refused = start(tmp_path, [{**two, "eval_prompts": PROMPTS}], fails=True, **zero3_environment())
    assert "eval_prompts is set and the models are sharded" in refused


@pytest.mark.parametrize(
    ("name", "kind", "processes"),
    [("one_gpu", "NO", 1), ("ddp", "MULTI_GPU", 8), ("fsdp2", "FSDP", 8), ("deepspeed_zero3", "DEEPSPEED", 8)],
)
def test_accelerate_launch_reads_the_shipped_configs(name, kind, processes):
    config = load_config_from_file(str(ROOT / "examples" / "accelerate" / f"{name}.yaml"))
    assert (config.distributed_type.value, config.num_processes, config.mixed_precision) == (kind, processes, "bf16")
    arguments = launch_arguments(name)
    assert arguments.num_processes == processes
    if name == "fsdp2":
        environment = fsdp_environment()
        assert (environment["FSDP_VERSION"], environment["FSDP_CPU_RAM_EFFICIENT_LOADING"]) == ("2", "false")
        assert environment["FSDP_TRANSFORMER_CLS_TO_WRAP"] in RetraceDrafter._no_split_modules
    if name == "deepspeed_zero3":
        environment = prepare_deepspeed_cmd_env(arguments)[1]
        assert environment["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "3"
        assert environment["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "auto"


def test_the_readmes_commands_for_many_gpus_are_understood():
    """By the launcher and by the script; a step is 32 prompts, as in the papers."""
    (block,) = [block for block in code_blocks("bash") if "accelerate launch" in block]
    shell = 'accelerate() { printf "%s\\n" "$@" END; }\n'
    printed = subprocess.run(
        ["bash", "-c", shell + block], capture_output=True, text=True, cwd=ROOT, check=True
    ).stdout
    commands = [command.split("\n")[:-1] for command in printed.split("END\n")[:-1]]
    assert [command[0] for command in commands] == ["launch", "launch"]
    script = runpy.run_path(str(ROOT / "examples" / "train_retrace.py"))
    for command, drafter in zip(commands, ("z-lab/Qwen3-8B-DFlash-b16", None)):
        launch = launch_command_parser().parse_args(command[1:])
        processes = load_config_from_file(str(ROOT / launch.config_file)).num_processes
        assert launch.training_script == "examples/train_retrace.py"
        parser = HfArgumentParser((script["ScriptArguments"], RetraceTrainingArguments))
        options, args = parser.parse_args_into_dataclasses([*launch.training_script_args, "--use_cpu", "True"])
        assert processes * args.per_device_train_batch_size * args.gradient_accumulation_steps == 32
        assert (options.target, options.init_from, args.bf16) == ("Qwen/Qwen3-8B", drafter, True)


class DeepSpeed(types.ModuleType):
    """Notes what is sharded, and with what. It stands in for a package that needs GPUs."""

    def __init__(self):
        super().__init__("deepspeed")
        self.calls, self.zero = [], types.SimpleNamespace(Init=self.note)

    def note(self, module, config_dict_or_path):
        for parameter in module.parameters():
            parameter.ds_id = 0
        self.calls.append((module, config_dict_or_path))

    def initialize(self, model, config):
        assert all(hasattr(parameter, "ds_id") for parameter in model.parameters())
        self.calls.append((model, config))
        return (model,)


@pytest.mark.parametrize("tied", [False, True])
def test_zero3_shards_the_targets_body_and_leaves_its_head_whole(tmp_path, monkeypatch, tied):
    deepspeed, target = DeepSpeed(), tiny_target("qwen3", tie_word_embeddings=tied).requires_grad_(False)
    monkeypatch.setitem(sys.modules, "deepspeed", deepspeed)
    head, args = target.get_output_embeddings().weight.clone(), arguments(tmp_path)
    args.deepspeed_plugin = types.SimpleNamespace(deepspeed_config={"zero_optimization": {"stage": 3}})
    sharding.shard_target(target, args)
    assert [module for module, _ in deepspeed.calls] == [target.get_decoder()] * 2
    assert all(config["zero_optimization"]["stage"] == 3 for _, config in deepspeed.calls)
    kept = target.get_output_embeddings().weight
    assert torch.equal(kept, head) and not hasattr(kept, "ds_id") and not kept.requires_grad
    with pytest.raises(ValueError, match="sharded by ZeRO-3 as they were read; load it, .*loading_whole"):
        RetraceTrainer(tiny_drafter(target), target, args)


def test_under_zero3_models_are_loaded_whole_into_host_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(deepspeed_state, "_hf_deepspeed_config_weak_ref", None)
    args = arguments(tmp_path)
    with loading_whole(args) as device:
        assert device == args.device

    class Config:
        def is_zero3(self):
            return True

    args.hf_deepspeed_config = Config()
    deepspeed_state.set_hf_deepspeed_config(args.hf_deepspeed_config)
    with pytest.raises(OSError), loading_whole(args) as device:
        assert device.type == "cpu" and not deepspeed_state.is_deepspeed_zero3_enabled()
        raise OSError
    assert deepspeed_state.is_deepspeed_zero3_enabled()
