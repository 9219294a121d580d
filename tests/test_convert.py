"""Drafters in the formats of other projects, there and back: every tensor, every field, every drafted token."""

import json
import os
import shlex
from copy import deepcopy
from pathlib import Path
from shutil import copytree

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, MuseGlimmerAssistantModel, Qwen3Config
from typer.testing import CliRunner

from retrace_hf import RetraceConfig, RetraceDrafter
from retrace_hf import conversion as conversion_module
from retrace_hf import export as export_module
from retrace_hf.cli import app
from retrace_hf.conversion import _USED_AS, dflash_fields
from retrace_hf.export import FORMATS, convert

from .dflash_reference import ReferenceDFlash
from .fixtures import MASK_TOKEN_ID, letters_tokenizer, plain, prompt_of, randomize, tiny_drafter, tiny_target


FAMILIES = ("qwen3", "llama")
FOREIGN = FORMATS[1:]
# As published.
LAYER_KEYS = [
    *("input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    *("self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
]
ZLAB_KEYS = {"fc.weight", "hidden_norm.weight", "norm.weight"} | {
    f"layers.{i}.{name}.weight" for i in range(2) for name in LAYER_KEYS
}
BORROWED = ("embed_tokens.weight", "lm_head.weight")
LAYER_FIELDS = {
    *("model_type", "num_target_layers", "num_hidden_layers", "hidden_size", "intermediate_size", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "rms_norm_eps", "rope_theta", "rope_scaling", "layer_types"),
    *("sliding_window", "use_sliding_window", "max_position_embeddings", "vocab_size", "tie_word_embeddings"),
    *("attention_bias", "hidden_act"),
}


ROPE = {"rope_type": "default", "rope_theta": 23456.0}


@pytest.fixture(scope="module")
def targets(tmp_path_factory) -> dict[str, Path]:
    """A saved target of each family."""
    folders = {}
    for family in FAMILIES:
        folder = folders[family] = tmp_path_factory.mktemp(family)
        tiny_target(family).save_pretrained(folder)
        letters_tokenizer().save_pretrained(folder)
    return folders


def drafter_of(family: str = "qwen3", conditioning: str = "none", **config) -> RetraceDrafter:
    # No format of another project keeps how a drafter was initialised; what it keeps is no class's default.
    fields = {"initializer_range": RetraceConfig.initializer_range, "rope_parameters": ROPE, "rms_norm_eps": 3e-5}
    fields |= config
    return randomize(tiny_drafter(tiny_target(family), conditioning=conditioning, **fields))


def saved(folder: Path, drafter: RetraceDrafter, **options) -> Path:
    drafter.save_pretrained(folder, **options)
    return folder


def read(folder: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def change(folder: Path, weights: dict | None = None, **config) -> Path:
    """Writes other fields into a config, `None` removing one, and other weights."""
    raw, state = read(folder)
    raw = {name: value for name, value in {**raw, **config}.items() if config.get(name, ...) is not None}
    (folder / "config.json").write_text(json.dumps(raw))
    state = {name: weight for name, weight in {**state, **(weights or {})}.items() if weight is not None}
    save_file(state, folder / "model.safetensors")
    return folder


def config_of(raw: dict) -> dict:
    return RetraceConfig(**dflash_fields(raw), conditioning="none").to_dict()


def bits(weight: torch.Tensor) -> torch.Tensor:
    return weight.contiguous().view(torch.uint8)


def assert_same_bits(state: dict[str, torch.Tensor], other: dict[str, torch.Tensor]):
    assert set(state) == set(other)
    for name, weight in state.items():
        assert weight.dtype == other[name].dtype and torch.equal(bits(weight), bits(other[name])), name


# -- there and back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family, stored", [("qwen3", "float32"), ("qwen3", "bfloat16"), ("llama", "float16"), ("llama", "mixed")]
)
def test_there_and_back_is_bit_equal(targets, tmp_path, family, stored):
    first = saved(tmp_path / "first", drafter_of(family, pad_token_id=7, bos_token_id=8, eos_token_id=9))
    dtypes = {"mixed": (torch.float32, torch.bfloat16)}.get(stored) or (getattr(torch, stored),) * 2
    state = {name: weight.to(dtypes[weight.ndim > 1]) for name, weight in read(first)[1].items()}
    change(first, state, dtype="float32" if stored == "float16" else str(dtypes[1])[6:])
    formats = ("z-lab", "native", "speculators", "retrace", "speculators", "native", "z-lab", "retrace")
    configs, source = {}, first
    for step, to in enumerate(formats):
        output = tmp_path / f"{step}-{to}"
        assert convert(source, output, to, target=str(targets[family])) == []
        raw, written = read(output)
        assert configs.setdefault(to, raw) == raw and raw["dtype"] == read(first)[0]["dtype"]
        assert config_of(raw) == config_of(read(first)[0])
        assert_same_bits(conversion_module.dflash_state(raw, written), state)
        source = output
    assert read(source)[0] == read(first)[0]


def test_a_retrace_stays_one_in_our_own_format(tmp_path):
    """Every field and tensor, whatever it looks at."""
    axes = {"item_slots": 2, "item_token_ranges": [[3, 50], [50, 100]], "step_embeddings": True, "context_window": 9}
    for number, fields in enumerate(({}, axes, {"context_fusion": "layerwise"}, {"context_fusion": "hybrid"})):
        source = saved(tmp_path / f"{number}", drafter_of(conditioning="corrected", proposal="sample", **fields))
        assert convert(source, tmp_path / f"{number}-again", "retrace") == []
        assert read(source)[0] == read(tmp_path / f"{number}-again")[0]
        assert_same_bits(read(source)[1], read(tmp_path / f"{number}-again")[1])


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_our_format_is_what_save_pretrained_leaves(tmp_path):
    source = saved(tmp_path / "source", drafter_of())
    convert(source, tmp_path / "zlab", "z-lab")
    convert(tmp_path / "zlab", tmp_path / "ours", "retrace")
    assert files_of(tmp_path / "ours") == files_of(source) and "custom_generate/generate.py" in files_of(source)
    assert read(tmp_path / "ours")[0] == read(source)[0]
    assert type(AutoModel.from_pretrained(tmp_path / "ours", trust_remote_code=True)).__name__ == "RetraceDrafter"


# -- what is written -------------------------------------------------------------------------------------------------


def test_exports_hold_the_published_keys(targets, tmp_path):
    source = saved(tmp_path / "source", drafter_of())
    for to in FOREIGN:
        convert(source, tmp_path / to, to, target=str(targets["qwen3"]))
    raw, state = read(tmp_path / "z-lab")
    ids = {"pad_token_id", "bos_token_id", "eos_token_id"}  # Qwen3's own
    assert set(raw) - ids == LAYER_FIELDS | {"architectures", "block_size", "dflash_config", "dtype"}
    assert raw["architectures"] == ["DFlashDraftModel"] and raw["model_type"] == "qwen3"
    assert raw["dflash_config"] == {"mask_token_id": MASK_TOKEN_ID, "target_layer_ids": [1, 3]}
    assert set(state) == ZLAB_KEYS
    as_read = Qwen3Config(**raw)
    assert as_read.rope_parameters == {"rope_theta": raw["rope_theta"], "rope_type": "default"}
    assert set(as_read.layer_types) == {"full_attention"}

    raw, state = read(tmp_path / "native")
    assert raw["model_type"] == "muse_glimmer_assistant" and raw["layer_types"] == ["full_attention"] * 2
    assert raw["target_layer_ids"] == [1, 3] and raw["rope_parameters"]["rope_type"] == "default"
    _, info = MuseGlimmerAssistantModel.from_pretrained(tmp_path / "native", output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))

    raw, state = read(tmp_path / "speculators")
    assert set(raw) == {
        *("architectures", "speculators_model_type", "speculators_version", "block_size", "draft_vocab_size"),
        *("target_hidden_size", "aux_hidden_state_layer_ids", "mask_token_id", "sliding_window_non_causal"),
        *("sample_from_anchor", "transformer_layer_config", "speculators_config", "dtype"),
    }
    assert raw["architectures"] == ["DFlashSpeculator"] and raw["aux_hidden_state_layer_ids"] == [2, 4]
    assert set(raw["transformer_layer_config"]) - ids == LAYER_FIELDS
    verifier = {"name_or_path": str(targets["qwen3"]), "architectures": ["Qwen3ForCausalLM"]}
    proposals = {"proposal_type": "greedy", "speculative_tokens": 7, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    assert raw["speculators_config"] == {
        **{"algorithm": "dflash", "default_proposal_method": "greedy"},
        **{"proposal_methods": [proposals], "verifier": verifier},
    }
    assert set(state) == ZLAB_KEYS | set(BORROWED)
    target = tiny_target("qwen3")
    assert torch.equal(state["embed_tokens.weight"], target.get_input_embeddings().weight)
    assert torch.equal(state["lm_head.weight"], target.get_output_embeddings().weight)


def taught(drafter: RetraceDrafter, target, sequence: torch.LongTensor, steps: int = 40) -> RetraceDrafter:
    """A drafter that knows some of a sequence, so that rounds of all lengths come up."""
    with torch.no_grad():
        hidden = target(input_ids=sequence, output_hidden_states=True).hidden_states
        taps = torch.cat([hidden[2], hidden[4]], dim=-1)
        embeds = target.get_input_embeddings()(sequence)
        masks = target.get_input_embeddings()(torch.full((1, 7), MASK_TOKEN_ID))
    optimizer = torch.optim.Adam(drafter.parameters(), lr=1e-2)
    for step in range(steps):
        anchor = 8 + 7 * step % (sequence.shape[1] - 16)
        block = torch.cat([embeds[:, anchor : anchor + 1], masks], dim=1)
        states = drafter(noise_embeds=block, context_hidden_states=taps[:, :anchor]).last_hidden_state
        logits = target.get_output_embeddings()(states[0, 1:])
        torch.nn.functional.cross_entropy(logits, sequence[0, anchor + 1 : anchor + 8]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return drafter


@torch.no_grad()
def drafts_in_generate(drafter, target, prompt, **options) -> tuple[list[int], list[list[int]]]:
    """As [`ReferenceDFlash.rounds`], by `generate()` with a loaded drafter."""
    drafts, forward = [], drafter.forward

    def noted(*args, **kwargs):
        out = forward(*args, **kwargs)
        drafts.append(target.get_output_embeddings()(out.last_hidden_state[0, 1:]).argmax(-1).tolist())
        return out

    drafter.forward = noted
    out = target.generate(input_ids=prompt, assistant_model=drafter, do_sample=False, max_new_tokens=40, **options)
    return out[0, prompt.shape[1] :].tolist(), drafts


@pytest.mark.parametrize("family", FAMILIES)
def test_every_loader_drafts_the_same(targets, tmp_path, family):
    """From the exported folders alone; the reference knows nothing of the package."""
    target, prompt = tiny_target(family), prompt_of(9)
    drafter = taught(drafter_of(family), target, plain(target, prompt, 48))
    source = saved(tmp_path / "source", drafter)
    for to in FOREIGN:
        convert(source, tmp_path / to, to, target=str(targets[family]))
    convert(tmp_path / "speculators", tmp_path / "retrace", "retrace")
    expected = drafts_in_generate(RetraceDrafter.from_pretrained(source), target, prompt)
    assert expected[0] == plain(target, prompt, 40)[0, 9:].tolist() and 5 < len(expected[1]) < 35
    assert drafts_in_generate(RetraceDrafter.from_pretrained(tmp_path / "retrace"), target, prompt) == expected
    native = MuseGlimmerAssistantModel.from_pretrained(tmp_path / "native").eval()
    assert drafts_in_generate(native, target, prompt, speculation_type="dflash") == expected

    with torch.no_grad():
        hidden = target(input_ids=prompt[:, :-1], output_hidden_states=True).hidden_states
        block = target.get_input_embeddings()(torch.tensor([[int(prompt[0, -1])] + [MASK_TOKEN_ID] * 7]))
        context = torch.cat([hidden[2], hidden[4]], dim=-1)
        states = drafter(noise_embeds=block, context_hidden_states=context).last_hidden_state[0]
    for to in ("z-lab", "speculators"):
        reference = ReferenceDFlash(tmp_path / to)
        assert reference.rounds(target, prompt, 40) == expected
        found, _ = reference.draft(target, prompt[0])
        assert (found - states).norm() < 1e-5 * states.norm()


# -- what is left out ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("conditioning", ["overwrite", "gated", "corrected"])
@pytest.mark.parametrize("to", FOREIGN)
def test_a_retrace_loses_its_signal_only_when_told_so(targets, tmp_path, to, conditioning):
    drafter = drafter_of(conditioning=conditioning)
    source, target = saved(tmp_path / "source", drafter), str(targets["qwen3"])
    with pytest.raises(ValueError, match=rf"conditioning='{conditioning}'.*{to}.*vLLM, SGLang.*--drop-conditioning"):
        convert(source, tmp_path / "output", to, target=target)
    assert not (tmp_path / "output").exists()
    (lost,) = convert(source, tmp_path / "output", to, target=target, drop_conditioning=True)
    gone = [name for name in drafter.state_dict() if name.startswith("trajectory.")]
    assert all(name in lost for name in (f"conditioning='{conditioning}'", "tau", *gone))
    raw, state = read(tmp_path / "output")
    assert raw["architectures"] == [
        {"z-lab": "DFlashDraftModel", "native": "MuseGlimmerAssistantModel", "speculators": "DFlashSpeculator"}[to]
    ]
    assert not [name for name in state if "trajectory" in name] and "conditioning" not in raw
    backbone = {name: weight for name, weight in drafter.state_dict().items() if name not in gone}
    assert_same_bits(conversion_module.dflash_state(raw, state), backbone)


def test_the_signal_may_also_go_in_our_own_format(tmp_path):
    source = saved(tmp_path / "source", drafter_of(conditioning="corrected", proposal="sample"))
    (lost,) = convert(source, tmp_path / "ours", "retrace", drop_conditioning=True)
    dflash = RetraceDrafter.from_pretrained(tmp_path / "ours")
    assert dflash.config.conditioning == "none" and dflash.proposal == "sample" and "trajectory" in lost
    lost = convert(source, tmp_path / "zlab", "z-lab", drop_conditioning=True)
    assert len(lost) == 2 and "proposal='sample'" in lost[1]


ITEMS = {"item_slots": 2, "item_token_ranges": [[3, 50], [50, 100]]}


@pytest.mark.parametrize(
    "fields, named",
    [
        ({"context_fusion": "layerwise"}, "context_fusion='layerwise'"),
        ({"context_fusion": "kv"}, "context_fusion='kv'"),
        ({"context_fusion": "hybrid"}, "context_fusion='hybrid'"),
        ({"context_window": 4, **ITEMS}, "context_window=4, item_slots=2"),
        ({"step_embeddings": True}, "step_embeddings=True"),
    ],
)
def test_what_no_other_format_holds_is_refused_by_name(targets, tmp_path, fields, named):
    source = saved(tmp_path / "source", drafter_of(**fields))
    for to in FOREIGN:
        with pytest.raises(ValueError, match=f"{named}, which {to} cannot hold"):
            convert(source, tmp_path / "output", to, target=str(targets["qwen3"]))
    assert os.listdir(tmp_path) == ["source"]


def test_biases_go_where_there_is_a_place_for_them(tmp_path):
    source = saved(tmp_path / "source", drafter_of(attention_bias=True))
    with pytest.raises(ValueError, match="attention_bias=True, which native cannot hold"):
        convert(source, tmp_path / "native", "native")
    convert(source, tmp_path / "zlab", "z-lab")
    convert(tmp_path / "zlab", tmp_path / "ours", "retrace")
    assert_same_bits(read(source)[1], read(tmp_path / "ours")[1])
    assert read(source)[0] == read(tmp_path / "ours")[0]


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}


def test_rope_scaling_goes_only_when_told_so(targets, tmp_path):
    source = saved(tmp_path / "source", drafter_of(rope_parameters=YARN))
    for to in ("z-lab", "speculators"):
        options = {"target": str(targets["qwen3"])}
        with pytest.raises(ValueError, match="rope_type='yarn'.*--drop-rope-scaling"):
            convert(source, tmp_path / to, to, **options)
        (lost,) = convert(source, tmp_path / to, to, drop_rope_scaling=True, **options)
        assert "'factor': 4.0" in lost
        assert dflash_fields(read(tmp_path / to)[0])["rope_parameters"] == {
            "rope_type": "default",
            "rope_theta": 10000.0,
        }
    convert(source, tmp_path / "native", "native")
    convert(tmp_path / "native", tmp_path / "ours", "retrace")
    assert read(tmp_path / "ours")[0]["rope_parameters"] == read(source)[0]["rope_parameters"]
    partial = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    half = saved(tmp_path / "half", drafter_of(rope_parameters=partial))
    for to in FOREIGN:
        with pytest.raises(ValueError, match="partial_rotary_factor=0.5"):
            convert(half, tmp_path / f"half-{to}", to, target=str(targets["qwen3"]), drop_rope_scaling=True)


def test_several_end_tokens(targets, tmp_path):
    """As targets have them; what is drafted does not depend on the drafter's."""
    source = saved(tmp_path / "source", drafter_of(eos_token_id=[9, 10]))
    for to in ("z-lab", "speculators"):
        assert convert(source, tmp_path / to, to, target=str(targets["qwen3"])) == []
        convert(tmp_path / to, tmp_path / f"{to}-back", "retrace")
        assert read(tmp_path / f"{to}-back")[0] == read(source)[0]
    (lost,) = convert(source, tmp_path / "native", "native")
    assert "eos_token_id=[9, 10]" in lost and MuseGlimmerAssistantModel.from_pretrained(tmp_path / "native")
    convert(tmp_path / "native", tmp_path / "back", "retrace")
    assert read(tmp_path / "back")[0] == {**read(source)[0], "eos_token_id": None}


def test_casting(targets, tmp_path):
    drafter = drafter_of()
    source = saved(tmp_path / "source", drafter)
    convert(source, tmp_path / "zlab", "z-lab", dtype="bfloat16")
    raw, state = read(tmp_path / "zlab")
    assert raw["dtype"] == "bfloat16"
    assert_same_bits(state, {k: v.bfloat16() for k, v in drafter.state_dict().items()})
    convert(source, tmp_path / "spec", "speculators", target=str(targets["qwen3"]), dtype="bfloat16")
    assert {weight.dtype for weight in read(tmp_path / "spec")[1].values()} == {torch.bfloat16}
    change(source, {"norm.weight": torch.full((32,), 1e5)})
    with pytest.raises(ValueError, match="norm.weight is too large for float16"):
        convert(source, tmp_path / "half", "z-lab", dtype="float16")
    with pytest.raises(ValueError, match="dtype is 'int8'; it must be one of float32, bfloat16, float16"):
        convert(source, tmp_path / "half", "z-lab", dtype="int8")


# -- what is read ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields, fault",
    [
        ({"architectures": ["Qwen3DSparkModel"]}, "DeepSpec"),
        ({"architectures": ["QwenDFlareDraftModel"]}, "DFlare"),
        ({"architectures": ["DFlash2DraftModel"]}, "No DFlash layout.*DFlash2DraftModel"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "No DFlash layout"),
        ({"speculators_model_type": "eagle3"}, "eagle3"),
        ({"dflash_config": {"mask_token_id": 199, "target_layer_ids": [1, 3], "causal": True}}, "causal=True"),
        ({"dflash_config": {"mask_token_id": 199, "target_layer_ids": [1, 3], "use_swa": True}}, "use_swa=True"),
        ({"target_hidden_size": 64}, "target_hidden_size=64"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"layer_types": None, "use_sliding_window": True}, "sliding_attention"),
        ({"num_target_layers": None, "vocab_size": None}, "no num_target_layers and no vocab_size.*--target"),
        ({"intermediate_size": 80}, r"layers\.0\.mlp\.gate_proj\.weight is \(64, 32\), not \(80, 32\)"),
    ],
)
def test_what_is_not_ours_to_read_is_refused_by_name(tmp_path, fields, fault):
    convert(saved(tmp_path / "source", drafter_of()), tmp_path / "zlab", "z-lab")
    change(tmp_path / "zlab", **fields)
    with pytest.raises(ValueError, match=fault):
        convert(tmp_path / "zlab", tmp_path / "output", "retrace")
    assert not (tmp_path / "output").exists()


