"""Attaching and leaving: who may, in which order, how often, and what a stranger can do about it."""

import contextlib
import ctypes
import gc
import itertools
import os
import random
import resource
import signal
import socket
import subprocess
import threading
import time
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from arena import Handle, MessageQueue, QueueConfig
from arena.errors import (
    ArenaError,
    AttachRefused,
    HandleMismatch,
    InvalidArgument,
    NoReader,
    OutOfMemory,
    PeerDied,
    QueueClosed,
    QueueTimeout,
    UseAfterFork,
)
from arena.peers import Process
from arena.probe import collect_garbage, identity, pages
from tests.support import fleet as hand
from tests.support.fleet import Here, arena_maps, cpu_seconds, eventually, open_fds, within

pytestmark = pytest.mark.usefixtures("run_dir")


@pytest.fixture
def queue(run_dir) -> Iterator[MessageQueue]:
    with MessageQueue(2) as made:
        yield made


def attached(queue: MessageQueue, rank: int) -> MessageQueue:
    return MessageQueue.create_from_handle(queue.export_handle(), rank, timeout=20)


def still_serves(queue: MessageQueue) -> None:
    """Attaching works, and a message arrives."""
    with attached(queue, 0) as first, attached(queue, 1) as second:
        queue.enqueue("hello", timeout=10)
        assert first.dequeue(timeout=10) == second.dequeue(timeout=10) == "hello"


# ── ranks and handles ────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("rank", [-1, 2, 1000, 10**30, -(10**30)])
def test_a_rank_that_the_queue_does_not_have_is_refused(queue, rank):
    with pytest.raises(AttachRefused, match=f"no rank {rank}"):
        attached(queue, rank)
    still_serves(queue)


@pytest.mark.parametrize("rank", [True, None, "0", 0.0])
def test_a_rank_that_is_no_whole_number_is_refused(queue, rank):
    with pytest.raises(InvalidArgument, match="rank"):
        attached(queue, rank)
    still_serves(queue)


def test_a_rank_belongs_to_one_living_reader_until_it_leaves(queue, fleet):
    (worker,) = fleet.readers(queue, 1)
    for _ in range(3):
        with pytest.raises(AttachRefused, match=f"reader 1 \\(pid {worker.pid}\\)"):
            attached(queue, 1)
    worker.call(hand.shut_down)
    with attached(queue, 1) as reader:
        queue.enqueue("yours")
        assert reader.dequeue(timeout=10) == "yours"


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"version": 1}, HandleMismatch, "another version"),
        ({"magic": "other-queue"}, HandleMismatch, "another version"),
        ({"secret": "0" * 64}, HandleMismatch, "secret"),
        ({"secret": ""}, HandleMismatch, "secret"),
        ({"secret": None}, HandleMismatch, "another queue"),
        ({"instance": "0" * 12}, HandleMismatch, "another queue"),
        ({"directory": "/nowhere"}, QueueClosed, "gone"),
        ({"directory": ""}, QueueClosed, "gone"),
    ],
)
def test_a_handle_that_was_tampered_with_opens_nothing(queue, change, error, words):
    with pytest.raises(error, match=words):
        MessageQueue.create_from_handle(replace(queue.export_handle(), **change), 0, timeout=10)
    still_serves(queue)


@pytest.mark.parametrize("change", [{"slots": 32}, {"slot_bytes": 8192}, {"max_holds": 5}])
def test_a_handle_of_another_shape_is_a_mismatch(queue, change):
    handle = queue.export_handle()
    wrong = replace(handle, geometry=replace(handle.geometry, **change))
    with pytest.raises(HandleMismatch):
        MessageQueue.create_from_handle(wrong, 0, timeout=10)
    still_serves(queue)


@pytest.mark.parametrize("handle", [None, "a handle", b"", 7, object()])
def test_what_is_no_handle_is_said_to_be_none(handle):
    with pytest.raises(HandleMismatch, match="not a queue's handle"):
        MessageQueue.create_from_handle(handle, 0)


