"""DFlash checkpoints of other projects open key for key, and what is not one is refused by name."""

import json
import logging

import pytest
import torch
from safetensors.torch import save_file
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

from retrace_hf import RetraceDrafter

from .fixtures import plain, prompt_of, randomize, tiny_drafter, tiny_target


@pytest.fixture(scope="module")
def dflash():
    return randomize(tiny_drafter(tiny_target("qwen3"), conditioning="none"))


def write(folder, config, state):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({k: v.contiguous() for k, v in state.items()}, folder / "model.safetensors")
    return folder


def zlab_config(dflash, nested_block_size=False):
    c = dflash.config
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_target_layers": c.num_target_layers,
        "rope_theta": c.rope_parameters["rope_theta"],
        "rope_scaling": None,
        "layer_types": ["full_attention"] * c.num_hidden_layers,
        "dflash_config": {"mask_token_id": c.mask_token_id, "target_layer_ids": c.target_layer_ids},
    }
    for name in (
        "num_hidden_layers",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "vocab_size",
        "max_position_embeddings",
        "attention_bias",
        "hidden_act",
    ):
        config[name] = getattr(c, name)
    (config["dflash_config"] if nested_block_size else config)["block_size"] = c.block_size
    return config


def same_states(drafter, other, **kwargs):
    torch.manual_seed(0)
    noise, context = torch.randn(1, 8, 32), torch.randn(1, 5, 64)
    return torch.equal(
        drafter(noise_embeds=noise, context_hidden_states=context).last_hidden_state,
        other(noise_embeds=noise, context_hidden_states=context, **kwargs).last_hidden_state,
    )


@pytest.mark.parametrize("nested", [False, True])
@torch.no_grad()
def test_zlab_layout(dflash, tmp_path, nested):
    state = {**dflash.state_dict(), "rotary_emb.inv_freq": torch.ones(4)}  # older files hold the buffer
    folder = write(tmp_path / "zlab", zlab_config(dflash, nested), state)
    drafter = RetraceDrafter.from_dflash(folder)
    assert drafter.config.conditioning == "corrected"
    assert drafter.config.block_size == dflash.config.block_size
    assert same_states(drafter, dflash)


@torch.no_grad()
def test_native_layout(dflash, tmp_path):
    c = dflash.config
    native = MuseGlimmerAssistantModel(
        MuseGlimmerAssistantConfig(
            hidden_size=c.hidden_size,
            intermediate_size=c.intermediate_size,
            num_hidden_layers=c.num_hidden_layers,
            num_attention_heads=c.num_attention_heads,
            num_key_value_heads=c.num_key_value_heads,
            head_dim=c.head_dim,
            rms_norm_eps=c.rms_norm_eps,
            rope_parameters=c.rope_parameters,
            layer_types=["full_attention"] * c.num_hidden_layers,
            block_size=c.block_size,
            mask_token_id=c.mask_token_id,
            target_layer_ids=c.target_layer_ids,
        )
    ).eval()
    rename = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    native.load_state_dict({rename.get(k, k): v for k, v in dflash.state_dict().items()})
    native.save_pretrained(tmp_path)
    fields = {"num_target_layers": c.num_target_layers, "vocab_size": c.vocab_size}
    assert same_states(RetraceDrafter.from_dflash(tmp_path, **fields), native)
    assert same_states(RetraceDrafter.from_dflash(native, **fields), native)
    with pytest.raises(ValueError, match="num_target_layers"):
        RetraceDrafter.from_dflash(tmp_path)
    with pytest.raises(ValueError, match="no field 'contextfusion'; did you mean 'context_fusion'"):
        RetraceDrafter.from_dflash(tmp_path, **fields, contextfusion="hybrid")


@pytest.mark.parametrize("conditioning", ["none", "overwrite", "gated", "corrected"])
def test_our_own_dflash_opens_with_any_conditioning(dflash, tmp_path, conditioning):
    dflash.save_pretrained(tmp_path)
    drafter = RetraceDrafter.from_dflash(tmp_path, conditioning=conditioning)
    assert drafter.config.conditioning == conditioning
    new = {k for k in drafter.state_dict() if k.startswith("trajectory.")}
    expected = {"gated": {"value", "gate"}, "corrected": {"correction", "value", "gate"}}.get(conditioning, set())
    assert new == {f"trajectory.{name}.weight" for name in expected}