@pytest.mark.parametrize("field", _USED_AS)
def test_weights_that_are_used_otherwise_are_refused(tmp_path, field):
    convert(saved(tmp_path / "source", drafter_of()), tmp_path / "zlab", "z-lab")
    ours = _USED_AS[field]
    change(tmp_path / "zlab", **{field: not ours if isinstance(ours, bool) else {"other": 1}})
    with pytest.raises(ValueError, match=f"{field}="):
        convert(tmp_path / "zlab", tmp_path / "output", "retrace")


@pytest.mark.parametrize("to", FORMATS)
def test_keys_must_be_those_of_the_format(targets, tmp_path, to):
    convert(saved(tmp_path / "first", drafter_of()), tmp_path / "source", to, target=str(targets["qwen3"]))
    change(tmp_path / "source", {"norm.weight": None, "markov_head.weight": torch.ones(2)})
    with pytest.raises(ValueError, match=r"Missing: \['norm.weight'\]; unknown: \['markov_head.weight'\]"):
        convert(tmp_path / "source", tmp_path / "output", "retrace")


def test_a_config_and_weights_of_two_formats_are_no_checkpoint(tmp_path):
    source = saved(tmp_path / "source", drafter_of())
    convert(source, tmp_path / "zlab", "z-lab")
    convert(source, tmp_path / "native", "native")
    save_file(read(tmp_path / "native")[1], tmp_path / "zlab" / "model.safetensors")
    with pytest.raises(ValueError, match=r"Missing: \['fc.weight'.*unknown: \['encoder.fc.weight'"):
        convert(tmp_path / "zlab", tmp_path / "output", "retrace")


