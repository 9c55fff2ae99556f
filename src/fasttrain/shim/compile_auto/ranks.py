"""Has several ranks of a node run compiled from the same step on, and eagerly from the same one.

Rank 0 decides for all, compiles in the background for all, and says some steps ahead from which
step on something holds. The others look for what it has said every so many steps, in torchrun's
store. Nobody waits for another rank: ranks that train together are less than a step apart, since
each waits for the gradients of all. A rank that hears of a step which it has made already objects,
whereupon all run eagerly; the same holds for one that can't do what was said.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from fasttrain.model.codec import dumps, loads
from fasttrain.shim.compile_auto.peers import FIRST_LOOKS, Ready, Steps, What
from fasttrain.shim.data_parallel.answers.seeds import forget_fork
from fasttrain.shim.data_parallel.ranks import Ranks
from fasttrain.shim.data_parallel.split.rows import reduced_by
from fasttrain.shim.hooks.steps import StepMeter

LOOK_S = 0.1  # between two looks after that; one takes some 40 us, more on a busy machine
LATER_LOOK_S = 1.0  # once it is decided whether the compiled model stays
AHEAD = 2  # looks before what was said takes effect
PAIRS_AT_ONCE = 4  # of blocks, of which one notice tells
# Steps that rank 0 makes until all others have said what they call, before it goes on alone.
PATIENCE_STEPS = 200
_library: Any = torch.library  # without annotations
LATE = "it was to change at step {at:,}, and had made {steps:,}"


@dataclass(frozen=True, slots=True)
class Notice:
    """What rank 0 has decided.

    Attributes:
        what: What all ranks do.
        at: The step after which they do it.
        every: From then on they look for the next notice after steps that this divides.
        roots: Which of the models that they have named are compiled.
        sides: Whether each of the blocks of steps that follow runs compiled.
        each: Steps of a block.
        reason: Why, in one sentence.
    """

    what: What
    at: int
    every: int
    roots: tuple[int, ...] = ()
    sides: tuple[bool, ...] = ()
    each: int = 0
    reason: str = ""


class _Member:
    """One of several ranks at the store."""

    several = True

    def __init__(self, ranks: Ranks, meter: StepMeter) -> None:
        torchs: Any = dist
        self._store = torchs.PrefixStore("compile-auto", ranks.store)
        self._ranks, self._meter = ranks, meter
        self.every = FIRST_LOOKS
        self._number = 0  # of the last notice

    def _until_look(self) -> Steps[None]:
        while past := self._meter.steps % self.every:
            yield self.every - past


class Leader(_Member):
    """Rank 0, which decides.

    Args:
        ranks: All ranks.
        meter: Counts the steps.
    """

    pairs_at_once = PAIRS_AT_ONCE

    def __init__(self, ranks: Ranks, meter: StepMeter) -> None:
        super().__init__(ranks, meter)
        self._next_every = FIRST_LOOKS
        self._own = ""  # this rank's objection
        self._ended = False

    def agree(self, own: Ready) -> Steps[str]:
        """Return why not all ranks can compile the same; empty if they can."""
        if own.why_not:
            return own.why_not
        others = range(1, self._ranks.world_size)
        keys = [f"ready/{rank}" for rank in others]
        until = self._meter.steps + PATIENCE_STEPS
        while not self._store.check(keys):
            if self._meter.steps >= until:
                return f"after {self._meter.steps:,} steps not all ranks had made enough of them"
            yield FIRST_LOOKS
        said = [loads(Ready, self._store.get(key).decode()) for key in keys]
        for rank, one in zip(others, said, strict=True):
            if one.why_not:
                return f"on rank {rank}: {one.why_not}"
            if one.calls != own.calls:
                return f"rank {rank} calls its models with other shapes than rank 0, or other ones"
        return ""

    def pace(self, step_s: float) -> None:
        """Set how often the others look, from the next notice on, by the time of a step."""
        self._next_every = max(1, math.ceil(LOOK_S / max(step_s, 1e-6)))

    def meet(
        self,
        what: What,
        reason: str = "",
        *,
        roots: Sequence[int] = (),
        sides: Sequence[bool] = (),
        each: int = 0,
    ) -> Steps[None]:
        """Announce a change to all ranks, and go on when it takes effect."""
        yield from self._until_look()
        at = self._meter.steps + AHEAD * self.every
        if what == "kept":
            self._next_every = math.ceil(self._next_every * LATER_LOOK_S / LOOK_S)
        self._say(Notice(what, at, self._next_every, tuple(roots), tuple(sides), each, reason))
        while self._meter.steps < at:
            yield 1
        self.every = self._next_every

    def objection(self) -> str:
        """Return why a rank wants all to run eagerly; empty if none does."""
        if self._own or not self._store.check(["objection"]):
            return self._own
        rank, why = json.loads(self._store.get("objection"))
        return f"on rank {rank}: {why}"

    def in_copy(self) -> AbstractContextManager[None]:
        """Return the context in which a forked copy of this rank makes a call."""
        return cut_off()

    def on_fork(self) -> None:
        """Forget that this process has forked: the copy is not the script's."""
        forget_fork()

    def object(self, why: str) -> bool:
        """Have all ranks run eagerly soon."""
        self._own = why
        return True

    def end(self, what: What, reason: str) -> None:
        """Announce an end for which this rank doesn't wait, unless one is announced already."""
        if not self._ended:
            at = self._meter.steps + AHEAD * self.every
            with suppress(RuntimeError, OSError):  # the store is gone: the run has ended
                self._say(Notice(what, at, self.every, reason=reason))

    def _say(self, notice: Notice) -> None:
        self._number += 1
        self._store.set(f"notice/{self._number}", dumps(notice))
        self._ended = notice.what in ("dropped", "eager")


