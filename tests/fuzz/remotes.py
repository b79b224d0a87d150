"""What comes from another host, once it is decrypted: at the forwarder and at a reader; and the former's reports."""

from __future__ import annotations

import contextlib
import os
import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from arena import MessageQueue, QueueConfig, layout
from arena.codec import Encoder, build_payload
from arena.config import RemoteConfig
from arena.errors import ArenaError, HandleMismatch, PeerDied, QueueClosed
from arena.remote import reader as remote_reader
from arena.remote import wire
from arena.remote.forwarder import Forwarder
from arena.remote.greeting import is_answer
from arena.remote.inlet import Inlet
from arena.remote.peer import Peer
from arena.remote.server import Server
from arena.remote.standin import Latest, StandIn
from tests.fuzz.common import SETTINGS, SLOT_BYTES, Run, Wrong, check_tensor, name_of, parts_of
from tests.fuzz.handles import ADDRESS

_LENGTH = struct.Struct("<H")


def _joined(*messages: bytes) -> bytes:
    """Messages one behind the other, each with its length before it."""
    return b"".join(_LENGTH.pack(len(one)) + one for one in messages)


def _parted(data: bytes, most: int) -> Iterator[bytes]:
    at = 0
    while at + 2 <= len(data) and most:
        (length,) = _LENGTH.unpack_from(data, at)
        yield data[at + 2 : at + 2 + length]
        at, most = at + 2 + length, most - 1


# ── at the forwarder ─────────────────────────────────────────────────────────────────────────────
_HELLO = {"magic": "arena-queue", "version": "{version}", "remote": wire.REMOTE_PROTOCOL, "instance": "{instance}"}
_HELLO |= {"secret": "{secret}", "rank": 0, "host": "elsewhere", "pid": 4711}


def forwarder_seeds() -> list[bytes]:
    """What readers say. Numbers of frames and bytes count from where the reader stands."""
    known, stranger = b"k", b"s"
    words = ((0, 0, 1, 0, 5), (1, 0, 2, 100, 1 << 63), (2, 1, 0, 0, 0), (0, 0, 0, (1 << 64) - 1, (1 << 64) - 1))
    taken = [wire.pack_taken(wire.Taken(*one)) for one in words]
    hellos = [_HELLO, _HELLO | {"rank": 1 << 80}, _HELLO | {"secret": "\ud800"}, _HELLO | {"host": "\ud800\0" * 40}]
    return [
        _joined(*(known + one for one in taken)),
        _joined(known + wire.pack_resume(0, 0), known + taken[0], known + wire.pack_resume(1, 1)),
        _joined(known + wire.BYE, stranger + wire.BYE, stranger + taken[0], b"g" + taken[0], known + b"B?"),
        *(_joined(stranger + wire.pack_json(wire.HELLO, one)) for one in hellos),
        _joined(known + wire.pack_json(wire.HELLO, _HELLO), stranger + b"H" + b"[" * 1500),
        _joined(stranger + b"H" + b"9" * 5000, stranger + b"H", b"s", b""),
    ]


@contextlib.contextmanager
def forwarders() -> Iterator[Run]:
    """Messages of a reader that has a seat, of one that had one, and of strangers, at the forwarder.

    Whoever knows the secret is given no seat here: that is a thread, and the attach socket (`hello`).
    """
    config = RemoteConfig("127.0.0.1:0", timeout_s=5.0)
    with MessageQueue(1, config=QueueConfig(**SETTINGS, min_block_bytes=1024)) as queue:
        handle = queue.export_handle()
        stand_in = StandIn(handle, 0, "elsewhere:1", Latest(), timeout=5)
        server: Any = Server.__new__(Server)
        server._handle, server._config = handle, config
        server._peers, server._seating, server._gone = {}, {}, {b"g": "taken for dead"}
        server._first = False
        server._refused = dict.fromkeys(("malformed", "secret"), 0)
        server._seat = lambda identity, rank, where: seated.append((rank, where))
        server._remove = lambda peer: None
        server._post = lambda identity, head, data=None: None
        seated: list[tuple[Any, Any]] = []
        marks = {b'"{version}"': handle.version, b"{instance}": handle.instance, b"{secret}": handle.secret}
        own = {mark: str(value).encode() for mark, value in marks.items()}
        leaving = stand_in.shutdown
        stand_in.__class__ = type("Staying", (StandIn,), {"__slots__": (), "shutdown": lambda self: None})
        message = bytearray(5000)

        def run(data: bytes) -> str:
            for mark, value in own.items():
                data = data.replace(mark, value)
            peer = server._peers[b"k"] = Peer(b"k", stand_in, 1 << 16, server._post)
            with contextlib.suppress(ArenaError):
                queue.enqueue(7, timeout=0)
                queue.enqueue(message, timeout=0)
            while peer.send_some():
                pass
            outcome = ""
            for one in _parted(data, 8):
                outcome = _told(server, peer, one[:1], _counted_from(peer, one[1:]))
                peer.ping()
                peer.send_some()
            if seated and not (isinstance(seated[0][0], int) and seated[0][1].isprintable()):
                raise Wrong(f"{seated}")
            peer.forget()
            for sequence in range(stand_in.following, stand_in.published):
                stand_in.outgoing(sequence)  # of what was never sent, nobody would give the blocks back
            stand_in.acknowledge(stand_in.published)
            stand_in.forget()
            server._seating.clear()
            seated.clear()
            return outcome

        try:
            yield run
        finally:
            leaving()


