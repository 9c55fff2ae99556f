"""A compilation that the training waits for is ended when it takes too long; nothing else is."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fasttrain.shim.compile_auto import auto as auto_module
from fasttrain.shim.compile_auto import foreground
from fasttrain.shim.compile_auto.auto import AutoCompile
from fasttrain.shim.compile_auto.foreground import TimeBox, TooLongError, no_room_on
from fasttrain.shim.compile_auto.peers import NoOthers, Ready
from fasttrain.shim.compile_auto.rule import Choice

LONG_S = 20.0


def busy(seconds: float) -> None:
    """Compute, as a compiler does."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


def test_one_that_takes_too_long_is_ended() -> None:
    box = TimeBox(0.2)
    began_s = time.monotonic()
    box.compiling("Net")
    with pytest.raises(TooLongError):
        busy(LONG_S)
    box.compiling("")
    assert box.over
    assert 0.15 < time.monotonic() - began_s < LONG_S / 2
    busy(0.1)  # nothing is raised any more


def test_one_that_is_done_in_time_is_left_alone() -> None:
    box = TimeBox(0.3)
    box.compiling("Net")
    busy(0.05)
    box.compiling("")
    busy(0.5)
    assert not box.over


def test_all_of_them_share_the_time() -> None:
    box = TimeBox(0.4)
    box.compiling("Net")
    busy(0.3)
    box.compiling("")
    assert box._left_s <= 0.1
    box.compiling("Net")
    with pytest.raises(TooLongError):
        busy(LONG_S)
    box.compiling("")
    box.compiling("Net")
    with pytest.raises(TooLongError):
        busy(LONG_S)
    box.compiling("")


def test_a_compiler_that_catches_the_exception_gets_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(foreground, "AGAIN_S", 0.1)
    box = TimeBox(0.0)
    box.compiling("Net")
    caught = 0
    for _ in range(3):
        try:
            busy(LONG_S)
        except TooLongError:
            caught += 1
    box.compiling("")
    assert caught == 3


def test_an_exception_that_is_late_reaches_nobody() -> None:
    box = TimeBox(LONG_S)
    box.compiling("Net")
    lock, tried = box._lock, list[int]()

    class Late:
        """It comes when the compilation has ended."""

        def __enter__(self) -> None:
            tried.append(1)
            if len(tried) == 1:
                foreground._raise_in(threading.get_ident(), TooLongError)
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            if lock.locked():
                lock.release()

    box._lock = Late()  # type: ignore[assignment]
    box.compiling("")
    assert len(tried) == 2
    assert box._done is None


def test_nothing_is_ended_once_the_box_is_gone() -> None:
    """Nor while other listeners hear that a compilation has ended."""
    heard: list[Any] = []
    listeners: list[Any] = [lambda name: heard.append((name, box._done is not None))]
    with ExitStack() as undo:
        box = TimeBox(0.3)
        box.install(listeners, undo)
        for name in ("Net", ""):
            for listen in listeners:
                listen(name)
        for listen in listeners:
            listen("Net")  # whose end nobody tells
    busy(0.6)
    assert heard == [("Net", True), ("", False), ("Net", True)]
    assert not box.over


def test_no_room_on_a_device_leaves_the_run_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    auto: Any = AutoCompile.__new__(AutoCompile)
    auto._others, stayed = NoOthers(), list[str]()
    for name, value in {"_on_cpu": False, "_count_parts": 1, "_devices": set()}.items():
        monkeypatch.setattr(AutoCompile, name, lambda _, value=value: value)
    monkeypatch.setattr(AutoCompile, "_stay", lambda _, why: stayed.append(why))
    monkeypatch.setattr(auto_module, "no_room_on", lambda _: "no memory")
    monkeypatch.setattr(AutoCompile, "_wait", _begins)
    assert list(auto._decide(0.01, Ready(("Net",), ""))) == []
    assert stayed == ["no memory"]


def _begins(*_: Any) -> Any:
    yield from ()
    return Choice("begin", "")


def test_an_exception_that_is_lost_is_not_printed(capfd: pytest.CaptureFixture[str]) -> None:
    class Lost:
        def __del__(self) -> None:
            raise TooLongError

    class Other:
        def __del__(self) -> None:
            raise ValueError("the script's")

    listeners: list[Any] = []
    before = sys.unraisablehook
    sys.unraisablehook = sys.__unraisablehook__
    try:
        with ExitStack() as undo:
            TimeBox(LONG_S).install(listeners, undo)
            assert len(listeners) == 1
            Lost()
            Other()
        assert sys.unraisablehook is sys.__unraisablehook__
    finally:
        sys.unraisablehook = before
    assert listeners == []
    said = capfd.readouterr().err
    assert "the script's" in said
    assert "TooLongError" not in said


@pytest.mark.parametrize(("free", "told"), [(20, ""), (5, "no memory to run compiled")])
def test_a_device_needs_room(monkeypatch: pytest.MonkeyPatch, free: int, told: str) -> None:
    module = SimpleNamespace(
        mem_get_info=lambda _: (free << 30, 141 << 30),
        memory_reserved=lambda _: 100 << 30,
        max_memory_allocated=lambda _: 90 << 30,
    )
    monkeypatch.setattr(foreground, "module_of", lambda _: module)
    assert told in no_room_on([torch.device("cuda", 0)])
    assert bool(told) == bool(no_room_on([torch.device("cuda", 0)]))


def test_a_device_that_does_not_say_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreground, "module_of", lambda _: SimpleNamespace())
    assert "isn't known" in no_room_on([torch.device("xpu", 0)])
    monkeypatch.undo()
    assert no_room_on([torch.device("cpu")]) == ""


@pytest.mark.parametrize(
    ("device", "strict", "tries"),
    [("cuda", False, True), ("cpu", False, True), ("xpu", False, False), ("cuda", True, False)],
)
def test_where_the_training_waits_for_what_nobody_has_shown_to_pay(
    monkeypatch: pytest.MonkeyPatch, device: str, strict: bool, tries: bool
) -> None:
    auto: Any = AutoCompile.__new__(AutoCompile)
    auto._shared = SimpleNamespace(plan=SimpleNamespace(strict=strict))
    monkeypatch.setattr(AutoCompile, "_devices", lambda _: {torch.device(device)})
    assert auto._tries() is tries
