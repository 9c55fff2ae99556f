"""Calls that hang or fail don't take their caller along."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from fasttrain.hardware.tool import attempt, within


def test_an_answer_in_time_is_given_and_so_is_an_error() -> None:
    assert within(5, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        within(5, lambda: 1 // 0)


def test_a_call_that_hangs_is_left_behind() -> None:
    end = threading.Event()
    try:
        with pytest.raises(TimeoutError, match=r"\b0\.05 s"):
            within(0.05, lambda: end.wait(10))
    finally:
        end.set()


def test_what_is_left_behind_does_not_keep_the_process_alive() -> None:
    code = (
        "import threading; from fasttrain.hardware.tool import within\n"
        "try: within(0.01, threading.Event().wait)\n"
        "except TimeoutError: print('told', flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20)
    assert done.stdout == "told\n", done.stderr


def test_a_failure_becomes_a_note() -> None:
    notes: list[str] = []
    assert attempt("the moon", lambda: 7, 0, notes) == 7
    assert notes == []
    assert attempt("the moon", lambda: 1 // 0, 0, notes) == 0
    (note,) = notes
    assert "the moon" in note
    assert "ZeroDivisionError" in note
