"""Which DataLoaders give the same batches if workers read them."""

from __future__ import annotations

import multiprocessing
import random
from types import GeneratorType
from typing import Any

from torch import Generator, Tensor
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    MapDataPipe,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from fasttrain.shim.hooks.containers import module_name
from fasttrain.shim.hooks.held import held_by, held_directly

_NEEDED = {
    *("num_workers", "prefetch_factor", "worker_init_fn", "generator", "batch_sampler"),
    *("dataset", "collate_fn", "pin_memory", "timeout"),
}
_SAMPLERS = (
    *(RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler),
    *(DistributedSampler, list, tuple, range),
)


def why_not(loader: Any) -> str:
    """Return why a DataLoader has to be read as it is; empty if nothing speaks against workers."""
    if loader.num_workers:
        return f"it has {loader.num_workers} of the script's own"
    if any(name not in vars(loader) for name in _NEEDED):
        return "its class computes its settings"
    if isinstance(loader.dataset, IterableDataset):
        return "its dataset makes the batches, and each worker would make all of them"
    if not loader._auto_collation:
        return "its samples aren't collated, and the script may write into those of the dataset"
    if loader.timeout or isinstance(loader.dataset, MapDataPipe):
        return "torch treats it in another way with workers"
    if multiprocessing.current_process().daemon:
        return "this process may have no children"
    if not _forks():
        return "processes aren't forked here, so that the dataset would have to be pickled"
    if not _can_be_copied(loader.batch_sampler):
        return "its sampler isn't one of torch's, and may choose a batch by what came before it"
    return ""


def _forks() -> bool:
    """True if the script's processes are forked; the first method of all is the default one."""
    chosen = multiprocessing.get_start_method(allow_none=True)
    return (chosen or multiprocessing.get_all_start_methods()[0]) == "fork"


def _can_be_copied(batches: Any) -> bool:
    """True if a copy of a sampler chooses the same batches, and leaves no trace."""
    inner = batches.sampler if type(batches) is BatchSampler else batches
    return type(inner) in _SAMPLERS


_ATOMS = (str, bytes, int, float, complex, type(None))


CHANGES = "reading changes what its dataset holds, such as a count or a cache"


class Holdings:
    """What a DataLoader's dataset and collate function hold at a time.

    Args:
        loader: The DataLoader, or torch's fetcher of its iterator.
    """

    def __init__(self, loader: Any) -> None:
        self._states = [
            (held, _state(held, children))
            for held, children in held_by(loader.dataset, loader.collate_fn)
            if not _is_fixed(held, children)
        ]

    def have_changed(self) -> bool:
        """True if anything of it holds something else by now."""
        return any(_state(held, held_directly(held)) != state for held, state in self._states)


def _is_fixed(held: Any, children: list[Any]) -> bool:
    """True if what it holds can't change: a tuple, as ImageFolder has for each of its files."""
    return type(held) is tuple and all(isinstance(child, _ATOMS) for child in children)


def _state(held: Any, children: list[Any]) -> Any:
    if isinstance(held, Tensor):
        return 0 if held.is_inference() else held._version
    try:
        count = len(held) if isinstance(held, (dict, list, tuple, set, frozenset)) else 0
    except Exception:  # noqa: BLE001 - a subclass may do anything
        count = 0
    return count, [one if isinstance(one, _ATOMS) else id(one) for one in children]


_NOT_SHARED = {  # classes, or the modules of all of them, of which a fork has no use
    *("threading.Thread", "subprocess.Popen", "socket.socket", "sqlite3.Connection"),
    *("concurrent.futures", "queue", "multiprocessing.queues", "multiprocessing.sharedctypes"),
    *("multiprocessing.connection", "multiprocessing.pool", "multiprocessing.managers"),
    *("multiprocessing.synchronize", "multiprocessing.shared_memory"),
}


def why_here(loader: Any) -> str:
    """Return why only this process can read what a DataLoader reads; empty if others can."""
    ties = (_tie(held) for held, _ in held_by(loader.dataset, loader.collate_fn))
    return next(filter(None, ties), "")


def _tie(held: Any) -> str:
    """Return why something that a dataset holds keeps it in this process; empty if it doesn't."""
    if isinstance(held, Tensor):
        away = held.device.type != "cpu"
        return "its dataset is on a device, which a worker can't use" if away else ""
    kinds = type(held).__mro__
    names = [f"{module_name(kind)}.{kind.__qualname__}" for kind in kinds]
    draws = isinstance(held, (Generator, random.Random)) or "numpy.random" in names[0]
    if draws:
        return "its dataset draws by a generator of its own, which workers would each copy"
    if isinstance(held, GeneratorType):
        return "its dataset holds a generator, which workers would each copy"
    for kind, name in zip(kinds, names, strict=True):
        module = module_name(kind).removeprefix("_")  # some are written in C
        packages = {module, module.rpartition(".")[0], name}
        if packages & _NOT_SHARED:
            return f"its dataset holds a {name}, which a forked process can't share"
    return ""
