"""Drafting among a part of the target's tokens: the text stays plain's, and all that proposes agrees on the part."""

import copy
import gc
import weakref

import pytest
import torch
from peft import LoraConfig, get_peft_model
from scipy.stats import chisquare
from torch.testing import assert_close
from transformers import AutoModel

from retrace_hf import (
    RetraceCandidateGenerator,
    RetraceConfig,
    RetraceDataCollator,
    RetraceDrafter,
    record_acceptance,
)
from retrace_hf import draft_vocabulary as module
from retrace_hf.draft_vocabulary import DraftVocabulary, most_frequent_tokens
from retrace_hf.evaluation import roll_out
from retrace_hf.export import convert
from retrace_hf.target_head import draft_logits
from retrace_hf.training import rollout

from .fixtures import (
    BLOCK_SIZE,
    VOCAB_SIZE,
    drafter_of_kind,
    letters_tokenizer,
    plain,
    prompt_of,
    randomize,
    tiny_drafter,
    tiny_target,
)
from .test_candidate_generator import exact_law
from .test_convert import assert_same_bits, change, read
from .test_target_families import IntegerHead
from .test_trainer import make_trainer, rows_of


SOME = list(range(3, VOCAB_SIZE, 3))
EVEN = [0, 2, 4, 6]  # of 8


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def trimmed(target, tokens=SOME, **config):
    return randomize(tiny_drafter(target, draft_token_ids=tokens, **config))


@pytest.fixture
def proposed(monkeypatch):
    """What the rounds of `generate()` propose."""
    rounds, original = [], RetraceCandidateGenerator.get_candidates

    def get_candidates(generator, input_ids, **kwargs):
        out = original(generator, input_ids, **kwargs)
        rounds.append(out[0][0, input_ids.shape[1] :].tolist())
        return out

    monkeypatch.setattr(RetraceCandidateGenerator, "get_candidates", get_candidates)
    return rounds


# -- generate() ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.3}, {"min_new_tokens": 20}])
@pytest.mark.parametrize("kind", ["real", "oracle", "wrong"])
def test_the_text_is_plains_and_only_drafted_tokens_are_proposed(target, kind, options, proposed):
    prompt = prompt_of(11)
    text = plain(target, prompt, **options)
    said = set(text[0, 11:].tolist())
    # The oracle has all that is said but one token, which is the target's alone.
    tokens = sorted(said)[1:] if kind == "oracle" else SOME
    drafter = drafter_of_kind(kind, target, text, change=lambda drafter: with_tokens(drafter, tokens))
    with record_acceptance() as stats:
        assert torch.equal(plain(target, prompt, assistant_model=drafter, **options), text)
    assert {token for block in proposed for token in block} <= set(tokens)
    accepted = sum(stats.accepted_per_round)
    assert accepted == 0 if kind == "wrong" else kind == "real" or accepted > 0.7 * 64


def with_tokens(drafter, tokens):
    """A drafter that drafts among some tokens, made of one that drafts among all."""
    drafter.config.draft_vocab_size = len(tokens)
    drafter.draft_token_ids = torch.tensor(tokens)
    return drafter


def test_among_all_tokens_it_drafts_as_without_a_table(target, proposed):
    prompt, drafter = prompt_of(9), randomize(tiny_drafter(target))
    plain(target, prompt, assistant_model=drafter)
    whole = list(proposed)
    proposed.clear()
    table = trimmed(target, range(VOCAB_SIZE))
    table.load_state_dict(drafter.state_dict(), strict=False)
    plain(target, prompt, assistant_model=table)
    assert proposed == whole
    some = trimmed(target)
    some.load_state_dict(drafter.state_dict(), strict=False)
    some.config.draft_vocab_size = None
    proposed.clear()
    plain(target, prompt, assistant_model=some)
    assert proposed == whole


