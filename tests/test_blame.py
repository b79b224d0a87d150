"""Whom a wait is charged to: exact figures, against the definitions taken literally."""

import contextlib
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arena import Handle, MessageQueue, QueueConfig, Statistics
from arena.blame import Charge, alone_since, charge, charge_unfinished
from arena.errors import PeerDied, QueueTimeout
from tests.support import processes


def test_the_last_to_release_is_charged_the_whole_wait():
    # 4 readers, all hold the slot at 100; the last one releases at 190 and the writer sees it at 200.
    assert charge(100, 200, {0: 110, 1: 190, 2: 130, 3: 120}, 4) == Charge(1, blocked_ns=100, excess_ns=70, full_ns=10)


def test_the_only_reader_is_charged_everything_three_times():
    assert charge(100, 200, {0: 195}, 1) == Charge(0, blocked_ns=100, excess_ns=100, full_ns=95)


def test_a_lone_holder_among_others_costs_excess_but_never_full():
    assert charge(100, 200, {2: 180}, 4) == Charge(2, blocked_ns=100, excess_ns=100, full_ns=0)


def test_a_tie_goes_to_the_lowest_rank():
    assert charge(0, 100, {3: 80, 1: 80, 2: 40}, 4) == Charge(1, blocked_ns=100, excess_ns=20, full_ns=0)


def test_when_all_release_at_once_the_step_was_too_long_and_nobody_straggled():
    assert charge(0, 100, {0: 100, 1: 100}, 2) == Charge(0, blocked_ns=100, excess_ns=0, full_ns=100)


def test_a_release_before_the_wait_began_counts_as_at_its_beginning():
    # A writer asleep on one straggler sees the others only when it wakes, and their clock readings are their own.
    assert charge(100, 200, {0: 90, 1: 150}, 2) == Charge(1, blocked_ns=100, excess_ns=100, full_ns=0)


def test_a_release_after_the_wait_ended_counts_as_at_its_end():
    assert charge(100, 200, {0: 250, 1: 150}, 2) == Charge(0, blocked_ns=100, excess_ns=50, full_ns=50)


def test_a_wait_of_no_time_costs_nothing():
    assert charge(100, 100, {0: 100, 1: 90}, 2) == Charge(0, 0, 0, 0)


def test_a_timeout_is_charged_to_the_holder_that_lags_most():
    assert charge_unfinished(100, 200, {}, {0: 8, 1: 9, 2: 8}, 4) == Charge(1, blocked_ns=100, excess_ns=0, full_ns=0)


def test_a_timeout_among_equals_goes_to_the_lowest_rank():
    assert charge_unfinished(100, 200, {}, {3: 8, 1: 8}, 4).rank == 1


def test_a_timeout_on_everybody_is_full():
    assert charge_unfinished(100, 200, {}, {0: 8, 1: 8}, 2) == Charge(0, blocked_ns=100, excess_ns=0, full_ns=100)


def test_a_timeout_on_the_only_holder_is_excess():
    assert charge_unfinished(100, 200, {}, {2: 8}, 4) == Charge(2, blocked_ns=100, excess_ns=100, full_ns=0)


def test_a_timeout_is_excess_only_since_the_others_released():
    charged = charge_unfinished(100, 200, {0: 130, 1: 170}, {2: 8}, 3)
    assert charged == Charge(2, blocked_ns=100, excess_ns=30, full_ns=30)


def test_a_timeout_is_full_only_until_the_first_released():
    charged = charge_unfinished(100, 200, {0: 130}, {1: 8, 2: 9}, 3)
    assert charged == Charge(2, blocked_ns=100, excess_ns=0, full_ns=30)


def test_a_holder_is_alone_since_the_last_of_the_others_released():
    assert alone_since(100, 200, {0: 130, 2: 170}) == 170
    assert alone_since(100, 200, {}) == 100, "there was no other"
    assert alone_since(100, 200, {0: 90}) == 100, "not before the wait began"
    assert alone_since(100, 200, {0: 250}) == 200, "not after the look"


# --- the definitions, taken literally: nanosecond by nanosecond ------------------------------------------------------

TIMES = st.integers(0, 40)


