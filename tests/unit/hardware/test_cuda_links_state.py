"""How NVIDIA's GPUs reach each other, against a strict NVML."""

from __future__ import annotations

from typing import Any

import pynvml
import pytest

from support.fake_nvml import Board, FakeNvml, pci, states

READ, NVLINK = 0, 2  # indices of P2PStatus
OK, CHIPSET_NOT_SUPPORTED = 0, 1


def linked(
    index: int, peers: dict[int, tuple[int, int]], nvlinks: dict[int, Any] | None = None
) -> Any:
    """Return a board by (level, P2P status) of each peer, and what each NVLink leads to."""
    board = Board(index, f"GPU-{index}", {("PciInfo",): pci(0x10 + index)})
    for peer, (level, status) in peers.items():
        board.answers[("TopologyCommonAncestor", peer)] = level
        board.answers[("P2PStatus", peer, READ)] = status
        board.answers[("P2PStatus", peer, NVLINK)] = status if nvlinks else CHIPSET_NOT_SUPPORTED
    for link, end in (nvlinks or {}).items():
        board.answers[("NvLinkState", link)] = int(end is not None)
        board.answers[("NvLinkRemoteDeviceType", link)] = 2 if end == "switch" else 0
        if isinstance(end, int):
            board.answers[("NvLinkRemotePciInfo", link)] = pci(0x10 + end)
    return board


def test_eight_gpus_on_switches_reach_each_other_by_all_their_links(make_host: Any) -> None:
    boards = []
    for index in range(8):
        peers = {peer: (50, OK) for peer in range(8) if peer != index}
        boards.append(linked(index, peers, dict.fromkeys(range(18), "switch")))
    for state in states(make_host(), FakeNvml(boards)):
        others = [peer for peer in range(8) if peer != state.index]
        assert state.links == {str(peer): "NV18" for peer in others}
        assert state.peer_access == tuple(others)


def test_links_between_boards_are_counted_by_their_other_end(make_host: Any) -> None:
    # A corner of a DGX-1: two links to GPU 1, one to GPU 2, one that is down, none to GPU 3.
    peers = {1: (10, OK), 2: (20, OK), 3: (50, CHIPSET_NOT_SUPPORTED)}
    first = linked(0, peers, {0: 1, 1: 1, 2: 2, 3: None})
    rest = [linked(index, {}) for index in (1, 2, 3)]
    state, *_ = states(make_host(), FakeNvml([first, *rest]))
    assert state.links == {"1": "NV2", "2": "NV1", "3": "SYS"}
    assert state.peer_access == (1, 2)


def test_nvlink_that_the_driver_refuses_is_no_nvlink(make_host: Any) -> None:
    peers = {1: (40, CHIPSET_NOT_SUPPORTED)}
    first = linked(0, peers, dict.fromkeys(range(12), "switch"))  # no fabric manager
    second = linked(1, {}, dict.fromkeys(range(12), "switch"))
    state, _ = states(make_host(), FakeNvml([first, second]))
    assert (state.links, state.peer_access) == ({"1": "NODE"}, ())


@pytest.mark.parametrize(
    ("level", "name"),
    [
        (pynvml.NVML_TOPOLOGY_INTERNAL, "PIX"),
        (pynvml.NVML_TOPOLOGY_SINGLE, "PIX"),
        (pynvml.NVML_TOPOLOGY_MULTIPLE, "PXB"),
        (pynvml.NVML_TOPOLOGY_HOSTBRIDGE, "PHB"),
        (pynvml.NVML_TOPOLOGY_NODE, "NODE"),
        (pynvml.NVML_TOPOLOGY_SYSTEM, "SYS"),
    ],
)
def test_ways_over_pcie_have_nvidia_smis_names(make_host: Any, level: int, name: str) -> None:
    state, _ = states(make_host(), FakeNvml([linked(0, {1: (level, OK)}), linked(1, {})]))
    assert state.links == {"1": name}
    assert state.peer_access == (1,)  # over PCIe, without any NVLink


def test_an_unknown_topology_is_left_out(make_host: Any) -> None:
    state, _ = states(make_host(), FakeNvml([Board(0, "GPU-0"), Board(1, "GPU-1")]))
    assert (state.links, state.peer_access) == ({}, None)
