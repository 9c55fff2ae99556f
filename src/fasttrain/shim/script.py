"""Runs the user's program as ``python SCRIPT`` or ``python -m MODULE`` would.

Unlike with `runpy.run_path`, ``__main__`` stays in `sys.modules` for atexit handlers and pickles.

Source: CPython 3.11 ``Modules/main.c``, for the state of ``__main__``, ``sys.argv`` and
``sys.path``.
"""

from __future__ import annotations

import faulthandler
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.machinery import SourceFileLoader
from itertools import islice
from pathlib import Path
from types import CodeType, ModuleType, TracebackType

from fasttrain.files import give_back, open_log, out_of_the_way, reserve, write_private
from fasttrain.model.codec import dumps
from fasttrain.model.crash import (
    MESSAGE_LENGTH,
    Failure,
    Frame,
    Raised,
    failure_file,
    stack_file,
)
from fasttrain.model.secrets import hide, secret_values
from fasttrain.shim.process import refusal
from fasttrain.shim.process.callsite import is_shim_code

# Records for the launcher what ended a worker: its exception, or its stack at a fatal signal.


NOT_RECORDED = "fasttrain: how the script failed is not recorded"

OUTER_FRAMES, INNER_FRAMES = 10, 40  # a RecursionError has a thousand
MOST_RAISED = 50  # a group may hold any number of exceptions


def recorder(run_dir: str, rank: int) -> Callable[[BaseException], None]:
    """Return a function that records the exception that ends this process.

    Does nothing in a process that was forked from this one.
    """
    pid, path = os.getpid(), Path(run_dir, failure_file(rank))
    _reserve(path)

    def record(error: BaseException) -> None:
        now_ns = (time.time_ns(), time.monotonic_ns())
        if os.getpid() != pid:
            return
        try:
            chain = tuple(islice(_chain(error), MOST_RAISED))
            failure = Failure(rank, pid, *now_ns, _exit_code(error), chain, _cwd())
            write_private(path, dumps(failure))
        except Exception as problem:  # noqa: BLE001 - the script's own error must be reported, not ours
            print(f"{NOT_RECORDED}: {problem}", file=sys.stderr)  # noqa: T201

    return record


def _reserve(path: Path) -> None:
    """Reserve disk space for the record: the failure may be a checkpoint that fills the disk."""
    try:
        reserve(path)
    except OSError as error:  # the disk is full already, and the launcher has warned of it
        print(f"fasttrain: no disk space reserved to record a failure: {error}", file=sys.stderr)  # noqa: T201
        return
    pid = os.getpid()
    refusal.at_clean_end.append(lambda: give_back(path) if os.getpid() == pid else None)


def watch_faults(run_dir: str, rank: int) -> None:
    """Have Python write its stacks into the run directory when SIGSEGV or the like ends it.

    With -X faulthandler or PYTHONFAULTHANDLER they go to stderr instead, as the user asked. A
    script that enables faulthandler itself gets them too. The only change that a script can see is
    `faulthandler.is_enabled()`.
    """
    if faulthandler.is_enabled():
        return
    path = os.path.join(run_dir, stack_file(rank))  # noqa: PTH118
    try:
        opened = open_log(path)
    except OSError as error:  # a full disk must not stop a script that writes nothing
        print(f"fasttrain: no stack is recorded at a fatal signal: {error}", file=sys.stderr)  # noqa: T201
        return
    faulthandler.enable(out_of_the_way(opened))


def _chain(error: BaseException) -> Iterator[Raised]:
    """Yield the exception and those that led to it, as in a traceback; secrets are masked."""
    values, home = secret_values(os.environ, sys.argv[1:]), _home()
    for one, handled in _linked(error, set()):
        yield replace(_raised(one, values, home), handled=handled)


def _linked(error: BaseException, seen: set[int]) -> Iterator[tuple[BaseException, bool]]:
    """Yield an exception and those before it, each with whether it was only being handled.

    Follows Python's traceback: ``__cause__``, else ``__context__`` unless that is suppressed.
    """
    now, handled = error, False
    while id(now) not in seen:
        seen.add(id(now))
        yield now, handled
        if isinstance(now, BaseExceptionGroup):
            for part in now.exceptions:
                yield from _linked(part, seen)
        handled = now.__cause__ is None
        earlier = now.__context__ if handled and not now.__suppress_context__ else now.__cause__
        if earlier is None:
            return
        now = earlier


def _home() -> str:
    """Return the prefix of the paths of the user's program: its file, or its top package.

    An installed program that is started by -m lies in site-packages, among other packages.
    """
    main = sys.modules.get("__main__")  # a script may remove it, or what is in it
    file = str(getattr(main, "__file__", None) or "?")
    top = str(getattr(main, "__package__", None) or "").partition(".")[0]
    folder = next((one for one in Path(file).parents if one.name == top), None)
    return file if folder is None else f"{folder}{os.sep}"


def _cwd() -> str:
    try:
        return os.getcwd()  # noqa: PTH109
    except OSError:  # it was removed
        return ""


