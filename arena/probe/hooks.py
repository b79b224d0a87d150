"""Where telemetry plugs in. Arena calls what is installed here and knows nothing of what it does."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Final, Protocol

Trace = tuple[int, int, int]
"""Three opaque words of trace context, carried in a frame's header."""

Sampled = tuple[int, int, int, int]
"""The same three, and a fourth that stays in the writer's flight recorder: the span that the sender was in."""


class TraceSource(Protocol):
    """Says which context goes with a message.

    It is called for a message before it is encoded, with 0, unless two looks tell that the answer is None: `left` is
    not yet 0, and the sender is still in the context `plain`. Then `left` goes down by one instead; a call would cost
    more than all else that tracing adds to an unsampled message.

    It is called once more before the message is published, if that was not sampled and had to wait for a slot or was
    copied into blocks, with the ns that this took.
    """

    left: float
    """How many messages from `plain` to pass over, until the next one is sampled; infinite if none is."""

    gap_ns: int
    """A writer traces one message in so long at most, of those that were not slow; a second's worth of them at once."""

    plain: object
    """A context of the sender's that decides nothing."""

    def context(self) -> object:
        """The context that the sender is in."""

    def __call__(self, spent_ns: int, /) -> Sampled | None:
        """The context to send with a message, or None for an unsampled one."""


trace_source: TraceSource | None = None
"""What a writer asks, when set."""

inside: Final[ContextVar[tuple[Trace, int] | None]] = ContextVar("arena_inside", default=None)
"""The context that came with the message that the last `dequeue` here returned, and the rank of the reader that it came
to; None without. Set by readers, until their caller is back for more; read by whatever works on a message."""

page_made: Callable[[Path], None] | None = None
"""Called, when set, with each probe page that this process makes."""
