"""Perform ``fasttrain slurm``: draft a job; send it, check it, or print it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from fasttrain.cli.console import envelope
from fasttrain.cli.requests import SlurmRequest
from fasttrain.cli.typed import choose_target, resolve_options
from fasttrain.config.environ import read_environ
from fasttrain.hardware.cluster import node_shape
from fasttrain.hardware.host import Host
from fasttrain.launch.preflight import check_target
from fasttrain.launch.start import working_directory
from fasttrain.model.errors import ExitCode
from fasttrain.model.job import SubmittedJob
from fasttrain.slurm.submission import Draft, batch_script, draft, send
from fasttrain.source.read import read_script

if TYPE_CHECKING:
    from fasttrain.slurm.check import Checked

MOST_NODES = 10**6  # more than fasttrain takes for --nodes


def perform(request: SlurmRequest) -> int:
    """Perform the command and return the exit code: with --wait or --follow, the script's."""
    job = _draft(request)
    quiet = job.requests[0].settings.quiet.value
    if request.check:
        return _check(job, read_environ(), as_json=request.json)
    if request.dry_run:
        _print_draft(job, as_json=request.json)
        return 0
    for warning in () if quiet else job.warnings:
        sys.stderr.write(f"fasttrain: warning: {warning}\n")
    sent = send(job)
    stays = request.wait or request.follow
    if request.json and not stays:
        print(envelope("submitted", sent))  # noqa: T201
    elif not quiet:
        _report(sent)
    if stays:
        from fasttrain.cli.jobs import stay

        return stay(sent, read_environ(), show=request.follow, as_json=request.json, quiet=quiet)
    return 0


def _draft(request: SlurmRequest) -> Draft:
    environ, cwd = read_environ(), working_directory()
    wanted = resolve_options(request, environ)
    target = choose_target(request, wanted)
    check_target(target, str(cwd))
    facts = read_script(target, str(cwd), environ)
    partition = wanted.slurm.partition.value or environ.get("SBATCH_PARTITION")
    gpus = wanted.slurm.gpus_per_node.value or 0
    shape = node_shape(Host(environ), partition, gpus)
    if request.check and shape:
        # A draft fails at the first problem. The checks count the nodes themselves, and report
        # all problems together.
        shape = replace(shape, nodes=MOST_NODES)
    return draft(wanted, target, facts, shape, environ)


def _print_draft(job: Draft, *, as_json: bool) -> None:
    script = batch_script(job)
    if as_json:
        data = {"script": script, "parameters": job.parameters, "run_dir": str(job.run_dir)}
        text = envelope("slurm", data) + "\n"
    else:
        rows = "".join(
            f"# {row.name} = {row.value or '-'}: {row.reason} ({row.source})\n"
            for row in job.parameters.rows
        )
        warnings = "".join(f"# warning: {warning}\n" for warning in job.warnings)
        head, _, rest = script.partition("\n")
        text = f"{head}\n{rows}{warnings}{rest}"
    sys.stdout.buffer.write(text.encode(errors="surrogateescape"))
    sys.stdout.flush()


def _report(sent: SubmittedJob) -> None:
    cells = f", {len(sent.cells)} cells" if sent.cells else ""
    sys.stderr.write(
        f"fasttrain: job {sent.job_id} sent{cells}; run directory {sent.run_dir}\n"
        f"fasttrain: fasttrain job logs -f {sent.job_id} follows it,"
        f" fasttrain job cancel {sent.job_id} ends it\n"
    )


def _check(job: Draft, environ: Mapping[str, str], *, as_json: bool) -> int:
    """Print what would fail, and return the exit code: CONTRADICTION if there is an error."""
    from fasttrain.doctor.diagnosis import worst_first
    from fasttrain.slurm.check import check
    from fasttrain.slurm.check_facts import look

    found = check(look(job, environ))
    found = replace(found, findings=worst_first(found.findings))
    if as_json:
        print(envelope("slurm-check", found))  # noqa: T201
    else:
        _print_checked(found)
    return ExitCode.CONTRADICTION if found.broken else 0


def _print_checked(found: Checked) -> None:
    from rich.text import Text

    from fasttrain.cli.cards.diagnosis import below, counted_findings, finding_lines
    from fasttrain.cli.console import stdout_console

    console = stdout_console()
    for warning in found.warnings:
        console.print(Text(f"warning: {warning}", style="yellow"), soft_wrap=True)
    for finding in found.findings:
        console.print(below(finding_lines(finding)))
    if found.start:
        console.print(Text(f"\nsbatch predicts: {found.start}"), soft_wrap=True)
    line = f"\n{counted_findings(found.findings)}; nothing was sent"
    console.print(Text(line, style="bold"), soft_wrap=True)
