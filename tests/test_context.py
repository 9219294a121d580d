"""Axis 1: every way of reading the target against its formula, in training and in generation alike."""

import copy

import pytest
import torch
from datasets import Dataset
from torch.testing import assert_close
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DFlashCache
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from retrace_hf import RetraceConfig, RetraceDataCollator, RetraceDrafter, record_acceptance
from retrace_hf.candidate_generator import check_pairing
from retrace_hf.configuration_retrace import CONTEXT_FIELDS
from retrace_hf.context import (
    LayerwiseFusion,
    check_target_kv,
    context_size,
    default_kv_layer_ids,
    gate_mean,
    gather_context_kv,
    new_draft_cache,
    split_heads,
    unrotate,
)
from retrace_hf.data.features import TargetFeatures, features_key
from retrace_hf.evaluation import roll_out
from retrace_hf.initialization import target_kv_fields
from retrace_hf.roomy_cache import roomy_cache
from retrace_hf.training import rollout

from .fixtures import (
    BLOCK_SIZE,
    KINDS,
    always_wrong,
    mixed,
    oracle,
    plain,
    prompt_of,
    randomize,
    tiny_drafter,
    tiny_target,
)
from .test_rollout import check_training_equals_decoding, relative
from .test_trainer import make_trainer, rows_of


KEPT, REAPPLIED = {}, {"context_kv_rope": "reapplied"}
FUSIONS = [
    pytest.param({"context_fusion": "layerwise"}, id="layerwise"),
    pytest.param({"context_fusion": "kv"}, id="kv"),
    pytest.param({"context_fusion": "kv", **REAPPLIED}, id="kv-reapplied"),
    pytest.param({"context_fusion": "hybrid"}, id="hybrid"),
    pytest.param({"context_fusion": "hybrid", **REAPPLIED}, id="hybrid-reapplied"),
]
NEW_TOKENS = 41
ONE_EACH = [pytest.param({"context_fusion": fusion}, id=fusion) for fusion in ("layerwise", "kv", "hybrid")]


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def prompt():
    return prompt_of(20)


@pytest.fixture(scope="module")
def sequence(target, prompt):
    return plain(target, prompt, NEW_TOKENS)


def clean_rows(target, drafter, ids):
    config = drafter.config
    return rollout.read_clean_text(target, ids, config.target_layer_ids, None, config.target_kv_layer_ids).features


# -- the formulas ----------------------------------------------------------------------------------------------------


