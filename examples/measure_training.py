"""Measures the memory of a training step: does it grow with anchors x block x vocabulary?

    python examples/measure_training.py

A tiny body under Qwen3-8B's vocabulary, so that the logits are nearly all there is. For each number of anchors and
each `loss_chunk_size`: the peak of what a step (rollout, loss, backward) makes, beside the size of all its logits. On
a GPU the peak is the allocator's; on a CPU that of the tensors alive at once. The third column is the same step under
a vocabulary of 1,000: attention and states, which grow with the anchors whatever the head.
"""

import argparse
import tempfile

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from retrace_hf import RetraceDataCollator, RetraceDrafter, RetraceTrainer, RetraceTrainingArguments
from retrace_hf.measure import PeakMemory


MIB = 2**20


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--anchors", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--chunks", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--vocab-size", type=int, default=151_936)
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--length", type=int, default=512, help="tokens of the text")
    parser.add_argument("--num-carried-rounds", type=int, default=1)
    parser.add_argument("--soft-share", type=float, default=0.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
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


def main():
    args = parse_args()
    torch.manual_seed(0)
    target, body = make_target(args, args.vocab_size), make_target(args, 1000)
    print(
        f"Vocabulary {args.vocab_size:,}, hidden size {args.hidden_size}, blocks of {args.block_size}, "
        f"{args.num_carried_rounds} carried rounds, soft_share {args.soft_share}, {args.device}. MiB:\n"
    )
    chunks = [f"peak, chunk {chunk}" for chunk in args.chunks]
    print("| anchors | all logits of a round | peak, vocabulary of 1,000 | " + " | ".join(chunks) + " |")
    print("|--:" * (3 + len(chunks)) + "|")
    for anchors in args.anchors:
        logits = min(anchors, args.length - 1) * (args.block_size - 1) * args.vocab_size * 4
        peaks = [peak_of_step(args, body, anchors, args.chunks[0])]
        peaks += [peak_of_step(args, target, anchors, chunk) for chunk in args.chunks]
        print(
            f"| {anchors} | {logits / MIB:,.0f} | " + " | ".join(f"{p / MIB:,.0f}" for p in peaks) + " |", flush=True
        )


if __name__ == "__main__":
    main()
