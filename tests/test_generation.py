import contextvars
import copy
import gc
import importlib
import math
import sys
import threading

import pytest
import torch
from transformers import (
    AutoModel,
    DynamicCache,
    GenerationMixin,
    StoppingCriteriaList,
    TextIteratorStreamer,
)
from transformers.cache_utils import DFlashCache
from transformers.generation import GenerationMode
from transformers.generation.streamers import BaseStreamer

import retrace_hf
from retrace_hf import (
    AcceptanceStats,
    RetraceCandidateGenerator,
    candidate_generator,
    install_generate_hook,
    record_acceptance,
)
from retrace_hf.hub import write_code

from . import fixtures
from .fixtures import (
    BLOCK_SIZE,
    KINDS,
    MIXED,
    VOCAB_SIZE,
    letters_tokenizer,
    mixed,
    oracle,
    plain,
    prompt_of,
    randomize,
    tiny_drafter,
    tiny_target,
)


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def prompt():
    return prompt_of(20)


@pytest.fixture(scope="module")
def sequence(target, prompt):
    return plain(target, prompt)


def drafters(target, sequence):
    return fixtures.drafters(target, sequence, KINDS)


# -- the text is plain generate()'s ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma2"])
@pytest.mark.parametrize("length", [1, 2, 3, 50, 150])
def test_greedy_text_is_the_same_and_tau_is_counted_right(family, length):
    target = tiny_target(family)
    prompt = prompt_of(length)
    sequence = plain(target, prompt)
    assert sequence[0, length:].unique().numel() > 15  # text that a wrong drafter could not have by chance
    for kind, drafter in drafters(target, sequence):
        with record_acceptance() as stats:
            assert torch.equal(plain(target, prompt, assistant_model=drafter), sequence), kind
        assert stats.new_tokens == 65
        if kind == "oracle":
            assert stats.acceptance_length == BLOCK_SIZE and stats.rounds == 8
        elif kind == "wrong":
            assert stats.acceptance_length == 1 and stats.rounds == 64


@pytest.mark.parametrize("family", ["mistral", "granite", "cohere"])
def test_greedy_text_is_the_same_on_other_families(family):
    target = tiny_target(family)
    prompt = prompt_of(20)
    sequence = plain(target, prompt)
    for kind, drafter in drafters(target, sequence):
        assert torch.equal(plain(target, prompt, assistant_model=drafter), sequence), kind


@pytest.mark.parametrize("new_tokens", [1, 2, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 20])
@pytest.mark.parametrize("cache", [None, "static"])
def test_every_length_with_dynamic_and_static_caches(target, prompt, sequence, new_tokens, cache):
    expected = sequence[:, : 20 + new_tokens]
    for kind, drafter in drafters(target, sequence):
        out = plain(target, prompt, new_tokens, assistant_model=drafter, cache_implementation=cache)
        assert torch.equal(out, expected), kind
    out = target.generate(prompt, max_length=20 + new_tokens, do_sample=False, assistant_model=drafter)
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[5], [7, 8]]},
        {"min_new_tokens": 30, "eos_token_id": [16, 4, 56]},
        {"min_length": 40, "eos_token_id": [16, 4, 56]},
        {"prefix_allowed_tokens_fn": lambda batch, ids: list(range(int(ids[-1]) % 7, VOCAB_SIZE, 3))},
    ],
    ids=lambda kwargs: next(iter(kwargs)),
)
def test_logits_processors_give_the_same_text(target, prompt, kwargs):
    expected = plain(target, prompt, **kwargs)
    for kind, drafter in drafters(target, expected):
        assert torch.equal(plain(target, prompt, assistant_model=drafter, **kwargs), expected), kind


def test_left_padding_gives_the_same_text(target, prompt, sequence):
    padded = torch.cat([torch.zeros(1, 6, dtype=torch.long), prompt], dim=1)
    mask = (torch.arange(26) >= 6).long()[None]
    for kind, drafter in drafters(target, sequence):
        with record_acceptance() as stats:
            out = plain(target, padded, attention_mask=mask, assistant_model=drafter)
        assert torch.equal(out[:, 6:], sequence), kind
        if kind == "oracle":
            assert stats.acceptance_length == BLOCK_SIZE


