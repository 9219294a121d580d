"""Every option of `generate()`: what is tried of it, and what must come of it with a drafter.

    python -m tests.option_table                  # the table, on a tiny Qwen3; exit code 1 if anything differs
    python -m tests.option_table --target gemma2 --option cache_implementation

A row is one value of an option. Whatever the option is about, all of the output is compared with plain `generate()`'s:
sequences, scores, logits, hidden states, what was streamed, and the returned cache. `tests/test_options.py` runs the
same rows, and fails where the installed transformers has an option that none of them is about.
"""

import argparse
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    Cache,
    CompileConfig,
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StaticCache,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor
from transformers.generation.stopping_criteria import ConfidenceCriteria, MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer

from retrace_hf import AcceptanceStats, record_acceptance

from .fixtures import (
    BLOCK_SIZE,
    KINDS,
    VOCAB_SIZE,
    drafter_of_kind,
    letters_tokenizer,
    prompt_of,
    tiny_target,
)


PROMPT_LENGTH = 20
NEW_TOKENS = BLOCK_SIZE + 2  # the prefill's token, a whole block, and a block that the length cuts
LETTERS = letters_tokenizer()
OWN_GENERATE = str(Path(__file__).parent / "own_generate")


# -- a target, and what options are made of ---------------------------------------------------------------------------


class Bench:
    """A tiny target of one family, a prompt, and its plain greedy text."""

    def __init__(self, family: str = "qwen3"):
        self.family = family
        self.target = tiny_target(family)
        self.attention = self.target.config._attn_implementation
        self.slides = any(DynamicCache(config=self.target.config).is_sliding)
        self.prompt = prompt_of(PROMPT_LENGTH)
        self.sequence = self.target.generate(input_ids=self.prompt, max_new_tokens=NEW_TOKENS, do_sample=False)
        self.text = self.sequence[0, PROMPT_LENGTH:].tolist()
        self.plain: dict[Row, Outcome] = {}  # by row, so that three drafters share it


def healing_tokenizer() -> PreTrainedTokenizerFast:
    """Token i is the word `w<i>`, so that the end of a prompt, `w12`, may be healed to `w120`."""
    special = {"pad_token": "<pad>", "bos_token": "<s>", "unk_token": "<unk>"}
    vocab = {word: i for i, word in enumerate([*special.values(), *(f"w{i}" for i in range(3, VOCAB_SIZE))])}
    tokenizer = Tokenizer(WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def words(tokens: list[int]) -> str:
    return "".join(LETTERS.convert_ids_to_tokens(tokens))


class Recorder(BaseStreamer):
    """Keeps what is streamed, the prompt apart."""

    def __init__(self):
        self.prompt, self.tokens, self.ended = None, [], False

    def put(self, value):
        if self.prompt is None:
            self.prompt = value.flatten().tolist()
        else:
            self.tokens += value.flatten().tolist()

    def end(self):
        self.ended = True


class EndsWith:
    """A stop that is a function of the prefix."""

    def __init__(self, tokens: list[int]):
        self.tokens = torch.tensor(tokens)

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids[:, -len(self.tokens) :] == self.tokens).all(dim=1)


class Shifts:
    """A logits processor that is a function of the prefix: its last token favours some of the vocabulary."""

    def __call__(self, input_ids, scores):
        return scores + torch.linspace(3, 0, scores.shape[1]).roll(int(input_ids[0, -1]))


