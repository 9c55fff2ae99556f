"""Wrong levers are refused, right ones aren't, and training goes on as if nothing was compared."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.checkpoint import checkpoint

from fasttrain.shim.tune.captured import CapturedCall
from fasttrain.shim.tune.parity import Finding, compare, compare_step
from fasttrain.shim.tune.repetition import Around, Repeater

FP32, BF16 = 2.0**-24, 2.0**-8
BATCH, LENGTH, WORDS, WIDTH, CLASSES = 24, 8, 40, 32, 10
ROWS = 256  # of the batch of an MLP
SEEDS = (0, 1, 2)
Lever = Callable[[nn.Module], AbstractContextManager[None]]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# Models, each with arguments and a loss.


class Block(nn.Module):
    """Causal attention and a feed-forward net."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.act: nn.Module = nn.GELU()
        self.dropout = nn.Dropout(dropout)
        self.causal = True

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        heads = [
            part.view(rows, length, 4, -1).transpose(1, 2)
            for part in self.qkv(self.before(x)).chunk(3, -1)
        ]
        seen = functional.scaled_dot_product_attention(*heads, is_causal=self.causal)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.dropout(self.down(self.act(self.up(self.between(x)))))


class Transformer(nn.Module):
    def __init__(self, dropout: float = 0.0, blocks: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(*(Block(dropout) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embedding(words))))  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.gru, self.head = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.gru(self.embedding(words))[0])  # type: ignore[no-any-return]


class Bag(nn.Module):
    """Returns a loss beside its logits, as models of transformers do."""

    axis = 1

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor, following: Tensor) -> dict[str, Tensor]:
        pooled = self.embedding(words).mean(self.axis)
        logits = self.head(pooled.expand(BATCH, WIDTH))
        return {"loss": functional.cross_entropy(logits, following[:, 0]), "logits": logits}


def mlp(dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(
        nn.Linear(20, 64), nn.GELU(), nn.Dropout(dropout), nn.Linear(64, 64), nn.GELU(),
        nn.Linear(64, CLASSES),
    )  # fmt: skip


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES),
    )  # fmt: skip


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "dropout": lambda: mlp(0.3),
    "cnn": cnn,
    "transformer": Transformer,
    "transformer with dropout": lambda: Transformer(0.2),
    "transformer of one block": lambda: Transformer(blocks=1),
    "gru": Recurrent,
    "loss inside": Bag,
}


class Training:
    """A model with a batch, trained for a few steps, and its next call captured."""

    def __init__(self, name: str, seed: int = 0, *, steps: int = 5, scale: float = 1.0) -> None:
        torch.manual_seed(seed)
        self.model, self.scale = MODELS[name](), scale
        self.optimizer: Optimizer = AdamW(self.model.parameters(), lr=3e-3)
        self.args, self.targets = batch(name)
        for _ in range(steps):
            self.step()
        self.captured = self.step(capture=True)

    def step(self, *, capture: bool = False) -> CapturedCall:
        self.optimizer.zero_grad()
        captured = CapturedCall(self.model, self.args, {})
        output = self.model(*self.args)
        if capture:
            captured.watch(output)
        (self.scale * self.loss(output)).backward()
        captured.close()
        self.optimizer.step()
        return captured

    def loss(self, output: Any) -> Tensor:
        if isinstance(output, dict):
            return output["loss"]
        return functional.cross_entropy(output.flatten(0, -2), self.targets.flatten())

    def compare(self, lever: Lever, unit_roundoff: float | None, *, eager: bool = False) -> Finding:
        around: Around = lambda: lever(self.model)  # noqa: E731
        return compare(self.captured, self.model, nullcontext, around, unit_roundoff, eager=eager)


