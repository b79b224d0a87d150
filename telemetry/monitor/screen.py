"""The whole screen as lines: the verdict first, then the queues, and of one queue its readers, ring and arena.

Drawing is a pure function of a moment, what was recent, what somebody chose to see, and the size of the terminal.
What does not fit is left out from the bottom; the verdict and one line of keys always stay.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from textwrap import wrap
from typing import Final

from telemetry.monitor import maps, tables, words
from telemetry.monitor.facts import Moment, QueueFacts
from telemetry.monitor.lines import Line, Span, cut, in_ascii, wrapped
from telemetry.monitor.recent import Recent
from telemetry.monitor.tables import QueueRow, RankRow, ReaderRow
from telemetry.monitor.units import count, size
from telemetry.monitor.words import Severity

NARROWEST: Final = 40
"""Columns below which nothing but the verdict is shown."""

COLOURS: Final = {Severity.HEALTHY: "green", Severity.DEGRADED: "yellow", Severity.STALLED: "red"}

_KEYS: Final = "q quit  h help  space pause  s sort  ↑↓ choose  enter alone"
_MAP: Final = 120  # wider than this, a map is no clearer
_SEGMENTS: Final = 4
_VERDICT_LINES: Final = 3
_FEWEST_RANK_LINES: Final = 4  # what they are, titles, a rank, and how many more there are

HELP: Final = (
    "q, ctrl-C   quit",
    "space, p    pause: the screen stands still, the queues go on",
    "s           sort by blame, lag, hold time or name",
    "↑ ↓, k j    choose the queue whose readers are shown; without a choice, the worst one is",
    "enter       show the chosen queue alone, or all of them again",
    "esc         forget the choice",
    "h, ?        this page",
    "",
    "READERS     a letter for each reader: · OK, L LAGGING, S STALLED, T STOPPED, X GONE, - not attached",
    "BLOCKED     share of the last 10 s that the writer waited for a slot; of a reader: that it was charged for",
    "FULL        share during which every reader held the slot: the ring is short, or the step long",
    "EXCESS      share after every other reader was done: what this one alone costs",
    "STARVED     share that the reader waited for the writer",
    "HOLD        from taking a frame to releasing it, over the last 10 s, else since it attached",
    "SILENT      since the last sign of life; a reader that is asleep looks around several times a second",
    "TREND       look by look: messages a second of a queue, lag of a reader",
    "OFF PATH    messages of the last 10 s that left the fast path",
    "RING        ░ one reader holds the slot, ▒ ▓ several, █ all; below: who takes which slot next, W the writer",
    "ARENA       a digit: that rank alone holds the block, + several, w the writer, · free",
    "PATH        what served most all-reduces of the last 10 s; dim: of all, as there were none lately",
    "DECLINED    why a faster path most often did not serve, and how often; over the same time",
)


class Sort(str, Enum):
    """What the rows are sorted by; each key press takes the next."""

    BLAME = "blame"
    LAG = "lag"
    HOLD = "hold"
    NAME = "name"

    def next(self) -> Sort:
        """The one after it."""
        every = list(Sort)
        return every[(every.index(self) + 1) % len(every)]


@dataclass(frozen=True)
class Choices:
    """What somebody chose to see.

    Attributes:
        chosen: the queue whose readers are shown; the worst one if None.
        alone: show no other queue.
        note: a word for the second line, such as an interval.
    """

    sort: Sort = Sort.BLAME
    chosen: str | None = None
    alone: bool = False
    paused: bool = False
    help: bool = False
    ascii: bool = False
    note: str = ""


def draw(moment: Moment, recent: Recent, choices: Choices, width: int, height: int) -> list[Line]:
    """The screen of a terminal: at most `height` lines, none wider than `width`."""
    verdict, worst = _verdict(moment, recent, width)
    if width < NARROWEST:
        return _finished(verdict[:height], choices, width)
    above = [*verdict, _about(moment, choices)]
    room = max(0, height - len(above) - 2)
    below = [(Span(_KEYS, "dim"),)]
    middle = _help(width, room) if choices.help else _body(moment, recent, choices, worst, width, room)
    lines = [*above, *middle]
    lines += [()] * (height - len(lines) - len(below))
    return _finished([*lines, *below][:height], choices, width)


def snapshot(moment: Moment, recent: Recent, choices: Choices, width: int) -> list[Line]:
    """The same for paper: every queue with all that is known of it, however long that gets."""
    verdict, worst = _verdict(moment, recent, width)
    rows = _queue_rows(moment, recent, choices)
    lines = [*verdict, _about(moment, choices), (), *tables.of_queues(rows, width)]
    for row in rows:
        lines += [
            (),
            *_readers(row, recent, choices, width, worst=row.queue is worst),
            *_ring(row.queue, choices, min(width, _MAP)),
            *_arena(row.queue, min(width, _MAP)),
        ]
    lines += [(), *_ranks(moment, recent, width)] if moment.groups else []
    return _finished([*lines, *_troubles(moment, len(moment.troubles))], choices, width)


def worst_first(moment: Moment, recent: Recent, choices: Choices) -> list[str]:
    """The labels in the order of the rows."""
    return [row.queue.label for row in _queue_rows(moment, recent, choices)]


# ── parts ────────────────────────────────────────────────────────────────────────────────────────
def _verdict(moment: Moment, recent: Recent, width: int) -> tuple[list[Line], QueueFacts | None]:
    says, worst = words.of_moment(moment, recent)
    first, *others = wrapped(says.sentence, "bold", width, _VERDICT_LINES)
    text = first[0].text
    split = min(len(says.word), len(text))
    coloured = (Span(text[:split], f"bold {COLOURS[says.severity]}"), Span(text[split:], "bold"))
    return [coloured, *others], worst


def _about(moment: Moment, choices: Choices) -> Line:
    clock = time.strftime("%H:%M:%S UTC", time.gmtime(moment.wall_s))
    said = ["arena top", clock, moment.source, f"by {choices.sort.value}", choices.note]
    paused = (Span("PAUSED", "bold"), Span(" · ", "dim")) if choices.paused else ()
    return (*paused, Span(" · ".join(part for part in said if part), "dim"))


def _body(
    moment: Moment, recent: Recent, choices: Choices, worst: QueueFacts | None, width: int, room: int
) -> list[Line]:
    """Queues, and the one that is looked into; from the bottom on, what finds no room is left out."""
    shown = (moment.queue(choices.chosen) if choices.chosen else None) or worst
    rows = _queue_rows(moment, recent, choices)
    at = next((at for at, row in enumerate(rows) if row.queue is shown), None)
    if at is None:
        lines = [(), *_shortened(_ranks(moment, recent, width), room - 1, "ranks")] if moment.groups else []
        return [*lines, *_troubles(moment, room - len(lines))]
    readers = [(), *_readers(rows[at], recent, choices, width, worst=shown is worst)]
    queues = [replace(row, marked=number == at) for number, row in enumerate(rows)] if len(rows) > 1 else rows
    queues = [queues[at]] if choices.alone else queues
    above = [(), *_scrolled(tables.of_queues(queues, width), min(at, len(queues) - 1), room - min(len(readers), 5) - 1)]
    lines = [*above, *_shortened(readers, room - len(above))]
    queue, most = rows[at].queue, min(width, _MAP)
    for extra in (_ring(queue, choices, most), _arena(queue, most), _troubles(moment, 2)):
        if extra and len(lines) + len(extra) + 1 <= room:
            lines += [(), *extra]
    left = room - len(lines) - 1
    if moment.groups and not choices.alone and left >= _FEWEST_RANK_LINES:
        lines += [(), *_shortened(_ranks(moment, recent, width), left, "ranks")]
    return lines[:room]


def _queue_rows(moment: Moment, recent: Recent, choices: Choices) -> list[QueueRow]:
    def row(queue: QueueFacts) -> QueueRow:
        says = words.of_queue(queue, recent)
        return QueueRow(queue, recent.queue(queue), says, recent.rates(queue), choices.ascii)

    what = "row in ascii" if choices.ascii else "row"
    rows = [recent.once(what, queue, row) for queue in moment.queues]
    order = {
        Sort.BLAME: lambda row: (
            -row.says.severity,
            row.queue.dead,
            -round(100 * (row.rates.blocked or 0)),
            row.queue.label,
        ),
        Sort.LAG: lambda row: (-max((one.lag for one in row.queue.readers), default=0), row.queue.label),
        Sort.HOLD: lambda row: (-round(100 * (row.rates.blocked or 0)), row.queue.label),
        Sort.NAME: lambda row: row.queue.label,
    }
    return sorted(rows, key=order[choices.sort])


def _readers(row: QueueRow, recent: Recent, choices: Choices, width: int, *, worst: bool) -> list[Line]:
    """One queue's readers; of the worst one the verdict has said already what is wrong."""
    queue = row.queue
    rows = [
        ReaderRow(queue, reader, recent.reader(queue, reader), recent.lags(queue, reader.rank), choices.ascii)
        for reader in queue.readers
    ]
    order = {
        Sort.BLAME: lambda one: (
            -(one.reader.rank in queue.wait.pending),
            -one.reader.verdict,
            -round(100 * (one.rates.excess or 0)),
            one.reader.rank,
        ),
        Sort.LAG: lambda one: (-one.reader.lag, one.reader.rank),
        Sort.HOLD: lambda one: (-(one.rates.hold_p99_s or 0), one.reader.rank),
        Sort.NAME: lambda one: one.reader.rank,
    }
    said = f"{len(queue.readers)} of {queue.n_reader} readers" if worst else row.says.sentence
    head = (Span(queue.label, "bold"), Span(f"  {said}", "dim" if worst else ""))
    if not rows:
        return [cut(head, width), (Span("no reader has attached", "dim"),)]
    ordered = sorted(rows, key=order[choices.sort])
    return [cut(head, width), *tables.of_readers(ordered, width)]


