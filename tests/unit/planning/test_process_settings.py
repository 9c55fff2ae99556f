"""Settings of the process: what is compared, and what later runs make of a result."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fasttrain.model.decision import Setting, Source, SourceKind
from fasttrain.model.machine import Cpu
from fasttrain.model.plan import Evidence, LaunchPlan, ScriptFacts
from fasttrain.model.tuning import (
    Compared,
    Ratio,
    Tuned,
    TunedFor,
    TunedVariable,
    TuningReport,
)
from fasttrain.planning.plan import make_plan
from fasttrain.planning.process_settings import (
    Candidate,
    ProcessSettings,
    is_valid,
    plan_process_settings,
    settings_with_kept,
    tuned_variables,
    use_result,
    use_variables,
    with_values,
    without_use,
)

NAME = "OMP_NUM_THREADS"
RATIO = Ratio(0.8, 0.82, 0.85)
ONE = TunedVariable(NAME, "1", "2 threads", RATIO, 8)
OF = TunedFor("/home/me/train.py", (), "abc", ("cpu", "some CPU"), "2.13.0", "0.1.0")
OWN_RANKS = ScriptFacts(Evidence("init_process_group", "train.py:3"))
TUNED = Tuned(OF, "2026-11-26", {}, None, (ONE,))


def planned(
    make: Any,
    cores: int = 8,
    physical: int = 0,
    environ: dict[str, str] | None = None,
    apart: bool = True,
    glibc: bool = False,
    machine: Any = None,
    own_ranks: bool = False,
    **options: Any,
) -> ProcessSettings:
    cpu = Cpu("some CPU", cores, f"{cores} CPUs in the affinity mask")
    machine = machine or make.machine(cpu=cpu)
    invocation = replace(make.invocation(environ), facts=OWN_RANKS if own_ranks else ScriptFacts())
    return plan_process_settings(
        lambda settings: make_plan(settings, machine, invocation),
        make.settings(**options),
        environ or {},
        machine,
        physical_cores=physical,
        glibc=glibc,
        apart=apart,
    )


@pytest.mark.parametrize(
    ("cores", "physical", "threads"),
    [
        (2, 2, ["1", "2"]),
        (2, 1, ["2", "1"]),
        (3, 3, ["1", "3"]),
        (8, 8, ["4", "1", "8"]),
        (16, 8, ["4", "1", "16", "8"]),
        (8, 0, ["4", "1", "8"]),
        (4, 32, ["2", "1", "4"]),  # a quota grants fewer than the affinity mask
    ],
)
def test_no_more_threads_than_are_granted_are_compared(
    make: Any, cores: int, physical: int, threads: list[str]
) -> None:
    found = planned(make, cores, physical)
    of_threads = [one for one in found.candidates if one.setting == "threads"]
    assert [one.value for one in of_threads] == threads
    assert {one.name for one in of_threads} == {NAME}
    assert "threads" not in found.left


@pytest.mark.parametrize(
    "circumstances",
    [
        {"cores": 1},
        {"environ": {NAME: "2"}},
        {"environ": {NAME: ""}},
        {"environ": {"MKL_NUM_THREADS": "2"}},
        {"env": (f"{NAME}=2",)},
        {"apart": False},
        {"nproc_per_node": 2},
    ],
)
def test_where_no_threads_are_compared_the_reason_is_told(make: Any, circumstances: Any) -> None:
    found = planned(make, **circumstances)
    assert "threads" not in {one.setting for one in found.candidates}
    assert found.left["threads"]


@pytest.mark.parametrize(
    ("glibc", "environ", "compared"),
    [
        (True, {}, True),
        (True, {NAME: "2"}, True),
        (False, {}, False),
        (True, {"GLIBC_TUNABLES": "glibc.malloc.arena_max=1"}, False),
        (True, {"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"}, False),
    ],
)
def test_an_allocator_that_keeps_memory_is_compared_with_glibcs(
    make: Any, glibc: bool, environ: dict[str, str], compared: bool
) -> None:
    found = planned(make, glibc=glibc, environ=environ)
    names = [one.name for one in found.candidates if one.setting == "allocator"]
    assert names == (["GLIBC_TUNABLES"] if compared else [])
    assert ("allocator" in found.left) is not compared


def test_one_core_has_an_allocator_too(make: Any) -> None:
    found = planned(make, 1, glibc=True)
    assert [one.setting for one in found.candidates] == ["allocator"]


def test_an_allocator_is_kept_for_later_runs_and_no_other_tunable_is_read_back(make: Any) -> None:
    (tried,) = planned(make, 1, glibc=True).candidates
    kept = Compared(("allocator",), tried.shown, "faster", RATIO, kept=True, against=tried.against,
                    variable=f"{tried.name}={tried.value}")  # fmt: skip
    (variable,) = tuned_variables(TuningReport("decided", 9, 1.0, settings=(kept,)), 8)
    assert is_valid(variable)
    assert not is_valid(replace(variable, value=f"{tried.value}:glibc.malloc.check=3"))
    assert not is_valid(replace(variable, name=NAME))
    tuned = replace(TUNED, variables=(variable,))
    (used,), unused = use_variables(tuned, make.settings(), {}, make.machine())
    assert not unused
    assert (used.name, used.value) == (tried.name, tried.value)
    own = {"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"}
    used_then, (why,) = use_variables(tuned, make.settings(), own, make.machine())
    assert not used_then
    assert "LD_PRELOAD" in why


EXACTLY = Setting("off", Source(SourceKind.PRESET, "preset exact"))


def test_what_is_to_be_exact_has_the_threads_that_python_has(make: Any) -> None:
    settings = replace(make.settings(), amp=EXACTLY)
    variables, (why,) = use_variables(TUNED, settings, {}, make.machine())
    assert not variables
    assert "exact" in why
    found = plan_process_settings(
        lambda it: make_plan(it, make.machine(), make.invocation()),
        settings, {}, make.machine(), physical_cores=8, glibc=True, apart=True,
    )  # fmt: skip
    assert not found.candidates


def test_on_a_gpu_no_threads_are_compared(make: Any) -> None:
    found = planned(make, machine=make.gpus(1))
    assert not found.candidates
    assert "cuda" in found.left["threads"]


def test_a_run_that_tries_a_value_has_its_variable(make: Any) -> None:
    _, tried = with_values(make.settings(), [Candidate("threads", "3", NAME, "3").tried])
    machine = make.machine(cpu=Cpu("some CPU", 4, "a cgroup quota of 4 cores"))
    plain = make_plan(make.settings(), machine, make.invocation())
    assert make.variable(plain, NAME).value == "4"
    invocation = replace(make.invocation(), tuned=tried)
    assert make.variable(make_plan(make.settings(), machine, invocation), NAME).value == "3"


def test_levers_that_were_kept_are_on_and_what_is_left_to_the_run_is_off(make: Any) -> None:
    slower = Compared(("optimizer",), "fused", "slower", Ratio(1.1, 1.2, 1.3))
    report = TuningReport("decided", 9, 1.0, None, (slower,))
    settings = make.settings(compile="auto")
    plan = make_plan(make.settings(compile="default"), make.machine(), make.invocation())
    kept = settings_with_kept(settings, report, plan)
    levers = make_plan(kept, make.machine(), make.invocation()).levers
    assert (levers.optimizer.value, levers.compile.value.asked) == ("keep", "off")


def test_a_kept_setting_is_saved_with_what_it_holds_for() -> None:
    kept = Compared(("threads",), "1", "faster", RATIO, kept=True, against="2",
                    variable=f"{NAME}=1")  # fmt: skip
    slower = replace(kept, verdict="slower", kept=False, variable=f"{NAME}=4")
    report = TuningReport("decided", 9, 1.0, settings=(slower, kept))
    assert tuned_variables(report, 8) == (ONE,)
    assert report.says_something


def later(
    make: Any,
    tuned: Tuned,
    settings: Any,
    environ: dict[str, str] | None = None,
    facts: ScriptFacts | None = None,
) -> tuple[LaunchPlan, tuple[str, ...]]:
    """Return the plan of a later run, and what of the result isn't used."""
    machine = make.machine(cpu=Cpu("some CPU", 8, "8 CPUs in the affinity mask"))
    invocation = replace(make.invocation(environ), facts=facts or ScriptFacts())
    plain = make_plan(settings, machine, invocation)
    return use_result(tuned, settings, machine, invocation, plain)


