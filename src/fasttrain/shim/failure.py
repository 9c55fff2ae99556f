"""Records what ends a worker, for the launcher to tell: its exception, or its stack at a signal."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from fasttrain.shim.script import without_shim
from fasttrain.spec.codec import dumps
from fasttrain.spec.crash import (
    MESSAGE_LENGTH,
    Failure,
    Frame,
    Raised,
    failure_file,
    stack_file,
)
from fasttrain.spec.secrets import hide, secret_values

OUTER_FRAMES, INNER_FRAMES = 10, 40  # a RecursionError has a thousand
HIGH_DESCRIPTOR = 200  # below the 256 that macOS allows by default; the script's begin at 3


def recorder(run_dir: str, rank: int) -> Callable[[BaseException], None]:
    """Give what records the exception that ends this process, but not one of its forks."""
    pid = os.getpid()

    def record(error: BaseException) -> None:
        time_ns = time.time_ns()
        if os.getpid() != pid:
            return
        try:
            failure = Failure(rank, pid, time_ns, _exit_code(error), tuple(_chain(error)))
            _write(Path(run_dir, failure_file(rank)), dumps(failure))
        except Exception as problem:  # noqa: BLE001 - the script's own error is what must be told
            print(f"fasttrain: how the script failed is not recorded: {problem}", file=sys.stderr)  # noqa: T201

    return record


def watch_faults(run_dir: str, rank: int) -> None:
    """Have Python write its stacks into the run directory when SIGSEGV and its kin end it.

    Where they are to go to stderr already, by -X faulthandler or PYTHONFAULTHANDLER, they do; and
    a script that enables faulthandler itself takes them over. Nothing that is visible to the
    script changes but `faulthandler.is_enabled()`.
    """
    if faulthandler.is_enabled():
        return
    path = os.path.join(run_dir, stack_file(rank))  # noqa: PTH118
    try:
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:  # a full disk must not stop a script that writes nothing
        print(f"fasttrain: a fatal signal would leave no stack: {error}", file=sys.stderr)  # noqa: T201
        return
    faulthandler.enable(_out_of_the_way(opened))


def _out_of_the_way(descriptor: int) -> int:
    """Give a duplicate with a high number, so that the script's files get the numbers they had."""
    import fcntl

    try:
        high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, HIGH_DESCRIPTOR)
    except OSError:  # the limit of open files lies lower; the low number works as well
        return descriptor
    os.close(descriptor)
    return high


def _chain(error: BaseException) -> Iterator[Raised]:
    """Give the exception and those that led to it, as a traceback would show them."""
    values = secret_values(os.environ, sys.argv[1:])
    seen: set[int] = set()
    now: BaseException | None = error
    while now is not None and id(now) not in seen:
        seen.add(id(now))
        yield _raised(now, values)
        now = now.__cause__ or (None if now.__suppress_context__ else now.__context__)


def _raised(error: BaseException, values: tuple[str, ...]) -> Raised:
    told = traceback.TracebackException(
        type(error), error, without_shim(error.__traceback__), compact=True
    )
    stack = list(told.stack)
    if len(stack) > OUTER_FRAMES + INNER_FRAMES:
        stack = stack[:OUTER_FRAMES] + stack[-INNER_FRAMES:]
    return Raised(
        kinds=tuple(f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__[:-2]),
        message=hide(_message(error), values)[:MESSAGE_LENGTH],
        frames=tuple(
            Frame(frame.filename, frame.lineno or 0, frame.name, hide(frame.line or "", values))
            for frame in stack
        ),
        errno=getattr(error, "errno", None) or 0 if isinstance(error, OSError) else 0,
        subject=hide(_subject(error), values),
    )


def _exit_code(error: BaseException) -> int:
    """Give what Python ends with at this exception.

    Source: CPython 3.11, Python/pythonrun.c, _Py_HandleSystemExit; Modules/main.c, exit_sigint.
    """
    if isinstance(error, KeyboardInterrupt):
        return -signal.SIGINT
    if not isinstance(error, SystemExit):
        return 1
    code = error.code
    return code & 0xFF if isinstance(code, int) else int(code is not None)


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - its class may be as broken as its script
        return "<exception str() failed>"  # as Python says it


def _subject(error: BaseException) -> str:
    if isinstance(error, OSError):
        return os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else ""
    if isinstance(error, ImportError):
        return error.name or ""
    return ""


def _write(path: Path, text: str) -> None:
    draft = path.with_suffix(".tmp")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as file:
        file.write(text)
    draft.replace(path)
