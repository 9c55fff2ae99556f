"""Marks points in the time of a device, whose work the host only queues.

A host runs ahead of an accelerator: it queues the work of several steps while the device computes
the first of them, so that host times say how long queueing took. An event in the device's queue has
the device's own time. It is read once the device has passed it, so that nothing waits.

While a CUDA graph is captured, nothing is asked of events: CUDA takes a query for an error of the
capture, which ends there.

To free an event, or pinned memory that a copy was made to, torch calls the device's driver. In a
forked child and after an error of the device that fails, in a destructor, and C++ aborts the
process: also where a script has caught the error, and its optimizer dies with what was copied of
it. So fasttrain's are never freed anywhere, but used again.

Source: torch 2.11, ``torch/csrc/cuda/Event.cpp``, ``c10/cuda/CUDAFunctions.cpp`` and
``at/core/CachingHostAllocator.h`` (``free`` records an event); an H200.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasttrain.model.vendors import LIKE_CUDA
from fasttrain.shim.process import true_clock

# Tensor's base class has torch's own item() and tolist(). Those of Tensor may be a lever's, which
# takes each call for a read by the script.
TORCHS: Any = Tensor.__mro__[1]
_idle: defaultdict[tuple[Any, ...], list[Any]] = defaultdict(list)  # what can be used again


def keep_for_good(thing: Any) -> None:
    """Never free a thing and what it holds, not even at the end of the process."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _idle_or_made(idle: list[Any], make: Callable[[], Any]) -> Any:
    with suppress(IndexError):  # another thread may take the last one
        return idle.pop()
    made = make()
    keep_for_good(made)
    return made


def module_of(device: torch.device) -> Any:
    """Return the module that drives a kind of device as torch.cuda does; None if there is none."""
    return getattr(torch, device.type, None) if device.type in LIKE_CUDA else None


def is_capturing(device: torch.device) -> bool:
    """True while a CUDA graph is captured: what is queued now becomes a part of it."""
    capturing = getattr(module_of(device), "is_current_stream_capturing", None)
    return capturing is not None and bool(capturing())


class DeviceEvent:
    """A point in the queue of a device.

    Args:
        device: The device.
        event: torch's event, which is recorded.
        idle: Where it can be had again once nothing asks for this point any more.
    """

    __slots__ = ("_idle", "device", "event")

    def __init__(self, device: torch.device, event: Any, idle: list[Any]) -> None:
        self.device, self.event, self._idle = device, event, idle

    def __del__(self) -> None:
        """Have the event used again."""
        self._idle.append(self.event)

    def has_passed(self) -> bool:
        """True if the device has come here; False as long as that can't be asked."""
        return not is_capturing(self.device) and bool(self.event.query())

    def seconds_to(self, later: DeviceEvent) -> float:
        """Return the time to a later event; both have passed, and both are timed."""
        return float(self.event.elapsed_time(later.event)) / 1e3


def record_event(device: torch.device, *, timed: bool = False) -> DeviceEvent:
    """Return an event behind the work that is queued on a device, whichever is the current one.

    Args:
        device: A device whose type `module_of` knows.
        timed: Whether the event's time will be read.
    """
    module = module_of(device)
    idle = _idle[device, timed]
    event = _idle_or_made(idle, lambda: module.Event(enable_timing=timed))
    # Without a stream it would be recorded on the current device.
    event.record(module.current_stream(device))
    return DeviceEvent(device, event, idle)


class HostCopy:
    """A copy of a device's numbers, for which nothing waits.

    Args:
        numbers: A tensor on the device.
    """

    __slots__ = ("_arrived", "_event", "_host", "_idle")

    def __init__(self, numbers: Tensor) -> None:
        self._arrived = False
        self._idle = _idle[numbers.device, numbers.shape, numbers.dtype]
        self._host = _idle_or_made(self._idle, lambda: _pinned(numbers))
        self._host.copy_(numbers, non_blocking=True)
        self._event = record_event(numbers.device)

    def __del__(self) -> None:
        """Have the memory used again, unless the device may still write to it."""
        if self._arrived:
            self._idle.append(self._host)

    def has_arrived(self) -> bool:
        """True if the numbers can be read; False as long as that can't be asked."""
        self._arrived = self._arrived or self._event.has_passed()
        return self._arrived

    def tolist(self) -> list[float]:
        """Return the numbers, which have arrived."""
        return list(TORCHS.tolist(self._host))


def _pinned(numbers: Tensor) -> Tensor:
    """Return pinned memory for a tensor's numbers.

    The script may have set another default device, or be in inference mode, whose tensors can't be
    written to outside of it.
    """
    with torch.inference_mode(mode=False):
        return torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)


class Mark(NamedTuple):
    """A point in time.

    Attributes:
        at_s: When the host was there, by `time.perf_counter`.
        event: When the device is there; None if the host's time counts.
    """

    at_s: float
    event: DeviceEvent | None = None


Span = tuple[Mark, Mark]


class DeviceClock:
    """Marks points in time: on an accelerator by events, on a CPU by the host's clock."""

    def __init__(self) -> None:
        self.leave()

    def leave(self) -> None:
        """Have marks from now on be of the host's time."""
        self._device: torch.device | None = None

    def follow(self, device: torch.device) -> None:
        """Have marks from now on be of a device's time."""
        module = module_of(device)
        self._device = device if hasattr(module, "Event") else None

    def mark(self) -> Mark:
        """Return a mark of the present: of the end of all work that is queued by now."""
        now = true_clock.perf_counter()
        return Mark(now) if self._device is None else Mark(now, self._event(self._device))

    def _event(self, device: torch.device) -> DeviceEvent | None:
        try:
            return None if is_capturing(device) else record_event(device, timed=True)
        except RuntimeError:  # the device has failed, of which the script's own next call tells
            return None


def seconds_between(span: Span) -> float | None:
    """Return the time from one mark to another; None while the device hasn't passed both."""
    first, second = span
    if first.event is None or second.event is None:
        return second.at_s - first.at_s
    try:
        passed = second.event.has_passed() and first.event.has_passed()
        return first.event.seconds_to(second.event) if passed else None
    except RuntimeError:  # the device has failed
        return None
