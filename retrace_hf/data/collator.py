"""Rows of tokens, and features of the target where there are some, to one padded batch."""

from dataclasses import dataclass

import numpy as np
import torch


@dataclass
class RetraceDataCollator:
    """
    Pads rows of [`~retrace_hf.data.tokenize.tokenize_responses`] on the right. Anchors are not chosen here: the
    trainer samples them, anew in every epoch.

    Args:
        pad_token_id (`int`, *optional*, defaults to `0`):
            Token written into padded positions. `attention_mask` and `loss_mask` are 0 there, so any id of the
            vocabulary will do.
        features (`TargetFeatures`, *optional*):
            Anything whose `features[row]` is the `np.float16` array `[length, C]` (see `context.py`) of dataset row
            `row` (its `last_size`, if it has one, says how many of the columns are the last hidden state). With it
            the batch carries `context_hidden_states`, and every row needs the column `"row"`, its index in the
            dataset the features were built from.
        vocab_size (`int`, *optional*):
            The target's embedding rows. With it a row of tokens beyond them is refused; the trainer sets it.

    Returns:
        `dict[str, torch.Tensor]`: `input_ids` `[b, S]` int64, `attention_mask` `[b, S]` int64, `loss_mask` `[b, S]`
        bool; `row` `[b]` int64 if the rows have it; `context_hidden_states` `[b, S, C]` float32, zero at padding,
        if `features` is given, and `target_last_states` `[b, S, D]` if they hold them.

    Raises:
        `ValueError`: an empty batch, a row without tokens or mask, a mask of another length than its tokens,
        tokens beyond the vocabulary,
        `features` without the column `"row"`, or features of another length than the row's tokens.
    """

    pad_token_id: int = 0
    features: object | None = None
    vocab_size: int | None = None

    def __call__(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        if not rows:
            raise ValueError("RetraceDataCollator got an empty batch; give it at least one row.")
        for i, row in enumerate(rows):
            self.check_columns(row, f"row {i} of a batch")
        lengths = [len(row["input_ids"]) for row in rows]
        for i, (row, length) in enumerate(zip(rows, lengths)):
            if len(row["loss_mask"]) != length:
                raise ValueError(
                    f"Row {row.get('id', i)!r} has {length} input_ids but {len(row['loss_mask'])} loss_mask entries; "
                    "make both with retrace_hf.data.tokenize.tokenize_responses."
                )

        shape = (len(rows), max(lengths))
        batch = {
            "input_ids": torch.full(shape, self.pad_token_id, dtype=torch.int64),
            "attention_mask": torch.zeros(shape, dtype=torch.int64),
            "loss_mask": torch.zeros(shape, dtype=torch.bool),
        }
        for i, (row, length) in enumerate(zip(rows, lengths)):
            batch["input_ids"][i, :length] = torch.as_tensor(row["input_ids"], dtype=torch.int64)
            tokens = batch["input_ids"][i, :length]
            if (
                self.vocab_size is not None
                and length
                and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.vocab_size
            ):
                raise ValueError(
                    f"Row {row.get('id', i)!r} has tokens {int(tokens.min())} to {int(tokens.max())} and the target's "
                    f"vocabulary has {self.vocab_size}; tokenise the rows with the target's own tokenizer."
                )
            batch["attention_mask"][i, :length] = 1
            batch["loss_mask"][i, :length] = torch.as_tensor(row["loss_mask"], dtype=torch.bool)

        if all("row" in row for row in rows):
            batch["row"] = torch.tensor([int(row["row"]) for row in rows], dtype=torch.int64)
        if self.features is not None:
            features = self._gather_features(batch, lengths)
            last_size = getattr(self.features, "last_size", 0)
            if last_size:
                batch["target_last_states"] = features[..., -last_size:]
                features = features[..., :-last_size]
            batch["context_hidden_states"] = features
        return batch

    @staticmethod
    def check_columns(row: dict, where: str):
        """Raises a ValueError that names a column which a row lacks."""
        for column in ("input_ids", "loss_mask"):
            if column not in row:
                raise ValueError(
                    f"There is no column {column!r} in {where}, only {sorted(row)}; make the rows with `retrace-hf "
                    "prepare` (in Python: retrace_hf.data.tokenize.tokenize_responses)."
                )

    def _gather_features(self, batch: dict[str, torch.Tensor], lengths: list[int]) -> torch.Tensor:
        if "row" not in batch:
            raise ValueError(
                'Features of the target are looked up by the column "row", which is missing. Add it to the dataset '
                'the features were built from, before shuffling or splitting: dataset.add_column("row", '
                "list(range(len(dataset)))), and set remove_unused_columns=False in the training arguments."
            )
        arrays = [self.features[row] for row in batch["row"].tolist()]
        for row, array, length in zip(batch["row"].tolist(), arrays, lengths):
            if len(array) != length:
                raise ValueError(
                    f"The features of row {row} cover {len(array)} tokens but the row has {length}: they belong to "
                    "another dataset. Rebuild them with TargetFeatures.build_or_open."
                )
        features = torch.zeros((*batch["input_ids"].shape, arrays[0].shape[-1]), dtype=torch.float32)
        for i, array in enumerate(arrays):
            features[i, : len(array)] = torch.from_numpy(np.asarray(array, dtype=np.float32))
        return features  # [b, S, F*D]
