"""Walk the user's own files of a program, by following its imports."""

from __future__ import annotations

import ast
import os
import tokenize
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

MAX_FILES = 500
MAX_BYTES = 2_000_000

_KEPT = {
    *(ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign),
    *(ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef),
    *(ast.Call, ast.Subscript, ast.Compare),
}
_LEAVES = {ast.Name, ast.Constant, ast.Load, ast.Store, ast.Del, str, int, type(None)}
# Raised by the parser and the codecs: unknown encodings, NUL bytes, nesting without end.
_UNREADABLE = (OSError, SyntaxError, ValueError, LookupError, RecursionError, MemoryError)

Along = Callable[[str], Iterable[tuple[str, "Place"]]]


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a module.

    Attributes:
        file: Its source; None for a namespace package.
        folders: Folders of its submodules; empty unless it is a package.
    """

    file: Path | None
    folders: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class Module:
    """One file of the user's own.

    Attributes:
        name: Full name by which it is imported, or ``__main__`` for a script.
        package: The package to which its imports are relative.
        path: Its path, as the user can open it from the working directory.
        nodes: The statements and expressions that may run and that the rules look at, by line.
        tree: Its syntax tree; None once it was freed to save memory, together with `nodes`.
        file: Its source; `size_bytes` is the length.
        main: Whether it is run as ``__main__``.
    """

    name: str
    package: str
    path: str
    nodes: list[ast.stmt | ast.expr]
    tree: ast.Module | None
    file: Path
    size_bytes: int
    main: bool

    def parsed(self) -> Module:
        """Return the module with its syntax tree, parsed again if it was freed."""
        if self.tree is not None:
            return self
        tree = parse(self.file)
        return replace(self, tree=tree, nodes=live_nodes(tree, main=self.main))


class Walk:
    """The files of a program, breadth first, each once.

    Attributes:
        aliases: For each full name by which a module was reached, the name of its `Module`.
        unread: Files that were not read, with the reason.
    """

    def __init__(self, along: Along, cwd: Path) -> None:
        """Prepare a walk.

        Args:
            along: Returns the user's own modules on the way to a full name, outermost first.
            cwd: Working directory.
        """
        self.aliases: dict[str, str] = {}
        self.unread: list[str] = []
        self._along = along
        self._cwd = cwd

    def modules(self, start: Iterable[tuple[str, Place]]) -> Iterator[Module]:
        """Yield some modules, of which the first is run as ``__main__``, and all that they import.

        Each is yielded before the next is read, so that the caller may hold one tree at a time.
        """
        queue = deque(start)
        queued = {name for name, _ in queue}
        for name, place in self._once(queue):
            # The first file is the program. Breadth first, so that with MAX_FILES the files near
            # to it are read.
            module = self._read(name, place, main=len(self.aliases) == 1)
            for full in _imports(module) if module else ():
                for found in self._along(full):
                    if found[0] not in queued:
                        queued.add(found[0])
                        queue.append(found)
            if module:
                yield module

    def _once(self, queue: deque[tuple[str, Place]]) -> Iterator[tuple[str, Place]]:
        """Empty a growing queue, without files that were already there under another name."""
        first: dict[str, str] = {}  # a file's real path: the name under which it was found first
        while queue:
            name, place = queue.popleft()
            if place.file is None:
                continue
            true = true_path(place.file)
            self.aliases[name] = first.setdefault(true, name)
            if len(first) > MAX_FILES:
                path = shown(place.file, self._cwd)
                self.unread.append(f"{path} and those after it: more than {MAX_FILES} files")
                return
            if first[true] == name:
                yield name, place

    def _read(self, name: str, place: Place, *, main: bool) -> Module | None:
        assert place.file is not None
        path = shown(place.file, self._cwd)
        package = name if place.folders else name.rpartition(".")[0]
        try:
            tree = parse(place.file)
            nodes, size_bytes = live_nodes(tree, main=main), place.file.stat().st_size
            return Module(name, package, path, nodes, tree, place.file, size_bytes, main)
        except _UNREADABLE as error:
            reason = _reason(error).replace(f" for {str(place.file)!r}", "")  # tokenize's wording
            self.unread.append(f"{path}: {reason}")
            return None


def true_path(path: Path) -> str:
    """Return a path without links; unlike `Path.resolve`, also for loops and invalid names."""
    try:
        return os.path.realpath(path)
    except ValueError:
        return str(path)


def shown(path: Path, cwd: Path) -> str:
    """Return the shortest path by which a file can be opened from the working directory."""
    if ".." in path.parts:
        path = Path(true_path(path))
    return str(path.relative_to(cwd) if path.is_relative_to(cwd) else path)


def parse(path: Path) -> ast.Module:
    """Return a file's syntax tree; raise one of `_UNREADABLE` if it is not Python source."""
    if not path.is_file():  # a pipe could block for ever
        raise OSError("it is not a file" if path.exists() else "there is no such file")
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"larger than {MAX_BYTES} bytes")
    with tokenize.open(path) as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the worker's own compilation shows them
        return ast.parse(file.read())


