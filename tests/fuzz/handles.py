"""Handles: fields of another value or type, in Arena's own and in what travels in place of vLLM's."""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import zmq

from arena import Handle, MessageQueue, QueueConfig
from arena.errors import ArenaError
from arena.integrations.vllm.handle import MAGIC, VERSION, QueueHandle
from arena.peers import RemoteAddress
from arena.remote.link import _resolve
from tests.fuzz.common import SETTINGS, Run, Wrong, name_of

VALUES: list[Any] = [0, -1, 1 << 40, 1 << 62, 1.5, "x", "", None, [], {}, True, "/nowhere", "a" * 300, "\ud800", "\0"]
KEY = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"  # of RFC 32's example, in Z85
ADDRESS = RemoteAddress("tcp://127.0.0.1:9", KEY, KEY, "JTKVSB%%)wK0E.X)V>+}o?pNmC{O&4W4b!Ni{Lh6", 1.0, 1 << 20)


def _paths(example: Any) -> list[tuple[str, ...]]:
    """The fields of a dataclass, and of those in it."""
    found: list[tuple[str, ...]] = []
    for one in fields(example):
        found.append((one.name,))
        value = getattr(example, one.name)
        if is_dataclass(value):
            found += [(one.name, *path) for path in _paths(value)]
    return found


def _changed(example: Any, path: tuple[str, ...], value: Any) -> Any:
    name, *rest = path
    return replace(example, **{name: _changed(getattr(example, name), tuple(rest), value) if rest else value})


def _case(data: bytes, paths: list[tuple[str, ...]]) -> tuple[tuple[str, ...], Any] | None:
    """Number of a field, and its value, as JSON; of what is none, the first two bytes say which field and what."""
    try:
        number, value = json.loads(data)
        return paths[number % len(paths)], value
    except (TypeError, ValueError, RecursionError, OverflowError):
        return (paths[data[0] % len(paths)], _value(data[1], data[2:])) if len(data) > 2 else None


def _value(kind: int, data: bytes) -> Any:
    """Any bytes as a value of one of the types that a pickle may put into a field."""
    kinds: list[Callable[[], Any]] = [
        lambda: data.decode("latin-1"),
        lambda: data.decode(errors="surrogateescape"),
        lambda: int.from_bytes(data[:9], "little", signed=True),
        lambda: struct.unpack("=d", data[:8].ljust(8, b"\0"))[0],
        lambda: list(data[:9]),
        lambda: data,
    ]
    return kinds[kind % len(kinds)]()


def _seeds(count: int) -> list[bytes]:
    return [json.dumps([number, value]).encode() for number in range(count) for value in VALUES[number % 3 :: 3]]


def handle_seeds() -> list[bytes]:
    """Fields of a handle by number, and what they become, as JSON."""
    return _seeds(len(fields(Handle)) + 9)


@contextlib.contextmanager
def handles() -> Iterator[Run]:
    """A handle with one field of another value or type, in its geometry and its address, too."""
    with MessageQueue(1, config=QueueConfig(**SETTINGS)) as queue:
        handle = replace(queue.export_handle(), remote=ADDRESS)
        paths = _paths(handle)
        socket = zmq.Context.instance().socket(zmq.DEALER)

        def run(data: bytes) -> str:
            case = _case(data, paths)
            if case is None:
                return "no case"
            try:
                changed = _changed(handle, *case)
                changed.check()
                if case[0][0] == "remote":
                    return _reached(changed.remote, socket)
                # Nothing is asked for over the network, as from another host it would be.
                reader = MessageQueue.create_from_handle(replace(changed, remote=None), 0, timeout=2)
            except ArenaError as error:
                return name_of(error)
            reader.shutdown()
            with contextlib.suppress(ArenaError):  # the writer lets go of who left when it next sends
                queue.enqueue(0, timeout=0)
            return "attached"

        yield run


def _reached(address: Any, socket: Any) -> str:
    """What zmq is told of an address that was found good: it has to take it."""
    if address is None:
        return "no address"
    for option, value in (
        (zmq.CURVE_SERVERKEY, address.server_key.encode()),
        (zmq.CURVE_PUBLICKEY, address.client_key.encode()),
        (zmq.CURVE_SECRETKEY, address.client_secret.encode()),
        (zmq.HEARTBEAT_IVL, max(20, int(address.timeout_s * 200))),
        (zmq.IPV6, "[" in address.endpoint),
    ):
        socket.setsockopt(option, value)
    if set(address.endpoint.removeprefix("tcp://")) <= set("0123456789.:[]"):  # no name that would be looked up
        _resolve(address.endpoint)
    return "an address"


def vllm_seeds() -> list[bytes]:
    """The same of what travels in place of vLLM's handle."""
    return _seeds(len(fields(QueueHandle)))


@contextlib.contextmanager
def vllm_handles() -> Iterator[Run]:
    """What a reader does with it before it attaches."""
    with MessageQueue(2, config=QueueConfig(**SETTINGS)) as queue:
        handle = QueueHandle(MAGIC, VERSION, "broadcast", [0, 1], os.getpid(), queue.export_handle())
        paths = [path for path in _paths(handle) if len(path) == 1]

        def run(data: bytes) -> str:
            case = _case(data, paths)
            if case is None:
                return "no case"
            try:
                changed = _changed(handle, *case)
                changed.check()
                rank = changed.rank_of(1)
                changed.arena.check()
            except ArenaError as error:
                return name_of(error)
            if type(rank) is not int or not 0 <= rank < 2:
                raise Wrong(f"rank {rank} of two, by {changed.local_reader_ranks}")
            return f"rank {rank}"

        yield run
