"""Closures that scripts pass to ``Optimizer.step``, which compute the gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import LBFGS, Optimizer

Closure = Callable[[], Any]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Closure | None:
    """Return the closure among the arguments of a step, the optimizer being the first of them."""
    return args[1] if len(args) > 1 else kwargs.get("closure")


def begins_with_closure(optimizer: Optimizer) -> bool:
    """True if an optimizer's step calls its closure once, before anything else.

    torch's own optimizers do, except for L-BFGS. Others, such as SAM, may not.
    """
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim") and not isinstance(optimizer, LBFGS)


def followed(args: tuple[Any, ...], kwargs: dict[str, Any], after: Closure) -> Arguments:
    """Return a step's arguments with a closure that calls ``after`` at its end."""
    closure: Any = closure_of(args, kwargs)

    def call() -> Any:
        result = closure()
        after()
        return result

    if len(args) > 1:
        return (args[0], call, *args[2:]), kwargs
    return args, {**kwargs, "closure": call}
