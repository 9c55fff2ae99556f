"""Where a training step waits for the device."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from fasttrain.source.scopes import Scope


def syncs(nodes: Sequence[tuple[ast.AST, Scope]]) -> Iterator[tuple[str, int]]:
    """Give what brings a value to the host in each round that calls backward, and its line.

    Only what stands in the very same loop or function, under no condition. ``.numpy()`` is not
    among it: it takes what is on the host already.
    """
    calls = [(node, scope) for node, scope in nodes if isinstance(node, ast.Call)]
    steps: dict[int, set[str]] = {}  # by loop or function, its losses in the source's words
    for call, scope in calls:
        if (losses := _losses(call)) is not None and scope.unit is not None:
            steps.setdefault(id(scope.unit), set()).update(losses)
    told: set[int] = set()
    for call, scope in calls:
        known = steps.get(id(scope.unit))
        if known is None or scope.sometimes or call.lineno in told:
            continue
        if what := _waits(call, known):
            told.add(call.lineno)
            yield what, call.lineno


def _losses(call: ast.Call) -> set[str] | None:
    """Give what a backward pass begins from, None for other calls."""
    if not (isinstance(call.func, ast.Attribute) and call.func.attr == "backward"):
        return None
    begins = [call.func.value, *call.args[:1]]
    if isinstance(begins[0], ast.Call):  # scaler.scale(loss).backward()
        begins += begins[0].args
    return {ast.unparse(part) for part in begins if isinstance(part, ast.Name | ast.Attribute)}


def _waits(call: ast.Call, losses: set[str]) -> str:
    match call:
        case ast.Call(ast.Attribute(attr="item" | "cpu" as method), [], []):
            return f".{method}()"
        case ast.Call(ast.Name("float"), [argument]) if ast.unparse(argument) in losses:
            return f"float({ast.unparse(argument)})"
        case ast.Call(ast.Name("print"), arguments):
            printed = [ast.unparse(part) for a in arguments for part in _printed(a)]
            return next((f"print of {part}" for part in printed if part in losses), "")
    return ""


def _printed(argument: ast.expr) -> Iterator[ast.expr]:
    yield argument
    for part in argument.values if isinstance(argument, ast.JoinedStr) else ():
        if isinstance(part, ast.FormattedValue):
            yield part.value