def by_hand(started: int, ended: int, holds_until: Mapping[int, int], last: int, n_counted: int) -> Charge:
    """Add up what holds in each nanosecond of the wait; `holds_until` has an end after `ended` for who never did."""
    excess = full = 0
    for now in range(started, ended):
        holding = {rank for rank, until in holds_until.items() if until > now}
        full += len(holding) == n_counted
        excess += holding <= {last}
    return Charge(last, ended - started, excess, full)


@given(TIMES, TIMES, st.dictionaries(st.integers(0, 4), TIMES, min_size=1), st.integers(0, 3))
def test_a_finished_wait_is_charged_as_defined(started, length, released, more):
    ended = started + length
    inside = {rank: min(max(at, started), ended) for rank, at in released.items()}
    last = min(rank for rank, at in inside.items() if at == max(inside.values()))
    n_counted = len(released) + more
    assert charge(started, ended, released, n_counted) == by_hand(started, ended, released, last, n_counted)


@given(
    TIMES,
    TIMES,
    st.dictionaries(st.integers(0, 2), TIMES),
    st.dictionaries(st.integers(3, 6), st.integers(0, 9), min_size=1),
    st.integers(0, 3),
)
def test_an_unfinished_wait_is_charged_as_defined(started, length, released, lags, more):
    ended = started + length
    last = min(rank for rank, lag in lags.items() if lag == max(lags.values()))
    n_counted = len(released) + len(lags) + more
    holds_until = {**{rank: min(at, ended) for rank, at in released.items()}, **dict.fromkeys(lags, ended + 1)}
    expected = by_hand(started, ended, holds_until, last, n_counted)
    assert charge_unfinished(started, ended, released, lags, n_counted) == expected


@given(TIMES, TIMES, TIMES, st.dictionaries(st.integers(0, 4), TIMES, min_size=1))
def test_excess_so_far_is_never_more_than_excess_in_the_end(started, until_look, rest, released):
    look, ended = started + until_look, started + until_look + rest
    last = max(released, key=lambda rank: (min(max(released[rank], started), ended), -rank))
    others = {rank: at for rank, at in released.items() if rank != last}
    if all(at <= look for at in others.values()):
        so_far = look - alone_since(started, look, others)
        assert 0 <= so_far <= charge(started, ended, released, len(released)).excess_ns


@given(TIMES, TIMES, st.dictionaries(st.integers(0, 4), TIMES, min_size=1), st.integers(0, 3))
def test_no_part_of_a_wait_is_longer_than_the_wait(started, length, released, more):
    charged = charge(started, started + length, released, len(released) + more)
    assert 0 <= charged.excess_ns <= charged.blocked_ns
    assert 0 <= charged.full_ns <= charged.blocked_ns


@pytest.mark.parametrize("n_reader", [1, 2, 5])
def test_over_many_waits_the_ranks_add_up_to_some(n_reader):
    waits = [(at, at + 10, {rank: at + (rank * at) % 11 for rank in range(n_reader)}) for at in range(50)]
    charges = [charge(started, ended, released, n_reader) for started, ended, released in waits]
    per_rank = [sum(one.blocked_ns for one in charges if one.rank == rank) for rank in range(n_reader)]
    assert sum(per_rank) == 50 * 10


# --- real waits ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def full_ring(
    readers: int, behind: set[int], on_warning: Callable[[str], None] | None = None
) -> Iterator[tuple[MessageQueue, list[MessageQueue]]]:
    """A writer whose next message has to wait for the readers that are behind; the others have read everything.

    `on_warning` is called as soon as it waits.
    """
    config = QueueConfig(slots=4, stall_warning_s=1e-6)
    with contextlib.ExitStack() as stack:
        writer = stack.enter_context(MessageQueue(readers, config=config, on_warning=on_warning))
        handle = writer.export_handle()
        ends = [stack.enter_context(MessageQueue.create_from_handle(handle, rank)) for rank in range(readers)]
        for step in range(4):
            writer.enqueue(step)
        for rank, reader in enumerate(ends):
            while rank not in behind and reader.statistics().lag_by_reader[rank]:
                reader.dequeue()
        yield writer, ends


