"""Targets with recurrent or convolution layers, around generate(): training, features, text, replay, commands."""

import json
import sys

import numpy as np
import pytest
import torch
from datasets import Dataset
from typer.testing import CliRunner

from retrace_hf import RetraceDataCollator, RetraceDrafter, RetraceTrainer, cli, record_acceptance
from retrace_hf import demo as demo_module
from retrace_hf.data.features import TargetFeatures
from retrace_hf.data.responses import TargetAnswers, read_responses
from retrace_hf.data.self_chat import self_chat
from retrace_hf.evaluation import roll_out
from retrace_hf.export import convert
from retrace_hf.training import recurrent_verification, rollout
from retrace_hf.training import trainer as trainer_module
from retrace_hf.training.rollout import Blocks

from .fixtures import (
    BLOCK_SIZE,
    is_the_pass_over,
    letters_chat_target,
    plain,
    prompt_of,
    randomize,
    save_letters_target,
    tiny_drafter,
    tiny_target,
)
from .target_table import FAMILIES, HYBRID, KEEPS_STATES, RECURRENT
from .test_conversion import write, zlab_config
from .test_convert import ZLAB_KEYS, assert_same_bits, read
from .test_rollout import check_training_equals_decoding
from .test_trainer import arguments, make_trainer, rows_of


pytestmark = pytest.mark.skipif(not KEEPS_STATES, reason="transformers 5.24 keeps no recurrent states back")
NAMES = [name for name, row in FAMILIES.items() if row.kind in (HYBRID, RECURRENT)]
# A delta net, Mamba 2 beside attention in turn and in one layer, a convolution, Mamba 1, no attention at all.
FEW = ["qwen3_5_text", "bamba", "falcon_h1", "lfm2", "jamba", "mamba2"]


def relative(found, expected):
    return float((found - expected).norm() / expected.norm())


def padded(*lengths):
    """Texts of these lengths as rows, padded on the right, `[b, S]`."""
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    for row, length in zip(ids, lengths):
        row[:length] = prompt_of(length, seed=length)[0]
    return ids


# -- verification ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_blocks_equal_a_pass_over_each_prefix(name):
    """Rows of other lengths; anchors before a convolution is full, side by side, at both sides of where states are
    kept, at a row's last token; columns that are padding."""
    target, segment = tiny_target(name), recurrent_verification.SEGMENT
    ids = padded(2 * segment + 6, segment + 2)
    anchors = torch.tensor([[0, 1, 2, segment - 1, segment, 2 * segment + 5], [3, 17, 18, segment + 1, 0, 0]])
    valid = torch.ones_like(anchors, dtype=torch.bool)
    valid[1, 4:] = False
    drafted = torch.randint(0, 190, (*anchors.shape, BLOCK_SIZE - 1), generator=torch.Generator().manual_seed(0))
    clean = rollout.read_clean_text(target, ids, [1, 3], room=anchors.shape[1] * BLOCK_SIZE)
    states = rollout.verify_blocks(target, clean.cache, ids, drafted, Blocks(anchors, valid))
    for row, column in valid.nonzero().tolist():
        anchor = int(anchors[row, column])
        whole = torch.cat([ids[row : row + 1, : anchor + 1], drafted[row, column][None]], dim=1)
        assert is_the_pass_over(target, whole, states[row, column]), (row, anchor)
    # What the drafter reads and the soft targets are of the same pass, and those of each text alone.
    for row, length in enumerate((2 * segment + 6, segment + 2)):
        text = ids[row : row + 1, :length]
        assert is_the_pass_over(target, text, clean.last[row, :length])
        alone = rollout.read_clean_text(target, text, [1, 3])
        assert relative(clean.features[row, :length], alone.features[0]) < 1e-4


@torch.no_grad()
def test_many_blocks_are_verified_in_parts(monkeypatch):
    target, ids = tiny_target("qwen3_5_text"), padded(40, 30)
    anchors = torch.tensor([[3, 5, 9, 20, 33], [4, 6, 7, 8, 29]])
    blocks, drafted = Blocks(anchors, torch.ones_like(anchors, dtype=torch.bool)), torch.randint(0, 190, (2, 5, 7))
    clean = rollout.read_clean_text(target, ids, [1], room=40)
    whole = rollout.verify_blocks(target, clean.cache, ids, drafted, blocks)
    sizes, run = [], recurrent_verification.RecurrentText._run
    monkeypatch.setattr(recurrent_verification, "_ROWS", 2)
    monkeypatch.setattr(
        recurrent_verification.RecurrentText,
        "_run",
        lambda self, ids, *args, **options: sizes.append(len(ids)) or run(self, ids, *args, **options),
    )
    assert relative(rollout.verify_blocks(target, clean.cache, ids, drafted, blocks), whole) < 1e-5
    assert sizes == [2, 2, 2, 2, 1, 1]  # nine blocks that start in the first segment, one in the second


