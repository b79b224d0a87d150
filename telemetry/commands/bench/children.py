"""Processes that measure, and cannot leak or hang.

Every block runs in a process of its own, which forks its readers: no endpoint, thread or mapping of one contender is
there when the next one is measured, and the process that forks never owned any. A block is a process group with a
deadline. It dies with its parent, and its readers die with it, so that even a `kill -9` of the command leaves nothing.
"""

import ctypes
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import Pipe, util
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None, use_errno=True).prctl


class BlockFailed(RuntimeError):
    """A block gave no result: it raised, died, or passed its deadline. Says which, and what it said."""

    @property
    def reason(self) -> str:
        """The last line, which of a traceback is the error itself."""
        return str(self).strip().rpartition("\n")[2]


@dataclass(frozen=True)
class _Result:
    value: Any


@dataclass(frozen=True)
class _Failure:
    text: str


_SILENT_DEATH = _Failure("the block's process died without a word")

# In a block and in its readers: where the first word about the block goes, be it a result or a failure.
_reports: list[Connection] = []


def run_apart(task: Callable[[], T], deadline_s: float) -> T:
    """Runs `task` in a process group of its own and returns what it returned. No process of the group outlives it."""
    receiver, sender = Pipe(duplex=False)
    parent = os.getpid()
    pid = _fork()
    if pid == 0:
        _run_block(parent, sender, task)
    _lead_own_group(pid)
    sender.close()
    try:
        outcome = _first_report(pid, receiver, deadline_s)
    finally:
        _end_group(pid)
        receiver.close()
    if isinstance(outcome, _Failure):
        raise BlockFailed(outcome.text)
    value: T = outcome.value
    return value


def fork_reader(serve: Callable[[], None]) -> int:
    """Forks a reader of this block. A reader that raises fails the block at once, with its traceback."""
    parent = os.getpid()
    pid = _fork()
    if pid:
        return pid
    status = 1
    try:
        die_with_parent(parent)
        serve()
        status = 0
    except BaseException:
        _report(_Failure(f"a reader failed:\n{traceback.format_exc()}"))
    finally:
        sys.stderr.flush()
        os._exit(status)


def die_with_parent(parent: int) -> None:
    """The kernel kills this process when the thread that forked it ends; the check covers a parent already gone."""
    if _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(1)


def reap(pids: list[int]) -> None:
    """Waits for readers that have been told to end."""
    for pid in pids:
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status != 0:
            raise BlockFailed(f"reader {pid} ended with status {status}")


def _fork() -> int:
    with warnings.catch_warnings():
        # Python 3.12 warns when a library (numpy's BLAS) has threads; the children of a block touch none of them.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        util._run_after_forkers()  # type: ignore[attr-defined]  # as in a child of multiprocessing's own
    return pid


def _run_block(parent: int, sender: Connection, task: Callable[[], object]) -> NoReturn:
    try:
        _lead_own_group(0)
        die_with_parent(parent)
        os.dup2(sys.stderr.fileno(), 1)  # what a library prints must not end up inside --json
        _reports.append(sender)
        _report(_Result(task()))
    except BaseException:
        _report(_Failure(traceback.format_exc()))
    finally:
        os._exit(0)


def _report(outcome: _Result | _Failure) -> None:
    for connection in _reports:
        connection.send(outcome)


def _lead_own_group(pid: int) -> None:
    """Both sides call it, so that the group exists before either goes on."""
    try:
        os.setpgid(pid, pid)
    except (PermissionError, ProcessLookupError):
        pass  # the child did it first, or is gone already


def _first_report(pid: int, receiver: Connection, deadline_s: float) -> _Result | _Failure:
    """Waits for a report or for the death of the block: its readers hold the pipe too, so there is no end of file."""
    death = os.pidfd_open(pid)
    try:
        ready = wait([receiver, death], deadline_s)
    finally:
        os.close(death)
    if not ready:
        return _Failure(f"no result within {deadline_s:.0f} s")
    try:
        outcome: _Result | _Failure = receiver.recv() if receiver.poll(0) else _SILENT_DEATH
    except EOFError:
        return _SILENT_DEATH
    return outcome


def _end_group(pid: int) -> None:
    """Kill first, wait after: until it is waited for, the leader keeps the group's number from being used again."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass  # already gone
    os.waitpid(pid, 0)
