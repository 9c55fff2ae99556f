"""Runs the user's program as ``python SCRIPT`` or ``python -m MODULE`` would.

Source: CPython 3.11 ``Modules/main.c`` and ``Lib/runpy.py``, for the state of ``__main__``,
``sys.argv`` and ``sys.path``; unlike `runpy.run_path`, ``__main__`` stays in `sys.modules`, for
atexit handlers and pickles that look into it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import NoReturn

from fasttrain.shim.callsite import is_shim_code


def run_target(kind: str, name: str, args: list[str]) -> None:
    """Run a script or a module as ``__main__``; its exceptions come through, told as its own."""
    prepare = {"script": _prepare_script, "module": _prepare_module}[kind]
    _as_the_script(lambda: exec(prepare(name, args), sys.modules["__main__"].__dict__))  # noqa: S102


def _as_the_script(run: Callable[[], None]) -> None:
    try:
        run()
    except SystemExit:
        raise
    except BaseException:
        # The interpreter itself reports the exception, sets the exit status and, after a
        # KeyboardInterrupt, dies of SIGINT; only our frames are taken out of what it prints.
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
    """Take the shim's frames out of an exception and of those chained to it."""
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        error.__traceback__ = without_shim(error.__traceback__)
        if isinstance(error, BaseExceptionGroup):
            for part in error.exceptions:
                _strip(part, seen)
        _strip(error.__cause__, seen)
        error = error.__context__


def without_shim(trace: TracebackType | None) -> TracebackType | None:
    """Give a traceback without the frames of fasttrain's shim."""
    entries = []
    while trace is not None:
        if not is_shim_code(trace.tb_frame.f_code):
            entries.append(trace)
        trace = trace.tb_next
    result = None
    for entry in reversed(entries):
        result = TracebackType(result, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return result


def _main_module(path: str, spec: ModuleSpec | None) -> ModuleType:
    module = ModuleType("__main__")
    module.__file__ = path
    module.__builtins__ = sys.modules["builtins"]  # type: ignore[attr-defined]
    module.__spec__ = spec
    module.__cached__ = spec.cached if spec else None  # type: ignore[attr-defined]
    module.__loader__ = spec.loader if spec else SourceFileLoader("__main__", path)
    module.__package__ = spec.parent if spec else None
    sys.modules["__main__"] = module
    return module


def _prepare_script(name: str, args: list[str]) -> CodeType:
    path = os.path.abspath(name)  # noqa: PTH100
    sys.argv = [name, *args]
    if not sys.flags.safe_path:
        # Python resolves the link of the script, so that its neighbours are those of its target.
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))  # noqa: PTH120
    _main_module(path, None)
    return compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)


def _prepare_module(name: str, args: list[str]) -> CodeType:
    sys.argv = ["-m", *args]
    if not sys.flags.safe_path:
        sys.path.insert(0, str(Path.cwd()))
    spec, code = _find_module(name)
    _main_module(spec.origin or "", spec)
    sys.argv[0] = spec.origin or ""
    return code


def _find_module(name: str) -> tuple[ModuleSpec, CodeType]:
    try:
        spec = find_spec(name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        _refuse(f"Error while finding module specification for {name!r} ({_described(error)})")
    if spec is None:
        _refuse(f"No module named {name}")
    if spec.submodule_search_locations is not None:
        if name.endswith("__main__"):
            _refuse("Cannot use package as __main__ module")
        return _find_package_main(name)
    code = spec.loader.get_code(name) if hasattr(spec.loader, "get_code") else None  # type: ignore[union-attr]
    if code is None:
        _refuse(f"No code object available for {name}")
    return spec, code


def _find_package_main(name: str) -> tuple[ModuleSpec, CodeType]:
    main = f"{name}.__main__"
    if find_spec(main) is None:
        _refuse(
            f"No module named {main}; {name!r} is a package and cannot be directly executed"
        )
    return _find_module(main)


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _refuse(text: str) -> NoReturn:
    """Say it as ``python -m`` says it, and leave with its exit status."""
    sys.exit(f"{sys.executable}: {text}")
