"""What comes over the network from those who should not be there, or are not what they say: refused, counted, alone."""

import pickle
import random
import socket
import struct
from dataclasses import replace
from typing import Any

import msgpack
import pytest
import torch
import zmq

from arena import MessageQueue, RemoteConfig
from arena.codec import Message, build_payload, read_table
from arena.errors import ArenaError, EncodeFailed, HandleMismatch, QueueTimeout
from arena.remote import wire
from arena.restricted import RestrictedEncoder, decode
from tests.support import remotes
from tests.support.fleet import dequeue, drain, eventually
from tests.support.remotes import Stranger
from tests.support.wires import Harm, Wire, no_harm


def refusals(queue: Any) -> dict[str, int]:
    probe = queue._probe
    reasons = ("handshake", "key", "secret", "seat", "malformed")
    return {one: count for one in reasons if (count := probe.values[probe.word("remote_refused_total", one)])}


# ── strangers ────────────────────────────────────────────────────────────────────────────────────
def test_garbage_at_the_port_is_counted_and_disturbs_nobody(fleet):
    with remotes.make(1, remote=RemoteConfig("127.0.0.1", timeout_s=1.0)) as queue:
        handle = queue.export_handle()
        (far,) = remotes.readers_afar(fleet, handle, 0)
        chance = random.Random(5)
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", chance.randbytes(4000), b"\xff" + bytes(9), b""):
            with socket.create_connection(("127.0.0.1", remotes.port_of(handle))) as scanner:
                scanner.sendall(garbage)
        silent = socket.create_connection(("127.0.0.1", remotes.port_of(handle)))
        eventually(lambda: refusals(queue).get("handshake", 0) >= 3)
        for number in range(5):
            queue.enqueue(number, timeout=30)
        assert far.call(drain, 5) == list(range(5))
        silent.close()


def test_only_those_with_the_handles_keys_get_as_far_as_saying_hello(fleet, monkeypatch):
    with remotes.make(1) as queue:
        handle = queue.export_handle()
        public, secret = zmq.curve_keypair()
        with (
            Stranger(handle, public=public, secret=secret) as other_keys,
            Stranger(handle, server=public) as other_server,
        ):
            other_keys.hello(0)
            other_server.hello(0)
            eventually(lambda: refusals(queue).get("key") and refusals(queue).get("handshake"))
            assert not other_keys.socket.poll(0)
            assert not other_server.socket.poll(0)
        assert queue.statistics().peers == {0: "expected"}
        monkeypatch.setenv("ARENA_HOST_ID", "elsewhere")
        assert handle.remote is not None
        for remote in (
            replace(handle.remote, server_key=public.decode()),
            replace(handle.remote, client_key=public.decode(), client_secret=secret.decode()),
        ):
            with pytest.raises(HandleMismatch, match="refused in the hand-shake"):
                MessageQueue.create_from_handle(replace(handle, remote=remote), 0, timeout=30)


@pytest.mark.parametrize(
    "changed",
    [{"secret": "guessed"}, {"secret": None}, {"version": 0}, {"remote": 99}, {"instance": "other"}, {"pid": "1; rm"}],
)
def test_keys_alone_are_not_enough(run_dir, changed):
    with remotes.make(1) as queue, Stranger(queue.export_handle()) as stranger:
        stranger.hello(0, **changed)
        assert stranger.answer()[:1] == wire.REFUSED
        eventually(lambda: refusals(queue) == {"secret": 1})
        assert queue.statistics().peers == {0: "expected"}
        stranger.hello(0)
        assert stranger.answer()[:1] == wire.WELCOME


