"""Every metric, declared once: name, kind, labels, unit, and who keeps it.

The probe page lays its words out from this table and writes it into itself, so an exporter needs no second
list, and an old one can read a newer page. Help texts are telemetry's business (`telemetry/names.py`).

Names follow Prometheus, without the ``arena_`` prefix that the exporter adds. Values are stored as integers
in small units (nanoseconds, bytes, counts); `Metric.scale` says what one stored unit is in the base unit.
Label values are closed sets: every combination exists from the start, at 0, so that a first event is a rise
that ``rate()`` can see.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from itertools import product
from typing import Final


class Kind(str, Enum):
    """How a value behaves."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Role(str, Enum):
    """Whose page carries the metric."""

    WRITER = "writer"
    READER = "reader"
    COMMUNICATOR = "communicator"


READER_LABEL: Final = "reader"
"""A label whose values are the ranks 0..n_reader-1; filled in when a page is laid out."""

PATHS: Final = ("inline", "block", "fragments", "remote")
FALLBACK_REASONS: Final = (
    "arena_full",
    "arena_fragmented",
    "too_large",
    "memory_headroom",
    "holds_exhausted",
    "unsupported_tensor",
    "remote_reader",
    "pin_failed",
    "disabled",
)
ERROR_KINDS: Final = ("timeout", "peer_died", "handle_mismatch", "corrupt_frame", "encode", "decode")
PIN_FAILURES: Final = ("memlock_limit", "already_registered", "unsupported", "no_device", "driver")
GATE_WAYS: Final = ("ticket", "helper")
REFUSALS: Final = ("handshake", "key", "secret", "seat", "malformed")
"""Why somebody who came over the network was sent away, or a message of his ignored."""

COPY_MODES: Final = ("pinned_async", "pageable_sync", "streamed")
RECLAIM_CAUSES: Final = ("reader_died",)
ALLREDUCE_PATHS: Final = (
    "one_shot",
    "two_shot",
    "symm_mem_one_shot",
    "symm_mem_two_shot",
    "symm_mem_multimem",
    "nccl",
    "cpu_one_shot",
    "cpu_two_shot",
    "gloo",
)
COLLECTIVES: Final = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce_rms_norm")
"""What a communicator does besides all-reduce; the paths are the same."""

OPERATIONS: Final = ("all_reduce", *COLLECTIVES)

DECLINE_REASONS: Final = (
    "dtype",
    "alignment",
    "too_large",
    "world_size",
    "capability",
    "no_peer_access",
    "no_multicast",
    "not_intra_node",
    "setup_failed",
    "disabled",
    "capture",
    "not_fused",
)

SECONDS: Final = "seconds"
BYTES: Final = "bytes"
SCALE: Final = {SECONDS: 1e-9}
"""What one stored unit is worth in the base unit; 1 where not named."""


@dataclass(frozen=True)
class Metric:
    """One metric. `labels` maps each label to its closed set of values."""

    name: str
    kind: Kind
    unit: str
    role: Role
    labels: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @property
    def scale(self) -> float:
        """One stored unit in the base unit."""
        return SCALE.get(self.unit, 1.0)

    def series(self, n_reader: int) -> list[dict[str, str]]:
        """Every combination of label values, in page order."""
        names = [name for name, _ in self.labels]
        ranks = tuple(str(rank) for rank in range(n_reader))
        values = [ranks if name == READER_LABEL else closed for name, closed in self.labels]
        return [dict(zip(names, chosen, strict=True)) for chosen in product(*values)]


def _metric(role: Role, kind: Kind, name: str, unit: str, /, **labels: tuple[str, ...]) -> Metric:
    return Metric(name, kind, unit, role, tuple(labels.items()))


_W, _R, _C = Role.WRITER, Role.READER, Role.COMMUNICATOR
_COUNTER, _GAUGE, _HISTOGRAM = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM
_RANKS: Final[tuple[str, ...]] = ()

