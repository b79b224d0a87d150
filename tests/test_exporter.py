"""The endpoint: what it serves and what not, a stall seen through it, and the command around it."""

import contextlib
import ctypes
import gc
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

import telemetry
from arena import MessageQueue, QueueConfig
from telemetry.exporter import MAX_CLIENTS, AlreadyRegistered, Exporter, ExportFailed, register, start_exporter
from tests.support.fleet import (
    A_WHILE_S,
    Fleet,
    Here,
    Worker,
    arena_maps,
    attach,
    create,
    drain,
    enqueue,
    eventually,
    open_fds,
)
from tests.support.scraping import scrape

ROOT = Path(__file__).parent.parent
SOON_S = 1.0
"""Within which a stall has to show."""


@pytest.fixture
def exporter(run_dir) -> Iterator[Exporter]:
    with start_exporter(port=0) as exporter:
        yield exporter


@pytest.fixture
def fleet(run_dir) -> Iterator[Fleet]:
    with Fleet() as fleet:
        yield fleet


def get(url: str, method: str = "GET", **headers: str) -> Any:
    return urllib.request.urlopen(urllib.request.Request(url, method=method, headers=headers), timeout=10)


# --- the endpoint ----------------------------------------------------------------------------------------------------


def test_it_serves_the_metrics_of_this_hosts_queues(exporter):
    with MessageQueue(1, config=QueueConfig(name="steps")), get(exporter.url) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
        text = answer.read().decode()
    assert 'arena_writer_up{queue="steps"} 1.0' in text
    assert "arena_build_info{" in text


def test_it_speaks_openmetrics_to_whoever_asks_for_it(exporter):
    with get(exporter.url, Accept="application/openmetrics-text; version=1.0.0") as answer:
        assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
        assert answer.read().endswith(b"# EOF\n")


@pytest.mark.parametrize("path", ["/", "/metrics/", "/favicon.ico", "/../etc/passwd", "/debug"])
def test_it_serves_nothing_else(exporter, path):
    with pytest.raises(urllib.error.HTTPError) as refused, get(exporter.url.removesuffix("/metrics") + path):
        pass
    assert refused.value.code == 404
    assert b"/metrics" in refused.value.read()


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_it_takes_nothing(exporter, method):
    with pytest.raises(urllib.error.HTTPError) as refused, get(exporter.url, method):
        pass
    assert refused.value.code == 405
    refused.value.close()


def test_it_listens_on_loopback_unless_told(exporter):
    assert exporter.url == f"http://127.0.0.1:{exporter.port}/metrics"
    assert exporter._server.socket.getsockname() == ("127.0.0.1", exporter.port)


def test_it_listens_on_ipv6_where_told(run_dir):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this host has no IPv6 loopback")
    with start_exporter(0, "::1") as exporter, get(exporter.url) as answer:
        assert answer.status == 200


def test_a_port_that_is_taken_says_so_and_what_to_do(exporter):
    with pytest.raises(ExportFailed, match=rf"port {exporter.port}.*in use.*--port"):
        start_exporter(exporter.port)


@pytest.mark.parametrize("bind", ["203.0.113.7", "no such host"])
def test_an_address_that_is_not_ours_says_so(run_dir, bind):
    with pytest.raises(ExportFailed, match="address of this host"):
        start_exporter(0, bind)


def test_an_address_that_is_empty_is_not_every_address(run_dir):
    with pytest.raises(ExportFailed, match=r"no address.*0\.0\.0\.0"):
        start_exporter(0, "")


def test_a_forked_child_neither_keeps_the_port_nor_waits_for_a_thread(exporter):
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        exporter.close()
        os.write(write_end, b"closed")
        signal.pause()
    try:
        with os.fdopen(read_end, "rb", 0) as said:
            assert select.select([said], [], [], A_WHILE_S)[0]
            assert said.read(6) == b"closed"
        assert scrape(exporter).value("exporter_pages") == 0, "the parent serves on"
        exporter.close()
        with pytest.raises(urllib.error.URLError):
            get(exporter.url)
        with start_exporter(exporter.port) as again:
            assert scrape(again).value("exporter_pages") == 0
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(write_end)


