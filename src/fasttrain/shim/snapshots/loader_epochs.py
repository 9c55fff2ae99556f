"""Tracks epochs over DataLoaders; each request for a batch is a *turn*, the run's unit of time."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data.dataloader import _BaseDataLoaderIter

from fasttrain.model.errors import FasttrainError
from fasttrain.shim.hooks import patching
from fasttrain.shim.hooks.seams import Loading
from fasttrain.shim.snapshots.batches import (
    KeptNumbers,
    Signature,
    draws_by_torch,
    own_states,
    plain_signature,
    set_own_states,
    signature_of,
)
from fasttrain.shim.snapshots.files import refuse_diverged
from fasttrain.shim.snapshots.object_states import RandomStates, same
from fasttrain.shim.snapshots.replayed_epochs import (
    EarlierEpochs,
    Epoch,
    ReplayedIterator,
    positions,
)
from fasttrain.shim.snapshots.script_tensors import DATA

# Tools that keep batches and yield them again without asking a DataLoader, by type. In a replay
# they would keep stand-in batches, and the loop would later train on those.
_KEEPING = {"cycle": "itertools.cycle", "_tee_dataobject": "itertools.tee"}


class StoredError(Exception):
    """Raised if itertools holds batches that the loop will train on."""


def stored_by(iterators: list[Any]) -> str:
    """Return the tool of itertools that keeps batches of these iterators; empty if none does.

    It searches all objects that the garbage collector knows, which takes a tenth of a second.
    """
    holders = gc.get_referrers(*iterators) if iterators else []
    kinds = [type(one).__name__ for one in holders if type(one).__module__ == "itertools"]
    return next((_KEEPING[kind] for kind in kinds if kind in _KEEPING), "")


def stored(by: str) -> FasttrainError:
    """Return the error for a loop whose batches itertools keeps."""
    return FasttrainError(
        "--preempt snapshot can't follow this loop",
        why=f"{by} keeps the batches of a DataLoader to yield them again, and they can't be saved"
        " from there",
        fix="iterate over the loader again instead: while True: for batch in loader: yield batch",
        slug="snapshot-cycle",
    )


_OWN = "_fasttrain_epoch"  # attribute of an iterator


class LoaderEpochs:
    """All epochs of this process.

    Attributes:
        turn: Number of batches that the script has requested.
        inside: True while a loader is being read.
        list: The epochs so far.
        states: The states of all generators, except for a loader's own.
        earlier: The epochs of the run that took the snapshot; None once this run has caught up.
        untrained: Number of batches yielded with gradients enabled since the last step.
        on_turn: Called before each batch.
        numbers: Takes lengths and offsets in batches into their signatures.
        dealt: Batches of the loader per batch of this rank: the number of ranks where they deal
            the batches out among them, else 1.
    """

    def __init__(self, states: RandomStates) -> None:
        self.turn = self.untrained = 0
        self.inside = self._same = False
        self._last: Epoch | None = None  # the epoch of the last batch
        self.list: list[Epoch] = []
        self.states = states
        self.earlier: EarlierEpochs | None = None
        self.on_turn: Callable[[], None] = lambda: None
        self.numbers = KeptNumbers()
        self.dealt = 1
        self._signatures: dict[Signature, int] = {}  # all signatures so far, numbered
        self._loaders: list[weakref.ref[DataLoader[Any]]] = []
        self._ended: Epoch | None = None  # the last to end, until another begins
        self._uncut: Any = None  # sampler iterator of the newest loader iterator
        self._make: Any = DataLoader.__iter__

    def prepare(self, undo: ExitStack) -> None:
        """Note sampler iterators before they are cut among ranks: skipping a batch needs them."""
        for name in ("__init__", "_reset"):
            patching.wrap(_BaseDataLoaderIter, name, self._noting, undo, Loading.SNAPSHOT_ORDER)

    def install(self, undo: ExitStack) -> None:
        """Wrap the iterators of DataLoaders, outside of all other wrappers."""
        patching.wrap(DataLoader, "__iter__", self._beginning, undo)
        patching.wrap(_BaseDataLoaderIter, "__next__", self._taking, undo, Loading.SNAPSHOTS)

    def _beginning(self, make: Any) -> Any:
        epochs = self
        epochs._make = make

        @functools.wraps(make)
        def __iter__(loader: Any) -> Any:  # noqa: N807
            if get_worker_info() is not None or epochs.inside:
                return make(loader)
            return epochs._begin(loader)

        return __iter__

    def _taking(self, read: Any) -> Any:
        epochs = self

        @functools.wraps(read)
        def __next__(iterator: Any) -> Any:  # noqa: N807
            epoch = getattr(iterator, _OWN, None)
            if epoch is None or epochs.inside:
                return read(iterator)
            return epochs.take(epoch, read, iterator)

        return __next__

    def _noting(self, original: Any) -> Any:
        """Keep the sampler iterator of a new loader iterator before it is cut among ranks."""

        @functools.wraps(original)
        def noting(iterator: Any, *args: Any, **kwargs: Any) -> None:
            original(iterator, *args, **kwargs)
            self._uncut = iterator._sampler_iter

        return noting

    def _begin(self, loader: Any) -> Any:
        number, place = len(self.list), self._number(loader)
        made = self.states_of(loader)
        epoch = Epoch(place, _description(loader), {"made": made}, reads_from=loader)
        # Nothing drawn since the last epoch's end: a replay needn't restore the state there.
        if self._ended is not None and same(self._ended.end, made["all"]):
            self._ended.end = None
        self._ended = None
        if self.earlier is not None:
            self.earlier.meet(number, epoch.reads)
        self.list.append(epoch)
        if self.earlier is not None:
            iterator: Any = ReplayedIterator(self, loader, epoch, number)
        else:
            iterator = self.made(loader)
            setattr(iterator, _OWN, epoch)
        epoch.of(iterator)
        return iterator

    def made(self, loader: Any) -> Any:
        """Return a loader's own iterator."""
        before, self.inside = self.inside, True
        try:
            return self._make(loader)
        finally:
            self.inside = before

    def leave_out(self, iterator: Any) -> None:
        """Skip a batch of the newest iterator without reading it."""
        cut = iterator._sampler_iter is not self._uncut
        with self.states.of_order():
            for _ in range(self.dealt if cut else 1):
                next(self._uncut, None)

    def states_of(self, loader: Any) -> dict[str, Any]:
        """Return the states of all generators, including a loader's own."""
        return {"all": self.states.capture(), "own": own_states(loader)}

    def put(self, loader: Any, states: dict[str, Any]) -> None:
        """Restore states that `states_of` has returned."""
        self.states.restore(states["all"])
        set_own_states(loader, states["own"])

    @contextmanager
    def states_kept(self, loader: Any) -> Iterator[None]:
        """Restore the states of all generators after the block."""
        now = self.states_of(loader)
        try:
            yield
        finally:
            self.put(loader, now)

    def data_sets(self) -> Iterator[tuple[str, Any]]:
        """Yield the data sets that can still be read, and what makes batches, with names."""
        for number, ref in enumerate(self._loaders):
            if (loader := ref()) is not None:
                yield f"loader {number}", loader.dataset
                yield f"{DATA} (batches of loader {number})", _owner(loader.collate_fn)
        for number, iterator in self._living():  # their loaders may be gone
            yield f"epoch {number}", iterator._dataset
            yield f"{DATA} (batches of epoch {number})", _owner(iterator._collate_fn)

    def stored_by(self) -> str:
        """Return the tool of itertools that keeps batches; empty if none does."""
        return stored_by([iterator for _, iterator in self._living()])

    def _living(self) -> Iterator[tuple[int, Any]]:
        """Yield the iterators of epochs that have not ended."""
        for number, epoch in enumerate(self.list):
            if epoch.iterator is not None and (iterator := epoch.iterator()) is not None:
                yield number, iterator

    def _number(self, loader: Any) -> int:
        for number, ref in enumerate(self._loaders):
            if ref() is loader:
                return number
        self._loaders.append(weakref.ref(loader))
        return len(self._loaders) - 1

    def take(self, epoch: Epoch, read: Callable[[Any], Any], iterator: Any) -> Any:
        """Count a turn and return its batch."""
        self.turn += 1
        self._same = epoch is self._last
        self.on_turn()
        if not epoch.batches:
            self._begin_reading(epoch)
        self.inside = True
        try:
            data = read(iterator)
        except StopIteration:
            self._end(epoch)
            raise
        finally:
            self.inside = False
        epoch.batches += 1
        self._last = epoch
        if torch.is_grad_enabled():
            self.untrained += 1
        # Inlined: a function called once a batch meets cold caches, and costs microseconds.
        if type(data) in (list, tuple):
            signature = [
                part.shape if type(part) is Tensor else signature_of(part) for part in data
            ]
        else:
            signature = signature_of(data)
        if signature == epoch.signature and epoch.signatures:
            epoch.signatures[-1] += 1
        else:
            epoch.signature = signature
            self._note_signature(epoch, data)
        return data

    def _note_signature(self, epoch: Epoch, data: Any) -> None:
        signature = signature_of(data, self.numbers.signature_of)
        epoch.signatures += (self._signatures.setdefault(signature, len(self._signatures)), 1)

    def _begin_reading(self, epoch: Epoch) -> None:
        """Note the generators' states before the first batch: some samplers only draw now."""
        replaying = self.earlier is not None and self.earlier.replaying
        loader = epoch.reads_from
        if epoch.start is None or loader is None or replaying:
            return
        if draws_by_torch(loader) and not self.states.of_several:
            others = epoch.start["made"]["all"]  # generators that these samplers don't draw from
            states = {**others, "torch": torch.default_generator.get_state()}
        else:
            states = self.states.capture()
        epoch.start["first"] = {"all": states, "own": own_states(loader)}

    def _end(self, epoch: Epoch) -> None:
        epoch.ended = True
        epoch.leave()
        if self.earlier is None or not self.earlier.replaying:
            epoch.end, self._ended = self.states.capture(), epoch
        elif epoch.end is not None:  # the script draws next, maybe to make its next epoch's data
            self.states.restore(epoch.end)

    @property
    def quiet(self) -> bool:
        """True if no batch and no loss of a coming step is held anywhere.

        An autograd graph can't be restored, nor a batch that is in no variable, such as the first
        one of a zip over two loaders.
        """
        return not self.untrained and (torch.is_grad_enabled() or self._same)

    @property
    def reading(self) -> bool:
        """True if an epoch has epoch and not ended."""
        return any(epoch.batches and epoch.iterator is not None for epoch in self.list)

    # --- snapshots

    def state(self) -> dict[str, Any]:
        """Return the positions of all epochs, and the states of the loaders' own generators."""
        return {
            "passes": [epoch.fields() for epoch in self.list],
            "looks": list(map(plain_signature, self._signatures)),
            "loaders": [own_states(ref()) for ref in self._loaders],
        }

    def replay(self, state: dict[str, Any]) -> None:
        """Start to replay these epochs."""
        epochs = [Epoch(*fields) for fields in state["passes"]]
        self.earlier = EarlierEpochs(epochs, state["looks"])

    def arrive(self, state: dict[str, Any]) -> None:
        """End the replay: read from the loaders themselves again.

        Raises:
            SystemExit: ``snapshot-diverged`` if the script has requested other batches.
        """
        earlier, self.earlier = self.earlier, None
        then = earlier.list if earlier is not None else []
        if positions(self.list) != positions(then):
            refuse_diverged("it has requested other batches from its DataLoaders")
        for epoch, before in zip(self.list, then, strict=True):
            epoch.start, epoch.ended = before.start, before.ended
        for ref, states in zip(self._loaders, state["loaders"], strict=True):
            set_own_states(ref(), states)


def _owner(function: Any) -> Any:
    """Return the object of a method, which may hold a generator; anything else as it is."""
    return getattr(function, "__self__", function)


def _description(loader: Any) -> str:
    """Describe in words what a loader reads, without reading."""
    try:
        count = str(len(loader.dataset))
    except Exception:  # noqa: BLE001 - a stream without a length may raise anything
        count = ""
    return f"{count} samples of {type(loader.dataset).__name__} by {loader.batch_size}"
