"""Words in shared memory that another process owns: a reader's, the writer's, those of another rank."""

from __future__ import annotations

import contextlib
import gc
import struct
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from arena import layout
from arena.device.cpu import board as boards
from arena.device.cpu.exchange import Exchange
from arena.device.cpu.sums import Adder
from arena.device.cpu.tag import Tag
from arena.errors import ArenaError
from arena.memory import Mapping, Segment
from tests.fuzz.common import SLOTS, Run, Wrong, a_pair, name_of, pairs_of, written


# ── a reader's, at the writer ────────────────────────────────────────────────────────────────────
def control_seeds() -> list[bytes]:
    """Pairs: a place in a reader's control segment, and what is written there."""
    live, holds = layout.LIVE_OFFSET // 8, layout.RELEASED_OFFSET // 8 + SLOTS
    return [
        struct.pack("=QQ", live + layout.CONSUMED, 1),
        struct.pack("=QQ", live + layout.READER_PARKED, 1),
        struct.pack("=QQ", live + layout.READER_CLOSED, 1),
        struct.pack("=QQ", layout.RELEASED_OFFSET // 8, 5),
        struct.pack("=QQQQ", holds, 1, holds + 1, 2),
        struct.pack("=QQQQ", holds, 1 << 62, live, (1 << 64) - 1),
        struct.pack("=QQQQ", holds, 3 << 62 | 1, holds + 4096, 200 << 56),
    ]


@contextlib.contextmanager
def controls() -> Iterator[Run]:
    """A reader's control words, as a writer reads them; the segment is as it was before each case."""
    with a_pair(min_block_bytes=1024) as (queue, reader):
        words = _control_of(reader).view().cast("Q")
        live = layout.LIVE_OFFSET // 8
        message = bytearray(range(256)) * 20  # in a block
        consumed, published = reader._consumed, queue._ring.published

        def run(data: bytes) -> str:
            changes = [(live + place % (len(words) - live), value) for place, value in pairs_of(data)]
            # That it left is for good, and there would be no further case.
            changes = [(place, 0 if place == live + layout.READER_CLOSED else value) for place, value in changes]
            outcome = "sent"
            with written(words, changes):
                try:
                    queue.enqueue(message, timeout=0)
                except ArenaError as error:
                    outcome = name_of(error)
                if outcome != "sent" or len(changes) > 1:
                    queue.statistics()
                    repr(queue)
            while consumed[0] < published[0]:
                with contextlib.suppress(ArenaError):  # of an earlier case, which was given up
                    if reader.dequeue(timeout=0) != message:
                        raise Wrong("another message")
            return outcome

        yield run


def _control_of(reader: Any) -> Mapping:
    """The mapping behind a reader's own words."""
    for one in gc.get_objects():
        if isinstance(one, Mapping) and one.writable and one.nbytes == reader._handle.geometry.control_bytes:
            return one
    raise LookupError("no control segment in this process")


# ── the writer's, at a reader ────────────────────────────────────────────────────────────────────
def ring_seeds() -> list[bytes]:
    """Pairs: a place in the first page of the ring, and what is written there."""
    live, ranks = layout.LIVE_OFFSET // 8, layout.RANKS_OFFSET // 8
    return [
        struct.pack("=QQ", live + layout.PUBLISHED, 1),
        struct.pack("=QQ", live + layout.WRITER_PARKED, 1),
        struct.pack("=QQ", live + layout.WRITER_CLOSED, 1),
        struct.pack("=QQ", live + layout.READY, 0),
        struct.pack("=QQQQ", ranks, layout.NOT_ADMITTED, ranks + 1, 3),
        struct.pack("=QQQQ", ranks, 2, live, (1 << 64) - 1),
    ]


@contextlib.contextmanager
def rings() -> Iterator[Run]:
    """The writer's words, as a reader reads them that attaches and then looks for a message."""
    with a_pair() as (queue, reader):
        words = queue._segment.mapping.raw_words(0, layout.SLOTS_OFFSET // layout.WORD)
        live, consumed = layout.LIVE_OFFSET // 8, reader._consumed

        def run(data: bytes) -> str:
            changes = [(live + place % (len(words) - live), value) for place, value in pairs_of(data)]
            reader._admitted, reader._attention = False, True
            outcome = ""
            with written(words, changes):
                for verb in (reader.dequeue, reader.wait_until_ready):
                    try:
                        outcome += f"{type(verb(timeout=0)).__name__} "
                    except ArenaError as error:
                        outcome += f"{name_of(error)} "
                reader.statistics()
                repr(reader)
            consumed[0] = queue._ring.published[0]
            reader._assembly.drop()
            return outcome

        yield run


# ── another rank's ───────────────────────────────────────────────────────────────────────────────
_SLOT_BYTES = 4096
_WORLD = 3


def board_seeds() -> list[bytes]:
    """Pairs: a place in one of the other ranks' words, and what is written there."""
    tag = Tag.of(torch.zeros(2, 8), 1, "all_gather").word
    return [
        struct.pack("=QQQQ", layout.ARRIVED, 1, layout.TAGS + layout.LINE_WORDS, tag),
        struct.pack("=QQQQ", layout.BOARD_WORDS + layout.ARRIVED, 1, layout.BOARD_STATE, boards.CLOSED),
        struct.pack("=QQQQ", layout.BOARD_PARKED, 1, layout.BOARD_WORDS + layout.BOARD_STATE, boards.BROKEN),
        struct.pack("=QQQQ", layout.TAGS + layout.LINE_WORDS, tag ^ 1, layout.TAGS + layout.LINE_WORDS, (1 << 64) - 1),
    ]


class _Gone:
    """A rank's process that has ended: nothing waits for it for ever."""

    who = SimpleNamespace(pid=4711)

    def is_alive(self) -> bool:
        return False

    def signal(self) -> None:
        return None

    def ending(self) -> str:
        return "an unknown cause"

    def close(self) -> None:
        pass


@contextlib.contextmanager
def others() -> Iterator[Run]:
    """The words of two other ranks, in an all-gather: what they put down, or an error of Arena's."""
    nbytes = layout.BOARD_SLOTS_OFFSET + layout.BOARD_SLOTS * _SLOT_BYTES
    segments = [Segment.create(f"board-{rank}", nbytes) for rank in range(_WORLD)]
    for rank, segment in enumerate(segments):
        segment.mapping.view(layout.BOARD_SLOTS_OFFSET)[:] = bytes([rank]) * (layout.BOARD_SLOTS * _SLOT_BYTES)
    maps = [Segment.attach(segment.fd, nbytes).mapping for segment in segments[1:]]
    board = boards.Board(0, segments[0].mapping, [boards.Peer(at + 1, one, _Gone()) for at, one in enumerate(maps)])
    exchange = Exchange(board, Adder(_WORLD, _SLOT_BYTES), 1)
    given = torch.zeros(2, 8)
    tag = Tag.of(given, 1, "all_gather").word
    own = segments[0].mapping.words(layout.LIVE_OFFSET, layout.BOARD_WORDS)
    theirs = [segment.mapping.raw_words(layout.LIVE_OFFSET, layout.BOARD_WORDS) for segment in segments[1:]]
    good = [(layout.ARRIVED, 1), (layout.TAGS + layout.LINE_WORDS, tag), (layout.BOARD_STATE, boards.OPEN)]

    def run(data: bytes) -> str:
        board.step, board.lost = 0, None
        own[layout.BOARD_STATE] = boards.OPEN
        pairs = pairs_of(data)
        with contextlib.ExitStack() as stack:
            for rank, words in enumerate(theirs):
                changes = [(at % layout.BOARD_WORDS, n) for at, n in pairs if at // layout.BOARD_WORDS % 2 == rank]
                stack.enter_context(written(words, good + changes))
            try:
                out = exchange.all_gather(given)
            except ArenaError as error:
                return name_of(error)
        rows = out.reshape(_WORLD, -1).view(torch.uint8)
        if [set(row.tolist()) for row in rows] != [{0}, {1}, {2}]:
            raise Wrong(f"{rows}")
        return "gathered"

    yield run
