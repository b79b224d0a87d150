"""Readers on other hosts: the same promises as beside the writer, over a socket."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from arena import MessageQueue, QueueConfig, RemoteConfig
from arena.errors import (
    AttachRefused,
    HandleMismatch,
    InvalidArgument,
    PeerDied,
    QueueClosed,
    QueueTimeout,
)
from arena.probe import ProbeReader, pages
from tests.support import remotes
from tests.support.fleet import (
    Here,
    dequeue,
    drain,
    drop,
    enqueue,
    eventually,
    hold_the_gil,
    keep,
    process_state,
    shut_down,
    statistics,
    within,
)

PARTS = {"inline and block": {}, "fragments": {"max_arena_bytes": 0}, "both": {"max_arena_bytes": 1 << 20}}


def messages() -> list[Any]:
    """One of each kind of frame, and of each kind of buffer in it."""
    numpy = pytest.importorskip("numpy")
    base = torch.arange(60_000, dtype=torch.float32)
    return [
        {"step": 1, "text": "ünïcode", "nested": [(1, 2.5, None, True)]},
        torch.arange(10),
        base.view(200, 300)[::2, 3:],
        [base[:50_000], base[10:60_000]],  # two views of one storage
        torch.nn.Parameter(torch.randn(100_000).to(torch.bfloat16).float(), requires_grad=True),
        {"empty": torch.empty(0, 3), "scalar": torch.tensor(7.5), "array": numpy.arange(70_000).reshape(7, -1)},
        b"x" * 300_000,
        list(range(200_000)),  # a pickle that takes a block of its own, with a tensor that has another
        [list(range(100_000)), torch.full((2_500_000,), 3, dtype=torch.uint8)],
        None,
    ]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        equal = one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
        return type(one) is type(other) and one.requires_grad == other.requires_grad and equal
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if hasattr(one, "tobytes"):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    return type(one) is type(other) and one == other


def take_and_compare(here: Here, count: int, seed: int) -> list[bool]:
    torch.manual_seed(seed)
    return [same(expected, here.queue.dequeue(timeout=30)) for expected in messages()[:count]]


@pytest.mark.parametrize("parts", PARTS)
def test_every_kind_of_message_comes_bit_exact_here_and_there(fleet, parts):
    torch.manual_seed(3)
    sent = messages()
    with remotes.make(3, **PARTS[parts]) as queue:
        near = fleet.readers(queue, 0)
        far = remotes.readers_afar(fleet, queue.export_handle(), 1, 2)
        calls = [worker.begin(take_and_compare, len(sent), 3) for worker in [*near, *far]]
        for message in sent:
            queue.enqueue(message, timeout=30)
        for call in calls:
            assert call.result() == [True] * len(sent)
        eventually(lambda: set(queue.statistics().lag_by_reader.values()) == {0})
        eventually(lambda: queue.statistics().holds_used == 0)
        told = queue.statistics()
        if parts == "inline and block":
            assert told.messages_by_path["block"] == 7
            assert told.fallbacks == {"remote_reader": 7}
            assert near[0].call(statistics).errors == {}


def test_bytes_are_those_at_enqueue_whatever_becomes_of_them_after_it(fleet):
    """Case 9, the remote leg: inline, block, fragments."""
    with remotes.make(1, max_arena_bytes=16 << 20, slots=8) as queue:
        (far,) = remotes.readers_afar(fleet, queue.export_handle(), 0)
        tensors = [torch.full((count,), 1, dtype=torch.int32) for count in (10, 200_000, 3_000_000, 5_000_000)]
        call = far.begin(sums, len(tensors))
        for tensor in tensors:
            queue.enqueue(tensor, timeout=30)
            tensor.fill_(2)
        assert call.result() == [len(tensor) for tensor in tensors]
        assert queue.statistics().messages_by_path["fragments"] == 1, "the largest is larger than the arena"
        assert queue.statistics().messages_by_path["remote"] == 2, "there is no reader here for whom they are in place"


def sums(here: Here, count: int) -> list[int]:
    return [int(here.queue.dequeue(timeout=30).sum()) for _ in range(count)]


def test_what_a_remote_reader_keeps_holds_no_block(fleet):
    with remotes.make(1, max_arena_bytes=64 << 20) as queue:
        (far,) = remotes.readers_afar(fleet, queue.export_handle(), 0)
        queue.enqueue(torch.ones(1_000_000), timeout=30)
        far.call(keep, "tensor")
        eventually(lambda: queue.statistics().holds_used == 0)
        far.call(drop)


# ── who holds the line ───────────────────────────────────────────────────────────────────────────
def test_a_slow_remote_reader_is_named_and_nothing_is_dropped(fleet):
    with remotes.make(2, slots=8, on_reader_death="raise") as queue:
        (near,) = fleet.readers(queue, 0)
        (far,) = remotes.readers_afar(fleet, queue.export_handle(), 1)
        taken = near.begin(drain, 8)
        for number in range(8):
            queue.enqueue(number, timeout=30)
        assert taken.result() == list(range(8))
        with pytest.raises(QueueTimeout) as caught:
            queue.enqueue(8, timeout=0.3)
        told = str(caught.value)
        assert f"awaiting_readers reader 1 ({os.uname().nodename}:{far.pid}) lag 8" in told
        assert "reader 0" not in told
        assert queue.statistics().lag_by_reader == {0: 0, 1: 8}
        assert queue.statistics().blocked_s_by_reader[1] > 0.2
        assert far.call(drain, 8) == list(range(8))
        eventually(lambda: queue.statistics().lag_by_reader == {0: 0, 1: 0})
        queue.enqueue(9, timeout=30)
        assert (near.call(dequeue), far.call(dequeue)) == (9, 9)


def test_observers_see_a_remote_reader_like_any_other(fleet, run_dir):
    with remotes.make(2, slots=8) as queue:
        fleet.readers(queue, 0)
        (far,) = remotes.readers_afar(fleet, queue.export_handle(), 1)
        queue.enqueue(torch.ones(100_000), timeout=30)
        far.call(dequeue)
        (directory,) = run_dir.glob("queue@*")
        (path,) = [page for page in pages(directory) if page.name.startswith("reader-1-")]
        with ProbeReader(path) as page:
            assert page.about["where"] == f"{os.uname().nodename}:{far.pid}"
            eventually(lambda: page.sequence == 1)
            eventually(lambda: value(page, "remote_sent_bytes_total") > 400_000)
            waiting = far.begin(dequeue)
            eventually(lambda: page.wait().since_ns, within=20)
        queue.enqueue("go on", timeout=30)
        waiting.result()
        far.call(shut_down)
    eventually(lambda: not path.exists())  # a page goes with its reader


def value(page: ProbeReader, name: str) -> int:
    values = page.values()
    return sum(values[one.word] for one in page.series if one.name == name)


def test_a_reader_that_computes_is_alive_however_long_it_holds_the_gil(fleet):
    with remotes.make(1, remote=RemoteConfig("127.0.0.1", timeout_s=0.5)) as queue:
        (far,) = remotes.readers_afar(fleet, queue.export_handle(), 0)
        working = far.begin(hold_the_gil, 2)
        while not working.done():
            queue.enqueue("busy is not dead", timeout=30)
            time.sleep(0.05)
        assert far.call(dequeue) == "busy is not dead"
        assert queue.statistics().peers == {0: "attached"}


# ── death ────────────────────────────────────────────────────────────────────────────────────────
def test_a_killed_remote_reader_is_reported_once_and_its_rank_may_be_taken_again(fleet, run_dir):
    with remotes.make(2, remote=RemoteConfig("127.0.0.1", timeout_s=1.0), slots=8) as queue:
        (near,) = fleet.readers(queue, 0)
        (far,) = remotes.readers_afar(fleet, queue.export_handle(), 1)
        queue.enqueue(torch.ones(1_000_000), timeout=30)
        far.kill()
        with pytest.raises(PeerDied) as caught:
            for number in range(1000):
                queue.enqueue(number, timeout=30)
                near.call(dequeue)
        assert (caught.value.rank, caught.value.pid, caught.value.signal) == (1, far.pid, None)
        assert f"reader 1 ({os.uname().nodename}:{far.pid})" in str(caught.value)
        assert "no sign of life" in str(caught.value)
        queue.enqueue("without it", timeout=30)
        (again,) = remotes.readers_afar(fleet, queue.export_handle(), 1)
        queue.enqueue("with its successor", timeout=30)
        assert again.call(dequeue) == "with its successor"


def test_a_stopped_remote_reader_is_dead_and_takes_nothing_more_when_it_goes_on(fleet):
    with remotes.make(2, remote=RemoteConfig("127.0.0.1", timeout_s=1.0), on_reader_death="continue") as queue:
        fleet.readers(queue, 0)
        (far,) = remotes.readers_afar(fleet, queue.export_handle(), 1)
        far.freeze()
        eventually(lambda: queue.statistics().peers[1] == "dead" or not _look(queue))
        far.thaw()
        numbers, error = far.call(drain_to_the_end)
        assert numbers == list(range(len(numbers))), "what had come to it before, and nothing out of turn"
        assert "taken for dead" in error
        with pytest.raises(PeerDied, match="taken for dead"):
            far.call(dequeue)


def _look(queue: MessageQueue) -> bool:
    """Let the writer look after its readers; it does so when it sends."""
    queue.enqueue(queue.statistics().published, timeout=30)
    time.sleep(0.05)
    return True


def drain_to_the_end(here: Here) -> tuple[list[int], str]:
    taken = []
    while True:
        try:
            taken.append(here.queue.dequeue(timeout=30))
        except PeerDied as error:
            return taken, str(error)


def test_after_the_writers_death_remote_readers_get_what_was_published(fleet):
    writer = fleet.start()
    handle = writer.call(remotes.create, 1)
    (far,) = remotes.readers_afar(fleet, handle, 0)
    writer.call(enqueue, 1, torch.full((500_000,), 2), 3)
    writer.kill()
    assert far.call(dequeue) == 1
    assert int(far.call(dequeue)[0]) == 2
    assert far.call(dequeue) == 3
    with pytest.raises(PeerDied) as caught:
        far.call(dequeue)
    assert caught.value.rank is None
    assert caught.value.pid == writer.pid


def test_when_the_forwarder_is_killed_both_ends_hear_of_it_and_another_takes_its_place(fleet):
    warnings: list[str] = []
    remote = RemoteConfig("127.0.0.1", timeout_s=20.0)
    with MessageQueue(2, config=QueueConfig(slots=8), remote=remote, on_warning=warnings.append) as queue:
        (near,) = fleet.readers(queue, 0)
        (far,) = remotes.readers_afar(fleet, queue.export_handle(), 1)
        for time_ in range(2):
            first, forwarder = queue.statistics().published, remotes.forwarder_of(queue)
            queue.enqueue(first, timeout=30)
            assert far.call(dequeue) == first
            waiting = far.begin(dequeue, None)
            os.kill(forwarder, 9)
            with pytest.raises(PeerDied, match=f"with the forwarder \\(pid {forwarder}\\)") as caught:
                for number in range(first + 1, first + 1000):
                    queue.enqueue(number, timeout=30)
                    time.sleep(0.005)
                    near.call(dequeue)
            assert caught.value.rank == 1
            with pytest.raises(PeerDied, match=r"died with the forwarder .* attach again"):
                waiting.result()
            while queue.statistics().lag_by_reader[0]:  # the one beside the writer is unharmed, and misses nothing
                near.call(dequeue)
            eventually(lambda: remotes.forwarder_of(queue) != forwarder)  # noqa: B023 - called at once
            (far,) = remotes.readers_afar(fleet, queue.export_handle(), 1)
            queue.enqueue("go on", timeout=30)
            assert (near.call(dequeue), far.call(dequeue)) == ("go on", "go on")
            assert len(warnings) == time_ + 1
            assert f"(pid {forwarder}) ended with -9" in warnings[-1]
        forwarder = remotes.forwarder_of(queue)
        far.call(shut_down)
    eventually(lambda: process_state(forwarder) == "X")


def test_a_forwarder_that_ends_again_and_again_is_given_up(run_dir, monkeypatch):
    monkeypatch.setattr("arena.remote.forwarder._PAUSE_S", 0.001)
    warnings: list[str] = []
    with MessageQueue(1, remote="127.0.0.1", on_warning=warnings.append) as queue:
        while not any("no reader on another host can attach any more" in one for one in warnings):
            told, forwarder = len(warnings), remotes.forwarder_of(queue)
            os.kill(forwarder, 9)
            eventually(lambda: len(warnings) > told)  # noqa: B023 - called at once
            if "can attach any more" not in warnings[-1]:
                eventually(lambda: remotes.forwarder_of(queue) != forwarder)  # noqa: B023 - called at once
        assert len(warnings) == 6


# ── closing ──────────────────────────────────────────────────────────────────────────────────────
def test_shutdown_of_the_writer_ends_a_wait_on_another_host_and_then_the_forwarder(fleet):
    queue = remotes.make(1)
    (far,) = remotes.readers_afar(fleet, queue.export_handle(), 0)
    forwarder = remotes.forwarder_of(queue)
    queue.enqueue("last", timeout=30)
    waiting = far.begin(drain, 2, None)
    time.sleep(0.2)
    with within(5):
        queue.shutdown()
        with pytest.raises(QueueClosed, match="by its writer"):
            waiting.result()
    eventually(lambda: process_state(forwarder) == "X")


def test_shutdown_from_another_thread_ends_a_wait(run_dir, monkeypatch):
    with remotes.make(1) as queue:
        monkeypatch.setenv("ARENA_HOST_ID", "elsewhere")
        reader = MessageQueue.create_from_handle(queue.export_handle(), 0)
        threading.Timer(0.2, reader.shutdown).start()
        with within(10), pytest.raises(QueueClosed, match="by this end"):
            reader.dequeue()
        eventually(lambda: queue._roster.reap() or queue.statistics().peers == {0: "left"})  # type: ignore[attr-defined]


def test_a_dequeue_that_times_out_keeps_its_place(run_dir, monkeypatch):
    with remotes.make(1) as queue:
        monkeypatch.setenv("ARENA_HOST_ID", "elsewhere")
        with MessageQueue.create_from_handle(queue.export_handle(), 0) as reader:
            with pytest.raises(QueueTimeout, match="awaiting_write of frame 0"):
                reader.dequeue(timeout=0.05)
            assert reader.statistics().errors == {"timeout": 1}
            queue.wait_until_ready(30)
            reader.wait_until_ready(30)
            queue.enqueue(["first"])
            queue.enqueue(torch.ones(200_000))
            assert reader.dequeue(timeout=30) == ["first"]
            assert reader.dequeue(timeout=30).sum() == 200_000
            assert reader.statistics().lag_by_reader == {0: 0}
            assert "reader 0 of tcp://127.0.0.1:" in repr(reader)


def test_what_cannot_be_unpickled_is_consumed_and_the_next_one_comes(fleet):
    with remotes.make(1) as queue:
        (far,) = remotes.readers_afar(fleet, queue.export_handle(), 0)
        queue.enqueue(Explosive())
        queue.enqueue("next")
        with pytest.raises(Exception, match="could not be unpickled"):
            far.call(dequeue)
        assert far.call(dequeue) == "next"


class Explosive:
    def __reduce__(self) -> Any:
        return int, ("no number",)


def test_a_forked_child_cannot_use_what_it_inherited(fleet):
    with remotes.make(1) as queue:
        (far,) = remotes.readers_afar(fleet, queue.export_handle(), 0)
        assert "UseAfterFork" in far.call(use_in_a_child)
        queue.enqueue("still there")
        assert far.call(dequeue) == "still there"


def use_in_a_child(here: Here) -> str:
    read, write = os.pipe()
    if not os.fork():
        try:
            here.queue.dequeue(timeout=1)
        except Exception as error:
            os.write(write, type(error).__name__.encode())
        os._exit(0)
    os.wait()
    return os.read(read, 100).decode()


def test_a_child_forked_from_the_writer_attaches_and_keeps_no_forwarder_alive(run_dir):
    queue = remotes.make(1)
    forwarder = remotes.forwarder_of(queue)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        os.environ["ARENA_HOST_ID"] = "elsewhere"
        reader = MessageQueue.create_from_handle(queue.export_handle(), 0, timeout=30)
        os.write(write, str(reader.dequeue(timeout=30)).encode())
        reader.shutdown()
        time.sleep(30)
        os._exit(0)
    try:
        queue.enqueue("to the child", timeout=30)
        assert os.read(read, 100) == b"to the child"
        queue.shutdown()
        eventually(lambda: process_state(forwarder) == "X")
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


# ── attaching ────────────────────────────────────────────────────────────────────────────────────
def test_only_the_address_that_was_asked_for_is_listened_on(run_dir):
    with remotes.make(1, remote="127.0.0.2") as queue:
        handle = queue.export_handle()
        assert remotes.listening(remotes.forwarder_of(queue)) == {("127.0.0.2", remotes.port_of(handle))}
        assert "secret" not in repr(handle), "a handle in a log gives nobody anything"
    with MessageQueue(1) as plain:
        assert plain.export_handle().remote is None, "without an address nothing listens"


def test_an_address_that_cannot_be_bound_says_why(run_dir):
    with pytest.raises(InvalidArgument, match="192\\.0\\.2\\.1 can't be listened on"):
        remotes.make(1, remote="192.0.2.1")
    with pytest.raises(InvalidArgument, match="no-such-host"):
        remotes.make(1, remote="no-such-host.invalid")
    with remotes.make(1) as queue:
        taken = f"127.0.0.1:{remotes.port_of(queue.export_handle())}"
        with pytest.raises(InvalidArgument, match=taken):
            remotes.make(1, remote=taken)
    assert list(run_dir.iterdir()) == [], "what came to nothing leaves nothing"


def test_a_reader_says_what_is_wrong_with_the_address(run_dir, monkeypatch):
    with remotes.make(1, remote=RemoteConfig("127.0.0.1", connect="no-such-host.invalid")) as queue:
        handle = queue.export_handle()
        monkeypatch.setenv("ARENA_HOST_ID", "elsewhere")
        with pytest.raises(HandleMismatch, match="means nothing on this host"):
            MessageQueue.create_from_handle(handle, 0)
    with remotes.make(1) as queue:
        gone = queue.export_handle()
    monkeypatch.setenv("ARENA_HOST_ID", "another")
    with pytest.raises(QueueClosed, match="is gone"):
        MessageQueue.create_from_handle(gone, 0, timeout=30)
    with MessageQueue(1) as queue, pytest.raises(HandleMismatch, match="has no address for readers on other hosts"):
        handle = queue.export_handle()
        monkeypatch.setenv("ARENA_HOST_ID", "a third")
        MessageQueue.create_from_handle(handle, 0)


def test_one_reader_a_rank(fleet):
    with remotes.make(2) as queue:
        handle = queue.export_handle()
        (first,) = remotes.readers_afar(fleet, handle, 1)
        second = fleet.start()
        for rank, trouble in ((1, "rank 1 is taken"), (2, "there is no rank 2"), (-1, "there is no rank -1")):
            with pytest.raises(AttachRefused, match=trouble):
                second.call(remotes.attach_from_afar, handle, rank)
        with pytest.raises(InvalidArgument, match="rank is of the wrong type"):
            second.call(remotes.attach_from_afar, handle, "0")
        queue.enqueue("undisturbed")
        assert first.call(dequeue) == "undisturbed"


def test_a_reader_here_takes_the_short_way_though_there_is_an_address(run_dir):
    with remotes.make(1) as queue, MessageQueue.create_from_handle(queue.export_handle(), 0) as reader:
        assert type(reader).__name__ == "Reader"
        assert f"reader 0 (pid {os.getpid()})" in queue._roster.seats[0].describe()  # type: ignore[attr-defined]


def test_a_reader_that_leaves_may_be_followed_by_another_from_anywhere(fleet):
    with remotes.make(2) as queue:
        handle = queue.export_handle()
        fleet.readers(queue, 0)
        (far,) = remotes.readers_afar(fleet, handle, 1)
        far.call(shut_down)
        eventually(lambda: _look(queue) and queue.statistics().peers[1] == "left")
        (near,) = fleet.readers(queue, 1)
        queue.enqueue("from here on")
        assert near.call(dequeue) == "from here on"


def test_without_the_extra_the_error_names_it(run_dir):
    program = (
        "import sys; sys.modules['zmq'] = None\n"
        "from arena import MessageQueue\n"
        "try: MessageQueue(1, remote='127.0.0.1')\n"
        "except ImportError as error: print(type(error).__name__, error)\n"
    )
    root = Path(__file__).parent.parent
    ran = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True)
    assert ran.stdout.startswith("MissingLibrary pyzmq is not installed")
    assert "arena-dataplane[remote]" in ran.stdout


def test_the_forwarder_needs_no_torch(run_dir):
    with remotes.make(1) as queue:
        maps = Path(f"/proc/{remotes.forwarder_of(queue)}/maps").read_text()
        assert "libzmq" in maps
        assert "libtorch" not in maps


def test_settings_travel_in_the_handle(run_dir):
    with remotes.make(1, remote=RemoteConfig("127.0.0.1", timeout_s=9.0, window_bytes=5 << 20)) as queue:
        remote = queue.export_handle().remote
        assert remote is not None
        assert (remote.timeout_s, remote.window_bytes) == (9.0, 5 << 20)
    with pytest.raises(InvalidArgument, match="readers on other hosts need an address"):
        MessageQueue(2, 1, config=QueueConfig())
