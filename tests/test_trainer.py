"""RetraceTrainer on tiny models: what moves, what stays, what it counts, and that what it learns is what drafts."""

import math

import pytest
import torch
from datasets import Dataset
from torch.testing import assert_close
from transformers import TrainerCallback

from retrace_hf import RetraceDataCollator, RetraceDrafter, RetraceTrainer, RetraceTrainingArguments, record_acceptance
from retrace_hf.data.features import TargetFeatures
from retrace_hf.training import rollout
from retrace_hf.training import trainer as trainer_module
from retrace_hf.trajectory import align_trajectory

from .fixtures import BLOCK_SIZE, plain, prompt_of, randomize, tiny_drafter, tiny_target


PROMPT_LENGTH = 9


@pytest.fixture(scope="module")
def target():
    return tiny_target("qwen3")


def rows_of(target, count=4, new_tokens=40):
    rows = []
    for i in range(count):
        ids = plain(target, prompt_of(PROMPT_LENGTH, seed=i), max_new_tokens=new_tokens)[0].tolist()
        mask = [0] * PROMPT_LENGTH + [1] * (len(ids) - PROMPT_LENGTH)
        rows.append({"input_ids": ids, "loss_mask": mask, "row": i})
    return rows


def arguments(folder, **kwargs):
    defaults = {
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "num_anchors": 6,
        "weight_decay": 0.0,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "beta_warmup_steps": 2,
        "seed": 7,
    }
    return RetraceTrainingArguments(output_dir=str(folder), **{**defaults, **kwargs})


def make_trainer(drafter, target, folder, rows, collator=None, **kwargs):
    return RetraceTrainer(
        model=drafter,
        target=target,
        args=arguments(folder, **kwargs),
        train_dataset=Dataset.from_list(rows),
        data_collator=collator or RetraceDataCollator(),
    )


@pytest.mark.parametrize("conditioning", ["none", "overwrite", "gated", "corrected"])
@pytest.mark.parametrize("loss_type", ["decay", "dpace"])
def test_every_parameter_moves_and_the_targets_do_not(target, tmp_path, conditioning, loss_type):
    drafter = tiny_drafter(target, conditioning=conditioning)
    before = {name: p.detach().clone() for name, p in drafter.named_parameters()}
    frozen = {name: p.detach().clone() for name, p in target.named_parameters()}
    make_trainer(drafter, target, tmp_path, rows_of(target), max_steps=6, loss_type=loss_type).train()
    still = [name for name, p in drafter.named_parameters() if torch.equal(p, before[name])]
    assert still == []
    for name, p in target.named_parameters():
        assert p.grad is None and torch.equal(p, frozen[name]), name


def test_loss_against_a_loop(target, tmp_path):
    """Fresh round, decay: every slot of every anchor by hand."""
    drafter, rows = randomize(tiny_drafter(target)), rows_of(target, count=2)
    trainer = make_trainer(drafter, target, tmp_path, rows, num_carried_rounds=0)
    batch = RetraceDataCollator()(rows)
    loss = trainer.compute_loss(drafter, dict(batch)).item()
    blocks = trainer._draw_anchors(batch["loss_mask"], first=0)
    clean = rollout.read_clean_text(target, batch["input_ids"], drafter.config.target_layer_ids)
    total, weight = 0.0, 0.0
    with torch.no_grad():
        for b in range(2):
            ids, mask = batch["input_ids"][b : b + 1], batch["loss_mask"][b]
            for anchor in blocks.anchors[b].tolist():
                one = rollout.Blocks(torch.tensor([[anchor]]), torch.tensor([[True]]))
                features = clean.features[b : b + 1]
                states = rollout.draft_blocks(drafter, target.get_input_embeddings(), ids, features, one)
                for slot in range(1, BLOCK_SIZE):
                    if anchor + slot >= ids.shape[1] or not mask[anchor + slot]:
                        break
                    logp = target.lm_head(states[0, 0, slot]).log_softmax(-1)
                    w = float(torch.exp(torch.tensor(-(slot - 1) / 4.0)))
                    total -= w * float(logp[ids[0, anchor + slot]])
                    weight += w
    assert_close(loss, total / weight, rtol=1e-4, atol=1e-5)


