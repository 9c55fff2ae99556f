"""Compiles roots in place: a root keeps its type, keys and hooks, and can be pickled and copied."""

from __future__ import annotations

import functools
import importlib
import signal
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module

from fasttrain.model.decision import Decision
from fasttrain.model.levers import Compile
from fasttrain.model.outcome import State
from fasttrain.shim.hooks.dynamo import UserCompile, tell_of_compilation
from fasttrain.shim.hooks.outcome_recorder import Lever, OutcomeRecorder, Shared
from fasttrain.shim.hooks.roots import Root, RootCalls, repeated_blocks
from fasttrain.shim.levers.compile.account import Account, announce
from fasttrain.shim.levers.compile.by_outputs import take_by_outputs
from fasttrain.shim.levers.compile.cache_misses import CacheMisses
from fasttrain.shim.levers.compile.compile_once import CompileOnce, SharedGraphs
from fasttrain.shim.levers.compile.graphs import ASKED_GRADIENTS, GraphGuard, watch_gradients
from fasttrain.shim.levers.compile.repairs import keep_whole, repair
from fasttrain.shim.levers.compile.repeated import Asked, call_custom_functions, repair_gradients
from fasttrain.shim.levers.compile.slots import (
    FEW_CALLS,
    Filling,
    Slots,
    empty_if_copied,
    separate_function,
    watch_hooks,
)
from fasttrain.shim.levers.compile.targets import (
    is_lazy,
    may_differentiate_twice,
    refuse_long_loops,
    second_derivatives,
    uncompilable,
    unwrapped,
)
from fasttrain.shim.process import entry
from fasttrain.shim.process.callsite import call_site
from fasttrain.shim.process.held_signals import held_signals

# Settings that torch makes for speed, and that break scripts not written for torch.compile.
SAFE_SETTINGS = (
    # backward(retain_graph=True) would raise.
    ("torch._functorch.config", "donated_buffer", False),
    # A backward pass that can't be compiled would raise in the script's backward(); compiled
    # together with the forward pass, it lets both run eagerly.
    ("torch._functorch.config", "force_non_lazy_backward_lowering", True),
    # np.random inside a forward pass would draw other numbers, from torch's generator, and NumPy's
    # state would not advance. With this setting the graph breaks there, and NumPy draws.
    ("torch._dynamo.config", "use_numpy_random_stream", True),
)
# With this a seeded script draws the same dropout masks as without compilation. Not on GPUs, where
# kernels that draw their own numbers are part of the speed-up, unless results are compared.
SAME_DRAWS = (("torch._inductor.config", "fallback_random", True),)
# Asserts on tensors break the graph, and raise AssertionError: in a CPU's code they would raise
# RuntimeError, or abort the process, as no exception leaves a parallel loop.
OWN_ASSERTS = (("torch._dynamo.config", "rewrite_assert_with_torch_assert", False),)
UNUSED = "no trainable module was called"
BY_HAND = "its forward() is called directly: its layers are compiled one by one"
# After so many graphs no further root is compiled: each takes seconds to minutes.
MOST_GRAPHS = 64
NO_GRAPH = "dynamo made no graph of the compiled modules"
NO_BLOCKS = "has no repeated blocks"
SEVERAL_MODELS = "the script calls several models that can train"
FALL_BACK = ("torch._dynamo.config", "suppress_errors", True)
MADE_AGAIN = "is made again and again"
# Some scripts make a new wrapper at each step, or a copy for each task: after so many, no more are
# compiled.
MOST_OF_A_KIND = 3


