"""What users ask for: requests that arrive at random, whether or not the engine keeps up.

The arrivals are planned before the run, and waiting counts from the planned moment. A load that waited for the engine
would hide the very stalls that the demo is there to show.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from telemetry.commands.demo.layer import HIDDEN
from telemetry.commands.demo.pictures import Picture

REQUESTS_PER_S = 8.0
PICTURE_SHARE = 0.2
SYNTHETIC_DECK = (23,) * 9 + (96,) * 3 + (213,)  # megabytes of 13 pictures
PROMPT_TOKENS = (40, 400)
ANSWER_TOKENS = (20, 60)


class Request(NamedTuple):
    """One request: when it arrives, what it asks, and how many tokens it wants."""

    number: int
    arrival_s: float
    prompt: list[int]
    picture: Picture | None
    length: int

    @property
    def kind(self) -> str:
        """Name of the row it is counted in."""
        return self.picture.kind if self.picture else "text"

    @property
    def tokens(self) -> int:
        """What its prefill costs of a step's token budget."""
        return len(self.prompt) + (self.picture.tokens if self.picture else 0)


def plan(seed: int, seconds: float, deck: Sequence[int], picture_of: Callable[[int], Picture]) -> list[Request]:
    """Draw the requests of one run; `deck` holds what `picture_of` takes, as often as each picture is to be seen."""
    rng = random.Random(seed)
    arrivals = list(_poisson(rng, seconds))
    with_picture = set(rng.sample(range(len(arrivals)), round(PICTURE_SHARE * len(arrivals))))
    shown = _dealt(rng, deck)
    return [
        Request(
            number=number,
            arrival_s=arrival_s,
            prompt=[rng.randrange(HIDDEN) for _ in range(rng.randint(*PROMPT_TOKENS))],
            picture=picture_of(next(shown)) if number in with_picture else None,
            length=rng.randint(*ANSWER_TOKENS),
        )
        for number, arrival_s in enumerate(arrivals)
    ]


def _poisson(rng: random.Random, seconds: float) -> Iterator[float]:
    """The first request comes at once: a short run is to have one too."""
    arrival_s = 0.0
    while arrival_s < seconds:
        yield arrival_s
        arrival_s += rng.expovariate(REQUESTS_PER_S)


def _dealt(rng: random.Random, deck: Sequence[int]) -> Iterator[int]:
    """Deal the deck again and again, shuffled each time: a fair mix also when few cards are dealt."""
    while True:
        yield from rng.sample(deck, len(deck))