def test_what_is_malformed_cut_repeated_or_too_large_is_ignored_and_counted(fleet):
    with remotes.make(2, slots=8) as queue:
        (far,) = remotes.readers_afar(fleet, queue.export_handle(), 0)
        with Stranger(queue.export_handle()) as stranger:
            stranger.hello(1)
            assert stranger.answer()[:1] == wire.WELCOME
            bad = [
                b"",
                b"?",
                wire.TAKEN,
                wire.pack_taken(wire.Taken(0, 0, 1 << 50, 0, 0)),  # messages that were never sent
                wire.pack_taken(wire.Taken(0, 0, 0, 0, 0))[:-1],
                wire.pack_resume(0, 1 << 50),
                wire.BYE + b"?",
                pickle.dumps(Trap()),
                wire.HELLO + b"{",
                wire.HELLO + b"[]",
            ]
            for message in bad:
                stranger.socket.send(message)
            stranger.socket.send_multipart([wire.TAKEN, b"one", b"too many"])
            eventually(lambda: refusals(queue).get("malformed", 0) >= len(bad))
            for number in range(8):
                queue.enqueue(number, timeout=30)
            for _ in range(3):  # it may come before the frames went out, and is then as malformed as those above
                eventually(lambda: says_it_has_taken(stranger, 3) or queue.statistics().consumed_by_reader[1] == 3)
            assert far.call(drain, 8) == list(range(8))
            stranger.socket.send(bytes(wire.MAX_CONTROL_BYTES + 1))  # its connection ends with this
            eventually(lambda: says_it_has_taken(stranger, 8) or queue.statistics().consumed_by_reader[1] == 8)
        assert not Trap.sprung


def says_it_has_taken(stranger: Stranger, following: int) -> None:
    stranger.socket.send(wire.pack_taken(wire.Taken(0, 0, following, 0, 0)))


class Trap:
    """Says so if anybody unpickles it."""

    sprung = False

    def __reduce__(self) -> Any:
        return setattr, (Trap, "sprung", True)


def test_a_reader_that_never_reads_is_blamed_and_others_get_all_there_is_room_for(fleet):
    config = RemoteConfig("127.0.0.1", window_bytes=1 << 20)
    with remotes.make(2, remote=config, slots=8, max_arena_bytes=64 << 20) as queue:
        (far,) = remotes.readers_afar(fleet, queue.export_handle(), 0)
        with Stranger(queue.export_handle()) as stranger:
            stranger.hello(1, host="sloth", pid=7)
            eventually(lambda: queue.statistics().peers[1] == "attached")
            for _ in range(8):
                queue.enqueue(torch.ones(1_000_000, dtype=torch.uint8), timeout=30)
            assert [int(tensor.sum()) for tensor in far.call(drain, 8)] == [1_000_000] * 8
            with pytest.raises(QueueTimeout, match="awaiting_readers reader 1 \\(sloth:7\\) lag 8"):
                queue.enqueue("one more", timeout=0.2)
            assert stranger.answer()[:1] == wire.WELCOME


# ── a bad wire ───────────────────────────────────────────────────────────────────────────────────
def over(wire_: Wire, queue: MessageQueue) -> Any:
    """The queue's handle, by way of a wire."""
    handle = queue.export_handle()
    assert handle.remote is not None
    return replace(handle, remote=replace(handle.remote, endpoint=f"tcp://127.0.0.1:{wire_.port}"))