def test_more_clients_than_it_serves_at_a_time_are_hung_up_on(exporter):
    with contextlib.ExitStack() as silent:
        for _ in range(MAX_CLIENTS):
            silent.enter_context(socket.create_connection(("127.0.0.1", exporter.port), timeout=A_WHILE_S))
        late = silent.enter_context(socket.create_connection(("127.0.0.1", exporter.port), timeout=A_WHILE_S))
        assert late.recv(1) == b""
    eventually(lambda: exporter._server._free._value == MAX_CLIENTS)
    assert scrape(exporter).value("exporter_pages") == 0


def test_a_closed_exporter_leaves_nothing_behind(run_dir):
    gc.collect()  # what other tests have left
    with MessageQueue(1, config=QueueConfig(name="steps")) as writer:
        reader = MessageQueue.create_from_handle(writer.export_handle(), 0)  # from here on the queue opens nothing more
        before, maps = open_fds().keys(), len(arena_maps())
        for _ in range(3):
            with start_exporter(0) as exporter:
                assert scrape(exporter).value("exporter_pages") == 2
        eventually(lambda: open_fds().keys() == before)
        assert len(arena_maps()) == maps
        with pytest.raises(urllib.error.URLError):
            get(exporter.url)
        reader.shutdown()


def test_a_client_that_says_nothing_holds_nobody_up(exporter):
    with socket.create_connection(("127.0.0.1", exporter.port)):
        assert scrape(exporter).value("exporter_pages") == 0


def test_several_clients_at_once_get_whole_answers(exporter):
    from concurrent.futures import ThreadPoolExecutor

    with MessageQueue(1, config=QueueConfig(name="steps")), ThreadPoolExecutor(8) as pool:
        for found in pool.map(scrape, [exporter] * 40):
            assert found.value("writer_up", queue="steps") == 1


def test_a_bad_page_and_a_bad_directory_leave_the_answer_at_200(run_dir, exporter):
    with MessageQueue(1, config=QueueConfig(name="steps")) as writer:
        directory = next(one for one in run_dir.iterdir() if one.name.startswith("steps@"))
        (directory / "reader-0-1-bad").write_bytes(b"x" * 8192)
        assert scrape(exporter).value("exporter_page_errors_total", reason="foreign") == 1
        run_dir.chmod(0o777)
        assert scrape(exporter).value("exporter_page_errors_total", reason="directory") == 1
        run_dir.chmod(0o700)
        assert scrape(exporter).value("writer_up", queue="steps") == 1
        (directory / "reader-0-1-bad").unlink()
        writer.enqueue(None)


# --- in a process that serves its own registry -----------------------------------------------------------------------


def test_it_adds_itself_to_a_registry_once(run_dir):
    registry = CollectorRegistry()
    collector = telemetry.register(registry)
    with MessageQueue(1, config=QueueConfig(name="steps")):
        assert registry.get_sample_value("arena_writer_up", {"queue": "steps"}) == 1
    with pytest.raises(AlreadyRegistered, match="once; first unregister") as refused:
        register(registry)
    assert isinstance(refused.value, ValueError)
    assert "arena_parks" not in str(refused.value), "not the names of a hundred metrics"
    registry.unregister(collector)
    register(registry)


def test_without_prometheus_client_it_says_which_extra_to_install():
    program = "import sys; sys.modules['prometheus_client'] = None; import telemetry; telemetry.start_exporter()"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT)
    assert ran.stderr.rstrip().endswith("needs prometheus-client; run: pip install 'arena-dataplane[telemetry]'")


