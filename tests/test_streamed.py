"""A large tensor is on its way to the device while the writer still copies it; nobody ever sees what is not there."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from arena import MessageQueue, QueueConfig, codec, copying, filling, layout, writer
from arena.codec import TensorSource
from arena.device.cpu.copies import COPIES, CpuStream
from arena.errors import CorruptFrame, PeerDied, QueueTimeout
from arena.probe import Event, ProbeReader, hooks
from tests.support.fleet import eventually
from tests.support.processes import Child
from tests.support.streams import cpu_streams, metric_of, pins

ROOT = Path(__file__).parent.parent
KIB = 1 << 10
NBYTES = 512 * KIB

pytestmark = pytest.mark.usefixtures("run_dir")


def small_sizes() -> None:
    """Half a MiB is streamed, in small chunks."""
    filling.STREAMED_BYTES = NBYTES  # type: ignore[misc]
    copying.PIECE_BYTES = 64 * KIB  # type: ignore[misc]
    codec._PARALLEL_COPY_BYTES = 0  # type: ignore[misc]
    copying.is_better = lambda threads: True


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filling, "STREAMED_BYTES", NBYTES)
    monkeypatch.setattr(copying, "PIECE_BYTES", 64 * KIB)
    monkeypatch.setattr(codec, "_PARALLEL_COPY_BYTES", 0)
    monkeypatch.setattr(copying, "is_better", lambda threads: True)


def stamped(number: int) -> torch.Tensor:
    return torch.arange(NBYTES // 8, dtype=torch.int64) * 1000 + number


class Paced:
    """The writer's copy of one tensor, chunk by chunk as the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails_after: int | None = None) -> None:
        self.go, self.there = threading.Semaphore(0), threading.Semaphore(0)
        real = TensorSource.write_in_order

        def paced(source: TensorSource, target: memoryview, reached: Callable[[int], None]) -> None:
            number = itertools.count()

            def slowly(end: int) -> None:
                if next(number) == fails_after:
                    raise RuntimeError("the source can't be read")
                assert self.go.acquire(timeout=30)
                reached(end)
                self.there.release()

            real(source, target, slowly)

        monkeypatch.setattr(TensorSource, "write_in_order", paced)

    def let(self, chunks: int = 1000) -> None:
        for _ in range(chunks):
            self.go.release()


class Ends:
    """A queue, its reader, which has said that it moves what it gets, and a stream."""

    def __init__(self, stream: Any, **settings: Any) -> None:
        room = {"max_arena_bytes": 4 * NBYTES, "segment_bytes": 4 * NBYTES, **settings}
        self.queue: Any = MessageQueue(1, config=QueueConfig(**room))
        self.reader: Any = MessageQueue.create_from_handle(self.queue.export_handle(), 0)
        self.stream = stream

    def ready(self) -> None:
        """Have the segment pinned."""
        self.queue.enqueue(stamped(0), timeout=10)
        self.take()
        assert set(pins(self.reader).values()) == {"pinned"}
        assert eventually(lambda: not self.held() or None)

    def take(self, **how: Any) -> Any:
        return self.reader.dequeue_to("cpu", stream=self.stream, **{"timeout": 20, **how})

    def send(self, message: Any) -> threading.Thread:
        def enqueue() -> None:
            try:
                self.queue.enqueue(message, timeout=20)
            except BaseException as error:
                self.failed = error

        thread = threading.Thread(target=enqueue)
        thread.start()
        return thread

    def held(self) -> int:
        found: int = self.queue.statistics().arena_used_bytes
        return found

    def copies(self) -> dict[str, int]:
        return {
            mode: metric_of(self.reader, "device_copies_total", mode).value for mode in ("streamed", "pinned_async")
        }

    def close(self) -> None:
        self.reader.shutdown()
        self.queue.shutdown()


@pytest.fixture
def stream() -> Iterator[CpuStream]:
    with cpu_streams() as [made]:
        yield made


@pytest.fixture
def ends(stream: CpuStream) -> Iterator[Ends]:
    made = Ends(stream)
    made.ready()
    yield made
    made.close()


def published(ends: Ends) -> int:
    return int(ends.queue._published[0])


