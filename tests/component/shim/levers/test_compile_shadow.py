"""The forked copy of the process: what it reports, what it has no part in, and how it ends."""

from __future__ import annotations

import atexit
import gc
import mmap
import os
import signal
import sqlite3
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data._utils import signal_handling

from fasttrain.shim.levers.compile import confined, shadow
from fasttrain.shim.levers.compile.shadow import CLOSED, Result, Shadow
from fasttrain.shim.levers.compile.unseen import ENDED, HANDLES, REPLACED, WAITS, Unseen
from fasttrain.shim.process import refusal
from fasttrain.shim.process.held_signals import held_signals

PATIENCE_S = 120.0


@pytest.fixture
def begin() -> Iterator[Callable[..., Shadow]]:
    shadows: list[Shadow] = []

    def start(work: Any, niceness: int = 0) -> Shadow:
        shadows.append(shadow.begin(work, niceness))
        return shadows[-1]

    yield start
    for one in shadows:
        one.kill()


def ended(one: Shadow) -> Result:
    deadline = time.monotonic() + PATIENCE_S
    while (result := one.result()) is None:
        assert time.monotonic() < deadline, "it doesn't end"
        time.sleep(0.01)
    return result


def test_it_reports_what_it_has_compiled(begin: Any) -> None:
    result = ended(begin(lambda: (3, "")))
    assert (result.graphs, result.why) == (3, "")
    assert result.seconds > 0.0


def test_a_warning_that_was_shown_is_not_shown_again(begin: Any) -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        before = warnings.filters
        for _ in range(2):
            warnings.warn("once", UserWarning, stacklevel=1)
            begin(lambda: (1, "")).kill()
        assert warnings.filters is before
    assert len(shown) == 1


def test_it_reports_why_it_failed(begin: Any) -> None:
    def fail() -> Any:
        raise SystemExit("no\ngraph")

    assert ended(begin(fail)).why == "SystemExit: no graph"


@pytest.mark.parametrize("reaped", [False, True], ids=["", "by the script"])
def test_one_that_is_killed_is_no_result(begin: Any, reaped: bool) -> None:
    one = begin(lambda: time.sleep(100))
    pid = one.pid
    os.kill(pid, signal.SIGKILL)
    if reaped:
        os.waitpid(pid, 0)
    result = ended(one)
    assert result.graphs == 0
    assert "before it had compiled anything" in result.why
    assert ("signal 9" in result.why) is not reaped


@pytest.mark.parametrize("reused", [False, True])
def test_the_script_may_close_the_pipe_and_have_its_number(
    begin: Any, tmp_path: Path, reused: bool
) -> None:
    one = begin(lambda: time.sleep(100))
    pid = one.pid
    (tmp_path / "data").write_text("the script's")
    with (tmp_path / "data").open("rb") as file:
        os.close(one._reads)
        if reused:
            os.dup2(file.fileno(), one._reads)
        assert one.result().why == CLOSED
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        if reused:
            assert os.read(one._reads, 100) == b"the script's"
            os.close(one._reads)


