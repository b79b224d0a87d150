"""`arena gc`: remove what dead processes left in the run directory."""

from pathlib import Path
from typing import Annotated

import typer

from arena import probe


def gc(
    run_dir: Annotated[
        Path | None,
        typer.Option(help="The run directory to clean; left out, the one that a queue started now would use."),
    ] = None,
) -> None:
    """Remove the files of queues whose processes are all dead."""
    removed = probe.collect_garbage(run_dir=run_dir)
    for path in removed:
        typer.echo(f"removed {path}")
    if not removed:
        typer.echo("nothing to remove")
