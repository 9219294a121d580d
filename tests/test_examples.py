"""The scripts a user copies, one after the other on a tiny target: chats, training, measuring, shipping."""

import contextlib
import gzip
import io
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import matplotlib.axes
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from retrace_hf import RetraceDrafter, RetraceTrainer
from retrace_hf.targets import load_target
from retrace_hf.trajectory import RejectedTrajectory

from .fixtures import killed_at_random, plain, prompt_of, tiny_target
from .test_drafters import NEW_TOKENS, watched_proposals


EXAMPLES = Path(__file__).parents[1] / "examples"
STEPS = ["--max_steps", "4", "--per_device_train_batch_size", "2", "--num_anchors", "4", "--use_cpu", "True"]
STEPS += ["--report_to", "none", "--disable_tqdm", "True", "--save_steps", "2"]


class Run:
    """Runs an example in this process, as `python examples/NAME ARGUMENTS...` would."""

    def __call__(self, name, *arguments):
        argv, sys.argv = sys.argv, [f"examples/{name}", *map(str, arguments)]
        try:
            return runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        finally:
            sys.argv = argv

    def fails(self, name, *arguments, message, code=None):
        """With one line on stderr and exit status `code`, 1 or 2 by default."""
        stderr = io.StringIO()
        with contextlib.redirect_stderr(stderr), pytest.raises(SystemExit) as exit:
            self(name, *arguments)
        last = stderr.getvalue().strip().splitlines()[-1]
        assert exit.value.code in ((1, 2) if code is None else (code,)) and re.search(message, last), last


@pytest.fixture(scope="module")
def run():
    return Run()