def test_the_handle_keeps_its_secret_out_of_logs(queue):
    handle = queue.export_handle()
    assert handle.secret not in repr(handle)


def test_the_handle_of_a_queue_that_is_gone_says_so(fleet, run_dir):
    writer = fleet.start()
    closed = writer.call(hand.create, 1)
    writer.call(hand.shut_down)
    with pytest.raises(QueueClosed, match="gone"):
        MessageQueue.create_from_handle(closed, 0)
    killed = writer.call(hand.create, 1)
    writer.kill()
    with within(10), pytest.raises(PeerDied, match="dead"):
        MessageQueue.create_from_handle(killed, 0)
    collect_garbage(run_dir)
    with pytest.raises(QueueClosed, match="gone"):
        MessageQueue.create_from_handle(killed, 0)


def test_two_queues_of_one_name_live_side_by_side(run_dir):
    config = QueueConfig(name="same")
    with MessageQueue(1, config=config) as first, MessageQueue(1, config=config) as second:
        with attached(first, 0) as of_first, attached(second, 0) as of_second:
            first.enqueue("first")
            second.enqueue("second")
            assert of_first.dequeue(timeout=10) == "first"
            assert of_second.dequeue(timeout=10) == "second"
        with pytest.raises(HandleMismatch, match="another queue"):
            mixed = replace(first.export_handle(), directory=second.export_handle().directory)
            MessageQueue.create_from_handle(mixed, 0)
        first.shutdown()
        with attached(second, 0) as again:
            second.enqueue("still here", timeout=10)
            assert again.dequeue(timeout=10) == "still here"
    assert list(run_dir.iterdir()) == []


def test_a_run_directory_too_deep_for_a_socket_address_works(run_dir, fleet, monkeypatch):
    deep = run_dir
    for _ in range(8):
        deep = deep / ("d" * 40)
        deep.mkdir(mode=0o700)
    monkeypatch.setenv("ARENA_RUN_DIR", str(deep))
    with MessageQueue(1) as queue:
        assert len(f"{queue.export_handle().directory}/attach") > 300
        (worker,) = fleet.readers(queue)
        queue.enqueue("down here")
        assert worker.call(hand.dequeue) == "down here"


# ── order ────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("order", list(itertools.permutations(range(3)))[1::2])
def test_readers_attach_in_any_order_around_the_messages_and_miss_none(fleet, order):
    with MessageQueue(3) as queue:
        workers = {}
        for number, rank in enumerate(order):
            queue.enqueue(number)
            workers[rank] = fleet.start()
            workers[rank].call(hand.attach, queue.export_handle(), rank)
        queue.enqueue("last")
        for worker in workers.values():
            assert worker.call(hand.drain, 4) == [0, 1, 2, "last"]


def test_readers_attach_while_the_writer_is_busy_elsewhere(fleet):
    writer = fleet.start()
    handle = writer.call(hand.create, 2)
    busy = writer.begin(sleep_in_c, 1.0)
    readers = [fleet.start() for _ in range(2)]
    attaching = [worker.begin(hand.attach, handle, rank) for rank, worker in enumerate(readers)]
    for call in attaching:
        call.result()
    assert not busy.done()
    busy.result()
    writer.call(hand.enqueue, "now")
    assert [worker.call(hand.dequeue) for worker in readers] == ["now", "now"]


def sleep_in_c(here: Here, seconds: float) -> None:
    time.sleep(seconds)


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_workers_of_every_start_method_read_and_write(fleet, method):
    tensor = torch.arange(100_000)
    with MessageQueue(1) as queue:
        reader = fleet.start(method=method)
        reader.call(hand.attach, queue.export_handle(), 0)
        queue.enqueue([tensor, "text"])
        taken, text = reader.call(hand.dequeue)
        assert torch.equal(taken, tensor)
        assert text == "text"
        handle = reader.call(create_another, 1)
        with MessageQueue.create_from_handle(handle, 0) as here:
            reader.call(enqueue_another, tensor)
            assert torch.equal(here.dequeue(timeout=20), tensor)


