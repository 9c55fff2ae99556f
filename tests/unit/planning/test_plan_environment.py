from __future__ import annotations

from dataclasses import replace

import pytest

from fasttrain.model.decision import Setting, Source, SourceKind
from fasttrain.model.machine import Cpu
from fasttrain.model.plan import Evidence, ScriptFacts
from fasttrain.planning.environment import EMPTY, OWN_VALUE_WON
from fasttrain.planning.plan import make_plan


def _names(plan):
    return [variable.name for variable in plan.environment]


def test_a_plain_run_only_marks_its_processes(make):
    assert _names(make.plan(make.machine(), compile="off")) == ["FASTTRAIN_RUN_ID"]
    assert _names(make.plan(make.machine())) == ["FASTTRAIN_RUN_ID", "TORCHINDUCTOR_CACHE_DIR"]
    nested = make.plan(make.machine(), {"FASTTRAIN_RUN_ID": "outer"})
    assert make.variable(nested, "FASTTRAIN_RUN_ID").value == "r1"


def test_cudnn_v8_goes_with_bf16_on_cuda(make):
    variable = make.variable(make.plan(make.gpus(1)), "TORCH_CUDNN_V8_API_ENABLED")
    assert (variable.value, str(variable.source)) == ("1", "devices")
    assert "1.13" in variable.reason
    for plan in (make.plan(make.gpus(1), amp="off"), make.plan(make.gpus(1, make.rocm))):
        assert make.variable(plan, "TORCH_CUDNN_V8_API_ENABLED") is None


@pytest.mark.parametrize(("cores", "processes", "threads"), [(8, 2, "4"), (8, 3, "2"), (1, 4, "1")])
def test_threads_share_the_cores_of_the_node(make, cores, processes, threads):
    machine = make.machine(cpu=Cpu("c", cores, "affinity"))
    plan = make.plan(machine, nproc_per_node=processes)
    assert make.variable(plan, "OMP_NUM_THREADS").value == threads


@pytest.mark.parametrize(
    ("reason", "threads"),
    [("a cgroup quota of 3 cores", "3"), ("SLURM_CPUS_PER_TASK=3", "3"),
     ("3 CPUs in the affinity mask", None)],
)  # fmt: skip
def test_one_process_is_told_of_limits_that_torch_does_not_see(make, reason, threads):
    plan = make.plan(make.machine(cpu=Cpu("c", 3, reason)))
    variable = make.variable(plan, "OMP_NUM_THREADS")
    assert (variable.value if variable else None) == threads


def test_exact_results_have_the_threads_of_plain_python(make):
    exact = replace(make.settings(), amp=Setting("off", Source(SourceKind.PRESET, "preset exact")))
    machine = make.machine(cpu=Cpu("c", 3, "SLURM_CPUS_PER_TASK=3"))
    assert make.variable(make_plan(exact, machine, make.invocation()), "OMP_NUM_THREADS") is None


def test_the_inductor_cache_persists_when_compiling(make):
    plan = make.plan(make.machine(), compile="default")
    cache = make.variable(plan, "TORCHINDUCTOR_CACHE_DIR")
    assert cache.value == "/home/me/.cache/fasttrain/inductor"


def test_a_cache_for_one_run_is_warned_of_where_compiling_was_asked_for(make):
    invocation = replace(make.invocation(), cache_note="no home")
    for flags in ({}, {"compile": "auto"}, {"compile": "default"}):
        plan = make_plan(make.settings(**flags), make.machine(), invocation)
        assert make.variable(plan, "TORCHINDUCTOR_CACHE_DIR").reason == "no home"
        assert any("no home" in warning for warning in plan.warnings) == bool(flags)


def test_debug_on_one_and_on_several(make):
    one = make.plan(make.gpus(2), debug=True)
    assert make.variable(one, "CUDA_LAUNCH_BLOCKING").value == "1"
    assert make.variable(one, "TORCH_SHOW_CPP_STACKTRACES").value == "1"
    assert make.variable(one, "PYTHONFAULTHANDLER").value == "1"
    assert make.variable(one, "TORCH_DISTRIBUTED_DEBUG") is None
    several = make.plan(make.gpus(2), gpus="all", debug=True)
    assert make.variable(several, "TORCH_DISTRIBUTED_DEBUG").value == "DETAIL"


