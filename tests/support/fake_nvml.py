"""An NVML of boards, strict about what it is asked."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml

from fasttrain.hardware.vendors.cuda_state import cuda_states
from fasttrain.model.machine import Device


@dataclass(eq=False)
class Board:
    """A GPU or MIG instance: its answers by function and arguments, a peer by its index.

    A question without an answer is one that the board doesn't support; an answer may be an error.
    """

    index: int
    uuid: str
    answers: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    lost: bool = False


@dataclass
class FakeNvml:
    """Knows the binding's constants and nvmlDeviceGet… functions, called as the binding's are."""

    boards: list[Board]
    fails: type[Exception] | None = None
    open: int = 0

    def nvmlInit(self) -> None:  # noqa: N802
        if self.fails:
            raise self.fails
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        assert self.open, "shut down what was not open"
        self.open -= 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Board:  # noqa: N802
        return self._handle(lambda board: board.index == index)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Board:  # noqa: N802
        return self._handle(lambda board: board.uuid == uuid)

    def _handle(self, wanted: Callable[[Board], bool]) -> Board:
        assert self.open
        board = next(filter(wanted, self.boards))
        if board.lost:
            raise pynvml.NVMLError_GpuIsLost
        return board

    def __getattr__(self, name: str) -> Any:
        real = getattr(pynvml, name)  # AttributeError for what the binding doesn't have
        return self._function(name, real) if inspect.isfunction(real) else real

    def _function(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        assert name.startswith("nvmlDeviceGet"), f"{name} may change something"

        def ask(board: Board, *args: Any) -> Any:
            inspect.signature(real).bind(board, *args)
            assert self.open, f"{name} without NVML"
            assert all(isinstance(arg, int | Board) for arg in args), f"{name}{args}"
            told = (arg.index if isinstance(arg, Board) else arg for arg in args)
            key = (name.removeprefix("nvmlDeviceGet"), *told)
            answer = board.answers.get(key, pynvml.NVMLError_NotSupported)
            if isinstance(answer, type) and issubclass(answer, Exception):
                raise answer
            return answer

        return ask


def pci(bus: int) -> Any:
    """Return a board's PCI info; NVML's own text has eight digits of domain."""
    return SimpleNamespace(domain=0, bus=bus, device=0, busId=f"00000000:{bus:02X}:00.0")


def device(index: int, uuid: str = "", parent: str = "") -> Device:
    return Device("cuda", index, "a GPU", uuid or f"GPU-{index}", parent_uuid=parent)


def states(host: Any, nvml: FakeNvml, *devices: Device, runs: Any = None) -> Any:
    wanted = devices or [device(board.index, board.uuid) for board in nvml.boards]
    found = cuda_states(host, wanted, runs or {}, nvml)
    assert nvml.open == 0
    return found
