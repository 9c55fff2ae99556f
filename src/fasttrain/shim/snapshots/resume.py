"""Finds the snapshot that a run is to go on from, the same one for all ranks."""

from __future__ import annotations

import os
from pathlib import Path

from fasttrain.model.attempts import restart_count
from fasttrain.model.codec import CodecError
from fasttrain.model.errors import FasttrainError
from fasttrain.model.plan import LaunchPlan
from fasttrain.shim.data_parallel.ranks import Ranks
from fasttrain.shim.process.refusal import refuse
from fasttrain.shim.snapshots.errors import tell
from fasttrain.shim.snapshots.files import Found, NotOursError, Snapshots
from fasttrain.shim.snapshots.identity import compare, identity_of

_FOLDER, _CHOICE = "snapshot/folder", "snapshot/choice"
_NONE = "-"  # an empty value is none to the store


def shared_folder(run_dir: Path, ranks: Ranks | None) -> Path:
    """Give rank 0's run directory; the launcher of each node may have one of its own."""
    return Path(_of_rank_0(ranks, _FOLDER, str(run_dir)))


def find(plan: LaunchPlan, snapshots: Snapshots, ranks: Ranks | None) -> Found | None:
    """Give the snapshot to go on from; None where the run is to begin at its beginning.

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
        tell("there is no snapshot yet, and the run begins at its beginning")
    return found


def _of_rank_0(ranks: Ranks | None, key: str, value: str) -> str:
    """Give what rank 0 gives here."""
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
    """Give the error for a folder into which others can write."""
    return FasttrainError(
        "the snapshots of this run can't be trusted",
        why=f"{error}, and a run is all that its snapshots say",
        fix="give it to yourself with chown and chmod go-w, or use another run directory",
        slug="snapshot-untrusted",
    )
