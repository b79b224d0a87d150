"""Rounds: whatever the ranks' clocks say, they come to the same verdict; and a call that hangs is left behind."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from arena.aside import Aside, Hung
from arena.device import Declined
from arena.errors import RankMissing
from arena.lockstep import Budget, set_up
from arena.rounds import Rounds, Statement

A_WHILE_S = 20.0


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


def at_once(*functions: Callable[[], Any]) -> list[Any]:
    """What each returns or raises."""

    def outcome(function: Callable[[], Any]) -> Any:
        try:
            return function()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(functions)) as pool:
        return list(pool.map(outcome, functions))


def said(word: Any) -> Statement:
    return Statement("said", word)


def test_everybody_hears_everybody_in_rank_order(store):
    def rank(number: int) -> list[Any]:
        rounds = Rounds(store, 0, number, 3)
        met = rounds.meet(f"hello from {number}", A_WHILE_S)
        return [met, [one.said for one in rounds.exchange("talking", said(number * 10), A_WHILE_S)]]

    heard = at_once(*(lambda number=number: rank(number) for number in range(3)))
    assert heard == [[[f"hello from {number}" for number in range(3)], [0, 10, 20]]] * 3


def test_the_first_verdict_stands_though_a_later_rank_sees_everybody(store):
    early, late = Rounds(store, 0, 0, 2), Rounds(store, 0, 1, 2)
    with pytest.raises(RankMissing) as missing:
        early.exchange("arriving", said(0), 0.0)
    assert missing.value.missing == (1,)
    with pytest.raises(RankMissing, match="the other ranks gave rank 1 up"):
        late.exchange("arriving", said(1), A_WHILE_S)


def test_a_rank_whose_time_is_up_goes_on_where_the_others_have_decided_to(store):
    first, second = Rounds(store, 0, 0, 2), Rounds(store, 0, 1, 2)

    def slow_clock() -> list[Statement]:
        return first.exchange("arriving", said(0), A_WHILE_S)

    heard = at_once(slow_clock, lambda: (time.sleep(0.1), second.exchange("arriving", said(1), 0.0))[1])
    assert [[one.said for one in statements] for statements in heard] == [[0, 1]] * 2


@pytest.mark.parametrize("late", [0.0, 0.02, 0.04, 0.05, 0.06, 0.08])
def test_ranks_at_the_very_deadline_still_agree(store, late):
    def punctual() -> Any:
        return [one.said for one in Rounds(store, 0, 0, 2).exchange("arriving", said(0), 0.05)]

    def tardy() -> Any:
        time.sleep(late)
        return [one.said for one in Rounds(store, 0, 1, 2).exchange("arriving", said(1), 0.05)]

    outcomes = at_once(punctual, tardy)
    assert len({type(outcome) for outcome in outcomes}) == 1, outcomes


def test_a_late_rank_skips_the_attempt_that_was_given_up(store):
    with pytest.raises(RankMissing):
        Rounds(store, 0, 0, 2).meet(None, 0.0)
    assert Rounds(store, 0, 1, 2).attempt == 1


def test_of_several_failures_the_cause_counts_and_not_who_was_left_hanging(store):
    statements = [
        Statement("failed", reason="setup_failed", text="hung", order=2),
        Statement("failed", reason="setup_failed", text="could not reach rank 2", order=1),
        Statement("failed", reason="no_peer_access", text="the cause"),
    ]
    outcomes = at_once(
        *(
            lambda rank=rank: Rounds(store, 0, rank, 3).exchange("setting up", statements[rank], A_WHILE_S)
            for rank in range(3)
        )
    )
    assert {(type(one), one.reason, one.text) for one in outcomes} == {(Declined, "no_peer_access", "the cause")}


def test_ranks_in_different_stages_are_a_failure_of_all(store):
    outcomes = at_once(
        lambda: Rounds(store, 0, 0, 2).exchange("setting up", Statement("done"), A_WHILE_S),
        lambda: Rounds(store, 0, 1, 2).exchange("setting up", said(1), A_WHILE_S),
    )
    assert all(isinstance(one, Declined) and "same stage" in one.text for one in outcomes)


class Silent(dist.HashStore):
    """A store whose process is stopped."""

    def check(self, keys: list[str]) -> bool:
        time.sleep(A_WHILE_S)
        return False


def test_a_store_that_does_not_answer_is_no_reason_to_hang(store):
    rounds = Rounds(store, 0, 0, 2)
    rounds._store = Silent()
    with pytest.raises(RankMissing, match="store did not answer"):
        rounds.exchange("arriving", said(0), 0.0)


# --- calls that may hang ---------------------------------------------------------------------------------------------


def test_a_call_returns_or_raises_as_if_it_were_made_here():
    aside = Aside()
    assert aside.call(lambda: 7, A_WHILE_S) == 7
    with pytest.raises(ZeroDivisionError):
        aside.call(lambda: 1 / 0, A_WHILE_S)
    with pytest.raises(RuntimeError, match="SystemExit"):
        aside.call(lambda: (_ for _ in ()).throw(SystemExit(3)), A_WHILE_S)
    aside.end()


def test_a_call_that_hangs_is_left_behind():
    aside, hold = Aside(), threading.Event()
    with pytest.raises(Hung):
        aside.call(hold.wait, 0.05)
    assert aside.hung
    hold.set()


class Path:
    """What a set-up ends with."""

    def __init__(self) -> None:
        self.closed = threading.Event()

    def close(self) -> None:
        self.closed.set()


def test_a_path_that_comes_after_its_time_is_closed(store):
    path, hold = Path(), threading.Event()

    def steps() -> Any:
        hold.wait(A_WHILE_S)
        return path
        yield

    with pytest.raises(Declined, match="rank 0 hung in stage 1 of one_shot"):
        set_up("one_shot", steps(), Rounds(store, 0, 0, 1), 0, Budget(0.1))
    hold.set()
    assert path.closed.wait(A_WHILE_S)


def test_a_set_up_that_another_rank_fails_is_closed_where_it_stands(store):
    given_back = threading.Event()

    def whole() -> Any:
        try:
            yield "here"
            yield "there"
        finally:
            given_back.set()
        return Path()

    def broken() -> Any:
        yield "here"
        raise ValueError("no")

    outcomes = at_once(
        lambda: set_up("one_shot", whole(), Rounds(store, 0, 0, 2), 0, Budget(A_WHILE_S)),
        lambda: set_up("one_shot", broken(), Rounds(store, 0, 1, 2), 1, Budget(A_WHILE_S)),
    )
    assert [one.text for one in outcomes] == ["rank 1: ValueError: no"] * 2
    assert given_back.is_set()


def test_one_stage_never_gets_all_of_the_time():
    budget = Budget(8.0)
    assert 3.0 < budget.stage_s() <= 4.0
    assert Budget(0.0).stage_s() > 0
