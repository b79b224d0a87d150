"""The timeline: of queues that live, that stand still and that are dead, as Perfetto reads it."""

import json
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

import pytest

from arena.probe import pages, queue_directories
from telemetry.drawing import svg
from telemetry.perfetto import timeline
from telemetry.reader import Watcher
from tests.support import traced
from tests.support.fleet import Fleet, Worker, attach, create, drain, enqueue, eventually

ROOT = Path(__file__).parent.parent
SCREENSHOTS = ROOT / "tests/screenshots"


def start(fleet: Fleet, readers: int, **settings: object) -> tuple[Worker, list[Worker]]:
    writer = fleet.start()
    handle = writer.call(create, readers, name="steps", **settings)
    others = [fleet.start() for _ in range(readers)]
    for rank, worker in enumerate(others):
        worker.call(attach, handle, rank)
    return writer, others


def drawn(run_dir: Path, label: str = "steps") -> dict:
    with Watcher(run_dir) as watcher:
        (queue,) = [queue for queue in watcher.look().queues if queue.label == label]
        return json.loads(json.dumps(timeline(queue)))


def of_kind(drawing: dict, phase: str, name: str = "") -> list[dict]:
    return [one for one in drawing["traceEvents"] if one["ph"] == phase and one["name"].startswith(name)]


def tracks(drawing: dict) -> dict[int, str]:
    return {one["tid"]: one["args"]["name"] for one in of_kind(drawing, "M", "thread_name")}


def check_flows(drawing: dict) -> list[tuple[str, str]]:
    """Each arrow has two ends, does not go back in time, and both lie in a slice; from which track to which."""
    names = tracks(drawing)
    ends = defaultdict(dict)
    for phase in "sf":
        for one in of_kind(drawing, phase):
            ends[one["id"]][phase] = one
            assert any(
                slice["tid"] == one["tid"] and slice["ts"] - 0.01 <= one["ts"] <= slice["ts"] + slice["dur"] + 0.01
                for slice in of_kind(drawing, "X")
            )
    assert all(end["s"]["ts"] <= end["f"]["ts"] for end in ends.values())
    return [(names[end["s"]["tid"]], names[end["f"]["tid"]]) for end in ends.values()]


def test_a_quiet_queue_is_drawn_whole_without_tracing(fleet, run_dir):
    writer, readers = start(fleet, 2)
    for number in range(5):
        writer.call(enqueue, number)
        for reader in readers:
            reader.call(drain, 1)
        time.sleep(0.006)  # of messages closer together some are left out
    for reader in readers:  # what is looked at is noted down when the reader is back for more
        reader.begin(drain, 1)
    eventually(lambda: len(of_kind(drawn(run_dir), "f")) == 10)
    drawing = drawn(run_dir)
    assert list(tracks(drawing).values()) == [
        f"writer (pid {writer.pid})",
        *(f"reader {rank} (pid {reader.pid})" for rank, reader in enumerate(readers)),
    ]
    assert [one["name"] for one in of_kind(drawing, "X", "send")] == [f"send {number}" for number in range(5)]
    arrows = check_flows(drawing)
    assert sorted(set(arrows)) == [
        (f"writer (pid {writer.pid})", f"reader {rank} (pid {reader.pid})") for rank, reader in enumerate(readers)
    ]
    assert drawing["otherData"]["queue"] == "steps"


def test_with_tracing_a_slice_lasts_as_long_as_the_work(fleet, run_dir):
    writer, (reader,) = start(fleet, 1)
    writer.call(traced.sample_only, ratio=1.0)
    writer.call(enqueue, "work")
    reader.call(drain, 1)
    time.sleep(0.05)  # the worker's work
    reader.begin(drain, 1)
    (process,) = eventually(lambda: [one for one in of_kind(drawn(run_dir), "X", "process") if one["dur"] > 50_000])
    drawing = drawn(run_dir)
    (send,) = of_kind(drawing, "X", "send")
    (serialize,) = of_kind(drawing, "X", "serialize")
    assert send["ts"] <= serialize["ts"] <= serialize["ts"] + serialize["dur"] <= send["ts"] + send["dur"]
    assert process["args"]["trace_id"] == send["args"]["trace_id"]


def test_stalls_are_in_the_name_and_colour_of_the_reader_to_blame(fleet, run_dir):
    writer, (quick, slow) = start(fleet, 2, slots=4)
    taken = quick.begin(drain, 10)
    slow.freeze()
    sent = writer.begin(traced.send_many, 10)
    pending = eventually(lambda: of_kind(drawn(run_dir), "X", "blocked by reader 1 (not over)"))
    assert pending[0]["args"]["pending"] == [1]
    time.sleep(0.2)  # longer than anybody else keeps it waiting
    slow.thaw()
    slow.call(drain, 10)
    sent.result()
    taken.result()
    drawing = drawn(run_dir)
    stalls = [one for one in drawing["traceEvents"] if one.get("cat") == "stall"]
    longest = max(stalls, key=lambda one: one["dur"])
    assert (longest["name"], longest["args"]["blame_reader"], longest["cname"]) == ("blocked by reader 1", 1, "bad")
    check_flows(drawing)


