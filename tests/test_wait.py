"""Waiting: how long it polls, when it sleeps, and that nothing which goes wrong makes it sleep for ever."""

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

from arena import wait
from arena.memory import Segment
from arena.wait import Waiter, deadline_after, usable_cores
from tests.support.asleep import wait_until_asleep_on

US, MS, S = 1_000, 1_000_000, 1_000_000_000
CODE = 7


class Clock:
    """Time that passes only where a waiter would let it pass: in a yield, in a sleep, in the caller's own work."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, yield_ns: int = US) -> None:
        self.now = 1000 * S
        self.yields = 0
        self._yield_ns = yield_ns
        self._events: list[tuple[int, Callable[[], None]]] = []
        monkeypatch.setattr(wait, "_monotonic_ns", lambda: self.now)
        monkeypatch.setattr(wait, "_sched_yield", self._yielded)

    def after(self, ns: int, action: Callable[[], None]) -> None:
        """Do something at a time to come."""
        self._events.append((self.now + ns, action))

    def pass_(self, ns: int) -> None:
        self.now += ns
        due = [event for event in self._events if event[0] <= self.now]
        self._events = [event for event in self._events if event[0] > self.now]
        for _, action in due:
            action()

    def sleep(self, timeout_ns: int) -> bool:
        """Sleep until the next event, which wakes the sleeper."""
        first = min((at for at, _ in self._events), default=self.now + timeout_ns)
        self.pass_(min(timeout_ns, first - self.now))
        return first <= self.now

    def _yielded(self) -> None:
        self.yields += 1
        self.pass_(self._yield_ns)


class Place:
    """A shared word to wait for, the waiter's own parked word, and a futex that records how it is used."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.word = [0]
        self.parked = [0]
        self.sleeps: list[int] = []
        self.parked_while_asleep: list[int] = []
        self.looks: list[int] = []
        self.during_sleep: Callable[[int], bool] | None = None

    def wait(self, expected: int, timeout_ns: int) -> bool:
        """Stand in for the futex: nobody wakes, unless `during_sleep` says so."""
        assert expected == self.word[0]
        self.sleeps.append(timeout_ns)
        self.parked_while_asleep.append(self.parked[0])
        if self.during_sleep is not None:
            return self.during_sleep(timeout_ns)
        self.clock.pass_(timeout_ns)
        return False

    def park(self, waiter: Waiter, *, floor: int = 0, deadline_ns: int | None = None, look: Any = None) -> bool:
        return waiter.park(
            self.word,
            floor,
            futex=self,  # type: ignore[arg-type]
            parked=self.parked,
            code=CODE,
            look=look or self.looks.append,
            deadline_ns=deadline_ns,
        )

    def moves_after(self, ns: int) -> int:
        """Let the word pass what it is now after a time; returns what it is now."""
        floor = self.word[0]
        self.clock.after(ns, lambda: self.word.__setitem__(0, floor + 1))
        return floor

    def met_while_polling(self, waiter: Waiter, gap_ns: int) -> bool:
        """Wait, by sleeping if need be, for a word that moves after a time and then wakes us."""
        floor = self.moves_after(gap_ns)
        if waiter.spin(self.word, floor):
            return True
        self.during_sleep = self.clock.sleep
        assert self.park(waiter, floor=floor)
        self.during_sleep = None
        return False


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


@pytest.fixture
def place(clock):
    return Place(clock)


@pytest.fixture
def waiter(monkeypatch):
    monkeypatch.setattr(wait, "usable_cores", lambda: 4)
    return Waiter(2)


# --- polling ---------------------------------------------------------------------------------------------------------


def budget_of(waiter: Waiter, place: Place) -> int:
    """How long it polls for a word that does not move."""
    began = place.clock.now
    assert not waiter.spin(place.word, place.word[0])
    return place.clock.now - began


def test_a_word_that_has_passed_already_is_not_waited_for(waiter, place):
    place.word[0] = 3
    assert waiter.spin(place.word, 2)
    assert place.clock.yields == 0
    assert waiter.ended_ns == place.clock.now


