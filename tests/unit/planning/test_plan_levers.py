from __future__ import annotations

import re
from dataclasses import replace

import pytest

from fasttrain.model.decision import Setting, Source, SourceKind
from fasttrain.model.errors import FasttrainError
from fasttrain.model.levers import LEVERS, Amp, Compile, Strategy
from fasttrain.model.machine import Cpu, Device, Torch
from fasttrain.model.plan import Evidence, ScriptFacts
from fasttrain.model.vendors import VENDORS
from fasttrain.planning.describe import NO_PYTHON
from fasttrain.planning.levers.amp import MAY_SATURATE, SATURATES
from fasttrain.planning.levers.matmul import CPU_NOTE
from fasttrain.planning.levers.strategy import MADE_PARALLEL, ONE_PROCESS
from fasttrain.planning.plan import make_plan

AMX = Cpu("Xeon", 8, "8 CPUs in the affinity mask", features=("amx_bf16",))


def _mixed(make):
    return make.machine(make.h100, replace(make.t4, index=1), replace(make.h100, index=2))


# --- amp


def test_auto_is_bf16_where_every_chosen_device_has_it(make):
    machine = _mixed(make)
    assert make.plan(make.gpus(2)).levers.amp.value == Amp("bfloat16", "cuda")
    assert make.plan(machine, gpus="0,2").levers.amp.value.precision == "bfloat16"
    off = make.plan(machine, gpus="0,1").levers.amp
    assert off.value == Amp("off", "cuda")
    assert "bf16" in off.reason
    assert "Tesla T4" in off.reason
    assert "H100" not in off.reason
    assert not off.source.explicit


def test_auto_on_the_cpu_needs_native_bf16(make):
    assert make.plan(make.machine()).levers.amp.value == Amp("off", "cpu")
    assert make.plan(make.machine(cpu=AMX)).levers.amp.value == Amp("bfloat16", "cpu")


def test_off_is_off(make):
    amp = make.plan(make.gpus(1), amp="off").levers.amp
    assert amp.value.precision == "off"
    assert str(amp.source) == "--amp"


def test_bf16_asked_of_a_gpu_without_it(make):
    error = make.refused(_mixed(make), amp="bf16", gpus="all")
    assert (error.slug, error.exit_code) == ("amp-unsupported", 78)
    assert re.findall(r"GPU \d \(.*?\)", error.what) == ["GPU 1 (Tesla T4)"]
    assert re.findall(r"\d\.\d", error.why) == ["8.0", "7.5"]
    assert _amp_options(error.fix) == ["--amp fp16"]
    assert "GPU 1" in error.fix
    assert "--gpus 0,2" in error.fix


def test_bf16_asked_of_gpus_that_all_lack_it(make):
    error = make.refused(make.gpus(2, make.t4), amp="bf16")
    assert error.slug == "amp-unsupported"
    found = re.findall(r"GPU \d \(.*?\)", error.what)
    assert found == ["GPU 0 (Tesla T4)", "GPU 1 (Tesla T4)"]
    assert _amp_options(error.fix) == ["--amp fp16"]
    assert "--gpus" not in error.fix, "there is none to leave out"


def test_bf16_asked_of_a_cpu_without_it_is_allowed_with_a_warning(make):
    plan = make.plan(make.machine(), amp="bf16")
    assert plan.levers.amp.value == Amp("bfloat16", "cpu")
    [warning] = plan.warnings
    assert "bf16" in warning
    assert "--amp off" in warning
    assert make.plan(make.machine(cpu=AMX), amp="bf16").warnings == ()


def test_fp16_goes_where_its_loss_scaling_is_known_to_be_right(make):
    machines = (make.gpus(1), make.gpus(1, make.t4), make.gpus(2, make.npu))
    for machine, kind in zip(machines, ("cuda", "cuda", "npu"), strict=True):
        plan = make.plan(machine, amp="fp16")
        assert plan.levers.amp.value == Amp("float16", kind)
        assert plan.warnings == ()
    plan = make.plan(make.machine(), amp="fp16")
    assert plan.levers.amp.value == Amp("float16", "cpu")
    [warning] = plan.warnings
    assert "fp16" in warning
    assert "--amp off" in warning


def _fp16_hints(plan):
    return [hint for hint in plan.hints if _amp_options(hint)]


