"""What a training step sends at 8 and 64 ranks, and where it would wait for a GPU.

One process is rank 0 of N, in torch's fake process group, whose collectives leave tensors
unchanged. On one side the tasks of data_parallel_overhead.py run with the levers that fasttrain
installs in a worker; on the other side they are made data-parallel by hand, with torch's
DistributedDataParallel. Counted are:

- collectives of tensors, and their bytes: the input of an all-reduce or a broadcast, the output of
  a gather;
- meetings: one KiB of numbers from the host, sent by gloo on any device;
- reads of numbers (`item()`, `float()`), each of which would wait for a GPU; tensors made of
  numbers, each a small copy to it; copies to another type or device.

The ranks are set up as on two nodes or more, because CPU tensors of one node go through its shared
memory, which those of GPUs don't. All other ranks send the same as this one: sums are N times its
own, and gathered tensors repeat its rows. So values mean nothing here. When fasttrain verifies how
it splits a batch, the comparison of values is skipped; the rest of it runs, in calls (1, 2, 4, 8
and 16) before those that are counted (20 to 24).

    python benchmarks/data_parallel_traffic.py
    python benchmarks/data_parallel_traffic.py mlp --ranks 8 256
"""

import argparse
import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from parallel_tasks import TASKS, Task, build_task
from synchronised_norm import synchronise
from tables import print_heading, print_table
from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from fasttrain.model.levers import Strategy
from fasttrain.shim.data_parallel import ranks as ranks_module
from fasttrain.shim.data_parallel import replica
from fasttrain.shim.data_parallel.context import ParallelContext
from fasttrain.shim.data_parallel.random_streams import RandomStreams
from fasttrain.shim.data_parallel.rank_consistency import SameLine
from fasttrain.shim.data_parallel.ranks import Ranks
from fasttrain.shim.data_parallel.replicate import Replicate
from fasttrain.shim.data_parallel.split import trial
from fasttrain.shim.hooks.containers import tensors_in
from fasttrain.shim.hooks.dynamo import UserCompile
from fasttrain.shim.hooks.loop import TrainingState
from fasttrain.shim.hooks.outcome_recorder import OutcomeRecorder
from fasttrain.shim.hooks.roots import RootCalls

ROWS = 64  # of a batch at least: a row for each rank
TOKENS = 512  # of a batch with a large vocabulary
FIRST, LAST = 20, 24  # the counted steps
COUNTED = {
    "aten._local_scalar_dense": "reads",
    "aten.lift_fresh": "tensors of numbers",
    "aten._to_copy": "copies",
}
KINDS = {  # of collectives, by a part of their names
    "reduce": "all-reduces",
    "gather": "gathers",
    "broadcast": "broadcasts",
}
COLUMNS = ("all-reduces", "gathers", "broadcasts", "KiB", "meetings", *COUNTED.values())


class Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts calls under the names of `COLUMNS`, and the bytes sent."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        word = COUNTED.get(str(func.overloadpacket))
        if word is not None:
            self.counts[word] += 1
        return func(*args, **(kwargs or {}))

    def around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a collective that counts its calls."""

        def collective(*args: Any, **kwargs: Any) -> Any:
            word = next(word for part, word in KINDS.items() if part in original.__name__)
            self.counts[word] += 1
            # The first argument is reduced, broadcast, or gathered into.
            self.counts["bytes"] += sum(tensor.nbytes for tensor in tensors_in(args[0]))
            return original(*args, **kwargs)

        return collective

    @contextlib.contextmanager
    def of_python(self) -> Iterator[None]:
        """Count the collectives that are called from Python in a block."""
        with ExitStack() as stack:
            for name in ("all_reduce", "broadcast", "all_gather"):
                new = self.around(getattr(distributed, name))
                stack.enter_context(mock.patch.object(distributed, name, new))
            new = self.around(ranks_module._all_gather)
            stack.enter_context(mock.patch.object(ranks_module, "_all_gather", new))
            yield


# A call of a root inside of a dispatch mode that isn't fasttrain's runs whole on each rank.
Traffic.__module__ = "fasttrain.traffic"


class Ddp(DistributedDataParallel):
    """Sends its buckets from Python, since futures of the fake group have no result."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_comm_hook(None, _send)


def _send(_, bucket):  # type: ignore[no-untyped-def] # torch checks the annotations, so there are none
    buffer = bucket.buffer().div_(distributed.get_world_size())
    distributed.all_reduce(buffer)
    sent: torch.futures.Future[Tensor] = torch.futures.Future()
    sent.set_result(buffer)
    return sent


