"""Moments from the metrics that an exporter on another host serves.

What is not among them is None, or "": which blocks there are, the state of a process, what an endpoint is doing.
A writer's position is reckoned from its readers': the furthest one, and what it has not taken yet.
"""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from http.client import HTTPException
from typing import Final
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from telemetry.blame import ALREADY_READ, AWAITING_READERS
from telemetry.health import Verdict
from telemetry.monitor.facts import (
    NO_HISTOGRAM,
    ArenaFacts,
    GroupFacts,
    Histogram,
    Moment,
    QueueFacts,
    RankFacts,
    ReaderFacts,
    Unreachable,
    WaitFacts,
    WriterFacts,
    plain,
)
from telemetry.names import PREFIX

TIMEOUT_S: Final = 2.0
_MOST_BYTES: Final = 64 << 20
_LIVENESS: Final = {"alive": True, "dead": False}
_NEEDED: Final = (
    "queue_info", "writer_up", "writer_heartbeat_age_seconds", "ring_slots", "writer_stall_in_progress_seconds",
    "writer_stall_pending", "writer_blocked_seconds_total", "writer_blocked_excess_seconds_total",
    "writer_blocked_full_seconds_total", "messages_published_total", "published_bytes_total", "fallback_total",
    "errors_total", "segments", "segment_size_bytes", "block_used_bytes", "block_used_max_bytes", "block_budget_bytes",
    "block_largest_free_bytes", "reader_info", "reader_up", "reader_heartbeat_age_seconds", "reader_lag_messages",
    "reader_lag_seconds", "reader_verdict", "reader_held_bytes", "reader_hold_seconds_bucket",
    "reader_starved_seconds_total", "messages_consumed_total", "segment_pinned", "pin_failures_total",
    "blocks_in_gate", "dma_gate_oldest_age_seconds", "exporter_page_errors_total", "allreduce_total",
    "allreduce_bytes_total", "allreduce_fallback_total", "allreduce_plan_info",
)  # fmt: skip
_WANTED: Final = frozenset(PREFIX + name for name in _NEEDED)


