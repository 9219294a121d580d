"""What this package takes from transformers beyond its documented interface, one test for each thing.

A failure here says what moved, what stands on it and where to mend it, before some test of the text says that a text
is wrong. Nothing here imports the package at its top: it must speak also where the package can no longer be imported.
"""

import ast
import functools
import importlib
import inspect
import sys
from pathlib import Path

import pytest
import torch
import transformers
from transformers import GenerationConfig, PreTrainedModel, Trainer
from transformers.cache_utils import Cache, DFlashCache, DynamicCache, DynamicLayer, StaticCache
from transformers.generation.candidate_generator import CandidateGenerator, DFlashTokenCandidateGenerator
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GENERATION_MODES_MAPPING, GenerationMixin
from transformers.models.qwen3 import modeling_qwen3


PACKAGE = Path(__file__).parents[1] / "retrace_hf"

# Private names of transformers that the package reads, overrides or sets, and the test that holds each.
CONTRACTS = {
    "_extract_generation_mode_kwargs": "test_extract_generation_mode_kwargs",
    "_validate_generation_mode": "test_validate_generation_mode",
    "_assisted_decoding": "test_assisted_decoding",
    "_get_candidate_generator": "test_get_candidate_generator",
    "_eos_token_tensor": "test_prepared_generation_config",
    "_mask_length": "test_prepared_generation_config",
    "_attn_implementation": "test_attention_implementation",
    "_is_stateful": "test_recurrent_states_are_kept",
    "_supports_default_dynamic_cache": "test_recurrent_states_are_kept",
    "_no_split_modules": "test_model_flags",
    "_supports_flash_attn": "test_model_flags",
    "_supports_sdpa": "test_model_flags",
    "_supports_flex_attn": "test_model_flags",
    "_supports_attention_backend": "test_model_flags",
    "_init_weights": "test_initialization",
    "_name_or_path": "test_configs_name_their_origin",
    "_from_pipeline": "test_pipelines",
    "_upload_modified_files": "test_pushing_to_the_hub",
    "_prepare_inputs": "test_trainer",
    "_run_epoch": "test_trainer",
    "_save_checkpoint": "test_trainer",
    "_push_from_checkpoint": "test_trainer",
    "_get_output_dir": "test_trainer",
    "_track_num_input_tokens": "test_trainer",
    "_set_signature_columns_if_needed": "test_trainer",
    # accelerate's
    "_original_forward": "test_forward_under_mixed_precision",
    # torch's
    "_forward_hooks": "test_module_hooks",
    "_forward_pre_hooks": "test_module_hooks",
    "_apply": "test_modules_are_cast",
    "_version": "test_tensors_count_what_is_written_to_them",
}


def moved(what: str, stands: str, mend: str | None = None) -> str:
    """The message of a broken contract. `stands` names a file and a function of the package."""
    return (
        f"transformers {transformers.__version__}: {what}. retrace_hf/{stands} stands on it; mend it "
        f"{'there' if mend is None else mend}."
    )


def parameters(function) -> list[str]:
    return list(inspect.signature(inspect.unwrap(function)).parameters)


# -- every private name has its contract -----------------------------------------------------------------------------


def trees():
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path, ast.parse(path.read_text(encoding="utf-8"))


def is_private(name) -> bool:
    """Private, and not what this package itself leaves on objects of transformers."""
    return isinstance(name, str) and name.isidentifier() and name[0] == "_" and not name.startswith(("__", "_retrace"))


def own_names() -> set[str]:
    """What the package itself defines or sets."""
    own = set()
    for _, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                own.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                own |= {node.attr} if getattr(node.value, "id", None) == "self" else set()
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
    return own


def private_names() -> dict[str, str]:
    """Private names that are not the package's own, with a file that uses each."""
    own, found = own_names(), {}
    upstream = [vars(cls) for base in (PreTrainedModel, Trainer, GenerationMixin) for cls in base.__mro__]
    for path, tree in trees():
        for node in ast.walk(tree):
            name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "value", None)
            if is_private(name) and name not in own:
                found[name] = path.name
            if isinstance(node, ast.ClassDef):  # what it overrides
                names = {n.id for s in node.body for n in ast.walk(s) if isinstance(n, ast.Name)}
                names |= {statement.name for statement in node.body if isinstance(statement, ast.FunctionDef)}
                found |= {n: path.name for n in names if is_private(n) and any(n in v for v in upstream)}
            if isinstance(node, ast.Attribute) and is_private(node.attr) and any(node.attr in v for v in upstream):
                found[node.attr] = path.name
    found.pop("_replace", None)  # of a named tuple
    return found


