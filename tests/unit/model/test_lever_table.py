"""The table of levers: a lever that forgets one of its parts fails here."""

from __future__ import annotations

import inspect
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from fasttrain.config.options import BY_NAME
from fasttrain.model.levers import LEVERS, LeverOptions, Levers
from fasttrain.model.settings import PresetName, Settings

rows = pytest.mark.parametrize("name", LEVERS)


def _decided(name: str) -> Any:
    """Return the type that a lever's decision holds."""
    return get_args(get_type_hints(Levers)[name])[0]


def _words(kind: Any) -> set[str]:
    """Return the words that a decided value can come down to."""
    if is_dataclass(kind):
        kind = get_type_hints(kind)[fields(kind)[0].name]
    if get_origin(kind) is Literal:
        return set(get_args(kind))
    return {word for arm in get_args(kind) for word in _words(arm)}


def test_each_decision_of_a_plan_has_a_row():
    assert set(LEVERS) == {field.name for field in fields(Levers)}


@rows
def test_each_has_an_option_whose_values_its_row_names(name):
    row, choices = LEVERS[name], BY_NAME[name].choices
    assert name in {field.name for field in fields(LeverOptions)}
    assert {*row.idle, *row.presets.values()} <= set(choices)
    assert set(row.presets) <= set(get_args(PresetName))


@rows
def test_exact_turns_off_whatever_changes_numbers(name):
    # Several processes are asked for by themselves.
    assert LEVERS[name].several or "exact" in LEVERS[name].presets


@rows
def test_each_has_a_decider(name):
    decide = import_module(f"fasttrain.planning.levers.{name}").decide
    assert list(inspect.signature(decide).parameters) == ["situation"]
    assert set(LEVERS[name].after) < set(LEVERS)


@rows
def test_each_word_of_a_value_is_off_or_built_or_left_to_the_script(name):
    row = LEVERS[name]
    words = _words(_decided(name)) - {"auto"}
    assert words == {row.off, *row.ceded, *row.workers} - {"auto"}
    assert not set(row.ceded) & set(row.workers)


@rows
def test_what_is_off_is_told_as_off(name):
    row = LEVERS[name]
    value = row.off_value("cpu", Settings())
    assert row.mode(value) == row.off
    assert row.words(value) == row.off
    if row.identity:
        assert row.identity(value).startswith(row.off)
