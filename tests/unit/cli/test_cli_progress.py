from __future__ import annotations

import errno
import os
import re
from typing import Any

import pytest

from fasttrain.cli import progress
from fasttrain.cli.progress import CLEAR_LINE, ProgressDisplay, choose_display
from fasttrain.launch.display import PlainDisplay, QuietDisplay

EVENT = {"step": 1200, "step_s": 0.0123, "samples_per_s": 3456.4, "memory_bytes": 1 << 30}
LINE = b"fasttrain  step 1,200  12.3 ms/step  3,456 samples/s  1 GiB"


class Screen:
    """What was written to a terminal, and what stands in its last line."""

    def __init__(self) -> None:
        self.written = b""

    def write(self, descriptor: int, data: bytes) -> None:
        self.written += data

    @property
    def last_line(self) -> bytes:
        plain = re.sub(rb"\x1b\[[0-9;]*m", b"", self.written.split(b"\n")[-1])
        return plain.split(CLEAR_LINE)[-1]


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    made = Screen()
    monkeypatch.setattr(progress, "write_all", made.write)
    monkeypatch.setenv("COLUMNS", "100")
    return made


def test_line_stands_below_the_output(screen: Screen) -> None:
    display = ProgressDisplay()
    display.write(1, b"one\n")
    display.progress(EVENT)
    assert screen.last_line == LINE
    display.write(2, b"two\n")
    assert CLEAR_LINE + b"two\n" in screen.written
    assert screen.last_line == LINE
    display.close()
    assert screen.last_line == b""


@pytest.mark.parametrize("value", [None, "x", [], float("nan"), float("inf"), 10**400])
def test_a_garbled_event_shows_nothing(screen: Screen, value: object) -> None:
    display = ProgressDisplay()
    for name in EVENT:
        display.progress({**EVENT, name: value})
    display.progress({})
    assert screen.written == b""


def test_a_line_of_the_script_is_never_disturbed(screen: Screen) -> None:
    display = ProgressDisplay()
    display.write(1, b"epoch 1:  40%")
    display.progress(EVENT)
    display.write(1, b"\repoch 1:  60%")
    assert screen.written == b"epoch 1:  40%\repoch 1:  60%"
    display.write(1, b"\n")
    assert screen.last_line == LINE


def test_new_figures_replace_the_old(screen: Screen) -> None:
    display = ProgressDisplay()
    display.progress(EVENT)
    display.progress({**EVENT, "step": 1201})
    assert screen.written.count(CLEAR_LINE) == 1
    assert b"step 1,201" in screen.last_line


def test_unknown_figures_are_left_out(screen: Screen) -> None:
    ProgressDisplay().progress({"step": 1, "step_s": 0, "samples_per_s": 0, "memory_bytes": 0})
    assert screen.last_line == b"fasttrain  step 1  0 B"


def test_line_never_wraps(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    display: Any = ProgressDisplay()
    display._console.width = 20
    display.progress(EVENT)
    assert screen.last_line == LINE[:19]


def test_nothing_is_drawn_after_the_end(screen: Screen) -> None:
    display = ProgressDisplay()
    display.progress(EVENT)
    display.close()
    display.write(1, b"late\n")
    assert screen.last_line == b""


def test_a_terminal_that_is_gone_ends_the_line_alone(
    screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(descriptor: int, data: bytes) -> None:
        if descriptor == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        screen.write(descriptor, data)

    display = ProgressDisplay()
    display.progress(EVENT)
    screen.written = b""
    monkeypatch.setattr(progress, "write_all", write)
    display.write(1, b"the script's\n")
    display.progress({**EVENT, "step": 1201})
    display.tell("something")
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        display.write(2, b"the script must know of this\n")
    display.close()
    assert screen.written == b"the script's\n"


@pytest.mark.parametrize(
    ("terminal", "quiet", "kind"),
    [(True, False, ProgressDisplay), (True, True, QuietDisplay), (False, False, PlainDisplay)],
)
def test_choice(monkeypatch: pytest.MonkeyPatch, terminal: bool, quiet: bool, kind: type) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    assert type(choose_display(quiet=quiet)) is kind