def test_killing_it_ends_what_it_has_started(
    begin: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # where it may write

    def work() -> Any:
        child = os.fork()  # as a compiler
        if child == 0:
            time.sleep(100)
        (tmp_path / "part").write_text(str(child))
        (tmp_path / "part").rename(tmp_path / "pid")
        time.sleep(100)

    one = begin(work)
    deadline = time.monotonic() + PATIENCE_S
    while not (tmp_path / "pid").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    child = int((tmp_path / "pid").read_text())
    one.kill()
    while Path(f"/proc/{child}").exists() and ") Z" not in Path(f"/proc/{child}/stat").read_text():
        assert time.monotonic() < deadline, "a compiler is left"
        time.sleep(0.01)


def test_it_has_no_part_in_what_the_process_does(begin: Any, tmp_path: Path) -> None:
    """Files, pipes, signals, exit handlers and output are the parent's alone."""
    path = tmp_path / "log"
    reads, writes = os.pipe()
    log = path.open("w")
    log.write("once ")  # in the buffer of both
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    atexit.register(path.unlink)

    class Loader:  # garbage that is in a cycle, with workers to end
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            (tmp_path / "ended").touch()

    gc.disable()
    Loader()

    def work() -> Any:
        gc.collect()
        told = [not (tmp_path / "ended").exists()]
        os.write(writes, b"x")
        log.write("twice")
        log.flush()
        sys.stdout.write("out\n")
        told += [signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL, os.getpgid(0) == os.getpid()]
        return int(all(told)), f"{told}"

    try:
        one = begin(work)
        os.close(writes)
        result = ended(one)
        assert result.graphs == 1, result.why
        assert os.read(reads, 1) == b"", "its end of the pipe is gone, and nothing came through it"
        log.close()
        assert path.read_text() == "once "
    finally:
        gc.enable()
        atexit.unregister(path.unlink)
        signal.signal(signal.SIGUSR1, before)
        os.close(reads)


def test_it_computes_alone_and_compiles_for_all_threads(begin: Any) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.randn(400, 400) @ torch.randn(400, 400)  # starts threads that a copy doesn't have

        def work() -> Any:
            torch.randn(400, 400) @ torch.randn(400, 400)
            assert "at::get_num_threads() : 1" in torch.__config__.parallel_info()
            threads = torch.get_num_threads()
            # What the interpreter has noted of this process, whose native threads these are.
            return (
                threads,
                f"{len([*Path('/proc/self/task').iterdir()])} {threading.active_count()}",
            )

        result = ended(begin(work))
    finally:
        torch.set_num_threads(before)
    assert result.graphs == 2
    assert result.why.split()[0] == "1"


def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    middle = os.fork()
    if middle == 0:
        one = shadow.begin(lambda: time.sleep(100), 0)
        (tmp_path / "pid").write_text(str(one.pid))
        time.sleep(0.5)
        os._exit(0)
    os.waitpid(middle, 0)
    child = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + PATIENCE_S
    while Path(f"/proc/{child}").exists() and ") Z" not in Path(f"/proc/{child}/stat").read_text():
        assert time.monotonic() < deadline, "it outlives its parent"
        time.sleep(0.01)


def test_memory_of_a_gpu_is_the_processes_own() -> None:
    """torch calls all of it shared."""

    class OnGpu(nn.Parameter):
        is_cpu = False

        def is_shared(self) -> bool:
            return True

    model = nn.Linear(2, 2, bias=False)
    assert OnGpu(torch.ones(2, 2)).is_shared()
    model.weight = OnGpu(torch.ones(2, 2))
    assert not shadow.is_shared(model)


def test_shared_memory_is_not_its_own() -> None:
    model = nn.BatchNorm1d(3)
    assert not shadow.is_shared(model)
    model.running_mean.share_memory_()  # type: ignore[union-attr, no-untyped-call]
    assert shadow.is_shared(model)
    batch = torch.randn(2, 3).share_memory_()  # type: ignore[no-untyped-call]
    alone = torch.randn(2, requires_grad=True)
    (own,) = shadow.own(({"x": [batch, "word"], "y": alone},))
    first, second = own.values()
    assert first[0] is not batch
    assert torch.equal(first[0], batch)
    assert first[1] == "word"
    assert second is alone


@pytest.fixture
def unseen() -> Iterator[Callable[..., Unseen]]:
    """Make what watches for a script that handles SIGCHLD in no way, whatever other tests do."""
    with ExitStack() as undo:
        before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        undo.callback(signal.signal, signal.SIGCHLD, before or signal.SIG_DFL)
        mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        undo.callback(signal.pthread_sigmask, signal.SIG_SETMASK, mask)

        def install(end: Callable[[str], None]) -> Unseen:
            made = Unseen(end)
            made.install(undo)
            return made

        yield install


def test_functions_that_the_script_registers_for_forks_do_not_run(begin: Any, unseen: Any) -> None:
    unseen(lambda _: None)
    ran: list[str] = []
    on = True

    def note(where: str) -> Any:
        return lambda: ran.append(where) if on else None

    os.register_at_fork(
        before=note("before"), after_in_parent=note("parent"), after_in_child=note("child")
    )
    assert ended(begin(lambda: (int(not ran), ""))).graphs == 1
    assert ran == []
    child = os.fork()  # the script's own
    if child == 0:
        os._exit(int(ran != ["before", "child"]))
    assert os.waitpid(child, 0)[1] == 0
    assert ran == ["before", "parent"]
    on = False


def test_a_function_in_the_place_of_os_fork_is_the_scripts(
    begin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "fork")
    assert ended(begin(lambda: (1, ""))).graphs == 1


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("wait", ()),
        ("waitpid", (-1, 0)),
        ("wait3", (0,)),
        ("waitid", (os.P_ALL, 0, os.WEXITED)),
    ],
)
def test_a_script_that_waits_for_any_child_gets_no_copy(
    begin: Any, unseen: Any, monkeypatch: pytest.MonkeyPatch, name: str, arguments: Any
) -> None:
    one = begin(lambda: time.sleep(100))
    wait = getattr(os, name)

    def waits(*given: Any) -> Any:
        # Not in earnest: this process may have other children, of other tests.
        return one.result() if given == arguments else wait(*given)

    monkeypatch.setattr(os, name, waits)
    watch = unseen(one.kill)
    assert watch.why_not() == ""
    assert getattr(os, name)(*arguments) == Result(0, one.result().seconds, WAITS)
    assert watch.why_not() == WAITS


