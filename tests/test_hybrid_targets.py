"""generate() on targets whose layers keep a recurrent or a convolution state: rejected drafts are taken out of it.

What is asked here of every such family is asked of attention by test_generation.py; the families' text and taps also
stand in test_target_families.py.
"""

import copy
import logging

import pytest
import torch
from scipy.stats import chisquare
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin
from transformers.generation.streamers import BaseStreamer

from retrace_hf import RetraceDrafter, record_acceptance
from retrace_hf.recurrent_states import check_rollback, continues_a_cache

from .fixtures import (
    BLOCK_SIZE,
    MASK_TOKEN_ID,
    drafters,
    letters_tokenizer,
    mixed,
    oracle,
    plain,
    prompt_of,
    randomize,
    script_drafter,
    tiny_drafter,
    tiny_target,
)
from .target_table import FAMILIES, HYBRID, KEEPS_STATES, RECURRENT


FAMILY_NAMES = [name for name, row in FAMILIES.items() if row.kind in (HYBRID, RECURRENT)]
# Those whose scan starts anew where it should go on from the cache, in transformers itself.
START_ANEW = ["jamba"]
GO_ON = [name for name in FAMILY_NAMES if name not in START_ANEW]
FEW = [
    "qwen3_5_text",
    "lfm2",
    "falcon_h1",
    "mamba2",
]  # a delta rule, convolutions alone, both in a layer, no attention

pytestmark = pytest.mark.skipif(not KEEPS_STATES, reason="transformers before 5.25 refuses these targets")


@pytest.fixture(scope="module")
def target_of():
    made = {}

    def get(name):
        if name not in made:
            made[name] = tiny_target(name)
        return made[name]

    return get


def states_of(cache: DynamicCache) -> list[torch.Tensor]:
    """All that a cache holds of its text."""
    held = []
    for layer in cache.layers:
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            held += [t for t in (*layer.conv_states.values(), *layer.recurrent_states.values()) if t is not None]
        if getattr(layer, "keys", None) is not None:
            held += [layer.keys, layer.values]
    return held


# -- rejections ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_every_rejection_length(name, target_of):
    """Round t accepts t proposals, from none to all, twice over; the states left are those of a pass over the text."""
    target, prompt = target_of(name), prompt_of(11)
    new_tokens = 1 + 2 * sum(range(1, BLOCK_SIZE + 1))
    sequence = plain(target, prompt, new_tokens)
    drafter = script_drafter(tiny_drafter(target), target, sequence, lambda t: t % BLOCK_SIZE)
    cache = DynamicCache(config=target.config.get_text_config(decoder=True))
    with record_acceptance() as stats:
        assert torch.equal(plain(target, prompt, new_tokens, assistant_model=drafter, cache=cache), sequence)
    assert stats.accepted_per_round == [*range(BLOCK_SIZE)] * 2
    expected = DynamicCache(config=target.config.get_text_config(decoder=True))
    plain(target, prompt, new_tokens, cache=expected)
    for mine, its in zip(states_of(cache), states_of(expected), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-2, atol=2e-3 * float(its.abs().max()))


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("length", [1, 2, 3])
def test_prompts_shorter_than_a_convolution(name, length, target_of):
    """And a turn behind them, without a drafter and with one: a convolution that is too short is filled."""
    target, prompt = target_of(name), prompt_of(length)
    first = plain(target, prompt, 2)
    more = torch.cat([first, prompt_of(5, seed=9)], dim=1)
    second = plain(target, more, 20)
    for kind, drafter in drafters(target, second):
        for assistant in ({}, {"assistant_model": drafter}):
            cache = DynamicCache(config=target.config)
            assert torch.equal(plain(target, prompt, 2, cache=cache, assistant_model=drafter), first), kind
            assert torch.equal(plain(target, more, 20, cache=cache, **assistant), second), kind


@pytest.mark.parametrize("name", ["qwen3_5_text", "granitemoehybrid"])
@pytest.mark.parametrize("conditioning", ["none", "gated", "overwrite"])
def test_every_conditioning(name, conditioning, target_of):
    target, prompt = target_of(name), prompt_of(9)
    sequence = plain(target, prompt, 40)
    drafter = randomize(tiny_drafter(target, conditioning=conditioning))
    assert torch.equal(plain(target, prompt, 40, assistant_model=drafter), sequence)


@pytest.mark.parametrize("name", ["qwen3_5_text", "lfm2"])
@pytest.mark.parametrize("fusion", ["layerwise", "kv", "hybrid"])
def test_every_context(name, fusion, target_of):
    """Keys and values are read in layers of full attention, which the defaults find."""
    target, prompt = target_of(name), prompt_of(9)
    drafter = randomize(tiny_drafter(target, context_fusion=fusion))
    assert torch.equal(plain(target, prompt, 40, assistant_model=drafter), plain(target, prompt, 40))


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text", "nemotron_h"])
def test_transformers_own_generator_on_the_same_weights(name, target_of):
    target, prompt = target_of(name), prompt_of(9)
    sequence = plain(target, prompt, 33)
    drafter = oracle(tiny_drafter(target, "none"), target, sequence)
    with record_acceptance() as stats:
        out = plain(target, prompt, 33, assistant_model=drafter, speculation_type="dflash")
    assert torch.equal(out, sequence) and stats.acceptance_length == BLOCK_SIZE


