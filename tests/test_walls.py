"""Where resources end: descriptors, locked memory, file sizes, address space, cores, and a clock that is set."""

import ast
import contextlib
import itertools
import os
import resource
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from arena import Handle, MessageQueue, QueueConfig, RemoteConfig
from arena.errors import ArenaError, OutOfMemory, PeerDied, QueueTimeout
from tests.support import fleet as hand
from tests.support import processes
from tests.support.fleet import Here, arena_maps, eventually, open_fds

pytestmark = pytest.mark.usefixtures("run_dir")
ARENA = Path(__file__).parent.parent / "arena"


def lower(kind: int, limit: int) -> None:
    resource.setrlimit(kind, (limit, resource.getrlimit(kind)[1]))


# ── descriptors ──────────────────────────────────────────────────────────────────────────────────
def attach_with_few_descriptors(here: Here, handle: Handle) -> list[str]:
    """With one more descriptor each time, until it works; the errors on the way, and that none is left open."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    errors = []
    before = len(open_fds())
    highest = max(open_fds())
    for room in range(1, 40):
        lower(resource.RLIMIT_NOFILE, highest + room)
        try:
            here.queue = MessageQueue.create_from_handle(handle, 0, timeout=5)
            break
        except (ArenaError, OSError) as error:
            errors.append(type(error).__name__)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        assert len(open_fds()) == before
    assert here.queue is not None
    return errors


def test_a_reader_without_descriptors_leaves_nothing_open_and_attaches_once_there_are_some(fleet):
    with MessageQueue(1) as queue:
        worker = fleet.start()
        errors = worker.call(attach_with_few_descriptors, queue.export_handle())
        assert errors
        queue.enqueue(torch.ones(1 << 16))
        assert int(worker.call(hand.dequeue).sum()) == 1 << 16


def queues_with_few_descriptors() -> list[str]:
    """The same for a writer."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    errors = []
    before, highest = len(open_fds()), max(open_fds())
    threads = threading.active_count()
    for room in range(1, 40):
        lower(resource.RLIMIT_NOFILE, highest + room)
        try:
            MessageQueue(1).shutdown()
            return errors
        except (ArenaError, OSError) as error:
            errors.append(type(error).__name__)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        assert (len(open_fds()), threading.active_count()) == (before, threads)
    raise AssertionError(errors)


def test_a_queue_that_can_not_be_made_for_want_of_descriptors_leaves_nothing_behind(run_dir):
    assert processes.run(queues_with_few_descriptors)
    assert os.listdir(run_dir) == []


# ── memory ───────────────────────────────────────────────────────────────────────────────────────
def a_message_with(limits: list[tuple[int, int]], **settings: Any) -> tuple[int, dict[str, int]]:
    """Send a tensor to ourselves under limits; its sum, and why it had to take another way."""
    for kind, limit in limits:
        lower(kind, limit)
    with (
        MessageQueue(1, config=QueueConfig(**settings)) as queue,
        MessageQueue.create_from_handle(queue.export_handle(), 0) as reader,
    ):
        taken: list[Any] = []
        taking = threading.Thread(target=lambda: taken.append(reader.dequeue(timeout=30)))
        taking.start()
        queue.enqueue(torch.ones(100_000, dtype=torch.uint8), timeout=30)
        taking.join(30)
        total = int(taken[0].sum())
        taken.clear()
        return total, queue.statistics().fallbacks


def test_nothing_needs_locked_memory():
    assert processes.run(a_message_with, [(resource.RLIMIT_MEMLOCK, 0)]) == (100_000, {})


def test_a_segment_larger_than_files_may_be_is_a_fallback_and_the_message_arrives():
    total, fallbacks = processes.run(a_message_with, [(resource.RLIMIT_FSIZE, 4 << 20)])
    assert (total, set(fallbacks)) == (100_000, {"memory_headroom"})


def a_queue_under(kind: int, limit: int) -> str:
    lower(kind, limit)
    try:
        MessageQueue(1, config=QueueConfig(probes=False)).shutdown()
    except OutOfMemory as error:
        return str(error)
    return ""


def test_a_ring_larger_than_files_may_be_is_an_error_that_says_so(run_dir):
    assert "ulimit" in processes.run(a_queue_under, resource.RLIMIT_FSIZE, 1 << 16)
    assert os.listdir(run_dir) == []


def without_address_space() -> tuple[int, dict[str, int]]:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    # Enough for rings, threads' stacks and a message; not for a segment of 1 GiB, mapped at both ends.
    return a_message_with([(resource.RLIMIT_AS, used + (800 << 20))], segment_bytes=1 << 30)


def test_a_segment_without_address_space_is_a_fallback_and_the_message_arrives():
    total, fallbacks = processes.run(without_address_space)
    assert (total, set(fallbacks)) == (100_000, {"memory_headroom"})


# ── many ─────────────────────────────────────────────────────────────────────────────────────────
def test_64_readers_all_get_everything():
    with MessageQueue(64) as queue, contextlib.ExitStack() as stack:
        readers = [
            stack.enter_context(MessageQueue.create_from_handle(queue.export_handle(), rank, timeout=30))
            for rank in range(64)
        ]
        queue.wait_until_ready(30)
        for number in range(10):
            queue.enqueue([number, torch.full((20_000,), number)], timeout=30)
        for reader in readers:
            for number in range(10):
                got, tensor = reader.dequeue(timeout=30)
                assert got == number
                assert int(tensor[-1]) == number
        del tensor
        assert queue.statistics().arena_used_bytes == 0


