"""Frames, as a reader takes them out of the ring; and the parsers that see their parts."""

from __future__ import annotations

import contextlib
import pickle
import struct
from collections.abc import Iterator
from typing import Any

import torch

from arena import layout
from arena.assembly import Assembly
from arena.codec import Encoder, Message, build_payload, decode, holds_in, read_table
from arena.errors import ArenaError, CorruptFrame
from tests.fuzz.common import (
    SLOT_BYTES,
    SLOTS,
    Run,
    WalledBuffer,
    Wrong,
    a_pair,
    address_of,
    check_tensor,
    name_of,
    parts_of,
    same,
)

MESSAGES: list[Any] = [
    {"step": 1, "ids": [1, 2, 3], "text": "twelve"},
    [torch.arange(100), "a table in the slot"],
    [torch.arange(40_000), "a block"],
    [torch.arange(6).reshape(2, 3).t(), torch.zeros(()), torch.empty(0, 3), torch.nn.Parameter(torch.ones(3))],
    "x" * 20_000,
    [bytearray(5000), torch.ones(9_000, dtype=torch.bfloat16)],
]


def _slot(queue: Any, sequence: int) -> memoryview:
    start = layout.SLOTS_OFFSET + sequence % SLOTS * SLOT_BYTES
    view: memoryview = queue._segment.mapping.view(start, SLOT_BYTES)
    return view


def _taken_out(queue: Any, sequence: int) -> bytes:
    """A slot, with its sequence taken off its tag."""
    data = bytearray(_slot(queue, sequence))
    struct.pack_into("=Q", data, 0, struct.unpack_from("=Q", data)[0] - sequence)
    return bytes(data)


def _put_in(queue: Any, sequence: int, data: bytes) -> None:
    """A slot in the place of a sequence, and published."""
    slot = _slot(queue, sequence)
    slot[: len(data)] = data[:SLOT_BYTES]
    words = slot[:8].cast("Q")
    words[0] = (words[0] + sequence) % (1 << 64)
    queue._ring.published[0] = sequence + 1


def frame_seeds(**settings: Any) -> list[bytes]:
    """The slots of real messages on every path."""
    seeds = []
    for changes in ({}, {"max_arena_bytes": 0}):
        with a_pair(**settings, **changes) as (queue, reader):
            for message in MESSAGES:
                first = queue.statistics().published
                with contextlib.suppress(ArenaError):
                    queue.enqueue(message, timeout=0)
                for sequence in range(first, queue.statistics().published):
                    data = _taken_out(queue, sequence)
                    kind = struct.unpack_from("=Q", data)[0]
                    if kind != layout.KIND_FRAGMENT or sequence - first < 2:  # they are many, and all alike
                        seeds.append(data)
                    if kind == layout.KIND_TABLE:
                        seeds += _streamed(data)
                with contextlib.suppress(ArenaError):
                    while True:
                        reader.dequeue(timeout=0)
    return seeds


def _streamed(table: bytes) -> list[bytes]:
    """A frame with a table, as one that is still being filled: not at all yet, whole, and given up."""
    found = []
    for filled in (0, sum(hold[2] for hold in holds_in(memoryview(table)[layout.PAYLOAD_OFFSET :])), layout.GIVEN_UP):
        words = list(struct.unpack("=8Q", table[: layout.PAYLOAD_OFFSET]))
        words[layout.HEAD_TAG], words[layout.HEAD_FILLED] = layout.KIND_STREAMED, filled
        found.append(struct.pack("=8Q", *words) + table[layout.PAYLOAD_OFFSET :])
    return found


