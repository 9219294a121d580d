"""Targets whose layers keep a recurrent or a convolution state: taking rejected drafts out of it again.

Keys and values are cut off behind a token. A state has every token in it, so those of the tokens before must have been
kept. From transformers 5.25 on a cache does that while it records its past; here stands what its loop leaves to the
caller: whether a target does it right, what an exception leaves behind, and prompts shorter than a convolution.
"""

import inspect
import weakref

import torch
import transformers
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DummyLayer, DynamicLayer, LinearAttentionCacheLayerMixin


# Whether this transformers keeps recurrent states back.
KEEPS_STATES = hasattr(Cache, "get_recurrent_states_to_keep")
_BLOCK = 4  # tokens of a block in the check of a target
# By target: whether a pass of many tokens goes on from what a cache holds.
_CHECKED: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def is_recurrent(layer) -> bool:
    """Whether a cache's layer keeps a recurrent or a convolution state (in some targets beside keys and values)."""
    return isinstance(layer, LinearAttentionCacheLayerMixin)


# -- can it be taken back? -------------------------------------------------------------------------------------------


def check_rollback(target: PreTrainedModel) -> None:
    """Raises a ValueError, by name, if a target's cache cannot give back the state before a rejected draft.

    Targets of plain attention pass at once. Of others each target is tried once, on a few tokens: many of them claim
    it, and what a wrong one generates is wrong in silence.
    """
    name, text = type(target).__name__, target.config.get_text_config(decoder=True)
    cure = "a block drafter cannot serve it, generate without assistant_model."
    if not target._supports_default_dynamic_cache():
        raise ValueError(
            f"{name} keeps a state of its own kind, outside transformers' caches, that cannot be rolled back after a "
            f"rejected draft; {cure}"
        )
    layers = DynamicCache(config=text).layers  # those that generate() makes
    if not KEEPS_STATES and (getattr(target, "_is_stateful", False) or any(map(is_recurrent, layers))):
        raise ValueError(
            f"{name} keeps a recurrent state that cannot be rolled back after a rejected draft with transformers "
            f"{transformers.__version__}; install transformers>=5.25, or generate without assistant_model."
        )
    fixed = sorted({type(layer).__name__ for layer in layers if not layer.is_croppable})
    if fixed:
        raise ValueError(
            f"{name} has layers of {', '.join(fixed)}, whose state cannot be rolled back after a rejected draft; "
            f"{cure}"
        )
    if all(isinstance(layer, (DynamicLayer, DummyLayer)) and not is_recurrent(layer) for layer in layers):
        return
    if target not in _CHECKED:
        try:
            _CHECKED[target] = _try(target)
        except Exception as error:
            raise ValueError(
                f"{name} has layers whose state cannot be rolled back after a rejected draft (tried on a few tokens: "
                f"{error}); {cure}"
            ) from error


def continues_a_cache(target: PreTrainedModel) -> bool:
    """Whether a pass of several tokens goes on from what the cache holds. It does in every target but a few recurrent
    ones of transformers, whose scan starts anew (Mamba, Jamba, Falcon Mamba in 5.25)."""
    return _CHECKED.get(target, True)


def positions_behind(target: PreTrainedModel, ids: torch.LongTensor, start: int) -> dict:
    """`position_ids` of tokens `[b, n]` behind `start` others, for a decoder that takes any: some count from 0 where
    they are not told."""
    if "position_ids" not in inspect.signature(target.get_decoder().forward).parameters:
        return {}
    return {"position_ids": torch.arange(start, start + ids.shape[1], device=ids.device).expand(ids.shape[0], -1)}


@torch.no_grad()
def _try(target: PreTrainedModel) -> bool:
    """Verifies blocks of known tokens, takes wrong ones back, and goes on; returns whether a pass longer than a block
    went on from the cache too. Raises whatever is wrong with the target."""
    text, decoder = target.config.get_text_config(decoder=True), target.get_decoder()
    device = target.get_input_embeddings().weight.device
    ids = (torch.arange(3, 3 + 4 * _BLOCK, device=device) % text.vocab_size)[None]

    def read(tokens: torch.LongTensor, cache: Cache | None, start: int) -> torch.Tensor:
        options = positions_behind(target, tokens, start)
        out = decoder(tokens, cache=cache, use_cache=cache is not None, output_hidden_states=[1], **options)
        if out.hidden_states[0] is not None:
            raise RuntimeError("it hands over the states of other layers than those asked for")
        return out.last_hidden_state

    was_training = target.training
    target.eval()  # no dropout
    try:
        whole = read(ids, None, 0)
        for wrong in range(_BLOCK):  # the anchor is always right
            cache = _recording(text)
            read(ids[:, :3], cache, 0)
            cache.crop(0)
            right = 3 + _BLOCK - wrong
            block = torch.cat([ids[:, 3:right], ids[:, :wrong]], dim=1)
            found = [read(block, cache, 3)[:, : _BLOCK - wrong]]
            cache.crop(-wrong)
            found += [read(ids[:, right : right + 2], cache, right)]
            if not _same(torch.cat(found, dim=1), whole[:, 3 : right + 2]):
                raise RuntimeError("it went on from another state")
        cache = DynamicCache(config=text)
        read(ids[:, :3], cache, 0)
        return _same(read(ids[:, 3:], cache, 3), whole[:, 3:])
    finally:
        target.train(was_training)


