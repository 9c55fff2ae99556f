"""From which size of its matrix products a model gains by bf16: the numbers of `--amp auto`.

`--amp auto` leaves a model in fp32 whose products have fewer operations on average than
`least_flops` in src/fasttrain/shim/levers/amp/rules.py. Here forward and backward passes of small
networks take turns with and without autocast, in one process, for rows and widths from 16 to 4,096
(on a CPU to 1,024). The ratio is the median of those of neighbouring blocks; below 1, bf16 is
faster. The last lines say from which number of operations on no smaller ratio is lost, and how many
sizes the rule in use judges wrongly.

    python benchmarks/small_products.py
    python benchmarks/small_products.py --device cpu            # a CPU with native bf16
    python benchmarks/small_products.py --device cpu --tiny     # a test that it runs
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass

import torch
from step_overhead import median_and_interval
from tables import print_heading, print_table
from torch import Tensor, nn

from fasttrain.shim.levers.amp.rules import least_flops

SIZES = tuple(1 << power for power in range(4, 13, 2))
LAYERS = 4
LOST = 1.02  # a ratio above it is a loss and no noise


@dataclass(frozen=True)
class Size:
    """A network and its batch.

    Attributes:
        rows: Samples of a step.
        width: Features of each layer, in and out.
        ratios: Time with autocast over that without, of each pair of blocks.
    """

    rows: int
    width: int
    ratios: list[float]

    @property
    def flops(self) -> int:
        """Operations of a product in forward, as `--amp auto` counts them."""
        return 2 * self.rows * self.width * self.width

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)


class Passes:
    """Forward and backward passes of one network on one batch."""

    def __init__(self, rows: int, width: int, device: str) -> None:
        torch.manual_seed(0)
        layers = [part for _ in range(LAYERS) for part in (nn.Linear(width, width), nn.ReLU())]
        self._model = nn.Sequential(*layers).to(device)
        self._batch: Tensor = torch.randn(rows, width, device=device)
        self._device = device

    def block(self, count: int, *, low: bool) -> float:
        """Return the seconds of some passes."""
        self._wait()
        began_s = time.perf_counter()
        for _ in range(count):
            with torch.autocast(self._device, torch.bfloat16, enabled=low):
                loss = self._model(self._batch).float().square().mean()
            self._model.zero_grad()
            loss.backward()
        self._wait()
        return time.perf_counter() - began_s

    def _wait(self) -> None:
        if self._device != "cpu":
            torch.accelerator.synchronize()


def measure(rows: int, width: int, device: str, blocks: int, block_s: float) -> Size:
    """Compare blocks in turn; each side is first equally often."""
    passes = Passes(rows, width, device)
    for low in (False, True):
        passes.block(3, low=low)  # allocations and choices of kernels
    count = max(1, round(block_s / passes.block(1, low=False)))
    ratios = []
    for number in range(blocks):
        first = number % 2 == 0
        times = {low: passes.block(count, low=low) for low in (first, not first)}
        ratios.append(times[True] / times[False])
    return Size(rows, width, ratios)


def threshold(sizes: list[Size]) -> int | None:
    """Return the least operations from which on bf16 is slower nowhere; None if it always is."""
    least = None
    for size in sorted(sizes, key=lambda size: size.flops, reverse=True):
        if size.ratio > LOST:
            break
        least = size.flops
    return least


def print_result(sizes: list[Size], in_use: int) -> None:
    rows = [("rows x width", "operations", "bf16 : fp32 (95 %)")]
    rows += [
        (f"{one.rows} x {one.width}", f"{one.flops:,}", median_and_interval(one.ratios, ".3f"))
        for one in sorted(sizes, key=lambda one: one.flops)
    ]
    print_table(rows)
    least = threshold(sizes)
    print(f"\nslower nowhere from {f'{least:,}' if least else 'no size'} operations on")
    lost = [one for one in sizes if one.flops >= in_use and one.ratio > LOST]
    missed = [one for one in sizes if one.flops < in_use and one.ratio < 1 / LOST]
    print(
        f"the rule in use begins at {in_use:,}: of {len(sizes)} sizes it takes {len(lost)} that"
        f" lose, and leaves {len(missed)} that would gain"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--block-s", type=float, default=0.05, help="seconds of a block")
    parser.add_argument("--tiny", action="store_true", help="a test that it runs, no measurement")
    args = parser.parse_args()
    print_heading()
    widths = SIZES[: 2 if args.tiny else 4 if args.device == "cpu" else None]
    blocks, block_s = (2, 0.001) if args.tiny else (args.blocks, args.block_s)
    sizes = [
        measure(rows, width, args.device, blocks, block_s) for rows in widths for width in widths
    ]
    print_result(sizes, least_flops(torch.device(args.device)))


if __name__ == "__main__":
    main()
