"""Finds the calls that are worth compiling: those of training that have one form at each step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch.nn import Module

from fasttrain.shim.hooks.roots import ROWS, Root, RootCalls, in_backward
from fasttrain.shim.levers.compile.repetitions import Form, form_of
from fasttrain.shim.tune.inner_calls import InnerCalls

WATCHED_STEPS = 20  # of which the calls are looked at
MOST_ROOTS = 4  # each is compiled in a copy of the process of its own
USUAL = 0.5  # a form of call is compiled that this part of the calls has
Listener = Callable[[Root, tuple[Any, ...], dict[str, Any]], None]


class HeardCalls(Protocol):
    """Calls that may be compiled.

    Attributes:
        on_call: Called before each with the root and the arguments.
    """

    on_call: list[Listener]

    def form(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Form:
        """Return what a compiled graph of a call depends on."""


class CallsOfOne:
    """The calls of roots in one process.

    Args:
        roots: Routes them.
    """

    form = staticmethod(form_of)

    def __init__(self, roots: RootCalls) -> None:
        self._roots = roots

    @property
    def on_call(self) -> list[Listener]:
        """Called before each call with the root and the arguments."""
        return self._roots.on_call

    @on_call.setter
    def on_call(self, listeners: list[Listener]) -> None:
        self._roots.on_call = listeners


class CallsOfRank:
    """The calls of roots as one of several ranks computes them: inside of DDP, and of its rows.

    Where batches are split, the form of the whole batch counts, too: it is the same on all ranks,
    so that none runs compiled while another one runs eagerly, which might sum in another order.

    Args:
        roots: Routes the calls of roots.
        splits: Whether batches are split.
    """

    def __init__(self, roots: RootCalls, *, splits: bool) -> None:
        self.on_call: list[Listener] = []
        self._roots, self._splits = roots, splits
        self._whole: Form | None = None  # of the call that runs now

    def install(self, undo: ExitStack) -> None:
        """Hear of calls until ``undo`` is closed."""
        if self._splits:
            self._roots.on_call.append(self._see_whole)
            undo.callback(self._see_no_more)
        InnerCalls(self._roots, undo).on_call.append(self._tell)

    def form(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Form:
        """Return what a compiled graph of a call depends on."""
        return self._whole, ROWS.only, *form_of(module, args, kwargs)

    def _see_whole(self, root: Root, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        module = root.ref()
        self._whole = None if module is None else form_of(module, args, kwargs)

    def _see_no_more(self) -> None:
        self._roots.on_call = [f for f in self._roots.on_call if f != self._see_whole]

    def _tell(self, root: Root, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for listen in self.on_call:
            listen(root, args, kwargs)


class Calls:
    """Counts the forms of the calls of roots that train.

    Args:
        form: Returns the form of a call.
    """

    def __init__(self, form: Callable[..., Form] = form_of) -> None:
        self._form = form
        self._seen: dict[Root, Counter[Form]] = {}

    def see(self, root: Root, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count a call, unless it repeats one in a backward pass."""
        module = None if in_backward() else root.ref()
        if module is not None and root.trainable and torch.is_grad_enabled():
            self._seen.setdefault(root, Counter())[self._form(module, args, kwargs)] += 1

    def usual(self, steps: int) -> tuple[dict[Root, Form], str]:
        """Return the usual form of the calls of each root, and why there is none.

        Args:
            steps: Steps that were seen.
        """
        alive = {root: forms for root, forms in self._seen.items() if root.ref() is not None}
        often = {root: forms for root, forms in alive.items() if forms.total() * 2 >= steps}
        if not often:
            return {}, "no module is called at each step"
        if len(often) > MOST_ROOTS:
            return {}, f"the script calls {len(often)} modules at each step, each for itself"
        found: dict[Root, Form] = {}
        for root, forms in often.items():
            form, count = forms.most_common(1)[0]
            if count >= USUAL * forms.total():
                found[root] = form
        if found:
            return found, ""
        root, forms = next(iter(often.items()))
        return {}, (
            f"the arguments of {root.name} ({root.where}) have {len(forms)} shapes in"
            f" {forms.total()} calls, where other values beside tensors count as well"
        )
