"""Splits the call of a root: each rank computes its rows, and the script gets those of all.

Nothing is taken for granted about the model. A way to split a call (which dimension of which
argument is the batch) is tried beside the whole call at calls 1, 2, 4, 8 and so on, and with new
shapes: outputs, what the modules keep, and gradients must be those of the whole. The script gets
the whole call's output then. A call for which no way agrees is computed whole on every rank, which
is right and no faster, and the receipt says so.
"""

from __future__ import annotations

import functools
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from fasttrain.model.errors import ExitCode, FasttrainError
from fasttrain.model.outcome import State
from fasttrain.shim.data_parallel import inner_gradients
from fasttrain.shim.data_parallel.context import ParallelContext
from fasttrain.shim.data_parallel.parting import Parting, meet_inside
from fasttrain.shim.data_parallel.ranks import Ranks
from fasttrain.shim.data_parallel.split.agreement import signature_of, tensors_in
from fasttrain.shim.data_parallel.split.foreign_hooks import HookCount
from fasttrain.shim.data_parallel.split.lazy_rows import LazyRows, gather_lazily, linked
from fasttrain.shim.data_parallel.split.moves import Moves
from fasttrain.shim.data_parallel.split.neutral import held_signals
from fasttrain.shim.data_parallel.split.reduction import reduced_by
from fasttrain.shim.data_parallel.split.rows import Gather, Rows, share
from fasttrain.shim.data_parallel.split.sites import RETRIES, Decisions, Site, fill, saved
from fasttrain.shim.data_parallel.split.trial import RefusalError, Trial
from fasttrain.shim.data_parallel.split.ways import row_count
from fasttrain.shim.data_parallel.tensor_sums import can_be_cut, strided_parts
from fasttrain.shim.hooks.casting import map_tensors
from fasttrain.shim.hooks.outcome_recorder import Ledger
from fasttrain.shim.hooks.roots import Call, Root, parameters_of
from fasttrain.shim.process.refusal import refuse

_REDUCING, _THROUGH = 2, 3  # what ranks are doing when they meet
PART = 0.05  # of a root's parameters, for a part of it to be split by itself
GRADIENTS = 2  # verified calls whose gradients are compared as well


ASKED = "the script asks for gradients by what it gives, of which it has made more itself"
_ELSEWHERE: Any = object()  # in the place of an output, where other ranks are elsewhere


class Parted(BaseException):
    """The ranks compute other things inside of a split call; not for the script to catch."""


