"""What one run came to: plain numbers, for the table and for --json alike."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, NamedTuple, TypeVar

from telemetry.commands.demo.engine import Death, Engine, Sums
from telemetry.commands.demo.scheduler import Tracked

Key = TypeVar("Key")
Number = TypeVar("Number", int, float)


class Spread(NamedTuple):
    """Percentiles by nearest rank: each is a value that was seen."""

    n: int
    p50: float
    p90: float
    p99: float
    max: float


def spread(values: Iterable[float]) -> Spread | None:
    """Return the percentiles of what was seen; None when nothing was."""
    ranked = sorted(values)
    if not ranked:
        return None
    p50, p90, p99 = (ranked[math.ceil(share * len(ranked)) - 1] for share in (0.50, 0.90, 0.99))
    return Spread(len(ranked), p50, p90, p99, ranked[-1])


@dataclass(frozen=True)
class Fault:
    """A worker that died, and how long the others were held up by it."""

    rank: int
    pid: int | None
    signal: int | None
    raised: str
    injected: bool
    detected_ms: float | None
    resumed_ms: float | None


@dataclass(frozen=True)
class Collective:
    """How the workers added up. The times are medians of what the slowest worker took, the ratio is that of the pairs.

    Of so many sums that were made once more with Arena, and with gloo; None without any.
    """

    operations_by_path: dict[str, int]
    compared: int
    arena_us: float | None
    gloo_us: float | None
    times_as_fast: float | None


@dataclass(frozen=True)
class Result:
    """One run with the arena off or on. `ttft_ms` covers every request that arrived, by kind and under "all"."""

    arena: str
    seconds: float
    offered: int
    completed: int
    without_first_token: int
    ttft_ms: dict[str, Spread]
    steps: int
    stalls: int
    stalled_ms: float
    longest_stall_ms: float
    bytes_by_path: dict[str, int]
    messages_by_path: dict[str, int]
    fallbacks: dict[str, int]
    collective: Collective
    blocked_s_by_reader: dict[int, float]
    excess_s_by_reader: dict[int, float]
    arena_size_bytes: int
    parks: int
    missed_wakes: int
    deaths: list[Fault]
    mismatches: list[str]
    interrupted: bool

    @property
    def with_picture(self) -> int:
        """How many of the requests that arrived had a picture."""
        return sum(seen.n for kind, seen in self.ttft_ms.items() if kind not in ("all", "text"))

    @property
    def culprit(self) -> int | None:
        """The reader that cost the writer most, by what it took beyond all others; None when nobody did."""
        rank = max(self.excess_s_by_reader, key=lambda rank: self.excess_s_by_reader[rank], default=None)
        return rank if rank is not None and self.blocked_s_by_reader[rank] > 0.001 else None

    @property
    def blocked_by_culprit_s(self) -> float | None:
        """How long the writer waited for that reader."""
        return None if self.culprit is None else self.blocked_s_by_reader[self.culprit]

    @property
    def excess_of_culprit_s(self) -> float | None:
        """How long it waited for nobody else."""
        return None if self.culprit is None else self.excess_s_by_reader[self.culprit]

    @property
    def ok(self) -> bool:
        """Whether every answer was right, and nobody died of whom the demo had not asked it."""
        return not self.mismatches and all(death.injected for death in self.deaths)

    @property
    def uneventful(self) -> bool:
        """Whether nothing happened that there would be something to say about."""
        return self.ok and self.culprit is None and not self.deaths and not self.interrupted

    def as_json(self) -> dict[str, Any]:
        """Return what json.dumps takes."""
        spreads = {kind: spread._asdict() for kind, spread in self.ttft_ms.items()}
        return asdict(self) | {
            "ttft_ms": spreads,
            "with_picture": self.with_picture,
            "culprit": self.culprit,
            "ok": self.ok,
        }


def summarise(engine: Engine, *, arena: str, interrupted: bool) -> Result:
    """Take the numbers of a run out of the engine, before its queue is closed; the tokens are still to be proved."""
    scheduler, before, statistics = engine.scheduler, engine.before, engine.fleet.queue.statistics()
    elapsed_s = engine.now_s()
    arrived = [tracked for tracked in scheduler.all if tracked.request.arrival_s <= elapsed_s]
    ttft_ms = defaultdict(list)
    for tracked in sorted(arrived, key=_picture_bytes):  # so that the kinds come in the order of their size
        # One that was never served counts with the time it has waited so far: to leave it out would be to hide it.
        served_s = elapsed_s if tracked.first_token_s is None else tracked.first_token_s
        waited_ms = (served_s - tracked.request.arrival_s) * 1e3
        ttft_ms["all"].append(waited_ms)
        ttft_ms[tracked.request.kind].append(waited_ms)
    return Result(
        arena=arena,
        seconds=elapsed_s,
        offered=len(arrived),
        completed=scheduler.completed,
        without_first_token=sum(tracked.first_token_s is None for tracked in arrived),
        ttft_ms={kind: seen for kind, waits in ttft_ms.items() if (seen := spread(waits))},
        steps=engine.steps,
        stalls=len(engine.stalls_s),
        stalled_ms=sum(engine.stalls_s) * 1e3,
        longest_stall_ms=max(engine.stalls_s, default=0.0) * 1e3,
        bytes_by_path=_used(_grown(before.bytes_by_path, statistics.bytes_by_path)),
        messages_by_path=_used(_grown(before.messages_by_path, statistics.messages_by_path)),
        fallbacks=_used(_grown(before.fallbacks, statistics.fallbacks)),
        collective=_collective(engine.sums),
        blocked_s_by_reader=_grown(before.blocked_s_by_reader, statistics.blocked_s_by_reader),
        excess_s_by_reader=_grown(before.excess_s_by_reader, statistics.excess_s_by_reader),
        arena_size_bytes=statistics.arena_size_bytes,
        parks=statistics.parks - before.parks,
        missed_wakes=statistics.missed_wakes - before.missed_wakes,
        deaths=[_fault(death) for death in engine.deaths],
        mismatches=engine.faults,
        interrupted=interrupted,
    )


def _collective(sums: Sums) -> Collective:
    pairs = sums.compared
    return Collective(
        operations_by_path=sums.operations_by_path,
        compared=len(pairs),
        arena_us=median(pair.arena_s for pair in pairs) * 1e6 if pairs else None,
        gloo_us=median(pair.gloo_s for pair in pairs) * 1e6 if pairs else None,
        times_as_fast=median(pair.gloo_s / pair.arena_s for pair in pairs) if pairs else None,
    )


def _grown(before: Mapping[Key, Number], after: Mapping[Key, Number]) -> dict[Key, Number]:
    """Return what was counted in between."""
    return {key: count - before.get(key, 0) for key, count in after.items()}


def _used(counts: Mapping[str, int]) -> dict[str, int]:
    return {key: count for key, count in counts.items() if count}


def _picture_bytes(tracked: Tracked) -> int:
    picture = tracked.request.picture
    return picture.nbytes if picture else 0


def _fault(death: Death) -> Fault:
    killed_at = death.killed_at
    since = death.noticed_at if killed_at is None else killed_at
    return Fault(
        rank=death.rank,
        pid=death.pid,
        signal=death.signal,
        raised=death.raised,
        injected=killed_at is not None,
        detected_ms=None if killed_at is None else (death.noticed_at - killed_at) * 1e3,
        resumed_ms=None if death.resumed_at is None else (death.resumed_at - since) * 1e3,
    )
