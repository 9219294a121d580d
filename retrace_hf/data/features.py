"""
Features of the target, computed once and memory-mapped.

Stage 1 and the SFT control see the same frozen target over the same tokens in every epoch. With the tapped layers on
disk an epoch costs only the drafter.
"""

import errno
import hashlib
import json
import logging
import os
import shutil
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock
from tqdm.auto import tqdm

from ..context import (
    captured_layers,
    check_target_kv_layer_ids,
    check_target_layer_ids,
    gather_context_rows,
    target_kv_shape,
)
from ..files import written_whole


logger = logging.getLogger(__name__)

DATA_NAME = "features.bin"
INDEX_NAME = "index.json"
FORMAT_VERSION = 1
# Values of each weight that enter the fingerprint, evenly spaced: any training run moves some of them.
_FINGERPRINT_VALUES = 64
# How much work an interrupted build may lose.
SECONDS_BETWEEN_NOTES = 60


def target_fingerprint(target) -> str:
    """
    Hex digest of a target's config and of evenly spaced values of every weight. Reads a few kilobytes of any model.

    Args:
        target (`PreTrainedModel`): the model whose features are kept.
    """
    digest = hashlib.sha256()
    config = target.config.to_dict()
    # These say where the weights came from and who wrote them, not what the model computes.
    for name in ("_name_or_path", "transformers_version", "architectures"):
        config.pop(name, None)
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    for name, weight in target.state_dict().items():
        values = weight.detach().reshape(-1)
        values = values[:: max(1, values.numel() // _FINGERPRINT_VALUES)][:_FINGERPRINT_VALUES]
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        digest.update(values.to("cpu", torch.float32).numpy().tobytes())
    return digest.hexdigest()


def features_key(
    target,
    dataset,
    target_layer_ids: Sequence[int],
    with_last: bool = False,
    target_kv_layer_ids: Sequence[int] | None = None,
) -> str:
    """
    Hex digest of everything the features depend on.

    Args:
        target (`PreTrainedModel`): the frozen target.
        dataset (`datasets.Dataset`): rows with `input_ids`.
        target_layer_ids (sequence of `int`): 0-based ids of the tapped layers, in the order they are concatenated.
        with_last (`bool`, *optional*, defaults to `False`): whether the last hidden state is kept beside them.
        target_kv_layer_ids (sequence of `int`, *optional*): layers whose keys and values are kept too.
    """
    digest = hashlib.sha256(f"v{FORMAT_VERSION} {list(target_layer_ids)} {target_fingerprint(target)}".encode())
    if with_last:
        digest.update(b"last")
    if target_kv_layer_ids:
        digest.update(f"kv {list(target_kv_layer_ids)}".encode())
    for ids in dataset["input_ids"]:
        digest.update(len(ids).to_bytes(8, "little"))
        digest.update(np.asarray(ids, dtype=np.int64).tobytes())
    return digest.hexdigest()


class TargetFeatures:
    """
    Features of a frozen target over a dataset, in a folder: `features.bin`, float16 `[total_tokens, C]`, row-major,
    the dataset's rows in order; `index.json`, what it is and where each row starts. `features[row]` is the
    memory-mapped `np.float16` array `[length, C]` of a row: tapped states, C = F*D, and keys and values where they are
    asked for (`context.py`). Where they were built `with_last`, each token's last hidden state (after the final norm)
    stands behind them, `[length, C+D]`: the source of soft targets.

    Make one with [`TargetFeatures.build_or_open`].
    """

    def __init__(self, path: str | Path, index: dict):
        self.path = Path(path)
        self.index = index
        self.last_size = index["hidden_size"] if index.get("with_last") else 0
        self.offsets = np.asarray(index["offsets"], dtype=np.int64)  # [rows + 1], in tokens
        self._map()

    def _map(self):
        shape = (int(self.offsets[-1]), self.index["width"])
        self._array = np.memmap(self.path / DATA_NAME, dtype=np.float16, mode="r", shape=shape)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        if not 0 <= row < len(self):
            raise IndexError(f"Row {row} of {len(self)}: these features belong to another dataset.")
        return self._array[self.offsets[row] : self.offsets[row + 1]]  # [length, C]

    def __getstate__(self) -> dict:
        # A pickled memory map is a copy of the whole file; a worker process maps it again instead.
        return {name: value for name, value in self.__dict__.items() if name != "_array"}

    def __setstate__(self, state: dict):
        self.__dict__.update(state)
        self._map()

    @classmethod
    def open(cls, path: str | Path, key: str, verify: bool = True) -> "TargetFeatures":
        """
        Opens features that were built before.

        Args:
            path (`str` or `Path`): their folder.
            key (`str`): what [`features_key`] says now.
            verify (`bool`, *optional*, defaults to `True`): read all of them once and compare each row's checksum.

        Raises:
            `FileNotFoundError`: the folder holds no finished features.
            `ValueError`: they belong to another target, dataset or taps, or the file is truncated or damaged.
        """
        path = Path(path)
        if not (path / INDEX_NAME).is_file() or not (path / DATA_NAME).is_file():
            raise FileNotFoundError(f"{path} holds no finished features; make them with TargetFeatures.build_or_open.")
        cure = "Rebuild them with TargetFeatures.build_or_open, or give another folder."
        try:
            index = json.loads((path / INDEX_NAME).read_text(encoding="utf-8"))
            same, expected = index["key"] == key, index["offsets"][-1] * index["width"] * np.float16().itemsize
        except (ValueError, KeyError, IndexError, TypeError):
            raise ValueError(f"{path / INDEX_NAME} is damaged. {cure}") from None
        if not same:
            raise ValueError(f"The features in {path} belong to another target, dataset or layers. {cure}")
        size = (path / DATA_NAME).stat().st_size
        if size != expected:
            raise ValueError(f"{path / DATA_NAME} has {size} bytes where {expected} were written. {cure}")
        features = cls(path, index)
        # Features of before there were checksums have none.
        for row, checksum in enumerate(index.get("crc32", []) if verify else []):
            if zlib.crc32(features[row]) != checksum:
                raise ValueError(f"Row {row} of {path / DATA_NAME} is damaged. {cure}")
        return features

    @classmethod
    def build(
        cls,
        target,
        dataset,
        target_layer_ids: Sequence[int],
        path: str | Path,
        batch_size: int = 16,
        progress: bool = True,
        with_last: bool = False,
        target_kv_layer_ids: Sequence[int] | None = None,
    ) -> "TargetFeatures":
        """
        Runs the target over the dataset and keeps the tapped layers. An interrupted build goes on where it stopped
        when it is called again with the same arguments.

        Args:
            target (`PreTrainedModel`): a decoder-only language model; its LM head is not run.
            dataset (`datasets.Dataset`): rows with `input_ids`, none empty.
            target_layer_ids (sequence of `int`): 0-based layers whose outputs are kept, `hidden_states[id + 1]`.
            path (`str` or `Path`): a folder; made if missing. Old features in it are replaced once the new are whole.
            batch_size (`int`, *optional*, defaults to 16): sequences a forward, of similar lengths.
            progress (`bool`, *optional*, defaults to `True`): show a bar with tokens per second.
            with_last (`bool`, *optional*, defaults to `False`): keep the last hidden state too, for soft targets.
            target_kv_layer_ids (sequence of `int`, *optional*): layers whose keys and values are kept too, for a
                drafter that reads them; `target_layer_ids` may then be empty.

        Raises:
            `ValueError`: an empty dataset or row, taps out of range, or a value that float16 cannot hold.
            `OSError`: not enough room on the disk.
        """
        key = features_key(target, dataset, target_layer_ids, with_last, target_kv_layer_ids)
        with _lock(path):
            _Build(target, dataset, target_layer_ids, path, key, batch_size, with_last, target_kv_layer_ids).run(
                progress
            )
            return cls.open(path, key, verify=False)

    @classmethod
    def build_or_open(
        cls,
        target,
        dataset,
        target_layer_ids: Sequence[int],
        path: str | Path,
        batch_size: int = 16,
        progress: bool = True,
        with_last: bool = False,
        target_kv_layer_ids: Sequence[int] | None = None,
    ) -> "TargetFeatures":
        """
        Opens the features in `path` where they are whole and still right, else builds them. Arguments and errors are
        those of [`TargetFeatures.build`]. Several processes may call it at once: one builds, the others wait.
        """
        key = features_key(target, dataset, target_layer_ids, with_last, target_kv_layer_ids)
        with _lock(path):
            try:
                return cls.open(path, key)
            except FileNotFoundError:
                pass
            except ValueError as error:
                logger.warning("The target's features are computed anew. %s", error)
            _Build(target, dataset, target_layer_ids, path, key, batch_size, with_last, target_kv_layer_ids).run(
                progress
            )
            return cls.open(path, key, verify=False)


def _lock(path: str | Path) -> FileLock:
    Path(path).mkdir(parents=True, exist_ok=True)
    return FileLock(Path(path) / ".lock")


class _Build:
    """One build: a partial file beside the finished one, a note of how much of it is written, and the renaming."""

    def __init__(
        self, target, dataset, target_layer_ids, path, key: str, batch_size: int, with_last: bool, target_kv_layer_ids
    ):
        self.target, self.path, self.batch_size = target, Path(path), batch_size
        self.taps, self.with_last = list(target_layer_ids), with_last
        self.kv_layers = list(target_kv_layer_ids or ())
        self.rows = [list(ids) for ids in dataset["input_ids"]]
        config = target.config.get_text_config()
        self.num_layers = config.num_hidden_layers
        _check_build(self.rows, self.taps, self.kv_layers, config)
        self.lengths = [len(ids) for ids in self.rows]
        self.offsets = np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)
        self.kv_shape = target_kv_shape(config) if self.kv_layers else (0, 0)
        width = (len(self.taps) + with_last) * config.hidden_size
        width += 2 * len(self.kv_layers) * self.kv_shape[0] * self.kv_shape[1]
        self.shape = (int(self.offsets[-1]), width)
        self.index = {
            "format": FORMAT_VERSION,
            "key": key,
            "target_layer_ids": self.taps,
            "target_kv_layer_ids": self.kv_layers,
            "hidden_size": config.hidden_size,
            "with_last": with_last,
            "width": self.shape[1],
            "dtype": "float16",
            "offsets": self.offsets.tolist(),
        }
        # Sequences of similar length share a batch; longest first, so that memory runs out at once or never.
        self.order = sorted(range(len(self.rows)), key=lambda row: -self.lengths[row])
        self.partial = self.path / f"{DATA_NAME}.{key[:16]}.part"
        self.note = self.path / f"{DATA_NAME}.{key[:16]}.done.part"

    def run(self, progress: bool):
        for old in set(self.path.glob(f"{DATA_NAME}.*.part")) - {self.partial, self.note}:
            old.unlink()  # of another key; nobody else builds here now
        done = self._rows_done()
        was_training = self.target.training
        self.target.eval()  # no dropout in what stands for the frozen target
        try:
            if not done:
                _allocate(self.partial, self.shape[0] * self.shape[1] * np.float16().itemsize)
            array = np.memmap(self.partial, dtype=np.float16, mode="r+", shape=self.shape)
            self._fill(array, done, progress)
            array.flush()
            rows = zip(self.offsets, self.offsets[1:])
            self.index["crc32"] = [zlib.crc32(array[start:end]) for start, end in rows]
            with written_whole(self.path / INDEX_NAME) as temporary:
                temporary.write_text(json.dumps(self.index), encoding="utf-8")
                # The index goes away first and comes back last: features without their own index are never opened.
                (self.path / INDEX_NAME).unlink(missing_ok=True)
                os.replace(self.partial, self.path / DATA_NAME)
        except Exception:
            # An interrupt or a kill leaves the partial file for the next call; an error would only come again.
            self._remove_partial()
            raise
        finally:
            self.target.train(was_training)
        self._remove_partial()

    def _fill(self, array: np.memmap, done: int, progress: bool):
        noted = time.monotonic()
        written = sum(self.lengths[row] for row in self.order[:done])
        bar = tqdm(total=self.shape[0], initial=written, unit="tok", desc="target features", disable=not progress)
        with bar:
            for start in range(done, len(self.order), self.batch_size):
                batch = self.order[start : start + self.batch_size]
                states = self._states([self.rows[row] for row in batch])
                for row, state in zip(batch, states):
                    half = _to_float16(state[: self.lengths[row]], row)
                    array[self.offsets[row] : self.offsets[row + 1]] = half
                bar.update(sum(self.lengths[row] for row in batch))
                if time.monotonic() - noted > SECONDS_BETWEEN_NOTES:
                    array.flush()
                    self.note.write_text(str(start + len(batch)))
                    noted = time.monotonic()

    def _states(self, rows: list[list[int]]) -> torch.Tensor:
        captured = captured_layers(self.taps, self.num_layers, with_last=False)
        outputs = _run_target(self.target, rows, captured, bool(self.kv_layers))
        cache = outputs.cache if self.kv_layers else None
        length = outputs.last_hidden_state.shape[1]
        states = gather_context_rows(
            outputs.hidden_states, self.taps, cache, self.kv_layers, 0, length, self.kv_shape
        )  # [b, S, C]
        if not self.with_last:
            return states
        return torch.cat([states, outputs.last_hidden_state.to(states.device)], dim=-1)

    def _rows_done(self) -> int:
        """Rows of `order` that an interrupted build has written, 0 if there is nothing to go on with."""
        size = self.shape[0] * self.shape[1] * np.float16().itemsize
        if not self.note.is_file() or not self.partial.is_file() or self.partial.stat().st_size != size:
            return 0
        text = self.note.read_text()
        return min(int(text), len(self.order)) if text.isdigit() else 0

    def _remove_partial(self):
        self.partial.unlink(missing_ok=True)
        self.note.unlink(missing_ok=True)


def _check_build(rows: list[list[int]], taps: list[int], kv_layers: list[int], config):
    if not rows:
        raise ValueError("The dataset is empty; there is nothing to compute features of.")
    empty = [row for row, ids in enumerate(rows) if not ids]
    if empty:
        raise ValueError(f"Row {empty[0]} of the dataset has no input_ids; drop such rows first.")
    if taps or not kv_layers:
        check_target_layer_ids(taps, config.num_hidden_layers)
    if kv_layers:
        check_target_kv_layer_ids(kv_layers, config)


def _allocate(file: Path, size: int):
    """Makes a file whose blocks are all there: a memory map of a file with holes kills its process where the disk runs
    full while they are filled."""
    free = shutil.disk_usage(file.parent).free
    try:
        if free < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with open(file, "wb") as opened:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(opened.fileno(), 0, size)
            else:  # macOS
                opened.truncate(size)
    except OSError as error:
        raise OSError(
            f"The features need {size / 2**30:.1f} GiB in {file.parent}, where {free / 2**30:.1f} GiB are free "
            f"({error.strerror}). Give a folder on another disk, fewer rows, or fewer target_layer_ids."
        ) from error


@torch.no_grad()
def _run_target(target, rows: list[list[int]], captured: list[int], use_cache: bool):
    lengths = torch.tensor([len(ids) for ids in rows])
    # Padding stands on the right of a causal model: no real token sees it, whatever its id.
    input_ids = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
    for i, ids in enumerate(rows):
        input_ids[i, : len(ids)] = torch.tensor(ids)
    attention_mask = (torch.arange(input_ids.shape[1]) < lengths[:, None]).long()
    device = target.get_input_embeddings().weight.device
    return target.get_decoder()(
        input_ids=input_ids.to(device),
        attention_mask=attention_mask.to(device),
        output_hidden_states=captured,
        use_cache=use_cache,
    )


def _to_float16(states: torch.Tensor, row: int) -> np.ndarray:
    half = states.to("cpu", torch.float16)
    if not torch.isfinite(half).all():
        largest = states.float().abs().max().item()
        raise ValueError(
            f"A feature of row {row} is not finite in float16 (largest value {largest:.4g}; float16 ends at 65504). "
            "Train without cached features (the target online), or tap other target_layer_ids."
        )
    return half.numpy()
