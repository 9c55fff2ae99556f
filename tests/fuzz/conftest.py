"""Runs hostile command lines in this process, judges each, and tells how many there were.

``pytest -m faults tests/fuzz`` makes 10,000 of them; without it, 1,500.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import pytest

from fasttrain.cli.app import main
from support.fuzz import seams
from support.fuzz.ground import Ground, problems

HERE = Path(__file__).parent
SEED = 7
FIGURES = ("kind", "lines", "went on", "refused", "exit codes")


class Said(NamedTuple):
    """What one command line came to: its exit code, what it printed, and what is wrong with it."""

    code: int
    out: str
    err: str
    problems: list[str]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests of this folder."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.faults)
            item.add_marker(pytest.mark.timeout(1800))  # all rounds, on a machine that is busy
            # What hypothesis says when it tells of a failure, in whose place it would stand.
            item.add_marker(pytest.mark.filterwarnings("ignore:Generating overly large repr"))


@pytest.fixture(scope="session")
def rounds(request: pytest.FixtureRequest) -> Callable[[int, int], hypothesis.settings]:
    """Have hypothesis make as many examples as were asked for: few, or all of the 10,000."""
    asked = request.config.getoption("rounds")
    full = (asked or ("full" if request.config.option.markexpr == "faults" else "few")) == "full"

    def choose(few: int, all_of_them: int) -> Callable[[Any], Any]:
        settings = hypothesis.settings(
            max_examples=all_of_them if full else few,
            deadline=None,
            database=None,
            phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        return lambda test: hypothesis.seed(SEED)(settings(test))

    return choose


@pytest.fixture
def figures(record_property: Any, request: pytest.FixtureRequest) -> Iterator[Counter[int]]:
    """Count the exit codes of a test, for the table at the end."""
    codes: Counter[int] = Counter()
    yield codes
    told = ", ".join(f"{code}: {times}" for code, times in sorted(codes.items()))
    kind = request.node.name.removeprefix("test_")
    lines = codes.total()
    went_on = codes[0] + codes[1]
    record_property("fuzz", (kind, str(lines), str(went_on), str(lines - went_on), told))


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Return a private place."""
    made = Ground(tmp_path_factory.mktemp("fuzz"))
    yield made
    for path in made.root.rglob("*"):  # what pytest could not take away for another user
        if path.is_dir():
            path.chmod(0o700)


@pytest.fixture(scope="module")
def recorder() -> Iterator[Any]:
    """Start nothing but stand-ins."""
    with pytest.MonkeyPatch.context() as patch:
        yield seams.install(patch)


@pytest.fixture
def say(ground: Any, recorder: Any) -> Iterator[Callable[..., Said]]:
    """Run one command line in this process, in the private place and with a time limit."""
    thread = threading.get_ident()
    with seams.watchdog(lambda: signal.pthread_kill(thread, signal.SIGINT)) as late:

        def run(
            words: list[str],
            environ: dict[str, str] | None = None,
            place: str = "work",
            encoding: str = "utf-8",
        ) -> Said:
            recorder.started, recorder.problems = [], []
            before, had = ground.look(), _children()  # those of other tests of this process
            late()
            with _as_called({**ground.environ(), **(environ or {})}, encoding) as (out, err):
                code = _in_place(ground.root / place, words)
            told = [_text(stream) for stream in (out, err)]
            found = problems(code, *told, started=bool(recorder.started))
            found += [*recorder.problems, *late()]
            found += [f"written: {path}" for path in ground.stray(before)]
            if left := _children() - had:
                found.append(f"left behind: {left}")
            return Said(code, *told, found)

        yield run


def _children() -> set[str]:
    """Return the numbers of this thread's child processes."""
    return set(Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split())


def _in_place(folder: Path, words: list[str]) -> int:
    if folder.name == "gone":
        folder.mkdir()
    with contextlib.chdir(folder):
        if folder.name == "gone":
            folder.rmdir()
        try:
            return main(words)
        finally:
            os.chdir(folder.parent)


@contextlib.contextmanager
def _as_called(environ: dict[str, str], encoding: str) -> Iterator[tuple[Any, Any]]:
    """Have this process look as one that was called anew."""
    before, mask = dict(os.environ), signal.pthread_sigmask(signal.SIG_BLOCK, [])
    out = io.TextIOWrapper(io.BytesIO(), encoding)  # strict, as stdout is
    err = io.TextIOWrapper(io.BytesIO(), encoding, errors="backslashreplace", line_buffering=True)
    try:
        os.environ.clear()
        os.environ.update(environ)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            yield out, err
    finally:
        os.environ.clear()
        os.environ.update(before)
        assert signal.pthread_sigmask(signal.SIG_SETMASK, mask) == mask


def _text(stream: io.TextIOWrapper) -> str:
    stream.flush()
    return stream.buffer.getvalue().decode(stream.encoding, "replace")  # type: ignore[attr-defined]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print how many command lines there were of each kind, and what became of them."""
    rows = [
        value
        for reports in terminalreporter.stats.values()
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if name == "fuzz" and report.when == "teardown"
    ]
    if not rows or config.option.markexpr != "faults":
        return
    widths = [max(map(len, column)) for column in zip(FIGURES, *rows, strict=True)]
    for row in (FIGURES, *sorted(rows)):
        terminalreporter.write_line("  ".join(map(str.ljust, row, widths)).rstrip())
    terminalreporter.write_line(f"seed {SEED}")