@pytest.mark.parametrize(("of_target", "of_drafter"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_dtypes_may_differ(of_target, of_drafter):
    target = tiny_target().to(getattr(torch, of_target))
    drafter = randomize(tiny_drafter(target)).to(getattr(torch, of_drafter))
    prompt = prompt_of(20)
    out = plain(target, prompt, 20, assistant_model=drafter)
    with torch.no_grad():
        logits = target(input_ids=out).logits[0, 19:-1].float()
    chosen = logits.gather(1, out[0, 20:, None])[:, 0]
    # In bf16 a batched pass may turn a near-tie: each token is within 2 ulp of the best.
    assert (logits.max(dim=1).values - chosen <= 2 * 2**-7 * logits.abs().max(dim=1).values).all()


@pytest.mark.parametrize("flags", [{"output_hidden_states": True}, {"output_scores": True, "output_logits": True}])
def test_dictionary_outputs_have_plain_shapes(target, prompt, sequence, flags):
    def shapes(value):
        return value.shape if isinstance(value, torch.Tensor) else [shapes(v) for v in value]

    flags = {"return_dict_in_generate": True, **flags}
    expected = plain(target, prompt, 20, **flags)
    for _, drafter in drafters(target, sequence):
        out = plain(target, prompt, 20, assistant_model=drafter, **flags)
        assert torch.equal(out.sequences, expected.sequences)
        assert out.cache.get_seq_length() == expected.cache.get_seq_length()
        for key in ("hidden_states", "scores", "logits"):
            if expected.get(key) is None:
                assert out.get(key) is None
            else:
                assert shapes(out[key]) == shapes(expected[key])
                torch.testing.assert_close(out[key], expected[key], rtol=1e-3, atol=1e-3)


def test_attentions_have_plain_shapes(prompt):
    target = tiny_target()
    target.set_attn_implementation("eager")
    flags = {"return_dict_in_generate": True, "output_attentions": True}
    expected = plain(target, prompt, 20, **flags)
    out = plain(target, prompt, 20, assistant_model=oracle(tiny_drafter(target), target, expected.sequences), **flags)
    for mine, its in zip(out.attentions, expected.attentions, strict=True):
        assert [a.shape for a in mine] == [a.shape for a in its]


@pytest.mark.parametrize("flag", ["output_hidden_states", "output_attentions"])
@pytest.mark.parametrize("chunks", [{}, {"prefill_chunk_size": 4}])
def test_a_second_turns_dictionary_has_plain_shapes(prompt, flag, chunks):
    """Also where the drafter itself warmed the cache, and would read again what it has not seen."""
    target = tiny_target()
    target.set_attn_implementation("eager")
    text = torch.cat([plain(target, prompt, 10), prompt_of(7, seed=9)], dim=1)
    flags = {"return_dict_in_generate": True, flag: True, **chunks}
    name = flag.removeprefix("output_")
    shapes = []
    for drafter in ({}, {"assistant_model": randomize(tiny_drafter(target))}):
        cache = DynamicCache(config=target.config)
        plain(target, prompt, 10, cache=cache, **drafter)
        out = plain(target, text, 20, cache=cache, **flags, **drafter)
        shapes.append([[state.shape for state in step] for step in out[name]])
    assert shapes[0] == shapes[1]


def test_attentions_are_plains_while_another_call_runs_inside():
    target, other, prompt = tiny_target("gemma2"), tiny_target(seed=4), prompt_of(20)
    target.set_attn_implementation("eager")
    inner = randomize(tiny_drafter(other))

    class Calls(Recorder):
        def put(self, value):
            super().put(value)
            if len(self.puts) == 3:
                plain(other, prompt, 10, assistant_model=inner)

    flags = {"return_dict_in_generate": True, "output_attentions": True}
    expected = plain(target, prompt, 20, **flags)
    drafter = oracle(tiny_drafter(target), target, expected.sequences)
    out = plain(target, prompt, 20, assistant_model=drafter, streamer=Calls(), **flags)
    torch.testing.assert_close(out.attentions, expected.attentions, rtol=1e-4, atol=1e-5)


def test_prompt_embeddings_beside_ids_give_the_same_text(target, prompt, sequence):
    embeds = target.get_input_embeddings()(prompt)
    for kind, drafter in drafters(target, sequence):
        assert torch.equal(plain(target, prompt, inputs_embeds=embeds, assistant_model=drafter), sequence), kind


# -- a cache that already holds tokens -------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_second_turn_on_a_warm_cache_equals_a_cold_run(family, name, deprecations_allowed):
    target = tiny_target(family)
    prompt, more = prompt_of(20), prompt_of(7, seed=9)
    first = plain(target, prompt, 10)
    second_prompt = torch.cat([first, more], dim=1)
    second = plain(target, second_prompt, 30)
    for kind, drafter in drafters(target, second):
        cache = DynamicCache(config=target.config)
        out = plain(target, prompt, 10, assistant_model=drafter, **{name: cache})
        assert torch.equal(out, first), kind
        out = plain(target, second_prompt, 30, assistant_model=drafter, **{name: cache})
        assert torch.equal(out, second), kind
        assert cache.get_seq_length() == second.shape[1] - 1


@pytest.mark.parametrize(("conditioning", "window"), [("none", None), ("corrected", None), ("corrected", 6)])
def test_a_second_turn_drafts_as_a_cold_run_does(target, conditioning, window):
    """The drafter's context is kept beside the cache: round for round the second turn is the cold run's."""
    prompt, more = prompt_of(20), prompt_of(7, seed=9)
    first = plain(target, prompt, 10)
    text = torch.cat([first, more], dim=1)
    drafter = randomize(tiny_drafter(target, conditioning=conditioning, context_window=window))
    seen = []
    real = drafter.forward

    def forward(**kwargs):
        out = real(**kwargs)
        seen.append(out.last_hidden_state)
        return out

    drafter.forward = forward
    plain(target, text, 30, assistant_model=drafter)
    cold, seen = list(seen), []
    cache = DynamicCache(config=target.config)
    plain(target, prompt, 10, assistant_model=drafter, cache=cache)
    copied = copy.deepcopy(cache)
    for warm in (cache, copied):
        seen.clear()
        out = plain(target, text, 30, assistant_model=drafter, cache=warm)
        assert torch.equal(out, plain(target, text, 30))
        assert len(seen) == len(cold)
        for mine, its in zip(seen, cold):
            torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-4)


def test_context_of_another_text_or_drafter_is_not_used(target):
    prompt, more = prompt_of(20), prompt_of(7, seed=9)
    drafter, other = randomize(tiny_drafter(target)), randomize(tiny_drafter(target), seed=5)
    first = plain(target, prompt, 10)
    text = torch.cat([first, more], dim=1)
    expected = plain(target, text, 30)
    cache = DynamicCache(config=target.config)
    plain(target, prompt, 10, assistant_model=drafter, cache=cache)
    assert torch.equal(plain(target, text, 30, assistant_model=other, cache=copy.deepcopy(cache)), expected)
    # A cache cut back by the user, and gone on with by another text of the same length.
    changed = text.clone()
    changed[:, 22:] = prompt_of(changed.shape[1] - 22, seed=11)
    cache.crop(22 - cache.get_seq_length())
    out = plain(target, changed, 30, assistant_model=drafter, cache=cache)
    assert torch.equal(out, plain(target, changed, 30))


@pytest.mark.parametrize("window", [None, 8])
def test_a_draft_that_failed_leaves_no_context(target, prompt, window):
    drafter = randomize(tiny_drafter(target, context_window=window))
    cache, calls = DynamicCache(config=target.config), []

    def fail(*_):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("interrupted")

    handle = drafter.layers[1].register_forward_pre_hook(fail)  # layer 0 has cached its block by then
    with pytest.raises(RuntimeError, match="interrupted"):
        plain(target, prompt, 20, assistant_model=drafter, cache=cache)
    handle.remove()
    assert not hasattr(cache, "_retrace_draft_context")


@pytest.mark.parametrize("how", [{"prefill_chunk_size": 5}, {"padding": 4}])
def test_a_windowed_drafter_reads_the_same_rows_however_the_prompt_comes(target, prompt, how):
    drafter = randomize(tiny_drafter(target, context_window=6))
    given, real = [], drafter.forward

    def forward(**kwargs):
        out = real(**kwargs)
        given.append((kwargs["context_hidden_states"].shape[1], out.last_hidden_state))
        return out

    drafter.forward = forward
    expected = plain(target, prompt, 20, assistant_model=drafter)
    whole, given[:] = list(given), []
    padding, options = how.get("padding", 0), {k: v for k, v in how.items() if k != "padding"}
    if padding:
        prompt = torch.cat([torch.zeros(1, padding, dtype=torch.long), prompt], dim=1)
        options["attention_mask"] = (torch.arange(prompt.shape[1]) >= padding).long()[None]
    out = plain(target, prompt, 20, assistant_model=drafter, **options)
    assert torch.equal(out[:, padding:], expected) and len(given) == len(whole)
    for (rows, mine), (its_rows, its) in zip(given, whole):
        assert rows == its_rows <= 6
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-4)


