"""Checks of the networks that join nodes."""

from __future__ import annotations

from typing import Any

import pytest

from fasttrain.doctor.diagnosis import diagnose
from fasttrain.model.machine import RdmaPort
from support.examinations import fires, node, quiet, verify


def ports(*states: str, layer: str = "InfiniBand", **parts: Any) -> Any:
    """Return a server with a port in each of the states."""
    found = (RdmaPort(f"mlx5_{i}/1", state, layer, 400.0) for i, state in enumerate(states))
    return node(host={"rdma_ports": tuple(found)}, **parts)


def rates(*rates_gbps: float | None, layer: str = "InfiniBand", state: str = "ACTIVE") -> Any:
    """Return a server with a port of each rate."""
    found = (RdmaPort(f"mlx5_{i}/1", state, layer, rate) for i, rate in enumerate(rates_gbps))
    return node(host={"rdma_ports": (*found, RdmaPort("mlx5_9/1", "ACTIVE", layer, 400.0))})


CASES = [
    fires(
        "rdma-port",
        "warning",
        "mlx5_0/1 (DOWN) … mlx5_1/1 (INIT)",
        ports("DOWN", "INIT"),
    ),
    fires(
        "rdma-port",
        "hint",
        "1 of 3 … mlx5_1/1 (DOWN)",
        ports("ACTIVE", "DOWN", "ACTIVE"),
    ),
    quiet("rdma-port", ports("ACTIVE", "ACTIVE")),
    quiet("rdma-port", ports("ACTIVE", "")),  # closed to us
    quiet("rdma-port", ports("DOWN", environ={"NCCL_IB_DISABLE": "1"})),
    quiet("rdma-port", ports("DOWN", machine={"devices": ()})),
    quiet("rdma-port", node()),
    fires("rdma-rate", "hint", "400 Gbit/s … mlx5_1/1 (100 Gbit/s)", rates(400.0, 100.0)),
    quiet("rdma-rate", rates(400.0, None)),
    quiet("rdma-rate", rates(100.0, layer="Ethernet")),
    quiet("rdma-rate", rates(10.0, state="DOWN")),
    quiet("rdma-rate", node()),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.slug)
def test_a_check_of_networks(case: Any) -> None:
    verify(case)


@pytest.mark.parametrize(("layer", "fix"), [("InfiniBand", "sminfo"), ("Ethernet", "ibstat")])
def test_a_port_that_waits_for_an_address_is_sent_to_who_gives_it(layer: str, fix: str) -> None:
    (finding,) = diagnose(ports("INIT", layer=layer), only=["rdma-port"])
    assert fix in finding.fix
