"""The rules that the table of causes is made of, and the facts that fill its words."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from fasttrain.launch.crash.evidence import Case
from fasttrain.launch.crash.log_tail import LAST_WORDS, last_lines
from fasttrain.model.crash import Frame, Raised
from fasttrain.model.errors import size as printed_size
from fasttrain.model.plan import Target
from fasttrain.model.vendors import VENDORS

# The facts that fill the words of the table of causes.


Facts = dict[str, str]

UNKNOWN = "an unknown amount"
LARGEST = "the largest process had"
# As Python itself names a file or a module; any other message quotes what it likes.
_NAMED = re.compile(r"(?:\[Errno \d+\] [^:]+: |No module named )(?P<quote>['\"])(.+?)(?P=quote)")
# What C++, glibc, LLVM and glog say before they call abort().
# Source: glibc 2.39, malloc.c, malloc_printerr, and fortify_fail.c; glog, src/logging.cc
_GAVE_UP = re.compile(
    r"terminate called|^\s*what\(\):|[Aa]ssert|Check failed|^F\d{4} |Fatal|FATAL|LLVM ERROR"
    r"|^\w+\(\): |double free|^corrupted |\*\*\* .* detected \*\*\*"
)


def facts_of(case: Case) -> Facts:
    """Return what any row may name, whether this one does or not."""
    raised = case.raised[0] if case.raised else Raised((), "")
    message = (raised.message.strip().splitlines() or [""])[0]
    python = plan.argv[0] if (plan := case.plan) and plan.target.kind != "command" else "python"
    last = "".join(last_lines(case.log, 1))
    own = [frame for frame in case.frames if frame.own]
    debug = plan is not None and any(v.name == "CUDA_LAUNCH_BLOCKING" for v in plan.environment)
    amp_off = plan is not None and plan.levers.amp.value.precision == "off"
    return {
        "message": message,
        "error": ": ".join(filter(None, (raised.name if raised.kinds else "", message))),
        "place": case.place(),
        "source": own[-1].source if own else "",
        "signal": case.signal,
        "code": str(case.exit_code),
        "exit_place": f", at {case.place()}" if own else "",
        "exit_text": "" if message.lstrip("-").isdecimal() or not message else f": {message}",
        "arguments": last,
        "cwd": case.cwd or (plan.cwd if plan else ""),
        "started_in": plan.cwd if plan else "",
        "as_module": _as_module(plan.target) if plan else "-m",
        "python": python,
        "shm": size(case.after.shm_bytes),
        "memory": size(case.after.memory_bytes),
        "peak": f"; {LARGEST} {size(case.peak_bytes)}" if case.peak_bytes else "",
        "stack": f", called at {case.place()}" if case.stack else "",
        "gave_up": _gave_up(case.log),
        "call": _collective(case.frames),
        "wanted": UNKNOWN, "free": UNKNOWN, "total": UNKNOWN, "which": "",
        "debug": "look at the line above" if debug else "run it again with --debug, which shows the"
        " line that launched the kernel",
        "less_memory": ", or --amp bf16" if amp_off else "",
    } | _missed(raised, message, python) | _checked(case.frames, message)  # fmt: skip


def _missed(raised: Raised, message: str, python: str) -> Facts:
    """Return what a missing file, right or module is called: by its name, else by the message."""
    named = _NAMED.match(message)  # in a traceback that was read from a log
    subject = raised.subject or (named[2] if named else "")
    if not subject:
        names = ("no_file", "no_right", "no_module")
        return {"subject": ""} | dict.fromkeys(names, message or "the script doesn't say which")
    return {
        "subject": subject,
        "no_file": f"there is no {subject}",
        "no_right": f"{subject} may not be used so by this user",
        "no_module": f"{python} has no module {subject}",
    }


def _checked(frames: tuple[Frame, ...], message: str) -> Facts:
    if not frames:
        return {"check": message, "checked_at": "an unknown place"}
    last = frames[-1]
    return {"check": message or last.source, "checked_at": f"{Path(last.file).name}:{last.line}"}


def _gave_up(log: str) -> str:
    """Return the last line that says why compiled code gave up, behind a colon; empty without."""
    lines = last_lines(log, LAST_WORDS)
    said = next((line.strip() for line in reversed(lines) if _GAVE_UP.search(line)), "")
    return f": {said}" if said else ""


def _as_module(target: Target) -> str:
    """Return how a script is named for -m, which looks in the working directory."""
    path = Path(target.name)
    name = ".".join(path.with_suffix("").parts)
    fits = (
        target.kind == "script" and path.suffix == ".py" and name.replace(".", "_").isidentifier()
    )
    return f"-m {name}" if fits else "-m MODULE"


def _collective(frames: tuple[Frame, ...]) -> str:
    named = [f.function for f in frames if Path(f.file).name == "distributed_c10d.py"]
    return named[-1] if named else "that it was in"


def size(value: int | None) -> str:
    """Return a size in bytes with its unit, where it is known."""
    return UNKNOWN if value is None else printed_size(value)


AT_LIMIT = "the kernel killed a process at the limit of its control group"
ON_MACHINE = "the kernel killed a process for it; the machine has"

_DIED_OF_KILL = re.compile(r"killed by signal: Killed|terminated with signal SIGKILL")
_NO_MEMORY = re.compile(r"DefaultCPUAllocator: .*?(?P<wanted>\d+) bytes|std::bad_alloc")
# Source: torch 2.13, torch/utils/data/_utils/signal_handling.py and what c10's MapAllocator says
_NO_SHM = re.compile(
    r"insufficient shared memory \(shm\)|out of shared memory"
    r"|DataLoader worker \(pid \d+\) is killed by signal: Bus error"
    r"|unable to (?:write to|mmap \d+ bytes from|resize|allocate shared memory\(shm\) for)"
    r" (?:file )?</torch_"
)
_DISTRIBUTED = re.compile(r"[/\\]torch[/\\](?:nn[/\\]parallel[/\\])?distributed")
_COLLECTIVES = "|".join({vendor.collectives for vendor in VENDORS.values()} - {""})
_BACKENDS = re.compile(rf"c10d|TCPStore|{_COLLECTIVES}", re.IGNORECASE)
_NETWORK = (
    "socket", "ssl", "http", "urllib", "urllib3", "requests", "httpx", "httpcore", "aiohttp",
    "botocore",
)  # fmt: skip
_KEPT = re.compile(r"error: (?P<what>.*)\n  why: (?P<why>.*)\n  fix: (?P<fix>.*?)\s+\[")


def text(*patterns: str) -> Callable[[Case], Facts | None]:
    """Return a rule: one of the patterns is in the message, or in the log of one that was hit."""
    compiled = [re.compile(pattern, re.DOTALL if ".*?" in pattern else 0) for pattern in patterns]

    def rule(case: Case) -> Facts | None:
        for pattern in compiled:
            if found := pattern.search(case.text):
                return facts_of(case) | {k: v for k, v in found.groupdict().items() if v}
        return None

    return rule


def of_ranks(*patterns: str) -> Callable[[Case], Facts | None]:
    """Return a rule: torch.distributed says one of the patterns.

    A download that fails says the same as a rank that lost its peer, but by an OSError, or where
    there is no other rank.
    """
    says_so = text(*patterns)

    def rule(case: Case) -> Facts | None:
        names = {name.rpartition(".")[2] for raised in case.raised for name in raised.kinds}
        by_torch = not names or any(name.startswith(("RuntimeError", "Dist")) for name in names)
        return says_so(case) if by_torch and _has_peers(case) else None

    return rule


def _has_peers(case: Case) -> bool:
    """True if there are other ranks: the run's, or those of a script that starts some itself."""
    if case.plan is None:
        return True
    processes = case.plan.processes.value
    several = max(processes.nproc_per_node, processes.max_nodes) > 1
    in_torch = any(_DISTRIBUTED.search(frame.file) for frame in case.frames)
    return several or in_torch or bool(_BACKENDS.search(case.text))


