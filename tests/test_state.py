"""The table of moves is complete, and nothing outside it is let through."""

import itertools
from enum import IntEnum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arena.state import MOVES, Block, Endpoint, Message, Peer, Pin, diagram, move

MACHINES = [Endpoint, Peer, Block, Message, Pin]
EVENTS = sorted({event for _, event, _ in MOVES})


def reachable(start: IntEnum) -> set[IntEnum]:
    """Find every state that some row of moves leads to."""
    found, fresh = {start}, [start]
    while fresh:
        state = fresh.pop()
        for before, _, after in MOVES:
            if before is state and after not in found:
                found.add(after)
                fresh.append(after)
    return found


@pytest.mark.parametrize("machine", MACHINES)
def test_every_state_can_be_reached_from_the_first(machine):
    assert reachable(machine(0)) == set(machine)


@pytest.mark.parametrize("machine", MACHINES)
def test_a_move_stays_in_its_machine(machine):
    assert all(type(after) is machine for before, _, after in MOVES if isinstance(before, machine))


def test_no_row_says_twice_what_an_event_does():
    rows = [(before.__class__, before, event) for before, event, _ in MOVES]
    assert len(set(rows)) == len(rows)


@pytest.mark.parametrize(("before", "event", "after"), MOVES, ids=[f"{b!r}-{e}" for b, e, _ in MOVES])
def test_a_legal_move_leads_where_the_table_says(before, event, after):
    assert move(before, event) is after


@pytest.mark.parametrize("machine", MACHINES)
def test_a_move_that_is_not_in_the_table_is_a_bug_with_a_name(machine):
    # States of two machines are equal where their numbers are: a row of one must not let the other through.
    legal = {(before, event) for before, event, _ in MOVES if isinstance(before, machine)}
    for state, event in itertools.product(machine, [*EVENTS, "no such event"]):
        if (state, event) not in legal:
            with pytest.raises(AssertionError, match=rf"{machine.__name__} {state.name} on '{event}'"):
                move(state, event)


@pytest.mark.parametrize("machine", MACHINES)
def test_the_diagram_draws_every_move_of_one_machine_and_no_other(machine):
    first, *arrows = diagram(machine).splitlines()
    assert first == "stateDiagram-v2"
    expected = [f"    {b.name} --> {a.name}: {event}" for b, event, a in MOVES if isinstance(b, machine)]
    assert arrows == expected


def test_a_closed_endpoint_never_works_again():
    assert reachable(Endpoint.CLOSED) == {Endpoint.CLOSED, Endpoint.FORKED}
    assert reachable(Endpoint.FORKED) == {Endpoint.FORKED}


def test_only_the_writer_makes_a_joiner_count():
    ways = [event for before, event, after in MOVES if after is Peer.ATTACHED and before is Peer.JOINING]
    assert ways == ["admit"]


@given(st.lists(st.sampled_from(["hold", "return", "drop"]), max_size=30))
def test_a_block_is_free_exactly_when_nobody_lends_or_holds_it(events):
    state, lent, holds = move(Block.FREE, "lend"), True, 0
    for event in events:
        if event == "hold" and lent:  # only what the writer still has can go into another message
            holds += 1
        elif event == "drop" and lent:
            lent = False
        elif event == "return" and holds:
            holds -= 1
            if holds:
                continue  # the block moves when the last hold is back
        else:
            continue
        state = move(state, event)
        expected = {
            (False, False): Block.FREE,
            (True, False): Block.LENT,
            (False, True): Block.HELD,
            (True, True): Block.LENT_AND_HELD,
        }
        assert state is expected[lent, holds > 0]
        if state is Block.FREE:
            return
