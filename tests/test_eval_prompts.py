"""Acceptance while training: what generate() accepts on held-out prompts, by kind, and what follows from it."""

import pytest
import torch
from datasets import Dataset
from transformers import EarlyStoppingCallback, TrainerCallback

from retrace_hf import RetraceDrafter, RetraceTrainer, record_acceptance
from retrace_hf.training.eval_prompts import EvalPrompt, first_of_each_kind, read_eval_rows

from .fixtures import (
    BLOCK_SIZE,
    always_wrong,
    letters_tokenizer,
    oracle,
    plain,
    prompt_of,
    randomize,
    tiny_drafter,
    tiny_target,
)
from .test_trainer import arguments, rows_of


NEW_TOKENS = 1 + 2 * BLOCK_SIZE


@pytest.fixture(scope="module")
def target():
    return tiny_target("qwen3")


def prompts_of(*kinds):
    return [
        {"prompt_ids": prompt_of(9, seed=20 + i)[0].tolist(), "source": kind, "id": str(i)}
        for i, kind in enumerate(kinds)
    ]


def make(drafter, target, folder, prompts, rows=None, eval_rows=None, callbacks=None, **kwargs):
    return RetraceTrainer(
        model=drafter,
        target=target,
        args=arguments(folder, **{"eval_max_new_tokens": NEW_TOKENS, **kwargs}),
        train_dataset=Dataset.from_list(rows or rows_of(target)),
        eval_dataset=eval_rows,
        eval_prompts=prompts,
        callbacks=callbacks,
    )


@pytest.mark.parametrize(("kind_of_drafter", "tau"), [(oracle, float(BLOCK_SIZE)), (always_wrong, 1.0)])
def test_tau_of_drafters_that_are_known(target, tmp_path, kind_of_drafter, tau):
    """The whole answer accepted, and nothing of it."""
    prompts = prompts_of("math")
    sequence = plain(target, torch.tensor([prompts[0]["prompt_ids"]]), max_new_tokens=NEW_TOKENS)
    drafter = kind_of_drafter(tiny_drafter(target), target, sequence)
    assert make(drafter, target, tmp_path, prompts).evaluate()["eval_tau"] == tau


def test_tau_is_that_of_generate_pooled_and_by_kind(target, tmp_path):
    drafter, prompts = randomize(tiny_drafter(target)), prompts_of("math", "chat", "math", "code", "math")
    trainer = make(drafter, target, tmp_path, prompts, eval_max_prompts=4)
    metrics = trainer.evaluate()
    chosen = [prompts[i] for i in (0, 1, 3, 2)]  # one of each kind before the second of any
    for name, of_kind in (("", chosen), ("_math", [prompts[0], prompts[2]]), ("_chat", [prompts[1]])):
        with record_acceptance() as stats:
            for row in of_kind:
                ids = torch.tensor([row["prompt_ids"]])
                target.generate(ids, assistant_model=drafter, max_new_tokens=NEW_TOKENS, do_sample=False)
        assert metrics[f"eval_tau{name}"] == pytest.approx(stats.acceptance_length, abs=1e-4)
    assert {k for k in metrics if "tau" in k} == {"eval_tau", "eval_tau_math", "eval_tau_chat", "eval_tau_code"}


def test_it_stands_beside_the_loss_of_a_dataset_or_of_several(target, tmp_path):
    drafter, prompts = randomize(tiny_drafter(target)), prompts_of("math")
    data = Dataset.from_list(rows_of(target, count=2))
    one = make(drafter, target, tmp_path, prompts, eval_rows=data).evaluate()
    assert {"eval_loss", "eval_tau_fresh", "eval_tau", "eval_tau_math"} <= set(one)
    trainer = make(drafter, target, tmp_path, prompts, eval_rows={"a": data, "b": data})
    several = trainer.evaluate()
    assert several["eval_tau"] == one["eval_tau"] and {"eval_a_loss", "eval_b_loss"} <= set(several)
    assert "eval_a_tau" not in several and sum("eval_tau" in entry for entry in trainer.state.log_history) == 1
    assert "test_tau" not in trainer.predict(data).metrics


