import gzip
import os
import threading

import pytest

from retrace_hf.data.prompts import open_text
from retrace_hf.files import folder_written_whole, write_text, written_whole


def test_a_file_is_the_old_one_until_it_is_whole(tmp_path):
    path = tmp_path / "made" / "results.json"
    write_text(path, "old \u00e9\n")
    with written_whole(path) as temporary:
        temporary.write_text("ne")
        assert path.read_text(encoding="utf-8") == "old \u00e9\n" and temporary.parent == path.parent
        temporary.write_text("new")
    assert path.read_text() == "new" and os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path, error):
    path = tmp_path / "results.json"
    write_text(path, "old")
    with pytest.raises(error), written_whole(path) as temporary:
        temporary.write_text("ne")
        raise error
    assert path.read_text() == "old" and os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_folder_that_is_there_is_not_lost_between_two_names(tmp_path, monkeypatch, error, at):
    """The old one has another name for a moment, and that is when it must not go."""
    write_text(tmp_path / "made" / "config.json", "old")
    replace, calls = os.replace, []

    def interrupted(source, destination):
        calls.append(source)
        if len(calls) == at:
            raise error
        replace(source, destination)

    with pytest.raises(error), folder_written_whole(tmp_path / "made") as temporary:
        (temporary / "config.json").write_text("new")
        monkeypatch.setattr(os, "replace", interrupted)
    assert (tmp_path / "made" / "config.json").read_text() == "old" and os.listdir(tmp_path) == ["made"]


def test_the_temporary_name_has_the_suffix_that_says_how_to_write(tmp_path):
    with written_whole(tmp_path / "rows.jsonl.gz") as temporary, open_text(temporary, "w") as file:
        file.write("{}")
    assert gzip.open(tmp_path / "rows.jsonl.gz", "rt").read() == "{}"


def test_writers_at_once_do_not_meet(tmp_path):
    path, both = tmp_path / "results.json", threading.Barrier(2)

    def write(text):
        with written_whole(path) as temporary:
            temporary.write_text(text[:1])
            both.wait(timeout=30)
            assert temporary.read_text() == text[:1]
            temporary.write_text(text)

    threads = [threading.Thread(target=write, args=(text,)) for text in ("aaa", "bbb")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_text() in ("aaa", "bbb") and os.listdir(tmp_path) == [path.name]