def test_every_private_name_has_its_contract():
    found = private_names()
    assert set(found) == set(CONTRACTS), (
        f"without a contract: { {n: f for n, f in found.items() if n not in CONTRACTS} }; "
        f"no longer used: {set(CONTRACTS) - set(found)}"
    )
    assert set(CONTRACTS.values()) <= set(globals())


def taken_from_transformers() -> list[tuple[str, str, str]]:
    return sorted(
        {
            (node.module, alias.name, path.relative_to(PACKAGE).as_posix())
            for path, tree in trees()
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and not node.level and node.module.split(".")[0] == "transformers"
            for alias in node.names
        }
    )


def test_everything_imported_is_there():
    for module, name, path in taken_from_transformers():
        try:
            there = hasattr(importlib.import_module(module), name) or importlib.import_module(f"{module}.{name}")
        except ImportError:
            there = False
        assert there, moved(f"{module} has no {name}", path)


# -- the four methods that are wrapped -------------------------------------------------------------------------------


def test_extract_generation_mode_kwargs(monkeypatch):
    stands, told = "generation.py _extracting()", {}
    needed = {"custom_generate", "assistant_model"}
    signature = inspect.signature(inspect.unwrap(GenerationMixin._extract_generation_mode_kwargs))
    assert needed <= set(signature.parameters), moved(
        f"_extract_generation_mode_kwargs has no {needed - set(signature.parameters)}", stands
    )

    def extract(self, *args, **kwargs):
        told.update(signature.bind(self, *args, **kwargs).arguments)
        raise StopIteration

    monkeypatch.setattr(GenerationMixin, "_extract_generation_mode_kwargs", extract)
    assistant, loop = tiny_model(), print
    with pytest.raises(StopIteration):
        tiny_model().generate(PROMPT, assistant_model=assistant, custom_generate=loop)
    assert told.get("assistant_model") is assistant and told.get("custom_generate") is loop, moved(
        f"generate() does not tell _extract_generation_mode_kwargs of both, only of {list(told)}", stands
    )


def test_validate_generation_mode():
    found = parameters(GenerationMixin._validate_generation_mode)
    assert found == ["self", "generation_mode", "generation_config", "generation_mode_kwargs"], moved(
        f"GenerationMixin._validate_generation_mode takes {found}", "generation.py _validating()"
    )


def test_what_validate_generation_mode_is_told(monkeypatch):
    told = {}

    def validate(self, generation_mode, generation_config, generation_mode_kwargs):
        told.update(mode=generation_mode, config=generation_config, kwargs=generation_mode_kwargs)
        raise StopIteration

    monkeypatch.setattr(GenerationMixin, "_validate_generation_mode", validate)
    assistant, tokenizer = tiny_model(), object()
    with pytest.raises(StopIteration):
        tiny_model().generate(PROMPT, assistant_model=assistant, assistant_tokenizer=tokenizer)
    assert told["kwargs"].get("assistant_model") is assistant, moved(
        f"_validate_generation_mode finds no assistant under 'assistant_model' but has {list(told['kwargs'])}",
        "generation.py _validating()",
    )
    assert told["kwargs"].get("assistant_tokenizer") is tokenizer, moved(
        "_validate_generation_mode is not told of assistant_tokenizer", "generation.py _validating()"
    )
    assert told["mode"] == GenerationMode.ASSISTED_GENERATION and told["mode"].value == "assisted_generation", moved(
        f"an assistant asks for {told['mode']}", "generation.py _validating()"
    )


def test_assisted_decoding():
    signature = inspect.signature(inspect.unwrap(GenerationMixin._assisted_decoding))
    needed = {"input_ids", "stopping_criteria", "generation_config", "assistant_model"}
    assert needed <= set(signature.parameters), moved(
        f"_assisted_decoding has no {needed - set(signature.parameters)}", "generation.py _decoding()"
    )
    rest = [p.name for p in signature.parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD]
    assert rest == ["model_kwargs"], moved(
        f"_assisted_decoding collects the model's inputs in {rest}, not model_kwargs", "generation.py _decoding()"
    )
    assert GENERATION_MODES_MAPPING[GenerationMode.ASSISTED_GENERATION] == "_assisted_decoding", moved(
        f"assisted generation runs in {GENERATION_MODES_MAPPING[GenerationMode.ASSISTED_GENERATION]}",
        "generation.py install_generate_hook()",
    )


def test_get_candidate_generator():
    found = set(parameters(GenerationMixin._get_candidate_generator))
    needed = {"generation_config", "logits_processor", "model_kwargs", "assistant_model"}
    assert needed <= found, moved(f"_get_candidate_generator has no {needed - found}", "generation.py _choosing()")


# -- the loop, watched through a generator that proposes nothing right -----------------------------------------------

PROMPT = torch.arange(5, 17)[None]