def create_another(here: Here, n_reader: int) -> Handle:
    here.another = MessageQueue(n_reader)
    handle: Handle = here.another.export_handle()
    return handle


def enqueue_another(here: Here, obj: object) -> None:
    here.another.enqueue(obj, timeout=20)


# ── leaving and coming back ──────────────────────────────────────────────────────────────────────
def test_with_nobody_left_enqueue_raises_until_somebody_comes(fleet):
    with MessageQueue(2) as queue:
        readers = fleet.readers(queue)
        for reader in readers:
            reader.call(hand.shut_down)
        for _ in range(3):
            with pytest.raises(NoReader, match=r"LEFT.*LEFT"):
                eventually(lambda: queue.enqueue("anybody?", timeout=5))
        readers[1].call(hand.attach, queue.export_handle(), 1)
        queue.enqueue("somebody", timeout=10)
        assert readers[1].call(hand.dequeue) == "somebody"


def test_a_rank_that_is_killed_and_started_again_takes_part_from_the_next_message_on(fleet):
    with MessageQueue(2, config=QueueConfig(slots=8, on_reader_death="continue")) as queue:
        stays, mortal = fleet.readers(queue)
        number = 0
        for _ in range(4):
            for _ in range(3):
                queue.enqueue(number, timeout=20)
                number += 1
            assert stays.call(hand.drain, 3) == mortal.call(hand.drain, 3) == list(range(number - 3, number))
            queue.enqueue("for the dead one too", timeout=20)
            stays.call(hand.dequeue)
            mortal.kill()
            mortal = fleet.start()
            mortal.call(hand.attach, queue.export_handle(), 1)
            assert queue.statistics().peers[1] == "joining"
        queue.enqueue("the end", timeout=20)
        assert queue.statistics().errors == {"peer_died": 4}


def test_a_joiner_that_waits_gets_the_very_next_message(fleet):
    with MessageQueue(1, config=QueueConfig(slots=4)) as queue:
        attached(queue, 0).shutdown()
        (joiner,) = fleet.readers(queue)
        taking = joiner.begin(hand.dequeue)
        queue.enqueue("next", timeout=20)
        assert taking.result() == "next"


def test_what_is_sent_after_a_joiner_has_attached_is_for_the_joiner_too(run_dir):
    with MessageQueue(2) as queue, attached(queue, 1):
        attached(queue, 0).shutdown()
        queue.enqueue("nothing left to see to")
        tell_the_writer = queue._server._on_attach()

        def tell_late() -> None:
            """As where the attach thread loses the processor just then."""
            time.sleep(0.3)
            tell_the_writer()

        queue._server._on_attach = lambda: tell_late
        with attached(queue, 0) as joiner:
            queue.enqueue("for you", timeout=5)
            assert joiner.dequeue(timeout=5) == "for you"


def test_joiners_that_come_in_the_middle_of_a_stream_see_it_without_a_gap(fleet):
    config = QueueConfig(slots=8, on_reader_death="continue")
    with MessageQueue(2, config=config) as queue:
        stays, mortal = fleet.readers(queue)
        over = threading.Event()
        sent = 0

        def send() -> None:
            nonlocal sent
            while not over.is_set():
                queue.enqueue(sent, timeout=20)
                sent += 1
            queue.enqueue(None, timeout=20)

        sending = threading.Thread(target=send, daemon=True)
        sending.start()
        try:
            draining = stays.begin(until_none)
            for _ in range(5):
                mortal.begin(until_none)
                before = sent
                eventually(lambda before=before: sent > before + 20)
                mortal.kill()
                mortal = fleet.start()
                mortal.call(hand.attach, queue.export_handle(), 1)
            last = mortal.begin(until_none)
            before = sent
            eventually(lambda: sent > before + 20)
        finally:
            over.set()
            sending.join(30)
        assert draining.result() == list(range(sent))
        seen = last.result()
        assert seen == list(range(seen[0], sent))


