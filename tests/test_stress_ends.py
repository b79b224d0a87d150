"""A slice of the runs that kill, stop and wear down: the crash matrix, signals at random, the soak."""

import pytest

from tests.stress import matrix, signals, soak
from tests.support.fleet import Fleet

SLICE = [case for number, case in enumerate(matrix.CASES) if number % 4 == 0]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("role", ["writer", "reader"])
def test_a_process_killed_at_a_named_point_leaves_the_others_right_or_told(run_dir, role):
    for killed, point in SLICE:
        if killed == role:
            with Fleet() as fleet:
                matrix.case(fleet, run_dir, killed, point)


@pytest.mark.stress
@pytest.mark.parametrize(("role", "point"), matrix.CASES)
def test_every_point_of_the_crash_matrix(run_dir, role, point):
    with Fleet() as fleet:
        matrix.case(fleet, run_dir, role, point)


def test_signals_at_random_hurt_nobody_but_whom_they_kill():
    outcome = signals.run(6, 60.0, seed=5)
    assert outcome["faults"] == []
    assert outcome["rounds"] == 6
    assert outcome["messages"] > 0
    assert any(kind.startswith("kill") for kind in outcome["kinds"])


def test_a_short_soak_changes_and_leaks_nothing():
    outcome = soak.run(5.0, seed=1, restart_s=2.0)
    assert outcome["faults"] == []
    assert outcome["held_at_end"] == 0
    assert outcome["restarts"] > 0
    assert outcome["messages"] > 0