@functools.cache
def tiny_model():
    from .fixtures import tiny_target

    return tiny_target()


class Watching(CandidateGenerator):
    num_drafting_tokens = 3
    """Proposes one token, and writes down how the loop treats a generator."""

    requires_model_outputs = True

    def __init__(self, generation_config):
        self.generation_config = generation_config
        self.model_kwargs_overrides = {"output_hidden_states": [2, 6]}
        self.asked, self.updated = [], []

    def get_candidates(self, input_ids, *args, **kwargs):
        # The loop goes on writing to its own dictionary.
        self.asked.append((args, {**kwargs, "model_kwargs": dict(kwargs.get("model_kwargs", {}))}, input_ids.shape[1]))
        self.model_kwargs_overrides = {"output_hidden_states": [2, 6] if len(self.asked) == 1 else [3, 6]}
        first = kwargs.get("is_first_iteration")
        return (input_ids if first else torch.cat([input_ids, input_ids[:, -1:]], dim=1)), None

    def update_candidate_strategy(self, *args, **kwargs):
        self.cached = self.asked[-1][1]["model_kwargs"]["cache"].get_seq_length()
        self.updated.append((args, kwargs))


@pytest.fixture(scope="module")
def loop():
    """The generator of a call of 6 tokens, and what the target's forward got and gave in it."""
    target, passes, generators = tiny_model(), [], []

    def choose(self, generation_config, *args, **kwargs):
        generators.append(Watching(generation_config))
        return generators[0]

    def watch(module, args, kwargs, output):
        passes.append((kwargs, output))

    handle = target.register_forward_hook(watch, with_kwargs=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GenerationMixin, "_get_candidate_generator", choose)
        target.generate(
            PROMPT, max_new_tokens=6, do_sample=False, eos_token_id=[198], prompt_lookup_num_tokens=1, pad_token_id=0
        )
    handle.remove()
    return generators[0], passes


def test_how_get_candidates_is_called(loop):
    needed = {"model_kwargs", "model_outputs", "is_first_iteration", "n_last_matches"}
    for args, kwargs, _ in loop[0].asked:
        assert not args and set(kwargs) >= needed, moved(
            f"get_candidates is called with {len(args) + 1} positional arguments and {sorted(kwargs)}; needed are "
            f"input_ids and {sorted(needed)}",
            "candidate_generator.py RetraceCandidateGenerator.get_candidates()",
            "there and in generation.py _RecordedGenerator",
        )
    first = [kwargs["is_first_iteration"] for _, kwargs, _ in loop[0].asked]
    assert first == [True] + [False] * (len(first) - 1), moved(
        "the target's prefill is not announced by is_first_iteration alone",
        "candidate_generator.py RetraceCandidateGenerator.get_candidates()",
    )


def test_get_candidates_sees_the_last_pass_rejected_rows_included(loop):
    generator, passes = loop
    for (_, kwargs, _), (_, output) in zip(generator.asked[1:], passes):
        assert kwargs["model_outputs"] is output, moved(
            "get_candidates does not get the target's last pass as model_outputs",
            "candidate_generator.py RetraceCandidateGenerator._rejected()",
        )
    rows = [output.hidden_states[6].shape[1] for _, output in passes]
    assert rows == [PROMPT.shape[1]] + [2] * (len(rows) - 1), moved(
        f"passes have {rows} rows; the prompt, then anchor and proposal were expected",
        "candidate_generator.py RetraceCandidateGenerator._rejected()",
    )


def test_model_kwargs_name_what_is_read(loop):
    _, kwargs, length = loop[0].asked[1]
    found = kwargs["model_kwargs"]
    assert isinstance(found.get("cache"), Cache), moved(
        f"the target's cache is not model_kwargs['cache'] (there is {sorted(found)})",
        "candidate_generator.py RetraceCandidateGenerator._begin()",
        "there, in check_inputs() and in generation.py _decoding()",
    )
    assert found.get("position_ids") is not None and found["position_ids"].shape == (1, length), moved(
        "model_kwargs['position_ids'] does not reach up to the anchor",
        "candidate_generator.py RetraceCandidateGenerator._positions()",
    )


def test_how_update_candidate_strategy_is_called(loop):
    generator, _ = loop
    for args, kwargs in generator.updated:
        assert len(args) == 3 and not kwargs, moved(
            f"update_candidate_strategy gets {len(args)} positional arguments and {sorted(kwargs)}, not (input_ids, "
            "scores, num_matches)",
            "generation.py _RecordedGenerator.update_candidate_strategy()",
            "there and in candidate_generator.py",
        )
    rows = [args[1].shape[1] for args, _ in generator.updated]
    assert rows == [1] + [2] * (len(rows) - 1), moved(
        f"update_candidate_strategy gets scores of {rows} rows; one for the anchor and one for each proposal were "
        "expected",
        "generation.py _RecordedGenerator.update_candidate_strategy()",
    )
    input_ids = generator.updated[-1][0][0]
    assert generator.cached == input_ids.shape[1] - 1, moved(
        "update_candidate_strategy is not called right after the rejected tokens have left the cache",
        "candidate_generator.py RetraceCandidateGenerator.update_candidate_strategy()",
        "in generation.py _rolling_back()",
    )