@pytest.mark.parametrize("conditioning", ["corrected", "gated"])
@pytest.mark.parametrize("name", [name for name in FEW if name != "qwen3_5_text"])  # its rounding is above 1e-5
def test_training_equals_decoding(name, conditioning):
    check_training_equals_decoding(name, conditioning)


def test_training_equals_decoding_where_keys_and_values_are_read():
    check_training_equals_decoding("bamba", "corrected", context_fusion="hybrid", target_kv_layer_ids=[1, 4])


def naive_verification(target, cache, ids, drafted, blocks, first_rejected=None):
    """Every block by a pass over its whole prefix."""
    states = torch.zeros(*drafted.shape[:2], BLOCK_SIZE, target.get_input_embeddings().weight.shape[1])
    for row, column in blocks.valid.nonzero().tolist():
        anchor = int(blocks.anchors[row, column])
        whole = torch.cat([ids[row : row + 1, : anchor + 1], drafted[row, column][None]], dim=1)
        states[row, column] = target.get_decoder()(whole, use_cache=False).last_hidden_state[0, anchor:]
    return states


@pytest.mark.parametrize("name", FEW)
def test_carried_rounds_read_the_states_of_their_own_prefix(name, tmp_path, monkeypatch):
    """Two of them, so that anchors which no one drew are verified too; rows of other lengths."""
    target = tiny_target(name)
    rows = [*rows_of(target, count=1, new_tokens=60), *rows_of(target, count=2, new_tokens=24)[1:]]
    drafter = randomize(tiny_drafter(target))
    trainer = make_trainer(drafter, target, tmp_path, rows, num_carried_rounds=2)
    batch = RetraceDataCollator()(rows)
    monkeypatch.setattr(trainer_module, "count_accepted", lambda drafted, labels, supervised: supervised.sum(-1) // 2)
    with torch.no_grad():
        found = trainer.compute_loss(drafter, dict(batch)).item()
        monkeypatch.setattr(trainer_module, "verify_blocks", naive_verification)
        expected = trainer.compute_loss(drafter, dict(batch)).item()
        monkeypatch.setattr(trainer_module, "verify_blocks", lambda *args: 0 * naive_verification(*args))
        other = trainer.compute_loss(drafter, dict(batch)).item()
    assert found == pytest.approx(expected, rel=1e-4) and other != pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("name", ["qwen3_5", "jamba"])
def test_a_drafter_is_trained_in_both_stages(name, tmp_path):
    target = tiny_target(name)
    rows = rows_of(target)
    dflash = tiny_drafter(target, conditioning="none")
    trainer = make_trainer(dflash, target, tmp_path, rows, num_carried_rounds=0, max_steps=30, learning_rate=5e-3)
    before = trainer.evaluate(trainer.train_dataset)["eval_loss"]
    trainer.train()
    assert trainer.evaluate(trainer.train_dataset)["eval_loss"] < 0.8 * before
    trainer.save_model()
    drafter = RetraceDrafter.from_dflash(tmp_path, conditioning="corrected")
    start = {key: p.detach().clone() for key, p in drafter.named_parameters()}
    prompts = [{"prompt_ids": rows[0]["input_ids"][:9], "source": "chat", "id": "0"}]
    trainer = RetraceTrainer(
        model=drafter,
        target=target,
        args=arguments(tmp_path, max_steps=6, eval_max_new_tokens=17),
        train_dataset=Dataset.from_list(rows),
        eval_prompts=prompts,
    )
    trainer.train()
    assert [key for key, p in drafter.named_parameters() if torch.equal(p, start[key])] == []
    with record_acceptance() as stats:
        plain(target, torch.tensor([prompts[0]["prompt_ids"]]), 17, assistant_model=drafter)
    assert trainer.evaluate()["eval_tau"] == pytest.approx(stats.acceptance_length, abs=1e-4)


def test_a_sharded_target_is_refused(tmp_path, monkeypatch):
    """Its processes would wait for each other: they verify in different numbers of passes."""
    target, rows = tiny_target("lfm2"), [{"input_ids": [3, 4, 5], "loss_mask": [0, 1, 1]}]
    monkeypatch.setattr(RetraceTrainer, "_is_zero3", True)
    monkeypatch.setattr(trainer_module, "shard_target", lambda *args: None)
    with pytest.raises(ValueError, match="Lfm2ForCausalLM keeps a recurrent state.*ZeRO-3.*conditioning='gated'"):
        make_trainer(tiny_drafter(target), target, tmp_path, rows)
    make_trainer(tiny_drafter(target, "gated"), target, tmp_path, rows)


# -- features --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_features_of_rows_that_are_padded_are_those_of_each_alone(name, tmp_path):
    target = tiny_target(name)
    rows = [prompt_of(length, seed=length)[0].tolist() for length in (1, 2, 17, 50, 33)]
    dataset = Dataset.from_list([{"input_ids": row} for row in rows])
    features = TargetFeatures.build_or_open(target, dataset, [1, 3], tmp_path, progress=False, with_last=True)
    for i, row in enumerate(rows):
        with torch.no_grad():
            out = target.get_decoder()(torch.tensor([row]), output_hidden_states=[2, 4], use_cache=False)
        expected = torch.cat([out.hidden_states[2], out.hidden_states[4], out.last_hidden_state], dim=-1)[0]
        assert relative(torch.from_numpy(features[i].astype(np.float32)), expected) < 1e-3  # float16


@pytest.mark.parametrize("name", FEW)
def test_the_loss_over_cached_features_is_that_of_the_target_online(name, tmp_path):
    """Fresh and gated rounds, with soft targets."""
    target = tiny_target(name)
    rows = [*rows_of(target, count=1, new_tokens=40), *rows_of(target, count=2, new_tokens=20)[1:]]
    drafter, data = randomize(tiny_drafter(target, conditioning="gated")), Dataset.from_list(rows)
    taps = drafter.config.target_layer_ids
    cached = TargetFeatures.build_or_open(target, data, taps, tmp_path / "f", progress=False, with_last=True)
    losses = []
    for collator in (RetraceDataCollator(), RetraceDataCollator(features=cached)):
        trainer = make_trainer(drafter, target, tmp_path, rows, num_carried_rounds=1, soft_share=0.5)
        with torch.no_grad():
            losses.append(trainer.compute_loss(drafter, dict(collator(rows))).item())
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)