def test_debug_blocks_launches_by_each_vendors_own_variable(make):
    for like, name in ((make.npu, "ASCEND_LAUNCH_BLOCKING"), (make.rocm, "AMD_SERIALIZE_KERNEL")):
        plan = make.plan(make.gpus(1, like), debug=True)
        assert make.variable(plan, name) is not None
        assert make.variable(plan, "CUDA_LAUNCH_BLOCKING") is None
    assert "CUDA_LAUNCH_BLOCKING" not in _names(make.plan(make.machine(), debug=True))


@pytest.mark.parametrize("own", ["2", "4"])
def test_the_users_own_value_wins_and_the_plan_says_so(make, own):
    plan = make.plan(make.machine(), {"OMP_NUM_THREADS": own}, nproc_per_node=2)
    variable = make.variable(plan, "OMP_NUM_THREADS")
    assert (variable.value, variable.kept) == (own, True)
    assert str(variable.source) == "OMP_NUM_THREADS"
    assert (OWN_VALUE_WON in variable.reason) == (own == "2")
    assert (" 4" in variable.reason) == (own == "2"), "the value that was not taken"


def test_ranks_that_the_shim_makes_hash_alike(make):
    for strategy in ("auto", "ddp", "fsdp"):
        plan = make.plan(make.gpus(2), gpus="all", strategy=strategy)
        variable = make.variable(plan, "PYTHONHASHSEED")
        assert (variable.value, variable.kept, str(variable.source)) == ("0", False, "default")
        assert "one order on all ranks" in variable.reason


def test_other_runs_hash_as_python_does(make):
    aware = ScriptFacts(handles_ranks=Evidence("init_process_group", "train.py:7"))
    for options in ({"facts": aware, "gpus": "all"}, {"strategy": "none", "gpus": "all"},
                    {"strategy": "ddp", "gpus": "0"}):  # fmt: skip
        plan = make.plan(make.gpus(2), **options)
        assert make.variable(plan, "PYTHONHASHSEED") is None
        assert not plan.levers.strategy.value.injected


@pytest.mark.parametrize("own", [None, "", "random"])
def test_a_run_hashes_as_the_run_that_it_resumes(make, own):
    environ = {} if own is None else {"PYTHONHASHSEED": own}
    variable = make.variable(
        make.plan(make.machine(), environ, preempt="snapshot"), "PYTHONHASHSEED"
    )
    assert (variable.value, variable.kept) == ("0", False)
    kept = make.plan(make.machine(), {"PYTHONHASHSEED": "7"}, preempt="snapshot")
    assert make.variable(kept, "PYTHONHASHSEED").value == "7"


def test_the_users_own_hash_seed_wins(make):
    plan = make.plan(make.machine(), {"PYTHONHASHSEED": "7"}, nproc_per_node=2)
    variable = make.variable(plan, "PYTHONHASHSEED")
    assert (variable.value, variable.kept, str(variable.source)) == ("7", True, "PYTHONHASHSEED")
    assert OWN_VALUE_WON in variable.reason
    assert " 0" in variable.reason, "the value that was not taken"
    named = make.plan(make.machine(), nproc_per_node=2, env=("PYTHONHASHSEED=8",))
    assert make.variable(named, "PYTHONHASHSEED").value == "8"


@pytest.mark.parametrize(("own", "named"), [("random", "random"), ("", EMPTY)])
def test_a_random_hash_seed_would_differ_by_rank_and_is_replaced(make, own, named):
    plan = make.plan(make.machine(), {"PYTHONHASHSEED": own}, nproc_per_node=2)
    variable = make.variable(plan, "PYTHONHASHSEED")
    assert (variable.value, variable.kept) == ("0", False)
    assert named in variable.reason
    alone = make.plan(make.machine(), {"PYTHONHASHSEED": own})
    assert make.variable(alone, "PYTHONHASHSEED") is None


