"""Waits for what real processes do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from support import npu_site
from support.npu_site import CACHE

HERE = Path(__file__).parent
FAKE_NPU = HERE.parent / "fake_npu"
WHEEL = "torch-npu==2.13.0"  # its optimizers are the same code from 2.1 to 2.14


REAL_FAILURES = (
    "assertion", "exception", "exit", "file-missing", "host-memory", "interrupted", "killed",
    "segfault",
)  # fmt: skip
# Of the real runs in this folder, `pytest` makes these: one of each kind, and what takes no torch.
ORDINARY = {
    "test_crash_causes.py": (
        *(f"test_a_real_failure[{cause}" for cause in REAL_FAILURES),
        "test_a_code_",
        "test_a_traceback_",
        "test_what_ended_",
        "test_a_script_that_",
        "test_a_good_",
        "test_a_fork_",
        "test_a_failure_",
        "test_quiet_",
        "test_secrets_",
        "test_the_kernel_",
    ),
    "test_output.py": (
        "test_a_line_is_shown_",
        "test_quiet_says_nothing",
        "test_json_receipt_on_stderr",
        "test_secrets_stay_",
        "test_any_command",
        "test_a_dry_run_",
    ),
    "test_run_dirs.py": (),
    "test_runs.py": ("test_a_running_run_is_listed_and_ended", "test_what_kill_can_not_do"),
    "test_completions.py": ("test_the_files_", "test_bash_"),
    "test_bad_input.py": ("test_a_port_in_use", "test_a_run_directory_is_used_once"),
    "test_crash_ranks.py": ("test_a_hidden_rank_is_told_whole",),
    "test_doctor.py": ("test_quick_", "test_a_script_is_judged_"),
    "test_hangs.py": ("test_a_single_process[endless",),
    "test_not_finite.py": ("test_a_diverging_run_is_stopped[1]",),
    "test_planted_secrets.py": ("test_a_plan_tells_",),
    "test_prove.py": ("test_processes_without_", "test_a_run_that_proves_nothing_"),
    "test_python.py": ("test_a_script_runs_in_the_active_environment",),
    "test_restarts.py": ("test_any_command_is_tried_again",),
    "test_signals.py": ("test_a_signal_reaches_the_script", "test_ctrl_c_arrives_once"),
    "test_stopping.py": ("test_ctrl_c_leaves_time_to_save", "test_a_second_ctrl_c_ends_it_now[1]"),
    "test_torchrun.py": (
        "test_shown_ranks_and_their_logs[default",
        "test_the_first_rank_that_fails_gives_the_exit_code[killed",
    ),
}


# Of the others, .ci/run leaves these to be run by hand. What still meets their faults in .ci/run:
FULL = {
    # unit tests of planning and of the configuration
    "test_bad_input.py": tuple(
        f"test_three_lines_and_nothing_done[good.py --{option}"
        for option in (
            "amp", "compile", "config ", "env", "gpus ", "machine ", "nodes ", "nproc", "preset",
        )
    ),
    "test_compile_auto.py": (
        # the copy that is killed; the ends of the launcher; reasons and ranks in
        # component/shim/compile_auto, and two ranks in contract/test_compile_auto_ranks.py
        "test_a_shadow_that_dies_leaves_all_ranks_", "test_a_rank_that_fails_while_another_",
        "test_a_shadow_that_dies_leaves_the_run_alone[SIGSEGV",
        "test_an_end_from_outside_leaves_nothing[SIGINT-worker",
        "test_an_end_from_outside_leaves_nothing[SIGKILL-worker",
        "test_an_end_from_outside_leaves_nothing[SIGINT-launcher",
        "test_what_stays_eager[second", "test_what_stays_eager[own", "test_what_stays_eager[no",
        "test_what_stays_eager[shared",
        "test_where_nothing_forks_", "test_a_script_that_ends_meanwhile",
        "test_workers_of_a_loader_", "test_what_is_compiled_again_", "test_what_stays_eager[shapes",
    ),
    # real failures of the others' kinds; unit tests of the judge with what each wrote
    "test_crash_causes.py": tuple(
        f"test_a_real_failure[{cause}"
        for cause in ("bus-error", "disk-full", "pickling", "recursion", "syntax", "usage")
    ),
    "test_crash_misread.py": tuple(  # the others; unit tests with what each wrote
        f"test_it_is_told_for_what_it_is[{name}"
        for name in ("apostrophes", "group", "handled f", "last line", "lock", "no file", "socket")
    ),
    "test_crash_ranks.py": (
        # the other way to lose a peer, the matrix of faults, and the unit tests of the judge
        "test_a_rank_that_lost_its_peer_is_not_the_first[late", "test_a_pasted_plan_",
        "test_a_rank_that_lost_its_peer_is_not_the_first[kill",
        "test_one_that_fails_and_takes_its_time_to_end[",
    ),
    # unit tests of cards and checks; test_the_installed_torch
    "test_doctor.py": ("test_80_columns_", "test_only_and_skip_", "test_the_whole_examination_"),
    # unit tests of the bench; component/hardware/test_torch_trial.py
    "test_doctor_torch.py": ("test_the_processor_is_measured", "test_a_compiler_that_fails"),
    # the other disks that are full
    "test_full_disk.py": ("test_a_disk_that_stays_full_", "test_what_had_no_room_"),
    "test_hangs.py": (
        # each is an excuse, which unit tests make from recorded stacks; three run for real
        "test_a_report_goes_on", "test_a_compilation_", "test_the_script_may_save_",
        "test_what_is_no_hang[collectives]", "test_what_is_no_hang[first step]",
        "test_what_is_no_hang[validation]", "test_what_is_no_hang[checkpoint]",
        "test_who_waits_for_a_person_has_not_hung", "test_a_stopped_run_",
        # an endless loop, and unit tests of the stacks by py-spy
        "test_a_single_process[C call with the lock",
    ),
    "test_loopback.py": ("test_ranks_of_one_node_listen_on_loopback_alone[own group",),
    # a terminal that goes away is heard once by each rank; Ctrl-C leaves time to save
    "test_lost_outputs.py": (
        "test_the_progress_of_a_terminal_that_is_gone_",
        "test_a_terminal_that_goes_away_leaves_time_to_save",
        "test_a_reader_of_other_ranks_", "test_an_answer_that_",
        "test_the_exit_code_is_the_scripts_whoever_reads_the_receipt[full disk-0",
        "test_the_exit_code_is_the_scripts_whoever_reads_the_receipt[no reader-0",
        "test_the_exit_code_is_the_scripts_whoever_reads_the_receipt[no reader of either-7",
    ),
    # unit tests of the NaN guard, and a run of one process
    "test_not_finite.py": (
        "test_off", "test_a_loss_with_finite_", "test_a_diverging_run_is_stopped[2",
        "test_a_diverging_run_is_warned_of",
    ),
    "test_npu_runs.py": (
        # levers on a simulated NPU of one rank; unit tests of loss scaling and the swap
        "test_a_model_that_fails_to_compile_", "test_a_skipped_step_", "test_fp16_is_refused_",
        "test_a_script_with_a_scaler_", "test_two_ranks_skip_", "test_fp16_trains_",
    ),
    # one that is killed, and ends of runs that tune; a lever that goes wrong
    "test_prove.py": (
        "test_an_end_from_outside_leaves_nothing[ctrl-C", "test_scripts_that_end[an error",
        "test_scripts_that_end[no torch", "test_the_runs_may_write_", "test_what_bf16_rounds_",
        "test_scripts_that_end[seeded", "test_scripts_that_end[nine", "test_a_failure_with_",
        "test_the_runs_draw_the_same_numbers_",  # contract/test_levers_process.py
        # component/shim/prove/test_leading.py
        "test_a_script_with_ranks_of_its_own_", "test_a_rank_that_ends_alone",
        "test_what_the_ranks_of_a_model_draw_",
        "test_an_end_from_outside_leaves_nothing[kill -9-ranks",
    ),
    # what a pipe gets in test_a_line_is_shown_
    "test_output.py": ("test_no_progress_in_a_pipe_", "test_a_run_that_is_ended_has_"),
    "test_python.py": ("test_doctor_tries_",),
    "test_restarts.py": (
        # the same by one process, or by torchrun
        "test_strays_are_gone_before_the_next_attempt[torchrun]", "test_the_same_hang_",
        "test_what_can_not_heal_is_not", "test_a_module_that_is_no_python_",
        "test_what_can_heal_is_tried_again[",  # test_restarts_nodes.py, and any command
        "test_a_run_that_hangs_is_killed_",  # hangs in faults/test_matrix.py
        "test_the_wait_ends_at_once_when_asked[torchrun",
        "test_the_wait_ends_at_once_when_asked[direct, SIGUSR2",
    ),
    # component/shim/tune
    "test_tune.py": (
        "test_what_inductor_makes_", "test_where_nothing_can_be_", "test_a_script_may_write_",
        "test_an_end_from_outside_leaves_nothing[ctrl-C",  # of those that prove, and kill -9
    ),
    # one that is ended, and one whose launcher is killed
    "test_runs.py": ("test_a_run_that_waits_to_be_", "test_a_launcher_that_does_not_"),
    # ends of runs that tune levers, and of those that prove
    "test_tune_settings.py": ("test_an_end_from_outside_",),
    # contract/test_tune_ranks.py; the launcher that is killed
    "test_tune_ranks.py": (
        "test_two_ranks_compare_a_fused_optimizer[",
        "test_an_end_from_outside_leaves_nothing_of_two_ranks[",
        "test_a_rank_that_leaves_the_others_ends_the_run[",  # component/shim/tune/test_ranks.py
    ),
    # two nodes that start again, one that dies with the store, and one that dies silently
    "test_restarts_nodes.py": ("test_a_node_leaves_and_one_comes", "test_a_node_that_is_silent_"),
    "test_signals.py": (
        "test_a_signal_reaches_every_rank[SIGUSR",  # the same with SIGTERM
        "test_ctrl_z_stops_all_of_a_run_until_it_is_continued[2]",
    ),
    "test_stopping.py": (  # the same of one process
        "test_time_to_save_ends[SIGTERM-2]", "test_time_to_save_ends[SIGHUP-2]",
        "test_a_second_ctrl_c_ends_it_now[2",
    ),
    "test_torchrun.py": (
        "test_unrelated_copies_", "test_two_nodes[static", "test_two_gloo_runs_at_once",
        "test_shown_ranks_and_their_logs[1",
        "test_the_first_rank_that_fails_gives_the_exit_code[badly",
    ),
}  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all that `pytest` doesn't make, and what .ci/run doesn't, either."""
    for item in items:
        if item.path.parent == HERE:
            names = ORDINARY.get(item.path.name, ("none",))
            if names and not item.name.startswith(names):
                left = item.name.startswith(FULL.get(item.path.name, ("none",)))
                item.add_marker(pytest.mark.full if left else pytest.mark.runs)


