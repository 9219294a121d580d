"""Drafters in the formats of other projects: `retrace-hf convert`.

| `to` | The folder | Who reads it |
|---|---|---|
| `"retrace"` | ours, code included | `RetraceDrafter.from_pretrained`, `AutoModel` with `trust_remote_code` |
| `"z-lab"` | `DFlashDraftModel` | SGLang, vLLM, Model-Optimizer, z-lab's own scripts |
| `"native"` | `MuseGlimmerAssistantModel` | transformers' own DFlash generator |
| `"speculators"` | `DFlashSpeculator`, with the target's embeddings and LM head | vLLM, speculators |

Every source is read into our fields and keys (`conversion.py`), and written from them; no weight is computed with, so
there and back is bit for bit. What a format cannot hold is refused by name, or left out by an option of that name.
"""

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, MuseGlimmerAssistantConfig

from .configuration_retrace import RetraceConfig
from .conversion import (
    BORROWED_KEYS,
    NATIVE_KEYS,
    SHAPE_FIELDS,
    TOKEN_IDS,
    TOKEN_TABLE,
    check_state,
    complete_from_target,
    dflash_fields,
    dflash_state,
    dtype_of,
    layout_of,
    local_folder,
    read_checkpoint,
    table_fields,
)
from .draft_vocabulary import check_token_ids
from .files import folder_written_whole, write_text
from .hub import AUTO_MAP, code_files, write_code
from .modeling_retrace import RetraceDrafter
from .targets import load_target


FORMATS = ("retrace", "z-lab", "native", "speculators")
HOLD_TABLE = ("retrace", "speculators")  # what is drafted among a part of the vocabulary
DTYPES = ("float32", "bfloat16", "float16")
SPECULATORS_VERSION = "0.5.0"  # the first with DFlash

# Of the target or its text, not of the drafter's layout: they go along where the source has them.
CARRIED = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "chat_template.jinja", "chat_template.json"),
    *("generation_config.json", "LICENSE", "NOTICE"),
)


def convert(
    source: str | os.PathLike,
    output: str | os.PathLike,
    to: str,
    target: str | None = None,
    revision: str | None = None,
    dtype: str | None = None,
    drop_conditioning: bool = False,
    drop_rope_scaling: bool = False,
    drop_draft_vocabulary: bool = False,
    overwrite: bool = False,
) -> list[str]:
    """
    Writes a drafter in another format. The source's is recognised from its config and keys.

    Args:
        source (`str` or `os.PathLike`): Folder or Hub id of a drafter in any of [`FORMATS`].
        output (`str` or `os.PathLike`): Folder to write, as a whole or not at all.
        to (`str`): One of [`FORMATS`].
        target (`str`, *optional*):
            Hub id or folder of the target. Needed for `"speculators"`, which holds its embeddings and LM head, and
            where the source does not say how many layers and embedding rows it has.
        revision (`str`, *optional*): Of the source on the Hub.
        dtype (`str`, *optional*): One of [`DTYPES`], to cast all weights to; the source's by default.
        drop_conditioning (`bool`, defaults to `False`): Leave the rejected trajectory's signal out of a ReTrace.
        drop_rope_scaling (`bool`, defaults to `False`): Write rotary positions without their scaling.
        drop_draft_vocabulary (`bool`, defaults to `False`):
            Let a drafter of a part of the vocabulary draft among all of it.
        overwrite (`bool`, defaults to `False`):
            Replace a checkpoint that is in `output`; a folder that holds something else beside it is refused.

    Returns:
        `list[str]`: what was left out, a sentence each.

    Raises:
        ValueError: a source that is not known, weights that do not fit their config, what `to` cannot hold, or an
            `output` that holds something else.
    """
    for name, value, known in (("to", to, FORMATS), ("dtype", dtype, (None, *DTYPES))):
        if value not in known:
            raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(filter(None, known))}.")
    if to == "speculators" and target is None:
        raise ValueError(
            "The speculators format holds the target's embeddings and LM head; name the target with --target."
        )
    folder = local_folder(source, revision, ("*.json", "*.safetensors", *CARRIED))
    _check_output(Path(output), folder, overwrite)
    raw, weights = read_checkpoint(folder)
    left_out = []
    state = dflash_state(raw, weights)
    config = _config_of(raw, state, target)
    with torch.device("meta"):
        check_state(RetraceDrafter(config).state_dict(), state)
    if TOKEN_TABLE in state:
        check_token_ids(state[TOKEN_TABLE], config.vocab_size)
    if layout_of(raw) == "speculators":
        left_out += _without_borrowed(weights, state.get(TOKEN_TABLE), target)
    if config.conditioning != "none" and (drop_conditioning or to != "retrace"):
        left_out.append(_without_signal(config, state, to, drop_conditioning))
    if TOKEN_TABLE in state and (drop_draft_vocabulary or to not in HOLD_TABLE):
        left_out.append(_without_draft_vocabulary(config, state, to, drop_draft_vocabulary))
    if to != "retrace":
        left_out += _without_what_is_not_held(config, to, drop_rope_scaling)
    stored = raw.get("dtype") or raw.get("torch_dtype") or dtype_of(state)
    if dtype is not None:
        state, stored = {name: _cast(name, weight, dtype) for name, weight in state.items()}, dtype
    config.dtype = getattr(torch, str(stored).removeprefix("torch."))
    with folder_written_whole(output) as temporary:
        _write(temporary, config, state, to, target)
        for name in CARRIED:
            if (folder / name).is_file():
                shutil.copyfile(folder / name, temporary / name)
    return left_out