class SplitCalls:
    """Splits the calls of roots, and keeps what was found for each.

    Attributes:
        reentrant: Whether a checkpoint has made backward passes of its own inside of one, which
            DistributedDataParallel can't tell from several.
        whole_only: Whether calls are to be whole, because they will be repeated.
    """

    def __init__(self, ledger: Ledger, context: ParallelContext) -> None:
        self._active, self._thread, self._pid = False, 0, os.getpid()
        self.whole_only = self.reentrant = False
        self._inside = context.roots.inside
        self._reduced = 0  # losses that were added up over all ranks
        self._trying = False
        self._verifying_s = 0.0
        self._ledger = ledger
        self._ranks = ranks = context.ranks
        self._streams = context.streams
        self._compiled = context.compiled
        self._restored: dict[str, Any] = {}
        self._parting = Parting(ranks)
        self._hooks = HookCount()
        on_devices = context.strategy.collectives != "gloo"
        meet = functools.partial(self._meet_at_use, "a batch")
        moves = Moves(ranks, context.compiled, meet, ledger.counts)
        self._moves = moves if on_devices else None
        self._sites: weakref.WeakKeyDictionary[Module, dict[Any, Site]] = (
            weakref.WeakKeyDictionary()
        )
        self._sizes: weakref.WeakKeyDictionary[Module, int] = weakref.WeakKeyDictionary()

    def install(self, undo: ExitStack) -> None:
        """Count hooks as they are registered."""
        self._hooks.install(undo)
        undo.enter_context(reduced_by(self._sum))
        inner_gradients.install(undo)
        if self._moves is not None:
            self._moves.install(undo)

    @property
    def active(self) -> bool:
        """Return whether a split call is running in this thread.

        What reduces over its batch then has to reduce over the rows of all ranks.
        """
        if not self._active:
            return False
        return torch.compiler.is_compiling() or threading.get_ident() == self._thread

    @active.setter
    def active(self, active: bool) -> None:
        self._active, self._thread = active, threading.get_ident()

    @property
    def registered(self) -> int:
        """Hooks, modules and parameters that were registered so far."""
        return self._hooks.registered

    def state(self) -> dict[str, Any]:
        """Return what was found for each root, by its class and place."""
        found: dict[str, Any] = {}
        for sites in self._sites.values():
            for key, site in sites.items():
                found[f"{site.name} {key!r}"] = saved(site)
        return found

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned."""
        self._restored = state
        for sites in self._sites.values():
            for key, site in sites.items():
                self._fill(site, key)

    def _fill(self, site: Site, key: Any) -> None:
        state = self._restored.get(f"{site.name} {key!r}")
        if state is not None:
            fill(site, state)
            site.hooks = self._hooks.registered

    def run(
        self, root: Root, module: Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Make one call of a root."""
        inputs = tensors_in((args, kwargs))
        if not self._may_split(inputs):
            return call(*map_tensors(args, linked), **map_tensors(kwargs, linked))
        site = self._site(root, module, args, kwargs)
        if site.decisions is None or site.hooks != self._hooks.registered:
            site.decisions = Decisions(module)
        seen = (tuple(t.shape for t in inputs), site.decisions.values())
        due = site.is_due(seen, self._hooks.registered)
        rows = None if due else self._rows(site, inputs)
        if rows is None and any(isinstance(tensor, LazyRows) for tensor in inputs):
            args, kwargs = map_tensors(args, linked), map_tensors(kwargs, linked)
            inputs = tensors_in((args, kwargs))
        if due:
            with held_signals():
                return self._verified(site, root, module, args, kwargs, inputs)
        if rows is None:
            return self._whole(site, root, call, args, kwargs)
        self._parting.check(f"call {type(module).__name__}")
        self._ledger.apply(type(module).__name__, root.where)
        self._ledger.counts["split calls"] += 1
        streams = self._streams.for_forward(_device_of(root))
        return self._split(site, rows, module, call, streams, args, kwargs, inputs)

    def _split(
        self,
        site: Site,
        rows: Rows,
        module: Module,
        call: Call,
        streams: AbstractContextManager[None],
        args: Any,
        kwargs: Any,
        inputs: Sequence[Tensor],
    ) -> Any:
        """Make one call with this rank's rows, and put together what it gives."""
        split = site.split
        assert split is not None
        own_args, own_kwargs = split.cut(args, kwargs, rows)
        before = self._reduced
        try:
            with self.splitting(module, streams):
                output = call(*own_args, **own_kwargs)
            if self._reduced != before and not meet_inside(self._ranks, _THROUGH):
                raise Parted
        except Parted:
            while not meet_inside(self._ranks, _THROUGH):
                pass
            output = _ELSEWHERE
        if output is _ELSEWHERE or not split.fits(output, rows):
            self._refuse(site, "it computes something else on other ranks, or with other arguments",
                         final=True)  # fmt: skip
            return call(*map_tensors(args, linked), **map_tensors(kwargs, linked))
        gather: Gather = rows.gather
        if not self._compiled.functions:
            meet = functools.partial(self._meet_at_use, f"what {site.name} gives")
            gather = functools.partial(gather_lazily, rows=rows, meet=meet)
        whole = split.put_together(module, output, rows, gather, inputs)
        inner_gradients.mark(split.with_rows(whole), lambda: refuse(_asked_late(site.name)))
        return whole

    def _meet_at_use(self, name: str) -> None:
        """See that all ranks use a large output alike, of which each has its rows."""
        thread = threading.current_thread() is threading.main_thread()
        forked = os.getpid() != self._pid
        if forked or (not thread and torch._C._current_graph_task_id() == -1):
            refuse(_used_in_thread(name))
        self._parting.check(f"use all rows of {name}")

    def _whole(self, site: Site, root: Root, call: Call, args: Any, kwargs: Any) -> Any:
        """Make a whole call, inside of which parts of the module may be split."""
        self._ledger.counts["whole calls"] += 1
        if root.replica is not None and root.replica.gathers:
            self._parting.check(f"call {root.name}")
        if not site.final or not self._inside.flag:
            return call(*args, **kwargs)
        with self._descended(functools.partial(self._part, root)):
            return call(*args, **kwargs)

    def _part(self, root: Root, module: Module, args: Any, kwargs: Any) -> Any:
        """Make the call of a module inside of a root that is called whole."""
        compiled = module._compiled_call_impl
        call: Call = compiled or module._call_impl
        if compiled is None and not self._is_worth_it(root, module):
            return call(*args, **kwargs)
        with self._descended(None):
            if compiled is not None:
                return call(*args, **kwargs)
            return self.run(root, module, call, args, kwargs)

    @contextmanager
    def _descended(self, part: Any) -> Iterator[None]:
        """Have modules inside of a call looked at, or not any more."""
        inside = self._inside
        before = inside.flag, inside.part
        inside.flag, inside.part = part is None, part
        try:
            yield
        finally:
            inside.flag, inside.part = before

    def _is_worth_it(self, root: Root, module: Module) -> bool:
        whole = root.ref()
        return whole is not None and self._size(module) >= PART * max(1, self._size(whole))

    def _size(self, module: Module) -> int:
        size = self._sizes.get(module)
        if size is None:
            size = self._sizes[module] = sum(p.numel() for p in parameters_of(module))
        return size

    def _sum(self, part: Tensor, of_loss: bool) -> Tensor:
        """Add up over the ranks what a split call computes from the rank's rows.

        Raises:
            Parted: Other ranks are elsewhere.
        """
        self._reduced += of_loss
        if (of_loss or self._trying) and not meet_inside(self._ranks, _REDUCING):
            raise Parted
        return self._ranks.sum(part.clone())

    def _may_split(self, inputs: Sequence[Tensor]) -> bool:
        if not self._ranks.joined or self.whole_only or not any(t.dim() for t in inputs):
            return False
        if not all(map(can_be_cut, inputs)):
            self._ledger.note("calls with tensors of which no rows can be had are whole")
            return False
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return False  # of torch.func
        if _dispatch_mode() or _saving_hook():
            self._ledger.note(
                "calls inside of a dispatch mode or of hooks on saved tensors, which see what is"
                " computed, are whole"
            )
            return False  # such as what counts operations
        forward_ad: Any = torch.autograd.forward_ad
        levels = forward_ad._current_level >= 0
        return not levels and threading.current_thread() is threading.main_thread()

    def _site(self, root: Root, module: Module, args: Any, kwargs: Any) -> Site:
        sites = self._sites.get(module)
        if sites is None:
            sites = self._sites[module] = {}
        key = (module.training, torch.is_grad_enabled(), signature_of((args, kwargs)))
        site = sites.get(key)
        if site is None:
            site = sites[key] = Site(_name(root, module))
            self._fill(site, key)
        return site

    def _rows(self, site: Site, inputs: Sequence[Tensor]) -> Rows | None:
        if site.split is None:
            return None
        count = row_count(inputs, site.split.inputs)
        return Rows(self._ranks, count) if count >= self._ranks.world_size else None

    @contextmanager
    def splitting(self, module: Module, context: Any) -> Iterator[None]:
        """Run a block as the inside of a split call."""
        self.active = True
        try:
            with context, shared_parameters(module, self._ranks):
                yield
        finally:
            self.active = False

    @contextmanager
    def _trial_split(self, module: Module) -> Iterator[None]:
        self._trying = True
        try:
            with self.splitting(module, nullcontext()):
                yield
        finally:
            self._trying = False

    def _verified(
        self,
        site: Site,
        root: Root,
        module: Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: Sequence[Tensor],
    ) -> Any:
        """Make a whole call, and see beside it how it can be split."""
        # Of inputs that differ the ranks would compute rows that don't belong together.
        with torch.no_grad():
            parts = [part for tensor in inputs for part in strided_parts(tensor)]
            sums = [t.sum(dtype=torch.float64).cpu() for t in parts if not t.is_complex()]
        self._parting.check(f"call {type(module).__name__}", sums)
        site.hooks = self._hooks.registered
        if self._ledger.state is State.ARMED:
            self._ledger.settle(State.ARMED, "no call came that could be split")
        self._ledger.counts["whole calls"] += 1
        trial = Trial(module, self._ranks, functools.partial(self._trial_split, module))
        output = trial.make_whole_call(args, kwargs)
        begun_s = time.perf_counter()
        try:
            gradients = site.verified < GRADIENTS
            site.split = trial.find(args, kwargs, inputs, site.split, gradients=gradients)
        except RefusalError as refusal:
            self._refuse(site, str(refusal), final=refusal.final or bool(site.verified))
        else:
            site.why_not = ""
            site.verified += 1
            self._ledger.counts["verified"] += 1
            asked = functools.partial(self._refuse, site, ASKED, final=True)
            inner_gradients.mark(site.split.with_rows(output), asked)
        if trial.by_values and root.replica is not None:
            # The object would wait for gradients of a part that gets no row on this rank alone.
            root.replica.leave_ddp()
        self._verifying_s += time.perf_counter() - begun_s
        self._ledger.counts["ms of verifying"] = round(1000 * self._verifying_s)
        return output

    def _refuse(self, site: Site, why: str, *, final: bool) -> None:
        held = f", after {site.verified} verified calls" if site.verified else ""
        site.split, site.why_not, site.final = None, why, final or site.calls >= RETRIES
        self._ledger.pass_over(
            site.name,
            f"every rank computes its calls whole, which is right and no faster: {why}{held}",
            missed=True,
        )


