"""A queue's flight recorders as a timeline that https://ui.perfetto.dev and chrome://tracing open: no collector needed.

One track per endpoint, with rank and pid in its name. A message is a slice where it was sent and one at each reader
that took it, joined by a flow; the writer's waits are slices named after the reader that they are charged to, and
coloured by it. (Perfetto colours slices by name, so the name does it there; Chrome goes by `cname`.) Where tracing is
on, slices last as long as the message was worked on; otherwise a reader's lasts until it released the slot. Copies to a
device and collectives are slices inside a message's; waits in the DMA gate outlive it, and overlap: they are async.

Times are microseconds since the first event; `otherData.began` is that event's wall-clock time.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from arena.probe import ERROR_KINDS, FALLBACK_REASONS, BadPage, Event, EventRecord, ProbeReader, Role
from telemetry.messages import Follower, Message, Part, Sent, Taken, Work
from telemetry.reader import Communicator, Endpoint, Queue

Entry = dict[str, Any]

_PROCESS: Final = 1  # the queue; its endpoints are the threads of it
_COLOURS: Final = (  # of chrome://tracing, by rank
    "terrible",
    "bad",
    "olive",
    "cq_build_attempt_runnig",
    "rail_animation",
    "rail_load",
    "thread_state_iowait",
    "thread_state_unknown",
)
_MOMENTS: Final = {
    Event.FALLBACK,
    Event.ATTACH,
    Event.LEAVE,
    Event.DEATH,
    Event.ABORT,
    Event.GROW,
    Event.RECLAIM,
    Event.ERROR,
    Event.CLOSE,
    Event.STALL,
}


@dataclass(frozen=True)
class _Track:
    """What one endpoint's page tells, with its times made comparable: `shift` makes wall-clock time of them."""

    number: int
    endpoint: Endpoint
    shift: int
    events: list[EventRecord]
    sent: list[Sent]
    taken: list[Taken]
    work: list[Work]

    @property
    def title(self) -> str:
        page = self.endpoint.page
        who = "writer" if page.role is Role.WRITER else f"reader {page.rank}"
        return f"{who} ({page.where or f'pid {page.owner.pid}'}{', dead' if self.endpoint.alive is False else ''})"


def timeline(queue: Queue, groups: Sequence[Communicator] = ()) -> Entry:
    """The timeline of what the flight recorders of a queue's endpoints still hold.

    Args:
        queue: as a look saw it.
        groups: communicators, in which its readers may have reduced something for a message of the queue.
    """
    tracks = [track for number, one in enumerate(queue.endpoints) if (track := _track(number, one)) is not None]
    entries = [entry for track in tracks for entry in _entries(track)] + list(_flows(tracks))
    entries += [entry for group in groups for entry in _of_group(tracks, group)]
    began_ns = min((entry["ts"] for entry in entries), default=0)
    for entry in entries:
        entry["ts"] = (entry["ts"] - began_ns) / 1e3
    return {
        "traceEvents": [*_names(queue, tracks), *sorted(entries, key=lambda entry: float(entry["ts"]))],
        "displayTimeUnit": "ns",
        "otherData": {
            "queue": queue.label,
            "instance": queue.instance,
            "began": datetime.datetime.fromtimestamp(began_ns / 1e9, datetime.timezone.utc).isoformat(),
        },
    }


def _track(number: int, endpoint: Endpoint) -> _Track | None:
    """None for a page that went away since it was looked at."""
    try:
        with ProbeReader(endpoint.page.path) as page:
            events = page.events()
            shift = time.time_ns() - page.now_ns()
    except (BadPage, OSError):
        return None
    messages = _messages(endpoint, events)
    return _Track(
        number,
        endpoint,
        shift,
        events,
        [one for one in messages if isinstance(one, Sent)],
        [one for one in messages if isinstance(one, Taken)],
        [one for one in messages if isinstance(one, Work)],
    )


def _messages(endpoint: Endpoint, events: list[EventRecord]) -> list[Message]:
    follower = Follower(endpoint.page.role, from_start=False)
    return [*follower.read(events), *follower.unfinished()]


# ── what is on one track ─────────────────────────────────────────────────────────────────────────
def _names(queue: Queue, tracks: list[_Track]) -> Iterator[Entry]:
    yield {"ph": "M", "name": "process_name", "pid": _PROCESS, "tid": 0, "args": {"name": f"queue {queue.label}"}}
    for track in tracks:
        common = {"ph": "M", "pid": _PROCESS, "tid": track.number}
        yield {**common, "name": "thread_name", "args": {"name": track.title}}
        yield {**common, "name": "thread_sort_index", "args": {"sort_index": track.number}}


def _entries(track: _Track) -> Iterator[Entry]:
    for sent in track.sent:
        yield _slice(track, f"send {sent.sequence}", sent.began_ns, sent.ended_ns, _of_sent(sent))
        if sent.encode_ns and any(sent.trace):
            yield _slice(track, "serialize", sent.began_ns, sent.began_ns + sent.encode_ns, {})
        for part in sent.copies:
            yield _slice(track, "memcpy", part.began_ns, part.ended_ns, {"bytes": part.number})
    for taken in track.taken:
        yield _slice(track, f"process {taken.sequence}", taken.received_ns, _end_of(taken, track), _of_taken(taken))
    for work in track.work:
        yield from _gate(track, work) if work.name == "dma_gate" else (_work(track, work),)
    yield from _stalls(track)
    for event in track.events:
        if event.kind in _MOMENTS and not (event.kind == Event.ERROR and any(event.trace)):  # that one is a slice's
            what = {"ph": "i", "s": "t", "name": Event.NAMES[event.kind], "args": _of_moment(event)}
            yield _entry(track, event.time_ns, what)


