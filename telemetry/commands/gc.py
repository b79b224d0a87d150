"""`arena gc`: remove what dead processes left in the run directory."""

import os
from pathlib import Path
from typing import Annotated

import typer

from arena import probe
from arena.errors import RunDirectoryError


def gc(
    run_dir: Annotated[
        Path | None,
        typer.Option(
            envvar="ARENA_RUN_DIR",
            help="The run directory to clean; left out, the one that a queue started now would use.",
        ),
    ] = None,
) -> None:
    """Remove the files of queues whose processes are all dead."""
    try:
        there = probe.observed_directory(None if run_dir is None else os.fspath(run_dir)).exists()
        if run_dir is not None and not there:  # to look for it is not to make it
            raise RunDirectoryError(f"{run_dir} does not exist")
        removed = probe.collect_garbage(run_dir=run_dir) if there else []
    except RunDirectoryError as error:
        typer.echo(f"arena gc: {error}", err=True)
        raise typer.Exit(1) from None
    for path in removed:
        typer.echo(f"removed {path}")
    if not removed:
        typer.echo("nothing to remove")
