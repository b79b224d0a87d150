"""A short slice of each long run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stress import gate

ROOT = Path(__file__).parent.parent


def run_messages(*arguments: str) -> dict:
    finished = subprocess.run(
        [sys.executable, "-m", "tests.stress.messages", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=110,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return json.loads(finished.stdout)


@pytest.mark.parametrize("cpus", [1, 2])
def test_messages_of_every_size_arrive_unchanged_and_leave_nothing(cpus):
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < cpus:
        pytest.skip(f"needs {cpus} CPUs")
    outcome = run_messages("--messages", "6000", "--cpus", ",".join(map(str, usable[:cpus])))
    assert outcome["wrong"] == 0
    assert outcome["leaks"] == []
    assert outcome["messages_by_path"]["inline"] > 0
    assert outcome["messages_by_path"]["block"] > 0
    assert outcome["messages_by_path"]["fragments"] > 0
    assert sum(outcome["messages_by_path"].values()) == 6000


@pytest.mark.parametrize("tickets", [True, False])
def test_no_block_is_reused_before_its_copies_have_passed(run_dir, tickets):
    outcome = gate.run(1500, seed=1, gated=True, tickets=tickets)
    assert (outcome["wrong"], outcome["held_at_end"], outcome["exit_code"]) == (0, 0, 0)
    assert outcome["messages_by_path"]["block"] > 700
    assert (outcome["ways"]["ticket"] > 300) is tickets


def test_without_the_gate_that_run_finds_corrupted_bytes(run_dir):
    assert gate.run(1500, seed=1, gated=False)["wrong"]
