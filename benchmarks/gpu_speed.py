"""What a run under fasttrain gains: plain, made fast by hand, and plain under fasttrain.

Three processes share the GPU and take blocks of steps in turn, so that its clock and temperature
affect all alike. Only one computes at a time, and each keeps its own memory. The same file runs
plainly and under fasttrain.

    python benchmarks/gpu_speed.py
    python benchmarks/gpu_speed.py --models gpt --compile off
    python benchmarks/gpu_speed.py --device cpu --tiny      # a test that it runs, no measurement
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tables import print_heading
from workers import Worker

HERE = Path(__file__).resolve().parent
MODELS = ("gpt", "resnet50", "unet")
BATCHES = {"gpt": 8, "resnet50": 64, "unet": 8}
TINY_BATCH = 2
SIDES = ("plain", "by hand", "fasttrain")
HEAD = ("model", "loop", "step ms", "samples/s", "peak GiB", "x plain", "x by hand", "loss")


@dataclass(frozen=True)
class GpuBlock:
    """A worker's answer: seconds of a step, peak of the allocator, last loss, device."""

    step_s: float
    peak_bytes: int
    loss: float
    device: str


class GpuWorker(Worker):
    """A worker whose blocks are timed as a whole, because a GPU computes asynchronously."""

    def take_block(self, count: int) -> GpuBlock:
        """Let the worker take steps.

        Raises:
            SystemExit: If it died.
        """
        print(count, file=self.stream, flush=True)
        answer = self.stream.readline()
        if not answer:
            raise SystemExit(f"a worker ended with {self.process.wait()} in the midst of its steps")
        return GpuBlock(**json.loads(answer))


def commands(model: str, args: argparse.Namespace, scratch: Path) -> dict[str, list[str]]:
    """Return the command line of each side, which connects to the socket of that name."""

    def loop(side: str) -> list[str]:
        return [model, args.device, "tiny" if args.tiny else "full", str(scratch / side)]

    plain, by_hand = str(HERE / "loops_gpu.py"), str(HERE / "loops_gpu_by_hand.py")
    levers = ["--amp", args.amp, "--compile", args.compile, "--optimizer", "fused"]
    options = ["--device", args.device, "--strict", "--quiet", "--run-dir", str(scratch / "run")]
    fasttrain = [sys.executable, "-m", "fasttrain", "run", *levers, *options, plain, "--"]
    return {
        "plain": [sys.executable, plain, *loop("plain")],
        "by hand": [sys.executable, by_hand, *loop("by hand"), args.amp, args.compile],
        "fasttrain": [*fasttrain, *loop("fasttrain")],
    }


def measure(model: str, args: argparse.Namespace, scratch: Path) -> dict[str, list[GpuBlock]]:
    """Let the sides take blocks of steps in turn; each is first equally often."""
    environ = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor")}
    blocks: dict[str, list[GpuBlock]] = {side: [] for side in SIDES}
    with ExitStack() as stack:
        workers = {}
        for side, argv in commands(model, args, scratch).items():
            workers[side] = stack.enter_context(GpuWorker(argv, scratch / side, environ))
            workers[side].take_block(args.warmup)
        for number in range(args.blocks):
            first = number % len(SIDES)
            for side in (*SIDES[first:], *SIDES[:first]):
                blocks[side].append(workers[side].take_block(args.steps))
    return blocks


def rows(model: str, blocks: dict[str, list[GpuBlock]], batch: int) -> list[tuple[str, ...]]:
    """Return a row for each side; ratios are of medians, and above 1 if the side is faster."""
    step_s = {side: statistics.median(b.step_s for b in taken) for side, taken in blocks.items()}
    return [
        (
            *(model, side, f"{1e3 * step_s[side]:.2f}", f"{batch / step_s[side]:.1f}"),
            f"{max(b.peak_bytes for b in blocks[side]) / 2**30:.2f}",
            *(f"{step_s[other] / step_s[side]:.2f}" for other in ("plain", "by hand")),
            f"{blocks[side][-1].loss:.4f}",
        )
        for side in SIDES
    ]


def print_markdown(table: list[tuple[str, ...]]) -> None:
    """Print rows as Markdown; the first row is the head."""
    widths = [max(len(cell) for cell in column) for column in zip(*table, strict=True)]
    for number, row in enumerate(table):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("| " + " | ".join(cells) + " |")
        if number == 0:
            print("|" + "|".join("-" * (width + 2) for width in widths) + "|")


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--amp", choices=["off", "bf16", "fp16"], default="bf16")
    parser.add_argument("--compile", choices=["off", "default"], default="default")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    parser.add_argument("--blocks", type=int, default=15, help="blocks of steps per side")
    parser.add_argument("--steps", type=int, default=10, help="steps per block")
    parser.add_argument("--warmup", type=int, default=10, help="steps before the first block")
    return parser.parse_args()


def main() -> None:
    """Measure the chosen models and print the table."""
    args = parse_args()
    print_heading()
    table, devices = [HEAD], set()
    for model in args.models:
        print(f"measuring {model}", file=sys.stderr)
        with tempfile.TemporaryDirectory() as scratch:
            blocks = measure(model, args, Path(scratch))
        table += rows(model, blocks, TINY_BATCH if args.tiny else BATCHES[model])
        devices |= {block.device for taken in blocks.values() for block in taken}
    print(f"device:  {', '.join(sorted(devices))}; amp {args.amp}, compile {args.compile}\n")
    print_markdown(table)


if __name__ == "__main__":
    main()
