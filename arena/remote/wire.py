"""What is said between forwarder and reader: every message, packed and unpacked in one place.

A message is one zmq frame, its first byte says of which kind; a chunk has its bytes in a second frame, so that they are
sent from where they lie. Numbers are little-endian. The hand-shake is JSON: it comes once, and versions that know no
more than that can read it.

Who receives checks every length before it uses it. What does not fit is a `Malformed`, which is counted and ignored:
the sender is the queue's, by its key, but it may be of another version, or wrong.
"""

from __future__ import annotations

import json
import struct
from typing import Any, Final, NamedTuple

REMOTE_PROTOCOL: Final = 1
MAX_CONTROL_BYTES: Final = 1 << 16
CHUNK_BYTES: Final = 1 << 20
MAX_BUFFERS: Final = 1 << 20
_LAST_SEQUENCE: Final = (1 << 63) - 1

# reader → forwarder
HELLO: Final = b"H"  # JSON; who I am, and that I know the secret
TAKEN: Final = b"A"  # how far I have come; also a sign of life
RESUME: Final = b"R"  # something is missing: send again from here
BYE: Final = b"B"  # I leave
# forwarder → reader
WELCOME: Final = b"W"  # JSON
REFUSED: Final = b"X"  # JSON: the error's class and what it says
FRAME: Final = b"F"
CHUNK: Final = b"C"
PING: Final = b"P"  # how far I have sent; answered by TAKEN
END: Final = b"E"  # JSON: nothing more will come, and why

_TAKEN: Final = struct.Struct("<cBQQQQ")
_RESUME: Final = struct.Struct("<cQQ")
_FRAME: Final = struct.Struct("<cQQQQQQQQII")
_FRAME_KIND: Final = FRAME[0]
_NO_TRACE: Final = (0, 0, 0)
_new: Final = tuple.__new__
_CHUNK: Final = struct.Struct("<cQQIQ")
_PING: Final = struct.Struct("<cBQQQ")
_END: Final = struct.Struct("<cQQ")

STATE_WORKING: Final = 0
STATE_WAITING: Final = 1
STATE_ALIVE: Final = 2  # a heartbeat from inside long work


class Malformed(Exception):
    """A message that is none of ours, or was cut."""


class Taken(NamedTuple):
    """How far a reader has come.

    Attributes:
        state: what it is doing.
        epoch: to which `received` refers.
        next: the first frame that it has not taken.
        received: bytes of this epoch that it has room for again.
        waited_ns: how long it has waited for messages in all.
    """

    state: int
    epoch: int
    next: int
    received: int
    waited_ns: int


class Frame(NamedTuple):
    """A ring's frame, on its way. Its buffers follow as chunks.

    Attributes:
        epoch: see the head of `arena.remote`.
        first: the sequence with which this reader's part begins; only the writer knows, once it has admitted it.
        sequence: of the frame.
        kind: as in the ring, without the trace flag.
        sent_ns: when it was enqueued, by the clock of the writer's host.
        trace: three opaque words; zeros for an unsampled message.
        sizes: bytes of each buffer.
        payload: what the slot holds.
    """

    epoch: int
    first: int
    sequence: int
    kind: int
    sent_ns: int
    trace: tuple[int, int, int]
    sizes: tuple[int, ...]
    payload: memoryview


class Chunk(NamedTuple):
    """Where a chunk's bytes belong: frame, buffer, offset."""

    epoch: int
    sequence: int
    buffer: int
    at: int


class Ping(NamedTuple):
    """How far the forwarder has come.

    Attributes:
        ready: whether every expected reader has attached.
        epoch: to which `sent` refers.
        published: frames that there are.
        sent: bytes of this epoch that are on the way, or have come.
    """

    ready: int
    epoch: int
    published: int
    sent: int


def pack_taken(taken: Taken) -> bytes:
    """See `Taken`."""
    return _TAKEN.pack(TAKEN, *taken)


def unpack_taken(message: bytes) -> Taken:
    """The same, read."""
    return Taken(*_fixed(_TAKEN, message)[1:])


def pack_resume(epoch: int, following: int) -> bytes:
    """In this epoch, `following` is what is missing."""
    return _RESUME.pack(RESUME, epoch, following)


def unpack_resume(message: bytes) -> tuple[int, int]:
    """The same, read."""
    _, epoch, following = _fixed(_RESUME, message)
    return epoch, following


