"""All decisions about a run; written to plan.json and read by every worker."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fasttrain.model.attempts import Guards, Preempt, Restarts, left_to_the_script
from fasttrain.model.compile_auto import Earlier
from fasttrain.model.decision import Decision, Source
from fasttrain.model.levers import Levers
from fasttrain.model.proof import Proof
from fasttrain.model.tuning import Tuning
from fasttrain.model.vendors import DeviceKind

# What a script's source tells before anything of it has run.


@dataclass(frozen=True, slots=True)
class Evidence:
    """One place in the user's code that shows something.

    Attributes:
        what: What is used there: ``init_process_group``, ``Accelerator``, ``--local_rank``.
        where: ``file:line``, with a path that can be opened from the working directory.
    """

    what: str
    where: str


@dataclass(frozen=True, slots=True)
class ScriptFacts:
    """Facts from the source of a script and of the user's modules that it imports.

    Attributes:
        handles_ranks: The strongest sign that it handles ranks itself; None without any sign.
        unread: The user's modules that were not read, each with the reason.
    """

    handles_ranks: Evidence | None = None
    unread: tuple[str, ...] = ()


PLAN_SCHEMA = 1
PLAN_FILE = "plan.json"  # in the run directory

TargetKind = Literal["script", "module", "command"]
Backend = Literal["direct", "torchrun", "slurm"]


@dataclass(frozen=True, slots=True)
class Target:
    """What is started: a script's path, a module's name or a command, and its own arguments."""

    kind: TargetKind
    name: str
    args: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Invocation:
    """The circumstances of one call of fasttrain, read once by the command.

    Attributes:
        target: What to start.
        cwd: Working directory.
        python: Interpreter that runs the script.
        shim: Path of the worker's program.
        agent: Path of the torchrun agent's program.
        environ: The user's environment.
        run_id: Unique name of this run.
        run_dir: Absolute run directory.
        cache_dir: Absolute directory for files that persist between runs.
        version: Version of fasttrain.
        facts: Facts from the source of the script.
        ranks_by_slurm: Whether SLURM starts the workers and assigns their ranks.
        restart_count: How often SLURM requeued the run.
        cache_note: Why the cache is not the usual one; else empty.
        warning: The signal that SLURM sends before a job's time limit.
        python_decision: Why `python` isn't fasttrain's own; None if it is.
        python_note: Why `python` isn't that of the active environment; else empty.
        tuned: Variables that fasttrain sets because of a result of tuning, or to get one; the
            user's own values are stronger.
    """

    target: Target
    cwd: str
    python: str
    shim: str
    agent: str
    environ: dict[str, str]
    run_id: str
    run_dir: str
    cache_dir: str
    version: str
    facts: ScriptFacts = field(default_factory=ScriptFacts)
    ranks_by_slurm: bool = False
    restart_count: int = 0
    cache_note: str = ""
    warning: str = "SIGUSR2"
    python_decision: Decision[str] | None = None
    python_note: str = ""
    tuned: tuple[EnvVar, ...] = ()


@dataclass(frozen=True, slots=True)
class EnvVar:
    """One environment variable of the workers.

    Attributes:
        name: Its name.
        value: The value that the workers see; None if it is unset for them.
        reason: Why it is set, or why the user's own value stays.
        source: Who decided.
        kept: Whether the user's own value stays, in place of the one fasttrain would have set.
    """

    name: str
    value: str | None
    reason: str
    source: Source
    kept: bool = False


@dataclass(frozen=True, slots=True)
class Processes:
    """The number of processes, and how they find each other.

    Attributes:
        backend: ``direct``: one process without an agent; ``torchrun``: an agent's workers;
            ``slurm``: each process is a SLURM task.
        nproc_per_node: Workers on each node.
        min_nodes: Fewest nodes of an elastic run; equals ``max_nodes`` in a static one.
        max_nodes: Most nodes.
        node_rank: Rank of this node in a static run.
        master_addr: Address of node 0 in a static multi-node run; else empty.
        master_port: Port on node 0; 0 for any free one.
        rdzv_backend: Rendezvous backend of an elastic run; else empty.
        rdzv_endpoint: ``HOST[:PORT]`` of an elastic run; else empty.
        rdzv_id: Name that the nodes of an elastic run share; else empty.
        rdzv_conf: Settings of that rendezvous, in torchrun's syntax; empty without any.
        max_restarts: Most restarts of a failed group of workers.
    """

    backend: Backend
    nproc_per_node: int = 1
    min_nodes: int = 1
    max_nodes: int = 1
    node_rank: int = 0
    master_addr: str = ""
    master_port: int = 0
    rdzv_backend: str = ""
    rdzv_endpoint: str = ""
    rdzv_id: str = ""
    rdzv_conf: str = ""
    max_restarts: int = 0

    @property
    def world_size(self) -> int:
        """Most workers that the run can have."""
        return self.nproc_per_node * self.max_nodes


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """All that is decided before anything starts.

    Attributes:
        fasttrain_version: Version of fasttrain that decided.
        run_id: Unique name of the run.
        run_dir: Absolute run directory.
        shared_dir: Absolute folder that all nodes of the run share; empty if there is none.
        target: What is started.
        cwd: Working directory of the workers.
        device_kind: Kind of device that the run trains on.
        devices: Values for the visibility variable, in the order of the local ranks.
        processes: Number of processes, and their rendezvous.
        environment: Every variable that differs from the user's environment, or is kept on purpose.
        levers: Changes in the worker.
        guards: The watches while it runs.
        restarts: What happens after a failure.
        argv: The exact command, program first.
        shutdown_timeout_s: Seconds that a run has to end after a signal, before SIGKILL.
        show_ranks: Ranks whose output is shown live; None for all.
        max_steps: Optimizer steps after which the run stops; None for no limit.
        strict: Whether a lever that was asked for and did not take effect fails the run.
        preempt: What happens at preemption.
        python: The Python that runs the script; None if it is fasttrain's own.
        loader_workers: Worker processes of a DataLoader that has none; None to leave it so.
        tuning: What the worker compares; None for a run that trains.
        proof: The worker's part in a run that proves; None for a run that trains.
        earlier: What is known from earlier runs, for ``--compile auto``; None for nothing.
        hints: What the user might want to know or try, one sentence each.
        warnings: What the user should know before trusting the run, one sentence each.
    """

    fasttrain_version: str
    run_id: str
    run_dir: str
    target: Target
    cwd: str
    device_kind: Decision[DeviceKind]
    devices: Decision[tuple[str, ...]]
    processes: Decision[Processes]
    environment: tuple[EnvVar, ...]
    levers: Levers
    guards: Guards
    restarts: Decision[Restarts]
    argv: tuple[str, ...]
    shutdown_timeout_s: int
    show_ranks: tuple[int, ...] | None = (0,)
    max_steps: int | None = None
    strict: bool = False
    preempt: Decision[Preempt] = field(default_factory=left_to_the_script)
    python: Decision[str] | None = None
    loader_workers: Decision[int] | None = None
    shared_dir: str = ""
    tuning: Tuning | None = None
    proof: Proof | None = None
    earlier: Earlier | None = None
    hints: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    schema: int = PLAN_SCHEMA

    @property
    def compares(self) -> bool:
        """True if results with levers are compared with those without."""
        return self.tuning is not None or self.proof is not None

    @property
    def judged(self) -> bool:
        """True if an agent waits for its launcher's verdict on a failed attempt."""
        return self.restarts.value.most > 0 or self.processes.value.max_nodes > 1
