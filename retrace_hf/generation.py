"""What makes `target.generate(..., assistant_model=drafter)` work, and counts what was accepted."""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn
from transformers import Cache
from transformers.cache_utils import StaticLayer
from transformers.generation.candidate_generator import CandidateGenerator, DFlashTokenCandidateGenerator
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GenerationMixin
from transformers.utils import logging
from transformers.utils.output_capturing import resolve_hidden_states_indices, selected_hidden_states

from .candidate_generator import check_inputs, check_pairing
from .recurrent_states import CacheAtStart, fill_short_convolutions


logger = logging.get_logger(__name__)

# The minor versions of transformers that the tests pass with; pyproject.toml allows these.
TESTED_VERSIONS = ((5, 24), (5, 25))


def install_generate_hook() -> None:
    """Teaches `generate()` to use any assistant with a `get_candidate_generator` method. A second call does nothing.

    Four methods of `GenerationMixin` are wrapped, each for what it alone knows: `_extract_generation_mode_kwargs` sees
    a decoding loop of the user's, `_validate_generation_mode` the options before anything has run,
    `_assisted_decoding` the stopping criteria and the cache, `_get_candidate_generator` chooses. A call without such
    an assistant, or with `speculation_type="dflash"`, goes to transformers' own methods unchanged; only a function as
    `custom_generate`, which would drop any assistant in silence, is refused for that too.

    Drafters loaded with `trust_remote_code` bring copies of this code, which may be older or newer. Each copy wraps
    the methods once and serves the drafters of its own classes; an assistant of no copy is served by the first.
    """
    # On the class, where all copies find it: their packages, first come first, and the recorders, which they share.
    if "_retrace_hooks" not in vars(GenerationMixin):
        GenerationMixin._retrace_hooks = []
    if "_retrace_recorders" not in vars(GenerationMixin):
        GenerationMixin._retrace_recorders = ContextVar("retrace_recorders", default=())
    if _package_of(__name__) in GenerationMixin._retrace_hooks:
        return
    GenerationMixin._retrace_hooks.append(_package_of(__name__))
    _warn_of_untested_version(transformers.__version__)
    GenerationMixin._extract_generation_mode_kwargs = _extracting(GenerationMixin._extract_generation_mode_kwargs)
    GenerationMixin._validate_generation_mode = _validating(GenerationMixin._validate_generation_mode)
    GenerationMixin._assisted_decoding = _decoding(GenerationMixin._assisted_decoding)
    GenerationMixin._get_candidate_generator = _choosing(GenerationMixin._get_candidate_generator)


def _warn_of_untested_version(version: str) -> None:
    """The methods that are wrapped are transformers' own affair and move between minor versions."""
    found = tuple(int(number) for number in version.split(".")[:2])
    if found > TESTED_VERSIONS[-1]:
        first, last = (".".join(map(str, tested)) for tested in (TESTED_VERSIONS[0], TESTED_VERSIONS[-1]))
        logger.warning(
            f"transformers {version} is newer than those this code was tested with ({first} to "
            f"{last}). Compare a text with one generated without assistant_model, or run the tests that say what has "
            "moved: python -m pytest tests/test_contracts.py in the repository of retrace_hf."
        )


def _package_of(module: str) -> str:
    return module.rpartition(".")[0]


def _is_drafter(assistant_model) -> bool:
    """Whether this assistant brings its own generator and is for this copy of the code to serve. By name, not by
    class: a PeftModel hands the method through."""
    method = getattr(assistant_model, "get_candidate_generator", None)
    if not callable(method):
        return False
    hooks = GenerationMixin._retrace_hooks
    classes = type(getattr(method, "__self__", None)).__mro__  # a subclass of the user's is served as its base
    owner = next((p for p in (_package_of(c.__module__) for c in classes) if p in hooks), hooks[0])
    return owner == _package_of(__name__)


def _drafts(assistant_model, generation_config) -> bool:
    """Whether this assistant's own generator is wanted, not transformers' on its weights."""
    return _is_drafter(assistant_model) and getattr(generation_config, "speculation_type", None) != "dflash"


