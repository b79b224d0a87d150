"""`arena top` as its user sees it: on a terminal, through a pipe, and when things go wrong."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch

from arena import MessageQueue, QueueConfig
from telemetry.exporter import start_exporter
from telemetry.monitor.local import Pages
from tests.support.fleet import Fleet, Here, Worker, attach, create
from tests.support.ranks import make, together
from tests.support.terminal import ARENA, ROOT, Terminal
from tests.support.traffic import send, take

SLOTS = 8


def engine(fleet: Fleet, n_reader: int = 3, name: str = "steps") -> tuple[Worker, list[Worker]]:
    """A writer that sends fifty messages a second, and readers that take them."""
    writer, readers = fleet.start(), [fleet.start() for _ in range(n_reader)]
    handle = writer.call(create, n_reader, name=name, slots=SLOTS)
    for rank, worker in enumerate(readers):
        worker.call(attach, handle, rank)
        worker.begin(take)
    writer.begin(send, 0.02, 100_000)
    return writer, readers


def arena(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """The command without a terminal."""
    return subprocess.run(
        [*ARENA, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=60,
        env=os.environ | {"TERM": "xterm-256color"} | environment,
    )


def refused(ran: "subprocess.CompletedProcess[str]", code: int) -> str:
    """The one line it said."""
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (code, "", 1), ran.stderr
    assert ran.stderr.startswith("arena top: ")
    return ran.stderr


# --- on a terminal ---------------------------------------------------------------------------------------------------


def test_the_verdict_names_a_stopped_reader_within_a_second_and_clears_when_it_goes_on(fleet):
    _, readers = engine(fleet)
    with Terminal("top") as terminal:
        terminal.until(lambda: terminal.first.startswith("OK: 1 queue, 3 readers"))
        readers[1].freeze()
        began = time.monotonic()
        terminal.until(lambda: f"reader 1 (pid {readers[1].pid})" in terminal.first)
        assert time.monotonic() - began < 1.0
        assert "STOPPED" in terminal.first or terminal.first.startswith("BLOCKED")
        terminal.until(lambda: terminal.first.startswith("BLOCKED"))
        terminal.shows("◀1")
        terminal.shows("STOPPED")
        readers[1].thaw()
        terminal.until(lambda: not terminal.first.startswith(("BLOCKED", "STOPPED")))
        terminal.press("q")
        assert terminal.end() == 0
        assert terminal.is_restored()


def test_a_reader_that_dies_is_named_and_a_queue_that_ends_while_it_is_shown_is_gone(fleet):
    writer, readers = engine(fleet, 2)
    with Terminal("top", "--queue", "steps") as terminal:
        terminal.until(lambda: terminal.first.startswith("OK"))
        readers[0].kill()
        terminal.until(lambda: "reader 0" in terminal.first and "GONE" in terminal.text)
        readers[1].kill()
        writer.kill()
        terminal.until(lambda: terminal.first.startswith("DEAD"))
        shutil.rmtree(os.environ["ARENA_RUN_DIR"])
        Path(os.environ["ARENA_RUN_DIR"]).mkdir(mode=0o700)
        terminal.until(lambda: terminal.first.startswith("NO QUEUE"))
        terminal.press("q")
        assert terminal.end() == 0


def test_it_waits_for_the_first_queue(run_dir, fleet):
    with Terminal("top") as terminal:
        terminal.until(lambda: terminal.first.startswith(f"NO QUEUE in {run_dir}"))
        engine(fleet, 1)
        terminal.until(lambda: terminal.first.startswith("OK: 1 queue, 1 reader"))


def test_it_never_attaches_and_never_writes(fleet):
    engine(fleet, 1)
    with Terminal("top") as terminal:
        terminal.until(lambda: terminal.first.startswith("OK"))
        maps = Path(f"/proc/{terminal.process.pid}/maps").read_text().splitlines()
        pages = [line.split()[1] for line in maps if os.environ["ARENA_RUN_DIR"] in line]
        assert pages == ["r--s", "r--s"]
        assert not [line for line in maps if "memfd:arena" in line]


def test_of_many_queues_each_is_looked_at_at_least_every_second_time(run_dir):
    with ExitStack() as stack:
        queues = [stack.enter_context(MessageQueue(1, config=QueueConfig(name=f"q{number}"))) for number in range(6)]
        source = Pages()
        stack.callback(source.close)
        published = [[one.writer.sequence for one in source.look(["q0"]).queues]]
        for _ in range(4):
            for queue in queues:
                queue.enqueue("one more")
            published.append([one.writer.sequence for one in source.look(["q0"]).queues])
    assert [look[0] for look in published] == [0, 1, 2, 3, 4], "the one that is looked into is looked at every time"
    assert all(
        earlier[number] < later[number]
        for earlier, later in zip(published, published[2:], strict=False)
        for number in range(6)
    )


@pytest.mark.parametrize("columns", [60, 240])
def test_narrow_and_wide_terminals_show_the_same_verdict_and_no_line_too_long(columns, fleet):
    _, readers = engine(fleet)
    readers[2].freeze()
    with Terminal("top", columns=columns, lines=30) as terminal:
        terminal.until(lambda: terminal.first.startswith("BLOCKED"))
        terminal.shows("EXCESS")
        assert ("RELATION" in terminal.text) == (columns == 240)
        if columns == 240:
            terminal.shows("awaiting_readers")


def test_a_terminal_of_twenty_columns_is_refused_in_one_line(run_dir):
    with Terminal("top", columns=20, lines=10) as terminal:
        assert terminal.end() == 1
        assert "needs 40 columns, and this terminal has 20" in " ".join("".join(terminal.screen.display).split())
        assert terminal.is_restored()
        assert b"\x1b[?1049h" not in terminal.raw


def test_it_follows_the_size_of_the_terminal_and_gets_over_a_tiny_one(fleet):
    engine(fleet)
    with Terminal("top", columns=100) as terminal:
        terminal.shows("EXCESS")
        terminal.resize(20, 6)
        terminal.until(lambda: terminal.lines[0].startswith("OK: 1 queue") and not terminal.lines[-1])
        terminal.resize(160, 30)
        terminal.shows("STARVED")
        terminal.until(lambda: terminal.lines[29].startswith("q quit"))


def test_keys_sort_pause_choose_help_and_quit(fleet):
    engine(fleet, 1, "first")
    engine(fleet, 2, "second")
    with Terminal("top") as terminal:
        terminal.shows("▶ ")
        terminal.press("s")
        terminal.shows("by lag")
        terminal.press("sss")
        terminal.shows("by blame")
        terminal.press("\x1b")
        for key, name in (("j", "second"), ("\x1b[B", "first"), ("k", "second"), ("\x1b[A", "first"), ("\t", "second")):
            terminal.press(key)
            terminal.shows(f"▶ {name}")
        terminal.press("\r")
        terminal.until(lambda: "first" not in terminal.text)
        terminal.press("\r")
        terminal.shows("first")
        terminal.press("h")
        terminal.shows("step long")
        terminal.press(" ")
        terminal.until(lambda: "step long" not in terminal.text)
        terminal.press(" ")
        terminal.shows("PAUSED")
        clock = terminal.lines[1]
        while terminal.follow(1.2):
            pass
        assert terminal.lines[1] == clock, "it stands still"
        terminal.press("pQ")
        assert terminal.end() == 0
        assert terminal.is_restored()


def test_what_did_not_change_is_not_written_again(fleet):
    engine(fleet)
    with Terminal("top", columns=120) as terminal:
        terminal.shows("q quit")
        terminal.until(lambda: terminal.first.startswith("OK"))
        seen = len(terminal.raw)
        terminal.until(lambda: terminal.raw.count(b"\x1b[?2026h", seen) >= 3)
        later = terminal.raw[seen:]
        assert b"\x1b[2J" not in later, "it was cleared, which flickers"
        assert b"READER" not in later
        assert later.count(b"\x1b[?2026h") - later.count(b"\x1b[?2026l") in (0, 1)


# --- the terminal afterwards -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_it_with_the_terminal_as_it_was(number, run_dir):
    with Terminal("top") as terminal:
        terminal.shows("q quit")
        os.kill(terminal.process.pid, number)
        assert terminal.end() == 128 + number
        assert terminal.is_restored()


def test_ctrl_c_ends_it_with_the_terminal_as_it_was(run_dir):
    with Terminal("top") as terminal:
        terminal.shows("q quit")
        terminal.press("\x03")
        assert terminal.end() == 130
        assert terminal.is_restored()
        assert b"Traceback" not in terminal.raw


def test_an_exception_leaves_the_terminal_as_it_was(run_dir):
    broken = "from telemetry.monitor import live; live.draw = lambda *_: 1 / 0; "
    with Terminal("top", before=broken) as terminal:
        assert terminal.end() == 1
        assert "ZeroDivisionError" in terminal.text
        assert terminal.is_restored()


def test_a_shell_gets_its_terminal_back_while_it_is_suspended(run_dir):
    with Terminal("top") as terminal:
        terminal.shows("q quit")
        os.kill(terminal.process.pid, signal.SIGSTOP)  # from outside: it can't restore anything
        os.kill(terminal.process.pid, signal.SIGCONT)
        entered = terminal.raw.count(b"\x1b[?1049h")
        terminal.until(lambda: terminal.raw.count(b"\x1b[?1049h") > entered)
        terminal.shows("q quit")
        terminal.press("q")
        assert terminal.end() == 0


def test_ctrl_z_under_a_shell_with_jobs(run_dir):
    with Terminal("top", under="bash") as terminal:
        terminal.shows("q quit")
        terminal.press("\x1a")
        terminal.shows("Stopped")
        assert (terminal.raw.count(b"\x1b[?1049l"), terminal.screen.cursor.hidden) == (1, False)
        terminal.press("fg\n")
        terminal.until(lambda: terminal.raw.count(b"\x1b[?1049h") == 2)
        terminal.shows("q quit")
        terminal.press("q")
        terminal.until(lambda: terminal.raw.count(b"\x1b[?1049l") == 2)
        assert terminal.raw.count(b"\x1b[?1049h") == 2
        terminal.press("exit\n")
        assert terminal.end() == 0


# --- without a terminal ----------------------------------------------------------------------------------------------


def test_through_a_pipe_it_prints_once_and_no_escape_code(fleet):
    writer, readers = engine(fleet)
    readers[1].freeze()
    ran = arena("top")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "\x1b" not in ran.stdout
    assert f"reader 1 (pid {readers[1].pid})" in ran.stdout.splitlines()[0]
    assert str(writer.pid) in ran.stdout
    assert arena("top", "--ascii").stdout.isascii()
    assert arena("top", PYTHONIOENCODING="ascii").stdout.isascii()


def test_once_prints_on_a_terminal_too_in_colour_unless_that_is_unwanted(fleet):
    engine(fleet, 1)
    for environment, escapes in ({}, True), ({"TERM": "dumb"}, False):
        with Terminal("top", "--once", **environment) as terminal:
            assert terminal.end() == 0
            assert terminal.first.startswith("OK: 1 queue, 1 reader")
            assert (b"\x1b[" in terminal.raw) == escapes
            assert b"\x1b[?1049h" not in terminal.raw


def test_without_colour_every_sign_is_still_there(fleet):
    _, readers = engine(fleet)
    readers[1].freeze()
    with Terminal("top", NO_COLOR="1") as terminal:
        terminal.until(lambda: terminal.first.startswith("BLOCKED"))
        terminal.shows("·T·")
        terminal.shows("STOPPED")
        codes = {code for found in re.findall(rb"\x1b\[([0-9;]*)m", terminal.raw) for code in found.split(b";")}
        assert codes == {b"0", b"1", b"2"}, "bold and dim alone"


def test_a_dumb_terminal_gets_one_plain_snapshot(fleet):
    engine(fleet, 1)
    with Terminal("top", TERM="dumb") as terminal:
        assert terminal.end() == 0
        assert b"\x1b" not in terminal.raw


def test_json_is_one_object_with_the_verdict_and_every_reader(fleet):
    _, readers = engine(fleet)
    readers[2].freeze()
    report = json.loads(arena("top", "--json").stdout)
    (queue,) = report["queues"]
    assert f"reader 2 (pid {readers[2].pid})" in report["verdict"]
    assert (queue["queue"], queue["n_reader"], queue["slots"]) == ("steps", 3, SLOTS)
    assert [(one["reader"], one["verdict"]) for one in queue["readers"]] == [(0, "OK"), (1, "OK"), (2, "STOPPED")]
    assert queue["readers"][2]["lag"] > 0


def test_json_with_an_interval_is_a_stream_that_ends_with_its_reader(fleet):
    engine(fleet, 1)
    process = subprocess.Popen(
        [*ARENA, "top", "--json", "--interval", "0.1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    )
    try:
        assert process.stdout and process.stderr
        times = [json.loads(process.stdout.readline())["time"] for _ in range(4)]
        assert times == sorted(set(times))
        process.stdout.close()
        assert process.wait(10) == 0
        assert process.stderr.read() == b""
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_a_queue_alone(fleet):
    engine(fleet, 1, "first")
    engine(fleet, 1, "second")
    report = json.loads(arena("top", "--json", "--queue", "second").stdout)
    assert [queue["queue"] for queue in report["queues"]] == ["second"]


def reduce(here: Here, rank: int, operations: int) -> None:
    """Sums of two sizes, and one of a dtype that the fast paths do not take, over and over."""
    for _ in range(operations):
        for x in (torch.ones(64), torch.ones(64), torch.ones(4, dtype=torch.int64)):
            here.comm.all_reduce(x)
        time.sleep(0.01)


def test_all_reduce_has_a_row_for_each_rank_here_and_from_another_host(two, run_dir):
    together(two, make)
    calls = [worker.begin(reduce, rank, 100_000) for rank, worker in enumerate(two)]
    with start_exporter(0) as exporter:
        for arguments in ((), ("--from", exporter.url, "--interval", "0.2")):
            with Terminal("top", *arguments, columns=120) as terminal:
                terminal.until(lambda: len(re.findall(r" [01] .* cpu_one_shot +\d.*dtype \d", terminal.text)) == 2)
                terminal.resize(60, 30)
                terminal.until(lambda: "BYTES/S" in terminal.text and "DECLINED" not in terminal.text)
                terminal.press("q")
                assert terminal.end() == 0
        there = json.loads(arena("top", "--json", "--from", exporter.url).stdout)
    here = json.loads(arena("top", "--json").stdout)
    for report in (here, there):
        (group,) = report["allreduce"]
        assert (group["world"], group["device"], group["plan"]) == (2, "cpu", "default")
        for number, found in enumerate(group["ranks"]):
            assert (found["rank"], found["path"], found["declined"]) == (number, "cpu_one_shot", "dtype")
            assert found["operations_per_s"] > 10 and found["bytes_per_s"] > 1000
            assert found["operations_by_path"].keys() == {"cpu_one_shot", "gloo"}
    assert [found["pid"] for found in here["allreduce"][0]["ranks"]] == [worker.pid for worker in two]
    assert there["allreduce"][0]["instance"] == here["allreduce"][0]["instance"]
    page = arena("top", "--once", "--ascii").stdout
    assert page.isascii() and "all-reduce: 2 of 2 ranks on cpu, default plan" in page
    assert not any(call.done() for call in calls)
    two[1].kill()
    page = arena("top", "--once").stdout
    assert re.search(rf" 1  ENDED +{two[1].pid}", page)


# --- another host ----------------------------------------------------------------------------------------------------


def test_what_an_exporter_serves_shows_the_same_and_says_what_it_can_not_know(fleet):
    _, readers = engine(fleet)
    readers[1].freeze()
    with start_exporter(0) as exporter:
        here = json.loads(arena("top", "--json").stdout)["queues"][0]
        there = json.loads(arena("top", "--json", "--from", exporter.url).stdout)["queues"][0]
        page = arena("top", "--once", "--from", exporter.url).stdout
    for key in ("queue", "instance", "n_reader", "slots", "slots_used", "state", "pending", "messages", "fallbacks"):
        assert there[key] == here[key], key
    for mine, theirs in zip(here["readers"], there["readers"], strict=True):
        for key in ("reader", "pid", "alive", "verdict", "relation", "lag", "held_bytes"):
            assert theirs[key] == mine[key] or mine[key] == "awaiting_write", key
    assert (there["readers"][0]["state"], there["writer"]["pid"]) == (None, None)
    assert there["readers"][1]["blocked_share"] > 0.5
    assert "who holds which block is on its host's pages alone" in page


@contextmanager
def server(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            answer(self)

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = Thread(target=http.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_port}/metrics"
        finally:
            http.shutdown()
            thread.join()


def page(body: str) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(body.encode())

    return answer


@pytest.mark.parametrize(
    ("body", "words"),
    [("<html>hello</html>", "without any of Arena's metrics"), ("arena_writer_up{queue= 1\n", "in text form")],
)
def test_a_server_that_is_no_exporter_is_refused(body, words):
    with server(page(body)) as url:
        assert words in refused(arena("top", "--from", url), 1)


def test_an_exporter_that_stops_answering_shows_as_such_and_keys_still_work(fleet):
    engine(fleet, 1)
    with start_exporter(0) as exporter, Terminal("top", "--from", exporter.url, "--interval", "0.2") as terminal:
        terminal.until(lambda: terminal.first.startswith("OK"))
        exporter.close()
        terminal.until(lambda: terminal.first.startswith("UNREACHABLE for"))
        terminal.press("q")
        assert terminal.end() == 0
        assert terminal.is_restored()


def test_a_server_that_accepts_and_never_answers_is_given_up():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/metrics"
        assert "can't read" in refused(arena("top", "--from", url), 1)


# --- what it refuses -------------------------------------------------------------------------------------------------


def test_an_unknown_queue_gets_the_nearest_name(run_dir):
    with MessageQueue(1, config=QueueConfig(name="steps")), MessageQueue(1, config=QueueConfig(name="answers-0")):
        assert "did you mean 'steps'?" in refused(arena("top", "--queue", "step"), 2)
        assert "there is answers-0, steps" in refused(arena("top", "--queue", "zzz"), 2)
    assert "there is none at all" in refused(arena("top", "--queue", "steps"), 2)


def test_where_there_is_no_queue_there_is_one_line_or_an_empty_report(run_dir):
    assert f"no queue in {run_dir}" in refused(arena("top", "--once"), 1)
    assert json.loads(arena("top", "--json").stdout)["queues"] == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--from", "metrics"), "--from takes a URL such as http://host:9464/metrics, not 'metrics'"),
        (("--from", "http://h:x/"), "--from takes a URL"),
        (("--interval", "0"), "--interval takes seconds from 0.05 to 3600, not 0"),
        (("--interval", "nan"), "--interval takes seconds"),
    ],
)
def test_options_that_make_no_sense(arguments, words, run_dir):
    assert words in refused(arena("top", *arguments), 2)


def test_an_unreachable_url_is_one_line(run_dir):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert "Connection refused" in refused(arena("top", "--from", f"http://127.0.0.1:{port}/metrics"), 1)


def test_a_run_directory_that_can_not_be_trusted_is_one_line(run_dir):
    run_dir.chmod(0o777)
    assert "that others can't write to" in refused(arena("top"), 1)


def test_a_page_that_can_not_be_read_is_told_and_the_rest_is_shown(fleet, run_dir):
    engine(fleet, 1)
    (directory,) = run_dir.glob("steps@*")
    (directory / "reader-7-1-x").write_bytes(b"x" * 9000)
    shown = arena("top", "--once").stdout
    assert shown.startswith("OK")
    assert "not read: " in shown and "reader-7-1-x" in shown
