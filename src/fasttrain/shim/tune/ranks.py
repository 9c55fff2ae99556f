"""Has all ranks of a run compare the same levers, and switch them at the same steps.

Each rank runs the same search. It depends on nothing but what all ranks have in common: the coin's
seed, rank 0's clock, and what came of measurements and findings of all ranks together. These are
exchanged between two steps, by torchrun's store, and never within a block that is timed. A rank
brings along where it is, so that ranks whose steps aren't the same end with an error.

A step takes as long as on the slowest rank: the others wait for its gradients. Processor time,
which is also what waiting takes, counts as the sum over the ranks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple, replace
from typing import Any, Protocol

from torch import distributed as dist

from fasttrain.model.errors import FasttrainError
from fasttrain.model.tuning import Parity
from fasttrain.shim.data_parallel.context import LeverState
from fasttrain.shim.data_parallel.ranks import Ranks
from fasttrain.shim.hooks.steps import StepMeter
from fasttrain.shim.process.refusal import refuse
from fasttrain.statistics.paired import StepTime

LONGEST_POLL_S = 0.005
LOOK_S = 0.5  # between two looks for ranks that have ended
GRACE_S = 3.0  # in which the agent ends this rank, too, if the other one has failed


class Agreement(Protocol):
    """What all ranks have in common. Every rank has to call each function at the same steps.

    Attributes:
        leads: Whether this rank writes the report.
    """

    leads: bool

    def now_s(self) -> float:
        """Return the seconds since the start, the same on all ranks."""

    def check_levers(self, names: Sequence[str]) -> None:
        """Check that all ranks have the same levers."""

    def times(self, taken: Sequence[StepTime]) -> list[StepTime]:
        """Return what counts of the times of some steps or blocks."""

    def reason(self, why: str) -> str:
        """Return why a lever does nothing on some rank; empty if it does something on all."""

    def findings(self, parity: Parity) -> list[Parity]:
        """Return what each rank has found."""

    def leave(self) -> None:
        """Have nobody wait for this rank from now on."""


class Alone:
    """One process, which agrees with itself.

    Args:
        started_s: When it started, by `time.perf_counter`.
    """

    leads = True

    def __init__(self, started_s: float) -> None:
        self._started_s = started_s

    def now_s(self) -> float:
        """Return the seconds since the start."""
        return time.perf_counter() - self._started_s

    def check_levers(self, names: Sequence[str]) -> None:
        """Do nothing."""

    def times(self, taken: Sequence[StepTime]) -> list[StepTime]:
        """Return the times."""
        return list(taken)

    def reason(self, why: str) -> str:
        """Return the reason."""
        return why

    def findings(self, parity: Parity) -> list[Parity]:
        """Return the finding."""
        return [parity]

    def leave(self) -> None:
        """Do nothing."""


class Together:
    """One of several ranks.

    Args:
        ranks: All of them.
        meter: Counts the steps.
        started_s: When this one started, by `time.perf_counter`.
    """

    def __init__(self, ranks: Ranks, meter: StepMeter, started_s: float) -> None:
        self.leads = ranks.rank == 0
        self._ranks, self._meter, self._started_s = ranks, meter, started_s
        torchs: Any = dist
        self._store = torchs.PrefixStore("tune", ranks.store)
        self._met = 0
        self._now_s = 0.0

    def now_s(self) -> float:
        """Return the seconds since rank 0's start, as of the last exchange."""
        return self._now_s

    def check_levers(self, names: Sequence[str]) -> None:
        """Check that all ranks have the same levers.

        Raises:
            SystemExit: ``tune-ranks`` if they differ, or in all of these functions if the ranks are
                at other steps or one has ended.
        """
        self._exchange(f"compare {', '.join(names)}", None)

    def times(self, taken: Sequence[StepTime]) -> list[StepTime]:
        """Return the wall time of the slowest rank and the processor time of all, of each."""
        each = self._exchange("time steps", [(one.wall_s, one.processor_s) for one in taken])
        return [
            StepTime(max(wall_s for wall_s, _ in ranks), sum(used_s for _, used_s in ranks))
            for ranks in zip(*each, strict=True)
        ]

    def reason(self, why: str) -> str:
        """Return the first rank's reason that has one."""
        found = enumerate(self._exchange("use a lever", why))
        return next((_on_rank(rank, text) for rank, text in found if text), "")

    def findings(self, parity: Parity) -> list[Parity]:
        """Return what each rank has found."""
        each = self._exchange("compare results", astuple(parity))
        found = enumerate(Parity(*fields) for fields in each)
        return [replace(one, reason=_on_rank(rank, one.reason)) for rank, one in found]

    def leave(self) -> None:
        """Have nobody wait for this rank from now on."""
        with suppress(RuntimeError, OSError):  # the store is gone: the run has ended
            self._store.set(f"ended/{self._ranks.rank}", str(self._meter.steps))

    def _exchange(self, doing: str, value: object) -> list[Any]:
        """Return the values of all ranks, by rank."""
        self._met += 1
        elapsed_s = time.perf_counter() - self._started_s
        message = [self._meter.steps, doing, elapsed_s, value]
        self._store.set(self._key(self._ranks.rank), json.dumps(message))
        keys = [self._key(rank) for rank in range(self._ranks.world_size)]
        self._wait(keys)
        found = [json.loads(self._store.get(key)) for key in keys]
        if self._met > 1:  # all have read the one before
            self._store.delete_key(self._key(self._ranks.rank, self._met - 1))
        places = [(steps, doing) for steps, doing, *_ in found]
        for rank, place in enumerate(places):
            if place != places[0]:
                refuse(_parted(0, places[0], rank, place))
        self._now_s = found[0][2]
        return [value for *_, value in found]

    def _key(self, rank: int, number: int = 0) -> str:
        return f"{number or self._met}/{rank}"

    def _wait(self, keys: list[str]) -> None:
        pause_s, looked_s = 5e-5, time.perf_counter()
        left: dict[int, float] = {}
        with self._ranks.waits():
            while not self._store.check(keys):
                # No blocking call of the store's, in which no signal would be handled.
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_POLL_S)
                if time.perf_counter() - looked_s > LOOK_S:
                    looked_s = time.perf_counter()
                    self._look_for_ends(keys, left)

    def _look_for_ends(self, keys: list[str], left: dict[int, float]) -> None:
        """End this rank if another one has ended without coming here.

        Args:
            keys: What is waited for, by rank.
            left: When each was first seen to have ended.
        """
        now_s = time.perf_counter()
        for rank, key in enumerate(keys):
            end = f"ended/{rank}"
            if not self._store.check([end]) or self._store.check([key]):
                continue
            if now_s - left.setdefault(rank, now_s) > GRACE_S:
                steps = int(self._store.get(end))
                refuse(_ended(rank, steps, self._ranks.rank, self._meter.steps))


