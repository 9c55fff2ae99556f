"""Small programs of a few steps as two ranks: losses, weights, precision, batches, random numbers.

Each program stands in ``data_parallel/`` and says what is special about it.
"""

from __future__ import annotations

import functools
import json
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
from support.zygote import Zygote

HERE = Path(__file__).parent
PROGRAMS = HERE / "data_parallel"
ALL_SHOWN = (*LEVERS_OFF, "--show-ranks", "all")
LOOPS = [
    "retain_graph", "the_same_graph_twice", "list_of_losses", "accumulate_and_clip",
    "gradients_by_inputs", "bare_parameter", "changing_branches", "unfreeze", "lbfgs",
    "arguments_of_any_name", "two_models", "identity", "dry_run",
]  # fmt: skip
GENERATORS = ("torch", "random", "numpy")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, zygote: Zygote) -> Any:
    """Run a program as one process without fasttrain."""
    run, base = Alone(zygote), tmp_path_factory.mktemp("alone")

    @functools.cache
    def start(program: str, *args: str) -> Any:
        return run(base / "-".join((program, *args)), PROGRAMS / f"{program}.py", *args)

    return start


@pytest.fixture
def two_ranks(zygote: Zygote, tmp_path: Path) -> Any:
    """Run a program as two ranks, or as several, which are forks."""

    def start(program: str, *args: str, name: str = "ranks", **how: Any) -> Any:
        path = PROGRAMS / f"{program}.py"
        return forked_ranks(zygote, tmp_path / name, path, *args, **how)

    return start


@pytest.fixture
def two_started_ranks(fasttrain: Any, tmp_path: Path) -> Any:
    """Run a program as two ranks, or as several, by the real command."""

    def start(program: str, *args: str, name: str = "ranks", **how: Any) -> Any:
        path = PROGRAMS / f"{program}.py"
        return with_ranks(fasttrain, tmp_path / name, path, *args, **how)

    return start


def closely(_: str) -> dict[str, float]:
    return {"rel": 1e-5, "abs": 1e-8}


def assert_same_run(found: Any, expected: Any) -> None:
    assert_same_prints(found.lines(), expected.good.stdout.splitlines(), closely)
    assert differences(found.saved(), expected.saved()) == []


def told(lines: list[str], word: str) -> list[list[str]]:
    """Return what stands behind a word, line by line."""
    return [line.split()[1:] for line in lines if line.split()[0] == word]


@pytest.mark.parametrize("loop", LOOPS)
def test_two_ranks_train_what_one_process_trains(alone: Any, two_ranks: Any, loop: str) -> None:
    assert_same_run(two_ranks("loops", loop), alone("loops", loop))


@pytest.mark.parametrize(
    ("where", "ranks"),
    [
        ("outside", 2),
        pytest.param("inside", 3, marks=pytest.mark.matrix),
        pytest.param("outside", 3, marks=pytest.mark.full),
        pytest.param("inside", 2, marks=pytest.mark.full),
    ],
)
def test_losses_of_all_forms_are_those_of_one_process(
    alone: Any, two_ranks: Any, where: str, ranks: int
) -> None:
    run, one = two_ranks("loss_forms", where, ranks=ranks), alone("loss_forms", where)
    assert_same_prints(
        run.good.lines(), one.good.stdout.splitlines(), lambda _: {"rel": 1e-5, "abs": 3e-5}
    )
    strategy = run.outcome("strategy")
    assert strategy["counts"]["split calls"] > 0
    assert bool(strategy["missed"]) == (where == "inside"), strategy["notes"]


def test_a_model_that_is_split_after_its_first_call_is_not_told_as_left_alone(
    alone: Any, two_ranks: Any
) -> None:
    run, one = two_ranks("counts_at_first"), alone("counts_at_first")
    assert_same_prints(run.good.lines(), one.good.stdout.splitlines(), lambda _: {"rel": 1e-4})
    strategy = run.outcome("strategy")
    assert strategy["counts"]["whole calls"] > strategy["counts"]["verified"], "refused at first"
    assert strategy["counts"]["split calls"] > 0
    assert (strategy["notes"], strategy["missed"]) == ([], [])


def test_a_model_that_is_tried_with_one_row_is_split_later(alone: Any, two_ranks: Any) -> None:
    run, one = two_ranks("one_row_at_first"), alone("one_row_at_first")
    assert_same_prints(run.good.lines(), one.good.stdout.splitlines(), lambda _: {"rel": 1e-4})
    strategy = run.outcome("strategy")
    assert strategy["counts"]["split calls"] > 0
    assert (strategy["notes"], strategy["missed"]) == ([], [])


