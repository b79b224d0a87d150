"""Where spans go: a provider over OTLP that holds nobody up, and counts what did not arrive."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Final
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from arena.probe import ArenaError

EXPORT_TIMEOUT_S: Final = 1.0
EXIT_S: Final = 2.5
FORK_S: Final = 0.25
"""So long a fork waits for a batch that is being sent. gRPC works in a child only if no thread was inside it; and what
a thread was importing for the first request, no thread of the child could ever import."""
QUEUE_SPANS: Final = 4096
BATCH_SPANS: Final = 128
"""Small, because a batch is encoded in one go, with the interpreter lock."""


class BadEndpoint(ArenaError, ValueError):
    """Traces can't be sent where they should be."""


def otlp_provider(url: str | None = None) -> TracerProvider:
    """A provider that sends to a collector, and neither holds its process up nor keeps it from ending.

    The SDK's own batch processor does the work. Left alone it waits for a silent collector for up to 30 s at exit;
    here a request takes 1 s at most, and once the first one fails at exit, the rest is dropped and counted.

    Args:
        url: `http://host:4318` or `https://…` for OTLP over HTTP, `grpc://host:4317` or `grpcs://…` for gRPC. By
            default what the variables `OTEL_EXPORTER_OTLP_…` say, over HTTP.

    Raises:
        BadEndpoint: the URL is none of these, or the exporter's library is not installed.
    """
    make = _exporter_of(url)
    _fork_between_batches()
    if not (url or "").startswith("grpc"):
        make().shutdown()  # so that most of what it imports is there before any fork; it connects at the first request
    provider = TracerProvider()
    outlet = _outlets[provider] = _Outlet(make)
    provider.add_span_processor(_Batches(outlet))
    return provider


def _exporter_of(url: str | None) -> Callable[[], SpanExporter]:
    scheme = "http" if url is None else _checked(url)
    try:
        if scheme.startswith("grpc"):
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

            target = urlsplit(url or "").netloc
            return lambda: Grpc(endpoint=target, insecure=scheme == "grpc", timeout=EXPORT_TIMEOUT_S)
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http
    except ModuleNotFoundError:
        raise BadEndpoint(
            "traces can't be sent", found="no OTLP exporter", remedy="pip install 'arena-dataplane[otlp]'"
        ) from None
    endpoint = url if url is None or urlsplit(url).path.strip("/") else f"{url.rstrip('/')}/v1/traces"
    return lambda: Http(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)


def _checked(url: str) -> str:
    """The scheme of a URL that names a collector."""
    try:
        parts = urlsplit(url)
        usable = bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
        parts = urlsplit("")
    if not usable or parts.scheme not in ("http", "https", "grpc", "grpcs"):
        raise BadEndpoint(
            "traces can't be sent there",
            expected="http://host:4318 or grpc://host:4317, or the same with an s",
            found=repr(url),
        )
    return parts.scheme


_outlets: WeakKeyDictionary[TracerProvider, _Outlet] = WeakKeyDictionary()
_sending = threading.Lock()


@cache
def _fork_between_batches() -> None:
    """Registered after gRPC's own handlers, with the exporter, so it runs before them."""
    held = False

    def before() -> None:
        nonlocal held
        held = _sending.acquire(timeout=FORK_S)

    def in_parent() -> None:
        if held:
            _sending.release()

    def in_child() -> None:
        global _sending  # noqa: PLW0603 - if it was not ours, the thread that has it is not here
        _sending = threading.Lock()

    os.register_at_fork(before=before, after_in_parent=in_parent, after_in_child=in_child)


class _Outlet(SpanExporter):
    """Counts what a collector takes and what it doesn't. Each process makes its own exporter and connection."""

    def __init__(self, make: Callable[[], SpanExporter]) -> None:
        self._make = make
        self._exporter: SpanExporter | None = None
        self._begin()

    def _begin(self) -> None:
        self.pid = os.getpid()
        self._exporter = None
        self.handed = self.delivered = self.failed = 0
        self.closing = self._gave_up = self._closed = False

    @property
    def dropped(self) -> int:
        """Spans given up: refused, or pushed out of the queue."""
        undelivered = self.handed - self.delivered
        return undelivered if self._closed else max(self.failed, undelivered - QUEUE_SPANS - BATCH_SPANS)

    def note(self) -> None:
        """A span has been handed over."""
        if self.pid != os.getpid():
            self._begin()
        self.handed += 1

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send a batch; at exit, only until one fails."""
        result = SpanExportResult.FAILURE
        if not self._gave_up:
            with _sending:
                self._exporter = self._exporter or self._make()
                result = self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS:
            self.delivered += len(spans)
        else:
            self.failed += len(spans)
            self._gave_up = self.closing
        return result

    def shutdown(self) -> None:
        """Let go of the connection."""
        self._closed = True
        if self._exporter is not None:
            self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Nothing is kept here."""
        return True


class _Batches(BatchSpanProcessor):
    """The SDK's batch processor, which tells its outlet what is handed over, and when the end begins."""

    def __init__(self, outlet: _Outlet) -> None:
        super().__init__(
            outlet, max_queue_size=QUEUE_SPANS, schedule_delay_millis=1000, max_export_batch_size=BATCH_SPANS
        )
        self.outlet = outlet

    def on_end(self, span: ReadableSpan) -> None:
        """Queue a span."""
        self.outlet.note()
        super().on_end(span)

    def shutdown(self) -> None:
        """Send what is queued, as long as somebody takes it."""
        self.outlet.closing = True
        super().shutdown()  # type: ignore[no-untyped-call]


def outlet_of(provider: TracerProvider) -> _Outlet | None:
    """What counts a provider's spans, if it is one of `otlp_provider`'s."""
    return _outlets.get(provider)