def test_transformers_own_generator_drafts_among_all(target):
    prompt, drafter = prompt_of(9), trimmed(target, conditioning="none")
    whole = RetraceDrafter.from_dflash(drafter, conditioning="none", draft_vocab_size=None)
    texts, tau = [], []
    for one in (drafter, whole):
        with record_acceptance() as stats:
            texts.append(plain(target, prompt, assistant_model=one, speculation_type="dflash"))
        tau.append(stats.accepted_per_round)
    assert torch.equal(texts[0], plain(target, prompt)) and torch.equal(*texts) and tau[0] == tau[1]


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
    shape = {"mask_token_id": 7, "num_hidden_layers": 1, "target_layer_ids": [0]}
    drafter = trimmed(target, proposal=proposal, **shape, tokens=EVEN)
    prompt = prompt_of(4) % 5 + 2
    law = exact_law(target, prompt, 3, **kwargs)
    counts = torch.zeros(512)
    torch.manual_seed(7)
    with record_acceptance() as stats:
        for _ in range(500):
            a, b, c = plain(target, prompt, 3, do_sample=True, assistant_model=drafter, **kwargs)[0, 4:].tolist()
            counts[64 * a + 8 * b + c] += 1
    assert 0 < sum(stats.accepted_per_round) < stats.rounds
    assert counts[law == 0].sum() == 0
    large = 500 * law >= 5
    observed = torch.cat([counts[large], counts[~large].sum()[None]]).double()
    expected = 500 * torch.cat([law[large], law[~large].sum()[None]]).double()
    expected = expected * observed.sum() / expected.sum()
    assert chisquare(observed.numpy(), expected.numpy()).pvalue > 1e-3


@pytest.mark.parametrize("kwargs", [{}, {"top_k": 4, "temperature": 0.7}, {"repetition_penalty": 1.3}])
def test_the_law_that_is_drawn_from_has_nothing_outside(target, kwargs, monkeypatch):
    seen, original = [], RetraceCandidateGenerator.get_candidates

    def get_candidates(generator, input_ids, **kw):
        tokens, logits = original(generator, input_ids, **kw)
        if logits is not None:
            seen.append((tokens[:, input_ids.shape[1] :], logits))
        return tokens, logits

    monkeypatch.setattr(RetraceCandidateGenerator, "get_candidates", get_candidates)
    drafter = trimmed(target, proposal="sample")
    plain(target, prompt_of(8), 12, do_sample=True, assistant_model=drafter, **kwargs)
    outside = [token for token in range(VOCAB_SIZE) if token not in SOME]
    assert seen
    for drawn, logits in seen:
        assert logits.shape == (*drawn.shape, VOCAB_SIZE)
        assert (logits[..., outside] == -torch.inf).all()
        assert logits.gather(2, drawn[..., None]).isfinite().all()


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "top_k": 50}])
def test_a_grammar_may_force_a_token_that_is_not_drafted(target, options, proposed):
    """In every fourth place; transformers then gives it a score of its own."""

    def allowed(_, tokens):
        return [4] if len(tokens) % 4 == 0 else [3, 4, 6, 9]

    prompt = prompt_of(9)
    drafter = trimmed(target, proposal="sample")
    text = plain(target, prompt, 24, assistant_model=drafter, prefix_allowed_tokens_fn=allowed, **options)
    assert (text[0, 12::4] == 4).all() and text.shape[1] == 9 + 24
    assert {token for block in proposed for token in block} <= {3, 4, 6, 9}
    assert any(4 in block for block in proposed)
    if not options:
        assert torch.equal(text, plain(target, prompt, 24, prefix_allowed_tokens_fn=allowed))


@pytest.mark.parametrize("do_sample", [True, False])
def test_where_processors_leave_none_of_them_the_target_speaks(target, do_sample, proposed):
    drafter, prompt = trimmed(target, proposal="sample"), prompt_of(9)
    options = {"bad_words_ids": [[token] for token in SOME], "do_sample": do_sample}
    text = plain(target, prompt, 12, assistant_model=drafter, **options)
    assert not set(text[0, 9:].tolist()) & set(SOME) and not any(proposed)
    if not do_sample:
        assert torch.equal(text, plain(target, prompt, 12, **options))


