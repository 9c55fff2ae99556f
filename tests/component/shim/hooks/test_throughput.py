"""Throughput is what a stopwatch beside the training would say."""

from __future__ import annotations

import sys
import threading
from collections import UserDict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from fasttrain.shim.hooks.roots import RootCalls
from fasttrain.shim.hooks.steps import StepMeter
from fasttrain.shim.process import true_clock

TEN = TensorDataset(torch.ones(10, 3))


class Stopwatch:
    """A meter whose clock the test sets, and a model to train."""

    def __init__(self, undo: ExitStack, *, by_calls: bool) -> None:
        self.now = 100.0
        self.meter = StepMeter(self.now)
        self.meter.install(undo)
        if by_calls:
            roots = RootCalls()
            roots.on_call.append(self.meter.throughput.called)
            roots.install(undo)
        self.model = nn.Linear(3, 1)
        self.sgd = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)

    def clock(self) -> float:
        return self.now

    def loss(self, x: Tensor, seconds: float = 1.0) -> Tensor:
        loss: Tensor = self.model(x).sum()
        self.now += seconds
        return loss

    def step(self, x: Tensor) -> None:
        self.loss(x).backward()
        self.sgd.step()

    def validate(self, seconds: float, loader: Any, *, grad: bool) -> None:
        self.model.eval()
        with torch.set_grad_enabled(grad):
            for (x,) in loader:
                self.loss(x, seconds / len(loader))
        self.model.train()

    @property
    def samples_per_s(self) -> float:
        return self.meter.stats(0.0).samples_per_s


@pytest.fixture(params=[False, True], ids=["levers off", "calls seen"])
def watch(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stopwatch]:
    with ExitStack() as undo:
        watch = Stopwatch(undo, by_calls=request.param)
        monkeypatch.setattr(true_clock, "perf_counter", watch.clock)
        yield watch


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stopwatch]:
    with ExitStack() as undo:
        calls = Stopwatch(undo, by_calls=True)
        monkeypatch.setattr(true_clock, "perf_counter", calls.clock)
        yield calls


def test_batches_of_a_loader_by_the_wall_clock(watch: Stopwatch) -> None:
    for (x,) in DataLoader(TEN, batch_size=4):  # 4, 4, 2: the first is not timed
        watch.step(x)
        watch.now += 2.0  # a pause that the script makes
    assert watch.samples_per_s == 6 / 6.0


def test_a_batch_counts_once_for_all_models_and_calls(watch: Stopwatch) -> None:
    """The GAN of the tutorial: three inputs of two models for one batch of 4."""
    critic = nn.Linear(3, 1)
    for (x,) in DataLoader(TEN, batch_size=4, drop_last=True):
        critic(x).sum().backward()
        critic(x + 1).sum().backward()
        watch.other.step()
        watch.step(x)
    assert watch.meter.steps == 2
    assert watch.samples_per_s == 4 / 1.0


def test_accumulated_batches_and_two_loaders(watch: Stopwatch) -> None:
    for _ in range(3):
        for (x,), (y,) in zip(
            DataLoader(TEN, batch_size=2), DataLoader(TEN, batch_size=5), strict=False
        ):
            (watch.loss(x) + watch.loss(y)).backward()
        watch.sgd.step()
    assert watch.samples_per_s == (2 * 2 + 2 * 5) * 2 / 8.0


@pytest.mark.parametrize("grad", [False, True])
def test_validation_is_apart(watch: Stopwatch, grad: bool) -> None:
    for _ in range(3):
        for (x,) in DataLoader(TEN, batch_size=5):
            watch.step(x)
        watch.validate(50.0, DataLoader(TEN, batch_size=2), grad=grad)
    assert watch.samples_per_s == pytest.approx(25 / 5.0)


