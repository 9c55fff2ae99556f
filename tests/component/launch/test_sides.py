"""Runs beside each other: the end of those that don't answer in time."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from fasttrain.launch.sides import Sides
from fasttrain.model.proof import Side, Turn


def hang(_: Side) -> int:
    time.sleep(60)
    return 1


def linger(_: Side) -> int:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(3))
    return hang("plain")


def deaf(_: Side) -> int:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return hang("plain")


def test_no_turn_is_waited_for_longer_than_there_is_time() -> None:
    began_s = time.monotonic()
    sides = Sides(hang, until_s=began_s + 0.5, end_s=0.2)
    sides.prepare(("plain", "chosen"))
    with sides.attended():
        sides.start("plain", "chosen")
        assert sides.take("plain", Turn(1)) is None
        assert 0.5 <= time.monotonic() - began_s < 30
        assert sides.take("chosen", Turn(1)) is None
        sides.end("plain", "chosen")
    assert time.monotonic() - began_s < 40
    assert sides.exit_code("plain") == sides.exit_code("chosen") == 0, "made to end: no failure"
    assert not sides.signum


def test_who_ignores_being_told_to_end_is_killed() -> None:
    """As where whoever called fasttrain ignores SIGTERM."""
    began_s = time.monotonic()
    sides = Sides(deaf, until_s=began_s + 0.5, end_s=0.2)
    sides.prepare(("plain",))
    with sides.attended():
        sides.start("plain")
        sides.end("plain")
    assert time.monotonic() - began_s < 30
    assert sides.exit_code("plain") == 0, "made to end: no failure"


def test_no_descriptor_is_left() -> None:
    before = set(Path("/proc/self/fd").iterdir())
    sides = Sides(linger, until_s=time.monotonic(), end_s=0.1)
    sides.prepare(("plain", "chosen", "control-1"))
    with sides.attended():
        sides.start("plain")
        assert sides.take("plain", Turn(1)) is None
    assert set(Path("/proc/self/fd").iterdir()) == before


def test_who_fails_slowly_has_failed_as_long_as_there_is_time() -> None:
    def fail(_: Side) -> int:
        time.sleep(0.7)
        return 5

    sides = Sides(fail, until_s=time.monotonic() + 30, end_s=0.1)
    sides.prepare(("plain",))
    with sides.attended():
        sides.start("plain")
        sides.end("plain")
    assert sides.exit_code("plain") == 5


def test_a_signal_that_the_caller_ignores_ends_nothing() -> None:
    def run(_: Side) -> int:
        os.kill(os.getpid(), signal.SIGHUP)
        return 7

    sides = Sides(run)
    sides.prepare(("plain",))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
    try:
        with sides.attended():
            sides.start("plain")
            os.kill(os.getpid(), signal.SIGHUP)
            sides.end("plain")
    finally:
        signal.signal(signal.SIGHUP, before)
    assert not sides.signum
    assert sides.exit_code("plain") == 7


def test_who_is_given_up_ends_at_once_and_has_not_failed() -> None:
    began_s = time.monotonic()
    sides = Sides(hang, lambda: sides.give_up())
    sides.prepare(("plain", "chosen", "control-1"))
    with sides.attended():
        sides.start("plain", "chosen")
        assert sides.take("chosen", Turn(1)) is None
        assert sides.take("plain", Turn(1)) is None
        assert sides.take("control-1", Turn(1)) is None, "it isn't even started"
        sides.end("plain", "chosen")
    assert time.monotonic() - began_s < 40, "it isn't waited for as long as for who hears his turn"
    assert [sides.exit_code(it) for it in ("plain", "chosen", "control-1")] == [0, 0, None]
    assert sides.given_up
    assert not sides.signum
