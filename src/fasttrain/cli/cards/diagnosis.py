"""A diagnosis for people: in 80 columns, and as Markdown for a bug tracker."""

from __future__ import annotations

import getpass
import platform
import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fasttrain import __version__
from fasttrain.cli.cards.receipt import WORDS
from fasttrain.cli.console import stdout_console
from fasttrain.doctor.check import spans
from fasttrain.doctor.diagnosis import Diagnosis
from fasttrain.model.errors import size
from fasttrain.model.machine import (
    Cpu,
    Device,
    DeviceState,
    Examination,
    Finding,
    Machine,
    Severity,
)
from fasttrain.model.outcome import State

WIDTH = 80
_WORDS = WORDS | {State.ARMED: "seen in a run"}  # the source alone can't tell


def print_diagnosis(diagnosis: Diagnosis) -> None:
    """Print a diagnosis to stdout."""
    console = stdout_console(WIDTH)
    seen = diagnosis.examination
    for line in _head(seen):
        console.print(Text(line))
    if diagnosis.python:
        console.print(Text(f"for {diagnosis.python}"), soft_wrap=True)
    console.print(_devices(seen))
    if diagnosis.levers:
        console.print(Text(f"\nwhat fasttrain run {diagnosis.script} would do:"))
        console.print(_levers(diagnosis))
    if diagnosis.measurements:
        console.print(below(_measurements(diagnosis)))
    for verdict in diagnosis.verdicts:
        style = "green" if verdict.fine else "yellow"
        console.print(Text(f"{verdict.device}: {verdict.text}", style=style))
    for finding in diagnosis.findings:
        console.print(below(finding_lines(finding)))
    console.print(Text(f"\n{_summary(diagnosis)}", style="bold"))
    console.print(Text(f"  {diagnosis.command}", style="green"), soft_wrap=True)
    console.print(Padding(Text(f"({diagnosis.why})"), (0, 0, 0, 2), expand=False))


def _head(seen: Examination) -> Iterator[str]:
    machine = seen.machine
    parts = [machine.hostname, machine.system, f"Python {machine.python}"]
    yield ", ".join(part for part in parts if part)
    yield torch_line(seen)
    if machine.driver:
        yield f"driver {machine.driver}"
    if seen.cluster.version:
        names = ", ".join(partition.name for partition in seen.cluster.partitions)
        yield f"SLURM {seen.cluster.version}" + (f" with {names}" if names else "")


def torch_line(seen: Examination) -> str:
    """Return torch's version and what it was built with, in one line."""
    torch, trial = seen.machine.torch, seen.torch
    if not torch.version:
        return "no torch"
    build = f"{torch.build} {torch.build_version}".strip()
    parts = [f"torch {torch.version} ({build})"]
    if trial is not None:
        named = (("cuDNN", trial.cudnn), ("NCCL", trial.nccl), ("triton", trial.triton))
        parts += [f"{name} {version}" for name, version in named if version]
        parts += [f"torch.compile {trial.compiled.state}"]
    return ", ".join(parts)


def device_rows(seen: Examination) -> Iterator[tuple[str, ...]]:
    """Yield rows of device, name, memory, precisions and state; the CPU comes last.

    Neighbours that differ only in their index share a row.
    """
    states = {(state.kind, state.index, state.uuid): state for state in seen.devices}
    rows = [
        (device, _cells(device, states.get((device.kind, device.index, device.uuid))))
        for device in seen.machine.devices
    ]
    for (kind, cells), group in groupby(rows, key=lambda row: (row[0].kind, row[1])):
        members = [device.index for device, _ in group]
        number = f" ({len(members)})" if len(members) > 1 else ""
        yield (f"{kind} {spans(members)}{number}", *cells)
    yield _cpu_row(seen.machine)


def _cells(device: Device, state: DeviceState | None) -> tuple[str, ...]:
    precisions = [name for name in ("bf16", "fp16", "tf32") if getattr(device, name)]
    memory = _memory(device, state)
    return (_named(device), memory, " ".join(precisions) or "fp32", _state(state))


def _named(device: Device) -> str:
    return f"{device.name} ({device.capability})" if device.kind == "cuda" else device.name


def _memory(device: Device, state: DeviceState | None) -> str:
    total = size(device.memory_bytes) if device.memory_bytes else "?"
    used = state.memory_used_bytes if state is not None else None
    return total if used is None else f"{size(used)} of {total}"


def _state(state: DeviceState | None) -> str:
    if state is None:
        return ""
    parts = [] if state.health == "OK" else [state.health]
    parts += [_throttled(state, reason) for reason in state.throttled]
    computing = sum(not process.display for process in state.processes)
    parts += [f"{computing} process{'' if computing == 1 else 'es'}"] if computing else []
    parts += ["display"] if computing < len(state.processes) else []
    return ", ".join(parts) or "free"


def _throttled(state: DeviceState, reason: str) -> str:
    hot = reason == "thermal" and state.temperature_c is not None
    return f"throttled: {reason}" + (f" ({state.temperature_c:.0f} °C)" if hot else "")


