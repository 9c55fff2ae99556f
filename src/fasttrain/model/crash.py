"""How a run failed: what a worker and its agent record, and how the launcher judges it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fasttrain.model.errors import demand, demand_exit_code

CRASH_SCHEMA = 1
CRASH_FILE = "crash.json"  # in the run directory, as all of these
EXITS_FILE = "ends.json"  # WorkerExits
MESSAGE_LENGTH = 4000  # a compiler's error or a C++ stack can be megabytes

# Python's own library, installed packages, frozen modules and generated code: not the user's.
_OF_OTHERS = re.compile(r"[/\\](site-packages|dist-packages)[/\\]|[/\\]lib(64)?[/\\]python3|^<")


def failure_file(rank: int) -> str:
    """Return where a worker records the exception that ends it."""
    return f"failure-{rank}.json"


def stack_file(rank: int) -> str:
    """Return where a worker writes its Python stack when a signal such as SIGSEGV ends it."""
    return f"fault-{rank}.txt"


@dataclass(frozen=True, slots=True)
class Frame:
    """One call of a traceback.

    Attributes:
        file: Its file, as Python names it.
        line: The line, from 1.
        function: Name of the function.
        source: Text of the line, where that is known.
        of_target: Whether it is in the script or module that was started, or in its package.
    """

    file: str
    line: int
    function: str
    source: str = ""
    of_target: bool = False

    @property
    def own(self) -> bool:
        """True if it is in the user's code: the program itself, or a file outside of packages."""
        return self.of_target or not _OF_OTHERS.search(self.file)


@dataclass(frozen=True, slots=True)
class Raised:
    """One exception.

    Attributes:
        kinds: Full names of its class and of its base classes, most derived first.
        message: Its text, of at most `MESSAGE_LENGTH` characters.
        frames: The calls of its traceback, innermost last.
        errno: Number of an OSError; 0 without.
        subject: File of an OSError or module of an ImportError; empty without.
        handled: Whether it was only being handled when the exception before it in the chain was
            raised, without ``raise ... from``.
    """

    kinds: tuple[str, ...]
    message: str
    frames: tuple[Frame, ...] = ()
    errno: int = 0
    subject: str = ""
    handled: bool = False

    @property
    def name(self) -> str:
        """Its class, without the module."""
        return self.kinds[0].rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class Failure:
    """The exception that ends a worker, as the worker itself records it.

    Attributes:
        rank: Its global rank.
        pid: Its process.
        time_ns: When it left the script, in nanoseconds since the epoch.
        monotonic_ns: The same by the monotonic clock, which all processes of a node share.
        exit_code: What the interpreter ends with because of it, or minus a signal; a worker that
            is stopped while it is ending still failed with this code.
        raised: The exception, followed by those that led to it.
        cwd: Its working directory then, which the script may have changed; empty if it is gone.
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
    """A worker that ended badly, as the process that started it saw it.

    Attributes:
        rank: Its global rank.
        pid: Its process; 0 where it isn't known.
        exit_code: Its exit code, or minus the signal that it died of.
        time_ns: When its end was seen, in nanoseconds since the epoch.
        monotonic_ns: The same by the monotonic clock.
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
    """The workers of one node that ended badly.

    Attributes:
        ends: How each of them ended.
        peak_bytes: The highest memory use of any worker, in bytes; 0 where it isn't known.
    """

    ends: tuple[WorkerExit, ...] = ()
    peak_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Surroundings:
    """State of the machine that can explain a failure; None where it isn't known.

    Attributes:
        group_oom_kills: Processes of our control group that the kernel has killed for memory.
        machine_oom_kills: The same for the whole machine, including other users' processes.
        memory_limit_bytes: Limit of the control group.
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
        ranks: Ranks of this node.
        exit_code: Its exit code, or 128 + signal.
        signal: Name of the signal that it died of; empty for an exit code.
        time_ns: When it failed, in nanoseconds since the epoch.
        cause: Stable name of the cause; tests and searches match it, never the prose.
        why: The cause in words.
        fix: The next thing to type or change; empty where there is nothing to suggest.
        error: The exception as Python prints it; empty without one.
        frames: The calls that led there, cut to the user's own.
        log: The last lines of its log before the traceback.
        log_file: Name of its log in the run directory; empty without one.
        shown: Whether its output was on the screen.
        others: What became of the other ranks, in one sentence; empty where there are none.
        step: Optimizer steps that its rank had made; None where they can't be seen.
        node: The machine that it was on, where that isn't this one.
        earlier: What became of earlier attempts of the run; empty where this was the first.
        final: Why the run was not started again; empty where nobody asked for that.
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
