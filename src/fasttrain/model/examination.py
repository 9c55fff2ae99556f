"""What was seen of a machine beyond its description: what the checks of ``doctor`` judge."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fasttrain.model.machine import Machine
from fasttrain.model.vendors import DeviceKind

TrialState = Literal["ok", "failed", "crashed", "hung", "unreadable", "not tried"]
Purpose = Literal["runs", "cache", "temporary"]


@dataclass(frozen=True, slots=True)
class DeviceProcess:
    """A process that holds memory of a device.

    Attributes:
        pid: Its number here; 0 where it is hidden by a container.
        memory_bytes: What it holds; 0 when unknown.
        command: The program alone, such as ``python``; empty when it is closed to us.
        run: Run directory of the fasttrain run that it belongs to; empty if to none.
        orphan: Whether it belongs to a run of fasttrain whose launcher is dead.
        display: Whether it draws on the device, as a display server and desktop programs do.
    """

    pid: int
    memory_bytes: int = 0
    command: str = ""
    run: str = ""
    orphan: bool = False
    display: bool = False


@dataclass(frozen=True, slots=True)
class DeviceState:
    """How a device is at the moment; None stands for what its driver doesn't tell.

    Attributes:
        kind: Kind of the device.
        index: Its index in `Machine.devices`' numbering.
        uuid: Its UUID, as in `Device`.
        memory_used_bytes: Memory in use by anyone.
        processes: Who holds memory of it.
        throttled: Why its clocks are held down at the moment: ``power``, ``thermal``,
            ``hardware``; idle clocks are no throttling.
        power_limit_w: The limit set, in watts.
        power_default_w: The limit that the board has from the factory, in watts.
        clock_limit_mhz: Highest graphics clock that the present settings allow, in MHz.
        clock_max_mhz: Highest graphics clock of the board, in MHz.
        temperature_c: Of the chip, in degrees Celsius.
        persistence: Whether the driver stays loaded while nobody uses the device.
        ecc_uncorrected: Uncorrected memory errors since the driver was loaded.
        rows_failed: Whether a row of its memory failed to be remapped: the board must be replaced.
        xids: Numbers of the latest errors that the kernel logged for it (NVIDIA's Xid).
        health: ``OK``, or what the driver says instead (Ascend).
        numa_node: NUMA node that it hangs on.
        pcie_gen: Generation that its link runs at under load, and `pcie_gen_max` could.
        pcie_width: Lanes of its link, of `pcie_width_max`.
        links: How it reaches the others, by their index: ``NV18``, ``NV4``, ``PIX``, ``PHB``,
            ``NODE``, ``SYS``, as ``nvidia-smi topo -m`` calls them.
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
        path: The folder, or the nearest one above it that exists.
        free_bytes: What this user may still write there.
        writable: Whether this user may write there.
        executable: Whether programs can be started from there; compiled kernels are.
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
    """A port of an InfiniBand or RoCE adapter, by which nodes reach each other's memory.

    Attributes:
        name: Adapter and port, such as ``mlx5_0/1``.
        state: ``ACTIVE``, ``DOWN``, ``INIT``, ``ARMED``, ``ACTIVE_DEFER``.
        link_layer: ``InfiniBand`` or ``Ethernet``; empty when unknown.
        rate_gbps: What the link carries, in Gbit/s; None when unknown.
    """

    name: str
    state: str
    link_layer: str = ""
    rate_gbps: float | None = None


@dataclass(frozen=True, slots=True)
class HostState:
    """Limits and surroundings of this process; None stands for what can't be read here.

    Attributes:
        shm_bytes: Size of /dev/shm, and `shm_free_bytes` what is free of it.
        open_files: Soft and hard limit of open files; -1 for no limit.
        locked_memory_bytes: Soft limit of locked memory; -1 for no limit.
        disks: Folders that runs write to.
        memory_available_bytes: Memory that can be had without swapping.
        load: Runnable processes, averaged over the last minute.
        logical_cpus: Logical processors of the whole machine.
        quota_cores: CPU quota of the cgroup in cores; None without one.
        numa_nodes: NUMA nodes with processors.
        hostname_resolves: Whether the machine's own name has an address here.
        ports: First and last port that the kernel gives out by itself.
        container: ``docker``, ``podman``, ``kubernetes``, ``apptainer``, ``lxc``; empty outside.
        kernel: Release of the kernel.
        orphans: Processes of fasttrain runs whose launcher is dead, with run directories.
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
    """Something that was tried in a process of its own.

    Attributes:
        state: What became of it; ``unreadable`` when it printed something else than asked.
        took_s: Seconds it took.
        message: Its error's last line; empty when it went well.
    """

    state: TrialState = "not tried"
    took_s: float = 0.0
    message: str = ""


@dataclass(frozen=True, slots=True)
class TorchTrial:
    """What the script's torch says of itself, asked in a process of its own.

    Attributes:
        imported: ``import torch``, and asking it what it sees.
        version: ``torch.__version__``.
        available: Device types that it can use, such as ``cuda``.
        device_counts: How many devices of each type it sees.
        architectures: Compute capabilities that its kernels were built for (``sm_90``).
        init_error: What initialising the accelerator said; empty when it went well.
        cudnn: Version of cuDNN, and so on; empty where torch has none.
        backends: Of torch.distributed: ``gloo``, ``nccl``, ``hccl``, ``mpi``.
        autoload_error: What loading a device's extension said, where torch can only be imported
            without it (torch_npu without CANN).
        compiled: ``torch.compile`` of a small function.
        all_reduced: A sum over two processes of this machine.
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
        nodes: Number of its nodes, and `nodes_up` how many take jobs.
        gpus_per_node: Most GPUs that one of its nodes has.
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
        version: SLURM's version; empty where ``sinfo`` is not installed.
        partitions: Its partitions.
        error: What asking the controller said; empty when it answered.
        job: Number of the job that this process runs in; empty outside of one.
        job_gpus: GPUs that the job was given on this node.
        configured: Whether its tools know of a cluster to ask.
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
        machine: The description, as a plan takes it.
        devices: State of its devices, in their order; those of vendors that tell none are left out.
        host: Limits and surroundings.
        environ: Variables that matter to training, of the environment that a run would start in.
        torch: What its torch says of itself; None with ``--quick``.
        cluster: SLURM.
    """

    machine: Machine
    devices: tuple[DeviceState, ...] = ()
    host: HostState = HostState()
    environ: dict[str, str] = field(default_factory=dict)
    torch: TorchTrial | None = None
    cluster: Cluster = Cluster()
