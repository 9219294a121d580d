import functools
import gc
import itertools
import weakref

import pytest
import torch
from accelerate import dispatch_model
from scipy.stats import chisquare
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModel, GenerationConfig, LogitsProcessorList, StoppingCriteriaList, set_seed
from transformers.cache_utils import DynamicCache
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator
from transformers.generation.logits_process import (
    RepetitionPenaltyLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria
from transformers.modeling_outputs import CausalLMOutputWithPast

from retrace_hf import RetraceCandidateGenerator, RetraceDrafter, record_acceptance
from retrace_hf.candidate_generator import check_pairing
from retrace_hf.noise import embed_block
from retrace_hf.target_head import check_head, draft_logits

from .fixtures import (
    BLOCK_SIZE,
    MIXED,
    VOCAB_SIZE,
    always_wrong,
    drafters,
    mixed,
    oracle,
    plain,
    prompt_of,
    randomize,
    script_drafter,
    tiny_drafter,
    tiny_target,
)


LAST = 6  # index of the state after the final norm in a tiny target


@pytest.fixture(scope="module")
def target():
    return tiny_target()


class Spy:
    """Writes down what each round of a generator class got and gave. `with Spy(cls) as rounds:`"""

    def __init__(self, generator_class):
        self.generator_class = generator_class

    def __enter__(self):
        self.original = original = self.generator_class.get_candidates
        rounds = []

        def get_candidates(generator, input_ids, **kwargs):
            drafter = getattr(generator, "drafter", generator)
            drafter.seen_trajectory = None
            before = getattr(generator, "_draft_states", None)
            out = original(generator, input_ids, **kwargs)
            if not kwargs["is_first_iteration"]:
                rounds.append(
                    {
                        "length": input_ids.shape[1],
                        "proposed": out[0][0, input_ids.shape[1] :].tolist(),
                        "accepted": kwargs["n_last_matches"],
                        "verify": kwargs["model_outputs"].hidden_states[LAST],
                        "rows": kwargs["model_outputs"].logits.shape[1],
                        "draft": getattr(generator, "_draft_states", None),
                        "drafted": getattr(generator, "_draft_states", None) is not before,
                        "trajectory": drafter.seen_trajectory,
                    }
                )
            return out

        self.generator_class.get_candidates = get_candidates
        return rounds

    def __exit__(self, *exc):
        self.generator_class.get_candidates = self.original


def remember_trajectory(drafter):
    """The drafter keeps, as an attribute, the trajectory of its last forward."""

    def hook(module, args, kwargs):
        module.seen_trajectory = kwargs["trajectory"]

    drafter.register_forward_pre_hook(hook, with_kwargs=True)
    return drafter


# -- the same proposals as DFlash ------------------------------------------------------------------------------------


def test_untrained_retrace_proposes_what_its_dflash_proposes():
    target = tiny_target(vocab_size=8)
    prompt = prompt_of(12) % 5 + 2
    proposals = {}
    for conditioning in ("corrected", "gated", "none"):
        drafter = randomize(tiny_drafter(target, conditioning, mask_token_id=7))
        if conditioning != "none":
            # All weights random but Wv, as from_dflash() leaves it; the backbone's are the same in all.
            randomize(drafter.trajectory, seed=5)
            torch.nn.init.zeros_(drafter.trajectory.value.weight)
        randomize(drafter.layers, seed=6)
        randomize(drafter.fc, seed=7)
        remember_trajectory(drafter)
        with Spy(RetraceCandidateGenerator) as rounds:
            plain(target, prompt, assistant_model=drafter)
        proposals[conditioning] = [(r["proposed"], r["accepted"]) for r in rounds]
        with_signal = sum(r["trajectory"] is not None for r in rounds)
        assert with_signal == 0 if conditioning == "none" else with_signal > 5
        states = [r["draft"] for r in rounds]
        proposals[conditioning + " states"] = states
    assert proposals["corrected"] == proposals["none"]
    assert proposals["gated"] == proposals["none"]
    for a, b in zip(proposals["corrected states"], proposals["none states"]):
        assert torch.equal(a, b)


@pytest.mark.parametrize("vocab_size", [8, VOCAB_SIZE])
def test_without_conditioning_it_is_transformers_own_dflash(vocab_size):
    target = tiny_target(vocab_size=vocab_size)
    drafter = randomize(tiny_drafter(target, "none", mask_token_id=vocab_size - 1))
    prompt = prompt_of(12) % (vocab_size - 3) + 2
    with Spy(RetraceCandidateGenerator) as ours, record_acceptance() as stats:
        plain(target, prompt, assistant_model=drafter)
    with Spy(DFlashTokenCandidateGenerator) as theirs, record_acceptance() as native:
        plain(target, prompt, assistant_model=drafter, speculation_type="dflash")
    assert len(ours) == len(theirs) >= 5
    for mine, its in zip(ours, theirs):
        assert mine["length"] == its["length"]
        count = min(BLOCK_SIZE - 1, 12 + 65 - mine["length"] - 1)
        assert mine["proposed"] == its["proposed"][:count] and len(mine["proposed"]) == max(count, 0)
    assert stats.accepted_per_round == native.accepted_per_round
    if vocab_size == 8:
        assert sum(stats.accepted_per_round) >= 3


# -- the signal ------------------------------------------------------------------------------------------------------


def check_signal(rounds):
    """Every round's trajectory against the rule, row by row."""
    for before, now in zip([None, *rounds], rounds):
        verified = now["rows"] - 1
        rejected = now["accepted"] + 1
        if before is None or rejected >= verified or not now["drafted"]:
            assert now["trajectory"] is None
            assert now["drafted"] or not now["proposed"]  # no room for a proposal
            continue
        draft, states, valid = now["trajectory"]
        slots = range(1, verified - rejected + 1)
        assert valid[0].nonzero()[:, 0].tolist() == list(slots)
        for j in slots:
            assert torch.equal(draft[0, j], before["draft"][0, rejected + j])
            assert torch.equal(states[0, j], now["verify"][0, rejected + j - 1])


def test_the_signal_is_replaced_each_round_and_absent_where_nothing_was_rejected(target):
    prompt = prompt_of(20)
    sequence = plain(target, prompt)
    drafter = remember_trajectory(mixed(tiny_drafter(target), target, sequence))
    with Spy(RetraceCandidateGenerator) as rounds:
        assert torch.equal(plain(target, prompt, assistant_model=drafter), sequence)
    check_signal(rounds)
    assert rounds[0]["trajectory"] is None  # the first round
    assert [r["accepted"] for r in rounds[1:8]] == list(MIXED)
    absent = [r["trajectory"] is None for r in rounds[1:8]]
    assert absent == [False, False, True, True, False, False, False]  # 7: all accepted, 6: the last slot rejected


def test_a_full_acceptance_leaves_no_signal_for_later_rounds(target):
    prompt = prompt_of(20)
    sequence = plain(target, prompt)
    drafter = remember_trajectory(
        script_drafter(tiny_drafter(target), target, sequence, lambda t: [2, 7, 7, 6, 6, 0][min(t, 5)])
    )
    with Spy(RetraceCandidateGenerator) as rounds:
        plain(target, prompt, assistant_model=drafter)
    check_signal(rounds)
    assert [r["trajectory"] is None for r in rounds[:7]] == [True, False, True, True, True, True, False]


def test_blocks_cut_by_a_stop_align_by_what_was_verified(target):
    prompt = prompt_of(20)
    sequence = plain(target, prompt)
    drafter = remember_trajectory(always_wrong(tiny_drafter(target), target, sequence))
    limits = itertools.cycle((5, 3, 1, 2, 7, 4))
    budget = {}

    def criterion(input_ids, scores, **kwargs):
        # Looks at the prefix alone, as a stop must, but cuts blocks at varying lengths; never true of accepted text.
        length = input_ids.shape[1]
        wrong = (input_ids[0] != sequence[0, :length]).nonzero()
        if not len(wrong):
            return torch.tensor([False])
        first = int(wrong[0])
        if first not in budget:
            budget[first] = next(limits)
        return torch.tensor([length - first > budget[first]])

    with Spy(RetraceCandidateGenerator) as rounds:
        out = plain(target, prompt, assistant_model=drafter, stopping_criteria=StoppingCriteriaList([criterion]))
    assert torch.equal(out, sequence)
    check_signal(rounds)
    assert {len(r["proposed"]) for r in rounds} >= {1, 2, 3, 4, 5, 7}
    assert any(r["trajectory"] is not None and int(r["trajectory"].valid.sum()) == 3 for r in rounds)


def test_blocks_cut_by_the_length_limit_align_by_what_was_verified(target):
    prompt = prompt_of(20)
    sequence = plain(target, prompt, 12)
    drafter = remember_trajectory(always_wrong(tiny_drafter(target), target, sequence))
    with Spy(RetraceCandidateGenerator) as rounds:
        plain(target, prompt, 12, assistant_model=drafter)
    check_signal(rounds)
    assert [len(r["proposed"]) for r in rounds] == [7, 7, 7, 7, 6, 5, 4, 3, 2, 1, 0]
    valid = [0 if r["trajectory"] is None else int(r["trajectory"].valid.sum()) for r in rounds[:-1]]
    assert valid == [0, 6, 6, 6, 6, 5, 4, 3, 2, 1]


def manual_outputs(rows, seed, **perturb):
    """A made-up target pass of `rows` tokens; `perturb={layer: (rows, noise)}` is added."""
    generator = torch.Generator().manual_seed(seed)
    hidden = [torch.randn(1, rows, 32, generator=generator) for _ in range(LAST + 1)]
    return CausalLMOutputWithPast(logits=torch.zeros(1, rows, VOCAB_SIZE), hidden_states=tuple(hidden))


def second_block(target, drafter, accepted, spoil_draft=(), spoil_target=()):
    """The drafter's states in round two, with rows of the carried states spoiled in between."""
    config = GenerationConfig(max_length=100, return_dict_in_generate=False)
    generator = RetraceCandidateGenerator(drafter, target, config)
    tokens = prompt_of(30)
    kwargs = {"model_kwargs": {}, "is_first_iteration": False}
    generator.get_candidates(
        tokens[:, :11], model_outputs=manual_outputs(10, seed=1), n_last_matches=0, model_kwargs={}
    )
    generator._draft_states = generator._draft_states.clone()
    for row in spoil_draft:
        generator._draft_states[:, row] = float("nan")
    outputs = manual_outputs(BLOCK_SIZE, seed=2)
    for row in spoil_target:
        outputs.hidden_states[LAST][:, row] = float("nan")
    generator.get_candidates(tokens[:, : 11 + accepted + 1], model_outputs=outputs, n_last_matches=accepted, **kwargs)
    return generator._draft_states


@pytest.mark.parametrize("accepted", [0, 2, 5])
def test_only_the_rejected_suffix_enters(target, accepted):
    drafter = randomize(tiny_drafter(target))
    rejected = accepted + 1
    clean = second_block(target, drafter, accepted)
    assert clean.isfinite().all()
    # No draft state of a slot <= r, no target state of a slot < r, nor the last row's, which has no draft behind it.
    outside = second_block(
        target,
        drafter,
        accepted,
        spoil_draft=range(rejected + 1),
        spoil_target=[*range(rejected), BLOCK_SIZE - 1],
    )
    assert torch.equal(outside, clean)
    for row in range(rejected + 1, BLOCK_SIZE):
        assert second_block(target, drafter, accepted, spoil_draft=[row]).isnan().any()
        assert second_block(target, drafter, accepted, spoil_target=[row - 1]).isnan().any()


@pytest.mark.parametrize("conditioning", ["none", "gated", "overwrite", "corrected"])
def test_only_the_layers_that_are_read_are_captured(target, conditioning):
    drafter = tiny_drafter(target, conditioning)
    generator = RetraceCandidateGenerator(drafter, target, GenerationConfig(max_length=50))
    taps = [i + 1 for i in drafter.config.target_layer_ids]
    expected = [*taps, LAST] if conditioning == "corrected" else taps
    assert generator.model_kwargs_overrides == {"output_hidden_states": expected}


@pytest.mark.parametrize("conditioning", ["gated", "overwrite"])
def test_the_ablations_keep_the_text(target, conditioning):
    prompt = prompt_of(20)
    sequence = plain(target, prompt)
    drafter = remember_trajectory(mixed(randomize(tiny_drafter(target, conditioning)), target, sequence))
    with Spy(RetraceCandidateGenerator) as rounds:
        assert torch.equal(plain(target, prompt, assistant_model=drafter), sequence)
    assert sum(r["trajectory"] is not None for r in rounds) > 5


# -- what the drafter is fed -----------------------------------------------------------------------------------------


def drafter_inputs(target, prompt, sequence, **kwargs):
    """What every forward of a scripted drafter got in one generate() call."""
    drafter = mixed(tiny_drafter(target, "none"), target, sequence)
    calls = []

    def hook(module, args, kwargs):
        calls.append({k: v.clone() for k, v in kwargs.items() if isinstance(v, torch.Tensor)})

    drafter.register_forward_pre_hook(hook, with_kwargs=True)
    plain(target, prompt, assistant_model=drafter, **kwargs)
    return calls


def test_it_is_fed_what_transformers_own_generator_feeds(target):
    prompt = prompt_of(20)
    sequence = plain(target, prompt)
    ours = drafter_inputs(target, prompt, sequence)
    theirs = drafter_inputs(target, prompt, sequence, speculation_type="dflash")
    assert len(ours) == len(theirs) > 10
    for mine, its in zip(ours, theirs):
        assert mine.keys() == its.keys()
        for key in mine:
            torch.testing.assert_close(mine[key], its[key], rtol=0, atol=0 if key != "context_hidden_states" else 1e-4)


def test_padding_gives_no_context(target):
    prompt = prompt_of(20)
    sequence = plain(target, prompt)
    padded = torch.cat([torch.zeros(1, 6, dtype=torch.long), prompt], dim=1)
    mask = (torch.arange(26) >= 6).long()[None]
    clean = drafter_inputs(target, prompt, sequence)
    rounds = drafter_inputs(target, padded, sequence, attention_mask=mask)
    assert len(clean) == len(rounds)
    for a, b in zip(clean, rounds):
        for key in a:
            torch.testing.assert_close(a[key], b[key], rtol=1e-4, atol=1e-4)


def test_an_embedding_norm_is_bypassed_without_touching_the_module(target):
    class NormedEmbedding(torch.nn.Embedding):
        def __init__(self, weight):
            super().__init__(*weight.shape, _weight=weight)
            self.embed_norm = torch.nn.LayerNorm(weight.shape[1])

        def forward(self, ids):
            return self.embed_norm(super().forward(ids))

    drafter = tiny_drafter(target)
    expected = embed_block(target.get_input_embeddings(), prompt_of(3), drafter)
    original = target.get_input_embeddings()
    try:
        target.set_input_embeddings(NormedEmbedding(original.weight.detach().clone()))
        assert torch.equal(embed_block(target.get_input_embeddings(), prompt_of(3), drafter), expected)
    finally:
        target.set_input_embeddings(original)


# -- what it proposes ------------------------------------------------------------------------------------------------


def test_it_proposes_no_more_than_the_length_allows(target):
    drafter = tiny_drafter(target)
    for room, expected in ((20, 7), (8, 7), (7, 6), (2, 1), (1, 0)):
        generator = RetraceCandidateGenerator(drafter, target, GenerationConfig(max_length=11 + room))
        tokens, logits = generator.get_candidates(
            prompt_of(11), model_kwargs={}, model_outputs=manual_outputs(10, seed=1), n_last_matches=0
        )
        assert tokens.shape[1] - 11 == expected and logits is None


def test_processors_shape_the_proposals_slot_by_slot(target):
    drafter = randomize(tiny_drafter(target))
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(5.0)])
    generator = RetraceCandidateGenerator(drafter, target, GenerationConfig(max_length=50), processors)
    prompt = prompt_of(11)
    tokens, _ = generator.get_candidates(
        prompt, model_kwargs={}, model_outputs=manual_outputs(10, seed=1), n_last_matches=0
    )
    logits = draft_logits(target, generator._draft_states[:, 1:])
    seen = prompt
    for slot in range(BLOCK_SIZE - 1):
        token = processors(seen, logits[:, slot].clone()).argmax(-1)
        assert token == tokens[0, 11 + slot]
        seen = torch.cat([seen, token[:, None]], dim=1)