@contextlib.contextmanager
def frames(**settings: Any) -> Iterator[Run]:
    """A reader whose ring holds the case as its next slot, header and all: the last slot, which ends at the wall."""
    with a_pair(**settings) as (queue, reader):
        for _ in range(2):  # a segment that frames may name
            queue.enqueue(torch.arange(40_000), timeout=1)
            reader.dequeue(timeout=1)
        consumed = reader._consumed
        consumed[0] = SLOTS - 1
        ring = queue._segment.mapping
        segments = [mapping for mapping in reader._borrower._mappings.values()]

        def run(data: bytes) -> str:
            sequence = consumed[0]
            _put_in(queue, sequence, data)
            reader._log.sample = reader._log.phase = 0  # every frame is one that its log looks at
            try:
                obj = reader.dequeue(timeout=0)
                _check_parts(obj, ring, segments)
                return type(obj).__name__
            except ArenaError as error:
                return name_of(error)
            finally:
                obj = None
                consumed[0] = sequence + SLOTS
                if sequence % 128 == SLOTS - 1:
                    reader._assembly.drop()

        yield run


def _check_parts(obj: object, ring: Any, segments: list[Any]) -> None:
    """Tensors and buffers lie in the arena or in memory of their own, and never in the ring, which moves on."""
    for start, nbytes, part in parts_of(obj):
        if isinstance(part, torch.Tensor):
            check_tensor(part)
            if part.numel() and part.data_ptr() % min(16, part.element_size()):
                raise Wrong(f"a tensor of {part.dtype} at {part.data_ptr():#x}")
        if start < ring.address + ring.nbytes and ring.address < start + nbytes:
            raise Wrong(f"{nbytes} bytes of a message lie in the ring")
        for one in segments:
            meet = start < one.address + one.nbytes and one.address < start + nbytes
            if meet and not one.address <= start <= start + nbytes <= one.address + one.nbytes:
                raise Wrong(f"{nbytes} bytes of a message reach beyond the arena")


# ── headers ──────────────────────────────────────────────────────────────────────────────────────
def _whole_frames() -> list[tuple[bytes, object]]:
    """Frames that are a message each and need no block, with that message."""
    found = []
    with a_pair(max_arena_bytes=0) as (queue, reader):
        for message in MESSAGES:
            first = queue.statistics().published
            with contextlib.suppress(ArenaError):
                queue.enqueue(message, timeout=0)
            if queue.statistics().published == first + 1:
                found.append((_taken_out(queue, first), message))
                reader.dequeue(timeout=1)
            else:
                with contextlib.suppress(ArenaError):
                    while True:
                        reader.dequeue(timeout=0)
    return found


def header_seeds() -> list[bytes]:
    """The number of a message, and the header of its frame."""
    whole = enumerate(_whole_frames())
    return [struct.pack("=Q", at) + frame[: layout.PAYLOAD_OFFSET] for at, (frame, _) in whole]


@contextlib.contextmanager
def headers() -> Iterator[Run]:
    """A right payload under a wrong header: the message that it was, or an error, and nothing else."""
    whole = _whole_frames()
    with a_pair() as (queue, reader):

        def run(data: bytes) -> str:
            data = data[: 8 + layout.PAYLOAD_OFFSET].ljust(8 + layout.PAYLOAD_OFFSET, b"\0")
            frame, message = whole[struct.unpack_from("=Q", data)[0] % len(whole)]
            sequence = reader._consumed[0]
            _put_in(queue, sequence, data[8:] + frame[layout.PAYLOAD_OFFSET :])
            try:
                obj = reader.dequeue(timeout=0)
            except ArenaError as error:
                return name_of(error)
            finally:
                reader._consumed[0] = sequence + 1
                reader._assembly.drop()
            if not same(obj, message):
                raise Wrong(f"{obj!r:.200} instead of {message!r:.200}")
            return f"message {MESSAGES.index(message) if not isinstance(message, list) else 'with tensors'}"

        yield run


# ── tables ───────────────────────────────────────────────────────────────────────────────────────
def table_seeds() -> list[bytes]:
    """Payloads whose buffers are all inside."""
    seeds = []
    for message in MESSAGES:
        encoded = Encoder().encode(message)
        if isinstance(encoded, Message):
            seeds.append(b"".join(map(bytes, build_payload(encoded, [None] * len(encoded.sources)))))
    return [seed for seed in seeds if len(seed) < 1 << 14]


