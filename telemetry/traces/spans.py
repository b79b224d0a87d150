"""From messages to spans: names, kinds, attributes and times. Semantic conventions for messaging, and our own words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final
from zlib import crc32

from opentelemetry import trace as api
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, Tracer, TracerProvider
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from arena.probe import ProbeReader, Role
from telemetry.messages import Message, Part, Sent, Taken, Work
from telemetry.traces.ids import SAMPLED, Relation, derived_id, ids_of, process_ids

SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.44.0"
"""The version of the semantic conventions that names and attributes follow."""
_UNSET: Final = api.Status(api.StatusCode.UNSET)


class Spans:
    """Makes the spans of messages, with the ids that follow from their contexts, for a provider's processors.

    They are over when they are made, so they are made finished: a processor's `on_end` sees them, its `on_start` does
    not. That takes a sixth of the time that starting and ending them by the tracer does.
    """

    def __init__(self, provider: TracerProvider, relation: Relation) -> None:
        self._provider = provider
        self._relation: Relation = relation

    def maker(self, page: ProbeReader) -> Callable[[Message, int], int]:
        """What makes the spans of one page's messages: given one and its clock's offset, returns how many it made."""
        endpoint = _Endpoint(self._provider, page)

        def make(message: Message, clock: int) -> int:
            if message.trace == (0, 0, 0):
                return 0
            if isinstance(message, Sent):
                return endpoint.sent(message, clock)
            if isinstance(message, Work):
                return endpoint.worked(message, clock, self._relation)
            return endpoint.taken(message, clock, self._relation)

        return make


class _Endpoint:
    """Makes the spans of one page, in the name of the process that owns it."""

    def __init__(self, provider: TracerProvider, page: ProbeReader) -> None:
        self._queue = str(page.about.get("queue", ""))
        self._rank = page.rank
        self._processor = _processor_of(provider)
        self._scope = InstrumentationScope("arena", _version(), SCHEMA_URL)
        self._resource = provider.resource.merge(Resource({"process.pid": page.owner.pid}))
        self._salt = crc32(str(page.about.get("instance", "")).encode())
        if page.role is Role.COMMUNICATOR:
            self._brief: dict[str, Any] = {
                "messaging.system": "arena",
                "messaging.arena.group": str(page.about.get("group", "")),
                "messaging.arena.rank": page.rank,
                "process.pid": page.owner.pid,
            }
            return
        client = f"{self._queue}/writer" if page.role is Role.WRITER else f"{self._queue}/reader-{page.rank}"
        # Encoding an attribute takes as long as all else of a small span: inner ones have what they are found by.
        self._brief = {
            "messaging.system": "arena",
            "messaging.destination.name": self._queue,
            "process.pid": page.owner.pid,
        }
        self._common: dict[str, Any] = self._brief | {
            "messaging.client.id": client,
            "messaging.arena.instance": str(page.about.get("instance", "")),
        }

    def sent(self, message: Sent, clock: int) -> int:
        trace_id, span_id = ids_of(message.trace)
        slot_wait_ns = sum(part.ended_ns - part.began_ns for part in message.waits)
        attributes = self._attributes("send", message) | {
            "messaging.message.body.size": message.nbytes,
            "messaging.arena.path": message.path,
            "messaging.arena.slot_wait_ns": slot_wait_ns,
            "messaging.arena.slow": not message.encode_ns and not message.error,
        }
        if message.waits:
            attributes["messaging.arena.blame_reader"] = message.waits[-1].number
        children = list(_children_of_send(message))
        for index, (name, part, further) in enumerate(children):
            self._child(name, (trace_id, span_id, index), part, further, clock)
        self._span(
            f"send {self._queue}",
            (trace_id, span_id, message.parent),
            api.SpanKind.PRODUCER,
            attributes,
            (message.began_ns + clock, message.ended_ns + clock),
            error=message.error,
        )
        return 1 + len(children)

    def taken(self, message: Taken, clock: int, relation: Relation) -> int:
        origin = api.SpanContext(*ids_of(message.trace), is_remote=True, trace_flags=SAMPLED)
        trace_id, span_id = process_ids(message.trace, self._rank, relation)
        attributes = self._attributes("process", message) | {
            "messaging.arena.reader_rank": self._rank,
            "messaging.arena.queue_delay_ns": message.received_ns - message.published_ns,
            "messaging.arena.hold_ns": message.released_ns - message.received_ns,
        }
        children = list(_children_of_process(message))
        for index, (name, part, further) in enumerate(children):
            self._child(name, (trace_id, span_id, index), part, further, clock)
        ended_ns = message.done_ns or message.released_ns
        self._span(
            f"process {self._queue}",
            (trace_id, span_id, 0 if relation == "link" else origin.span_id),
            api.SpanKind.CONSUMER,
            attributes,
            (message.received_ns + clock, ended_ns + clock),
            links=() if relation == "parent" else (api.Link(origin),),
            error=message.error or ("" if message.done_ns else "never_back"),
        )
        return 1 + len(children)

    def worked(self, work: Work, clock: int, relation: Relation) -> int:
        """The ids of its span follow from the page that has it, too: a message may meet several communicators."""
        trace_id, parent = process_ids(work.trace, self._rank if work.reader is None else work.reader, relation)
        span_id = derived_id(derived_id(parent, self._salt), (1 << 32) + work.number)
        attributes = self._brief | _of_work(work)
        times_ns = work.part.began_ns + clock, work.part.ended_ns + clock
        self._span(work.name, (trace_id, span_id, parent), api.SpanKind.INTERNAL, attributes, times_ns)
        return 1

    def _attributes(self, operation: str, message: Sent | Taken) -> dict[str, Any]:
        return {
            **self._common,
            "messaging.operation.name": operation,
            "messaging.operation.type": operation,
            "messaging.message.id": str(message.sequence),
        }

    def _child(self, name: str, of: tuple[int, int, int], part: Part, attributes: dict[str, Any], clock: int) -> None:
        trace_id, parent, index = of
        kind = api.SpanKind.CLIENT if name == "receive" else api.SpanKind.INTERNAL
        ids = trace_id, derived_id(parent, 1000 + index), parent
        common = self._common if kind is api.SpanKind.CLIENT else self._brief
        self._span(name, ids, kind, common | attributes, (part.began_ns + clock, part.ended_ns + clock))

    def _span(
        self,
        name: str,
        ids: tuple[int, int, int],
        kind: api.SpanKind,
        attributes: dict[str, Any],
        times_ns: tuple[int, int],
        links: Sequence[api.Link] = (),
        error: str = "",
    ) -> None:
        trace_id, span_id, parent = ids
        if error:
            attributes["error.type"] = error
        if self._processor is None:
            return
        self._processor.on_end(
            ReadableSpan(
                name=name,
                context=api.SpanContext(trace_id, span_id, is_remote=False, trace_flags=SAMPLED),
                parent=api.SpanContext(trace_id, parent, is_remote=False, trace_flags=SAMPLED) if parent else None,
                resource=self._resource,
                attributes=attributes,
                links=links,
                kind=kind,
                instrumentation_scope=self._scope,
                status=api.Status(api.StatusCode.ERROR, error) if error else _UNSET,
                start_time=times_ns[0],
                end_time=times_ns[1],
            )
        )


def _children_of_send(message: Sent) -> Iterator[tuple[str, Part, dict[str, Any]]]:
    if message.encode_ns:
        yield "serialize", Part(message.began_ns, message.began_ns + message.encode_ns, 0), {}
    for wait in message.waits:
        words = {"messaging.arena.blame_reader": wait.number, "messaging.arena.relation": "awaiting_readers"}
        yield "wait_for_slot", wait, words
    for part in message.copies:
        yield "memcpy", part, {"messaging.arena.bytes": part.number}


def _children_of_process(message: Taken) -> Iterator[tuple[str, Part, dict[str, Any]]]:
    operation = {"messaging.operation.name": "receive", "messaging.operation.type": "receive"}
    yield "receive", Part(message.received_ns, message.released_ns, 0), operation
    if message.decode_ns:
        yield "deserialize", Part(message.released_ns - message.decode_ns, message.released_ns, 0), {}


def _of_work(work: Work) -> dict[str, Any]:
    if work.name == "dma_gate":
        return {"messaging.message.id": str(work.sequence)}
    how = "messaging.arena.copy_mode" if work.name == "h2d" else "messaging.arena.path"
    return {"messaging.arena.bytes": work.part.number, how: work.how}


def _processor_of(provider: TracerProvider) -> SpanProcessor | None:
    """What the provider's spans go through, also those that are added to it later; None where OTEL_SDK_DISABLED is."""
    tracer = provider.get_tracer("arena")
    return tracer.span_processor if isinstance(tracer, Tracer) else None


def _version() -> str:
    try:
        return version("arena-dataplane")
    except PackageNotFoundError:  # run from a checkout
        return "unknown"