def test_typed_batches_with_names_of_files_are_split(alone: Any, two_ranks: Any) -> None:
    run, one = two_ranks("typed_batches"), alone("typed_batches")
    assert_same_prints(run.good.lines(), one.good.stdout.splitlines(), lambda _: {"rel": 1e-4})
    strategy = run.outcome("strategy")
    # Of 16 calls each the first ones are verified: two kinds of batches, and the checkpoint's.
    assert strategy["counts"]["split calls"] >= 16
    (note,) = strategy["notes"]
    assert "arguments that lead back to themselves" in note
    assert strategy["missed"] == []


def test_batch_per_rank_divides_the_epoch_and_not_the_batch(alone: Any, two_ranks: Any) -> None:
    one = alone("whole_batches", "8").good.stdout.splitlines()
    run = two_ranks("whole_batches", "8", options=(*ALL_SHOWN, "--batch", "per-rank"))
    batches, ranks = told(one, "samples"), [told(run.lines(rank), "samples") for rank in (0, 1)]
    # Nine batches an epoch: the ranks take turns, and one of them has none for the fifth step.
    first, second = batches[:9], batches[9:]
    assert ranks[0] == [*first[0::2], *second[0::2]]
    assert [*ranks[1][:4], *ranks[1][5:9]] == [*first[1::2], *second[1::2]]
    assert len(ranks[1]) == len(ranks[0]) == 10
    assert told(one, "length") == [["9"], ["9"]]
    assert [told(run.lines(rank), "length") for rank in (0, 1)] == [[["5"], ["5"]]] * 2
    assert told(run.lines(), "stream") == told(one, "stream") == [["3"]]


def test_batch_per_rank_is_one_process_with_larger_batches(alone: Any, two_ranks: Any) -> None:
    one = alone("whole_batches", "16")
    run = two_ranks("whole_batches", "8", options=(*LEVERS_OFF, "--batch", "per-rank"))
    found, expected = (
        [line for line in lines if not line.startswith("samples")]
        for lines in (run.lines(), one.good.stdout.splitlines())
    )
    assert_same_prints(found, expected, closely)
    assert differences(run.saved(), one.saved()) == []


@pytest.mark.parametrize(("last_batch", "ranks"), [("5", 2), ("1", 2), ("3", 4)])
def test_batch_norm_over_all_ranks_is_that_of_one_process(
    alone: Any, two_ranks: Any, last_batch: str, ranks: int
) -> None:
    run = two_ranks("batch_norm", last_batch, ranks=ranks)
    assert_same_run(run, alone("batch_norm", last_batch))
    assert run.outcome("strategy")["counts"]["split calls"] > 0


def test_batches_drawn_by_hand_are_those_of_one_process(alone: Any, two_ranks: Any) -> None:
    one = alone("drawn_by_hand").good.stdout.splitlines()
    run = two_ranks("drawn_by_hand", options=ALL_SHOWN)
    first, second = (run.lines(rank) for rank in (0, 1))
    assert first == second
    for generator in GENERATORS:
        assert told(first, generator) == told(one, generator)
    found, expected = ([float(n) for (n,) in told(lines, "loss")] for lines in (first, one))
    assert found == pytest.approx(expected, rel=1e-5)


def test_batches_drawn_by_hand_differ_where_each_rank_has_its_own(two_ranks: Any) -> None:
    run = two_ranks("drawn_by_hand", options=(*ALL_SHOWN, "--batch", "per-rank"))
    first, second = (run.lines(rank) for rank in (0, 1))
    for generator in GENERATORS:
        pairs = list(zip(told(first, generator), told(second, generator), strict=True))
        assert [a == b for a, b in pairs] == [True] + 5 * [False], generator
    assert told(first, "weights") == told(second, "weights")
    assert told(first, "loss") == told(second, "loss")
    (note,) = run.outcome("strategy")["notes"]
    assert " 2 times " in note, "the global batch"


@pytest.mark.parametrize("workers", ["0", "2"])
def test_ranks_draw_alike_and_each_row_has_a_dropout_of_its_own(
    two_ranks: Any, workers: str
) -> None:
    run = two_ranks("random_numbers", workers, options=ALL_SHOWN)
    first, second = (run.lines(rank) for rank in (0, 1))
    assert first == second
    samples = [[int(i) for i in part] for part in told(first, "samples")]
    epochs = [[i for part in half for i in part] for half in (samples[:3], samples[3:])]
    assert [sorted(epoch) for epoch in epochs] == 2 * [list(range(24))]
    assert epochs[0] != epochs[1] != list(range(24))
    for word in (*GENERATORS, "dropout"):
        drawn = [value for row in told(first, word) for value in row]
        assert len(drawn) == len(set(drawn)) == 2 * 24, word
    assert run.outcome("strategy")["counts"]["split calls"] > 0


