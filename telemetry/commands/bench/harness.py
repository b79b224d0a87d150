"""Turns, and what is made of them: blocks of the sides alternate, and only blocks of one round are compared.

A shared machine drifts by more than the differences of interest. Two blocks of the same round see the same machine, so
the figure is the median of the ratios of such pairs, and its spread is shown beside it.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from telemetry.commands.bench.children import BlockFailed

T = TypeVar("T")


@dataclass(frozen=True)
class Block:
    """What is kept of one block's times, in ns."""

    p50: float
    p99: float


@dataclass(frozen=True)
class Spread:
    """A median over rounds, with the lowest and the highest round."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Side(Generic[T]):
    """One party of a comparison; `run` measures one block of it.

    A guest is another library: when it fails, it leaves the comparison, and the run goes on.
    """

    name: str
    run: Callable[[], T]
    rounds: int
    guest: bool = False


@dataclass(frozen=True)
class Turns(Generic[T]):
    """The blocks of each side in the order of the rounds, and why a guest has none."""

    blocks: dict[str, list[T]]
    failed: dict[str, str]


def alternate(sides: Sequence[Side[T]], note: Callable[[str], None]) -> Turns[T]:
    """Runs one block of every side a round. Every second round goes backwards, so that no side always comes first."""
    turns: Turns[T] = Turns({side.name: [] for side in sides}, {})
    rounds = max(side.rounds for side in sides)
    for index in range(rounds):
        for side in sides if index % 2 == 0 else reversed(sides):
            if index < side.rounds and side.name not in turns.failed:
                note(f"round {index + 1} of {rounds}: {side.name}")
                _take_turn(side, turns)
    return turns


def _take_turn(side: Side[T], turns: Turns[T]) -> None:
    try:
        turns.blocks[side.name].append(side.run())
    except BlockFailed as failure:
        if not side.guest:
            raise BlockFailed(f"{side.name}: {failure}") from None
        del turns.blocks[side.name]
        turns.failed[side.name] = failure.reason


def summarise(times: Iterable[int]) -> Block:
    """What is kept of a block's times."""
    ordered = sorted(times)
    return Block(quantile(ordered, 0.5), quantile(ordered, 0.99))


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value at that share of the sorted list, as the floor takes it: no interpolation."""
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


def spread(values: Sequence[float]) -> Spread:
    """The median of one value a round, and how far the rounds lie apart."""
    return Spread(statistics.median(values), min(values), max(values))


def paired(over: Sequence[float], under: Sequence[float]) -> Spread:
    """The spread of `over / under`, round by round; rounds that one side did not take part in are left out."""
    return spread([numerator / denominator for numerator, denominator in zip(over, under, strict=False)])


def p50s(blocks: Sequence[Block]) -> list[float]:
    """The p50 of each block, in the order of the rounds."""
    return [block.p50 for block in blocks]


def p99s(blocks: Sequence[Block]) -> list[float]:
    """The p99 of each block, in the order of the rounds."""
    return [block.p99 for block in blocks]