def naive_forward(drafter, noise_embeds, rows):
    """The four ways written out from their papers, head by head, for one sequence without a cache."""
    config, w = drafter.config, drafter.state_dict()
    heads, kv_heads, d, size = (
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.hidden_size,
    )
    rotary_dim = int(d * config.rope_parameters.get("partial_rotary_factor", 1.0))
    rows, x, n = rows[0], noise_embeds[0], rows.shape[1]

    def rms(x, weight):
        return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + config.rms_norm_eps)

    def turn(x, position):
        half, theta = rotary_dim // 2, config.rope_parameters["rope_theta"]
        angles = torch.tensor([position / theta ** (2 * i / rotary_dim) for i in range(half)]).to(x)
        a, b = x[:half], x[half:rotary_dim]
        turned = [a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()]
        return torch.cat([*turned, x[rotary_dim:]])

    def attend(q, keys, values):  # q [heads, d]; keys, values by token, each [kv_heads, d]
        out = []
        for head in range(heads):
            group = head // (heads // kv_heads)
            scores = torch.stack([key[group] @ q[head] for key in keys]) / d**0.5
            out.append(torch.softmax(scores, dim=0) @ torch.stack([value[group] for value in values]))
        return torch.cat(out)

    def head_norm(x, weight):
        return torch.stack([rms(row, weight) for row in x.view(-1, d)])

    taps = rows[:, : len(config.target_layer_ids) * size]
    kv = rows[:, len(config.target_layer_ids) * size :]
    for i in range(config.num_hidden_layers):
        p = f"layers.{i}.self_attn."
        h = rms(x, w[f"layers.{i}.input_layernorm.weight"])
        own_keys = [
            torch.stack([turn(k, n + s) for k in head_norm(w[p + "k_proj.weight"] @ y, w[p + "k_norm.weight"])])
            for s, y in enumerate(h)
        ]
        own_values = [(w[p + "v_proj.weight"] @ y).view(kv_heads, d) for y in h]

        from_hidden = from_target = None
        if config.context_fusion in ("shared", "hybrid"):
            states, names = [rms(w["fc.weight"] @ t, w["hidden_norm.weight"]) for t in taps], ("k_proj", "v_proj")
        elif config.context_fusion == "layerwise":
            shares = torch.softmax(w["layer_fusion.weight"][i], dim=0)
            mixed = [sum(a * tap for a, tap in zip(shares, t.view(-1, size))) for t in taps]
            states, names = [rms(t, w["hidden_norm.weight"]) for t in mixed], ("k_proj_target", "v_proj_target")
        if config.context_fusion != "kv":
            keys = [
                torch.stack([turn(k, t) for k in head_norm(w[p + f"{names[0]}.weight"] @ y, w[p + "k_norm.weight"])])
                for t, y in enumerate(states)
            ]
            from_hidden = keys, [(w[p + f"{names[1]}.weight"] @ y).view(kv_heads, d) for y in states]
        if config.context_fusion in ("kv", "hybrid"):
            keys, values = [], []
            for t, row in enumerate(kv):
                cached = row[: len(row) // 2]
                if config.context_kv_rope == "reapplied":
                    cached = torch.cat([turn(k, -t) for k in cached.view(-1, d)])
                key = (w[p + "k_proj_target.weight"] @ cached).view(kv_heads, d)
                if config.context_kv_rope == "reapplied":
                    key = torch.stack([turn(k, t) for k in key])
                keys.append(key)
                values.append((w[p + "v_proj_target.weight"] @ row[len(row) // 2 :]).view(kv_heads, d))
            from_target = keys, values

        out = []
        for slot, y in enumerate(h):
            q = head_norm(w[p + "q_proj.weight"] @ y, w[p + "q_norm.weight"])
            q = torch.stack([turn(one, n + slot) for one in q])
            streams = [
                w[p + "o_proj.weight"] @ attend(q, keys + own_keys, values + own_values)
                for keys, values in filter(None, (from_hidden, from_target))
            ]
            if config.context_fusion == "hybrid":
                near, other = streams
                delta, g = other - near, p + "hybrid_gate."
                gate = w[g + "gate.weight"] @ torch.cat([near, other, delta]) + w[g + "gate.bias"]
                streams = [near + torch.sigmoid(gate) * (w[g + "delta.weight"] @ delta)]
            out.append(streams[0])
        x = x + torch.stack(out)
        h = rms(x, w[f"layers.{i}.post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(h @ w[f"layers.{i}.mlp.gate_proj.weight"].T)
        x = x + (gate * (h @ w[f"layers.{i}.mlp.up_proj.weight"].T)) @ w[f"layers.{i}.mlp.down_proj.weight"].T
    return rms(x, w["norm.weight"])


def odd_drafter(**fields):
    """Three layers on two taps, grouped heads other than the target's, half of each head rotated."""
    kv = fields["context_fusion"] in ("kv", "hybrid")
    taps = {"target_layer_ids": [1, 3]} if fields["context_fusion"] != "kv" else {}
    reused = {"target_kv_layer_ids": [2, 4], "target_num_key_value_heads": 3, "target_head_dim": 8} if kv else {}
    config = RetraceConfig(
        **{"vocab_size": 200, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.15},
        **{"block_size": BLOCK_SIZE, "mask_token_id": 199, "num_target_layers": 6, "conditioning": "none"},
        rope_parameters={"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
        **{**taps, **reused, **fields},
    )
    torch.manual_seed(3)
    drafter = randomize(RetraceDrafter(config)).eval()
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim == 1:  # norms and biases are not what they start as either
                parameter.add_(0.3 * torch.randn_like(parameter))
    return drafter


def inputs_for(drafter, length=7):
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(1, BLOCK_SIZE, drafter.config.hidden_size, generator=generator)
    rows = torch.randn(1, length, context_size(drafter.config), generator=generator)
    dtype = drafter.dtype
    return {"noise_embeds": noise.to(dtype), "context_hidden_states": rows.to(dtype)}


@pytest.mark.parametrize("fields", [{"context_fusion": "shared"}, *FUSIONS])
@torch.no_grad()
def test_forward_equals_its_formula(fields):
    drafter = odd_drafter(**fields).double()
    inputs = inputs_for(drafter)
    expected = naive_forward(drafter, inputs["noise_embeds"], inputs["context_hidden_states"])
    # The rotary table is made in float32.
    assert relative(drafter(**inputs).last_hidden_state[0], expected) < 1e-6


@pytest.mark.parametrize("fields", FUSIONS)
@torch.no_grad()
def test_a_cache_in_pieces_equals_all_at_once(fields):
    drafter = odd_drafter(**fields)
    inputs = inputs_for(drafter, length=11)
    whole = drafter(**inputs).last_hidden_state
    cache, context = new_draft_cache(drafter.config), inputs["context_hidden_states"]
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
    assert relative(out, whole) < 1e-5
    assert len(cache.layers) == (6 if fields["context_fusion"] == "hybrid" else 3)
    assert {layer.get_seq_length() for layer in cache.layers} == {11 + BLOCK_SIZE}


def test_mixtures_start_as_published():
    fusion = LayerwiseFusion(7, 9)
    start = fusion.start(fusion.weight)
    assert [row.nonzero().flatten().tolist() for row in start] == [[0], [1], [2], [3], [5], [6], [7]]
    assert start.max() == 2.0
    drafter = tiny_drafter(tiny_target(), context_fusion="layerwise", num_hidden_layers=3, target_layer_ids=[0, 2])
    assert drafter.layer_fusion.weight.tolist() == [[2.0, 0.0], [2.0, 0.0], [0.0, 2.0]]


def test_projections_start_by_picking_a_reused_layer(target):
    drafter = tiny_drafter(target, context_fusion="kv", num_hidden_layers=3, target_kv_layer_ids=[1, 2, 4])
    kv = torch.randn(1, 5, 3 * 16)
    for i, layer in enumerate(drafter.layers):
        assert torch.equal(layer.self_attn.k_proj_target(kv), kv[..., 16 * i : 16 * (i + 1)])
    fewer = tiny_drafter(target, context_fusion="kv", num_key_value_heads=1, target_kv_layer_ids=[1, 2])
    assert torch.equal(fewer.layers[1].self_attn.v_proj_target(kv[..., :32]), kv[..., 16:24])


# -- rows ------------------------------------------------------------------------------------------------------------


def test_reused_layers_by_default(target):
    assert default_kv_layer_ids(36) == [2, 18, 34] and default_kv_layer_ids(30, 4) == [2, 11, 19, 28]
    assert tiny_drafter(target, context_fusion="hybrid").config.target_kv_layer_ids == [2, 3, 4]
    # Gemma 2's layers 1, 3, 5 have full attention.
    assert tiny_drafter(tiny_target("gemma2"), context_fusion="kv").config.target_kv_layer_ids == [1, 3]
    with pytest.raises(ValueError, match="4 layers.*target_kv_layer_ids explicitly"):
        default_kv_layer_ids(4)


@pytest.mark.parametrize("family", ["qwen3", "llama", "phi"])
@torch.no_grad()
def test_rows_hold_the_targets_own_keys_and_values(family):
    """Keys are the layer's own projection of the state before it, normed and rotated; values its projection. With the
    drafter's rotation taken off, the keys are the projection itself."""
    target = tiny_target(family)
    ids, layers = prompt_of(9, batch_size=2), [2, 4]
    drafter = tiny_drafter(target, context_fusion="kv", target_kv_layer_ids=layers, context_kv_rope="reapplied")
    found, hooks = {}, []
    for i in layers:
        attention = target.get_decoder().layers[i].self_attn
        for name in ("k_norm" if family == "qwen3" else "k_proj", "v_proj"):
            module = getattr(attention, name)
            hooks.append(module.register_forward_hook(lambda m, a, out, key=(i, name[0]): found.update({key: out})))
    rows = clean_rows(target, drafter, ids)
    for hook in hooks:
        hook.remove()
    config = drafter.config
    shape = (config.target_num_key_value_heads, config.target_head_dim)
    assert rows.shape == (2, 9, 2 * 2 * shape[0] * shape[1])
    keys, values = rows.chunk(2, dim=-1)
    assert torch.equal(values, torch.cat([found[i, "v"] for i in layers], dim=-1))
    cos, sin = drafter.rotary_emb(keys, torch.arange(9)[None])
    plain_keys = torch.cat([found[i, "k"].reshape(2, 9, -1) for i in layers], dim=-1)
    if family != "phi":
        expected = split_heads(plain_keys, shape[1])
        assert_close(split_heads(keys, shape[1]), apply_rotary_pos_emb(expected, expected, cos, sin)[0])
    assert_close(unrotate(split_heads(keys, shape[1]), cos, sin), split_heads(plain_keys, shape[1]))
    assert relative(keys, plain_keys) > 0.1


@torch.no_grad()
def test_rows_are_the_same_from_every_cache(target):
    ids = prompt_of(9)
    rows = []
    for cache in (DynamicCache(config=target.config), StaticCache(config=target.config, max_cache_len=20)):
        target(ids, cache=cache)
        rows.append(gather_context_kv(cache, [2, 3], 4, 9, (2, 8)))
    cache = roomy_cache(target.config, 20)
    target(ids, cache=cache)
    rows.append(gather_context_kv(cache, [2, 3], 4, 9, (2, 8)))
    assert rows[0].shape == (1, 5, 64) and torch.equal(rows[0], rows[2])
    assert_close(rows[1], rows[0])
    for layers, end, shape, fault in (
        ([2], 30, (2, 8), "tokens, size. with 30 tokens"),
        ([2], 9, (4, 8), "2, 9, 8"),
        ([7], 9, None, "NoneType"),
    ):
        with pytest.raises(ValueError, match=fault):
            gather_context_kv(cache, layers, 0, end, shape)


# -- training sees what generate() sees ------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", FUSIONS)
def test_training_equals_decoding(fields):
    check_training_equals_decoding("qwen3", "corrected", **fields)


@pytest.mark.parametrize(("family", "fusion"), [("llama", "layerwise"), ("llama", "kv"), ("gemma2", "hybrid")])
def test_training_equals_decoding_within_a_window_and_on_other_targets(family, fusion):
    """Gemma 2 mixes layers that slide with those that are read."""
    check_training_equals_decoding(family, "gated", window=5, context_fusion=fusion)


def test_training_equals_decoding_with_partial_rotation():
    check_training_equals_decoding("phi", "corrected", context_fusion="hybrid", context_kv_rope="reapplied")


def test_a_fault_of_the_row_range_is_seen(monkeypatch):
    """The tests above are worth something only if they fail when the two paths part."""
    real = rollout.gather_context_rows
    monkeypatch.setattr(rollout, "gather_context_rows", lambda *args: real(*args).roll(1, dims=1))
    with pytest.raises(AssertionError):
        check_training_equals_decoding("qwen3", "corrected", context_fusion="kv")


class Rows:
    """Notes the rows and the positions that a drafter is handed, over all rounds of all calls."""

    def __init__(self, drafter):
        self.rows, self.positions = [], []
        drafter.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, module, args, kwargs):
        context = kwargs["context_hidden_states"]
        self.rows.append(context)
        self.positions.append(kwargs["position_ids"][:, : context.shape[1]])

    def joined(self):
        return torch.cat(self.rows, dim=1), torch.cat(self.positions, dim=1)[0].tolist()


@pytest.mark.parametrize("fields", ONE_EACH)
@pytest.mark.parametrize("how", ["plain", "static", "chunks", "padding", "second turn", "bf16"])
@torch.no_grad()
def test_the_rows_of_generate_are_those_of_the_clean_text(target, prompt, sequence, fields, how):
    """Each verified token's row once, in order, whatever the cache, the chunks, the padding or the turn."""
    if how == "bf16":
        target = copy.deepcopy(target).to(torch.bfloat16)
        sequence = plain(target, prompt, NEW_TOKENS)
    drafter = randomize(tiny_drafter(target, **fields))
    noted = Rows(mixed(drafter, target, sequence))
    if how == "static":
        out = plain(target, prompt, NEW_TOKENS, assistant_model=drafter, cache_implementation="static")
    elif how == "chunks":
        out = plain(target, prompt, NEW_TOKENS, assistant_model=drafter, prefill_chunk_size=7)
    elif how == "padding":
        padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), prompt], dim=1)
        mask = (torch.arange(24) >= 4).long()[None]
        out = plain(target, padded, NEW_TOKENS, assistant_model=drafter, attention_mask=mask)[:, 4:]
    elif how == "second turn":
        cache = DynamicCache(config=target.config)
        first = plain(target, prompt, 17, assistant_model=drafter, cache=cache)
        out = plain(target, first, 24, assistant_model=drafter, cache=cache)
    else:
        out = plain(target, prompt, NEW_TOKENS, assistant_model=drafter)
    assert how == "bf16" or torch.equal(out, sequence)
    rows, positions = noted.joined()
    assert positions == list(range(len(positions))) and len(positions) > 45
    expected = clean_rows(target, drafter, out)[:, : len(positions)]
    assert rows.dtype == drafter.dtype == torch.float32
    assert relative(rows, expected.float()) < (6e-2 if how == "bf16" else 1e-5)


# -- the text is plain generate()'s ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "conditioning"),
    [
        *(pytest.param(*one.values, "corrected", id=f"{one.id}-corrected") for one in FUSIONS),
        *(pytest.param(*one.values, "none", id=f"{one.id}-none") for one in ONE_EACH),
    ],
)
def test_text_is_plains_with_every_context(target, prompt, sequence, fields, conditioning):
    scripts = {"oracle": oracle, "wrong": always_wrong, "mixed": mixed}
    for kind in KINDS:
        drafter = randomize(tiny_drafter(target, conditioning, **fields))
        if kind in scripts:
            drafter = scripts[kind](drafter, target, sequence)
        with record_acceptance() as stats:
            assert torch.equal(plain(target, prompt, NEW_TOKENS, assistant_model=drafter), sequence), kind
        if kind == "oracle":
            assert stats.acceptance_length == BLOCK_SIZE
        elif kind == "wrong":
            assert stats.acceptance_length == 1


@pytest.mark.parametrize("fields", ONE_EACH)
def test_an_untrained_retrace_proposes_what_its_dflash_does(target, prompt, fields, tmp_path):
    dflash = randomize(tiny_drafter(target, "none", **fields))
    dflash.save_pretrained(tmp_path)
    retrace = RetraceDrafter.from_dflash(tmp_path)
    assert retrace.config.conditioning == "corrected"
    assert retrace.config.context_fusion == fields["context_fusion"]
    states = []
    for drafter in (dflash, retrace):
        seen = []
        drafter.register_forward_hook(lambda module, args, out, seen=seen: seen.append(out.last_hidden_state))
        plain(target, prompt, NEW_TOKENS, assistant_model=drafter)
        states.append(torch.cat(seen))
    assert torch.equal(*states) and len(states[0]) > 20


# -- at its extremes each is the simpler method ----------------------------------------------------------------------


@torch.no_grad()
def test_a_hybrid_starts_as_its_dflash_bit_for_bit(target, prompt, tmp_path):
    dflash = randomize(tiny_drafter(target, "none"))
    dflash.save_pretrained(tmp_path)
    hybrid = RetraceDrafter.from_dflash(tmp_path, context_fusion="hybrid", target=target, conditioning="none")
    shape = {"target_num_key_value_heads": 2, "target_head_dim": 8}
    by_fields = RetraceDrafter.from_dflash(dflash, context_fusion="hybrid", **shape)
    assert hybrid.config.target_kv_layer_ids == by_fields.config.target_kv_layer_ids == [2, 3, 4]
    states = []
    for drafter in (dflash, hybrid, by_fields):
        seen = []
        drafter.register_forward_hook(lambda module, args, out, seen=seen: seen.append(out.last_hidden_state))
        plain(target, prompt, assistant_model=drafter)
        states.append(torch.cat(seen))
    assert torch.equal(states[1], states[0]) and torch.equal(states[2], states[0])
    assert 0.3 < float(gate_mean(hybrid)) < 0.7 and gate_mean(dflash) is None


@torch.no_grad()
def test_a_hybrid_with_its_gate_open_attends_to_the_targets_own_alone(target):
    """g = 1 and W_Delta = I: h = o, which is what a kv drafter of the same weights computes."""
    hybrid = odd_drafter(context_fusion="hybrid")
    for layer in hybrid.layers:
        gate = layer.self_attn.hybrid_gate
        gate.gate.weight.zero_()
        gate.gate.bias.fill_(100.0)
        gate.delta.weight.copy_(torch.eye(32))
    kv = odd_drafter(context_fusion="kv")
    own = kv.state_dict()
    kv.load_state_dict({k: v for k, v in hybrid.state_dict().items() if k in own})
    inputs = inputs_for(hybrid)
    expected = kv(inputs["noise_embeds"], inputs["context_hidden_states"][..., 64:]).last_hidden_state
    assert relative(hybrid(**inputs).last_hidden_state, expected) < 1e-5
    assert float(gate_mean(hybrid)) == 1.0


@torch.no_grad()
def test_a_layerwise_drafter_on_one_tap_is_a_dflash_that_passes_that_tap(target):
    layerwise, shared = odd_drafter(context_fusion="layerwise"), odd_drafter(context_fusion="shared")
    layerwise.layer_fusion.weight.copy_(torch.tensor([[0.0, 1e4]] * 3))
    state = layerwise.state_dict()
    for i in range(3):
        for name in ("k_proj", "v_proj"):
            state[f"layers.{i}.self_attn.{name}_target.weight"] = state[f"layers.{i}.self_attn.{name}.weight"]
    layerwise.load_state_dict(state)
    own = shared.state_dict()
    shared.load_state_dict({k: v for k, v in state.items() if k in own}, strict=False)
    shared.fc.weight.copy_(torch.cat([torch.zeros(32, 32), torch.eye(32)], dim=1))
    inputs = inputs_for(shared)
    assert relative(layerwise(**inputs).last_hidden_state, shared(**inputs).last_hidden_state) < 1e-6


# -- from DFlash checkpoints -----------------------------------------------------------------------------------------


def context_kv(drafter, taps):
    """K and V that each draft layer makes of tapped states."""
    parts = []
    for layer, context in zip(drafter.layers, drafter._contexts(taps)):
        keys, values = layer.self_attn._project(context, context[:, :0])
        parts += [keys, values]
    return parts


@torch.no_grad()
def test_a_layerwise_start_is_as_near_to_its_dflash_as_it_can_be(target):
    """Exact where the DFlash is a mixture and a matrix; else nearer on the text that it is fit to than by weights
    alone, and than a start at random."""
    dflash = tiny_drafter(target, "none")
    randomize(dflash.layers)
    matrix = torch.randn(32, 32)
    dflash.fc.weight.copy_(torch.cat([0.25 * matrix, 0.75 * matrix], dim=1))
    taps = rollout.read_clean_text(target, prompt_of(200, batch_size=2), [1, 3]).features
    rows, held_out = taps[0], taps[1:, :60]

    def errors(**kwargs):
        drafter = RetraceDrafter.from_dflash(dflash, context_fusion="layerwise", conditioning="none", **kwargs)
        pairs = list(zip(context_kv(drafter, held_out), context_kv(dflash, held_out)))
        return [max(relative(*pair) for pair in pairs[kind::2]) for kind in (0, 1)], drafter

    (keys, values), drafter = errors()
    assert keys < 1e-4  # K's norm takes the scale out; V's is that of white noise
    assert_close(drafter.layer_fusion.weight.softmax(-1), torch.tensor([[0.25, 0.75]] * 2), rtol=1e-4, atol=1e-4)
    # A DFlash that no mixture equals.
    randomize(dflash.fc)
    (keys, values), _ = errors()
    (fit_keys, fit_values), _ = errors(context_rows=rows)
    assert fit_keys < keys < 1.5 and fit_values < values
    with pytest.raises(ValueError, match=r"context_rows has shape \(5, 3\)"):
        errors(context_rows=torch.ones(5, 3))


def test_a_kv_start_keeps_the_backbone(target):
    dflash = randomize(tiny_drafter(target, "none"))
    kv = RetraceDrafter.from_dflash(dflash, context_fusion="kv", target=target)
    assert kv.config.target_layer_ids == [] and not hasattr(kv, "fc")
    state = dflash.state_dict()
    for name, weight in kv.state_dict().items():
        if "trajectory" not in name and "_target" not in name:
            assert torch.equal(weight, state[name]), name


@pytest.mark.parametrize("source", ["layerwise", "kv", "hybrid"])
def test_what_cannot_become_another_is_refused(target, source):
    drafter = tiny_drafter(target, "none", context_fusion=source)
    for wanted in {"shared", "layerwise", "kv", "hybrid"} - {source}:
        with pytest.raises(ValueError, match=f"context_fusion='{source}'.*'{wanted}'.*Leave context_fusion out"):
            RetraceDrafter.from_dflash(drafter, context_fusion=wanted, target=target)
    dflash = tiny_drafter(target, "none")
    with pytest.raises(ValueError, match="needs target_num_key_value_heads, target_head_dim; .*given the target"):
        RetraceDrafter.from_dflash(dflash, context_fusion="kv")
    with pytest.raises(ValueError, match="context_rows is for context_fusion='layerwise'"):
        RetraceDrafter.from_dflash(dflash, context_fusion="kv", target=target, context_rows=torch.ones(3, 64))


@torch.no_grad()
def test_draft_layers_may_start_from_the_targets_with_every_context(target):
    layerwise = tiny_drafter(target, context_fusion="layerwise", init_from_target=True, target_layer_ids=[1, 3])
    source = target.model.layers[4].self_attn
    assert torch.equal(layerwise.layers[0].self_attn.k_proj_target.weight, source.k_proj.weight)
    kv = tiny_drafter(target, context_fusion="kv", init_from_target=True, target_kv_layer_ids=[2, 4])
    assert torch.equal(kv.layers[0].self_attn.q_proj.weight, target.model.layers[4].self_attn.q_proj.weight)
    # A block of text behind the prompt, in place of masks, sees the prompt as the target's layer 4 does.
    ids = prompt_of(12)
    rows = clean_rows(target, kv, ids)
    states = target(ids, output_hidden_states=True).hidden_states[4]
    attention, seen = target.model.layers[4].self_attn, {}
    hook = attention.register_forward_hook(lambda module, args, out: seen.update(out=out[0]))
    target(ids)
    hook.remove()
    cos, sin = kv.rotary_emb(states, torch.arange(12)[None])
    block = kv.layers[0].input_layernorm(states[:, -1:])
    out = kv.layers[0].self_attn(block, None, rows[:, :-1], position_embeddings=(cos, sin))
    assert relative(out, seen["out"][:, -1:]) < 1e-5
    hybrid = tiny_drafter(target, context_fusion="hybrid", init_from_target=True, target_layer_ids=[1, 3])
    keys = torch.randn(1, 3, 48)
    assert torch.equal(hybrid.layers[0].self_attn.k_proj_target(keys), keys[..., 32:])  # layer 4 of [2, 3, 4]


# -- save and load ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", FUSIONS)
def test_save_and_load(target, prompt, fields, tmp_path):
    drafter = randomize(tiny_drafter(target, **fields))
    drafter.save_pretrained(tmp_path)
    loaded = RetraceDrafter.from_pretrained(tmp_path)
    assert all(getattr(loaded.config, name) == getattr(drafter.config, name) for name in CONTEXT_FIELDS)
    for name, weight in drafter.state_dict().items():
        assert torch.equal(weight, loaded.state_dict()[name]), name
    inputs = inputs_for(drafter)
    assert torch.equal(loaded(**inputs).last_hidden_state, drafter(**inputs).last_hidden_state)
    with pytest.raises(ValueError, match="does not fit its config|without effect"):
        RetraceDrafter.from_pretrained(tmp_path, context_fusion="shared")


# -- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", FUSIONS)
def test_every_parameter_moves_and_none_is_left_out(target, tmp_path, fields):
    drafter, rows = tiny_drafter(target, **fields), rows_of(target)
    trainer = make_trainer(drafter, target, tmp_path, rows, max_steps=4, logging_steps=1)
    trainer.compute_loss(drafter.train(), RetraceDataCollator()(rows[:2])).backward()
    # DistributedDataParallel waits for every one of them.
    assert [name for name, p in drafter.named_parameters() if p.grad is None] == []
    drafter.zero_grad()
    before = {name: p.detach().clone() for name, p in drafter.named_parameters()}
    trainer.train()
    assert [name for name, p in drafter.named_parameters() if torch.equal(p, before[name])] == []
    gates = [log["gate_mean"] for log in trainer.state.log_history if "gate_mean" in log]
    assert len(gates) == (4 if fields["context_fusion"] == "hybrid" else 0)
    assert all(0.3 < gate < 0.7 for gate in gates)


@pytest.mark.parametrize("fields", FUSIONS)
def test_checkpointed_gradients_are_the_same(target, tmp_path, fields):
    """Also by a reentrant checkpoint, which wants an input with a gradient, with all but the layers frozen."""
    gradients = []
    for options in (None, {"use_reentrant": False}, {"use_reentrant": True}):
        drafter = randomize(tiny_drafter(target, "none", **fields)).train()
        for name, parameter in drafter.named_parameters():
            parameter.requires_grad_(name.startswith("layers."))
        if options is not None:
            drafter.activation_checkpointing_enable(options)
        ids = rows_of(target, count=1)[0]["input_ids"]
        ids, anchors = torch.tensor([ids]), torch.tensor([[12, 20]])
        blocks = rollout.Blocks(anchors, torch.ones_like(anchors, dtype=torch.bool))
        rows = clean_rows(target, drafter, ids)
        rollout.draft_blocks(drafter, target.get_input_embeddings(), ids, rows, blocks).square().mean().backward()
        gradients.append([p.grad for p in drafter.layers.parameters()])
    for found in gradients[1:]:
        assert all(relative(a, b) < 1e-5 for a, b in zip(found, gradients[0]) if b.norm() > 0)


@pytest.mark.parametrize("fields", FUSIONS)
def test_features_from_the_disk_equal_online_ones(target, tmp_path, fields):
    rows = rows_of(target, count=3)
    rows[1] = {**rows[1], "input_ids": rows[1]["input_ids"][:20], "loss_mask": rows[1]["loss_mask"][:20]}
    drafter, dataset = randomize(tiny_drafter(target, "none", **fields)), Dataset.from_list(rows)
    layers = drafter.config.target_layer_ids, drafter.config.target_kv_layer_ids
    features = TargetFeatures.build_or_open(
        target, dataset, layers[0], tmp_path, progress=False, with_last=True, target_kv_layer_ids=layers[1]
    )
    assert features.index["width"] == context_size(drafter.config) + 32
    assert features_key(target, dataset, layers[0], True, layers[1]) == features.index["key"]
    collator = RetraceDataCollator(features=features)
    batch = collator([rows[i] for i in (2, 0, 1)])
    expected = clean_rows(target, drafter, batch["input_ids"])
    inside = batch["attention_mask"].bool()
    assert relative(batch["context_hidden_states"][inside], expected[inside]) < 1e-3
    losses = []
    for one in (RetraceDataCollator(), collator):
        trainer = make_trainer(drafter, target, tmp_path, rows, one)
        losses.append(trainer.compute_loss(drafter, one(rows)).item())
    assert_close(losses[1], losses[0], rtol=1e-3, atol=1e-3)
    if layers[1]:
        assert features_key(target, dataset, layers[0], True, [1]) != features.index["key"]
        trainer = make_trainer(tiny_drafter(target, "none"), target, tmp_path, rows, collator)
        with pytest.raises(ValueError, match="values a token and the drafter reads 64"):
            trainer.train()


def test_gamma_grows_with_the_epochs(target, tmp_path):
    rows, seen = rows_of(target, count=4), []
    drafter = tiny_drafter(target, "none")
    options = {"max_steps": -1, "num_train_epochs": 3, "loss_gamma": 4.5, "loss_gamma_growth": 1.0}
    trainer = make_trainer(drafter, target, tmp_path, rows, **options)
    real = trainer._block_loss
    trainer._block_loss = lambda *args: seen.append(trainer._gamma(training=True)) or real(*args)
    trainer.train()
    assert seen == [4.5] * 4 + [5.5] * 4 + [6.5] * 4  # 2 steps an epoch, a fresh and a carried round each
    assert trainer._gamma(training=False) == 4.5
    with pytest.raises(ValueError, match="loss_gamma_growth is 1.0; it has no effect with loss_type='dpace'"):
        make_trainer(drafter, target, tmp_path, rows, loss_gamma_growth=1.0, loss_type="dpace")


def test_muon_leaves_the_mixtures_to_adamw_without_decay(target, tmp_path):
    drafter = tiny_drafter(target, "none", context_fusion="layerwise")
    trainer = make_trainer(drafter, target, tmp_path, rows_of(target), muon=True, weight_decay=0.1)
    groups = trainer.create_optimizer().param_groups
    (group,) = [g for g in groups if any(p is drafter.layer_fusion.weight for p in g["params"])]
    assert not group["muon"] and group["weight_decay"] == 0.0


# -- acceptance over known text --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", ONE_EACH)
@torch.no_grad()
def test_rollout_equals_generate(target, fields, tmp_path):
    prompts = [prompt_of(length, seed=length) for length in (3, 9, 20)]
    sequences = [plain(target, p, max_new_tokens=40)[0].tolist() for p in prompts]
    drafter = tiny_drafter(target, **fields)
    rows = [
        {"input_ids": s, "loss_mask": [0] * p.shape[1] + [1] * (len(s) - p.shape[1])}
        for p, s in zip(prompts, sequences)
    ]
    with torch.enable_grad():
        options = {"max_steps": 20, "num_anchors": 24, "num_carried_rounds": 1, "learning_rate": 5e-3}
        make_trainer(drafter, target, tmp_path, rows, **options).train()
    expected = []
    for prompt, sequence in zip(prompts, sequences):
        with record_acceptance() as stats:
            out = plain(target, prompt, 40, assistant_model=drafter.eval())
        assert out[0].tolist() == sequence
        expected.append(stats.accepted_per_round)
    found = roll_out(target, drafter, sequences, [p.shape[1] for p in prompts], 40, batch_size=2)
    assert [one.accepted_per_round for one in found] == expected
    assert len({a for one in expected for a in one}) > 2


# -- transformers' own generator, and what is refused ----------------------------------------------------------------


def test_transformers_own_generator_runs_what_reads_tapped_states_alone(target, prompt, sequence):
    drafter = randomize(tiny_drafter(target, "none", context_fusion="layerwise"))
    rounds = []
    for options in ({}, {"speculation_type": "dflash"}):
        with record_acceptance() as stats:
            assert torch.equal(plain(target, prompt, NEW_TOKENS, assistant_model=drafter, **options), sequence)
        rounds.append(stats.accepted_per_round)
    assert rounds[0] == rounds[1]
    for fusion in ("kv", "hybrid"):
        drafter = tiny_drafter(target, context_fusion=fusion)
        with pytest.raises(ValueError, match="hands over tapped states only.*leave out speculation_type"):
            plain(target, prompt, assistant_model=drafter, speculation_type="dflash")


@pytest.mark.parametrize("fusion", ["kv", "hybrid"])
def test_targets_and_caches_that_do_not_hold_every_token_are_refused(target, prompt, fusion):
    with pytest.raises(ValueError, match="no layer of its cache.*'shared' or 'layerwise'"):
        tiny_drafter(tiny_target("mistral_window"), context_fusion=fusion)
    with pytest.raises(ValueError, match=r"target_kv_layer_ids \[2\].*choose from \[1, 3, 5\]"):
        tiny_drafter(tiny_target("gemma2"), context_fusion=fusion, target_kv_layer_ids=[2, 3])
    for ids, fault in (([3, 2], "strictly ascending"), ([6], "cannot be read"), ([], "is empty")):
        with pytest.raises(ValueError, match=fault):
            tiny_drafter(target, context_fusion=fusion, target_kv_layer_ids=ids)
    drafter = tiny_drafter(target, context_fusion=fusion)
    with pytest.raises(ValueError, match="reads 2 key/value heads of 8 channels and .* has 4 of 8"):
        check_pairing(drafter, tiny_target("qwen3", num_key_value_heads=4))
    windows = tiny_target("mistral", sliding_window=24).config
    with pytest.raises(ValueError, match="Layer 2 of the DynamicCache is DynamicSlidingWindowLayer"):
        plain(target, prompt, assistant_model=drafter, cache=DynamicCache(config=windows))
    for options in ({"cache_implementation": "quantized"},):
        with pytest.raises(ValueError, match="cache"):
            plain(target, prompt, assistant_model=drafter, **options)
    with pytest.raises(ValueError, match="A row of context has 64 channels"):
        drafter(torch.randn(1, BLOCK_SIZE, 32), torch.randn(1, 5, 64))


@pytest.mark.parametrize("family", ["gpt2", "cohere", "smollm3"])
def test_keys_that_are_not_rotated_as_the_drafters_are_kept_as_they_are(family, prompt):
    """GPT-2 rotates nothing, Cohere pairs other channels, SmolLM3 leaves layer 3 alone."""
    # The common tiny shape names key/value heads, which GPT-2 has not.
    target = tiny_target(family, **({"num_key_value_heads": None} if family == "gpt2" else {}))
    with pytest.raises(ValueError, match="not rotated as the drafter's.*context_kv_rope='kept'"):
        tiny_drafter(target, context_fusion="kv", context_kv_rope="reapplied")
    drafter = randomize(tiny_drafter(target, context_fusion="kv"))
    assert torch.equal(plain(target, prompt, 20, assistant_model=drafter), plain(target, prompt, 20))
    check_target_kv(target, drafter.config.target_kv_layer_ids)


def test_configs_that_cannot_be():
    kv = {"target_kv_layer_ids": [1], "target_num_key_value_heads": 2, "target_head_dim": 128}
    for fields, fault in (
        ({"context_fusion": "kv", **kv, "target_layer_ids": [1]}, "'kv' reads no hidden states"),
        ({"context_fusion": "kv", **kv, "context_kv_rope": "maybe"}, "context_kv_rope is 'maybe'"),
        ({"context_fusion": "kv", **kv, "context_kv_rope": "reapplied", "head_dim": 64}, "head_dim is 64 there"),
        ({"context_fusion": "layerwise", "context_kv_rope": "reapplied"}, "context_kv_rope without effect"),
        ({"context_fusion": "kv", **kv, "target_kv_layer_ids": [3, 1]}, "target_kv_layer_ids is .3, 1.*ascending"),
        ({"context_fusion": "kv", **kv, "target_kv_layer_ids": [-1, 1]}, "target_kv_layer_ids is .-1.*from 0"),
        ({"context_fusion": "kv", **kv, "target_kv_layer_ids": [6], "num_target_layers": 6}, "num_target_layers=6"),
        ({"context_fusion": "kv", **kv, "target_head_dim": -8}, "target_head_dim is -8; it must be at least 1"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0; it must be at least 1"),
        ({"num_attention_heads": 0, "head_dim": None}, "num_attention_heads is 0"),
        ({"rope_parameters": {"rope_type": "none", "rope_theta": 1e4}}, "rope_type 'none'; it must be one of"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 2.0}}, "partial_rotary_factor 2.0"),
    ):
        with pytest.raises(ValueError, match=fault):
            RetraceConfig(**fields)
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ValueError, match="frequencies change"):
        RetraceConfig(context_fusion="kv", **kv, context_kv_rope="reapplied", rope_parameters=rope)