def pack_frame_tail(kind: int, sent_ns: int, trace: tuple[int, int, int], sizes: list[int], payload: bytes) -> bytes:
    """All of a frame that is the same whenever it is sent."""
    tail = struct.pack("<QQQQQII", kind, sent_ns, *trace, len(sizes), len(payload))
    return tail + struct.pack(f"<{len(sizes)}Q", *sizes) + payload if sizes else tail + payload


_FRAME_FRONT: Final = struct.Struct("<cQQQ")
_SHORT_TAIL: Final = struct.Struct("<QQQQQII")
SHORT_TAIL_BYTES: Final = _SHORT_TAIL.size  # before the payload


def pack_short_tail(kind: int, sent_ns: int, payload: memoryview) -> bytes:
    """The same of a frame without buffers that is not traced."""
    return _SHORT_TAIL.pack(kind, sent_ns, 0, 0, 0, 0, len(payload)) + payload


def pack_frame(epoch: int, first: int, sequence: int, tail: bytes) -> bytes:
    """A frame with what `pack_frame_tail` made."""
    return _FRAME_FRONT.pack(FRAME, epoch, first, sequence) + tail


def unpack_frame(message: memoryview) -> Frame:
    """The same, read; the payload is a view."""
    if message.nbytes < _FRAME.size:
        raise Malformed(f"a frame of {message.nbytes} bytes")
    _, epoch, first, sequence, kind, sent_ns, one, two, three, n_buffers, nbytes = _FRAME.unpack_from(message)
    if first > _LAST_SEQUENCE or sequence > _LAST_SEQUENCE:
        raise Malformed(f"frame {sequence} of a reader that begins with frame {first}")
    body = _FRAME.size + 8 * n_buffers
    if n_buffers > MAX_BUFFERS or body + nbytes != message.nbytes:
        raise Malformed(f"a frame of {message.nbytes} bytes for {n_buffers} buffers and a payload of {nbytes}")
    sizes = struct.unpack_from(f"<{n_buffers}Q", message, _FRAME.size) if n_buffers else ()
    return Frame(epoch, first, sequence, kind, sent_ns, (one, two, three), sizes, message[body:])


def unpack_short(message: bytes, epoch: int, sequence: int) -> Frame | None:
    """The same in one step, if it is this frame of this epoch, without buffers and not traced; else None."""
    if len(message) < _FRAME.size or message[0] != _FRAME_KIND:
        return None
    _, found_epoch, first, found, kind, sent_ns, one, two, three, n_buffers, nbytes = _FRAME.unpack_from(message)
    if found != sequence or found_epoch != epoch or one | two | three | n_buffers or first > sequence:
        return None
    if _FRAME.size + nbytes != len(message):
        return None
    # What `Frame(...)` does, without a call into Python: somebody waits for this one.
    return _new(Frame, (epoch, first, sequence, kind, sent_ns, _NO_TRACE, (), memoryview(message)[_FRAME.size :]))


def pack_chunk(chunk: Chunk) -> bytes:
    """See `Chunk`."""
    return _CHUNK.pack(CHUNK, *chunk)


def unpack_chunk(message: memoryview) -> Chunk:
    """The same, read."""
    return Chunk(*_fixed(_CHUNK, message)[1:])


def pack_ping(ping: Ping) -> bytes:
    """See `Ping`."""
    return _PING.pack(PING, *ping)


def unpack_ping(message: memoryview) -> Ping:
    """The same, read."""
    return Ping(*_fixed(_PING, message)[1:])


def pack_end(epoch: int, following: int, why: dict[str, Any]) -> bytes:
    """After the frame before `following` nothing comes."""
    return _END.pack(END, epoch, following) + json.dumps(why).encode()


def unpack_end(message: memoryview) -> tuple[int, int, dict[str, Any]]:
    """The same, read."""
    if message.nbytes < _END.size:
        raise Malformed("a cut end")
    _, epoch, following = _END.unpack_from(message)
    return epoch, following, _json(message[_END.size :].tobytes())


def pack_json(kind: bytes, content: dict[str, Any]) -> bytes:
    """A part of the hand-shake."""
    return kind + json.dumps(content).encode()


def unpack_json(message: bytes) -> dict[str, Any]:
    """The same, read."""
    return _json(message[1:])


def _json(text: bytes) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except (RecursionError, ValueError) as error:
        raise Malformed(f"no JSON: {error}") from None
    if not isinstance(content, dict):
        raise Malformed(f"JSON, but no object: {type(content).__name__}")
    return content


def _fixed(layout: struct.Struct, message: bytes | memoryview) -> tuple[Any, ...]:
    if len(message) != layout.size:
        raise Malformed(f"{len(message)} bytes instead of {layout.size}")
    return layout.unpack(message)
