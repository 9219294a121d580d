"""Every kind of target is either served, with plain's text, or refused by name before it has run."""

import functools
import re
from pathlib import Path

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from torch import nn
from torch.testing import assert_close
from transformers import DynamicCache

from retrace_hf import RetraceDrafter, RetraceTrainer, RetraceTrainingArguments, record_acceptance
from retrace_hf.target_head import check_head, draft_logits
from retrace_hf.training import rollout

from .fixtures import (
    BLOCK_SIZE,
    MASK_TOKEN_ID,
    THREE_KINDS,
    drafters,
    is_the_pass_over,
    oracle,
    plain,
    prompt_of,
    randomize,
    tiny_drafter,
    tiny_target,
)
from .target_table import (
    ALIBI,
    CHUNKED,
    FAMILIES,
    HYBRID,
    IMAGE,
    LEARNED,
    RECURRENT,
    SLIDING,
    VOCAB_SIZE,
    WINDOW,
    readme_table,
)


SERVED = [name for name, row in FAMILIES.items() if not row.refused]
REFUSED = [name for name, row in FAMILIES.items() if row.refused]
NEW_TOKENS = 1 + 2 * BLOCK_SIZE


def check_equal(target, prompt, drafters_of=drafters, new_tokens=NEW_TOKENS, **kwargs):
    """The text is plain's with each kind of drafter, and tau is what it must be."""
    sequence = plain(target, prompt, new_tokens, **kwargs)
    for kind, drafter in drafters_of(target, sequence):
        with record_acceptance() as stats:
            out = plain(target, prompt, new_tokens, assistant_model=drafter, **kwargs)
        assert torch.equal(out, sequence), kind
        expected = {"oracle": BLOCK_SIZE, "wrong": 1}.get(kind, stats.acceptance_length)
        assert stats.acceptance_length == expected, kind
    return sequence


def prompts_of(name):
    """Where attention looks back only so far: prompts shorter than that, about as long, and longer."""
    return (3, WINDOW - 1, 30) if FAMILIES[name].kind in (SLIDING, CHUNKED) else (7,)


# -- served ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SERVED)
def test_text_and_tau(name, tmp_path):
    target = tiny_target(name)
    randomize(tiny_drafter(target)).save_pretrained(tmp_path)
    drafter = RetraceDrafter.from_pretrained(tmp_path)

    def kinds(target, sequence):
        yield "real", drafter
        yield from drafters(target, sequence, THREE_KINDS[1:])

    for length in prompts_of(name):
        sequence = check_equal(target, prompt_of(length), kinds)
        assert sequence[0, length:].unique().numel() > 3  # text that says something


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("length", [1, 2, WINDOW, 50])
def test_text_and_tau_at_more_lengths(name, length):
    target = tiny_target(name)
    check_equal(target, prompt_of(length), new_tokens=1 + 8 * BLOCK_SIZE)


@pytest.mark.parametrize("name", SERVED)
@torch.no_grad()
def test_head_taps_and_rope(name):
    """The drafter's logits are the target's own on the same states, its taps the outputs of the named layers, its
    rotation that of the target's full attention."""
    target = tiny_target(name)
    drafter = tiny_drafter(target)
    count = target.config.get_text_config(decoder=True).num_hidden_layers
    ids, seen = prompt_of(9), {}
    layers = next(m for m in target.get_decoder().modules() if isinstance(m, nn.ModuleList) and len(m) == count)
    for i in drafter.config.target_layer_ids:
        layers[i].register_forward_hook(
            lambda module, args, out, i=i: seen.update({i: out[0] if isinstance(out, tuple) else out})
        )
    outputs = target(ids, output_hidden_states=[*(i + 1 for i in drafter.config.target_layer_ids), count])
    for i in drafter.config.target_layer_ids:
        assert torch.equal(outputs.hidden_states[i + 1], seen[i])
    assert_close(draft_logits(target, outputs.hidden_states[count]), outputs.logits, rtol=1e-5, atol=1e-5)
    check_head(target)
    frequencies = [
        buffer
        for key, buffer in target.get_decoder().named_buffers()
        if key.endswith("inv_freq") and "sliding" not in key and "original" not in key
    ]
    if FAMILIES[name].kind != HYBRID:  # some of which have no positions beside the recurrence
        assert bool(frequencies) == (FAMILIES[name].kind not in (LEARNED, ALIBI, RECURRENT))
    for frequency in frequencies:
        assert_close(drafter.rotary_emb.inv_freq, frequency)


