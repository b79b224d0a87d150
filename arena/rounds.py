"""Rounds: what the ranks of a group say to each other, and the one verdict that they all come to.

They talk through the store of their process group, which needs no rank's attention. In a *round* each rank posts
a statement and collects those of all others. Then it proposes a verdict: go on; or not, because a rank failed; or not,
because ranks are missing. The store's compare-and-set keeps the first proposal, and everybody obeys what it kept: so a
rank whose clock ran out a moment early can't come to another conclusion than the rest.
"""

from __future__ import annotations

import pickle
import time
from dataclasses import dataclass, fields
from typing import Any, Final

from arena.aside import Aside, Hung
from arena.device import Declined
from arena.errors import PeerDied, RankMissing, SetUpFailed
from arena.probe import Identity, identity, is_alive
from arena.wait import deadline_after

BY_ITSELF, BY_ANOTHER, LEFT_HANGING = range(3)
"""The order in which failures count: a rank's own, one that another rank caused, having been left hanging."""

_FIRST_PAUSE_S: Final = 0.0005
_LONGEST_PAUSE_S: Final = 0.02
_STORE_GRACE_S: Final = 1.0


@dataclass(frozen=True)
class Statement:
    """What a rank posts in a round: a word of its own, the end of its part, or a failure.

    Of several failures the first by `order` counts: one of a rank's own, then one that another rank caused,
    then being left hanging.
    """

    kind: str  # "said", "done" or "failed"
    said: Any = None
    reason: str = ""
    text: str = ""
    order: int = 0

    def check(self) -> None:
        """Refuse what no rank of this version posts.

        Raises:
            ValueError: says what.
        """
        if self.kind not in ("said", "done", "failed") or self.order not in (BY_ITSELF, BY_ANOTHER, LEFT_HANGING):
            raise ValueError(f"kind {self.kind!r}, order {self.order!r}")
        _check_texts(self.reason, self.text)


@dataclass(frozen=True)
class Verdict:
    """What becomes of a round: go on, a failure, or ranks that are missing."""

    kind: str  # "go", "failed", "missing" or "died"
    reason: str = ""
    text: str = ""
    ranks: tuple[int, ...] = ()

    def check(self, world: int) -> None:
        """Refuse what no rank of this version proposes.

        Raises:
            ValueError: says what.
        """
        ranks: object = self.ranks
        named = isinstance(ranks, tuple) and all(type(one) is int and 0 <= one < world for one in ranks)
        if self.kind not in ("go", "failed", "missing", "died") or not named:
            raise ValueError(f"kind {self.kind!r}, ranks {self.ranks!r} of {world}")
        if self.kind in ("missing", "died") and not self.ranks:
            raise ValueError(f"{self.kind}, and nobody is named")
        _check_texts(self.reason, self.text)


def _check_texts(*texts: object) -> None:
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"texts that are none: {texts!r}")


