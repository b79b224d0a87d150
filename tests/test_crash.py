"""Death and interruption: of a reader, of the writer, of the whole tree, in the middle of anything; and damage."""

import ctypes
import gc
import os
import random
import resource
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from arena import MessageQueue, QueueConfig, layout
from arena.errors import (
    ArenaError,
    CorruptFrame,
    DecodeFailed,
    HandleMismatch,
    NoReader,
    PeerDied,
    QueueClosed,
    QueueTimeout,
)
from arena.probe import collect_garbage
from arena.probe.directory import KEPT_DEAD
from tests.support import fleet as hand
from tests.support.fleet import Here, eventually, within

pytestmark = pytest.mark.usefixtures("run_dir")


class Thread(threading.Thread):
    """Runs a function; `result` is what it returned or raised, `ended` when."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._function = function
        self.start()

    def run(self) -> None:
        try:
            self._result = self._function()
        except BaseException as error:
            self._result = error
        self.ended = time.monotonic()

    def result(self) -> Any:
        self.join(hand.A_WHILE_S)
        assert not self.is_alive()
        return self._result


# ── 3. a dead reader ─────────────────────────────────────────────────────────────────────────────
def test_a_reader_killed_on_a_full_ring_is_named_at_once_and_the_others_lose_nothing(fleet, record_property):
    with MessageQueue(4, config=QueueConfig(slots=8)) as queue:
        readers = fleet.readers(queue)
        for number in range(8):
            queue.enqueue(number)
        waiting = Thread(lambda: queue.enqueue("refused", timeout=30))
        eventually(lambda: queue.statistics().state == "waiting")
        killed = time.monotonic()
        readers[2].kill()
        error = waiting.result()
        record_property("seconds to PeerDied at the writer", waiting.ended - killed)
        assert waiting.ended - killed < 5
        assert isinstance(error, PeerDied)
        assert (error.rank, error.pid, error.signal) == (2, readers[2].pid, signal.SIGKILL)
        assert "SIGKILL" in str(error)
        assert queue.statistics().peers == {0: "attached", 1: "attached", 2: "dead", 3: "attached"}

        survivors = [readers[rank] for rank in (0, 1, 3)]
        draining = [reader.begin(hand.drain, 9) for reader in survivors]
        queue.enqueue("goes on", timeout=20)  # said once
        assert [call.result() for call in draining] == [[*range(8), "goes on"]] * 3
        with within(5):
            queue.shutdown()


def test_a_death_that_the_writer_does_not_want_to_hear_of_is_only_counted(fleet):
    with MessageQueue(2, config=QueueConfig(slots=4, on_reader_death="continue")) as queue:
        stays, dies = fleet.readers(queue)
        for number in range(4):
            queue.enqueue(number)
        assert stays.call(hand.drain, 4) == [0, 1, 2, 3]
        waiting = Thread(lambda: queue.enqueue("goes on", timeout=30))
        eventually(lambda: queue.statistics().state == "waiting")
        dies.kill()
        assert waiting.result() is None
        assert stays.call(hand.dequeue) == "goes on"
        assert queue.statistics().errors == {"peer_died": 1}


def test_every_death_is_told_once_and_then_that_nobody_is_left(fleet):
    with MessageQueue(3) as queue:
        readers = fleet.readers(queue)
        for reader in readers:
            os.kill(reader.pid, signal.SIGTERM if reader is readers[1] else signal.SIGKILL)
        for reader in readers:
            reader.wait_end()
        told = []
        for _ in range(3):
            with pytest.raises(PeerDied) as caught:
                eventually(lambda: queue.enqueue("anybody?", timeout=5))
            told.append((caught.value.rank, caught.value.signal))
        assert sorted(told) == [(0, signal.SIGKILL), (1, signal.SIGTERM), (2, signal.SIGKILL)]
        with pytest.raises(NoReader):
            queue.enqueue("nobody")
        with within(5):
            queue.shutdown()


def test_a_reader_that_is_dead_and_not_reaped_is_dead_and_its_signal_known(run_dir):
    """Its parent, and not the writer's process, would have to reap it, and does not."""
    with MessageQueue(1, config=QueueConfig(slots=2)) as queue:
        handle = queue.export_handle()
        told, tell = os.pipe()
        parent = os.fork()
        if parent == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(60)
            child = os.fork()
            if child == 0:
                signal.alarm(60)
                reader = MessageQueue.create_from_handle(handle, 0)
                os.write(tell, b"%d\n" % os.getpid())
                reader.dequeue()
            time.sleep(60)
            os._exit(0)
        with open(told) as pipe:
            child = int(pipe.readline())
        try:
            os.kill(child, signal.SIGKILL)
            eventually(lambda: hand.process_state(child) == "Z")
            with within(10), pytest.raises(PeerDied) as caught:
                while True:
                    queue.enqueue("filling up", timeout=5)
            assert (caught.value.pid, caught.value.signal) == (child, signal.SIGKILL)
        finally:
            os.kill(parent, signal.SIGKILL)
            os.waitpid(parent, 0)
            os.close(tell)