def test_what_a_layout_does_not_say_is_what_its_class_fills_in(tmp_path):
    """Native layers slide unless the file says otherwise, and a theta is 500000."""
    convert(saved(tmp_path / "source", drafter_of()), tmp_path / "native", "native")
    change(tmp_path / "native", rope_parameters=None)
    convert(tmp_path / "native", tmp_path / "ours", "retrace")
    assert read(tmp_path / "ours")[0]["rope_parameters"]["rope_theta"] == 500000.0
    change(tmp_path / "native", layer_types=None)
    with pytest.raises(ValueError, match=r"layer_types are \['sliding_attention'\]"):
        convert(tmp_path / "native", tmp_path / "ours", "retrace", overwrite=True)
    with pytest.raises(ValueError, match=r"layer_types are \['sliding_attention'\]"):
        RetraceDrafter.from_dflash(tmp_path / "native")


@pytest.mark.parametrize("to", FOREIGN)
def test_the_target_says_what_the_trimmeddoes_not(targets, tmp_path, to):
    """As in checkpoints that others wrote; from_dflash and convert alike."""
    first = saved(tmp_path / "first", drafter_of("llama"))
    source, folder = tmp_path / "source", str(targets["llama"])
    convert(first, source, to, target=folder)
    raw, _ = read(source)
    inner = raw.get("transformer_layer_config")
    if inner is None:
        change(source, num_target_layers=None, vocab_size=None)
    else:
        change(source, transformer_layer_config={k: v for k, v in inner.items() if k != "num_target_layers"})
    with pytest.raises(ValueError, match="num_target_layers.*--target"):
        convert(source, tmp_path / "ours", "retrace")
    convert(source, tmp_path / "ours", "retrace", target=folder)
    assert read(tmp_path / "ours")[0] == read(first)[0]
    opened = RetraceDrafter.from_dflash(source, target=tiny_target("llama"), conditioning="none")
    assert_same_bits(dict(opened.state_dict()), read(first)[1])
    assert (opened.config.num_target_layers, opened.config.vocab_size) == (6, 200)


