"""Gives what the source of a program says: facts for a plan, and habits for ``doctor``."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from fasttrain.model.plan import Evidence, ScriptFacts, Target
from fasttrain.source.finder import Finder, Locate
from fasttrain.source.habit_rules import Signs
from fasttrain.source.habits import Habits
from fasttrain.source.local_modules import Module, Walk
from fasttrain.source.names import Names
from fasttrain.source.options import options_of
from fasttrain.source.ranks import RankSigns

NO_MODULE = "there is no such module"

# Of source whose syntax trees are held at the same time; each byte takes 25 to 50 bytes of memory.
KEPT_BYTES = 1_000_000


def read_script(
    target: Target,
    cwd: str,
    environ: Mapping[str, str],
    locate: Locate = importlib.util.find_spec,
) -> ScriptFacts:
    """Return what the source of a script and of the user's modules that it imports tells.

    Nothing of it is imported or run, and nothing is raised for what can't be read.

    Args:
        target: What is started; nothing is known of a command.
        cwd: Working directory.
        environ: The environment of the workers.
        locate: Finds an installed top-level module without importing it.
    """
    if target.kind == "command":
        return ScriptFacts()
    program = _Program(target, cwd, environ, locate)
    for _ in program.modules():
        pass
    return program.facts()


def find_local_rank(
    target: Target,
    cwd: str,
    environ: Mapping[str, str],
    locate: Locate = importlib.util.find_spec,
) -> Evidence | None:
    """Return where the program takes its local rank from the environment, or from an option.

    That is how scripts choose their device; takes the same arguments as `read_script`.
    """
    if target.kind == "command":
        return None
    return _Program(target, cwd, environ, locate).local_rank()


def read_options(
    target: Target,
    cwd: str,
    environ: Mapping[str, str],
    locate: Locate = importlib.util.find_spec,
) -> Mapping[str, str] | None:
    """Return the options that the source shows, with their places; None if any can't be read.

    The names have underscores; takes the same arguments as `read_script`.
    """
    if target.kind == "command":
        return None
    program = _Program(target, cwd, environ, locate)
    options = options_of(program.modules())
    return None if program.facts().unread else options


def read_program(
    target: Target,
    cwd: str,
    environ: Mapping[str, str],
    locate: Locate = importlib.util.find_spec,
) -> tuple[ScriptFacts, Habits]:
    """Return the same, and the habits of the script and those modules; takes the same arguments."""
    if target.kind == "command":
        return ScriptFacts(), Habits()
    program = _Program(target, cwd, environ, locate)
    modules = list(_kept(program.modules()))
    signs = Signs(program.names)  # which names lead to modules that were found later, too
    for module in modules:
        signs.add(module)
    return program.facts(), signs.habits()


class _Program:
    """A program's modules, and what was gathered on the way through them."""

    def __init__(
        self, target: Target, cwd: str, environ: Mapping[str, str], locate: Locate
    ) -> None:
        finder = Finder(target, Path(cwd), environ, locate)
        self._target = target
        self._start = finder.start()
        self._walk = Walk(finder.along, Path(cwd))
        self.names = Names(self._walk.aliases, finder.in_roots)
        self._ranks = RankSigns(self.names)

    def modules(self) -> Iterator[Module]:
        for module in self._walk.modules(self._start):
            self.names.add(module)
            self._ranks.add(module)
            yield module

    def local_rank(self) -> Evidence | None:
        for _ in self.modules():
            pass
        return self._ranks.local_rank()

    def facts(self) -> ScriptFacts:
        if self._start:
            return ScriptFacts(self._ranks.strongest(), tuple(self._walk.unread))
        known = self._target.name.partition(".")[0] in sys.stdlib_module_names
        return ScriptFacts(unread=() if known else (f"{self._target.name}: {NO_MODULE}",))


def _kept(modules: Iterable[Module]) -> Iterator[Module]:
    """Yield the modules, those beyond the first `KEPT_BYTES` without their syntax trees."""
    held_bytes = 0
    for module in modules:
        held_bytes += module.size_bytes
        yield module if held_bytes <= KEPT_BYTES else replace(module, tree=None, nodes=[])