# -- the head's rows -------------------------------------------------------------------------------------------------


def heads(target):
    """Heads that are more than a matrix, by name."""
    biased = torch.nn.Linear(32, VOCAB_SIZE)
    return {"plain": target.lm_head, "biased": biased, "quantised": IntegerHead(target.lm_head)}


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite", "cohere"])
@pytest.mark.parametrize("head", ["plain", "biased", "quantised"])
def test_rows_are_columns_of_the_whole(family, head):
    target = tiny_target(family)
    target.lm_head = heads(target)[head]
    drafter = trimmed(target)
    vocabulary = DraftVocabulary.of(drafter, target)
    hidden = torch.randn(1, 7, 32)
    whole, some = draft_logits(target, hidden), vocabulary.logits(hidden)
    assert_close(some, whole[..., SOME])
    assert torch.equal(vocabulary.most_likely(hidden), torch.tensor(SOME)[some.argmax(-1)])
    spread = vocabulary.whole_logits(hidden)
    assert spread.shape == whole.shape and torch.equal(spread[..., SOME], some)
    assert int(spread.isfinite().sum()) == 7 * len(SOME)
    text = plain(target, prompt_of(7), 20)
    assert torch.equal(plain(target, prompt_of(7), 20, assistant_model=drafter), text)


def test_rows_are_gathered_once_and_again_where_weights_change(monkeypatch):
    target = tiny_target()
    drafter, calls, real = trimmed(target), [], module._gather_rows
    monkeypatch.setattr(module, "_gather_rows", lambda *args: calls.append(1) or real(*args))
    for _ in range(3):
        plain(target, prompt_of(7), 8, assistant_model=drafter)
    assert len(calls) == 1
    hidden = torch.randn(1, 7, 32)
    for number, alter in enumerate(
        (
            lambda: torch.nn.init.normal_(target.lm_head.weight),
            lambda: target.to(torch.bfloat16),
            lambda: drafter.set_draft_token_ids([token - 1 for token in SOME]),
        )
    ):
        alter()
        found = DraftVocabulary.of(drafter, target).logits(hidden)
        expected = draft_logits(target, hidden)[..., drafter.draft_token_ids]
        assert_close(found, expected)
        assert len(calls) == 2 + number
    other = trimmed(target, [5, 7])
    assert DraftVocabulary.of(other, target).token_ids.tolist() == [5, 7]
    assert len(DraftVocabulary.of(drafter, target).token_ids) == len(SOME)


def test_rows_made_in_inference_mode_also_train():
    target = tiny_target()
    drafter = trimmed(target)
    with torch.inference_mode():
        plain(target, prompt_of(7), 8, assistant_model=drafter)
    hidden = torch.randn(2, 32, requires_grad=True)
    DraftVocabulary.of(drafter, target).logits(hidden).sum().backward()
    assert hidden.grad.abs().sum() > 0


def test_neither_model_is_kept_alive():
    target = tiny_target()
    drafter = trimmed(target)
    plain(target, prompt_of(7), 8, assistant_model=drafter)
    rows = weakref.ref(DraftVocabulary.of(drafter, target)._rows)
    del drafter
    gc.collect()
    assert rows() is None
    drafter, gone = trimmed(target), weakref.ref(target.lm_head)
    plain(target, prompt_of(7), 8, assistant_model=drafter)
    del target
    gc.collect()
    assert gone() is None