def own_loop(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
    """A decoding loop of the user's own, for `custom_generate`."""
    return model._sample(input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs)


def left_padded(bench: Bench) -> torch.LongTensor:
    return torch.cat([torch.zeros(1, 5, dtype=torch.long), bench.prompt], dim=1)


def holed(bench: Bench) -> torch.LongTensor:
    """The prompt with padding inside it."""
    return torch.where(torch.arange(PROMPT_LENGTH) % 7 == 3, 0, bench.prompt)


def warm_cache(bench: Bench, kind: type[Cache] = DynamicCache) -> Cache:
    """A cache that holds the first half of the prompt."""
    room = {"max_cache_len": PROMPT_LENGTH + NEW_TOKENS} if kind is StaticCache else {}
    cache = kind(config=bench.target.config, **room)
    bench.target.generate(bench.prompt[:, : PROMPT_LENGTH // 2], max_new_tokens=1, do_sample=False, cache=cache)
    return cache


def ends(position: int) -> "Made":
    """End tokens, one of which comes at this position of the plain text at the latest."""
    return Made(f"at {position}", lambda bench: [bench.text[position], VOCAB_SIZE - 2])


# -- rows -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Made:
    """A value that depends on the target or the prompt, or is used up by a call; made afresh for each."""

    label: str
    make: Callable[[Bench], Any]


@dataclass(frozen=True, eq=False)
class Row:
    """
    One value of an option, and what must come of it.

    Args:
        option: A field of `GenerationConfig`, an argument of `generate()`, or a model input that it hands on.
        outcome: `"equal"` to plain; `"law"`: equal to plain where both draw with the same noise; `"inert"`: equal to
            plain with and without it; `"refused"` before the target has run; `"fails"` as plain does.
        value: Of the option; a [`Made`] is made for each call.
        beside: Other arguments of the call, [`Made`] or as they stand.
        note: Of `"refused"`, a regular expression for its message; of `"inert"`, the reason.
        error: Of `"refused"`, the exception; transformers' own where plain `generate()` refuses too.
        attention: What the target attends with, if not with what it comes with.
        sliding: Where the target's layers slide the row is refused, with this message.
        padding: Leading tokens of the prompt that are padding.
    """

    option: str
    outcome: str
    value: Any
    beside: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    error: type[Exception] = ValueError
    attention: str | None = None
    sliding: str | None = None
    padding: int = 0

    @property
    def label(self) -> str:
        if isinstance(self.value, Made):
            return self.value.label
        text = getattr(self.value, "__name__", str(self.value)).replace(str(Path(__file__).parent) + "/", "")
        return text if len(text) <= 40 else type(self.value).__name__

    def __str__(self) -> str:
        others = f" with {', '.join(self.beside)}" if self.beside else ""
        return f"{self.option}={self.label}{others}"

    def arguments(self, bench: Bench) -> dict[str, Any]:
        values = {**self.beside, self.option: self.value}
        return {key: value.make(bench) if isinstance(value, Made) else value for key, value in values.items()}


_ROW_FIELDS = ("error", "attention", "sliding", "padding")


def _rows(outcome: str, option: str, values: tuple, note: str = "", **beside) -> list[Row]:
    about = {key: beside.pop(key) for key in _ROW_FIELDS if key in beside}
    return [Row(option, outcome, value, beside, note, **about) for value in values]


def equal(option: str, *values, **beside) -> list[Row]:
    return _rows("equal", option, values, **beside)


def law(option: str, *values, **beside) -> list[Row]:
    return _rows("law", option, values, **{"do_sample": True, **beside})


def inert(option: str, value, reason: str, **beside) -> list[Row]:
    return _rows("inert", option, (value,), reason, **beside)


def refused(option: str, value, message: str, **beside) -> list[Row]:
    return _rows("refused", option, (value,), message, **beside)


def offloaded(*values: str, **about) -> list[Row]:
    """Caches that transformers builds where there is a GPU, and nowhere else."""
    if torch.cuda.is_available():
        return equal("cache_implementation", *values, **about)
    return _rows("fails", "cache_implementation", values, **about)


_ASSISTANTS = "a drafter has its block size, and its proposals do not change the text"
_STATIC = "StaticCache cannot be cropped.*leave out cache and cache_implementation"
_BEAMS = "an option of beam search"
_ENCODER = "an option of encoder-decoders"

# Fields of GenerationConfig, in its order.
CONFIG_ROWS = [
    *equal("max_length", PROMPT_LENGTH + 1, PROMPT_LENGTH + NEW_TOKENS, max_new_tokens=None),
    *refused("max_length", PROMPT_LENGTH, "Input length of input_ids is 20", max_new_tokens=None),
    *equal("max_new_tokens", 1, 2, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, BLOCK_SIZE + 2),
    *refused("max_new_tokens", 0, "max_new_tokens. must be greater than 0"),
    *equal("min_length", PROMPT_LENGTH + 7, eos_token_id=ends(3)),
    *equal("min_new_tokens", 7, eos_token_id=ends(3)),
    *inert("early_stopping", True, _BEAMS),
    *equal("max_time", 1e-9, 1e6),
    *equal("stop_strings", Made("two tokens", lambda b: words(b.text[4:6])[1:]), tokenizer=LETTERS),
    *equal("do_sample", False),
    *law("do_sample", True),
    *equal("num_beams", 1),
    *refused("num_beams", 2, "num_beams is 2.*num_beams=1", streamer=None),
    *equal("use_mtp", False),
    *refused("use_mtp", True, "use_mtp is True.*leave out use_mtp"),
    *equal("use_cache", True),
    *refused("use_cache", False, "use_cache is False.*leave use_cache out"),
    *equal("cache_implementation", "dynamic", "hybrid"),
    *equal("cache_implementation", "static", "sliding_window", "hybrid_chunked", sliding=_STATIC),
    *offloaded("offloaded"),
    *offloaded("offloaded_static", "offloaded_hybrid", "offloaded_hybrid_chunked", sliding=_STATIC),
    *refused(
        "cache_implementation", "quantized", "quantized cache cannot be cropped.*[Ll]eave out cache_implementation"
    ),
    *refused(
        "cache_implementation",
        "paged",
        "assistant_model is not supported for continuous batching",
        error=NotImplementedError,
    ),
    *inert("cache_config", {"nbits": 4}, "an option of quantized caches"),
    *refused("cache_config", {"nbits": 4}, "quantized cache cannot be cropped", cache_implementation="quantized"),
    *equal("max_cache_len", 64, cache_implementation="static", sliding=_STATIC),
    *inert("max_cache_len", 64, "an option of static caches"),
    *law("temperature", 0.3, 1.7),
    *inert("temperature", 0.3, "an option of sampling"),
    *law("top_k", 4, 0, temperature=0.7),
    *law("top_p", 0.7),
    *law("min_p", 0.1),
    *law("top_h", 0.4),
    *law("typical_p", 0.5),
    *law("epsilon_cutoff", 0.02),
    *law("eta_cutoff", 0.02),
    *equal("repetition_penalty", 1.3, 0.7),
    *law("repetition_penalty", 1.3, temperature=0.7, top_k=10, top_p=0.9),
    *equal("encoder_repetition_penalty", 1.5),
    *inert("length_penalty", 2.0, _BEAMS),
    *equal("no_repeat_ngram_size", 1, 2),
    *equal("bad_words_ids", Made("of the text", lambda b: [[b.text[2]], b.text[5:7]])),
    *equal("renormalize_logits", True),
    *law("renormalize_logits", True, temperature=0.5),
    *equal("forced_bos_token_id", 7, input_ids=Made("one token", lambda b: b.prompt[:, :1])),
    *equal("forced_eos_token_id", 9, [9, 11]),
    *equal("remove_invalid_values", True),
    *equal("exponential_decay_length_penalty", (2, 1.4), eos_token_id=ends(9)),
    *equal("suppress_tokens", Made("of the text", lambda b: b.text[1:6])),
    *equal("begin_suppress_tokens", Made("of the text", lambda b: b.text[:2])),
    *equal(
        "sequence_bias",
        Made("of the text", lambda b: {(b.text[1],): -20.0, (b.text[3], 40): 30.0}),
        [[[40], 4.0], [[40, 41], 30.0]],
    ),
    *equal(
        "token_healing",
        True,
        tokenizer=healing_tokenizer(),
        input_ids=Made("ends with w1", lambda b: b.prompt.index_fill(1, torch.tensor([PROMPT_LENGTH - 1]), 12)),
    ),
    *equal("guidance_scale", 1.0),
    *refused("guidance_scale", 1.5, "guidance_scale is 1.5.*Leave out guidance_scale"),
    *equal(
        "watermarking_config",
        WatermarkingConfig(bias=4.0),
        WatermarkingConfig(seeding_scheme="selfhash", context_width=2),
    ),
    *refused(
        "watermarking_config",
        SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=5),
        "drop watermarking_config",
        do_sample=True,
    ),
    *equal("num_return_sequences", 1),
    *refused("num_return_sequences", 2, "num_return_sequences is 2.*num_return_sequences=1", do_sample=True),
    *refused("num_return_sequences", 2, "do not support `num_return_sequences` different than 1"),
    *equal("output_attentions", True, attention="eager"),
    *equal("output_attentions", True, attention="eager", cache_implementation="static", sliding=_STATIC),
    *inert("output_attentions", True, "nothing returns them", return_dict_in_generate=False),
    *refused("output_attentions", True, "set_attn_implementation", attention="sdpa"),
    *equal("output_hidden_states", False, True, [2, 6], [-1], -1, 3, []),
    *equal("output_scores", False, True),
    *law("output_scores", True),
    *equal("output_logits", False, True),
    *law("output_logits", True),
    *equal("return_dict_in_generate", False, True),
    *equal("pad_token_id", 0, input_ids=Made("padded", left_padded), padding=5),
    *equal("pad_token_id", 0, input_ids=Made("padded inside", holed)),
    *equal("bos_token_id", 5, input_ids=None),
    *equal("eos_token_id", *map(ends, (0, 1, 4, 8, 9)), Made("one", lambda b: b.text[6])),
    *equal("encoder_no_repeat_ngram_size", 1),
    *inert("decoder_start_token_id", 5, _ENCODER),
    *equal("is_assistant", False),
    *refused("is_assistant", True, "is_assistant.*leave out is_assistant"),
    *inert("num_assistant_tokens", 3, _ASSISTANTS),
    *inert("num_assistant_tokens_schedule", "heuristic", _ASSISTANTS),
    *inert("assistant_confidence_threshold", 0.9, _ASSISTANTS),
    *refused("prompt_lookup_num_tokens", 3, "prompt_lookup_num_tokens is 3.*leave out prompt_lookup_num_tokens"),
    *inert("max_matching_ngram_size", 3, "an option of prompt lookup"),
    *refused("assistant_early_exit", 2, "assistant_early_exit is 2.*leave out assistant_early_exit"),
    *inert("assistant_lookbehind", 5, _ASSISTANTS),
    *inert("target_lookbehind", 5, _ASSISTANTS),
    *refused(
        "assistant_ensemble_weight", 0.5, "assistant_ensemble_weight is 0.5.*leave out assistant_ensemble_weight"
    ),
    # transformers' own generator on the drafter's weights; hidden states for the user are a crash of its own.
    *equal("speculation_type", "dflash", return_dict_in_generate=False, output_hidden_states=False),
    *refused("speculation_type", "mtp", "speculation_type is 'mtp'; leave it out"),
    *inert(
        "compile_config",
        CompileConfig(),
        "a CPU does not compile by itself",
        cache_implementation="static",
        sliding=_STATIC,
    ),
    *equal("disable_compile", True),
    *inert("continuous_batching_config", ContinuousBatchingConfig(), "read by generate_batch() alone"),
    *inert("low_memory", True, "an option of contrastive search"),
    *refused("penalty_alpha", 0.6, "Contrastive Search requires"),
    *inert("penalty_alpha", 0.0, "an option of contrastive search"),
    *refused("dola_layers", "low", "dola_layers is low.*leave out dola_layers"),
    *inert("diversity_penalty", 0.5, _BEAMS),
    *inert("num_beam_groups", 2, _BEAMS),
    *refused("constraints", [1], "Constrained Beam Search requires"),
    *refused("force_words_ids", [[5]], "Constrained Beam Search requires"),
    *equal("prefill_chunk_size", 6, 20, 64),
    *equal("prefill_chunk_size", 6, cache_implementation="static", sliding=_STATIC),
    *refused("prefill_chunk_size", 0, "prefill_chunk_size is 0; give a number of tokens"),
    *inert("transformers_version", "4.0.0", "a note of what saved the config"),
]

# Arguments of generate(), and of its decoding loop.
ARGUMENT_ROWS = [
    *equal("inputs", Made("prompt", lambda b: b.prompt), input_ids=None),
    *equal(
        "generation_config",
        Made(
            "alone",
            lambda b: GenerationConfig(
                max_new_tokens=NEW_TOKENS, repetition_penalty=1.2, return_dict_in_generate=True
            ),
        ),
    ),
    *equal("logits_processor", Made("own", lambda b: LogitsProcessorList([Shifts()]))),
    *equal(
        "logits_processor",
        Made(
            "of a kind that an option makes too",
            lambda b: LogitsProcessorList([RepetitionPenaltyLogitsProcessor(2.0)]),
        ),
        repetition_penalty=1.1,
    ),
    *law("logits_processor", Made("own", lambda b: LogitsProcessorList([Shifts()])), temperature=0.5),
    *equal("stopping_criteria", Made("own", lambda b: StoppingCriteriaList([EndsWith(b.text[4:6])]))),
    *equal(
        "stopping_criteria", Made("shorter", lambda b: StoppingCriteriaList([MaxLengthCriteria(PROMPT_LENGTH + 5)]))
    ),
    *equal(
        "stopping_criteria",
        Made("longer", lambda b: StoppingCriteriaList([MaxLengthCriteria(PROMPT_LENGTH + NEW_TOKENS)])),
        max_new_tokens=3,
    ),
    *refused(
        "stopping_criteria",
        Made("of scores", lambda b: StoppingCriteriaList([ConfidenceCriteria(0.4)])),
        "ConfidenceCriteria.*scores.*drop it",
    ),
    *equal("prefix_allowed_tokens_fn", lambda batch, ids: list(range(int(ids[-1]) % 7, VOCAB_SIZE, 3))),
    *law("prefix_allowed_tokens_fn", lambda batch, ids: list(range(int(ids[-1]) % 7, VOCAB_SIZE, 3))),
    *equal("synced_gpus", False),
    *refused("synced_gpus", True, "synced_gpus.*leave out assistant_model"),
    *refused("assistant_model", Made("an object", lambda b: object()), "", error=AttributeError),
    *refused("assistant_tokenizer", LETTERS, "leave out assistant_tokenizer"),
    *inert("tokenizer", LETTERS, "read for stop strings and healing alone"),
    *equal("streamer", None),
    *inert("negative_prompt_ids", Made("prompt", lambda b: b.prompt), "read for guidance alone"),
    *inert(
        "negative_prompt_attention_mask", Made("ones", lambda b: torch.ones_like(b.prompt)), "read for guidance alone"
    ),
    *equal("custom_generate", OWN_GENERATE, trust_remote_code=True),
    *refused("custom_generate", own_loop, "custom_generate is a function.*leave out one of the two"),
]

# What generate() takes as **kwargs and hands to the target.
INPUT_ROWS = [
    *equal("input_ids", Made("one token", lambda b: b.prompt[:, :1])),
    *refused(
        "input_ids",
        Made("two sequences", lambda b: prompt_of(PROMPT_LENGTH, batch_size=2)),
        "batch has 2.*once for each",
    ),
    *equal("attention_mask", Made("ones", lambda b: torch.ones_like(b.prompt))),
    *equal(
        "attention_mask",
        Made("left", lambda b: (left_padded(b) > 0).long()),
        input_ids=Made("padded", left_padded),
        padding=5,
    ),
    *equal("attention_mask", Made("holes", lambda b: (holed(b) > 0).long())),
    *equal("position_ids", Made("from 7", lambda b: torch.arange(7, 7 + PROMPT_LENGTH)[None])),
    *equal("inputs_embeds", Made("of the ids", lambda b: b.target.get_input_embeddings()(b.prompt))),
    *refused(
        "inputs_embeds",
        Made("alone", lambda b: b.target.get_input_embeddings()(b.prompt)),
        "inputs_embeds.*pass input_ids",
        input_ids=None,
    ),
    *equal("cache", Made("dynamic", lambda b: DynamicCache(config=b.target.config))),
    *equal(
        "cache",
        Made("static", lambda b: StaticCache(config=b.target.config, max_cache_len=PROMPT_LENGTH + NEW_TOKENS)),
        sliding=_STATIC,
    ),
    *equal("cache", Made("warm", warm_cache)),
    *equal("cache", Made("warm and static", lambda b: warm_cache(b, StaticCache)), sliding=_STATIC),
    *equal("past_key_values", Made("warm", warm_cache)),
    *equal("logits_to_keep", 0, 5),
    *inert("labels", Made("prompt", lambda b: b.prompt), "a loss is not read"),
    *refused("num_logits_to_keep", 1, "model_kwargs. are not used by the model: .'num_logits_to_keep'"),
    *refused("max_new_token", 5, "model_kwargs. are not used by the model: .'max_new_token'"),
]

# What users write together.
COMBINED_ROWS = [
    *equal(
        "stop_strings",
        Made("two", lambda b: [words(b.text[8:10]), words(b.text[4:7])[1:5]]),
        tokenizer=LETTERS,
        max_new_tokens=6,
    ),
    *equal("stop_strings", Made("one token", lambda b: words(b.text[7:8])), tokenizer=LETTERS, eos_token_id=ends(9)),
    *equal("eos_token_id", ends(2), min_new_tokens=5, max_new_tokens=9),
    *equal(
        "repetition_penalty",
        1.3,
        no_repeat_ngram_size=2,
        bad_words_ids=Made("", lambda b: [[b.text[3]], b.text[5:7]]),
        renormalize_logits=True,
    ),
    *law(
        "repetition_penalty",
        1.3,
        no_repeat_ngram_size=2,
        bad_words_ids=Made("", lambda b: [[b.text[3]]]),
        temperature=0.7,
        top_k=20,
        top_p=0.9,
        min_p=0.01,
        eos_token_id=ends(6),
    ),
    *equal(
        "cache_implementation",
        "static",
        max_new_tokens=None,
        max_length=PROMPT_LENGTH + BLOCK_SIZE + 1,
        sliding=_STATIC,
    ),
    *equal("cache_implementation", "static", eos_token_id=ends(5), prefill_chunk_size=7, sliding=_STATIC),
    *equal("output_attentions", True, attention="eager", cache=Made("warm", warm_cache)),
    *equal("output_attentions", True, attention="eager", prefill_chunk_size=6, output_hidden_states=[3]),
    *equal("prefill_chunk_size", 4, input_ids=Made("padded", left_padded), padding=5),
    *equal("prefill_chunk_size", 4, cache=Made("warm", warm_cache)),
    *refused(
        "prefill_chunk_size",
        4,
        "inputs_embeds cannot be prefilled in chunks; leave out prefill_chunk_size",
        inputs_embeds=Made("", lambda b: b.target.get_input_embeddings()(b.prompt)),
    ),
    *refused(
        "prefill_chunk_size",
        4,
        "prefill_chunk_size and a cache that holds tokens, pass the whole text",
        cache=Made("warm", warm_cache),
        input_ids=Made("new tokens alone", lambda b: b.prompt[:, PROMPT_LENGTH // 2 :]),
        attention_mask=Made("", lambda b: torch.ones_like(b.prompt)),
    ),
    *equal(
        "stopping_criteria",
        Made("own", lambda b: StoppingCriteriaList([EndsWith(b.text[4:6])])),
        eos_token_id=ends(6),
        repetition_penalty=1.0001,
    ),
]

ROWS = [*CONFIG_ROWS, *ARGUMENT_ROWS, *INPUT_ROWS, *COMBINED_ROWS]


def rows_for(family: str) -> list[Row]:
    """The rows that can be asked of a family: Gemma 2 does not attend with sdpa."""
    return [row for row in ROWS if not (family == "gemma2" and row.attention == "sdpa")]


# -- calls ------------------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What a call gave: an output (a tensor or a dictionary) or an error, and what it took."""

    output: Any = None
    error: Exception | None = None
    streamer: Any = None
    passes: int = 0
    stats: AcceptanceStats = field(default_factory=AcceptanceStats)

    @property
    def sequences(self) -> torch.LongTensor:
        return self.output if isinstance(self.output, torch.Tensor) else self.output.sequences


def call(bench: Bench, row: Row, drafter=None, without: bool = False) -> Outcome:
    """One `generate()` with a row's arguments, or with those beside the option alone."""
    target = bench.target
    vars(target).pop("_previous_max_cache_length", None)  # a static cache is as long as the longest one before it
    if target.config._attn_implementation != (row.attention or bench.attention):
        target.set_attn_implementation(row.attention or bench.attention)
    arguments = row.arguments(bench)
    if without:
        del arguments[row.option]
    outcome = Outcome(streamer=Recorder())
    flags = {f"output_{name}": True for name in ("scores", "logits", "hidden_states")}
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "return_dict_in_generate": True, **flags}
    if "generation_config" in arguments:
        settings = {}
    arguments = {"input_ids": bench.prompt, "streamer": outcome.streamer, **settings, **arguments}
    if drafter is not None:
        arguments = {"assistant_model": drafter, **arguments}
    handle = target.register_forward_pre_hook(lambda *_: setattr(outcome, "passes", outcome.passes + 1))
    with record_acceptance() as outcome.stats, _same_noise(outcome.streamer):
        try:
            outcome.output = target.generate(**arguments)
        except Exception as error:
            outcome.error = error
        finally:
            handle.remove()
    return outcome


@contextmanager
def _same_noise(streamer: Recorder) -> Iterator[None]:
    """Makes draws a function of where in the text they are made, so that equal laws draw equal tokens.

    `torch.multinomial` of one draw a row is `argmax(p / noise)` with exponential noise; here a position has the same
    noise in every call. What is drawn behind a rejection is thrown away, whatever it was, and drawn anew in the next
    round. So where each noise gives plain's text, independent noise gives plain's law.
    """
    noise = torch.empty(2 * NEW_TOKENS, VOCAB_SIZE).exponential_(generator=torch.Generator().manual_seed(7))

    def multinomial(probabilities: torch.Tensor, num_samples: int, **kwargs) -> torch.LongTensor:
        first = len(streamer.tokens)
        return (probabilities / noise[first : first + probabilities.shape[0]]).argmax(dim=-1, keepdim=True)

    with mock.patch.object(torch, "multinomial", multinomial):
        yield


# -- comparison -------------------------------------------------------------------------------------------------------


def differences(found: Outcome, plain: Outcome) -> list[str]:
    """What is not plain's, in words; empty if all of it is."""
    for name, outcome in (("plain", plain), ("with the drafter", found)):
        if outcome.error is not None:
            return [f"{name}: {type(outcome.error).__name__}: {outcome.error}"]
    if type(found.output) is not type(plain.output):
        return [f"returned a {type(found.output).__name__}, plain a {type(plain.output).__name__}"]
    if not torch.equal(found.sequences, plain.sequences):
        return [f"sequences {found.sequences.tolist()}, plain {plain.sequences.tolist()}"]
    faults = [f"streamer {part}" for part in ("prompt", "tokens", "ended") if _of(found, part) != _of(plain, part)]
    if not isinstance(found.output, torch.Tensor):
        for key in ("scores", "logits", "hidden_states", "attentions"):
            faults += _tensor_faults(key, found.output.get(key), plain.output.get(key))
        faults += _cache_faults(found.output.cache, plain.output.cache)
    return faults


def _of(outcome: Outcome, part: str):
    return getattr(outcome.streamer, part)


def _tensor_faults(name: str, found, plain) -> list[str]:
    """Through nested tuples: lengths, shapes and values."""
    if isinstance(plain, torch.Tensor) and isinstance(found, torch.Tensor):
        if found.shape != plain.shape:
            return [f"{name} has shape {list(found.shape)}, plain {list(plain.shape)}"]
        scale = plain[plain.isfinite()].abs().max().item() if plain.isfinite().any() else 1.0
        same = torch.allclose(found, plain, rtol=1e-4, atol=1e-5 * scale, equal_nan=True)
        return [] if same else [f"{name} is off by {(found - plain).abs().nan_to_num().max():.2g} of {scale:.2g}"]
    if plain is None or found is None or isinstance(plain, torch.Tensor) or isinstance(found, torch.Tensor):
        return [] if found is plain else [f"{name} is a {type(found).__name__}, plain a {type(plain).__name__}"]
    if len(found) != len(plain):
        return [f"{name} has {len(found)} parts, plain {len(plain)}"]
    return [f for i, pair in enumerate(zip(found, plain)) for f in _tensor_faults(f"{name}[{i}]", *pair)]


def _cache_faults(found: Cache | None, plain: Cache | None) -> list[str]:
    if type(found) is not type(plain):
        return [f"cache is a {type(found).__name__}, plain a {type(plain).__name__}"]
    if found is None:
        return []
    lengths = [int(cache.get_seq_length()) for cache in (found, plain)]
    if lengths[0] != lengths[1]:
        return [f"cache holds {lengths[0]} tokens, plain {lengths[1]}"]
    faults = []
    for i, (mine, its) in enumerate(zip(found.layers, plain.layers, strict=True)):
        if getattr(mine, "record_past", None) != getattr(its, "record_past", None):
            faults.append(f"cache layer {i} goes on recording its past")
        # Behind its length a static cache holds what was rejected, which nothing reads.
        rows = slice(lengths[0]) if its.is_compileable else slice(None)
        for part in ("keys", "values"):
            states = [getattr(layer, part)[:, :, rows] for layer in (mine, its)]
            faults += _tensor_faults(f"cache layer {i} {part}", *states)
    return faults


# -- the table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """What came of a row with one drafter. word: `"DIFFERS"`, or else the row's."""

    word: str
    faults: list[str]
    outcome: Outcome


def run_row(bench: Bench, row: Row, kind: str) -> Result:
    """Runs a row with a drafter of this kind, and says what came of it."""
    message = row.sliding if bench.slides and row.sliding else row.note
    if row.outcome == "refused" or message != row.note:
        found = call(bench, row, drafter_of_kind(kind, bench.target, bench.sequence))
        return _judged("refused", _refusal_faults(found, row.error, message), found)
    if row not in bench.plain:
        bench.plain[row] = call(bench, row)
    plain = bench.plain[row]
    if row.outcome == "fails":
        found = call(bench, row, drafter_of_kind(kind, bench.target, bench.sequence))
        same = plain.error is not None and repr(found.error) == repr(plain.error)
        return _judged("fails too", [] if same else [f"{found.error!r}, plain {plain.error!r}"], found)
    sequence = bench.sequence if plain.error else plain.sequences[:, row.padding :]
    found = call(bench, row, drafter_of_kind(kind, bench.target, sequence))
    faults = differences(found, plain)
    if row.outcome == "inert" and not faults:
        faults = [f"without the option: {fault}" for fault in differences(call(bench, row, without=True), plain)]
    return _judged("inert" if row.outcome == "inert" else "equal", faults, found)


def _judged(word: str, faults: list[str], outcome: Outcome) -> Result:
    return Result("DIFFERS" if faults else word, faults, outcome)


def _refusal_faults(found: Outcome, error: type[Exception], message: str) -> list[str]:
    if found.error is None:
        return ["was not refused"]
    faults = []
    if type(found.error) is not error or not re.search(message, str(found.error), re.DOTALL):
        faults.append(f"refused with {type(found.error).__name__}: {found.error}")
    if found.passes:
        faults.append(f"refused after {found.passes} passes of the target")
    return faults


@contextmanager
def _quiet() -> Iterator[None]:
    """The options' own warnings (an option of beams without beams, a deprecated cache) are no news here."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def main(arguments: list[str] | None = None) -> int:
    """Prints option x drafter for one target; 1 if anything differs from plain, else 0."""
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(prog="python -m tests.option_table", description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=("qwen3", "llama", "gemma2"), action="append")
    parser.add_argument("--option", help="the rows of this option alone")
    options = parser.parse_args(arguments)
    rows = [row for row in ROWS if options.option in (None, row.option)]
    if not rows:
        parser.error(f"no row is about {options.option}")

    console = Console(width=None if sys.stdout.isatty() else 150)
    words = {}
    faults = []
    for family in options.target or ["qwen3"]:
        bench = Bench(family)
        table = Table("option", "value", "must be", *KINDS, title=f"generate() with a drafter: {family}")
        for row in [row for row in rows_for(family) if row in rows]:
            cells = []
            for kind in KINDS:
                with _quiet():
                    result = run_row(bench, row, kind)
                words[result.word] = words.get(result.word, 0) + 1
                faults += [f"{family}, {kind}, {row}: {fault}" for fault in result.faults]
                cells.append(_cell(result))
            table.add_row(row.option, str(row)[len(row.option) + 1 :], row.outcome, *cells)
        console.print(table)
    console.print("Cells: what came of it, passes of the target, proposals accepted in each round.")
    console.print(", ".join(f"{count} {word}" for word, count in sorted(words.items())))
    for fault in faults:
        console.print(fault, style="red", markup=False)
    return 1 if faults else 0


def _cell(result: Result) -> str:
    if result.outcome.error is not None:
        return result.word
    accepted = result.outcome.stats.accepted_per_round
    return f"{result.word} {result.outcome.passes} ({sum(accepted)})"


if __name__ == "__main__":
    sys.exit(main())
