"""The options that the commands share, and the settings they make of them."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from telemetry.commands.bench.floor import MAX_READERS

COMPARABLE_PAIRS = 7
COMPARABLE_MESSAGES = 5000
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


@dataclass(frozen=True)
class Settings:
    """What one run measures."""

    readers: tuple[int, ...] = (1, 2, 4)
    pairs: int = COMPARABLE_PAIRS
    messages: int = COMPARABLE_MESSAGES
    peers: bool = True
    quick: bool = False
    long: bool = False

    @property
    def comparable(self) -> bool:
        """Only a full run may be held against a requirement or against another run."""
        return not self.quick and self.pairs >= COMPARABLE_PAIRS and self.messages >= COMPARABLE_MESSAGES

    @property
    def dropped(self) -> int:
        """Messages at the start of a block that are not counted: caches, page tables and spins find their pace."""
        return min(500, self.messages // 10)

    @property
    def block_deadline_s(self) -> float:
        """Far above what any block takes; only a hang reaches it."""
        return 120 + 0.005 * self.messages * max(self.readers)

    def as_json(self) -> dict[str, Any]:
        """The settings as they go into the report."""
        return {**asdict(self), "readers": list(self.readers)}


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


def note(text: str) -> None:
    """One line of progress that is overwritten by the next, for whoever watches; nothing into a pipe."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()


def _reader_counts(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise typer.BadParameter(f"expected numbers such as 1,2,4, found {text!r}", param_hint="--readers") from None
    if counts[0] < 1 or counts[-1] > MAX_READERS:
        raise typer.BadParameter(f"expected 1 to {MAX_READERS} readers, found {text!r}", param_hint="--readers")
    return counts
