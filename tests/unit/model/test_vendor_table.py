"""The table of vendors: a vendor that forgets one of its parts fails here."""

from __future__ import annotations

import re
from importlib import import_module
from typing import get_args

import pytest

from fasttrain.hardware.host import Host
from fasttrain.launch.crash import causes
from fasttrain.model.vendors import ACCELERATORS, VENDORS, DeviceChoice, DeviceKind, group_backend

vendors = pytest.mark.parametrize("kind", VENDORS)


def test_each_kind_has_a_row_in_order():
    assert tuple(VENDORS) == get_args(DeviceKind)
    assert get_args(DeviceChoice) == ("auto", *VENDORS)


@pytest.mark.parametrize("kind", ACCELERATORS)
def test_each_accelerator_has_a_probe_that_tells_states(kind, tmp_path):
    probe = import_module(f"fasttrain.hardware.vendors.{kind}").vendor(
        Host({"PATH": ""}, tmp_path, "Linux", "x86_64", 1), lambda _: False
    )
    assert probe.kind == kind
    assert probe.probe().devices == ()
    assert probe.states((), {}) == ()


@pytest.mark.parametrize("kind", ACCELERATORS)
def test_each_accelerator_says_what_is_asked_of_it(kind):
    row = VENDORS[kind]
    assert row.maker
    assert row.memory_words
    assert row.bf16_needs
    assert bool(row.torch_build) == bool(row.build_name)
    assert bool(row.extension) == all(row.extension_needs)
    assert not row.hidden or row.visibility
    assert row.torch_type == kind or row.torch_build == kind


@vendors
def test_a_backend_for_devices_is_joined_with_gloo_for_the_host(kind):
    row = VENDORS[kind]
    group = group_backend(row.collectives)
    assert group.endswith(row.collectives)
    assert group.startswith("cpu:gloo,") == row.beside_gloo


def test_known_backends():
    assert group_backend("nccl") == "cpu:gloo,cuda:nccl"
    assert group_backend("hccl") == "cpu:gloo,npu:hccl"
    assert [group_backend(name) for name in ("xccl", "gloo", "")] == ["xccl", "gloo", ""]


@pytest.mark.parametrize("kind", ACCELERATORS)
def test_memory_that_ran_out_is_known_on_each(kind):
    assert re.fullmatch(causes._DEVICES, VENDORS[kind].memory_words)
