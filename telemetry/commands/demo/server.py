"""The process from which the workers are forked; it imports torch once, and while this process does too.

It is started with SIGINT blocked, and its children inherit that: a ctrl-C reaches every process of the group, and the
workers are to leave when the engine closes its queue, not in the middle of a traceback.
"""

import os
import signal
from multiprocessing import forkserver, get_context, resource_tracker
from typing import Any

PRELOAD = ["telemetry.commands.demo.worker"]


class WorkerFailed(RuntimeError):
    """A worker ended before it was ready; what it printed says why."""


def start_server() -> None:
    """Start the server, or do nothing if it runs."""
    get_context("forkserver").set_forkserver_preload(PRELOAD)
    resource_tracker.ensure_running()  # the server would start it, and it unblocks SIGINT on the way
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def stop_server() -> None:
    """End the server, which would else outlive this process a little; multiprocessing has no public verb for it."""
    server: Any = forkserver._forkserver
    if pid := server._forkserver_pid:
        os.kill(pid, signal.SIGTERM)
        server._stop()
