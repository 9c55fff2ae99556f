"""Calls a function once a named module has been imported; changes no other module."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


class _Finder(MetaPathFinder):
    """Finds one module as Python would, and calls a function after its execution."""

    def __init__(self, name: str, callback: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._callback = callback
        self._searching = False

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """Return the module's own spec, whose loader calls the function after ``exec_module``."""
        if fullname != self._name or self._searching:
            return None
        self._searching = True
        try:
            spec = find_spec(fullname)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            self._follow(spec.loader)
        return spec

    def _follow(self, loader: Loader) -> None:
        original = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            original(module)
            # Not earlier: the script may try a failed import again.
            with contextlib.suppress(ValueError):
                sys.meta_path.remove(self)
            del loader.exec_module
            self._callback(module)

        # On the instance: the loader keeps its type, and is unchanged after the import.
        loader.exec_module = exec_module  # type: ignore[method-assign]


def after_import(name: str, callback: Callable[[ModuleType], None]) -> Callable[[], None]:
    """Call ``callback`` with a module right after its first successful import.

    A module that is imported already is passed on at once.

    Returns:
        A function that removes the hook.
    """
    if name in sys.modules:
        callback(sys.modules[name])
        return lambda: None
    finder = _Finder(name, callback)
    sys.meta_path.insert(0, finder)

    def forget() -> None:
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(finder)

    return forget


def after_torch(callback: Callable[[], None]) -> None:
    """Call ``callback`` right after the first successful import of torch."""
    sys.meta_path.insert(0, _Finder("torch", lambda _: callback()))
