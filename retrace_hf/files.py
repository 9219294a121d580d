"""Files and folders that are whole whenever they are there."""

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_whole(path: str | os.PathLike) -> Iterator[Path]:
    """
    A file to write in place of `path`: it takes its name at the end of the block, and goes where the block fails.

    ```python
    with written_whole("results.json") as temporary:
        temporary.write_text(text)
    ```

    Args:
        path (`str` or `os.PathLike`): The file, replaced if it is there; its folder is made.

    Yields:
        `Path`: a name of its own in the same folder, hidden, with the same suffix.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{uuid.uuid4().hex[:8]}.tmp.{path.name}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: str | os.PathLike, text: str) -> None:
    """Writes a UTF-8 text file, whole or not at all."""
    with written_whole(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def folder_written_whole(path: str | os.PathLike) -> Iterator[Path]:
    """
    A folder to fill in place of `path`, as [`written_whole`] does for a file.

    Args:
        path (`str` or `os.PathLike`): The folder, replaced as a whole if it is there; its parent is made.

    Yields:
        `Path`: an empty folder beside it, hidden.
    """
    path = Path(path).resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    name = f".{uuid.uuid4().hex[:8]}"
    temporary, before = path.with_name(f"{name}.tmp.{path.name}"), path.with_name(f"{name}.old.{path.name}")
    temporary.mkdir()
    try:
        yield temporary
        if path.exists():
            os.replace(path, before)
        os.replace(temporary, path)
    finally:
        if before.exists() and not path.exists():  # an error or an interrupt between the two
            os.replace(before, path)
        for folder in (temporary, before):
            shutil.rmtree(folder, ignore_errors=True)


__all__ = ["folder_written_whole", "write_text", "written_whole"]
