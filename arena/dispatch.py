"""Which path serves a tensor: for one operation, by size, and by what each path can tell from the tensor alone.

A *choice* is a path and what it would run. Choices are asked in the plan's order; the first that does not decline runs.
The reasons of the others are what `explain` tells and what is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import torch

from arena import norm
from arena.account import Book
from arena.device import ReducePath
from arena.errors import InvalidArgument
from arena.joining import Joined
from arena.operands import gathered_bytes
from arena.plan import MOVES, PLANNED

FUSED: Final = "all_reduce_rms_norm"
NOT_FUSED: Final = "not_fused"
_KEPT_ROUTES: Final = 1024


@dataclass(frozen=True)
class Decision:
    """Which path would serve a tensor, and why faster ones would not: (path, reason) in the order of the plan.

    Attributes:
        fused: of an operation in two parts, whether one kernel does both.
    """

    path: str
    reasons: tuple[tuple[str, str], ...] = ()
    fused: bool = False

    @property
    def reason(self) -> str:
        """The first of the reasons, if any."""
        return self.reasons[0][1] if self.reasons else ""


class Choice(NamedTuple):
    """A path that may be asked, and what it runs."""

    name: str
    declines: Callable[[torch.Tensor], str | None]
    run: Callable[..., Any]
    fused: bool


class Route:
    """Where tensors of one dtype and size go: choices to ask in turn, after paths that are out of the question."""

    __slots__ = ("choices", "nbytes", "ruled_out")

    def __init__(self, nbytes: int, choices: tuple[Choice, ...], ruled_out: tuple[tuple[str, str], ...]) -> None:
        self.nbytes = nbytes
        self.choices = choices
        self.ruled_out = ruled_out


class Dispatch:
    """Where the tensors of one operation go.

    Attributes:
        operation: which.
        by_rows: whether it goes by the first dimension.
        routes: those found already, by dtype and bytes.
        book: where it is counted, if it is.
    """

    def __init__(self, operation: str, joined: Joined, fallback: str) -> None:
        self.operation = operation
        self.by_rows = operation in MOVES
        self.book: Book | None = None
        self.routes: dict[tuple[torch.dtype, int], Route] = {}
        self._joined = joined
        self._fallback = fallback
        self._planned = operation if operation in PLANNED else "all_reduce"

    def find(self, x: torch.Tensor) -> Route:
        """The same for every tensor of this dtype and size, so found once."""
        joined, nbytes = self._joined, gathered_bytes(x, self.operation, self._joined.world)
        candidates = joined.plans[self._planned].candidates(nbytes)
        paths = [joined.paths[name] for name in candidates if name in joined.paths]
        choices = tuple(choice for path in paths for choice in self._choices(path))
        route = Route(nbytes, choices, tuple(self._ruled_out(candidates, nbytes)))
        if len(self.routes) >= _KEPT_ROUTES:
            self.routes.clear()
        self.routes[x.dtype, x.nbytes] = route
        return route

    def decide(self, x: torch.Tensor) -> Decision:
        """Which path would serve it.

        Raises:
            InvalidArgument: none would.
        """
        route = self.find(x)
        reasons = list(route.ruled_out)
        for choice in route.choices:
            reason = choice.declines(x)
            if reason is None:
                return Decision(choice.name, tuple(reasons), choice.fused)
            reasons.append((choice.name, reason))
        raise self.unserved(x, tuple(reasons))

    def unserved(self, x: torch.Tensor, reasons: tuple[tuple[str, str], ...]) -> InvalidArgument:
        """The error for a tensor that every path has declined."""
        return InvalidArgument(
            f"no path can {self.operation} a tensor of {x.nbytes} bytes of {x.dtype}",
            expected=f"what one of {', '.join(self._joined.paths)} takes",
            found=", ".join(f"{path}: {reason}" for path, reason in reasons),
            remedy="convert it to bfloat16, float16, float32, float64 or int32",
        )

    def _choices(self, path: ReducePath) -> Iterator[Choice]:
        """What is fused comes in one kernel, or else as a sum by this path and the rest in torch."""
        name, operation = path.name, self.operation
        if operation == "all_reduce":
            yield Choice(name, path.declines, path.all_reduce, fused=False)
        elif operation in path.operations:
            declines = partial(path.declines, operation=operation)
            yield Choice(name, declines, getattr(path, operation), operation == FUSED)
        elif operation == FUSED:
            yield Choice(name, lambda x: NOT_FUSED, path.all_reduce, fused=True)
        else:
            yield Choice(name, lambda x: "disabled", path.all_reduce, fused=False)
        if operation == FUSED:
            yield Choice(name, path.declines, partial(norm.after, path.all_reduce), fused=False)

    def _ruled_out(self, candidates: Sequence[str], nbytes: int) -> Iterator[tuple[str, str]]:
        """Candidates that could not be set up; and where only the fallback is left, why the others are none."""
        joined, plan = self._joined, self._joined.plans[self._planned]
        for name in candidates:
            if name in joined.paths:
                break
            yield name, joined.declined[name][0]
        if all(name == self._fallback or name in joined.declined for name in candidates):
            for name in dict.fromkeys((*plan.paths(), *plan.excluded)):
                if name not in candidates:
                    yield name, plan.why_not(name, nbytes)
