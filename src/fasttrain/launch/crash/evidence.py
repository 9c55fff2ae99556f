"""What is known of one rank's end: the only input of the rules in the table of causes."""

from __future__ import annotations

import linecache
import os
import re
import signal
import time
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path

from fasttrain.files import load, open_regular
from fasttrain.launch.hang import stacks
from fasttrain.launch.run_dir.lock import of_last_attempt
from fasttrain.model.codec import CodecError
from fasttrain.model.crash import (
    MESSAGE_LENGTH,
    Failure,
    Frame,
    Raised,
    Surroundings,
    WorkerExit,
    WorkerExits,
    failure_file,
    stack_file,
)
from fasttrain.model.places import WORKER_FOLDER
from fasttrain.model.plan import LaunchPlan
from fasttrain.model.secrets import hide, secrets_of
from fasttrain.processes.table import peak_of_children

# The end of a rank's log, tracebacks in it, and the Python stack that a fatal signal left.


TAIL_BYTES = 65536
LAST_LINES = 60  # a C++ stack follows the error itself
LINE_LENGTH = 300
HEAD = "Traceback (most recent call last):"

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b.")
_SHIM = f"/{WORKER_FOLDER}"
_CALL = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d{1,9}),? in (?P<function>.+)')
# The last line of a traceback: a dotted name, a colon and the message.
_ERROR = re.compile(r"(?P<kind>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?$", re.DOTALL)
# Source: CPython 3.11, Lib/traceback.py, between chained tracebacks.
_CHAINED = re.compile(
    r"(During handling of the above exception, another exception occurred"
    r"|The above exception was the direct cause of the following exception):\s*$"
)

# Lines that continue a message, or that an ending interpreter prints; not the script's output.
# Source: torch 2.13, c10/cuda/CUDAException.cpp and c10/util/Exception.cpp
_GOES_ON = re.compile(
    r"\s|$|CUDA kernel errors |For debugging consider |Compile with |Exception raised from "
    r"|frame #\d+: |fasttrain: |.*Warning: "
)


def tail(log: Path) -> str:
    """Return the end of what the last attempt wrote, as a screen shows it; empty without a log."""
    try:
        with open_regular(log) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            data = file.read()
    except OSError:  # a rank that never wrote has none
        return ""
    # A progress bar redraws its line after \r; only the last state was seen.
    lines = (
        line.removesuffix("\r").rpartition("\r")[2]
        for line in data.decode(errors="replace").split("\n")
    )
    return of_last_attempt("\n".join(_printable(_ESCAPES.sub("", line)) for line in lines))


def last_lines(text: str, count: int) -> tuple[str, ...]:
    """Return the last lines of a text, blank ones left out."""
    lines = [line[:LINE_LENGTH] for line in text.splitlines() if line.strip()]
    return tuple(lines[-count:])


def before_traceback(text: str) -> str:
    """Return the text before the last traceback and those that it is chained to."""
    before, _, _ = text.rpartition(HEAD)
    while _CHAINED.search(before):
        before, _, _ = before.rpartition(HEAD)
    return before


def recent_traceback(text: str) -> Raised | None:
    """Return the last exception whose traceback begins in the last lines of a text, or None."""
    raised = read_traceback("\n".join(text.splitlines()[-LAST_LINES:]))
    return raised and replace(raised, message=_divide(raised.message)[0])


def last_traceback(text: str) -> Raised | None:
    """Return the exception whose traceback a text ends with, or None.

    An exception that is followed by more output was handled: the script continued.
    """
    raised = read_traceback(text)
    return None if raised is None or _divide(raised.message)[1] else raised


def _divide(message: str) -> tuple[str, str]:
    """Split the text after a traceback into its message, and what was printed later."""
    first, *lines = message.split("\n")
    own = [first, *takewhile(_GOES_ON.match, lines)]
    return "\n".join(own).rstrip(), "\n".join(lines[len(own) - 1 :])


def read_traceback(text: str) -> Raised | None:
    """Return the last exception of which a text holds the traceback, or None."""
    _, found, block = text.rpartition(HEAD)
    if not found:
        return None
    frames: list[Frame] = []
    lines = block.strip("\n").split("\n")
    for index, line in enumerate(lines):
        if call := _CALL.match(line):
            source = lines[index + 1].strip() if index + 1 < len(lines) else ""
            frames.append(Frame(call["file"], int(call["line"]), call["function"], source))
        elif frames and not line.startswith(" "):
            if not (error := _ERROR.match("\n".join(lines[index:]).strip())):
                return None
            message = (error["message"] or "")[:MESSAGE_LENGTH]
            return Raised((error["kind"],), message, tuple(frames))
    return None


