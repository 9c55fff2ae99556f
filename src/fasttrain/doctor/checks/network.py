"""Checks of the networks that join nodes."""

from __future__ import annotations

from collections.abc import Iterator

from fasttrain.doctor.checks.words import check, is_on, present
from fasttrain.model.examination import Examination, Finding, RdmaPort
from fasttrain.planning.describe import and_join, counted


def _ports(seen: Examination) -> tuple[RdmaPort, ...]:
    """Return the ports that a run of several nodes would use; none on a machine without devices."""
    wanted = present(seen) and not is_on(seen, "NCCL_IB_DISABLE")
    return tuple(port for port in seen.host.rdma_ports if port.state) if wanted else ()


@check("rdma-port", "whether the ports of InfiniBand and RoCE adapters are up")
def _down(seen: Examination) -> Iterator[Finding]:
    ports = _ports(seen)
    down = [port for port in ports if port.state != "ACTIVE"]
    if not down:
        return
    names = and_join(f"{port.name} ({port.state})" for port in down)
    # Source: NCCL 2.26, src/transport/net_ib.cc: ports in another state are passed over.
    nothing = len(down) == len(ports)
    # INIT: the link is there, and the subnet manager has not given the port an address.
    waits = any(port.state == "INIT" and port.link_layer == "InfiniBand" for port in down)
    yield _down.finding(
        "warning" if nothing else "hint",
        f"no InfiniBand or RoCE port is up: {names}"
        if nothing
        else f"{len(down)} of {counted(len(ports), 'InfiniBand or RoCE port')} "
        f"{'is' if len(down) == 1 else 'are'} not up: {names}",
        why="a run of several nodes averages its gradients over TCP, which is slower"
        if nothing
        else "a run of several nodes goes without it; no harm if it is not meant to be used",
        fix="see that a subnet manager runs (sminfo), and ask who runs the network"
        if waits
        else "see to its cable and the switch: rdma link, ibstat",
    )


@check("rdma-rate", "InfiniBand ports that are slower than the others")
def _slow(seen: Examination) -> Iterator[Finding]:
    # Ethernet ports of one machine are often meant for different things.
    ports = [p for p in _ports(seen) if p.link_layer == "InfiniBand" and p.state == "ACTIVE"]
    best = max((port.rate_gbps or 0 for port in ports), default=0)
    slow = [port for port in ports if port.rate_gbps and port.rate_gbps < best]
    if slow:
        names = and_join(f"{port.name} ({port.rate_gbps:g} Gbit/s)" for port in slow)
        yield _slow.finding(
            "hint",
            f"slower than the other InfiniBand ports, at {best:g} Gbit/s: {names}",
            why="the devices next to it reach other nodes more slowly, and the others wait",
            fix="see to its cable and the switch's port: iblinkinfo, ibstat",
        )


CHECKS = (_down, _slow)
