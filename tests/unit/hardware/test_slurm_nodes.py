"""What sinfo prints of partitions, recorded on SLURM 22.05.8 but for the mixed nodes."""

from __future__ import annotations

import pytest

from fasttrain.hardware.slurm_nodes import parse_shape
from fasttrain.spec.job import NodeShape

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
