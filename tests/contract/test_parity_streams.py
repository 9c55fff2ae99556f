"""Bytes pass through unchanged, in both directions, to pipes, terminals and closed ends."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

LEVERS_OFF = ("--preset", "exact", "--quiet")


def test_stdin_is_read(same_as_python: Any) -> None:
    plain = same_as_python("streams.py", "echo", stdin=b"one\n\xff\x00two\nlast")
    assert plain.stdout == b"first: b'one\\n'\n0 \xff\x00two\n1 last"


def test_a_prompt_is_answered(same_as_python: Any) -> None:
    plain = same_as_python("streams.py", "prompt", stdin=b"one\ntwo\n")
    assert plain.stdout == b"first? second: two\n\n"


@pytest.mark.parametrize(("how", "size"), [("large", 10 << 20), ("many_writes", 108_890)])
def test_large_output(same_as_python: Any, how: str, size: int) -> None:
    assert len(same_as_python("streams.py", how).stdout) == size


@pytest.mark.parametrize("env", [{}, {"PYTHONUNBUFFERED": "1"}], ids=["buffered", "unbuffered"])
def test_both_streams(same_as_python: Any, env: dict[str, str]) -> None:
    plain = same_as_python("streams.py", "mixed", env=env)
    assert plain.stdout.endswith(b"no end of line")
    assert plain.stderr.count(b"\n") == 300


@pytest.mark.parametrize("env", [{}, {"PYTHONUNBUFFERED": "1"}], ids=["buffered", "unbuffered"])
def test_streams_joined_by_the_caller_keep_their_order(
    fasttrain: Any, programs: Path, env: dict[str, str]
) -> None:
    def joined(argv: list[str]) -> bytes:
        environ = {**fasttrain.environ, **env}
        return subprocess.run(
            argv, env=environ, cwd=fasttrain.cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ).stdout

    program = str(programs / "streams.py")
    plain = joined([sys.executable, program, "mixed"])
    assert joined(fasttrain.argv("run", program, *LEVERS_OFF, "mixed")) == plain


@pytest.mark.parametrize("lines", [1, 3000])
def test_a_reader_that_goes_away(fasttrain: Any, programs: Path, lines: int) -> None:
    def read_some(argv: list[str]) -> tuple[bytes, bytes, int]:
        process = subprocess.Popen(
            argv, env=fasttrain.environ, cwd=fasttrain.cwd,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        with process:
            assert process.stdout is not None
            assert process.stderr is not None
            read = b"".join(process.stdout.readline() for _ in range(lines))
            process.stdout.close()
            return read, process.stderr.read(), process.wait(120)

    program = str(programs / "streams.py")
    plain = read_some([sys.executable, program, "endless"])
    assert b"BrokenPipeError" in plain[1]
    assert read_some(fasttrain.argv("run", program, *LEVERS_OFF, "endless")) == plain


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1), (0, 1, 2)])
def test_streams_that_the_caller_closed(
    fasttrain: Any, programs: Path, closed: tuple[int, ...]
) -> None:
    def run(argv: list[str]) -> tuple[bytes, bytes, int]:
        close = " ".join(f"{fd}{'<' if fd == 0 else '>'}&-" for fd in closed)
        shell = ["sh", "-c", f'"$@" {close}', "sh", *argv]
        done = subprocess.run(shell, env=fasttrain.environ, cwd=fasttrain.cwd, capture_output=True)
        return done.stdout, done.stderr, done.returncode

    program = str(programs / "streams.py")
    plain = run([sys.executable, program, "nothing"])
    assert plain[2] == 5
    assert run(fasttrain.argv("run", program, *LEVERS_OFF, "nothing")) == plain


def test_terminal(fasttrain: Any, programs: Path, terminal: Callable[..., Any]) -> None:
    def shown(argv: list[str]) -> tuple[bytes, int]:
        screen = terminal(argv)
        screen.type(b"hello\n")
        code = screen.end()
        return screen.screen, code

    program = str(programs / "streams.py")
    plain = shown([sys.executable, program, "terminal"])
    assert b"[True, True, True] True" in plain[0]
    assert b"columns=91, lines=33" in plain[0]
    assert b"typed: hello" in plain[0]
    assert shown(fasttrain.argv("run", program, *LEVERS_OFF, "terminal")) == plain
