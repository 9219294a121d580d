"""Axis 1: what the target has verified, and how the drafter reads it.

Training and generation both come through here, so that a layer index exists once.

One verified token is one row of width C everywhere in the package (the drafter's `context_hidden_states`):

| `context_fusion` | row | C |
|---|---|---|
| `"shared"`, `"layerwise"` | the F tapped states | F * D |
| `"kv"` | keys of the Ls reused target layers, then their values | 2 * Ls * d_kv |
| `"hybrid"` | the F tapped states, then keys, then values | F * D + 2 * Ls * d_kv |

Keys are as they lie in the target's cache, RoPE applied; d_kv is the target's number of key/value heads times its head
size, heads in order.
"""

from collections.abc import Sequence

import torch
from torch import nn
from transformers import Cache
from transformers.cache_utils import DFlashCache, DynamicCache, DynamicLayer
from transformers.models.qwen3.modeling_qwen3 import rotate_half


# -- which layers of the target are read -----------------------------------------------------------------------------


def default_target_layer_ids(num_target_layers: int, num_taps: int) -> list[int]:
    """Layers a DFlash drafter taps: `round(1 + i * (L - 4) / (F - 1))` for i = 0..F-1, `[L // 2]` for one tap.

    Args:
        num_target_layers (`int`): Layers `L` of the target.
        num_taps (`int`): Taps `F` asked for. Duplicates are removed, so fewer may come back.

    Raises:
        ValueError: the target has fewer than 5 layers, for which the rule says nothing.

    Source: DFlash, arXiv 2602.06036, and its released code (Python's round, ties to even).
    """
    if num_taps < 1:
        raise ValueError(f"num_taps is {num_taps}; a drafter needs at least one tapped target layer.")
    if num_target_layers < 5:
        raise ValueError(
            f"The target has {num_target_layers} layers and the rule for tapped layers needs at least 5; pass "
            "target_layer_ids explicitly."
        )
    if num_taps == 1:
        return [num_target_layers // 2]
    span = num_target_layers - 4
    return sorted({round(1 + i * span / (num_taps - 1)) for i in range(num_taps)})


def check_target_layer_ids(target_layer_ids: Sequence[int] | None, num_target_layers: int) -> None:
    """Raises a ValueError unless each id names the output of a target layer before the last one, once, in order."""
    if not target_layer_ids:
        raise ValueError("target_layer_ids is empty; name the 0-based target layers that the drafter reads.")
    bad = [i for i in target_layer_ids if not 0 <= i < num_target_layers - 1]
    if bad:
        raise ValueError(
            f"target_layer_ids {bad} cannot be tapped in a target of {num_target_layers} layers: ids run from 0 to "
            f"{num_target_layers - 2} (the last layer's output comes after the final norm and is not a tap)."
        )
    if list(target_layer_ids) != sorted(set(target_layer_ids)):
        raise ValueError(f"target_layer_ids {list(target_layer_ids)} must be strictly ascending.")


def default_kv_layer_ids(num_target_layers: int, num_layers: int = 3) -> list[int]:
    """Target layers whose keys and values a `"kv"` or `"hybrid"` drafter reads: those behind the taps that DFlash's
    rule gives ([`default_target_layer_ids`]), evenly spaced from layer 2 to layer L - 2. A layer's keys and values are
    made from the output of the layer before it, so both read the same depths.

    Source: KVShot, arXiv 2604.26412, reuses 3 evenly spaced layers and does not say which.
    """
    try:
        return [i + 1 for i in default_target_layer_ids(num_target_layers, num_layers)]
    except ValueError as error:
        raise ValueError(str(error).replace("target_layer_ids", "target_kv_layer_ids")) from error


def full_attention_layers(config) -> list[int]:
    """Layers of a target (its text config) whose cache keeps the keys and values of every token."""
    layers = DynamicCache(config=config).layers
    return [i for i, layer in enumerate(layers) if type(layer) is DynamicLayer]


def check_target_kv_layer_ids(target_kv_layer_ids: Sequence[int] | None, config) -> None:
    """Raises a ValueError unless each id names a layer of the target (its text config) with full attention, once, in
    order."""
    if not target_kv_layer_ids:
        raise ValueError("target_kv_layer_ids is empty; name the target layers whose keys and values are read.")
    if list(target_kv_layer_ids) != sorted(set(target_kv_layer_ids)):
        raise ValueError(f"target_kv_layer_ids {list(target_kv_layer_ids)} must be strictly ascending.")
    served = full_attention_layers(config)
    bad = [i for i in target_kv_layer_ids if i not in served]
    if bad:
        which = f"choose from {served}" if served else "use context_fusion='shared' or 'layerwise'"
        raise ValueError(
            f"target_kv_layer_ids {bad} cannot be read in a target of {config.num_hidden_layers} layers: no layer of "
            f"its cache there keeps the keys and values of every token (sliding, chunked or shared ones do not); "
            f"{which}."
        )


def target_kv_shape(config) -> tuple[int, int]:
    """Key/value heads and head size of a target, by its text config."""
    heads = getattr(config, "num_attention_heads", None)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or (heads and config.hidden_size // heads)
    if not kv_heads or not head_dim or getattr(config, "kv_lora_rank", None):
        raise ValueError(
            "The target's config does not say what its cached keys and values look like (latent attention, or no "
            "num_key_value_heads and head_dim); use context_fusion='shared' or 'layerwise'."
        )
    return kv_heads, head_dim


@torch.no_grad()
def check_target_kv(target, target_kv_layer_ids: Sequence[int], rotary: nn.Module | None = None) -> None:
    """Runs one token through a target, in a batch of texts that are this token alone, and raises a ValueError unless
    its cache holds what a drafter is to read of the reused layers.

    With `rotary` (the drafter's) each text stands at another position, from the first to the last that the target
    knows. A token that sees itself alone is the same to every layer wherever it stands, attention sinks or not: keys
    differ by their rotation alone, and must come out equal once it is taken off.
    """
    config = target.config.get_text_config(decoder=True)
    check_target_kv_layer_ids(target_kv_layer_ids, config)
    name = type(target).__name__
    last = (getattr(config, "max_position_embeddings", None) or 4) - 1 if rotary is not None else 0
    positions = torch.tensor([[0], [1], [last // 2], [last]] if last else [[0]], device=target.device)
    tokens = torch.full_like(positions, min(3, config.vocab_size - 1))
    placed = {"position_ids": positions} if last else {}
    cache, was_training = DynamicCache(config=config), target.training
    target.eval()  # no dropout
    try:
        target.get_decoder()(tokens, cache=cache, use_cache=True, **placed)
    except TypeError as error:
        if not placed:
            raise
        raise ValueError(
            f"{name} takes no position_ids ({error}), so RoPE cannot be taken off its keys; use "
            "context_kv_rope='kept'."
        ) from error
    finally:
        target.train(was_training)
    rows = gather_context_kv(cache, target_kv_layer_ids, 0, 1, target_kv_shape(config))
    if rotary is None:
        return
    rows, positions = rows.transpose(0, 1), positions.T.to(rows.device)  # as one text, [1, 4, 2 * Ls * d_kv]
    keys = rows.chunk(2, dim=-1)[0].float()
    cos, sin = rotary.to(rows.device)(keys, positions)
    plain = unrotate(split_heads(keys, target_kv_shape(config)[1]), cos, sin)
    if not (plain - plain[:, :, :1]).norm() < (1e-3 if rows.dtype == torch.float32 else 5e-2) * plain.norm():
        raise ValueError(
            f"The keys that {name} caches in layers {list(target_kv_layer_ids)} are not rotated as the drafter's are "
            "(another pairing of channels, no rotation, or other frequencies: those of a target that was cast behind "
            "its loading are rounded, load it with dtype=), so RoPE cannot be taken off them; use "
            "context_kv_rope='kept', or other target_kv_layer_ids."
        )


def context_size(config) -> int:
    """C, the width of a row (`config` is a drafter's)."""
    taps = len(config.target_layer_ids) * config.hidden_size
    return taps + 2 * target_kv_size(config)


def target_kv_size(config) -> int:
    """Ls * d_kv, the keys of a row; 0 where none are read."""
    layers = len(config.target_kv_layer_ids or ())
    return layers and layers * config.target_num_key_value_heads * config.target_head_dim


# -- rows ------------------------------------------------------------------------------------------------------------


def captured_layers(target_layer_ids: Sequence[int], num_target_layers: int, with_last: bool) -> list[int]:
    """What to pass as `output_hidden_states`: the taps, and the state after the final norm where `with_last`, or where
    nothing is tapped: it costs nothing, and a target asked for no state returns none to count rows by."""
    layers = [i + 1 for i in target_layer_ids]
    return [*layers, num_target_layers] if with_last or not layers else layers


def gather_context_states(hidden_states: Sequence[torch.Tensor], target_layer_ids: Sequence[int]) -> torch.Tensor:
    """Concatenates the tapped layers' outputs, `hidden_states[id + 1]` (index 0 is the embedding).

    Args:
        hidden_states (`Sequence[torch.Tensor]`): By layer index, each `[b, n, D]`; layers not captured may be `None`.
        target_layer_ids (`Sequence[int]`): The `F` tapped layers.

    Returns:
        `torch.Tensor` of shape `[b, n, F * D]`, in the order of `target_layer_ids`.

    Raises:
        ValueError: a tapped layer was not captured.
    """
    taps = [hidden_states[i + 1] for i in target_layer_ids]
    missing = [i for i, tap in zip(target_layer_ids, taps) if tap is None]
    if missing:
        raise ValueError(
            f"The target did not return the outputs of layers {missing}; pass output_hidden_states="
            f"{[i + 1 for i in target_layer_ids]} (or True) to its forward."
        )
    # Layers may lie on different devices (device_map); the first tap's is as good as any.
    return torch.cat([tap.to(taps[0].device) for tap in taps], dim=-1)


def gather_context_kv(
    cache: Cache, target_kv_layer_ids: Sequence[int], start: int, end: int, shape: tuple[int, int] | None = None
) -> torch.Tensor:
    """Keys and then values of the reused layers, of the tokens from `start` to `end`, as they lie in the target's
    cache.

    Args:
        cache (`Cache`): The target's, of `b` sequences; dynamic, static or with room.
        shape (`tuple[int, int]`, *optional*): Key/value heads and head size that are expected.

    Returns:
        `torch.Tensor` of shape `[b, end - start, 2 * Ls * d_kv]`.

    Raises:
        ValueError: a layer that does not hold these tokens in plain keys and values of that shape.
    """
    rows = []
    for kind in ("keys", "values"):
        for i in target_kv_layer_ids:
            states = getattr(cache.layers[i], kind, None) if i < len(cache.layers) else None
            fits = isinstance(states, torch.Tensor) and states.ndim == 4 and states.shape[2] >= end
            if not fits or (shape is not None and (states.shape[1], states.shape[3]) != tuple(shape)):
                found = list(states.shape) if isinstance(states, torch.Tensor) else type(states).__name__
                raise ValueError(
                    f"Layer {i} of the target's {type(cache).__name__} has {kind} {found}, and a drafter that reads "
                    f"keys and values needs [batch, heads, tokens, size] with {end} tokens"
                    f"{f', {shape[0]} heads of {shape[1]}' if shape is not None else ''}; use other "
                    "target_kv_layer_ids, or context_fusion='shared' or 'layerwise'."
                )
            rows.append(states[:, :, start:end].transpose(1, 2).flatten(2))  # [b, n, d_kv]
    return torch.cat([row.to(rows[0].device) for row in rows], dim=-1)


def gather_context_rows(
    hidden_states: Sequence[torch.Tensor],
    target_layer_ids: Sequence[int],
    cache: Cache | None = None,
    target_kv_layer_ids: Sequence[int] | None = None,
    start: int = 0,
    end: int = 0,
    shape: tuple[int, int] | None = None,
) -> torch.Tensor:
    """One row for each token that the target has read: what stands in the table on top of this file.

    Args:
        hidden_states (`Sequence[torch.Tensor]`): By layer index, each `[b, n, D]`, of these tokens.
        target_layer_ids (`Sequence[int]`): Tapped layers; none for `"kv"`.
        cache (`Cache`, *optional*): The target's, where keys and values are read.
        target_kv_layer_ids (`Sequence[int]`, *optional*): Reused layers.
        start, end (`int`): Where the tokens lie in the cache.
        shape (`tuple[int, int]`, *optional*): As in [`gather_context_kv`].

    Returns:
        `torch.Tensor` of shape `[b, n, C]`.
    """
    parts = [gather_context_states(hidden_states, target_layer_ids)] if target_layer_ids else []
    if target_kv_layer_ids:
        parts.append(gather_context_kv(cache, target_kv_layer_ids, start, end, shape))
    return parts[0] if len(parts) == 1 else torch.cat([part.to(parts[0]) for part in parts], dim=-1)


def split_rows(rows: torch.Tensor, config) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `[b, n, C]` to the tapped states `[b, n, F * D]` and the keys and values `[b, n, 2 * Ls * d_kv]`; either
    may have no channels."""
    if rows.shape[-1] != context_size(config):
        raise ValueError(
            f"A row of context has {rows.shape[-1]} channels and a drafter with "
            f"context_fusion={config.context_fusion!r} reads {context_size(config)}; see retrace_hf/context.py."
        )
    return rows.split([rows.shape[-1] - 2 * target_kv_size(config), 2 * target_kv_size(config)], dim=-1)


# -- from rows to what a draft layer attends to ----------------------------------------------------------------------


class LayerwiseFusion(nn.Module):
    """A mixture of the tapped states for each draft layer: `sum_j alpha_j^(i) H^(j)`, `alpha^(i) = softmax(W[i])`.

    Starts at 0 except `W[i, floor(i * F / num_layers)] = 2`. The norm behind it is shared by all layers.

    Source: DFlare, arXiv 2606.02091.
    """

    def __init__(self, num_layers: int, num_taps: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_layers, num_taps))

    def start(self, weight: torch.Tensor) -> torch.Tensor:
        num_layers, num_taps = weight.shape
        start = torch.zeros_like(weight)
        for i in range(num_layers):
            start[i, i * num_taps // num_layers] = 2.0
        return start

    def forward(self, taps: torch.Tensor) -> list[torch.Tensor]:
        """Tapped states `[b, n, F * D]` to one `[b, n, D]` for each draft layer."""
        num_layers, num_taps = self.weight.shape
        shares = self.weight.softmax(dim=-1).to(taps.dtype)
        mixed = torch.einsum("lf,bnfd->lbnd", shares, taps.unflatten(-1, (num_taps, -1)))
        return list(mixed.unbind(0))


class TargetProjection(nn.Linear):
    """Keys (or values) of the reused target layers to those of one draft layer, KVShot's linear projection.

    Starts by picking one reused layer, the one at this draft layer's share of the depth; draft head h takes target
    head `floor(h * H_target / H_draft)`. Mixing channels at random would scramble the rotation of the keys. Where the
    head sizes differ there is nothing to pick, and it starts at random.

    Source: KVShot, arXiv 2604.26412, projection (ii), and (iii) with RoPE re-applied.
    """

    def __init__(self, config, layer_idx: int):
        super().__init__(target_kv_size(config), config.num_key_value_heads * config.head_dim, bias=False)
        self.heads = (config.target_num_key_value_heads, config.num_key_value_heads)
        self.head_dims = (config.target_head_dim, config.head_dim)
        self.std = config.initializer_range
        self.place = layer_idx * len(config.target_kv_layer_ids) // config.num_hidden_layers

    def start(self, weight: torch.Tensor) -> torch.Tensor:
        return self.picking(weight, self.place)

    def picking(self, weight: torch.Tensor, place: int) -> torch.Tensor:
        """A start that picks the reused layer at `place`; shaped as `weight`."""
        (target_heads, heads), (target_dim, dim) = self.heads, self.head_dims
        if target_dim != dim:
            return torch.randn_like(weight) * self.std
        start = torch.zeros_like(weight).view(heads, dim, -1, target_heads, dim)
        identity = torch.eye(dim, dtype=weight.dtype, device=weight.device)
        for head in range(heads):
            start[head, :, place, head * target_heads // heads] = identity
        return start.view_as(weight)


class HybridGate(nn.Module):
    """Adds to attention over hidden context what attention over the target's own keys and values sees differently:

        Delta = o - n,  g = sigmoid(Wg [n ; o ; Delta] + b),  h = n + g * W_Delta Delta

    both behind the output projection, the gate element-wise. W_Delta starts at zero: a warm start from a drafter with
    hidden context is that drafter, bit for bit. `last` holds the gate of the last forward, on its device.

    Source: KVShot, arXiv 2604.26412.
    """

    def __init__(self, size: int):
        super().__init__()
        self.gate = nn.Linear(3 * size, size)
        self.delta = nn.Linear(size, size, bias=False)
        self.delta.start = torch.zeros_like
        self.last: torch.Tensor | None = None  # its mean is taken when asked for: generate() never asks

    def forward(self, hidden_out: torch.Tensor, kv_out: torch.Tensor) -> torch.Tensor:
        delta = kv_out - hidden_out
        gate = torch.sigmoid(self.gate(torch.cat([hidden_out, kv_out, delta], dim=-1)))
        self.last = gate.detach()
        return hidden_out + gate * self.delta(delta)


def gate_mean(drafter: nn.Module) -> torch.Tensor | None:
    """The mean gate of a `"hybrid"` drafter's last forward, over layers and slots, on its device (reading it waits for
    the device); `None` for others. Near 0 the keys and values are not used (KVShot's gate starvation)."""
    gates = (module.last for module in drafter.modules() if isinstance(module, HybridGate))
    means = [gate.float().mean() for gate in gates if gate is not None]
    return torch.stack(means).mean() if means else None


def split_heads(states: torch.Tensor, head_dim: int) -> torch.Tensor:
    """`[b, n, heads * head_dim]` to `[b, heads, n, head_dim]`."""
    return states.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def unrotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Takes RoPE off the leading `cos.shape[-1]` channels of `states` (`[b, heads, n, head_dim]`), the attention scale
    that some kinds of RoPE multiply in included."""
    rotary_dim = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turned, kept = states[..., :rotary_dim], states[..., rotary_dim:]
    turned = (turned * cos - rotate_half(turned) * sin) / (cos * cos + sin * sin)
    return torch.cat([turned, kept], dim=-1) if kept.shape[-1] else turned


def unrotate_keys(target_kv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows of keys and values `[b, n, 2 * Ls * d_kv]` with RoPE taken off the keys; `cos`, `sin` of the rows'
    positions."""
    keys, values = target_kv.chunk(2, dim=-1)
    plain = unrotate(split_heads(keys, head_dim), cos, sin)
    return torch.cat([plain.transpose(1, 2).flatten(2), values], dim=-1)


# -- the drafter's own cache -----------------------------------------------------------------------------------------


def new_draft_cache(config) -> DFlashCache:
    """A cache for a drafter's context. `"hybrid"` keeps a second K/V stream for each layer: layer i's over the
    target's own keys and values lies at `num_hidden_layers + i`."""
    cache = DFlashCache(config=config)
    if config.context_fusion == "hybrid":
        cache.layers.extend(DynamicLayer() for _ in range(config.num_hidden_layers))
    cache.activate_past_recording()
    return cache


def keep_last(cache: Cache, rows: int) -> None:
    """Drops the oldest of the cached context, so that at most `rows` rows stay."""
    for layer in cache.layers:
        surplus = layer.get_seq_length() - rows
        if surplus > 0:
            layer.keys = layer.keys[..., surplus:, :]
            layer.values = layer.values[..., surplus:, :]
