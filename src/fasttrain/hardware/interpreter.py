"""The Python that runs scripts, and the torch that is installed in it, without importing it."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import os
from collections.abc import Callable
from dataclasses import replace
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from fasttrain.hardware.tool import ToolError, run_tool
from fasttrain.model.machine import Interpreter, Torch

TIMEOUT_S = 10.0
# Must run on any Python 3, and on 2, so that an old one can be reported with its version. With -c
# the working directory comes first in sys.path, and may hold a json.py: it is removed.
_PROGRAM = """
import sys
if sys.path[:1] == [""]: del sys.path[0]
import json
answer = {"version": "%d.%d.%d" % sys.version_info[:3], "prefix": sys.prefix, "search": sys.path}
if sys.version_info >= (3, 4):
    from importlib.util import find_spec
    torch = find_spec("torch")
    answer["torch"] = list(torch.submodule_search_locations or [""])[0] if torch else ""
print("\\n" + json.dumps(answer))
"""


NOT_PYTHON = "doesn't answer as Python does"


def ask_interpreter(path: str) -> Interpreter:
    """Return version, path and torch of another Python; torch is located, not imported."""
    if not os.path.exists(path):  # noqa: PTH110 - pathlib raises for a name that is too long
        return Interpreter(path, f"there is no {path}")
    try:
        said = run_tool([path, "-c", _PROGRAM], timeout_s=TIMEOUT_S)
        # The last line: a sitecustomize may have printed others.
        answer = json.loads(said.strip().splitlines()[-1])
        search = tuple(str(item) for item in answer["search"])
        torch = str(answer.get("torch", ""))
        return Interpreter(path, "", str(answer["version"]), str(answer["prefix"]), torch, search)
    except ToolError as error:
        return Interpreter(path, str(error))
    except (ValueError, LookupError, TypeError):
        return Interpreter(path, f"{path} {NOT_PYTHON}")


def torch_of(other: Interpreter) -> Torch:
    """Return the torch of another Python; raise as `find_torch` does."""
    spec = ModuleSpec("torch", None, is_package=True)
    spec.submodule_search_locations = [other.torch]

    def version_of(package: str) -> str:
        there = importlib.metadata.distributions(name=package, path=list(other.search))
        return next((found.version for found in there), "")

    return find_torch(lambda _: spec if other.torch else None, version_of)


class Locate:
    """Finds a top-level module of another Python, like `importlib.util.find_spec` for this one."""

    def __init__(self, other: Interpreter) -> None:
        self._search = list(other.search)

    def __call__(self, name: str) -> ModuleSpec | None:
        """Return the module's spec; None if there is none."""
        return PathFinder.find_spec(name, self._search)


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def find_torch(
    locate: Callable[[str], ModuleSpec | None] = importlib.util.find_spec,
    version_of: Callable[[str], str] = _version_of,
) -> Torch:
    """Return torch's version, build and companion packages; nothing of it is executed.

    Raises:
        OSError: If a folder named torch has no ``version.py``: a broken installation, or torch's
            source in the working directory.
        ValueError: If ``version.py`` is not Python, or holds no version.
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
    """Return a module's ``name = "text"`` assignments, annotated or not."""
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
