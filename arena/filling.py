"""Streamed hand-over: a frame is published first and its blocks are filled after that, while readers follow.

"Copy a large tensor to shared memory, then to the device" takes the sum of two copies. Streamed, it need not: a reader
that moves the tensor to its device copies what is there, again and again. How much of the shorter copy this hides
depends on whether the reader gets a core meanwhile, and on what memory bears (tests/bench/RESULTS.md).

The word that says how much that is lies in the header of the frame's slot, and is the writer's alone. It counts bytes
of the frame's holds, in the order in which its table names them, only grows, and ends at their sum: then the frame is
like any other. Or it ends at `GIVEN_UP`, for good: the writer was interrupted, or the source could not be read; readers
skip the frame, as they do a message whose ABORT came (`arena.state.Message`). A slot is not reused before every reader
has released it, so the word is there for whoever comes late.

**At most one frame is being filled**, the last one: the writer publishes nothing else in between. It keeps what it
began until it has ended it, so that no interrupt leaves a frame open: whoever catches one ends it, and if a second
interrupt kept that from happening, the next call does, or the queue's end.

**A reader sees no byte before it is there.** It decodes only a filled frame, plain `dequeue` as well as `dequeue_to`,
which has the bytes on their way to the device by then (`arena.follow`). Should the writer die in between, the frame was
never sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from arena.errors import ArenaError, CorruptFrame
from arena.layout import GIVEN_UP

if TYPE_CHECKING:
    from arena.memory import Words

STREAMED_BYTES: Final = 16 << 20
"""From this size up a tensor is worth it: a smaller one is copied before a reader has been woken."""

_FIRST_SLEEP_NS: Final = 20_000
_LAST_SLEEP_NS: Final = 1_000_000
_SHARE_OF_AGE: Final = 64
_LOOK_NS: Final = 20_000_000
_monotonic_ns = time.monotonic_ns


# ── at the writer ────────────────────────────────────────────────────────────────────────────────
class Filling:
    """A frame that is published before its holds are filled.

    Args:
        sequence: the frame's.
        word: its word, see the head of this file.
        sizes: of its holds, in bytes.
    """

    __slots__ = ("_before", "_filled", "_total", "sequence")

    def __init__(self, sequence: int, word: Words, sizes: Sequence[int]) -> None:
        self.sequence = sequence
        self._filled = word
        self._total = sum(sizes)
        self._before = 0  # bytes of the holds that are done
        word[0] = 0  # seen with the frame: it is stored before that is published

    def reached(self, nbytes: int) -> None:
        """So many bytes of the hold under way are there."""
        # SYNC POINT bytes-filled (publish): the bytes were stored before this is seen
        self._filled[0] = self._before + nbytes

    def done(self, nbytes: int) -> None:
        """All of the hold under way is, which has so many."""
        self._before += nbytes
        # SYNC POINT bytes-filled (publish): the bytes were stored before this is seen
        self._filled[0] = self._before

    def give_up(self) -> bool:
        """The rest will not come, and readers should know; False if there is none. Twice is as good as once."""
        if self._filled[0] == self._total:
            return False
        self._filled[0] = GIVEN_UP
        return True


# ── at a reader ──────────────────────────────────────────────────────────────────────────────────
class GivenUp(Exception):
    """The writer gave this frame up. Never leaves Arena: the frame is skipped."""


def _always(filled: int) -> bool:
    return True


class Fill:
    """A frame's bytes as they come, at a reader.

    Args:
        word: the frame's, see the head of this file.
        total: bytes of all its holds.
        look: called now and then while there is nothing new. Raises if waiting has become pointless; what it returns is
            raised if nothing new is there then, either: it is the writer's end.
        deadline_ns: monotonic time of the deadline.
        timed_out: makes the error for that.
    """

    __slots__ = ("_deadline_ns", "_filled", "_look", "_timed_out", "total")

    def __init__(
        self,
        word: Words,
        total: int,
        look: Callable[[int], ArenaError | None],
        deadline_ns: int | None,
        timed_out: Callable[[], ArenaError],
    ) -> None:
        self._filled = word
        self.total = total
        self._look = look
        self._deadline_ns = deadline_ns
        self._timed_out = timed_out

    def now(self) -> int:
        """How many bytes are there.

        Raises:
            GivenUp: no more will come.
            CorruptFrame: more than there can be.
        """
        # SYNC POINT bytes-filled (observe): the bytes came before this store
        filled = self._filled[0]
        if filled > self.total:
            if filled == GIVEN_UP:
                raise GivenUp
            raise CorruptFrame(
                "a frame's holds are said to be fuller than they can be",
                expected=f"at most {self.total} bytes",
                found=str(filled),
                remedy="something else wrote into the ring; shut the queue down and start both ends anew",
            )
        return filled

    def beyond(self, floor: int, ready: Callable[[int], bool] = _always) -> int:
        """How many bytes are there, once that is more than `floor`, and enough for `ready`, which is asked each time.

        Raises:
            GivenUp, CorruptFrame: as `now`.
            ArenaError: the writer's end, or the deadline.
        """
        filled = self.now()
        if filled > floor and ready(filled):
            return filled
        began_ns = _monotonic_ns()
        look_ns = began_ns + _LOOK_NS
        while True:
            now_ns = _monotonic_ns()
            # Asleep and not yielding: the writer may copy with as many threads as there are cores, and whoever yields
            # to one of those has to wait for the end of its turn, milliseconds later.
            nap_ns = min(max((now_ns - began_ns) // _SHARE_OF_AGE, _FIRST_SLEEP_NS), _LAST_SLEEP_NS)
            time.sleep(nap_ns / 1e9)
            end = None
            if now_ns >= look_ns:
                look_ns = now_ns + _LOOK_NS
                end = self._look(now_ns)  # before the last look at the word
            filled = self.now()
            if filled > floor and ready(filled):
                return filled
            if end is not None and filled <= floor:
                raise end
            if self._deadline_ns is not None and now_ns >= self._deadline_ns:
                raise self._timed_out()
