"""What the engine and its workers say to each other.

Named tuples: they pickle fast, and both ends read the same field names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class Ready(NamedTuple):
    """A worker has formed its group, and now comes to the queue."""

    rank: int


class Prefill(NamedTuple):
    """A request seen for the first time: its prompt, and the patches of its picture."""

    request: int
    prompt: list[int]
    pixels: Tensor | None


class Step(NamedTuple):
    """One forward pass: who starts, who goes on, and where each one's keys and values lie.

    Tokens are not in it. As with asynchronous scheduling, the engine sends a step before the last one is answered, and
    the workers remember what they sampled.
    """

    number: int
    prefills: list[Prefill]
    decodes: list[int]
    finished: list[int]
    block_tables: dict[int, list[int]]


class Regroup(NamedTuple):
    """The workers that are left form a new group, and go on from the tokens that all of them had confirmed."""

    epoch: int
    ranks: list[int]
    rendezvous: str
    tokens: dict[int, list[int]]


class Compared(NamedTuple):
    """How long one worker took over a sum of shares with Arena, and over the same with gloo."""

    arena_s: float
    gloo_s: float


class Summed(NamedTuple):
    """Which way Arena added up the shares of a step, and how that compares, if the step was one to compare in."""

    path: str
    compared: Compared | None


class Answer(NamedTuple):
    """What one worker made of one step; lost when its group broke on the way, because a member died.

    A worker alone has nothing to add up.
    """

    step: int
    epoch: int
    tokens: dict[int, int]
    digests: dict[int, int]
    lost: bool
    summed: Summed | None = None
