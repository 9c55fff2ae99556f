"""The attempts of a run on this node: judges each that fails, and prepares the next one."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fasttrain.launch.crash.cause_rules import Retry
from fasttrain.launch.crash.causes import HUNG, is_of_a_peer, retry_of
from fasttrain.launch.crash.evidence import FailedRun
from fasttrain.launch.crash.judge import judge, keep
from fasttrain.launch.hang.heartbeats import Progress
from fasttrain.launch.node_run import NodeRun, Observers
from fasttrain.launch.output.display import shown_ranks
from fasttrain.launch.output.relay import Relay
from fasttrain.launch.process.stop import Stop
from fasttrain.launch.receipts import was_preempted
from fasttrain.launch.run_dir.lock import divide_logs, put_aside
from fasttrain.model.attempts import (
    NODE_CAME,
    NODE_LEFT,
    RESTART_COUNT,
    Attempt,
    Decided,
    Message,
    Verdict,
    agree,
    restart_count,
)
from fasttrain.model.crash import EXITS_FILE, Crash, WorkerExits
from fasttrain.model.decision import Decision, Source
from fasttrain.model.hang import HANG_FILE, NO_PROGRESS, Hang
from fasttrain.model.plan import LaunchPlan
from fasttrain.model.settings import RestartOn
from fasttrain.processes.agent_pipe import AgentPipe
from fasttrain.processes.table import look_up, send

# Decides whether a run that failed is worth another attempt.


SAME_WAY = "the attempt before failed in the same way"
UNTRAINED = "it failed before the first training step, and would again"


@dataclass(frozen=True, slots=True)
class FailureKey:
    """What two failures must have in common to count as the same.

    Attributes:
        cause: Stable name of the cause.
        step: Optimizer steps that the rank had made; None where that can't be seen.
        exit_code: Its exit code, or 128 + signal.
        kind: Class of the exception; empty without one. Its message does not count, because
            messages hold addresses and amounts of free memory.
        place: The calls that led there.
    """

    cause: str
    step: int | None = None
    exit_code: int = 1
    kind: str = ""
    place: tuple[tuple[str, int], ...] = ()


def key_of(crash: Crash) -> FailureKey:
    """Return what is compared of a crash; of a hang, only the cause and the training step."""
    if crash.cause == HUNG:
        return FailureKey(HUNG, crash.step)
    kind, _, _ = crash.error.partition(":")
    place = tuple((frame.file, frame.line) for frame in crash.frames)
    return FailureKey(crash.cause, crash.step, crash.exit_code, kind, place)


def retryable(
    now: FailureKey, before: FailureKey | None, on: RestartOn, source: Source
) -> Decision[bool]:
    """Decide whether another attempt can end better.

    Args:
        now: The failure.
        before: The failure of the attempt before; None in the first one.
        on: Whether only what is retryable is to be tried again, or anything.
        source: Who set that.
    """
    value, reason = _decide(now, before, on)
    return Decision(value, reason, source)


def _decide(now: FailureKey, before: FailureKey | None, on: RestartOn) -> tuple[bool, str]:
    retry = retry_of(now.cause)
    if on == "any":
        return True, "whatever failed is tried again"
    if retry is Retry.NEVER:
        return False, f"{now.cause}: {retry}"
    if retry is Retry.ALWAYS:
        return True, retry.value
    if now == before and now.step is not None:
        at = f"at step {now.step}" if now.step else "before the first step"
        return False, f"{SAME_WAY} {at}"
    if retry is Retry.TRAINED and now.step == 0:
        return False, UNTRAINED
    return True, retry.value


# Attempts in words.


# The attempts of a run on this node: judges each that fails, and prepares the next one.


def told(number: int, decided: Decided, most: int, ranks: int) -> str:
    """Return the line that reports a failed attempt after which the run is started again.

    Args:
        number: Of the attempt, from 1.
        decided: What all nodes have decided.
        most: Restarts that were asked for.
        ranks: Ranks of the run.
    """
    after = f"in {decided.delay_s:g} s"
    if decided.reason == NODE_LEFT:
        return f"attempt {number} ended: {NODE_LEFT}; starting again with the others {after}"
    if decided.reason == NODE_CAME:
        return f"attempt {number} ended: {NODE_CAME}; starting again with it"
    crash = decided.crash
    what = f"{_where(crash, ranks)}{crash.cause}: {crash.why}" if crash else decided.reason
    return f"attempt {number} failed: {what}; restart {decided.used} of {most} {after}"


def earlier(attempts: Iterable[Attempt]) -> str:
    """Return what became of attempts, in one line; empty without any."""
    return "; ".join(f"attempt {one.number}: {_brief(one)}" for one in attempts)


def ended_waiting(attempts: Sequence[Attempt]) -> str:
    """Return why a run ended between two attempts."""
    return f"it was asked to end before attempt {len(attempts) + 1} began; {earlier(attempts)}"


def of_a_hang(crash: Crash, hang: Hang) -> Crash:
    """Return the crash of a run whose ranks were killed because none made progress."""
    verdict = f": {hang.verdict[0]}" if hang.verdict else ""
    return replace(
        crash,
        cause=HUNG,
        why=f"{NO_PROGRESS} for {hang.quiet_s:.0f} s{verdict}",
        fix=f"look at the stacks in {HANG_FILE}",
        signal="",
        others="",
        step=steps_at(hang),
    )


def steps_at(hang: Hang) -> int:
    """Return the optimizer steps of the rank that was furthest."""
    return max((rank.steps for rank in hang.ranks), default=0)


def _brief(attempt: Attempt) -> str:
    crash = attempt.crash
    if crash is None:
        return attempt.reason
    step = f" at step {crash.step}" if crash.step else ""
    return f"{crash.cause}{step}"


def _where(crash: Crash, ranks: int) -> str:
    on = f" on {crash.node}" if crash.node else ""
    return f"rank {crash.rank}{on}, " if ranks > 1 else ""


def restartable(plan: LaunchPlan) -> bool:
    """True if the launcher itself starts the processes of this node again, without an agent."""
    return plan.processes.value.backend == "direct" and plan.restarts.value.most > 0


class Attempts:
    """The attempts of one run on this node.

    Attributes:
        done: Those before the present one.
        problems: What could not be read or written, one sentence each.
    """

    def __init__(
        self,
        part: NodeRun,
        observers: Observers,
        stop: Stop,
        relay: Relay,
        begin_again: Callable[[], None],
        pipe: AgentPipe | None = None,
    ) -> None:
        """Begin the first attempt.

        Args:
            part: What this node runs.
            observers: Who follows it.
            stop: Knows whether somebody has asked the run to end.
            relay: Carries the output of the processes.
            begin_again: Has those who follow the ranks start again with each further attempt.
            pipe: Leads to the agent of this node, where it has one.
        """
        self.done: list[Attempt] = []
        self.problems: list[str] = []
        self._part, self._observers, self._stop, self._relay = part, observers, stop, relay
        self._begin_again, self._pipe = begin_again, pipe
        self._run_dir = Path(part.plan.run_dir)
        self._restarts = part.plan.restarts
        self._progress = Progress(self._run_dir)
        self._used = self._without_training = 0
        self._crash: Crash | None = None  # of the present attempt, once it is judged
        self._hang: Hang | None = None  # that has ended the present attempt
        self._decided: Decided | None = None
        self._given_up: Decided | None = None
        self._waits = False  # between two attempts
        self._exits = WorkerExits()
        (self._run_dir / EXITS_FILE).unlink(missing_ok=True)  # of a job that was queued again
        self._begin()

    def tick(self) -> None:
        """Note how far the ranks are, and judge an attempt when the agent asks for it."""
        self._progress.tick()
        self._listen()

    def failed(self, exit_code: int) -> float | None:
        """Return the seconds after which to start again; None if the run has ended."""
        if not restartable(self._part.plan):
            return None
        verdict = self._verdict(self._judge(exit_code))
        self._decided = agree([verdict], used=self._used, most=self._restarts.value.most)
        if not self._decided.again:
            return None
        self._tell(self._decided)
        return self._decided.delay_s

    def asks(self) -> bool:
        """True if the agent waits for the way to be cleared, or would wait for ever."""
        self._listen()
        if self._given_up:
            return True
        if not (self._pipe and self._decided and self._decided.again):
            return False
        self._tell(self._decided)
        return True

    def clear(self) -> bool:
        """Put the records of the attempt aside; True if the next attempt can begin."""
        if self._given_up:
            return False
        decided = self._decided or Decided(again=True, reason="")
        number = len(self.done) + 1
        why = decided.crash.cause if decided.crash else decided.reason
        try:
            divide_logs(self._run_dir, f"end of attempt {number}: {why}")
            folder = put_aside(self._run_dir, number)
        except OSError as error:
            self._give_up(error)
            return False
        wall_s = max(0.0, (self._ended_s or time.monotonic()) - self._started_s)
        self.done.append(
            Attempt(number, wall_s, decided.reason, decided.delay_s, decided.crash, folder)
        )
        self._without_training = self._attempts_without_training()
        self._used, self._decided = decided.used, None
        self._waits = restartable(self._part.plan)
        self._progress.begin_again()
        self._begin_again()
        self._begin(decided.delay_s)
        if self._pipe:
            self._pipe.send(Message(cleared=True))
        return True

    def steps(self) -> dict[int, int]:
        """Return the optimizer steps of the present attempt by rank, as far as they were seen."""
        return self._progress.steps()

    def environ(self) -> dict[str, str]:
        """Return the environment of the attempt that begins now."""
        self._waits = False
        count = {RESTART_COUNT: str(restart_count(self._part.environment) + len(self.done))}
        return self._progress.environ({**self._part.environment, **count})

    def hung(self, hang: Hang) -> bool:
        """Have a run that hangs started again, if that may help and is left; False otherwise."""
        restarts = self._restarts.value
        retry = self._retryable(FailureKey(HUNG, steps_at(hang)))
        if not restarts.most or self._used >= restarts.most or not retry.value:
            if restarts.most:
                why = "all restarts were used" if retry.value else retry.reason
                self._observers.display.tell(f"not started again: {why}")
            return False
        self._hang = hang
        for rank in hang.ranks:
            for process in rank.processes:
                if process.role == "rank" and (found := look_up(process.pid)):
                    send(found, signal.SIGKILL)  # it hangs, and may not react to SIGTERM either
        return True

    def conclude(self, exit_code: int) -> Crash | None:
        """Return why the run failed at last; None where nothing failed."""
        if self._waits:  # no process ran that could have failed
            self._progress.close()
            self.problems.append(ended_waiting(self.done))
            return None
        self._listen()  # the last thing that the agent sent before it ended
        decided = self._given_up or self._decided
        # A failure that was judged when the agent or the supervisor asked is not judged again.
        known = self._judged and exit_code and (self._crash or decided)
        # Of an attempt that the agent couldn't start, there is no failure but the one before it.
        unstarted = decided and not decided.again and not self._judged
        before = decided.crash if decided and unstarted else None
        crash = self._crash if known else before or self._judge(exit_code)
        self._progress.close()
        if decided and decided.elsewhere and decided.crash:
            crash = replace(decided.crash, shown=False, log_file="")
        if crash is None and decided and not decided.again:
            self.problems.append(decided.reason)
        if crash is None or not (self._restarts.value.most or crash.node):
            return crash
        final = decided.reason if decided and self._restarts.value.most else ""
        crash = replace(crash, earlier=earlier(self.done), final=final)
        self.problems += keep(self._run_dir, crash)
        return crash

    def _begin(self, delay_s: float = 0.0) -> None:
        self._judged, self._crash, self._hang = False, None, None
        self._exits = WorkerExits()
        self._started_s = time.monotonic() + delay_s
        self._ended_s = 0.0  # what the attempt leaves running is ended later
        self._before = self._observers.look_around()

    def _judge(self, exit_code: int) -> Crash | None:
        """Judge the present attempt, once its last output is in the logs."""
        part, command = self._part, self._part.plan.target.kind == "command"
        self._judged, self._ended_s = True, time.monotonic()
        self._relay.settle()
        run = FailedRun(
            part.plan, part.masked, part.environ, exit_code, self._before,
            self._observers.look_around(), shown_ranks(part.plan), part.rank,
            None if command else self._progress.steps(), self._exits,
        )  # fmt: skip
        crash, problems = judge(run)
        self.problems += problems
        self._crash = of_a_hang(crash, self._hang) if crash and self._hang else crash
        return self._crash

    def _listen(self) -> None:
        """Take what the agent has sent."""
        while self._pipe and (message := self._pipe.look()):
            if message.exits:
                self._exits = message.exits
            if message.asks:
                # Asked again after a node came: of the same attempt, so the answer is the same.
                crash = self._crash if self._judged else self._judge(1)
                self._pipe.send(Message(verdict=self._verdict(crash)))
            if message.decided:
                self._decided = message.decided

    def _verdict(self, crash: Crash | None) -> Verdict:
        host = socket.gethostname()
        ends = "the run was asked to end" if self._stop.signum else self._preempted()
        if ends or crash is None:
            return Verdict(host, not ends, ends or "nothing failed here", 0.0, crash)
        retry = self._retryable(key_of(crash))
        delay_s = self._restarts.value.delay_s(self._attempts_without_training())
        return Verdict(host, retry.value, retry.reason, delay_s, crash, is_of_a_peer(crash.cause))

    def _preempted(self) -> str:
        """Return the reason if the attempt ended for preemption; its exit code doesn't count then.

        A script may end with any code after its snapshot.
        """
        return "it ended after a snapshot, to be resumed" if was_preempted(self._run_dir) else ""

    def _retryable(self, failure: FailureKey) -> Decision[bool]:
        last = self.done[-1].crash if self.done else None
        before = key_of(last) if last else None
        return retryable(failure, before, self._restarts.value.on, self._restarts.source)

    def _attempts_without_training(self) -> int:
        """Return how many attempts in a row made no step, the present one included."""
        return 0 if any(self._progress.steps().values()) else self._without_training + 1

    def _tell(self, decided: Decided) -> None:
        ranks = self._part.plan.processes.value.world_size
        most = self._restarts.value.most
        self._observers.display.tell(told(len(self.done) + 1, decided, most, ranks))

    def _give_up(self, error: OSError) -> None:
        """End the run after this attempt; it keeps the exit code of its script."""
        reason = f"the records of the attempt can't be put aside: {error.strerror}"
        self._given_up = Decided(again=False, reason=reason)
