"""The configuration files of SLURM's daemons."""

from __future__ import annotations

import os
import pwd
import time
from pathlib import Path

from slurm_cluster.options import Controller, Node, Options


def own_name() -> str:
    """Return the user that everything runs as."""
    return pwd.getpwuid(os.geteuid()).pw_name


def slurm_conf(directory: Path, options: Options, controller: Controller, nodes: list[Node]) -> str:
    """Return the text of slurm.conf."""
    parts = (
        _identity(directory, options, controller),
        _paths(directory),
        _behaviour(options),
        _gres_types(options),
        _accounting(directory, options, controller),
        _nodes(options, nodes),
        _partitions(options, nodes),
    )
    return "".join(parts)


def _identity(directory: Path, options: Options, controller: Controller) -> str:
    return f"""\
ClusterName={options.cluster_name}
SlurmctldHost={controller.host}({controller.addr})
SlurmctldPort={controller.port}
SlurmUser={own_name()}
SlurmdUser={own_name()}
AuthType=auth/munge
# cred_expire is also how long a requeued job waits before it may start again (default 120).
AuthInfo=socket={directory}/munge/socket,cred_expire={options.requeue_delay}
CredType=cred/munge
# Not 1 again for each new cluster: a submitit folder takes the results of an old job N for N's.
FirstJobId={1000 + int(time.time()) % 60000000}
"""


def _paths(directory: Path) -> str:
    return f"""\
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool/%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/log/slurmctld.log
SlurmdLogFile={directory}/log/slurmd-%n.log
"""


def _behaviour(options: Options) -> str:
    # Without sched_interval=1 a requeued job waits for the next round of scheduling, 60 s apart.
    # PreemptParameters= is not known to 22.05, and an unknown key makes every command fail.
    return f"""\
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout={options.slurmd_timeout}
KillWait={options.kill_wait}
MessageTimeout=30
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=100000,bf_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=100
# The nodes claim more than this machine has.
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
"""


def _gres_types(options: Options) -> str:
    names = ",".join(name for name, _ in options.resources)
    return f"GresTypes={names}\n" if names else ""


def _accounting(directory: Path, options: Options, controller: Controller) -> str:
    if options.accounting == "no":
        return (
            "AccountingStorageType=accounting_storage/none\nJobAcctGatherType=jobacct_gather/none\n"
        )
    # Pass is no password but munge's socket: that of AuthInfo is not used for slurmdbd.
    text = f"""\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={controller.dbd_port}
AccountingStoragePass={directory}/munge/socket
JobAcctGatherType=jobacct_gather/linux
"""
    tracked = ",".join(f"gres/{name}" for name, _ in options.resources)
    return text + (f"AccountingStorageTRES={tracked}\n" if tracked else "")


def _nodes(options: Options, nodes: list[Node]) -> str:
    cpus = options.cpus
    shape = f"CPUs={cpus} Sockets=1 CoresPerSocket={cpus} ThreadsPerCore=1"
    shape += f" RealMemory={options.mem_mb}"
    if options.resources:
        shape += " Gres=" + ",".join(f"{name}:{count}" for name, count in options.resources)
    return "".join(
        f"NodeName={node.name} NodeHostname={node.host} NodeAddr={node.addr}"
        f" Port={node.port} {shape}\n"
        for node in nodes
    )


def _partitions(options: Options, nodes: list[Node]) -> str:
    common = f"Nodes={','.join(node.name for node in nodes)} MaxTime=INFINITE DefaultTime=60"
    return (
        f"PartitionName=main {common} Default=YES PriorityTier=10 PreemptMode=OFF\n"
        f"PartitionName=low {common} PriorityTier=1"
        f" PreemptMode=REQUEUE GraceTime={options.grace_time}\n"
    )


def write_gres_conf(directory: Path, options: Options) -> None:
    """Write gres.conf, and make the devices that it names.

    A gpu needs File=: without it slurmctld drains the node, "gres/gpu count reported lower than
    configured". slurmd sets CUDA_VISIBLE_DEVICES only for character devices; links to /dev/null
    count as such. Another resource works by its count alone, and sets no variable in a task.
    """
    lines = []
    for name, count in options.resources:
        if name != "gpu":
            lines.append(f"Name={name} Count={count}")
            continue
        for index in range(count):
            (directory / "dev" / f"nvidia{index}").symlink_to("/dev/null")
        span = f"[0-{count - 1}]" if count > 1 else "0"
        # Without the flag it also sets variables of ROCm, Level Zero and OpenCL.
        lines.append(f"Name=gpu File={directory}/dev/nvidia{span} Flags=nvidia_gpu_env")
    (directory / "gres.conf").write_text("\n".join(lines) + "\n")


def write_slurmdbd_conf(directory: Path, port: int) -> None:
    """Write slurmdbd.conf, which is looked for beside SLURM_CONF."""
    path = directory / "slurmdbd.conf"
    path.write_text(f"""\
AuthType=auth/munge
AuthInfo=socket={directory}/munge/socket
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser={own_name()}
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser={own_name()}
StorageLoc=slurm_acct_db
PidFile={directory}/slurmdbd.pid
LogFile={directory}/log/slurmdbd.log
""")
    path.chmod(0o600)  # slurmdbd refuses it otherwise
