"""`arena bench queue`: a small step to N readers and an int back from each, against the floor and other libraries."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from telemetry.commands.bench import floor, options
from telemetry.commands.bench.children import BlockFailed, run_apart
from telemetry.commands.bench.contenders import Arena, Contender, Ends, crew, preload, why_missing
from telemetry.commands.bench.harness import Block, Side, alternate, p50s, p99s, paired, summarise
from telemetry.commands.bench.iceoryx import Iceoryx2
from telemetry.commands.bench.options import Settings
from telemetry.commands.bench.peers import MultiprocessingPipe, Pyzmq, VllmMessageQueue
from telemetry.commands.bench.report import Report, absent, figure, run

FLOOR, ARENA, PROBES_OFF = "the floor", "arena", "arena, probes off"
PEERS: tuple[type[Contender], ...] = (MultiprocessingPipe, Pyzmq, Iceoryx2, VllmMessageQueue)

TIMES_FLOOR = {1: 1.25, 2: 1.30, 4: 1.35}  # required at these numbers of readers
_TAIL_LIMIT = 2.5
_PROBES_LIMIT = 1.15


def command(
    readers: options.Readers = "1,2,4",
    pairs: options.Pairs = options.COMPARABLE_PAIRS,
    messages: options.Messages = options.COMPARABLE_MESSAGES,
    peers: options.Peers = True,
    quick: options.Quick = False,
    as_json: options.Json = False,
    check: options.Check = False,
) -> None:
    """Round trip of a small step: one broadcast to N readers, one int back from each."""
    settings = options.settings(readers=readers, pairs=pairs, messages=messages, peers=peers, quick=quick)
    run(measure, settings, as_json=as_json, check=check)


def measure(settings: Settings) -> Report:
    """Every number of readers in turn; within one, the contenders alternate."""
    preload("arena")
    report = Report("queue", settings)
    missing = {peer.name: why_missing(peer) for peer in PEERS} if settings.peers else {}
    for readers in settings.readers:
        _measure_readers(report, settings, readers, missing)
    return report


def round_trips(make: Callable[[], Contender], readers: int, messages: int, dropped: int) -> list[int]:
    """Sorted round trips in ns of one contender, as `floor.block` takes them."""
    clock = time.perf_counter_ns
    times = []
    answer = None
    with crew(make(), readers, partial(_answer_each, messages)) as at_work:
        send, receives = at_work.ends.send, at_work.ends.receives
        for _ in range(messages):
            start = clock()
            send(floor.OBJ)
            for receive in receives:
                answer = receive()
            times.append(clock() - start)
    if answer != messages - 1:
        raise BlockFailed(f"the last answer must be {messages - 1}, found {answer!r}")
    return sorted(times[dropped:])


def _answer_each(messages: int, ends: Ends) -> None:
    (receive,) = ends.receives
    answer = ends.send
    for index in range(messages):
        receive()
        answer(index)


def _measure_readers(report: Report, settings: Settings, readers: int, missing: dict[str, str]) -> None:
    contenders: dict[str, Callable[[], Contender]] = {ARENA: partial(Arena, probes=True)}
    contenders[PROBES_OFF] = partial(Arena, probes=False)
    contenders |= {peer.name: peer for peer in PEERS if missing.get(peer.name) == ""}
    sides = [_side(settings, FLOOR, floor.block, readers)]
    for name, make in contenders.items():
        sides.append(_side(settings, name, partial(round_trips, make), readers, guest=name in missing))
    case = f"{readers} reader{'s' if readers > 1 else ''}"
    turns = alternate(sides, lambda text: options.note(f"{case}, {text}"))

    arena = turns.blocks[ARENA]
    report.figures += [figure(case, name, blocks, arena) for name, blocks in turns.blocks.items()]
    report.figures += absent(case, missing, turns.failed)
    _require(report, case, readers, turns.blocks)


def _side(
    settings: Settings, name: str, trips: Callable[[int, int, int], list[int]], readers: int, *, guest: bool = False
) -> Side[Block]:
    """A block in fresh processes: the writer is forked from this one, and forks its readers."""

    def block() -> Block:
        return summarise(trips(readers, settings.messages, settings.dropped))

    return Side(name, partial(run_apart, block, settings.block_deadline_s), settings.pairs, guest)


def _require(report: Report, case: str, readers: int, blocks: dict[str, list[Block]]) -> None:
    arena, off = blocks[ARENA], blocks[PROBES_OFF]
    if readers in TIMES_FLOOR:
        over_floor = paired(p50s(arena), p50s(blocks[FLOOR]))
        report.require(f"{case}: round trip p50 over the floor's", TIMES_FLOOR[readers], "x", over_floor)
    report.require(f"{case}: round trip p99 over its own p50", _TAIL_LIMIT, "x", paired(p99s(arena), p50s(arena)))
    report.require(f"{case}: p50 with probes over p50 without", _PROBES_LIMIT, "x", paired(p50s(arena), p50s(off)))