# -- text of the target's own ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_answers_in_a_batch_are_those_one_by_one(name):
    _, tokenizer = letters_chat_target()
    target = tiny_target(name, vocab_size=len(tokenizer))
    questions = ["ga", "gagbgccacbcc" * 3, "dfdgdhab"]
    requests = [(str(i), [{"role": "user", "content": text}]) for i, text in enumerate(questions)]
    found = {}
    for batch_size in (1, 3):
        answers = TargetAnswers(target, tokenizer, max_new_tokens=20, batch_size=batch_size)
        found[batch_size] = [a.ids for a in answers(requests, 0, 0, lambda tokens: None)]
    assert found[1] == found[3] and sum(map(len, found[1])) > 30


@pytest.mark.parametrize("name", NAMES)
def test_chats_with_itself_are_greedy(name, tmp_path):
    _, tokenizer = letters_chat_target()
    target = tiny_target(name, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    options = {"batch_size": 3, "length": 110, "max_user_tokens": 12, "max_answer_tokens": 16, "progress": False}
    self_chat(target, tokenizer, tmp_path, num_tokens=3 * 110, **options)
    checked = 0
    for row in read_responses(tmp_path / "self_chat_00000.jsonl.gz"):
        with torch.no_grad():
            greedy = target(torch.tensor([row["input_ids"]])).logits[0].argmax(-1).tolist()
        for start, end in row["answers"]:
            assert greedy[start - 1 : end - 1] == row["input_ids"][start:end]
            checked += end - start
    assert checked > 60


# -- replay and commands ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, conditioning",
    [*((name, "corrected") for name in ("qwen3_5", "falcon_h1", "jamba")), ("lfm2", "gated"), ("mamba2", "none")],
)
@torch.no_grad()
def test_replay_plays_the_rounds_of_generate(name, conditioning, tmp_path):
    """Rows that leave the batch at other times, behind a drafter that is right about part of the text."""
    target, prompts = tiny_target(name), [prompt_of(length, seed=length) for length in (3, 20, 33)]
    sequences = [plain(target, p, max_new_tokens=n)[0].tolist() for p, n in zip(prompts, (40, 12, 25))]
    rows = [{"input_ids": s, "loss_mask": [0] + [1] * (len(s) - 1)} for s in sequences]
    drafter = tiny_drafter(target, conditioning="none")
    options = {"max_steps": 40, "num_anchors": 24, "num_carried_rounds": 0, "learning_rate": 5e-3}
    with torch.enable_grad():
        trainer = make_trainer(drafter, target, tmp_path, rows, **options)
        trainer.train()
    trainer.save_model()
    drafter = RetraceDrafter.from_dflash(tmp_path, conditioning=conditioning)
    if drafter.trajectory is not None:
        randomize(drafter.trajectory, std=0.05)
    found = roll_out(target, drafter, sequences, [p.shape[1] for p in prompts], 40, batch_size=3)
    for prompt, sequence, one in zip(prompts, sequences, found):
        new = len(sequence) - prompt.shape[1]
        with record_acceptance() as stats:
            assert plain(target, prompt, 40, assistant_model=drafter)[0, : len(sequence)].tolist() == sequence
        rounds = len(one.accepted_per_round)
        assert one.accepted_per_round[: rounds - 1] == stats.accepted_per_round[: rounds - 1]
        assert one.new_tokens == new
    assert len({accepted for one in found for accepted in one.accepted_per_round}) > 2


