"""Whether a run that failed is worth another attempt."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fasttrain.launch.attempts import FailureKey, key_of, retryable
from fasttrain.launch.crash.cause_rules import Retry
from fasttrain.launch.crash.causes import CAUSES, ENDS, retry_of
from fasttrain.model.crash import Crash, Frame
from fasttrain.model.decision import Source, SourceKind

SOURCE = Source(SourceKind.FLAG, "--max-restarts")


def retried(now: FailureKey, before: FailureKey | None = None, on: str = "auto") -> bool:
    decided = retryable(now, before, on, SOURCE)  # type: ignore[arg-type]
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
    begun = FailureKey(cause, step=5)
    assert retried(FailureKey(cause, step=0)) is at_once
    assert retried(begun, FailureKey(cause, step=4)) is trained
    assert retried(begun, begun) is again
    assert retried(begun, begun, on="any")


def test_of_a_command_no_step_is_known() -> None:
    ended = FailureKey("exit", step=None, exit_code=3)
    assert retried(ended, ended)


@pytest.mark.parametrize(
    "other",
    [{"kind": "KeyError"}, {"exit_code": 2}, {"step": 6}, {"place": (("net.py", 3),)}],
    ids=lambda other: next(iter(other)),
)
def test_what_makes_a_failure_another_one(other: dict[str, object]) -> None:
    before = FailureKey("exception", 5, 1, "ValueError", (("train.py", 3),))
    assert retried(replace(before, **other), before)  # type: ignore[arg-type]


def test_two_crashes_are_compared_by_where_and_not_by_their_words() -> None:
    def crash(message: str, line: int) -> FailureKey:
        frames = (Frame("train.py", line, "main"),)
        return key_of(
            Crash(0, 1, 1, "", 0, "exception", "", "", f"ValueError: {message}", frames, step=5)
        )

    assert crash("sample 7", 3) == crash("sample 8", 3)
    assert crash("sample 7", 3) != crash("sample 7", 4)


def test_rows_of_one_cause_say_the_same() -> None:
    for cause in (*CAUSES, *ENDS):
        assert retry_of(cause.slug) is cause.retry
        assert cause.retry in Retry
