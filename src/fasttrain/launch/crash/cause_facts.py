"""The facts that fill the words of the table of causes."""

from __future__ import annotations

import re
from pathlib import Path

from fasttrain.launch.crash.evidence import Case
from fasttrain.launch.crash.log_tail import LAST_WORDS, last_lines
from fasttrain.model import units
from fasttrain.model.crash import Frame, Raised
from fasttrain.model.plan import Target

Facts = dict[str, str]

UNKNOWN = "an unknown amount"
# As Python itself names a file or a module; any other message quotes what it likes.
_NAMED = re.compile(r"(?:\[Errno \d+\] [^:]+: |No module named )(?P<quote>['\"])(.+?)(?P=quote)")
# What C++, glibc, LLVM and glog say before they call abort().
# Source: glibc 2.39, malloc.c, malloc_printerr, and fortify_fail.c; glog, src/logging.cc
_GAVE_UP = re.compile(
    r"terminate called|^\s*what\(\):|[Aa]ssert|Check failed|^F\d{4} |Fatal|FATAL|LLVM ERROR"
    r"|^\w+\(\): |double free|^corrupted |\*\*\* .* detected \*\*\*"
)


def facts_of(case: Case) -> Facts:
    """Give what any row may name, whether this one does or not."""
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
        "peak": f"; the largest process had {size(case.peak_bytes)}" if case.peak_bytes else "",
        "stack": f", called at {case.place()}" if case.stack else "",
        "gave_up": _gave_up(case.log),
        "call": _collective(case.frames),
        "wanted": UNKNOWN, "free": UNKNOWN, "total": UNKNOWN, "which": "",
        "debug": "look at the line above" if debug else "run it again with --debug, which shows the"
        " line that launched the kernel",
        "less_memory": ", or --amp bf16" if amp_off else "",
    } | _missed(raised, message, python) | _checked(case.frames, message)  # fmt: skip


def _missed(raised: Raised, message: str, python: str) -> Facts:
    """Give what a missing file, right or module is called: by its name, or else by the message."""
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
    """Give the last line that says why compiled code gave up, behind a colon; empty without."""
    lines = last_lines(log, LAST_WORDS)
    said = next((line.strip() for line in reversed(lines) if _GAVE_UP.search(line)), "")
    return f": {said}" if said else ""


def _as_module(target: Target) -> str:
    """Give how a script is named for -m, which looks in the working directory."""
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
    """Give a size in bytes with its unit, where it is known."""
    return UNKNOWN if value is None else units.size(value)
