"""Results that took long, kept line by line, so that a run that was stopped goes on."""

import hashlib
import json
import os
from pathlib import Path


class KeptLines:
    """
    A JSON-lines file of results by id. Lines made under another key (other weights, prompts, options) are as good as
    not there; they stay in the file.

    Args:
        path (`str` or `Path`): the file; made, with its folder, by the first line.
        key (`dict`): everything the results depend on.

    Raises:
        `ValueError`: a line that was not written here. One that a kill cut short at the end is taken away.
    """

    def __init__(self, path: str | os.PathLike, key: dict):
        self.path = Path(path)
        self.key = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
        self.rows: dict[str, dict] = {}
        if not self.path.is_file():
            return
        text = self.path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        if len(whole) < len(text):  # a kill cut the last line short
            os.truncate(self.path, len(whole))
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                row = json.loads(line)
                row_id, key = row["id"], row["key"]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"Line {number} of {self.path} is damaged: {type(error).__name__}: {error}. Delete the line; "
                    "what it held is measured again."
                ) from error
            if key == self.key:
                self.rows[row_id] = row

    def __contains__(self, row_id: str) -> bool:
        return row_id in self.rows

    def __getitem__(self, row_id: str) -> dict:
        return self.rows[row_id]

    def add(self, row: dict):
        """Keeps a row with an `"id"`; on the disk when this returns."""
        row = {"key": self.key, **row}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.rows[row["id"]] = row