def batch(name: str) -> tuple[tuple[Tensor, ...], Tensor]:
    words, following = torch.randint(WORDS, (2, BATCH, LENGTH))
    if name in ("mlp", "dropout"):
        return (torch.randn(ROWS, 20),), torch.randint(CLASSES, (ROWS,))
    if name == "cnn":
        return (torch.randn(BATCH, 3, 10, 10),), torch.randint(CLASSES, (BATCH,))
    return ((words, following) if name == "loss inside" else (words,)), following


# Levers.


@contextmanager
def forward_by(module: nn.Module, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace a module's forward, as a region around its call."""
    before = vars(module).get("forward")
    module.forward = make(module.forward)
    try:
        yield
    finally:
        del module.forward
        vars(module).update({"forward": before} if before else {})


def autocast(module: nn.Module, dtype: torch.dtype = torch.bfloat16) -> Any:
    def make(forward: Any) -> Any:
        def lowered(*args: Any) -> Any:
            with torch.autocast("cpu", dtype=dtype):
                return forward(*args)

        return lowered

    return forward_by(module, make)


def compiled_by(backend: str) -> Lever:
    @contextmanager
    def lever(module: nn.Module) -> Iterator[None]:
        # dynamo skips frames of torch's own files, but not what they call
        def call(*args: Any) -> Any:
            return module._call_impl(*args)

        module._compiled_call_impl = torch.compile(call, backend=backend)
        try:
            yield
        finally:
            module._compiled_call_impl = None

    return lever


@contextmanager
def attribute(holder: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)


def everywhere(kind: type[nn.Module], name: str, value: Any) -> Lever:
    @contextmanager
    def lever(module: nn.Module) -> Iterator[None]:
        with ExitStack() as stack:
            for part in (p for p in module.modules() if isinstance(p, kind)):
                stack.enter_context(attribute(part, name, value))
            yield

    return lever


def output_through(change: Callable[[Tensor], Tensor]) -> Lever:
    return lambda module: forward_by(module, lambda forward: lambda *args: change(forward(*args)))


def scaled_gradient(output: Tensor) -> Tensor:
    output.register_hook(lambda gradient: gradient * 1.01)
    return output


def without_last_rows(output: Tensor) -> Tensor:
    return torch.cat([output[:-2], torch.zeros_like(output[-2:])])


@contextmanager
def left_out(module: nn.Module) -> Iterator[None]:
    smallest = min(module.parameters(), key=lambda p: float(p.grad.norm()))  # type: ignore[union-attr]
    handle = smallest.register_hook(torch.zeros_like)
    yield
    handle.remove()


WRONG: dict[str, tuple[str, Lever]] = {
    "gradient x 1.01": ("mlp", output_through(scaled_gradient)),
    "dropout dropped": ("dropout", everywhere(nn.Dropout, "p", 0.0)),
    "BatchNorm in eval mode": ("cnn", everywhere(nn.BatchNorm2d, "training", value=False)),
    "a stale buffer": ("cnn", everywhere(nn.BatchNorm2d, "momentum", 0.0)),
    "fp16 that underflows": ("mlp", lambda module: autocast(module, torch.float16)),
    "last rows skipped": ("transformer", output_through(without_last_rows)),
    "one parameter left out": ("transformer", left_out),
    "a mean over the wrong axis": ("loss inside", everywhere(Bag, "axis", (0, 1))),
    "LayerNorm without its bias": ("transformer", everywhere(nn.LayerNorm, "bias", None)),
    "attention without its mask": ("transformer", everywhere(Block, "causal", value=False)),
    "an output x 1.005": ("mlp", output_through(lambda output: output * 1.005)),
    "a ReLU for a GELU": ("transformer", everywhere(Block, "act", nn.ReLU())),
}
TINY = 1e-6  # of a loss whose gradients fp16 doesn't hold


@pytest.mark.parametrize("claim", [FP32, BF16, None])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_lever_is_refused(name: str, claim: float | None) -> None:
    model, lever = WRONG[name]
    training = Training(model, scale=TINY if "fp16" in name else 1.0)
    found = training.compare(lever, claim)
    assert found.verdict == "too far", found.reason
    assert "with the lever: " not in found.reason, "it raised"


@pytest.mark.parametrize("name", [name for name in WRONG if "fp16" not in name])
def test_a_wrong_lever_is_refused_together_with_bf16(name: str) -> None:
    model, lever = WRONG[name]

    @contextmanager
    def both(module: nn.Module) -> Iterator[None]:
        with autocast(module), lever(module):
            yield

    found = Training(model).compare(both, BF16, eager=True)
    assert found.verdict == "too far", found.reason
    assert "with the lever: " not in found.reason, "it raised"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", [name for name in MODELS if "one" not in name])
def test_bf16_autocast_is_within_rounding(name: str, seed: int) -> None:
    found = Training(name, seed).compare(autocast, BF16, eager=True)
    assert found.verdict == "within rounding", found.reason
    assert found.distance > 100 * FP32, "it was not applied"


COMPILED = ("mlp", "dropout", "cnn", "transformer of one block", "loss inside")


@pytest.mark.parametrize("name", COMPILED)
def test_aot_eager_is_within_rounding(name: str) -> None:
    training = Training(name)
    with compiled_by("aot_eager")(training.model):
        compiled = training.model._compiled_call_impl
    lever: Lever = lambda module: attribute(module, "_compiled_call_impl", compiled)  # noqa: E731
    for seed in SEEDS:
        torch.manual_seed(seed)
        for parameter in training.model.parameters():
            nn.init.normal_(parameter, std=0.1)
        captured = training.step(capture=True)
        found = compare(captured, training.model, nullcontext, lambda: lever(training.model), FP32)
        assert found.right is True, found.reason


def in_another_order(forward: Any) -> Any:
    """Normalize with sums that are added up one by one, as some compiled kernels do."""
    norm = forward.__self__

    def added_up(x: Tensor) -> Tensor:
        one_by_one = x.transpose(0, 1).flatten(1).unbind(1)
        return functools.reduce(torch.add, one_by_one).view(1, -1, 1, 1)

    def normalized(x: Tensor) -> Tensor:
        count = x.numel() / x.shape[1]
        mean = added_up(x) / count
        variance = added_up((x - mean).square()) / count
        with torch.no_grad():
            norm.num_batches_tracked += 1
            norm.running_mean.lerp_(mean.flatten(), 0.1)
            norm.running_var.lerp_(variance.flatten() * count / (count - 1), 0.1)
        scaled = (x - mean) / (variance + norm.eps).sqrt()
        return scaled * norm.weight.view(1, -1, 1, 1) + norm.bias.view(1, -1, 1, 1)

    return normalized


@pytest.mark.parametrize("seed", SEEDS)
def test_sums_in_another_order_are_within_rounding(seed: int) -> None:
    @contextmanager
    def lever(module: nn.Module) -> Iterator[None]:
        with ExitStack() as stack:
            for part in (p for p in module.modules() if isinstance(p, nn.BatchNorm2d)):
                stack.enter_context(forward_by(part, in_another_order))
            yield

    found = Training("cnn", seed).compare(lever, FP32)
    assert found.verdict == "within rounding", found.reason


def test_a_lever_that_claims_less_than_it_rounds_is_refused() -> None:
    assert Training("mlp").compare(autocast, FP32, eager=True).verdict == "too far"


def test_the_same_bits_are_the_same_bits() -> None:
    training = Training("cnn")
    assert training.compare(nullcontext, None).verdict == "same bits"  # type: ignore[arg-type]
    found = training.compare(output_through(lambda output: output * (1 + 2**-23)), None)
    assert found.verdict == "too far"
    assert "output 0" in found.reason


def test_a_lever_that_draws_other_random_numbers_is_unknown() -> None:
    def draws_before(forward: Any) -> Any:
        def drawing(*args: Any) -> Any:
            torch.rand(3)
            return forward(*args)

        return drawing

    found = Training("dropout").compare(lambda module: forward_by(module, draws_before), FP32)
    assert found.verdict == "unknown"
    assert "other random numbers" in found.reason


class Awkward(nn.Module):
    """Has what copies and comparisons may stumble over: tied and sparse weights, a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.sparse = nn.Embedding(WORDS, WIDTH, sparse=True)
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.head.weight = self.embedding.weight
        self.norm = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.seen: list[torch.dtype] = []

    def forward(self, words: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, None]:
        x = self.embedding(words).float() * scale + self.sparse(words)
        x = checkpoint(self.norm, x, use_reentrant=False)
        self.seen.append(x.dtype)
        return self.head(x), x.argmax(-1), None


@pytest.mark.parametrize("factor", [1.0, 1.005])
@pytest.mark.parametrize("own_autocast", [False, True])
def test_an_awkward_model_is_compared(own_autocast: bool, factor: float) -> None:
    torch.manual_seed(0)
    model, words = Awkward(), torch.randint(WORDS, (64, LENGTH))
    scale = torch.rand(64, LENGTH, WIDTH, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=own_autocast):
        captured = CapturedCall(model, (words, scale * 1), {})
        logits, _, _ = output = model(words, scale * 1)
    captured.watch(output)
    functional.cross_entropy(logits.flatten(0, 1).float(), words.flatten()).backward()
    seen, model.seen = model.seen, []

    def lever() -> Any:
        change = lambda out: (out[0] * factor, *out[1:])  # noqa: E731
        return forward_by(model, lambda forward: lambda *args: change(forward(*args)))

    found = compare(captured, model, nullcontext, lever, FP32)
    assert found.right is (factor == 1.0), found.reason
    assert captured.autocasts == ([("cpu", torch.bfloat16)] if own_autocast else [])
    assert seen == [torch.bfloat16 if own_autocast else torch.float32]
    if factor != 1.0:
        parts = {part.what for part in found.parts}
        assert {"gradient of sparse.weight", "gradient of argument 1", "output 0"} <= parts


# What a comparison leaves behind: nothing.


@pytest.mark.parametrize("name", ["cnn", "dropout", "transformer with dropout", "gru"])
@pytest.mark.parametrize("wrong", [False, True])
def test_training_goes_on_bit_by_bit(name: str, wrong: bool) -> None:
    ends = []
    for compared in (False, True):
        training = Training(name, steps=2)
        training.model.register_buffer("counted", torch.zeros(1))
        training.model[0].eval() if isinstance(training.model, nn.Sequential) else None
        torch.rand(3), np.random.rand(3)  # the states are others than those of the captured call
        if compared:
            lever = output_through(lambda output: output * 2) if wrong else autocast
            assert training.compare(lever, BF16, eager=True).right is not wrong
            compare_step(training.optimizer, nullcontext, fused, FP32)
        state = [part.training for part in training.model.modules()]
        gradients = [p.grad.clone() for p in training.model.parameters() if p.grad is not None]
        for _ in range(10):
            training.step()
        held = training.model.state_dict().values()
        ends.append((state, gradients, [*held], torch.get_rng_state(), np.random.get_state()[1]))
    one, other = ends
    assert one[0] == other[0]
    for a, b in zip([*one[1], *one[2], one[3]], [*other[1], *other[2], other[3]], strict=True):
        assert torch.equal(a, b)
    assert (one[4] == other[4]).all()


class Remembering(nn.Module):
    """Writes into itself: numbers, lists, a tensor that is no buffer, and results with a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls, self.seen, self.queue = 0, [0], torch.zeros(8)
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.queue[self.calls % 8] = self.calls
        self.calls += 1
        self.seen.append(self.calls)
        self.last = self.linear(x)
        return self.last * (1 + self.queue.sum())


def captured_call(module: nn.Module, *args: Any) -> CapturedCall:
    captured = CapturedCall(module, args, {})
    output = module(*args)
    captured.watch(output)
    output.square().mean().backward()
    captured.close()
    return captured


def test_what_a_module_keeps_is_restored() -> None:
    module = Remembering()
    captured = captured_call(module, torch.randn(3, 4))
    calls, queue, last = module.calls, module.queue.clone(), module.last
    assert compare(captured, module, nullcontext, nullcontext, FP32).verdict == "same bits"
    assert (module.calls, module.seen, module.last) == (calls, [0, 1], last)
    assert torch.equal(module.queue, queue)


def test_hooks_on_weights_see_no_gradient_of_a_repetition() -> None:
    training, seen = Training("mlp"), []
    for parameter in training.model.parameters():
        parameter.register_hook(lambda gradient: seen.append(gradient))
        parameter.register_post_accumulate_grad_hook(seen.append)
    assert training.compare(autocast, BF16, eager=True).right is True
    assert not seen
    training.step()
    assert len(seen) == 2 * len(list(training.model.parameters()))


def test_a_repetition_draws_what_the_call_drew() -> None:
    module, x = mlp(0.5), torch.randn(8, 20)
    captured = CapturedCall(module, (x,), {})
    output = module(x)
    captured.watch(output)
    output.sum().backward()
    torch.rand(5)
    [repeated] = Repeater(captured, module).repeat(nullcontext).results.groups["output"].values()
    assert repeated is not None
    assert torch.equal(repeated, output)


# What can't be known.


class Drawing(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.rng = np.random.default_rng(0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float(self.rng.random())


class Raising(nn.Linear):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Raising.calls += 1
        assert Raising.calls == 1, "once only"
        return super().forward(x)


class Overflowing(nn.Linear):
    """Has a NaN."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.full((), torch.nan)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Drawing, "two plain calls differ"),
        (lambda: Raising(4, 4), "AssertionError: once only"),
        (lambda: Overflowing(4, 4), "NaN without the lever"),
    ],
)
def test_what_cannot_be_repeated_is_unknown(make: Callable[[], nn.Module], reason: str) -> None:
    module = make()
    captured = captured_call(module, torch.randn(3, 4))
    before = [p.detach().clone() for p in module.parameters()]
    found = compare(captured, module, nullcontext, nullcontext, FP32)
    assert found.verdict == "unknown"
    assert reason in found.reason
    assert all(map(torch.equal, module.parameters(), before))


# What a call writes to.


class Normalizing(nn.Module):
    """Writes the norm of its rows to 1 in each call: in place, or by other memory."""

    def __init__(self, *, other_memory: bool = False) -> None:
        super().__init__()
        self.below, self.weight = nn.Linear(16, 16), nn.Parameter(torch.randn(12, 16))
        self.other_memory, self.normalizes = other_memory, True

    def forward(self, x: Tensor) -> Tensor:
        if self.other_memory and self.normalizes:
            self.weight.data = functional.normalize(self.weight.data, dim=1)
        elif self.normalizes:
            with torch.no_grad():
                self.weight.div_(self.weight.norm(dim=1, keepdim=True))
        return functional.linear(self.below(x).relu(), self.weight)


class Momentum(nn.Module):
    """Moves a frozen copy of its encoder on in each call, as MoCo does."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 16).requires_grad_(False)
        self.momentum = 0.99

    def forward(self, x: Tensor) -> Tensor:
        for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
            key.data = key.data * self.momentum + query.data * (1 - self.momentum)
        return self.query(x) @ self.key(x).T


class Bounded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(20, 16, max_norm=1.0), nn.Linear(16, 12)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.words(words).mean(1))


WRITING: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "in place": (Normalizing, lambda: torch.randn(32, 16)),
    "other memory": (lambda: Normalizing(other_memory=True), lambda: torch.randn(32, 16)),
    "momentum": (Momentum, lambda: torch.randn(32, 16)),
    "max_norm": (Bounded, lambda: torch.randint(20, (32, 4))),
}


def compared_while_training(
    name: str, lever: Lever, unit_roundoff: float, *, lr: float = 1e-3, eager: bool = True
) -> Finding:
    torch.manual_seed(0)
    make, x = WRITING[name]
    module = make()
    optimizer = SGD([p for p in module.parameters() if p.requires_grad], lr)
    for _ in range(3):
        captured = captured_call(module, x())
        optimizer.step()
        optimizer.zero_grad()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    around: Around = lambda: lever(module)  # noqa: E731
    found = compare(captured, module, nullcontext, around, unit_roundoff, eager=eager)
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())
    return found


