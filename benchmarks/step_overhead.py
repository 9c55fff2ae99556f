"""What fasttrain costs per step: an unmodified loop under it against the same loop tuned by hand.

Two worker processes, one of each kind, take blocks of steps in turn over a socket, so that the
machine's noise affects both alike. Two processes of one program differ by 1 or 2 % as long as they
live, so each comparison uses several fresh pairs. The losses of both must agree to the last bit, or
they did not compute the same thing. The whole table takes a quarter of an hour; --variants, --amp,
--compile, --optimizer and --matmul choose other combinations.

    python benchmarks/step_overhead.py
    python benchmarks/step_overhead.py --each-lever     # every lever alone, and none of them
    python benchmarks/step_overhead.py --each-lever --variants empty  # the fixed cost in us
    python benchmarks/step_overhead.py --batch 1        # hardly any arithmetic in the real models
    python benchmarks/step_overhead.py --compare guards # the loop with all guards on against off
    python benchmarks/step_overhead.py --compare itself # the loop by hand against itself
    python benchmarks/step_overhead.py --compare source --source DIR  # another checkout's src
"""

import argparse
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path

from tables import print_heading, print_table
from workers import Worker

HERE = Path(__file__).resolve().parent
GUARDS_OFF = ("--hang-timeout", "off", "--on-nan", "off")
# The two sides of each comparison: hand, other.
COMPARISONS = {
    "hand": ("the loop by hand", "the unmodified loop under fasttrain"),
    "guards": ("the loop under fasttrain without guards", "the same with guards"),
    "itself": ("the loop by hand", "the same"),
    "source": ("the loop under fasttrain of another checkout", "the same under this one"),
}
TARGETS = "a ratio of at most 1.01 where a step takes 10 ms or more, and at most 100 extra us"
SIDES = ("hand", "other")
HEAD = (
    "levers",
    "hand ms",
    "other ms",
    "extra us (95 %)",
    "wall ratio (95 %)",
    "cpu ratio (95 %)",
    "loss",
)
BATCHES = {"mlp": 1536, "transformer": 4, "convnet": 8}  # 10 to 40 ms a step on one core
EMPTY = "empty"  # a step takes about 0.1 ms: a block needs many to outlast the switch of workers
STEPS = {EMPTY: 200}
USUAL_STEPS = 6
# Without these, two processes of the same program differ by up to 8 %: glibc returns the memory of
# freed tensors to the system, and faults it in again at every step, on other pages.
STEADY_MEMORY = {
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
    "MALLOC_MMAP_THRESHOLD_": str(1 << 25),
    "MALLOC_TOP_PAD_": str(1 << 28),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}


@dataclass(frozen=True)
class Levers:
    """The tuning of a loop, under the names of fasttrain's options."""

    amp: str = "off"
    compile: str = "off"
    optimizer: str = "keep"
    matmul: str = "keep"

    def __str__(self) -> str:
        chosen = [f"{n} {v}" for n, v in asdict(self).items() if v not in ("off", "keep")]
        return ", ".join(chosen) or "none"

    @property
    def options(self) -> list[str]:
        """Return the options of ``fasttrain run``."""
        values = {**asdict(self), "matmul": self.matmul.replace("keep", "auto")}
        return [word for name, value in values.items() for word in (f"--{name}", value)]


EACH_LEVER = (
    Levers(),
    Levers(amp="bf16"),
    Levers(amp="fp16"),
    Levers(compile="default"),
    Levers(optimizer="fused"),
    Levers(matmul="high"),
)


@dataclass(frozen=True)
class Comparison:
    """A loop, its tuning, and the median step of each block by two clocks, in seconds.

    Wall time is what a user waits; processor time ignores other load of the machine.
    """

    variant: str
    levers: Levers
    wall_s: dict[str, list[float]] = field(default_factory=lambda: {side: [] for side in SIDES})
    cpu_s: dict[str, list[float]] = field(default_factory=lambda: {side: [] for side in SIDES})
    losses: dict[str, list[float]] = field(default_factory=lambda: {side: [] for side in SIDES})

    def take_block(self, side: str, worker: Worker, steps: int) -> None:
        """Let a worker take steps, and add their medians and loss."""
        block = worker.take_steps(steps)
        # The first step is left out: the caches hold the other worker's data.
        self.wall_s[side].append(statistics.median(block.wall_s[1:]))
        self.cpu_s[side].append(statistics.median(block.cpu_s[1:]))
        self.losses[side].append(block.loss)

    def row(self) -> tuple[str, ...]:
        """Return the row of the table.

        Differences and ratios are those of neighbouring blocks, in which a slow minute of the
        machine cancels out.
        """
        hand, other = (statistics.median(self.wall_s[side]) for side in SIDES)
        extra_us = [1e6 * (b - a) for a, b in zip(*self.wall_s.values(), strict=True)]
        ratios = [
            [b / a for a, b in zip(*clock.values(), strict=True)]
            for clock in (self.wall_s, self.cpu_s)
        ]
        return (
            *(self.variant, str(self.levers)),
            *(f"{1e3 * hand:.2f}", f"{1e3 * other:.2f}"),
            median_and_interval(extra_us, "+.0f"),
            *(median_and_interval(values, ".4f") for values in ratios),
            "equal" if self.losses["hand"] == self.losses["other"] else "DIFFERS",
        )


