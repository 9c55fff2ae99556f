"""Checks that the ranks stay consistent: same models, same steps, same weights, same end."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fasttrain.model.errors import ExitCode, FasttrainError
from fasttrain.model.plan import LaunchPlan
from fasttrain.shim.data_parallel.ranks import WITHIN, PendingCheck, Ranks
from fasttrain.shim.data_parallel.tensor_sums import values_of
from fasttrain.shim.hooks.device_clock import DeviceClock, seconds_between
from fasttrain.shim.process import refusal, true_clock
from fasttrain.shim.process.callsite import call_site, location, own_prefixes
from fasttrain.shim.process.refusal import refuse

# Checks that all ranks are at the same line of the script wherever they communicate.
#
# All ranks run one script on the same data, so that they make the same calls in the same order.
# If they don't, the error names the first place at which they differ; without it the run would
# hang or compute wrong numbers.


CLOSE = 1e-9  # relative, of squares: different kinds of machines may round differently
INSIDE = "go on in "  # prefix of what ranks do inside a call of a model
_CALLING = 5  # tag of a rank that checks its call of a model before it communicates in it


class Parted(BaseException):
    """Raised if the ranks compute different things in a split call; scripts must not catch it."""


def meet_inside(
    ranks: Ranks,
    tag: int,
    numbers: Sequence[float] = (),
    *,
    part: Tensor | None = None,
    also: str = "",
) -> bool:
    """Wait for all ranks inside a call; return True if all are doing the same there.

    Args:
        ranks: All ranks.
        tag: Number of what this rank is doing.
        numbers: Finite numbers, as many as other ranks with this tag have; `Ranks.spread` is then
            how far they differ.
        part: A tensor that is gathered next, as in `Ranks.meet`.
        also: What all ranks shall know of this one if not all are doing the same.

    Raises:
        SystemExit: ``ranks-parted`` if some are outside of it.
    """
    doing = f"the call of a model ({also})" if also else "the call of a model"
    if ranks.meet(tag, lambda: f"{INSIDE}{doing} at {call_site()}", numbers, part):
        return True
    inside = all(text.startswith(INSIDE) for text in ranks.reports)
    if not inside or len({text.partition(WITHIN)[2] for text in ranks.reports}) > 1:
        refuse(_of_reports(ranks.reports))
    return False


class _OtherFiles(dict[str, bool]):
    """Tells by a file's name whether it is of torch or fasttrain."""

    def __missing__(self, path: str) -> bool:
        """Find it out."""
        self[path] = path.startswith(own_prefixes())
        return self[path]


class SameLine:
    """Compares the ranks' lines in the script, and numbers that must be equal on all ranks.

    Args:
        ranks: All ranks.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._places: dict[tuple[str, int, str], PendingCheck] = {}
        self._others = _OtherFiles()

    def check(self, doing: str, numbers: Sequence[Tensor] = ()) -> None:
        """Wait for all ranks, and check that they are doing the same.

        Args:
            doing: What this rank is about to do.
            numbers: Scalars on the CPU that must be equal on all ranks.

        Raises:
            SystemExit: ``ranks-parted`` if they are at different lines, ``ranks-data`` if their
                numbers differ.
        """
        values = [value for number in numbers if math.isfinite(value := float(number))]
        tag = self._place(doing).tag
        if not self._ranks.meet(tag, lambda: f"{doing} at {call_site()}", values):
            refuse(_of_reports(self._ranks.reports))
        if self._ranks.spread > CLOSE:
            refuse(_other_numbers(doing, call_site()))

    def check_later(self, doing: str) -> None:
        """Have the next communication check that all ranks are doing the same.

        A meeting compares this along with what it is for, so that the ranks needn't wait for each
        other twice. Until then this rank must do nothing that can't be restored.

        Args:
            doing: What this rank is about to do.
        """
        self._ranks.pending = self._place(doing)

    def _place(self, doing: str) -> PendingCheck:
        """Return this rank's line in the script, and what it is about to do there."""
        frame: FrameType | None = sys._getframe(2)
        others = self._others
        while frame is not None and others[frame.f_code.co_filename]:
            frame = frame.f_back
        path, line = (frame.f_code.co_filename, frame.f_lineno) if frame else ("unknown", 0)
        place = self._places.get((path, line, doing))
        if place is None:
            tag = 16 + zlib.crc32(f"{doing} {path}:{line}".encode()) % (2**20 - 16)
            begun = f"{doing} at {location(path, line)}"
            place = self._places[path, line, doing] = PendingCheck(tag, begun, self._check_call)
        return place

    def _check_call(self) -> None:
        """Check the call of a model that is pending.

        Raises:
            Parted: If other ranks don't communicate here.
        """
        if not meet_inside(self._ranks, _CALLING):
            raise Parted


