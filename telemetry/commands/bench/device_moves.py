"""The blocks of `arena bench device`: a writer, a reader with a device, and every way a tensor gets from one to there.

One process measures one size: it writes, and forks the reader, which alone uses the device. Both know the plan, so the
reader waits for the next message before that is sent. What is timed ends when the tensor is on the device, by the
reader's clock, which is the writer's: one host. Every tensor carries a stamp of its own, which is looked at afterwards.

*Releases* are timed from the end of a copy, as the reader hears of it, to the moment when the writer finds the block
free again, looking all the time. A reader that is idle sleeps by then; one that is busy runs Python.
"""

from __future__ import annotations

import ctypes
import pickle
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Final

from arena import MessageQueue, QueueConfig
from telemetry.commands.bench.children import BlockFailed, fork_reader, reap
from telemetry.commands.bench.harness import Block, summarise

if TYPE_CHECKING:
    import torch

BARE, HOST = "bare pinned copy", "bare host copy"
WRITTEN = "bare pinned copy, just written"
PAGEABLE, PINNED, LENT = "arena, pageable", "arena, pinned", "arena, lent"
STREAMED = "arena, streamed"
TORCH, PICKLED = "pin_memory() and copy", "pickle, pipe and copy"
MOVES: Final = (BARE, WRITTEN, HOST, PAGEABLE, PINNED, STREAMED, LENT, TORCH, PICKLED)
RELEASES: Final = ("ticket, idle reader", "helper, idle reader", "ticket, busy reader", "helper, busy reader")

RELEASED_BYTES: Final = 1 << 20

_HUGE_PAGE_BYTES: Final = 2 << 20
_PATIENCE_S: Final = 60.0
_LATE_S: Final = 0.002  # how long a copy whose release is timed is held up
_LATE_CYCLES: Final = 3_000_000
_AFTER_S: Final = 0.005  # how long its reader goes on idling, or working
_clock = time.monotonic_ns


@dataclass(frozen=True)
class Plan:
    """What is measured of one size, or of the releases."""

    kind: str  # of device
    nbytes: int
    contenders: tuple[str, ...]
    rounds: int
    repeats: int
    warm_ups: int = 2

    def turns(self) -> Iterator[tuple[int, str]]:
        """Round and contender, in order: every second round goes backwards. Round -1 is not counted."""
        for number in range(-1, self.rounds):
            for name in self.contenders if number % 2 == 0 else reversed(self.contenders):
                for _ in range(self.warm_ups if number < 0 else self.repeats):
                    yield number, name


def why_not(kind: str) -> str:
    """Why there is no such device here; empty if there is. In a process of its own: it may begin to use the device."""
    import torch

    from arena.device.cuda.streams import cuda

    if kind == "cuda" and not cuda.is_available():
        return f"no CUDA device: torch {torch.__version__} finds none; --device cpu shows that everything works"
    return ""


def device_name(kind: str) -> str:
    """What the figures are of. In a process of its own, likewise."""
    from arena.device.cuda.streams import cuda

    return str(cuda.get_device_name()) if kind == "cuda" else "the CPU's copy engine"


def measure(plan: Plan) -> dict[str, list[Block]]:
    """The blocks of each contender, a round each. In a process of its own, which has not used the device."""
    commands, theirs = Pipe()
    payloads, incoming = Pipe()
    pid = fork_reader(partial(_read, plan, theirs, incoming))
    with _Queues(plan) as queues:
        commands.send(queues.handles())
        times: dict[tuple[str, int], list[int]] = {}
        writer = _Writer(plan, queues, commands, payloads)
        commands.recv()
        for stamp, (number, name) in enumerate(plan.turns()):
            times.setdefault((name, number), []).append(writer.take_turn(name, stamp % 251))
        reap([pid])
    return {name: [summarise(times[name, number]) for number in range(plan.rounds)] for name in plan.contenders}


