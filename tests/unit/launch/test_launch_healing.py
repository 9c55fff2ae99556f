"""Whether a run that failed is worth another attempt."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fasttrain.launch.crash.cause_rules import Heals
from fasttrain.launch.crash.causes import CAUSES, ENDS, heals
from fasttrain.launch.restarts.restart_policy import Failed, can_heal, failed_by
from fasttrain.model.crash import Crash, Frame
from fasttrain.model.decision import Source, SourceKind

SOURCE = Source(SourceKind.FLAG, "--max-restarts")


def healing(now: Failed, before: Failed | None = None, on: str = "auto") -> bool:
    decided = can_heal(now, before, on, SOURCE)  # type: ignore[arg-type]
    assert decided.reason
    assert decided.source is SOURCE
    return decided.value


@pytest.mark.parametrize(
    ("cause", "at_once", "trained", "again"),
    [
        ("syntax", False, False, False),
        ("usage", False, False, False),
        ("disk-full", False, False, False),
        ("refused", False, False, False),  # as gradients that are no numbers are told
        ("exception", False, True, False),
        ("exit", False, True, False),
        ("shape-mismatch", False, True, False),
        ("device-memory", True, True, False),
        ("host-memory", True, True, False),
        ("segfault", True, True, False),
        ("hang", True, True, False),
        ("peer-lost", True, True, True),
        ("device-fault", True, True, True),
        ("network", True, True, True),
        ("killed", True, True, True),
    ],
)
def test_what_is_tried_again(cause: str, at_once: bool, trained: bool, again: bool) -> None:
    """At step 0; at step 5; at step 5 as in the attempt before."""
    begun = Failed(cause, step=5)
    assert healing(Failed(cause, step=0)) is at_once
    assert healing(begun, Failed(cause, step=4)) is trained
    assert healing(begun, begun) is again
    assert healing(begun, begun, on="any")


def test_of_a_command_no_step_is_known() -> None:
    ended = Failed("exit", step=None, exit_code=3)
    assert healing(ended, ended)


@pytest.mark.parametrize(
    "other",
    [{"kind": "KeyError"}, {"exit_code": 2}, {"step": 6}, {"place": (("net.py", 3),)}],
    ids=lambda other: next(iter(other)),
)
def test_what_makes_a_failure_another_one(other: dict[str, object]) -> None:
    before = Failed("exception", 5, 1, "ValueError", (("train.py", 3),))
    assert healing(replace(before, **other), before)  # type: ignore[arg-type]


def test_two_crashes_are_compared_by_where_and_not_by_their_words() -> None:
    def crash(message: str, line: int) -> Failed:
        frames = (Frame("train.py", line, "main"),)
        return failed_by(
            Crash(0, 1, 1, "", 0, "exception", "", "", f"ValueError: {message}", frames, step=5)
        )

    assert crash("sample 7", 3) == crash("sample 8", 3)
    assert crash("sample 7", 3) != crash("sample 7", 4)


def test_rows_of_one_cause_say_the_same() -> None:
    for cause in (*CAUSES, *ENDS):
        assert heals(cause.slug) is cause.heals
        assert cause.heals in Heals
