"""A real Prometheus scrapes a real `arena export` over real queues, while faults are injected.

One episode serves every test here: a reader of the first queue is slow, one of the second is stopped and goes on, one
of the third is killed and replaced, the fourth has no room for its tensors, and the fifth follows a script. Two ranks
all-reduce meanwhile. The rules are the shipped ones with their times divided.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from arena import Handle
from tests.conftest import require_program
from tests.support import fleet, ranks, traffic
from tests.support.fleet import Call, Fleet, Worker, eventually
from tests.support.prometheus import (
    BUNDLE,
    Prometheus,
    bundle_queries,
    free_port,
    prometheus,
    quickened,
    running,
)

ARENA = [sys.executable, "-c", "import sys; sys.argv[0] = 'arena'; from telemetry.cli import main; main()"]
FACTOR = 20  # what takes minutes in production takes seconds here
SCRAPE_MS = 500  # also how long a scrape may take, which is milliseconds while the machine is free
WITHIN_S = 40.0
FAULTS = {
    "WriterStalled": "stopped",
    "ReaderStopped": "stopped",
    "ReaderStuck": "stopped",
    "ReaderGone": "killed",
    "HeadOfLineBlocking": "steps",
}

# What a machine without a device and without vLLM can't show.
WITHOUT_DATA = {
    "arena-1-queue: Engine: time to first token, p99 A": "no vLLM runs here",
    "arena-3-memory: DMA gate wait p99, by reader A": "without a device no block waits for one",
    "rules: arena:segments_unpinned:count": "without a device nothing is copied to one",
    "rules: ArenaUnpinned": "without a device nothing is copied to one",
    "arena-3-memory: Copy bandwidth, by direction B": "likewise",
}


@dataclass
class BusyQueue:
    """A queue whose writer and readers are workers."""

    handle: Handle
    writer: Worker
    readers: list[Worker]


@dataclass
class Script:
    """The answer of the scripted queue's writer is when it began to wait, each reader's when it released."""

    began: Call
    released: list[Call]


@dataclass
class Episode:
    """What happened, and the Prometheus that saw it."""

    server: Prometheus
    began: float = field(default_factory=time.time)
    faulted: float = 0.0
    ended: float = 0.0
    culprits: dict[str, tuple[str, int]] = field(default_factory=dict)  # queue: rank and pid
    fired: dict[str, dict[str, Any]] = field(default_factory=dict)
    waited: list[float] = field(default_factory=list)  # in the script: until each reader's release

    def firing(self, alert: str, queue: str) -> list[dict[str, Any]]:
        wanted = {"alertname": alert, "queue": queue}
        return [one for one in self.server.firing() if wanted.items() <= one["labels"].items()]

    def wait_for(self, alert: str, queue: str) -> None:
        self.fired[alert] = eventually(lambda: self.firing(alert, queue), within=WITHIN_S, every=0.1)[0]

    def wait_for_the_end_of(self, alert: str, queue: str) -> None:
        eventually(lambda: not self.firing(alert, queue), within=WITHIN_S, every=0.1)


# --- the episode -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def episode(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Episode]:
    program = require_program("prometheus")
    place = tmp_path_factory.mktemp("prometheus")
    with pytest.MonkeyPatch.context() as environment, short_run_dir() as run_dir, ExitStack() as stack:
        environment.setenv("ARENA_RUN_DIR", str(run_dir))
        workers = stack.enter_context(Fleet())
        port, nobody = free_port(), free_port()  # the second is an exporter that is down
        exporter = [*ARENA, "export", "--port", str(port)]
        stack.enter_context(running(exporter, place / "exporter.log", f"http://127.0.0.1:{port}/metrics"))
        targets = [f"127.0.0.1:{port}", f"127.0.0.1:{nobody}"]
        seen = Episode(stack.enter_context(prometheus(program, place, targets, FACTOR, SCRAPE_MS)))
        environment.setenv("XDG_CACHE_HOME", str(place))  # without a tuned plan
        add_up(workers, place / "store")
        play(seen, workers, place / "slow")
        seen.ended = time.time()
        yield seen


@contextmanager
def short_run_dir() -> Iterator[Path]:
    """Not under pytest's directories: a unix socket's path has to fit into 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="arena-") as name:
        yield Path(name)


