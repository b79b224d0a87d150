"""Joining: how the ranks of a process group become one communicator, with the same plans and paths on each.

meet: every rank says what it asks for          -> one set of plans, or an error on all
each path's set-up in lock-step                 -> the path, or a reason, on all
compare what is left                            -> what one rank lost, all drop
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from arena import plan as plans
from arena.account import claim_directory, leave_directory
from arena.device import Declined, Device, Place, ReducePath
from arena.errors import InvalidArgument, RunDirectoryError, SetUpFailed
from arena.lockstep import Budget, set_up
from arena.plan import PLANNED, Key, Plan
from arena.probe.metrics import ALLREDUCE_PATHS
from arena.rounds import Rounds, Statement

FORCED_BYTES: Final = 64 << 20
"""What a forced path is set up for where neither `max_size` nor the plan says."""

_attempts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Wish:
    """What a communicator is asked for; the same on every rank."""

    plan: Plan | None
    force_path: str | None
    max_size: int | None

    def check(self) -> None:
        """Refuse what can't be.

        Raises:
            InvalidArgument: says what.
        """
        if self.force_path is not None and self.force_path not in ALLREDUCE_PATHS:
            expected = " or ".join(ALLREDUCE_PATHS)
            raise InvalidArgument("there is no such path", expected=expected, found=repr(self.force_path))
        if self.max_size is not None and self.max_size < 0:
            raise InvalidArgument("max_size is out of range", expected="bytes from 0 up", found=repr(self.max_size))


@dataclass(frozen=True)
class Card:
    """What a rank says when it meets the others. What it can't have is told, not raised: the others wait for it."""

    asked: tuple[str, Wish]
    plans: Mapping[str, Plan] = field(default_factory=dict)
    refused: str = ""
    directory: str = ""  # from rank 0; without one there are no pages, and no path that needs a place to meet
    instance: str = ""


@dataclass
class Joined:
    """One rank's share of a communicator.

    Attributes:
        plans: by operation, one of `PLANNED`.
        paths: those that were set up, in the plans' order; the same on every rank.
        declined: the others, each with reason and text; the same on every rank.
        rounds: for later talk with the other ranks.
    """

    rank: int
    world: int
    rounds: Rounds
    plans: dict[str, Plan] = field(default_factory=dict)
    directory: Path | None = None
    instance: str = ""
    paths: dict[str, ReducePath] = field(default_factory=dict)
    declined: dict[str, tuple[str, str]] = field(default_factory=dict)

    def leave(self) -> None:
        """Close the paths, and leave nothing in the directory."""
        for path in self.paths.values():
            path.close()
        if self.directory is not None:
            leave_directory(self.directory, self.rank)


def join(group: dist.ProcessGroup, opened: Device, device: torch.device, wish: Wish, deadline_s: float) -> Joined:
    """Become one communicator with the other ranks of `group`; see `arena.allreduce.AllReduce`."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    joined = Joined(rank, world, rounds_of(group))
    try:
        card = _card(opened, device, wish, rank, world, group_name(group))
        joined.directory = Path(card.directory) if card.directory else None
        cards = meet(group, joined.rounds, card, deadline_s)
        joined.plans = dict(_agreed(cards))
        joined.directory = Path(cards[0].directory) if cards[0].directory else None
        joined.instance = cards[0].instance
        _set_up_paths(joined, group, opened, device, Budget(deadline_s))
        if not joined.paths:
            raise _nothing(joined)
    except BaseException:
        joined.leave()
        raise
    return joined


def rounds_of(group: dist.ProcessGroup) -> Rounds:
    """Rounds of this rank with the others of a group, to begin with `meet`."""
    return Rounds(_store_of(group), _attempts.get(group, 0), dist.get_rank(group), dist.get_world_size(group))


def meet(group: dist.ProcessGroup, rounds: Rounds, said: Any, deadline_s: float) -> list[Any]:
    """The first of the rounds; the next ones over this group, whoever makes them, are others. See `Rounds.meet`."""
    try:
        return rounds.meet(said, deadline_s)
    finally:
        _attempts[group] = rounds.attempt + 1


def group_name(group: dist.ProcessGroup) -> str:
    """What a communicator over this group is called."""
    return getattr(group, "group_name", "") or "world"


# ── what is asked for ────────────────────────────────────────────────────────────────────────────
def _card(opened: Device, device: torch.device, wish: Wish, rank: int, world: int, name: str) -> Card:
    asked = (device.type, wish)
    try:
        wish.check()
        planned = effective_plans(opened, device, wish, world)
    except InvalidArgument as error:
        return Card(asked, refused=str(error))
    if rank != 0:
        return Card(asked, planned)
    try:
        directory, instance = claim_directory(name)
    except RunDirectoryError:
        return Card(asked, planned)
    return Card(asked, planned, directory=directory, instance=instance)


def effective_plans(opened: Device, device: torch.device, wish: Wish, world: int) -> dict[str, Plan]:
    """The plans that a wish comes to, by operation.

    One that is given, or tuned, is for all-reduce; the other operations keep to the paths that a given one names.
    """
    found: dict[str, Plan] = {}
    for operation in PLANNED:
        if operation != "all_reduce":
            plan = plans.default_plan(opened.traits(device), world, operation)
            if wish.plan is not None:
                plan = plans.only(wish.plan.paths(), opened.fallback, plan)
        else:
            plan = wish.plan if wish.plan is not None else _kept_plan(opened, device, world)
        found[operation] = _varied(plan, wish, opened.fallback, operation)
    return found


def _varied(plan: Plan, wish: Wish, fallback: str, operation: str) -> Plan:
    max_size = wish.max_size
    if wish.force_path is not None:
        if max_size is None:
            max_size = max(FORCED_BYTES, plan.ceiling(wish.force_path))
        plan = plans.forced(wish.force_path, fallback, plan, operation)
    return plan if max_size is None else plans.limited(plan, max_size, fallback)


def _kept_plan(opened: Device, device: torch.device, world: int) -> Plan:
    """The tuned plan of this device and world, else the default one, which then says why."""
    default = plans.default_plan(opened.traits(device), world)
    try:
        return plans.load(key_of(opened, device, world))
    except FileNotFoundError:
        return default
    except InvalidArgument as error:
        return Plan(default.rows, default.excluded, f"default ({error})")


def key_of(opened: Device, device: torch.device, world: int) -> Key:
    """What a tuned plan is kept under."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        mine = version("arena-dataplane")
    except PackageNotFoundError:
        mine = "unknown"
    return Key.of(opened.traits(device), world, mine)


