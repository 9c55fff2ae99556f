"""Mixed precision: each call of a root runs under autocast, and its outputs return in fp32.

Autocast is never entered for the whole process. Its cache of cast weights is emptied only at the
exit of the outermost autocast, so that all steps would use the weights of the first one. Where a
root's own forward trains, the cache is emptied after each of its backward passes and steps.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler, autocast
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fasttrain.model.decision import Decision
from fasttrain.model.levers import Amp
from fasttrain.model.outcome import State
from fasttrain.model.vendors import VENDORS
from fasttrain.shim.hooks import gradients, patching
from fasttrain.shim.hooks.call_state import Backup, one_line
from fasttrain.shim.hooks.containers import once, to_float32
from fasttrain.shim.hooks.dynamo import pass_over
from fasttrain.shim.hooks.outcome_recorder import Lever, OutcomeRecorder, Shared
from fasttrain.shim.hooks.roots import Call, Root, RootCalls, in_backward, runs_later
from fasttrain.shim.hooks.seams import Passing, Training, then
from fasttrain.shim.levers.amp.attention import attend_in_float32
from fasttrain.shim.levers.amp.draws import draw_in_float32
from fasttrain.shim.levers.amp.kept import KeptTensors, Reach, allow_numpy
from fasttrain.shim.levers.amp.operators import (
    BinaryCrossEntropy,
    Probabilities,
    run_in_float32,
    run_recurrent_in_float32,
)
from fasttrain.shim.levers.amp.repeat import may_explain, names_numbers, names_types
from fasttrain.shim.levers.amp.rules import CallHistory, Rules
from fasttrain.shim.levers.amp.script_hooks import CustomFunctions, Hooks
from fasttrain.shim.process import refusal
from fasttrain.shim.process.callsite import (
    call_site,
    called_by_user,
    is_shim_code,
    location,
    own_prefixes,
)

BY_HAND = (
    "its forward() is called directly: its layers run in low precision, what is between them"
    " doesn't"
)
RUNS_LATER = (
    "its forward is a generator or coroutine, and runs after its call: its layers run in low"
    " precision, what is between them doesn't"
)
IN_THREADS = (
    "torch runs its replicas in threads, as for nn.DataParallel, whose precision is another one"
)
KEEPS_ELSEWHERE = "its forward keeps tensors outside of its modules"


class Side:
    """The lever's state of one root.

    Attributes:
        backup: The root's state before its last call in low precision.
        kept: The tensors that its modules keep from a call.
        history: How it was called so far, for the rules.
        left: Why it runs in the script's own precision from now on; empty while it doesn't.
        lowered: Whether it has run in low precision.
        modes: The device type on which each call since the last optimizer step was in low
            precision, or None, by where its first tensor is. A checkpoint keeps that tensor.
        waits: Why its last call ran in fp32, if later ones may not.
    """

    def __init__(self, root: Root, dtype: torch.dtype) -> None:
        module = root.ref()
        assert module is not None
        self.backup = Backup(module)
        self.kept = KeptTensors(self.backup, dtype)
        self.left = ""
        self.lowered = False
        self.modes: dict[int, str | None] = {}
        self.waits = ""
        self.history = CallHistory(low=True)


class AmpLever:
    """Enters autocast around each root, unless the script manages precision itself."""

    def __init__(
        self, decision: Decision[Amp], recorder: OutcomeRecorder, roots: RootCalls
    ) -> None:
        self.recorder = recorder
        self._dtype: torch.dtype = getattr(torch, decision.value.precision)
        self._planned_device = VENDORS[decision.value.device].torch_type
        self._explicit = decision.source.explicit
        self._roots = roots
        self._bce = BinaryCrossEntropy(self._dtype)
        self._functions = CustomFunctions(self._dtype, self._autocast)
        self._probabilities = Probabilities(self._dtype, self._functions.region)
        self._reach = Reach(self._dtype)
        self._rules = None if self._explicit else Rules(self._leave_for_good, self.recorder.note)
        self._sides: list[weakref.ref[Side]] = []
        self._on = True
        self._in_threads = False  # whether replicas ran since a call was begun
        self._replica = threading.local()  # has "here" in their threads
        self._enter: Callable[..., Any] = autocast.__enter__
        self._exit: Callable[..., Any] = autocast.__exit__
        self._caching = _cache_has_gradients()

    def install(self, undo: ExitStack) -> None:
        """Set the roots' region, watch for the script's own autocast, mend what fails under it."""
        patching.wrap(autocast, "__enter__", self._watched_autocast, undo)
        made = then(self._on_scaler, even_traced=True)
        patching.wrap(GradScaler, "__init__", made, undo, Training.AMP)
        self._bce.install(undo)
        self._functions.install(undo)
        if self._dtype is torch.bfloat16:  # by fp16 a loop has the bits of the same one by hand
            self._probabilities.install(undo)
        region = self._functions.region
        run_in_float32(self._dtype, region, undo)
        if self._planned_device == "cpu" and self._dtype is torch.bfloat16:
            attend_in_float32(self._dtype, region, undo)
            draw_in_float32(self._dtype, region, undo)
        run_recurrent_in_float32(self._dtype, region, self.recorder.note, undo)
        gradients.install(undo)
        Hooks(self._dtype, region, self.recorder.note).install(undo)
        refusal.at_failure.append(self._explain)
        undo.callback(refusal.at_failure.remove, self._explain)
        allow_numpy(lambda: self.recorder.live, undo)
        undo.callback(register_optimizer_step_post_hook(self._forget_modes).remove)
        undo.callback(register_optimizer_step_post_hook(self._forget_casts).remove)
        if hasattr(torch.autograd, "_engine_run_backward"):
            engine, place = "_engine_run_backward", Passing.AMP
            patching.wrap(torch.autograd, engine, self._watched_pass, undo, place)
        if self._rules is not None:
            undo.callback(register_optimizer_step_pre_hook(self._rules.before_step).remove)
            undo.callback(register_optimizer_step_post_hook(self._rules.after_step).remove)
        self._roots.region, self._roots.low_dtype = self._region, self._dtype
        undo.callback(self._roots.leave_plain)
        self.recorder.settle(State.ARMED, "no module with fp32 parameters was called")

    def refresh(self) -> None:
        """Nothing is pending: every call is counted as it happens."""

    def switch(self, *, on: bool) -> None:
        """Run the next calls in low precision, or as the script has them."""
        self._on = on

    def _region(self, root: Root, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if in_backward():
            # A checkpoint repeats a call, of which there may be others since, in another mode.
            modes = {} if root.precision is None else root.precision.modes
            device = modes.get(_address(args, kwargs), root.lowered_on)
        else:
            device, call = self._decided(root, call) if self._on else (None, call)
            _note_mode(root, args, kwargs, device)
        if device is None:
            return call(*args, **kwargs)
        parameter = root.parameter()
        root.precision.backup.take(
            args, kwargs, parameter.device if parameter is not None else None
        )
        root.precision.kept.note()
        searched = root.precision.backup.watched and torch.is_grad_enabled()
        if searched:
            self._reach.note(args, kwargs, root.ref())
        self._reach.note_given(args, kwargs)
        try:
            output = self._lowered_or_repeated(root, device, call, args, kwargs)
            if searched and (where := self._reach.lift(args, kwargs, root.ref())):
                self._leave_for_good(root, f"{KEEPS_ELSEWHERE}, in {where}")
        finally:
            root.precision.backup.release()
            if self._in_threads and not hasattr(self._replica, "here"):
                self._in_threads = False
                self._leave_for_good(root, IN_THREADS)
        return output

    def _decided(self, root: Root, call: Call) -> tuple[str | None, Call]:
        """Return the device type to autocast a forward pass on, or None, and what makes it."""
        device = self._device_of(root)
        if device is not None and self._rules is not None:
            side = root.precision
            why, call = self._rules.count(root, side.history, device, call)
            if why or side.left:
                device = None
            if why != side.waits and not side.left:
                self._wait(root, why)
        return device, call

    def _lowered_or_repeated(
        self, root: Root, device: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        side = root.precision
        if self.recorder.live and not side.left:  # a checkpoint may repeat a call from before that
            # Before the first call: what is compiled in it would be compiled again for another
            # precision of fp32 products.
            self._roots.set_lowering(lowering=True)
        try:
            output = self._lowered(device, call, args, kwargs)
            why = self._reach.lift_output(output, self._lift)
            if not why or not side.backup.holds_all():
                self._finish(root, why)
                return output
            del output
        except Exception as error:
            if not (may_explain(error, self._dtype) and side.backup.holds_all()):
                raise
            why = f"failed in {_name(self._dtype)} and not in fp32: {one_line(error)}"
        finally:
            self._bce.forget()
            self._probabilities.forget()
            if not side.lowered:  # the first call failed
                self._update_lowering()
        # Not in the except block: an error of the repeat is the script's own and must not be
        # chained to this one, and the tensors of the failed call are freed by now.
        side.backup.put_back()
        _note_mode(root, args, kwargs, None)
        output = call(*args, **kwargs)
        self._leave_for_good(root, why)
        return output

    def _finish(self, root: Root, why: str) -> None:
        """Cast what a call in low precision has left, and record it."""
        root.precision.kept.lift()
        cached: dict[Any, Any] = torch.nn.utils.parametrize._cache
        for key in [k for k, t in cached.items() if getattr(t, "dtype", None) is self._dtype]:
            del cached[key]  # else the script would read a parametrized weight in low precision
        if self.recorder.live:
            root.precision.lowered = self._roots.lowered = True
            self.recorder.apply(root.name, root.where)
            self.recorder.counts["forwards"] += 1
        else:
            # The script's own autocast was found during this call.
            self.recorder.note(f"this call of {root.name} had begun in {self._dtype}")
        if why:
            self._leave_for_good(root, why)

    def _explain(self, error: BaseException) -> None:
        """Add a note to the error that ends the script, if precision may have caused it."""
        lowered = self.recorder.live and self._functions.region.lowered_on
        if lowered and (names_types(error, self._dtype) or names_numbers(error)):
            error.add_note(f"fasttrain ran the model in {_name(self._dtype)}: try --amp off")

    def _lowered(
        self, device: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        region = self._functions.region
        with self._autocast(device):
            region.enter(device)
            try:
                output = call(*args, **kwargs)
            finally:
                region.leave()
        return to_float32(output, self._dtype, once(self._lift))

    def _lift(self, output: Tensor) -> Tensor:
        """Return an output of a root in fp32."""
        result = self._bce.to_float32(output)
        self._probabilities.correct(output, result)
        return result

    @contextmanager
    def _autocast(self, device: str) -> Iterator[None]:
        context = autocast(device, dtype=self._dtype, cache_enabled=self._caching)
        self._enter(context)
        try:
            yield
        finally:
            self._exit(context, None, None, None)

    def _forget_modes(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            for ref in self._sides:
                if (side := ref()) is not None:
                    side.modes.clear()

    def _watched_pass(self, original: Any) -> Any:
        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            found = original(*args, **kwargs)
            self._forget_casts()  # the script may change weights by the gradients itself
            return found

        pass_over(run)
        return run

    def _forget_casts(self, *_: Any) -> None:
        """Have weights cast again in the root's call that this thread is in, if it is in one."""
        if not torch.compiler.is_compiling() and self._functions.region.device:
            torch.clear_autocast_cache()

    def _device_of(self, root: Root) -> str | None:
        """Return the device type to autocast on; None if this call stays in its own precision."""
        if root.precision is None:
            self._meet(root)
        if root.precision.left:
            self._leave(root, root.precision.left, missed=True)
            return None
        parameter = root.parameter()
        if parameter is None:
            return None
        if parameter.dtype is not torch.float32:
            self._leave(root, f"its parameters are {_name(parameter.dtype)}")
            return None
        device = parameter.device.type
        if device != self._planned_device and not self._follows_to(device):
            self._leave(root, f"it is on {device}, but amp was decided for {self._planned_device}")
            return None
        if self._rules is not None and self._rules.emulates(parameter.device):
            self._leave(root, f"it is on {parameter.device}, which has no native bf16")
            return None
        # Under autocast already: the script's own, or a checkpoint that repeats a forward.
        return None if torch.is_autocast_enabled(device) else device

    def _meet(self, root: Root) -> None:
        side = root.precision = Side(root, self._dtype)
        self._sides.append(weakref.ref(side))
        if root.outer:
            self.recorder.pass_over(root.outer, BY_HAND, missed=True)
        module = root.ref()
        if module is not None and runs_later(module):
            side.left = RUNS_LATER
        if self._rules is not None:
            side.history = self._rules.history(root, root.device.partition(":")[0])

    def state(self) -> dict[str, Any]:
        """Return why roots were left, and how they were called, in the order of their calls."""
        sides = [ref() for ref in self._sides]
        return {"roots": [(s.left, asdict(s.history)) if s is not None else None for s in sides]}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""
        for ref, saved in zip(self._sides, state["roots"], strict=False):
            side = ref()
            if side is not None and saved is not None:
                side.left, side.history = saved[0], CallHistory(**saved[1])

    def _follows_to(self, device: str) -> bool:
        """True if a precision that the user asked for is used on another device than planned."""
        return self._explicit and torch.amp.is_autocast_available(device)

    def _wait(self, root: Root, why: str) -> None:
        """Note why a root runs in fp32 for now, or that it no longer does."""
        if root.precision.waits:
            self.recorder.take_up(_named(root))
        root.precision.waits = why
        if why:
            self._leave(root, why)

    def _leave_for_good(self, root: Root, why: str) -> None:
        self._wait(root, "")
        root.precision.left = why
        self._leave(root, why, missed=True)
        self._update_lowering()

    def _update_lowering(self) -> None:
        sides = [side for ref in self._sides if (side := ref()) is not None]
        lowering = any(side.lowered and not side.left for side in sides)
        self._roots.set_lowering(lowering=lowering and self.recorder.live)

    def _leave(self, root: Root, why: str, *, missed: bool = False) -> None:
        self.recorder.pass_over(_named(root), why, missed=missed)

    def _cede(self, what: str, where: str = "") -> None:
        self.recorder.cede("the script manages precision itself", what, where or call_site())
        self._functions.region.lowered_on = ""
        self._roots.leave_plain()

    def _watched_autocast(self, original: Any) -> Any:
        @functools.wraps(original)
        def __enter__(context: autocast) -> Any:  # noqa: N807
            # So does torch, such as a checkpoint that repeats a forward, and the shim.
            passing = ("autocast_mode.py", "contextlib.py")
            ours = is_shim_code(sys._getframe(1).f_code)
            if self.recorder.live and context._enabled and not ours:
                if called_by_user(through=passing):
                    self._cede("autocast")
                elif where := _traced_at():
                    self._cede("autocast", where)
                elif context.fast_dtype is not self._dtype:
                    # Torch takes over to the threads of replicas that autocast is on, and not in
                    # which precision: on a GPU that would be fp16, whose loss nobody scales.
                    # Source: torch/nn/parallel/parallel_apply.py of torch 2.13.
                    context._enabled = False
                    self._replica.here = self._in_threads = True
            return original(context)

        return __enter__

    def _on_scaler(self, scaler: GradScaler) -> None:
        if scaler.is_enabled() and self.recorder.live:
            self._cede(type(scaler).__name__)


