"""Calls back once torch has been imported by the script; touches no other module."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


class _TorchFinder(MetaPathFinder):
    """Finds ``torch`` as Python would, and runs a callback behind its execution."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._searching = False

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """Give torch's own spec, its loader's ``exec_module`` followed by the callback."""
        if fullname != "torch" or self._searching:
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
            # Only now, so that a failed import of torch can be tried again by the script.
            sys.meta_path.remove(self)
            del loader.exec_module
            self._callback()

        # On the instance: torch.__loader__ keeps its type, and is as it was once torch is in.
        loader.exec_module = exec_module  # type: ignore[method-assign]


def after_torch(callback: Callable[[], None]) -> None:
    """Call ``callback`` right after the first successful import of torch."""
    sys.meta_path.insert(0, _TorchFinder(callback))
