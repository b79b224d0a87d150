"""The `arena` command: its parts by name, each loaded only when it is asked for.

A part may need libraries of an extra that is not installed, so neither `arena --help` nor any other part may depend on
it. The root therefore knows a name and a sentence for each, and hands the arguments on unread.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Annotated, NamedTuple

# What a bare install of arena lacks: the library that a module belongs to, and the extra that brings it.
LIBRARY_OF_MODULE = {
    "PIL": ("Pillow", "images"),
    "iceoryx2": ("iceoryx2", "bench"),
    "opentelemetry": ("opentelemetry-sdk", "telemetry"),
    "prometheus_client": ("prometheus-client", "telemetry"),
    "rich": ("rich", "telemetry"),
    "typer": ("typer", "telemetry"),
    "zmq": ("pyzmq", "remote"),
}


def in_one_line(missing: ModuleNotFoundError) -> BaseException:
    """Turn a missing library into the line that says which extra brings it; a defect of our own stays what it is."""
    module = (missing.name or "").partition(".")[0]
    if module not in LIBRARY_OF_MODULE:
        return missing
    library, extra = LIBRARY_OF_MODULE[module]
    return SystemExit(f"arena: this needs {library}; run: pip install 'arena-dataplane[{extra}]'")


try:
    import typer
except ModuleNotFoundError as missing:  # every install has the script, and only the extra has what is behind it
    raise in_one_line(missing) from None


class Part(NamedTuple):
    """One subcommand: where it lives, and the line that stands for it in the help of the root."""

    name: str
    attribute: str
    help: str

    def load(self) -> typer.Typer:
        """Import the module; what it exposes is a Typer app, or a function to make one of."""
        part = getattr(import_module(f"telemetry.commands.{self.name}"), self.attribute)
        if isinstance(part, typer.Typer):
            return part
        app = typer.Typer(add_completion=False)
        app.command()(part)
        return app


PARTS = (
    Part("demo", "demo", "Watch a queue work, stall and recover."),
    Part("bench", "app", "Measure the queue on this machine."),
    Part("dashboards", "dashboards", "Write the Grafana dashboards, the alerts and their runbook."),
    Part("top", "top", "Show every queue live: who waits for whom, since when."),
    Part("doctor", "doctor", "Explain each queue in sentences, and check the machine."),
    Part("trace", "trace", "Write what a queue's flight recorders hold as a timeline."),
    Part("export", "export", "Serve the metrics of every queue on this host."),
    Part("gc", "gc", "Remove what dead processes left behind."),
)

app = typer.Typer(name="arena", add_completion=False, no_args_is_help=True)


def _print_version(wanted: bool) -> None:
    if wanted:
        from telemetry import __version__

        typer.echo(f"arena {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """The data plane of an inference engine: watch it work, measure it, clear away what the dead left behind."""


def _hand_on_to(part: Part) -> Callable[[typer.Context], None]:
    def run(context: typer.Context) -> None:
        typer.main.get_command(part.load())(args=context.args, prog_name=context.command_path)

    return run


for part in PARTS:
    app.command(
        part.name,
        help=part.help,
        add_help_option=False,
        context_settings={
            "allow_extra_args": True,
            "allow_interspersed_args": False,
            "ignore_unknown_options": True,
        },
    )(_hand_on_to(part))


def main() -> None:
    """Run the command; a library that is not installed ends in one line that says how to get it."""
    try:
        app()
    except ModuleNotFoundError as missing:
        raise in_one_line(missing) from None
