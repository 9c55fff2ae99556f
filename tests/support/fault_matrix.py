"""The cells of the fault matrix: what happens, where, to one rank or two, with which levers.

Each cause is met by one rank and by two with every lever off, and by one or two in turns with amp,
or amp and compile, in turns. The places go round from cause to cause, so that each of them, too,
is met by one rank and two, with levers and without.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

PLACES = ("start", "loader", "forward", "backward", "optimizer", "saving")
IN_A_STEP = PLACES[1:]
LEVERS = {
    "off": ("--amp", "off", "--optimizer", "keep"),
    "amp": ("--amp", "bf16"),
    "amp+compile": ("--amp", "bf16", "--compile", "default"),
}


@dataclass(frozen=True)
class Cause:
    """What happens to a run, and what is to become of it.

    Attributes:
        name: What the table calls it.
        what: What the program is told to do.
        code: The run's exit code.
        slug: The crash's cause; empty where no crash is to be told.
        slug_of_two: The same with two ranks.
        places: Where it can happen.
        ranks: To how many it can happen.
        send: Signal and target, for what comes from outside while the program waits.
        program: The program.
        options: Options of its run.
        first: The rank to be named of two: the one it happens to, the other one, or any.
        mount: What is in the place of /dev/shm.
        hangs: Whether hang.json is to tell of it.
        memory_bytes: Limit of its control group; none if 0.
    """

    name: str
    what: str
    code: int
    slug: str
    slug_of_two: str | None = None
    places: tuple[str, ...] = PLACES
    ranks: tuple[int, ...] = (1, 2)
    send: tuple[str, str] | None = None
    program: str = "trains.py"
    options: tuple[str, ...] = ()
    first: str = "it"
    mount: str = "folder"
    hangs: bool = False
    memory_bytes: int = 0


def _signalled(name: str, code: int, slug: str = "", slug_of_two: str = "") -> Cause:
    """Send a signal to the launcher while a rank is at a place and any other waits for it."""
    return Cause(
        f"{name} at the launcher",
        "wait",
        code,
        slug,
        slug_of_two,
        send=(name, "launcher"),
        first="any",
    )


TWO_ALONE: dict[str, Any] = {"ranks": (2,), "program": "meets.py", "places": ("loop", "backward")}
IN_LOADER: dict[str, Any] = {"places": ("loader",)}
HANGS: dict[str, Any] = {"hangs": True, "options": ("--hang-timeout", "3"), "first": "any"}

CAUSES = (
    Cause("nothing", "nothing", 0, "", places=("saving",), first="any"),
    Cause("exception", "raise", 1, "exception"),
    Cause("sys.exit(7)", "exit 7", 7, "exit"),
    Cause("os._exit(9)", "leave 9", 9, "exit"),
    Cause("SIGSEGV", "SEGV", 139, "segfault"),
    Cause("SIGABRT", "ABRT", 134, "aborted"),
    Cause("SIGBUS of a cut file", "BUS", 135, "bus-error"),
    Cause("SIGKILL", "KILL", 137, "killed"),
    Cause("limit of memory", "no memory", 1, "host-memory"),
    Cause("control group's limit", "all memory", 137, "host-memory", memory_bytes=2 << 30),
    Cause("no space for a file", "no space", 1, "disk-full"),
    Cause("full disk", "disk full", 1, "disk-full", places=("saving",), mount="disk"),
    Cause(
        "nan, --on-nan stop", "nan", 65, "refused", places=("loader", "forward", "backward"),
        options=("--on-nan", "stop"), first="any",
    ),
    Cause("hang", "wait", 75, "", places=IN_A_STEP, **HANGS),
    Cause("hang in a collective", "wait", 75, "", **TWO_ALONE, **HANGS),
    Cause("gloo's time-out", "late", 1, "collective-timeout", **TWO_ALONE, first="other"),
    _signalled("SIGINT", 130, "interrupted"),
    _signalled("SIGTERM", 143, "stopped"),
    _signalled("SIGHUP", 129, "stopped"),
    _signalled("SIGUSR2", 140, "stopped", "stopped"),
    _signalled("SIGKILL", -9),
    Cause("SIGKILL at the agent", "wait", 137, "", ranks=(2,), send=("SIGKILL", "agent")),
    Cause("loader worker killed", "loader killed", 1, "loader-worker", **IN_LOADER),
    Cause("exception in a loader worker", "loader raises", 1, "exception", **IN_LOADER),
    Cause(
        "full /dev/shm", "shm full", 1, "shared-memory", **IN_LOADER, mount="small",
        first="any",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One run of the matrix."""

    cause: Cause
    place: str
    ranks: int
    levers: str = field(default="off")

    def __str__(self) -> str:
        return f"{self.cause.name}-{self.place}-{self.ranks}-{self.levers}".replace(" ", "_")

    @property
    def column(self) -> str:
        """What the table's column is called."""
        return f"{self.ranks} rank{'s' * (self.ranks > 1)}, {self.levers}"

    @property
    def lost_agent(self) -> bool:
        """Whether it is the agent that is killed."""
        return self.cause.send is not None and self.cause.send[1] == "agent"

    @property
    def rank(self) -> int:
        """The rank that it happens to: the second, but rank 0 alone saves."""
        return int(self.ranks > 1 and self.place != "saving")

    @property
    def slug(self) -> str:
        """The cause to be told; empty for none."""
        of_two = self.cause.slug_of_two
        return self.cause.slug if self.ranks == 1 or of_two is None else of_two

    @property
    def first(self) -> int | None:
        """The rank to be named first; None for any."""
        ranks = {"it": self.rank, "other": 1 - self.rank}
        return ranks.get(self.cause.first) if self.ranks > 1 else 0


def cells() -> Iterator[Cell]:
    """Return the cells of the whole matrix."""
    for row, cause in enumerate(CAUSES):
        for column, ranks in enumerate(cause.ranks):
            yield Cell(cause, _nth(cause.places, row + 3 * column), ranks)
        ranks = cause.ranks[row // 2 % len(cause.ranks)]
        levers = ("amp", "amp+compile")[row % 2]
        # In front of the first step no lever has acted yet.
        places = tuple(place for place in cause.places if place != "start")
        yield Cell(cause, _nth(places, row + 1), ranks, levers)


def _nth(places: tuple[str, ...], number: int) -> str:
    return places[number % len(places)]
