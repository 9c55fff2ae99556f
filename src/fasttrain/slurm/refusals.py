"""The errors for SLURM's refusals, each with a fix."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fasttrain.model.errors import ExitCode, FasttrainError


@dataclass(frozen=True, slots=True)
class _Refusal:
    """The words by which a refusal of sbatch is recognised, and its fix."""

    words: re.Pattern[str]
    slug: str
    fix: str


# Source: SLURM 22.05, src/common/slurm_errno.c, whose texts sbatch prints.
_REFUSALS = tuple(
    _Refusal(re.compile(words, re.IGNORECASE), slug, fix)
    for words, slug, fix in (
        ("invalid partition", "slurm-partition", "name one that sinfo lists, with --partition"),
        (
            "invalid account|invalid qos|association",
            "slurm-account",
            "name an account and QOS of yours, as sacctmgr show assoc lists them",
        ),
        (
            "time limit",
            "slurm-limit",
            "ask for less with --time, or name a partition that allows more",
        ),
        (
            "node configuration is not available|node count|cpu count|memory specification",
            "slurm-resources",
            "ask for what a node of the partition has: sinfo -o '%P %D %c %m %G' lists it",
        ),
        ("invalid generic resource|gres", "slurm-resources", "sinfo -o '%P %G' lists the GPUs"),
        ("feature", "slurm-constraint", "sinfo -o '%P %f' lists the features of the nodes"),
        ("reservation", "slurm-reservation", "scontrol show reservation lists them"),
        ("dependency", "slurm-dependency", "name jobs that exist, such as afterok:1234"),
        (
            "unable to contact|connect failure|connection refused|socket timed out|communication",
            "slurm-down",
            "wait until scontrol ping says UP, or ask the cluster's administrators",
        ),
        (
            "access|permission|not permitted",
            "slurm-permission",
            "ask the cluster's administrators",
        ),
    )
)


# The second alternative is the message of ``sbatch --test-only``.
_COMPLAINT = re.compile(r"error:|^allocation failure:", re.IGNORECASE)

# Exit codes of timeout(1) of GNU coreutils after SIGTERM and SIGKILL.
_TIMED_OUT = (124, 137)


def refused(error: Exception, timeout_s: int) -> FasttrainError:
    """Return the error for a submission that failed.

    Args:
        error: submitit's error: its message is sbatch's output, its cause has the exit code.
        timeout_s: Seconds that sbatch had.
    """
    words = sbatch_words(str(error))
    if getattr(error.__cause__, "returncode", None) in _TIMED_OUT:
        return FasttrainError(
            "sbatch gave no answer",
            why=f"it was ended after {timeout_s} s; the controller may be down or overloaded",
            fix="check scontrol ping, and whether squeue --me lists the job, before you send it"
            " again",
            slug="slurm-hangs",
            exit_code=ExitCode.UNAVAILABLE,
        )
    for refusal in _REFUSALS:
        if refusal.words.search(words):
            return _refusal(words, refusal.slug, refusal.fix)
    return _refusal(words, "slurm-refused", "see sbatch(1); --dry-run prints what was sent")


def sbatch_words(said: str) -> str:
    """Return sbatch's own messages, on one line."""
    lines = [line.strip() for line in said.splitlines() if _COMPLAINT.search(line)]
    own = [line for line in lines if line.lower().startswith(("sbatch:", "srun:"))]
    picked = own or lines
    cut = [re.sub(r"^(sbatch|srun): (error: )?|^allocation failure: ", "", line) for line in picked]
    return "; ".join(dict.fromkeys(cut))[:300]


def no_slurm() -> FasttrainError:
    """Return the error for a machine without SLURM."""
    return FasttrainError(
        "there is no SLURM here",
        why="srun and sbatch are not on PATH",
        fix="run this on a login node of the cluster, or load SLURM's module; --dry-run works"
        " everywhere",
        slug="slurm-missing",
        exit_code=ExitCode.UNAVAILABLE,
    )


def down(said: str, job_id: str) -> FasttrainError:
    """Return the error for a controller that doesn't answer."""
    return FasttrainError(
        "SLURM doesn't answer",
        why=said,
        fix=f"the job goes on; fasttrain job wait {job_id} waits for it again",
        slug="slurm-down",
        exit_code=ExitCode.UNAVAILABLE,
    )


def _refusal(words: str, slug: str, fix: str) -> FasttrainError:
    return FasttrainError(
        "SLURM refused the job",
        why=f"sbatch said: {words or 'nothing'}",
        fix=fix,
        slug=slug,
        exit_code=ExitCode.UNAVAILABLE if slug == "slurm-down" else ExitCode.CONTRADICTION,
    )
