"""The one way to replace an attribute of torch or of Python, and to put it back.

Whoever replaces an attribute hands over a function that makes the new value from what lies beneath.
So several wrappers of one attribute stand around each other in the order that `seams` declares,
whichever came first, and each can be taken out alone. What the script then calls is a chain of
plain closures, as if written by hand: no loop, frame or lookup is added. (A wrapt proxy would be
skipped inside of torch.compile.)

An attribute belongs to one module, or to one seam; another that replaces it too is an error.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch

Make = Callable[[Any], Any]
_ABSENT: Any = object()
_IMMUTABLE = 1 << 8  # Source: CPython's Include/object.h, Py_TPFLAGS_IMMUTABLETYPE, from 3.10 on


class PatchedTwiceError(RuntimeError):
    """Two modules replace one attribute, and no seam says which of them is around the other."""


def wrap(owner: Any, name: str, make: Make, undo: ExitStack, place: IntEnum | None = None) -> Any:
    """Replace an attribute of a module or class by what is made of it, until ``undo`` is closed.

    Args:
        owner: A module or a class; also one that inherits the attribute, or is written in C.
        name: The attribute.
        make: Makes the new value from the one beneath. A class's is what stands in its dictionary,
            such as a `classmethod` object. Called again when something beneath comes or goes.
        undo: Takes the inverse. It may be closed before or after those of others.
        place: Its place among the wrappers of a seam; None for an attribute of one module alone.

    Returns:
        The new value.

    Raises:
        PatchedTwiceError: Another module has replaced it.
    """
    home = sys._getframe(1).f_globals["__name__"] if place is None else type(place).__name__
    return _wrap(owner, name, _Layer(place or 0, make), home, undo)


def put(owner: Any, name: str, value: Any, undo: ExitStack) -> None:
    """Replace an attribute, which need not be there, by a value until ``undo`` is closed.

    Raises:
        PatchedTwiceError: It is replaced already, also by the same module: a value that calls what
            it found there could not do without it, should that go first.
    """
    home = sys._getframe(1).f_globals["__name__"]
    patches = _PATCHES.get((id(owner), name), [])
    if patches and patches[-1].is_outermost():
        raise PatchedTwiceError(_twice(owner, name, patches[-1].home, home))
    _wrap(owner, name, _Layer(0, lambda _: value), home, undo)


@dataclass(slots=True, eq=False)
class _Layer:
    """One wrapper of an attribute.

    Attributes:
        place: The inner ones have the lower numbers.
        make: Makes the value from the one beneath.
        value: What it has made.
    """

    place: int
    make: Make
    value: Any = None


class _Patch:
    """The wrappers of one attribute, around what lay there when the first of them came."""

    def __init__(self, owner: Any, name: str, home: str) -> None:
        self.home = home
        self._owner, self._name = owner, name
        self._held = vars(owner).get(name, _ABSENT)  # absent where a base class has it
        self._original = _lying(owner, name)
        self.layers: list[_Layer] = []

    def is_outermost(self) -> bool:
        """True if nobody has put something else there since, as the script may."""
        return vars(self._owner).get(self._name, _ABSENT) is self.layers[-1].value

    def add(self, layer: _Layer) -> None:
        at = sum(other.place <= layer.place for other in self.layers)
        layer.value = layer.make(self._beneath(at))  # before anything changes: it may raise
        self.layers.insert(at, layer)
        self._rebuild(at + 1)

    def remove(self, layer: _Layer) -> None:
        outermost, at = self.is_outermost(), self.layers.index(layer)
        del self.layers[at]
        if not outermost:
            return  # what the script has put there goes by ours, and stays
        if self.layers:
            self._rebuild(at)
        elif self._held is _ABSENT:
            delattr(self._owner, self._name)
        else:
            _set(self._owner, self._name, self._held)

    def _beneath(self, at: int) -> Any:
        return self.layers[at - 1].value if at else self._original

    def _rebuild(self, at: int) -> None:
        """Rebuild the wrappers around a change; the others stay the objects that they were."""
        for above in range(at, len(self.layers)):
            self.layers[above].value = self.layers[above].make(self._beneath(above))
        _set(self._owner, self._name, self.layers[-1].value)


# By the owner's id, which the patch keeps alive, and the attribute. Several where the script has
# put something of its own between ours.
_PATCHES: dict[tuple[int, str], list[_Patch]] = {}


def _wrap(owner: Any, name: str, layer: _Layer, home: str, undo: ExitStack) -> Any:
    key = id(owner), name
    patches = _PATCHES.get(key, [])
    if patches and patches[-1].home != home:
        raise PatchedTwiceError(_twice(owner, name, patches[-1].home, home))
    if not patches or not patches[-1].is_outermost():
        patches = [*patches, _Patch(owner, name, home)]
    patch = patches[-1]
    patch.add(layer)
    _PATCHES[key] = patches
    undo.callback(_take_out, key, patch, layer)
    return layer.value


def _twice(owner: Any, name: str, first: str, second: str) -> str:
    what = f"{getattr(owner, '__name__', owner)}.{name}"
    return f"{what} is replaced by {first} already, and now by {second}"


def _take_out(key: tuple[int, str], patch: _Patch, layer: _Layer) -> None:
    patch.remove(layer)
    if not patch.layers:
        _PATCHES[key].remove(patch)
        if not _PATCHES[key]:
            del _PATCHES[key]


def _lying(owner: Any, name: str) -> Any:
    """Return what an attribute is made of: a class's as it stands in its dictionary."""
    for kind in getattr(owner, "__mro__", ()):
        if name in vars(kind):
            return vars(kind)[name]
    return getattr(owner, name, None)