def test_env_entries_come_last_and_win(make):
    plan = make.plan(
        make.machine(),
        {"OMP_NUM_THREADS": "2", "MINE": "before"},
        nproc_per_node=2,
        compile="off",
        env=("MINE=a=b", "OMP_NUM_THREADS=7", "EMPTY=", "MINE=c=d"),
    )
    assert _names(plan) == [
        "FASTTRAIN_RUN_ID", "GLOO_SOCKET_IFNAME", "PYTHONHASHSEED", "MINE", "OMP_NUM_THREADS",
        "EMPTY",
    ]  # fmt: skip
    values = {variable.name: variable.value for variable in plan.environment[3:]}
    assert values == {"MINE": "c=d", "OMP_NUM_THREADS": "7", "EMPTY": ""}
    assert {str(variable.source) for variable in plan.environment[3:]} == {"--env"}
    assert " 4" in make.variable(plan, "OMP_NUM_THREADS").reason, "the value that was not taken"


@pytest.mark.parametrize("entry", ["", "NAME", "=x", "A B=1", "1A=1", "A-B=1", "A=\0", "Ä=1"])
def test_malformed_env_entries(make, entry):
    error = make.refused(make.machine(), env=(entry,))
    assert (error.slug, error.exit_code) == ("env-syntax", 2)


def test_a_malformed_entry_is_not_repeated(make):
    error = make.refused(make.machine(), env=("hf_abcdef",))
    assert "hf_abcdef" not in str(error)


def test_settings_pass_through(make):
    plan = make.plan(make.machine(), strict=True, max_steps=3)
    assert (plan.strict, plan.max_steps) == (True, 3)
    assert (make.plan(make.machine()).strict, make.plan(make.machine()).max_steps) == (False, None)


def test_the_environment_is_not_copied_into_the_plan(make):
    plan = make.plan(make.machine(), {"AWS_SECRET_ACCESS_KEY": "s3", "PATH": "/bin"})
    assert _names(plan) == ["FASTTRAIN_RUN_ID", "TORCHINDUCTOR_CACHE_DIR"]


def test_hidden_variables_of_other_vendors_stay_alone(make):
    plan = make.plan(make.gpus(2, make.npu), {"CUDA_VISIBLE_DEVICES": "0"}, gpus="1")
    assert _names(plan) == ["FASTTRAIN_RUN_ID", "ASCEND_RT_VISIBLE_DEVICES"]


def test_a_run_on_the_cpu_hides_the_gpus_from_the_script(make):
    for like, name in ((make.h100, "CUDA_VISIBLE_DEVICES"), (make.rocm, "HIP_VISIBLE_DEVICES")):
        plan = make.plan(make.gpus(2, like), {name: "1"}, device="cpu")
        assert make.variable(plan, name).value == "-1"
        assert str(make.variable(plan, name).source) == "--device"
    alone = make.plan(make.machine(), device="cpu", compile="off")
    assert _names(alone) == ["FASTTRAIN_RUN_ID"]


def test_the_mark_of_the_run_cannot_be_set(make):
    error = make.refused(make.machine(), env=("FASTTRAIN_RUN_ID=other",))
    assert (error.slug, error.exit_code) == ("env-reserved", 78)


def test_ranks_of_one_node_stay_on_loopback(make):
    for like, names in (
        (make.h100, ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"]),
        (make.rocm, ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"]),
        (make.npu, ["GLOO_SOCKET_IFNAME"]),
    ):
        plan = make.plan(make.gpus(2, like), gpus="all")
        assert [n for n in _names(plan) if n.endswith("_SOCKET_IFNAME")] == names
        assert {make.variable(plan, name).value for name in names} == {"lo"}
    nodes = {"nodes": "2", "node_rank": 0, "master_addr": "head"}
    plan = make.plan(make.gpus(2), gpus="all", **nodes)
    assert not [name for name in _names(plan) if name.endswith("_SOCKET_IFNAME")]


def test_the_agent_gives_as_much_time_as_was_asked_for(make):
    name = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    plan = make.plan(make.machine(), {name: "5"}, nproc_per_node=2, shutdown_timeout=7)
    assert (make.variable(plan, name).value, plan.shutdown_timeout_s) == ("7", 7)
    for options in ({"shutdown_timeout": 7}, {"nproc_per_node": 2}):
        assert name not in _names(make.plan(make.machine(), **options))
    assert make.plan(make.machine()).shutdown_timeout_s == 30
