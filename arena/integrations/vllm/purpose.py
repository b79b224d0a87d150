"""What a queue of vLLM's is for, how it is set up, and whether Arena can carry it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from importlib import import_module
from typing import Any, Final

from arena.config import QueueConfig
from arena.layout import MAX_READERS

BROADCAST: Final = "broadcast"
RESPONSE: Final = "response"
GROUP: Final = "group"

_purpose: ContextVar[tuple[str, str] | None] = ContextVar("arena_vllm_purpose", default=None)
"""Kind and name of the queues that are being made, where the caller knows."""

_worker_ranks: list[int] = []
"""The rank at which this process reads an engine's broadcast, once it does: it is a worker then."""


def note_worker(rank: int) -> None:
    """This process reads an engine's broadcast, at this rank."""
    _worker_ranks[:] = [rank]


def why_not(n_reader: int, n_local_reader: int) -> str:
    """Why Arena can't carry such a queue; empty where it can."""
    if n_local_reader < n_reader:
        return f"{n_reader - n_local_reader} of its {n_reader} readers are on other hosts"
    if not 1 <= n_reader <= MAX_READERS:
        return f"it has {n_reader} readers, and Arena's have 1 to {MAX_READERS}"
    return ""


def purpose_of(n_reader: int) -> tuple[str, str]:
    """Kind and name of a new queue: a worker's own, to one reader, answers; the other one is the engine's."""
    made_for = _purpose.get()
    if made_for is not None:
        return made_for
    if _worker_ranks and n_reader == 1:
        return RESPONSE, response_name(_worker_ranks[0])
    return BROADCAST, "vllm:broadcast"


def response_name(rank: int) -> str:
    """What a worker's answers go by."""
    return f"vllm:response:rank{rank}"


def queue_config(name: str, n_reader: int) -> QueueConfig:
    """What readers get is writable, as it is from vLLM's queue.

    On GPUs it is copied there, and one shared original will do. On CPUs each reader works on its own.
    """
    alone = n_reader == 1 or not import_module("vllm.platforms").current_platform.is_cpu()
    return QueueConfig(name=name, views="shared" if alone else "private")


@contextlib.contextmanager
def making(kind: str, name: str) -> Iterator[None]:
    """In the block, queues are made for this."""
    token = _purpose.set((kind, name))
    try:
        yield
    finally:
        _purpose.reset(token)


def ranks_in(group: Any) -> str:
    """A group's global ranks in short: 0-3, or 0-2-4 where they are no range."""
    if hasattr(group, "world_size"):  # a StatelessProcessGroup, which has no other ranks than its own
        ranks = list(range(group.world_size))
    else:
        ranks = import_module("torch.distributed").get_process_group_ranks(group)
    is_range = ranks == list(range(ranks[0], ranks[-1] + 1))
    return "-".join(map(str, [ranks[0], ranks[-1]] if is_range else ranks))


class Purposeful:
    """Has the queues that vLLM's factories make called by what they are for. vLLM's own class comes after it."""

    @classmethod
    def create_from_process_group(cls, pg: Any, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's: collective over a group, `writer_rank` of which writes."""
        with making(GROUP, f"vllm:group:{ranks_in(pg)}"):
            return super().create_from_process_group(pg, *args, **kwargs)  # type: ignore[misc]

    @classmethod
    def create_from_process_group_single_reader(cls, pg: Any, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's: each rank writes a queue of its own, and `reader_rank` gets all the handles."""
        rank = import_module("torch.distributed").get_rank()
        with making(RESPONSE, response_name(rank)):
            return super().create_from_process_group_single_reader(pg, *args, **kwargs)  # type: ignore[misc]