def test_a_script_that_handles_the_end_of_children_hears_of_no_copy(
    begin: Any, unseen: Any
) -> None:
    heard: list[int] = []
    one = begin(lambda: time.sleep(100))
    watch = unseen(one.kill)
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        assert one.result() is None
        signal.signal(signal.SIGCHLD, lambda number, _: heard.append(number))
        assert one.result().why == HANDLES
        assert heard == []
        assert watch.why_not() == HANDLES
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.parametrize("first", ["signalnum", "handler"])
def test_a_handler_is_known_by_the_names_of_its_arguments(unseen: Any, first: str) -> None:
    given = {"signalnum": signal.SIGUSR1, "handler": lambda *_: None}
    given = {first: given[first], **given}
    why: list[str] = []
    unseen(why.append)
    before = signal.getsignal(signal.SIGUSR1)
    try:
        assert signal.signal(**given) is before
        assert signal.getsignal(signal.SIGUSR1) is given["handler"]
        assert why == []
        signal.signal(**given | {"signalnum": signal.SIGCHLD})
        assert why == [HANDLES]
    finally:
        signal.signal(signal.SIGUSR1, before)


class Odd:
    """Compares with nothing."""

    __module__ = None  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise ValueError

    def __call__(self, *_: Any) -> None: ...


@pytest.mark.parametrize(
    "call",
    [
        lambda: signal.signal(),  # type: ignore[call-arg]
        lambda: signal.signal(signal.SIGCHLD),  # type: ignore[call-arg]
        lambda: signal.signal("no", signal.SIG_DFL),  # type: ignore[arg-type]
        lambda: signal.signal(Odd(), signal.SIG_DFL),  # type: ignore[arg-type]
        lambda: signal.signal(signal.SIGUSR2, 7),
        lambda: signal.signal(signal.SIGCHLD, 7),
        lambda: os.wait(1),  # type: ignore[call-arg]
        lambda: os.waitpid(),  # type: ignore[call-arg]
        lambda: os.waitpid(pid=-1, options=0),  # type: ignore[call-arg]
        lambda: os.waitpid(Odd(), 0),  # type: ignore[arg-type]
        lambda: os.wait3(no=0),  # type: ignore[call-arg]
        lambda: os.wait4(options=0, pid=1),
        lambda: os.waitid(idtype=os.P_ALL, id=0, options=0),  # type: ignore[call-arg]
        lambda: os.register_at_fork(),
        lambda: os.register_at_fork(print),  # type: ignore[call-arg]
        lambda: os.register_at_fork(before=1),  # type: ignore[arg-type]
        lambda: os.execv(path="/", argv=["no"]),  # type: ignore[call-arg]
        lambda: os.execve("/", argv=["no"], env={}),
    ],
)
def test_wrong_arguments_have_the_errors_that_python_has(
    unseen: Any, call: Callable[[], Any]
) -> None:
    def error() -> tuple[type, str]:
        with pytest.raises((TypeError, ValueError, OSError)) as raised:
            call()
        return raised.type, str(raised.value)

    plain = error()
    unseen(lambda _: None)
    assert error() == plain