def until_none(here: Here) -> list[int]:
    taken = []
    while (number := here.queue.dequeue(timeout=20)) is not None:
        taken.append(number)
    return taken


def test_readers_that_come_and_go_cost_the_writer_no_descriptor_map_or_page(run_dir, fleet):
    config = QueueConfig(slots=4, segment_bytes=1 << 20, on_reader_death="continue")
    with MessageQueue(1, config=config) as queue:
        (directory,) = run_dir.iterdir()
        worker = fleet.start()

        def again() -> None:
            worker.call(hand.attach, queue.export_handle(), 0)
            queue.enqueue(torch.zeros(1 << 15), timeout=20)
            worker.call(hand.keep, "tensor")

        def leave() -> None:
            worker.call(hand.drop)
            worker.call(hand.shut_down)

        def measured() -> tuple[int, int, int]:
            queue.statistics()
            gc.collect()
            return len(open_fds()), len(arena_maps()), len(pages(directory))

        for _ in range(3):
            again()
            leave()
        before = measured()
        for _ in range(20):
            again()
            leave()
        assert all(now <= then for now, then in zip(measured(), before, strict=True))
        again()
        fds, maps, _ = measured()
        for _ in range(6):
            worker.kill()
            worker = fleet.start()
            again()
        now_fds, now_maps, now_pages = measured()
        assert now_fds <= fds
        assert now_maps <= maps + 1
        assert now_pages <= 3  # the writer's, the reader's, and the last dead one's for the post-mortem
        told = queue.statistics()
        assert told.holds_reclaimed == 6
        assert told.arena_used_bytes <= 2 << 17


def test_the_holds_of_a_reader_that_dies_are_given_back_and_counted_once(fleet):
    nbytes = 1 << 20
    config = QueueConfig(max_arena_bytes=nbytes, segment_bytes=nbytes, on_reader_death="continue")
    with MessageQueue(2, config=config) as queue:
        stays, dies = fleet.readers(queue)
        queue.enqueue(torch.zeros(nbytes, dtype=torch.uint8))
        for reader in (stays, dies):
            reader.call(hand.keep, "tensor")
        dies.kill()
        for _ in range(5):
            with pytest.raises(OutOfMemory), queue.lend((nbytes,), torch.uint8):
                pass
            assert queue.statistics().held_bytes_by_reader == {0: nbytes}
        stays.call(hand.drop)
        with queue.lend((nbytes,), torch.uint8):
            pass
        assert queue.statistics().holds_reclaimed == 1


def test_a_reader_that_leaves_without_having_read_holds_no_block(fleet):
    nbytes = 1 << 20
    with MessageQueue(2, config=QueueConfig(max_arena_bytes=nbytes, segment_bytes=nbytes)) as queue:
        stays, leaves = fleet.readers(queue)
        queue.enqueue(torch.zeros(nbytes, dtype=torch.uint8))
        stays.call(hand.dequeue)
        leaves.call(hand.shut_down)
        with queue.lend((nbytes,), torch.uint8):
            pass
        assert queue.statistics().holds_reclaimed == 0


# ── what keeps a process from running ────────────────────────────────────────────────────────────
def test_a_process_that_is_stopped_is_told_from_one_that_runs_sleeps_or_is_gone(fleet):
    worker = fleet.start()
    who = identity(worker.pid)
    peer = Process(who, None)
    assert peer.halted_by() == ""
    worker.freeze()
    assert peer.halted_by() == "a signal"
    for stranger in (replace(who, start_ticks=who.start_ticks + 1), replace(who, pid_namespace=1)):
        assert Process(stranger, None).halted_by() == ""
    worker.thaw()
    eventually(lambda: peer.halted_by() == "")
    worker.freeze()
    worker.kill()
    assert peer.halted_by() == ""


