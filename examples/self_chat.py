"""Lets a target chat with itself: training text for a drafter where there are no prompts, or too few.

    python examples/self_chat.py --num_tokens 600000 --output_dir runs/self_chat
    python examples/train_retrace.py --responses runs/self_chat/*.jsonl.gz --output_dir runs/stage1 ...

On a CPU with bfloat16 instructions `--dtype bfloat16` is several times as fast. A stopped run goes on with the
same command.
"""

import json
from dataclasses import dataclass, field

import torch
from transformers import HfArgumentParser

from retrace_hf.data.prompts import read_prompts
from retrace_hf.data.responses import read_responses
from retrace_hf.data.self_chat import self_chat
from retrace_hf.targets import load_target
from retrace_hf.terminal import run_command


@dataclass
class Arguments:
    output_dir: str = field(metadata={"help": "Folder for the shards."})
    num_tokens: int = field(metadata={"help": "Tokens wanted, answers and all else."})
    target: str = field(default="HuggingFaceTB/SmolLM2-135M-Instruct", metadata={"help": "Hub id or folder."})
    dtype: str = field(
        default="float32",
        metadata={"help": "dtype of the target's weights.", "choices": ["float32", "bfloat16", "float16"]},
    )
    device: str = field(default="cpu", metadata={"help": "Where the target runs."})
    batch_size: int = field(default=128, metadata={"help": "Chats at once, and of a shard."})
    length: int = field(default=320, metadata={"help": "Tokens of a chat."})
    seed: int = field(default=0, metadata={"help": "Seed of the users' words."})
    prompts: str | None = field(
        default=None, metadata={"help": "File of prompts (.jsonl) that users start with; dealt out over the chats."}
    )
    answered: list[str] = field(
        default_factory=list, metadata={"help": "Files of responses whose prompts are left out."}
    )


def main():
    (args,) = HfArgumentParser(Arguments, allow_abbrev=False).parse_args_into_dataclasses()
    if args.answered and args.prompts is None:
        raise ValueError("--answered goes with --prompts.")
    target, tokenizer = load_target(args.target, dtype=getattr(torch, args.dtype), device=args.device)
    sizes = {"batch_size": args.batch_size, "length": args.length, "seed": args.seed}
    prompts = None
    if args.prompts is not None:
        answered = {row["id"] for path in args.answered for row in read_responses(path)}
        prompts = [row["prompt"] for row in read_prompts(args.prompts) if row["id"] not in answered]
    print(json.dumps(self_chat(target, tokenizer, args.output_dir, args.num_tokens, prompts=prompts, **sizes)))


if __name__ == "__main__":
    run_command(main, "self_chat")
