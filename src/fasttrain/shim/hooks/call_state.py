"""Restores what the failed call of a module has changed, so that the call can be repeated.

Torch's random states and small buffers are saved before every call, which takes a few microseconds.
Attributes and the random states of Python and NumPy take longer. As nearly all failures are in the
first calls, these are saved only before the first calls in each mode.
"""

from __future__ import annotations

import random
import sys
import traceback
import weakref
from collections import Counter, deque
from collections.abc import Iterable
from operator import is_
from textwrap import shorten
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn import Module
from torch.nn.parameter import is_lazy

from fasttrain.shim.hooks.device_clock import is_capturing, module_of
from fasttrain.shim.process.callsite import location, own_prefixes

WATCHED_CALLS = 3  # in training mode, and as many in evaluation mode
SMALL = 1 << 16  # elements; statistics are small, memory banks and masks aren't
CONTAINERS = (list, dict, deque)
Versions = list[tuple[Tensor, int]]
MOST_WORDS = 160  # characters of a message that the receipt shows
_LINALG_ERROR: type[Exception] = vars(torch.linalg)["LinAlgError"]
# Exactly these types. A subclass may be the script's own, raised to leave a forward early, or one
# for memory or devices, such as torch.OutOfMemoryError.
_ORDINARY = frozenset(
    {
        RuntimeError, TypeError, ValueError, NotImplementedError, AssertionError, IndexError,
        KeyError, ZeroDivisionError, OverflowError, FloatingPointError, _LINALG_ERROR,
    }
)  # fmt: skip


class Backup:
    """The state of one module before its last call.

    Args:
        module: The module.

    Attributes:
        attributes: The modules, each with its attributes before the call; empty if not saved.
        watched: Whether this call is one of the first in its mode.
    """

    def __init__(self, module: Module) -> None:
        self._module = weakref.ref(module)
        self._calls: Counter[bool] = Counter()
        self._places: list[tuple[dict[str, Tensor | None], str]] = []  # in ``_buffers``
        self._buffers: list[Tensor | None] = []
        self._small: list[Tensor] = []
        self._sizes: list[torch.Size] = []  # of the small ones; quantization observers resize them
        self._copies: list[tuple[list[Tensor], list[Tensor]]] = []
        self._large: list[Tensor] = []
        self._untouched: Versions = []
        self.attributes: list[tuple[Module, dict[str, Any]]] = []
        self.watched = False
        self._contents: list[tuple[Any, Any]] = []  # of lists and dictionaries
        self._states: list[tuple[Any, Any]] = []  # what sets a random state, and the state

    def take(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device | None = None
    ) -> None:
        """Save what the next call may change.

        Args:
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            device: Where the module is; None if on the CPU.
        """
        module: Any = self._module()
        self._calls[module.training] += 1
        self._states = _torch_states(device)
        self.watched = self._calls[module.training] <= WATCHED_CALLS
        if self.watched:
            self._states += _other_states()
            slots = [part._buffers for part in Module.modules(module)]
            self._places = [(slot, name) for slot in slots if type(slot) is dict for name in slot]
            self.attributes = [(part, dict(vars(part))) for part in Module.modules(module)]
            values = [value for _, before in self.attributes for value in before.values()]
            held = (*values, *args, *kwargs.values())
            self._contents = [(v, v.copy()) for v in held if type(v) in CONTAINERS]
        # A transform of torch.func's replaces buffers by tensors of its own during a call.
        transformed = torch._C._functorch.peek_interpreter_stack() is not None
        self._take_buffers([] if transformed else self._places)
        inputs = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        self._untouched += _versions(inputs)

    def _take_buffers(self, places: list[tuple[dict[str, Tensor | None], str]]) -> None:
        now = [slot.get(name) for slot, name in places]
        same = len(now) == len(self._buffers) and all(map(is_, now, self._buffers))
        if not same or list(map(Tensor.size, self._small)) != self._sizes:
            held = [buffer for buffer in now if buffer is not None]
            uninitialized = [buffer for buffer in held if is_lazy(buffer)]
            # Buffers of lazy modules get their shapes in this call: look again at the next one.
            self._buffers = [] if uninitialized else now
            held = [buffer for buffer in held if not is_lazy(buffer)]
            self._small = small = [buffer for buffer in held if _is_small(buffer)]
            self._sizes = list(map(Tensor.size, small))
            with torch.no_grad(), torch.inference_mode(mode=False):
                self._copies = [(b, list(map(torch.empty_like, b))) for b in _by_dtype(small)]
            self._large = [buffer for buffer in held if not _is_small(buffer)]
        for buffers, copies in self._copies:
            _copy(copies, buffers)
        self._untouched = _versions(self._large)

    def release(self) -> None:
        """Drop references to objects that the script may want freed after the call."""
        self.attributes, self._contents, self._untouched = [], [], []

    def changed_buffers(self) -> list[tuple[dict[str, Tensor | None], str]]:
        """Return the places of buffers (dictionary, name) that the call has replaced."""
        now = [slot.get(name) for slot, name in self._places]
        if all(map(is_, now, self._buffers)):
            return []
        pairs = zip(self._places, now, self._buffers, strict=False)
        return [place for place, buffer, before in pairs if buffer is not before]

    def holds_all(self) -> bool:
        """True if the call has changed nothing that isn't saved: inputs and large buffers."""
        return all(tensor._version == version for tensor, version in self._untouched)

    def put_back(self) -> None:
        """Restore the module and the random states as they were before the call."""
        for restore, state in self._states:
            restore(state)
        for part, before in self.attributes:
            for name in vars(part).keys() - before.keys():
                vars(part).pop(name, None)
            vars(part).update(before)  # not cleared first: another thread may use the module
        for held, before in self._contents:
            held.clear()
            (held.update if type(held) is dict else held.extend)(before)
        for (slot, name), buffer in zip(self._places, self._buffers, strict=False):
            if buffer is not None or name in slot:
                slot[name] = buffer
        for buffers, copies in self._copies:
            _restore(buffers, copies)


