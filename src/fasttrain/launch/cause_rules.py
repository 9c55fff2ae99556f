"""The rules that the table of causes is made of, and the facts that its words are filled with."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from fasttrain.launch.last_words import last_lines, read_traceback
from fasttrain.spec.crash import Frame, Raised, Surroundings
from fasttrain.spec.plan import LaunchPlan

Facts = dict[str, str]

LAST_WORDS = 60  # lines: a C++ stack stands behind the error itself
UNKNOWN = "an unknown amount"
# Wrappers whose message holds the traceback of another process.
_WRAPPERS = re.compile(r"Original Traceback|terminated with the following error:")
# Source: torch 2.13, torch/utils/data/dataloader.py, _try_get_data
_LOADER_ENDED = re.compile(r"^DataLoader worker \(pid\(s\) [\d, ]+\) exited unexpectedly$")
_DIED_OF_KILL = re.compile(r"killed by signal: Killed|terminated with signal SIGKILL")
_NO_MEMORY = re.compile(r"DefaultCPUAllocator: .*?(?P<wanted>\d+) bytes|std::bad_alloc")
_KEPT = re.compile(r"error: (?P<what>.*)\n  why: (?P<why>.*)\n  fix: (?P<fix>.*?)\s+\[")


@dataclass(frozen=True, slots=True)
class Case:
    """All that is known of one rank's end.

    Attributes:
        exit_code: Its exit code, or minus the signal that it died of.
        raised: Its exception, followed by those that led to it; empty without one.
        log: The end of its log.
        stack: The stack that a fatal signal left.
        plan: The plan with its secrets masked.
        before: The machine before the run.
        after: The machine behind it.
        peak_bytes: The most memory that a process of the run had, in bytes.
    """

    exit_code: int
    raised: tuple[Raised, ...] = ()
    log: str = ""
    stack: tuple[Frame, ...] = ()
    plan: LaunchPlan | None = None
    before: Surroundings = field(default_factory=Surroundings)
    after: Surroundings = field(default_factory=Surroundings)
    peak_bytes: int = 0

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
        """What there is to search: its message, or what C++ said before it called abort()."""
        if self.raised:
            return self.raised[0].message
        return "\n".join(last_lines(self.log, LAST_WORDS)) if self.signal == "SIGABRT" else ""

    @property
    def frames(self) -> tuple[Frame, ...]:
        """The calls that led to its end."""
        return self.raised[0].frames if self.raised else self.stack

    def telling(self) -> Case:
        """Give the case of the exception that tells most: not what only passes another one on."""
        return next(self.each())

    def each(self) -> Iterator[Case]:
        """Give a case for each exception, the telling one first, or this one without any."""
        told = [inner for raised in self.raised for inner in _unwrapped(raised)]
        while len(told) > 1 and _passes_on(told[0]):
            told = told[1:]
        for raised in told:
            # One that was caught inside of a library has no call of the user's in its traceback.
            own = any(frame.own for frame in raised.frames)
            frames = raised.frames if own else self.raised[0].frames
            yield replace(self, raised=(replace(raised, frames=frames),))
        if not told:
            yield self

    def place(self) -> str:
        """Give ``file:line`` of the innermost call in the user's code, or where it is known."""
        own = [frame for frame in self.frames if frame.own] or list(self.frames)
        return f"{Path(own[-1].file).name}:{own[-1].line}" if own else "the last line of its log"


def _passes_on(raised: Raised) -> bool:
    """Whether it only says that something ended, and what led to it says why."""
    by_itself = raised.name == "SystemExit"  # `except Exception: ...; sys.exit(1)`
    return by_itself or bool(_LOADER_ENDED.search(raised.message))


def _unwrapped(raised: Raised) -> Iterator[Raised]:
    """Give the exception of another process in front of the one that passes it on."""
    if _WRAPPERS.search(raised.message) and (inner := read_traceback(raised.message)):
        yield inner
    yield raised


def text(*patterns: str) -> Callable[[Case], Facts | None]:
    """Give a rule: one of the patterns is in the message, or in the log of one that was hit."""
    compiled = [re.compile(pattern, re.DOTALL if ".*?" in pattern else 0) for pattern in patterns]

    def rule(case: Case) -> Facts | None:
        for pattern in compiled:
            if found := pattern.search(case.text):
                return _facts(case) | {k: v for k, v in found.groupdict().items() if v}
        return None

    return rule


def kind(*names: str) -> Callable[[Case], Facts | None]:
    """Give a rule: the exception is of one of these classes."""

    def rule(case: Case) -> Facts | None:
        if not case.raised:
            return None
        classes = {name.rpartition(".")[2] for name in case.raised[0].kinds}
        classes.add("BaseException")
        return _facts(case) if classes.intersection(names) else None

    return rule


def number(numbers: tuple[int, ...], *patterns: str) -> Callable[[Case], Facts | None]:
    """Give a rule: the exception is an OSError of these numbers, or its text says so."""
    says_so = text(*patterns)

    def rule(case: Case) -> Facts | None:
        if case.raised and case.raised[0].errno in numbers:
            return _facts(case)
        return says_so(case)

    return rule


