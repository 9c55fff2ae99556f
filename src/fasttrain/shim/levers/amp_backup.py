"""Puts back what the failed call of a root has changed, so that the call can be repeated.

Torch's random states and small buffers are kept for every call: what a call costs for it is some
microseconds. Attributes and the random states of Python and NumPy cost more to look through, and
nearly all failures are in the first calls: they are kept for the first calls in each mode.
"""

from __future__ import annotations

import random
import sys
import weakref
from collections import Counter, deque
from collections.abc import Iterable
from operator import is_
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy

WATCHED_CALLS = 3  # in training mode, and as many in evaluation mode
SMALL = 1 << 16  # elements; statistics are small, memory banks and masks aren't
CONTAINERS = (list, dict, deque)
Versions = list[tuple[Tensor, int]]


class Store:
    """Named values that a call may change: of a module, of a Python module, of an argument.

    Args:
        holder: Whose attributes they are.
        names: Those of them that matter; all where there are none.
    """

    def __init__(self, holder: Any, names: frozenset[str] = frozenset()) -> None:
        self.holder = holder
        self.names = names
        self.before = self.now()

    def now(self) -> dict[str, Any]:
        """Return the values as they are."""
        values = dict(vars(self.holder))  # other threads
        return {n: values[n] for n in self.names if n in values} if self.names else values

    def put_back(self) -> None:
        """Bring the values back."""
        values = vars(self.holder)
        for name in self.now().keys() - self.before.keys():
            values.pop(name, None)
        values.update(self.before)  # never empty: other threads may call it


class Backup:
    """The state of one root before its last call.

    Args:
        module: The root.

    Attributes:
        stores: What the modules' attributes were, those of the arguments, and the globals that
            forwards name; empty where that wasn't kept.
        given: The containers among the arguments; empty where they weren't looked at.
        looks_at_arguments: Whether arguments are kept for every call: one was changed.
    """

    def __init__(self, module: Module) -> None:
        self._module = weakref.ref(module)
        self._calls: Counter[bool] = Counter()
        self._places: list[tuple[dict[str, Tensor | None], str]] = []  # in ``_buffers``
        self._buffers: list[Tensor | None] = []
        self._copies: list[tuple[list[Tensor], list[Tensor]]] = []  # of the small ones
        self._large: list[Tensor] = []
        self._untouched: Versions = []
        self.stores: list[Store] = []
        self.given: list[Any] = []
        self.looks_at_arguments = False
        self._contents: list[tuple[Any, Any]] = []  # of lists and dictionaries
        self._states: list[tuple[Any, Any]] = []  # what sets a random state, and the state

    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep what the next call may change."""
        module: Any = self._module()
        self._calls[module.training] += 1
        self._states = _torch_states()
        if self._calls[module.training] <= WATCHED_CALLS:
            self._states += _other_states()
            slots = [part._buffers for part in Module.modules(module)]
            self._places = [(slot, name) for slot in slots if type(slot) is dict for name in slot]
            self.stores = [*map(Store, Module.modules(module)), *_globals_of(module)]
        if self.looks_at_arguments or self._calls[module.training] <= WATCHED_CALLS:
            given = [*args, *kwargs.values()]
            self.given = [value for value in given if type(value) in CONTAINERS]
            self.stores += [Store(value) for value in given if _is_record(value)]
            held = [v for store in self.stores for v in store.before.values()]
            held = [v for v in (*held, *self.given) if type(v) in CONTAINERS]
            self._contents = [(v, v.copy()) for v in held]
        # A transform of torch.func's puts tensors of its own there for the length of the call.
        transformed = torch._C._functorch.peek_interpreter_stack() is not None
        self._take_buffers([] if transformed else self._places)
        inputs = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        self._untouched += _versions(inputs)

    def _take_buffers(self, places: list[tuple[dict[str, Tensor | None], str]]) -> None:
        now = [slot.get(name) for slot, name in places]
        if len(now) != len(self._buffers) or not all(map(is_, now, self._buffers)):
            held = [buffer for buffer in now if buffer is not None]
            uninitialized = [buffer for buffer in held if is_lazy(buffer)]
            # Those of lazy modules get their values in place: looked at again at the next call.
            self._buffers = [] if uninitialized else now
            held = [buffer for buffer in held if not is_lazy(buffer)]
            small = [buffer for buffer in held if _is_small(buffer)]
            with torch.no_grad(), torch.inference_mode(mode=False):
                self._copies = [(b, list(map(torch.empty_like, b))) for b in _by_dtype(small)]
            self._large = [buffer for buffer in held if not _is_small(buffer)]
        for buffers, copies in self._copies:
            _copy(copies, buffers)
        self._untouched = _versions(self._large)

    def release(self) -> None:
        """Hold on to nothing that the script may drop when the call is over."""
        self.stores, self.given, self._contents, self._untouched = [], [], [], []

    def changed_buffers(self) -> list[tuple[dict[str, Tensor | None], str]]:
        """Return where the call has put other tensors in the place of buffers."""
        now = [slot.get(name) for slot, name in self._places]
        if all(map(is_, now, self._buffers)):
            return []
        pairs = zip(self._places, now, self._buffers, strict=False)
        return [place for place, buffer, before in pairs if buffer is not before]

    def holds_all(self) -> bool:
        """Whether the call has changed nothing that isn't kept: an input or a large buffer."""
        return all(tensor._version == version for tensor, version in self._untouched)

    def put_back(self) -> None:
        """Bring the root and the random states back to where they were before the call."""
        for restore, state in self._states:
            restore(state)
        for store in self.stores:
            store.put_back()
        for held, before in self._contents:
            held.clear()
            (held.update if type(held) is dict else held.extend)(before)
        for (slot, name), buffer in zip(self._places, self._buffers, strict=False):
            if buffer is not None or name in slot:
                slot[name] = buffer
        # Not those that are as they were: graphs of earlier calls may need them.
        for buffers, copies in self._copies:
            changed = [
                (b, c) for b, c in zip(buffers, copies, strict=True) if not torch.equal(b, c)
            ]
            if changed:
                _copy([b for b, _ in changed], [c for _, c in changed])


def _globals_of(module: Module) -> list[Store]:
    """Return the globals that the forwards of a root's own modules name."""
    found = []
    for kind in {type(part) for part in Module.modules(module)}:
        code = getattr(getattr(kind, "forward", None), "__code__", None)
        home = sys.modules.get(kind.__module__)
        if code is not None and home is not None and not kind.__module__.startswith("torch."):
            found.append(Store(home, frozenset(code.co_names)))
    return found


def _is_record(value: Any) -> bool:
    """Whether an argument is an object with attributes that a forward may keep tensors in."""
    codes = (Tensor, Module, type, ModuleType, FunctionType)
    return not isinstance(value, codes) and isinstance(getattr(value, "__dict__", None), dict)


def _by_dtype(tensors: list[Tensor]) -> list[list[Tensor]]:
    """Return the tensors in lists that one kernel of an accelerator copies."""
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


def _torch_states() -> list[tuple[Any, Any]]:
    generators = [torch.default_generator]
    cuda: Any = torch.cuda
    if cuda.is_initialized() and not cuda.is_current_stream_capturing():
        generators.append(cuda.default_generators[cuda.current_device()])
    return [(generator.set_state, generator.get_state()) for generator in generators]


def _other_states() -> list[tuple[Any, Any]]:
    states: list[tuple[Any, Any]] = [(random.setstate, random.getstate())]
    if (numpy := sys.modules.get("numpy")) is not None and hasattr(numpy, "random"):
        states.append((numpy.random.set_state, numpy.random.get_state()))
    return states
