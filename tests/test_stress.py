"""A short slice of each long run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
