"""Results aren't compared where the host has no memory for it."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fasttrain.shim.hooks.roots import RootCalls
from fasttrain.shim.process import entry
from fasttrain.shim.tune import room
from fasttrain.shim.tune.repeats import Repeats
from fasttrain.shim.tune.room import FOR_CALL, free_bytes, no_room


def test_there_is_memory_for_a_small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    assert free_bytes() > 0
    parameters = [*nn.Linear(10, 9, bias=False).parameters()]
    assert no_room(parameters, FOR_CALL) == ""
    monkeypatch.setattr(room, "free_bytes", lambda: 90 * FOR_CALL)
    assert no_room(parameters, FOR_CALL) == ""
    monkeypatch.setitem(entry._hidden, "LOCAL_WORLD_SIZE", "2")
    assert "GiB are free" in no_room(parameters, FOR_CALL)
    with torch.device("meta"):
        assert no_room(nn.Linear(10, 9).parameters(), FOR_CALL) == "", "not the host's memory"


GIB = 1 << 30
V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    ("groups", "files", "free"),
    [
        ("", {}, 100),
        ("0::/job", {f"{V2}/job/memory.max": "max", f"{V2}/job/memory.current": 7 * GIB}, 100),
        ("0::/job", {f"{V2}/job/memory.max": 16 * GIB, f"{V2}/job/memory.current": 10 * GIB}, 6),
        (
            "0::/job",
            {
                f"{V2}/job/memory.max": 16 * GIB,
                f"{V2}/job/memory.current": 10 * GIB,
                f"{V2}/job/memory.stat": f"anon 5\ninactive_file {3 * GIB}",
            },
            9,
        ),
        ("0::/a/b", {f"{V2}/a/memory.max": 4 * GIB, f"{V2}/a/memory.current": GIB}, 3),
        ("0::/host/pod", {f"{V2}/memory.max": 4 * GIB, f"{V2}/memory.current": GIB}, 3),
        (
            "4:memory:/job\n0::/",
            {
                f"{V1}/job/memory.limit_in_bytes": 16 * GIB,
                f"{V1}/job/memory.usage_in_bytes": 10 * GIB,
                f"{V1}/job/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}",
                f"{V1}/memory.limit_in_bytes": 9223372036854771712,
                f"{V1}/memory.usage_in_bytes": 90 * GIB,
            },
            7,
        ),
        ("0::/job", {f"{V2}/job/memory.max": GIB, f"{V2}/job/memory.current": GIB}, 1 / GIB),
    ],
)
def test_memory_is_that_of_the_control_group(
    groups: str, files: dict[str, Any], free: float, tmp_path: Path, monkeypatch: Any
) -> None:
    files = {
        "proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {100 * GIB // 1024} kB",
        "proc/self/cgroup": groups,
        **files,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setattr(room, "_ROOT", tmp_path)
    assert free_bytes() == free * GIB


def test_neither_a_call_nor_a_step_is_repeated_without_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(room, "free_bytes", lambda: 1)
    model, repeats = nn.Linear(2, 1), Repeats(RootCalls())
    optimizer = torch.optim.SGD(model.parameters())
    call: Any = None
    found = repeats._compared(call, model, print, print, 2**-8, eager=True)
    assert (found.right, found.reason[:9]) == (None, "comparing")
    model(torch.ones(1, 2)).sum().backward()
    with repeats.of_step(lambda _: nullcontext(), 2**-24) as parity:
        optimizer.step()
    assert (parity().right, parity().reason[:9]) == (None, "comparing")
