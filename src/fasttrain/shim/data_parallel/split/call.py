"""Splits the call of a root: each rank computes its rows, and the script gets all rows.

Nothing is assumed about the model. A way to split a call (which dimension of which argument is the
batch) is verified against the whole call at calls 1, 2, 4, 8 and so on, and with new shapes: it
must have the whole call's outputs, changes of modules, and gradients. A verified call returns the
whole call's output. If no way agrees, every rank computes the call on the whole batch, which is
correct and no faster, and the receipt says so.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from fasttrain.model.errors import ExitCode, FasttrainError
from fasttrain.model.outcome import State
from fasttrain.shim.data_parallel import backward
from fasttrain.shim.data_parallel.context import ParallelContext
from fasttrain.shim.data_parallel.rank_consistency import CLOSE, Parted, SameLine, meet_inside
from fasttrain.shim.data_parallel.ranks import Ranks
from fasttrain.shim.data_parallel.split.agreement import call_signature
from fasttrain.shim.data_parallel.split.candidates import has_few_rows, row_count
from fasttrain.shim.data_parallel.split.changes import Changes, Held
from fasttrain.shim.data_parallel.split.decisions import Decisions, argument_values
from fasttrain.shim.data_parallel.split.lazy_rows import (
    LazyRows,
    Moves,
    gather_for_functions,
    gather_lazily,
    linked,
)
from fasttrain.shim.data_parallel.split.number_reads import watch_one_hot
from fasttrain.shim.data_parallel.split.observers import is_observed, watch_saving_hooks
from fasttrain.shim.data_parallel.split.registrations import HookCount, Marks
from fasttrain.shim.data_parallel.split.rows import Gather, Rows, reduced_by, share
from fasttrain.shim.data_parallel.split.sites import RETRIES, CallSite, fill, saved
from fasttrain.shim.data_parallel.split.trial import (
    OWN_TENSORS,
    OwnTensorsError,
    RefusalError,
    SplitTrial,
)
from fasttrain.shim.data_parallel.tensor_sums import can_be_cut, strided_parts
from fasttrain.shim.hooks.containers import map_tensors, tensors_in
from fasttrain.shim.hooks.outcome_recorder import OutcomeRecorder
from fasttrain.shim.hooks.roots import ROWS, Call, Root, parameters_of
from fasttrain.shim.process.callsite import call_site
from fasttrain.shim.process.held_signals import held_signals
from fasttrain.shim.process.refusal import refuse

_REDUCING, _THROUGH, _CHANGING = 2, 3, 4  # tags of what ranks are doing when they meet
PART = 0.05  # share of a root's parameters that a submodule needs to be split by itself
_OTHERS = "it computes something else on other ranks, or with other arguments"
_MORE = "what it changes in its modules differs from call to call"
MOST_SITES = 32  # kinds of calls of a module, from which on texts make no other ones
READ_EVERY = 64  # calls after which numbers on a device are compared, for which the host waits
_CIRCULAR = "calls with arguments that lead back to themselves run on the whole batch"
_NO_MEMORY = "OutOfMemoryError"  # torch's exception on any device
_NOTHING = "no call could be split so far"
_AS_IT_IS = nullcontext()
GRADIENTS = 2  # number of verified calls whose gradients are compared, too
ASKED = (
    "the script asks for gradients w.r.t. a tensor that the model returns or keeps, and has"
    " computed other ones from"
)


class SplitCalls:
    """Splits the calls of roots, and keeps the decision for each kind of call.

    Attributes:
        reentrant: True if an activation checkpoint runs backward passes inside a backward pass,
            which DistributedDataParallel would take for several.
        whole_only: True while calls must not be split, because they will be recomputed.
        unowned: Returns the ids of parameters that no root owns and whose gradients are averaged.
    """

    def __init__(self, recorder: OutcomeRecorder, context: ParallelContext) -> None:
        self._active, self._thread = False, 0
        self.whole_only = self.reentrant = False
        self._inside = context.roots.inside
        self.unowned: Callable[[], set[int]] = set
        self._trying = False
        self._verifying_s = 0.0
        self._recorder = recorder
        self._ranks = ranks = context.ranks
        self._streams = context.streams
        self._compiled = context.compiled
        self._restored: dict[str, Any] = {}
        self._same_line = SameLine(ranks)
        self._hooks = HookCount()
        self._rows = functools.lru_cache(64)(functools.partial(Rows, ranks))
        on_devices = context.strategy.collectives != "gloo"
        meet = functools.partial(self._meet_at_use, "a batch")
        moves = Moves(ranks, context.compiled, meet, recorder.counts)
        self._moves = moves if on_devices else None
        self._sites: weakref.WeakKeyDictionary[Module, dict[Any, CallSite]] = (
            weakref.WeakKeyDictionary()
        )
        self._sizes: weakref.WeakKeyDictionary[Module, int] = weakref.WeakKeyDictionary()

    def install(self, undo: ExitStack) -> None:
        """Install what a split call needs."""
        self._hooks.install(undo)
        undo.enter_context(reduced_by(self._sum))
        backward.install(undo)
        watch_saving_hooks(undo)
        gather_for_functions(undo)
        watch_one_hot(undo)
        if self._moves is not None:
            self._moves.install(undo)

    @property
    def active(self) -> bool:
        """True if a split call is running in this thread.

        What reduces over the batch then has to reduce over the rows of all ranks.
        """
        if not self._active:
            return False
        return torch.compiler.is_compiling() or threading.get_ident() == self._thread

    @active.setter
    def active(self, active: bool) -> None:
        self._active, self._thread = active, threading.get_ident()
        ROWS.only = active

    @property
    def registered(self) -> Marks:
        """Marks of the modules that hooks, modules and parameters were registered on."""
        return self._hooks.registered

    @property
    def moved(self) -> int:
        """Number of modules moved or cast so far."""
        return self._hooks.moved

    def state(self) -> dict[str, Any]:
        """Return the decisions for each root, by its class and line."""
        found: dict[str, Any] = {}
        for sites in self._sites.values():
            for key, site in sites.items():
                found[f"{site.name} {key!r}"] = saved(site)
        return found

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a result of `state`."""
        self._restored = state
        for sites in self._sites.values():
            for key, site in sites.items():
                self._fill(site, key)

    def _fill(self, site: CallSite, key: Any) -> None:
        state = self._restored.get(f"{site.name} {key!r}")
        if state is not None:
            fill(site, state)
            site.hooks = self.registered.count

    def run(
        self, root: Root, module: Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run one call of a root: split, whole, or verified."""
        try:
            inputs = tensors_in((args, kwargs))
        except RecursionError:  # such as nodes of a tree that know their parent
            self._recorder.note(_CIRCULAR)
            return call(*args, **kwargs)
        if not self._may_split(inputs):
            return call(*map_tensors(args, linked), **map_tensors(kwargs, linked))
        if not any(tensor.dim() for tensor in inputs):
            return self._without_rows(root, module, call, args, kwargs)
        site = self._site(root, module, args, kwargs)
        if site.few and not has_few_rows(inputs, self._ranks.world_size):
            site.try_again()
        hooked = self._is_hooked(site, module)
        if site.decisions is None or hooked:
            site.decisions = Decisions(module)
        shapes = tuple([t.shape for t in inputs])
        values = (shapes, *argument_values(args, kwargs), *site.decisions.values())
        count = 0 if site.split is None else row_count(inputs, site.split.inputs)
        fewest = count // self._ranks.world_size
        limits = site.decisions.limits
        due = site.is_due(values, count, fewest, limits, hooked=hooked)
        rows = None if due or not fewest else self._rows(count)
        if rows is None and any(isinstance(tensor, LazyRows) for tensor in inputs):
            args, kwargs = map_tensors(args, linked), map_tensors(kwargs, linked)
            inputs = tensors_in((args, kwargs))
        if due:
            # A signal handler's exception inside a trial would look like the call's own.
            with held_signals():
                return self._verified(site, root, module, args, kwargs, inputs)
        if rows is None:
            return self._whole(site, root, call, args, kwargs)
        self._recorder.apply(type(module).__name__, root.where)
        self._recorder.counts["split calls"] += 1
        streams = self._streams.for_forward(_device_of(root))
        doing = f"call {type(module).__name__}"
        if root.replica is not None and root.replica.gathers:
            self._same_line.check(doing)
        else:
            self._same_line.check_later(doing)
        try:
            return self._split(site, rows, root, module, call, streams, args, kwargs, inputs)
        finally:
            self._ranks.end_call()

    def _split(
        self,
        site: CallSite,
        rows: Rows,
        root: Root,
        module: Module,
        call: Call,
        streams: AbstractContextManager[None],
        args: Any,
        kwargs: Any,
        inputs: Sequence[Tensor],
    ) -> Any:
        """Run one call with this rank's rows, and gather its outputs."""
        split = site.split
        assert split is not None
        own_args, own_kwargs = split.cut(args, kwargs, rows)
        if site.changes is None:
            site.changes = Changes(module, split.changed, split.places)
        held, why_not = site.changes.hold(), ""
        try:
            output = self._computed(root, module, streams, call, own_args, own_kwargs)
            why_not = self._difference(site, held, module, output, rows)
        except Parted:
            why_not = _MORE if any(_MORE in text for text in self._ranks.reports) else _OTHERS
            self._wait_for_others()
        except OwnTensorsError:
            why_not = OWN_TENSORS
            self._wait_for_others()
        if why_not:
            if any(self._ranks.gather("lost" if held.has_lost() else "")):
                refuse(_written_late(type(module).__name__, call_site()))
            held.restore()
            return self._again(site, root, module, call, args, kwargs, why_not)
        # Code that the script compiles can't take LazyRows: its outputs are gathered at once.
        gather: Gather = rows.gather
        if not self._compiled.functions:
            meet = functools.partial(self._meet_at_use, f"an output of {site.name}")
            gather = functools.partial(gather_lazily, rows=rows, meet=meet)
        whole = split.put_together(module, output, rows, gather, inputs)
        backward.mark(split.with_rows(module, whole), lambda: refuse(_asked_late(site.name)))
        return whole

    def _computed(
        self, root: Root, module: Module, streams: Any, call: Call, args: Any, kwargs: Any
    ) -> Any:
        """Return what a split call computes from this rank's rows."""
        self.active = True
        try:
            with streams, shared_parameters(module, self._ranks, _owned(root)):
                return call(*args, **kwargs)
        finally:
            self.active = False

    def _wait_for_others(self) -> None:
        """Answer each sum that other ranks may still be in, until all are through."""
        while not meet_inside(self._ranks, _THROUGH):
            pass

    def _difference(
        self, site: CallSite, held: Held, module: Module, output: Any, rows: Rows
    ) -> str:
        """Return what is wrong on all ranks with what a split call has made; empty if nothing is.

        Raises:
            Parted: If they haven't made the same.
        """
        assert site.split is not None
        if held.has_lost() or not held.is_foreseen():
            if not meet_inside(self._ranks, _CHANGING, also=_MORE):
                raise Parted
            return _MORE
        read, written = not site.calls % READ_EVERY, held.buffers()
        form, numbers = site.split.form(module, output, rows, written, read=read) or (None, [])
        part = site.split.small_part(output, rows)
        if not meet_inside(self._ranks, _tag_of(form), numbers, part=part):
            raise Parted
        if form is None:
            return _OTHERS
        if numbers and self._ranks.spread > CLOSE:
            return "what it returns or keeps without rows differs between the ranks"
        return ""

    def _again(
        self,
        site: CallSite,
        root: Root,
        module: Module,
        call: Call,
        args: Any,
        kwargs: Any,
        why_not: str,
    ) -> Any:
        """Make a call again on the whole batch, whose split call can't be accepted."""
        args, kwargs = map_tensors(args, linked), map_tensors(kwargs, linked)
        site.redone += why_not == _MORE
        if why_not != _MORE or site.redone > RETRIES:
            self._refuse(site, why_not, final=True)
            return call(*args, **kwargs)
        with held_signals():
            return self._verified(site, root, module, args, kwargs, tensors_in((args, kwargs)))

    def _meet_at_use(self, name: str) -> None:
        """Check that all ranks use a large output at the same line: each has its rows only."""
        in_backward = torch._C._current_graph_task_id() != -1  # of a device, in a thread of its own
        if self._ranks.is_forked() or not (in_backward or self._ranks.is_here()):
            refuse(_used_in_thread(name))
        self._same_line.check(f"use all rows of {name}")

    def _without_rows(self, root: Root, module: Module, call: Call, args: Any, kwargs: Any) -> Any:
        """Run a call whose arguments show no rows, such as an object that holds its tensors."""
        site = self._site(root, module, (), {})  # one for all: their kinds decide nothing
        if not site.final:
            if self._recorder.state is State.ARMED:
                self._recorder.settle(State.ARMED, _NOTHING)
            self._refuse(site, _no_rows_in(args, kwargs), final=True)
        return self._whole(site, root, call, args, kwargs)

    def _whole(self, site: CallSite, root: Root, call: Call, args: Any, kwargs: Any) -> Any:
        """Run a call on the whole batch, in which submodules may be split."""
        self._recorder.counts["whole calls"] += 1
        if root.replica is not None and root.replica.gathers:  # a sharded call communicates
            self._same_line.check(f"call {root.name}")
        if not site.final or site.few or not self._inside.flag:
            return call(*args, **kwargs)
        with self._descended(functools.partial(self._part, root)):
            return call(*args, **kwargs)

    def _part(self, root: Root, module: Module, args: Any, kwargs: Any) -> Any:
        """Run the call of a submodule of a root that is called on the whole batch."""
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
        """Set in the block whether calls of submodules go to ``part``."""
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
        """Sum over the ranks what a split call computes from the rank's rows.

        Raises:
            Parted: If other ranks are elsewhere in the call.
        """
        if (of_loss or self._trying) and not meet_inside(self._ranks, _REDUCING):
            raise Parted
        return self._ranks.sum(part.clone())

    def _may_split(self, inputs: Sequence[Tensor]) -> bool:
        if not self._ranks.joined or self.whole_only:
            return False
        if not all(map(can_be_cut, inputs)):
            self._recorder.note(
                "calls with tensors that have no rows to cut out run on the whole batch"
            )
            return False
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return False  # inside a transform of torch.func
        if is_observed():
            self._recorder.note(
                "calls inside a dispatch or function mode or hooks on saved tensors, which see"
                " what is computed, run on the whole batch"
            )
            return False  # such as a counter of operations
        forward_ad: Any = torch.autograd.forward_ad
        levels = forward_ad._current_level >= 0
        return not levels and self._ranks.is_here()

    def _site(self, root: Root, module: Module, args: Any, kwargs: Any) -> CallSite:
        sites = self._sites.get(module)
        if sites is None:
            sites = self._sites[module] = {}
        mode = module.training, torch.is_grad_enabled()
        key = *mode, call_signature(args, kwargs)
        if key not in sites and len(sites) >= MOST_SITES:  # such as captions
            key = *mode, call_signature(args, kwargs, texts=False)
        site = sites.get(key)
        if site is None:
            site = sites[key] = CallSite(_name(root, module))
            self._fill(site, key)
        return site

    def _is_hooked(self, site: CallSite, module: Module) -> bool:
        """True if something was registered on what a call uses since the last call of its kind."""
        since, site.hooks = site.hooks, self.registered.count
        if since == site.hooks:
            return False
        others = (part for ref in site.others if (part := ref()) is not None)
        return self.registered.any_since(since, itertools.chain(Module.modules(module), others))

    @contextmanager
    def _trial_split(self, module: Module) -> Iterator[None]:
        """Run the block as the inside of a split call, on trial."""
        self._trying = self.active = True
        try:
            with shared_parameters(module, self._ranks):
                yield
        finally:
            self._trying = self.active = False

    def _verified(
        self,
        site: CallSite,
        root: Root,
        module: Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: Sequence[Tensor],
    ) -> Any:
        """Run a call on the whole batch, and verify how it can be split."""
        self._check_inputs(module, inputs)
        if self._recorder.state is State.ARMED:
            self._recorder.settle(State.ARMED, _NOTHING)
        self._recorder.counts["whole calls"] += 1
        splitting = functools.partial(self._trial_split, module)
        trial = SplitTrial(module, self._ranks, splitting, self.unowned)
        try:
            output = trial.make_whole_call(args, kwargs)
        except Exception as error:
            if _NO_MEMORY not in type(error).__name__:
                # The script may go on with other batches, such as one that looks for a limit.
                why = f"it has raised {type(error).__name__}, which it might not do for a part"
                self._refuse(site, why, final=True)
            raise
        begun_s = time.perf_counter()
        try:
            gradients, earlier = site.verified < GRADIENTS, site.split
            site.split = trial.find(args, kwargs, inputs, earlier, gradients=gradients)
            if earlier is not None:
                site.split = site.split.with_earlier(earlier)
        except RefusalError as refusal:
            self._refuse(site, str(refusal), final=refusal.final or bool(site.verified))
            site.few = has_few_rows(inputs, self._ranks.world_size)
        else:
            self._accept(site, trial, row_count(inputs, site.split.inputs))
            asked = functools.partial(self._refuse, site, ASKED, final=True)
            backward.mark(site.split.with_rows(module, output), asked)
        if trial.by_values and root.replica is not None:
            # DDP would hang if a submodule gets no row on one rank, and so no gradient there.
            root.replica.leave_ddp()
        self._verifying_s += time.perf_counter() - begun_s
        self._recorder.counts["ms of verifying"] = round(1000 * self._verifying_s)
        return output

    def _accept(self, site: CallSite, trial: SplitTrial, rows: int) -> None:
        """Have the next calls of a site be split as a trial has shown."""
        if site.why_not:
            self._recorder.take_up(site.name)
        site.why_not, site.changes = "", None
        site.others = [weakref.ref(other) for other in trial.others()]
        site.verified += 1
        site.most_rows = max(site.most_rows, rows)
        site.single |= rows // self._ranks.world_size == 1
        self._recorder.counts["verified"] += 1

    def _check_inputs(self, module: Module, inputs: Sequence[Tensor]) -> None:
        """Check that all ranks have the same inputs, whose rows else belong to no one batch."""
        with torch.no_grad():
            parts = [part for tensor in inputs for part in strided_parts(tensor)]
            sums = [t.sum(dtype=torch.float64).cpu() for t in parts if not t.is_complex()]
        self._same_line.check(f"call {type(module).__name__}", sums)

    def _refuse(self, site: CallSite, why: str, *, final: bool) -> None:
        since = f", after {site.verified} verified calls" if site.verified else ""
        site.split, site.why_not, site.final = None, why, final or site.calls >= RETRIES
        self._recorder.pass_over(
            site.name,
            f"every rank computes the whole batch, which is correct and no faster: {why}{since}",
            missed=True,
        )


def shared_parameters(
    module: Module, ranks: Ranks, owned: frozenset[int] | None = None
) -> AbstractContextManager[None]:
    """Average the gradients of tensors that replace parameters, as in functional_call.

    They are averaged inside the backward pass: the averaging after it only knows a module's own
    parameters.

    Args:
        module: The module that is called.
        ranks: All ranks.
        owned: The ids of its own parameters; default: those that are `Parameter`, as in a trial.

    Raises:
        OwnTensorsError: If the call has put others in the same places, whose gradients aren't
            averaged.
    """
    if not torch.is_grad_enabled():
        return _AS_IT_IS
    slots: list[dict[str, Any]] = [part._parameters for part in Module.modules(module)]
    replaced = [
        (slot, name, tensor)
        for slot in slots
        for name, tensor in slot.items()
        if tensor is not None
        and tensor.requires_grad
        and not (isinstance(tensor, Parameter) if owned is None else id(tensor) in owned)
    ]
    return _shared(replaced, ranks) if replaced else _AS_IT_IS


@contextmanager
def _shared(replaced: list[tuple[dict[str, Any], str, Tensor]], ranks: Ranks) -> Iterator[None]:
    """Put shared tensors in the places of others in the block.

    Args:
        replaced: Parameters of modules, a name and the tensor.
        ranks: All ranks.
    """
    shared: dict[int, Any] = {}
    for slot, name, tensor in replaced:
        slot[name] = shared.setdefault(id(tensor), share(tensor, ranks))
    try:
        yield
        if any(slot.get(name) is not shared[id(tensor)] for slot, name, tensor in replaced):
            raise OwnTensorsError
    finally:
        for slot, name, tensor in replaced:
            slot[name] = tensor


def _owned(root: Root) -> frozenset[int] | None:
    """Return the ids of a root's own parameters; None if FSDP averages them."""
    return None if root.replica is None or root.replica.gathers else root.replica.ids


def _tag_of(form: str | None) -> int:
    """Return the tag of a rank that is through a split call, with what it has made."""
    return _THROUGH if form is None else 16 + zlib.crc32(form.encode()) % (2**20 - 16)


def _used_in_thread(name: str) -> FasttrainError:
    return FasttrainError(
        f"a thread or a child process of the script uses {name}, where ranks can't communicate",
        why="the rows of a large tensor stay on the ranks that have computed or moved them until it"
        " is used",
        fix="use it in the main thread first, such as by .clone(), or use one process",
        slug="split-thread",
        exit_code=ExitCode.CONTRADICTION,
    )


def _written_late(name: str, where: str) -> FasttrainError:
    return FasttrainError(
        f"{name} writes to a parameter or a large buffer at {where}, which it had not done before",
        why="each rank has called it with a part of the batch, and what that has written can't be"
        " restored to what one process would have",
        fix="write to it in the first call, too, after which the model gets whole batches;"
        " or use one process",
        slug="split-written",
        exit_code=ExitCode.CONTRADICTION,
    )


def _asked_late(name: str) -> FasttrainError:
    return FasttrainError(
        f"the script asks for a gradient w.r.t. a tensor that {name} returns or keeps, for the"
        " first time after calls were split",
        why="the model has computed other outputs from the same tensor, each rank from its own rows"
        " only",
        fix="ask for it in the first call, too, after which the model gets whole batches;"
        " or use one process",
        slug="split-gradient",
        exit_code=ExitCode.CONTRADICTION,
    )


def _no_rows_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    kinds = ", ".join(dict.fromkeys(type(value).__name__ for value in (*args, *kwargs.values())))
    return f"it takes no tensor with rows, but {kinds}" if kinds else "it takes no arguments"


def _name(root: Root, module: Module) -> str:
    whole = root.ref()
    if whole is module or whole is None:
        return f"{root.name} ({root.where})"
    inside = next((name for name, part in whole.named_modules() if part is module), "?")
    return f"{inside} of {root.name} ({root.where})"


def _device_of(root: Root) -> torch.device | None:
    parameter = root.parameter()
    return parameter.device if parameter is not None else None