def _extracting(original: Callable) -> Callable:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def _extract_generation_mode_kwargs(self, *args, **kwargs):
        call = signature.bind(self, *args, **kwargs).arguments
        if callable(call.get("custom_generate")) and _is_drafter(call.get("assistant_model")):
            # transformers hands a function no assistant.
            raise ValueError(
                "custom_generate is a function, which decodes without assistant_model, so the drafter would not be "
                "used; leave out one of the two, or call generate(assistant_model=drafter) inside the function."
            )
        return original(self, *args, **kwargs)

    return _extract_generation_mode_kwargs


def _validating(original: Callable) -> Callable:
    @functools.wraps(original)
    def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
        drafter = generation_mode_kwargs.get("assistant_model")
        if not _is_drafter(drafter):
            return original(self, generation_mode, generation_config, generation_mode_kwargs)
        check_pairing(drafter, self, generation_config)
        if not _drafts(drafter, generation_config):
            return original(self, generation_mode, generation_config, generation_mode_kwargs)
        speculation = getattr(generation_config, "speculation_type", None)
        if speculation is not None:
            raise ValueError(
                f"speculation_type is {speculation!r}; leave it out for ReTrace, or set 'dflash' for transformers' "
                "own DFlash generator on the drafter's weights."
            )
        if generation_mode != GenerationMode.ASSISTED_GENERATION:
            raise ValueError(
                f"The options ask for {generation_mode.value}; a drafter serves greedy search and sampling. Leave out "
                "the options of the other mode, or assistant_model."
            )
        if "assistant_tokenizer" in generation_mode_kwargs:
            raise ValueError("A drafter uses the target's tokenizer; leave out assistant_tokenizer.")
        if generation_mode_kwargs.get("synced_gpus"):
            raise ValueError(
                "synced_gpus is True (several processes that share a sharded model); a drafter finishes after other "
                "numbers of passes in each process. Leave out synced_gpus, or where the model is sharded leave out "
                "assistant_model."
            )
        # What upstream would check of the assistant (one tokenizer or two) has been checked above.
        others = {k: v for k, v in generation_mode_kwargs.items() if k != "assistant_model"}
        return original(self, generation_mode, generation_config, others)

    return _validate_generation_mode


def _decoding(original: Callable) -> Callable:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def _assisted_decoding(self, *args, **kwargs):
        call = signature.bind(self, *args, **kwargs).arguments
        generation_config = call["generation_config"]
        drafter = call.get("assistant_model")
        if not _drafts(drafter, generation_config):
            return original(self, *args, **kwargs)
        # generate() works on a copy of its config, so this attribute lives as long as the call. It is how
        # upstream itself hands on what a later step needs (`_eos_token_tensor`, `_mask_length`).
        generation_config._retrace_stopping_criteria = call["stopping_criteria"]
        # The loop cuts blocks at the config's limit; plain generate() stops at the criterion's, which may be another.
        generation_config.max_length = call["stopping_criteria"].max_length
        check_inputs(self, call["input_ids"], generation_config, call["model_kwargs"], drafter)
        cache = call["model_kwargs"]["cache"]
        try:
            with _not_recording_past(cache), _rolling_back(cache, generation_config):
                output = original(self, *args, **kwargs)
        finally:
            hook = getattr(generation_config, "_retrace_prefill_hook", None)
            if hook is not None:  # it removes itself, unless the prefill failed
                hook.remove()
        return _as_plain(output, self, generation_config, prompt_length=call["input_ids"].shape[1])

    return _assisted_decoding


@contextmanager
def _rolling_back(cache, generation_config) -> Iterator[None]:
    """Drops unverified tokens from the target's cache where a call ends in an exception (a streamer that stops it, an
    interrupt), so that a later turn on that cache does not take rejected drafts for text."""
    start = CacheAtStart(cache, int(cache.get_seq_length()))
    try:
        yield
    except BaseException:
        verified = getattr(generation_config, "_retrace_verified", None)  # None: nothing has run
        if verified is not None:
            start.roll_back(cache, verified)
        raise


@contextmanager
def _not_recording_past(cache: Cache) -> Iterator[None]:
    """Puts a cache's layers back as they were: the loop has them keep all of the past, for as long as they live."""
    recording = [getattr(layer, "record_past", None) for layer in cache.layers]
    try:
        yield
    finally:
        for layer, was in zip(cache.layers, recording):
            if was is not None:
                layer.record_past = was
        fill_short_convolutions(cache)


