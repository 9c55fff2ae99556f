"""Accelerators whose clocks are behind the host's; they compute nothing, or on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from fasttrain.shim.process import true_clock


class RunAhead:
    """A host that only queues the work of its devices.

    Attributes:
        kind: Torch's type of the devices.
        now_s: The host's clock, which `time.perf_counter` reads.
        waits: How often the host has waited for a device.
        current: Index of the current device.
        peaks: The peak memory of each device, in bytes.
        capturing: Whether a CUDA graph is being captured.
        spoilt: Whether something was done that ends a capture with an error.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.now_s = 100.0
        self.waits = 0
        self.current = 0
        self.capturing = False
        self.spoilt = False
        self.peaks = {0: 1000, 1: 2000}
        self._free_s: dict[int, float] = {}  # when each device has done all that is queued

    def work(self, seconds: float, index: int = 0) -> None:
        """Queue work that takes a device so long."""
        self._free_s[index] = self.ends_s(index) + seconds

    def ask(self) -> None:
        """Raise as CUDA does if it is asked for an event during a capture, which is lost then."""
        if self.capturing:
            self.spoilt = True
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    def ends_s(self, index: int = 0) -> float:
        """Return when a device has done all that is queued by now."""
        return max(self.now_s, self._free_s.get(index, 0.0))

    def wait(self) -> None:
        """Wait for all devices, as a script does that reads a number."""
        self.waits += 1
        self.now_s = max([self.now_s, *self._free_s.values()])

    def index(self, device: Any = None) -> int:
        """Return the index of a device, of which none is the current one."""
        given = None if device is None else torch.device(device).index
        return self.current if given is None else given

    def parameter(self, index: int = 0) -> Any:
        """Return a tensor on a device, which has no numbers."""
        with FakeTensorMode():
            return torch.empty(2, device=f"{self.kind}:{index}")


class _Event:
    def __init__(self, host: RunAhead, enable_timing: bool = False) -> None:
        self._host, self._timed = host, enable_timing
        self.at_s = 0.0
        self.device = -1

    def record(self, stream: Any = None) -> None:
        self.device = self._host.current if stream is None else stream.device
        self.at_s = self._host.ends_s(self.device)

    def query(self) -> bool:
        self._host.ask()
        return self._host.now_s >= self.at_s

    def synchronize(self) -> None:
        self._host.wait()

    def elapsed_time(self, other: _Event) -> float:
        """Return milliseconds; raise as CUDA does where there is none."""
        if not (self._timed and other._timed and self.device == other.device >= 0):
            raise RuntimeError("CUDA error: invalid resource handle")
        if not (self.query() and other.query()):
            raise RuntimeError("CUDA error: device not ready")
        return (other.at_s - self.at_s) * 1e3


class OnDevice(Tensor):
    """A tensor of the CPU's that says it were on an accelerator."""

    kind = "cuda"
    ordinal = 0
    is_cpu = False

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        """Whether it is on a CUDA device."""
        return self.kind == "cuda"

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Return where it seems to be."""
        return torch.device(self.kind, self.ordinal)


class OnCpu(TorchFunctionMode):
    """Makes what is asked for on a device on the CPU, and pins nothing.

    What may have any device is made where no script wants pinned memory: on the default device. A
    copy to the host for which the host would wait fails the test.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {**(kwargs or {})}
        if func is Tensor.copy_ and isinstance(args[1], OnDevice) > isinstance(args[0], OnDevice):
            # Only what is pinned is copied to without waiting.
            pinned = getattr(args[0], "pinned", False)
            assert (pinned, given.get("non_blocking")) == (True, True), "waits for the device"
        pinned = given.pop("pin_memory", False)
        if pinned and "device" not in given:
            raise RuntimeError("Only dense CPU tensors can be pinned")
        device = torch.device(given.pop("device", None) or "cpu")
        if device.type == "cpu":
            made = func(*args, **given)
            if pinned:
                made.pinned = True
            return made
        made = func(*args, **given).as_subclass(OnDevice)
        made.kind, made.ordinal = device.type, device.index or 0
        return made


@contextlib.contextmanager
def running_ahead(kind: str = "cuda") -> Iterator[RunAhead]:
    """Put the devices in the place of torch's, and the host's clock in that of Python's."""
    host = RunAhead(kind)
    replaced: dict[str, Any] = {
        "Event": lambda enable_timing=False: _Event(host, enable_timing),
        "current_stream": lambda device=None: SimpleNamespace(device=host.index(device)),
        "is_current_stream_capturing": lambda: host.capturing,
        "is_initialized": lambda: True,
        "is_available": lambda: True,
        "current_device": lambda: host.current,
        "max_memory_allocated": lambda device=None: host.peaks[host.index(device)],
        "synchronize": lambda device=None: host.wait(),
    }
    module = mock.patch.multiple(getattr(torch, kind), create=True, **replaced)
    # Events of another host would have its clock.
    idle = mock.patch.dict("fasttrain.shim.hooks.device_clock._idle", clear=True)
    clock = mock.patch.object(true_clock, "perf_counter", side_effect=lambda: host.now_s)
    with module, idle, clock:
        yield host
