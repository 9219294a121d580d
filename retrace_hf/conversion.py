"""DFlash checkpoints of the ecosystem, read into the fields and keys of a [`RetraceDrafter`].

They are written in `export.py`, which a drafter's folder does not need: `from_dflash` reads alone.
"""

import json
import os
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from safetensors.torch import load_file
from transformers import MuseGlimmerAssistantConfig, PreTrainedModel, Qwen3Config
from transformers.utils import logging

from .configuration_retrace import CONTEXT_FIELDS, READS_TARGET_KV, RetraceConfig
from .context import default_kv_layer_ids
from .draft_vocabulary import check_token_ids
from .initialization import target_kv_fields, without_mrope
from .positions import fit_steps


logger = logging.get_logger(__name__)

TOKEN_IDS = ("pad_token_id", "bos_token_id", "eos_token_id")
# Fields that mean the same in every layout.
SHAPE_FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "attention_bias"),
    *("num_target_layers", *TOKEN_IDS),
)
# Fields that our own layout has beside these.
_OWN_FIELDS = (
    *("context_window", "proposal", "draft_vocab_size"),
    *("item_slots", "item_token_ranges", "item_separator_id", "step_embeddings"),
)
# What other projects' configs may say of how the same weights are used, and the one value that we have too.
_USED_AS = {
    "causal": False,
    "is_causal": False,
    "use_swa": False,
    "is_neox_style": True,
    "rope_is_neox_style": True,
    "attention_sink_bias": False,
    "add_swa_attention_sink_bias": False,
    "sample_from_anchor": False,
    "shift_label": False,
    "projector_type": "dflash",
    "use_aux_hidden_state": True,
    "quantization_config": None,
}
NATIVE_KEYS = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
# In a speculators checkpoint copies of the target's, which we borrow from the target itself.
BORROWED_KEYS = ("embed_tokens.weight", "lm_head.weight", "t2d", "d2t")
TOKEN_TABLE = "draft_token_ids"
STEP_ROWS = "step_embedding.table.weight"


def load_dflash(path_or_model: str | os.PathLike | PreTrainedModel) -> tuple[dict, dict[str, torch.Tensor]]:
    """Reads a DFlash drafter, or a ReTrace, which is one with a signal beside it.

    Args:
        path_or_model: A Hub id or folder with `config.json` and safetensors weights, or a loaded model.

    Returns:
        `tuple(dict, dict)`: fields of [`RetraceConfig`], `conditioning` among them, and the state by our (z-lab's)
        names.

    Raises:
        ValueError: the layout is not one that can be opened as DFlash; the message names it.
    """
    if isinstance(path_or_model, PreTrainedModel):
        raw, state = path_or_model.config.to_dict(), dict(path_or_model.state_dict())
    else:
        raw, state = read_checkpoint(local_folder(path_or_model))
    state = dflash_state(raw, state)
    conditioning = raw.get("conditioning", RetraceConfig.conditioning) if layout_of(raw) == "retrace" else "none"
    return {**dflash_fields(raw), **table_fields(state), "conditioning": conditioning}, state


def keep_signal(state: dict[str, torch.Tensor], conditioning: str, wanted: str) -> dict[str, torch.Tensor]:
    """A checkpoint's state without the modules of its signal, where the drafter is wanted with another conditioning
    than the checkpoint was trained with."""
    if conditioning in ("none", wanted):
        return state
    kept = {name: weight for name, weight in state.items() if not name.startswith("trajectory.")}
    if wanted != "none":
        logger.warning(
            f"The checkpoint was trained with conditioning={conditioning!r}: the backbone is kept, and the modules of "
            f"conditioning={wanted!r} start anew."
        )
    return kept


