"""Readers on other hosts: nothing skipped, nothing twice, whatever the network does. Both ends on a fake wire."""

import random
from collections import deque

import pytest

from arena.remote import wire
from arena.remote.inlet import Inlet
from arena.remote.peer import Peer, Unreachable
from arena.remote.standin import Outgoing


class Seat:
    """A stand-in's face, over frames that are simply there."""

    def __init__(self, frames: list[tuple[bytes, list[bytes]]]) -> None:
        self.frames = frames
        self.published = 0
        self.following = 0
        self.ready = True
        self.shown: list[int] = []

    def is_admitted(self) -> bool:
        return True

    def outgoing(self, sequence: int) -> Outgoing:
        assert self.following <= sequence < self.published, "a frame that is taken is no longer in the ring"
        payload, buffers = self.frames[sequence]
        tail = wire.pack_frame_tail(7, 0, (0, 0, 0), [len(buffer) for buffer in buffers], payload)
        return Outgoing(len(payload), tail, [memoryview(buffer) for buffer in buffers])

    def short(self, sequence: int) -> bytes | None:
        out = self.outgoing(sequence)
        return None if out.buffers else out.tail

    def acknowledge(self, following: int) -> None:
        assert following <= self.published
        self.following = max(self.following, following)

    def show(self, state: int, waited_ns: int) -> None:
        self.shown.append(state)

    def sent(self, nbytes: int) -> None:
        pass

    def resent(self, frames: int) -> None:
        pass


class Network:
    """What is under way in both directions, and a peer at each end of it."""

    def __init__(self, frames: list[tuple[bytes, list[bytes]]], window_bytes: int = 1 << 20) -> None:
        self.seat = Seat(frames)
        self.down: deque[tuple[bytes, bytes | None]] = deque()
        self.up: deque[bytes] = deque()
        self.connected = True
        self.peer = Peer(b"one", self.seat, window_bytes, self.post)  # type: ignore[arg-type]
        self.inlet = Inlet(1 << 30)
        self.taken = 0
        self.got: list[tuple[int, bytes, list[bytes]]] = []

    def post(self, identity: bytes, head: bytes, data: memoryview | None = None) -> None:
        if not self.connected:
            raise Unreachable
        self.down.append((head, None if data is None else bytes(data)))

    def break_off(self) -> None:
        """The connection ends, with what is under way downwards; what a reader has said goes out when it is back."""
        self.down.clear()
        self.connected = False

    def be_replaced(self) -> None:
        """Another connection is there at once, and nobody has noticed; what was under way either way is lost."""
        self.down.clear()
        self.up.clear()

    def come_back(self) -> None:
        self.connected = True
        self.peer.probe()

    def deliver_down(self) -> None:
        if not self.down:
            return
        head, data = self.down.popleft()
        message = memoryview(head)
        kind = head[:1]
        if self.inlet.on_short(head):
            whole = True
        elif kind == wire.FRAME:
            whole = self.inlet.on_frame(wire.unpack_frame(message))
        elif kind == wire.CHUNK:
            assert data is not None
            whole = self.inlet.on_chunk(wire.unpack_chunk(message), memoryview(data))
        else:
            ping = wire.unpack_ping(message)
            whole = self.inlet.on_progress(ping.epoch, ping.sent)
            self.tell()
        if not whole:
            self.up.append(wire.pack_resume(self.inlet.epoch, self.inlet.expected))

    def tell(self) -> None:
        inlet = self.inlet
        self.up.append(wire.pack_taken(wire.Taken(0, inlet.epoch, self.taken, inlet.received, 0)))

    def take(self) -> None:
        if self.inlet.complete:
            frame, buffers = self.inlet.complete.popleft()
            self.got.append((frame.sequence, bytes(frame.payload), [bytes(buffer) for buffer in buffers]))
            self.taken = frame.sequence + 1
            self.tell()

    def deliver_up(self) -> None:
        if self.up and self.connected:
            message = self.up.popleft()
            if message[:1] == wire.TAKEN:
                self.peer.on_taken(wire.unpack_taken(message))
            else:
                self.peer.on_resume(*wire.unpack_resume(message))

    def publish(self) -> None:
        self.seat.published = min(len(self.seat.frames), self.seat.published + 1)

    def publish_and_hand_on(self) -> None:
        """As when the forwarder slept: a short frame is sent before anything else is looked at."""
        seen = self.seat.published
        self.publish()
        if self.seat.published == seen + 1 and (tail := self.seat.short(seen)) is not None:
            self.peer.send_short(seen, tail)


def some_frames(chance: random.Random, count: int) -> list[tuple[bytes, list[bytes]]]:
    sizes = [0, 1, 100, wire.CHUNK_BYTES, wire.CHUNK_BYTES + 1, 2 * wire.CHUNK_BYTES + 5]
    frames = []
    for number in range(count):
        n_buffers = chance.choice([0, 0, 0, 1, 2])
        buffers = [bytes([number % 251]) * chance.choice(sizes) for _ in range(n_buffers)]
        frames.append((b"frame %d" % number, buffers))
    return frames


