"""A wait that is not over: how much of it is certain, and the three words for who waits for whom."""

from pathlib import Path

import pytest

from arena.probe import Identity, Role, Wait
from telemetry.blame import ALREADY_READ, AWAITING_READERS, AWAITING_WRITE, InProgress, in_progress, relation
from telemetry.reader import Endpoint, Page, Queue

NOT_WAITING = Wait(0, 0, 0, (), None)


def end(role: Role, rank: int = 0, sequence: int = 0, wait: Wait = NOT_WAITING) -> Endpoint:
    about = {"n_reader": 3, "slots": 8}
    page = Page(Path(f"{role.value}-{rank}"), role, rank, Identity(100 + rank, 1, 1), 0, about, ())
    return Endpoint(page, "S", 0, 1, sequence, 0, wait, ())


def queue(wait: Wait, readers: tuple[Endpoint, ...] = ()) -> Queue:
    return Queue("steps", Path("steps@x"), end(Role.WRITER, sequence=8, wait=wait), readers, (), ())


def waiting(*pending: int, alone: tuple[int, int] | None = None) -> Wait:
    return Wait(since_ns=1000, progress_ns=5000, sequence=0, pending=pending, alone=alone)


def test_a_writer_that_does_not_wait_has_nothing_in_progress():
    assert in_progress(queue(NOT_WAITING)) == InProgress()
    assert in_progress(Queue("steps", Path("steps@x"), None, (), (), ())) == InProgress()


def test_a_wait_for_several_is_nobodys_yet():
    assert in_progress(queue(waiting(0, 2))) == InProgress(4000, (0, 2), charged=None, excess_ns=0, full_ns=0)


def test_a_wait_for_every_reader_is_full():
    assert in_progress(queue(waiting(0, 1, 2))).full_ns == 4000


def test_a_wait_for_one_alone_is_charged_to_it_with_what_it_alone_costs():
    assert in_progress(queue(waiting(2, alone=(2, 3500)))) == InProgress(4000, (2,), charged=2, excess_ns=1500)


@pytest.mark.parametrize(("alone_ns", "excess_ns"), [(500, 4000), (9000, 0)])
def test_excess_is_never_negative_nor_more_than_the_wait(alone_ns, excess_ns):
    assert in_progress(queue(waiting(2, alone=(2, alone_ns)))).excess_ns == excess_ns


def test_each_reader_stands_in_one_of_three_relations_to_the_writer():
    idle = end(Role.READER, 1, sequence=8, wait=Wait(7, 7, 8, (), None))
    busy = end(Role.READER, 2, sequence=8)
    late = end(Role.READER, 0, sequence=0)
    readers = (late, idle, busy)
    stalled = queue(waiting(0), readers)
    assert [relation(stalled, reader) for reader in readers] == [AWAITING_READERS, ALREADY_READ, ALREADY_READ]
    calm = queue(NOT_WAITING, readers)
    assert [relation(calm, reader) for reader in readers] == ["", AWAITING_WRITE, ""]
