"""Run folders: complete at every moment, refused if they hold another run, and locked."""

import errno
import json
import os

import pytest

from mfac.app.runs.folder import open_run, read_run

CELL = {"label": "mfac", "method": "mfac", "asked": 0.9, "files": {"weights": "mfac-0.9/weights.safetensors"}}


def description(**changes):
    base = {
        "kind": "prune",
        "task": {"name": "small", "measure": "accuracy", "higher_is_better": True, "source": "small.py"},
        "model": {"weights": 10, "tensors": 2},
        "settings": {"sparsities": [0.9], "num_grads": 64},
        "digests": {"the task": "abc"},
    }
    return base | changes


def begin(path, **changes):
    with open_run(path, description(**changes)) as folder:
        folder.add(CELL)


def test_a_run_is_resumed_with_its_cells_and_its_start(tmp_path):
    begin(tmp_path / "run")
    before = read_run(tmp_path / "run")
    moved = {**description()["task"], "source": "../there/small.py"}  # the same file by another path
    with open_run(tmp_path / "run", description(task=moved)) as folder:
        assert folder.record == before
        assert folder.has(method="mfac", asked=0.9)
        assert not folder.has(method="mfac", asked=0.8)
        assert folder.record["finished"] is None
        folder.finish()
    after = read_run(tmp_path / "run" / "run.json")
    assert after["finished"] >= after["started"] == before["started"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"settings": {"sparsities": [0.8, 0.9], "num_grads": 64}}, r"sparsities was 0.9 and is now 0.8, 0.9"),
        ({"settings": {"sparsities": [0.9], "num_grads": None}}, r"num_grads was 64 and is now none"),
        ({"kind": "train"}, r"the command was prune and is now train"),
        ({"model": {"weights": 11, "tensors": 2}}, r"model weights was 10 and is now 11"),
        ({"digests": {"the task": "xyz"}}, r"the content of the task was abc and is now xyz"),
    ],
)
def test_the_folder_of_another_run_is_refused_with_the_difference(tmp_path, changes, words):
    begin(tmp_path)
    before = (tmp_path / "run.json").read_bytes()
    with (
        pytest.raises(ValueError, match=f"holds another run: {words}; .*--out.*--fresh"),
        open_run(tmp_path, description(**changes)),
    ):
        pass
    assert (tmp_path / "run.json").read_bytes() == before


def test_fresh_removes_the_files_of_the_run_and_no_others(tmp_path):
    with open_run(tmp_path, description()):
        pass
    with open_run(tmp_path, description(settings={})) as folder:  # a run without results is replaced
        folder.add(CELL)
    (tmp_path / "mfac-0.9").mkdir()
    for name in ("dense.safetensors", "report.html", "notes.txt", "mfac-0.9/weights.safetensors", "mfac-0.9/mine.txt"):
        (tmp_path / name).write_text("x")
    with open_run(tmp_path, description(), fresh=True) as folder:
        assert folder.record["cells"] == []
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {".lock", "run.json", "notes.txt", "mfac-0.9/mine.txt"}


def test_a_folder_in_use_or_of_something_else_is_refused(tmp_path):
    with (
        open_run(tmp_path / "run", description()),
        pytest.raises(ValueError, match=r"another process is writing to .*--out"),
        open_run(tmp_path / "run", description()),
    ):
        pass
    (tmp_path / "thesis.tex").write_text("x")
    for path, words in ((tmp_path, r"not a run folder \(it contains run\)"), (tmp_path / "thesis.tex", "is a file")):
        with pytest.raises(ValueError, match=words), open_run(path, description()):
            pass


def test_a_full_disk_leaves_the_record_as_it_was(tmp_path, monkeypatch):
    begin(tmp_path)
    before = (tmp_path / "run.json").read_bytes()

    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with open_run(tmp_path, description()) as folder:
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left") as caught:
            folder.add({**CELL, "asked": 0.5})
        assert caught.value.filename == str(tmp_path / "run.json")
        assert folder.record["cells"] == json.loads(before)["cells"] == [CELL]
    assert (tmp_path / "run.json").read_bytes() == before
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "not a run folder"), ("{", "is not valid JSON"), ('{"format": 7}', "format 7; this"), ("[]", "list")],
)
def test_a_file_that_is_no_record_is_refused(tmp_path, content, words):
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(ValueError, match=words):
        read_run(tmp_path)
