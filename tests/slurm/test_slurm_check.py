"""``fasttrain slurm --check`` on the real cluster: each finding fired by what it is about."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import fasttrain as package

Found = dict[str, Any]
Check = Callable[..., Found]


def jobs_ever(cluster: Any) -> str:
    """Return the jobs that the controller has, ended ones too."""
    listed: str = cluster.run("squeue", "-h", "-t", "all", "-o", "%i").stdout
    return listed


@pytest.fixture
def check(fasttrain: Any, cluster: Any, shared_folder: Path) -> Check:
    """Check a job with these options; see that nothing was sent and nothing is left."""
    (shared_folder / "train.py").write_text("import os\nprint(os.environ['LOCAL_RANK'])\n")

    def run(*words: str, env: dict[str, str] | None = None) -> Found:
        before = jobs_ever(cluster), sorted(shared_folder.rglob("*"))
        done = fasttrain("slurm", "train.py", "--check", "--json", *words, env=env)
        assert done.stderr == b""
        envelope = json.loads(done.stdout)
        assert envelope["kind"] == "slurm-check"
        data: Found = envelope["data"]
        broken = any(finding["severity"] == "error" for finding in data["findings"])
        assert done.returncode == (78 if broken else 0)
        assert (jobs_ever(cluster), sorted(shared_folder.rglob("*"))) == before
        return data

    return run


def told(found: Found, severity: str = "error") -> dict[str, str]:
    """Return the findings of a severity, what was found by the check's name."""
    return {
        finding["check"]: f"{finding['what']}; {finding['why']}"
        for finding in found["findings"]
        if finding["severity"] == severity
    }


@contextmanager
def changed(cluster: Any, *words: str, back: tuple[str, ...]) -> Iterator[None]:
    cluster.run("scontrol", "update", *words)
    try:
        yield
    finally:
        cluster.run("scontrol", "update", words[0], *back)


def test_a_clean_request_sends_nothing_and_is_told_its_start(check: Check) -> None:
    found = check("--nodes", "2", "--gpus-per-node", "8", "--time", "10", "--setup", "touch ran")
    assert told(found) == {}
    assert "on nodes node[1-2] in partition main" in found["start"]
    # Whether this machine's disk is its own alone depends on the machine.
    assert set(told(found, "warning")) <= {"slurm-shared"}
    assert told(found, "hint") == {}


@pytest.mark.parametrize(
    ("words", "slug", "text"),
    [
        (("--partition", "nope"), "slurm-partition", "main, low"),
        (("--nodes", "3"), "slurm-nodes", r"\b2\b"),
        (("--gpus-per-node", "9"), "slurm-resources", r"\b8\b"),
        (("--mem", "900G"), "slurm-resources", "921600 MiB"),
        (("--cpus-per-task", "65"), "slurm-resources", "65 CPUs"),
        (("--time", "1"), "slurm-signal", r"\b90 s\b"),
        (("--setup", "a=1", "--setup", "fi"), "slurm-setup", "'fi'; syntax error"),
        (("--constraint", "nope"), "slurm-constraint", "Invalid feature"),
        (("--reservation", "nope"), "slurm-reservation", "(?i)reservation"),
    ],
)
def test_what_would_never_run(check: Check, words: tuple[str, ...], slug: str, text: str) -> None:
    errors = told(check(*words))
    assert set(errors) == {slug}
    assert re.search(text, errors[slug])


def test_a_time_limit_over_the_partitions(check: Check, cluster: Any) -> None:
    with changed(cluster, "partition=low", "MaxTime=20", back=("MaxTime=UNLIMITED",)):
        assert told(check("--partition", "low", "--time", "20")) == {}
        assert set(told(check("--partition", "low", "--time", "21"))) == {"slurm-limit"}
        assert told(check("--partition", "main", "--time", "21")) == {}


def test_a_partition_that_is_down(check: Check, cluster: Any) -> None:
    with changed(cluster, "partition=low", "State=DOWN", back=("State=UP",)):
        errors = told(check("--partition", "low"))
    assert set(errors) == {"slurm-partition"}
    assert "low is DOWN" in errors["slurm-partition"]


