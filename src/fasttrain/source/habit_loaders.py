"""How a DataLoader reads."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from fasttrain.source.habit_context import Context, Sign, is_literal
from fasttrain.source.habits import Habit
from fasttrain.source.names import part_of

_NUM_WORKERS = 5  # its position, after dataset, batch_size, shuffle, sampler and batch_sampler
# Samples that lie in memory gain nothing by workers, and a stream is read once by each of them.
_UNSUITED = ("TensorDataset", "IterableDataset")


def loaders(here: Context, call: ast.Call) -> Iterator[Sign]:
    """Give DataLoaders, and how they read."""
    if not part_of(here.kinds(call.func), "torch.utils.data", ("DataLoader",)):
        return
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    yield Habit.LOADER, "DataLoader", True
    own = not part_of(here.of(call.func), "torch.utils.data", ("DataLoader",))
    if own or None in given or any(isinstance(a, ast.Starred) for a in call.args):
        return  # a class of the user's own, or **options: anything may be among them
    workers = given.get("num_workers", next(iter(call.args[_NUM_WORKERS:]), None))
    if _is(workers, 0):
        if _gains(here, call):
            yield Habit.NO_WORKERS, "DataLoader", True
    elif len(call.args) <= _NUM_WORKERS + 1 and _is(given.get("pin_memory"), 0):
        yield Habit.NO_PINNING, "DataLoader", is_literal(workers)
    persistent = given.get("persistent_workers")
    if not _is(persistent, 0):
        yield Habit.PERSISTENT, "DataLoader", is_literal(persistent)


def _is(node: ast.expr | None, default: int) -> bool:
    """Whether an argument is its default, given or not; False is 0."""
    return node is None or (isinstance(node, ast.Constant) and node.value == default)


def _gains(here: Context, call: ast.Call) -> bool:
    """Whether workers may help: never where it is unknown and the module has other datasets."""
    if kinds := here.kinds(_maker(here, call)):
        return not part_of(kinds, "torch", _UNSUITED)
    made = (node.func for node in here.nodes if isinstance(node, ast.Call))
    based = (base for node in here.nodes if isinstance(node, ast.ClassDef) for base in node.bases)
    return not any(part_of(here.of(name), "torch", _UNSUITED) for name in (*made, *based))


def _maker(here: Context, call: ast.Call) -> ast.expr | None:
    """Give what made a loader's dataset, by its call there or assigned to its name once."""
    dataset = call.args[0] if call.args else None
    dataset = next((k.value for k in call.keywords if k.arg == "dataset"), dataset)
    if isinstance(dataset, ast.Name):
        values = [v for name, v in _assignments(here) if name == dataset.id]
        dataset = values[0] if len(values) == 1 else None
    return dataset.func if isinstance(dataset, ast.Call) else None


def _assignments(here: Context) -> Iterator[tuple[str, ast.expr]]:
    for node in here.nodes:
        match node:
            case ast.Assign([ast.Name(name)], value):
                yield name, value