def test_model_kwargs_overrides_are_read_anew_for_each_pass(loop):
    captured = [kwargs.get("output_hidden_states") for kwargs, _ in loop[1]]
    assert captured == [[2, 6]] + [[3, 6]] * (len(captured) - 1), moved(
        f"the target's passes got output_hidden_states {captured}: model_kwargs_overrides is not merged into each",
        "candidate_generator.py RetraceCandidateGenerator._begin()",
    )


def test_requires_model_outputs_decides_what_get_candidates_is_told():
    assert CandidateGenerator.requires_model_outputs is False and "requires_model_outputs" in inspect.getsource(
        inspect.unwrap(GenerationMixin._assisted_decoding)
    ), moved(
        "the loop does not look at CandidateGenerator.requires_model_outputs",
        "candidate_generator.py RetraceCandidateGenerator",
        "there and in generation.py _RecordedGenerator",
    )


def test_capture_by_layer_list(loop):
    target, (_, output) = tiny_model(), loop[1][0]
    found = [state is not None for state in output.hidden_states]
    assert found == [False, False, True, False, False, False, True], moved(
        f"output_hidden_states=[2, 6] gives states at {[i for i, there in enumerate(found) if there]} of {len(found)}",
        "context.py captured_layers() and gather_context_states()",
        "there and in candidate_generator.py _captured()",
    )
    with torch.no_grad():
        everything = target(PROMPT, output_hidden_states=True).hidden_states
        decoder = target.get_decoder()(PROMPT, output_hidden_states=[2])
    assert torch.equal(everything[2], output.hidden_states[2]) and torch.equal(everything[6], output.hidden_states[6])
    assert torch.equal(target.lm_head(everything[6]), target(PROMPT).logits), moved(
        "the last of hidden_states is not the state after the final norm",
        "candidate_generator.py RetraceCandidateGenerator._rejected() and target_head.py draft_logits()",
    )
    assert torch.equal(decoder.hidden_states[2], everything[2]), moved(
        "get_decoder() does not capture by layer list", "training/rollout.py read_clean_text()"
    )


def test_prepared_generation_config(loop):
    config = loop[0].generation_config
    eos = getattr(config, "_eos_token_tensor", None)
    assert isinstance(eos, torch.Tensor) and eos.flatten().tolist() == [198], moved(
        f"the prepared generation config holds {eos!r} as _eos_token_tensor",
        "candidate_generator.py _split_criteria()",
    )
    assert getattr(config, "_mask_length", None) == PROMPT.shape[1], moved(
        "generate() drops a mask of ones and does not leave its length as _mask_length",
        "candidate_generator.py cached_prefix_length()",
    )
    given = GenerationConfig(max_length=30, prompt_lookup_num_tokens=1, do_sample=False)
    tiny_model().generate(PROMPT, generation_config=given)
    assert not hasattr(given, "_mask_length"), moved(
        "generate() works on the caller's generation config itself, no longer on a copy",
        "generation.py _decoding() (_retrace_stopping_criteria) and candidate_generator.py (_retrace_verified)",
    )


@pytest.mark.parametrize(
    "option",
    "speculation_type prompt_lookup_num_tokens use_mtp assistant_early_exit assistant_ensemble_weight dola_layers "
    "guidance_scale num_beams num_return_sequences use_cache cache_implementation output_attentions "
    "output_hidden_states return_dict_in_generate do_sample max_length".split(),
)
def test_options_that_are_read(option):
    assert hasattr(GenerationConfig(), option), moved(
        f"GenerationConfig has no {option}", "candidate_generator.py _check_options()", "there, in _CONFLICTING too"
    )


# -- caches ----------------------------------------------------------------------------------------------------------


