"""The options of a run: their types, defaults, help and limits, which are written only here."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from fasttrain.model.decision import PROCESSES, RUN, Setting, option
from fasttrain.model.levers import LeverOptions

HangAction = Literal["stop", "report"]
RestartOn = Literal["auto", "any"]
NanChoice = Literal["off", "warn", "stop"]
PreemptChoice = Literal["signal", "snapshot"]
PresetName = Literal["exact", "fast", "max"]


# Source: proc(5), /proc/sys/kernel/pid_max: at most 2^22 on 64-bit systems
MOST_PROCESSES = 1 << 22


@dataclass(frozen=True, slots=True)
class Settings(LeverOptions):
    """The options of a run. A field's name is its flag, with underscores."""

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