# -- the source ------------------------------------------------------------------------------------------------------


def _check_output(output: Path, source: Path, overwrite: bool) -> None:
    here, there = output.resolve(), source.resolve()
    if here == there or here in there.parents:
        raise ValueError(f"{output} is the source, or holds it; name another folder to write.")
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not (output / "config.json").is_file():
        raise ValueError(f"{output} is there and holds no checkpoint, so it is not written over; name another folder.")
    if not overwrite:
        raise ValueError(f"{output} holds a checkpoint; name another folder, or replace it with --overwrite.")
    code = {Path(name).parts[0] for name in code_files()}
    known = {"config.json", "model.safetensors.index.json", *CARRIED, *code}
    other = [path.name for path in output.iterdir() if path.name not in known and path.suffix != ".safetensors"]
    if other:
        raise ValueError(
            f"{output} holds {', '.join(sorted(other))} beside the checkpoint, and --overwrite would delete that; "
            "move it away, or name another folder."
        )


def _config_of(raw: dict, state: dict[str, torch.Tensor], target: str | None) -> RetraceConfig:
    """The source's config in our fields; a DFlash of another layout has no signal."""
    if layout_of(raw) == "retrace":
        return RetraceConfig.from_dict(raw)
    fields = {**dflash_fields(raw), **table_fields(state)}
    missing = [name for name in ("num_target_layers", "vocab_size") if name not in fields]
    if missing and target is None:
        raise ValueError(
            f"The source's config names no {' and no '.join(missing)}, which the target's does; name it with --target."
        )
    if missing:
        fields = complete_from_target(fields, _target_config(target))
    return RetraceConfig(**fields, conditioning="none")


def _target_config(target: str):
    try:
        return AutoConfig.from_pretrained(target)
    except OSError:  # no Hub; the default target also comes in a package
        return load_target(target)[0].config


def _cast(name: str, weight: torch.Tensor, dtype: str) -> torch.Tensor:
    if not weight.is_floating_point():
        return weight
    cast = weight.to(getattr(torch, dtype))
    if weight.isfinite().all() and not cast.isfinite().all():
        raise ValueError(f"{name} is too large for {dtype}; use --dtype bfloat16, or leave the dtype as it is.")
    return cast


# -- what is left out ------------------------------------------------------------------------------------------------


def _without_draft_vocabulary(config: RetraceConfig, state: dict[str, torch.Tensor], to: str, allowed: bool) -> str:
    """Lets a drafter draft among all tokens, in place; says what goes."""
    size = config.draft_vocab_size
    if not allowed:
        raise ValueError(
            f"The source drafts among {size} of the target's {config.vocab_size} tokens (draft_token_ids), which {to} "
            "cannot hold: what is written drafts among all of them, and may draft other tokens. Allow that with "
            "--drop-draft-vocabulary."
        )
    del state[TOKEN_TABLE]
    config.draft_vocab_size = None
    return (
        f"Left out: the draft vocabulary of {size} tokens (draft_token_ids). The weights are the same, and what is "
        f"written drafts among all of the target's {config.vocab_size} tokens."
    )


