"""Pins and the DMA gate on real streams."""

import gc
import json
import os
import random
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import arena
from arena import MessageQueue, QueueConfig, layout
from arena.device import copies_in_use, open_copies
from arena.gate import Gate
from arena.tickets import all_reached
from tests.support.fleet import eventually
from tests.support.gpus import CUDA
from tests.support.processes import run
from tests.support.streams import metric_of, pins

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("run_dir"),
    pytest.mark.skipif(not CUDA.is_available(), reason="needs a GPU"),
]

MIB = 1 << 20
BLOCK = 4 * MIB
COUNT = BLOCK // 8
HELD_CYCLES = 2_000_000_000  # a second at 2 GHz


def hold(stream: Any) -> None:
    """Keep the stream busy for a second."""
    with CUDA.stream(stream):
        CUDA._sleep(HELD_CYCLES)


class Ends:
    """A queue, its reader, and a side stream."""

    def __init__(self, **settings: Any) -> None:
        CUDA.init()
        # Slots large enough that a tensor in fragments fits the ring: one thread sends and takes.
        config = {"max_arena_bytes": 2 * BLOCK, "segment_bytes": 2 * BLOCK, "slot_bytes": MIB // 4, **settings}
        self.queue = MessageQueue(1, config=QueueConfig(**config))
        self.reader = MessageQueue.create_from_handle(self.queue.export_handle(), 0)
        self.stream = CUDA.Stream()

    def send(self, number: int) -> None:
        self.queue.enqueue(torch.full((COUNT,), number, dtype=torch.int64), timeout=10)

    def take(self) -> Any:
        return self.reader.dequeue(timeout=10)

    def pin(self) -> None:
        self.send(-1)
        tensor = self.take()
        self.reader.to_device(tensor, "cuda")
        del tensor
        assert set(pins(self.reader).values()) == {"pinned"}
        assert eventually(lambda: not self.held() or None)

    def block(self, index: int) -> torch.Tensor:
        view = self.queue._pool.segments[0].segment.mapping.view(index * BLOCK, BLOCK)  # type: ignore[attr-defined]
        return torch.frombuffer(bytearray(view), dtype=torch.int64)

    def held(self) -> int:
        return self.queue.statistics().arena_used_bytes

    def close(self) -> None:
        self.reader.shutdown()
        self.queue.shutdown()


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    made.pin()
    yield made
    CUDA.synchronize()
    made.close()


def copied(ends: Ends, how: str, tensor: torch.Tensor) -> torch.Tensor:
    if how == "to_device":
        return ends.reader.to_device({"it": tensor}, "cuda", ends.stream)["it"]
    if how == "record_stream":
        arena.record_stream(tensor, ends.stream)
    with CUDA.stream(ends.stream):
        return tensor.to("cuda", non_blocking=True)


def dma_gate(ends: Ends, how: str) -> None:
    """Case 15: two blocks, the copy stream held, the references dropped, ten stamped tensors sent."""
    ends.pin()  # from memory that is not, a plain copy has read everything when it returns
    warm = torch.empty(COUNT, dtype=torch.int64, device="cuda")  # the allocator must not wait for the stream
    with CUDA.stream(ends.stream):
        spare = [torch.empty(COUNT, dtype=torch.int64, device="cuda") for _ in range(2)]
    del warm, spare
    CUDA.synchronize()
    hold(ends.stream)
    moved = []
    for number in (0, 1):
        ends.send(number)
        if how == "plain":
            with CUDA.stream(ends.stream):
                tensor = ends.take()
        else:
            tensor = ends.take()
        moved.append(copied(ends, how, tensor))
        del tensor
    still_held = not ends.stream.query()
    gc.collect()
    for number in range(2, 10):
        ends.send(number)
        assert int(ends.take()[0]) == number
    stamps = [int(ends.block(index)[0]) for index in (0, 1)]
    still_held = still_held and not ends.stream.query()
    ends.stream.synchronize()
    assert still_held, "the machine was too slow for this to say anything"
    assert all(bool((there.cpu() == number).all()) for number, there in enumerate(moved))
    assert stamps == [0, 1]


WAYS = ["to_device", "record_stream", "plain"]


@pytest.mark.parametrize("how", WAYS)
def test_no_byte_of_a_block_changes_before_its_copy_has_passed(ends, how):
    dma_gate(ends, how)
    assert eventually(lambda: not ends.held() or None)


@pytest.mark.parametrize("how", WAYS)
def test_without_the_gate_that_test_fails(ends, how, monkeypatch):
    monkeypatch.setattr(Gate, "is_empty", lambda self: True)
    with pytest.raises(AssertionError, match=r"\[0, 1\]|all\("):
        dma_gate(ends, how)


def test_the_mapping_is_pinned_for_torch_too_and_copied_asynchronously(ends):
    ends.send(1)
    tensor = ends.take()
    assert tensor.is_pinned()
    del tensor
    assert metric_of(ends.reader, "segment_pinned_bytes").value == 2 * BLOCK


# ── registration ─────────────────────────────────────────────────────────────────────────────────
def gpu_is_well() -> bool:
    made = torch.arange(1000, device="cuda")
    return int((made * 2).sum()) == 999_000  # each launch reports what an earlier call left behind


def test_memory_that_is_registered_already_is_a_reason_and_no_error_is_left(monkeypatch):
    from arena.device.cuda import pins as registrations

    register = registrations.register
    taken = []

    def beaten_to_it(address: int, nbytes: int, *, writable: bool) -> None:
        taken.append(address)
        register(address, nbytes, writable=writable)  # somebody else's
        register(address, nbytes, writable=writable)

    monkeypatch.setattr(registrations, "register", beaten_to_it)
    made = Ends()
    made.send(1)
    tensor = made.take()
    moved = made.reader.to_device(tensor, "cuda")
    assert pins(made.reader) == {1: "failed: already_registered"}
    assert gpu_is_well()
    assert bool((moved.cpu() == 1).all())
    for address in taken:
        registrations.unregister(address)
    del tensor
    made.close()


@pytest.mark.parametrize("what", ["nothing mapped", "read-only as writable"])
def test_a_registration_that_the_driver_refuses_leaves_the_next_call_alone(ends, what):
    from arena.device import PinRefused

    copies = open_copies("cuda")
    with pytest.raises(PinRefused) as refused:
        if what == "nothing mapped":
            copies.register(1 << 20, MIB, writable=True)
        else:
            with open("/proc/self/exe", "rb") as own:
                import mmap

                mapped = mmap.mmap(own.fileno(), 4096, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)
                copies.register(torch.frombuffer(mapped, dtype=torch.uint8).data_ptr(), 4096, writable=True)
    print(what, refused.value.reason, refused.value.text)
    assert gpu_is_well()


def test_a_copy_across_two_ranges_is_refused_so_segments_are_registered_in_one_piece():
    copies = open_copies("cuda")
    CUDA.current_stream().query()
    source = torch.arange(MIB // 4)
    aligned = -source.data_ptr() % 4096 // 8
    first = source[aligned:].data_ptr()
    copies.register(first, 4096, writable=True)
    copies.register(first + 4096, 4096, writable=True)
    with pytest.raises(RuntimeError, match="invalid argument"):
        source[aligned : aligned + 1024].to("cuda", non_blocking=True)
    copies.unregister(first)
    copies.unregister(first + 4096)
    assert gpu_is_well()


def test_the_range_is_unregistered_with_its_last_view():
    copies = open_copies("cuda")
    made = Ends()
    made.pin()
    made.send(1)
    tensor = made.take()
    address = made.reader._borrower._mappings[1].address
    made.close()
    assert tensor.is_pinned()
    del tensor, made
    gc.collect()

    def gone() -> bool:
        with open("/proc/self/maps") as maps:
            return not any(line.startswith(f"{address:x}-") for line in maps)

    assert eventually(lambda: gone() or None)
    assert copies.in_use()
    assert gpu_is_well()


# ── graphs ───────────────────────────────────────────────────────────────────────────────────────
def test_a_capture_survives_registrations_and_gates_around_it(ends):
    other = Ends()
    CUDA.synchronize()
    x = torch.ones(1000, device="cuda")
    graph = CUDA.CUDAGraph()
    side = CUDA.Stream()
    ends.send(1)
    hold(ends.stream)
    tensor = ends.take()
    moved = ends.reader.to_device(tensor, "cuda", ends.stream)
    with CUDA.graph(graph, stream=side):
        y = x * 2
        del tensor  # its gate is asked while we capture
        other.send(1)
        late = other.take()  # a segment that is seen for the first time
        other.reader._borrower.see_to_device()
        assert eventually(lambda: other.reader.statistics().pins.get(1) == "pinned" or None)
        with pytest.raises(arena.errors.InvalidArgument, match="part of a graph"):
            ends.reader.to_device(late, "cuda")
        assert eventually(lambda: not ends.held() or None)
        y = y + 1
    x.fill_(5)
    graph.replay()
    CUDA.synchronize()
    assert y.tolist() == [11] * 1000
    assert bool((moved.cpu() == 1).all())
    del late
    other.close()


# ── processes ────────────────────────────────────────────────────────────────────────────────────
def forked_after_cuda() -> tuple[bool, ...]:
    made = Ends()
    made.pin()
    made.send(1)
    tensor = made.take()
    hold(made.stream)
    moved = made.reader.to_device(tensor, "cuda", made.stream)
    child = os.fork()
    if not child:
        code = 0
        try:
            del tensor
            gc.collect()
            code = 0 if copies_in_use() is None else 1
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    kept = made.held() == BLOCK or made.stream.query()
    del tensor
    came = bool(eventually(lambda: not made.held() or None))
    right = bool((moved.cpu() == 1).all())
    made.send(2)
    again = made.reader.to_device(made.take(), "cuda")
    return status == 0, kept, came, right, bool((again.cpu() == 2).all())


def test_a_child_forked_after_cuda_uses_no_device_and_opens_no_gate():
    assert run(forked_after_cuda, timeout_s=60) == (True,) * 5


def cuda_only_later() -> tuple[dict[int, str], dict[int, str], bool]:
    with MessageQueue(1) as queue, MessageQueue.create_from_handle(queue.export_handle(), 0) as reader:
        queue.enqueue(torch.full((COUNT,), 4, dtype=torch.int64))
        tensor = reader.dequeue(timeout=10)
        before = reader.statistics().pins
        moved = reader.to_device(tensor, "cuda")
        del tensor
        after = pins(reader)
        return before, after, bool((moved.cpu() == 4).all())


def test_cuda_that_is_initialised_only_by_the_copy_is_noticed():
    assert run(cuda_only_later, timeout_s=60) == ({}, {1: "pinned"}, True)


# ── from the device ──────────────────────────────────────────────────────────────────────────────
def test_a_tensor_on_the_gpu_arrives_by_way_of_a_block(ends):
    with CUDA.stream(ends.stream):
        CUDA._sleep(20_000_000)
        there = torch.arange(COUNT, device="cuda") * 3  # queued on the current stream, not done
        ends.queue.enqueue(there)
    got = ends.take()
    assert got.device.type == "cpu"
    assert torch.equal(got, torch.arange(COUNT) * 3)
    assert eventually(lambda: ends.queue.statistics().pins.get(1) == "pinned" or None)
    assert ends.queue.statistics().fallbacks == {}
    del got


# ── stress ───────────────────────────────────────────────────────────────────────────────────────
def stamped_stress(tensors: int) -> int:
    """How many copies were not what was sent."""
    draw = random.Random(1).random
    made = Ends(max_arena_bytes=8 * BLOCK, segment_bytes=8 * BLOCK, slots=32)
    made.pin()
    streams = [CUDA.Stream() for _ in range(3)]
    pending: deque[tuple[int, torch.Tensor]] = deque()
    wrong = 0
    source = torch.empty(COUNT, dtype=torch.int64)
    for number in range(tensors):
        stream = streams[int(draw() * 3)]
        made.queue.enqueue(source.fill_(number), timeout=20)
        with CUDA.stream(stream):
            tensor = made.take()
            if draw() < 0.5:
                CUDA._sleep(int(draw() * 4_000_000))
            plain = draw() < 0.5
            there = tensor.to("cuda", non_blocking=True) if plain else made.reader.to_device(tensor, "cuda")
            right = (there == number).all()
        del tensor, there
        pending.append((number, right))
        if len(pending) > 16:
            wrong += not bool(pending.popleft()[1].item())
    wrong += sum([not bool(right.item()) for _, right in pending])
    CUDA.synchronize()
    assert eventually(lambda: not made.held() or None)
    made.close()
    return wrong


@pytest.mark.parametrize("tickets", [True, False])
def test_stamped_tensors_through_eight_blocks_are_never_torn(monkeypatch, tickets):
    if not tickets:
        monkeypatch.setattr("arena.device.cuda.copies._can_write_words", lambda index: False)
    assert stamped_stress(1500) == 0


def test_without_the_gate_they_are(monkeypatch):
    monkeypatch.setattr(Gate, "is_empty", lambda self: True)
    assert stamped_stress(600) > 0


# ── timing ───────────────────────────────────────────────────────────────────────────────────────
def best_ms(work: Any, times: int = 15) -> float:
    took = []
    for _ in range(times):
        CUDA.synchronize()
        began = time.perf_counter()
        work()
        CUDA.synchronize()
        took.append((time.perf_counter() - began) * 1e3)
    return round(sorted(took)[len(took) // 2], 3)


def release_latencies_us(made: Ends, times: int = 200) -> list[float]:
    """From the end of the copy, as its event tells it, to when a writer finds the hold back, in an idle reader."""
    found = []
    home = made.reader._borrower._home
    tickets = home.tickets

    def is_back(hold: int, generation: int) -> bool:
        word = home.returned[hold]
        names = word >> layout.RETURNED_NAMES_SHIFT
        same = word & layout.RETURNED_GENERATION == generation
        return same and (not names or all_reached(tickets.named, tickets._words, hold, names))

    for number in range(times):
        made.send(number)
        tensor = made.take()
        lease = arena.borrow.leases_of(tensor)[0]
        hold_number, generation = lease.words[3], lease.words[4]
        with CUDA.stream(made.stream):
            CUDA._sleep(2_000_000)
        there = made.reader.to_device(tensor, "cuda", made.stream)
        event = CUDA.Event()
        event.record(made.stream)
        del tensor, lease
        event.synchronize()
        ended = time.perf_counter_ns()
        while not is_back(hold_number, generation):
            os.sched_yield()
        found.append((time.perf_counter_ns() - ended) / 1e3)
        del there
    return sorted(found)


def test_timing(capsys):
    """No speed is asserted: the figures go to $OUT and the terminal."""
    nbytes = 200_000_000
    size = 208 * MIB
    made = Ends(max_arena_bytes=size, segment_bytes=size)
    with made.queue.lend((nbytes,), torch.uint8) as lent:
        lent.fill_(3)
        made.queue.enqueue(lent)
        del lent
    tensor = made.take()
    first_began = time.perf_counter()
    made.reader.to_device(tensor, "cuda")
    CUDA.synchronize()
    first_ms = (time.perf_counter() - first_began) * 1e3
    pins(made.reader)
    pinned, pageable = torch.empty(nbytes, dtype=torch.uint8).pin_memory(), torch.ones(nbytes, dtype=torch.uint8)
    target = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    seconds = metric_of(made.reader, "pin_seconds_total").value / 1e9
    figures = {
        "device": CUDA.get_device_name(),
        "bytes": nbytes,
        "first_to_device_unpinned_ms": round(first_ms, 2),
        "pin_208_MiB_ms": round(seconds * 1e3, 2),
        "bare_pinned_ms": best_ms(lambda: target.copy_(pinned, non_blocking=True)),
        "to_device_pinned_ms": best_ms(lambda: made.reader.to_device(tensor, "cuda")),
        "bare_pageable_ms": best_ms(lambda: target.copy_(pageable)),
        "bare_pinned_again_ms": best_ms(lambda: target.copy_(pinned, non_blocking=True)),
    }
    made.close()
    small = Ends()
    small.pin()
    for way in ("ticket", "helper"):
        if way == "helper":
            small.reader._borrower._home.tickets = None
        latencies = release_latencies_us(small)
        figures[f"release_after_copy_us_by_{way}"] = {
            p: round(latencies[int(len(latencies) * p / 100)], 1) for p in (10, 50, 90, 99)
        }
    small.close()
    with capsys.disabled():
        print(json.dumps(figures))
    if "OUT" in os.environ:
        with open(os.path.join(os.environ["OUT"], "to_device.json"), "w") as out:
            json.dump(figures, out)
