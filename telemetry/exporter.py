"""The metrics over HTTP, or in a file: for a process of its own (`arena export`), or inside one that you have.

It reads probe pages and nothing else, so it answers while the queue's processes hang, and after their death. It listens
on loopback unless told otherwise, and serves `/metrics` alone.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from socketserver import TCPServer, ThreadingMixIn
from types import TracebackType
from typing import Any, Final
from weakref import WeakSet
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

try:
    from prometheus_client import CollectorRegistry, make_wsgi_app, write_to_textfile
except ModuleNotFoundError as missing:
    sentence = "telemetry's exporter needs prometheus-client; run: pip install 'arena-dataplane[telemetry]'"
    raise ModuleNotFoundError(sentence, name=missing.name) from None

from arena.probe import ArenaError
from telemetry.metrics import ArenaCollector
from telemetry.reader import Watcher

PORT: Final = 9464
"""Where OpenTelemetry's Prometheus exporters listen by default too."""

LOOPBACK: Final = "127.0.0.1"

MAX_CLIENTS: Final = 64
"""Connections at a time; one that says nothing ends after `_CLIENT_TIMEOUT_S`."""

_CLIENT_TIMEOUT_S: Final = 10.0

RunDir = str | os.PathLike[str] | None
OnTrouble = Callable[[str], None]


class ExportFailed(ArenaError, OSError):
    """The metrics can't be served, or written, where they should be."""


class AlreadyRegistered(ArenaError, ValueError):
    """The registry has the metrics already."""


def _ignore(message: str) -> None:
    """Troubles are counted in `arena_exporter_page_errors_total` in any case."""


def register(
    registry: CollectorRegistry | None = None, *, run_dir: RunDir = None, on_trouble: OnTrouble = _ignore
) -> ArenaCollector:
    """Add the metrics to a registry that somebody else serves: inside vLLM's own process, the default one.

    Args:
        registry: the default registry of prometheus_client if None.
        run_dir: the run directory; the one that a queue made here would use by default.
        on_trouble: gets a sentence for each thing that can't be read, once.

    Returns:
        What to give to `registry.unregister` to take them out again.

    Raises:
        AlreadyRegistered: they are in it already.
    """
    from prometheus_client import REGISTRY

    collector = ArenaCollector(Watcher(run_dir), on_trouble)
    try:
        (REGISTRY if registry is None else registry).register(collector)
    except ValueError as duplicates:  # whose text is the names of all metrics
        raise AlreadyRegistered(
            "the registry has metrics of these names already",
            expected="to be registered once",
            remedy="first unregister what the earlier `register` returned",
        ) from duplicates
    return collector


class Exporter:
    """Serves `/metrics` from a thread of this process until it is closed. A context manager; see `start_exporter`."""

    def __init__(self, port: int, bind: str, run_dir: RunDir, on_trouble: OnTrouble) -> None:
        registry = CollectorRegistry()
        self._server = _listen(bind, port, _metrics_only(make_wsgi_app(registry)))
        self._inherited = False
        self._collector = register(registry, run_dir=run_dir, on_trouble=on_trouble)
        self.port: int = self._server.server_port
        self.url = f"http://{f'[{bind}]' if ':' in bind else bind}:{self.port}/metrics"
        self._thread = threading.Thread(target=self._server.serve_forever, name="arena-exporter", daemon=True)
        self._thread.start()
        _EXPORTERS.add(self)

    def __enter__(self) -> Exporter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Stop serving, when the scrape under way is over."""
        if self._inherited:
            return  # no thread to wait for, and nothing that is this process's
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._collector.close()

    def let_go(self) -> None:
        """In a forked child, which has no thread to serve with: its copy of the socket would keep the port taken."""
        self._server.socket.close()
        self._inherited = True


_EXPORTERS: Final[WeakSet[Exporter]] = WeakSet()


def _let_go_of_all() -> None:
    for exporter in list(_EXPORTERS):
        exporter.let_go()


os.register_at_fork(after_in_child=_let_go_of_all)


def start_exporter(
    port: int = PORT, bind: str = LOOPBACK, run_dir: RunDir = None, *, on_trouble: OnTrouble = _ignore
) -> Exporter:
    """Serve the metrics of every queue of the run directory from a thread of this process.

    Args:
        port: 0 takes a free one; `Exporter.port` tells which.
        bind: the address to listen on. Whoever reaches it can read the metrics.
        run_dir: the run directory; the one that a queue made here would use by default.
        on_trouble: gets a sentence for each thing that can't be read, once.

    Raises:
        ExportFailed: the port is taken, or the address is not one of this host's.
    """
    return Exporter(port, bind, run_dir, on_trouble)


def write_textfile(path: Path, registry: CollectorRegistry) -> None:
    """Write the metrics where node_exporter's textfile collector finds them: whole, or not at all.

    Raises:
        ExportFailed: the file can't be written.
    """
    try:
        write_to_textfile(os.fspath(path), registry)
    except OSError as error:
        raise ExportFailed(
            f"can't write {path}",
            expected="a directory that this user may write to",
            found=error.strerror or str(error),
            remedy="name another file with --textfile",
        ) from error


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def server_bind(self) -> None:
        """Without the look-up of this host's name, which can take as long as a name server likes."""
        self._free = threading.BoundedSemaphore(MAX_CLIENTS)
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve it from a thread, or hang up if there are too many: they must not cost their host its threads."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve one client."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = _CLIENT_TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are no news."""


def _listen(bind: str, port: int, app: Any) -> WSGIServer:
    if not bind:  # an unset variable of a script, and to the system every address
        raise ExportFailed(
            "no address to serve metrics at", expected="an address of this host", remedy="0.0.0.0 is all of them"
        )
    try:
        return make_server(bind, port, app, _Server6 if ":" in bind else _Server, _Handler)
    except (OSError, OverflowError) as error:
        raise ExportFailed(
            f"can't serve metrics at {bind} port {port}",
            expected="a free port of an address of this host",
            found=getattr(error, "strerror", None) or str(error),
            remedy="another exporter may run there already; choose another --port (0: any free one) or --bind",
        ) from error


def _metrics_only(serve: Any) -> Any:
    def app(environ: dict[str, Any], start_response: Any) -> Any:
        if environ["PATH_INFO"] == "/metrics":
            return serve(environ, start_response)
        start_response("404 Not Found", [("Content-Type", "text/plain; charset=utf-8")])
        return [b"The metrics are at /metrics.\n"]

    return app
