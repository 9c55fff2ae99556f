"""The attempts of a run on this node: judges each that failed, and clears the way for the next."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from fasttrain.files.writing import reserve, write_private
from fasttrain.launch.crash.causes import HUNG, is_of_a_peer
from fasttrain.launch.crash.gather import Scene, investigate, keep
from fasttrain.launch.hang.heartbeats import Progress
from fasttrain.launch.node_run import Around, Part
from fasttrain.launch.output.display import shown_ranks
from fasttrain.launch.process.stop import Stop
from fasttrain.launch.report.receipts import was_preempted
from fasttrain.launch.restarts.restart_policy import Failed, can_heal, failed_by
from fasttrain.launch.run_dir.attempt_files import divide_logs, put_aside
from fasttrain.model.attempts import (
    DECIDED_FILE,
    NODE_CAME,
    NODE_LEFT,
    RESTART_COUNT,
    VERDICT_FILE,
    Attempt,
    Decided,
    Verdict,
    agree,
    restart_count,
)
from fasttrain.model.codec import dumps
from fasttrain.model.crash import ENDS_FILE, Crash
from fasttrain.model.decision import Decision
from fasttrain.model.hang import HANG_FILE, NO_PROGRESS, Hang
from fasttrain.model.reading import load
from fasttrain.processes.table import look_up, send

# Attempts in words.


def told(number: int, decided: Decided, most: int, ranks: int) -> str:
    """Return the line that tells of an attempt behind which the run is started again.

    Args:
        number: Of the attempt, from 1.
        decided: What becomes of the run.
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
    """Return the crash of a run whose ranks were killed because none went on."""
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


