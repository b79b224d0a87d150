"""Every metric that leaves the exporter: its name, and for people what it tells and why it is there.

Name, kind, labels and unit of what the probe pages carry come from `arena.probe.METRICS`; only the two sentences stand
here, by name. What the exporter makes itself, out of the pages' live words and a look at the processes, is declared
whole. Collector, dashboards, lint and the cardinality test all derive from `EXPORTED`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from itertools import product
from typing import Final

from arena.probe import METRICS, READER_LABEL, Kind, Metric, Role

PREFIX: Final = "arena_"
INFO: Final = "info"
"""A gauge that is always 1 and carries facts in labels; the other kinds are those of `arena.probe.Kind`."""

HISTOGRAM_READERS: Final = 16
"""With more readers than this, histograms lose the reader label: they are most of what a reader costs."""

SECONDS_EDGES: Final = tuple(range(10, 37, 2))
"""Powers of two, of ns: 1.024 µs, 4.096 µs, ... 68.7 s. A bucket holds what is below its edge."""

SLOTS_EDGES: Final = tuple(range(7))
"""Powers of two, of slots. Counts are whole, so below 2^k is at most 2^k - 1: 0, 1, 3, 7, 15, 31, 63."""


class Per(str, Enum):
    """What there is one of for each value."""

    QUEUE = "queue"
    READER = "reader"
    COMMUNICATOR = "communicator"
    EXPORTER = "exporter"


@dataclass(frozen=True)
class Exported:
    """One metric as it leaves.

    Attributes:
        name: without `PREFIX`.
        kind: counter, gauge, histogram or info.
        unit: the base unit, or what is counted.
        per: of what there is one. A queue's carry the label `queue`, a reader's `queue` and `reader`, a
            communicator's `group` and `rank`.
        labels: further labels with their closed sets of values, or with none where a value is a fact (of an info).
        help: what it is, for the exposition.
        why: what somebody asks it for.
        page: whether its values come from the pages' tables; otherwise the exporter makes them.
    """

    name: str
    kind: str
    unit: str
    per: Per
    labels: tuple[tuple[str, tuple[str, ...]], ...]
    help: str
    why: str
    page: bool = False

    @property
    def full_name(self) -> str:
        """As Prometheus knows it; a histogram's series have `_bucket`, `_sum` and `_count` behind it."""
        return PREFIX + self.name

    @property
    def edges(self) -> tuple[int, ...]:
        """A histogram's upper bounds, as powers of two of the stored unit."""
        return SECONDS_EDGES if self.unit == "seconds" else SLOTS_EDGES

    @property
    def label_names(self) -> tuple[str, ...]:
        """Every label, `queue` and `reader` (`group` and `rank`) among them."""
        own = {Per.QUEUE: ("queue",), Per.READER: ("queue", "reader"), Per.COMMUNICATOR: ("group", "rank")}
        return own.get(self.per, ()) + tuple(label for label, _ in self.labels)

    def combinations(self) -> list[tuple[str, ...]]:
        """The closed values of the further labels, in every combination."""
        return list(product(*(values for _, values in self.labels if values)))

    def series(self, n_reader: int) -> int:
        """How many series one queue (one rank of a communicator that has every path, the exporter) has of it."""
        samples = len(self.edges) + 3 if self.kind == Kind.HISTOGRAM else 1  # edges, +Inf, _sum and _count
        by_reader = self.per is Per.READER and not (self.kind == Kind.HISTOGRAM and n_reader > HISTOGRAM_READERS)
        return samples * len(self.combinations()) * (n_reader if by_reader else 1)


def series_per_queue(n_reader: int) -> int:
    """How many series a queue with all its readers attached has: what a Prometheus server has to keep of it."""
    return sum(one.series(n_reader) for one in EXPORTED.values() if one.per in (Per.QUEUE, Per.READER))


def series_per_communicator(world: int, paths: int) -> int:
    """How many series a communicator has on which so many paths were set up; those of the others don't leave.

    No path but the fallback takes more than 8 ranks, so that a large communicator has few series for each of them.
    """
    of_rank = 0
    for one in EXPORTED.values():
        if one.per is Per.COMMUNICATOR:
            closed = dict(one.labels).get(PATH_LABEL)
            of_rank += one.series(0) * paths // len(closed) if closed else one.series(0)
    return world * of_rank


