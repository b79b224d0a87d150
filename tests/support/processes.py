"""A test's functions, run in processes of their own: started quickly, bounded in time, gone with the test.

A forkserver that has torch loaded forks each child, so that a child costs milliseconds and inherits no thread and no
lock of pytest's. Functions and arguments are pickled: a function has to stand at the top of its module.
"""

import faulthandler
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from tests.support.fleet import PRELOADED, die_with_parent

DEADLINE_S = 60.0

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload([*PRELOADED, "tests.support.processes"])


class ChildDied(AssertionError):
    """The child ended without a result."""


class RemoteTraceback(Exception):
    """Where in the child an exception came from."""

    def __str__(self) -> str:
        return "\n" + self.args[0]


class Child:
    """A function that runs in another process. Killed on leaving the `with` block, whatever happened."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._receiver, sender = context.Pipe(duplex=False)
        arguments = (sender, dict(os.environ), function, args)
        self.process = context.Process(target=_child, args=arguments, daemon=True)
        self.process.start()
        sender.close()

    @property
    def pid(self) -> int:
        """The process that the function runs in."""
        assert self.process.pid is not None
        return self.process.pid

    def result(self, timeout_s: float = 30.0) -> Any:
        """What the function returned; raises what it raised."""
        if not self._receiver.poll(timeout_s):
            raise AssertionError(f"no result from process {self.pid} within {timeout_s} s")
        try:
            worked, value, trace = self._receiver.recv()
        except EOFError:
            self.process.join(timeout_s)
            raise ChildDied(f"process {self.pid} ended with exit code {self.process.exitcode} and no result") from None
        if worked:
            return value
        raise value from RemoteTraceback(trace)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def join(self, timeout_s: float = 30.0) -> int | None:
        """Wait for its end; the exit code, as `multiprocessing` tells it."""
        self.process.join(timeout_s)
        assert self.process.exitcode is not None, f"process {self.pid} has not ended within {timeout_s} s"
        return self.process.exitcode

    def __enter__(self) -> "Child":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.join()
        self._receiver.close()


def run(function: Callable[..., Any], *args: Any, timeout_s: float = 30.0) -> Any:
    """Call a function in a process of its own."""
    with Child(function, *args) as child:
        return child.result(timeout_s)


def _child(sender: Any, environment: dict[str, str], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    die_with_parent()  # the forkserver, which ends with the test run however that ends
    faulthandler.dump_traceback_later(DEADLINE_S, exit=True, file=sys.__stderr__)
    os.environ.clear()
    os.environ.update(environment)
    try:
        answer = (True, function(*args), "")
    except BaseException as error:
        answer = (False, error, traceback.format_exc())
    try:
        sender.send(answer)
    except Exception as error:
        sender.send((False, RuntimeError(f"the child's answer can't be pickled: {answer!r}"), repr(error)))
