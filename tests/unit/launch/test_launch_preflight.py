from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fasttrain.launch.preflight import check_port, check_target, find_program
from fasttrain.model.plan import LaunchPlan, Processes, Target

UNUSABLE, SYNTAX = ("script-unusable", 71), ("script-syntax", 78)


@pytest.fixture
def refusal(tmp_path: Path, slug: Any) -> Callable[[str], tuple[str, int]]:
    def of(name: str) -> tuple[str, int]:
        code: tuple[str, int] = slug(check_target, Target("script", name), str(tmp_path))
        return code

    return of


@pytest.mark.parametrize("name", ["nowhere.py", "", ".", "x" * 5000, "a\0b", "/dev/null"])
def test_what_is_no_file(refusal: Any, name: str) -> None:
    assert refusal(name) == UNUSABLE


def test_a_pipe_is_not_waited_for(refusal: Any, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.py")
    assert refusal("fifo.py") == UNUSABLE


def test_a_link_that_leads_nowhere(refusal: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").symlink_to("gone.py")
    (tmp_path / "loop.py").symlink_to("loop.py")
    assert refusal("train.py") == refusal("loop.py") == UNUSABLE


def test_a_file_that_may_not_be_read(
    refusal: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text("")

    def refuse(_: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)  # root may read every file
    assert refusal("train.py") == UNUSABLE


@pytest.mark.parametrize(
    "source",
    [
        b"def f(:\n",
        b"\x00\x01\x02",
        b"\x7fELF\x02\x01",
        b"print('caf\xe9')\n",
        b"# coding: no-such-encoding\n",
        b"  indented = 1\n",
        b"return 1\n",
    ],
)
def test_what_is_not_python(refusal: Any, tmp_path: Path, source: bytes) -> None:
    (tmp_path / "train.py").write_bytes(source)
    assert refusal("train.py") == SYNTAX


def test_what_python_cannot_nest(refusal: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("(" * 100_000 + ")" * 100_000)
    assert refusal("train.py") == SYNTAX
    (tmp_path / "deep.py").write_text("-" * 100_000 + "1")
    assert refusal("deep.py") in (UNUSABLE, SYNTAX)


@pytest.mark.parametrize(
    "source",
    [b"", b"# coding: latin-1\nprint('caf\xe9')", b"\xef\xbb\xbfx = 1\r\n", b"'\\d'; 1 is 1"],
)
def test_what_python_takes(tmp_path: Path, source: bytes) -> None:
    (tmp_path / "train.py").write_bytes(source)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the worker warns of it; twice would be once too often
        check_target(Target("script", "train.py"), str(tmp_path))


def test_only_scripts_are_looked_at(tmp_path: Path) -> None:
    check_target(Target("module", "no.such.module"), str(tmp_path))
    check_target(Target("command", "no-such-command"), str(tmp_path))


def test_programs_are_found_by_the_path_of_the_run(
    of_command: Callable[..., LaunchPlan], tmp_path: Path, slug: Any
) -> None:
    program = tmp_path / "tool"
    program.write_text("#!/bin/sh\n")
    assert slug(find_program, of_command("tool"), {"PATH": str(tmp_path)}) == ("cannot-start", 71)
    program.chmod(0o755)
    assert find_program(of_command("tool"), {"PATH": str(tmp_path)}) == str(program)
    assert find_program(of_command(str(program)), {}) == str(program)
    assert slug(find_program, of_command("tool"), {"PATH": "/nowhere"}) == ("cannot-start", 71)


def test_a_command_behind_an_agent_is_looked_for_too(
    of_command: Callable[..., LaunchPlan], slug: Any
) -> None:
    plan = of_command("no-such-command", "/bin/sh", "agent.py", "no-such-command")
    assert slug(find_program, plan, {"PATH": "/bin"}) == ("cannot-start", 71)
    assert find_program(of_command("sh", "/bin/sh"), {"PATH": "/bin"}) == "/bin/sh"


def test_a_port_in_use(slug: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        here = Processes("torchrun", max_nodes=2, master_port=port)
        elsewhere = Processes("torchrun", max_nodes=2, node_rank=1, master_port=port)
        assert slug(check_port, here) == ("port-in-use", 71)
        check_port(elsewhere)
    check_port(here)
