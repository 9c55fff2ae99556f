"""Finds the snapshot that a run resumes from, the same one on all ranks."""

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
from fasttrain.shim.snapshots.errors import log, refuse_mismatch
from fasttrain.shim.snapshots.files import FoundSnapshot, Snapshots, UntrustedError


def identity_of(plan: LaunchPlan) -> dict[str, str]:
    """Return everything in the plan that a run's weights depend on.

    Call it at the start of the run: the script may be edited later, or change its arguments.
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
    """Return the content of the file that runs."""
    if target.kind == "script":
        return Path(cwd, target.name).read_bytes()
    spec = _found(target.name)
    if spec is None or spec.origin is None or not hasattr(spec.loader, "get_data"):
        return target.name.encode()  # nothing to run: `python -m` reports it
    loader: Any = spec.loader
    text: bytes = loader.get_data(spec.origin)  # works for a module in a zip file, too
    return text


def _found(name: str) -> ModuleSpec | None:
    """Return a module's spec without importing its packages, one of which may be half imported."""
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
    """Check that this run's identity equals the snapshot's.

    Raises:
        SystemExit: ``snapshot-mismatch`` if not.
    """
    for name, value in here.items():
        before = then.get(name, "")
        if value == before:
            continue
        if name in ("script", "arguments"):
            refuse_mismatch(f"the {name} changed since the snapshot was taken")
        refuse_mismatch(f"{name} was {before} when the snapshot was taken, and is {value} now")


_FOLDER, _CHOICE = "snapshot/folder", "snapshot/choice"
_NONE = "-"  # the store takes no empty value


def shared_folder(run_dir: Path, ranks: Ranks | None) -> Path:
    """Return rank 0's run directory; each node's launcher may have its own."""
    return Path(_of_rank_0(ranks, _FOLDER, str(run_dir)))


def find(plan: LaunchPlan, snapshots: Snapshots, ranks: Ranks | None) -> FoundSnapshot | None:
    """Return the snapshot to resume from; None if the run starts from the beginning.

    Raises:
        SystemExit: ``snapshot-mismatch`` if it is another run's, ``snapshot-missing`` if one is
            required and there is none, ``snapshot-damaged`` if all are damaged,
            ``snapshot-untrusted`` if others could have written it.
    """
    # The plan doesn't know of restarts by the launcher or torchrun's agent.
    if plan.preempt.value.resume == "no" and not restart_count(os.environ):
        return None
    try:
        first = ranks is None or ranks.rank == 0
        found = _newest(plan, snapshots) if first else None
        choice = _of_rank_0(ranks, _CHOICE, found.path.name if found else _NONE)
        if choice != _NONE and found is None:
            found = snapshots.named(choice)
    except UntrustedError as error:
        refuse(untrusted(error))
    except (OSError, CodecError) as error:
        refuse(
            _none(
                plan, f"this rank can't read the snapshot that rank 0 has found: {error}", "missing"
            )
        )
    if found is not None:
        compare(identity_of(plan), found.manifest.identity)
    return found


def _newest(plan: LaunchPlan, snapshots: Snapshots) -> FoundSnapshot | None:
    found = snapshots.newest()
    if found is None and snapshots.any:
        refuse(_none(plan, "all of its snapshots are damaged", "damaged"))
    if found is None and plan.preempt.value.resume == "required":
        refuse(_none(plan, "no snapshot was taken in it", "missing"))
    if found is None:
        log(NONE_YET)
    return found


def _of_rank_0(ranks: Ranks | None, key: str, value: str) -> str:
    """Return rank 0's value on all ranks."""
    if ranks is None or ranks.world_size == 1:
        return value
    if ranks.rank == 0:
        ranks.store.set(key, value)
        return value
    with ranks.waits():
        published: bytes = ranks.store.get(key)
    return published.decode()


def _none(plan: LaunchPlan, why: str, slug: str) -> FasttrainError:
    return FasttrainError(
        f"there is no snapshot to resume from in {plan.run_dir}",
        why=why,
        fix="start the run without --resume, in a new run directory",
        slug=f"snapshot-{slug}",
    )


def untrusted(error: UntrustedError) -> FasttrainError:
    """Return the error for a folder into which others can write."""
    return FasttrainError(
        "the snapshots of this run can't be trusted",
        why=f"{error}, and a snapshot decides everything about the run that resumes from it",
        fix="make it your own with chown and chmod go-w, or use another run directory",
        slug="snapshot-untrusted",
    )