def test_a_reader_killed_within_a_message_of_many_frames_does_not_stop_it(fleet):
    with MessageQueue(2, config=QueueConfig(slots=4, max_arena_bytes=0)) as queue:
        stays, dies = fleet.readers(queue)
        large = random.Random(1).randbytes(300_000)
        taking = stays.begin(hand.drain, 2)
        sending = Thread(lambda: queue.enqueue(large, timeout=30))
        eventually(lambda: queue.statistics().state == "waiting")  # for the other one
        dies.kill()
        assert sending.result() is None
        with pytest.raises(PeerDied):
            queue.enqueue("next", timeout=20)
        queue.enqueue("next", timeout=20)
        assert taking.result() == [large, "next"]


# ── 4. a dead writer ─────────────────────────────────────────────────────────────────────────────
def stream(here: Here, with_tensor: bool = False) -> None:
    """Send numbers for ever."""
    number = 0
    while True:
        here.queue.enqueue([number, torch.zeros(1 << 15)] if with_tensor else number, timeout=30)
        number += 1


def until_the_end(here: Here) -> tuple[str, int | None, int]:
    """Take messages until an error; its name, its signal, and how many came."""
    taken = 0
    while True:
        try:
            number = here.queue.dequeue()
        except ArenaError as error:
            return type(error).__name__, getattr(error, "signal", None), taken
        number = number[0] if isinstance(number, list) else number
        assert number == taken, f"{number} after {taken}"
        taken += 1


def in_c_then_to_the_end(here: Here, seconds: float) -> tuple[str, int | None, float]:
    """Sit in a C call that holds the interpreter; then the error, and how long after the call it came."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))
    returned = time.monotonic()
    name, number, _ = until_the_end(here)
    return name, number, time.monotonic() - returned


def fork_a_sibling(here: Here) -> int:
    """A child of this process that inherits all it has, and just stays."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)
        while True:
            signal.pause()
    return child


