"""Tickets: words that a device writes by itself once its copies are over, so that nobody has to ask it.

A *ticket* is a point in a stream: a number, and the word that the stream will store it to when it gets there. The words
are the reader's, in its control memory, which is registered with the device for that. Each belongs to one stream at a
time and only ever grows: what it says is that everything the stream had to do before that number is over.

A reader that gives a hold back *names* the tickets it waits for, and the writer looks at both. So a block comes back
when the copy is over, whatever its reader does by then: idle, in Python, or in a call that holds the GIL.

**Who stores what, when.**

- A ticket's word: the device, in the order of its stream; never we. The reader only hands out the numbers, under a lock
  of this process, so that a stream gets them in order.
- A hold's names, then its word of the hold table: whoever gives it back (`arena.borrow`), once, after the view's death.
  The names come first, and are not looked at before the word has the hold's generation.

**Why a stale ticket frees nothing.** A name is good for the generation in the hold's word, and the writer uses a hold's
number again only when it has found that generation back, so that nobody looks at its names any more. The word's numbers
are used once: a word passes to another stream only when all of its numbers are reached, and the next one goes on from
there. Numbers have 56 bits, and generations 62: at a million a second the first take 2,284 years.

**Interrupts.** A number that was handed out and whose store was perhaps never queued is *doubtful*: nobody named it,
for the copy's gate still has the whole stream to wait for (`arena.gate`). The word stays with its stream, where the
next number settles it.

**Death and fork.** A killed process has no stream left by the time that its death is proven, and its holds are taken
back by that (`arena.blocks`). A device that is lost writes nothing more: what waits for it is out until its process
ends. A forked child has neither the memory nor the streams, and its callbacks do nothing.

The words are mapped for as long as a store may come: a ticket is in the gate of a lease, which has its reader's words,
or in the helper's hands.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from arena.device import Copies, Stream, WordWriter
from arena.held import HeldLock
from arena.layout import (
    LINE_WORDS,
    NAME_NUMBER,
    NAME_SHIFT,
    NAMES,
    RETURNED_GENERATION,
    RETURNED_NAMES_SHIFT,
    TICKETS,
    TICKETS_BYTES,
    WORD,
    Geometry,
)

if TYPE_CHECKING:
    from arena.memory import Mapping, Words

_LOOK_S: Final = 50e-6


class Ticket:
    """A point in a stream, which the stream says by itself that it has come to. See `arena.device.Passage`."""

    __slots__ = ("_words", "index", "number")

    def __init__(self, words: Words, index: int, number: int) -> None:
        self._words = words  # mapped until the store has come
        self.index = index
        self.number = number

    def passed(self) -> bool:
        """Whether the device has written it, or a later one. Only a look at memory: callbacks may ask."""
        # SYNC POINT ticket-reached (observe): the device's last read came before its store
        return self._words[self.index * LINE_WORDS] >= self.number

    def wait(self) -> None:
        """See `arena.device.Passage`."""
        while not self.passed():
            time.sleep(_LOOK_S)


class _Word:
    """One of the words: whose it is, and the last number that was handed out."""

    __slots__ = ("doubtful", "index", "issued", "write")

    def __init__(self, index: int) -> None:
        self.index = index
        self.issued = 0
        self.doubtful = False  # an interrupt struck while the last number was being handed out
        self.write: WordWriter | None = None


class Tickets:
    """The words of one reader, and the streams that have them.

    Args:
        control: the reader's control memory.
        geometry: where in it they are.
        register: has them registered with a device, in the background; calls `open` when that is done.
    """

    def __init__(self, control: Mapping, geometry: Geometry, register: Callable[[Tickets, Copies], None]) -> None:
        self.control = control
        self._offset = geometry.tickets_offset
        self._words = control.words(self._offset, TICKETS_BYTES // WORD)
        self.named = control.raw_words(geometry.named_offset, geometry.max_holds * NAMES)
        self._register: Callable[[Tickets, Copies], None] | None = register
        self._copies: Copies | None = None
        self._all = [_Word(index) for index in range(TICKETS)]
        self._of_stream: dict[Stream, _Word] = {}
        self._lock = HeldLock()  # not a plain one: a signal handler may copy, too
        self._busy = False

    def prepare(self, copies: Copies) -> None:
        """Have the words registered with the device that this process uses, in the background, at the first call."""
        if self._register is not None and copies.in_use():
            register, self._register = self._register, None
            register(self, copies)

    def open(self, copies: Copies) -> None:
        """From now on this device can write the words."""
        self._copies = copies

    def issue(self, copies: Copies, stream: Stream) -> Ticket | None:
        """Queue a ticket behind everything that is queued on the stream. None where that can't be: record an event.

        Not for callbacks, nor while a graph is being captured on the stream.
        """
        if copies is not self._copies:
            self.prepare(copies)
            return None
        with self._lock:
            if self._busy:
                return None  # a signal handler, in the middle of another call: its number would overtake that one's
            self._busy = True
            try:
                return None if stream is None else self._issued(copies, stream)
            finally:
                self._busy = False

    def _issued(self, copies: Copies, stream: Stream) -> Ticket | None:
        word = self._of_stream.get(stream) or self._allot(copies, stream)
        if word is None:
            return None
        assert word.write is not None
        number = word.issued + 1
        word.doubtful = True
        word.issued = number
        # SYNC POINT ticket-reached (publish): the device stores the number when all before it is over
        queued = word.write(number)
        if not queued:
            word.issued = number - 1
            self._of_stream.pop(stream)  # that stream is gone, and its address is another one's
        word.doubtful = False
        return Ticket(self._words, word.index, number) if queued else None

    def _allot(self, copies: Copies, stream: Stream) -> _Word | None:
        """A word for a stream that has none, if need be of a stream that has come to all of its own."""
        owners = {word.index: owner for owner, word in list(self._of_stream.items())}
        settled = [word for word in self._all if self._is_settled(word)]
        word = min(settled, key=lambda one: one.index in owners, default=None)
        if word is None:
            return None
        write = copies.word_writer(stream, self.control.address, self._offset + word.index * LINE_WORDS * WORD)
        if write is None:
            return None
        self._of_stream.pop(owners.get(word.index), None)
        word.write = write
        self._of_stream[stream] = word  # until here it is nobody's, wherever an interrupt strikes
        return word

    def _is_settled(self, word: _Word) -> bool:
        return not word.doubtful and self._words[word.index * LINE_WORDS] >= word.issued


def give_back(returned: Words, tickets: Tickets | None, hold: int, generation: int, names: tuple[int, ...]) -> None:
    """At the reader, once a hold's last view is dead: it is back, but for the tickets that it names."""
    # A later hold of this number may be back already: our own word never goes down.
    if returned[hold] & RETURNED_GENERATION < generation:
        if tickets is not None:
            for at, name in enumerate(names, hold * NAMES):
                tickets.named[at] = name
        # SYNC POINT block-reusable (publish): the last view is dead, and no copy reads once what it names is reached
        returned[hold] = generation | len(names) << RETURNED_NAMES_SHIFT


def name_of(index: int, number: int) -> int:
    """A ticket as one word."""
    return index << NAME_SHIFT | number


def all_reached(named: Words, tickets: Words, hold: int, names: int) -> bool:
    """At the writer: whether the device has come to everything that a hold named. What makes no sense never is."""
    for at in range(hold * NAMES, hold * NAMES + names):
        name = named[at]
        index = name >> NAME_SHIFT
        # SYNC POINT ticket-reached (observe): the device's last read came before its store
        if index >= TICKETS or tickets[index * LINE_WORDS] < name & NAME_NUMBER:
            return False
    return True