HARMS: dict[str, Harm] = {
    "garbled": lambda data: (data[:-1] + bytes([data[-1] ^ 1]), True),
    "repeated": lambda data: (data + data, True),
    "cut short": lambda data: (data[: len(data) // 2], False),
    "replaced": lambda data: (bytes(len(data)), True),
}


@pytest.mark.parametrize("way", ["harm", "harm_back"])
@pytest.mark.parametrize("harm", HARMS)
def test_whatever_the_wire_does_messages_come_once_in_order_and_intact(fleet, harm, way):
    """CURVE's nonces and authenticators tell; another connection goes on with the first message missing."""
    with (
        remotes.make(1, remote=RemoteConfig("127.0.0.1", timeout_s=60.0), slots=16) as queue,
        Wire(remotes.port_of(queue.export_handle())) as bad,
    ):
        (far,) = remotes.readers_afar(fleet, over(bad, queue), 0)
        chance = random.Random(7)
        broken, often = 0, 0.1 if way == "harm" else 0.3

        def sometimes(data: bytes) -> tuple[bytes, bool]:
            nonlocal broken
            if broken < 4 and chance.random() < often:
                broken += 1
                return HARMS[harm](data)
            return data, True

        setattr(bad, way, sometimes)
        taking = far.begin(checked, 60)
        for number in range(60):
            queue.enqueue(torch.full((1 + number * 2_000,), number), timeout=60)
        assert taking.result(within=60) == list(range(60))
        assert broken == 4, "the wire did its worst"
        assert bad.connections > 1


def checked(here: Any, count: int) -> list[int]:
    numbers = []
    for _ in range(count):
        tensor = here.queue.dequeue(timeout=60)
        assert bool((tensor == tensor[0]).all())
        assert len(tensor) == 1 + int(tensor[0]) * 2_000
        numbers.append(int(tensor[0]))
    return numbers


@pytest.mark.parametrize("harm", ["garbled", "replaced"])
def test_a_connection_that_was_tampered_with_is_made_anew_though_its_reader_is_in_no_call(fleet, harm):
    """zmq gives such a one up: nobody would ever send on it, or hear, until the next `dequeue`."""
    with (
        remotes.make(1, remote=RemoteConfig("127.0.0.1", timeout_s=30.0), slots=8) as queue,
        Wire(remotes.port_of(queue.export_handle())) as bad,
    ):
        (far,) = remotes.readers_afar(fleet, over(bad, queue), 0)
        before = bad.connections
        bad.harm = once(bad, HARMS[harm])
        queue.enqueue(bytes(3000), timeout=30)
        eventually(lambda: bad.connections > before, within=15)  # before a heartbeat that is missed would end it
        assert far.call(drain, 1) == [bytes(3000)]
        eventually(lambda: queue.statistics().lag_by_reader == {0: 0})


def once(wire_: Wire, harm: Harm) -> Harm:
    """A harm that comes a single time, to a message; not every byte of a hand-shake means something."""

    def harmed(data: bytes) -> tuple[bytes, bool]:
        if len(data) < 2000:
            return data, True
        wire_.harm = no_harm
        return harm(data)

    return harmed


def test_a_reader_that_works_while_its_connection_breaks_finds_everything_when_it_is_back(fleet):
    with (
        remotes.make(1, remote=RemoteConfig("127.0.0.1", timeout_s=20.0), slots=32) as queue,
        Wire(remotes.port_of(queue.export_handle())) as bad,
    ):
        (far,) = remotes.readers_afar(fleet, over(bad, queue), 0)
        for number in range(30):
            queue.enqueue(number, timeout=30)
            if number % 10 == 5:
                before = bad.connections
                bad.cut()
                eventually(lambda: bad.connections > before)  # noqa: B023 - called at once
        assert far.call(drain, 30) == list(range(30))


# ── without pickles ──────────────────────────────────────────────────────────────────────────────
def there_and_back(obj: object) -> Any:
    message = RestrictedEncoder().encode(obj)
    assert isinstance(message, Message)
    payload = bytearray().join(build_payload(message, [None] * len(message.sources)))
    return decode(read_table(memoryview(payload)), {}, "readonly")


PLAIN = [
    None,
    True,
    0,
    -(1 << 63),
    1 << 64,
    -(10**100),
    2.5,
    complex(1, -2),
    "ünï",
    b"bytes",
    [1, [2, (3, [4])]],
    (),
    (1, "two", (3.0,)),
    {"a": {1: (2,), (3, 4): b"5"}, None: []},
]


@pytest.mark.parametrize("obj", PLAIN, ids=repr)
def test_plain_values_come_as_they_were(obj):
    back = there_and_back(obj)
    assert back == obj
    assert type(back) is type(obj)


def test_tensors_and_arrays_come_as_they_were():
    numpy = pytest.importorskip("numpy")
    base = torch.arange(24, dtype=torch.float32)
    sent = [
        base.view(4, 6)[::2, 1:],
        torch.zeros(0, 3, dtype=torch.bfloat16),
        torch.tensor(5, dtype=torch.uint8),
        torch.nn.Parameter(torch.ones(3)),
        torch.ones(2, dtype=torch.complex64).conj(),
    ]
    for tensor, back in zip(sent, there_and_back(sent), strict=True):
        assert back.dtype == tensor.dtype
        assert torch.equal(back, tensor)
        assert type(back) is type(tensor)
    left, right = there_and_back((base[:10], base[5:]))
    left[5] = 99
    assert right[0] == 99, "views of one storage stay views of one"
    arrays = [
        numpy.arange(12).reshape(3, 4),
        numpy.asfortranarray(numpy.arange(12.0).reshape(3, 4)),
        numpy.array("text"),
        numpy.zeros((0, 2)),
        numpy.array(["2026-11-30"], dtype="datetime64[D]"),
        numpy.float32(2.5),
    ]
    for array, back in zip(arrays, there_and_back(arrays), strict=True):
        assert type(back) is type(array)
        assert back.dtype == array.dtype
        assert back.shape == array.shape
        assert numpy.array_equal(back, array)


@pytest.mark.parametrize("obj", [{1, 2}, object(), Trap(), ValueError(), range(3), lambda: 0, [Trap()], {"a": {Trap}}])
def test_all_else_is_refused_where_it_is_sent(obj):
    with pytest.raises(EncodeFailed, match="serializer='restricted'"):
        RestrictedEncoder().encode(obj)
    knot: list[Any] = []
    knot.append(knot)
    with pytest.raises(EncodeFailed):
        RestrictedEncoder().encode(knot)


def test_no_bytes_make_a_reader_do_anything_but_fail():
    chance = random.Random(11)
    message = RestrictedEncoder().encode([1, (2,), torch.ones(3), {"k": 1 << 70}])
    assert isinstance(message, Message)
    good = bytearray().join(build_payload(message, [None] * len(message.sources)))
    hostile = [bytearray(good) for _ in range(2000)]
    for payload in hostile:
        for _ in range(chance.randint(1, 4)):
            payload[chance.randrange(len(payload))] = chance.randrange(256)
    tensor = msgpack.packb([[0, ["float32", 1 << 40, [1 << 40], [1 << 20], False, False]]])
    body = msgpack.packb(msgpack.ExtType(4, struct.pack("<I", 0)))
    packed = struct.pack("<I", len(tensor)) + tensor + body
    outside = struct.pack("QQQ", 1, 0, len(packed)) + struct.pack("QQQQQ", 0, 64, 8, 0, 0) + bytes(8) + packed
    failed = 0
    for payload in [*hostile, bytearray(outside), bytearray(pickle.dumps(Trap()))]:
        try:
            decode(read_table(memoryview(payload)), {}, "readonly")
        except (
            ArenaError,
            ValueError,
            TypeError,
            RuntimeError,
            LookupError,
            OverflowError,
            struct.error,
            msgpack.UnpackException,
        ):
            failed += 1
    assert failed > 500
    assert not Trap.sprung


def test_a_queue_without_pickles_serves_readers_here_and_there(fleet):
    with remotes.make(2, serializer="restricted") as queue:
        (near,) = fleet.readers(queue, 0)
        (far,) = remotes.readers_afar(fleet, queue.export_handle(), 1)
        queue.enqueue({"step": (1, 2), "pixels": torch.full((200_000,), 7)}, timeout=30)
        queue.enqueue([1, 2], timeout=30)
        for worker in (near, far):
            message = worker.call(dequeue)
            assert message["step"] == (1, 2)
            assert int(message["pixels"].sum()) == 1_400_000
            assert worker.call(dequeue) == [1, 2]
        with pytest.raises(EncodeFailed):
            queue.enqueue({1, 2})


def test_a_pickle_is_not_read_on_a_queue_without(fleet):
    """A forwarder that lies: a queue with pickles, whose handle says that it has none."""
    with remotes.make(1) as queue:
        (far,) = remotes.readers_afar(fleet, replace(queue.export_handle(), serializer="restricted"), 0)
        queue.enqueue("pickled")
        with pytest.raises(ArenaError, match="a pickle came on a queue that has none"):
            far.call(dequeue)
        queue.enqueue(torch.ones(100_000))
        with pytest.raises(ArenaError):
            far.call(dequeue)
