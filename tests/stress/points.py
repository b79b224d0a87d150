"""Named points of every verb, and a process that is killed at one of them.

A point is a function of Arena that the verb passes: its name is patched, in the process that is to die, to count down
and then to send that process SIGKILL, before the function's own work or behind it.
"""

from __future__ import annotations

import importlib
import os
import signal
from typing import Any

POINTS: dict[str, dict[str, str]] = {
    "writer": {
        "enqueue: encoded and copied, not laid out": "arena.codec:build_payload",
        "enqueue: before a block is lent": "arena.blocks:BlockPool.lend",
        "enqueue: a block is filled, not held": "arena.blocks:BlockPool.hold",
        "enqueue: before the holds are the readers'": "arena.blocks:BlockPool.send",
        "enqueue: before a slot is claimed": "arena.claim:Claim.wait",
        "enqueue: before a slot is filled": "arena.ring:WriterRing.write_pieces",
        "enqueue: a slot is filled, not published": "arena.ring:WriterRing.publish",
        "enqueue: published, nobody woken": "arena.ring:WriterRing.publish+",
        "enqueue: before a segment is handed over": "arena.peers.server:AttachServer.push",
        "enqueue: behind a segment's hand-over": "arena.peers.server:AttachServer.push+",
        "stream: published, nothing filled": "arena.filling:Filling.reached",
        "stream: partly filled": "arena.filling:Filling.reached+",
        "stream: before all is said to be there": "arena.filling:Filling.done",
        "stream: all is there": "arena.filling:Filling.done+",
        "lend: before a block is exported": "arena.blocks:BlockPool.export",
        "lend: behind it": "arena.blocks:BlockPool.export+",
        "release: what came back is collected": "arena.blocks:BlockPool.collect",
        "attach: before a reader is seated": "arena.peers.roster:Roster.seat_reader",
        "attach: seated, not answered": "arena.peers.roster:Roster.seat_reader+",
        "attach: before a joiner is admitted": "arena.peers.roster:Roster.admit",
        "shutdown: before the peers are told": "arena.writer:Writer._say_closing",
        "shutdown: told, nothing let go": "arena.writer:Writer._release_everything",
        "shutdown: all let go": "arena.writer:Writer._release_everything+",
    },
    "reader": {
        "dequeue: before a frame is looked at": "arena.ring:ReaderRing.kind",
        "dequeue: before it is decoded": "arena.codec:read_table",
        "dequeue: borrowed, not released": "arena.borrow:Borrower.borrow+",
        "dequeue: before the slot is released": "arena.ring:ReaderRing.release",
        "dequeue: behind it": "arena.ring:ReaderRing.release+",
        "dequeue: before a piece is added": "arena.assembly:Assembly.add",
        "stream: before it is followed": "arena.follow:Follower.follow",
        "stream: a part is there, and not queued": "arena.filling:Fill.beyond+",
        "stream: copies are under way, nothing decoded": "arena.follow:Follower.follow+",
        "release: before a hold goes back": "arena.borrow:_give_back",
        "release: before what died is swept": "arena.borrow:Borrower.sweep",
        "attach: before the hello": "arena.peers.attachment:Attachment._take_answer",
        "attach: answered, nothing mapped": "arena.peers.attachment:Attachment._take_answer+",
        "attach: before the ring is mapped": "arena.reader:Reader._map_ring",
        "attach: before it takes its place": "arena.reader:Reader._take_place",
        "shutdown: before it leaves": "arena.reader:Reader._release_everything",
        "shutdown: behind it": "arena.reader:Reader._release_everything+",
        "pin: before a segment is registered": "arena.pin:Pins.want",
        "pin: behind it": "arena.pin:Pins.want+",
    },
}


def arm(point: str, passes: int = 1) -> None:
    """From now on this process is killed when it passes `point` for the `passes`-th time."""
    module_name, _, path = point.rstrip("+").partition(":")
    owner: Any = importlib.import_module(module_name)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    wrapped = owner.__dict__[name] if isinstance(owner, type) else getattr(owner, name)
    left = [passes]

    def reached() -> None:
        left[0] -= 1
        if left[0] <= 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def at_the_point(*args: Any, **kwargs: Any) -> Any:
        if not point.endswith("+"):
            reached()
        result = wrapped(*args, **kwargs)
        if point.endswith("+"):
            reached()
        return result

    setattr(owner, name, at_the_point)
    if not isinstance(owner, type):  # those who imported it by name have the old one
        for other in ("arena.reader", "arena.codec", "arena.writer"):
            loaded = importlib.import_module(other)
            if getattr(loaded, name, None) is wrapped:
                setattr(loaded, name, at_the_point)
