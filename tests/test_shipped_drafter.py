"""The drafter in model_cards/ on its real target: equal text, real acceptance, and the rollout that measured it."""

import json
from pathlib import Path

import pytest
import torch

from retrace_hf import RetraceDrafter, record_acceptance
from retrace_hf.data.prompts import read_eval_prompts, render_prompt
from retrace_hf.evaluation import roll_out


ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "model_cards" / "retrace-smollm2-135m"
TIE = 1e-4


@pytest.fixture(scope="module")
def shipped():
    return RetraceDrafter.from_pretrained(FOLDER).eval()


def prompts(tokenizer, count):
    rows = read_eval_prompts(ROOT / "examples" / "data" / "eval_prompts.jsonl")
    rows = rows[:: len(rows) // count][:count]
    return [render_prompt(tokenizer, [{"role": "user", "content": row["turns"][0]}]) for row in rows]


def check_equal_or_tie(target, plain, ours):
    """Equal text; or it parts at a tie, where which token is the argmax depends on how the product was split."""
    if torch.equal(plain, ours):
        return
    at = next(i for i, (a, b) in enumerate(zip(plain[0].tolist(), ours[0].tolist())) if a != b)
    top = target(plain[:, :at]).logits[0, -1].topk(2).values
    assert top[0] - top[1] <= TIE, f"the texts part at token {at}, where the gap is {top[0] - top[1]:.2e}"


@torch.no_grad()
def both_ways(target, drafter, prompt, new_tokens):
    ids = torch.tensor([prompt])
    plain = target.generate(ids, max_new_tokens=new_tokens, do_sample=False)
    with record_acceptance() as stats:
        ours = target.generate(ids, assistant_model=drafter, max_new_tokens=new_tokens, do_sample=False)
    check_equal_or_tie(target, plain, ours)
    return ours[0].tolist(), stats


def test_weights_are_small_and_load_as_float32(shipped):
    assert shipped.dtype == torch.float32
    assert sum(file.stat().st_size for file in FOLDER.glob("*.safetensors")) < 40e6
    assert shipped.config.conditioning == "corrected" and shipped.trajectory.value.weight.any()


def test_text_is_plains_and_tokens_are_accepted(smollm2, shipped):
    target, tokenizer = smollm2
    accepted = rounds = 0
    for prompt in prompts(tokenizer, 3):
        _, stats = both_ways(target, shipped, prompt, new_tokens=40)
        accepted, rounds = accepted + sum(stats.accepted_per_round), rounds + stats.rounds
    assert accepted / rounds + 1 > 1.6


@pytest.mark.slow
def test_rollout_is_generate_on_ten_prompts(smollm2, shipped):
    """What results.json's arms were measured with."""
    target, tokenizer = smollm2
    chosen = prompts(tokenizer, 10)
    texts, expected = zip(*(both_ways(target, shipped, prompt, new_tokens=128) for prompt in chosen))
    found = roll_out(target, shipped, texts, [len(p) for p in chosen], max_new_tokens=128, batch_size=5)
    for one, other in zip(found, expected):
        assert one.accepted_per_round == other.accepted_per_round
        assert one.proposed_per_round == other.proposed_per_round


def test_results_hold_every_arm_and_where_they_come_from():
    results = json.loads((FOLDER / "results.json").read_text())
    for arm in ("stage1", "sft", "corrected"):
        for kind in ("mt-bench", "humaneval", "gsm8k", "all"):
            entry = results["variants"][arm][kind]
            assert entry["acceptance_length"] >= 1 and entry["rounds"] > 0 and len(entry["acceptance_at"]) == 7
    assert {"command", "versions", "data", "revision"} <= set(results["provenance"])
