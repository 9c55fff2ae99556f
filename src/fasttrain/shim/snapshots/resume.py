"""Finds the snapshot that a run is to go on from, the same one for all ranks."""

from __future__ import annotations

import hashlib
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

import torch

from fasttrain.model.attempts import restart_count
from fasttrain.model.codec import CodecError
from fasttrain.model.errors import FasttrainError
from fasttrain.model.guards import NONE_YET
from fasttrain.model.levers import LEVERS
from fasttrain.model.plan import LaunchPlan, Target
from fasttrain.shim.data_parallel.ranks import Ranks
from fasttrain.shim.process import rank_variables
from fasttrain.shim.process.refusal import refuse
from fasttrain.shim.snapshots.errors import refuse_other, tell
from fasttrain.shim.snapshots.files import Found, NotOursError, Snapshots

# What a run must be like to go on from a snapshot.


def identity_of(plan: LaunchPlan) -> dict[str, str]:
    """Give all that a run's weights follow from, as far as the plan knows it.

    To be asked when the run begins: a script may be edited while it runs, or change its arguments.
    """
    alone = plan.processes.value.backend == "direct"
    return {
        "script": hashlib.sha256(_text(plan.target, plan.cwd)).hexdigest(),
        "arguments": hashlib.sha256("\0".join(sys.argv[1:]).encode()).hexdigest(),
        "number of ranks": "1" if alone else rank_variables.get("WORLD_SIZE", "1"),
        "device": plan.device_kind.value,
        **{
            f"--{name}": row.identity(getattr(plan.levers, name).value)
            for name, row in LEVERS.items()
            if row.identity
        },
        "torch": torch.__version__,
        "fasttrain": plan.fasttrain_version,
    }


def _text(target: Target, cwd: str) -> bytes:
    """Give what is in the file that runs."""
    if target.kind == "script":
        return Path(cwd, target.name).read_bytes()
    spec = _found(target.name)
    if spec is None or spec.origin is None or not hasattr(spec.loader, "get_data"):
        return target.name.encode()  # as `python -m` will say, there is nothing to run
    loader: Any = spec.loader
    text: bytes = loader.get_data(spec.origin)  # of a module in a zip file, too
    return text


def _found(name: str) -> ModuleSpec | None:
    """Return where a module is, importing nothing: a package may be just being imported itself."""
    spec, whole = None, ""
    for part in name.split("."):
        whole = f"{whole}.{part}".lstrip(".")
        path = None if spec is None else spec.submodule_search_locations
        spec = PathFinder.find_spec(whole, path)
        if spec is None:
            return None
    if spec is not None and spec.submodule_search_locations is not None:
        return PathFinder.find_spec(f"{name}.__main__", spec.submodule_search_locations)
    return spec


def compare(here: dict[str, str], then: dict[str, str]) -> None:
    """See that a run is what one was.

    Raises:
        SystemExit: ``snapshot-mismatch`` when it is not.
    """
    for name, value in here.items():
        before = then.get(name, "")
        if value == before:
            continue
        if name in ("script", "arguments"):
            refuse_other(f"the {name} changed since it was taken")
        refuse_other(f"{name} was {before} when it was taken, and is {value} now")


_FOLDER, _CHOICE = "snapshot/folder", "snapshot/choice"
_NONE = "-"  # an empty value is none to the store


def shared_folder(run_dir: Path, ranks: Ranks | None) -> Path:
    """Return rank 0's run directory; the launcher of each node may have one of its own."""
    return Path(_of_rank_0(ranks, _FOLDER, str(run_dir)))


def find(plan: LaunchPlan, snapshots: Snapshots, ranks: Ranks | None) -> Found | None:
    """Return the snapshot to go on from; None where the run is to begin at its beginning.

    Raises:
        SystemExit: ``snapshot-mismatch`` when it is another run's, ``snapshot-missing`` when it
            was asked for and there is none, ``snapshot-damaged`` when none of them is whole,
            ``snapshot-untrusted`` when others could have written it.
    """
    # The launcher or torchrun's agent may have started it anew, behind the plan.
    if plan.preempt.value.resume == "no" and not restart_count(os.environ):
        return None
    try:
        first = ranks is None or ranks.rank == 0
        found = _newest(plan, snapshots) if first else None
        choice = _of_rank_0(ranks, _CHOICE, found.path.name if found else _NONE)
        if choice != _NONE and found is None:
            found = snapshots.named(choice)
    except NotOursError as error:
        refuse(not_ours(error))
    except (OSError, CodecError) as error:
        refuse(_none(plan, f"this rank can't read what rank 0 has found: {error}", "missing"))
    if found is not None:
        compare(identity_of(plan), found.manifest.identity)
    return found


def _newest(plan: LaunchPlan, snapshots: Snapshots) -> Found | None:
    found = snapshots.newest()
    if found is None and snapshots.any:
        refuse(_none(plan, "none of its snapshots is whole", "damaged"))
    if found is None and plan.preempt.value.resume == "required":
        refuse(_none(plan, "no snapshot was taken in it", "missing"))
    if found is None:
        tell(NONE_YET)
    return found


def _of_rank_0(ranks: Ranks | None, key: str, value: str) -> str:
    """Return what rank 0 gives here."""
    if ranks is None or ranks.world_size == 1:
        return value
    if ranks.rank == 0:
        ranks.store.set(key, value)
        return value
    with ranks.waits():
        told: bytes = ranks.store.get(key)
    return told.decode()


def _none(plan: LaunchPlan, why: str, slug: str) -> FasttrainError:
    return FasttrainError(
        f"there is nothing to go on from in {plan.run_dir}",
        why=why,
        fix="start the run without --resume, in a new run directory",
        slug=f"snapshot-{slug}",
    )


def not_ours(error: NotOursError) -> FasttrainError:
    """Return the error for a folder into which others can write."""
    return FasttrainError(
        "the snapshots of this run can't be trusted",
        why=f"{error}, and a run is all that its snapshots say",
        fix="give it to yourself with chown and chmod go-w, or use another run directory",
        slug="snapshot-untrusted",
    )
