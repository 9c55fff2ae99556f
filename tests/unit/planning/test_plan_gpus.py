from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fasttrain.model.decision import SourceKind
from fasttrain.model.errors import FasttrainError
from fasttrain.model.machine import Device
from fasttrain.planning.gpus import IDLE_UNKNOWN


def _visible(make, plan):
    return make.variable(plan, "CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize(
    ("asked", "visible", "value"),
    [
        ("0,3", None, "0,3"),
        ("3,0", None, "3,0"),
        ("all", None, "0,1,2,3,4,5,6,7"),
        ("auto:2", None, "0,1"),
        ("0", "4,5,6,7", "4"),
        ("all", "4,5,6,7", "4,5,6,7"),
        ("auto:3", "6,4,5", "6,4,5"),
        ("1,0", " 4 , 5 ", "5,4"),
        # CUDA ends the list at -1 and at an index that does not exist.
        ("all", "2,-1,3", "2"),
        ("all", "2,99,3", "2"),
        # The job was given UUIDs: they are passed on as they are.
        ("1", "GPU-66aa,GPU-22aa", "GPU-22aa"),
        # Named by UUID: whole UUIDs, also from a prefix in another case.
        ("GPU-33", None, "GPU-33aa-bb"),
        ("gpu-33AA,GPU-1", None, "GPU-33aa-bb,GPU-11aa-bb"),
        ("GPU-55", "4,5", "GPU-55aa-bb"),
        # Words that mix the two forms are translated into one.
        ("0,GPU-33", None, "0,3"),
        ("0,1", "4,GPU-55", "GPU-44aa-bb,GPU-55aa-bb"),
    ],
)
def test_gpus_are_relative_to_what_is_visible(make, asked, visible, value):
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    plan = make.plan(make.gpus(8), environ, gpus=asked)
    variable = _visible(make, plan)
    assert variable.value == value
    assert plan.devices.value == tuple(value.split(","))
    assert plan.processes.value.nproc_per_node == value.count(",") + 1
    assert not variable.kept
    assert str(variable.source) == "--gpus"


def test_the_reason_tells_of_the_list_that_was_visible(make):
    plan = make.plan(make.gpus(8), {"CUDA_VISIBLE_DEVICES": "4,5"}, gpus="0")
    assert "4,5" in _visible(make, plan).reason
    assert IDLE_UNKNOWN in make.plan(make.gpus(8), gpus="auto:1").devices.reason


def test_without_gpus_nothing_is_narrowed_and_one_process_runs(make):
    plan = make.plan(make.gpus(4), {"CUDA_VISIBLE_DEVICES": "2,3"})
    assert _visible(make, plan) is None
    assert plan.devices.value == ("2", "3")
    assert plan.processes.value.backend == "direct"
    assert any("--gpus all" in hint for hint in plan.hints)


def test_one_visible_gpu_gets_no_hint(make):
    assert make.plan(make.gpus(1)).hints == ()
    assert make.plan(make.gpus(2), gpus="0").hints == ()
    assert make.plan(make.gpus(2), nproc_per_node=2).hints == ()


def test_env_narrows_like_the_users_environment(make):
    plan = make.plan(make.gpus(8), env=("CUDA_VISIBLE_DEVICES=6,7",))
    assert plan.devices.value == ("6", "7")


def test_ascend_takes_ascending_ids_only(make):
    plan = make.plan(make.gpus(8, make.npu), gpus="3,0")
    assert plan.devices.value == ("0", "3")
    assert make.variable(plan, "ASCEND_RT_VISIBLE_DEVICES").value == "0,3"
    assert "ASCEND_RT_VISIBLE_DEVICES" in plan.devices.reason, "which takes them in order"


def test_rocm_uses_its_own_variable(make):
    machine = make.gpus(4, make.rocm)
    plan = make.plan(machine, {"HIP_VISIBLE_DEVICES": "2,3"}, gpus="1")
    assert make.variable(plan, "HIP_VISIBLE_DEVICES").value == "3"
    assert _visible(make, plan) is None


def test_tiles_of_an_intel_card_keep_their_names(make):
    machine = make.gpus(2, Device("xpu", 0, "Max 1550", bf16=True))
    plan = make.plan(machine, {"ZE_AFFINITY_MASK": "0.0,0.1,1.0"}, gpus="1,2")
    assert make.variable(plan, "ZE_AFFINITY_MASK").value == "0.1,1.0"


def test_mps_has_no_variable_to_set(make):
    plan = make.plan(make.machine(Device("mps", 0, "Apple M3")), gpus="0", compile="off")
    assert plan.device_kind.value == "mps"
    assert [variable.name for variable in plan.environment] == ["FASTTRAIN_RUN_ID"]


