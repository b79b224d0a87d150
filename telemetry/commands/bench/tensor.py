"""`arena bench tensor`: a large CPU tensor to N readers, measured in bare copies of the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from telemetry.commands.bench import machine, options
from telemetry.commands.bench.children import run_apart
from telemetry.commands.bench.contenders import Arena, Contender, preload, why_missing
from telemetry.commands.bench.harness import Block, Side, Spread, Turns, alternate, p50s, paired, spread
from telemetry.commands.bench.options import Settings
from telemetry.commands.bench.peers import (
    MultiprocessingPipe,
    PyzmqTensor,
    TorchQueue,
    VllmMessageQueue,
    VllmTensorArena,
)
from telemetry.commands.bench.report import Report, absent, figure, run
from telemetry.commands.bench.transfers import Timed, bare_first, broadcast, first_message, head_of_line, lent

T = TypeVar("T")

ARENA, COPY = "arena", "one bare copy"
PEERS: tuple[type[Contender], ...] = (
    MultiprocessingPipe,
    PyzmqTensor,
    TorchQueue,
    VllmMessageQueue,
    VllmTensorArena,
)

_TENSOR_BYTES = 192 << 20
_LARGE_BYTES = 200_000_000
_QUICK_BYTES = 8 << 20
_REPEATS = 5
_QUICK_REPEATS = 2
_PEER_ROUNDS = 3  # a peer takes seconds a block, and its ratio needs no second digit
_PEER_REPEATS = 3
_HUGE_PAGE_BYTES = 2 << 20


def command(
    readers: options.Readers = "1,2,4",
    pairs: options.Pairs = options.COMPARABLE_PAIRS,
    peers: options.Peers = True,
    quick: options.Quick = False,
    as_json: options.Json = False,
    check: options.Check = False,
) -> None:
    """A 192 MiB tensor to N readers: warm, first, lent, and a thousand small messages behind it."""
    settings = options.settings(readers=readers, pairs=pairs, peers=peers, quick=quick)
    run(measure, settings, as_json=as_json, check=check)


def measure(settings: Settings) -> Report:
    """Every number of readers in turn, then what does not depend on it."""
    preload("arena", "torch")
    report = Report("tensor", settings)
    missing = {peer.name: why_missing(peer) for peer in PEERS} if settings.peers else {}
    for readers in settings.readers:
        _measure_broadcast(report, settings, readers, missing)
        _measure_first(report, settings, readers)
        _measure_lent(report, settings, readers)
    _measure_head_of_line(report, settings)
    return report


def _measure_broadcast(report: Report, settings: Settings, readers: int, missing: dict[str, str]) -> None:
    case = _case("warm", readers)
    present: dict[str, Callable[[], Contender]] = {ARENA: Arena}
    present |= {peer.name: peer for peer in PEERS if missing.get(peer.name) == ""}
    sides = []
    for name, make in present.items():
        guest = name in missing
        rounds, repeats = settings.pairs, _repeats(settings)
        if guest:
            rounds, repeats = min(rounds, _PEER_ROUNDS), min(repeats, _PEER_REPEATS)
        block = partial(broadcast, make, readers, _size(settings), repeats)
        sides.append(_side(settings, name, block, rounds, guest=guest))
    turns = _alternate(case, sides)

    arena = turns.blocks[ARENA]
    report.figures.append(figure(case, COPY, _yardsticks(arena), _times(arena)))
    report.figures += [figure(case, name, _times(found), _times(arena)) for name, found in turns.blocks.items()]
    report.figures += absent(case, missing, turns.failed)
    report.require(f"{case}: p50 over one bare copy", 1.2, "x", _in_yardsticks(arena))


def _measure_first(report: Report, settings: Settings, readers: int) -> None:
    size = _size(settings)
    ahead = {"prefault": True, "segment_bytes": -(-size // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES}
    case = _case("first", readers)
    plain, prefault, bare = "arena", "arena, prefault", "one bare copy, no queue"
    sides = [
        _side(settings, plain, partial(first_message, readers, size), settings.pairs),
        _side(settings, prefault, partial(first_message, readers, size, **ahead), settings.pairs),
        _side(settings, bare, partial(bare_first, readers, size), settings.pairs),
    ]
    blocks = _alternate(case, sides).blocks

    arena = _times(blocks[plain])
    report.figures.append(figure(case, "one cold copy", _yardsticks(blocks[plain]), arena))
    report.figures += [figure(case, name, _times(found), arena) for name, found in blocks.items()]
    limit, where = (0.5, "with") if machine.collapse_works() else (1.2, "without")
    report.require(f"{case}: over one cold copy ({where} MADV_COLLAPSE)", limit, "x", _in_yardsticks(blocks[plain]))
    report.require(f"{case}: prefault, over one bare copy", 1.3, "x", _in_yardsticks(blocks[prefault]))
    limit_of_all = _in_yardsticks(blocks[bare]).median
    report.remarks.append(
        f"{case}: a bare copy into memory that {readers} readers have mapped already, told by pipes, takes"
        f" {limit_of_all:.2f} bare copies until all have touched it: no queue is below that"
    )


def _measure_lent(report: Report, settings: Settings, readers: int) -> None:
    case = _case("lent", readers)
    block = partial(lent, readers, _size(settings), _repeats(settings))
    blocks = _alternate(case, [_side(settings, ARENA, block, settings.pairs)]).blocks[ARENA]
    times = _times(blocks)
    report.figures.append(figure(case, "one bare pickle, caches as cold", _yardsticks(blocks), times))
    report.figures.append(figure(case, "arena, enqueue alone", times, times))
    report.require(f"{case}: enqueue p50", 100, "µs", _in_us(times))


def _measure_head_of_line(report: Report, settings: Settings) -> None:
    case = "1000 behind a large one"
    block = partial(head_of_line, _size(settings, _LARGE_BYTES), _repeats(settings))
    blocks = _alternate(case, [_side(settings, ARENA, block, settings.pairs)]).blocks[ARENA]
    report.figures.append(figure(case, "one bare copy + the 1000 alone", _yardsticks(blocks), _times(blocks)))
    report.figures.append(figure(case, ARENA, _times(blocks), _times(blocks)))
    report.require(f"{case}: over one bare copy + the 1000 alone", 1.2, "x", _in_yardsticks(blocks))


def _case(what: str, readers: int) -> str:
    return f"{what}, {readers} reader{'s' if readers > 1 else ''}"


def _size(settings: Settings, full: int = _TENSOR_BYTES) -> int:
    return _QUICK_BYTES if settings.quick else full


def _repeats(settings: Settings) -> int:
    return _QUICK_REPEATS if settings.quick else _REPEATS


def _side(settings: Settings, name: str, block: Callable[[], T], rounds: int, *, guest: bool = False) -> Side[T]:
    return Side(name, partial(run_apart, block, settings.block_deadline_s), rounds, guest)


def _alternate(case: str, sides: Sequence[Side[T]]) -> Turns[T]:
    return alternate(sides, lambda text: options.note(f"{case}, {text}"))


def _times(blocks: Sequence[Timed]) -> list[Block]:
    return [block.times for block in blocks]


def _yardsticks(blocks: Sequence[Timed]) -> list[Block]:
    return [block.yardstick for block in blocks]


def _in_yardsticks(blocks: Sequence[Timed]) -> Spread:
    return paired(p50s(_times(blocks)), p50s(_yardsticks(blocks)))


def _in_us(blocks: Sequence[Block]) -> Spread:
    return spread([block.p50 / 1e3 for block in blocks])
