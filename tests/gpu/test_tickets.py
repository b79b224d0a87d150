"""A real GPU says itself when it has read a block."""

import gc
import mmap
import os
import resource
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import arena
from arena import MessageQueue, QueueConfig, gate, layout
from arena.probe.metrics import GATE_WAYS
from tests.support.fleet import eventually
from tests.support.gpus import CUDA
from tests.support.processes import Child, run
from tests.support.streams import metric_of, pins

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("run_dir"),
    pytest.mark.skipif(not CUDA.is_available(), reason="needs a GPU"),
]

MIB = 1 << 20
BLOCK = 4 * MIB
COUNT = BLOCK // 8
HELD_CYCLES = 400_000_000  # 0.2 s at 2 GHz
CONFIG: dict[str, Any] = {"max_arena_bytes": 2 * BLOCK, "segment_bytes": 2 * BLOCK, "slot_bytes": MIB // 4}


def stamped(number: int) -> torch.Tensor:
    return torch.full((COUNT,), number, dtype=torch.int64)


def hold(stream: Any, cycles: int = HELD_CYCLES) -> None:
    with CUDA.stream(stream):
        CUDA._sleep(cycles)


class Ends:
    """A queue with two blocks, its reader, and some streams."""

    def __init__(self, **settings: Any) -> None:
        CUDA.init()
        self.queue = MessageQueue(1, config=QueueConfig(**{**CONFIG, **settings}))
        self.reader: Any = MessageQueue.create_from_handle(self.queue.export_handle(), 0)
        self.streams = [CUDA.Stream() for _ in range(layout.NAMES + 2)]

    def take(self, number: int) -> torch.Tensor:
        self.queue.enqueue(stamped(number), timeout=10)
        tensor: torch.Tensor = self.reader.dequeue(timeout=10)
        return tensor

    def ready(self) -> None:
        """Have the segment and the tickets registered, and room for the copies in torch's caches."""
        for stream in self.streams:
            self.reader.to_device(self.take(-1), "cuda", stream)
        assert set(pins(self.reader).values()) == {"pinned"}
        assert eventually(lambda: self.tickets._copies)
        CUDA.synchronize()
        assert eventually(lambda: not self.held() or None)

    @property
    def tickets(self) -> Any:
        return self.reader._borrower._home.tickets

    def held(self) -> int:
        return self.queue.statistics().arena_used_bytes

    def ways(self) -> dict[str, int]:
        return {way: metric_of(self.reader, "gate_releases_total", way).value for way in GATE_WAYS}

    def close(self) -> None:
        CUDA.synchronize()
        self.reader.shutdown()
        self.queue.shutdown()


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    made.ready()
    yield made
    made.close()


def drop_while_held(ends: Ends, tensor: torch.Tensor, stream: Any) -> torch.Tensor:
    """A copy that is under way when its source is dropped; whether the block stayed until it was over."""
    hold(stream)
    moved: torch.Tensor = ends.reader.to_device(tensor, "cuda", stream)
    del tensor
    return moved


# ── the device releases ──────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("which", ["side", "default"])
def test_a_block_comes_back_without_anybody_in_the_reader(ends, monkeypatch, which):
    monkeypatch.setattr(gate.helper, "gate", lambda *what: None)
    kept: list[Any] = []
    monkeypatch.setattr(gate.helper, "watch", kept.append)
    stream = ends.streams[0] if which == "side" else CUDA.default_stream()
    moved = drop_while_held(ends, ends.take(1), stream)
    held, running = ends.held(), not stream.query()
    assert running, "the machine was too slow for this to say anything"
    assert held == BLOCK
    stream.synchronize()
    assert eventually(lambda: not ends.held() or None)
    assert bool((moved.cpu() == 1).all())
    assert len(kept) == 1


def test_a_hold_waits_for_a_ticket_of_each_of_its_streams(ends):
    tensor = ends.take(1)
    first, last = ends.streams[0], ends.streams[1]
    hold(last)
    for stream in (first, last):
        ends.reader.to_device(tensor, "cuda", stream)
    del tensor
    first.synchronize()
    held, running = ends.held(), not last.query()
    assert running, "the machine was too slow for this to say anything"
    assert held == BLOCK
    assert eventually(lambda: not ends.held() or None)


def test_more_streams_than_a_hold_can_name_are_for_the_helper(ends):
    before = ends.ways()
    tensor = ends.take(1)
    for stream in ends.streams:
        hold(stream)
        ends.reader.to_device(tensor, "cuda", stream)
    del tensor
    assert ends.held() == BLOCK
    assert eventually(lambda: not ends.held() or None)
    assert sum(ends.ways().values()) == sum(before.values()) + 1


@pytest.mark.parametrize("how", ["record_stream", "remembered"])
def test_copies_of_the_user_s_own_go_on_tickets_too(ends, how):
    before = ends.ways()
    stream = ends.streams[0]
    hold(stream)
    if how == "remembered":
        with CUDA.stream(stream):
            tensor = ends.take(1)
    else:
        tensor = ends.take(1)
        arena.record_stream(tensor, stream)
    with CUDA.stream(stream):
        moved = tensor.to("cuda", non_blocking=True)
    del tensor
    assert eventually(lambda: ends.ways()["ticket"] > before["ticket"] or None)
    assert eventually(lambda: not ends.held() or None)
    assert bool((moved.cpu() == 1).all())


def test_the_device_sees_the_tickets_and_streams_have_names_of_their_own(ends):
    from arena.device.cuda import driver

    address = ends.tickets.control.address
    print("host", hex(address), "device", hex(driver.device_address(address)))
    names = {driver.stream_id(stream.cuda_stream) for stream in ends.streams}
    assert len(names) == len(ends.streams)
    assert names == {driver.stream_id(stream.cuda_stream) for stream in ends.streams}


def test_large_copies_are_timed(ends):
    before = metric_of(ends.reader, "h2d_bytes_total").value
    time.sleep(0.1)
    tensor = ends.take(1)
    ends.reader.to_device(tensor, "cuda")
    CUDA.synchronize()
    time.sleep(0.1)
    ends.reader.to_device(tensor, "cuda")
    assert metric_of(ends.reader, "h2d_bytes_total").value >= before + BLOCK
    assert metric_of(ends.reader, "h2d_seconds_total").value > 0


# ── without them ─────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("refusing", ["device", "call"])
def test_a_driver_that_can_not_or_will_not_leaves_events(monkeypatch, refusing):
    from arena.device.cuda import driver

    def refuse(*_: int) -> None:
        raise driver.DriverError("as the test asked for", 801)

    if refusing == "device":
        monkeypatch.setattr("arena.device.cuda.copies._can_write_words", lambda index: False)
    else:
        monkeypatch.setattr(driver, "write_word", refuse)
    ends = Ends()
    ends.ready()
    moved = drop_while_held(ends, ends.take(1), ends.streams[0])
    assert ends.held() == BLOCK
    assert eventually(lambda: not ends.held() or None)
    assert ends.ways()["ticket"] == 0
    assert ends.ways()["helper"] > 0
    assert bool((moved.cpu() == 1).all())
    ends.close()


def test_tickets_on_one_stream_leave_a_capture_on_another_alone(ends):
    x = torch.ones(1000, device="cuda")
    graph, side = CUDA.CUDAGraph(), CUDA.Stream()
    with CUDA.graph(graph, stream=side, capture_error_mode="relaxed"):  # the copies' targets may need memory
        y = x * 2
        moved = ends.reader.to_device(ends.take(1), "cuda", ends.streams[0])
        recorded = ends.take(2)
        arena.record_stream(recorded, ends.streams[1])
        del recorded
        y = y + 1
    # The stream that was current at the second dequeue was being captured, so what it waits for is recorded only now.
    assert eventually(lambda: not ends.held() or None)
    x.fill_(5)
    graph.replay()
    CUDA.synchronize()
    assert y.tolist() == [11] * 1000
    assert bool((moved.cpu() == 1).all())


# ── processes ────────────────────────────────────────────────────────────────────────────────────
def late() -> tuple[bool, int]:
    """CUDA is initialised by the first copy; tickets come after that."""
    ends = Ends.__new__(Ends)
    ends.queue = MessageQueue(1, config=QueueConfig(**CONFIG))
    ends.reader = MessageQueue.create_from_handle(ends.queue.export_handle(), 0)
    first = ends.reader.to_device(ends.take(1), "cuda")
    assert eventually(lambda: set(pins(ends.reader).values()) == {"pinned"} or None)
    ends.reader.to_device(ends.take(2), "cuda")
    assert eventually(lambda: ends.tickets._copies)
    stream = CUDA.Stream()
    second = drop_while_held(ends, ends.take(3), stream)
    assert eventually(lambda: not ends.held() or None)
    right = bool((first.cpu() == 1).all()) and bool((second.cpu() == 3).all())
    ways = ends.ways()
    ends.close()
    return right, ways["ticket"]


def test_cuda_that_is_initialised_late_gets_tickets_as_well():
    right, ticket = run(late, timeout_s=60)
    assert right
    assert ticket >= 1


def copy_for_long(handle: Any) -> None:
    """A reader that is killed while its GPU still copies."""
    CUDA.init()
    reader: Any = MessageQueue.create_from_handle(handle, 0)
    stream = CUDA.Stream()
    with reader:
        first = reader.dequeue(timeout=30)
        reader.to_device(first, "cuda", stream)
        del first
        assert set(pins(reader).values()) == {"pinned"}
        assert eventually(lambda: reader._borrower._home.tickets._copies)
        stream.synchronize()
        hold(stream, 100 * HELD_CYCLES)
        kept = reader.to_device(reader.dequeue(timeout=30), "cuda", stream)
        reader.dequeue(timeout=30)  # that it has come so far
        time.sleep(600)
        del kept


def test_the_block_of_a_reader_killed_in_a_copy_comes_back():
    queue = MessageQueue(1, config=QueueConfig(**CONFIG))
    with queue, Child(copy_for_long, queue.export_handle()) as child:
        queue.enqueue(stamped(0), timeout=30)
        queue.enqueue(stamped(1), timeout=30)
        queue.enqueue("now")
        assert eventually(lambda: not queue.statistics().lag_by_reader[0] or None, within=60)
        assert eventually(lambda: queue.statistics().arena_used_bytes == BLOCK or None)
        child.kill(signal.SIGKILL)
        child.join()
        with pytest.raises(arena.errors.PeerDied):
            for text in range(1000):
                queue.enqueue(text, timeout=10)
                time.sleep(0.005)
        assert queue.statistics().arena_used_bytes == 0
        assert queue.statistics().holds_reclaimed == 1


def locked_in(limit: int, uid: int) -> tuple[dict[int, str], str, bool, bool]:
    """Little memory may be locked, and nobody special asks for it."""
    from arena.device import PinRefused, open_copies

    gc.collect()
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
    if os.getuid() == 0:
        os.chown(os.environ["ARENA_RUN_DIR"], uid, uid)
        os.setgid(uid)
        os.setuid(uid)
    ends = Ends()
    moved = [ends.reader.to_device(ends.take(number), "cuda") for number in range(3)]
    settled = pins(ends.reader)
    mapping = mmap.mmap(-1, 2 * BLOCK)  # as much memory of no queue's: what the driver says of that
    address = torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
    try:
        open_copies("cuda").register(address, 2 * BLOCK, writable=True)
        expected = "pinned"
        open_copies("cuda").unregister(address)
    except PinRefused as refused:
        expected = f"failed: {refused.reason}"
    right = all(bool((there.cpu() == number).all()) for number, there in enumerate(moved))
    well = int((torch.arange(1000, device="cuda") * 2).sum()) == 999_000  # each launch reports what was left behind
    came_back = bool(eventually(lambda: not ends.held() or None))
    ends.close()
    return settled, expected, right, well and came_back


def test_under_a_real_limit_on_locked_memory_a_segment_is_what_the_driver_makes_of_any_memory():
    """Whether the driver counts what it locks against the limit is its own business, and printed."""
    settled, expected, right, well = run(locked_in, 64 << 10, 65534, timeout_s=60)
    print("RLIMIT_MEMLOCK 64 KiB:", settled, expected)
    assert settled == {1: expected}
    assert right
    assert well