@pytest.mark.parametrize("kwargs", [{}, {"top_k": 4, "temperature": 0.7, "top_p": 0.9}, {"repetition_penalty": 1.3}])
def test_drawn_proposals_come_with_the_law_they_were_drawn_from(target, kwargs, monkeypatch):
    drafter = randomize(tiny_drafter(target))
    drafter.proposal = "sample"
    seen = []
    original = RetraceCandidateGenerator.get_candidates

    def get_candidates(generator, input_ids, **kw):
        tokens, logits = original(generator, input_ids, **kw)
        if logits is not None:
            seen.append((input_ids, tokens[:, input_ids.shape[1] :], logits, generator))
            raw = draft_logits(target, generator._draft_states[:, 1 : 1 + logits.shape[1]]).float()
            for slot in range(logits.shape[1]):
                prefix = tokens[:, : input_ids.shape[1] + slot]
                assert torch.allclose(generator.logits_processor(prefix, raw[:, slot].clone()), logits[:, slot])
        return tokens, logits

    monkeypatch.setattr(RetraceCandidateGenerator, "get_candidates", get_candidates)
    torch.manual_seed(0)
    plain(target, prompt_of(8), 12, do_sample=True, assistant_model=drafter, **kwargs)
    assert seen
    for _, drawn, logits, _ in seen:
        assert logits.shape[:2] == drawn.shape
        assert logits.gather(2, drawn[..., None]).isfinite().all()


