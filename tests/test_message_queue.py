"""The public face of a queue: what each verb promises, and what it does when it is used wrongly."""

import gc
import itertools
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from arena import MessageQueue, QueueConfig, errors
from arena.errors import (
    ArenaError,
    DecodeFailed,
    EncodeFailed,
    InvalidArgument,
    MessageTooLarge,
    NoReader,
    OutOfMemory,
    PeerDied,
    QueueClosed,
    QueueTimeout,
    ReentrantUse,
    WrongEnd,
)
from tests.support import fleet as hand
from tests.support.fleet import eventually, within

pytestmark = pytest.mark.usefixtures("run_dir")


@pytest.fixture
def pair(run_dir) -> Iterator[Callable[..., tuple[MessageQueue, MessageQueue]]]:
    """Makes a writer and its one reader, both in this process."""
    made: list[MessageQueue] = []

    def make(**settings: Any) -> tuple[MessageQueue, MessageQueue]:
        queue = MessageQueue(1, config=QueueConfig(**settings))
        made.append(queue)
        reader = MessageQueue.create_from_handle(queue.export_handle(), 0)
        made.append(reader)
        return queue, reader

    yield make
    for endpoint in made:
        endpoint.shutdown()


def in_thread(function: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Run in a thread; the list gets what it returned or raised."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(function())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, outcome


def outcome_of(thread: threading.Thread, outcome: list[Any]) -> Any:
    thread.join(hand.A_WHILE_S)
    assert not thread.is_alive()
    return outcome[0]


def fill(queue: MessageQueue, count: int) -> None:
    for number in range(count):
        queue.enqueue(number, timeout=5)


# ── closing ──────────────────────────────────────────────────────────────────────────────────────
def test_an_endpoint_that_was_shut_down_refuses_every_verb_and_shuts_down_again_in_peace(pair):
    queue, reader = pair()
    queue.enqueue("left in the ring")
    for endpoint in (reader, queue):
        endpoint.shutdown()
        endpoint.shutdown()
    for _ in range(3):
        with pytest.raises(QueueClosed):
            queue.enqueue(1)
        with pytest.raises(QueueClosed):
            queue.enqueue(1, timeout=0)
        with pytest.raises(QueueClosed):
            reader.dequeue()
        with pytest.raises(QueueClosed):
            reader.dequeue(timeout=0)
    with pytest.raises(QueueClosed), queue.lend((4,), torch.float32):
        pass
    assert queue.statistics().state == "closed"
    assert reader.statistics().state == "closed"
    assert "closed" in repr(queue)
    assert "closed" in repr(reader)


def test_the_with_block_closes_the_queue_and_lets_its_error_through(run_dir):
    with pytest.raises(KeyError, match="mine"), MessageQueue(1) as queue:
        handle = queue.export_handle()
        with MessageQueue.create_from_handle(handle, 0) as reader:
            queue.enqueue(1)
            assert reader.dequeue() == 1
            raise KeyError("mine")
    assert reader.statistics().state == "closed"
    with pytest.raises(QueueClosed):
        queue.enqueue(2)
    assert list(run_dir.iterdir()) == []


def test_what_was_published_before_the_shutdown_is_still_read_after_it(pair):
    queue, reader = pair()
    tensor = torch.arange(1 << 16)
    queue.enqueue(1)
    queue.enqueue(tensor)
    queue.shutdown()
    assert reader.dequeue(timeout=5) == 1
    taken = reader.dequeue(timeout=5)
    assert torch.equal(taken, tensor)
    with pytest.raises(QueueClosed, match="writer"):
        reader.dequeue(timeout=5)
    reader.shutdown()
    assert torch.equal(taken, tensor)


def test_a_dequeue_that_waits_is_woken_by_a_shutdown_from_another_thread(pair):
    _, reader = pair()
    waiting = in_thread(reader.dequeue)
    eventually(lambda: reader.statistics().state == "waiting")
    with within(5):
        reader.shutdown()
        assert isinstance(outcome_of(*waiting), QueueClosed)
    with pytest.raises(QueueClosed):
        reader.dequeue()


def test_an_enqueue_that_waits_is_woken_by_a_shutdown_from_another_thread(pair):
    queue, _ = pair(slots=2)
    fill(queue, 2)
    waiting = in_thread(lambda: queue.enqueue("one too many"))
    eventually(lambda: queue.statistics().state == "waiting")
    with within(5):
        queue.shutdown()
        assert isinstance(outcome_of(*waiting), QueueClosed)


def test_the_writers_shutdown_wakes_readers_parked_in_other_processes(fleet):
    queue = MessageQueue(2)
    readers = fleet.readers(queue)
    waiting = [reader.begin(hand.dequeue, timeout=None) for reader in readers]
    eventually(lambda: not any(call.done() for call in waiting), within=1)
    with within(5):
        queue.shutdown()
        for call in waiting:
            with pytest.raises(QueueClosed, match="writer"):
                call.result()


def test_the_last_readers_shutdown_wakes_a_writer_that_waits_for_it(fleet):
    with MessageQueue(1, config=QueueConfig(slots=2)) as queue:
        (reader,) = fleet.readers(queue)
        fill(queue, 2)
        waiting = in_thread(lambda: queue.enqueue("one too many"))
        eventually(lambda: queue.statistics().state == "waiting")
        with within(5):
            reader.call(hand.shut_down)
            assert isinstance(outcome_of(*waiting), NoReader)


def test_a_reader_that_leaves_holds_nobody_up(fleet):
    with MessageQueue(2, config=QueueConfig(slots=2)) as queue:
        stays, leaves = fleet.readers(queue)
        fill(queue, 2)
        leaves.call(hand.shut_down)
        assert stays.call(hand.drain, 2) == [0, 1]
        queue.enqueue("on it goes", timeout=5)
        assert stays.call(hand.dequeue) == "on it goes"


def test_shutdown_from_inside_a_call_takes_effect_when_the_call_ends(pair):
    queue, reader = pair()
    queue.enqueue(CallsBack(queue.shutdown, "sent all the same"))
    assert reader.dequeue(timeout=5) == "sent all the same"
    with pytest.raises(QueueClosed):
        queue.enqueue(1)


def test_the_second_of_two_threads_that_shut_down_returns_when_the_end_is_closed(pair, monkeypatch):
    for end in pair():
        began, go_on, release = threading.Event(), threading.Event(), type(end)._release_everything

        def slowly(self: Any, began=began, go_on=go_on, release=release) -> None:
            began.set()
            assert go_on.wait(10)
            release(self)

        monkeypatch.setattr(type(end), "_release_everything", slowly)
        first = in_thread(end.shutdown)
        assert began.wait(10)
        second = in_thread(end.shutdown)
        second[0].join(0.2)
        assert second[0].is_alive()
        go_on.set()
        for call in (first, second):
            assert outcome_of(*call) is None


# ── use from inside a call ───────────────────────────────────────────────────────────────────────
class CallsBack:
    """Does something while it is pickled, and unpickles to `value`."""

    def __init__(self, action: Callable[[], object], value: object = None) -> None:
        self._action = action
        self._value = value

    def __reduce__(self) -> Any:
        self._action()
        return _value, (self._value,)


def _value(value: object) -> object:
    return value


def test_enqueueing_from_a_reduce_is_an_error_and_the_queue_stays_usable(pair):
    queue, reader = pair()
    for timeout in (None, 5):
        with pytest.raises(ReentrantUse):
            queue.enqueue(CallsBack(lambda: queue.enqueue("inner")), timeout=timeout)
        queue.enqueue("outer", timeout=timeout)
        assert reader.dequeue(timeout=5) == "outer"


def test_a_reduce_that_swallows_the_refusal_sends_its_own_message_only(pair):
    queue, reader = pair()

    def swallow() -> None:
        with pytest.raises(ReentrantUse):
            queue.enqueue("inner")

    queue.enqueue(CallsBack(swallow, "outer"))
    assert reader.dequeue(timeout=5) == "outer"
    with pytest.raises(QueueTimeout):
        reader.dequeue(timeout=0)


_here: dict[str, MessageQueue] = {}


def _dequeue_inside() -> object:
    return _here["reader"].dequeue(timeout=0)


class DequeuesWhenUnpickled:
    def __reduce__(self) -> Any:
        return _dequeue_inside, ()


def test_dequeueing_while_a_message_is_unpickled_is_an_error_and_the_queue_stays_usable(pair):
    queue, reader = pair()
    _here["reader"] = reader
    queue.enqueue(DequeuesWhenUnpickled())
    queue.enqueue("next")
    with pytest.raises(ArenaError) as caught:
        reader.dequeue(timeout=5)
    assert isinstance(caught.value, ReentrantUse) or isinstance(caught.value.__cause__, ReentrantUse)
    assert reader.dequeue(timeout=5) == "next"


def test_a_signal_handler_that_enqueues_into_a_waiting_enqueue_gets_an_error_not_a_deadlock(pair):
    queue, reader = pair(slots=2)
    fill(queue, 2)

    def handler(*_: object) -> None:
        queue.enqueue("from the handler", timeout=1)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        timer = threading.Thread(target=_signal_when, args=(queue, signal.SIGUSR1), daemon=True)
        timer.start()
        with within(20), pytest.raises(ReentrantUse):
            queue.enqueue("blocked", timeout=30)
        timer.join(5)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert [reader.dequeue(timeout=5) for _ in range(2)] == [0, 1]
    queue.enqueue("usable", timeout=5)
    assert reader.dequeue(timeout=5) == "usable"


def _signal_when(queue: MessageQueue, number: int) -> None:
    eventually(lambda: queue.statistics().state == "waiting")
    signal.pthread_kill(threading.main_thread().ident or 0, number)


def test_a_signal_handler_may_shut_down_the_queue_that_it_interrupts(pair):
    queue, _ = pair(slots=2)
    fill(queue, 2)
    before = signal.signal(signal.SIGUSR1, lambda *_: queue.shutdown())
    try:
        timer = threading.Thread(target=_signal_when, args=(queue, signal.SIGUSR1), daemon=True)
        timer.start()
        with within(20), pytest.raises(QueueClosed):
            queue.enqueue("blocked", timeout=30)
        timer.join(5)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert queue.statistics().state == "closed"


def test_a_signal_handler_that_uses_the_queue_at_any_moment_never_deadlocks(pair):
    """The handler sends too, hundreds of times, at every point of the main thread's own calls that a timer finds."""
    queue, reader = pair(slots=8)
    sent: list[int] = []
    refused = 0
    numbers = itertools.count()

    def handler(*_: object) -> None:
        nonlocal refused
        number = next(numbers)  # the handler may interrupt itself
        try:
            queue.statistics()
            queue.enqueue(number, timeout=0)
            sent.append(number)
        except (ReentrantUse, QueueTimeout):
            refused += 1

    before = signal.signal(signal.SIGALRM, handler)
    seen: list[Any] = []
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            try:
                queue.enqueue("main", timeout=0.01)
            except QueueTimeout:
                pass
            except ReentrantUse:
                pytest.fail("the main thread's own call was refused")
            while reader.statistics().lag_by_reader[0] > 3:
                seen.append(reader.dequeue(timeout=1))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    while reader.statistics().lag_by_reader[0]:
        seen.append(reader.dequeue(timeout=1))
    assert refused + len(sent) > 100
    assert sorted(one for one in seen if one != "main") == sorted(sent)


def test_a_finaliser_that_uses_the_queue_does_not_break_it(pair):
    queue, reader = pair()
    refused: list[BaseException] = []

    class Finalised:
        def __del__(self) -> None:
            try:
                queue.enqueue("from a finaliser")
            except ArenaError as error:
                refused.append(error)

    def make_garbage() -> None:
        cycle = [Finalised()]
        cycle.append(cycle)  # type: ignore[arg-type]
        del cycle
        gc.collect()

    queue.enqueue(CallsBack(make_garbage, "mine"))
    assert reader.dequeue(timeout=5) == "mine"
    assert [type(error) for error in refused] == [ReentrantUse]


# ── objects that can't travel ────────────────────────────────────────────────────────────────────
def test_an_object_that_cannot_be_pickled_is_a_clear_error_and_costs_nothing(pair):
    queue, reader = pair(max_arena_bytes=1 << 20, segment_bytes=1 << 20)
    for obj in (lambda: 0, threading.Lock(), {"x": (i for i in ())}):
        with pytest.raises(EncodeFailed) as caught:
            queue.enqueue(obj)
        assert caught.value.__cause__ is not None
    queue.enqueue("next")
    assert reader.dequeue(timeout=5) == "next"


class RaisesHalfWay:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error


@pytest.mark.parametrize("error", [RuntimeError("half-way"), KeyboardInterrupt(), MemoryError(), RecursionError()])
def test_a_reduce_that_raises_after_tensors_were_met_leaves_no_block_and_no_trace_of_them(pair, error):
    queue, reader = pair(max_arena_bytes=1 << 20, segment_bytes=1 << 20)
    tensor = torch.arange(1 << 15)
    expected = EncodeFailed if isinstance(error, Exception) else type(error)
    for _ in range(8):  # the arena holds four of these tensors
        with pytest.raises(expected):
            queue.enqueue([tensor, np.arange(1 << 15), bytearray(1 << 17), RaisesHalfWay(error)])
    assert queue.statistics().arena_used_bytes == 0
    queue.enqueue("next")
    queue.enqueue([tensor, tensor])
    assert reader.dequeue(timeout=5) == "next"
    first, second = reader.dequeue(timeout=5)
    assert torch.equal(first, tensor)
    assert torch.equal(second, tensor)


class RaisesWhenUnpickled:
    def __init__(self, passenger: object) -> None:
        self.passenger = passenger

    def __reduce__(self) -> Any:
        return _raise, (self.passenger,)


def _raise(passenger: object) -> object:
    raise RuntimeError("not here")


def test_a_message_that_cannot_be_unpickled_is_consumed_and_gives_its_block_back(pair):
    nbytes = 1 << 20
    queue, reader = pair(max_arena_bytes=nbytes, segment_bytes=nbytes)
    for passenger in ("small", torch.zeros(nbytes // 4), [torch.zeros(nbytes // 4), "x" * 100_000]):
        queue.enqueue(RaisesWhenUnpickled(passenger))
        with pytest.raises(DecodeFailed, match="not here"):
            reader.dequeue(timeout=5)
        gc.collect()
    with queue.lend((nbytes,), torch.uint8):
        pass
    queue.enqueue("next")
    assert reader.dequeue(timeout=5) == "next"


# ── numbers out of range ─────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("nbytes", [101, 5_000, 100_000, 1 << 20])
@pytest.mark.parametrize("kind", ["bytes", "tensor", "list"])
def test_a_message_above_max_message_bytes_is_refused_whatever_its_path(pair, nbytes, kind):
    queue, reader = pair(max_message_bytes=100)
    obj = {"bytes": lambda: bytes(nbytes), "tensor": lambda: torch.zeros(nbytes, dtype=torch.uint8)}.get(
        kind, lambda: list(range(nbytes))
    )()
    with pytest.raises(MessageTooLarge, match="max_message_bytes = 100"):
        queue.enqueue(obj)
    assert queue.statistics().arena_used_bytes == 0
    queue.enqueue("fits")
    assert reader.dequeue(timeout=5) == "fits"


@pytest.mark.parametrize("timeout", [-1, -0.001, float("nan"), "1", b"1", [], True, 1j])
def test_a_timeout_that_is_no_number_of_seconds_is_refused(pair, timeout):
    queue, reader = pair()
    for verb in (
        lambda: queue.enqueue(1, timeout=timeout),
        lambda: reader.dequeue(timeout=timeout),
        lambda: queue.wait_until_ready(timeout=timeout),
        lambda: reader.wait_until_ready(timeout=timeout),
        lambda: MessageQueue.create_from_handle(queue.export_handle(), 0, timeout=timeout),
    ):
        with pytest.raises(InvalidArgument, match="timeout"):
            verb()
    queue.enqueue("usable", timeout=float("inf"))
    assert reader.dequeue(timeout=float("inf")) == "usable"


@pytest.mark.parametrize("n_reader", [0, -1, 1.0, "1", None, True, 10**9])
def test_a_number_of_readers_that_is_none_is_refused(run_dir, n_reader):
    with pytest.raises(InvalidArgument, match="n_reader"):
        MessageQueue(n_reader)
    assert list(run_dir.iterdir()) == []


@pytest.mark.parametrize("shape", [(-1,), (2, -3), ("x",), (2.0,), 1.5, None, (1 << 62, 8), (1 << 70,)])
def test_a_shape_that_is_none_is_refused_before_any_memory_is_taken(pair, shape):
    queue, _ = pair()
    with pytest.raises(InvalidArgument, match="no tensor of this shape") as caught, queue.lend(shape, torch.float32):
        pass
    assert caught.value.found == f"{shape!r} of torch.float32"
    assert caught.value.expected
    assert caught.value.remedy
    assert queue.statistics().arena_used_bytes == 0


@pytest.mark.parametrize("dtype", ["float32", None, float, np.float32, np.dtype("float32"), 4])
def test_a_type_that_is_none_of_torchs_is_refused_before_any_memory_is_taken(pair, dtype):
    queue, _ = pair()
    with pytest.raises(InvalidArgument, match=r"dtype is of the wrong type; expected a torch\.dtype") as caught:
        queue.lend((4,), dtype).__enter__()
    assert caught.value.found == f"{dtype!r} of type {type(dtype).__name__}"
    assert queue.statistics().arena_used_bytes == 0


def test_lending_more_than_the_arena_holds_is_refused_or_private_as_asked(pair):
    queue, reader = pair(max_arena_bytes=1 << 16, segment_bytes=1 << 16)
    with pytest.raises(OutOfMemory, match="max_arena_bytes"), queue.lend((1 << 20,), torch.uint8):
        pass
    with queue.lend((1 << 17,), torch.uint8, or_private=True) as private:
        private.fill_(7)
    queue.enqueue(private)
    assert int(reader.dequeue(timeout=5).sum()) == 7 << 17


def test_each_verb_belongs_to_one_end(pair):
    queue, reader = pair()
    for verb in (
        queue.dequeue,
        lambda: reader.enqueue(1),
        lambda: reader.lend((1,), torch.uint8),
        reader.export_handle,
    ):
        with pytest.raises(WrongEnd):
            verb()


# ── waiting ──────────────────────────────────────────────────────────────────────────────────────
def test_a_timeout_of_zero_polls(pair):
    queue, reader = pair(slots=2)
    with within(5):
        with pytest.raises(QueueTimeout):
            reader.dequeue(timeout=0)
        fill(queue, 2)
        with pytest.raises(QueueTimeout):
            queue.enqueue("full", timeout=0)
        assert reader.dequeue(timeout=0) == 0
        queue.enqueue("room", timeout=0)


def test_a_timeout_is_also_the_built_in_timeout_error_and_loses_nothing(pair):
    queue, reader = pair(slots=2)
    fill(queue, 2)
    with pytest.raises(TimeoutError, match="reader 0"):
        queue.enqueue("lost?", timeout=0.05)
    assert [reader.dequeue(timeout=5) for _ in range(2)] == [0, 1]
    with pytest.raises(TimeoutError, match="awaiting_write"):
        reader.dequeue(timeout=0.05)
    queue.enqueue("next", timeout=5)
    assert reader.dequeue(timeout=5) == "next"


def test_another_thread_s_call_is_waited_for_no_longer_than_the_timeout(pair):
    queue, reader = pair()
    waiting = in_thread(reader.dequeue)
    eventually(lambda: reader.statistics().state == "waiting")
    with within(10), pytest.raises(QueueTimeout):
        reader.dequeue(timeout=0.1)
    queue.enqueue("for the first")
    assert outcome_of(*waiting) == "for the first"


def test_wait_until_ready_names_who_is_missing(run_dir):
    with MessageQueue(3) as queue:
        handle = queue.export_handle()
        with MessageQueue.create_from_handle(handle, 1) as reader:
            with pytest.raises(QueueTimeout, match=r"\[0, 2\]"):
                queue.wait_until_ready(timeout=0.1)
            with pytest.raises(QueueTimeout, match="3 readers"):
                reader.wait_until_ready(timeout=0.1)


def test_wait_until_ready_returns_at_both_ends_once_everybody_came(fleet):
    with MessageQueue(2) as queue:
        waiting = in_thread(lambda: queue.wait_until_ready(timeout=20))
        first, second = fleet.start(), fleet.start()
        first.call(hand.attach, queue.export_handle(), 0)
        ready = first.begin(wait_until_ready, 20)
        second.call(hand.attach, queue.export_handle(), 1)
        second.call(wait_until_ready, 20)
        ready.result()
        assert outcome_of(*waiting) is None


def test_wait_until_ready_counts_a_reader_that_came_and_went(run_dir):
    with MessageQueue(2) as queue:
        handle = queue.export_handle()
        MessageQueue.create_from_handle(handle, 0).shutdown()
        with MessageQueue.create_from_handle(handle, 1) as reader:
            queue.wait_until_ready(timeout=5)
            reader.wait_until_ready(timeout=5)


def test_wait_until_ready_ends_at_both_ends_when_they_are_shut_down(run_dir):
    queue = MessageQueue(2)
    reader = MessageQueue.create_from_handle(queue.export_handle(), 0)
    for endpoint in (reader, queue):
        waiting = in_thread(endpoint.wait_until_ready)
        eventually(lambda waiting=waiting: waiting[0].is_alive())
        with within(5):
            endpoint.shutdown()
            assert isinstance(outcome_of(*waiting), QueueClosed)


def test_an_endpoint_is_working_again_after_a_wait_however_it_ended(pair):
    queue, reader = pair(slots=2)
    other = MessageQueue(2)
    half = MessageQueue.create_from_handle(other.export_handle(), 0)
    fill(queue, 2)
    for wait, endpoint in (
        (lambda: queue.enqueue("full", timeout=0.05), queue),
        (lambda: [reader.dequeue(timeout=0.05) for _ in range(3)], reader),
        (lambda: half.wait_until_ready(timeout=0.05), half),
    ):
        with pytest.raises(QueueTimeout):
            wait()
        assert endpoint.statistics().state == "working"
    half.shutdown()
    joiner = MessageQueue.create_from_handle(other.export_handle(), 0)
    waiting = in_thread(joiner.dequeue)
    eventually(lambda: joiner.statistics().state == "waiting")
    other.enqueue("next")
    assert outcome_of(*waiting) == "next"
    assert joiner.statistics().state == "working"
    joiner.shutdown()
    other.shutdown()


def wait_until_ready(here: hand.Here, timeout: float) -> None:
    here.queue.wait_until_ready(timeout=timeout)


# ── several threads ──────────────────────────────────────────────────────────────────────────────
def test_threads_share_a_writer_without_losing_or_reordering_a_thread_s_messages(fleet):
    with MessageQueue(1, config=QueueConfig(slots=8)) as queue:
        (reader,) = fleet.readers(queue)
        draining = reader.begin(hand.drain, 4 * 200)
        threads = [in_thread(lambda me=me: [queue.enqueue((me, n), timeout=20) for n in range(200)]) for me in range(4)]
        for thread in threads:
            assert outcome_of(*thread) == [None] * 200
        seen = draining.result()
    for me in range(4):
        assert [n for who, n in seen if who == me] == list(range(200))


def test_threads_share_a_reader_and_each_message_goes_to_one_of_them(pair):
    queue, reader = pair(slots=8)

    def take() -> list[int]:
        taken = []
        while (number := reader.dequeue(timeout=20)) >= 0:
            taken.append(number)
        return taken

    threads = [in_thread(take) for _ in range(4)]
    for number in range(400):
        queue.enqueue(number, timeout=20)
    for _ in threads:
        queue.enqueue(-1, timeout=20)
    taken = [outcome_of(*thread) for thread in threads]
    assert sorted(itertools.chain(*taken)) == list(range(400))
    assert all(one == sorted(one) for one in taken)


def test_statistics_answers_while_both_ends_are_busy_in_other_threads(pair):
    queue, reader = pair(slots=4, max_arena_bytes=1 << 22, segment_bytes=1 << 22)
    over = threading.Event()

    def send() -> None:
        tensor = torch.zeros(1 << 17, dtype=torch.uint8)
        while not over.is_set():
            queue.enqueue([tensor, "x"], timeout=20)
        queue.enqueue(None, timeout=20)

    def take() -> None:
        while reader.dequeue(timeout=20) is not None:
            pass

    threads = [in_thread(send), in_thread(take)]
    for _ in range(300):
        assert queue.statistics().published >= 0
        assert reader.statistics().role == "reader"
        repr(queue), repr(reader)
    over.set()
    assert [outcome_of(*thread) for thread in threads] == [None, None]


# ── the rest ─────────────────────────────────────────────────────────────────────────────────────
def test_broadcast_object_returns_the_object_at_both_ends(pair):
    queue, reader = pair()
    assert queue.broadcast_object({"step": 1}) == {"step": 1}
    assert reader.broadcast_object() == {"step": 1}


def test_statistics_tell_what_went_which_way(pair):
    queue, reader = pair(slots=16, max_arena_bytes=1 << 20, segment_bytes=1 << 20)
    queue.enqueue("inline")
    queue.enqueue(torch.zeros(1 << 20, dtype=torch.uint8))
    queue.enqueue(bytes(100_000))
    assert queue.statistics().lag_by_reader == {0: queue.statistics().published}
    messages = [reader.dequeue(timeout=5) for _ in range(3)]
    told = queue.statistics()
    assert told.messages_by_path == {"inline": 1, "block": 1, "fragments": 1, "remote": 0}
    assert told.fallbacks == {"arena_full": 1}
    assert told.held_bytes_by_reader == {0: 1 << 20}
    assert told.consumed_by_reader == {0: told.published}
    assert told.peers == {0: "attached"}
    assert told.lag_by_reader == {0: 0}
    del messages


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_survives_pickling_with_what_it_knows(name):
    kind = getattr(errors, name)
    known = {"rank": 3, "pid": 4, "signal": 9} if kind is PeerDied else {}
    error = kind("a summary", expected="this", found="that", remedy="do so", **known)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == str(error) == "a summary; expected this; found that; do so"
    assert vars(copy) == vars(error)


def test_an_environment_variable_overrides_a_setting_and_a_wrong_one_is_named(monkeypatch, run_dir):
    monkeypatch.setenv("ARENA_SLOTS", "2")
    with MessageQueue(1, config=QueueConfig(slots=64)) as queue:
        fill(queue, 2)
        with pytest.raises(QueueTimeout):
            queue.enqueue("full", timeout=0)
    monkeypatch.setenv("ARENA_SLOTS", "many")
    with pytest.raises(InvalidArgument, match="ARENA_SLOTS"):
        MessageQueue(1)
    assert list(run_dir.iterdir()) == []
    assert os.environ["ARENA_SLOTS"] == "many"