def _of_reports(reports: Sequence[str]) -> FasttrainError:
    told = [text.partition(WITHIN)[2] or text for text in reports]
    if len(set(told)) == 1:
        told = [text.partition(WITHIN)[0] for text in reports]
    rank = next((rank for rank, text in enumerate(told) if text != told[0]), 1)
    return ranks_parted({0: told[0], rank: told[rank]})


def ranks_parted(doing: Mapping[int, str]) -> FasttrainError:
    """Return the error for two ranks at different places; ``doing`` is what each is to do."""
    (one, first), (two, second) = sorted(doing.items())
    return FasttrainError(
        f"the ranks parted: rank {one} is to {first}, rank {two} to {second}",
        why="a decision before these lines depends on something that differs between processes,"
        " such as threads, the process id or the machine",
        fix="base the decision on the data or on a seeded generator, or use one process",
        slug="ranks-parted",
        exit_code=ExitCode.CONTRADICTION,
    )


def _other_numbers(doing: str, where: str) -> FasttrainError:
    return FasttrainError(
        f"the ranks have different numbers where they are to {doing} at {where}",
        why="every rank runs the script on the same data and must compute the same numbers there:"
        " the script drew or read something that differs between processes",
        fix="seed the generator that makes the data, or use one process",
        slug="ranks-data",
        exit_code=ExitCode.CONTRADICTION,
    )


# Checks that the ranks stay consistent: same models, same steps, same weights, same end.


WAIT_S = 3.0  # a rank that waits this long checks whether another one has ended
POLL_S = 0.5


