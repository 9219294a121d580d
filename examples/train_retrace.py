"""Trains a drafter for a target on responses that the target wrote. Run as it stands, or copy and change it.

Stage 1, DFlash, on target features computed once:

    python examples/train_retrace.py --conditioning none --num_carried_rounds 0 \
        --responses examples/data/responses_0.jsonl.gz --features_dir runs/features --output_dir runs/stage1

Stage 2, ReTrace, from it (the target runs beside the drafter):

    python examples/train_retrace.py --init_from runs/stage1 --conditioning corrected --num_carried_rounds 2 \
        --responses examples/data/responses_0.jsonl.gz --output_dir runs/corrected

The SFT control is stage 2 with `--conditioning none`: the same blocks, without the signal. More of stage 2 starts from
a ReTrace (`--init_from runs/corrected`): with its own conditioning the signal's modules go on as they are, with `none`
they go and its backbone trains alone, with another one that one's start anew.

What the drafter reads of the target is `--context_fusion`: shared (DFlash), layerwise (DFlare), kv or hybrid (KVShot).
It goes with stage 1; with `--init_from` it turns a DFlash into the start of another (RetraceDrafter.from_dflash).

Held-out prompts are drafted while it trains, with the best checkpoint kept and an end when tau rises no more, by

    --eval_prompts held_out.jsonl --eval_strategy steps --eval_steps 100 --save_steps 100 \\
        --metric_for_best_model eval_tau --load_best_model_at_end True --early_stopping_patience 3

On several GPUs, with one of the configs in examples/accelerate:

    accelerate launch --config_file examples/accelerate/ddp.yaml examples/train_retrace.py ...

A run that was stopped goes on with the same command. Ctrl-C finishes and saves the step.
"""

import json
from dataclasses import dataclass, field, fields
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import EarlyStoppingCallback, HfArgumentParser, set_seed

from retrace_hf import RetraceDataCollator, RetraceDrafter, RetraceTrainer, RetraceTrainingArguments
from retrace_hf.configuration_retrace import CONTEXT_FUSIONS, CONTEXT_KV_ROPES
from retrace_hf.data.features import TargetFeatures, features_key
from retrace_hf.data.prompts import read_eval_prompts
from retrace_hf.data.tokenize import tokenize_responses
from retrace_hf.draft_vocabulary import most_frequent_tokens
from retrace_hf.evaluation import write_results
from retrace_hf.evaluation.results import command_line, file_hash, rounded
from retrace_hf.targets import load_target
from retrace_hf.terminal import run_command
from retrace_hf.training import last_whole_checkpoint, loading_whole, saving_on_interrupt
from retrace_hf.training.rollout import read_clean_text


MASK_TOKEN = "<empty_output>"  # an unused special token of SmolLM2
NOTED = (
    *("max_steps", "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate"),
    *("lr_scheduler_type", "warmup_steps", "weight_decay", "bf16", "muon", "trajectory_learning_rate"),
    *("num_anchors", "num_carried_rounds", "beta_warmup_steps", "loss_type", "soft_share", "loss_on_seen_tokens"),
    *(
        "loss_gamma",
        "loss_gamma_growth",
        "dpace_alpha",
        "optim",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "max_grad_norm",
    ),
)

NOTED_OF_SCRIPT = (
    *("target", "target_dtype", "conditioning", "num_draft_layers", "block_size", "target_layer_ids"),
    *("context_fusion", "target_kv_layer_ids", "context_kv_rope", "draft_vocab_size"),
    *("init_from_target", "mask_token", "max_length", "limit", "early_stopping_patience"),
)


