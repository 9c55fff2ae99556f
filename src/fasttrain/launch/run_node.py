"""Starts the processes of one node and supervises them until they end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from fasttrain.files import FEW_BYTES, Room, room_at
from fasttrain.launch.attempts import Attempts, restartable
from fasttrain.launch.hang.watch import HangWatch
from fasttrain.launch.node_run import Ended, NodeRun, Observers
from fasttrain.launch.output.display import first_rank, follows, log_name
from fasttrain.launch.output.relay import EventTail, RankTails, Relay
from fasttrain.launch.process.stop import Stop
from fasttrain.launch.process.supervise import Child, supervise
from fasttrain.launch.receipts import was_preempted
from fasttrain.launch.run_dir.lock import give_all_back
from fasttrain.model.crash import CRASH_FILE
from fasttrain.model.errors import ExitCode, size
from fasttrain.model.hang import HANG_FILE, NO_PROGRESS
from fasttrain.model.plan import EnvVar, LaunchPlan
from fasttrain.model.secrets import secrets_of
from fasttrain.processes.agent_pipe import AgentPipe, Handed, open_pipe

# Warns of a disk that is nearly full, while there is time to free space.


NOTHING_FREE = "nothing is free"
LOOK_S = 10.0  # on a network file system, each look is a request to its server
# Of a rank: its log, report, events, failure, two of stacks, heartbeat, and two drafts of them.
FILES_OF_RANK, FILES_OF_RUN = 9, 20


class DiskWatch:
    """Checks the free space of a run directory's file system.

    Args:
        run_dir: The run directory.
        ranks: Ranks of this node.
        tell: Prints a message to the user.
        clock: Monotonic time in seconds.

    Attributes:
        warnings: What the user was warned of.
    """

    def __init__(
        self,
        run_dir: Path,
        ranks: int,
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.warnings: list[str] = []
        self._run_dir = run_dir
        self._files = FILES_OF_RUN + FILES_OF_RANK * ranks
        self._tell = tell
        self._clock = clock
        self._told: set[str] = set()
        self._looked_s = -LOOK_S

    def heard(self, signum: int) -> None:
        """Signals mean nothing for the disk."""

    def tick(self) -> None:
        """Check when it is due, and warn of each thing once."""
        now_s = self._clock()
        if now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        try:
            room = room_at(self._run_dir)
        except OSError as error:
            self._say("asked", f"how much room {self._run_dir} has isn't known: {error.strerror}")
            return
        for what, warning in self._problems(room):
            self._say(what, warning)

    def _problems(self, room: Room) -> Iterator[tuple[str, str]]:
        where = f"on the disk of {self._run_dir}"
        if room.free_bytes == 0:
            yield (
                "full",
                f"{NOTHING_FREE} {where}: logs and events continue once there is room again",
            )
        elif room.free_bytes is not None and room.free_bytes < FEW_BYTES:
            yield "bytes", f"only {size(room.free_bytes)} is free {where}: a checkpoint may not fit"
        if room.free_files is not None and room.free_files < self._files:
            yield "files", f"only {room.free_files} more files fit {where}"

    def _say(self, what: str, warning: str) -> None:
        if what in self._told:
            return
        self._told.add(what)
        self.warnings.append(warning)
        self._tell(f"warning: {warning}")


# Starts the processes of one node and supervises them until they end.


# Blocked until workers and torchrun's agent have handlers for them.
HELD_BACK = {int(signal.SIGUSR1), int(signal.SIGUSR2)}


def attend(part: NodeRun, observers: Observers) -> Ended:
    """Start this node's processes and supervise them until they end.

    Raises:
        FasttrainError: The program can't be started.
    """
    if part.plan.processes.value.backend != "torchrun":
        return _attend(part, observers)
    pipe, handed = open_pipe()
    try:
        return _attend(part, observers, pipe, handed)
    finally:
        pipe.close()
        handed.close()


def _attend(
    part: NodeRun, observers: Observers, pipe: AgentPipe | None = None, handed: Handed | None = None
) -> Ended:
    plan, run_dir = part.plan, Path(part.plan.run_dir)
    disk = DiskWatch(run_dir, plan.processes.value.nproc_per_node, observers.display.tell)
    disk.tick()  # a disk that is full already is reported before anything is lost
    observers = replace(observers, watches=(*observers.watches, disk))
    secrets = secrets_of(plan, part.environ)
    hang = HangWatch(part.masked, observers.on_hang, observers.nodes, secrets)
    follower = _Follower(part, observers, hang)
    save = _save(plan)
    tell, heard = observers.display.tell, follower.heard
    may_go_on = not (handed or plan.tuning or plan.proof)
    stop = Stop(plan.shutdown_timeout_s, tell, heard, save, may_go_on=may_go_on)
    relay = Relay(run_dir / log_name(plan), observers.display, again=restartable(plan))
    attempts = Attempts(part, observers, stop, relay, follower.begin_again, pipe)
    started_s = time.monotonic()
    held = frozenset({save} & HELD_BACK)
    child = Child(part.program, plan.argv, part.environment, relay, held, handed)
    try:
        end = supervise(child, partial(follower.tick, attempts, relay), stop, attempts)
    finally:
        relay.finish()
        follower.close()
        give_all_back(run_dir)  # makes room for the crash card and the receipt
    wall_s = time.monotonic() - started_s
    seen = (*disk.warnings, *_seen(hang, relay, run_dir))
    if hang.stopped:
        warnings = (*end.warnings, *seen)
        done = tuple(attempts.done)
        return Ended(ExitCode.HUNG, wall_s, warnings, None, done, attempts.steps())
    crash = attempts.conclude(end.exit_code)
    code = crash.exit_code if crash else end.exit_code
    # Preempted workers end with 0: torchrun's agent would restart any other exit code.
    if plan.preempt.value.mode == "snapshot" and was_preempted(run_dir):
        code, crash = ExitCode.PREEMPTED, None
        # Of a script that failed after its snapshot: it is no crash.
        (run_dir / CRASH_FILE).unlink(missing_ok=True)
    warnings = (*end.warnings, *seen, *dict.fromkeys(attempts.problems))  # attempts may share them
    # torchrun compares times of failures in whole seconds; the judgement has the ranks' own clocks.
    interrupted = end.interrupted and code == end.exit_code
    done = tuple(attempts.done)
    return Ended(code, wall_s, warnings, crash, done, attempts.steps(), interrupted)


def _save(plan: LaunchPlan) -> int:
    """Return the signal after which the workers save a snapshot and end; 0 without snapshots."""
    preempt = plan.preempt.value
    return signal.Signals[preempt.signals[0]] if preempt.mode == "snapshot" else 0


class _Follower:
    """Shows what the ranks write to their files, and ticks the watches."""

    def __init__(self, part: NodeRun, observers: Observers, hang: HangWatch) -> None:
        self._run_dir = Path(part.plan.run_dir)
        self._hang = hang
        self._display, self._watches = observers.display, observers.watches
        self._first = first_rank(part.plan)
        self._shows = True
        self._others = RankTails(self._run_dir, partial(follows, part.plan))
        self._events = EventTail(self._run_dir / f"events-{self._first}.jsonl")

    def heard(self, signum: int) -> None:
        for watch in self._watches:
            watch.heard(signum)

    def tick(self, attempts: Attempts, relay: Relay) -> None:
        self._show(self._others.lines())
        if event := self._events.latest():
            self._display.progress(event)
        self._display.tick()
        for watch in self._watches:
            watch.tick()
        attempts.tick()
        if self._hang.tick(held=relay.held) and not attempts.hung(self._hang.hangs[-1]):
            os.kill(os.getpid(), signal.SIGTERM)  # ends the run as a signal from outside would

    def begin_again(self) -> None:
        """Follow another attempt."""
        self._show(self._others.lines(rest=True))
        self._events = EventTail(self._run_dir / f"events-{self._first}.jsonl")
        self._hang.begin_again()

    def close(self) -> None:
        self._hang.close()
        self._show(self._others.lines(rest=True))
        self._display.close()

    def _show(self, lines: Iterator[bytes]) -> None:
        """Show lines of other ranks; a reader that went away must not end the run."""
        if not self._shows:
            return
        try:
            for line in lines:
                self._display.write(1, line)
        except OSError as error:
            self._shows = False
            self._display.tell(
                f"stdout can't be written ({error.strerror or error}): what other ranks print "
                f"is in {self._run_dir} only"
            )


def _seen(hang: HangWatch, relay: Relay, run_dir: Path) -> Iterator[str]:
    """Yield what the launcher saw go wrong, one sentence each."""
    if hang.hangs:
        times = len(hang.hangs)
        longest = f"{max(found.quiet_s for found in hang.hangs):.0f} s"
        told = f"for {longest}" if times == 1 else f"{times} times, for up to {longest}"
        yield f"{NO_PROGRESS} {told}: see {HANG_FILE}"
    yield from hang.problems
    if relay.log_error:
        yield f"the log in {run_dir} is not whole: {relay.log_error}"


def compose(environ: Mapping[str, str], changes: tuple[EnvVar, ...]) -> dict[str, str]:
    """Return the environment of the processes."""
    result = dict(environ)
    for change in changes:
        if change.value is None:
            result.pop(change.name, None)
        else:
            result[change.name] = change.value
    return result