def median_and_interval(values: list[float], spec: str) -> str:
    """Return the median and its 95 % confidence interval, for any distribution.

    The ends are order statistics; their ranks follow from the normal approximation of the binomial
    distribution.
    """
    low = max(0, math.floor(len(values) / 2 - 0.98 * math.sqrt(len(values))))
    ordered = sorted(values)
    shown = [format(x, spec) for x in (statistics.median(values), ordered[low], ordered[-1 - low])]
    return "{} ({}..{})".format(*shown)


def commands(
    case: Comparison, batch: int, scratch: Path, compare: str, source: Path | None = None
) -> dict[str, list[str]]:
    """Return the command line of each side, which connects to the socket of that name.

    Args:
        case: What to compare.
        batch: Samples per step.
        scratch: A folder for this pair.
        compare: One of `COMPARISONS`.
        source: The other checkout's ``src``, for "source".
    """
    loop = [case.variant, str(batch)]

    def by_hand(side: str) -> list[str]:
        tuned = asdict(case.levers).values()
        return [sys.executable, str(HERE / "loops_by_hand.py"), *loop, str(scratch / side), *tuned]

    def under_fasttrain(side: str, *more: str) -> list[str]:
        options = [
            *(*case.levers.options, *more, "--device", "cpu"),
            *("--strict", "--quiet", "--run-dir", str(scratch / f"run-{side}")),
        ]
        unmodified = [str(HERE / "loops.py"), "--", *loop, str(scratch / side)]
        return [sys.executable, "-m", "fasttrain", "run", *options, *unmodified]

    if compare == "source":
        before = ["env", f"PYTHONPATH={source}", *under_fasttrain("hand")]
        here = ["env", f"PYTHONPATH={HERE.parent / 'src'}", *under_fasttrain("other")]
        return {"hand": before, "other": here}
    if compare == "guards":
        return {"hand": under_fasttrain("hand", *GUARDS_OFF), "other": under_fasttrain("other")}
    other = by_hand("other") if compare == "itself" else under_fasttrain("other")
    return {"hand": by_hand("hand"), "other": other}


def measure(case: Comparison, args: argparse.Namespace, scratch: Path) -> None:
    """Compare with several fresh pairs of workers, which share a cache of compiled kernels.

    Args:
        case: What to compare; the blocks are added to it.
        args: The command line.
        scratch: An empty directory.
    """
    environ = {
        **os.environ,
        **STEADY_MEMORY,
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),
    }
    for number in range(args.pairs):
        pair = scratch / str(number)
        pair.mkdir()
        batch = args.batch or BATCHES.get(case.variant, 1)
        argvs = commands(case, batch, pair, args.compare, args.source)
        with ExitStack() as stack:
            workers = {
                side: stack.enter_context(Worker(argv, pair / side, environ))
                for side, argv in argvs.items()
            }
            take_turns(case, workers, args)


def take_turns(case: Comparison, workers: dict[str, Worker], args: argparse.Namespace) -> None:
    """Let both workers take blocks of steps; which one begins alternates."""
    for worker in workers.values():
        worker.take_steps(5)  # warm-up and compilation
    steps = args.steps or STEPS.get(case.variant, USUAL_STEPS)
    for block in range(args.blocks):
        for side in SIDES if block % 2 == 0 else reversed(SIDES):
            case.take_block(side, workers[side], steps)


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    variants, modes = list(BATCHES), ["off", "default"]
    parser.add_argument("--variants", nargs="+", choices=[*variants, EMPTY], default=variants)
    parser.add_argument(
        "--amp", nargs="+", choices=["off", "bf16", "fp16"], default=["off", "bf16"]
    )
    parser.add_argument("--compile", nargs="+", choices=modes, default=modes)
    parser.add_argument("--optimizer", nargs="+", choices=["keep", "fused"], default=["fused"])
    parser.add_argument("--matmul", nargs="+", choices=["keep", "high", "medium"], default=["keep"])
    parser.add_argument("--each-lever", action="store_true", help="no lever, then each lever alone")
    parser.add_argument("--batch", type=int, help="samples per step; default: the loop's own")
    parser.add_argument("--pairs", type=int, default=3, help="fresh pairs of workers per line")
    parser.add_argument("--blocks", type=int, default=30, help="blocks of steps per worker")
    parser.add_argument(
        "--steps", type=int, help=f"steps per block, the first uncounted: {USUAL_STEPS} or {STEPS}"
    )
    parser.add_argument(
        "--compare", choices=list(COMPARISONS), default="hand", help="which two sides to compare"
    )
    parser.add_argument("--source", type=Path, help="src of the other checkout, for that one")
    args = parser.parse_args()
    if (args.source is None) == (args.compare == "source"):
        parser.error("--compare source and --source DIR go together")
    return args


def levers_of(args: argparse.Namespace) -> Sequence[Levers]:
    """Return the combinations that the command line asks for."""
    if args.each_lever:
        return EACH_LEVER
    return [Levers(*v) for v in product(args.amp, args.compile, args.optimizer, args.matmul)]


def main() -> None:
    """Measure the combinations of the command line and print the table."""
    args = parse_args()
    print_heading()
    cases = [Comparison(*names) for names in product(args.variants, levers_of(args))]
    for case in cases:
        print(f"measuring {case.variant}: {case.levers}", file=sys.stderr)
        with tempfile.TemporaryDirectory() as scratch:
            measure(case, args, Path(scratch))
    hand, other = COMPARISONS[args.compare]
    print(f"hand is {hand}, other is {other}\ntargets: {TARGETS}\n")
    print_table([("loop", *HEAD), *(case.row() for case in cases)])


if __name__ == "__main__":
    main()
