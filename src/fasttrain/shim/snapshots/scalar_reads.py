"""Records the numbers that the script reads from tensors, and returns them again in a replay.

A replayed loop computes nothing, but its decisions, counters and output depend on numbers such as
``loss.item()``. Only reads by the script itself are recorded, and those that parts of torch make of
what the script hands them (`READERS`). Reads inside a model's call, a DataLoader, a backward pass
or an optimizer's step are not: a replay skips all of these. If the script has hooks on gradients, a
replay runs its backward passes, and then reads inside them are recorded, too.
"""

from __future__ import annotations

import copy
import functools
import math
import os
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules import module as modules

from fasttrain.shim.hooks import gradients, patching, seams
from fasttrain.shim.hooks.seams import Hooking, Reading
from fasttrain.shim.process.callsite import location, own_prefixes
from fasttrain.shim.snapshots.files import refuse_diverged

# Finds out whether the script has hooks on gradients, which only a real backward pass calls.
#
# ``retain_grad()`` counts as one: only a real backward pass fills what it retains.


# The functions that register hooks, with the namespace in which callers look each one up.
REGISTRATIONS: tuple[tuple[Any, str], ...] = (
    (Tensor, "register_hook"),
    (Tensor, "retain_grad"),
    (Tensor, "register_post_accumulate_grad_hook"),  # torch 2.1
    (Module, "register_full_backward_hook"),
    (Module, "register_full_backward_pre_hook"),
    (Module, "register_backward_hook"),
    (modules, "register_module_full_backward_hook"),
    (modules, "register_module_full_backward_pre_hook"),
    (modules, "register_module_backward_hook"),
    (torch.autograd.graph, "register_multi_grad_hook"),
)
# Files of fasttrain that forward a script's registration; its levers register none of their own.
_PASSING = (
    os.path.join("shim", "levers", ""),  # noqa: PTH118
    os.path.join("shim", "data_parallel", ""),  # noqa: PTH118
    gradients.__file__,
    patching.__file__,
    seams.__file__,
)


class GradientHooks:
    """Notices when the script registers a hook.

    Attributes:
        there: True if it has registered one.
    """

    def __init__(self) -> None:
        self.there = False
        self._own = own_prefixes()

    def install(self, undo: ExitStack) -> None:
        """Watch for hooks."""
        for owner, name in REGISTRATIONS:
            if hasattr(owner, name):
                patching.wrap(owner, name, self._watched, undo, Hooking.SNAPSHOTS)

    def _watched(self, original: Any) -> Any:
        @functools.wraps(original)
        def register(*args: Any, **kwargs: Any) -> Any:
            if not self.there and not torch.compiler.is_compiling():
                self.there = self._by_script(sys._getframe(1))
            return original(*args, **kwargs)

        return register

    def _by_script(self, frame: FrameType | None) -> bool:
        """True if the caller is the script, and not torch or fasttrain for their own use."""
        while frame is not None and any(it in frame.f_code.co_filename for it in _PASSING):
            frame = frame.f_back
        return frame is not None and not frame.f_code.co_filename.startswith(self._own)


# Records the numbers that the script reads from tensors, and returns them again in a replay.