@pytest.mark.parametrize(
    ("name", "capability", "hinted"),
    [
        ("Tesla V100-SXM2-16GB", "7.0", True),
        ("Tesla T4", "7.5", True),
        ("NVIDIA GeForce GTX 1080", "6.1", False),  # fp16 at 1/64 of the speed of fp32
        ("Tesla P100-PCIE-16GB", "6.0", False),
    ],
)
def test_fp16_is_hinted_at_where_bf16_alone_is_lacking(make, name, capability, hinted):
    machine = make.gpus(1, replace(make.t4, name=name, capability=capability))
    plan = make.plan(machine)
    assert plan.levers.amp.value.precision == "off"
    assert [_amp_options(hint) for hint in _fp16_hints(plan)] == [["--amp fp16"]] * hinted
    assert all(name in hint for hint in _fp16_hints(plan))


def test_fp16_is_not_hinted_at_where_precision_was_chosen(make):
    for machine, options in (
        (make.gpus(1, make.t4), {"amp": "off"}),
        (make.gpus(1, make.t4), {"amp": "fp16"}),
        (make.gpus(1, make.t4), {"target": make.command}),
        (make.gpus(1), {}),
        (make.machine(), {}),
        (make.gpus(1, _npu(make, "Ascend910A", "saturates")), {}),
    ):
        assert _fp16_hints(make.plan(machine, **options)) == []


def test_fp16_is_hinted_at_by_the_devices_that_are_used(make):
    mixed = _mixed(make)
    assert _fp16_hints(make.plan(mixed)) == []  # one process, on the first of them
    [hint] = _fp16_hints(make.plan(mixed, gpus="all"))
    assert "Tesla T4" in hint
    assert make.h100.name not in hint


def _amp_options(text):
    return re.findall(r"--amp \w+", text)


def _npu(make, name, overflow, *, bf16=False):
    return replace(make.npu, name=name, capability=name, bf16=bf16, overflow=overflow)


@pytest.mark.parametrize(
    ("name", "overflow", "bf16", "how", "use"),
    [
        ("Ascend910A", "saturates", False, SATURATES, "--amp off"),
        ("Ascend310B1", "saturates", True, SATURATES, "--amp bf16"),
        ("Ascend NPU", "", False, MAY_SATURATE, "--amp off"),
    ],
)
def test_fp16_is_refused_on_an_npu_whose_overflow_does_not_show(
    make, name, overflow, bf16, how, use
):
    error = make.refused(make.gpus(1, _npu(make, name, overflow, bf16=bf16)), amp="fp16")
    assert (error.slug, error.exit_code) == ("amp-fp16", 78)
    assert f"({name})" in error.what
    assert how in error.what
    assert _amp_options(error.fix) == [use]
    assert "--gpus" not in error.fix, "there is none to leave out"


def test_the_npu_that_saturates_can_be_left_out(make):
    old = replace(_npu(make, "Ascend910A", "saturates"), index=1)
    machine = make.machine(make.npu, old)
    error = make.refused(machine, amp="fp16", gpus="all")
    assert _amp_options(error.fix) == ["--amp off"]
    assert "NPU 1" in error.fix
    assert re.findall(r"--gpus [\d,]+", error.fix) == ["--gpus 0"]
    assert make.plan(machine, amp="fp16", gpus="0").levers.amp.value == Amp("float16", "npu")


def test_bf16_asked_of_an_npu_without_it_is_not_sent_on_to_fp16(make):
    error = make.refused(make.gpus(1, _npu(make, "Ascend910A", "saturates")), amp="bf16")
    assert (error.slug, _amp_options(error.fix)) == ("amp-unsupported", ["--amp off"])


def test_fp16_asked_of_a_gpu_without_it(make):
    kepler = replace(make.t4, name="Tesla K80", capability="3.7", fp16=False)
    error = make.refused(make.gpus(1, kepler), amp="fp16")
    assert (error.slug, _amp_options(error.fix)) == ("amp-unsupported", ["--amp off"])
    assert re.findall(r"\d\.\d", error.why) == ["5.3", "3.7"]


# --- compile


def test_whether_compiling_pays_is_found_out_by_default(make):
    decision = make.plan(make.gpus(1)).levers.compile
    assert decision.value == Compile("auto", "default", "model")
    assert not decision.source.explicit


@pytest.mark.parametrize(
    ("asked", "on_cuda", "on_cpu"),
    [
        ("default", "default", "default"),
        ("reduce-overhead", "default", "reduce-overhead"),
        ("max-autotune", "max-autotune-no-cudagraphs", "max-autotune"),
        ("max-autotune-no-cudagraphs", "max-autotune-no-cudagraphs", "max-autotune-no-cudagraphs"),
    ],
)
def test_cuda_graphs_wait_until_the_loop_has_shown_to_be_safe(make, asked, on_cuda, on_cpu):
    later = asked if asked != on_cuda else None
    for machine in (make.gpus(1), make.gpus(1, make.rocm)):
        decision = make.plan(machine, compile=asked).levers.compile
        assert decision.value == Compile(asked, on_cuda, graphs=later)
        assert ("169545" in decision.reason) == (later is not None), "why they have to wait"
    decision = make.plan(make.machine(), compile=asked).levers.compile
    assert decision.value == Compile(asked, on_cpu)
    assert ("cpu" in decision.reason) == (later is not None)


