"""
What the page shows: one prompt answered twice, with ReTrace and plainly, as text that knows where it comes from.

Nothing in here needs gradio.
"""

import html
import os
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers.generation.streamers import BaseStreamer

from retrace_hf import OriginStreamer, RetraceDrafter
from retrace_hf.targets import DEFAULT_TARGET, load_target


HERE = Path(__file__).resolve().parent
SHIPPED_DRAFTER = "model_cards/retrace-smollm2-135m"
WARM_UP_TOKENS = 8
# No token of a usual vocabulary is longer on average; it spares the tokenizer a text that cannot fit.
CHARACTERS_PER_TOKEN = 16
# The page is redrawn this often at most; the clock of an answer does not wait for it.
SECONDS_BETWEEN_VIEWS = 0.1


@dataclass(frozen=True)
class Settings:
    """
    What the page runs, from environment variables.

    Args:
        target (`str`): `RETRACE_TARGET`, Hub id or folder.
        drafter (`str`): `RETRACE_DRAFTER`, Hub id or folder; else `drafter/` beside this file, else the shipped one.
        dtype (`torch.dtype`): `RETRACE_DTYPE`; in float32 the two texts are equal, in others near-ties can differ.
        max_new_tokens (`int`): `RETRACE_MAX_NEW_TOKENS`, what a visitor may ask for.
        max_prompt_tokens (`int`): `RETRACE_MAX_PROMPT_TOKENS`, the chat template's tokens included.
    """

    target: str
    drafter: str
    dtype: torch.dtype
    max_new_tokens: int
    max_prompt_tokens: int

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "Settings":
        """
        Raises:
            ValueError: a number that is none or too small, or a dtype that is not known.
        """
        dtype = environment.get("RETRACE_DTYPE", "float32")
        if dtype not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"RETRACE_DTYPE is {dtype!r}; set it to float32, bfloat16 or float16.")
        return cls(
            target=environment.get("RETRACE_TARGET") or DEFAULT_TARGET,
            drafter=environment.get("RETRACE_DRAFTER") or _own_drafter(),
            dtype=getattr(torch, dtype),
            max_new_tokens=_number(environment, "RETRACE_MAX_NEW_TOKENS", 256, at_least=2),
            max_prompt_tokens=_number(environment, "RETRACE_MAX_PROMPT_TOKENS", 1024, at_least=1),
        )


def _own_drafter() -> str:
    beside = HERE / "drafter"
    return str(beside if beside.is_dir() else HERE.parents[1] / SHIPPED_DRAFTER)


def _number(environment: Mapping[str, str], name: str, default: int, at_least: int) -> int:
    value = environment.get(name) or str(default)
    if not value.isascii() or not value.isdigit() or int(value) < at_least:
        raise ValueError(f"{name} is {value!r}; set it to a whole number of at least {at_least}.")
    return int(value)


class Models(NamedTuple):
    """A target, its tokenizer and its drafter. Visitors share them: what a call carries from round to round is its
    own."""

    target: Any
    tokenizer: Any
    drafter: RetraceDrafter


def load_models(settings: Settings) -> Models:
    """Loads both models and lets each way answer a little, so that the first visitor does not wait for what is made
    once."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target, tokenizer = load_target(settings.target, dtype=settings.dtype, device=device)
    drafter = RetraceDrafter.from_pretrained(settings.drafter, dtype=settings.dtype).to(device).eval()
    models = Models(target, tokenizer, drafter)
    inputs = encode(models, "Hello.", settings)
    for assistant in (drafter, None):
        target.generate(**inputs, assistant_model=assistant, max_new_tokens=WARM_UP_TOKENS, do_sample=False)
    return models


def encode(models: Models, prompt: str, settings: Settings) -> dict[str, torch.Tensor]:
    """
    The inputs of `generate()` for a visitor's prompt.

    Raises:
        ValueError: the prompt is empty or too long, in words for the visitor.
    """
    if not prompt.strip():
        raise ValueError("The prompt is empty: type a question or a task first.")
    limit = _prompt_limit(models.target, settings)
    if len(prompt) > CHARACTERS_PER_TOKEN * limit:
        raise ValueError(f"The prompt has {len(prompt)} characters, far above {limit} tokens: shorten it.")
    inputs = models.tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    length = inputs["input_ids"].shape[1]
    if length > limit:
        raise ValueError(f"The prompt has {length} tokens and may have {limit}: shorten it.")
    return inputs.to(models.target.device)


def _prompt_limit(target, settings: Settings) -> int:
    positions = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if positions is None:
        return settings.max_prompt_tokens
    if positions <= settings.max_new_tokens:
        raise ValueError(
            f"RETRACE_MAX_NEW_TOKENS is {settings.max_new_tokens} and the target reads {positions} tokens in all, "
            "prompt included; set it lower."
        )
    return min(settings.max_prompt_tokens, positions - settings.max_new_tokens)


class Answer:
    """
    One column of the page while it is written.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): the target's.
    """

    def __init__(self, tokenizer):
        self.ids: list[int] = []
        self.pieces: list[tuple[str, bool]] = []  # text, and whether it was drafted and accepted
        self.seconds: float | None = None  # of `generate()`, once it is done
        self._puts = 0
        self._origins = OriginStreamer(tokenizer, lambda text, drafted: self.pieces.append((text, drafted)))

    def put(self, ids: torch.Tensor):
        """Takes what `generate()` gives a streamer: the prompt, the prefill's one token, then a tensor a pass."""
        if self._puts:
            self.ids += ids.reshape(-1).tolist()
        self._puts += 1
        self._origins.put(ids)

    def end(self, seconds: float):
        self._origins.end()
        self.seconds = seconds

    @property
    def passes(self) -> int:
        """Target passes after the prefill."""
        return max(self._puts - 2, 0)

    @property
    def acceptance_length(self) -> float | None:
        """tau, tokens a pass; `None` before the first."""
        return (len(self.ids) - 1) / self.passes if self.passes else None


