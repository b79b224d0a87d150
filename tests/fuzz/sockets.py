"""The attach socket, at both ends, and the meeting of the ranks."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from arena import MessageQueue, QueueConfig, layout
from arena.device import Declined, Place
from arena.device.cpu import meeting
from arena.device.cpu.board import Board
from arena.errors import ArenaError
from arena.memory import Segment
from arena.peers.attachment import Attachment
from arena.probe import identity
from tests.fuzz.common import SETTINGS, Run, Wrong, name_of


@contextlib.contextmanager
def _said(data: bytes, fds: list[int]) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a connection, at one of which something was said."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
        ours.sendmsg([data or b" "], rights)
        yield ours, theirs


# ── at the writer ────────────────────────────────────────────────────────────────────────────────
def hello_seeds() -> list[bytes]:
    """Hellos with the secret, and without; {…} stand for what each run has of its own."""
    hello = {"magic": "arena-queue", "version": "{version}", "instance": "{instance}", "secret": "{secret}", "rank": 0}
    hello |= {"who": [1, 2, "{namespace}"], "where": ""}
    return [
        json.dumps(hello).encode(),
        json.dumps(hello | {"rank": 10**30}).encode(),
        json.dumps(hello | {"who": [1 << 70, -1, True]}).encode(),
        json.dumps(hello | {"rank": 1, "where": "host:1"}).encode(),
        json.dumps(hello | {"where": "host:" + "7" * 5000}).encode(),
        json.dumps(hello | {"secret": "\ud800"}).encode(),
        b'{"magic": "arena-queue"}',
        b"[" * 1500,
    ]


@contextlib.contextmanager
def hellos() -> Iterator[Run]:
    """What a stranger says, at the writer's attach thread's own entrance; each case with a control segment.

    Whoever gets the free seat leaves it again, and the writer sends a message to all that are there.
    """
    with MessageQueue(2, config=QueueConfig(**SETTINGS)) as queue, contextlib.ExitStack() as stack:
        handle = queue.export_handle()
        sitting = MessageQueue.create_from_handle(handle, 1)
        coming = MessageQueue.create_from_handle(handle, 0)
        control = coming._make_control()  # type: ignore[attr-defined]
        words = control.mapping.words(layout.LIVE_OFFSET, layout.READER_WORDS)
        for one in (control.close, sitting.shutdown, coming.shutdown):
            stack.callback(one)
        coming.shutdown()
        server: Any = queue._server  # type: ignore[attr-defined]
        own = {b'"{version}"': str(handle.version), b"{instance}": handle.instance, b"{secret}": handle.secret}
        own[b'"{namespace}"'] = str(identity().pid_namespace)

        def run(data: bytes) -> str:
            for mark, value in own.items():
                data = data.replace(mark, value.encode())
            words[layout.READER_CLOSED] = 0
            with _said(data, [control.fd] * (1 if len(data) % 8 else len(data) // 8 % 3)) as (_, theirs):
                try:
                    server._answer(theirs)
                except ArenaError as error:
                    return name_of(error)[:30]
                except Exception as error:  # the attach thread hangs up on it, and serves the next one
                    return f"hung up on {type(error).__name__}"
                _be_there_and_leave(queue, sitting, words)
            return "answered"

        yield run


def _be_there_and_leave(queue: Any, sitting: Any, words: Any) -> None:
    """What the writer does with a seat's words and its reader's name, while it is there and when it goes."""
    for closed in (0, layout.LEFT):
        words[layout.READER_CLOSED] = closed
        words[layout.CONSUMED] = queue._ring.published[0]
        with contextlib.suppress(ArenaError):
            queue.enqueue(0, timeout=0)
        if sitting.dequeue(timeout=1) != 0:
            raise Wrong("another message")
        queue.statistics()
        repr(queue)
        queue._roster.reap()
    queue.wait_until_ready(timeout=0)


# ── at a reader ──────────────────────────────────────────────────────────────────────────────────
def answer_seeds() -> list[bytes]:
    """What a writer says to its reader."""
    return [
        b'{"segments": [[0, 36864]]}',
        b'{"segments": [[0, 36864], [1, 262144]]}',
        b'{"refused": "no such rank", "kind": "AttachRefused"}',
        b'{"segment": [3, 262144]}',
        b"[" * 1500,
    ]


@contextlib.contextmanager
def answers() -> Iterator[Run]:
    """An answer, and a push after it, as a reader takes them."""
    memfd = os.memfd_create("fuzz", os.MFD_CLOEXEC)

    def run(data: bytes) -> str:
        count = min(8, data.count(b"[") - 1 if b"segments" in data else data.count(b"["))
        with _said(data, [memfd] * count) as (ours, theirs):
            ours.sendmsg([data or b" "], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [memfd] * max(0, count)))])
            attachment = Attachment.__new__(Attachment)
            attachment._connection = theirs
            attachment._segments = {}
            attachment.process = _Silent()  # type: ignore[assignment]
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


# ── the meeting of the ranks ─────────────────────────────────────────────────────────────────────
_SLOT_BYTES = 4096
_NBYTES = layout.BOARD_SLOTS_OFFSET + layout.BOARD_SLOTS * _SLOT_BYTES


def meeting_seeds() -> list[bytes]:
    """The head of a segment, and what is said along with it."""
    said = [b'{"rank": 1}', b'{"rank": 2}', b'{"rank": 0}', b'{"rank": true}', b'{"rank": -1}', b'{"rank": 7}', b"[]"]
    ranks = (1, 2, 0, 1, (1 << 64) - 1, 7, 1)
    heads = [struct.pack("=5Q", *meeting._head(0, 3, _SLOT_BYTES)) for _ in said]
    heads = [head[:16] + struct.pack("=Q", rank) + head[24:] for head, rank in zip(heads, ranks, strict=True)]
    return [head + text for head, text in zip(heads, said, strict=True)] + [heads[0] + b"[" * 1500]


@contextlib.contextmanager
def meetings() -> Iterator[Run]:
    """What comes to the meeting of three ranks in place of another's memory; rank 2's is here already."""
    place = Place(0, 3, torch.device("cpu"), None, Path("."))  # type: ignore[arg-type]
    own, second, sent = (Segment.create(f"board-{at}", _NBYTES) for at in range(3))
    words = sent.mapping.raw_words(0, layout.BOARD_HEAD_WORDS)
    known = meeting.Peer(2, Segment.attach(os.dup(second.fd), _NBYTES).mapping, _Silent())  # type: ignore[arg-type]

    def run(data: bytes) -> str:
        for at, word in enumerate(struct.unpack("=5Q", data[:40].ljust(40, b"\0"))):
            words[at] = word
        with _said(data[40:], [sent.fd] * (1 if len(data) % 8 else len(data) // 8 % 3)) as (_, theirs):
            listener: Any = SimpleNamespace(accept=lambda: (theirs, None))
            try:
                peer = meeting._take_one(place, listener, _NBYTES, {2})
            except Declined as declined:
                return f"Declined: {declined.text[:12]}"
            except ArenaError as error:
                return name_of(error)
        peer.process.close()
        board = Board(0, own.mapping, [peer, known])
        if [len(slots) for slots in board.slots(0)] != [_SLOT_BYTES] * 3:
            raise Wrong("a board without all of its slots")
        return f"rank {peer.rank}"

    yield run