@functools.cache
def _cache_has_gradients() -> bool:
    """True if autocast's cache of cast weights is right where ``no_grad`` comes first in a forward.

    Up to torch 2.9 a weight that was cast under ``no_grad`` is used without a gradient after it.
    Source: https://github.com/pytorch/pytorch/issues/65766, mended by pull request 165068.
    """
    with torch.inference_mode(mode=False), autocast("cpu", dtype=torch.bfloat16):
        weight = torch.ones(1, 1, device="cpu", requires_grad=True)
        with torch.no_grad():
            torch.mm(weight, weight)
        with torch.enable_grad():
            return torch.mm(weight, weight).requires_grad


def _note_mode(
    root: Root, args: tuple[Any, ...], kwargs: dict[str, Any], device: str | None
) -> None:
    root.lowered_on = device
    if root.precision is not None:
        root.precision.modes[_address(args, kwargs)] = device


def _address(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return where the numbers of a call's first tensor are; 0 if there is none."""
    given = next((v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)), None)
    try:
        with torch._C.DisableTorchFunction():  # else a subclass of the script's would hear of it
            return 0 if given is None else given.data_ptr()
    except RuntimeError:  # a transform of torch.func's, or a tensor without a storage
        return 0


def _named(root: Root) -> str:
    return f"{root.name} ({root.where})"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _traced_at() -> str:
    """Return where in the script dynamo is tracing an autocast; empty if it isn't.

    Dynamo enters autocast while it traces. When the graph runs, nobody enters it again.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.endswith("amp/autocast_mode.py"):
        frame = frame.f_back
    if frame is None or not frame.f_code.co_filename.endswith("_dynamo/variables/ctx_manager.py"):
        return ""
    stack = torch._guards.TracingContext.extract_stack()
    own = [f for f in stack if not f.filename.startswith(own_prefixes())]
    return location(own[-1].filename, own[-1].lineno or 0) if own else ""


def build(shared: Shared, decision: Decision[Amp], recorder: OutcomeRecorder) -> list[Lever]:
    """Build the lever."""
    lever = AmpLever(decision, recorder, shared.roots)
    shared.lever_state.states["amp"] = lever
    return [lever]