def _without_borrowed(
    weights: dict[str, torch.Tensor], token_ids: torch.Tensor | None, target: str | None
) -> list[str]:
    """The embeddings and LM head of a speculators checkpoint, over `token_ids` or all tokens, go if they are the
    target's own."""
    copies = {name: weights[name] for name in BORROWED_KEYS[:2] if name in weights}
    if not copies:
        return []
    if target is None:
        return [f"Left out: {', '.join(copies)}, unchecked; with --target they are compared with the target's."]
    embeddings, head = _target_weights(target, next(iter(copies.values())).dtype)[1:]
    if token_ids is not None:
        head = head[token_ids]
    for name, own in zip(BORROWED_KEYS, (embeddings, head)):
        if name in copies and not torch.equal(copies[name], own):
            raise ValueError(
                f"The source's {name} is not that of {target}, and a drafter of ours borrows the target's: it would "
                "draft other tokens. Name the target that it was trained for."
            )
    return []


def _without_signal(config: RetraceConfig, state: dict[str, torch.Tensor], to: str, allowed: bool) -> str:
    """Makes a DFlash of a ReTrace, in place; says what goes."""
    conditioning = config.conditioning
    if not allowed:
        raise ValueError(
            f"The source has conditioning={conditioning!r}, which {to} cannot hold: vLLM, SGLang and transformers' "
            "own generator would draft without the signal of the rejected suffix, and not say so. Write the DFlash "
            "backbone alone with --drop-conditioning; tau is then the backbone's."
        )
    gone = [name for name in state if name.startswith("trajectory.")]
    for name in gone:
        del state[name]
    config.conditioning = "none"
    tensors = f" ({', '.join(gone)})" if gone else ""
    return (
        f"Left out: the signal of the rejected suffix, conditioning={conditioning!r}{tensors}. What is written is "
        "plain DFlash, and its tau that of the backbone alone; generate(..., speculation_type='dflash') on the source "
        "measures it."
    )


def _without_what_is_not_held(config: RetraceConfig, to: str, drop_rope_scaling: bool) -> list[str]:
    """Raises a ValueError that names every field which `to` cannot hold; RoPE's scaling goes where that is allowed.
    The config is changed in place."""
    held = {"context_fusion": "shared", "context_window": None, "item_slots": 0, "step_embeddings": False}
    if to == "native":
        held["attention_bias"] = False
    other = [f"{name}={getattr(config, name)!r}" for name, plain in held.items() if getattr(config, name) != plain]
    rope = config.rope_parameters
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        other.append(f"partial_rotary_factor={rope['partial_rotary_factor']}")
    if other:
        raise ValueError(f"The source has {', '.join(other)}, which {to} cannot hold: it would draft otherwise there.")
    left_out = []
    if to != "native" and rope["rope_type"] != "default":
        if not drop_rope_scaling:
            raise ValueError(
                f"The source has rope_type={rope['rope_type']!r}, and {to} is written with rope_theta alone, which "
                f"all servers read alike. Allow rope_theta={rope['rope_theta']} without scaling by "
                "--drop-rope-scaling, and measure what it then drafts; or convert to native, which holds the scaling."
            )
        left_out.append(f"Left out: RoPE's scaling, {rope}. What is written drafts otherwise than the source.")
        config.rope_parameters = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    if to == "native" and isinstance(config.eos_token_id, list):
        left_out.append(
            f"Left out: eos_token_id={config.eos_token_id}, of which native holds one; the target's count."
        )
        config.eos_token_id = None
    if config.proposal != "argmax":
        left_out.append(
            f"Left out: proposal={config.proposal!r}; what is proposed under sampling is the server's rule."
        )
    return left_out


# -- the output ------------------------------------------------------------------------------------------------------


