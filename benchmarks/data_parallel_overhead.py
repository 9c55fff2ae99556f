"""What injected data-parallel training costs per step, against the same loop with DDP by hand.

Two runs, one of each kind, are stopped and continued in turn by signals, so that the machine's
noise affects both alike. Steps during which a run was stopped are left out. Each rank has one
thread of PyTorch, and a core for all its threads. Times are medians of the steps of a turn, after
the first `WARM_STEPS`: fasttrain verifies calls 1, 2, 4, 8 ... of a model, which then take several
times as long. After the warm-up that is one step in hundreds.

The loop by hand gives each rank its half of the same batches, and starts with the same weights. Its
BatchNorm is synchronised by hand (synchronised_norm.py). Both sides read their loss every ten
steps; the loop by hand sums it over its ranks for that. A median step reads no loss. The losses of
the first steps must agree, or there is no result.

Launches of one and the same source differ by a few per cent of a small step, which no number of
turns averages out: by where its memory lies, and on which core the scheduler leaves its threads.
So memory is in huge pages and threads keep their core: of 8 launches of the mlp against itself the
standard deviation was 5.3 % without both, 2.5 % without huge pages, and 1.7 % with both, but 3.3 %
of 30 launches against another tree. While gradients go by gloo, a difference of a per cent still
takes many launches, each with few turns. Medians and intervals are of the launches' medians.

The last tasks compare two ranks under fasttrain with one plain process of the same loop: the gain
for a user.

    python benchmarks/data_parallel_overhead.py                  # all tasks: ten minutes
    python benchmarks/data_parallel_overhead.py mlp convnet      # these
    python benchmarks/data_parallel_overhead.py mlp --noise-floor  # the loop by hand against itself
    python benchmarks/data_parallel_overhead.py mlp --source DIR   # src of another checkout
    python benchmarks/data_parallel_overhead.py mlp --source DIR --launches 30 --pairs 10 \
        --block-s 0.4                                            # ten minutes
"""

import argparse
import contextlib
import itertools
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil
from step_overhead import median_and_interval
from tables import print_heading, print_table

HERE = Path(__file__).resolve().parent
SIDES = ("hand", "other")
WARM_STEPS = 40  # the next verified calls are 64, 128, 256 ...
TURN_STEPS = 10  # at least
COMPARED_LOSSES = 10  # later, rounding differences grow, as between any two machines
CLOSE = 1e-3  # largest relative difference of losses
WARM_UP_S = 90.0
HUGE_PAGES = "glibc.malloc.hugetlb=1"  # for what malloc takes, if the kernel has them on request
OPTIONS = ("--amp", "off", "--optimizer", "keep", "--quiet")
# The other side of a comparison, the task of parallel_tasks.py, and its loop.
BY_HAND = {
    name: ("hand", name, "train")
    for name in (
        *("mlp", "convnet", "transformer_outside", "transformer_inside"),
        *("language_model", "language_model_inside"),
    )
}
ONE_PROCESS = {
    "validation": ("one", "convnet", "evaluate"),
    "validation_transformer": ("one", "transformer_outside", "evaluate"),
    "training_mlp": ("one", "mlp", "train"),
    "training_transformer": ("one", "transformer_outside", "train"),
}
COMPARISONS = {**BY_HAND, **ONE_PROCESS}
COLUMNS = (
    "hand ms", "fasttrain ms", "extra us (95 %)", "ratio (95 %)", "processor (95 %)", "turns",
    "loss differs by",
)  # fmt: skip
SPEED_COLUMNS = ("one ms", "fasttrain ms", "speed-up (95 %)", "turns", "loss differs by")


class End(NamedTuple):
    """When a step ended: seconds of the wall clock, and of rank 0's processor time."""

    at_s: float
    used_s: float


