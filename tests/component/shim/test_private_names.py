"""Every private name of torch and Python that the worker uses stands in docs/private_names.md."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fasttrain

PACKAGE = Path(fasttrain.__file__).parent
PAGE = Path(__file__).parents[3] / "docs" / "private_names.md"
ROW = re.compile(r"\| `(?P<name>[\w.]+)` \| (?P<of>[^|]+) \|")
WHOLE = re.compile(r"`([\w.]+)`")
TREES = [
    ast.parse(path.read_bytes())
    for folder in ("shim", "agent", "probes")
    for path in (PACKAGE / folder).rglob("*.py")
]
ROWS = {match["name"]: match["of"].strip() for match in ROW.finditer(PAGE.read_text())}


def is_private(name: str) -> bool:
    """Return whether a name is private; one with two underscores in front is Python's own."""
    return name.startswith("_") and not name.startswith("__") and name.isidentifier()


def own_names() -> set[str]:
    """Return the names that fasttrain defines itself."""
    found = set()
    for node in (node for tree in TREES for node in ast.walk(tree)):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.Attribute(value=ast.Name("self" | "cls"), attr=name, ctx=ast.Store()):
                found.add(name)
            case _:
                pass
    return {name for name in found if not name.startswith("_fasttrain")}


def imported(module: str, names: list[str]) -> Iterator[str]:
    """Yield the private module that an import goes through, or else its private names."""
    parts = module.split(".")
    if private := next((i for i, part in enumerate(parts) if is_private(part)), None):
        yield ".".join(parts[: private + 1])
    yield from filter(is_private, names)


def used_names() -> set[str]:
    """Return the private names of others that the source imports, reads or has as a word."""
    own, found = own_names(), set()
    for node in (node for tree in TREES for node in ast.walk(tree)):
        match node:
            case ast.ImportFrom(module=str(module)) if not module.startswith("fasttrain"):
                found.update(imported(module, [alias.name for alias in node.names]))
            case ast.Import():
                for alias in node.names:
                    found.update(imported(alias.name, []))
            case ast.Attribute(attr=name) | ast.Constant(value=str(name)) if is_private(name):
                found.update({name} - own)
            case _:
                pass
    return {name for name in found if not name.startswith(("_fasttrain", "__"))}


def looked_up(path: str) -> Any:
    """Return the object that a dotted path names."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:]:
            value = getattr(value, part)
        return value
    raise LookupError(path)


def test_every_private_name_has_a_row() -> None:
    covered = {name.rpartition(".")[2] for name in ROWS} | set(ROWS)
    assert used_names() - covered == set()


def test_every_row_is_used() -> None:
    used = {name.rpartition(".")[2] for name in used_names()}
    assert {name for name in ROWS if name.rpartition(".")[2] not in used} == set()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # inductor's, while imported
@pytest.mark.parametrize("name", [name for name, of in ROWS.items() if WHOLE.fullmatch(of)])
def test_installed_torch_and_python_have_it(name: str) -> None:
    owner = looked_up(ROWS[name].strip("`"))
    assert hasattr(owner, name.rpartition(".")[2])
