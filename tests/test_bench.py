"""The bench commands run, and what they make of their times is right. What the times are is never tested here."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

typer = pytest.importorskip("typer")
pytest.importorskip("rich")

from rich.console import Console  # noqa: E402

from telemetry.commands.bench import floor, report  # noqa: E402
from telemetry.commands.bench.children import BlockFailed, fork_reader, reap, run_apart  # noqa: E402
from telemetry.commands.bench.contenders import crew, why_missing  # noqa: E402
from telemetry.commands.bench.footprint import SharedMap, shared_maps  # noqa: E402
from telemetry.commands.bench.harness import (  # noqa: E402
    Block,
    Side,
    Spread,
    alternate,
    p50s,
    p99s,
    paired,
    quantile,
    spread,
    summarise,
)
from telemetry.commands.bench.iceoryx import Iceoryx2  # noqa: E402
from telemetry.commands.bench.options import Settings, settings  # noqa: E402
from telemetry.commands.bench.peers import MultiprocessingPipe, Pyzmq, PyzmqTensor, TorchQueue  # noqa: E402
from telemetry.commands.bench.queue import round_trips  # noqa: E402
from telemetry.commands.bench.quiet import Plan  # noqa: E402
from telemetry.commands.bench.report import Report, duration  # noqa: E402
from telemetry.commands.bench.transfers import broadcast  # noqa: E402

ROOT = Path(__file__).parent.parent
DEADLINE_S = 30.0


# --- statistics ---------------------------------------------------------------------------------------------------


def test_quantiles_are_values_that_occurred():
    ordered = list(range(100, 200))
    assert quantile(ordered, 0.5) == 150
    assert quantile(ordered, 0.99) == 199
    assert quantile([7], 0.99) == 7
    assert quantile([1, 2], 0.5) == 2


def test_a_block_is_summarised_in_any_order():
    assert summarise([5, 1, 4, 2, 3]) == Block(p50=3, p99=5)


def test_the_figure_is_the_median_of_the_ratios_of_pairs_and_not_the_ratio_of_medians():
    assert paired([10, 40, 90], [10, 20, 30]) == Spread(median=2.0, low=1.0, high=3.0)
    assert paired([4, 100, 6], [4, 10, 2]) == Spread(median=3.0, low=1.0, high=10.0)


def test_rounds_without_a_partner_are_left_out():
    assert paired([2, 4], [1, 1, 1, 1]) == Spread(median=3.0, low=2.0, high=4.0)


def test_a_spread_of_one_round_is_that_round():
    assert spread([3.5]) == Spread(3.5, 3.5, 3.5)


def test_columns_of_blocks_keep_the_order_of_the_rounds():
    blocks = [Block(3, 30), Block(1, 10), Block(2, 20)]
    assert p50s(blocks) == [3, 1, 2]
    assert p99s(blocks) == [30, 10, 20]


# --- turns ----------------------------------------------------------------------------------------------------------


def test_every_second_round_goes_backwards():
    order: list[str] = []
    sides = [Side(name, partial(order.append, name), rounds=3) for name in "abc"]
    turns = alternate(sides, lambda text: None)
    assert "".join(order) == "abc" + "cba" + "abc"
    assert {name: len(blocks) for name, blocks in turns.blocks.items()} == {"a": 3, "b": 3, "c": 3}


def test_a_side_with_fewer_rounds_is_in_the_first_ones():
    order: list[str] = []
    sides = [Side("a", partial(order.append, "a"), rounds=3), Side("b", partial(order.append, "b"), rounds=1)]
    alternate(sides, lambda text: None)
    assert order == ["a", "b", "a", "a"]


def _fail():
    raise BlockFailed("Traceback ...\nValueError: no")


def test_a_guest_that_fails_leaves_and_says_why():
    turns = alternate(
        [Side("ours", lambda: 1, rounds=2), Side("theirs", _fail, rounds=2, guest=True)], lambda text: None
    )
    assert turns.blocks == {"ours": [1, 1]}
    assert turns.failed == {"theirs": "ValueError: no"}


def test_our_own_failure_ends_the_run_and_names_the_side():
    with pytest.raises(BlockFailed, match=r"^ours: Traceback"):
        alternate([Side("ours", _fail, rounds=1)], lambda text: None)


# --- processes ------------------------------------------------------------------------------------------------------


def test_a_block_returns_its_value_from_another_process():
    assert run_apart(lambda: (os.getpid() != os.getppid(), "value"), DEADLINE_S) == (True, "value")


def test_what_a_block_raises_arrives_with_its_traceback():
    with pytest.raises(BlockFailed, match=r"in _divide\n(.*\n)+ZeroDivisionError") as caught:
        run_apart(_divide, DEADLINE_S)
    assert caught.value.reason == "ZeroDivisionError: division by zero"


def _divide():
    return 1 / 0


def test_a_block_that_dies_is_noticed_at_once():
    with pytest.raises(BlockFailed, match="without a word"):
        run_apart(lambda: os.kill(os.getpid(), signal.SIGKILL), DEADLINE_S)


def test_a_reader_that_raises_fails_its_block_at_once():
    def block():
        reap([fork_reader(_divide)])

    with pytest.raises(BlockFailed, match=r"a reader failed:\n(.*\n)+ZeroDivisionError"):
        run_apart(block, DEADLINE_S)


def test_a_hanging_block_ends_at_its_deadline_together_with_its_readers(tmp_path):
    def block():
        (tmp_path / "reader").write_text(str(fork_reader(signal.pause)))
        signal.pause()

    with pytest.raises(BlockFailed, match="no result within 2 s"):
        run_apart(block, 2.0)
    assert_ends(int((tmp_path / "reader").read_text()))


def test_killing_the_command_leaves_no_process(tmp_path):
    script = f"""
