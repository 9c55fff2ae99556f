"""The closures that scripts pass to ``Optimizer.step``, of which the gradients come."""

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
    """Return whether its step calls the closure once, before anything else.

    torch's own do, but for L-BFGS; of others, such as SAM, nothing is known.
    """
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim") and not isinstance(optimizer, LBFGS)


def followed(args: tuple[Any, ...], kwargs: dict[str, Any], behind: Closure) -> Arguments:
    """Return the arguments with ``behind`` called after the closure."""
    closure: Any = closure_of(args, kwargs)

    def call() -> Any:
        result = closure()
        behind()
        return result

    if len(args) > 1:
        return (args[0], call, *args[2:]), kwargs
    return args, {**kwargs, "closure": call}