def read_stack(path: Path) -> tuple[Frame, ...]:
    """Return the Python stack of the thread that a fatal signal ended, innermost frame last.

    If that thread ran no Python, as threads of autograd and NCCL don't, it is the stack of the
    first thread that was in the user's code.
    """
    try:
        with open_regular(path) as file:
            text = file.read().decode(errors="replace")
    except OSError:  # it ended without writing one
        return ()
    threads = [
        tuple(
            _frame(call)
            for call in map(_CALL.match, reversed(block.splitlines()))
            if call and _SHIM not in call["file"]
        )
        for block in re.split(r"^(?:Current t|T)hread .*$", text, flags=re.MULTILINE)[1:]
    ]
    current = threads[:1] if threads and threads[0] else []
    own = [frames for frames in threads if any(frame.own for frame in frames)]
    return next(iter([*current, *own]), ())


def _frame(call: re.Match[str]) -> Frame:
    file, line = stacks.path(call["file"]), int(call["line"])
    return Frame(file, line, stacks.name(call["function"]), _source(file, line))


def _source(file: str, line: int) -> str:
    if not os.path.isfile(file):  # noqa: PTH113 - False for names that no file can have
        return ""
    return linecache.getline(file, line).strip()


def _printable(line: str) -> str:
    return "".join(c for c in line if c.isprintable() or c == "\t")


# Exceptions whose message holds the traceback of another process.
_WRAPPERS = re.compile(r"Original Traceback|terminated with the following error:")
# Source: torch 2.13, torch/utils/data/dataloader.py, _try_get_data
_LOADER_ENDED = re.compile(r"^DataLoader worker \(pid\(s\) [\d, ]+\) exited unexpectedly$")
# What led to that where torch wasn't told how the worker ended: it says nothing.
_NOTHING_CAME = "_queue.Empty"

