"""The rules of the table of causes, and the facts that its words are filled with."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from pathlib import Path

from fasttrain.launch.crash.evidence import LAST_LINES, Evidence, last_lines
from fasttrain.model.crash import Frame, Raised
from fasttrain.model.errors import size as printed_size
from fasttrain.model.plan import LaunchPlan, Target
from fasttrain.model.vendors import LIKE_CUDA, VENDORS

UNKNOWN = "an unknown amount"
LARGEST = "the largest process had"
# As Python itself names a file or a module; any other message quotes what it likes.
_NAMED = re.compile(r"(?:\[Errno \d+\] [^:]+: |No module named )(?P<quote>['\"])(.+?)(?P=quote)")
# What C++, glibc, LLVM and glog print before they call abort().
# Source: glibc 2.39, malloc.c, malloc_printerr, and fortify_fail.c; glog, src/logging.cc
_GAVE_UP = re.compile(
    r"terminate called|^\s*what\(\):|[Aa]ssert|Check failed|^F\d{4} |Fatal|FATAL|LLVM ERROR"
    r"|^\w+\(\): |double free|^corrupted |\*\*\* .* detected \*\*\*"
)


@dataclass(frozen=True, slots=True)
class Facts:
    """What the words of a cause are filled with; a cause names a field as ``{field}``.

    Every row may use the fields of the first three groups. Those of the last group are set only by
    the rule of the row that uses them: by keyword, or by a group of the same name in its pattern.
    """

    # The exception, and where it was raised.
    message: str = ""
    error: str = ""
    place: str = ""
    source: str = ""
    subject: str = ""
    no_file: str = ""
    no_right: str = ""
    no_module: str = ""
    check: str = ""
    checked_at: str = ""
    # How the process ended.
    signal: str = ""
    code: str = ""
    exit_place: str = ""
    exit_text: str = ""
    arguments: str = ""
    stack: str = ""
    gave_up: str = ""
    # The plan and the machine.
    cwd: str = ""
    started_in: str = ""
    as_module: str = ""
    python: str = ""
    shm: str = ""
    memory: str = ""
    peak: str = ""
    debug: str = ""
    less_memory: str = ""
    # What a rule found.
    call: str = ""
    wanted: str = UNKNOWN
    free: str = UNKNOWN
    total: str = UNKNOWN
    which: str = ""
    device: str = ""
    seen: str = ""
    instead: str = ""
    waited: str = ""
    came: str = ""
    found: str = ""
    fault: str = ""
    library: str = ""
    package: str = ""
    model: str = ""
    how: str = ""
    shapes: str = ""
    what: str = ""
    types: str = ""
    evidence: str = ""
    why: str = ""
    fix: str = ""

    def fill(self, words: str) -> str:
        """Return the words of a cause with these facts in them."""
        return words.format_map({one.name: getattr(self, one.name) for one in fields(self)})


def facts_of(evidence: Evidence, **found: str) -> Facts:
    """Return the facts that every row may name, and those that its rule has found."""
    raised = evidence.raised[0] if evidence.raised else Raised((), "")
    message = (raised.message.strip().splitlines() or [""])[0]
    plan = evidence.plan
    python = plan.argv[0] if plan and plan.target.kind != "command" else "python"
    own = [frame for frame in evidence.frames if frame.own]
    debug = plan is not None and any(v.name == "CUDA_LAUNCH_BLOCKING" for v in plan.environment)
    amp_off = plan is not None and plan.levers.amp.value.precision == "off"
    peak = size(evidence.peak_bytes) if evidence.peak_bytes else ""
    facts = Facts(
        message=message,
        error=": ".join(filter(None, (raised.name if raised.kinds else "", message))),
        place=evidence.place(),
        source=own[-1].source if own else "",
        signal=evidence.signal,
        code=str(evidence.exit_code),
        exit_place=f", at {evidence.place()}" if own else "",
        exit_text="" if message.lstrip("-").isdecimal() or not message else f": {message}",
        arguments="".join(last_lines(evidence.log, 1)),
        stack=f", called at {evidence.place()}" if evidence.stack else "",
        gave_up=_gave_up(evidence.log),
        cwd=evidence.cwd or (plan.cwd if plan else ""),
        started_in=plan.cwd if plan else "",
        as_module=_as_module(plan.target) if plan else "-m",
        python=python,
        shm=size(evidence.after.shm_bytes),
        memory=size(evidence.after.memory_bytes),
        peak=f"; {LARGEST} {peak}" if peak else "",
        debug="look at the line above"
        if debug
        else "run it again with --debug, which shows the line that launched the kernel",
        less_memory=", or --amp bf16" if amp_off else "",
        call=_collective(evidence.frames),
    )
    facts = _with_check(_with_subject(facts, raised), evidence.frames)
    return replace(facts, **found)


def _with_subject(facts: Facts, raised: Raised) -> Facts:
    """Add what a missing file, permission or module is called: by its name, or by the message."""
    named = _NAMED.match(facts.message)  # in a traceback that was read from a log
    subject = raised.subject or (named[2] if named else "")
    if not subject:
        unnamed = facts.message or "the script doesn't say which"
        return replace(facts, no_file=unnamed, no_right=unnamed, no_module=unnamed)
    return replace(
        facts,
        subject=subject,
        no_file=f"there is no {subject}",
        no_right=f"{subject} may not be used so by this user",
        no_module=f"{facts.python} has no module {subject}",
    )


def _with_check(facts: Facts, frames: tuple[Frame, ...]) -> Facts:
    """Add which check failed, and where."""
    if not frames:
        return replace(facts, check=facts.message, checked_at="an unknown place")
    last = frames[-1]
    at = f"{Path(last.file).name}:{last.line}"
    return replace(facts, check=facts.message or last.source, checked_at=at)


def _gave_up(log: str) -> str:
    """Return the last line that says why compiled code aborted, after a colon; empty without."""
    lines = last_lines(log, LAST_LINES)
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

# What rules are made of.

Rule = Callable[[Evidence], Facts | None]  # None where it doesn't fit

_DIED_OF_KILL = re.compile(r"killed by signal: Killed|terminated with signal SIGKILL")
_NO_MEMORY = re.compile(r"DefaultCPUAllocator: .*?(?P<wanted>\d+) bytes|std::bad_alloc")
# Source: torch 2.13, torch/utils/data/_utils/signal_handling.py and what c10's MapAllocator says
_NO_SHM = re.compile(
    r"insufficient shared memory \(shm\)|out of shared memory"
    r"|DataLoader worker \(pid \d+\) is killed by signal: Bus error"
    r"|unable to (?:write to|mmap \d+ bytes from|resize|allocate shared memory\(shm\) for)"
    r" (?:file )?</torch_"
)
# Source: what CUDA and HIP say of such a number, and torch 2.13, torch/cuda/__init__.py
_NO_DEVICE = re.compile(r"invalid device ordinal|^Invalid device id$")
# Source: torch 2.13, torch/serialization.py, _validate_device
_SAVED_ELSEWHERE = re.compile(r"Attempting to deserialize object on \w+ (?P<device>device \d+) but")
# How a script names a device by its number.
_NUMBER = re.compile(rf"[\"'](?:{'|'.join(LIKE_CUDA)}):(\d+)[\"']|(?:cuda|device)\((\d+)\)")
_DISTRIBUTED = re.compile(r"[/\\]torch[/\\](?:nn[/\\]parallel[/\\])?distributed")
_COLLECTIVES = "|".join({vendor.collectives for vendor in VENDORS.values()} - {""})
_BACKENDS = re.compile(rf"c10d|TCPStore|{_COLLECTIVES}", re.IGNORECASE)
_NETWORK = (
    "socket", "ssl", "http", "urllib", "urllib3", "requests", "httpx", "httpcore", "aiohttp",
    "botocore",
)  # fmt: skip
_PRINTED_ERROR = re.compile(r"error: (?P<what>.*)\n  why: (?P<why>.*)\n  fix: (?P<fix>.*?)\s+\[")


def text(*patterns: str) -> Rule:
    """Return a rule: one of the patterns is in the message, or in the log of an aborted process."""
    compiled = [re.compile(pattern, re.DOTALL if ".*?" in pattern else 0) for pattern in patterns]

    def rule(evidence: Evidence) -> Facts | None:
        for pattern in compiled:
            if found := pattern.search(evidence.text):
                return facts_of(evidence, **{k: v for k, v in found.groupdict().items() if v})
        return None

    return rule


def of_ranks(*patterns: str) -> Rule:
    """Return a rule: torch.distributed reports one of the patterns.

    A failed download reports the same as a rank that lost its peer, but with an OSError, or in a
    run without other ranks.
    """
    says_so = text(*patterns)

    def rule(evidence: Evidence) -> Facts | None:
        names = {name.rpartition(".")[2] for raised in evidence.raised for name in raised.kinds}
        by_torch = not names or any(name.startswith(("RuntimeError", "Dist")) for name in names)
        return says_so(evidence) if by_torch and _has_peers(evidence) else None

    return rule


def _has_peers(evidence: Evidence) -> bool:
    """True if there are other ranks: the run's, or those of a script that starts some itself."""
    if evidence.plan is None:
        return True
    processes = evidence.plan.processes.value
    several = max(processes.nproc_per_node, processes.max_nodes) > 1
    in_torch = any(_DISTRIBUTED.search(frame.file) for frame in evidence.frames)
    return several or in_torch or bool(_BACKENDS.search(evidence.text))


