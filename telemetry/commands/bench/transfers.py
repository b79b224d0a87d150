"""The blocks of `arena bench tensor`: what one fresh process with its readers does and times.

Each block times its own yardstick, a bare `dst.copy_(src)` between ordinary tensors with torch's default threads, turn
by turn with what it measures: the same source pages, the same moment. Readers run torch on one thread; they only look.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from typing import TYPE_CHECKING, Any

from telemetry.commands.bench.children import BlockFailed
from telemetry.commands.bench.contenders import Arena, Contender, Crew, Ends, crew
from telemetry.commands.bench.harness import Block, summarise

if TYPE_CHECKING:
    import torch

SMALL_MESSAGES = 1000
_SMALL_BYTES = 1000
_MADV_HUGEPAGE = 14
_MADV_POPULATE_READ = 22
_clock = time.monotonic_ns  # the same clock in every process of the host


@dataclass(frozen=True)
class Timed:
    """What was measured, and the yardstick from the same block."""

    times: Block
    yardstick: Block


def touch(tensor: torch.Tensor) -> int:
    """Reads one byte of every page, and says what it read: what any reader at least does with a tensor."""
    import torch

    return int(tensor.view(torch.uint8).flatten()[::4096].sum())


def broadcast(make: Callable[[], Contender], readers: int, tensor_bytes: int, repeats: int) -> Timed:
    """From the start of sending an ordinary tensor to the last reader's answer; everything warm."""
    contender = make()
    with crew(contender, readers, partial(_answer_touches, contender.warm_ups + repeats)) as at_work:
        source, copy_ns = _source_and_copy(tensor_bytes)
        expected = [touch(source)] * readers
        for _ in range(contender.warm_ups):
            _exchange_ns(at_work, source, expected)
        pairs = [(copy_ns(), _exchange_ns(at_work, source, expected)) for _ in range(repeats)]
    return _timed(pairs)


