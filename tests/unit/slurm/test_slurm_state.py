"""Answers of squeue and sacct, recorded on SLURM 22.05.8, and what is read from them."""

from __future__ import annotations

import subprocess

import pytest

from fasttrain.slurm.refusals import refused, sbatch_words
from fasttrain.slurm.state import JobState, parse_sacct, parse_squeue

SQUEUE = """\
55320545|COMPLETED|None|0|0|node[1-2]|/w/slurm/%j_0_log.out|
55320546_1|PENDING|JobArrayTaskLimit|0|0||/dev/null|
55320546_0|FAILED|NonZeroExitCode|768|0|node1|/dev/null|
55320547|CANCELLED|None|15|1|node1|/dev/null|
55320548|RUNNING|None|0|2|node2|/dev/null|
"""
SACCT = """\
55320545|COMPLETED|None|0:0|node[1-2]
55320547|CANCELLED by 1000|None|0:15|node1
55320549_3|FAILED|NonZeroExitCode|7:0|node1
55320550|PENDING|None|0:0|None assigned
55320551|NODE_FAIL|None|1:0|node2
"""


def test_squeue() -> None:
    states = {state.job_id: state for state in parse_squeue(SQUEUE)}
    assert states["55320545"].stdout == "/w/slurm/%j_0_log.out"
    assert states["55320546_0"].exit_code == 3
    assert states["55320546_1"] == JobState(
        "55320546_1", "PENDING", "JobArrayTaskLimit", stdout="/dev/null"
    )
    assert (states["55320547"].exit_code, states["55320547"].restarts) == (143, 1)
    assert not states["55320548"].ended
    assert str(states["55320548"]) == "RUNNING on node2"
    assert str(states["55320546_1"]) == "PENDING (JobArrayTaskLimit)"


def test_sacct() -> None:
    states = {state.job_id: state for state in parse_sacct(SACCT)}
    assert (states["55320547"].state, states["55320547"].exit_code) == ("CANCELLED", 143)
    assert states["55320549_3"].exit_code == 7
    assert (states["55320550"].exit_code, states["55320550"].nodes) == (None, "")
    assert states["55320551"].ended


@pytest.mark.parametrize("text", ["", "\n", "slurm_load_jobs error: x", "a|b", "a|b|c|d|e|f|g|"])
def test_rubbish_is_no_state(text: str) -> None:
    assert list(parse_squeue(text)) == []
    assert list(parse_sacct(text)) == []


# What submitit's error holds; sbatch's lines recorded on SLURM 22.05.8.
@pytest.mark.parametrize(
    ("said", "slug"),
    [
        ("sbatch: error: invalid partition specified: nope", "slurm-partition"),
        ("sbatch: error: Batch job submission failed: Invalid account or account/partition"
         " combination specified", "slurm-account"),
        ("sbatch: error: Batch job submission failed: Requested node configuration is not"
         " available", "slurm-resources"),
        ("sbatch: error: Batch job submission failed: Invalid feature specification",
         "slurm-constraint"),
        ("sbatch: error: Batch job submission failed: Unable to contact slurm controller"
         " (connect failure)", "slurm-down"),
        ("sbatch: error: Batch job submission failed: Something new", "slurm-refused"),
    ],
)  # fmt: skip
def test_refusals_are_known_by_their_words(said: str, slug: str) -> None:
    error = refused(RuntimeError(f"a note of the site\n{said}"), 60)
    assert error.slug == slug
    assert said.removeprefix("sbatch: error: ") in error.why


def test_a_refusal_has_each_of_sbatchs_words_once() -> None:
    said = "sbatch: error: a\nsbatch: error: a\nTraceback: error: not sbatch's\nsbatch: error: b"
    assert sbatch_words(said) == "a; b"


def test_an_sbatch_that_was_ended_for_its_silence() -> None:
    error = RuntimeError("")
    error.__cause__ = subprocess.CalledProcessError(124, ["timeout"])
    assert refused(error, 60).slug == "slurm-hangs"
