"""The rules that the table of causes is made of, and the facts that fill its words."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from fasttrain.launch.case import Case
from fasttrain.launch.last_words import last_lines
from fasttrain.spec.crash import Frame, Raised

Facts = dict[str, str]

UNKNOWN = "an unknown amount"
_DIED_OF_KILL = re.compile(r"killed by signal: Killed|terminated with signal SIGKILL")
_NO_MEMORY = re.compile(r"DefaultCPUAllocator: .*?(?P<wanted>\d+) bytes|std::bad_alloc")
_KEPT = re.compile(r"error: (?P<what>.*)\n  why: (?P<why>.*)\n  fix: (?P<fix>.*?)\s+\[")


def text(*patterns: str) -> Callable[[Case], Facts | None]:
    """Give a rule: one of the patterns is in the message, or in the log of one that was hit."""
    compiled = [re.compile(pattern, re.DOTALL if ".*?" in pattern else 0) for pattern in patterns]

    def rule(case: Case) -> Facts | None:
        for pattern in compiled:
            if found := pattern.search(case.text):
                return _facts(case) | {k: v for k, v in found.groupdict().items() if v}
        return None

    return rule


def of_ranks(*patterns: str) -> Callable[[Case], Facts | None]:
    """Give a rule: torch.distributed says one of the patterns.

    A download that fails says the same as a rank that lost its peer, but by an OSError.
    """
    says_so = text(*patterns)

    def rule(case: Case) -> Facts | None:
        names = {name.rpartition(".")[2] for raised in case.raised for name in raised.kinds}
        by_torch = not names or any(name.startswith(("RuntimeError", "Dist")) for name in names)
        return says_so(case) if by_torch else None

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
