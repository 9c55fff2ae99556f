"""Decides whether two curves of losses differ by more than rounding explains.

Rounding errors grow while a model trains, and by how much depends on the model. So controls show
it: runs whose results are rounded at random. Differences from the plain run are relative to its
loss at that step, or to the median of its losses where that is more: losses may cross zero, and one
of them may be a million times the others. The curves are cut into windows, and in each of them the
root mean square of the differences counts. The chosen run may be `MULTIPLE` times as far as any
control is in that window, in an earlier one, or in the next `AHEAD`: a model trains along few
directions, so that all differences of a window are nearly one draw, and where they begin to grow is
chance.

Where that is nearly as much as the loss changes in the whole of the curve, nothing can be seen.

In its first steps a control doesn't round. There it has to be where the plain run is; else the
script depends on something that isn't the same in two runs, such as the clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median, pstdev

from fasttrain.model.proof import ALIKE, Curves, Window

MULTIPLE = 3.0
CLEAR = 5.0  # so many times further than one control allows is no chance of the control's
AHEAD = 2
VISIBLE = 0.25  # of the standard deviation of the losses: more than this has to be seen
OUTLIER = 4.0  # medians; what is beyond doesn't count as a change of the loss
REPEATED = 2.0**-12  # relative distance of two plain runs; on a device they need not be alike
WINDOWS = 10
RESOLUTION = 2.0**-22  # what the sum that makes a loss in fp32 may be rounded by, in another order
UNKNOWN = "how far rounding alone leads isn't known"
Losses = Sequence[float | None]


def compare(plain: Losses, chosen: Losses, controls: Sequence[Losses] = ()) -> Curves:
    """Return what the losses of the same steps say.

    Args:
        plain: Loss of each step without levers; None where there was none, or it wasn't finite.
        chosen: The same with levers.
        controls: The same without levers, rounded at random; those that are shorter don't count.
    """
    steps = min(len(plain), len(chosen))
    plain, chosen = plain[:steps], chosen[:steps]
    if not any(loss is not None for loss in plain):
        return Curves("can't tell", "no loss was seen: no backward pass, or none that was finite")
    if list(plain) == list(chosen):
        return Curves("same bits", f"all {steps} losses have the same bits", windows(plain, chosen))
    parts = windows(plain, chosen, controls)
    for at, (one, other) in enumerate(zip(plain, chosen, strict=True), start=1):
        if one is not None and other is None:
            reason = f"the loss of step {at} is finite in the plain run only"
            return Curves("differs", reason, parts)
    if at := next(filter(None, (_unlike(plain, control) for control in controls)), 0):
        reason = f"two plain runs part in step {at} already: the script depends on the clock, or on"
        return Curves("can't tell", f"{reason} random numbers that it seeds otherwise", parts)
    if any(part.allowed is None for part in parts):
        return Curves("can't tell", UNKNOWN, parts)
    return _judged(plain, parts)


def needs_control(found: Curves) -> bool:
    """Return True if one more control may change what was found."""
    if found.reason == UNKNOWN:
        return True
    known = [part for part in found.windows if part.apart is not None and part.allowed is not None]
    far = max(((part.apart or 0.0) / (part.allowed or 1.0) for part in known), default=0.0)
    return found.finding == "differs" and 1.0 < far < CLEAR


def _judged(plain: Losses, parts: tuple[Window, ...]) -> Curves:
    spread = _spread(plain)
    for part in parts:
        if (part.apart or 0.0) > (part.allowed or 0.0):
            reason = (
                f"in steps {part.first} to {part.last} the losses are relatively {part.apart:.2g}"
                f" apart; rounding explains {part.allowed:.2g}"
            )
            return Curves("differs", reason, parts)
    seen = [part for part in parts if (part.allowed or 0.0) < VISIBLE * spread]
    if not seen:
        reason = f"rounding alone explains {parts[0].allowed:.2g} already, and the loss changes by"
        return Curves("can't tell", f"{reason} {spread:.2g}", parts)
    worst = max(seen, key=lambda part: (part.apart or 0.0) / (part.allowed or 1.0))
    reason = f"relatively {worst.apart:.2g} apart at most; rounding explains {worst.allowed:.2g}"
    if seen[-1] is not parts[-1]:
        reason += f", and after step {seen[-1].last} any difference"
    return Curves("within rounding", reason, parts)


def windows(plain: Losses, chosen: Losses, controls: Sequence[Losses] = ()) -> tuple[Window, ...]:
    """Return the parts of two curves of the same length, without those that have no loss."""
    if all(loss is None for loss in plain):
        return ()
    scales = _scales(plain)
    bounds = [
        slice(first, last)
        for first, last in _bounds(len(plain))
        if any(loss is not None for loss in plain[first:last])
    ]
    whole = [control for control in controls if len(control) >= len(plain)]
    errors = [[_error(plain, control, scales, part) for part in bounds] for control in whole]
    parts: list[Window] = []
    for at, part in enumerate(bounds):
        means = [loss for loss in plain[part] if loss is not None]
        others = [b for a, b in zip(plain[part], chosen[part], strict=True) if a is not None]
        finite = [loss for loss in others if loss is not None]
        mean = fmean(finite) if len(finite) == len(others) else None
        # A control whose loss isn't finite says nothing about those that are.
        far = [e for control in errors for e in _first(control, at + AHEAD + 1)]
        allowed = MULTIPLE * max(*far, RESOLUTION) if far else None
        apart = _apart(plain[part], chosen[part], scales[part])
        parts.append(Window(part.start + 1, part.stop, fmean(means), mean, apart, allowed))
    return tuple(parts)


def _bounds(steps: int) -> list[tuple[int, int]]:
    count = min(WINDOWS, steps)
    edges = [round(at * steps / count) for at in range(count + 1)] if count else []
    return list(pairwise(edges))


def _unlike(plain: Losses, control: Losses) -> int:
    """Return the first step in which a control isn't where it has to be; 0 if there is none."""
    for at, (one, other) in enumerate(zip(plain, control, strict=False), start=1):
        if at > ALIKE:
            break
        if (one is None) != (other is None):
            return at
        if one is not None and other is not None and abs(one - other) > REPEATED * abs(one):
            return at
    return 0


def _error(plain: Losses, control: Losses, scales: Sequence[float], part: slice) -> float | None:
    rounded = slice(max(ALIKE, part.start), part.stop)
    return _apart(plain[rounded], control[rounded], scales[rounded])


def _scales(plain: Losses) -> list[float]:
    """Return for each step what a difference is relative to."""
    usual = _usual(plain)
    return [max(abs(loss or 0.0), usual) for loss in plain]


def _usual(plain: Losses) -> float:
    return median(abs(loss) for loss in plain if loss is not None) or 1.0


def _spread(plain: Losses) -> float:
    """Return by how much the loss changes in the curve, relatively."""
    most = OUTLIER * (usual := _usual(plain))
    return pstdev([max(-most, min(most, loss)) for loss in plain if loss is not None]) / usual


def _first(errors: Sequence[float | None], count: int) -> list[float]:
    """Return so many of the first errors, or else the very first that there is."""
    known = [error for error in errors if error is not None]
    return [error for error in errors[:count] if error is not None] or known[:1]


def _apart(plain: Losses, other: Losses, scales: Sequence[float]) -> float | None:
    """Return the root mean square of differences; None if there is none, or one isn't finite."""
    parts = [part for part in zip(plain, other, scales, strict=True) if part[0] is not None]
    found = [(a - b) / by for a, b, by in parts if a is not None and b is not None]
    if not found or len(found) < len(parts):
        return None
    return math.sqrt(fmean(difference**2 for difference in found))
