"""Decides which Python runs the script."""

from __future__ import annotations

from dataclasses import dataclass

from fasttrain.model.decision import Decision, Setting, Source, SourceKind
from fasttrain.model.errors import ExitCode, FasttrainError
from fasttrain.model.machine import Interpreter

# The worker's code needs exception groups and sys.flags.safe_path.
OLDEST = (3, 11)

BY_NAME = "asked for by name"
ACTIVE = "the active environment"


@dataclass(frozen=True, slots=True)
class ChosenPython:
    """The Python that runs the script.

    Attributes:
        other: The Python; None if it is fasttrain's own.
        decision: Its path and the reason; None if it is fasttrain's own.
        note: The active environment and why it is not used; empty if there is none.
    """

    other: Interpreter | None = None
    decision: Decision[str] | None = None
    note: str = ""


def decide_python(
    setting: Setting[str | None], active: str, asked: Interpreter | None
) -> ChosenPython:
    """Return the Python of --python, else of the active environment, else fasttrain's own.

    Args:
        setting: The Python of --python, if any.
        active: The active environment, if fasttrain is not in it, as ``VIRTUAL_ENV=/path``.
        asked: The answers of that Python; None if it is fasttrain's own.

    Raises:
        FasttrainError: ``python-unusable`` if that of --python can't run the script.
    """
    if asked is None:
        return ChosenPython()
    problem = _problem(asked)
    if setting.value:
        if problem:
            raise _unusable(asked.path, problem, setting.source)
        return ChosenPython(asked, Decision(asked.path, BY_NAME, setting.source))
    if problem:
        return ChosenPython(note=f"{active} is active, but {problem}")
    variable = active.partition("=")[0]
    source = Source(SourceKind.ENV, variable)
    return ChosenPython(asked, Decision(asked.path, ACTIVE, source))


def _problem(asked: Interpreter) -> str:
    if asked.error:
        return asked.error
    if tuple(int(part) for part in asked.version.split(".")[:2]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        return f"{asked.path} is Python {asked.version}, and fasttrain needs {oldest} or later"
    return "" if asked.torch else f"there is no torch in {asked.path}"


def _unusable(path: str, why: str, source: Source) -> FasttrainError:
    return FasttrainError(
        f"{path} can't run the script",
        why=why,
        fix=f"name a Python that has torch, or leave {source} out",
        slug="python-unusable",
        exit_code=ExitCode.CANNOT_START,
    )