# A child that printed its traceback itself.
# Source: torch 2.13, torch/multiprocessing/spawn.py, join
_CHILD_FAILED = re.compile(r"^process \d+ terminated with exit code 1$")
# A child that could not start, because of a failed import say. Its traceback is only in the log.
# Source: torch 2.13, torch/utils/data/_utils/signal_handling.py
_LOADER_FAILED = re.compile(
    r"^DataLoader worker \(pid \d+\) exited unexpectedly with exit code 1\b"
)
# Where the traceback of a process that multiprocessing started begins.
_BEGINS_A_CHILD = re.compile(r"[/\\]multiprocessing[/\\](?:spawn|forkserver|process)\.py$")
# Characters of a line that are searched: some patterns take time quadratic in a word's length.
SEARCHED_LENGTH = 2000


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of one rank's end.

    Attributes:
        exit_code: Its exit code, or minus the signal that it died of.
        raised: Its exception, followed by those that led to it; empty without one.
        handled: Whether the exception was only being handled when another one ended the rank.
        log: The end of its log.
        stack: The Python stack that a fatal signal left.
        plan: The plan with its secrets masked.
        before: The machine before the run.
        after: The machine after it.
        peak_bytes: The highest memory use of any process of the run, in bytes.
        exit: How the process that started it saw it end.
        failure: What the worker itself recorded; None if it could not record anything.
    """

    exit_code: int
    raised: tuple[Raised, ...] = ()
    handled: bool = False
    log: str = ""
    stack: tuple[Frame, ...] = ()
    plan: LaunchPlan | None = None
    before: Surroundings = field(default_factory=Surroundings)
    after: Surroundings = field(default_factory=Surroundings)
    peak_bytes: int = 0
    exit: WorkerExit = field(default_factory=lambda: WorkerExit(0, 0, 0, 0, 0))
    failure: Failure | None = None

    @property
    def rank(self) -> int:
        """Its global rank."""
        return self.exit.rank

    @property
    def time_ns(self) -> int:
        """When it failed, or else when its end was seen, in nanoseconds since the epoch."""
        return self.failure.time_ns if self.failure else self.exit.time_ns

    @property
    def order_ns(self) -> int:
        """The same by the monotonic clock: setting the time of day must not change the order."""
        return self.failure.monotonic_ns if self.failure else self.exit.monotonic_ns

    @property
    def cwd(self) -> str:
        """Its working directory when it raised; empty where that isn't known."""
        return self.failure.cwd if self.failure else ""

    @property
    def signal(self) -> str:
        """Name of the signal that it died of; empty for an exit code."""
        if self.exit_code >= 0:
            return ""
        try:
            return signal.Signals(-self.exit_code).name
        except ValueError:  # a real-time one
            return f"signal {-self.exit_code}"

    @property
    def text(self) -> str:
        """The text that rules search: its message, or what C++ printed before it called abort().

        Of a line longer than any message, only the two ends are kept.
        """
        if self.raised:
            return "\n".join(map(_ends, self.raised[0].message.split("\n")))
        return "\n".join(last_lines(self.log, LAST_LINES)) if self.signal == "SIGABRT" else ""

    @property
    def frames(self) -> tuple[Frame, ...]:
        """The calls that led to its end."""
        return self.raised[0].frames if self.raised else self.stack

    def telling(self) -> Evidence:
        """Return the evidence of the most telling exception: not of one that passes another on."""
        return next(self.each())

    def each(self) -> Iterator[Evidence]:
        """Yield the evidence for each exception, the most telling first; itself without any."""
        chain = _in_their_process(self.raised)
        told = [inner for raised in chain for inner in self._unwrapped(raised)]
        while len(told) > 1 and _passes_on(told[0]) and told[1].kinds[0] != _NOTHING_CAME:
            told = told[1:]
        handled = False
        for index, raised in enumerate(told):
            handled = handled or (raised.handled and index > 0)
            # An exception caught inside a library has none of the user's calls in its traceback.
            own = any(frame.own for frame in raised.frames)
            frames = raised.frames if own else self.raised[0].frames
            yield replace(self, raised=(replace(raised, frames=frames),), handled=handled)
        if not told:
            yield self

    def _unwrapped(self, raised: Raised) -> Iterator[Raised]:
        """Yield the exception of another process before the one that passes it on."""
        inner = None
        if _WRAPPERS.search(raised.message):
            inner = read_traceback(raised.message)
        elif _CHILD_FAILED.search(raised.message):
            inner = read_traceback(self.log)
            if inner and inner.message == raised.message:  # the parent's own, printed last
                inner = read_traceback(before_traceback(self.log))
        elif _LOADER_FAILED.search(raised.message):
            inner = self._of_a_child(read_traceback(self.log))
            inner = inner or self._of_a_child(read_traceback(before_traceback(self.log)))
        if inner:
            yield replace(inner, handled=raised.handled)
            raised = replace(raised, handled=False)
        yield raised

    @staticmethod
    def _of_a_child(raised: Raised | None) -> Raised | None:
        """Return an exception if it ended a process that multiprocessing had started."""
        frames = raised.frames if raised else ()
        return raised if any(_BEGINS_A_CHILD.search(frame.file) for frame in frames) else None

    def place(self) -> str:
        """Return ``file:line`` of the innermost call in the user's code, or where it is known."""
        own = [frame for frame in self.frames if frame.own] or list(self.frames)
        return f"{Path(own[-1].file).name}:{own[-1].line}" if own else "the last line of its log"


def _ends(line: str) -> str:
    if len(line) <= SEARCHED_LENGTH:
        return line
    half = SEARCHED_LENGTH // 2
    return f"{line[:half]} ... {line[-half:]}"


def _passes_on(raised: Raised) -> bool:
    """True if it only says that something ended; the exception that led to it says why."""
    by_itself = raised.name == "SystemExit"  # `except Exception: ...; sys.exit(1)`
    of_parts = "builtins.BaseExceptionGroup" in raised.kinds  # which are recorded after it
    return by_itself or of_parts or bool(_LOADER_ENDED.search(raised.message))


def _in_their_process(chain: tuple[Raised, ...]) -> Iterator[Raised]:
    """Yield exceptions with the calls of the process that raised them, such as a pool's worker.

    Source: CPython 3.11, Lib/multiprocessing/pool.py and Lib/concurrent/futures/process.py: the
    cause of an exception that a worker passed on is a RemoteTraceback, whose text is the worker's.
    """
    for raised, cause in zip(chain, (*chain[1:], None), strict=False):
        if not _is_remote(raised):
            there = read_traceback(cause.message) if cause and _is_remote(cause) else None
            yield replace(raised, frames=there.frames) if there else raised


