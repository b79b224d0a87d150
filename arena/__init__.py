"""Arena: the single-node data plane of a tensor-parallel inference engine, built so that you can see into it.

`MessageQueue` broadcasts Python objects and large tensors from one writer to N readers through shared memory.
`AllReduce` sums the workers' tensors, by the path that suits their size. Importing this package imports neither torch
nor any telemetry library; asking for `AllReduce` imports torch, and registers ``torch.ops.arena.all_reduce``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from arena.config import QueueConfig, RemoteConfig
from arena.message_queue import MessageQueue, Statistics
from arena.peers import Handle

if TYPE_CHECKING:
    from arena.allreduce import AllReduce
    from arena.transfer import record_stream

__all__ = ["AllReduce", "Handle", "MessageQueue", "QueueConfig", "RemoteConfig", "Statistics", "record_stream"]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name == "record_stream":
        return import_module("arena.transfer").record_stream
    if name != "AllReduce":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import_module("arena.operator")
    return import_module("arena.allreduce").AllReduce
