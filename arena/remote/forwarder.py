"""The writer's side of its forwarder: starts the process, learns where it listens, counts what it refuses.

Should the process be killed, its seats are lost with it: its readers are dead, as both ends hear, and those beside the
writer go on. Another takes its place, at the same address and with the same keys, so the handle stays good: whoever
attaches with it again goes on from there. To resume in place would take over a seat from a process that may have died
between any two of its stores, and gain nothing but the messages of one ring.
"""

from __future__ import annotations

import json
import os
import pickle
import select
import socket
import subprocess
import sys
import threading
import time
import weakref
from typing import IO, Any, Final

from arena.config import RemoteConfig, split_address
from arena.errors import ArenaError, InvalidArgument, QueueTimeout, SetUpFailed
from arena.extras import require
from arena.held import HeldLock
from arena.message_queue import Warn
from arena.peers import Handle, RemoteAddress
from arena.probe import REFUSALS, Probe

_START_S: Final = 60.0
_TRIES: Final = 5  # so many in a row that do not live for
_LONG_S: Final = 60.0
_PAUSE_S: Final = 0.1  # before the first of them; before the next ones twice as long each
_MOST_REFUSED: Final = 1 << 32  # between two reports
_PROGRAM: Final = """
import json, sys
sys.path[:] = json.loads(sys.stdin.buffer.readline())
from arena.remote.main import main
main()
"""
_forwarders: weakref.WeakSet[Forwarder] = weakref.WeakSet()


