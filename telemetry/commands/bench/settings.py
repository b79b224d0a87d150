"""What one run measures, and the line of progress while it does. For commands, and for modules that are run as one."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from typing import Any

COMPARABLE_PAIRS = 7
COMPARABLE_MESSAGES = 5000


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


def note(text: str) -> None:
    """One line of progress that is overwritten by the next, for whoever watches; nothing into a pipe."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()
