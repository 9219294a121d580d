"""Does the signal reach the next block at all? A language made so that the answer lies in what the target said behind
the error, and nowhere else.

    python examples/positive_control.py --output runs/positive_control

A text is a row of records of six tokens. A record's first token, its head, is drawn anew and cannot be guessed; the
five behind it are looked up in a random table by the *two heads before it*. The target learns the table. The drafters
are of one layer and see too little of it to learn it: on their own they guess heads and table alike.

A block that fails at one token is wrong behind it as well. But the target, which verified it, said there what the
table has: these tokens hang on heads that were known. Plain DFlash forgets that. ReTrace carries the target's states
into the next block, and has only to read them. So `corrected` must gain, and `gated`, which carries the drafter's own
states alone, must not. If an arm of real text shows no gain while this one does, it is for want of a signal, not of
wires.

All arms of a context have the same stage 1 (no carried rounds), and all arms the same rows, blocks and steps.
`--fusions shared layerwise kv hybrid` asks whether the gain survives where the drafter reads the target in another
way. tau is measured on held-out texts by a roll-out, and in `generate()`, greedily, beside plain `generate()`, whose
text must be the same.
"""

import argparse
from pathlib import Path

import torch
from datasets import Dataset
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments, default_data_collator, set_seed

from retrace_hf import RetraceDrafter, RetraceTrainer, RetraceTrainingArguments
from retrace_hf.configuration_retrace import CONTEXT_FUSIONS, READS_TARGET_KV
from retrace_hf.evaluation import AcceptanceStats, bootstrap_ratio, roll_out, summarize, write_results
from retrace_hf.evaluation.results import provenance
from retrace_hf.files import write_text
from retrace_hf.measure import answer
from retrace_hf.terminal import run_command


