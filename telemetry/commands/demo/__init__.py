"""`arena demo`: an engine and its workers on this machine, with a fault if you like, and what came of it.

Nothing heavy is imported here: a wrong option is refused at once, and the workers' server starts before this process
imports torch, so that both do it at the same time.
"""

import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from arena.errors import ArenaError
from telemetry.commands.demo.interrupts import Interrupts
from telemetry.commands.demo.options import Options, Refused, rank_and_number
from telemetry.commands.demo.server import WorkerFailed, start_server, stop_server

# Each process that imports torch without NumPy is told so, and nothing here needs NumPy.
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

if TYPE_CHECKING:
    from telemetry.commands.demo.progress import Watch
    from telemetry.commands.demo.results import Result


def demo(  # noqa: PLR0913, PLR0917 - an option each
    readers: Annotated[int, typer.Option(metavar="N", help="Worker processes that read what the engine sends.")] = 2,
    seconds: Annotated[float, typer.Option(help="For how long requests arrive.")] = 10.0,
    seed: Annotated[int, typer.Option(help="Draws the requests; the same seed makes the same ones.")] = 0,
    compare: Annotated[
        bool, typer.Option("--compare", help="Run the same requests with the arena off, then on.")
    ] = False,
    images: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Send the photographs of this directory, not noise. Needs Pillow."),
    ] = None,
    slow_reader: Annotated[
        str | None,
        typer.Option(metavar="RANK:MS", help="Let this worker come back to the queue so much later, each time."),
    ] = None,
    kill_reader: Annotated[
        str | None, typer.Option(metavar="RANK:AT", help="Kill this worker, so many seconds into the run.")
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(metavar="PORT", help="Serve the metrics meanwhile, on loopback; 0 takes a free port."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and no table.")] = False,
) -> None:
    """Watch a queue work, stall and recover.

    An engine serves seeded requests that arrive at random, some with large
    pictures, and broadcasts each step to its workers. They run a small
    tensor-parallel layer and answer over queues of their own. Every answer is
    checked, and what users would have waited for is timed.
    """
    try:
        slow = rank_and_number("--slow-reader", "RANK:MS", slow_reader)
        options = Options(
            readers=readers,
            seconds=seconds,
            seed=seed,
            compare=compare,
            images=images,
            slow_reader=slow and (slow[0], slow[1] / 1e3),
            kill_reader=rank_and_number("--kill-reader", "RANK:AT", kill_reader),
            metrics_port=metrics_port,
        )
        raise typer.Exit(_run(options, as_json=as_json))
    except Refused as refused:
        typer.echo(f"arena demo: {refused}", err=True)
        raise typer.Exit(2) from None
    except (WorkerFailed, ArenaError) as failed:
        typer.echo(f"arena demo: {failed}", err=True)
        raise typer.Exit(1) from None


def _run(options: Options, *, as_json: bool) -> int:
    """Run it and print the result; return the exit code."""
    load = os.getloadavg()[0]
    with Interrupts() as interrupts:
        try:
            results = _results(options, interrupts)
        except KeyboardInterrupt:  # before there was anything to show
            results = []
        finally:
            stop_server()
        if as_json:
            typer.echo(json.dumps(_report(options, results, load, interrupted=interrupts.received is not None)))
        elif results:
            _show(results, load)
    if interrupts.received is not None:
        if not results:
            typer.echo("arena demo: interrupted before anything was measured", err=True)
        return 128 + interrupts.received
    return 0 if all(result.ok for result in results) else 1


def _results(options: Options, interrupts: Interrupts) -> "list[Result]":
    if options.images is not None:
        import_module("PIL")  # to lack it is to be told now, not when the workers have started
    typer.echo("loading torch, here and for the workers", err=True)
    start_server()
    from rich.console import Console

    from telemetry.commands.demo.progress import Watch

    with Watch(Console(stderr=True)) as watch:
        from telemetry.commands.demo.run import run

        with _metrics(options.metrics_port, watch):
            return run(options, watch, interrupts.insist)


@contextmanager
def _metrics(port: int | None, watch: "Watch") -> Iterator[None]:
    if port is None:
        yield
        return
    from telemetry.exporter import start_exporter

    with start_exporter(port, on_trouble=watch.say) as exporter:
        watch.say(f"serving {exporter.url}")
        yield


def _show(results: "list[Result]", load: float) -> None:
    from rich.console import Console

    from telemetry.commands.demo.tables import show

    show(Console(), results, load)


def _report(options: Options, results: "list[Result]", load: float, *, interrupted: bool) -> dict[str, Any]:
    return {
        "seed": options.seed,
        "seconds": options.seconds,
        "readers": options.readers,
        "cores": os.cpu_count(),
        "load_before": load,
        "interrupted": interrupted,
        "ok": bool(results) and all(result.ok for result in results),
        "runs": [result.as_json() for result in results],
    }
