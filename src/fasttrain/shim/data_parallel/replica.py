"""One root on every rank, whose gradients torch's DistributedDataParallel averages.

The DistributedDataParallel object stands beside the module and not around it: the script's module
keeps its type, keys, pickles and deep copies. The first backward passes are averaged by hand, and
the object takes over once every parameter has got a gradient on every rank in some of them, one
after the other. It averages only a pass that gives every parameter a gradient: told to look for
those that don't take part (``find_unused_parameters``), it ends a script that uses a parameter
outside of the module's call.

Whether it did is plain to see where no parameter had a gradient before the pass; else each bucket
has to tell, which costs a call of Python's from within the backward pass. Where that isn't plain,
and behind a pass that left parameters out, the gradients are averaged by hand: what is averaged
already stays the same.

A parameter that the script has hooks on is averaged in front of them, by a hook of ours.
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

from fasttrain.shim.data_parallel.averaging import average_gradients
from fasttrain.shim.data_parallel.ranks import Ranks
from fasttrain.shim.hooks.roots import parameters_of

# Its name up to torch 2.12, and since.
_SYNC_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel.__init__).parameters
)
PROBES = 2  # whole passes in a row in front of the object's first; twice as many after each failure
FAILURES = 4  # passes that the object did not see whole, after which it is left out


_WANTS_GRADIENT = operator.attrgetter("requires_grad")  # without a frame of Python's for each


class Replica:
    """The data-parallel side of one root.

    Attributes:
        parameters: Those that want a gradient.
        uneven: Whether it was trained since all ranks had the same buffers.
        registered: Parameters, modules and hooks that had been registered anywhere when its
            parameters were looked at.
        gathers: Whether each call of the module gathers parameters from other ranks.
    """

    gathers = False

    def __init__(self, module: nn.Module, ranks: Ranks) -> None:
        self._ref = weakref.ref(module)
        self._ranks = ranks
        self.uneven = False
        self.registered = 0
        self._buckets_tell = False
        self._failures = 0
        self._hooks: list[Any] = []
        self._in_front: dict[int, Any] = {}  # our hooks on parameters that the script has hooks on
        self._run: Callable[..., Any]
        self._begin(module)

    def _begin(self, module: Any) -> None:
        # Not what functional_call has put in the places of parameters
        self._all = list({id(p): p for p in parameters_of(module) if p.is_leaf}.values())
        self.parameters = [p for p in self._all if p.requires_grad]
        self._called = False  # since the last pass whose gradients the object averaged
        self._finished = False  # whether its buckets have told that it averages those of this pass
        self._fresh = False  # whether no parameter had a gradient before this pass
        self._touched = False  # whether this pass has left gradients; only while watching
        self._probes = self._needed
        self._ddp: DistributedDataParallel | None = None
        self.watch()

    @property
    def _needed(self) -> int:
        """Passes in a row that must be whole for the object to take over."""
        return PROBES << self._failures

    @property
    def watching(self) -> bool:
        """Return whether each parameter tells of its gradients, which takes a microsecond each."""
        return bool(self._hooks)

    def begin_pass(self) -> None:
        """See what there is before a backward pass."""
        self._fresh = not self.watching
        own = len(self._hooks) > 0
        for parameter in self.parameters:
            if parameter.grad is not None:
                self._fresh = False
            after: Any = parameter._post_accumulate_grad_hooks
            if parameter._backward_hooks or (after and len(after) > own):
                self._fresh = False
                self._put_in_front(parameter)

    def _put_in_front(self, parameter: Any) -> None:
        """Average a parameter's gradient before the script's hooks on it see it."""
        if id(parameter) in self._in_front or not parameter.requires_grad:
            return
        ranks = self._ranks

        def mean(gradient: Tensor) -> Tensor | None:
            if torch._C._current_graph_task_id() == -1:
                return None
            average = gradient.detach() / ranks.world_size
            return ranks.sum(average.coalesce() if average.is_sparse else average)

        handle = parameter.register_hook(mean)
        # In the order of a plain dictionary, which move_to_end() doesn't change
        hooks = parameter._backward_hooks
        theirs = {key: hook for key, hook in hooks.items() if key != handle.id}
        hooks.clear()
        hooks.update({handle.id: mean, **theirs})
        self._in_front[id(parameter)] = handle

    def watch(self) -> None:
        """Follow the parameters themselves from now on."""
        if self.watching:
            return
        ref = weakref.ref(self)  # the parameters would hold it for as long as they live

        def touched(_: Tensor) -> None:
            if (replica := ref()) is not None:
                replica._touched = True

        # The script may have frozen some since the last call.
        parameters: list[Any] = [p for p in self.parameters if p.requires_grad]
        self._hooks = [p.register_post_accumulate_grad_hook(touched) for p in parameters]

    def _watch_no_more(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @property
    def calls_together(self) -> bool:
        """True if the object's part in the next call is one of all ranks, in front of the model.

        It compares parameters as it is made, and its buckets before the call behind its first pass.
        """
        if self._ddp is None:
            return not self._probes and self._failures < FAILURES
        return not self._ddp._has_rebuilt_buckets

    def call(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Make a call of the root whose gradients are to be averaged.

        Args:
            run: Makes it.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
        """
        if sum(map(_WANTS_GRADIENT, self._all)) != len(self.parameters):
            self.begin_anew()  # the script froze a part, or has trained it again
        if not self.parameters:
            return run(*args, **kwargs)
        if self._ddp is None and not self._probes and self._failures < FAILURES:
            if not self._failures:
                self._watch_no_more()
            self._ddp = self._wrap(self._ref())
        self._called = True
        if self._ddp is None:
            return run(*args, **kwargs)
        self._run = run
        try:
            return self._ddp(*args, **kwargs)
        finally:
            del self._run  # it holds the module

    def begin_anew(self) -> None:
        """Look at the module's parameters again."""
        self._watch_no_more()
        self._begin(self._ref())

    def look(self) -> None:
        """Start again where the module has other parameters than before."""
        module: Any = self._ref()
        if {id(p) for p in parameters_of(module) if p.is_leaf} != {id(p) for p in self._all}:
            self.begin_anew()

    def leave_ddp(self) -> None:
        """Average by hand from now on: the object changes gradients that have graphs in place."""
        self._failures = FAILURES
        self._drop_ddp()

    def _drop_ddp(self) -> None:
        """Go on without the object, which may wait for the rest of a pass."""
        if self._ddp is not None:
            del self._ddp.reducer, self._ddp.logger  # its hooks go with them
            self._ddp = None
            self.watch()

    def _wrap(self, module: Any) -> DistributedDataParallel:
        options: dict[str, Any] = {
            _SYNC_BUFFERS: False,  # in-place, and so wrong with two forwards before a backward
            "init_sync": False,  # the values were made equal when the root was met
        }
        ddp = DistributedDataParallel(module, **options)
        del ddp._modules["module"]  # a plain attribute is found sooner, and has one call less
        ref = weakref.ref(self)

        def run(*args: Any, **kwargs: Any) -> Any:
            replica: Any = ref()
            return replica._run(*args, **kwargs)

        ddp.__dict__["module"] = run
        self._buckets_tell |= self.watching  # which it goes on to do behind a failure
        if self._buckets_tell:
            ddp.register_comm_hook(weakref.ref(self), _sum_bucket)
        return ddp

    def note_bucket(self, *, last: bool) -> None:
        """Note that a bucket of gradients is on its way."""
        self._finished = self._finished or last

    def after_backward(self) -> None:
        """Bring the gradients that a pass has left to their mean, unless the object did it."""
        finished, self._finished = self._finished, False
        touched, self._touched = self._touched, False
        if self._ddp is not None and not self._buckets_tell:
            if not self._fresh and self._called:
                # Not to be told: what it has averaged stays the same when that is done again.
                self._buckets_tell = True
                self._drop_ddp()
                self.average()
                return
            finished = self._called and all(p.grad is not None for p in self.parameters)
        if finished:
            self._called = False
            return
        if not (touched if self.watching else self._called):
            return  # a pass through other modules
        if self._ddp is not None:
            # It was to average this pass and did not see all of it, or it waits for one to come.
            self._drop_ddp()
            self._failures += 1
            self._probes = self._needed
        self.average()

    def average(self) -> None:
        """Average by hand."""
        counts = average_gradients(self.parameters, self._ranks)
        whole = all(count == self._ranks.world_size for count in counts)
        self._probes = max(0, self._probes - 1) if whole else self._needed


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
