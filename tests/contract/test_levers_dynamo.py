"""What dynamo made of the script's models: the receipt tells it, and the run goes on."""

from __future__ import annotations

import copy
import functools
import re
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fasttrain.model.outcome import State
from fasttrain.shim.levers.compile import slots
from fasttrain.shim.levers.compile.account import LIMIT
from fasttrain.shim.levers.compile.lever import NO_BLOCKS
from support.rig import X, backend, network, read_report, rig, train

# dynamo warns while it compiles; here that would be an error inside the compiler
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]

Pair = namedtuple("Pair", "first second")


def test_a_backend_that_fails() -> None:
    def exploding(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no such instruction")

    with backend(exploding), rig(compile="default") as runtime:
        losses = train(network())
        outcome = runtime.outcomes()["compile"]
    assert losses == train(network())
    assert outcome.state is State.FAILED
    assert "RuntimeError: no such instruction" in outcome.reason
    assert outcome.counts["graphs"] == 0


def test_a_backend_that_fails_is_an_error_with_strict() -> None:
    def exploding(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no such instruction")

    with (
        backend(exploding),
        rig(compile="default", strict=True),
        pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="no such instruction"),
    ):
        network()(X)


def test_a_backend_that_fails_for_one_of_two_models() -> None:
    def picky(graph: Any, inputs: Any) -> Any:
        if any(node.target is torch.nn.functional.gelu or "gelu" in str(node.target)
               for node in graph.graph.nodes):  # fmt: skip
            raise RuntimeError("no gelu here")
        return graph

    model, other = network(), nn.Sequential(nn.Linear(4, 4), nn.GELU())
    with backend(picky), rig(compile="default") as runtime:
        losses, others = train(model), train(copy.deepcopy(other))
        outcome = runtime.outcomes()["compile"]
    assert (losses, others) == (train(network()), train(other))
    assert (outcome.state, outcome.counts["graphs"]) == (State.APPLIED, 1)
    assert any("no gelu here" in note for note in outcome.notes)


def test_a_backend_that_fails_at_a_later_recompilation() -> None:
    graphs = []

    def exhausted(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        if len(graphs) > 1:
            raise RuntimeError("no kernels left")
        return graph.forward

    def losses(model: nn.Module) -> list[float]:
        longer = torch.ones(3, 5, 4)  # another rank: no graph fits it
        return [*train(model), model(longer).sum().item(), *train(model)]

    with backend(exhausted), rig(compile="default") as runtime:
        found = losses(network())
        outcome = runtime.outcomes()["compile"]
    assert found == losses(network())
    assert outcome.state is State.APPLIED
    assert (outcome.counts["graphs"], outcome.counts["failures"]) == (1, 1)
    assert any("no kernels left" in note for note in outcome.notes)


def test_torch_compile_itself_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: Any, **__: Any) -> Any:
        raise RuntimeError("not supported on this Python")

    monkeypatch.setattr(torch, "compile", unsupported)
    with rig(compile="default") as runtime:
        losses = train(network())
        outcome = runtime.outcomes()["compile"]
    assert losses == train(network())
    assert (outcome.state, outcome.reason) == (
        State.FAILED,
        "RuntimeError: not supported on this Python",
    )


def test_graph_breaks_are_told_with_their_line(compiled: Any) -> None:
    class Chatty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            y = self.first(x)
            torch._dynamo.graph_break()  # the break
            return self.second(y)

    train(Chatty())
    outcome = compiled()
    lines = Path(__file__).read_text().splitlines()
    line = next(n for n, text in enumerate(lines, 1) if "# the break" in text)
    assert (outcome.counts["graphs"], outcome.counts["breaks"]) == (2, 1)
    assert any(f"test_levers_dynamo.py:{line}" in note for note in outcome.notes)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.RNNCell(1, 4)

    def forward(self, x: Any) -> Any:
        state = torch.zeros(len(x), 4)
        for column in x.split(1, dim=1):
            state = torch.tanh(self.cell(column, state))
        return state


def test_a_loop_of_hundreds_of_rounds_runs_eagerly(compiled: Any) -> None:
    torch.manual_seed(0)
    model, series = Recurrent(), torch.randn(3, 400)
    plain = copy.deepcopy(model)._call_impl(series)
    assert torch.equal(model(series), plain)
    outcome = compiled()
    assert outcome.counts["long loops"] >= 1  # the cell itself may still be compiled
    lines = Path(__file__).read_text().splitlines()
    near = next(n for n, text in enumerate(lines, 1) if "in x.split(1, dim=1)" in text) + 1
    assert any(f"test_levers_dynamo.py:{near} " in note for note in outcome.notes)


def test_a_short_loop_and_a_deep_model_are_compiled(compiled: Any) -> None:
    Recurrent()(torch.randn(3, 40))
    layers = [nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Tanh()) for _ in range(180)]
    deep = nn.Sequential(*layers)
    deep(torch.randn(3, 2))
    outcome = compiled()
    assert outcome.state is State.APPLIED
    assert outcome.counts["graphs"] == 2
    assert outcome.counts.get("long loops", 0) == 0


