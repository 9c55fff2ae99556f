"""The torch that a script would import, read from its files."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path

from fasttrain.model.machine import Torch


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def find_torch(
    locate: Callable[[str], ModuleSpec | None] = importlib.util.find_spec,
    version_of: Callable[[str], str] = _version_of,
) -> Torch:
    """Give torch's version, build and companions without importing or executing any of it.

    Raises:
        OSError: A folder named torch is on the path but has no ``version.py``: a broken
            installation, or a checkout of its source in the working directory.
        ValueError: ``version.py`` is not Python, or holds no version.
    """
    spec = locate("torch")
    if spec is None:
        return Torch()
    folders = list(spec.submodule_search_locations or ())
    if not folders:
        raise OSError(f"torch is the single file {spec.origin}, not the package")
    torch = _read_version(Path(folders[0]) / "version.py")
    return replace(torch, triton_ascend=version_of("triton-ascend"))


def _read_version(path: Path) -> Torch:
    try:
        values = _text_constants(ast.parse(path.read_bytes()))
    except SyntaxError as error:
        raise ValueError(f"{path} is not Python: {error.msg}") from error
    if "__version__" not in values:
        raise ValueError(f"{path} holds no __version__")
    version = values["__version__"]
    if cuda := values.get("cuda"):
        return Torch(version, "cuda", cuda)
    if hip := values.get("hip"):
        return Torch(version, "rocm", hip)
    return Torch(version, "cpu")


def _text_constants(module: ast.Module) -> dict[str, str]:
    """Return the module's ``name = "text"`` assignments, annotated or not."""
    found: dict[str, str] = {}
    for statement in module.body:
        if isinstance(statement, ast.Assign):
            targets: list[ast.expr] = statement.targets
        elif isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        else:
            continue
        if isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str):
            names = (target.id for target in targets if isinstance(target, ast.Name))
            found.update(dict.fromkeys(names, statement.value.value))
    return found