def _agreed(cards: list[Card]) -> Mapping[str, Plan]:
    """Rank 0's plans, if all ranks ask for the same."""
    for rank, card in enumerate(cards):
        if not _is_card(card):
            raise _strange(rank, card)
    for rank, card in enumerate(cards):
        if card.refused:
            remedy = "correct it there; no rank has made a communicator"
            raise InvalidArgument(f"rank {rank} asks for what can't be", found=card.refused, remedy=remedy)
    for rank, card in enumerate(cards):
        if _differ(card.asked, cards[0].asked):
            raise InvalidArgument(
                f"rank 0 and rank {rank} ask for different communicators",
                expected=f"device, plan, force_path and max_size as on rank 0: {cards[0].asked}",
                found=f"{card.asked}",
                remedy="make AllReduce with the same arguments on every rank",
            )
    return cards[0].plans


def _differ(one: object, other: object) -> bool:
    """Whether two ranks ask for different things; what can't be compared is different."""
    try:
        return bool(one != other)
    except Exception:
        return True


def _is_card(found: object) -> bool:
    """Whether a rank of this version can have said it."""
    if type(found) is not Card or vars(found).keys() != {one.name for one in fields(Card)}:
        return False
    try:
        repr(found)  # of another version, something in it may lack what this one's has
    except Exception:
        return False
    plans: object = found.plans
    texts = all(isinstance(one, str) for one in (found.refused, found.directory, found.instance))
    return texts and isinstance(plans, dict) and all(type(one) is Plan for one in plans.values())


def _strange(rank: int, said: object) -> SetUpFailed:
    return SetUpFailed(
        f"rank {rank} says what no rank of this Arena says",
        expected="what it asks for, or what of it went wrong",
        found=f"a {type(said).__name__}",
        remedy="run the same Arena version on every rank",
    )


# ── what is to be had ────────────────────────────────────────────────────────────────────────────
def _set_up_paths(
    joined: Joined, group: dist.ProcessGroup, opened: Device, device: torch.device, budget: Budget
) -> None:
    """One path after the other, the fallback last."""
    place = Place(joined.rank, joined.world, device, group, joined.directory)
    makers, planned = opened.paths(), joined.plans.values()
    names = dict.fromkeys(path for plan in planned for path in plan.paths() if path != opened.fallback)
    for name in (*names, opened.fallback):
        try:
            if name not in makers:
                raise Declined("disabled", f"there is no path {name} on {opened.kind}")
            ceilings = (plan.ceiling(name) for plan in planned)  # that of all-reduce first: it needs the room
            steps = makers[name](place, next(filter(None, ceilings), 0))
            joined.paths[name] = set_up(name, steps, joined.rounds, joined.rank, budget)
        except Declined as declined:
            joined.declined[name] = (declined.reason, declined.text)
    said = Statement("said", dict(opened.broken()))
    for rank, answer in enumerate(joined.rounds.exchange("comparing what was set up", said, budget.stage_s())):
        if not isinstance(answer.said, dict):
            raise _strange(rank, answer.said)
        for name, text in answer.said.items():
            _drop(joined, name, text)


def _drop(joined: Joined, name: str, text: str) -> None:
    """A later path's failure took it down, on one rank at least."""
    path = joined.paths.pop(name, None)
    if path is not None:
        path.close()
        joined.declined[name] = ("setup_failed", text)


def _nothing(joined: Joined) -> SetUpFailed:
    reasons = "; ".join(f"{name}: {text}" for name, (_, text) in joined.declined.items())
    return SetUpFailed(
        "there is no way to all-reduce here", expected="one path at least", found=reasons, remedy="see the reasons"
    )


def _store_of(group: dist.ProcessGroup) -> Any:
    get: Callable[[Any], Any] = dist.distributed_c10d._get_process_group_store
    return get(group)
