"""Attributes of torch and of Python are replaced by one module, which can put them back."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path

import fasttrain

SHIM = Path(fasttrain.__file__).parent / "shim"
# What sets attributes itself, and of what: none of it is seen by anybody but the one object, or it
# is the whole process's from its beginning to its end.
OTHERS = {
    "hooks/patching.py: owner", "hooks/patching.py: self._owner",
    "hooks/dynamo.py: compiler",  # as newer torch does itself
    "hooks/containers.py: holder",  # tensors that the script holds
    "process/import_hook.py: loader",  # of one module, until that is imported
    "process/log_stream.py: sys", "script.py: sys",
    "levers/compile/shadow.py: sys", "levers/compile/shadow.py: config",  # of a copy that ends
    "levers/compile/lever.py: config", "levers/compile/repairs.py: config",  # torch's settings
    "levers/compile/repeated.py: ctx", "levers/amp/script_hooks.py: node",
    "data_parallel/answers/trackers.py: run",  # one of wandb's that the script has just started
    "data_parallel/per_rank.py: iterator", "data_parallel/per_rank.py: fetcher",
    "data_parallel/random_streams.py: generator",
    "data_parallel/replica.py: DistributedDataParallel",  # for a call, as torch's own calls do
    "data_parallel/shards/mixed.py: kind",  # a class that FSDP has derived
    "data_parallel/shards/whole_copies.py: detached",  # a shard that the script has detached
    "data_parallel/ranks.py: sys",  # puts back what torch has replaced
    "levers/compile/confined.py: tempfile",  # in the copy that compiles
    "data_parallel/shards/replica.py: state",  # FSDP's, of a root that fasttrain has sharded
    "snapshots/generators.py: generator.bit_generator", "snapshots/loader_epochs.py: iterator",
    # The shim's own.
    "levers/compile/lever.py: shared", "levers/loss_scaling/lever.py: shared",
    "compile_auto/lever.py: shared",
    "data_parallel/context.py: self._owner", "data_parallel/split/sites.py: site",
    "data_parallel/split/call.py: ROWS", "data_parallel/split/lazy_rows.py: LazyRows",
    "data_parallel/split/whole_batch.py: splits",
    "data_parallel/strategy.py: replicate", "data_parallel/replicate.py: self._roots",
    "snapshots/replay.py: self._roots",
}  # fmt: skip


def replaced(tree: ast.AST) -> Iterator[str]:
    """Yield what has attributes set that is imported, or attributes set to functions.

    Attributes of ``self``, and data that is put into the attributes of a parameter, don't count.
    """
    nodes = list(ast.walk(tree))
    functions = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    foreign = {name for node in nodes for name in _imported(node)}
    foreign |= {name for node in nodes for name in _aliases(node, foreign)}
    for node in nodes:
        yield from _by_name(node)
        value = getattr(node, "value", None)
        for target in _targets(node):
            if isinstance(target, ast.Attribute):
                root = _root(target)
                if root in foreign or (root != "self" and _is_function(value, functions)):
                    yield ast.unparse(target.value)


def _by_name(node: ast.AST) -> Iterator[str]:
    """Yield the first argument of `setattr` and `delattr`, called or handed over to be called."""
    parts = [node.func, *node.args, None] if isinstance(node, ast.Call) else []
    for part, owner in itertools.pairwise(parts):
        if isinstance(part, ast.Name) and part.id in ("setattr", "delattr"):
            yield ast.unparse(owner) if owner is not None else "?"


def _imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from ((alias.asname or alias.name).split(".")[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("fasttrain"):
        yield from (alias.asname or alias.name for alias in node.names)


def _aliases(node: ast.AST, foreign: set[str]) -> Iterator[str]:
    """Yield the names that an attribute of something imported is given."""
    value = getattr(node, "value", None)
    if isinstance(value, ast.Name | ast.Attribute) and _root(value) in foreign:
        yield from (target.id for target in _targets(node) if isinstance(target, ast.Name))


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign | ast.Delete):
        parts = [t.elts if isinstance(t, ast.Tuple) else [t] for t in node.targets]
        return [target for part in parts for target in part]
    return [node.target] if isinstance(node, ast.AnnAssign | ast.AugAssign) else []


def _root(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _is_function(value: ast.AST | None, functions: set[str]) -> bool:
    match value:
        case ast.Name(name):
            return name in functions
        case ast.Call(func=ast.Name("staticmethod" | "classmethod" | "property")):
            return True
    return isinstance(value, ast.Lambda)


def test_replacing_is_seen() -> None:
    for code in (
        "import torch; torch.save = save",
        "from torch import Tensor as T; del T.numpy",
        "import torch; kind: Any = torch.nn.Module; kind.train = train",
        "def forward(): pass\nowner.forward = forward",
        "owner.now = classmethod(now)",
        "import sys; sys.stdout = sys.stderr = stream",
        "undo.callback(setattr, owner, name, original)",
    ):
        assert list(replaced(ast.parse(code))), code
    for code in ("self.act = lambda: None", "def f(module, value): module.grad = value"):
        assert not list(replaced(ast.parse(code))), code


def test_only_patching_replaces_attributes() -> None:
    found = {
        f"{path.relative_to(SHIM)}: {what}"
        for path in SHIM.rglob("*.py")
        for what in replaced(ast.parse(path.read_bytes()))
    }
    assert found == OTHERS