@dataclass
class ScriptArguments:
    responses: list[str] = field(metadata={"help": "Files of responses that the target wrote (.jsonl, .jsonl.gz)."})
    target: str = field(
        default="HuggingFaceTB/SmolLM2-135M-Instruct", metadata={"help": "Hub id or folder of the target."}
    )
    target_dtype: str = field(
        default="float32",
        metadata={
            "help": "dtype of the target's weights; features are read in it.",
            "choices": ["float32", "bfloat16", "float16"],
        },
    )
    init_from: str | None = field(
        default=None, metadata={"help": "A DFlash or ReTrace drafter to start from; a new one by default."}
    )
    conditioning: str = field(
        default="corrected",
        metadata={"help": "How the signal enters.", "choices": ["none", "overwrite", "gated", "corrected"]},
    )
    num_draft_layers: int | None = field(default=None, metadata={"help": "Layers of a new drafter; 3 by default."})
    block_size: int | None = field(
        default=None, metadata={"help": "Slots of a block; 8 for a new drafter, --init_from's own for another."}
    )
    target_layer_ids: list[int] | None = field(default=None, metadata={"help": "Tapped layers, of a new drafter."})
    context_fusion: str | None = field(
        default=None,
        metadata={
            "help": "What is read of the target; shared for a new drafter, --init_from's own for another.",
            "choices": list(CONTEXT_FUSIONS),
        },
    )
    target_kv_layer_ids: list[int] | None = field(
        default=None, metadata={"help": "Layers whose keys and values kv and hybrid read; 3 evenly spaced ones."}
    )
    context_kv_rope: str | None = field(
        default=None,
        metadata={"help": "RoPE on these keys; kept by default.", "choices": list(CONTEXT_KV_ROPES)},
    )
    draft_vocab_size: int | None = field(
        default=None,
        metadata={"help": "Draft among so many tokens, those that stand most often in the answers; all by default."},
    )
    mask_token: str | None = field(
        default=None, metadata={"help": "Token for slots, of a new drafter; <empty_output> by default."}
    )
    init_from_target: bool | None = field(
        default=None, metadata={"help": "Start a new drafter from the target's layers; True by default."}
    )
    features_dir: str | None = field(
        default=None, metadata={"help": "Folder for target features computed once; without it the target runs online."}
    )
    max_length: int = field(default=1024, metadata={"help": "Tokens kept of a row."})
    limit: int | None = field(default=None, metadata={"help": "Rows read at most."})
    eval_prompts: str | None = field(
        default=None, metadata={"help": "File of held-out prompts that every evaluation drafts; it logs eval_tau."}
    )
    early_stopping_patience: int | None = field(
        default=None, metadata={"help": "Evaluations without a better --metric_for_best_model after which to stop."}
    )


def make_drafter(script: ScriptArguments, target, tokenizer, dataset) -> RetraceDrafter:
    context = {name: getattr(script, name) for name in ("context_fusion", "target_kv_layer_ids", "context_kv_rope")}
    context = {name: value for name, value in context.items() if value is not None}
    tokens = None
    if script.draft_vocab_size is not None:
        tokens = most_frequent_tokens(dataset, script.draft_vocab_size, always=end_tokens(target, tokenizer))
    if script.init_from is not None:
        fixed = ["num_draft_layers", "target_layer_ids", "mask_token", "init_from_target"]
        if script.context_fusion is None:
            fixed += ["target_kv_layer_ids", "context_kv_rope"]
        given = [f"--{name}" for name in fixed if getattr(script, name) is not None]
        if given:
            raise ValueError(f"{', '.join(given)} go with a new drafter; --init_from brings its own.")
        changes = {} if script.block_size is None else {"block_size": script.block_size}
        start, rows = script.init_from, None
        if script.context_fusion == "layerwise":  # it starts from a fit to what this one taps
            start = RetraceDrafter.from_dflash(start, target=target, conditioning=script.conditioning)
            rows = tapped_rows(start, target, dataset) if start.config.context_fusion == "shared" else None
        return RetraceDrafter.from_dflash(
            start,
            target=target,
            context_rows=rows,
            draft_token_ids=tokens,
            conditioning=script.conditioning,
            **context,
            **changes,
        )
    mask_token = script.mask_token or MASK_TOKEN
    if mask_token not in tokenizer.get_vocab():
        special = ", ".join(list(dict.fromkeys(tokenizer.all_special_tokens))[:20]) or "none"
        raise ValueError(
            f"--mask_token {mask_token!r} is not in the vocabulary of {script.target}; name a token that its texts "
            f"never hold, such as an unused special one (its special tokens: {special})."
        )
    return RetraceDrafter.from_target(
        target,
        mask_token_id=tokenizer.convert_tokens_to_ids(mask_token),
        num_hidden_layers=3 if script.num_draft_layers is None else script.num_draft_layers,
        block_size=8 if script.block_size is None else script.block_size,
        target_layer_ids=script.target_layer_ids,
        init_from_target=script.init_from_target is not False,
        draft_token_ids=tokens,
        conditioning=script.conditioning,
        **context,
    )


def end_tokens(target, tokenizer) -> set[int]:
    """The tokens that end an answer, by the target's generation config and its tokenizer."""
    ends = target.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    return {*ends, tokenizer.eos_token_id} - {None}


def tapped_rows(dflash: RetraceDrafter, target, dataset, num_tokens: int = 4096) -> torch.Tensor:
    """What a DFlash taps of the target on the first texts."""
    rows, count = [], 0
    for row in dataset:
        if count >= num_tokens:
            break
        ids = torch.tensor([row["input_ids"]], device=target.device)
        rows.append(read_clean_text(target, ids, dflash.config.target_layer_ids).features[0])
        count += ids.shape[1]
    return torch.cat(rows)


def read_held_out(path: str | None) -> list[dict] | None:
    """First turns of evaluation prompts, with their kind."""
    if path is None:
        return None
    return [{"prompt": row["turns"][0], "source": row["source"]} for row in read_eval_prompts(path)]