def test_carried_rounds_against_a_loop(target, tmp_path):
    """A fresh round and two carried ones, block by block: each drafted with what its own last round left, each counted
    alike, all divided by the fresh round's blocks."""
    drafter, rows = randomize(tiny_drafter(target)), rows_of(target, count=2)
    trainer = make_trainer(drafter, target, tmp_path, rows, num_carried_rounds=2, loss_type="dpace")
    batch = RetraceDataCollator()(rows)
    loss = trainer.compute_loss(drafter, dict(batch)).item()
    drawn = trainer._draw_anchors(batch["loss_mask"], first=0)
    taps, embedding, total, kept = drafter.config.target_layer_ids, target.get_input_embeddings(), 0.0, 0
    with torch.no_grad():
        for b in range(2):
            ids, mask = batch["input_ids"][b : b + 1], batch["loss_mask"][b]
            features = rollout.read_clean_text(target, ids, taps).features
            for anchor in drawn.anchors[b].tolist():
                signal = None
                for _ in range(3):
                    one = rollout.Blocks(torch.tensor([[anchor]]), torch.tensor([[True]]))
                    states = rollout.draft_blocks(drafter, embedding, ids, features, one, signal)
                    logp = target.lm_head(states[0, 0]).log_softmax(-1)
                    count = min(BLOCK_SIZE - 1, int(mask[anchor + 1 :].sum()))
                    right = ids[0, anchor + 1 : anchor + 1 + count]
                    ce = -logp[1 : 1 + count].gather(1, right[:, None])[:, 0]
                    confidence = 0.5 * torch.exp(-ce) + 0.5
                    for k in range(count):
                        total += float(ce[k]) * float(confidence.cumprod(0)[k:].sum())
                    drafted = logp[1:].argmax(-1)
                    wrong = (drafted[:count] != right).nonzero()
                    accepted = int(wrong[0]) if len(wrong) else count
                    prefix = torch.cat([ids[:, : anchor + 1], drafted[None]], dim=1)
                    verified = target.get_decoder()(prefix, use_cache=False).last_hidden_state[:, anchor:]
                    signal = align_trajectory(states[0], verified, accepted + 1, BLOCK_SIZE - 1)
                    kept += 1
                    anchor += accepted + 1
                    if anchor + 1 >= ids.shape[1]:
                        break
    assert kept > 2 * int(drawn.valid.sum())
    assert_close(loss, total / (3 * int(drawn.valid.sum())), rtol=1e-4, atol=1e-5)


def test_seeds_and_steps_draw_other_anchors(target, tmp_path):
    rows, drafter = rows_of(target, count=2), tiny_drafter(target)
    mask = RetraceDataCollator()(rows)["loss_mask"]
    trainers = [make_trainer(drafter, target, tmp_path, rows, seed=seed) for seed in (1, 1, 2)]
    first, same, other = (t._draw_anchors(mask, first=0).anchors for t in trainers)
    assert torch.equal(first, same) and not torch.equal(first, other)
    assert not torch.equal(first, trainers[0]._draw_anchors(mask, first=2).anchors)


def test_loss_on_seen_tokens(target, tmp_path):
    """With every token seen it is the whole loss; in general the softmax over those seen."""
    drafter, rows = randomize(tiny_drafter(target)), rows_of(target, count=2)
    options = {"num_carried_rounds": 0, "loss_on_seen_tokens": True}
    trainer = make_trainer(drafter, target, tmp_path, rows, **options)
    batch = RetraceDataCollator()(rows)
    seen = sorted({t for r in rows for t, m in zip(r["input_ids"], r["loss_mask"]) if m})
    assert trainer._loss_vocabulary.token_ids.tolist() == seen
    states = torch.randn(3, drafter.config.hidden_size)
    assert torch.equal(trainer._logits(states), target.lm_head(states)[:, seen])
    whole = make_trainer(drafter, target, tmp_path, rows, num_carried_rounds=0)
    assert trainer.compute_loss(drafter, dict(batch)).item() < whole.compute_loss(drafter, dict(batch)).item()
    everything = [{**rows[0], "input_ids": list(range(200)), "loss_mask": [1] * 200}]
    trainer._loss_vocabulary = make_trainer(drafter, target, tmp_path, everything, **options)._loss_vocabulary
    assert_close(trainer.compute_loss(drafter, dict(batch)), whole.compute_loss(drafter, dict(batch)))
    with pytest.raises(ValueError, match="num_carried_rounds=0"):
        arguments(tmp_path, loss_on_seen_tokens=True)


