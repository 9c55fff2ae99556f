"""The description of a machine: the result of the probes, and the input of ``--machine FILE``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fasttrain.model.vendors import DeviceKind

MACHINE_SCHEMA = 1

# The result of an fp16 overflow: inf, or fp16's largest number.
Overflow = Literal["inf", "saturates", ""]


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator that a process can use.

    Attributes:
        kind: Vendor family; also torch's device type, except that ROCm's is ``cuda``.
        index: Index in the driver's own numbering, before any visibility variable.
        name: Marketing name, such as ``NVIDIA H100 80GB HBM3``.
        uuid: Stable identity, such as ``GPU-…`` or ``MIG-…``; empty if the vendor has none.
        memory_bytes: Total device memory; 0 if unknown.
        capability: CUDA compute capability as ``"9.0"``, or the chip name of an Ascend card.
        bf16: Whether bf16 arithmetic is native.
        fp16: Whether fp16 arithmetic is native.
        tf32: Whether fp32 matrix products can use TF32.
        overflow: The result of an fp16 overflow, for kinds whose devices differ in it (Ascend);
            empty for other kinds, or if unknown.
        parent_uuid: UUID of the GPU that a MIG instance is a slice of; else empty.
    """

    kind: DeviceKind
    index: int
    name: str
    uuid: str = ""
    memory_bytes: int = 0
    capability: str = ""
    bf16: bool = False
    fp16: bool = False
    tf32: bool = False
    parent_uuid: str = ""
    overflow: Overflow = ""


@dataclass(frozen=True, slots=True)
class Cpu:
    """The processor, and the part of it that this process may use.

    Attributes:
        model: Name of the processor.
        cores: Whole cores granted: the least of affinity, cgroup quota and SLURM_CPUS_PER_TASK.
        cores_reason: Which of those limits is the least.
        memory_bytes: Memory granted: the lesser of physical memory and the cgroup's limit.
        features: Instruction sets that matter here: ``avx2``, ``avx512_bf16``, ``amx_bf16``, ….
    """

    model: str
    cores: int
    cores_reason: str
    memory_bytes: int = 0
    features: tuple[str, ...] = ()

    @property
    def bf16(self) -> bool:
        """True if bf16 products run natively (AVX512_BF16 or AMX); elsewhere they are emulated."""
        return bool({"avx512_bf16", "amx_bf16", "bf16"} & set(self.features))


@dataclass(frozen=True, slots=True)
class Torch:
    """The torch that the script would import, read without importing it.

    Attributes:
        version: Full version, such as ``2.13.0+cpu``; empty if torch is not installed.
        build: ``cuda``, ``rocm`` or ``cpu``.
        build_version: Version of that toolkit, such as ``12.8``; empty for ``cpu``.
        triton_ascend: Version of triton-ascend, which torch.compile needs on NPUs; empty if none.
    """

    version: str = ""
    build: Literal["cuda", "rocm", "cpu", ""] = ""
    build_version: str = ""
    triton_ascend: str = ""

    @property
    def release(self) -> tuple[int, int]:
        """Major and minor version; ``(0, 0)`` if torch is not installed."""
        parts = self.version.split("+")[0].split(".")
        if len(parts) < 2 or not (parts[0].isdigit() and parts[1].isdigit()):
            return (0, 0)
        return (int(parts[0]), int(parts[1]))


@dataclass(frozen=True, slots=True)
class Machine:
    """One node: devices, processor, interpreter and compiler.

    Attributes:
        hostname: Name of the node.
        system: ``Linux``, ``Darwin`` or ``Windows``.
        python: Version of the interpreter that runs the script.
        torch: Its torch.
        cpu: Its processor.
        devices: Accelerators, in the order of their drivers.
        cxx_compiler: Path or name of the C++ compiler that inductor would use; empty if none.
        driver: Version of the accelerator's driver; empty if none.
        notes: Findings of the probes for the user, one sentence each.
    """

    hostname: str
    system: str
    python: str
    torch: Torch
    cpu: Cpu
    devices: tuple[Device, ...] = ()
    cxx_compiler: str = ""
    driver: str = ""
    notes: tuple[str, ...] = ()
    schema: int = MACHINE_SCHEMA


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python other than fasttrain's own, as it describes itself; it never imports torch for that.

    Attributes:
        path: Absolute path. Links aren't followed: Python finds its virtual environment by the
            path that it was started with.
        error: Why it couldn't be queried; empty on success.
        version: Its version, such as ``3.12.1``.
        prefix: Its environment's folder.
        torch: Folder of its torch; empty without one.
        search: Its module search path.
    """

    path: str
    error: str = ""
    version: str = ""
    prefix: str = ""
    torch: str = ""
    search: tuple[str, ...] = ()


# The state of a machine, as the checks of ``doctor`` read it, and what they find wrong.


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