def test_dflash_cache():
    from .fixtures import tiny_drafter

    stands = "candidate_generator.py RetraceCandidateGenerator._draft()", "there, in draft_context.py and context.py"
    cache = DFlashCache(config=tiny_drafter(tiny_model()).config)
    cache.activate_past_recording()
    cache.set_previous_accepted_tokens(3)
    keys = torch.randn(1, 2, 5, 8)
    out = cache.update(keys, keys + 1, 0)
    assert torch.equal(out[0], keys) and torch.equal(out[1], keys + 1), moved("DFlashCache.update changed", *stands)
    assert cache.get_seq_length() == 5, moved("DFlashCache.get_seq_length() does not count rows", *stands)
    cache.crop(-2)
    assert torch.equal(cache.layers[0].keys, keys[:, :, :3]), moved("DFlashCache.crop(-n) does not drop n", *stands)
    assert cache.get_mask_sizes(2, 0) == (8, 0), moved(
        f"DFlashCache.get_mask_sizes(2, 0) over 3 rows with 3 accepted tokens is {cache.get_mask_sizes(2, 0)}, not "
        "(8, 0)",
        *stands,
    )
    both = DFlashCache(config=tiny_drafter(tiny_model()).config)
    both.update(keys.repeat(3, 1, 1, 1), keys.repeat(3, 1, 1, 1), 0)
    both.batch_select_indices(torch.tensor([0, 2]))
    assert both.layers[0].keys.shape[0] == 2, moved(
        "DFlashCache.batch_select_indices does not choose rows", "evaluation/rollout.py _keep()"
    )


def test_cached_keys_and_values_by_layer():
    """What drafters of context_fusion "kv" and "hybrid" read, and how layers that keep every row are told apart."""
    stands = "context.py gather_context_kv() and full_attention_layers()"
    model = tiny_model()
    cache = DynamicCache(config=model.config)
    assert all(type(layer) is DynamicLayer for layer in cache.layers), moved("full attention has other layers", stands)
    with torch.no_grad():
        model.get_decoder()(PROMPT, cache=cache, use_cache=True)
    shapes = {tuple(getattr(layer, kind).shape) for layer in cache.layers for kind in ("keys", "values")}
    assert len(cache.layers) == 6 and shapes == {(1, 2, PROMPT.shape[1], 8)}, moved(
        f"a cache of 6 layers over {PROMPT.shape[1]} tokens holds keys and values of {shapes}",
        stands,
    )
    output = model(PROMPT, use_cache=True)
    assert output.cache.layers[0].keys.shape[2] == PROMPT.shape[1], moved(
        "a pass does not return its cache as `cache`",
        "candidate_generator.py _context() and data/features.py _states()",
    )


def test_target_caches():
    dynamic = DynamicCache(config=tiny_model().config)
    static = StaticCache(config=tiny_model().config, max_cache_len=32)
    for cache, compileable in ((dynamic, False), (static, True)):
        name = type(cache).__name__
        cache.update(torch.ones(1, 2, 5, 8), torch.ones(1, 2, 5, 8), 0)
        assert cache.is_croppable is True, moved(
            f"{name}.is_croppable is gone", "candidate_generator.py check_inputs()"
        )
        assert cache.is_compileable is compileable, moved(
            f"{name}.is_compileable is not {compileable}", "candidate_generator.py _check_warm_cache()"
        )
        assert cache.layers[0].is_sliding is False, moved(
            f"layers of a {name} do not say whether they slide",
            "candidate_generator.py RetraceCandidateGenerator._begin()",
        )
        cache.layers[0].crop(-2)
        assert int(cache.layers[0].get_seq_length()) == int(cache.get_seq_length()) == 3, moved(
            f"a layer of a {name} cannot be cropped by itself", "generation.py _rolling_back()"
        )


def test_cache_layers():
    layer = DynamicLayer()
    layer.lazy_initialization(torch.ones(1, 2, 5, 8), torch.ones(1, 2, 5, 8))
    layer.keys = layer.values = torch.ones(1, 2, 5, 8)
    assert layer.get_seq_length() == 5 and Cache(layers=[layer]).get_seq_length() == 5, moved(
        "Cache(layers=[...]) of DynamicLayers does not count their keys", "roomy_cache.py"
    )
    layer.crop(-2)
    assert layer.keys.shape[2] == 3, moved("DynamicLayer.crop(-n) does not drop n", "roomy_cache.py")


# -- the drafter's own parts -----------------------------------------------------------------------------------------


def test_masks():
    from transformers.masking_utils import create_bidirectional_mask

    needed = {"config", "inputs_embeds", "attention_mask", "cache"}
    assert needed <= set(parameters(create_bidirectional_mask)), moved(
        f"create_bidirectional_mask takes {parameters(create_bidirectional_mask)}", "modeling_retrace.py forward()"
    )


