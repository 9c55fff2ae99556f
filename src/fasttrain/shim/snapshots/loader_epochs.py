"""Passes over DataLoaders: every batch that is asked for is a *turn*, the clock of the run."""

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
from fasttrain.shim.snapshots.batch_signature import Look, look_of, plain_look
from fasttrain.shim.snapshots.errors import refuse_diverged
from fasttrain.shim.snapshots.random_states import RandomStates, same
from fasttrain.shim.snapshots.replayed_epochs import EarlierPasses, Pass, Replayed, places
from fasttrain.shim.snapshots.samplers import draws_by_torch, own_states, set_own_states

# Batches that itertools keeps, to give them again without asking a DataLoader.
#
# In a replay it would keep those that stand in for others, and the loop would train on them
# later.


_KEEPING = {"cycle": "itertools.cycle", "_tee_dataobject": "itertools.tee"}


class StoredError(Exception):
    """Some of what the loop will train on is held where it can't be found."""


def stored_by(iterators: list[Any]) -> str:
    """Return what of itertools keeps what one of these iterators gives; empty where nothing does.

    It looks through all that the garbage collector knows: a tenth of a second's work.
    """
    holders = gc.get_referrers(*iterators) if iterators else []
    kinds = [type(one).__name__ for one in holders if type(one).__module__ == "itertools"]
    return next((_KEEPING[kind] for kind in kinds if kind in _KEEPING), "")


def stored(by: str) -> FasttrainError:
    """Return the error for it."""
    return FasttrainError(
        "--preempt snapshot can't follow this loop",
        why=f"{by} keeps the batches of a DataLoader and gives them again, where they can't be"
        " brought back",
        fix="begin the loader again instead: while True: for batch in loader: yield batch",
        slug="snapshot-cycle",
    )


_OWN = "_fasttrain_pass"  # attribute of an iterator