def _set(owner: Any, name: str, value: Any) -> None:
    """Set an attribute, also of a class that is written in C, whose attributes can't be set.

    The class stays what it is, for isinstance, pickle and all that holds it already. Its dictionary
    can be had from the garbage collector, and the interpreter is told that the class has changed.
    Where this interpreter keeps its classes in another way, nothing is replaced.

    Source: CPython's ``Objects/typeobject.c``, `PyType_Modified`, which belongs to the stable ABI;
    checked with 3.11.
    """
    if not (isinstance(owner, type) and owner.__flags__ & _IMMUTABLE):
        setattr(owner, name, value)
        return
    held = [part for part in gc.get_referents(vars(owner)) if type(part) is dict]
    if len(held) != 1 or name not in held[0]:
        return
    before, held[0][name] = held[0][name], value
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(owner))
    if vars(owner)[name] is not value:
        held[0][name] = before
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(owner))


# Who wraps an attribute of torch or Python that several parts of the shim wrap, inside of whom.
#
# One class stands for one seam, its members from the innermost wrapper to the outermost. They are
# the places that `patching.wrap` takes.


class Differentiating(IntEnum):
    """``torch.autograd.backward`` and ``grad``."""

    RANKS = 0  # averages over the ranks what autograd has left
    LOSS_SCALING = 1  # starts from scaled gradients, and divides what the ranks have averaged
    CUDA_GRAPHS = 2  # sees that the script asks
    REPLAY = 3  # leaves out all of it


class Hooking(IntEnum):
    """The methods of ``Tensor`` and ``Module`` that register hooks, and ``retain_grad``.

    Whoever is further out sees the script's hook first, and its wrapper runs further inside.
    """

    SPLIT = 0  # sees for which tensors and modules the script asks
    LIFTED = 1  # leads from a tensor in fp32 to the one that was cast
    AMP = 2  # shows hooks fp32 where they fail on low precision,
    LOSS_SCALING = 3  # and gradients that are divided by the scale
    SNAPSHOTS = 4  # looks whether it is the script that calls
    COMPILE = 5  # hears of a change when all have registered it
    TRIAL = 6  # of one call


class Reading(IntEnum):
    """``Tensor.numpy`` and ``tolist``, by which numbers come to Python."""

    AMP = 0  # gives bf16 as fp32
    SNAPSHOTS = 1  # records the array that the script gets, in fp32
    TRIAL = 2  # of one call


class Training(IntEnum):
    """What optimizers and GradScalers are made by, and ``zero_grad``; the inner ones hear first."""

    RANKS = 0
    AMP = 1
    LOSS_SCALING = 2
    NPU_OPTIMIZER = 3  # takes an optimizer
    OPTIMIZER = 4  # leaves those that are taken
    SNAPSHOTS = 5


class Loading(IntEnum):
    """``_BaseDataLoaderIter``: ``__init__``, ``_reset`` and ``__next__``."""

    SNAPSHOT_ORDER = 0  # keeps the batches of indices before they are cut among ranks
    RANKS = 1
    SNAPSHOTS = 2  # takes or leaves out batches as the script gets them


class Filing(IntEnum):
    """What opens, saves, moves and removes files."""

    RANKS = 0  # leaves them to rank 0
    SNAPSHOTS = 1  # notes buffers that the script has saved into, which are each rank's own
    REPLAY = 2  # leaves files as they are, on all ranks


def then(told: Callable[[Any], Any], *, even_traced: bool = False) -> Make:
    """Return what makes a method tell of its object once it has returned.

    Args:
        told: Called with the object.
        even_traced: Also where torch.compile traces the method.
    """

    def make(original: Any) -> Any:
        @functools.wraps(original)
        def method(holder: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(holder, *args, **kwargs)
            if even_traced or not torch.compiler.is_compiling():
                told(holder)
            return result

        return method

    return make
