"""Cases from the field: what users of systems like this one hit, as it has to go here.

Dead peers are in `test_crash`, attaching in `test_peers`.
"""

import gc
import itertools
import json
import os
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import arena.memory
from arena import MessageQueue, QueueConfig
from arena.errors import OutOfMemory, PeerDied, QueueTimeout
from arena.probe import EndpointState, ProbeReader, pages
from arena.probe.page import L_PROGRESS_NS, L_STATE
from tests.conftest import require_program
from tests.support import fleet as hand
from tests.support.fleet import Here, Worker, arena_maps, cpu_seconds, eventually, open_fds, within

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.usefixtures("run_dir")


def queue_of(n_reader: int, **settings: Any) -> MessageQueue:
    return MessageQueue(n_reader, config=QueueConfig(**settings))


def this_process_reads(queue: MessageQueue, rank: int = 0) -> MessageQueue:
    return MessageQueue.create_from_handle(queue.export_handle(), rank)


def can_lend(queue: MessageQueue, nbytes: int) -> bool:
    """Whether the arena has room for that many bytes at this moment."""
    try:
        with queue.lend((nbytes,), torch.uint8):
            return True
    except OutOfMemory:
        return False


# ── 1. a tiny /dev/shm ───────────────────────────────────────────────────────────────────────────
TINY_SHM = """
import json, os, signal, subprocess
import torch
from arena import MessageQueue, QueueConfig
from arena.errors import RunDirectoryError

signal.alarm(60)
torch.set_num_threads(1)  # OpenMP's threads do not survive the fork

def size(mib):
    subprocess.run(["mount", "-o", f"remount,size={mib}m", "/dev/shm"], check=True)

def arrives(mib):
    size(mib)
    with MessageQueue(1, config=QueueConfig(max_arena_bytes=1 << 30)) as queue:
        handle = queue.export_handle()
        child = os.fork()
        if child == 0:
            signal.alarm(40)
            with MessageQueue.create_from_handle(handle, 0) as reader:
                arrived = torch.equal(reader.dequeue(timeout=30), torch.arange(5_000_000, dtype=torch.int32))
            os._exit(0 if arrived else 1)
        queue.enqueue(torch.arange(5_000_000, dtype=torch.int32), timeout=30)
        return os.waitpid(child, 0)[1]

def fills(leave):
    '''Whether a queue and its reader start with so many bytes left on /dev/shm, and what is said if not.'''
    free = os.statvfs("/dev/shm")
    with open("/dev/shm/filler", "wb") as filler:
        os.posix_fallocate(filler.fileno(), 0, free.f_bavail * free.f_frsize - leave)
    try:
        with MessageQueue(1) as queue, MessageQueue.create_from_handle(queue.export_handle(), 0) as reader:
            queue.enqueue(1, timeout=5)
            assert reader.dequeue(timeout=5) == 1
            return "started"
    except RunDirectoryError as error:
        return [error.expected, error.found]
    finally:
        os.unlink("/dev/shm/filler")

told = {"arrives": [arrives(8), arrives(64)]}
size(8)
told["fills"] = {leave: fills(leave) for leave in [0, *range(4096, 160_000, 8192)]}
told["left"] = os.listdir(f"/dev/shm/arena-{os.getuid()}")
print(json.dumps(told))
"""


