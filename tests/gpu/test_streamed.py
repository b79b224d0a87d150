"""A GPU follows a tensor that is still being written, and two ranks share one out."""

import itertools
import json
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

from arena import MessageQueue, QueueConfig
from arena.codec import TensorSource
from arena.errors import PeerDied, QueueTimeout
from tests.support.fleet import eventually
from tests.support.gpus import CUDA, Rank, need_gpus, on_gpus
from tests.support.processes import Child
from tests.support.streams import metric_of, pins

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("run_dir"),
    pytest.mark.skipif(not CUDA.is_available(), reason="needs a GPU"),
]

MIB = 1 << 20
NBYTES = 48 * MIB
ROOM: dict[str, Any] = {"max_arena_bytes": 4 * NBYTES, "segment_bytes": 4 * NBYTES}


def stamped(number: int) -> torch.Tensor:
    return (torch.arange(NBYTES // 8) * 1000 + number).view(torch.int64)


def is_stamped(tensor: torch.Tensor, number: int) -> bool:
    return bool((tensor == torch.arange(NBYTES // 8, device=tensor.device) * 1000 + number).all())


def ready(reader: Any) -> None:
    assert "pinned" in pins(reader).values()
    CUDA.synchronize()


# ── one GPU ──────────────────────────────────────────────────────────────────────────────────────
def follow(handle: Any, messages: int, hold_cycles: int) -> tuple[list[bool], dict[str, int], int]:
    """A reader in a process of its own. Which messages were right, by which modes they came, holds on tickets."""
    CUDA.init()
    reader: Any = MessageQueue.create_from_handle(handle, 0)
    with reader:
        first = reader.dequeue_to("cuda", 30)
        right = [is_stamped(first, 0)]
        ready(reader)
        stream = CUDA.Stream()
        for number in range(1, messages):
            if hold_cycles and number % 2:
                with CUDA.stream(stream):
                    CUDA._sleep(hold_cycles)
            got = reader.dequeue_to("cuda", 30, stream=stream)
            with CUDA.stream(stream):
                right.append(is_stamped(got, number))
        CUDA.synchronize()
        modes = ("streamed", "pinned_async", "pageable_sync")
        counts = {mode: metric_of(reader, "device_copies_total", mode).value for mode in modes}
        tickets = metric_of(reader, "gate_releases_total", "ticket").value
        reader.dequeue(timeout=30)
        return right, counts, tickets


@pytest.mark.parametrize("slow", ["writer", "device", "neither"])
def test_the_bytes_are_right_whoever_is_slow(monkeypatch, slow):
    real = TensorSource.write_in_order

    def paced(source: TensorSource, target: memoryview, reached: Callable[[int], None]) -> None:
        def slowly(end: int) -> None:
            time.sleep(0.002 if slow == "writer" else 0)
            reached(end)

        real(source, target, slowly)

    monkeypatch.setattr(TensorSource, "write_in_order", paced)
    queue = MessageQueue(1, config=QueueConfig(**ROOM))
    with queue, Child(follow, queue.export_handle(), 8, 20_000_000 if slow == "device" else 0) as child:
        for number in range(8):
            queue.enqueue(stamped(number), timeout=60)
            time.sleep(0.3 if not number else 0.02)  # the first one has the segment pinned
        assert eventually(lambda: not queue.statistics().arena_used_bytes or None)
        queue.enqueue("the end")
        right, counts, _ = child.result(60)
    assert all(right)
    assert counts["streamed"] >= 5


def test_what_is_given_up_half_way_is_skipped_and_its_block_comes_back(monkeypatch):
    CUDA.init()
    queue = MessageQueue(1, config=QueueConfig(**ROOM))
    reader: Any = MessageQueue.create_from_handle(queue.export_handle(), 0)
    with queue, reader:
        queue.enqueue(stamped(0))
        reader.dequeue_to("cuda", 30)
        ready(reader)
        real = TensorSource.write_in_order

        def fails(source: TensorSource, target: memoryview, reached: Callable[[int], None]) -> None:
            number = itertools.count()

            def fail(end: int) -> None:
                time.sleep(0.01)
                if next(number) == 2:
                    raise RuntimeError("the source can't be read")
                reached(end)

            real(source, target, fail)

        with ThreadPoolExecutor(1) as pool, monkeypatch.context() as patch:
            patch.setattr(TensorSource, "write_in_order", fails)
            taking = pool.submit(reader.dequeue_to, "cuda", 30)
            with pytest.raises(RuntimeError, match="can't be read"):
                queue.enqueue(stamped(1))
            patch.undo()
            queue.enqueue(stamped(2))
            taken = taking.result()
        CUDA.synchronize()
        assert is_stamped(taken, 2)
        del taken, taking
        assert eventually(lambda: not queue.statistics().arena_used_bytes or None)


def write_and_stand_still(sender: Any) -> None:
    """A writer that never gets beyond its second piece, from the second message on."""
    queue = MessageQueue(1, config=QueueConfig(**ROOM))
    sender.send(queue.export_handle())
    queue.enqueue(stamped(0), timeout=30)
    time.sleep(1.0)
    real = TensorSource.write_in_order

    def stuck(source: TensorSource, target: memoryview, reached: Callable[[int], None]) -> None:
        number = itertools.count()

        def stick(end: int) -> None:
            time.sleep(600 if next(number) == 2 else 0)
            reached(end)

        real(source, target, stick)

    TensorSource.write_in_order = stuck  # type: ignore[method-assign]
    queue.enqueue(stamped(1), timeout=30)


def test_a_writer_that_dies_half_way_has_sent_nothing():
    from multiprocessing import Pipe

    CUDA.init()
    ours, theirs = Pipe()
    with Child(write_and_stand_still, theirs) as child:
        reader: Any = MessageQueue.create_from_handle(ours.recv(), 0)
        with reader:
            assert is_stamped(reader.dequeue_to("cuda", 30), 0)
            ready(reader)
            with pytest.raises(QueueTimeout):
                reader.dequeue_to("cuda", 3)
            child.kill()
            with pytest.raises(PeerDied, match="within a message"):
                reader.dequeue_to("cuda", 30)
            assert int((torch.arange(1000, device="cuda") * 2).sum()) == 999_000


# ── two ranks ────────────────────────────────────────────────────────────────────────────────────
def share(rank: Rank, handle: Any, messages: int, over: str) -> tuple[list[bool], dict[str, int]]:
    import torch.distributed as dist

    group = rank.gloo if over == "gloo" else dist.group.WORLD
    reader: Any = MessageQueue.create_from_handle(handle, rank.rank)
    right = []
    with reader:
        for number in range(messages):
            got = reader.dequeue_to(rank.device, 60, shard=group)
            right.append(is_stamped(got["it"], number) and int(got["odd"].sum()) == (NBYTES + 77) * (number + 1))
            ready(reader)
            del got
        modes = ("streamed", "pinned_async", "pageable_sync")
        counts = {mode: metric_of(reader, "device_copies_total", mode).value for mode in modes}
        reader.dequeue(timeout=60)
        rank.meet()
        return right, counts


@pytest.mark.parametrize("gpus", [(0, 0), (0, 1)], ids=["one_gpu", "two_gpus"])
@pytest.mark.parametrize("how", ["streamed", "lent"])
def test_two_ranks_share_a_message_out(tmp_path, gpus, how):
    need_gpus(gpus)
    queue: Any = MessageQueue(2, config=QueueConfig(**{name: 4 * nbytes for name, nbytes in ROOM.items()}))
    messages = 5

    def send() -> None:
        queue.wait_until_ready(60)
        for number in range(messages):
            odd = torch.full((NBYTES + 77,), number + 1, dtype=torch.uint8)
            if how == "lent":
                with queue.lend((NBYTES // 8,), torch.int64) as lent:
                    lent.copy_(stamped(number))
                    queue.enqueue({"it": lent, "odd": odd}, timeout=60)
                    del lent
            else:
                queue.enqueue({"it": stamped(number), "odd": odd}, timeout=60)
            time.sleep(0.2)
        queue.enqueue("the end", timeout=60)

    sending = threading.Thread(target=send, daemon=True)
    with queue:
        sending.start()
        over = "gloo" if gpus == (0, 0) else "nccl"
        found = on_gpus(partial(share), tmp_path / "store", queue.export_handle(), messages, over, gpus=gpus)
        sending.join(60)
    assert all(all(right) for right, _ in found)
    assert all(counts["streamed"] >= 2 for _, counts in found)


# ── figures ──────────────────────────────────────────────────────────────────────────────────────
def test_piece_sizes(capsys):
    """No speed is asserted: the figures are for choosing `arena.copying`'s pieces, and go to $OUT and the terminal."""
    from tests.gpu.streamed_report import piece_table

    with Child(partial(piece_table, rounds=1, repeats=3)) as child:  # which forks, and must not have used CUDA
        rows = child.result(120)
    with capsys.disabled():
        for row in rows:
            print(json.dumps(row))
    if "OUT" in os.environ:
        with open(os.path.join(os.environ["OUT"], "pieces.json"), "w") as out:
            json.dump(rows, out)