def kind(*names: str) -> Rule:
    """Return a rule: the exception is of one of these classes."""

    def rule(evidence: Evidence) -> Facts | None:
        return facts_of(evidence) if _is(evidence, *names) else None

    return rule


def _is(evidence: Evidence, *names: str) -> bool:
    """True if the exception is of one of these classes, named without their modules."""
    if not evidence.raised:
        return False
    classes = {name.rpartition(".")[2] for name in evidence.raised[0].kinds}
    return not classes.union(("BaseException",)).isdisjoint(names)


def any_of(*rules: Rule) -> Rule:
    """Return a rule: one of these fits."""

    def rule(evidence: Evidence) -> Facts | None:
        return next((facts for one in rules if (facts := one(evidence)) is not None), None)

    return rule


def unreachable(evidence: Evidence) -> Facts | None:
    """Fit where another machine didn't answer; one that answers "not found" will do so again."""
    if _is(evidence, "HTTPError", "BrokenPipeError"):
        return None
    lost = _is(evidence, "ConnectionError", "URLError", "gaierror")
    timed_out = _of_network(evidence) and _is(evidence, "TimeoutError", "Timeout")
    return facts_of(evidence) if lost or timed_out else None


def _of_network(evidence: Evidence) -> bool:
    """True if a time-out is a connection's, and not that of a lock or a pool of processes.

    Source: CPython 3.11, Modules/socketmodule.c, sock_call_impl: "timed out", without a number
    """
    if not evidence.raised:
        return False
    raised = evidence.raised[0]
    by_socket = raised.name == "TimeoutError" and raised.kinds[0].startswith(("builtins.", "Timeo"))
    return bool(
        raised.errno
        or any(name.partition(".")[0] in _NETWORK for name in raised.kinds)
        or (by_socket and raised.message.endswith("timed out"))
    )