@dataclass(frozen=True)
class Run:
    """One side: its process, and the file that its rank 0 writes."""

    process: "subprocess.Popen[bytes]"
    path: Path

    def lines(self) -> list[str]:
        """Return the whole lines written so far."""
        return self.path.read_text().split("\n")[:-1] if self.path.exists() else []

    def ends(self) -> "list[End]":
        """Return the end of each step."""
        lines = [line.split() for line in self.lines() if not line.startswith("loss")]
        return [End(float(at), float(used)) for at, used in lines]

    def losses(self) -> list[float]:
        """Return the first losses."""
        read = [float(line.split()[1]) for line in self.lines() if line.startswith("loss")]
        return read[:COMPARED_LOSSES]

    def wait_until_warm(self) -> None:
        """Wait until the warm-up is over."""
        until = time.monotonic() + WARM_UP_S
        while len(self.ends()) < WARM_STEPS:
            if self.process.poll() is not None or time.monotonic() > until:
                log = self.path.with_suffix(".log").read_text()
                raise SystemExit(f"{self.process.args!r} takes no steps:\n{log}")
            time.sleep(0.2)

    def ranks(self) -> list[psutil.Process]:
        """Return the ranks: the processes without children."""
        own = psutil.Process(self.process.pid)
        every = [own, *own.children(recursive=True)]
        return [process for process in every if not process.children()]

    def pin(self) -> None:
        """Put each rank with all its threads on a core of its own."""
        cores = itertools.cycle(sorted(os.sched_getaffinity(0)))
        for rank, core in zip(sorted(self.ranks(), key=lambda rank: rank.pid), cores, strict=False):
            for thread in rank.threads():
                with contextlib.suppress(ProcessLookupError):  # one that has just ended
                    os.sched_setaffinity(thread.id, {core})


def command(name: str, side: str, path: Path, args: argparse.Namespace) -> list[str]:
    """Return the command line of a side."""
    against, task, mode = COMPARISONS[name]
    loop = [task, mode, str(path)]
    if side == "hand" and against == "one":
        return [sys.executable, str(HERE / "parallel_loop.py"), *loop]
    if (side == "hand" and not args.source) or args.noise_floor:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        return [*torchrun, "--nproc-per-node=2", str(HERE / "parallel_loop_by_hand.py"), *loop]
    options = [*OPTIONS, "--nproc-per-node", "2", "--run-dir", str(path.with_suffix(".run"))]
    start = [sys.executable, "-m", "fasttrain", "run", str(HERE / "parallel_loop.py")]
    source = args.source if side == "hand" and args.source else HERE.parent / "src"
    return ["env", f"PYTHONPATH={source}", *start, *options, *args.options, "--", *loop]