def dflash_fields(raw: dict) -> dict:
    """Translates the `config.json` of a DFlash, in any layout, to fields of [`RetraceConfig`]."""
    layout = layout_of(raw)
    flat = _flat(raw, layout)
    fields = {name: flat[name] for name in SHAPE_FIELDS if flat.get(name) is not None}
    for name in ("block_size", "mask_token_id", "target_layer_ids"):
        if flat.get(name) is None:
            raise ValueError(f"The checkpoint's config names no {name}.")
        fields[name] = flat[name]
    if layout == "retrace":
        fields |= {name: flat[name] for name in (*CONTEXT_FIELDS, *_OWN_FIELDS) if flat.get(name) is not None}
    fields["rope_parameters"] = _rope(flat)
    _refuse_other_use(flat)
    return fields


def _flat(raw: dict, layout: str) -> dict:
    """A config with all fields on one level; where a layout's class fills in what its file does not say, so do we:
    that is what the checkpoint runs with."""
    if layout == "native":
        # Its token ids are another model's where the file has none.
        return {**MuseGlimmerAssistantConfig(**raw).to_dict(), **{name: raw.get(name) for name in TOKEN_IDS}}
    if layout == "speculators":
        inner = raw.get("transformer_layer_config") or {}
        if inner.get("model_type", "qwen3") != "qwen3":
            raise ValueError(
                f"This speculators checkpoint has layers of {inner['model_type']!r}; only those of 'qwen3' are ours."
            )
        taps = raw.get("aux_hidden_state_layer_ids")
        if taps is None:
            raise ValueError("The checkpoint's config names no aux_hidden_state_layer_ids.")
        return {**Qwen3Config(**inner).to_dict(), **raw, "target_layer_ids": [i - 1 for i in taps]}
    nested = {name: value for name, value in (raw.get("dflash_config") or {}).items() if raw.get(name) is None}
    return {**raw, **nested}


def _refuse_other_use(flat: dict) -> None:
    """Raises a ValueError if a config says that the weights are used in a way that ours are not."""
    other = [f"{name}={flat[name]!r}" for name, ours in _USED_AS.items() if flat.get(name, ours) not in (ours, None)]
    if flat.get("target_hidden_size") not in (None, flat.get("hidden_size")):
        other.append(f"target_hidden_size={flat['target_hidden_size']} for hidden_size={flat.get('hidden_size')}")
    if other:
        raise ValueError(f"The checkpoint's config has {', '.join(other)}: no drafter of ours can draft so.")
    kinds = set(
        flat.get("layer_types") or ["sliding_attention" if flat.get("use_sliding_window") else "full_attention"]
    )
    if kinds != {"full_attention"}:
        raise ValueError(
            f"The checkpoint's layer_types are {sorted(kinds)}; only full attention means the same in every layout."
        )


def complete_from_target(fields: dict, target_config) -> dict:
    """Fields with what a layout may not say and the target's config does: its layers and embedding rows."""
    text = target_config.get_text_config(decoder=True)
    return {"num_target_layers": text.num_hidden_layers, "vocab_size": text.vocab_size, **fields}


def check_same_context(fields: dict, config: dict, source: str, wanted: str) -> None:
    """Raises a ValueError if `config` points weights of the checkpoint at other layers of the target than they were
    trained for, or changes how they read them."""
    fixed = {"target_layer_ids"} if source != "kv" and wanted != "kv" else set()
    if source in READS_TARGET_KV:
        fixed |= set(CONTEXT_FIELDS) - {"context_fusion", "target_layer_ids"}
    for name in sorted(fixed & set(config)):
        if config[name] is not None and config[name] != fields.get(name):
            raise ValueError(
                f"{name} is {config[name]} and the checkpoint was trained with {fields.get(name)}; leave out {name}, "
                "or make a new drafter with RetraceDrafter.from_target()."
            )


def changed_fusion(fields: dict, source: str, target: PreTrainedModel | None) -> dict:
    """Fields of [`RetraceConfig`] that ask for another context than the checkpoint's, with what they need beside it.

    Raises:
        ValueError: the checkpoint's context cannot become this one.
    """
    wanted = fields["context_fusion"]
    if source != "shared":
        raise ValueError(
            f"The checkpoint has context_fusion={source!r}, and only 'shared' can become another: {wanted!r} reads "
            "the target with modules that it has no start for. Leave context_fusion out to keep the checkpoint's, or "
            "start from a DFlash one."
        )
    if wanted == "kv":
        fields = {**fields, "target_layer_ids": []}
    if wanted in READS_TARGET_KV:
        ids = fields.get("target_kv_layer_ids")
        if target is not None:
            fields = {**target_kv_fields(target, ids), **fields}
        elif ids is None and fields.get("num_target_layers") is not None:
            fields = {**fields, "target_kv_layer_ids": default_kv_layer_ids(fields["num_target_layers"])}
    return fields