def test_validation_behind_the_second_optimizer(watch: Stopwatch) -> None:
    """A step of a GAN begins with its critic: what follows the generator is in the middle."""
    for _ in range(3):
        for (x,) in DataLoader(TEN, batch_size=5):
            critic_loss = watch.loss(x, 0.0)
            watch.other.zero_grad()
            critic_loss.backward()
            watch.other.step()
            watch.step(x)
        watch.validate(50.0, DataLoader(TEN, batch_size=2), grad=False)
    assert watch.samples_per_s == pytest.approx(25 / 5.0)


def test_a_teacher_in_each_step_is_part_of_it(calls: Stopwatch) -> None:
    teacher = nn.Linear(3, 1).eval()
    for (x,) in DataLoader(TEN, batch_size=5):
        with torch.no_grad():
            teacher(x)
            calls.now += 1.0
        calls.step(x)
    assert calls.samples_per_s == 5 / 2.0


def test_calls_where_there_is_no_loader(calls: Stopwatch) -> None:
    for _ in range(3):
        for _ in range(4):  # micro-batches
            calls.loss(torch.ones(8, 3)).backward()
        calls.sgd.step()
        calls.model.eval()
        with torch.no_grad():
            calls.loss(torch.ones(100, 3), 30.0)
        calls.model.train()
    assert calls.samples_per_s == 4 * 8 / 4.0


def test_a_closure_is_called_with_one_batch(calls: Stopwatch) -> None:
    lbfgs = torch.optim.LBFGS(calls.model.parameters(), max_iter=4, tolerance_change=0.0)
    x = torch.randn(6, 3)

    def closure() -> Tensor:
        lbfgs.zero_grad()
        loss = (calls.loss(x, 0.0) - 1).square()
        loss.backward()
        return loss

    for _ in range(2):
        calls.now += 2.0
        lbfgs.step(closure)
    assert calls.samples_per_s == 6 / 2.0


class Streamed(IterableDataset[Any]):
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for _ in range(12):
            yield {"ids": torch.ones(7, dtype=torch.int64), "mask": torch.ones(7)}


def test_tokens_of_a_stream(watch: Stopwatch) -> None:
    for batch in DataLoader(Streamed(), batch_size=4):
        watch.step(batch["mask"][:, :3])
    stats = watch.meter.stats(0.0)
    assert (stats.samples_per_s, stats.tokens_per_s) == (4.0, 28.0)


def test_images_of_several_sizes(watch: Stopwatch) -> None:
    """What is collated begins with an image of 3 channels; the sampler knows that there are 5."""
    sizes = DataLoader(range(10), batch_size=5, collate_fn=lambda n: [torch.ones(3, i) for i in n])
    for _ in sizes:
        watch.step(torch.ones(5, 3))
    assert watch.samples_per_s == 5.0


def test_a_part_of_each_batch(watch: Stopwatch) -> None:
    watch.meter.throughput.part = 0.25
    for (x,) in DataLoader(TEN, batch_size=5):
        watch.step(x[:1])
    assert watch.samples_per_s == 5 / 4


def test_a_part_of_what_a_model_is_called_with(calls: Stopwatch) -> None:
    calls.meter.throughput.part = 0.5
    for _ in range(3):
        calls.step(torch.ones(8, 3))
    assert calls.samples_per_s == 8 / 2


def test_a_vector_that_fits_the_first_weight_is_one_sample(calls: Stopwatch) -> None:
    for _ in range(3):
        calls.step(torch.ones(3))
    assert calls.samples_per_s == 1.0


