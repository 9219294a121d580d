"""An untrained drafter for a target: its shape, and optionally its first weights."""

import torch
from transformers import PreTrainedModel

from .candidate_generator import check_target
from .configuration_retrace import RetraceConfig
from .context import check_target_layer_ids, default_target_layer_ids


# Multimodal rotation: a text drafter takes plain positions.
_MROPE_KEYS = ("mrope_section", "mrope_interleaved")


def config_for_target(
    target: PreTrainedModel,
    mask_token_id: int | None,
    num_hidden_layers: int,
    block_size: int,
    target_layer_ids: list[int] | None = None,
    **fields,
) -> RetraceConfig:
    """The [`RetraceConfig`] of a drafter for `target`; `fields` override what is read from the target's config.

    Raises:
        ValueError: no mask token, or a target that a block drafter cannot serve, by name.
    """
    text = target.config.get_text_config(decoder=True)
    _refuse_unservable(target, text)
    rows = target.get_input_embeddings().weight.shape[0]
    if mask_token_id is None:
        raise ValueError(
            "mask_token_id is required: name a token of the target's vocabulary that its text never holds, such as an "
            "unused special token (for SmolLM2 `<empty_output>`, id 16)."
        )
    if not 0 <= mask_token_id < rows:
        raise ValueError(
            f"mask_token_id {mask_token_id} is outside the target's {rows} embedding rows; choose an unused special "
            "token, or call target.resize_token_embeddings() first."
        )
    if target_layer_ids is None:
        target_layer_ids = default_target_layer_ids(text.num_hidden_layers, num_hidden_layers)
    check_target_layer_ids(target_layer_ids, text.num_hidden_layers)
    heads = text.num_attention_heads
    shape = {
        "vocab_size": rows,
        "hidden_size": text.hidden_size,
        "intermediate_size": _intermediate_size(text),
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(text, "num_key_value_heads", None) or heads,
        "head_dim": getattr(text, "head_dim", None) or text.hidden_size // heads,
        "rms_norm_eps": getattr(text, "rms_norm_eps", None) or 1e-6,
        "max_position_embeddings": text.max_position_embeddings,
        "rope_parameters": _full_attention_rope(text),
        "pad_token_id": text.pad_token_id,
        "bos_token_id": text.bos_token_id,
        "eos_token_id": text.eos_token_id,
        "num_target_layers": text.num_hidden_layers,
    }
    return RetraceConfig(
        **{
            **shape,
            "mask_token_id": mask_token_id,
            "num_hidden_layers": num_hidden_layers,
            "block_size": block_size,
            "target_layer_ids": list(target_layer_ids),
            **fields,
        }
    )


def _refuse_unservable(target: PreTrainedModel, text) -> None:
    check_target(target)
    name = type(target).__name__
    for field in ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"):
        if getattr(text, field, None) is None:
            raise ValueError(f"The config of {name} has no {field}; a drafter cannot be shaped for it.")
    width = target.get_input_embeddings().weight.shape[1]
    if width != text.hidden_size:
        raise ValueError(
            f"{name} embeds tokens in {width} channels and runs on {text.hidden_size}; a drafter needs both equal."
        )


def _intermediate_size(text) -> int:
    """The MLP width of a dense target; 3 * D where the target has none (mixture of experts only)."""
    width = getattr(text, "intermediate_size", None)
    if isinstance(width, (list, tuple)):
        width = max(width)
    return width or 3 * text.hidden_size


def _full_attention_rope(text) -> dict:
    """The target's RoPE entry for full attention: flat, without multimodal keys."""
    rope = dict(getattr(text, "rope_parameters", None) or {})
    if "full_attention" in rope:
        rope = dict(rope["full_attention"])
    rope = {k: v for k, v in rope.items() if k not in _MROPE_KEYS}
    if rope.get("rope_type") == "mrope":
        rope["rope_type"] = "default"
    rope.setdefault("rope_type", "default")
    rope.setdefault("rope_theta", float(getattr(text, "rope_theta", None) or 10000.0))
    return rope


@torch.no_grad()
def initialize_from_target(drafter, target: PreTrainedModel) -> None:
    """Starts the draft layers from the target's layers behind the last tap, and the context from that tap.

    Draft layer i takes the weights of target layer `last_tap + 1 + i` (the last ones where those run out). `fc` passes
    the last tap through and `hidden_norm` is the input norm of the layer behind it, so that the first draft layer
    sees the context as that target layer does. The per-head norms of a target without them are set to the size its
    queries and keys have on white inputs.

    Raises:
        ValueError: the target's layers are not of the Llama / Qwen shape.

    Source: reported to help by Osprey (starting a drafter from the target's own layers).
    """
    layers = getattr(target.get_decoder(), "layers", None)
    config = drafter.config
    text = target.config.get_text_config(decoder=True)
    if layers is None or getattr(text, "hidden_act", None) != config.hidden_act:
        raise ValueError(
            f"{type(target).__name__} has no layers of the Llama / Qwen shape (an MLP gated by {config.hidden_act}), "
            "so draft layers cannot start from it; use init_from_target=False."
        )
    first = min(config.target_layer_ids[-1] + 1, len(layers) - config.num_hidden_layers)
    source = [layers[first + i] for i in range(config.num_hidden_layers)]
    for draft, layer in zip(drafter.layers, source):
        _copy_layer(draft, layer)
    drafter.hidden_norm.weight.copy_(source[0].input_layernorm.weight)
    drafter.norm.weight.copy_(target.get_decoder().norm.weight)
    size = config.hidden_size
    drafter.fc.weight.zero_()
    drafter.fc.weight[:, -size:] = torch.eye(size)


def _copy_layer(draft, layer) -> None:
    state = layer.state_dict()
    own = draft.state_dict()
    needed = {k for k in own if not k.endswith(("q_norm.weight", "k_norm.weight"))}
    # Norms of other places make it another layer; biases of the projections are small and left behind.
    other = {k for k in set(state) - set(own) if not k.endswith("_proj.bias")}
    if other or not needed <= set(state) or any(state[k].shape != own[k].shape for k in needed):
        raise ValueError(
            f"{type(layer).__name__} is not of the Llama / Qwen shape, so draft layers cannot start from it; use "
            "init_from_target=False."
        )
    draft.load_state_dict({k: state[k] for k in needed}, strict=False)
    norm = state["input_layernorm.weight"].float()
    for proj, name in (("q_proj", "q_norm"), ("k_proj", "k_norm")):
        target_norm = state.get(f"self_attn.{name}.weight")
        if target_norm is None:
            weight = state[f"self_attn.{proj}.weight"].float() * norm
            target_norm = weight.pow(2).sum(dim=1).mean().sqrt()
        getattr(draft.self_attn, name).weight.copy_(target_norm.expand(draft.self_attn.head_dim))
