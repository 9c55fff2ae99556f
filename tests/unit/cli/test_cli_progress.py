from __future__ import annotations

import errno
import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from fasttrain.cli.cards import progress
from fasttrain.cli.cards.progress import CLEAR_LINE, ProgressDisplay, choose_display
from fasttrain.launch.output.display import PlainDisplay, QuietDisplay

EVENT = {"step": 1200, "step_s": 0.0123, "samples_per_s": 3456.4, "memory_bytes": 1 << 30}
LINE = b"fasttrain: step 1,200, 12.3 ms/step, 3,456 samples/s, 1 GiB"


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


def test_compiling_is_shown_while_it_goes_on(screen: Screen) -> None:
    display = ProgressDisplay()
    display.progress({"compiling": "CharTransformer"})
    assert screen.last_line == b"fasttrain: compiling CharTransformer ..."
    display.progress({"compiling": ""})
    assert screen.last_line == b"", "there are no figures yet"
    display.progress(EVENT)
    display.progress({"compiling": "Head"})
    assert screen.last_line == b"fasttrain: compiling Head ..."
    display.progress({"compiling": ""})
    assert screen.last_line == LINE
    for garbled in ("\x1b[2J", 3, None):
        display.progress({"compiling": garbled})
    assert screen.last_line == LINE


def test_long_compiling_is_told_once_where_there_is_no_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s, told = [100.0], []
    monkeypatch.setattr("fasttrain.launch.output.display.time.monotonic", lambda: now_s[0])
    monkeypatch.setattr(PlainDisplay, "tell", lambda _, text: told.append(text))
    display = PlainDisplay()

    def compile_for(seconds: float, name: str) -> None:
        display.progress({"compiling": name})
        for _ in range(3):
            display.tick()
            now_s[0] += seconds / 2
        display.progress({"compiling": ""})
        display.tick()

    compile_for(4.0, "Quick")
    assert told == []
    compile_for(60.0, "CharTransformer")
    compile_for(60.0, "CharTransformer")
    assert told == ["compiling CharTransformer ..."]
    compile_for(60.0, "\x1b[2J")
    compile_for(60.0, "Head")
    assert told[1:] == ["compiling Head ..."]


def test_unknown_figures_are_left_out(screen: Screen) -> None:
    ProgressDisplay().progress({"step": 1, "step_s": 0, "samples_per_s": 0, "memory_bytes": 0})
    assert screen.last_line == b"fasttrain: step 1, 0 B"


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
    monkeypatch.setattr("fasttrain.cli.cards.progress._may_reach_the_terminal", lambda _: False)
    assert type(choose_display(quiet=quiet)) is kind


def test_no_line_where_a_pipe_may_end_on_the_terminal(tmp_path: Path) -> None:
    """As with ``| tee log``, which writes into the middle of the line."""
    pipe = os.pipe()
    sockets = socket.socketpair()
    with (tmp_path / "log").open("w") as file, Path(os.devnull).open("w") as null:
        others = [pipe[1], sockets[0].fileno()]
        ours = [file.fileno(), null.fileno()]
        told = [progress._may_reach_the_terminal(descriptor) for descriptor in (*others, *ours)]
    assert told == [True, True, False, False]
    for descriptor in (*pipe, *(end.detach() for end in sockets)):
        os.close(descriptor)
    assert not progress._may_reach_the_terminal(pipe[1]), "closed by the caller"