@pytest.mark.parametrize("lr", [1e-2, 0.0])
@pytest.mark.parametrize("name", WRITING)
def test_a_call_that_writes_to_its_parameters_is_compared(name: str, lr: float) -> None:
    same = compared_while_training(name, nullcontext, FP32, lr=lr)
    assert same.verdict == "same bits", same.reason
    found = compared_while_training(name, autocast, BF16, lr=lr)
    assert found.verdict == "within rounding", found.reason


@pytest.mark.parametrize("name", WRITING)
def test_a_compiled_call_that_writes_to_its_parameters_is_right(name: str) -> None:
    torch.compiler.reset()
    graphs = counters["stats"]["unique_graphs"]
    found = compared_while_training(name, compiled_by("aot_eager"), FP32, eager=False)
    assert found.right is True, found.reason
    assert counters["stats"]["unique_graphs"] > graphs, "it was compiled"


@pytest.mark.parametrize(
    ("name", "kind", "attribute", "value"),
    [
        ("in place", Normalizing, "normalizes", False),
        ("other memory", Normalizing, "normalizes", False),
        ("momentum", Momentum, "momentum", 1.0),
        ("momentum", Momentum, "momentum", 0.98),
        ("max_norm", nn.Embedding, "max_norm", None),
        ("max_norm", nn.Embedding, "max_norm", 0.99),
    ],
)
@pytest.mark.parametrize("claim", [FP32, BF16])
def test_a_lever_that_writes_otherwise_is_refused(
    name: str, kind: type[nn.Module], attribute: str, value: object, claim: float
) -> None:
    found = compared_while_training(name, everywhere(kind, attribute, value), claim, lr=1e-2)
    assert found.verdict == "too far", found.reason