class CompileLever:
    """Compiles each trainable root, or its repeated blocks, at the script's first call of it.

    One that is frozen at first is compiled once it isn't.

    Args:
        decision: What was decided.
        recorder: Records what became of it.
        roots: The calls of roots.
        own: What the script compiles itself.
        strict: Whether a failure of dynamo is the script's.
        same_draws: Whether compiled modules draw the same random numbers as others.
        later: Whether nothing is compiled before `begin`.

    Attributes:
        on_compiling: Called with a root's name when a compilation begins in it, and with an empty
            name when it has ended.
    """

    def __init__(
        self,
        decision: Decision[Compile],
        recorder: OutcomeRecorder,
        roots: RootCalls,
        own: UserCompile,
        *,
        strict: bool,
        same_draws: bool = False,
        later: bool = False,
        once: CompileOnce | None = None,
        misses: CacheMisses | None = None,
    ) -> None:
        self.recorder = recorder
        self._begins_later = later
        self._own = own
        self._plan = decision.value
        self._roots = roots
        self._strict, self._same_draws = strict, same_draws
        self._settings = SAFE_SETTINGS if strict else (*SAFE_SETTINGS, FALL_BACK)
        self._compile = torch.compile
        self._later = ExitStack()  # undoes changes that are made after `install`
        self.on_compiling: list[Callable[[str], None]] = []
        self._cache_kept = False  # whether `keep_whole` is installed
        self._account: Account | None = None
        self._once, self._misses = once, misses
        self._slots = Slots(torch.compile, decision.value.mode, recorder)
        self._guard: GraphGuard | None = None  # of the only root that is trained
        self._short_lived = ShortLived()
        self._waiting: list[Root | None] = []  # lazy roots; None in place of those called since
        self._forwards: dict[type, Callable[..., Any]] = {}

    def install(self, undo: ExitStack) -> None:
        """Watch for new roots, and for the script's own torch.compile."""
        undo.callback(self._later.close)
        self._own.on_module.append(self._give_up)
        undo.callback(self._own.on_module.remove, self._give_up)
        self._own.on_return.append(self._keep_cache)
        undo.callback(self._own.on_return.remove, self._keep_cache)
        # Also after `end`: the copy may be older, and called for the first time.
        self._roots.on_discover.insert(0, _empty_if_copied)
        undo.callback(self._roots.on_discover.remove, _empty_if_copied)
        if not self._begins_later:
            for listeners in (self._roots.on_discover, self._roots.on_trainable):
                listeners.append(self._on_root)
                undo.callback(listeners.remove, self._on_root)
        if self._plan.graphs:
            watch_gradients(self._on_grad, self._on_tensor_hook, undo)
        self.recorder.settle(State.ARMED, UNUSED)

    def refresh(self) -> None:
        """Read dynamo's own counters."""
        if self._account is not None:
            self._account.read(self.recorder)
            if self._guard is not None:
                self._account.read_skips(self.recorder)
        if self.recorder.state is State.ARMED and self.recorder.counts["targets"]:
            if self.recorder.counts["graphs"]:
                self.recorder.settle(State.APPLIED)
            else:
                self.recorder.settle(State.ARMED, self._slots.passed_by or NO_GRAPH)

    def switch(self, *, on: bool) -> None:
        """Run what is compiled, or the modules as the script has them."""
        self._slots.on = on

    def begin(self, roots: Iterable[Root]) -> None:
        """Have roots that were called before run compiled from now on, and no others."""
        for root in roots:
            module = root.ref()
            if module is not None:
                self._on_root(root, module)

    def end(self) -> None:
        """Run everything eagerly from now on, with torch as it was before the first root."""
        self._later.close()

    @property
    def targets(self) -> int:
        """Number of modules that run compiled, or would if they were called."""
        return len(self._slots)

    @property
    def compile_s(self) -> float:
        """Seconds that dynamo and inductor took so far."""
        return self._account.compile_s if self._account is not None else 0.0

    def _on_root(self, root: Root, module: Module) -> None:
        if not root.trainable or not self.recorder.live:
            return
        if not is_lazy(module):
            self._decide_on(root, module)
            return
        if not self._waiting:
            self._roots.on_call.append(self._see_lazy)
            self._later.callback(self._roots.on_call.remove, self._see_lazy)
        self._waiting.append(root)

    def _see_lazy(self, root: Root, *_: Any) -> None:
        """Decide on a lazy root once its first call has initialized its parameters."""
        module = root.ref() if root in self._waiting else None
        if module is not None and not is_lazy(module) and self.recorder.live:
            self._waiting[self._waiting.index(root)] = None
            self._decide_on(root, module)

    def _decide_on(self, root: Root, module: Module) -> None:
        if (own := self._compiled_by_script(module)) is not None:
            self._leave_to_script(own)
        elif reason := uncompilable(module) or self._short_lived.reason(root) or self._spent():
            self.recorder.pass_over(f"{root.name} ({root.where})", reason)
        else:
            if root.outer:
                self.recorder.pass_over(root.outer, BY_HAND)
            self._compile_root(root, unwrapped(module))

    def _spent(self) -> str:
        """Return why no further root is compiled, if the limit is reached; else empty."""
        graphs = self._account.graphs if self._account is not None else 0
        return f"{graphs} graphs were compiled before it" if graphs >= MOST_GRAPHS else ""

    def _compile_root(self, root: Root, module: Module) -> None:
        with held_signals(signal.SIGTERM):  # an error of a handler of the script's is not ours
            self._try_to_compile(root, module)

    def _try_to_compile(self, root: Root, module: Module) -> None:
        try:
            if self._account is None and not self._prepare(root):
                return
            if self._plan.scope == "blocks" and self._fill_blocks(root, module):
                return
            filling = Filling(self._roots.finish, self._guard_for(root, module))
            forward = separate_function(root.name, self._roots.finish)
            self._slots.fill(module, forward, filling, self._later)
            self._short_lived.add(root, filling)
            self.recorder.touch(type(module).__name__, root.where)
        except Exception as error:  # noqa: BLE001 - the script's call must go on, eagerly
            self.recorder.settle(State.FAILED, f"{type(error).__name__}: {error}")

    def _prepare(self, root: Root) -> bool:
        """Set up dynamo before the first root; return False if the script can't be compiled."""
        if where := second_derivatives():
            reason = f"second derivatives (create_graph=True at {where}) can't be compiled"
            self.recorder.settle(State.SKIPPED, reason)
            return False
        parameter = root.parameter()
        on_cpu = parameter is not None and parameter.device.type == "cpu"
        draws = SAME_DRAWS if self._same_draws or on_cpu else ()
        asserts = OWN_ASSERTS if on_cpu else ()
        for module_name, name, value in (*self._settings, *draws, *asserts):
            config = importlib.import_module(module_name)
            if hasattr(config, name):  # some torch versions lack some of them
                self._later.callback(setattr, config, name, getattr(config, name))
                setattr(config, name, value)
        tell_of_compilation(self._later)
        repair(self._later)
        self._keep_cache(ours=True)
        if not self._strict:
            refuse_long_loops(self._account_for_loop, self._later)
        repair_gradients(self._asked_of_root, self._later)
        take_by_outputs(self._later)
        # Of auto nobody has asked for graphs, in whose place an error would come.
        if self._plan.asked == "auto" or may_differentiate_twice():
            call_custom_functions(self._later)
        watch_hooks(self._slots.on_hook, self._later)
        if self._misses is not None:
            self._misses.install(self._later)
        if self._once is not None:
            self._once.install(self._later)
            self.on_compiling.append(self._once.compiling)
        announce(self._begins, self._ends, self._later)
        self._account = Account(self._later)
        return True

    def _asked_of_root(self) -> Asked:
        """Return a function that makes the root run eagerly that this thread is inside."""
        root = self._roots.last if self._roots.inside.flag else None
        return functools.partial(self._end_compilation, root) if root else lambda _: None

    def _end_compilation(self, root: Root, why: str) -> None:
        """Run a root eagerly from now on: the script takes gradients that can't be compiled."""
        module: Any = root.ref()
        parts = Module.modules(module) if module is not None else ()
        ours = [part for part in parts if part in self._slots]
        for part in ours:
            self._slots.release(part)
        if not ours:
            return
        self.recorder.pass_over(f"{root.name} ({root.where})", why.format(call_site()))
        if not len(self._slots) and self.recorder.live:
            self.recorder.counts["targets"] = 0
            self.recorder.settle(State.ARMED, UNUSED)

    def _begins(self) -> None:
        self._slots.handler_errors.begin()
        self._slots.compilations += 1
        root = self._roots.last
        self._announce(root.name if root else "")
        if self._guard is not None:
            self._guard.on_compiling()

    def _ends(self) -> None:
        self._announce("")
        self._slots.handler_errors.end()

    def _on_grad(self) -> None:
        if self._guard is not None:
            self._guard.refuse(ASKED_GRADIENTS)

    def _on_tensor_hook(self) -> None:
        if self._guard is not None:
            self._guard.on_hook()

    def _announce(self, name: str) -> None:
        for listen in self.on_compiling:
            listen(name)

    def _keep_cache(self, *, ours: bool = False) -> None:
        """Install `keep_whole` once inductor is used, also by the script's own torch.compile."""
        used = ours or "torch._inductor.cpp_builder" in sys.modules  # not all backends use it
        if used and not self._cache_kept:
            self._cache_kept = True
            keep_whole(self.recorder.note, self._later)

    def _account_for_loop(self, line: str) -> None:
        self.recorder.note(f"ran eagerly: the loop at {line} unrolls into hundreds of rounds")
        self.recorder.counts["long loops"] += 1

    def _fill_blocks(self, root: Root, module: Module) -> bool:
        blocks = repeated_blocks(module)
        if not blocks:
            self.recorder.note(f"{root.name} {NO_BLOCKS}: compiled whole")
        for block in blocks:
            self._slots.fill(block, self._forward_of(type(block)), Filling(), self._later)
            self.recorder.touch(type(block).__name__, f"a block of {root.name}")
        return bool(blocks)

    def _forward_of(self, kind: type) -> Callable[..., Any]:
        """Return the function that all blocks of a class share, so that they share graphs too."""
        return self._forwards.setdefault(kind, separate_function(kind.__name__))

    def _guard_for(self, root: Root, module: Module) -> GraphGuard | None:
        """Return a guard for CUDA graphs; None without them, or if several roots are trained."""
        if not self._plan.graphs:
            return None
        if self._guard is not None or len(self._slots):
            if self._guard is not None:
                self._guard.refuse(SEVERAL_MODELS)
            return None
        function = separate_function(root.name, self._roots.finish)
        self._guard = GraphGuard(self._compile(function, mode=self._plan.graphs), self.recorder)
        self._guard.install(self._later)
        if module is not root.ref():
            self._guard.refuse("CUDA graphs fail under DistributedDataParallel (pytorch#140395)")
        return self._guard

    def _compiled_by_script(self, module: Module) -> Module | None:
        """Return the first module inside, or itself, that the script has compiled; None if none."""
        for part in Module.modules(module):
            by_slot = part._compiled_call_impl is not None and part not in self._slots
            if by_slot or part in self._own.sites or _own_forward(part):
                return part
        return None

    def _leave_to_script(self, module: Module) -> None:
        name = type(getattr(module, "_orig_mod", module)).__name__
        if self.recorder.state is State.ARMED and not self.recorder.counts["targets"]:
            where = self._own.sites.get(module, "")
            self.recorder.cede(f"the script compiles {name} itself", name, where)
        else:
            self.recorder.note(f"{name} is compiled by the script itself")

    def _give_up(self, module: Module, site: str) -> None:
        """Undo our compilation of a module that the script compiles itself later."""
        ours = [part for part in Module.modules(module) if part in self._slots]
        for part in ours:
            self._slots.release(part)
        if ours and self.recorder.live:
            name = type(module).__name__
            self.recorder.cede(f"the script compiles {name} itself", name, site)


