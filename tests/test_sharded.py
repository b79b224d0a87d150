"""Each rank copies a part of a large tensor and gets the rest from the others; all take the same way, whatever is wrong
at one of them."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from arena import MessageQueue, QueueConfig
from arena.errors import InvalidArgument, PinFailed
from arena.shard import Shard
from tests.support.fleet import Here, Worker, eventually
from tests.support.ranks import group, make, together

KIB = 1 << 10
NBYTES = 512 * KIB
PLACE = {"max_arena_bytes": 16 * NBYTES, "segment_bytes": 4 * NBYTES}

pytestmark = pytest.mark.usefixtures("run_dir")


def message(number: int) -> dict[str, Any]:
    """One that is shared out, one whose bytes don't go into parts, a small one, and one that is not contiguous."""
    return {
        "large": torch.arange(NBYTES // 8) * 10 + number,
        "odd": (torch.arange(NBYTES + 77) % 251 + number).to(torch.uint8),
        "small": torch.arange(100) + number,
        "strided": (torch.arange(NBYTES // 4) + number).view(128, -1).T,
        "text": str(number),
    }


def attach(here: Here, rank: int, handle: Any) -> None:
    """Become a reader that has a device."""
    from arena import codec, copying, filling, shard
    from arena.device.cpu.copies import CpuStream

    shard.SHARDED_BYTES = filling.STREAMED_BYTES = NBYTES  # type: ignore[misc]
    copying.PIECE_BYTES = 64 * KIB  # type: ignore[misc]
    codec._PARALLEL_COPY_BYTES = 0  # type: ignore[misc]
    here.stream = CpuStream()
    here.reader = MessageQueue.create_from_handle(handle, rank)


def shared(rank: int, here: Here, with_what: str) -> Any:
    import torch.distributed as dist

    return here.comm if with_what == "arena" else dist.group.WORLD


def take(here: Here, rank: int, number: int, verb: str, with_what: str, unpinned: int | None = None) -> tuple[Any, ...]:
    """One message to the device; whether it is right, and the modes of its copies so far."""
    from arena.device.cpu.copies import COPIES
    from tests.support.streams import metric_of

    if rank == unpinned:
        COPIES.faults.extend(["memlock_limit"] * 2)  # of the segment, and of the tickets
    copied: list[int] = []
    real = COPIES.copy_bytes

    def copy(source: torch.Tensor, *rest: Any, **how: Any) -> None:
        copied.append(source.nbytes)
        real(source, *rest, **how)

    COPIES.copy_bytes = copy  # type: ignore[method-assign]
    shard = shared(rank, here, with_what)
    try:
        if verb == "dequeue_to":
            got = here.reader.dequeue_to("cpu", 30, stream=here.stream, shard=shard)
        else:
            got = here.reader.to_device(here.reader.dequeue(timeout=30), "cpu", here.stream, shard=shard)
    finally:
        COPIES.copy_bytes = real  # type: ignore[method-assign]
    here.stream.synchronize()
    sent = message(number)
    right = got["text"] == sent["text"] and all(torch.equal(got[key], sent[key]) for key in sent if key != "text")
    modes = ("streamed", "pinned_async", "pageable_sync")
    counts = {mode: metric_of(here.reader, "device_copies_total", mode).value for mode in modes}
    return right, counts, sum(copied)


def pinned(here: Here, rank: int) -> dict[int, str]:
    from tests.support.streams import pins

    return pins(here.reader)


def bring(here: Here, rank: int) -> str:
    """Move one message, of which rank 1 can't pin its memory, which it is required to; then one more."""
    outcome = ""
    try:
        take(here, rank, 0, "to_device", "arena", unpinned=1)
    except PinFailed:
        outcome = "refused"
    right, _, _ = take(here, rank, 1, "to_device", "arena") if rank == 0 else (True, 0, 0)
    if rank == 1:
        try:
            take(here, rank, 1, "to_device", "arena")
        except PinFailed:
            outcome += ", again"
    return f"{outcome}{right}"


class Setting:
    def __init__(self, workers: list[Worker], **settings: Any) -> None:
        self.workers = workers
        self.queue: Any = MessageQueue(2, config=QueueConfig(**{**PLACE, **settings}))
        together(workers, attach, self.queue.export_handle())

    def send(self, number: int) -> None:
        self.queue.enqueue(message(number), timeout=30)

    def take(self, number: int, *how: Any) -> list[tuple[Any, ...]]:
        """The first message is there before any reader has said that it moves what comes, so it is not streamed."""
        if number == 0:
            self.send(number)
        calls = [worker.begin(take, rank, number, *how) for rank, worker in enumerate(self.workers)]
        if number:
            self.send(number)
        return [call.result(60) for call in calls]


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Worker]]:
    store: Path = tmp_path_factory.mktemp("store") / "file"
    with group(2, store) as made:
        together(made, make)
        yield made


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arena.filling.STREAMED_BYTES", NBYTES)
    monkeypatch.setattr("arena.copying.PIECE_BYTES", 64 * KIB)
    monkeypatch.setattr("arena.codec._PARALLEL_COPY_BYTES", 0)


@pytest.mark.parametrize("with_what", ["arena", "torch"])
@pytest.mark.parametrize("verb", ["dequeue_to", "to_device"])
def test_each_rank_copies_a_part_and_all_have_the_whole(workers, verb, with_what):
    setting = Setting(workers)
    with setting.queue:
        for number in range(3):
            found = setting.take(number, verb, with_what)
            assert all(right for right, _, _ in found)
            if number == 0:
                assert all("pinned" in states.values() for states in together(workers, pinned))
            assert sum(nbytes for _, _, nbytes in found) == 2 * NBYTES + 77, "each byte of the two is copied once"
            assert all(nbytes < 1.1 * NBYTES for _, _, nbytes in found)
        for _, counts, _ in found:
            assert counts["streamed"] == (4 if verb == "dequeue_to" else 0)
        assert eventually(lambda: not setting.queue.statistics().arena_used_bytes or None)


def test_a_rank_whose_memory_is_not_pinned_takes_part(workers):
    setting = Setting(workers)
    with setting.queue:
        for number in range(2):
            unpinned = 1 if number == 0 else None
            found = setting.take(number, "dequeue_to", "torch", unpinned)
            assert all(right for right, _, _ in found)
        assert [counts["streamed"] for _, counts, _ in found] == [2, 0]


def test_a_rank_that_is_required_to_pin_and_can_not_fails_alone(workers):
    setting = Setting(workers, pin="required")
    with setting.queue:
        calls = [worker.begin(bring, rank) for rank, worker in enumerate(workers)]
        for number in range(2):
            setting.send(number)
        assert [call.result(60) for call in calls] == ["True", "refused, againTrue"]


def test_parts_are_equal_and_together_all_there_is():
    for nbytes in (1, 255, 256, 257, NBYTES, NBYTES + 77, 16 << 20):
        for world in (1, 2, 3, 8):
            parts = []
            for rank in range(world):
                shard = Shard.__new__(Shard)
                shard.rank, shard.world = rank, world
                parts.append(shard.part(nbytes))
            assert len({part.length for part in parts}) == 1
            assert parts[0].begin == 0
            assert all(one.end == next_one.begin for one, next_one in itertools.pairwise(parts))
            assert parts[-1].end == nbytes
            assert all(part.begin == min(rank * part.length, nbytes) for rank, part in enumerate(parts))


def test_what_is_no_group_is_refused():
    with pytest.raises(InvalidArgument, match="can't be shared out over that"):
        Shard("everybody", torch.device("cpu"))
