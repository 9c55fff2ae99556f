"""Everything that is decided about a run; written to plan.json and read by every worker."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fasttrain.model.decision import Decision, Source
from fasttrain.model.guards import Guards, Preempt, Restarts, left_to_the_script
from fasttrain.model.levers import Levers
from fasttrain.model.vendors import DeviceKind

# What a script's source tells before anything of it has run.


@dataclass(frozen=True, slots=True)
class Evidence:
    """One place in the user's code that shows something.

    Attributes:
        what: What is used there: ``init_process_group``, ``Accelerator``, ``--local_rank``.
        where: ``file:line``, the file as the user can open it from the working directory.
    """

    what: str
    where: str


@dataclass(frozen=True, slots=True)
class ScriptFacts:
    """All that was read from a script and the user's modules that it imports.

    Attributes:
        handles_ranks: The strongest sign that it works as one of several processes by itself; None
            when it knows nothing of ranks.
        unread: The user's modules that were not looked at, each with the reason.
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
    """The circumstances of one call of fasttrain, read once at the edge.

    Attributes:
        target: What to start.
        cwd: Working directory.
        python: Interpreter that runs the script.
        shim: Path of the shim's entry point in that interpreter.
        agent: Path of the torchrun agent's entry point.
        environ: The environment as the user has it.
        run_id: Unique name of this run.
        run_dir: Absolute run directory.
        cache_dir: Absolute directory for what persists between runs.
        version: Version of fasttrain.
        facts: What the source of the script says about it.
        ranks_by_slurm: Whether SLURM starts the workers and gives them their ranks.
        restart_count: How often SLURM queued the run again.
        cache_note: Why the cache is not the usual one; empty where it is.
        warning: The signal that SLURM sends before a job's time is over.
        python_decision: Why `python` is another than fasttrain's own; None where it is its own.
        python_note: The active environment and why `python` isn't its own; empty without one.
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


@dataclass(frozen=True, slots=True)
class EnvVar:
    """One environment variable of the workers.

    Attributes:
        name: Its name.
        value: The value that the workers see; None when it is unset for them.
        reason: Why it is set, or why the user's own value stays.
        source: Who decided.
        kept: True when the user's own value won over the one fasttrain would have set.
    """

    name: str
    value: str | None
    reason: str
    source: Source
    kept: bool = False


@dataclass(frozen=True, slots=True)
class Processes:
    """How many processes there are, and how they find each other.

    Attributes:
        backend: ``direct`` for one process without an agent, ``torchrun`` for those of an agent,
            ``slurm`` where each process is a task of SLURM's.
        nproc_per_node: Workers on each node.
        min_nodes: Fewest nodes of an elastic run; equals ``max_nodes`` in a static one.
        max_nodes: Most nodes.
        node_rank: Rank of this node in a static run.
        master_addr: Address of node 0 in a static multi-node run; empty otherwise.
        master_port: Port on node 0; 0 lets the rendezvous take a free one.
        rdzv_backend: Rendezvous backend of an elastic run; empty otherwise.
        rdzv_endpoint: ``HOST[:PORT]`` of an elastic run; empty otherwise.
        rdzv_id: Name that the nodes of an elastic run share; empty otherwise.
        rdzv_conf: Settings of that rendezvous, as torchrun takes them; empty without any.
        max_restarts: Restarts of a failed group of workers.
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
        fasttrain_version: Version that decided.
        run_id: Unique name of the run.
        run_dir: Absolute run directory.
        target: What is started.
        cwd: Working directory of the workers.
        device_kind: Kind of device that the run trains on.
        devices: Names for the visibility variable, in the order of the local ranks.
        processes: Number of processes and rendezvous.
        environment: Every variable that differs from the user's environment or was kept on purpose.
        levers: Changes in the worker.
        guards: What is watched while it runs.
        restarts: What becomes of it when it fails.
        argv: The exact command, program first.
        shutdown_timeout_s: Seconds that a run has to end in, once a signal asked for it.
        show_ranks: Ranks whose output is shown live; None for all.
        max_steps: Optimizer steps after which the run stops; None for as many as the script does.
        strict: Whether a lever that was asked for and did not take effect fails the run.
        preempt: What becomes of the run when it has to make room.
        python: The Python that runs the script; None where it is fasttrain's own.
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
    hints: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    schema: int = PLAN_SCHEMA

    @property
    def judged(self) -> bool:
        """Return whether an agent asks its launcher what becomes of an attempt that failed."""
        return self.restarts.value.most > 0 or self.processes.value.max_nodes > 1
