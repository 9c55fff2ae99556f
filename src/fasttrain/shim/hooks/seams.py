"""Who wraps an attribute of torch or Python that several parts of the shim wrap, inside of whom.

One class stands for one seam, its members from the innermost wrapper to the outermost. They are
the places that `patching.wrap` takes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import torch

from fasttrain.shim.hooks.patching import Make


class Differentiating(IntEnum):
    """``torch.autograd.backward`` and ``grad``."""

    RANKS = 0  # averages over the ranks what autograd has left
    LOSS_SCALING = 1  # starts from scaled gradients, and divides what the ranks have averaged
    ONE_BY_ONE = 2  # asks for each row of a batch of gradients
    CUDA_GRAPHS = 3  # sees that the script asks
    REPLAY = 4  # leaves out all of it
    ROUNDED = 5  # rounds what is computed at random
    LOSSES = 6  # reads what the script starts from


class Hooking(IntEnum):
    """The methods of ``Tensor`` and ``Module`` that register hooks, and ``retain_grad``.

    Whoever is further out sees the script's hook first, and its wrapper runs further inside.
    """

    SPLIT = 0  # sees for which tensors and modules the script asks
    REPEATED = 1  # leads from what a compiled call returned to the same of an eager one
    LIFTED = 2  # leads from a tensor in fp32 to the one that was cast
    AMP = 3  # shows hooks fp32 where they fail on low precision,
    LOSS_SCALING = 4  # and gradients that are divided by the scale
    SNAPSHOTS = 5  # looks whether it is the script that calls
    COMPILE = 6  # hears of a change when all have registered it
    TRIAL = 7  # of one call


class Passing(IntEnum):
    """``torch.autograd._engine_run_backward``, which all backward passes go through."""

    REPEATED = 0  # takes gradients by what a compiled call returned from an eager one
    LIFTED = 1  # takes gradients by tensors that were cast
    AMP = 2  # drops autocast's copies of weights after it


class Applying(IntEnum):
    """``torch.autograd.Function.apply``."""

    AMP = 0  # gives a Function of the script's fp32
    RANKS = 1  # gives it all rows


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
    SHARDS = 1  # saves whole tensors
    SNAPSHOTS = 2  # notes buffers that the script has saved into, which are each rank's own
    REPLAY = 3  # leaves files as they are, on all ranks
    TRIAL = 4  # of one call


class Exporting(IntEnum):
    """``torch.jit.trace`` and ``trace_module``."""

    ROOTS = 0  # calls nothing a root meanwhile
    SHARDS = 1  # gives it whole parameters


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
