"""Xid errors, from a kernel's log or without one."""

from __future__ import annotations

import time
from typing import Any

import pytest

from fasttrain.hardware.vendors import cuda_state
from fasttrain.hardware.vendors.cuda_state import parse_xids, read_xids

LOG = """\
[    1.0] nvidia 0000:c1:00.0: enabling device
[   99.1] NVRM: Xid (PCI:0000:C1:00): 94, pid=77, Contained ECC error
[   99.2] NVRM: Xid (PCI:0000:01:00): 31, pid='<unknown>', name=<unknown>, MMU Fault
[   99.3] NVRM: Xid (PCI:0000:c1:00): 48, DBE (Double Bit Error)
[   99.4] NVRM: Xid (PCI:0000:c1:00): 94, pid=78, Contained ECC error
[   99.5] NVRM: Xid (0000:02:00): 13, Graphics Exception
[   99.6] NVRM: GPU at PCI:0000:02:00: GPU-1234
"""


def test_errors_are_told_once_for_each_address() -> None:
    assert parse_xids(LOG) == {
        "0000:c1:00": (94, 48),
        "0000:01:00": (31,),
        "0000:02:00": (13,),
    }


@pytest.mark.parametrize(
    "tools",
    [
        {},
        {"dmesg": "echo 'dmesg: read kernel buffer failed: Operation not permitted' >&2; exit 1"},
        {"dmesg": "head -c 300 /dev/urandom"},
    ],
)
def test_a_log_that_is_closed_tells_nothing(make_host: Any, tools: dict[str, str]) -> None:
    assert read_xids(make_host(tools=tools)) == {}


def test_a_hanging_tool_is_cut_off(make_host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_state, "DMESG_TIMEOUT_S", 0.1)
    started_s = time.monotonic()
    assert read_xids(make_host(tools={"dmesg": "exec sleep 60"})) == {}
    assert time.monotonic() - started_s < 30
