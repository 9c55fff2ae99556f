"""Replicates a root on every rank; torch's DistributedDataParallel (DDP) averages its gradients.

The DDP object is called in place of the module's forward and doesn't wrap the module: the script's
module keeps its type, keys, pickles and deep copies.

The first backward passes are averaged without DDP. It takes over after `PROBES` passes in a row in
which every parameter got a gradient on every rank. It only averages a pass that gives every
parameter a gradient: its own search for unused parameters (``find_unused_parameters``) would end a
script that uses a parameter outside of the module's call.

If no parameter had a gradient before a pass, the gradients afterwards show whether DDP has averaged
it. Otherwise a communication hook has to report each bucket, which costs a Python call inside the
backward pass. If it is unclear, or a pass left parameters out, the gradients are averaged without
DDP: averaging equal gradients again doesn't change them.

A parameter that the script has hooks on is averaged before these, by a hook of ours.

A compiled graph gives all of its gradients at its end, so that nothing is sent while it computes.
Dynamo therefore cuts the graph of a DDP module at DDP's buckets. It does so when it compiles, which
is in the first passes, without DDP: a stand-in tells it that there will be one.
"""

from __future__ import annotations

import inspect
import itertools
import operator
import re
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fasttrain.shim.data_parallel.ranks import Ranks, is_summed_on_host
from fasttrain.shim.data_parallel.split.rows import mean_gradient
from fasttrain.shim.hooks.roots import parameters_of

# Averages gradients over the ranks without DistributedDataParallel, with the same result.


def average_gradients(parameters: Sequence[Tensor], ranks: Ranks) -> list[int]:
    """Replace each ``.grad`` by its mean over all ranks; return how many ranks had each.

    A rank without a gradient counts as zeros; if no rank has one, it stays None. Averaging twice is
    harmless: equal gradients are their own mean, and what was added since is averaged then.
    """
    if not parameters:
        return []
    # On the CPU, where it is known: on the device each pass would wait for the numbers.
    present = [float(p.grad is not None) for p in parameters]
    counts = ranks.sum(torch.tensor(present, device="cpu")).tolist()
    dense: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    with torch.no_grad():
        for parameter, count in zip(parameters, counts, strict=True):
            if not count:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if parameter.grad.is_sparse:
                parameter.grad = _average_sparse(parameter.grad, ranks)
            else:
                key = (parameter.device, parameter.grad.dtype)
                dense.setdefault(key, []).append(parameter.grad)
        for gradients in dense.values():
            _average_dense(gradients, ranks)
    return [int(count) for count in counts]


def _average_dense(gradients: list[Tensor], ranks: Ranks) -> None:
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    flat.div_(ranks.world_size)
    ranks.sum(flat)
    parts = torch.split(flat, [gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def _average_sparse(gradient: Tensor, ranks: Ranks) -> Tensor:
    return ranks.sum(gradient.coalesce() / ranks.world_size)


# Replicates a root on every rank; torch's DistributedDataParallel (DDP) averages its gradients.


# Renamed in torch 2.13: broadcast_buffers became forward_sync_buffers.
_SYNC_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel.__init__).parameters
)
PROBES = 2  # complete passes in a row before DDP takes over; twice as many after each failure
FAILURES = 4  # incomplete passes with DDP, after which it is used no more
# DDP's, of gradients in another memory order than its buckets, as a penalty on the gradients of a
# layer with one output has them: it copies them, and says so once. Source: torch's reducer.cpp
_OTHER_ORDER = ("ignore", re.compile("Grad strides do not match bucket"), UserWarning, None, 0)
# In C: no Python frame per parameter.
_WANTS_GRADIENT = operator.attrgetter("requires_grad")
_GRADIENT = operator.attrgetter("grad")
_FORM = operator.attrgetter("dtype", "shape")


