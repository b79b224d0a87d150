"""What is on the four dashboards, in the order somebody on call looks: each panel a question and what to do about it.

A selector is written `{}` or `{op="read"}` here, and a range `[]`: build.py fills in the variables, so that no panel
can forget one. Every aggregation keeps job, instance and queue: two engines are never added up.
"""

from dataclasses import dataclass
from enum import Enum


class View(Enum):
    """How a panel shows its values."""

    STAT = "stat"
    LINES = "lines"
    STACK = "stack"
    BARS = "bars"
    STATES = "states"
    HEATMAP = "heatmap"
    TABLE = "table"


@dataclass(frozen=True)
class Query:
    """One expression, and what its series are called."""

    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """One question. `limits` are the values from which it is a warning, and from which it is bad."""

    title: str
    question: str
    bad: str
    do: str
    view: View
    unit: str
    queries: tuple[Query, ...]
    limits: tuple[float, ...] = ()
    words: tuple[str, ...] = ()  # what the values 0, 1, 2, ... mean


@dataclass(frozen=True)
class Board:
    """One dashboard: at most ten panels."""

    uid: str
    title: str
    description: str
    panels: tuple[Panel, ...]


QUEUE = "{{queue}} ({{instance}})"
READER = "{{queue}} reader {{reader}}"


def _quantiles(metric: str, by: str, legend: str, *quantiles: float) -> tuple[Query, ...]:
    return tuple(
        Query(
            f"histogram_quantile({quantile}, sum by (job, instance, {by}, le) (rate({metric}_bucket{{}}[])))",
            f"{legend} p{quantile * 100:g}",
        )
        for quantile in quantiles
    )


_FALLBACK_SHARE = (
    "sum by (job, instance, queue) (rate(arena_fallback_total{}[]))"
    " / sum by (job, instance, queue) (rate(arena_messages_published_total{}[]) > 0)"
)

