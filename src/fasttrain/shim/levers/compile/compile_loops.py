"""Keeps loops that dynamo would unroll by the hundred from being compiled.

A recurrent loop over time steps becomes one graph with every round in it: 60 rounds of two
LSTM cells compiled for 50 s on a busy 2-core CPU (torch 2.13), 1,000 rounds not within 5 minutes.
Such a function runs eagerly, and the receipt names the line.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from fasttrain.shim.process.callsite import location, own_prefixes

CHECK_EVERY_NODES = 500
# Rounds of one line in one and the same module; a deep model's layers are different ones.
MOST_ROUNDS = 100


def refuse_long_loops(told: Callable[[str], None], undo: ExitStack) -> None:
    """Give up tracing a function as soon as such a loop shows.

    Args:
        told: Called with the line that repeats.
        undo: Takes the inverse.
    """
    from torch._dynamo import exc, output_graph

    tracer: Any = output_graph.SubgraphTracer
    original = tracer.create_proxy

    @functools.wraps(original)
    def create_proxy(self: Any, *args: Any, **kwargs: Any) -> Any:
        proxy = original(self, *args, **kwargs)
        if len(self.graph.nodes) % CHECK_EVERY_NODES == 0:
            line, rounds = _longest_loop(self.graph)
            if rounds > MOST_ROUNDS:
                told(line)
                raise exc.SkipFrame(f"a loop of more than {MOST_ROUNDS} rounds: {line}")
        return proxy

    undo.callback(setattr, tracer, "create_proxy", original)
    tracer.create_proxy = create_proxy


def _longest_loop(graph: Any) -> tuple[str, int]:
    """Give the line that the most operations come from, in one module by one operation."""
    rounds: Counter[Any] = Counter()
    for node in graph.nodes:
        # A module that is called again is `name@1`, `name@2`, ...
        modules = tuple(m.partition("@")[0] for m in node.meta.get("nn_module_stack", ()))
        if node.op.startswith("call") and modules:
            rounds[node.stack_trace, modules, str(node.target)] += 1
    if not rounds:
        return "", 0
    (trace, *_), most = rounds.most_common(1)[0]
    return _where(trace), most


def _where(trace: str | None) -> str:
    """Give ``file:line`` of the innermost frame of the user's in a formatted stack."""
    lines = [line for line in (trace or "").splitlines() if line.startswith('  File "')]
    frames = [line.split('"') for line in lines]
    own = [frame for frame in frames if not frame[1].startswith(own_prefixes())] or frames
    if not own:
        return "an unknown line"
    _, path, rest = own[-1]  # `  File "PATH", line 12, in forward`
    return location(path, int(rest.split()[2].rstrip(",")))
