"""Runs a script as several ranks that are forks: what ranks do, without launcher and agent.

Each rank is the worker's own entry with a plan as the command makes it, and meets the others at a
store as torchrun's agent keeps one. Starting them takes a tenth of a second, and the real command
several. Whatever tests how ranks are started or ended, or what the launcher makes of their output,
starts the real command.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from fasttrain.config.resolve import resolve
from fasttrain.hardware.machine_file import read_machine
from fasttrain.launch.node_run import Ended as EndedRun
from fasttrain.launch.receipts import gather
from fasttrain.launch.run_node import compose
from fasttrain.model.codec import dumps
from fasttrain.model.plan import Invocation, LaunchPlan, Target
from fasttrain.model.tuning import Tuning
from fasttrain.planning.plan import make_plan
from fasttrain.source.read import read_script
from support.zygote import TIMEOUT_S, Ended, Zygote

MACHINE = Path(__file__).parents[1] / "data/machines/cpu-laptop.json"
_groups = itertools.count(1)


@dataclass(frozen=True)
class Ranks:
    """What came of a run.

    Attributes:
        returncode: Of the first rank that failed; 0 if none has.
        stdout: What the shown ranks printed, as the launcher shows it, but rank by rank.
        stderr: What rank 0 said there.
    """

    returncode: int
    stdout: str
    stderr: str


def run_ranks(
    zygote: Zygote,
    cwd: Path,
    script: Path,
    *args: str,
    ranks: int,
    options: tuple[str, ...],
    environ: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
    tuning: Tuning | None = None,
) -> Ranks:
    """Run a script in a directory that exists, with its run directory ``run`` in it."""
    run_dir = cwd / "run"
    run_dir.mkdir()
    plan = plan_of_ranks(cwd, run_dir, script, args, ("--nproc-per-node", str(ranks), *options))
    plan = replace(plan, tuning=tuning)
    path = run_dir / "plan.json"
    path.write_text(dumps(plan))
    group = f"ranks-{next(_groups)}"
    of_all = {**compose(environ or {}, plan.environment), "MASTER_ADDR": "127.0.0.1"}
    of_all |= {"MASTER_PORT": zygote.port_of_store(cwd, group, timeout_s)}
    of_all["TORCHELASTIC_RUN_ID"] = group
    forks = [
        zygote.worker(
            path, script, *args, cwd=cwd, group=group, timeout_s=timeout_s,
            environ={**of_all, **_place(rank, ranks)},
        )
        for rank in range(ranks)
    ]  # fmt: skip
    ends = [zygote.wait(fork) for fork in forks]
    # The others are killed when one has failed.
    failed = sorted((end.returncode for end in ends if end.returncode), reverse=True)
    code = failed[0] if failed else 0
    gather(plan, EndedRun(exit_code=code, wall_s=0.0))
    return Ranks(code, _shown(plan, ends), ends[0].stderr)


def plan_of_ranks(
    cwd: Path, run_dir: Path, script: Path, args: tuple[str, ...], options: tuple[str, ...]
) -> LaunchPlan:
    """Return the plan of ``fasttrain run --device cpu`` with these options."""
    flags = {"device": "cpu", **_flags(options)}
    preset = flags.pop("preset", None)
    settings = resolve(flags, environ={}, cwd=cwd, preset=preset).settings
    target = Target("script", str(script), args)
    invocation = Invocation(
        target=target, cwd=str(cwd), python=sys.executable, shim="", agent="", environ={},
        run_id="forked", run_dir=str(run_dir), cache_dir=str(run_dir), version="0",
        facts=read_script(target, str(cwd), {}),
    )  # fmt: skip
    return make_plan(settings, read_machine(MACHINE), invocation)


def _flags(options: tuple[str, ...]) -> dict[str, str]:
    """Return options that all have a value by name."""
    pairs = zip(options[::2], options[1::2], strict=True)
    return {name.removeprefix("--").replace("-", "_"): value for name, value in pairs}


def _place(rank: int, ranks: int) -> dict[str, str]:
    """Return the variables by which torchrun gives a rank its place."""
    both = {prefix: str(rank) for prefix in ("RANK", "LOCAL_RANK", "ROLE_RANK")}
    sizes = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE")
    return {
        **both, **dict.fromkeys(sizes, str(ranks)), "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default", "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
    }  # fmt: skip


def _shown(plan: LaunchPlan, ends: list[Ended]) -> str:
    """Return the output of rank 0, and the marked lines of others that are shown."""
    others = range(1, len(ends)) if plan.show_ranks is None else plan.show_ranks
    logs = {rank: Path(plan.run_dir, f"rank-{rank}.log") for rank in others if rank}
    lines = [
        f"[rank {rank}] {line}\n"
        for rank, log in logs.items()
        for line in log.read_text().splitlines()
    ]
    return "".join([ends[0].stdout, *lines])