@pytest.fixture(scope="module")
def folder(smollm2, run, tmp_path_factory):
    """A tiny target with SmolLM2's tokenizer, chats of it, a stage-1 drafter and a ReTrace trained from that."""
    folder, tokenizer = tmp_path_factory.mktemp("examples"), smollm2[1]
    target = tiny_target("llama", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    chats = ["--output_dir", folder / "chats", "--num_tokens", 6 * 180, "--batch_size", 6, "--length", 180]
    run("self_chat.py", "--target", folder / "target", *chats)
    common = ["--target", folder / "target", "--responses", folder / "chats" / "self_chat_00000.jsonl.gz", *STEPS]
    new = ["--conditioning", "none", "--num_carried_rounds", 0, "--num_draft_layers", 2, "--target_layer_ids", 1, 3]
    stage1 = ["--features_dir", folder / "features", "--soft_share", 0.5, "--muon", "True"]
    run("train_retrace.py", *common, *new, *stage1, "--block_size", 5, "--output_dir", folder / "stage1")
    after = ["--init_from", folder / "stage1", "--output_dir", folder / "corrected", "--block_size", 8]
    run("train_retrace.py", *common, *after, "--num_carried_rounds", 2)
    return folder, common


def test_training_leaves_a_drafter_and_a_note(folder):
    folder, _ = folder
    for name, conditioning, block_size in (("stage1", "none", 5), ("corrected", "corrected", 8)):
        config = RetraceDrafter.from_pretrained(folder / name).config
        assert (config.conditioning, config.block_size) == (conditioning, block_size)
        note = json.loads((folder / name / "training.json").read_text())
        assert note["arguments"]["max_steps"] == 4 and list(note["data"]) == ["self_chat_00000.jsonl.gz"]
        assert (note["init_from"] is None) == (name == "stage1")


def test_stage_2_goes_on_from_a_retrace_and_a_draft_vocabulary_is_counted(folder, run, tmp_path):
    folder, common = folder
    more = ["--init_from", folder / "corrected", "--num_carried_rounds", 1, "--max_steps", 1, "--learning_rate", 0]
    size = ["--draft_vocab_size", 60]
    run("train_retrace.py", *common, *more, *size, "--output_dir", tmp_path / "more")
    run("train_retrace.py", *common, *more, "--conditioning", "none", "--output_dir", tmp_path / "backbone")
    before = RetraceDrafter.from_pretrained(folder / "corrected").state_dict()
    whole, backbone = (RetraceDrafter.from_pretrained(tmp_path / name) for name in ("more", "backbone"))
    tokens = whole.draft_token_ids.tolist()
    assert len(tokens) == whole.config.draft_vocab_size <= 60 and whole.config.eos_token_id in tokens
    for name, weight in whole.state_dict().items():
        assert name == "draft_token_ids" or torch.equal(weight, before[name]), name
    assert before.keys() - backbone.state_dict().keys() == {name for name in before if "trajectory." in name}
    note = json.loads((tmp_path / "more" / "training.json").read_text())
    assert note["script"]["draft_vocab_size"] == 60
    run.fails(
        "train_retrace.py", *common, *more, "--draft_vocab_size", 0, "--output_dir", tmp_path / "new", message="has 0"
    )


def test_training_goes_on_behind_a_checkpoint_that_was_cut_short(folder, run, tmp_path, monkeypatch):
    folder, common = folder
    shutil.copytree(folder / "corrected" / "checkpoint-2", tmp_path / "checkpoint-2")
    (tmp_path / "checkpoint-4").mkdir()
    (tmp_path / "checkpoint-4" / "config.json").write_text("{}")
    steps, real = [], RetraceTrainer.training_step

    def count(self, *args, **kwargs):
        steps.append(self.state.global_step)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(RetraceTrainer, "training_step", count)
    after = ["--init_from", folder / "stage1", "--block_size", 8, "--num_carried_rounds", 2]
    run("train_retrace.py", *common, *after, "--output_dir", tmp_path)
    assert steps == [2, 3]
    # Killed between saving and noting that it has ended: it ends now, without a step more.
    note = json.loads((tmp_path / "training.json").read_text())
    (tmp_path / "training.json").write_text(json.dumps({**note, "finished": False}))
    (tmp_path / "model.safetensors").write_bytes(b"cut short")
    run("train_retrace.py", *common, *after, "--output_dir", tmp_path)
    assert steps == [2, 3] and json.loads((tmp_path / "training.json").read_text())["finished"]
    whole = RetraceDrafter.from_pretrained(folder / "corrected").state_dict()
    for name, weight in RetraceDrafter.from_pretrained(tmp_path).state_dict().items():
        assert weight.equal(whole[name]), name


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_training_killed_ten_times_ends_as_an_undisturbed_run(folder, tmp_path):
    """Features computed before, checkpoints every other step, held-out prompts: all may be cut short."""
    folder, common = folder
    command = [sys.executable, EXAMPLES / "train_retrace.py", *common, "--max_steps", 12, "--soft_share", 0.5]
    command += ["--init_from", folder / "stage1", "--conditioning", "gated", "--num_carried_rounds", 1]
    command += [
        "--eval_prompts",
        EXAMPLES / "data" / "eval_prompts.jsonl",
        "--eval_strategy",
        "steps",
        "--eval_steps",
        4,
    ]
    command += ["--eval_max_prompts", 2, "--eval_max_new_tokens", 6, "--save_total_limit", 2]
    env = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"}

    def start(name="killed"):
        places = ["--features_dir", tmp_path / name / "features", "--output_dir", tmp_path / name / "run"]
        return subprocess.Popen([str(part) for part in (*command, *places)], env=env, stderr=subprocess.DEVNULL)

    assert start("whole").wait() == 0
    begun = tmp_path / "killed" / "features"
    hit = killed_at_random(start, begun, kills=10, longest=12.0, seed=2)
    print(f"{hit} of 10 runs were killed before their end")
    assert hit >= 3
    assert start().wait() == 0
    whole = load_file(tmp_path / "whole" / "run" / "model.safetensors")
    found = load_file(tmp_path / "killed" / "run" / "model.safetensors")
    assert found.keys() == whole.keys() and all(found[name].equal(whole[name]) for name in whole)
    assert json.loads((tmp_path / "killed" / "run" / "training.json").read_text())["finished"]


def test_ctrl_c_while_training_with_held_out_prompts(folder, run, tmp_path, monkeypatch):
    """Stopped in its second step it ends with status 130; the same command goes on, to the weights of a run that was
    neither stopped nor evaluated."""
    folder, common = folder
    after = ["--init_from", folder / "stage1", "--block_size", 8, "--num_carried_rounds", 2, "--output_dir", tmp_path]
    after += [
        "--eval_prompts",
        EXAMPLES / "data" / "eval_prompts.jsonl",
        "--eval_strategy",
        "steps",
        "--eval_steps",
        2,
    ]
    after += ["--eval_max_prompts", 2, "--eval_max_new_tokens", 6, "--metric_for_best_model", "eval_tau"]
    after += ["--early_stopping_patience", 5]
    real = RetraceTrainer.training_step

    def press(self, *args, **kwargs):
        if self.state.global_step == 1:
            signal.raise_signal(signal.SIGINT)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(RetraceTrainer, "training_step", press)
    run.fails(
        "train_retrace.py", *common, *after, message="Stopped and saved at step 2; the same command goes on", code=130
    )
    monkeypatch.undo()
    run("train_retrace.py", *common, *after)
    whole = RetraceDrafter.from_pretrained(folder / "corrected").state_dict()
    for name, weight in RetraceDrafter.from_pretrained(tmp_path).state_dict().items():
        assert weight.equal(whole[name]), name
    history = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    taus = [entry for entry in history if "eval_tau" in entry]
    assert [entry["step"] for entry in taus] == [2, 4] and all(entry["eval_tau"] >= 1 for entry in taus)
    assert len([name for name in taus[0] if name.startswith("eval_tau_")]) == 2


def test_training_refuses_to_mix_two_runs_and_an_unknown_mask_token(folder, run, tmp_path):
    folder, common = folder
    after = ["--init_from", folder / "stage1", "--block_size", 8, "--num_carried_rounds", 2]
    for changed in (["--conditioning", "none"], ["--learning_rate", "0.007"], ["--block_size", 6], ["--limit", 3]):
        name = changed[0].removeprefix("--")
        message = f"run with other options .*{name} was .*, now {changed[1]}"
        run.fails("train_retrace.py", *common, *after, *changed, "--output_dir", folder / "corrected", message=message)
    assert json.loads((folder / "corrected" / "training.json").read_text())["finished"]
    for changed, message in (
        (["--mask_token", "<no such token>"], "--mask_token '<no such token>' is not in the vocabulary .* special"),
        ([*after, "--num_draft_layers", 5], "--num_draft_layers go with a new drafter"),
        (["--init_from", folder / "nowhere"], "nowhere is neither a folder nor a repository"),
    ):
        run.fails("train_retrace.py", *common, *changed, "--output_dir", tmp_path / "new", message=message)
    before = (folder / "corrected" / "config.json").read_text()
    run("train_retrace.py", *common, *after, "--output_dir", folder / "corrected")  # is finished: nothing happens
    assert (folder / "corrected" / "config.json").read_text() == before


def test_measuring_refuses_what_it_cannot_do_before_it_starts(folder, run, tmp_path):
    folder, _ = folder
    arm = ["--arm", f"stage1={folder / 'stage1'}"]
    for arguments, message in (
        ([], "name at least one arm"),
        (["--arm", "runs/stage1"], "name at least one arm"),
        (["--arm", f"x={folder / 'nowhere'}"], "nowhere is neither a folder nor a repository that the Hub has"),
        ([*arm, "--baseline", "sfft"], "--baseline sfft names no --arm"),
        ([*arm, "--generate", "x"], "--generate x names no --arm"),
        ([*arm, "--generate-rest"], "--generate-rest goes with --generate"),
        ([*arm, "--limit", 0], "--limit must be at least 1"),
        ([*arm, "--max_new_tokens", 1], "--max-new-tokens must be at least 2"),
        ([*arm, "--max-new-tokens", 1], "--max-new-tokens must be at least 2"),
        ([*arm, "--output", tmp_path], "is a folder"),
    ):
        run.fails("evaluate_drafters.py", *arguments, message=message)
    run.fails("self_chat.py", "--dtype", "bf16", "--num_tokens", 9, "--output_dir", tmp_path, message="invalid choice")


def test_measuring_and_shipping(folder, run, tmp_path, monkeypatch):
    folder, _ = folder
    monkeypatch.chdir(tmp_path)
    run("ship_drafter.py", folder / "corrected", tmp_path / "card")
    assert RetraceDrafter.from_pretrained(tmp_path / "card").config.conditioning == "corrected"
    arms = ["--arm", f"stage1={folder / 'stage1'}", "--arm", f"corrected={tmp_path / 'card'}", "--baseline", "stage1"]
    options = ["--target", folder / "target", "--limit", 2, "--max-new-tokens", 20, "--output", "out/results.json"]
    run("evaluate_drafters.py", *options, *arms, "--generate", "corrected", "--generate-limit", 1, "--generate-rest")
    results = json.loads(Path("out/results.json").read_text())
    assert set(results["variants"]) == {"stage1", "corrected", "plain", "corrected_generate", "signal_off"}
    assert results["variants"]["corrected_generate"]["all"]["equal_to_plain"] == 3
    everywhere = {"prompts": 6, "equal_to_plain": 6, "differences": [], "rounds_equal_to_rollout": 6}
    assert results["generate"] == everywhere
    assert results["variants"]["plain"]["all"]["acceptance_length"] == 1.0
    assert results["provenance"]["arms"]["corrected"]["training"]["arguments"]["num_carried_rounds"] == 2
    assert 0 < results["conditioning_cost"]["share"] < 1

    # The same weights are read from what was kept; others are measured anew.
    kept = Path("out/results.json.arms.jsonl").read_text()
    run("evaluate_drafters.py", *options, *arms)
    assert Path("out/results.json.arms.jsonl").read_text() == kept
    config = json.loads((tmp_path / "card" / "config.json").read_text())
    (tmp_path / "card" / "config.json").write_text(json.dumps({**config, "block_size": 4}))
    run("evaluate_drafters.py", *options, *arms[2:4])
    lines = Path("out/results.json.arms.jsonl").read_text().splitlines()
    assert len(lines) == kept.count("\n") + 6 and max(max(json.loads(line)["proposed"]) for line in lines[-6:]) == 3
    (tmp_path / "card" / "config.json").write_text(json.dumps(config))

    Path("out/results.json").write_text(json.dumps(results))
    run("ship_drafter.py", "--results", "out/results.json", tmp_path / "card")
    card = (tmp_path / "card" / "README.md").read_text()
    assert f"{results['variants']['corrected']['all']['acceptance_length']:.3f}" in card
    assert (tmp_path / "card" / "training.json").is_file() and not list((tmp_path / "card").glob("*.tmp.*"))


def test_what_rejected_states_know_is_counted_at_the_slot_that_decides():
    """Two blocks of a made-up text. Where the drafter is wrong first, u is right; and one slot on, nothing counts."""
    module = runpy.run_path(str(EXAMPLES / "measure_signal.py"))
    target = tiny_target("qwen3")
    head = torch.nn.functional.normalize(target.lm_head.weight.detach(), dim=-1) * 30  # a row's logit is the largest

    class Drafter:
        def register_forward_hook(self, hook, with_kwargs):
            self.hook = hook

        def saw(self, anchor, drafted, u, m, valid):
            states = [head[torch.tensor(tokens)][None] for tokens in ([9, *drafted], [9, *u], [9, *m])]
            signal = RejectedTrajectory(states[2], states[1], torch.tensor([[False, *valid]]))
            places = torch.arange(anchor, anchor + 4)[None]
            self.hook(
                self, (), {"trajectory": signal, "position_ids": places}, SimpleNamespace(last_hidden_state=states[0])
            )

    drafter = Drafter()
    watched = module["Watched"](target, drafter)
    watched.text = torch.tensor([10, 11, 12, 13, 14, 15, 16])
    drafter.saw(0, drafted=[11, 50, 13], u=[50, 12, 50], m=[50, 51, 52], valid=[True, True, True])
    drafter.saw(3, drafted=[14, 15, 16], u=[14, 50, 16], m=[14, 15, 50], valid=[True, True, False])
    slots = {name: torch.cat([block[name] for block in watched.slots]) for name in watched.slots[0]}
    assert slots["slot"].tolist() == [1, 2, 1, 2]
    assert slots["drafter"].tolist() == [True, False, True, True]
    assert slots["u"].tolist() == [False, True, True, False]
    assert slots["m"].tolist() == [False, False, True, True]
    every = module["shares"](slots, torch.ones_like(slots["u"]))
    assert (every["slots"], every["drafter"], every["u"], every["either"]) == (4, 0.75, 0.5, 1.0)
    assert every["u_where_the_drafter_is_wrong"] == 1.0 and every["mixed"] >= every["drafter"]


def test_measuring_the_signal_of_a_drafter(folder, run, tmp_path):
    folder, _ = folder
    options = ["--target", folder / "target", "--limit", 2, "--max_new_tokens", 20, "--output", tmp_path]
    run("measure_signal.py", "--drafter", folder / "stage1", *options)
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["prompts"] == 6 and results["acceptance_length"] >= 1
    assert results["slots"]["all"]["slots"] > 0 and "| all |" in (tmp_path / "results.md").read_text()
    run.fails("measure_signal.py", "--drafter", folder / "corrected", *options, message="is a ReTrace checkpoint")


# -- LoRA, and curves ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def traffic(folder, tmp_path_factory):
    """The chats, told apart into two kinds; and the arguments that fit a LoRA to one."""
    folder, _ = folder
    file = tmp_path_factory.mktemp("traffic") / "responses.jsonl"
    with gzip.open(folder / "chats" / "self_chat_00000.jsonl.gz", "rt") as chats:
        rows = [{**json.loads(line), "source": "chat" if i < 2 else "math"} for i, line in enumerate(chats)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = ["--target", folder / "target", "--drafter", folder / "corrected", "--responses", file, *STEPS]
    return [*common, "--learning_rate", 0.05, "--logging_steps", 1, "--held_out", 1]


def test_a_lora_alone_on_its_base_and_merged(folder, traffic, run, tmp_path, capsys):
    """All three draft the same, otherwise than the base does, and the text is plain's."""
    folder, _ = folder
    lora, merged = tmp_path / "lora", tmp_path / "merged"
    run("finetune_lora.py", *traffic, "--source", "math", "--output_dir", lora, "--merge", merged, "--lora_r", 2)
    assert not (lora / "model.safetensors").exists()
    adapter, whole = lora / "adapter_model.safetensors", merged / "model.safetensors"
    assert adapter.stat().st_size < whole.stat().st_size / 2
    # A drafter that has read its signal already goes on reading all of it.
    assert torch.load(lora / "training_args.bin", weights_only=False).beta_warmup_steps == 0
    note = json.loads((lora / "tau.json").read_text())
    assert set(note["before"]) == set(note["after"]) == {"chat", "math", "all"}
    assert [note["before"][kind]["prompts"] for kind in ("chat", "math", "all")] == [1, 1, 2]
    printed = capsys.readouterr().out
    assert re.search(rf"math +1 +{note['before']['math']['acceptance_length']:.3f} .*\(trained on\)", printed)

    target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).eval()
    prompt = prompt_of(20)
    expected = plain(target, prompt, NEW_TOKENS)

    def proposals(drafter):
        with watched_proposals() as found:
            assert torch.equal(plain(target, prompt, NEW_TOKENS, assistant_model=drafter.eval()), expected)
        return found[target]

    base = RetraceDrafter.from_pretrained(folder / "corrected")
    before = proposals(base)
    adapted = proposals(PeftModel.from_pretrained(base, lora))
    assert adapted != before
    for path in (lora, merged):
        assert proposals(RetraceDrafter.from_pretrained(path)) == adapted


def test_which_layers_a_lora_adapts(folder, traffic, run, tmp_path):
    folder, _ = folder
    base = RetraceDrafter.from_pretrained(folder / "corrected")
    linear = {name for name, module in base.named_modules() if isinstance(module, torch.nn.Linear)}
    fusion = {name for name in linear if name.startswith("trajectory.")}
    assert len(fusion) == 3
    for i, (options, expected) in enumerate(
        (
            ([], linear),
            (["--lora_trajectory", "False"], linear - fusion),
            (["--target_modules", "q_proj"], {name for name in linear if name.endswith("q_proj")} | fusion),
        )
    ):
        out = tmp_path / str(i)
        run("finetune_lora.py", *traffic, *options, "--source", "math", "--output_dir", out, "--max_steps", 1)
        names = load_file(out / "adapter_model.safetensors")
        assert {re.fullmatch(r"base_model\.model\.(.*)\.lora_[AB]\.weight", name)[1] for name in names} == expected


def test_traffic_that_cannot_be_split(traffic, run, tmp_path):
    run.fails("finetune_lora.py", *traffic, "--source", "maths", "--output_dir", tmp_path, message="are chat, math")
    options = ["--source", "math", "--output_dir", tmp_path, "--held_out", 4]
    run.fails("finetune_lora.py", *traffic, *options, message="leaves none of the 4 rows of math")


def test_a_curve_of_tau_against_tokens(folder, traffic, run, tmp_path, monkeypatch):
    """From a run's state and from a checkpoint's; what cannot be drawn is said."""
    folder, _ = folder
    run("finetune_lora.py", *traffic, "--source", "math", "--output_dir", tmp_path / "run", "--max_steps", 2)
    seen, drawn = [], matplotlib.axes.Axes.plot
    monkeypatch.setattr(
        matplotlib.axes.Axes, "plot", lambda self, *a, **k: (seen.append((k["label"], *a)), drawn(self, *a, **k))[1]
    )
    run("plot_learning_curve.py", tmp_path / "run", "--output", tmp_path / "new" / "curve.png")
    history = json.loads((tmp_path / "run" / "trainer_state.json").read_text())["log_history"][:2]
    tokens = tuple(entry["num_input_tokens_seen"] for entry in history)
    assert 0 < tokens[0] < tokens[1]
    assert [(name, x) for name, x, _ in seen] == [("tau_carried_1", tokens), ("tau_fresh", tokens)]
    assert seen[1][2] == tuple(entry["tau_fresh"] for entry in history)
    assert (tmp_path / "new" / "curve.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "run" / "trainer_state.json").unlink()
    two = [tmp_path / "run", folder / "corrected" / "checkpoint-4"]
    run.fails("plot_learning_curve.py", *two, "--output", tmp_path / "b.png", message="logged none of eval_tau")
    both = [two[0], two[0] / "checkpoint-2" / "trainer_state.json"]
    run("plot_learning_curve.py", *both, "--output", tmp_path / "b.png")
    assert (tmp_path / "b.png").is_file()
    run.fails("plot_learning_curve.py", tmp_path, message="no trainer_state.json and no whole checkpoint")
    run.fails("plot_learning_curve.py", tmp_path, "--output", "x.pdf", message="must end in .png")
    run.fails("plot_learning_curve.py", tmp_path / "nowhere", message="There is no .*nowhere; name the folder")
    old = {"log_history": [{"tau_fresh": 2.0, "step": 1}]}
    (tmp_path / "old.json").write_text(json.dumps(old))
    run.fails("plot_learning_curve.py", tmp_path / "old.json", message="without num_input_tokens_seen; train with")


def test_a_curve_of_checkpoints_over_blocks(run, tmp_path, monkeypatch, capsys):
    history = [{"step": step, "num_blocks_seen": 100 * step, "tau_fresh": 2.0 + step} for step in (1, 2)]
    (tmp_path / "run.json").write_text(json.dumps({"log_history": [*history, {"step": 2, "eval_tau": 2.5}]}))
    taus = {"2": 1.75, "0": 1.5, "plain": 1.0}
    variants = {name: {"all": {"acceptance_length": tau}} for name, tau in taus.items()}
    (tmp_path / "results.json").write_text(json.dumps({"variants": variants}))
    drawn, real = {}, matplotlib.axes.Axes.plot
    monkeypatch.setattr(
        matplotlib.axes.Axes, "plot", lambda self, *a, **k: (drawn.update({k["label"]: a}), real(self, *a, **k))[1]
    )
    options = ["--over", "blocks", "--output", tmp_path / "curve.png", "--results", tmp_path / "results.json"]
    run("plot_learning_curve.py", tmp_path / "run.json", *options)
    assert drawn["eval all"] == ((0, 200), (1.5, 1.75)) and drawn["tau_fresh"] == ((100, 200), (3.0, 4.0))
    assert drawn["eval_tau"] == ((200,), (2.5,))
    assert "| 0 | 1.500 |\n| 200 | 1.750 |" in capsys.readouterr().out
    both = [tmp_path / "run.json"] * 2
    run.fails("plot_learning_curve.py", *both, *options, message="goes with one run, not 2")
    (tmp_path / "results.json").write_text(json.dumps({"variants": {"7": variants["0"]}}))
    run.fails("plot_learning_curve.py", tmp_path / "run.json", *options, message="logged nothing at step 7")


@pytest.mark.slow
def test_the_ablation_trains_measures_and_goes_on(folder, run, tmp_path, monkeypatch, capsys):
    """Three contexts, both arms of each; stopped in between; then all is there and nothing runs again."""
    folder, _ = folder
    chats = folder / "chats" / "self_chat_00000.jsonl.gz"
    options = ["--target", folder / "target", "--responses", chats, "--output_dir", tmp_path]
    options += ["--fusions", "shared", "layerwise", "hybrid-reapplied", "--init_from", folder / "stage1"]
    options += ["--features_dir", folder / "features"]
    options += ["--stage1_steps", 1, "--stage2_steps", 2, "--num_carried_rounds", 1, "--logging_steps", 1]
    options += ["--per_device_train_batch_size", 2, "--num_anchors", 4, "--use_cpu", "True", "--report_to", "none"]
    options += ["--limit_prompts", 1, "--max_new_tokens", 12, "--timed_prompts", 1, "--disable_tqdm", "True"]
    steps, real = [], RetraceTrainer.training_step

    def count(self, *args, **kwargs):
        steps.append(self.args.output_dir.rsplit("/", 1)[-1])
        if len(steps) == 4:
            raise KeyboardInterrupt
        return real(self, *args, **kwargs)

    monkeypatch.setattr(RetraceTrainer, "training_step", count)
    run.fails("ablation.py", *options, message="interrupted; the same command goes on", code=130)
    run("ablation.py", *options)
    others = [[f"{f}-stage1"] + [f"{f}-none"] * 2 + [f"{f}-corrected"] * 2 for f in ("layerwise", "hybrid-reapplied")]
    assert steps[4:] == ["shared-corrected"] * 2 + sum(others, [])
    results, fusions = json.loads((tmp_path / "results.json").read_text()), ("shared", "layerwise", "hybrid-reapplied")
    assert set(results["arms"]) == {f"{f}-{a}" for f in fusions for a in ("stage1", "none", "corrected")}
    hybrid = results["arms"]["hybrid-reapplied-corrected"]
    assert hybrid["context_fusion"] == "hybrid" and hybrid["conditioning"] == "corrected"
    assert hybrid["context_kv_rope"] == "reapplied"
    assert hybrid["parameters"] > results["arms"]["shared-corrected"]["parameters"]
    assert [step for step, _ in hybrid["gate_mean"]] == [1, 2] and hybrid["drafter_ms"] > 0
    assert set(results["corrected_over_none"]) == {f"{f}-corrected" for f in fusions}
    assert set(results["over_shared"]) == {name for name in results["arms"] if "shared" not in name}
    text = (tmp_path / "results.md").read_text()
    assert "| hybrid-reapplied-corrected | 2 |" in text and "Mean gate of hybrid-reapplied-stage1" in text
    assert (tmp_path / "results.png").stat().st_size > 10_000
    monkeypatch.setattr(sys.modules["evaluate_drafters"], "roll_out", lambda *args: pytest.fail("measured again"))
    before = (tmp_path / "results.json").read_text()
    run("ablation.py", *options)
    assert len(steps) == 16 and (tmp_path / "results.json").read_text() == before
    run.fails("ablation.py", *options, "--depths", 2, message="--init_from brings its own layers")


def test_the_ablation_knows_what_it_cannot_do_before_it_trains(run, tmp_path):
    """train_retrace.py takes dashes for underscores: none of its options is another one here for that."""
    options = ["--responses", "none.jsonl", "--output_dir", tmp_path / "out"]
    for more, message in (
        (["--max-steps", 3], "--max_steps is set here for each arm"),
        (["--learning-rate=1"], "--learning_rate=1 is set here for each arm"),
        (["--init-from", "x", "--depths", 2], "--init_from brings its own layers"),
        (["--depths", 0], "--depths must be at least 1"),
        (["--seeds", 1, -1], "--seeds must be at least 0"),
        (["--timed_prompts", 0], "--timed_prompts must be at least 1"),
        (["--limit_prompts", 0], "--limit_prompts must be at least 1"),
        (["--eval-batch-size", 0], "--eval_batch_size must be at least 1"),
    ):
        run.fails("ablation.py", *options, *more, message=message)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_ablation_joins_seeds_prompt_by_prompt(folder, run, tmp_path):
    """A row for every seed; and the ratio over all rounds of all seeds, which lies between the seeds' own."""
    folder, _ = folder
    chats = folder / "chats" / "self_chat_00000.jsonl.gz"
    options = ["--target", folder / "target", "--responses", chats, "--output_dir", tmp_path, "--fusions", "shared"]
    options += ["--depths", 1, "--seeds", 1, 2, "--stage1_steps", 2, "--stage2_steps", 2, "--max_new_tokens", 12]
    options += ["--per_device_train_batch_size", 2, "--num_anchors", 4, "--use_cpu", "True", "--report_to", "none"]
    options += ["--limit_prompts", 1, "--timed_prompts", 1, "--disable_tqdm", "True", "--target_layer_ids", 1]
    run("ablation.py", *options)
    results = json.loads((tmp_path / "results.json").read_text())
    assert set(results["arms"]) == {f"shared-seed{s}-{a}" for s in (1, 2) for a in ("stage1", "none", "corrected")}
    weights = [arm["weights"] for arm in results["provenance"]["arms"].values()]
    assert len(set(weights)) == 6  # no two runs gave the same drafter
    found = results["corrected_over_none"]
    each = [found[f"shared-seed{seed}-corrected"]["ratio"] for seed in (1, 2)]
    assert found["shared-corrected"]["seeds"] == each
    assert min(each) <= found["shared-corrected"]["ratio"] <= max(each)
    assert "shared-corrected, corrected over none, all seeds: " in (tmp_path / "results.md").read_text()
    run.fails("ablation.py", *options, "--seeds", 1, 1, message="--seeds names one of them twice")
    run.fails("ablation.py", *options, "--seed", 1, message="--seed is set here for each arm")


def test_a_small_target_is_trained_and_chats(run, tmp_path, capsys):
    text = "An apple a day keeps the doctor away, they say. " * 4
    rows = [
        {"id": str(i), "source": "chat", "finish": "stop", "response_ids": [1], "messages": messages}
        for i, messages in enumerate(
            [[{"role": "user", "content": "Say it."}, {"role": "assistant", "content": text}]] * 8
        )
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shape = ["--hidden_size", 64, "--num_hidden_layers", 2, "--vocab_size", 300, "--row_length", 32]
    steps = ["--max_steps", 2, "--use_cpu", "True", "--report_to", "none", "--disable_tqdm", "True"]
    arguments = ["--responses", tmp_path / "rows.jsonl", "--output_dir", tmp_path / "target", *shape, *steps]
    run("small_target.py", *arguments)
    target, tokenizer = load_target(str(tmp_path / "target"))
    assert target.dtype == torch.float32 and target.config.vocab_size == len(tokenizer) <= 300
    chat = tokenizer.apply_chat_template(rows[0]["messages"][:1], add_generation_prompt=True, tokenize=False)
    assert chat == "<|user|>Say it.<|end|><|assistant|>"
    ids = tokenizer(chat, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == chat and tokenizer.convert_tokens_to_ids("<|mask|>") not in ids
    run("small_target.py", *arguments)
    assert "nothing is left to do" in capsys.readouterr().out
    run.fails("small_target.py", *arguments[:4], "--hidden_size", 100, message="give a multiple of 64")


@pytest.mark.slow
def test_retrace_gains_where_states_hold_the_answer(run, tmp_path):
    """Trained, rolled out and generated with. A signal that is lost or misplaced on the way leaves a ratio of 1."""
    short = ["--target_steps", 300, "--stage2_steps", 120, "--texts", 60, "--generated", 4]
    run("positive_control.py", "--output", tmp_path, "--arms", "gated", "corrected", *short)
    results = json.loads((tmp_path / "results.json").read_text())
    arms = {name.removeprefix("shared/"): entry for name, entry in results["arms"].items()}
    assert results["target"]["right_where_the_table_says"] > 0.98
    assert arms["corrected"]["over_control"]["interval"][0] > 1.3
    assert arms["gated"]["over_control"]["interval"][1] < 1.1  # what gains is the target's states
    assert arms["corrected"]["generate"]["acceptance_length"] > 1.3 * arms["none"]["generate"]["acceptance_length"]
    assert all(entry["generate"]["equal_to_plain"] == 4 for entry in arms.values())


@pytest.mark.usefixtures("smollm2")
def test_the_speed_of_training_is_measured(run, tmp_path):
    small = ["--stages", 1, 2, "--dtypes", "bfloat16", "--rows", 1, "--anchors", 4, "--steps", 1]
    run("measure_training.py", "--speed", *small, "--device", "cpu", "--output", tmp_path / "speed.md")
    table = [line for line in (tmp_path / "speed.md").read_text().splitlines() if line.startswith("|")]
    shares = [[int(cell) for cell in re.findall(r"(-?\d+) %", line)] for line in table[2:]]
    assert len(shares) == 2 and all(len(row) == 7 and 96 <= sum(row) <= 104 for row in shares)
    assert shares[0][3] == 0 and shares[1][3] > 0  # stage 1 verifies nothing