def test_attention_implementation():
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    stands = "modeling_retrace.py RetraceAttention.forward()"
    assert getattr(tiny_model().config, "_attn_implementation", None) == "sdpa", moved(
        "a model's config does not name its attention as _attn_implementation",
        stands,
        "there, in training/rollout.py, data/self_chat.py and candidate_generator.py _check_options()",
    )
    default = modeling_qwen3.eager_attention_forward
    assert ALL_ATTENTION_FUNCTIONS.get_interface("eager", default) is default, moved(
        "ALL_ATTENTION_FUNCTIONS.get_interface(name, default) changed", stands
    )
    needed = ["module", "query", "key", "value", "attention_mask", "scaling", "dropout"]
    assert parameters(default)[: len(needed)] == needed, moved(f"eager attention takes {parameters(default)}", stands)


def test_qwen3_parts():
    config = tiny_model().config
    stands = "modeling_retrace.py", "there, or take the part over"
    assert parameters(modeling_qwen3.Qwen3MLP.__init__)[1] == "config", moved("Qwen3MLP takes no config", *stands)
    assert parameters(modeling_qwen3.Qwen3RMSNorm.__init__)[1:] == ["hidden_size", "eps"], moved(
        f"Qwen3RMSNorm takes {parameters(modeling_qwen3.Qwen3RMSNorm.__init__)}", *stands
    )
    rotary = modeling_qwen3.Qwen3RotaryEmbedding(config)
    cos, sin = rotary(torch.ones(1, 4, 32), torch.arange(4)[None])
    assert cos.shape == sin.shape == (1, 4, config.head_dim), moved(
        f"Qwen3RotaryEmbedding gives {tuple(cos.shape)}, not [b, n, head_dim]", *stands
    )
    assert callable(getattr(rotary, "compute_default_rope_parameters", None)), moved(
        "Qwen3RotaryEmbedding.compute_default_rope_parameters is gone", "modeling_retrace.py RetraceRotaryEmbedding"
    )


def test_transformers_own_generator_calls_a_drafter_by_keyword():
    from .fixtures import plain, tiny_drafter

    drafter, calls = tiny_drafter(tiny_model()), []
    drafter.register_forward_pre_hook(lambda module, args, kwargs: calls.append((args, set(kwargs))), with_kwargs=True)
    plain(tiny_model(), PROMPT, 5, assistant_model=drafter, speculation_type="dflash")
    expected = {"noise_embeds", "context_hidden_states", "position_ids", "attention_mask", "cache"}
    assert calls and all(not args and names == expected for args, names in calls), moved(
        f"DFlashTokenCandidateGenerator calls a drafter with {sorted(calls[0][1])}",
        "modeling_retrace.py RetraceDrafter.forward()",
    )
    assert issubclass(DFlashTokenCandidateGenerator, CandidateGenerator)


def test_model_flags():
    for flag in [name for name, test in CONTRACTS.items() if test == "test_model_flags"]:
        assert hasattr(PreTrainedModel, flag) or hasattr(tiny_model(), flag), moved(
            f"PreTrainedModel has no {flag}",
            "modeling_retrace.py RetracePreTrainedModel",
            "there and in initialization.py",
        )


def test_recurrent_states_are_kept():
    from transformers.cache_utils import LinearAttentionCacheLayerMixin, LinearAttentionLayer

    stands = "recurrent_states.py"
    assert tiny_model()._supports_default_dynamic_cache() is True, moved(
        "a model does not say what cache it has", stands
    )
    if not hasattr(Cache, "get_recurrent_states_to_keep"):  # before 5.25, where such targets are refused
        flag = any(getattr(c, "_is_stateful", None) is not None for c in PreTrainedModel.__mro__)
        assert flag, moved("PreTrainedModel has no _is_stateful, and caches keep no recurrent states", stands)
        return
    layer = LinearAttentionLayer()
    assert isinstance(layer, LinearAttentionCacheLayerMixin), moved("recurrent layers are of another class", stands)
    layer.activate_past_recording(recurrent_states_to_keep=4)
    for tokens in (3, 4):
        layer.update_conv_state(torch.ones(1, 2, tokens), conv_kernel_size=2)
        layer.update_recurrent_state([torch.full((1, 2), float(i)) for i in range(tokens)])
        if tokens == 3:
            layer.crop(0)
    assert int(layer.cumulative_length_linear) == 7, moved("recurrent layers count their tokens otherwise", stands)
    assert [float(t[0, 0]) for t in layer.recurrent_states_history[0]] == [2, 0, 1, 2], moved(
        "recurrent layers keep other states than the one before a pass and those of all but its last token", stands
    )
    for name in ("conv_states", "recurrent_states", "is_conv_states_initialized", "has_previous_state"):
        assert set(getattr(layer, name)) == {0}, moved(f"recurrent layers keep {name} otherwise", stands)
    layer.crop(-3)
    assert float(layer.recurrent_states[0][0, 0]) == 0 and layer.conv_states[0].shape[-1] == 2, moved(
        "recurrent layers are cropped otherwise", stands
    )


