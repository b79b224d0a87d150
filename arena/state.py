"""Every legal move, as one table: the code moves by it, the README draws it, the tests use it as oracle.

Five small machines run Arena. A move that is not in the table is a bug in Arena, never a state to cope with.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Final, TypeVar


class _State(IntEnum):
    """A state, hashed as the number it is: Enum's own hash is a Python call, and a message makes several moves."""

    __hash__ = int.__hash__


class Endpoint(_State):
    """What an endpoint is doing, in the word that observers read. Verdicts (OK, STALLED...) are theirs."""

    NEW = 0
    WORKING = 1  # in the caller's code, or in a call that has what it needs
    WAITING = 2  # for a message, or for a slot
    GATE = 3  # for a device copy to pass
    CLOSED = 4
    FORKED = 5  # the copy of an endpoint that a forked child inherited; unusable there


class Peer(_State):
    """A rank, as the writer sees it."""

    EXPECTED = 0  # not attached yet, and counted: nothing is lost before it comes
    ATTACHED = 1
    JOINING = 2  # attached after an earlier incarnation ended; not counted until the writer admits it
    LEFT = 3
    DEAD = 4


class Block(_State):
    """A range of the tensor arena."""

    FREE = 0
    LENT = 1  # the writer's own tensor lives there
    HELD = 2  # readers hold it
    LENT_AND_HELD = 3


class Message(_State):
    """The message under way: at the writer the one being sent, at a reader the one being put together."""

    NONE = 0
    PARTIAL = 1  # some fragments are through
    OWED_ABORT = 2  # the writer gave up half-way; readers must hear of it before the next message


class Pin(_State):
    """A segment of the arena, as one process's device sees it."""

    UNPINNED = 0
    PINNING = 1
    PINNED = 2
    FAILED = 3  # for a reason that is kept with it; copies go the slow way


State = TypeVar("State", bound=IntEnum)

MOVES: Final[tuple[tuple[IntEnum, str, IntEnum], ...]] = (
    (Endpoint.NEW, "attach", Endpoint.WORKING),
    (Endpoint.WORKING, "wait", Endpoint.WAITING),
    (Endpoint.WAITING, "proceed", Endpoint.WORKING),
    (Endpoint.WORKING, "gate", Endpoint.GATE),
    (Endpoint.GATE, "proceed", Endpoint.WORKING),
    (Endpoint.NEW, "close", Endpoint.CLOSED),
    (Endpoint.WORKING, "close", Endpoint.CLOSED),
    (Endpoint.WAITING, "close", Endpoint.CLOSED),
    (Endpoint.GATE, "close", Endpoint.CLOSED),
    (Endpoint.NEW, "fork", Endpoint.FORKED),
    (Endpoint.WORKING, "fork", Endpoint.FORKED),
    (Endpoint.WAITING, "fork", Endpoint.FORKED),
    (Endpoint.GATE, "fork", Endpoint.FORKED),
    (Endpoint.CLOSED, "fork", Endpoint.FORKED),
    (Peer.EXPECTED, "attach", Peer.ATTACHED),
    (Peer.ATTACHED, "leave", Peer.LEFT),
    (Peer.ATTACHED, "die", Peer.DEAD),
    (Peer.LEFT, "attach", Peer.JOINING),
    (Peer.DEAD, "attach", Peer.JOINING),
    (Peer.JOINING, "admit", Peer.ATTACHED),
    (Peer.JOINING, "leave", Peer.LEFT),
    (Peer.JOINING, "die", Peer.DEAD),
    (Block.FREE, "lend", Block.LENT),
    (Block.LENT, "hold", Block.LENT_AND_HELD),
    (Block.LENT, "drop", Block.FREE),
    (Block.LENT_AND_HELD, "hold", Block.LENT_AND_HELD),
    (Block.LENT_AND_HELD, "drop", Block.HELD),
    (Block.LENT_AND_HELD, "return", Block.LENT),
    (Block.HELD, "return", Block.FREE),
    (Message.NONE, "fragment", Message.PARTIAL),
    (Message.PARTIAL, "fragment", Message.PARTIAL),
    (Message.PARTIAL, "complete", Message.NONE),
    (Message.PARTIAL, "give up", Message.OWED_ABORT),
    (Message.PARTIAL, "abort", Message.NONE),
    (Message.OWED_ABORT, "abort", Message.NONE),
    (Pin.UNPINNED, "want", Pin.PINNING),
    (Pin.PINNING, "register", Pin.PINNED),
    (Pin.PINNING, "refuse", Pin.FAILED),
)

# With the type: states of two machines are equal, as keys too, where their numbers are.
_AFTER: Final[dict[tuple[type[IntEnum], IntEnum, str], Any]] = {
    (type(before), before, event): after for before, event, after in MOVES
}


def move(state: State, event: str) -> State:
    """The state after `event`.

    Raises:
        AssertionError: the move is not in the table, which is a bug in Arena.
    """
    after: State | None = _AFTER.get((type(state), state, event))
    if after is None:
        raise AssertionError(f"illegal move: {type(state).__name__} {state.name} on {event!r}")
    return after


def diagram(machine: type[IntEnum]) -> str:
    """The machine as a Mermaid state diagram; README carries exactly this text."""
    lines = ["stateDiagram-v2"]
    lines += [f"    {a.name} --> {b.name}: {event}" for a, event, b in MOVES if isinstance(a, machine)]
    return "\n".join(lines)
