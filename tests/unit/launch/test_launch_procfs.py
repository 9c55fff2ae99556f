from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from fasttrain.launch import procfs


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


def test_processor_time() -> None:
    before, until = procfs.cpu_s(os.getpid()), time.process_time() + 0.1
    while time.process_time() < until:
        pass
    assert 0.05 < procfs.cpu_s(os.getpid()) - before < 0.5


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
