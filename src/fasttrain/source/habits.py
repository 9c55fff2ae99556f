"""Gives the habits of a script, with those of the user's modules that it imports."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

from fasttrain.source import read
from fasttrain.source.habit import Habits
from fasttrain.source.habit_signs import Signs
from fasttrain.source.local_modules import Walk
from fasttrain.source.names import Names
from fasttrain.spec.plan import Target


def read_habits(
    target: Target,
    cwd: str,
    environ: Mapping[str, str],
    locate: read.Locate = importlib.util.find_spec,
) -> Habits:
    """Give the habits of a script and of the user's modules that it imports.

    Nothing of it is imported or run, and nothing is raised for what can't be read; what that was
    is told by `read_script`.

    Args:
        target: What is started; nothing is known of a command.
        cwd: Working directory.
        environ: The environment of the workers.
        locate: Finds an installed top-level module without importing it.
    """
    if target.kind == "command":
        return Habits()
    finder = read.Finder(target, Path(cwd), environ, locate)
    walk = Walk(finder.along, Path(cwd))
    names = Names(walk.aliases, finder.in_roots)
    modules = []
    for module in walk.modules(read._start(target, Path(cwd), finder)):
        names.add(module)
        modules.append((module.name, Path(cwd) / module.path, module.path))
    # Read a second time, one by one: names lead to modules that are found later, and all syntax
    # trees at once would fill the memory.
    signs = Signs(names)
    for name, file, shown in modules:
        signs.add(name, file, shown, main=name == modules[0][0])
    return signs.habits()