PATH_LABEL: Final = "path"
"""Of a communicator's metrics, only the values of those paths leave that could be set up."""

SUMMED: Final = frozenset(
    {
        "memcpy_seconds",
        "memcpy_bytes_total",
        "serialize_seconds",
        "parks_total",
        "missed_wakes_total",
        "spin_seconds_total",
        "errors_total",
        "events_dropped_total",
        "gate_releases_total",
    }
)
"""Kept at both ends, or by every reader, and exported once a queue: nobody is paged for one reader's share of them."""

INTERNAL: Final = frozenset(
    {
        "gate_oldest_since_nanoseconds",
        "collective_bytes_total",
        "collective_fallback_total",
        "collective_seconds",
    }
)
"""On the pages, and not exported: a monotonic time means nothing to another host, and of the rarer collectives the path
alone is worth a series for each rank."""

# name: (help, why)
_TEXTS: Final[dict[str, tuple[str, str]]] = {
    # progress
    "messages_published_total": (
        "Messages sent, by path: inline in a slot, in a block of the arena, in fragments, to other hosts.",
        "The load, and whether large messages still take the fast path.",
    ),
    "published_bytes_total": (
        "Bytes of messages sent, by path.",
        "Bandwidth, and what the slow paths cost.",
    ),
    "ring_occupancy_slots": (
        "Slots in use, looked at when a message was published (a sample of messages while they are many).",
        "Whether the ring is too short for the bursts; a gauge that is scraped every 15 s misses them.",
    ),
    # blame
    "writer_blocked_seconds_total": (
        "Time the writer waited for a slot, each wait charged whole to the reader that released last. "
        "Includes the wait in progress once a single reader is left holding the slot.",
        "Who holds the engine. Summed over readers it is 'some' in the sense of Linux pressure stall information.",
    ),
    "writer_blocked_excess_seconds_total": (
        "The part of the writer's waits after every other reader had released: what this reader alone cost.",
        "How much faster the engine would be if this reader were as fast as the next slowest. Sort by this.",
    ),
    "writer_blocked_full_seconds_total": (
        "The part of the writer's waits during which every reader held the slot.",
        "About as much as blocked: steps are too long or the ring is too short. Far less: one straggler.",
    ),
    "writer_blocked_total": (
        "Waits of the writer for a slot that are over.",
        "Many short waits or a few long ones.",
    ),
    "writer_wait_seconds": (
        "How long a wait of the writer for a slot lasted.",
        "Many short waits or a few long ones, and how long the longest.",
    ),
    # arena
    "segments": ("Segments of shared memory that the tensor arena consists of.", "Whether the arena still grows."),
    "segment_size_bytes": ("Bytes of all segments together.", "How much memory the arena has taken so far."),
    "block_used_bytes": (
        "Bytes of the arena in use: lent to the writer or held by readers.",
        "Whether the arena runs full; then messages take the slow path.",
    ),
    "block_used_max_bytes": (
        "The most bytes of the arena that were ever in use at once.",
        "What to set max_arena_bytes to.",
    ),
    "block_budget_bytes": (
        "What the arena may grow to (max_arena_bytes).",
        "The margin that is left: budget less used.",
    ),
    "block_largest_free_bytes": (
        "The largest free range of the segments there are.",
        "Full or fragmented: much is free, and nothing large.",
    ),
    "holds_used": (
        "Entries of the hold table in use: one for each block that readers hold.",
        "Whether readers keep many small tensors.",
    ),
    "holds_reclaimed_total": (
        "Holds taken back from readers that ended without giving them back.",
        "That a death leaked nothing.",
    ),
    "collapse_failures_total": (
        "Times the kernel would not back a new range with huge pages.",
        "Why first large messages are slow on this machine.",
    ),
    "fallback_total": (
        "Messages that did not take the fast path, by reason.",
        "Why the slow path is taken, before it is noticed as latency.",
    ),
    # readers on other hosts
    "remote_refused_total": (
        "What came over the network and was sent away or ignored: no hand-shake of ours (handshake), another key "
        "(key), another secret or version (secret), no seat for it (seat), no message of ours (malformed).",
        "Strangers at the port, and workers with the handle of an older queue.",
    ),
    "remote_sent_bytes_total": (
        "Bytes sent to a reader on another host, those sent again included.",
        "How much of the network a reader takes.",
    ),
    "remote_resent_total": (
        "Frames sent again to a reader on another host, after its connection broke.",
        "A bad link, before it is one that does not come back.",
    ),
    # traces
    "traces_sampled_total": (
        "Messages chosen to be traced.",
        "That tracing is on, and at what rate.",
    ),
    "traces_dropped_total": (
        "Messages chosen to be traced that were too many: for the rate that tracing may have, or the flight recorder.",
        "Whether the sampling ratio is more than 20 messages a second of this writer, or what tracing was given.",
    ),
    # latency
    "memcpy_seconds": (
        "One copy into shared memory (write) or out of it (read).",
        "Whether copies got slower: another NUMA node, no huge pages, a noisy neighbour.",
    ),
    "memcpy_bytes_total": (
        "Bytes copied into shared memory (write) or out of it (read).",
        "With the seconds: whether copies run at memory speed.",
    ),
    "serialize_seconds": (
        "Pickling (dump) or unpickling (load) of one message, without its tensors.",
        "Whether it is the objects that are slow, and not the queue.",
    ),
    # readers
    "reader_hold_seconds": (
        "From taking a frame to releasing its slot.",
        "Whether this reader is slow on every message or on a few.",
    ),
    "queue_delay_seconds": (
        "From publishing a frame to this reader's taking it, on the host's one monotonic clock.",
        "Whether a step reaches this worker late.",
    ),
    "reader_starved_seconds_total": (
        "Time this reader waited for the writer.",
        "The opposite direction of blame: the engine is the slow one.",
    ),
    # pins and the DMA gate
    "segment_pinned": (
        "Segments of the arena that are registered with this reader's device; 0 without a device.",
        "Whether copies to the device may be asynchronous.",
    ),
    "segment_pinned_bytes": (
        "Bytes of the arena that are registered with this reader's device; 0 without a device.",
        "Whether a reader lost its pins, or never had them for the newest segment.",
    ),
    "pin_failures_total": (
        "Segments that could not be registered with the device, by reason.",
        "What to mend: a memlock limit, the driver, or nothing, because there is no device.",
    ),
    "pin_seconds_total": ("Time spent registering segments with the device.", "What a growing arena costs a reader."),
    "dma_gate_wait_seconds": (
        "How long a block whose views had died waited for the device's copy, where the helper thread asked for that.",
        "Whether blocks come back late because of the device.",
    ),
    "gate_releases_total": (
        "Blocks that came back from a copy: when the device wrote its ticket, or when the helper thread saw it passed.",
        "Whether blocks come back at once, or are polled for (no support, or too many streams).",
    ),
    "blocks_in_gate": (
        "Blocks whose views have died and whose copy to the device has not passed yet.",
        "How much of the arena the device holds.",
    ),
    "device_copies_total": (
        "Copies of tensors to the device, by how they were made.",
        "Whether copies are synchronous because memory is not pinned.",
    ),
    "h2d_seconds_total": (
        "Copies to the device out of pinned memory, from begin to end on their stream: some of those of a MiB or more.",
        "How long the device copies, without the wait for what was queued before.",
    ),
    "h2d_bytes_total": (
        "Bytes of the copies in that sample.",
        "By those seconds: the bandwidth to the device.",
    ),
    # both ends
    "parks_total": (
        "Sleeps on a futex, of the writer and all readers.",
        "How often the queue is idle enough to sleep.",
    ),
    "missed_wakes_total": (
        "Sleeps that ended by their time limit although what they waited for had come.",
        "Anything but 0 a minute is a lost wake-up.",
    ),
    "spin_seconds_total": (
        "Time spent polling, by the writer and all readers.",
        "What the short latency costs in CPU.",
    ),
    "errors_total": (
        "Errors that callers got to see, by kind, of the writer and all readers.",
        "Whether anything is wrong that no latency shows.",
    ),
    "events_dropped_total": (
        "Message events that the flight recorders left out, because they came too close together.",
        "How complete a timeline is; under load most are left out by design.",
    ),
    # all-reduce
    "allreduce_total": ("All-reduces, by the path they took.", "Whether the fast path is taken."),
    "allreduce_bytes_total": ("Bytes all-reduced, by path.", "What runs over which path."),
    "allreduce_fallback_total": (
        "All-reduces that did not take the fast path, by reason.",
        "Why not, before it is noticed as latency.",
    ),
    "allreduce_seconds": (
        "One all-reduce, by path, from sampled device events.",
        "Whether a path is as fast as when it was tuned.",
    ),
    "collective_total": (
        "All-gathers, reduce-scatters, all-to-alls and fused norms, by the path they took.",
        "Whether these take the fast path.",
    ),
}


