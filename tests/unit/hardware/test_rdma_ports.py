"""Ports of InfiniBand and RoCE adapters, from files as the kernel writes them."""

from __future__ import annotations

from typing import Any

from fasttrain.hardware.vendors.kernel_files import rdma_ports
from fasttrain.model.machine import RdmaPort

FOLDER = "sys/class/infiniband"


def port(adapter: str, state: str, rate: str, layer: str) -> dict[str, str]:
    folder = f"{FOLDER}/{adapter}/ports/1"
    return {f"{folder}/state": state, f"{folder}/rate": rate, f"{folder}/link_layer": layer}


def test_ports_are_read_in_the_order_of_their_adapters(make_host: Any) -> None:
    files = {
        **port("mlx5_10", "1: DOWN\n", "10 Gb/sec (4X SDR)\n", "InfiniBand\n"),
        **port("mlx5_2", "4: ACTIVE\n", "2.5 Gb/sec (1X SDR)\n", "Ethernet\n"),
        f"{FOLDER}/mlx5_2/ports/2/state": "5: ACTIVE_DEFER\n",
    }
    assert rdma_ports(make_host(files)) == (
        RdmaPort("mlx5_2/1", "ACTIVE", "Ethernet", 2.5),
        RdmaPort("mlx5_2/2", "ACTIVE_DEFER"),
        RdmaPort("mlx5_10/1", "DOWN", "InfiniBand", 10.0),
    )


def test_a_machine_without_adapters_has_none(make_host: Any) -> None:
    assert rdma_ports(make_host()) == ()
    assert rdma_ports(make_host({f"{FOLDER}/odd/node_type": "1: CA\n"})) == ()
