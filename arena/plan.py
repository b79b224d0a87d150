"""Which path serves how many bytes: a pure table, its defaults, and its tuned copies on disk.

A plan is rows: "up to so many bytes (that many included), try these paths, in this order". It knows nothing of ranks,
so all ranks that have the same plan make the same decision. Defaults are what others ship (ceilings of the vLLM and
SGLang tables, in `CUSTOM_CEILINGS` and `SYMMETRIC_CEILINGS`) where nothing better has been measured here; `autotune`
replaces them by measurement.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from arena.device import Traits
from arena.errors import InvalidArgument
from arena.probe.metrics import ALLREDUCE_PATHS, DECLINE_REASONS

KIB: Final = 1 << 10
MIB: Final = 1 << 20
FORMAT: Final = 1
MAX_WORLD: Final = 8
LARGEST: Final = 1 << 40
"""Stands for "no ceiling": more bytes than any tensor has."""

CUSTOM_CEILINGS: Final[Mapping[tuple[int, int], Mapping[int, int]]] = {
    (9, 0): {2: 64 * MIB, 4: 32 * MIB, 6: 512 * KIB, 8: 256 * KIB},
    (10, 0): {2: 2 * MIB, 4: 2 * MIB, 6: MIB, 8: MIB},
    (10, 3): {2: 4 * MIB, 4: 4 * MIB, 6: 8 * MIB, 8: 4 * MIB},
}
SYMMETRIC_CEILINGS: Final[Mapping[tuple[int, int], Mapping[int, int]]] = {
    (9, 0): {2: 64 * MIB, 4: 32 * MIB, 6: 64 * MIB, 8: 64 * MIB},
    (10, 0): {2: 8 * MIB, 4: 32 * MIB, 6: 128 * MIB, 8: 128 * MIB},
    (10, 3): {2: 4 * MIB, 4: 32 * MIB, 6: 32 * MIB, 8: 64 * MIB},
}
MULTIMEM_WORLDS: Final[Mapping[tuple[int, int], frozenset[int]]] = {
    (9, 0): frozenset({4, 6, 8}),
    (10, 0): frozenset({6, 8}),
    (10, 3): frozenset({6, 8}),
}
ONE_SHOT_CEILINGS: Final[Mapping[int, int]] = {2: LARGEST, 4: 384 * KIB, 6: 128 * KIB, 8: 128 * KIB}
"""Where the second trip of a two-shot begins to pay, on GPUs; at two ranks never."""

CPU_ONE_SHOT_CEILINGS: Final[Mapping[int, int]] = {2: 128 * KIB, 4: 64 * KIB, 6: 32 * KIB, 8: 32 * KIB}
"""Where adding up becomes dearer than a second wait."""

GPU_MOVE_CEILING: Final = 8 * MIB
"""Up to here the own kernels gather, scatter and exchange. An assumption: nothing has been measured on GPUs yet."""

MOVES: Final = ("all_gather", "reduce_scatter", "all_to_all")
PLANNED: Final = ("all_reduce", *MOVES)
"""The operations that have a plan of their own. What is fused onto one goes by its plan."""


@dataclass(frozen=True)
class Row:
    """Up to `up_to` bytes, try `paths` in this order. The last row is for any size, with `up_to` at `LARGEST`."""

    up_to: int
    paths: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """Rows by size, and why other paths are in none of them.

    Attributes:
        rows: in rising order of size; the last one is for `LARGEST`.
        excluded: paths that no row has, with a reason out of `DECLINE_REASONS`.
        origin: where it comes from, in words.
    """

    rows: tuple[Row, ...]
    excluded: Mapping[str, str] = field(default_factory=dict)
    origin: str = "given"

    def __post_init__(self) -> None:
        sizes = [row.up_to for row in self.rows]
        named = {path for row in self.rows for path in row.paths} | set(self.excluded)
        trouble = ""
        if not self.rows or sizes != sorted(set(sizes)) or sizes[0] < 0 or sizes[-1] != LARGEST:
            trouble = f"rows up to {sizes} bytes"
        elif empty := [row.up_to for row in self.rows if not row.paths]:
            trouble = f"no path for up to {empty[0]} bytes"
        elif unknown := named - set(ALLREDUCE_PATHS):
            trouble = f"unknown paths {sorted(unknown)}"
        elif unknown := set(self.excluded.values()) - set(DECLINE_REASONS):
            trouble = f"unknown reasons {sorted(unknown)}"
        if trouble:
            raise InvalidArgument(
                "this is no plan",
                expected=f"rows of rising size, the last up to {LARGEST}, of paths such as {ALLREDUCE_PATHS[0]!r}",
                found=trouble,
            )

    def candidates(self, nbytes: int) -> tuple[str, ...]:
        """The paths for a tensor of `nbytes`, best first. A size equal to a row's ceiling belongs to that row."""
        for row in self.rows:
            if nbytes <= row.up_to:
                return row.paths
        return self.rows[-1].paths

    def ceiling(self, path: str) -> int:
        """The most bytes that the plan gives to `path`; 0 if none."""
        return max((row.up_to for row in self.rows if path in row.paths), default=0)

    def paths(self) -> tuple[str, ...]:
        """Every path that the plan has a use for, in order of first mention."""
        return tuple(dict.fromkeys(path for row in self.rows for path in row.paths))

    def why_not(self, path: str, nbytes: int) -> str:
        """Why `path` is no candidate for so many bytes."""
        if path in self.excluded:
            return self.excluded[path]
        return "too_large" if path in self.paths() else "disabled"


