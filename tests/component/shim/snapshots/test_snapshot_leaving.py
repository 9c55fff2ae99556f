"""A process that is to end does, whatever its script catches."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from fasttrain.model.errors import FasttrainError
from fasttrain.shim.process import refusal
from fasttrain.shim.process.refusal import LEAVING, refuse

REFUSED = FasttrainError("no", why="because", fix="another way", slug="a-test")


class Left(BaseException):
    """The process is gone, with the exit code that this holds."""


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Keep what is done at the end of the process, which does not come."""
    done: list[Any] = []

    def leave(code: int) -> None:
        raise Left(code)

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(atexit, "_run_exitfuncs", lambda: done.append("atexit"))
    monkeypatch.setattr(refusal, "at_failure", [lambda error: done.append(error.code)])
    with ExitStack() as undo:
        LEAVING.insist(undo)
        yield done


def swallow(end: SystemExit) -> None:
    LEAVING.begin(end)


def test_a_run_that_is_not_to_end_goes_on(done: list[Any]) -> None:
    LEAVING.may_go_on()
    refusal.ended_well()
    assert done == []


def test_the_next_thing_that_a_preempted_run_does_ends_it(done: list[Any]) -> None:
    swallow(SystemExit(0))
    refusal.ended_well()  # nobody has caught it
    with pytest.raises(Left, match=r"^0$"):
        LEAVING.may_go_on()
    assert done == ["atexit"]


def test_a_refused_run_never_ends_well(done: list[Any], capfd: Any) -> None:
    with pytest.raises(SystemExit):
        refuse(REFUSED)
    for act in (LEAVING.may_go_on, refusal.ended_well, lambda: refuse(REFUSED)):
        with pytest.raises(Left, match=r"^78$"):
            act()
    assert done == [78, "atexit"] * 3
    assert capfd.readouterr().err.count("error: no") == 1


def test_without_snapshots_nothing_insists(done: list[Any]) -> None:
    with ExitStack() as undo:
        LEAVING.insist(undo)
        swallow(SystemExit(78))
    LEAVING.may_go_on()
    refusal.ended_well()
    assert done == []
