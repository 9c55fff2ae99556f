"""Reads what dynamo did since the first root was compiled: graphs, breaks, recompiles, failures.

Source: ``torch/_dynamo/utils.py`` of torch 2.13: ``counters``, ``graph_break_reasons`` and
``CompilationMetrics``.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fasttrain.model.outcome import State
from fasttrain.model.places import COMPILED_VARIABLE
from fasttrain.shim.hooks.outcome_recorder import OutcomeRecorder
from fasttrain.shim.levers.compile.recompiles import in_words
from fasttrain.shim.process.callsite import is_own_file, location

KEPT_METRICS = 1000  # dynamo keeps 64, about 20 compilations
LIMIT = "recompile limit"
SKIPPING = "skipping cudagraphs due to "
UNKNOWN_SKIP = "TORCH_LOGS=cudagraphs shows why"
CUT = "cut at DDP's buckets, so that ranks send gradients while they compute others"
TOO_LONG = "took too long to compile"  # of a compilation that fasttrain ended: it tells that itself
NUMPY_DRAWS = "NumPy draws random numbers there, from its own stream"
COMPILERS = ("torch._dynamo", "torch._functorch._aot_autograd", "torch._inductor")
FAKES = "torch._subclasses"  # logs as an error what dynamo then fails by
# Where inductor precompiles headers, whatever the cache of its programs is. Source: torch 2.13,
# torch/_inductor/runtime/cache_dir_utils.py, default_cache_dir.
DEFAULT_CACHE = str(Path(tempfile.gettempdir(), "torchinductor_"))
TORCHS_WARNINGS = ("ignore", None, Warning, re.compile(r"torch\b"), 0)  # a filter of Python's


class Account:
    """Reads dynamo's counters, which are global, relative to the construction of this object."""

    def __init__(self, undo: ExitStack) -> None:
        from torch._dynamo import utils

        self._utils = utils
        self._before = utils.get_compilation_metrics()  # referenced, so that no id is used again
        self._graphs = utils.counters["stats"]["unique_graphs"]
        self._breaks = len(utils.graph_break_reasons)
        self._cached = utils.counters["aot_autograd"]["autograd_cache_hit"]
        self._skips = utils.counters["inductor"]["cudagraph_skips"]
        self._compile_s = self._total_s()
        utils.set_compilation_metrics_limit(KEPT_METRICS)
        undo.callback(utils.set_compilation_metrics_limit, utils.DEFAULT_COMPILATION_METRICS_LIMIT)
        _hush(undo)

    @property
    def compile_s(self) -> float:
        """Seconds that dynamo and inductor took so far."""
        return self._total_s() - self._compile_s

    @property
    def graphs(self) -> int:
        """Number of graphs that dynamo made so far."""
        return max(0, self._utils.counters["stats"]["unique_graphs"] - self._graphs)

    def _total_s(self) -> float:
        return float(self._utils.calculate_time_spent().get("total_wall_time", 0.0))

    def read(self, recorder: OutcomeRecorder) -> None:
        """Set the counts of the recorder and add its notes, failures first."""
        metrics = self._metrics()
        recorder.counts["graphs"] = self.graphs
        cached = self._utils.counters["aot_autograd"]["autograd_cache_hit"] - self._cached
        if cached > 0:
            recorder.counts["cached graphs"] = cached
        _read_failures(recorder, metrics)
        if recorder.counts["long loops"] and not recorder.counts["graphs"] and recorder.live:
            recorder.excuse(
                State.FAILED, "ran eagerly: its loops unroll into hundreds of iterations"
            )
        self._read_breaks(recorder)
        recompiles = [m.recompile_reason for m in metrics if m.recompile_reason]
        recorder.counts["recompiles"] = len(recompiles)
        for reason in recompiles:
            recorder.note(f"recompile: {_brief(in_words(reason))}")

    def read_skips(self, recorder: OutcomeRecorder) -> None:
        """Count the graphs for which inductor records no CUDA graph, and note why.

        Its metrics hold the reasons of compilations. What it decides at a replay it only counts.

        Source: ``torch/_inductor/cudagraph_utils.py`` of torch 2.13.
        """
        skips = self._utils.counters["inductor"]["cudagraph_skips"] - self._skips
        if skips <= 0:
            return
        recorder.counts["CUDA graph skips"] = skips
        found = [getattr(m, "cudagraph_skip_reason", None) for m in self._metrics()]
        reasons = [_brief(reason).removeprefix(SKIPPING) for reason in found if reason]
        for reason in reasons or [UNKNOWN_SKIP]:
            recorder.note(f"inductor skips CUDA graphs: {reason}")

    def _metrics(self) -> list[Any]:
        known = set(map(id, self._before))
        return [m for m in self._utils.get_compilation_metrics() if id(m) not in known]

    def _read_breaks(self, recorder: OutcomeRecorder) -> None:
        """Count graph breaks by place: dynamo reports one again for each frame that inlines it."""
        places: dict[str, None] = {}
        for found in self._utils.graph_break_reasons[self._breaks :]:
            if "DDPOptimizer" in found.reason:  # no break: the parts are called as one graph
                recorder.note(CUT)
                continue
            frame = found.user_stack[-1] if found.user_stack else None
            where = _at(frame.filename, frame.lineno) if frame else ""
            why = NUMPY_DRAWS if "torch._numpy.random" in found.reason else _brief(found.reason)
            places[f"graph break{where}: {why}"] = None
        recorder.counts["breaks"] = len(places)
        for text in places:
            recorder.note(text)