def _counted_from(peer: Any, message: bytes) -> bytes:
    """What it says of frames and bytes, from where it stands."""
    if message[:1] == wire.TAKEN and len(message) == 34:
        state, *words = struct.unpack("<BQQQQ", message[1:])
        here = (peer._epoch, peer.stand_in.following, peer._received, 0)
        return wire.TAKEN + struct.pack(
            "<BQQQQ", state, *((a + b) % (1 << 64) for a, b in zip(words, here, strict=True))
        )
    if message[:1] == wire.RESUME and len(message) == 17:
        epoch, following = struct.unpack("<QQ", message[1:])
        return wire.pack_resume((epoch + peer._epoch) % (1 << 64), (following + peer.stand_in.following) % (1 << 64))
    return message


def _told(server: Any, peer: Any, identity: bytes, message: bytes) -> str:
    before, first = dict(server._refused), peer.stand_in.following
    try:
        server._on_message(identity, message)
    except wire.Malformed as error:
        return f"malformed: {name_of(error)[:20]}"
    if not first <= peer.stand_in.following <= peer.stand_in.published:
        raise Wrong(f"{peer.stand_in.following} frames taken of {peer.stand_in.published}, after {first}")
    refused = [reason for reason, count in server._refused.items() if count > before[reason]]
    return f"refused {refused}" if refused else f"heard {message[:1]!r}"


# ── at a reader ──────────────────────────────────────────────────────────────────────────────────
def inlet_seeds() -> list[bytes]:
    """What a forwarder says, from a first frame on."""
    empty = (0, 0, 0)
    small = wire.pack_frame_tail(layout.KIND_INLINE, 5, empty, [], b"\x80\x05K\x07.")
    message: Any = Encoder().encode([torch.arange(12), bytearray(b"x" * 9000)])
    holds = [(1, 0, source.nbytes, at, 1) for at, source in enumerate(message.sources)]
    table = b"".join(map(bytes, build_payload(message, holds)))
    sizes = [source.nbytes for source in message.sources]
    large = wire.pack_frame_tail(layout.KIND_TABLE, 5, (1, 2, 3), sizes, table)
    chunks = [
        part
        for at, source in enumerate(message.sources)
        for part in (wire.pack_chunk(wire.Chunk(0, 0, at, 0)), bytes(source.piece()))
    ]
    whole = b"".join(map(bytes, build_payload(message, [None] * len(holds))))
    block = wire.pack_frame_tail(layout.KIND_BLOCK, 5, empty, [len(whole)], b"")
    pieces = [struct.pack("QQQ", len(whole), at, 0) + whole[at : at + 4000] for at in range(0, len(whole), 4000)]
    fragments = [wire.pack_frame_tail(layout.KIND_FRAGMENT, 5, empty, [], one) for one in pieces]
    ping = wire.pack_ping(wire.Ping(1, 0, 3, 0))
    return [
        _joined(wire.pack_frame(0, 0, 0, small), wire.pack_frame(0, 0, 1, small), ping),
        _joined(wire.pack_frame(0, 0, 0, large), *chunks),
        _joined(wire.pack_frame(0, 0, 0, block), wire.pack_chunk(wire.Chunk(0, 0, 0, 0)), whole),
        _joined(*(wire.pack_frame(0, 0, at, one) for at, one in enumerate(fragments))),
        _joined(wire.pack_frame(0, (1 << 64) - 1, (1 << 64) - 1, small), wire.pack_ping(wire.Ping(1, 9, 3, 0))),
        _joined(wire.pack_end(0, 0, {"kind": "QueueClosed"})),
        _joined(wire.pack_end(0, 0, {"kind": "PeerDied", "ending": [], "pid": "x", "signal": "x"})),
        _joined(wire.pack_json(wire.REFUSED, {"kind": "PeerDied", "text": "gone"}), wire.pack_json(wire.WELCOME, {})),
        _joined(b"X" + b"[" * 1500),
    ]