BREAKS = """
import torch
from torch import nn

class Breaks(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        x = self.linear(x)
        return x * (2 if x.sum().item() > 0 else 3)

model = Breaks()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(2, 2)).sum().backward()
optimizer.step()
"""


@pytest.mark.parametrize("logs", [{}, {"TORCH_LOGS": "graph_breaks"}])
def test_dynamo_warns_only_where_it_is_asked_to(
    fasttrain: Any, script: Any, logs: dict[str, str]
) -> None:
    done = fasttrain("run", script(BREAKS), "--compile", "default", env=logs)
    assert done.returncode == 0
    assert b"graph break at train.py:12" in done.stderr
    assert (b"Graph break" in done.stderr) == bool(logs)


def test_parts_behind_a_graph_break_share_no_recompile_limit(compiled: Any) -> None:
    class Layer(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(width))

        def forward(self, x: Any) -> Any:
            torch._dynamo.graph_break()
            return x * self.scale

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            kinds = [type(f"Layer{n}", (Layer,), {}) for n in range(12)]
            self.layers = nn.ModuleList(kind(4) for kind in kinds)

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = layer(x)
            return x

    Deep()(X)
    outcome = compiled()
    assert not [note for note in outcome.notes if "roots.py" in note]


class Scaled(nn.Module):
    """A model that is compiled again for each factor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Any, factor: str) -> Any:
        return self.linear(x) * float(factor)


def test_the_recompile_limit_is_told_and_the_run_goes_on(
    compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "FREE_STALLS", 12)
    model = Scaled()
    for number in range(12):
        found = model(X, str(number))
    torch.testing.assert_close(found, model.linear(X) * 11)
    outcome = compiled()
    assert torch._dynamo.config.recompile_limit <= outcome.counts["graphs"] < 12
    assert outcome.counts["limits"] >= 1
    assert outcome.counts["failures"] == 0
    assert any(note.startswith(LIMIT) for note in outcome.notes)


def test_calls_that_never_fit_a_graph_are_compiled_ever_more_rarely(compiled: Any) -> None:
    model = Scaled()
    expected = nn.functional.linear(X, model.linear.weight, model.linear.bias)
    for number in range(450):
        found = model(X, str(number))
        torch.testing.assert_close(found, expected * number)
        model(X, "0")  # fits the first graph
    outcome = compiled()
    # The first four calls, and those after 100, 200, 400 and 800.
    assert outcome.counts["graphs"] == 8
    assert outcome.counts["eager calls"] == 450 - 8
    assert any("until then what fits no graph runs eagerly" in note for note in outcome.notes)


def test_a_changing_sequence_length_recompiles_once(compiled: Any) -> None:
    model = network()
    for length in range(3, 16):
        model(torch.ones(length, 4)).sum().backward()
    outcome = compiled()
    assert (outcome.counts["graphs"], outcome.counts["recompiles"]) == (2, 1)
    assert outcome.counts["limits"] == 0
    words = re.compile(r"recompile: .* has size 4 in dimension 0, not 3")
    assert any(map(words.search, outcome.notes))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: Any) -> Any:
        return x + self.body(x)


def test_blocks_share_their_graphs() -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), *(Block() for _ in range(12)), nn.Linear(4, 4))

    with backend("eager"), rig(compile="default", scope="blocks") as runtime:
        losses = train(model())
        outcome = runtime.outcomes()["compile"]
    assert losses == pytest.approx(train(model()))
    assert (outcome.counts["targets"], outcome.counts["graphs"]) == (12, 1)
    assert [(site.what, site.count) for site in outcome.sites] == [("Block", 12)]


def test_a_model_without_blocks_is_compiled_whole() -> None:
    with backend("eager"), rig(compile="default", scope="blocks") as runtime:
        train(network())
        outcome = runtime.outcomes()["compile"]
    assert (outcome.state, outcome.counts["targets"]) == (State.APPLIED, 1)
    assert any(NO_BLOCKS in note for note in outcome.notes)


def test_a_frozen_model_is_not_compiled(compiled: Any) -> None:
    network().requires_grad_(requires_grad=False)(X)
    assert compiled().state is State.ARMED


def test_second_derivatives_are_seen_before_they_fail(
    compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "fasttrain.shim.levers.compile.lever.second_derivatives", lambda: "physics.py:7"
    )
    model, x = network(), X.clone().requires_grad_()
    slope = torch.autograd.grad(model(x).sum(), x, create_graph=bool(1))[0]
    slope.square().sum().backward()
    outcome = compiled()
    assert outcome.state is State.SKIPPED
    assert "physics.py:7" in outcome.reason


POOLED = """
import torch
import torch.nn.functional as F
from torch import nn