@pytest.mark.parametrize("name", ["qwen3_5", "granitemoehybrid"])
def test_the_commands_run_on_a_saved_target(name, tmp_path, monkeypatch, capsys):
    target = tmp_path / "target"
    save_letters_target(target, family=name)
    model, _ = letters_chat_target(family=name)
    randomize(tiny_drafter(model)).save_pretrained(tmp_path / "drafter")
    places = ["--target", str(target), "--drafter", str(tmp_path / "drafter")]
    threads = ["--threads", str(torch.get_num_threads())]
    monkeypatch.setattr(demo_module, "PROMPTS", {"chat": "gagb", "code": "cacbcc"})
    monkeypatch.setattr(sys, "argv", ["retrace-hf", "demo", *places, "--max-new-tokens", "9", *threads])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    out = capsys.readouterr().out
    assert not exit.value.code and out.count("(c) ReTrace") == 3 and "no, from" not in out
    prompts = [{"id": "0", "source": "chat", "category": "x", "turns": ["gagbgc", "dfdg"]}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    command = ["benchmark", *places, "--data", str(tmp_path / "prompts.jsonl"), "--temperature", "0", "--no-plots"]
    command += ["--max-new-tokens", "9", "--output-dir", str(tmp_path / "out"), *threads]
    done = CliRunner().invoke(cli.app, command)
    assert done.exit_code == 0, (done.output, done.exception)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["variants"]["drafter"]["all"]["acceptance_length"] >= 1


# -- DFlash checkpoints for such targets -----------------------------------------------------------------------------


def dflash_folder(folder, target, rope):
    """As z-lab publishes them for Qwen3.5: more taps than layers, the block size nested, RoPE under its new name."""
    drafter = tiny_drafter(target, conditioning="none", target_layer_ids=[0, 2, 4])
    config = zlab_config(randomize(drafter), nested_block_size=True)
    del config["rope_theta"], config["rope_scaling"]
    state = drafter.state_dict()
    assert set(state) == ZLAB_KEYS
    return write(folder, {**config, "rope_parameters": rope, "sliding_window": None}, state)


WHOLE_HEADS = {"rope_type": "default", "rope_theta": 10000000}
AS_THE_TARGET = {**WHOLE_HEADS, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1], "mrope_interleaved": True}


@pytest.mark.parametrize("rope", [WHOLE_HEADS, AS_THE_TARGET], ids=["whole heads", "as the target"])
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_text"])
def test_a_dflash_of_z_lab_drafts(name, rope, tmp_path):
    rope_of_target = {"rope_parameters": AS_THE_TARGET, "head_dim": 16}
    if FAMILIES[name].has_images:
        rope_of_target = {"text_config": FAMILIES[name].fields["text_config"] | rope_of_target}
    target = tiny_target(name, **rope_of_target)
    folder = dflash_folder(tmp_path / "z-lab", target, rope)
    drafter = RetraceDrafter.from_dflash(folder, target=target, conditioning="none")
    assert not {"mrope_section", "mrope_interleaved"} & set(drafter.config.rope_parameters)
    frequencies = drafter.rotary_emb.inv_freq
    if rope is AS_THE_TARGET:
        torch.testing.assert_close(frequencies, target.get_decoder().rotary_emb.inv_freq)
    else:
        torch.testing.assert_close(frequencies, 1e7 ** (-torch.arange(0, 16, 2) / 16))
    for length in (2, 40):
        sequence = plain(target, prompt_of(length), 17)
        assert torch.equal(plain(target, prompt_of(length), 17, assistant_model=drafter), sequence)
    convert(folder, tmp_path / "ours", "retrace")
    if rope is AS_THE_TARGET:  # the format's own class and some servers rotate whole heads
        with pytest.raises(ValueError, match="partial_rotary_factor=0.25, which z-lab cannot hold"):
            convert(tmp_path / "ours", tmp_path / "back", "z-lab")
        return
    convert(tmp_path / "ours", tmp_path / "back", "z-lab")
    config, state = read(tmp_path / "back")
    assert_same_bits(state, read(folder)[1])
    assert config["rope_theta"] == 1e7 and config["dflash_config"]["target_layer_ids"] == [0, 2, 4]
