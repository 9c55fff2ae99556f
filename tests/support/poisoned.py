"""A rehearsal of CUDA graphs on a CPU: compiled calls write to memory that later ones poison.

inductor's CUDA graphs write outputs, saved activations and gradients into one pool of memory, which
the next generation of replays uses again. A generation begins with the first graph that runs after
``torch.compiler.cudagraph_mark_step_begin()``. Here each graph has a buffer for each output, and a
generation begins by filling all buffers with NaN, those of forward and backward graphs alike. A
loop that reads what an earlier replay wrote gets NaN or numbers of the present replay, where on a
GPU it would get these or an error; what it writes there, the present replay reads.

Source: ``torch/_inductor/cudagraph_trees.py`` of torch 2.13. Its other ways are kept too: graphs of
one generation don't overwrite each other, outputs that are inputs stay in their own memory, a
gradient is taken over by ``.grad`` without a copy, and a graph's first run is a warm-up, not yet a
replay.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func  # type: ignore[attr-defined]
from torch._inductor.cudagraph_utils import log_cudagraph_skip_and_bump_counter

from fasttrain.shim.hooks.containers import map_tensors
from support.rig import rig

GRAPHED = "reduce-overhead"
Loop = Callable[[nn.Module], list[Tensor]]


class Pool:
    """The memory of all CUDA graphs.

    Attributes:
        skipped: Why no graph is recorded, if none is to be; empty otherwise.
    """

    def __init__(self, skipped: str = "") -> None:
        self.skipped = skipped
        self._marked = False
        self._names = itertools.count()
        self._warm: set[int] = set()
        self._runs: defaultdict[int, int] = defaultdict(int)  # by graph, in this generation
        # Of a graph that runs again in the same generation another recording is made.
        self._buffers: dict[tuple[int, int], list[Any]] = {}

    def mark_step_begin(self) -> None:
        """Let the next graph begin a generation: stands in for torch's function of that name."""
        self._marked = True

    def backend(self, module: Any, inputs: list[Any]) -> Any:
        """Compile a graph: a backend for ``torch.compile``."""
        return aot_autograd(fw_compiler=self._compile, bw_compiler=self._compile)(module, inputs)

    def _compile(self, graph: Any, _inputs: list[Any]) -> Any:
        if self.skipped:
            log_cudagraph_skip_and_bump_counter(f"skipping cudagraphs due to {self.skipped}")
            return make_boxed_func(graph.forward)
        name = next(self._names)

        def run(*inputs: Any) -> list[Any]:
            self._begin(name)
            return self._keep(name, graph.forward(*inputs), inputs)

        return make_boxed_func(run)

    def _begin(self, name: int) -> None:
        if self._marked:
            self._marked = False
            self._runs.clear()
            for buffer in itertools.chain(*self._buffers.values()):
                poison(buffer)
        if name in self._warm:
            torch.cuda.CUDAGraph.replay(mock.Mock())
        self._warm.add(name)

    def _keep(self, name: int, outputs: Any, inputs: tuple[Any, ...]) -> list[Any]:
        outside = {t.untyped_storage()._cdata for t in inputs if isinstance(t, Tensor)}
        buffers = self._buffers.setdefault((name, self._runs[name]), [None] * len(outputs))
        self._runs[name] += 1
        return [self._write(buffers, i, t, outside) for i, t in enumerate(outputs)]

    def _write(self, buffers: list[Any], at: int, output: Any, outside: set[int]) -> Any:
        if not isinstance(output, Tensor) or output.untyped_storage()._cdata in outside:
            return output
        if buffers[at] is None or buffers[at].size() != output.size():
            buffers[at] = output.detach().clone(memory_format=torch.preserve_format)
        else:
            buffers[at].copy_(output)
        return buffers[at].detach()  # a tensor that nothing else holds: autograd takes it over


def poison(buffer: Any) -> None:
    """Fill a tensor with NaN, or with what is least likely to be meant."""
    if buffer is None:
        return
    if buffer.is_floating_point() or buffer.is_complex():
        buffer.fill_(torch.nan)
    elif buffer.dtype is torch.bool:
        buffer.logical_not_()
    else:
        buffer.fill_(torch.iinfo(buffer.dtype).min)


@dataclass
class Rehearsed:
    """What became of a loop.

    Attributes:
        calls: By which of the two compiled functions each call was made: "plain" or "graphs".
        results: What the loop returned, read after its end.
        outcome: The compile lever's.
    """

    calls: list[str] = field(default_factory=list)
    results: list[list[float]] = field(default_factory=list)
    outcome: Any = None


@contextlib.contextmanager
def graphs_of(pool: Pool, calls: list[str]) -> Iterator[None]:
    """Let the mode with CUDA graphs compile for the pool, and the other one for dynamo alone."""
    original: Any = torch.compile

    def compile(model: Any = None, mode: str | None = None, **_: Any) -> Any:  # noqa: A001
        kind = "graphs" if mode == GRAPHED else "plain"
        compiled = original(model, backend=pool.backend if mode == GRAPHED else "eager")

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(kind)
            return compiled(*args, **kwargs)

        return call

    with (
        mock.patch.object(torch, "compile", compile),
        mock.patch.object(torch.compiler, "cudagraph_mark_step_begin", pool.mark_step_begin),
        mock.patch.object(torch.cuda.CUDAGraph, "replay"),
    ):
        yield
    torch._dynamo.reset()


def rehearse(loop: Loop, model: nn.Module, pool: Pool | None = None) -> Rehearsed:
    """Run a loop under the compile lever, with CUDA graphs wherever its guard admits them."""
    found = Rehearsed()
    with (
        graphs_of(pool or Pool(), found.calls),
        rig(compile="default", graphs=GRAPHED) as runtime,
    ):
        kept = loop(model)
        found.outcome = runtime.outcomes()["compile"]
    found.results = read(kept)
    return found


def read(tensors: list[Tensor]) -> list[list[float]]:
    """Return the numbers of tensors."""
    return [t.detach().double().flatten().tolist() for t in tensors]


def replay_blindly(loop: Loop, model: nn.Module) -> list[list[float]]:
    """Run a loop with every call of its model a replay whose outputs are copied; no guard."""
    pool = Pool()
    with graphs_of(pool, []):
        compiled: Any = torch.compile(_caller(model), mode=GRAPHED)

        def call(*args: Any, **kwargs: Any) -> Any:
            pool.mark_step_begin()
            return map_tensors(compiled(*args, **kwargs), Tensor.clone)

        vars(model)["_compiled_call_impl"] = call
        return read(loop(model))


def _caller(model: Any) -> Any:
    return lambda *args, **kwargs: model._call_impl(*args, **kwargs)