def test_a_word_that_moves_soon_is_met_while_polling(waiter, place):
    assert place.met_while_polling(waiter, 20 * US)
    assert waiter.ended_ns == place.clock.now
    assert place.sleeps == []


def test_polling_ends_with_its_budget(waiter, place):
    budget = budget_of(waiter, place)
    assert wait.MIN_BUDGET_NS <= budget <= wait.MIN_BUDGET_NS + wait.POLLS_A_LOOK * US
    assert waiter.spin_ns == budget


@pytest.mark.parametrize("gap_us", [50, 100, 200, 300])
def test_polling_lasts_longer_than_the_gaps_that_were_seen(waiter, place, gap_us):
    for _ in range(30):
        place.met_while_polling(waiter, gap_us * US)
    assert budget_of(waiter, place) >= 2 * gap_us * US


@pytest.mark.parametrize(("cores", "budget_ns"), [(4, wait.MAX_BUDGET_NS), (1, wait.MIN_BUDGET_NS)])
def test_between_messages_without_a_pause_an_interrupt_is_waited_out(monkeypatch, place, cores, budget_ns):
    """Unless somebody else may need the core."""
    monkeypatch.setattr(wait, "usable_cores", lambda: cores)
    waiter = Waiter(2)
    for _ in range(30):
        place.met_while_polling(waiter, 8 * US)
    assert budget_ns <= budget_of(waiter, place) <= budget_ns + wait.POLLS_A_LOOK * US
    assert not place.met_while_polling(waiter, 3600 * S)
    assert budget_of(waiter, place) <= wait.MIN_BUDGET_NS + wait.POLLS_A_LOOK * US  # once, and no longer


@pytest.mark.parametrize("gap_ms", [1, 20, 1000])
def test_an_engine_that_steps_slowly_is_not_polled_for(waiter, place, gap_ms):
    for _ in range(30):
        place.met_while_polling(waiter, gap_ms * MS)
    assert budget_of(waiter, place) <= wait.MIN_BUDGET_NS + wait.POLLS_A_LOOK * US


def test_one_long_pause_does_not_hide_for_long_that_steps_are_short(waiter, place):
    for _ in range(30):
        place.met_while_polling(waiter, 100 * US)
    assert not place.met_while_polling(waiter, 3600 * S)
    met = [place.met_while_polling(waiter, 100 * US) for _ in range(20)]
    assert all(met[10:])


@pytest.mark.parametrize(("processes", "cap"), [(2, wait.MAX_BUDGET_NS), (5, wait.CROWDED_BUDGET_NS)])
def test_polling_has_an_end_however_long_the_gaps(monkeypatch, place, processes, cap):
    monkeypatch.setattr(wait, "usable_cores", lambda: 4)
    waiter = Waiter(processes)
    for _ in range(30):
        place.met_while_polling(waiter, 450 * US)
    assert budget_of(waiter, place) <= cap + wait.POLLS_A_LOOK * US


@pytest.mark.parametrize(("processes", "yields"), [(4, 0), (5, 1)])
def test_where_processes_outnumber_cores_no_look_comes_without_a_yield(monkeypatch, clock, processes, yields):
    monkeypatch.setattr(wait, "usable_cores", lambda: 4)
    assert Waiter(processes).spin([1], 0)
    assert clock.yields == yields


def test_polling_stops_at_the_deadline(waiter, place):
    began = place.clock.now
    assert not waiter.spin(place.word, 0, began + 10 * US)
    assert place.clock.now - began <= (10 + wait.POLLS_A_LOOK) * US


def test_a_deadline_that_has_passed_still_gets_one_look(waiter, place):
    place.word[0] = 1
    assert waiter.spin(place.word, 0, place.clock.now - 1)


def test_waits_are_added_up(waiter, place):
    for gap in (20 * US, 30 * US, 10 * US):
        assert place.met_while_polling(waiter, gap)
    place.word[0] += 1
    waiter.spin(place.word, place.word[0] - 1)  # the next wait accounts for the one before it
    assert 60 * US <= waiter.waited_ns <= 60 * US + 3 * wait.POLLS_A_LOOK * US