def _reason(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return f"{error.msg}, line {error.lineno}" if error.lineno else error.msg
    return getattr(error, "strerror", None) or str(error) or "too deeply nested"


def live_nodes(tree: ast.Module, *, main: bool) -> list[ast.stmt | ast.expr]:
    """Return the nodes of a module that may run and that the rules look at, by line and column.

    Args:
        tree: The module.
        main: Whether it is run as ``__main__``.
    """
    kept: list[ast.stmt | ast.expr] = []
    todo: list[Any] = [tree]
    while todo:
        node = todo.pop()
        kind = type(node)
        if kind in _KEPT:
            kept.append(node)
        if kind is ast.If:
            holds = _truth(node.test, main=main)
            todo += [node.test, *(node.body if holds is not False else ())]
            todo += node.orelse if holds is not True else ()
        elif kind not in _LEAVES and isinstance(node, ast.AST):
            # The same as ast.iter_child_nodes, in a third of the time.
            for value in vars(node).values():
                if type(value) is list:
                    todo += value
                elif type(value) not in _LEAVES:
                    todo.append(value)
    return sorted(kept, key=lambda node: (node.lineno, node.col_offset))


def _truth(test: ast.expr, *, main: bool) -> bool | None:
    """Return the value that a condition has when the program runs; None if unknown."""
    match test:
        case ast.Constant(value):
            return bool(value)
        case ast.Name("TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING"):
            return False
        case ast.Compare(ast.Name("__name__"), [ast.Eq()], [ast.Constant("__main__")]):
            return main
        case ast.UnaryOp(ast.Not(), operand):
            inner = _truth(operand, main=main)
            return None if inner is None else not inner
        case ast.BoolOp(op, values):
            decisive = isinstance(op, ast.Or)  # one true part decides an `or`
            return decisive if decisive in [_truth(v, main=main) for v in values] else None
    return None


def _imports(module: Module) -> Iterator[str]:
    """Yield the full names of all that a module imports; some may not be modules."""
    for node in module.nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if base := absolute(module.package, node.level, node.module or ""):
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names if alias.name != "*")
        elif isinstance(node, ast.Call):
            yield from _imported_by_call(node, module.package)


def absolute(package: str, level: int, name: str) -> str:
    """Return the full name that a relative import means; empty if it has too many dots.

    Args:
        package: The package of the module that imports.
        level: Number of leading dots.
        name: The name after them.
    """
    if not level:
        return name
    outer = package.split(".") if package else []
    if level > len(outer):
        return ""
    return ".".join([*outer[: len(outer) - level + 1], *([name] if name else ())])


def _imported_by_call(call: ast.Call, package: str) -> Iterator[str]:
    """Yield the module of ``importlib.import_module("literal")``."""
    function = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if function not in ("import_module", "__import__") or not call.args:
        return
    literal = getattr(call.args[0], "value", None)
    if isinstance(literal, str) and "/" not in literal:
        name = literal.lstrip(".")
        if full := absolute(package, len(literal) - len(name), name):
            yield full
