"""The device bench runs over the CPU's copy engine, and says so where there is no device. What the times are is never
tested here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("rich")

from telemetry.commands.bench.device_moves import HOST, MOVES, RELEASES, Plan
from telemetry.commands.bench.device_shared import SHARED

ROOT = Path(__file__).parent.parent


def bench(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )


COMMAND = "from telemetry.commands.bench import app; app()"
WITHOUT_TYPER = """
import sys
sys.modules["typer"] = None
from telemetry.commands.bench.device import main
sys.exit(main())
"""


def test_every_second_round_goes_backwards_after_one_that_is_not_counted():
    plan = Plan("cpu", 1, ("a", "b"), rounds=2, repeats=2, warm_ups=1)
    assert [name for _, name in plan.turns()] == list("ba" + "aabb" + "bbaa")
    assert [number for number, _ in plan.turns()] == [-1] * 2 + [0] * 4 + [1] * 4


def test_it_measures_every_way_over_the_cpu_s_engine_and_needs_no_typer(run_dir):
    finished = bench(WITHOUT_TYPER, "--device", "cpu", "--quick", "--json")
    assert finished.returncode == 0, finished.stderr
    report = json.loads(finished.stdout)
    assert report["bench"] == "device"
    assert not report["comparable"]
    rows = {(row["case"], row["contender"]): row for row in report["contenders"]}
    assert [name for case, name in rows if case.startswith("20 MB to the device")] == list(MOVES)
    assert [name for case, name in rows if "two devices" in case] == list(SHARED)
    assert [name for case, name in rows if "release" in case] == list(RELEASES)
    assert all(row["p50_ns"] > 0 for row in rows.values() if "release" not in row["case"])
    assert rows["20 MB to the device", HOST]["remark"]
    assert len(report["requirements"]) == 5


def test_without_a_device_it_is_refused_in_one_line(run_dir):
    finished = bench(COMMAND, "device")
    assert finished.returncode == 1
    assert finished.stdout == ""
    assert finished.stderr.startswith("arena bench: no CUDA device")
    assert len(finished.stderr.splitlines()) == 1


@pytest.mark.parametrize("arguments", [("--device", "xpu"), ("--device", "cpu", "--quick", "--check")])
def test_what_makes_no_sense_is_refused_before_anything_is_measured(arguments):
    finished = bench(COMMAND, "device", *arguments)
    assert finished.returncode == 2
    assert "Traceback" not in finished.stderr
