"""The two tables: which columns they have, how important each is, and what stands in its cells.

Colour marks what is wrong, and only that; the word beside it says the same. What is zero or unknown is dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from telemetry.health import Verdict
from telemetry.monitor import maps
from telemetry.monitor.facts import GroupFacts, QueueFacts, RankFacts, ReaderFacts
from telemetry.monitor.lines import Column, Line, Span, table
from telemetry.monitor.recent import QueueRates, RankRates, ReaderRates
from telemetry.monitor.units import UNKNOWN, count, seconds, share, size
from telemetry.monitor.words import SLOWED, Says, Severity

LETTERS: Final = {
    Verdict.OK: "·",
    Verdict.LAGGING: "L",
    Verdict.STALLED: "S",
    Verdict.STOPPED: "T",
    Verdict.GONE: "X",
}

_OF_SEVERITY: Final = {Severity.HEALTHY: "", Severity.DEGRADED: "yellow", Severity.STALLED: "bold red"}
_STRIP: Final = 16  # readers that have a letter each
_SPARK: Final = 8  # the narrowest sparkline


@dataclass(frozen=True)
class QueueRow:
    """A row of the first table. `marked`: its readers are those below; `cells`: what was drawn of it already."""

    queue: QueueFacts
    rates: QueueRates
    says: Says
    spark: Sequence[float]
    ascii: bool
    marked: bool = False
    cells: dict[str, Span] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class ReaderRow:
    """A row of the second table."""

    queue: QueueFacts
    reader: ReaderFacts
    rates: ReaderRates
    spark: Sequence[int]
    ascii: bool


@dataclass(frozen=True)
class RankRow:
    """A row of the third table."""

    group: GroupFacts
    rank: RankFacts
    rates: RankRates


def of_queues(rows: Sequence[QueueRow], width: int) -> list[Line]:
    """One line a queue."""
    longest = max([5, *(len(row.queue.label) for row in rows)])
    most = max([7, *(row.queue.n_reader for row in rows)])
    name = Column[QueueRow]("  QUEUE", min(longest + 2, 30 if width >= 100 else 18), 0, _name, left=True)
    strip = Column[QueueRow]("READERS", min(most, _STRIP), 3, _strip, left=True)
    return table([name, _QUEUE_COLUMNS[0], strip, *_QUEUE_COLUMNS[1:]], rows, width)


def of_readers(rows: Sequence[ReaderRow], width: int) -> list[Line]:
    """One line a reader."""
    return table(_READER_COLUMNS, rows, width)


def of_ranks(rows: Sequence[RankRow], width: int) -> list[Line]:
    """One line a rank of a communicator."""
    longest = max([5, *(len(row.group.label) for row in rows)])
    most = min(longest, 30 if width >= 100 else 12)
    name = Column[RankRow]("GROUP", most, 0, lambda row: Span(row.group.label), left=True)
    return table([name, *_RANK_COLUMNS], rows, width)


# ── queues ───────────────────────────────────────────────────────────────────────────────────────
def _name(row: QueueRow) -> Span:
    return Span(("▶ " if row.marked else "  ") + row.queue.label, "bold" if row.marked else "")


def _word(row: QueueRow) -> Span:
    return Span(row.says.word, _OF_SEVERITY[row.says.severity])


def _strip(row: QueueRow) -> Span:
    queue = row.queue
    there = {reader.rank: LETTERS[reader.verdict] for reader in queue.readers}
    letters = [there.get(rank, "-") for rank in range(queue.n_reader)]
    if len(letters) > _STRIP:
        bad = sum(1 for letter in letters if letter != "·")
        return Span(f"{bad} of {len(letters)} not OK", "yellow" if bad else "dim")
    troubled = any(letter not in "·-" for letter in letters)
    return Span("".join(letters), "yellow" if troubled else "dim")


def _ring(row: QueueRow) -> Span:
    full = row.queue.slots and row.queue.used >= row.queue.slots
    return _dim_if(not row.queue.used, f"{row.queue.used}/{row.queue.slots}", "yellow" if full else "")


def _blocked(row: QueueRow) -> Span:
    return _share(row.rates.blocked, "yellow" if (row.rates.blocked or 0) >= SLOWED else "")


def _arena(row: QueueRow) -> Span:
    arena = row.queue.arena
    return _dim_if(not arena.used, f"{size(arena.used)}/{size(arena.budget)}" if arena.budget else UNKNOWN)


def _pid(reader: ReaderFacts) -> str:
    """With a mark before that of a process on another host; the verdict says which."""
    if reader.where:
        return f"@{reader.where.rpartition(':')[2]}"
    return UNKNOWN if reader.pid is None else str(reader.pid)


def _off_path(row: QueueRow) -> Span:
    return _dim_if(not row.rates.fallbacks, count(row.rates.fallbacks))


def _writer(row: QueueRow) -> Span:
    writer = row.queue.writer
    return Span(str(writer.pid) if writer and writer.pid is not None else UNKNOWN, "" if writer else "dim")


def _silent_writer(row: QueueRow) -> Span:
    writer = row.queue.writer
    return Span(seconds(writer.silent_s if writer else None), "dim")


def _rate_spark(row: QueueRow) -> Span:
    return Span(maps.sparkline(row.spark, 48, ascii=row.ascii)[-48:], "cyan")


def _drawn_once(column: Column[QueueRow]) -> Column[QueueRow]:
    """A queue that was not looked at again looks the same."""

    def cell(row: QueueRow) -> Span:
        if column.title not in row.cells:
            row.cells[column.title] = column.cell(row)
        return row.cells[column.title]

    return replace(column, cell=cell)


_QUEUE_COLUMNS: Final = [
    _drawn_once(column)
    for column in (
        Column("STATE", 11, 1, _word, left=True),
        Column("MSG/S", 7, 2, lambda row: _dim_if(not row.rates.messages_per_s, count(row.rates.messages_per_s))),
        Column("BYTES/S", 7, 8, lambda row: _dim_if(not row.rates.bytes_per_s, size(row.rates.bytes_per_s))),
        Column("RING", 7, 5, _ring),
        Column("BLOCKED", 7, 4, _blocked),
        Column("FULL", 5, 7, lambda row: _share(row.rates.full)),
        Column("ARENA", 15, 9, _arena),
        Column("OFF PATH", 8, 10, _off_path),
        Column("SILENT", 7, 13, _silent_writer),
        Column("WRITER", 8, 11, _writer),
        Column("TREND", _SPARK, 12, _rate_spark, grows=True),
    )
]


# ── readers ──────────────────────────────────────────────────────────────────────────────────────
def _rank(row: ReaderRow) -> Span:
    waited_for = row.reader.rank in row.queue.wait.pending
    return Span(f"{'◀' if waited_for else ''}{row.reader.rank}", "bold" if waited_for else "")


def _verdict(row: ReaderRow) -> Span:
    verdict = row.reader.verdict
    style = "" if verdict is Verdict.OK else "yellow" if verdict is Verdict.LAGGING else "bold red"
    return Span(verdict.name, style)


def _relation(row: ReaderRow) -> Span:
    return _dim_if(not row.reader.relation, row.reader.relation or UNKNOWN)


def _lag(row: ReaderRow) -> Span:
    return _dim_if(not row.reader.lag, count(row.reader.lag))


def _gate(row: ReaderRow) -> Span:
    reader = row.reader
    if not reader.gate_blocks:
        return Span("0", "dim")
    return Span(f"{reader.gate_blocks} {seconds(reader.gate_s)}")


def _pin(row: ReaderRow) -> Span:
    reader, segments = row.reader, row.queue.arena.segments
    if reader.pin_failures:
        return Span(f"{reader.pinned}/{segments}!", "yellow")
    return _dim_if(not reader.pinned, f"{reader.pinned}/{segments}" if reader.pinned else "no")


def _lag_spark(row: ReaderRow) -> Span:
    return Span(maps.sparkline(row.spark, 48, row.queue.slots, ascii=row.ascii)[-48:], "cyan")


_READER_COLUMNS: Final[list[Column[ReaderRow]]] = [
    Column("READER", 6, 0, _rank),
    Column("PID", 8, 4, lambda row: Span(_pid(row.reader))),
    Column("VERDICT", 7, 1, _verdict, left=True),
    Column("STATE", 7, 9, lambda row: Span(row.reader.state or UNKNOWN), left=True),
    Column("RELATION", 16, 16, _relation, left=True),
    Column("LAG", 5, 2, _lag),
    Column("BEHIND", 7, 5, lambda row: _dim_if(not row.reader.lag, seconds(row.reader.lag_s))),
    Column("HOLD p50", 8, 10, lambda row: Span(seconds(row.rates.hold_p50_s))),
    Column("HOLD p99", 8, 6, lambda row: Span(seconds(row.rates.hold_p99_s))),
    Column("BLOCKED", 7, 7, lambda row: _share(row.rates.blocked)),
    Column("EXCESS", 6, 3, lambda row: _share(row.rates.excess, "yellow" if (row.rates.excess or 0) >= SLOWED else "")),
    Column("STARVED", 7, 11, lambda row: _share(row.rates.starved)),
    Column("SILENT", 7, 8, lambda row: Span(seconds(row.reader.silent_s))),
    Column("HELD", 7, 13, lambda row: _dim_if(not row.reader.held_bytes, size(row.reader.held_bytes))),
    Column("PIN", 5, 14, _pin),
    Column("GATE", 9, 15, _gate),
    Column("TREND", _SPARK, 12, _lag_spark, grows=True),
]


# ── ranks of communicators ───────────────────────────────────────────────────────────────────────
def _path(row: RankRow) -> Span:
    return _dim_if(not row.rates.lately, row.rates.path or UNKNOWN)


def _declined(row: RankRow) -> Span:
    rates = row.rates
    text = f"{rates.declined} {count(rates.declines)}" if rates.declined else "0"
    return _dim_if(not (rates.lately and rates.declined), text)


def _process(row: RankRow) -> Span:
    state = row.rank.state
    return _dim_if(state in ("", "alive"), state or UNKNOWN, "bold red")


_RANK_COLUMNS: Final[list[Column[RankRow]]] = [
    Column("RANK", 4, 1, lambda row: Span(str(row.rank.rank))),
    Column("PROCESS", 7, 6, _process, left=True),
    Column("PID", 8, 7, lambda row: Span(UNKNOWN if row.rank.pid is None else str(row.rank.pid))),
    Column("PATH", 17, 2, _path, left=True),
    Column("OPS/S", 7, 3, lambda row: _dim_if(not row.rates.operations_per_s, count(row.rates.operations_per_s))),
    Column("BYTES/S", 7, 4, lambda row: _dim_if(not row.rates.bytes_per_s, size(row.rates.bytes_per_s))),
    Column("DECLINED", 20, 5, _declined, left=True),
    Column("OPS", 7, 8, lambda row: _dim_if(not row.rank.total, count(row.rank.total))),
]


def _share(value: float | None, style: str = "") -> Span:
    return _dim_if(not value, share(value), style)


def _dim_if(nothing: object, text: str, style: str = "") -> Span:
    return Span(text, "dim" if nothing else style)