def test_blocks_have_no_cuda_graphs(make):
    settings = {"compile": "reduce-overhead", "compile_scope": "blocks"}
    decision = make.plan(make.gpus(1), **settings).levers.compile
    assert decision.value == Compile("reduce-overhead", "default", "blocks")
    assert "158551" in decision.reason


def test_the_scope_is_kept_and_told_where_it_does_nothing(make):
    plan = make.plan(make.gpus(1), compile="default", compile_scope="blocks")
    assert plan.levers.compile.value.scope == "blocks"
    assert plan.warnings == ()
    idle = make.plan(make.gpus(1), compile="off", compile_scope="blocks")
    assert any("--compile-scope" in warning for warning in idle.warnings)


@pytest.mark.parametrize("version", ["1.13.1", ""])
def test_compile_needs_torch_2(make, version):
    error = make.refused(make.machine(torch=Torch(version, "cpu")), compile="default")
    assert (error.slug, error.exit_code) == ("compile-torch", 78)


def test_compile_needs_a_compiler(make):
    error = make.refused(make.machine(cxx_compiler=""), compile="default")
    assert (error.slug, error.exit_code) == ("compile-compiler", 69)
    assert make.plan(make.machine(cxx_compiler="")).levers.compile.value.mode == "off"


def _npus_with_triton(make, version="2.13.0"):
    return make.gpus(1, make.npu, torch=Torch(version, "cpu", triton_ascend="3.2.0"))


def test_auto_leaves_compilation_to_the_worker(make):
    decision = make.plan(make.machine(), compile="auto").levers.compile
    assert decision.value == Compile("auto", "default")
    assert LEVERS["compile"].words(decision.value) == "auto"


@pytest.mark.parametrize(
    ("options", "changes", "reason"),
    [
        ({"nproc_per_node": 2, "nodes": "1:2", "rdzv_endpoint": "h:1"}, {}, "several nodes"),
        ({"nproc_per_node": 2, "strategy": "fsdp"}, {}, "share a model's parameters"),
        ({"nproc_per_node": 2, "strategy": "none"}, {}, "nothing to do with each other"),
        ({"nproc_per_node": 2, "preempt": "snapshot"}, {}, "snapshots"),
        ({"preempt": "snapshot"}, {}, "snapshots"),
        ({}, {"cxx_compiler": ""}, "builds its kernels"),
        ({}, {"torch": Torch("1.13.1", "cpu")}, "torch.compile needs torch 2.0"),
    ],
    ids=[
        "nodes",
        "fsdp",
        "copies",
        "ranks with snapshots",
        "snapshots",
        "no compiler",
        "old torch",
    ],
)
def test_auto_is_off_where_nothing_can_switch(make, options, changes, reason):
    decision = make.plan(make.machine(**changes), compile="auto", **options).levers.compile
    assert decision.value.asked == "off"
    assert reason in decision.reason


@pytest.mark.parametrize("options", [{"strategy": "ddp"}, {}], ids=["injected", "own"])
def test_auto_compiles_in_the_ranks_of_one_node_on_processors(make, options):
    facts = ScriptFacts() if options else AWARE
    plan = make.plan(make.machine(), facts=facts, compile="auto", nproc_per_node=2, **options)
    assert plan.levers.compile.value == Compile("auto", "default")
    plan = make.plan(make.gpus(2), facts=facts, compile="auto", nproc_per_node=2, **options)
    assert plan.processes.value.world_size == 2
    assert plan.levers.compile.value.asked == "off"
    assert "not on cuda" in plan.levers.compile.reason


def test_exact_results_are_never_compiled_by_auto(make):
    settings = make.settings(compile="auto")
    exact = Setting("off", Source(SourceKind.PRESET, "preset exact"))
    plan = make_plan(replace(settings, amp=exact), make.machine(), make.invocation())
    assert plan.levers.compile.value.asked == "off"
    assert "exact" in plan.levers.compile.reason


def test_compile_on_npus_needs_triton_ascend(make):
    error = make.refused(make.gpus(1, make.npu), compile="default")
    assert (error.slug, error.exit_code) == ("compile-npu", 69)
    assert "pip install triton-ascend" in error.fix
    plan = make.plan(_npus_with_triton(make), compile="default")
    assert plan.levers.compile.value == Compile("default", "default")