# --- sleeping --------------------------------------------------------------------------------------------------------


def test_a_sleeper_says_so_before_it_sleeps_and_takes_it_back(waiter, place):
    place.during_sleep = lambda ns: place.word.__setitem__(0, 1) or True
    assert place.park(waiter)
    assert place.parked_while_asleep == [CODE]
    assert place.parked == [0]
    assert waiter.parks == 1


def test_the_last_look_comes_after_the_flag(waiter, place, monkeypatch):
    # The word moves between the flag and the sleep, which is when a peer that saw no flag does not wake us.
    monkeypatch.setattr(wait.memory, "fence", lambda: place.word.__setitem__(0, place.parked[0]))
    assert place.park(waiter, floor=CODE - 1)
    assert place.sleeps == []
    assert waiter.missed_wakes == 0


def test_every_sleep_is_bounded(waiter, place):
    place.clock.after(10 * S, lambda: place.word.__setitem__(0, 1))
    assert place.park(waiter)
    assert max(place.sleeps) <= wait.IDLE_PARK_NS
    young = [ns for number, ns in enumerate(place.sleeps) if number * wait.PARK_NS < wait.IDLE_AFTER_NS]
    assert set(young) == {wait.PARK_NS}
    assert place.sleeps[-1] == wait.IDLE_PARK_NS, "who has slept for long sleeps longer"
    assert wait.PARK_NS >= 50 * MS


def test_a_sleeper_looks_around_before_it_sleeps_and_after_each_sleep(waiter, place):
    place.clock.after(200 * MS, lambda: place.word.__setitem__(0, 1))
    began = place.clock.now
    assert place.park(waiter)
    assert place.looks == [began + number * wait.PARK_NS for number in range(4)]


def test_a_wake_that_should_have_come_is_counted(waiter, place):
    place.clock.after(30 * MS, lambda: place.word.__setitem__(0, 1))
    assert place.park(waiter)
    assert (waiter.parks, waiter.missed_wakes) == (1, 1)


def test_a_wake_that_came_is_not_counted(waiter, place):
    place.during_sleep = lambda ns: place.word.__setitem__(0, 1) or True
    assert place.park(waiter)
    assert (waiter.parks, waiter.missed_wakes) == (1, 0)


def test_a_wake_for_nothing_sends_it_back_to_sleep(waiter, place):
    wakes = iter([False, False, True])

    def woken(ns):
        if next(wakes):
            place.word[0] = 1
        return True

    place.during_sleep = woken
    assert place.park(waiter)
    assert (waiter.parks, waiter.missed_wakes) == (3, 0)


def test_a_word_that_moves_but_not_far_enough_sends_it_back_to_sleep(waiter, place):
    def woken(ns):
        place.word[0] += 1
        return True

    place.during_sleep = woken
    assert place.park(waiter, floor=4)
    assert place.word == [5]
    assert waiter.parks == 5


def test_no_sleep_passes_the_deadline(waiter, place):
    deadline = place.clock.now + 120 * MS
    assert not place.park(waiter, deadline_ns=deadline)
    assert place.sleeps == [50 * MS, 50 * MS, 20 * MS]
    assert place.clock.now == deadline
    assert place.parked == [0]


def test_a_deadline_that_has_passed_lets_nobody_sleep(waiter, place):
    assert not place.park(waiter, deadline_ns=place.clock.now)
    assert place.sleeps == []
    assert place.parked == [0]


def test_what_came_by_the_deadline_is_taken(waiter, place):
    place.word[0] = 1
    assert place.park(waiter, deadline_ns=place.clock.now)


class Interrupted(BaseException):
    """Ctrl-C, or a death noticed while looking around."""


@pytest.mark.parametrize("at_look", [1, 2, 5])
def test_a_look_that_raises_ends_the_wait_and_takes_the_flag_back(waiter, place, at_look):
    looks = []

    def look(now_ns):
        looks.append(now_ns)
        if len(looks) == at_look:
            raise Interrupted

    with pytest.raises(Interrupted):
        place.park(waiter, look=look)
    assert place.parked == [0]
    assert len(place.sleeps) == at_look - 1