@contextlib.contextmanager
def tables() -> Iterator[Run]:
    """A payload: the table, and where it leads."""
    room = WalledBuffer(1 << 17)

    def run(data: bytes) -> str:
        try:
            table = read_table(room.put(data))
        except CorruptFrame as error:
            return name_of(error)
        count, specs, pickled = struct.unpack_from("QQQ", data)
        start = 24 + 40 * count
        if (table.specs, table.pickle) != ((start, start + specs), (len(data) - pickled, len(data))):
            raise Wrong(f"{table.specs} {table.pickle} for {count}, {specs}, {pickled}")
        if not start + specs <= table.pickle[0]:
            raise Wrong(f"{table.specs} {table.pickle} in {len(data)}")
        for at, entry in enumerate(table.entries):
            if entry != struct.unpack_from("QQQQQ", data, 24 + 40 * at):
                raise Wrong(f"entry {at} is not {entry}")
            if entry[0] == 0 and entry[1] + entry[2] > len(data):
                raise Wrong(f"buffer {entry[1]}+{entry[2]} of a payload of {len(data)}")
        return f"a table of {min(len(table.entries), 4)}, {min(len(table.holds), 4)} of them holds"

    yield run


# ── specs ────────────────────────────────────────────────────────────────────────────────────────
def spec_seeds() -> list[bytes]:
    """Words that say how tensors lie in a buffer."""
    return [
        struct.pack("=8q", 3, 0, 1, 10, 1, 1, 1, 10),
        struct.pack("=8q", 0, 5, 2, 4, 3, 3, 1, 197),
        struct.pack("=8q", 0, 0, 2, 7, 7, 7, 1, 196),
        struct.pack("=8q", 5, 1, 1, 11, 0, 1, 0, 192 + (1 << 32)),
        bytes(64),
    ]


DTYPES = ("float32", "int64", "bfloat16", "uint8", "bool", "complex128", "float8_e4m3fn", "no_such", "Tensor", "float")
_LARGEST = 200
_CONTENT = bytes(1 + at % 251 for at in range(_LARGEST))
_PICKLED = pickle.dumps(pickle.PickleBuffer(bytearray()), 5, buffer_callback=[].append)


@contextlib.contextmanager
def specs() -> Iterator[Run]:
    """A shape, strides and an offset over a small buffer that ends at the wall: none of it may reach beyond, and what
    is there is what the buffer has there, reckoned up in Python."""
    room = WalledBuffer(layout.PAGE)

    def run(data: bytes) -> str:
        words = list(struct.unpack("=8q", data[:64].ljust(64, b"\0")))
        dims = words[2] % 4
        shape, stride = tuple(words[3 : 3 + dims]), tuple(words[5 : 5 + dims])
        flags = words[7] >> 32
        spec = (DTYPES[words[0] % len(DTYPES)], words[1], shape, stride, bool(flags & 1), bool(flags & 2))
        nbytes = (words[7] & 0xFFFFFFFF) % (_LARGEST + 1)
        text = pickle.dumps([(0, spec)], 5)
        hold = (1, 0, nbytes, 0, 1)
        payload = struct.pack("QQQQQQQQ", 1, len(text), len(_PICKLED), *hold) + text + _PICKLED
        try:
            obj = decode(read_table(memoryview(payload)), {hold: room.lend(_CONTENT[:nbytes], 16)}, "readonly")
        except ArenaError as error:
            return name_of(error)
        except Exception as error:  # the reader wraps it in DecodeFailed
            return f"DecodeFailed by {name_of(error)[:40]}"
        if not isinstance(obj, torch.Tensor):
            raise Wrong(f"a {type(obj).__name__}")
        check_tensor(obj)
        _check_content(obj, spec, nbytes)
        return f"{type(obj).__name__} of {min(obj.numel(), 3)} {obj.dtype}"

    yield run