def number(numbers: tuple[int, ...], *patterns: str) -> Rule:
    """Return a rule: the exception is an OSError of these numbers, or its text says so."""
    says_so = text(*patterns)

    def rule(evidence: Evidence) -> Facts | None:
        if evidence.raised and evidence.raised[0].errno in numbers:
            return facts_of(evidence)
        return says_so(evidence)

    return rule


def signalled(*names: str) -> Rule:
    """Return a rule: it died of one of these signals, or of any where none is named."""

    def rule(evidence: Evidence) -> Facts | None:
        fits = evidence.signal and (not names or evidence.signal in names)
        return facts_of(evidence) if fits else None

    return rule


def other_exception(evidence: Evidence) -> Facts | None:
    """Fit any exception but the script's own sys.exit."""
    raised = evidence.raised and not _is(evidence, "SystemExit")
    return facts_of(evidence) if raised else None


def exit_code(evidence: Evidence) -> Facts | None:
    """Fit whatever ended with an exit code."""
    return facts_of(evidence)


def own_error(evidence: Evidence) -> Facts | None:
    """Fit where fasttrain itself stopped the worker, with an error that says why."""
    if not _is(evidence, "FasttrainError"):
        return None
    message = evidence.raised[0].message
    printed = _PRINTED_ERROR.search(message)
    return facts_of(evidence, **(printed.groupdict() if printed else {"why": message, "fix": ""}))


def argparse_refused(evidence: Evidence) -> Facts | None:
    """Fit where the script's argument parser ended it by sys.exit, after an error of its own.

    ctypes has an ArgumentError as well.
    """
    if evidence.raised and "argparse.ArgumentError" in evidence.raised[0].kinds:
        return facts_of(evidence)
    by_parser = any(Path(frame.file).name == "argparse.py" for frame in evidence.frames)
    return facts_of(evidence) if by_parser and _is(evidence, "SystemExit") else None


def own_check(evidence: Evidence) -> Facts | None:
    """Fit where an assert of the script's own failed, and not one of a library that it calls."""
    own = evidence.frames and evidence.frames[-1].own
    return facts_of(evidence) if own and _is(evidence, "AssertionError") else None