def test_a_later_run_sets_the_variable_and_says_why(make: Any) -> None:
    plan, unused = later(make, TUNED, make.settings())
    assert not unused
    variable = make.variable(plan, NAME)
    assert (variable.value, variable.source.kind) == ("1", SourceKind.TUNED)
    assert "0.82 (0.80 to 0.85)" in variable.reason
    (hint,) = plan.hints
    assert f"{NAME}=1" in hint
    assert "2026-11-26" in hint


@pytest.mark.parametrize("own", [{"environ": {NAME: "5"}}, {"env": (f"{NAME}=5",)}])
def test_the_users_own_number_wins(make: Any, own: dict[str, Any]) -> None:
    environ, env = own.get("environ", {}), own.get("env", ())
    settings = make.settings(env=env) if env else make.settings()
    plan, unused = later(make, TUNED, settings, environ)
    planned = make.variable(plan, NAME)
    assert (planned.value if planned else environ[NAME]) == "5"
    assert unused, "what isn't used isn't said to be"
    assert not plan.hints


@pytest.mark.parametrize(("cores", "environ"), [(4, {}), (16, {}), (8, {"MKL_NUM_THREADS": "3"})])
def test_where_it_does_not_hold_it_is_not_used_and_told(
    make: Any, cores: int, environ: dict[str, str]
) -> None:
    machine = make.machine(cpu=Cpu("some CPU", cores, f"{cores} CPUs in the affinity mask"))
    variables, (why,) = use_variables(TUNED, make.settings(), environ, machine)
    assert not variables
    assert f"{NAME}=1" in why