def _ring(queue: QueueFacts, choices: Choices, width: int) -> list[Line]:
    drawn = maps.ring(queue, width, ascii=choices.ascii)
    if not drawn:
        return []
    sequence = queue.writer.sequence if queue.writer else 0
    title = f"ring: {queue.used} of {queue.slots} slots held, the writer is at {sequence}"
    return [(Span(title, "dim"),), *drawn]


def _arena(queue: QueueFacts, width: int) -> list[Line]:
    arena = queue.arena
    if not arena.segments:
        return []
    title = (
        f"arena: {size(arena.used)} of {size(arena.size)} in {arena.segments} segment{'s' * (arena.segments != 1)}, "
    )
    title += f"most ever {size(arena.used_max)}, may grow to {size(arena.budget)}"
    if queue.blocks is None:
        return [(Span(f"{title}; who holds which block is on its host's pages alone", "dim"),)]
    sizes = queue.segments or maps.guessed(queue.blocks, arena.segments, arena.size)
    drawn = maps.arena(queue.blocks, sizes, width)
    more = [(Span(f"and {len(drawn) - _SEGMENTS} more segments", "dim"),)] if len(drawn) > _SEGMENTS else []
    return [(Span(title, "dim"),), *drawn[:_SEGMENTS], *more]


def _ranks(moment: Moment, recent: Recent, width: int) -> list[Line]:
    """Every communicator's ranks, of each those in trouble first."""
    groups = moment.groups
    one = groups[0]
    title = f"all-reduce: {len(groups)} groups"
    if len(groups) == 1:
        title = f"all-reduce: {len(one.ranks)} of {one.world} ranks on {one.device or 'a device'}, {one.plan} plan"
    rows = [RankRow(group, rank, recent.rank(group, rank)) for group in groups for rank in group.ranks]
    rows.sort(key=lambda row: (row.group.label, row.rank.state in ("", "alive"), row.rank.rank))
    return [cut((Span(title, "dim"),), width), *tables.of_ranks(rows, width)]