class Follower(_Member):
    """Another rank, which does what rank 0 says.

    Args:
        ranks: All ranks.
        meter: Counts the steps.
    """

    def say(self, own: Ready) -> None:
        """Send rank 0 what this rank would compile."""
        self._store.set(f"ready/{self._ranks.rank}", dumps(own))

    def next_notice(self) -> Steps[Notice]:
        """Return what rank 0 says next, when it says it."""
        key = f"notice/{self._number + 1}"
        while True:
            yield from self._until_look()
            if self._store.check([key]):
                break
            yield 1
        self._number += 1
        return loads(Notice, self._store.get(key).decode())

    def reach(self, notice: Notice) -> Steps[str]:
        """Wait for the step of a notice; return why not, if this rank has made it before."""
        if self._meter.steps > notice.at:
            late = LATE.format(at=notice.at, steps=self._meter.steps)
            self.object(late)
            return late
        while self._meter.steps < notice.at:
            yield 1
        self.every = notice.every
        return ""

    def object(self, why: str) -> bool:
        """Have all ranks run eagerly soon."""
        with suppress(RuntimeError, OSError):  # the store is gone: the run has ended
            self._store.set("objection", json.dumps([self._ranks.rank, why]))
        return True

    def end(self, what: What, reason: str) -> None:  # noqa: ARG002 - any end is one of all
        """Have rank 0 know that this rank runs eagerly."""
        self.object(reason)


def of_this_rank(part: Tensor, of_loss: bool) -> Tensor:  # noqa: ARG001 - the operator's
    """Return a sum over the ranks as if there were no other rank."""
    return part.clone()


@contextmanager
def cut_off() -> Iterator[None]:
    """Have a forked copy of a rank reach no other one: sums are its own, collectives raise.

    The threads of a process group aren't there in a copy, which would wait for them for ever.

    Source: ``torch/csrc/distributed/c10d/Ops.cpp`` of torch 2.13: all collectives of a process
    group are operators of this namespace.
    """

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("it communicates with other ranks")

    library = _library.Library("c10d", "IMPL", "CPU")  # lasts as long as the copy
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("c10d::")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are others
        for name in names:
            library.impl(name.removeprefix("c10d::"), refuse)
    with reduced_by(of_this_rank):
        yield