def test_an_interrupt_during_the_sleep_takes_the_flag_back(waiter, place):
    def interrupted(ns):
        assert place.parked == [CODE]
        raise Interrupted

    place.during_sleep = interrupted
    with pytest.raises(Interrupted):
        place.park(waiter)
    assert place.parked == [0]


def test_after_an_interrupt_the_next_wait_is_a_wait_like_any_other(waiter, place):
    place.during_sleep = lambda ns: (_ for _ in ()).throw(Interrupted)
    with pytest.raises(Interrupted):
        place.park(waiter)
    place.during_sleep = None
    place.clock.after(10 * MS, lambda: place.word.__setitem__(0, 1))
    assert not waiter.spin(place.word, 0)
    assert place.park(waiter)


# --- on the real kernel ----------------------------------------------------------------------------------------------


class Sleeper:
    """A thread that parks on a real futex."""

    def __init__(self, segment: Segment) -> None:
        self.words = segment.mapping.words(0, 16)
        self.futex = segment.mapping.futex(0)
        self.parked = segment.mapping.words(64, 1)
        self.waiter = Waiter(2)
        self.outcome: list[object] = []
        self._address = segment.mapping.address
        self._looks = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._sleep)

    def __enter__(self) -> "Sleeper":
        self._thread.start()
        assert self._looks.acquire(timeout=20)
        assert self._thread.native_id
        wait_until_asleep_on(self._address, pid=os.getpid(), tid=self._thread.native_id)
        return self

    def __exit__(self, *_: object) -> None:
        self.words[0] = 100
        self.futex.wake()
        self._thread.join(20)
        assert not self._thread.is_alive()

    def _sleep(self) -> None:
        passed = self.waiter.park(
            self.words,
            0,
            futex=self.futex,
            parked=self.parked,
            code=CODE,
            look=lambda now_ns: self._looks.release(),
            deadline_ns=deadline_after(30),
        )
        self.outcome.append(passed)

    def end(self) -> object:
        self._thread.join(20)
        return self.outcome.pop()


@pytest.fixture
def segment():
    one = Segment.create("test", 4096)
    yield one
    one.close()


def test_a_sleeper_whose_wake_is_dropped_comes_back_by_itself(segment, monkeypatch):
    monkeypatch.setattr(wait, "PARK_NS", 300 * MS)  # long enough that the store below falls into the sleep
    with Sleeper(segment) as sleeper:
        assert sleeper.parked[0] == CODE
        sleeper.words[0] = 1  # and nobody wakes it
        assert sleeper.end() is True
    assert sleeper.waiter.missed_wakes == 1
    assert sleeper.parked[0] == 0


def test_a_sleeper_that_is_woken_has_missed_nothing(segment, monkeypatch):
    monkeypatch.setattr(wait, "PARK_NS", 20 * S)
    with Sleeper(segment) as sleeper:
        sleeper.words[0] = 1
        sleeper.futex.wake()
        assert sleeper.end() is True
    assert (sleeper.waiter.parks, sleeper.waiter.missed_wakes) == (1, 0)
    assert sleeper.parked[0] == 0


def test_deadlines_are_on_the_monotonic_clock():
    before = wait._monotonic_ns()
    assert before + S <= deadline_after(1.0) <= wait._monotonic_ns() + S
    assert deadline_after(None) is None
    assert deadline_after(0) <= wait._monotonic_ns()


# --- cores -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("max 100000\n", 8),
        ("200000 100000\n", 2),
        ("150000 100000\n", 1),
        ("50000 100000\n", 1),
        ("1600000 100000", 8),
        ("", 8),
        ("x y", 8),
    ],
)
def test_a_cpu_quota_counts_as_fewer_cores(text, cores, tmp_path, monkeypatch):
    (tmp_path / "cpu.max").write_text(text)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(wait, "open", lambda path: (tmp_path / "cpu.max").open(), raising=False)
    assert usable_cores() == cores


def test_cores_are_those_this_process_may_use(monkeypatch):
    def no_such_file(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(wait, "open", no_such_file, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5})
    assert usable_cores() == 2
