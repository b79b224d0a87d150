"""Moments made by hand: a fleet in which somebody stalls, as the monitor would see it, always the same."""

from __future__ import annotations

from dataclasses import replace

from arena.probe import BlockRecord
from telemetry.health import Verdict
from telemetry.monitor.facts import (
    ArenaFacts,
    GroupFacts,
    Histogram,
    Moment,
    QueueFacts,
    RankFacts,
    ReaderFacts,
    WaitFacts,
    WriterFacts,
)
from telemetry.monitor.recent import Recent

WALL_S = 1_796_047_392.0  # 2026-11-30 14:03:12 UTC
SLOTS = 64
STEP_S = 0.5
STALLED_LOOKS = 25  # 12.5 s at two looks a second
MB = 1 << 20


def reader(rank: int, **changes: object) -> ReaderFacts:
    """A worker that does well."""
    hold = Histogram((0.001, 0.004, 0.016, 0.064, float("inf")), (120, 700, 60 + 20 * rank, 3, 0))
    well = ReaderFacts(
        rank=rank,
        pid=4710 + rank,
        alive=True,
        process="S",
        verdict=Verdict.OK,
        state="waiting",
        relation="awaiting_write",
        lag=0,
        lag_s=0.0,
        silent_s=0.021 + 0.013 * rank,
        hold=hold,
        blocked_s=0.2 * rank,
        excess_s=0.1 * rank,
        starved_s=100.0,
        held_bytes=0,
        pinned=2,
        pin_failures=0,
        gate_blocks=0,
        gate_s=0.0,
    )
    return replace(well, **changes)  # type: ignore[arg-type]


def queue(label: str = "steps", n_reader: int = 4, **changes: object) -> QueueFacts:
    """A queue on which nobody waits."""
    well = QueueFacts(
        label=label,
        instance="5f3a",
        n_reader=n_reader,
        slots=SLOTS,
        writer=WriterFacts(4701, True, "S", "working", 0.012, 18_350),
        readers=tuple(reader(rank) for rank in range(n_reader)),
        wait=WaitFacts(),
        published=18_350,
        published_bytes=96_000_000_000,
        waited_s=1.0,
        full_s=0.4,
        fallbacks={},
        errors={},
        arena=ArenaFacts(2, 128 * MB, 23 * MB, 96 * MB, 4096 * MB, 64 * MB),
        blocks=(),
    )
    return replace(well, **changes)  # type: ignore[arg-type]


def rank(number: int, **changes: object) -> RankFacts:
    """A rank that has reduced something."""
    operations = {"one_shot": 96_000, "symm_mem_multimem": 32_000}
    nbytes = {"one_shot": 96_000 * 64 * 1024, "symm_mem_multimem": 32_000 * MB}
    well = RankFacts(number, 4710 + number, True, "S", operations, nbytes, {"too_large": 32_000})
    return replace(well, **changes)  # type: ignore[arg-type]


def group(label: str = "tp:0", world: int = 4, **changes: object) -> GroupFacts:
    """A communicator whose ranks are all there."""
    paths = ("one_shot", "symm_mem_multimem", "nccl")
    well = GroupFacts(label, "77b0", world, "cuda:0", "tuned", paths, tuple(rank(number) for number in range(world)))
    return replace(well, **changes)  # type: ignore[arg-type]


def moment(
    *queues: QueueFacts, at_s: float = 0.0, troubles: tuple[str, ...] = (), groups: tuple[GroupFacts, ...] = ()
) -> Moment:
    """These queues and communicators, at a time."""
    return Moment(1000.0 + at_s, WALL_S + at_s, "/run/user/1000/arena", queues, troubles, groups=groups)


def stall() -> tuple[Moment, Recent]:
    """A reader that stands in its own code, the writer that waits for it, and queues beside it that do well."""
    recent = Recent()
    looks = [_look(number) for number in range(-20, STALLED_LOOKS)]
    for look in looks:
        recent.add(look)
    return looks[-1], recent


def _look(number: int) -> Moment:
    at_s = number * STEP_S
    answers = [
        queue(
            f"answers-{rank}",
            1,
            instance=f"a{rank}",
            writer=WriterFacts(4710 + rank, True, "S", "working", 0.03, 9000 + 40 * min(number, 2)),
            readers=(reader(0, pid=4701, pinned=0, silent_s=0.04, hold=_hold(number, 5)),),
            published=9000 + 20 * min(number, 2) + rank,
            published_bytes=int(9e6 + 4e3 * min(number, 2)),
            arena=ArenaFacts(),
        )
        for rank in range(4)
    ]
    return moment(*answers, _steps(number), at_s=at_s, groups=(_reducing(number),))


def _reducing(number: int) -> GroupFacts:
    """The ranks reduce until the second one stands still; it is an operation behind."""
    ranks = []
    for one in range(4):
        small, large = 90_000 + 1280 * min(number, 3) - (one == 1), 30_000 + 40 * min(number, 3)
        operations, nbytes = {"one_shot": small, "nccl": large}, {"one_shot": small << 16, "nccl": large << 23}
        ranks.append(rank(one, operations=operations, nbytes=nbytes, declines={"too_large": large}))
    return group(paths=("one_shot", "nccl"), ranks=tuple(ranks))


def _steps(number: int) -> QueueFacts:
    """At number 0 reader 1 stops taking; the ring is full at 2."""
    waited_s = max(0.0, (number - 0.2) * STEP_S + 0.5)
    waiting = number >= 1
    sequence = 18_350 + 64 * min(number, 1)
    lag = min(SLOTS, max(0, 64 * min(number + 1, 1))) if number >= 0 else number % 3
    stalled = reader(
        1,
        verdict=Verdict.STALLED if number > 2 else Verdict.OK,
        state="working",
        relation="awaiting_readers" if waiting else "",
        lag=lag,
        lag_s=waited_s,
        silent_s=waited_s + 0.4,
        blocked_s=0.2 + waited_s,
        excess_s=0.1 + waited_s,
        held_bytes=21 * MB,
        gate_blocks=3,
        gate_s=waited_s + 0.3,
        hold=_hold(min(number, 0), 30),
    )
    others = [reader(rank, relation="already_read", lag=0, hold=_hold(min(number, 1), 20 * rank)) for rank in (0, 2, 3)]
    blocks = [BlockRecord(0, at * 8 * MB, 5 * MB, (1,), False) for at in range(4)]
    blocks += [BlockRecord(1, 0, MB, (0, 1, 2, 3), False), BlockRecord(1, 16 * MB, 12 * MB, (), True)]
    return queue(
        writer=WriterFacts(4701, True, "S", "waiting" if waiting else "working", 0.008, sequence),
        readers=(others[0], stalled, others[1], others[2]),
        wait=WaitFacts(waited_s, (1,)) if waiting else WaitFacts(),
        published=sequence,
        published_bytes=96_000_000_000 + 5_000_000 * min(number, 1),
        waited_s=1.0 + waited_s,
        blocks=tuple(blocks),
    )


def _hold(number: int, slow: int) -> Histogram:
    taken = 2000 + 60 * number
    return Histogram((0.001, 0.004, 0.016, 0.064, float("inf")), (taken, 5 * taken, slow * (100 + number), 3, 0))
