"""An untrained drafter for a target: its shape, and optionally its first weights."""

import torch
from transformers import PreTrainedModel

from .candidate_generator import check_target
from .configuration_retrace import READS_TARGET_KV, RetraceConfig
from .context import (
    check_target_kv,
    check_target_kv_layer_ids,
    check_target_layer_ids,
    default_kv_layer_ids,
    default_target_layer_ids,
    full_attention_layers,
    target_kv_shape,
)


# Multimodal rotation: a text drafter takes plain positions.
_MROPE_KEYS = ("mrope_section", "mrope_interleaved")


def config_for_target(
    target: PreTrainedModel,
    mask_token_id: int | None,
    num_hidden_layers: int,
    block_size: int,
    target_layer_ids: list[int] | None = None,
    context_fusion: str = "shared",
    **fields,
) -> RetraceConfig:
    """The [`RetraceConfig`] of a drafter for `target`; `fields` override what is read from the target's config.

    Raises:
        ValueError: no mask token, or a target that a block drafter cannot serve, by name.
    """
    text = target.config.get_text_config(decoder=True)
    _refuse_unservable(target, text, given=fields)
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
    if context_fusion in READS_TARGET_KV:
        fields = {**target_kv_fields(target, fields.get("target_kv_layer_ids")), **fields}
    if context_fusion != "kv":
        if target_layer_ids is None:
            target_layer_ids = default_target_layer_ids(text.num_hidden_layers, num_hidden_layers)
        check_target_layer_ids(target_layer_ids, text.num_hidden_layers)
    heads = fields.get("num_attention_heads") or text.num_attention_heads
    # A target without attention may call something else so.
    own = text if getattr(text, "num_attention_heads", None) else None
    shape = {
        "vocab_size": rows,
        "hidden_size": text.hidden_size,
        "intermediate_size": _intermediate_size(text),
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(own, "num_key_value_heads", None) or heads,
        "head_dim": getattr(own, "head_dim", None) or text.hidden_size // heads,
        "rms_norm_eps": getattr(text, "rms_norm_eps", None) or 1e-6,
        "max_position_embeddings": getattr(text, "max_position_embeddings", None),
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
            "target_layer_ids": list(target_layer_ids or []),
            "context_fusion": context_fusion,
            **fields,
        }
    )


def target_kv_fields(target: PreTrainedModel, target_kv_layer_ids: list[int] | None = None) -> dict:
    """What a drafter's config says of the keys and values that it reads: which layers', by default 3, and their shape.

    The default is [`default_kv_layer_ids`]'s; in a target that has other layers beside those of full attention, each
    moves to the nearest one of full attention, and duplicates go.
    """
    text = target.config.get_text_config(decoder=True)
    if target_kv_layer_ids is None:
        served = full_attention_layers(text)
        wanted = default_kv_layer_ids(text.num_hidden_layers)
        target_kv_layer_ids = sorted({min(served, key=lambda i: abs(i - w)) for w in wanted} if served else wanted)
    check_target_kv_layer_ids(target_kv_layer_ids, text)
    heads, head_dim = target_kv_shape(text)
    return {
        "target_kv_layer_ids": list(target_kv_layer_ids),
        "target_num_key_value_heads": heads,
        "target_head_dim": head_dim,
    }


def check_kv_reading(drafter, target: PreTrainedModel) -> None:
    """Raises a ValueError if a drafter is to read keys and values of a target that do not lie in its cache as it takes
    them to; runs the target on a few tokens to see. Drafters that read none pass."""
    config = drafter.config
    if config.context_fusion not in READS_TARGET_KV:
        return
    reapplied = config.context_kv_rope == "reapplied"
    if reapplied:
        _refuse_mrope(target, target.config.get_text_config(decoder=True))
    check_target_kv(target, config.target_kv_layer_ids, drafter.rotary_emb if reapplied else None)


def _refuse_mrope(target: PreTrainedModel, text) -> None:
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") == "mrope" or any(rope.get(key) for key in _MROPE_KEYS):
        raise ValueError(
            f"{type(target).__name__} rotates the keys of an image by positions of three dimensions, which the "
            "drafter does not know, so RoPE cannot be taken off them; use context_kv_rope='kept'."
        )


# What a target without attention does not say, and the drafter must know.
_GIVEN_WHERE_MISSING = ("num_attention_heads", "max_position_embeddings")