def test_nothing_but_the_users_cache_keeps_a_context(target, prompt):
    drafter = randomize(tiny_drafter(target))
    plain(target, prompt, 10, assistant_model=drafter)
    gc.collect()
    assert not [o for o in gc.get_objects() if type(o) is DFlashCache]
    cache = DynamicCache(config=target.config)
    plain(target, prompt, 10, assistant_model=drafter, cache=cache)
    assert len([o for o in gc.get_objects() if type(o) is DFlashCache]) == 1
    del cache
    gc.collect()
    assert not [o for o in gc.get_objects() if type(o) is DFlashCache]


def test_new_tokens_alone_have_no_attentions(prompt):
    target = tiny_target()
    target.set_attn_implementation("eager")
    first, cache = plain(target, prompt, 10), DynamicCache(config=target.config)
    plain(target, prompt, 10, cache=cache)
    flags = {"return_dict_in_generate": True, "output_attentions": True}
    with pytest.raises(ValueError, match="output_attentions .* pass the whole text"):
        mask = torch.ones(1, first.shape[1], dtype=torch.long)
        drafter = tiny_drafter(target)
        plain(target, first[:, -1:], cache=cache, attention_mask=mask, assistant_model=drafter, **flags)


def test_new_tokens_alone_on_a_warm_cache(target, prompt):
    first = plain(target, prompt, 10)
    more = torch.cat([first[:, -1:], prompt_of(7, seed=9)], dim=1)
    expected = plain(target, torch.cat([first[:, :-1], more], dim=1), 30)
    for kind, drafter in drafters(target, expected):
        cache = DynamicCache(config=target.config)
        plain(target, prompt, 10, cache=cache)
        mask = torch.ones(1, 29 + more.shape[1], dtype=torch.long)
        out = plain(target, more, 30, cache=cache, attention_mask=mask, assistant_model=drafter)
        assert torch.equal(out[0, more.shape[1] :], expected[0, -30:]), kind