def _as_plain(output, target, generation_config, prompt_length: int):
    """The loop's output, in plain `generate()`'s shapes where it has others."""
    if not generation_config.return_dict_in_generate:
        return output
    if output.hidden_states is not None:
        first, *others = output.hidden_states
        # The first entry has the rows that stood in for those of another pass (`_stand_in_rows` of the generator).
        first = tuple(state[:, getattr(generation_config, "_retrace_stand_in_rows", 0) :] for state in first)
        output.hidden_states = (first, *others)
    wanted = selected_hidden_states(generation_config.output_hidden_states)
    if wanted is not None and output.hidden_states is not None:  # the drafter had all captured
        output.hidden_states = tuple(_only(wanted, states, target) for states in output.hidden_states)
    accepted = getattr(generation_config, "_retrace_accepted", None)
    if output.attentions and accepted and len(output.attentions[0]) == len(output.cache.layers):
        # The prefill's entry comes first.
        output.attentions = _plain_attentions(output.attentions, output.cache, accepted[1:], prompt_length)
    return output


def _only(wanted: list[int], states: tuple, target) -> tuple:
    """The states at the indices that are wanted, negative ones from the end, and None elsewhere."""
    places = resolve_hidden_states_indices(target, wanted, num_hidden_states=len(states))
    return tuple(state if i in places else None for i, state in enumerate(states))


def _plain_attentions(attentions: tuple, cache: Cache, accepted_per_round: list[int], prompt_length: int) -> tuple:
    """Attentions with plain's columns. The loop cuts a token's row behind its own column or further right: a static
    cache has more columns, and one that slides has others for each token of a pass."""
    starts = []  # the position of the first token of the pass, by token
    for accepted in accepted_per_round:
        starts += [prompt_length + len(starts)] * (accepted + 1)
    columns = []
    for step, of_layers in enumerate(attentions):
        # Rows of the prefill have plain's columns but for the empty ones of a static cache.
        window = (prompt_length + step - 1, starts[step - 1]) if step else None
        pairs = zip(of_layers, cache.layers)
        columns.append(tuple(_plain_columns(attention, layer, window) for attention, layer in pairs))
    return tuple(columns)


def _plain_columns(attention: torch.Tensor | None, layer, token: tuple[int, int] | None) -> torch.Tensor | None:
    """One layer's row of a token, given by its position and that of the first token in its pass."""
    if attention is None:
        return None
    if isinstance(layer, StaticLayer):
        return nn.functional.pad(attention, (0, layer.max_cache_len - attention.shape[-1]))
    if not layer.is_sliding or token is None:
        return attention
    position, start = token
    seen = layer.sliding_window - 1
    own = position - max(start - seen, 0)
    return attention[..., own - min(position, seen) : own + 1]


def _choosing(original: Callable) -> Callable:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def _get_candidate_generator(self, *args, **kwargs):
        call = signature.bind(self, *args, **kwargs).arguments
        generation_config = call["generation_config"]
        drafter = call.get("assistant_model")
        if _drafts(drafter, generation_config):
            generator = drafter.get_candidate_generator(
                target=self,
                generation_config=generation_config,
                logits_processor=call["logits_processor"],
                stopping_criteria=getattr(generation_config, "_retrace_stopping_criteria", None),
                model_kwargs=call["model_kwargs"],
            )
        else:
            generator = original(self, *args, **kwargs)
            if not isinstance(generator, DFlashTokenCandidateGenerator):
                return generator
        recorders = GenerationMixin._retrace_recorders.get()
        return _RecordedGenerator(generator, recorders) if recorders else generator

    return _get_candidate_generator


# -- counting --------------------------------------------------------------------------------------------------------


