"""Whole tensors that share their numbers with shards, as views share memory in one process.

In one process ``state_dict()``, ``weight.data.numpy()`` and ``weight.data[0]`` use the memory of
the parameter: what is changed in the one is changed in the other. A shard and its whole tensor have
memory of their own. So a whole tensor that a script was given stays known here as long as anything
uses its memory. Its rows are copied into the shard before that is used, and it is gathered again
after the shard was changed; what nothing but a checkpoint refers to, when it is next read.

Every rank runs the same lines, so that all know of the same tensors and gather together. When the
last use of one ends is not the same on all ranks, since it may take Python's garbage collector:
they agree on it.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fasttrain.shim.data_parallel.ranks import Ranks
from fasttrain.shim.hooks.containers import map_tensors

_BASE = "_fasttrain_base"  # attribute of a detached shard: the one whose memory it uses
_OF_ITSELF = {"__set__", "requires_grad_"}  # functions that change a tensor and not its numbers
STALE_EVERY = 50  # calls of models: how often it is asked which of the stale ones are kept
_READ_LATER, _USED = 1, 1_000_000  # what each rank adds for a tensor that it keeps; more than ranks


class _Copy:
    """A whole tensor of a shard.

    Attributes:
        whole: None where nothing on this rank uses its memory any more.
        lent: Refers to the `LentTensor` of it, if there is one.
        later: True if a change of the shard is to make it stale; the same on all ranks.
        stale: True if it is to be gathered before anyone reads it; the same on all ranks.
    """

    def __init__(self, shard: Any) -> None:
        self.shard = shard
        self.whole: Tensor | None = None
        self.lent: Callable[[], Any] = lambda: None
        self.later = self.stale = False

    def fill_shard(self) -> None:
        """Copy this rank's rows of the whole tensor into the shard."""
        if self.whole is None or self.stale:
            return
        rows = self.whole
        mesh = self.shard.device_mesh
        for at, placement in enumerate(self.shard.placements):
            if placement.is_shard():
                parts = rows.chunk(mesh.size(at), placement.dim)
                rank = mesh.get_local_rank(at)
                rows = parts[rank] if rank < len(parts) else rows.narrow(placement.dim, 0, 0)
        self.shard.detach().to_local().copy_(rows)

    def gather(self) -> None:
        """Copy the shards of all ranks into the whole tensor, if there is one: a collective."""
        found = self.shard.detach().full_tensor()
        self.stale = False
        if self.whole is not None:
            self.whole.copy_(found)

    def have(self) -> None:
        """Have a whole tensor that is up to date: a collective.

        Nothing is written into one that is, since autograd would notice.
        """
        found = self.shard.detach().full_tensor()
        if self.whole is None:
            self.whole = found.clone() if is_used(found) else found
        elif self.stale:
            self.whole.copy_(found)
        self.stale = False

    def free_if_stale(self, _: object) -> None:
        """Free the whole tensor once nobody can read it: a stale one has no views."""
        if self.stale:
            self.whole = None

    def uses(self, known: Counter[int]) -> int:
        """Return how this rank uses the whole tensor.

        Args:
            known: How many of the tensors that are looked at use each storage.
        """
        if self.whole is None:
            return 0
        storage: Any = self.whole.untyped_storage()
        lent = self.lent() is not None
        uses: int = torch._C._storage_Use_Count(storage._cdata)
        others = uses - known[storage._cdata] - lent - 1  # and `storage`
        return _USED if others > 0 else _READ_LATER if lent else 0


class LentTensor(Tensor):
    """A whole tensor that is gathered again when it is read after its shard was changed."""

    of: _Copy

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch on the tensor as it is now."""
        if func.__name__ in _OF_ITSELF and isinstance(args[0], LentTensor):
            with torch._C.DisableTorchFunctionSubclass():
                return func(args[0], *current(args[1:]))
        return func(*current(args), **current(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return a plain copy of the tensor as it is now."""
        plain: Any = _current(self)
        copied: Tensor = plain.__deepcopy__(memo)
        # It was noted by the id of a tensor that is about to be gone, which another one may get.
        memo.pop(id(plain), None)
        return copied


