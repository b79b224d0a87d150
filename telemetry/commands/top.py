"""`arena top`: who holds whom, live on the terminal, once on paper, or as JSON for a program."""

import json
import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from arena.errors import ArenaError

if TYPE_CHECKING:
    from telemetry.monitor.facts import Moment, Source
    from telemetry.monitor.recent import Recent
    from telemetry.monitor.screen import Choices

EVERY_S = 0.5
EVERY_REMOTE_S = 2.0  # an exporter's answer is a thousand times as long as what a page has to say
PAPER_COLUMNS = 140


def top(
    queue: Annotated[str | None, typer.Option(metavar="NAME", help="Show this queue alone.")] = None,
    interval: Annotated[
        float | None, typer.Option(metavar="S", help="Seconds from look to look; 0.5, and 2 with --from.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print it once and end.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object; with --interval, one a line, until ended.")
    ] = False,
    ascii_only: Annotated[bool, typer.Option("--ascii", help="Draw with ASCII characters alone.")] = False,
    url: Annotated[
        str | None,
        typer.Option("--from", metavar="URL", help="Another host's queues: what `arena export` serves there."),
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(help="The run directory to read; left out, the one that a queue started now would use."),
    ] = None,
) -> None:
    """Show every queue of this host: who waits for whom, since when.

    The first line is the verdict. It reads probe pages only, so it
    shows what hangs, and what is dead. Without a terminal it prints
    what there is once, without colours. Press h for the keys.
    """
    from telemetry.commands.sources import Refused

    try:
        every_s = _checked(interval, url)
        source = _source(url, run_dir)
        try:
            asked = _Asked(queue, every_s, once=once or as_json, stream=as_json and interval is not None and not once)
            code = _show(source, asked, as_json=as_json, ascii_only=ascii_only)
        finally:
            source.close()
    except Refused as refused:
        _end(str(refused), refused.code)
    except ArenaError as failed:
        _end(str(failed), 1)
    raise typer.Exit(code)


@dataclass(frozen=True)
class _Asked:
    queue: str | None
    every_s: float
    once: bool
    stream: bool


def _checked(interval: float | None, url: str | None) -> float:
    from telemetry.commands.sources import Refused

    if interval is None:
        return EVERY_S if url is None else EVERY_REMOTE_S
    if not 0.05 <= interval <= 3600:
        raise Refused(f"--interval takes seconds from 0.05 to 3600, not {interval:g}", 2)
    return interval


def _source(url: str | None, run_dir: Path | None) -> "Source":
    if url is None:
        from telemetry.monitor.local import Pages

        return Pages(run_dir)
    from telemetry.commands.sources import Refused
    from telemetry.monitor.remote import Metrics

    try:
        return Metrics(url)
    except ValueError:
        raise Refused(f"--from takes a URL such as http://host:9464/metrics, not {url!r}", 2) from None


def _show(source: "Source", asked: _Asked, *, as_json: bool, ascii_only: bool) -> int:
    from telemetry.commands.sources import Refused, check_name, is_terminal, settled, speaks_unicode
    from telemetry.monitor.recent import Recent
    from telemetry.monitor.screen import Choices

    recent = Recent()
    choices = Choices(ascii=ascii_only or not speaks_unicode(), note=f"every {asked.every_s:g} s")
    moment = source.look()
    if moment.troubles and not moment.queues and not moment.groups and not as_json:
        raise Refused(moment.troubles[0], 1)
    check_name(moment, asked.queue)
    moment = moment.only(asked.queue)
    if asked.stream:
        return _stream(source, moment, recent, asked)
    if not asked.once and is_terminal():
        recent.add(moment)
        return _live(source, moment, recent, choices, asked)
    moment = settled(source, moment, recent, asked.queue)
    if as_json:
        _print_json(moment, recent)
    else:
        _print(moment, recent, choices)
    return 0


def _live(source: "Source", first: "Moment", recent: "Recent", choices: "Choices", asked: _Asked) -> int:
    from telemetry.commands.sources import Refused
    from telemetry.monitor.live import watch
    from telemetry.monitor.screen import NARROWEST

    columns = os.get_terminal_size(sys.stdout.fileno()).columns
    if columns < NARROWEST:
        raise Refused(f"needs {NARROWEST} columns, and this terminal has {columns}; widen it, or use --once", 1)
    ended_by = watch(source, first, recent, choices, asked.every_s, asked.queue)
    return 128 + ended_by if ended_by else 0


def _stream(source: "Source", first: "Moment", recent: "Recent", asked: _Asked) -> int:
    """One object a line, until ctrl-C, SIGTERM, or until whoever reads it has seen enough."""
    moment = first
    try:
        while True:
            recent.add(moment)
            _print_json(moment, recent)
            time.sleep(asked.every_s)
            moment = source.look().only(asked.queue)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return 0


def _print_json(moment: "Moment", recent: "Recent") -> None:
    from telemetry.monitor.report import as_json

    print(json.dumps(as_json(moment, recent)), flush=True)


def _print(moment: "Moment", recent: "Recent", choices: "Choices") -> None:
    from telemetry.commands.sources import Refused, is_terminal, print_lines
    from telemetry.monitor.screen import snapshot

    if not moment.queues and not moment.groups:
        raise Refused(f"no queue in {moment.source}", 1)
    paper = PAPER_COLUMNS if not is_terminal() and "COLUMNS" not in os.environ else shutil.get_terminal_size().columns
    print_lines(snapshot(moment, recent, choices, paper))


def _end(sentence: str, code: int) -> NoReturn:
    typer.echo(f"arena top: {sentence}", err=True)
    raise typer.Exit(code)
