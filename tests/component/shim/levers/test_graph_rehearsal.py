"""No loop reads what a later replay of a CUDA graph has overwritten: a rehearsal without a GPU.

Each loop is run twice, by torch alone and under the compile lever, whose CUDA graphs are those of
`support.poisoned`. What it keeps must hold the same numbers, whatever the guard has decided.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fasttrain.shim.levers.compile import graphs as guard
from fasttrain.shim.levers.compile.graph_memory import UNCOPIED
from fasttrain.shim.levers.compile.graphs import PROBATION_STEPS, WITHOUT_GRAPHS
from fasttrain.shim.levers.compile.lever import SEVERAL_MODELS
from support import graph_styles as styles
from support.graph_styles import STEPS
from support.poisoned import GRAPHED, Pool, graphs_of, poison, read, rehearse, replay_blindly

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),  # inductor's import
]
ADMITTED = STEPS - PROBATION_STEPS

SAFE = [
    (styles.plain, styles.Net),
    (styles.detached, styles.Net),
    (styles.counted, styles.Net),
    (styles.validates, styles.Net),
    (styles.validates, styles.Normed),
    (styles.averages, styles.Net),
    (styles.two_optimizers, styles.Net),
    (styles.retains, styles.Net),
    (styles.recurs, styles.Recurrent),
    (styles.takes_fields, styles.InDataclass),
    (styles.takes_items, styles.InDict),
    (styles.plain, styles.Normed),
    (styles.plain, styles.InPlaceEma),
    (styles.plain, styles.Rotary),
]
# In each of these a parameter has gradients of an earlier replay when the next one comes.
CARRIED = [
    styles.zeroes_late,
    styles.zeroes_late_in_place,
    styles.zeroes_in_place,
    styles.zeroes_now_and_then,
]
UNSAFE: list[tuple[Any, Any, str]] = [
    (styles.plain, styles.Memory, "Memory.mem"),
    (styles.plain, styles.NewEma, "NewEma.ema"),
    (styles.keeps_aux, styles.Aux, "Aux.aux"),
    (styles.plain, styles.InObject, "InObject.state"),
    (styles.plain, styles.InSlots, "InSlots.state"),
    (styles.plain, styles.InDeque, "InDeque.cache"),
    (styles.plain, styles.InBlock, "Block.cache"),
    (styles.plain, styles.OnClass, "OnClass.before"),
    (styles.plain, styles.Hooked, "Linear._forward_hooks"),
    (styles.reads_global, styles.InGlobal, "the global KEPT"),
    (styles.plain, styles.OnParameter, "Linear.weight"),
    (styles.reads_global, styles.BackwardHooked, guard.BACKWARD_HOOKS),
    (styles.reads_global, styles.HookedFeatures, guard.FEATURE_HOOKED),
    (styles.takes_fields, styles.InBox, f"a Box: {UNCOPIED}"),
    (styles.takes_fields, styles.InBoxedField, f"a Outer: {UNCOPIED}"),
    (styles.takes_items, styles.InProxy, f"a mappingproxy: {UNCOPIED}"),
    (styles.keeps_gradients, styles.Net, guard.KEPT_GRADIENTS),
    (styles.keeps_views_of_gradients, styles.Net, guard.KEPT_GRADIENTS),
    (styles.keeps_asked_gradients, styles.Net, guard.ASKED_GRADIENTS),
    (styles.accumulates, styles.Net, guard.CALLED_AGAIN),
    (styles.calls_twice, styles.Net, guard.CALLED_AGAIN),
    (styles.delays, styles.Net, guard.CALLED_AGAIN),
    (styles.differentiates_inputs, styles.OfList, guard.INPUT_GRADIENT),
]
# They become unsafe when CUDA graphs are in use.
LATE: list[tuple[Any, Any, str]] = [
    (styles.keeps_late, styles.Later, "Later.mem"),
    (styles.keeps_gradients_late, styles.Net, guard.KEPT_GRADIENTS),
]


def name(value: Any) -> str | None:
    return getattr(value, "__name__", None)


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    styles.OnClass.before = None
    yield
    styles.OnClass.before = None


def by_torch(loop: Any, model: Any) -> list[list[float]]:
    styles.OnClass.before = None
    found = read(loop(model()))
    styles.OnClass.before = None
    return found


def assert_same(found: list[list[float]], expected: list[list[float]]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)  # NaN equals nothing


def some(cases: list[Any], every: int = 3) -> list[Any]:
    """Return the cases of a test, of which `pytest` runs each third and .ci/run the others."""
    marks = [() if i % every == 0 else pytest.mark.matrix for i in range(len(cases))]
    return [pytest.param(*case, marks=mark) for case, mark in zip(cases, marks, strict=True)]


@pytest.mark.parametrize(("loop", "model"), some(SAFE), ids=name)
def test_a_safe_loop_gets_graphs(loop: Any, model: Any) -> None:
    found = rehearse(loop, model())
    assert_same(found.results, by_torch(loop, model))
    assert found.calls.count("graphs") == ADMITTED
    assert not any(WITHOUT_GRAPHS in note for note in found.outcome.notes)


@pytest.mark.parametrize("loop", CARRIED, ids=name)
def test_gradients_outlive_the_next_forward(loop: Any) -> None:
    """A loop may zero them after it, or not at all, and gets CUDA graphs as any other."""
    found = rehearse(loop, styles.Net())
    assert_same(found.results, by_torch(loop, styles.Net))
    assert found.calls.count("graphs") == ADMITTED


def test_a_loop_may_change_when_it_zeroes_gradients() -> None:
    found = rehearse(styles.changes_order, styles.Net())
    assert_same(found.results, by_torch(styles.changes_order, styles.Net))
    assert found.calls.count("graphs") == 3 * STEPS - PROBATION_STEPS


@pytest.mark.parametrize(("loop", "model", "reason"), some(UNSAFE), ids=name)
def test_an_unsafe_loop_gets_none(loop: Any, model: Any, reason: str) -> None:
    found = rehearse(loop, model())
    assert_same(found.results, by_torch(loop, model))
    assert "graphs" not in found.calls
    assert any(WITHOUT_GRAPHS in n and n.endswith(reason) for n in found.outcome.notes)


@pytest.mark.parametrize(("loop", "model", "reason"), LATE, ids=name)
def test_graphs_end_when_a_loop_becomes_unsafe(loop: Any, model: Any, reason: str) -> None:
    found = rehearse(loop, model())
    assert_same(found.results, by_torch(loop, model))
    assert 0 < found.calls.count("graphs") < ADMITTED
    assert any(WITHOUT_GRAPHS in n and n.endswith(reason) for n in found.outcome.notes)


def test_two_models_in_turn_get_none() -> None:
    found = rehearse(styles.adversarial, styles.Net())
    assert_same(found.results, by_torch(styles.adversarial, styles.Net))
    assert "graphs" not in found.calls
    assert any(SEVERAL_MODELS in note for note in found.outcome.notes)


@pytest.mark.parametrize(
    ("loop", "model"),
    some(
        [
            *((loop, styles.Net) for loop in CARRIED),
            *((loop, model) for loop, model, _ in UNSAFE + LATE),
        ],
        every=5,
    ),
    ids=name,
)
def test_the_rehearsal_notices_replays_that_are_not_safe(loop: Any, model: Any) -> None:
    """Without the guard each of these loops would read what a later replay has overwritten."""
    with contextlib.suppress(RuntimeError):  # what a backward pass needs was written to
        found = replay_blindly(loop, model())
        with pytest.raises(AssertionError):
            assert_same(found, by_torch(loop, model))


def test_calls_are_counted_that_replay_a_graph() -> None:
    """The first admitted call only warms up."""
    counts = rehearse(styles.plain, styles.Net()).outcome.counts
    assert counts[guard.REPLAYS] == ADMITTED - 1
    assert "CUDA graph skips" not in counts


def test_graphs_that_inductor_skips_are_counted_with_the_reason() -> None:
    outcome = rehearse(styles.plain, styles.Net(), Pool("mutated inputs (1 instances)")).outcome
    assert outcome.counts[guard.REPLAYS] == 0
    assert outcome.counts["CUDA graph skips"] == 2  # the forward and the backward graph
    assert any(note.endswith(": mutated inputs (1 instances)") for note in outcome.notes)


# The rehearsal itself


@pytest.fixture
def pool() -> Pool:
    return Pool()


def test_a_generation_poisons_outputs_and_gradients_of_the_one_before(pool: Pool) -> None:
    x, w = torch.ones(3), torch.ones(3, requires_grad=True)
    with graphs_of(pool, []):
        call: Any = torch.compile(lambda x, w: x * w, mode=GRAPHED)
        other: Any = torch.compile(lambda x: x + 1, mode=GRAPHED)
        first = call(x, w)
        first.sum().backward()
        gradient: Any = w.grad
        second = call(2 * x, w)  # the same generation
        other(x)
        assert first.tolist() == gradient.tolist() == [1, 1, 1]
        pool.mark_step_begin()
        assert other(x).tolist() == [2, 2, 2]
        assert all(t.isnan().all() for t in (first, second, gradient))


def test_a_replay_writes_where_the_one_before_has_written(pool: Pool) -> None:
    with graphs_of(pool, []):
        call: Any = torch.compile(lambda x: x + 1, mode=GRAPHED)
        first = call(torch.zeros(2))
        pool.mark_step_begin()
        call(torch.ones(2))
    assert first.tolist() == [2, 2]


def test_memory_of_inputs_is_left_alone(pool: Pool) -> None:
    x = torch.ones(3)
    with graphs_of(pool, []):
        call: Any = torch.compile(lambda x: (x.view(3, 1), x + 1), mode=GRAPHED)
        view, _ = call(x)
        pool.mark_step_begin()
        call(2 * x)
    assert view.tolist() == [[1], [1], [1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.int32, torch.bool])
def test_poison_is_another_value(dtype: torch.dtype) -> None:
    value = torch.zeros(2, dtype=dtype)
    poison(value)
    assert not (value == 0).any()
