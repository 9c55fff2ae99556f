"""Words and figures of the findings."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fasttrain.doctor.check import is_on, most_visible, named, one_line, present, spans, visible
from support.examinations import H100, NPU, container, node


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([3], "3"),
        ([1, 0], "0, 1"),
        ([2, 1, 0, 1], "0-2"),
        ([0, 1, 3, 4, 5, 7], "0, 1, 3-5, 7"),
        ([], ""),
    ],
)
def test_spans(numbers: list[int], text: str) -> None:
    assert spans(numbers) == text


def test_devices_are_named_by_their_kinds() -> None:
    npus = [replace(NPU, index=index) for index in (0, 1, 2)]
    assert named([H100]) == "GPU 0"
    assert named([H100, *npus]) == "GPU 0 and NPUs 0-2"
    slices = [replace(H100, uuid=f"MIG-{name}", parent_uuid="GPU-0") for name in "ab"]
    assert named(slices) == "GPU 0"


def test_a_message_becomes_one_short_line() -> None:
    assert one_line(" a\n  b\t c ") == "a b c"
    assert len(one_line("word " * 100)) <= 160
    assert one_line("word " * 100).endswith("word ...")


def test_mig_leaves_one_instance_to_a_process() -> None:
    slices = [replace(H100, uuid=f"MIG-{name}", parent_uuid="GPU-0") for name in "ab"]
    whole = replace(H100, index=1, uuid="GPU-1")
    seen = node(machine={"devices": (whole, *slices)})
    assert [slot.device.uuid for slot in visible(seen, "cuda")] == ["MIG-a"]
    assert most_visible(seen) == 1


def test_devices_are_counted_by_kind() -> None:
    seen = node(4, environ={"CUDA_VISIBLE_DEVICES": "1,2"})
    assert present(seen) == ("cuda",)
    assert most_visible(seen) == 2
    assert (present(container()), most_visible(container())) == ((), 0)


@pytest.mark.parametrize(("value", "on"), [("1", True), ("true", True), ("0", False), (" ", False)])
def test_a_switch_is_off_at_zero(value: str, on: bool) -> None:
    seen = container(environ={"SWITCH": value})
    assert is_on(seen, "SWITCH") is on
    assert not is_on(seen, "OTHER")
