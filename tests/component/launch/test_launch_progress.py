"""The steps of ranks, when they have ended, too."""

from __future__ import annotations

import mmap
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fasttrain.launch.hang import heartbeats
from fasttrain.launch.hang.heartbeats import Progress
from fasttrain.model.codec import dumps
from fasttrain.model.hang import MEMORY_BYTES, MEMORY_NAME, HeartbeatAddress
from fasttrain.model.outcome import State, StepStats
from fasttrain.model.plan import LaunchPlan

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="it takes Linux's memfd")


def test_a_rank_that_is_gone_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeats, "LOOK_S", 0.0)
    descriptor = os.memfd_create(MEMORY_NAME)
    os.ftruncate(descriptor, MEMORY_BYTES)
    address = HeartbeatAddress(1, os.getpid(), descriptor, 0, 0)
    (tmp_path / "heartbeat-1.json").write_text(dumps(address))
    watched = Progress(tmp_path)
    watched.tick()
    with mmap.mmap(descriptor, MEMORY_BYTES) as memory:
        struct.pack_into("Q", memory, 0, 41)
    os.close(descriptor)  # as if the process had ended
    watched.tick()
    assert watched.steps() == {1: 41}
    watched.begin_again()
    assert watched.steps() == {}


def test_a_rank_is_remembered_that_came_and_went_between_two_looks(tmp_path: Path) -> None:
    watched = Progress(tmp_path)
    code = """if True:
        import os, signal
        from contextlib import ExitStack
        from pathlib import Path
        from fasttrain.shim.watch.heartbeat import Heartbeat

        heartbeat = Heartbeat(Path("."), 5, child=False)
        heartbeat.install(ExitStack())
        heartbeat.step(17)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    environ = watched.environ({**os.environ, "LOCAL_RANK": "1"})
    process = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environ, check=False)
    assert process.returncode == -signal.SIGKILL
    assert watched.steps() == {5: 17}
    watched.begin_again()
    assert watched.steps() == {}
    watched.close()
    assert watched.steps() == {}


def test_the_memory_of_a_launcher_around_is_not_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    around = {"FASTTRAIN_HEARTBEATS": "1:2", "HOME": "/"}
    assert Progress(tmp_path).environ(around) == {"HOME": "/"}


def test_what_a_rank_reported_counts_where_its_memory_was_not_seen(
    plan: LaunchPlan, report: Any
) -> None:
    report(0, State.APPLIED)  # 3 steps
    watched = Progress(Path(plan.run_dir))
    (Path(plan.run_dir) / "rank-1.json").write_text("{")  # cut off by a full disk
    report(2, State.APPLIED, stats=StepStats(steps=7, resumed_from=7))
    report(3, State.APPLIED, stats=StepStats(steps=8, resumed_from=7))
    assert watched.steps() == {0: 3, 2: 0, 3: 8}, "rank 2 has made none itself"
