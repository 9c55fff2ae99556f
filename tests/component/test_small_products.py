"""What benchmarks/small_products.py concludes from ratios."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("small_products")


@pytest.mark.parametrize(
    ("ratios", "least"),
    [
        # Of products of 2 * 8 * width**2 operations with widths 8, 16, 32.
        ([1.5, 0.9, 0.5], 2 * 8 * 16**2),
        ([0.9, 1.5, 0.5], 2 * 8 * 32**2),  # what a smaller one gains counts for nothing
        ([0.9, 1.01, 0.5], 2 * 8 * 8**2),  # within the noise
        ([0.9, 0.9, 1.5], None),
    ],
)
def test_bf16_is_slower_nowhere_from_there_on(
    benchmark: Any, ratios: list[float], least: int | None
) -> None:
    widths = (8, 16, 32)
    sizes = [benchmark.Size(8, width, [ratio]) for width, ratio in zip(widths, ratios, strict=True)]
    assert benchmark.threshold(sizes[::-1]) == least


def test_the_rules_mistakes_are_counted(benchmark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [
        benchmark.Size(8, 8, [0.5]),
        benchmark.Size(8, 16, [1.5]),
        benchmark.Size(8, 32, [0.5]),
    ]
    benchmark.print_result(sizes, in_use=2 * 8 * 16**2)
    (last,) = capsys.readouterr().out.splitlines()[-1:]
    assert last.endswith("of 3 sizes it takes 1 that lose, and leaves 1 that would gain")
