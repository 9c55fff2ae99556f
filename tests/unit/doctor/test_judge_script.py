from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest

import fasttrain
from fasttrain.doctor.script import judge_script
from fasttrain.doctor.script_levers import FUSIBLE, LeverLine, lever_lines
from fasttrain.model.codec import loads
from fasttrain.model.decision import Setting, Source, SourceKind
from fasttrain.model.levers import Levers
from fasttrain.model.machine import Finding, Machine
from fasttrain.model.outcome import State
from fasttrain.model.plan import Evidence, Invocation, LaunchPlan, ScriptFacts, Target
from fasttrain.model.settings import Settings
from fasttrain.planning.plan import make_plan
from fasttrain.source.habits import Habits
from fasttrain.source.read import read_program

TESTS = Path(__file__).parents[2]
APPLIED, CEDED, SKIPPED = State.APPLIED, State.CEDED, State.SKIPPED
ARMED, FAILED, OFF = State.ARMED, State.FAILED, State.OFF


def the_machine(name: str) -> Machine:
    return loads(Machine, (TESTS / "data" / "machines" / f"{name}.json").read_bytes())


def the_plan(machine: Machine, facts: ScriptFacts, **options: Any) -> LaunchPlan:
    def flag(name: str, value: object) -> Setting[Any]:
        return Setting(value, Source(SourceKind.FLAG, f"--{name}"))

    settings = Settings(**{name: flag(name, value) for name, value in options.items()})
    invocation = Invocation(
        target=Target("script", "train.py"),
        cwd="/home/me",
        python="python3",
        shim="shim.py",
        agent="agent.py",
        environ={},
        run_id="r1",
        run_dir="/home/me/runs/r1",
        cache_dir="/home/me/.cache",
        version="0.1.0",
        facts=facts,
    )
    return make_plan(settings, machine, invocation)


@dataclass
class Judged:
    """What is said of one script on one machine."""

    lines: dict[str, LeverLine]
    findings: tuple[Finding, ...]

    def verdict(self, lever: str) -> tuple[State, str]:
        """How a lever would end, and the line that decides."""
        line = self.lines[lever]
        return line.verdict, line.where.rpartition(":")[2]

    def of(self, check: str) -> list[tuple[str, str]]:
        """Severity and place of a check's findings."""
        return [(f.severity, f.where) for f in self.findings if f.check == f"script-{check}"]


def judge(folder: Path, name: str, machine: str, **options: Any) -> Judged:
    target = Target("script", name)
    facts, habits = read_program(target, str(folder), {})
    there = the_machine(machine)
    plan = the_plan(there, facts, **options)
    lines = {line.lever: line for line in lever_lines(plan, habits)}
    return Judged(lines, judge_script(habits, facts, plan, there))


@pytest.fixture
def judged(tmp_path: Path) -> Callable[..., Judged]:
    """Judge a script that is given as its text."""

    def run(source: str, machine: str = "8xh100", **options: Any) -> Judged:
        (tmp_path / "train.py").write_text(source)
        return judge(tmp_path, "train.py", machine, **options)

    return run


def of_wild(name: str, machine: str = "8xh100", **options: Any) -> Judged:
    return judge(TESTS / "scripts", f"{name}.py", machine, **options)


# Script, lever, options, and how it ends: as tests/support/scripts_table.py has it after a run.
WILD = [
    ("gpt_cosine", "amp", {}, (APPLIED, "")),
    ("gpt_cosine", "compile", {"compile": "default"}, (APPLIED, "")),
    ("gpt_cosine", "compile", {"compile": "auto"}, (ARMED, "")),  # only if it pays
    ("gpt_cosine", "optimizer", {}, (APPLIED, "")),
    ("own_amp", "amp", {}, (CEDED, "9")),
    ("own_compile", "amp", {}, (APPLIED, "")),
    ("own_compile", "compile", {"compile": "default"}, (CEDED, "7")),
    ("wgan_gp", "compile", {"compile": "default"}, (SKIPPED, "19")),
    ("maml_functional", "compile", {"compile": "default"}, (SKIPPED, "28")),
    ("char_lstm", "compile", {"compile": "default"}, (ARMED, "17")),
    ("packed_lengths", "compile", {"compile": "default"}, (ARMED, "19")),
    ("scripted_part", "compile", {"compile": "default"}, (ARMED, "26")),
    ("siamese_bce", "optimizer", {}, (SKIPPED, "35")),
    ("seq2seq_parts", "optimizer", {}, (SKIPPED, "41")),
    ("loader_workers", "optimizer", {}, (SKIPPED, "39")),
    ("lbfgs_closure", "optimizer", {}, (SKIPPED, "9")),
    ("lbfgs_closure", "amp", {}, (APPLIED, "")),
    ("lbfgs_closure", "amp", {"amp": "fp16"}, (FAILED, "9")),
    ("manual_sgd", "optimizer", {}, (ARMED, "")),
    ("sparse_embeddings", "optimizer", {}, (APPLIED, "")),  # Adam beside SparseAdam
    ("convnet_batchnorm", "compile", {}, (ARMED, "")),
    ("convnet_batchnorm", "compile", {"compile": "off"}, (OFF, "")),
    ("convnet_batchnorm", "strategy", {"gpus": "0,1"}, (APPLIED, "")),
    ("convnet_batchnorm", "dataloader", {"gpus": "0,1"}, (ARMED, "")),
    ("loader_workers", "dataloader", {"gpus": "0,1"}, (APPLIED, "")),
    ("loader_workers", "dataloader", {}, (SKIPPED, "")),
]


