"""What fasttrain costs before and after a script: wall times against targets.

Every round runs all commands once, one after the other, so that a slow minute of the machine
affects both sides of each comparison.

    python benchmarks/startup.py --runs 5
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tables import print_heading, print_table

SCRIPTS = Path(__file__).resolve().parent / "scripts"
HELLO, TRAIN = str(SCRIPTS / "hello.py"), str(SCRIPTS / "train_10s.py")
PYTHON = (sys.executable,)
FASTTRAIN = (sys.executable, "-m", "fasttrain")
IMPORTS = (*PYTHON, "-c", "import typer, rich")
# With the levers off both sides do the same arithmetic, and the difference is fasttrain's time.
LEVERS_OFF = ("--amp", "off", "--compile", "off", "--optimizer", "keep")


@dataclass(frozen=True)
class Case:
    """A command of fasttrain, the plain command to compare with, and a target.

    The target is ``factor`` times the plain command's time plus ``offset_s`` seconds.
    """

    name: str
    plain: tuple[str, ...]
    fasttrain: tuple[str, ...]
    factor: float
    offset_s: float
    plain_s: list[float] = field(default_factory=list)
    fasttrain_s: list[float] = field(default_factory=list)

    def row(self) -> tuple[str, ...]:
        """Return the row of the table."""
        plain, fast = statistics.median(self.plain_s), statistics.median(self.fasttrain_s)
        target = self.factor * plain + self.offset_s
        numbers = (f"{plain:.3f}", f"{fast:.3f}", f"{fast / plain:.2f}", f"{fast - plain:+.3f}")
        return self.name, *numbers, f"{target:.3f}", "ok" if fast <= target else "OVER"


def cases() -> Iterator[Case]:
    """Yield the comparisons with the project's targets."""
    yield Case("--help / imports", IMPORTS, (*FASTTRAIN, "--help"), 3.0, 0.0)
    yield Case("--version / imports", IMPORTS, (*FASTTRAIN, "--version"), 3.0, 0.0)
    yield Case(
        "run --dry-run / imports", IMPORTS, (*FASTTRAIN, "run", HELLO, "--dry-run"), 3.0, 0.0
    )
    yield Case("run hello.py / python", (*PYTHON, HELLO), (*FASTTRAIN, "run", HELLO), 1.0, 0.5)
    yield Case(
        "run train_10s.py / python",
        (*PYTHON, TRAIN),
        (*FASTTRAIN, "run", *LEVERS_OFF, TRAIN),
        1.1,
        0.5,
    )


def wall_time_s(argv: tuple[str, ...], run_dir: Path) -> float:
    """Return the seconds from start to exit of a command.

    Raises:
        SystemExit: If the command failed.
    """
    # In the environment, so that the command line is the one that a user types.
    environ = os.environ | {"FASTTRAIN_RUN_DIR": str(run_dir)}
    start = time.perf_counter()
    done = subprocess.run(argv, env=environ, capture_output=True, text=True)
    elapsed = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(f"{' '.join(argv)} ended with {done.returncode}:\n{done.stderr}")
    return elapsed


def measure(todo: list[Case], rounds: int) -> None:
    """Run every command once per round, after an uncounted round that fills the disk cache."""
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(rounds + 1):
            for index, case in enumerate(todo):
                run_dir = Path(scratch, f"{number}-{index}")
                times = wall_time_s(case.plain, run_dir), wall_time_s(case.fasttrain, run_dir)
                if number:
                    case.plain_s.append(times[0])
                    case.fasttrain_s.append(times[1])
            print(f"round {number} of {rounds} done", file=sys.stderr)


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=5, metavar="N", help="counted runs of each")
    args = parser.parse_args()
    print_heading()
    todo = list(cases())
    measure(todo, args.runs)
    head = ("medians in s", "plain", "fasttrain", "ratio", "difference", "target", "verdict")
    print_table([head, *(case.row() for case in todo)])


if __name__ == "__main__":
    main()
