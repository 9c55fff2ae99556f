"""Records what SLURM prints, for tests that have none: ``python -m support.recordings``.

It is started in the folder ``tests``, brings a cluster up, gets jobs into every state that it can,
and writes tests/data/slurm, whose README tells the commands. It takes about two and a half minutes.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from support.cluster import held

TO = Path(__file__).parents[1] / "data/slurm"
SINFO = "%P|%a|%l|%F|%G"
SQUEUE = "JobArrayID:|,State:|,Reason:|,exit_code:|,RestartCnt:|,NodeList:|,STDOUT:|"
SACCT = ("sacct", "--noheader", "--parsable2", "--format")
TOLD = "JobID,State,Reason,ExitCode,NodeList"
QUESTIONS = {
    "sinfo.txt": ("sinfo", "-h", "-o", SINFO),
    "squeue.txt": ("squeue", "-h", "--states=all", "-o", "%i|%T|%r|%N|%M|%l|%D|%j"),
    "squeue_format.txt": ("squeue", "-h", "--states=all", "--array", f"--Format={SQUEUE}"),
    "squeue_unknown.txt": ("squeue", "-h", "--jobs=1"),
    "sacct.txt": (*SACCT, TOLD, "--allocations"),
    "sacct_runs.txt": (*SACCT, TOLD, "--allocations", "--duplicates"),
    "sacct_steps.txt": (*SACCT, TOLD),
    "scontrol_job.txt": ("scontrol", "show", "job", "-o"),
    "scontrol_job_unknown.txt": ("scontrol", "show", "job", "-o", "1"),
    "scontrol_node.txt": ("scontrol", "show", "node", "-o"),
    "scontrol_config.txt": ("scontrol", "show", "config"),
}
REFUSED = {
    "unknown_partition": ("--partition=nowhere",),
    "too_many_gpus": ("--gpus-per-node=9",),
    "too_many_cpus": ("--cpus-per-task=100",),
    "too_much_memory": ("--mem=900G",),
    "bad_time": ("--time=soon",),
    "unknown_gres": ("--gres=npu:1",),
    "unknown_constraint": ("--constraint=fast",),
    "bad_dependency": ("--dependency=afterok:soon",),
    "unknown_reservation": ("--reservation=mine",),
    "unknown_option": ("--gpus-per-host=8",),
    "test_only_too_many_gpus": ("--test-only", "--gpus-per-node=9"),
    "test_only_too_many_nodes": ("--test-only", "--nodes=3"),
}
UNREADABLE = {"bad_time", "unknown_option"}  # sbatch doesn't even ask, and ends with 255
ACCEPTED = {"test_only_good": ("--test-only", "--nodes=2", "--gpus-per-node=8")}
# Of the configuration, what decides about jobs; the rest is paths and ports of this cluster.
CONFIG = (
    "AccountingStorage", "BatchStartTimeout", "ClusterName", "DefMemPerCPU", "EnforcePartLimits",
    "GresTypes", "JobRequeue", "KillWait", "MaxArraySize", "MinJobAge", "OverTimeLimit", "Preempt",
    "ReturnToService", "SLURM_VERSION", "SelectType ", "SlurmdTimeout",
)  # fmt: skip
REASONS = {
    "resources": "Resources",
    "dependency": "Dependency",
    "too_many_nodes": "PartitionNodeLimit",
    "begin": "BeginTime",
}
TWICE = '[ -n "$SLURM_RESTART_COUNT" ] || sleep 120'  # the second run ends at once


def main() -> None:
    """Write all files anew."""
    TO.mkdir(exist_ok=True)
    with held("--slurmd-timeout=10", "--grace-time=5") as cluster:
        for name, options in (REFUSED | ACCEPTED).items():
            write(f"sbatch_{name}.txt", sbatch(cluster, options).stderr)
        jobs = end_jobs(cluster) | hold_jobs(cluster)
        write("jobs.txt", "".join(f"{job} {name}\n" for name, job in jobs.items()))
        for name, question in QUESTIONS.items():
            done = cluster.run(*question, check=False)
            write(name, (done.stdout + done.stderr).replace(str(cluster.folder), "/shared"))
    only_what_matters()


def only_what_matters() -> None:
    """Drop from the files what is this machine's."""
    config = (TO / "scontrol_config.txt").read_text().splitlines(keepends=True)
    write("scontrol_config.txt", "".join(line for line in config if line.startswith(CONFIG)))
    nodes = (TO / "scontrol_node.txt").read_text()
    write("scontrol_node.txt", re.sub(r"OS=Linux \S+", "OS=Linux 6.1.0-38-amd64", nodes))