def _hush(undo: ExitStack) -> None:
    """Keep what compilers log and warn of out of the script's output and logs.

    Dynamo logs breaks and failures with whole stacks, of which the receipt has a line for each.
    inductor logs and warns of its cache, and at the level DEBUG its locks are logged, which would
    be in the log of a script that logs everything. What else torch warns of while it compiles isn't
    about what the script does. TORCH_LOGS turns all of this on again.
    """
    if "TORCH_LOGS" in os.environ:
        return
    for name in (*COMPILERS, FAKES):
        logger = logging.getLogger(name)
        if logger.level == logging.NOTSET:
            undo.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.CRITICAL if name == FAKES else logging.ERROR)
    locks = logging.getLogger("filelock")
    locks.addFilter(_is_not_of_cache)
    undo.callback(locks.removeFilter, _is_not_of_cache)
    announce(_hide_warnings, _show_warnings, undo)
    undo.callback(_show_warnings)


def _hide_warnings() -> None:
    """Show none of torch's warnings: of gradients, say, that only the tracing of a graph takes.

    Not by `filterwarnings`, after which Python forgets which warnings it has shown.
    """
    _show_warnings()
    filters: Any = warnings.filters
    filters.insert(0, TORCHS_WARNINGS)


def _show_warnings() -> None:
    filters: Any = warnings.filters
    _remove(filters, TORCHS_WARNINGS)


def _is_not_of_cache(record: logging.LogRecord) -> bool:
    """False for a record of filelock's about a lock in a cache of inductor's."""
    caches = (os.environ.get(COMPILED_VARIABLE, DEFAULT_CACHE), DEFAULT_CACHE)
    given = record.args if isinstance(record.args, tuple) else ()
    return not any(str(argument).startswith(caches) for argument in given)


def _read_failures(recorder: OutcomeRecorder, metrics: list[Any]) -> None:
    known = (LIMIT, TOO_LONG)
    failed = [m for m in metrics if m.fail_reason and not any(s in m.fail_reason for s in known)]
    limited = [m for m in metrics if m.fail_reason and LIMIT in m.fail_reason]
    recorder.counts["failures"] = len(failed)
    recorder.counts["limits"] = len(limited)
    for m in failed:
        where = _at(m.fail_user_frame_filename, m.fail_user_frame_lineno)
        recorder.note(f"ran eagerly{where}: {m.fail_type}: {_brief(m.fail_reason)}")
    for m in limited:
        recorder.note(
            f"{LIMIT} reached: calls that fit none of its graphs run eagerly;"
            f" last reason: {_brief(in_words(m.recompile_reason or m.fail_reason))}"
        )
    if failed and not recorder.counts["graphs"] and recorder.live:
        # Not settled: another model of the script may still be compiled.
        recorder.excuse(State.FAILED, f"ran eagerly: {_brief(failed[0].fail_reason)}")


def _at(path: str | None, line: int | None) -> str:
    """Return where dynamo gave up; empty if in the function that calls a root of torch's class."""
    return f" at {location(path, line or 0)}" if path and not is_own_file(path) else ""


def _brief(text: str) -> str:
    """Return the first line that isn't empty, cut to 160 characters."""
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    brief = lines[0] if lines else ""
    if brief.endswith(":") and len(lines) > 1:  # "backend='inductor' raised:"
        brief = f"{brief} {lines[1]}"
    return brief if len(brief) <= 160 else brief[:157] + "..."


def announce(begins: Callable[[], None], ends: Callable[[], None], undo: ExitStack) -> None:
    """Call one function when dynamo begins to compile, and the other when it has compiled.

    So a user can be shown why nothing happens: a large model compiles for minutes. Compilations
    inside others count as one. Does nothing if torch has no such callbacks.

    Source: torch 2.13, torch/_dynamo/callback.py
    """
    try:
        from torch._dynamo.callback import callback_handler as handler
    except ImportError:  # before torch 2.3
        return

    def begun(*_: object) -> None:
        begins()

    def ended(*_: object) -> None:
        ends()

    # A reset of dynamo, as by torch.compiler.reset(), clears them: nothing is announced after it.
    handler.register_start_callback(begun)
    handler.register_end_callback(ended)
    undo.callback(_remove, handler.start_callbacks, begun)
    undo.callback(_remove, handler.end_callbacks, ended)


def _remove(items: list[Any], item: Any) -> None:
    if item in items:
        items.remove(item)
