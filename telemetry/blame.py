"""Who holds whom, right now: the blame of a wait that is not over, and the words for it.

A wait that is over was charged by the writer itself. Of one that goes on, only what can't change any more may be added
to a counter: once a single reader holds the slot, and no other that held it died, that reader will be charged the
whole wait. Until then the wait shows in gauges alone.

Three words name every relation: `awaiting_readers` (the writer waits for this reader, or for these), `awaiting_write`
(the reader waits for the writer), `already_read` (the writer waits, and not for this reader).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from telemetry.reader import Endpoint, Queue

AWAITING_READERS: Final = "awaiting_readers"
AWAITING_WRITE: Final = "awaiting_write"
ALREADY_READ: Final = "already_read"


@dataclass(frozen=True)
class InProgress:
    """The writer's wait for a slot that is not over; all 0 when it does not wait.

    Attributes:
        lasted_ns: how long, up to the writer's last sign of life.
        pending: the ranks that hold the slot.
        charged: the rank that will be charged the whole wait; None while that is not certain.
        excess_ns: how long that rank has been the only one.
        full_ns: how long every reader has held the slot.
    """

    lasted_ns: int = 0
    pending: tuple[int, ...] = ()
    charged: int | None = None
    excess_ns: int = 0
    full_ns: int = 0


def in_progress(queue: Queue) -> InProgress:
    """The wait that the queue's writer is in."""
    if queue.writer is None or not queue.writer.wait.since_ns:
        return InProgress()
    wait = queue.writer.wait
    lasted_ns = max(0, wait.progress_ns - wait.since_ns)
    full_ns = lasted_ns if len(wait.pending) == queue.n_reader else 0
    if wait.alone is None:
        return InProgress(lasted_ns, wait.pending, full_ns=full_ns)
    rank, alone_ns = wait.alone
    excess_ns = min(lasted_ns, max(0, wait.progress_ns - alone_ns))
    return InProgress(lasted_ns, wait.pending, rank, excess_ns, full_ns)


def relation(queue: Queue, reader: Endpoint) -> str:
    """How a reader and the writer stand to each other: one of the three words, or "" when neither waits."""
    pending = in_progress(queue).pending
    if pending:
        return AWAITING_READERS if reader.rank in pending else ALREADY_READ
    return AWAITING_WRITE if reader.wait.since_ns and not queue.lag(reader) else ""
