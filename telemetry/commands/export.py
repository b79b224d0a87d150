"""`arena export`: the metrics of every queue on this host, over HTTP or into a file, until it is told to end."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from prometheus_client import CollectorRegistry, generate_latest

from arena.errors import ArenaError
from telemetry.exporter import LOOPBACK, PORT, register, start_exporter, write_textfile

EVERY_S = 5.0  # how often a textfile is written anew; node_exporter is usually scraped less often


def export(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where to serve; 0 takes a free port.")] = PORT,
    bind: Annotated[str, typer.Option(help="The address to listen on; whoever reaches it can read.")] = LOOPBACK,
    textfile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Serve nothing; write this file for node_exporter, every 5 s."),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Serve nothing; print the metrics (or write the textfile) once and end.")
    ] = False,
    otlp: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Send the traces of sampled messages there, too: http://… or grpc://…"),
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(help="The run directory to read; left out, the one that a queue started now would use."),
    ] = None,
) -> None:
    """Serve the metrics of every queue of this host at /metrics.

    It reads probe pages only, so it answers while a queue's processes
    hang, and after their death. A page that can't be read is left out,
    counted, and named here once.
    """
    try:
        with _sending_traces(otlp, run_dir):
            if textfile is not None:
                _write(textfile, run_dir, once=once)
            elif once:
                sys.stdout.write(generate_latest(_registry(run_dir)).decode())
            else:
                _serve(port, bind, run_dir)
    except ArenaError as failed:
        typer.echo(f"arena export: {failed}", err=True)
        raise typer.Exit(1) from None


@contextmanager
def _sending_traces(url: str | None, run_dir: Path | None) -> Iterator[None]:
    """Make spans of what the pages hold, meanwhile; at the end say what became of them."""
    if url is None:
        yield
        return
    from telemetry.traces import HostTraces, otlp_provider

    provider = otlp_provider(url)
    with HostTraces(provider, run_dir) as traces:
        yield
    provider.shutdown()
    made = traces.counts()
    _complain(f"{made.spans} spans made, {made.delivered} delivered, {made.dropped} dropped")


def _serve(port: int, bind: str, run_dir: Path | None) -> None:
    with _Ending() as ending, start_exporter(port, bind, run_dir, on_trouble=_complain) as exporter:
        typer.echo(f"serving {exporter.url}")
        ending.wait()


def _write(textfile: Path, run_dir: Path | None, *, once: bool) -> None:
    registry = _registry(run_dir)
    with _Ending() as ending:
        write_textfile(textfile, registry)
        while not once and not ending.wait(EVERY_S):
            write_textfile(textfile, registry)


def _registry(run_dir: Path | None) -> CollectorRegistry:
    registry = CollectorRegistry()
    register(registry, run_dir=run_dir, on_trouble=_complain)
    return registry


def _complain(message: str) -> None:
    typer.echo(f"arena export: {message}", err=True)


class _Ending:
    """Waits for ctrl-C or SIGTERM, which end the command in order: its exit code is 0."""

    def __enter__(self) -> "_Ending":
        self._asked = threading.Event()
        self._before: dict[signal.Signals, Callable[..., object] | int | None] = {}
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, lambda *_: self._asked.set())
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def wait(self, timeout_s: float | None = None) -> bool:
        return self._asked.wait(timeout_s)
