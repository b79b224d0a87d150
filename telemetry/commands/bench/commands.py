"""The subcommands of `arena bench`."""

from typing import Annotated

import typer

from telemetry.commands.bench import allreduce as _allreduce
from telemetry.commands.bench import device as _device
from telemetry.commands.bench import idle as _idle
from telemetry.commands.bench import options
from telemetry.commands.bench import queue as _queue
from telemetry.commands.bench import remote as _remote
from telemetry.commands.bench import scrape as _scrape
from telemetry.commands.bench import tensor as _tensor
from telemetry.commands.bench import trace as _trace
from telemetry.commands.bench.report import run

app = typer.Typer(help="Measure the data plane on this machine.", no_args_is_help=True, add_completion=False)
app.command("queue")(_queue.command)
app.command("tensor")(_tensor.command)
app.command("idle")(_idle.command)
app.command("trace")(_trace.command)
app.command("allreduce")(_allreduce.command)
app.command("scrape")(_scrape.command)
app.command("remote")(_remote.command)


@app.command("device")
def _to_device(
    device: Annotated[str, typer.Option(help=f"{' or '.join(_device.DEVICES)}.")] = "cuda",
    pairs: options.Pairs = options.COMPARABLE_PAIRS,
    quick: options.Quick = False,
    as_json: options.Json = False,
    check: options.Check = False,
) -> None:
    """A tensor to a reader's device, each way there is, and when its block comes back."""
    if device not in _device.DEVICES:
        raise typer.BadParameter(f"expected {' or '.join(_device.DEVICES)}, found {device!r}", param_hint="--device")
    chosen = _device.settings(device=device, pairs=pairs, quick=quick)
    run(_device.measured, chosen, as_json=as_json, check=check)
