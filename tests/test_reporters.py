"""What is logged while training reaches the places where people look: tensorboard, trackio and wandb, all offline.

The packages come with `pip install -e .[report]` (`make test-full` does it).
"""

import pytest
from transformers import TrainerCallback

from .fixtures import randomize, tiny_drafter, tiny_target
from .test_eval_prompts import make, prompts_of


pytestmark = pytest.mark.slow

# Of each round that is trained, and of each kind of held-out prompt.
TRAINED = ("tau_fresh", "tau_carried_1", "loss", "learning_rate")
HELD_OUT = ("tau", "tau_math", "tau_code")


class Remembered(TrainerCallback):
    """The figures as the Trainer's own log has them."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append({**logs, "step": state.global_step})


def train(folder, reporter):
    target = tiny_target("qwen3")
    remembered = Remembered()
    trainer = make(
        randomize(tiny_drafter(target, conditioning="corrected")),
        target,
        folder,
        prompts_of("math", "code"),
        callbacks=[remembered],
        report_to=[reporter],
        run_name=f"retrace-{reporter}",
        project="retrace-tests",  # trackio's; wandb has an environment variable for it
        num_carried_rounds=1,
        max_steps=4,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=4,
    )
    trainer.train()
    return remembered.logs


def of_step(logs, step):
    """The last figures of a step, under the names that transformers' reporters give them."""
    found = {}
    for entry in logs:
        if entry["step"] == step:
            for name, value in entry.items():
                if name.startswith("eval_"):
                    found["eval/" + name.removeprefix("eval_")] = value
                elif not name.startswith("train_"):
                    found["train/" + name] = value
    return found


def expected(logs):
    found = of_step(logs, 4)
    names = [f"train/{name}" for name in TRAINED] + [f"eval/{name}" for name in HELD_OUT]
    return {name: found[name] for name in names}


def check(reported: dict, logs):
    for name, value in expected(logs).items():
        assert reported[name] == pytest.approx(value, rel=1e-6), name


def test_tensorboard(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    logs = train(tmp_path, "tensorboard")
    board = EventAccumulator(str(tmp_path / "board")).Reload()
    check({name: board.Scalars(name)[-1].value for name in board.Tags()["scalars"]}, logs)
    assert [event.step for event in board.Scalars("train/tau_fresh")] == [2, 4]


def test_trackio(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    from trackio.sqlite_storage import SQLiteStorage

    logs = train(tmp_path, "trackio")
    reported = {}
    for run in SQLiteStorage.get_runs("retrace-tests"):
        for entry in SQLiteStorage.get_logs("retrace-tests", run):
            reported.update(entry)
    check(reported, logs)


def test_wandb(tmp_path, monkeypatch):
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_PROJECT", "retrace-tests")
    logs = train(tmp_path, "wandb")
    reported = dict(wandb.run.summary)
    config = dict(wandb.run.config)
    wandb.finish()
    check(reported, logs)
    assert config["num_carried_rounds"] == 1 and config["conditioning"] == "corrected"
