"""Worker processes that do what a test tells them, one command at a time, and that never outlive it.

A worker runs functions that the test names: `worker.call(function, ...)` waits for the result, `worker.begin`
does not. Each function gets the worker's own `Here` first, which keeps its queue and whatever it holds between
two commands. Every wait has a deadline, and what is left when the `Fleet` ends is killed by its pid.

The usual start method is a fork server with torch loaded: a new worker costs 20 ms, and inherits nothing of the
test process.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

from arena import Handle, MessageQueue, QueueConfig, Statistics

PRELOADED = ["torch", "numpy", "pytest", "arena.writer", "arena.reader", "tests.support.fleet"]
WORKER_LIFE_S = 110  # the end of a worker that its test forgot
A_WHILE_S = 30.0  # far beyond what anything here takes, and the end of a test that hangs


class WorkerDied(Exception):
    """The worker's process ended before it answered."""


class WorkerSilent(Exception):
    """The worker did not answer in time."""


class Here(SimpleNamespace):
    """What one worker keeps between commands: `queue`, its end, and `kept`, messages by name."""


class Call:
    """A command under way in a worker."""

    def __init__(self, worker: Worker, number: int) -> None:
        self._worker = worker
        self._number = number

    def done(self) -> bool:
        """Whether the answer is there."""
        return self._worker.receive_until(self._number, time.monotonic())

    def result(self, within: float = A_WHILE_S) -> Any:
        """What the function returned; raises what it raised.

        Raises:
            WorkerDied: the process ended first.
            WorkerSilent: no answer in time.
        """
        if not self._worker.receive_until(self._number, time.monotonic() + within):
            raise WorkerSilent(f"worker {self._worker.pid} did not answer within {within} s")
        good, value = self._worker.answers.pop(self._number)
        if good:
            return value
        raise value