def dflash_state(raw: dict, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A drafter's weights by our names. Rotary buffers are dropped, and a speculators checkpoint's copies of the
    target's weights; its tables of a trimmed vocabulary become ours; all else is kept for the key check."""
    layout = layout_of(raw)
    rename = NATIVE_KEYS if layout == "native" else {}
    dropped = BORROWED_KEYS if layout == "speculators" else ()
    ours = {rename.get(k, k): v for k, v in state.items() if "rotary_emb" not in k and k not in dropped}
    table = _speculators_table(raw, state) if layout == "speculators" else None
    return ours if table is None else {**ours, TOKEN_TABLE: table}


def table_fields(state: dict[str, torch.Tensor]) -> dict:
    """What a drafter's config says of its table of drafted tokens, if it has one."""
    return {"draft_vocab_size": len(state[TOKEN_TABLE])} if TOKEN_TABLE in state else {}


def _speculators_table(raw: dict, state: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """The target's tokens that a speculators checkpoint drafts among, `[Vd]`; `None` where they are all."""
    size, drafted = _flat(raw, "speculators")["vocab_size"], raw.get("draft_vocab_size")
    if "d2t" in state:
        token_ids = torch.arange(len(state["d2t"])) + state["d2t"]
    elif "t2d" in state:
        token_ids = state["t2d"].nonzero()[:, 0]
    else:
        token_ids = torch.arange(size if drafted is None else drafted)
        if len(token_ids) != size:
            raise ValueError(
                f"The checkpoint has draft_vocab_size={drafted} of the target's {size} tokens and neither d2t nor t2d "
                "that says which; take it from where they are beside it."
            )
    if drafted not in (None, len(token_ids)):
        raise ValueError(f"The checkpoint has draft_vocab_size={drafted} and {len(token_ids)} tokens in d2t or t2d.")
    check_token_ids(token_ids, size)
    return None if len(token_ids) == size else token_ids


def check_state(wanted: dict[str, torch.Tensor], state: dict[str, torch.Tensor]) -> None:
    """Raises a ValueError that names the keys which are missing, unknown, or of another shape than wanted."""
    if set(wanted) != set(state):
        raise ValueError(
            f"The checkpoint is not the DFlash that its config describes. Missing: {sorted(set(wanted) - set(state))}"
            f"; unknown: {sorted(set(state) - set(wanted))}."
        )
    shapes = {k: (tuple(state[k].shape), tuple(v.shape)) for k, v in wanted.items()}
    bad = [f"{k} is {found}, not {expected}" for k, (found, expected) in shapes.items() if found != expected]
    if bad:
        raise ValueError(f"The checkpoint's weights do not have the shapes that its config gives: {'; '.join(bad)}.")


def load_backbone(drafter: PreTrainedModel, state: dict[str, torch.Tensor]) -> None:
    """Fills a new drafter with a checkpoint's weights, in the checkpoint's dtype. Modules that the checkpoint knows
    nothing of stay as they were initialised: they change no draft.

    Raises:
        ValueError: the keys or shapes are not those of the drafter.
    """
    known = {key.split(".")[0] for key in state}
    added = {"trajectory", "item_slot_embedding", "step_embedding"} - known
    if drafter.step_embedding is not None and STEP_ROWS in state:
        state = {**state, STEP_ROWS: fit_steps(state[STEP_ROWS], drafter.config.block_size)}
    check_state({k: v for k, v in drafter.state_dict().items() if k.split(".")[0] not in added}, state)
    drafter.load_state_dict(state, strict=False)
    if TOKEN_TABLE in state:
        check_token_ids(state[TOKEN_TABLE], drafter.config.vocab_size)
    drafter.to(dtype_of(state)).eval()


def dtype_of(state: dict[str, torch.Tensor]) -> torch.dtype:
    """What a checkpoint's weights are stored in: the first one's dtype; a table of tokens has one of its own."""
    return next(weight.dtype for weight in state.values() if weight.is_floating_point())


# -- layouts and files -----------------------------------------------------------------------------------------------


def layout_of(raw: dict) -> str:
    """The layout of a checkpoint by its `config.json`: `"retrace"`, `"native"`, `"speculators"` or `"z-lab"`.

    Raises:
        ValueError: another one, by name.
    """
    architectures = raw.get("architectures") or []
    names = [*architectures, str(raw.get("speculators_model_type") or "")]
    if raw.get("model_type") == "retrace":
        return "retrace"
    if raw.get("model_type") == "muse_glimmer_assistant":
        return "native"
    if any("dspark" in name.lower() for name in names):
        raise ValueError(
            "This is a DeepSpec checkpoint: its slot 0 predicts the token behind the anchor, so every label is "
            "shifted by one and its weights cannot be opened as DFlash."
        )
    if raw.get("dflare_config") or any("dflare" in name.lower() for name in names):
        raise ValueError(
            "This is another project's DFlare checkpoint, whose layout is not known here; train one with "
            "context_fusion='layerwise', or start it from a DFlash."
        )
    if raw.get("speculators_model_type"):
        if raw["speculators_model_type"] == "dflash":
            return "speculators"
        raise ValueError(
            f"This is a speculators checkpoint of the kind {raw['speculators_model_type']!r}; only 'dflash' is known."
        )
    if any(name.endswith("DFlashDraftModel") for name in architectures):
        return "z-lab"
    if raw.get("dflash_config") and not architectures:
        return "z-lab"
    raise ValueError(
        f"No DFlash layout is known for model_type={raw.get('model_type')!r}, architectures={architectures}; known "
        "are z-lab (DFlashDraftModel), transformers-native (muse_glimmer_assistant), speculators (dflash) and retrace."
    )


def _rope(flat: dict) -> dict:
    rope = without_mrope(flat.get("rope_parameters") or flat.get("rope_scaling") or {})
    if rope.get("rope_theta") is None:
        if flat.get("rope_theta") is None:
            raise ValueError("The checkpoint's config names no rope_theta.")
        rope["rope_theta"] = flat["rope_theta"]
    return rope


def local_folder(
    path: str | os.PathLike,
    revision: str | None = None,
    patterns: tuple[str, ...] = ("*.json", "*.safetensors"),
) -> Path:
    """A checkpoint's folder: `path` itself, or where the Hub's repository of that name is kept."""
    if Path(path).is_dir():
        if revision is not None:
            raise ValueError(f"{path} is a folder, and a revision is a Hub repository's; leave out revision.")
        return Path(path)
    try:
        return Path(snapshot_download(str(path), revision=revision, allow_patterns=list(patterns)))
    except (HFValidationError, OSError) as error:  # not an id; no such repository, no Hub
        why = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{path} is neither a folder nor a repository that the Hub has ({type(error).__name__}: {why}). Give the "
            "folder of a checkpoint, or its Hub id."
        ) from error


def read_checkpoint(folder: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    """`config.json` and the weights of a folder, as they are there."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} holds no config.json, so there is no drafter in it.")
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    state = {}
    for file in _weight_files(folder):
        state.update(load_file(file))
    return raw, state


def _weight_files(folder: Path) -> list[Path]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        missing = [name for name in shards if not (folder / name).is_file()]
        if missing:
            raise ValueError(f"{folder} lacks {', '.join(missing)}, which {index.name} names.")
        return [folder / name for name in shards]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} holds no .safetensors weights.")
    if len(files) > 1:
        raise ValueError(
            f"{folder} holds {', '.join(file.name for file in files)} and no {index.name} that says which of them are "
            "the checkpoint's."
        )
    return files
