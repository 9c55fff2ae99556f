from __future__ import annotations

from dataclasses import replace

import pytest

from fasttrain.model.errors import FasttrainError
from fasttrain.model.machine import Device, Torch
from fasttrain.planning.describe import device_names
from fasttrain.planning.gpus import build_fix

CPU_TORCH = Torch("2.13.0+cpu", "cpu")


def test_auto_takes_the_accelerators_and_else_the_cpu(make):
    assert make.plan(make.gpus(2)).device_kind.value == "cuda"
    assert make.plan(make.gpus(2, make.npu)).device_kind.value == "npu"
    assert make.plan(make.gpus(2, make.rocm)).device_kind.value == "rocm"
    assert make.plan(make.machine()).device_kind.value == "cpu"


def test_auto_prefers_by_a_fixed_order(make):
    kinds = ("mps", "xpu", "rocm", "npu", "cuda")
    devices = [Device(kind, 0, kind) for kind in kinds]
    any_build = Torch("2.13.0", "")
    for left in range(5, 0, -1):
        plan = make.plan(make.machine(*devices[:left], torch=any_build))
        assert plan.device_kind.value == kinds[left - 1]


def test_auto_passes_over_gpus_that_this_torch_cannot_drive(make):
    machine = make.machine(make.h100, make.rocm, torch=Torch("2.13.0+rocm6.4", "rocm", "6.4"))
    assert make.plan(machine).device_kind.value == "rocm"


def test_auto_with_a_cpu_torch_warns_and_names_the_fix(make):
    plan = make.plan(make.gpus(2, torch=CPU_TORCH))
    assert plan.device_kind.value == "cpu"
    assert plan.devices.value == ()
    [warning] = plan.warnings
    assert "NVIDIA H100" in warning
    assert build_fix("cuda") in warning


def test_an_ascend_machine_needs_no_build_of_its_own(make):
    plan = make.plan(make.gpus(1, make.npu, torch=CPU_TORCH))
    assert plan.device_kind.value == "npu"
    assert plan.warnings == ()


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_hidden_gpus_leave_the_cpu(make, hidden):
    plan = make.plan(make.gpus(2), {"CUDA_VISIBLE_DEVICES": hidden})
    assert plan.device_kind.value == "cpu"
    assert "CUDA_VISIBLE_DEVICES" in plan.device_kind.reason


def test_a_kind_that_is_not_there(make):
    error = make.refused(make.gpus(2), device="npu")
    assert (error.slug, error.exit_code) == ("device-missing", 69)
    assert "2 x NVIDIA H100" in error.why
    assert "8 CPU" in error.why


def test_a_kind_that_is_hidden(make):
    with pytest.raises(FasttrainError) as caught:
        make.plan(make.gpus(2), {"CUDA_VISIBLE_DEVICES": "-1"}, device="cuda")
    assert caught.value.slug == "device-missing"
    assert "CUDA_VISIBLE_DEVICES" in caught.value.why


@pytest.mark.parametrize("options", [{"device": "cuda"}, {"gpus": "0"}])
def test_gpus_asked_of_a_cpu_torch(make, options):
    error = make.refused(make.gpus(2, torch=CPU_TORCH), **options)
    assert (error.slug, error.exit_code) == ("torch-build", 69)
    assert "2.13.0+cpu" in error.why


def test_without_torch_the_build_is_no_question(make):
    plan = make.plan(make.gpus(1, torch=Torch()), device="cuda")
    assert plan.device_kind.value == "cuda"


def test_cpu_can_always_be_asked_for(make):
    plan = make.plan(make.gpus(2, torch=CPU_TORCH), device="cpu")
    assert plan.device_kind.value == "cpu"
    assert str(plan.device_kind.source) == "--device"
    assert plan.warnings == ()


def test_unequal_devices_are_named_one_by_one(make):
    machine = make.machine(make.h100, replace(make.t4, index=1), replace(make.t4, index=2))
    assert device_names(machine.devices) == "NVIDIA H100 and 2 x Tesla T4"
    assert device_names(machine.devices) in make.plan(machine).device_kind.reason


def test_what_the_probes_found_is_told(make):
    plan = make.plan(make.machine(notes=("GPU 1 can't be used: lost",)))
    assert plan.warnings == ("GPU 1 can't be used: lost.",)


def test_a_torch_with_which_nothing_was_tried_is_told(make):
    def warned(version):
        return make.plan(make.machine(torch=Torch(version, "cpu"))).warnings

    [warning] = warned("2.4.1")
    assert "torch 2.4.1" in warning
    assert warned("2.7.0") == warned("3.0.0") == ()
    assert warned("") == ()  # the script may need none
