"""torch.compile in place: the root keeps its type, keys, hooks, pickling and deep copies.

The compiled callable goes into ``Module._compiled_call_impl``, the slot of torch's own
``Module.compile()``, which ``__getstate__`` drops. ``Module.compile()`` itself compiles nothing
when the outermost forward lives in torch.nn (pytorch#132923, #150915), because dynamo skips
frames of torch's own files; a function defined here is not skipped.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from types import FunctionType
from typing import Any

import torch
from torch.nn import DataParallel, Module, ModuleList, Sequential
from torch.nn.parallel import DistributedDataParallel

from fasttrain.shim.callsite import call_site, location
from fasttrain.shim.ledger import Ledger
from fasttrain.shim.roots import Root, RootCalls
from fasttrain.spec.decision import Decision
from fasttrain.spec.outcome import State
from fasttrain.spec.plan import Compile


class CompileLever:
    """Compiles each trainable root, or its repeated blocks, when the script first calls it."""

    def __init__(
        self, decision: Decision[Compile], ledger: Ledger, roots: RootCalls, *, strict: bool
    ) -> None:
        self.ledger = ledger
        self._plan = decision.value
        self._roots = roots
        self._strict = strict
        self._compile = torch.compile
        self._undo: ExitStack | None = None
        self._own_site = ""
        self._forwards: dict[type, Callable[..., Any]] = {}

    def install(self, undo: ExitStack) -> None:
        """Listen for new roots, and for the script's own torch.compile."""
        self._undo = undo
        self._watch_compile(undo)
        self._roots.on_discover.append(self._on_root)
        undo.callback(self._roots.on_discover.remove, self._on_root)
        self.ledger.settle(State.ARMED, "no trainable module was called")

    def refresh(self) -> None:
        """Read dynamo's own counters."""
        if "targets" in self.ledger.counts:
            _read_counters(self.ledger)

    @property
    def compile_s(self) -> float:
        """Seconds that dynamo and inductor took so far."""
        if "targets" not in self.ledger.counts:
            return 0.0
        from torch._dynamo.utils import calculate_time_spent

        return float(calculate_time_spent().get("total_wall_time", 0.0))

    def _on_root(self, root: Root, module: Module) -> None:
        if not root.trainable:
            return
        own = own_compilation(module)
        if own:
            if self.ledger.state is State.ARMED:
                self.ledger.cede(f"the script compiles {own} itself", own, self._own_site)
            return
        if reason := uncompilable(module):
            self.ledger.note(f"{root.name} ({root.where}) not compiled: {reason}")
            if self.ledger.state is State.ARMED:
                self.ledger.reason = f"{root.name}: {reason}"
            return
        self._compile_root(root, unwrapped(module))

    def _compile_root(self, root: Root, module: Module) -> None:
        if not self.ledger.counts["targets"]:
            self._fall_back_on_errors()
        if self._plan.scope == "blocks":
            blocks = repeated_blocks(module)
            for block in blocks:
                self._fill_slot(block, self._forward_of(type(block)))
                self.ledger.apply(type(block).__name__, f"a block of {root.name}")
            if blocks:
                return
            self.ledger.note(f"{root.name} has no repeated blocks: compiled whole")
        self._fill_slot(module, separate_function())
        self.ledger.apply(type(module).__name__, root.where)

    def _forward_of(self, kind: type) -> Callable[..., Any]:
        """Give the one function that all blocks of a class share, and with it their graphs."""
        return self._forwards.setdefault(kind, separate_function())

    def _fill_slot(self, module: Module, forward: Callable[..., Any]) -> None:
        mode = None if self._plan.mode == "default" else self._plan.mode
        compiled = self._compile(forward, mode=mode)
        module._compiled_call_impl = functools.partial(compiled, module)
        self.ledger.counts["targets"] += 1

    def _fall_back_on_errors(self) -> None:
        """Let a frame that can't be compiled run eagerly, unless errors were asked for."""
        import torch._dynamo.config as config

        if self._strict or self._undo is None:
            return
        self._undo.callback(setattr, config, "suppress_errors", config.suppress_errors)
        config.suppress_errors = True

    def _watch_compile(self, undo: ExitStack) -> None:
        original = torch.compile

        @functools.wraps(original)
        def compile(*args: Any, **kwargs: Any) -> Any:
            self._own_site = call_site()
            return original(*args, **kwargs)

        torch.compile = compile
        undo.callback(setattr, torch, "compile", original)