def _cpu_row(machine: Machine) -> tuple[str, ...]:
    cpu: Cpu = machine.cpu
    memory = size(cpu.memory_bytes) if cpu.memory_bytes else "?"
    return ("cpu", cpu.model, memory, "bf16" if cpu.bf16 else "fp32", _cores(cpu))


def _cores(cpu: Cpu) -> str:
    return f"{cpu.cores} core{'' if cpu.cores == 1 else 's'}"


def _devices(seen: Examination) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("device", "name", "memory", "precision", "state"):
        table.add_column(title, overflow="fold")
    for row in device_rows(seen):
        table.add_row(*(Text(cell) for cell in row))
    return table


def lever_rows(diagnosis: Diagnosis) -> Iterator[tuple[str, ...]]:
    """Yield rows of lever, value, expected outcome, and the reason with its place."""
    for line in diagnosis.levers:
        why = f"{line.why} ({line.where})" if line.where else line.why
        yield (line.lever, line.value, _WORDS[line.verdict], why)


def _levers(diagnosis: Diagnosis) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("lever", "value", "here", "why"):
        table.add_column(title, overflow="fold")
    for row in lever_rows(diagnosis):
        table.add_row(*map(Text, row))
    return table


def measured_rows(diagnosis: Diagnosis) -> Iterator[tuple[str, ...]]:
    """Yield rows of what was measured, device, value, and the data sheet's value."""
    for m in diagnosis.measurements:
        value = m.problem or f"{m.value:.4g} {m.unit}"
        yield (m.what, m.device, value, f"{m.expected:g} {m.unit}" if m.expected else "")


def _measurements(diagnosis: Diagnosis) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("measured", "device", "value", "data sheet"):
        table.add_column(title, overflow="fold")
    for row in measured_rows(diagnosis):
        table.add_row(*map(Text, row))
    return table


def _summary(diagnosis: Diagnosis) -> str:
    return f"{counted_findings(diagnosis.findings)}; to train here:"


STYLES: dict[Severity, str] = {"error": "bold red", "warning": "yellow", "hint": "cyan"}


def finding_lines(finding: Finding) -> Table:
    """Return a finding's three lines, with hanging indents."""
    table = Table.grid(padding=(0, 1))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    where = f"{finding.where}: " if finding.where else ""
    head = Text(f"{finding.severity}:", style=STYLES[finding.severity])
    table.add_row(head, Text(f"{where}{finding.what}"))
    table.add_row("why:", Text(finding.why))
    fix = Text(finding.fix)
    table.add_row("fix:", fix.append(f"  [{finding.check}]", style="dim"))
    return table


def below(table: Table) -> Group:
    """Return a table after an empty line; rich's own padding would fill that line with blanks."""
    return Group("", table)


def counted_findings(findings: Sequence[Finding]) -> str:
    """Return the number of findings of each severity, in words."""
    counts = {s: sum(f.severity == s for f in findings) for s in STYLES}
    parts = [f"{n} {s}{'' if n == 1 else 's'}" for s, n in counts.items() if n]
    return ", ".join(parts) if parts else "nothing is wrong"


def markdown(diagnosis: Diagnosis) -> str:
    """Return a report in Markdown, with the user's name, home and machine masked."""
    return masked(
        "\n".join(_markdown_lines(diagnosis)) + "\n", diagnosis.examination.machine.hostname
    )


def masked(text: str, hostname: str) -> str:
    """Return a text with the user's home directory and name and the machine's name masked."""
    text = text.replace(str(Path.home()), "~")
    names = [(_user(), "USER"), (hostname, "HOST"), (platform.node(), "HOST")]
    for name, mask in names:
        if len(name) > 2:  # a shorter one is a part of many texts
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", mask, text)
    return text


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a user ID without a name, as in many containers
        return ""


def _markdown_lines(diagnosis: Diagnosis) -> Iterator[str]:
    seen = diagnosis.examination
    machine = seen.machine
    yield f"### fasttrain {__version__} doctor"
    yield ""
    yield f"- {machine.system}, kernel {seen.host.kernel or '?'}, Python {machine.python}"
    yield f"- {torch_line(seen)}" + (f", for {diagnosis.python}" if diagnosis.python else "")
    yield f"- driver {machine.driver or 'none'}, container {seen.host.container or 'none'}"
    yield ""
    yield from _markdown_table(
        ("device", "name", "memory", "precision", "state"), [*device_rows(seen)]
    )
    if diagnosis.levers:
        yield from _markdown_table(("lever", "value", "here", "why"), [*lever_rows(diagnosis)])
    if diagnosis.measurements:
        yield from _markdown_table(
            ("measured", "device", "value", "data sheet"), [*measured_rows(diagnosis)]
        )
        yield from (f"- {verdict.device}: {verdict.text}" for verdict in diagnosis.verdicts)
    yield from (
        f"- **{f.severity}** `{f.check}`: {f.where and f.where + ': '}{f.what} ({f.why})"
        for f in diagnosis.findings
    )
    if seen.environ:
        yield ""
        yield "```"
        yield from (f"{name}={value}" for name, value in sorted(seen.environ.items()))
        yield "```"


def _markdown_table(titles: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(titles)} |"
    yield f"|{'---|' * len(titles)}"
    for row in rows:
        yield "| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |"
    yield ""
