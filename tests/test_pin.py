"""Segments are registered beside the messages' way, or it is said why not; and nothing registered is unmapped."""

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from arena import MessageQueue, QueueConfig
from arena.device.cpu.copies import COPIES, CpuStream
from arena.errors import InvalidArgument, PinFailed
from arena.probe.metrics import PIN_FAILURES
from tests.support.fleet import arena_maps, eventually
from tests.support.processes import run
from tests.support.streams import cpu_streams, metric_of, pins

MIB = 1 << 20
pytestmark = pytest.mark.usefixtures("run_dir")


class Pair:
    """A queue with segments of a mebibyte and its reader."""

    def __init__(self, **settings: Any) -> None:
        config = QueueConfig(**{"max_arena_bytes": 4 * MIB, "segment_bytes": MIB, "huge_pages": False, **settings})
        self.queue = MessageQueue(1, config=config)
        self.reader = MessageQueue.create_from_handle(self.queue.export_handle(), 0)

    def take(self, number: int, nbytes: int = MIB) -> torch.Tensor:
        self.queue.enqueue(torch.full((nbytes // 8,), number, dtype=torch.int64), timeout=10)
        return self.reader.dequeue(timeout=10)

    def close(self) -> None:
        self.reader.shutdown()
        self.queue.shutdown()


@pytest.fixture(autouse=True)
def nothing_registered() -> None:
    """What the last test left goes within a quarter of a second: so often the helper looks after tickets."""
    gc.collect()
    assert eventually(lambda: not COPIES.registered or None)


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


@pytest.fixture
def stream() -> Iterator[CpuStream]:
    with cpu_streams() as [made]:
        yield made


def failures(pair: Pair) -> dict[str, int]:
    counts = {reason: metric_of(pair.reader, "pin_failures_total", reason).value for reason in PIN_FAILURES}
    return {reason: count for reason, count in counts.items() if count}


def moved_is_right(pair: Pair, stream: CpuStream, number: int) -> bool:
    tensor = pair.take(number)
    moved = pair.reader.to_device(tensor, "cpu", stream)
    del tensor
    stream.synchronize()
    return bool((moved == number).all())


def test_segments_are_registered_once_they_are_seen_and_a_device_is_used(pair, stream):
    kept = [pair.take(number) for number in range(3)]
    assert pins(pair.reader) == {1: "pinned", 2: "pinned", 3: "pinned"}
    assert metric_of(pair.reader, "segment_pinned").value == 3
    assert metric_of(pair.reader, "segment_pinned_bytes").value == 3 * MIB
    assert metric_of(pair.reader, "pin_seconds_total").value > 0
    assert sum(COPIES.registered.values()) == 3 * MIB
    assert [int(tensor[0]) for tensor in kept] == [0, 1, 2]


def test_a_process_that_uses_no_device_registers_nothing(pair):
    kept = pair.take(1)
    assert pair.reader.statistics().pins == {}
    assert not COPIES.registered
    del kept


def test_an_idle_reader_notices_a_device_that_is_used_only_later(pair):
    kept = pair.take(1)
    waiting = threading.Thread(target=lambda: pair.reader.dequeue(timeout=20))
    waiting.start()
    with cpu_streams():
        assert pins(pair.reader) == {1: "pinned"}
        pair.queue.enqueue(None)
        waiting.join()
        del kept
        pair.close()
        assert eventually(lambda: not COPIES.registered or None)


def test_nothing_waits_for_the_registration(pair, stream, monkeypatch):
    may = threading.Event()
    monkeypatch.setattr(COPIES, "before_register", lambda: may.wait(30))
    assert moved_is_right(pair, stream, 1)
    assert pair.reader.statistics().pins == {1: "pinning"}
    assert metric_of(pair.reader, "device_copies_total", "pageable_sync").value == 1
    may.set()
    assert pins(pair.reader) == {1: "pinned"}
    assert moved_is_right(pair, stream, 2)
    assert metric_of(pair.reader, "device_copies_total", "pinned_async").value == 1


# ── case 16 ──────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("segment", [1, 2, 3])
@pytest.mark.parametrize("reason", PIN_FAILURES)
def test_a_segment_that_is_refused_is_copied_from_all_the_same_and_says_why(pair, stream, reason, segment):
    COPIES.faults.extend([None] * (segment - 1) + [reason])
    kept = [pair.take(number) for number in range(3)]
    expected = {number: f"failed: {reason}" if number == segment else "pinned" for number in (1, 2, 3)}
    assert pins(pair.reader) == expected
    assert failures(pair) == {reason: 1}
    assert metric_of(pair.reader, "segment_pinned").value == 2
    moved = pair.reader.to_device(kept, "cpu", stream)
    del kept
    stream.synchronize()
    assert [bool((there == number).all()) for number, there in enumerate(moved)] == [True] * 3
    assert metric_of(pair.reader, "device_copies_total", "pageable_sync").value == 1
    assert metric_of(pair.reader, "device_copies_total", "pinned_async").value == 2
    del moved
    assert eventually(lambda: not pair.queue.statistics().arena_used_bytes or None)


def test_memory_that_somebody_else_registered_stays_theirs(pair, stream, monkeypatch):
    theirs: list[int] = []

    def first() -> None:
        address = pair.reader._borrower._mappings[1].address
        COPIES.registered[address] = MIB
        theirs.append(address)

    monkeypatch.setattr(COPIES, "before_register", first)
    kept = pair.take(1)
    assert pins(pair.reader) == {1: "failed: already_registered"}
    del kept
    pair.close()
    assert list(COPIES.registered) == theirs
    COPIES.registered.clear()


def test_the_limit_on_locked_memory_leaves_the_first_segments_pinned(pair, stream):
    COPIES.lockable_bytes = 2 * MIB
    kept = [pair.take(number) for number in range(3)]
    assert pins(pair.reader) == {1: "pinned", 2: "pinned", 3: "failed: memlock_limit"}
    assert [int(tensor[0]) for tensor in kept] == [0, 1, 2]


def test_an_engine_that_fails_in_a_way_of_its_own_is_a_failure_like_any_other(pair, stream, monkeypatch):
    def broken() -> None:
        raise OSError("no such thing")

    monkeypatch.setattr(COPIES, "before_register", broken)
    kept = pair.take(1)
    assert pins(pair.reader) == {1: "failed: driver"}
    assert failures(pair) == {"driver": 1}
    del kept


# ── what the user asks for ───────────────────────────────────────────────────────────────────────
def test_off_registers_nothing_and_copies_all_the_same(stream):
    pair = Pair(pin="off")
    assert moved_is_right(pair, stream, 1)
    assert moved_is_right(pair, stream, 2)
    assert not COPIES.registered
    assert metric_of(pair.reader, "device_copies_total", "pageable_sync").value == 2
    pair.close()


def test_required_waits_for_the_registration(stream):
    pair = Pair(pin="required")
    assert moved_is_right(pair, stream, 1)
    assert metric_of(pair.reader, "device_copies_total", "pinned_async").value == 1
    pair.close()


def test_a_reader_that_waits_for_the_registration_says_so(stream, monkeypatch):
    may = threading.Event()
    monkeypatch.setattr(COPIES, "before_register", lambda: may.wait(30))
    pair = Pair(pin="required")
    tensor = pair.take(1)
    moving = threading.Thread(target=pair.reader.to_device, args=(tensor, "cpu", stream))
    moving.start()
    assert eventually(lambda: pair.reader.statistics().state == "gate" or None)
    may.set()
    moving.join()
    assert pair.reader.statistics().state == "working"
    del tensor, moving
    pair.close()


def test_required_says_why_not(stream):
    pair = Pair(pin="required")
    COPIES.faults.append("memlock_limit")
    tensor = pair.take(1)
    with pytest.raises(PinFailed, match=r"segment 1 .*memlock_limit") as failed:
        pair.reader.to_device(tensor, "cpu", stream)
    assert failed.value.reason == "memlock_limit"
    del tensor, failed
    pair.close()


def test_another_word_is_refused():
    with pytest.raises(InvalidArgument, match="pin is none of its choices"):
        QueueConfig(pin="yes")


def test_the_environment_decides_last(monkeypatch):
    monkeypatch.setenv("ARENA_PIN", "off")
    assert QueueConfig(pin="required").from_environment().pin == "off"


# ── the end ──────────────────────────────────────────────────────────────────────────────────────
def test_the_last_view_ends_the_registration_then_the_mapping():
    before = len(arena_maps())
    with cpu_streams():
        pair = Pair()
        kept = pair.take(1)
        assert pins(pair.reader) == {1: "pinned"}
        pair.close()
        assert COPIES.registered
        assert int(kept[0]) == 1
        del kept, pair
        gc.collect()
        assert eventually(lambda: not COPIES.registered or None)
        assert eventually(lambda: len(arena_maps()) <= before or None)


def test_a_copy_under_way_keeps_a_dead_view_mapped_and_registered(stream):
    pair = Pair()
    tensor = pair.take(1)
    assert pins(pair.reader) == {1: "pinned"}
    held = stream.hold()
    moved = pair.reader.to_device(tensor, "cpu", stream)
    pair.close()
    del tensor, pair
    gc.collect()
    assert COPIES.registered
    held.set()
    stream.synchronize()
    assert bool((moved == 1).all())
    assert eventually(lambda: not COPIES.registered or None)


def test_what_the_device_will_not_let_go_of_stays_mapped():
    assert run(stuck) is True


def stuck() -> bool:
    with cpu_streams():
        pair = Pair()
        tensor = pair.take(1)
        assert pins(pair.reader) == {1: "pinned"}
        COPIES.stuck = True
        address = pair.reader._borrower._mappings[1].address
        pair.close()
        del tensor, pair
        gc.collect()
        threading.Event().wait(0.1)
        return any(line.startswith(f"{address:x}-") for line in arena_maps())


def test_a_segment_that_goes_while_it_is_being_registered_is_taken_back(stream, monkeypatch):
    before = len(arena_maps())
    may = threading.Event()
    monkeypatch.setattr(COPIES, "before_register", lambda: may.wait(30))
    pair = Pair()
    tensor = pair.take(1)
    pair.close()
    del tensor, pair
    gc.collect()
    may.set()
    assert eventually(lambda: (not COPIES.registered and len(arena_maps()) <= before) or None)