@pytest.mark.parametrize(
    ("changes", "valid"),
    [
        ({}, True),
        ({"value": "8"}, True),
        ({"value": "9"}, False),
        ({"value": "0"}, False),
        ({"value": "1\nX=2"}, False),
        ({"value": "٣"}, False),
        ({"name": "LD_PRELOAD"}, False),
    ],
)
def test_only_what_tune_sets_is_read_back(changes: dict[str, str], valid: bool) -> None:
    assert is_valid(replace(ONE, **changes)) is valid


# Worker processes of DataLoaders, and ranks.


def of(found: ProcessSettings, setting: str) -> list[tuple[str, str]]:
    return [(one.name, one.value) for one in found.candidates if one.setting == setting]


@pytest.mark.parametrize(
    ("cores", "physical", "workers", "ranks"),
    [
        (2, 2, ["1"], ["2"]),
        (2, 1, ["1"], []),
        (4, 4, ["1"], ["2", "4"]),
        (16, 8, ["1", "4"], ["2", "4", "8"]),
    ],
)
def test_workers_and_ranks_are_compared_where_there_are_cores_for_them(
    make: Any, cores: int, physical: int, workers: list[str], ranks: list[str]
) -> None:
    found = planned(make, cores, physical)
    assert of(found, "loader workers") == [("--loader-workers", n) for n in workers]
    assert of(found, "ranks") == [("--nproc-per-node", n) for n in ranks]
    assert ("ranks" in found.left) is (not ranks), "what is not compared is told"