@pytest.mark.parametrize(
    "change, fault",
    [
        ({"architectures": ["Qwen3DSparkModel"]}, "DeepSpec"),
        ({"speculators_model_type": "eagle3"}, "speculators"),
        ({"architectures": ["LlamaForCausalLM"], "dflash_config": None, "model_type": "llama"}, "No DFlash layout"),
        ({"rope_theta": None}, "rope_theta"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
        ({"dflash_config": {"mask_token_id": 199}}, "target_layer_ids"),
    ],
)
def test_what_is_not_dflash_is_refused(dflash, tmp_path, change, fault):
    folder = write(tmp_path / "other", {**zlab_config(dflash), **change}, dflash.state_dict())
    with pytest.raises(ValueError, match=fault):
        RetraceDrafter.from_dflash(folder)


def test_keys_must_match(dflash, tmp_path):
    state = dflash.state_dict()
    state["layers.0.self_attn.sinks"] = torch.ones(4)
    del state["norm.weight"]
    folder = write(tmp_path / "odd", zlab_config(dflash), state)
    with pytest.raises(ValueError, match=r"Missing: \['norm.weight'\]; unknown: \['layers.0.self_attn.sinks'\]"):
        RetraceDrafter.from_dflash(folder)


@pytest.fixture
def warnings():
    """What the package logs as a warning."""
    lines, handler = [], logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("retrace_hf").addHandler(handler)
    yield lines
    logging.getLogger("retrace_hf").removeHandler(handler)


def signal_of(state: dict) -> dict:
    return {name: weight for name, weight in state.items() if name.startswith("trajectory.")}


@pytest.mark.parametrize("source", ["overwrite", "gated", "corrected"])
@pytest.mark.parametrize("wanted", ["none", "overwrite", "gated", "corrected"])
def test_a_retrace_may_be_the_start_of_another(tmp_path, source, wanted, warnings):
    target = tiny_target("qwen3")
    retrace = randomize(tiny_drafter(target, source))
    retrace.save_pretrained(tmp_path)
    for start in (tmp_path, retrace):
        warnings.clear()
        drafter = RetraceDrafter.from_dflash(start, conditioning=wanted)
        assert drafter.config.conditioning == wanted
        state, found = retrace.state_dict(), drafter.state_dict()
        assert all(torch.equal(found[name], state[name]) for name in state if name not in signal_of(state))
        signal = signal_of(found)
        if wanted == source:
            assert all(torch.equal(weight, state[name]) for name, weight in signal.items())
            assert signal.keys() == signal_of(state).keys()
        elif wanted in ("gated", "corrected"):
            assert not signal["trajectory.value.weight"].any()
        else:
            assert not signal
        named = [line for line in warnings if f"conditioning='{wanted}' start anew" in line]
        assert len(named) == (wanted not in ("none", source))


def test_a_retrace_goes_on_as_it_drafts(tmp_path):
    """Its rounds are the same; without its signal they are those of its backbone."""
    target, prompt = tiny_target("qwen3"), prompt_of(9)
    retrace = randomize(tiny_drafter(target))
    retrace.save_pretrained(tmp_path)

    def drafted(drafter):
        states = []
        hook = drafter.register_forward_hook(lambda *args: states.append(args[2].last_hidden_state))
        plain(target, prompt, assistant_model=drafter)
        hook.remove()
        return states

    first, again = drafted(retrace), drafted(RetraceDrafter.from_dflash(tmp_path))
    backbone = drafted(RetraceDrafter.from_dflash(tmp_path, conditioning="none"))
    retrace.config.conditioning = "none"
    off = drafted(retrace)
    for one, other in ((first, again), (off, backbone)):
        assert len(one) == len(other) and all(map(torch.equal, one, other))
    assert not all(map(torch.equal, first, off))


def test_a_retrace_keeps_its_signal_in_another_context(tmp_path):
    target = tiny_target("qwen3")
    retrace = randomize(tiny_drafter(target))
    retrace.save_pretrained(tmp_path)
    hybrid = RetraceDrafter.from_dflash(tmp_path, target=target, context_fusion="hybrid")
    for name, weight in retrace.state_dict().items():
        assert torch.equal(hybrid.state_dict()[name], weight), name


def test_a_folder_that_is_not_there_and_weights_of_another_shape(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for missing in ("runs/not there/at all", "org/not-there"):
        with pytest.raises(ValueError, match=f"{missing} is neither a folder nor a repository"):
            RetraceDrafter.from_dflash(missing)
    drafter = tiny_drafter(tiny_target(), conditioning="none")
    drafter.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 80}))
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.gate_proj\.weight is \(64, 32\), not \(80, 32\)"):
        RetraceDrafter.from_dflash(tmp_path)
