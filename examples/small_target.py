"""Trains a small chat model from nothing on the texts of responses: a target to try ideas on in minutes.

    python examples/small_target.py --responses examples/data/responses_0.jsonl.gz --output_dir runs/small/target
    retrace-hf prepare examples/data/prompts.jsonl --target runs/small/target --output-dir runs/small/data
    python examples/ablation.py --target runs/small/target --mask_token "<|mask|>" \
        --responses runs/small/data/tokens_*.jsonl.gz --output_dir runs/small/ablation

Its tokenizer is a byte-level BPE of the same texts, with a chat template and an unused `<|mask|>`; its layers are
Qwen3's. What it says is worth little, but it says it with conviction, which is what a drafter is asked to predict. A
run that was stopped goes on with the same command.
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    HfArgumentParser,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from retrace_hf.data.responses import read_responses
from retrace_hf.terminal import run_command
from retrace_hf.training import last_whole_checkpoint


SPECIAL_TOKENS = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|mask|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass
class ScriptArguments:
    responses: list[str] = field(metadata={"help": "Files of responses with their messages (.jsonl, .jsonl.gz)."})
    hidden_size: int = field(default=256, metadata={"help": "A multiple of 64."})
    num_hidden_layers: int = field(default=6, metadata={"help": "Layers."})
    vocab_size: int = field(default=2048, metadata={"help": "Tokens of the tokenizer that is made."})
    row_length: int = field(default=512, metadata={"help": "Tokens of a training row; chats run on over its end."})

    def __post_init__(self):
        if self.hidden_size < 64 or self.hidden_size % 64:
            raise ValueError(f"--hidden_size is {self.hidden_size}; heads have 64 channels, give a multiple of 64.")
        least = len(SPECIAL_TOKENS) + 256
        if self.vocab_size < least:
            raise ValueError(f"--vocab_size is {self.vocab_size}; the bytes and special tokens alone are {least}.")


def read_chats(paths: list[str]) -> list[list[dict]]:
    """The messages of rows that have some."""
    chats = [row["messages"] for path in paths for row in read_responses(path) if "messages" in row]
    if not chats:
        raise ValueError(f"There is no row with messages in {', '.join(paths)}.")
    return chats


def train_tokenizer(chats: list[list[dict]], vocab_size: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((message["content"] for chat in chats for message in chat), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")
    fast.add_special_tokens({"extra_special_tokens": SPECIAL_TOKENS[1:]})
    fast.chat_template = CHAT_TEMPLATE
    return fast


def pack(chats: list[list[dict]], tokenizer, row_length: int) -> Dataset:
    """Chats one behind the other, cut into rows of one length."""
    texts = tokenizer.apply_chat_template(chats, tokenize=False)
    tokens = [token for ids in tokenizer(texts, add_special_tokens=False)["input_ids"] for token in ids]
    rows = [tokens[i : i + row_length] for i in range(0, len(tokens) - row_length + 1, row_length)]
    return Dataset.from_dict({"input_ids": rows, "labels": rows})


def main():
    script, args = HfArgumentParser(
        (ScriptArguments, TrainingArguments), allow_abbrev=False
    ).parse_args_into_dataclasses()
    folder = Path(args.output_dir)
    if (folder / "tokenizer.json").is_file():  # written last
        print(f"{folder} is finished; nothing is left to do.")
        return
    set_seed(args.seed)
    chats = read_chats(script.responses)
    tokenizer = train_tokenizer(chats, script.vocab_size)
    end = tokenizer.eos_token_id
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=script.hidden_size,
        intermediate_size=3 * script.hidden_size,
        num_hidden_layers=script.num_hidden_layers,
        num_attention_heads=script.hidden_size // 64,
        num_key_value_heads=max(1, script.hidden_size // 128),
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=end,
    )
    model = Qwen3ForCausalLM(config)
    dataset = pack(chats, tokenizer, script.row_length)
    print(f"{model.num_parameters() / 1e6:.1f} M parameters, {len(dataset) * script.row_length} tokens")
    trainer = Trainer(model=model, args=args, train_dataset=dataset, data_collator=default_data_collator)
    trainer.train(resume_from_checkpoint=last_whole_checkpoint(args.output_dir))
    trainer.model.to(torch.float32)
    trainer.save_model()
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    run_command(main, "small_target")