# ── defaults ─────────────────────────────────────────────────────────────────────────────────────
def default_plan(traits: Traits, world: int, operation: str = "all_reduce") -> Plan:
    """The plan of an operation that needs no measurement.

    Worlds that the tables lack (3, 5, 7) go by the next larger one. A chip that they lack gets the library alone.
    """
    fast, fallback = (_CPU_PATHS, "gloo") if traits.kind == "cpu" else (_GPU_PATHS, "nccl")
    if operation in MOVES:
        fast = fast[:1]
    if not 2 <= world <= MAX_WORLD:
        return Plan((Row(LARGEST, (fallback,)),), dict.fromkeys(fast, "world_size"), "default")
    if traits.kind == "cpu":
        return Plan((Row(LARGEST, (*fast, fallback)),), origin="default") if operation in MOVES else _cpu_plan(world)
    if traits.capability not in CUSTOM_CEILINGS:
        return Plan((Row(LARGEST, (fallback,)),), dict.fromkeys(fast, "capability"), "default")
    if operation in MOVES:
        return Plan((Row(GPU_MOVE_CEILING, ("one_shot", "nccl")), Row(LARGEST, ("nccl",))), origin="default")
    return _gpu_plan(traits.capability, world)


_CPU_PATHS: Final[tuple[str, ...]] = ("cpu_one_shot", "cpu_two_shot")
_GPU_PATHS: Final[tuple[str, ...]] = (
    "one_shot",
    "two_shot",
    "symm_mem_one_shot",
    "symm_mem_two_shot",
    "symm_mem_multimem",
)
MOVING_PATHS: Final = ("one_shot", "cpu_one_shot", "nccl", "gloo")
"""The paths that can do all of `MOVES`."""


def _cpu_plan(world: int) -> Plan:
    small = CPU_ONE_SHOT_CEILINGS[_tabled(world)]
    rows = (
        Row(small, ("cpu_one_shot", "cpu_two_shot", "gloo")),
        Row(LARGEST, ("cpu_two_shot", "cpu_one_shot", "gloo")),
    )
    return Plan(rows, origin="default")


def _gpu_plan(capability: tuple[int, int], world: int) -> Plan:
    """Own kernels as far as they go, torch's symmetric memory beyond them and behind them, NCCL for the rest."""
    tabled = _tabled(world)
    own, symmetric = CUSTOM_CEILINGS[capability][tabled], SYMMETRIC_CEILINGS[capability][tabled]
    one_shot = min(own, ONE_SHOT_CEILINGS[tabled])
    multimem = world in MULTIMEM_WORLDS[capability]
    library = ("symm_mem_multimem",) * multimem + ("symm_mem_two_shot", "symm_mem_one_shot")
    rows = []
    for edge in sorted({one_shot, own, symmetric, LARGEST}):
        paths: tuple[str, ...] = ()
        if edge <= own:
            paths += ("one_shot", "two_shot") if edge <= one_shot else ("two_shot", "one_shot")
        if edge <= symmetric:
            paths += library
        rows.append(Row(edge, (*paths, "nccl")))
    return Plan(tuple(rows), {} if multimem else {"symm_mem_multimem": "world_size"}, "default")


def _tabled(world: int) -> int:
    return world + world % 2


# ── variations ───────────────────────────────────────────────────────────────────────────────────
def forced(path: str, fallback: str, plan: Plan, operation: str = "all_reduce") -> Plan:
    """`path` for every size, and the fallback for what it declines; for tests and benchmarks.

    The fallback alone, if the path can't do the operation at all.
    """
    able = operation not in MOVES or path in MOVING_PATHS
    chosen = (path, fallback) if able else (fallback,)
    others = dict.fromkeys((one for one in (path, *plan.paths()) if one not in chosen), "disabled")
    return Plan((Row(LARGEST, tuple(dict.fromkeys(chosen))),), others, f"forced to {path}")


