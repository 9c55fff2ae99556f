"""Jobs of nodes that have no namespaces, whose processes outlive a slurmd."""

from __future__ import annotations

import os
import time
from pathlib import Path

from slurm_cluster.cluster import Cluster
from slurm_cluster.processes import Proc, proc_stat

_PATIENCE_S = 5.0


def end_jobs(cluster: Cluster) -> None:
    """Cancel the jobs, then end their processes that are there still."""
    slurmctld = cluster.proc("slurmctld")
    if slurmctld and slurmctld.alive():
        _cancel_all(cluster)
    end = time.monotonic() + _PATIENCE_S
    while _find_steps(cluster.conf) and time.monotonic() < end:
        time.sleep(0.1)
    for proc in _find_steps(cluster.conf):
        proc.kill(2)


def _cancel_all(cluster: Cluster) -> None:
    jobs = cluster.client("squeue", "-h", "-o", "%A", check=False, timeout_s=20)
    if jobs.returncode:
        return
    if ids := sorted({job for job in jobs.stdout.split() if job.isdigit()}):
        cluster.client("scancel", *ids, check=False, timeout_s=20)
        cluster.client("scancel", "-s", "KILL", *ids, check=False, timeout_s=20)


def _find_steps(conf: Path) -> list[Proc]:
    """Return slurmstepd and the tasks of a cluster, daemonized ones too."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        now = proc_stat(int(entry.name))
        if _is_of(entry, conf) and now and now[0] not in "ZX":
            found.append(Proc("step", int(entry.name), now[1]))
    return found


def _is_of(entry: Path, conf: Path) -> bool:
    try:
        environ = (entry / "environ").read_bytes().split(b"\0")
        program = (entry / "exe").readlink().name
    except OSError:
        return False
    if f"SLURM_CONF={conf}".encode() not in environ:
        return False
    in_job = all(
        any(line.startswith(name) for line in environ)
        for name in (b"SLURM_JOB_ID=", b"SLURMD_NODENAME=")
    )
    return in_job or program.startswith("slurmstepd")