def test_padding_on_a_warm_cache(target, prompt):
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), prompt], dim=1)
    first = plain(target, prompt, 10)
    text = torch.cat([first, prompt_of(7, seed=9)], dim=1)
    expected = plain(target, text, 30)
    text = torch.cat([torch.zeros(1, 4, dtype=torch.long), text], dim=1)
    for kind, drafter in drafters(target, expected):
        cache = DynamicCache(config=target.config)
        mask = (padded != 0).long()
        plain(target, padded, 10, cache=cache, attention_mask=mask, assistant_model=drafter)
        out = plain(
            target, text, 30, cache=cache, attention_mask=(torch.arange(41) >= 4).long()[None], assistant_model=drafter
        )
        assert torch.equal(out[:, 4:], expected), kind


@pytest.mark.parametrize("at", ["prompt", "answer"])
def test_a_mask_that_changes_on_a_warm_cache(target, prompt, at):
    """A pad token that the text itself holds: generate() takes it for padding in the second turn, and what the cache
    holds was computed with it."""
    first = plain(target, prompt, 10)
    text = torch.cat([first, prompt_of(7, seed=9)], dim=1)
    mask = torch.ones_like(text)
    mask[0, 5 if at == "prompt" else prompt.shape[1] + 2] = 0
    cache = DynamicCache(config=target.config)
    plain(target, prompt, 10, cache=cache)
    expected = plain(target, text, 30, cache=cache, attention_mask=mask)
    for kind, drafter in drafters(target, expected):
        cache = DynamicCache(config=target.config)
        plain(target, prompt, 10, cache=cache, assistant_model=drafter)
        assert torch.equal(
            plain(target, text, 30, cache=cache, attention_mask=mask, assistant_model=drafter), expected
        ), kind


@pytest.mark.parametrize("at", ["prompt", "answer", "nowhere"])
def test_positions_that_change_on_a_warm_cache(target, prompt, at):
    """What the cache holds stays at the positions that it was computed with, as plain generate() leaves it."""
    text = torch.cat([plain(target, prompt, 10), prompt_of(7, seed=9)], dim=1)
    changed = {"prompt": 5, "answer": prompt.shape[1] + 2, "nowhere": text.shape[1]}[at]
    positions = torch.arange(text.shape[1])[None].clone()
    positions[:, changed:] += 30
    cache = DynamicCache(config=target.config)
    plain(target, prompt, 10, cache=cache)
    expected = plain(target, text, 30, cache=cache, position_ids=positions)
    drafter = randomize(tiny_drafter(target))
    cache = DynamicCache(config=target.config)
    plain(target, prompt, 10, cache=cache, assistant_model=drafter)
    seen = []
    drafter.register_forward_pre_hook(
        lambda drafter, args, kwargs: seen.append(kwargs["cache"].get_seq_length()), with_kwargs=True
    )
    assert torch.equal(plain(target, text, 30, cache=cache, position_ids=positions, assistant_model=drafter), expected)
    assert bool(seen[0]) == (at == "nowhere")  # whether the context of the first turn was taken over