# ── what arrives ─────────────────────────────────────────────────────────────────────────────────
def test_the_device_has_the_first_bytes_while_the_last_ones_are_still_to_come(ends, monkeypatch):
    seen: list[int] = []
    real = COPIES.copy_bytes

    def copy(source: torch.Tensor, *rest: Any, **how: Any) -> None:
        seen.append(source.nbytes)
        real(source, *rest, **how)

    monkeypatch.setattr(COPIES, "copy_bytes", copy)
    paced = Paced(monkeypatch)
    sending = ends.send({"it": stamped(1), "with": [1, "two"]})
    taken: list[Any] = []
    taking = threading.Thread(target=lambda: taken.append(ends.take()))
    taking.start()
    paced.let(1)
    assert eventually(lambda: seen or None) == [64 * KIB]
    assert taking.is_alive()
    assert sending.is_alive()
    paced.let()
    taking.join()
    sending.join()
    ends.stream.synchronize()
    assert torch.equal(taken[0]["it"], stamped(1))
    assert taken[0]["with"] == [1, "two"]
    assert sum(seen) == NBYTES
    assert ends.copies()["streamed"] == 1
    taken.clear()
    assert eventually(lambda: not ends.held() or None)


def test_the_copy_of_a_sampled_message_is_in_its_trace(ends, monkeypatch):
    class Always(SimpleNamespace):
        def __call__(self, spent_ns: int) -> hooks.Sampled:
            return 1, 2, 3, 4

    monkeypatch.setattr(hooks, "trace_source", Always(left=0, gap_ns=0, plain=object(), context=object))
    sending = ends.send(stamped(1))
    ends.take()
    sending.join()
    with ProbeReader(ends.queue._probe.path) as page:
        kinds = [event.kind for event in page.events() if event.trace == (1, 2, 3)]
    assert Event.COPY in kinds
    assert kinds[-1] is Event.PUBLISH


def test_where_torch_copies_better_its_threads_copy_and_the_device_follows(ends, monkeypatch):
    monkeypatch.setattr(copying, "is_better", lambda threads: False)
    told: list[int] = []
    reached = filling.Filling.reached
    monkeypatch.setattr(filling.Filling, "reached", lambda self, end: (told.append(end), reached(self, end)))
    sending = ends.send([stamped(1), "and"])
    got = ends.take()
    sending.join()
    ends.stream.synchronize()
    assert same(got, [stamped(1), "and"])
    assert told == [256 * KIB, NBYTES]


def test_plain_dequeue_waits_for_the_whole(ends, monkeypatch):
    paced = Paced(monkeypatch)
    sending = ends.send(stamped(1))
    paced.let(2)
    assert paced.there.acquire(timeout=20)
    with pytest.raises(QueueTimeout):
        ends.reader.dequeue(timeout=0.05)
    with pytest.raises(QueueTimeout):
        ends.take(timeout=0.05)
    paced.let()
    got = ends.reader.dequeue(timeout=20)
    assert torch.equal(got, stamped(1))
    sending.join()
    assert eventually(lambda: ends.held() == NBYTES or None)
    del got
    assert eventually(lambda: not ends.held() or None)