def kind(*names: str) -> Callable[[Case], Facts | None]:
    """Return a rule: the exception is of one of these classes."""

    def rule(case: Case) -> Facts | None:
        if not case.raised:
            return None
        classes = {name.rpartition(".")[2] for name in case.raised[0].kinds}
        classes.add("BaseException")
        return facts_of(case) if classes.intersection(names) else None

    return rule


def any_of(*rules: Callable[[Case], Facts | None]) -> Callable[[Case], Facts | None]:
    """Return a rule: one of these fits."""

    def rule(case: Case) -> Facts | None:
        return next((facts for one in rules if (facts := one(case)) is not None), None)

    return rule


def unreachable(case: Case) -> Facts | None:
    """Fit where another machine didn't answer; one that answers "not found" will do so again."""
    if kind("HTTPError", "BrokenPipeError")(case) is not None:
        return None
    lost = kind("ConnectionError", "URLError", "gaierror")(case)
    return (
        lost if lost is not None or not _of_network(case) else kind("TimeoutError", "Timeout")(case)
    )


def _of_network(case: Case) -> bool:
    """Return whether a time-out is a connection's, and not that of a lock or a pool of processes.

    Source: CPython 3.11, Modules/socketmodule.c, sock_call_impl: "timed out", without a number
    """
    if not case.raised:
        return False
    raised = case.raised[0]
    by_socket = raised.name == "TimeoutError" and raised.kinds[0].startswith(("builtins.", "Timeo"))
    return bool(
        raised.errno
        or any(name.partition(".")[0] in _NETWORK for name in raised.kinds)
        or (by_socket and raised.message.endswith("timed out"))
    )


def number(numbers: tuple[int, ...], *patterns: str) -> Callable[[Case], Facts | None]:
    """Return a rule: the exception is an OSError of these numbers, or its text says so."""
    says_so = text(*patterns)

    def rule(case: Case) -> Facts | None:
        if case.raised and case.raised[0].errno in numbers:
            return facts_of(case)
        return says_so(case)

    return rule


