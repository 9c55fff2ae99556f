"""Stacks of real processes, by signal and by what stands for py-spy."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from fasttrain.launch.hang.stacks import NO_PY_SPY, by_py_spy, by_signal, parse
from fasttrain.launch.process import procfs

SIGNUM = int(signal.SIGRTMAX)
# Two threads; the main one holds the interpreter's lock.
PROGRAM = f"""
import ctypes, faulthandler, sys, threading, time
answers = open("answers.txt", "ab", buffering=0)
faulthandler.register({SIGNUM}, answers, all_threads=True, chain=False)
threading.Thread(target=time.sleep, args=(100,), daemon=True).start()

def stuck():
    held = ctypes.PyDLL(None)
    print("ready", flush=True)
    while True:
        held.sleep(100)

stuck()
"""


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Any]:
    """Start a program and wait until it says something."""
    running: list[subprocess.Popen[bytes]] = []

    def start(text: str) -> int:
        path = tmp_path / "program.py"
        path.write_text(text)
        argv = [sys.executable, str(path)]
        running.append(subprocess.Popen(argv, cwd=tmp_path, stdout=subprocess.PIPE))
        assert running[-1].stdout is not None
        running[-1].stdout.readline()
        return running[-1].pid

    yield start
    for process in running:
        process.kill()
        process.communicate()


def test_a_process_that_holds_the_lock(
    started: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pid = started(PROGRAM)
    assert procfs.catches(pid, SIGNUM)
    while by_signal(pid, SIGNUM, tmp_path / "answers.txt")[0][0].line != 11:
        pass  # it has said that it is ready, and is on its way
    for _ in range(2):  # each answer is read apart from the one before
        main, other = by_signal(pid, SIGNUM, tmp_path / "answers.txt")
        inner = main[0]
        assert (inner.file, inner.line, inner.function) == ("program.py", 11, "stuck")
        assert (inner.source, inner.user) == ("held.sleep(100)", True)
        assert main[-1].function == "<module>"
        assert not any(frame.user for frame in other)
    assert procfs.catches(pid, SIGNUM), "it has survived both"


def test_a_process_without_a_handler_gets_no_signal(started: Any, tmp_path: Path) -> None:
    pid = started("import time\nprint('ready', flush=True)\ntime.sleep(100)\n")
    assert by_signal(pid, SIGNUM, tmp_path / "answers.txt") == ()
    assert not procfs.is_stopped(pid)
    assert psutil.Process(pid).status() != psutil.STATUS_ZOMBIE, "it lives"
    assert by_signal(pid, 0, tmp_path / "answers.txt") == ()


def test_what_faulthandler_writes() -> None:
    text = (
        "Thread 0x00007f01 [pool] (most recent call first):\n"
        '  File "/a/site-packages/torch/x.py", line 3 in wait\n'
        "\n"
        "Current thread 0x00007f02 (most recent call first):\n"
        '  File "/b/c d.py", line 28 in main\n'
        '  File "<frozen runpy>", line 88 in _run_code\n'
    )
    main, other = parse(text)
    assert [(f.file, f.line, f.function, f.user) for f in main] == [("/b/c d.py", 28, "main", True)]
    assert [(f.file, f.line, f.user) for f in other] == [("torch/x.py", 3, False)]
    assert parse("") == parse("garbage\n") == ()


def test_a_working_directory_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, gone = tmp_path / "train.py", tmp_path / "gone"
    script.write_text("time.sleep(100)\n")
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    head = "Current thread 0x00007f02 (most recent call first):\n"
    ((frame,),) = parse(f'{head}  File "{script}", line 1 in main\n')
    assert (frame.file, frame.source) == (str(script), "time.sleep(100)")


def test_py_spy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As `py-spy dump --json` of 0.4.3 writes it.
    def thread(number: int, function: str) -> dict[str, Any]:
        found = {"name": function, "filename": "/x/train.py", "module": None, "line": 4}
        found |= {"short_filename": "train.py", "locals": None, "is_entry": True}
        named = {"pid": 70, "thread_id": 1, "thread_name": "T", "os_thread_id": number}
        return {**named, "active": False, "owns_gil": False, "frames": [found]}

    answer = tmp_path / "answer.json"
    answer.write_text(json.dumps([thread(71, "other"), thread(70, "main")]))
    program = tmp_path / "py-spy"
    program.write_text(f'#!/bin/sh\n[ "$*" = "dump --json --pid 70" ] && exec cat {answer}\n')
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    threads, missing = by_py_spy(70)
    assert [stack[0].function for stack in threads] == ["main", "other"]
    assert missing == ""
    program.write_text("#!/bin/sh\necho 'Error: Permission denied' >&2\nexit 1\n")
    threads, missing = by_py_spy(70)
    assert threads == ()
    assert missing.startswith("py-spy ")
    assert missing.endswith(": Error: Permission denied")
    program.unlink()
    assert by_py_spy(70) == ((), NO_PY_SPY)