def test_soft_targets_against_a_loop(target, tmp_path):
    """One round, D-PACE weights and KL to the target's own law at each slot, by hand; online and from features."""
    drafter, rows = randomize(tiny_drafter(target)), rows_of(target, count=2)
    options = {"num_carried_rounds": 0, "loss_type": "dpace", "soft_share": 0.3, "soft_tokens": 500}
    trainer = make_trainer(drafter, target, tmp_path, rows, **options)
    batch = RetraceDataCollator()(rows)
    loss = trainer.compute_loss(drafter, dict(batch)).item()
    blocks = trainer._draw_anchors(batch["loss_mask"], first=0)
    clean = rollout.read_clean_text(target, batch["input_ids"], drafter.config.target_layer_ids)
    states = rollout.draft_blocks(drafter, target.get_input_embeddings(), batch["input_ids"], clean.features, blocks)
    total = 0.0
    with torch.no_grad():
        law = target(batch["input_ids"]).logits.log_softmax(-1)
        drafted = target.lm_head(states).log_softmax(-1)
        for b in range(2):
            for n, anchor in enumerate(blocks.anchors[b].tolist()):
                count = min(BLOCK_SIZE - 1, batch["input_ids"].shape[1] - 1 - anchor)
                ce = [-float(drafted[b, n, k, batch["input_ids"][b, anchor + k]]) for k in range(1, count + 1)]
                for k in range(1, count + 1):
                    p, q = law[b, anchor + k - 1], drafted[b, n, k]
                    divergence = float((p.exp() * (p - q)).sum())
                    confidence = [0.5 * math.exp(-c) + 0.5 for c in ce]
                    weight = sum(math.prod(confidence[:j]) for j in range(k, count + 1))
                    total += weight * (0.7 * ce[k - 1] + 0.3 * divergence)
    assert_close(loss, total / int(blocks.valid.sum()), rtol=1e-4, atol=1e-5)

    kept = torch.cat([clean.features, clean.last], dim=-1).numpy()
    features = FeatureRows([kept[i, : len(row["input_ids"])] for i, row in enumerate(rows)], last_size=32)
    batch = RetraceDataCollator(features=features)(rows)
    assert_close(trainer.compute_loss(drafter, batch).item(), loss, rtol=1e-5, atol=1e-6)


class FeatureRows(list):
    """Features in memory, the last `last_size` columns the target's last hidden state."""

    def __init__(self, rows, last_size):
        super().__init__(rows)
        self.last_size = last_size


@pytest.mark.parametrize("device_dtype", [torch.float32, torch.bfloat16])
def test_mixed_precision_leaves_the_target_as_generate_runs_it(tmp_path, monkeypatch, device_dtype):
    """Under bf16=True every pass of the target gives what it gives outside of training, bit for bit."""
    target = tiny_target("qwen3").to(device_dtype)
    drafter, rows, seen = randomize(tiny_drafter(target)), rows_of(tiny_target("qwen3"), count=2), []
    for name in ("read_clean_text", "verify_blocks"):
        real = getattr(trainer_module, name)

        def spy(*args, real=real):
            out = real(*args)
            with torch.autocast("cpu", enabled=False):
                again = real(*args)
            first, second = (o if isinstance(o, torch.Tensor) else o.features for o in (out, again))
            seen.append((first.dtype, torch.equal(first, second)))
            return out

        monkeypatch.setattr(trainer_module, name, spy)
    trainer = make_trainer(drafter, target, tmp_path, rows, bf16=True, num_carried_rounds=2, max_steps=2)
    assert torch.isfinite(torch.tensor(trainer.train().training_loss))
    assert len(seen) == 2 * 3 and set(seen) == {(device_dtype, True)}
    assert all(p.dtype == torch.float32 for p in drafter.parameters())


def test_muon_moves_matrices_and_resumes(target, tmp_path):
    rows = rows_of(target)
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "muon": True, "weight_decay": 0.1}
    options |= {"trajectory_learning_rate": 1e-3}
    whole, resumed = tiny_drafter(target), tiny_drafter(target)
    before = {name: p.detach().clone() for name, p in whole.named_parameters()}
    trainer = make_trainer(whole, target, tmp_path / "a", rows, **options)
    trainer.train()
    assert [name for name, p in whole.named_parameters() if torch.equal(p, before[name])] == []
    groups = trainer.optimizer.param_groups
    assert {p.ndim for g in groups if g["muon"] for p in g["params"]} == {2}
    assert {(p.ndim, g["weight_decay"]) for g in groups if not g["muon"] for p in g["params"]} == {(1, 0.0)}
    make_trainer(resumed, target, tmp_path / "b", rows, **options).train(
        resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3")
    )
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, resumed.state_dict()[name]), name


@pytest.mark.parametrize("trained", ["norm", "proj"])
def test_muon_where_only_norms_or_only_matrices_train(target, tmp_path, trained):
    drafter = tiny_drafter(target)
    for name, parameter in drafter.named_parameters():
        parameter.requires_grad_(trained in name and "trajectory" not in name)
    before = {name: p.detach().clone() for name, p in drafter.named_parameters()}
    make_trainer(drafter, target, tmp_path, rows_of(target), max_steps=2, muon=True, num_carried_rounds=0).train()
    moved = {name for name, p in drafter.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name, p in drafter.named_parameters() if p.requires_grad}


