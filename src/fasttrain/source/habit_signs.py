"""Gathers the signs of habits, module by module."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from fasttrain.model.script import Evidence
from fasttrain.source.habit_context import Context, Sign
from fasttrain.source.habit_loaders import loaders
from fasttrain.source.habit_models import models, optimizers
from fasttrain.source.habit_rules import arguments, assigned, devices, frameworks, named
from fasttrain.source.habit_syncs import syncs
from fasttrain.source.habits import Habit, Habits
from fasttrain.source.local_modules import Module
from fasttrain.source.names import Names
from fasttrain.source.scopes import scoped

_RULES: tuple[Callable[[Context, ast.Call], Iterator[Sign]], ...] = (
    *(named, frameworks, arguments, devices, optimizers, models, loaders),
)


class Signs:
    """What was found so far."""

    def __init__(self, names: Names) -> None:
        """Begin without any; all names must be in."""
        self._names = names
        self._found: dict[Habit, list[Evidence]] = {}
        self._open: list[Evidence] = []

    def add(self, module: Module) -> None:
        """Take in what a module does."""
        module = module.parsed()
        assert module.tree
        live = {id(node): node for node in module.nodes}
        nodes = [(live[id(node)], scope) for node, scope in scoped(module.tree) if id(node) in live]
        here = Context(self._names, module.name, [node for node, _ in nodes])
        for node, scope in nodes:
            for habit, what, sure in _signs_at(here, node):
                evidence = Evidence(what, f"{module.path}:{node.lineno}")
                self._take(habit, evidence, sure=sure and not scope.open)
        for what, line in syncs(nodes):
            self._take(Habit.SYNC, Evidence(what, f"{module.path}:{line}"), sure=True)

    def habits(self) -> Habits:
        """Give all that was gathered."""
        return Habits({h: tuple(places) for h, places in self._found.items()}, tuple(self._open))

    def _take(self, habit: Habit, evidence: Evidence, *, sure: bool) -> None:
        places = self._found.setdefault(habit, [])
        if evidence not in places:
            places.append(evidence)
            if not sure:
                self._open.append(evidence)


def _signs_at(here: Context, node: ast.AST) -> Iterator[Sign]:
    """Give the signs at one node itself."""
    if isinstance(node, ast.Call):
        for rule in _RULES:
            yield from rule(here, node)
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            yield from assigned(here, target, node.value)
    elif isinstance(node, ast.FunctionDef) and node.name == "forward":
        decorators = [name for decorator in node.decorator_list for name in here.of(decorator)]
        if "torch.compile" in decorators:
            yield Habit.COMPILE, "forward", True
