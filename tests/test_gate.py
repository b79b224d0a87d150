"""A hold goes back once its view died and every copy from it passed, whoever made the copy, whatever came between."""

import gc
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import arena
from arena import MessageQueue, QueueConfig, borrow, gate
from arena.device.cpu.copies import COPIES, CpuStream
from arena.gate import Gate
from arena.probe import Sample
from arena.reader import Reader
from tests.support.fleet import eventually
from tests.support.processes import run
from tests.support.streams import cpu_streams, metric_of, pins

CPU = torch.device("cpu")
BLOCK = 128 << 10
COUNT = BLOCK // 8

pytestmark = pytest.mark.usefixtures("run_dir")


def stamped(number: int) -> torch.Tensor:
    return torch.full((COUNT,), number, dtype=torch.int64)


class TwoBlocks:
    """A queue with room for two tensors, its reader, and a stream."""

    def __init__(self, stream: CpuStream, **settings: Any) -> None:
        config = {"max_arena_bytes": 2 * BLOCK, "segment_bytes": 2 * BLOCK, "slots": 64, **settings}
        self.stream = stream
        self.queue = MessageQueue(1, config=QueueConfig(**config))
        self.reader = MessageQueue.create_from_handle(self.queue.export_handle(), 0)

    def send(self, number: int) -> None:
        self.queue.enqueue(stamped(number), timeout=10)

    def take(self) -> torch.Tensor:
        return self.reader.dequeue(timeout=10)

    def pin(self) -> None:
        """Have the segment registered."""
        self.send(-1)
        del_me = self.take()
        self.reader.to_device(del_me, "cpu", self.stream)
        del del_me
        assert set(pins(self.reader).values()) == {"pinned"}
        eventually(lambda: not self.held())
        if COPIES.writes_words:
            eventually(lambda: self.reader._borrower._home.tickets._copies)

    def block(self, index: int) -> torch.Tensor:
        """What is in a block now."""
        view = self.queue._pool.segments[0].segment.mapping.view(index * BLOCK, BLOCK)
        return torch.frombuffer(bytearray(view), dtype=torch.int64)

    def held(self) -> int:
        return self.queue.statistics().arena_used_bytes

    def metric(self, name: str, *labels: str) -> Sample:
        """One series of the reader's page, as others see it."""
        return metric_of(self.reader, name, *labels)

    def close(self) -> None:
        self.reader.shutdown()
        self.queue.shutdown()


@pytest.fixture(params=["tickets", "events"])
def setting(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoBlocks]:
    """Both ways of a hold that a copy reads: the device says when it is over, or the helper asks."""
    monkeypatch.setattr(COPIES, "writes_words", request.param == "tickets")
    with cpu_streams() as [stream]:
        made = TwoBlocks(stream)
        try:
            made.pin()
            yield made
        finally:
            made.close()


on_tickets = pytest.mark.parametrize("setting", ["tickets"], indirect=True)
by_the_helper = pytest.mark.parametrize("setting", ["events"], indirect=True)


def copied(setting: TwoBlocks, how: str, tensor: torch.Tensor) -> torch.Tensor:
    """A copy that is queued, not made."""
    if how == "to_device":
        return setting.reader.to_device(tensor, "cpu", setting.stream)
    if how == "record_stream":
        arena.record_stream(tensor, setting.stream)
    return COPIES.to_device(tensor, CPU, setting.stream, pinned=True)


# ── case 15 ──────────────────────────────────────────────────────────────────────────────────────
def dma_gate(setting: TwoBlocks, how: str) -> None:
    """Two blocks, the copy stream held, the references dropped, ten stamped tensors sent."""
    held = setting.stream.hold()
    try:
        moved = []
        for number in (0, 1):
            setting.send(number)
            if how == "plain":
                with setting.stream:  # the dequeuing thread's stream, remembered at decode
                    tensor = setting.take()
            else:
                tensor = setting.take()
            moved.append(copied(setting, how, tensor))
            del tensor
        gc.collect()
        ends = time.monotonic() + 0.2
        for number in range(2, 10):
            setting.send(number)
            assert int(setting.take()[0]) == number
            assert [int(setting.block(index)[0]) for index in (0, 1)] == [0, 1]
        while time.monotonic() < ends:
            assert all(bool((setting.block(index) == index).all()) for index in (0, 1))
            time.sleep(0.01)
    finally:
        held.set()
        setting.stream.synchronize()  # without a gate nothing else keeps the range mapped until it has been read
    for number, there in enumerate(moved):
        assert bool((there == number).all())