def _work(track: _Track, work: Work, **further: Any) -> Entry:
    how = "copy_mode" if work.name == "h2d" else "path"
    args = {**further, "bytes": work.part.number, how: work.how, **_trace(work.trace)}
    return _slice(track, work.name, work.part.began_ns, work.part.ended_ns, args)


def _gate(track: _Track, work: Work) -> Iterator[Entry]:
    common = {"cat": "gate", "name": work.name, "id": f"{track.number}.{work.number}"}
    args = {"sequence": work.sequence, **_trace(work.trace)}
    yield _entry(track, work.part.began_ns, {"ph": "b", **common, "args": args})
    yield _entry(track, work.part.ended_ns, {"ph": "e", **common, "args": {}})


def _of_group(tracks: list[_Track], group: Communicator) -> Iterator[Entry]:
    """What a reader's process did in a communicator, inside a message of this queue: on that reader's track."""
    known = {(track.endpoint.rank, taken.trace): track for track in tracks for taken in track.taken if any(taken.trace)}
    for rank in group.ranks:
        other = _track(0, rank)  # the same process as the reader's, so the same clock
        for work in other.work if other is not None else ():
            track = known.get((work.reader or 0, work.trace))
            if track is not None:
                yield _work(track, work, group=group.label, rank=rank.rank)


def _stalls(track: _Track) -> Iterator[Entry]:
    """The writer's waits, over and not over: each in the name and the colour of the reader that it is charged to."""
    if track.endpoint.page.role is not Role.WRITER:
        return
    for event in track.events:
        if event.kind == Event.WAIT:
            yield _stall(track, Part(event.time_ns - event.a, event.time_ns, event.b), "")
    wait = track.endpoint.wait
    if wait.since_ns and wait.pending:
        rank = wait.alone[0] if wait.alone else wait.pending[0]
        part = Part(wait.since_ns, max(wait.progress_ns, wait.since_ns), rank)
        yield _stall(track, part, " (not over)", pending=list(wait.pending))


def _stall(track: _Track, part: Part, suffix: str, **args: Any) -> Entry:
    name = f"blocked by reader {part.number}{suffix}"
    args = {"relation": "awaiting_readers", "blame_reader": part.number, **args}
    stall = _slice(track, name, part.began_ns, part.ended_ns, args)
    return {**stall, "cat": "stall", "cname": _COLOURS[part.number % len(_COLOURS)]}


def _of_sent(sent: Sent) -> Entry:
    args: Entry = {"sequence": sent.sequence, "bytes": sent.nbytes}
    for name in ("path", "error"):
        if getattr(sent, name):
            args[name] = getattr(sent, name)
    return args | _trace(sent.trace)


def _of_taken(taken: Taken) -> Entry:
    args: Entry = {
        "sequence": taken.sequence,
        "queue_delay_us": (taken.received_ns - taken.published_ns) / 1e3,
        "hold_us": (taken.released_ns - taken.received_ns) / 1e3,
    }
    if taken.error:
        args["error"] = taken.error
    if any(taken.trace) and not taken.done_ns:
        args["never_back"] = True
    return args | _trace(taken.trace)


def _trace(trace: tuple[int, int, int]) -> Entry:
    return {"trace_id": f"{trace[0]:016x}{trace[1]:016x}"} if any(trace) else {}


def _of_moment(event: EventRecord) -> Entry:
    named = {Event.FALLBACK: FALLBACK_REASONS, Event.ERROR: ERROR_KINDS}.get(event.kind)
    what = {"reason": named[event.a]} if named and event.a < len(named) else {"a": event.a, "b": event.b}
    return {"sequence": event.sequence, **what}


def _end_of(taken: Taken, track: _Track) -> int:
    """Until it was back for more; a sampled message whose reader never came back lasts to its last sign of life."""
    if any(taken.trace) and not taken.done_ns:
        return max(taken.released_ns, track.endpoint.heartbeat_ns)
    return taken.done_ns or taken.released_ns


# ── between tracks ───────────────────────────────────────────────────────────────────────────────
def _flows(tracks: list[_Track]) -> Iterator[Entry]:
    """An arrow from a message's sending to each taking of it.

    Where many messages pass, writer and readers record different ones. A reader knows when what it took was published,
    so a slice without length stands for a sending that was not recorded.
    """
    writer = next((track for track in tracks if track.endpoint.page.role is Role.WRITER), None)
    if writer is None:
        return
    known = {sent.sequence: sent for sent in writer.sent if not sent.error}
    stood_in: set[int] = set()
    for track in tracks:
        for taken in track.taken:
            sent = known.get(taken.sequence)
            if sent is None and taken.sequence not in stood_in:
                stood_in.add(taken.sequence)
                yield _slice(writer, f"send {taken.sequence}", taken.published_ns, taken.published_ns, {})
            left_ns = sent.ended_ns if sent else taken.published_ns
            common = {"cat": "message", "name": "message", "id": f"{taken.sequence}.{track.endpoint.rank}"}
            yield _entry(writer, left_ns, {"ph": "s", **common})
            yield _entry(track, taken.received_ns, {"ph": "f", "bp": "e", **common})


def _slice(track: _Track, name: str, began_ns: int, ended_ns: int, args: Entry) -> Entry:
    what = {"ph": "X", "cat": "message", "name": name, "dur": max(0, ended_ns - began_ns) / 1e3, "args": args}
    return _entry(track, began_ns, what)


def _entry(track: _Track, time_ns: int, what: Entry) -> Entry:
    """Times stay whole until the first one is known: as floats they would be off by a quarter of a microsecond."""
    return {**what, "pid": _PROCESS, "tid": track.number, "ts": time_ns + track.shift}
