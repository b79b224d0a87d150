"""iceoryx2: a publisher to N subscribers, and a publisher a reader for the answers. Both sides poll and yield."""

from __future__ import annotations

import ctypes
import importlib
import os
import pickle
import time
from collections.abc import Callable
from typing import Any

from telemetry.commands.bench.contenders import READY_TIMEOUT_S, Contender, Ends

_SLOT_BYTES = 16384


class Iceoryx2(Contender):
    """Payloads are pickled bytes in an iceoryx2 slice. Its Python subscriber has no blocking receive: it is polled."""

    name = "iceoryx2"
    modules = ("iceoryx2",)

    def __init__(self) -> None:
        self._readers = 0
        self._run = ""
        self._node: Any = None
        self._kept: list[Any] = []

    def prepare(self, readers: int) -> None:
        self._readers = readers
        self._run = f"arena-bench/{os.getpid()}/{time.monotonic_ns()}"

    def open_writer(self) -> Ends:
        answers = [self._subscriber(f"answers-{rank}", 1) for rank in range(self._readers)]
        publisher = self._publisher("broadcast", self._readers)
        return Ends(_sender(publisher), tuple(_receiver(subscriber) for subscriber in answers))

    def open_reader(self, rank: int) -> Ends:
        subscriber = self._subscriber("broadcast", self._readers)
        publisher = self._publisher(f"answers-{rank}", 1)
        return Ends(_sender(publisher), (_receiver(subscriber),))

    def close(self) -> None:
        for port in self._kept:
            port.delete()
        self._kept.clear()
        self._node = None

    def _subscriber(self, channel: str, readers: int) -> Any:
        subscriber = self._service(channel, readers).subscriber_builder().create()
        self._kept.append(subscriber)
        return subscriber

    def _publisher(self, channel: str, readers: int) -> Any:
        """Waits for the subscribers, so that the first message reaches all of them."""
        iox2 = importlib.import_module("iceoryx2")
        service = self._service(channel, readers)
        publisher = (
            service.publisher_builder()
            .initial_max_slice_len(_SLOT_BYTES)
            .backpressure_strategy(iox2.BackpressureStrategy.RetryUntilDelivered)
            .create()
        )
        self._kept.append(publisher)
        deadline = time.monotonic() + READY_TIMEOUT_S
        while service.dynamic_config.number_of_subscribers < readers:
            if time.monotonic() > deadline:
                raise TimeoutError(f"iceoryx2: not all {readers} subscribers of {channel} appeared")
            time.sleep(0.001)
        publisher.update_connections()
        return publisher

    def _service(self, channel: str, readers: int) -> Any:
        iox2 = importlib.import_module("iceoryx2")
        if self._node is None:
            iox2.set_log_level(iox2.LogLevel.Error)
            self._node = iox2.NodeBuilder.new().create(iox2.ServiceType.Ipc)
        return (
            self._node.service_builder(iox2.ServiceName.new(f"{self._run}/{channel}"))
            .publish_subscribe(iox2.Slice[ctypes.c_uint8])
            .enable_safe_overflow(False)  # a full queue must hold the writer, as everywhere else here
            .max_publishers(1)
            .max_subscribers(readers)
            .max_nodes(readers + 1)
            .open_or_create()
        )


def _sender(publisher: Any) -> Callable[[Any], None]:
    dumps, move = pickle.dumps, ctypes.memmove

    def send(obj: Any) -> None:
        data = dumps(obj, 5)
        sample = publisher.loan_slice_uninit(len(data))
        move(sample.payload_ptr, data, len(data))
        sample.assume_init().send()

    return send


def _receiver(subscriber: Any) -> Callable[[], Any]:
    loads, pause = pickle.loads, os.sched_yield

    def receive() -> Any:
        while (sample := subscriber.receive()) is None:
            pause()
        return loads(sample.payload().as_memory_view())

    return receive
