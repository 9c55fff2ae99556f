"""Marks points in the time of a device, whose work the host only queues.

A host runs ahead of an accelerator: it queues the work of several steps while the device computes
the first of them, so that host times say how long queueing took. An event in the device's queue has
the device's own time. It is read once the device has passed it, so that nothing waits.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch

from fasttrain.model.vendors import LIKE_CUDA


def module_of(device: torch.device) -> Any:
    """Return the module that drives a kind of device as torch.cuda does; None if there is none."""
    return getattr(torch, device.type, None) if device.type in LIKE_CUDA else None


def record_event(device: torch.device, *, timed: bool = False) -> Any:
    """Return an event behind the work that is queued on a device, whichever is the current one.

    Args:
        device: A device whose type `module_of` knows.
        timed: Whether the event's time will be read.
    """
    module = module_of(device)
    event = module.Event(enable_timing=timed)
    # Without a stream it would be recorded on the current device.
    event.record(module.current_stream(device))
    return event


class Mark(NamedTuple):
    """A point in time.

    Attributes:
        at_s: When the host was there, by `time.perf_counter`.
        event: When the device is there; None if the host's time counts.
    """

    at_s: float
    event: Any = None


Span = tuple[Mark, Mark]


class DeviceClock:
    """Marks points in time: on an accelerator by events, on a CPU by the host's clock."""

    def __init__(self) -> None:
        self.leave()

    def leave(self) -> None:
        """Have marks from now on be of the host's time."""
        self._device: torch.device | None = None
        self._capturing: Any = None

    def follow(self, device: torch.device) -> None:
        """Have marks from now on be of a device's time."""
        module = module_of(device)
        self._device = device if hasattr(module, "Event") else None
        self._capturing = getattr(module, "is_current_stream_capturing", None)

    def mark(self) -> Mark:
        """Return a mark of the present: of the end of all work that is queued by now."""
        now = time.perf_counter()
        return Mark(now) if self._device is None else Mark(now, self._event(self._device))

    def _event(self, device: torch.device) -> Any:
        try:
            # Inside of a CUDA graph's capture an event would be a part of the graph.
            captured = self._capturing is not None and self._capturing()
            return None if captured else record_event(device, timed=True)
        except RuntimeError:  # the device has failed, of which the script's own next call tells
            return None


def seconds_between(span: Span) -> float | None:
    """Return the time from one mark to another; None while the device hasn't passed both."""
    first, second = span
    if first.event is None or second.event is None:
        return second.at_s - first.at_s
    try:
        passed = second.event.query() and first.event.query()
        return first.event.elapsed_time(second.event) / 1e3 if passed else None
    except RuntimeError:  # the device has failed
        return None
