"""Counters that never fall while their queue lives, as far as whoever keeps the ledger has seen it.

Three things would make them fall: a reader that is replaced begins at 0, one that leaves takes its part of a queue's
sum along, and the part of a wait that was counted while it went on is not on the page for a moment when it ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from arena.probe import Kind, Role
from telemetry.blame import InProgress
from telemetry.reader import Endpoint, Page, Queue

Key = tuple[Role, int]
"""One end of a queue: its role and rank."""

WRITER: Final[Key] = (Role.WRITER, 0)


@dataclass(frozen=True)
class Account:
    """The values of one end, with what its earlier incarnations had counted; `gone` if there is none at present."""

    page: Page
    values: Sequence[int]
    gone: bool


class Ledger:
    """The accounts of one queue."""

    def __init__(self) -> None:
        self._newest: dict[Key, Endpoint] = {}
        self._earlier: dict[Key, Account] = {}
        self._floors: dict[tuple[str, str], int] = {}

    def accounts(self, queue: Queue, now: InProgress) -> dict[Key, Account]:
        """Take one more look at the queue: the account of every end that there is or was."""
        ends = {(end.page.role, end.rank): end for end in queue.endpoints}
        for key, end in ends.items():
            self._take(key, end)
        accounts = {key: self._account(key, newest, ends.get(key)) for key, newest in self._newest.items()}
        if WRITER in ends:
            accounts[WRITER] = self._with_wait(accounts[WRITER], now)
        return accounts

    def never_falling(self, name: str, reader: str, value: int) -> int:
        """The value, or the highest there was."""
        floor = self._floors[name, reader] = max(value, self._floors.get((name, reader), 0))
        return floor

    def _take(self, key: Key, end: Endpoint) -> None:
        """Note the end as it is now. Each incarnation counts once, however often it comes into sight."""
        before = self._newest.get(key)
        if before is not None and before.page.path != end.page.path:
            if end.alive is False and end.page.started_ns < before.page.started_ns:
                return  # a dead predecessor, in sight again since the newest left
            self._earlier[key] = Account(before.page, self._counts(key, before), gone=True)
        self._newest[key] = end

    def _account(self, key: Key, newest: Endpoint, now: Endpoint | None) -> Account:
        values = self._with_earlier(key, newest) if now is newest else self._counts(key, newest)
        return Account(newest.page, values, gone=now is None)

    def _counts(self, key: Key, end: Endpoint) -> list[int]:
        """What stays of an incarnation that is over: its counts. Its gauges end with it."""
        values = self._with_earlier(key, end)
        for one in end.page.series:
            if one.kind is Kind.GAUGE:
                values[one.word] = 0
        return values

    def _with_earlier(self, key: Key, end: Endpoint) -> list[int]:
        earlier = self._earlier.get(key)
        if earlier is None or earlier.page.series != end.page.series:  # nothing, or of another version
            return list(end.values)
        return [before + now for before, now in zip(earlier.values, end.values, strict=True)]

    def _with_wait(self, account: Account, now: InProgress) -> Account:
        """Add what is certain of the wait in progress."""
        charged = "" if now.charged is None else str(now.charged)
        more = {("writer_blocked_full_seconds_total", ""): now.full_ns}
        if charged:
            more["writer_blocked_seconds_total", charged] = now.lasted_ns
            more["writer_blocked_excess_seconds_total", charged] = now.excess_ns
        values = list(account.values)
        for one in account.page.series:
            if one.name.startswith("writer_blocked_") and one.kind is Kind.COUNTER:
                key = (one.name, one.labels.get("reader", ""))
                values[one.word] = self.never_falling(*key, values[one.word] + more.get(key, 0))
        return Account(account.page, values, gone=False)
