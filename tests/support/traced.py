"""Processes that trace: what the workers of a fleet are told, and scripts that are watched from beginning to end.

`python -m tests.support.traced NAME URL` runs one of the scripts.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pickle
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tests.support.fleet import A_WHILE_S, Fleet, Here, attach, create, die_with_parent, eventually


class Unloadable:
    """Pickles, and does not unpickle."""

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (b"no pickle",)


# ── what workers are told ────────────────────────────────────────────────────────────────────────
def trace_on(here: Here, url: str, **settings: Any) -> None:
    """Install tracing, with a provider of this process's own."""
    from telemetry import traces

    here.provider = traces.otlp_provider(url)
    traces.install(here.provider, **settings)


def sample_only(here: Here, **settings: Any) -> None:
    """Install tracing without making spans."""
    from telemetry import traces

    traces.install(spans=False, **settings)


def trace_off(here: Here) -> Any:
    """Make the last spans and send them; the counts."""
    from telemetry import traces

    collected = traces.counts()
    traces.uninstall()
    assert here.provider.force_flush()
    return collected


def own_span(here: Here, name: str) -> tuple[str, str]:
    """Take a message, and go on with its trace in a span of one's own; its ids."""
    from telemetry import traces

    here.queue.dequeue(timeout=A_WHILE_S)
    tracer = here.provider.get_tracer("worker")
    with tracer.start_as_current_span(name, context=traces.current()) as span:
        return ids(span)


def enqueue_within(here: Here, name: str, *objects: Any) -> tuple[str, str]:
    """Send each object inside one span of the user's; its ids."""
    tracer = here.provider.get_tracer("engine")
    with tracer.start_as_current_span(name) as span:
        for obj in objects:
            here.queue.enqueue(obj, timeout=A_WHILE_S)
    return ids(span)


def ids(span: Any) -> tuple[str, str]:
    context = span.get_span_context()
    return f"{context.trace_id:032x}", f"{context.span_id:016x}"


def send_many(here: Here, count: int) -> float:
    """Enqueue small messages as fast as they go; the seconds it took."""
    began = time.perf_counter()
    for number in range(count):
        here.queue.enqueue(number, timeout=A_WHILE_S)
    return time.perf_counter() - began


def take_many(here: Here, count: int) -> int:
    """Dequeue them; the last one."""
    last = -1
    for _ in range(count):
        last = here.queue.dequeue(timeout=A_WHILE_S)
    return last


def send_tensor(here: Here, nbytes: int) -> None:
    import torch

    here.queue.enqueue(torch.zeros(nbytes, dtype=torch.uint8), timeout=A_WHILE_S)


def take_tensor(here: Here) -> int:
    """Its size."""
    size: int = here.queue.dequeue(timeout=A_WHILE_S).numel()
    return size


def copy_late(here: Here, seconds: float) -> None:
    """Take two tensors, and copy each to the device; the second, pinned by then, while its stream is that much late."""
    from tests.support.streams import cpu_streams, metric_of, pins

    with cpu_streams() as [stream]:
        here.queue.to_device(here.queue.dequeue(timeout=A_WHILE_S), "cpu", stream)
        assert set(pins(here.queue).values()) == {"pinned"}
        message = here.queue.dequeue(timeout=A_WHILE_S)
        late = stream.hold()
        moved = here.queue.to_device({"both": [message, message[:8]]}, "cpu", stream)
        del message
        eventually(lambda: metric_of(here.queue, "blocks_in_gate").value == 1)
        time.sleep(seconds)
        late.set()
        eventually(lambda: metric_of(here.queue, "blocks_in_gate").value == 0)
        assert moved["both"][1].numel() == 8


def reduce_within(here: Here, rank: int, counts: list[int]) -> None:
    """Reduce something before any message, and within one that is taken."""
    import torch

    here.comm.all_reduce(torch.ones(3))
    here.queue.dequeue(timeout=A_WHILE_S)
    for count in counts:
        here.comm.all_reduce(torch.ones(count))


def send_unloadable(here: Here) -> None:
    here.queue.enqueue(Unloadable(), timeout=A_WHILE_S)


def traces_dropped(here: Here) -> tuple[int, int]:
    """Messages sampled, and those that were to be and had no room."""
    here.queue.statistics()
    probe = here.queue._probe
    return tuple(probe.values[probe.word(name)] for name in ("traces_sampled_total", "traces_dropped_total"))


# ── scripts ──────────────────────────────────────────────────────────────────────────────────────
def families(url: str) -> None:
    """A traced engine whose provider is set first; four workers forked from it, and four spawned."""
    from arena import MessageQueue, QueueConfig
    from telemetry import traces

    provider = traces.otlp_provider(url)
    traces.install(provider, ratio=0.0)
    with MessageQueue(8, config=QueueConfig(name="steps")) as queue:
        workers = []
        for rank in range(8):
            context = multiprocessing.get_context("fork" if rank < 4 else "spawn")
            arguments = (url if rank >= 4 else "", queue.export_handle(), rank)
            workers.append(context.Process(target=family_member, args=arguments))
            workers[-1].start()
        queue.wait_until_ready(A_WHILE_S)
        with provider.get_tracer("engine").start_as_current_span("step") as span:
            queue.enqueue("go", timeout=A_WHILE_S)
        for worker in workers:
            worker.join(A_WHILE_S)
        print(ids(span)[0], os.getpid(), *(worker.pid for worker in workers))
        assert [worker.exitcode for worker in workers] == [0] * 8