def test_nan_with_the_lever_only_is_too_far() -> None:
    found = Training("mlp").compare(output_through(lambda output: output / 0 * 0), BF16)
    assert (found.verdict, found.right) == ("too far", False)
    assert "NaN" in found.reason


def test_a_stale_buffer_is_seen_beside_a_mask_of_infinities() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
            self.register_buffer("mask", torch.full((8, 8), -torch.inf).triu(1))

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.layer(x)) @ (torch.eye(8) + self.mask).softmax(1)

    torch.manual_seed(0)
    module = Masked()
    captured = captured_call(module, torch.randn(32, 8))

    def judged(momentum: float) -> Finding:
        around: Around = lambda: everywhere(nn.BatchNorm1d, "momentum", momentum)(module)  # noqa: E731
        return compare(captured, module, nullcontext, around, FP32)

    assert judged(0.1).verdict == "same bits"
    assert judged(0.0).verdict == judged(0.2).verdict == "too far"
    assert compare(captured, module, nullcontext, lambda: autocast(module), BF16).right is True


def test_infinite_numbers_in_the_same_places_are_no_difference() -> None:
    class Masked(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).masked_fill(torch.eye(4, dtype=torch.bool), -torch.inf)

    module, x = Masked(4, 4), torch.randn(4, 4)
    captured = CapturedCall(module, (x,), {})
    output = module(x)
    captured.watch(output)
    output.softmax(1).square().sum().backward()
    assert compare(captured, module, nullcontext, lambda: autocast(module), BF16).right is True
    found = compare(
        captured, module, nullcontext, lambda: output_through(torch.nan_to_num)(module), BF16
    )
    assert found.right is False