def only(paths: Iterable[str], fallback: str, plan: Plan) -> Plan:
    """`plan` without the paths that are not among `paths`, the fallback aside."""
    allowed = {*paths, fallback}
    rows = [Row(row.up_to, tuple(path for path in row.paths if path in allowed) or (fallback,)) for row in plan.rows]
    without = dict.fromkeys((path for path in plan.paths() if path not in allowed), "disabled")
    return Plan(tuple(rows), {**plan.excluded, **without}, plan.origin)


def limited(plan: Plan, max_size: int, fallback: str) -> Plan:
    """`plan` with `max_size` bytes as the ceiling of all paths but the fallback, be it lower or higher than before."""
    fast = [row for row in plan.rows if row.paths != (fallback,)]
    if not fast:
        return plan
    rows = [row for row in fast if row.up_to < max_size]
    beyond = next((row for row in fast if row.up_to >= max_size), fast[-1])
    rows.append(Row(min(max_size, LARGEST), beyond.paths))
    if max_size < LARGEST:
        rows.append(Row(LARGEST, (fallback,)))
    return Plan(tuple(rows), plan.excluded, f"{plan.origin}, up to {max_size} bytes")


def from_times(times: Mapping[int, Mapping[str, float]], fallback: str, origin: str = "tuned") -> Plan:
    """The plan that measured times suggest: the fastest first, each size deciding up to halfway to the next.

    Args:
        times: for each measured size in bytes, seconds of every path that can serve it.
        fallback: what comes last in every row.
        origin: for the plan.
    """
    sizes = sorted(times)
    rows: list[Row] = []
    for size, larger in zip(sizes, [*sizes[1:], None], strict=True):
        ranked = sorted(times[size], key=lambda path: (times[size][path], path))
        upto_fallback = ranked[: ranked.index(fallback)] if fallback in ranked else ranked
        row = Row(LARGEST if larger is None else _between(size, larger), (*upto_fallback, fallback))
        if rows and rows[-1].paths == row.paths:
            rows.pop()
        rows.append(row)
    return Plan(tuple(rows), origin=origin)


def _between(size: int, larger: int) -> int:
    return int((size * larger) ** 0.5)


# ── tuned plans on disk ──────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True)
class Key:
    """What a tuned plan is good for."""

    kind: str
    device: str
    driver: str
    world: int
    version: str

    @classmethod
    def of(cls, traits: Traits, world: int, version: str) -> Key:
        """The key of this device and group."""
        return cls(traits.kind, traits.name, traits.driver, world, version)

    def path(self) -> Path:
        """Where its plan is kept: in ``$XDG_CACHE_HOME/arena``, else ``~/.cache/arena``."""
        root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        parts = [self.kind, self.device, self.driver, f"tp{self.world}", self.version]
        return Path(root) / "arena" / ("-".join(re.sub(r"[^A-Za-z0-9.]+", "_", part) for part in parts) + ".json")


def save(plan: Plan, key: Key, path: Path | None = None) -> Path:
    """Keep a plan, whole or not at all."""
    target = path or key.path()
    target.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"up_to": row.up_to, "paths": list(row.paths)} for row in plan.rows]
    text = json.dumps({"format": FORMAT, "key": vars(key), "rows": rows, "excluded": dict(plan.excluded)}, indent=2)
    fd, temporary = tempfile.mkstemp(dir=target.parent, prefix=target.name)
    with os.fdopen(fd, "w") as file:
        file.write(text)
    os.replace(temporary, target)
    return target


def load(key: Key, path: Path | None = None) -> Plan:
    """The plan kept for `key`.

    Raises:
        FileNotFoundError: there is none.
        InvalidArgument: the file is no plan, or one for something else; says which.
    """
    target = path or key.path()
    try:
        found = json.loads(target.read_text())
        expected = {"format": FORMAT, "key": vars(key)}
        for name, value in expected.items():
            if found[name] != value:
                raise _unusable(target, f"{name} {value}", f"{found[name]}")
        return Plan(tuple(_rows(found["rows"])), found["excluded"], f"tuned ({target})")
    except FileNotFoundError:
        raise
    except InvalidArgument as error:
        raise _unusable(target, error.expected, error.found) from error
    except (OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise _unusable(target, "a plan as autotune() writes it", f"{type(error).__name__}: {error}") from error


def _rows(found: Iterable[Any]) -> Iterable[Row]:
    for row in found:
        if not isinstance(row["up_to"], int) or not all(isinstance(path, str) for path in row["paths"]):
            raise TypeError(f"a row of {row}")
        yield Row(row["up_to"], tuple(row["paths"]))


def _unusable(path: Path, expected: str, found: str) -> InvalidArgument:
    return InvalidArgument(
        f"the plan in {path} can't be used", expected=expected, found=found, remedy="remove it, or run autotune() again"
    )