@contextmanager
def shared_parameters(module: Module, ranks: Ranks) -> Iterator[None]:
    """Have gradients of tensors in the places of parameters be those of all ranks.

    Such as functional_call's: they aren't averaged behind a backward pass, which is what happens to
    a module's own parameters.
    """
    slots: list[dict[str, Any]] = [part._parameters for part in Module.modules(module)]
    replaced = [
        (slot, name, tensor)
        for slot in slots
        for name, tensor in slot.items()
        if tensor is not None and tensor.requires_grad and not isinstance(tensor, Parameter)
    ]
    if not replaced:
        yield
        return
    shared: dict[int, Any] = {}
    for slot, name, tensor in replaced:
        slot[name] = shared.setdefault(id(tensor), share(tensor, ranks))
    try:
        yield
    finally:
        for slot, name, tensor in replaced:
            slot[name] = tensor


def _dispatch_mode() -> bool:
    """Return whether a mode that isn't fasttrain's own sees operators."""
    if not torch._C._len_torch_dispatch_stack():
        return False
    modes = _get_current_dispatch_mode_stack()
    return any(not type(mode).__module__.startswith("fasttrain.") for mode in modes)


def _saving_hook() -> bool:
    """Return whether hooks of the script's, and not torch's own, see the tensors that are saved."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)  # noqa: FBT003
    return hooks is not None and not str(hooks[0].__module__).startswith("torch")


def _used_in_thread(name: str) -> FasttrainError:
    return FasttrainError(
        f"a thread or a child process of the script's uses {name}, where other ranks can't meet it",
        why="the rows of a large tensor stay with the ranks that have computed or moved them until"
        " it is used",
        fix="use it in the main thread first, such as by .clone(), or use one process",
        slug="split-thread",
        exit_code=ExitCode.CONTRADICTION,
    )


def _asked_late(name: str) -> FasttrainError:
    return FasttrainError(
        f"the script asks for a gradient by what {name} gives, for the first time after its calls"
        " have been split",
        why="the model has made more of the same tensor itself, and each rank has that of its rows"
        " alone",
        fix="ask in the first call as well, after which the model is called whole, or use one"
        " process",
        slug="split-gradient",
        exit_code=ExitCode.CONTRADICTION,
    )


def _name(root: Root, module: Module) -> str:
    whole = root.ref()
    if whole is module or whole is None:
        return f"{root.name} ({root.where})"
    inside = next((name for name, part in whole.named_modules() if part is module), "?")
    return f"{inside} of {root.name} ({root.where})"


def _device_of(root: Root) -> torch.device | None:
    parameter = root.parameter()
    return parameter.device if parameter is not None else None