def write(name: str, text: str) -> None:
    """Write one file."""
    (TO / name).write_text(text)


def sbatch(cluster: Any, options: tuple[str, ...]) -> Any:
    """Ask sbatch for something, and give what became of it."""
    return cluster.run("sbatch", *options, stdin="#!/bin/bash\n", check=False)


def submit(cluster: Any, name: str, script: str, *options: str) -> str:
    """Submit a job with a name, and give its id."""
    return str(cluster.submit(script, f"--job-name={name}", *options))


def end_jobs(cluster: Any) -> dict[str, str]:
    """Let jobs end in every way; the time limit takes 80 s, and the others meanwhile."""
    scripts = {
        "timeout": ("sleep 200", "--time=1", "--nodelist=node1"),
        "completed": ("srun true", "--nodes=2", "--gpus-per-node=8"),
        "failed": ("srun true; exit 3",),
        "killed": ("kill -9 $$",),
        "cancelled": ("sleep 200",),
        "array": ("exit $((SLURM_ARRAY_TASK_ID == 2))", "--array=0-3%2"),
    }
    jobs = {name: submit(cluster, name, *words) for name, words in scripts.items()}
    cluster.wait_for_state(jobs["cancelled"], "RUNNING")
    cluster.run("scancel", jobs["cancelled"])
    jobs |= interrupt_jobs(cluster) | fail_node(cluster)
    cluster.wait_for_state(jobs["timeout"], "TIMEOUT", 120)
    return jobs


def interrupt_jobs(cluster: Any) -> dict[str, str]:
    """Let one job be requeued by hand and one by preemption; both come back and end well."""
    requeued = submit(cluster, "requeued", TWICE, "--requeue")
    cluster.wait_for_state(requeued, "RUNNING")
    cluster.run("scontrol", "requeue", requeued)
    cluster.wait_for_state(requeued, "COMPLETED", 60)
    node_2 = ("--nodelist=node2", "--exclusive")
    preempted = submit(cluster, "preempted", TWICE, "--partition=low", *node_2)
    cluster.wait_for_state(preempted, "RUNNING")
    preempting = submit(cluster, "preempting", "true", *node_2)
    cluster.wait_for_state(preempted, "COMPLETED", 60)
    return {"requeued": requeued, "preempted": preempted, "preempting": preempting}


def fail_node(cluster: Any) -> dict[str, str]:
    """Stop a node under two jobs; one of them may be requeued, and comes back and ends well."""
    lost = submit(cluster, "node_fail", "sleep 200", "--nodelist=node2", "--no-requeue")
    saved = submit(cluster, "node_fail_requeued", TWICE, "--nodelist=node2", "--requeue")
    for job in (lost, saved):
        cluster.wait_for_state(job, "RUNNING")
    cluster.stop_node("node2")
    cluster.wait_for_state(lost, "NODE_FAIL", 90)
    cluster.start_node("node2")
    cluster.wait_for_state(saved, "COMPLETED", 60)
    return {"node_fail": lost, "node_fail_requeued": saved}


def hold_jobs(cluster: Any) -> dict[str, str]:
    """Leave one job running, and others waiting for different reasons."""
    whole = ("--nodes=2", "--gpus-per-node=8", "--ntasks-per-node=8")
    running = submit(cluster, "running", "sleep 200", *whole)
    cluster.wait_for_state(running, "RUNNING")
    waiting = {
        "resources": whole,
        "dependency": (f"--dependency=afterok:{running}",),
        "too_many_nodes": ("--nodes=3",),
        "begin": ("--begin=now+1hour",),
        "waiting_array": ("--array=0-2%1", "--gpus-per-node=8"),
    }
    jobs = {name: submit(cluster, name, "true", *options) for name, options in waiting.items()}
    for name, reason in REASONS.items():
        wait_for_reason(cluster, jobs[name], reason)
    # sacct learns of jobs later than squeue.
    last = jobs["waiting_array"]
    cluster.until(lambda: cluster.accounted(last, "State"), 30, lambda: f"{last} in sacct")
    return {"running": running, **jobs}


def wait_for_reason(cluster: Any, job: str, reason: str) -> None:
    """Wait until a job is pending for a reason."""
    cluster.until(lambda: cluster.job_field(job, "Reason") == reason, 20, lambda: (job, reason))


if __name__ == "__main__":
    main()
