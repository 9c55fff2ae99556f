"""All that is seen of a machine: never raising, never importing torch, quick."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from fasttrain.hardware import examine as examining
from fasttrain.hardware.examine import examine, examine_host, relevant
from fasttrain.model.codec import dumps, loads
from fasttrain.model.machine import Cluster, Examination, HostState

RECORDED = Path(__file__).parents[2] / "data" / "npu_smi"
DRIVER = {"proc/driver/nvidia/version": "NVRM version: 570.133.20"}
GIB = 2**30


class OneGpu:
    """An NVML of one board that tells its name and memory; every other question is refused."""

    def __init__(self) -> None:
        self.hangs_in = ""
        self.end = threading.Event()

    def __getattr__(self, name: str) -> Any:
        real = getattr(pynvml, name)
        return real if not name.startswith("nvmlDevice") else self._refuse

    @staticmethod
    def _refuse(*_: Any) -> Any:
        raise pynvml.NVMLError_NotSupported

    def nvmlInit(self) -> None:  # noqa: N802
        if self.hangs_in == "nvmlInit":
            self.end.wait(10)

    def nvmlShutdown(self) -> None:  # noqa: N802
        pass

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "570.133.20"

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        return f"board {index}"

    def nvmlDeviceGetName(self, _: str) -> str:  # noqa: N802
        return "NVIDIA A100"

    def nvmlDeviceGetUUID(self, _: str) -> str:  # noqa: N802
        return "GPU-0"

    def nvmlDeviceGetCudaComputeCapability(self, _: str) -> tuple[int, int]:  # noqa: N802
        return 8, 0

    def nvmlDeviceGetMemoryInfo(self, _: str, version: int = 0) -> Any:  # noqa: N802
        return SimpleNamespace(total=40 * GIB, used=3 * GIB)

    def nvmlDeviceGetPersistenceMode(self, _: str) -> int:  # noqa: N802
        if self.hangs_in == "nvmlDeviceGetPersistenceMode":
            self.end.wait(10)
        return 1


def test_states_of_all_vendors_stand_in_the_machines_order(make_host: Any, tmp_path: Path) -> None:
    tools = {"npu-smi": f'cat "{RECORDED}/910b3_24.1.txt"'}
    seen = examine_host(make_host(DRIVER, tools=tools), run_root=tmp_path, nvml=OneGpu())
    assert [(device.kind, device.index) for device in seen.machine.devices] == [
        ("cuda", 0),
        ("npu", 0),
        ("npu", 1),
    ]
    assert [(state.kind, state.index) for state in seen.devices] == [
        ("cuda", 0),
        ("npu", 0),
        ("npu", 1),
    ]
    assert (seen.devices[0].memory_used_bytes, seen.devices[0].persistence) == (3 * GIB, True)
    assert loads(Examination, dumps(seen)) == seen


def test_npu_smi_is_asked_once(make_host: Any, tmp_path: Path) -> None:
    tools = {"npu-smi": f'echo x >>{tmp_path}/asked; cat "{RECORDED}/910b3_24.1.txt"'}
    host = make_host(tools={**tools, "cat": 'exec /bin/cat "$@"'})
    seen = examine_host(host, run_root=tmp_path)
    assert [state.kind for state in seen.devices] == ["npu", "npu"]
    assert (tmp_path / "asked").read_text() == "x\n"


@pytest.mark.parametrize(
    ("call", "devices"), [("nvmlInit", 0), ("nvmlDeviceGetPersistenceMode", 1)]
)
def test_a_driver_that_hangs_is_a_note(
    make_host: Any, tmp_path: Path, call: str, devices: int
) -> None:
    nvml = OneGpu()
    nvml.hangs_in = call
    try:
        seen = examine_host(make_host(DRIVER), run_root=tmp_path, nvml=nvml, nvml_timeout_s=0.1)
    finally:
        nvml.end.set()
    assert (len(seen.machine.devices), seen.devices) == (devices, ())
    (note,) = [note for note in seen.machine.notes if "NVIDIA" in note]
    assert "0.1 s" in note


def test_a_missing_nvml_library_is_a_note(make_host: Any, tmp_path: Path) -> None:
    seen = examine_host(make_host(DRIVER), run_root=tmp_path)  # the binding's own, without driver
    assert (seen.machine.devices, seen.devices) == ((), ())
    (note,) = seen.machine.notes
    assert "NVML" in note


@pytest.mark.parametrize("part", ["find_run_processes", "host_state", "find_cluster"])
def test_a_part_that_breaks_is_a_note_and_hides_no_other(
    make_host: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("of its own")

    monkeypatch.setattr(examining, part, broken)
    seen = examine_host(make_host(SLURM_JOB_ID="7"), run_root=tmp_path)
    (note,) = seen.machine.notes
    assert "of its own" in note
    assert (seen.host == HostState()) == (part == "host_state")
    assert (seen.cluster == Cluster()) == (part == "find_cluster")


def test_this_machine_survives_the_codec(tmp_path: Path) -> None:
    seen = examine(os.environ, run_root=tmp_path)
    assert seen.torch is None
    assert seen.host.logical_cpus == os.cpu_count()
    assert loads(Examination, dumps(seen)) == seen


def test_examining_imports_no_torch_and_starts_nothing_on_a_bare_machine() -> None:
    code = (
        "import sys, subprocess\n"
        "from pathlib import Path\n"
        "from fasttrain.hardware.examine import examine_host\n"
        "from fasttrain.hardware.host import Host\n"
        "def refuse(*a, **k): raise AssertionError('a process was started')\n"
        "subprocess.Popen = refuse\n"
        "host = Host({'PATH': '/nowhere'}, Path('/nowhere'), 'Linux', 'x86_64', 2)\n"
        "seen = examine_host(host, run_root=Path('/nowhere/runs'))\n"
        "assert seen.machine.notes == (), seen.machine.notes\n"
        "assert seen.host.disks[0].path == '/'\n"
        "assert not {'torch', 'pynvml', 'typer', 'rich'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_only_variables_of_training_are_kept() -> None:
    kept = {
        "CUDA_VISIBLE_DEVICES": "0,0",
        "NCCL_DEBUG": "INFO",
        "TORCHINDUCTOR_CACHE_DIR": "/x",
        "TORCH_LOGS": "dynamo",
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64",
        "OMP_NUM_THREADS": "1",
        "ASCEND_RT_VISIBLE_DEVICES": "0",
        "SLURM_JOB_ID": "7",
        "RANK": "3",
        "MASTER_ADDR": "node1",
        "TMPDIR": "/scratch",
        "FASTTRAIN_AMP": "bf16",
    }
    others = {"HOME": "/home/u", "HF_TOKEN": "s3cr3t", "RANKING": "1", "MY_CUDA_PATH": "/x"}
    assert relevant({**kept, **others}) == kept


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("SLURM_JWT", "s3cr3t", "***"),
        ("NVIDIA_API_KEY", "s3cr3t", "***"),
        ("TORCH_hub_token", "s3cr3t", "***"),
        ("FASTTRAIN_ENV", "A=1 HF_TOKEN='s3cr3t two' B=2", "A=1 'HF_TOKEN=***' B=2"),
        ("FASTTRAIN_ENV", "HF_TOKEN='s3cr3t", "***"),
    ],
)
def test_secrets_are_masked(name: str, value: str, told: str) -> None:
    assert relevant({name: value}) == {name: told}
