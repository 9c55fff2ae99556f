"""Captures a step of the script, and compares its results with a lever and without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fasttrain.model.tuning import Parity
from fasttrain.shim.hooks.roots import RootCalls
from fasttrain.shim.tune.captured import Capture
from fasttrain.shim.tune.parity import Finding, compare, compare_step

NO_CALL = "no call of a model in training mode got a gradient in the step that was looked at"
NO_STEP = "no optimizer made a step"
Switch = Callable[[], None]
AroundStep = Callable[[Optimizer], AbstractContextManager[Any]]


class Repeats:
    """Compares what levers compute, in a step that the caller lets pass.

    Args:
        roots: Routes the calls of roots.
    """

    def __init__(self, roots: RootCalls) -> None:
        self._roots = roots

    @contextmanager
    def of_calls(
        self, rounds: float, *, eager: bool
    ) -> Iterator[Callable[[Switch, Switch], Parity]]:
        """Capture the calls of a step, and yield what compares them after it.

        Args:
            rounds: What the levers round results by, relatively.
            eager: Whether they consist of eager operators.
        """
        with ExitStack() as undo:
            capture = Capture(self._roots, undo)

            def compared(plain: Switch, changed: Switch) -> Parity:
                findings = [
                    compare(
                        call,
                        module,
                        self._plainly(plain),
                        self._switched(changed),
                        rounds,
                        eager=eager,
                    )
                    for call in capture.calls()
                    if (module := call.module()) is not None
                ]
                return _worst(findings, NO_CALL)

            yield compared

    @contextmanager
    def of_step(self, around: AroundStep, rounds: float) -> Iterator[Callable[[], Parity]]:
        """Compare the next step of each optimizer, and yield what returns the result after it.

        Args:
            around: Returns the context in which a copy of an optimizer makes a step with the lever.
            rounds: What the lever rounds results by, relatively.
        """
        findings: list[Finding] = []

        def before_step(optimizer: Optimizer, *_: Any) -> None:
            findings.append(compare_step(optimizer, _as_it_is, around, rounds))

        handle = register_optimizer_step_pre_hook(before_step)
        try:
            yield lambda: _worst(findings, NO_STEP)
        finally:
            handle.remove()

    def _plainly(self, switch: Switch) -> Callable[[], AbstractContextManager[None]]:
        """Return what makes calls, also those of a copy, no calls of roots."""

        @contextmanager
        def around() -> Iterator[None]:
            switch()
            inside = self._roots.inside
            before, inside.flag = inside.flag, True
            try:
                yield
            finally:
                inside.flag = before

        return around

    def _switched(self, switch: Switch) -> Callable[[], AbstractContextManager[None]]:
        """Return what makes calls of roots that nobody counts."""

        @contextmanager
        def around() -> Iterator[None]:
            switch()
            listeners: tuple[list[Any], ...] = (self._roots.on_call, self._roots.on_return)
            before = [list(each) for each in listeners]
            for each in listeners:
                each.clear()
            try:
                yield
            finally:
                for each, held in zip(listeners, before, strict=True):
                    each[:] = held

        return around


@contextmanager
def _as_it_is(_: Optimizer) -> Iterator[None]:
    yield


def _worst(findings: list[Finding], nothing: str) -> Parity:
    """Return the finding that decides: a wrong one, else an unknown one, else the nearest to it."""
    if not findings:
        return Parity(None, nothing)
    order = {False: 0, None: 1, True: 2}

    def rank(one: Finding) -> tuple[int, float]:
        return order[one.right], -one.distance / one.allowed if one.allowed else 0.0

    worst = min(findings, key=rank)
    return Parity(worst.right, worst.reason, worst.distance, worst.allowed)
