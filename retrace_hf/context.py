"""Axis 1: what the target has verified, and how the drafter reads it.

Training and generation both come through here, so that a layer index exists once.
"""

from collections.abc import Sequence

import torch
from transformers import Cache


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


def captured_layers(target_layer_ids: Sequence[int], num_target_layers: int, with_last: bool) -> list[int]:
    """What to pass as `output_hidden_states`: the taps, and the state after the final norm where `with_last`."""
    layers = [i + 1 for i in target_layer_ids]
    return [*layers, num_target_layers] if with_last else layers


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


def keep_last(cache: Cache, rows: int) -> None:
    """Drops the oldest of the cached context, so that at most `rows` rows stay."""
    for layer in cache.layers:
        surplus = layer.get_seq_length() - rows
        if surplus > 0:
            layer.keys = layer.keys[..., surplus:, :]
            layer.values = layer.values[..., surplus:, :]
