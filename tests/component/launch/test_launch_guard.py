from __future__ import annotations

import gc
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from fasttrain.launch.node_run import Observers
from fasttrain.launch.output.display import PlainDisplay
from fasttrain.launch.process.supervise import STARTS, Guardian, guarded
from fasttrain.launch.start import start
from fasttrain.model.plan import LaunchPlan


def test_a_guardian_that_does_not_live_is_given_up() -> None:
    guardian = Guardian("unit", os.environ)
    for _ in range(STARTS):
        assert guardian.pid
        assert guardian.failure == ""
        os.kill(guardian.pid, signal.SIGKILL)
        os.waitpid(guardian.pid, 0)
        guardian.start()
    assert (guardian.pid, bool(guardian.failure)) == (0, True)
    guardian.dismiss()


def test_a_guardian_goes_with_its_run_and_leaves_no_file_open() -> None:
    gc.collect()  # what other tests left is not to end in between
    before = len(list(Path("/proc/self/fd").iterdir()))
    with guarded({**os.environ, "FASTTRAIN_RUN_ID": "unit"}, ()) as guardian:
        pid = guardian.pid
        assert Path(f"/proc/{pid}").exists()
    assert not Path(f"/proc/{pid}").exists()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_an_error_of_ours_has_the_guardian_act() -> None:
    environ = {**os.environ, "FASTTRAIN_RUN_ID": f"unit-{os.getpid()}"}
    with subprocess.Popen(["sleep", "30"], env=environ) as child:
        with pytest.raises(ZeroDivisionError), guarded(environ, ()):
            raise ZeroDivisionError
        assert child.wait(10) == -signal.SIGKILL


def test_a_run_without_a_guardian_says_so(
    of_command: Callable[..., LaunchPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    plan = of_command("true")
    (warning,) = start(plan, plan, {"PATH": os.defpath}, Observers(PlainDisplay())).warnings
    assert "No such file" in warning