def play(seen: Episode, workers: Fleet, slow: Path) -> None:
    """Every fault at once, each in a queue of its own; returns when the last alert has ended."""
    steps = busy_queue(workers, "steps", 4, 0.005, 1 << 20, slots=8)
    stopped = busy_queue(workers, "stopped", 2, 0.02, 1 << 10, slots=4)
    killed = busy_queue(workers, "killed", 2, 0.02, 1 << 10, slots=4, on_reader_death="continue")
    cramped = busy_queue(workers, "cramped", 1, 0.1, 1 << 20, max_arena_bytes=1 << 19)
    script = begin_script(workers)
    for reader in [*steps.readers[:3], *stopped.readers, *killed.readers, *cramped.readers]:
        reader.begin(traffic.take)
    steps.readers[3].begin(traffic.take, slow, 0.03)
    seen.culprits = {
        "steps": ("3", steps.readers[3].pid),
        "stopped": ("1", stopped.readers[1].pid),
        "killed": ("0", killed.readers[0].pid),
    }
    eventually(lambda: flowing(seen.server) and quiet(seen.server), within=WITHIN_S, every=0.1)

    seen.faulted = time.time()
    slow.touch()
    killed.readers[0].kill()
    stop_until_noticed(seen, stopped.readers[1])
    seen.wait_for("ReaderGone", "killed")
    replace(workers, killed.handle, 0)
    seen.wait_for("HeadOfLineBlocking", "steps")
    slow.unlink()
    seen.waited = finish_script(script)
    for alert, queue in FAULTS.items():
        seen.wait_for_the_end_of(alert, queue)


def add_up(workers: Fleet, store: Path) -> None:
    members = [workers.start() for _ in range(2)]
    ranks.together(members, ranks.join, len(members), store)
    ranks.together(members, ranks.make)
    for rank, member in enumerate(members):
        member.begin(traffic.add_up, rank)


def stop_until_noticed(seen: Episode, reader: Worker) -> None:
    reader.freeze()
    seen.wait_for("WriterStalled", "stopped")
    seen.wait_for("ReaderStopped", "stopped")
    seen.wait_for("ReaderStuck", "stopped")
    reader.thaw()


def replace(workers: Fleet, handle: Handle, rank: int) -> None:
    replacement = workers.start()
    replacement.call(fleet.attach, handle, rank)
    replacement.begin(traffic.take)


def flowing(server: Prometheus) -> bool:
    """Whether every reader of the busy queues takes messages."""
    moving = server.query('rate(arena_messages_consumed_total{queue=~"steps|stopped|killed|cramped"}[2s]) > 0')
    return len(moving) == 4 + 2 + 2 + 1


def quiet(server: Prometheus) -> bool:
    """Whether what fired while the readers were still attaching has ended."""
    return all("reader" not in alert["labels"] for alert in server.firing())


def new_queue(workers: Fleet, name: str, n_reader: int, **settings: Any) -> BusyQueue:
    writer = workers.start()
    handle = writer.call(fleet.create, n_reader, name=name, **settings)
    readers = [workers.start() for _ in range(n_reader)]
    for rank, reader in enumerate(readers):
        reader.begin(fleet.attach, handle, rank)
    return BusyQueue(handle, writer, readers)


def busy_queue(workers: Fleet, name: str, n_reader: int, pause_s: float, nbytes: int, **settings: Any) -> BusyQueue:
    made = new_queue(workers, name, n_reader, **settings)
    made.writer.begin(traffic.send, pause_s, nbytes)
    return made


def begin_script(workers: Fleet) -> Script:
    """The writer waits from now on; its readers release after some 2, 2.5 and 3.5 seconds."""
    made = new_queue(workers, "scripted", 3, slots=2)
    began = made.writer.begin(traffic.send_at_once, 3)
    start = time.monotonic() + 2
    delays = (0.0, 0.5, 1.5)
    calls = [
        reader.begin(traffic.take_one_at, start + delay) for reader, delay in zip(made.readers, delays, strict=True)
    ]
    return Script(began, calls)