def open_and_close(count: int) -> tuple[list[int], list[int]]:
    """Queues, one after the other, each with a message; what there is in this process after a few, and after all."""

    def here() -> list[int]:
        return [len(open_fds()), len(arena_maps()), threading.active_count()]

    seen: list[list[int]] = []
    for number in range(count):
        with (
            MessageQueue(1, config=QueueConfig(slots=4, slot_bytes=4096)) as queue,
            MessageQueue.create_from_handle(queue.export_handle(), 0) as reader,
        ):
            queue.enqueue(number, timeout=20)
            assert reader.dequeue(timeout=20) == number
        if number == 5:
            seen.append(here())
    return seen[0], here()


@pytest.mark.parametrize("count", [150, pytest.param(1000, marks=pytest.mark.stress)])
def test_queues_that_are_opened_and_closed_leave_nothing(run_dir, count):
    few, all_of_them = processes.run(open_and_close, count, timeout_s=55)
    assert all_of_them == few
    assert os.listdir(run_dir) == []


# ── time ─────────────────────────────────────────────────────────────────────────────────────────
def wall_clock_users() -> set[str]:
    """Modules of arena/ that look at a clock which can be set."""
    found = set()
    for path in sorted(ARENA.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module in ("time", "datetime"):
                found.add(path.relative_to(ARENA).as_posix())
            named = isinstance(node, ast.Attribute) and node.attr in ("time", "time_ns", "now", "CLOCK_REALTIME")
            if named and isinstance(node.value, ast.Name) and node.value.id in ("time", "datetime"):
                found.add(path.relative_to(ARENA).as_posix())
    return found


def test_a_clock_that_is_set_moves_no_deadline():
    """All waits go by CLOCK_MONOTONIC, futexes too (FUTEX_WAIT's time is relative): nobody can set that.

    The wall clock is looked at where people, or other hosts, are told a time, and for the age of what lies in the run
    directory; nothing waits for it.
    """
    assert wall_clock_users() <= {"probe/page.py", "probe/reader.py", "probe/directory.py"}


def set_the_clock_at_every_look(here: Here) -> None:
    """Whoever asks for the time of day is told another year each time."""
    real, looks = time.time, itertools.count()
    time.time = lambda: real() + 3e7 * (-1) ** next(looks)
    time.time_ns = lambda: int(time.time() * 1e9)


def timed_out(here: Here, timeout: float) -> float:
    began = time.monotonic()
    with pytest.raises(QueueTimeout):
        here.queue.dequeue(timeout=timeout)
    return time.monotonic() - began


def told_of_a_death(here: Here) -> int:
    with pytest.raises(PeerDied) as told:
        while True:
            here.queue.enqueue("on", timeout=30)
    return told.value.rank


def test_while_the_clock_is_set_back_and_forth_messages_timeouts_and_deaths_are_as_ever(fleet):
    writer, reader, other = fleet.start(), fleet.start(), fleet.start()
    for worker in (writer, reader, other):
        worker.call(set_the_clock_at_every_look)
    handle = writer.call(hand.create, 2, slots=4, on_reader_death="raise")
    reader.call(hand.attach, handle, 0)
    other.call(hand.attach, handle, 1)
    assert reader.call(timed_out, 0.2) >= 0.2
    writer.call(hand.enqueue, "on")
    assert (reader.call(hand.dequeue), other.call(hand.dequeue)) == ("on", "on")
    other.kill()
    assert writer.call(told_of_a_death) == 1


@pytest.mark.parametrize("waits", [True, False])
def test_a_gap_in_which_nobody_ran_is_nobody_s_silence_on_another_host(fleet, waits):
    """As when virtual machines are paused, for longer than anybody may be silent."""
    pytest.importorskip("zmq")
    from tests.support import remotes

    writer = fleet.start()
    handle = writer.call(remotes.create, 1, RemoteConfig("127.0.0.1", timeout_s=1.0))
    (reader,) = remotes.readers_afar(fleet, handle, 0)
    writer.call(hand.enqueue, "first")
    assert reader.call(hand.dequeue) == "first"
    everybody = [writer.pid, reader.pid, writer.call(forwarder)]
    waiting = reader.begin(hand.dequeue) if waits else None
    time.sleep(0.1)
    for pid in everybody:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(1.6)
    for pid in everybody:
        os.kill(pid, signal.SIGCONT)
    if waiting is not None:
        time.sleep(0.3)  # it looks, and finds that nothing has come for long
    writer.call(hand.enqueue, "on it goes")
    assert (waiting or reader.begin(hand.dequeue)).result() == "on it goes"
    assert writer.call(hand.statistics).errors == {}


def forwarder(here: Here) -> int:
    from tests.support import remotes

    return remotes.forwarder_of(here.queue)


def test_a_gap_in_which_nobody_ran_is_no_death_and_loses_nothing(fleet):
    """As after a suspend: everybody stops at once, for longer than any sleep or look, and goes on."""
    writer, reader = fleet.start(), fleet.start()
    reader.call(hand.attach, writer.call(hand.create, 1), 0)
    waiting = reader.begin(hand.dequeue)
    eventually(lambda: Path(f"/proc/{reader.pid}/wchan").read_text().startswith("futex"))
    writer.freeze()
    reader.freeze()
    time.sleep(0.6)
    reader.thaw()
    writer.thaw()
    writer.call(hand.enqueue, "on it goes")
    assert waiting.result() == "on it goes"
    assert writer.call(hand.statistics).errors == {}
