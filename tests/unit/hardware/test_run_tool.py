"""Real tools that start things of their own, and what is left of those."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from fasttrain.hardware.tool import ToolError, run_tool
from fasttrain.hardware.vendors.npu import NpuSmi

Write = Callable[[str], str]


@pytest.fixture
def tool(tmp_path: Path) -> Write:
    """Write a shell script; `left` in it is where it may put the numbers of processes."""

    def write(text: str) -> str:
        path = tmp_path / "tool"
        path.write_text(f"#!/bin/sh\nleft={tmp_path}/left\n{text}\n")
        path.chmod(0o755)
        return str(path)

    return write


def ended(tmp_path: Path) -> bool:
    """Whether all processes in ``left`` end soon."""
    deadline_s = time.monotonic() + 2
    pids = [int(word) for word in (tmp_path / "left").read_text().split()]
    while any(map(_runs, pids)) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return bool(pids) and not any(map(_runs, pids))


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # init may be slow to reap
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("where", ["", ">/dev/null 2>&1"])
def test_a_tools_answer_does_not_wait_for_what_it_left_behind(
    tool: Write, tmp_path: Path, where: str
) -> None:
    path = tool(f"sleep 60 {where} &\necho $! >$left\necho answer")
    started_s = time.monotonic()
    assert run_tool([path], timeout_s=50) == "answer\n"
    assert time.monotonic() - started_s < 40
    assert ended(tmp_path)


def test_a_tool_that_hangs_is_ended_with_what_it_started(tool: Write, tmp_path: Path) -> None:
    path = tool("sleep 60 &\necho $! $$ >$left\nwait")
    started_s = time.monotonic()
    with pytest.raises(ToolError, match=r"\b0\.5 s"):
        run_tool([path], timeout_s=0.5)
    assert time.monotonic() - started_s < 40
    assert ended(tmp_path)


def test_a_long_answer_is_whole(tool: Write) -> None:
    path = tool("head -c 1000000 /dev/zero | tr '\\0' x")
    assert run_tool([path], timeout_s=50) == "x" * 1_000_000


def test_a_tool_that_fails_is_quoted(tool: Write) -> None:
    with pytest.raises(ToolError, match=" 3: no device"):
        run_tool([tool("echo out; echo; echo no device >&2; exit 3")], timeout_s=50)
    with pytest.raises(ToolError, match=r"^/nowhere/tool .*No such file"):
        run_tool(["/nowhere/tool"], timeout_s=50)


@pytest.mark.parametrize("code", [0, 1])
def test_npu_smi_is_asked_once_whatever_it_says(
    make_host: Callable[..., object], tmp_path: Path, code: int
) -> None:
    smi = NpuSmi(make_host(tools={"npu-smi": f"echo x >>{tmp_path}/asked; exit {code}"}))
    for _ in range(2):
        try:
            smi.info()
        except ToolError:
            assert code
    assert (tmp_path / "asked").read_text() == "x\n"