def test_loss_does_not_depend_on_the_size_of_a_batch(target, tmp_path):
    """Rows of unlike lengths, one without an answer: a mean over slots, not over batches."""
    drafter, rows = randomize(tiny_drafter(target)), rows_of(target, count=3)
    rows[1] = {**rows[1], "input_ids": rows[1]["input_ids"][:14], "loss_mask": rows[1]["loss_mask"][:14]}
    rows[2] = {**rows[2], "loss_mask": [0] * len(rows[2]["loss_mask"])}
    losses = []
    for size in (1, 3):
        # As many anchors as there are, so that the draw does not matter.
        trainer = make(drafter, target, tmp_path, None, per_device_eval_batch_size=size, num_anchors=64)
        losses.append(trainer.evaluate(Dataset.from_list(rows))["eval_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


class Watch(TrainerCallback):
    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs, **kwargs):
        self.logs.append(dict(logs))


@pytest.mark.parametrize("bf16", [False, True])
def test_a_run_with_evaluations_equals_one_without(target, tmp_path, bf16):
    """Dropout in the drafter makes the random numbers count; what is logged is plain numbers."""
    finals, watch = [], Watch()
    for prompts in (None, prompts_of("math")):
        drafter = tiny_drafter(target, attention_dropout=0.2)
        options = {"bf16": bf16, "logging_steps": 1, "beta_warmup_steps": 8}
        if prompts is not None:
            options |= {"eval_strategy": "steps", "eval_steps": 1}
        eval_rows = None if prompts is None else Dataset.from_list(rows_of(target, count=1))
        trainer = make(drafter, target, tmp_path, prompts, eval_rows=eval_rows, callbacks=[watch], **options)
        trainer.train()
        assert drafter.training and drafter.trajectory.beta == 3 / 8
        assert {p.dtype for p in drafter.parameters()} == {torch.float32}
        finals.append(drafter.state_dict())
    for name in finals[0]:
        assert torch.equal(finals[0][name], finals[1][name]), name
    assert sum("eval_tau" in logs for logs in watch.logs) == 4
    for logs in watch.logs:
        assert all(type(value) in (int, float) for value in logs.values()), logs


def test_mixed_precision_drafts_as_the_saved_drafter_does(target, tmp_path):
    """Under bf16=True the drafter's forward runs in autocast; a user's generate() does not."""
    drafter, seen = randomize(tiny_drafter(target)), []
    drafter.layers[0].mlp.register_forward_hook(lambda module, args, out: seen.append((module.training, out.dtype)))
    trainer = make(drafter, target, tmp_path, prompts_of("math"), max_steps=1, bf16=True)
    trainer.train()
    assert set(seen) == {(True, torch.bfloat16)}
    seen.clear()
    trainer.evaluate()
    assert set(seen) == {(False, torch.float32)}
    seen.clear()
    trainer.train()
    assert set(seen) == {(True, torch.bfloat16)}


def test_best_checkpoint_and_early_stop_by_tau(target, tmp_path, monkeypatch):
    """tau rises once and then falls: the run stops two evaluations later and ends with the best drafter's weights."""
    drafter, taus = tiny_drafter(target), iter([2.0, 3.0, 2.5, 2.5, 9.0])
    trainer = make(
        drafter,
        target,
        tmp_path,
        prompts_of("math"),
        callbacks=[EarlyStoppingCallback(2)],
        max_steps=10,
        eval_strategy="steps",
        save_strategy="steps",
        eval_steps=1,
        save_steps=1,
        save_total_limit=2,
        metric_for_best_model="eval_tau",
        load_best_model_at_end=True,
    )
    monkeypatch.setattr(trainer, "_draft_eval_prompts", lambda prefix: {f"{prefix}_tau": next(taus)})
    trainer.train()
    assert trainer.state.global_step == 4 and trainer.state.best_metric == 3.0
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")
    best = RetraceDrafter.from_pretrained(tmp_path / "checkpoint-2").state_dict()
    last = RetraceDrafter.from_pretrained(tmp_path / "checkpoint-4").state_dict()
    assert all(torch.equal(weight, best[name]) for name, weight in drafter.state_dict().items())
    assert not all(torch.equal(weight, last[name]) for name, weight in drafter.state_dict().items())


def test_prompts_of_each_form_and_what_is_none(tmp_path, target):
    tokenizer = letters_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}aa"
    rows = [
        {"prompt": "abac", "source": "x"},
        {"messages": [{"role": "user", "content": "abac"}]},
        {"prompt_ids": [1, 2, 0]},
    ]
    assert read_eval_rows(rows, tokenizer) == [EvalPrompt([1, 2, 0], k) for k in ("x", None, None)]
    for rows, message in (
        ([], "no rows"),
        ([{"text": "a"}], r"Row 0 of eval_prompts has the columns \['text'\]"),
        ([{"prompt_ids": [1]}, {"prompt_ids": []}], "Row 1 of eval_prompts is an empty prompt"),
        ([{"prompt": "a"}], "processing_class"),
        (["a"], "Row 0 of eval_prompts is a str"),
    ):
        with pytest.raises(ValueError, match=message):
            make(tiny_drafter(target), target, tmp_path, rows)
    with pytest.raises(ValueError, match="eval_max_new_tokens is 1"):
        arguments(tmp_path, eval_max_new_tokens=1)


def test_kinds_take_turns():
    prompts = [EvalPrompt([i], kind) for i, kind in enumerate("aaabbc")]
    assert [p.ids[0] for p in first_of_each_kind(prompts, 5)] == [0, 3, 5, 1, 4]
    assert len(first_of_each_kind(prompts, 64)) == 6
