"""The all-reduce bench runs, and what it makes of its times is right. What the times are is never tested here."""

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

typer = pytest.importorskip("typer")
pytest.importorskip("rich")

from telemetry.commands.bench.allreduce import KIB, MIB, SIZES, TOKEN_BYTES, Line, _published  # noqa: E402
from telemetry.commands.bench.allreduce_cells import Case, Cell, _cell  # noqa: E402
from telemetry.commands.bench.harness import Block  # noqa: E402
from telemetry.commands.bench.plot import svg  # noqa: E402

ROOT = Path(__file__).parent.parent

PUBLISHED = """gpu,tp,tokens,megabytes,ca_1stage_us,nccl_us,symm_mem_two_shot_us,best
H100,2,32,0.5,7,11,14,ca_1stage
H100,4,32,0.5,10,16,16,ca_1stage
B200,2,32,0.5,9,12,,ca_1stage
"""


def bench(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from telemetry.commands.bench import app; app()", "allreduce", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env=os.environ | (environment or {}),
    )


def test_the_sizes_hold_those_that_were_published_and_those_of_decoding():
    published = {TOKEN_BYTES * tokens for tokens in (32, 64, 96, 128, 192, 256, 1024, 2048, 3062, 4096)}
    assert published < set(SIZES)
    assert (min(SIZES), max(SIZES)) == (8 * KIB, 64 * MIB)
    assert list(SIZES) == sorted(set(SIZES))


def test_an_operation_takes_as_long_as_its_slowest_rank():
    by_rank = [[[10, 50, 20], [10, 10, 10]], [[40, 30, 10], [20, 20, 20]]]  # by rank, round and operation
    cell = _cell(Case(8 * KIB, rotating=False), "arena", by_rank)
    assert [block.p50 for block in cell.blocks] == [40, 20]
    assert [block.p99 for block in cell.blocks] == [50, 20]
    assert cell.by_rank == [10, 20]


def test_the_best_gives_a_new_tensor_and_is_compared_round_by_round():
    case = Case(8 * KIB, rotating=True)
    rounds = {"arena": [10, 20], "gloo": [100, 300], "gloo, in place": [1, 1]}
    cells = {name: Cell(case, name, [Block(p50, p50) for p50 in times], [1.0]) for name, times in rounds.items()}
    line = Line(case, cells, "gloo")
    assert line.best == "arena"
    assert line.speed_up("arena").median == pytest.approx(12.5)
    assert line.case.tokens == 0.5


def test_published_figures_are_those_of_the_same_world(tmp_path):
    (tmp_path / "figures.csv").write_text(PUBLISHED)
    assert _published(tmp_path / "figures.csv", 2) == {
        32 * TOKEN_BYTES: {"H100: nccl, best": "11, 7", "B200: nccl, best": "12, 9"}
    }


@pytest.mark.parametrize("text", ["", "gpu,tp\nH100,2\n", "gpu,tp,tokens\nH100,two,1\n"])
def test_a_file_without_figures_is_refused_or_empty(tmp_path, text):
    (tmp_path / "figures.csv").write_text(text)
    if not text:
        assert _published(tmp_path / "figures.csv", 2) == {}
        return
    with pytest.raises(typer.BadParameter, match="published figures"):
        _published(tmp_path / "figures.csv", 2)


def test_every_path_and_the_library_are_measured_in_one_run(run_dir, tmp_path):
    picture = tmp_path / "plot.svg"
    ran = bench("--sizes", "8,1024", "--rounds", "1", "--json", "--plot", str(picture))
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["comparable"] is False
    assert {(row["bytes"], row["inputs"], row["contender"]) for row in found["rows"]} == {
        (size, inputs, name)
        for size in (8 * KIB, MIB)
        for inputs in ("hot", "rotating")
        for name in ("arena", "cpu_one_shot", "cpu_two_shot", "gloo", "gloo, in place")
    }
    assert all(0 < row["p50_ns"] <= row["p99_ns"] and len(row["p50_ns_by_rank"]) == 2 for row in found["rows"])
    assert [one["required"] for one in found["requirements"]] == [10.0, 10.0, 3.0, 3.0]
    assert list(run_dir.iterdir()) == []
    texts = [one.text or "" for one in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text")]
    assert texts[0].startswith("all-reduce, 2 ranks, ")
    assert {"8 KiB", "arena", "cpu_one_shot", "gloo, in place"} <= set(texts)


@pytest.mark.parametrize(
    "lines",
    [
        {"one": [(8 * KIB, 1000.0)]},
        {"slow": [(8 * KIB, 9.9e8), (64 * MIB, 1e9)], "fast": [(8 * KIB, 1000.0), (64 * MIB, 10000.0)]},
    ],
)
def test_a_picture_holds_every_point_within_its_frame(lines):
    drawn = ElementTree.fromstring(svg("<title> & more", lines))
    assert next(drawn.iter("{http://www.w3.org/2000/svg}text")).text == "<title> & more"
    points = list(drawn.iter("{http://www.w3.org/2000/svg}circle"))
    assert len(points) == sum(map(len, lines.values()))
    for point in points:
        assert 70 <= float(point.get("cx", 0)) <= 810
        assert 40 <= float(point.get("cy", 0)) <= 520


def test_the_table_ends_with_the_best_and_its_speed_up(run_dir, tmp_path):
    (tmp_path / "figures.csv").write_text(PUBLISHED)
    ran = bench("--sizes", "512", "--quick", "--against", str(tmp_path / "figures.csv"))
    assert ran.returncode == 0, ran.stderr
    heading = next(line for line in ran.stdout.splitlines() if line.strip().startswith("tokens"))
    assert heading.split()[-3:] == ["best", "over", "gloo"]
    assert "H100: nccl, best" in heading
    assert "11, 7" in ran.stdout
    assert max(map(len, ran.stdout.splitlines())) <= 200


@pytest.mark.parametrize(
    "arguments",
    [
        ["--device", "abacus"],
        ["--sizes", "x"],
        ["--sizes", "0"],
        ["--world", "1"],
        ["--quick", "--check"],
        ["--plot", "/nowhere/x.svg"],
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_runs(arguments):
    ran = bench(*arguments)
    assert ran.returncode == 2, ran.stdout
    assert "Error" in ran.stderr