class AlikeRanks(Ranks):
    """Ranks that all send the same as this one."""

    def __init__(self, world_size: int, traffic: Traffic) -> None:
        torchs: Any = distributed
        super().__init__(0, world_size, torchs.HashStore(), "fake")
        self._traffic = traffic

    def sum(self, tensor: Tensor) -> Tensor:
        """Send a tensor, and return it multiplied by the number of ranks."""
        return super().sum(tensor).mul_(self.world_size)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Send a tensor, and return it repeated for each rank."""
        whole = super().all_gather(tensor)
        for part in whole.chunk(self.world_size):
            part.copy_(tensor)
        return whole

    def sum_numbers(self, numbers: Sequence[float], part: Tensor | None = None) -> list[float]:  # noqa: ARG002
        """Send numbers, and return them multiplied by the number of ranks."""
        self._traffic.counts["meetings"] += 1
        return [number * self.world_size for number in numbers]

    def gather(self, text: str) -> list[str]:
        """Return the same text for all ranks."""
        return [text] * self.world_size


@contextlib.contextmanager
def injected(world_size: int, traffic: Traffic) -> Iterator[None]:
    """Install the levers of a worker."""
    check = SameLine.check

    def on_a_gpu(parting: SameLine, doing: str, *_: Sequence[Tensor]) -> None:
        check(parting, doing)  # on a GPU, a backward pass has no numbers on the host to compare

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(replica, "DistributedDataParallel", Ddp))
        stack.enter_context(mock.patch.object(SameLine, "check", on_a_gpu))
        stack.enter_context(mock.patch.object(trial, "check_equal"))
        ranks, roots = AlikeRanks(world_size, traffic), RootCalls()
        context = ParallelContext(
            *(Strategy("ddp"), ranks, roots, RandomStreams(ranks), TrainingState(roots)),
            compiled=UserCompile(),
        )
        context.streams.agree()
        context.training.install(stack)
        lever = Replicate(OutcomeRecorder("strategy", "ddp", explicit=False), context)
        lever.install(stack)
        roots.install(stack)
        yield
        counts = lever.recorder.counts
        assert counts["split calls"] >= LAST - FIRST, (
            f"nothing was split: {lever.recorder.outcome()}"
        )
        ranks.leave()


@contextlib.contextmanager
def by_hand(world_size: int, traffic: Traffic) -> Iterator[None]:  # noqa: ARG001 - as `injected`
    """Create the process group."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    yield
    distributed.destroy_process_group()


def batch_of(task: Task) -> tuple[Tensor, Tensor]:
    """Return a batch with at least one row for each rank."""
    rows = max(task.batch, ROWS)
    x, y = task.inputs[:rows], task.targets[:rows]
    large = x.dim() == 2 and not x.is_floating_point() and int(x.max()) > 1000
    return (x[:, : TOKENS // rows], y[:, : TOKENS // rows]) if large else (x, y)


def counts_of(name: str, world_size: int, hand: bool, evaluate: bool) -> dict[str, float]:
    """Return the counts of a task, per step."""
    task, traffic = build_task(name), Traffic()
    x, y = batch_of(task)
    model: Any = task.model.eval() if evaluate else task.model
    with (by_hand if hand else injected)(world_size, traffic), traffic.of_python(), traffic:
        if hand:
            x, y = (t[: len(t) // world_size] for t in (x, y))
            model = model if evaluate else Ddp(synchronise(model))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for step in range(1, LAST + 1):
            if step == FIRST:
                traffic.counts.clear()
            if evaluate:
                with torch.no_grad():
                    model(x).argmax(dim=-1)
                continue
            optimizer.zero_grad()
            loss: Any = task.loss(model, x, y)
            loss.backward()
            optimizer.step()
        counted = traffic.counts.copy()
    steps = LAST - FIRST + 1
    return {word: count / steps for word, count in counted.items()}


def row(name: str, world_size: int, side: str, counts: dict[str, float]) -> tuple[str, ...]:
    """Return a row of the table."""
    shown = {**counts, "KiB": counts.get("bytes", 0.0) / 1024}
    cells = (f"{shown.get(word, 0.0):.5g}" for word in COLUMNS)
    return (f"{name}, {side}", str(world_size), *cells)


def main() -> None:
    """Count and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    every = [*TASKS, "validation"]
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=f"of {', '.join(every)}")
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 64])
    args = parser.parse_args()
    if unknown := set(args.tasks) - set(every):
        parser.error(f"no task {', '.join(unknown)}; there are {', '.join(every)}")
    print_heading()
    os.environ["LOCAL_WORLD_SIZE"] = "1"  # so the ranks are on several nodes
    torch.set_num_threads(1)
    rows = [("a step of", "ranks", *COLUMNS)]
    for name in args.tasks or every:
        for world_size in args.ranks:
            for side, hand in (("hand", True), ("fasttrain", False)):
                task = "convnet" if name == "validation" else name
                counts = counts_of(task, world_size, hand, name == "validation")
                rows.append(row(name, world_size, side, counts))
    print_table(rows)


if __name__ == "__main__":
    main()
