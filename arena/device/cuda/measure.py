"""Times all-reduce as an engine runs it, inside a CUDA graph, and what it is held against: the copy engine, the launch.

For benchmarks, autotuning and tests. Every wait has a deadline, because an all-reduce whose peer is gone does not end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from typing import Final

import torch

from arena.device import Place
from arena.device.cuda import driver
from arena.device.cuda.inbox import Inbox, exchange
from arena.device.cuda.push import load, mail_type
from arena.device.cuda.streams import cuda, current_stream_of

Operation = Callable[[torch.Tensor], torch.Tensor]
DEADLINE_S: Final = 10.0


class Repeated:
    """Many calls of one operation, captured in a graph. The inputs are taken in turn."""

    def __init__(self, operation: Operation, inputs: Sequence[torch.Tensor], count: int) -> None:
        self.count = count
        self._graph = cuda.CUDAGraph()
        operation(inputs[0])  # whatever is made at the first call is made now
        wait()
        with cuda.graph(self._graph, stream=cuda.current_stream()):
            for turn in range(count):
                self.out = operation(inputs[turn % len(inputs)])

    def run(self) -> torch.Tensor:
        """All of them once, into an output full of NaN; the last one's result."""
        self.out.fill_(float("nan"))
        self._graph.replay()
        wait()
        return self.out

    def time_us(self) -> float:
        """Microseconds a call, of a replay right behind another: the first one brings the ranks into step."""
        began, ended = (cuda.Event(enable_timing=True) for _ in range(2))
        self._graph.replay()
        began.record()
        self._graph.replay()
        ended.record()
        wait()
        milliseconds: float = began.elapsed_time(ended)
        return milliseconds * 1e3 / self.count


class PeerCopy:
    """The copy engine, moving a tensor into the memory of the next rank. What it writes means nothing to anybody."""

    def __init__(self, inbox: Inbox, device: torch.device) -> None:
        self._inbox = inbox
        self._index = device.index

    @classmethod
    def set_up(cls, place: Place, size_bytes: int) -> Generator[bytes, list[bytes], PeerCopy]:
        """Room for so many bytes at every rank."""
        inbox = yield from exchange(place, size_bytes)
        return cls(inbox, place.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Queue the copy."""
        driver.copy(self._inbox.peers[0], x.data_ptr(), x.nbytes, current_stream_of(self._index))
        return x

    def close(self) -> None:
        """Give the memory back. Collective: nobody may still be copying."""
        self._inbox.close()


def empty_launch(world: int, device: torch.device) -> Callable[[], None]:
    """A launch of a kernel that does nothing, by the same launcher: what an eager operation costs at the least."""
    capability = torch.cuda.get_device_capability(device)
    nothing = load(world, device, capability)["nothing", torch.float32]
    launch = driver.Launch(nothing, (1, 32), 0, mail_type(world)(), early=True)
    stream: int = current_stream_of(device.index)
    return lambda: launch(stream, 0, 0)


def host_us(call: Callable[[], object], calls: int) -> float:
    """Microseconds of the host a call, with nothing else queued."""
    wait()
    began = time.perf_counter()
    for _ in range(calls):
        call()
    took = time.perf_counter() - began
    wait()
    return took / calls * 1e6


def wait(seconds: float = DEADLINE_S) -> None:
    """Until the current stream is empty.

    Raises:
        TimeoutError: it was not, by the deadline.
    """
    event = cuda.current_stream().record_event()
    ends = time.monotonic() + seconds
    while not event.query():
        if time.monotonic() > ends:
            raise TimeoutError(f"what was queued is not over after {seconds} s")