IS_IT_THE_QUEUE = Board(
    "arena-1-queue",
    "1 Is it the queue?",
    "Start here: is the engine waiting for the queue, hung or slow, because of one reader or of all?",
    (
        Panel(
            "Writer blocked",
            "How much of its time does the engine wait for a slot?",
            "More than a fifth. 100 % is an engine that does nothing else.",
            "Open *2 Who blocks the ring?*; it names the reader.",
            View.STAT,
            "percentunit",
            (Query("sum by (job, instance, queue) (rate(arena_writer_blocked_seconds_total{}[]))", QUEUE),),
            (0.05, 0.2),
        ),
        Panel(
            "Stall in progress",
            "Is it hung right now, and since when?",
            "Seconds, and growing. It stands still when the writer itself died while it waited.",
            "Open *2 Who blocks the ring?*, then `py-spy dump --pid` of the reader that holds the slot.",
            View.STAT,
            "s",
            (Query("arena_writer_stall_in_progress_seconds{}", QUEUE),),
            (1, 5),
        ),
        Panel(
            "Furthest behind",
            "Which reader is furthest behind, and how old is what it has not taken yet?",
            "Longer than a step of the engine takes.",
            "The name is in the legend; *Lag* on *2 Who blocks the ring?* says whether it catches up.",
            View.STAT,
            "s",
            (Query("topk by (job, instance, queue) (1, arena_reader_lag_seconds{})", READER),),
            (0.1, 1),
        ),
        Panel(
            "Dead processes",
            "Is any process dead?",
            "Anything but 0. No value: the exporter cannot tell (another uid or pid namespace).",
            "*Rank to process* on *2 Who blocks the ring?* names pid and liveness; look for the out-of-memory killer.",
            View.STAT,
            "short",
            (
                Query("1 - arena_writer_up{}", "writer of " + QUEUE),
                Query("sum by (job, instance, queue) (1 - arena_reader_up{})", "readers of " + QUEUE),
            ),
            (1,),
        ),
        Panel(
            "Off the fast path",
            "Do messages silently take the slow path?",
            "More than 5 % for long.",
            "*Fallbacks by reason* on *4 Fallbacks, all-reduce, fleet* says why.",
            View.STAT,
            "percentunit",
            (Query(_FALLBACK_SHARE, QUEUE),),
            (0.01, 0.05),
        ),
        Panel(
            "Published and consumed",
            "Did the load change, and does the slowest reader follow?",
            "A step in the rate that nobody ordered; a slowest reader at 0 while messages are published.",
            "No load: the engine is the slow one. Load, and a flat reader: *2 Who blocks the ring?*",
            View.LINES,
            "mps",
            (
                Query(
                    "sum by (job, instance, queue, path) (rate(arena_messages_published_total{}[]))",
                    "{{queue}} {{path}}",
                ),
                Query(
                    "min by (job, instance, queue) (rate(arena_messages_consumed_total{}[]))",
                    "{{queue}} slowest reader",
                ),
            ),
        ),
        Panel(
            "Queue delay",
            "Does a step reach the workers late?",
            "p99 far above p50: one reader or a burst. Both up: all are late.",
            "*Ring occupancy* beside this one tells bursts from a slow reader.",
            View.LINES,
            "s",
            _quantiles("arena_queue_delay_seconds", "queue", "{{queue}}", 0.5, 0.99),
        ),
        Panel(
            "Writer pressure: some and full",
            "One straggler, or everyone?",
            "*some* far above *full*: one straggler. *some* about *full*: steps are too long or the ring is too short.",
            "One straggler: *2 Who blocks the ring?* Everyone: look at the device, then at `QueueConfig.slots`.",
            View.LINES,
            "percentunit",
            (
                Query("sum by (job, instance, queue) (rate(arena_writer_blocked_seconds_total{}[]))", "{{queue}} some"),
                Query("rate(arena_writer_blocked_full_seconds_total{}[])", "{{queue}} full"),
            ),
        ),
        Panel(
            "Ring occupancy",
            "Is the ring too short for the bursts?",
            "p99 at the number of slots while the average is low: bursts. All of it high: a slow reader.",
            "Bursts: more `QueueConfig.slots`. A slow reader: *2 Who blocks the ring?*",
            View.LINES,
            "short",
            (
                *_quantiles("arena_ring_occupancy_slots", "queue", "{{queue}} at publish", 0.99),
                Query("arena_ring_slots_used{}", "{{queue}} now"),
                Query("arena_ring_slots{}", "{{queue}} slots"),
            ),
        ),
        Panel(
            "Engine: time to first token, p99",
            "Do users notice? (Only where vLLM is scraped by the same Prometheus.)",
            "It rises together with *Writer blocked*.",
            "It rises and *Writer blocked* does not: it is not the queue.",
            View.LINES,
            "s",
            _quantiles("vllm:time_to_first_token_seconds", "model_name", "{{model_name}}", 0.99),
        ),
    ),
)