def test_when_the_writer_dies_readers_hear_of_it_whatever_they_do(fleet, run_dir, record_property):
    writer = fleet.start()
    parked, in_c, sibling_owner = (fleet.start() for _ in range(3))
    handle = writer.call(hand.create, 3)
    for rank, reader in enumerate((parked, in_c, sibling_owner)):
        reader.call(hand.attach, handle, rank)
    siblings = [writer.call(fork_a_sibling), sibling_owner.call(fork_a_sibling)]
    try:
        outcomes = [parked.begin(until_the_end), sibling_owner.begin(until_the_end)]
        deaf = in_c.begin(in_c_then_to_the_end, 0.7)
        eventually(lambda: Path(f"/proc/{parked.pid}/wchan").read_text().startswith("futex"))
        killed = time.monotonic()
        writer.kill()
        for call in outcomes:
            assert call.result() == ("PeerDied", signal.SIGKILL, 0)
            record_property("seconds to PeerDied at a parked reader", time.monotonic() - killed)
        assert time.monotonic() - killed < 5
        name, number, after = deaf.result()
        record_property("seconds to PeerDied after a C call", after)
        assert (name, number) == ("PeerDied", signal.SIGKILL)
        assert after < 5
        with pytest.raises(PeerDied):  # nobody listens in the sibling's name
            parked.call(hand.attach, handle, 0, timeout=5)
    finally:
        for sibling in siblings:
            os.kill(sibling, signal.SIGKILL)
    for reader in (parked, in_c, sibling_owner):
        reader.kill()
    for sibling in siblings:
        eventually(lambda sibling=sibling: hand.process_state(sibling) in "XZ")
    assert list(run_dir.iterdir()) != []
    collect_garbage(run_dir)
    assert list(run_dir.iterdir()) == []


@pytest.mark.parametrize("with_tensor", [False, True])
def test_readers_of_a_stream_whose_writer_dies_take_all_that_was_published(fleet, with_tensor, record_property):
    writer = fleet.start()
    readers = [fleet.start() for _ in range(2)]
    handle = writer.call(hand.create, 2)
    for rank, reader in enumerate(readers):
        reader.call(hand.attach, handle, rank)
    taking = [reader.begin(until_the_end) for reader in readers]
    writer.begin(stream, with_tensor)
    eventually(lambda: all(_published(handle) > 50 for _ in readers))
    killed = time.monotonic()
    writer.kill()
    outcomes = [call.result() for call in taking]
    record_property("seconds to PeerDied at a busy reader", time.monotonic() - killed)
    assert [outcome[:2] for outcome in outcomes] == [("PeerDied", signal.SIGKILL)] * 2
    assert outcomes[0][2] == outcomes[1][2] > 50


def _published(handle: Any) -> int:
    from arena.probe import ProbeReader
    from arena.probe.page import L_SEQUENCE

    with ProbeReader(Path(handle.directory) / "writer") as page:
        return page.live(L_SEQUENCE)


def test_a_message_whose_writer_died_half_way_is_not_delivered(fleet):
    writer, reader, holds_the_line = fleet.start(), fleet.start(), fleet.start()
    handle = writer.call(hand.create, 2, slots=4, max_arena_bytes=0)
    reader.call(hand.attach, handle, 0)
    holds_the_line.call(hand.attach, handle, 1)
    writer.call(hand.enqueue, "whole")
    writer.begin(hand.enqueue, bytes(500_000))
    assert reader.call(hand.dequeue) == "whole"
    with pytest.raises(QueueTimeout):
        reader.call(hand.dequeue, timeout=0.2)
    writer.kill()
    for _ in range(2):
        with pytest.raises(PeerDied):
            reader.call(hand.dequeue)


# ── 6. a crash loop ──────────────────────────────────────────────────────────────────────────────
def disk_usage(directory: Path) -> tuple[int, int]:
    """Entries and bytes below a directory."""
    paths = list(directory.rglob("*"))
    return len(paths), sum(path.lstat().st_blocks * 512 for path in paths)