def test_a_turn_without_the_drafter_stays_as_it_was_computed(target, prompt):
    """A second turn that masks what the first and the third do not: its tokens are not fed again without that mask."""
    first = plain(target, prompt, 10)
    text = torch.cat([first, prompt_of(7, seed=9)], dim=1)
    mask = torch.ones_like(text)
    mask[0, 3:9] = 0
    drafter, answers = randomize(tiny_drafter(target)), []
    for assistant in (None, drafter):
        cache = DynamicCache(config=target.config)
        plain(target, prompt, 10, cache=cache, assistant_model=assistant)
        second = plain(target, text, 10, cache=cache, attention_mask=mask)
        third = torch.cat([second, prompt_of(7, seed=10)], dim=1)
        answers.append(plain(target, third, 30, cache=cache, assistant_model=assistant))
    assert torch.equal(*answers)


def test_a_drafter_serves_call_after_call(target, prompt, sequence):
    other = prompt_of(11, seed=8)
    drafter = randomize(tiny_drafter(target))

    def fails(input_ids, scores, **kwargs):
        raise RuntimeError("interrupted")

    counts = []
    for _ in range(2):
        with record_acceptance() as stats:
            assert torch.equal(plain(target, prompt, assistant_model=drafter), sequence)
        counts.append(stats.accepted_per_round)
        assert torch.equal(plain(target, other, assistant_model=drafter), plain(target, other))
        with pytest.raises(RuntimeError, match="interrupted"):
            plain(target, other, assistant_model=drafter, stopping_criteria=StoppingCriteriaList([fails]))
    assert counts[0] == counts[1]


# -- ends ------------------------------------------------------------------------------------------------------------


class Recorder(BaseStreamer):
    def __init__(self):
        self.puts = []

    def put(self, value):
        self.puts.append(value.flatten().tolist())

    def end(self):
        self.puts.append("end")


def tokens_of(puts):
    return [token for put in puts[1:-1] for token in put]


@pytest.mark.parametrize("position", [0, 1, 2, 5, 8, 9, 16, 17, 30])
def test_nothing_comes_after_an_end_token(target, prompt, sequence, position):
    # Where the token comes inside a block, as its first, its last, and as the bonus token.
    end = sequence[0, 20 + position].item()
    expected = plain(target, prompt, eos_token_id=[end, 198])
    for kind, drafter in drafters(target, sequence):
        streamer = Recorder()
        out = plain(
            target,
            prompt,
            eos_token_id=[end, 198],
            assistant_model=drafter,
            streamer=streamer,
            return_dict_in_generate=True,
        )
        assert torch.equal(out.sequences, expected), kind
        assert tokens_of(streamer.puts) == expected[0, 20:].tolist()
        assert out.cache.get_seq_length() == expected.shape[1] - 1


class EndsWith:
    """A stop that is a function of the prefix: the text ends with these tokens."""

    def __init__(self, tokens):
        self.tokens = torch.tensor(tokens)

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids[:, -len(self.tokens) :] == self.tokens).all(dim=1)


@pytest.mark.parametrize("position", [1, 2, 5, 8, 9, 16, 30])
def test_a_custom_stop_inside_a_block_is_not_missed(target, prompt, sequence, position):
    criteria = StoppingCriteriaList(
        [EndsWith(sequence[0, 19 + position : 21 + position].tolist()), EndsWith(sequence[0, 54:56].tolist())]
    )
    expected = plain(target, prompt, stopping_criteria=criteria)
    assert expected.shape[1] <= 21 + position
    for kind, drafter in drafters(target, sequence):
        streamer = Recorder()
        out = plain(
            target,
            prompt,
            stopping_criteria=criteria,
            assistant_model=drafter,
            streamer=streamer,
            return_dict_in_generate=True,
        )
        assert torch.equal(out.sequences, expected), kind
        assert tokens_of(streamer.puts) == expected[0, 20:].tolist()
        assert out.cache.get_seq_length() == expected.shape[1] - 1


@pytest.mark.parametrize("position", [2, 5, 9, 30])
def test_stop_strings_across_tokens_inside_a_block(target, prompt, sequence, position):
    tokenizer = letters_tokenizer()
    words = tokenizer.convert_ids_to_tokens(sequence[0, 20 + position : 23 + position].tolist())
    stop = "".join(words)[1:5]  # begins and ends inside a token
    kwargs = {"stop_strings": [stop], "tokenizer": tokenizer}
    expected = plain(target, prompt, **kwargs)
    assert expected.shape[1] <= 23 + position
    for kind, drafter in drafters(target, sequence):
        assert torch.equal(plain(target, prompt, assistant_model=drafter, **kwargs), expected), kind


def test_a_stop_together_with_the_length_limit(target, prompt, sequence):
    for new_tokens in (5, 6, 7):
        criteria = StoppingCriteriaList([EndsWith(sequence[0, 24:26].tolist())])
        expected = plain(target, prompt, new_tokens, stopping_criteria=criteria)
        for kind, drafter in drafters(target, sequence):
            out = plain(target, prompt, new_tokens, stopping_criteria=criteria, assistant_model=drafter)
            assert torch.equal(out, expected), kind


