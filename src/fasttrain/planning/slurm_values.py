"""Variables with options of sbatch, which override those in a batch script.

Source: sbatch(1), SLURM 22.05, "INPUT ENVIRONMENT VARIABLES". SBATCH_OUTPUT, SBATCH_ERROR and
SBATCH_INPUT are in the program as well, though not in its manual.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from fasttrain.model.decision import Setting, SourceKind
from fasttrain.model.errors import ExitCode, FasttrainError
from fasttrain.model.job import JobParameters

# Checks values of SLURM's options that sbatch would garble, or refuse after a long wait.


# Source: sbatch(1), SLURM 22.05, --time: "minutes", "minutes:seconds", "hours:minutes:seconds",
# "days-hours", "days-hours:minutes" and "days-hours:minutes:seconds".
_MINUTES = re.compile(r"(\d{1,9})(?::(\d{1,9}))?", re.ASCII)
_HOURS = re.compile(r"(\d{1,9}):(\d{1,9}):(\d{1,9})", re.ASCII)
_DAYS = re.compile(r"(\d{1,9})-(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?", re.ASCII)
_UNLIMITED = frozenset({"infinite", "unlimited", "-1"})

_SIGNAL = re.compile(r"(?:SIG)?(USR1|USR2)(?:@(\d{1,5}))?", re.ASCII)
LEAD_S = 90
# Source: sbatch(1), SLURM 22.05, --signal: "sig_time ... must have an integer value between 0 and
# 65535"; the signal may come up to 60 seconds earlier.
MOST_LEAD_S = 65535

# Largest number of cells of a sweep.
# Source: slurm.conf(5), SLURM 22.05, MaxArraySize: by default 1001, one more than the elements of
# an array.
MOST_CELLS = 1000

# sbatch drops a backslash, and expands these in the names of its logs.
# Source: sbatch(1), SLURM 22.05, "filename pattern".
_PATTERN = re.compile(r"\\|%(?:%|[0-9]*[AaJjNnstuxb])")


def time_min(setting: Setting[str | None]) -> int | None:
    """Return a time limit in minutes, rounded up; None for the partition's limit.

    Raises:
        FasttrainError: ``slurm-time`` for a text in none of SLURM's forms.
    """
    text = setting.value
    if text is None:
        return None
    if text.lower() in _UNLIMITED:
        raise _time_error(setting, "the job would wait for a partition without a time limit")
    if found := _HOURS.fullmatch(text):
        days, (hours, minutes, seconds) = 0, map(int, found.groups())
    elif found := _DAYS.fullmatch(text):
        days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    elif found := _MINUTES.fullmatch(text):
        days, hours, minutes, seconds = 0, 0, int(found[1]), int(found[2] or 0)
    else:
        raise _time_error(setting, "it is in none of SLURM's forms")
    total = days * 24 * 60 + hours * 60 + minutes + (seconds + 59) // 60
    if total == 0:
        raise _time_error(setting, "SLURM treats 0 as no limit at all")
    return total


def _time_error(setting: Setting[str | None], why: str) -> FasttrainError:
    return FasttrainError(
        f"{setting.source} can't be {setting.value!r}",
        why=why,
        fix="write it as minutes, HH:MM:SS or DAYS-HH:MM:SS, such as --time 4:00:00",
        slug="slurm-time",
        exit_code=ExitCode.USAGE if setting.source.kind is SourceKind.FLAG else _CONTRADICTION,
    )


_CONTRADICTION = ExitCode.CONTRADICTION


def signal_and_lead(setting: Setting[str]) -> tuple[str, int]:
    """Return the name of the warning signal, and its seconds before the end of the job.

    Raises:
        FasttrainError: ``slurm-signal`` for another signal or form.
    """
    found = _SIGNAL.fullmatch(setting.value)
    lead_s = int(found[2] or LEAD_S) if found else 0
    if found is None or lead_s > MOST_LEAD_S:
        raise FasttrainError(
            f"{setting.source} can't be {setting.value!r}",
            why=f"it takes USR1 or USR2, and how many seconds before the end, up to {MOST_LEAD_S}",
            fix="write it like --signal USR2@120",
            slug="slurm-signal",
            exit_code=ExitCode.USAGE if setting.source.kind is SourceKind.FLAG else _CONTRADICTION,
        )
    return found[1], lead_s


def plain(name: str, value: str) -> str:
    """Return a value for a line of the batch script, unchanged.

    Raises:
        FasttrainError: ``slurm-value`` if sbatch would read another value.
    """
    if value.isprintable() and "\\" not in value and value.strip():
        return value
    why = "it has a line break or another control character, on which sbatch fails"
    if "\\" in value:
        why = "sbatch drops a backslash"
    raise FasttrainError(
        f"{name} can't be {value!r}",
        why=why if value.strip() else "it is empty",
        fix="use letters, digits, spaces and punctuation on one line",
        slug="slurm-value",
    )


def check_folder(path: str) -> None:
    """Check that SLURM uses a path for its logs as it is.

    Raises:
        FasttrainError: ``slurm-folder`` if not; the job would fail without any output.
    """
    found = _PATTERN.search(path)
    if found is None and path.isprintable():
        return
    part = found[0] if found else "a control character"
    raise FasttrainError(
        f"the run directory {path!r} can't hold SLURM's logs",
        why=f"sbatch changes {part} in a path, and the job would fail without output",
        fix="choose another with --run-dir, or start from another folder",
        slug="slurm-folder",
    )


# Variables with options of sbatch, which override those in a batch script.


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