class ShortLived:
    """Counts compiled roots that are gone after a few calls, by class and line of the first call.

    They are not worth a compilation each. A model per fold of a cross-validation doesn't count,
    because it is called often, nor do the members of an ensemble, which live on.
    """

    def __init__(self) -> None:
        self._compiled: dict[tuple[str, str], list[tuple[Root, Filling]]] = {}

    def add(self, root: Root, filling: Filling) -> None:
        """Add a compiled root."""
        kind = self._compiled.setdefault((root.name, root.where), [])
        kind[:] = [(r, f) for r, f in kind if r.ref() is not None or f.calls <= FEW_CALLS]
        kind.append((root, filling))

    def reason(self, root: Root) -> str:
        """Return why another root of this class and line runs eagerly; empty if it is compiled."""
        kind = self._compiled.get((root.name, root.where), [])
        gone = sum(r.ref() is None and f.calls <= FEW_CALLS for r, f in kind)
        if gone < MOST_OF_A_KIND:
            return ""
        return f"a new {root.name} {MADE_AGAIN}; each would need a compilation of its own"


def _empty_if_copied(_: Root, module: Module) -> None:
    empty_if_copied(module)


def _own_forward(module: Module) -> bool:
    """True if a module's forward was compiled by the script, by a decorator or by assignment."""
    forward = module.forward
    disabled = getattr(forward, "_torchdynamo_disable", False)  # torch._dynamo.disable
    return hasattr(forward, "_torchdynamo_orig_callable") and not disabled


