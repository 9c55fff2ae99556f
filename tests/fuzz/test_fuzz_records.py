"""Any file in the place of one that fasttrain wrote: read, passed over, or refused."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.fuzz import records
from support.fuzz.no_files import KINDS, in_place

SOUND: dict[str, Any] = records.sound()
# Folder, the files in it that are spoiled in turn, those of them that are not there otherwise, and
# who reads them.
SCENES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...], tuple[list[str], ...]]] = {
    "report": (
        "mine", ("receipt.json", "receipt.json", "hang.json"), (),
        (["report", "mine"], ["report", "mine", "--json"]),
    ),
    "latest": (
        "fasttrain_runs/r", ("plan.json", "receipt.json"), (), (["report"], ["ps"], ["kill", "r"]),
    ),
    "job": (
        "fasttrain_runs/j",
        ("submitted.json", "job.json", "receipt.json", "tasks/0/end-0.json", "plan.json"), (),
        (["job", "list"], ["job", "show"], ["job", "show", "7"], ["job", "wait"], ["job", "logs"],
         ["job", "list", "--json"], ["job", "show", "--json"], ["job", "cancel"]),
    ),
    "killed job": (
        "fasttrain_runs/j", ("plan.json", "rank-0.json", "submitted.json"), ("receipt.json",),
        (["job", "show"], ["job", "show", "--json"], ["job", "wait"]),
    ),
    "run": (
        "mine",
        ("rank-0.json", "failure-0.json", "heartbeat-0.json", "rank-0.log", "events-0.jsonl"),
        ("failure-0.json",),
        (["run", "train.py", "--run-dir", "mine"],
         ["run", "train.py", "--run-dir", "mine", "--json"]),
    ),
    "ranks": (
        "mine",
        ("ends.json", "rank-0.json", "failure-0.json", "heartbeat-0.json", "rank-0.log",
         "fault-0.txt"),
        (),
        (["run", "train.py", "--run-dir", "mine", "--nproc-per-node", "2"],),
    ),
    "machine": (
        ".", ("machine.json",), (),
        (["run", "train.py", "--dry-run", "--machine", "machine.json"],
         ["run", "train.py", "--explain", "--machine", "machine.json", "--gpus", "all"],
         ["doctor", "--machine", "machine.json"],
         ["doctor", "--json", "--machine", "machine.json"]),
    ),
}  # fmt: skip
BY_RANKS = ("run", "ranks")  # a directory in which they lie before is another run's
STATES = ("COMPLETED", "FAILED", "TIMEOUT", "NODE_FAIL")


def _lay(folder: Path, scene: str, spoiled: str, content: bytes) -> None:
    """Write the files of a scene, one of them spoiled."""
    _, files, missing, _ = SCENES[scene]
    folder.mkdir(parents=True, exist_ok=True)
    for name in (set(files) - set(missing)) | {spoiled}:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        sound = json.dumps(SOUND[name]).encode() if name in SOUND else b"said\n"
        path.write_bytes(content if name == spoiled else sound)


CASES = st.sampled_from(sorted(SCENES)).flatmap(
    lambda scene: st.sampled_from(SCENES[scene][1]).flatmap(
        lambda name: st.tuples(
            st.just(scene),
            st.just(name),
            records.spoiled(SOUND[name]) if name in SOUND else records.LOGS,
            st.sampled_from(SCENES[scene][3]),
        )
    )
)


def test_records(
    say: Callable[..., Any], rounds: Any, figures: Counter[int], ground: Any, recorder: Any
) -> None:
    log = f"{ground.work}/fasttrain_runs/j/slurm/7_0_log.out"

    @rounds(40, 2200)
    @given(CASES, st.sampled_from(STATES), st.booleans())
    def check(case: Any, state: str, fails: bool) -> None:
        scene, name, content, words = case
        recorder.answers = {"squeue": f"7|{state}|None|{256 * fails}|0|n1|{log}|\n"}
        recorder.exit_code = int(fails)
        folder = ground.work / SCENES[scene][0]
        try:
            _at_its_time(recorder, scene, lambda: _lay(folder, scene, name, content))
            said = say(words)
        finally:
            _clear(ground)
        figures[said.code] += 1
        assert not said.problems, f"{scene} {name} {state}\n{content!r}\n{words}\n{said}"

    check()


def _at_its_time(recorder: Any, scene: str, lay: Callable[[], None]) -> None:
    """Lay files: now, or when a run begins whose ranks would write them."""
    recorder.on_start = lay if scene in BY_RANKS else lambda: None
    if scene not in BY_RANKS:
        lay()


def _clear(ground: Any) -> None:
    (ground.work / "machine.json").unlink(missing_ok=True)
    for name in ("mine", "fasttrain_runs"):
        shutil.rmtree(ground.work / name, ignore_errors=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scene", sorted(SCENES))
def test_what_is_no_record(
    say: Callable[..., Any], ground: Any, recorder: Any, scene: str, kind: str
) -> None:
    recorder.answers, recorder.exit_code = {}, 1
    folder, files, _, (words, *_) = SCENES[scene]
    for name in sorted(set(files)):
        with ExitStack() as placed:

            def lay(name: str = name, placed: ExitStack = placed) -> None:
                path = ground.work / folder / name
                _lay(ground.work / folder, scene, name, b"")
                placed.enter_context(in_place(path, kind))

            try:
                _at_its_time(recorder, scene, lay)
                said = say(words)
            finally:
                placed.close()
                _clear(ground)
        assert not said.problems, f"{name}\n{words}\n{said}"
