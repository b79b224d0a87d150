"""The device itself says when it has read a block: the writer sees it, whatever the reader is doing by then."""

import contextlib
import gc
import importlib
import signal
import sys
import threading
import time
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import arena
from arena import MessageQueue, QueueConfig, borrow, gate, layout
from arena import tickets as tickets_module
from arena.device import open_copies
from arena.device.cpu.copies import COPIES, CpuStream
from arena.gate import Gate
from arena.probe.metrics import GATE_WAYS
from arena.tickets import Tickets, all_reached, name_of
from tests.support.fleet import eventually
from tests.support.processes import Child
from tests.support.streams import cpu_streams, metric_of, pins

BLOCK = 128 << 10
COUNT = BLOCK // 8
CONFIG = {"max_arena_bytes": 2 * BLOCK, "segment_bytes": 2 * BLOCK}

pytestmark = pytest.mark.usefixtures("run_dir")


def stamped(number: int) -> torch.Tensor:
    return torch.full((COUNT,), number, dtype=torch.int64)


class Ends:
    """A queue with two blocks, its reader, and what the reader's tickets say."""

    def __init__(self, **settings: Any) -> None:
        self.queue = MessageQueue(1, config=QueueConfig(**{**CONFIG, **settings}))
        self.reader: Any = MessageQueue.create_from_handle(self.queue.export_handle(), 0)

    def take(self, number: int) -> torch.Tensor:
        self.queue.enqueue(stamped(number), timeout=10)
        return self.reader.dequeue(timeout=10)

    def ready(self, stream: CpuStream) -> None:
        """Have the segment and the tickets registered."""
        self.reader.to_device(self.take(-1), "cpu", stream)
        assert set(pins(self.reader).values()) == {"pinned"}
        assert eventually(lambda: self.tickets._copies)
        assert eventually(lambda: not self.held() or None)

    @property
    def tickets(self) -> Tickets:
        return self.reader._borrower._home.tickets

    def held(self) -> int:
        return self.queue.statistics().arena_used_bytes

    def stays_held(self) -> bool:
        time.sleep(0.02)
        return self.held() > 0

    def ways(self) -> dict[str, int]:
        return {way: metric_of(self.reader, "gate_releases_total", way).value for way in GATE_WAYS}

    def close(self) -> None:
        self.reader.shutdown()
        self.queue.shutdown()


@pytest.fixture(autouse=True)
def nothing_registered() -> None:
    """What the last test left goes within a quarter of a second: so often the helper looks after tickets."""
    gc.collect()
    assert eventually(lambda: not COPIES.registered or None)


@pytest.fixture
def streams() -> Iterator[list[CpuStream]]:
    with cpu_streams(5) as made:
        yield made


@pytest.fixture
def ends(streams: list[CpuStream]) -> Iterator[Ends]:
    made = Ends()
    made.ready(streams[0])
    yield made
    made.close()