def test_a_process_in_a_debugger_is_told_from_one_that_was_stopped():
    trace = ctypes.CDLL(None, use_errno=True).ptrace
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            if trace(16, child.pid, None, None):  # PTRACE_ATTACH
                pytest.skip("this process may not trace its children")
            os.waitpid(child.pid, os.WUNTRACED)
            assert Process(identity(child.pid), None).halted_by() == "a debugger"
            trace(17, child.pid, None, None)  # PTRACE_DETACH
        finally:
            child.kill()


# ── a writer that does not answer ────────────────────────────────────────────────────────────────
def test_a_reader_that_gives_up_on_a_frozen_writer_leaves_its_rank_free_and_misses_nothing(fleet):
    writer, reader = fleet.start(), fleet.start()
    handle = writer.call(hand.create, 1, slots=4)
    writer.call(hand.enqueue, "early")
    writer.freeze()
    for _ in range(3):
        with pytest.raises(QueueTimeout, match="did not answer"):
            reader.call(hand.attach, handle, 0, timeout=0.1)
    writer.thaw()
    reader.call(hand.attach, handle, 0)
    writer.call(hand.enqueue, "late")
    assert reader.call(hand.drain, 2) == ["early", "late"]


def test_attaching_to_a_writer_that_dies_at_that_moment_is_a_death_and_not_a_hang(fleet):
    for _ in range(6):
        writer = fleet.start()
        handle = writer.call(hand.create, 1)
        writer.freeze()
        reader = fleet.start()
        attaching = reader.begin(hand.attach, handle, 0)
        writer.kill()
        with within(10), pytest.raises(PeerDied):
            attaching.result()


def test_a_writer_survives_readers_that_die_at_any_moment_of_attaching(fleet):
    with MessageQueue(1, config=QueueConfig(on_reader_death="continue")) as queue:
        moments = random.Random(1)
        for _ in range(10):
            reader = fleet.start()
            reader.begin(hand.attach, queue.export_handle(), 0)
            ends = time.monotonic() + moments.uniform(0, 0.004)
            while time.monotonic() < ends:
                pass
            reader.kill()
        last = fleet.start()
        last.call(hand.attach, queue.export_handle(), 0)
        queue.enqueue("for the last", timeout=20)
        eventually(lambda: last.call(hand.dequeue) == "for the last")