def exact_law(target, prompt, length, **kwargs):
    """The target's law over `length` new tokens, by running all prefixes through it."""
    config = GenerationConfig(do_sample=True, **kwargs)
    target._prepare_special_tokens(config)
    processors = target._get_logits_processor(config, input_ids_seq_length=prompt.shape[1])
    prefixes, law = prompt, torch.ones(1)
    for _ in range(length):
        with torch.no_grad():
            logits = target(input_ids=prefixes).logits[:, -1].float()
        scores = torch.cat([processors(p[None], row[None]) for p, row in zip(prefixes, logits)])
        probs = scores.softmax(-1)
        vocab = probs.shape[1]
        law = (law[:, None] * probs).flatten()
        tokens = torch.arange(vocab).repeat(prefixes.shape[0])[:, None]
        prefixes = torch.cat([prefixes.repeat_interleave(vocab, 0), tokens], dim=1)
    return law


@pytest.mark.parametrize(
    ("proposal", "kwargs"),
    [
        ("argmax", {"top_k": 4, "temperature": 0.7}),
        ("sample", {"top_k": 4, "temperature": 0.7}),
        ("sample", {"top_k": 3, "repetition_penalty": 1.3}),
    ],
)
def test_sampling_keeps_the_targets_law(proposal, kwargs):
    target = tiny_target(vocab_size=8, num_hidden_layers=2, initializer_range=0.2)
    drafter = randomize(tiny_drafter(target, mask_token_id=7, num_hidden_layers=1, target_layer_ids=[0]))
    drafter.proposal = proposal
    prompt = prompt_of(4) % 5 + 2
    law = exact_law(target, prompt, 3, **kwargs)
    counts = torch.zeros(512)
    torch.manual_seed(7)
    with record_acceptance() as stats:
        for _ in range(500):
            a, b, c = plain(target, prompt, 3, do_sample=True, assistant_model=drafter, **kwargs)[0, 4:].tolist()
            counts[64 * a + 8 * b + c] += 1
    assert 0 < sum(stats.accepted_per_round) < stats.rounds  # both branches of the verification were taken
    assert counts[law == 0].sum() == 0
    expected = 500 * law
    large = expected >= 5
    observed = torch.cat([counts[large], counts[~large].sum()[None]]).double()
    expected = torch.cat([expected[large], expected[~large].sum()[None]]).double()
    expected = expected * observed.sum() / expected.sum()
    keep = expected > 0
    assert chisquare(observed[keep].numpy(), expected[keep].numpy()).pvalue > 1e-3