def test_a_plain_cache_lacks_the_second_stream():
    drafter = odd_drafter(context_fusion="hybrid")
    assert len(new_draft_cache(drafter.config).layers) == 2 * len(DFlashCache(config=drafter.config).layers)


def test_a_context_set_on_a_made_drafter_is_refused_before_the_target_runs(target, prompt, monkeypatch):
    """Weights and the modules around them were made for what the config said then."""
    monkeypatch.setattr(type(target), "forward", lambda *args, **kwargs: pytest.fail("the target ran"))
    other = {"shared": "hybrid", "layerwise": "shared", "kv": "layerwise", "hybrid": "kv"}
    for fusion, wanted in other.items():
        drafter, config = (tiny_drafter(target, context_fusion=one) for one in (fusion, wanted))
        for name in CONTEXT_FIELDS:
            setattr(drafter.config, name, getattr(config.config, name))
        with pytest.raises(ValueError, match=f"context_fusion was set to '{wanted}' on a drafter .* set it back"):
            plain(target, prompt, assistant_model=drafter)
    for name, value in (("context_kv_rope", "reapplied"), ("target_kv_layer_ids", [2, 3])):
        drafter = tiny_drafter(target, context_fusion="kv")
        setattr(drafter.config, name, value)
        with pytest.raises(ValueError, match=f"{name} was set to"):
            plain(target, prompt, assistant_model=drafter)