# -- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("soft_share", [0.0, 0.4])
def test_the_loss_against_a_loop(target, tmp_path, soft_share):
    """Labels outside end what is supervised; the softmax, the teacher's too, is over the drafted tokens."""
    rows = rows_of(target, count=2)
    said = sorted({token for row in rows for token in row["input_ids"][9:]})
    tokens = torch.tensor(said[: len(said) * 3 // 4])
    drafter = trimmed(target, tokens)
    options = {"num_carried_rounds": 0, "soft_share": soft_share, "soft_tokens": len(tokens)}
    trainer = make_trainer(drafter, target, tmp_path, rows, **options)
    batch = RetraceDataCollator()(rows)
    loss = trainer.compute_loss(drafter, dict(batch)).item()
    blocks = trainer._draw_anchors(batch["loss_mask"], first=0)
    clean = rollout.read_clean_text(target, batch["input_ids"], drafter.config.target_layer_ids)
    states = rollout.draft_blocks(drafter, target.get_input_embeddings(), batch["input_ids"], clean.features, blocks)
    total, items, outside = 0.0, 0.0, 0
    with torch.no_grad():
        teacher = target(batch["input_ids"]).logits[..., tokens].log_softmax(-1)
        drafted = target.lm_head(states)[..., tokens].log_softmax(-1)
        for b in range(2):
            for n, anchor in enumerate(blocks.anchors[b].tolist()):
                for k in range(1, min(BLOCK_SIZE, batch["input_ids"].shape[1] - anchor)):
                    label = int(batch["input_ids"][b, anchor + k])
                    if label not in tokens.tolist():
                        outside += 1
                        break
                    p, q = teacher[b, anchor + k - 1], drafted[b, n, k]
                    entropy = -float(q[tokens.tolist().index(label)])
                    weight = float(torch.exp(torch.tensor(-(k - 1) / 4.0)))
                    divergence = float((p.exp() * (p - q)).sum())
                    total += weight * ((1 - soft_share) * entropy + soft_share * divergence)
                    items += weight
    assert outside > 3
    assert_close(loss, total / items, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("conditioning", ["none", "corrected"])
def test_training_proposes_what_generate_proposes(target, tmp_path, conditioning, proposed, monkeypatch):
    """Fresh and carried rounds of one anchor, the first answer token, beside those of `generate()`."""
    rows = rows_of(target, count=1)
    said = sorted(set(rows[0]["input_ids"][9:]))
    drafter = trimmed(target, said[::2] + [1, 2], conditioning=conditioning)
    prompt = torch.tensor([rows[0]["input_ids"][:9]])
    plain(target, prompt, 40, assistant_model=drafter)
    trainer = make_trainer(drafter, target, tmp_path, rows, num_carried_rounds=3)
    drafts, original = [], trainer._block_loss

    def block_loss(*args):
        loss, drafted = original(*args)
        drafts.append(drafted[0, 0].tolist())
        return loss, drafted

    monkeypatch.setattr(trainer, "_block_loss", block_loss)
    first = rollout.Blocks(torch.tensor([[9]]), torch.tensor([[True]]))
    monkeypatch.setattr(trainer, "_draw_anchors", lambda *args, **kwargs: first)
    drafter.eval()
    with torch.no_grad():
        trainer.compute_loss(drafter, dict(RetraceDataCollator()(rows)))
    assert drafts == proposed[1:5] and len(drafts) == 4
    (played,) = roll_out(target, drafter, [rows[0]["input_ids"]], [9], 40)
    with record_acceptance() as stats:
        plain(target, prompt, 40, assistant_model=drafter)
    assert played.accepted_per_round == stats.accepted_per_round


def test_it_trains_and_its_table_stays(target, tmp_path):
    drafter = trimmed(target)
    trainer = make_trainer(
        drafter, target, tmp_path, rows_of(target), max_steps=3, save_strategy="steps", save_steps=3
    )
    before = [p.detach().clone() for p in drafter.parameters()]
    trainer.train()
    assert not any(torch.equal(p, b) for p, b in zip(drafter.parameters(), before))
    again = RetraceDrafter.from_pretrained(tmp_path / "checkpoint-3")
    assert again.draft_token_ids.tolist() == SOME
    with pytest.raises(ValueError, match="loss_on_seen_tokens.*draft_vocab_size=66"):
        make_trainer(drafter, target, tmp_path, rows_of(target), loss_on_seen_tokens=True, num_carried_rounds=0)


def test_with_lora(target, tmp_path, proposed):
    base = trimmed(target)
    adapted = get_peft_model(copy.deepcopy(base), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    rows, prompt = rows_of(target), prompt_of(9)
    make_trainer(adapted, target, tmp_path, rows, max_steps=2).train()
    assert torch.equal(plain(target, prompt, assistant_model=adapted), plain(target, prompt))
    assert {token for block in proposed for token in block} <= set(SOME)
    adapted.save_pretrained(tmp_path / "adapter")
    base.save_pretrained(tmp_path / "base")
    merged = adapted.merge_and_unload()
    assert merged.draft_token_ids.tolist() == SOME


# -- folders ---------------------------------------------------------------------------------------------------------


def test_saved_and_loaded(target, tmp_path, proposed):
    prompt = prompt_of(9)
    drafter = trimmed(target)
    plain(target, prompt, assistant_model=drafter)
    first = list(proposed)
    drafter.save_pretrained(tmp_path)
    for again in (
        RetraceDrafter.from_pretrained(tmp_path),
        AutoModel.from_pretrained(tmp_path, trust_remote_code=True),
        RetraceDrafter.from_pretrained(tmp_path, dtype=torch.float32),
    ):
        proposed.clear()
        plain(target, prompt, assistant_model=again)
        assert proposed == first and again.draft_token_ids.dtype == torch.long
    assert RetraceDrafter.from_pretrained(tmp_path, dtype=torch.bfloat16).draft_token_ids.tolist() == SOME


@pytest.mark.parametrize(
    ("table", "size", "fault"),
    [
        (None, 66, "missing: .*draft_token_ids"),
        (torch.tensor(SOME[1:]), 66, "shape: .*draft_token_ids"),
        (torch.tensor(SOME[::-1]), 66, "draft_token_ids is not strictly ascending"),
        (torch.tensor([*SOME[:-1], VOCAB_SIZE]), 66, "draft_token_ids goes from 3 to 200 and the target has 200"),
        (torch.tensor(SOME), None, "unknown: .*draft_token_ids"),
        (torch.tensor(SOME), 201, "draft_vocab_size is 201 and the target has 200"),
        (torch.tensor(SOME), 0, "draft_vocab_size is 0; it must be at least 1"),
    ],
)
def test_a_table_that_does_not_fit_is_refused_by_name(target, tmp_path, table, size, fault):
    trimmed(target).save_pretrained(tmp_path)
    change(tmp_path, {"draft_token_ids": table}, draft_vocab_size=size)
    with pytest.raises(ValueError, match=fault):
        RetraceDrafter.from_pretrained(tmp_path)


def test_a_table_set_wrong_is_refused_before_the_target_runs(target):
    drafter = trimmed(target)
    drafter.config.draft_vocab_size = 5
    with pytest.raises(ValueError, match="draft_vocab_size is 5 and the drafter has 66 of them"):
        plain(target, prompt_of(9), assistant_model=drafter)
    bare = randomize(tiny_drafter(target))
    bare.config.draft_vocab_size = 5
    with pytest.raises(ValueError, match="draft_vocab_size is 5 and the drafter has no draft_token_ids"):
        plain(target, prompt_of(9), assistant_model=bare)
    with pytest.raises(ValueError, match="draft_vocab_size is 5 and no draft_token_ids"):
        tiny_drafter(target, draft_vocab_size=5)
    with pytest.raises(ValueError, match="goes from 1 to 200"):
        tiny_drafter(target, draft_token_ids=[1, 200])
    with pytest.raises(ValueError, match="n >= 1|at least 1"):
        tiny_drafter(target, draft_token_ids=[])
    wider = RetraceDrafter(
        RetraceConfig.from_dict({**drafter.config.to_dict(), "vocab_size": 300, "draft_vocab_size": 66})
    )
    wider.set_draft_token_ids(range(234, 300))
    with pytest.raises(ValueError, match="token 299 and the target's LM head has 200"):
        DraftVocabulary.of(wider, target)


def test_from_dflash_sets_keeps_and_drops(target, tmp_path):
    dflash = trimmed(target, conditioning="none")
    dflash.save_pretrained(tmp_path)
    assert RetraceDrafter.from_dflash(tmp_path).draft_token_ids.tolist() == SOME
    assert RetraceDrafter.from_dflash(tmp_path, draft_token_ids=[9, 4]).draft_token_ids.tolist() == [4, 9]
    bare = RetraceDrafter.from_dflash(tmp_path, draft_vocab_size=None)
    assert bare.draft_token_ids is None and bare.config.draft_vocab_size is None
    hybrid = RetraceDrafter.from_dflash(tmp_path, target=target, context_fusion="hybrid")
    assert hybrid.draft_token_ids.tolist() == SOME
    half = dflash.to(torch.bfloat16)
    half.save_pretrained(tmp_path / "half")
    assert RetraceDrafter.from_dflash(tmp_path / "half").dtype == torch.bfloat16


def test_there_and_back(target, tmp_path):
    """speculators has tables of its own and a trimmed head; z-lab and native have none, and say so."""
    target.save_pretrained(tmp_path / "target")
    letters_tokenizer().save_pretrained(tmp_path / "target")
    drafter = trimmed(target, conditioning="none")
    source = tmp_path / "source"
    drafter.save_pretrained(source)
    spec, again = tmp_path / "spec", tmp_path / "again"
    assert convert(source, spec, "speculators", target=str(tmp_path / "target")) == []
    raw, weights = read(spec)
    assert raw["draft_vocab_size"] == len(SOME) and weights["t2d"].nonzero()[:, 0].tolist() == SOME
    assert (torch.arange(len(SOME)) + weights["d2t"]).tolist() == SOME and weights["d2t"].dtype == torch.long
    assert torch.equal(weights["lm_head.weight"], target.lm_head.weight[SOME])
    assert convert(spec, again, "retrace", target=str(tmp_path / "target")) == []
    assert_same_bits(read(again)[1], read(source)[1])
    assert read(again)[0]["draft_vocab_size"] == len(SOME)
    opened = RetraceDrafter.from_dflash(spec, conditioning="none")
    assert_same_bits(opened.state_dict(), drafter.state_dict())
    for to in ("z-lab", "native"):
        with pytest.raises(ValueError, match=f"{to} cannot hold.*--drop-draft-vocabulary"):
            convert(source, tmp_path / to, to)
        (lost,) = convert(source, tmp_path / to, to, drop_draft_vocabulary=True)
        assert "draft vocabulary of 66 tokens" in lost
        whole = RetraceDrafter.from_dflash(tmp_path / to, conditioning="none")
        prompt = prompt_of(9)
        assert torch.equal(plain(target, prompt, assistant_model=whole), plain(target, prompt))
    (lost,) = convert(source, tmp_path / "whole", "retrace", drop_draft_vocabulary=True)
    assert "draft_token_ids" not in read(tmp_path / "whole")[1] and "66" in lost


# -- which tokens ----------------------------------------------------------------------------------------------------


def test_most_frequent_tokens():
    rows = [
        {"input_ids": [9, 9, 9, 5, 5, 7, 2], "loss_mask": [0, 0, 0, 1, 1, 1, 1]},
        {"input_ids": [9, 5, 7, 3], "loss_mask": [1, 1, 1, 1]},
    ]
    assert most_frequent_tokens(rows, 2) == [5, 7]
    assert most_frequent_tokens(rows, 3) == [2, 5, 7]
    assert most_frequent_tokens(rows, 2, always=[8]) == [5, 8]
    assert most_frequent_tokens(rows, 50, always=[8]) == [2, 3, 5, 7, 8, 9]
    with pytest.raises(ValueError, match="has 1 tokens; it needs at least 2"):
        most_frequent_tokens(rows, 1, always=[8, 4])
    with pytest.raises(ValueError, match="No row has an answer token"):
        most_frequent_tokens([{"input_ids": [1], "loss_mask": [0]}], 5)