@pytest.mark.parametrize("name", SERVED)
@torch.no_grad()
def test_training_verifies_as_decoding_does(name):
    target, untrainable = tiny_target(name), FAMILIES[name].untrainable
    if untrainable:
        with pytest.raises(ValueError, match=untrainable):
            rollout.check_verification(target)
        return
    rollout.check_verification(target)
    ids, drafted = prompt_of(50), torch.randint(0, 190, (1, 2, BLOCK_SIZE - 1))
    anchors = torch.tensor([[8, 40]])  # one before the windows slide, one behind
    blocks = rollout.Blocks(anchors, torch.ones_like(anchors, dtype=torch.bool))
    clean = rollout.read_clean_text(target, ids, [1, 3], room=2 * BLOCK_SIZE)
    states = rollout.verify_blocks(target, clean.cache, ids, drafted, blocks)
    for n, anchor in enumerate(anchors[0].tolist()):
        whole = torch.cat([ids[:, : anchor + 1], drafted[:, n]], dim=1)
        expected = target.get_decoder()(whole, use_cache=False).last_hidden_state[:, anchor:]
        if (states[:, n] - expected).norm() > 1e-5 * expected.norm():  # a scan that is rounded worse
            assert FAMILIES[name].kind == HYBRID and is_the_pass_over(target, whole, states[0, n])


def test_the_trainer_asks_before_it_trains(tmp_path):
    target = tiny_target("bloom")
    args = {"use_cpu": True, "report_to": [], "output_dir": str(tmp_path)}
    with pytest.raises(ValueError, match=FAMILIES["bloom"].untrainable):
        RetraceTrainer(tiny_drafter(target), target, RetraceTrainingArguments(num_carried_rounds=1, **args))
    RetraceTrainer(tiny_drafter(target, "gated"), target, RetraceTrainingArguments(num_carried_rounds=1, **args))
    RetraceTrainer(tiny_drafter(target), target, RetraceTrainingArguments(num_carried_rounds=0, **args))


def test_a_target_that_ignores_positions_is_not_trained(monkeypatch):
    target = tiny_target("llama")
    forward = type(target.model).forward
    monkeypatch.setattr(
        type(target.model), "forward", lambda self, *args, position_ids=None, **kwargs: forward(self, *args, **kwargs)
    )
    with pytest.raises(ValueError, match="LlamaForCausalLM gives other states.*gated"):
        rollout.check_verification(target)


@pytest.mark.parametrize("name", ["phi", "gpt2", "opt", "bloom", "gemma3_text", "mistral_window", "llama4_text"])
def test_left_padding(name):
    target, prompt = tiny_target(name), prompt_of(9)
    padded = torch.cat([torch.zeros(1, 6, dtype=torch.long), prompt], dim=1)
    mask = (torch.arange(15) >= 6).long()[None]
    sequence = plain(target, padded, NEW_TOKENS, attention_mask=mask)
    # BLOOM counts its padding, so the scripted drafters' places are wrong there.
    for kind, drafter in drafters(target, sequence[:, 6:]):
        with record_acceptance() as stats:
            out = plain(target, padded, NEW_TOKENS, attention_mask=mask, assistant_model=drafter)
        assert torch.equal(out, sequence), kind
        if kind == "oracle" and name != "bloom":
            assert stats.acceptance_length == BLOCK_SIZE


ROPES = {
    "dynamic": {"factor": 4.0},
    "longrope": {
        "factor": 4.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 40,
    },
}


def growing_target(kind, family="llama"):
    """A target whose rotary frequencies change above 40 tokens."""
    rope = {"rope_type": kind, "rope_theta": 1e4, **ROPES[kind]}
    length = {"max_position_embeddings": 40 if kind == "dynamic" else 160}
    if family == "phi3":
        length["original_max_position_embeddings"] = 40
    return tiny_target(family, rope_parameters=rope, **length)


GROWING = [("dynamic", "llama"), ("longrope", "llama"), ("longrope", "phi3")]