def test_a_crash_loop_fills_nothing_up_and_leaves_the_other_queue_alone(fleet, run_dir):
    with MessageQueue(1, config=QueueConfig(name="engine")) as other:
        (bystander,) = fleet.readers(other)
        usage = []
        for _ in range(KEPT_DEAD + 4):
            writer, *readers = [fleet.start() for _ in range(3)]
            handle = writer.call(hand.create, 2, name="engine")
            for rank, reader in enumerate(readers):
                reader.call(hand.attach, handle, rank)
                reader.begin(until_the_end)
            writer.begin(stream, True)
            eventually(lambda handle=handle: _published(handle) > 20)
            for worker in (writer, *readers):
                os.kill(worker.pid, signal.SIGKILL)
            for worker in (writer, *readers):
                worker.clean_up()
            usage.append(disk_usage(run_dir))
        assert usage[-1] == usage[-2] == usage[KEPT_DEAD + 1]
        other.enqueue("untouched")
        assert bystander.call(hand.dequeue) == "untouched"
        assert len(collect_garbage(run_dir)) == KEPT_DEAD + 1
        assert [path.name for path in run_dir.iterdir()] == [Path(other.export_handle().directory).name]
        other.enqueue(torch.ones(1 << 16))
        assert int(bystander.call(hand.dequeue).sum()) == 1 << 16
        bystander.call(hand.shut_down)
    assert list(run_dir.iterdir()) == []


def test_a_rank_whose_last_reader_left_in_order_leaves_no_page_of_one_that_died_before(fleet, run_dir):
    with MessageQueue(2, config=QueueConfig(name="engine")) as queue:
        directory = Path(queue.export_handle().directory)
        killed, other = fleet.readers(queue)
        killed.kill()
        successor = fleet.start()
        successor.call(hand.attach, queue.export_handle(), 0)
        assert len(list(directory.glob("reader-0-*"))) == 2, "the dead one's is there for a post-mortem"
        successor.call(hand.shut_down)
        assert list(directory.glob("reader-0-*")) == []
        other.call(hand.shut_down)


# ── ctrl-C at any moment ─────────────────────────────────────────────────────────────────────────
class Interrupts:
    """Ctrl-C after a random fraction of a moment, once for each time it is armed."""

    def __init__(self, seed: int, longest_s: float) -> None:
        self._random = random.Random(seed)
        self._longest_s = longest_s
        self.armed = False  # a plain store: no interrupt can strike while it is cleared
        signal.signal(signal.SIGINT, self._handle)
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))

    def _handle(self, *_: object) -> None:
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt

    def arm(self) -> None:
        self.armed = True
        signal.setitimer(signal.ITIMER_REAL, self._random.uniform(1e-6, self._longest_s))


def message(number: int) -> Any:
    """Each path in turn: inline, a table in one slot, a block, a block and fragments, fragments."""
    kind = number % 5
    if kind == 1:
        return [number, torch.full((300,), number)]
    if kind == 2:
        return [number, torch.full((9_000,), number)]
    if kind == 3:
        return [number, torch.full((9_000,), number), bytes(9_000)]
    if kind == 4:
        return [number, bytes(9_000)]
    return [number]


STORM = {
    "slots": 16,
    "slot_bytes": 4096,
    "segment_bytes": 1 << 18,
    "max_arena_bytes": 1 << 18,
    "max_holds": 8,
}
LONGEST_S = {"short": 2e-4, "long": 2e-3}


def send_interrupted(here: Here, count: int, seed: int, longest_s: float) -> tuple[list[int], list[int]]:
    """Send numbered messages, interrupting each call: the numbers of those that returned, and of those that did not."""
    interrupts = Interrupts(seed, longest_s)
    sent, torn = [], []
    for number in range(count):
        try:
            interrupts.arm()
            here.queue.enqueue(message(number), timeout=30)
            interrupts.armed = False
            sent.append(number)
        except KeyboardInterrupt:
            torn.append(number)
        except BaseException:
            interrupts.armed = False
            raise
    here.queue.enqueue(None, timeout=30)
    return sent, torn


def take_all(here: Here) -> list[int]:
    """Take messages until None; their numbers, each checked for what belongs to it."""
    taken = []
    while (obj := here.queue.dequeue(timeout=30)) is not None:
        _check(obj)
        taken.append(obj[0])
    return taken


def _check(obj: Any) -> None:
    expected = message(obj[0])
    assert len(obj) == len(expected), obj
    for part, wanted in zip(obj, expected, strict=True):
        same = torch.equal(part, wanted) if isinstance(wanted, torch.Tensor) else part == wanted
        assert same, f"message {obj[0]} is not as it was sent"