@pytest.mark.parametrize(
    ("name", "machine", "options", "found"),
    [
        ("gpt_cosine", "4xt4", {}, [("hint", "")]),
        ("gpt_cosine", "4xt4", {"amp": "off"}, []),
        ("gpt_cosine", "8xh100", {}, []),
        ("own_amp", "4xt4", {}, []),
        ("lbfgs_closure", "4xt4", {}, []),  # which fp16 refuses
    ],
)
def test_fp16_is_hinted_at_where_bf16_is_lacking(name, machine, options, found):
    assert of_wild(name, machine, **options).of("amp") == found


@pytest.mark.parametrize(("name", "lever", "options", "verdict"), WILD)
def test_levers_on_scripts_of_the_wild(name, lever, options, verdict):
    assert of_wild(name, **options).verdict(lever) == verdict


def test_the_table_has_every_lever_once_with_the_plans_value():
    lines = of_wild("gpt_cosine", compile="default").lines
    values = {line.lever: line.value for line in lines.values()}
    assert list(values) == [*(field.name for field in fields(Levers)), "dataloader"]
    assert values == values | {
        "amp": "bfloat16",
        "compile": "default",
        "optimizer": "fused",
        "matmul": "high",
        "strategy": "none",
        "dataloader": "keep",
    }


def test_the_words_are_those_of_the_receipt():
    lines = of_wild("own_amp").lines | of_wild("own_compile", compile="default").lines
    shim = Path(fasttrain.__file__).parent / "shim" / "levers"
    assert "raw_model" in lines["compile"].why
    assert (
        lines["compile"].why.replace("raw_model", "{name}")
        in (shim / "compile" / "lever.py").read_text()
    )
    assert f'"{of_wild("own_amp").lines["amp"].why}"' in (shim / "amp" / "lever.py").read_text()


@pytest.mark.parametrize(
    ("source", "lever", "verdict"),
    [
        ("import torch\nwith torch.autocast('cuda', enabled=a): 0", "amp", (ARMED, "2")),
        ("m = N().double()\nm.parameters()", "amp", (ARMED, "1")),
        ("import lightning as L\nL.Trainer()", "amp", (ARMED, "2")),
        ("import lightning as L\nL.Trainer(precision='bf16-mixed')", "amp", (CEDED, "2")),
        ("import torch\ntorch.optim.Adam(p, fused=True)", "optimizer", (CEDED, "2")),
        ("import torch\ntorch.optim.Adam(p, **extra)", "optimizer", (ARMED, "2")),
        ("from torch.optim import *\nAdam(p, **extra)\nAdamW(p)", "optimizer", (APPLIED, "")),
        ("import torch\ntorch.optim.Adagrad(p)", "optimizer", (ARMED, "")),
        (
            "import torch\ne = torch.nn.Embedding(2, 2, sparse=True)\ntorch.optim.SGD(p)",
            "optimizer",
            (ARMED, "2"),
        ),
        ("import torch\no = torch.optim.SGD(p)\no.register_step_pre_hook(f)", "optimizer",
         (ARMED, "3")),
        ("import torch\nfrom torch.optim import *\nAdam(p, fused=True)\nSGD(p)", "optimizer",
         (APPLIED, "")),
        ("import torch\ntorch.set_float32_matmul_precision('high')", "matmul", (CEDED, "2")),
        ("import torch\nif a: torch.backends.cuda.matmul.allow_tf32 = True", "matmul",
         (ARMED, "2")),
    ],
)  # fmt: skip
def test_what_a_script_does_itself(judged, source, lever, verdict):
    assert judged(source).verdict(lever) == verdict


@pytest.mark.parametrize(
    ("source", "verdict"),
    [
        ("import torch\nm = torch.nn.DataParallel(m)", (SKIPPED, "2")),
        ("import torch\nif several: m = torch.nn.DataParallel(m)", (ARMED, "2")),
        ("import torch\nstep = torch.compile(step)", (ARMED, "2")),
    ],
)
def test_what_keeps_a_script_from_being_compiled(judged, source, verdict):
    assert judged(source, compile="default").verdict("compile") == verdict