def test_tau_of_training_and_of_evaluation_are_logged_apart(target, tmp_path):
    """Evaluated on a text it has learnt by heart, while it trains on another."""
    drafter, rows = tiny_drafter(target, conditioning="none"), rows_of(target, count=2)
    options = {"num_carried_rounds": 0, "per_device_train_batch_size": 1, "num_anchors": 32, "learning_rate": 5e-3}
    make_trainer(drafter, target, tmp_path, rows[:1], max_steps=60, **options).train()
    trainer = make_trainer(drafter, target, tmp_path, rows[1:], max_steps=2, logging_steps=1, **options)
    trainer.train()
    known = trainer.evaluate(Dataset.from_list(rows[:1]))
    history = trainer.state.log_history
    trained = [entry["tau_fresh"] for entry in history if "tau_fresh" in entry]
    evaluated = [entry["eval_tau_fresh"] for entry in history if "eval_tau_fresh" in entry]
    assert len(trained) == 2 and len(evaluated) == 1 and evaluated[0] > 2 * max(trained)
    assert known["eval_tau_fresh"] == evaluated[0]
    # Two evaluation sets, and another prefix: each by its own name, none with the other's blocks.
    both = trainer.evaluate({"a": Dataset.from_list(rows[:1]), "b": Dataset.from_list(rows[1:])})
    assert both["eval_a_tau_fresh"] == evaluated[0] > 2 * both["eval_b_tau_fresh"]
    tested = trainer.predict(Dataset.from_list(rows[:1]), metric_key_prefix="test").metrics
    assert tested["test_tau_fresh"] == evaluated[0]


def test_blocks_seen_are_counted_also_by_a_run_that_goes_on(target, tmp_path):
    drafter, rows = tiny_drafter(target, conditioning="none"), rows_of(target, count=3)
    options = {"num_carried_rounds": 1, "per_device_train_batch_size": 2, "num_anchors": 5, "logging_steps": 1}
    options |= {"save_strategy": "steps", "save_steps": 2}
    make_trainer(drafter, target, tmp_path, rows, max_steps=2, **options).train()
    trainer = make_trainer(drafter, target, tmp_path, rows, max_steps=4, **options)
    trainer.train(resume_from_checkpoint=True)
    seen = [entry["num_blocks_seen"] for entry in trainer.state.log_history if "num_blocks_seen" in entry]
    assert seen == [10, 15, 25, 30]  # of the fresh round, in batches of two rows and of one


def test_accumulation_changes_nothing(target, tmp_path):
    """Two batches of two or one of four: the same anchors, the same update."""
    rows, states = rows_of(target), []
    for size, accumulate in ((4, 1), (2, 2)):
        drafter = randomize(tiny_drafter(target))
        make_trainer(
            drafter,
            target,
            tmp_path,
            rows,
            max_steps=2,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulate,
        ).train()
        states.append(drafter.state_dict())
    for name in states[0]:
        assert_close(states[0][name], states[1][name], rtol=1e-4, atol=2e-5)


def test_anchors_do_not_depend_on_the_number_of_processes(target, tmp_path, monkeypatch):
    """Two batches of four in one process, or four of two that two processes take in turn: each row has its own."""
    rows, collate, device = rows_of(target, count=8, new_tokens=20), RetraceDataCollator(), torch.device("cpu")

    def anchors(size, parts):
        options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 2, "num_anchors": 4}
        trainer = make_trainer(tiny_drafter(target), target, tmp_path, rows, **options)
        trainer.state.global_step = 3
        batches, _ = trainer.get_batch_samples(iter([collate(rows[part]) for part in parts]), 2, device)
        return [batch["anchors"] for batch in batches]

    whole = torch.cat(anchors(4, (slice(0, 4), slice(4, 8))))
    monkeypatch.setattr(RetraceTrainingArguments, "world_size", 2)
    for rank in (0, 1):
        monkeypatch.setattr(RetraceTrainingArguments, "process_index", rank)
        parts = [slice(start + 2 * rank, start + 2 * rank + 2) for start in (0, 4)]
        for part, found in zip(parts, anchors(2, parts)):
            assert torch.equal(found, whole[part])


def test_cached_features_equal_online_ones(target, tmp_path):
    rows, taps = rows_of(target), tiny_drafter(target).config.target_layer_ids
    features = [
        rollout.read_clean_text(target, torch.tensor([r["input_ids"]]), taps).features[0].numpy() for r in rows
    ]
    states = []
    for collator in (RetraceDataCollator(), RetraceDataCollator(features=features)):
        drafter = tiny_drafter(target, conditioning="none")
        make_trainer(drafter, target, tmp_path, rows, collator=collator).train()
        states.append(drafter.state_dict())
    for name in states[0]:
        assert_close(states[0][name], states[1][name], rtol=1e-4, atol=1e-5)


