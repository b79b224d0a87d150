"""`arena top` on a terminal: look, draw, wait for a key, until somebody has seen enough."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from telemetry.monitor import words
from telemetry.monitor.facts import Moment, Source
from telemetry.monitor.recent import Recent
from telemetry.monitor.screen import Choices, draw, worst_first
from telemetry.monitor.terminal import Terminal

_OBJECTS: Final = 100_000
_MEANS: Final = {"h": "help", "?": "help", " ": "pause", "p": "pause", "s": "sort", "k": "up", "j": "down"}


def watch(source: Source, first: Moment, recent: Recent, choices: Choices, interval_s: float, only: str | None) -> int:
    """Show the source until q or a signal; the number of that signal, or 0.

    Args:
        source: what is looked at.
        first: what it showed already.
        recent: the memory of the looks before.
        choices: what is shown at first.
        interval_s: seconds from look to look.
        only: the one queue that is shown.
    """
    moment, due_s = first, time.monotonic() + interval_s
    gc.freeze()  # what is loaded by now stays, and a look makes many objects and no cycle:
    gc.set_threshold(_OBJECTS)  # to search for cycles again and again was a seventh of what a look costs
    with Terminal() as terminal:
        while not terminal.ended_by:
            terminal.paint(draw(moment, recent, choices, *terminal.size()))
            for key in terminal.wait(due_s - time.monotonic()):
                if key in ("q", "Q"):
                    return 0
                choices = pressed(key, choices, moment, recent)
            if time.monotonic() < due_s:
                continue
            due_s = max(due_s + interval_s, time.monotonic())
            if not choices.paused:
                moment = source.look(_shown(choices, moment, recent)).only(only)
                recent.add(moment)
        return terminal.ended_by


def pressed(key: str, choices: Choices, moment: Moment, recent: Recent) -> Choices:
    """What is shown after a key."""
    changes: dict[str, Callable[[], dict[str, Any]]] = {
        "help": lambda: {"help": True},
        "pause": lambda: {"paused": not choices.paused},
        "sort": lambda: {"sort": choices.sort.next()},
        "up": lambda: {"chosen": _beside(choices, moment, recent, -1)},
        "down": lambda: {"chosen": _beside(choices, moment, recent, 1)},
        "enter": lambda: {"alone": not choices.alone},
        "escape": lambda: {"chosen": None, "alone": False},
    }
    if choices.help:  # any key leaves it
        return replace(choices, help=False)
    meant = _MEANS.get(key, key)
    return replace(choices, **changes[meant]()) if meant in changes else choices


def _beside(choices: Choices, moment: Moment, recent: Recent, step: int) -> str | None:
    """The queue above or below the one that is shown, round and round."""
    labels = worst_first(moment, recent, choices)
    now = next((label for label in _shown(choices, moment, recent) if label in labels), None)
    return labels[(labels.index(now) + step) % len(labels)] if now else None


def _shown(choices: Choices, moment: Moment, recent: Recent) -> list[str]:
    """The queue whose readers are on the screen."""
    worst = words.of_moment(moment, recent)[1]
    return [label for label in (choices.chosen, worst.label if worst else None) if label]