class _Stopped(Exception):
    """Nobody reads the answer any more."""


@dataclass
class _Relay(BaseStreamer):
    """Hands token ids on to another thread; decoding and drawing them costs the generation nothing."""

    puts: queue.SimpleQueue = field(default_factory=queue.SimpleQueue)
    stop: threading.Event = field(default_factory=threading.Event)

    def put(self, value: torch.Tensor):
        if self.stop.is_set():
            raise _Stopped
        self.puts.put(value)

    def end(self):
        pass  # the thread tells, also where an error ends it


def stream(models: Models, inputs: dict[str, torch.Tensor], drafter, max_new_tokens: int) -> Iterator[Answer]:
    """
    Generates greedily in a thread and yields the answer as it grows, the last time with its seconds.

    Closing the iterator stops the generation at its next token.
    """
    relay, answer = _Relay(), Answer(models.tokenizer)

    def generate():
        started = time.perf_counter()
        try:
            models.target.generate(
                **inputs,
                assistant_model=drafter,
                streamer=relay,
                max_new_tokens=max_new_tokens,
                do_sample=False,
            )
            relay.puts.put(time.perf_counter() - started)
        except _Stopped:
            pass
        except Exception as error:
            relay.puts.put(error)

    thread = threading.Thread(target=generate)
    thread.start()
    try:
        while answer.seconds is None:
            _take(relay.puts, answer)
            yield answer
    finally:
        relay.stop.set()
        thread.join()


def _take(puts: queue.SimpleQueue, answer: Answer):
    """Waits for something new, and a moment more for what comes with it."""
    until = time.monotonic() + SECONDS_BETWEEN_VIEWS
    timeout = None
    while timeout is None or timeout > 0:
        try:
            item = puts.get(timeout=timeout)
        except queue.Empty:
            return
        if isinstance(item, Exception):
            raise item
        if isinstance(item, float):
            answer.end(item)
            return
        answer.put(item)
        timeout = until - time.monotonic()


def answer_twice(
    models: Models, prompt: str, max_new_tokens: int, settings: Settings
) -> Iterator[tuple[Answer | None, Answer | None]]:
    """
    Answers a prompt with ReTrace, then plainly, and yields both answers as they grow; `None` is one not begun.

    One after the other, so that neither takes time from the other.

    Raises:
        ValueError: what the visitor asked for cannot be served, in words for the visitor.
    """
    if not 2 <= max_new_tokens <= settings.max_new_tokens:
        raise ValueError(f"{max_new_tokens} new tokens were asked for: choose 2 to {settings.max_new_tokens}.")
    inputs = encode(models, prompt, settings)
    retrace = None
    for retrace in stream(models, inputs, models.drafter, max_new_tokens):
        yield retrace, None
    for plain in stream(models, inputs, None, max_new_tokens):
        yield retrace, plain


# -- as HTML ---------------------------------------------------------------------------------------------------------

STYLE = """
.answer { white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.6; min-height: 8em; }
.answer .drafted { background: rgba(34, 160, 84, .28); border-bottom: 2px solid rgb(34, 160, 84); }
.answer .target { background: rgba(214, 140, 20, .18); }
.counts { font-variant-numeric: tabular-nums; opacity: .8; }
"""
LEGEND = (
    '<div class="answer" style="min-height: 0"><span class="drafted">drafted and accepted</span> '
    '<span class="target">the target\'s own: a correction, or the bonus token behind a block</span></div>'
)


def answer_html(answer: Answer | None) -> str:
    """A column: its counts, then its text, each token in the colour of its origin."""
    if answer is None:
        return '<div class="counts">&nbsp;</div><div class="answer"></div>'
    spans = (
        f'<span class="{"drafted" if drafted else "target"}">{html.escape(text)}</span>'
        for text, drafted in answer.pieces
    )
    return f'<div class="counts">{counts(answer)}</div><div class="answer">{"".join(spans)}</div>'


def counts(answer: Answer) -> str:
    tau = "" if answer.acceptance_length is None else f", tau {answer.acceptance_length:.2f}"
    seconds = "" if answer.seconds is None else f", {answer.seconds:.2f} s"
    return f"{len(answer.ids)} tokens, {answer.passes} target passes{tau}{seconds}"


def verdict(retrace: Answer | None, plain: Answer | None) -> str:
    """What came of the comparison, once both are done."""
    if retrace is None or plain is None or plain.seconds is None:
        return ""
    equal = "yes" if retrace.ids == plain.ids else "no"
    return (
        f"Text equal: {equal}. ReTrace took {retrace.seconds:.2f} s and plain generate {plain.seconds:.2f} s: "
        f"{plain.seconds / retrace.seconds:.2f} times as fast."
    )
