"""Choose the Python that runs the script: query the candidate, and let planning decide."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from fasttrain.hardware.interpreter import ask_interpreter
from fasttrain.launch.start import active_elsewhere
from fasttrain.model.machine import Interpreter
from fasttrain.model.plan import Target
from fasttrain.model.settings import Settings
from fasttrain.planning.interpreter import Chosen, decide_python


def choose_python(target: Target, settings: Settings, environ: Mapping[str, str]) -> Chosen:
    """Return the named Python, that of the active environment, or fasttrain's own.

    Raises:
        FasttrainError: ``python-unusable`` if a named one can't run the script.
    """
    if target.kind == "command":
        return Chosen()
    named, active = settings.python, active_elsewhere(environ)
    asked: Interpreter | None = None
    if named.value:
        asked = _named(named.value, environ)
    elif active:
        asked = ask_interpreter(str(Path(active.partition("=")[2], "bin", "python").absolute()))
    return decide_python(named, active, None if asked and _own(asked) else asked)


def same_syntax(other: Interpreter | None) -> bool:
    """Return True if an interpreter has the syntax of this Python, so that we can parse for it."""
    return other is None or other.version.split(".")[:2] == list(map(str, sys.version_info[:2]))


def _named(word: str, environ: Mapping[str, str]) -> Interpreter:
    found = shutil.which(word, path=environ.get("PATH")) or word
    return ask_interpreter(str(Path(found).absolute()))


def _own(asked: Interpreter) -> bool:
    there = Path(asked.prefix)
    # Two versions may share one prefix, such as /usr.
    same = asked.version == ".".join(map(str, sys.version_info[:3]))
    return same and bool(asked.prefix) and there.is_dir() and there.samefile(sys.prefix)