def test_embeddings_and_head_of_speculators_are_the_targets_or_refused(targets, tmp_path):
    source, target = tmp_path / "spec", str(targets["qwen3"])
    convert(saved(tmp_path / "source", drafter_of()), source, "speculators", target=target)
    (lost,) = convert(source, tmp_path / "zlab", "z-lab")
    assert lost.startswith("Left out: embed_tokens.weight, lm_head.weight, unchecked")
    assert convert(source, tmp_path / "checked", "z-lab", target=target) == []
    tiny_target("qwen3", seed=7).save_pretrained(tmp_path / "other")
    letters_tokenizer().save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="embed_tokens.weight is not that of"):
        convert(source, tmp_path / "output", "z-lab", target=str(tmp_path / "other"))
    bare = change(copytree(source, tmp_path / "bare"), dict.fromkeys(BORROWED))
    assert convert(bare, tmp_path / "of-bare", "z-lab") == []
    change(source, {"lm_head.weight": read(source)[1]["lm_head.weight"] + 1})
    with pytest.raises(ValueError, match="lm_head.weight is not that of"):
        convert(source, tmp_path / "output", "z-lab", target=target)


def test_a_trimmed_vocabulary_goes_only_when_told_so(targets, tmp_path):
    source, target = tmp_path / "spec", str(targets["qwen3"])
    convert(saved(tmp_path / "first", drafter_of()), source, "speculators", target=target)
    kept = torch.arange(0, 200, 4)
    mask = torch.zeros(200, dtype=torch.bool)
    mask[kept] = True
    head = read(source)[1]["lm_head.weight"][kept]
    tables = {"t2d": mask, "d2t": kept - torch.arange(50), "lm_head.weight": head}
    change(source, tables, draft_vocab_size=50)
    tables_alone = change(copytree(source, tmp_path / "tables"), draft_vocab_size=None)
    size_alone = change(copytree(source, tmp_path / "size"), {"t2d": None, "d2t": None})
    for trimmed, to in ((source, "z-lab"), (source, "native"), (tables_alone, "z-lab")):
        with pytest.raises(ValueError, match=f"50 of the target's 200 tokens.*{to}.*--drop-draft-vocabulary"):
            convert(trimmed, tmp_path / "ours", to)
    with pytest.raises(ValueError, match="draft_vocab_size=50 .* neither d2t nor t2d"):
        convert(size_alone, tmp_path / "ours", "retrace")
    for trimmed in (source, tables_alone):
        assert RetraceDrafter.from_dflash(trimmed).draft_token_ids.tolist() == kept.tolist()
    (lost,) = convert(source, tmp_path / "ours", "retrace", target=target, drop_draft_vocabulary=True)
    assert "draft vocabulary of 50 tokens" in lost
    assert_same_bits(read(tmp_path / "ours")[1], read(tmp_path / "first")[1])
    change(source, {"lm_head.weight": head.flip(0)})
    with pytest.raises(ValueError, match="lm_head.weight is not that of"):
        convert(source, tmp_path / "other", "retrace", target=target, drop_draft_vocabulary=True)


