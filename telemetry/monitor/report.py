"""A moment as JSON: the same facts and figures as on the screen, under names with units."""

from __future__ import annotations

from typing import Any

from telemetry.monitor import words
from telemetry.monitor.facts import GroupFacts, Moment, QueueFacts, RankFacts, ReaderFacts
from telemetry.monitor.recent import Recent


def as_json(moment: Moment, recent: Recent) -> dict[str, Any]:
    """One object; what is not known is null."""
    says, worst = words.of_moment(moment, recent)
    return {
        "time": moment.wall_s,
        "source": moment.source,
        "stale_s": moment.stale_s,
        "verdict": says.sentence,
        "state": says.word,
        "severity": says.severity.name.lower(),
        "worst_queue": worst.label if worst else None,
        "queues": [_queue(queue, recent) for queue in moment.queues],
        "allreduce": [_group(group, recent) for group in moment.groups],
        "troubles": list(moment.troubles),
    }


def _queue(queue: QueueFacts, recent: Recent) -> dict[str, Any]:
    rates = recent.queue(queue)
    says = words.of_queue(queue, recent)
    arena = queue.arena
    return {
        "queue": queue.label,
        "instance": queue.instance,
        "state": says.word,
        "severity": says.severity.name.lower(),
        "verdict": says.sentence,
        "n_reader": queue.n_reader,
        "slots": queue.slots,
        "slots_used": queue.used,
        "writer": _writer(queue),
        "blocked_s": queue.wait.lasted_s,
        "pending": list(queue.wait.pending),
        "messages": queue.published,
        "messages_per_s": rates.messages_per_s,
        "bytes": queue.published_bytes,
        "bytes_per_s": rates.bytes_per_s,
        "blocked_share": rates.blocked,
        "full_share": rates.full,
        "fallbacks": queue.fallbacks,
        "errors": queue.errors,
        "arena": {
            "segments": arena.segments,
            "size_bytes": arena.size,
            "used_bytes": arena.used,
            "used_max_bytes": arena.used_max,
            "budget_bytes": arena.budget,
            "largest_free_bytes": arena.largest_free,
        },
        "readers": [_reader(queue, reader, recent) for reader in queue.readers],
    }


def _writer(queue: QueueFacts) -> dict[str, Any] | None:
    writer = queue.writer
    if writer is None:
        return None
    return {
        "pid": writer.pid,
        "alive": writer.alive,
        "process": writer.process or None,
        "state": writer.state or None,
        "silent_s": writer.silent_s,
        "sequence": writer.sequence,
    }


def _reader(queue: QueueFacts, reader: ReaderFacts, recent: Recent) -> dict[str, Any]:
    rates = recent.reader(queue, reader)
    return {
        "reader": reader.rank,
        "pid": reader.pid,
        "where": reader.where,
        "alive": reader.alive,
        "process": reader.process or None,
        "verdict": reader.verdict.name,
        "state": reader.state or None,
        "relation": reader.relation or None,
        "lag": reader.lag,
        "lag_s": reader.lag_s,
        "silent_s": reader.silent_s,
        "hold_p50_s": rates.hold_p50_s,
        "hold_p99_s": rates.hold_p99_s,
        "blocked_share": rates.blocked,
        "excess_share": rates.excess,
        "starved_share": rates.starved,
        "held_bytes": reader.held_bytes,
        "pinned_segments": reader.pinned,
        "pin_failures": reader.pin_failures,
        "gate_blocks": reader.gate_blocks,
        "gate_s": reader.gate_s,
    }


def _group(group: GroupFacts, recent: Recent) -> dict[str, Any]:
    return {
        "group": group.label,
        "instance": group.instance,
        "world": group.world,
        "device": group.device,
        "plan": group.plan,
        "paths": list(group.paths),
        "ranks": [_rank(group, rank, recent) for rank in group.ranks],
    }


def _rank(group: GroupFacts, rank: RankFacts, recent: Recent) -> dict[str, Any]:
    rates = recent.rank(group, rank)
    return {
        "rank": rank.rank,
        "pid": rank.pid,
        "alive": rank.alive,
        "process": rank.process or None,
        "path": rates.path or None,
        "operations_per_s": rates.operations_per_s,
        "bytes_per_s": rates.bytes_per_s,
        "declined": rates.declined or None,
        "operations_by_path": rank.operations,
        "bytes_by_path": rank.nbytes,
        "declines": rank.declines,
    }
