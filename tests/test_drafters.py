"""Drafters as users have them: wrapped, merged, copied, moved, shared between threads, used after a call that failed.

The text must be plain's in every case. What went wrong with the drafter itself shows only in what it proposes.
"""

import contextlib
import copy
import pickle
import sys
import threading

import pytest
import torch
from transformers import DynamicCache, StoppingCriteriaList, pipeline

from retrace_hf import RetraceCandidateGenerator, RetraceDrafter, record_acceptance

from .fixtures import (
    BLOCK_SIZE,
    drafters,
    letters_tokenizer,
    plain,
    prompt_of,
    randomize,
    tiny_drafter,
    tiny_target,
)
from .test_generation import Recorder


# peft 0.21 asks a model for a property that transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")

NEW_TOKENS = 24


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def prompt():
    return prompt_of(20)


@pytest.fixture(scope="module")
def sequence(target, prompt):
    return plain(target, prompt, NEW_TOKENS)


@pytest.fixture
def drafter(target):
    return randomize(tiny_drafter(target))


@contextlib.contextmanager
def watched_proposals():
    """What is proposed in each round, by target."""
    proposals, real = {}, RetraceCandidateGenerator.get_candidates

    def get_candidates(generator, input_ids, **kwargs):
        tokens, logits = real(generator, input_ids, **kwargs)
        proposals.setdefault(generator.target, []).append(tokens[0, input_ids.shape[1] :].tolist())
        return tokens, logits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RetraceCandidateGenerator, "get_candidates", get_candidates)
        yield proposals


def proposals_of(target, drafter, prompt, **kwargs) -> list[list[int]]:
    """The proposals of one greedy call, whose text must be plain's."""
    with watched_proposals() as proposals:
        out = plain(target, prompt, NEW_TOKENS, assistant_model=drafter, **kwargs)
    assert torch.equal(out, plain(target, prompt, NEW_TOKENS))
    assert sum(map(len, proposals[target])) > 100
    return proposals[target]


# -- PEFT ------------------------------------------------------------------------------------------------------------


def with_adapter(drafter):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(5)
    lora = LoraConfig(target_modules=["q_proj", "o_proj", "up_proj", "fc"], init_lora_weights=False, r=4)
    return get_peft_model(drafter, lora).eval()


def test_an_adapter_drafts_and_a_merged_one_drafts_the_same(target, prompt, drafter):
    base = proposals_of(target, drafter, prompt)
    wrapped = with_adapter(drafter)
    adapted = proposals_of(target, wrapped, prompt)
    assert adapted != base
    with wrapped.disable_adapter():
        assert proposals_of(target, wrapped, prompt) == base
    assert proposals_of(target, wrapped, prompt) == adapted
    merged = wrapped.merge_and_unload()
    assert type(merged) is RetraceDrafter
    assert proposals_of(target, merged, prompt) == adapted


def test_wrapped_drafters_keep_the_text_whatever_they_propose(target, prompt, sequence):
    for make in (with_adapter, lambda drafter: with_adapter(drafter).merge_and_unload()):
        for kind, drafter in drafters(target, sequence):
            wrapped = make(drafter)
            with record_acceptance() as stats:
                assert torch.equal(plain(target, prompt, NEW_TOKENS, assistant_model=wrapped), sequence), kind
            if kind != "real":
                assert set(stats.accepted_per_round[:-1]) == {BLOCK_SIZE - 1 if kind == "oracle" else 0}


def test_an_adapter_saved_alone_goes_onto_its_base(target, prompt, drafter, tmp_path):
    from peft import PeftModel

    drafter.save_pretrained(tmp_path / "base")
    wrapped = with_adapter(RetraceDrafter.from_pretrained(tmp_path / "base"))
    wrapped.save_pretrained(tmp_path / "adapter")
    assert not (tmp_path / "adapter" / "config.json").exists()
    expected = proposals_of(target, wrapped, prompt)
    attached = RetraceDrafter.from_pretrained(tmp_path / "base")
    attached.load_adapter(tmp_path / "adapter")
    for loaded in (
        PeftModel.from_pretrained(RetraceDrafter.from_pretrained(tmp_path / "base"), tmp_path / "adapter"),
        attached,
        RetraceDrafter.from_pretrained(tmp_path / "adapter"),
    ):
        assert proposals_of(target, loaded.eval(), prompt) == expected


# -- two threads, one drafter ----------------------------------------------------------------------------------------


def test_two_targets_in_two_threads_share_one_drafter(drafter, monkeypatch):
    targets = [tiny_target(seed=0), tiny_target("llama", seed=7)]
    prompts = [prompt_of(20), prompt_of(33, seed=8)]
    alone = [proposals_of(t, drafter, p) for t, p in zip(targets, prompts)]
    texts = [plain(t, p, NEW_TOKENS) for t, p in zip(targets, prompts)]
    together, real = threading.Barrier(2), RetraceDrafter.forward

    def forward(self, *args, **kwargs):
        # Round by round side by side, as long as both run.
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait(timeout=5)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(RetraceDrafter, "forward", forward)
    found = {}

    def work(i):
        with record_acceptance() as stats:
            out = plain(targets[i], prompts[i], NEW_TOKENS, assistant_model=drafter)
        together.abort()
        found[i] = (out, stats)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with watched_proposals() as proposals:
            threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(interval)
    for i in range(2):
        out, stats = found[i]
        assert torch.equal(out, texts[i])
        assert proposals[targets[i]] == alone[i]
        assert stats.calls == 1 and stats.new_tokens == NEW_TOKENS