def weights_of(init_from: str | None) -> str | None:
    """Hash of a folder's weights; a Hub id as it stands."""
    weights = Path(init_from or "", "model.safetensors")
    return file_hash(weights) if init_from and weights.is_file() else init_from


def describe_run(script: ScriptArguments, args: RetraceTrainingArguments) -> dict:
    """What this drafter is trained from and with; kept as training.json, for results and cards."""
    return {
        "seed": args.seed,
        "init_from": weights_of(script.init_from),
        "data": {Path(path).name: file_hash(path) for path in script.responses},
        "script": {name: getattr(script, name) for name in NOTED_OF_SCRIPT},
        "arguments": {name: getattr(args, name) for name in NOTED},
    }


def has_ended(folder: Path, run: dict) -> bool:
    """Whether this run has ended here. Raises where the folder holds a run made otherwise: going on would mix the two
    and call it this one."""
    note = folder / "training.json"
    begun = any(folder.glob("checkpoint-*")) or (folder / "model.safetensors").is_file()
    if not note.is_file() or not begun:
        return False
    before, now = json.loads(note.read_text()), json.loads(json.dumps(rounded(run)))
    flat = [
        {**r["script"], **r["arguments"], **{k: r[k] for k in ("seed", "init_from", "data")}} for r in (before, now)
    ]
    # A note from before there was an option means its default.
    defaults = {f.name: f.default for f in (*fields(ScriptArguments), *fields(RetraceTrainingArguments))}
    flat[0] = {name: flat[0].get(name, defaults.get(name)) for name in flat[1]}
    changed = [f"{name} was {flat[0][name]}, now {value}" for name, value in flat[1].items() if flat[0][name] != value]
    if changed:
        raise ValueError(
            f"{folder} holds a run with other options ({'; '.join(changed)}); give another --output_dir, or delete it."
        )
    return before["finished"]


def main():
    parser = HfArgumentParser((ScriptArguments, RetraceTrainingArguments), allow_abbrev=False)
    script, args = parser.parse_args_into_dataclasses()
    checkpoint = last_whole_checkpoint(args.output_dir)
    folder, run = Path(args.output_dir), describe_run(script, args)
    if has_ended(folder, run):
        print(f"{folder} is finished; nothing is left to do.")
        return
    folder.mkdir(parents=True, exist_ok=True)  # what cannot be written is known before anything is computed
    if args.process_index == 0:
        print(f"Going on from {checkpoint}." if checkpoint else f"Starting anew: {folder} holds no whole checkpoint.")
    set_seed(args.seed)
    with loading_whole(args) as device:
        target, tokenizer = load_target(script.target, dtype=getattr(torch, script.target_dtype), device=device)
        dataset = tokenize_responses(script.responses, tokenizer, max_length=script.max_length, limit=script.limit)
        dataset = dataset.add_column("row", list(range(len(dataset))))
        drafter = make_drafter(script, target, tokenizer, dataset)

    features = None
    if script.features_dir is not None:
        config = drafter.config
        what = {"target_layer_ids": config.target_layer_ids, "with_last": args.soft_share > 0}
        what["target_kv_layer_ids"] = config.target_kv_layer_ids
        # Each dataset and target has its own folder, so that a small trial leaves the large features alone.
        place = Path(script.features_dir, features_key(target, dataset, **what)[:12])
        features = TargetFeatures.build_or_open(target, dataset, path=place, **what)
    trainer = RetraceTrainer(
        model=drafter,
        target=target,
        args=args,
        train_dataset=dataset,
        data_collator=RetraceDataCollator(pad_token_id=tokenizer.pad_token_id or 0, features=features),
        eval_prompts=read_held_out(script.eval_prompts),
        callbacks=[EarlyStoppingCallback(script.early_stopping_patience)] if script.early_stopping_patience else None,
        processing_class=tokenizer,
    )

    def keep_note(finished: bool):
        if trainer.is_world_process_zero():
            folder.mkdir(parents=True, exist_ok=True)
            versions = {name: version(name) for name in ("torch", "transformers")}
            note = {**run, "command": command_line(), "versions": versions, "finished": finished}
            write_results(folder / "training.json", note)

    keep_note(finished=False)
    with saving_on_interrupt(trainer) as interrupt:
        metrics = trainer.train(resume_from_checkpoint=checkpoint).metrics
    interrupt.exit_if_steps_are_left(trainer.state)
    if trainer.is_world_process_zero():
        print(json.dumps(metrics))
    trainer.save_state()
    trainer.save_model()
    keep_note(finished=True)
    if args.push_to_hub:
        trainer.push_to_hub()  # save_model has pushed; now the note says that the run has ended


if __name__ == "__main__":
    run_command(main, "train_retrace")