# -- caches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GO_ON)
def test_a_second_turn(name, target_of):
    target, prompt = target_of(name), prompt_of(20)
    first = plain(target, prompt, 10)
    text = torch.cat([first, prompt_of(7, seed=9)], dim=1)
    config, turns = target.config.get_text_config(decoder=True), []
    warm = DynamicCache(config=config)
    plain(target, prompt, 10, cache=warm)
    second = plain(target, text, 30, cache=warm)
    for kind, drafter in drafters(target, second):
        cache = DynamicCache(config=config)
        turns = [plain(target, t, n, cache=cache, assistant_model=drafter) for t, n in ((prompt, 10), (text, 30))]
        assert torch.equal(turns[0], first) and torch.equal(turns[1], second), kind
        assert int(cache.get_seq_length()) == second.shape[1] - 1


@pytest.mark.parametrize(
    ("name", "chunk_size"), [*((name, 6) for name in GO_ON), *((name, size) for name in FEW for size in (1, 19))]
)
def test_a_prompt_in_chunks(name, chunk_size, target_of):
    target, prompt = target_of(name), prompt_of(20)
    sequence = plain(target, prompt, 30, prefill_chunk_size=chunk_size)
    for kind, drafter in drafters(target, sequence):
        out = plain(target, prompt, 30, prefill_chunk_size=chunk_size, assistant_model=drafter)
        assert torch.equal(out, sequence), kind


@pytest.mark.parametrize("name", START_ANEW)
def test_what_starts_anew_is_not_continued(name, target_of):
    """transformers' own scan forgets what the cache holds, so plain generate() is wrong there too."""
    target, prompt = target_of(name), prompt_of(20)
    drafter, ran = randomize(tiny_drafter(target)), []
    assert not continues_a_cache(target)
    cache = DynamicCache(config=target.config)
    first = plain(target, prompt, 10, cache=cache, assistant_model=drafter)
    assert torch.equal(first, plain(target, prompt, 10))
    handle = target.register_forward_pre_hook(lambda *_: ran.append(1))
    text = torch.cat([first, prompt_of(7, seed=9)], dim=1)
    with pytest.raises(ValueError, match="JambaForCausalLM reads several tokens .*a cache that holds tokens.*whole"):
        plain(target, text, 10, cache=cache, assistant_model=drafter)
    with pytest.raises(ValueError, match="JambaForCausalLM reads several tokens .*prefill_chunk_size needs"):
        plain(target, text, 10, prefill_chunk_size=6, assistant_model=drafter)
    handle.remove()
    assert not ran
    # The one token that a text goes on by is read right.
    assert torch.equal(plain(target, first, 20, cache=cache, assistant_model=drafter), plain(target, prompt, 30))


def test_static_caches_and_caches_without_layers(target_of):
    target, prompt = target_of("qwen3_5_text"), prompt_of(9)
    sequence = plain(target, prompt, 30)
    drafter = mixed(tiny_drafter(target), target, sequence)
    cache = StaticCache(config=target.config, max_cache_len=64)
    assert torch.equal(plain(target, prompt, 30, assistant_model=drafter, cache=cache), sequence)
    with pytest.raises(ValueError, match="no layers yet.*DynamicCache.config=target.config"):
        plain(target, prompt, 30, assistant_model=drafter, cache=DynamicCache())


class StopsAt(BaseStreamer):
    def __init__(self, puts: int):
        self.left = puts

    def put(self, value):
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt

    def end(self):
        pass


@pytest.mark.parametrize("name", [*FEW, *(pytest.param(n, marks=pytest.mark.slow) for n in GO_ON if n not in FEW)])
@pytest.mark.parametrize("where", ["prefill", "round", "half a pass", "half a prefill"])
def test_a_call_that_is_stopped_leaves_the_verified_text(name, where, target_of):
    """On a new cache and on a warm one; the next turn goes on from it."""
    target, prompt = target_of(name), prompt_of(20)
    config = target.config.get_text_config(decoder=True)
    more = torch.cat([plain(target, prompt, 10), prompt_of(17, seed=9)], dim=1)
    warm = DynamicCache(config=config)
    plain(target, prompt, 10, cache=warm)
    for text, cache in ((prompt, DynamicCache(config=config)), (more, warm)):
        kept = copy.deepcopy(cache)
        sequence = plain(target, text, 20, cache=kept)
        drafter = mixed(tiny_drafter(target), target, sequence)
        count = target.config.get_text_config(decoder=True).num_hidden_layers
        layers = next(
            m for m in target.get_decoder().modules() if isinstance(m, torch.nn.ModuleList) and len(m) == count
        )
        passes = {"half a pass": 3, "half a prefill": 1}.get(where)
        calls = []

        def stop(*_, passes=passes, calls=calls):
            calls.append(1)
            if len(calls) == passes:
                raise KeyboardInterrupt

        handle = layers[3].register_forward_pre_hook(stop)
        streamer = {"prefill": StopsAt(1), "round": StopsAt(3)}.get(where)
        with pytest.raises(KeyboardInterrupt):
            plain(target, text, 20, cache=cache, assistant_model=drafter, streamer=streamer)
        handle.remove()
        held = int(cache.get_seq_length())
        assert held <= text.shape[1] + 6
        turn = torch.cat([sequence[:, : max(held, text.shape[1])], prompt_of(5, seed=13)], dim=1)
        again = DynamicCache(config=config)
        if held:
            target.generate(sequence[:, :held], max_new_tokens=1, cache=again)
        expected = plain(target, turn, 12, cache=again)
        assert torch.equal(plain(target, turn, 12, cache=cache), expected)


