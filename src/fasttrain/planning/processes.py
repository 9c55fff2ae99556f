"""Decides which Python runs the script, in how many processes, how they meet, and what is shown."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from fasttrain.model.decision import Decision, Setting, Source, SourceKind
from fasttrain.model.errors import ExitCode, FasttrainError
from fasttrain.model.machine import Interpreter
from fasttrain.model.plan import Backend, Processes
from fasttrain.model.settings import Settings
from fasttrain.planning.describe import BUILT_IN, counted, kind_noun
from fasttrain.planning.describe import asked as why_asked
from fasttrain.planning.gpus import ChosenDevices

# Decides which Python runs the script.


# The worker's code needs exception groups and sys.flags.safe_path.
OLDEST = (3, 11)

BY_NAME = "asked for by name"
ACTIVE = "the active environment"


@dataclass(frozen=True, slots=True)
class ChosenPython:
    """The Python that runs the script.

    Attributes:
        other: The Python; None if it is fasttrain's own.
        decision: Its path and the reason; None if it is fasttrain's own.
        note: The active environment and why it is not used; empty if there is none.
    """

    other: Interpreter | None = None
    decision: Decision[str] | None = None
    note: str = ""


def decide_python(
    setting: Setting[str | None], active: str, asked: Interpreter | None
) -> ChosenPython:
    """Return the Python of --python, else of the active environment, else fasttrain's own.

    Args:
        setting: The Python of --python, if any.
        active: The active environment, if fasttrain is not in it, as ``VIRTUAL_ENV=/path``.
        asked: The answers of that Python; None if it is fasttrain's own.

    Raises:
        FasttrainError: ``python-unusable`` if that of --python can't run the script.
    """
    if asked is None:
        return ChosenPython()
    problem = _problem(asked)
    if setting.value:
        if problem:
            raise _unusable(asked.path, problem, setting.source)
        return ChosenPython(asked, Decision(asked.path, BY_NAME, setting.source))
    if problem:
        return ChosenPython(note=f"{active} is active, but {problem}")
    variable = active.partition("=")[0]
    source = Source(SourceKind.ENV, variable)
    return ChosenPython(asked, Decision(asked.path, ACTIVE, source))


def _problem(asked: Interpreter) -> str:
    if asked.error:
        return asked.error
    if tuple(int(part) for part in asked.version.split(".")[:2]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        return f"{asked.path} is Python {asked.version}, and fasttrain needs {oldest} or later"
    return "" if asked.torch else f"there is no torch in {asked.path}"


def _unusable(path: str, why: str, source: Source) -> FasttrainError:
    return FasttrainError(
        f"{path} can't run the script",
        why=why,
        fix=f"name a Python that has torch, or leave {source} out",
        slug="python-unusable",
        exit_code=ExitCode.CANNOT_START,
    )


# Decides the number of processes, their rendezvous, and whose output is shown.


MASTER_PORT = 29500
"""Port of a static multi-node run. Source: ``--master-port`` of torchrun, torch 2.13."""

_NODES = re.compile(r"([0-9]{1,6})(?::([0-9]{1,6}))?")


def decide_processes(
    settings: Settings, chosen: ChosenDevices, *, by_slurm: bool = False
) -> Decision[Processes]:
    """Return the processes of this node and their rendezvous.

    Args:
        settings: The user's settings.
        chosen: The devices.
        by_slurm: True if SLURM starts each of the processes.

    Raises:
        FasttrainError: ``nproc-devices``, ``nodes-syntax``, ``nodes-rdzv``, ``nodes-master`` or
            ``node-rank``.
    """
    per_node, reason, source = _per_node(settings, chosen)
    fewest, most = _nodes(settings.nodes.value)
    if settings.rdzv_endpoint.value is not None:
        processes = _elastic(settings, per_node, (fewest, most))
        how = f"rendezvous at {processes.rdzv_endpoint}"
    elif fewest != most:
        raise FasttrainError(
            f"--nodes {settings.nodes.value} needs a rendezvous",
            why="an elastic run has no fixed node 0 to meet at",
            fix="add --rdzv-endpoint HOST:PORT, the same on every node",
            slug="nodes-rdzv",
        )
    else:
        processes = _static(settings, per_node, most)
        how = _static_reason(settings, processes)
    if by_slurm and processes.world_size > 1:  # a single rank needs no rank variables of SLURM
        processes = replace(processes, backend="slurm")
        how = "started by SLURM, which sets their ranks"
    return Decision(processes, f"{reason}; {how}", source)


def _per_node(settings: Settings, chosen: ChosenDevices) -> tuple[int, str, Source]:
    asked, there = settings.nproc_per_node, len(chosen.names)
    if asked.value is None:
        if chosen.explicit:
            return there, f"one per chosen device, {there}", settings.gpus.source
        return 1, "one process, as python would start it", BUILT_IN
    if chosen.kind != "cpu" and asked.value > there:
        raise FasttrainError(
            f"--nproc-per-node {asked.value} is more than {kind_noun(chosen.kind, there)}",
            why="two processes on one device would share its memory and slow each other",
            fix=f"use --nproc-per-node {there}, or name more devices with --gpus",
            slug="nproc-devices",
        )
    return asked.value, f"asked for by {asked.source}", asked.source


def _nodes(text: str) -> tuple[int, int]:
    match = _NODES.fullmatch(text)
    fewest, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= fewest <= most:
        raise FasttrainError(
            f"--nodes {text!r} is neither a number nor MIN:MAX",
            why="it takes a number of nodes from 1, or a range such as 1:4",
            fix="write it like --nodes 2 or --nodes 1:4",
            slug="nodes-syntax",
            exit_code=ExitCode.USAGE,
        )
    return fewest, most


def _elastic(settings: Settings, per_node: int, nodes: tuple[int, int]) -> Processes:
    return Processes(
        backend="torchrun",
        nproc_per_node=per_node,
        min_nodes=nodes[0],
        max_nodes=nodes[1],
        rdzv_backend=settings.rdzv_backend.value,
        rdzv_endpoint=settings.rdzv_endpoint.value or "",
        # All nodes must use the same id, so it can't be generated; "none" is torchrun's default.
        rdzv_id=settings.rdzv_id.value or "none",
        rdzv_conf=settings.rdzv_conf.value or "",
        max_restarts=settings.max_restarts.value,
    )


def _static(settings: Settings, per_node: int, nodes: int) -> Processes:
    rank, address = settings.node_rank.value, settings.master_addr.value
    if rank is not None and rank >= nodes:
        raise FasttrainError(
            f"--node-rank {rank} does not exist",
            why=f"there {'is' if nodes == 1 else 'are'} {counted(nodes, 'node')}, ranked from 0",
            fix=f"use a rank from 0 to {nodes - 1}, or more --nodes",
            slug="node-rank",
        )
    restarts = settings.max_restarts.value
    if nodes == 1:
        backend: Backend = "direct" if per_node == 1 else "torchrun"
        return Processes(backend, per_node, max_restarts=restarts)
    if rank is None or not address:
        raise FasttrainError(
            f"--nodes {nodes} needs --node-rank and --master-addr",
            why="in a static run all nodes connect to node 0, and each must know its own rank",
            fix="add --node-rank RANK --master-addr HOST on each node, or use --rdzv-endpoint",
            slug="nodes-master",
        )
    return Processes(
        backend="torchrun",
        nproc_per_node=per_node,
        min_nodes=nodes,
        max_nodes=nodes,
        node_rank=rank,
        master_addr=address,
        master_port=settings.master_port.value or MASTER_PORT,
        max_restarts=restarts,
    )


def _static_reason(settings: Settings, processes: Processes) -> str:
    if processes.backend == "direct":
        return "started directly"
    if processes.max_nodes == 1:
        return "by torchrun, which takes a free port on loopback"
    port = "asked for" if settings.master_port.value else "torchrun's default"
    return f"node 0 at {processes.master_addr}, port {processes.master_port} ({port})"


# Decides whether DataLoaders that read by themselves get worker processes.


def decide_loader_workers(settings: Settings) -> Decision[int] | None:
    """Return the worker processes of a DataLoader that has none; None to leave it so.

    Raises:
        FasttrainError: ``workers-snapshot`` with snapshots; ``workers-per-rank`` where ranks deal
            out the batches.
    """
    setting = settings.loader_workers
    if not setting.value:
        return None
    if settings.batch.value == "per-rank":
        raise FasttrainError(
            f"{setting.source} can't be together with --batch per-rank",
            why="a copy of the sampler chooses what workers read ahead, and the ranks deal it out",
            fix="leave one of the two out, or set num_workers in the script",
            slug="workers-per-rank",
        )
    if settings.preempt.value == "snapshot":
        raise FasttrainError(
            f"{setting.source} can't be together with --preempt snapshot",
            why="a snapshot has to know how far a DataLoader is, and its workers read ahead",
            fix="leave one of the two out, or set num_workers in the script",
            slug="workers-snapshot",
        )
    return Decision(setting.value, why_asked(setting), setting.source)


# The ranks whose output is shown live.


_LIST = re.compile(r"[0-9]{1,7}(,[0-9]{1,7})*")


def decide_show_ranks(setting: Setting[str], processes: Processes) -> tuple[int, ...] | None:
    """Return distinct global ranks in the given order; None for all.

    Raises:
        FasttrainError: ``show-ranks``.
    """
    text = setting.value.replace(" ", "")
    if text == "all":
        return None
    if not _LIST.fullmatch(text):
        raise FasttrainError(
            f"--show-ranks {setting.value!r} is not a list of ranks",
            why="it takes all, or ranks such as 0,3",
            fix="write it like --show-ranks 0,3",
            slug="show-ranks",
            exit_code=ExitCode.USAGE,
        )
    ranks = tuple(dict.fromkeys(int(word) for word in text.split(",")))
    if max(ranks) >= processes.world_size:
        raise FasttrainError(
            f"--show-ranks {setting.value}: rank {max(ranks)} does not exist",
            why=f"the run has {processes.world_size} ranks, from 0",
            fix="use --show-ranks all, or smaller ranks",
            slug="show-ranks",
        )
    return ranks
