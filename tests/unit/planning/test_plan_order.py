"""Machines whose GPUs a runtime may count in another order than nvidia-smi and --gpus."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fasttrain.planning.visible import as_seen, visible_slots

A100 = {"name": "NVIDIA A100", "capability": "8.0"}
BUS = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
FAST = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}


def _mixed(make):
    """Return a machine with a T4 as NVML's device 0 and an A100 as 1."""
    slow = replace(make.t4, index=0, uuid="GPU-00aa-bb")
    return make.machine(slow, replace(make.h100, **A100, index=1, uuid="GPU-11aa-bb"))


def _shown(make, plan):
    variable = make.variable(plan, "CUDA_VISIBLE_DEVICES")
    return variable.value if variable else None


def _precision(plan):
    return plan.levers.amp.value.precision, plan.levers.matmul.value


BF16, FP32 = ("bfloat16", "high"), ("off", "keep")


@pytest.mark.parametrize(
    ("gpus", "environ", "value", "levers"),
    [
        ("1", {}, "GPU-11aa-bb", BF16),
        ("0", {}, "GPU-00aa-bb", FP32),
        ("1", FAST, "GPU-11aa-bb", BF16),
        ("0,1", {}, "GPU-00aa-bb,GPU-11aa-bb", FP32),
        # With one way of counting, indices do, and more programs can read them.
        ("1", BUS, "1", BF16),
        ("0", BUS, "0", FP32),
        # The user's own list is passed on in its own words, which CUDA counts: 0 is the A100.
        ("0", {"CUDA_VISIBLE_DEVICES": "0"}, "0", BF16),
        ("0", {"CUDA_VISIBLE_DEVICES": "1"}, "1", FP32),
        ("1", {"CUDA_VISIBLE_DEVICES": "1,0"}, "0", BF16),
        ("0", {"CUDA_VISIBLE_DEVICES": "1"} | BUS, "1", BF16),
        ("0", {"CUDA_VISIBLE_DEVICES": "GPU-11"}, "GPU-11", BF16),
        ("0,1", {"CUDA_VISIBLE_DEVICES": "0,GPU-00"}, "GPU-11aa-bb,GPU-00aa-bb", FP32),
    ],
)
def test_a_device_is_named_so_that_cuda_starts_on_the_planned_one(
    make, gpus, environ, value, levers
):
    plan = make.plan(_mixed(make), environ, gpus=gpus)
    assert _shown(make, plan) == value
    assert make.variable(plan, "CUDA_DEVICE_ORDER") is None, "it is the user's"
    assert _precision(plan) == levers


def test_the_reason_says_which_device_and_why_by_uuid(make):
    reason = make.plan(_mixed(make), gpus="1").devices.reason
    assert "NVIDIA A100, by UUID" in reason
    assert "Tesla T4" not in reason
    assert "UUID" not in make.plan(_mixed(make), BUS, gpus="1").devices.reason
    assert "UUID" not in make.plan(make.gpus(2), gpus="1").devices.reason


@pytest.mark.parametrize("environ", [{}, FAST])
def test_devices_without_a_uuid_go_by_bus(make, environ):
    nameless = (replace(device, uuid="") for device in _mixed(make).devices)
    machine = make.machine(*nameless)
    plan = make.plan(machine, environ, gpus="1")
    assert _shown(make, plan) == "1"
    order = make.variable(plan, "CUDA_DEVICE_ORDER")
    assert (order.value, order.kept) == ("PCI_BUS_ID", False)
    assert "nvidia-smi" in order.reason
    assert make.variable(make.plan(machine, environ), "CUDA_DEVICE_ORDER") is None


@pytest.mark.parametrize(
    ("devices", "asked", "value"),
    [
        # NVML has lost GPU 1: CUDA may count two GPUs or three.
        ((0, 2), "1", "GPU-2"),
        # The instances of GPU 0 have no numbers in CUDA, so those of others are in doubt.
        (("MIG", 1), "1", "GPU-1"),
        ((0, 1), "1", "1"),
    ],
)
def test_numbers_are_used_only_where_they_are_certain(make, devices, asked, value):
    def device(which):
        if which == "MIG":
            return replace(make.h100, uuid="MIG-0", parent_uuid="GPU-0")
        return replace(make.h100, index=which, uuid=f"GPU-{which}")

    plan = make.plan(make.machine(*map(device, devices)), gpus=asked)
    assert _shown(make, plan) == value


# --- one process without --gpus


@pytest.mark.parametrize(
    ("environ", "levers", "model", "why"),
    [
        ({}, BF16, "A100", "fastest first"),
        (FAST, BF16, "A100", "fastest first"),
        (BUS, FP32, "T4", "CUDA_DEVICE_ORDER=PCI_BUS_ID"),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, BF16, "A100", "CUDA_VISIBLE_DEVICES lists"),
        ({"CUDA_VISIBLE_DEVICES": "1,0"}, FP32, "T4", "CUDA_VISIBLE_DEVICES lists"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-00,GPU-11"}, FP32, "T4", "CUDA_VISIBLE_DEVICES lists"),
    ],
)
def test_one_process_is_decided_by_the_first_device_that_it_sees(make, environ, levers, model, why):
    plan = make.plan(_mixed(make), environ)
    assert _precision(plan) == levers
    assert _shown(make, plan) is None, "a run sees what plain python would"
    reason = plan.levers.amp.reason
    assert (model in reason, "one process" in reason, why in reason) == (True, True, True)
    assert ("A100" in reason, "T4" in reason) == (model == "A100", model == "T4")


