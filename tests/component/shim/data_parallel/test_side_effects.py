"""What rank 0 leaves on disk, what another rank doesn't, and that both see the same."""
# ruff: noqa: PTH101, PTH102, PTH103, PTH104, PTH105, PTH106, PTH107, PTH110, PTH114, PTH115
# ruff: noqa: PTH116, PTH119, PTH123, PTH202, PTH204, PTH207, PTH208, PTH211, SIM115

from __future__ import annotations

import glob
import importlib
import io
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from fasttrain.model.outcome import State
from fasttrain.shim.data_parallel.answers.answers import Answers
from fasttrain.shim.data_parallel.answers.lever import LEFT, SideEffects
from fasttrain.shim.data_parallel.ranks import Ranks
from fasttrain.shim.hooks.outcome_recorder import OutcomeRecorder
from support.forked_ranks import on_ranks

NODES = pytest.mark.parametrize("nodes", [1, 2])
Start = Callable[[int], SideEffects]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Put the lever of a rank in place until the test has ended; rank 0 answers nothing."""
    monkeypatch.setenv("WANDB_MODE", "disabled")  # as the lever sets it
    with ExitStack() as undo:

        def install(rank: int) -> SideEffects:
            ranks: Any = SimpleNamespace(rank=rank, store=None, waits=nullcontext)
            recorder = OutcomeRecorder("side_effects", "rank 0", explicit=False)
            lever = SideEffects(recorder, ranks, Answers(ranks), tmp_path / "scratch")
            lever.install(undo)
            return lever

        yield install


def install(ranks: Ranks, tmp_path: Path) -> tuple[SideEffects, ExitStack]:
    undo = ExitStack()
    answers = Answers(ranks)
    answers.install(undo)
    recorder = OutcomeRecorder("side_effects", "rank 0", explicit=False)
    lever = SideEffects(recorder, ranks, answers, tmp_path / f"run/rank-{ranks.rank}.files")
    lever.install(undo)
    return lever, undo


def on_both(tmp_path: Path, act: Callable[[int], Any], *, nodes: int = 1) -> Any:
    """Return what a function returns on both ranks alike; they come everywhere at other times."""
    here = tmp_path / "here"
    here.mkdir()

    def run(ranks: Ranks) -> Any:
        os.chdir(here)
        install(ranks, tmp_path)
        return act(ranks.rank)

    first, second = on_ranks(tmp_path, run, nodes=nodes)
    assert (first.code, second.code) == (0, 0), first.stderr + second.stderr
    assert first.value == second.value
    return first.value


def left(tmp_path: Path) -> dict[str, str]:
    """Return the files that are there when the ranks have ended."""
    here = tmp_path / "here"
    return {
        str(path.relative_to(here)): path.read_text() for path in here.rglob("*") if path.is_file()
    }


def late(rank: int, of: int) -> None:
    """Have one rank come later than the other."""
    if rank == of:
        time.sleep(0.2)


@pytest.mark.parametrize(("rank", "mode"), [(0, "offline"), (1, "disabled")])
def test_only_rank_0_makes_a_wandb_run(
    start: Start, monkeypatch: pytest.MonkeyPatch, rank: int, mode: str
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    start(rank)
    assert os.environ["WANDB_MODE"] == mode


@pytest.mark.parametrize(("rank", "mode"), [(0, "online"), (1, "disabled")])
def test_a_mode_that_the_script_chooses_is_rank_0s(
    start: Start, monkeypatch: pytest.MonkeyPatch, rank: int, mode: str
) -> None:
    asked: list[dict[str, Any]] = []
    standin = ModuleType("wandb")  # init() takes keywords alone
    vars(standin)["init"] = lambda **kwargs: asked.append(kwargs)
    monkeypatch.setitem(sys.modules, "wandb", standin)
    start(rank)
    vars(standin)["init"](project="p", mode="online")
    assert asked == [{"project": "p", "mode": mode}]


@NODES
@pytest.mark.parametrize("slow", [0, 1])
def test_a_checkpoint_is_written_once_and_found_by_all(
    tmp_path: Path, nodes: int, slow: int
) -> None:
    def act(rank: int) -> Any:
        found = []
        for step in range(3):
            late(rank, slow)
            found.append(os.path.exists("last.pt"))
            if found[-1]:
                found.append(torch.load("last.pt")["step"])
            late(rank, 1 - slow)
            torch.save({"step": step, "rank": rank}, "last.pt.tmp")
            os.replace("last.pt.tmp", "last.pt")
            found.append(torch.load("last.pt"))
        return found

    found = on_both(tmp_path, act, nodes=nodes)
    assert found[0] is False
    assert found[-1] == {"step": 2, "rank": 0}


def save_scripted(model: Any, path: str) -> Any:
    torch.jit.trace(model, torch.ones(1, 2)).save(path)
    return torch.jit.load(path).state_dict()


def save_exported(model: Any, path: str) -> Any:
    torch.export.save(torch.export.export(model, (torch.ones(1, 2),)), path)
    return torch.export.load(path).state_dict


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("save", [save_scripted, save_exported])
def test_a_graph_that_is_saved_is_rank_0s(
    tmp_path: Path, save: Callable[[Any, str], dict[str, torch.Tensor]]
) -> None:
    def act(rank: int) -> Any:
        model = torch.nn.Linear(2, 1)
        torch.nn.init.constant_(model.weight, rank)
        late(rank, 1)
        found = save(model, "model.pt2")
        late(rank, 0)
        return found["weight"].tolist()

    assert on_both(tmp_path, act) == [[0.0, 0.0]]


def test_a_save_that_fails_fails_on_all_ranks(tmp_path: Path) -> None:
    def act(rank: int) -> Any:
        try:
            torch.save({"rank": rank}, "missing/last.pt")
        except RuntimeError as error:
            return str(error).splitlines()[0]

    assert "missing" in on_both(tmp_path, act)


def test_links_and_folders_are_made_once(tmp_path: Path) -> None:
    def act(rank: int) -> Any:
        found: list[Any] = []
        for step in range(3):
            os.makedirs("ck", exist_ok=True)
            Path("ck", str(step)).write_text(str(step))
            if os.path.lexists("last"):
                late(rank, 1)
                os.remove("last")
            os.symlink(f"ck/{step}", "last")
            late(rank, 0)
            found += [os.path.islink("last"), os.readlink("last"), sorted(os.listdir("ck"))]
            Path(f"touched-{step}").touch()
            Path(f"touched-{step}").touch(exist_ok=True)
        os.link("ck/0", "hard")
        os.truncate("hard", 0)
        os.utime("hard", (5, 5))
        os.chmod("hard", 0o600)
        os.mkfifo("fifo")
        return [found, os.path.getmtime("hard"), os.stat("hard").st_mode, os.path.getsize("ck/0")]

    found, modified, mode, size = on_both(tmp_path, act)
    assert found[-3:] == [True, "ck/2", ["0", "1", "2"]]
    assert (modified, mode & 0o777, size) == (5, 0o600, 0)
    assert left(tmp_path)["last"] == "2"


def test_errors_are_those_of_rank_0(tmp_path: Path) -> None:
    def act(rank: int) -> Any:
        met = []
        os.mkdir("there")
        late(rank, 1)
        for call in (
            lambda: os.mkdir("there"),
            lambda: os.remove("missing"),
            lambda: os.rmdir("missing"),
            lambda: open("missing"),
            lambda: open("missing/a", "w"),
            lambda: open("there/x", "x").close(),
            lambda: open("there/x", "x"),
            lambda: os.stat("missing"),
            lambda: shutil.copy("missing", "there"),
            lambda: shutil.copyfile("there/x", "there/x"),
        ):
            try:
                call()
            except OSError as error:
                met.append([type(error).__name__, str(error)])
        return met

    met = [name for name, _ in on_both(tmp_path, act)]
    assert met == ["FileExistsError", *["FileNotFoundError"] * 4, "FileExistsError",
                   *["FileNotFoundError"] * 2, "SameFileError"]  # fmt: skip


def test_shutil_is_called_once(tmp_path: Path) -> None:
    def act(rank: int) -> Any:
        Path("a/b").mkdir(parents=True)
        Path("a/b/text").write_text("0123")
        found: list[Any] = [
            shutil.copytree("a", "copy"),
            shutil.copy("a/b/text", "copy"),
            str(shutil.copy2(Path("a/b/text"), Path("copied"))),
            shutil.move("copied", "copy/moved"),
            os.path.relpath(shutil.make_archive("packed", "tar", "a")),
        ]
        shutil.unpack_archive("packed.tar", "unpacked")
        late(rank, 1)
        shutil.rmtree("a")
        found += [os.path.exists("a"), sorted(glob.glob("**/*", recursive=True))]
        found.append([[top, sorted(dirs), sorted(files)] for top, dirs, files in os.walk(".")])
        with os.scandir("copy") as entries:
            found.append(
                sorted([e.name, e.path, e.is_dir(), e.stat().st_size > 0] for e in entries)
            )
        found.append(sorted(map(str, Path().rglob("t*"))))
        return found

    found = on_both(tmp_path, act)
    assert found[:6] == ["copy", "copy/text", "copied", "copy/moved", "packed.tar", False]
    assert sorted(left(tmp_path)) == ["copy/b/text", "copy/moved", "copy/text", "packed.tar",
                                      "unpacked/b/text"]  # fmt: skip


def test_what_the_script_writes_and_reads_again_is_its_own(tmp_path: Path) -> None:
    (tmp_path / "before").write_text("before\n")

    def act(rank: int) -> Any:
        found = []
        with open("kept", "w") as kept:  # rank 0 goes ahead, and writes on
            for step in range(3):
                kept.write(str(step))
                kept.flush()
                late(rank, 1)
                found.append(Path("kept").read_text())
        os.remove("kept")
        shutil.copy("../before", "log")
        Path("state").write_text("first")
        for step in range(3):
            late(rank, step % 2)
            found.append(Path("state").read_text())
            Path("state").write_text(f"{found[-1]} {step}")
            with open("log", "a") as log:
                log.write(f"{step}\n")
            with open("log", "r+") as log:
                log.write("B")
            found.append(Path("log").read_text())
        descriptor = os.open("raw", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        os.write(descriptor, b"raw")
        os.close(descriptor)
        found.append(Path("raw").read_text())
        os.rename("raw", "renamed")
        found += [os.path.exists("raw"), Path("renamed").read_text(), open("log").read()]
        return found

    found = on_both(tmp_path, act)
    assert found[:3] == ["0", "01", "012"]
    assert found[-4:] == ["raw", False, "raw", "Before\n0\n1\n2\n"]
    assert left(tmp_path) == {
        "log": "Before\n0\n1\n2\n", "state": "first 0 1 2", "renamed": "raw"
    }  # fmt: skip


def test_temporary_files_are_each_ranks_own(tmp_path: Path) -> None:
    def act(rank: int) -> Any:
        found: list[Any] = []
        with tempfile.TemporaryDirectory() as folder:
            torch.save({"rank": rank}, f"{folder}/model.pt")
            assert torch.load(f"{folder}/model.pt") == {"rank": rank}
            os.mkdir(f"{folder}/in")
            Path(folder, "in/text").write_text(str(rank))
            found += [sorted(p.name for p in Path(folder).iterdir()), os.listdir(f"{folder}/in")]
        found.append(os.path.exists(folder))
        with tempfile.NamedTemporaryFile("w", dir=".", delete=False) as file:
            file.write("whole")
        found.append(os.listdir() == [os.path.basename(file.name)])
        late(rank, 1)
        os.replace(file.name, "final")
        if rank == 0:
            assert found.pop() is True  # the others' files have other names
        else:
            found.pop()
        return [found, os.path.exists("final"), os.listdir(), os.path.exists(file.name)]

    found, *rest = on_both(tmp_path, act)
    assert found == [["in", "model.pt"], ["text"], False]
    assert rest == [True, ["final"], False]
    assert left(tmp_path) == {"final": "whole"}


@pytest.mark.parametrize("rank", [0, 1])
def test_checkpoints_in_temporary_files_are_not_taken_for_none(rank: int, start: Start) -> None:
    lever = start(rank)
    none = lever.recorder.outcome()
    with tempfile.TemporaryDirectory() as folder:
        torch.save(rank, f"{folder}/model.pt")
    temporary = lever.recorder.outcome()
    assert none.state is temporary.state is State.SKIPPED
    assert none.reason != temporary.reason


def test_commands_run_once_and_all_ranks_hear_of_them(tmp_path: Path) -> None:
    def act(rank: int) -> Any:
        late(rank, 1)
        done = subprocess.run(["sh", "-c", "echo x >> log; wc -l < log"], capture_output=True)
        found: list[Any] = [done.returncode, done.stdout.strip().decode(), done.args[0]]
        found.append(subprocess.check_output(["wc", "-l", "log"], text=True).split())
        found.append(os.system("echo x >> log"))
        found += subprocess.getstatusoutput("mkdir made && echo done")
        for check in (True, False):
            try:
                again = subprocess.run(["mkdir", "made"], check=check, stderr=subprocess.PIPE)
                found.append([again.returncode, b"exists" in again.stderr])
            except subprocess.CalledProcessError as error:
                found.append([error.returncode, error.cmd, b"exists" in error.stderr])
        try:
            subprocess.run(["sleep", "9"], timeout=0.1)
        except subprocess.TimeoutExpired as error:
            found.append([error.cmd, round(error.timeout, 2)])
        try:
            subprocess.call(["/no/such/program"])
        except FileNotFoundError as error:
            found.append(error.filename)
        return found

    found = on_both(tmp_path, act)
    assert found == [
        0, "1", "sh", ["1", "log"], 0, 0, "done", [1, ["mkdir", "made"], True], [1, True],
        [["sleep", "9"], 0.1], "/no/such/program",
    ]  # fmt: skip
    assert left(tmp_path)["log"] == "x\nx\n"


def test_all_ranks_are_one_process_to_the_script(tmp_path: Path) -> None:
    def act(rank: int) -> Any:
        got: list[int] = []
        signal.signal(signal.SIGUSR1, lambda *_: got.append(rank))
        os.kill(os.getpid(), signal.SIGUSR1)
        assert got == [rank]
        Path(f"state.{os.getpid()}.part").write_text("whole")
        os.replace(f"state.{os.getpid()}.part", f"state.{socket.gethostname()}")
        child = os.fork()
        if not child:
            os._exit(os.getpid() == os.getppid())
        assert os.waitpid(child, 0)[1] == 0
        return [os.getpid(), os.listdir()]

    pid, files = on_both(tmp_path, act)
    assert pid > 1
    assert files == [f"state.{socket.gethostname()}"]
    assert left(tmp_path) == {files[0]: "whole"}


def test_a_command_changes_what_a_rank_has_a_copy_of(tmp_path: Path) -> None:
    def act(rank: int) -> Any:
        Path("log").write_text("mine\n")
        late(rank, 1)
        subprocess.call("echo more >> log", shell=True)
        return Path("log").read_text()

    assert on_both(tmp_path, act) == "mine\nmore\n"


def test_databases_are_each_ranks_own(tmp_path: Path) -> None:
    def act(rank: int) -> Any:
        late(rank, 1)
        database = sqlite3.connect("runs.db")
        database.execute("create table steps (step integer primary key)")
        database.execute("insert into steps values (1)")
        database.commit()
        database.close()
        late(rank, 0)
        database = sqlite3.connect(Path("runs.db"))
        database.execute("insert into steps values (2)")
        database.commit()
        found = database.execute("select count(*) from steps").fetchall()
        memory = sqlite3.connect(":memory:")
        memory.execute("create table steps (step integer)")
        return [found, memory.execute("select count(*) from steps").fetchall()]

    assert on_both(tmp_path, act) == [[[2]], [[0]]]


def test_databases_of_dbm_are_each_ranks_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a stand-in for dbm.gnu, which isn't everywhere: it, too, opens its file unseen, in C."""

    def count(path: str, flag: str) -> int:
        assert flag == "c"
        with io.FileIO(f"{path}.db", "a+b") as file:
            file.write(b"x")
            return file.tell()

    stand_in: Any = ModuleType("dbm.gnu")
    stand_in.open = count
    monkeypatch.setitem(sys.modules, "dbm.gnu", stand_in)

    def act(rank: int) -> Any:
        late(rank, 1)
        found = [stand_in.open("shelf", "c")]
        late(rank, 0)
        return [*found, stand_in.open("shelf", "c"), os.listdir()]

    assert on_both(tmp_path, act) == [1, 2, ["shelf.db"]]


