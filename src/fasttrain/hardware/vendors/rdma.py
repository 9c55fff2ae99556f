"""Ports of InfiniBand and RoCE adapters, by sysfs."""

from __future__ import annotations

import re

from fasttrain.hardware.host import Host
from fasttrain.model.examination import RdmaPort

FOLDER = "sys/class/infiniband"


def rdma_ports(host: Host) -> tuple[RdmaPort, ...]:
    """Give the ports of all adapters that verbs can use; none where the kernel has no such.

    Source: Linux 6.12, Documentation/ABI/stable/sysfs-class-infiniband, and what
    drivers/infiniband/core/sysfs.c writes: ``4: ACTIVE``, ``100 Gb/sec (4X EDR)``.
    """
    return tuple(
        _port(host, adapter, number)
        for adapter in host.names(FOLDER)
        for number in host.names(f"{FOLDER}/{adapter}/ports")
    )


def _port(host: Host, adapter: str, number: str) -> RdmaPort:
    folder = f"{FOLDER}/{adapter}/ports/{number}"
    rate = re.match(r"([\d.]+) Gb/sec", host.read(f"{folder}/rate"))
    return RdmaPort(
        name=f"{adapter}/{number}",
        state=host.read(f"{folder}/state").partition(":")[2].strip(),
        link_layer=host.read(f"{folder}/link_layer").strip(),
        rate_gbps=float(rate[1]) if rate else None,
    )
