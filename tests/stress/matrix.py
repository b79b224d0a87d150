"""The crash matrix: a process killed at each named point of each verb (`points.py`), and what the others make of it.

    python -m tests.stress.matrix

After each: survivors are right or told, nothing is left (descriptors, mappings, blocks, the run directory, processes),
and the next queue starts.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from arena import MessageQueue, QueueConfig, codec, copying, filling
from arena.device.cpu.copies import CpuStream
from arena.errors import ArenaError, NoReader, PeerDied, QueueClosed, QueueTimeout
from arena.probe import collect_garbage
from tests.stress.points import POINTS, arm
from tests.stress.signals import forget, is_right, left_behind, message
from tests.support.fleet import Fleet, Here, Worker, WorkerDied, attach, create, eventually, process_state, shut_down

CONFIG = {"name": "matrix", "slots": 8, "slot_bytes": 4096, "segment_bytes": 1 << 17, "max_arena_bytes": 1 << 17}
MESSAGES = 40
CASES = [(role, point) for role, points in POINTS.items() for point in points]


# ── what the processes do ────────────────────────────────────────────────────────────────────────
def prepare(here: Here, point: str, *, device: bool = False) -> None:
    """Be killed at a point; with a device in use, for those that have to do with one."""
    if device:
        here.stream = CpuStream()
    arm(point)


def stream_small(here: Here) -> None:
    """72 kB are streamed, in pieces of 16; what is taken is followed to a device."""
    filling.STREAMED_BYTES = 1 << 16  # type: ignore[misc]
    copying.PIECE_BYTES = 1 << 14  # type: ignore[misc]
    codec._PARALLEL_COPY_BYTES = 0  # type: ignore[misc]
    copying.is_better = lambda threads: True
    here.stream = here.follows = CpuStream()


def attach_armed(here: Here, handle: Any, rank: int, point: str, *, device: bool) -> None:
    """Attach, and be killed on the way or later."""
    prepare(here, point, device=device)
    attach(here, handle, rank)


def write(here: Here, count: int) -> list[tuple[Any, ...]]:
    """Send messages of each kind; of whom it was told."""
    told: list[tuple[Any, ...]] = []
    number = getattr(here, "number", 0)
    ends = number + count
    while number < ends:
        try:
            if number % 5 == 2 and not hasattr(here, "follows"):
                with here.queue.lend((9_000,), torch.int64, or_private=True) as lent:
                    lent.fill_(number % 251)
                    here.queue.enqueue([number, lent], timeout=20)
                del lent
            else:
                here.queue.enqueue(message(number), timeout=20)
            number += 1
        except PeerDied as error:
            told.append((error.rank, error.signal))
        except NoReader:
            break
    here.number = number
    return told


def write_and_close(here: Here) -> None:
    """All a writer ever does."""
    write(here, MESSAGES)
    here.queue.shutdown()


def take(here: Here, timeout: float) -> Any:
    """The next message, on the device by the time this returns if this end follows."""
    if not hasattr(here, "follows"):
        return here.queue.dequeue(timeout=timeout)
    obj = here.queue.dequeue_to("cpu", timeout, stream=here.follows)
    here.follows.synchronize()
    return obj


def read(here: Here, until: int | None = None) -> tuple[str, list[int]]:
    """Take messages up to one, or to the end; why it ended, and their numbers."""
    taken: list[int] = []
    while until is None or until not in taken[-1:]:
        try:
            obj = take(here, 20)
        except (PeerDied, QueueClosed, QueueTimeout) as error:
            return type(error).__name__, taken
        assert is_right(obj), f"message {obj[0]} is not as it was sent"
        taken.append(obj[0])
        del obj
    return "", taken


def read_and_leave(here: Here) -> None:
    """All a reader ever does."""
    while True:
        try:
            here.kept = take(here, 2.0)  # the one before dies
        except ArenaError:
            here.queue.shutdown()
            return


def blocks_in_use(here: Here) -> tuple[int, int]:
    """Bytes and holds that are out, once the writer has looked."""
    gc.collect()
    told = here.queue.statistics()
    return told.arena_used_bytes, told.holds_used


# ── cases ────────────────────────────────────────────────────────────────────────────────────────
def case(fleet: Fleet, run_dir: Path, role: str, point: str) -> float:
    """One process killed at one point: seconds until the last survivor was right or told. Raises AssertionError."""
    began = time.monotonic()
    target = POINTS[role][point]
    if role == "writer":
        _kill_writer(fleet, point, target)
    else:
        _kill_reader(fleet, point, target)
    took = time.monotonic() - began
    collect_garbage(run_dir)
    assert os.listdir(run_dir) == [], "left in the run directory"
    with (
        MessageQueue(1, config=QueueConfig(name="matrix")) as queue,
        MessageQueue.create_from_handle(queue.export_handle(), 0, timeout=20) as reader,
    ):
        queue.enqueue("the next one")
        assert reader.dequeue(timeout=20) == "the next one"
    return took


def _kill_writer(fleet: Fleet, point: str, target: str) -> None:
    writer, *readers = workers = [fleet.start() for _ in range(3)]
    handle = writer.call(create, 2, **_settings(point, workers))
    if point.startswith("attach: before a joiner"):
        gone = fleet.start()
        gone.call(attach, handle, 1)
        gone.kill()
        readers[0].call(attach, handle, 0)
        # So that the writer has noticed, and admits whoever comes now.
        assert writer.call(write, 1) == [(1, signal.SIGKILL)]
        assert readers[0].call(read, 0) == ("", [0])
        writer.call(prepare, target)
        readers[1].call(attach, handle, 1)
    elif point.startswith("attach"):
        writer.call(prepare, target)
        for rank, reader in enumerate(readers):
            with contextlib.suppress(PeerDied, QueueClosed):
                reader.call(attach, handle, rank)
    else:
        for rank, reader in enumerate(readers):
            reader.call(attach, handle, rank)
        writer.call(prepare, target)
    attached = [reader for reader in readers if reader.call(is_attached)]
    reading = [reader.begin(read) for reader in attached]
    with contextlib.suppress(WorkerDied, OSError):
        writer.begin(write_and_close).result()
        raise AssertionError(f"the writer never came to {point}")
    assert process_state(writer.pid) in "XZ"
    for call in reading:
        how, taken = call.result()
        assert how in ("PeerDied", "QueueClosed"), f"a reader was told {how!r}"
        assert taken == list(range(taken[0], taken[0] + len(taken))) if taken else True
    for reader in attached:
        reader.call(forget)
        _is_clean(reader)


def _settings(point: str, workers: list[Worker]) -> dict[str, Any]:
    """Of the queue; where messages are to be streamed, there is room to, and everybody is told."""
    if not point.startswith("stream"):
        return CONFIG
    for worker in workers:
        worker.call(stream_small)
    return CONFIG | {"segment_bytes": 1 << 20, "max_arena_bytes": 1 << 20}


def is_attached(here: Here) -> bool:
    """Whether it has an end of a queue."""
    return here.queue is not None


def _kill_reader(fleet: Fleet, point: str, target: str) -> None:
    writer, victim, survivor = workers = [fleet.start() for _ in range(3)]
    handle = writer.call(create, 2, **_settings(point, workers))
    survivor.call(attach, handle, 1)
    device = point.startswith("pin")
    came = _attach_victim(victim, handle, point, target, device=device)
    writing = writer.begin(write, MESSAGES)
    reading = survivor.begin(read, MESSAGES - 1)
    if came:
        with contextlib.suppress(WorkerDied, OSError):
            victim.begin(read_and_leave).result()
            raise AssertionError(f"the reader never came to {point}")
    successor = fleet.start()
    eventually(lambda: _takes_the_rank(successor, handle))
    joined = successor.begin(read)
    told = writing.result() + writer.call(write, 1)
    how, taken = reading.result()
    assert (how, taken) == ("", list(range(MESSAGES)))
    assert set(told) <= {(0, signal.SIGKILL)}, told
    assert len(told) <= 1, told
    if not point.startswith(("attach", "shutdown")):
        assert told, "the writer was told nothing"
    assert survivor.call(read, MESSAGES) == ("", [MESSAGES])
    eventually(lambda: writer.call(blocks_in_use) == (0, 0))
    for worker in (writer, survivor):
        worker.call(shut_down)
    how, taken = joined.result()
    assert how == "QueueClosed"
    assert taken[-1:] == [MESSAGES], "the successor missed the last message"
    for worker in (writer, survivor, successor):
        worker.call(forget)
        _is_clean(worker)


def _is_clean(worker: Worker) -> None:
    """Nothing of the queue is left in it, once copies that were under way have ended and segments are unpinned."""
    eventually(lambda: worker.call(left_behind) == (0, 0))


def _attach_victim(victim: Worker, handle: Any, point: str, target: str, *, device: bool) -> bool:
    """Whether it lived through that."""
    try:
        victim.call(attach_armed, handle, 0, target, device=device)
    except WorkerDied:
        assert point.startswith("attach"), point
        return False
    return True


def _takes_the_rank(worker: Worker, handle: Any) -> bool:
    try:
        worker.call(attach, handle, 0)
    except ArenaError:  # the death has not been noticed yet
        return False
    return True


@contextlib.contextmanager
def _own_run_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="arena-matrix-", dir="/dev/shm") as place:
        os.environ["ARENA_RUN_DIR"] = place
        try:
            yield Path(place)
        finally:
            os.environ.pop("ARENA_RUN_DIR")


def main() -> int:
    """The command."""
    bad = 0
    with _own_run_dir() as run_dir:
        for role, point in CASES:
            fault, took = "", 0.0
            try:
                with Fleet() as fleet:
                    took = case(fleet, run_dir, role, point)
            except Exception as error:
                fault = f"{type(error).__name__}: {error}"
                bad += 1
            print(json.dumps({"killed": role, "at": point, "seconds": round(took, 2), "fault": fault}), flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
