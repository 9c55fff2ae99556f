"""AMD, Intel and Apple: probes that read sysfs or kernel variables."""

from __future__ import annotations

from typing import Any

import pytest

from fasttrain.hardware.vendors.mps import Mps
from fasttrain.hardware.vendors.rocm import Rocm, gfx_name
from fasttrain.hardware.vendors.xpu import Xpu

NODES = "sys/class/kfd/kfd/topology/nodes"
GIB = 2**30

MI300 = {
    f"{NODES}/0/properties": "cpu_cores_count 96\nsimd_count 0\n",
    f"{NODES}/2/properties": (
        "simd_count 1216\ngfx_target_version 90402\ndrm_render_minor 128\n"
        "unique_id 1311768467463790320\n"
    ),
    f"{NODES}/2/mem_banks/0/properties": f"heap_type 1\nsize_in_bytes {192 * GIB}\n",
    f"{NODES}/2/mem_banks/1/properties": f"heap_type 0\nsize_in_bytes {512 * GIB}\n",
    f"{NODES}/10/properties": "simd_count 64\ngfx_target_version 90006\n",
    f"{NODES}/11/properties": "",
    "sys/class/drm/renderD128/device/product_name": "AMD Instinct MI300X\n",
    "sys/module/amdgpu/version": "6.10.5\n",
}


def test_amd_gpus_are_read_from_the_topology(make_host: Any) -> None:
    report = Rocm(make_host({**MI300, "dev/kfd": ""})).probe()
    mi300, mi50 = report.devices
    assert (mi300.kind, mi300.index, mi300.name) == ("rocm", 0, "AMD Instinct MI300X")
    assert mi300.uuid == "GPU-123456789abcdef0"
    assert (mi300.memory_bytes, mi300.capability) == (192 * GIB, "gfx942")
    assert (mi300.bf16, mi300.fp16) == (True, True)
    assert (mi50.index, mi50.name, mi50.capability) == (1, "AMD GPU gfx906", "gfx906")
    assert (mi50.uuid, mi50.memory_bytes, mi50.bf16) == ("", 0, False)
    assert (report.driver, report.notes) == ("6.10.5", ())


def test_amd_gpus_without_their_device_file_are_told(make_host: Any) -> None:
    report = Rocm(make_host(MI300)).probe()
    assert report.devices == ()
    (note,) = report.notes
    assert "/dev/kfd" in note


def test_a_topology_of_processors_only_is_silent(make_host: Any) -> None:
    report = Rocm(make_host({f"{NODES}/0/properties": "simd_count 0\n"})).probe()
    assert (report.devices, report.notes) == ((), ())


@pytest.mark.parametrize(
    ("version", "name"),
    [
        (90008, "gfx908"),
        (90010, "gfx90a"),
        (90500, "gfx950"),
        (100300, "gfx1030"),
        (120001, "gfx1201"),
    ],
)
def test_targets_have_the_compilers_names(version: int, name: str) -> None:
    assert gfx_name(version) == name


def card(number: int, vendor: str, device: str) -> dict[str, str]:
    folder = f"sys/class/drm/card{number}/device"
    return {f"{folder}/vendor": f"{vendor}\n", f"{folder}/device": f"{device}\n"}


def test_discrete_intel_gpus_are_found_and_others_are_not(make_host: Any) -> None:
    files = {
        **card(0, "0x8086", "0x9a49"),  # a laptop's Iris Xe
        **card(2, "0x8086", "0x0bd5"),
        **card(10, "0x8086", "0xe20b"),
        **card(1, "0x1002", "0x56a0"),  # AMD's, whatever its id
        "sys/class/drm/card2-DP-1/device/vendor": "0x8086\n",  # a socket of card 2
        "sys/class/drm/card2-DP-1/device/device": "0x0bd5\n",
        "dev/dri/renderD129": "",
    }
    report = Xpu(make_host(files)).probe()
    assert [(d.index, d.name, d.bf16, d.fp16) for d in report.devices] == [
        (0, "Intel Data Center GPU Max", True, True),
        (1, "Intel Arc B-series", True, True),
    ]


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("0x0b6e", "Intel Data Center GPU Max"),  # 1100C
        ("0x56b1", "Intel Arc Pro A-series"),  # A40, A50
        ("0xe211", "Intel Arc Pro B-series"),  # B60
        ("0x7d55", ""),  # the graphics of a Core Ultra
    ],
)
def test_intel_gpus_are_known_by_their_ids(make_host: Any, device: str, name: str) -> None:
    report = Xpu(make_host({**card(0, "0x8086", device), "dev/dri/renderD128": ""})).probe()
    assert [found.name for found in report.devices] == ([name] if name else [])


def test_intel_gpus_without_their_device_files_are_told(make_host: Any) -> None:
    report = Xpu(make_host(card(0, "0x8086", "0x56a0"))).probe()
    assert report.devices == ()
    (note,) = report.notes
    assert "/dev/dri" in note


def mac(chip: str) -> dict[str, str]:
    return {"sysctl": f'echo "machdep.cpu.brand_string: {chip}"; echo "hw.memsize: 34359738368"'}


@pytest.mark.parametrize(
    ("chip", "bf16"), [("Apple M1 Pro", False), ("Apple M2", False), ("Apple M3 Max", True)]
)
def test_apple_silicon_has_one_gpu(make_host: Any, chip: str, bf16: bool) -> None:
    (device,) = Mps(make_host(system="Darwin", tools=mac(chip))).probe().devices
    assert (device.kind, device.index, device.name) == ("mps", 0, chip)
    assert (device.memory_bytes, device.bf16, device.fp16) == (32 * GIB, bf16, True)


def test_only_a_mac_is_asked_for_apples_gpu(make_host: Any) -> None:
    report = Mps(make_host(tools={"sysctl": "exit 1"})).probe()
    assert (report.devices, report.notes) == ((), ())