def _check_content(tensor: torch.Tensor, spec: Any, nbytes: int) -> None:
    """Element by element: dtype, shape and bytes."""
    name, offset, shape, stride, requires_grad, _ = spec
    if tensor.dtype != getattr(torch, name) or tuple(tensor.shape) != shape or tensor.requires_grad != requires_grad:
        raise Wrong(f"a tensor of {tensor.dtype} {tuple(tensor.shape)} for {spec}")
    if not 0 < tensor.numel() <= 4096:
        return
    size, places = tensor.element_size(), [offset]
    for n, step in zip(shape, stride, strict=True):
        places = [place + step * at for place in places for at in range(n)]
    expected = b"".join(_CONTENT[:nbytes][place * size : (place + 1) * size] for place in places)
    with contextlib.suppress(RuntimeError):  # strides next to 2^63 along a dimension of 1
        found = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
        if name == "bool":
            expected = bytes(map(bool, expected))
        if bytes(found.tolist()) != expected:
            raise Wrong(f"{bytes(found.tolist()).hex()} instead of {expected.hex()} for {spec}")


# ── fragments ────────────────────────────────────────────────────────────────────────────────────
def fragment_seeds() -> list[bytes]:
    """A few pieces one behind the other, each with its length before it."""
    whole = bytes(range(250))

    def piece(total: int, at: int, first: int, body: bytes) -> bytes:
        return struct.pack("=QQQQ", 24 + len(body), total, at, first) + body

    return [
        piece(250, 0, 0, whole[:100]) + piece(250, 100, 0, whole[100:200]) + piece(250, 200, 0, whole[200:]),
        piece(100, 0, 0, whole[:100]),
        piece(250, 0, 0, whole[:100]) + piece(90, 0, 1, whole[:50]),
        piece(1 << 40, 0, 0, whole[:100]),
    ]


@contextlib.contextmanager
def fragments() -> Iterator[Run]:
    """Pieces of a message, put together: no byte outside it, and never a whole one with a hole."""

    def run(data: bytes) -> str:
        assembly = Assembly(1 << 20)
        at = sequence = 0
        outcome, came = "partial", b""
        while at + 32 <= len(data) and sequence < 8:
            (length,) = struct.unpack_from("=Q", data, at)
            payload = memoryview(data)[at + 8 : at + 8 + min(length, 4096)]
            try:
                assembly.add(sequence, payload)
                _, place, _ = struct.unpack_from("=QQQ", payload)
                came = came[:place] + bytes(payload[24:])  # what is in front of a piece must have come before it
            except CorruptFrame as error:
                outcome = name_of(error)
            if assembly.complete:
                if bytes(assembly.whole()) != came or len(came) > 1 << 20:
                    raise Wrong(f"{bytes(assembly.whole()).hex():.200} instead of {came.hex():.200}")
                outcome = "whole"
            at += 8 + len(payload)
            sequence += 1
        return outcome

    yield run


# ── holds ────────────────────────────────────────────────────────────────────────────────────────
def hold_seeds() -> list[bytes]:
    """References to blocks."""
    return [struct.pack("QQQQQ", 1, 0, 4096, 3, 7), struct.pack("QQQQQ", 1, 4096, 100, 0, 1), bytes(40)]


@contextlib.contextmanager
def holds() -> Iterator[Run]:
    """A hold, and the bytes that it leads to: inside the segment, or CorruptFrame."""
    with a_pair() as (queue, reader):
        queue.enqueue(torch.arange(40_000), timeout=1)
        reader.dequeue(timeout=1)
        borrower: Any = reader._borrower
        segment = next(iter(borrower._mappings.values()))

        def run(data: bytes) -> str:
            words = struct.unpack("QQQQQ", data[:40].ljust(40, b"\0"))
            try:
                view = borrower.borrow(words, 0)
            except CorruptFrame as error:
                return name_of(error)
            if len(view) != words[2] or words[1] + words[2] > segment.nbytes:
                raise Wrong(f"{words} of a segment of {segment.nbytes}")
            if len(view) and address_of(view) != segment.address + words[1]:
                raise Wrong(f"{words} lies elsewhere")
            bytes(view[-1:])
            return "a view"

        yield run
