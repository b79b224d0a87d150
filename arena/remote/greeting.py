"""A reader's first words to a forwarder: who it is, and that it knows the queue's secret."""

from __future__ import annotations

import os
import time
from typing import Any, Final

from arena.errors import ArenaError, AttachRefused, CorruptFrame, HandleMismatch, PeerDied, QueueClosed, QueueTimeout
from arena.peers import Handle
from arena.remote import wire
from arena.remote.link import Link
from arena.wait import deadline_after

_TRIES: Final = 3  # so often a connection may fail before it is said to be hopeless
_AGAIN_NS: Final = 1_000_000_000
_monotonic_ns = time.monotonic_ns


def greet(link: Link, handle: Handle, rank: int, timeout_s: float | None) -> None:
    """Say who we are until the forwarder answers: what is said once may be lost with a connection.

    Raises:
        ArenaError: the one that the forwarder names.
        HandleMismatch: whoever is there speaks something else, or has other keys.
        QueueClosed: nobody is there any more.
        QueueTimeout: no answer came.
    """
    deadline_ns, asked_ns, failures = deadline_after(timeout_s), 0, [""]
    hello = wire.pack_json(wire.HELLO, _hello(handle, rank))
    while True:
        now_ns = _monotonic_ns()
        if deadline_ns is not None and now_ns >= deadline_ns:
            raise _unanswered(handle, timeout_s, failures[-1])
        if now_ns - asked_ns > _AGAIN_NS:
            link.send(hello)
            asked_ns = now_ns
        link.wait(100)
        while isinstance(message := link.receive(), bytes):
            if is_answer(handle.name, message):
                return
        failures += link.failures()
        _refuse_to_go_on(handle, failures)


def _hello(handle: Handle, rank: int) -> dict[str, Any]:
    return {
        "magic": handle.magic,
        "version": handle.version,
        "remote": wire.REMOTE_PROTOCOL,
        "instance": handle.instance,
        "secret": handle.secret,
        "rank": rank,
        "host": os.uname().nodename,
        "pid": os.getpid(),
    }


def is_answer(queue: str, message: bytes) -> bool:
    """Whether a message says that we are welcome; one that says we are not is raised."""
    if message[:1] == wire.REFUSED:
        try:
            raise refusal(wire.unpack_json(message))
        except wire.Malformed as error:
            raise none_of_ours(queue, error) from None
    return message[:1] == wire.WELCOME


def refusal(answer: dict[str, Any]) -> ArenaError:
    """The error that a forwarder's answer names."""
    kinds = {"AttachRefused": AttachRefused, "QueueClosed": QueueClosed, "PeerDied": PeerDied}
    return kinds.get(str(answer.get("kind")), HandleMismatch)(str(answer.get("text")))


def none_of_ours(queue: str, error: wire.Malformed) -> CorruptFrame:
    """The error for what is no message of a forwarder's."""
    return CorruptFrame(
        f"the forwarder of queue {queue!r} sent what is none of its messages",
        expected=f"Arena's remote protocol {wire.REMOTE_PROTOCOL}",
        found=str(error),
        remedy="run the same Arena version on every host",
    )


def _refuse_to_go_on(handle: Handle, failures: list[str]) -> None:
    address = _address(handle)
    if "key" in failures or failures.count("hung_up") >= _TRIES:
        raise HandleMismatch(
            f"the connection to queue {handle.name!r} was refused in the hand-shake",
            expected=f"a forwarder at {address} that holds the other half of the handle's keys",
            found="keys that do not go together, or something that is no forwarder",
            remedy="give the reader the handle that export_handle() gave, of the queue that runs now",
        )
    if failures.count("refused") >= 2 * _TRIES:
        raise QueueClosed(
            f"the queue {handle.name!r} of this handle is gone, or out of reach",
            expected=f"somebody listening at {address}",
            found=f"connections refused or without an answer, {failures.count('refused')} times",
            remedy="see that the writer runs, and that no firewall is between; RemoteConfig says bind and connect",
        )


def _unanswered(handle: Handle, timeout_s: float | None, last: str) -> QueueTimeout:
    found = {"": "a connection, or the attempt of one, and silence", "refused": "no connection"}
    return QueueTimeout(
        f"the forwarder of queue {handle.name!r} did not answer",
        expected=f"an answer from {_address(handle)} within {timeout_s} s",
        found=found.get(last, "connections that broke off"),
        remedy="see that the writer runs and that no firewall is between, or allow more time",
    )


def _address(handle: Handle) -> str:
    assert handle.remote is not None
    return handle.remote.endpoint