def signalled(*names: str) -> Callable[[Case], Facts | None]:
    """Give a rule: it died of one of these signals, or of any where none is named."""

    def rule(case: Case) -> Facts | None:
        fits = case.signal and (not names or case.signal in names)
        return _facts(case) if fits else None

    return rule


def other_exception(case: Case) -> Facts | None:
    """Fit whatever was raised, but for the script's own sys.exit."""
    return None if kind("SystemExit")(case) is not None else kind("BaseException")(case)


def exit_code(case: Case) -> Facts | None:
    """Give the facts of whatever ended with an exit code."""
    return _facts(case)


def own_error(case: Case) -> Facts | None:
    """Fit where fasttrain itself stopped the worker, with an error that says why."""
    if kind("FasttrainError")(case) is None:
        return None
    kept = _KEPT.search(case.raised[0].message)
    return _facts(case) | (kept.groupdict() if kept else {"why": case.raised[0].message, "fix": ""})


def argparse_refused(case: Case) -> Facts | None:
    """Fit where the script's argument parser ended it."""
    by_parser = any(Path(frame.file).name == "argparse.py" for frame in case.frames)
    return _facts(case) if by_parser and kind("SystemExit")(case) is not None else None


def host_memory(case: Case) -> Facts | None:
    """Fit where the kernel killed for memory, or an allocation on the host failed."""
    facts = _facts(case)
    if kind("MemoryError")(case) is not None:
        return facts | {"evidence": "Python could not allocate any more" + facts["peak"]}
    if failed := _NO_MEMORY.search(case.text):
        wanted = f"{size(int(failed['wanted']))} were wanted" if failed["wanted"] else "C++ said so"
        return facts | {"evidence": wanted + facts["peak"]}
    killed = case.signal == "SIGKILL" or (case.raised and _DIED_OF_KILL.search(case.text))
    return _killed_for_memory(case, facts) if killed else None


def _killed_for_memory(case: Case, facts: Facts) -> Facts | None:
    if _rose(case.before.group_oom_kills, case.after.group_oom_kills):
        limit = case.after.memory_limit_bytes
        why = "the kernel killed a process at the limit of its control group"
        why += f", {size(limit)}" if limit else ""
    elif _rose(case.before.machine_oom_kills, case.after.machine_oom_kills):
        why = f"the kernel killed a process for it; the machine has {facts['memory']}"
    else:
        return None
    return facts | {"evidence": why + facts["peak"]}


def _rose(before: int | None, after: int | None) -> bool:
    return before is not None and after is not None and after > before


def _facts(case: Case) -> Facts:
    """Give what any row may name, whether this one does or not."""
    raised = case.raised[0] if case.raised else Raised((), "")
    message = (raised.message.strip().splitlines() or [""])[0]
    quoted = re.search("'([^']+)'", message)  # in a traceback that was read from a log
    plan, last = case.plan, "".join(last_lines(case.log, 1))
    own = [frame for frame in case.frames if frame.own]
    debug = plan is not None and any(v.name == "CUDA_LAUNCH_BLOCKING" for v in plan.environment)
    amp_off = plan is not None and plan.levers.amp.value.precision == "off"
    return {
        "message": message,
        "kind": raised.name if raised.kinds else "",
        "subject": raised.subject or (quoted[1] if quoted else "such file or module"),
        "place": case.place(),
        "source": own[-1].source if own else "",
        "signal": case.signal,
        "code": str(case.exit_code),
        "exit_place": f", at {case.place()}" if own else "",
        "exit_text": "" if message.lstrip("-").isdecimal() or not message else f": {message}",
        "arguments": last,
        "cwd": plan.cwd if plan else "",
        "python": plan.argv[0] if plan and plan.target.kind != "command" else "python",
        "shm": size(case.after.shm_bytes),
        "memory": size(case.after.memory_bytes),
        "peak": f"; the largest process had {size(case.peak_bytes)}" if case.peak_bytes else "",
        "stack": f", called at {case.place()}" if case.stack else "",
        "last_line": f": {last}" if last else "",
        "call": _collective(case.frames),
        "wanted": UNKNOWN, "free": UNKNOWN, "total": UNKNOWN, "which": "",
        "debug": "look at the line above" if debug else "run it again with --debug, which shows the"
        " line that launched the kernel",
        "less_memory": ", or --amp bf16" if amp_off else "",
    }  # fmt: skip


def _collective(frames: tuple[Frame, ...]) -> str:
    named = [f.function for f in frames if Path(f.file).name == "distributed_c10d.py"]
    return named[-1] if named else "that it was in"


def size(value: int | None) -> str:
    """Give a size in bytes with its unit, in powers of 1024."""
    if value is None:
        return UNKNOWN
    amount = float(value)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.3g} {unit}"
        amount /= 1024
    return f"{amount:.3g} TiB"
