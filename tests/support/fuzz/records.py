"""The files that fasttrain writes for itself, and what may have become of one of them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from fasttrain.model.codec import to_data
from fasttrain.model.crash import Crash, Failure, Frame, Raised, WorkerExit, WorkerExits
from fasttrain.model.hang import Frame as HangFrame
from fasttrain.model.hang import Hang, HeartbeatAddress, StuckProcess, StuckRank
from fasttrain.model.job import JobRequest, SubmittedJob, TaskEnd
from fasttrain.model.outcome import Outcome, RankReport, Receipt, Site, State, StepStats
from fasttrain.model.plan import ScriptFacts, Target
from fasttrain.model.settings import Settings, SlurmSettings

DATA = Path(__file__).parents[2] / "data"
OUTCOME = Outcome(
    "amp",
    "bf16",
    State.APPLIED,
    "asked for",
    True,
    (Site("Net", "a.py:1", 2),),
    {"casts": 1},
    ("n",),
)
STATS = StepStats(1200, 0.01, 0.02, 99.0, 2.5, 41.0, 3 << 30, 20.0)
REPORT = RankReport(0, "cpu", "2.13.0", (OUTCOME,), STATS, True, ("a warning",))
CRASH = Crash(
    0,
    2,
    1,
    "",
    5,
    "exception",
    "why",
    "fix",
    "E: m",
    (Frame("a.py", 1, "f", "s"),),
    ("l",),
    "rank-0.log",
)
RECEIPT = Receipt("r", "mine", "train.py", 1, 75.0, (REPORT,), ("u",), ("w",), ("h",), CRASH)
RAISED = Raised(("builtins.ValueError", "Exception"), "m", (Frame("a.py", 1, "f"),), 2, "x")
STUCK = StuckRank(0, 3, (StuckProcess(1, "rank", ((HangFrame("a.py", 1, "f", "s", True),),)),))
SENT = SubmittedJob("7", "j", "fasttrain_runs/j", "train.py", 1.7e9, 1)
REQUEST = JobRequest(
    "j", "fasttrain_runs/j", Target("script", "train.py"), ".", Settings(), SlurmSettings(),
    ScriptFacts(), "0", {"lr": "1"},
)  # fmt: skip


def plans() -> dict[str, Any]:
    """Return sound plans by name."""
    found = sorted((DATA / "plans").glob("*.json"))
    return {path.stem: json.loads(path.read_text())["plan"] for path in found}


def sound() -> dict[str, Any]:
    """Return one sound content of each file, by its name."""
    return {
        "plan.json": plans()["cpu-laptop-plain"],
        "receipt.json": to_data(RECEIPT),
        "hang.json": to_data(Hang("r", 61.0, 60.0, "stop", ("v",), (STUCK,), (1,))),
        "rank-0.json": to_data(REPORT),
        "failure-0.json": to_data(Failure(0, 1, 5, 5, 1, (RAISED,))),
        "ends.json": to_data(WorkerExits((WorkerExit(0, 1, -11, 5, 5), WorkerExit(1, 2, 1, 6, 6)))),
        "heartbeat-0.json": to_data(HeartbeatAddress(0, 1, 5, 0, 35)),
        "submitted.json": to_data(SENT),
        "job.json": to_data(REQUEST),
        "tasks/0/end-0.json": to_data(TaskEnd(0, 1, 5)),
        "machine.json": json.loads((DATA / "machines" / "4xt4.json").read_text()),
    }


FLOATS = (0.5, -0.0, -1.5, float("nan"), float("inf"), float("-inf"), 1e308, 1e-320, 10**400)
INTEGERS = (0, 1, -1, 2**31, 2**63, -(2**63), 10**30, 10**400, 65536, 5000)
WORDS = (
    "", "0", "x", "é", "\ud800", "\udcff", "\0", "a\nerror: b", "\x1b[2J", "x" * 100_000, "[bold]",
    "[/]", "%s", "{}", "../..", "/dev/null", "-1", "y/" * 3000, "applied", "torchrun", "cuda", " ",
)  # fmt: skip
LISTS: tuple[Any, ...] = ([], {}, [[]], [None], {"a": 1}, {"": {}}, ["x"] * 1000, [0] * 1000)
VALUES = (None, True, False, *FLOATS, *INTEGERS, *WORDS, *LISTS)


def _alike(value: Any) -> tuple[Any, ...]:
    """Return values that pass for the one that is there, as far as its type goes."""
    if isinstance(value, bool):
        return (True, False)
    for kind, others in ((int, INTEGERS), (float, FLOATS), (str, WORDS)):
        if isinstance(value, kind):
            return others
    return LISTS


def _places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths to all that stands anywhere in a document."""
    items: Any = data.items() if isinstance(data, dict) else ()
    items = enumerate(data) if isinstance(data, list) else items
    found = [path] if path else []
    for key, item in items:
        found += _places(item, (*path, key))
    return found