@pytest.mark.parametrize("kind, family", GROWING)
def test_rotary_frequencies_that_change_with_the_length(kind, family):
    """A block is served where all of its tokens have the same ones, and refused where they would not."""
    target, ran = growing_target(kind, family), []
    check_equal(target, prompt_of(40 - NEW_TOKENS))
    drafter, cache = randomize(tiny_drafter(target)), DynamicCache(config=target.config)
    # The last token is never read.
    assert torch.equal(plain(target, prompt_of(20), 21), plain(target, prompt_of(20), 21, assistant_model=drafter))
    first = plain(target, prompt_of(20), 20, cache=cache)
    text = torch.cat([first, prompt_of(7, seed=9)], dim=1)
    handle = target.register_forward_pre_hook(lambda *_: ran.append(1))
    with pytest.raises(ValueError, match=f"{kind}' changes .* above 40 tokens.* to 41: .*tokens to 21 at most"):
        plain(target, prompt_of(20), 22, assistant_model=drafter)
    with pytest.raises(ValueError, match=f"{kind}' changes .* above 40 tokens.*generate without assistant_model"):
        plain(target, text, 10, assistant_model=drafter, cache=cache)
    padded, mask = torch.cat([torch.zeros(1, 9, dtype=torch.long), prompt_of(20)], dim=1), torch.ones(1, 29)
    mask[:, :9] = 0
    with pytest.raises(ValueError, match="max_new_tokens to 21 at most"):
        plain(target, padded, 22, assistant_model=drafter, attention_mask=mask.long())
    # Padding in the cache is no text: this one still stands below the change.
    warm = DynamicCache(config=target.config)
    padded, mask = torch.cat([padded[:, :1].repeat(1, 30), prompt_of(15)], dim=1), torch.ones(1, 45)
    mask[:, :30] = 0
    filled = plain(target, padded, 3, attention_mask=mask.long(), cache=warm)
    ran.clear()
    with pytest.raises(ValueError, match=f"{kind}' changes"):
        longer = torch.cat([mask, torch.ones(1, 3)], dim=1).long()
        plain(target, filled, 60, assistant_model=drafter, attention_mask=longer, cache=warm)
    assert not ran
    handle.remove()
    if kind == "longrope":  # above the change it is as any other
        check_equal(target, prompt_of(47))
        check_equal(target, prompt_of(100), prefill_chunk_size=45)
    else:
        with pytest.raises(ValueError, match=f"{kind}' changes"):
            plain(target, text, 10, assistant_model=drafter)


def test_keys_from_below_the_change_are_not_made_anew_above_it():
    """Turn 1 drafts below the length, turn 2 crosses it without a drafter, turn 3 drafts again: the cache's last rows
    were rotated as those of a short text."""
    target = growing_target("longrope")
    drafter = randomize(tiny_drafter(target))
    texts = []
    for assistant in ({}, {"assistant_model": drafter}):
        cache, text = DynamicCache(config=target.config), prompt_of(20)
        for new_tokens, options in ((15, assistant), (20, {}), (15, assistant)):
            text = plain(target, text, new_tokens, cache=cache, **options)
            text = torch.cat([text, prompt_of(3, seed=new_tokens)], dim=1)
        texts.append(text)
    assert torch.equal(*texts)


# -- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_by_name_before_it_has_run(name):
    target, ran = tiny_target(name), []
    # A target that may be able to is tried on tokens of the package's own, once; the prompt never runs.
    target.get_input_embeddings().register_forward_pre_hook(
        lambda module, args: ran.append(1) if torch.equal(args[0], prompt_of(7)) else None
    )
    message = f"{type(target).__name__}.*{FAMILIES[name].refused}"
    with pytest.raises(ValueError, match=message):
        RetraceDrafter.from_target(target, mask_token_id=MASK_TOKEN_ID, num_hidden_layers=2)
    with pytest.raises(ValueError, match=message):
        plain(target, prompt_of(7), NEW_TOKENS, assistant_model=tiny_drafter(tiny_target()))
    assert not ran


@pytest.mark.parametrize("name", ["gpt2", "gemma3_text", "mixtral", "phi3"])
def test_draft_layers_do_not_start_from_layers_of_another_shape(name):
    target = tiny_target(name)
    with pytest.raises(ValueError, match="Llama / Qwen shape.*init_from_target=False"):
        tiny_drafter(target, init_from_target=True)


# -- heads and vocabularies ------------------------------------------------------------------------------------------


