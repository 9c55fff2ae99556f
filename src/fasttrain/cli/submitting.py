"""From the words of ``fasttrain slurm`` to a job, and from the job to an exit code."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

from fasttrain.cli.console import envelope
from fasttrain.cli.target import choose_target
from fasttrain.cli.typed import CommandLine, resolve_told
from fasttrain.config.environ import read_environ
from fasttrain.hardware.cluster import node_shape
from fasttrain.hardware.host import Host
from fasttrain.launch.preflight import check_target
from fasttrain.launch.start import working_directory
from fasttrain.model.job import SubmittedJob
from fasttrain.slurm.submission import Draft, batch_script, draft, send
from fasttrain.source.read import read_script

MOST_NODES = 10**6  # more than fasttrain takes for --nodes


@dataclass(frozen=True, slots=True)
class SlurmRequest(CommandLine):
    """A command line, parsed.

    Attributes:
        wait: Whether to stay until the job has ended.
        follow: Whether to show its output meanwhile.
        check: Whether to look only for what would fail.
        dry_run: Whether the batch script is only printed.
        json: Whether what is printed is JSON.
    """

    wait: bool
    follow: bool
    check: bool
    dry_run: bool
    json: bool


def perform(request: SlurmRequest) -> int:
    """Do what was asked for and give the exit code."""
    job = _draft(request)
    quiet = job.requests[0].settings.quiet.value
    if request.check:
        from fasttrain.cli.checking import perform_check  # only now: sending needs none of it

        return perform_check(job, read_environ(), as_json=request.json)
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
        _tell(sent)
    if stays:
        from fasttrain.cli.jobs import stay

        return stay(sent, read_environ(), show=request.follow, as_json=request.json, quiet=quiet)
    return 0


def _draft(request: SlurmRequest) -> Draft:
    environ, cwd = read_environ(), working_directory()
    wanted = resolve_told(request, "slurm", environ)
    target = choose_target(request.words, request.behind, wanted, request.starts)
    check_target(target, str(cwd))
    facts = read_script(target, str(cwd), environ)
    partition = wanted.slurm.partition.value or environ.get("SBATCH_PARTITION")
    gpus = wanted.slurm.gpus_per_node.value or 0
    shape = node_shape(Host(environ), partition, gpus)
    if request.check and shape:
        # The checks count the nodes themselves, and tell all that they find together.
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
        told = "".join(f"# warning: {warning}\n" for warning in job.warnings)
        head, _, rest = script.partition("\n")
        text = f"{head}\n{rows}{told}{rest}"
    sys.stdout.buffer.write(text.encode(errors="surrogateescape"))
    sys.stdout.flush()


def _tell(sent: SubmittedJob) -> None:
    cells = f", {len(sent.cells)} cells" if sent.cells else ""
    sys.stderr.write(
        f"fasttrain: job {sent.job_id} sent{cells}; run directory {sent.run_dir}\n"
        f"fasttrain: fasttrain job logs -f {sent.job_id} follows it,"
        f" fasttrain job cancel {sent.job_id} ends it\n"
    )
