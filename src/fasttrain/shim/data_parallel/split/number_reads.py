"""Decides whether a number that is read in a call rules out a split of it.

A number may stand for all rows, and the call may branch on it. Some are read by torch itself, to
check its arguments row by row, or to choose a kernel: nothing follows from these.

Source: ``torch/distributions``, ``torch/nn/functional.py``, ``torch/nn/modules/transformer.py`` and
``aten/src/ATen/native/Onehot.cpp`` of torch 2.13.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.distributions import constraints, continuous_bernoulli, distribution, geometric
from torch.nn import functional
from torch.nn.modules import transformer

from fasttrain.shim.data_parallel.split.surroundings import READS
from fasttrain.shim.hooks.dynamo import pass_over
from fasttrain.shim.hooks.scripted import replace_builtin

_aten: Any = torch.ops.aten
# In inference mode those that read by consisting of others are seen themselves.
READING = frozenset(
    (
        _aten._local_scalar_dense.default,
        _aten.allclose.default,
        _aten.equal.default,
        _aten.is_nonzero.default,
        _aten.item.default,
        _aten.one_hot.default,
    )
)
CLASSES = "it calls one_hot without num_classes, which finds their number among all rows"
WHY_READ = (READS, CLASSES)
# Frames between an operator and the code that calls it: of each dispatch mode, and of a default
# device, which is a mode of functions.
_MODES = "_compile.py", "_dynamo", "utils/_device.py"
_BETWEEN = tuple(str(Path(torch.__file__).parent / name) for name in _MODES)
_IS_CAUSAL: Any = getattr(transformer, "_detect_is_causal_mask", None)


def why_read(tensor: Tensor) -> str:
    """Return why a number that is being read rules out a split; empty if it doesn't.

    Args:
        tensor: What the operator reads that the caller's dispatch mode has intercepted.
    """
    frame: Any = sys._getframe(2)
    while frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back
    code = frame.f_code
    if code is _count_classes.__code__:
        return CLASSES
    passes = _CHECKS.get(code) or _CHECKS.get(code.co_filename)
    return "" if passes is not None and passes(tensor, frame) else READS


def watch_one_hot(undo: ExitStack) -> None:
    """Replace ``one_hot`` by a function in whose frames torch reads the classes.

    It reads them in C++, whose caller would be the script, as if that had asked for a number.
    """
    original = functional.one_hot

    @functools.wraps(original)
    def one_hot(*args: Any, **kwargs: Any) -> Any:
        classes = kwargs.get("num_classes", args[1] if len(args) > 1 else -1)
        if isinstance(classes, Tensor):  # of which torch reads the number for the script
            return original(*args, **kwargs)
        if classes == -1:
            return _count_classes(original, args, kwargs)
        return _check_classes(original, classes, args, kwargs)

    for added in (one_hot, _count_classes, _check_classes):
        pass_over(added)
    # A script may pickle it, as a part that its model was built with.
    one_hot.__module__, one_hot.__qualname__ = functional.__name__, "one_hot"
    replace_builtin(functional, one_hot, "one_hot", undo)


def _count_classes(original: Any, args: Any, kwargs: Any) -> Any:
    return original(*args, **kwargs)


def _check_classes(original: Any, classes: Any, args: Any, kwargs: Any) -> Any:  # noqa: ARG001 - read from its frame
    return original(*args, **kwargs)


def _are_valid(tensor: Tensor, _: FrameType) -> bool:
    return bool(tensor.all())


def _are_classes(tensor: Tensor, frame: FrameType) -> bool:
    return bool(((tensor >= 0) & (tensor < frame.f_locals["classes"])).all())


# What torch reads by itself, in a function or a file, and what has to be true of it. A check is
# passed by all rows exactly if it is by those of each rank; one that is not raises an error, on
# which the script may branch.
_CHECKS: dict[CodeType | str, Callable[[Tensor, FrameType], bool]] = {
    **{
        str(module.__file__): _are_valid
        for module in (distribution, constraints, continuous_bernoulli, geometric)
    },
    _check_classes.__code__: _are_classes,
    functional.gaussian_nll_loss.__code__: lambda tensor, _: not tensor,  # no variance is below 0
    # Attention computes the same from a causal mask and without one, being told that it is causal.
    getattr(_IS_CAUSAL, "__code__", ""): lambda *_: True,
}
