"""What a replay leaves alone: files of the run before, and memory that was saved into."""

# ruff: noqa: T201, PTH102, PTH103, PTH115, PTH211, PTH104, PTH105, PTH107, PTH123 - as scripts call them

from __future__ import annotations

import io
import logging
import os
import pickle
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from logging.handlers import RotatingFileHandler
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from fasttrain.shim.hooks import patching
from fasttrain.shim.snapshots.replay import SilencedStdout
from fasttrain.shim.snapshots.replayed_files import Buffers, LeftFiles
from fasttrain.shim.snapshots.saved_files import SavedFiles

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
        files = LeftFiles(SavedFiles(acts=True))
        files.install(undo)
        files.begin(undo)
        yield files


def pickled(path: str) -> None:
    with open(path, "wb") as file:
        pickle.dump({"untrained": 1}, file)


def scripted(path: str) -> None:
    torch.jit.script(nn.Linear(1, 1)).save(path)


def traced(path: str) -> None:
    torch.jit.trace(nn.Linear(1, 1), torch.ones(1, 1)).save(path)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit is on its way out
def test_what_is_there_is_not_written_again(
    files: LeftFiles, there: Path, serialize_file: Any
) -> None:
    torch.save({}, "best.pt")
    torch.save(obj={}, f=there / "best.pt")
    pickled("best.pt")
    scripted("best.pt")
    traced("best.pt")
    serialize_file(b"untrained", "best.pt")
    serialize_file(b"untrained", filename="best.pt")
    Path("best.pt").write_bytes(b"untrained")
    with open("best.pt", "ab") as log:
        log.write(b"untrained")
    assert Path("best.pt").read_bytes() == GOOD
    assert files.left == 9


def test_an_exported_program_that_is_there_is_not_written_again(files: LeftFiles) -> None:
    program = torch.export.export(nn.Linear(1, 1), (torch.ones(1, 1),))
    left = files.left
    torch.export.save(program, "best.pt")
    assert Path("best.pt").read_bytes() == GOOD
    assert files.left == left + 1


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


def test_a_draft_that_was_written_unseen_is_dropped_as_well(files: LeftFiles) -> None:
    with tempfile.NamedTemporaryFile(dir=".", delete=False) as draft:
        torch.save({}, draft)
    os.replace(draft.name, "best.pt")
    assert Path("best.pt").read_bytes() == GOOD
    assert not Path(draft.name).exists()
    assert files.left == 1


def test_a_folder_and_a_link_that_are_there_can_be_made_once(files: LeftFiles) -> None:
    os.symlink("best.pt", "latest.pt")
    os.utime("latest.pt", (time.time() - 60,) * 2, follow_symlinks=False)
    files._new.clear()  # it is of the run before
    os.makedirs("checkpoint-6")
    with pytest.raises(FileExistsError):
        os.mkdir("checkpoint-6")
    os.remove("latest.pt")
    os.symlink("last.pt", "latest.pt")
    assert os.readlink("latest.pt") == "best.pt"
    assert files.left == 3


def test_files_of_fasttrain_itself_are_written(files: LeftFiles, there: Path) -> None:
    (there / "report.json").write_text("{}")
    own = compile("os.replace('report.json', 'last.pt')", patching.__file__, "exec")
    exec(own, {"os": os})
    assert Path("last.pt").read_text() == "{}"
    assert files.left == 0


def test_a_file_that_is_open_still_is_refused(files: LeftFiles, capfd: Any) -> None:
    with open("last.pt", "wb"), pytest.raises(SystemExit):
        files.end()
    assert "last.pt" in (told := capfd.readouterr().err)
    assert "[snapshot-open-file]" in told
    assert files.end() == []


def test_behind_the_replay_files_are_files(there: Path) -> None:
    with ExitStack() as undo:
        left = LeftFiles(SavedFiles(acts=True))
        left.install(undo)
        with ExitStack() as replaying:
            left.begin(replaying)
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


@pytest.fixture
def resumed(there: Path) -> Iterator[LeftFiles]:
    """The files of a run that goes on from a snapshot, whose replay has not begun."""
    (there / "train.log").write_text("1\n2\nlost\n")
    with ExitStack() as undo:
        files = LeftFiles(SavedFiles(acts=True))
        files.install(undo)
        files.need({str(there / "train.log"): len("1\n2\n")}, there / "appended")
        yield files


def test_what_a_replay_appends_is_cut_off(resumed: LeftFiles, capfd: Any) -> None:
    with open("train.log", "a") as log:
        with ExitStack() as replaying:
            resumed.begin(replaying)
            log.write("1\n")
            with open("train.log", "a") as again:
                again.write("2\n")
        assert resumed.end() == []
        log.write("3\n")
    assert Path("train.log").read_text() == "1\n2\n3\n"
    assert Path("appended/0-train.log").read_text() == "lost\n"
    assert "appended/0-train.log" in capfd.readouterr().err


def removed() -> None:
    os.remove("train.log")


def renamed() -> None:
    os.rename("train.log", "train.log.old")


def begun_anew() -> None:
    with open("train.log", "w") as log:
        log.write("")


@pytest.mark.parametrize("start", [removed, renamed, begun_anew])
@pytest.mark.parametrize("opened", [False, True])
def test_a_file_that_is_begun_anew_holds_what_the_replay_has_written(
    resumed: LeftFiles, start: Any, *, opened: bool
) -> None:
    if opened:
        with open("train.log", "a"):
            pass
    start()
    with ExitStack() as replaying:
        resumed.begin(replaying)
        for epoch in ("one", "two"):
            with open("train.log", "a") as log:
                log.write(f"{epoch}\n")
    assert resumed.end() == []
    assert Path("train.log").read_text() == "one\ntwo\n"


def test_a_log_that_is_rotated_in_a_replay_stays(resumed: LeftFiles) -> None:
    Path("train.log.1").write_text("0\n")
    os.utime("train.log.1", (time.time() - 60,) * 2)
    handler = RotatingFileHandler("train.log", maxBytes=12, backupCount=1)
    with ExitStack() as replaying:
        resumed.begin(replaying)
        for text in "abc":
            handler.emit(logging.makeLogRecord({"msg": text}))
    resumed.end()
    handler.close()
    assert Path("train.log.1").read_text() == "0\n"
    assert Path("train.log").read_text() == "1\n2\n"


def test_what_is_appended_counts_before_it_is_flushed(resumed: LeftFiles) -> None:
    with open("new.log", "a") as log:
        log.write("12345")
        with open("gone.log", "ab"):
            pass
        os.remove("gone.log")
        assert resumed.appended() == {str(Path("new.log").absolute()): 5}


class Tee:
    """As many scripts have it, with a ``flush`` that does nothing or with none."""

    def __init__(self, terminal: Any) -> None:
        self.write = terminal.write


def test_what_is_printed_again_through_an_object_of_the_scripts_is_silent(
    capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = open(1, "w", closefd=False)  # noqa: SIM115
    monkeypatch.setattr(sys, "__stdout__", terminal)
    monkeypatch.setattr(sys, "stdout", Tee(terminal))
    silence = SilencedStdout()
    print("before")
    silence.begin()
    print("again")
    silence.end()
    print("new")
    terminal.close()
    assert capfd.readouterr().out == "before\nnew\n"