def test_a_lever_that_raises_is_refused_with_its_error() -> None:
    def raises(output: Tensor) -> Tensor:
        raise ValueError("no kernel")

    found = Training("mlp").compare(output_through(raises), FP32)
    assert found.right is False
    assert "ValueError: no kernel" in found.reason


def test_nothing_captured_is_never_a_pass() -> None:
    training = Training("mlp")
    without_backward = CapturedCall(training.model, training.args, {})
    without_backward.watch(training.model(*training.args))
    assert compare(without_backward, training.model, nullcontext, nullcontext, FP32).right is None
    optimizer = SGD(nn.Linear(2, 2).parameters())
    assert compare_step(optimizer, nullcontext, nullcontext, None).right is None


# Steps of optimizers.


@contextmanager
def fused(optimizer: Optimizer) -> Iterator[None]:
    for group in optimizer.param_groups:
        group["fused"] = True
    for state in optimizer.state.values():
        if "step" in state:
            state["step"] = state["step"].float()
    yield


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adam": lambda parameters: Adam(parameters, lr=1e-3),
    "adamw": lambda parameters: AdamW(parameters, lr=1e-3, amsgrad=True),
    "sgd": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-4),
    "plain sgd": lambda parameters: SGD(parameters, lr=0.1),
}


def after_steps(name: str, seed: int, steps: int) -> Optimizer:
    torch.manual_seed(seed)
    model = Transformer()
    optimizer = OPTIMIZERS[name](model.parameters())
    for _ in range(steps + 1):
        optimizer.zero_grad()
        words, following = torch.randint(WORDS, (2, BATCH, LENGTH))
        functional.cross_entropy(model(words).flatten(0, 1), following.flatten()).backward()
        optimizer.step() if _ < steps else None
    return optimizer