def test_speculators_needs_a_target_that_is_the_drafters(targets, tmp_path):
    source = saved(tmp_path / "source", drafter_of())
    with pytest.raises(ValueError, match="--target"):
        convert(source, tmp_path / "spec", "speculators")
    for name, changed in (("num_hidden_layers", {"num_hidden_layers": 5}), ("vocab_size", {"vocab_size": 208})):
        other = tmp_path / name
        tiny_target("qwen3", **changed).save_pretrained(other)
        letters_tokenizer().save_pretrained(other)
        with pytest.raises(ValueError, match=f"not the drafter's target: {name}"):
            convert(source, tmp_path / "spec", "speculators", target=str(other))
    scaled = tmp_path / "gemma"
    tiny_target("gemma2").save_pretrained(scaled)
    letters_tokenizer().save_pretrained(scaled)
    with pytest.raises(ValueError, match="embeds with Gemma2TextScaledWordEmbedding.*Convert to z-lab"):
        convert(source, tmp_path / "spec", "speculators", target=str(scaled))
    assert not (tmp_path / "spec").exists()


def test_sharded_weights(tmp_path):
    drafter = drafter_of()
    convert(saved(tmp_path / "whole", drafter), tmp_path / "zlab", "z-lab")
    source = saved(tmp_path / "source", drafter, max_shard_size="20KB")
    shards = sorted(source.glob("model-*.safetensors"))
    assert len(shards) > 2
    save_file({"stray": torch.ones(1)}, source / "consolidated.safetensors")
    convert(source, tmp_path / "output", "z-lab")
    assert_same_bits(read(tmp_path / "output")[1], drafter.state_dict())
    assert read(tmp_path / "output")[0] == read(tmp_path / "zlab")[0]
    shards[1].unlink()
    with pytest.raises(ValueError, match=f"lacks {shards[1].name}, which model.safetensors.index.json names"):
        convert(source, tmp_path / "other", "z-lab")
    (source / "model.safetensors.index.json").unlink()
    with pytest.raises(ValueError, match="consolidated.safetensors.*no model.safetensors.index.json"):
        convert(source, tmp_path / "other", "z-lab")


