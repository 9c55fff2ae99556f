"""Machine files: those that are shipped, those that are wrong, and those that are noise."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fasttrain.hardware.machine_file import (
    BINARY,
    NO_FILE,
    NOT_JSON,
    NOT_REGULAR,
    other_version,
    read_machine,
)
from fasttrain.model.codec import to_data
from fasttrain.model.errors import ExitCode, FasttrainError
from fasttrain.planning.describe import NO_GPU, machine_phrase

MACHINES = Path(__file__).parents[2] / "data" / "machines"

SHIPPED = {
    "8xh100": "8 x NVIDIA H100 80GB HBM3, 224 CPU cores",
    "4xt4": "4 x Tesla T4, 48 CPU cores",
    "1xa100": "NVIDIA A100-SXM4-80GB, 16 CPU cores",
    "t4-and-a100": "Tesla T4 and NVIDIA A100-PCIE-40GB, 16 CPU cores",
    "8xmi300x": "8 x AMD Instinct MI300X, 16 CPU cores",
    "8xascend910b": "8 x Ascend910B3, 192 CPU cores",
    "8xs5000": "8 x MTT S5000, 128 CPU cores",
    "cpu-laptop": f"{NO_GPU}, 16 CPU cores",
    "cpu-amx": f"{NO_GPU}, 32 CPU cores",
}


def test_every_shipped_machine_is_tested() -> None:
    assert {path.stem for path in MACHINES.glob("*.json")} == set(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_machines_round_trip_with_nothing_left_to_defaults(name: str) -> None:
    path = MACHINES / f"{name}.json"
    machine = read_machine(path)
    assert to_data(machine) == json.loads(path.read_text())
    assert machine_phrase(machine) == SHIPPED[name]


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_machines_are_what_their_hardware_is(name: str) -> None:
    machine = read_machine(MACHINES / f"{name}.json")
    assert [device.index for device in machine.devices] == list(range(len(machine.devices)))
    uuids = [device.uuid for device in machine.devices if device.kind == "cuda"]
    assert len(set(uuids)) == len(uuids)
    assert all(device.bf16 == (device.name != "Tesla T4") for device in machine.devices)
    assert machine.cpu.bf16 == (name in {"8xh100", "cpu-amx"})
    assert machine.torch.release == ((2, 7) if name == "8xs5000" else (2, 13))


def refusal(path: Path) -> FasttrainError:
    with pytest.raises(FasttrainError) as caught:
        read_machine(path)
    error = caught.value
    assert (error.slug, error.exit_code) == ("machine-file", ExitCode.CONTRADICTION)
    assert str(path) in error.what
    return error


def test_a_missing_file_a_folder_and_a_pipe_are_refused(tmp_path: Path) -> None:
    assert NO_FILE in refusal(tmp_path / "none.json").why
    assert NOT_REGULAR in refusal(tmp_path).why
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # reading it would wait for ever
    assert NOT_REGULAR in refusal(pipe).why
    assert refusal(tmp_path / ("x" * 5000)).why


def test_an_unreadable_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.json"
    path.write_text("{}")

    def deny(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", deny)
    assert "Permission denied" in refusal(path).why


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"\x93NUMPY\xff\xfe", BINARY),
        (b"", NOT_JSON),
        (b"{'hostname': 1}", NOT_JSON),
        (b"[" * 100_000, NOT_JSON),
        (b"1" * 10_000, NOT_JSON),
        (b"[]", "Machine"),
        (b"null", "Machine"),
    ],
)
def test_content_that_is_no_object_is_refused(tmp_path: Path, content: bytes, word: str) -> None:
    path = tmp_path / "m.json"
    path.write_bytes(content)
    assert word in refusal(path).why


def a100() -> dict[str, Any]:
    data: dict[str, Any] = json.loads((MACHINES / "1xa100.json").read_text())
    return data


def test_a_byte_order_mark_is_no_obstacle(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text(json.dumps(a100()), encoding="utf-8-sig")
    assert read_machine(path) == read_machine(MACHINES / "1xa100.json")


@pytest.mark.parametrize(
    ("spoil", "field"),
    [
        (lambda m: m.pop("hostname"), "hostname"),
        (lambda m: m.update(gpus=8), "gpus"),
        (lambda m: m.update(schema=2), other_version(2)),
        (lambda m: m.update(schema=True), "schema"),
        (lambda m: m.update(schema=2, gpus=8), other_version(2)),
        (lambda m: m["cpu"].update(cores="8"), "cpu.cores"),
        (lambda m: m["cpu"].update(cores=0), "cpu.cores"),
        (lambda m: m["cpu"].update(memory_bytes=-1), "cpu.memory_bytes"),
        (lambda m: m["torch"].update(build="xla"), "torch.build"),
        (lambda m: m["devices"][0].update(kind="tpu"), "devices[0].kind"),
        (lambda m: m["devices"][0].update(index=-1), "devices[0].index"),
        (lambda m: m["devices"][0].update(memory_bytes=-1), "devices[0].memory_bytes"),
        (lambda m: m["devices"][0].update(capability="sm_80"), "devices[0].capability"),
        (lambda m: m.update({"\ud800": 1}), r"\ud800"),
    ],
)
def test_a_wrong_field_is_named(
    tmp_path: Path, spoil: Callable[[dict[str, Any]], object], field: str
) -> None:
    data = a100()
    spoil(data)
    path = tmp_path / "m.json"
    path.write_text(json.dumps(data))
    why = refusal(path).why
    assert field in why
    why.encode()  # printable, whatever the file held


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
FUZZ = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def read_or_refuse(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    refused: FasttrainError | None = None
    try:
        read_machine(path)
    except FasttrainError as error:
        refused = error
    assert refused is None or refused.slug == "machine-file"


@pytest.mark.matrix
@FUZZ
@given(content=st.binary(max_size=200))
def test_random_bytes_are_read_or_refused(tmp_path: Path, content: bytes) -> None:
    read_or_refuse(tmp_path / "m.json", content)


@pytest.mark.matrix
@FUZZ
@given(value=json_values)
def test_random_json_is_read_or_refused(tmp_path: Path, value: Any) -> None:
    read_or_refuse(tmp_path / "m.json", json.dumps(value).encode())


@pytest.mark.matrix
@FUZZ
@given(data=st.data(), value=json_values)
def test_one_random_field_is_read_or_refused(tmp_path: Path, data: Any, value: Any) -> None:
    machine = a100()
    part = data.draw(
        st.sampled_from([machine, machine["cpu"], machine["torch"], machine["devices"][0]])
    )
    part[data.draw(st.sampled_from(sorted(part)))] = value
    read_or_refuse(tmp_path / "m.json", json.dumps(machine).encode())