import os, pathlib, signal
from telemetry.commands.bench.children import fork_reader, run_apart
def block():
    reader = fork_reader(signal.pause)
    pathlib.Path({str(tmp_path / "new")!r}).write_text(f"{{os.getpid()}} {{reader}}")
    os.rename({str(tmp_path / "new")!r}, {str(tmp_path / "pids")!r})
    signal.pause()
run_apart(block, 60)
"""
    command = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT)
    wait_until((tmp_path / "pids").exists, "the block to start")
    command.kill()
    command.wait()
    for pid in (tmp_path / "pids").read_text().split():
        assert_ends(int(pid))


def assert_ends(pid: int) -> None:
    """Gone, or a zombie that init has not collected yet."""

    def ended() -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
        except (FileNotFoundError, ProcessLookupError):
            return True

    wait_until(ended, f"process {pid} to end")


def wait_until(condition, what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {DEADLINE_S} s for {what}"
        time.sleep(0.01)


# --- contenders -----------------------------------------------------------------------------------------------------


def test_the_floor_returns_sorted_times_without_the_dropped():
    times = run_apart(partial(floor.block, 2, 50, 5), DEADLINE_S)
    assert len(times) == 45
    assert times == sorted(times)


def test_the_floor_broadcasts_the_object_that_every_contender_broadcasts():
    assert [len(floor.OBJ[key]) for key in ("req", "ids", "blocks")] == [8, 64, 8]


@pytest.mark.parametrize("peer", [MultiprocessingPipe, Pyzmq, Iceoryx2])
def test_a_peer_brings_every_step_to_every_reader_and_its_answers_back(peer):
    skip_without(peer)
    times = run_apart(partial(round_trips, peer, 2, 50, 5), DEADLINE_S)
    assert len(times) == 45
    assert times == sorted(times)


@pytest.mark.parametrize("peer", [MultiprocessingPipe, Pyzmq, Iceoryx2])
def test_a_peer_does_not_change_the_step(peer):
    skip_without(peer)

    def block():
        with crew(peer(), 2, lambda ends: ends.send(ends.receives[0]())) as at_work:
            return at_work.exchange(floor.OBJ)

    assert run_apart(block, DEADLINE_S) == [floor.OBJ, floor.OBJ]


@pytest.mark.parametrize("peer", [MultiprocessingPipe, PyzmqTensor, TorchQueue])
def test_a_peer_brings_a_tensor_whose_bytes_are_checked(peer):
    skip_without(peer)
    timed = run_apart(partial(broadcast, peer, 2, 1 << 20, 2), DEADLINE_S)
    assert timed.times.p50 > 0
    assert timed.yardstick.p50 > 0


def skip_without(peer) -> None:
    why = why_missing(peer)
    if why:
        pytest.skip(f"{peer.name}: {why}")


def test_a_missing_library_is_told_from_a_broken_one(tmp_path, monkeypatch):
    (tmp_path / "broken_for_bench.py").write_text("import missing_for_bench")
    monkeypatch.syspath_prepend(tmp_path)

    class Missing(MultiprocessingPipe):
        modules = ("missing_for_bench.part",)

    class Broken(MultiprocessingPipe):
        modules = ("broken_for_bench",)

    assert why_missing(MultiprocessingPipe) == ""
    assert why_missing(Missing) == "not installed"
    assert why_missing(Broken) == "not importable: No module named 'missing_for_bench'"


# --- footprint ------------------------------------------------------------------------------------------------------


def test_only_shared_mappings_of_files_count():
    lines = [
        "7f10000000-7f10002000 rw-s 00001000 00:01 4242 /memfd:arena (deleted)",
        "7f20000000-7f20001000 r--s 00000000 00:1c 17                         /dev/shm/a b",
        "7f30000000-7f30001000 r--p 00000000 fe:00 99                         /usr/lib/libc.so.6",
        "7ffc00000000-7ffc00001000 rw-p 00000000 00:00 0                      [stack]",
        "7f40000000-7f40001000 rw-s 00000000 00:00 0",
    ]
    assert shared_maps(lines) == [
        SharedMap("00:01", 4242, 0x7F10000000, 0x7F10002000, 0x1000, "/memfd:arena (deleted)"),
        SharedMap("00:1c", 17, 0x7F20000000, 0x7F20001000, 0, "/dev/shm/a b"),
    ]


# --- report ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ns", "text"),
    [(6_912, "6.91 µs"), (31_900, "31.9 µs"), (133_000, "133 µs"), (31_982_277, "32.0 ms"), (1.2e9, "1.20 s")],
)
def test_durations_have_three_digits(ns, text):
    assert duration(ns) == text


def a_report(measured: float) -> Report:
    found = Report("queue", Settings(), machine=MACHINE)
    blocks = [Block(2000, 4000), Block(3000, 9000), Block(4000, 5000)]
    found.figures.append(report.figure("1 reader", "another", blocks, [Block(1000, 2000)] * 3))
    found.figures += report.absent("1 reader", {"here": "", "absent": "not installed"}, {"hung": "no result"})
    found.require("round trip p50 over the floor's", 1.25, "x", Spread(measured, measured - 0.1, measured + 0.1))
    return found


MACHINE = {
    "cpu": "a processor", "usable_cores": 2, "cores": 2, "load_1min": 0.1, "kernel": "6.18", "python": "3.11",
    "date": "2026-11-30T12:00:00+00:00",
}  # fmt: skip


def test_the_json_says_what_was_measured_and_whether_it_passed():
    found = a_report(1.2).as_json()
    assert found["comparable"] is True
    assert found["contenders"][0] == {
        "case": "1 reader", "contender": "another", "p50_ns": 3000, "p99_ns": 5000, "ratio_to_arena": 3.0, "remark": "",
    }  # fmt: skip
    assert [(row["contender"], row["remark"]) for row in found["contenders"][1:]] == [
        ("absent", "not installed"),
        ("hung", "failed: no result"),
    ]
    (requirement,) = found["requirements"]
    assert (requirement["limit"], requirement["measured"], requirement["passed"]) == (1.25, 1.2, True)


def test_a_requirement_is_met_up_to_its_limit():
    assert a_report(1.25).requirements[0].passed
    assert not a_report(1.2501).requirements[0].passed


def test_the_tables_fit_into_100_columns():
    console = Console(width=100, record=True, file=io.StringIO())
    report.show(a_report(1.3), console)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 100
    assert re.search(r"another\s+3\.00 µs\s+5\.00 µs\s+3\.00", text)
    assert re.search(r"round trip p50 over the floor's\s+<= 1\.25 x\s+1\.30 x\s+1\.20–1\.40\s+NO", text)
    assert "NOT COMPARABLE" not in text


def test_a_shortened_run_is_judged_by_nobody_and_says_why():
    console = Console(width=100, record=True, file=io.StringIO())
    shortened = a_report(1.3)
    shortened.settings = Settings(quick=True)
    report.show(shortened, console)
    text = console.export_text()
    assert "NOT COMPARABLE" in text
    assert "no requirement is judged" in text
    assert re.search(r"required\s+measured\s+\(rounds\)\s*\n", text)
    assert re.search(r"<= 1\.25 x\s+1\.30 x\s+1\.20–1\.40\s*\n", text)


def test_a_shortened_run_can_not_be_checked():
    with pytest.raises(typer.BadParameter, match="not comparable"):
        report.run(lambda settings: a_report(1.2), Settings(quick=True), as_json=True, check=True)


@pytest.mark.parametrize(("measured", "check", "code"), [(1.3, False, 0), (1.3, True, 1), (1.2, True, 0)])
def test_only_check_makes_a_missed_requirement_an_error(measured, check, code, capsys):
    try:
        report.run(lambda settings: a_report(measured), Settings(), as_json=True, check=check)
        exit_code = 0
    except typer.Exit as leave:
        exit_code = leave.exit_code
    assert exit_code == code
    assert json.loads(capsys.readouterr().out)["bench"] == "queue"


def test_a_failed_run_exits_with_1_and_prints_no_figures(capsys):
    with pytest.raises(typer.Exit) as leave:
        report.run(lambda settings: _fail(), Settings(), as_json=True, check=False)
    assert leave.value.exit_code == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "ValueError: no" in printed.err


# --- settings -------------------------------------------------------------------------------------------------------


def test_only_a_full_run_is_comparable():
    assert settings(readers="1,2,4").comparable
    assert not settings(quick=True).comparable
    assert not settings(pairs=6).comparable
    assert not settings(messages=4999).comparable


def test_a_tenth_of_a_short_block_is_dropped_and_500_of_a_full_one():
    assert settings(messages=300).dropped == 30
    assert settings(messages=5000).dropped == 500


def test_reader_counts_are_sorted_and_unique():
    assert settings(readers="4,1,4,2").readers == (1, 2, 4)


@pytest.mark.parametrize("text", ["", "0", "1,x", "8"])
def test_reader_counts_are_refused_where_they_make_no_sense(text):
    with pytest.raises(typer.BadParameter, match="found"):
        settings(readers=text)


def test_a_plan_has_a_name_for_every_delay_it_measures():
    plan = Plan(idle_s=1, pause_s=1, pauses=2, long_pause_s=60, long_pauses=0, rate_hz=200, rate_s=1)
    assert plan.labels == ["first after 1 s", "200 a second"]
    assert plan.seconds == 4


# --- the commands, for real -------------------------------------------------------------------------------------------


def bench(*arguments: str) -> dict[str, Any]:
    """What `arena bench ARGUMENTS --quick --json` prints."""
    ran = subprocess.run(
        [sys.executable, "-c", "from telemetry.commands.bench import app; app()", *arguments, "--quick", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    assert found["comparable"] is False
    assert found["machine"]["cores"] == os.cpu_count()
    for requirement in found["requirements"]:
        assert requirement["passed"] == (requirement["measured"] <= requirement["limit"])
        assert requirement["low"] <= requirement["measured"] <= requirement["high"]
    for row in found["contenders"]:
        assert row["remark"] or (0 < row["p50_ns"] <= row["p99_ns"] and row["ratio_to_arena"] > 0), row
    return found


def rows(found: dict[str, Any]) -> set[tuple[str, str]]:
    return {(row["case"], row["contender"]) for row in found["contenders"]}


def limits(found: dict[str, Any]) -> dict[str, float]:
    return {requirement["text"]: requirement["limit"] for requirement in found["requirements"]}


def test_bench_queue_measures_arena_the_floor_and_the_peers(run_dir):
    found = bench("queue", "--readers", "1,2")
    contenders = {
        "the floor", "arena", "arena, probes off", "multiprocessing.Pipe", "pyzmq ipc", "iceoryx2", "vLLM MessageQueue",
    }  # fmt: skip
    assert rows(found) == {(case, name) for case in ("1 reader", "2 readers") for name in contenders}
    assert limits(found) == {
        "1 reader: round trip p50 over the floor's": 1.25,
        "1 reader: round trip p99 over its own p50": 2.5,
        "1 reader: p50 with probes over p50 without": 1.15,
        "2 readers: round trip p50 over the floor's": 1.30,
        "2 readers: round trip p99 over its own p50": 2.5,
        "2 readers: p50 with probes over p50 without": 1.15,
    }


def test_bench_tensor_measures_each_case_in_its_own_yardstick(run_dir):
    found = bench("tensor", "--readers", "2", "--no-peers")
    assert rows(found) == {
        ("warm, 2 readers", "one bare copy"),
        ("warm, 2 readers", "arena"),
        ("first, 2 readers", "one cold copy"),
        ("first, 2 readers", "arena"),
        ("first, 2 readers", "arena, prefault"),
        ("first, 2 readers", "one bare copy, no queue"),
        ("lent, 2 readers", "arena, enqueue alone"),
        ("lent, 2 readers", "one bare pickle, caches as cold"),
        ("1000 behind a large one", "one bare copy + the 1000 alone"),
        ("1000 behind a large one", "arena"),
    }
    expected_first = 0.5 if found["machine"]["madvise_collapse"] else 1.2
    assert sorted(limits(found).values()) == sorted([1.2, expected_first, 1.3, 100, 1.2])


def test_bench_idle_measures_silence_delay_and_memory(run_dir):
    found = bench("idle", "--no-peers")
    assert rows(found) == {
        ("first after 0.1 s", "arena"),
        ("200 a second", "arena"),
        ("first after 0.5 s", "arena"),
    }
    assert len(limits(found)) == 7
    memory = [item["measured"] for item in found["requirements"] if "shared memory" in item["text"]]
    assert all(mib > 0 for mib in memory)


def test_bench_scrape_measures_a_scrape_and_what_it_costs_the_queue(run_dir):
    found = bench("scrape")
    assert rows(found) == {
        ("one scrape, 16 queues of 8 readers", "arena"),
        ("one scrape, 16 queues of 8 readers", "generate_latest of constants"),
        ("round trip, 30 messages a block", "arena, not watched"),
        ("round trip, 30 messages a block", "arena, scraped at 1 Hz"),
    }
    assert sorted(limits(found).values()) == [1.0, 1.05, 2.0, 100]
    assert list(run_dir.iterdir()) == []


def test_bench_trace_measures_tracing_against_none_and_counts_what_it_drops(run_dir):
    report = bench("trace", "--readers", "1", "--messages", "200")
    assert {row["contender"] for row in report["contenders"]} == {"not installed", "1 % sampled", "100 % sampled"}
    assert [row["text"] for row in report["requirements"]] == [
        "not installed: the checks in one enqueue and dequeue",
        "1 reader: round trip p50 with 1 % traced over without tracing",
    ]
    assert "1 reader, 100 % sampled: " in report["remarks"][1]
