"""The options that a program's source shows, under the names that fasttrain's own could have."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

from fasttrain.source.local_modules import Module

_OPTION = re.compile(r"(?<![\w-])--([A-Za-z][\w-]*)")
_PARSERS = {"argparse", "optparse", "getopt"}  # every option of theirs is written out
_BY_NAME = {  # their options are parameters, fields or keys
    *("absl", "cappa", "click", "cyclopts", "fire", "hydra", "jsonargparse", "omegaconf"),
    *("plac", "simple_parsing", "typer", "tyro", "HfArgumentParser", "LightningCLI"),
}
_BY_HAND = {"argv", "exec", "globals"}  # a loop over sys.argv, or a configurator that is executed


def options_of(modules: Iterable[Module]) -> dict[str, str]:
    """Return each name that may be an option, with underscores, and the ``file:line`` of it.

    These are all ``--name`` in strings, so those of argparse, click and usage texts. Where a parser
    takes names from the code instead, or nothing but the program's own lines reads the command
    line, all names count that the program gives to anything.
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