class _Queues:
    """One queue whose readers pin, one whose readers don't, and one whose readers follow."""

    def __init__(self, plan: Plan) -> None:
        segment = -(-plan.nbytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        room: dict[str, Any] = {"segment_bytes": 2 * segment, "max_arena_bytes": 2 * segment}
        self.pinned: Any = MessageQueue(1, config=QueueConfig(name="bench-device", **room))
        self.pageable: Any = MessageQueue(1, config=QueueConfig(name="bench-pageable", pin="off", **room))
        self.streamed: Any = MessageQueue(1, config=QueueConfig(name="bench-streamed", **room))

    def handles(self) -> tuple[Any, ...]:
        return tuple(one.export_handle() for one in (self.pinned, self.pageable, self.streamed))

    def __enter__(self) -> _Queues:
        return self

    def __exit__(self, *error: object) -> None:
        self.pinned.shutdown()
        self.pageable.shutdown()
        self.streamed.shutdown()


def write(tensor: torch.Tensor, stamp: int) -> None:
    """Fill a tensor, by one thread. torch would take every core there is, and go on spinning there while we measure."""
    ctypes.memset(tensor.data_ptr(), stamp, tensor.nbytes)


# ── the writer ───────────────────────────────────────────────────────────────────────────────────
class _Writer:
    """Sends, and puts its clock and the reader's together."""

    def __init__(self, plan: Plan, queues: _Queues, commands: Connection, payloads: Connection) -> None:
        import torch

        self._plan, self._queues, self._commands, self._payloads = plan, queues, commands, payloads
        self._source = torch.zeros(plan.nbytes, dtype=torch.uint8)
        self._target = torch.zeros_like(self._source)
        for queue in (queues.pinned, queues.streamed):
            queue.enqueue(self._source)  # the reader has it pinned

    def take_turn(self, name: str, stamp: int) -> int:
        """One sample, in ns."""
        if name in RELEASES:
            return self._released(stamp)
        if name == HOST:
            began = _clock()
            self._target.copy_(self._source)
            return _clock() - began
        if name in (BARE, WRITTEN, TORCH):
            return self._answer()
        write(self._source, stamp)
        if name == LENT:
            return self._lent(stamp)
        sends: dict[str, Callable[[], object]] = {
            PINNED: partial(self._queues.pinned.enqueue, self._source),
            PAGEABLE: partial(self._queues.pageable.enqueue, self._source),
            STREAMED: partial(self._queues.streamed.enqueue, self._source),
            PICKLED: self._pickle,
        }
        began = _clock()
        sends[name]()
        return self._answer() - began

    def _lent(self, stamp: int) -> int:
        import torch

        with self._queues.streamed.lend((self._plan.nbytes,), torch.uint8) as tensor:
            write(tensor, stamp)
            began = _clock()
            self._queues.streamed.enqueue(tensor)
        del tensor
        return self._answer() - began

    def _pickle(self) -> None:
        self._payloads.send_bytes(pickle.dumps(self._source, 5))

    def _released(self, stamp: int) -> int:
        write(self._source, stamp)
        self._queues.pinned.enqueue(self._source)
        pool = self._queues.pinned._pool
        ends = time.monotonic() + _PATIENCE_S
        while pool.used_bytes:
            pool.collect()
            if time.monotonic() > ends:
                raise BlockFailed("a block did not come back")
        seen = _clock()
        return max(0, seen - self._answer())

    def _answer(self) -> int:
        if not self._commands.poll(_PATIENCE_S):
            raise BlockFailed("the reader does not answer")
        answer: int = self._commands.recv()
        time.sleep(0.001)  # by then it waits for the next one
        return answer


# ── the reader ───────────────────────────────────────────────────────────────────────────────────
class Rig:
    """A device, one stream of it, and memory that is pinned without us."""

    def __init__(self, kind: str, index: int = 0) -> None:
        import torch

        from arena.device import open_copies

        self.copies: Any = open_copies(kind)
        self._is_cuda = kind == "cuda"
        self.device = torch.device(kind, index) if self._is_cuda else torch.device(kind)
        if self._is_cuda:
            from arena.device.cuda.streams import cuda

            cuda.init()
            cuda.set_device(index)
            self.stream: Any = cuda.Stream()
        else:
            from arena.device.cpu.copies import CpuStream

            self.stream = CpuStream()

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of it in pinned memory."""
        if self._is_cuda:
            return tensor.pin_memory()
        made = tensor.clone()
        self.copies.register(made.data_ptr(), made.nbytes, writable=True)
        return made

    def unpin(self, tensor: torch.Tensor) -> None:
        """Give that back."""
        if not self._is_cuda:
            self.copies.unregister(tensor.data_ptr())

    def move(self, tensor: torch.Tensor, *, pinned: bool) -> torch.Tensor:
        """To the device; done on return."""
        made: torch.Tensor = self.copies.to_device(tensor, self.device, self.stream, pinned=pinned)
        self.wait()
        return made

    def wait(self) -> None:
        """Until the stream has nothing left to do."""
        self.copies.record(self.stream).wait()

    def delay(self) -> None:
        """Hold the stream up for a while."""
        if self._is_cuda:
            from arena.device.cuda.streams import cuda

            with cuda.stream(self.stream):
                cuda._sleep(_LATE_CYCLES)
        else:
            self.stream.delay(_LATE_S)


def _read(plan: Plan, commands: Connection, incoming: Connection) -> None:
    """The reader's process."""
    pinned, pageable, streamed = (MessageQueue.create_from_handle(handle, 0) for handle in commands.recv())
    with pinned, pageable, streamed:
        reader = _Reader(plan, pinned, pageable, streamed, incoming)
        commands.send("ready")
        for stamp, (_, name) in enumerate(plan.turns()):
            answer = reader.take_turn(name, stamp % 251)
            if answer is not None:
                commands.send(answer)


class _Reader:
    def __init__(self, plan: Plan, pinned: Any, pageable: Any, streamed: Any, incoming: Connection) -> None:
        self._rig = Rig(plan.kind)
        self._pinned, self._pageable, self._streamed, self._incoming = pinned, pageable, streamed, incoming
        first = pinned.dequeue(timeout=_PATIENCE_S)
        self._source = first.clone()
        self._bare = self._rig.pinned(self._source)
        pinned.to_device(first, plan.kind, self._rig.stream)
        del first
        streamed.dequeue_to(self._rig.device, _PATIENCE_S, stream=self._rig.stream)
        for reader in (pinned, streamed):
            settle(reader)
        self._tickets = pinned._borrower._home.tickets

    def take_turn(self, name: str, stamp: int) -> int | None:
        """One sample: a duration if it is the reader's alone, else the time when all was there."""
        if name in RELEASES:
            return self._release(name)
        if name == HOST:
            return None
        if name in (BARE, WRITTEN):
            if name == WRITTEN:  # as the tensor that is lent has been
                write(self._bare, stamp)
            began = _clock()
            self._rig.move(self._bare, pinned=True)
            return _clock() - began
        if name == TORCH:
            return self._pin_and_move()
        moved = self._take(name)
        ended = _clock()
        if not bool((moved == stamp).all()):
            raise BlockFailed(f"{name}: the device has other bytes than were sent")
        return ended

    def _take(self, name: str) -> torch.Tensor:
        if name == PICKLED:
            return self._rig.move(pickle.loads(self._incoming.recv_bytes()), pinned=False)
        if name in (STREAMED, LENT):
            followed: torch.Tensor = self._streamed.dequeue_to(self._rig.device, _PATIENCE_S, stream=self._rig.stream)
            self._rig.wait()
            return followed
        reader = self._pageable if name == PAGEABLE else self._pinned
        tensor = reader.dequeue(timeout=_PATIENCE_S)
        moved: torch.Tensor = reader.to_device(tensor, self._rig.device, self._rig.stream)
        del tensor
        self._rig.wait()
        return moved

    def _pin_and_move(self) -> int:
        began = _clock()
        pinned = self._rig.pinned(self._source)
        self._rig.move(pinned, pinned=True)
        ended = _clock()
        self._rig.unpin(pinned)
        return ended - began

    def _release(self, name: str) -> int:
        self._pinned._borrower._home.tickets = self._tickets if name.startswith("ticket") else None
        tensor = self._pinned.dequeue(timeout=_PATIENCE_S)
        self._rig.delay()
        self._pinned.to_device(tensor, self._rig.device, self._rig.stream)
        passage = self._rig.copies.record(self._rig.stream)
        del tensor
        if name.endswith("idle reader"):
            passage.wait()
            ended = _clock()
            time.sleep(_AFTER_S)
            return ended
        while not passage.passed():
            _work()
        ended = _clock()
        while _clock() < ended + _AFTER_S * 1e9:
            _work()
        return ended


def settle(reader: Any) -> None:
    """Until a reader's segments and tickets are registered, or can't be."""
    ends = time.monotonic() + _PATIENCE_S
    while "pinning" in (reader.statistics().pins or {1: "pinning"}).values():
        if time.monotonic() > ends:
            raise BlockFailed(f"segments are not pinned: {reader.statistics().pins}")
        time.sleep(0.005)
    time.sleep(0.1)  # the tickets are registered right after


def _work() -> int:
    return sum(range(200))
