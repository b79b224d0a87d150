"""Ranks of a process group: workers that do the same at once, over gloo and a store in a file."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from arena import AllReduce
from tests.support.fleet import A_WHILE_S, Fleet, Here, Worker


def together(workers: list[Worker], function: Any, *args: Any, within: float = A_WHILE_S, **kwargs: Any) -> list[Any]:
    """The same command everywhere, at once, each with its rank first; the results in rank order."""
    calls = [worker.begin(function, rank, *args, **kwargs) for rank, worker in enumerate(workers)]
    return [call.result(within) for call in calls]


@contextmanager
def group(world: int, store: Path) -> Iterator[list[Worker]]:
    """As many workers, joined in one process group."""
    with Fleet() as fleet:
        workers = [fleet.start() for _ in range(world)]
        together(workers, join, world, store)
        yield workers


def join(here: Here, rank: int, world: int, store: Path) -> None:
    """Become a rank of a group."""
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=A_WHILE_S)
    )


def make(here: Here, rank: int, **options: Any) -> tuple[tuple[str, ...], dict[str, tuple[str, str]]]:
    """Make a communicator; the paths it has and those it has not."""
    here.comm = AllReduce(None, "cpu", **options)
    return here.comm.paths, here.comm.declined


def close(here: Here, rank: int) -> None:
    """Close it."""
    here.comm.close()
