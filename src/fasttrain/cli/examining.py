"""Perform ``fasttrain doctor``: examine the machine, judge it and a script, print the diagnosis."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from fasttrain.cli.commands.doctor import DoctorRequest
from fasttrain.cli.console import envelope
from fasttrain.cli.running import choose_python, same_syntax
from fasttrain.cli.typed import script_folder
from fasttrain.config.environ import read_environ
from fasttrain.config.resolve import resolve
from fasttrain.doctor.bench import MEASURING_S, Measurement, measure, verdicts
from fasttrain.doctor.diagnosis import (
    CHECKS,
    Diagnosis,
    best_command,
    diagnose,
    usable,
    worst_first,
)
from fasttrain.doctor.script import judge_script
from fasttrain.doctor.script_levers import LeverLine, lever_lines
from fasttrain.hardware.examine import examine
from fasttrain.hardware.interpreter import Locate
from fasttrain.hardware.machine_file import read_examination
from fasttrain.hardware.torch_trial import try_torch
from fasttrain.launch.preflight import check_target
from fasttrain.launch.start import read_invocation, working_directory
from fasttrain.model.errors import ExitCode, FasttrainError
from fasttrain.model.machine import Examination, Finding
from fasttrain.model.places import RUNS_FOLDER
from fasttrain.model.plan import Target
from fasttrain.model.settings import Settings
from fasttrain.planning.plan import make_plan
from fasttrain.planning.processes import ChosenPython
from fasttrain.source.read import read_program


def perform(request: DoctorRequest) -> int:
    """Perform the command and return the exit code: UNAVAILABLE if training can't work here."""
    if request.list_checks:
        width = max(len(check.slug) for check in CHECKS)
        lines = (f"{check.slug:<{width}}  {check.about}" for check in CHECKS)
        sys.stdout.write("\n".join(lines) + "\n")
        return 0
    if request.machine and (request.bench or request.fix or request.python):
        raise _recorded(request.machine)
    environ = read_environ()
    program = _program(request, environ)
    seen = _examination(request, environ, program.python)
    findings = diagnose(seen, only=_slugs(request.only), skip=_slugs(request.skip))
    if request.fix and _mend(seen, findings):  # examine again: the fixes may have helped
        seen = _examination(request, environ, program.python)
        findings = diagnose(seen, only=_slugs(request.only), skip=_slugs(request.skip))
    if not request.only:
        findings = worst_first((*findings, *_unusable_environment(program.python)))
    levers: tuple[LeverLine, ...] = ()
    if request.script:
        levers, of_script = _judge(program, seen, environ)
        findings = worst_first((*findings, *of_script))
    measured = tuple(_bench(seen, environ, program.python)) if request.bench else ()
    command, why = best_command(seen, request.script or "")
    script, python = request.script or "", program.python.other
    if python and request.python:
        command += f" --python {shlex.quote(request.python)}"
    path = python.path if python else ""
    diagnosis = Diagnosis(
        seen, findings, command, why, script, path, levers, measured, verdicts(measured)
    )
    _print(diagnosis, request)
    return ExitCode.UNAVAILABLE if diagnosis.broken else 0


def _slugs(text: str | None) -> tuple[str, ...]:
    return tuple(word.strip() for word in (text or "").split(",") if word.strip())


@dataclass(frozen=True, slots=True)
class _Program:
    """The script to judge, with the options and the Python that a run of it would have."""

    target: Target
    settings: Settings
    python: ChosenPython


def _program(request: DoctorRequest, environ: Mapping[str, str]) -> _Program:
    cwd = working_directory()
    beside = script_folder(request.script, cwd) if request.script else None
    flags = {"python": request.python}
    settings = resolve(flags, environ=environ, cwd=cwd, beside=beside).settings
    target = Target("script", request.script or "", ())
    # A recorded machine has a Python of its own; the one here says nothing about it.
    python = ChosenPython() if request.machine else choose_python(target, settings, environ)
    return _Program(target, settings, python)


def _examination(
    request: DoctorRequest, environ: Mapping[str, str], python: ChosenPython
) -> Examination:
    if request.machine:
        return read_examination(Path(request.machine))
    # One after the other: at the same time, the trial's own use of a device would look like
    # another process's.
    seen = examine(environ, run_root=working_directory() / RUNS_FOLDER, other=python.other)
    if request.quick:
        return seen
    return replace(seen, torch=try_torch(_path(python), environ, devices=_gpus(seen)))


def _path(python: ChosenPython) -> str:
    return python.other.path if python.other else sys.executable


def _gpus(seen: Examination) -> int:
    return sum(device.kind == "cuda" for device in seen.machine.devices)


def _judge(
    program: _Program, seen: Examination, environ: Mapping[str, str]
) -> tuple[tuple[LeverLine, ...], tuple[Finding, ...]]:
    """Return what a run would do with the script on this machine, and the findings about it."""
    cwd = working_directory()
    target, other = program.target, program.python.other
    check_target(target, str(cwd), parsed=same_syntax(other))
    facts, habits = read_program(target, str(cwd), environ, Locate(other) if other else find_spec)
    invocation = read_invocation(target, program.settings, environ, facts)
    plan = make_plan(program.settings, seen.machine, invocation)
    return lever_lines(plan, habits), judge_script(habits, facts, plan, seen.machine)


def _unusable_environment(python: ChosenPython) -> Iterator[Finding]:
    if python.note:
        yield Finding(
            "active-environment",
            "warning",
            python.note,
            why=f"fasttrain run uses {sys.executable} instead, which has other packages",
            fix="install torch there, or name a Python with --python",
        )


def _mend(seen: Examination, findings: tuple[Finding, ...]) -> bool:
    """Fix what can be fixed, and report it on stderr; return True if anything was fixed."""
    found = {finding.check for finding in findings}
    done = [check.mend(seen) for check in CHECKS if check.mend and check.slug in found]
    for text in done:
        sys.stderr.write(f"fasttrain: {text}\n")
    return bool(done)


def _bench(
    seen: Examination, environ: Mapping[str, str], python: ChosenPython
) -> Iterator[Measurement]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from fasttrain.cli.console import stderr_console

    folder = working_directory() / RUNS_FOLDER
    folder = folder if folder.is_dir() else working_directory()
    columns = (TextColumn("measuring {task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=stderr_console(), transient=True) as progress:
        task = progress.add_task("", total=MEASURING_S)
        begun_s = time.monotonic()
        for measurement in measure(_path(python), environ, usable(seen), str(folder)):
            progress.update(
                task, description=measurement.what, completed=time.monotonic() - begun_s
            )
            yield measurement


def _print(diagnosis: Diagnosis, request: DoctorRequest) -> None:
    from fasttrain.cli.cards.diagnosis import markdown, print_diagnosis

    if request.json:
        text = envelope("doctor", diagnosis) + "\n"
    elif request.markdown:
        text = markdown(diagnosis)
    else:
        print_diagnosis(diagnosis)
        return
    sys.stdout.buffer.write(text.encode(errors="surrogateescape"))
    sys.stdout.flush()


def _recorded(file: str) -> FasttrainError:
    return FasttrainError(
        "a recorded machine can only be judged",
        why=f"--machine {file} describes another machine than this one",
        fix="leave out --bench, --fix and --python, or leave out --machine",
        slug="machine-recorded",
        exit_code=ExitCode.USAGE,
    )
