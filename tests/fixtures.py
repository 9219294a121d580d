"""Tiny real models, and drafters whose acceptance is known beforehand."""

import random
import subprocess
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerFast

from retrace_hf import RetraceDrafter

from .target_table import FAMILIES, VOCAB_SIZE


MASK_TOKEN_ID = 199
BLOCK_SIZE = 8
# Slots that a mixed drafter has right, by round: rejection early, late, at the last slot, none.
MIXED = (2, 0, 7, 6, 3, 1, 5)
THREE_KINDS = ("real", "oracle", "wrong")
KINDS = (*THREE_KINDS, "mixed")


def tiny_target(family: str = "qwen3", seed: int = 0, **overrides) -> PreTrainedModel:
    """A random fp32 target of 6 layers whose greedy text varies, of a family of `target_table.py`."""
    row = FAMILIES[family]
    torch.manual_seed(seed)
    return row.auto_class.from_config(row.config(**overrides), dtype=torch.float32).eval()


def tiny_drafter(
    target: PreTrainedModel, conditioning: str = "corrected", block_size: int = BLOCK_SIZE, seed: int = 1, **config
) -> RetraceDrafter:
    """A random two-layer drafter for `target`, as `from_target` makes it: the gate's value matrix is zero."""
    torch.manual_seed(seed)
    fields = {"mask_token_id": MASK_TOKEN_ID, "num_hidden_layers": 2, "initializer_range": 0.15, **config}
    if getattr(target.config.get_text_config(decoder=True), "num_attention_heads", None) is None:
        fields = {"num_attention_heads": 4, "max_position_embeddings": 512, **fields}
    return RetraceDrafter.from_target(target, block_size=block_size, conditioning=conditioning, **fields).eval()


@torch.no_grad()
def randomize(module: torch.nn.Module, std: float = 0.15, seed: int = 2) -> torch.nn.Module:
    """Gives every weight matrix random values: nothing stays at zero. Returns the module."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=std, generator=generator)
    return module


def prompt_of(length: int, seed: int = 3, batch_size: int = 1) -> torch.LongTensor:
    """Random token ids `[batch_size, length]` without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE - 1, (batch_size, length), generator=generator)


def plain(target: PreTrainedModel, prompt: torch.LongTensor, max_new_tokens: int = 65, **kwargs) -> torch.LongTensor:
    """What `generate()` gives without a drafter, greedily unless told otherwise."""
    kwargs = {"do_sample": False, **kwargs}
    return target.generate(input_ids=prompt, max_new_tokens=max_new_tokens, **kwargs)


@torch.no_grad()
def by_steps(target: PreTrainedModel, ids: torch.LongTensor) -> torch.Tensor:
    """The target's states after the final norm `[b, S, D]`, read one token after another."""
    cache, states = DynamicCache(config=target.config.get_text_config(decoder=True)), []
    for i, token in enumerate(ids.split(1, dim=1)):
        positions = torch.full_like(token, i)
        states.append(target(token, cache=cache, position_ids=positions, output_hidden_states=True).hidden_states[-1])
    return torch.cat(states, dim=1)


@torch.no_grad()
def is_the_pass_over(target: PreTrainedModel, ids: torch.LongTensor, found: torch.Tensor) -> bool:
    """Whether `found`, `[n, D]`, are the last `n` states of the text `[1, S]`, to 1e-5; or, where a target's scan is
    rounded worse than that, as near to the pass in float64 as plain passes are, of all tokens or of one after another.
    """

    def error(states, expected):
        return float((states - expected).norm() / expected.norm())

    def last(model):
        return model.get_decoder()(ids, use_cache=False).last_hidden_state[0, -len(found) :].double()

    plain, found = last(target), found.double()
    if error(found, plain) < 1e-5:
        return True
    in_double = deepcopy(target).double()
    in_double.set_experts_implementation("eager")  # the others have no float64
    exact, steps = last(in_double), by_steps(target, ids)[0, -len(found) :].double()
    return error(found, exact) < 2 * max(error(plain, exact), error(steps, exact))


@torch.no_grad()
def script_drafter(
    drafter: RetraceDrafter,
    target: PreTrainedModel,
    sequence: torch.LongTensor,
    num_right: Callable[[int], int],
    **inputs,
) -> RetraceDrafter:
    """Patches the forward so that round t proposes `num_right(t)` tokens of `sequence` and a wrong one after them.

    The right state for a slot is the target's own state one position earlier. A wrong one is its negative: the
    token that the target finds least likely. The real forward runs too, so that the cache is filled as ever.

    Args:
        sequence (`torch.LongTensor` of shape `[1, length]`): Prompt and plain continuation, without padding.
        num_right (`Callable[[int], int]`): By round, counted from 0.
        inputs: What else the target needs for the sequence, an image for instance.
    """
    last = target.config.get_text_config(decoder=True).num_hidden_layers
    states = target(input_ids=sequence, output_hidden_states=True, **inputs).hidden_states[last]
    states = torch.cat([states, states[:, -1:].expand(-1, 2 * drafter.config.block_size, -1)], dim=1)
    real_forward = type(drafter).forward
    rounds = iter(range(10**6))

    def forward(noise_embeds, context_hidden_states, position_ids, **kwargs):
        out = real_forward(drafter, noise_embeds, context_hidden_states, position_ids=position_ids, **kwargs)
        block_size = noise_embeds.shape[1]
        anchor = int(position_ids[0, -block_size])
        block = states[:, anchor - 1 : anchor - 1 + block_size].to(out.last_hidden_state)
        signs = torch.ones(block_size).to(block)
        signs[1 + num_right(next(rounds)) :] = -1
        out.last_hidden_state = block * signs[None, :, None]
        return out

    drafter.forward = forward
    return drafter