@pytest.mark.parametrize("seed", range(40))
def test_every_frame_comes_once_and_in_order_however_often_the_connection_breaks(seed):
    chance = random.Random(seed)
    frames = some_frames(chance, 20)
    network = Network(frames, window_bytes=chance.choice([1 << 20, 4 << 20]))
    steps = [
        *[network.publish, network.peer.send_some, network.deliver_down, network.deliver_up] * 6,
        *[network.peer.send_some, network.deliver_down, network.take, network.deliver_up] * 6,
        *[network.publish_and_hand_on] * 4,
        network.peer.ping,
        *[network.break_off] * chance.choice([0, 1, 3]),
        *[network.be_replaced] * chance.choice([0, 1, 3]),
        *[network.come_back] * 3,
    ]
    for _ in range(3000):
        chance.choice(steps)()
    for step in range(100_000):  # from here on all is well
        if len(network.got) == len(frames) and network.seat.following == len(frames):
            break
        network.connected = True
        if step % 50 == 0:
            network.peer.probe()
        for do in (network.publish, network.peer.send_some, network.deliver_down, network.take, network.deliver_up):
            do()
    assert network.got == [(number, *frame) for number, frame in enumerate(frames)]
    assert network.seat.following == len(frames)


def test_the_end_is_told_though_the_word_of_what_was_taken_came_after_a_break():
    network = Network([(b"frame", [])] * 3)
    for _ in range(3):
        for do in (network.publish, network.peer.send_some, network.deliver_down, network.take):
            do()
    network.break_off()
    network.peer.ping()  # the forwarder notices
    network.connected = True
    while network.up:
        network.deliver_up()
    assert network.seat.following == 3
    assert not network.peer.send_some()
    assert network.peer.send_end({"kind": "QueueClosed"})


def test_no_more_is_under_way_than_the_window_allows():
    frames = [(b"frame", [bytes(3 * wire.CHUNK_BYTES)])] * 4
    network = Network(frames, window_bytes=2 << 20)
    network.seat.published = 4
    while network.peer.send_some():
        pass
    under_way = sum(len(data) for _, data in network.down if data is not None)
    assert under_way == wire.CHUNK_BYTES, "the payload and a second chunk would be more than the window"
    while network.down:
        network.deliver_down()
    network.tell()
    network.deliver_up()
    assert network.peer.send_some(), "what was received is granted again"


def test_a_ping_that_is_not_answered_is_not_repeated():
    network = Network([])
    for _ in range(10):
        network.peer.ping()
    assert len(network.down) == 1


@pytest.mark.parametrize(
    "taken",
    [
        wire.Taken(0, 0, 5, 0, 0),  # frames that were never sent
        wire.Taken(0, 0, 0, 10_000, 0),  # more bytes than were sent
        wire.Taken(0, 3, 0, 0, 0),  # an epoch to come
    ],
)
def test_a_reader_cannot_have_what_was_never_sent(taken):
    network = Network([(b"one", []), (b"two", [])])
    network.seat.published = 2
    while network.peer.send_some():
        pass
    with pytest.raises(wire.Malformed):
        network.peer.on_taken(taken)
    assert network.seat.following == 0


def test_what_was_said_before_is_no_news():
    network = Network([(b"one", []), (b"two", [])])
    network.seat.published = 2
    while network.peer.send_some():
        pass
    network.peer.on_taken(wire.Taken(0, 0, 2, 6, 0))
    network.peer.on_taken(wire.Taken(0, 0, 1, 3, 0))  # said earlier, heard again
    network.peer.on_resume(0, 0)
    assert network.seat.following == 2
    assert not network.peer.send_some()


@pytest.mark.parametrize("cut", [0, 1, 8, 30, 63])
def test_cut_messages_are_told_from_whole_ones(cut):
    tail = wire.pack_frame_tail(7, 1, (0, 0, 0), [5], b"payload")
    for unpack, message in (
        (wire.unpack_frame, wire.pack_frame(0, 0, 0, tail)),
        (wire.unpack_taken, wire.pack_taken(wire.Taken(0, 0, 0, 0, 0))),
        (wire.unpack_ping, wire.pack_ping(wire.Ping(0, 0, 0, 0))),
        (wire.unpack_chunk, wire.pack_chunk(wire.Chunk(0, 0, 0, 0))),
        (wire.unpack_end, wire.pack_end(0, 0, {})),
        (wire.unpack_resume, wire.pack_resume(0, 0)),
    ):
        if cut < len(message):
            with pytest.raises(wire.Malformed):
                unpack(memoryview(message[:cut]))  # type: ignore[operator]


def test_a_frame_that_announces_too_much_is_refused_before_memory_is_taken():
    inlet = Inlet(1000)
    tail = wire.pack_frame_tail(7, 0, (0, 0, 0), [1 << 60], b"x")
    with pytest.raises(wire.Malformed, match="1000 are allowed"):
        inlet.on_frame(wire.unpack_frame(memoryview(wire.pack_frame(0, 0, 0, tail))))


def test_a_chunk_that_is_too_long_is_refused():
    inlet = Inlet(1000)
    tail = wire.pack_frame_tail(7, 0, (0, 0, 0), [10], b"x")
    assert inlet.on_frame(wire.unpack_frame(memoryview(wire.pack_frame(0, 0, 0, tail))))
    with pytest.raises(wire.Malformed, match="11 bytes at 0 of 10"):
        inlet.on_chunk(wire.Chunk(0, 0, 0, 0), memoryview(bytes(11)))