class IntegerHead(nn.Module):
    """Stands for a quantised linear: integer codes and scales, no `weight`, a forward of its own."""

    def __init__(self, linear):
        super().__init__()
        scale = linear.weight.detach().abs().amax(dim=1, keepdim=True) / 127
        self.register_buffer("codes", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, hidden):
        return hidden @ (self.codes * self.scale).T


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_tied_untied_and_biased_heads(tied, bias):
    target = tiny_target("llama", tie_word_embeddings=tied)
    if bias:
        head = nn.Linear(32, VOCAB_SIZE)
        head.weight = target.lm_head.weight
        target.lm_head = head
    assert (target.lm_head.weight is target.model.embed_tokens.weight) == tied
    check_equal(target, prompt_of(7))


def test_a_quantised_head():
    target = tiny_target("llama")
    target.lm_head = IntegerHead(target.lm_head)
    check_equal(target, prompt_of(7))
    check_head(target)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_head_quantised_by_torch():
    """Its weight is a method, and its rounding depends on the rows of a pass: plain's text up to that."""
    target = tiny_target("llama")
    target.lm_head = torch.ao.nn.quantized.dynamic.Linear.from_float(with_observer(target.lm_head))
    hidden = torch.randn(1, BLOCK_SIZE - 1, 32)
    assert torch.equal(draft_logits(target, hidden), target.lm_head(hidden))
    drafter = randomize(tiny_drafter(target))
    assert plain(target, prompt_of(7), NEW_TOKENS, assistant_model=drafter).shape == (1, 7 + NEW_TOKENS)


def with_observer(linear):
    linear.qconfig = torch.ao.quantization.default_dynamic_qconfig
    return linear


@pytest.mark.parametrize("size", [{"new_num_tokens": 203}, {"pad_to_multiple_of": 64}])
@pytest.mark.parametrize("tied", [True, False])
def test_a_vocabulary_that_grew(size, tied, caplog):
    """Before the drafter was made, and after."""
    target = tiny_target("llama", tie_word_embeddings=tied)
    before = randomize(tiny_drafter(target))
    target.resize_token_embeddings(**size, mean_resizing=False)
    rows = target.get_input_embeddings().weight.shape[0]
    assert rows > VOCAB_SIZE and tiny_drafter(target).config.vocab_size == rows
    sequence = check_equal(target, prompt_of(7))
    with caplog.at_level("WARNING", logger="retrace_hf"):
        assert torch.equal(plain(target, prompt_of(7), NEW_TOKENS, assistant_model=before), sequence)


# -- wrapped targets -------------------------------------------------------------------------------------------------


def lora(target, **config):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(4)
    config = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, "lora_alpha": 32, **config}
    return get_peft_model(target, LoraConfig(**config)).eval()


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"target_modules": ["q_proj", "lm_head"]},
        {"modules_to_save": ["embed_tokens", "lm_head"]},
        {"trainable_token_indices": [5, 6]},
    ],
    ids=lambda config: next(iter(config), "layers"),
)
def test_adapters_on_the_target(config):
    """Active, switched off, and merged: in each state the text is that state's own plain text."""
    base = plain(tiny_target("llama", tie_word_embeddings=False), prompt_of(7), NEW_TOKENS)
    target = lora(tiny_target("llama", tie_word_embeddings=False), **config)
    adapted = check_equal(target, prompt_of(7))
    assert not torch.equal(adapted, base)
    with target.disable_adapter():
        assert torch.equal(check_equal(target, prompt_of(7)), base)
    assert torch.equal(check_equal(target.merge_and_unload(), prompt_of(7)), adapted)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("kind", ["PromptTuning", "PrefixTuning"])
def test_virtual_tokens_are_refused(kind):
    import peft

    config = getattr(peft, f"{kind}Config")(task_type="CAUSAL_LM", num_virtual_tokens=4)
    target = peft.get_peft_model(tiny_target("llama"), config)
    with pytest.raises(ValueError, match=f"{kind} puts virtual tokens before the prompt.*LoRA"):
        plain(target, prompt_of(7), NEW_TOKENS, assistant_model=tiny_drafter(tiny_target("llama")))