def finish_script(script: Script) -> list[float]:
    began = script.began.result()
    return [call.result() - began for call in script.released]


# --- what it must have shown -----------------------------------------------------------------------------------------


def test_every_expression_returns_data_or_stands_in_the_list(episode):
    missing = {}
    for query in bundle_queries():
        expr = query.with_range("3s") if query.in_panel else quickened(query.expr, FACTOR)
        found = episode.server.history(expr, episode.began, episode.ended, 0.5)
        if not found:
            missing[str(query)] = query.expr
        elif absent := set(re.findall(r"\{\{(\w+)\}\}", query.legend)) - set().union(*(labels for labels, _ in found)):
            missing[f"{query}: labels {sorted(absent)} of its legend"] = query.expr
    assert missing.keys() == WITHOUT_DATA.keys(), missing


@pytest.mark.parametrize(("alert", "queue"), FAULTS.items())
def test_an_alert_fires_for_the_right_reader_and_names_its_process(episode, alert, queue):
    rank, pid = episode.culprits[queue]
    fired = episode.fired[alert]
    assert fired["labels"]["reader"] == rank
    assert f"reader {rank} (pid {pid})" in fired["annotations"]["summary"]
    assert f"Queue {queue} on 127.0.0.1:" in fired["annotations"]["summary"]


def test_no_alert_ever_named_another_reader(episode):
    # A busy ring waits for everyone now and then, for as long as this machine is busy; the alerts say so, rightly.
    fired = 'ALERTS{alertstate="firing", queue=~"stopped|killed"}'
    blocked = 'ALERTS{alertstate="firing", alertname="HeadOfLineBlocking"}'
    ever = episode.server.history(f"{fired} or {blocked}", episode.faulted, episode.ended, 0.25)
    named = {(labels["queue"], labels["reader"]) for labels, _ in ever}
    assert named <= {(queue, rank) for queue, (rank, _) in episode.culprits.items()}


def test_an_exporter_that_is_down_is_noticed(episode):
    down = {
        one["labels"]["instance"] for one in episode.server.firing() if one["labels"]["alertname"] == "ExporterDown"
    }
    assert len(down) == 1


@pytest.mark.parametrize(
    ("expr", "expected"),
    [
        ('arena_writer_blocked_seconds_total{queue="scripted", reader="2"}', lambda waited: waited[2]),
        ('sum(arena_writer_blocked_seconds_total{queue="scripted"})', lambda waited: waited[2]),
        (
            'arena_writer_blocked_excess_seconds_total{queue="scripted", reader="2"}',
            lambda waited: waited[2] - waited[1],
        ),
        ('arena_writer_blocked_full_seconds_total{queue="scripted"}', lambda waited: waited[0]),
    ],
    ids=["blocked", "some", "excess", "full"],
)
def test_the_blame_of_a_scripted_wait_is_right_to_5_percent(episode, expr, expected):
    ((_, values),) = episode.server.history(expr, episode.began, episode.ended, 0.5)
    blamed = values[-1]
    print(f"{expr}: {blamed:.4f} s, expected {expected(episode.waited):.4f} s")
    assert blamed == pytest.approx(expected(episode.waited), rel=0.05)


# --- without an episode ----------------------------------------------------------------------------------------------


def test_the_rules_pass_their_unit_tests():
    promtool = require_program("promtool")
    for arguments in (["test", "rules", "rules_test.yml"], ["check", "config", "prometheus.yml"]):
        ran = subprocess.run(
            [promtool, *arguments], cwd=BUNDLE, capture_output=True, text=True, check=False, timeout=60
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr


def test_only_times_are_divided():
    text = "expr: a > 30\n  and rate(b[2m]) > 0.1\n  and c > 0\nfor: 10s\n"
    assert quickened(text, 20) == "expr: a > 1.5\n  and rate(b[6000ms]) > 0.1\n  and c > 0\nfor: 500ms\n"
