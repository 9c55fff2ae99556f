"""Variables with options of sbatch, which override those in a batch script.

Source: sbatch(1), SLURM 22.05, "INPUT ENVIRONMENT VARIABLES". SBATCH_OUTPUT, SBATCH_ERROR and
SBATCH_INPUT are in the program as well, though not in its manual.
"""

from __future__ import annotations

from collections.abc import Mapping

from fasttrain.model.job import JobParameters

PREFIX = "SBATCH_"
# Variables that fasttrain must decide itself, and what each would break. SBATCH_WAIT would make
# sbatch wait for the job.
_OURS = {
    "SBATCH_ARRAY_INX": "a sweep's cells",
    "SBATCH_ERROR": "the run directory",
    "SBATCH_EXPORT": "the job's environment",
    "SBATCH_INPUT": "the job's input",
    "SBATCH_NO_REQUEUE": "--requeue and --max-restarts",
    "SBATCH_OPEN_MODE": "logs that go on after a restart",
    "SBATCH_OUTPUT": "the run directory",
    "SBATCH_REQUEUE": "--requeue and --max-restarts",
    "SBATCH_SIGNAL": "--signal",
    "SBATCH_WAIT": "--wait",
}
# Options whose variables have other names, or that several variables could contradict.
_VARIABLES = {
    "gpus-per-node": (
        "SBATCH_GPUS_PER_NODE", "SBATCH_GPUS", "SBATCH_GPUS_PER_SOCKET", "SBATCH_GPUS_PER_TASK",
    ),
    "mem": ("SBATCH_MEM_PER_NODE", "SBATCH_MEM_PER_CPU", "SBATCH_MEM_PER_GPU"),
    "switches": ("SBATCH_REQ_SWITCH", "SBATCH_WAIT4SWITCH"),
    "time": ("SBATCH_TIMELIMIT",),
}  # fmt: skip


def left_out(parameters: JobParameters, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to hide from sbatch, each with what decides instead.

    Hidden are options that the user has set by a flag or a file, and `_OURS`.
    """
    by_option = {
        name: f"--{option}"
        for option in _asked_for(parameters)
        for name in _VARIABLES.get(option, (PREFIX + option.upper().replace("-", "_"),))
    }
    return {name: what for name, what in (by_option | _OURS).items() if name in environ}


def in_force(parameters: JobParameters, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that sbatch will apply to the job, with their values."""
    without = left_out(parameters, environ)
    return {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith(PREFIX) and name not in without
    }


def contradicting(parameters: JobParameters, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables hidden because fasttrain decides, each with what decides instead."""
    found = left_out(parameters, environ)
    return {name: what for name, what in found.items() if name in _OURS}


def _asked_for(parameters: JobParameters) -> list[str]:
    named = [row.name for row in parameters.rows if row.source.explicit]
    if parameters.submitit.get("exclusive"):
        named.append("exclusive")
    return [*named, *parameters.submitit["additional_parameters"]]