class Rounds:
    """Rounds of one rank with the others of its group."""

    def __init__(self, store: Any, attempt: int, rank: int, world: int) -> None:
        self._store = store
        self.rank = rank
        self.world = world
        self._round = 0
        self._people: list[Identity | None] = [None] * world
        while self._kept(self._verdict_key(attempt)).kind not in ("", "go"):
            attempt += 1  # the others gave this one up before we came
        self.attempt = attempt

    def meet(self, said: Any, deadline_s: float) -> list[Any]:
        """The first round: who is there, and what each has to say.

        Raises:
            RankMissing: some did not come; the same error on every rank that did.
            SetUpFailed: a rank could not take part, and said so.
        """
        answers = self.exchange("arriving", Statement("said", (identity(), said)), deadline_s)
        for rank, answer in enumerate(answers):
            came = answer.said
            if not (isinstance(came, tuple) and len(came) == 2 and _is_identity(came[0])):
                raise _unreadable(f"what rank {rank} said when it came", type(came).__name__)
        people, words = zip(*(answer.said for answer in answers), strict=True)
        self._people = [person if person.pid_namespace == identity().pid_namespace else None for person in people]
        return list(words)

    def exchange(self, what: str, statement: Statement, deadline_s: float) -> list[Statement]:
        """One round; the statements by rank.

        Args:
            what: what the ranks are doing, for errors.
            statement: this rank's.
            deadline_s: how long to wait for the others.

        Raises:
            Declined: a rank failed in it; the same reason on all ranks.
            RankMissing, PeerDied: ranks fell silent.
        """
        base = f"arena/{self.attempt}/{self._round}"
        self._round += 1
        aside = Aside()  # because the store is a process too, and may stand still
        try:
            return aside.call(lambda: self._exchange(base, what, statement, deadline_s), deadline_s + _STORE_GRACE_S)
        except Hung:
            raise _silent_store(what) from None
        finally:
            aside.end()

    def _exchange(self, base: str, what: str, statement: Statement, deadline_s: float) -> list[Statement]:
        self._store.set(f"{base}/{self.rank}", pickle.dumps(statement))
        statements, missing = self._collect(base, deadline_s)
        proposal = self._judge(what, statements, missing)
        kept: bytes = self._store.compare_set(f"{base}/verdict", "", pickle.dumps(proposal).hex())
        return self._obey(base, self._verdict(kept))

    def _collect(self, base: str, deadline_s: float) -> tuple[dict[int, Statement], list[int]]:
        """Statements until all are there, time is up, a silent rank is dead, or somebody else has judged."""
        deadline_ns = deadline_after(deadline_s)
        assert deadline_ns is not None
        statements: dict[int, Statement] = {}
        missing, pause_s = list(range(self.world)), _FIRST_PAUSE_S
        while True:
            for rank in list(missing):
                if self._store.check([f"{base}/{rank}"]):
                    statements[rank] = self._statement(base, rank)
                    missing.remove(rank)
            over = time.monotonic_ns() >= deadline_ns or self._store.check([f"{base}/verdict"])
            if not missing or over or self._dead(missing):
                return statements, missing
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _dead(self, ranks: list[int]) -> list[int]:
        people = [(rank, self._people[rank]) for rank in ranks]
        return [rank for rank, person in people if person is not None and is_alive(person) is False]

    def _judge(self, what: str, statements: dict[int, Statement], missing: list[int]) -> Verdict:
        if dead := self._dead(missing):
            return Verdict("died", text=what, ranks=tuple(dead))
        if missing:
            return Verdict("missing", text=what, ranks=tuple(missing))
        failures = [(one.order, rank, one) for rank, one in statements.items() if one.kind == "failed"]
        if failures:
            order, _, first = min(failures, key=lambda failure: failure[:2])
            if order == LEFT_HANGING:
                return Verdict("failed", first.reason, f"{_ranks([rank for _, rank, _ in failures])} {first.text}")
            return Verdict("failed", first.reason, first.text)
        if len({statement.kind for statement in statements.values()}) > 1:
            return Verdict("failed", "setup_failed", f"the ranks were not in the same stage while {what}")
        return Verdict("go")

    def _obey(self, base: str, verdict: Verdict) -> list[Statement]:
        if verdict.kind == "failed":
            raise Declined(verdict.reason, verdict.text)
        if verdict.kind == "died":
            raise self._death(verdict)
        if verdict.kind == "missing":
            raise _missing(verdict, self.rank, self.world)
        statements = [self._statement(base, rank) for rank in range(self.world)]
        for statement in statements:
            if statement.kind == "failed":  # it was another one when the verdict was found
                raise Declined(statement.reason, statement.text)
        return statements

    def _death(self, verdict: Verdict) -> PeerDied:
        rank = verdict.ranks[0]
        person = self._people[rank]
        return PeerDied(
            f"rank {rank} died while {verdict.text}",
            rank=rank,
            pid=person.pid if person else None,
            expected=f"all {self.world} ranks",
            remedy="start the ranks anew: a process group with a dead rank can do nothing",
        )

    def _verdict_key(self, attempt: int) -> str:
        return f"arena/{attempt}/0/verdict"

    def _kept(self, key: str) -> Verdict:
        if not self._store.check([key]):
            return Verdict("")
        return self._verdict(self._store.get(key))

    # ── what others wrote ────────────────────────────────────────────────────────────────────────
    def _statement(self, base: str, rank: int) -> Statement:
        """What a rank posted. What can't be read is a failure of that rank, and so the same verdict for all."""
        try:
            found = pickle.loads(self._store.get(f"{base}/{rank}"))
            found.check()
        except Exception as error:
            text = f"what rank {rank} said can't be read ({type(error).__name__}: {error}): run one Arena on all ranks"
            return Statement("failed", reason="setup_failed", text=text)
        statement: Statement = found
        return statement

    def _verdict(self, kept: bytes | str) -> Verdict:
        """The verdict that was kept; the same text for all, so the same error."""
        try:
            found = pickle.loads(bytes.fromhex(_text(kept)))
            found.check(self.world)
        except Exception as error:
            raise _unreadable("the verdict of a round", f"{type(error).__name__}: {error}") from error
        verdict: Verdict = found
        return verdict


def _is_identity(found: object) -> bool:
    names = [one.name for one in fields(Identity)]
    return type(found) is Identity and all(type(getattr(found, name, None)) is int for name in names)


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"


def _text(raw: bytes | str) -> str:
    return raw if isinstance(raw, str) else raw.decode()


def _missing(verdict: Verdict, rank: int, world: int) -> RankMissing:
    who = _ranks(list(verdict.ranks))
    if rank in verdict.ranks:
        return RankMissing(
            f"the other ranks gave rank {rank} up while {verdict.text}",
            missing=verdict.ranks,
            expected="every rank within the deadline",
            found=f"{who} too late",
            remedy="find out what held this rank up, or allow more time with deadline_s",
        )
    return RankMissing(
        f"not all ranks were there while {verdict.text}",
        missing=verdict.ranks,
        expected=f"all {world} ranks within the deadline",
        found=f"nothing from {who}",
        remedy="look at what these ranks do (py-spy dump), or allow more time with deadline_s",
    )


def _unreadable(what: str, found: str) -> SetUpFailed:
    return SetUpFailed(
        f"{what} can't be read",
        expected="what this version of Arena leaves in the group's store",
        found=found,
        remedy="run the same Arena version on every rank, and let nothing else write keys of its there",
    )


def _silent_store(what: str) -> RankMissing:
    return RankMissing(
        f"the process group's store did not answer while {what}",
        expected="an answer of the process that keeps the store (rank 0, usually) before the deadline",
        found="silence",
        remedy="look at that process: it may be stopped",
    )
