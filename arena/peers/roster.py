"""Who sits at which rank, as the writer sees it, and the rules by which that changes."""

from __future__ import annotations

import socket
import threading
from array import array
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from arena import layout
from arena.errors import AttachRefused
from arena.held import HeldLock
from arena.layout import Geometry
from arena.memory import Futex, Mapping, Words, ordered_words
from arena.peers.process import Process
from arena.state import Peer, move

P = ParamSpec("P")
R = TypeVar("R")


def locked(method: Callable[Concatenate[Roster, P], R]) -> Callable[Concatenate[Roster, P], R]:
    """With the roster's lock held. The method's loops have no `with` around them in their own function: see
    `MessageQueue._new_lock`."""

    @wraps(method)
    def holding(self: Roster, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.lock:
            return method(self, *args, **kwargs)

    return holding


class Seat:
    """One incarnation of one rank, as the writer sees it.

    Until the reader attaches, its words are zeros of our own: it counts, and has consumed nothing.
    """

    __slots__ = (
        "connection",
        "first",
        "futex",
        "named",
        "pid",
        "process",
        "rank",
        "released",
        "returned",
        "state",
        "tickets",
        "where",
        "words",
    )

    def __init__(self, rank: int, state: Peer, geometry: Geometry) -> None:
        self.rank = rank
        self.state = state
        self.first = 0
        self.pid: int | None = None
        self.where = ""  # the host that the reader is on, if it is another
        self.process: Process | None = None
        self.connection: socket.socket | None = None
        absent = memoryview(array("Q", bytes(layout.READER_WORDS * layout.WORD)))
        self.words: Words = ordered_words(absent)
        self.futex: Futex | None = None
        self.released: Words = memoryview(array("Q", bytes(geometry.slots * layout.WORD)))
        self.returned: Words = memoryview(array("Q", bytes(geometry.max_holds * layout.WORD)))
        self.named: Words = memoryview(array("Q", bytes(geometry.max_holds * layout.NAMES * layout.WORD)))
        self.tickets: Words = memoryview(array("Q", bytes(layout.TICKETS_BYTES)))

    @property
    def consumed(self) -> int:
        """Frames released, counting those from before a joiner's time."""
        # SYNC POINT slot-reusable (observe): what the reader did with the slot came before its store
        return max(self.words[layout.CONSUMED], self.first)

    def describe(self) -> str:
        """`reader 2 (pid 4711)`, or that nobody came."""
        if self.pid is None:
            return f"reader {self.rank} (not attached yet)"
        return f"reader {self.rank} ({f'{self.where}:' if self.where else 'pid '}{self.pid})"

    def ending(self) -> str:
        """How it ended, in words."""
        if self.process is None:
            return "before it attached"
        if self.words[layout.READER_CLOSED] == layout.LOST:
            return "it, its host or the network between gave no sign of life for too long"
        if self.where:
            return f"with the forwarder (pid {self.process.who.pid}), which ended by {self.process.ending()}"
        return self.process.ending()

    def signal(self) -> int | None:
        """The signal that ended it; None where there was none, or nobody here can tell."""
        return None if self.process is None or self.where else self.process.signal()


class Roster:
    """All seats, and the rules by which they change. Two threads of the writer's process change it, under `lock`."""

    def __init__(self, n_reader: int, ring: Mapping, geometry: Geometry) -> None:
        self.lock = HeldLock()
        self.geometry = geometry
        self._ranks = ring.words(layout.RANKS_OFFSET, layout.MAX_READERS)
        self._live = ring.words(layout.LIVE_OFFSET, layout.WRITER_WORDS)
        self.seats = [Seat(rank, Peer.EXPECTED, geometry) for rank in range(n_reader)]
        self.counted: list[Seat] = list(self.seats)
        self.words: list[Words] = [seat.words for seat in self.seats]
        self.departed: list[Seat] = []  # left, but may still hold blocks
        self.deaths: list[Seat] = []  # not reported yet
        self.changed = False  # something for the writer's thread to see to
        self.news: list[tuple[str, Seat]] = []
        self.everyone_came = threading.Event()

    # ── the attach thread's part ─────────────────────────────────────────────────────────────────
    @locked
    def seat_reader(
        self, rank: int, control: Mapping, process: Process, connection: socket.socket, where: str = ""
    ) -> Seat:
        """Give a rank to a reader that has shown the secret; `where` is host:pid of one that `process` stands in for.

        Raises:
            AttachRefused: the rank does not exist, or somebody alive has it.
        """
        if not 0 <= rank < len(self.seats):
            raise AttachRefused(
                f"there is no rank {rank} in this queue",
                expected=f"a rank from 0 to {len(self.seats) - 1}",
                found=str(rank),
                remedy="create the queue with a larger n_reader, or correct the rank",
            )
        self._reap()
        seat = self.seats[rank]
        if seat.state in (Peer.ATTACHED, Peer.JOINING):
            raise AttachRefused(
                f"rank {rank} is taken",
                expected="one process per rank",
                found=f"{seat.describe()} attached as {rank} and alive",
                remedy="give each worker its own rank, or end that process first",
            )
        if seat.state is not Peer.EXPECTED:
            seat = self.seats[rank] = Seat(rank, seat.state, self.geometry)
            self._ranks[rank] = layout.NOT_ADMITTED
        seat.state = move(seat.state, "attach")
        self._fill(seat, control, process, connection)
        host, _, pid = where.rpartition(":")
        if host and pid.isdecimal():
            seat.where, seat.pid = host, int(pid)
        self.news.append(("attach", seat))
        self._recount()
        if all(one.state is not Peer.EXPECTED for one in self.seats):
            self._live[layout.READY] = 1
            self.everyone_came.set()
        return seat

    def _fill(self, seat: Seat, control: Mapping, process: Process, connection: socket.socket) -> None:
        seat.pid = process.who.pid
        seat.process = process
        seat.connection = connection
        seat.words = control.words(layout.LIVE_OFFSET, layout.READER_WORDS)
        seat.released = control.raw_words(layout.RELEASED_OFFSET, self.geometry.slots)
        seat.returned = control.words(self.geometry.returned_offset, self.geometry.max_holds)
        seat.named = control.raw_words(self.geometry.named_offset, self.geometry.max_holds * layout.NAMES)
        seat.tickets = control.words(self.geometry.tickets_offset, layout.TICKETS_BYTES // layout.WORD)
        seat.futex = control.futex(layout.LIVE_OFFSET + layout.CONSUMED * layout.WORD)

    # ── the writer's part ────────────────────────────────────────────────────────────────────────
    @locked
    def admit(self, sequence: int) -> None:
        """Between two messages: readers that joined take part from `sequence` on."""
        for seat in self.seats:
            if seat.state is Peer.JOINING:
                seat.first = sequence
                self._ranks[seat.rank] = sequence
                seat.state = move(seat.state, "admit")
        self._recount()
        self.changed = False

    @locked
    def reap(self) -> bool:
        """Notice who left or died; True if anybody did."""
        return self._reap()

    @locked
    def take_death(self) -> Seat:
        """The first death not reported yet."""
        return self.deaths.pop(0)

    @locked
    def take_news(self) -> list[tuple[str, Seat]]:
        """Arrivals and departures since the last call, for the event ring."""
        news, self.news = self.news, []
        return news

    @locked
    def missing(self) -> list[int]:
        """Ranks that have not attached."""
        return [seat.rank for seat in self.seats if seat.state is Peer.EXPECTED]

    @locked
    def connections(self) -> list[tuple[Seat, socket.socket]]:
        """The open connections of readers that may need new segments."""
        return [(seat, seat.connection) for seat in self.seats if seat.connection is not None]

    @locked
    def close(self) -> None:
        """Drop every connection and pidfd."""
        for seat in [*self.seats, *self.departed]:
            self._hang_up(seat)
            if seat.process is not None:
                seat.process.close()

    @locked
    def let_go(self, owing: set[Seat]) -> None:
        """Forget who left, once they owe no block; until then their death gives the block back."""
        for seat in self.departed:
            if seat not in owing and seat.process is not None:
                seat.process.close()
        self.departed = [seat for seat in self.departed if seat in owing]

    def _reap(self) -> bool:
        found = False
        for seat in self.seats:
            if seat.state in (Peer.ATTACHED, Peer.JOINING) and seat.process is not None:
                if seat.words[layout.READER_CLOSED] == layout.LEFT:
                    seat.state = move(seat.state, "leave")
                    self.departed.append(seat)
                    self.news.append(("leave", seat))
                elif seat.words[layout.READER_CLOSED] or seat.process.is_alive() is False:
                    seat.state = move(seat.state, "die")
                    self.deaths.append(seat)
                    self.news.append(("death", seat))
                    seat.process.close()
                else:
                    continue
                self._hang_up(seat)
                found = True
        if found:
            self._recount()
        return found

    def _hang_up(self, seat: Seat) -> None:
        connection, seat.connection = seat.connection, None
        if connection is not None:
            connection.close()

    def _recount(self) -> None:
        self.counted = [seat for seat in self.seats if seat.state in (Peer.EXPECTED, Peer.ATTACHED)]
        self.words = [seat.words for seat in self.counted]
        self.changed = True