def test_importing_telemetry_loads_nothing():
    heavy = "{'torch', 'prometheus_client', 'rich', 'typer', 'http', 'telemetry.exporter'}"
    program = f"import telemetry, sys; sys.exit(', '.join({heavy} & sys.modules.keys()) or 0)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (ran.returncode, ran.stderr) == (0, "")


# --- a stall ---------------------------------------------------------------------------------------------------------


def hold_the_gil(here: Here, seconds: int) -> None:
    ctypes.PyDLL(None).sleep(seconds)


def freeze(reader: Worker) -> None:
    reader.freeze()


def seize(reader: Worker) -> None:
    reader.begin(hold_the_gil, 60)


@pytest.mark.parametrize("hang", [freeze, seize])
def test_a_stall_and_its_culprit_show_within_a_second(fleet, exporter, hang: Callable[[Worker], None]):
    writer, quick, hung = (fleet.start() for _ in range(3))
    handle = writer.call(create, 2, name="steps", slots=2)
    quick.call(attach, handle, 0)
    hung.call(attach, handle, 1)
    quick.begin(drain, 100)
    hang(hung)
    began = time.monotonic()
    writer.begin(enqueue, *range(100))
    eventually(lambda: scrape(exporter).value("writer_stall_in_progress_seconds", queue="steps"), within=SOON_S)
    found = scrape(exporter)
    assert time.monotonic() - began < SOON_S
    assert found.by("reader", "writer_stall_pending", queue="steps") == {"0": 0, "1": 1}
    assert found.value("reader_up", queue="steps", reader=1) == 1
    age = found.value("writer_stall_in_progress_seconds", queue="steps")
    eventually(lambda: scrape(exporter).value("writer_stall_in_progress_seconds", queue="steps") > age, within=SOON_S)
    if hang is freeze:
        assert scrape(exporter).value("reader_verdict", queue="steps", reader=1) == 3


def test_a_reader_that_dies_shows_within_a_second_and_so_does_the_wait_for_it(fleet, exporter):
    writer, reader = fleet.start(), fleet.start()
    reader.call(attach, writer.call(create, 1, name="steps", slots=2), 0)
    reader.freeze()
    writer.begin(enqueue, 1, 2, 3)
    eventually(lambda: scrape(exporter).value("writer_stall_in_progress_seconds", queue="steps"), within=SOON_S)
    writer.freeze()  # so that it can't notice
    reader.kill()
    found = eventually(
        lambda: (found := scrape(exporter)).value("reader_up", queue="steps", reader=0) == 0 and found, within=SOON_S
    )
    assert found.value("writer_stall_pending", queue="steps", reader=0) == 1
    assert found.value("reader_verdict", queue="steps", reader=0) == 4
    assert found.value("writer_stall_in_progress_seconds", queue="steps") > 0


def test_a_stall_stays_and_does_not_grow_when_every_process_is_dead(fleet, exporter):
    writer, reader = fleet.start(), fleet.start()
    reader.call(attach, writer.call(create, 1, name="steps", slots=2), 0)
    reader.freeze()
    writer.begin(enqueue, 1, 2, 3)
    eventually(lambda: scrape(exporter).value("writer_stall_in_progress_seconds", queue="steps") > 0.1)
    for worker in (writer, reader):
        worker.kill()
    found = scrape(exporter)
    stalled = found.value("writer_stall_in_progress_seconds", queue="steps")
    assert stalled > 0.1
    assert (found.value("writer_up", queue="steps"), found.value("reader_up", queue="steps", reader=0)) == (0, 0)
    assert found.value("writer_stall_pending", queue="steps", reader=0) == 1
    time.sleep(0.3)
    assert scrape(exporter).value("writer_stall_in_progress_seconds", queue="steps") == stalled


