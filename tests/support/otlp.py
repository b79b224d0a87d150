"""Collectors for traces, as small as they can be and still real: OTLP over HTTP and gRPC, on a free port of loopback.

They keep what they are sent. `Silent` takes connections and never answers, which is the worst that a collector can do.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc

KINDS = {1: "INTERNAL", 2: "SERVER", 3: "CLIENT", 4: "PRODUCER", 5: "CONSUMER"}


@dataclass(frozen=True)
class Received:
    """One span, with the ids as hex and the resource and scope that it came with."""

    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    links: tuple[tuple[str, str], ...]
    resource: dict[str, Any]
    schema_url: str
    error: str = field(default="")


class Receiver:
    """Listens while it is entered. `spans` has everything that came so far."""

    def __init__(self) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.daemon_threads = True
        self._server.received = []  # type: ignore[attr-defined]
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    @property
    def spans(self) -> list[Received]:
        """In the order in which they came."""
        return list(self._server.received)  # type: ignore[attr-defined]

    def __enter__(self) -> Receiver:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.die()

    def die(self) -> None:
        """Stop listening; who connects from now on is refused."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class GrpcReceiver:
    """The same over gRPC."""

    def __init__(self) -> None:
        self.spans: list[Received] = []
        self._server = grpc.server(ThreadPoolExecutor(2))
        otlp_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.url = f"grpc://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def Export(self, request: Any, context: Any) -> Any:
        """What a client calls."""
        self.spans += decoded(request)
        return otlp.ExportTraceServiceResponse()

    def __enter__(self) -> GrpcReceiver:
        self._server.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.stop(None).wait()


class Silent:
    """Accepts, and never answers."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=128)  # the kernel accepts; nobody reads
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._socket.close()


class _Handler(BaseHTTPRequestHandler):
    timeout = 30

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.received += decoded(otlp.ExportTraceServiceRequest.FromString(body))  # type: ignore[attr-defined]
        answer = otlp.ExportTraceServiceResponse().SerializeToString()
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are no news."""


def decoded(request: Any) -> Iterator[Received]:
    """The spans of one request."""
    for of_resource in request.resource_spans:
        resource = _plain(of_resource.resource.attributes)
        for of_scope in of_resource.scope_spans:
            for span in of_scope.spans:
                yield Received(
                    name=span.name,
                    kind=KINDS[span.kind],
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    start_ns=span.start_time_unix_nano,
                    end_ns=span.end_time_unix_nano,
                    attributes=_plain(span.attributes),
                    links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
                    resource=resource,
                    schema_url=of_scope.schema_url,
                    error=span.status.message,
                )


def _plain(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