def _restore(buffers: list[Tensor], copies: list[Tensor]) -> None:
    """Put values and sizes back into those buffers that have changed.

    A copy raises the version, and graphs of earlier calls may need the others.
    """
    changed = [(b, c) for b, c in zip(buffers, copies, strict=True) if not torch.equal(b, c)]
    for buffer, saved in changed:
        if buffer.shape != saved.shape:
            buffer.resize_(saved.shape)
    if changed:
        _copy([b for b, _ in changed], [c for _, c in changed])


def _by_dtype(tensors: list[Tensor]) -> list[list[Tensor]]:
    """Return the tensors grouped by dtype and device, so that one kernel copies a group."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(groups.values())


@torch.no_grad()
def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    torch._foreach_copy_(targets, sources)


def _is_small(buffer: Tensor) -> bool:
    plain = type(buffer) is Tensor and buffer.layout is torch.strided and not buffer.is_meta
    return plain and buffer.numel() <= SMALL and not buffer.is_inference()


def _versions(tensors: Iterable[Tensor]) -> Versions:
    return [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]


def _torch_states(device: torch.device | None) -> list[tuple[Any, Any]]:
    generators = [torch.default_generator]
    module = None if device is None else module_of(device)
    of_devices = getattr(module, "default_generators", ())
    if device is not None and of_devices and not is_capturing(device):
        # That of the module's device, whichever is the current one. It can't be read in a capture.
        generators.append(of_devices[device.index or 0])
    return [(generator.set_state, generator.get_state()) for generator in generators]


def _other_states() -> list[tuple[Any, Any]]:
    states: list[tuple[Any, Any]] = [(random.setstate, random.getstate())]
    if (numpy := sys.modules.get("numpy")) is not None and hasattr(numpy, "random"):
        states.append((numpy.random.set_state, numpy.random.get_state()))
    return states


def is_ordinary(error: Exception) -> bool:
    """True if an error may be one of what a call computes, and not of memory or a device.

    Dynamo raises its own kind for one that it meets as it traces what the script compiles itself.
    """
    traced = type(error).__module__ == "torch._dynamo.exc"
    return (traced or type(error) in _ORDINARY) and "cuda error" not in str(error).lower()


def is_alone() -> bool:
    """True if no other rank would wait for collectives of a call that is repeated."""
    group: Any = dist
    return not group.is_available() or not group.is_initialized() or group.get_world_size() == 1


def one_line(error: Exception) -> str:
    """Return an error's type, first line and place in the script: ``ValueError: ... (a.py:7)``."""
    prefixes = own_prefixes()
    frames = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith(prefixes) and not is_generated(frame)
    ]
    words = without_place(error)
    return f"{words} ({location(*frames[-1])})" if frames else words


def without_place(error: Exception) -> str:
    """Return an error's type and first line."""
    first_line = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {shorten(first_line, MOST_WORDS, placeholder=' ...')}"


def is_generated(frame: FrameType) -> bool:
    """True for code that torch's compiler has generated, which lies in its cache."""
    return str(frame.f_globals.get("__name__")).startswith("torch._inductor")
