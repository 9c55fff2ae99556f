"""One root on every rank, whose gradients torch's DistributedDataParallel averages.

The DistributedDataParallel object stands beside the module and not around it: the script's module
keeps its type, keys, pickles and deep copies. The first backward passes are averaged by hand,
and show whether every parameter gets a gradient on every rank; how much the object has to watch
follows from that.

It averages only a pass that gives every parameter a gradient. Whether it did is plain to see where
no parameter had one before the pass; else each bucket has to tell, which costs a call of Python's
from within the backward pass.
"""

from __future__ import annotations

import inspect
import operator
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fasttrain.shim.averaging import average_gradients
from fasttrain.shim.ranks import Ranks
from fasttrain.shim.roots import parameters_of

# Its name up to torch 2.12, and since.
_SYNC_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel.__init__).parameters
)
PROBES = 2  # backward passes that are averaged by hand to see which parameters take part
FAILURES = 4  # passes that the object did not see whole, after which it is left out


_WANTS_GRADIENT = operator.attrgetter("requires_grad")  # without a frame of Python's for each


def _calling(module: nn.Module) -> Callable[..., Any]:
    """Give what calls a module without keeping it alive."""
    ref: Any = weakref.ref(module)

    def call(*args: Any, **kwargs: Any) -> Any:
        return ref()(*args, **kwargs)

    return call


class Replica:
    """The data-parallel side of one root.

    Attributes:
        parameters: Those that want a gradient.
        pending: Whether gradients of this rank alone have been left in ``.grad``.
        uneven: Whether it was trained since all ranks had the same buffers.
    """

    def __init__(self, module: nn.Module, ranks: Ranks) -> None:
        self._ref = weakref.ref(module)
        self._ranks = ranks
        self.uneven = False
        self._unused = False
        self._buckets_tell = False
        self._failures = 0
        self._hooks: list[Any] = []
        self._begin(module)

    def _begin(self, module: Any) -> None:
        self.parameters = [p for p in parameters_of(module) if p.requires_grad]
        self.pending = False
        self._called = False  # since the last pass whose gradients the object averaged
        self._finished = False  # whether its buckets have told that it averages those of this pass
        self._synced = False  # whether it was to average those of a pass since then
        self._fresh = False  # whether no parameter had a gradient before this pass
        self._touched = False  # whether this pass has left gradients; only while watching
        self._probes = PROBES
        self._ddp: DistributedDataParallel | None = None
        self.watch()

    @property
    def watching(self) -> bool:
        """Whether each parameter tells of its gradients, which takes a microsecond each."""
        return bool(self._hooks)

    def begin_pass(self) -> bool:
        """Say whether a pass will leave gradients that are all its own and that nothing uses."""
        self._fresh = False
        if not self.watching:
            for parameter in self.parameters:
                if parameter.grad is not None or parameter._post_accumulate_grad_hooks:
                    return False
            self._fresh = True
        return self._fresh

    def watch(self) -> None:
        """Follow the parameters themselves from now on."""
        if self.watching:
            return
        ref = weakref.ref(self)  # the parameters would hold it for as long as they live

        def touched(_: Tensor) -> None:
            if (replica := ref()) is not None:
                replica._touched = True

        parameters: list[Any] = self.parameters
        self._hooks = [p.register_post_accumulate_grad_hook(touched) for p in parameters]

    def _watch_no_more(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def call(self, call: Callable[..., Any], args: Any, kwargs: Any, *, last: bool) -> Any:
        """Run the module on this rank's part of a batch.

        Args:
            call: The module's own call.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            last: Whether the gradients of this pass are to be averaged, as far as can be told.
        """
        if not all(map(_WANTS_GRADIENT, self.parameters)):
            self._watch_no_more()
            self._begin(self._ref())  # the script froze a part
        if self._ddp is None and not self._probes and self._failures < FAILURES:
            self._ddp = self._wrap(self._ref())
            if not self._failures:
                self._watch_no_more()
        self._called = True
        ddp = self._ddp
        if ddp is None:
            return call(*args, **kwargs)
        self._synced = last
        if ddp.require_backward_grad_sync is not last:  # a module's attributes are slow to set
            ddp.require_backward_grad_sync = last
        return ddp(*args, **kwargs)

    def _wrap(self, module: Any) -> DistributedDataParallel:
        options: dict[str, Any] = {
            _SYNC_BUFFERS: False,  # in-place, and so wrong with two forwards before a backward
            "init_sync": False,  # the values were made equal when the root was met
            "find_unused_parameters": self._unused,
        }
        ddp = DistributedDataParallel(module, **options)
        del ddp._modules["module"]  # a plain attribute is found sooner, and has one call less
        ddp.__dict__["module"] = _calling(module)
        self._buckets_tell |= self._unused
        if self._buckets_tell:
            ddp.register_comm_hook(weakref.ref(self), _sum_bucket)
        return ddp

    def note_bucket(self, *, last: bool) -> None:
        """Note that a bucket of gradients is on its way."""
        self._finished = self._finished or last

    def after_backward(self, *, average: bool) -> None:
        """Bring the gradients that a pass has left to their mean, unless the object did it."""
        finished, self._finished = self._finished, False
        touched, self._touched = self._touched, False
        if self._ddp is not None and not self._buckets_tell:
            if not self._fresh and self._called:
                # Not to be told: what it has averaged stays the same when that is done again.
                self._buckets_tell, self._ddp = True, None
                self.pending = True
                if average:
                    self.average()
                return
            finished = self._synced and all(p.grad is not None for p in self.parameters)
        if finished:
            self._called = self._synced = self.pending = False
            return
        if not (touched if self.watching else self._called):
            return  # a pass through other modules
        if not average:
            self.pending = True
            return
        if self._ddp is not None:
            # It was to average this pass and did not see all of it, or it waits for a pass to
            # come: it must look closer, and anew, because it would wait for the rest.
            self._unused, self._ddp = True, None
            self._failures += 1
            self._probes = 1
            self.watch()
        self.average()

    def average(self) -> None:
        """Average by hand."""
        counts = average_gradients(self.parameters, self._ranks)
        self.pending = False
        if self._probes:
            self._probes -= 1
            self._unused |= any(count != self._ranks.world_size for count in counts)


def _sum_bucket(ref: weakref.ref[Replica], bucket: Any) -> Any:
    """Average a bucket as DistributedDataParallel itself does, and tell the replica."""
    if (replica := ref()) is not None:
        replica.note_bucket(last=bucket.is_last())
    buffer = bucket.buffer().div_(dist.get_world_size())
    work = dist.all_reduce(buffer, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


# DistributedDataParallel looks at the annotations themselves, and not at their names.
_torchs: Any = dist
_sum_bucket.__annotations__ = {
    "bucket": _torchs.GradBucket,
    "return": torch.futures.Future[torch.Tensor],
}
