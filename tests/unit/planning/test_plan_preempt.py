from __future__ import annotations

from dataclasses import replace

import pytest

from fasttrain.model.attempts import Preempt
from fasttrain.model.errors import FasttrainError
from fasttrain.planning.plan import make_plan


def _slug(make, machine, **options):
    environ = options.pop("environ", {})
    with pytest.raises(FasttrainError) as caught:
        make.plan(machine, environ, **options)
    return caught.value.slug


def test_signals_are_left_to_the_script(make):
    preempt = make.plan(make.machine()).preempt
    assert preempt.value == Preempt("signal")
    assert not preempt.source.explicit


def test_snapshots(make):
    preempt = make.plan(make.machine(), preempt="snapshot", snapshot_every=30).preempt
    assert preempt.value == Preempt("snapshot", ("SIGUSR2", "SIGTERM"), 30, "no")
    assert str(preempt.source) == "--preempt"


def test_a_rank_leaves_sigterm_to_its_agent(make):
    preempt = make.plan(make.gpus(2), gpus="all", preempt="snapshot").preempt
    assert preempt.value.signals == ("SIGUSR2",)


def test_slurm_names_the_signal_and_counts_the_restarts(make):
    settings = make.settings(preempt="snapshot")
    invocation = replace(make.invocation({}), warning="SIGUSR1", restart_count=1)
    preempt = make_plan(settings, make.machine(), invocation).preempt.value
    assert preempt == Preempt("snapshot", ("SIGUSR1", "SIGTERM"), None, "if-there")


@pytest.mark.parametrize(
    ("environ", "options", "resume"),
    [
        ({}, {}, "no"),
        ({"FASTTRAIN_RESTART_COUNT": "0"}, {}, "no"),
        ({"FASTTRAIN_RESTART_COUNT": "2"}, {}, "if-there"),
        ({}, {"resume": "runs/a"}, "required"),
        ({"FASTTRAIN_RESTART_COUNT": "2"}, {"resume": "runs/a"}, "required"),
    ],
)
def test_what_a_run_goes_on_from(make, environ, options, resume):
    plan = make.plan(make.machine(), environ, preempt="snapshot", **options)
    assert plan.preempt.value.resume == resume


def test_what_excludes_each_other(make):
    assert _slug(make, make.machine(), resume="runs/a") == "preempt-options"
    assert _slug(make, make.machine(), snapshot_every=5) == "preempt-options"
    both = {"preempt": "snapshot", "resume": "runs/a", "run_dir": "runs/b"}
    assert _slug(make, make.machine(), **both) == "preempt-options"


@pytest.mark.parametrize("strategy", ["none", "fsdp"])
def test_ranks_that_are_not_ours_to_bring_back(make, strategy):
    options = {"gpus": "all", "preempt": "snapshot", "strategy": strategy}
    assert _slug(make, make.gpus(2), **options) == "preempt-ranks"
    assert make.plan(make.gpus(2), **{**options, "strategy": "ddp"}).preempt.value.mode == (
        "snapshot"
    )


def test_a_command_takes_no_snapshots(make):
    with pytest.raises(FasttrainError) as caught:
        make.plan(make.machine(), {}, make.command, preempt="snapshot")
    assert caught.value.slug == "no-python-levers"