def accounts(here: Here) -> tuple[int, int]:
    """Holds and bytes in use at the writer, once it has looked for what came back."""
    with here.queue.lend((STORM["max_arena_bytes"],), torch.uint8):
        pass
    gc.collect()
    with here.queue.lend((1,), torch.uint8):
        pass
    told = here.queue.statistics()
    return told.holds_used, told.arena_used_bytes


@pytest.mark.parametrize("longest", LONGEST_S)
@pytest.mark.parametrize("seed", range(2))
def test_ctrl_c_within_enqueue_loses_and_doubles_nothing_but_the_message_it_hit(fleet, longest, seed):
    writer, reader = fleet.start(), fleet.start()
    reader.call(hand.attach, writer.call(hand.create, 1, **STORM), 0)
    taking = reader.begin(take_all)
    sent, torn = writer.call(send_interrupted, 2000, seed, LONGEST_S[longest])
    taken = taking.result()
    assert len(torn) > 20
    assert taken == sorted(set(taken))
    assert set(sent) <= set(taken) <= set(sent) | set(torn)
    holds, used_bytes = writer.call(accounts)
    assert (holds, used_bytes) == (0, 0)
    assert writer.call(hand.statistics).fallbacks.keys() <= {"arena_full", "arena_fragmented", "holds_exhausted"}


def lend_interrupted(here: Here, count: int, seed: int, longest_s: float) -> tuple[list[int], list[int]]:
    """The same for tensors that are born in the arena; where there is no room, in ordinary memory."""
    interrupts = Interrupts(seed, longest_s)
    sent, torn = [], []
    for number in range(count):
        lent = None
        try:
            interrupts.arm()
            with here.queue.lend((70_000,), torch.uint8, or_private=True) as lent:
                lent.fill_(number % 251)
                here.queue.enqueue([number, lent], timeout=30)
            interrupts.armed = False
            sent.append(number)
        except KeyboardInterrupt:
            torn.append(number)
        except BaseException:
            interrupts.armed = False
            raise
    del lent
    here.queue.enqueue(None, timeout=30)
    return sent, torn


def take_lent(here: Here) -> list[int]:
    taken = []
    while (obj := here.queue.dequeue(timeout=30)) is not None:
        assert obj[1].numel() == 70_000
        assert bool((obj[1] == obj[0] % 251).all()), f"message {obj[0]} is not as it was sent"
        taken.append(obj[0])
    return taken


@pytest.mark.parametrize("longest", LONGEST_S)
def test_ctrl_c_around_a_lent_tensor_leaves_no_block_behind(fleet, longest):
    writer, reader = fleet.start(), fleet.start()
    reader.call(hand.attach, writer.call(hand.create, 1, **STORM), 0)
    taking = reader.begin(take_lent)
    sent, torn = writer.call(lend_interrupted, 1000, 3, LONGEST_S[longest])
    taken = taking.result()
    assert len(torn) > 20
    assert taken == sorted(set(taken))
    assert set(sent) <= set(taken) <= set(sent) | set(torn)
    assert writer.call(accounts) == (0, 0)


def take_interrupted(here: Here, seed: int, longest_s: float) -> tuple[list[int], int]:
    """Take messages until None, interrupting each call: the numbers that came, and how often a call was torn."""
    interrupts = Interrupts(seed, longest_s)
    taken, torn = [], 0
    while True:
        try:
            interrupts.arm()
            obj = here.queue.dequeue(timeout=30)
            interrupts.armed = False
            if obj is None:
                return taken, torn
            _check(obj)
            taken.append(obj[0])
        except KeyboardInterrupt:
            torn += 1
        except BaseException:
            interrupts.armed = False
            raise
        obj = None