def test_other_vectors_are_as_many_samples(calls: Stopwatch) -> None:
    class Line(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slope = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return self.slope * x

    calls.model = Line()  # type: ignore[assignment]
    for _ in range(3):
        calls.step(torch.ones(3))
    assert calls.samples_per_s == 3.0


def test_from_a_snapshot_on(watch: Stopwatch) -> None:
    for (x,) in DataLoader(TEN, batch_size=5):
        watch.step(x)
    watch.now += 100.0
    watch.meter.reset_times()
    for (x,) in DataLoader(TEN, batch_size=5):
        watch.step(x)
    assert watch.samples_per_s == 10 / 2.0


def test_a_sampler_whose_length_is_unknown(watch: Stopwatch) -> None:
    class Endless(list[int]):
        def __len__(self) -> int:
            raise RuntimeError("length unknown")

    for (x,) in DataLoader(TEN, batch_size=5, sampler=Endless(range(10))):
        watch.step(x)
    assert watch.samples_per_s == 5 / 1.0


def test_a_batch_sampler_with_a_size_of_its_own(watch: Stopwatch) -> None:
    class ByTokens(list[list[int]]):
        sampler, batch_size = range(100), 64  # of tokens

    for (x,) in DataLoader(TEN, batch_sampler=ByTokens([[0, 1], [2, 3, 4]])):
        watch.step(x)
    assert watch.samples_per_s == 3 / 1.0


def test_one_batch_that_is_trained_on_again(calls: Stopwatch) -> None:
    (x,) = next(iter(DataLoader(TEN, batch_size=5)))
    for _ in range(4):
        calls.step(x)
    assert calls.samples_per_s == 5 / 1.0


def test_validation_with_a_training_batch_in_hand(calls: Stopwatch) -> None:
    for (x,) in DataLoader(TEN, batch_size=5):
        calls.validate(50.0, DataLoader(TEN, batch_size=2), grad=False)
        calls.step(x)
    assert calls.samples_per_s == pytest.approx(5 / 1.0)


class Lazy(Mapping[str, Any]):
    """Reads its values from somewhere when they are asked for, as an archive of NumPy's does."""

    def __getitem__(self, key: str) -> Any:
        raise OSError("nothing but the script may read it")

    def __iter__(self) -> Iterator[str]:
        return iter("ab")

    def __len__(self) -> int:
        return 2


def test_a_batch_that_reads_files_for_its_values_is_left_alone(watch: Stopwatch) -> None:
    for _ in DataLoader(TEN, batch_size=5, collate_fn=lambda rows: [Lazy()]):
        watch.step(torch.ones(5, 3))
    assert watch.samples_per_s == 5.0


def test_a_tensor_in_a_dict_of_another_class_is_found(calls: Stopwatch) -> None:
    features = UserDict(ids=torch.ones(4, 7, dtype=torch.int64))
    for _ in range(2):
        calls.meter.throughput.handed_out(calls, features)
        calls.step(torch.ones(4, 3))
    assert calls.meter.stats(0.0).tokens_per_s == 28.0


class Seen(Tensor):
    """A tensor that hears which functions of torch it is given to."""

    heard: ClassVar[list[Any]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.heard.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_the_functions_of_the_script_s_tensors_hear_nothing(watch: Stopwatch) -> None:
    rows = torch.ones(4, 3).as_subclass(Seen)
    Seen.heard.clear()
    watch.meter.throughput.handed_out(watch, [rows])
    assert Seen.heard == []


def test_a_thread_reads_on_during_a_backward_pass(calls: Stopwatch) -> None:
    """The way of a generator that a thread of the script's fills."""
    throughput = calls.meter.throughput
    row, began, ended = torch.ones(1), threading.Event(), threading.Event()

    def read() -> None:
        while began.wait() and not ended.is_set():
            throughput.handed_out(calls, row)

    reader = threading.Thread(target=read)
    reader.start()
    interval = sys.getswitchinterval()
    try:
        for _ in range(4):
            for _ in range(5_000):  # as many as have to be looked through for a while
                throughput.handed_out(calls, row)
            sys.setswitchinterval(1e-6)
            began.set()
            throughput.backward()
            began.clear()
            sys.setswitchinterval(interval)
    finally:
        sys.setswitchinterval(interval)
        ended.set()
        began.set()
        reader.join()
    throughput.backward()
    assert calls.meter.stats(0.0).steps == 0