def build(shared: Shared, decision: Decision[Compile], recorder: OutcomeRecorder) -> list[Lever]:
    """Build the lever."""
    lever = CompileLever(
        decision,
        recorder,
        shared.roots,
        shared.user_compile,
        strict=shared.plan.strict,
        same_draws=shared.plan.compares,
        once=compile_once(shared, recorder),
        misses=CacheMisses(f"{shared.plan.cwd} {shared.plan.target.name}", recorder.note),
    )
    lever.on_compiling += shared.on_compiling
    shared.compile_s = lambda: lever.compile_s
    return [lever]


def compile_once(shared: Shared, recorder: OutcomeRecorder) -> CompileOnce:
    """Return what has one of several processes compile a graph.

    A rank that is alone may have children that train, each with a copy of one model.
    """
    plan = shared.plan
    folder = Path(plan.shared_dir or plan.run_dir)
    if plan.processes.value.backend == "direct":  # whatever RANK the user's own launcher has set
        return CompileOnce(folder, "0", recorder, None)
    rank, ranks, of_node = (
        int(entry.get(name, default))
        for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_WORLD_SIZE", "1"))
    )
    several = bool(plan.shared_dir) and ranks > of_node
    graphs = SharedGraphs(folder, rank) if several else None
    return CompileOnce(folder, entry.get("GROUP_RANK", "0"), recorder, graphs)