def test_a_handler_may_be_any_object(unseen: Any) -> None:
    watch = unseen(lambda _: None)
    signal.signal(signal.SIGCHLD, Odd())
    assert watch.why_not() == HANDLES


@pytest.mark.parametrize("own", [False, True], ids=["", "and the script's own"])
def test_the_handler_of_loaders_does_not_count_but_what_it_calls_does(
    begin: Any, unseen: Any, own: bool
) -> None:
    one = begin(lambda: time.sleep(100))
    if own:
        signal.signal(signal.SIGCHLD, lambda *_: None)
    watch = unseen(one.kill)
    for_loaders = signal_handling._SIGCHLD_handler_set
    signal_handling._SIGCHLD_handler_set = False
    try:
        signal_handling._set_SIGCHLD_handler()  # as the first loader with workers does
        assert callable(signal.getsignal(signal.SIGCHLD))
        assert watch.why_not() == (HANDLES if own else "")
        with held_signals():
            pass
        assert watch.why_not() == (HANDLES if own else "")
        assert (one.result() is None) is not own
    finally:
        signal_handling._SIGCHLD_handler_set = for_loaders


def test_it_ends_before_another_program_takes_its_place(begin: Any, unseen: Any) -> None:
    one = begin(lambda: time.sleep(100))
    watch = unseen(one.kill)
    with pytest.raises(FileNotFoundError):
        os.execlp("no-such-program", "no-such-program")
    assert one.result().why == watch.why_not() == REPLACED


@pytest.mark.parametrize("end", [refusal.ended_well, lambda: refusal.failed(SystemExit(1))])
def test_it_ends_before_the_exit_handlers_of_the_script(
    begin: Any, unseen: Any, monkeypatch: pytest.MonkeyPatch, end: Callable[[], None]
) -> None:
    monkeypatch.setattr(refusal, "at_clean_end", [])
    monkeypatch.setattr(refusal, "at_failure", [])
    one = begin(lambda: time.sleep(100))
    watch = unseen(one.kill)
    end()
    assert one.result().why == watch.why_not() == ENDED


def test_a_child_that_the_script_knows_may_be_waited_for(begin: Any, unseen: Any) -> None:
    one = begin(lambda: time.sleep(100))
    watch = unseen(one.kill)
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert one.result() is None
    assert watch.why_not() == ""


def test_one_that_writes_to_shared_memory_is_ended_before(begin: Any) -> None:
    shared = mmap.mmap(-1, mmap.PAGESIZE)

    def work() -> Any:
        assert shared[0] == 0
        shared[0] = 1
        return 1, ""

    result = ended(begin(work))
    assert (result.graphs, shared[0]) == (0, 0)
    assert "shared memory" in result.why


def _append(folder: Path) -> None:
    with (folder / "calls").open("a") as file:
        file.write("x")


def _insert(folder: Path) -> None:
    with sqlite3.connect(folder / "calls.db") as base:
        base.execute("insert into calls values (1)")


def _has_landlock() -> bool:
    try:
        return confined.landlock_version() > 0
    except OSError:
        return False


@pytest.mark.skipif(not _has_landlock(), reason="this kernel has no Landlock")
@pytest.mark.parametrize("write", [_append, _insert], ids=["file", "sqlite"])
def test_it_writes_to_the_cache_alone(
    begin: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, write: Callable[[Path], None]
) -> None:
    for name in ("own", "cache"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "calls").touch()
        with sqlite3.connect(tmp_path / name / "calls.db") as base:
            base.execute("create table calls(x)")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where the script works, too
    before = {path.name: path.read_bytes() for path in (tmp_path / "own").iterdir()}

    def use_temporary_files() -> tuple[int, str]:
        with tempfile.TemporaryDirectory() as folder:
            used = Path(folder, "x").write_text("x")
        return used, ""

    def work(folder: str) -> tuple[int, str]:
        write(tmp_path / folder)
        return 1, ""

    assert ended(begin(lambda: work("cache"))).graphs == 1
    assert ended(begin(use_temporary_files)).graphs == 1
    result = ended(begin(lambda: work("own")))
    assert "Error" in result.why
    assert {path.name: path.read_bytes() for path in (tmp_path / "own").iterdir()} == before