def _spoil(data: Any, at: int, how: str, pick: int) -> Any:
    """Return the document with one thing in it set, taken away, added or renamed."""
    data = copy.deepcopy(data)
    places = _places(data)
    *way, last = places[at % len(places)]
    parent = data
    for key in way:
        parent = parent[key]
    pool = _alike(parent[last]) if how == "alike" else VALUES
    value = pool[pick % len(pool)]
    if how in ("alike", "set"):
        parent[last] = value
    elif how == "take" or isinstance(parent, list):
        parent.pop(last)
    else:
        parent[f"{last}_" if how == "rename" else "unknown"] = value
        parent.pop(last if how == "rename" else "", None)
    return data


def _as_json(data: Any) -> bytes:
    return json.dumps(data).encode()


TEXTS: list[bytes] = [
    b"", b" ", b"null", b"[]", b"{}", b"1", b'"x"', b"{", b"NaN", b"\xff\xfe", b"\0",
    b"\xef\xbb\xbf{}",
    b"[" * 100_000, b'{"a":' * 100_000, b"[" * 500 + b"]" * 500, b"9" * 5000, b"-" + b"9" * 4000,
    b'{"schema": 1}', b'{"schema": 2}', b"{}{}", b"\x80" * 10, b" " * (5 << 20),
]  # fmt: skip


SAID = (
    "Traceback (most recent call last):", '  File "a.py", line 1, in f', "    g()", "ValueError: m",
    '  File "a.py", line ' + "9" * 5000 + ", in f", '  File "' + "x/" * 3000 + '", line 1, in f',
    "During handling of the above exception, another exception occurred:", "E" * 70_000, "[rank0]:",
    "Current thread 0x1 (most recent call first):", "Thread 0x2 (most recent call first):", "\0",
    '  File "/proc/self/mem", line 1 in f', "\x1b[31m\x1b[", "\r50%\r100%", "{", "", "\u2028", "é",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate " + "9" * 400 + " GiB",
    "  ", "KeyError", "a.b.C: ", "terminate called", "OSError: [Errno 28] x", '{"step": NaN}',
    '{"step": 1, "step_s": "x", "samples_per_s": [], "memory_bytes": null}', "[1]", "\udcff",
)  # fmt: skip
LOGS = st.lists(st.sampled_from(SAID) | st.text(max_size=9), max_size=12).map(
    lambda lines: "\n".join(lines).encode(errors="replace")
)


def spoiled(data: Any) -> st.SearchStrategy[bytes]:
    """Return what may have become of a file: most often JSON of nearly the right shape."""
    numbers = st.integers(0, 999)
    hows = st.sampled_from([*["alike"] * 8, "set", "set", "take", "add", "rename"])
    once = st.builds(_spoil, st.just(data), numbers, hows, numbers)
    twice = st.builds(_spoil, once, numbers, st.just("alike"), numbers)
    text = _as_json(data)
    cut = st.integers(0, len(text)).map(lambda at: text[:at])
    byte = st.builds(
        lambda at, new: text[: at % len(text)] + bytes([new]) + text[at % len(text) + 1 :],
        st.integers(0, 1 << 20), st.integers(0, 255),
    )  # fmt: skip
    shaped = [once.map(_as_json)] * 6 + [twice.map(_as_json)] * 3
    chosen = [*shaped, cut, byte, st.sampled_from(TEXTS)]
    return st.sampled_from(chosen).flatmap(lambda strategy: strategy)
