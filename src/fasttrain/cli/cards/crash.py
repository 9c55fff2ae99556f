"""The cards of a run that failed, and of one that hangs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from textwrap import wrap

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from fasttrain.cli.cards.receipt import near, seconds
from fasttrain.cli.console import stderr_console
from fasttrain.launch.hang.verdict import rank_list
from fasttrain.model.crash import Crash
from fasttrain.model.crash import Frame as ScriptFrame
from fasttrain.model.hang import HANG_FILE, NO_PROGRESS, Frame, Hang, StuckProcess

# The card of a failed run, printed between the script's output and the receipt.


WIDTH = 80
# Most lines of one entry. With the head, that makes six lines if the traceback is on the screen.
ENTRY_LINES, ERROR_LINES = 2, 5
SHOWN_FRAMES = 1
_SLUG = re.compile(r"\[([a-z0-9-]+)\]\s*$")
SAYS_IT_ALL = {"exit", "interrupted", "stopped"}  # ends that are nobody's mistake


def print_crash(crash: Crash, run_dir: str, *, brief: bool = False) -> None:
    """Print a crash to stderr, without what is on the screen already.

    Args:
        crash: The crash.
        run_dir: The run directory.
        brief: Whether to print three lines only, and nothing for a single process whose output is
            on the screen: with --quiet, such a run prints what python would print.
    """
    if crash.shown and (crash.cause == "refused" or (brief and crash.ranks == 1)):
        return
    console = stderr_console()
    width = min(console.width, WIDTH)
    for line in _one_line(crash, width) or _lines(crash, run_dir, width, brief=brief):
        console.print(line, soft_wrap=True)


def _one_line(crash: Crash, width: int) -> list[Text]:
    """Return the line that suffices for a single process that printed the cause itself, or none."""
    all_said = crash.cause in SAYS_IT_ALL or not (crash.fix or crash.signal)
    if crash.ranks > 1 or not crash.shown or not all_said or crash.earlier or crash.final:
        return []
    line = crash.why if crash.cause in SAYS_IT_ALL else f"{_head(crash)}: {crash.why}"
    return [Text(_cut(f"fasttrain: {line}", width), style="bold")]


def _lines(crash: Crash, run_dir: str, width: int, *, brief: bool) -> Iterator[Text]:
    own = crash.cause == "refused" and not crash.shown
    what, slug = _own_error(crash.error) if own else ("", "")
    yield Text(f"fasttrain: {_head(crash)}        [{slug or crash.cause}]", style="bold red")
    if not brief and (not crash.shown or crash.signal):  # a signal leaves nothing on the screen
        frames = crash.frames[-SHOWN_FRAMES:] if crash.shown else crash.frames
        yield from (Text(_cut(f"  {_call(frame)}", width)) for frame in frames)
    if own:  # the card has its why and fix already
        yield Text(f"  {what}")
    elif not brief and not crash.shown:
        yield from map(Text, _fitted("  ", crash.error, width, ERROR_LINES))
    most = 1 if brief else ENTRY_LINES
    yield from _entry("why", crash.why, width, most)
    yield from _entry("fix", crash.fix, width, most)
    if brief:
        return
    yield from _entry("also", crash.others, width, most)
    yield from _entry("tried", crash.earlier, width, most)
    yield from _entry("again", f"no: {crash.final}" if crash.final else "", width, most)
    if crash.log_file and not crash.shown:
        yield from _entry("log", f"{near(run_dir)}/{crash.log_file}", width, most)
        yield from (Text(_cut(f"    | {line}", width), style="dim") for line in crash.log)


def _own_error(error: str) -> tuple[str, str]:
    """Return the first line of a FasttrainError, and its slug."""
    what, *more = error.partition("error: ")[2].splitlines() or [""]
    slug = _SLUG.search("\n".join([what, *more]))
    return what, slug[1] if slug else ""


def _head(crash: Crash) -> str:
    ended = crash.signal or f"exit code {crash.exit_code}"
    if crash.node:
        return f"rank {crash.rank} on {crash.node} failed first, with {ended}"
    if crash.ranks > 1:
        return f"rank {crash.rank} failed first, with {ended}"
    return f"the script died of {ended}" if crash.signal else f"the script failed with {ended}"


def _call(frame: ScriptFrame) -> str:
    where = f"{near(frame.file)}:{frame.line} in {frame.function}"
    return f"{where}: {frame.source}" if frame.source else where


def _entry(label: str, text: str, width: int, most: int) -> Iterator[Text]:
    for index, line in enumerate(_fitted("       ", text, width, most)):
        head = Text(f"  {label}: " if not index else "       ", style="bold")
        yield head.append(line.lstrip(), style="")


def _fitted(indent: str, text: str, width: int, most: int) -> list[str]:
    lines = [
        part
        for line in text.splitlines()
        for part in wrap(line, width, initial_indent=indent, subsequent_indent=indent)
    ]
    if len(lines) > most:
        lines = [*lines[: most - 1], f"{lines[most - 1][: width - 3]}..."]
    return lines


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."


# The card of a run that hangs: the stacks of the ranks, and who waits for whom.


INNERMOST = 3
STACK_FRAMES = 8
SHOWN_STACKS = 8
_ROLES = {"rank": "process", "loader worker": "DataLoader worker", "child": "child process"}
_ENDS = {
    "stop": "fasttrain stops the run (--on-hang report would let it go on)",
    "report": "the run goes on (--on-hang stop would end it)",
    "spare": "it may still work, so the run goes on (--hang-timeout SECONDS would end it)",
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
                helpers.append((title, _stack_lines(stack)))
    shown = [(rank_list(ranks), _stack_lines(stack)) for stack, ranks in alike.items() if stack]
    shown += helpers
    yield from shown[:SHOWN_STACKS]
    if len(shown) > SHOWN_STACKS:
        yield f"{len(shown) - SHOWN_STACKS} more stacks", []


def _main(process: StuckProcess) -> Stack:
    return process.threads[0] if process.threads else ()


def _stack_lines(stack: Stack) -> list[str]:
    """Return the innermost frames, and all frames of the user's own code."""
    kept = [frame for i, frame in enumerate(stack) if i < INNERMOST or frame.user]
    lines = [f"{frame.file}:{frame.line} {frame.function}" for frame in kept[:STACK_FRAMES]]
    left = len(stack) - len(lines)
    return [*lines, f"{left} more"] if left else lines