METRICS: Final[tuple[Metric, ...]] = (
    # progress
    _metric(_W, _COUNTER, "messages_published_total", "messages", path=PATHS),
    _metric(_W, _COUNTER, "published_bytes_total", BYTES, path=PATHS),
    _metric(_W, _HISTOGRAM, "ring_occupancy_slots", "slots"),
    # blame: whom the writer waited for
    _metric(_W, _COUNTER, "writer_blocked_seconds_total", SECONDS, reader=_RANKS),
    _metric(_W, _COUNTER, "writer_blocked_excess_seconds_total", SECONDS, reader=_RANKS),
    _metric(_W, _COUNTER, "writer_blocked_full_seconds_total", SECONDS),
    _metric(_W, _COUNTER, "writer_blocked_total", "waits"),
    _metric(_W, _HISTOGRAM, "writer_wait_seconds", SECONDS),
    # arena
    _metric(_W, _GAUGE, "segments", "segments"),
    _metric(_W, _GAUGE, "segment_size_bytes", BYTES),
    _metric(_W, _GAUGE, "block_used_bytes", BYTES),
    _metric(_W, _GAUGE, "block_used_max_bytes", BYTES),
    _metric(_W, _GAUGE, "block_budget_bytes", BYTES),
    _metric(_W, _GAUGE, "block_largest_free_bytes", BYTES),
    _metric(_W, _GAUGE, "holds_used", "holds"),
    _metric(_W, _COUNTER, "holds_reclaimed_total", "holds", cause=RECLAIM_CAUSES),
    _metric(_W, _COUNTER, "collapse_failures_total", "failures"),
    _metric(_W, _COUNTER, "fallback_total", "messages", reason=FALLBACK_REASONS),
    # readers on other hosts; what concerns one of them is on the page that the forwarder keeps for it
    _metric(_W, _COUNTER, "remote_refused_total", "refusals", reason=REFUSALS),
    _metric(_R, _COUNTER, "remote_sent_bytes_total", BYTES),
    _metric(_R, _COUNTER, "remote_resent_total", "frames"),
    # messages chosen to be traced; dropped are those that the flight recorder had no room for
    _metric(_W, _COUNTER, "traces_sampled_total", "messages"),
    _metric(_W, _COUNTER, "traces_dropped_total", "messages"),
    # latency of the writer's own work
    _metric(_W, _HISTOGRAM, "memcpy_seconds", SECONDS, op=("write",)),
    _metric(_W, _COUNTER, "memcpy_bytes_total", BYTES, op=("write",)),
    _metric(_W, _HISTOGRAM, "serialize_seconds", SECONDS, op=("dump",)),
    # the same on the reader's side
    _metric(_R, _HISTOGRAM, "reader_hold_seconds", SECONDS),
    _metric(_R, _HISTOGRAM, "queue_delay_seconds", SECONDS),
    _metric(_R, _COUNTER, "reader_starved_seconds_total", SECONDS),
    _metric(_R, _HISTOGRAM, "memcpy_seconds", SECONDS, op=("read",)),
    _metric(_R, _COUNTER, "memcpy_bytes_total", BYTES, op=("read",)),
    _metric(_R, _HISTOGRAM, "serialize_seconds", SECONDS, op=("load",)),
    # pins and the DMA gate
    _metric(_R, _GAUGE, "segment_pinned", "segments"),
    _metric(_R, _GAUGE, "segment_pinned_bytes", BYTES),
    _metric(_R, _COUNTER, "pin_failures_total", "failures", reason=PIN_FAILURES),
    _metric(_R, _COUNTER, "pin_seconds_total", SECONDS),
    _metric(_R, _HISTOGRAM, "dma_gate_wait_seconds", SECONDS),
    _metric(_R, _COUNTER, "gate_releases_total", "holds", way=GATE_WAYS),
    _metric(_R, _GAUGE, "blocks_in_gate", "blocks"),
    _metric(_R, _GAUGE, "gate_oldest_since_nanoseconds", "nanoseconds"),
    _metric(_R, _COUNTER, "device_copies_total", "copies", mode=COPY_MODES),
    _metric(_R, _COUNTER, "h2d_seconds_total", SECONDS),
    _metric(_R, _COUNTER, "h2d_bytes_total", BYTES),
    # both ends: how they wait, and what went wrong
    *(
        metric
        for role in (_W, _R)
        for metric in (
            _metric(role, _COUNTER, "parks_total", "parks"),
            _metric(role, _COUNTER, "missed_wakes_total", "wakes"),
            _metric(role, _COUNTER, "spin_seconds_total", SECONDS),
            _metric(role, _COUNTER, "errors_total", "errors", kind=ERROR_KINDS),
            _metric(role, _COUNTER, "events_dropped_total", "events"),
        )
    ),
    # all-reduce
    _metric(_C, _COUNTER, "allreduce_total", "operations", path=ALLREDUCE_PATHS),
    _metric(_C, _COUNTER, "allreduce_bytes_total", BYTES, path=ALLREDUCE_PATHS),
    _metric(_C, _COUNTER, "allreduce_fallback_total", "operations", reason=DECLINE_REASONS),
    _metric(_C, _HISTOGRAM, "allreduce_seconds", SECONDS, path=ALLREDUCE_PATHS),
    # the other collectives
    _metric(_C, _COUNTER, "collective_total", "operations", operation=COLLECTIVES, path=ALLREDUCE_PATHS),
    _metric(_C, _COUNTER, "collective_bytes_total", BYTES, operation=COLLECTIVES, path=ALLREDUCE_PATHS),
    _metric(_C, _COUNTER, "collective_fallback_total", "operations", operation=COLLECTIVES, reason=DECLINE_REASONS),
    _metric(_C, _HISTOGRAM, "collective_seconds", SECONDS, operation=COLLECTIVES),
    _metric(_C, _COUNTER, "events_dropped_total", "events"),
)

BUCKETS: Final = 65
"""Bucket `i` counts values of bit length `i`: 0, 1, 2-3, 4-7, ...; then one word of sum follows."""

HISTOGRAM_WORDS: Final = BUCKETS + 1


@dataclass(frozen=True)
class Series:
    """One series of one page: a metric, its label values, and its first word among the page's values."""

    metric: Metric
    labels: dict[str, str]
    word: int


def lay_out(role: Role, n_reader: int) -> tuple[list[Series], int]:
    """Where each series of a page lies, and how many words they take together."""
    laid: list[Series] = []
    word = 0
    for metric in METRICS:
        if metric.role is not role:
            continue
        for labels in metric.series(n_reader):
            laid.append(Series(metric, labels, word))
            word += HISTOGRAM_WORDS if metric.kind is Kind.HISTOGRAM else 1
    return laid, word