def signalled(*names: str) -> Callable[[Case], Facts | None]:
    """Return a rule: it died of one of these signals, or of any where none is named."""

    def rule(case: Case) -> Facts | None:
        fits = case.signal and (not names or case.signal in names)
        return facts_of(case) if fits else None

    return rule


def other_exception(case: Case) -> Facts | None:
    """Fit whatever was raised, but for the script's own sys.exit."""
    return None if kind("SystemExit")(case) is not None else kind("BaseException")(case)


def exit_code(case: Case) -> Facts | None:
    """Return the facts of whatever ended with an exit code."""
    return facts_of(case)


def own_error(case: Case) -> Facts | None:
    """Fit where fasttrain itself stopped the worker, with an error that says why."""
    if kind("FasttrainError")(case) is None:
        return None
    kept = _KEPT.search(case.raised[0].message)
    return facts_of(case) | (
        kept.groupdict() if kept else {"why": case.raised[0].message, "fix": ""}
    )


def argparse_refused(case: Case) -> Facts | None:
    """Fit where the script's argument parser ended it; what that ends with comes behind its error.

    ctypes has an ArgumentError as well.
    """
    if case.raised and "argparse.ArgumentError" in case.raised[0].kinds:
        return facts_of(case)
    by_parser = any(Path(frame.file).name == "argparse.py" for frame in case.frames)
    return facts_of(case) if by_parser and kind("SystemExit")(case) is not None else None


def own_check(case: Case) -> Facts | None:
    """Fit where an assert of the script's own failed, and not one of a library that it calls."""
    return kind("AssertionError")(case) if case.frames and case.frames[-1].own else None


def module_here(case: Case) -> Facts | None:
    """Fit where the missing module lies in the working directory, where Python doesn't look for it.

    `python tools/train.py` looks in tools. A folder without any source is a module, too, but more
    often data, or what wandb leaves there.
    """
    facts = kind("ModuleNotFoundError")(case)
    if facts is None or case.plan is None or not (name := facts["subject"]).isidentifier():
        return None
    here = Path(case.plan.cwd)
    return facts if (here / f"{name}.py").is_file() or any((here / name).glob("*.py")) else None


def shared_memory(case: Case) -> Facts | None:
    """Fit where /dev/shm is full.

    Source: glibc keeps semaphores there, sem_overview(7), and so multiprocessing's locks.
    """
    full = bool(case.raised) and case.raised[0].errno == errno.ENOSPC
    for_a_lock = full and case.frames and Path(case.frames[-1].file).name == "synchronize.py"
    return facts_of(case) if for_a_lock or _NO_SHM.search(case.text) else None


def host_memory(case: Case) -> Facts | None:
    """Fit where the kernel killed for memory, or an allocation on the host failed."""
    facts = facts_of(case)
    if kind("MemoryError")(case) is not None:
        return facts | {"evidence": "Python could not allocate any more" + facts["peak"]}
    if failed := _NO_MEMORY.search(case.text):
        wanted = f"{size(int(failed['wanted']))} were wanted" if failed["wanted"] else "C++ said so"
        return facts | {"evidence": wanted + facts["peak"]}
    killed = case.signal == "SIGKILL" or (case.raised and _DIED_OF_KILL.search(case.text))
    return _killed_for_memory(case, facts) if killed else None


def _killed_for_memory(case: Case, facts: Facts) -> Facts | None:
    before, after, limit = case.before, case.after, case.after.memory_limit_bytes
    in_group = _rose(before.group_oom_kills, after.group_oom_kills)
    # The machine's count has everybody's processes in it: it is asked where the group has none.
    on_machine = _rose(before.machine_oom_kills, after.machine_oom_kills)
    if in_group and limit:
        why = f"{AT_LIMIT}, {size(limit)}"
    elif in_group or (on_machine and after.group_oom_kills is None):
        why = f"{ON_MACHINE} {facts['memory']}"
    else:
        return None
    return facts | {"evidence": why + facts["peak"]}


def _rose(before: int | None, after: int | None) -> bool:
    return before is not None and after is not None and after > before


# One row of the table of causes.


class Heals(StrEnum):
    """Whether another attempt can end better; the value is the reason."""

    NEVER = "another attempt would meet the same"
    # Most mistakes in a program show before it has trained at all.
    TRAINED = "it failed after it had trained, and goes on from its last checkpoint"
    ONCE = "it may not happen again"
    ALWAYS = "it came from outside of the script"


@dataclass(frozen=True, slots=True)
class Cause:
    """One row.

    Attributes:
        slug: Stable name.
        heals: Whether another attempt can end better.
        rule: Gives the facts that `why` and `fix` are filled with, or None where it doesn't fit.
        why: The cause in words.
        fix: What to type or change next; empty where there is nothing to suggest.
        of_a_peer: Whether it is what a rank says that lost, or waited for, another one.
    """

    slug: str
    heals: Heals
    rule: Callable[[Case], Facts | None]
    why: str
    fix: str
    of_a_peer: bool = False
