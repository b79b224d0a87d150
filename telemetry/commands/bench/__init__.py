"""`arena bench`: what the data plane costs on this machine, beside its own limits and beside other libraries.

Every requirement is a ratio between two sides that alternate within one run, or a bound that no quiet machine is near.
Noise never fails a run: without `--check` the exit code only says whether the run itself worked.
"""

import typer

from telemetry.commands.bench import allreduce as _allreduce
from telemetry.commands.bench import idle as _idle
from telemetry.commands.bench import queue as _queue
from telemetry.commands.bench import scrape as _scrape
from telemetry.commands.bench import tensor as _tensor
from telemetry.commands.bench import trace as _trace

app = typer.Typer(help="Measure the data plane on this machine.", no_args_is_help=True, add_completion=False)
app.command("queue")(_queue.command)
app.command("tensor")(_tensor.command)
app.command("idle")(_idle.command)
app.command("trace")(_trace.command)
app.command("allreduce")(_allreduce.command)
app.command("scrape")(_scrape.command)