def current(value: Any) -> Any:
    """Return a value with plain tensors, up to date, in the places of `LentTensor`s."""
    return map_tensors(value, _current)


def _current(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, LentTensor):
        return tensor
    with _quietly():
        if tensor.of.stale and COPIES.may_gather():
            tensor.of.gather()
        return tensor.as_subclass(Tensor)


class WholeCopies:
    """The whole tensors of shards that the script may have.

    Attributes:
        tell: Called with sentences for the receipt, which has each once.
    """

    def __init__(self) -> None:
        self.tell: Callable[[str], None] = lambda _: None
        self._ranks: Ranks | None = None
        self._known: dict[int, _Copy] = {}  # by the shard's id; the same shards on all ranks
        self._last = _Copy(None)  # the one that was asked for last
        self._calls = 0
        self._thread = 0  # the last one that called a model

    def __len__(self) -> int:
        return len(self._known)

    def begin(self, ranks: Ranks, tell: Callable[[str], None]) -> None:
        """Note by whom to agree, and whom to tell."""
        self._ranks, self.tell = ranks, tell

    def share(self, shard: Any) -> Tensor:
        """Return a whole tensor whose changes in place are changes of the shard: a collective.

        Returns:
            A tensor without gradient. A copy, if the shard is the same on all ranks.
        """
        with _quietly():
            copy = self._known_copy(shard)
            return shard.detach().full_tensor() if copy is None else copy.whole.detach()  # type: ignore[no-any-return]

    def lend(self, shard: Any) -> Tensor:
        """Return the same, gathered again only when it is read: for checkpoints that are kept."""
        with _quietly():
            copy = self._known_copy(shard)
            if copy is None:
                return shard.detach().full_tensor()  # type: ignore[no-any-return]
            lent: Any = copy.lent()
            if lent is None:
                lent = copy.whole.as_subclass(LentTensor)
                lent.of = copy
                copy.lent = weakref.ref(lent, copy.free_if_stale)
            return lent  # type: ignore[no-any-return]

    def _known_copy(self, shard: Any) -> Any:
        """Return the copy of a shard, up to date; None if the shard is the same on all ranks."""
        base = base_of(shard)
        if not any(placement.is_shard() for placement in base.placements):
            return None
        if id(base) not in self._known:
            self._known[id(base)] = _Copy(base)
        copy = self._known[id(base)]
        if self._last is not copy:
            self._settle([self._last])  # of which no view may be used any more
        self._settle([copy])
        self._last = copy
        copy.have()
        return copy

    def adopt(self, shard: Any, whole: Tensor | None) -> None:
        """Have a tensor share its numbers with a shard that was made of it.

        Every rank must call this, with None where nothing else uses the tensor's memory.
        """
        self.forget(shard)
        copy = self._known[id(shard)] = _Copy(shard)
        if whole is not None and whole.device == shard.device:
            copy.whole = whole.detach()

    def forget(self, shard: Any) -> None:
        """Have nothing share its numbers with a shard, whose memory is another one now."""
        copy = self._known.pop(id(shard), None)
        if copy is self._last:
            self._last = _Copy(None)
        if copy is not None and copy.stale:
            with _quietly():
                copy.gather()

    def settle(self, shards: Iterable[Any]) -> None:
        """Copy into some shards what the script has changed in their whole tensors."""
        if self._known:
            self._settle(self._among(shards))

    def _among(self, shards: Iterable[Any]) -> list[_Copy]:
        """Return what is known of some shards, but for what isn't read before it is gathered."""
        keys = dict.fromkeys(id(base_of(shard)) for shard in shards)
        return [self._known[k] for k in keys if k in self._known and not self._known[k].stale]

    def _settle(self, copies: Iterable[_Copy]) -> None:
        """Copy into shards what the script has changed, and free what nobody uses."""
        held = [copy for copy in copies if copy.whole is not None]
        if not held:
            return
        with _quietly():
            known = _storages(held)
            for copy in held:
                copy.fill_shard()
                if not copy.uses(known):
                    copy.whole = None

    def may_gather(self) -> bool:
        """True in the thread that calls the model: ranks can't gather in two threads at once.

        Another one, such as one that saves meanwhile, gets what was gathered last.
        """
        same = threading.get_ident() == self._thread
        if not same:
            self.tell(
                "another thread than the one that trains reads a state_dict() that is kept while"
                " parameters change: it gets them as they were when it was last read"
            )
        return same

    def agree(self) -> None:
        """Forget the tensors that no rank uses any more: a collective, if there are any.

        A call of a model begins with it.
        """
        self._thread = threading.get_ident()
        self._last = _Copy(None)
        self._calls += 1
        rarely = self._calls % STALE_EVERY == 0
        self._agree([c for c in self._known.values() if rarely or not c.stale])

    def _agree(self, copies: list[_Copy]) -> None:
        """Settle some, and note how all ranks use them: a collective, if there are any."""
        if not copies or self._ranks is None:
            return
        self._settle(copies)
        with _quietly():
            known = _storages(copies)
            uses = [float(copy.uses(known)) for copy in copies]
            device = copies[0].shard.device
            totals = self._ranks.sum(torch.tensor(uses, device=device)).tolist()
        for copy, total in zip(copies, totals, strict=True):
            # What is only lent is gathered when it is read, unless a view of it is used elsewhere.
            copy.later = total < _USED
            if not total:
                del self._known[id(copy.shard)]

    @contextmanager
    def changing(self, shards: Iterable[Any]) -> Iterator[None]:
        """Gather what the block changes in shards after it: a collective, if any are known."""
        if not self._known:
            yield
            return
        self._agree(self._among(shards))
        try:
            yield
        finally:
            self._update(self._among(shards))

    def before_backward(self) -> None:
        """Agree on gradients: a backward pass may add to them."""
        self._agree(self._of_gradients())

    def after_backward(self) -> None:
        """Gather gradients again to which a backward pass may have added."""
        self._update(self._of_gradients())

    def _of_gradients(self) -> list[_Copy]:
        """Return what isn't of a parameter."""
        found = (copy for copy in self._known.values() if not copy.stale)
        return [copy for copy in found if not isinstance(copy.shard, nn.Parameter)]

    def _update(self, copies: Iterable[_Copy]) -> None:
        """Gather what has changed in shards, or mark it to be gathered."""
        for copy in copies:
            if copy.later:
                copy.stale = True
                continue
            with _quietly():
                copy.gather()
            if copy.whole is not None:
                self.tell(
                    "the script uses the memory of whole parameters or states while they change"
                    " (such as views of weight.data): they are gathered again after each change"
                )