MESSAGES: dict[str, Callable[[], Any]] = {
    "alone": lambda: stamped(3),
    "several": lambda: {"a": stamped(1), "b": [stamped(2), stamped(3)], "small": torch.arange(5)},
    "views": lambda: (whole := stamped(5), whole[100:], whole.view(torch.uint8)),
    "gathered": lambda: [stamped(1), stamped(2).view(256, -1).T],
    "not one tensor": lambda: [stamped(1).view(-1, 2)[:, 0], stamped(2)],
    "floats": lambda: stamped(1).view(torch.bfloat16).view(4, -1),
    "parameter": lambda: torch.nn.Parameter(torch.arange(NBYTES // 4, dtype=torch.float32)),
    "bytes": lambda: [bytearray(b"x" * NBYTES), stamped(2)],
    "unaligned": lambda: torch.arange(NBYTES + 9, dtype=torch.uint8)[9:],
    "long pickle": lambda: [stamped(1), "x" * 20_000],
}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        alike = type(one) is type(other) and (one.shape, one.dtype) == (other.shape, other.dtype)
        bits = [tensor.detach().contiguous().view(torch.uint8) for tensor in (one, other)]
        return alike and torch.equal(*bits)
    if isinstance(one, (list, tuple)):
        return all(same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


@pytest.mark.parametrize("serializer", ["pickle", "restricted"])
@pytest.mark.parametrize("name", MESSAGES)
def test_every_message_arrives_as_it_was_sent(stream, name, serializer):
    if serializer == "restricted":
        pytest.importorskip("msgpack")
        if name == "bytes":
            pytest.skip("no bytearray there")
    ends = Ends(stream, max_arena_bytes=16 * NBYTES, segment_bytes=16 * NBYTES, serializer=serializer)
    ends.ready()
    sent = MESSAGES[name]()
    sending = ends.send(sent)
    got = ends.take()
    sending.join()
    stream.synchronize()
    if name == "views":
        got = list(got)
        assert len({one.untyped_storage().data_ptr() for one in got}) == 3, "as to_device has it"
        sent = list(sent)
    assert same(sent, got)
    del got
    assert eventually(lambda: not ends.held() or None)
    ends.close()


def test_a_lent_tensor_beside_a_streamed_one_counts_at_its_turn(ends):
    with ends.queue.lend((NBYTES // 8,), torch.int64) as lent:
        lent.copy_(stamped(7))
        sending = ends.send([lent, stamped(8)])
        got = ends.take()
        sending.join()
    ends.stream.synchronize()
    assert same(got, [stamped(7), stamped(8)])


@pytest.mark.parametrize("why", ["nobody moves", "small", "unpinned", "private"])
def test_it_is_as_before_where_streaming_does_not_pay(stream, why):
    ends = Ends(stream, **({"views": "private"} if why == "private" else {"pin": "off"} if why == "unpinned" else {}))
    kinds: list[int] = []
    real = ends.queue._ring.write_pieces

    class Ring:
        def __getattr__(self, name: str) -> Any:
            return getattr(ring, name)

        def write_pieces(self, sequence: int, kind: int, *rest: Any) -> None:
            kinds.append(kind)
            real(sequence, kind, *rest)

    if why != "nobody moves":
        ends.queue.enqueue("first")
        ends.take()
    ring, ends.queue._ring = ends.queue._ring, Ring()
    sent = stamped(1)[: 1000 if why == "small" else None]
    sending = ends.send([sent] * 2 if why == "small" else sent)
    got = ends.reader.dequeue(timeout=20) if why == "nobody moves" else ends.take()
    sending.join()
    stream.synchronize()
    assert same(got, [sent] * 2 if why == "small" else sent)
    assert (layout.KIND_STREAMED in kinds) == (why in ("unpinned", "private"))
    assert ends.copies()["streamed"] == 0
    ends.queue._ring = ring
    ends.close()


# ── what goes wrong at the writer ────────────────────────────────────────────────────────────────
def test_a_source_that_fails_half_way_leaves_no_message_and_its_blocks_come_back(ends, monkeypatch):
    held = ends.stream.hold()
    with monkeypatch.context() as patch:
        paced = Paced(patch, fails_after=2)
        sending = ends.send(stamped(1))
        taken: list[Any] = []
        taking = threading.Thread(target=lambda: taken.append(ends.take()))
        taking.start()
        paced.let()
        sending.join()
        assert "can't be read" in str(ends.failed)
    time.sleep(0.05)
    assert ends.held() == NBYTES, "what is under way from it has not passed"
    held.set()
    assert eventually(lambda: not ends.held() or None)
    ends.queue.enqueue(stamped(2))
    taking.join()
    ends.stream.synchronize()
    assert torch.equal(taken[0], stamped(2))


def test_a_message_that_was_given_up_before_anybody_came_is_skipped(ends, monkeypatch):
    with monkeypatch.context() as patch:
        Paced(patch, fails_after=0)
        with pytest.raises(RuntimeError):
            ends.queue.enqueue(stamped(1))
    ends.queue.enqueue("next")
    assert ends.reader.dequeue(timeout=10) == "next"
    assert eventually(lambda: not ends.held() or None)


def _below(frame: Any, event: str, what: object) -> Any:
    return _below


def interrupt_at(count: int, action: Any) -> bool:
    """Run something, with an interrupt before the n-th line that it runs in the code of streaming."""
    files = {filling.__file__, writer.__file__, codec.__file__, copying.__file__}
    lines = 0

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal lines
        name = frame.f_code.co_name
        if name == "enqueue":  # signals come after calls, and those of its own lines are another test's
            return _below
        if frame.f_code.co_filename not in files or name in ("_leave", "rehearse", "_prepare"):
            return None
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


@pytest.mark.parametrize("cores", [1, 8, "torch's"])
def test_an_interrupt_at_any_line_of_the_writer_loses_no_block_and_tears_no_message(ends, monkeypatch, cores):
    monkeypatch.setattr(copying, "_cores", lambda: cores)
    monkeypatch.setattr(copying, "is_better", lambda threads: cores != "torch's")
    sent = stamped(4)
    line, interrupted, whole, skipped = 0, True, 0, 0
    while interrupted:
        line += 1
        before = published(ends)
        interrupted = interrupt_at(line, lambda: ends.queue.enqueue(sent))
        came = published(ends) > before
        ends.queue.enqueue(line)
        got = ends.reader.dequeue(timeout=10)
        if isinstance(got, torch.Tensor):
            assert torch.equal(got, sent)
            whole += 1
            del got
            got = ends.reader.dequeue(timeout=10)
        else:
            skipped += came
        assert got == line
        del got
        assert ends.held() == 0
    assert whole
    assert skipped, "some were published and given up"
    assert line > 60


def test_what_a_second_interrupt_kept_open_is_ended_by_the_next_call(ends, monkeypatch):
    with monkeypatch.context() as patch:
        Paced(patch, fails_after=1).let()
        patch.setattr(filling.Filling, "give_up", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            ends.queue.enqueue(stamped(1))
    with pytest.raises(QueueTimeout):
        ends.reader.dequeue(timeout=0.05)
    ends.queue.enqueue("next")
    assert ends.reader.dequeue(timeout=10) == "next"
    assert eventually(lambda: not ends.held() or None)


def test_more_than_there_can_be_is_a_corrupt_frame(ends, monkeypatch):
    ends.queue.enqueue(stamped(1))
    sequence = ends.reader._consumed[0]
    ends.queue._ring.filled(sequence)[0] = NBYTES + 1
    ends.queue.enqueue("next")
    with pytest.raises(CorruptFrame, match="fuller"):
        ends.take()
    assert ends.reader.dequeue(timeout=10) == "next"


# ── two processes ────────────────────────────────────────────────────────────────────────────────
def write(handles: Any, ring: Any, pause_s: float, messages: int, ends_how: str) -> None:
    """The writer's process. `ring` hears how far it is."""
    small_sizes()
    real = TensorSource.write_in_order

    def paced(source: TensorSource, target: memoryview, reached: Callable[[int], None]) -> None:
        number = itertools.count()

        def slowly(end: int) -> None:
            time.sleep(pause_s)
            if next(number) == 2 and ends_how and sent[0] == messages - 1:
                ring.send("within")
                if ends_how == "interrupt":
                    os.kill(os.getpid(), signal.SIGINT)
                    time.sleep(30)
                time.sleep(30 if ends_how == "killed" else 0)
                if ends_how == "stopped":
                    os.kill(os.getpid(), signal.SIGSTOP)
            reached(end)

        real(source, target, slowly)

    TensorSource.write_in_order = paced  # type: ignore[method-assign]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sent = [0]
    room = {"max_arena_bytes": 16 * NBYTES, "segment_bytes": 16 * NBYTES}
    queue: Any = MessageQueue(1, config=QueueConfig(**room))
    with queue:
        handles.send(queue.export_handle())
        for sent[0] in range(messages):
            with contextlib.suppress(KeyboardInterrupt):
                queue.enqueue(stamped(sent[0]), timeout=30)
            assert eventually(lambda: queue._roster.words[0][layout.READER_MOVES])  # else nothing is streamed
        queue.enqueue("the end", timeout=30)
        ring.recv()


@contextlib.contextmanager
def writing(*how: Any) -> Iterator[tuple[Child, Any, Any]]:
    from multiprocessing import Pipe

    handles, theirs = Pipe()
    ours, ring = Pipe()
    with Child(write, theirs, ring, *how) as child:
        assert handles.poll(30)
        reader = MessageQueue.create_from_handle(handles.recv(), 0)
        try:
            yield child, reader, ours
        finally:
            reader.shutdown()


@pytest.mark.parametrize("slow", ["writer", "device", "neither"])
def test_bytes_are_right_whoever_is_slow(stream, slow):
    with writing(0.003 if slow == "writer" else 0.0, 12, "") as (_, reader, ring):
        for number in range(12):
            if slow == "device":
                stream.delay(0.01)
            got = reader.dequeue_to("cpu", 30, stream=stream)
            if number == 0:
                assert set(pins(reader).values()) == {"pinned"}
            stream.synchronize()
            assert torch.equal(got, stamped(number))
            del got
        assert metric_of(reader, "device_copies_total", "streamed").value >= 6
        assert reader.dequeue(timeout=30) == "the end"
        ring.send("go")


@pytest.mark.parametrize("verb", ["dequeue", "dequeue_to"])
def test_a_writer_killed_half_way_has_sent_nothing_and_nobody_hangs(stream, verb):
    with writing(0.0, 3, "killed") as (child, reader, ring):
        for number in range(2):
            got = reader.dequeue_to("cpu", 30, stream=stream)
            stream.synchronize()
            assert torch.equal(got, stamped(number))
        assert ring.poll(30)
        child.kill()
        for _ in range(2):
            with pytest.raises(PeerDied, match="within a message"):
                reader.dequeue(timeout=20) if verb == "dequeue" else reader.dequeue_to("cpu", 20, stream=stream)


def test_a_writer_stopped_half_way_is_waited_for_and_goes_on(stream):
    with writing(0.0, 3, "stopped") as (child, reader, ring):
        for _ in range(2):
            reader.dequeue_to("cpu", 30, stream=stream)
        assert ring.poll(30)
        with pytest.raises(QueueTimeout):
            reader.dequeue_to("cpu", 0.1, stream=stream)
        with cpu_streams() as [other]:
            with pytest.raises(QueueTimeout):
                reader.dequeue_to("cpu", 0.1, stream=other)
            child.kill(signal.SIGCONT)
            got = reader.dequeue_to("cpu", 30, stream=stream)
        stream.synchronize()
        assert torch.equal(got, stamped(2))
        assert reader.dequeue(timeout=30) == "the end"
        ring.send("go")


def test_ctrl_c_in_the_middle_of_the_copy_skips_the_message_and_no_other(stream):
    with writing(0.0, 3, "interrupt") as (_, reader, ring):
        for number in range(2):
            got = reader.dequeue_to("cpu", 30, stream=stream)
            stream.synchronize()
            assert torch.equal(got, stamped(number))
        assert reader.dequeue_to("cpu", 30, stream=stream) == "the end"
        ring.send("go")


def follow_and_stand_still(handle: Any, ring: Any) -> None:
    stream = CpuStream()
    reader: Any = MessageQueue.create_from_handle(handle, 0)
    reader.dequeue_to("cpu", 30, stream=stream)
    assert set(pins(reader).values()) == {"pinned"}
    real = COPIES.copy_bytes

    def copy(*what: Any, **how: Any) -> None:
        real(*what, **how)
        ring.send("following")

    COPIES.copy_bytes = copy  # type: ignore[method-assign]
    ring.send("ready")
    reader.dequeue_to("cpu", 30, stream=stream)


def test_the_block_of_a_reader_killed_while_it_follows_comes_back(monkeypatch):
    from multiprocessing import Pipe

    ours, ring = Pipe()
    queue: Any = MessageQueue(1, config=QueueConfig(max_arena_bytes=4 * NBYTES, segment_bytes=4 * NBYTES))
    with queue, Child(follow_and_stand_still, queue.export_handle(), ring) as child:
        queue.enqueue(stamped(0), timeout=30)
        assert ours.recv() == "ready"
        paced = Paced(monkeypatch)
        sending = threading.Thread(target=lambda: queue.enqueue(stamped(1), timeout=30))
        sending.start()
        paced.let(1)
        assert ours.recv() == "following"
        child.kill()
        child.join()
        paced.let()
        sending.join()
        with pytest.raises(PeerDied):
            for text in range(1000):
                queue.enqueue(text, timeout=10)
                time.sleep(0.005)
        assert queue.statistics().arena_used_bytes == 0


# ── the pieces of a copy ─────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("nbytes", [1, 64 * KIB, 64 * KIB + 1, 128 * KIB, 200 * KIB + 5, NBYTES, 10 * NBYTES + 3])
def test_pieces_follow_each_other_and_none_is_a_scrap(nbytes):
    found = list(copying.pieces(nbytes, 64 * KIB))
    assert [begin for begin, _ in found] == [0, *[end for _, end in found[:-1]]]
    assert found[-1][1] == nbytes
    sizes = [end - begin for begin, end in found]
    assert max(sizes) <= 64 * KIB
    assert len(sizes) == 1 or min(sizes) >= 32 * KIB - 64


# ── a slice of the stress runs; the whole is `python -m tests.stress.streamed` ───────────────────
STRESS = "import sys; from tests.stress.streamed import main; sys.exit(main())"


def test_stamped_tensors_are_never_torn_given_up_ones_never_come_and_all_others_do():
    command = [sys.executable, "-c", STRESS, "--tensors", "300", "--seed", "3"]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    outcome = json.loads(finished.stdout)
    assert outcome["copies"]["streamed"] > 100
    assert outcome["sent"] < 300
