"""What sinfo prints of partitions, recorded on SLURM 22.05.8 but for the mixed nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from fasttrain.hardware.cluster import node_shape, parse_shape
from fasttrain.hardware.host import Host
from fasttrain.model.job import NodeShape

TEXT = """\
main*|2|64|gpu:8
main*|4|32+|gpu:a100:4(S:0-1)
low|9|16|(null)
"""


@pytest.mark.parametrize(
    ("gpus", "shape"),
    [(8, NodeShape(64, 8, 2)), (4, NodeShape(32, 4, 6)), (0, NodeShape(32, 4, 6)), (9, None)],
)
def test_the_default_partition(gpus: int, shape: NodeShape | None) -> None:
    assert parse_shape(TEXT, gpus, default_only=True) == shape


def test_a_named_partition_and_one_that_is_not_there() -> None:
    assert parse_shape("low|9|16|(null)\n", 0, default_only=False) == NodeShape(16, 0, 9)
    assert parse_shape("", 0, default_only=False) is None
    assert parse_shape("rubbish\na|b|c|d\n", 0, default_only=False) is None


@pytest.mark.parametrize(("partition", "asked"), [(None, ""), ("low", "-p low"), ("a b", "-p a b")])
def test_sinfo_is_asked_for_the_partition(
    tmp_path: Path, partition: str | None, asked: str
) -> None:
    tool = tmp_path / "sinfo"
    tool.write_text(f'#!/bin/sh\necho "$*" >{tmp_path}/asked\necho "low*|9|16|gpu:2"\n')
    tool.chmod(0o755)
    host = Host({"PATH": str(tmp_path)})
    assert node_shape(host, partition, 1) == NodeShape(16, 2, 9)
    assert (tmp_path / "asked").read_text() == f"-h -o %P|%D|%c|%G {asked}".rstrip() + "\n"


@pytest.mark.parametrize("shell", ["exit 1", "echo x", "true"])
def test_a_sinfo_that_tells_nothing(tmp_path: Path, shell: str) -> None:
    (tmp_path / "sinfo").write_text(f"#!/bin/sh\n{shell}\n")
    (tmp_path / "sinfo").chmod(0o755)
    assert node_shape(Host({"PATH": str(tmp_path)}), None, 1) is None
    assert node_shape(Host({"PATH": str(tmp_path / "none")}), None, 1) is None
