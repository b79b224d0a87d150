"""`arena bench`: what the data plane costs on this machine, beside its own limits and beside other libraries.

Every requirement is a ratio between two sides that alternate within one run, or a bound that no quiet machine is near.
Noise never fails a run: without `--check` the exit code only says whether the run itself worked.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    """`app`, the command: made when it is asked for, so that the modules here are to be had without typer."""
    if name == "app":
        from telemetry.commands.bench.commands import app

        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
