"""The state of AMD's GPUs, from recorded files of the kernel."""

from __future__ import annotations

import os
from typing import Any

from fasttrain.hardware.runs import RunProcess
from fasttrain.hardware.vendors.rocm import Rocm, rocm_states
from fasttrain.model.machine import Device, DeviceState

NODES = "sys/class/kfd/kfd/topology/nodes"
GIB = 2**30

TWO_GPUS = {
    f"{NODES}/0/properties": "cpu_cores_count 96\nsimd_count 0\n",
    f"{NODES}/0/gpu_id": "0\n",
    f"{NODES}/3/properties": "",  # a GPU that this container was not given
    f"{NODES}/1/properties": "simd_count 1216\ngfx_target_version 90402\ndrm_render_minor 128\n",
    f"{NODES}/1/gpu_id": "4711\n",
    f"{NODES}/2/properties": "simd_count 1216\ngfx_target_version 90402\ndrm_render_minor 136\n",
    f"{NODES}/2/gpu_id": "4712\n",
    "sys/class/drm/renderD128/device/mem_info_vram_used": f"{2 * GIB}\n",
    "sys/class/drm/renderD128/device/numa_node": "0\n",
    "sys/class/drm/renderD128/device/hwmon/hwmon3/temp1_input": "48500\n",
    "sys/class/drm/renderD136/device/mem_info_vram_used": f"{64 * GIB}\n",
    "sys/class/drm/renderD136/device/numa_node": "1\n",
    f"sys/class/kfd/kfd/proc/{os.getpid()}/vram_4711": "0\n",
    f"sys/class/kfd/kfd/proc/{os.getpid()}/vram_4712": f"{60 * GIB}\n",
    "dev/kfd": "",
}


def test_memory_node_and_processes_are_read(make_host: Any) -> None:
    host = make_host(TWO_GPUS)
    runs = {os.getpid(): RunProcess("/runs/a", orphan=False)}
    first, second = rocm_states(host, Rocm(host).probe().devices, runs)
    assert first == DeviceState(
        "rocm", 0, memory_used_bytes=2 * GIB, temperature_c=48.5, numa_node=0
    )
    assert (second.index, second.memory_used_bytes, second.numa_node) == (1, 64 * GIB, 1)
    (process,) = second.processes
    assert (process.pid, process.memory_bytes, process.run) == (os.getpid(), 60 * GIB, "/runs/a")


def test_a_kernel_that_tells_nothing_leaves_it_unknown(make_host: Any) -> None:
    host = make_host({f"{NODES}/1/properties": "simd_count 1216\n", "dev/kfd": ""})
    (state,) = rocm_states(host, [Device("rocm", 0, "a GPU", "GPU-1")], {})
    assert state == DeviceState("rocm", 0, "GPU-1")


def test_other_gpus_than_those_probed_are_not_guessed(make_host: Any) -> None:
    assert rocm_states(make_host(TWO_GPUS), [Device("rocm", 0, "a GPU")], {}) == ()


def test_other_vendors_devices_are_left_alone(make_host: Any) -> None:
    assert rocm_states(make_host(TWO_GPUS), [Device("cuda", 0, "a GPU")], {}) == ()
