"""Verdicts come from a window of looks, and from what can be seen of a process from outside."""

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from telemetry.health import ENOUGH, GAP_NS, WINDOW_NS, History, Sign, Verdict, judge
from telemetry.reader import Watcher
from tests.support.fleet import Fleet, Worker, attach, beat, create, drain, enqueue, eventually, hold_the_gil

SLOTS = 8


def window(*lags: int, moving: bool = True, heartbeats: bool = True) -> list[Sign]:
    """Looks a second apart, of a reader that takes a message between any two if it is `moving`."""
    return [
        Sign(at * 1_000_000_000, 100 + at * moving, lag, 7 + at * (heartbeats or moving)) for at, lag in enumerate(lags)
    ]


def test_a_reader_that_catches_up_now_and_then_is_ok():
    assert judge(window(1, 2, 0, 3, 4), "S", SLOTS) is Verdict.OK


def test_a_reader_whose_lag_fell_is_ok():
    assert judge(window(1, 3, 2, 3), "S", SLOTS) is Verdict.OK


def test_a_reader_that_is_always_one_step_behind_is_ok():
    assert judge(window(1, 1, 1, 1), "S", SLOTS) is Verdict.OK


def test_a_reader_that_only_falls_behind_is_lagging():
    assert judge(window(1, 1, 2, 3), "S", SLOTS) is Verdict.LAGGING


def test_a_reader_that_keeps_the_ring_full_is_lagging_even_if_it_moves():
    assert judge(window(8, 7, 8, 7), "S", SLOTS) is Verdict.LAGGING


def test_a_reader_that_is_mostly_ahead_of_another_is_not_lagging():
    held_up, alike = ([replace(sign, last=last) for sign in window(7, 7, 7, 8)] for last in (False, True))
    assert judge([*held_up[:3], alike[3]], "S", SLOTS) is Verdict.OK
    assert judge([*held_up[:2], *alike[2:]], "S", SLOTS) is Verdict.LAGGING, "as often last as not"


def test_of_two_readers_that_hold_each_other_up_only_the_last_is_lagging(fleet):
    writer, quick, slow = (fleet.start() for _ in range(3))
    handle = writer.call(create, 2, name="steps", slots=SLOTS)
    quick.call(attach, handle, 0)
    slow.call(attach, handle, 1)
    writer.call(enqueue, *range(SLOTS))
    history, found = History(), {}
    with Watcher() as watcher:
        quick.call(drain, 1)
        for _ in range(ENOUGH + 1):  # as in a collective: the quick one is always one message ahead
            quick.call(drain, 1)
            slow.call(drain, 1)
            writer.call(enqueue, 1)
            found = history.judge(watcher.look())
            time.sleep(1.1 * GAP_NS / 1e9)
    assert found == {("steps", 0): Verdict.OK, ("steps", 1): Verdict.LAGGING}


def test_a_reader_that_takes_nothing_and_shows_no_sign_of_life_is_stalled():
    assert judge(window(3, 4, 5, moving=False, heartbeats=False), "S", SLOTS) is Verdict.STALLED


def test_a_reader_that_takes_nothing_and_says_that_it_works_is_not_stalled():
    assert judge(window(3, 3, 3, moving=False, heartbeats=True), "S", SLOTS) is Verdict.OK
    assert judge(window(3, 4, 5, moving=False, heartbeats=True), "S", SLOTS) is Verdict.LAGGING


def test_a_reader_that_has_nothing_to_take_is_ok_however_silent_it_is():
    assert judge(window(0, 0, 0, moving=False, heartbeats=False), "S", SLOTS) is Verdict.OK


def test_nothing_is_judged_before_there_are_enough_looks():
    stalled = window(3, 4, 5, moving=False, heartbeats=False)
    assert [judge(stalled[:count], "S", SLOTS) for count in range(ENOUGH)] == [Verdict.OK] * ENOUGH


@pytest.mark.parametrize("process", ["X", "Z"])
def test_a_process_that_is_gone_needs_no_window(process):
    assert judge([], process, SLOTS) is Verdict.GONE


def test_a_process_that_a_signal_stopped_needs_no_window():
    assert judge([], "T", SLOTS) is Verdict.STOPPED


def test_where_the_process_can_not_be_seen_the_window_alone_decides():
    assert judge(window(3, 4, 5, moving=False, heartbeats=False), "", SLOTS) is Verdict.STALLED


# --- real readers ----------------------------------------------------------------------------------------------------


@pytest.fixture
def fleet(run_dir) -> Iterator[Fleet]:
    with Fleet() as fleet:
        yield fleet


def stalled_pair(fleet: Fleet) -> tuple[Worker, Worker]:
    """A writer, and a reader that has something to take and does not look."""
    writer, reader = fleet.start(), fleet.start()
    reader.call(attach, writer.call(create, 1, name="steps", slots=SLOTS), 0)
    writer.call(enqueue, 1, 2)
    return writer, reader


def verdict(history: History, watcher: Watcher) -> Verdict:
    return history.judge(watcher.look())["steps", 0]


def test_a_stopped_reader_is_stopped_at_the_first_look_and_ok_when_it_goes_on(fleet):
    _, reader = stalled_pair(fleet)
    reader.freeze()
    with Watcher() as watcher:
        assert verdict(History(), watcher) is Verdict.STOPPED
        reader.thaw()
        eventually(lambda: verdict(History(), watcher) is Verdict.OK)


def test_a_killed_reader_is_gone_at_the_first_look(fleet):
    _, reader = stalled_pair(fleet)
    reader.kill()
    with Watcher() as watcher:
        assert verdict(History(), watcher) is Verdict.GONE


def test_a_reader_that_holds_the_gil_is_stalled_as_soon_as_there_are_enough_looks(fleet):
    _, reader = stalled_pair(fleet)
    reader.begin(hold_the_gil, 60)
    history, looks = History(), 0
    with Watcher() as watcher:
        while verdict(history, watcher) is not Verdict.STALLED:
            looks += 1
            assert looks < 4 * ENOUGH
            time.sleep(GAP_NS / 1e9)
    assert looks >= ENOUGH - 1


def test_a_reader_that_works_long_with_heartbeats_is_ok(fleet):
    _, reader = stalled_pair(fleet)
    reader.begin(beat, 30.0)
    history = History()
    with Watcher() as watcher:
        for _ in range(2 * ENOUGH):
            assert verdict(history, watcher) is Verdict.OK
            time.sleep(1.2 * GAP_NS / 1e9)


def test_a_window_has_a_bounded_length_and_ends_with_its_reader(fleet):
    _, reader = stalled_pair(fleet)
    history = History()
    with Watcher() as watcher:
        look = watcher.look()
        for step in range(100):
            history.judge(type(look)(look.time_ns + step * GAP_NS, look.queues, look.pages, ()))
        (signs,) = history._windows.values()
        assert ENOUGH < len(signs) <= WINDOW_NS // GAP_NS + 2
        history.judge(type(look)(look.time_ns, (), 0, ()))
        assert history._windows == {}
    reader.kill()
