"""What the names in the user's modules stand for, through their imports and base classes."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from fasttrain.source.local_modules import Module, absolute

Chain = tuple[str, ...]  # the names of `a.b.c`


@dataclass(frozen=True, slots=True)
class _Bindings:
    """What is kept of a module.

    Attributes:
        bound: What each name stands for, by imports and by ``name = dotted.name``.
        stars: The modules that it imports all names of.
        defined: The functions and classes that it defines, with the bases of the latter.
    """

    bound: dict[str, list[str]] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)
    defined: dict[str, list[Chain]] = field(default_factory=dict)


class Names:
    """Resolves names, once all modules are in."""

    def __init__(self, aliases: Mapping[str, str], homonyms: set[str]) -> None:
        """Begin without any module.

        Args:
            aliases: For each full name of a module, the name of the `Module` that is added.
            homonyms: Top-level names that are the user's own and not an installed package's.
        """
        self._aliases = aliases
        self._homonyms = homonyms
        self._modules: dict[str, _Bindings] = {}

    def add(self, module: Module) -> None:
        """Take in what a module imports and defines."""
        self._modules[module.name] = _bindings(module)

    def meanings(self, module: str, names: Chain) -> tuple[str, ...]:
        """Return the full names outside the user's modules that a chain of names may stand for."""
        return self._meanings(module, names, through_bases=False)

    def of(self, module: str, node: ast.expr | None) -> tuple[str, ...]:
        """Return the full names outside the user's modules that ``a.b.c`` may stand for."""
        return self._all(module, node, through_bases=False)

    def kinds(self, module: str, node: ast.expr | None) -> tuple[str, ...]:
        """Return the same, and for a class of the user's own what it derives from."""
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
    """Return the part of a full name below a package that fits a pattern; empty if none does."""
    for name in names:
        if name.startswith(package + "."):
            for part in name.removeprefix(package + ".").split("."):
                if any(fnmatchcase(part, pattern) for pattern in patterns):
                    return part
    return ""


def chain(node: ast.expr | None) -> Chain:
    """Return the names of ``a.b.c``; none for what is no such chain."""
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
    """Add to what a name may stand for: ``try`` and ``except`` may each import it."""
    meanings = found.bound.setdefault(name, [])
    if full not in meanings:
        meanings.append(full)


# Which loop a piece of code runs in, and whether it runs there every time.


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_LEAVING = (ast.Return, ast.Continue, ast.Break, ast.Raise)


@dataclass(frozen=True, slots=True)
class Scope:
    """Where a node stands.

    Attributes:
        unit: The innermost loop or function around it; None at the top of a module.
        sometimes: Whether a condition inside of that unit decides if it runs.
        open: Whether any condition around it, or a ``return`` or ``continue`` under one before it,
            decides.
    """

    unit: ast.AST | None = None
    sometimes: bool = False
    open: bool = False

    def under(self) -> Scope:
        """Return the scope of what a condition decides on."""
        return replace(self, sometimes=True, open=True)

    def within(self, unit: ast.AST) -> Scope:
        """Return the scope of a loop's or function's body."""
        return Scope(unit, open=self.open)


def scoped(tree: ast.Module) -> Iterator[tuple[ast.AST, Scope]]:
    """Give each node of a module with its scope; statements in the order of the source."""
    todo: list[tuple[ast.AST, Scope]] = [*reversed(_block(tree.body, Scope()))]
    while todo:
        node, scope = todo.pop()
        yield node, scope
        todo += reversed(_inside(node, scope))


def _inside(node: ast.AST, scope: Scope) -> list[tuple[ast.AST, Scope]]:
    inner: list[tuple[ast.AST, Scope]] = []
    for name, value in ast.iter_fields(node):
        part = _scope_of(node, name, scope)
        if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
            inner += _block(value, part)
        elif isinstance(value, list):
            # `a and b`: whether b is looked at depends on a.
            short = isinstance(node, ast.BoolOp)
            items = [item for item in value if isinstance(item, ast.AST)]
            inner += [(item, part.under() if short and i else part) for i, item in enumerate(items)]
        elif isinstance(value, ast.AST):
            inner.append((value, part))
    return inner


def _scope_of(node: ast.AST, field: str, scope: Scope) -> Scope:
    """Return the scope of one field of a node."""
    if isinstance(node, _FUNCTIONS):
        return scope.within(node) if field == "body" else scope
    if isinstance(node, _LOOPS):
        return scope.within(node) if field == "body" else scope
    if isinstance(node, ast.If):
        return scope if field == "test" or _holds(node.test) else scope.under()
    if isinstance(node, ast.IfExp):
        return scope if field == "test" else scope.under()
    if isinstance(node, ast.Try):
        return scope.under() if field in ("handlers", "orelse") else scope
    return scope.under() if isinstance(node, ast.match_case) else scope


def _holds(test: ast.expr) -> bool:
    """Return whether a condition is one that a script is run with."""
    match test:
        case ast.Compare(ast.Name("__name__"), [ast.Eq()], [ast.Constant("__main__")]):
            return True
    return isinstance(test, ast.Constant)


def _block(body: list[ast.stmt], scope: Scope) -> list[tuple[ast.AST, Scope]]:
    found: list[tuple[ast.AST, Scope]] = []
    for statement in body:
        found.append((statement, scope))
        if isinstance(statement, ast.If) and _leaves(statement):
            scope = replace(scope, open=True)
    return found


def _leaves(branch: ast.If) -> bool:
    return any(isinstance(last, _LEAVING) for last in (branch.body[-1], *branch.orelse[-1:]))