class Attempts:
    """The attempts of one run.

    Attributes:
        done: Those before the present one.
        problems: What could not be read or written, one sentence each.
    """

    def __init__(self, part: Part, around: Around, stop: Stop, begin: Callable[[], None]) -> None:
        """Begin the first attempt.

        Args:
            part: What this node runs.
            around: Who follows it.
            stop: Tells whether somebody wants the run to end.
            begin: Has those who follow the ranks begin anew with each further attempt.
        """
        self.done: list[Attempt] = []
        self.problems: list[str] = []
        self._part, self._around, self._stop, self._on_begin = part, around, stop, begin
        self._run_dir = Path(part.plan.run_dir)
        self._restarts = part.plan.restarts
        self._agent = part.plan.processes.value.backend == "torchrun" and part.plan.judged
        self._progress = Progress(self._run_dir)
        self._used = self._barren = 0
        self._decided: Decided | None = None
        self._given_up: Decided | None = None
        self._hang: Hang | None = None
        self._answered = self._waits = False
        for name in (ENDS_FILE, VERDICT_FILE, DECIDED_FILE):  # of a job that was queued again
            (self._run_dir / name).unlink(missing_ok=True)
        self._begin()

    @property
    def restartable(self) -> bool:
        """Return whether this process starts the run again itself."""
        direct = self._part.plan.processes.value.backend == "direct"
        return direct and self._restarts.value.most > 0

    def tick(self) -> None:
        """See how far the ranks are, and judge an attempt where an agent asks for it."""
        self._progress.tick()
        if self._agent and not self._answered and (self._run_dir / ENDS_FILE).exists():
            self._answered = True
            self._ended_s = time.monotonic()
            verdict = self._verdict(self._crash(1))
            try:
                write_private(self._run_dir / VERDICT_FILE, dumps(verdict))
            except OSError as error:
                self._give_up(error)

    def failed(self, exit_code: int) -> float | None:
        """Return the seconds after which to start again; None where the run is at its end."""
        if not self.restartable:
            return None
        self._ended_s = time.monotonic()
        verdict = self._verdict(self._crash(exit_code))
        self._decided = agree([verdict], used=self._used, most=self._restarts.value.most)
        if not self._decided.again:
            return None
        self._tell(self._decided)
        return self._decided.delay_s

    def asks(self) -> bool:
        """Return whether an agent waits for the way to be cleared, or for an answer in vain."""
        if self._given_up or not self._agent:
            return bool(self._given_up)
        if (decided := self._read_decided()) is None or not decided.again:
            return False
        self._decided = decided
        self._tell(decided)
        return True

    def clear(self) -> bool:
        """Put the records of the attempt aside, and say whether the next one can begin."""
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
        self._barren = 0 if self._trained() else self._barren + 1
        self._used, self._decided = decided.used, None
        self._waits = self.restartable
        self._progress.begin_again()
        self._on_begin()
        self._begin(decided.delay_s)
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
        """Have a run that hangs started again, if that can help and is left; False otherwise."""
        restarts = self._restarts.value
        heal = self._heal(Failed(HUNG, steps_at(hang)))
        if not restarts.most or self._used >= restarts.most or not heal.value:
            if restarts.most:
                why = "all restarts were used" if heal.value else heal.reason
                self._around.display.tell(f"not started again: {why}")
            return False
        self._hang = hang
        for rank in hang.ranks:
            for process in rank.processes:
                if process.role == "rank" and (found := look_up(process.pid)):
                    send(found, signal.SIGKILL)  # asked to end, it would hang on
        return True

    def conclude(self, exit_code: int) -> Crash | None:
        """Return why the run failed at last; None where nothing failed."""
        if self._waits:  # nothing ran that could have failed
            self._progress.close()
            self.problems.append(ended_waiting(self.done))
            return None
        crash = self._crash(exit_code)
        self._progress.close()
        decided = self._given_up or self._decided or self._read_decided()
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
        self._answered, self._hang = False, None
        self._started_s = time.monotonic() + delay_s
        self._ended_s = 0.0  # what it leaves behind is ended later
        if self._agent:
            with suppress(OSError):  # the disk is full already, which is told
                reserve(self._run_dir / VERDICT_FILE)
        self._before = self._around.look_around()

    def _crash(self, exit_code: int) -> Crash | None:
        part, command = self._part, self._part.plan.target.kind == "command"
        scene = Scene(
            part.plan, part.masked, part.environ, exit_code, self._before,
            self._around.look_around(), shown_ranks(part.plan), part.rank,
            None if command else self._progress.steps(),
        )  # fmt: skip
        crash, problems = investigate(scene)
        self.problems += problems
        return of_a_hang(crash, self._hang) if crash and self._hang else crash

    def _verdict(self, crash: Crash | None) -> Verdict:
        host = socket.gethostname()
        ends = "the run was asked to end" if self._stop.signum else self._preempted()
        if ends or crash is None:
            return Verdict(host, not ends, ends or "nothing failed here", 0.0, crash)
        heal = self._heal(failed_by(crash))
        barren = 0 if self._trained() else self._barren + 1
        delay_s = self._restarts.value.delay_s(barren)
        return Verdict(host, heal.value, heal.reason, delay_s, crash, is_of_a_peer(crash.cause))

    def _preempted(self) -> str:
        """Say so where the attempt has made room; the script may end with any code behind that."""
        return "it ended behind a snapshot, to go on later" if was_preempted(self._run_dir) else ""

    def _heal(self, failed: Failed) -> Decision[bool]:
        last = self.done[-1].crash if self.done else None
        before = failed_by(last) if last else None
        return can_heal(failed, before, self._restarts.value.on, self._restarts.source)

    def _trained(self) -> bool:
        return any(self._progress.steps().values())

    def _tell(self, decided: Decided) -> None:
        ranks = self._part.plan.processes.value.world_size
        most = self._restarts.value.most
        self._around.display.tell(told(len(self.done) + 1, decided, most, ranks))

    def _give_up(self, error: OSError) -> None:
        """End with this attempt: the run keeps the exit code of its script."""
        reason = f"the records of the attempt can't be put aside: {error.strerror}"
        self._given_up = Decided(again=False, reason=reason)

    def _read_decided(self) -> Decided | None:
        try:
            return load(Decided, self._run_dir / DECIDED_FILE)
        except FileNotFoundError:
            return None