def _troubles(moment: Moment, most: int) -> list[Line]:
    lines: list[Line] = [(Span("not read: ", "yellow"), Span(sentence)) for sentence in moment.troubles]
    if len(lines) > most > 0:
        return [*lines[: most - 1], (Span(f"not read: {count(len(lines) - most + 1)} more", "yellow"),)]
    return lines[:most]


def _help(width: int, room: int) -> list[Line]:
    pieces = [wrap(line, width, subsequent_indent=" " * 12) or [""] for line in HELP]
    return [(), *[(Span(piece),) for one in pieces for piece in one]][:room]


# ── making it fit ────────────────────────────────────────────────────────────────────────────────
def _scrolled(lines: Sequence[Line], chosen: int, room: int) -> list[Line]:
    """A table whose rows around the chosen one are shown, with how many are not."""
    titles, *rows = lines
    most = max(1, room - 1)
    if len(rows) <= most:
        return [titles, *rows]
    shown = max(1, most - 1)
    first = min(max(0, chosen - shown // 2), len(rows) - shown)
    hidden = (Span(f"… {len(rows) - shown} more queues", "dim"),)
    return [titles, *rows[first : first + shown], hidden]


def _shortened(lines: Sequence[Line], room: int, what: str = "readers") -> list[Line]:
    if len(lines) <= room:
        return list(lines)
    return [*lines[: max(0, room - 1)], (Span(f"… {len(lines) - room + 1} more {what}", "dim"),)][: max(0, room)]


def _finished(lines: Sequence[Line], choices: Choices, width: int) -> list[Line]:
    drawn = [cut(line, width) for line in lines]
    return [in_ascii(line) for line in drawn] if choices.ascii else drawn