def late_family(url: str) -> None:
    """An engine that forks two workers while a thread of it sends spans, and sends more afterwards."""
    from arena import MessageQueue, QueueConfig
    from telemetry import traces

    provider = traces.otlp_provider(url)
    traces.install(provider, ratio=0.0)
    tracer, forked = provider.get_tracer("engine"), threading.Event()
    sending = threading.Thread(target=keep_sending, args=(provider, forked))
    sending.start()
    with MessageQueue(2, config=QueueConfig(name="steps")) as queue:
        context = multiprocessing.get_context("fork")
        workers = [
            context.Process(target=family_member, args=("", queue.export_handle(), rank), daemon=True)
            for rank in range(2)
        ]
        for worker in workers:
            worker.start()
        forked.set()
        sending.join()
        queue.wait_until_ready(A_WHILE_S)
        with tracer.start_as_current_span("step") as span:
            queue.enqueue("go", timeout=A_WHILE_S)
        for worker in workers:
            worker.join(A_WHILE_S)
        print(ids(span)[0], os.getpid(), *(worker.pid for worker in workers))
        assert [worker.exitcode for worker in workers] == [0] * 2


def keep_sending(provider: Any, until: threading.Event) -> None:
    """One span after the other, each sent at once."""
    while not until.is_set():
        with provider.get_tracer("engine").start_as_current_span("before"):
            pass
        assert provider.force_flush()


def family_member(url: str, handle: Any, rank: int) -> None:
    """A worker: forked, it has its parent's tracing; spawned, it sets its own up."""
    from arena import MessageQueue
    from telemetry import traces

    die_with_parent()
    if url:
        traces.install(traces.otlp_provider(url), ratio=0.0)
    with MessageQueue.create_from_handle(handle, rank, timeout=A_WHILE_S) as reader:
        assert reader.dequeue(timeout=A_WHILE_S) == "go"


def steady(url: str) -> None:
    """A traced queue with both ends in one process, for as long as a line is awaited on stdin; then the end, timed."""
    from arena import MessageQueue, QueueConfig
    from telemetry import traces

    provider = traces.otlp_provider(url)
    traces.install(provider, ratio=1.0, per_second=1000)
    with (
        MessageQueue(1, config=QueueConfig(name="steps")) as queue,
        MessageQueue.create_from_handle(queue.export_handle(), 0) as reader,
    ):
        for number in range(300):
            queue.enqueue(number)
            assert reader.dequeue() == number
            time.sleep(0.005)
            if number == 150:
                print("half", flush=True)
                sys.stdin.readline()
    print("done", flush=True)
    began = time.monotonic()
    traces.uninstall()
    provider.shutdown()
    counts = traces_counts(provider)
    print(time.monotonic() - began, *counts, flush=True)


def careless(url: str) -> None:
    """Twenty traced messages, and the end of the process without a word to anybody."""
    from arena import MessageQueue, QueueConfig
    from telemetry import traces

    traces.install(traces.otlp_provider(url), ratio=1.0, per_second=1000)
    queue = MessageQueue(1, config=QueueConfig(name="steps"))
    reader = MessageQueue.create_from_handle(queue.export_handle(), 0)
    for number in range(20):
        queue.enqueue(number)
        reader.dequeue()
    with contextlib.suppress(TimeoutError):
        reader.dequeue(timeout=0)
    print("done", flush=True)


def work(here: Here, count: int, seconds: float) -> None:
    """Dequeue messages, and be busy with each for so long."""
    for _ in range(count):
        here.queue.dequeue(timeout=A_WHILE_S)
        time.sleep(seconds)


def picture(path: str) -> None:
    """The README's timeline: three workers, of which the second is slow, on a ring of two slots."""
    from telemetry.perfetto import timeline
    from telemetry.reader import Watcher

    with Fleet() as fleet:
        writer, *readers = [fleet.start() for _ in range(4)]
        writer.call(sample_only, ratio=1.0, per_second=1000)
        handle = writer.call(create, 3, name="steps", slots=2)
        for rank, reader in enumerate(readers):
            reader.call(attach, handle, rank)
        calls = [reader.begin(work, 7, 0.012 if rank == 1 else 0.004) for rank, reader in enumerate(readers)]
        writer.call(send_many, 6)
        time.sleep(0.1)  # all six are taken; the seventh lets them be done
        writer.call(send_many, 1)
        for call in calls:
            call.result()
        with Watcher() as watcher:
            drawing = timeline(watcher.look().queues[0])
    # That the workers attached, and the seventh message, would only take room.
    shown = [one for one in drawing["traceEvents"] if one["ph"] == "M" or (one["ph"] != "i" and one["ts"] < 1e5)]
    Path(path).write_text(json.dumps({**drawing, "traceEvents": shown}, indent=1) + "\n")


def traces_counts(provider: Any) -> tuple[int, int, int]:
    from telemetry.traces.outlet import outlet_of

    outlet = outlet_of(provider)
    return outlet.handed, outlet.delivered, outlet.dropped


if __name__ == "__main__":
    scripts = (families, late_family, steady, careless, picture)
    {script.__name__: script for script in scripts}[sys.argv[1]](sys.argv[2])
