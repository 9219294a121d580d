"""One measured answer: its tokens, its rounds, its seconds."""

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.generation.streamers import BaseStreamer

from .generation import AcceptanceStats, record_acceptance


@dataclass
class Run:
    """
    One answer, or several pooled.

    Args:
        seconds (`float`): wall-clock time in `generate()`.
        ids (`list[list[int]]`): the new tokens of each answer.
        stats (`AcceptanceStats`): its rounds; plain `generate` counts as rounds without a proposal.
    """

    seconds: float
    ids: list[list[int]]
    stats: AcceptanceStats


class PassCounter(BaseStreamer):
    """
    Counts what each target pass of one `generate()` call reads and yields, whatever drafts for it: for the methods
    that [`record_acceptance`] leaves alone.

    ```python
    with PassCounter(target) as passes:
        target.generate(**inputs, prompt_lookup_num_tokens=10, streamer=passes)
    ```
    """

    def __init__(self, target):
        self._target = target
        self._saw_prompt = False
        self.read: list[int] = []
        self.yielded: list[int] = []

    def __enter__(self):
        self._hook = self._target.register_forward_pre_hook(self._count, with_kwargs=True)
        return self

    def __exit__(self, *error):
        self._hook.remove()

    def _count(self, module, args, kwargs):
        self.read.append(kwargs["input_ids"].shape[1])

    def put(self, value: torch.Tensor):
        if self._saw_prompt:
            self.yielded.append(value.numel())
        self._saw_prompt = True

    def end(self):
        pass

    @property
    def stats(self) -> AcceptanceStats:
        """The passes after the prefill as rounds. Some methods propose to the prefill already: what it accepted is in
        no round."""
        accepted = [new - 1 for new in self.yielded[1:]]
        return AcceptanceStats(accepted, [read - 1 for read in self.read[1:]], calls=1)


def answer(target, inputs: dict, max_new_tokens: int, drafter=None, streamer=None, do_sample=False, **options) -> Run:
    """
    Generates one answer and counts its rounds.

    Args:
        target (`PreTrainedModel`): the model that answers.
        inputs (`dict`): `input_ids` and `attention_mask`, each `[1, n]`.
        max_new_tokens (`int`): tokens of the answer at most.
        drafter (`RetraceDrafter`, *optional*): without it, plain `generate`, or what `options` say.
        streamer (`BaseStreamer`, *optional*): gets the tokens as they come.
        do_sample (`bool`, *optional*, defaults to `False`): greedy if not.
        options: passed to `generate()`, for example `speculation_type="dflash"`, or `prompt_lookup_num_tokens` or
            `assistant_model` without a drafter, which go without a streamer.
    """
    counter = None
    if drafter is not None:
        options["assistant_model"] = drafter
    elif "assistant_model" in options or "prompt_lookup_num_tokens" in options:
        streamer = counter = PassCounter(target)
    with record_acceptance() as stats, counter or nullcontext():
        _wait_for(target.device)
        started = time.perf_counter()
        output = target.generate(
            **inputs, max_new_tokens=max_new_tokens, do_sample=do_sample, streamer=streamer, **options
        )
        _wait_for(target.device)
        seconds = time.perf_counter() - started
    ids = output[0, inputs["input_ids"].shape[1] :].tolist()
    if counter is not None:
        stats = counter.stats
    elif drafter is None:
        # One token a pass: nobody records what has no candidate generator.
        passes = len(ids) - 1
        stats = AcceptanceStats(accepted_per_round=[0] * passes, proposed_per_round=[0] * passes, calls=1)
    return Run(seconds, [ids], stats)


def _wait_for(device: torch.device):
    """Until what was asked of an accelerator is done; a CPU is never asked for more than it does."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def pool(runs: list[Run]) -> Run:
    """Several runs as one: seconds added, rounds put together."""
    stats = AcceptanceStats.pooled(run.stats for run in runs)
    return Run(sum(run.seconds for run in runs), [ids for run in runs for ids in run.ids], stats)


@contextmanager
def timed(
    owner, name: str, log: list[tuple[float, float]], clock: Callable[[], float] = time.perf_counter
) -> Iterator[None]:
    """Logs start and end, in seconds of `clock`, of every call of `owner.name` made inside."""
    real = getattr(owner, name)

    def timer(*args, **kwargs):
        start = clock()
        try:
            return real(*args, **kwargs)
        finally:
            log.append((start, clock()))

    setattr(owner, name, timer)
    try:
        yield
    finally:
        setattr(owner, name, real)


class PeakMemory(TorchDispatchMode):
    """
    Counts the memory of the tensors that are made inside and alive at once: what no profiler of a CPU tells. Tensors
    made before do not count, nor do buffers that a kernel makes and drops by itself.

    ```python
    with PeakMemory() as memory:
        loss.backward()
    print(memory.peak)  # bytes
    ```
    """

    def __init__(self):
        super().__init__()
        self.alive, self.peak = 0, 0
        self._known = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        outputs = function(*args, **(kwargs or {}))
        before = {id(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, torch.Tensor) and id(tensor.untyped_storage()) not in before:  # a view makes nothing
                self._count(tensor.untyped_storage())
        return outputs

    def _count(self, storage: torch.UntypedStorage):
        if id(storage) in self._known:
            return
        size = storage.nbytes()
        self._known[id(storage)] = weakref.finalize(storage, self._drop, id(storage), size)
        self.alive += size
        self.peak = max(self.peak, self.alive)

    def _drop(self, key: int, size: int):
        del self._known[key]
        self.alive -= size