def test_a_trimmedon_the_hub(tmp_path, monkeypatch):
    source, asked = saved(tmp_path / "source", drafter_of()), []
    letters_tokenizer().save_pretrained(source)

    def snapshot_download(repo_id, revision, allow_patterns):
        asked.append((repo_id, revision, {"*.safetensors", "*.json", "chat_template.jinja"} <= set(allow_patterns)))
        return str(source)

    monkeypatch.setattr(conversion_module, "snapshot_download", snapshot_download)
    convert("org/drafter", tmp_path / "output", "z-lab", revision="v2")
    assert asked == [("org/drafter", "v2", True)]
    with pytest.raises(ValueError, match="leave out revision"):
        convert(source, tmp_path / "other", "z-lab", revision="v2")


def test_files_of_the_tokenizer_and_the_licence_go_along(tmp_path):
    source = saved(tmp_path / "source", drafter_of())
    tokenizer = letters_tokenizer()
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(source)
    (source / "LICENSE").write_text("yes")
    (source / "results.json").write_text("{}")  # those of other weights, or of another generator
    convert(source, tmp_path / "output", "z-lab")
    expected = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert files_of(tmp_path / "output") == expected | {"LICENSE"}


# -- where it is written ---------------------------------------------------------------------------------------------


def test_what_is_there_is_replaced_as_a_whole_when_told_so(tmp_path, monkeypatch):
    source, output = saved(tmp_path / "source", drafter_of()), tmp_path / "made" / "output"
    convert(source, output, "native")
    before = read(output)[0]
    with pytest.raises(ValueError, match="holds a checkpoint.*--overwrite"):
        convert(source, output, "z-lab")

    def full_disk(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export_module, "save_file", full_disk)
    with pytest.raises(OSError, match="No space"):
        convert(source, output, "z-lab", overwrite=True)
    assert read(output)[0] == before and os.listdir(output.parent) == ["output"]
    monkeypatch.undo()
    convert(source, output, "z-lab", overwrite=True)
    assert read(output)[0]["architectures"] == ["DFlashDraftModel"] and os.listdir(output.parent) == ["output"]
    assert files_of(output) == {"config.json", "model.safetensors"}