def signal_all(processes: list[psutil.Process], number: int) -> None:
    """Stop or continue the ranks."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):  # a run that has just ended
            os.kill(process.pid, number)


@contextlib.contextmanager
def started(name: str, side: str, args: argparse.Namespace, scratch: Path) -> Iterator[Run]:
    """Start a side, and end it after the block."""
    path = scratch / side
    own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "GLIBC_TUNABLES": HUGE_PAGES}
    environ = {**os.environ, **own}
    with path.with_suffix(".log").open("w") as log:
        process = subprocess.Popen(
            command(name, side, path, args), env=environ, stdout=log, stderr=log
        )
        run = Run(process, path)
        try:
            yield run
        finally:
            signal_all(run.ranks(), signal.SIGCONT)
            process.terminate()
            process.wait(timeout=60)


def take_turns(runs: dict[str, Run], args: argparse.Namespace) -> dict[str, list[End | None]]:
    """Let one side run at a time, and return the median step of each of its turns."""
    ranks = {}
    for side, run in runs.items():
        run.wait_until_warm()
        run.pin()
        ranks[side] = run.ranks()
        signal_all(ranks[side], signal.SIGSTOP)
    slowest_s = max(median_step(run.ends()[WARM_STEPS // 2 :]).at_s for run in runs.values())
    block_s = max(args.block_s, TURN_STEPS * slowest_s)
    turns: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}
    for pair in range(args.pairs):
        for side in SIDES if pair % 2 == 0 else reversed(SIDES):
            signal_all(ranks[side], signal.SIGCONT)
            begun = time.monotonic()
            time.sleep(block_s)
            turns[side].append((begun, time.monotonic()))
            signal_all(ranks[side], signal.SIGSTOP)
    # The last lines are written when a run next reads its loss, so both run once more.
    for side in SIDES:
        signal_all(ranks[side], signal.SIGCONT)
    time.sleep(2 * block_s)
    return {side: medians(runs[side].ends(), turns[side]) for side in SIDES}


def median_step(ends: list[End]) -> End:
    """Return the median time between the ends of steps, by each clock."""
    steps = [(b.at_s - a.at_s, b.used_s - a.used_s) for a, b in itertools.pairwise(ends)]
    return End(*map(statistics.median, zip(*steps, strict=True)))


def medians(ends: list[End], turns: list[tuple[float, float]]) -> list[End | None]:
    """Return the median step of each turn, over steps that began and ended in it."""
    found = []
    for begun, ended in turns:
        inside = [end for end in ends if begun < end.at_s < ended]
        # The first steps after a stop are slower.
        found.append(median_step(inside[2:]) if len(inside) > 6 else None)
    return found


def largest_difference(name: str, runs: dict[str, Run]) -> str:
    """Return the largest difference of the first losses; exit if it is too large."""
    pairs = list(zip(*(runs[side].losses() for side in SIDES), strict=False))
    largest = max(abs(a - b) / max(abs(a), 1e-9) for a, b in pairs)
    if largest > CLOSE:
        raise SystemExit(f"{name}: the two sides do not compute the same thing: {pairs}")
    return f"{largest:.1e}"


def launch(name: str, number: int, args: argparse.Namespace) -> tuple[list[tuple[End, End]], str]:
    """Run both sides; return pairs of medians, and the largest difference of losses."""
    order = SIDES if number % 2 == 0 else SIDES[::-1]  # neither always starts first
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        scratch = Path(folder)
        runs = {s: stack.enter_context(started(name, s, args, scratch)) for s in order}
        blocks = take_turns({side: runs[side] for side in SIDES}, args)
        differs = largest_difference(name, runs)
    pairs = [(a, b) for a, b in zip(*blocks.values(), strict=True) if a and b]
    if not pairs:
        raise SystemExit(f"{name}: no turn has six steps; give more by --block-s")
    return pairs, differs


def measure(name: str, args: argparse.Namespace) -> tuple[str, ...]:
    """Launch both sides and return a row of the table."""
    launches, differences = zip(
        *(launch(name, number, args) for number in range(args.launches)), strict=True
    )
    every = [pair for pairs in launches for pair in pairs]
    sides = [[end.at_s for end in side] for side in zip(*every, strict=True)]
    times = [f"{1e3 * statistics.median(side):.2f}" for side in sides]

    def of(value: Callable[[End, End], float], form: str) -> str:
        each = [[value(*pair) for pair in pairs] for pairs in launches]
        values = each[0] if args.launches == 1 else list(map(statistics.median, each))
        return median_and_interval(values, form)

    count = f"{args.launches} x {len(every) // args.launches}"
    last = (count, max(differences, key=float))
    if name in ONE_PROCESS:
        return (name, *times, of(lambda a, b: a.at_s / b.at_s, ".3f"), *last)
    extra = of(lambda a, b: 1e6 * (b.at_s - a.at_s), "+.0f")
    wall = of(lambda a, b: b.at_s / a.at_s, ".4f")
    return (name, *times, extra, wall, of(lambda a, b: b.used_s / a.used_s, ".4f"), *last)


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=f"of {', '.join(COMPARISONS)}")
    parser.add_argument("--pairs", type=int, default=14, help="turns of each side")
    parser.add_argument("--block-s", type=float, default=1.2, help="seconds of a turn, at least")
    parser.add_argument("--launches", type=int, default=1, help="of both sides")
    parser.add_argument("--noise-floor", action="store_true")
    parser.add_argument(
        "--source", type=Path, help="fasttrain in this src takes the place of the loop by hand"
    )
    parser.add_argument(
        "--options", type=shlex.split, default=[], help="more options of fasttrain run, as one word"
    )
    args = parser.parse_args()
    if unknown := set(args.tasks) - COMPARISONS.keys():
        parser.error(f"no task {', '.join(unknown)}; there are {', '.join(COMPARISONS)}")
    print_heading()
    tables = {
        "target: a ratio of at most 1.03": ("two ranks, by hand", BY_HAND, COLUMNS),
        "target: a speed-up of at least 1.7 in validation": (
            *("two ranks against one process", ONE_PROCESS, SPEED_COLUMNS),
        ),
    }
    for target, (title, names, columns) in tables.items():
        rows = []
        for name in [name for name in names if name in args.tasks or not args.tasks]:
            rows.append(measure(name, args))
            print(" ".join(rows[-1]), file=sys.stderr, flush=True)
        if rows:
            print(target)
            print_table([(title, *columns), *rows])
            print(flush=True)


if __name__ == "__main__":
    main()
