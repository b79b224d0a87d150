"""What is wrong, in sentences: which queue, who waits for whom, since when, in what state, and what to try.

A wait is worth a word once somebody would notice it, or once it is most of what the writer does; a reader once its
verdict is not OK. The words for a reader are those of `telemetry.health`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from telemetry.health import Verdict
from telemetry.monitor.facts import Moment, QueueFacts, ReaderFacts, is_ended, is_stopped
from telemetry.monitor.recent import QueueRates, ReaderRates, Recent
from telemetry.monitor.units import seconds, share

BLOCKED_S: Final = 0.2
"""A wait that lasted this long is called one: shorter ones are the ring at work."""

LONG_S: Final = 5.0
"""A wait that lasted this long is a stall whoever is waited for, as in the alert WriterStalled."""

SLOWED: Final = 0.2
"""The share of the time in waits from which on the writer is called slowed, as in the alert HeadOfLineBlocking."""

STRAGGLER: Final = 0.1
"""The share that one reader alone costs from which on it is in trouble, as in the same alert."""

_NAMED: Final = 3


class Severity(IntEnum):
    """How bad it is; the exit code of `arena doctor`."""

    HEALTHY = 0
    DEGRADED = 1
    STALLED = 2


@dataclass(frozen=True, slots=True)
class Says:
    """What there is to say of a queue: how bad, in a word for its row, and in a sentence."""

    severity: Severity
    word: str
    sentence: str


def of_queue(queue: QueueFacts, recent: Recent) -> Says:
    """The worst that is true of the queue."""
    return recent.once("says", queue, lambda queue: _of_queue(queue, recent))


def _of_queue(queue: QueueFacts, recent: Recent) -> Says:
    rates = recent.queue(queue)
    return (
        _ended(queue)
        or _writer_stopped(queue)
        or _blocked(queue)
        or _troubled_reader(queue)
        or _slowed(queue, rates, recent)
        or _lagging_reader(queue)
        or _well(queue, rates)
    )


def of_moment(moment: Moment, recent: Recent) -> tuple[Says, QueueFacts | None]:
    """The first line: the worst queue, and what is wrong with it."""
    if moment.stale_s:
        return Says(Severity.DEGRADED, "UNREACHABLE", _no_answer(moment)), None
    if not moment.queues:
        return Says(Severity.HEALTHY, "NO QUEUE", f"NO QUEUE in {moment.source}; waiting for one"), None
    said = [(of_queue(queue, recent), queue) for queue in moment.queues]
    worst, queue = max(said, key=lambda one: (one[0].severity, not one[1].dead, one[1].wait.lasted_s))
    if worst.severity is Severity.HEALTHY:
        return _all_well(said), queue
    others = sum(1 for says, _ in said if says.severity is not Severity.HEALTHY) - 1
    sentence = f"{worst.sentence} · queue {queue.label}" + (f" · {others} more in trouble" if others else "")
    return Says(worst.severity, worst.word, sentence), queue


def of_reader(reader: ReaderFacts) -> str:
    """A reader's verdict with what it comes from."""
    alive = f"last sign of life {seconds(reader.silent_s)} ago"
    where = {"working": "in its own code", "waiting": "asleep in dequeue", "gate": "waiting for the device's copy"}
    doing = where.get(reader.state, "")
    said = {
        Verdict.OK: f"{doing or 'alive'}, {alive}",
        Verdict.LAGGING: f"LAGGING, it works and does not catch up, {alive}",
        Verdict.STALLED: f"STALLED {doing}".rstrip() + f", no sign of life for {seconds(reader.silent_s)}",
        Verdict.STOPPED: "STOPPED by a signal or a debugger",
        Verdict.GONE: "GONE, its process has ended",
    }
    return said[reader.verdict]


def name(reader: ReaderFacts) -> str:
    """Which reader, and which process: what to look at next."""
    where = reader.where or (f"pid {reader.pid}" if reader.pid is not None else "")
    return f"reader {reader.rank}" + (f" ({where})" if where else "")


# ── the cases, the worst first ───────────────────────────────────────────────────────────────────
def _ended(queue: QueueFacts) -> Says | None:
    writer = queue.writer
    if queue.dead:
        since = seconds(queue.silent_s)
        return Says(Severity.HEALTHY, "DEAD", f"DEAD: every process of it has ended, the last one {since} ago")
    if writer is not None and writer.alive is False:
        left = f"{sum(1 for one in queue.readers if one.alive is not False)} readers live"
        return Says(Severity.STALLED, "ORPHANED", f"ORPHANED: the writer (pid {writer.pid}) has ended, and {left}")
    return None


def _blocked(queue: QueueFacts) -> Says | None:
    wait = queue.wait
    if not wait.pending or wait.lasted_s < BLOCKED_S:
        return None
    holders = [queue.reader(rank) for rank in wait.pending]
    stuck = any(one is None or one.verdict >= Verdict.STALLED for one in holders)
    severity = Severity.STALLED if stuck or wait.lasted_s >= LONG_S else Severity.DEGRADED
    return Says(severity, "BLOCKED", f"BLOCKED {wait.lasted_s:.1f} s by {_holders(queue, wait.pending)}")


def _writer_stopped(queue: QueueFacts) -> Says | None:
    if queue.writer is None or not is_stopped(queue.writer.process):
        return None
    who = f"the writer (pid {queue.writer.pid})"
    return Says(Severity.STALLED, "STOPPED", f"STOPPED: {who} is held by a signal or a debugger")