def who_is_charged(statistics: Statistics) -> tuple[list[int], list[int], bool]:
    """The ranks with blocked time, those with excess, and whether there was a full part."""
    blocked = [rank for rank, seconds in statistics.blocked_s_by_reader.items() if seconds]
    excess = [rank for rank, seconds in statistics.excess_s_by_reader.items() if seconds]
    return blocked, excess, statistics.blocked_full_s > 0


def test_a_real_timeout_is_charged_to_the_only_reader_that_is_behind(run_dir):
    with full_ring(3, behind={1}) as (writer, _):
        with pytest.raises(QueueTimeout, match="awaiting_readers reader 1 "):
            writer.enqueue(None, timeout=0.02)
        statistics = writer.statistics()
    assert who_is_charged(statistics) == ([1], [1], False)
    assert statistics.blocked_s_by_reader[1] == statistics.excess_s_by_reader[1] >= 0.02


def test_a_real_timeout_tells_since_when_its_reader_took_nothing(run_dir):
    with full_ring(2, behind={0, 1}) as (writer, readers):
        for reader in readers:
            reader.dequeue(timeout=20)
        writer.enqueue("in its place", timeout=20)
        with pytest.raises(QueueTimeout) as caught:
            writer.enqueue(None, timeout=0.2)
    told = re.findall(r"reader [01] \(pid \d+\) lag 4 \(took nothing for (\d+\.\d) s\)", str(caught.value))
    assert len(told) == 2
    assert all(float(seconds) >= 0.2 for seconds in told)


def test_a_real_timeout_on_every_reader_is_full_and_nobodys_excess(run_dir):
    with full_ring(2, behind={0, 1}) as (writer, _):
        with pytest.raises(QueueTimeout, match=r"reader 0 .* reader 1 "):
            writer.enqueue(None, timeout=0.02)
        statistics = writer.statistics()
    assert who_is_charged(statistics) == ([0], [], True)
    assert statistics.blocked_full_s == statistics.blocked_s_by_reader[0] >= 0.02


def test_a_real_wait_is_charged_to_the_last_reader_to_release(run_dir):
    waiting = threading.Event()
    with full_ring(2, behind={0, 1}, on_warning=lambda text: waiting.set()) as (writer, readers):

        def release_one_after_the_other() -> None:
            assert waiting.wait(20)
            for reader in readers:
                reader.dequeue(timeout=20)

        thread = threading.Thread(target=release_one_after_the_other)
        thread.start()
        writer.enqueue(None, timeout=20)
        thread.join()
        statistics = writer.statistics()
    assert who_is_charged(statistics) == ([1], [1], True)
    parts = statistics.excess_s_by_reader[1] + statistics.blocked_full_s
    assert parts == pytest.approx(statistics.blocked_s_by_reader[1], abs=1e-9)


def attach_and_stay(handle: Handle, attached: Any) -> None:
    reader = MessageQueue.create_from_handle(handle, 1)
    attached.send(reader.dequeue(timeout=20))
    threading.Event().wait()


@pytest.mark.parametrize("on_reader_death", ["raise", "continue"])
def test_a_wait_that_a_death_ends_is_charged_to_the_dead(run_dir, on_reader_death):
    here, there = processes.context.Pipe(duplex=False)
    config = QueueConfig(slots=2, on_reader_death=on_reader_death, stall_warning_s=1e-6)
    doomed: list[processes.Child] = []
    with (
        MessageQueue(2, config=config, on_warning=lambda text: doomed[0].kill()) as writer,
        MessageQueue.create_from_handle(writer.export_handle(), 0) as survivor,
        processes.Child(attach_and_stay, writer.export_handle(), there) as child,
    ):
        doomed.append(child)
        writer.enqueue("attached?")
        assert here.poll(20)
        survivor.dequeue(timeout=20)
        for _ in range(2):
            writer.enqueue(None)
            survivor.dequeue(timeout=20)
        if on_reader_death == "raise":
            with pytest.raises(PeerDied, match="reader 1"):
                writer.enqueue(None, timeout=20)
        else:
            writer.enqueue(None, timeout=20)
        assert who_is_charged(writer.statistics()) == ([1], [1], False)