def _refuse_unservable(target: PreTrainedModel, text, given: dict) -> None:
    check_target(target)
    name = type(target).__name__
    for field in ("hidden_size", "num_hidden_layers"):
        if getattr(text, field, None) is None:
            raise ValueError(f"The config of {name} has no {field}; a drafter cannot be shaped for it.")
    missing = [f for f in _GIVEN_WHERE_MISSING if getattr(text, f, None) is None and given.get(f) is None]
    if missing:
        raise ValueError(
            f"The config of {name} has no {' and no '.join(missing)}; give the drafter's own, for instance "
            "from_target(target, ..., num_attention_heads=8, max_position_embeddings=8192)."
        )
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
    rope = without_mrope(rope)
    rope.setdefault("rope_theta", float(getattr(text, "rope_theta", None) or 10000.0))
    return rope


def without_mrope(rope: dict) -> dict:
    """A RoPE entry for text alone, whose positions are the same in all three dimensions of an image's."""
    rope = {k: v for k, v in rope.items() if k not in _MROPE_KEYS}
    rope.setdefault("rope_type", rope.pop("type", "default"))
    if rope["rope_type"] == "mrope":
        rope["rope_type"] = "default"
    return rope


@torch.no_grad()
def initialize_from_target(drafter, target: PreTrainedModel) -> None:
    """Starts the draft layers from the target's layers behind the last tap, and the context from that tap.

    Draft layer i takes the weights of target layer `last_tap + 1 + i` (the last ones where those run out). `fc` passes
    the last tap through and `hidden_norm` is the input norm of the layer behind it, so that the first draft layer
    sees the context as that target layer does. With `context_fusion="layerwise"` the mixtures keep DFlare's start, and
    the context's projections are that target layer's. With `"kv"` the draft layers are the target's from its last
    reused layer on, and with it and `"hybrid"` each picks the keys and values of the reused layer that is nearest to
    its own: draft layer 0 of `"kv"` attends to its target layer's own. The per-head norms of a target without them are
    set to the size its queries and keys have on white inputs.

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
    behind = config.target_kv_layer_ids[-1] if config.context_fusion == "kv" else config.target_layer_ids[-1] + 1
    first = min(behind, len(layers) - config.num_hidden_layers)
    source = [layers[first + i] for i in range(config.num_hidden_layers)]
    for draft, layer in zip(drafter.layers, source):
        _copy_layer(draft, layer)
    if config.context_fusion != "kv":
        drafter.hidden_norm.weight.copy_(source[0].input_layernorm.weight)
    drafter.norm.weight.copy_(target.get_decoder().norm.weight)
    size = config.hidden_size
    if config.context_fusion in ("shared", "hybrid"):
        drafter.fc.weight.zero_()
        drafter.fc.weight[:, -size:] = torch.eye(size)
    for i, draft in enumerate(drafter.layers):
        attention = draft.self_attn
        if config.context_fusion == "layerwise":
            attention.k_proj_target.load_state_dict(attention.k_proj.state_dict())
            attention.v_proj_target.load_state_dict(attention.v_proj.state_dict())
        elif config.context_fusion in READS_TARGET_KV:
            reused = config.target_kv_layer_ids
            nearest = min(range(len(reused)), key=lambda place: abs(reused[place] - first - i))
            for projection in (attention.k_proj_target, attention.v_proj_target):
                projection.weight.copy_(projection.picking(projection.weight, nearest))


def _copy_layer(draft, layer) -> None:
    state = layer.state_dict()
    own = draft.state_dict()
    added = ("q_norm.weight", "k_norm.weight", "_proj_target.weight", "_proj_target.bias")  # the draft layer's alone
    needed = {k for k in own if not k.endswith(added) and "hybrid_gate" not in k}
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


# -- from a DFlash to another context --------------------------------------------------------------------------------


@torch.no_grad()
def start_from_shared(drafter, dflash, context_rows: torch.Tensor | None = None) -> None:
    """Starts a drafter of another `context_fusion` from a DFlash one (`from_dflash` says what is kept).

    Args:
        context_rows (`torch.Tensor` of shape `[n, F * D]`, *optional*): Tapped states, for `"layerwise"`.
    """
    own = drafter.state_dict()
    kept = {k: v for k, v in dflash.state_dict().items() if k in own}
    drafter.load_state_dict(kept, strict=False)
    if drafter.config.context_fusion == "layerwise":
        _start_layerwise(drafter, dflash, context_rows)


def _start_layerwise(drafter, dflash, context_rows: torch.Tensor | None) -> None:
    """The mixture and the matrix behind it that together come nearest to `hidden_norm(fc(taps))`.

    All layers start with the same mixture, since all of DFlash's layers read the same context. K passes a norm per
    head, so for K only the matrix's direction matters; for V its scale does too.
    """
    size = drafter.config.hidden_size
    blocks = dflash.fc.weight.double().view(size, -1, size).transpose(0, 1)  # [F, D, D]
    scale = dflash.hidden_norm.weight.double()
    if context_rows is None:
        mixture, matrix = _fit_to_weights(blocks)
    else:
        if context_rows.ndim != 2 or context_rows.shape[1] != dflash.fc.weight.shape[1]:
            raise ValueError(
                f"context_rows has shape {tuple(context_rows.shape)}; it must be [n, {dflash.fc.weight.shape[1]}], "
                "tapped states as gather_context_states() gives them."
            )
        rows = context_rows.to(device=blocks.device, dtype=torch.float32)
        mixture, matrix = (part.double() for part in _fit_to_rows(blocks.float(), rows.unflatten(1, (-1, size))))
    matrix = scale[:, None] * matrix
    drafter.hidden_norm.weight.fill_(1.0)
    drafter.layer_fusion.weight.copy_(mixture.log().expand_as(drafter.layer_fusion.weight))
    for layer in drafter.layers:
        attention = layer.self_attn
        for ours, theirs in (
            (attention.k_proj_target, attention.k_proj),
            (attention.v_proj_target, attention.v_proj),
        ):
            ours.weight.copy_(theirs.weight.double() @ matrix)
            if ours.bias is not None:
                ours.bias.copy_(theirs.bias)


def _fit_to_weights(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mixture `[F]` and matrix `[D, D]` nearest to `blocks`, for taps that are white noise of one size.

    For a mixture a the best matrix is `sum_j a_j M_j / sum_j a_j^2`; the best mixture is the leading eigenvector of
    the Gram matrix of the blocks. The rest is the two norms' sizes on such inputs.
    """
    gram = torch.einsum("jab,kab->jk", blocks, blocks)
    mixture = torch.linalg.eigh(gram).eigenvectors[:, -1].abs().clamp(min=1e-4)
    mixture = mixture / mixture.sum()
    matrix = torch.einsum("j,jab->ab", mixture, blocks) / mixture.norm()
    return mixture, matrix * blocks.shape[1] ** 0.5 / blocks.norm()


