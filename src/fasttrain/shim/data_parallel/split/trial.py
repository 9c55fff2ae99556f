"""Runs a call on the whole batch and, in a trial, split among the ranks; compares the two."""

from __future__ import annotations

import functools
import json
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import grad as gradients_of  # before a lever replaces it
from torch.nn import Module

from fasttrain.model.errors import ExitCode, FasttrainError
from fasttrain.shim.data_parallel.rank_consistency import Parted, meet_inside
from fasttrain.shim.data_parallel.ranks import Ranks
from fasttrain.shim.data_parallel.shards.checks import before_gathers, writes_refused
from fasttrain.shim.data_parallel.shards.low_gathers import widened
from fasttrain.shim.data_parallel.shards.replica import has_sharded_parts, put_away
from fasttrain.shim.data_parallel.split.agreement import (
    DisagreementError,
    check_equal,
    largest,
    row_dimensions,
    structure_of,
)
from fasttrain.shim.data_parallel.split.candidates import (
    OF_LIST,
    Dimensions,
    candidates,
    cut_alike,
    has_few_rows,
    list_entries,
    row_count,
)
from fasttrain.shim.data_parallel.split.changes import IN_DOUBLE, ModuleState, Place, parameter_sums
from fasttrain.shim.data_parallel.split.decisions import may_print, modules_in_globals
from fasttrain.shim.data_parallel.split.graph import edge_of, graph_edges, leaves_of
from fasttrain.shim.data_parallel.split.neutral import Draw, Neutral, along_which, has_place
from fasttrain.shim.data_parallel.split.number_reads import WHY_READ
from fasttrain.shim.data_parallel.split.registrations import foreign_hook
from fasttrain.shim.data_parallel.split.rows import Rows, memory_order
from fasttrain.shim.data_parallel.split.surroundings import (
    GLOBAL,
    NEAR,
    CallSurroundings,
    SideEffectWatch,
    Silence,
    all_random_states,
    other_random_states,
    same_states,
)
from fasttrain.shim.data_parallel.split.ways import Split, with_all_rows
from fasttrain.shim.data_parallel.tensor_sums import sums_of
from fasttrain.shim.hooks.containers import map_tensors, tensors_in
from fasttrain.shim.hooks.roots import is_sharded, parameters_of
from fasttrain.shim.process.callsite import call_site
from fasttrain.shim.process.refusal import refuse

# Relative to the largest gradient of any parameter: rounding that remains where sums cancel, as for
# a bias before a BatchNorm.
_FLOOR = 1e-5
_NO_MEMORY = "OutOfMemoryError"  # torch's exception on any device
# Modules whose autograd functions are right for rows if their forward is. Others of torch's hold
# what the script has written: checkpoints with reentry, compiled graphs, `torch.library`.
_KNOWN_BACKWARD = ("fasttrain.", "torch.distributed.", "torch.nn.")
_BY_VALUES = (
    "which of its parts it calls may depend on the batch's values, and all ranks together put the"
    " parameters of a sharded part together"
)
PLACES = (0.01, 0.99)  # of a draw's range, for branches that are taken with a small probability
_FEW_ROWS = "no argument has a row for each rank"
_OF_LISTS = "it takes a list, of which no entries are split but rows of its tensors"
_UNHELD = (
    "it uses a tensor that requires a gradient and is neither its parameter nor an argument, nor in"
    " an optimizer"
)
OWN_TENSORS = "it puts tensors in the places of its parameters while it runs"
_TOGETHER, _GATHERING = 1, 5  # tags of what ranks are doing when they meet
Value = tuple[Any, dict[Place, Any]]  # a call's output, and what it changes in its modules


class OwnTensorsError(Exception):
    """Raised in a split call that has put tensors in the places of its parameters."""


class _AloneError(BaseException):
    """Raised if other ranks don't gather the part that this one does; scripts must not catch it."""


class RefusalError(Exception):
    """Raised if a call can't be split; the message says why.

    Attributes:
        final: True if no later call of this kind will be tried.
    """

    def __init__(self, why: str, *, final: bool) -> None:
        super().__init__(why)
        self.final = final


