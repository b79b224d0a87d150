"""The writer's side of its forwarder: starts the process, learns where it listens, counts what it refuses."""

from __future__ import annotations

import json
import os
import pickle
import select
import socket
import subprocess
import sys
import threading
import weakref
from typing import IO, Any, Final

from arena.config import RemoteConfig, split_address
from arena.errors import InvalidArgument, QueueTimeout, SetUpFailed
from arena.extras import require
from arena.message_queue import Warn
from arena.peers import Handle, RemoteAddress
from arena.probe import REFUSALS, Probe

_START_S: Final = 60.0
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
        warn: gets one sentence if the process ends before its time.

    Raises:
        InvalidArgument: nothing can be bound there.
        MissingLibrary: no zmq.
        SetUpFailed: the process does not come up.
    """

    def __init__(self, handle: Handle, config: RemoteConfig, bell: int, probe: Probe | None, warn: Warn) -> None:
        zmq = require("zmq")
        self._name, self._probe, self._warn = handle.name, probe, warn
        self._stopped = False
        host, port = _resolved(config)
        server_key, server_secret = (key.decode() for key in zmq.curve_keypair())
        client_key, client_secret = (key.decode() for key in zmq.curve_keypair())
        bound = RemoteConfig(f"{_bracketed(host)}:{port}", config.connect or config.bind, *_rest(config))
        self._process = self._start(pickle.dumps((handle, bound, bell, (server_secret, client_key))), bell)
        _forwarders.add(self)
        try:
            found = self._answer()
        except BaseException:
            self._process.kill()
            self._close()
            self._process.wait()
            raise
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
        self._close_input()

    def abandon(self) -> None:
        """In a forked child: an input that we keep open would keep it from seeing the writer's end."""
        self._close()

    def _start(self, orders: bytes, bell: int) -> subprocess.Popen[bytes]:
        path = json.dumps([os.path.abspath(entry or os.curdir) for entry in sys.path]).encode()
        # Unbuffered: a buffer's lock would be held by our thread at a fork, and never given back in the child.
        command, pipe = [sys.executable, "-c", _PROGRAM], subprocess.PIPE
        process = subprocess.Popen(command, bufsize=0, stdin=pipe, stdout=pipe, pass_fds=[bell])
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
        answer = json.loads(line) if line else {}
        if "port" not in answer:
            raise SetUpFailed(
                f"the forwarder of queue {self._name!r} did not come up",
                expected="a process that listens",
                found=str(answer.get("failed", "one that ended; its error output says why")),
                remedy="see that the address is one of this host's and the port is free",
            )
        return int(answer["port"])

    # ── the thread ───────────────────────────────────────────────────────────────────────────────
    def _listen(self) -> None:
        for line in _pipe(self._process.stdout):
            self._count(json.loads(line).get("refused", {}))
        status = self._process.wait()
        if not self._stopped:
            self._warn(
                f"the forwarder of queue {self._name!r} (pid {self._process.pid}) ended with {status}: "
                "no reader on another host can attach any more"
            )

    def _count(self, refused: dict[str, int]) -> None:
        if self._probe is not None:
            for reason, count in refused.items():
                if reason in REFUSALS:
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
