"""Traces: a span for each sampled message at its writer, and one at each reader, built from the flight recorders.

The hot path carries context and nothing else. `install` gives arena a function that says which context goes with a
message; a reader keeps what came with one, for `current`. Everything that happens to a sampled message is an event on
its endpoint's probe page; a thread of the process reads its own pages and makes spans of them, after the fact, with
the times that the events have. `arena export --otlp` does the same from outside, for every process of the host, also
for those that hang.

Nobody hands span ids from process to process. A sender's span has the id that travels in the header, and every other
id follows from it and the reader's rank; so whoever makes the spans makes the same ones.

A span takes 5 to 10 µs of Python to make and 30 to 50 to encode, all with the interpreter lock: tracing from inside
costs a busy process some latency now and then. From outside it costs nothing.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from opentelemetry import context as contexts
from opentelemetry import trace as api
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider

from arena import probe
from telemetry.traces.collector import Counts, HostTraces, InProcess, own_pages
from telemetry.traces.ids import WORD, Relation, process_ids, within
from telemetry.traces.outlet import BadEndpoint, otlp_provider

__all__ = [
    "BadEndpoint",
    "Counts",
    "HostTraces",
    "Relation",
    "counts",
    "current",
    "install",
    "otlp_provider",
    "uninstall",
]

_getrandbits = random.getrandbits


@dataclass(frozen=True)
class _Installed:
    provider: TracerProvider | None
    relation: Relation


_installed: _Installed | None = None
_collector: InProcess | None = None


def install(
    provider: TracerProvider | None = None,
    ratio: float = 0.01,
    slow_s: float = 0.01,
    relation: Relation = "both",
    *,
    per_second: float = 20,
    spans: bool = True,
) -> None:
    """Trace the messages of this process's queues.

    A message sent inside a sampled span of the caller's is traced and is that span's child; inside an unsampled one
    it is not. Outside any span, `ratio` of them are. Any that took `slow_s` or more from `enqueue` to being published
    (waiting for a slot, copying) is traced in any case. Of a writer's messages `per_second` are traced at most, and
    about 100 with the slow ones; what is beyond that is counted in `arena_traces_dropped_total`.

    Processes forked later trace too, each its own queues. A spawned process knows nothing of this one: call it there.

    Args:
        provider: where spans go; the global one by default, or, where none is set, `otlp_provider` with its defaults.
        ratio: share of messages, decided by the trace's id as OpenTelemetry's `TraceIdRatioBased` does.
        slow_s: what counts as slow. `math.inf`: nothing does.
        per_second: how many of a writer's messages are traced at most, in the long run, slow ones not counted. Spans
            are made of Python: at 50,000 messages a second on two busy cores, 100 a second cost each message a quarter
            of its time, 20 cost a few percent.
        relation: how a reader's span belongs to its sender's; the same in every process.
        spans: whether this process makes its spans itself. If not, it needs no provider: it samples and hands context
            on, and `arena export --otlp` makes the spans.

    Raises:
        BadEndpoint: there is no provider, and no exporter to make one with.
    """
    global _installed  # noqa: PLW0603 - one for the process, as arena's hooks are
    uninstall()
    if not 0 <= ratio <= 1:
        raise ValueError(f"ratio is a share from 0 to 1, found {ratio!r}")
    if not per_second > 0:
        raise ValueError(f"per_second is more than 0, found {per_second!r}")
    if relation not in ("both", "parent", "link"):
        raise ValueError(f"relation is both, parent or link, found {relation!r}")
    _installed = _Installed(provider or _global_provider() or otlp_provider() if spans else None, relation)
    probe.hooks.trace_source = _Source(ratio, slow_s, per_second)
    if spans:
        probe.hooks.page_made = _watch
        for path in own_pages():
            _watch(path)


def uninstall() -> None:
    """Trace no more. What has been recorded is still made into spans; the provider stays as it is."""
    global _installed, _collector
    probe.hooks.trace_source = probe.hooks.page_made = None
    collector, _collector, _installed = _collector, None, None
    if collector is not None and collector.pid == os.getpid():
        collector.close()


def current() -> Context | None:
    """In a worker, the context of the message that the last `dequeue` of this thread returned; None if not sampled.

    `tracer.start_as_current_span("forward", context=traces.current())` goes on with the engine's trace.
    """
    taken = probe.hooks.inside.get()
    if taken is None or _installed is None:
        return None
    trace, rank = taken
    return within(*process_ids(trace, rank, _installed.relation))


def counts() -> Counts:
    """What became of this process's traces so far."""
    if _collector is None or _collector.pid != os.getpid():
        return Counts(0, 0, 0, 0)
    return _collector.counts()


class _Source:
    """What a writer asks; see `arena.probe.hooks.TraceSource`. Outside any span it counts down to the next message."""

    left: float
    plain: object

    def __init__(self, ratio: float, slow_s: float, per_second: float) -> None:
        self.gap_ns = int(1e9 / per_second)
        self._ratio = ratio
        self._below = max(1, round(ratio * (1 << 64)))
        self._slow_ns = int(min(slow_s, 1e9) * 1e9)  # it may be infinite
        self.context = _context_getter()
        self.plain = None  # the last context seen that no span is in
        self.left = _gap(ratio)

    def __call__(self, spent_ns: int) -> probe.hooks.Sampled | None:
        context = self.context()
        if spent_ns:
            return _root(_trace_id_of(context)) if spent_ns >= self._slow_ns else None
        if context is not self.plain:
            sender = api.get_current_span(context).get_span_context()
            if sender.is_valid:
                return _child_of(sender) if sender.trace_flags.sampled else None
            self.plain = context
        if self.left:
            self.left -= 1
            return None
        self.left = _gap(self._ratio)
        return _root(_getrandbits(64) << 64 | random.randrange(self._below))


def _gap(ratio: float) -> float:
    """How many messages to pass over until the next one is sampled, as if each were by itself."""
    if ratio <= 0:
        return math.inf
    return 0 if ratio >= 1 else int(math.log(1 - random.random()) / math.log1p(-ratio))


def _root(trace_id: int) -> probe.hooks.Sampled:
    return trace_id >> 64, trace_id & WORD, _getrandbits(64) or 1, 0


def _child_of(sender: api.SpanContext) -> probe.hooks.Sampled:
    return sender.trace_id >> 64, sender.trace_id & WORD, _getrandbits(64) or 1, sender.span_id


def _trace_id_of(context: Context) -> int:
    """That of the sender's span, which was not sampled, so that its logs lead here; or a new one."""
    return api.get_current_span(context).get_span_context().trace_id or _getrandbits(128)


def _context_getter() -> Callable[[], Context]:
    """The current context, from the variable itself where the SDK keeps it in one: a tenth of the time."""
    variable = getattr(getattr(contexts, "_RUNTIME_CONTEXT", None), "_current_context", None)
    return variable.get if isinstance(variable, ContextVar) else contexts.get_current


def _watch(path: Path) -> None:
    """Follow a page of this process; the first one starts the thread, so a forked child gets its own."""
    global _collector  # noqa: PLW0603
    if _installed is None or _installed.provider is None:
        return
    if _collector is None or _collector.pid != os.getpid():
        _collector = InProcess(_installed.provider, _installed.relation)
    _collector.watch(path)


def _global_provider() -> TracerProvider | None:
    provider = api.get_tracer_provider()
    return provider if isinstance(provider, TracerProvider) else None