def test_initialization():
    from transformers import initialization as init

    weight = torch.nn.Parameter(torch.zeros(2))
    weight._is_hf_initialized = True
    init.copy_(weight, torch.ones(2))
    assert not weight.any(), moved(
        "transformers.initialization.copy_ overwrites what a checkpoint has filled",
        "modeling_retrace.py RetracePreTrainedModel._init_weights()",
    )
    assert parameters(PreTrainedModel._init_weights) == ["self", "module"], moved(
        "PreTrainedModel._init_weights takes something else than a module", "modeling_retrace.py _init_weights()"
    )


def test_loading_info(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    _, info = type(tiny_model()).from_pretrained(tmp_path, output_loading_info=True)
    needed = {"missing_keys", "unexpected_keys", "mismatched_keys"}
    assert needed <= set(info), moved(
        f"output_loading_info holds {sorted(info)}", "modeling_retrace.py RetraceDrafter.from_pretrained()"
    )


def test_configs_name_their_origin():
    assert hasattr(tiny_model().config, "_name_or_path"), moved(
        "a config does not name its origin as _name_or_path", "data/features.py target_fingerprint()"
    )


def test_modules_are_cast():
    stands = "modeling_retrace.py RetraceRotaryEmbedding._apply()"
    asked = []

    class Rotary(torch.nn.Module):
        def _apply(self, fn, recurse=True):
            asked.append(fn(torch.ones(1)).dtype)
            return super()._apply(fn, recurse)

    assert parameters(torch.nn.Module._apply) == ["self", "fn", "recurse"], moved("Module._apply has changed", stands)
    module = torch.nn.Sequential(Rotary())
    module.to(torch.bfloat16).half().float().to("cpu")
    expected = [torch.bfloat16, torch.float16, torch.float32, torch.float32]
    assert asked == expected, moved("Casts of a module do not come through its parts' _apply", stands)


def test_module_hooks():
    for name in ("_forward_hooks", "_forward_pre_hooks"):
        assert isinstance(getattr(torch.nn.Linear(1, 1), name, None), dict), (
            f"torch {torch.__version__}: a module keeps no {name}. retrace_hf/few_rows.py "
            "is_plain_linear() stands on it; mend it there."
        )


def test_tensors_count_what_is_written_to_them():
    weight = torch.nn.Parameter(torch.zeros(2))
    before = getattr(weight, "_version", None)
    with torch.no_grad():
        weight.add_(1)
    assert before is not None and weight._version > before, (
        f"torch {torch.__version__}: a tensor keeps no count of writes. retrace_hf/draft_vocabulary.py _state_of() "
        "stands on it; mend it there."
    )


# -- criteria and processors -----------------------------------------------------------------------------------------


def test_stopping_criteria():
    from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

    stands = "candidate_generator.py _split_criteria()"
    assert MaxLengthCriteria(7).max_length == 7, moved("MaxLengthCriteria does not tell its max_length", stands)
    found = EosTokenCriteria([3, 4]).eos_token_id
    assert isinstance(found, torch.Tensor) and found.flatten().tolist() == [3, 4], moved(
        "EosTokenCriteria does not tell its eos_token_id as a tensor", stands
    )


# -- Hub and pipelines -----------------------------------------------------------------------------------------------


def test_relative_import_files(tmp_path):
    from transformers.dynamic_module_utils import get_relative_import_files

    (tmp_path / "a.py").write_text("def f():\n    from .b import x\n")
    (tmp_path / "b.py").write_text("from .c import (\n    y,\n)\n")
    (tmp_path / "c.py").write_text("")
    found = {Path(file).name for file in get_relative_import_files(tmp_path / "a.py")}
    assert found == {"b.py", "c.py"}, moved(
        f"get_relative_import_files() finds {found} behind a.py -> b.py -> c.py", "hub.py code_files()"
    )


def test_custom_generate_can_tell_its_folder(tmp_path, monkeypatch):
    told = {}

    def generate(model, **kwargs):
        told.update(kwargs, folder=inspect.currentframe().f_back.f_locals.get("custom_generate"))

    monkeypatch.setattr(GenerationMixin, "load_custom_generate", lambda self, *args, **kwargs: generate)
    tiny_model().generate(PROMPT, custom_generate="a/folder", trust_remote_code=True, revision="main")
    stands = "folder_generate.py generate()"
    assert told["folder"] == "a/folder", moved(
        "GenerationMixin.generate() does not call a custom generate function from where its own argument "
        "custom_generate can be read",
        stands,
    )
    assert told["revision"] == "main" and "trust_remote_code" not in told and "custom_generate" not in told, moved(
        f"a custom generate function gets {sorted(told)}", stands
    )


def test_pipelines(monkeypatch):
    from transformers.pipelines.base import load_model

    asked = {}

    class Loaded:
        @classmethod
        def from_pretrained(cls, path, **kwargs):
            asked.update(kwargs)
            return torch.nn.Identity()

    monkeypatch.setattr(sys.modules["transformers"], "SomeDrafter", Loaded, raising=False)
    config = type("Config", (), {"architectures": ["SomeDrafter"]})
    load_model("a/folder", config=config)
    assert "_from_pipeline" in asked, moved(
        "pipelines do not look a model's class up by its name in transformers, or do not say _from_pipeline",
        "__init__.py (transformers.RetraceDrafter) and modeling_retrace.py _check_has_tokenizer()",
    )


def test_pushing_to_the_hub():
    found = parameters(PreTrainedModel._upload_modified_files)
    assert found[:3] == ["self", "working_dir", "repo_id"], moved(
        f"_upload_modified_files takes {found}", "modeling_retrace.py RetraceDrafter._upload_modified_files()"
    )
    assert "_upload_modified_files" in inspect.getsource(PreTrainedModel.save_pretrained), moved(
        "save_pretrained(push_to_hub=True) does not upload through _upload_modified_files",
        "modeling_retrace.py RetraceDrafter.save_pretrained()",
    )


def test_the_card_that_transformers_makes_up(monkeypatch):
    from transformers.utils import hub

    from retrace_hf.hub import is_own

    def nothing_there(*args, **kwargs):
        raise hub.EntryNotFoundError("no card")

    monkeypatch.setattr(hub.ModelCard, "load", nothing_there)
    card = hub.create_and_tag_model_card("ada/drafter", ["mine"])
    assert card.data.tags == ["mine"] and not is_own(str(card)), moved(
        "the card that transformers makes up for a repository has another text", "hub.py _STUB"
    )


# -- training --------------------------------------------------------------------------------------------------------


def test_trainer():
    stands = "training/trainer.py RetraceTrainer"
    overridden = {
        "get_batch_samples": ["self", "epoch_iterator", "num_batches", "device"],
        "compute_loss": ["self", "model", "inputs", "return_outputs", "num_items_in_batch"],
        "prediction_step": ["self", "model", "inputs", "prediction_loss_only", "ignore_keys"],
        "create_optimizer": ["self", "model"],
        "get_decay_parameter_names": ["self", "model"],
        "_prepare_inputs": ["self", "inputs"],
        "evaluate": ["self", "eval_dataset", "ignore_keys", "metric_key_prefix"],
        "call_model_init": ["self", "trial"],
        "_save_checkpoint": ["self", "model", "trial"],
        "_push_from_checkpoint": ["self", "checkpoint_folder"],
        "create_model_card": [
            *("self", "language", "license", "tags", "model_name", "finetuned_from", "tasks"),
            *("dataset_tags", "dataset", "dataset_args"),
        ],
        "_get_output_dir": ["self", "trial"],
        "_track_num_input_tokens": ["self", "inputs"],
        "_set_signature_columns_if_needed": ["self"],
    }
    for name, expected in overridden.items():
        found = parameters(getattr(Trainer, name))
        assert found == expected, moved(f"Trainer.{name} takes {found}, not {expected}", f"{stands}.{name}()")
    assert parameters(Trainer.log)[:2] == ["self", "logs"], moved("Trainer.log changed", f"{stands}.log()")
    assert "metric_key_prefix" in parameters(Trainer.evaluation_loop), moved(
        "Trainer.evaluation_loop changed", f"{stands}.evaluation_loop()"
    )
    source = inspect.getsource(Trainer)
    for name in ("loss_is_scaled_for_ga", "model_accepts_loss_kwargs", "_signature_columns", "_run_epoch("):
        assert f"self.{name}" in source, moved(f"Trainer does not look at {name}", f"{stands}.__init__()")
    # The checkpoint's state comes last: it says that the rest is whole.
    save = inspect.getsource(Trainer._save_checkpoint)
    order = [save.index(part) for part in ("save_model", "_save_rng_state", "TRAINER_STATE_NAME", "push_to_hub")]
    assert order == sorted(order), moved(
        "Trainer._save_checkpoint writes in another order", f"{stands}, checkpoints.py"
    )


def test_forward_under_mixed_precision():
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # another test's may be of another precision
    model = torch.nn.Linear(2, 2)
    Accelerator(cpu=True, mixed_precision="bf16").prepare_model(model)
    assert vars(model)["_original_forward"].__func__ is torch.nn.Linear.forward and "forward" in vars(model), moved(
        "accelerate does not keep the forward that it wraps as _original_forward",
        "training/trainer.py RetraceTrainer._as_it_is_saved()",
    )
    AcceleratorState._reset_state(reset_partial_state=True)
