"""The ids of spans. Nobody hands them on: each follows from the words in a frame's header, and a reader's rank."""

from __future__ import annotations

from typing import Final, Literal

from opentelemetry import context as contexts
from opentelemetry import trace as api
from opentelemetry.context import Context

from arena import probe

Relation = Literal["both", "parent", "link"]
"""How a reader's span belongs to its sender's: as a child, by a link from a trace of its own, or both as a child and by
a link."""

WORD: Final = (1 << 64) - 1
SAMPLED: Final = api.TraceFlags(api.TraceFlags.SAMPLED)


def within(trace_id: int, span_id: int) -> Context:
    """The context of being inside that span."""
    parent = api.NonRecordingSpan(api.SpanContext(trace_id, span_id, is_remote=False, trace_flags=SAMPLED))
    return api.set_span_in_context(parent, contexts.get_current())


def ids_of(trace: probe.hooks.Trace) -> tuple[int, int]:
    """Trace and span id of a sender's span, as they travelled in the header."""
    return trace[0] << 64 | trace[1], trace[2]


def process_ids(trace: probe.hooks.Trace, rank: int, relation: Relation) -> tuple[int, int]:
    """Trace and span id of a reader's span. Linked only, it is the root of a trace of its own."""
    high, low, span = trace
    if relation == "link":
        high, low = derived_id(high, 1 + rank), derived_id(low, 1 + rank)
    return high << 64 | low, derived_id(span, 1 + rank)


def derived_id(seed: int, salt: int) -> int:
    """An id that everybody who knows the seed finds: SplitMix64's finaliser, in which any bit moves half of all."""
    word = (seed + salt * 0x9E3779B97F4A7C15) & WORD
    word = ((word ^ word >> 30) * 0xBF58476D1CE4E5B9) & WORD
    word = ((word ^ word >> 27) * 0x94D049BB133111EB) & WORD
    return word ^ word >> 31 or 1
