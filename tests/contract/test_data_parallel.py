"""Scripts that feed themselves by a DataLoader: one process against several ranks.

The ranks must print and save what one process prints and saves.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support.script_runs import (
    LEVERS_OFF,
    Alone,
    assert_same_prints,
    differences,
    forked_ranks,
    with_ranks,
)
from support.thinned import thinned
from support.zygote import Zygote

HERE = Path(__file__).parent
LOADERS = HERE.parent / "scripts/loaders"
pytestmark = pytest.mark.slow


# Steps of all optimizers together, counted by hand from the scripts' loops.
STEPS = {
    "accumulate_three": 4 * 5,  # 13 batches: four steps of three of them, and the last one alone
    "autoencoder_sum": 4 * 7,
    "bucketed_lengths": 4 * 9,
    "gan_latents": 4 * 5 * 2,
    # stops after its eighth epoch: one for each of six batch sizes, and two more of the last
    "growing_batches": 10 + 7 + 5 + 4 + 3 + 3 * 2,
    "last_batch_of_one": 3 * 11,
    "onecycle_by_batch": 3 * 9,
    "semi_supervised": 4 * 7,
    "shuffled_classifier": 3 * 10,
    "stream_dataset": 31,
    "tiny_gpt": 3 * 8,
    "two_heads_dict": 4 * 8,
    "weighted_sampler": 5 * 7,
    "workers_drop_last": 4 * 6,
}
every_script = pytest.mark.parametrize("script", STEPS)
# Those that an ordinary run runs twice, and by the real command.
two_scripts = pytest.mark.parametrize("script", thinned(list(STEPS), 7, 2, left=8))
# Every script with 2 ranks, and every other one with 4.
pairs = pytest.mark.parametrize(
    ("script", "ranks"),
    [
        pytest.param(script, ranks, marks=pytest.mark.matrix if ranks == "4" and i % 2 else ())
        for i, script in enumerate(STEPS)
        for ranks in ("2", "4")
    ],
)


class Runs:
    """The runs of every script, each made once."""

    def __init__(self, base: Path, zygote: Zygote) -> None:
        self.base = base
        self.alone = Alone(zygote)
        self._zygote = zygote
        self._runs: dict[tuple[str, str], Any] = {}

    def __call__(self, name: str, kind: str, fasttrain: Any) -> Any:
        """Return a run of a script: alone, as 2 or 4 forks, or as 2 ranks of the real command."""
        if (name, kind) not in self._runs:
            path, cwd = LOADERS / f"{name}.py", self.base / name / kind
            if kind == "alone":
                made = self.alone(cwd, path)
            elif kind == "command":
                made = with_ranks(fasttrain, cwd, path)
            else:
                ranks = 4 if kind == "4" else 2
                made = forked_ranks(self._zygote, cwd, path, ranks=ranks)
            self._runs[name, kind] = made
        return self._runs[name, kind]


@pytest.fixture(scope="module")
def all_runs(tmp_path_factory: pytest.TempPathFactory, zygote: Zygote) -> Runs:
    return Runs(tmp_path_factory.mktemp("ranks"), zygote)


@pytest.fixture
def runs(all_runs: Runs, script: str, fasttrain: Any) -> Callable[[str], Any]:
    """Return a run of the script by its kind."""
    return lambda kind: all_runs(script, kind, fasttrain)


def losses_closer_than_the_rest(line: str) -> dict[str, float]:
    """Losses have nine digits; other lines have few, of which the last one may be rounded."""
    is_loss = line.startswith(("step ", "final loss "))
    return {"rel": 1e-5, "abs": 0.0} if is_loss else {"rel": 1e-4, "abs": 1e-4}


def assert_same_run(found: Any, alone: Any) -> None:
    assert_same_prints(found.lines(), alone.good.stdout.splitlines(), losses_closer_than_the_rest)
    assert differences(found.saved(), alone.saved()) == []


def test_every_script_is_in_the_table() -> None:
    assert list(STEPS) == sorted(p.stem for p in LOADERS.glob("*.py"))


@pairs
def test_ranks_train_what_one_process_trains(
    script: str, runs: Callable[[str], Any], ranks: str
) -> None:
    assert_same_run(runs(ranks), runs("alone"))


@pairs
def test_the_receipt_counts_what_the_ranks_did(
    script: str, runs: Callable[[str], Any], ranks: str
) -> None:
    strategies = runs(ranks).good.outcomes("strategy")
    assert len(strategies) == int(ranks)
    for strategy in strategies:
        assert strategy["state"] == "applied", strategy
        counts = strategy["counts"]
        assert (counts["ranks"], counts["steps"]) == (int(ranks), STEPS[script])
        assert counts["split calls"] > counts["verified"] > 0
        assert counts.pop("ms of verifying") > 0  # each rank's own
    assert len({str(strategy["counts"]) for strategy in strategies}) == 1


@two_scripts
def test_two_runs_are_the_same_bit_for_bit(script: str, runs: Callable[[str], Any]) -> None:
    assert runs("2").good.stdout == runs("again").good.stdout
    exactly = {"rtol": 0.0, "atol": 0.0}
    assert differences(runs("again").saved(), runs("2").saved(), **exactly) == []


@every_script
def test_rank_0_alone_leaves_files(script: str, runs: Callable[[str], Any]) -> None:
    assert [path.name for path in sorted(runs("2").cwd.iterdir())] == ["model.pt", "run"]


@two_scripts
def test_the_command_trains_what_one_process_trains(
    script: str, runs: Callable[[str], Any]
) -> None:
    assert_same_run(runs("command"), runs("alone"))
    assert [path.name for path in sorted(runs("command").cwd.iterdir())] == ["model.pt", "run"]
    steps = {strategy["counts"]["steps"] for strategy in runs("command").outcomes("strategy")}
    assert steps == {STEPS[script]}


def test_three_ranks_train_what_one_process_trains(
    all_runs: Runs, zygote: Zygote, tmp_path: Path
) -> None:
    """No batch of this script can be divided by 3, and a third is no exact number."""
    path = LOADERS / "shuffled_classifier.py"
    three = forked_ranks(zygote, tmp_path / "three", path, ranks=3)
    assert_same_run(three, all_runs.alone(tmp_path / "alone", path))
    assert three.outcome("strategy")["counts"]["split calls"] > 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("static", marks=pytest.mark.matrix),
        pytest.param("elastic", marks=pytest.mark.full),
    ],
)
def test_two_nodes_train_what_one_process_trains(
    all_runs: Runs, fasttrain: Any, tmp_path: Path, kind: str
) -> None:
    path, port = LOADERS / "last_batch_of_one.py", str(free_port())

    def node(rank: int) -> Any:
        meeting = {
            "static": ("--node-rank", str(rank), "--master-addr", "127.0.0.1",
                       "--master-port", port),
            "elastic": ("--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "together"),
        }[kind]  # fmt: skip
        options = (*LEVERS_OFF, "--nodes", "2", *meeting, "--show-ranks", "0")
        cwd = tmp_path / f"node-{rank}"
        return with_ranks(fasttrain, cwd, path, ranks=1, options=options)

    with ThreadPoolExecutor(2) as pool:
        nodes = list(pool.map(node, range(2)))
    # An elastic rendezvous hands out the ranks as it likes.
    first, second = sorted(nodes, key=lambda run: not run.good.stdout)
    assert_same_run(first, all_runs.alone(tmp_path / "alone", path))
    assert second.stdout == ""
    assert not (second.cwd / "model.pt").exists()
