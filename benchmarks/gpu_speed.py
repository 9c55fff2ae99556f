"""What a run under fasttrain gains: plain, made fast by hand, and plain under fasttrain.

Four processes share the GPU and take blocks of steps in turn, so that its clock and temperature
affect all alike. Only one computes at a time, and each keeps its own memory. The same file runs
plainly and under fasttrain. "same" has fasttrain's levers written by hand, so that "x same" is
fasttrain's overhead; "expert" also has what fasttrain leaves to the script (loops_gpu_by_hand.py).

    python benchmarks/gpu_speed.py
    python benchmarks/gpu_speed.py --models gpt --compile off --batch 2  # a small GPU
    python benchmarks/gpu_speed.py --sides same fasttrain --json out.json  # the overhead alone
    python benchmarks/gpu_speed.py --device cpu --tiny      # a test that it runs, no measurement
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from step_overhead import median_and_interval
from tables import print_heading
from workers import Worker

HERE = Path(__file__).resolve().parent
MODELS = ("gpt", "resnet50", "unet")
BATCHES = {"gpt": 8, "resnet50": 64, "unet": 8}
TINY_BATCH = 2
SIDES = ("plain", "same", "expert", "fasttrain")
MODES = ("off", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
HEAD = ("model", "loop", "step ms", "samples/s", "peak GiB", *(f"x {s}" for s in SIDES[:3]), "loss")
Blocks = dict[str, list["GpuBlock"]]


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
        self.ask(count)
        return self.answer()

    def ask(self, count: int) -> None:
        """Let the worker take steps, without waiting for their end."""
        print(count, file=self.stream, flush=True)

    def answer(self) -> GpuBlock:
        """Return the steps that it was asked for.

        Raises:
            SystemExit: If it died.
        """
        answer = self.stream.readline()
        if not answer:
            raise SystemExit(f"a worker ended with {self.process.wait()} in the midst of its steps")
        return GpuBlock(**json.loads(answer))


def batch_of(model: str, args: argparse.Namespace) -> int:
    """Return the samples of a step."""
    return args.batch or (TINY_BATCH if args.tiny else BATCHES[model])


def commands(model: str, args: argparse.Namespace, scratch: Path) -> dict[str, list[str]]:
    """Return the command line of each side, which connects to the socket of that name."""

    def loop(side: str) -> list[str]:
        size, batch = "tiny" if args.tiny else "full", str(batch_of(model, args))
        return [model, args.device, size, batch, str(scratch / side)]

    plain, by_hand = str(HERE / "loops_gpu.py"), str(HERE / "loops_gpu_by_hand.py")
    levers = ["--amp", args.amp, "--compile", args.compile, "--optimizer", "fused"]
    options = ["--device", args.device, "--strict", "--quiet", "--run-dir", str(scratch / "run")]
    fasttrain = [sys.executable, "-m", "fasttrain", "run", *levers, *options, plain, "--"]
    modes = {"same": args.compile, "expert": args.expert_compile}
    return {
        "plain": [sys.executable, plain, *loop("plain")],
        **{
            side: [sys.executable, by_hand, *loop(side), side, args.amp, mode]
            for side, mode in modes.items()
        },
        "fasttrain": [*fasttrain, *loop("fasttrain")],
    }


def measure(model: str, args: argparse.Namespace, scratch: Path) -> Blocks:
    """Let the sides take blocks of steps in turn; each is first equally often."""
    environ = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor")}
    if args.device == "cpu":
        environ["OMP_NUM_THREADS"] = "1"  # threads that wait would take the cores of other sides
    argvs = commands(model, args, scratch)
    blocks: Blocks = {side: [] for side in args.sides}
    with ExitStack() as stack:
        workers = {}
        for side in args.sides:
            workers[side] = stack.enter_context(GpuWorker(argvs[side], scratch / side, environ))
            workers[side].ask(args.warmup)
        for worker in workers.values():  # they have compiled side by side
            worker.answer()
        for number in range(args.blocks):
            first = number % len(args.sides)
            for side in (*args.sides[first:], *args.sides[:first]):
                blocks[side].append(workers[side].take_block(args.steps))
    if args.keep and "fasttrain" in args.sides:
        keep_receipt(scratch / "run" / "receipt.json", args.keep / f"receipt-{model}.json")
    return blocks


def keep_receipt(receipt: Path, to: Path) -> None:
    """Copy a receipt, if there is one; the worker that it is of has ended by now."""
    if receipt.exists():
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_bytes(receipt.read_bytes())


def median_s(blocks: list[GpuBlock]) -> float:
    """Return the median step of a side's blocks, in seconds."""
    return statistics.median(block.step_s for block in blocks)


