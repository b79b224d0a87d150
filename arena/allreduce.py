"""All-reduce, dispatched by size: choose a path, run it, count it.

Which path serves a tensor is decided by a plan that all ranks share and by what a path can tell from the tensor alone,
so that no rank ever takes another path than the rest. A path that can't serve a call declines with a reason, the next
one takes it, and both are counted. What can be had at all is settled once, in the constructor, in lock-step.

    joining:  who is there, what each asks for, each path's set-up     -> one list of paths
    plan:     bytes                                                    -> candidates, best first
    device:   the paths
    account:  the probe page of this rank

One communicator serves one thread at a time, and on a GPU one stream: a second one is refused or ordered behind, never
interleaved, because the ranks could not agree on an order.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final

import torch
import torch.distributed as dist

from arena import memory
from arena import plan as plans
from arena.account import Account
from arena.device import Device, ReducePath, open_device
from arena.errors import CommunicatorClosed, InvalidArgument, ReentrantUse, RunDirectoryError, UseAfterFork
from arena.joining import Wish, group_name, join, key_of
from arena.plan import Plan
from arena.tuning import tune

__all__ = ["AllReduce", "CommunicatorStatistics", "Decision", "lookup"]

DEADLINE_S: Final = 10.0
_KEPT_ROUTES: Final = 1024
_communicators: weakref.WeakValueDictionary[str, AllReduce] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class Decision:
    """Which path would serve a tensor, and why faster ones would not: (path, reason) in the order of the plan."""

    path: str
    reasons: tuple[tuple[str, str], ...] = ()

    @property
    def reason(self) -> str:
        """The first of the reasons, if any."""
        return self.reasons[0][1] if self.reasons else ""


@dataclass(frozen=True)
class CommunicatorStatistics:
    """What one rank knows of its communicator, at one moment.

    Attributes:
        paths: those that were set up, the same on every rank.
        declined: those that could not be, each with (reason, text), the same on every rank.
        operations_by_path, bytes_by_path: what was served by each.
        fallbacks: operations that a faster path declined, by reason; counted once a reason and operation.
        plan: where the plan comes from.
    """

    name: str
    rank: int
    world: int
    paths: tuple[str, ...]
    declined: dict[str, tuple[str, str]]
    plan: str
    operations_by_path: dict[str, int] = field(default_factory=dict)
    bytes_by_path: dict[str, int] = field(default_factory=dict)
    fallbacks: dict[str, int] = field(default_factory=dict)


class _Route:
    """Where tensors of one dtype and size go: paths to ask in turn, after those that are out of the question."""

    __slots__ = ("ruled_out", "to_ask")

    def __init__(self, to_ask: tuple[ReducePath, ...], ruled_out: tuple[tuple[str, str], ...]) -> None:
        self.to_ask = to_ask
        self.ruled_out = ruled_out


class AllReduce:
    """Sums tensors over the ranks of a process group on one host.

    Every rank makes one, in the same order, with the same arguments. It is a context manager that closes on leaving.

    Example:
        >>> comm = AllReduce(group, "cpu")
        >>> total = comm.all_reduce(partial)
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device | str,
        plan: Plan | None = None,
        force_path: str | None = None,
        max_size: int | None = None,
        *,
        deadline_s: float = DEADLINE_S,
        probes: bool = True,
        opened: Device | None = None,
    ) -> None:
        """Set up every path of the plan, together with the other ranks.

        Args:
            group: the ranks; the default group if None. Its store is what they agree through.
            device: where the tensors are.
            plan: which path serves how many bytes; a tuned one from the cache, else the default plan, if None. Where
                there is one in its cache, rank 0's counts.
            force_path: serve everything by this path, as far as it can; for tests and benchmarks.
            max_size: ceiling of every path but the fallback, in bytes.
            deadline_s: how long to wait for the other ranks to come, and again how long set-up may take.
            probes: keep a probe page for telemetry.
            opened: the device, for tests that want to see it fail.

        Raises:
            InvalidArgument: no such path or device, or the ranks ask for different things.
            RankMissing, PeerDied: a rank did not come in time, or died. No rank waits longer than the deadline.
            SetUpFailed: no path at all; the same reason on every rank.
        """
        self._group = group if group is not None else _default_group()
        self._device = _concrete(torch.device(device))
        self._opened = opened if opened is not None else open_device(self._device.type)
        self.name = group_name(self._group)
        self._lock = threading.Lock()
        self._epoch = memory.fork_epoch()
        self._closed = False
        self._routes: dict[tuple[torch.dtype, int], _Route] = {}
        self._joined = join(self._group, self._opened, self._device, Wish(plan, force_path, max_size), deadline_s)
        self.rank, self.world = self._joined.rank, self._joined.world
        self._account = self._open_account() if probes else None
        _communicators[self.name] = self

    def _open_account(self) -> Account | None:
        joined = self._joined
        if joined.directory is None:
            return None
        about = {
            "group": self.name,
            "instance": joined.instance,
            "world": joined.world,
            "device": str(self._device),
            "paths": list(joined.paths),
            "declined": {name: list(why) for name, why in joined.declined.items()},
            "plan": joined.plan.origin,
        }
        try:
            return Account(joined.directory, joined.rank, about, self._opened.stopwatch())
        except RunDirectoryError:
            return None  # no room for a page is no reason not to reduce

    # ── the verb ─────────────────────────────────────────────────────────────────────────────────
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's `x`, bit for bit the same on every rank.

        Sums are in rank order, and in fp32 for 16-bit floats, whichever path serves them; only the libraries' own paths
        (gloo, NCCL) add up as the library does. No gradient flows through it.

        Args:
            x: of any shape, dense in any layout, on this communicator's device; the same shape and dtype on all ranks.

        Returns:
            A new contiguous tensor of the shape and dtype of `x`, which stays as it is.

        Raises:
            InvalidArgument: another device, or a dtype that no path can add up.
            OperandMismatch: the ranks brought different tensors (on the CPU, where that can be seen).
            PeerDied, CommunicatorClosed: a rank is gone; nothing more can be done with this communicator.
            ReentrantUse: another thread is in here.
            UseAfterFork: this is a forked child.
        """
        if not self._lock.acquire(blocking=False):
            raise _busy()
        try:
            if x.device != self._device or self._closed or self._epoch != memory.fork_epoch() or x.requires_grad:
                x = self._checked(x)
            route = self._routes.get((x.dtype, x.nbytes)) or self._find_route(x)
            ruled_out = route.ruled_out
            for path in route.to_ask:
                reason = path.declines(x)
                if reason is None:
                    break
                ruled_out += ((path.name, reason),)
            else:
                raise self._unserved(x, ruled_out)
            account = self._account
            if account is None:
                return path.all_reduce(x)
            out = account.timed(path, x) if account.due() else path.all_reduce(x)
            account.served(path.name, x.nbytes, ruled_out)
            return out
        finally:
            self._lock.release()

    def explain(self, x: torch.Tensor) -> Decision:
        """Which path `all_reduce(x)` would take, and why not a faster one. Asks nobody, and counts nothing.

        Raises:
            InvalidArgument: as `all_reduce`.
        """
        route = self._find_route(self._checked(x))
        reasons = list(route.ruled_out)
        for path in route.to_ask:
            reason = path.declines(x)
            if reason is None:
                return Decision(path.name, tuple(reasons))
            reasons.append((path.name, reason))
        raise self._unserved(x, tuple(reasons))

    def _find_route(self, x: torch.Tensor) -> _Route:
        """The same for every tensor of this dtype and size, so found once."""
        nbytes = x.nbytes
        candidates = self._joined.plan.candidates(nbytes)
        to_ask = tuple(self._joined.paths[name] for name in candidates if name in self._joined.paths)
        route = _Route(to_ask, tuple(self._ruled_out(candidates, nbytes)))
        if len(self._routes) >= _KEPT_ROUTES:
            self._routes.clear()
        self._routes[x.dtype, nbytes] = route
        return route

    def _ruled_out(self, candidates: Sequence[str], nbytes: int) -> Iterator[tuple[str, str]]:
        """Candidates that could not be set up; and where only the fallback is left, why the others are none."""
        fallback = self._opened.fallback
        for name in candidates:
            if name in self._joined.paths:
                break
            yield name, self._joined.declined[name][0]
        if all(name == fallback or name in self._joined.declined for name in candidates):
            others = (*self._joined.plan.paths(), *self._joined.plan.excluded)
            for name in dict.fromkeys(others):
                if name not in candidates:
                    yield name, self._joined.plan.why_not(name, nbytes)

    def _checked(self, x: torch.Tensor) -> torch.Tensor:
        if self._epoch != memory.fork_epoch():
            raise UseAfterFork(
                "this communicator belongs to the parent process",
                expected="the process that made it",
                found="a forked child",
                remedy="make a process group and a communicator in each process",
            )
        if self._closed:
            raise CommunicatorClosed(
                "this communicator is closed", expected="a call before close()", remedy="make another communicator"
            )
        if x.device != self._device or x.layout != torch.strided:
            raise InvalidArgument(
                "this communicator can't reduce that",
                expected=f"a dense tensor on {self._device}",
                found=f"{x.layout} on {x.device}",
                remedy=f"move it there with x.to({str(self._device)!r}), or make a communicator for its device",
            )
        return x.detach()

    def _unserved(self, x: torch.Tensor, reasons: tuple[tuple[str, str], ...]) -> InvalidArgument:
        told = ", ".join(f"{path}: {reason}" for path, reason in reasons)
        return InvalidArgument(
            f"no path can all-reduce a tensor of {x.nbytes} bytes of {x.dtype}",
            expected=f"what one of {', '.join(self._joined.paths)} takes",
            found=told,
            remedy="convert it to bfloat16, float16, float32, float64 or int32",
        )

    # ── tuning ───────────────────────────────────────────────────────────────────────────────────
    def autotune(self, sizes: Sequence[int] | None = None, *, repeats: int = 20, save: bool = True) -> Plan:
        """Measure every path at every size, and go by the result from now on. Collective; on an idle machine, please.

        Each path is verified against a known sum before it is timed. The slowest rank's median counts, so that all
        ranks come to the same plan; rank 0 keeps it in the cache (see `arena.plan`).

        Args:
            sizes: in bytes; powers of two from 8 KiB up to the largest ceiling of the plan, 64 MiB at most, if None.
            repeats: how often each is timed.
            save: keep the plan for the next communicator on this kind of device.

        Raises:
            RankMissing, PeerDied: a rank fell silent.
        """
        if not self._lock.acquire(blocking=False):
            raise _busy()
        try:
            self._checked(torch.empty(0, device=self._device))
            joined = self._joined
            joined.plan = tune(joined.paths, self._opened, self._device, joined.rounds, sizes, repeats)
            self._routes.clear()
        finally:
            self._lock.release()
        if save and self.rank == 0:
            plans.save(joined.plan, key_of(self._opened, self._device, self.world))
        return joined.plan

    # ── looking, ending ──────────────────────────────────────────────────────────────────────────
    @property
    def plan(self) -> Plan:
        """The plan that it goes by."""
        return self._joined.plan

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths that were set up, the same on every rank."""
        return tuple(self._joined.paths)

    @property
    def declined(self) -> dict[str, tuple[str, str]]:
        """The paths that could not be set up: reason and text, the same on every rank."""
        return dict(self._joined.declined)

    def statistics(self) -> CommunicatorStatistics:
        """A snapshot. Without a probe page the counts are empty."""
        counts = self._account.counts() if self._account is not None else {}
        common = (self.name, self.rank, self.world, self.paths, self.declined, self._joined.plan.origin)
        return CommunicatorStatistics(*common, **counts)

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"paths {', '.join(self._joined.paths)}; plan {self._joined.plan.origin}"
        return f"AllReduce({self.name!r}, rank {self.rank} of {self.world} on {self._device}; {state})"

    def close(self) -> None:
        """Give everything back. A rank that waits for this one gets `CommunicatorClosed`; so does a thread in here."""
        if self._epoch != memory.fork_epoch() or self._closed:
            return
        self._closed = True
        if _communicators.get(self.name) is self:
            del _communicators[self.name]
        if self._account is not None:
            self._account.close()
        self._joined.leave()

    def __enter__(self) -> AllReduce:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def lookup(name: str) -> AllReduce:
    """The communicator over the process group of this name, of this process.

    Raises:
        InvalidArgument: there is none.
    """
    found = _communicators.get(name)
    if found is None:
        known = ", ".join(map(repr, sorted(_communicators))) or "none"
        raise InvalidArgument(
            f"there is no communicator over a group {name!r}",
            expected=f"one of this process's: {known}",
            found=repr(name),
            remedy="make AllReduce(group, device) first, and pass its name",
        )
    return found


def _busy() -> ReentrantUse:
    return ReentrantUse(
        "this communicator is in use",
        expected="one call at a time: the ranks could not agree on the order of two",
        found="a call from another thread, or from inside a call",
        remedy="give each thread a communicator of its own, made in the same order on every rank",
    )


def _default_group() -> dist.ProcessGroup:
    if not dist.is_initialized():
        raise InvalidArgument(
            "there is no process group",
            expected="torch.distributed.init_process_group before",
            remedy="start the ranks with torchrun, or name an address, a rank and a world size",
        )
    group = dist.group.WORLD
    assert group is not None
    return group


def _concrete(device: torch.device) -> torch.device:
    """With its index, as a tensor's device has it."""
    return torch.empty(0, device=device).device