def _recording(text_config) -> Cache:
    cache = DynamicCache(config=text_config)
    cache.activate_past_recording(**({"recurrent_states_to_keep": _BLOCK} if KEEPS_STATES else {}))
    return cache


def _same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """By the middle one of the tokens: in half precision an expert or two may be chosen differently."""
    errors = (found - expected).float().norm(dim=-1) / expected.float().norm(dim=-1)
    return bool(errors.median() < (1e-3 if expected.dtype == torch.float32 else 0.2))


# -- when a call ends ------------------------------------------------------------------------------------------------


class CacheAtStart:
    """Goes back to what a call has verified, where it ends in an exception.

    The states that a cache keeps are those of the last block. Before the first one there are too few of them, and the
    call goes back to its start: this holds a copy of the recurrent states of then (they do not grow with the text).

    Args:
        cache (`Cache`): The target's, before the call's first pass.
        length (`int`): Tokens in it.
    """

    def __init__(self, cache: Cache, length: int):
        self.length = length
        self.states = {id(layer): copied_states(layer) for layer in cache.layers if is_recurrent(layer)}

    def roll_back(self, cache: Cache, verified: int) -> None:
        """Drops all tokens behind the first `verified`. Layer by layer, since a pass that failed half-way has grown
        some of them only."""
        for layer in cache.layers:
            attention = attention_part(layer)
            surplus = int(attention.get_seq_length(layer)) - verified if attention is not None else 0
            if surplus > 0:
                attention.crop(layer, -surplus)
            if not is_recurrent(layer):
                continue
            if verified > self.length:
                _drop_last(layer, int(layer.cumulative_length_linear) - verified)
            elif id(layer) in self.states:
                vars(layer).update(self.states[id(layer)])


def attention_part(layer) -> type | None:
    """The class whose methods see a layer's keys and values, where it has any."""
    bases = type(layer).__mro__
    plain = (c for c in bases if issubclass(c, CacheLayerMixin) and not issubclass(c, LinearAttentionCacheLayerMixin))
    return next(plain, None)


def copied_states(layer) -> dict:
    """What a recurrent layer holds of its text."""
    held = {"cumulative_length_linear": layer.cumulative_length_linear.clone()}
    for name in ("conv_states", "recurrent_states"):
        held[name] = {i: None if t is None else t.clone() for i, t in getattr(layer, name).items()}
    for name in ("is_conv_states_initialized", "is_recurrent_states_initialized", "has_previous_state"):
        held[name] = dict(getattr(layer, name))
    return held


def _drop_last(layer, surplus: int) -> None:
    if surplus <= 0:
        return
    for i in range(layer.number_of_states):
        if layer.is_recurrent_states_initialized[i] and not layer.recurrent_states_history[i]:
            # The pass failed between the two: the convolution has moved, the state has not.
            layer.recurrent_states_history[i] = [layer.recurrent_states[i]] * surplus
    LinearAttentionCacheLayerMixin.crop(layer, -surplus)


def fill_short_convolutions(cache: Cache) -> None:
    """While its past is recorded a cache leaves a text that is shorter than a convolution as short as it is; any pass
    without recording expects it filled with zeros."""
    for layer in filter(is_recurrent, cache.layers):
        for i, states in layer.conv_states.items():
            missing = 0 if states is None else layer.conv_kernel_size[i] - states.shape[-1]
            if missing > 0:
                layer.conv_states[i] = torch.nn.functional.pad(states, (missing, 0))


__all__ = [
    "CacheAtStart",
    "attention_part",
    "check_rollback",
    "continues_a_cache",
    "copied_states",
    "fill_short_convolutions",
    "is_recurrent",
    "positions_behind",
]
