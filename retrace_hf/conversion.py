"""DFlash checkpoints of the ecosystem, read into the fields and keys of a [`RetraceDrafter`]."""

import json
import os
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from safetensors.torch import load_file
from transformers import PreTrainedModel

from .configuration_retrace import CONTEXT_FIELDS, READS_TARGET_KV
from .context import default_kv_layer_ids
from .initialization import target_kv_fields


# Shape fields that mean the same in every layout.
_SHAPE_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "attention_bias",
    "num_target_layers",
    "context_window",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
)
# Fields that our own layout has beside these.
_OWN_FIELDS = ("proposal", "item_slots", "item_token_ranges", "item_separator_id", "step_embeddings")
_NATIVE_KEYS = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}


def load_dflash(path_or_model: str | os.PathLike | PreTrainedModel) -> tuple[dict, dict[str, torch.Tensor]]:
    """Reads a DFlash drafter.

    Args:
        path_or_model: A Hub id or folder with `config.json` and safetensors weights, or a loaded model.

    Returns:
        `tuple(dict, dict)`: fields of [`RetraceConfig`], and the backbone's state by our (z-lab's) names.

    Raises:
        ValueError: the layout is not one that can be opened as DFlash; the message names it.
    """
    if isinstance(path_or_model, PreTrainedModel):
        raw, state = path_or_model.config.to_dict(), dict(path_or_model.state_dict())
    else:
        folder = local_folder(path_or_model)
        raw, state = json.loads((folder / "config.json").read_text()), _read_weights(folder)
    return dflash_fields(raw), dflash_state(raw, state)


def dflash_fields(raw: dict) -> dict:
    """Translates a DFlash `config.json` to fields of [`RetraceConfig`]."""
    layout = _layout(raw)
    nested = raw.get("dflash_config") or {}
    fields = {name: raw[name] for name in _SHAPE_FIELDS if raw.get(name) is not None}
    for name in ("block_size", "mask_token_id", "target_layer_ids"):
        value = raw.get(name) if raw.get(name) is not None else nested.get(name)
        if value is None:
            raise ValueError(f"The checkpoint's config names no {name}.")
        fields[name] = value
    if layout == "retrace":
        fields |= {name: raw[name] for name in CONTEXT_FIELDS if raw.get(name) is not None}
        fields |= {name: raw[name] for name in _OWN_FIELDS if raw.get(name) is not None}
    fields["rope_parameters"] = _rope(raw, layout)
    kinds = set(raw.get("layer_types") or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ValueError(
            f"The checkpoint's layer_types are {sorted(kinds)}; only full attention means the same in every layout."
        )
    return fields


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
    """The backbone's weights by our names; rotary buffers are dropped, all else is kept for the key check."""
    rename = _NATIVE_KEYS if _layout(raw) == "native" else {}
    return {rename.get(k, k): v for k, v in state.items() if "rotary_emb" not in k}


def _layout(raw: dict) -> str:
    architectures = raw.get("architectures") or []
    if raw.get("model_type") == "retrace":
        if raw.get("conditioning") != "none":
            raise ValueError(
                f"This is a ReTrace checkpoint (conditioning={raw.get('conditioning')!r}); open it with "
                "RetraceDrafter.from_pretrained(), and start training from a DFlash one (conditioning 'none')."
            )
        return "retrace"
    if raw.get("model_type") == "muse_glimmer_assistant":
        return "native"
    if any("DSpark" in name for name in architectures):
        raise ValueError(
            "This is a DeepSpec checkpoint: its slot 0 predicts the token behind the anchor, so every label is "
            "shifted by one and its weights cannot be opened as DFlash."
        )
    if raw.get("speculators_model_type"):
        raise ValueError("This is a speculators checkpoint; opening that layout is not supported yet.")
    if raw.get("dflash_config") or "DFlashDraftModel" in architectures:
        return "z-lab"
    raise ValueError(
        f"No DFlash layout is known for model_type={raw.get('model_type')!r}, architectures={architectures}; known "
        "are z-lab (DFlashDraftModel), transformers-native (muse_glimmer_assistant) and retrace with "
        "conditioning='none'."
    )


def _rope(raw: dict, layout: str) -> dict:
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    rope.setdefault("rope_type", rope.pop("type", "default"))
    if "rope_theta" not in rope:
        # The native class fills in 500000 silently where its file says nothing; what it would run with is right.
        theta = raw.get("rope_theta") or (500000.0 if layout == "native" else None)
        if theta is None:
            raise ValueError("The checkpoint's config names no rope_theta.")
        rope["rope_theta"] = theta
    return rope


def local_folder(path: str | os.PathLike) -> Path:
    """A checkpoint's folder, fetched where it is on the Hub."""
    if Path(path).is_dir():
        return Path(path)
    try:
        return Path(snapshot_download(str(path), allow_patterns=["*.json", "*.safetensors"]))
    except (HFValidationError, OSError) as error:  # not an id; no such repository, no Hub
        why = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{path} is neither a folder nor a repository that the Hub has ({type(error).__name__}: {why}). Give the "
            "folder of a checkpoint, or its Hub id."
        ) from error


def _read_weights(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} holds no .safetensors weights.")
    state = {}
    for file in files:
        state.update(load_file(file))
    return state
