"""Returns rank 0's time on all ranks where the script itself reads a clock.

A script that logs every ten seconds, stops after an hour or names its run by the date must decide
the same on all ranks. Libraries, other threads and fasttrain itself read the real clock.
"""

from __future__ import annotations

import datetime as dt
import functools
import sys
import time
import timeit
from collections.abc import Callable
from contextlib import ExitStack
from threading import get_ident
from types import FrameType
from typing import Any

from fasttrain.shim.data_parallel.answers.answers import Answers
from fasttrain.shim.data_parallel.answers.channels import FLOAT, INT
from fasttrain.shim.data_parallel.answers.places import MOST, is_users
from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.dynamo import pass_over

_CLOCKS = (
    "time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns",
    "process_time", "process_time_ns", "thread_time", "thread_time_ns",
)  # fmt: skip
# Functions that read the clock if they get no time; how many arguments precede the time.
_BY_TIME = {"localtime": 0, "gmtime": 0, "ctime": 0, "strftime": 1, "asctime": 0}
_OF_FIELDS = ("strftime", "asctime")  # these take a struct_time, not seconds


class Clocks:
    """Replaces the clocks in `time` and `datetime`.

    Args:
        answers: Rank 0's answers.
    """

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._real = {name: getattr(time, name) for name in (*_CLOCKS, *_BY_TIME)}

    def install(self, undo: ExitStack) -> None:
        """Replace the clocks, also where the user's modules have imported them by name."""
        replaced: dict[int, Any] = {}
        for name, original in self._real.items():
            new = self._of_now(name) if name in _BY_TIME else self._clock(name, original)
            patching.put(time, name, new, undo)
            replaced[id(original)] = new
        if (timer := replaced.get(id(timeit.default_timer))) is not None:
            patching.put(timeit, "default_timer", timer, undo)
        replace_in_users_modules(replaced, undo)
        self._dates(undo)

    def _clock(self, name: str, original: Callable[[], float]) -> Callable[[], float]:
        """Return a replacement for a clock: a closure, because it is called often."""
        answers, kind = self._answers, FLOAT if type(original()) is float else INT
        thread, first, frame_of = answers.thread, answers.rank == 0, sys._getframe
        tags: dict[tuple[int, int], int] = {}
        kept: list[Any] = []  # code objects, kept alive so that their ids aren't reused

        def tag_of(frame: FrameType) -> int:
            if len(tags) >= MOST:
                tags.clear()
                kept.clear()
            code, tag = frame.f_code, 0
            if is_users(code.co_filename):
                tag = answers.places.number(frame, f"read time.{name}") << 32 | kind
            kept.append(code)
            tags[id(code), frame.f_lasti] = tag
            return tag

        def read() -> float:
            if not answers.live or get_ident() != thread:
                return original()
            frame = frame_of(1)
            tag = tags.get((id(frame.f_code), frame.f_lasti))
            if tag is None:
                tag = tag_of(frame)
            if not tag:
                return original()
            number = answers.next_number(tag >> 32)
            if not first:
                return answers.take(number, tag)  # type: ignore[no-any-return]
            now = original()
            answers.channel.give(number, tag, now)
            return now

        return _like(original, read)  # type: ignore[no-any-return]

    def _of_now(self, name: str) -> Any:
        """Return a replacement that uses rank 0's time if it is called without one."""
        original, leading, local = self._real[name], _BY_TIME[name], self._real["localtime"]
        ask = self._asking(f"call time.{name}")

        def of(*args: Any) -> Any:
            late = len(args) <= leading or (leading == 0 and args == (None,))
            now = ask(sys._getframe(1)) if late and len(args) >= leading else None
            if now is None:
                return original(*args)
            return original(*args[:leading], local(now) if name in _OF_FIELDS else now)

        return _like(original, of)

    def _asking(self, doing: str) -> Callable[[FrameType], Any]:
        """Return a function that returns rank 0's time for a frame of user code, else None."""
        answers, clock = self._answers, self._real["time"]

        def ask(frame: FrameType) -> float | None:
            if not answers.answers() or not is_users(frame.f_code.co_filename):
                return None
            return answers.ask(  # type: ignore[no-any-return]
                answers.places.number(frame, doing), clock
            )

        return ask

    def _dates(self, undo: ExitStack) -> None:
        """Replace datetime's now() and utcnow(); today() calls `time.time`, replaced already."""
        kind = dt.datetime
        original_now, original_utcnow = vars(kind)["now"], vars(kind)["utcnow"]
        ask = self._asking("read datetime.now")
        utc = dt.UTC

        def now(cls: Any, tz: Any = None) -> Any:
            seconds = ask(sys._getframe(1))
            if seconds is None:
                return original_now.__get__(None, cls)(tz)
            return cls.fromtimestamp(seconds, tz)

        def utcnow(cls: Any) -> Any:
            seconds = ask(sys._getframe(1))
            if seconds is None:
                return original_utcnow.__get__(None, cls)()
            return cls.fromtimestamp(seconds, utc).replace(tzinfo=None)

        for name, new in (("now", now), ("utcnow", utcnow)):
            _out_of_graphs(new)
            patching.put(kind, name, classmethod(new), undo)


def _like(original: Any, new: Any) -> Any:
    _out_of_graphs(new)
    return functools.wraps(original)(new)


def _out_of_graphs(function: Any) -> None:
    """Have torch.compile break its graph at a replacement, as it does at the clock itself."""
    pass_over(function, all_it_calls=True)
    function._torchdynamo_disable = True


def replace_in_users_modules(replaced: dict[int, Any], undo: ExitStack) -> None:
    """Replace names that the user's modules have imported before torch came in.

    Args:
        replaced: The replacement of each object, by the object's id.
        undo: Restores the originals.
    """
    for name, module in list(sys.modules.items()):
        if name != "__main__" and not is_users(getattr(module, "__file__", None) or "<none>"):
            continue
        held = vars(module)
        for key, value in list(held.items()):
            new = replaced.get(id(value))
            if new is not None and new is not value:
                undo.callback(_put_back, held, key, new, value)
                held[key] = new


def _put_back(held: dict[str, Any], key: str, new: Any, value: Any) -> None:
    if held.get(key) is new:
        held[key] = value
