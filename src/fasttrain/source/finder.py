"""Find the modules of a program, and decide which of them are the user's own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path

from fasttrain.model.plan import Target
from fasttrain.source.local_modules import Place, true_path

_FASTTRAIN = str(Path(__file__).resolve().parents[1])
_INSTALLED = {"site-packages", "dist-packages"}

Locate = Callable[[str], ModuleSpec | None]


class Finder:
    """Finds the user's own modules by name, in the order of the import system.

    A module is the user's own if it is in a folder that is searched before the installed packages,
    is an editable install from inside the working directory, or belongs to the package that ``-m``
    names.
    """

    def __init__(
        self, target: Target, cwd: Path, environ: Mapping[str, str], locate: Locate
    ) -> None:
        self.in_roots: set[str] = set()  # top-level names
        self._target = target
        self._roots = _roots(target, cwd, environ)
        self._cwd = cwd
        self._locate = locate
        self._adopted = target.name.partition(".")[0] if target.kind == "module" else ""
        self._known: dict[str, Place | None] = {}

    def start(self) -> list[tuple[str, Place]]:
        """Return the module that is run, followed by the packages that are imported for it."""
        target = self._target
        if target.kind == "script":
            return [("__main__", Place(self._cwd / target.name))]
        way = dict(self.along(target.name))
        if (place := way.get(target.name)) and place.folders:
            way |= self.along(f"{target.name}.__main__")
        name = f"{target.name}.__main__" if place and place.folders else target.name
        return [(name, way.pop(name)), *way.items()] if name in way else []

    def along(self, name: str) -> Iterator[tuple[str, Place]]:
        """Yield a module's parent packages and the module, as long as they are the user's own."""
        full, folders = "", self._roots
        for part in name.split("."):
            outer, full = full, f"{full}.{part}" if full else part
            if full not in self._known:
                self._known[full] = _look(part, folders) if outer else self._top(part)
            place = self._known[full]
            if place is None:
                return
            yield full, place
            folders = place.folders

    def _top(self, name: str) -> Place | None:
        found = _look(name, self._roots)
        if found is None or found.file is None:
            # An installed package takes precedence over a folder without __init__.py.
            spec = self._spec(name)
            if spec is not None and (found is None or spec.origin):
                return self._installed(name, spec)
        if found is None or _is_fasttrain(found):
            return None
        self.in_roots.add(name)
        return found

    def _installed(self, name: str, spec: ModuleSpec) -> Place | None:
        folders = tuple(map(Path, spec.submodule_search_locations or ()))
        file = Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None
        place = Place(file, folders)
        paths = [*folders, *([file] if file else ())]
        own = name == self._adopted or all(
            path.is_relative_to(self._cwd) and not _is_third_party(path) for path in paths
        )
        return place if own and not _is_fasttrain(place) else None

    def _spec(self, name: str) -> ModuleSpec | None:
        if name in sys.stdlib_module_names:
            return None
        try:
            return self._locate(name)
        except Exception:  # noqa: BLE001 - editable packages bring finders that can raise anything
            return None


def _roots(target: Target, cwd: Path, environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Return the folders of the program's ``sys.path`` before the installed packages."""
    entries = environ.get("PYTHONPATH", "")
    named = [cwd / entry for entry in entries.split(os.pathsep)] if entries else []
    roots = [root for root in named if not _is_third_party(root)]
    if not environ.get("PYTHONSAFEPATH"):
        # Python resolves a script that is a link: sys.path[0] is the folder of the link's target.
        script = Path(true_path(cwd / target.name))
        first = script.parent if target.kind == "script" else cwd
        roots[:0] = [first] if first.name not in _INSTALLED else []
    standard = true_path(Path(os.__file__).parent)
    return tuple(root for root in dict.fromkeys(roots) if true_path(root) != standard)


def _is_third_party(path: Path) -> bool:
    """Return True if a path is inside the installed packages."""
    resolved = Path(true_path(path))
    return not _INSTALLED.isdisjoint((*path.parts, *resolved.parts))


def _is_fasttrain(place: Place) -> bool:
    return any(true_path(folder) == _FASTTRAIN for folder in place.folders)


def _look(name: str, folders: Iterable[Path]) -> Place | None:
    """Return the module of this name in the first folder that has it; None if there is none.

    As in the import system, a folder without ``__init__.py`` is a portion of a namespace package,
    which counts only if no folder has a package or a file of this name.
    """
    portions = []
    for folder in folders:
        package = folder / name
        if _is(Path.is_file, package / "__init__.py"):
            return Place(package / "__init__.py", (package,))
        if _is(Path.is_file, folder / f"{name}.py"):
            return Place(folder / f"{name}.py")
        if _is(Path.is_dir, package):
            portions.append(package)
    return Place(None, tuple(portions)) if portions else None


def _is(kind: Callable[[Path], bool], path: Path) -> bool:
    try:
        return kind(path)
    except OSError:  # a folder that may not be read, a name too long
        return False