@pytest.fixture
def nobody_helps(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The helper hears of nothing any more."""
    heard: list[Any] = []
    monkeypatch.setattr(gate.helper, "gate", lambda *what: heard.append(what))
    monkeypatch.setattr(gate.helper, "watch", heard.append)
    return heard


# ── the device releases ──────────────────────────────────────────────────────────────────────────
def test_a_block_comes_back_without_anybody_in_the_reader(ends, streams, nobody_helps):
    held = streams[0].hold()
    moved = ends.reader.to_device(ends.take(1), "cpu", streams[0])
    assert ends.stays_held()
    held.set()
    assert eventually(lambda: not ends.held() or None)
    assert bool((moved == 1).all())


def test_a_view_that_outlives_its_ticket_keeps_the_block(ends, streams, nobody_helps):
    tensor = ends.take(1)
    ends.reader.to_device(tensor, "cpu", streams[0])
    streams[0].synchronize()
    assert ends.stays_held()
    del tensor
    assert not ends.held()
    assert not nobody_helps


@pytest.mark.parametrize("last", range(layout.NAMES))
def test_a_hold_waits_for_each_ticket_that_it_names(ends, streams, nobody_helps, last):
    tensor = ends.take(1)
    held = [stream.hold() for stream in streams[: layout.NAMES]]
    for stream in streams[: layout.NAMES]:
        ends.reader.to_device(tensor, "cpu", stream)
        ends.reader.to_device(tensor, "cpu", stream)
    del tensor
    for index, one in enumerate(held):
        if index != last:
            one.set()
            streams[index].synchronize()
    assert ends.stays_held()
    held[last].set()
    assert eventually(lambda: not ends.held() or None)


def test_more_than_a_hold_can_name_is_for_the_helper(ends, streams):
    before = ends.ways()
    tensor = ends.take(1)
    held = [stream.hold() for stream in streams]
    for stream in streams:
        ends.reader.to_device(tensor, "cpu", stream)
    del tensor
    assert ends.stays_held()
    held[0].set()  # four are left: still one too many
    assert ends.stays_held()
    for one in held[1:]:
        one.set()
    assert eventually(lambda: not ends.held() or None)
    assert sum(ends.ways().values()) == sum(before.values()) + 1


@pytest.mark.parametrize("how", ["record_stream", "remembered"])
def test_what_the_user_copied_goes_on_tickets_that_the_helper_queued(ends, streams, how):
    before = ends.ways()
    held = streams[1].hold()
    if how == "remembered":
        with streams[1]:
            tensor = ends.take(1)
    else:
        tensor = ends.take(1)
        arena.record_stream(tensor, streams[1])
    moved = COPIES.to_device(tensor, torch.device("cpu"), streams[1], pinned=True)
    del tensor
    assert eventually(lambda: ends.ways() == {**before, "ticket": before["ticket"] + 1} or None)
    assert ends.stays_held()
    held.set()
    assert eventually(lambda: not ends.held() or None)
    assert bool((moved == 1).all())


def test_what_was_current_at_the_dequeue_does_not_matter_once_all_has_been_moved(ends, streams, nobody_helps):
    held, forward = streams[0].hold(), streams[1].hold()
    with streams[1]:
        tensor = ends.take(1)
    moved = ends.reader.to_device(tensor, "cpu", streams[0])
    del tensor
    assert ends.stays_held()
    held.set()
    assert eventually(lambda: not ends.held() or None)
    assert bool((moved == 1).all())
    forward.set()


@pytest.mark.parametrize("how", ["a part of it", "and recorded"])
def test_it_does_where_a_part_was_moved_or_the_user_said_so(ends, streams, how):
    held = streams[1].hold()
    with streams[1]:
        tensor = ends.take(1)
    part = tensor[: COUNT // 2] if how == "a part of it" else tensor
    ends.reader.to_device(part, "cpu", streams[0])
    if how == "and recorded":
        arena.record_stream(tensor, streams[1])
    rest = COPIES.to_device(tensor[COUNT // 2 :], torch.device("cpu"), streams[1], pinned=True)
    del tensor, part
    streams[0].synchronize()
    assert ends.stays_held()
    held.set()
    assert eventually(lambda: not ends.held() or None)
    assert bool((rest == 1).all())


def test_a_tensor_that_does_not_begin_at_an_aligned_address_is_all_of_its_hold(ends, streams, nobody_helps):
    whole = torch.arange(BLOCK, dtype=torch.uint8)
    forward = streams[1].hold()
    ends.queue.enqueue(whole[3:-5])
    with streams[1]:
        tensor = ends.reader.dequeue(timeout=10)
    moved = ends.reader.to_device(tensor, "cpu", streams[0])
    del tensor
    assert eventually(lambda: not ends.held() or None)
    assert torch.equal(moved, whole[3:-5])
    forward.set()


# ── what is stale frees nothing ──────────────────────────────────────────────────────────────────
def test_a_number_that_a_former_hold_of_that_id_named_frees_no_later_one(streams):
    ends = Ends(max_holds=1)
    ends.ready(streams[0])
    for number in range(6):
        stream = streams[number % 2]
        held = stream.hold()
        moved = ends.reader.to_device(ends.take(number), "cpu", stream)
        assert ends.stays_held()
        held.set()
        assert eventually(lambda: not ends.held() or None)
        assert bool((moved == number).all())
    assert ends.queue.statistics().fallbacks == {}
    ends.close()


def test_a_word_passes_to_another_stream_only_once_it_is_settled(ends):
    with cpu_streams(layout.TICKETS + 2) as many:
        held = [stream.hold() for stream in many]
        issued = [ends.tickets.issue(COPIES, stream) for stream in many]
        got = [ticket for ticket in issued if ticket is not None]
        assert len(got) == layout.TICKETS  # that of a stream with nothing left to do was taken over
        assert len({ticket.index for ticket in got}) == layout.TICKETS
        assert not any(ticket.passed() for ticket in got)
        held[0].set()
        got[0].wait()
        late = ends.tickets.issue(COPIES, many[-1])
        assert late is not None
        assert (late.index, late.number) == (got[0].index, got[0].number + 1)
        assert not late.passed()
        for one in held:
            one.set()
        late.wait()
        for ticket in got:
            ticket.wait()


def test_a_stream_that_refuses_has_an_event_instead_and_loses_its_word(ends, streams, monkeypatch):
    first = ends.tickets.issue(COPIES, streams[1])
    monkeypatch.setattr(COPIES, "writes_words", False)
    assert ends.tickets.issue(COPIES, streams[1]) is None
    tensor = ends.take(1)
    held = streams[1].hold()
    ends.reader.to_device(tensor, "cpu", streams[1])
    del tensor
    assert ends.stays_held()
    held.set()
    assert eventually(lambda: not ends.held() or None)
    monkeypatch.setattr(COPIES, "writes_words", True)
    again = ends.tickets.issue(COPIES, streams[1])
    again.wait()
    assert again.index != first.index or again.number > first.number


def test_names_that_make_no_sense_are_never_reached():
    tickets = memoryview(bytearray(layout.TICKETS_BYTES)).cast("Q")
    tickets[2 * layout.LINE_WORDS] = 5
    largest = layout.NAME_NUMBER
    for index, number, reached in ((2, 5, True), (2, 6, False), (3, 1, False), (200, 0, False), (2, largest, False)):
        named = memoryview(bytearray(layout.NAMES * 8)).cast("Q")
        named[0] = name_of(index, number)
        assert all_reached(named, tickets, 0, 1) is reached


def test_numbers_of_two_threads_reach_a_stream_in_their_order(ends, streams):
    got: list[list[Any]] = [[], []]
    streams[1].delay(0.02)

    def issue(mine: list[Any]) -> None:
        mine += [ends.tickets.issue(COPIES, streams[1]) for _ in range(300)]

    threads = [threading.Thread(target=issue, args=(mine,)) for mine in got]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    numbers = [ticket.number for ticket in got[0] + got[1]]
    assert len(set(numbers)) == 600
    streams[1].synchronize()
    assert all(ticket.passed() for ticket in got[0] + got[1])
    assert ends.tickets._words[got[0][0].index * layout.LINE_WORDS] == max(numbers)


def test_a_call_within_a_call_gets_no_number_that_would_overtake(ends, streams, monkeypatch):
    inner: list[Any] = []
    store = CpuStream.store

    def and_a_signal(self: CpuStream, address: int, number: int) -> None:
        if not inner:
            inner.append(ends.tickets.issue(COPIES, self))
        store(self, address, number)

    monkeypatch.setattr(CpuStream, "store", and_a_signal)
    ticket = ends.tickets.issue(COPIES, streams[1])
    ticket.wait()
    assert inner == [None]


# ── where there are none ─────────────────────────────────────────────────────────────────────────
def test_a_refused_registration_leaves_events_and_the_copies_as_they_are(streams):
    ends = Ends()
    tensor = ends.take(0)
    assert pins(ends.reader) == {1: "pinned"}
    COPIES.faults.append("memlock_limit")
    ends.reader.to_device(tensor, "cpu", streams[0])
    assert eventually(lambda: not COPIES.faults or None)
    del tensor
    for number in range(1, 4):
        held = streams[0].hold()
        moved = ends.reader.to_device(ends.take(number), "cpu", streams[0])
        assert ends.stays_held()
        held.set()
        assert eventually(lambda: not ends.held() or None)
        assert bool((moved == number).all())
    assert ends.ways()["ticket"] == 0
    assert ends.ways()["helper"] >= 3
    ends.close()


def test_off_registers_no_tickets(streams):
    ends = Ends(pin="off")
    ends.reader.to_device(ends.take(1), "cpu", streams[0])
    assert ends.tickets is None
    assert not COPIES.registered
    ends.close()


def test_a_stream_being_captured_is_recorded_later(ends, streams):
    with streams[1]:
        tensor = ends.take(1)
    streams[1].capturing = True
    before = ends.ways()
    del tensor
    assert ends.stays_held()
    assert ends.ways() == before
    streams[1].capturing = False
    assert eventually(lambda: not ends.held() or None)


# ── the words of a GPU ───────────────────────────────────────────────────────────────────────────
class Driver:
    """As much of libcuda as a word takes. What is passed by reference has its ctypes object in ``_obj``."""

    def __init__(self) -> None:
        self.able, self.ids, self.stored, self.status = 1, {7: 1007, 8: 1008}, [], 0

    def cuDeviceGet(self, device: Any, index: Any) -> int:
        device._obj.value = 40 + index.value
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: Any, device: Any) -> int:
        assert (attribute.value, device.value) == (122, 40)
        value._obj.value = self.able
        return 0

    def cuMemHostGetDevicePointer_v2(self, found: Any, address: Any, flags: Any) -> int:
        assert flags.value == 0
        found._obj.value = address.value + 0x1000_0000
        return 0

    def cuStreamGetId(self, stream: Any, number: Any) -> int:
        number._obj.value = self.ids[stream.value]
        return 0

    def cuStreamWriteValue64_v2(self, stream: Any, address: Any, number: Any, flags: Any) -> int:
        self.stored.append((stream.value, address.value, number.value, flags.value))
        return self.status

    def cuGetErrorString(self, status: Any, text: Any) -> int:
        text._obj.value = b"as the test asked for"
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    cuda = importlib.import_module("arena.device.cuda.copies")
    monkeypatch.setattr("arena.device.cuda.driver._driver", lambda: made)
    monkeypatch.setattr(cuda, "_can_write_words", cuda._can_write_words.__wrapped__)
    monkeypatch.setattr(cuda, "current_device", lambda: 0)
    monkeypatch.setattr(cuda.torch.cuda, "device", lambda index: contextlib.nullcontext())
    return made


def gpu_stream(handle: int) -> Any:
    return types.SimpleNamespace(cuda_stream=handle, device=torch.device("cuda", 0))


def test_a_gpu_s_word_is_stored_at_its_address_there_and_only_by_the_stream_that_it_is_of(driver):
    write = open_copies("cuda").word_writer(gpu_stream(7), 0x2000, 128)
    assert write is not None
    assert write(5)
    assert driver.stored == [(7, 0x2000 + 0x1000_0000 + 128, 5, 0)]
    driver.ids[7] = 2007  # that stream was destroyed, and another one got its handle
    assert not write(6)
    driver.ids[7], driver.status = 1007, 801
    assert not write(6)
    assert len(driver.stored) == 2


@pytest.mark.parametrize("lacking", ["able", "cuStreamWriteValue64_v2", "cuStreamGetId", "cuDeviceGetAttribute"])
def test_a_gpu_or_a_driver_that_is_not_up_to_it_has_no_words(driver, lacking, monkeypatch):
    if lacking == "able":
        driver.able = 0
    else:
        monkeypatch.delattr(Driver, lacking)
    write = open_copies("cuda").word_writer(gpu_stream(7), 0x2000, 128)
    assert write is None or not write(1)


# ── interrupts and other threads ─────────────────────────────────────────────────────────────────
def test_two_that_would_give_a_lease_back_at_once_are_one(ends, streams, monkeypatch):
    """A sweep comes by while another thread is in the callback."""
    inside, go_on = threading.Event(), threading.Event()
    settled: list[str] = []
    settle = borrow._settle

    def slowly(lease: Any) -> None:
        if threading.current_thread().name == "dropping":
            inside.set()
            assert go_on.wait(30)
        settled.append(threading.current_thread().name)
        settle(lease)

    tensors = [ends.take(1)]
    monkeypatch.setattr(borrow, "_settle", slowly)
    dropping = threading.Thread(target=tensors.clear, name="dropping")
    dropping.start()
    assert inside.wait(30)
    ends.reader._borrower.sweep()
    assert settled == []
    assert ends.stays_held()
    go_on.set()
    dropping.join()
    assert settled == ["dropping"]
    assert not ends.held()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_between_the_names_and_the_hold_s_word_loses_neither(ends, streams, monkeypatch):
    held = streams[0].hold()
    tensor = ends.take(1)
    ends.reader.to_device(tensor, "cpu", streams[0])
    words = ends.tickets.named

    class Torn:
        def __setitem__(self, at: int, name: int) -> None:
            words[at] = name
            raise KeyboardInterrupt

    monkeypatch.setattr(ends.tickets, "named", Torn())
    del tensor
    monkeypatch.setattr(ends.tickets, "named", words)
    assert ends.stays_held()
    ends.reader._borrower.sweep()
    assert ends.stays_held()
    held.set()
    assert eventually(lambda: not ends.held() or None)


def test_a_number_that_an_interrupt_tore_leaves_its_word_with_the_stream(ends, streams, monkeypatch):
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    streams[1].hold().set()
    first = ends.tickets.issue(COPIES, streams[1])
    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(CpuStream, "store", interrupted)
        ends.tickets.issue(COPIES, streams[1])
    streams[1].synchronize()
    assert not ends.tickets._is_settled(ends.tickets._of_stream[streams[1]])
    again = ends.tickets.issue(COPIES, streams[1])
    assert (again.index, again.number) == (first.index, first.number + 2)
    again.wait()
    assert ends.tickets._is_settled(ends.tickets._of_stream[streams[1]])


def interrupt_at(count: int, action: Any) -> bool:
    """Run something, with an interrupt before the n-th line that it runs in tickets.py; whether it got that far."""
    lines = 0

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal lines
        if frame.f_code.co_filename != tickets_module.__file__:
            return None
        if frame.f_code.co_name == "issue":
            return None  # signals come after calls, and there are none between its lines that matter
        if event == "line":
            lines += 1
            if lines == count:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_no_word_is_lost_to_an_interrupt_at_any_line_of_an_issue(ends):
    line, interrupted = 0, True
    while interrupted:
        line += 1
        with cpu_streams() as [stream]:
            interrupted = interrupt_at(line, lambda stream=stream: ends.tickets.issue(COPIES, stream))
            stream.synchronize()
            again = ends.tickets.issue(COPIES, stream)
            assert again is not None
            again.wait()
            words = list(ends.tickets._of_stream.values())
            assert len({word.index for word in words}) == len(words), "no word has two streams"
    assert line > 15
    with cpu_streams(layout.TICKETS) as many:  # every word is to be had
        issued = [ends.tickets.issue(COPIES, stream) for stream in many]
        assert {ticket.index for ticket in issued} == set(range(layout.TICKETS))
        for ticket in issued:
            ticket.wait()  # in no gate: nothing keeps the words mapped for them


def test_the_first_copy_after_a_dequeue_to_has_a_ticket(streams):
    ends = Ends()
    assert pins_of_a_first(ends) == {1: "pinned"}
    sending = threading.Timer(0.2, lambda: ends.queue.enqueue(stamped(1)))
    sending.start()
    moved = ends.reader.dequeue_to("cpu", 20, stream=streams[0])
    sending.join()
    assert eventually(lambda: not ends.held() or None)
    assert ends.tickets._of_stream[streams[0]].issued == 1
    streams[0].synchronize()
    assert bool((moved == 1).all())
    ends.close()


def pins_of_a_first(ends: Ends) -> dict[int, str]:
    kept = ends.take(0)
    found = pins(ends.reader)
    del kept
    assert eventually(lambda: not ends.held() or None)
    return found


# ── the end ──────────────────────────────────────────────────────────────────────────────────────
def test_memory_that_went_back_on_tickets_stays_registered_until_they_are_reached(streams):
    ends = Ends()
    ends.ready(streams[0])
    held = streams[0].hold()
    moved = ends.reader.to_device(ends.take(3), "cpu", streams[0])
    ends.close()
    del ends
    time.sleep(0.6)  # the helper looks twice
    assert len(COPIES.registered) == 2  # the segment, and the tickets
    held.set()
    assert eventually(lambda: not COPIES.registered or None)
    assert bool((moved == 3).all())


def test_the_page_tells_of_a_device_that_stopped_copying(ends, streams):
    held = streams[0].hold()
    ends.reader.to_device(ends.take(1), "cpu", streams[0])
    assert eventually(lambda: metric_of(ends.reader, "blocks_in_gate").value == 1 or None)
    assert 0 < metric_of(ends.reader, "gate_oldest_since_nanoseconds").value <= time.monotonic_ns()
    held.set()
    assert eventually(lambda: not metric_of(ends.reader, "blocks_in_gate").value or None)
    assert metric_of(ends.reader, "gate_oldest_since_nanoseconds").value == 0


def test_large_copies_are_timed_on_their_stream_one_at_a_time(streams):
    nbytes = 1 << 20
    ends = Ends(max_arena_bytes=8 * nbytes, segment_bytes=8 * nbytes)
    ends.ready(streams[0])
    ends.queue.enqueue(torch.ones(nbytes, dtype=torch.uint8))
    tensor = ends.reader.dequeue(timeout=10)
    streams[0].delay(0.2)  # what was queued before does not count
    for _ in range(3):
        ends.reader.to_device(tensor, "cpu", streams[0])
    streams[0].synchronize()
    ends.reader.to_device(tensor, "cpu", streams[0])
    assert metric_of(ends.reader, "h2d_bytes_total").value == nbytes
    assert 0 < metric_of(ends.reader, "h2d_seconds_total").value < 150_000_000
    del tensor
    ends.close()


def test_without_the_look_at_the_tickets_bytes_change_under_a_copy(ends, streams, monkeypatch):
    monkeypatch.setattr("arena.blocks.all_reached", lambda *_: True)
    held = streams[0].hold()
    moved = ends.reader.to_device(ends.take(1), "cpu", streams[0])
    for number in (2, 3):
        ends.queue.enqueue(stamped(number))
    held.set()
    streams[0].synchronize()
    assert int(moved[0]) != 1
    assert [int(ends.reader.dequeue(timeout=10)[0]) for _ in range(2)] == [2, 3]


def test_without_any_gate_a_hold_names_nothing(ends, streams, monkeypatch):
    monkeypatch.setattr(Gate, "is_empty", lambda self: True)
    held = streams[0].hold()
    ends.reader.to_device(ends.take(1), "cpu", streams[0])
    assert not ends.held()
    held.set()
    COPIES.record(streams[0]).wait()  # it reads what nobody keeps mapped for it


# ── death ────────────────────────────────────────────────────────────────────────────────────────
def copy_and_stand_still(handle: Any) -> None:
    """A reader whose copy is under way for ever."""
    stream = CpuStream()
    reader: Any = MessageQueue.create_from_handle(handle, 0)
    with reader:
        first = reader.dequeue(timeout=30)
        reader.to_device(first, "cpu", stream)
        del first
        assert set(pins(reader).values()) == {"pinned"}
        assert eventually(lambda: reader._borrower._home.tickets._copies)
        stream.submit(lambda: time.sleep(600))
        kept = reader.to_device(reader.dequeue(timeout=30), "cpu", stream)
        assert metric_of(reader, "gate_releases_total", "ticket").value == 1
        reader.dequeue(timeout=30)  # that it has come so far
        time.sleep(600)
        del kept


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_block_of_a_reader_killed_in_a_copy_comes_back_and_that_of_a_stopped_one_does_not(number):
    queue = MessageQueue(1, config=QueueConfig(**CONFIG))
    with queue, Child(copy_and_stand_still, queue.export_handle()) as child:
        queue.enqueue(stamped(0), timeout=30)
        queue.enqueue(stamped(1), timeout=30)
        queue.enqueue("now")
        assert eventually(lambda: not queue.statistics().lag_by_reader[0] or None)
        assert eventually(lambda: queue.statistics().arena_used_bytes == BLOCK or None)
        child.kill(number)
        if number == signal.SIGSTOP:
            for text in ("still", "there"):
                queue.enqueue(text)
                time.sleep(0.15)
            assert queue.statistics().arena_used_bytes == BLOCK
            assert queue.statistics().peers == {0: "attached"}
            return
        child.join()
        with pytest.raises(arena.errors.PeerDied):
            for text in range(1000):
                queue.enqueue(text, timeout=10)
                time.sleep(0.005)
        assert queue.statistics().arena_used_bytes == 0
        assert queue.statistics().holds_reclaimed == 1
