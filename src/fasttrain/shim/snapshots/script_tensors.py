"""Tensors that the script itself carries from step to step: averaged weights, hidden states, sums.

They are looked for where a script keeps them: in the variables of its functions that are running,
in its lists and dictionaries, and in the attributes of its own objects. A replay makes the
variables, but computes nothing, so that what is in these tensors has to be put there.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import FrameType, GeneratorType, MemberDescriptorType, ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from fasttrain.shim.data_parallel.split.lazy_rows import whole
from fasttrain.shim.process.callsite import own_prefixes
from fasttrain.shim.snapshots.contents import are_alike, fill, is_stamped, stamp
from fasttrain.shim.snapshots.errors import refuse_diverged

_DEEPEST = 6  # a trainer that holds an average that holds a dictionary of tensors has 3
_LONGEST = 10_000  # of a list that may be a data set: its items don't change in a loop
_ELSEWHERE = (Module, Optimizer, DataLoader, ModuleType, type, str, bytes)
_KNOWN = sys.stdlib_module_names | {"torch"}  # whose objects hold no tensors of a script, but for:
_HOLDERS = (SimpleNamespace, Namespace, Dataset)
DATA = "data set"  # begins the names of what one holds


class Carried:
    """Finds such tensors, and leaves out those that were there before training and never change.

    Args:
        holders: Gives what to look into beside variables, with names for it.
    """

    def __init__(self, holders: Callable[[], Iterable[tuple[str, Any]]]) -> None:
        self._holders = holders
        self._constant: dict[int, tuple[Tensor, tuple[int, bytes]]] = {}

    def begin(self) -> None:
        """Note, behind the first step, what is there and may never change."""
        self._constant = {id(t): (t, stamp(t)) for _, t in self._found()}

    def state(self) -> dict[str, Tensor]:
        """Give the tensors that are not as they were behind the first step, by where they are."""
        return {where: t.detach() for where, t in self._found() if not self._is_constant(t)}

    def _is_constant(self, tensor: Tensor) -> bool:
        known = self._constant.get(id(tensor))
        return known is not None and known[0] is tensor and is_stamped(tensor, known[1])

    def restore(self, saved: dict[str, Tensor]) -> None:
        """Put the values into the tensors that are there now.

        Raises:
            SystemExit: ``snapshot-diverged`` when one is missing or has another shape.
        """
        there = dict(self._found())
        for where, value in saved.items():
            tensor = there.get(where)
            if tensor is None and where.startswith(DATA):
                continue  # what it keeps of having been read comes again when it is
            if tensor is None or not are_alike(tensor, value):
                refuse_diverged(f"the tensor {where} is not what it was")
            fill(tensor, value)

    def _found(self) -> Iterator[tuple[str, Tensor]]:
        """Give the tensors that the script can reach, each once."""
        seen: set[int] = set()
        for name, value in [*_variables(), *self._holders()]:
            yield from _below(value, name, _DEEPEST, seen)


def _variables() -> Iterator[tuple[str, dict[str, Any]]]:
    """Give those of the script's functions that are running, the outermost first."""
    own = own_prefixes()
    frame: FrameType | None = sys._getframe(1)
    frames: list[FrameType] = []
    while frame is not None:
        if not frame.f_code.co_filename.startswith(own):
            frames.append(frame)
        frame = frame.f_back
    for depth, one in enumerate(reversed(frames)):
        yield f"{one.f_code.co_name}:{depth}", one.f_locals


def _below(value: Any, where: str, depth: int, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    if id(value) in seen or isinstance(value, _ELSEWHERE):
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        if not isinstance(value, Parameter):  # which belong to modules
            yield where, whole(value)
    elif depth:
        where = f"{DATA} ({where})" if isinstance(value, Dataset) else where
        for name, item in _items(value):
            yield from _below(item, f"{where}.{name}", depth - 1, seen)


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        if len(value) <= _LONGEST:
            yield from value.items()
    elif isinstance(value, list | tuple | deque):
        # What grows in a loop grows at its end: a hundred thousand losses are no data set.
        if len(value) <= _LONGEST or isinstance(value[-1], Tensor):
            yield from enumerate(value)
    elif isinstance(value, GeneratorType):  # one that waits in the middle
        yield from value.gi_frame.f_locals.items() if value.gi_frame else ()
    elif isinstance(value, _HOLDERS) or type(value).__module__.partition(".")[0] not in _KNOWN:
        yield from list(getattr(value, "__dict__", {}).items())
        yield from _slots(value)


def _slots(value: Any) -> Iterator[tuple[str, Any]]:
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if isinstance(vars(kind).get(name), MemberDescriptorType) and hasattr(value, name):
                yield name, getattr(value, name)