WHO_BLOCKS = Board(
    "arena-2-blame",
    "2 Who blocks the ring?",
    "Which reader, since when, slow or stuck, and which process it is.",
    (
        Panel(
            "Who holds the slot",
            "Whom does the writer wait for, second by second?",
            "One line that stays *holds the slot*: that reader. All lines: everyone is slow.",
            "Take its pid from *Rank to process* and run `py-spy dump --pid`.",
            View.STATES,
            "none",
            (Query("arena_writer_stall_pending{}", READER),),
            (1,),
            words=("released", "holds the slot"),
        ),
        Panel(
            "Blocked time, by reader",
            "Who costs how much? (Stacked: each wait is charged whole to the last to release.)",
            "One colour dominates.",
            "Go on to *Excess*: what it alone costs.",
            View.STACK,
            "percentunit",
            (Query("rate(arena_writer_blocked_seconds_total{}[])", READER),),
        ),
        Panel(
            "Excess, by reader",
            "How much faster would the engine be if this reader were as fast as the next slowest?",
            "More than a tenth.",
            "*Hold time* tells whether it is slow inside dequeue() or in its own work; then `py-spy dump --pid`.",
            View.BARS,
            "percentunit",
            (Query("sort_desc(rate(arena_writer_blocked_excess_seconds_total{}[]))", READER),),
            (0.05, 0.1),
        ),
        Panel(
            "Hold time p99, by reader",
            "From taking a frame to releasing its slot: is the straggler slow inside dequeue()?",
            "One line above the others: large pickles, private views, a copy. All low: it is not the queue's part.",
            "Low while that reader has the excess: it comes back late, so look at its own work between two messages.",
            View.LINES,
            "s",
            _quantiles("arena_reader_hold_seconds", "queue, reader", READER, 0.99),
        ),
        Panel(
            "Single waits of the writer",
            "Many short waits or a few long ones?",
            "A row above a second.",
            "Choose one queue. Where traces are on, the dots are exemplars: open one.",
            View.HEATMAP,
            "s",
            (Query("sum by (job, instance, queue, le) (increase(arena_writer_wait_seconds_bucket{}[]))", "{{le}}"),),
        ),
        Panel(
            "Lag, by reader",
            "Does it catch up or fall behind?",
            "A line that only rises.",
            "Rising with a fresh heartbeat: slow. Rising with an old one: stuck.",
            View.LINES,
            "s",
            (Query("arena_reader_lag_seconds{}", READER),),
        ),
        Panel(
            "Age of the last sign of life",
            "Slow, or not even polling?",
            "Seconds, and growing, while there is lag: held in the GIL, a device sync or a collective; or stopped.",
            "`py-spy dump --pid`; add `reader.heartbeat()` to work that is long by design.",
            View.LINES,
            "s",
            (
                Query("arena_reader_heartbeat_age_seconds{}", READER),
                Query("arena_writer_heartbeat_age_seconds{}", "{{queue}} writer"),
            ),
        ),
        Panel(
            "Verdict, by reader",
            "What do the last looks at each reader say, without a threshold?",
            "LAGGING: it fell behind at every look. STALLED: it takes nothing. STOPPED: no sign of life. GONE: dead.",
            "STALLED and STOPPED: `py-spy dump --pid`. GONE: restart the worker.",
            View.STATES,
            "none",
            (Query("arena_reader_verdict{}", READER),),
            (1, 2),
            words=("OK", "LAGGING", "STALLED", "STOPPED", "GONE"),
        ),
        Panel(
            "Starved readers",
            "Or is the writer the slow one?",
            "All near 100 % while users wait: readers wait for the engine.",
            "Profile the engine's process, not the workers.",
            View.LINES,
            "percentunit",
            (Query("rate(arena_reader_starved_seconds_total{}[])", READER),),
        ),
        Panel(
            "Rank to process",
            "Which process is reader N?",
            "liveness dead, or a pid that changed.",
            "Copy the pid: `py-spy dump --pid PID`.",
            View.TABLE,
            "none",
            (Query("arena_reader_info{}"),),
        ),
    ),
)

_NO_ROOM = "arena_full|arena_fragmented|too_large|memory_headroom|holds_exhausted"

