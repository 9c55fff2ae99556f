"""The state of a machine, as the checks of ``doctor`` read it, and what they find wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fasttrain.model.machine import Machine
from fasttrain.model.vendors import DeviceKind

TrialState = Literal["ok", "failed", "crashed", "hung", "unreadable", "not tried"]
Purpose = Literal["runs", "cache", "temporary"]
Severity = Literal["error", "warning", "hint"]


@dataclass(frozen=True, slots=True)
class DeviceProcess:
    """A process that holds memory of a device.

    Attributes:
        pid: Its process ID here; 0 if a container hides it.
        memory_bytes: Device memory that it holds; 0 if unknown.
        command: Name of the program, such as ``python``; empty if we may not read it.
        run: Run directory of the fasttrain run that it belongs to; empty if none.
        orphan: Whether it belongs to a fasttrain run whose launcher is dead.
        display: Whether it renders graphics, as display servers and desktop programs do.
    """

    pid: int
    memory_bytes: int = 0
    command: str = ""
    run: str = ""
    orphan: bool = False
    display: bool = False


@dataclass(frozen=True, slots=True)
class DeviceState:
    """The current state of a device; None for values that its driver doesn't report.

    Attributes:
        kind: Kind of the device.
        index: Its index in `Machine.devices`' numbering.
        uuid: Its UUID, as in `Device`.
        memory_used_bytes: Memory in use, whoever uses it.
        processes: The processes that hold its memory.
        throttled: Why its clocks are throttled now: ``power``, ``thermal``, ``hardware``; idle
            clocks are no throttling.
        power_limit_w: The power limit that is set, in watts.
        power_default_w: The board's default power limit, in watts.
        clock_limit_mhz: Highest graphics clock that the present settings allow, in MHz.
        clock_max_mhz: Highest graphics clock of the board, in MHz.
        temperature_c: Temperature of the chip, in degrees Celsius.
        persistence: Whether the driver stays loaded while the device is unused.
        ecc_uncorrected: Uncorrected memory errors since the driver was loaded.
        rows_failed: Whether remapping a row of its memory failed: the board must be replaced.
        xids: Numbers of the latest errors that the kernel logged for it (NVIDIA's Xid).
        health: ``OK``, or the driver's word for what is wrong (Ascend).
        numa_node: NUMA node that it is attached to.
        pcie_gen: PCIe generation of its link under load; `pcie_gen_max` is the highest possible.
        pcie_width: Lanes that its link uses; `pcie_width_max` is the most possible.
        links: Link to each other device, by index: ``NV18``, ``NV4``, ``PIX``, ``PHB``, ``NODE``,
            ``SYS``, as in ``nvidia-smi topo -m``.
        peer_access: Indices of the devices whose memory it can read directly.
    """

    kind: DeviceKind
    index: int
    uuid: str = ""
    memory_used_bytes: int | None = None
    processes: tuple[DeviceProcess, ...] = ()
    throttled: tuple[str, ...] = ()
    power_limit_w: float | None = None
    power_default_w: float | None = None
    clock_limit_mhz: int | None = None
    clock_max_mhz: int | None = None
    temperature_c: float | None = None
    persistence: bool | None = None
    ecc_uncorrected: int | None = None
    rows_failed: bool = False
    xids: tuple[int, ...] = ()
    health: str = "OK"
    numa_node: int | None = None
    pcie_gen: int | None = None
    pcie_gen_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    links: dict[str, str] = field(default_factory=dict)
    peer_access: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Disk:
    """A folder that runs write to.

    Attributes:
        purpose: ``runs`` (run directories), ``cache`` (inductor's and triton's), ``temporary``.
        path: The folder, or its nearest parent that exists.
        free_bytes: Free space for this user.
        writable: Whether this user may write there.
        executable: Whether programs can be started from there, as compiled kernels are.
        filesystem: Such as ``ext4``, ``nfs4``, ``overlay``, ``tmpfs``.
    """

    purpose: Purpose
    path: str
    free_bytes: int
    writable: bool = True
    executable: bool = True
    filesystem: str = ""


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """A port of an InfiniBand or RoCE adapter.

    Attributes:
        name: Adapter and port, such as ``mlx5_0/1``.
        state: ``ACTIVE``, ``DOWN``, ``INIT``, ``ARMED``, ``ACTIVE_DEFER``.
        link_layer: ``InfiniBand`` or ``Ethernet``; empty if unknown.
        rate_gbps: Rate of the link in Gbit/s; None if unknown.
    """

    name: str
    state: str
    link_layer: str = ""
    rate_gbps: float | None = None


@dataclass(frozen=True, slots=True)
class HostState:
    """The host and the limits of this process; None for what can't be read here.

    Attributes:
        shm_bytes: Size of /dev/shm; `shm_free_bytes` is the free part.
        open_files: Soft and hard limit of open files; -1 for no limit.
        locked_memory_bytes: Soft limit of locked memory; -1 for no limit.
        disks: Folders that runs write to.
        memory_available_bytes: Memory that is available without swapping.
        load: Runnable processes, averaged over the last minute.
        logical_cpus: Logical processors of the whole machine.
        quota_cores: CPU quota of the cgroup in cores; None without one.
        numa_nodes: NUMA nodes with processors.
        hostname_resolves: Whether the machine's own name has an address here.
        ports: First and last ephemeral port.
        container: ``docker``, ``podman``, ``kubernetes``, ``apptainer``, ``lxc``; empty outside.
        kernel: Release of the kernel.
        orphans: Processes of fasttrain runs whose launcher is dead.
        rdma_ports: Ports of InfiniBand and RoCE adapters.
    """

    shm_bytes: int | None = None
    shm_free_bytes: int | None = None
    open_files: tuple[int, ...] | None = None
    locked_memory_bytes: int | None = None
    disks: tuple[Disk, ...] = ()
    memory_available_bytes: int | None = None
    load: float | None = None
    logical_cpus: int | None = None
    quota_cores: float | None = None
    numa_nodes: int | None = None
    hostname_resolves: bool | None = None
    ports: tuple[int, ...] | None = None
    container: str = ""
    kernel: str = ""
    orphans: tuple[DeviceProcess, ...] = ()
    rdma_ports: tuple[RdmaPort, ...] = ()


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of something that was tried in a process of its own.

    Attributes:
        state: How it ended; ``unreadable`` if its output was not the expected one.
        took_s: Seconds it took.
        message: Last line of its error; empty on success.
    """

    state: TrialState = "not tried"
    took_s: float = 0.0
    message: str = ""


@dataclass(frozen=True, slots=True)
class TorchTrial:
    """The script's torch, as queried in a process of its own.

    Attributes:
        imported: ``import torch``, and the queries below.
        version: ``torch.__version__``.
        available: Device types that it can use, such as ``cuda``.
        device_counts: Number of visible devices of each type.
        architectures: Compute capabilities that its kernels were built for (``sm_90``).
        init_error: Error of initialising the accelerator; empty on success.
        cudnn: Version of cuDNN; as for `nccl` and `triton`, empty if torch has none.
        backends: Backends of torch.distributed: ``gloo``, ``nccl``, ``hccl``, ``mpi``.
        autoload_error: Error of loading a device's extension, if torch can only be imported without
            it (torch_npu without CANN).
        compiled: ``torch.compile`` of a small function.
        all_reduced: An all-reduce over two processes of this machine.
    """

    imported: Trial = Trial()
    version: str = ""
    available: tuple[str, ...] = ()
    device_counts: dict[str, int] = field(default_factory=dict)
    architectures: tuple[str, ...] = ()
    init_error: str = ""
    cudnn: str = ""
    nccl: str = ""
    triton: str = ""
    backends: tuple[str, ...] = ()
    autoload_error: str = ""
    compiled: Trial = Trial()
    all_reduced: Trial = Trial()


@dataclass(frozen=True, slots=True)
class Partition:
    """A partition of a SLURM cluster.

    Attributes:
        name: Its name.
        nodes: Number of its nodes; `nodes_up` counts those that take jobs.
        gpus_per_node: GPUs of the node that has most.
        time_limit_min: Longest time of a job in minutes; None for no limit.
        default: Whether jobs that name no partition go there.
    """

    name: str
    nodes: int
    nodes_up: int
    gpus_per_node: int = 0
    time_limit_min: int | None = None
    default: bool = False


@dataclass(frozen=True, slots=True)
class Cluster:
    """SLURM as seen from here.

    Attributes:
        version: SLURM's version; empty if ``sinfo`` is not installed.
        partitions: Its partitions.
        error: Error of the query to the controller; empty if it answered.
        job: Number of the job that this process runs in; empty outside a job.
        job_gpus: GPUs that the job was granted on this node.
        configured: Whether SLURM's tools are configured for a cluster.
    """

    version: str = ""
    partitions: tuple[Partition, ...] = ()
    error: str = ""
    job: str = ""
    job_gpus: tuple[str, ...] = ()
    configured: bool = True


@dataclass(frozen=True, slots=True)
class Examination:
    """Everything that the checks look at.

    Attributes:
        machine: The description that plans are made from.
        devices: State of its devices, in their order, without vendors that report no state.
        host: The host and the limits of this process.
        environ: Variables that matter to training, of the environment in which a run would start.
        torch: The script's torch; None with ``--quick``.
        cluster: SLURM.
    """

    machine: Machine
    devices: tuple[DeviceState, ...] = ()
    host: HostState = HostState()
    environ: dict[str, str] = field(default_factory=dict)
    torch: TorchTrial | None = None
    cluster: Cluster = Cluster()


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong with a machine, a script or a job, from ``doctor`` or ``slurm --check``.

    Attributes:
        check: Slug of the check that found it.
        severity: ``error``: a run will fail or be wrong; ``warning``: it will be slow, or may fail;
            ``hint``: it could be better.
        what: The fact, in one line.
        why: The effect on a run.
        fix: The next thing to type or change.
        where: ``file:line`` in the user's code; empty for a machine.
        mendable: Whether ``--fix`` can do it here.
    """

    check: str
    severity: Severity
    what: str
    why: str
    fix: str
    where: str = ""
    mendable: bool = False
