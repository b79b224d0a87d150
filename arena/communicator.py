"""A communicator: one rank's end of what the ranks of a group do together. Its verbs are in `arena.allreduce`.

What can be had at all is settled once, in the constructor, in lock-step with the other ranks.

    joining:  who is there, what each asks for, each path's set-up     -> one list of paths
    plan:     bytes                                                    -> candidates, best first
    dispatch: a tensor                                                 -> the path that takes it, and why no other
    device:   the paths
    account:  the probe page of this rank
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from arena import memory
from arena import plan as plans
from arena.account import SAMPLED, Account, CommunicatorStatistics, OperationCounts
from arena.device import Device, open_device
from arena.dispatch import FUSED, Decision, Dispatch
from arena.errors import CommunicatorClosed, InvalidArgument, ReentrantUse, RunDirectoryError, UseAfterFork
from arena.joining import Wish, group_name, join, key_of
from arena.operands import with_rows
from arena.plan import Plan
from arena.probe import hooks
from arena.tuning import tune

if TYPE_CHECKING:
    from typing_extensions import Self

DEADLINE_S: Final = 10.0
OPERATIONS: Final = (*plans.PLANNED, FUSED)
"""What a communicator can do, by the names of its methods."""

registered: Final[weakref.WeakValueDictionary[str, Communicator]] = weakref.WeakValueDictionary()
"""Those of this process that are open, by the name of their group; of several over one group, the newest."""


class Communicator:
    """What every operation has in common: who takes part, which path serves, what is counted, how it ends."""

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
            plan: which path serves how many bytes of an all-reduce; a tuned one from the cache, else the default
                plan, if None. Where there is one in its cache, rank 0's counts. The other operations go by default
                plans, within the paths that a given plan names.
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
        self._joined = join(self._group, self._opened, self._device, Wish(plan, force_path, max_size), deadline_s)
        self.rank, self.world = self._joined.rank, self._joined.world
        self._dispatches = {name: Dispatch(name, self._joined, self._opened.fallback) for name in OPERATIONS}
        self._checks = [path.check for path in self._joined.paths.values()] if self._opened.asynchronous else []
        self._account = self._open_account() if probes else None
        if self._account is not None:
            for name, dispatch in self._dispatches.items():
                dispatch.book = self._account.books[name]
        registered[self.name] = self

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
            "plan": self.plan.origin,
        }
        try:
            return Account(joined.directory, joined.rank, about, self._opened.stopwatch())
        except RunDirectoryError:
            return None  # no room for a page is no reason not to reduce

    # ── one operation ────────────────────────────────────────────────────────────────────────────
    def _serve(self, dispatch: Dispatch, x: torch.Tensor, *more: Any) -> Any:
        """Any of them: the first path that takes it runs it."""
        if not self._lock.acquire(blocking=False):
            raise _busy()
        try:
            if x.device != self._device or self._closed or self._epoch != memory.fork_epoch() or x.requires_grad:
                x = self._checked(x)
            if self._checks:
                for check in self._checks:
                    check()
            if dispatch.by_rows:
                x = with_rows(x, dispatch.operation, self.world)
            route = dispatch.routes.get((x.dtype, x.nbytes)) or dispatch.find(x)
            ruled_out = route.ruled_out
            for choice in route.choices:
                reason = choice.declines(x)
                if reason is None:
                    break
                ruled_out += ((choice.name, reason),)
            else:
                raise dispatch.unserved(x, ruled_out)
            account, book = self._account, dispatch.book
            if account is None or book is None:
                return choice.run(x, *more)
            run = choice.run
            if hooks.inside.get() is not None:  # this thread works on a message that is traced
                run = partial(account.told, dispatch.operation, choice.name, route.nbytes, choice.run)
            out = run(x, *more) if book.operations % SAMPLED else account.timed(book, choice.name, run, x, *more)
            account.served(book, choice.name, route.nbytes, ruled_out)
            return out
        finally:
            self._lock.release()

    def explain(self, x: torch.Tensor, operation: str = "all_reduce") -> Decision:
        """Which path an operation on `x` would take, and why not a faster one. Asks nobody, and counts nothing.

        Raises:
            InvalidArgument: as the operation itself, or there is no such operation.
        """
        dispatch = self._dispatches.get(operation)
        if dispatch is None:
            expected = " or ".join(OPERATIONS)
            raise InvalidArgument("there is no such operation", expected=expected, found=repr(operation))
        x = self._checked(x)
        return dispatch.decide(with_rows(x, operation, self.world) if dispatch.by_rows else x)

    def check(self) -> None:
        """Raise what has become of earlier operations, also of those that a CUDA graph has replayed. Never waits.

        On a GPU an operation that was given up leaves NaN where something was missing; it is heard of here, or at the
        next operation that is not part of a graph. Synchronise first to hear of all that has been queued.

        Raises:
            PeerDied, CommunicatorClosed: a rank is gone.
            CommunicatorClosed, UseAfterFork: as `all_reduce`.
        """
        self._checked(torch.empty(0, device=self._device))
        for path in self._joined.paths.values():
            path.check()

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

    # ── tuning ───────────────────────────────────────────────────────────────────────────────────
    def autotune(self, sizes: Sequence[int] | None = None, *, repeats: int = 20, save: bool = True) -> Plan:
        """Measure every path of all-reduce at every size, and go by it from now on. Collective; on an idle machine.

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
            joined.plans["all_reduce"] = tune(joined.paths, self._opened, self._device, joined.rounds, sizes, repeats)
            for dispatch in self._dispatches.values():
                dispatch.routes.clear()
            if self._account is not None:
                self._account.describe(plan=self.plan.origin)
        finally:
            self._lock.release()
        if save and self.rank == 0:
            plans.save(self.plan, key_of(self._opened, self._device, self.world))
        return self.plan

    # ── looking, ending ──────────────────────────────────────────────────────────────────────────
    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return self._device

    @property
    def plan(self) -> Plan:
        """The plan that all-reduce goes by."""
        return self._joined.plans["all_reduce"]

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
        counts = dict(self._account.counts()) if self._account is not None else {}
        mine = counts.pop("all_reduce", OperationCounts())
        return CommunicatorStatistics(
            **vars(mine),
            name=self.name,
            rank=self.rank,
            world=self.world,
            paths=self.paths,
            declined=self.declined,
            plan=self.plan.origin,
            collectives=counts,
        )

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"paths {', '.join(self._joined.paths)}; plan {self.plan.origin}"
        return f"{type(self).__name__}({self.name!r}, rank {self.rank} of {self.world} on {self._device}; {state})"

    def close(self) -> None:
        """Give everything back. A rank that waits for this one gets `CommunicatorClosed`; so does a thread in here."""
        if self._epoch != memory.fork_epoch() or self._closed:
            return
        self._closed = True
        if registered.get(self.name) is self:
            del registered[self.name]
        if self._account is not None:
            self._account.close()
        self._joined.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


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