def test_argmax_proposals_carry_no_logits_when_sampling(target):
    drafter = randomize(tiny_drafter(target))
    config = GenerationConfig(max_length=50, do_sample=True)
    generator = RetraceCandidateGenerator(drafter, target, config)
    _, logits = generator.get_candidates(
        prompt_of(11), model_kwargs={}, model_outputs=manual_outputs(10, seed=1), n_last_matches=0
    )
    assert logits is None


def test_a_stop_turns_drawing_off(target):
    # Cutting a block where a drawn token completes a stop would bend the law.
    drafter = tiny_drafter(target)
    drafter.proposal = "sample"
    config = GenerationConfig(max_length=50, do_sample=True)
    stop = StoppingCriteriaList([lambda input_ids, scores: torch.tensor([False])])
    assert RetraceCandidateGenerator(drafter, target, config).draws
    assert not RetraceCandidateGenerator(drafter, target, config, stopping_criteria=stop).draws


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_a_saved_drafter_brings_its_policy(target, tmp_path, monkeypatch):
    from peft import LoraConfig, get_peft_model

    drafter = randomize(tiny_drafter(target))
    assert drafter.config.proposal == drafter.proposal == "argmax"
    drafter.proposal = "sample"
    drafter.save_pretrained(tmp_path)
    loaded = RetraceDrafter.from_pretrained(tmp_path)
    changed = RetraceDrafter.from_pretrained(tmp_path, proposal="argmax")
    wrapped = get_peft_model(RetraceDrafter.from_pretrained(tmp_path), LoraConfig(target_modules=["fc"]))
    off = get_peft_model(RetraceDrafter.from_pretrained(tmp_path), LoraConfig(target_modules=["fc"]))
    off.config.proposal = "argmax"
    draws, original = [], RetraceCandidateGenerator.get_candidates

    def get_candidates(generator, *args, **kwargs):
        tokens, logits = original(generator, *args, **kwargs)
        draws[-1] |= logits is not None
        return tokens, logits

    monkeypatch.setattr(RetraceCandidateGenerator, "get_candidates", get_candidates)
    assistants = (loaded, AutoModel.from_pretrained(tmp_path), wrapped, changed, off)
    for assistant in assistants:
        draws.append(False)
        plain(target, prompt_of(8), 12, do_sample=True, assistant_model=assistant)
    assert draws == [True, True, True, False, False]
    draws.append(False)
    assert torch.equal(plain(target, prompt_of(8), 12, assistant_model=loaded), plain(target, prompt_of(8), 12))
    assert draws[-1] is False  # greedily