def test_a_node_that_is_drained_may_come_back(check: Check, cluster: Any) -> None:
    words = ("nodename=node1", "State=DRAIN", "Reason=test")
    with changed(cluster, *words, back=("State=RESUME",)):
        found = check("--nodes", "2")
        assert told(check("--nodes", "1")) == {}
    assert told(found) == {}
    numbers = re.findall(r"\b\d+\b", told(found, "warning")["slurm-nodes"])
    assert "1" in numbers, "which are up"


def test_an_interpreter_without_fasttrain(check: Check, tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')
    bare.chmod(0o755)
    errors = told(check("--python", str(bare)))
    assert "No module named" in errors["slurm-python"]
    own = tmp_path / "own"
    own.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    own.chmod(0o755)
    source = str(Path(package.__file__).parents[1])
    assert told(check("--python", str(own), env={"PYTHONPATH": source})) == {}


def test_one_gpu_per_task_and_a_script_that_reads_its_local_rank(check: Check) -> None:
    words = ("--tasks", "per-gpu", "--gpus-per-node", "8", "--srun-args=--gpus-per-task=1")
    assert set(told(check(*words))) == {"slurm-gpus-per-task"}
    assert told(check(*words[:-1])) == {}


def test_an_account_that_is_not_the_users_is_a_hint_where_slurm_takes_it(check: Check) -> None:
    assert "sacctmgr" in told(check("--account", "nope"), "hint")["slurm-account"]


def test_what_is_asked_for_beats_sbatchs_variable(
    check: Check, fasttrain: Any, cluster: Any, shared_folder: Path
) -> None:
    variables = {"SBATCH_PARTITION": "low", "SBATCH_TIMELIMIT": "33", "SBATCH_WAIT": "1"}
    found = check("--partition", "main", env=variables)
    assert "in partition main" in found["start"]
    assert "in partition low" in check(env=variables)["start"]
    for words, partition in ((("--partition", "main"), "main"), ((), "low")):
        done = fasttrain("slurm", "train.py", "--setup", "sleep 30", *words, env=variables)
        assert done.returncode == 0, done.stderr.decode()
        assert b"SBATCH_WAIT" in done.stderr
        number = json.loads(fasttrain("job", "list", "--json").stdout)["data"][-1]["job_id"]
        assert cluster.job_field(number, "Partition") == partition
        assert cluster.job_field(number, "TimeLimit") == "00:33:00"
        assert fasttrain("job", "cancel", number).returncode == 0


@pytest.mark.parametrize("text", ["sleep 30", "echo '|||'", "exit 1"])
def test_tools_that_hang_or_talk_rubbish_are_told(
    check: Check, cluster: Any, tmp_path: Path, text: str
) -> None:
    for name in ("scontrol", "sinfo", "sacctmgr"):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    # Instead of 20 s, which the unit tests have shown to be a limit.
    code = "import fasttrain.slurm.check_facts as f; f.TIMEOUT_S = 1.0\n"
    (tmp_path / "sitecustomize.py").write_text(code)
    path = f"{tmp_path}:{cluster.environ['PATH']}"
    found = check("--nodes", "9", env={"PATH": path, "PYTHONPATH": str(tmp_path)})
    assert "slurm-unread" in told(found, "warning")
    assert set(told(found)) == {"slurm-resources"}  # sbatch itself knows


def test_quiet_tells_no_states_and_shows_the_output(fasttrain: Any, shared_folder: Path) -> None:
    (shared_folder / "train.py").write_text("print('on')")
    done = fasttrain("slurm", "train.py", "--follow", "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"on\n", b"")


def test_without_accounting_accounts_are_skipped_with_the_reason(
    cluster_without_accounting: Any, shared_folder: Path
) -> None:
    (shared_folder / "train.py").write_text("")
    run = cluster_without_accounting.fasttrain(shared_folder)
    done = run("slurm", "train.py", "--check", "--account", "any")
    assert done.returncode == 0, done.stdout.decode()
    assert b"this cluster has no accounting" in done.stdout
