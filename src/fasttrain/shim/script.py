"""Runs the user's program as ``python SCRIPT`` or ``python -m MODULE`` would.

Unlike with `runpy.run_path`, ``__main__`` stays in `sys.modules` for atexit handlers and pickles.

Source: CPython 3.11 ``Modules/main.c``, for the state of ``__main__``, ``sys.argv`` and
``sys.path``.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType

from fasttrain.shim.process.callsite import is_shim_code


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
        if end.code in (None, 0):
            ended_well()
        else:
            failed(end)
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