def agreement(
    lever_state: LeverState, collectives: str, meter: StepMeter, started_s: float, *, several: bool
) -> Agreement:
    """Return this rank's agreement with the others.

    Args:
        lever_state: Knows the ranks if the shim makes them one run.
        collectives: The backend of the run's process group.
        meter: Counts the steps.
        started_s: When this rank started, by `time.perf_counter`.
        several: Whether there are others.
    """
    if not several:
        return Alone(started_s)
    return Together(ranks_of_run(lever_state, collectives), meter, started_s)


def ranks_of_run(lever_state: LeverState, collectives: str) -> Ranks:
    """Return the ranks of an agent's run, whoever makes them one.

    Args:
        lever_state: Knows them if the shim does.
        collectives: The backend of the run's process group.
    """
    return lever_state.ranks or Ranks.at_store(collectives, agent=True)


def _on_rank(rank: int, text: str) -> str:
    return f"on rank {rank}: {text}" if rank else text


def _parted(
    rank: int, place: tuple[int, str], other: int, others: tuple[int, str]
) -> FasttrainError:
    return FasttrainError(
        f"the ranks can't be tuned together: after {place[0]} steps rank {rank} is to {place[1]},"
        f" and rank {other} after {others[0]} steps to {others[1]}",
        why="levers have to be switched at the same step of all ranks, and their steps differ",
        fix="tune with one process: --nproc-per-node 1",
        slug="tune-ranks",
    )


def _ended(rank: int, steps: int, own_rank: int, own_steps: int) -> FasttrainError:
    return FasttrainError(
        f"the ranks can't be tuned together: rank {rank} ended after {steps} steps, and rank"
        f" {own_rank} has made {own_steps}",
        why="levers have to be switched at the same step of all ranks, and their steps differ",
        fix="tune with one process: --nproc-per-node 1",
        slug="tune-ranks",
    )
