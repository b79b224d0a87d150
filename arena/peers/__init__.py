"""Who is attached, alive, gone: the roster, the attach hand-shake, and memory handed over by fd.

*Attach* needs nobody's attention: a daemon thread of the writer's process answers on a unix socket in the
queue's directory, so a reader may come while the writer's own thread is loading a model. Engines create
readers long before the writer looks at them, in any order, by fork and by spawn.

*Hand-over.* The connection stays open, and the writer pushes the fd of each new segment through it before it
publishes the first frame that names the segment. What is in the socket outlives the writer, so nothing
published ever depends on the writer living on.

*Liveness* is a pidfd, taken from the socket itself (SO_PEERPIDFD) where the kernel has that, so that no pid
can have been reused in between. File locks would not do: a forked child of the peer keeps them held.
"""

from __future__ import annotations

from arena.peers.attachment import Attachment
from arena.peers.host import host_id, is_elsewhere
from arena.peers.process import Process
from arena.peers.roster import Roster, Seat
from arena.peers.server import AttachServer
from arena.peers.wire import MAGIC, MAX_SEGMENTS, PROTOCOL, Handle, RemoteAddress, naming_descriptors

__all__ = [
    "MAGIC",
    "MAX_SEGMENTS",
    "PROTOCOL",
    "AttachServer",
    "Attachment",
    "Handle",
    "Process",
    "RemoteAddress",
    "Roster",
    "Seat",
    "host_id",
    "is_elsewhere",
    "naming_descriptors",
]
