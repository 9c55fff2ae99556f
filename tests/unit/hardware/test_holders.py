from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from fasttrain.hardware.vendors import cuda
from fasttrain.hardware.vendors.cuda import held_bytes


class Nvml:
    """Two boards with their processes; a process may be on both."""

    class NVMLError(Exception):
        """As the binding's."""

    def __init__(self, *boards: list[tuple[int, int | None]], fails: bool = False) -> None:
        self.boards = boards
        self.fails = fails
        self.open = 0

    def nvmlInit(self) -> None:  # noqa: N802
        if self.fails:
            raise self.NVMLError
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.boards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:  # noqa: N802
        return self.boards[index]

    def nvmlDeviceGetComputeRunningProcesses(self, board: Any) -> Any:  # noqa: N802
        return [SimpleNamespace(pid=pid, usedGpuMemory=held) for pid, held in board]


def test_memory_of_a_process_is_added_up_over_the_boards() -> None:
    nvml = Nvml([(7, 5), (8, None)], [(7, 3)])
    assert held_bytes(nvml) == {7: 8, 8: 0}
    assert nvml.open == 0


def test_without_a_driver_nothing_is_known() -> None:
    assert held_bytes(Nvml(fails=True)) == {}
    assert isinstance(held_bytes(), dict)  # the real binding, whatever is here


def test_a_driver_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    nvml = Nvml()
    monkeypatch.setattr(nvml, "nvmlInit", released.wait)
    monkeypatch.setattr(cuda, "TIMEOUT_S", 0.05)
    assert held_bytes(nvml) == {}
    released.set()
