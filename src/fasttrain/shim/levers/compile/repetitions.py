"""Has a checkpoint's repetition of a call run as the call did, compiled or not.

A checkpoint calls modules again in the backward pass, and takes what the repetition saves in the
place of what the call would have saved. A compiled call saves other tensors than an eager one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from fasttrain.shim.hooks.roots import in_backward

_DEEPEST = 4  # levels of containers
Form = tuple[Any, ...]


def form_of(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Form:
    """Return what a compiled graph depends on: shapes, types, and whether the module trains.

    Numbers count by their type: dynamo makes a graph for any after the second one. So do texts in
    lists, such as the names of a batch's rows, which forward seldom reads.
    """
    try:
        given: Any = tuple([_form(arg, _DEEPEST) for arg in args])
        named = _form(kwargs, _DEEPEST)
    except Exception:  # noqa: BLE001 - an object of the script's that only looks like a container
        given = named = None
    return module.training, torch.is_grad_enabled(), given, named


def _form(value: Any, deepest: int) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.requires_grad
    if deepest and isinstance(value, list | tuple):
        return tuple([str if type(i) is str else _form(i, deepest - 1) for i in value])
    if deepest and isinstance(value, dict):
        return tuple([(key, _form(item, deepest - 1)) for key, item in value.items()])
    return value if value is None or isinstance(value, bool | str) else type(value)


class Passes:
    """Numbers the forward passes between which a checkpoint has repeated calls of some module.

    Attributes:
        number: That of the present one.
    """

    def __init__(self) -> None:
        self.number = 0
        self._repeats = False

    def in_backward(self) -> bool:
        """True if the call that begins now is a repetition."""
        if in_backward():
            self._repeats = True
            return True
        if self._repeats:
            self._repeats = False
            self.number += 1
        return False


_PASSES = Passes()


class Mode:
    """How the calls of a module run: in one of two ways.

    A repetition is known by the form of its arguments alone. So calls under a checkpoint whose
    forms are equal run in one way until some call is repeated.
    """

    def __init__(self) -> None:
        self._last = True
        self._kept: dict[Form, tuple[int, bool]] = {}

    def choose(
        self, wanted: bool, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Return how the call that begins now is to run.

        Args:
            wanted: How it would run if it were the first of its form.
            module: What is called.
            args: Its arguments.
            kwargs: Those by name.
        """
        if _PASSES.in_backward():
            kept = self._kept and self._kept.get(form_of(module, args, kwargs))
            return kept[1] if kept else self._last
        if _in_checkpoint():
            form, number = form_of(module, args, kwargs), _PASSES.number
            kept = self._kept.get(form)
            if kept is not None and kept[0] == number:
                wanted = kept[1]
            elif len(self._kept) > _MOST_FORMS:
                self._kept = {f: k for f, k in self._kept.items() if k[0] == number}
            self._kept[form] = number, wanted
        self._last = wanted
        return wanted


_MOST_FORMS = 64  # that are kept of earlier forward passes
_ASK: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def _in_checkpoint() -> bool:
    """True in a call that a checkpoint will repeat; never known with torch 2.7 and earlier."""
    hooks = None if _ASK is None else _ASK(True)  # noqa: FBT003
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"
