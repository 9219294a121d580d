"""A streamer for `generate()` that tells which of the text was drafted."""

from collections.abc import Callable

import torch
from transformers.generation.streamers import BaseStreamer


class OriginStreamer(BaseStreamer):
    """
    Streams text piece by piece, each with where it comes from.

    `generate()` puts the prompt first, then the one token of the prefill, then what each round yields: of `n` tokens
    the first `n - 1` were drafted and accepted, the last is the target's own. Without a drafter every round yields one
    token, the target's.

    ```python
    target.generate(**inputs, assistant_model=drafter, streamer=OriginStreamer(tokenizer, write))
    ```

    Args:
        tokenizer (`PreTrainedTokenizerBase`): the target's.
        write (`Callable[[str, bool], None]`): called with a piece of text and whether all of it was drafted.
    """

    def __init__(self, tokenizer, write: Callable[[str, bool], None]):
        self.tokenizer = tokenizer
        self.write = write
        self._begin()

    def _begin(self):
        self._saw_prompt = False
        self._ids: list[int] = []
        self._drafted: list[bool] = []
        # Two marks in _ids: text up to _read is written; decoding starts at _start, one piece earlier, because some
        # tokenizers drop the space in front of the first token they decode.
        self._start = self._read = 0

    def put(self, value: torch.Tensor):
        """Takes token ids, `[n]` or `[1, n]`."""
        ids = value.reshape(-1).tolist()
        if not self._saw_prompt:
            self._saw_prompt = True
            return
        for i, token in enumerate(ids):
            self._ids.append(token)
            self._drafted.append(i < len(ids) - 1)
            self._write_new(final=False)

    def end(self):
        """Writes what is left; the next call may use the streamer again."""
        self._write_new(final=True)
        self._begin()

    def _write_new(self, final: bool):
        before = self._decode(self._ids[self._start : self._read])
        text = self._decode(self._ids[self._start :])
        # A character whose bytes are spread over tokens decodes to a replacement character until its last token.
        if len(text) <= len(before) or (text.endswith("\ufffd") and not final):
            return
        self.write(text[len(before) :], all(self._drafted[self._read :]))
        self._start, self._read = self._read, len(self._ids)

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)


__all__ = ["OriginStreamer"]