class LoaderPasses:
    """All passes of this process.

    Attributes:
        turn: Batches that the script has asked for.
        inside: Whether a loader is being read at the moment.
        list: The passes so far.
        states: The states of the generators that are not a loader's own.
        earlier: The passes of the run before, until this one has come to where that one was.
        untrained: Batches that were given with gradients enabled, behind the last step.
        on_turn: Called before each batch.
        dealt: Batches of a loader for one of this rank, where its batches are dealt to the ranks.
    """

    def __init__(self, states: RandomStates) -> None:
        self.turn = self.untrained = 0
        self.inside = self._same = False
        self._last: Pass | None = None  # of which a batch was given last
        self.list: list[Pass] = []
        self.states = states
        self.earlier: EarlierPasses | None = None
        self.on_turn: Callable[[], None] = lambda: None
        self.dealt = 1
        self._looks: dict[Look, int] = {}  # of all batches, with their numbers
        self._loaders: list[weakref.ref[DataLoader[Any]]] = []
        self._ended: Pass | None = None  # behind which none has begun yet
        self._uncut: Any = None  # batches of indices of the iterator that was made last
        self._make: Any = DataLoader.__iter__

    def prepare(self, undo: ExitStack) -> None:
        """Be able to leave out batches, beneath what cuts them among ranks."""
        for name in ("__init__", "_reset"):
            patching.wrap(_BaseDataLoaderIter, name, self._noting, undo, Loading.SNAPSHOT_ORDER)

    def install(self, undo: ExitStack) -> None:
        """Follow iterators of DataLoaders, around whatever else does."""
        patching.wrap(DataLoader, "__iter__", self._beginning, undo)
        patching.wrap(_BaseDataLoaderIter, "__next__", self._taking, undo, Loading.SNAPSHOTS)

    def _beginning(self, make: Any) -> Any:
        passes = self
        passes._make = make

        @functools.wraps(make)
        def __iter__(loader: Any) -> Any:  # noqa: N807
            if get_worker_info() is not None or passes.inside:
                return make(loader)
            return passes._begin(loader)

        return __iter__

    def _taking(self, read: Any) -> Any:
        passes = self

        @functools.wraps(read)
        def __next__(iterator: Any) -> Any:  # noqa: N807
            begun = getattr(iterator, _OWN, None)
            if begun is None or passes.inside:
                return read(iterator)
            return passes.take(begun, read, iterator)

        return __next__

    def _noting(self, original: Any) -> Any:
        """Keep what a new iterator draws its order from, before that is cut among ranks."""

        @functools.wraps(original)
        def noting(iterator: Any, *args: Any, **kwargs: Any) -> None:
            original(iterator, *args, **kwargs)
            self._uncut = iterator._sampler_iter

        return noting

    def _begin(self, loader: Any) -> Any:
        number, place = len(self.list), self._number(loader)
        made = self.states_of(loader)
        begun = Pass(place, _told(loader), {"made": made}, reads_from=loader)
        if self._ended is not None and same(self._ended.end, made["all"]):
            self._ended.end = None
        self._ended = None
        if self.earlier is not None:
            self.earlier.meet(number, begun.reads)
        self.list.append(begun)
        if self.earlier is not None:
            iterator: Any = Replayed(self, loader, begun, number)
        else:
            iterator = self.made(loader)
            setattr(iterator, _OWN, begun)
        begun.of(iterator)
        return iterator

    def made(self, loader: Any) -> Any:
        """Return a loader's own iterator."""
        before, self.inside = self.inside, True
        try:
            return self._make(loader)
        finally:
            self.inside = before

    def leave_out(self, iterator: Any) -> None:
        """Have the iterator that was made last leave a batch out, without reading it."""
        cut = iterator._sampler_iter is not self._uncut
        with self.states.of_order():
            for _ in range(self.dealt if cut else 1):
                next(self._uncut, None)

    def states_of(self, loader: Any) -> dict[str, Any]:
        """Return the states of all generators, and of a loader's own."""
        return {"all": self.states.capture(), "own": own_states(loader)}

    def put(self, loader: Any, states: dict[str, Any]) -> None:
        """Put generators into states that `states_of` gave."""
        self.states.restore(states["all"])
        set_own_states(loader, states["own"])

    @contextmanager
    def states_kept(self, loader: Any) -> Iterator[None]:
        """Put all generators back behind what is done inside."""
        now = self.states_of(loader)
        try:
            yield
        finally:
            self.put(loader, now)

    def data_sets(self) -> Iterator[tuple[str, Any]]:
        """Yield what can still be read, with names for it."""
        for number, ref in enumerate(self._loaders):
            if (loader := ref()) is not None:
                yield f"loader {number}", loader.dataset
        for number, iterator in self._living():  # whose loaders may be gone
            yield f"pass {number}", iterator._dataset

    def stored_by(self) -> str:
        """Return what keeps batches to give them again without a turn; empty where nothing does."""
        return stored_by([iterator for _, iterator in self._living()])

    def _living(self) -> Iterator[tuple[int, Any]]:
        """Yield the iterators of passes that have not come to their end."""
        for number, begun in enumerate(self.list):
            if begun.iterator is not None and (iterator := begun.iterator()) is not None:
                yield number, iterator

    def _number(self, loader: Any) -> int:
        for number, ref in enumerate(self._loaders):
            if ref() is loader:
                return number
        self._loaders.append(weakref.ref(loader))
        return len(self._loaders) - 1

    def take(self, begun: Pass, read: Callable[[Any], Any], iterator: Any) -> Any:
        """Count a turn and give its batch."""
        self.turn += 1
        self._same = begun is self._last
        self.on_turn()
        if not begun.batches:
            self._begin_reading(begun)
        self.inside = True
        try:
            data = read(iterator)
        except StopIteration:
            self._end(begun)
            raise
        finally:
            self.inside = False
        begun.batches += 1
        self._last = begun
        if torch.is_grad_enabled():
            self.untrained += 1
        # Each function that is called at every batch meets cold caches, and costs microseconds.
        if type(data) in (list, tuple):
            look = [part.shape if type(part) is Tensor else look_of(part) for part in data]
        else:
            look = look_of(data)
        if look == begun.look and begun.looks:
            begun.looks[-1] += 1
        else:
            begun.look = look
            self._looks_new(begun, data)
        return data

    def _looks_new(self, begun: Pass, data: Any) -> None:
        begun.looks += self._looks.setdefault(look_of(data), len(self._looks)), 1

    def _begin_reading(self, begun: Pass) -> None:
        """Note how it stands before a pass's first batch: an order may only be drawn now."""
        replaying = self.earlier is not None and self.earlier.replaying
        loader = begun.reads_from
        if begun.start is None or loader is None or replaying:
            return
        if draws_by_torch(loader) and not self.states.of_several:
            others = begun.start["made"]["all"]  # of which no order is drawn
            states = {**others, "torch": torch.get_rng_state()}
        else:
            states = self.states.capture()
        begun.start["first"] = {"all": states, "own": own_states(loader)}

    def _end(self, begun: Pass) -> None:
        begun.ended = True
        begun.leave()
        if self.earlier is None or not self.earlier.replaying:
            begun.end, self._ended = self.states.capture(), begun
        elif begun.end is not None:
            self.states.restore(begun.end)

    @property
    def quiet(self) -> bool:
        """Return whether no batch and no loss of a step that is still to come is held anywhere.

        What the script holds beside its variables, such as the first batch of a zip over two
        loaders, and the graph of a loss, can't be brought back.
        """
        return not self.untrained and (torch.is_grad_enabled() or self._same)

    @property
    def reading(self) -> bool:
        """Return whether a pass that began is not at its end yet."""
        return any(begun.batches and begun.iterator is not None for begun in self.list)

    # --- snapshots

    def state(self) -> dict[str, Any]:
        """Return where all passes are, and the states of the loaders' own generators."""
        return {
            "passes": [begun.fields() for begun in self.list],
            "looks": list(map(plain_look, self._looks)),
            "loaders": [own_states(ref()) for ref in self._loaders],
        }

    def replay(self, state: dict[str, Any]) -> None:
        """Go through these passes again."""
        passes = [Pass(*fields) for fields in state["passes"]]
        self.earlier = EarlierPasses(passes, state["looks"])

    def arrive(self, state: dict[str, Any]) -> None:
        """Read from the loaders themselves again.

        Raises:
            SystemExit: ``snapshot-diverged`` when the script has asked for other batches.
        """
        earlier, self.earlier = self.earlier, None
        then = earlier.list if earlier is not None else []
        if places(self.list) != places(then):
            refuse_diverged("it has asked its DataLoaders for other batches")
        for begun, before in zip(self.list, then, strict=True):
            begun.start, begun.ended = before.start, before.ended
        for ref, states in zip(self._loaders, state["loaders"], strict=True):
            set_own_states(ref(), states)


def _told(loader: Any) -> str:
    """Return what a loader reads, as far as it can be told without reading."""
    try:
        count = str(len(loader.dataset))
    except Exception:  # noqa: BLE001 - whatever a stream says that has no length
        count = ""
    return f"{count} samples of {type(loader.dataset).__name__} by {loader.batch_size}"
