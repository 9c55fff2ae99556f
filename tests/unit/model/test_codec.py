"""Round trips of the border dataclasses, and the refusal of anything that isn't one."""

import json
from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fasttrain.model.codec import CodecError, dumps, from_data, loads, to_data
from fasttrain.model.crash import Failure, WorkerExit, WorkerExits
from fasttrain.model.decision import Decision, Source, SourceKind
from fasttrain.model.hang import StuckRank
from fasttrain.model.machine import Cpu, Device, Machine, Torch
from fasttrain.model.outcome import Outcome, RankReport, Receipt, Site, State, StepStats


@dataclass(frozen=True, slots=True)
class Inner:
    number: int
    ratio: float = 0.5


@dataclass(frozen=True, slots=True)
class Outer:
    word: str
    mode: Literal["a", "b"] = "a"
    maybe: int | None = None
    inner: tuple[Inner, ...] = ()
    table: dict[str, int] = field(default_factory=dict)
    flag: bool = False


def receipts():
    words = st.text(max_size=8)
    sites = st.builds(Site, what=words, where=words, count=st.integers(0, 99))
    outcomes = st.builds(
        Outcome,
        lever=words,
        asked=words,
        state=st.sampled_from(State),
        sites=st.lists(sites, max_size=2).map(tuple),
        counts=st.dictionaries(words, st.integers(0, 2**63 - 1), max_size=2),
        notes=st.lists(words, max_size=2).map(tuple),
    )
    reports = st.builds(
        RankReport,
        rank=st.integers(0, 9),
        device=words,
        torch_version=words,
        outcomes=st.lists(outcomes, max_size=2).map(tuple),
        stats=st.builds(StepStats, steps=st.integers(0, 9)),
    )
    return st.builds(
        Receipt,
        run_id=words,
        run_dir=words,
        command=words,
        exit_code=st.integers(0, 255),
        wall_s=st.floats(0, 1e6),
        ranks=st.lists(reports, max_size=2).map(tuple),
    )


@given(receipts())
def test_a_receipt_comes_back_as_it_was(receipt):
    assert loads(Receipt, dumps(receipt)) == receipt


def test_a_generic_decision_is_read_with_its_own_type():
    decision = Decision(Inner(3), "because", Source(SourceKind.FLAG, "--x"))
    assert from_data(Decision[Inner], to_data(decision)) == decision
    with pytest.raises(CodecError, match=r"value\.number"):
        from_data(Decision[Inner], to_data(Decision({"number": "3"}, "", decision.source)))


def test_undecodable_bytes_of_an_argument_survive():
    machine = Machine(
        hostname="h\udcff", system="Linux", python="3.11", torch=Torch(), cpu=Cpu("c", 1, "all")
    )
    assert loads(Machine, dumps(machine)) == machine


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ({}, "^word .*missing"),
        ({"word": 3}, "^word .*3"),
        ({"word": "x", "mode": "c"}, "^mode .*'c'"),
        ({"word": "x", "maybe": True}, "^maybe .*True"),
        ({"word": "x", "inner": [{"number": 1}, {"number": 1.5}]}, r"^inner\[1\].number .*1.5"),
        ({"word": "x", "inner": {}}, "^inner .*list"),
        ({"word": "x", "table": {"k": "v"}}, "^table.k .*'v'"),
        ({"word": "x", "flag": 1}, "^flag .*1"),
        ({"word": "x", "wrod": "y"}, "^wrod .* Outer"),
        ([], "^Outer .*mapping"),
    ],
)
def test_wrong_data_is_refused_by_its_path(data, named):
    with pytest.raises(CodecError, match=named):
        from_data(Outer, data)


def test_whole_numbers_are_floats_too():
    assert from_data(Inner, {"number": 1, "ratio": 2}) == Inner(1, 2.0)


@given(st.binary(max_size=60) | st.text(max_size=60))
def test_text_that_is_no_machine_is_only_ever_a_codec_error(text):
    with pytest.raises(CodecError):
        loads(Machine, text)


def test_json_is_plain(tmp_path):
    device = Device("cuda", 0, "H100")
    assert json.loads(dumps(device))["kind"] == "cuda"


@pytest.mark.parametrize(
    ("version", "release"),
    [("2.13.0+cpu", (2, 13)), ("1.13.1", (1, 13)), ("", (0, 0)), ("nightly", (0, 0))],
)
def test_release_of_torch(version, release):
    assert Torch(version=version).release == release


def test_deeply_nested_json_is_refused_not_a_crash():
    with pytest.raises(CodecError):
        loads(Machine, "[" * 100_000)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"number": 1, "ratio": NaN}', "^ratio .*nan"),
        ('{"number": 1, "ratio": 1e999}', "^ratio .* inf"),
        ('{"number": 1, "ratio": -Infinity}', "^ratio .*-inf"),
        (f'{{"number": {2**63}}}', "^number .*64 bits"),
        (f'{{"number": 1, "ratio": 1{"0" * 400}}}', "^ratio .*64 bits"),
        (f'{{"number": "{"x" * 9999}"}}', r"^number .*'x{1,60}\.\.\.,.* int$"),
    ],
)
def test_a_number_that_no_card_could_show_is_refused(text, named):
    with pytest.raises(CodecError, match=named):
        loads(Inner, text)


def test_a_file_of_another_version_is_refused():
    data = {**to_data(Machine("h", "Linux", "3.11", Torch(), Cpu("c", 1, "all"))), "schema": 2}
    with pytest.raises(CodecError, match=r"^schema .*\b2\b.*\b1$"):
        from_data(Machine, data)


@pytest.mark.parametrize(
    ("kind", "text", "named"),
    [
        (
            WorkerExits,
            '{"ends": [{"rank": 0, "pid": 1, "exit_code": 256, "time_ns": 0, "monotonic_ns": 0}]}',
            r"\b256\b",
        ),
        (
            WorkerExit,
            '{"rank": 0, "pid": 1, "exit_code": -65, "time_ns": 0, "monotonic_ns": 0}',
            r"-65\b",
        ),
        (
            Failure,
            '{"rank": 0, "pid": 1, "time_ns": 0, "monotonic_ns": 0, "exit_code": 1, "raised": []}',
            "^Failure: ",
        ),
        (StuckRank, '{"rank": 0, "steps": 1, "processes": []}', "^StuckRank: "),
    ],
)
def test_what_a_class_demands_of_itself_is_demanded_of_its_file(kind, text, named):
    with pytest.raises(CodecError, match=named):
        loads(kind, text)
