"""Mixed precision on a GPU: equal bits to loops written by hand, and less memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fasttrain.model.outcome import State

pytestmark = pytest.mark.gpu

STEPS, PARTS, BATCH = 12, 2, 16
BOOM = 5  # the step whose loss overflows


class Tokens(nn.Module):
    """Embedding, attention written out, layer norm."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 8)

    def forward(self, tokens: Any) -> Any:
        x = self.embedding(tokens)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        weights = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).softmax(-1)
        return self.head(self.norm(x + self.out(weights @ v)).mean(1))


class Images(nn.Module):
    """Convolutions with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(64, 8)

    def forward(self, x: Any) -> Any:
        return self.head(self.body(x).mean((2, 3)))


def tokens_of(generator: Any) -> Any:
    return torch.randint(0, 128, (STEPS, PARTS, BATCH, 24), generator=generator)


def images_of(generator: Any) -> Any:
    return torch.randn(STEPS, PARTS, BATCH, 3, 16, 16, generator=generator)


TASKS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any]]] = {
    "tokens": (Tokens, tokens_of),
    "images": (Images, images_of),
}
every_task = pytest.mark.parametrize("task", TASKS)


class Loop:
    """A loop with accumulation and clipping, as a script has it or with precision by hand."""

    def __init__(self, task: str, device: str, *, fused: bool | None = None) -> None:
        torch.manual_seed(0)
        make, inputs_of = TASKS[task]
        generator = torch.Generator().manual_seed(1)
        self.device = device
        self.inputs = inputs_of(generator).to(device)
        self.targets = torch.randint(0, 8, (STEPS, PARTS, BATCH), generator=generator).to(device)
        self.model = make().to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=fused)
        self.losses: list[float] = []
        self.norms: list[float] = []

    def loss(self, call: Callable[[Any], Any], step: int, part: int, *, boom: bool) -> Any:
        loss = nn.functional.cross_entropy(call(self.inputs[step, part]), self.targets[step, part])
        self.losses.append(loss.item())
        return loss * 1e38 if boom and step == BOOM else loss

    def clip(self) -> None:
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.norms.append(float(norm))

    def script(self, *, boom: bool = False) -> Loop:
        for step in range(STEPS):
            self.optimizer.zero_grad()
            for part in range(PARTS):
                self.loss(self.model, step, part, boom=boom).backward()
            self.clip()
            self.optimizer.step()
        return self

    def by_hand(self, dtype: torch.dtype, scaler: torch.amp.GradScaler, *, boom: bool) -> Loop:
        def call(x: Any) -> Any:
            with torch.autocast(self.device, dtype):
                return self.model(x).float()

        for step in range(STEPS):
            self.optimizer.zero_grad()
            for part in range(PARTS):
                scaler.scale(self.loss(call, step, part, boom=boom)).backward()
            scaler.unscale_(self.optimizer)
            self.clip()
            scaler.step(self.optimizer)
            scaler.update()
        return self

    def assert_equals(self, other: Loop) -> None:
        assert self.losses == other.losses
        finite = [step for step in range(STEPS) if step != BOOM]
        assert [self.norms[s] for s in finite] == [other.norms[s] for s in finite]
        mine, theirs = self.model.state_dict(), other.model.state_dict()
        assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


@every_task
@pytest.mark.parametrize("optimizer", ["keep", "fused"])
def test_bf16_is_the_twin_by_hand(
    rig: Any, device: str, bf16: None, deterministic: None, task: str, optimizer: str
) -> None:
    off = torch.amp.GradScaler(device, enabled=False)
    fused = True if optimizer == "fused" else None
    by_hand = Loop(task, device, fused=fused).by_hand(torch.bfloat16, off, boom=False)
    plain = Loop(task, device).script()
    with rig(amp="bfloat16", optimizer=optimizer) as runtime:
        found = Loop(task, device).script()
        outcome = runtime.outcomes()["amp"]
    found.assert_equals(by_hand)
    assert found.losses != plain.losses
    assert (outcome.state, outcome.counts) == (State.APPLIED, {"forwards": STEPS * PARTS})


@every_task
@pytest.mark.parametrize("optimizer", ["keep", "fused"])
def test_fp16_is_the_twin_by_hand_over_an_overflow(
    rig: Any, device: str, deterministic: None, task: str, optimizer: str
) -> None:
    scaler = torch.amp.GradScaler(device)
    fused = True if optimizer == "fused" else None
    by_hand = Loop(task, device, fused=fused).by_hand(torch.float16, scaler, boom=True)
    with rig(amp="float16", optimizer=optimizer) as runtime:
        found = Loop(task, device).script(boom=True)
        outcome = runtime.outcomes()["loss_scaling"]
    found.assert_equals(by_hand)
    assert outcome.state is State.APPLIED
    assert outcome.counts == {
        "backward passes": STEPS * PARTS,
        "steps": STEPS - 1,
        "skipped steps": 1,
        "scale": int(scaler.get_scale()),
    }


def test_outputs_and_losses_are_fp32_on_the_device(rig: Any, device: str, bf16: None) -> None:
    loop = Loop("images", device)
    with rig(amp="bfloat16"):
        output = loop.model(loop.inputs[0, 0])
    assert (output.dtype, output.device.type) == (torch.float32, device)


def wide(width: int = 1024) -> nn.Module:
    """Return a model whose activations weigh far more than its parameters."""
    torch.manual_seed(0)
    layers = [part for _ in range(12) for part in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers)


def peak_of_a_step(device: str) -> int:
    model = wide().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.randn(16384, 1024, device=device)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    return torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_the_activations_take_less_memory(
    request: Any, rig: Any, cuda: str, precision: str
) -> None:
    """Half of the activations is saved, less the copies of weights that autocast makes."""
    if precision == "bfloat16":
        request.getfixturevalue("bf16")
    full = peak_of_a_step(cuda)
    torch.cuda.empty_cache()
    with rig(amp=precision):
        half = peak_of_a_step(cuda)
    assert half < 0.75 * full


RECURRENT: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTM(64, 64, 2), "gru": lambda: nn.GRU(64, 64),
    "tanh": lambda: nn.RNN(64, 64), "relu": lambda: nn.RNN(64, 64, nonlinearity="relu"),
}  # fmt: skip


class Language(nn.Module):
    """Hands its state on, as language models do."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = make()

    def forward(self, x: Any, state: Any = None) -> Any:
        return self.layer(x, state)


def states_of(model: Language, device: str) -> list[Any]:
    """Return what two calls compute, and gradients of which most vanish in fp16."""
    x = torch.linspace(-1, 1, 8 * 4 * 64, device=device).reshape(8, 4, 64)
    output, state = model(x)
    state = state.detach() if isinstance(state, torch.Tensor) else tuple(s.detach() for s in state)
    output, state = model(x, state)
    (output.mean() * 1e-6).backward()
    states = [state] if isinstance(state, torch.Tensor) else list(state)
    return [output.detach(), *states, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_layers_are_those_of_fp32(
    rig: Any, cuda: str, bf16: None, deterministic: None, kind: str
) -> None:
    """torch's autocast runs them in fp16, in which such gradients are 0."""
    expected = states_of(Language(RECURRENT[kind]).to(cuda), cuda)
    with rig(amp="bfloat16") as runtime:
        found = states_of(Language(RECURRENT[kind]).to(cuda), cuda)
        outcome = runtime.outcomes()["amp"]
    assert outcome.state is State.APPLIED
    assert any("recurrent" in note for note in outcome.notes)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype is torch.float32
        assert torch.equal(one, other)
