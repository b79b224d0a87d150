"""The options that the commands share, and the settings they make of them."""

from __future__ import annotations

from typing import Annotated

import typer

from telemetry.commands.bench.floor import MAX_READERS
from telemetry.commands.bench.settings import COMPARABLE_MESSAGES, COMPARABLE_PAIRS, Settings, note

__all__ = ["COMPARABLE_MESSAGES", "COMPARABLE_PAIRS", "Settings", "note", "settings"]

_QUICK_PAIRS = 3
_QUICK_MESSAGES = 300

Readers = Annotated[str, typer.Option(help="Numbers of readers to measure, separated by commas.")]
Pairs = Annotated[int, typer.Option(min=1, help="Rounds in which the sides alternate.")]
Messages = Annotated[int, typer.Option(min=10, help="Messages in a block; the first 500 (or a tenth) are dropped.")]
Peers = Annotated[bool, typer.Option(help="Measure other libraries in the same run.")]
Quick = Annotated[bool, typer.Option(help="A small run that only shows that everything works.")]
Json = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]
Check = Annotated[bool, typer.Option("--check", help="Exit with 1 when a requirement is missed.")]
Long = Annotated[bool, typer.Option("--long", help="Also the first message after 60 s of idleness.")]


def settings(
    *,
    readers: str = "1",
    pairs: int = COMPARABLE_PAIRS,
    messages: int = COMPARABLE_MESSAGES,
    peers: bool = True,
    quick: bool = False,
    long: bool = False,
) -> Settings:
    """Settings from the command line; `quick` lowers what is larger than it needs."""
    return Settings(
        readers=_reader_counts(readers),
        pairs=min(pairs, _QUICK_PAIRS) if quick else pairs,
        messages=min(messages, _QUICK_MESSAGES) if quick else messages,
        peers=peers,
        quick=quick,
        long=long,
    )


def _reader_counts(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise typer.BadParameter(f"expected numbers such as 1,2,4, found {text!r}", param_hint="--readers") from None
    if counts[0] < 1 or counts[-1] > MAX_READERS:
        raise typer.BadParameter(f"expected 1 to {MAX_READERS} readers, found {text!r}", param_hint="--readers")
    return counts
