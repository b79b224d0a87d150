"""Whom a wait is charged to. A pure function over moments; the writer feeds it, telemetry reads its sums.

The writer waits for a slot from `started_ns`; the holders are the readers that had not released it then. The
moments are the readers' own release times, stored before `consumed`, because a writer asleep on one straggler
sees the others only when it wakes. "Some" and "full" are meant as in Linux pressure stall information.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Charge:
    """What one wait costs, in ns.

    Attributes:
        rank: the last reader to release, charged the whole wait.
        blocked_ns: the whole wait ("some").
        excess_ns: the part after every other reader had released: what this straggler alone costs.
        full_ns: the part during which every reader held the slot.
    """

    rank: int
    blocked_ns: int
    excess_ns: int
    full_ns: int


def charge(started_ns: int, ended_ns: int, released_ns: Mapping[int, int], n_counted: int) -> Charge:
    """Charge a wait that ended because the last holder released.

    Args:
        started_ns: when the writer began to wait.
        ended_ns: when it went on.
        released_ns: for each holder's rank, when it released the slot.
        n_counted: how many readers there are; "full" needs all of them among the holders.
    """
    moments = {rank: min(max(at, started_ns), ended_ns) for rank, at in released_ns.items()}
    last = max(moments, key=lambda rank: (moments[rank], -rank))
    others = [at for rank, at in moments.items() if rank != last]
    others_done_ns = max(others, default=started_ns)
    full_ns = min(moments.values()) - started_ns if len(moments) == n_counted else 0
    return Charge(last, ended_ns - started_ns, ended_ns - others_done_ns, full_ns)


def charge_unfinished(
    started_ns: int, ended_ns: int, released_ns: Mapping[int, int], lags: Mapping[int, int], n_counted: int
) -> Charge:
    """Charge a wait that a timeout or a death ended: to the holder that lags most, ties to the lowest rank.

    Args:
        started_ns: when the writer began to wait.
        ended_ns: when it gave up.
        released_ns: for each rank that held the slot and no longer does, when it released it.
        lags: for each rank that still holds the slot, how many frames it is behind.
        n_counted: how many readers there are.
    """
    worst = max(lags, key=lambda rank: (lags[rank], -rank))
    moments = [min(max(at, started_ns), ended_ns) for at in released_ns.values()]
    excess_ns = ended_ns - max(moments, default=started_ns) if len(lags) == 1 else 0
    full_ns = min(moments, default=ended_ns) - started_ns if len(moments) + len(lags) == n_counted else 0
    return Charge(worst, ended_ns - started_ns, excess_ns, full_ns)


def alone_since(started_ns: int, now_ns: int, released_ns: Mapping[int, int]) -> int:
    """Since when one holder is the only one, in a wait that goes on: where its excess begins.

    Args:
        started_ns: when the writer began to wait.
        now_ns: the time of the look.
        released_ns: for each other rank that held the slot, when it released it.
    """
    return min(max((started_ns, *released_ns.values())), now_ns)