def ratio(blocks: Blocks, side: str, other: str) -> str:
    """Return how many times as fast a side is as another one, by their medians."""
    if other not in blocks:
        return "-"
    return f"{median_s(blocks[other]) / median_s(blocks[side]):.2f}"


def rows(model: str, blocks: Blocks, batch: int) -> list[tuple[str, ...]]:
    """Return a row for each side; ratios are of medians, and above 1 if the side is faster."""
    return [
        (
            *(model, side, f"{1e3 * median_s(taken):.2f}", f"{batch / median_s(taken):.1f}"),
            f"{max(block.peak_bytes for block in taken) / 2**30:.2f}",
            *(ratio(blocks, side, other) for other in SIDES[:3]),
            f"{taken[-1].loss:.4f}",
        )
        for side, taken in blocks.items()
    ]


def overheads(blocks: Blocks) -> list[float]:
    """Return fasttrain's step over the same levers by hand, for each round of blocks."""
    pairs = zip(blocks.get("same", []), blocks.get("fasttrain", []), strict=False)
    return [other.step_s / hand.step_s for hand, other in pairs]


def print_markdown(table: list[tuple[str, ...]]) -> None:
    """Print rows as Markdown; the first row is the head."""
    widths = [max(len(cell) for cell in column) for column in zip(*table, strict=True)]
    for number, row in enumerate(table):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("| " + " | ".join(cells) + " |")
        if number == 0:
            print("|" + "|".join("-" * (width + 2) for width in widths) + "|")


def as_json(measured: dict[str, Blocks], failed: dict[str, str], args: argparse.Namespace) -> str:
    """Return what was measured, for a machine to read; times are in seconds."""
    chosen = {name: getattr(args, name) for name in ("device", "amp", "compile", "expert_compile")}
    models = {
        model: {
            "batch": batch_of(model, args),
            "sides": {side: [asdict(b) for b in taken] for side, taken in blocks.items()},
            "overheads": overheads(blocks),
        }
        for model, blocks in measured.items()
    }
    found = {**chosen, "torch": version("torch"), "models": models, "failed": failed}
    return json.dumps(found, indent=1)


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--amp", choices=["off", "bf16", "fp16"], help="default: what it has")
    parser.add_argument("--compile", choices=MODES, default="default", help="of same, fasttrain")
    parser.add_argument("--expert-compile", choices=MODES, default="reduce-overhead")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    parser.add_argument("--batch", type=int, help=f"samples per step; default: {BATCHES}")
    parser.add_argument("--blocks", type=int, default=15, help="blocks of steps per side")
    parser.add_argument("--steps", type=int, default=10, help="steps per block")
    parser.add_argument("--warmup", type=int, default=10, help="steps before the first block")
    parser.add_argument("--json", type=Path, help="file to write all blocks to")
    parser.add_argument("--keep", type=Path, help="folder to copy fasttrain's receipts to")
    args = parser.parse_args()
    args.amp = args.amp or (native_precision() if args.device == "cuda" else "bf16")
    return args


def native_precision() -> str:
    """Return the precision that the first GPU has natively; torch is imported by a child."""
    ask = "import torch; print(*torch.cuda.get_device_capability())"
    done = subprocess.run([sys.executable, "-c", ask], stdout=subprocess.PIPE, check=True)
    return "bf16" if tuple(map(int, done.stdout.split())) >= (8, 0) else "fp16"


def measure_all(args: argparse.Namespace) -> tuple[dict[str, Blocks], dict[str, str]]:
    """Return the blocks of each model, and why a model has none: one may not fit the memory."""
    measured, failed = {}, {}
    for model in args.models:
        print(f"measuring {model}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as scratch:
            try:
                measured[model] = measure(model, args, Path(scratch))
            except SystemExit as error:
                failed[model] = str(error)
        if args.json:  # after each model: a time limit may end the next one
            args.json.write_text(as_json(measured, failed, args) + "\n", encoding="utf-8")
    return measured, failed


def main() -> None:
    """Measure the chosen models and print the table."""
    args = parse_args()
    print_heading()
    measured, failed = measure_all(args)
    table, devices = [HEAD], set()
    for model, blocks in measured.items():
        table += rows(model, blocks, batch_of(model, args))
        devices |= {block.device for taken in blocks.values() for block in taken}
    modes = f"compile {args.compile}, by the expert {args.expert_compile}"
    print(f"device:  {', '.join(sorted(devices))}; amp {args.amp}, {modes}\n")
    print_markdown(table)
    for model, blocks in measured.items():
        if found := overheads(blocks):
            print(f"\n{model}: fasttrain / same {median_and_interval(found, '.4f')}")
    for model, why in failed.items():
        print(f"\n{model}: {why}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
