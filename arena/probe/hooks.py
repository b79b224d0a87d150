"""Where telemetry plugs in. Arena calls what is installed here and knows nothing of what it does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

Trace = tuple[int, int, int]
"""Three opaque words of trace context, carried in a frame's header."""

Sampled = tuple[int, int, int, int]
"""The same three, and a fourth that stays in the writer's flight recorder: the span that the sender was in."""

trace_source: Callable[[int], Sampled | None] | None = None
"""Called by a writer, when set: the context to send with a message, or None for an unsampled one.

Asked for each message before it is encoded, with 0; and once more before it is published, if it was not sampled and had
to wait for a slot or was copied into blocks, with the ns that this took.
"""

trace_sink: Callable[[Trace | None, int], None] | None = None
"""Called by a reader, when set, with the context that came with a message and the reader's rank; with None instead once
its caller is back for more. Not called for messages without context."""

page_made: Callable[[Path], None] | None = None
"""Called, when set, with each probe page that this process makes."""