def _is_remote(raised: Raised) -> bool:
    return raised.name.lstrip("_") == "RemoteTraceback"


# Gathers what is known of the end of each rank: its records, its log, and what ended it.


# Signals by which the agent stops workers.
STOPPING = (-signal.SIGTERM, -signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class FailedRun:
    """What the launcher knows of a run that failed.

    Attributes:
        plan: The plan.
        masked: The same without secrets.
        environ: The environment as the user has it.
        exit_code: What the run ended with, or 128 + signal.
        before: The machine before the run.
        after: The machine after it.
        shown: Ranks whose output was on the screen.
        rank: Rank of the only process of a run without an agent.
        steps: Optimizer steps of each rank; None where they can't be seen.
        exits: What the agent reported of its workers that ended badly.
    """

    plan: LaunchPlan
    masked: LaunchPlan
    environ: Mapping[str, str]
    exit_code: int
    before: Surroundings
    after: Surroundings
    shown: Container[int]
    rank: int = 0
    steps: Mapping[int, int] | None = None
    exits: WorkerExits = field(default_factory=WorkerExits)

    @property
    def by_agent(self) -> bool:
        """True if an agent started the workers and reports their ends."""
        return self.plan.processes.value.backend == "torchrun"


def gather(run: FailedRun) -> tuple[tuple[Evidence, ...], tuple[str, ...]]:
    """Return the evidence of each rank that ended badly, and what could not be read.

    There is none where the run was stopped from outside, or the agent could not start anything.
    """
    failures, problems = _failures(Path(run.plan.run_dir))
    exits = run.exits.ends if run.by_agent else (_only_exit(run, failures),)
    return tuple(_evidence(run, one, failures.get(one.pid)) for one in exits), problems


def _failures(run_dir: Path) -> tuple[dict[int, Failure], tuple[str, ...]]:
    """Return what the workers recorded, by process number, and what could not be read.

    By process, because a record of an earlier attempt may be left; it has another process.
    """
    found, problems = {}, []
    for path in sorted(run_dir.glob(failure_file(0).replace("0", "*"))):
        try:
            failure = load(Failure, path)
        except (OSError, CodecError) as error:
            problems.append(f"{path.name} can't be read: {error}")
            continue
        found[failure.pid] = failure
    return found, tuple(problems)


def _only_exit(run: FailedRun, failures: Mapping[int, Failure]) -> WorkerExit:
    failure = next(iter(failures.values()), None)
    pid = failure.pid if failure else 0
    # A shell, too, reports signal N as 128 + N; only a script that records its exit shows which.
    signum = run.exit_code - 128
    by_signal = signum in signal.valid_signals() and (failure is None or failure.exit_code < 0)
    code = -signum if by_signal else run.exit_code
    return WorkerExit(run.rank, pid, code, time.time_ns(), time.monotonic_ns())


def _evidence(run: FailedRun, seen: WorkerExit, failure: Failure | None) -> Evidence:
    run_dir = Path(run.plan.run_dir)
    # Masked before any line is cut: half of a secret would no longer be recognised.
    log = hide(tail(run_dir / f"rank-{seen.rank}.log"), secrets_of(run.plan, run.environ))
    raised = failure.raised if failure else ()
    if not failure and seen.exit_code == 1 and (found := last_traceback(log)):
        raised = (found,)  # of a command, or of a worker that could not record it
    return Evidence(
        exit_code=_code(seen, failure),
        raised=raised,
        log=log,
        stack=read_stack(run_dir / stack_file(seen.rank)) if seen.exit_code < 0 else (),
        plan=run.masked,
        before=run.before,
        after=run.after,
        peak_bytes=max(peak_of_children(), run.exits.peak_bytes),
        exit=seen,
        failure=failure,
    )


def _code(seen: WorkerExit, failure: Failure | None) -> int:
    """Return the exit code; of a rank stopped while it was ending, what that would have been."""
    stopped = seen.exit_code in STOPPING
    return failure.exit_code if failure and stopped else seen.exit_code