def test_a_script_that_restores_a_random_state_has_its_dropout_again(two_ranks: Any) -> None:
    run = two_ranks("resumes_itself", options=ALL_SHOWN)
    lines = run.lines()
    assert told(lines, "restored") == told(lines, "kept")
    seeded = told(lines, "seeded")
    assert len(seeded) == 6
    assert seeded[:3] == seeded[3:]
    assert run.outcome("strategy")["counts"]["split calls"] > 0


@pytest.mark.matrix
def test_precision_kernels_and_compilation_work_together(
    two_started_ranks: Any, tmp_path: Path
) -> None:
    environ = {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # a pool of compilers would import torch first
    }
    options = ("--amp", "bf16", "--optimizer", "fused", "--strict")
    how: dict[str, Any] = {"environ": environ, "name": "compiled", "timeout_s": 250.0}
    run = two_started_ranks("whole_batches", "8", options=(*options, "--compile", "default"), **how)
    one = two_started_ranks("whole_batches", "8", options=options, ranks=1, name="one")
    found, expected = ([float(n) for (n,) in told(r.lines(), "loss")] for r in (run, one))
    assert len(found) == 18
    assert found == pytest.approx(expected, rel=0.02)
    for lever in ("strategy", "amp", "optimizer", "compile"):
        assert [o["state"] for o in run.outcomes(lever)] == 2 * ["applied"], lever


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("SGD", ("--optimizer", "keep")),  # the host reads the overflow
        ("AdamW", ("--optimizer", "fused")),  # the device skips the step by itself
    ],
)
def test_an_overflow_on_one_rank_skips_the_step_on_all(
    two_ranks: Any, kind: str, options: tuple[str, ...]
) -> None:
    options = ("--amp", "fp16", *options, "--show-ranks", "all")
    run = two_ranks("overflows", kind, options=options)
    first, second = (run.lines(rank) for rank in (0, 1))
    assert told(first, "weights") == told(second, "weights")
    assert first == second
    counts = [outcome["counts"] for outcome in run.outcomes("loss_scaling")]
    assert counts[0] == counts[1]
    made = [line for line in first if line in ("stepped", "skipped")]
    assert made[3:5] == ["skipped", "stepped"], "the sample is in the fourth batch"
    assert made.count("skipped") == counts[0]["skipped steps"]


@pytest.mark.matrix
def test_a_group_of_the_scripts_own_is_left_alone(two_started_ranks: Any) -> None:
    run = two_started_ranks("own_group", options=ALL_SHOWN)
    (first,), (second,) = run.lines(0), run.lines(1)
    assert first.startswith("rank 0 of 2 [")
    assert second == first.replace("rank 0", "rank 1")
    assert [outcome["state"] for outcome in run.outcomes("strategy")] == 2 * ["ceded"]
    assert "own_group.py" in run.outcome("strategy")["sites"][0]["where"]


def test_a_group_of_the_scripts_own_keeps_its_batches_and_files(two_ranks: Any) -> None:
    run = two_ranks("own_group_loader", options=ALL_SHOWN)
    assert run.lines(0) == run.lines(1) == ["samples 8", "samples 8"]
    assert set(run.saved()) == {"weight", "bias"}
    for lever in ("strategy", "side_effects"):
        assert [outcome["state"] for outcome in run.outcomes(lever)] == 2 * ["ceded"]
    for rank in json.loads((run.cwd / "run/receipt.json").read_text())["ranks"]:
        stats = rank["stats"]  # of the second of two steps, with 8 samples of each rank's own
        assert stats["samples_per_s"] * stats["median_step_s"] == pytest.approx(8, rel=0.2)


def test_noise_of_the_loop_is_that_of_one_process(alone: Any, two_ranks: Any) -> None:
    run = two_ranks("noise_in_the_loop", options=ALL_SHOWN)
    one = alone("noise_in_the_loop").good.stdout.splitlines()
    assert run.lines(0) == run.lines(1) == one


@pytest.mark.matrix
def test_the_script_that_asks_for_its_rank_in_vain_is_stopped(two_started_ranks: Any) -> None:
    run = two_started_ranks("asks_for_rank", options=ALL_SHOWN)
    assert run.returncode == 78
    assert "[unrelated-copies]" in run.stderr
    assert "rank 0 2 0" in run.stdout
    assert "loss" not in run.stdout


def test_the_script_that_asks_for_its_rank_is_trained_as_one_when_told(
    alone: Any, two_ranks: Any
) -> None:
    run = two_ranks("asks_for_rank", options=(*LEVERS_OFF, "--strategy", "ddp"))
    assert_same_run(run, alone("asks_for_rank"))
    assert "rank None None None" in run.lines()
    assert run.outcome("strategy")["state"] == "applied"
