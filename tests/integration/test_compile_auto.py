"""The real ``fasttrain run --compile auto``: the switch, and that nothing is left of the shadow."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.observed_run import PROGRAMS, ObservedRun, command, wait_for

pytestmark = pytest.mark.timeout(600)

PATIENCE_S = 400.0  # a copy that compiles has the priority of the training at most
# Trains until it is decided whether the compiled model stays, and then a little.
TRAINS = """
import copy, gc, glob, io, json, pickle, sys, time
import torch
from torch import nn
torch.manual_seed(0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(64, 128), nn.Linear(128, 64), nn.Dropout(0.1)

    def forward(self, x):
        return self.b(self.drop(torch.nn.functional.gelu(self.a(x))))

def decided():
    found = glob.glob("fasttrain_runs/*/compile_auto.json")
    phase = json.load(open(found[0]))["phase"] if found else "watching"
    return phase not in ("watching", "compiling", "comparing")

def is_on():
    return net._compiled_call_impl is not None and auto()._on

def auto():
    global found
    if found is None:
        kind = sys.modules["fasttrain.shim.compile_auto.auto"].AutoCompile
        found = next(one for one in gc.get_objects() if type(one) is kind)
    return found

found = None
net = Net()
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
data = torch.randn(256, 64)
losses, left, step = [], 30, 0
while left:
    batch = data[step % 8 * 32:][:32]
    on = is_on()
    loss = (net(batch) - batch).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append((on, loss.item().hex()))
    step += 1
    if step % 10 == 0 and (left < 30 or decided()):
        left -= 10
json.dump(losses, open("losses.json", "w"))
keys = list(net.state_dict())
assert keys == ["a.weight", "a.bias", "b.weight", "b.bias"], keys
twin = copy.deepcopy(net)
assert type(twin) is Net and twin._compiled_call_impl is None
again = pickle.loads(pickle.dumps(net))
net.eval(); twin.eval(); again.eval()
with torch.no_grad():
    assert torch.equal(net(data), twin(data)) and torch.equal(net(data), again(data))
print("done", step, flush=True)
"""
# The same steps, compiled where the other run had compiled ones.
BY_HAND = """
import torch._dynamo, torch._functorch.config as functorch, torch._inductor.config as inductor
functorch.donated_buffer, functorch.force_non_lazy_backward_lowering = False, True
inductor.fallback_random = True
compiled = torch.compile(net)
flags = [on for on, _ in json.load(open("losses.json"))]
losses = []
for step, on in enumerate(flags):
    batch = data[step % 8 * 32:][:32]
    loss = ((compiled if on else net)(batch) - batch).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append((on, loss.item().hex()))
json.dump(losses, open("by_hand.json", "w"))
"""
ENDLESS = TRAINS.replace("while left:", "while True:")
# As of a process that uses a device and can't be forked. Torch itself asks CUDA's module.
USES_DEVICE = "import types; torch.musa = types.SimpleNamespace(is_initialized=lambda: True)"
KNOWN = ("--max-steps", "100000000")  # so many that it pays to compile
OPTIONS = ("--compile", "auto", "--optimizer", "keep", *KNOWN)


# Ranks that the script makes one run, of which one may fail.
OWN = (
    ENDLESS.replace("net = Net()", "net = torch.nn.parallel.DistributedDataParallel(Net())")
    .replace("torch.manual_seed(0)\n", "torch.distributed.init_process_group('gloo')\n", 1)
    .replace(
        "on = is_on()",
        """on = False
    if torch.distributed.get_rank() and os.path.exists("stop"):
        raise ValueError("a rank fails")""",
    )
    .replace("import copy", "import os, copy")
)
TWO = ("--nproc-per-node", "2")


def compile_outcomes(folder: Path) -> list[dict[str, Any]]:
    """Return what became of the lever on each rank."""
    (path,) = folder.glob("fasttrain_runs/*/receipt.json")
    ranks = json.loads(path.read_text())["ranks"]
    return [next(o for o in rank["outcomes"] if o["lever"] == "compile") for rank in ranks]


def compile_outcome(folder: Path) -> dict[str, Any]:
    (outcome,) = compile_outcomes(folder)
    return outcome


def events(folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.glob("fasttrain_runs/*/events-0.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line["compile_auto"] for line in lines if "compile_auto" in line]


def shadow_of(worker: psutil.Process) -> psutil.Process | None:
    """The child that leads a process group of its own, and has the worker's command line."""
    return next((c for c in worker.children() if os.getpgid(c.pid) == c.pid), None)


@pytest.fixture
def run_with_shadow(
    script: Any, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]
) -> Any:
    """Start a run, and return it once its shadow compiles."""
    runs: list[ObservedRun] = []
    cache = tmp_path_factory.mktemp("cache")

    def start(
        text: str = ENDLESS, *options: str
    ) -> tuple[ObservedRun, psutil.Process, psutil.Process]:
        named = (*options, str(script(text)), *OPTIONS)
        argv = [sys.executable, "-m", "fasttrain", "run", *named]
        # Of its own: with what an earlier run has compiled the shadow has ended before it is seen.
        cold = {**environ, "XDG_CACHE_HOME": str(cache)}
        run = ObservedRun(tmp_path, argv, cold)
        runs.append(run)
        found: list[psutil.Process] = []

        def look() -> bool:
            named = ((one, command(one).split(" --")[0]) for one in run.look())
            workers = [one for one, words in named if PROGRAMS["worker"] in words]
            pairs = ((worker, shadow_of(worker)) for worker in workers)
            found[:] = next(([worker, child] for worker, child in pairs if child), [])
            # It has opened the caches: it is past what it does first.
            return bool(found) and found[1].cpu_times().user > 1.0

        assert wait_for(lambda: _quietly(look), PATIENCE_S), run.said
        return run, found[0], found[1]

    yield start
    for run in runs:
        run.end()