def test_an_unknown_policy_is_refused(target):
    with pytest.raises(ValueError, match="proposal is 'beam'.*argmax"):
        tiny_drafter(target, proposal="beam")
    drafter = tiny_drafter(target)
    drafter.proposal = "beam"
    with pytest.raises(ValueError, match="proposal.*argmax"):
        plain(target, prompt_of(4), assistant_model=drafter)


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma2", "granite", "cohere"])
def test_draft_logits_are_the_targets(family):
    target = tiny_target(family)
    with torch.no_grad():
        out = target(input_ids=prompt_of(9), output_hidden_states=True)
    torch.testing.assert_close(draft_logits(target, out.hidden_states[LAST]), out.logits)
    check_head(target)


def test_a_head_that_is_not_known_refuses_drawing_only():
    class Shifted(type(tiny_target())):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.logits = out.logits * 0.5
            return out

    target = Shifted(tiny_target().config).eval()
    drafter = tiny_drafter(target)
    drafter.proposal = "sample"
    with pytest.raises(ValueError, match="proposal = 'argmax'"):
        plain(target, prompt_of(4), 10, do_sample=True, assistant_model=drafter)
    drafter.proposal = "argmax"
    plain(target, prompt_of(4), 10, do_sample=True, assistant_model=drafter)


# -- criteria --------------------------------------------------------------------------------------------------------


def test_only_custom_criteria_are_looked_at(target):
    drafter = tiny_drafter(target)
    config = GenerationConfig(max_length=50)
    config._eos_token_tensor = torch.tensor([5, 6])
    own = EosTokenCriteria(eos_token_id=9)
    criteria = StoppingCriteriaList(
        [MaxLengthCriteria(40), MaxTimeCriteria(60), EosTokenCriteria(eos_token_id=[5, 6]), own]
    )
    generator = RetraceCandidateGenerator(drafter, target, config, stopping_criteria=criteria)
    assert generator.prefix_criteria == [own]
    assert generator.max_length == 40