# -- the hook --------------------------------------------------------------------------------------------------------


SEAMS = (
    "_extract_generation_mode_kwargs",
    "_validate_generation_mode",
    "_assisted_decoding",
    "_get_candidate_generator",
)


def test_installing_again_changes_nothing():
    before = [getattr(GenerationMixin, seam) for seam in SEAMS]
    install_generate_hook()
    assert [getattr(GenerationMixin, seam) for seam in SEAMS] == before
    assert all(not hasattr(seam.__wrapped__, "__wrapped__") for seam in before)


# Names that this code hands from one of its files to another, and what another version might call them.
RENAMED = {
    "_retrace_accepted": "_retrace_taken",
    "kept.tokens": "kept.text",
    "    rows: int\n    tokens: torch": "    rows: int\n    text: torch",
}


@pytest.fixture
def copied_package(tmp_path, monkeypatch):
    """Imports the flat files of a `trust_remote_code` repository under another name, beside this package.

    `copied_package(first, other_version)` takes which of the two was loaded first, and whether the copy is of another
    version."""

    def load(first: str, other_version: bool):
        for seam in SEAMS:  # as before any copy of the code was loaded
            monkeypatch.setattr(GenerationMixin, seam, getattr(GenerationMixin, seam).__wrapped__)
        monkeypatch.setattr(GenerationMixin, "_retrace_hooks", [])
        folder = tmp_path / "retrace_copy"
        write_code(folder)
        (folder / "__init__.py").touch()
        for file in folder.glob("*.py") if other_version else ():
            text = file.read_text(encoding="utf-8")
            for old, new in RENAMED.items():
                text = text.replace(old, new)
            file.write_text(text, encoding="utf-8")
        monkeypatch.syspath_prepend(str(tmp_path))
        if first == "package":
            install_generate_hook()
        modeling = importlib.import_module("retrace_copy.modeling_retrace")
        install_generate_hook()
        return modeling

    yield load
    for name in [n for n in sys.modules if n.split(".")[0] == "retrace_copy"]:
        del sys.modules[name]


@pytest.mark.parametrize("other_version", [False, True])
@pytest.mark.parametrize("first", ["package", "copy"])
def test_each_copy_of_the_code_serves_its_own_drafters(copied_package, prompt, first, other_version):
    target = tiny_target()
    target.set_attn_implementation("eager")
    modeling = copied_package(first, other_version)
    theirs = importlib.import_module("retrace_copy.generation")

    def copied(drafter):
        config = modeling.RetraceConfig(**drafter.config.to_dict())
        copied = modeling.RetraceDrafter(config).eval()
        copied.load_state_dict(drafter.state_dict())
        return copied

    options = {"cache_implementation": "static", "return_dict_in_generate": True, "output_attentions": True}
    expected = plain(target, prompt, 20, **options)
    text = torch.cat([expected.sequences, prompt_of(7, seed=9)], dim=1)
    second = plain(target, text, 10)
    rounds = {}
    for change in (lambda drafter: drafter, copied):
        for kind, drafter in fixtures.drafters(target, expected.sequences, change=change):
            assert isinstance(drafter, retrace_hf.RetraceDrafter) == (change is not copied)
            with record_acceptance() as ours, theirs.record_acceptance() as counted:
                out = plain(target, prompt, 20, assistant_model=drafter, **options)
            assert torch.equal(out.sequences, expected.sequences), kind
            torch.testing.assert_close(out.attentions, expected.attentions, rtol=1e-4, atol=1e-5)
            assert ours.accepted_per_round == counted.accepted_per_round and ours.calls == 1
            assert rounds.setdefault(kind, ours.accepted_per_round) == ours.accepted_per_round
            # A context that the other copy's drafter has left on the cache.
            cache = DynamicCache(config=target.config)
            one = randomize(tiny_drafter(target))
            plain(target, prompt, 20, assistant_model=copied(one) if change is not copied else one, cache=cache)
            again = change(randomize(tiny_drafter(target)))
            assert torch.equal(plain(target, text, 10, assistant_model=again, cache=cache), second)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_a_copys_drafter_is_known_however_it_is_wrapped(copied_package, target, prompt, sequence, monkeypatch):
    from peft import LoraConfig, get_peft_model

    modeling = copied_package("package", False)

    class Mine(modeling.RetraceDrafter):
        def get_candidate_generator(self, **kwargs):
            return super().get_candidate_generator(**kwargs)

    config = modeling.RetraceConfig(**tiny_drafter(target).config.to_dict())
    lora = LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    monkeypatch.setattr(RetraceCandidateGenerator, "__init__", None)
    monkeypatch.setattr("retrace_hf.generation.check_pairing", None)
    for drafter in (Mine(config).eval(), get_peft_model(modeling.RetraceDrafter(config), lora).eval()):
        for options in ({}, {"speculation_type": "dflash"}):
            with record_acceptance() as stats:
                assert torch.equal(plain(target, prompt, assistant_model=drafter, **options), sequence)
            assert stats.calls == 1 and stats.rounds > 0


