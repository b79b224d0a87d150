"""Two readers of one queue, a device each: how long until the slower one has the tensor, alone and shared out.

As in `device_moves`, one process writes and forks the readers, all know the plan, and every tensor has a stamp of its
own, which is looked at. A bare copy is made by both readers at once, as theirs would be.
"""

from __future__ import annotations

import tempfile
import time
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from arena import MessageQueue, QueueConfig
from telemetry.commands.bench.children import BlockFailed, fork_reader, reap
from telemetry.commands.bench.device_moves import BARE, HOST, Plan, Rig, settle, write
from telemetry.commands.bench.harness import Block, summarise

if TYPE_CHECKING:
    import torch

TWO_STREAMED, STREAMED_SHARDED = "streamed, each all of it", "streamed and sharded"
TWO_LENT, LENT_SHARDED = "lent, each all of it", "lent and sharded"
SHARED: Final = (BARE, HOST, TWO_STREAMED, STREAMED_SHARDED, TWO_LENT, LENT_SHARDED)

_READERS: Final = 2
_HUGE_PAGE_BYTES: Final = 2 << 20
_PATIENCE_S: Final = 60.0
_clock = time.monotonic_ns


def devices(kind: str) -> int:
    """How many devices readers could have. In a process of its own."""
    if kind == "cpu":
        return _READERS
    from arena.device.cuda.streams import cuda

    return int(cuda.device_count())


def measure_shared(plan: Plan) -> dict[str, list[Block]]:
    """The blocks of each contender, a round each; the slower reader counts. In a process of its own."""
    pipes = [Pipe() for _ in range(_READERS)]
    with tempfile.TemporaryDirectory(prefix="arena-bench-") as place:
        store = Path(place) / "store"
        pids = [fork_reader(partial(_read, plan, rank, theirs, store)) for rank, (_, theirs) in enumerate(pipes)]
        segment = -(-plan.nbytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        config = QueueConfig(name="bench-shared", segment_bytes=2 * segment, max_arena_bytes=2 * segment)
        queue: Any = MessageQueue(_READERS, config=config)
        with queue:
            readers = [ours for ours, _ in pipes]
            for reader in readers:
                reader.send(queue.export_handle())
            times: dict[tuple[str, int], list[int]] = {}
            writer = _Writer(plan, queue, readers)
            for stamp, (number, name) in enumerate(plan.turns()):
                times.setdefault((name, number), []).append(writer.take_turn(name, stamp % 251))
            reap(pids)
    return {name: [summarise(times[name, number]) for number in range(plan.rounds)] for name in plan.contenders}


class _Writer:
    def __init__(self, plan: Plan, queue: Any, readers: list[Connection]) -> None:
        import torch

        self._nbytes, self._queue, self._readers = plan.nbytes, queue, readers
        self._source = torch.zeros(plan.nbytes, dtype=torch.uint8)
        self._target = torch.zeros_like(self._source)
        queue.enqueue(self._source)  # the readers have it pinned
        self._answer()

    def take_turn(self, name: str, stamp: int) -> int:
        """One sample, in ns."""
        import torch

        if name == HOST:
            began = _clock()
            self._target.copy_(self._source)
            return _clock() - began
        if name == BARE:
            return self._answer()
        if name in (TWO_LENT, LENT_SHARDED):
            with self._queue.lend((self._nbytes,), torch.uint8) as tensor:
                write(tensor, stamp)
                began = _clock()
                self._queue.enqueue(tensor)
            del tensor
            return self._answer() - began
        write(self._source, stamp)
        began = _clock()
        self._queue.enqueue(self._source)
        return self._answer() - began

    def _answer(self) -> int:
        answers: list[int] = []
        for reader in self._readers:
            if not reader.poll(_PATIENCE_S):
                raise BlockFailed("a reader does not answer")
            answers.append(reader.recv())
        time.sleep(0.001)  # by then they wait for the next one
        return max(answers)


def _read(plan: Plan, rank: int, commands: Connection, store: Path) -> None:
    """A reader's process."""
    import torch.distributed as dist

    rig = Rig(plan.kind, rank)
    backend = "nccl" if plan.kind == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=_READERS)
    reader: Any = MessageQueue.create_from_handle(commands.recv(), rank)
    with reader:
        first = reader.dequeue_to(rig.device, _PATIENCE_S, stream=rig.stream)
        bare = rig.pinned(first.cpu())
        rig.wait()
        settle(reader)
        del first
        commands.send(0)
        for stamp, (_, name) in enumerate(plan.turns()):
            if name == HOST:
                continue
            if name == BARE:
                began = _clock()
                rig.move(bare, pinned=True)
                commands.send(_clock() - began)
                continue
            commands.send(_taken(reader, rig, name, stamp % 251))
    dist.destroy_process_group()


def _taken(reader: Any, rig: Rig, name: str, stamp: int) -> int:
    """When the tensor was there."""
    import torch.distributed as dist

    shard = dist.group.WORLD if name in (STREAMED_SHARDED, LENT_SHARDED) else None
    moved: torch.Tensor = reader.dequeue_to(rig.device, _PATIENCE_S, stream=rig.stream, shard=shard)
    rig.wait()
    ended = _clock()
    if not bool((moved == stamp).all()):
        raise BlockFailed(f"{name}: the device has other bytes than were sent")
    return ended
