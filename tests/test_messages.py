"""Messages put together from events, in whatever pieces the events are read, and whatever is missing."""

import pytest

from arena.probe import ERROR_KINDS, PATHS, Event, EventRecord, Role
from telemetry.messages import Follower, Part, Sent, Taken

TRACE = (1, 2, 3)
NO_TRACE = (0, 0, 0)


def events(*rows: tuple) -> list[EventRecord]:
    """(kind, sequence, time, a, b, trace), numbered from 0."""
    return [EventRecord(number, *row) for number, row in enumerate(rows)]


SENT = events(
    (Event.WAIT, 7, 150, 30, 2, TRACE),
    (Event.COPY, 7, 180, 20, 4096, TRACE),
    (Event.ORIGIN, 7, 100, 99, PATHS.index("block"), TRACE),
    (Event.PUBLISH, 7, 200, 15, 5000, TRACE),
)
WHOLE_SENT = Sent(7, 100, 200, 15, 5000, "block", (Part(120, 150, 2),), (Part(160, 180, 4096),), TRACE, 99)
TAKEN = events((Event.CONSUME, 7, 240, 25, 10, TRACE), (Event.DONE, 7, 300, 60, 4, TRACE))
WHOLE_TAKEN = Taken(7, 205, 230, 240, decode_ns=4, done_ns=300, trace=TRACE)


@pytest.mark.parametrize(
    ("role", "given", "whole"), [(Role.WRITER, SENT, WHOLE_SENT), (Role.READER, TAKEN, WHOLE_TAKEN)]
)
def test_a_message_comes_out_once_its_last_event_is_there_however_they_are_cut(role, given, whole):
    assert list(Follower(role, from_start=True).read(given)) == [whole]
    one_by_one = Follower(role, from_start=True)
    assert [list(one_by_one.read([event])) for event in given] == [[]] * (len(given) - 1) + [[whole]]


@pytest.mark.parametrize("missing", range(len(SENT)))
def test_a_sending_of_which_events_are_lost_is_left_out_or_has_what_is_left(missing):
    follower = Follower(Role.WRITER, from_start=True)
    found = list(follower.read(SENT[missing + 1 :]))
    assert follower.lost == (missing + 1 if missing < len(SENT) - 1 else 0)
    assert [one.trace for one in found] == ([TRACE] if missing < 2 else [])
    late = Follower(Role.WRITER, from_start=False)
    list(late.read(SENT[missing + 1 :]))
    assert late.lost == 0


def test_a_gap_ends_what_was_open():
    follower = Follower(Role.READER, from_start=True)
    assert list(follower.read(TAKEN[:1])) == []
    again = [EventRecord(9, Event.DONE, 7, 300, 60, 4, TRACE)]
    assert list(follower.read(again)) == []
    assert (follower.lost, list(follower.unfinished())) == (8, [])


def test_what_a_reader_never_came_back_from_is_told_at_the_end():
    follower = Follower(Role.READER, from_start=True)
    list(follower.read(TAKEN[:1]))
    (open_still,) = follower.unfinished()
    assert (open_still.sequence, open_still.done_ns) == (7, 0)
    assert list(follower.unfinished()) == []


def test_a_wait_of_another_message_is_not_this_one_s():
    rows = ((Event.WAIT, 3, 50, 30, 1, NO_TRACE), (Event.PUBLISH, 7, 200, 15, 10, NO_TRACE))
    (sent,) = Follower(Role.WRITER, from_start=True).read(events(*rows))
    assert (sent.waits, sent.began_ns, sent.path) == ((), 185, "")


def test_errors_name_themselves():
    kind = ERROR_KINDS.index("timeout")
    rows = ((Event.ORIGIN, 7, 100, 0, 0, TRACE), (Event.ERROR, 7, 200, kind, 0, TRACE))
    (sent,) = Follower(Role.WRITER, from_start=True).read(events(*rows))
    assert (sent.error, sent.began_ns, sent.ended_ns) == ("timeout", 100, 200)
    rows = ((Event.CONSUME, 7, 240, 25, 10, TRACE), (Event.ERROR, 8, 241, ERROR_KINDS.index("decode"), 0, NO_TRACE))
    follower = Follower(Role.READER, from_start=True)
    list(follower.read(events(*rows)))
    assert next(follower.unfinished()).error == "decode"


def test_a_page_of_a_later_version_may_say_what_is_not_known_here():
    rows = ((Event.ORIGIN, 7, 100, 0, 99, TRACE), (Event.ERROR, 7, 200, 99, 0, TRACE), (77, 8, 1, 1, 1, TRACE))
    (sent,) = Follower(Role.WRITER, from_start=True).read(events(*rows))
    assert (sent.error, sent.path) == ("unknown", "unknown")