@pytest.fixture
def only_run_dir(tmp_path: Path) -> Callable[[], Path]:
    """Return the one run directory that the test has made."""

    def find() -> Path:
        (run_dir,) = (tmp_path / "fasttrain_runs").glob("[!.]*/")
        return run_dir

    return find


@pytest.fixture
def alive() -> Callable[[int], bool]:
    """Say whether a process lives, zombies excepted."""

    def check(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    return check


@pytest.fixture(scope="session")
def wheel() -> Path:
    """Return the wheel of torch_npu, fetched once, where the simulated device can be built."""
    if not shutil.which("c++") and not shutil.which("g++"):
        pytest.skip("no C++ compiler to build the simulated device with")
    folder = CACHE / "wheel"
    if not any(folder.glob("*.whl")):
        done = subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps",
             "--only-binary=:all:", f"--dest={folder}", WHEEL],
            capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            pytest.skip(f"{WHEEL} can't be had: {done.stderr.strip().splitlines()[-1]}")
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="session")
def device_built(wheel: Path) -> Path:
    """Build the simulated device, which takes a minute that no run's time limit has; the wheel."""
    program = (
        "import sys, pathlib, simulated_npu; simulated_npu.activate(pathlib.Path(sys.argv[1]))"
    )
    environ = {**os.environ, "PYTHONPATH": str(FAKE_NPU)}
    argv = [sys.executable, "-c", program, str(CACHE)]
    subprocess.run(argv, env=environ, check=True, capture_output=True, timeout=280)
    return wheel


@pytest.fixture
def npus(device_built: Path, tmp_path: Path) -> Callable[..., dict[str, str]]:
    """Return the variables of a machine with simulated NPUs."""

    def make(chips: str = "910b3_24.1", count: int = 2) -> dict[str, str]:
        found = npu_site.write(tmp_path / "npus", device_built, CACHE, chips)
        path = f"{found['PATH']}{os.pathsep}{os.environ['PATH']}"
        return {**found, "PATH": path, "FAKE_NPU_COUNT": str(count)}

    return make
