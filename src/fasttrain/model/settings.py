"""The options of a run: their types, defaults, help and limits, which are written only here."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar

from fasttrain.model.decision import Setting, Source, SourceKind

T = TypeVar("T")

DeviceChoice = Literal["auto", "cuda", "npu", "rocm", "xpu", "mps", "cpu"]
AmpChoice = Literal["auto", "off", "bf16", "fp16"]
CompileMode = Literal[
    "off", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"
]
CompileScope = Literal["model", "blocks"]
OptimizerChoice = Literal["auto", "keep", "fused", "npu"]
MatmulChoice = Literal["auto", "highest", "high", "medium"]
StrategyChoice = Literal["auto", "none", "ddp", "fsdp"]
BatchChoice = Literal["split", "per-rank"]
HangAction = Literal["stop", "report"]
RestartOn = Literal["auto", "any"]
NanChoice = Literal["off", "warn", "stop"]
PreemptChoice = Literal["signal", "snapshot"]
PresetName = Literal["exact", "fast", "max"]


def option(
    default: Any,
    help: str,
    *,
    panel: str = "Run",
    metavar: str = "",
    minimum: int | None = None,
    maximum: int | None = None,
) -> Any:
    """Return a field of `Settings` with its default, help and limits.

    Args:
        default: Value if no layer names one.
        help: One line for ``--help``, the completions and the documentation.
        panel: Heading under which ``--help`` lists it.
        metavar: Placeholder for the value in ``--help``.
        minimum: Smallest integer allowed.
        maximum: Largest integer allowed.
    """
    return field(
        default=Setting(default, Source(SourceKind.DEFAULT, "default")),
        metadata={
            "help": help,
            "panel": panel,
            "metavar": metavar,
            "minimum": minimum,
            "maximum": maximum,
        },
    )


# Source: proc(5), /proc/sys/kernel/pid_max: at most 2^22 on 64-bit systems
MOST_PROCESSES = 1 << 22
DEVICES, LEVERS, PROCESSES, RUN = "Devices", "Levers", "Processes", "Run"


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of a run. A field's name is its flag, with underscores."""

    gpus: Setting[str | None] = option(
        None, "GPUs to use: 0,3 | all | auto:N; indices, UUIDs or MIG ids", panel=DEVICES,
        metavar="LIST",
    )  # fmt: skip
    device: Setting[DeviceChoice] = option("auto", "Kind of device to train on", panel=DEVICES)

    amp: Setting[AmpChoice] = option("auto", "Mixed precision of the model's calls", panel=LEVERS)
    compile: Setting[CompileMode] = option("off", "torch.compile mode of the model", panel=LEVERS)
    compile_scope: Setting[CompileScope] = option(
        "model", "Compile the whole model, or its repeated blocks once", panel=LEVERS
    )
    optimizer: Setting[OptimizerChoice] = option(
        "auto", "Optimizer implementation", panel=LEVERS
    )  # fmt: skip
    matmul: Setting[MatmulChoice] = option(
        "auto", "Precision of fp32 matrix products (TF32 on CUDA)", panel=LEVERS
    )
    strategy: Setting[StrategyChoice] = option(
        "auto", "What makes several processes one training run", panel=LEVERS
    )
    batch: Setting[BatchChoice] = option(
        "split", "Split each batch among the ranks, or one batch per rank", panel=LEVERS
    )

    nproc_per_node: Setting[int | None] = option(
        None, "Processes on this node; default: one per chosen GPU", panel=PROCESSES,
        metavar="N", minimum=1, maximum=MOST_PROCESSES,
    )  # fmt: skip
    nodes: Setting[str] = option(
        "1", "Number of nodes, or MIN:MAX for an elastic run", panel=PROCESSES, metavar="N|MIN:MAX"
    )
    node_rank: Setting[int | None] = option(
        None, "Rank of this node in a static run", panel=PROCESSES, metavar="RANK", minimum=0
    )
    master_addr: Setting[str | None] = option(
        None, "Address of node 0 in a static run", panel=PROCESSES, metavar="HOST"
    )
    master_port: Setting[int | None] = option(
        None, "Port on node 0; default on one node: any free one", panel=PROCESSES, metavar="PORT",
        minimum=1, maximum=65_535,
    )  # fmt: skip
    rdzv_endpoint: Setting[str | None] = option(
        None, "HOST[:PORT] of an elastic rendezvous", panel=PROCESSES, metavar="HOST:PORT"
    )
    rdzv_backend: Setting[str] = option(
        "c10d", "Rendezvous backend", panel=PROCESSES, metavar="NAME"
    )
    rdzv_id: Setting[str | None] = option(
        None, "Name that the nodes of one elastic run share", panel=PROCESSES, metavar="ID"
    )
    rdzv_conf: Setting[str | None] = option(
        None, "KEY=VALUE,... of an elastic rendezvous, such as last_call_timeout=10",
        panel=PROCESSES, metavar="KEY=VALUE",
    )  # fmt: skip
    max_restarts: Setting[int] = option(
        0, "Most restarts of a failed run", panel=PROCESSES, metavar="N", minimum=0
    )
    restart_on: Setting[RestartOn] = option(
        "auto", "Restart after recoverable failures, or after any", panel=PROCESSES
    )
    show_ranks: Setting[str] = option(
        "0", "Ranks whose output is shown live: all | 0,3", panel=PROCESSES, metavar="RANKS"
    )

    shutdown_timeout: Setting[int] = option(
        30, "Seconds from ctrl-C, SIGTERM or SIGHUP to SIGKILL, for saving", panel=RUN,
        metavar="S", minimum=0,
    )  # fmt: skip
    debug: Setting[bool] = option(False, "Blocking launches and torch's debug switches", panel=RUN)
    env: Setting[tuple[str, ...]] = option(
        (), "Environment variable for the script; repeatable", panel=RUN, metavar="NAME=VALUE"
    )
    strict: Setting[bool] = option(
        False, "A lever that was asked for but did not take effect is an error", panel=RUN
    )
    max_steps: Setting[int | None] = option(
        None, "Stop after N optimizer steps", panel=RUN, metavar="N", minimum=1
    )
    hang_timeout: Setting[str] = option(
        "auto", "Time without progress that is a hang: auto | off | SECONDS", panel=RUN,
        metavar="SECONDS|off",
    )  # fmt: skip
    on_hang: Setting[HangAction] = option(
        "stop", "Stop a run that hangs, or report where it hangs and go on", panel=RUN
    )
    on_nan: Setting[NanChoice] = option(
        "warn", "When gradients or losses are NaN or Inf several steps in a row", panel=RUN
    )
    run_dir: Setting[str | None] = option(
        None, "Directory for this run's plan, events, logs and receipt", panel=RUN, metavar="DIR"
    )
    preempt: Setting[PreemptChoice] = option(
        "signal", "Pass SIGUSR2 to the script, or end the run after a snapshot", panel=RUN
    )
    snapshot_every: Setting[int | None] = option(
        None, "Minutes between snapshots, besides that at the signal", panel=RUN, metavar="MIN",
        minimum=1,
    )  # fmt: skip
    resume: Setting[str | None] = option(
        None, "Resume from the last snapshot of a run", panel=RUN, metavar="RUN_DIR"
    )
    python: Setting[str | None] = option(
        None, "Interpreter for the script; default: the active environment's, if it has torch",
        panel=RUN, metavar="PATH",
    )  # fmt: skip
    quiet: Setting[bool] = option(False, "Print only errors of fasttrain's own", panel=RUN)


OPTION_NAMES: tuple[str, ...] = tuple(f.name for f in fields(Settings))