def test_a_script_that_handles_its_ranks_keeps_them(judged):
    source = "import torch.distributed as dist\ndist.init_process_group()"
    found = judged(source, gpus="0,1")
    assert found.verdict("strategy") == (CEDED, "")
    assert found.verdict("dataloader") == (CEDED, "")
    assert found.of("strategy") == []
    assert judged(source, gpus="0,1", strategy="ddp").of("strategy") == [("warning", "train.py:2")]


def test_a_lever_that_the_script_holds_back_is_told_once():
    assert of_wild("own_amp").of("amp") == [("hint", "own_amp.py:9")]
    assert of_wild("gpt_cosine").findings == ()


def test_swapped_optimizers_are_left_to_the_run():
    machine = the_machine("8xascend910b")
    plan = the_plan(machine, ScriptFacts())
    for value, verdict in (("npu", ARMED), ("keep", SKIPPED)):
        decision = replace(plan.levers.optimizer, value=value)
        changed = replace(plan, levers=replace(plan.levers, optimizer=decision))
        lines = {line.lever: line for line in lever_lines(changed, Habits())}
        assert (lines["optimizer"].value, lines["optimizer"].verdict) == (value, verdict)


def test_what_a_person_asked_for_in_vain_is_a_warning():
    assert of_wild("own_amp", amp="bf16").of("amp") == [("warning", "own_amp.py:9")]
    found = of_wild("wgan_gp", compile="default")
    assert found.of("compile") == [("warning", "wgan_gp.py:19")]


def test_what_only_a_run_can_tell_is_a_hint(judged):
    found = judged("import torch\nstep = torch.compile(step)", compile="default")
    assert found.of("compile") == [("hint", "train.py:2")]


def test_workers_need_cores(tmp_path):
    (tmp_path / "train.py").write_text(LOADER + "DataLoader(D())")
    _, habits = read_program(Target("script", "train.py"), str(tmp_path), {})
    machine = the_machine("8xh100")
    few = replace(machine, cpu=replace(machine.cpu, cores=3))
    for gpus, number in (("0", 1), ("0,1", 0)):  # 3 cores for a process, then 1
        plan = the_plan(few, ScriptFacts(), gpus=gpus)
        assert len(judge_script(habits, ScriptFacts(), plan, few)) == number


def test_a_run_that_would_be_refused_is_an_error():
    assert of_wild("lbfgs_closure", amp="fp16").of("amp") == [("error", "lbfgs_closure.py:9")]


LOADER = "from torch.utils.data import DataLoader, Dataset\nclass D(Dataset): 0\n"
STEP = "for x in d:\n  loss.backward()\n  s += loss.item()"
CUDNN = "import torch.backends.cudnn as cudnn\ncudnn."
NN = "import torch.nn as nn\n"
# A check, a script that it fires for on eight H100s, and how.
FIRE = [
    ("sync", STEP, {}, "hint"),
    ("workers", LOADER + "DataLoader(D())", {}, "hint"),
    ("pinning", LOADER + "DataLoader(D(), num_workers=4)", {}, "hint"),
    ("anomaly", "import torch\ntorch.autograd.set_detect_anomaly(True)", {}, "warning"),
    ("cudnn", CUDNN + "enabled = False", {}, "warning"),
    ("deterministic", CUDNN + "deterministic = True", {}, "hint"),
    ("data-parallel", NN + "m = nn.DataParallel(m)", {}, "warning"),
    ("device", "x.cuda(8)", {}, "warning"),
    ("device", "x.to('cuda:1')", {"gpus": "0,1"}, "warning"),  # each rank sees its own alone
    ("device", "x.to('cuda:1')", {"gpus": "0,1", "strategy": "none"}, "warning"),
    ("visible", "import os\nos.environ['CUDA_VISIBLE_DEVICES'] = '3'", {"gpus": "0"}, "warning"),
    ("visible", "import os\nos.environ['CUDA_VISIBLE_DEVICES'] = '3'", {"gpus": "0,1"}, "hint"),
]  # fmt: skip


@pytest.mark.parametrize(("check", "source", "options", "severity"), FIRE)
def test_a_habit_that_costs(judged, check, source, options, severity):
    found = judged(source, **options)
    assert [grave for grave, _ in found.of(check)] == [severity]
    assert all(where.startswith("train.py:") for _, where in found.of(check))


SYNC_BN = NN + "nn.SyncBatchNorm.convert_sync_batchnorm(m)"
RANKED_BN = SYNC_BN + "\nfrom torch import distributed\ndistributed.init_process_group()"
TWO = {"gpus": "0,1"}
FIRE += [
    ("sync-bn", RANKED_BN, {**TWO, "compile": "default"}, "hint"),
    ("sync-bn", RANKED_BN + "\nimport torch\nm.parameters()\ntorch.compile(m)", TWO, "hint"),
]