ARENA = Board(
    "arena-3-memory",
    "3 Arena, pins, DMA",
    "Is it memory: is the arena full, are its pages pinned, does the device copy keep up?",
    (
        Panel(
            "Arena: used, size, budget",
            "Is the arena full?",
            "*used* at *budget*; *most* says how close it ever was.",
            "*Who holds the arena* beside this one; then a larger `QueueConfig.max_arena_bytes`.",
            View.LINES,
            "bytes",
            (
                Query("arena_block_used_bytes{}", "{{queue}} used"),
                Query("arena_block_used_max_bytes{}", "{{queue}} most"),
                Query("arena_segment_size_bytes{}", "{{queue}} size"),
                Query("arena_block_budget_bytes{}", "{{queue}} budget"),
                Query("arena_block_largest_free_bytes{}", "{{queue}} largest free"),
            ),
        ),
        Panel(
            "No room, by reason",
            "Full, or fragmented, or refused?",
            "Anything above 0 for long.",
            "arena_full: see who holds it. arena_fragmented: larger `segment_bytes`. memory_headroom: memory limit.",
            View.LINES,
            "cps",
            (
                Query(
                    f'sum by (job, instance, queue, reason) (rate(arena_fallback_total{{reason=~"{_NO_ROOM}"}}[]))',
                    "{{queue}} {{reason}}",
                ),
            ),
        ),
        Panel(
            "Who holds the arena",
            "Which reader keeps tensors?",
            "One line that never falls: that worker keeps references.",
            "Look for tensors it stores: a cache, a list, a traceback. `del` them, or clone what is to stay.",
            View.LINES,
            "bytes",
            (Query("arena_reader_held_bytes{}", READER),),
        ),
        Panel(
            "Pinned share, by reader",
            "Did a reader lose its pinned memory?",
            "Below 100 % on a reader with a device. 0 is right on a machine without one.",
            "*Pin failures* says why.",
            View.LINES,
            "percentunit",
            (
                Query(
                    "arena_segment_pinned{} / on (job, instance, queue) group_left () (arena_segments{} > 0)",
                    READER,
                ),
            ),
        ),
        Panel(
            "Pin failures, by reason",
            "Why is memory not pinned?",
            "Any but no_device.",
            "memlock_limit: raise `ulimit -l`. driver: look at the kernel's log.",
            View.LINES,
            "short",
            (
                Query(
                    "sum by (job, instance, queue, reader, reason) (increase(arena_pin_failures_total{}[]))",
                    READER + " {{reason}}",
                ),
            ),
        ),
        Panel(
            "Device copies, by mode",
            "Are copies to the device asynchronous?",
            "pageable_sync: each copy holds its worker up.",
            "*Pinned share*, then *Pin failures*.",
            View.LINES,
            "cps",
            (
                Query(
                    "sum by (job, instance, queue, reader, mode) (rate(arena_device_copies_total{}[]))",
                    READER + " {{mode}}",
                ),
            ),
        ),
        Panel(
            "DMA gate wait p99, by reader",
            "Do blocks come back late because the device still reads them?",
            "Longer than a step.",
            "PCIe traffic of that device; a stream that is never synchronised.",
            View.LINES,
            "s",
            _quantiles("arena_dma_gate_wait_seconds", "queue, reader", READER, 0.99),
        ),
        Panel(
            "Oldest block in the DMA gate",
            "Did a device stop copying?",
            "Seconds, and growing.",
            "That reader's stream is stuck: `py-spy dump --pid`, then the driver's log (Xid).",
            View.LINES,
            "s",
            (Query("arena_dma_gate_oldest_age_seconds{}", READER),),
        ),
        Panel(
            "Copy time, by direction",
            "Did copies into and out of shared memory get slower?",
            "A step up at the same message size.",
            "Another NUMA node, no huge pages, a noisy neighbour: compare *Copy bandwidth*.",
            View.LINES,
            "s",
            _quantiles("arena_memcpy_seconds", "queue, op", "{{queue}} {{op}}", 0.5, 0.99),
        ),
        Panel(
            "Copy bandwidth, by direction",
            "Do copies run at memory speed?",
            "Far below what `arena bench tensor` and `arena bench device` say of this machine.",
            "NUMA placement, huge pages, memory or PCIe bandwidth taken by others.",
            View.LINES,
            "Bps",
            (
                Query(
                    "rate(arena_memcpy_bytes_total{}[]) / (rate(arena_memcpy_seconds_sum{}[]) > 0)",
                    "{{queue}} {{op}}",
                ),
                Query(
                    "rate(arena_h2d_bytes_total{}[]) / (rate(arena_h2d_seconds_total{}[]) > 0)",
                    READER + " to the device",
                ),
            ),
        ),
    ),
)