def test_compile_on_npus_needs_torch_2_6(make):
    assert make.refused(_npus_with_triton(make, "2.5.1"), compile="default").slug == "compile-torch"
    assert make.plan(_npus_with_triton(make, "2.6.0"), compile="default")


@pytest.mark.parametrize(
    ("asked", "used"),
    [("reduce-overhead", "default"), ("max-autotune", "max-autotune-no-cudagraphs")],
)
def test_npu_graphs_are_left_alone(make, asked, used):
    decision = make.plan(_npus_with_triton(make), compile=asked).levers.compile
    assert decision.value == Compile(asked, used)
    assert VENDORS["npu"].other_graphs in decision.reason


# --- optimizer


@pytest.mark.parametrize(
    ("torch", "on_cuda", "on_cpu"),
    [("2.0.1", "fused", "keep"), ("2.3.0", "fused", "keep"), ("2.4.0", "fused", "fused"),
     ("2.13.0", "fused", "fused"), ("1.13.0", "keep", "keep"), ("", "keep", "keep")],
)  # fmt: skip
def test_fused_where_torch_has_it(make, torch, on_cuda, on_cpu):
    for machine, value in ((make.gpus(1), on_cuda), (make.machine(), on_cpu)):
        installed = replace(machine, torch=replace(machine.torch, version=torch))
        assert make.plan(installed).levers.optimizer.value == value
        if value == "keep":
            error = make.refused(installed, optimizer="fused")
            assert (error.slug, error.exit_code) == ("optimizer-fused", 78)
        else:
            asked = make.plan(installed, optimizer="fused").levers.optimizer
            assert (asked.value, str(asked.source)) == ("fused", "--optimizer")


def test_other_vendors_keep_their_optimizers(make):
    machine = make.gpus(1, Device("xpu", 0, "Max", bf16=True))
    assert make.plan(machine).levers.optimizer.value == "keep"
    assert make.refused(machine, optimizer="fused").slug == "optimizer-fused"
    assert make.plan(make.gpus(1), optimizer="keep").levers.optimizer.value == "keep"


def test_npu_optimizers(make):
    assert make.refused(make.machine(), optimizer="npu").slug == "optimizer-npu"
    npus = make.gpus(1, make.npu)
    assert make.plan(npus, optimizer="npu").levers.optimizer.value == "npu"
    assert make.plan(npus).levers.optimizer.value == "npu"
    assert make.plan(npus, optimizer="keep").levers.optimizer.value == "keep"
    assert make.refused(npus, optimizer="fused").slug == "optimizer-fused"


# --- matmul


def test_tf32_goes_with_bf16(make):
    assert make.plan(make.gpus(2)).levers.matmul.value == "high"
    kept = make.plan(make.gpus(2), amp="off").levers.matmul
    assert kept.value == "keep"
    assert "amp" in kept.reason
    without = make.machine(make.h100, replace(make.h100, index=1, tf32=False))
    assert make.plan(without).levers.matmul.value == "keep"
    assert make.plan(make.machine(cpu=AMX)).levers.matmul.value == "keep"


@pytest.mark.parametrize("value", ["keep", "highest", "high", "medium"])
def test_matmul_asked_for_is_taken(make, value):
    decision = make.plan(make.gpus(1), amp="off", matmul=value).levers.matmul
    assert (decision.value, str(decision.source)) == (value, "--matmul")
    on_cpu = make.plan(make.machine(), matmul=value).levers.matmul
    assert on_cpu.value == value
    assert (CPU_NOTE in on_cpu.reason) == (value in ("high", "medium"))


# --- strategy


AWARE = ScriptFacts(handles_ranks=Evidence("init_process_group", "train.py:7"))


def test_one_process_needs_no_strategy(make):
    for asked in ({}, {"strategy": "ddp"}):
        decision = make.plan(make.machine(), **asked).levers.strategy
        assert (decision.value.mode, decision.reason) == ("none", ONE_PROCESS)


def test_a_script_without_ranks_is_made_data_parallel(make):
    strategy = make.plan(make.gpus(2), gpus="all", batch="per-rank").levers.strategy
    assert strategy.value == Strategy(
        "ddp", "per-rank", collectives="nccl", visibility="CUDA_VISIBLE_DEVICES"
    )
    assert strategy.reason == MADE_PARALLEL


def test_a_script_that_handles_ranks_is_left_alone(make):
    strategy = make.plan(make.gpus(2), gpus="all", facts=AWARE).levers.strategy
    assert strategy.value.mode == "script"
    assert "init_process_group at train.py:7" in strategy.reason