@pytest.mark.parametrize("steps", [0, 5])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fused_steps_are_within_rounding(name: str, steps: int) -> None:
    for seed in SEEDS:
        found = compare_step(after_steps(name, seed, steps), nullcontext, fused, FP32)
        assert found.right is True, found.reason


def test_hooks_on_all_steps_do_not_see_those_of_copies() -> None:
    optimizer, steps = after_steps("adam", 0, 1), []
    optimizer.register_step_pre_hook(lambda *_: steps.append(1))
    handle = register_optimizer_step_post_hook(lambda *_: steps.append(1))
    assert compare_step(optimizer, nullcontext, fused, FP32).right is True
    assert not steps
    optimizer.step()
    handle.remove()
    assert len(steps) == 2


def in_step(change: Callable[[Optimizer], None]) -> Callable[[Optimizer], Any]:
    @contextmanager
    def around(optimizer: Optimizer) -> Iterator[None]:
        change(optimizer)
        yield

    return around


def without_decay(optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["weight_decay"] = 0.0


def without_one(optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["params"][3].grad = None


def scaled(optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["lr"] *= 1.001


def with_other_momentum(optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["betas"] = (0.9, 0.9991)


@pytest.mark.parametrize("change", [without_decay, without_one, scaled, with_other_momentum])
def test_a_wrong_step_is_refused(change: Callable[[Optimizer], None]) -> None:
    found = compare_step(after_steps("adamw", 0, 3), nullcontext, in_step(change), FP32)
    assert found.verdict == "too far", found.reason


def test_an_optimizer_that_needs_a_closure_is_unknown() -> None:
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    found = compare_step(torch.optim.LBFGS(model.parameters()), nullcontext, nullcontext, FP32)
    assert found.right is None
    assert "TypeError" in found.reason


def test_a_step_under_a_scheduler_is_repeated_on_copies() -> None:
    optimizer = after_steps("sgd", 0, 2)
    torch.optim.lr_scheduler.StepLR(optimizer, 10)
    before = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
    assert compare_step(optimizer, nullcontext, fused, FP32).right is True
    assert all(map(torch.equal, optimizer.param_groups[0]["params"], before))