def _quietly(look: Callable[[], bool]) -> bool:
    try:
        return look()
    except (psutil.Error, StopIteration, ProcessLookupError):
        return False


def test_the_switch(fasttrain: Any, script: Any, tmp_path: Path) -> None:
    path = script(TRAINS)
    done = fasttrain("run", path, *OPTIONS, timeout_s=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"done ")
    (found,) = (
        json.loads(one.read_text()) for one in tmp_path.glob("fasttrain_runs/*/compile_auto.json")
    )
    assert found["phase"] in ("kept", "dropped")
    assert found["cached"], "all graphs were those of the shadow"
    assert found["stall_s"] > 0.0
    assert found["from_step"] > 20
    whats = [event["what"] for event in events(tmp_path)]
    assert whats == ["decided", "compiling", "compiled", "comparing", "compared", found["phase"]]
    outcome = compile_outcome(tmp_path)
    kept = found["phase"] == "kept"
    assert outcome["state"] == ("applied" if kept else "skipped")
    told = r"compiled from step [\d,]+ on: \S+ -> \S+ ms a step, \d+ s in the background, .*stall"
    assert re.search(told if kept else r"dropped: .* ms a step", outcome["reason"])
    by_hand = script(TRAINS.partition("losses, left")[0] + BY_HAND, "by_hand.py")
    subprocess.run([sys.executable, by_hand], cwd=tmp_path, env=fasttrain.environ, check=True)
    losses = [json.loads((tmp_path / name).read_text()) for name in ("losses.json", "by_hand.json")]
    assert losses[0] == losses[1]
    assert {on for on, _ in losses[0]} == {True, False}
    later = fasttrain("run", path, *OPTIONS, "--dry-run", "--json")
    earlier = json.loads(later.stdout)["data"]["earlier"]
    assert earlier["steps"] == len(losses[0])
    assert bool(earlier["dropped"]) is not kept


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV"])
def test_a_shadow_that_dies_leaves_the_run_alone(
    run_with_shadow: Any, tmp_path: Path, name: str
) -> None:
    run, _, child = run_with_shadow(TRAINS)
    child.send_signal(getattr(signal, name))
    assert run.launcher.wait(120) == 0, run.said
    assert "done" in run.said
    outcome = compile_outcome(tmp_path)
    assert outcome["state"] == "skipped"
    assert f"signal {int(getattr(signal, name))}" in outcome["reason"]
    assert run.left() == []


def test_a_shadow_that_dies_leaves_all_ranks_alone(run_with_shadow: Any, tmp_path: Path) -> None:
    run, _, child = run_with_shadow(TRAINS, *TWO)
    child.send_signal(signal.SIGKILL)
    assert run.launcher.wait(120) == 0, run.said
    assert "done" in run.said
    for outcome in compile_outcomes(tmp_path):
        assert outcome["state"] == "skipped"
        assert "signal 9" in outcome["reason"]
    assert run.left() == []


def test_a_rank_that_fails_while_another_one_compiles(run_with_shadow: Any, tmp_path: Path) -> None:
    run, _, child = run_with_shadow(OWN, *TWO)
    (tmp_path / "stop").touch()
    assert run.launcher.wait(120) == 1, run.said
    assert "a rank fails" in run.said
    assert not psutil.pid_exists(child.pid)
    assert run.left() == []


@pytest.mark.parametrize("target", ["launcher", "worker"])
@pytest.mark.parametrize("name", ["SIGINT", "SIGKILL"])
def test_an_end_from_outside_leaves_nothing(run_with_shadow: Any, target: str, name: str) -> None:
    run, _, _ = run_with_shadow()
    run.victim(target).send_signal(getattr(signal, name))
    run.launcher.wait(120)
    assert run.left() == []


def test_a_script_that_ends_meanwhile(run_with_shadow: Any, tmp_path: Path) -> None:
    text = TRAINS.replace("while left:", "import os.path\nwhile not os.path.exists('stop'):")
    run, _, child = run_with_shadow(text.replace("        left -= 10", "        pass"))
    (tmp_path / "stop").touch()
    assert run.launcher.wait(120) == 0, run.said
    assert not psutil.pid_exists(child.pid)
    assert run.left() == []
    assert "ended while it compiled in the background" in compile_outcome(tmp_path)["reason"]