def test_a_strategy_that_was_asked_for_wins_over_the_source(make):
    for mode in ("none", "ddp"):
        decision = make.plan(make.gpus(2), gpus="all", facts=AWARE, strategy=mode).levers.strategy
        assert (decision.value.mode, str(decision.source)) == (mode, "--strategy")


def test_each_of_several_unaware_copies_gets_a_device_of_its_own(make):
    copies = make.plan(make.gpus(4), gpus="1,3", strategy="none").levers.strategy
    assert copies.value.visibility == "CUDA_VISIBLE_DEVICES"
    assert "one GPU of its own" in copies.reason
    aware = make.plan(make.gpus(4), gpus="1,3", strategy="none", facts=AWARE).levers.strategy
    assert aware.value.visibility == "", "it chooses by its local rank"
    assert "of its own" not in aware.reason
    alone = make.plan(make.gpus(4), strategy="none").levers.strategy
    assert alone.value.visibility == "", "one process sees what plain python would"
    on_cpu = make.plan(make.machine(), nproc_per_node=2, strategy="none").levers.strategy
    assert (on_cpu.value.visibility, "of its own" in on_cpu.reason) == ("", False)


def test_copies_that_slurm_starts_may_choose_by_its_variables(make):
    invocation = replace(make.invocation(), ranks_by_slurm=True)
    settings = make.settings(gpus="all", strategy="none")
    plan = make_plan(settings, make.gpus(2), invocation)
    assert plan.levers.strategy.value.visibility == ""


def test_fsdp(make):
    strategy = make.plan(make.gpus(2), gpus="all", strategy="fsdp").levers.strategy.value
    assert strategy.mode == "fsdp"
    old = make.gpus(2, torch=Torch("2.5.1", "cuda"))
    error = make.refused(old, gpus="all", strategy="fsdp")
    assert (error.slug, error.exit_code) == ("strategy-torch", 78)


def test_cuda_graphs_do_not_go_with_data_parallel_training(make):
    asked = {"gpus": "all", "compile": "reduce-overhead"}
    assert make.plan(make.gpus(2), **asked).levers.compile.value.graphs is None
    assert make.plan(make.gpus(2), facts=AWARE, **asked).levers.compile.value.graphs


# --- a command without Python


def test_a_command_gets_no_levers(make):
    plan = make.plan(make.gpus(1), target=make.command, amp="off", optimizer="keep")
    levers = plan.levers
    assert levers.amp.value == Amp("off", "cuda")
    assert levers.compile.value == Compile("off", "off")
    values = (levers.optimizer.value, levers.matmul.value, levers.strategy.value.mode)
    assert values == ("keep", "keep", "none")
    assert {getattr(levers, name).reason for name in ("amp", "compile", "optimizer", "matmul")} == {
        NO_PYTHON
    }
    assert make.variable(plan, "TORCH_CUDNN_V8_API_ENABLED") is None


@pytest.mark.parametrize(
    "option",
    [{"amp": "bf16"}, {"compile": "default"}, {"optimizer": "fused"}, {"matmul": "highest"},
     {"strategy": "ddp"}, {"max_steps": 3}],
)  # fmt: skip
def test_a_lever_that_a_person_named_cannot_act_on_a_command(make, option):
    with pytest.raises(FasttrainError) as caught:
        make.plan(make.gpus(1), target=make.command, **option)
    assert (caught.value.slug, caught.value.exit_code) == ("no-python-levers", 78)


@pytest.mark.parametrize(
    ("gpus", "environ", "warned"),
    [
        ("0,1", {"WANDB_MODE": "offline"}, True),
        ("0,1", {}, False),
        ("0,1", {"WANDB_MODE": "disabled"}, False),
        ("0", {"WANDB_MODE": "offline"}, False),
    ],
)
def test_a_wandb_mode_that_holds_on_rank_0_alone_is_told(make, gpus, environ, warned):
    plan = make.plan(make.gpus(2), environ=environ, gpus=gpus)
    assert any("WANDB_MODE=offline" in w for w in plan.warnings) is warned


@pytest.mark.parametrize(
    ("option", "slug"),
    [({"preempt": "snapshot"}, "workers-snapshot"), ({"batch": "per-rank"}, "workers-per-rank")],
)
def test_workers_that_read_ahead_are_refused_where_that_cannot_be_known(make, option, slug):
    make.plan(make.gpus(1), loader_workers=2)
    error = make.refused(make.gpus(1), loader_workers=2, **option)
    assert error.slug == slug