class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 16, 3)
        self.head = nn.Linear(16 * 12 * 12, 10)

    def forward(self, x):
        x = F.relu(self.second(self.first(x)))
        return self.head(torch.flatten(F.max_pool2d(x, 2), 1))

torch.manual_seed(0)
model = Pooled()
x, y = torch.randn(8, 1, 28, 28), torch.randint(0, 10, (8,))
F.cross_entropy(model(x), y).backward()
torch.save([p.grad for p in model.parameters()], "gradients.pt")
"""


@pytest.mark.slow
@pytest.mark.matrix
def test_gradients_behind_a_max_pool(fasttrain: Any, script: Any) -> None:
    """pytorch#185509: inductor takes the gradient of everything before the pool for 0."""
    path = script(POOLED)
    subprocess.run([sys.executable, path], cwd=fasttrain.cwd, env=fasttrain.environ, check=True)
    plain = torch.load(fasttrain.cwd / "gradients.pt")
    done = fasttrain("run", path, "--compile", "default", "--amp", "off", timeout_s=240)
    assert b"1 graph" in done.stderr
    torch.testing.assert_close(torch.load(fasttrain.cwd / "gradients.pt"), plain)
    assert all(gradient.norm() > 1e-3 for gradient in plain)


NORMALIZED = """
import sys
import torch
from torch import nn
from torch.nn.functional import normalize

class Normalized(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, 8))
        self.u = nn.Parameter(torch.randn(width), requires_grad=False)

    def forward(self, x):
        w = self.weight
        v = normalize(w.detach().t() @ self.u.detach(), dim=0)
        if sys.argv[1] == "assigned":
            self.u.data = normalize(w.detach() @ v, dim=0)
        else:
            self.u.data.copy_(normalize(w.detach() @ v, dim=0))
        return x @ (w / self.u.dot(w @ v)).t()

torch.manual_seed(0)
model = nn.Sequential(Normalized(8), nn.ReLU(), Normalized(4))
x = torch.randn(2, 16, 8)
for calls in (1, 2):
    for step in range(3):
        sum(model(x[i]).square().mean() for i in range(calls)).backward()
torch.save([p.grad for p in model.parameters() if p.requires_grad], "gradients.pt")
"""


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("how", ["assigned", "copied"])
def test_gradients_by_a_state_that_the_forward_changes(
    fasttrain: Any, script: Any, how: str
) -> None:
    """Compiled, one call before the backward pass has other gradients, and two have an error."""
    path = script(NORMALIZED)
    python = [sys.executable, path, how]
    subprocess.run(python, cwd=fasttrain.cwd, env=fasttrain.environ, check=True)
    plain = torch.load(fasttrain.cwd / "gradients.pt")
    done = fasttrain("run", path, how, "--compile", "default", "--amp", "off", timeout_s=240)
    assert done.returncode == 0, done.stderr
    assert b"a state that its forward changes" in b" ".join(done.stderr.split())
    torch.testing.assert_close(torch.load(fasttrain.cwd / "gradients.pt"), plain)


@pytest.mark.slow
@pytest.mark.matrix
def test_inductor_and_its_missing_compiler(fasttrain: Any, script: Any) -> None:
    """One real compile: a Sequential gets graphs, and without a C++ compiler it runs eagerly."""
    path = script(
        "import torch\n"
        "torch.manual_seed(0)\n"
        "from torch import nn\n"
        "model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for step in range(20):\n"
        "    loss = model(torch.ones(2, 4)).square().mean()\n"
        "    optimizer.zero_grad(); loss.backward(); optimizer.step()\n"
        "print(loss.item())\n"
    )
    run = functools.partial(fasttrain, "run", path, "--compile", "default", "--json")
    eager = subprocess.run([sys.executable, path], capture_output=True, env=fasttrain.environ)
    expected = pytest.approx(float(eager.stdout), rel=1e-4)
    environ = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    for compiler, state in (("g++", State.APPLIED), ("/bin/false", State.FAILED)):
        run_dir = fasttrain.cwd / state
        done = run("--run-dir", run_dir, "--amp", "off", env={**environ, "CXX": compiler})
        assert done.returncode == 0, done.stderr
        assert float(done.stdout.split()[0]) == expected
        report = read_report(run_dir)
        outcome = next(o for o in report.outcomes if o.lever == "compile")
        assert outcome.state is state, outcome
        assert bool(outcome.counts["graphs"]) is (state is State.APPLIED)
    assert "C++ compiler" in outcome.reason