def test_a_tiny_dev_shm_holds_no_tensor_and_a_full_one_is_an_error_with_numbers(monkeypatch, tmp_path):
    unshare, mount = require_program("unshare"), require_program("mount")
    in_a_namespace = [unshare, "-rm", "sh", "-c"]
    shell = f"{mount} -t tmpfs -o size=8m tmpfs /dev/shm && exec "
    if subprocess.run([*in_a_namespace, shell + "true"], check=False, capture_output=True).returncode:
        pytest.skip("this user may not make a mount namespace")
    for name in ("ARENA_RUN_DIR", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "tiny.py").write_text(TINY_SHM)
    ran = subprocess.run(
        [*in_a_namespace, shell + f"{sys.executable} {tmp_path / 'tiny.py'}"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert told["arrives"] == [0, 0]
    refusals = [outcome for outcome in told["fills"].values() if outcome != "started"]
    assert told["fills"]["0"] != "started"
    assert list(told["fills"].values())[-1] == "started"
    for expected, found in refusals:
        assert any(word.isdigit() for word in expected.split()), expected
        assert any(word.isdigit() for word in found.split()), found
    assert told["left"] == []


# ── 2. a frozen reader ───────────────────────────────────────────────────────────────────────────
def test_a_frozen_reader_is_named_once_and_loses_nothing(fleet):
    warnings: list[str] = []
    config = QueueConfig(slots=8, stall_warning_s=0.2)
    with MessageQueue(4, config=config, on_warning=warnings.append) as queue:
        readers = fleet.readers(queue)
        frozen = readers[2]
        draining = [reader.begin(hand.drain, 10) for reader in readers]
        frozen.freeze()
        for number in range(8):
            queue.enqueue(number, timeout=20)
        eventually(lambda: queue.statistics().lag_by_reader == {0: 0, 1: 0, 2: 8, 3: 0})
        with pytest.raises(QueueTimeout) as caught:
            queue.enqueue("the ninth", timeout=1.0)
        for verdict in (str(caught.value), *warnings):
            assert f"awaiting_readers reader 2 (pid {frozen.pid}) lag 8 (stopped by a signal, has taken" in verdict
            assert all(f"reader {rank} " not in verdict for rank in (0, 1, 3))
        assert len(warnings) == 1
        told = queue.statistics()
        assert told.peers == dict.fromkeys(range(4), "attached")
        assert told.excess_s_by_reader[2] >= 0.9
        assert [told.blocked_s_by_reader[rank] for rank in (0, 1, 3)] == [0, 0, 0]
        frozen.thaw()
        queue.enqueue(8, timeout=20)
        queue.enqueue(9, timeout=20)
        assert [call.result() for call in draining] == [list(range(10))] * 4


# ── 5. busy is not dead ──────────────────────────────────────────────────────────────────────────
def work(here: Here, seconds: float) -> None:
    """Long work in the caller's own code, with a sign of life in it."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        here.queue.heartbeat()
        time.sleep(0.005)


def test_a_reader_that_works_and_says_so_is_working_and_not_dead(fleet, run_dir):
    with queue_of(1, slots=2) as queue:
        (reader,) = fleet.readers(queue)
        working = reader.begin(work, 1.5)
        queue.enqueue(0)
        queue.enqueue(1)
        (directory,) = run_dir.iterdir()
        (page,) = [path for path in pages(directory) if path.name.startswith("reader-0-")]
        with ProbeReader(page) as looked_at:
            beats = set()
            while not working.done():
                assert looked_at.live(L_STATE) == EndpointState.WORKING
                beats.add(looked_at.live(L_PROGRESS_NS))
                with pytest.raises(QueueTimeout, match=f"pid {reader.pid}"):
                    queue.enqueue("busy", timeout=0.05)
                assert queue.statistics().peers == {0: "attached"}
            assert len(beats) > 5
        assert reader.call(hand.drain, 2) == [0, 1]


# ── 7. attach order ──────────────────────────────────────────────────────────────────────────────
STRANGER = """
import pickle, sys
from arena import MessageQueue
with open(sys.argv[1], "rb") as file:
    handle = pickle.load(file)
reader = MessageQueue.create_from_handle(handle, 0)
print(reader.dequeue(timeout=30)["tensor"].sum().item())
kept = reader.dequeue(timeout=30)
"""


def test_an_unrelated_interpreter_a_late_reader_and_a_handle_sent_thrice_all_decode(fleet, tmp_path):
    tensor = torch.arange(100_000)
    with queue_of(4) as queue:
        handle = queue.export_handle()
        (tmp_path / "handle").write_bytes(pickle.dumps(handle))
        for _ in range(2):
            queue.enqueue({"tensor": tensor})
        ran = subprocess.run(
            [sys.executable, "-c", STRANGER, str(tmp_path / "handle")],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (ran.returncode, ran.stderr) == (0, "")
        assert int(ran.stdout) == int(tensor.sum())
        with pytest.raises(PeerDied) as caught:  # it ended without leaving
            eventually(lambda: queue.enqueue("after the stranger"))
        assert (caught.value.rank, caught.value.signal) == (0, None)
        queue.enqueue("after the stranger")

        copies = [pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(handle)))) for _ in range(3)]
        late = [fleet.start() for _ in copies]
        for rank, (worker, copy) in enumerate(zip(late, copies, strict=True), start=1):
            worker.call(hand.attach, copy, rank)
            first, second, third = worker.call(hand.drain, 3)
            assert torch.equal(first["tensor"], tensor)
            assert torch.equal(second["tensor"], tensor)
            assert third == "after the stranger"


# ── 8. closing with a live view ──────────────────────────────────────────────────────────────────
def settled() -> tuple[list[str], list[str]]:
    """Descriptors and maps of this process, garbage aside."""
    gc.collect()
    return sorted(path for path in open_fds().values() if "/proc/" not in path), arena_maps()


def test_a_view_outlives_the_queue_and_takes_every_descriptor_and_map_with_it(run_dir):
    before = settled()
    with pytest.raises(ValueError, match="mine"), queue_of(1) as queue:
        reader = this_process_reads(queue)
        with reader:
            queue.enqueue([torch.arange(1 << 20), "text"])
            kept = reader.dequeue(timeout=5)[0][10:20]
            raise ValueError("mine")
    assert kept.tolist() == list(range(10, 20))
    assert settled()[0] == before[0]
    assert len(arena_maps()) > len(before[1])
    del queue, reader
    assert kept.tolist() == list(range(10, 20))
    # Its own segment is left, and the reader's word in which its death will give the block back.
    left = [line.split()[5] for line in settled()[1] if line not in before[1]]
    assert sorted(left) == ["/memfd:arena:queue", "/memfd:arena:queue:0"]
    del kept
    assert settled() == before


def test_a_closed_queue_that_somebody_still_refers_to_keeps_no_tensor_memory(run_dir):
    before = settled()
    queue = queue_of(1)
    reader = this_process_reads(queue)
    with queue.lend((1 << 20,), torch.uint8) as lent:
        lent.fill_(1)
    queue.enqueue(lent)
    kept = reader.dequeue(timeout=5)
    queue.shutdown()
    reader.shutdown()
    assert int(kept.sum()) == int(lent.sum()) == 1 << 20
    del kept, lent
    gc.collect()
    large = [line for line in arena_maps() if _size(line) >= 64 << 20]
    assert large == []
    assert queue.statistics().state == "closed"
    del queue, reader
    assert settled() == before


def _size(line: str) -> int:
    start, _, end = line.split(maxsplit=1)[0].partition("-")
    return int(end, 16) - int(start, 16)


def maps_and_fds(here: Here) -> tuple[int, int]:
    gc.collect()
    return len(arena_maps()), len(open_fds())


def test_a_reader_process_is_back_at_its_baseline_after_a_hundred_queues(fleet):
    worker = fleet.start()
    worker.call(come_and_go, 1)
    before = worker.call(maps_and_fds)
    worker.call(come_and_go, 40)
    assert worker.call(maps_and_fds) == before


def come_and_go(here: Here, times: int) -> None:
    """Both ends of queue after queue, each with a tensor in it that is dropped late."""
    kept = []
    for _ in range(times):
        with queue_of(1, segment_bytes=1 << 20) as queue, this_process_reads(queue) as reader:
            queue.enqueue(torch.zeros(1 << 17))
            kept.append(reader.dequeue(timeout=5))
    kept.clear()


# ── 9. mutation after enqueue ────────────────────────────────────────────────────────────────────
PATHS = {"inline": ({}, 100), "block": ({}, 100_000), "fragments": ({"max_arena_bytes": 0}, 100_000)}


@pytest.mark.parametrize("path", PATHS)
def test_readers_see_what_was_enqueued_whatever_becomes_of_it(fleet, path):
    settings, count = PATHS[path]
    with queue_of(2, slots=256, **settings) as queue:
        readers = fleet.readers(queue)
        tensor = torch.arange(count, dtype=torch.int32)
        array = np.arange(count, dtype=np.int64)
        raw = bytearray(b"x" * count)
        strided = torch.arange(2 * count, dtype=torch.int32)[::2]
        sent = [tensor, array, raw, strided, {"both": (tensor, tensor[3:7])}]
        for obj in sent:
            queue.enqueue(obj)
        expected = [tensor.tolist(), array.tolist(), bytes(raw), strided.tolist(), tensor[3:7].tolist()]
        tensor.fill_(-1)
        strided.fill_(-1)
        array[:] = -1
        raw[:] = bytes(count)
        for reader in readers:
            assert reader.call(plainly, 5) == expected
        assert set(queue.statistics().messages_by_path) >= {path}
        assert queue.statistics().messages_by_path[path] == 5


def plainly(here: Here, count: int) -> list[Any]:
    """Take messages and turn what came into lists and bytes."""
    taken = hand.drain(here, count)
    plain = [one["both"][1] if isinstance(one, dict) else one for one in taken]
    return [bytes(one) if isinstance(one, (bytes, bytearray, memoryview)) else one.tolist() for one in plain]


# ── 10. timeouts keep pairing ────────────────────────────────────────────────────────────────────
def test_a_dequeue_that_times_out_within_a_message_goes_on_where_it_was(fleet):
    with queue_of(2, slots=4, max_arena_bytes=0) as queue:
        first, second = fleet.readers(queue)
        large = bytes(range(256)) * 1000  # some sixteen frames, through four slots
        sending = _in_thread(lambda: (queue.enqueue(large, timeout=30), queue.enqueue("next", timeout=30)))
        for _ in range(3):  # the second reader holds the line
            with pytest.raises(QueueTimeout, match="awaiting_write"):
                first.call(hand.dequeue, timeout=0.05)
        assert first.call(hand.statistics).lag_by_reader == {0: 0}
        draining = [reader.begin(hand.drain, 2) for reader in (first, second)]
        assert [call.result() for call in draining] == [[large, "next"]] * 2
        sending.join(10)


def test_an_enqueue_that_times_out_within_a_message_is_undone_and_the_next_message_is_the_next(fleet):
    with queue_of(1, slots=4, max_arena_bytes=0) as queue:
        (reader,) = fleet.readers(queue)
        queue.enqueue("first")
        for _ in range(2):  # the second attempt owes the same abort still
            with pytest.raises(QueueTimeout):
                queue.enqueue(bytes(200_000), timeout=0.05)
        taking = reader.begin(hand.drain, 3)
        queue.enqueue("second", timeout=20)
        queue.enqueue(b"x" * 200_000, timeout=20)
        assert taking.result() == ["first", "second", b"x" * 200_000]


def test_an_enqueue_that_times_out_gives_its_blocks_back_wherever_it_stood(run_dir):
    """The message takes a block and six frames; the ring has room for none of them, for one, ... for five."""
    nbytes = 1 << 18
    with queue_of(1, slots=8, max_arena_bytes=nbytes, segment_bytes=nbytes) as queue:
        reader = this_process_reads(queue)
        message = [torch.zeros(nbytes, dtype=torch.uint8), bytes(90_000)]
        for room in range(6):
            for number in range(8 - room):
                queue.enqueue(number, timeout=5)
            with pytest.raises(QueueTimeout):
                queue.enqueue(message, timeout=0.01)
            told = queue.statistics()
            assert (told.holds_used, told.arena_used_bytes) == (0, 0), f"with room for {room} frames"
            with pytest.raises(QueueTimeout):
                for number in itertools.count():
                    assert reader.dequeue(timeout=0.01) == number
            queue.enqueue("next", timeout=5)
            assert reader.dequeue(timeout=5) == "next"
        queue.enqueue(message, timeout=5)
        tensor, rest = reader.dequeue(timeout=5)
        assert (tensor.numel(), len(rest)) == (nbytes, 90_000)
        assert not can_lend(queue, nbytes)
        del tensor
        assert can_lend(queue, nbytes)
        reader.shutdown()


def _in_thread(function: Any) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


# ── 11. lost wake-ups ────────────────────────────────────────────────────────────────────────────
def drop_wakes(here: Here | None = None) -> None:
    """From now on this process wakes nobody."""
    arena.memory.Futex.wake = lambda self: None  # type: ignore[method-assign]


def test_messages_arrive_without_any_wake_and_each_missed_one_is_counted(fleet):
    writer, reader = fleet.start(), fleet.start()
    for worker in (writer, reader):
        worker.call(drop_wakes)
    reader.call(hand.attach, writer.call(hand.create, 1, slots=2), 0)
    for number in range(3):
        taking = reader.begin(hand.dequeue)
        _until_parked(reader)
        writer.call(hand.enqueue, number)
        with within(5):
            assert taking.result() == number
    assert reader.call(hand.statistics).missed_wakes >= 3

    writer.call(hand.enqueue, 3, 4)
    blocked = writer.begin(hand.enqueue, 5)
    _until_parked(writer)
    with within(5):
        assert reader.call(hand.drain, 3) == [3, 4, 5]
        blocked.result()
    assert writer.call(hand.statistics).missed_wakes >= 1


def _until_parked(worker: Worker) -> None:
    """Asleep in futex(2), and not only for a moment between two polls."""
    eventually(lambda: Path(f"/proc/{worker.pid}/wchan").read_text().startswith("futex"))


# ── 12. idle and decode CPU ──────────────────────────────────────────────────────────────────────
def test_an_idle_reader_sleeps(fleet):
    with queue_of(1) as queue:
        (reader,) = fleet.readers(queue)
        idle = reader.begin(hand.dequeue, timeout=None)
        _until_parked(reader)
        spent = cpu_seconds(reader.pid)
        ends = time.monotonic() + 3.0
        eventually(lambda: time.monotonic() >= ends, every=0.2)
        assert cpu_seconds(reader.pid) - spent <= 0.15  # 5 % of a core, ten times what it takes
        assert not idle.done()
        queue.enqueue("awake")
        assert idle.result() == "awake"


def pin(here: Here) -> None:
    """Share one CPU with whoever else is told this."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def stream(here: Here, count: int) -> None:
    for number in range(count):
        here.queue.enqueue(number, timeout=30)


def test_a_writer_and_four_readers_get_on_with_one_cpu(fleet):
    writer, *readers = [fleet.start() for _ in range(5)]
    for worker in (writer, *readers):
        worker.call(pin)
    handle = writer.call(hand.create, 4, slots=8)
    for rank, reader in enumerate(readers):
        reader.call(hand.attach, handle, rank)
    with within(20):
        draining = [reader.begin(hand.drain, 1000) for reader in readers]
        writer.call(stream, 1000)
        assert [call.result() for call in draining] == [list(range(1000))] * 4


# ── 14. views outlive the tensor ─────────────────────────────────────────────────────────────────
def keep_views(here: Here) -> None:
    """Take a tensor, keep four views of it, and let go of the tensor itself."""
    tensor = here.queue.dequeue(timeout=30)
    part = tensor[1000:2000]
    here.kept["slice"] = part
    here.kept["unsqueezed"] = part.unsqueeze(0)
    here.kept["parameter"] = torch.nn.Parameter(part.unsqueeze(0), requires_grad=False)
    here.kept["array"] = part.numpy()


def values(here: Here) -> list[float]:
    return [float(view.reshape(-1)[0]) for view in here.kept.values()]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_a_block_stays_until_its_last_view_dies_and_no_longer(fleet, order):
    nbytes = 1 << 22
    with queue_of(1, max_arena_bytes=nbytes, segment_bytes=nbytes) as queue:
        (reader,) = fleet.readers(queue)
        queue.enqueue(torch.arange(nbytes // 4, dtype=torch.float32))
        reader.call(keep_views)  # and never dequeues again
        names = ["slice", "unsqueezed", "parameter", "array"]
        for index in order:
            assert not can_lend(queue, nbytes)
            assert queue.statistics().held_bytes_by_reader == {0: nbytes}
            assert set(reader.call(values)) == {1000.0}
            reader.call(hand.drop, names[index])
        assert can_lend(queue, nbytes)
        assert queue.statistics().held_bytes_by_reader == {}


def test_the_same_tensor_in_two_messages_is_free_when_both_are_done_with(fleet):
    nbytes = 1 << 20
    with queue_of(2, max_arena_bytes=nbytes, segment_bytes=nbytes) as queue:
        readers = fleet.readers(queue)
        with queue.lend((nbytes,), torch.uint8) as tensor:
            tensor.fill_(3)
        for name in ("a", "b"):
            queue.enqueue(tensor)
            for reader in readers:
                reader.call(hand.keep, name)
        del tensor
        for reader, name in itertools.product(readers, ("b", "a")):
            assert not can_lend(queue, nbytes)
            reader.call(hand.drop, name)
        assert can_lend(queue, nbytes)