def _fit_to_rows(blocks: torch.Tensor, taps: torch.Tensor, steps: int = 30) -> tuple[torch.Tensor, torch.Tensor]:
    """Mixture `[F]` and matrix `[D, D]` such that matrix @ norm(mixed taps) is nearest to norm(fc(taps)) over rows
    `[n, F, D]`: gradient descent on the mixture, least squares for the matrix at each step."""

    def normed(states: torch.Tensor) -> torch.Tensor:
        return states / (states.pow(2).mean(dim=-1, keepdim=True) + 1e-6).sqrt()

    expected = normed(torch.einsum("jab,njb->na", blocks, taps))

    def fit(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mixed = normed(torch.einsum("j,njb->nb", logits.softmax(0), taps))
        gram = mixed.T @ mixed
        ridge = 1e-4 * gram.diagonal().mean() * torch.eye(len(gram)).to(gram)
        matrix = torch.linalg.solve((gram + ridge).double(), (mixed.T @ expected).double()).T.to(mixed)
        return matrix, (mixed @ matrix.T - expected).pow(2).mean()

    starts = [torch.zeros(len(blocks)).to(blocks), *(4.0 * torch.eye(len(blocks)).to(blocks))]
    best = min(starts, key=lambda start: float(fit(start)[1]))
    with torch.enable_grad():
        logits = best.clone().requires_grad_()
        optimizer = torch.optim.Adam([logits], lr=0.2)
        for _ in range(steps):
            optimizer.zero_grad()
            error = fit(logits)[1]
            error.backward()
            optimizer.step()
    logits = min(best, logits.detach(), key=lambda candidate: float(fit(candidate)[1]))
    return logits.softmax(0).clamp(min=1e-9), fit(logits)[0]