def test_a_criterion_that_needs_scores_is_refused_by_name(target):
    class NeedsScores:
        def __call__(self, input_ids, scores, **kwargs):
            return scores[-1].max(dim=-1).values > 1e9

    drafter = tiny_drafter(target)
    kwargs = {"return_dict_in_generate": True, "output_scores": True}
    criteria = StoppingCriteriaList([NeedsScores()])
    with pytest.raises(ValueError, match="NeedsScores.*scores"):
        plain(target, prompt_of(4), assistant_model=drafter, stopping_criteria=criteria, **kwargs)


# -- the host, and memory --------------------------------------------------------------------------------------------


class Synchronisations(TorchDispatchMode):
    """Writes down the operations that wait for the device."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        to_cpu = name == "aten::_to_copy" and (kwargs or {}).get("device") == torch.device("cpu")
        if to_cpu or name in ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal"):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("proposal", ["argmax", "sample"])
def test_get_candidates_does_not_wait_for_the_device(target, proposal, monkeypatch):
    prompt = prompt_of(20)
    drafter = randomize(tiny_drafter(target))
    drafter.proposal = proposal
    counted = Synchronisations()
    original = RetraceCandidateGenerator.get_candidates

    def get_candidates(*args, **kwargs):
        def refuse(*_, **__):
            raise AssertionError("a tensor was copied to the host")

        with counted, monkeypatch.context() as patch:
            for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__"):
                patch.setattr(torch.Tensor, name, refuse)
            return original(*args, **kwargs)

    monkeypatch.setattr(RetraceCandidateGenerator, "get_candidates", get_candidates)
    with record_acceptance() as stats:
        plain(target, prompt, 30, assistant_model=drafter, do_sample=proposal == "sample")
    assert stats.rounds > 5 and counted.seen == []


def test_the_counter_of_synchronisations_counts():
    with Synchronisations() as counted:
        bool(torch.ones(1).sum() > 0)
        torch.ones(3).nonzero()
    assert counted.seen == ["aten::_local_scalar_dense", "aten::nonzero"]


@pytest.mark.gpu
def test_get_candidates_does_not_wait_for_a_gpu(monkeypatch):
    target = tiny_target().to("cuda")
    prompt = prompt_of(20).to("cuda")
    drafter = randomize(tiny_drafter(target).cpu()).to("cuda")
    sequence = plain(target, prompt)
    original = RetraceCandidateGenerator.get_candidates

    def get_candidates(*args, **kwargs):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return original(*args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    plain(target, prompt, assistant_model=drafter)  # compiles kernels, which may wait
    monkeypatch.setattr(RetraceCandidateGenerator, "get_candidates", get_candidates)
    assert torch.equal(plain(target, prompt, assistant_model=drafter), sequence)


def test_round_state_dies_with_the_call(target, monkeypatch):
    prompt = prompt_of(20)
    drafter = randomize(tiny_drafter(target))
    references = []
    original = RetraceCandidateGenerator.get_candidates

    def get_candidates(generator, *args, **kwargs):
        out = original(generator, *args, **kwargs)
        if generator._draft_states is not None:
            references[:] = map(weakref.ref, (generator, generator._cache, generator._draft_states))
        return out

    monkeypatch.setattr(RetraceCandidateGenerator, "get_candidates", get_candidates)
    gc.collect()
    gc.disable()  # reference counting alone must do: a cycle would keep the caches until some later collection
    try:
        for recorded in (False, True):
            with record_acceptance() if recorded else torch.no_grad():
                out = plain(target, prompt, assistant_model=drafter, return_dict_in_generate=True)
            assert out.cache.get_seq_length() == 84
            # The context stays with the target's cache, for a next turn, and goes with it.
            alive = [r() is not None for r in references]
            assert alive == [False, True, False]
            del out
            assert references[1]() is None
    finally:
        gc.enable()


def test_the_drafters_cache_holds_the_context_and_one_block(target, monkeypatch):
    prompt = prompt_of(20)
    sequence = plain(target, prompt)
    drafter = mixed(tiny_drafter(target), target, sequence)
    lengths = []
    original = RetraceCandidateGenerator.get_candidates

    def get_candidates(generator, input_ids, **kwargs):
        out = original(generator, input_ids, **kwargs)
        lengths.append((generator._cache.get_seq_length(), input_ids.shape[1] - 1 + BLOCK_SIZE))
        return out

    monkeypatch.setattr(RetraceCandidateGenerator, "get_candidates", get_candidates)
    plain(target, prompt, assistant_model=drafter)
    assert all(found == expected for found, expected in lengths[1:])


@pytest.mark.parametrize("window", [1, 6, 24])
def test_a_windowed_drafters_cache_is_bounded(target, window, monkeypatch):
    prompt = prompt_of(20)
    sequence = plain(target, prompt)
    drafter = mixed(tiny_drafter(target, context_window=window), target, sequence)
    lengths = []
    original = RetraceCandidateGenerator.get_candidates

    def get_candidates(generator, *args, **kwargs):
        out = original(generator, *args, **kwargs)
        lengths.append(generator._cache.get_seq_length())
        return out

    monkeypatch.setattr(RetraceCandidateGenerator, "get_candidates", get_candidates)
    assert torch.equal(plain(target, prompt, assistant_model=drafter), sequence)
    assert max(lengths) == window + BLOCK_SIZE
    drafter = randomize(tiny_drafter(target, context_window=window))
    assert torch.equal(plain(target, prompt, assistant_model=drafter), sequence)
    # transformers' own generator keeps every row; the drafter's forward hides the same ones.
    own = plain(target, prompt, assistant_model=drafter, speculation_type="dflash")
    assert torch.equal(own, sequence)


# -- pairing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hidden_size", 64, r"hidden size is 64.*is 32.*trained for this target"),
        ("vocab_size", 300, r"vocabulary has 300.*has 200.*resize"),
        ("num_target_layers", 12, r"12 layers.*has 6.*trained for this target"),
        ("mask_token_id", None, r"no mask_token_id.*set it"),
        ("mask_token_id", 205, r"mask_token_id 205 is beyond the 200 embedding rows.*resize_token_embeddings"),
        ("target_layer_ids", [1, 5], r"target_layer_ids \[5\].*0 to 4"),
    ],
)
def test_pairing_faults_name_the_thing_and_the_cure(target, field, value, message, monkeypatch):
    drafter = tiny_drafter(target)
    object.__setattr__(drafter.config, field, value)
    monkeypatch.setattr(type(target), "_assisted_decoding", None)  # the target must not have run
    with pytest.raises(ValueError, match=message):
        plain(target, prompt_of(4), assistant_model=drafter)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_beams": 2}, "num_beams is 2.*num_beams=1"),
        ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences is 2.*num_return_sequences=1"),
        ({"use_cache": False}, "use_cache is False.*leave use_cache out"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens.*leave out"),
        ({"dola_layers": "low"}, "dola_layers is low.*leave out"),
        ({"guidance_scale": 1.5}, "guidance_scale is 1.5.*[Ll]eave out"),
        ({"cache_implementation": "quantized"}, "quantized.*[Ll]eave out"),
        ({"assistant_tokenizer": object()}, "leave out assistant_tokenizer"),
        (
            {"output_attentions": True, "return_dict_in_generate": True},
            "output_attentions.*set_attn_implementation",
        ),
    ],
)
def test_options_that_cannot_be_served_say_so(target, kwargs, message, monkeypatch):
    drafter = tiny_drafter(target)
    monkeypatch.setattr(type(target), "_assisted_decoding", None)
    with pytest.raises(ValueError, match=message):
        plain(target, prompt_of(4), assistant_model=drafter, **kwargs)


def test_processors_with_memory_say_so(target):
    watermark = SynthIDTextWatermarkLogitsProcessor(
        ngram_len=5,
        keys=[1, 2, 3],
        sampling_table_size=64,
        sampling_table_seed=0,
        context_history_size=16,
        device=torch.device("cpu"),
    )
    with pytest.raises(ValueError, match="SynthIDTextWatermarkLogitsProcessor remembers.*drop watermarking_config"):
        plain(
            target,
            prompt_of(4),
            assistant_model=tiny_drafter(target),
            logits_processor=LogitsProcessorList([watermark]),
        )


def test_a_target_without_hidden_states_says_so(target, monkeypatch):
    forward = type(target).forward
    monkeypatch.setattr(
        type(target),
        "forward",
        functools.wraps(forward)(
            lambda self, *args, output_hidden_states=None, **kwargs: forward(self, *args, **kwargs)
        ),
    )
    with pytest.raises(ValueError, match="Qwen3ForCausalLM returned 0 hidden states.*reads from 7"):
        plain(target, prompt_of(4), assistant_model=tiny_drafter(target))


def test_inputs_that_cannot_be_served_say_so(target):
    drafter = tiny_drafter(target)
    passes = []
    handle = target.register_forward_pre_hook(lambda *_: passes.append(1))
    embeds = target.get_input_embeddings()(prompt_of(5))
    try:
        with pytest.raises(ValueError, match="batch has 2.*once for each"):
            plain(target, prompt_of(4, batch_size=2), assistant_model=drafter)
        with pytest.raises(ValueError, match="inputs_embeds.*pass input_ids"):
            target.generate(inputs_embeds=embeds, max_new_tokens=5, assistant_model=drafter)
        with pytest.raises(ValueError, match="without input_ids of the same length"):
            plain(target, prompt_of(4), 5, inputs_embeds=embeds, assistant_model=drafter)
    finally:
        handle.remove()
    assert not passes


def test_models_that_cannot_be_targets_say_so(target, monkeypatch):
    drafter = tiny_drafter(target)
    with monkeypatch.context() as patch:
        patch.setattr(type(target), "get_output_embeddings", lambda self: None)
        with pytest.raises(ValueError, match="no LM head.*AutoModelForCausalLM"):
            check_pairing(drafter, target)
    with monkeypatch.context() as patch:
        patch.setattr(target.config, "is_encoder_decoder", True)
        with pytest.raises(ValueError, match="encoder-decoder.*decoder-only"):
            check_pairing(drafter, target)


def test_a_warm_cache_that_cannot_be_continued_says_so(target):
    drafter = tiny_drafter(target)
    prompt = prompt_of(10)
    cache = DynamicCache(config=target.config)
    plain(target, prompt, 5, cache=cache)
    with pytest.raises(ValueError, match="cache holds 14 tokens and the prompt has 10.*whole text"):
        plain(target, prompt, 5, cache=cache, assistant_model=drafter)
    embeds = target.get_input_embeddings()(prompt_of(20))
    with pytest.raises(ValueError, match="inputs_embeds cannot continue a cache"):
        plain(target, prompt_of(20), 5, inputs_embeds=embeds, cache=cache, assistant_model=drafter)


def test_a_mask_token_that_is_also_padding_warns(target, caplog):
    drafter = tiny_drafter(target)
    drafter.config.mask_token_id = 0
    with caplog.at_level("WARNING", logger="retrace_hf"):
        check_pairing(drafter, target)
    assert "mask_token_id 0 is also" in caplog.text


def test_right_and_wrong_drafters_are_what_they_say(target):
    prompt = prompt_of(20)
    sequence = plain(target, prompt)
    for make, accepted in ((oracle, BLOCK_SIZE - 1), (always_wrong, 0)):
        with record_acceptance() as stats:
            plain(target, prompt, assistant_model=make(tiny_drafter(target), target, sequence))
        assert set(stats.accepted_per_round) == {accepted}


@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_the_head_over_few_rows_is_the_head(target, bias, monkeypatch):
    """On a CPU the draft's rows go through another order of the same product; a head that is more than its weights
    is called as it is."""
    head, hidden = torch.nn.Linear(32, 200, bias=bias), torch.randn(1, BLOCK_SIZE - 1, 32)
    monkeypatch.setattr(target, "get_output_embeddings", lambda: head)
    assert_close(draft_logits(target, hidden), head(hidden), rtol=1e-5, atol=1e-5)
    calls = []
    monkeypatch.setattr(torch, "mm", lambda *args, real=torch.mm: calls.append(1) or real(*args))
    draft_logits(target, hidden)
    assert calls == [1]
    assert torch.equal(draft_logits(target, hidden[:, :0]), head(hidden[:, :0]))
    head.register_forward_hook(lambda module, args, out: out + 1)
    assert torch.equal(draft_logits(target, hidden), head(hidden))


def test_an_offloaded_head_drafts(tmp_path):
    """accelerate leaves such a head's weight on meta and replaces its forward."""
    target = tiny_target("llama", tie_word_embeddings=False)
    prompt = prompt_of(9)
    expected = plain(target, prompt, 20)
    offloaded = dispatch_model(target, {"model": "cpu", "lm_head": "disk"}, main_device="cpu", offload_dir=tmp_path)
    drafter = randomize(tiny_drafter(tiny_target("llama")))
    assert torch.equal(plain(offloaded, prompt, 20, assistant_model=drafter), expected)


