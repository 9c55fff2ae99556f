"""What is said of a lever that was compared: whether it is kept, and why."""

from __future__ import annotations

from dataclasses import replace

from fasttrain.model.tuning import Compared, Parity, Verdict


def judge(verdict: Verdict, parity: Parity | None, *, known_right: bool) -> tuple[bool, str]:
    """Return whether a lever is kept whose results aren't known to be wrong, and why not."""
    reasons: dict[Verdict, str] = {
        "slower": "steps are slower with it",
        "same": "steps take as long without it",
        "undecided": "the times of steps scatter too much to tell within its share of the budget",
    }
    if verdict != "faster":
        return False, reasons[verdict]
    if known_right:
        return True, ""
    if parity is None or parity.right is None:
        why = parity.reason if parity is not None else "nothing was compared"
        return False, f"faster, but whether its results are right isn't known: {why}"
    return True, ""


def beside(one: Compared, found: Compared, rest: str) -> Compared:
    """Return what is known of a kept lever once it was compared beside the others.

    Args:
        one: What it did on top of the levers that were kept before it.
        found: What it does beside all that are kept.
        rest: Names of the others.
    """
    if found.verdict == "slower":
        reason = f"slower together with {rest}"
        return replace(found, reason=reason, first_use_s=one.first_use_s, parity=one.parity)
    if found.ratio.low > one.ratio.high or found.ratio.high < one.ratio.low:
        seen = f"x {found.ratio.middle:.3f} beside {rest}"
        return replace(one, reason=f"{one.reason}; {seen}" if one.reason else seen)
    return one


def tried_together(one: Compared, found: Compared, names: tuple[str, ...]) -> Compared:
    """Return what is known of a lever that doesn't pay alone, and does with the others named."""
    others = " and ".join(name for name in names if name != one.levers[0])
    alone = f"x {one.ratio.middle:.3f} at first"
    reason = f"{alone}, and faster together with {others}" if others else alone
    return replace(
        found, levers=one.levers, asked=one.asked, first_use_s=one.first_use_s, reason=reason
    )


def wrong(parity: Parity) -> str:
    """Return why a lever is not kept whose results are wrong."""
    return f"its results are wrong: {parity.reason}"
