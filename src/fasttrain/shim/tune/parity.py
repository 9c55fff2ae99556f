"""Compares the results of a lever with those without it: of one call, and of one optimizer step.

The same call of a root is repeated on the same arguments, weights, buffers and random numbers:
plainly, with the lever, in fp64, and in fp64 with each result rounded at random as the lever may
round. The lever's distance from fp64 may be a multiple of what rounding alone comes to. A factor
that everything is multiplied by shows far below that distance, and one rounding must explain it.
The plain call must be as near to fp64 itself: else fp64 is no reference for it.

The state of the root's modules is restored after each repetition, and so are all random states.
What the call changes elsewhere, such as in globals of the script, it changes in each repetition, of
which the last is a plain one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from fasttrain.model.tuning import REORDERED
from fasttrain.shim.data_parallel.split.surroundings import all_random_states
from fasttrain.shim.hooks.call_state import one_line
from fasttrain.shim.tune.captured import CapturedCall
from fasttrain.shim.tune.distances import (
    MULTIPLE,
    PLAIN_ROUNDOFF,
    VALUE,
    Comparison,
    Distance,
    Results,
    missing_in,
    nan_in,
    other_bits,
    otherwise_infinite,
    without_infinite,
)
from fasttrain.shim.tune.double_weights import widened
from fasttrain.shim.tune.optimizer_copy import AroundStep, stepped
from fasttrain.shim.tune.repetition import Around, Repeater

SAMPLES = 2  # of results that are rounded at random
OWN = 10.0  # times the distance that rounding explains, from which on fp64 computes something else
ROUGH = 1.0  # relative distance that rounding would allow, from which on nothing can be shown
_NO_MEMORY = "OutOfMemoryError"  # torch's exception on any device
Verdict = Literal["same bits", "within rounding", "too far", "unknown"]
RandomStates = list[tuple[Any, Any]]


@dataclass(frozen=True, slots=True)
class Finding:
    """Whether results with a lever are right.

    Attributes:
        verdict: What was found.
        reason: Why, with numbers.
        distance: The relative distance of the worst part from fp64, with the lever.
        allowed: The most that this part may have.
        parts: The distances of all parts, the worst first.
    """

    verdict: Verdict
    reason: str
    distance: float = 0.0
    allowed: float = 0.0
    parts: tuple[Distance, ...] = ()

    @property
    def right(self) -> bool | None:
        """True if the results are right, False if they aren't, None if that isn't known."""
        return None if self.verdict == "unknown" else self.verdict != "too far"


def compare(
    captured: CapturedCall,
    module: Module,
    plain: Around,
    changed: Around,
    unit_roundoff: float | None,
    *,
    eager: bool = False,
) -> Finding:
    """Compare a captured call's results with a lever and without.

    Args:
        captured: The call.
        module: Its root, which is called up to seven times, three of them in fp64.
        plain: Returns a context in which a call of the root is a plain one.
        changed: Returns a context in which a call of the root is as with the lever.
        unit_roundoff: What the lever rounds by, such as 2**-8 for bf16; None if it promises the
            same bits.
        eager: True if the lever consists of eager operators, such as autocast, so that they can be
            made to draw the random numbers of a plain call.
    """
    if not captured.complete:
        return Finding("unknown", "no backward pass gave a gradient to the call's output")
    try:
        repeater = Repeater(captured, module)
        try:
            return _compared(repeater, plain, changed, unit_roundoff, eager=eager)
        finally:
            # What objects outside of the modules keep of a call is in the script's dtypes again.
            repeater.repeat(plain)
    except Exception as error:  # noqa: BLE001 - the script's model, called for a trial
        return Finding("unknown", f"it can't be repeated: {one_line(error)}")


def _compared(
    repeater: Repeater, plain: Around, changed: Around, unit_roundoff: float | None, *, eager: bool
) -> Finding:
    first = repeater.repeat(plain, eager=eager)
    if where := nan_in(first.results):
        return Finding("unknown", f"{where} is NaN without the lever, too")
    second = repeater.repeat(plain, eager=eager)
    try:
        other = repeater.repeat(changed, eager=eager)
    except Exception as error:
        if _NO_MEMORY in type(error).__name__:
            raise
        return Finding("too far", f"with the lever: {one_line(error)}", math.inf)
    itself, bits = first.other_bits(second), first.other_bits(other)
    if not itself and not bits:
        return Finding("same bits", "all results have the same bits")
    if unit_roundoff is None and itself:
        return Finding("unknown", f"two plain calls differ in the bits of {itself}")
    if unit_roundoff is None:
        return Finding("too far", f"the bits of {bits} are others with the lever", math.inf)
    if itself and (differs := _differing(first.results, second.results)):
        return Finding("unknown", f"two plain calls differ: {differs}")
    found = _against_double(repeater, plain, first.results, other.results, unit_roundoff)
    if found.right is False and first.drew and other.drew and not first.same_draws(other):
        why = "it draws other random numbers with the lever"
        return replace(found, verdict="unknown", reason=f"{why}: {found.reason}")
    return found


def _against_double(
    repeater: Repeater, plain: Around, first: Results, other: Results, unit_roundoff: float
) -> Finding:
    """Compare results with the lever, and those without, with what fp64 comes to."""
    exact = repeater.in_double(plain).results
    if where := missing_in(exact, first):
        return Finding("unknown", f"in fp64 there is no {where}")
    rounding = max(unit_roundoff, REORDERED)
    samples = [repeater.in_double(plain, rounding, seed).results for seed in range(SAMPLES)]
    found = _judged(Comparison(other, exact, [first, *samples], rounding))
    far = _far(first, exact, samples, rounding) if found.parts else None
    if far is not None and far.changed > repeater.coarseness:
        return Finding("unknown", f"it computes something else in fp64: {far}")
    return found


def _far(
    plain: Results, exact: Results, samples: list[Results], rounding: float
) -> Distance | None:
    """Return in what a plain call is further from fp64 than rounding explains; None if in nothing.

    Statistics don't count: what they change by is small beside the rounding of what is stored. A
    parameter's value does.
    """
    groups = plain.groups.keys() - (plain.before.keys() - {VALUE})
    of = [
        without_infinite(Results({g: t for g, t in one.groups.items() if g in groups}, one.before))
        for one in (plain, exact, *samples)
    ]
    distances = Comparison(of[0], of[1], of[2:], rounding, OWN / MULTIPLE).distances()
    return next((one for one in distances if one.whole and one.share > 1), None)


def _differing(first: Results, second: Results) -> str:
    """Return in what two plain calls differ more than by the order of sums; empty if in nothing."""
    scale = REORDERED / PLAIN_ROUNDOFF
    found = _judged(Comparison(second, first, [first], REORDERED, scale))
    return found.reason if found.verdict == "too far" else ""


def compare_step(
    optimizer: Optimizer, plain: AroundStep, changed: AroundStep, unit_roundoff: float | None
) -> Finding:
    """Compare what a lever makes of an optimizer's step with the step without it.

    Copies of the optimizer make the steps, without the hooks that are on all optimizers' steps.

    Args:
        optimizer: The optimizer, whose parameters have gradients.
        plain: Returns a context in which the copy that it gets makes a plain step.
        changed: Returns a context in which the copy that it gets makes a step with the lever.
        unit_roundoff: What the lever rounds by; None if it promises the same bits.
    """
    states = all_random_states()
    try:
        return _steps_compared(optimizer, plain, changed, unit_roundoff, states)
    except Exception as error:  # noqa: BLE001 - an optimizer of any kind
        return Finding("unknown", f"its step can't be repeated: {one_line(error)}")
    finally:
        _put(states)


def _steps_compared(
    optimizer: Optimizer,
    plain: AroundStep,
    changed: AroundStep,
    unit_roundoff: float | None,
    states: RandomStates,
) -> Finding:
    given = [p.grad for group in optimizer.param_groups for p in group["params"]]
    if all(gradient is None for gradient in given):
        return Finding("unknown", "no parameter has a gradient")

    def step(around: AroundStep, cast: Callable[[Tensor], Tensor]) -> Results:
        _put(states)
        return stepped(optimizer, around, cast)

    one, other = step(plain, Tensor.clone), step(changed, Tensor.clone)
    if where := nan_in(one):
        return Finding("unknown", f"{where} is NaN without the lever, too")
    bits = other_bits(one, other)
    if not bits:
        return Finding("same bits", "all results have the same bits")
    if unit_roundoff is None:
        return Finding("too far", f"the bits of {bits} are others with the lever", math.inf)
    scale = unit_roundoff / PLAIN_ROUNDOFF
    return _judged(Comparison(other, step(plain, widened), [one], unit_roundoff, scale))


def _put(states: RandomStates) -> None:
    for put, state in states:
        put(state)


def _judged(of: Comparison) -> Finding:
    """Return what comes of results of which those without the lever have no NaN."""
    plain = of.rounded[0]
    for results in (of.exact, *of.rounded):
        if where := nan_in(results):
            return Finding("unknown", f"{where} is NaN in fp64")
        if where := otherwise_infinite(plain, results):
            return Finding("unknown", f"{where} is infinite in fp32 only, or in fp64 only")
    if where := nan_in(of.changed):
        return Finding("too far", f"{where} is NaN with the lever only", math.inf)
    if where := otherwise_infinite(of.changed, plain):
        return Finding("too far", f"{where} is infinite in other places with the lever", math.inf)
    changed, exact, *rounded = map(without_infinite, (of.changed, of.exact, *of.rounded))
    return _by_distances(replace(of, changed=changed, exact=exact, rounded=rounded).distances())


def _by_distances(found: list[Distance]) -> Finding:
    if not found:
        return Finding("unknown", "it has no floating-point results")
    worst = found[0]
    numbers = worst.changed, worst.allowed, tuple(found)
    if worst.share > 1:
        return Finding("too far", str(worst), *numbers)
    for whole in (one for one in found if one.whole and one.allowed > ROUGH):
        return Finding("unknown", f"rounding would explain any difference: {whole}", *numbers)
    return Finding("within rounding", str(worst), *numbers)
