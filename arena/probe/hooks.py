"""Where telemetry plugs in. Arena calls what is installed here and knows nothing of what it does."""

from __future__ import annotations

from collections.abc import Callable

Trace = tuple[int, int, int]
"""Three opaque words of trace context, carried in a frame's header."""

trace_source: Callable[[], Trace | None] | None = None
"""Called by a writer for each message, when set: the context to send with it, or None for an unsampled one."""

trace_sink: Callable[[Trace | None], None] | None = None
"""Called by a reader for each message, when set, with the context that came with it, or None."""
