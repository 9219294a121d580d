"""A run that stops, however it stops, and goes on: nothing lost, nothing trained twice, nothing half on the disk."""

import json
import shutil
import signal
from pathlib import Path

import pytest
import safetensors
import torch
from torch.utils._pytree import tree_leaves
from transformers import TrainerCallback
from transformers import trainer as upstream

from retrace_hf import RetraceDrafter, RetraceTrainer
from retrace_hf.hub import code_files
from retrace_hf.training import last_whole_checkpoint, saving_on_interrupt

from .fixtures import letters_tokenizer, tiny_drafter, tiny_target
from .test_trainer import make_trainer, rows_of


@pytest.fixture(scope="module")
def target():
    return tiny_target("qwen3")


@pytest.fixture(scope="module")
def rows(target):
    return rows_of(target, count=6)


# Three steps an epoch, dropout, and everything else that has a state of its own.
OPTIONS = {"max_steps": 7, "save_strategy": "steps", "save_steps": 1, "num_carried_rounds": 1, "logging_steps": 1}


def run(target, rows, folder, resume=None, **options):
    drafter = tiny_drafter(target, attention_dropout=0.1)
    trainer = make_trainer(drafter, target, folder, rows, **{**OPTIONS, **options})
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def equal(a, b):
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def assert_same(one, other):
    for name, weight in one.state_dict().items():
        assert torch.equal(weight, other.state_dict()[name]), name


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_resumed_equals_undisturbed_bit_for_bit(target, rows, tmp_path, optimizer):
    """Within an epoch, at its end, in a later one; weights, optimizer, schedule and random numbers."""
    options = {"muon": optimizer == "muon", "trajectory_learning_rate": 1e-3, "gradient_accumulation_steps": 1}
    whole = run(target, rows, tmp_path, **options)
    for step in (2, 3, 5):
        resumed = run(target, rows, tmp_path / str(step), str(tmp_path / f"checkpoint-{step}"), **options)
        assert_same(whole.model, resumed.model)
        timed = ("train_runtime", "train_tokens_per_second")
        ends = [{k: v for k, v in t.state.log_history[-2].items() if k not in timed} for t in (whole, resumed)]
        assert ends[0]["step"] == 7 and ends[0] == ends[1]  # loss, norm of the gradient, learning rate, tau
        for name in ("optimizer.pt", "scheduler.pt"):
            states = [
                torch.load(folder / "checkpoint-7" / name, weights_only=True)
                for folder in (tmp_path, tmp_path / str(step))
            ]
            leaves = [tree_leaves(state) for state in states]
            assert len(leaves[0]) == len(leaves[1]) and all(map(equal, *leaves))


def test_resuming_at_the_end_trains_no_step(target, rows, tmp_path, monkeypatch):
    """The last step lies within an epoch: there upstream trains one more."""
    whole = run(target, rows, tmp_path)
    monkeypatch.setattr(RetraceTrainer, "training_step", lambda *args: pytest.fail("a step was trained"))
    resumed = run(target, rows, tmp_path, True)
    assert resumed.state.global_step == 7
    assert_same(whole.model, resumed.model)
    with pytest.raises(pytest.fail.Exception):
        run(target, rows, tmp_path, True, max_steps=8)


def test_a_checkpoint_cut_short_is_passed_over(target, rows, tmp_path):
    whole = run(target, rows, tmp_path)
    state = (tmp_path / "checkpoint-7" / "trainer_state.json").read_text()
    (tmp_path / "checkpoint-7" / "trainer_state.json").write_text(state[:100])
    (tmp_path / "checkpoint-6" / "trainer_state.json").unlink()
    (tmp_path / "checkpoint-6" / "optimizer.pt").unlink()
    assert last_whole_checkpoint(tmp_path) == str(tmp_path / "checkpoint-5")
    assert_same(whole.model, run(target, rows, tmp_path, True).model)
    with pytest.raises(ValueError, match="holds no whole checkpoint"):
        run(target, rows, tmp_path / "nowhere", True)


def test_checkpoints_hold_the_drafter_only(target, rows, tmp_path):
    trainer = run(target, rows, tmp_path, max_steps=1)
    with safetensors.safe_open(tmp_path / "checkpoint-1" / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(trainer.model.state_dict())
    files = {str(p.relative_to(tmp_path / "checkpoint-1")) for p in (tmp_path / "checkpoint-1").rglob("*.*")}
    training = {"optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "training_args.bin"}
    assert files == {"model.safetensors", "config.json", *training, *code_files()}
    optimizer = torch.load(tmp_path / "checkpoint-1" / "optimizer.pt", weights_only=True)
    assert len(optimizer["state"]) == len(list(trainer.model.parameters()))


class FullDisk:
    """Lets `count` files through, then the disk is full."""

    def __init__(self, real, count, error):
        self.real, self.count, self.error = real, count, error

    def __call__(self, *args, **kwargs):
        self.count -= 1
        if self.count < 0:
            raise self.error
        return self.real(*args, **kwargs)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("file write failed")])