def test_a_misspelt_speculation_type_and_a_wrong_drafter_for_dflash(target):
    with pytest.raises(ValueError, match="speculation_type is 'dflsh'"):
        plain(target, prompt_of(9), 5, assistant_model=tiny_drafter(target), speculation_type="dflsh")
    other = tiny_drafter(tiny_target("qwen3", hidden_size=64))
    with pytest.raises(ValueError, match="hidden size is 64"):
        plain(target, prompt_of(9), 5, assistant_model=other, speculation_type="dflash")


class Grammar:
    """A processor of a user's own that allows even tokens, and must not be asked behind an end token."""

    def __init__(self, end: int):
        self.end = end

    def __call__(self, input_ids, scores):
        assert self.end not in input_ids[0].tolist()
        return scores.masked_fill(torch.arange(scores.shape[-1]) % 2 == 1, -torch.inf)


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("kind", ["function", "processor"])
def test_a_grammar_is_not_asked_what_follows_an_end_token(target, kind, sample):
    """A trie has nothing there; plain generate() never asks."""
    prompt = prompt_of(9) // 2 * 2
    free = {"logits_processor": LogitsProcessorList([Grammar(-1)])}
    end = int(plain(target, prompt, 24, **free)[0, -5])

    def allowed(batch, ids):
        return [] if end in ids.tolist() else list(range(0, VOCAB_SIZE, 2))

    options = {"eos_token_id": end, "do_sample": sample}
    if kind == "function":
        options["prefix_allowed_tokens_fn"] = allowed
    else:
        options["logits_processor"] = LogitsProcessorList([Grammar(end)])
    expected = plain(target, prompt, 24, **{**options, "do_sample": False})
    assert expected[0, -1] == end
    accepted = {}
    for name, drafter in drafters(target, plain(target, prompt, 40, **free)):
        drafter.proposal = "sample" if sample else "argmax"
        with record_acceptance() as stats:
            for seed in range(8 if sample else 1):
                set_seed(seed)
                found = plain(target, prompt, 24, assistant_model=drafter, **options)
                assert sample or torch.equal(found, expected), name
        accepted[name] = max(stats.accepted_per_round)
    assert sample or (accepted["oracle"] > 2 and accepted["wrong"] == 0)
