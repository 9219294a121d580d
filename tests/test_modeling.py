"""The drafter alone: its forward against a naive DFlash, its shape from a target, what it saves and loads."""

import copy
import json
import subprocess
import sys

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoConfig, AutoModel, T5Config, T5ForConditionalGeneration
from transformers.cache_utils import DFlashCache
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from retrace_hf import RejectedTrajectory, RetraceConfig, RetraceDrafter
from retrace_hf.context import check_target_layer_ids, default_target_layer_ids, gather_context_states

from .fixtures import BLOCK_SIZE, MASK_TOKEN_ID, randomize, tiny_drafter, tiny_target


@pytest.fixture(scope="module")
def target():
    return tiny_target("qwen3")


@pytest.fixture()
def drafter(target):
    return randomize(tiny_drafter(target))


def inputs_for(drafter, context=11, seed=0, batch=1):
    generator = torch.Generator().manual_seed(seed)
    size, taps = drafter.config.hidden_size, len(drafter.config.target_layer_ids)
    return {
        "noise_embeds": torch.randn(batch, BLOCK_SIZE, size, generator=generator),
        "context_hidden_states": torch.randn(batch, context, taps * size, generator=generator),
    }


def signal_for(drafter, seed=1):
    generator = torch.Generator().manual_seed(seed)
    draft, target = torch.randn(2, 1, BLOCK_SIZE, drafter.config.hidden_size, generator=generator)
    valid = torch.tensor([[False, True, True, True, False, False, False, False]])
    return RejectedTrajectory(draft, target, valid)