class _Wire:
    """A link on which something has come, and which is then still."""

    news_fd = -1
    broken = news = False

    def __init__(self, *_: Any) -> None:
        self.coming: deque[bytes] = deque()

    def receive(self, in_place: bool = False) -> Any:
        if not self.coming:
            return None
        message = self.coming.popleft()
        return SimpleNamespace(buffer=memoryview(message)) if in_place else message

    def send(self, message: bytes) -> None:
        pass

    def wait(self, timeout_ms: int) -> None:
        pass

    def wake(self) -> None:
        pass

    def failures(self) -> list[str]:
        return []

    def close(self) -> None:
        pass


class _Nobody:
    """A keeper that leaves the reader alone."""

    awake = True

    def __init__(self, *_: Any) -> None:
        pass

    def stop(self) -> None:
        pass


_MAX_BYTES = 1 << 20


@contextlib.contextmanager
def inlets(**settings: Any) -> Iterator[Run]:
    """What a forwarder sends, at the hand-shake and in `dequeue`."""
    with contextlib.ExitStack() as stack:
        for name, double in (("Link", _Wire), ("Keeper", _Nobody), ("greet", lambda *_: None)):
            stack.callback(setattr, remote_reader, name, getattr(remote_reader, name))
            setattr(remote_reader, name, double)
        queue = stack.enter_context(MessageQueue(1, config=QueueConfig(**{**SETTINGS, **settings})))
        handle = replace(queue.export_handle(), remote=ADDRESS, max_message_bytes=_MAX_BYTES)
        reader: Any = remote_reader.RemoteReader(handle, 0, timeout=0, on_warning=None)
        stack.callback(reader.shutdown)

        def run(data: bytes) -> str:
            reader._inlet, reader._end, reader._pending_chunk = Inlet(_MAX_BYTES), None, None
            reader._taken = reader._published = 0
            reader._assembly.drop()
            parts = list(_parted(data, 64))
            try:
                outcome = "an answer " * any(is_answer("fuzz", one) for one in parts[:1])
                reader._link.coming = deque(parts)
                obj = reader.dequeue(timeout=0)
                for _, _, part in parts_of(obj):
                    if isinstance(part, torch.Tensor):
                        check_tensor(part)
                return outcome + type(obj).__name__
            except (HandleMismatch, PeerDied, QueueClosed) as error:
                return type(error).__name__  # what a refusal says is the forwarder's own text
            except ArenaError as error:
                return name_of(error)
            finally:
                reader.statistics()

        yield run


# ── from the forwarder, at the writer ────────────────────────────────────────────────────────────
def report_seeds() -> list[bytes]:
    """The first line, and what follows."""
    return [
        b'{"port": 5555}\n{"refused": {"key": 1, "secret": 2}}\n',
        b'{"failed": "address in use"}\n',
        b'{"port": "x"}\n[]\n',
        b'\n{"refused": []}\n',
        b'{"port": 1}\n{"refused": {"key": -1}}\n{"refused": {"key": "x"}}\n',
        b"[" * 1500,
    ]


@contextlib.contextmanager
def reports() -> Iterator[Run]:
    """What the forwarder's process says to the writer's: where it listens, and how many it refused."""
    with MessageQueue(1, config=QueueConfig(**SETTINGS)) as queue:
        forwarder: Any = Forwarder.__new__(Forwarder)
        forwarder._name, forwarder._probe, forwarder._stopped = "fuzz", queue._probe, True  # type: ignore[attr-defined]

        def run(data: bytes) -> str:
            out, into = os.pipe()
            os.write(into, data[: SLOT_BYTES * 8])
            os.close(into)
            with open(out, "rb", buffering=0) as pipe:
                forwarder._process = SimpleNamespace(stdout=pipe, wait=lambda: 0, pid=0)
                try:
                    port = forwarder._answer()
                except ArenaError as error:
                    return name_of(error)
                if type(port) is not int or not 0 < port < 1 << 16:
                    raise Wrong(f"port {port}")
                forwarder._listen()
                queue._probe.flush(0)  # type: ignore[attr-defined]
            return "a port"

        yield run