def _of_queue(name: str, kind: Kind | str, unit: str, help: str, why: str, *facts: str) -> Exported:
    return Exported(name, _value(kind), unit, Per.QUEUE, tuple((fact, ()) for fact in facts), help, why)


def _of_reader(name: str, kind: Kind | str, unit: str, help: str, why: str, *facts: str) -> Exported:
    return Exported(name, _value(kind), unit, Per.READER, tuple((fact, ()) for fact in facts), help, why)


def _of_rank(name: str, kind: Kind | str, unit: str, help: str, why: str, *facts: str) -> Exported:
    return Exported(name, _value(kind), unit, Per.COMMUNICATOR, tuple((fact, ()) for fact in facts), help, why)


def _own(name: str, kind: Kind | str, unit: str, help: str, why: str, /, **labels: tuple[str, ...]) -> Exported:
    return Exported(name, _value(kind), unit, Per.EXPORTER, tuple(labels.items()), help, why)


def _value(kind: Kind | str) -> str:
    return kind.value if isinstance(kind, Kind) else kind


VERDICTS: Final = ("OK", "LAGGING", "STALLED", "STOPPED", "GONE")
"""What `reader_verdict` counts from 0."""

PAGE_ERRORS: Final = (
    "truncated",
    "foreign",
    "version",
    "changed",
    "unreadable",
    "directory",
    "too_many_readers",
    "too_many_queues",
    "too_many_ranks",
    "too_many_communicators",
)