@dataclass
class AcceptanceStats:
    r"""
    What [`record_acceptance`] saw, pooled over the calls and up to date during them.

    A round is a target pass after the prefill, a pass with no proposal included. Each round yields its accepted
    proposals and one token of the target, so one call yields `1 + sum(accepted + 1)` tokens.

    A streamer sees the same: `generate()` puts the prompt, then the prefill's one token, then one tensor a round,
    before that round is counted here. Of the `n` tokens in it the first `n - 1` were drafted and accepted and the
    last is the target's own.

    Args:
        accepted_per_round (`list[int]`): Proposals accepted, after EOS and the length limit have cut the round.
        proposed_per_round (`list[int]`): Proposals verified.
        calls (`int`): `generate()` calls that got past their prefill.
    """

    accepted_per_round: list[int] = field(default_factory=list)
    proposed_per_round: list[int] = field(default_factory=list)
    calls: int = 0

    @classmethod
    def pooled(cls, stats: Iterable["AcceptanceStats"]) -> "AcceptanceStats":
        """Several put together; means over the result are means over rounds."""
        total = cls()
        for one in stats:
            total.calls += one.calls
            total.accepted_per_round += one.accepted_per_round
            total.proposed_per_round += one.proposed_per_round
        return total

    def add_call(self) -> None:
        self.calls += 1

    def add_round(self, proposed: int, accepted: int) -> None:
        self.proposed_per_round.append(proposed)
        self.accepted_per_round.append(accepted)

    @property
    def rounds(self) -> int:
        """Target passes after the prefill."""
        return len(self.accepted_per_round)

    @property
    def new_tokens(self) -> int:
        """Tokens generated: one of each prefill, `accepted + 1` of each round."""
        return self.calls + sum(self.accepted_per_round) + self.rounds

    @property
    def acceptance_length(self) -> float:
        """tau, the tokens a round yields: `(new_tokens - calls) / rounds`, a mean over rounds; NaN without a round."""
        return (self.new_tokens - self.calls) / self.rounds if self.rounds else float("nan")

    @property
    def acceptance_at(self) -> list[float]:
        """For slot k = 1, 2, ...: of the rounds that verified at least k proposals, the share that accepted k or more.

        As many entries as the longest block had proposals: `B - 1` unless every block was cut."""
        shares = []
        for slot in range(1, max(self.proposed_per_round, default=0) + 1):
            verified = sum(proposed >= slot for proposed in self.proposed_per_round)
            accepted = sum(accepted >= slot for accepted in self.accepted_per_round)
            shares.append(accepted / verified)
        return shares


@contextmanager
def record_acceptance() -> Iterator[AcceptanceStats]:
    """Counts the rounds of the `generate()` calls made inside, ours and transformers' own DFlash generator's.

    ```python
    with record_acceptance() as stats:
        target.generate(**inputs, assistant_model=drafter, max_new_tokens=256)
    print(stats.acceptance_length)
    ```

    Recorders nest, each counting all that happens inside it. They belong to the context (`contextvars`) they were
    opened in, as the calls do: a thread that runs `generate()` opens its own, or is started with
    `contextvars.copy_context().run`.

    Yields:
        [`AcceptanceStats`], filled while the calls run.
    """
    install_generate_hook()
    stats = AcceptanceStats()
    recorders = GenerationMixin._retrace_recorders
    token = recorders.set((*recorders.get(), stats))
    try:
        yield stats
    finally:
        recorders.reset(token)


class _RecordedGenerator(CandidateGenerator):
    """A candidate generator that also tells the recorders how each of its rounds went."""

    def __init__(self, generator: CandidateGenerator, recorders: tuple[AcceptanceStats, ...]):
        self.generator = generator
        self.recorders = recorders
        self.is_prefill = True

    @property
    def requires_model_outputs(self) -> bool:
        return self.generator.requires_model_outputs

    @property
    def model_kwargs_overrides(self) -> dict[str, Any]:
        return self.generator.model_kwargs_overrides

    @property
    def num_drafting_tokens(self) -> int:
        return self.generator.num_drafting_tokens

    def get_candidates(self, input_ids, **kwargs):
        return self.generator.get_candidates(input_ids, **kwargs)

    def update_candidate_strategy(self, input_ids, scores, num_matches):
        self.generator.update_candidate_strategy(input_ids, scores, num_matches)
        for stats in self.recorders:
            if self.is_prefill:
                stats.add_call()
            else:
                # scores has one row for the anchor and one for each proposal
                stats.add_round(proposed=scores.shape[1] - 1, accepted=int(num_matches))
        self.is_prefill = False


__all__ = ["AcceptanceStats", "install_generate_hook", "record_acceptance"]