def test_several_ranks_need_all_of_their_devices(make):
    for options in ({"nproc_per_node": 2}, {"gpus": "all"}):
        amp = make.plan(_mixed(make), **options).levers.amp
        assert amp.value.precision == "off"
        assert "Tesla T4" in amp.reason
        assert "one process" not in amp.reason


def test_one_process_that_is_shown_two_devices_trains_on_the_first(make):
    for gpus, levers in (("1,0", BF16), ("0,1", FP32)):
        plan = make.plan(_mixed(make), gpus=gpus, nproc_per_node=1)
        assert _precision(plan) == levers
        assert "--gpus names it first" in plan.levers.amp.reason


def test_bf16_by_name_is_refused_only_where_the_process_would_train(make):
    assert make.plan(_mixed(make), amp="bf16").levers.amp.value.precision == "bfloat16"
    error = make.refused(_mixed(make), amp="bf16", env=("CUDA_DEVICE_ORDER=PCI_BUS_ID",))
    assert error.slug == "amp-unsupported"
    assert "GPU 0 (Tesla T4)" in error.what
    assert "one process" in error.why
    assert "leave GPU 0 out with --gpus 1" in error.fix


def test_ranks_without_gpus_take_the_devices_that_cuda_counts_first(make):
    first, *others = _mixed(make).devices
    machine = make.machine(first, *others, replace(others[0], index=2, uuid="GPU-22aa-bb"))
    plan = make.plan(machine, nproc_per_node=2)
    assert plan.devices.value[:2] == ("GPU-11aa-bb", "GPU-22aa-bb")


def test_a_mig_instance_is_seen_before_whole_gpus(make):
    instance = replace(make.h100, index=1, uuid="MIG-1", parent_uuid="GPU-1", name="A30 MIG")
    machine = make.machine(replace(make.t4, uuid="GPU-0"), instance)
    for environ in ({}, BUS):
        slots = as_seen(visible_slots(machine, "cuda", environ), "cuda", environ)
        assert [slot.device.uuid for slot in slots] == ["MIG-1", "GPU-0"]
        assert [slot.position for slot in slots] == [1, 0], "as --gpus counts"


def test_other_runtimes_count_as_their_probes_do(make):
    weak = replace(make.rocm, name="AMD old", bf16=False)
    machine = make.machine(weak, replace(make.rocm, index=1))
    plan = make.plan(machine)
    assert plan.devices.value == ("0", "1")
    assert plan.levers.amp.value.precision == "off"
    assert make.variable(make.plan(machine, gpus="1"), "HIP_VISIBLE_DEVICES").value == "1"


# --- AMD: ROCR_VISIBLE_DEVICES narrows below HIP_VISIBLE_DEVICES

ROCR, HIP, CUDA = "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("environ", "asked", "value", "devices"),
    [
        ({ROCR: "2,3"}, "all", "0,1", (2, 3)),
        ({ROCR: "2,3"}, "1", "1", (3,)),
        ({ROCR: "3,2"}, "0", "0", (3,)),
        ({ROCR: "GPU-33,GPU-11"}, "1", "1", (1,)),
        ({ROCR: "2,3", HIP: "1"}, "0", "1", (3,)),
        ({ROCR: "2,3", CUDA: "1"}, "0", "1", (3,)),
        ({CUDA: "2,3"}, "1", "3", (3,)),
        ({CUDA: "2,3", HIP: "1,0"}, "0", "1", (1,)),
        # As SLURM writes it where gres.conf names no vendor.
        ({ROCR: "2,3", CUDA: "2,3"}, "all", "0,1", (2, 3)),
    ],
)
def test_amd_gpus_are_counted_from_what_rocr_leaves(make, environ, asked, value, devices):
    machine = make.gpus(4, make.rocm)
    plan = make.plan(machine, environ, gpus=asked)
    variable = make.variable(plan, HIP)
    assert variable.value == value
    assert len(devices) == plan.processes.value.nproc_per_node
    assert make.variable(plan, ROCR) is None, "it would be counted a second time"
    told = f"ROCR_VISIBLE_DEVICES={environ.get(ROCR)}" in variable.reason
    assert told is (ROCR in environ)
    slots = visible_slots(machine, "rocm", environ)
    named = {slot.name: slot.device.index for slot in slots}
    assert tuple(named[name] for name in plan.devices.value) == devices


def test_amd_gpus_that_slurm_did_not_give_are_missing(make):
    error = _refused(make, {ROCR: "2,3"}, gpus="2")
    assert error.slug == "gpus-missing"
    assert "2 GPUs visible" in error.why


def _refused(make, environ, **options):
    entries = tuple(f"{name}={value}" for name, value in environ.items())
    return make.refused(make.gpus(4, make.rocm), env=entries, **options)


def test_without_gpus_a_list_that_slurm_wrote_twice_counts_once(make):
    plan = make.plan(make.gpus(4, make.rocm), {ROCR: "2,3", CUDA: "2,3"})
    assert plan.device_kind.value == "rocm"
    variable = make.variable(plan, HIP)
    assert variable.value == "0,1"
    assert "CUDA_VISIBLE_DEVICES repeats ROCR_VISIBLE_DEVICES" in variable.reason
    for once in ({ROCR: "2,3"}, {ROCR: "0,1", CUDA: "0,1"}):
        plan = make.plan(make.gpus(4, make.rocm), once)
        assert plan.devices.value == ("0", "1")
        assert make.variable(plan, HIP) is None, "nothing has to be mended"
