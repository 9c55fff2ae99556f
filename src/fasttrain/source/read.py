"""Read the source of a program: facts for a plan, options, and habits for ``doctor``."""

from __future__ import annotations

import ast
import importlib.util
import re
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
from fasttrain.source.ranks import RankSigns

NO_MODULE = "there is no such module"

# Bytes of source whose syntax trees are kept at the same time; each takes 25 to 50 bytes of memory.
KEPT_BYTES = 1_000_000

_OPTION = re.compile(r"(?<![\w-])--([A-Za-z][\w-]*)")
_PARSERS = {"argparse", "optparse", "getopt"}  # their options are written out in the source
_BY_NAME = {  # their options are the names of parameters, fields or keys
    *("absl", "cappa", "click", "cyclopts", "fire", "hydra", "jsonargparse", "omegaconf"),
    *("plac", "simple_parsing", "typer", "tyro", "HfArgumentParser", "LightningCLI"),
}
_BY_HAND = {"argv", "exec", "globals"}  # a loop over sys.argv, or a configurator that is executed


def read_script(
    target: Target,
    cwd: str,
    environ: Mapping[str, str],
    locate: Locate = importlib.util.find_spec,
) -> ScriptFacts:
    """Return the facts from the source of a script and of the user's modules that it imports.

    Nothing of it is imported or run. Files that can't be read raise nothing: the facts list them.

    Args:
        target: What is started; a command has no facts.
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
    """Return where the program reads its local rank, by which scripts choose their device.

    The arguments are those of `read_script`.
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
    """Return the options in the source, with their places; None if a module can't be read.

    The names have underscores. The arguments are those of `read_script`.
    """
    if target.kind == "command":
        return None
    program = _Program(target, cwd, environ, locate)
    options = _options_of(program.modules())
    return None if program.facts().unread else options


def read_program(
    target: Target,
    cwd: str,
    environ: Mapping[str, str],
    locate: Locate = importlib.util.find_spec,
) -> tuple[ScriptFacts, Habits]:
    """Return the facts as `read_script` does, and the habits of the same modules."""
    if target.kind == "command":
        return ScriptFacts(), Habits()
    program = _Program(target, cwd, environ, locate)
    modules = list(_kept(program.modules()))
    signs = Signs(program.names)  # only now: names may lead to modules that were found later
    for module in modules:
        signs.add(module)
    return program.facts(), signs.habits()


class _Program:
    """A program's modules, and the facts that are collected while they are walked."""

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
    """Yield the modules, without their syntax trees after the first `KEPT_BYTES` of source."""
    held_bytes = 0
    for module in modules:
        held_bytes += module.size_bytes
        yield module if held_bytes <= KEPT_BYTES else replace(module, tree=None, nodes=[])


def _options_of(modules: Iterable[Module]) -> dict[str, str]:
    """Return each name that may be an option, with underscores, and its ``file:line``.

    These are all ``--name`` in strings, which finds those of argparse, click and usage texts. If
    the program's parser takes options from names in the code, or if the program reads ``sys.argv``
    without a parser, all names that the program binds count, too.
    """
    written: dict[str, str] = {}
    bound: dict[str, str] = {}
    mentioned: set[str] = set()
    for module in modules:
        for node in ast.walk(module.tree) if module.tree else ():
            where = f"{module.path}:{getattr(node, 'lineno', 1)}"
            mentioned.update(_mentions(node))
            for name in _bound(node):
                bound.setdefault(name, where)
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                for name in _OPTION.findall(node.value):
                    written.setdefault(name.replace("-", "_"), where)
    by_hand = mentioned & _BY_HAND and not mentioned & _PARSERS
    return bound | written if by_hand or mentioned & _BY_NAME else written


def _mentions(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Import(names):
            yield from (alias.name.partition(".")[0] for alias in names)
        case ast.ImportFrom(module, names):
            yield (module or "").partition(".")[0]
            yield from (alias.name for alias in names)
        case ast.Name(name) | ast.Attribute(attr=name):
            yield name


def _bound(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Name(name, ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
            yield name
        case ast.arg(arg=name) | ast.keyword(arg=str(name)):
            yield name
        case ast.Dict(keys):
            for key in keys:
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    yield key.value
        case ast.Call(args=[ast.Constant(str(name)), *_]):  # absl: DEFINE_string("device", ...)
            yield name