@pytest.mark.parametrize("name", ["README.md", "training.json", "checkpoint-7/model.safetensors", ".git/HEAD"])
def test_what_convert_would_not_write_is_not_deleted(tmp_path, name):
    source, output = saved(tmp_path / "source", drafter_of()), tmp_path / "output"
    convert(source, output, "retrace")
    convert(source, output, "retrace", overwrite=True)  # our code is no reason
    (output / name).parent.mkdir(exist_ok=True)
    (output / name).write_text("mine")
    with pytest.raises(ValueError, match=f"holds {name.split('/')[0]} beside the checkpoint.*move it away"):
        convert(source, output, "z-lab", overwrite=True)
    assert (output / name).read_text() == "mine" and read(output)[0]["model_type"] == "retrace"


@pytest.mark.parametrize("to", ["z-lab", "retrace"])
def test_others_may_read_what_the_umask_lets_them(tmp_path, to):
    before = os.umask(0o027)
    try:
        convert(saved(tmp_path / "source", drafter_of()), tmp_path / "output", to)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "output").glob("*.*")} == {0o640}


def test_nothing_else_is_written_over(tmp_path):
    source = saved(tmp_path / "source", drafter_of())
    for other in (source, tmp_path):
        with pytest.raises(ValueError, match="is the source, or holds it"):
            convert(source, other, "z-lab", overwrite=True)
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.tex").write_text("!")
    with pytest.raises(ValueError, match="holds no checkpoint"):
        convert(source, tmp_path / "work", "z-lab", overwrite=True)
    assert files_of(tmp_path / "work") == {"thesis.tex"}
    with pytest.raises(ValueError, match="to is 'vllm'; it must be one of retrace, z-lab, native, speculators"):
        convert(source, tmp_path / "output", "vllm")