def test_keys_of_a_target_with_attention_sinks_are_unrotated():
    """There a token sees the less of itself the earlier it stands, unless it stands alone."""
    check_training_equals_decoding("gpt_oss", "corrected", context_fusion="kv", **REAPPLIED)


@pytest.mark.parametrize("kind", ["llama3", "yarn", "linear"])
def test_a_rotation_that_differs_only_far_behind_is_seen(kind):
    """A DFlash may have been made for its target before the target's context was stretched."""
    plain_rope = {"rope_type": "default", "rope_theta": 1e6}
    rope = {**plain_rope, "rope_type": kind, "factor": 8.0}
    if kind != "linear":
        rope["original_max_position_embeddings"] = 8192
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    target = tiny_target("llama", rope_parameters=rope, max_position_embeddings=65536)
    fields = {"context_fusion": "kv", **REAPPLIED}
    assert tiny_drafter(target, **fields).config.rope_parameters["rope_type"] == kind
    with pytest.raises(ValueError, match="not rotated as the drafter's.*other frequencies"):
        tiny_drafter(target, rope_parameters=plain_rope, **fields)


@pytest.mark.parametrize("family", ["glm4", "cohere"])
def test_keys_that_cannot_be_unrotated_are_refused_wherever_a_drafter_meets_its_target(family, tmp_path):
    target, fields = tiny_target(family), {"context_fusion": "hybrid", **REAPPLIED}
    dflash = tiny_drafter(target, "none")
    with pytest.raises(ValueError, match="not rotated as the drafter's.*context_kv_rope='kept'"):
        RetraceDrafter.from_dflash(dflash, target=target, **fields)
    drafter = RetraceDrafter.from_dflash(dflash, **{**target_kv_fields(target), **fields})
    with pytest.raises(ValueError, match="not rotated as the drafter's.*context_kv_rope='kept'"):
        make_trainer(drafter, target, tmp_path, rows_of(target))


def test_trained_weights_are_not_pointed_at_other_layers(target):
    dflash = tiny_drafter(target, "none")
    taps = dflash.config.target_layer_ids
    others = [i + 1 for i in taps]
    for changes in ({}, {"context_fusion": "hybrid"}, {"context_fusion": "layerwise"}):
        with pytest.raises(ValueError, match="target_layer_ids is .* was trained with .*; leave out target_layer_ids"):
            RetraceDrafter.from_dflash(dflash, target=target, target_layer_ids=others, **changes)
        RetraceDrafter.from_dflash(dflash, target=target, target_layer_ids=taps, **changes)
    hybrid = tiny_drafter(target, "none", context_fusion="hybrid")
    for changes in ({"target_kv_layer_ids": [0, 1]}, {"context_kv_rope": "reapplied"}):
        with pytest.raises(ValueError, match=f"{next(iter(changes))} is .* was trained with"):
            RetraceDrafter.from_dflash(hybrid, **changes)