@pytest.mark.parametrize("rope", [{}, {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}])
def test_a_call_leaves_nothing_on_the_drafter(target, prompt, rope):
    """What is not there cannot collide."""
    grows = {"rope_parameters": rope, "max_position_embeddings": 24} if rope else {}
    drafter = randomize(tiny_drafter(target, **grows))

    def attributes():
        return {
            (name, key): id(value)
            for name, module in drafter.named_modules()
            for key, value in [*vars(module).items(), *module._parameters.items(), *module._buffers.items()]
        }

    before, config = attributes(), drafter.config.to_dict()
    plain(target, prompt, 20, assistant_model=drafter)
    plain(target, prompt, 20, assistant_model=drafter, do_sample=True)
    assert attributes() == before and drafter.config.to_dict() == config


# -- after an exception ----------------------------------------------------------------------------------------------


class Stops(Recorder):
    """Streams, and fails at its nth put after the prompt's."""

    def __init__(self, at=None):
        super().__init__()
        self.at = at

    def put(self, value):
        super().put(value)
        if self.at is not None and len(self.puts) == self.at + 1:
            raise RuntimeError("interrupted")


def failing_call(how: str, at: int, target, prompt, drafter, cache) -> list[int]:
    """Runs into an exception in the middle; gives back what had been streamed by then."""
    asked = []

    def count(*_):
        asked.append(1)
        if len(asked) == at:
            raise RuntimeError("interrupted")

    def criterion(input_ids, scores, **_):
        count()
        return torch.tensor([False])

    streamer, criteria, handle = Stops(at if how == "streamer" else None), StoppingCriteriaList(), None
    if how == "criterion":
        criteria.append(criterion)
    elif how == "forward":
        handle = target.register_forward_pre_hook(count)
    elif how == "layer":  # half of the layers have cached the block by then
        handle = target.get_decoder().layers[3].register_forward_pre_hook(count)
    elif how == "drafter":
        handle = drafter.norm.register_forward_pre_hook(count)
    kwargs = {"streamer": streamer, "stopping_criteria": criteria}
    try:
        with pytest.raises((RuntimeError, ValueError), match="interrupted"):
            plain(target, prompt, NEW_TOKENS, assistant_model=drafter, cache=cache, **kwargs)
    finally:
        if handle is not None:
            handle.remove()
    return [token for put in streamer.puts for token in put]


@pytest.mark.parametrize(
    ("how", "at", "family"),
    [
        ("streamer", 1, "qwen3"),
        ("streamer", 3, "qwen3"),
        ("streamer", 3, "gemma2"),
        ("criterion", 2, "qwen3"),
        ("criterion", 12, "qwen3"),
        ("forward", 3, "qwen3"),
        ("layer", 3, "qwen3"),
        ("layer", 3, "gemma2"),
        ("drafter", 3, "qwen3"),
    ],
)
def test_after_an_exception_drafter_and_cache_go_on_as_new(how, at, family):
    """A chat that its user interrupts keeps the cache and goes on from the text that was streamed."""
    target, prompt = tiny_target(family), prompt_of(30)
    sequence = plain(target, prompt, NEW_TOKENS)
    fresh = proposals_of(target, randomize(tiny_drafter(target)), prompt)
    for kind, drafter in drafters(target, sequence):
        cache = DynamicCache(config=target.config)
        seen = failing_call(how, at, target, prompt, drafter, cache)
        assert seen == sequence[0, : len(seen)].tolist() and cache.get_seq_length() < len(seen)
        if kind == "real":
            assert proposals_of(target, drafter, prompt) == fresh
        text = torch.cat([torch.tensor([seen]), prompt_of(5, seed=9)], dim=1)
        expected = plain(target, text, 8)
        assert torch.equal(plain(target, text, 8, cache=copy.deepcopy(cache)), expected), kind
        again = drafter if kind == "real" else randomize(tiny_drafter(target))
        assert torch.equal(plain(target, text, 8, cache=cache, assistant_model=again), expected), kind


def test_chunks_that_failed_leave_a_cache_that_goes_on():
    """Layers that slide have let go of rows of the chunks before: those chunks are text, and stay."""
    target, prompt = tiny_target("gemma2"), prompt_of(20)
    drafter, cache, asked = randomize(tiny_drafter(target)), DynamicCache(config=target.config), []
    text = torch.cat([plain(target, prompt, 10, cache=cache, assistant_model=drafter), prompt_of(30, seed=9)], dim=1)

    def fail(*_):
        asked.append(1)
        if len(asked) == 4:
            raise RuntimeError("interrupted")

    handle = target.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="interrupted"):
        plain(target, text, 20, cache=cache, assistant_model=drafter, prefill_chunk_size=6)
    handle.remove()
    expected = plain(target, text, 20)
    assert torch.equal(plain(target, text, 20, cache=copy.deepcopy(cache)), expected)
    assert torch.equal(plain(target, text, 20, cache=cache, assistant_model=drafter), expected)