def test_the_command(tmp_path):
    source, output = saved(tmp_path / "source", drafter_of(conditioning="corrected")), tmp_path / "output"
    refused = CliRunner().invoke(app, ["convert", str(source), str(output), "--to", "z-lab"])
    assert isinstance(refused.exception, ValueError) and not output.exists()
    done = CliRunner().invoke(app, ["convert", str(source), str(output), "--to", "z-lab", "--drop-conditioning"])
    assert done.exit_code == 0 and "Left out: the signal" in done.output and "(z-lab)" in done.output
    assert set(read(output)[1]) == ZLAB_KEYS


# -- from_dflash -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{}, {"context_fusion": "layerwise"}, {"context_fusion": "hybrid"}])
def test_a_checkpoint_is_read_once(tmp_path, monkeypatch, fields):
    source, count = saved(tmp_path / "source", drafter_of()), []

    def load_file_once(file):
        count.append(file)
        return load_file(file)

    monkeypatch.setattr(conversion_module, "load_file", load_file_once)
    RetraceDrafter.from_dflash(source, target=tiny_target("qwen3"), **fields)
    assert len(count) == 1


def test_the_commands_of_the_readme(smollm2, tmp_path, monkeypatch):
    """On the shipped drafter; its backbone comes back bit for bit."""
    root = Path(__file__).parents[1]
    monkeypatch.chdir(root)
    monkeypatch.setattr(export_module, "load_target", lambda name, dtype: (deepcopy(smollm2[0]).to(dtype), None))
    lines = (root / "README.md").read_text(encoding="utf-8").replace("\\\n", "").splitlines()
    commands = [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("retrace-hf convert ")]
    assert [command[command.index("--to") + 1] for command in commands] == ["z-lab", "speculators"]
    for _, source, output, *options in commands:
        made = tmp_path / Path(output).name
        done = CliRunner().invoke(app, ["convert", source, str(made), *options])
        assert done.exit_code == 0, done.exception
        back = tmp_path / f"{made.name}-back"
        convert(made, back, "retrace")
        shipped = {k: v for k, v in load_file(Path(source, "model.safetensors")).items() if "trajectory" not in k}
        assert_same_bits(read(back)[1], shipped)
    config = json.loads(Path(commands[0][1], "config.json").read_text())
    text = (root / "README.md").read_text(encoding="utf-8")
    assert f'"num_speculative_tokens": {config["block_size"] - 1}}}' in text
    assert f"--speculative-num-draft-tokens {config['block_size']}\n" in text