@pytest.mark.parametrize(
    ("change", "state", "reason"),
    [
        (("loss.backward()", "loss.backward(create_graph=True)"), "skipped", "second derivatives"),
        (("[:32]", "[:torch.randint(2, 32, ()).item()]"), "skipped", "shapes in"),
        (("net = Net()", "net = torch.compile(Net(), backend='eager')"), "ceded", "compiles Net"),
        (("net(batch)", "nn.functional.linear(batch, net.a.weight.T @ net.a.weight)"), "", ""),
        (("net = Net()", "net = Net().share_memory()"), "skipped", "other processes share"),
    ],
    ids=["second derivatives", "shapes", "own", "no call", "shared memory"],
)
def test_what_stays_eager(
    fasttrain: Any, script: Any, tmp_path: Path, change: tuple[str, str], state: str, reason: str
) -> None:
    text = TRAINS.replace(*change).partition("json.dump")[0]
    text = text.replace("while left:", "while step < 60:").replace("on = is_on()", "on = False")
    done = fasttrain("run", script(text), *OPTIONS, "--amp", "off")
    assert done.returncode == 0, done.stderr
    outcome = compile_outcome(tmp_path)
    assert outcome["state"] == (state or "skipped")
    assert (reason or "no module is called") in outcome["reason"]
    assert b"warning" not in done.stderr, "to stay eager is what was asked for, too"


def test_what_is_compiled_again_and_again_is_dropped(
    fasttrain: Any, script: Any, tmp_path: Path
) -> None:
    """Words that no argument shows: each is a graph of its own."""
    text = TRAINS.replace("on = is_on()", "on = is_on(); net.word = f'{step}' if on else ''")
    text = text.replace(
        "def forward(self, x):", "def forward(self, x):\n        if self.word == '-': x = -x"
    )
    text = text.replace("self.a, self.b", "self.word = ''; self.a, self.b", 1)
    done = fasttrain("run", script(text), *OPTIONS, timeout_s=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    outcome = compile_outcome(tmp_path)
    assert outcome["state"] == "skipped"
    assert "dropped: it had to be compiled again and again" in outcome["reason"]
    assert outcome["counts"]["recompiles"] <= 3


def test_where_nothing_forks_the_training_waits_for_the_compilation(
    fasttrain: Any, script: Any, tmp_path: Path
) -> None:
    """On a processor that only says that a device is used."""
    path = script(TRAINS.replace("net = Net()", f"{USES_DEVICE}; net = Net()"))
    done = fasttrain("run", path, *OPTIONS, timeout_s=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    (written,) = tmp_path.glob("fasttrain_runs/*/compile_auto.json")
    found = json.loads(written.read_text())
    assert found["phase"] in ("kept", "dropped"), found
    assert found["background_s"] == 0.0
    assert found["stall_s"] > 0.0
    assert compile_outcome(tmp_path)["counts"]["graphs"] == 1


def test_a_compilation_that_takes_too_long_is_ended(
    fasttrain: Any, script: Any, tmp_path: Path
) -> None:
    """It was expected to take 0.1 s, and may take twice that."""
    text = TRAINS.replace(
        "net = Net()",
        f"""{USES_DEVICE}; net = Net()
from fasttrain.shim.compile_auto import rule
rule.IMPORT_S, rule.TRACE_S_PER_PART, rule.COMPILE_S, rule.COMPILE_S_PER_PART = 0.1, 0, 0, 0""",
    )
    done = fasttrain("run", script(text), *OPTIONS[:-1], "4000", timeout_s=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert b"ran eagerly" not in done.stderr, "no failure of the compiler's"
    (written,) = tmp_path.glob("fasttrain_runs/*/compile_auto.json")
    assert json.loads(written.read_text())["phase"] == "dropped"
    assert "dropped: compiling took more than" in compile_outcome(tmp_path)["reason"]
    (known,) = json.loads((tmp_path / "fasttrain_runs/history.json").read_text())["runs"]
    assert "compiling took more than" in known["known"]["dropped"], "it isn't tried again"


def test_workers_of_a_loader_and_two_threads(fasttrain: Any, script: Any, tmp_path: Path) -> None:
    batches = """
loader = torch.utils.data.DataLoader(data, batch_size=32, num_workers=2)
def endless():
    while True:
        yield from loader
source = endless()
losses, left"""
    text = TRAINS.replace("losses, left", batches, 1).partition("json.dump(losses")[0]
    text = text.replace("data[step % 8 * 32:][:32]", "next(source)")
    done = fasttrain(
        "run", script(text), *OPTIONS, env={"OMP_NUM_THREADS": "2"}, timeout_s=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("fasttrain_runs/*/compile_auto.json")
    found = json.loads(path.read_text())
    assert found["phase"] in ("kept", "dropped"), found
    assert found["cached"]