_COUNTER, _GAUGE = Kind.COUNTER, Kind.GAUGE

DERIVED: Final[tuple[Exported, ...]] = (
    # identity
    _own(
        "build_info",
        INFO,
        "",
        "The exporter itself, 1.",
        "Which versions are mixed in a deployment.",
        version=(),
        python=(),
    ),
    _of_queue(
        "queue_info",
        INFO,
        "",
        "The shape of a queue, 1.",
        "What its numbers have to be read against.",
        *("queue_instance", "n_reader", "slots", "slot_bytes", "views"),
    ),
    _of_reader(
        "reader_info",
        INFO,
        "",
        "Which process a rank is, 1; pid is host:pid of one on another host; liveness is alive, dead, or unknown where "
        "the exporter can't tell.",
        "From the rank that is blamed to the process: py-spy dump --pid.",
        *("pid", "liveness"),
    ),
    _of_queue(
        "writer_up",
        _GAUGE,
        "",
        "Whether the writer's process lives, looked at from outside; absent where the exporter can't tell.",
        "An engine that died, without its help.",
    ),
    _of_reader(
        "reader_up",
        _GAUGE,
        "",
        "Whether the reader's process lives, looked at from outside; absent where the exporter can't tell.",
        "A worker that died, without its help.",
    ),
    _of_queue(
        "writer_start_time_seconds",
        _GAUGE,
        "seconds",
        "When the queue was made, in seconds since the epoch.",
        "Restarts of the engine.",
    ),
    _of_reader(
        "reader_start_time_seconds",
        _GAUGE,
        "seconds",
        "When this incarnation of the reader attached, in seconds since the epoch.",
        "Restarts of a worker.",
    ),
    # progress
    _of_reader(
        "messages_consumed_total",
        _COUNTER,
        "messages",
        "How far this reader has come in the queue's sequence, which counts a message once, or once a fragment.",
        "A flat line is a reader that is stuck.",
    ),
    _of_queue(
        "writer_heartbeat_age_seconds",
        _GAUGE,
        "seconds",
        "Time since the writer's last sign of life: a message, or a look around while it waits.",
        "A writer that waits is not one that is stopped.",
    ),
    _of_reader(
        "reader_heartbeat_age_seconds",
        _GAUGE,
        "seconds",
        "Time since the reader's last sign of life: a message, a look around while it waits, or heartbeat().",
        "Alive and not polling: the GIL, a device sync, a collective.",
    ),
    # ring and lag
    _of_queue("ring_slots", _GAUGE, "slots", "Slots of the ring.", "The capacity that lag is read against."),
    _of_queue(
        "ring_slots_used",
        _GAUGE,
        "slots",
        "Slots of the ring that a reader has not released, now.",
        "How close the writer is to waiting.",
    ),
    _of_reader(
        "reader_lag_messages",
        _GAUGE,
        "messages",
        "Frames published that this reader has not taken; 0 for a dead reader that the writer went on without.",
        "Whether it catches up or falls behind.",
    ),
    _of_reader(
        "reader_lag_seconds",
        _GAUGE,
        "seconds",
        "Age of the oldest frame that this reader has not taken; 0 without lag.",
        "Lag in the unit that users feel.",
    ),
    _of_reader(
        "reader_verdict",
        _GAUGE,
        "",
        "What the last looks at this reader say: 0 OK, 1 LAGGING, 2 STALLED, 3 STOPPED, 4 GONE.",
        "The first word about a rank, without a threshold to tune.",
    ),
    # blame in progress
    _of_queue(
        "writer_stall_in_progress_seconds",
        _GAUGE,
        "seconds",
        "How long the writer's wait in progress has lasted, up to its last sign of life; 0 when it does not wait.",
        "The engine hangs right now, and since when. Stands still once the writer is dead.",
    ),
    _of_reader(
        "writer_stall_pending",
        _GAUGE,
        "",
        "Whether the writer waits for this reader to release a slot, right now: 1 or 0.",
        "Who holds the engine, second by second.",
    ),
    # arena and gate
    _of_reader(
        "reader_held_bytes",
        _GAUGE,
        "bytes",
        "Bytes of the arena's blocks that this reader holds, by the writer's table of its first 256 blocks.",
        "Who keeps the arena full.",
    ),
    _of_reader(
        "dma_gate_oldest_age_seconds",
        _GAUGE,
        "seconds",
        "How long the oldest block in this reader's gate has waited for the device's copy; 0 without any.",
        "A device that stopped copying.",
    ),
    # all-reduce
    _of_rank(
        "allreduce_plan_info",
        INFO,
        "",
        "What a communicator was made for, the paths that it could set up, and where its plan comes from, 1.",
        "Whether all engines run the same plan; a tuned one that is not used says why.",
        *("group_instance", "world", "device", "paths", "plan"),
    ),
    # the exporter
    _own("exporter_pages", _GAUGE, "pages", "Probe pages read in this scrape.", "Whether the exporter sees anything."),
    _own(
        "exporter_page_errors_total",
        _COUNTER,
        "errors",
        "What a scrape could not read and left out, by reason; counted at each scrape.",
        "Whether these numbers are all of them.",
        reason=PAGE_ERRORS,
    ),
    _own(
        "exporter_scrape_duration_seconds",
        _GAUGE,
        "seconds",
        "How long the last scrape took to read the pages.",
        "What watching costs.",
    ),
)