# ── strangers on the socket ──────────────────────────────────────────────────────────────────────
@contextlib.contextmanager
def connected(queue: MessageQueue) -> Iterator[socket.socket]:
    """A stranger's connection to the attach socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.settimeout(20)
        stranger.connect(f"{queue.export_handle().directory}/attach")
        yield stranger


def fds_at_rest(queue: MessageQueue) -> int:
    """Descriptors of this process, once the attach thread runs."""
    with connected(queue) as stranger:
        stranger.send(b"{}")
        while stranger.recv(1 << 16):
            pass
    return len(open_fds())


GARBAGE = {
    "bytes": b"\xff" * 100,
    "a long message": b"[" * 100_000,
    "deep json": b"[" * 50_000 + b"]" * 50_000,
    "a list": b"[1, 2, 3]",
    "null": b"null",
    "an empty hello": b"{}",
    "numbers": b'{"magic": 1, "version": 1e400, "instance": [], "secret": {}, "rank": null, "who": 3}',
    "nothing much": b" ",
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_on_the_attach_socket_is_refused_and_the_next_reader_served(queue, name):
    before = fds_at_rest(queue)
    with connected(queue) as stranger:
        stranger.send(GARBAGE[name])
        answer = stranger.recv(1 << 16)
        assert answer == b"" or b"refused" in answer
    eventually(lambda: len(open_fds()) <= before)
    still_serves(queue)


@pytest.mark.parametrize("count", [1, 2, 64, 253])
def test_descriptors_that_a_stranger_sends_are_closed(queue, count):
    before = fds_at_rest(queue)
    with connected(queue) as stranger, open("/dev/null") as null:
        rights = array("i", [null.fileno()] * count)
        for _ in range(3):
            with contextlib.suppress(OSError):  # refused after the first
                stranger.sendmsg([b'{"magic": "arena-queue"}'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(1 << 16):
                pass
    eventually(lambda: len(open_fds()) <= before)
    still_serves(queue)


def test_a_hello_with_the_secret_and_a_bad_control_segment_is_refused(queue):
    import json

    handle = queue.export_handle()
    who = [os.getpid(), 0, 0]
    hello = {"magic": handle.magic, "version": handle.version, "instance": handle.instance, "secret": handle.secret}
    memfd = os.memfd_create("fake", os.MFD_CLOEXEC)
    os.ftruncate(memfd, handle.geometry.control_bytes)
    before = fds_at_rest(queue)
    for rank, fds in ((0, [memfd]), (0, []), (0, [memfd, memfd]), ("0", [memfd]), (0, [0])):
        with connected(queue) as stranger:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
            stranger.sendmsg([json.dumps({**hello, "rank": rank, "who": who}).encode()], rights)
            assert b"refused" in stranger.recv(1 << 16)
    os.close(memfd)
    eventually(lambda: len(open_fds()) <= before - 1)
    still_serves(queue)


def test_strangers_that_say_nothing_keep_nobody_out(queue):
    with contextlib.ExitStack() as strangers:
        for _ in range(50):
            strangers.enter_context(connected(queue))
        with within(5):
            still_serves(queue)


def test_a_flood_of_strangers_that_hang_up_at_once_is_survived(queue):
    before = fds_at_rest(queue)
    for _ in range(300):
        with connected(queue):
            pass
    eventually(lambda: len(open_fds()) <= before)
    still_serves(queue)


def use_up_descriptors(here: Here) -> None:
    """Leave none."""
    here.limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(open_fds()) + 1, here.limit[1]))
    here.wasted = []
    with contextlib.suppress(OSError):
        while True:
            here.wasted.append(os.open("/dev/null", os.O_RDONLY))


def free_descriptors(here: Here) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, here.limit)
    for fd in here.wasted:
        os.close(fd)


def test_a_writer_out_of_descriptors_lets_readers_wait_and_burns_no_cpu(fleet):
    writer, reader = fleet.start(), fleet.start()
    handle = writer.call(hand.create, 1)
    writer.call(use_up_descriptors)
    spent = cpu_seconds(writer.pid)
    with pytest.raises(QueueTimeout, match="did not answer"):
        reader.call(hand.attach, handle, 0, timeout=1.0)
    assert cpu_seconds(writer.pid) - spent < 0.15
    writer.call(free_descriptors)
    reader.call(hand.attach, handle, 0)
    writer.call(hand.enqueue, "at last")
    assert reader.call(hand.dequeue) == "at last"


# ── fork ─────────────────────────────────────────────────────────────────────────────────────────
def in_fork(action: Any) -> str:
    """Run in a forked child; what it returned, or the name of what it raised, or what killed it."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
        try:
            os.close(receive)
            try:
                outcome = repr(action())
            except BaseException as error:
                outcome = type(error).__name__
            os.write(send, outcome.encode())
        finally:
            os._exit(0)
    os.close(send)
    with open(receive) as pipe:
        told = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return told if code == 0 else f"exit {code}"


def test_an_endpoint_that_was_inherited_through_fork_refuses_every_verb_and_harms_nobody(queue):
    reader = attached(queue, 0)
    queue.enqueue("before")
    writer_verbs = {
        "enqueue": lambda: queue.enqueue(1),
        "enqueue in time": lambda: queue.enqueue(1, timeout=1),
        "statistics": queue.statistics,
        "wait_until_ready": lambda: queue.wait_until_ready(timeout=1),
        "lend": lambda: queue.lend((1,), torch.uint8).__enter__(),
    }
    reader_verbs = {
        "dequeue": reader.dequeue,
        "dequeue in time": lambda: reader.dequeue(timeout=1),
        "statistics": reader.statistics,
        "wait_until_ready": lambda: reader.wait_until_ready(timeout=1),
    }
    for verb in (*writer_verbs.values(), *reader_verbs.values()):
        assert in_fork(verb) == UseAfterFork.__name__
    for harmless in (queue.shutdown, reader.shutdown, queue.heartbeat, reader.heartbeat):
        assert in_fork(harmless) == "None"
    for endpoint in (queue, reader):
        assert "forked" in in_fork(lambda endpoint=endpoint: repr(endpoint))
    queue.enqueue("after")
    assert reader.dequeue(timeout=10) == "before"
    assert reader.dequeue(timeout=10) == "after"
    reader.shutdown()