FLEET = Board(
    "arena-4-fleet",
    "4 Fallbacks, all-reduce, fleet",
    "Which messages take the slow path, how all-reduce runs, which queue of the fleet is worst.",
    (
        Panel(
            "Fallbacks, by reason",
            "Why do messages leave the fast path?",
            "Any reason but disabled, for long.",
            "The runbook's FallbackRate lists what each reason asks for.",
            View.LINES,
            "cps",
            (Query("sum by (job, instance, queue, reason) (rate(arena_fallback_total{}[]))", "{{queue}} {{reason}}"),),
        ),
        Panel(
            "Bytes, by path",
            "What does the slow path carry?",
            "fragments or remote growing at the cost of block.",
            "*Fallbacks, by reason* beside this one.",
            View.STACK,
            "Bps",
            (
                Query(
                    "sum by (job, instance, queue, path) (rate(arena_published_bytes_total{}[]))", "{{queue}} {{path}}"
                ),
                Query("rate(arena_remote_sent_bytes_total{}[])", "{{queue}} to reader {{reader}} elsewhere"),
            ),
        ),
        Panel(
            "Pickling time p99",
            "Is it the objects, and not the queue?",
            "As long as the queue delay.",
            "Send less, or plainer, metadata; tensors are not in here.",
            View.LINES,
            "s",
            _quantiles("arena_serialize_seconds", "queue, op", "{{queue}} {{op}}", 0.99),
        ),
        Panel(
            "Errors",
            "Is anything wrong that no latency shows?",
            "corrupt_frame or handle_mismatch at all; lost wake-ups; holds reclaimed: a worker died.",
            "corrupt_frame: something else writes into shared memory; stop and keep the probe pages.",
            View.LINES,
            "short",
            (
                Query("sum by (job, instance, queue, kind) (increase(arena_errors_total{}[]))", "{{queue}} {{kind}}"),
                Query("increase(arena_missed_wakes_total{}[])", "{{queue}} lost wake-up"),
                Query(
                    "sum by (job, instance, queue, reason) (increase(arena_remote_refused_total{}[]))",
                    "{{queue}} refused from afar: {{reason}}",
                ),
                Query("increase(arena_remote_resent_total{}[])", "{{queue}} sent again to reader {{reader}}"),
                Query(
                    "sum by (job, instance, queue, cause) (increase(arena_holds_reclaimed_total{}[]))",
                    "{{queue}} hold reclaimed: {{cause}}",
                ),
            ),
        ),
        Panel(
            "All-reduce, by path",
            "Do all-reduce, and the other collectives, take the fast path?",
            "nccl or gloo where there was one_shot.",
            "*All-reduce declined* says why; the others decline for the same reasons.",
            View.LINES,
            "ops",
            (
                Query("sum by (job, instance, group, path) (rate(arena_allreduce_total{}[]))", "{{group}} {{path}}"),
                Query(
                    "sum by (job, instance, group, operation, path) (rate(arena_collective_total{}[])) > 0",
                    "{{group}} {{operation}} {{path}}",
                ),
            ),
        ),
        Panel(
            "All-reduce declined, by reason",
            "Why not?",
            "A reason that was not there yesterday.",
            "no_peer_access and no_multicast are the machine's; too_large and dtype are the model's.",
            View.LINES,
            "ops",
            (
                Query(
                    "sum by (job, instance, group, reason) (rate(arena_allreduce_fallback_total{}[]))",
                    "{{group}} {{reason}}",
                ),
            ),
        ),
        Panel(
            "All-reduce time p99, by path",
            "Is each path as fast as when it was tuned?",
            "A step up at the same sizes.",
            "Tune again; look for a rank that comes late: *2 Who blocks the ring?*",
            View.LINES,
            "s",
            _quantiles("arena_allreduce_seconds", "group, path", "{{group}} {{path}}", 0.99),
        ),
        Panel(
            "All queues, worst first",
            "Which engine of the fleet?",
            "More than 20 % blocked.",
            "Choose it in the queue variable and go to *1 Is it the queue?*",
            View.TABLE,
            "percentunit",
            (Query("sort_desc(arena:writer_blocked:rate1m{})"),),
            (0.05, 0.2),
        ),
        Panel(
            "Versions",
            "Are versions mixed?",
            "More than one version for a job.",
            "Finish the roll-out; pages of another layout are counted in *Can these numbers be trusted?*",
            View.TABLE,
            "none",
            (Query("arena_build_info{}"),),
        ),
        Panel(
            "Can these numbers be trusted?",
            "Does the exporter see everything, and how long does it take?",
            "Page errors; a scrape that takes a large part of the scrape interval; traces that found no room.",
            "`arena export` says which page and why; `arena gc` removes what the dead left. No room: trace less.",
            View.LINES,
            "short",
            (
                Query(
                    "sum by (job, instance, reason) (increase(arena_exporter_page_errors_total{}[]))",
                    "{{instance}} {{reason}}",
                ),
                Query("arena_exporter_scrape_duration_seconds{}", "{{instance}} scrape (s)"),
                Query("increase(arena_traces_sampled_total{}[])", "{{queue}} traced"),
                Query("increase(arena_traces_dropped_total{}[])", "{{queue}} traces without room"),
            ),
        ),
    ),
)

BOARDS = (IS_IT_THE_QUEUE, WHO_BLOCKS, ARENA, FLEET)
