"""Measures a training step, its memory or its speed.

    python examples/measure_training.py
    python examples/measure_training.py --speed --output speed.md

Memory: does it grow with anchors x block x vocabulary? A tiny body under Qwen3-8B's vocabulary, so that the logits are
nearly all there is. For each number of anchors and each `loss_chunk_size`: the peak of what a step (rollout, loss,
backward) makes, beside the size of all its logits. On a GPU the peak is the allocator's; on a CPU that of the tensors
alive at once. The third column is the same step under a vocabulary of 1,000: attention and states, which grow with the
anchors whatever the head.

Speed: drafted blocks a second (every anchor counts once a round) on SmolLM2's own answers, in stage 1 and stage 2, and
the share of each part of a step. "Products alone" is what would be reached if a step took no longer than its matrix
products (mm, addmm, bmm) take when they are run again by themselves, on random numbers. Where other programs share the
machine, `OMP_NUM_THREADS=1` and `--processor-time` measure what this one alone takes of it.
"""

import argparse
import itertools
import platform
import re
import subprocess
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Qwen3Config, TrainerCallback, set_seed

from retrace_hf import RetraceDataCollator, RetraceDrafter, RetraceTrainer, RetraceTrainingArguments
from retrace_hf.data.features import TargetFeatures, features_key
from retrace_hf.data.tokenize import tokenize_responses
from retrace_hf.draft_vocabulary import DraftVocabulary
from retrace_hf.measure import PeakMemory, timed
from retrace_hf.targets import load_target
from retrace_hf.training import trainer as trainer_module


