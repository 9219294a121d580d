"""Fits a drafter to one's own traffic with LoRA (peft). Run as it stands, or copy and change it.

    python examples/finetune_lora.py --source math --responses examples/data/responses_0.jsonl.gz \\
        --output_dir runs/math

trains on the rows of one kind, all but the first `--held_out` of it, then prints tau on the held-out rows of every
kind before and after, so that what it costs elsewhere is seen too. `output_dir` then holds the adapter alone; `--merge
FOLDER` also writes a drafter with the adapter in its weights. Either drafts as any other:

    drafter = RetraceDrafter.from_pretrained("runs/math")         # the base that the adapter names, and the adapter
    drafter = PeftModel.from_pretrained(base, "runs/math")        # on a base that is loaded already
    target.generate(**inputs, assistant_model=drafter)

`--responses` is what your target answered to your prompts (`retrace-hf prepare`). Ctrl-C finishes and saves the step;
the same command goes on.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import HfArgumentParser, set_seed

from retrace_hf import RetraceDataCollator, RetraceDrafter, RetraceTrainer, RetraceTrainingArguments
from retrace_hf.data.tokenize import tokenize_responses
from retrace_hf.evaluation import roll_out, summarize, write_results
from retrace_hf.evaluation.results import command_line, file_hash
from retrace_hf.targets import load_target
from retrace_hf.terminal import run_command
from retrace_hf.training import last_whole_checkpoint, loading_whole, saving_on_interrupt


# Every matrix of the drafter's layers, and those that read the target (which ones there are, context_fusion says).
BACKBONE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "fc"]
BACKBONE += ["k_proj_target", "v_proj_target", "hybrid_gate.gate", "hybrid_gate.delta"]
TRAJECTORY = ["trajectory.correction", "trajectory.value", "trajectory.gate"]


@dataclass
class ScriptArguments:
    responses: list[str] = field(metadata={"help": "Files of responses that the target wrote (.jsonl, .jsonl.gz)."})
    source: str = field(metadata={"help": "Kind of rows to train on, as in their column 'source'."})
    drafter: str = field(
        default=str(Path(__file__).parents[1] / "model_cards" / "retrace-smollm2-135m"),
        metadata={"help": "Hub id or folder of the drafter to start from."},
    )
    target: str = field(
        default="HuggingFaceTB/SmolLM2-135M-Instruct", metadata={"help": "Hub id or folder of the target."}
    )
    target_dtype: str = field(
        default="float32",
        metadata={"help": "dtype of the target's weights.", "choices": ["float32", "bfloat16", "float16"]},
    )
    held_out: int = field(default=40, metadata={"help": "First rows of every kind that tau is measured on."})
    max_length: int = field(default=1024, metadata={"help": "Tokens kept of a row."})
    lora_r: int = field(default=16, metadata={"help": "Rank of the adapter."})
    lora_alpha: int = field(default=32, metadata={"help": "The adapter is scaled by lora_alpha / lora_r."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout before the adapter."})
    target_modules: list[str] | None = field(
        default=None, metadata={"help": f"Names of the linear layers to adapt; {' '.join(BACKBONE)} by default."}
    )
    lora_trajectory: bool = field(
        default=True, metadata={"help": "Adapt the trajectory's matrices too, where the drafter has them."}
    )
    merge: str | None = field(
        default=None, metadata={"help": "Folder for a drafter with the adapter in its weights; none by default."}
    )


def split_by_kind(dataset, source: str, held_out: int) -> tuple[dict[str, list[dict]], list[int]]:
    """The first `held_out` rows of every kind, and the numbers of `source`'s other rows."""
    if held_out < 1:
        raise ValueError(f"--held_out is {held_out}; it must be at least 1.")
    numbers = defaultdict(list)
    for i, kind in enumerate(dataset["source"]):
        numbers[kind].append(i)
    if source not in numbers:
        raise ValueError(f"--source {source}: no row of that kind; there are {', '.join(sorted(numbers))}.")
    if len(numbers[source]) <= held_out:
        raise ValueError(
            f"--held_out {held_out} leaves none of the {len(numbers[source])} rows of {source} to train on; set less."
        )
    kept = {kind: [dataset[i] for i in of_kind[:held_out]] for kind, of_kind in sorted(numbers.items())}
    return kept, numbers[source][held_out:]


