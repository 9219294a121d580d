"""A key/value cache with room made beforehand."""

import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from .recurrent_states import is_recurrent


class _RoomyLayer(DynamicLayer):
    """Writes new rows into its room, where a DynamicLayer copies all rows before them. Cropping is free."""

    def __init__(self, length: int):
        super().__init__()
        self.length, self.room = length, None

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        if self.room is None:
            self.lazy_initialization(key_states, value_states)
            self.room = [t.new_empty(*t.shape[:2], self.length, t.shape[-1]) for t in (key_states, value_states)]
        start = self.get_seq_length()
        end = start + key_states.shape[2]
        if end > self.length:
            raise ValueError(f"{end} tokens in a cache with room for {self.length}.")
        for room, states in zip(self.room, (key_states, value_states)):
            room[:, :, start:end] = states
        self.keys, self.values = (room[:, :, :end] for room in self.room)
        return self.keys, self.values

    def reset(self) -> None:
        self.room = None
        super().reset()

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self.room is None:
            return
        used = self.get_seq_length()
        self.room = [room[indices] for room in self.room]
        self.keys, self.values = (room[:, :, :used] for room in self.room)


def roomy_cache(config, length: int) -> Cache:
    """A cache for passes without gradient that come and go behind the same prefix.

    Args:
        config (`PreTrainedConfig`): A target's text config. Layers that keep a state instead of keys and values have
            their own kind in the cache.
        length (`int`): Tokens that fit. Every position is kept, also where layers slide: the masks do the windowing.
    """
    layers = DynamicCache(config=config).layers
    attends = (isinstance(layer, DynamicLayer) and not is_recurrent(layer) for layer in layers)
    return Cache(layers=[_RoomyLayer(length) if plain else layer for layer, plain in zip(layers, attends)])
