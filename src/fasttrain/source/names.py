"""Resolve the names in the user's modules, through imports, assignments and base classes."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from fasttrain.source.local_modules import Module, absolute

Chain = tuple[str, ...]  # the names of `a.b.c`


@dataclass(frozen=True, slots=True)
class _Bindings:
    """The names of a module.

    Attributes:
        bound: The meanings of each name, by imports and by ``name = dotted.name``.
        stars: The modules from which it imports ``*``.
        defined: The functions and classes that it defines, with the base classes.
    """

    bound: dict[str, list[str]] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)
    defined: dict[str, list[Chain]] = field(default_factory=dict)


class Names:
    """Resolves names once all modules are added."""

    def __init__(self, aliases: Mapping[str, str], homonyms: set[str]) -> None:
        """Start without any module.

        Args:
            aliases: For each full name of a module, the name of its `Module`.
            homonyms: Top-level names of the user's own modules, which hide installed packages.
        """
        self._aliases = aliases
        self._homonyms = homonyms
        self._modules: dict[str, _Bindings] = {}

    def add(self, module: Module) -> None:
        """Add the imports and definitions of a module."""
        self._modules[module.name] = _bindings(module)

    def meanings(self, module: str, names: Chain) -> tuple[str, ...]:
        """Return the full names outside the user's modules that a chain of names may mean."""
        return self._meanings(module, names, through_bases=False)

    def of(self, module: str, node: ast.expr | None) -> tuple[str, ...]:
        """Return the full names outside the user's modules that ``a.b.c`` may mean."""
        return self._all(module, node, through_bases=False)

    def kinds(self, module: str, node: ast.expr | None) -> tuple[str, ...]:
        """Return the same, and for a class of the user's own the names of its base classes."""
        return self._all(module, node, through_bases=True)

    def _all(self, module: str, node: ast.expr | None, *, through_bases: bool) -> tuple[str, ...]:
        names = chain(node)
        return self._meanings(module, names, through_bases=through_bases) if names else ()

    def _meanings(self, module: str, names: Chain, *, through_bases: bool) -> tuple[str, ...]:
        if module not in self._modules:
            return ()
        found = self._look(self._modules[module], names, set(), through_bases=through_bases)
        return tuple(dict.fromkeys(found))

    def _look(
        self, here: _Bindings, names: Chain, seen: set[tuple[int, str]], *, through_bases: bool
    ) -> Iterator[str]:
        head, rest = names[0], names[1:]
        if (id(here), head) in seen:  # modules that import each other, a class named as its base
            return
        seen.add((id(here), head))
        heads = here.bound.get(head, [])
        if head in here.defined:
            for base in here.defined[head] if through_bases else ():
                yield from self._look(here, (*base, *rest), seen, through_bases=True)
        elif not heads:
            heads = [f"{star}.{head}" for star in here.stars]
        for full in heads:
            yield from self._outside((*full.split("."), *rest), seen, through_bases=through_bases)

    def _outside(
        self, parts: Chain, seen: set[tuple[int, str]], *, through_bases: bool
    ) -> Iterator[str]:
        if parts[0] not in self._homonyms:
            yield ".".join(parts)
        for end in range(len(parts) - 1, 0, -1):
            name = self._aliases.get(".".join(parts[:end]))
            if name is not None and name in self._modules:
                there = self._modules[name]
                yield from self._look(there, parts[end:], seen, through_bases=through_bases)
                return


def part_of(names: Iterable[str], package: str, patterns: Iterable[str]) -> str:
    """Return the part of a full name inside a package that fits a pattern; empty if none does."""
    for name in names:
        if name.startswith(package + "."):
            for part in name.removeprefix(package + ".").split("."):
                if any(fnmatchcase(part, pattern) for pattern in patterns):
                    return part
    return ""


def chain(node: ast.expr | None) -> Chain:
    """Return the names of ``a.b.c``; empty for other expressions."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return (node.id, *reversed(names)) if isinstance(node, ast.Name) else ()


def _bindings(module: Module) -> _Bindings:
    found = _Bindings()
    for node in module.nodes:
        match node:
            case ast.Import(aliases):
                for alias in aliases:
                    top = alias.name.partition(".")[0]
                    _bind(found, alias.asname or top, alias.name if alias.asname else top)
            case ast.ImportFrom():
                _take_from(found, node, module.package)
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name):
                found.defined.setdefault(name, [])
            case ast.ClassDef(name, bases):
                plain = [b.value if isinstance(b, ast.Subscript) else b for b in bases]
                found.defined.setdefault(name, []).extend(c for b in plain if (c := chain(b)))
    imported = {name: tuple(meanings) for name, meanings in found.bound.items()}
    for node in module.nodes:
        match node:
            case ast.Assign([ast.Name(name)], value) | ast.AnnAssign(ast.Name(name), _, value):
                names = chain(value)
                for full in imported.get(names[0], ()) if names else ():
                    _bind(found, name, ".".join((full, *names[1:])))
    return found


def _take_from(found: _Bindings, node: ast.ImportFrom, package: str) -> None:
    base = absolute(package, node.level, node.module or "")
    for alias in node.names if base else ():
        if alias.name == "*":
            found.stars.append(base)
        else:
            _bind(found, alias.asname or alias.name, f"{base}.{alias.name}")


def _bind(found: _Bindings, name: str, full: str) -> None:
    """Add a meaning of a name; it may have several, from imports in ``try`` and ``except``."""
    meanings = found.bound.setdefault(name, [])
    if full not in meanings:
        meanings.append(full)