def test_an_assistant_of_no_copy_is_served(copied_package, target, prompt, sequence):
    copied_package("copy", False)
    drafter = randomize(tiny_drafter(target))

    class Assistant:
        config = drafter.config

        def get_candidate_generator(self, **kwargs):
            return drafter.get_candidate_generator(**kwargs)

    with record_acceptance() as stats:
        assert torch.equal(plain(target, prompt, assistant_model=Assistant()), sequence)
    assert stats.calls == 1


def test_models_and_options_are_checked_once_a_call(target, prompt, monkeypatch):
    checked, real = [], candidate_generator.check_target
    monkeypatch.setattr(candidate_generator, "check_target", lambda model: checked.append(passes) or real(model))
    passes = 0

    def count(*_):
        nonlocal passes
        passes += 1

    handle = target.register_forward_pre_hook(count)
    plain(target, prompt, 10, assistant_model=randomize(tiny_drafter(target)))
    handle.remove()
    assert checked == [0] and passes > 1


def test_an_auto_model_is_a_drafter(target, prompt, sequence, tmp_path):
    randomize(tiny_drafter(target)).save_pretrained(tmp_path)
    drafter = AutoModel.from_pretrained(tmp_path)
    assert torch.equal(plain(target, prompt, assistant_model=drafter), sequence)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_a_peft_wrapped_drafter_and_target(prompt):
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    target = get_peft_model(tiny_target(), lora).eval()
    sequence = plain(target, prompt)
    drafter = get_peft_model(randomize(tiny_drafter(tiny_target())), lora).eval()
    with record_acceptance() as stats:
        assert torch.equal(plain(target, prompt, assistant_model=drafter), sequence)
    assert stats.rounds > 0


def test_calls_without_a_drafter_pass_untouched(target, prompt, sequence, monkeypatch, deprecations_allowed):
    monkeypatch.setattr(RetraceCandidateGenerator, "__init__", None)
    with record_acceptance() as stats:
        plain(target, prompt, 5)
        plain(target, prompt, 5, num_beams=2)
        plain(target, prompt, 5, prompt_lookup_num_tokens=3)
        for assistant in ({}, {"assistant_model": tiny_target("llama", num_hidden_layers=1)}):
            assert plain(target, prompt, 5, custom_generate=lambda *args, **kwargs: "own", **assistant) == "own"
        assistant = tiny_target("llama", num_hidden_layers=1)
        assert torch.equal(plain(target, prompt, assistant_model=assistant), sequence)
    assert stats == AcceptanceStats()
    plain(target, prompt, 5, assistant_model=tiny_drafter(target), speculation_type="dflash")


def test_other_modes_are_refused(target):
    kwargs = {"assistant_model": tiny_drafter(target)}
    with pytest.raises(ValueError, match="contrastive_search.*greedy search and sampling.*assistant_model"):
        target._validate_generation_mode(GenerationMode.CONTRASTIVE_SEARCH, target.generation_config, kwargs)


# -- counting --------------------------------------------------------------------------------------------------------


def test_what_is_counted(target, prompt, sequence):
    drafter = mixed(tiny_drafter(target), target, sequence)
    with record_acceptance() as stats:
        plain(target, prompt, 40, assistant_model=drafter)
    accepted = stats.accepted_per_round
    assert accepted[: len(MIXED)] == list(MIXED)
    assert stats.calls == 1 and stats.rounds == len(accepted)
    assert stats.new_tokens == 40 == 1 + sum(a + 1 for a in accepted)
    assert stats.acceptance_length == 39 / stats.rounds
    assert len(stats.acceptance_at) == BLOCK_SIZE - 1
    for slot, share in enumerate(stats.acceptance_at, start=1):
        verified = [a for a, p in zip(accepted, stats.proposed_per_round) if p >= slot]
        assert share == sum(a >= slot for a in verified) / len(verified)


def test_transformers_own_rounds_are_counted_the_same(target, prompt, sequence):
    native, ours = [], []
    for stats_of, kwargs in ((native, {"speculation_type": "dflash"}), (ours, {})):
        drafter = mixed(tiny_drafter(target), target, sequence)
        with record_acceptance() as stats:
            assert torch.equal(plain(target, prompt, assistant_model=drafter, **kwargs), sequence)
        stats_of.extend(stats.accepted_per_round)
    assert native == ours


