"""Read the source of a program: facts for a plan, options, and habits for ``doctor``."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path

from fasttrain.model.plan import Evidence, ScriptFacts, Target
from fasttrain.source.habit_rules import Signs
from fasttrain.source.habits import Habits
from fasttrain.source.local_modules import Module, Place, Walk, true_path
from fasttrain.source.names import Names
from fasttrain.source.ranks import RankSigns

# Find the modules of a program, and decide which of them are the user's own.


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


# Read the source of a program: facts for a plan, options, and habits for ``doctor``.


NO_MODULE = "there is no such module"

# Bytes of source whose syntax trees are kept at the same time; each takes 25 to 50 bytes of memory.
KEPT_BYTES = 1_000_000

_OPTION = re.compile(r"(?<![\w-])--([A-Za-z][\w-]*)")
_PARSERS = {"argparse", "optparse", "getopt"}  # their options are written out in the source
_BY_NAME = {  # their options are the names of parameters, fields or keys
    *("absl", "cappa", "click", "cyclopts", "fire", "hydra", "jsonargparse", "omegaconf"),
    *("plac", "simple_parsing", "typer", "tyro", "HfArgumentParser", "LightningCLI"),
}
_BY_HAND = {"argv", "exec", "globals"}  # a loop over sys.argv, or a configurator that is executed


def read_script(
    target: Target,
    cwd: str,
    environ: Mapping[str, str],
    locate: Locate = importlib.util.find_spec,
) -> ScriptFacts:
    """Return the facts from the source of a script and of the user's modules that it imports.

    Nothing of it is imported or run. Files that can't be read raise nothing: the facts list them.

    Args:
        target: What is started; a command has no facts.
        cwd: Working directory.
        environ: The environment of the workers.
        locate: Finds an installed top-level module without importing it.
    """
    if target.kind == "command":
        return ScriptFacts()
    program = _Program(target, cwd, environ, locate)
    for _ in program.modules():
        pass
    return program.facts()


def find_local_rank(
    target: Target,
    cwd: str,
    environ: Mapping[str, str],
    locate: Locate = importlib.util.find_spec,
) -> Evidence | None:
    """Return where the program reads its local rank, by which scripts choose their device.

    The arguments are those of `read_script`.
    """
    if target.kind == "command":
        return None
    return _Program(target, cwd, environ, locate).local_rank()


def read_options(
    target: Target,
    cwd: str,
    environ: Mapping[str, str],
    locate: Locate = importlib.util.find_spec,
) -> Mapping[str, str] | None:
    """Return the options in the source, with their places; None if a module can't be read.

    The names have underscores. The arguments are those of `read_script`.
    """
    if target.kind == "command":
        return None
    program = _Program(target, cwd, environ, locate)
    options = _options_of(program.modules())
    return None if program.facts().unread else options


def read_program(
    target: Target,
    cwd: str,
    environ: Mapping[str, str],
    locate: Locate = importlib.util.find_spec,
) -> tuple[ScriptFacts, Habits]:
    """Return the facts as `read_script` does, and the habits of the same modules."""
    if target.kind == "command":
        return ScriptFacts(), Habits()
    program = _Program(target, cwd, environ, locate)
    modules = list(_kept(program.modules()))
    signs = Signs(program.names)  # only now: names may lead to modules that were found later
    for module in modules:
        signs.add(module)
    return program.facts(), signs.habits()


class _Program:
    """A program's modules, and the facts that are collected while they are walked."""

    def __init__(
        self, target: Target, cwd: str, environ: Mapping[str, str], locate: Locate
    ) -> None:
        finder = Finder(target, Path(cwd), environ, locate)
        self._target = target
        self._start = finder.start()
        self._walk = Walk(finder.along, Path(cwd))
        self.names = Names(self._walk.aliases, finder.in_roots)
        self._ranks = RankSigns(self.names)

    def modules(self) -> Iterator[Module]:
        for module in self._walk.modules(self._start):
            self.names.add(module)
            self._ranks.add(module)
            yield module

    def local_rank(self) -> Evidence | None:
        for _ in self.modules():
            pass
        return self._ranks.local_rank()

    def facts(self) -> ScriptFacts:
        if self._start:
            return ScriptFacts(self._ranks.strongest(), tuple(self._walk.unread))
        known = self._target.name.partition(".")[0] in sys.stdlib_module_names
        return ScriptFacts(unread=() if known else (f"{self._target.name}: {NO_MODULE}",))


def _kept(modules: Iterable[Module]) -> Iterator[Module]:
    """Yield the modules, without their syntax trees after the first `KEPT_BYTES` of source."""
    held_bytes = 0
    for module in modules:
        held_bytes += module.size_bytes
        yield module if held_bytes <= KEPT_BYTES else replace(module, tree=None, nodes=[])


def _options_of(modules: Iterable[Module]) -> dict[str, str]:
    """Return each name that may be an option, with underscores, and its ``file:line``.

    These are all ``--name`` in strings, which finds those of argparse, click and usage texts. If
    the program's parser takes options from names in the code, or if the program reads ``sys.argv``
    without a parser, all names that the program binds count, too.
    """
    written: dict[str, str] = {}
    bound: dict[str, str] = {}
    mentioned: set[str] = set()
    for module in modules:
        for node in ast.walk(module.tree) if module.tree else ():
            where = f"{module.path}:{getattr(node, 'lineno', 1)}"
            mentioned.update(_mentions(node))
            for name in _bound(node):
                bound.setdefault(name, where)
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                for name in _OPTION.findall(node.value):
                    written.setdefault(name.replace("-", "_"), where)
    by_hand = mentioned & _BY_HAND and not mentioned & _PARSERS
    return bound | written if by_hand or mentioned & _BY_NAME else written


def _mentions(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Import(names):
            yield from (alias.name.partition(".")[0] for alias in names)
        case ast.ImportFrom(module, names):
            yield (module or "").partition(".")[0]
            yield from (alias.name for alias in names)
        case ast.Name(name) | ast.Attribute(attr=name):
            yield name


def _bound(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Name(name, ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
            yield name
        case ast.arg(arg=name) | ast.keyword(arg=str(name)):
            yield name
        case ast.Dict(keys):
            for key in keys:
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    yield key.value
        case ast.Call(args=[ast.Constant(str(name)), *_]):  # absl: DEFINE_string("device", ...)
            yield name
