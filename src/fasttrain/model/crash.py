"""How a run failed: the records of a worker and its agent, and the launcher's diagnosis."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fasttrain.model.errors import demand, demand_exit_code

CRASH_SCHEMA = 1
CRASH_FILE = "crash.json"  # in the run directory, as all of these
EXITS_FILE = "ends.json"  # WorkerExits
MESSAGE_LENGTH = 4000  # a compiler's error or a C++ stack can be megabytes

# Python's own library, installed packages, frozen modules and generated code.
_NOT_THE_USERS = re.compile(r"[/\\](site-packages|dist-packages)[/\\]|[/\\]lib(64)?[/\\]python3|^<")


def failure_file(rank: int) -> str:
    """Return the name of the file in which a worker records the exception that ends it."""
    return f"failure-{rank}.json"


def stack_file(rank: int) -> str:
    """Return the name of the file for a worker's Python stack at a signal such as SIGSEGV."""
    return f"fault-{rank}.txt"


@dataclass(frozen=True, slots=True)
class Frame:
    """One call of a traceback.

    Attributes:
        file: Path of the file, as Python names it.
        line: Line number, from 1.
        function: Name of the function.
        source: Text of the line; empty if unknown.
        of_target: Whether the file belongs to the program that was started, or to its package.
    """

    file: str
    line: int
    function: str
    source: str = ""
    of_target: bool = False

    @property
    def own(self) -> bool:
        """True if the frame is in the user's code, by its program or by the file's folder."""
        return self.of_target or not _NOT_THE_USERS.search(self.file)


@dataclass(frozen=True, slots=True)
class Raised:
    """One exception.

    Attributes:
        kinds: Full names of its class and of the base classes, the class itself first.
        message: Its text, at most `MESSAGE_LENGTH` characters.
        frames: Its traceback, innermost frame last.
        errno: Number of an OSError; 0 without one.
        subject: File of an OSError or module of an ImportError; empty without one.
        handled: Whether it was merely being handled (`__context__`) when the exception before it
            was raised, without a ``raise ... from`` that names it as the cause.
    """

    kinds: tuple[str, ...]
    message: str
    frames: tuple[Frame, ...] = ()
    errno: int = 0
    subject: str = ""
    handled: bool = False

    @property
    def name(self) -> str:
        """Name of the exception's class, without the module."""
        return self.kinds[0].rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class Failure:
    """A worker's record of the exception that ends it.

    Attributes:
        rank: Global rank.
        pid: The worker's process ID.
        time_ns: When the exception left the script, in nanoseconds since the epoch.
        monotonic_ns: The same on the monotonic clock, which all processes of a node share.
        exit_code: Exit code of the interpreter for this exception, or -N for signal N; it stays the
            worker's exit code even if a signal stops the worker during its shutdown.
        raised: The exception, followed by its causes and contexts.
        cwd: Working directory at that time, which the script may have changed; empty if deleted.
    """

    rank: int
    pid: int
    time_ns: int
    monotonic_ns: int
    exit_code: int
    raised: tuple[Raised, ...]
    cwd: str = ""

    def __post_init__(self) -> None:
        demand_exit_code(self.exit_code)
        demand(bool(self.raised), "a failure has an exception")
        demand(all(one.kinds for one in self.raised), "an exception has a class")


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """The end of a failed worker, as seen by the process that started it.

    Attributes:
        rank: Global rank.
        pid: The worker's process ID; 0 if unknown.
        exit_code: Its exit code, or -N if signal N killed it.
        time_ns: When its end was noticed, in nanoseconds since the epoch.
        monotonic_ns: The same on the monotonic clock.
    """

    rank: int
    pid: int
    exit_code: int
    time_ns: int
    monotonic_ns: int

    def __post_init__(self) -> None:
        demand_exit_code(self.exit_code)


@dataclass(frozen=True, slots=True)
class WorkerExits:
    """The failed workers of one node.

    Attributes:
        ends: How each of them ended.
        peak_bytes: The highest memory use of any worker, in bytes; 0 where it isn't known.
    """

    ends: tuple[WorkerExit, ...] = ()
    peak_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Surroundings:
    """State of the machine that can explain a failure; None if unknown.

    Attributes:
        group_oom_kills: Number of OOM kills in our control group (cgroup) so far.
        machine_oom_kills: The same for the whole machine, other users' processes included.
        memory_limit_bytes: Memory limit of the control group.
        memory_bytes: Memory of the machine.
        shm_bytes: Size of /dev/shm.
    """

    group_oom_kills: int | None = None
    machine_oom_kills: int | None = None
    memory_limit_bytes: int | None = None
    memory_bytes: int | None = None
    shm_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Crash:
    """Why a run failed; secrets are masked.

    Attributes:
        rank: The rank that failed first.
        ranks: Number of ranks on this node.
        exit_code: Exit code of that rank, or 128 + signal.
        signal: Name of the signal that killed it; empty if it exited.
        time_ns: When it failed, in nanoseconds since the epoch.
        cause: Stable name of the cause; tests and searches match it, never the prose.
        why: The cause in words.
        fix: The next thing to type or change; empty without a suggestion.
        error: The exception as Python prints it; empty without one.
        frames: The traceback, cut to the user's part.
        log: The last lines of its log before the traceback.
        log_file: Name of its log in the run directory; empty without one.
        shown: Whether its output was on the screen.
        others: What happened to the other ranks, in one sentence; empty if there are none.
        step: Optimizer steps that the rank had made; None if unknown.
        node: Host name of its node, unless that is this one.
        earlier: What happened to earlier attempts of the run; empty on the first.
        final: Why the run did not restart; empty if no restarts were asked for.
    """

    rank: int
    ranks: int
    exit_code: int
    signal: str
    time_ns: int
    cause: str
    why: str
    fix: str
    error: str = ""
    frames: tuple[Frame, ...] = ()
    log: tuple[str, ...] = ()
    log_file: str = ""
    shown: bool = False
    others: str = ""
    step: int | None = None
    node: str = ""
    earlier: str = ""
    final: str = ""
    schema: int = CRASH_SCHEMA