def test_images_of_opencv_are_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a stand-in for cv2, which isn't everywhere: it, too, opens its file unseen.

    As OpenCV's, the package takes all from an extension, which it imports by its own name.
    """
    package, extension = tmp_path / "packages/cv2", tmp_path / "extension"
    package.mkdir(parents=True)
    extension.mkdir()
    (package / "__init__.py").write_text(
        "import importlib, sys\n"
        "here = sys.modules.pop(__name__)\n"
        f"sys.path.insert(0, {str(extension)!r})\n"
        "imwrite = importlib.import_module('cv2').imwrite\n"
        "sys.path.pop(0)\n"
        "sys.modules[__name__] = here\n"
    )
    (extension / "cv2.py").write_text(
        "import io\n"
        "def imwrite(path, image):\n"
        "    with io.FileIO(path, 'a') as file:\n"
        "        return file.write(image) > 0\n"
    )
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.delitem(sys.modules, "cv2", raising=False)

    def act(rank: int) -> Any:
        cv2: Any = importlib.import_module("cv2")
        late(rank, 0)
        return [cv2.imwrite("image.png", b"x"), Path("image.png").read_text()]

    assert on_both(tmp_path, act) == [True, "x"]


def test_a_walk_meets_nothing_of_fasttrains(tmp_path: Path) -> None:
    def act(rank: int) -> Any:
        Path("log").write_text("mine")
        seen = [name for _, folders, names in os.walk(tmp_path) for name in folders + names]
        return sorted(name for name in seen if name.startswith("rank-"))

    assert on_both(tmp_path, act) == []


def test_a_library_that_saves_is_followed_and_one_that_caches_is_not(tmp_path: Path) -> None:
    code = """
