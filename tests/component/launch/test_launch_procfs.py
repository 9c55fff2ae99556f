from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fasttrain.launch.process import procfs


def test_a_family() -> None:
    argv = ["sh", "-c", "sleep 20 & echo $!; wait"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as shell:
        assert shell.stdout is not None
        sleeper = int(shell.stdout.readline())
        assert procfs.family(shell.pid) == [shell.pid, sleeper]
        assert procfs.parent(sleeper) == shell.pid
        os.kill(sleeper, signal.SIGKILL)


def test_a_stopped_process() -> None:
    with subprocess.Popen(["sleep", "20"]) as process:
        assert not procfs.is_stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        assert procfs.is_stopped(process.pid)
        process.kill()


def test_a_wait_that_no_signal_ends(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    # The parent's wait for its child to have opened the pipe is of the same kind as one for a disk.
    program = (
        "import os; where = (os.POSIX_SPAWN_OPEN, 0, 'pipe', os.O_RDONLY, 0)\n"
        "os.waitpid(os.posix_spawn('/bin/true', ['true'], {}, file_actions=[where]), 0)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path) as process:
        while not procfs.waits_for_disk(process.pid):
            assert process.poll() is None
        (tmp_path / "pipe").write_bytes(b"")
    assert process.returncode == 0
    assert not procfs.waits_for_disk(process.pid)


@pytest.mark.skipif(platform.machine() not in procfs._CALLS, reason="numbers of its system calls")
@pytest.mark.parametrize(
    ("program", "name", "argument"),
    [
        ("input()", "read", 0),
        ("os.read(os.pipe()[0], 1)", "read", None),
        ("os.system('read line')", "wait", None),
        ("os.waitpid(-1, 0) if os.fork() else sys.stdin.read()", "wait", -1),
        ("os.waitid(os.P_ALL, 0, os.WEXITED) if os.fork() else sys.stdin.read()", "wait", -1),
        ("a, b = socket.socketpair(); a.sendall(bytes(10**7))", "network", None),
        ("a, b = socket.socketpair(); a.recv(1)", "network", None),
        ("a = socket.create_server(('127.0.0.1', 0)); a.accept()", "network", None),
        ("lock = threading.Lock(); lock.acquire(); lock.acquire()", "", None),
        ("time.sleep(60)", "", None),
    ],
)
def test_the_call_that_a_main_thread_is_in(program: str, name: str, argument: int | None) -> None:
    text = f"import os, socket, sys, threading, time; print('.', flush=True); {program}"
    argv, pipe = [sys.executable, "-c", text], subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        time.sleep(0.05)
        while procfs._fields(process.pid)[:1] != ["S"]:
            time.sleep(0.01)
        call = procfs.call(process.pid)
        assert not procfs.runs(process.pid)
        children = procfs.family(process.pid)[1:]
        os.killpg(process.pid, signal.SIGKILL)
    assert call.name == name
    if argument is None:
        argument = children[0] if name == "wait" else call.argument
    assert call.argument == argument
    assert procfs.call(process.pid) == procfs.Call(), "it is gone"


def test_processor_time() -> None:
    before, until = procfs.cpu_s(os.getpid()), time.process_time() + 0.1
    while time.process_time() < until:
        pass
    assert 0.05 < procfs.cpu_s(os.getpid()) - before < 0.5
    assert procfs.runs(os.getpid())


def test_bytes_of_the_main_thread(tmp_path: Path) -> None:
    before = procfs.transferred_bytes(os.getpid())
    (tmp_path / "file").write_bytes(b"x" * 100_000)
    between = procfs.transferred_bytes(os.getpid())
    assert between - before >= 100_000
    if Path("/proc/self/task", str(os.getpid()), "io").exists():
        writer = threading.Thread(target=(tmp_path / "more").write_bytes, args=(b"x" * 900_000,))
        writer.start()
        writer.join()
        assert procfs.transferred_bytes(os.getpid()) - between < 900_000
        assert procfs.all_bytes(os.getpid()) - before >= 1_000_000


def test_processes_of_multiprocessing() -> None:
    program = "import time; time.sleep(20)  # multiprocessing.{}"
    for name, counts in (("spawn", True), ("resource_tracker", False)):
        with subprocess.Popen([sys.executable, "-c", program.format(name)]) as process:
            while not (found := procfs._read(Path(f"/proc/{process.pid}/cmdline"))).count(name):
                assert process.poll() is None, found
            assert procfs.is_of_multiprocessing(process.pid) is counts
            process.kill()


def test_a_process_that_is_gone() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    gone = process.pid
    assert procfs.cpu_s(gone) == procfs.transferred_bytes(gone) == procfs.parent(gone) == 0
    assert not procfs.catches(gone, 10)
    assert not procfs.is_stopped(gone)
    assert procfs.family(gone) == [gone]


def test_threads_that_block_a_signal() -> None:
    number, ready, done = signal.SIGRTMAX - 1, threading.Event(), threading.Event()

    def blocks() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [number])
        ready.set()
        done.wait()

    before = procfs.blocking(os.getpid(), number)
    thread = threading.Thread(target=blocks)
    thread.start()
    ready.wait()
    assert procfs.blocking(os.getpid(), number) - before == {str(thread.native_id)}
    done.set()
    thread.join()