class SplitTrial:
    """One call of a root, whose split call is compared with the whole one.

    Args:
        module: The root.
        ranks: All ranks, which run the same call.
        splitting: Returns a context that marks the inside of a split call.
        unowned: Returns the ids of parameters that no root owns and whose gradients are averaged.

    Attributes:
        by_values: True if shapes in the whole call depend on values, so that some ranks may use a
            submodule and others not.
    """

    def __init__(
        self,
        module: Module,
        ranks: Ranks,
        splitting: Callable[[], AbstractContextManager[None]],
        unowned: Callable[[], set[int]] = set,
    ) -> None:
        self._module = module
        self._ranks = ranks
        self._splitting = splitting
        self._unowned = unowned
        self._plainly: Any = module._call_impl
        self._before: ModuleState
        self._around: CallSurroundings
        self._sums: list[float] = []
        self._same: tuple[int | None, ...] = ()
        self._drawn: list[Draw] = []  # in the last call
        self._drawn_by_whole: list[Draw] = []
        self._why_not = ""
        self._near: list[Dimensions] = []  # guesses that may differ by rounding only
        self.by_values = False

    def make_whole_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the script's call, and note side effects that rule out a split."""
        if hooked := foreign_hook(self._module):
            self._why_not = f"the script has hooks on {hooked}, which have to see whole batches"
            return self._plainly(*args, **kwargs)
        if any(isinstance(part, torch.jit.ScriptModule) for part in Module.modules(self._module)):
            self._why_not = "it is a TorchScript module, whose state Python can't restore"
            return self._plainly(*args, **kwargs)
        inputs = tensors_in((args, kwargs))
        arguments = Arguments(inputs)
        self._before, self._sums = ModuleState(self._module), parameter_sums(self._module)
        self._around = around = CallSurroundings(self._module, args, kwargs)
        states = other_random_states()
        watched = SideEffectWatch()
        with watched, writes_refused(self._module):
            output = self._plainly(*args, **kwargs)
        self._same = _same_tensors(tensors_in(output), inputs)
        if change := arguments.change():
            self._why_not = change
        elif watched.seen or _gives_views(tensors_in(output), inputs):
            self._why_not = watched.seen or "it returns a view of an argument"
        elif name := may_print(self._module):
            self._why_not = f"{name} may print"
        elif self._before.has_grown(self._module):
            self._why_not = "it adds modules or parameters to itself"
        elif self._sums != parameter_sums(self._module):  # which its surroundings have, too
            self._why_not = "it changes its parameters"
        elif kind := around.changed():
            self._why_not = f"it changes something outside its modules, in a {kind}"
        elif not same_states(states, other_random_states()):
            self._why_not = "it draws from Python's or NumPy's random number generator"
        return output

    def others(self) -> list[Module]:
        """Return the modules that the call may use and that aren't parts of the root."""
        return [*self._around.modules(), *modules_in_globals(self._module)]

    def find(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: Sequence[Tensor],
        known: Split | None,
        *,
        gradients: bool,
    ) -> Split:
        """Return a way to split the call that has the whole call's results.

        Args:
            args: Positional arguments.
            kwargs: Keyword arguments.
            inputs: The tensors among them.
            known: The way that agreed before, which must agree again.
            gradients: Compare gradients, too.

        Raises:
            RefusalError: If there is none.
        """
        self._check(self._why_not, final=False)
        entries = list_entries(args, kwargs)
        found = candidates(inputs, self._ranks.world_size)
        guesses = [guess for guess in found if cut_alike(guess, entries)]
        if known is not None:
            guesses = [known.inputs]
            if row_count(inputs, known.inputs) < self._ranks.world_size:
                return known  # too few rows for all ranks: the call runs on the whole batch
        if not guesses:
            raise RefusalError(_OF_LISTS if found else _FEW_ROWS, final=False)
        return self._searched(guesses, args, kwargs, gradients=gradients)

    def _searched(
        self, guesses: Sequence[Dimensions], args: Any, kwargs: Any, *, gradients: bool
    ) -> Split:
        """Return the first split by a guess that agrees, in full precision."""
        device = next((p.device.type for p in parameters_of(self._module)), "cpu")
        low = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        # In full precision: the rounding of bf16 would hide differences.
        with self._restored_after(), torch.autocast(device, enabled=False), widened():
            lifted = {} if low is None else {low: torch.float32}
            given: Any = _detached(args, kwargs, lifted)
            try:
                with self._undone_after():
                    return self._search(guesses, *given, gradients=gradients)
            except RefusalError as refusal:
                # Not the error itself, whose traceback would refer to this frame, and so keep the
                # graphs of the trial, and all that it has searched, until a garbage collection.
                why, final = str(refusal), refusal.final
            if _NO_MEMORY in why:
                # The script's own graph takes device memory, too: what the trial's calls save for
                # their gradients goes to the host's memory in a second attempt.
                with self._undone_after(), torch.autograd.graph.save_on_cpu():
                    return self._search(guesses, *given, gradients=gradients)
            if not self._near or is_sharded(self._module):
                raise RefusalError(why, final=final)
            try:
                return self._searched_in_double(args, kwargs)
            except RefusalError:
                raise RefusalError(why, final=final) from None

    def _searched_in_double(self, args: Any, kwargs: Any) -> Split:
        """Return the first split that agrees in fp64, of those that nearly did.

        Where a number is as close to the kink of a ReLU as rounding, the order of a sum decides
        about its derivative, 0 or 1: gradients of a convnet with BatchNorm then differ by more than
        rounding. In fp64 hardly any number is that close.

        Raises:
            RefusalError: If none agrees.
        """
        with self._undone_after(), self._before.in_double(self._module):
            given = _detached(args, kwargs, IN_DOUBLE)
            return self._search(self._near, *given, gradients=True)

    @contextmanager
    def _undone_after(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._undo_changes()

    def _undo_changes(self) -> None:
        """Undo what a call with a part of the batch has changed and the whole call has not.

        Raises:
            RefusalError: If it has changed something, and that was undone.
            SystemExit: ``ranks-changed`` if it can't be undone.
        """
        kept = self._sums == parameter_sums(self._module)
        threads = _has_threads()
        # Threads may change globals at any time: then only what the call itself reaches counts.
        within = NEAR if threads else GLOBAL
        if threads and not kept:
            kept = True
            self._why_not = "its parameters change while it is called, in another thread"
        kind = self._around.changed(within=within) if kept else "parameter"
        undone = not kind or (kept and self._around.restore(within=within))
        changes = [text for text in self._ranks.gather(f"{kind} {undone}") if text != " True"]
        if any(text.endswith("False") for text in changes):
            what = changes[0].split()[0]
            refuse(_changed_for_good(type(self._module).__name__, what, call_site()))
        if changes:
            what = f"in a {changes[0].split()[0]}"
            raise RefusalError(
                f"with a part of the batch it changes something outside its modules, {what}",
                final=True,
            )
        self._check(self._why_not, final=True)

    def _search(
        self,
        guesses: Sequence[Dimensions],
        args: Any,
        kwargs: Any,
        leaves: list[Tensor],
        *,
        gradients: bool,
    ) -> Split:
        outer = self._call(args, kwargs, splitting=False)
        self._drawn_by_whole = self._drawn
        parts = self.by_values and has_sharded_parts(self._module)
        self._check(_BY_VALUES if parts else "", final=True)
        reasons = []
        for guess in guesses:
            try:
                return self._agreeing(guess, outer, args, kwargs, leaves, gradients)
            except DisagreementError as disagreement:
                reasons.append(str(disagreement))
                if disagreement.near and guess not in self._near:
                    self._near.append(guess)
                if _NO_MEMORY in reasons[0]:
                    break
        if has_few_rows(tensors_in((args, kwargs)), self._ranks.world_size):
            raise RefusalError(_FEW_ROWS, final=False)
        why = reasons[0]  # that of the likeliest guess
        with_list = any(OF_LIST in entry for entry in list_entries(args, kwargs))
        raise RefusalError(f"{_OF_LISTS}: {why}" if with_list else why, final=True)

    def _check(self, why_not: str, *, final: bool) -> None:
        """Raise RefusalError on all ranks if any rank has a reason."""
        reasons = [text for text in self._ranks.gather(why_not) if text]
        if reasons:
            raise RefusalError(reasons[0], final=final)

    @contextmanager
    def _restored_after(self) -> Iterator[None]:
        after = ModuleState(self._module)
        states = all_random_states()
        try:
            yield
        finally:
            after.put()
            for put, state in states:
                put(state)

    def _call(self, args: Any, kwargs: Any, *, splitting: bool, **constants: Any) -> Value | str:
        """Run one call without randomness from the state before; return its result or its error.

        Args:
            args: Positional arguments.
            kwargs: Keyword arguments.
            splitting: Run it as the inside of a split call.
            constants: Arguments for `Neutral`: which constants replace random numbers.
        """
        self._before.begin()
        with ExitStack() as stack:
            stack.enter_context(Silence())
            if splitting:
                stack.enter_context(before_gathers(self._module, self._meet_to_gather))
            known = [b for part in self._before.parts for b in part._buffers.values()]
            neutral = Neutral((b for b in known if b is not None), **constants)
            try:
                with self._splitting() if splitting else nullcontext(), neutral:
                    output = self._plainly(*args, **kwargs)
            except OwnTensorsError:
                return OWN_TENSORS
            except _AloneError:
                put_away(self._module)
                return "an error: other ranks don't call the same parts"
            except Exception as error:  # noqa: BLE001 - the script's model, called for a trial
                put_away(self._module)
                return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            except Parted:
                put_away(self._module)
                return "an error: its number of losses differs from other ranks"
        self._drawn = neutral.drawn
        self.by_values |= neutral.by_values and not splitting
        if neutral.reads:
            return neutral.reads
        return output, self._before.left()

    def _meet_to_gather(self, number: int) -> None:
        """Check that all ranks gather a part: one whose rows have raised an error doesn't.

        Raises:
            _AloneError: If they don't.
        """
        if not meet_inside(self._ranks, _GATHERING, [float(number)]) or self._ranks.spread:
            raise _AloneError

    def _agreeing(
        self,
        guess: Dimensions,
        outer: Value | str,
        args: Any,
        kwargs: Any,
        leaves: list[Tensor],
        gradients: bool,
    ) -> Split:
        """Return the split by a guess; raise DisagreementError unless all ranks' results agree."""
        rows = Rows(self._ranks, row_count(tensors_in((args, kwargs)), guess))
        # Autograd nodes with a smaller number are older than the call.
        begun = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        inner = self._call(*Split(guess).cut(args, kwargs, rows), splitting=True)
        drawn = self._drawn
        dims = self._together(lambda: self._dimensions(outer, inner, rows, begun))
        assert not isinstance(outer, str)
        assert not isinstance(inner, str)
        whole, given = tensors_in(outer), tensors_in(with_all_rows(inner, dims, rows))
        self._together(lambda: check_equal(whole, given, "values"))
        if any(t.requires_grad for t in whole):
            self._compare_derivatives(whole, given, leaves, gradients=gradients)
        kept = self._kept(inner, dims)
        ancestors, _ = graph_edges(tensors_in(inner), begun)
        made = any(edge_of(t) in ancestors for t in tensors_in(inner))
        if drawn and None in dims:
            self._check_draws(Split(guess).cut(args, kwargs, rows), dims)
        of_whole = list(self._drawn_by_whole)
        for place in filter(functools.partial(has_place, of_whole), PLACES):
            along = along_which(of_whole, drawn)
            self._check_branches(guess, args, kwargs, dims, place=place, along=along)
        outputs = tuple(dims[: len(tensors_in(inner[0]))])
        ndims = tuple(tensor.dim() for tensor in tensors_in(outer[0]))
        orders = tuple(tuple(memory_order(tensor)) for tensor in tensors_in(outer[0]))
        return Split(guess, outputs, kept, made, self._same, ndims, tuple(inner[1]), orders)

    def _compare_derivatives(
        self, whole: list[Tensor], given: list[Tensor], leaves: list[Tensor], *, gradients: bool
    ) -> None:
        if is_sharded(self._module):
            # The backward pass would communicate. torch's own operators need no comparison: their
            # derivatives are those of what was compared.
            self._together(lambda: _refuse_own_backward(whole))
        elif gradients:
            parameters = list({id(p): p for p in parameters_of(self._module)}.values())
            self._compare_gradients(whole, given, [*parameters, *leaves])

    def _kept(self, inner: Value, dims: Sequence[int | None]) -> tuple[Any, ...]:
        """Return the places in which a call leaves tensors, each with the dimensions of rows there.

        Raises:
            DisagreementError: If a buffer has rows.
        """
        parts, at = self._before.parts, len(tensors_in(inner[0]))
        kept = []
        for (number, name), value in inner[1].items():
            count = len(tensors_in(value))
            of_value, at = dims[at : at + count], at + count
            if isinstance(value, Tensor) and name in parts[number]._buffers:
                if of_value != [None]:
                    raise DisagreementError(f"the buffer {name} has rows of the batch")
            elif of_value:
                kept.append((number, name, tuple(of_value)))
        return tuple(kept)

    def _check_draws(self, arguments: Any, dims: Sequence[int | None]) -> None:
        """Check that outputs without rows don't depend on numbers that each rank draws.

        Raises:
            DisagreementError: If they do: one process would draw them once, for all rows.
        """
        left = self._call(*arguments, splitting=True, otherwise=self._ranks.rank % 2 == 1)
        while not meet_inside(self._ranks, _TOGETHER):
            pass
        sums: list[float] = []
        if not isinstance(left, str) and len(tensors := tensors_in(left)) == len(dims):
            sums = sums_of(t for t, dim in zip(tensors, dims, strict=True) if dim is None)
        first, *others = map(json.loads, self._ranks.gather(json.dumps(sums)))
        if any(len(first) != len(other) or not all(map(_close, first, other)) for other in others):
            raise DisagreementError("it draws random numbers for all rows together, and returns or"
                                    " stores what depends on them")  # fmt: skip

    def _check_branches(
        self,
        guess: Dimensions,
        args: Any,
        kwargs: Any,
        dims: Sequence[int | None],
        **constants: Any,
    ) -> None:
        """Check that the split call agrees with other constants in place of random numbers, too.

        A call that mixes its rows with a probability under a half doesn't where each draw is in the
        middle of its range.

        Raises:
            DisagreementError: If it doesn't.
        """
        outer = self._call(args, kwargs, splitting=False, **constants)
        if isinstance(outer, str) and outer not in WHY_READ:
            return  # on all ranks alike: such numbers may never be drawn
        rows = Rows(self._ranks, row_count(tensors_in((args, kwargs)), guess))
        begun = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        inner = self._call(*Split(guess).cut(args, kwargs, rows), splitting=True, **constants)
        found = self._together(lambda: self._dimensions(outer, inner, rows, begun))
        if found != dims:
            raise DisagreementError("which of its tensors have rows depends on random numbers")
        whole, given = tensors_in(outer), tensors_in(with_all_rows(inner, found, rows))
        self._together(lambda: check_equal(whole, given, "values for other random numbers"))

    def _dimensions(
        self, outer: Value | str, inner: Value | str, rows: Rows, begun: int
    ) -> list[int | None]:
        if isinstance(outer, str) or isinstance(inner, str):
            raise DisagreementError(_failure(outer, inner))
        if structure_of(outer) != structure_of(inner):
            raise DisagreementError("with a part of the batch it returns more than other sizes")
        part = tensors_in(inner)
        dims = row_dimensions(tensors_in(outer), part, rows)
        edges, name = graph_edges(part, begun)
        if name:
            raise DisagreementError(f"it uses a tensor that was computed outside of it ({name})")
        if not is_sharded(self._module):  # FSDP's whole parameters are in no module after the call
            averaged = {id(p) for p in parameters_of(self._module)} | self._unowned()
            if any(id(leaf) not in averaged for leaf in leaves_of(edges)):
                raise DisagreementError(_UNHELD)
        # A script may first ask for a gradient w.r.t. hidden states at any later call, and one of
        # logits beside a loss hardly will: `backward.mark` could only end the run then.
        with_rows = [t for t, dim in zip(part, dims, strict=True) if dim is not None]
        ancestors, _ = graph_edges(with_rows, begun)
        if any(t.retains_grad for t in with_rows):
            raise DisagreementError("it retains gradients of tensors that it returns or keeps")
        if any(edge_of(t) in ancestors for t in with_rows):
            raise DisagreementError("it returns tensors, and others that it has computed from them")
        return dims

    def _together(self, act: Callable[[], Any]) -> Any:
        """Return a check's result; raise DisagreementError unless it passes alike on all ranks."""
        result, why, near = None, "", False
        try:
            result = act()
        except DisagreementError as disagreement:
            why, near = str(disagreement), disagreement.near
        while not meet_inside(self._ranks, _TOGETHER):
            why = why or "it computes other losses on other ranks"
        told = self._ranks.gather(json.dumps([why, near, str(result)]))
        each = list(map(json.loads, told))
        wrong = [(why, near) for why, near, _ in each if why]
        if wrong:
            raise DisagreementError(wrong[0][0], near=all(near for _, near in wrong))
        if len({found for *_, found in each}) > 1:
            raise DisagreementError("it returns other shapes on other ranks")
        return result

    def _compare_gradients(
        self, whole: list[Tensor], given: list[Tensor], by: list[Tensor]
    ) -> None:
        of = [tensor for tensor in by if tensor.requires_grad]
        with _without_hooks(of):
            both = self._together(lambda: _Both(_pulled_back(whole, of), _pulled_back(given, of)))
        expected = both.whole
        found = [self._averaged(*pair) for pair in zip(of, both.given, strict=True)]
        size = max(map(largest, expected), default=0.0)
        self._together(lambda: check_equal(expected, found, "gradients", _FLOOR * size, math.inf))

    def _averaged(self, of: Tensor, gradient: Tensor | None) -> Tensor | None:
        """Return the mean of a gradient over the ranks; None on a rank counts as zeros."""
        have = self._ranks.sum(torch.tensor([float(gradient is not None)], device="cpu"))
        if not have:
            return None
        dense = torch.zeros_like(of) if gradient is None else gradient.detach()
        dense = dense.to_dense() if dense.layout != torch.strided else dense
        return self._ranks.sum(dense / self._ranks.world_size)


class Arguments:
    """What a call may change in the tensors that it is given."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._before = self._now()

    def _now(self) -> tuple[list[int], list[tuple[bool, bool]]]:
        """Return how often each was written to, and whether its gradient is wanted and kept."""
        versions = [t._version for t in self._tensors if not t.is_inference()]
        return versions, [(t.requires_grad, t.retains_grad) for t in self._tensors]

    def change(self) -> str:
        """Return what has changed since, in words; empty if nothing has."""
        (versions, wanted), (versions_now, wanted_now) = self._before, self._now()
        if versions != versions_now:
            return "it changes its arguments in place"
        # A split call would do so with what is cut out of the script's tensors.
        return "it asks for gradients by its arguments" if wanted != wanted_now else ""


def _refuse_own_backward(outputs: list[Tensor]) -> None:
    """Raise DisagreementError if the script's code may compute one of the derivatives."""
    inner, _ = graph_edges(outputs, 0)
    nodes = {node for node, _ in inner}
    for node in {t.grad_fn for t in outputs if t.grad_fn is not None} | nodes:
        function = getattr(type(node), "_forward_cls", None)
        if function is not None and not function.__module__.startswith(_KNOWN_BACKWARD):
            raise DisagreementError(
                f"{function.__name__} has a backward of its own, which sharded calls can't compare"
            )


def _same_tensors(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[int | None, ...]:
    """Return for each output which argument it is; None if it is none."""
    places = {id(tensor): at for at, tensor in enumerate(inputs)}
    return tuple(places.get(id(tensor)) for tensor in outputs)


def _gives_views(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> bool:
    """True if an output shares an argument's memory without being that argument."""
    of_inputs = {id(tensor) for tensor in inputs}
    held = {_memory_of(tensor) for tensor in inputs} - {0}
    return any(_memory_of(t) in held for t in outputs if id(t) not in of_inputs)


def _memory_of(tensor: Tensor) -> int:
    plain = tensor.layout is torch.strided and not tensor.is_nested
    return tensor.untyped_storage().data_ptr() if plain else 0


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-3, abs_tol=1e-6)


def _failure(outer: Value | str, inner: Value | str) -> str:
    """Return why one of the two calls has no result."""
    for why in (*WHY_READ, OWN_TENSORS):
        if why in (outer, inner):
            return why
    if isinstance(outer, str):
        return f"it can't be repeated: {outer}"
    return f"with a part of the batch it raises {inner!s}"


def _has_threads() -> bool:
    """True if the script has threads, which may change what is reached through globals."""
    others = (t for t in threading.enumerate() if t is not threading.main_thread())
    return any(not t.name.startswith("fasttrain") for t in others)


def _changed_for_good(name: str, kind: str, where: str) -> FasttrainError:
    return FasttrainError(
        f"{name} changes a {kind} when it is called with a part of the batch at {where}",
        why="the call was tried with the rows of each rank, and what that has changed can't be"
        " restored to what one process would have",
        fix="use one process, or change it outside the model's forward",
        slug="ranks-changed",
        exit_code=ExitCode.CONTRADICTION,
    )


class _Both:
    """Gradients of a whole call and of a split one; its repr is equal on all ranks."""

    def __init__(self, whole: list[Tensor | None], given: list[Tensor | None]) -> None:
        self.whole, self.given = whole, given

    def __repr__(self) -> str:
        return "gradients"


@contextmanager
def _without_hooks(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Disable hooks on leaves in the block: the trial's gradients aren't the script's."""
    held: list[tuple[Any, dict[int, Any]]] = []
    for tensor in tensors:
        hooks: Any = tensor._backward_hooks
        if hooks:
            held.append((hooks, dict(hooks)))
            hooks.clear()
    try:
        yield
    finally:
        for hooks, before in held:
            hooks.update(before)


def _pulled_back(outputs: list[Tensor], inputs: list[Tensor]) -> list[Tensor | None]:
    """Return gradients w.r.t. the inputs, from random gradients of the outputs."""
    generator = torch.Generator().manual_seed(0)
    total: Any = 0.0
    for output in outputs:
        if output.requires_grad:
            real = output.float() if not output.is_complex() else torch.view_as_real(output)
            seeds = torch.randn(real.shape, generator=generator, device="cpu").to(real.device)
            total = total + (real * seeds).sum()
    try:
        with Neutral():  # a checkpoint calls its block again
            return list(gradients_of(total, inputs, allow_unused=True))
    except (
        Exception
    ) as error:  # such as a reentrant checkpoint, which doesn't support autograd.grad
        first = str(error).partition("\n")[0]
        name = type(error).__name__
        raise DisagreementError(f"its gradients can't be compared: {name}: {first}") from error


def _detached(
    args: Any, kwargs: Any, lifted_to: Mapping[torch.dtype, torch.dtype]
) -> tuple[Any, Any, list[Tensor]]:
    """Return the arguments as detached leaves in full precision, and those that need a gradient."""
    leaves: dict[int, Tensor] = {}

    def detach(tensor: Tensor) -> Tensor:
        lifted = tensor.to(lifted_to.get(tensor.dtype, tensor.dtype))
        if not tensor.requires_grad:
            return lifted
        if id(tensor) not in leaves:
            leaves[id(tensor)] = lifted.detach().clone().requires_grad_()
        return leaves[id(tensor)]

    args, kwargs = map_tensors(args, detach), map_tensors(kwargs, detach)
    return args, kwargs, list(leaves.values())
