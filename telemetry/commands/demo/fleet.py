"""The engine's workers as processes: started together, and gone when the run is over, however it ends."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from tempfile import TemporaryDirectory
from threading import Timer

from arena import Handle, MessageQueue, QueueConfig
from arena.errors import ArenaError
from arena.probe import is_alive, owners, queue_directories, run_directory
from telemetry.commands.demo import worker
from telemetry.commands.demo.interrupts import deferred
from telemetry.commands.demo.server import WorkerFailed

START_S = 60.0
LEAVE_S = 0.7


class Fleet:
    """The engine's queue, the workers behind it, and the queues over which they answer."""

    def __init__(
        self,
        readers: int,
        config: QueueConfig,
        answers: QueueConfig,
        late_s: dict[int, float],
        on_warning: Callable[[str], None],
    ) -> None:
        self.answers: dict[int, MessageQueue] = {}
        self.processes: dict[int, ForkServerProcess] = {}
        self.killed_at: dict[int, float] = {}
        self._pipes: dict[int, Connection] = {}
        self._handles: list[Handle] = []
        self._timers: list[Timer] = []
        self._rendezvous = _new_directory()
        self.queue = MessageQueue(readers, readers, config=config, on_warning=on_warning)
        self._handles.append(self.queue.export_handle())
        try:
            for rank in range(readers):
                post = worker.Post(
                    rank=rank,
                    readers=readers,
                    handle=self._handles[0],
                    rendezvous=self._meeting_point(),
                    late_s=late_s.get(rank, 0.0),
                    answers=replace(answers, name=f"{answers.name}:{rank}"),
                )
                self._start(post)
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *raised: object) -> None:
        self.stop()

    def wait_until_ready(self) -> None:
        """Return when every worker has formed its group and comes to the queue."""
        try:
            for rank, pipe in self._pipes.items():
                handle = self._handle_of(rank, pipe)
                self._handles.append(handle)
                self.answers[rank] = MessageQueue.create_from_handle(handle, 0)
            for answers in self.answers.values():
                answers.dequeue(timeout=START_S)  # Ready
        except (ArenaError, EOFError) as error:
            raise WorkerFailed(f"the workers did not get ready: {error}") from error
        self._rendezvous.cleanup()

    def new_rendezvous(self) -> str:
        """Return a place where a new group can meet; the last one is over."""
        self._rendezvous.cleanup()
        self._rendezvous = _new_directory()
        return self._meeting_point()

    def kill_later(self, rank: int, after_s: float) -> None:
        """Send one worker SIGKILL when the time has come, whatever the engine does then."""
        timer = Timer(after_s, self._kill, (rank,))
        timer.daemon = True
        timer.start()
        self._timers.append(timer)

    def stop(self) -> None:
        """Close the queues, let the workers leave, and end those that don't."""
        with deferred():
            self._stop()

    def _stop(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self.queue.shutdown()
        for answers in self.answers.values():
            answers.shutdown()
        deadline = time.monotonic() + LEAVE_S
        for process in self.processes.values():
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        self._rendezvous.cleanup()
        self._sweep()

    def _sweep(self) -> None:
        """Remove what killed workers left of queues and communicators; elsewhere it'd stay, for the post-mortem."""
        for handle in self._handles:
            shutil.rmtree(handle.directory, ignore_errors=True)
        pids = {process.pid for process in self.processes.values()}
        for directory in queue_directories(run_directory()):
            there = list(owners(directory))
            if any(one.pid in pids for one in there) and all(is_alive(one) is False for one in there):
                shutil.rmtree(directory, ignore_errors=True)

    def _start(self, post: worker.Post) -> None:
        context = get_context("forkserver")
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=worker.work, args=(post, theirs), name=f"arena-demo-{post.rank}", daemon=True)
        process.start()
        theirs.close()
        self.processes[post.rank], self._pipes[post.rank] = process, ours

    def _handle_of(self, rank: int, pipe: Connection) -> Handle:
        connection.wait([pipe, self.processes[rank].sentinel], timeout=START_S)
        if not pipe.poll():
            raise WorkerFailed(f"worker {rank} did not start")
        handle: Handle = pipe.recv()
        return handle

    def _meeting_point(self) -> str:
        return os.path.join(self._rendezvous.name, "group")

    def _kill(self, rank: int) -> None:
        self.killed_at[rank] = time.monotonic()
        self.processes[rank].kill()


def _new_directory() -> TemporaryDirectory[str]:
    with deferred():  # an interrupt in its midst would leave a directory that nobody knows of
        return TemporaryDirectory(prefix="arena-demo-")
