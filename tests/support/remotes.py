"""Readers that take themselves for being on another host, over loopback; and strangers with keys or without."""

import json
import os
import socket
from pathlib import Path
from typing import Any

import zmq

from arena import Handle, MessageQueue, QueueConfig, RemoteConfig
from arena.remote import wire
from tests.support.fleet import Fleet, Here, Worker, attach


def make(n_reader: int, *, remote: RemoteConfig | str = "127.0.0.1", **settings: Any) -> MessageQueue:
    """A queue of this process's that readers elsewhere may come to."""
    return MessageQueue(n_reader, config=QueueConfig(**settings), remote=remote)


def create(here: Here, n_reader: int, remote: RemoteConfig | str = "127.0.0.1", **settings: Any) -> Handle:
    """The same in a worker."""
    here.queue = make(n_reader, remote=remote, **settings)
    return here.queue.export_handle()


def elsewhere(here: Here, name: str = "elsewhere") -> None:
    """For a worker: be on another host."""
    os.environ["ARENA_HOST_ID"] = name


def attach_from_afar(here: Here, handle: Handle, rank: int) -> str:
    """Be a reader on another host; the class that came of it."""
    elsewhere(here)
    attach(here, handle, rank)
    return type(here.queue).__name__


def readers_afar(fleet: Fleet, handle: Handle, *ranks: int) -> list[Worker]:
    """Workers attached over the network."""
    workers = [fleet.start() for _ in ranks]
    calls = [worker.begin(attach_from_afar, handle, rank) for worker, rank in zip(workers, ranks, strict=True)]
    assert [call.result() for call in calls] == ["RemoteReader"] * len(ranks)
    return workers


def port_of(handle: Handle) -> int:
    """Where its forwarder listens."""
    assert handle.remote is not None
    return int(handle.remote.endpoint.rpartition(":")[2])


def forwarder_of(queue: Any) -> int:
    """The pid of its forwarder."""
    return int(queue._forwarder._process.pid)


def listening(pid: int) -> set[tuple[str, int]]:
    """Addresses that a process listens on."""
    inodes = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            link = os.readlink(f"/proc/{pid}/fd/{fd}")
        except FileNotFoundError:  # closed meanwhile
            continue
        if link.startswith("socket:["):
            inodes.add(link[8:-1])
    found = set()
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and fields[9] in inodes:
            address, port = fields[1].split(":")
            found.add((socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)))
    return found


class Stranger:
    """A bare socket with the keys of a handle, or others, that says what it likes."""

    def __init__(self, handle: Handle, **keys: bytes) -> None:
        assert handle.remote is not None
        self.handle = handle
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.routing_id = b"a" + os.urandom(15)  # the same after its connection broke
        self.socket.curve_serverkey = keys.get("server", handle.remote.server_key.encode())
        self.socket.curve_publickey = keys.get("public", handle.remote.client_key.encode())
        self.socket.curve_secretkey = keys.get("secret", handle.remote.client_secret.encode())
        self.socket.connect(handle.remote.endpoint)

    def __enter__(self) -> "Stranger":
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def hello(self, rank: int, **changed: Any) -> None:
        """Say hello like a reader would, but for what is changed."""
        handle = self.handle
        content = {
            "magic": handle.magic,
            "version": handle.version,
            "remote": wire.REMOTE_PROTOCOL,
            "instance": handle.instance,
            "secret": handle.secret,
            "rank": rank,
            "host": "stranger",
            "pid": os.getpid(),
        }
        self.socket.send(wire.HELLO + json.dumps(content | changed).encode())

    def answer(self, within_s: float = 20.0) -> bytes:
        """The next message."""
        assert self.socket.poll(within_s * 1000), "no answer"
        return b"".join(self.socket.recv_multipart())
