"""The parsers: what each is fed, and what may come out. `run` returns the outcome's name, and raises on a wrong one.

An outcome is a value that passed its own checks, or a class of `arena.errors`. Anything else that is raised, a signal,
a case without an end or memory beyond the limit is a finding.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import socket
import struct
import tempfile
from array import array
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from arena import Handle, MessageQueue, QueueConfig, layout
from arena.assembly import Assembly
from arena.codec import Encoder, Message, build_payload, decode, read_table
from arena.errors import ArenaError, CorruptFrame
from arena.peers.attachment import Attachment
from arena.plan import LARGEST, Key, Plan, Row, load, save
from arena.probe import BadPage, ProbeReader
from arena.probe.directory import owners

SLOT_BYTES = 4096
SLOTS = 8
SETTINGS = {"slots": SLOTS, "slot_bytes": SLOT_BYTES, "max_arena_bytes": 1 << 20, "segment_bytes": 1 << 18}
Run = Callable[[bytes], str]

torch.set_num_threads(1)  # a forked child has lost OpenMP's threads, and would wait for them for ever
MESSAGES: list[Any] = [
    {"step": 1, "ids": [1, 2, 3], "text": "twelve"},
    [torch.arange(100), "a table in the slot"],
    [torch.arange(40_000), "a block"],
    [torch.arange(6).reshape(2, 3).t(), torch.zeros(()), torch.empty(0, 3), torch.nn.Parameter(torch.ones(3))],
    "x" * 20_000,
    [bytearray(5000), torch.ones(9_000, dtype=torch.bfloat16)],
]


class Wrong(Exception):
    """Something came out that must not."""


_VARYING = re.compile(r"0x[0-9a-f]+|[0-9]+|'[^']*'|/\S+")


def name_of(error: Exception) -> str:
    """An outcome, with as much of what it says as tells one cause from another."""
    return f"{type(error).__name__}: {_VARYING.sub('', str(error)).partition(';')[0][:24]}"


@contextlib.contextmanager
def a_pair(**settings: Any) -> Iterator[tuple[MessageQueue, MessageQueue]]:
    """A queue and its only reader, in this process."""
    with (
        MessageQueue(1, config=QueueConfig(**{**SETTINGS, **settings})) as queue,
        MessageQueue.create_from_handle(queue.export_handle(), 0) as reader,
    ):
        yield queue, reader


# ── frames ───────────────────────────────────────────────────────────────────────────────────────
def _slot(queue: Any, sequence: int) -> memoryview:
    start = layout.SLOTS_OFFSET + sequence % SLOTS * SLOT_BYTES
    view: memoryview = queue._segment.mapping.view(start, SLOT_BYTES)
    return view


def frame_seeds(**settings: Any) -> list[bytes]:
    """The slots of real messages on every path, each with its sequence taken off its tag."""
    seeds = []
    for changes in ({}, {"max_arena_bytes": 0}):
        with a_pair(**settings, **changes) as (queue, reader):
            for message in MESSAGES:
                first = queue.statistics().published
                with contextlib.suppress(ArenaError):
                    queue.enqueue(message, timeout=0)
                for sequence in range(first, queue.statistics().published):
                    data = bytearray(_slot(queue, sequence))
                    kind = struct.unpack_from("=Q", data)[0] - sequence
                    struct.pack_into("=Q", data, 0, kind)
                    if kind != layout.KIND_FRAGMENT or sequence - first < 2:  # they are many, and all alike
                        seeds.append(bytes(data))
                with contextlib.suppress(ArenaError):
                    while True:
                        reader.dequeue(timeout=0)
    return seeds


@contextlib.contextmanager
def frames(**settings: Any) -> Iterator[Run]:
    """A reader whose ring holds the case as its next slot, header and all."""
    with a_pair(**settings) as (queue, reader):
        for _ in range(2):  # a segment that frames may name
            queue.enqueue(torch.arange(40_000), timeout=1)
            reader.dequeue(timeout=1)
        ring, end = queue._ring, reader  # type: ignore[attr-defined]
        consumed = end._consumed  # type: ignore[attr-defined]

        def run(data: bytes) -> str:
            sequence = consumed[0]
            slot = _slot(queue, sequence)
            slot[: len(data)] = data[:SLOT_BYTES]
            words = slot[:8].cast("Q")
            words[0] = (words[0] + sequence) % (1 << 64)
            ring.published[0] = sequence + 1
            try:
                obj = reader.dequeue(timeout=0)
                for one in obj if isinstance(obj, list) else [obj]:
                    if isinstance(one, torch.Tensor):
                        _check_tensor(one)
                return type(obj).__name__
            except ArenaError as error:
                return name_of(error)
            finally:
                obj = one = None
                consumed[0] = sequence + 1
                if sequence % 16 == 0:
                    end._assembly.drop()  # type: ignore[attr-defined]

        yield run


def _check_tensor(tensor: torch.Tensor) -> None:
    """Every element of it lies in its storage, and can be read."""
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return
    if tensor.numel():
        reach = tensor.storage_offset() + sum(
            (n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)
        )
        if (reach + 1) * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise Wrong(
                f"a tensor of {tensor.shape} {tensor.stride()} beyond its {tensor.untyped_storage().nbytes()} bytes"
            )
        if tensor.numel() < 1 << 20 and not tensor.is_quantized and max(tensor.stride(), default=0) < 1 << 40:
            with contextlib.suppress(RuntimeError):  # strides next to 2^63 that nothing goes along: torch says no
                tensor.detach().clone(memory_format=torch.contiguous_format)


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

    def run(data: bytes) -> str:
        try:
            table = read_table(memoryview(data))
        except CorruptFrame as error:
            return name_of(error)
        for segment, at, nbytes, _, _ in table.entries:
            if segment == 0 and at + nbytes > len(data):
                raise Wrong(f"buffer {at}+{nbytes} of a payload of {len(data)}")
        if not 0 <= table.specs[0] <= table.specs[1] <= table.pickle[0] <= table.pickle[1] <= len(data):
            raise Wrong(f"{table.specs} {table.pickle} in {len(data)}")
        return f"a table of {min(len(table.entries), 4)}, {min(len(table.holds), 4)} of them holds"

    yield run


def spec_seeds() -> list[bytes]:
    """Words that say how tensors lie in a buffer."""
    return [struct.pack("=8q", 3, 0, 1, 10, 1, 1, 1, 0), struct.pack("=8q", 0, 5, 2, 4, 3, 3, 1, 1), bytes(64)]


DTYPES = ("float32", "int64", "bfloat16", "uint8", "bool", "complex128", "float8_e4m3fn", "no_such", "Tensor", "float")


@contextlib.contextmanager
def specs() -> Iterator[Run]:
    """Shapes, strides and offsets of tensors over a small buffer: none may reach beyond it."""
    buffers: list[pickle.PickleBuffer] = []

    def run(data: bytes) -> str:
        words = list(struct.unpack("=8q", data[:64].ljust(64, b"\0")))
        dims = words[2] % 4
        shape, stride = tuple(words[3 : 3 + dims]), tuple(words[5 : 5 + dims])
        spec = (DTYPES[words[0] % len(DTYPES)], words[1], shape, stride, bool(words[7] & 1), bool(words[7] & 2))
        nbytes = words[6] % 200
        text = pickle.dumps([(0, spec)], 5)
        pickled = pickle.dumps(pickle.PickleBuffer(bytearray()), 5, buffer_callback=buffers.append)
        buffers.clear()
        table = struct.pack("QQQ", 1, len(text), len(pickled)) + struct.pack("QQQQQ", 0, 64 + len(text), nbytes, 0, 0)
        payload = table + text + bytes(nbytes) + pickled
        try:
            obj = decode(read_table(memoryview(payload)), {}, "readonly")
        except ArenaError as error:
            return name_of(error)
        except Exception as error:  # the reader wraps it in DecodeFailed
            return f"DecodeFailed by {name_of(error)[:40]}"
        if isinstance(obj, torch.Tensor):
            _check_tensor(obj)
        return type(obj).__name__

    yield run


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
        outcome = "partial"
        while at + 32 <= len(data) and sequence < 8:
            (length,) = struct.unpack_from("=Q", data, at)
            payload = memoryview(data)[at + 8 : at + 8 + min(length, 4096)]
            try:
                assembly.add(sequence, payload)
            except CorruptFrame as error:
                outcome = name_of(error)
            if assembly.complete:
                if len(assembly.whole()) > 1 << 20:
                    raise Wrong("longer than any message")
                outcome = "whole"
            at += 8 + len(payload)
            sequence += 1
        return outcome

    yield run


def hold_seeds() -> list[bytes]:
    """References to blocks."""
    return [struct.pack("QQQQQ", 1, 0, 4096, 3, 7), struct.pack("QQQQQ", 1, 4096, 100, 0, 1), bytes(40)]


@contextlib.contextmanager
def holds() -> Iterator[Run]:
    """A hold, and the bytes that it leads to: inside the segment, or CorruptFrame."""
    with a_pair() as (queue, reader):
        queue.enqueue(torch.arange(40_000), timeout=1)
        reader.dequeue(timeout=1)
        borrower: Any = reader._borrower  # type: ignore[attr-defined]
        segment_bytes = next(iter(borrower._mappings.values())).nbytes

        def run(data: bytes) -> str:
            words = struct.unpack("QQQQQ", data[:40].ljust(40, b"\0"))
            try:
                view = borrower.borrow(words, 0)
            except CorruptFrame as error:
                return name_of(error)
            if len(view) != words[2] or words[1] + words[2] > segment_bytes:
                raise Wrong(f"{words} of a segment of {segment_bytes}")
            bytes(view[-1:])
            return "a view"

        yield run


# ── words that the other end writes ──────────────────────────────────────────────────────────────
def control_seeds() -> list[bytes]:
    """Pairs: a place in a reader's control segment, and what is written there."""
    live = layout.LIVE_OFFSET // 8
    return [
        struct.pack("=QQ", live + layout.CONSUMED, 1),
        struct.pack("=QQ", live + layout.READER_PARKED, 1),
        struct.pack("=QQ", live + layout.READER_CLOSED, 1),
        struct.pack("=QQ", layout.RELEASED_OFFSET // 8, 5),
        struct.pack("=QQQQ", layout.RELEASED_OFFSET // 8 + SLOTS, 1, layout.RELEASED_OFFSET // 8 + SLOTS + 1, 2),
        struct.pack("=QQQQ", layout.RELEASED_OFFSET // 8 + SLOTS, 1 << 62, live, (1 << 64) - 1),
    ]


@contextlib.contextmanager
def controls() -> Iterator[Run]:
    """A reader's control words, as a writer reads them; the segment is as it was before each case."""
    with a_pair() as (queue, reader):
        words = _control_of(reader).view().cast("Q")

        def run(data: bytes) -> str:
            kept = []
            for at in range(0, len(data) - 15, 16):
                place, value = struct.unpack_from("=QQ", data, at)
                place = layout.LIVE_OFFSET // 8 + place % (len(words) - layout.LIVE_OFFSET // 8)
                if place == layout.LIVE_OFFSET // 8 + layout.READER_CLOSED:
                    value = 0  # that it left is for good, and there would be no further case
                kept.append((place, words[place]))
                words[place] = value
            outcome = "sent"
            try:
                queue.enqueue([1, torch.ones(20_000)], timeout=0)
            except ArenaError as error:
                outcome = name_of(error)
            queue.statistics()
            repr(queue)
            for place, value in reversed(kept):
                words[place] = value
            with contextlib.suppress(ArenaError):
                while True:
                    reader.dequeue(timeout=0)
            return outcome

        yield run


def _control_of(reader: Any) -> Any:
    """The mapping behind a reader's own words."""
    import gc

    from arena.memory import Mapping

    for one in gc.get_objects():
        if isinstance(one, Mapping) and one.writable and one.nbytes == reader._handle.geometry.control_bytes:
            return one
    raise LookupError("no control segment in this process")


# ── the attach socket ────────────────────────────────────────────────────────────────────────────
def hello_seeds() -> list[bytes]:
    """Hellos with the secret, and without; {…} stand for what each run has of its own."""
    hello = {"magic": "arena-queue", "version": "{version}", "instance": "{instance}", "secret": "{secret}", "rank": 0}
    hello |= {"who": [1, 2, 3], "where": ""}
    return [
        json.dumps(hello).encode(),
        json.dumps(hello | {"rank": 10**30}).encode(),
        json.dumps(hello | {"who": [1 << 70, -1, True]}).encode(),
        json.dumps(hello | {"where": "host:1"}).encode(),
        b'{"magic": "arena-queue"}',
    ]


@contextlib.contextmanager
def hellos() -> Iterator[Run]:
    """What a stranger says, at the writer's attach thread's own entrance; each case with a control segment."""
    with MessageQueue(1, config=QueueConfig(**SETTINGS)) as queue, contextlib.ExitStack() as stack:
        handle = queue.export_handle()
        reader = MessageQueue.create_from_handle(handle, 0)  # so that no case can take the rank for good
        stack.callback(reader.shutdown)
        server: Any = queue._server  # type: ignore[attr-defined]
        control = reader._make_control()  # type: ignore[attr-defined]
        stack.callback(control.close)
        own = {b'"{version}"': str(handle.version), b"{instance}": handle.instance, b"{secret}": handle.secret}

        def run(data: bytes) -> str:
            for mark, value in own.items():
                data = data.replace(mark, value.encode())
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with ours, theirs:
                rights = array("i", [control.fd] * (len(data) % 3))
                ours.sendmsg([data or b" "], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if rights else [])
                try:
                    server._answer(theirs)
                except ArenaError as error:
                    return name_of(error)
                except Exception as error:  # the attach thread hangs up on it, and serves the next one
                    return f"hung up on {type(error).__name__}"
                return "answered"

        yield run


def answer_seeds() -> list[bytes]:
    """What a writer says to its reader."""
    return [
        b'{"segments": [[0, 36864]]}',
        b'{"segments": [[0, 36864], [1, 262144]]}',
        b'{"refused": "no such rank", "kind": "AttachRefused"}',
        b'{"segment": [3, 262144]}',
    ]


@contextlib.contextmanager
def answers() -> Iterator[Run]:
    """An answer, and a push after it, as a reader takes them."""
    memfd = os.memfd_create("fuzz", os.MFD_CLOEXEC)

    def run(data: bytes) -> str:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            attachment = Attachment.__new__(Attachment)
            attachment._connection = theirs
            attachment._segments = {}
            attachment.process = _Silent()  # type: ignore[assignment]
            rights = array("i", [memfd] * (data.count(b"[") - 1 if b"segments" in data else data.count(b"[")))
            rights = rights[:8]
            for _ in range(2):
                ours.sendmsg([data or b" "], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if rights else [])
            try:
                attachment._take_answer(0)
                attachment.segment(3)
                return f"{min(len(attachment._segments), 3)} segments"
            except ArenaError as error:
                return type(error).__name__  # what a refusal says is the writer's own text
            finally:
                attachment.close()

    try:
        yield run
    finally:
        os.close(memfd)


class _Silent:
    """A process that lives and says nothing."""

    fd = None

    def is_alive(self) -> bool:
        return True

    def close(self) -> None:
        pass


def handle_seeds() -> list[bytes]:
    """Fields of a handle by number, and what they become, as JSON."""
    values: list[Any] = [0, -1, 1 << 40, 1.5, "x", "", None, [], {}, True, "/nowhere", "a" * 300]
    return [
        json.dumps([number, value]).encode() for number in range(0, len(fields(Handle)), 3) for value in values[::2]
    ]


@contextlib.contextmanager
def handles() -> Iterator[Run]:
    """A handle with one field of another value or type."""
    with MessageQueue(1, config=QueueConfig(**SETTINGS)) as queue:
        handle = queue.export_handle()
        names = [one.name for one in fields(Handle)]

        def run(data: bytes) -> str:
            try:
                number, value = json.loads(data)
                name = names[number % len(names)]
            except (TypeError, ValueError, RecursionError, OverflowError):
                return "no case"
            if name == "remote":
                return "no case"
            changed = replace(handle, **{name: value})
            try:
                reader = MessageQueue.create_from_handle(changed, 0, timeout=2)
            except ArenaError as error:
                return name_of(error)
            reader.shutdown()
            return "attached"

        yield run


# ── files ────────────────────────────────────────────────────────────────────────────────────────
def page_seeds() -> list[bytes]:
    """A writer's page and a reader's."""
    with a_pair() as (queue, reader):
        for number in range(6):
            queue.enqueue([number, torch.ones(20_000)], timeout=1)
            reader.dequeue(timeout=1)
        directory = Path(queue.export_handle().directory)
        return [path.read_bytes() for path in directory.iterdir() if path.name.startswith(("writer", "reader-"))]


@contextlib.contextmanager
def pages() -> Iterator[Run]:
    """A probe page: what is in it, or BadPage."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        path = Path(place) / "writer"

        def run(data: bytes) -> str:
            path.write_bytes(data)
            try:
                with ProbeReader(path) as reader:
                    reader.samples(), reader.events(), reader.blocks(), reader.marks(), reader.values_and_wait()
                    reader.check_unchanged()
                    return f"a page of a {reader.role.name}"
            except BadPage as error:
                return name_of(error)

        yield run


def owner_seeds() -> list[bytes]:
    """What a queue's maker leaves."""
    return [b"4711 123456 4026531836\n", b"", b"1 2", b"-1 -1 -1", b"99999999999999999999 1 1"]


@contextlib.contextmanager
def makers() -> Iterator[Run]:
    """The owner file in a queue's directory, as `arena gc` reads it."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        path = Path(place) / "owner"

        def run(data: bytes) -> str:
            path.write_bytes(data)
            return f"{len(list(owners(Path(place))))} owners"

        yield run


KEY = Key("cpu", "x86", "none", 2, "1")


def plan_seeds() -> list[bytes]:
    """A plan as it is kept."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "plan.json"
        save(Plan((Row(1 << 16, ("cpu_one_shot", "gloo")), Row(LARGEST, ("gloo",)))), KEY, path)
        return [path.read_bytes()]


@contextlib.contextmanager
def plans() -> Iterator[Run]:
    """A tuned plan in the cache directory."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        path = Path(place) / "plan.json"

        def run(data: bytes) -> str:
            path.write_bytes(data)
            try:
                plan = load(KEY, path)
            except ArenaError as error:
                return name_of(error)
            plan.candidates(12345)
            return "a plan"

        yield run


PARSERS: dict[str, tuple[Callable[[], list[bytes]], Callable[[], contextlib.AbstractContextManager[Run]]]] = {
    "frame": (frame_seeds, frames),
    "frame-restricted": (
        lambda: frame_seeds(serializer="restricted"),
        lambda: frames(serializer="restricted"),
    ),
    "table": (table_seeds, tables),
    "spec": (spec_seeds, specs),
    "fragment": (fragment_seeds, fragments),
    "hold": (hold_seeds, holds),
    "control": (control_seeds, controls),
    "hello": (hello_seeds, hellos),
    "answer": (answer_seeds, answers),
    "handle": (handle_seeds, handles),
    "page": (page_seeds, pages),
    "owner": (owner_seeds, makers),
    "plan": (plan_seeds, plans),
}
IN_PLACE = frozenset(("frame", "frame-restricted", "control", "hold", "page", "spec"))
"""What has its fields at fixed places: bytes are changed there, and none are added or taken away."""