def _mig(make, count):
    slices = (
        replace(make.h100, uuid=f"MIG-{i}c", name="H100 MIG 1g.10gb", parent_uuid="GPU-00aa-bb")
        for i in range(count)
    )
    return make.machine(*slices)


def test_a_mig_instance_goes_by_its_uuid(make):
    assert _visible(make, make.plan(_mig(make, 2), gpus="1")).value == "MIG-1c"
    assert _visible(make, make.plan(_mig(make, 2), gpus="MIG-0c")).value == "MIG-0c"


def test_an_index_of_a_gpu_in_mig_mode_shows_its_first_instance(make):
    assert make.plan(_mig(make, 2), {"CUDA_VISIBLE_DEVICES": "0"}).devices.value == ("0",)


@pytest.mark.parametrize("asked", ["0,,3", "0-", "-1", "", " ", ",", "auto:0", "auto:", "0,all",
                                   "all,0", "auto:1,2", "1.5", "GPU-", "0;1", "٣", "1e1", "0x1",
                                   "99999999999999999999"])  # fmt: skip
def test_a_malformed_list_is_a_usage_error(make, asked):
    error = make.refused(make.gpus(8), gpus=asked)
    assert (error.slug, error.exit_code) == ("gpus-syntax", 2)
    assert make.refused(make.machine(), gpus=asked).slug == "gpus-syntax"


@pytest.mark.parametrize("asked", ["0,0", "0,00", "1,0,1", "0,GPU-00aa", "GPU-0,GPU-00aa-bb"])
def test_the_same_device_twice(make, asked):
    error = make.refused(make.gpus(4), gpus=asked)
    assert (error.slug, error.exit_code) == ("gpus-twice", 78)


@pytest.mark.parametrize("asked", ["2", "0,7", "auto:3", "GPU-99", "MIG-0"])
def test_more_than_there_is(make, asked):
    error = make.refused(make.gpus(2), gpus=asked)
    assert (error.slug, error.exit_code) == ("gpus-missing", 69)
    assert "2 GPUs" in error.why


@pytest.mark.parametrize("hidden", ["", "-1", "x", "1,1", "GPU-1,GPU-11", "GPU-"])
def test_all_hidden(make, hidden):
    machine = make.gpus(2)
    for asked in ("all", "0", "auto:1"):
        with pytest.raises(FasttrainError) as caught:
            make.plan(machine, {"CUDA_VISIBLE_DEVICES": hidden}, gpus=asked)
        assert caught.value.slug == "gpus-missing"
        assert "0 GPUs" in caught.value.why


def test_a_prefix_that_fits_two(make):
    assert make.refused(make.gpus(20), gpus="GPU-1").slug == "gpus-ambiguous"


def test_no_gpu_at_all(make):
    error = make.refused(make.machine(), gpus="0")
    assert (error.slug, error.exit_code) == ("gpus-none", 69)
    assert "8 CPU" in error.why


def test_gpus_of_a_run_on_the_cpu(make):
    error = make.refused(make.gpus(2), gpus="0", device="cpu")
    assert (error.slug, error.exit_code) == ("gpus-cpu", 78)


def test_two_mig_instances_are_refused(make):
    assert make.refused(_mig(make, 2), gpus="all").slug == "gpus-mig"


_WORD = st.one_of(
    st.integers(-2, 12).map(str),
    st.sampled_from(["all", "auto:2", "auto:0", "GPU-1", "GPU-33aa", "MIG-1", "", " 1 ", "٣"]),
    st.text(max_size=4),
)
_LIST = st.one_of(st.lists(_WORD, max_size=5).map(",".join), st.text(max_size=12))


@given(asked=_LIST, visible=st.none() | _LIST)
def test_any_text_is_a_valid_choice_or_a_fasttrain_error(make, asked, visible):
    machine = make.gpus(10)
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    try:
        plan = make.plan(machine, environ, gpus=asked)
    except FasttrainError as error:
        refused: str | None = error.slug
    else:
        refused = None
    if refused is not None:
        assert refused.startswith("gpus-")
        return
    names = plan.devices.value
    known = {d.uuid for d in machine.devices} | {str(d.index) for d in machine.devices}
    granted = None if visible is None else [word.strip() for word in visible.split(",")]
    assert 1 <= len(names) == len(set(names)) == plan.processes.value.nproc_per_node
    assert all(name in known or (granted and name in granted) for name in names)
    assert len({name.isdecimal() for name in names}) == 1
    assert plan.devices.source.kind is SourceKind.FLAG
