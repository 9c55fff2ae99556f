"""A cluster that is up, as a test uses it."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from support.command import Command, clean_environ

TESTS = Path(__file__).parents[1]
TOOL = TESTS / "slurm_cluster"
UNAVAILABLE = 69  # the tool's exit status where this machine can't hold a cluster

Completed = subprocess.CompletedProcess[str]
T = TypeVar("T")


class UnavailableError(Exception):
    """This machine lacks what a cluster needs."""


class RealCluster:
    """SLURM's commands on one cluster; ids of jobs are texts, as SLURM prints them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.folder = directory.parent
        self.environ = {**clean_environ(), "SLURM_CONF": f"{directory}/slurm.conf"}
        self._stopped: set[str] = set()

    def run(
        self, *argv: str | Path, stdin: str = "", check: bool = True, timeout_s: float = 120
    ) -> Completed:
        """Run a command as a user of the cluster; what it prints is in a failure of the test."""
        done = subprocess.run(
            [*map(str, argv)], input=stdin, capture_output=True, text=True,
            cwd=self.folder, env=self.environ, timeout=timeout_s,
        )  # fmt: skip
        assert not check or done.returncode == 0, f"{done.args}: {done.stdout}{done.stderr}"
        return done

    def fasttrain(self, cwd: Path) -> Command:
        """Return ``fasttrain`` as a user of the cluster runs it, in a folder that nodes see."""
        command = Command(cwd)
        command.environ = self.environ
        return command

    def submit(self, script: str, *options: str) -> str:
        """Submit a batch script, and give the job's id; `output` has what it prints."""
        out = f"--output={self.folder}/%j.out"
        text = f"#!/bin/bash\n{script}\n"
        return self.run("sbatch", "--parsable", out, *options, stdin=text).stdout.strip()

    def output(self, job_id: str) -> str:
        """Return what a job has printed until now."""
        path = self.folder / f"{job_id}.out"
        return path.read_text() if path.exists() else ""

    def job_field(self, job_id: str, name: str) -> str:
        """Return one field of a job as ``scontrol show job`` prints it, such as ``Reason``."""
        line = self.run("scontrol", "show", "job", "-o", job_id).stdout
        found = re.search(rf"(?:^|\s){name}=(.*?)(?=\s[A-Z][\w/:]*=|\s*$)", line)
        assert found, f"no {name} in {line}"
        return found[1]

    def wait_for_state(self, job_id: str, states: str | set[str], timeout_s: float = 120) -> str:
        """Wait until a job is in one of the states, such as ``RUNNING``, and give it."""
        wanted = {states} if isinstance(states, str) else states
        return self.until(
            lambda: wanted & {self.job_field(job_id, "JobState")},
            timeout_s,
            lambda: f"{wanted}: {self.run('scontrol', 'show', 'job', job_id).stdout}",
        ).pop()

    def wait_for_output(
        self, job_id: str, text: str, times: int = 1, timeout_s: float = 120
    ) -> str:
        """Wait until a job has printed a text so many times, and give all that it printed."""
        self.until(
            lambda: self.output(job_id).count(text) >= times,
            timeout_s,
            lambda: f"{times} x {text!r} in {self.output(job_id)!r}",
        )
        return self.output(job_id)

    def accounted(self, job_id: str, *fields: str) -> list[list[str]]:
        """Return what sacct knows of a job: a row for each of its runs; it lags by seconds."""
        options = ("-X", "--duplicates", "--noheader", "--parsable2", "--jobs", job_id)
        lines = self.run("sacct", *options, "--format", ",".join(fields)).stdout.splitlines()
        return [line.split("|") for line in lines]

    def node_state(self, name: str) -> str:
        """Return a node's state as sinfo words it; a star behind it says that it doesn't answer."""
        return self.run("sinfo", "-h", "-N", "-p", "main", "-n", name, "-o", "%T").stdout.strip()

    def stop_node(self, name: str) -> None:
        """End a node as a power cut would."""
        self._stopped.add(name)
        self._tool("stop-node", name)

    def start_node(self, name: str) -> None:
        """Start a stopped node again."""
        self._tool("start-node", name)
        self._stopped.discard(name)

    def settle(self) -> None:
        """Cancel all jobs, start all nodes, and wait until nothing runs."""
        for name in sorted(self._stopped):
            self.start_node(name)
        if jobs := self._jobs():
            self.run("scancel", "--full", *jobs)
            self.until(lambda: not self._jobs(), 30, self._jobs)
        self.until(lambda: all(state == "idle" for state in self._states()), 60, self._states)

    def until(self, ready: Callable[[], T], timeout_s: float, tell: Callable[[], object]) -> T:
        """Wait until something holds, and give it; `tell` says what was waited for in vain."""
        deadline = time.monotonic() + timeout_s
        while not (given := ready()):
            assert time.monotonic() < deadline, f"waited {timeout_s} s in vain for {tell()}"
            time.sleep(0.1)
        return given

    def _jobs(self) -> list[str]:
        return sorted(set(self.run("squeue", "-h", "-o", "%A").stdout.split()))

    def _states(self) -> list[str]:
        return self.run("sinfo", "-h", "-N", "-p", "main", "-o", "%T").stdout.split()

    def _tool(self, *words: str) -> None:
        self.run(sys.executable, TOOL, *words, "--dir", self.directory, timeout_s=120)


@contextlib.contextmanager
def held(*options: str) -> Iterator[RealCluster]:
    """Keep a cluster up; it goes down with this process, however that ends.

    Raises:
        UnavailableError: This machine can't hold it.
    """
    # Short, as a Unix socket lies below it, and seen by the nodes.
    with tempfile.TemporaryDirectory(prefix="slurm", dir="/tmp") as top:
        Path(top).chmod(0o755)
        directory = Path(top, "c")
        with Path(top, "said").open("w+") as said, _keeper(directory, options, said) as keeper:
            assert keeper.stdout is not None
            if not keeper.stdout.readline():
                status, text = keeper.wait(120), Path(said.name).read_text()
                raise UnavailableError(text) if status == UNAVAILABLE else AssertionError(text)
            yield RealCluster(directory)
        assert keeper.returncode == 0, "the cluster's keeper has failed"


@contextlib.contextmanager
def _keeper(directory: Path, options: tuple[str, ...], said: Any) -> Iterator[Any]:
    where = ("--dir", str(directory))
    process = subprocess.Popen(
        [sys.executable, str(TOOL), "hold", "--no-install", "--net=netns", *where, *options],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said,
        env=clean_environ(), start_new_session=True,
    )  # fmt: skip
    try:
        with process:  # closes its stdin, and waits
            yield process
    finally:
        if directory.exists():  # the keeper was killed
            subprocess.run([sys.executable, str(TOOL), "down", *where], check=True)