class RankConsistency:
    """Compares this rank with the others; detects that it waits for one that has ended."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._steps = 0
        self._clock = DeviceClock()
        self._behind_step = self._clock.mark()  # of all that is queued by the end of a step
        self._models = 0
        self._compared: set[int] = set()
        self._closed = threading.Event()
        self._watcher = threading.Thread(
            target=self._watch, name="fasttrain-consistency", daemon=True
        )

    def install(self, undo: ExitStack) -> None:
        """Watch for the end of this rank, and from a thread for the end of the others."""
        self._ranks.on_join.append(self._watcher.start)
        undo.callback(self._closed.set)
        refusal.at_clean_end.append(self._end)
        undo.callback(refusal.at_clean_end.remove, self._end)

    def compare_models(self, name: str, where: str, parameters: list[str]) -> None:
        """Check that every rank has the same module.

        Raises:
            SystemExit: ``ranks-models`` if they differ.
        """
        text = "\n".join([f"{name} ({where})", *parameters])
        for rank, other in enumerate(self._ranks.gather(text)):
            if other != text:
                refuse(_models_differ(rank, other, self._ranks.rank, text))

    def after_step(self, steps: int, optimizer: Optimizer, *, sharded: bool) -> None:
        """Compare the weights after steps 1, 2, 4, 8 and so on.

        Args:
            steps: Number of steps so far.
            optimizer: The last step's optimizer.
            sharded: Whether ranks have different weights by design.

        Raises:
            SystemExit: ``ranks-diverged`` if they differ.
        """
        self._steps = steps
        rarely = not steps & (steps - 1)
        parameters = [p for g in optimizer.param_groups for p in g["params"]] if rarely else []
        if steps == 1 and parameters:
            self._clock.follow(parameters[0].device)
        self._behind_step = self._clock.mark()
        if not rarely or sharded:
            return
        with torch.no_grad():
            # Summed in fp64, but not copied to it.
            each = values_of([p.detach().sum(dtype=torch.float64) for p in parameters])
        # Sorted: a list made of a set has another order on each rank, and so would be rounded.
        sums = torch.tensor(sorted(each), dtype=torch.float64, device="cpu").sum()
        sums = torch.nan_to_num(sums)  # NaN differs from itself, and would look like a divergence
        spread = torch.stack([sums, -sums])
        with self._ranks.waits():
            dist.all_reduce(spread, dist.ReduceOp.MAX)
        if spread[0] != -spread[1]:
            refuse(_diverged(steps, type(optimizer).__name__))

    def _end(self) -> None:
        """Wait until all ranks have ended, so that none waits for one that has left."""
        if not self._ranks.joined:
            return
        store = self._ranks.store
        store.set(f"ended/{self._ranks.rank}", str(self._steps))
        keys = [f"ended/{rank}" for rank in range(self._ranks.world_size)]
        while not store.check(keys):
            self._compare_ends()
            time.sleep(0.05)
        self._compare_ends()
        self._closed.set()
        # The interpreter aborts if it ends while the thread is inside the store's C++ code.
        self._watcher.join(POLL_S)
        # Rank 0 may host the store: leave only after all have read it.
        self._ranks.leave()

    def _watch(self) -> None:
        while not self._closed.wait(POLL_S):
            since_s = self._ranks.waiting_since_s
            waits = since_s and true_clock.monotonic() - since_s > WAIT_S
            if waits or self._is_device_behind():
                try:
                    self._compare_ends(waiting=bool(waits), queued=not waits)
                except (RuntimeError, OSError):  # the store is gone: the run has ended
                    return

    def _is_device_behind(self) -> bool:
        """True if the device hasn't done for `WAIT_S` what was queued by the last step.

        The collectives of an accelerator only are queued: the host waits in a call of the script's
        for its device, and that for a rank that doesn't come.
        """
        mark = self._behind_step
        if mark.event is None or true_clock.perf_counter() - mark.at_s < WAIT_S:
            return False
        return seconds_between((mark, mark)) is None

    def _compare_ends(self, *, waiting: bool = False, queued: bool = False) -> None:
        """Exit with an error if another rank has ended after another step than this one.

        Args:
            waiting: This rank waits for the others, whatever steps they have made.
            queued: Its device hasn't done all steps of this rank: one with fewer has to be the
                reason, one with more isn't.
        """
        for rank in range(self._ranks.world_size):
            key = f"ended/{rank}"
            if rank == self._ranks.rank or not self._ranks.store.check([key]):
                continue
            steps = int(self._ranks.store.get(key))
            if waiting or steps < self._steps or (steps > self._steps and not queued):
                error = _steps_differ(rank, steps, self._ranks.rank, self._steps, waiting)
                print(error, file=sys.stderr, flush=True)  # noqa: T201
                refusal.ended_by_us(error)
                sys.stdout.flush()
                # os._exit: this is a thread, and the main thread hangs in a collective.
                os._exit(int(error.exit_code))


def _steps_differ(
    rank: int, steps: int, own_rank: int, own_steps: int, waiting: bool
) -> FasttrainError:
    own = f"rank {own_rank} is in step {own_steps + 1}" if waiting else (
        f"rank {own_rank} made {own_steps}"
    )  # fmt: skip
    return FasttrainError(
        f"the ranks made different numbers of steps: rank {rank} ended after {steps}, and {own}",
        why="data-parallel ranks must make the same steps, and the script decided differently on"
        " each",
        fix="end the loop by the printed loss, or by counts that all ranks share; --strategy none"
        " leaves the ranks to the script",
        slug="ranks-steps",
        exit_code=ExitCode.CONTRADICTION,
    )


def _models_differ(rank: int, other: str, own_rank: int, own: str) -> FasttrainError:
    pairs = zip(other.splitlines(), own.splitlines(), strict=False)
    first = next(((a, b) for a, b in pairs if a != b), ("more parameters", "fewer"))
    return FasttrainError(
        f"the ranks have different models: rank {rank} has {first[0]}, rank {own_rank} {first[1]}",
        why="data-parallel ranks must train the same model",
        fix="seed whatever the model's shape depends on, or use --strategy none",
        slug="ranks-models",
    )


def _diverged(steps: int, optimizer: str) -> FasttrainError:
    return FasttrainError(
        f"the ranks' weights differ after step {steps} of {optimizer}",
        why="gradients were changed on one rank and not on the others, or not all ranks could read"
        " a checkpoint",
        fix="use one process, or --strategy none with a script that handles its own ranks",
        slug="ranks-diverged",
    )


def refuse_unrelated_copies(plan: LaunchPlan, undo: ExitStack) -> None:
    """Check at a rank's first optimizer step that the script has joined a process group.

    Without one the ranks would train unrelated copies of a model and overwrite each other's files.

    Raises:
        SystemExit: ``unrelated-copies`` in that step.
    """
    if plan.processes.value.backend == "direct" or plan.levers.strategy.value.mode != "script":
        return
    # torchrun's number: an elastic run may have fewer ranks than planned.
    world_size = int(os.environ["WORLD_SIZE"])
    if world_size == 1:
        return

    checked = False

    def check(*_: Any) -> None:
        # The hook stays in place: torch iterates over its hooks, and raises if one is removed.
        nonlocal checked
        if checked:
            return
        checked = True
        distributed = torch.distributed
        if not (distributed.is_available() and distributed.is_initialized()):
            refuse(_unrelated(world_size))

    undo.callback(register_optimizer_step_pre_hook(check).remove)


def _unrelated(world_size: int) -> FasttrainError:
    return FasttrainError(
        f"{world_size} processes were about to train {world_size} unrelated models",
        why="the script made an optimizer step without joining a process group",
        fix="use --strategy ddp to train one model, or the script's option to join a process group;"
        " --strategy none runs the copies on purpose",
        slug="unrelated-copies",
    )