def _raised(error: BaseException, values: tuple[str, ...], home: str) -> Raised:
    text = traceback.TracebackException(
        type(error), error, without_shim(error.__traceback__), compact=True
    )
    stack = list(text.stack)
    if len(stack) > OUTER_FRAMES + INNER_FRAMES:
        stack = stack[:OUTER_FRAMES] + stack[-INNER_FRAMES:]
    return Raised(
        kinds=tuple(f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__[:-2]),
        message=hide(_message(error), values)[:MESSAGE_LENGTH],
        frames=tuple(
            replace(_frame(frame, values), of_target=frame.filename.startswith(home))
            for frame in stack
        ),
        errno=getattr(error, "errno", None) or 0 if isinstance(error, OSError) else 0,
        subject=hide(_subject(error), values),
    )


def _frame(frame: traceback.FrameSummary, values: tuple[str, ...]) -> Frame:
    line = hide(frame.line or "", values)
    return Frame(frame.filename, frame.lineno or 0, frame.name, line)


def _exit_code(error: BaseException) -> int:
    """Return the exit code with which Python ends at this exception; negative for a signal.

    Source: CPython 3.11, Python/pythonrun.c, _Py_HandleSystemExit; Modules/main.c, exit_sigint.
    """
    if isinstance(error, KeyboardInterrupt):
        return -signal.SIGINT
    if not isinstance(error, SystemExit):
        return 1
    code = error.code
    if not isinstance(code, int):
        return int(code is not None)
    return code & 0xFF if -(1 << 63) <= code < 1 << 63 else 0xFF  # -1 where it is no C long


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - its __str__ is the script's own
        return "<exception str() failed>"  # as Python's traceback has it


def _subject(error: BaseException) -> str:
    if isinstance(error, OSError):
        return os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else ""
    if isinstance(error, ImportError):
        return error.name or ""
    return ""


# Runs the user's program as ``python SCRIPT`` or ``python -m MODULE`` would.


def run_target(
    kind: str,
    name: str,
    args: list[str],
    ended_well: Callable[[], None] = lambda: None,
    failed: Callable[[BaseException], None] = lambda _: None,
) -> None:
    """Run a script or a module as ``__main__``.

    Its exceptions pass through, and are printed without frames of fasttrain's.

    Args:
        kind: ``script`` or ``module``.
        name: The script's path, or the module's name.
        args: Its arguments.
        ended_well: Called when it has ended without an error.
        failed: Called with the exception that ends it, before anything is printed.
    """
    run = {"script": _run_script, "module": _run_module}[kind]
    _as_the_script(lambda: run(name, args), ended_well, failed)


def _as_the_script(
    run: Callable[[], None],
    ended_well: Callable[[], None],
    failed: Callable[[BaseException], None],
) -> None:
    try:
        run()
        ended_well()
    except SystemExit as end:
        # Not by ==, which is the script's own function where `main` returns an array, say.
        if _exit_code(end):
            failed(end)
        else:
            ended_well()
        raise
    except BaseException as error:
        failed(error)
        # The interpreter prints the exception, sets the exit status and, after a
        # KeyboardInterrupt, dies of SIGINT. Only our frames are removed from what it prints.
        sys.excepthook = _without_shim_frames(sys.excepthook)
        raise


def _without_shim_frames(hook: Callable[..., object]) -> Callable[..., object]:
    def excepthook(
        kind: type[BaseException], value: BaseException, trace: TracebackType | None
    ) -> object:
        seen: set[int] = set()
        _strip(value, seen)
        sys.last_traceback = value.__traceback__ if seen else trace
        return hook(kind, value, value.__traceback__)

    return excepthook


def _strip(error: BaseException | None, seen: set[int]) -> None:
    """Remove the shim's frames from an exception and from those chained to it."""
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        error.__traceback__ = without_shim(error.__traceback__)
        if isinstance(error, BaseExceptionGroup):
            for part in error.exceptions:
                _strip(part, seen)
        _strip(error.__cause__, seen)
        error = error.__context__


def without_shim(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the shim's frames."""
    entries: list[TracebackType] = []
    while trace is not None:
        if not is_shim_code(trace.tb_frame.f_code):
            entries.append(trace)
        else:
            # Frames of `import` that led to the hook on torch. Python hides those that lead
            # straight to a module, but not these.
            while entries and _is_import_code(entries[-1].tb_frame.f_code):
                entries.pop()
        trace = trace.tb_next
    result = None
    for entry in reversed(entries):
        result = TracebackType(result, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return result


def _is_import_code(code: CodeType) -> bool:
    return code.co_filename.startswith("<frozen importlib")


def _fresh_main() -> ModuleType:
    """Put a new ``__main__`` in `sys.modules`, with the attributes that Python sets at start."""
    module = ModuleType("__main__")
    module.__annotations__ = {}
    module.__builtins__ = sys.modules["builtins"]  # type: ignore[attr-defined]
    sys.modules["__main__"] = module
    return module


def _run_script(name: str, args: list[str]) -> None:
    # Joined but not normalized, as Python does it: `../train.py` stays visible in tracebacks.
    path = os.path.join(os.getcwd(), name)  # noqa: PTH109, PTH118
    sys.argv = [name, *args]
    if not sys.flags.safe_path:
        # Python follows a symbolic link to the script: it imports from the target's folder.
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))  # noqa: PTH120
    module = _fresh_main()
    module.__loader__ = SourceFileLoader("__main__", path)
    module.__file__ = path
    module.__cached__ = None  # type: ignore[attr-defined]
    code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
    exec(code, module.__dict__)  # noqa: S102


def _run_module(name: str, args: list[str]) -> None:
    sys.argv = ["-m", *args]
    if not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
    _fresh_main()
    # The very function that the interpreter calls for -m, with its messages and its frames.
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]