WAYS = ["to_device", "record_stream", "plain"]


@pytest.mark.parametrize("how", WAYS)
def test_no_byte_of_a_block_changes_before_its_copy_has_passed(setting, how):
    dma_gate(setting, how)
    # The reader is idle from here on, and the blocks come back all the same.
    assert eventually(lambda: not setting.held() or None)


@pytest.mark.parametrize("how", WAYS)
def test_without_the_gate_that_test_fails(setting, how, monkeypatch):
    monkeypatch.setattr(Gate, "is_empty", lambda self: True)
    with pytest.raises(AssertionError):
        dma_gate(setting, how)


def at_the_next_dequeue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Release as many an engine does: when the reader comes back for more."""
    waiting: list[Any] = []
    real = Reader.dequeue

    def view_died(self: Gate, release: Any) -> None:
        waiting.append((self, release))

    def dequeue(self: Reader, timeout: float | None = None) -> Any:
        for shut, release in waiting:
            shut._streams.clear()
            shut._passages.clear()
            shut._guess = None
            release()
        waiting.clear()
        return real(self, timeout)

    monkeypatch.setattr(Gate, "view_died", view_died)
    monkeypatch.setattr(Reader, "dequeue", dequeue)


@by_the_helper
@pytest.mark.parametrize("how", WAYS)
def test_with_a_release_at_the_next_dequeue_that_test_fails(setting, how, monkeypatch):
    at_the_next_dequeue(monkeypatch)
    with pytest.raises(AssertionError):
        dma_gate(setting, how)


# ── death and passage, in every order ────────────────────────────────────────────────────────────
def test_a_view_that_outlives_its_copy_keeps_its_block(setting):
    setting.send(1)
    tensor = setting.take()
    setting.reader.to_device(tensor, "cpu", setting.stream)
    setting.stream.synchronize()
    time.sleep(0.02)
    assert setting.held() == BLOCK
    del tensor
    assert eventually(lambda: not setting.held() or None)


def test_a_slice_keeps_the_gate_of_the_whole(setting):
    setting.send(1)
    tensor = setting.take()
    part = tensor[100:200]
    del tensor
    held = setting.stream.hold()
    moved = setting.reader.to_device(part, "cpu", setting.stream)
    del part
    time.sleep(0.02)
    assert setting.held() == BLOCK
    held.set()
    assert eventually(lambda: not setting.held() or None)
    assert moved.tolist() == [1] * 100


def test_all_copies_of_one_tensor_have_to_pass(setting):
    with cpu_streams() as [other]:
        setting.send(1)
        tensor = setting.take()
        held, also_held = setting.stream.hold(), other.hold()
        setting.reader.to_device(tensor, "cpu", setting.stream)
        setting.reader.to_device(tensor, "cpu", other)
        del tensor
        held.set()
        setting.stream.synchronize()
        time.sleep(0.02)
        assert setting.held() == BLOCK
        also_held.set()
        assert eventually(lambda: not setting.held() or None)


def test_a_lent_tensor_in_two_messages_has_two_gates(setting):
    with setting.queue.lend((COUNT,), torch.int64) as lent:
        lent.fill_(5)
        setting.queue.enqueue(lent)
        setting.queue.enqueue(lent)
        del lent
    first, second = setting.take(), setting.take()
    held = setting.stream.hold()
    setting.reader.to_device(first, "cpu", setting.stream)
    del first, second
    time.sleep(0.02)
    assert setting.queue.statistics().holds_used == 2
    held.set()
    assert eventually(lambda: not setting.held() or None)


def test_a_gate_passed_before_the_death_leaves_one_store_to_the_callback(setting):
    setting.send(1)
    tensor = setting.take()
    copying = borrow.gate_of(borrow.leases_of(tensor)[0])
    copying._streams.clear()
    assert copying.is_empty()
    del tensor
    assert not setting.held()  # at once: nobody was woken for it


def test_views_that_die_in_the_garbage_collector_and_in_another_thread_pass_the_gate_too(setting):
    for way in ("collector", "thread"):
        setting.send(1)
        held = setting.stream.hold()
        loop: list[Any] = [setting.take()]
        setting.reader.to_device(loop[0], "cpu", setting.stream)
        loop.append(loop)
        if way == "thread":
            thread = threading.Thread(target=loop.clear)
            thread.start()
            thread.join()
        del loop
        gc.collect()
        time.sleep(0.02)
        assert setting.held() == BLOCK
        held.set()
        assert eventually(lambda: not setting.held() or None)


def test_a_sweep_does_not_open_a_gate(setting):
    setting.send(1)
    held = setting.stream.hold()
    setting.reader.to_device(setting.take(), "cpu", setting.stream)
    assert eventually(lambda: setting.metric("blocks_in_gate").value) == 1
    for _ in range(100):
        setting.reader._borrower.sweep()
    assert setting.held() == BLOCK
    assert not gate.helper._dead  # nor does it hand it over again
    held.set()
    assert eventually(lambda: not setting.held() or None)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("where", ["is_empty", "names", "view_died", "goes_on_tickets"])
def test_a_callback_that_an_interrupt_tore_is_made_up_for(setting, monkeypatch, where):
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    setting.send(1)
    tensor = setting.take()
    held = setting.stream.hold()
    setting.reader.to_device(tensor, "cpu", setting.stream)
    with monkeypatch.context() as patch:
        patch.setattr(Gate, where, interrupted)
        del tensor
    setting.reader._borrower.sweep()
    time.sleep(0.02)
    assert setting.held() == BLOCK
    held.set()
    assert eventually(lambda: not setting.held() or None)
    assert eventually(lambda: not [one for one in borrow._leases.values() if one() is None] or None)


def test_a_stream_that_is_being_captured_is_asked_again_later(setting):
    setting.send(1)
    with setting.stream:
        tensor = setting.take()
    setting.stream.capturing = True
    del tensor
    time.sleep(0.02)
    assert setting.held() == BLOCK
    setting.stream.capturing = False
    assert eventually(lambda: not setting.held() or None)


def test_a_copy_can_not_be_part_of_a_graph(setting):
    setting.send(1)
    tensor = setting.take()
    setting.stream.capturing = True
    with pytest.raises(arena.errors.InvalidArgument, match="part of a graph"):
        setting.reader.to_device(tensor, "cpu", setting.stream)
    setting.stream.capturing = False


class Interrupted(CpuStream):
    """Does what it was told, and then the user presses ctrl-C."""

    def record(self, *_: int) -> Any:
        raise KeyboardInterrupt


def test_an_interrupt_behind_the_copy_leaves_the_whole_stream_to_wait_for(setting, monkeypatch):
    setting.send(1)
    tensor = setting.take()
    held = setting.stream.hold()
    with monkeypatch.context() as patch:
        patch.setattr(CpuStream, "record", Interrupted.record)
        patch.setattr(CpuStream, "store", Interrupted.record)
        with pytest.raises(KeyboardInterrupt):
            setting.reader.to_device(tensor, "cpu", setting.stream)
    del tensor
    time.sleep(0.02)
    assert setting.held() == BLOCK
    held.set()
    assert eventually(lambda: not setting.held() or None)


def test_what_was_borrowed_before_the_device_was_used_waits_for_everything():
    made = TwoBlocks.__new__(TwoBlocks)
    with cpu_streams(0):
        TwoBlocks.__init__(made, None)  # type: ignore[arg-type]
        made.send(1)
        tensor = made.take()
        assert made.reader.statistics().pins == {}
    with cpu_streams(2) as [one, other]:
        made.reader._borrower.see_to_device()
        assert pins(made.reader) == {1: "pinned"}
        held = other.hold()
        moved = COPIES.to_device(tensor, CPU, other, pinned=True)
        del tensor
        time.sleep(0.02)
        assert made.held() == BLOCK
        held.set()
        assert eventually(lambda: not made.held() or None)
        assert bool((moved == 1).all())
        one.synchronize()
        made.close()


def test_a_reader_that_left_still_passes_its_gates(setting):
    setting.send(1)
    tensor = setting.take()
    held = setting.stream.hold()
    moved = setting.reader.to_device(tensor, "cpu", setting.stream)
    setting.reader.shutdown()
    del tensor
    time.sleep(0.02)
    assert setting.held() == BLOCK
    held.set()
    assert eventually(lambda: not setting.held() or None)
    assert bool((moved == 1).all())


def test_a_reader_with_no_device_has_no_gate_and_no_helper(run_dir):
    assert run(in_a_process_without_a_device) == (True, ["MainThread"])


def in_a_process_without_a_device() -> tuple[bool, list[str]]:
    with MessageQueue(1) as queue, MessageQueue.create_from_handle(queue.export_handle(), 0) as reader:
        queue.enqueue(stamped(1))
        tensor = reader.dequeue(timeout=10)
        there = reader.to_device(tensor, "cpu")
        same = torch.equal(there, tensor) and there.data_ptr() != tensor.data_ptr()
        del tensor
        threads = [one.name for one in threading.enumerate() if one.name in ("MainThread", "arena-device")]
        return same and not queue.statistics().arena_used_bytes, threads


# ── fork ─────────────────────────────────────────────────────────────────────────────────────────
def in_a_forked_child() -> tuple[int, bool]:
    with cpu_streams() as [stream]:
        made = TwoBlocks(stream)
        made.pin()
        made.send(1)
        tensor = made.take()
        held = stream.hold()
        made.reader.to_device(tensor, "cpu", stream)
        child = os.fork()
        if not child:
            del tensor
            gc.collect()
            os._exit(0 if gate.helper._fd == -1 else 1)
        _, status = os.waitpid(child, 0)
        kept = made.held() == BLOCK
        del tensor
        held.set()
        eventually(lambda: not made.held() or None)
        made.close()
        return status, kept


def test_a_forked_child_that_drops_a_view_opens_no_gate():
    assert run(in_a_forked_child) == (0, True)


# ── what is seen of it ───────────────────────────────────────────────────────────────────────────
@by_the_helper
def test_the_page_shows_what_waits_since_when_and_how_long_it_took(setting):
    copies = setting.metric("device_copies_total", "pinned_async").value
    held = setting.stream.hold()
    setting.send(1)
    setting.reader.to_device(setting.take(), "cpu", setting.stream)
    assert eventually(lambda: setting.metric("blocks_in_gate").value) == 1
    assert 0 < setting.metric("gate_oldest_since_nanoseconds").value <= time.monotonic_ns()
    time.sleep(0.05)
    held.set()
    assert eventually(lambda: not setting.metric("blocks_in_gate").value or None)
    assert setting.metric("gate_oldest_since_nanoseconds").value == 0
    assert setting.metric("device_copies_total", "pinned_async").value == copies + 1
    assert setting.metric("dma_gate_wait_seconds").total > 40_000_000


def test_a_reader_that_waits_for_a_copy_says_so(setting):
    ordinary = torch.zeros(10)
    held = setting.stream.hold()
    thread = threading.Thread(target=setting.reader.to_device, args=(ordinary, "cpu", setting.stream))
    thread.start()
    assert eventually(lambda: setting.reader.statistics().state == "gate" or None)
    held.set()
    thread.join()
    assert setting.reader.statistics().state == "working"