def with_lora(script: ScriptArguments, drafter: RetraceDrafter) -> PeftModel:
    modules = list(script.target_modules or BACKBONE)
    if script.lora_trajectory:
        there = {name for name, _ in drafter.named_modules()}
        modules += [name for name in TRAJECTORY if name in there]
    lora = LoraConfig(
        r=script.lora_r, lora_alpha=script.lora_alpha, lora_dropout=script.lora_dropout, target_modules=modules
    )
    return get_peft_model(drafter, lora)


def first_answer(row: dict) -> tuple[list[int], int]:
    """A row up to the end of its first answer, and where that begins."""
    start = row["loss_mask"].index(1)
    end = row["loss_mask"].index(0, start) if 0 in row["loss_mask"][start:] else len(row["loss_mask"])
    return row["input_ids"][:end], start


def measure(target, drafter, rows: dict[str, list[dict]]) -> dict[str, dict]:
    """What `generate()` would accept on the rows' answers, by kind and over all."""
    kinds = [kind for kind, of_kind in rows.items() for _ in of_kind]
    sequences, starts = zip(*(first_answer(row) for of_kind in rows.values() for row in of_kind))
    longest = max(len(ids) - start for ids, start in zip(sequences, starts))
    return summarize(roll_out(target, drafter.eval(), sequences, starts, max_new_tokens=longest), kinds)


def print_table(before: dict, after: dict, source: str):
    print(f"{'kind':<12}{'prompts':>8}{'tau before':>12}{'tau after':>11}{'change':>9}")
    for kind, was in before.items():
        old, new = was["acceptance_length"], after[kind]["acceptance_length"]
        note = "  (trained on)" if kind == source else ""
        print(f"{kind:<12}{was['prompts']:>8}{old:>12.3f}{new:>11.3f}{new / old - 1:>+9.1%}{note}")


def main():
    parser = HfArgumentParser((ScriptArguments, RetraceTrainingArguments), allow_abbrev=False)
    parser.set_defaults(beta_warmup_steps=0)  # the drafter reads all of its signal already
    script, args = parser.parse_args_into_dataclasses()
    set_seed(args.seed)
    with loading_whole(args) as device:
        target, tokenizer = load_target(script.target, dtype=getattr(torch, script.target_dtype), device=device)
        drafter = RetraceDrafter.from_pretrained(script.drafter, dtype=torch.float32)
    dataset = tokenize_responses(script.responses, tokenizer, max_length=script.max_length)
    held_out, trained_on = split_by_kind(dataset, script.source, script.held_out)
    trainer = RetraceTrainer(
        model=with_lora(script, drafter),
        target=target,
        args=args,
        train_dataset=dataset.select(trained_on),
        data_collator=RetraceDataCollator(pad_token_id=tokenizer.pad_token_id or 0),
    )
    trainer.model.print_trainable_parameters()
    with saving_on_interrupt(trainer) as interrupt:
        trainer.train(resume_from_checkpoint=last_whole_checkpoint(args.output_dir))
    interrupt.exit_if_steps_are_left(trainer.state)
    trainer.save_model()  # the adapter alone
    trainer.save_state()
    if not trainer.is_world_process_zero():
        return

    # As a user opens them: the base, and the adapter on it.
    drafter = RetraceDrafter.from_pretrained(script.drafter, dtype=torch.float32).to(args.device)
    before = measure(target, drafter, held_out)
    adapted = PeftModel.from_pretrained(drafter, args.output_dir)
    after = measure(target, adapted, held_out)
    print_table(before, after, script.source)
    data = {Path(path).name: file_hash(path) for path in script.responses}
    note = {"command": command_line(), "data": data, "source": script.source, "before": before, "after": after}
    write_results(Path(args.output_dir, "tau.json"), note)
    if script.merge is not None:
        adapted.merge_and_unload().save_pretrained(script.merge)


if __name__ == "__main__":
    run_command(main, "finetune_lora")