def _forward(module: Module, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)  # type: ignore[misc]


def separate_function() -> Callable[..., Any]:
    """Give a new function with a code object of its own.

    Dynamo counts recompiles by code object: roots that shared one would share its limit of eight.
    """
    return FunctionType(_forward.__code__.replace(), _forward.__globals__, "forward")


def own_compilation(module: Module) -> str:
    """Give the class of a module inside that the script compiled itself; empty if none."""
    for part in module.modules():
        if part._compiled_call_impl is not None:
            return type(part).__name__
        if type(part).__name__ == "OptimizedModule":
            return type(part._orig_mod).__name__  # type: ignore[union-attr]
    return ""


def uncompilable(module: Module) -> str:
    """Give the reason why a module is to run eagerly; empty if it can be compiled."""
    if isinstance(module, torch.jit.ScriptModule):
        return "it is TorchScript"
    if isinstance(module, DataParallel):
        return "DataParallel copies it to threads at every call"
    return ""


def unwrapped(module: Module) -> Module:
    """Give the module inside DistributedDataParallel, whose own forward isn't compiled."""
    return module.module if isinstance(module, DistributedDataParallel) else module


def repeated_blocks(module: Module) -> list[Module]:
    """Give the modules of which a ModuleList or Sequential holds several of the same class."""
    found: list[Module] = []
    for container in module.modules():
        if not isinstance(container, ModuleList | Sequential):
            continue
        by_class: defaultdict[type, list[Module]] = defaultdict(list)
        for child in container.children():
            if any(True for _ in child.children()):  # a lone Linear or ReLU is no block
                by_class[type(child)].append(child)
        for blocks in by_class.values():
            if len(blocks) > 1:
                found.extend(blocks)
    inner = {id(part) for block in found for part in block.modules() if part is not block}
    return [block for block in found if id(block) not in inner]


def _read_counters(ledger: Ledger) -> None:
    """Fill graphs, breaks and recompiles in.

    Source: ``torch/_dynamo/utils.py`` of torch 2.13, ``counters`` and ``CompilationMetrics``.
    """
    from torch._dynamo import utils

    breaks: Counter[str] = utils.counters["graph_break"]
    ledger.counts["graphs"] = utils.counters["stats"]["unique_graphs"]
    ledger.counts["breaks"] = sum(breaks.values())
    for reason in breaks:
        ledger.note(f"graph break: {_first_line(reason)}")
    recompiles = [m for m in utils.get_compilation_metrics() if m.recompile_reason]
    ledger.counts["recompiles"] = len(recompiles)
    for metrics in recompiles:
        ledger.note(f"recompile: {_first_line(metrics.recompile_reason)}")
    _read_failures(ledger, utils.get_compilation_metrics())


def _read_failures(ledger: Ledger, metrics: list[Any]) -> None:
    failures = [m for m in metrics if m.fail_reason]
    ledger.counts["failures"] = len(failures)
    for failed in failures:
        where = ""
        if failed.fail_user_frame_filename:
            line = failed.fail_user_frame_lineno or 0
            where = f" at {location(failed.fail_user_frame_filename, line)}"
        ledger.note(f"ran eagerly{where}: {failed.fail_type}: {_first_line(failed.fail_reason)}")
    if failures and not ledger.counts["graphs"] and ledger.live:
        ledger.settle(State.FAILED, f"ran eagerly: {_first_line(failures[0].fail_reason)}")


def _first_line(text: str) -> str:
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= 160 else line[:157] + "..."