def test_a_child_that_drops_what_it_inherited_frees_no_byte_of_its_parents(run_dir):
    nbytes = 1 << 20
    with MessageQueue(1, config=QueueConfig(max_arena_bytes=2 * nbytes, segment_bytes=2 * nbytes)) as queue:
        reader = attached(queue, 0)
        queue.enqueue(torch.full((nbytes,), 5, dtype=torch.uint8))
        held = [reader.dequeue(timeout=10)]
        with queue.lend((nbytes,), torch.uint8) as lent:
            lent.fill_(6)
        also_held = [lent]
        del lent

        def drop() -> int:
            first = int(held[0][0])
            held.clear()
            also_held.clear()
            gc.collect()
            return first

        assert in_fork(drop) == "5"
        with pytest.raises(OutOfMemory), queue.lend((nbytes,), torch.uint8):
            pass
        assert int(held[0].sum()) == 5 * nbytes
        assert int(also_held[0].sum()) == 6 * nbytes
        held.clear()
        also_held.clear()
        with queue.lend((2 * nbytes,), torch.uint8):
            pass
        reader.shutdown()


def test_a_forked_child_attaches_for_itself(queue):
    first = attached(queue, 0)
    queue.enqueue("for all")
    handle = queue.export_handle()

    def attach() -> Any:
        with MessageQueue.create_from_handle(handle, 1, timeout=10) as mine:
            return mine.dequeue(timeout=10)

    assert in_fork(attach) == "'for all'"
    assert first.dequeue(timeout=10) == "for all"
    first.shutdown()


def test_a_forked_child_makes_a_queue_of_its_own_beside_what_it_inherited(queue):
    reader = attached(queue, 0)

    def use() -> Any:
        with MessageQueue(1) as mine, MessageQueue.create_from_handle(mine.export_handle(), 0) as read:
            mine.enqueue(torch.arange(50_000))
            return int(read.dequeue(timeout=10).sum())

    assert in_fork(use) == str(50_000 * 49_999 // 2)
    queue.enqueue("parent")
    assert reader.dequeue(timeout=10) == "parent"
    reader.shutdown()


def test_a_fork_while_another_thread_is_inside_the_queue_leaves_the_child_unharmed(queue):
    reader = attached(queue, 0)
    waiting = threading.Thread(target=lambda: reader.dequeue(timeout=20), daemon=True)
    waiting.start()
    eventually(lambda: reader.statistics().state == "waiting")
    assert in_fork(lambda: reader.dequeue(timeout=1)) == UseAfterFork.__name__
    assert in_fork(reader.shutdown) == "None"
    queue.enqueue("go")
    waiting.join(20)
    assert not waiting.is_alive()
    reader.shutdown()


def test_every_refusal_to_attach_leaves_no_descriptor_and_no_map(queue):
    handle = queue.export_handle()

    def refused() -> None:
        for wrong, rank in ((handle, 7), (replace(handle, secret="no"), 0), (replace(handle, instance="no"), 0)):
            with pytest.raises(ArenaError):
                MessageQueue.create_from_handle(wrong, rank, timeout=10)

    refused()
    gc.collect()
    fds, maps = len(open_fds()), len(arena_maps())
    for _ in range(10):
        refused()
    gc.collect()
    eventually(lambda: len(open_fds()) <= fds)
    assert len(arena_maps()) <= maps
    assert [path.name for path in pages(Path(handle.directory))] == ["writer"]
