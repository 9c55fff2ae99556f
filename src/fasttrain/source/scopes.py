"""Which loop a piece of code runs in, and whether it runs there every time."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace

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
        """Give the scope of what a condition decides on."""
        return replace(self, sometimes=True, open=True)

    def within(self, unit: ast.AST) -> Scope:
        """Give the scope of a loop's or function's body."""
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
    """Give the scope of one field of a node."""
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
    """Whether a condition is one that a script is run with."""
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