def oracle(drafter: RetraceDrafter, target: PreTrainedModel, sequence: torch.LongTensor, **inputs) -> RetraceDrafter:
    """A drafter that is always right about `sequence`."""
    return script_drafter(drafter, target, sequence, lambda t: drafter.config.block_size, **inputs)


def always_wrong(
    drafter: RetraceDrafter, target: PreTrainedModel, sequence: torch.LongTensor, **inputs
) -> RetraceDrafter:
    """A drafter that is never right about `sequence`."""
    return script_drafter(drafter, target, sequence, lambda t: 0, **inputs)


def mixed(drafter: RetraceDrafter, target: PreTrainedModel, sequence: torch.LongTensor, **inputs) -> RetraceDrafter:
    """A drafter that is right about `sequence` for another number of slots in each round."""
    return script_drafter(drafter, target, sequence, lambda t: MIXED[t % len(MIXED)], **inputs)


def drafter_of_kind(
    kind: str,
    target: PreTrainedModel,
    sequence: torch.LongTensor,
    change: Callable[[RetraceDrafter], RetraceDrafter] = lambda drafter: drafter,
    **inputs,
) -> RetraceDrafter:
    """A tiny drafter: `"real"` (all of it random), `"oracle"`, `"wrong"` or `"mixed"` about `sequence`.

    Args:
        change: What else is done to its weights or config, before it is scripted.
        inputs: As in [`script_drafter`].
    """
    if kind == "real":
        return change(randomize(tiny_drafter(target)))
    script = {"oracle": oracle, "wrong": always_wrong, "mixed": mixed}[kind]
    return script(change(tiny_drafter(target)), target, sequence, **inputs)


def drafters(
    target: PreTrainedModel, sequence: torch.LongTensor, kinds: tuple[str, ...] = THREE_KINDS, **options
) -> Iterator[tuple[str, RetraceDrafter]]:
    """Kind and drafter, one of each kind, made when it is asked for; options as in [`drafter_of_kind`]."""
    for kind in kinds:
        yield kind, drafter_of_kind(kind, target, sequence, **options)


def letters_tokenizer() -> PreTrainedTokenizerFast:
    """Token i is a two-letter word; the text is the words without spaces between them."""
    vocab = {chr(97 + i // 20) + chr(97 + i % 20): i for i in range(VOCAB_SIZE - 1)}
    tokenizer = Tokenizer(WordLevel({**vocab, "[UNK]": VOCAB_SIZE - 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Split(Regex(".."), "isolated")
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


LETTERS_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def letters_chat_target(seed: int = 0, family: str = "llama") -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """A tiny target that chats in letters and ends some answers, with the eos token or with another, `<|eot|>`."""
    tokenizer = letters_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<|end|>"})
    tokenizer.add_tokens(["<|system|>", "<|user|>", "<|assistant|>", "<|eot|>"], special_tokens=True)
    tokenizer.chat_template = LETTERS_TEMPLATE
    ends = tokenizer.convert_tokens_to_ids(["<|end|>", "<|eot|>"])
    target = tiny_target(family, seed=seed, vocab_size=len(tokenizer), eos_token_id=ends)
    with torch.no_grad():
        target.get_output_embeddings().weight[ends] *= 2.0
    return target, tokenizer


def save_letters_target(folder: Path, before_template: str = "", family: str = "llama") -> Path:
    """That target in a folder, with more of Jinja in front of its template. Returns the folder."""
    target, tokenizer = letters_chat_target(family=family)
    tokenizer.chat_template = before_template + tokenizer.chat_template
    target.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def killed_at_random(start: Callable[[], subprocess.Popen], begun: Path, kills: int, longest: float, seed: int) -> int:
    """Starts commands and kills each (SIGKILL) up to `longest` seconds after the file `begun` is there. Returns how
    many were still running."""
    drawn, hit = random.Random(seed), 0
    for _ in range(kills):
        process = start()
        wait_until = time.monotonic() + 60
        while not begun.exists() and time.monotonic() < wait_until:
            time.sleep(0.005)
        time.sleep(drawn.uniform(0, longest))
        hit += process.poll() is None
        process.kill()
        process.wait()
    return hit
