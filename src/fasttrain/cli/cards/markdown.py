"""A diagnosis as text for a bug tracker, without names of people and machines."""

from __future__ import annotations

import getpass
import platform
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from fasttrain import __version__
from fasttrain.cli.cards.diagnosis import device_rows, lever_rows, measured_rows, torch_line
from fasttrain.doctor.diagnosis import Diagnosis


def markdown(diagnosis: Diagnosis) -> str:
    """Return a report in Markdown; the user's name, home and machine are masked in it."""
    return masked("\n".join(_lines(diagnosis)) + "\n", diagnosis.examination.machine.hostname)


def masked(text: str, hostname: str) -> str:
    """Return a text without the user's home directory and name and without the machine's name."""
    text = text.replace(str(Path.home()), "~")
    names = [(_user(), "USER"), (hostname, "HOST"), (platform.node(), "HOST")]
    for name, mask in names:
        if len(name) > 2:  # a shorter one is in many words
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", mask, text)
    return text


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a number without a name, as in many containers
        return ""


def _lines(diagnosis: Diagnosis) -> Iterator[str]:
    seen = diagnosis.examination
    machine = seen.machine
    yield f"### fasttrain {__version__} doctor"
    yield ""
    yield f"- {machine.system}, kernel {seen.host.kernel or '?'}, Python {machine.python}"
    yield f"- {torch_line(seen)}" + (f", for {diagnosis.python}" if diagnosis.python else "")
    yield f"- driver {machine.driver or 'none'}, container {seen.host.container or 'none'}"
    yield ""
    yield from _table(("device", "name", "memory", "precision", "state"), [*device_rows(seen)])
    if diagnosis.levers:
        yield from _table(("lever", "value", "here", "why"), [*lever_rows(diagnosis)])
    if diagnosis.measurements:
        yield from _table(
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


def _table(titles: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(titles)} |"
    yield f"|{'---|' * len(titles)}"
    for row in rows:
        yield "| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |"
    yield ""
