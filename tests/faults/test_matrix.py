"""Whatever happens to a run, wherever: its exit code, its card, its receipt, and nothing is left.

``pytest -m faults`` runs the whole matrix and prints it as a table; otherwise each cause is met
once.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from fasttrain.launch.crash.judge import AGENT_DIED
from fasttrain.model.codec import loads
from fasttrain.model.crash import CRASH_FILE, Crash
from fasttrain.model.hang import HANG_FILE, Hang
from fasttrain.model.outcome import RankReport, Receipt, State
from support.fault_matrix import CAUSES, IN_A_STEP, LEVERS, PLACES, cells
from support.observed_run import ObservedRun, can_mount, wait_for

pytestmark = pytest.mark.faults

HERE = Path(__file__).parent
CELLS = tuple(cells())
PATIENCE_S = 240.0  # to compile on a busy machine


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test for each cell."""
    if "cell" in metafunc.fixturenames:
        full = metafunc.config.getoption("rounds") == "full"
        first = {cell.cause: cell for cell in reversed(CELLS)}
        metafunc.parametrize("cell", CELLS if full else [*reversed(first.values())], ids=str)


@pytest.fixture(scope="session")
def cached(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]) -> dict[str, str]:
    """An environment with a cache that all runs share, and no others: the first one fills it."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in environ:
        base = base.parent
    return {**environ, "XDG_CACHE_HOME": str(base / "faults-cache")}


def test_cell(
    cell: Any, tmp_path: Path, cached: dict[str, str], memory_group: Any, record_property: Any
) -> None:
    wrong = list(problems(cell, tmp_path, cached, memory_group))
    verdict = f"{cell.place}: {'; '.join(wrong) or 'ok'}"
    record_property("table", ("fault matrix", cell.cause.name, cell.column, verdict))
    assert not wrong, (tmp_path / "said").read_text()


def problems(cell: Any, folder: Path, environ: dict[str, str], memory_group: Any) -> Iterator[str]:
    """Make the run of a cell, and tell what is not as it should be."""
    if cell.cause.mount != "folder" and not can_mount():
        pytest.skip("no process here can have mounts of its own")
    limit = cell.cause.memory_bytes
    limited = {"preexec_fn": memory_group(limit)} if limit else {}
    run = ObservedRun(folder, argv(cell), environ, cell.cause.mount, **limited)
    try:
        if cell.cause.send:
            name, target = cell.cause.send
            assert wait_for((folder / "here").exists, PATIENCE_S), run.said
            run.victim(target).send_signal(getattr(signal, name))
        code = run.launcher.wait(PATIENCE_S)
        if code != cell.cause.code:
            yield f"exit code {code}"
        if left := run.left():
            yield f"left: {left}"
        yield from told_wrongly(cell, run.run_dir)
    finally:
        run.end()


def argv(cell: Any) -> list[str]:
    several = ("--nproc-per-node", "2") if cell.ranks == 2 else ()
    options = (*several, "--device", "cpu", *LEVERS[cell.levers], *cell.cause.options)
    rank = str(cell.rank) if cell.ranks == 2 else "-"
    program = HERE / "programs" / cell.cause.program
    words = (cell.cause.what, cell.place, rank)
    return [sys.executable, "-m", "fasttrain", "run", str(program), *options, "--", *words]


def told_wrongly(cell: Any, run_dir: Path) -> Iterator[str]:
    """Tell what the files of a run's directory have wrong."""
    crash = parsed(Crash, run_dir / CRASH_FILE)
    told = (crash.cause, crash.exit_code) if crash else ("", 0)
    expected = (cell.slug, cell.cause.code if cell.slug else 0)
    if told != expected:
        yield f"told {told} and not {expected}"
    if crash and cell.first not in (None, crash.rank):
        yield f"rank {crash.rank} first"
    reports = tuple(parsed(RankReport, path) for path in sorted(run_dir.glob("rank-*.json")))
    if cell.cause.code != -signal.SIGKILL:  # that launcher writes none
        yield from receipt_wrong(cell, parsed(Receipt, run_dir / "receipt.json"), crash, reports)
    for path in run_dir.glob("events-*.jsonl"):
        for line in path.read_text().splitlines():
            json.loads(line)
    if cell.place != "start":
        yield from levers_wrong(cell, reports)
    if cell.cause.hangs:
        yield from hang_wrong(cell, parsed(Hang, run_dir / HANG_FILE))


def receipt_wrong(
    cell: Any, receipt: Receipt, crash: Crash | None, reports: tuple[RankReport, ...]
) -> Iterator[str]:
    if (receipt.exit_code, receipt.crash) != (cell.cause.code, crash):
        yield "its receipt tells something else"
    if not {report.rank for report in reports} <= {report.rank for report in receipt.ranks}:
        yield "its receipt lacks ranks"
    if cell.lost_agent != any(AGENT_DIED in warning for warning in receipt.warnings):
        yield "its receipt tells wrongly of the agent"


def parsed(kind: type[Any], path: Path) -> Any:
    return loads(kind, path.read_bytes()) if path.exists() else None


def levers_wrong(cell: Any, reports: tuple[RankReport, ...]) -> Iterator[str]:
    if len(reports) != cell.ranks:
        yield f"{len(reports)} reports"
    for report in reports:
        ends = {outcome.lever: outcome for outcome in report.outcomes}
        amp, compiled = ends["amp"], ends["compile"]
        if amp.state != (State.OFF if cell.levers == "off" else State.APPLIED):
            yield f"amp {amp.state} on rank {report.rank}"
        applied = (compiled.state, compiled.counts.get("graphs", 0) > 0)
        if applied != (
            (State.APPLIED, True) if "compile" in cell.levers else (State.SKIPPED, False)
        ):
            yield f"compile {compiled.state} on rank {report.rank}"


def hang_wrong(cell: Any, hang: Hang) -> Iterator[str]:
    """Look where the ranks are: the one that sleeps, and any that waits for it."""
    for rank in hang.ranks:
        own = next(one for one in rank.processes if one.role == "rank").threads[0]
        sleeps = any("time.sleep(120)" in frame.source for frame in own)
        if sleeps != (rank.rank == cell.rank):
            yield f"rank {rank.rank} is said to {'sleep' if sleeps else 'wait'}"
    if {rank.rank for rank in hang.ranks} != set(range(cell.ranks)):
        yield "hang.json lacks ranks"


def test_the_matrix_covers_what_it_says() -> None:
    assert len(CELLS) >= 60
    assert len(set(map(str, CELLS))) == len(CELLS)
    met = {(cell.cause, cell.ranks) for cell in CELLS}
    assert met >= {(cause, ranks) for cause in CAUSES for ranks in cause.ranks}
    met = {(cell.cause, cell.levers == "off") for cell in CELLS}
    assert met == set(product(CAUSES, (True, False)))
    met = {(cell.place, cell.ranks) for cell in CELLS}
    assert met >= set(product(PLACES, (1, 2)))
    met = {(cell.place, cell.levers) for cell in CELLS}
    assert met >= set(product(IN_A_STEP, LEVERS))
    assert {(cell.ranks, cell.levers) for cell in CELLS} == set(product((1, 2), LEVERS))