def _write(folder: Path, config: RetraceConfig, state: dict[str, torch.Tensor], to: str, target: str | None) -> None:
    if to == "retrace":
        config.architectures, config.auto_map = [RetraceDrafter.__name__], dict(AUTO_MAP)
        config.save_pretrained(folder)
        write_code(folder)
    elif to == "native":
        ours = {name: key for key, name in NATIVE_KEYS.items()}
        state = {ours.get(name, name): weight for name, weight in state.items()}
        _native_config(config).save_pretrained(folder)
    elif to == "z-lab":
        _write_json(folder, _zlab_config(config))
    else:
        model, embeddings, head = _target_weights(target, dtype_of(state))
        _check_target(model, config, target)
        # A clone: where the two are tied they share memory, and such weights are not written.
        tables, head = _speculators_tables(state.pop(TOKEN_TABLE, None), head)
        state = {**state, **tables, "embed_tokens.weight": embeddings, "lm_head.weight": head.clone()}
        _write_json(folder, _speculators_config(config, target, model.config.architectures or [type(model).__name__]))
    state = {name: weight.contiguous() for name, weight in state.items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    # safetensors leaves a file that its owner alone may read, and a server is often somebody else.
    shutil.copymode(folder / "config.json", folder / "model.safetensors")


def _write_json(folder: Path, config: dict) -> None:
    write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")


def _layer_config(config: RetraceConfig) -> dict:
    """The Qwen3 fields, as they stand in the config of z-lab and in that of speculators."""
    return {
        "model_type": "qwen3",
        **{name: getattr(config, name) for name in SHAPE_FIELDS if name not in TOKEN_IDS},
        **{name: getattr(config, name) for name in TOKEN_IDS if getattr(config, name) is not None},
        "rope_theta": config.rope_parameters["rope_theta"],
        "rope_scaling": None,
        "layer_types": list(config.layer_types),
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
    }


def _zlab_config(config: RetraceConfig) -> dict:
    # No auto_map: it would name dflash.py, a file of z-lab's. vLLM and SGLang have the class themselves.
    return {
        "architectures": ["DFlashDraftModel"],
        **_layer_config(config),
        "block_size": config.block_size,
        "dflash_config": {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.target_layer_ids)},
        "dtype": str(config.dtype).removeprefix("torch."),
    }


def _native_config(config: RetraceConfig) -> MuseGlimmerAssistantConfig:
    names = (*SHAPE_FIELDS, "block_size", "mask_token_id", "target_layer_ids", "rope_parameters", "layer_types")
    fields = {name: getattr(config, name) for name in names if name != "attention_bias"}
    fields |= {"attention_dropout": config.attention_dropout, "dtype": config.dtype}
    return MuseGlimmerAssistantConfig(**fields, architectures=["MuseGlimmerAssistantModel"])


def _speculators_tables(token_ids: torch.Tensor | None, head: torch.Tensor) -> tuple[dict, torch.Tensor]:
    """`d2t` (`[Vd]`, what to add to a drafted token) and `t2d` (`[V]`, whether it is drafted), and the head's rows of
    the drafted tokens; without a table none, and all rows."""
    if token_ids is None:
        return {}, head
    drafted = torch.zeros(len(head), dtype=torch.bool)
    drafted[token_ids] = True
    return {"d2t": token_ids - torch.arange(len(token_ids)), "t2d": drafted}, head[token_ids]


def _speculators_config(config: RetraceConfig, target: str, architectures: list[str]) -> dict:
    proposals = {
        "proposal_type": "greedy",
        "speculative_tokens": config.block_size - 1,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_version": SPECULATORS_VERSION,
        "block_size": config.block_size,
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "target_hidden_size": config.hidden_size,
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "mask_token_id": config.mask_token_id,
        "sliding_window_non_causal": False,
        "sample_from_anchor": False,
        "transformer_layer_config": _layer_config(config),
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposals],
            "verifier": {"name_or_path": target, "architectures": architectures},
        },
        "dtype": str(config.dtype).removeprefix("torch."),
    }


def _target_weights(target: str, dtype: torch.dtype) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """The target, and its embeddings and LM head as plain matrices."""
    model, _ = load_target(target, dtype=dtype)
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    if type(embeddings) is not nn.Embedding or type(head) is not nn.Linear or head.bias is not None:
        raise ValueError(
            f"{target} embeds with {type(embeddings).__name__} and its LM head is {type(head).__name__}"
            f"{' with a bias' if getattr(head, 'bias', None) is not None else ''}: more than the one matrix each that "
            "the speculators format holds. Convert to z-lab, which borrows them from the target."
        )
    return model, embeddings.weight.detach(), head.weight.detach()


def _check_target(model, config: RetraceConfig, target: str) -> None:
    text = model.config.get_text_config(decoder=True)
    rows, size = model.get_input_embeddings().weight.shape
    faults = [
        f"{name} is {theirs} there and {ours} in the drafter"
        for name, theirs, ours in (
            ("num_hidden_layers", text.num_hidden_layers, config.num_target_layers),
            ("vocab_size", rows, config.vocab_size),
            ("hidden_size", size, config.hidden_size),
        )
        if theirs != ours
    ]
    if faults:
        raise ValueError(f"{target} is not the drafter's target: {'; '.join(faults)}.")


__all__ = ["DTYPES", "FORMATS", "convert"]