# -- ends, sampling, words -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FEW)
def test_stop_strings(name, target_of):
    target, prompt, tokenizer = target_of(name), prompt_of(20), letters_tokenizer()
    sequence = plain(target, prompt, 40)
    for position in (2, 9, 20):
        words = tokenizer.convert_ids_to_tokens(sequence[0, 20 + position : 23 + position].tolist())
        kwargs = {"stop_strings": ["".join(words)[1:5]], "tokenizer": tokenizer}
        expected = plain(target, prompt, 40, **kwargs)
        for kind, drafter in drafters(target, sequence):
            assert torch.equal(plain(target, prompt, 40, assistant_model=drafter, **kwargs), expected), kind


@pytest.mark.parametrize("name", ["qwen3_5_text", "lfm2"])
@pytest.mark.parametrize("proposal", ["argmax", "sample"])
def test_sampling_keeps_the_targets_law(name, proposal):
    """Three tokens of a vocabulary of eight, against the products of the target's own probabilities."""
    target = tiny_target(name, vocab_size=8, initializer_range=0.15)
    drafter = randomize(tiny_drafter(target, mask_token_id=7, num_hidden_layers=1, target_layer_ids=[0]))
    drafter.config.proposal, prompt, options = proposal, prompt_of(4) % 5 + 2, {"top_k": 4, "temperature": 0.7}
    texts = torch.cartesian_prod(*[torch.arange(8)] * 3)
    with torch.no_grad():
        logits = target(torch.cat([prompt.expand(512, -1), texts], dim=1)).logits[:, 3:6] / options["temperature"]
    logits = logits.masked_fill(logits < logits.topk(options["top_k"]).values[..., -1:], -torch.inf)
    law = logits.softmax(-1).gather(2, texts[..., None])[..., 0].prod(1).double()
    counts = torch.zeros(512)
    torch.manual_seed(7)
    with record_acceptance() as stats:
        for _ in range(400):
            a, b, c = plain(target, prompt, 3, do_sample=True, assistant_model=drafter, **options)[0, 4:].tolist()
            counts[64 * a + 8 * b + c] += 1
    assert 0 < sum(stats.accepted_per_round) < stats.rounds and counts[law == 0].sum() == 0
    large = 400 * law >= 5
    observed = torch.cat([counts[large], counts[~large].sum()[None]]).double()
    expected = torch.cat([law[large], law[~large].sum()[None]])
    expected = expected / expected.sum() * observed.sum()
    assert chisquare(observed[expected > 0].numpy(), expected[expected > 0].numpy()).pvalue > 1e-3


def test_a_target_without_heads_is_given_the_drafters(target_of):
    target = target_of("mamba2")
    with pytest.raises(ValueError, match="no num_attention_heads and no max_position_embeddings; give the drafter's"):
        RetraceDrafter.from_target(target, mask_token_id=MASK_TOKEN_ID, num_hidden_layers=2)
    drafter = tiny_drafter(target)
    assert (drafter.config.num_attention_heads, drafter.config.head_dim) == (4, 8)


def test_a_target_is_tried_once_and_what_goes_wrong_is_said(monkeypatch, caplog):
    """A family that claims to be able to be rolled back and is not."""
    target, passes = tiny_target("lfm2"), []
    handle = target.model.register_forward_pre_hook(lambda *_: passes.append(1))
    with caplog.at_level(logging.WARNING):
        check_rollback(target)
        tried = len(passes)
        check_rollback(target)
    handle.remove()
    assert len(passes) == tried > 0 and not caplog.records
    wrong = tiny_target("lfm2")
    layer = type(DynamicCache(config=wrong.config).layers[0])
    monkeypatch.setattr(layer, "crop", lambda self, tokens: self.cumulative_length_linear.sub_(abs(tokens)))
    with pytest.raises(ValueError, match="Lfm2ForCausalLM has layers .*went on from another state.*generate without"):
        plain(wrong, prompt_of(7), 5, assistant_model=tiny_drafter(tiny_target()))