def _from_pages(metrics: Iterable[Metric]) -> dict[str, Exported]:
    """What the pages declare, with what is kept at both ends put together."""
    found: dict[str, Exported] = {}
    for metric in metrics:
        labels = tuple((label, values) for label, values in metric.labels if label != READER_LABEL)
        if metric.name in found and metric.role is not Role.COMMUNICATOR:
            labels = _united(found[metric.name].labels, labels)
        elif metric.name in found or metric.name in INTERNAL:
            continue
        help, why = _TEXTS[metric.name]
        kind = metric.kind.value
        found[metric.name] = Exported(metric.name, kind, metric.unit, _per(metric), labels, help, why, page=True)
    return found


def _per(metric: Metric) -> Per:
    if metric.role is Role.COMMUNICATOR:
        return Per.COMMUNICATOR
    if metric.name in SUMMED:
        return Per.QUEUE
    by_rank = READER_LABEL in dict(metric.labels)
    return Per.READER if by_rank or metric.role is Role.READER else Per.QUEUE


def _united(
    one: tuple[tuple[str, tuple[str, ...]], ...], other: tuple[tuple[str, tuple[str, ...]], ...]
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    more = dict(other)
    return tuple((label, tuple(dict.fromkeys(values + more[label]))) for label, values in one)


EXPORTED: Final[dict[str, Exported]] = _from_pages(METRICS) | {one.name: one for one in DERIVED}
"""Every metric that leaves, by its name without the prefix."""