def test_the_control_needs_no_target_pass(target, tmp_path, monkeypatch):
    """conditioning none with carried rounds on cached features: the SFT control runs without the target."""
    for name in ("read_clean_text", "verify_blocks"):
        monkeypatch.setattr(trainer_module, name, lambda *args, **kwargs: pytest.fail("the target ran"))
    rows = rows_of(target)
    features = [torch.randn(len(r["input_ids"]), 2 * 32).numpy() for r in rows]
    drafter = tiny_drafter(target, conditioning="none")
    trainer = make_trainer(
        drafter, target, tmp_path, rows, collator=RetraceDataCollator(features=features), num_carried_rounds=2
    )
    trainer.train()


def without_answer(row):
    return {**row, "loss_mask": [0] * len(row["input_ids"])}


def test_a_batch_without_anchors_is_finite(target, tmp_path):
    """One row a batch, in order, the second and third without an answer: two steps that move nothing."""
    rows = rows_of(target)
    rows[1:3] = map(without_answer, rows[1:3])
    drafter, seen = tiny_drafter(target), []

    class Watch(TrainerCallback):
        def on_log(self, args, state, control, logs, **kwargs):
            seen.append((logs, drafter.fc.weight.detach().clone()))

    options = {"per_device_train_batch_size": 1, "train_sampling_strategy": "sequential", "logging_steps": 1}
    trainer = make_trainer(drafter, target, tmp_path, rows, num_carried_rounds=2, **options)
    trainer.add_callback(Watch())
    trainer.train()
    losses, weights = [logs.get("loss") for logs, _ in seen[:4]], [weight for _, weight in seen[:4]]
    assert losses[0] > 0 and losses[1] == losses[2] == 0 and losses[3] > 0
    # AdamW's momentum alone moves weights where there is no gradient.
    assert all(torch.isfinite(weight).all() for weight in weights)
    assert "tau_fresh" in seen[0][0] and "tau_fresh" not in seen[1][0]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (lambda rows: [], "train_dataset is empty"),
        (lambda rows: [without_answer(row) for row in rows], "No row of train_dataset has two answer tokens"),
        (
            lambda rows: [{"input_ids": row["input_ids"]} for row in rows],
            r"no column 'loss_mask' in train_dataset, only \['input_ids'\]; .* prepare",
        ),
        (lambda rows: [{"text": "a"}], "no column 'input_ids'"),
    ],
)
def test_a_dataset_that_teaches_nothing_is_refused(target, tmp_path, rows, message):
    good = rows_of(target, count=2)
    with pytest.raises(ValueError, match=message):
        make_trainer(tiny_drafter(target), target, tmp_path, rows(good))
    trainer = make_trainer(tiny_drafter(target), target, tmp_path, good)
    for bad in (rows(good), {"a": rows(good)}):
        with pytest.raises(ValueError, match=message.replace("train_dataset", r"eval_dataset(\['a'\])?")):
            RetraceTrainer(tiny_drafter(target), target, trainer.args, train_dataset=good, eval_dataset=bad)
    with pytest.raises(ValueError, match="column 'loss_mask'|no column|gave no batch"):
        trainer.evaluate(rows(good))


def test_a_stream_without_masks_is_refused_at_its_first_batch(target, tmp_path):
    stream = Dataset.from_list([{"input_ids": [1, 2, 3]}] * 2).to_iterable_dataset()
    trainer = RetraceTrainer(tiny_drafter(target), target, arguments(tmp_path), train_dataset=stream)
    with pytest.raises(ValueError, match="no column 'loss_mask' in row 0 of a batch"):
        trainer.train()