def test_a_stall_that_is_over_is_0_again(fleet, exporter):
    writer, reader = fleet.start(), fleet.start()
    reader.call(attach, writer.call(create, 1, name="steps", slots=2), 0)
    waiting = writer.begin(enqueue, 1, 2, 3)
    eventually(lambda: scrape(exporter).value("writer_stall_pending", queue="steps", reader=0))
    reader.call(drain, 3)
    waiting.result()
    found = scrape(exporter)
    assert found.value("writer_stall_in_progress_seconds", queue="steps") == 0
    assert found.value("writer_stall_pending", queue="steps", reader=0) == 0
    assert found.value("writer_blocked_total", queue="steps") == 1


# --- the command -----------------------------------------------------------------------------------------------------

ARENA = [sys.executable, "-c", "import sys; sys.argv[0] = 'arena'; from telemetry.cli import main; main()"]


def arena_export(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*ARENA, "export", *arguments], capture_output=True, text=True, check=False, cwd=ROOT, timeout=A_WHILE_S
    )


@pytest.fixture
def start() -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Start `arena export`; it is killed in the end if it still runs."""
    running: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> "subprocess.Popen[str]":
        command = [*ARENA, "export", *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        running.append(process)
        return process

    yield start
    for process in running:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_once_prints_the_metrics_and_ends(run_dir):
    with MessageQueue(1, config=QueueConfig(name="steps")):
        ran = arena_export("--once")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert 'arena_writer_up{queue="steps"} 1.0\n' in ran.stdout


def test_a_textfile_is_written_whole_and_readable_for_node_exporter(run_dir, tmp_path):
    file = tmp_path / "arena.prom"
    file.write_text("old")
    with MessageQueue(1, config=QueueConfig(name="steps")):
        ran = arena_export("--textfile", str(file), "--once", "--run-dir", str(run_dir))
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
    assert 'arena_writer_up{queue="steps"} 1.0\n' in file.read_text()
    assert [one.name for one in tmp_path.iterdir()] == ["arena.prom"]
    assert stat.S_IMODE(file.stat().st_mode) & 0o400


def test_a_textfile_that_can_not_be_written_is_one_clear_line(run_dir, tmp_path):
    ran = arena_export("--textfile", str(tmp_path / "no" / "such" / "place"), "--once")
    assert ran.returncode == 1
    assert ran.stderr.count("\n") == 1
    assert "--textfile" in ran.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_it_is_told_to_end(run_dir, start, number):
    process = start("--port", "0")
    url = process.stdout.readline().split()[-1]
    with get(url) as answer:
        assert answer.status == 200
    process.send_signal(number)
    assert process.wait(A_WHILE_S) == 0
    assert process.stderr.read() == ""


def test_it_writes_the_textfile_until_it_is_told_to_end(run_dir, start, tmp_path):
    file = tmp_path / "arena.prom"
    process = start("--textfile", str(file))
    eventually(file.exists)
    process.send_signal(signal.SIGTERM)
    assert process.wait(A_WHILE_S) == 0


def test_a_port_that_is_taken_is_one_clear_line(exporter):
    ran = arena_export("--port", str(exporter.port))
    assert ran.returncode == 1
    assert ran.stderr.count("\n") == 1
    for part in ("arena export: ", "expected", "found", "--port"):
        assert part in ran.stderr


def test_what_can_not_be_read_is_said_once_and_the_rest_is_served(run_dir, start):
    with MessageQueue(1, config=QueueConfig(name="steps")):
        directory = next(run_dir.iterdir())
        (directory / "reader-0-1-bad").write_bytes(b"x" * 8192)
        process = start("--port", "0")
        url = process.stdout.readline().split()[-1]
        for _ in range(3):
            with get(url) as answer:
                assert b'arena_writer_up{queue="steps"} 1.0' in answer.read()
        (directory / "reader-0-1-bad").unlink()
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=A_WHILE_S)
    assert said.count("\n") == 1
    assert "reader-0-1-bad is not a probe page" in said
    assert os.fspath(run_dir) in said
