"""The forwarder's process. Its orders come through its standard input, which stays open as long as the queue does."""

from __future__ import annotations

import gc
import json
import os
import pickle
import select
import signal
import sys
from typing import Any, BinaryIO

from arena.remote.server import Server


def main() -> None:
    """Read the orders, listen, answer with the port, forward until all is over."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C in a terminal is for the writer, whose end is ours
    parent = os.getppid()
    orders: BinaryIO = sys.stdin.buffer
    handle, config, bell, keys, first = pickle.load(orders)
    try:
        server = Server(handle, config, bell, keys, _Writer(parent), _report, first=first)
    except Exception as error:
        _say({"failed": str(error)})
        return
    gc.freeze()
    _say({"port": server.port})
    os.set_blocking(sys.stdout.fileno(), False)
    server.serve()


class _Writer:
    """Whether it is gone: it has closed our input, or is no longer our parent."""

    def __init__(self, parent: int) -> None:
        self._parent = parent
        self._poll = select.poll()
        self._poll.register(sys.stdin.fileno(), select.POLLIN)
        self._gone = False

    def __call__(self) -> bool:
        self._gone = self._gone or os.getppid() != self._parent or bool(self._poll.poll(0))
        return self._gone


def _say(content: dict[str, Any]) -> None:
    os.write(sys.stdout.fileno(), json.dumps(content).encode() + b"\n")


def _report(refused: dict[str, int]) -> None:
    """Tell the writer, if it listens; it counts."""
    if refused:
        try:
            _say({"refused": refused})
        except OSError:  # it is gone, or has not read for long: these are not worth waiting for
            pass
