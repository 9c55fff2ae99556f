"""What a replay leaves alone: files of the run before, and memory that was saved into."""

# ruff: noqa: PTH104, PTH105, PTH107, PTH123 - as scripts call them

from __future__ import annotations

import io
import os
import pickle
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from fasttrain.shim.snapshots.replayed_files import Buffers, LeftFiles

GOOD = b"of the run before"


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with files of the run before, which is the present one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoint-6").mkdir()
    for name in ("best.pt", "last.pt", "checkpoint-6/model.pt"):
        path = tmp_path / name
        path.write_bytes(GOOD)
        os.utime(path, (time.time() - 60,) * 2)
    return tmp_path


@pytest.fixture
def serialize_file(monkeypatch: pytest.MonkeyPatch) -> Any:
    """safetensors, whose compiled code writes."""
    module: Any = ModuleType("safetensors.torch")
    module.serialize_file = lambda data, filename, **_: Path(filename).write_bytes(data)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return lambda *args, **kwargs: module.serialize_file(*args, **kwargs)


@pytest.fixture
def files(there: Path, serialize_file: Any) -> Iterator[LeftFiles]:
    with ExitStack() as undo:
        files = LeftFiles()
        files.begin(undo)
        yield files


def pickled(path: str) -> None:
    with open(path, "wb") as file:
        pickle.dump({"untrained": 1}, file)


def scripted(path: str) -> None:
    torch.jit.script(nn.Linear(1, 1)).save(path)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit is on its way out
def test_what_is_there_is_not_written_again(
    files: LeftFiles, there: Path, serialize_file: Any
) -> None:
    torch.save({}, "best.pt")
    torch.save(obj={}, f=there / "best.pt")
    pickled("best.pt")
    scripted("best.pt")
    serialize_file(b"untrained", "best.pt")
    serialize_file(b"untrained", filename="best.pt")
    Path("best.pt").write_bytes(b"untrained")
    with open("best.pt", "ab") as log:
        log.write(b"untrained")
    assert Path("best.pt").read_bytes() == GOOD
    assert files.left == 8


def test_what_is_there_is_not_removed_or_renamed(files: LeftFiles) -> None:
    os.remove("last.pt")
    Path("last.pt").unlink()
    os.replace("best.pt", "last.pt")
    os.rename("checkpoint-6", "checkpoint-best")
    shutil.rmtree("checkpoint-6")
    for name in ("best.pt", "last.pt", "checkpoint-6/model.pt"):
        assert Path(name).read_bytes() == GOOD
    assert files.left == 5


def test_a_draft_of_what_is_there_is_dropped(files: LeftFiles) -> None:
    for draft in ("best.pt.new", "draft/model.pt"):
        Path(draft).parent.mkdir(exist_ok=True)
        torch.save({}, draft)
    os.replace("best.pt.new", "best.pt")
    os.replace("draft", "checkpoint-6")
    assert Path("best.pt").read_bytes() == GOOD
    assert Path("checkpoint-6/model.pt").read_bytes() == GOOD
    assert not Path("draft").exists()
    assert not Path("best.pt.new").exists()


def test_names_that_are_free_can_be_used_and_hold_nothing_in_the_end(files: LeftFiles) -> None:
    """The best model so far, saved by its epoch, and removed when there is a better one."""
    for epoch in range(3):
        torch.save({"epoch": epoch}, f"best-{epoch}.pt")
        if epoch:
            os.remove(f"best-{epoch - 1}.pt")
    assert torch.load("best-2.pt") == {"epoch": 2}
    os.replace("best-2.pt", "moved.pt")
    Path("log.txt").write_text("epoch 2\n")
    assert files.end() == [str(Path("moved.pt").absolute())]
    assert Path("moved.pt").read_bytes() == b""
    assert Path("log.txt").read_text() == "epoch 2\n"


def test_a_file_that_is_open_still_is_refused(files: LeftFiles, capfd: Any) -> None:
    with open("last.pt", "wb"), pytest.raises(SystemExit):
        files.end()
    assert "last.pt" in (told := capfd.readouterr().err)
    assert "[snapshot-open-file]" in told
    assert files.end() == []


def test_behind_the_replay_files_are_files(there: Path) -> None:
    with ExitStack() as undo:
        LeftFiles().begin(undo)
    pickled("best.pt")
    assert Path("best.pt").read_bytes() != GOOD
    os.remove("last.pt")
    assert not Path("last.pt").exists()


def test_what_was_saved_into_memory_is_kept(capfd: Any) -> None:
    with ExitStack() as undo:
        buffers = Buffers()
        buffers.install(undo)
        best, gone = io.BytesIO(), io.BytesIO()
        torch.save({"loss": 0.25}, best)
        torch.save(obj={}, f=gone)
        best.seek(3)
        del gone
        ((content, place),) = buffers.state()
        assert place == 3
        best.truncate(0)
        buffers.restore([(content, 0)])
        assert torch.load(best) == {"loss": 0.25}
        best.close()
        with pytest.raises(SystemExit):
            buffers.restore([(content, 0)])
    assert "[snapshot-diverged]" in capfd.readouterr().err