PAD, END, MASK, FIRST_HEAD = range(4)
HEADS, WORDS, RECORD, RECORDS = 20, 64, 6, 16
PROMPT = 2 + RECORD  # the two heads that a text starts with, and a record
ARMS = ("none", "overwrite", "gated", "corrected")


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--output", type=Path, default=Path("runs/positive_control"))
    parser.add_argument("--fusions", nargs="+", choices=CONTEXT_FUSIONS, default=["shared"], help="context_fusion")
    parser.add_argument(
        "--arms", nargs="+", choices=ARMS, default=list(ARMS), help="none, the control, is always there"
    )
    parser.add_argument("--target_steps", type=int, default=400)
    parser.add_argument("--stage1_steps", type=int, default=60)
    parser.add_argument("--stage2_steps", type=int, default=200)
    parser.add_argument("--texts", type=int, default=200, help="held-out texts that are measured")
    parser.add_argument("--generated", type=int, default=20, help="of these, how many go through generate()")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for name in ("target_steps", "stage1_steps", "stage2_steps", "texts", "generated"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1.")
    args.arms = ["none", *(arm for arm in args.arms if arm != "none")]
    return args


# -- the language ----------------------------------------------------------------------------------------------------


def write_texts(count: int, seed: int) -> torch.Tensor:
    """`[count, 2 + RECORDS * RECORD]`. The table is the same for every seed."""
    table = torch.randint(WORDS, (HEADS, HEADS, RECORD - 1), generator=torch.Generator().manual_seed(0))
    heads = torch.randint(HEADS, (count, RECORDS + 2), generator=torch.Generator().manual_seed(seed))
    words = FIRST_HEAD + HEADS + table[heads[:, :-2], heads[:, 1:-1]]  # [count, RECORDS, RECORD - 1]
    records = torch.cat([FIRST_HEAD + heads[:, 2:, None], words], dim=-1).flatten(1)
    return torch.cat([FIRST_HEAD + heads[:, :2], records], dim=1)


# -- training --------------------------------------------------------------------------------------------------------


def train_target(args) -> Qwen3ForCausalLM:
    set_seed(args.seed)
    config = Qwen3Config(
        vocab_size=FIRST_HEAD + HEADS + WORDS,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=END,
    )
    texts = write_texts(32 * args.target_steps, seed=args.seed + 1).tolist()
    training = TrainingArguments(
        output_dir=str(args.output / "target"),
        max_steps=args.target_steps,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=0.1,
        per_device_train_batch_size=32,
        **common(args.seed, args.target_steps),
    )
    trainer = Trainer(
        model=Qwen3ForCausalLM(config),
        args=training,
        train_dataset=Dataset.from_dict({"input_ids": texts, "labels": texts}),
        data_collator=default_data_collator,
    )
    trainer.train()
    return trainer.model.eval().requires_grad_(False)


def common(seed: int, steps: int) -> dict:
    return {"save_strategy": "no", "report_to": [], "seed": seed, "logging_steps": max(1, steps // 5)}


def train_drafter(args, target, drafter: RetraceDrafter, name: str, steps: int, rounds: int) -> RetraceDrafter:
    texts = write_texts(2000, seed=args.seed + 2).tolist()
    mask = [0] * PROMPT + [1] * (len(texts[0]) - PROMPT)
    training = RetraceTrainingArguments(
        output_dir=str(args.output / name),
        max_steps=steps,
        learning_rate=2e-3,
        per_device_train_batch_size=16,
        num_anchors=8,
        num_carried_rounds=rounds,
        beta_warmup_steps=10,
        **common(args.seed, steps),
    )
    RetraceTrainer(
        model=drafter,
        target=target,
        args=training,
        train_dataset=Dataset.from_dict({"input_ids": texts, "loss_mask": [mask] * len(texts)}),
    ).train()
    return drafter.eval()


def train_arms(args, target, fusion: str) -> dict[str, RetraceDrafter]:
    """By name, `fusion/arm`: the drafters of one context."""
    # Taps behind the first two layers: what the target looks up later, the drafter has to look up itself.
    taps = {} if fusion == "kv" else {"target_layer_ids": [0, 1]}
    if fusion in READS_TARGET_KV:
        taps["target_kv_layer_ids"] = [0, 1]
    set_seed(args.seed)
    untrained = RetraceDrafter.from_target(
        target,
        mask_token_id=MASK,
        num_hidden_layers=1,
        block_size=16,
        conditioning="none",
        context_fusion=fusion,
        **taps,
    )
    stage1 = train_drafter(args, target, untrained, f"{fusion}/stage1", args.stage1_steps, rounds=0)
    drafters = {f"{fusion}/stage1": stage1}
    for arm in args.arms:
        set_seed(args.seed)
        drafter = RetraceDrafter.from_dflash(stage1, conditioning=arm)
        drafters[f"{fusion}/{arm}"] = train_drafter(
            args, target, drafter, f"{fusion}/{arm}", args.stage2_steps, rounds=2
        )
    return drafters


# -- measuring -------------------------------------------------------------------------------------------------------


def inputs_of(prompt: torch.Tensor) -> dict:
    return {"input_ids": prompt[None], "attention_mask": torch.ones_like(prompt[None])}


def generated(target, drafter, prompts: torch.Tensor, plain: list[list[int]]) -> dict:
    """Greedy generate() on each prompt, beside the text of plain generate()."""
    found = [answer(target, inputs_of(prompt), RECORD * RECORDS, drafter) for prompt in prompts]
    return {
        "texts": len(prompts),
        "equal_to_plain": sum(run.ids[0] == text for run, text in zip(found, plain)),
        "acceptance_length": AcceptanceStats.pooled(run.stats for run in found).acceptance_length,
    }


def measure(args, target, drafters: dict[str, RetraceDrafter]) -> dict:
    texts = write_texts(args.texts, seed=args.seed + 3).to(target.device)
    said = target(input_ids=texts[:, :-1]).logits.argmax(dim=-1)
    of_table = (torch.arange(1, texts.shape[1]) - 2) % RECORD != 0  # heads stand at 2, 8, 14, ...
    of_table[:PROMPT] = False
    right = (said == texts[:, 1:])[:, of_table].float().mean()
    results, rounds = {"target": {"right_where_the_table_says": float(right)}, "arms": {}}, {}
    prompts = texts[: args.generated, :PROMPT]
    plain = [answer(target, inputs_of(prompt), RECORD * RECORDS).ids[0] for prompt in prompts]
    for name, drafter in drafters.items():
        rounds[name] = roll_out(target, drafter, texts.tolist(), [PROMPT] * len(texts), RECORD * RECORDS)
        entry = results["arms"][name] = summarize(rounds[name], ["records"] * len(texts))["all"]
        entry["generate"] = generated(target, drafter, prompts, plain)
        print(name, round(entry["acceptance_length"], 3), entry["generate"], flush=True)
        if name.endswith("/none"):
            control = name
        elif not name.endswith("/stage1"):
            entry["over_control"] = bootstrap_ratio(rounds[name], rounds[control])
    return results


def markdown(results: dict) -> str:
    lines = ["| arm | tau | 95 % | over the control | 95 % | slots 1, 2, 3 | tau in generate() | text as plain |"]
    lines.append("|---|---:|---:|---:|---:|---|---:|---:|")
    for name, entry in results["arms"].items():
        (low, high), over, generate = entry["acceptance_length_interval"], entry.get("over_control"), entry["generate"]
        ratio = f"{over['ratio']:.3f} | {over['interval'][0]:.3f} to {over['interval'][1]:.3f}" if over else "|"
        slots = ", ".join(f"{share:.2f}" for share in entry["acceptance_at"][:3])
        lines.append(
            f"| {name} | {entry['acceptance_length']:.3f} | {low:.3f} to {high:.3f} | {ratio} | {slots} | "
            f"{generate['acceptance_length']:.3f} | {generate['equal_to_plain']} of {generate['texts']} |"
        )
    return "\n".join(lines) + "\n"


def main():
    args = parse_args()
    target = train_target(args)
    drafters = {}
    for fusion in args.fusions:
        drafters |= train_arms(args, target, fusion)
    with torch.inference_mode():
        results = measure(args, target, drafters)
    results["provenance"] = provenance([], seed=args.seed, threads=torch.get_num_threads())
    args.output.mkdir(parents=True, exist_ok=True)
    write_results(args.output / "results.json", results)
    write_text(args.output / "results.md", markdown(results))
    print(markdown(results))


if __name__ == "__main__":
    run_command(main, "positive_control")
