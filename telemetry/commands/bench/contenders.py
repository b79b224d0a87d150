"""What a contender is, and Arena as one.

Every contender is driven through the same two plain callables, bound once, so that none pays for this abstraction:
`send(obj)` and, for each process on the other side, `receive()`. All are set up alike: `prepare` in the process that is
going to write, then its readers are forked, then both sides open their ends. Nothing exists before the fork that a
user of the library would make after it.
"""

from __future__ import annotations

import importlib
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, ClassVar

from telemetry.commands.bench.children import fork_reader, reap

READY_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Ends:
    """What one process holds. The writer has a `receive` for each reader; a reader has the one."""

    send: Callable[[Any], object]
    receives: tuple[Callable[[], Any], ...]


@dataclass(frozen=True)
class Crew:
    """A contender at work, seen from the writer."""

    ends: Ends
    pids: list[int]

    def exchange(self, message: Any) -> list[Any]:
        self.ends.send(message)
        return [receive() for receive in self.ends.receives]


class Contender(ABC):
    """One way to bring an object from a process to others on the same host, and answers back."""

    name: ClassVar[str]
    modules: ClassVar[tuple[str, ...]] = ()
    warm_ups: ClassVar[int] = 2  # tensors that are not timed: the first finds the pages, the second the pace

    @abstractmethod
    def prepare(self, readers: int) -> None:
        """In the writer, before its readers are forked: only what they must inherit."""

    @abstractmethod
    def open_writer(self) -> Ends:
        """In the writer, once its readers are forked; returns when all of them are there."""

    @abstractmethod
    def open_reader(self, rank: int) -> Ends:
        """In the reader of that rank."""

    @abstractmethod
    def close(self) -> None:
        """In every process, when its part is over."""


def preload(*modules: str) -> None:
    """Imports what every block needs into the process that forks them: none pays for it, least of all a timed one."""
    for module in modules:
        importlib.import_module(module)


def why_missing(contender: type[Contender]) -> str:
    """Empty when the contender can run here. Imports its libraries into this process, which opens nothing with them."""
    for module in contender.modules:
        try:
            with redirect_stdout(sys.stderr):  # vLLM logs to the stdout that it finds when it is imported
                importlib.import_module(module)
        except ModuleNotFoundError as error:
            return "not installed" if error.name == module.partition(".")[0] else f"not importable: {error}"
        except Exception as error:  # a library may fail to import in any way it likes
            return f"not importable: {error}"
    return ""


@contextmanager
def crew(contender: Contender, readers: int, serve: Callable[[Ends], object]) -> Iterator[Crew]:
    """Starts the readers, each in `serve`, and this process as their writer; waits for the readers at the end."""
    contender.prepare(readers)
    leave, stay = os.pipe()
    pids = [fork_reader(partial(_read, contender, rank, serve, (leave, stay))) for rank in range(readers)]
    try:
        yield Crew(contender.open_writer(), pids)
        os.close(stay)
        reap(pids)
    finally:
        contender.close()


def _read(contender: Contender, rank: int, serve: Callable[[Ends], object], gate: tuple[int, int]) -> None:
    """Leaves only when the writer has everything: with iceoryx2, what a closed port had sent may be gone."""
    leave, stay = gate
    os.close(stay)
    ends = contender.open_reader(rank)
    try:
        serve(ends)
        os.read(leave, 1)  # ends when the writer closes its side, or dies
    finally:
        contender.close()


class Arena(Contender):
    """One Arena queue for the broadcast, and one a reader for its answers, which the writer reads."""

    name = "arena"

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.queue: Any = None
        self._handles: list[tuple[Connection, Connection]] = []
        self._answers: list[Any] = []

    def prepare(self, readers: int) -> None:
        self._handles = [Pipe() for _ in range(readers)]

    def open_writer(self) -> Ends:
        from arena import MessageQueue, QueueConfig

        readers = len(self._handles)
        self.queue = MessageQueue(readers, readers, config=QueueConfig(name="bench", **self.settings))
        for mine, _ in self._handles:
            mine.send(self.queue.export_handle())
        self._answers = [MessageQueue.create_from_handle(mine.recv(), 0) for mine, _ in self._handles]
        self._wait_until_ready()
        return Ends(self.queue.enqueue, tuple(answers.dequeue for answers in self._answers))

    def open_reader(self, rank: int) -> Ends:
        from arena import MessageQueue, QueueConfig

        _, mine = self._handles[rank]
        self.queue = MessageQueue.create_from_handle(mine.recv(), rank)
        answers = MessageQueue(1, 1, config=QueueConfig(name=f"bench-answers-{rank}", **self.settings))
        self._answers = [answers]
        mine.send(answers.export_handle())
        self._wait_until_ready()
        return Ends(answers.enqueue, (self.queue.dequeue,))

    def close(self) -> None:
        for queue in (self.queue, *self._answers):
            if queue is not None:
                queue.shutdown()

    def _wait_until_ready(self) -> None:
        for queue in (self.queue, *self._answers):
            queue.wait_until_ready(READY_TIMEOUT_S)
