"""Captures a step of the script, and compares its results with a lever and without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fasttrain.model.tuning import Parity
from fasttrain.shim.data_parallel.split.rows import reduced_by
from fasttrain.shim.hooks.roots import RootCalls, parameters_of
from fasttrain.shim.tune.captured import Capture, CapturedCall
from fasttrain.shim.tune.inner_calls import InnerCalls, NoCollectives, communicates
from fasttrain.shim.tune.parity import Finding, compare, compare_step
from fasttrain.shim.tune.room import FOR_CALL, FOR_STEP, no_room

NO_CALL = "no call of a model in training mode got a gradient in the step that was looked at"
NO_STEP = "no optimizer made a step"
Switch = Callable[[], None]
AroundStep = Callable[[Optimizer], AbstractContextManager[Any]]


class Repeats:
    """Compares what levers compute, in a step that the caller lets pass.

    Args:
        roots: Routes the calls of roots.
        apart: Returns a context in which this rank asks no other one for anything; None without
            other ranks.
    """

    def __init__(
        self, roots: RootCalls, apart: Callable[[], AbstractContextManager[None]] | None = None
    ) -> None:
        self._roots = roots
        self._apart = apart

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
            inner = InnerCalls(self._roots, undo) if self._apart is not None else None
            capture = Capture(self._roots if inner is None else inner, undo)

            def compared(plain: Switch, changed: Switch) -> Parity:
                with self._by_itself(inner):
                    findings = [
                        self._compared(call, module, plain, changed, rounds, eager=eager)
                        for call in capture.calls()
                        if (module := call.module()) is not None
                    ]
                return _worst(findings, NO_CALL)

            yield compared

    def _compared(
        self,
        call: CapturedCall,
        module: Module,
        plain: Switch,
        changed: Switch,
        rounds: float,
        *,
        eager: bool,
    ) -> Finding:
        if self._apart is not None and (why := communicates(module)):
            return Finding("unknown", f"it can't be repeated: {why}")
        if why := no_room(parameters_of(module), FOR_CALL):
            return Finding("unknown", why)
        around = self._plainly(plain), self._switched(changed)
        return compare(call, module, *around, rounds, eager=eager)

    @contextmanager
    def _by_itself(self, inner: InnerCalls | None) -> Iterator[None]:
        """Have calls in the block be those of a single rank: no other one may be repeating any."""
        if self._apart is None or inner is None:
            yield
            return
        # A graph that was compiled in a split call sums over the ranks wherever it runs.
        with self._apart(), self._roots.bare(inner.roots()), reduced_by(_of_this_rank):
            yield

    @contextmanager
    def of_step(self, around: AroundStep, rounds: float) -> Iterator[Callable[[], Parity]]:
        """Compare the next step of each optimizer, and yield what returns the result after it.

        Args:
            around: Returns the context in which a copy of an optimizer makes a step with the lever.
            rounds: What the lever rounds results by, relatively.
        """
        findings: list[Finding] = []

        def before_step(optimizer: Optimizer, *_: Any) -> None:
            parameters = (p for group in optimizer.param_groups for p in group["params"])
            if why := no_room(parameters, FOR_STEP):
                findings.append(Finding("unknown", why))
            else:
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
                with nullcontext() if self._apart is None else NoCollectives():
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


def _of_this_rank(part: Tensor, of_loss: bool) -> Tensor:  # noqa: ARG001 - the operator's
    return part.clone()


@contextmanager
def _as_it_is(_: Optimizer) -> Iterator[None]:
    yield


def _worst(findings: list[Finding], nothing: str) -> Parity:
    """Return the finding that decides: a wrong one, else an unknown one, else the nearest to it."""
    found = [Parity(one.right, one.reason, one.distance, one.allowed) for one in findings]
    return min(found, key=lambda one: one.order, default=Parity(None, nothing))
