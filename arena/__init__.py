"""Arena: the single-node data plane of a tensor-parallel inference engine, built so that you can see into it.

`MessageQueue` broadcasts Python objects and large tensors from one writer to N readers through shared memory.
Importing this package imports neither torch nor any telemetry library.
"""

from __future__ import annotations

from arena.config import QueueConfig
from arena.message_queue import MessageQueue, Statistics
from arena.peers import Handle

__all__ = ["Handle", "MessageQueue", "QueueConfig", "Statistics"]
