"""An end that is dropped without `shutdown()` is shut down all the same: nobody waits for it, and a warning says so."""

import gc
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from arena import MessageQueue, QueueConfig
from arena.errors import ArenaError, NoReader, QueueClosed
from tests.support.fleet import eventually

ROOT = Path(__file__).parent.parent
SMALL: dict[str, Any] = {"slots": 4, "max_arena_bytes": 8 << 20, "segment_bytes": 8 << 20}

pytestmark = pytest.mark.usefixtures("run_dir")


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()  # what other tests have dropped
    yield


def make(n_reader: int = 1, **more: Any) -> tuple[Any, list[Any]]:
    queue: Any = MessageQueue(n_reader, config=QueueConfig(**SMALL), **more)
    return queue, [MessageQueue.create_from_handle(queue.export_handle(), rank) for rank in range(n_reader)]


def attach_threads() -> int:
    return sum(thread.name.startswith("arena-attach") for thread in threading.enumerate())


@pytest.mark.parametrize("in_a_circle", [False, True])
def test_a_reader_that_is_dropped_leaves_and_holds_nobody_up(in_a_circle):
    queue, readers = make(2)
    with queue, readers[0]:
        with pytest.warns(ResourceWarning, match=r"dropped without shutdown\(\): <MessageQueue 'queue' reader 1"):
            if in_a_circle:
                circle = [readers[1]]
                circle.append(circle)
                del circle
            del readers[1]
            gc.collect()
        for number in range(20):  # five times as many as there are slots
            queue.enqueue(number, timeout=10)
            assert readers[0].dequeue(timeout=10) == number
        assert queue.statistics().peers == {0: "attached", 1: "left"}


def test_what_a_dropped_reader_had_taken_stays_valid_and_goes_back_with_its_last_view():
    queue, readers = make(1)
    with queue:
        queue.enqueue(torch.arange(100_000), timeout=10)
        tensor = readers[0].dequeue(timeout=10)
        with pytest.warns(ResourceWarning):
            readers.clear()
            gc.collect()
        assert torch.equal(tensor, torch.arange(100_000))
        assert queue.statistics().arena_used_bytes
        del tensor
        assert eventually(lambda: not queue.statistics().arena_used_bytes or None)


@pytest.mark.parametrize("how", ["at work", "in a circle", "a reader waits"])
def test_a_writer_that_is_dropped_closes_the_queue(how):
    before = attach_threads()
    queue, [reader] = make()
    name = queue.name
    queue.enqueue("last", timeout=10)
    with reader:
        found: list[Any] = []

        def take() -> None:
            found.append(reader.dequeue(timeout=30))
            try:
                reader.dequeue(timeout=30)
            except QueueClosed as closed:
                found.append(closed)

        taking = threading.Thread(target=take)
        if how == "a reader waits":
            taking.start()
            assert eventually(lambda: found or None)
        with pytest.warns(ResourceWarning, match=f"<MessageQueue '{name}' writer"):
            if how == "in a circle":  # which the collector takes apart in any order
                circle = [queue]
                circle.append(circle)
                del circle
            del queue
            gc.collect()
        if how != "a reader waits":
            taking.start()
        taking.join(30)
        assert found[0] == "last"
        assert isinstance(found[1], QueueClosed)
    assert eventually(lambda: attach_threads() == before or None)
    assert not list(Path(os.environ["ARENA_RUN_DIR"]).rglob("socket"))


def test_a_collection_in_the_attach_thread_itself_brings_the_writer_down(monkeypatch):
    from arena.peers.server import AttachServer

    before = attach_threads()
    queue, [reader] = make()
    real, collected = AttachServer._drop_silent, threading.Event()

    def collect(self: AttachServer, selector: Any) -> None:
        real(self, selector)
        gc.collect()
        collected.set()

    with reader:
        gc.disable()
        try:
            handle = queue.export_handle()
            circle = [queue]
            circle.append(circle)
            del queue, circle
            monkeypatch.setattr(AttachServer, "_drop_silent", collect)
            with pytest.warns(ResourceWarning):
                with pytest.raises(ArenaError):  # no such rank; but the thread has run
                    MessageQueue.create_from_handle(handle, 7)
                assert collected.wait(30)
        finally:
            gc.enable()
        with pytest.raises(QueueClosed):
            reader.dequeue(timeout=30)
    assert eventually(lambda: attach_threads() == before or None)


def test_nothing_is_said_of_one_that_was_shut_down_or_never_came_to_be():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        queue, [reader] = make()
        with queue, reader:
            queue.enqueue(1)
        del queue, reader
        with pytest.raises(Exception, match="n_reader"):
            MessageQueue(-1)
        gc.collect()


def test_an_attach_that_comes_to_nothing_at_its_very_end_keeps_nothing(monkeypatch):
    from arena import message_queue
    from arena.reader import Reader

    def interrupted(self: Reader) -> bool:
        raise KeyboardInterrupt

    queue: Any = MessageQueue(1, config=QueueConfig(**SMALL))
    with queue:
        kept = set(message_queue._kept)
        monkeypatch.setattr(Reader, "_take_place", interrupted)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(KeyboardInterrupt):
                MessageQueue.create_from_handle(queue.export_handle(), 0)
            gc.collect()
        assert set(message_queue._kept) == kept
    assert not set(message_queue._kept) & kept


def test_a_forked_child_drops_its_copies_in_silence_and_the_parent_s_go_on():
    queue, [reader] = make()
    with queue, reader:
        pid = os.fork()
        if not pid:
            status = 1
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    del queue, reader
                    gc.collect()
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0
        queue.enqueue("on")
        assert reader.dequeue(timeout=10) == "on"


SCRIPT = """
from arena import MessageQueue
queue = MessageQueue(1)
reader = MessageQueue.create_from_handle(queue.export_handle(), 0)
queue.enqueue(1)
print(reader.dequeue())
"""


def test_a_process_that_ends_with_ends_that_are_open_ends_at_once_and_in_silence():
    command = [sys.executable, "-W", "error::ResourceWarning", "-c", SCRIPT]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "1\n", "")


def no_reader(queue: Any) -> bool:
    try:
        queue.enqueue("to nobody", timeout=5)
    except NoReader:
        return True
    return False


def test_a_remote_reader_that_is_dropped_gives_its_seat_back():
    pytest.importorskip("zmq")
    from dataclasses import replace

    queue: Any = MessageQueue(1, config=QueueConfig(**SMALL), remote="127.0.0.1")
    with queue:
        handle = replace(queue.export_handle(), host="elsewhere")
        reader: Any = MessageQueue.create_from_handle(handle, 0)
        queue.wait_until_ready(30)
        queue.enqueue("first", timeout=10)
        assert reader.dequeue(timeout=30) == "first"
        with pytest.warns(ResourceWarning):
            del reader
            gc.collect()
        assert eventually(lambda: no_reader(queue))


def test_a_writer_with_a_forwarder_that_is_dropped_closes_the_queue():
    pytest.importorskip("zmq")
    queue: Any = MessageQueue(1, config=QueueConfig(**SMALL), remote="127.0.0.1")
    reader: Any = MessageQueue.create_from_handle(queue.export_handle(), 0)
    forwarder = queue._forwarder._process
    with reader:
        with pytest.warns(ResourceWarning):
            del queue
            gc.collect()
        with pytest.raises(QueueClosed):
            reader.dequeue(timeout=30)
    assert forwarder.wait(30) == 0