def module_here(evidence: Evidence) -> Facts | None:
    """Fit where the missing module lies in the working directory, where Python doesn't look for it.

    `python tools/train.py` looks in tools. A folder without any source is a module, too, but more
    often data, or what wandb leaves there.
    """
    if evidence.plan is None or not _is(evidence, "ModuleNotFoundError"):
        return None
    facts, here = facts_of(evidence), Path(evidence.plan.cwd)
    if not (name := facts.subject).isidentifier():
        return None
    return facts if (here / f"{name}.py").is_file() or any((here / name).glob("*.py")) else None


def absent_device(evidence: Evidence) -> Facts | None:
    """Fit where the script names a device by a number that its process doesn't see."""
    if not _NO_DEVICE.search(evidence.text):
        return None
    own = [frame.source for frame in reversed(evidence.frames) if frame.own]
    written = next((found for source in own if (found := _NUMBER.search(source))), None)
    device = f"device {written[written.lastindex or 0]}" if written else "such device"
    return facts_of(evidence, device=device, **_devices_seen(evidence.plan))


def saved_elsewhere(evidence: Evidence) -> Facts | None:
    """Fit where a file holds tensors of a device that the process doesn't see."""
    found = _SAVED_ELSEWHERE.search(evidence.text)
    if not found:
        return None
    return facts_of(evidence, device=found["device"], **_devices_seen(evidence.plan))


def _devices_seen(plan: LaunchPlan | None) -> dict[str, str]:
    """Return which devices a process sees, and what to write in place of another one."""
    if plan is None:
        return {"seen": "the process sees fewer", "instead": "name one that it sees"}
    vendor, last = VENDORS[plan.device_kind.value], len(plan.devices.value) - 1
    if plan.levers.strategy.value.visibility:
        return {
            "seen": f"each rank sees one {vendor.noun}, its own, as device 0",
            "instead": f'write "{vendor.torch_type}", the rank\'s own {vendor.noun}; to use'
            " several: --nproc-per-node 1",
        }
    seen = f"devices 0 to {last}" if last > 0 else "none" if last < 0 else "one device, number 0"
    fix = "name one of these, or look for what hides others: fasttrain doctor"
    return {"seen": f"the process sees {seen}", "instead": fix}


def shared_memory(evidence: Evidence) -> Facts | None:
    """Fit where /dev/shm is full.

    Source: glibc keeps semaphores there, sem_overview(7), and so multiprocessing's locks.
    """
    frames, raised = evidence.frames, evidence.raised
    full = bool(raised) and raised[0].errno == errno.ENOSPC
    for_a_lock = full and frames and Path(frames[-1].file).name == "synchronize.py"
    return facts_of(evidence) if for_a_lock or _NO_SHM.search(evidence.text) else None


def host_memory(evidence: Evidence) -> Facts | None:
    """Fit where the kernel killed for memory, or an allocation on the host failed."""
    text, why = evidence.text, ""
    if _is(evidence, "MemoryError"):
        why = "Python could not allocate any more"
    elif failed := _NO_MEMORY.search(text):
        why = f"{size(int(failed['wanted']))} were wanted" if failed["wanted"] else "C++ said so"
    elif evidence.signal == "SIGKILL" or (evidence.raised and _DIED_OF_KILL.search(text)):
        why = _killed_for_memory(evidence)
    if not why:
        return None
    facts = facts_of(evidence)
    return replace(facts, evidence=why + facts.peak)


def _killed_for_memory(evidence: Evidence) -> str:
    """Return how it shows that the kernel killed for memory; empty where it doesn't."""
    before, after, limit = evidence.before, evidence.after, evidence.after.memory_limit_bytes
    in_group = _rose(before.group_oom_kills, after.group_oom_kills)
    # The machine's count includes everybody's processes: it counts only where the group has none.
    on_machine = _rose(before.machine_oom_kills, after.machine_oom_kills)
    if in_group and limit:
        return f"{AT_LIMIT}, {size(limit)}"
    if in_group or (on_machine and after.group_oom_kills is None):
        return f"{ON_MACHINE} {size(after.memory_bytes)}"
    return ""


def _rose(before: int | None, after: int | None) -> bool:
    return before is not None and after is not None and after > before


# One row of the table of causes.


class Retry(StrEnum):
    """Whether another attempt can end better after a cause; the value is the reason."""

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
        retry: Whether another attempt can end better.
        rule: Returns the facts that `why` and `fix` are filled with; None where it doesn't fit.
        why: The cause in words.
        fix: What to type or change next; empty where there is nothing to suggest.
        of_a_peer: Whether it is what a rank reports of another one that it lost or waited for.
    """

    slug: str
    retry: Retry
    rule: Rule
    why: str
    fix: str
    of_a_peer: bool = False