def first_message(readers: int, tensor_bytes: int, **settings: Any) -> Timed:
    """The first message of a new queue. Yardstick: a cold copy, one before and one after; with prefault a warm one."""
    with crew(Arena(**settings), readers, partial(_answer_touches, 1)) as at_work:
        source, warm_copy_ns = _source_and_copy(tensor_bytes)
        expected = [touch(source)] * readers
        yardstick_ns = warm_copy_ns if settings.get("prefault") else partial(_cold_copy_ns, source)
        before = yardstick_ns()
        first = _exchange_ns(at_work, source, expected)
        after = yardstick_ns()
    return Timed(summarise([first]), summarise([(before + after) // 2]))


def bare_first(readers: int, tensor_bytes: int) -> Timed:
    """What no queue does better than: a bare copy into memory that was mapped by all beforehand, and word by pipes.

    From the start of the copy to the last answer. Readers are as new to torch as those of `first_message`.
    """
    with crew(_SharedMap(tensor_bytes), readers, partial(_answer_touches, 1)) as at_work:
        source, warm_copy_ns = _source_and_copy(tensor_bytes)
        expected = [touch(source)] * readers
        before = warm_copy_ns()
        first = _exchange_ns(at_work, source, expected)
        after = warm_copy_ns()
    return Timed(summarise([first]), summarise([(before + after) // 2]))


class _SharedMap(Contender):
    """A mapping that readers inherit, with all its pages; a pipe to each reader and one back."""

    name = "one bare copy, pipes"

    def __init__(self, tensor_bytes: int) -> None:
        self._nbytes = tensor_bytes

    def prepare(self, readers: int) -> None:
        """Before the fork: what all inherit."""
        self._mapping = mmap.mmap(-1, self._nbytes)
        self._mapping.madvise(_MADV_HUGEPAGE)
        self._pipes = [(Pipe(duplex=False), Pipe(duplex=False)) for _ in range(readers)]

    def _tensor(self) -> torch.Tensor:
        import torch

        return torch.frombuffer(self._mapping, dtype=torch.uint8)

    def open_writer(self) -> Ends:
        """Every page is there before the first message."""
        shared = self._tensor().zero_()

        def send(source: torch.Tensor) -> None:
            shared.copy_(source)
            for (_, there), _ in self._pipes:
                there.send_bytes(b"!")

        for _, (back, _) in self._pipes:
            back.recv_bytes()
        return Ends(send, tuple(back.recv for _, (back, _) in self._pipes))

    def open_reader(self, rank: int) -> Ends:
        """Every page is mapped here too, and torch has made the tensor."""
        (here, _), (_, back) = self._pipes[rank]
        shared = self._tensor()
        self._mapping.madvise(_MADV_POPULATE_READ)
        back.send_bytes(b"here")

        def receive() -> torch.Tensor:
            here.recv_bytes()
            return shared

        return Ends(back.send, (receive,))

    def close(self) -> None:
        """The mapping goes with its process."""


def lent(readers: int, tensor_bytes: int, repeats: int) -> Timed:
    """How long `enqueue` takes for a tensor that was born in shared memory and has just been written there.

    Writing it leaves the caches cold. Yardstick: one pickle in the same state, of a bare placeholder for the tensor:
    what anybody pays who pickles at all.
    """
    import torch

    contender = Arena()
    messages = contender.warm_ups + repeats
    pairs = []
    with crew(contender, readers, partial(_answer_touches, messages)) as at_work:
        for index in range(messages):
            with contender.queue.lend((tensor_bytes,), torch.uint8) as tensor:
                tensor.fill_(index)
                pickle_ns = _pickle_ns(tensor)
                expected = [touch(tensor.fill_(index))] * readers
                start = _clock()
                contender.queue.enqueue(tensor)
                pairs.append((pickle_ns, _clock() - start))
            del tensor  # or the next one could not have its memory
            _expect([receive() for receive in at_work.ends.receives], expected)
    return _timed(pairs[contender.warm_ups :])


class _Placeholders(pickle.Pickler):
    """The least that a pickler can do about a tensor."""

    def reducer_override(self, obj: Any) -> Any:
        import torch

        return (int, ()) if isinstance(obj, torch.Tensor) else NotImplemented


def _pickle_ns(tensor: torch.Tensor) -> int:
    start = _clock()
    _Placeholders(io.BytesIO(), 5).dump(tensor)
    return _clock() - start


def head_of_line(tensor_bytes: int, repeats: int) -> Timed:
    """One large message with a thousand small ones behind it, to their last receipt.

    Yardstick: a warm copy plus the thousand alone.
    """
    trains = 2 * (Arena.warm_ups + repeats)
    with crew(Arena(), 1, partial(_answer_trains, trains)) as at_work:
        source, copy_ns = _source_and_copy(tensor_bytes)
        for _ in range(Arena.warm_ups):
            _train_ns(at_work, None)
            _train_ns(at_work, source)
        pairs = [(copy_ns() + _train_ns(at_work, None), _train_ns(at_work, source)) for _ in range(repeats)]
    return _timed(pairs)


def _timed(pairs: list[tuple[int, int]]) -> Timed:
    return Timed(times=summarise(ns for _, ns in pairs), yardstick=summarise(ns for ns, _ in pairs))


def _source_and_copy(tensor_bytes: int) -> tuple[torch.Tensor, Callable[[], int]]:
    """A source whose pages differ, and the timed bare copy of it. Made after the fork: readers must not share it."""
    import torch

    source = torch.arange(tensor_bytes // 8).view(torch.uint8)
    target = torch.zeros_like(source)

    def copy_ns() -> int:
        start = _clock()
        target.copy_(source)
        return _clock() - start

    copy_ns()
    return source, copy_ns


def _cold_copy_ns(source: torch.Tensor) -> int:
    """A copy into shared memory that nobody has touched: what any design pays that maps afresh."""
    import torch

    descriptor = os.memfd_create("arena-bench-cold")
    try:
        start = _clock()
        os.ftruncate(descriptor, source.nbytes)
        torch.frombuffer(mmap.mmap(descriptor, source.nbytes), dtype=torch.uint8).copy_(source)
        return _clock() - start
    finally:
        os.close(descriptor)


def _exchange_ns(at_work: Crew, source: torch.Tensor, expected: list[int]) -> int:
    start = _clock()
    answers = at_work.exchange(source)
    took = _clock() - start
    _expect(answers, expected)
    return took


def _expect(answers: list[Any], expected: list[int]) -> None:
    """Speed with the wrong bytes is no speed."""
    if answers != expected:
        raise BlockFailed(f"readers must find {expected} in the tensor, found {answers}")


def _train_ns(at_work: Crew, large: torch.Tensor | None) -> int:
    padding = bytes(_SMALL_BYTES)
    send = at_work.ends.send
    start = _clock()
    if large is not None:
        send(large)
    for index in range(SMALL_MESSAGES):
        send((index, padding))
    received, last_ns = at_work.ends.receives[0]()
    if received != SMALL_MESSAGES:
        raise BlockFailed(f"the reader must see {SMALL_MESSAGES} small messages, found {received}")
    took: int = last_ns - start
    return took


def _answer_touches(messages: int, ends: Ends) -> None:
    import torch

    torch.set_num_threads(1)
    (receive,) = ends.receives
    for _ in range(messages):
        ends.send(touch(receive()))  # no name for the tensor: its memory is free before the answer leaves


def _answer_trains(trains: int, ends: Ends) -> None:
    (receive,) = ends.receives
    for _ in range(trains):
        received, last = 0, False
        while not last:
            message = receive()
            if isinstance(message, tuple):
                received += 1
                last = message[0] == SMALL_MESSAGES - 1
        ends.send((received, _clock()))
