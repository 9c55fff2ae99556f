"""fasttrain loads no pickle: what it reads of its own is JSON, and what it configures is YAML.

Exceptions are submitit's, which loads the job's behind the check in ``slurm/node_start.py``;
snapshots: tensors and plain values by ``weights_only``, from a folder that is the user's alone; and
batches of a DataLoader, in sealed memory files that a process of the same user sends through a
socket, where the kernel says whose it is (``shim/shared_loading``), as torch's workers send theirs,
or that a worker, which the same process has forked, sends through torch's own pipe.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import fasttrain

PACKAGE = Path(fasttrain.__file__).parent
# Each module turns bytes into objects of any class, or into code.
LOADERS = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
# Collectives that pickle on one rank and unpickle on another, and readers that may unpickle.
BY_PICKLE = {
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list",
    "send_object_list", "recv_object_list", "recv_bytes", "unsafe_load", "full_load", "load_all",
}  # fmt: skip
OF_MODULES = {"torch", "np", "numpy", "yaml", "pd"}
BEHIND_A_CHECK = {
    "slurm/node_start.py", "shim/snapshots/files.py", "shim/data_parallel/loading/transport.py",
    "shim/levers/loader_workers/batches.py",
}  # fmt: skip
# What a module may use of pickle that only writes.
WRITING = {"Pickler", "PickleBuffer", "dump", "dumps", "HIGHEST_PROTOCOL"}


def only_writes(tree: ast.AST) -> bool:
    """Return whether all that is used of pickle turns objects into bytes."""
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        and node.value.id == "pickle"
    }  # fmt: skip
    return bool(used) and used <= WRITING


def loads(tree: ast.AST) -> Iterator[int]:
    """Return the lines that load a pickle, or could."""
    writes = only_writes(tree)
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=[ast.alias(name="pickle", asname=None)]) if writes:
                pass
            case ast.Import(names=names) if {n.name.split(".")[0] for n in names} & LOADERS:
                yield node.lineno
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in LOADERS:
                yield node.lineno
            case ast.ImportFrom(module=str(module)) if module.startswith("submitit.core.subm"):
                yield node.lineno
            case ast.Attribute(value=ast.Name(owner), attr="load") if owner in OF_MODULES:
                yield node.lineno
            case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)) if name in BY_PICKLE:
                yield node.lineno


@pytest.mark.parametrize(
    "code",
    ["import pickle", "from marshal import loads", "torch.load(path)", "load = torch.load",
     "np.load(path)", "yaml.load(text)", "dist.all_gather_object(found, mine)",
     "from submitit.core.submission import submitit_main", "yaml.unsafe_load(text)",
     "import pickle; pickle.dumps(x); pickle.loads(x)", "import pickle as p; pickle.dumps(x)"],
)  # fmt: skip
def test_a_pickle_is_seen(code: str) -> None:
    assert list(loads(ast.parse(code))) == [1]


def test_reading_data_is_none() -> None:
    code = "json.load(file); yaml.safe_load(text); yaml.compose(text); torch.save(x, path)"
    assert list(loads(ast.parse(code))) == []


def test_writing_is_none() -> None:
    assert list(loads(ast.parse("import pickle\npickle.Pickler(file, 5).dump(x)"))) == []


def test_nothing_of_fasttrain_loads_one_unchecked() -> None:
    found = {
        str(path.relative_to(PACKAGE))
        for path in sorted(PACKAGE.rglob("*.py"))
        if list(loads(ast.parse(path.read_bytes())))
    }
    assert found == BEHIND_A_CHECK