# -- another block than the one trained ------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [2, 4, 12])
def test_a_loaded_drafter_drafts_blocks_of_another_size(target, prompt, sequence, drafter, tmp_path, block_size):
    drafter.save_pretrained(tmp_path)
    loaded = RetraceDrafter.from_pretrained(tmp_path)
    loaded.config.block_size = block_size
    given = RetraceDrafter.from_pretrained(tmp_path, block_size=block_size)

    def resized(drafter):
        drafter.config.block_size = block_size
        return drafter

    with watched_proposals() as proposals:
        for one in (loaded, given):
            assert torch.equal(plain(target, prompt, NEW_TOKENS, assistant_model=one), sequence)
    assert max(map(len, proposals[target])) == block_size - 1
    for kind, one in drafters(target, sequence, change=resized):
        with record_acceptance() as stats:
            assert torch.equal(plain(target, prompt, NEW_TOKENS, assistant_model=one), sequence), kind
        if kind == "oracle":
            assert stats.accepted_per_round[0] == block_size - 1
    assert torch.equal(plain(target, prompt, NEW_TOKENS, assistant_model=loaded, speculation_type="dflash"), sequence)


def test_a_block_without_a_proposal_is_refused_before_the_target_runs(target, prompt, drafter):
    drafter.config.block_size = 1
    passes = []
    handle = target.register_forward_pre_hook(lambda *_: passes.append(1))
    try:
        with pytest.raises(ValueError, match="block_size is 1.*set drafter.config.block_size to 2 or more"):
            plain(target, prompt, NEW_TOKENS, assistant_model=drafter)
    finally:
        handle.remove()
    assert not passes


# -- changed between or during calls ---------------------------------------------------------------------------------


def changed_block(drafter):
    drafter.config.block_size = 4


@pytest.mark.parametrize("change", [lambda d: d.to(torch.bfloat16), lambda d: d.double(), changed_block])
def test_a_drafter_changed_after_a_call(target, prompt, sequence, drafter, change):
    cache = DynamicCache(config=target.config)
    first = plain(target, prompt, 10, assistant_model=drafter, cache=cache)
    text = torch.cat([first, prompt_of(7, seed=9)], dim=1)
    change(drafter)
    assert torch.equal(plain(target, text, 30, assistant_model=drafter, cache=cache), plain(target, text, 30))
    assert torch.equal(plain(target, prompt, NEW_TOKENS, assistant_model=drafter), sequence)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_drafters(target, prompt, sequence, dtype):
    for kind, drafter in drafters(target, sequence, change=lambda drafter: drafter.to(dtype)):
        with record_acceptance() as stats:
            assert torch.equal(plain(target, prompt, NEW_TOKENS, assistant_model=drafter), sequence), kind
        if kind == "oracle":
            assert stats.acceptance_length > 6


def test_a_drafter_in_training_mode(target, prompt, drafter):
    expected = proposals_of(target, drafter, prompt)
    drafter.train()
    assert proposals_of(target, drafter, prompt) == expected
    drafter.activation_checkpointing_enable()
    assert proposals_of(target, drafter, prompt) == expected
    assert drafter.training
    proposals_of(target, randomize(tiny_drafter(target, attention_dropout=0.5)).train(), prompt)


def test_copies_draft_as_the_original(target, prompt, drafter, tmp_path):
    expected = proposals_of(target, drafter, prompt)  # before it is copied: no call spoils a copy
    torch.save(drafter, tmp_path / "drafter.pt")
    for copied in (
        copy.deepcopy(drafter),
        pickle.loads(pickle.dumps(drafter)),
        torch.load(tmp_path / "drafter.pt", weights_only=False),
    ):
        assert copied is not drafter and proposals_of(target, copied, prompt) == expected


# -- pipelines -------------------------------------------------------------------------------------------------------


def test_a_pipeline_takes_a_drafter_and_a_folder(target, prompt, sequence, drafter, tmp_path):
    tokenizer = letters_tokenizer()
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(target.config.pad_token_id)
    drafter.save_pretrained(tmp_path)
    text, options = (
        tokenizer.decode(prompt[0]),
        {"max_new_tokens": NEW_TOKENS, "do_sample": False, "return_tensors": True},
    )

    def generated(assistant) -> list[int]:
        generator = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=assistant)
        return generator(text, **options)[0]["generated_token_ids"]

    with pytest.raises(ValueError, match="reads a tokenizer from .* save the target's there"):
        generated(str(tmp_path))
    tokenizer.save_pretrained(tmp_path)
    for assistant in (drafter, str(tmp_path)):
        with record_acceptance() as stats:
            assert generated(assistant) == sequence[0].tolist()
        assert stats.calls == 1 and stats.new_tokens == NEW_TOKENS
