"""Exemplars: some values of a histogram with the trace that they belong to, out of the events of sampled messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from arena.probe import Event, EventRecord
from telemetry.reader import Endpoint

NAMES: Final = ("queue_delay_seconds", "reader_hold_seconds", "writer_wait_seconds")
"""The histograms that have some."""

_NO_TRACE: Final = (0, 0, 0)


@dataclass(frozen=True)
class Observed:
    """One value of a histogram, in ns, when it was observed by the wall clock, and the sender's span."""

    value_ns: int
    wall_s: float
    labels: Mapping[str, str]


def observed(endpoint: Endpoint) -> dict[str, list[Observed]]:
    """By histogram, what the flight recorder of one endpoint has of sampled messages, oldest first."""
    found: dict[str, list[Observed]] = {}
    sampled = {event.sequence: event.trace for event in endpoint.events if event.trace != _NO_TRACE}
    for event in endpoint.events:
        trace = sampled.get(event.sequence, _NO_TRACE)
        for name, value_ns in _values(event) if trace != _NO_TRACE else ():
            age_s = (endpoint.now_ns - event.time_ns) / 1e9
            labels = {"trace_id": f"{trace[0]:016x}{trace[1]:016x}", "span_id": f"{trace[2]:016x}"}
            found.setdefault(name, []).append(Observed(value_ns, endpoint.wall_s - age_s, labels))
    return found


def _values(event: EventRecord) -> Iterator[tuple[str, int]]:
    if event.kind == Event.CONSUME:
        yield "queue_delay_seconds", event.a
        yield "reader_hold_seconds", event.b
    elif event.kind == Event.WAIT:
        yield "writer_wait_seconds", event.a