def test_the_dead_are_drawn_too(fleet, run_dir):
    writer, (reader,) = start(fleet, 1)
    writer.call(traced.sample_only, ratio=1.0)
    writer.call(enqueue, "last words")
    reader.call(drain, 1)
    reader.kill()
    writer.kill()
    drawing = drawn(run_dir)
    assert [name.endswith(", dead)") for name in tracks(drawing).values()] == [True, True]
    (process,) = of_kind(drawing, "X", "process 0")
    assert process["args"]["never_back"] is True
    assert len(check_flows(drawing)) == 1


def test_every_entry_is_what_the_viewers_accept(fleet, run_dir):
    writer, (reader,) = start(fleet, 1, max_arena_bytes=0)
    writer.call(traced.sample_only, ratio=1.0)
    sent = writer.begin(traced.send_many, 300)
    reader.call(drain, 300)
    sent.result()
    with pytest.raises(TimeoutError):
        reader.call(drain, 1, timeout=0.01)
    drawing = drawn(run_dir)
    last = 0.0
    for one in drawing["traceEvents"]:
        assert one["ph"] in "MXisf"
        assert isinstance(one["pid"], int) and isinstance(one["tid"], int)
        if one["ph"] != "M":
            assert one["ts"] >= last
            last = one["ts"]
        if one["ph"] == "X":
            assert one["dur"] >= 0
    assert {"attach", "error"} <= {one["name"] for one in of_kind(drawing, "i")}


# ── the command ──────────────────────────────────────────────────────────────────────────────────
def arena_trace(*arguments: object) -> subprocess.CompletedProcess[str]:
    program = "import sys; from telemetry.cli import main; sys.argv[0] = 'arena'; main()"
    command = [sys.executable, "-c", program, "trace", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_the_command_writes_the_file(fleet, run_dir, tmp_path):
    writer, (reader,) = start(fleet, 1)
    writer.call(enqueue, "go")
    reader.call(drain, 1)
    ran = arena_trace("steps", "-o", tmp_path / "out.json")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout == f"wrote {tmp_path / 'out.json'}; open it in https://ui.perfetto.dev\n"
    assert of_kind(json.loads((tmp_path / "out.json").read_text()), "X", "send 0")
    ran = arena_trace("steps", "-o", "-")
    assert json.loads(ran.stdout)["otherData"]["queue"] == "steps"


def test_a_wrong_name_is_answered_with_the_nearest(fleet, run_dir):
    assert arena_trace("steps").stderr == "arena trace: no queue 'steps'; there is none at all, alive or dead\n"
    start(fleet, 1)
    ran = arena_trace("stesp")
    assert ran.returncode == 1
    assert ran.stdout == ""
    assert ran.stderr == "arena trace: no queue 'stesp'; did you mean 'steps'? There are: steps\n"


def test_a_page_that_is_gone_or_damaged_is_left_out(fleet, run_dir):
    writer, (reader,) = start(fleet, 1)
    writer.call(enqueue, "go")
    reader.call(drain, 1)
    (directory,) = queue_directories(run_dir)
    with Watcher(run_dir) as watcher:
        (queue,) = watcher.look().queues
        (page,) = [path for path in pages(directory) if path == queue.readers[0].page.path]
        page.write_bytes(b"x" * page.stat().st_size)
        assert list(tracks(timeline(queue)).values()) == [f"writer (pid {writer.pid})"]


def test_a_file_that_can_t_be_written_is_one_line(fleet, run_dir):
    start(fleet, 1)
    ran = arena_trace("steps", "-o", "/nowhere/out.json")
    assert ran.returncode == 1
    assert ran.stderr == "arena trace: can't write /nowhere/out.json; found No such file or directory; " + (
        "name another file with -o\n"
    )


# ── the picture ──────────────────────────────────────────────────────────────────────────────────
def test_the_readme_s_picture_is_drawn_from_what_was_recorded():
    """`python -m tests.support.traced picture tests/screenshots/timeline.json` records another."""
    recorded = json.loads((SCREENSHOTS / "timeline.json").read_text())
    check_flows(recorded)
    assert svg(recorded) == (SCREENSHOTS / "timeline.svg").read_text()


def test_any_timeline_can_be_drawn(fleet, run_dir, tmp_path):
    start(fleet, 1)
    ran = arena_trace("steps", "-o", tmp_path / "out.svg")
    assert (ran.returncode, ran.stdout) == (0, f"wrote {tmp_path / 'out.svg'}\n")
    assert ElementTree.parse(tmp_path / "out.svg").getroot().tag.endswith("svg")