def _storages(copies: Iterable[_Copy]) -> Counter[int]:
    """Count the whole tensors in each storage; layers of a recurrent module may share one."""
    wholes: Iterable[Any] = [copy.whole for copy in copies]
    return Counter(each.untyped_storage()._cdata for each in wholes if each is not None)


COPIES = WholeCopies()  # of this process: what is known of a shard is known to all that get it


def base_of(shard: Any) -> Any:
    """Return the shard of whose memory a detached one is; a parameter is made by detaching."""
    return shard if isinstance(shard, nn.Parameter) else getattr(shard, _BASE, shard)


def set_base(detached: Any, shard: Any) -> Any:
    """Return a detached shard, noting of whose memory it is."""
    if detached is not shard:
        setattr(detached, _BASE, base_of(shard))
    return detached


def is_used(tensor: Tensor) -> bool:
    """True if anything but this tensor uses its memory."""
    storage: Any = tensor.untyped_storage()
    return bool(torch._C._storage_Use_Count(storage._cdata) > 2)  # the tensor, and `storage`


@contextmanager
def _quietly() -> Iterator[None]:
    """Have torch run on shards as they are, seen by neither autograd nor inference mode."""
    with (
        torch._C.DisableTorchFunctionSubclass(),
        torch.inference_mode(mode=False),
        torch.no_grad(),
    ):
        yield
