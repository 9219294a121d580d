"""One round of drafting inside `generate()`, and the check that a drafter and a target belong together."""

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, StaticLayer
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.generation.logits_process import (
    LogitNormalization,
    LogitsProcessorList,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation.stopping_criteria import (
    ConfidenceCriteria,
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
)
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL
from transformers.utils import logging

from .configuration_retrace import PROPOSALS, READS_TARGET_KV
from .context import (
    captured_layers,
    check_target_kv_layer_ids,
    check_target_layer_ids,
    gather_context_rows,
    keep_last,
    new_draft_cache,
    target_kv_shape,
)
from .draft_context import DraftContext, drop_context, keep_context, take_context
from .draft_vocabulary import DraftVocabulary
from .noise import block_inputs
from .positions import block_positions, rope_limits
from .recurrent_states import check_rollback, continues_a_cache, is_recurrent
from .target_head import check_head, draft_logits, head_logits
from .trajectory import RejectedTrajectory, align_trajectory


logger = logging.get_logger(__name__)

# Processors that look at each row alone and never move its argmax: they cost no loop over slots.
_ROW_WISE = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper, LogitNormalization)

# Processors that remember the sequence they were last called on; a rejected draft corrupts that memory.
_STATEFUL = {
    UnbatchedClassifierFreeGuidanceLogitsProcessor: "guidance_scale",
    SynthIDTextWatermarkLogitsProcessor: "watermarking_config (SynthID)",
}

# Options that choose another candidate generator, or a law that is not the target's, or make the target a drafter.
_CONFLICTING = (
    "prompt_lookup_num_tokens",
    "use_mtp",
    "assistant_early_exit",
    "assistant_ensemble_weight",
    "dola_layers",
    "is_assistant",
)

_NEEDS_SCORES = (
    "The stopping criterion {name} {fault}. With a drafter, criteria must be functions of the tokens; drop it, or "
    "generate without assistant_model."
)


