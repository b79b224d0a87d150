"""Who runs in the next step: continuous batching, decided without touching a queue or a clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from telemetry.commands.demo.pictures import Picture
from telemetry.commands.demo.wire import Prefill, Step
from telemetry.commands.demo.workload import Request

STEP_TOKENS = 16384  # what one step has room for; a picture that takes more goes alone
MAX_ACTIVE = 64
BLOCK_TOKENS = 16


@dataclass
class Tracked:
    """A request under way. Its scheduled tokens are in flight or confirmed; its tokens every worker has confirmed."""

    request: Request
    scheduled: int = 0
    tokens: list[int] = field(default_factory=list)
    first_token_s: float | None = None

    def block_table(self) -> list[int]:
        """Name the blocks of the key-value cache that hold it, as an engine has to in every step."""
        blocks = (len(self.request.prompt) + self.scheduled) // BLOCK_TOKENS + 1
        first = self.request.number * BLOCK_TOKENS
        return list(range(first, first + blocks))


class Planned(NamedTuple):
    """A step, and the digest of each picture in it that the workers have to find."""

    step: Step
    digests: dict[int, int]


class Scheduler:
    """The requests of one run, on their way from arriving over waiting to active, and out when complete."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.all = [Tracked(request) for request in requests]
        self.arriving = deque(self.all)
        self.waiting: deque[Tracked] = deque()
        self.active: dict[int, Tracked] = {}
        self.completed = 0
        self._finished: list[int] = []  # complete, and the workers have not been told yet

    @property
    def unfinished(self) -> bool:
        """Whether a request is still to arrive or to be completed."""
        return bool(self.arriving or self.waiting or self.active)

    @property
    def has_work(self) -> bool:
        """Whether a step sent now would have anything in it."""
        return bool(self.waiting or self._decodes())

    def admit_arrivals(self, now_s: float) -> None:
        """Put those whose time has come into the waiting line."""
        while self.arriving and self.arriving[0].request.arrival_s <= now_s:
            self.waiting.append(self.arriving.popleft())

    def next_step(self, number: int) -> Planned:
        """Take a token for everyone who is active, and as many of those who wait as there is room for."""
        decodes = self._decodes()
        prefills = self._admit(STEP_TOKENS - len(decodes))
        digests: dict[int, int] = {}
        for tracked in prefills:
            if picture := tracked.request.picture:
                digests[tracked.request.number] = picture.stamp(number)
        scheduled = prefills + decodes
        for tracked in scheduled:
            tracked.scheduled += 1
        finished, self._finished = self._finished, []
        step = Step(
            number=number,
            prefills=[_prefill(tracked.request) for tracked in prefills],
            decodes=[tracked.request.number for tracked in decodes],
            finished=finished,
            block_tables={tracked.request.number: tracked.block_table() for tracked in scheduled},
        )
        return Planned(step, digests)

    def confirm(self, tokens: dict[int, int], now_s: float) -> None:
        """Every worker has answered with these tokens."""
        for number, token in tokens.items():
            tracked = self.active[number]
            tracked.tokens.append(token)
            if tracked.first_token_s is None:
                tracked.first_token_s = now_s
            if len(tracked.tokens) == tracked.request.length:
                del self.active[number]
                self._finished.append(number)
                self.completed += 1

    def roll_back(self) -> dict[int, list[int]]:
        """Give up what is in flight: return the tokens that stand, and let those without one wait again."""
        for tracked in self.active.values():
            tracked.scheduled = len(tracked.tokens)
        again = [tracked for tracked in self.active.values() if not tracked.tokens]
        for tracked in reversed(again):
            del self.active[tracked.request.number]
            self.waiting.appendleft(tracked)
        return {number: tracked.tokens for number, tracked in self.active.items()}

    def _decodes(self) -> list[Tracked]:
        return [tracked for tracked in self.active.values() if tracked.scheduled < tracked.request.length]

    def _admit(self, room: int) -> list[Tracked]:
        admitted: list[Tracked] = []
        pictures: list[Picture] = []
        while self.waiting and len(self.active) < MAX_ACTIVE:
            request = self.waiting[0].request
            if admitted and request.tokens > room:
                break
            if request.picture in pictures:  # one message carries a tensor once: the load would be less than it says
                break
            tracked = self.waiting.popleft()
            self.active[tracked.request.number] = tracked
            admitted.append(tracked)
            room -= request.tokens
            if request.picture:
                pictures.append(request.picture)
        return admitted


def _prefill(request: Request) -> Prefill:
    return Prefill(request.number, request.prompt, request.picture.pixels if request.picture else None)
