"""Small factories for machines and plans; session-wide, so that hypothesis may use them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fasttrain.model.decision import Setting, Source, SourceKind
from fasttrain.model.errors import FasttrainError
from fasttrain.model.machine import Cpu, Device, Machine, Torch
from fasttrain.model.plan import EnvVar, Invocation, LaunchPlan, ScriptFacts, Target
from fasttrain.model.settings import Settings
from fasttrain.planning.plan import make_plan

H100 = Device("cuda", 0, "NVIDIA H100", capability="9.0", bf16=True, fp16=True, tf32=True)
T4 = Device("cuda", 0, "Tesla T4", capability="7.5", fp16=True)
NPU = Device(
    "npu", 0, "Ascend910B3", capability="Ascend910B3", bf16=True, fp16=True, overflow="inf"
)
ROCM = Device("rocm", 0, "AMD MI300X", bf16=True, fp16=True)


class Make:
    """What a planning test is made of."""

    h100, t4, npu, rocm = H100, T4, NPU, ROCM
    script = Target("script", "train.py", ("--lr", "3"))
    command = Target("command", "./train.sh", ("--", "a b"))

    def settings(self, **options: Any) -> Settings:
        def flag(name: str, value: object) -> Setting[Any]:
            return Setting(value, Source(SourceKind.FLAG, "--" + name.replace("_", "-")))

        return Settings(**{name: flag(name, value) for name, value in options.items()})

    def machine(self, *devices: Device, **changes: Any) -> Machine:
        build = devices[0].kind if devices and devices[0].kind in ("cuda", "rocm") else "cpu"
        base = Machine(
            hostname="node",
            system="Linux",
            python="3.11.9",
            torch=Torch("2.13.0", build),  # type: ignore[arg-type]
            cpu=Cpu("some CPU", 8, "8 CPUs in the affinity mask", features=("avx2",)),
            devices=devices,
            cxx_compiler="/usr/bin/g++",
        )
        return replace(base, **changes)

    def gpus(self, count: int, like: Device = H100, **changes: Any) -> Machine:
        """Return a machine with that many equal devices, UUIDs GPU-00…, GPU-11…, and so on."""
        return self.machine(
            *(replace(like, index=i, uuid=f"GPU-{i}{i}aa-bb") for i in range(count)), **changes
        )

    def invocation(
        self,
        environ: dict[str, str] | None = None,
        target: Target | None = None,
        facts: ScriptFacts | None = None,
    ) -> Invocation:
        return Invocation(
            target=target or self.script,
            cwd="/home/me",
            python="/usr/bin/python3",
            shim="/lib/shim/__main__.py",
            agent="/lib/shim/agent.py",
            environ=environ or {},
            run_id="r1",
            run_dir="/home/me/runs/r1",
            cache_dir="/home/me/.cache/fasttrain",
            version="0.1.0",
            facts=facts or ScriptFacts(),
        )

    def plan(
        self,
        machine: Machine,
        environ: dict[str, str] | None = None,
        target: Target | None = None,
        facts: ScriptFacts | None = None,
        **options: Any,
    ) -> LaunchPlan:
        invocation = self.invocation(environ, target, facts)
        return make_plan(self.settings(**options), machine, invocation)

    def refused(self, machine: Machine, **options: Any) -> FasttrainError:
        with pytest.raises(FasttrainError) as caught:
            self.plan(machine, **options)
        return caught.value

    def variable(self, plan: LaunchPlan, name: str) -> EnvVar | None:
        found = [variable for variable in plan.environment if variable.name == name]
        assert len(found) < 2, f"{name} stands twice in the environment"
        return found[0] if found else None


@pytest.fixture(scope="session")
def make() -> Make:
    return Make()