class RetraceCandidateGenerator(CandidateGenerator):
    r"""
    Drafts for one `generate()` call: a block from what the target verified (its tapped layers) and what it rejected.

    It captures the tapped layers of every target pass (and the state after the final norm, where the conditioning
    reads it; where the context is made of the target's keys and values, those of newly verified tokens are read from
    its cache), always runs the drafter on `B` slots, and proposes at most `min(B - 1, max_length - length - 1)` of
    them. What is carried from one round to the next (the drafter's last states and its context K/V) lives here, on the
    drafter's device, and goes when the call ends; only the context K/V stay with the target's cache where the user
    keeps that (`draft_context.py`). Nothing is copied to the host.

    Proposals are each slot's argmax, also when sampling: the loop then samples the target at every slot and compares,
    which is the target's law exactly. With `drafter.config.proposal = "sample"` (and `do_sample=True`) they are
    drawn from the drafter's own law q, processors applied, and q's logits are handed back for rejection sampling.

    Custom stopping criteria are run on every proposed prefix with `scores=None`, and the block is cut before the token
    that completes the stop: exact for criteria that are functions of the prefix. Such calls propose argmax whatever
    `config.proposal` says, because a cut that depends on a drawn token would bend the law. `max_time` is looked at
    once a round.

    Logits processors are applied to prefixes that may be rejected later and out of order, so a processor with memory
    of its own is not exact (neither is it in transformers' own assisted decoding). Where one is the user's own code
    (`prefix_allowed_tokens_fn` included) blocks end before an end token and are argmax, so that it is never asked what
    follows one.

    Args:
        drafter ([`RetraceDrafter`]):
            The drafter. Its config's `proposal`, `"argmax"` (default) or `"sample"`, sets the policy.
        target (`PreTrainedModel`):
            The model that `generate()` was called on.
        generation_config (`GenerationConfig`):
            The call's, prepared by `generate()`: `max_length` and `do_sample` are read.
        logits_processor (`LogitsProcessorList`, *optional*):
            The call's processors.
        stopping_criteria (`StoppingCriteriaList`, *optional*):
            The call's criteria.
        model_kwargs (`dict`, *optional*):
            The call's model inputs; a cache that already holds tokens is respected. With `prefill_chunk_size` the
            prompt is read in chunks, as plain `generate()` reads it.

    Raises:
        ValueError: an unknown `config.proposal`, a processor that cannot be rolled back, or `"sample"` with a target
            whose logits are not what [`draft_logits`] computes.

    Source: DFlash, arXiv 2602.06036; ReTrace, arXiv 2608.29748; Leviathan et al., arXiv 2211.17192 (sampling).
    """

    requires_model_outputs = True

    def __init__(
        self,
        drafter: PreTrainedModel,
        target: PreTrainedModel,
        generation_config,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        model_kwargs: dict[str, Any] | None = None,
    ):
        config = drafter.config
        self.drafter = drafter
        self.target = target
        self.generation_config = generation_config
        generation_config._retrace_accepted = []
        self.device = drafter.device
        self.dtype = drafter.dtype
        self.block_size = config.block_size
        self.context_window = config.context_window
        self.target_layer_ids = list(config.target_layer_ids)
        self.target_kv_layer_ids = list(config.target_kv_layer_ids or ())
        self.target_kv_shape = (config.target_num_key_value_heads, config.target_head_dim)
        self.conditioning = config.conditioning
        self.last_layer = target.config.get_text_config(decoder=True).num_hidden_layers

        self.vocabulary = DraftVocabulary.of(drafter, target)

        self.logits_processor = _checked_processors(logits_processor)
        self.slot_by_slot = any(type(p) not in _ROW_WISE for p in self.logits_processor)
        self.max_length, self.prefix_criteria = _split_criteria(stopping_criteria, generation_config)
        # A user's grammar may have no answer behind an end token, where plain generate() never asks it.
        asks_user = any(_is_users(processor) for processor in self.logits_processor)
        self.eos = getattr(generation_config, "_eos_token_tensor", None) if asks_user else None
        sampled = _proposal(config) == "sample" and bool(generation_config.do_sample)
        self.draws = sampled and not self.prefix_criteria and self.eos is None
        if self.draws:
            check_head(target)

        # Merged into the target's inputs at each pass. Where the user wants hidden states, all are captured.
        self._returns_states = bool(
            generation_config.return_dict_in_generate and generation_config.output_hidden_states
        )
        layers = captured_layers(self.target_layer_ids, self.last_layer, with_last=self.conditioning == "corrected")
        self._capture = {"output_hidden_states": True if self._returns_states else layers}
        self._counted = layers[0]  # a captured state, to count the rows of a pass by
        self.model_kwargs_overrides: dict[str, Any] = self._capture

        self._cache = new_draft_cache(config)
        self._target_cache = None
        self._kept: DraftContext | None = None  # what the last draft left on it
        self._stand_in_rows = 0  # rows of the prefill's hidden states that are none of its own
        self._unseen = 0  # tokens that the target's cache holds before those of input_ids
        self._draft_states: torch.Tensor | None = None  # the last round's, [1, B, D]
        self._prompt_rows: torch.Tensor | None = None  # rows of the prefill that are no padding; None: all
        self._padding = torch.empty(0, dtype=torch.long)  # places of the text that the attention mask leaves out
        self._chunks: list[torch.Tensor] = []  # context of the prompt's chunks before the last, [1, n, C] each

    @torch.no_grad()
    def get_candidates(
        self,
        input_ids: torch.LongTensor,
        model_kwargs: dict[str, Any],
        model_outputs=None,
        is_first_iteration: bool = False,
        n_last_matches: int = 0,
        **kwargs,
    ) -> tuple[torch.LongTensor, torch.Tensor | None]:
        """One round.

        Args:
            input_ids (`torch.LongTensor` of shape `[1, length]`): All tokens so far; the last one is the anchor.
            model_kwargs (`dict`): The loop's model inputs, for positions and padding.
            model_outputs (`ModelOutput`, *optional*): The target's last pass, rejected drafts included.
            is_first_iteration (`bool`): Whether the target has run yet; the prefill is asked for with no proposal.
            n_last_matches (`int`): Proposals accepted in the last pass.

        Returns:
            The tokens with the proposals behind them, `[1, length + k]`, and the `[1, k, V]` logits of the law that
            they were drawn from (`None` for argmax proposals, and where nothing is proposed).
        """
        if is_first_iteration:
            self._begin(input_ids, model_kwargs)
            return input_ids, None
        self.model_kwargs_overrides = self._capture  # what _begin() set was for the prefill
        num_proposals = min(self.block_size - 1, self.max_length - input_ids.shape[1] - 1)
        if num_proposals <= 0:
            return input_ids, None

        hidden_states = self._captured(model_outputs)
        if self._draft_states is None and self._stand_in_rows:  # of the prefill
            hidden_states = [state[:, self._stand_in_rows :] for state in hidden_states]
        rows = hidden_states[self._counted].shape[1]
        num_context = rows if self._draft_states is None else n_last_matches + 1
        # Read from the pass, not from what was meant to be proposed: length and stops cut blocks short.
        trajectory = self._rejected(hidden_states, first_rejected=n_last_matches + 1, num_verified=rows - 1)
        # The loop has dropped what was rejected, and the anchor has not been fed.
        context = self._context(hidden_states, model_outputs, num_context, verified=input_ids.shape[1] - 1)
        block = self._draft(input_ids, context, model_kwargs.get("position_ids"), trajectory)
        proposals, logits = self._propose(input_ids, block[:, 1 : 1 + num_proposals])
        if self.prefix_criteria:
            proposals = proposals[:, : self._stop_cap(input_ids, proposals)]
        return torch.cat([input_ids, proposals], dim=1), logits

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int) -> None:
        """The loop has just dropped what was rejected: notes how many tokens the target's cache holds, all verified.
        A call that fails before the next such moment is rolled back to it (`generation.py`). And how many proposals
        were accepted, for the shapes of what is returned."""
        self.generation_config._retrace_verified = self._unseen + input_ids.shape[1] - 1
        if self._kept is not None:
            self._kept.verified = input_ids.shape[1] - 1
        self.generation_config._retrace_accepted.append(int(num_matches))

    @property
    def num_drafting_tokens(self) -> int:
        """Tokens of the longest pass, whose states the target's cache is asked to keep: the anchor and the proposals.
        A pass of more than it keeps would go through a scan that in some targets starts anew."""
        return self.block_size

    def _captured(self, model_outputs) -> tuple[torch.Tensor | None, ...]:
        """The target's hidden states by layer index, `None` where a layer was not asked for."""
        hidden_states = getattr(model_outputs, "hidden_states", None)
        found = len(hidden_states) if hidden_states is not None else 0
        if found != self.last_layer + 1:
            raise ValueError(
                f"{type(self.target).__name__} returned {found} hidden states for output_hidden_states, and a drafter "
                f"reads from {self.last_layer + 1} (embedding and {self.last_layer} layers); this target cannot be "
                "served."
            )
        return hidden_states

    # -- what the drafter sees ---------------------------------------------------------------------------------------

    def _begin(self, input_ids: torch.LongTensor, model_kwargs: dict[str, Any]) -> None:
        """Prepares the prefill: leaves out what a warm cache holds, and finds the padding, once a call."""
        cached = cached_prefix_length(input_ids, self.generation_config, model_kwargs)
        cache = model_kwargs.get("cache")
        past = int(cache.get_seq_length()) if cache is not None else 0
        self._unseen = past - cached
        if not self._unseen:
            self._target_cache = cache  # else it holds text that is not known here
        mask = model_kwargs.get("attention_mask")
        if mask is not None:
            self._padding = (mask[0] == 0).nonzero()[:, 0]
        padding = self._padding[self._padding < cached]
        positions = model_kwargs.get("position_ids")
        kept = take_context(cache, self.drafter, input_ids[:, :cached], padding, positions) if cached else None
        if kept is not None:
            self._cache = kept.cache
            # The last tokens of a call were verified after its last draft: the drafter has not read them. Where the
            # target's cache lets go of them they are fed again; where its layers slide or keep a state, or the user is
            # to see the prefill's rows, the context has a gap there. So it has where another call went on from there:
            # how that one masked and placed its tokens is not known, and plain generate() takes them as they are.
            unread = cached - kept.tokens.shape[1]
            slides = any(is_recurrent(layer) or layer.is_sliding for layer in self._target_cache.layers)
            # Keys that were rotated by other frequencies would not come back as they were.
            grows = rope_limits(self.target.config.get_text_config(decoder=True))
            own = cached <= kept.verified
            if unread > 0 and own and not slides and not grows and not self._returns_rows():
                self._target_cache.crop(-unread)
                cached -= unread
        self.generation_config._retrace_verified = self._unseen + cached
        if mask is not None:
            # generate() drops a mask of ones, so there is padding here. The drafter gets no context row for it, which
            # is the same as a mask on it and needs none in any later round.
            rows = mask[0, cached:].nonzero()[:, 0]
            self._prompt_rows = None if rows.shape[0] == mask.shape[1] - cached else rows
        chunk_size = self.generation_config.prefill_chunk_size
        if chunk_size is not None:
            cached = self._prefill_chunks(input_ids, model_kwargs, cached, chunk_size)
        if cached:
            # The loop would feed the whole prompt on top of the cache.
            inputs = self._prompt_inputs(input_ids, model_kwargs, cached, input_ids.shape[1])
            inputs.pop("logits_to_keep", None)  # the loop's own is for what it reads
            self.model_kwargs_overrides = inputs | self._capture
        elif cache is not None:
            self.model_kwargs_overrides = self._capture | {"cache": cache}  # as in `_prompt_inputs`
        if cached and self._returns_states:
            self._add_stand_in_rows(cached)

    def _add_stand_in_rows(self, count: int) -> None:
        """From transformers 5.25 on the loop takes the prefill's hidden states for those of the whole prompt. A warm
        cache and chunks leave the prefill its last tokens alone: zeros stand for the others, and are dropped again
        where the states are read (here and in `generation.py`)."""
        config = self.generation_config

        def add(module, args, output):
            config._retrace_prefill_hook.remove()
            rows = [state.new_zeros(state.shape[0], count, state.shape[2]) for state in output.hidden_states]
            output.hidden_states = tuple(torch.cat(pair, dim=1) for pair in zip(rows, output.hidden_states))

        config._retrace_stand_in_rows = self._stand_in_rows = count
        config._retrace_prefill_hook = self.target.register_forward_hook(add)

    def _returns_rows(self) -> bool:
        """Whether the call returns something with a row for each token of a pass."""
        config = self.generation_config
        return self._returns_states or bool(config.return_dict_in_generate and config.output_attentions)

    def _prefill_chunks(
        self, input_ids: torch.LongTensor, model_kwargs: dict[str, Any], cached: int, chunk_size: int
    ) -> int:
        """Runs the target on the prompt in chunks, all but the last, which is the loop's prefill. Keeps what the
        drafter reads of them, and returns how many tokens the target's cache then holds."""
        while input_ids.shape[1] - cached > chunk_size:
            inputs = self._prompt_inputs(input_ids, model_kwargs, cached, cached + chunk_size)
            outputs = self.target(**(inputs | self._capture), return_dict=True)
            outputs.cache.crop(0)  # layers that slide let go of what is behind their window
            cached += chunk_size
            self._chunks.append(self._context(self._captured(outputs), outputs, chunk_size, verified=cached))
            if not any(map(is_recurrent, outputs.cache.layers)):  # which can go back to the call's start alone
                self.generation_config._retrace_verified = self._unseen + cached
        return cached

    def _prompt_inputs(
        self, input_ids: torch.LongTensor, model_kwargs: dict[str, Any], start: int, end: int
    ) -> dict[str, Any]:
        """The target's inputs for the prompt's tokens from `start` to `end`, as plain `generate()` prepares those of a
        chunk; its cache holds the ones before them."""
        kwargs = dict(model_kwargs)
        if kwargs.get("position_ids") is not None:
            kwargs["position_ids"] = kwargs["position_ids"][..., start:end]
        for key in ("attention_mask", "token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"):
            if kwargs.get(key) is not None:
                kwargs[key] = kwargs[key][..., :end]
        inputs = self.target.prepare_inputs_for_generation(input_ids[:, start:end], is_first_iteration=True, **kwargs)
        inputs["cache"] = model_kwargs["cache"]  # Phi-3 drops it where its frequencies change; so does not the loop
        return inputs

    def _rejected(self, hidden_states, first_rejected: int, num_verified: int) -> RejectedTrajectory | None:
        """What the last round leaves for this one; `None` without a last round, and where nothing lies behind the
        first rejection."""
        if self.conditioning == "none" or self._draft_states is None or first_rejected >= num_verified:
            return None
        if self.conditioning == "corrected":
            target_states = self._received(hidden_states[self.last_layer])
        else:
            target_states = self._draft_states  # gated and overwrite never read it
        return align_trajectory(self._draft_states, target_states, first_rejected, num_verified)

    def _draft(
        self,
        input_ids: torch.LongTensor,
        context: torch.Tensor,
        position_ids: torch.LongTensor | None,
        trajectory: RejectedTrajectory | None,
    ) -> torch.Tensor:
        """Runs the drafter on `B` slots behind the newly verified tokens (`context`, `[1, n, C]`); `[1, B, D]`, after
        its norm."""
        if self._target_cache is not None:
            drop_context(self._target_cache)  # a draft that fails half-way leaves a context that fits nothing
        if self._chunks:
            context = torch.cat([*self._chunks, context], dim=1)
            self._chunks = []
        positions = self._positions(input_ids, context.shape[1], position_ids)  # [1, n + 1], the anchor's is the last
        if self._draft_states is not None:
            self._cache.crop(-self.block_size)  # the last block's own K/V
        elif self._prompt_rows is not None:
            context = context[:, self._prompt_rows.to(context.device)]
            rows = self._prompt_rows.to(positions.device)
            positions = torch.cat([positions[:, rows], positions[:, -1:]], dim=1)
        if self.context_window is not None:
            context, positions = context[:, -self.context_window :], positions[:, -self.context_window - 1 :]
            keep_last(self._cache, self.context_window - context.shape[1])
        self._cache.set_previous_accepted_tokens(context.shape[1])
        block = self.drafter(
            **block_inputs(self.target.get_input_embeddings(), input_ids[:, -1:], self.drafter),
            context_hidden_states=context,
            position_ids=torch.cat([positions[:, :-1], block_positions(positions[:, -1:], self.block_size)], dim=1),
            attention_mask=None,
            cache=self._cache,
            trajectory=trajectory,
        ).last_hidden_state
        self._draft_states = block.detach()
        if self._target_cache is not None:
            self._kept = keep_context(
                self._target_cache, self.drafter, self._cache, input_ids[:, :-1], self._padding, position_ids
            )
        return block

    def _context(self, hidden_states, model_outputs, num_context: int, verified: int) -> torch.Tensor:
        """What the drafter reads of a target pass's first `num_context` tokens, `[1, n, C]`; with them the target's
        cache holds `verified` tokens of `input_ids`."""
        taps = {i + 1: hidden_states[i + 1][:, :num_context] for i in self.target_layer_ids}
        end = self._unseen + verified
        rows = gather_context_rows(
            taps,
            self.target_layer_ids,
            cache=model_outputs.cache if self.target_kv_layer_ids else None,
            target_kv_layer_ids=self.target_kv_layer_ids,
            start=end - num_context,
            end=end,
            shape=self.target_kv_shape,
        )
        return self._received(rows)

    def _received(self, states: torch.Tensor) -> torch.Tensor:
        return states.detach().to(device=self.device, dtype=self.dtype)

    def _positions(
        self, input_ids: torch.LongTensor, num_context: int, position_ids: torch.LongTensor | None
    ) -> torch.LongTensor:
        """Positions of the last `num_context` verified tokens and of the anchor behind them, `[1, n + 1]`."""
        if position_ids is not None and position_ids.ndim == 2:
            return position_ids[:, -num_context - 1 :].to(self.device)
        # Multimodal (3-D) positions mean nothing to a text drafter, which counts tokens.
        length = input_ids.shape[1]
        return torch.arange(length - num_context - 1, length, device=self.device)[None]

    # -- what it proposes --------------------------------------------------------------------------------------------

    def _propose(
        self, input_ids: torch.LongTensor, hidden: torch.Tensor
    ) -> tuple[torch.LongTensor, torch.Tensor | None]:
        """Tokens for the slots of `hidden` (`[1, k, D]`), and the logits of the law if they were drawn from one."""
        if not self.draws and not self.slot_by_slot:
            # A logit scale, a softcap and row-wise processors keep the argmax: none is applied.
            return self._most_likely(hidden).to(input_ids.device), None
        logits = self._logits(hidden).to(device=input_ids.device, dtype=torch.float32)
        if self.slot_by_slot:
            proposals = self._propose_slot_by_slot(input_ids, logits)
            logits = logits[:, : proposals.shape[1]]
        else:
            prefixes = input_ids.expand(logits.shape[1], -1)
            logits = self.logits_processor(prefixes, logits[0])[None]
            proposals = _draw(logits[0])[None]
        return proposals, logits if self.draws and proposals.shape[1] else None

    def _most_likely(self, hidden: torch.Tensor) -> torch.LongTensor:
        """Each state's most likely token among those that are drafted, `[1, k]`."""
        if self.vocabulary is not None:
            return self.vocabulary.most_likely(hidden)
        return head_logits(self.target, hidden).argmax(dim=-1)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[1, k, V]`, -inf for tokens that are not drafted."""
        if self.vocabulary is not None:
            return self.vocabulary.whole_logits(hidden)
        return draft_logits(self.target, hidden)

    def _propose_slot_by_slot(self, input_ids: torch.LongTensor, logits: torch.Tensor) -> torch.LongTensor:
        """Applies the processors to each slot behind the proposals before it, as the loop does; writes to `logits`.
        Where a user's own code is among them, an end token is left to the target: nothing stands behind it. So is a
        token where the processors leave none of the draft vocabulary; that depends on the tokens before it alone, so
        that the law of those proposed stays what it was."""
        tokens = input_ids
        for slot in range(logits.shape[1]):
            logits[:, slot] = self.logits_processor(tokens, logits[:, slot])
            if self.vocabulary is not None and not (logits[:, slot] > -torch.inf).any():
                break
            chosen = _draw(logits[:, slot]) if self.draws else logits[:, slot].argmax(dim=-1)
            if self.eos is not None and torch.isin(chosen, self.eos.to(chosen.device)).any():
                break
            tokens = torch.cat([tokens, chosen[:, None]], dim=1)
        return tokens[:, input_ids.shape[1] :]

    def _stop_cap(self, input_ids: torch.LongTensor, proposals: torch.LongTensor) -> int:
        """How many proposals come before the first one that completes a stop. The loop looks at criteria only after a
        whole accepted block, so the completing token must be the target's own."""
        tokens = torch.cat([input_ids, proposals], dim=1)
        for count in range(1, proposals.shape[1] + 1):
            if any(_stops(criterion, tokens[:, : input_ids.shape[1] + count]) for criterion in self.prefix_criteria):
                return count - 1
        return proposals.shape[1]


def _draw(logits: torch.Tensor) -> torch.LongTensor:
    """One token per row of `[k, V]` logits, `[k]`."""
    return torch.multinomial(logits.softmax(dim=-1, dtype=torch.float32), num_samples=1)[:, 0]


def _proposal(config) -> str:
    if config.proposal not in PROPOSALS:
        raise ValueError(f"The drafter's config.proposal is {config.proposal!r}; it must be one of {PROPOSALS}.")
    return config.proposal


def _checked_processors(processors: LogitsProcessorList | None) -> LogitsProcessorList:
    for processor in processors or ():
        if type(processor) in _STATEFUL:
            raise ValueError(
                f"{type(processor).__name__} remembers the tokens it has seen and cannot be rolled back after a "
                f"rejected draft; drop {_STATEFUL[type(processor)]}, or generate without assistant_model."
            )
    return LogitsProcessorList() if processors is None else processors


def _is_users(processor) -> bool:
    """Whether a processor is, or asks, code that is not transformers'."""
    own = not type(processor).__module__.startswith("transformers.")
    return own or isinstance(processor, PrefixConstrainedLogitsProcessor)


def _split_criteria(criteria: StoppingCriteriaList | None, generation_config) -> tuple[int, list]:
    """The length limit in tokens, and the criteria that must be looked at on each proposed prefix.

    The loop itself cuts a block at the length limit and at the config's EOS tokens, so those need no look. Another
    EOS criterion that the user passed does.
    """
    max_length = generation_config.max_length
    prefix_criteria = []
    eos = getattr(generation_config, "_eos_token_tensor", None)
    handled = set() if eos is None else set(eos.flatten().tolist())
    for criterion in criteria or ():
        if type(criterion) is MaxLengthCriteria:
            max_length = min(max_length, criterion.max_length)
        elif type(criterion) is EosTokenCriteria and set(criterion.eos_token_id.flatten().tolist()) <= handled:
            continue
        elif type(criterion) is ConfidenceCriteria:
            raise ValueError(_NEEDS_SCORES.format(name="ConfidenceCriteria", fault="is a function of the scores"))
        elif type(criterion) is not MaxTimeCriteria:
            prefix_criteria.append(criterion)
    return max_length, prefix_criteria


def _stops(criterion, tokens: torch.LongTensor) -> bool:
    try:
        return bool(torch.as_tensor(criterion(tokens, None)).any())
    except Exception as error:
        fault = f"failed on a proposed prefix without scores ({error})"
        raise ValueError(_NEEDS_SCORES.format(name=type(criterion).__name__, fault=fault)) from error


# -- does this drafter belong to this target, and can this call be served? -------------------------------------------


def cached_prefix_length(input_ids: torch.LongTensor, generation_config, model_kwargs: dict[str, Any]) -> int:
    """How many leading tokens of `input_ids` the call's cache already holds.

    0 for an empty cache, and where only the new tokens were passed: plain `generate()` tells the two apart by the
    length of the attention mask, and so does this.
    """
    cache = model_kwargs.get("cache")
    past = int(cache.get_seq_length()) if cache is not None else 0
    mask = model_kwargs.get("attention_mask")
    seen = mask.shape[1] if mask is not None else getattr(generation_config, "_mask_length", -1)
    return past if seen == input_ids.shape[1] else 0


def check_pairing(drafter, target: PreTrainedModel, generation_config=None) -> None:
    """Raises before the target has run if this drafter cannot serve this target, or not with these options.

    Args:
        drafter ([`RetraceDrafter`]): The drafter, PEFT-wrapped or not.
        target (`PreTrainedModel`): The model that is to generate.
        generation_config (`GenerationConfig`, *optional*): The call's options, checked if given.

    Raises:
        ValueError: names what does not fit, and the cure.
    """
    _check_models(drafter.config, target)
    if hasattr(drafter, "check_modules"):  # a drafter is known by get_candidate_generator alone
        drafter.check_modules()
    if generation_config is not None:
        _check_options(generation_config, target)
        _check_speculation(drafter.config, generation_config)


def check_target(target: PreTrainedModel) -> None:
    """Raises a ValueError if no block drafter can serve this target, by name."""
    name = type(target).__name__
    if getattr(target.config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder-decoder; a block drafter serves decoder-only targets.")
    if target.get_output_embeddings() is None:
        raise ValueError(f"{name} has no LM head (output embeddings); load the target with AutoModelForCausalLM.")
    if target.device.type == "meta":
        # The loop sends its tokens to the device of the target's first weights.
        raise ValueError(
            f"The first weights of {name} are offloaded (or were never loaded), so its tokens have no device to go "
            "to; keep the embedding on a device in device_map, and offload later layers or the head."
        )
    check_rollback(target)


def _check_virtual_tokens(target: PreTrainedModel) -> None:
    """PEFT's prompt learning puts rows before the prompt that are no tokens; it hooks into the target as here."""
    owner = getattr(target.prepare_inputs_for_generation, "__self__", target)
    adapter = getattr(owner, "active_peft_config", None)
    if getattr(adapter, "is_prompt_learning", False):
        raise ValueError(
            f"The adapter {type(adapter).__name__.removesuffix('Config')} puts virtual tokens before the prompt, "
            "which a drafter cannot count; generate without assistant_model, or use an adapter of the layers (LoRA)."
        )


def _check_models(config, target: PreTrainedModel) -> None:
    check_target(target)
    _check_virtual_tokens(target)
    name = type(target).__name__
    text = target.config.get_text_config(decoder=True)
    if config.hidden_size != text.hidden_size:
        raise ValueError(
            f"The drafter's hidden size is {config.hidden_size} and that of {name} is {text.hidden_size}; use the "
            "drafter that was trained for this target."
        )
    if config.num_target_layers != text.num_hidden_layers:
        raise ValueError(
            f"The drafter was made for a target of {config.num_target_layers} layers and {name} has "
            f"{text.num_hidden_layers}; use the drafter that was trained for this target."
        )
    _check_context(config, name, text)
    if config.block_size < 2:
        raise ValueError(
            f"The drafter's block_size is {config.block_size}; a block needs the anchor and at least one proposal: "
            "set drafter.config.block_size to 2 or more."
        )
    rows = target.get_input_embeddings().weight.shape[0]
    if config.vocab_size > max(rows, text.vocab_size):
        raise ValueError(
            f"The drafter's vocabulary has {config.vocab_size} tokens and that of {name} has {rows}; use the drafter "
            "of this target, or resize the target's embeddings to the size the drafter was trained with."
        )
    if config.vocab_size < min(rows, text.vocab_size):
        # The drafter has no row of its own for any token, so tokens added to its target do it no harm.
        logger.warning_once(
            f"The drafter was made for {config.vocab_size} tokens and {name} has {rows}. That is right if tokens were "
            "added to the drafter's own target, or its embeddings padded; else use the drafter of this target."
        )
    if config.mask_token_id is None:
        raise ValueError(
            "The drafter's config has no mask_token_id; set it to the mask token it was trained with, an unused "
            "special token of the target."
        )
    if not 0 <= config.mask_token_id < rows:
        raise ValueError(
            f"The drafter's mask_token_id {config.mask_token_id} is beyond the {rows} embedding rows of {name}; call "
            "target.resize_token_embeddings() as in training, or correct drafter.config.mask_token_id."
        )
    special = {text.pad_token_id, *(text.eos_token_id if isinstance(text.eos_token_id, list) else [text.eos_token_id])}
    if config.mask_token_id in special:
        logger.warning_once(
            f"The drafter's mask_token_id {config.mask_token_id} is also the target's padding or end token; an unused "
            "special token drafts better."
        )


def _check_context(config, name: str, text) -> None:
    """What the drafter reads of the target must be there (`text` is its text config)."""
    if config.context_fusion != "kv":
        check_target_layer_ids(config.target_layer_ids, text.num_hidden_layers)
    if config.context_fusion in READS_TARGET_KV:
        check_target_kv_layer_ids(config.target_kv_layer_ids, text)
        heads, head_dim = target_kv_shape(text)
        if (heads, head_dim) != (config.target_num_key_value_heads, config.target_head_dim):
            raise ValueError(
                f"The drafter reads {config.target_num_key_value_heads} key/value heads of "
                f"{config.target_head_dim} channels and {name} has {heads} of {head_dim}; use the drafter that was "
                "trained for this target."
            )


def _check_speculation(config, generation_config) -> None:
    if getattr(generation_config, "speculation_type", None) == "dflash" and config.context_fusion in READS_TARGET_KV:
        raise ValueError(
            f"speculation_type is 'dflash', transformers' own generator, which hands over tapped states only, and "
            f"this drafter reads the target's keys and values (context_fusion={config.context_fusion!r}); leave out "
            "speculation_type, and switch a ReTrace's signal off by drafter.config.conditioning = 'none'."
        )


def _check_cached_kv(config, cache) -> None:
    """A cache that the caller brings may be of another kind than the target's own."""
    if config.context_fusion not in READS_TARGET_KV:
        return
    layers = cache.layers
    for i in config.target_kv_layer_ids if layers else ():  # a cache that makes its layers later makes dynamic ones
        kind = type(layers[i]).__name__ if i < len(layers) else "nothing"
        if i >= len(layers) or layers[i].is_sliding or not isinstance(layers[i], (DynamicLayer, StaticLayer)):
            raise ValueError(
                f"Layer {i} of the {type(cache).__name__} is {kind}, which does not keep the keys and values of every "
                f"token, and the drafter reads them (target_kv_layer_ids={list(config.target_kv_layer_ids)}); leave "
                "out cache and cache_implementation, or assistant_model."
            )


def _check_options(generation_config, target: PreTrainedModel) -> None:
    for option in ("num_beams", "num_return_sequences"):
        value = getattr(generation_config, option, None)
        if value is not None and value > 1:
            raise ValueError(f"{option} is {value}; a drafter serves one sequence at a time, set {option}=1.")
    if generation_config.use_cache is False:
        raise ValueError(
            "use_cache is False; a drafter needs the target's cache, leave use_cache out, or pass use_cache=True "
            "where the target's own config switches it off."
        )
    for option in _CONFLICTING:
        if getattr(generation_config, option, None):
            raise ValueError(
                f"{option} is {getattr(generation_config, option)} and does not go together with a drafter; leave out "
                f"{option} or assistant_model."
            )
    chunk_size = generation_config.prefill_chunk_size
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"prefill_chunk_size is {chunk_size}; give a number of tokens, or leave it out.")
    guidance = getattr(generation_config, "guidance_scale", None)
    if guidance is not None and guidance != 1:
        raise ValueError(
            f"guidance_scale is {guidance}; it keeps a cache of its own that cannot be rolled back after a rejected "
            "draft. Leave out guidance_scale or assistant_model."
        )
    attention = getattr(target.config.get_text_config(decoder=True), "_attn_implementation", None)
    if generation_config.output_attentions and generation_config.return_dict_in_generate and attention != "eager":
        raise ValueError(
            f"output_attentions is set and the target's attention is {attention!r}, which returns none; call "
            "target.set_attn_implementation('eager') first."
        )
    if generation_config.cache_implementation == "quantized":
        raise ValueError(
            "cache_implementation is 'quantized'; a quantized cache cannot be cropped after a rejected draft. Leave "
            "out cache_implementation or assistant_model."
        )


def check_inputs(
    target: PreTrainedModel,
    input_ids: torch.LongTensor,
    generation_config,
    model_kwargs: dict[str, Any],
    drafter=None,
) -> None:
    """Raises before the target has run if a drafter cannot serve these inputs.

    Args:
        target (`PreTrainedModel`): The model that is to generate.
        input_ids (`torch.LongTensor` of shape `[b, length]`): The prompt.
        generation_config (`GenerationConfig`): The call's options.
        model_kwargs (`dict`): The call's model inputs, its cache among them.
        drafter ([`RetraceDrafter`], *optional*): Which one, for what it reads of the cache.

    Raises:
        ValueError: names what does not fit, and the cure.
    """
    if input_ids.shape[0] > 1:
        raise ValueError(
            f"The batch has {input_ids.shape[0]} sequences; a drafter serves one, call generate() once for each."
        )
    embeds = model_kwargs.get("inputs_embeds")
    if input_ids.shape[1] == 0 and embeds is None:
        raise ValueError("The prompt is empty; a drafter needs at least one token, such as the target's BOS.")
    if embeds is not None and embeds.shape[1] != input_ids.shape[1]:
        raise ValueError(
            "inputs_embeds was passed without input_ids of the same length; a drafter needs the prompt's tokens, pass "
            "input_ids (with or without inputs_embeds)."
        )
    if generation_config.prefill_chunk_size is not None:
        whole = ["inputs_embeds", *MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL]
        # Where a text has no image, its encoder's outputs are an empty dictionary.
        found = [key for key in whole if model_kwargs.get(key) is not None and model_kwargs[key] != {}]
        if found:
            raise ValueError(f"{found[0]} cannot be prefilled in chunks; leave out prefill_chunk_size.")
    cache = model_kwargs.get("cache")
    if cache is None:
        raise ValueError("There is no cache; a drafter needs the target's cache, leave use_cache out.")
    if not cache.is_croppable:
        raise ValueError(
            f"{type(cache).__name__} cannot be cropped after a rejected draft; leave out cache and "
            "cache_implementation, or assistant_model."
        )
    if drafter is not None:
        _check_cached_kv(drafter.config, cache)
    past = int(cache.get_seq_length())
    if past:
        _check_warm_cache(past, input_ids, generation_config, model_kwargs)
    _check_states(target, past, input_ids, generation_config, model_kwargs)
    _check_rope(target, past, input_ids, generation_config, model_kwargs)


def _check_rope(target, past: int, input_ids: torch.LongTensor, generation_config, model_kwargs) -> None:
    """A target whose rotary frequencies change with the length of the text gives the tokens of a block those of its
    last one. So a call may not reach the length where they change."""
    limits = rope_limits(target.config.get_text_config(decoder=True))
    if not limits:
        return
    positions = model_kwargs.get("position_ids")
    start = input_ids.shape[1] if positions is None else int(positions.max()) + 1
    end = start + generation_config.max_length - input_ids.shape[1] - 1  # the last token is never read
    # Where the text stands that the cache holds; without one, where the prompt ends, which is read in one pass.
    read = start
    if past:
        read -= input_ids.shape[1] - cached_prefix_length(input_ids, generation_config, model_kwargs)
    for kind, limit in limits:
        # LongRoPE changes once; behind that it is as any other.
        if end > limit and not (kind == "longrope" and limit < read):
            shorter = f"set max_new_tokens to {limit - start + 1} at most, or " if start <= limit else ""
            raise ValueError(
                f"The target's rope_type {kind!r} changes its frequencies above {limit} tokens, and this call may "
                f"read up to {end}: a block would not get those of its tokens; {shorter}generate without "
                "assistant_model."
            )


def _check_states(target, past: int, input_ids: torch.LongTensor, generation_config, model_kwargs) -> None:
    """What layers that keep a state do not go together with."""
    text = target.config.get_text_config(decoder=True)
    if not model_kwargs["cache"].layers and any(map(is_recurrent, DynamicCache(config=text).layers)):
        raise ValueError(
            f"The cache has no layers yet, and {type(target).__name__} has some that keep a state; make it with "
            "DynamicCache(config=target.config), or leave cache out."
        )
    if continues_a_cache(target):
        return
    reads = input_ids.shape[1] - (cached_prefix_length(input_ids, generation_config, model_kwargs) if past else 0)
    chunk_size = generation_config.prefill_chunk_size
    option = "a cache that holds tokens" if past else "prefill_chunk_size"
    if (past and reads > 1) or (chunk_size is not None and chunk_size < reads):
        raise ValueError(
            f"{type(target).__name__} reads several tokens as if nothing stood before them (so does plain "
            f"generate()), which {option} needs; leave it out and pass the whole text, or generate without "
            "assistant_model."
        )


def _check_warm_cache(past: int, input_ids: torch.LongTensor, generation_config, model_kwargs: dict[str, Any]) -> None:
    """What a cache that already holds tokens does not go together with."""
    cached = cached_prefix_length(input_ids, generation_config, model_kwargs)
    if cached >= input_ids.shape[1]:
        raise ValueError(
            f"The cache holds {past} tokens and the prompt has {input_ids.shape[1]}; pass the whole text so far, with "
            "at least one token behind what the cache holds."
        )
    if model_kwargs.get("inputs_embeds") is not None:
        raise ValueError("inputs_embeds cannot continue a cache that holds tokens; pass input_ids alone.")
    if not cached and generation_config.output_attentions and generation_config.return_dict_in_generate:
        raise ValueError(
            "With output_attentions and a cache that holds tokens, pass the whole text so far as input_ids, not the "
            "new tokens alone."
        )
    if not cached and generation_config.prefill_chunk_size is not None:
        raise ValueError(
            "With prefill_chunk_size and a cache that holds tokens, pass the whole text so far as input_ids, not the "
            "new tokens alone."
        )
    if not cached and model_kwargs.get("attention_mask") is not None:
        raise ValueError(
            "With padding and a cache that holds tokens, pass the whole text so far as input_ids, not the new tokens "
            "alone."
        )


__all__ = ["RetraceCandidateGenerator", "check_inputs", "check_pairing"]