def test_a_prefill_is_no_round_and_a_pass_without_proposal_is_one(target, prompt):
    drafter = randomize(tiny_drafter(target))
    with record_acceptance() as stats:
        plain(target, prompt, 1, assistant_model=drafter)
    assert (stats.calls, stats.rounds, stats.new_tokens) == (1, 0, 1)
    assert math.isnan(stats.acceptance_length) and stats.acceptance_at == []
    with record_acceptance() as stats:
        plain(target, prompt, 2, assistant_model=drafter)
    assert (stats.rounds, stats.proposed_per_round, stats.acceptance_length) == (1, [0], 1.0)


def test_an_end_token_shortens_what_was_accepted(target, prompt, sequence):
    # In the oracle's first block, slots 1 to 7 are tokens 1 to 7 of the text; the end is the first of its kind.
    text = sequence[0, 20:].tolist()
    position = next(i for i in range(3, 8) if text[i] not in text[:i])
    drafter = oracle(tiny_drafter(target), target, sequence)
    with record_acceptance() as stats:
        plain(target, prompt, assistant_model=drafter, eos_token_id=text[position])
    assert stats.accepted_per_round == [position - 1]
    assert stats.proposed_per_round == [BLOCK_SIZE - 1]
    assert stats.new_tokens == position + 1


def test_calls_pool_and_recorders_nest(target, prompt, sequence):
    drafter = oracle(tiny_drafter(target), target, sequence)
    with record_acceptance() as outer:
        plain(target, prompt, 9, assistant_model=drafter)
        with record_acceptance() as inner:
            plain(target, prompt, 17, assistant_model=drafter)
        plain(target, prompt, 9, assistant_model=drafter)
    plain(target, prompt, 9, assistant_model=drafter)
    assert (inner.calls, inner.rounds, inner.new_tokens) == (1, 2, 17)
    assert (outer.calls, outer.rounds, outer.new_tokens) == (3, 4, 35)
    assert outer.acceptance_length == BLOCK_SIZE


def test_recorders_belong_to_their_context(target, prompt):
    drafter = randomize(tiny_drafter(target))
    found = {}
    barrier = threading.Barrier(2)

    def work(new_tokens):
        with record_acceptance() as stats:
            barrier.wait()
            plain(target, prompt, new_tokens, assistant_model=drafter)
            barrier.wait()
        found[new_tokens] = stats

    with record_acceptance() as outside:
        threads = [threading.Thread(target=work, args=(n,)) for n in (5, 12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert outside.calls == 0
    assert {n: stats.new_tokens for n, stats in found.items()} == {5: 5, 12: 12}


def test_recorders_follow_a_copied_context(target, prompt):
    drafter = randomize(tiny_drafter(target))
    with record_acceptance() as stats:
        context = contextvars.copy_context()
        thread = threading.Thread(
            target=lambda: context.run(plain, target, prompt, 6, assistant_model=drafter),
        )
        thread.start()
        thread.join()
    assert stats.new_tokens == 6


def test_recorders_close_after_an_exception(target, prompt):
    with pytest.raises(ValueError, match="num_beams"), record_acceptance() as stats:
        plain(target, prompt, assistant_model=tiny_drafter(target), num_beams=2)
    plain(target, prompt, 5, assistant_model=tiny_drafter(target))
    assert stats == AcceptanceStats()


def test_a_streamer_can_tell_drafted_tokens_from_the_targets(target, prompt, sequence):
    drafter = mixed(tiny_drafter(target), target, sequence)

    class Watching(Recorder):
        def put(self, value):
            self.rounds_before.append(stats.rounds)
            super().put(value)

        rounds_before = []

    streamer = Watching()
    with record_acceptance() as stats:
        plain(target, prompt, assistant_model=drafter, streamer=streamer)
    first, prefill, *rounds, end = streamer.puts
    assert len(first) == 20 and len(prefill) == 1 and end == "end"
    assert [len(put) - 1 for put in rounds] == stats.accepted_per_round
    # The rounds before this one are counted when it is put.
    assert streamer.rounds_before == [0, 0, *range(stats.rounds)]
    assert tokens_of(streamer.puts) == sequence[0, 20:].tolist()


def test_text_streams(target, prompt, sequence):
    tokenizer = letters_tokenizer()
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    drafter = oracle(tiny_drafter(target), target, sequence)
    thread = threading.Thread(
        target=plain, args=(target, prompt), kwargs={"assistant_model": drafter, "streamer": streamer}
    )
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == tokenizer.decode(sequence[0, 20:])


def test_an_empty_prompt_is_called_empty(target):
    with pytest.raises(ValueError, match="The prompt is empty"):
        plain(target, prompt_of(9)[:, :0], 4, assistant_model=tiny_drafter(target))
