"""When to compile: the rule, and the bounds that it promises."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fasttrain.shim.compile_auto.rule import (
    KNOWN_TIMES,
    UNKNOWN_TIMES,
    Prospect,
    decide,
    guess_compilation,
    guess_stall,
)

STEP_S = 0.01
COST_S = 4.0
NOTHING_KNOWN = Prospect(STEP_S, 1.0, None, 0, COST_S)


def total_s(
    steps: int, ratio: float, *, known: bool = False, measured: float | None = None
) -> float:
    """Return what a run takes that decides at each step, and compiles at no time but its cost."""
    taken_s, compiled = 0.0, False
    for step in range(steps):
        if not compiled:
            left = steps - step if known else None
            seen = Prospect(STEP_S, taken_s, left, 0, COST_S, measured)
            choice = decide(seen)
            if choice.verdict == "never":
                return taken_s + (steps - step) * STEP_S
            if choice.verdict == "begin":
                compiled = True
                taken_s += COST_S
        taken_s += STEP_S * (ratio if compiled else 1.0)
    return taken_s


LENGTHS = [10, 900, 3_000, 4_000, 8_001, 8_500, 20_000, 100_000]
RATIOS = [0.3, 0.7, 0.94, 0.95, 1.0, 1.1]


@pytest.mark.parametrize("steps", LENGTHS)
@pytest.mark.parametrize("ratio", RATIOS)
def test_a_run_of_unknown_length_keeps_to_its_bounds(steps: int, ratio: float) -> None:
    never_s, always_s = steps * STEP_S, COST_S + steps * STEP_S * ratio
    taken_s, share = total_s(steps, ratio), 1 / UNKNOWN_TIMES
    # One that is slower compiled is dropped soon after: only its cost counts here.
    assert taken_s <= max(1.0, ratio) * never_s * (1 + share) + 1e-6
    assert taken_s <= max((1 + share) / (ratio + share), 1 + share) * always_s + 1e-6


@pytest.mark.parametrize("steps", LENGTHS)
@pytest.mark.parametrize("ratio", RATIOS)
def test_a_known_length_bounds_what_a_vain_compilation_costs(steps: int, ratio: float) -> None:
    never_s = steps * STEP_S
    assert (
        total_s(steps, ratio, known=True)
        <= max(1.0, ratio) * never_s * (1 + 1 / KNOWN_TIMES) + 1e-6
    )


@pytest.mark.parametrize("steps", [*LENGTHS, 1_400, 1_500, 11_000])
@pytest.mark.parametrize("ratio", RATIOS)
def test_who_knows_both_is_near_the_better(steps: int, ratio: float) -> None:
    never_s, always_s = steps * STEP_S, COST_S + steps * STEP_S * ratio
    best_s = min(never_s, always_s)
    taken_s = total_s(steps, ratio, known=True, measured=ratio)
    assert taken_s in (pytest.approx(never_s), pytest.approx(always_s))
    assert best_s - 1e-6 <= taken_s <= 1.05 * best_s


@pytest.mark.parametrize("steps", [*LENGTHS, 1_400, 1_500, 11_000])
@pytest.mark.parametrize("ratio", RATIOS)
def test_a_ratio_that_was_a_little_too_good_costs_nothing(steps: int, ratio: float) -> None:
    taken_s = total_s(steps, ratio + 0.035, known=True, measured=ratio)
    assert taken_s <= steps * STEP_S + 1e-6


def test_the_rest_of_an_epoch_may_be_enough_to_begin() -> None:
    waits = decide(NOTHING_KNOWN)
    assert waits.verdict == "wait"
    assert f"{UNKNOWN_TIMES * NOTHING_KNOWN.cost_s:.0f} s" in waits.why, "when it begins"
    assert decide(replace(NOTHING_KNOWN, at_least_left=100_000)).verdict == "begin"


def test_what_was_not_faster_is_not_compiled_again() -> None:
    assert decide(replace(NOTHING_KNOWN, elapsed_s=1e6, ratio=1.02)).verdict == "never"
    assert decide(replace(NOTHING_KNOWN, steps_left=10**9, ratio=1.02)).verdict == "never"


def test_a_larger_model_costs_more() -> None:
    assert guess_stall(100) > guess_stall(10) > 0
    assert guess_compilation(100) > guess_compilation(10) > guess_stall(10)
