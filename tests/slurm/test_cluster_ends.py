"""A cluster leaves nothing behind, however it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from support.cluster import TOOL, UNAVAILABLE, RealCluster
from support.command import clean_environ

SMALL = ("--accounting=no", "--no-install", "--nodes=1")
PATIENCE_S = 90.0
# Holds a cluster by a pipe, as pytest does, and waits for its death.
HOLDER = """\
import subprocess, sys
argv = [sys.executable, *sys.argv[1:]]
keeper = subprocess.Popen(argv, stdin=-1, stdout=-1, start_new_session=True, text=True)
print(keeper.stdout.readline(), flush=True)
input()
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="slurm", dir="/tmp") as top:
        Path(top).chmod(0o755)
        yield Path(top, "c")
        if Path(top, "c").exists():  # after a failure
            tool("down", "--dir", f"{top}/c")


def tool(*words: str, **popen: object) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, TOOL, *words]
    environ = clean_environ()
    return subprocess.run(argv, env=environ, text=True, capture_output=True, timeout=240, **popen)


def up(folder: Path, *options: str) -> None:
    """Bring a small cluster up, or skip where this machine can't hold it."""
    done = tool("up", "--dir", str(folder), *SMALL, *options)
    if done.returncode == UNAVAILABLE and not os.environ.get("REQUIRE_SLURM"):
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr


def processes_of(folder: Path) -> list[int]:
    """Return what was started for the cluster, jobs included: all of it has the path at hand."""
    found = []
    for process in psutil.process_iter():
        try:
            texts = [*process.cmdline(), *process.environ().values()]
            if process.status() != psutil.STATUS_ZOMBIE and any(str(folder) in t for t in texts):
                found.append(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def traces(folder: Path, links: set[str]) -> dict[str, object]:
    """Return all that a cluster leaves on a machine while it is up."""
    return {
        "processes": processes_of(folder),
        "links": [name for name in links if Path("/sys/class/net", name).exists()],
        "mounts": str(folder) in Path("/proc/mounts").read_text(),
        "hosts": str(folder) in Path("/etc/hosts").read_text(),
        "files": [path.name for path in folder.parent.iterdir()],
    }


def links_of(cluster: Path) -> set[str]:
    """Return the bridge and the links of a cluster, by the name of its bridge."""
    text = (cluster / "cluster.json").read_text()
    return {name for _, name in socket.if_nameindex() if f'"{name}"' in text}


def wait(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while not (held := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return held


NOTHING = {"processes": [], "links": [], "mounts": False, "hosts": False, "files": []}


@pytest.mark.parametrize("net", ["netns", "ports"])
def test_down_leaves_nothing(folder: Path, net: str) -> None:
    up(folder, f"--net={net}", f"--prefix=ends{os.getpid()}n")
    links = links_of(folder)
    assert len(links) == (2 if net == "netns" else 0)
    cluster = RealCluster(folder)
    # One that leaves its job's session, as a daemon does, and ignores all that it may.
    started = "setsid bash -c 'trap \"\" TERM HUP; echo lives; while :; do sleep 1; done' & wait"
    job = cluster.submit(started)
    cluster.wait_for_output(job, "lives")
    assert len(processes_of(folder)) >= 4
    assert tool("down", "--dir", str(folder)).returncode == 0
    (folder.parent / f"{job}.out").unlink()
    assert traces(folder, links) == NOTHING


def test_a_cluster_ends_with_the_process_that_holds_it(folder: Path) -> None:
    argv = [sys.executable, "-c", HOLDER, TOOL, "hold", "--dir", str(folder), *SMALL]
    holder = subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=clean_environ()
    )
    with holder:
        assert holder.stdout is not None
        if not holder.stdout.readline().strip():
            holder.kill()
            up(folder)  # skips, or tells what is wrong
        links = links_of(folder)
        holder.send_signal(signal.SIGKILL)
    assert wait(lambda: not folder.exists())
    assert wait(lambda: traces(folder, links) == NOTHING), traces(folder, links)


def test_a_start_that_fails_leaves_its_logs_alone(folder: Path) -> None:
    up(folder)  # skips where nothing can start
    assert tool("down", "--dir", str(folder)).returncode == 0
    # SLURM takes no name of a node with a space in it.
    done = tool("up", "--dir", str(folder), *SMALL, "--prefix", "no name")
    assert done.returncode == 1
    assert "slurm" in done.stderr
    assert processes_of(folder) == []
    assert tool("down", "--dir", str(folder)).returncode == 0
    assert traces(folder, set()) == NOTHING
