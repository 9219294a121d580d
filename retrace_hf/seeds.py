"""Random streams of their own for parts of a run."""

import numpy as np
import torch


def mixed_generator(*numbers: int, device: str | torch.device = "cpu") -> torch.Generator:
    """A generator seeded by all of `numbers`, e.g. seed and shard. They are mixed: neighbouring seeds share no stream,
    and the 32 bits that a torch CPU generator takes of its seed depend on every one."""
    return torch.Generator(device).manual_seed(_mix(*numbers))


def mixed_seed(*numbers: int) -> None:
    """Seeds torch's own generators, for `generate()` and whatever else draws from them."""
    torch.manual_seed(_mix(*numbers))


def _mix(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])