def take_the_rest(here: Here) -> None:
    """Take messages until one is waited for: then what an interrupt kept from being given back is made up for."""
    while True:
        try:
            here.queue.dequeue(timeout=0.1)
        except QueueTimeout:
            return


def send_all(here: Here, count: int) -> None:
    for number in range(count):
        here.queue.enqueue(message(number), timeout=30)
    for _ in range(50):
        here.queue.enqueue(None, timeout=30)


@pytest.mark.parametrize("longest", LONGEST_S)
@pytest.mark.parametrize("seed", range(2))
def test_ctrl_c_within_dequeue_loses_and_doubles_nothing_but_the_message_it_hit(fleet, longest, seed):
    writer, reader = fleet.start(), fleet.start()
    reader.call(hand.attach, writer.call(hand.create, 1, **(STORM | {"slots": 64})), 0)
    sending = writer.begin(send_all, 2000)
    taken, torn = reader.call(take_interrupted, seed, LONGEST_S[longest])
    sending.result()
    assert torn > 20
    assert taken == sorted(set(taken))
    assert 2000 - len(taken) <= torn
    reader.call(take_the_rest)
    assert writer.call(accounts) == (0, 0)


def wait_interrupted(here: Here, count: int) -> Counter[str]:
    """Be interrupted while waiting for a message, again and again."""
    interrupts = Interrupts(7, 0.02)
    outcomes: Counter[str] = Counter()
    for _ in range(count):
        try:
            interrupts.arm()
            here.queue.dequeue(timeout=0.02)
        except (KeyboardInterrupt, QueueTimeout) as error:
            interrupts.armed = False
            outcomes[type(error).__name__] += 1
    return outcomes


def test_ctrl_c_within_a_wait_leaves_the_reader_waiting_for_the_same_message(fleet):
    with MessageQueue(1) as queue:
        (reader,) = fleet.readers(queue)
        outcomes = reader.call(wait_interrupted, 60)
        assert outcomes["KeyboardInterrupt"] > 20
        waiting = reader.begin(hand.dequeue)
        queue.enqueue("here at last")
        assert waiting.result() == "here at last"
        assert queue.statistics().lag_by_reader == {0: 0}


# ── damage ───────────────────────────────────────────────────────────────────────────────────────
def test_nobody_but_its_owner_can_write_into_a_segment(run_dir):
    with MessageQueue(1) as queue, MessageQueue.create_from_handle(queue.export_handle(), 0):
        queue.enqueue(torch.zeros(1 << 16))
        refused = 0
        for name in os.listdir("/proc/self/fd"):
            path = f"/proc/self/fd/{name}"
            try:
                if "memfd:arena:" not in os.readlink(path):
                    continue
            except OSError:
                continue
            fd = os.open(path, os.O_RDWR)
            try:
                for act in (lambda fd=fd: os.pwrite(fd, b"x", 0), lambda fd=fd: os.ftruncate(fd, 0)):
                    with pytest.raises(PermissionError):
                        act()
                refused += 1
            finally:
                os.close(fd)
        assert refused >= 2


def damaged(here: Here, kind: str, seed: int) -> list[str]:
    """Send two messages, let `kind` damage the shared memory in between, and name what the reader makes of it."""
    resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))  # a damaged length must not take the host's memory
    chance = random.Random(seed)
    config = QueueConfig(slots=8, slot_bytes=4096, max_arena_bytes=1 << 20, segment_bytes=1 << 20)
    with (
        MessageQueue(1, config=config) as queue,
        MessageQueue.create_from_handle(queue.export_handle(), 0) as reader,
    ):
        queue.enqueue(DAMAGED_MESSAGES[seed % len(DAMAGED_MESSAGES)])
        ring = queue._segment.mapping.view()
        control = reader._ring.control
        DAMAGE[kind](ring, control, chance)
        outcomes = []
        for _ in range(3):
            try:
                outcomes.append("a message" if reader.dequeue(timeout=0.05) is not None else "None")
            except ArenaError as error:
                outcomes.append(type(error).__name__)
            try:
                queue.enqueue("another", timeout=0.05)
            except ArenaError as error:
                outcomes.append(f"writer: {type(error).__name__}")
        queue.statistics(), reader.statistics(), repr(queue), repr(reader)
        return outcomes