READS = (
    *("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "__format__"),
    *("__contains__", "equal", "allclose", "is_nonzero"),
)
FUNCTIONS = ("equal", "allclose", "is_nonzero")  # of torch
ARRAYS = ("numpy", "__array__")
_KINDS = (*READS, *ARRAYS)
KEPT_BYTES = 4096  # of an array, such as a mean or a batch's hits: one page of memory
# Of a larger one, such as all predictions of an evaluation, and of all of those together. A single
# larger one, such as the masks of a batch of images, would soon use up the room of the others.
LARGE_BYTES, ALL_LARGE_BYTES = 4 << 20, 128 << 20
# Parts of torch that read on behalf of their callers: whether a step is made, a plateau's metric,
# a point of a curve.
READERS = (
    os.path.join("torch", "amp", "grad_scaler.py"),  # noqa: PTH118
    os.path.join("torch", "optim", "lr_scheduler.py"),  # noqa: PTH118
    os.path.join("torch", "utils", "tensorboard", ""),  # noqa: PTH118
)


class ScalarReads:
    """The reads so far, in order.

    Args:
        apart: True if a replay skips the code that runs now.
        hooks: Knows whether a replay runs backward passes all the same.

    Attributes:
        training: True once a step was made: what is read before is really computed in a replay,
            too, so that no large array has to be kept.
        left_out: Where the first array was read that is too large to be kept; empty if none was.
    """

    def __init__(self, apart: Callable[[], bool], hooks: GradientHooks) -> None:
        self.training = False
        self.left_out = ""
        self._apart = apart
        self._hooks = hooks
        self._own = own_prefixes()
        self._thread = threading.get_ident()
        self._counts: dict[CodeType, bool] = {}
        self.kinds = bytearray()
        self.values: list[Any] = []
        self._large = bytearray()  # what arrays of more than KEPT_BYTES held, one after another
        self._replayed: tuple[bytes, list[Any], bytes] | None = None

    def install(self, undo: ExitStack) -> None:
        """Wrap the methods by which a tensor becomes a Python number or an array."""
        for kind, name in enumerate(READS):
            make = functools.partial(self._following, kind)
            patching.wrap(Tensor, name, make, undo, Reading.SNAPSHOTS)
            if name in FUNCTIONS:
                patching.wrap(torch, name, make, undo)
        for kind, name in enumerate(ARRAYS, len(READS)):
            make = functools.partial(self._following_arrays, kind)
            patching.wrap(Tensor, name, make, undo, Reading.SNAPSHOTS)

    def _following(self, kind: int, original: Callable[..., Any]) -> Callable[..., Any]:
        counts, apart, thread = self._counts, self._apart, self._thread
        task: Any = torch._C._current_graph_task_id
        hooks = self._hooks

        @functools.wraps(original)
        def read(*args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            known = counts.get(frame.f_code)
            if known is None:
                known = self._is_the_scripts(frame)
            if not known or apart() or (task() != -1 and not hooks.there):
                return original(*args, **kwargs)
            if threading.get_ident() != thread:
                return original(*args, **kwargs)
            again = self._replayed is not None
            value = self._again(kind) if again else original(*args, **kwargs)
            self.kinds.append(kind)
            # A list is copied, since the script may change it later.
            self.values.append(copy.deepcopy(value) if type(value) is list else value)
            return value

        return read

    def _following_arrays(self, kind: int, original: Callable[..., Any]) -> Callable[..., Any]:
        task: Any = torch._C._current_graph_task_id
        hooks = self._hooks

        @functools.wraps(original)
        def read(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            array = original(tensor, *args, **kwargs)
            frame = sys._getframe(1)
            known = self._counts.get(frame.f_code)
            if known is None:
                known = self._is_the_scripts(frame)
            if not known or self._apart() or (task() != -1 and not hooks.there):
                return array
            if threading.get_ident() != self._thread:
                return array
            array, keeps = self._array_again(array, kind) if self._replayed else (array, True)
            self.kinds.append(kind)
            self.values.append(self._described(array) if keeps else None)
            if self.values[-1] is None and self.training and not self.left_out:
                self.left_out = location(frame.f_code.co_filename, frame.f_lineno)
            return array

        return read

    def _is_the_scripts(self, frame: FrameType) -> bool:
        if any(reader in frame.f_code.co_filename for reader in READERS):
            return frame.f_back is not None and self._is_the_scripts(frame.f_back)
        own = frame.f_code.co_filename.startswith(self._own)
        self._counts[frame.f_code] = not own
        return not own

    def state(self) -> dict[str, Any]:
        """Return what was read so far."""
        return {"kinds": bytes(self.kinds), "values": self.values, "large": bytes(self._large)}

    def replay(self, state: dict[str, Any]) -> None:
        """Have reads return what `state` recorded from now on, not what the tensors hold."""
        self._replayed = (state["kinds"], state["values"], state["large"])

    def _again(self, kind: int) -> Any:
        kinds, values, _ = self._replayed or (b"", [], b"")
        at = len(self.values)
        if at >= len(values) or kinds[at] != kind:
            refuse_diverged(f"it reads a number (Tensor.{_KINDS[kind]}) that it did not read then")
        return copy.deepcopy(values[at])

    def _array_again(self, array: Any, kind: int) -> tuple[Any, bool]:
        """Return an array as it was read then, and whether its content was kept."""
        then = self._again(kind)
        if then is None or self._replayed is None:
            return array, False
        dtype, shape, content = then
        if type(content) is int:  # where it begins
            size = math.prod(shape) * sys.modules["numpy"].dtype(dtype).itemsize
            held = self._replayed[2][content : content + size]
        else:
            held = content.encode("latin-1")
        return _as_it_was(array, dtype, shape, held), True

    def _described(self, array: Any) -> tuple[str, tuple[int, ...], str | int] | None:
        """Return an array's dtype, shape and content in plain types; None if it isn't kept.

        The content of a large one is where it begins in `_large`.
        """
        if array.nbytes <= KEPT_BYTES:
            return array.dtype.str, array.shape, array.tobytes().decode("latin-1")
        at = len(self._large)
        if not self.training or array.nbytes > min(LARGE_BYTES, ALL_LARGE_BYTES - at):
            return None
        self._large += array.tobytes()
        return array.dtype.str, array.shape, at

    def arrive(self) -> None:
        """Let reads return what the tensors hold again."""
        _, values, _ = self._replayed or (b"", [], b"")
        if len(self.values) != len(values):
            refuse_diverged(f"it has read {len(self.values)} numbers, and {len(values)} then")
        self._replayed = None


def _as_it_was(array: Any, dtype: str, shape: tuple[int, ...], content: bytes) -> Any:
    """Return an array with the recorded content: the same one, which shares the tensor's memory.

    Another one if its shape follows from contents, such as that of ``x[keep].numpy()``.
    """
    alike = (array.dtype.str, array.shape) == (dtype, shape)
    if alike and array.tobytes() == content:  # maybe read-only: nothing was computed
        return array
    recorded = sys.modules["numpy"].frombuffer(bytearray(content), dtype).reshape(shape)
    if not alike:
        return recorded
    array[...] = recorded
    return array
