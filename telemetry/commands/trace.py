"""`arena trace`: what a queue's flight recorders hold, as a timeline for Perfetto; of the living and of the dead."""

import json
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from telemetry.drawing import svg
from telemetry.perfetto import timeline
from telemetry.reader import Look, Queue, Watcher


def trace(
    queue: Annotated[str, typer.Argument(help="The queue, as `arena top` names it: name, or name@instance.")],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FILE", help="Where to write it; - for stdout. FILE.svg: a picture."),
    ] = Path("timeline.json"),
    run_dir: Annotated[
        Path | None,
        typer.Option(help="The run directory to read; left out, the one that a queue started now would use."),
    ] = None,
) -> None:
    """Write the timeline of a queue: who sent, who took, who blocked.

    It reads probe pages only, so it works while the queue's processes
    hang, and after their death. Open the file in https://ui.perfetto.dev
    or chrome://tracing; it is not sent anywhere.
    """
    with Watcher(run_dir) as watcher:
        look = watcher.look()
        found = _find(look, queue)
        if found is None:
            _fail(_unknown(look, queue))
        for trouble in look.troubles:
            if trouble.path.is_relative_to(found.directory):
                typer.echo(f"arena trace: left out: {trouble.message}", err=True)
        drawn = timeline(found, look.communicators)
        text = svg(drawn) if output.suffix == ".svg" else json.dumps(drawn) + "\n"
    try:
        _write(output, text)
    except OSError as error:
        _fail(f"can't write {output}; found {error.strerror}; name another file with -o")


def _find(look: Look, name: str) -> Queue | None:
    """By label, by `name@instance`, or by a name that only one of them has."""
    for one in look.queues:
        if name in (one.label, one.directory.name):
            return one
    return None


def _unknown(look: Look, name: str) -> str:
    labels = [one.label for one in look.queues]
    if not labels:
        return f"no queue {name!r}; there is none at all, alive or dead"
    nearest = get_close_matches(name, labels, n=1, cutoff=0.0)[0]
    return f"no queue {name!r}; did you mean {nearest!r}? There are: {', '.join(labels)}"


def _write(output: Path, text: str) -> None:
    if output == Path("-"):
        sys.stdout.write(text)
        return
    output.write_text(text)
    where = "" if output.suffix == ".svg" else "; open it in https://ui.perfetto.dev"
    typer.echo(f"wrote {output}{where}")


def _fail(message: str) -> NoReturn:
    typer.echo(f"arena trace: {message}", err=True)
    raise typer.Exit(1)
