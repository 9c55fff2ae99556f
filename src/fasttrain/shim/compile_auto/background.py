"""Compiles roots in forked copies of the process, one by one, while the training goes on."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch.nn import Module

from fasttrain.shim.compile_auto.calls import WATCHED_STEPS, HeardCalls
from fasttrain.shim.compile_auto.outlook import StepClock, has_idle_core
from fasttrain.shim.compile_auto.peers import Others, Steps
from fasttrain.shim.hooks.roots import Root, in_backward
from fasttrain.shim.levers.compile import shadow
from fasttrain.shim.levers.compile.confined import why_unconfined
from fasttrain.shim.levers.compile.lever import CompileLever
from fasttrain.shim.levers.compile.repetitions import Form
from fasttrain.shim.levers.compile.unseen import Unseen
from fasttrain.shim.process.held_signals import held_signals
from fasttrain.shim.tune.room import free_bytes

BOX_S = 600.0  # in which a copy has to have compiled one root
# Below other work where a core is idle. Where none is, the copy takes its time from the training
# however long it needs: then it is done soonest with the same priority.
NICENESS = 10
MOST_TIMES = 10.0  # the usual time of a step, that one during the compilation counts for
# The cost may also be so large a part of what is known of the run, whatever was expected.
SHARE = 0.05


class Background:
    """Compiles in the background.

    Args:
        calls: The calls of roots.
        lever: Compiles, in the copy.
        clock: Times the steps.
        note: Called with a word and data for the events.
        others: The other ranks.

    Attributes:
        seconds: How long it took so far.
        slowed_s: What steps took longer meanwhile.
    """

    def __init__(
        self,
        calls: HeardCalls,
        lever: CompileLever,
        clock: StepClock,
        note: Callable[[str, dict[str, Any]], None],
        others: Others,
    ) -> None:
        self._calls, self._lever, self._clock, self._note = calls, lever, clock, note
        self._others = others
        self._shadow: shadow.Shadow | None = None
        self._unseen = Unseen(self._end_for)
        self.seconds = self.slowed_s = 0.0

    def install(self, undo: ExitStack) -> None:
        """Watch for what the script could see a copy by."""
        self._unseen.install(undo)

    def why_not(self) -> str:
        """Return why nothing can be compiled in the background; empty if it can."""
        return no_room_to_fork() or self._unseen.why_not()

    def compile(self, forms: dict[Root, Form], plain_s: float, allowed_s: float) -> Steps[str]:
        """Compile the calls of some roots; remove those that can't be, and return why.

        Args:
            forms: The roots, each with the form of its calls.
            plain_s: Time of a plain step.
            allowed_s: What the steps may take longer meanwhile.
        """
        failed = ""
        for root in tuple(forms):
            began_s, slowed = time.perf_counter(), Slowed(plain_s)
            result = yield from self._shadowed(root, forms[root], slowed, allowed_s)
            slowed_s = max(0.0, slowed.seconds)
            self._note("compiled", {"root": root.name, "slowed_s": slowed_s, **asdict(result)})
            self.seconds += time.perf_counter() - began_s
            self.slowed_s += slowed_s
            if not result.graphs:
                failed = f"{root.name} ({root.where}): {result.why or 'dynamo made no graph'}"
                del forms[root]
        return failed

    def kill(self, why: str = "") -> shadow.Result:
        """End a copy that still compiles."""
        seconds = 0.0
        if self._shadow is not None:
            seconds = self._shadow.seconds
            self._shadow.kill()
            self._shadow = None
        return shadow.Result(0, seconds, why)

    def _end_for(self, why: str) -> None:
        """End a copy at once, for what the script does."""
        if (running := self._shadow) is not None:
            running.kill(why)

    def _shadowed(
        self, root: Root, wanted: Form, slowed: Slowed, allowed_s: float
    ) -> Steps[shadow.Result]:
        """Compile one root at its next call of the usual form, while the training goes on."""
        failed: list[str] = []

        def fork(called: Root, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            module: Any = root.ref() if called is root and not in_backward() else None
            if module is not None and self._calls.form(module, args, kwargs) == wanted:
                self._calls.on_call = [f for f in self._calls.on_call if f is not fork]
                with held_signals():
                    failed.extend(self._fork(root, module, args, kwargs))

        self._calls.on_call.append(fork)
        waited = 0
        while self._shadow is None:
            yield 1
            waited += 1
            if failed:
                return shadow.Result(0, 0.0, failed[0])
            if waited > WATCHED_STEPS:
                self._calls.on_call = [f for f in self._calls.on_call if f is not fork]
                return shadow.Result(0, 0.0, "it is no longer called in the same way")
        while (result := self._shadow.result()) is None:
            if self._shadow.seconds > BOX_S:
                return self.kill(f"it took more than {BOX_S:.0f} s to compile")
            if slowed.seconds > max(allowed_s, SHARE * self._clock.elapsed_s):
                return self.kill(
                    f"compiling in the background slowed the training by {slowed.seconds:.0f} s"
                )
            yield 1
            slowed.add(self._clock.taken_s)
        self._shadow = None
        return result

    def _fork(
        self, root: Root, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[str]:
        """Begin to compile a call in a copy of the process; return why that failed, if it did."""
        if why := why_unconfined():
            self._lever.recorder.note(
                f"{why}: files that the model's call writes are written once more by the copy of"
                " the process that compiles"
            )
        try:
            self._shadow = shadow.begin(
                lambda: self._compile_here(root, module, args, kwargs),
                NICENESS if has_idle_core() else 0,
            )
        except Exception as error:  # noqa: BLE001 - the script's call goes on
            return [f"no process can be forked: {error}"]
        finally:
            self._others.on_fork()
        return []

    def _compile_here(
        self, root: Root, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[int, str]:
        """Compile a call, in the copy of the process."""
        self._calls.on_call = []
        self._lever.on_compiling.clear()
        self._lever.begin([root])
        if self._lever.targets:
            self._lever.switch(on=True)
            with self._others.in_copy():
                module(*shadow.own(args), **shadow.own(kwargs))
            self._lever.refresh()
        outcome = self._lever.recorder.outcome()
        if counted("fxgraph_cache_bypass"):
            return 0, "inductor keeps such graphs in no cache"
        if outcome.counts.get("graphs") and not any(
            map(counted, ("fxgraph_cache_hit", "fxgraph_cache_miss"))
        ):
            return 0, "the caches of torch.compile are switched off"
        graphs = outcome.counts.get("graphs", 0)
        return graphs, "" if graphs else "; ".join((outcome.reason, *outcome.notes))


class Slowed:
    """Adds up what steps take longer than before.

    Args:
        plain_s: Time of a step before.

    Attributes:
        seconds: The sum; below 0 where they were faster.
    """

    def __init__(self, plain_s: float) -> None:
        self._plain_s = plain_s
        self.seconds = 0.0

    def add(self, step_s: float) -> None:
        """Add a step; one with a validation in it counts as one that is slow."""
        self.seconds += min(step_s, MOST_TIMES * self._plain_s) - self._plain_s


def no_room_to_fork() -> str:
    """Return why there is no memory for a copy of this process; empty if there is.

    All that the training writes to meanwhile is there twice.
    """
    if not hasattr(os, "fork") or sys.platform != "linux":
        return "nothing can be compiled in the background on this system"
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    own_bytes = pages * os.sysconf("SC_PAGE_SIZE")
    free = free_bytes()
    if free and free < 2 * own_bytes:
        return (
            f"no memory to compile in the background: {free / 2**30:.1f} GiB are free, and the"
            f" script uses {own_bytes / 2**30:.1f} GiB"
        )
    return ""


def counted(what: str) -> int:
    """Return what inductor has counted in this process."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    return int(utils.counters["inductor"][what]) if utils else 0
