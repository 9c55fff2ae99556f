"""Another Python than the one that runs fasttrain: what it is, and what it has installed."""

from __future__ import annotations

import importlib.metadata
import json
import os
from importlib.machinery import ModuleSpec, PathFinder

from fasttrain.hardware.tool import ToolError, run_tool
from fasttrain.hardware.torch_install import find_torch
from fasttrain.model.machine import Interpreter, Torch

TIMEOUT_S = 10.0
# For any Python 3, or 2: an old one is to be told by its version. With -c the working directory
# leads the path, where something may be called json.
_PROGRAM = """
import sys
if sys.path[:1] == [""]: del sys.path[0]
import json
told = {"version": "%d.%d.%d" % sys.version_info[:3], "prefix": sys.prefix, "search": sys.path}
if sys.version_info >= (3, 4):
    from importlib.util import find_spec
    torch = find_spec("torch")
    told["torch"] = list(torch.submodule_search_locations or [""])[0] if torch else ""
print("\\n" + json.dumps(told))
"""


NOT_PYTHON = "doesn't answer as Python does"


def ask_interpreter(path: str) -> Interpreter:
    """Return what a Python says of itself; torch is looked for, and not imported."""
    if not os.path.exists(path):  # noqa: PTH110 - a name that is too long is none
        return Interpreter(path, f"there is no {path}")
    try:
        said = run_tool([path, "-c", _PROGRAM], timeout_s=TIMEOUT_S)
        told = json.loads(said.strip().splitlines()[-1])
        search = tuple(str(item) for item in told["search"])
        torch = str(told.get("torch", ""))
        return Interpreter(path, "", str(told["version"]), str(told["prefix"]), torch, search)
    except ToolError as error:
        return Interpreter(path, str(error))
    except (ValueError, LookupError, TypeError):
        return Interpreter(path, f"{path} {NOT_PYTHON}")


def torch_of(other: Interpreter) -> Torch:
    """Return the torch of another Python; raises as `find_torch` does."""
    spec = ModuleSpec("torch", None, is_package=True)
    spec.submodule_search_locations = [other.torch]

    def version_of(package: str) -> str:
        there = importlib.metadata.distributions(name=package, path=list(other.search))
        return next((found.version for found in there), "")

    return find_torch(lambda _: spec if other.torch else None, version_of)


class Locate:
    """Finds a top-level module of another Python, as `importlib.util.find_spec` does here."""

    def __init__(self, other: Interpreter) -> None:
        self._search = list(other.search)

    def __call__(self, name: str) -> ModuleSpec | None:
        """Return the module's spec; None where there is none."""
        return PathFinder.find_spec(name, self._search)
