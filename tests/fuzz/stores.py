"""What ranks leave for each other in the store of their group: statements, verdicts, and the cards in them."""

from __future__ import annotations

import contextlib
import pickle
import struct
from collections.abc import Iterator
from typing import Any

from arena.device import Declined
from arena.errors import ArenaError
from arena.joining import Card, Wish, _agreed
from arena.probe import identity
from arena.rounds import Rounds, Statement, Verdict
from tests.fuzz.common import Run, Wrong, name_of

_HEAD = struct.Struct("<HH")


def _case(first: Any, second: Any, verdict: Any) -> bytes:
    one, two, three = (b"" if part is None else pickle.dumps(part) for part in (first, second, verdict))
    return _HEAD.pack(len(one), len(two)) + one + two + three.hex().encode()


def round_seeds() -> list[bytes]:
    """What rank 1 says when it arrives and in the round after that, and a verdict that is there already."""
    card = Card(("cpu", Wish(None, None, None)), {}, instance="1", directory="")
    came, said = Statement("said", (identity(), card)), Statement("said", {"gloo": "gone"})
    return [
        _case(came, said, None),
        _case(came, said, Verdict("go")),
        _case(came, Statement("failed", reason="setup_failed", text="no", order=2), None),
        _case(came, Statement("done"), Verdict("failed", "setup_failed", "no")),
        _case(came, None, Verdict("missing", text="it", ranks=(1,))),
        _case(came, said, Verdict("died", text="it", ranks=(1,))),
        _case(came, said, Verdict("died", text="it", ranks=(7,))),
        _case(Statement("said"), 7, "no verdict"),
        _case(Statement("said", (None, None)), said, Verdict("died")),
        _case(Statement("said", (identity(), 7)), said, None),
    ]


class _Store:
    """A store in this process, where others have left what they say."""

    def __init__(self, kept: dict[str, bytes]) -> None:
        self._kept = kept

    def set(self, key: str, value: bytes) -> None:
        self._kept[key] = value

    def get(self, key: str) -> bytes:
        return self._kept[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self._kept for key in keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._kept.setdefault(key, desired.encode())


class _Direct(Rounds):
    """Rounds in the caller's own thread."""

    def exchange(self, what: str, statement: Statement, deadline_s: float) -> list[Statement]:
        """See `Rounds.exchange`."""
        base = f"arena/{self.attempt}/{self._round}"
        self._round += 1
        return self._exchange(base, what, statement, deadline_s)


@contextlib.contextmanager
def rounds() -> Iterator[Run]:
    """A first meeting of two ranks, and the round after it, with all that the other one says out of the case."""
    own = Card(("cpu", Wish(None, None, None)))

    def run(data: bytes) -> str:
        first, second = _HEAD.unpack_from(data[:4].ljust(4, b"\0"))
        parts = data[4 : 4 + first], data[4 + first : 4 + first + second], data[4 + first + second :]
        names = "arena/0/0/1", "arena/0/1/1", "arena/0/1/verdict"
        if len(data) % 5 == 0:  # the verdict that we might come to late
            names = (*names[:2], "arena/0/0/verdict")
        store = _Store({name: part for name, part in zip(names, parts, strict=True) if part})
        try:
            ranks = _Direct(store, 0, 0, 2)
            _agreed(ranks.meet(own, 0))
            answers = ranks.exchange("comparing", Statement("said", {}), 0)
        except (ArenaError, Declined) as error:
            return name_of(error)[:28]
        if not all(type(one) is Statement and one.kind in ("said", "done") for one in answers):
            raise Wrong(f"{answers}")
        return f"went on with {answers[1].kind}"[:40]

    yield run