def test_a_full_disk_leaves_no_half_checkpoint(target, rows, tmp_path, monkeypatch, error):
    saves = 4  # arguments, optimizer, scheduler, random numbers: one whole checkpoint
    monkeypatch.setattr(upstream.torch, "save", FullDisk(torch.save, saves + 2, error))
    with pytest.raises(OSError, match=r"checkpoint-2 could not be written \(.*\).*go on from .*checkpoint-1"):
        run(target, rows, tmp_path)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]
    monkeypatch.undo()
    assert_same(run(target, rows, tmp_path, True).model, run(target, rows, tmp_path / "whole").model)


def test_a_checkpoint_written_over_an_older_one_is_whole_only_at_its_end(target, rows, tmp_path, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    run(target, rows, tmp_path, max_steps=1)
    monkeypatch.setattr(RetraceTrainer, "_save_optimizer_and_scheduler", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(target, rows, tmp_path, max_steps=1)
    assert last_whole_checkpoint(tmp_path) is None


class PressCtrlC(TrainerCallback):
    def __init__(self, step, times=1):
        self.step, self.times = step, times

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            for _ in range(self.times):
                signal.raise_signal(signal.SIGINT)


def test_ctrl_c_finishes_the_step_and_saves_it(target, rows, tmp_path, capsys):
    before = signal.getsignal(signal.SIGINT)
    trainer = make_trainer(tiny_drafter(target), target, tmp_path, rows, max_steps=5, save_strategy="no")
    trainer.add_callback(PressCtrlC(2))
    with saving_on_interrupt(trainer) as interrupt:
        trainer.train()
    assert interrupt.asked and trainer.state.global_step == 3 and "finished and saved" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is before
    resumed = make_trainer(tiny_drafter(target), target, tmp_path, rows, max_steps=5, save_strategy="no")
    with saving_on_interrupt(resumed) as interrupt:
        resumed.train(resume_from_checkpoint=True)
    assert not interrupt.asked and resumed.state.global_step == 5
    whole = make_trainer(tiny_drafter(target), target, tmp_path / "whole", rows, max_steps=5)
    whole.train()
    assert_same(whole.model, resumed.model)
    again = make_trainer(tiny_drafter(target), target, tmp_path, rows, max_steps=5, save_strategy="no")
    again.add_callback(PressCtrlC(2, times=2))
    with pytest.raises(KeyboardInterrupt), saving_on_interrupt(again):
        again.train()
    assert signal.getsignal(signal.SIGINT) is before


# -- the Hub, without a network --------------------------------------------------------------------------------------


class Hub:
    """Notes what would be uploaded."""

    def __init__(self):
        self.pushes = []

    def create_repo(self, repo_id, **kwargs):
        return type("RepoUrl", (), {"repo_id": f"me/{repo_id}"})()

    def upload_folder(self, repo_id, folder_path, ignore_patterns=(), **kwargs):
        files = {str(p.relative_to(folder_path)): p.read_bytes() for p in Path(folder_path).rglob("*") if p.is_file()}
        kept = {n: d for n, d in files.items() if not n.startswith(("_", "checkpoint-"))}
        self.pushes.append((repo_id, kept))
        return type("Done", (), {"is_done": lambda self: True, "done": lambda self: True})()


def test_what_is_pushed_runs_elsewhere(target, rows, tmp_path, monkeypatch):
    """Each push, those of checkpoints too, holds weights, config, code, tokenizer and whatever note lies there; the
    last one a card."""
    hub = Hub()
    monkeypatch.setattr(upstream, "hf_api", lambda: hub)
    folder = tmp_path / "drafter"
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "push_to_hub": True}
    trainer = RetraceTrainer(
        model=tiny_drafter(target),
        target=target,
        args=make_trainer(tiny_drafter(target), target, folder, rows, **options).args,
        train_dataset=rows,
        eval_prompts=[{"prompt_ids": [5, 6, 7], "source": "math"}],
        processing_class=letters_tokenizer(),
    )
    (folder / "training.json").write_text("{}")
    trainer.train()
    trainer.save_model()
    assert len(hub.pushes) >= 2
    for number, (repo_id, files) in enumerate(hub.pushes):
        assert repo_id == "me/drafter"
        wanted = {"model.safetensors", "config.json", "training.json", "tokenizer_config.json", *code_files()}
        assert wanted <= set(files), number
        auto_map = json.loads(files["config.json"])["auto_map"]
        assert {f"{name.split('.')[0]}.py" for name in auto_map.values()} <= set(files)
    card = hub.pushes[-1][1]["README.md"].decode()
    assert "- retrace" in card and "- speculative-decoding" in card
    shutil.rmtree(tmp_path / "copy", ignore_errors=True)
    for name, data in hub.pushes[-1][1].items():
        path = tmp_path / "copy" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    assert_same(trainer.model, RetraceDrafter.from_pretrained(tmp_path / "copy"))