def _troubled_reader(queue: QueueFacts) -> Says | None:
    worst = _worst(queue.readers)
    if worst is None or worst.verdict < Verdict.STALLED:
        return None
    margin = f"; the ring has {queue.slots - queue.used} of {queue.slots} slots left" if queue.slots else ""
    margin = margin if not is_ended(worst.process) and worst.verdict is not Verdict.GONE else ""
    word = worst.verdict.name
    return Says(Severity.DEGRADED, word, f"{word}: {name(worst)} {_predicate(worst)}{margin}")


def _slowed(queue: QueueFacts, rates: QueueRates, recent: Recent) -> Says | None:
    if rates.blocked is None or rates.blocked < SLOWED:
        return None
    costs = [(recent.reader(queue, reader), reader) for reader in queue.readers]
    cost, most = max(costs, key=lambda one: _cost(one[0]), default=(ReaderRates(), None))
    by = f", {share(cost.blocked)} for {name(most)}, {share(cost.excess)} for it alone" if most else ""
    straggler = queue.n_reader > 1 and (cost.excess or 0.0) > STRAGGLER
    severity = Severity.DEGRADED if straggler else Severity.HEALTHY  # all readers alike: the steps are what is long
    return Says(severity, "SLOWED", f"SLOWED: the writer waited {share(rates.blocked)} of the last seconds{by}")


def _lagging_reader(queue: QueueFacts) -> Says | None:
    worst = _worst(queue.readers)
    if worst is None or worst.verdict is not Verdict.LAGGING:
        return None
    behind = f"is {worst.lag} messages behind, {seconds(worst.lag_s)}, and does not catch up"
    return Says(Severity.DEGRADED, "LAGGING", f"LAGGING: {name(worst)} {behind}")


def _well(queue: QueueFacts, rates: QueueRates) -> Says:
    missing = queue.n_reader - len(queue.readers)
    if missing > 0:
        absent = f"{missing} of {queue.n_reader} readers are not attached"
        return Says(Severity.HEALTHY, "FORMING", f"FORMING: {absent}")
    flowing = bool(rates.messages_per_s)
    return Says(Severity.HEALTHY, *(("FLOWING", "FLOWING: nobody waits") if flowing else ("IDLE", "IDLE: no message")))


def _all_well(said: Sequence[tuple[Says, QueueFacts]]) -> Says:
    """Of those that live. Nobody waits on the dead ones: they are counted, and `arena gc` removes them."""
    living = [one for one in said if not one[1].dead]
    left = f" · {_counted(len(said) - len(living), 'dead queue')} left behind" if len(living) < len(said) else ""
    if not living:
        return _all_dead(said)
    slowed = [one for one in living if one[0].word == "SLOWED"]
    if slowed:
        says, queue = slowed[0]
        return Says(says.severity, says.word, f"{says.sentence} · queue {queue.label}")
    shape = f"{_counted(len(living), 'queue')}, {_counted(sum(len(queue.readers) for _, queue in living), 'reader')}"
    words = {says.word for says, _ in living}
    if words == {"IDLE"}:
        return Says(Severity.HEALTHY, "IDLE", f"IDLE: {shape}, no message in the last seconds{left}")
    return Says(Severity.HEALTHY, "OK", f"OK: {shape}, no writer waits{left}")


def _all_dead(said: Sequence[tuple[Says, QueueFacts]]) -> Says:
    says, queue = min(said, key=lambda one: one[1].silent_s)
    if len(said) == 1:
        return Says(says.severity, says.word, f"{says.sentence} · queue {queue.label}")
    last = f"the last process {seconds(queue.silent_s)} ago · queue {queue.label}"
    return Says(says.severity, says.word, f"DEAD: all {len(said)} queues have ended, {last}")


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


# ── parts of sentences ───────────────────────────────────────────────────────────────────────────
def _holders(queue: QueueFacts, ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        reader = queue.reader(ranks[0])
        return f"{name(reader)}: {of_reader(reader)}" if reader else f"reader {ranks[0]}: not attached"
    found = [reader for reader in map(queue.reader, ranks) if reader is not None]
    every = f"all {len(ranks)} readers" if len(ranks) == queue.n_reader else f"readers {_listed(ranks)}"
    worst = _worst(found)
    missing = sorted(set(ranks) - {reader.rank for reader in found})
    if missing:
        return f"{every}: {_listed(missing)} not attached"
    return f"{every}: {name(worst)} {of_reader(worst)}" if worst else every


def _listed(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return ", ".join(map(str, ranks[:_NAMED])) + more


def _predicate(reader: ReaderFacts) -> str:
    said = {
        Verdict.STALLED: f"took nothing and gave no sign of life for {seconds(reader.silent_s)}",
        Verdict.STOPPED: "is held by a signal or a debugger",
        Verdict.GONE: "has ended without leaving",
    }
    return said.get(reader.verdict, "")


def _worst(readers: Sequence[ReaderFacts]) -> ReaderFacts | None:
    return max(readers, key=lambda one: (one.verdict, one.lag_s, -one.rank), default=None)


def _cost(rates: ReaderRates) -> tuple[float, float]:
    return rates.excess or 0.0, rates.blocked or 0.0


def _no_answer(moment: Moment) -> str:
    why = moment.troubles[0] if moment.troubles else moment.source
    return f"UNREACHABLE for {seconds(moment.stale_s)}: {why}"