class Metrics:
    """Asks one URL.

    Raises:
        ValueError: it is no URL of a web server.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(url)
        _ = parts.port  # raises for one that is no number
        self.name = url
        self._last: Moment | None = None

    def look(self, readers_of: Collection[str] | None = None) -> Moment:
        """Ask now. An exporter that does not answer shows in `Moment.stale_s`.

        Raises:
            Unreachable: it has never answered.
        """
        now_s = time.monotonic()
        try:
            self._last = _moment(self.name, now_s, self._ask())
        except Unreachable as failed:
            if self._last is None:
                raise
            stale_s = now_s - self._last.time_s
            return replace(self._last, wall_s=time.time(), troubles=(str(failed),), stale_s=stale_s)
        return self._last

    def close(self) -> None:
        """There is nothing to give back."""

    def _ask(self) -> str:
        try:
            with urllib.request.urlopen(self.name, timeout=TIMEOUT_S) as answer:
                body: bytes = answer.read(_MOST_BYTES)
        except (OSError, HTTPException, ValueError) as error:
            why = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
            raise self._unreachable(str(why) or type(error).__name__) from error
        return body.decode("utf-8", "replace")

    def _unreachable(self, found: str) -> Unreachable:
        return Unreachable(
            f"can't read {self.name}",
            expected="what `arena export` serves",
            found=found,
            remedy="is the exporter running there, and may this host reach it?",
        )


Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class _Scrape:
    """The samples of one queue or communicator, by name."""

    samples: dict[str, list[tuple[Mapping[str, str], float]]]

    def all(self, name: str, **labels: str) -> Iterator[tuple[Mapping[str, str], float]]:
        for found, value in self.samples.get(PREFIX + name, ()):
            if all(found.get(label) == wanted for label, wanted in labels.items()):
                yield found, value

    def one(self, name: str, **labels: str) -> float | None:
        return next((value for _, value in self.all(name, **labels)), None)

    def total(self, name: str, **labels: str) -> float:
        return sum(value for _, value in self.all(name, **labels))

    def by(self, label: str, name: str, **labels: str) -> dict[str, int]:
        return {found.get(label, ""): round(value) for found, value in self.all(name, **labels) if value}


def _moment(url: str, now_s: float, text: str) -> Moment:
    lines = (line for line in text.splitlines() if line.partition("{")[0].partition(" ")[0] in _WANTED)
    found: dict[str, dict[str, dict[str, list[tuple[Mapping[str, str], float]]]]] = {"queue": {}, "group": {}}
    unread = 0.0
    try:
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                kind = next((kind for kind in found if kind in sample.labels), None)
                if kind is None:
                    unread += sample.value
                else:
                    named = found[kind].setdefault(sample.labels[kind], {})
                    named.setdefault(sample.name, []).append((sample.labels, sample.value))
    except ValueError as error:
        raise Unreachable(f"can't read {url}", expected="metrics in text form", found=str(error)) from error
    if PREFIX not in text:
        what = f"{len(text)} characters without any of Arena's metrics"
        raise Unreachable(f"can't read {url}", expected="what `arena export` serves, at /metrics", found=what)
    queues = tuple(_queue(label, _Scrape(samples)) for label, samples in sorted(found["queue"].items()))
    groups = tuple(_group(label, _Scrape(samples)) for label, samples in sorted(found["group"].items()))
    troubles = ("its exporter has pages that it can't read; its own output says which",) if unread else ()
    return Moment(now_s, time.time(), url, queues, troubles, groups=groups)


def _queue(label: str, scrape: _Scrape) -> QueueFacts:
    info = next((found for found, _ in scrape.all("queue_info")), {})
    pending = tuple(sorted(int(found["reader"]) for found, value in scrape.all("writer_stall_pending") if value))
    stall_s = scrape.one("writer_stall_in_progress_seconds") or 0.0
    ranks = sorted({int(found["reader"]) for found, _ in scrape.all("reader_verdict")})
    readers = tuple(_reader(scrape, rank, pending) for rank in ranks)
    uncharged_s = stall_s if len(pending) > 1 else 0.0
    return QueueFacts(
        label=plain(label),
        instance=plain(info.get("queue_instance", "")),
        n_reader=int(info.get("n_reader") or len(readers)),
        slots=round(scrape.one("ring_slots") or 0),
        writer=_writer(scrape, readers) if scrape.one("writer_heartbeat_age_seconds") is not None else None,
        readers=readers,
        wait=WaitFacts(stall_s, pending),
        published=round(scrape.total("messages_published_total")),
        published_bytes=round(scrape.total("published_bytes_total")),
        waited_s=scrape.total("writer_blocked_seconds_total") + uncharged_s,
        full_s=scrape.total("writer_blocked_full_seconds_total"),
        fallbacks=scrape.by("reason", "fallback_total"),
        errors=scrape.by("kind", "errors_total"),
        arena=_arena(scrape),
        blocks=None,
    )


def _writer(scrape: _Scrape, readers: tuple[ReaderFacts, ...]) -> WriterFacts:
    consumed = {int(found["reader"]): round(value) for found, value in scrape.all("messages_consumed_total")}
    sequence = max((consumed.get(reader.rank, 0) + reader.lag for reader in readers), default=0)
    silent_s = scrape.one("writer_heartbeat_age_seconds") or 0.0
    return WriterFacts(None, _up(scrape.one("writer_up")), "", "", silent_s, sequence)


def _reader(scrape: _Scrape, rank: int, pending: tuple[int, ...]) -> ReaderFacts:
    reader = str(rank)
    info = next((found for found, _ in scrape.all("reader_info", reader=reader)), {})
    pid = info.get("pid", "")
    relation = "" if not pending else AWAITING_READERS if rank in pending else ALREADY_READ
    return ReaderFacts(
        rank=rank,
        pid=int(pid) if pid.isdecimal() else None,
        alive=_LIVENESS.get(info.get("liveness", "")),
        process="",
        verdict=_verdict(scrape.one("reader_verdict", reader=reader)),
        state="",
        relation=relation,
        lag=round(scrape.total("reader_lag_messages", reader=reader)),
        lag_s=scrape.total("reader_lag_seconds", reader=reader),
        silent_s=scrape.total("reader_heartbeat_age_seconds", reader=reader),
        hold=_histogram(scrape, reader),
        blocked_s=scrape.total("writer_blocked_seconds_total", reader=reader),
        excess_s=scrape.total("writer_blocked_excess_seconds_total", reader=reader),
        starved_s=scrape.total("reader_starved_seconds_total", reader=reader),
        held_bytes=round(scrape.total("reader_held_bytes", reader=reader)),
        pinned=round(scrape.total("segment_pinned", reader=reader)),
        pin_failures=round(scrape.total("pin_failures_total", reader=reader)),
        gate_blocks=round(scrape.total("blocks_in_gate", reader=reader)),
        gate_s=scrape.total("dma_gate_oldest_age_seconds", reader=reader),
        where="" if pid.isdecimal() else plain(pid),
    )


def _group(label: str, scrape: _Scrape) -> GroupFacts:
    infos = {found.get("rank", ""): found for found, _ in scrape.all("allreduce_plan_info")}
    info = next(iter(infos.values()), {})
    world = info.get("world", "")
    return GroupFacts(
        label=plain(label),
        instance=plain(info.get("group_instance", "")),
        world=int(world) if world.isdecimal() else len(infos),
        device=plain(info.get("device", "")),
        plan=plain(info.get("plan", "")),
        paths=tuple(plain(path) for path in info.get("paths", "").split(",") if path),
        ranks=tuple(_rank(scrape, rank) for rank in sorted(infos, key=_number) if rank.isdecimal()),
    )


def _rank(scrape: _Scrape, rank: str) -> RankFacts:
    return RankFacts(
        rank=int(rank),
        pid=None,
        alive=None,
        process="",
        operations=scrape.by("path", "allreduce_total", rank=rank),
        nbytes=scrape.by("path", "allreduce_bytes_total", rank=rank),
        declines=scrape.by("reason", "allreduce_fallback_total", rank=rank),
    )


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else -1


def _arena(scrape: _Scrape) -> ArenaFacts:
    return ArenaFacts(
        segments=round(scrape.total("segments")),
        size=round(scrape.total("segment_size_bytes")),
        used=round(scrape.total("block_used_bytes")),
        used_max=round(scrape.total("block_used_max_bytes")),
        budget=round(scrape.total("block_budget_bytes")),
        largest_free=round(scrape.total("block_largest_free_bytes")),
    )


def _histogram(scrape: _Scrape, reader: str) -> Histogram:
    found = sorted(
        (float(labels["le"]), round(value)) for labels, value in scrape.all("reader_hold_seconds_bucket", reader=reader)
    )
    if not found:  # with many readers, histograms have no reader
        return NO_HISTOGRAM
    below = [count for _, count in found]
    counts = tuple(now - before for now, before in zip(below, [0, *below[:-1]], strict=True))
    return Histogram(tuple(bound for bound, _ in found), counts)


def _verdict(value: float | None) -> Verdict:
    number = round(value or 0)
    return Verdict(number) if number in Verdict.__members__.values() else Verdict.OK


def _up(value: float | None) -> bool | None:
    return None if value is None else bool(value)