MIB = 2**20


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--speed", action="store_true", help="measure the speed, not the memory")
    parser.add_argument("--anchors", type=int, nargs="+", help="a text; 16, 64 and 256, or those of the stage")
    parser.add_argument("--chunks", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--vocab-size", type=int, default=151_936)
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--length", type=int, default=512, help="tokens of the text")
    parser.add_argument("--num-carried-rounds", type=int, default=1)
    parser.add_argument("--soft-share", type=float, default=0.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    speed = parser.add_argument_group("with --speed")
    speed.add_argument("--stages", type=int, nargs="+", default=[1, 2], choices=[1, 2])
    speed.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    speed.add_argument("--rows", type=int, help="texts a step; those of the stage by default")
    speed.add_argument("--speed-chunk", type=int, default=256, help="loss_chunk_size")
    speed.add_argument("--stage1-soft-share", type=float, default=0.0, help="soft_share of stage 1; stage 2 has 0.5")
    speed.add_argument("--muon", action="store_true")
    speed.add_argument("--steps", type=int, default=3, help="steps that are timed, behind one that is not")
    speed.add_argument("--processor-time", action="store_true", help="seconds of this process, not of the clock")
    speed.add_argument("--features-dir", help="where to keep the target's features; a temporary folder by default")
    speed.add_argument("--output", help="file for the table")
    return parser.parse_args()


def make_target(args, vocab_size: int):
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=args.hidden_size,
        intermediate_size=2 * args.hidden_size,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    return AutoModelForCausalLM.from_config(config).to(args.device)


def peak_of_step(args, target, anchors: int, chunk_size: int) -> int:
    """Bytes at the peak, above those of the models."""
    mask_token_id = target.config.vocab_size - 1
    drafter = RetraceDrafter.from_target(
        target, mask_token_id=mask_token_id, num_hidden_layers=2, block_size=args.block_size
    ).train()
    with tempfile.TemporaryDirectory() as folder:
        trainer = RetraceTrainer(
            model=drafter,
            target=target,
            args=RetraceTrainingArguments(
                output_dir=folder,
                num_anchors=anchors,
                loss_chunk_size=chunk_size,
                num_carried_rounds=args.num_carried_rounds,
                soft_share=args.soft_share,
                use_cpu=args.device == "cpu",
                report_to="none",
            ),
        )
    ids = torch.randint(0, mask_token_id, (args.length,)).tolist()
    batch = RetraceDataCollator()([{"input_ids": ids, "loss_mask": [1] * args.length}])
    batch = {name: tensor.to(args.device) for name, tensor in batch.items()}
    if args.device == "cpu":
        with PeakMemory() as memory:
            trainer.compute_loss(drafter, batch).backward()
        return memory.peak
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    trainer.compute_loss(drafter, batch).backward()
    return torch.cuda.max_memory_allocated() - before


# -- speed -----------------------------------------------------------------------------------------------------------

RESPONSES = Path(__file__).parent / "data" / "responses_0.jsonl.gz"
TAPS = [1, 8, 14, 20, 27]
# Rows and anchors a step, as in smollm2.sh.
STAGES = {1: (8, 64), 2: (6, 24)}
PARTS = ["reading", "drafting", "loss", "verification", "backward", "optimizer", "other"]
PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}


class Products(TorchDispatchMode):
    """Notes the matrix products made inside, and runs them again."""

    def __init__(self, clock):
        super().__init__()
        self.noted, self.clock = Counter(), clock

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in PRODUCTS:
            self.noted[function, tuple((a.shape, a.stride(), a.dtype) for a in args)] += 1
        return function(*args, **(kwargs or {}))

    def seconds(self) -> float:
        """What all of them take, each kind timed over three calls behind one that is not."""
        total = 0.0
        for (function, kinds), count in self.noted.items():
            args = [torch.empty_strided(size, stride, dtype=dtype).normal_() for size, stride, dtype in kinds]
            function(*args)
            start = self.clock()
            for _ in range(3):
                function(*args)
            total += count * (self.clock() - start) / 3
        return total


class StepTimes(TrainerCallback):
    """Notes when each step ends, and the products of the first one, which is not timed."""

    def __init__(self, clock):
        self.ends, self.clock, self.products = [], clock, Products(clock)

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 0:
            self.products.__enter__()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            self.products.__exit__(None, None, None)
        self.ends.append(self.clock())


def speed_trainer(args, stage: int, dtype: str, folder: str):
    """A trainer of SmolLM2's drafter, with cached features in stage 1 and the target beside it in stage 2."""
    rows, anchors = STAGES[stage]
    rows, anchors = args.rows or rows, args.anchors[0] if args.anchors else anchors
    set_seed(0)
    target, tokenizer = load_target(dtype=getattr(torch, dtype))
    everything = tokenize_responses([RESPONSES], tokenizer, max_length=1024)
    dataset = everything.select(range(rows * (args.steps + 1)))
    dataset = dataset.add_column("row", list(range(len(dataset))))
    soft_share = 0.5 if stage == 2 else args.stage1_soft_share
    features = None
    if stage == 1:
        what = {"target_layer_ids": TAPS, "with_last": soft_share > 0}
        place = Path(args.features_dir or folder, features_key(target, dataset, **what)[:12])
        features = TargetFeatures.build_or_open(target, dataset, path=place, progress=False, **what)
    drafter = RetraceDrafter.from_target(
        target,
        mask_token_id=tokenizer.convert_tokens_to_ids("<empty_output>"),
        num_hidden_layers=3,
        block_size=8,
        target_layer_ids=TAPS,
        init_from_target=True,
        conditioning="none" if stage == 1 else "corrected",
    )
    trainer = RetraceTrainer(
        model=drafter,
        target=target,
        args=RetraceTrainingArguments(
            output_dir=folder,
            max_steps=args.steps + 1,
            per_device_train_batch_size=rows,
            num_anchors=anchors,
            num_carried_rounds=0 if stage == 1 else 2,
            loss_on_seen_tokens=stage == 1,
            loss_type="dpace",
            loss_chunk_size=args.speed_chunk,
            soft_share=soft_share,
            muon=args.muon,
            bf16=dtype == "bfloat16",
            use_cpu=args.device == "cpu",
            save_strategy="no",
            disable_tqdm=True,
            report_to="none",
        ),
        train_dataset=dataset,
        data_collator=RetraceDataCollator(pad_token_id=tokenizer.pad_token_id or 0, features=features),
    )
    if stage == 1:  # the tokens of all answers, whose softmax is wider than that of these few
        answers = (t for row in everything for t, m in zip(row["input_ids"], row["loss_mask"]) if m)
        trainer._loss_vocabulary = DraftVocabulary(
            target, torch.tensor(sorted(set(answers))), torch.bfloat16 if dtype == "bfloat16" else None
        )
    return trainer


def speed_row(args, stage: int, dtype: str) -> str:
    """One row of the table: a few steps of real training, with a clock round each part."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        trainer = speed_trainer(args, stage, dtype, folder)
        clock = time.process_time if args.processor_time else time.perf_counter
        times = StepTimes(clock)
        trainer.add_callback(times)
        trainer.create_optimizer()
        logs = {part: [] for part in PARTS[:-1]}
        drafted, real = [], trainer_module.draft_blocks

        def counting(model, embedding, ids, features, blocks, *rest):
            drafted.append((clock(), int(blocks.valid.sum())))
            return real(model, embedding, ids, features, blocks, *rest)

        trainer_module.draft_blocks = counting
        stack.callback(setattr, trainer_module, "draft_blocks", real)
        for owner, name, part in (
            (trainer, "get_batch_samples", "reading"),  # cached features
            (trainer_module, "read_clean_text", "reading"),
            (trainer_module, "draft_blocks", "drafting"),
            (trainer, "_block_loss", "loss"),
            (trainer_module, "verify_blocks", "verification"),
            (trainer.accelerator, "backward", "backward"),
            (trainer.accelerator, "clip_grad_norm_", "optimizer"),
            (trainer.optimizer, "step", "optimizer"),
        ):
            stack.enter_context(timed(owner, name, logs[part], clock))
        trainer.train()
    start, end = times.ends[0], times.ends[-1]
    blocks = sum(count for moment, count in drafted if start <= moment < end)
    seconds = {part: sum(b - a for a, b in log if start <= a < end) for part, log in logs.items()}
    seconds["other"] = end - start - sum(seconds.values())
    rows, anchors = trainer.args.per_device_train_batch_size, trainer.args.num_anchors
    cells = [stage, dtype, rows, anchors, f"{(end - start) / args.steps:.2f}", f"**{blocks / (end - start):.0f}**"]
    cells += [f"{blocks / args.steps / times.products.seconds():.0f}"]
    return "| " + " | ".join(map(str, cells + [f"{100 * seconds[p] / (end - start):.0f} %" for p in PARTS])) + " |"


def processor() -> str:
    """Model, threads and the matrix extensions of this machine's processor."""
    try:
        listed = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    model = re.search(r"Model name:\s*(.*)", listed)
    flags = sorted(set(re.findall(r"\b(amx_\w+|avx512_bf16|avx512f)\b", listed)))
    name = model[1] if model else platform.machine()
    return f"{name} ({', '.join(flags) or 'no AVX-512'}), {torch.get_num_threads()} threads"


def measure_speed(args):
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    lines = [
        f"{processor()}; {versions}; loss_chunk_size {args.speed_chunk}, soft_share {args.stage1_soft_share:g} in "
        f"stage 1 and 0.5 in stage 2, {'Muon' if args.muon else 'AdamW'}; {args.steps} steps of {RESPONSES.name}, "
        f"{'processor' if args.processor_time else 'clock'} time.\n",
        "| stage | dtype | texts | anchors | s a step | blocks/s | blocks/s, products alone | "
        + " | ".join(PARTS)
        + " |",
        "|--:|---|" + "--:|" * (5 + len(PARTS)),
    ]
    print(*lines, sep="\n", flush=True)
    for stage, dtype in itertools.product(args.stages, args.dtypes):
        lines.append(speed_row(args, stage, dtype))
        print(lines[-1], flush=True)
    if args.output:
        Path(args.output).write_text("\n".join(lines) + "\n")


# -- memory ----------------------------------------------------------------------------------------------------------


def measure_memory(args):
    torch.manual_seed(0)
    anchor_counts = args.anchors or [16, 64, 256]
    target, body = make_target(args, args.vocab_size), make_target(args, 1000)
    print(
        f"Vocabulary {args.vocab_size:,}, hidden size {args.hidden_size}, blocks of {args.block_size}, "
        f"{args.num_carried_rounds} carried rounds, soft_share {args.soft_share}, {args.device}. MiB:\n"
    )
    chunks = [f"peak, chunk {chunk}" for chunk in args.chunks]
    print("| anchors | all logits of a round | peak, vocabulary of 1,000 | " + " | ".join(chunks) + " |")
    print("|--:" * (3 + len(chunks)) + "|")
    for anchors in anchor_counts:
        logits = min(anchors, args.length - 1) * (args.block_size - 1) * args.vocab_size * 4
        peaks = [peak_of_step(args, body, anchors, args.chunks[0])]
        peaks += [peak_of_step(args, target, anchors, chunk) for chunk in args.chunks]
        print(
            f"| {anchors} | {logits / MIB:,.0f} | " + " | ".join(f"{p / MIB:,.0f}" for p in peaks) + " |", flush=True
        )


def main():
    args = parse_args()
    if args.speed:
        measure_speed(args)
    else:
        measure_memory(args)


if __name__ == "__main__":
    main()
