"""Two curves of losses: the same bits, as far apart as rounding explains, or different."""

from __future__ import annotations

import math
import random

import pytest

from fasttrain.model.proof import ALIKE
from fasttrain.statistics.curves import UNKNOWN, compare, needs_control

STEPS = 100
PLAIN = [2.0 * math.exp(-step / 40) + 0.05 * math.sin(step) for step in range(STEPS)]


def rounded(by: float, seed: int = 1, *, since: int = ALIKE) -> list[float | None]:
    """Return the curve with an error that grows as a training's does."""
    draw = random.Random(seed)
    return [
        loss if at < since else loss + by * (1 + at / 20) * draw.gauss(0, 1)
        for at, loss in enumerate(PLAIN)
    ]


def test_the_same_bits_need_no_control() -> None:
    found = compare(PLAIN, PLAIN)
    assert found.finding == "same bits"
    assert len(found.windows) == 10
    assert (found.windows[0].first, found.windows[-1].last) == (1, STEPS)


def test_other_bits_need_a_control() -> None:
    assert compare(PLAIN, rounded(1e-4)).reason == UNKNOWN


@pytest.mark.parametrize("by", [1e-7, 1e-3])
def test_what_rounding_explains_is_right(by: float) -> None:
    for seed in range(2, 52):
        found = compare(PLAIN, rounded(by, seed, since=0), [rounded(by, 100 + seed)])
        assert found.finding == "within rounding", found


def test_what_it_does_not_explain_differs() -> None:
    found = compare(PLAIN, rounded(1e-2, 2), [rounded(1e-4)])
    assert found.finding == "differs"
    assert "in steps 1 to 10" in found.reason


def test_a_part_from_some_step_on_differs() -> None:
    late = rounded(1e-5, 2)[:80] + [loss + 0.01 for loss in PLAIN[80:]]
    found = compare(PLAIN, late, [rounded(1e-5)])
    assert found.finding == "differs"
    assert "in steps 81 to 90" in found.reason


def test_the_control_that_is_furthest_counts() -> None:
    chosen = rounded(1e-3, 2)
    assert compare(PLAIN, chosen, [rounded(1e-4)]).finding == "differs"
    assert compare(PLAIN, chosen, [rounded(1e-4), rounded(1e-3)]).finding == "within rounding"


def test_where_rounding_explains_all_nothing_is_shown() -> None:
    assert compare(PLAIN, rounded(0.5, 2), [rounded(0.5)]).finding == "can't tell"


def test_where_rounding_explains_all_later_that_is_told() -> None:
    def wild(seed: int) -> list[float | None]:
        return rounded(1e-4, seed)[:60] + rounded(0.3, seed)[60:]

    found = compare(PLAIN, wild(2), [wild(1)])
    assert found.finding == "within rounding"
    assert "after step 40 any difference" in found.reason  # the control's next windows count


def test_one_huge_loss_hides_nothing() -> None:
    def spiky(losses: list[float | None]) -> list[float | None]:
        return [*losses[:20], (losses[20] or 0.0) * 1e7, *losses[21:]]

    plain, right, wrong = spiky([*PLAIN]), spiky(rounded(1e-4, 2)), spiky(rounded(1e-2, 2))
    assert compare(plain, right, [spiky(rounded(1e-4))]).finding == "within rounding"
    assert compare(plain, wrong, [spiky(rounded(1e-4))]).finding == "differs"
    wild = spiky(rounded(0.5, 2))
    assert compare(plain, wild, [spiky(rounded(0.5))]).finding == "can't tell"


def test_losses_that_cross_zero() -> None:
    plain = [math.sin(step / 10) for step in range(STEPS)]
    right = [loss + 1e-5 * math.cos(step) for step, loss in enumerate(plain)]
    control = [*plain[:ALIKE], *(loss + 1e-5 for loss in plain[ALIKE:])]
    assert compare(plain, right, [control]).finding == "within rounding"
    assert compare(plain, [loss + 1e-3 for loss in plain], [control]).finding == "differs"


def test_two_plain_runs_that_part_show_nothing() -> None:
    other = [loss * 1.1 for loss in PLAIN]
    found = compare(PLAIN, rounded(1e-5), [other])
    assert found.finding == "can't tell"
    assert "part in step 1" in found.reason


def test_a_loss_that_is_not_finite_with_the_levers_alone_differs() -> None:
    found = compare(PLAIN, [*PLAIN[:50], *[None] * 50])
    assert found.finding == "differs"
    assert "step 51" in found.reason


def test_a_loss_that_is_finite_nowhere_is_the_scripts_own() -> None:
    curve = [*PLAIN[:50], *[None] * 50]
    assert compare(curve, curve).finding == "same bits"
    assert compare(curve, [*rounded(1e-5)[:50], *[None] * 50], [curve]).finding == "differs"


def test_no_loss_shows_nothing() -> None:
    assert compare([None] * 9, [None] * 9).finding == "can't tell"
    assert compare([], []).finding == "can't tell"


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 7])
def test_few_steps(steps: int) -> None:
    chosen, control = rounded(1e-4, 2, since=0)[:steps], rounded(1e-4)[:steps]
    expected = "within rounding" if steps > ALIKE else "can't tell"
    assert compare(PLAIN[:steps], chosen, [control]).finding == expected


def test_curves_of_other_lengths_are_compared_as_far_as_both_go() -> None:
    found = compare(PLAIN, PLAIN[:70], [])
    assert found.finding == "same bits"
    assert found.windows[-1].last == 70


def test_further_controls_are_asked_where_they_may_change_the_verdict() -> None:
    control = rounded(1e-4)
    assert needs_control(compare(PLAIN, rounded(1e-4, 2)))
    assert not needs_control(compare(PLAIN, PLAIN))
    assert not needs_control(compare(PLAIN, rounded(1e-4, 2), [control]))
    assert needs_control(compare(PLAIN, rounded(1e-3, 2), [control]))
    assert not needs_control(compare(PLAIN, rounded(1e-1, 2), [control])), "it is clear"
    assert not needs_control(compare(PLAIN, [*PLAIN[:50], *[None] * 50], []))
