"""``fasttrain slurm --check``: from a job that could be sent to what would fail in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rich.text import Text

from fasttrain.cli.cards.findings import below, counted_findings, told
from fasttrain.cli.console import envelope, stdout_console
from fasttrain.doctor.registry import worst_first
from fasttrain.model.errors import ExitCode
from fasttrain.slurm.check.all import Checked, check
from fasttrain.slurm.check.facts import look
from fasttrain.slurm.submission import Draft


def perform_check(job: Draft, environ: Mapping[str, str], *, as_json: bool) -> int:
    """Print what would fail, and give the exit code: 0 where nothing is broken."""
    found = check(look(job, environ))
    found = replace(found, findings=worst_first(found.findings))
    if as_json:
        print(envelope("slurm-check", found))  # noqa: T201
    else:
        _print(found)
    return ExitCode.CONTRADICTION if found.broken else 0


def _print(found: Checked) -> None:
    console = stdout_console()
    for warning in found.warnings:
        console.print(Text(f"warning: {warning}", style="yellow"), soft_wrap=True)
    for finding in found.findings:
        console.print(below(told(finding)))
    if found.start:
        console.print(Text(f"\nsbatch foretells: {found.start}"), soft_wrap=True)
    line = f"\n{counted_findings(found.findings)}; nothing was sent"
    console.print(Text(line, style="bold"), soft_wrap=True)