@pytest.mark.parametrize(
    ("circumstances", "left"),
    [
        ({"cores": 1}, {"loader workers", "ranks"}),
        ({"apart": False}, {"loader workers", "ranks"}),
        ({"own_ranks": True}, {"ranks"}),
        ({"loader_workers": 0}, {"loader workers"}),
        ({"loader_workers": 3}, {"loader workers"}),
        ({"nproc_per_node": 1}, {"ranks"}),
        ({"strategy": "none"}, {"ranks"}),
        ({"batch": "per-rank"}, {"loader workers", "ranks"}),
    ],
)
def test_where_they_are_not_compared_the_reason_is_told(
    make: Any, circumstances: Any, left: set[str]
) -> None:
    found = planned(make, **circumstances)
    assert {it for it in ("loader workers", "ranks") if not of(found, it)} == left
    assert {it for it in found.left if it in ("loader workers", "ranks")} == left
    assert all(found.left[it] for it in left)


@pytest.mark.parametrize(
    ("step_s", "reading_s", "left"),
    [
        (0.1, 0.05, set()),
        (0.1, 0.001, {"loader workers"}),
        (0.001, 0.0009, {"ranks"}),
        (0.001, 0.0, {"loader workers", "ranks"}),
        (0.0, 0.0, set()),  # no lever was compared, so that nothing is known of a step
    ],
)
def test_what_cannot_help_by_what_is_known_of_a_step_is_not_compared(
    make: Any, step_s: float, reading_s: float, left: set[str]
) -> None:
    plain = Compared((), "", "same", RATIO, step_s=step_s, plain_step_s=step_s)
    report = TuningReport("decided", 9, 1.0, noise=plain, reading_s=reading_s)
    candidates = planned(make).candidates
    useful, why = without_use(candidates, report)
    assert why.keys() == left
    assert {one.setting for one in candidates} - {one.setting for one in useful} == left


RANKS = TunedVariable("--nproc-per-node", "2", "one process", RATIO, 8)
WORKERS = TunedVariable("--loader-workers", "1", "no workers", RATIO, 8)
OPTIONS = replace(TUNED, variables=(RANKS, WORKERS))


def test_a_later_run_has_the_ranks_and_workers(make: Any) -> None:
    plan, unused = later(make, OPTIONS, make.settings())
    assert not unused
    assert plan.processes.value.nproc_per_node == 2
    assert plan.levers.strategy.value.mode == "ddp"
    assert plan.loader_workers is not None
    assert (plan.loader_workers.value, plan.loader_workers.source.kind) == (1, SourceKind.TUNED)
    (hint,) = plan.hints
    assert "--nproc-per-node=2 --loader-workers=1" in hint
    assert is_valid(RANKS)
    assert not is_valid(replace(RANKS, value="9"))


@pytest.mark.parametrize(
    ("own", "ranks", "workers", "count"),
    [
        ({"nproc_per_node": 1}, 1, 1, 1),
        ({"strategy": "none"}, 1, 1, 1),
        ({"batch": "per-rank"}, 1, None, 2),
        ({"loader_workers": 0}, 2, None, 1),
        ({"loader_workers": 3}, 2, 3, 1),
    ],
)
def test_what_a_user_has_set_wins(
    make: Any, own: Any, ranks: int, workers: int | None, count: int
) -> None:
    plan, unused = later(make, OPTIONS, make.settings(**own))
    assert plan.processes.value.nproc_per_node == ranks
    assert (plan.loader_workers.value if plan.loader_workers else None) == workers
    assert len(unused) == count


def test_ranks_of_the_scripts_own_are_never_made_by_a_result(make: Any) -> None:
    plan, _ = later(make, OPTIONS, make.settings(), facts=OWN_RANKS)
    assert plan.processes.value.nproc_per_node == 1
    assert plan.loader_workers is None
    assert any("can't be used" in it and "init_process_group" in it for it in plan.warnings)