@pytest.mark.parametrize(
    "options",
    [
        {"remove_unused_columns": True},
        {"dataloader_num_workers": 1},
        {"train_sampling_strategy": "group_by_length"},
        {"label_names": ["labels"]},
        {"dataloader_drop_last": True, "per_device_eval_batch_size": 2, "eval_on_start": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_of_trainer_change_nothing_but_what_they_say(target, tmp_path, options):
    """Rows of several lengths, some shorter than a block, with columns that nobody reads."""
    rows = [{**row, "source": "x"} for row in rows_of(target, count=5)]
    for row, length in zip(rows, (11, 13, 30)):
        row |= {"input_ids": row["input_ids"][:length], "loss_mask": row["loss_mask"][:length]}
    drafter, data = tiny_drafter(target), Dataset.from_list(rows)
    args = arguments(tmp_path, **options)
    trainer = RetraceTrainer(drafter, target, args, train_dataset=data, eval_dataset=data)
    before = drafter.fc.weight.detach().clone()
    trainer.train()
    assert trainer.state.global_step == 4 and not torch.equal(drafter.fc.weight, before)
    evaluated = trainer.evaluate()
    tested = trainer.predict(data)
    assert tested.predictions is None and evaluated["eval_loss"] > 0
    assert {"test_loss", "test_tau_fresh"} <= set(tested.metrics)


def test_a_stream_of_rows_trains_as_the_rows_do(target, tmp_path):
    rows, states = rows_of(target), []
    for data in (Dataset.from_list(rows), Dataset.from_list(rows).to_iterable_dataset()):
        drafter = tiny_drafter(target)
        args = arguments(tmp_path, train_sampling_strategy="sequential", include_num_input_tokens_seen="non_padding")
        trainer = RetraceTrainer(drafter, target, args, train_dataset=data)
        trainer.train()
        states.append(drafter.state_dict())
        assert trainer.state.num_input_tokens_seen == 2 * sum(len(row["input_ids"]) for row in rows)
    for name in states[0]:
        assert torch.equal(states[0][name], states[1][name]), name


def test_model_init_makes_the_drafter(target, tmp_path):
    args, rows = arguments(tmp_path), Dataset.from_list(rows_of(target))
    trainer = RetraceTrainer(
        target=target, args=args, train_dataset=rows, model_init=lambda: tiny_drafter(target).bfloat16()
    )
    trainer.train()
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("option", ["compute_metrics", "compute_loss_func", "preprocess_logits_for_metrics"])
def test_options_without_effect_are_refused(target, tmp_path, option):
    with pytest.raises(ValueError, match=f"{option} has no effect"):
        RetraceTrainer(tiny_drafter(target), target, arguments(tmp_path), **{option: lambda *args: {}})
    with pytest.raises(ValueError, match="label_smoothing_factor is 0.1"):
        arguments(tmp_path, label_smoothing_factor=0.1)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("trained", ["", "mlp"])
def test_checkpointed_activations_give_the_same_gradients(target, tmp_path, use_reentrant, trained):
    """All weights, or a part behind inputs that need no gradient."""
    rows, gradients, calls = rows_of(target, count=2), [], []
    for checkpointing in (False, True):
        drafter = randomize(tiny_drafter(target))
        for name, parameter in drafter.named_parameters():
            parameter.requires_grad_(trained in name)
        drafter.layers[0].mlp.register_forward_pre_hook(lambda *args, now=checkpointing: calls.append(now))
        if checkpointing:
            drafter.activation_checkpointing_enable({"use_reentrant": use_reentrant})
        trainer = make_trainer(drafter.train(), target, tmp_path, rows)
        trainer.compute_loss(drafter, RetraceDataCollator()(rows)).backward()
        gradients.append({name: p.grad for name, p in drafter.named_parameters() if p.requires_grad})
    assert calls.count(True) == 2 * calls.count(False)  # it did recompute
    for name, gradient in gradients[0].items():
        assert gradients[1][name] is not None, name
        assert_close(gradients[1][name], gradient, rtol=1e-5, atol=1e-7)
    assert all(p.grad is None for p in target.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_drafter_in_half_precision_is_trained_in_float32(target, tmp_path, dtype, caplog):
    drafter = tiny_drafter(target).to(dtype)
    before = {name: p.detach().float() for name, p in drafter.named_parameters()}
    trainer = make_trainer(drafter, target, tmp_path, rows_of(target), bf16=True, num_carried_rounds=0)
    trainer.train()
    for name, p in drafter.named_parameters():
        assert p.dtype == torch.float32, name
        if "norm" in name:
            # Each entry moves, also by less than half precision can tell from 1.
            assert (p != before[name]).float().mean() > 0.95, name


def test_attention_that_cannot_train_is_refused(target, tmp_path):
    for implementation, message in (("flash_attention_2", "no mask"), ("flex_attention", "no gradients on a CPU")):
        drafter = tiny_drafter(target)
        drafter.config._attn_implementation = implementation
        with pytest.raises(ValueError, match=message):
            make_trainer(drafter, target, tmp_path, rows_of(target, count=1))


def test_features_of_other_layers_are_refused(target, tmp_path):
    rows = rows_of(target, count=2)
    features = [torch.randn(len(row["input_ids"]), 3 * 32).numpy() for row in rows]
    trainer = make_trainer(
        tiny_drafter(target, conditioning="none"), target, tmp_path, rows, RetraceDataCollator(features=features)
    )
    with pytest.raises(ValueError, match="have 96 values a token and the drafter reads 64"):
        trainer.train()


def test_features_from_the_disk_equal_online_ones(target, tmp_path):
    """Gradients, to what float16 holds of a float32 target; rows in any order, unlike lengths."""
    rows = rows_of(target, count=3)
    rows[1] = {**rows[1], "input_ids": rows[1]["input_ids"][:20], "loss_mask": rows[1]["loss_mask"][:20]}
    drafter = randomize(tiny_drafter(target, conditioning="none"))
    features = TargetFeatures.build_or_open(
        target, Dataset.from_list(rows), drafter.config.target_layer_ids, tmp_path, progress=False
    )
    gradients = []
    for collator in (RetraceDataCollator(), RetraceDataCollator(features=features)):
        trainer = make_trainer(drafter, target, tmp_path, rows, collator)
        drafter.zero_grad()
        trainer.compute_loss(drafter, collator([rows[i] for i in (2, 0, 1)])).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in drafter.parameters()]))
    assert (gradients[1] - gradients[0]).norm() < 2e-3 * gradients[0].norm()


@pytest.mark.parametrize("carried", [0, 1, 2, 3])
@pytest.mark.parametrize(("loss_type", "soft_share"), [("decay", 0.0), ("decay", 0.4), ("dpace", 0.0), ("dpace", 0.4)])
def test_gradients_against_a_loop(target, tmp_path, loss_type, soft_share, carried):
    """Every weight's gradient, block by block and round by round with autograd's own; nothing flows between rounds."""
    drafter, rows = randomize(tiny_drafter(target)), rows_of(target, count=2)
    options = {"loss_type": loss_type, "soft_share": soft_share, "num_carried_rounds": carried, "num_anchors": 3}
    options["soft_tokens"] = 500  # all
    trainer = make_trainer(drafter, target, tmp_path, rows, **options, loss_chunk_size=5)
    batch = RetraceDataCollator()(rows)
    loss = trainer.compute_loss(drafter, dict(batch))
    loss.backward()
    found = {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}
    drafter.zero_grad()

    drawn = trainer._draw_anchors(batch["loss_mask"], first=0)
    embedding, total, weight_of_fresh = target.get_input_embeddings(), 0.0, 0.0
    for b in range(2):
        ids = batch["input_ids"][b : b + 1]
        features = rollout.read_clean_text(target, ids, drafter.config.target_layer_ids).features
        with torch.no_grad():
            law = target(ids).logits[0].log_softmax(-1)
        for anchor in drawn.anchors[b].tolist():
            signal = None
            for number in range(carried + 1):
                one = rollout.Blocks(torch.tensor([[anchor]]), torch.tensor([[True]]))
                states = rollout.draft_blocks(drafter, embedding, ids, features, one, signal)
                count = min(BLOCK_SIZE - 1, ids.shape[1] - 1 - anchor)
                logp = target.lm_head(states[0, 0]).log_softmax(-1)
                right = ids[0, anchor + 1 : anchor + 1 + count]
                ce = -logp[1 : 1 + count].gather(1, right[:, None])[:, 0]
                p = law[anchor : anchor + count]
                kl = (p.exp() * (p - logp[1 : 1 + count])).sum(-1)
                if loss_type == "decay":
                    weights = torch.exp(-torch.arange(count) / 4.0)
                else:
                    reach = (0.5 * torch.exp(-ce.detach()) + 0.5).cumprod(0)
                    weights = torch.stack([reach[k:].sum() for k in range(count)])
                total = total + (weights * ((1 - soft_share) * ce + soft_share * kl)).sum()
                if number == 0:
                    weight_of_fresh += float(weights.sum()) if loss_type == "decay" else 1.0
                drafted = logp[1:].argmax(-1)
                wrong = (drafted[:count] != right).nonzero()
                accepted = int(wrong[0]) if len(wrong) else count
                prefix = torch.cat([ids[:, : anchor + 1], drafted[None]], dim=1)
                with torch.no_grad():
                    verified = target.get_decoder()(prefix, use_cache=False).last_hidden_state[:, anchor:]
                signal = align_trajectory(states[0].detach(), verified, accepted + 1, BLOCK_SIZE - 1)
                anchor += accepted + 1
                if anchor + 1 >= ids.shape[1]:
                    break
    expected = total / ((carried + 1) * weight_of_fresh)
    expected.backward()
    assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    named = {name: p.grad for name, p in drafter.named_parameters() if p.grad is not None}
    assert set(named) <= set(found) and ("trajectory.value.weight" in named) == (carried > 0)
    for name, gradient in named.items():
        assert (found[name] - gradient).norm() <= 2e-4 * gradient.norm() + 1e-6, name


def test_beta_rises_and_is_not_saved(target, tmp_path):
    drafter, seen = tiny_drafter(target), []

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen.append(drafter.trajectory.beta)

    trainer = make_trainer(drafter, target, tmp_path, rows_of(target), max_steps=4, beta_warmup_steps=2)
    trainer.add_callback(Watch())
    trainer.train()
    trainer.save_model()
    assert seen == [0.0, 0.5, 1.0, 1.0]
    assert RetraceDrafter.from_pretrained(tmp_path).trajectory.beta == 1.0


def test_beta_rises_in_a_trajectory_that_peft_trains_whole(target, tmp_path):
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(target_modules=["q_proj"], modules_to_save=["trajectory"])
    wrapped = randomize(get_peft_model(tiny_drafter(target), lora))
    before = {name: p.detach().clone() for name, p in wrapped.named_parameters()}
    make_trainer(wrapped, target, tmp_path, rows_of(target), max_steps=4, beta_warmup_steps=4).train()
    assert wrapped.trajectory.modules_to_save["default"].beta == 0.75
    moved = {name for name, p in wrapped.named_parameters() if not torch.equal(p, before[name])}
    assert moved and moved == {name for name, p in wrapped.named_parameters() if p.requires_grad}


def test_trajectory_may_have_its_own_learning_rate(target, tmp_path):
    drafter = tiny_drafter(target)
    trainer = make_trainer(drafter, target, tmp_path, rows_of(target), trajectory_learning_rate=0.01)
    optimizer = trainer.create_optimizer()
    rates = {id(p): g["lr"] for g in optimizer.param_groups for p in g["params"]}
    assert len(rates) == len(list(drafter.parameters()))
    for name, p in drafter.named_parameters():
        assert rates[id(p)] == (0.01 if name.startswith("trajectory.") else 6e-4), name


@pytest.mark.parametrize(
    "field, value", [("loss_type", "mse"), ("num_anchors", 0), ("num_carried_rounds", -1), ("soft_share", 1.5)]
)
def test_arguments_that_cannot_be(tmp_path, field, value):
    with pytest.raises(ValueError, match=field):
        arguments(tmp_path, **{field: value})


def test_drafter_and_target_must_fit(tmp_path):
    drafter = tiny_drafter(tiny_target("qwen3"))
    other = tiny_target("qwen3", hidden_size=64)
    with pytest.raises(ValueError, match="hidden"):
        make_trainer(drafter, other, tmp_path, rows_of(other, count=1))


# -- overfit one sequence and generate it ----------------------------------------------------------------------------


def overfit(target, folder, steps=110):
    drafter = tiny_drafter(target, conditioning="none", initializer_range=0.1)
    make_trainer(
        drafter,
        target,
        folder,
        rows_of(target, count=1),
        max_steps=steps,
        per_device_train_batch_size=1,
        num_anchors=64,
        num_carried_rounds=0,
        learning_rate=5e-3,
    ).train()
    drafter.eval()
    with record_acceptance() as stats:
        target.generate(prompt_of(PROMPT_LENGTH, seed=0), assistant_model=drafter, max_new_tokens=33, do_sample=False)
    return stats.acceptance_length


def test_overfitting_one_sequence_drafts_it(target, tmp_path):
    assert overfit(target, tmp_path) > 0.9 * BLOCK_SIZE


def shifted_labels(real):
    def block_labels(ids, mask, blocks, size):
        return real(ids.roll(-1, 1), mask, blocks, size)

    return block_labels


FAULTS = {
    "label shift": (trainer_module, "block_labels", shifted_labels),
    "tap index": (
        rollout,
        "gather_context_rows",
        lambda real: lambda h, ids, *args: real(h, [i - 1 for i in ids], *args),
    ),
    "position offset": (rollout, "block_positions", lambda real: lambda a, size: real(a + 3, size)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_costs_acceptance(target, tmp_path, monkeypatch, fault):
    """98 % in training and little in decoding: the same overfit with one side of one seam broken."""
    module, name, broken = FAULTS[fault]
    monkeypatch.setattr(module, name, broken(getattr(module, name)))
    if fault == "tap index":
        monkeypatch.setattr(rollout, "captured_layers", lambda ids, layers, with_last: True)
    assert overfit(target, tmp_path) < 0.6 * BLOCK_SIZE


def test_tokens_beyond_the_targets_vocabulary_are_refused(target, tmp_path):
    rows = [{"input_ids": [1] * 20 + [target.config.vocab_size], "loss_mask": [1] * 21}]
    trainer = make_trainer(tiny_drafter(target), target, tmp_path, rows)
    with pytest.raises(ValueError, match="tokenise the rows with the target's own tokenizer"):
        trainer.train()