class Replica:
    """The data-parallel side of one root.

    Attributes:
        parameters: Its parameters that require a gradient.
        ids: Their ids.
        uneven: True if it was trained since all ranks had the same buffers.
        registered: Number of parameters, modules and hooks registered anywhere at its last call.
        moved: Number of modules moved or cast anywhere then. torch drops the autograd nodes of
            their parameters, which DDP has its hooks on.
        gathers: True if each call of the module gathers parameters from other ranks.
    """

    gathers = False

    def __init__(self, module: nn.Module, ranks: Ranks) -> None:
        self._ref = weakref.ref(module)
        self._ranks = ranks
        self.uneven = False
        self.registered = self.moved = 0
        self._buckets_report = False
        self._failures = 0
        self._running = 0  # calls of the root that have not returned
        self._hooks: list[Any] = []
        self._averaging: dict[int, Any] = {}  # our hooks on parameters that the script has hooks on
        self._run: Callable[..., Any]
        self._begin(module)

    def _begin(self, module: Any) -> None:
        # Leaves only: functional_call puts other tensors in the places of parameters.
        self._all = list({id(p): p for p in parameters_of(module) if p.is_leaf}.values())
        self._wanted = list(map(_WANTS_GRADIENT, self._all))
        self.parameters = list(itertools.compress(self._all, self._wanted))
        self.ids = frozenset(map(id, self.parameters))
        self._forms: list[Any] = []  # of all, as DDP knows them
        self._calls = 0  # since the last backward pass that DDP averaged
        self._several = False  # more calls than passes, so that a pass may come without a call
        self._left: set[Any] = set()  # the gradients that the last pass left, if there are several
        self._finished = False  # the last bucket of this pass was reported
        self._filled: list[tuple[Tensor, Any]] = []  # buckets of this pass that wait for the last
        self._fresh = False  # no parameter had a gradient before this pass
        # This pass has left gradients; only known while watching, and not of one that is running.
        self._touched = torch._C._current_graph_task_id() != -1
        self._probes = self._needed
        self._ddp: DistributedDataParallel | None = None
        self.watch()

    @property
    def _needed(self) -> int:
        """Return how many complete passes in a row DDP needs to take over."""
        return PROBES << self._failures

    @property
    def watching(self) -> bool:
        """True if hooks report each parameter's gradient, which takes a microsecond each."""
        return bool(self._hooks)

    def begin_pass(self) -> None:
        """Inspect gradients and hooks before a backward pass."""
        if self._running:  # the root trains in its own call; DDP waits for a pass after the call
            self.leave_ddp()
        self._filled = []  # those of a pass that wasn't complete
        hooked = self.average_before_hooks()
        self._fresh = not self.watching and not hooked
        if self._fresh:
            gradients = map(_GRADIENT, self.parameters)
            self._fresh = not any(map(operator.is_not, gradients, itertools.repeat(None)))

    def average_before_hooks(self) -> bool:
        """Have gradients averaged before the script's hooks get them; return True if it has any."""
        own, found = len(self._hooks) > 0, False
        for parameter in self.parameters:
            after: Any = parameter._post_accumulate_grad_hooks
            if parameter._backward_hooks or (after and len(after) > own):
                found = True
                self._average_before_hooks(parameter)
        return found

    def _average_before_hooks(self, parameter: Any) -> None:
        """Average a parameter's gradient before the script's hooks on it get it."""
        if id(parameter) in self._averaging or not parameter.requires_grad:
            return
        ranks = self._ranks

        def mean(gradient: Tensor) -> Tensor | None:
            if torch._C._current_graph_task_id() == -1:
                return None
            # With its graph, for what the script computes from it under create_graph.
            return mean_gradient(gradient.coalesce() if gradient.is_sparse else gradient, ranks)

        handle = parameter.register_hook(mean)
        # torch calls hooks in the order of the plain dict: OrderedDict.move_to_end() has no effect.
        hooks = parameter._backward_hooks
        theirs = {key: hook for key, hook in hooks.items() if key != handle.id}
        hooks.clear()
        hooks.update({handle.id: mean, **theirs})
        self._averaging[id(parameter)] = handle

    def watch(self) -> None:
        """Watch the parameters by hooks from now on."""
        if self.watching:
            return
        ref = weakref.ref(self)  # a strong one would live as long as the parameters

        def touched(_: Tensor) -> None:
            if (replica := ref()) is not None:
                replica._touched = True

        # The script may have frozen some since the last call; a hook on these would raise.
        parameters: list[Any] = [p for p in self.parameters if p.requires_grad]
        self._hooks = [p.register_post_accumulate_grad_hook(touched) for p in parameters]

    def _watch_no_more(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @property
    def calls_together(self) -> bool:
        """True if DDP communicates in the next call, before the model runs.

        It compares parameters when it is created, and rebuilds buckets in the call after its first
        backward pass.
        """
        if self._ddp is None:
            return not self._probes and self._failures < FAILURES
        return not self._ddp._has_rebuilt_buckets

    def call(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the root; the gradients of the backward pass will be averaged.

        Args:
            run: The root's own call.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
        """
        if list(map(_WANTS_GRADIENT, self._all)) != self._wanted:
            self.begin_again()  # the script froze a part or unfroze it
        elif self._ddp is not None and list(map(_FORM, self._all)) != self._forms:
            self.begin_again()  # it has put other tensors in
        if not self.parameters:
            return run(*args, **kwargs)
        takes_over = self._ddp is None and not self._probes and self._failures < FAILURES
        if takes_over and self._has_its_own():
            if not self._failures:
                self._watch_no_more()
            self._ddp = self._wrap(self._ref())
            self._forms = list(map(_FORM, self._all))
        self._calls += 1
        self._running += 1
        try:
            if self._ddp is None:
                return _as_for_ddp(run, args, kwargs)
            self._run = run
            # Not by __call__, for which hooks on all modules would run.
            return self._ddp.forward(*args, **kwargs)  # type: ignore[no-untyped-call]
        finally:
            self._running -= 1
            self.__dict__.pop("_run", None)  # it holds the module

    def _has_its_own(self) -> bool:
        """True if the module has its own parameters and not others, as in functional_call."""
        module: Any = self._ref()
        return {id(p) for p in parameters_of(module) if p.requires_grad} == self.ids

    def begin_again(self) -> None:
        """List the module's parameters again, and average the next passes without DDP."""
        self._watch_no_more()
        self._begin(self._ref())

    def look(self) -> None:
        """Start again if the module has other parameters than before."""
        module: Any = self._ref()
        if {id(p) for p in parameters_of(module) if p.is_leaf} != {id(p) for p in self._all}:
            self.begin_again()

    def leave_ddp(self) -> None:
        """Stop using DDP: it changes gradients in place, also those with an autograd graph."""
        self._failures = FAILURES
        self._drop_ddp()

    def _drop_ddp(self) -> None:
        """Drop the DDP object, which may be waiting for the rest of a pass."""
        if self._ddp is not None:
            if not self._running:  # or it still uses them, and goes when the call returns
                del self._ddp.reducer, self._ddp.logger  # deletes its autograd hooks
            self._ddp = None
            self.watch()

    def _wrap(self, module: Any) -> DistributedDataParallel:
        options: dict[str, Any] = {
            _SYNC_BUFFERS: False,  # in-place, hence wrong with two forwards before a backward
            "init_sync": False,  # values were broadcast when the root was discovered
        }
        # Only now, so that it stands in front of filters that make warnings errors. Not by
        # `filterwarnings`, after which Python forgets which warnings of the script it has shown.
        if _OTHER_ORDER not in warnings.filters:
            warnings.filters.insert(0, _OTHER_ORDER)  # type: ignore[attr-defined]
        ddp = DistributedDataParallel(module, **options)
        del ddp._modules["module"]  # a plain attribute is looked up faster
        ref = weakref.ref(self)

        def run(*args: Any, **kwargs: Any) -> Any:
            replica: Any = ref()
            return replica._run(*args, **kwargs)

        ddp.__dict__["module"] = run
        self._buckets_report |= self.watching  # and stays so after a failure
        if self._buckets_report or self._ranks.means is not None:
            ddp.register_comm_hook(weakref.ref(self), _sum_bucket)
        return ddp

    def note_bucket(self, *, last: bool) -> None:
        """Note that a bucket of gradients is being averaged."""
        self._finished = self._finished or last

    def average_in_memory(self, bucket: Any) -> Any:
        """Average a bucket along with the last one, in memory that the ranks share.

        Nothing waits for other ranks before: a backward pass may communicate otherwise meanwhile.

        Returns:
            A future of the means; None if they can't be computed that way.
        """
        buffer, means = bucket.buffer(), self._ranks.means
        if means is None or not self._ranks.is_here():
            return None
        future: torch.futures.Future[Tensor] | None = None
        if _is_plain(buffer):
            future = torch.futures.Future()
            self._filled.append((buffer, future))
        if bucket.is_last():  # the others wait for it, also if it is a sparse one
            filled, self._filled = self._filled, []
            with self._ranks.waits():
                means.average([buffer for buffer, _ in filled])
            for buffer, filled_in in filled:
                filled_in.set_result(buffer)
        return future

    def after_backward(self) -> None:
        """Average the gradients that a backward pass has left, unless DDP has done it."""
        finished, self._finished = self._finished, False
        touched, self._touched = self._touched, False
        if self._ddp is not None and not self._buckets_report:
            if not self._fresh and self._calls:
                # Unclear whether DDP averaged them; doing it again changes nothing then.
                self._buckets_report = True
                self._drop_ddp()
                self.average()
                return
            finished = self._calls > 0 and all(p.grad is not None for p in self.parameters)
        if finished:
            self._several |= self._calls > 1
            self._calls = 0
            self._left = self._marks() if self._several else set()
            return
        if self._several and not self._calls and not self.watching:
            # DDP averages one pass after a call, or after several calls, and ignores more.
            if self._marks() - self._left:
                self.average()
                self._left = self._marks()
            return
        if not (touched if self.watching else self._calls):
            return  # the pass went through other modules only
        if self._ddp is not None:
            # DDP saw only a part of this pass, or none of it and still waits for one.
            self._drop_ddp()
            self._failures += 1
            self._probes = self._needed
        self.average()

    def _marks(self) -> set[Any]:
        """Return the parameters' gradients, each by what changes when something is added to it."""
        return {(id(g), g._version) for p in self.parameters if (g := p.grad) is not None}

    def average(self) -> None:
        """Average the gradients without DDP, and count complete passes."""
        counts = average_gradients(self.parameters, self._ranks)
        if self._failures < FAILURES and not self._suits_ddp():
            self._failures = FAILURES
        whole = all(count == self._ranks.world_size for count in counts)
        self._probes = max(0, self._probes - 1) if whole else self._needed

    def _suits_ddp(self) -> bool:
        """True if DDP takes this root.

        It wants all parameters on one type of device, whose collectives sum the gradients.
        """
        gradients = (p.grad for p in self.parameters if p.grad is not None)
        types = {parameter.device.type for parameter in self._all}
        return len(types) < 2 and not any(map(is_summed_on_host, gradients))


class _ComingDDP:
    """What dynamo asks a DDP module before it compiles, with DDP's own default."""

    bucket_bytes_cap = 25 * 1024 * 1024


_COMING: Any = _ComingDDP()


def _as_for_ddp(run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function whose graphs dynamo shall cut at DDP's buckets.

    Source: ``torch/_dynamo/convert_frame.py`` of torch 2.13, which asks for the active DDP module.
    """
    before = DistributedDataParallel._active_ddp_module
    DistributedDataParallel._active_ddp_module = _COMING
    try:
        return run(*args, **kwargs)
    finally:
        DistributedDataParallel._active_ddp_module = before


def _is_plain(buffer: Tensor) -> bool:
    return buffer.is_cpu and buffer.layout is torch.strided and buffer.is_contiguous()


def _sum_bucket(ref: weakref.ref[Replica], bucket: Any) -> Any:
    """Average a bucket as DDP itself does, and report it to the replica."""
    if (replica := ref()) is not None:
        replica.note_bucket(last=bucket.is_last())
        if (future := replica.average_in_memory(bucket)) is not None:
            return future
    buffer = bucket.buffer().div_(dist.get_world_size())
    work = dist.all_reduce(buffer, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


# DDP checks the hook's annotations as objects; with postponed evaluation they'd be strings.
_torchs: Any = dist
_sum_bucket.__annotations__ = {
    "bucket": _torchs.GradBucket,
    "return": torch.futures.Future[torch.Tensor],
}