class Forwarder:
    """One process that holds a seat for each reader on another host.

    Args:
        handle: of the queue, which must answer already.
        config: where to listen.
        bell: what the writer rings, see `arena.remote.bell`.
        probe: the writer's page.
        warn: gets one sentence if the process ends before its time, and whether another takes its place.

    Raises:
        InvalidArgument: nothing can be bound there.
        MissingLibrary: no zmq.
        SetUpFailed: the process does not come up.
    """

    def __init__(self, handle: Handle, config: RemoteConfig, bell: int, probe: Probe | None, warn: Warn) -> None:
        zmq = require("zmq")
        self._name, self._probe, self._warn = handle.name, probe, warn
        self._stopped = False
        self._lock = HeldLock()
        self._tries, self._began_s = 0, time.monotonic()
        host, port = _resolved(config)
        server_key, server_secret = (key.decode() for key in zmq.curve_keypair())
        client_key, client_secret = (key.decode() for key in zmq.curve_keypair())
        connect, rest = config.connect or config.bind, _rest(config)
        self._handle, self._bell, self._keys = handle, bell, (server_secret, client_key)
        self._config = RemoteConfig(f"{_bracketed(host)}:{port}", connect, *rest)
        self._process = self._start(first=True)
        _forwarders.add(self)
        try:
            found = self._answer()
        except BaseException:
            self._process.kill()
            self._close()
            self._process.wait()
            raise
        self._config = RemoteConfig(f"{_bracketed(host)}:{found}", connect, *rest)
        self.address = RemoteAddress(
            endpoint=_endpoint(config, found),
            server_key=server_key,
            client_key=client_key,
            client_secret=client_secret,
            timeout_s=config.timeout_s,
            window_bytes=config.window_bytes,
        )
        # Also the process's parent, as far as its exit code goes.
        threading.Thread(target=self._listen, name=f"arena-forwarder:{handle.name}", daemon=True).start()

    def stop(self) -> None:
        """The queue is closed: it ends once its readers have what was published."""
        self._stopped = True
        with self._lock:
            self._close_input()

    def abandon(self) -> None:
        """In a forked child: an input that we keep open would keep it from seeing the writer's end."""
        self._close()

    def _start(self, *, first: bool) -> subprocess.Popen[bytes]:
        orders = pickle.dumps((self._handle, self._config, self._bell, self._keys, first))
        path = json.dumps([os.path.abspath(entry or os.curdir) for entry in sys.path]).encode()
        # Unbuffered: a buffer's lock would be held by our thread at a fork, and never given back in the child.
        command, pipe = [sys.executable, "-c", _PROGRAM], subprocess.PIPE
        process = subprocess.Popen(command, bufsize=0, stdin=pipe, stdout=pipe, pass_fds=[self._bell])
        try:
            os.write(_pipe(process.stdin).fileno(), path + b"\n" + orders)
        except OSError:  # it has ended already: its answer, or the lack of one, tells
            pass
        return process

    def _answer(self) -> int:
        """Where it listens."""
        output = _pipe(self._process.stdout)
        ready, _, _ = select.select([output], [], [], _START_S)
        if not ready:
            raise QueueTimeout(
                f"the forwarder of queue {self._name!r} did not come up", expected=f"an answer within {_START_S} s"
            )
        line = output.readline()
        answer = _said(line)
        port = answer.get("port")
        if type(port) is not int or not 0 < port < 1 << 16:
            ended = f"one that said {line[:80]!r}" if line else "one that ended; its error output says why"
            raise SetUpFailed(
                f"the forwarder of queue {self._name!r} did not come up",
                expected="a process that listens",
                found=str(answer.get("failed", ended)),
                remedy="see that the address is one of this host's and the port is free",
            )
        return port

    # ── the thread ───────────────────────────────────────────────────────────────────────────────
    def _listen(self) -> None:
        while True:
            for line in _pipe(self._process.stdout):
                self._count(_said(line).get("refused"))
            status = self._process.wait()
            if self._stopped or not self._start_another(status):
                return

    def _start_another(self, status: int) -> bool:
        """In the place of one that has ended with this status; False if that is no use."""
        ended = f"the forwarder of queue {self._name!r} (pid {self._process.pid}) ended with {status}: "
        lived_s = time.monotonic() - self._began_s
        self._tries = 1 if lived_s > _LONG_S else self._tries + 1
        if self._tries > _TRIES:
            self._warn(f"{ended}no reader on another host can attach any more")
            return False
        self._warn(f"{ended}its readers are dead; another takes its place, and they may attach again")
        time.sleep(_PAUSE_S * 2 ** (self._tries - 1))
        try:
            with self._lock:
                if self._stopped:
                    return False
                self._close()
                self._began_s = time.monotonic()
                self._process = self._start(first=False)
            self._answer()
        except (OSError, ValueError, ArenaError):  # an end like any other, unless the queue's
            self._process.kill()
        return True

    def _count(self, refused: object) -> None:
        if self._probe is not None and isinstance(refused, dict):
            for reason, count in refused.items():
                if reason in REFUSALS and type(count) is int and 0 < count < _MOST_REFUSED:
                    word = self._probe.word("remote_refused_total", reason)
                    self._probe.count(word, count)
                    self._probe.show(word)

    def _close_input(self) -> None:
        try:
            _pipe(self._process.stdin).close()
        except OSError:
            pass

    def _close(self) -> None:
        self._close_input()
        _pipe(self._process.stdout).close()


def _said(line: bytes) -> dict[str, Any]:
    """A line of its; nothing, where something else in that process wrote to its output."""
    try:
        said = json.loads(line)
    except (RecursionError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None, "it was started with pipes"
    return stream


def _rest(config: RemoteConfig) -> tuple[Any, ...]:
    return config.timeout_s, config.window_bytes


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _resolved(config: RemoteConfig) -> tuple[str, int]:
    """The one address behind what was asked for, and whether it can be bound: zmq would say less."""
    host, port = split_address("bind", config.bind)
    remedy = "name an address of this host, as `ip address` shows them, and a free port or none"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        addresses = {str(one[4][0]) for one in found}
        if len(addresses) != 1:
            raise OSError(f"it leads to {', '.join(sorted(addresses))}")
        with socket.socket(found[0][0], socket.SOCK_STREAM) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(found[0][4])
    except OSError as error:
        raise InvalidArgument(
            f"{config.bind} can't be listened on", expected="an address of this host", found=str(error), remedy=remedy
        ) from error
    return addresses.pop(), port


def _endpoint(config: RemoteConfig, bound: int) -> str:
    """What readers connect to."""
    host, port = split_address("connect", config.connect or config.bind)
    return f"tcp://{_bracketed(host)}:{port or bound}"


def _abandon_inherited() -> None:
    for forwarder in list(_forwarders):
        forwarder.abandon()


os.register_at_fork(after_in_child=_abandon_inherited)