# The same checks where they have nothing to say.
FSDP = {"gpus": "0,1", "strategy": "fsdp"}
QUIET = [
    ("sync", STEP, "cpu-laptop", {}),
    ("workers", LOADER + "DataLoader(D())", "cpu-laptop", {}),
    ("pinning", LOADER + "DataLoader(D(), num_workers=4)", "8xascend910b", {}),
    ("anomaly", "import torch\nif debug: torch.autograd.set_detect_anomaly(True)", "8xh100", {}),
    ("cudnn", CUDNN + "enabled = False", "cpu-laptop", {}),
    ("cudnn", CUDNN + "enabled = True", "8xh100", {}),
    ("deterministic", CUDNN + "deterministic = args.exact", "8xh100", {}),
    ("deterministic", CUDNN + "benchmark = True", "8xh100", {}),
    ("cudnn", "from torch.backends import cudnn\nif a: cudnn.enabled = False", "8xh100", {}),
    ("data-parallel", NN + "m = nn.DataParallel(m)", "1xa100", {}),
    ("data-parallel", NN + "m = nn.DataParallel(m)", "8xh100", {"gpus": "0,1"}),
    ("device", "x.cuda()", "8xh100", {}),
    ("device", "x.to('cuda:7')", "8xh100", {}),
    ("device", "x.to('cuda:0')", "8xh100", {"gpus": "0,1"}),
    ("device", "import torch\nif torch.cuda.is_available(): x.cuda()", "cpu-laptop", {}),
    ("visible", "import os\nos.environ['CUDA_VISIBLE_DEVICES'] = '3'", "8xh100", {}),
    ("visible", "import os\nos.environ['CUDA_VISIBLE_DEVICES'] = '3'", "cpu-laptop", {}),
    # a whole model, also where it is sharded
    ("sharded", "import torch\nm.parameters()\ntorch.save(m, 'm.pt')", "8xh100", FSDP),
    ("sharded", "import copy\nm.parameters()\ncopy.deepcopy(m)", "8xh100", FSDP),
    ("sync-bn", SYNC_BN, "cpu-laptop", {}),
    ("sync-bn", RANKED_BN, "8xh100", TWO),
    ("sync-bn", RANKED_BN, "8xh100", {"compile": "default"}),  # one process has nothing to tell
    ("sync-bn", RANKED_BN.replace("Sync", ""), "8xh100", {**TWO, "compile": "default"}),
    ("sync-bn", SYNC_BN, "8xh100", {**TWO, "compile": "default"}),  # the shim's ranks tell anyway
]


@pytest.mark.parametrize(("check", "source", "machine", "options"), QUIET)
def test_a_habit_that_costs_nothing_there(judged, check, source, machine, options):
    assert judged(source, machine, **options).of(check) == []


@pytest.mark.parametrize(("machine", "severity"), [("cpu-laptop", "warning"),
                                                   ("8xascend910b", "hint")])  # fmt: skip
def test_a_script_bound_to_cuda(judged, machine, severity):
    assert judged("model.cuda()", machine).of("device") == [(severity, "train.py:1")]


def test_sync_batch_norm_on_the_cpu(judged):
    found = judged(SYNC_BN, "cpu-laptop", nproc_per_node=2)
    assert found.of("sync-bn") == [("warning", "train.py:2")]


def test_places_beyond_the_first_are_counted(judged):
    source = LOADER + "DataLoader(D())\nDataLoader(D())\nDataLoader(D())"
    (finding,) = judged(source).findings
    assert finding.where == "train.py:3"
    assert " 2 " in finding.what


def test_a_precision_choice_that_nothing_contests_is_no_finding(judged):
    source = "import torch\ntorch.set_float32_matmul_precision('high')"
    assert judged(source, "cpu-laptop").findings == ()
    assert judged(source).of("matmul") == [("hint", "train.py:2")]


def test_modules_that_could_not_be_read_are_told(judged):
    (finding,) = judged("def broken(:").findings
    assert finding.check == "script-unread"
    assert "train.py" in finding.what


def test_nothing_is_said_of_an_empty_script():
    machine, facts = the_machine("8xh100"), ScriptFacts(Evidence("Accelerator", "train.py:3"))
    assert judge_script(Habits(), facts, the_plan(machine, facts), machine) == ()


def test_the_fused_kernels_are_those_that_the_worker_knows():
    shim = Path(fasttrain.__file__).parent / "shim" / "levers" / "optimizer.py"
    for node in ast.parse(shim.read_text()).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "FUSIBLE":
            assert ast.unparse(node.value) == f"({', '.join(FUSIBLE)})"
            return
    pytest.fail("the worker's table is gone")
