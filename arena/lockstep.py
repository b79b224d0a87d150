"""Collective set-up in lock-step: every rank ends each stage with the same verdict, whatever happens to any of them.

The ranks talk through the store of their process group, which needs no rank's attention. In a *round* each rank posts
a statement and collects those of all others. Then it proposes a verdict: go on; or not, because a rank failed; or not,
because ranks are missing. The store's compare-and-set keeps the first proposal, and everybody obeys what it kept: so a
rank whose clock ran out a moment early can't come to another conclusion than the rest.

A stage may also hang, in a library or a driver, where no exception and no signal helps. Stages therefore run in a
thread of their own, which is left behind when its time is up.
"""

from __future__ import annotations

import contextlib
import pickle
import queue
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from arena.device import Declined, ReducePath
from arena.errors import CommunicatorClosed, PeerDied, RankMissing, SetUpFailed
from arena.probe import Identity, identity, is_alive
from arena.wait import deadline_after

T = TypeVar("T")

_FIRST_PAUSE_S: Final = 0.0005
_LONGEST_PAUSE_S: Final = 0.02
_BY_ITSELF, _BY_ANOTHER, _LEFT_HANGING = range(3)
_STORE_GRACE_S: Final = 1.0
_SHORTEST_STAGE_S: Final = 0.2
_MOST_STAGES: Final = 1000
_GRACE_S: Final = 0.5  # by which the others wait longer for a rank than it waits for its own stage


class Hung(Exception):
    """A call in the thread of its own did not return in time."""


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


@dataclass(frozen=True)
class Verdict:
    """What becomes of a round: go on, a failure, or ranks that are missing."""

    kind: str  # "go", "failed", "missing" or "died"
    reason: str = ""
    text: str = ""
    ranks: tuple[int, ...] = ()


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
        return self._obey(base, pickle.loads(bytes.fromhex(_text(kept))))

    def _collect(self, base: str, deadline_s: float) -> tuple[dict[int, Statement], list[int]]:
        """Statements until all are there, time is up, a silent rank is dead, or somebody else has judged."""
        deadline_ns = deadline_after(deadline_s)
        assert deadline_ns is not None
        statements: dict[int, Statement] = {}
        missing, pause_s = list(range(self.world)), _FIRST_PAUSE_S
        while True:
            for rank in list(missing):
                if self._store.check([f"{base}/{rank}"]):
                    statements[rank] = pickle.loads(self._store.get(f"{base}/{rank}"))
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
            if order == _LEFT_HANGING:
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
        return [pickle.loads(self._store.get(f"{base}/{rank}")) for rank in range(self.world)]

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
        verdict: Verdict = pickle.loads(bytes.fromhex(_text(self._store.get(key))))
        return verdict


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


def _silent_store(what: str) -> RankMissing:
    return RankMissing(
        f"the process group's store did not answer while {what}",
        expected="an answer of the process that keeps the store (rank 0, usually) before the deadline",
        found="silence",
        remedy="look at that process: it may be stopped",
    )


# ── calls that may hang ──────────────────────────────────────────────────────────────────────────
class Aside:
    """A thread that makes calls for somebody who will not wait for ever. Left behind once a call has hung."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()
        self._hung = False
        threading.Thread(target=self._run, name="arena-set-up", daemon=True).start()

    def call(self, function: Callable[[], T], timeout_s: float) -> T:
        """What the function returns or raises.

        Raises:
            Hung: it did neither in time.
        """
        self._calls.put(function)
        try:
            good, value = self._results.get(timeout=timeout_s)
        except queue.Empty:
            self._hung = True
            raise Hung from None
        if not good:
            raise value
        result: T = value
        return result

    @property
    def hung(self) -> bool:
        """Whether the thread is lost."""
        return self._hung

    def end(self) -> None:
        """Let the thread end, when it can."""
        self._calls.put(None)

    def _run(self) -> None:
        while (function := self._calls.get()) is not None:
            try:
                result = True, function()
            except Exception as error:
                result = False, error
            except BaseException as error:  # SystemExit is a failure of what was called, and no wish to leave
                result = False, RuntimeError(repr(error))
            if self._hung:  # too late: nobody listens any more
                if isinstance(result[1], _Ended):
                    result[1].path.close()
                return
            self._results.put(result)
            del function, result


@dataclass(frozen=True)
class _Ended:
    path: ReducePath


def set_up(
    name: str, steps: Generator[object, list[Any], ReducePath], rounds: Rounds, rank: int, budget: Budget
) -> ReducePath:
    """Drive one path's set-up to its end, together with the other ranks.

    Raises:
        Declined: it is not to be had, for the same reason on every rank; what it had taken is given back.
        RankMissing, PeerDied: a rank fell silent.
    """
    aside = Aside()
    heard: list[Any] | None = None
    path: ReducePath | None = None
    try:
        for stage in range(1, _MOST_STAGES + 1):
            statement = _advance(aside, name, stage, steps, heard, rank, budget.stage_s())
            if isinstance(statement.said, _Ended):
                path, statement = statement.said.path, Statement("done")
            answers = rounds.exchange(f"setting up {name}, stage {stage}", statement, budget.stage_s() + _GRACE_S)
            if path is not None:
                return path
            heard = [answer.said for answer in answers]
        raise SetUpFailed(f"the set-up of {name} does not end", found=f"{_MOST_STAGES} stages so far")
    except BaseException:
        _undo(aside, steps, path, budget.stage_s())
        raise
    finally:
        aside.end()


def _advance(
    aside: Aside, name: str, stage: int, steps: Generator[object, list[Any], ReducePath],
    heard: list[Any] | None, rank: int, timeout_s: float,
) -> Statement:  # fmt: skip
    """One stage of this rank; whatever happens in it becomes a statement."""

    def step() -> object:
        try:
            return next(steps) if heard is None else steps.send(heard)
        except StopIteration as end:
            return _Ended(end.value)

    try:
        return Statement("said", aside.call(step, timeout_s))
    except Hung:
        text = f"hung in stage {stage} of {name}"
        return Statement("failed", reason="setup_failed", text=text, order=_LEFT_HANGING)
    except Declined as declined:
        return Statement("failed", reason=declined.reason, text=f"rank {rank}: {declined.text}")
    except Exception as error:
        text = f"rank {rank}: {type(error).__name__}: {error}"
        order = _BY_ANOTHER if isinstance(error, CommunicatorClosed) else _BY_ITSELF
        return Statement("failed", reason="setup_failed", text=text, order=order)


def _undo(
    aside: Aside, steps: Generator[object, list[Any], ReducePath], path: ReducePath | None, timeout_s: float
) -> None:
    """Close what there is; a generator that hangs can't be closed, and closes itself if it ever comes back."""
    with contextlib.suppress(Exception):
        if path is not None:
            path.close()
        elif not aside.hung:
            aside.call(steps.close, timeout_s)


class Budget:
    """Time for the whole of set-up. One stage gets half of what is left, so that one that hangs leaves some over."""

    def __init__(self, deadline_s: float) -> None:
        self._ends = time.monotonic() + deadline_s

    def stage_s(self) -> float:
        """How long the next stage may take."""
        return max(_SHORTEST_STAGE_S, (self._ends - time.monotonic()) / 2)