@pytest.mark.parametrize("how", ["wrapped", "forward", pytest.param("in place", marks=pytest.mark.slow)])
def test_compiled_targets(how):
    target = tiny_target("llama", num_hidden_layers=2)
    expected = plain(target, prompt_of(7), 6)
    kinds = [
        randomize(tiny_drafter(target, block_size=3, target_layer_ids=[0])),
        oracle(tiny_drafter(target, block_size=3, target_layer_ids=[0]), target, expected),
    ]
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    if how == "wrapped":
        target = torch.compile(target, backend=backend)
        assert tiny_drafter(target, target_layer_ids=[0]).config.hidden_size == 32
    elif how == "forward":
        target.forward = torch.compile(target.forward, backend=backend)
    else:
        target.compile(backend=backend)
    for drafter in kinds:
        assert torch.equal(plain(target, prompt_of(7), 6, assistant_model=drafter), expected)
    # generate() of a wrapped model calls what it wraps, with a drafter and without.
    assert bool(graphs) == (how != "wrapped")


MAPS = {
    "all on the cpu": {"": "cpu"},
    "layers on disk": {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    | {f"model.layers.{i}": "disk" if i in (1, 2, 5) else "cpu" for i in range(6)},
    "head on disk": {"model": "cpu", "lm_head": "disk"},
}


@pytest.mark.parametrize("where", MAPS)
def test_targets_split_by_device_map(where, tmp_path):
    target = tiny_target("llama", tie_word_embeddings=False)
    sequence = plain(target, prompt_of(7), NEW_TOKENS)
    kinds = list(drafters(target, sequence))
    split = dispatch_model(target, MAPS[where], main_device="cpu", offload_dir=tmp_path, force_hooks=True)
    assert torch.equal(check_equal(split, prompt_of(7), lambda *_: kinds), sequence)


@pytest.mark.parametrize("offload", ["cpu", "disk"])
def test_a_target_whose_embedding_is_offloaded_says_so(offload, tmp_path):
    target = tiny_target("llama")
    drafter = randomize(tiny_drafter(target))
    moved = cpu_offload(target, "cpu") if offload == "cpu" else disk_offload(target, tmp_path, "cpu")
    with pytest.raises(ValueError, match="LlamaForCausalLM are offloaded.*keep the embedding on a device"):
        plain(moved, prompt_of(7), NEW_TOKENS, assistant_model=drafter)


# -- images ----------------------------------------------------------------------------------------------------------


def image_inputs(name):
    """A prompt with one tiny image in it, as the family's processor would give it."""
    torch.manual_seed(5)
    text = prompt_of(10)
    tokens = {"qwen2_5_vl": [192, *[190] * 4, 193], "qwen3_vl": [192, *[190] * 4, 193]}
    tokens |= {"gemma3": [191, *[190] * 4, 192], "llava": [190] * 16}
    image = torch.tensor([tokens[name]])
    ids = torch.cat([text[:, :4], image, text[:, 4:]], dim=1)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if name in ("qwen2_5_vl", "qwen3_vl"):
        inputs["pixel_values"] = torch.randn(16, 3 * 1 * 4 * 4)
        inputs["image_grid_thw"] = torch.tensor([[1, 4, 4]])
        inputs["mm_token_type_ids"] = (ids == 190).long()
    else:
        inputs["pixel_values"] = torch.randn(1, 3, 16, 16)
        if name == "gemma3":
            inputs["token_type_ids"] = (ids == 190).long()
    return inputs


@pytest.mark.parametrize("name", [name for name, row in FAMILIES.items() if row.kind == IMAGE])
def test_prompts_with_an_image(name):
    """Equal to plain, and the image matters."""
    target, inputs = tiny_target(name), image_inputs(name)
    ids = inputs.pop("input_ids")
    if name == "gemma3":
        randomize(target.model.multi_modal_projector)  # it starts at zero
    sequence = plain(target, ids, NEW_TOKENS, **inputs)
    other = inputs | {"pixel_values": 3 * inputs["pixel_values"]}
    assert not torch.equal(plain(target, ids, NEW_TOKENS, **other), sequence)
    of_whole = dict(inputs)
    for key in ("attention_mask", "mm_token_type_ids", "token_type_ids"):
        if key in inputs:
            fill = int(key == "attention_mask")
            of_whole[key] = nn.functional.pad(inputs[key], (0, NEW_TOKENS), value=fill)

    assert torch.equal(check_equal(target, ids, functools.partial(drafters, **of_whole), **inputs), sequence)


# -- the table -------------------------------------------------------------------------------------------------------


def test_the_readme_holds_the_table():
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    section = re.search(r"^## Targets\n(.*?)(?=^## )", readme, flags=re.MULTILINE | re.DOTALL)[1]
    assert readme_table() in section