DAMAGED_MESSAGES: list[Any] = [
    {"step": 1},
    [torch.arange(100), "a table in the slot"],
    [torch.zeros(20_000), "a block"],
    "x" * 20_000,
]


def _words(view: memoryview, offset: int, count: int) -> memoryview:
    return view[offset : offset + 8 * count].cast("Q")


def _set(offset: int, value: int) -> Callable[..., None]:
    def damage(ring: memoryview, control: Any, chance: random.Random) -> None:
        _words(ring, offset, 1)[0] = value

    return damage


def _noise(offset: int, length: int, share: float = 1.0) -> Callable[..., None]:
    def damage(ring: memoryview, control: Any, chance: random.Random) -> None:
        for at in range(offset, offset + length):
            if chance.random() < share:
                ring[at] = chance.randrange(256)

    return damage


def _consumed(value: int) -> Callable[..., None]:
    def damage(ring: memoryview, control: Any, chance: random.Random) -> None:
        control[layout.CONSUMED] = value

    return damage


_SLOT = layout.SLOTS_OFFSET
_PAYLOAD = _SLOT + layout.PAYLOAD_OFFSET
_PUBLISHED = layout.LIVE_OFFSET + 8 * layout.PUBLISHED
DAMAGE: dict[str, Callable[..., None]] = {
    "noise over the header": _noise(_SLOT, layout.PAYLOAD_OFFSET),
    "some noise in the header": _noise(_SLOT, layout.PAYLOAD_OFFSET, 0.1),
    "noise over the slot": _noise(_SLOT, 4096),
    "noise over the table": _noise(_PAYLOAD, 24),
    "noise over the holds": _noise(_PAYLOAD + 24, 40),
    "a little noise in table and holds": _noise(_PAYLOAD, 64, 0.05),
    "a zeroed slot": lambda ring, control, chance: ring.__setitem__(slice(_SLOT, _SLOT + 4096), bytes(4096)),
    "published far ahead": _set(_PUBLISHED, 1 << 40),
    "published at the end of numbers": _set(_PUBLISHED, (1 << 64) - 2),
    "published back at zero": _set(_PUBLISHED, 0),
    "consumed far ahead": _consumed(1 << 40),
    "consumed at the end of numbers": _consumed((1 << 64) - 1),
    "consumed ahead by one round": _consumed(9),
    "noise over the ranks": _noise(layout.RANKS_OFFSET, 8 * layout.MAX_READERS),
    "noise over the writer's words": _noise(layout.LIVE_OFFSET, 8 * layout.WRITER_WORDS),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_shared_memory_is_an_error_and_never_a_crash_or_a_hang(fleet, kind):
    worker = fleet.start()
    allowed = {
        CorruptFrame.__name__,
        DecodeFailed.__name__,
        QueueTimeout.__name__,
        QueueClosed.__name__,
        "writer: QueueTimeout",
        "writer: NoReader",
        "a message",
    }
    for seed in range(12):
        outcomes = worker.begin(damaged, kind, seed).result(within=20)
        assert set(outcomes) <= allowed, f"seed {seed}"


def test_a_ring_of_another_make_is_not_attached_to(run_dir):
    for word in (layout.IDENTITY_MAGIC, layout.IDENTITY_VERSION, layout.IDENTITY_SLOTS, layout.IDENTITY_SLOT_BYTES):
        with MessageQueue(1) as queue:
            queue._segment.mapping.raw_words(0, layout.IDENTITY_WORDS)[word] ^= 1
            with pytest.raises(HandleMismatch):
                MessageQueue.create_from_handle(queue.export_handle(), 0, timeout=10)
