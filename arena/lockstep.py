"""Collective set-up in lock-step: every rank ends each stage with the same verdict, whatever happens to any of them.

After each stage the ranks vote, in a round (`arena.rounds`). A stage may hang, so it runs aside (`arena.aside`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar, cast

from arena.aside import Aside, Hung
from arena.device import Declined
from arena.errors import CommunicatorClosed, SetUpFailed
from arena.rounds import BY_ANOTHER, BY_ITSELF, LEFT_HANGING, Rounds, Statement


class Closes(Protocol):
    """What can be set up: a path, or anything else that is closed in the end."""

    def close(self) -> None:
        """Give everything back."""


Made = TypeVar("Made", bound=Closes)

_SHORTEST_STAGE_S: Final = 0.2
_MOST_STAGES: Final = 1000
_GRACE_S: Final = 0.5  # by which the others wait longer for a rank than it waits for its own stage


@dataclass(frozen=True)
class _Ended:
    path: Closes


def _close_if_ended(value: Any) -> None:
    if isinstance(value, _Ended):
        value.path.close()


def set_up(name: str, steps: Generator[object, list[Any], Made], rounds: Rounds, rank: int, budget: Budget) -> Made:
    """Drive a set-up to its end, mostly that of a path, together with the other ranks.

    Raises:
        Declined: it is not to be had, for the same reason on every rank; what it had taken is given back.
        RankMissing, PeerDied: a rank fell silent.
    """
    aside = Aside(too_late=_close_if_ended)
    heard: list[Any] | None = None
    path: Made | None = None
    try:
        for stage in range(1, _MOST_STAGES + 1):
            statement = _advance(aside, name, stage, steps, heard, rank, budget.stage_s())
            if isinstance(statement.said, _Ended):
                path, statement = cast("Made", statement.said.path), Statement("done")
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
    aside: Aside, name: str, stage: int, steps: Generator[object, list[Any], Made],
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
        return Statement("failed", reason="setup_failed", text=text, order=LEFT_HANGING)
    except Declined as declined:
        return Statement("failed", reason=declined.reason, text=f"rank {rank}: {declined.text}")
    except Exception as error:
        text = f"rank {rank}: {type(error).__name__}: {error}"
        order = BY_ANOTHER if isinstance(error, CommunicatorClosed) else BY_ITSELF
        return Statement("failed", reason="setup_failed", text=text, order=order)


def _undo(aside: Aside, steps: Generator[object, list[Any], Made], path: Made | None, timeout_s: float) -> None:
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
