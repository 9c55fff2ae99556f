"""The card of a run that hangs: the stacks of the ranks, and who waits for whom."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from fasttrain.cli.cards.receipt import near, seconds
from fasttrain.cli.console import stderr_console
from fasttrain.launch.hang.verdict import rank_list
from fasttrain.model.hang import HANG_FILE, NO_PROGRESS, Frame, Hang, StuckProcess

WIDTH = 80
INNERMOST = 3
SHOWN_FRAMES = 8
SHOWN_STACKS = 8
_ROLES = {"rank": "process", "loader worker": "DataLoader worker", "child": "child process"}
_ENDS = {
    "stop": "fasttrain stops the run (--on-hang report would let it go on)",
    "report": "the run goes on (--on-hang stop would end it)",
    "spare": "it computes, so the run goes on (--hang-timeout SECONDS would end it)",
}


Stack = tuple[Frame, ...]


def print_hang(hang: Hang, run_dir: str) -> None:
    """Print the card to stderr."""
    console = stderr_console()
    console.width = min(console.width, WIDTH)
    steps = max((rank.steps for rank in hang.ranks), default=0)
    head = f"fasttrain: {NO_PROGRESS} for {seconds(hang.quiet_s)}, after step {steps:,}"
    console.print(Text(head, style="bold red"))
    for line in hang.verdict:
        _indented(console, Text(line))
    for title, lines in _stacks(hang):
        _indented(console, Text(title, style="bold"))
        for line in lines:
            _indented(console, Text(line), 4)
    _indented(console, Text(_ENDS[hang.action], style="yellow"))
    console.print(Text(f"  all stacks: {near(run_dir)}/{HANG_FILE}"), soft_wrap=True)


def _indented(console: Console, text: Text, columns: int = 2) -> None:
    console.print(Padding(text, (0, 0, 0, columns), expand=False))


def _stacks(hang: Hang) -> Iterator[tuple[str, list[str]]]:
    """Yield the main threads' stacks with a title that names the ranks; equal stacks only once."""
    # Hundreds of ranks usually have a few different stacks.
    alike: dict[Stack, list[int]] = {}
    helpers: list[tuple[str, list[str]]] = []
    for rank in hang.ranks:
        alike.setdefault(_main(rank.processes[0]), []).append(rank.rank)
        for process in rank.processes[1:]:
            stack = _main(process)
            # A DataLoader worker that waits for work has no frame of the user's code.
            if stack and (process.role == "child" or any(frame.user for frame in stack)):
                title = f"rank {rank.rank}, {_ROLES[process.role]} {process.pid}"
                helpers.append((title, _lines(stack)))
    shown = [(rank_list(ranks), _lines(stack)) for stack, ranks in alike.items() if stack]
    shown += helpers
    yield from shown[:SHOWN_STACKS]
    if len(shown) > SHOWN_STACKS:
        yield f"{len(shown) - SHOWN_STACKS} more stacks", []


def _main(process: StuckProcess) -> Stack:
    return process.threads[0] if process.threads else ()


def _lines(stack: Stack) -> list[str]:
    """Return the innermost frames, and all frames of the user's own code."""
    kept = [frame for i, frame in enumerate(stack) if i < INNERMOST or frame.user]
    lines = [f"{frame.file}:{frame.line} {frame.function}" for frame in kept[:SHOWN_FRAMES]]
    left = len(stack) - len(lines)
    return [*lines, f"{left} more"] if left else lines
