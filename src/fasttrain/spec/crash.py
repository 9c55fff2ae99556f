"""How a run failed: what a worker and its agent record, and what the launcher makes of it."""

from __future__ import annotations

import re
from dataclasses import dataclass

CRASH_SCHEMA = 1
CRASH_FILE = "crash.json"  # in the run directory, as all of these
ENDS_FILE = "ends.json"
MESSAGE_LENGTH = 4000  # an error of a compiler or a C++ stack can be megabytes

# Python's own library, installed packages, frozen modules and generated code.
_OF_OTHERS = re.compile(r"[/\\](site-packages|dist-packages)[/\\]|[/\\]lib(64)?[/\\]python3|^<")


def failure_file(rank: int) -> str:
    """Give where a worker records the exception that ends it."""
    return f"failure-{rank}.json"


def stack_file(rank: int) -> str:
    """Give where a worker writes its Python stack when a signal such as SIGSEGV ends it."""
    return f"fault-{rank}.txt"


@dataclass(frozen=True, slots=True)
class Frame:
    """One call of a traceback; `source` is the text of its line, where that is known."""

    file: str
    line: int
    function: str
    source: str = ""

    @property
    def own(self) -> bool:
        """Whether it is in the user's code, judged by where the file lies."""
        return not _OF_OTHERS.search(self.file)


@dataclass(frozen=True, slots=True)
class Raised:
    """One exception.

    Attributes:
        kinds: Full names of its class and of those that it derives from, most special first.
        message: Its text, of at most `MESSAGE_LENGTH` characters.
        frames: Where it went through, innermost last.
        errno: Number of an OSError; 0 without.
        subject: File of an OSError or module of an ImportError; empty without.
    """

    kinds: tuple[str, ...]
    message: str
    frames: tuple[Frame, ...] = ()
    errno: int = 0
    subject: str = ""

    @property
    def name(self) -> str:
        """Its class, without the module."""
        return self.kinds[0].rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class Failure:
    """What a worker records of the exception that ends it.

    Attributes:
        rank: Its global rank.
        pid: Its process.
        time_ns: When it was raised out of the script, by the worker's own clock.
        exit_code: What the interpreter ends with at it, or minus a signal; a worker that is
            stopped while it ends still failed with this one.
        raised: The exception, followed by those that led to it.
    """

    rank: int
    pid: int
    time_ns: int
    exit_code: int
    raised: tuple[Raised, ...]


@dataclass(frozen=True, slots=True)
class End:
    """A worker that ended badly, as the process that started it saw it.

    Attributes:
        rank: Its global rank.
        pid: Its process; 0 where it isn't known.
        exit_code: Its exit code, or minus the signal that it died of.
        time_ns: When its end was seen.
    """

    rank: int
    pid: int
    exit_code: int
    time_ns: int


@dataclass(frozen=True, slots=True)
class Ends:
    """The workers of one node that ended badly."""

    ends: tuple[End, ...]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What of the machine explains a failure; None where the machine doesn't tell.

    Attributes:
        group_oom_kills: A count that rises with each process that the limit of one of our control
            groups costs.
        machine_oom_kills: The same for the whole machine, whoever's the processes are.
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
        error: The exception as Python tells it; empty without one.
        frames: The calls that led there, cut to what is the user's.
        log: The last lines of its log in front of the traceback.
        log_file: Name of its log in the run directory; empty without one.
        shown: Whether its output was on the screen.
        others: What became of the other ranks, in one sentence; empty where there are none.
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
    schema: int = CRASH_SCHEMA