import os
def save_array(path, text):
    with open(path, "w") as file:
        file.write(text)
def cache(path, text):
    with open(path, "w") as file:
        file.write(text)
"""
    library: dict[str, Any] = {}
    exec(compile(code, str(tmp_path / "site-packages/library.py"), "exec"), library)

    def act(rank: int) -> Any:
        late(rank, 0)
        library["save_array"]("saved", f"of rank {rank}")
        library["cache"](f"cached-{rank}", "")
        assert Path("saved").read_text() == f"of rank {rank}"
        return None

    on_both(tmp_path, act)
    assert left(tmp_path) == {"saved": "of rank 0", "cached-0": "", "cached-1": ""}


@pytest.mark.parametrize("saves", ["os.replace", "torch.save"])
def test_a_library_may_remove_on_each_rank_what_it_has_saved(tmp_path: Path, saves: str) -> None:
    code = """
import os, tempfile, torch
def run(path):
    if saves == "torch.save":
        return torch.save({}, path)
    with tempfile.NamedTemporaryFile(delete=False, dir=".") as file:
        torch.save({}, file)
    os.replace(file.name, path)
def rotate(path):
    os.remove(path)
"""
    library: dict[str, Any] = {"saves": saves}
    exec(compile(code, str(tmp_path / "site-packages/library.py"), "exec"), library)

    def act(rank: int) -> Any:
        library["run"]("best.pt")
        os.mkdir("epoch")  # all ranks come here
        late(rank, 1)
        library["rotate"]("best.pt")
        os.mkdir("epoch-2")
        try:
            library["rotate"]("best.pt")
        except FileNotFoundError as error:
            return error.filename

    assert on_both(tmp_path, act) == "best.pt"
    assert left(tmp_path) == {}


def test_threads_save_once_and_go_on_when_it_is_saved(tmp_path: Path) -> None:
    def act(rank: int) -> Any:
        def save() -> None:
            late(rank, 0)
            torch.save({"rank": rank}, "model.pt")

        found = []
        for _ in range(2):
            thread = threading.Thread(target=save, name="saver")
            thread.start()
            thread.join()
            found.append(torch.load("model.pt")["rank"])
            os.remove("model.pt")
        return found

    assert on_both(tmp_path, act) == [0, 0]


def test_which_thread_of_a_pool_saves_is_chance(tmp_path: Path) -> None:
    def act(rank: int) -> Any:
        def save(path: str) -> str:
            torch.save({"rank": rank}, path)
            return path

        paths = ["a.pt", "b.pt"]
        # Rank 1 takes up its jobs in another order, as a pool may.
        threads = [
            threading.Thread(target=save, args=(path,), name=f"pool-{number}")
            for number, path in enumerate(paths[:: 1 - 2 * rank])
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        return [thread.is_alive() for thread in threads]

    assert on_both(tmp_path, act) == [False, False]
    assert sorted(path.name for path in (tmp_path / "here").iterdir()) == ["a.pt", "b.pt"]


def test_ranks_that_write_at_other_lines_leave_nothing(tmp_path: Path) -> None:
    def act(ranks: Ranks) -> Any:
        install(ranks, tmp_path)
        if ranks.rank:
            os.mkdir(tmp_path / "one")
        (tmp_path / "other").mkdir()

    for end in on_ranks(tmp_path, act):
        assert end.code == 78
        assert re.search(r"\brank 0\b.*\bmkdir\b", end.stderr)
    assert not (tmp_path / "one").exists()
    assert not (tmp_path / "other").exists()


def test_the_receipt_tells_what_was_saved_and_all_is_put_back(tmp_path: Path) -> None:
    def act(ranks: Ranks) -> Any:
        owners = (os, shutil, torch, tempfile)
        before = [dict(vars(owner)) for owner in owners]
        lever, undo = install(ranks, tmp_path)
        torch.save({}, tmp_path / "model.pt")
        (tmp_path / "log").write_text("a")
        undo.close()
        changed = [
            name
            for owner, names in zip(owners, before, strict=True)
            for name, value in names.items()
            if vars(owner)[name] is not value and name != "_name_sequence"  # made when needed
        ]
        outcome = lever.recorder.outcome()
        sites = [site.what for site in outcome.sites]
        return [outcome.state, outcome.counts, sites, len(outcome.notes), changed]

    first, second = (end.good for end in on_ranks(tmp_path, act))
    assert first == [State.APPLIED, {"files": 1}, ["saved"], 0, []]
    assert second == [State.APPLIED, {}, [LEFT], 1, []]


def test_a_lever_that_has_ceded_leaves_files_alone(start: Start, tmp_path: Path) -> None:
    lever = start(1)
    lever.recorder.cede("the script handles its ranks itself")
    torch.save({"a": 1}, tmp_path / "model.pt")
    (tmp_path / "log.txt").write_text("of rank 1")
    assert torch.load(tmp_path / "model.pt") == {"a": 1}
    (tmp_path / "log.txt").unlink()
    assert [p.name for p in tmp_path.iterdir()] == ["model.pt"]