class Worker:
    """One process. Its commands run one after the other, in its main thread."""

    def __init__(self, context: Any, environment: dict[str, str]) -> None:
        ours, theirs = context.Pipe()
        self._connection: Connection = ours
        self._process = context.Process(target=_work, args=(theirs, environment), daemon=True)
        self._process.start()
        theirs.close()
        self._exit_code: int | None = None
        self._asked = 0
        self._answered = 0
        self.answers: dict[int, tuple[bool, Any]] = {}
        pid = self._process.pid
        assert pid is not None
        self.pid: int = pid

    def begin(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Call:
        """Send a command, and do not wait."""
        self._connection.send((function, args, kwargs))
        self._asked += 1
        return Call(self, self._asked)

    def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Send a command and wait for its result."""
        return self.begin(function, *args, **kwargs).result()

    def receive_until(self, number: int, deadline: float) -> bool:
        """Collect answers up to the numbered one; False if the deadline came first."""
        while self._answered < number:
            if not self._connection.poll(max(0.0, deadline - time.monotonic())):
                return False
            try:
                answer = self._connection.recv()
            except (EOFError, ConnectionResetError):
                raise WorkerDied(f"worker {self.pid} ended with {self.wait_end()}") from None
            self._answered += 1
            self.answers[self._answered] = answer
        return True

    def freeze(self) -> None:
        """SIGSTOP, and wait until it stands."""
        os.kill(self.pid, signal.SIGSTOP)
        eventually(lambda: process_state(self.pid) == "T")

    def thaw(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal that ends it, and wait for the end."""
        os.kill(self.pid, number)
        self.wait_end()
        self.clean_up()

    def wait_end(self, within: float = A_WHILE_S) -> int:
        """Wait for the process to end; its exit code."""
        if self._exit_code is None:
            self._process.join(within)
            self._exit_code = self._process.exitcode
        assert self._exit_code is not None, f"worker {self.pid} still runs"
        return self._exit_code

    def end(self) -> int:
        """Let it return from its main function; its exit code."""
        self._connection.close()
        return self.wait_end()

    def clean_up(self) -> None:
        """Kill it if it still runs, and give back what it costs this process."""
        if self._exit_code is None:
            if self._process.is_alive():
                os.kill(self.pid, signal.SIGKILL)
            self.wait_end()
        self._connection.close()
        self._process.close()


class Fleet:
    """Starts workers, and ends all of them when it ends."""

    def __init__(self, *, method: str = "forkserver") -> None:
        self._method = method
        self.workers: list[Worker] = []

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self.workers:
            worker.clean_up()

    def start(self, *, method: str | None = None) -> Worker:
        """One more worker."""
        context = multiprocessing.get_context(method or self._method)
        if (method or self._method) == "forkserver":
            context.set_forkserver_preload(PRELOADED)
        worker = Worker(context, dict(os.environ))
        self.workers.append(worker)
        return worker

    def readers(self, queue: MessageQueue, *ranks: int) -> list[Worker]:
        """Workers attached to `queue`, one for each rank; for all of them by default."""
        handle = queue.export_handle()
        workers = [self.start() for _ in ranks or range(handle.n_reader)]
        calls = [
            worker.begin(attach, handle, rank)
            for worker, rank in zip(workers, ranks or range(handle.n_reader), strict=True)
        ]
        for call in calls:
            call.result()
        return workers


def _work(connection: Connection, environment: dict[str, str]) -> None:
    die_with_parent()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # a forked process has pytest's handler
    signal.alarm(WORKER_LIFE_S)
    os.environ.update(environment)
    if "torch" in sys.modules:
        import torch

        torch.set_num_threads(1)  # a forked process has lost OpenMP's threads, and waits for them for ever
    here = Here(queue=None, kept={})
    while True:
        try:
            function, args, kwargs = connection.recv()
        except EOFError:
            return
        answer: tuple[bool, Any]
        try:
            answer = True, function(here, *args, **kwargs)
        except BaseException as error:  # a command may be interrupted too; the test sees to it
            answer = False, error.with_traceback(None)
        try:
            connection.send(answer)
        except OSError:
            return
        except Exception as error:
            connection.send((False, RuntimeError(f"can't send {answer!r}: {error}")))
        del answer


def die_with_parent() -> None:
    """PR_SET_PDEATHSIG: no worker is left behind by a test process that is killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


# ── what workers are told ────────────────────────────────────────────────────────────────────────
def create(here: Here, n_reader: int, **settings: Any) -> Handle:
    """Be the writer of a new queue."""
    here.queue = MessageQueue(n_reader, config=QueueConfig(**settings))
    return here.queue.export_handle()


def attach(here: Here, handle: Handle, rank: int, *, timeout: float | None = A_WHILE_S) -> None:
    """Be a reader."""
    here.queue = MessageQueue.create_from_handle(handle, rank, timeout=timeout)


def enqueue(here: Here, *objects: Any, timeout: float | None = A_WHILE_S) -> None:
    """Send each object."""
    for obj in objects:
        here.queue.enqueue(obj, timeout=timeout)


def dequeue(here: Here, timeout: float | None = A_WHILE_S) -> Any:
    """Take one message and send it back."""
    return here.queue.dequeue(timeout=timeout)


def drain(here: Here, count: int, timeout: float | None = A_WHILE_S) -> list[Any]:
    """Take `count` messages."""
    return [here.queue.dequeue(timeout=timeout) for _ in range(count)]


def keep(here: Here, name: str, timeout: float | None = A_WHILE_S) -> None:
    """Take one message and keep it."""
    here.kept[name] = here.queue.dequeue(timeout=timeout)


def drop(here: Here, *names: str) -> None:
    """Let go of kept messages; of all of them if none is named."""
    for name in names or list(here.kept):
        del here.kept[name]
    gc.collect()


def statistics(here: Here) -> Statistics:
    """A snapshot of this end."""
    snapshot: Statistics = here.queue.statistics()
    return snapshot


def shut_down(here: Here) -> None:
    """Leave, or close."""
    here.queue.shutdown()


# ── looking from outside ─────────────────────────────────────────────────────────────────────────
def hold_the_gil(here: Here, seconds: int) -> None:
    """A C call that nothing in its process interrupts."""
    ctypes.PyDLL(None).sleep(seconds)


def beat(here: Here, seconds: float) -> None:
    """Case 5: long work, with a sign of life now and then."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        here.queue.heartbeat()
        time.sleep(0.02)


def eventually(condition: Callable[[], Any], *, within: float = A_WHILE_S, every: float = 0.005) -> Any:
    """Wait until `condition()` is true and return its value; fails with its last value at the deadline."""
    deadline = time.monotonic() + within
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {within} s: {condition}, last {value!r}"
        time.sleep(every)


def process_state(pid: int) -> str:
    """The letter that /proc gives: R, S, T (stopped), Z (dead, not reaped); X when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return "X"
    return chr(stat[stat.rindex(b")") + 2])


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    stat = Path(f"/proc/{pid}/stat").read_bytes()
    fields = stat[stat.rindex(b")") + 2 :].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def open_fds() -> dict[int, str]:
    """This process's file descriptors and what they lead to."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that lists them
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


def arena_maps() -> list[str]:
    """This process's mappings of Arena's segments and probe pages."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    run_dir = os.environ.get("ARENA_RUN_DIR", "/nowhere")
    return [line for line in lines if "memfd:arena:" in line or run_dir in line]


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Fail if the block takes longer."""
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    assert took < seconds, f"took {took:.3f} s"