def naive_dflash(drafter, noise_embeds, context_hidden_states):
    """The z-lab forward written out from the paper, head by head, for one sequence without a cache."""

    def rms(x, weight):
        return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + config.rms_norm_eps)

    def rope(x, position):
        half = config.head_dim // 2
        theta = config.rope_parameters["rope_theta"]
        angles = torch.tensor([position / theta ** (2 * i / config.head_dim) for i in range(half)]).to(x)
        a, b = x[:half], x[half:]
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()])

    config, w = drafter.config, drafter.state_dict()
    context = rms(context_hidden_states[0] @ w["fc.weight"].T, w["hidden_norm.weight"])
    x, n, d = noise_embeds[0], context_hidden_states.shape[1], config.head_dim
    group = config.num_attention_heads // config.num_key_value_heads
    for i in range(config.num_hidden_layers):
        p = f"layers.{i}."
        h = rms(x, w[p + "input_layernorm.weight"])
        both = torch.cat([context, h])
        rows = []
        for slot in range(len(h)):
            heads = []
            for head in range(config.num_attention_heads):
                q = w[p + "self_attn.q_proj.weight"][head * d : (head + 1) * d] @ h[slot]
                q = rope(rms(q, w[p + "self_attn.q_norm.weight"]), n + slot)
                kv = slice(head // group * d, (head // group + 1) * d)
                k = torch.stack(
                    [
                        rope(rms(w[p + "self_attn.k_proj.weight"][kv] @ y, w[p + "self_attn.k_norm.weight"]), t)
                        for t, y in enumerate(both)
                    ]
                )
                v = both @ w[p + "self_attn.v_proj.weight"][kv].T
                heads.append(torch.softmax(k @ q / d**0.5, dim=0) @ v)  # no causal mask in the block
            rows.append(w[p + "self_attn.o_proj.weight"] @ torch.cat(heads))
        x = x + torch.stack(rows)
        h = rms(x, w[p + "post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(h @ w[p + "mlp.gate_proj.weight"].T)
        x = x + (gate * (h @ w[p + "mlp.up_proj.weight"].T)) @ w[p + "mlp.down_proj.weight"].T
    return rms(x, w["norm.weight"])


# -- forward ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_forward_equals_naive_dflash(drafter):
    drafter.double()
    inputs = {name: states.double() for name, states in inputs_for(drafter).items()}
    expected = naive_dflash(drafter, **inputs)
    assert_close(drafter(**inputs).last_hidden_state[0], expected, rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_cache_in_pieces_equals_all_at_once(drafter):
    inputs = inputs_for(drafter, context=11)
    whole = drafter(**inputs).last_hidden_state
    cache = DFlashCache(config=drafter.config)
    cache.activate_past_recording()
    context = inputs["context_hidden_states"]
    for first, last in ((0, 5), (5, 6), (6, 11)):
        if first:
            cache.crop(-BLOCK_SIZE)
        cache.set_previous_accepted_tokens(last - first)
        out = drafter(
            noise_embeds=inputs["noise_embeds"],
            context_hidden_states=context[:, first:last],
            position_ids=torch.arange(first, last + BLOCK_SIZE)[None],
            cache=cache,
        ).last_hidden_state
    assert_close(out, whole, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("padding", [0, 3])
def test_a_context_window_hides_what_lies_before_it(target, padding):
    """Whoever calls: transformers' own DFlash generator hands over every row and drops none."""
    drafter = tiny_drafter(target, context_window=4)
    inputs = inputs_for(drafter, context=11)
    near = {**inputs, "context_hidden_states": inputs["context_hidden_states"][:, -4:]}
    positions = torch.arange(7, 11 + BLOCK_SIZE)[None]
    expected = drafter(**near, position_ids=positions).last_hidden_state
    mask = torch.tensor([[0] * padding + [1] * (11 - padding + BLOCK_SIZE)]) if padding else None
    assert_close(drafter(**inputs, attention_mask=mask).last_hidden_state, expected, rtol=1e-5, atol=1e-5)
    cache = DFlashCache(config=drafter.config)
    cache.set_previous_accepted_tokens(9)
    first = {**inputs, "context_hidden_states": inputs["context_hidden_states"][:, :9]}
    drafter(**first, cache=cache)
    cache.crop(-BLOCK_SIZE)
    cache.set_previous_accepted_tokens(2)
    rest = {**inputs, "context_hidden_states": inputs["context_hidden_states"][:, 9:]}
    out = drafter(**rest, position_ids=torch.arange(9, 11 + BLOCK_SIZE)[None], cache=cache).last_hidden_state
    assert_close(out, expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_two_dimensional_mask_hides_padding(drafter):
    inputs = inputs_for(drafter, context=6)
    alone = drafter(**inputs).last_hidden_state
    padded = {
        **inputs,
        "context_hidden_states": torch.cat([torch.randn(1, 3, 64), inputs["context_hidden_states"]], 1),
    }
    mask = torch.tensor([[0] * 3 + [1] * (6 + BLOCK_SIZE)])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = DFlashCache(config=drafter.config)
    cache.set_previous_accepted_tokens(9)
    out = drafter(**padded, attention_mask=mask, position_ids=positions, cache=cache).last_hidden_state
    assert_close(out, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@torch.no_grad()
def test_attention_implementations_agree(drafter, attention):
    inputs = inputs_for(drafter)
    expected = naive_dflash(drafter, **inputs)
    drafter.set_attn_implementation(attention)
    assert_close(drafter(**inputs).last_hidden_state[0], expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_conditioning_is_read_in_each_forward(drafter):
    inputs, signal = inputs_for(drafter), signal_for(drafter)
    without = drafter(**inputs).last_hidden_state
    with_signal = drafter(**inputs, trajectory=signal).last_hidden_state
    assert not torch.allclose(with_signal, without)
    drafter.config.conditioning = "none"
    assert torch.equal(drafter(**inputs, trajectory=signal).last_hidden_state, without)
    drafter.config.conditioning = "overwrite"
    assert not torch.allclose(drafter(**inputs, trajectory=signal).last_hidden_state, without)


@torch.no_grad()
def test_zero_value_matrix_is_no_conditioning(target):
    drafter = tiny_drafter(target)
    assert not drafter.trajectory.value.weight.any()
    assert drafter.trajectory.gate.weight.any()
    m, u = torch.randn(2, drafter.config.hidden_size)
    assert torch.equal(drafter.trajectory.correction(torch.cat([m, u])), u)
    inputs = inputs_for(drafter)
    conditioned = drafter(**inputs, trajectory=signal_for(drafter)).last_hidden_state
    assert torch.equal(conditioned, drafter(**inputs).last_hidden_state)


def test_conditioning_without_its_module_says_so(target):
    drafter = tiny_drafter(target, conditioning="none")
    drafter.config.conditioning = "corrected"
    with pytest.raises(ValueError, match="trajectory.correction.*from_dflash"):
        drafter(**inputs_for(drafter), trajectory=signal_for(drafter))


# -- shape from a target ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layers, taps, expected",
    [(36, 5, [1, 9, 17, 25, 33]), (36, 1, [18]), (30, 3, [1, 14, 27]), (30, 5, [1, 8, 14, 20, 27]), (5, 5, [1, 2])],
)
def test_default_taps_follow_the_published_rule(layers, taps, expected):
    assert default_target_layer_ids(layers, taps) == expected


@pytest.mark.parametrize(
    "ids, fault",
    [([], "empty"), ([-1], r"\[-1\]"), ([5], r"\[5\]"), ([6], r"\[6\]"), ([2, 1], "ascending"), ([1, 1], "ascending")],
)
def test_taps_that_cannot_be(ids, fault):
    with pytest.raises(ValueError, match=fault):
        check_target_layer_ids(ids, 6)


@torch.no_grad()
def test_taps_are_layer_outputs():
    """Perturb what target layer 3 computes: taps from layer 3 on change, the one before does not."""
    target = tiny_target("qwen3")
    ids, taps = torch.arange(3, 13)[None], [2, 3, 4]

    def features():
        return gather_context_states(target(ids, output_hidden_states=[i + 1 for i in taps]).hidden_states, taps)

    before = features().chunk(3, dim=-1)
    target.get_decoder().layers[3].mlp.down_proj.weight.mul_(2)
    after = features().chunk(3, dim=-1)
    assert [torch.equal(a, b) for a, b in zip(before, after)] == [True, False, False]


def test_gather_names_layers_that_were_not_captured():
    with pytest.raises(ValueError, match=r"layers \[1\].*output_hidden_states"):
        gather_context_states([torch.ones(1, 1, 1), torch.ones(1, 1, 1), None], [0, 1])


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma2", "mistral", "granite", "cohere"])
def test_from_target_takes_the_targets_shape(family):
    target = tiny_target(family)
    config = tiny_drafter(target).config
    text = target.config
    for name in (
        "hidden_size",
        "vocab_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "eos_token_id",
    ):
        assert getattr(config, name) == getattr(text, name)
    assert config.num_target_layers == text.num_hidden_layers
    assert config.rope_parameters["rope_theta"] == text.rope_parameters["rope_theta"]


def test_rope_of_the_full_attention_layers_is_taken():
    target = tiny_target("qwen3")
    target.config.rope_parameters = {
        "full_attention": {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [1, 1, 2]},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    rope = tiny_drafter(target).config.rope_parameters
    assert rope == {"rope_type": "default", "rope_theta": 5e5}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        {"rope_type": "dynamic", "factor": 4.0},
        {
            "rope_type": "longrope",
            "long_factor": [4.0, 3.0, 2.0, 2.0],
            "short_factor": [1.0, 1.0, 1.0, 2.0],
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rotation_is_qwen3s_and_keeps_nothing_of_a_longer_text(target, rope):
    drafter = tiny_drafter(target, rope_parameters={"rope_theta": 1e4, **rope}, max_position_embeddings=64)
    rotary, x = drafter.rotary_emb, torch.ones(1, 3, 32)
    before = {name: id(value) for name, value in [*vars(rotary).items(), *rotary._buffers.items()]}
    values = [buffer.clone() for buffer in rotary.buffers()]
    for position in (10, 100, 70, 20):  # what Qwen3's makes of 70 depends on the 100 before it
        positions = torch.arange(position, position + 3)[None]
        for mine, its in zip(rotary(x, positions), Qwen3RotaryEmbedding(drafter.config)(x, positions)):
            assert_close(mine, its, rtol=1e-4, atol=1e-4)
    assert before == {name: id(value) for name, value in [*vars(rotary).items(), *rotary._buffers.items()]}
    assert all(torch.equal(*pair) for pair in zip(rotary.buffers(), values, strict=True))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 1e7},
        {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128},
    ],
)
def test_rope_agrees_with_the_config_before_and_after_reload(target, rope, tmp_path):
    drafter = tiny_drafter(target, rope_parameters=rope)
    drafter.save_pretrained(tmp_path)
    reloaded = RetraceDrafter.from_pretrained(tmp_path)
    rotary = int(drafter.config.head_dim * rope.get("partial_rotary_factor", 1.0))
    assert drafter.rotary_emb.inv_freq.shape == (rotary // 2,)
    assert torch.equal(drafter.rotary_emb.inv_freq, reloaded.rotary_emb.inv_freq)
    if rope["rope_type"] == "default":
        expected = rope["rope_theta"] ** (-torch.arange(0, rotary, 2).float() / rotary)
        assert_close(drafter.rotary_emb.inv_freq, expected)
    inputs = inputs_for(drafter)
    assert torch.equal(drafter(**inputs).last_hidden_state, reloaded(**inputs).last_hidden_state)


@pytest.mark.parametrize("rope_type", ["default", "linear", "yarn"])
def test_rotary_frequencies_are_never_rounded(target, rope_type, tmp_path):
    """Published DFlashs are bfloat16; opened as the start of a ReTrace, cast, trained in float32: the frequencies are
    those that the saved drafter will have."""
    rope = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
    drafter = tiny_drafter(target, "none", rope_parameters=rope)
    exact = drafter.rotary_emb.inv_freq.clone()
    drafter.to(torch.bfloat16).save_pretrained(tmp_path)
    loaded, opened = RetraceDrafter.from_pretrained(tmp_path), RetraceDrafter.from_dflash(tmp_path)
    assert opened.dtype == loaded.dtype == torch.bfloat16
    for one in (drafter, loaded, opened, copy.deepcopy(opened).float(), drafter.half(), drafter.to("cpu")):
        assert one.rotary_emb.inv_freq.dtype == torch.float32
        assert torch.equal(one.rotary_emb.inv_freq, exact)
        assert torch.equal(one.rotary_emb.original_inv_freq, exact)
    assert drafter.to("meta").rotary_emb.inv_freq.is_meta


def test_what_from_target_refuses(target):
    with pytest.raises(ValueError, match="mask_token_id is required"):
        RetraceDrafter.from_target(target)
    with pytest.raises(ValueError, match="mask_token_id 200 is outside the target's 200"):
        RetraceDrafter.from_target(target, mask_token_id=200)
    with pytest.raises(ValueError, match="2 layers.*target_layer_ids"):
        RetraceDrafter.from_target(tiny_target("llama", num_hidden_layers=2), mask_token_id=1)
    t5 = T5ForConditionalGeneration(
        T5Config(vocab_size=32, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0)
    )
    with pytest.raises(ValueError, match="T5ForConditionalGeneration is an encoder-decoder"):
        RetraceDrafter.from_target(t5, mask_token_id=1)
    with pytest.raises(ValueError, match="no LM head"):
        RetraceDrafter.from_target(target.model, mask_token_id=1)


@torch.no_grad()
def test_draft_layers_may_start_from_the_targets(target):
    drafter = tiny_drafter(target, init_from_target=True, target_layer_ids=[1, 3])
    assert torch.equal(drafter.layers[0].mlp.up_proj.weight, target.model.layers[4].mlp.up_proj.weight)
    assert torch.equal(drafter.layers[1].self_attn.q_proj.weight, target.model.layers[5].self_attn.q_proj.weight)
    # The context is the last tap as the layer behind it sees it.
    tap = torch.randn(1, 4, target.config.hidden_size)
    context = drafter.hidden_norm(drafter.fc(torch.cat([torch.randn_like(tap), tap], dim=-1)))
    assert_close(context, target.model.layers[4].input_layernorm(tap))
    with pytest.raises(ValueError, match="init_from_target=False"):
        RetraceDrafter.from_target(tiny_target("cohere"), mask_token_id=1, num_hidden_layers=2, init_from_target=True)


@pytest.mark.parametrize(
    "fields, fault",
    [
        ({"block_size": 1}, "block_size is 1"),
        ({"conditioning": "maybe"}, "conditioning is 'maybe'"),
        ({"context_fusion": "both"}, "context_fusion is 'both'"),
        ({"context_fusion": "kv"}, "needs target_kv_layer_ids, target_num_key_value_heads, target_head_dim"),
        ({"target_kv_layer_ids": [1]}, "'shared' reads no keys and values"),
        ({"context_window": 0}, "context_window is 0"),
        ({"mask_token_id": 999, "vocab_size": 200}, "mask_token_id 999"),
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, "multiple"),
        ({"layer_types": ["sliding_attention"], "num_hidden_layers": 1}, "full_attention"),
    ],
)
def test_configs_that_cannot_be(fields, fault):
    with pytest.raises(ValueError, match=fault):
        RetraceConfig(**fields)


# -- save and load ---------------------------------------------------------------------------------------------------

GENERATE = """
import sys, torch, retrace_hf
from transformers import AutoModelForCausalLM
target = AutoModelForCausalLM.from_pretrained(sys.argv[1])
drafter = retrace_hf.RetraceDrafter.from_pretrained(sys.argv[2])
with retrace_hf.record_acceptance() as stats:
    out = target.generate(torch.tensor([[5, 6, 7]]), assistant_model=drafter, max_new_tokens=40, do_sample=False)
weights = {name: float(w.double().sum()) for name, w in drafter.state_dict().items()}
print([out.tolist(), stats.accepted_per_round, sorted(weights.items())])
"""


def test_save_load_and_generate_in_fresh_processes(target, drafter, tmp_path):
    target.save_pretrained(tmp_path / "target")
    drafter.save_pretrained(tmp_path / "drafter")
    command = [sys.executable, "-c", GENERATE, str(tmp_path / "target"), str(tmp_path / "drafter")]
    first, second = (subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(2))
    assert first == second
    weights = {name: float(w.double().sum()) for name, w in drafter.state_dict().items()}
    assert first.strip().endswith(f"{sorted(weights.items())}]")


def test_auto_classes_and_dtype(drafter, tmp_path):
    drafter.save_pretrained(tmp_path)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), RetraceConfig)
    loaded = AutoModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert isinstance(loaded, RetraceDrafter) and loaded.dtype == torch.bfloat16
    for name, weight in RetraceDrafter.from_pretrained(tmp_path).state_dict().items():
        assert torch.equal(weight, drafter.state_dict()[name]), name


def test_half_precision_weights_load_as_the_config_says(drafter, tmp_path):
    """How drafters are shipped: fp16 weights, float32 in config.json."""
    drafter.half().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["dtype"] = "float32"
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = RetraceDrafter.from_pretrained(tmp_path)
    assert loaded.dtype == torch.float32
    assert torch.equal(loaded.fc.weight, drafter.fc.weight.float())


@pytest.mark.parametrize("change, word", [("missing", "missing"), ("unknown", "unknown"), ("shape", "shape")])
def test_a_checkpoint_must_fit_key_for_key(drafter, tmp_path, change, word):
    state = drafter.state_dict()
    if change == "missing":
        state.pop("layers.1.mlp.up_proj.weight")
    elif change == "unknown":
        state["layers.9.extra"] = torch.ones(1)
    else:
        state["fc.weight"] = torch.ones(3, 3)
    drafter.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ValueError, match=word):
        RetraceDrafter.from_pretrained(tmp_path)


def test_from_pretrained_never_adds_a_module(target, tmp_path):
    tiny_drafter(target, conditioning="none").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="from_dflash"):
        RetraceDrafter.from_pretrained(tmp_path, conditioning="corrected")
    assert MASK_TOKEN_ID == RetraceDrafter.from_pretrained(tmp_path).config.mask_token_id


def test_what_is_no_drafter_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for path in ("model_cards/misspelt", str(tmp_path / "nowhere")):
        with pytest.raises(OSError, match=f"There is no drafter in {path}: it is no folder with a config.json"):
            RetraceDrafter.from_pretrained(path)
    (tmp_path / "empty").mkdir()
    with pytest.raises((OSError, ValueError), match="no config.json|There is no drafter in"):
        RetraceDrafter.from_pretrained(tmp_path / "empty")
    tiny_target().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="model_type 'qwen3', not a retrace drafter"):
        RetraceDrafter.from_pretrained(tmp_path)


@pytest.mark.parametrize("axis", ["conditioning", "proposal", "context_fusion"])
def test_a_misspelt_axis_is_named_at_load(tmp_path, axis):
    tiny_drafter(tiny_target()).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"{axis} is 'corected'"):
        RetraceDrafter.from_pretrained(tmp_path, **{axis: "corected"})
