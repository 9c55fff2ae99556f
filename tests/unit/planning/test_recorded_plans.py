"""Plans for the recorded machines that doctor is tested on; what is decided, written by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from fasttrain.hardware.machine_file import read_examination

DATA = Path(__file__).parents[2] / "data/examinations"
MIG = "MIG-1f1e2d3c-4b5a-5968-8778-69504a3b2c1d"
SLOW = "GPU-0a1b2c3d-4e5f-4061-8273-94a5b6c7d8e9"
FAST = "GPU-f0e1d2c3-b4a5-4968-8776-655443322110"

# machine, --gpus: kind, processes, precision, optimizer, matmul, and a variable with its value
PLANS = [
    ("8xh100-nvlink", "all", ("cuda", 8, "bfloat16", "fused", "high"), "OMP_NUM_THREADS=28"),
    ("4xt4", "all", ("cuda", 4, "off", "fused", "keep"), "CUDA_VISIBLE_DEVICES=0,1,2,3"),
    ("a100-mig", "0", ("cuda", 1, "bfloat16", "fused", "high"), f"CUDA_VISIBLE_DEVICES={MIG}"),
    (
        "3090-and-1080",
        "1",
        ("cuda", 1, "bfloat16", "fused", "high"),
        f"CUDA_VISIBLE_DEVICES={FAST}",
    ),
    ("3090-and-1080", "0", ("cuda", 1, "off", "fused", "keep"), f"CUDA_VISIBLE_DEVICES={SLOW}"),
    ("3090-and-1080", None, ("cuda", 1, "bfloat16", "fused", "high"), None),
    ("8xascend910b", "2,5", ("npu", 2, "bfloat16", "npu", "keep"), "ASCEND_RT_VISIBLE_DEVICES=2,5"),
    ("ascend-910a", None, ("npu", 1, "off", "npu", "keep"), None),
    ("ascend-310p", None, ("npu", 1, "off", "npu", "keep"), None),
    ("cpu-amx", None, ("cpu", 1, "bfloat16", "fused", "keep"), None),
    ("cpu-quota", None, ("cpu", 1, "off", "fused", "keep"), "OMP_NUM_THREADS=1"),
]


@pytest.mark.parametrize(("name", "gpus", "decided", "variable"), PLANS)
def test_the_plan_fits_the_machine(make, name, gpus, decided, variable):
    options = {} if gpus is None else {"gpus": gpus}
    plan = make.plan(read_examination(DATA / f"{name}.json").machine, {}, **options)
    levers = plan.levers
    found = (plan.device_kind.value, plan.processes.value.nproc_per_node,
             levers.amp.value.precision, levers.optimizer.value, levers.matmul.value)  # fmt: skip
    assert found == decided
    if variable:
        assert variable in {f"{item.name}={item.value}" for item in plan.environment}
