"""Marks points in the time of a device, whose work the host only queues.

A host runs ahead of an accelerator: it queues the work of several steps while the device computes
the first of them, so that host times say how long queueing took. An event in the device's queue has
the device's own time. It is read once the device has passed it, so that nothing waits.

While a CUDA graph is captured, nothing is asked of events: CUDA takes a query for an error of the
capture, which ends there.

To free an event, or pinned memory that a copy was made to, torch calls the device's driver. In a
forked child and after an error of the device that fails, in a destructor, and C++ aborts the
process. So fasttrain's are never freed there: neither by the children, such as the workers of a
DataLoader, nor when the interpreter ends.

Source: torch 2.11, ``torch/csrc/cuda/Event.cpp`` and ``c10/cuda/CUDAFunctions.cpp``; an H200.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import time
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasttrain.model.vendors import LIKE_CUDA

_freed_by_driver: dict[int, weakref.ref[Any]] = {}


def leave_to_driver(thing: Any) -> None:
    """Let a thing, and what it holds, never be freed in forked children or at the end.

    Args:
        thing: A tensor, or an object of Python's that holds an event, and not the event itself:
            CUDA's leave their weak references dangling (torch 2.11, ``THCPEvent_dealloc``).
    """
    key = id(thing)
    _freed_by_driver[key] = weakref.ref(thing, lambda _: _freed_by_driver.pop(key, None))


def _keep_for_good() -> None:
    for ref in list(_freed_by_driver.values()):
        if (thing := ref()) is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


os.register_at_fork(after_in_child=_keep_for_good)
atexit.register(_keep_for_good)


def module_of(device: torch.device) -> Any:
    """Return the module that drives a kind of device as torch.cuda does; None if there is none."""
    return getattr(torch, device.type, None) if device.type in LIKE_CUDA else None


def is_capturing(device: torch.device) -> bool:
    """True while a CUDA graph is captured: what is queued now becomes a part of it."""
    capturing = getattr(module_of(device), "is_current_stream_capturing", None)
    return capturing is not None and bool(capturing())


class DeviceEvent:
    """A point in the queue of a device."""

    __slots__ = ("__weakref__", "device", "event")

    def __init__(self, device: torch.device, event: Any) -> None:
        self.device, self.event = device, event
        leave_to_driver(self)

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
    event = module.Event(enable_timing=timed)
    # Without a stream it would be recorded on the current device.
    event.record(module.current_stream(device))
    return DeviceEvent(device, event)


def pinned(numbers: Tensor) -> Tensor:
    """Return pinned memory for a copy of a device's numbers, for which nothing waits.

    Args:
        numbers: A tensor; the script may have set another default device than the CPU.
    """
    host = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
    leave_to_driver(host)
    return host


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
        now = time.perf_counter()
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
