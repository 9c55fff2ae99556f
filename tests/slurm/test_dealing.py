"""How xdist deals these tests to one process, so that no two need a cluster at once, and others."""

from __future__ import annotations

from support.session import SlurmTogether


def test_tests_on_slurm_stay_together() -> None:
    scope = SlurmTogether._split_scope
    dealer = object.__new__(SlurmTogether)
    first = scope(dealer, "tests/slurm/test_cluster.py::test_a")
    assert scope(dealer, "tests/slurm/test_dealing.py::test_b[1]") == first
    others = ["tests/unit/test_a.py", "tests/unit/hardware/test_cluster.py"]
    assert [scope(dealer, f"{path}::test_b") for path in others] == others


def test_tests_of_faults_are_dealt_one_by_one() -> None:
    dealer = object.__new__(SlurmTogether)
    tests = [f"tests/faults/test_matrix.py::test_cell[{number}]" for number in range(2)]
    assert [SlurmTogether._split_scope(dealer, test) for test in tests] == tests
