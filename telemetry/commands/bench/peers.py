"""The others: what a Python programmer would use instead, each the way its documentation recommends.

Every peer gets the same object and gives the same answer as Arena. Where a library leaves a choice, the faster one is
taken: an object is pickled once for all readers where the peer lets us, and a tensor travels as its bytes.
"""

from __future__ import annotations

import importlib
import os
import pickle
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, ClassVar

from telemetry.commands.bench.contenders import Contender, Ends


class MultiprocessingPipe(Contender):
    """`multiprocessing.Pipe`, one a reader. Pickled once, sent to each; a tensor is pickled by torch, by value."""

    name = "multiprocessing.Pipe"

    def __init__(self) -> None:
        self._pairs: list[tuple[Connection, Connection]] = []

    def prepare(self, readers: int) -> None:
        self._pairs = [Pipe() for _ in range(readers)]

    def open_writer(self) -> Ends:
        connections = [mine for mine, _ in self._pairs]

        def send(obj: Any) -> None:
            data = pickle.dumps(obj, 5)
            for connection in connections:
                connection.send_bytes(data)

        return Ends(send, tuple(connection.recv for connection in connections))

    def open_reader(self, rank: int) -> Ends:
        _, mine = self._pairs[rank]
        return Ends(mine.send, (mine.recv,))

    def close(self) -> None:
        for connection in (end for pair in self._pairs for end in pair):
            connection.close()


class Pyzmq(Contender):
    """pyzmq over ipc: XPUB to SUB for the broadcast, as engines do it, and PUSH to PULL for the answers."""

    name = "pyzmq ipc"
    modules: ClassVar[tuple[str, ...]] = ("zmq",)

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="arena-bench-")
        self._readers = 0
        self._context: Any = None
        self._owner = os.getpid()

    def prepare(self, readers: int) -> None:
        self._readers = readers

    def open_writer(self) -> Ends:
        zmq = importlib.import_module("zmq")
        broadcast = self._socket(zmq.XPUB, "broadcast", bind=True)
        answers = self._socket(zmq.PULL, "answers", bind=True)
        for _ in range(self._readers):
            broadcast.recv()  # a subscription: from here on that reader misses nothing
        return Ends(self._sender(broadcast), (partial(self._answer, answers),) * self._readers)

    def open_reader(self, rank: int) -> Ends:
        zmq = importlib.import_module("zmq")
        broadcast = self._socket(zmq.SUB, "broadcast", bind=False)
        broadcast.setsockopt(zmq.SUBSCRIBE, b"")
        answers = self._socket(zmq.PUSH, "answers", bind=False)
        return Ends(lambda answer: answers.send(pickle.dumps(answer, 5)), (self._receiver(broadcast),))

    def close(self) -> None:
        if self._context is not None:
            self._context.destroy(linger=1000)
        if os.getpid() == self._owner:
            self._directory.cleanup()

    def _sender(self, socket: Any) -> Callable[[Any], object]:
        return lambda obj: socket.send(pickle.dumps(obj, 5))

    def _receiver(self, socket: Any) -> Callable[[], Any]:
        return lambda: pickle.loads(socket.recv())

    def _answer(self, socket: Any) -> Any:
        return pickle.loads(socket.recv())

    def _socket(self, kind: int, channel: str, *, bind: bool) -> Any:
        zmq = importlib.import_module("zmq")
        if self._context is None:
            self._context = zmq.Context()
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, 0)  # PUB drops above it; every message must arrive
        socket.setsockopt(zmq.RCVHWM, 0)
        if kind == zmq.XPUB:
            socket.setsockopt(zmq.XPUB_VERBOSE, True)
        address = f"ipc://{self._directory.name}/{channel}"
        if bind:
            socket.bind(address)
        else:
            socket.connect(address)
        return socket


class PyzmqTensor(Pyzmq):
    """The same sockets, with the tensor's bytes as a frame of their own that pyzmq does not copy (copy=False)."""

    name = "pyzmq ipc, copy=False"
    modules = ("zmq", "numpy")

    def _sender(self, socket: Any) -> Callable[[Any], object]:
        def send(tensor: Any) -> None:
            buffers: list[pickle.PickleBuffer] = []
            head = pickle.dumps(tensor.numpy(), 5, buffer_callback=buffers.append)
            socket.send_multipart([head, *buffers], copy=False)

        return send

    def _receiver(self, socket: Any) -> Callable[[], Any]:
        import torch

        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")

        def receive() -> Any:
            head, *buffers = socket.recv_multipart(copy=False)
            return torch.from_numpy(pickle.loads(head.buffer, buffers=[frame.buffer for frame in buffers]))

        return receive


class TorchQueue(Contender):
    """torch.multiprocessing: a copy in new shared memory, whose descriptor goes through a Queue a reader.

    New for each message, because nothing tells the writer when its readers are done with the last.
    """

    name = "torch.multiprocessing Queue"
    modules = ("torch",)

    def __init__(self) -> None:
        self._queues: list[Any] = []
        self._answers: list[Any] = []

    def prepare(self, readers: int) -> None:
        context = importlib.import_module("torch.multiprocessing").get_context("fork")
        self._queues = [context.Queue() for _ in range(readers)]
        self._answers = [context.SimpleQueue() for _ in range(readers)]

    def open_writer(self) -> Ends:
        import torch

        def send(tensor: Any) -> None:
            storage: Any = torch.UntypedStorage
            shared = torch.empty(0, dtype=tensor.dtype)
            # As torch's own DataLoader does; `share_memory_()` on a fresh tensor would copy garbage first.
            shared.set_(storage._new_shared(tensor.nbytes), 0, tensor.shape, tensor.stride())
            shared.copy_(tensor)
            for queue in self._queues:
                queue.put(shared)

        return Ends(send, tuple(answers.get for answers in self._answers))

    def open_reader(self, rank: int) -> Ends:
        return Ends(self._answers[rank].put, (self._queues[rank].get,))

    def close(self) -> None:
        for queue in (*self._queues, *self._answers):
            queue.close()


class VllmMessageQueue(Contender):
    """vLLM's own MessageQueue with its default settings, set up as Arena is: a queue an answer, too."""

    name = "vLLM MessageQueue"
    modules: ClassVar[tuple[str, ...]] = ("vllm.distributed.device_communicators.shm_broadcast",)
    options: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        self._handles: list[tuple[Connection, Connection]] = []
        self._kept: list[Any] = []

    def prepare(self, readers: int) -> None:
        self._handles = [Pipe() for _ in range(readers)]

    def open_writer(self) -> Ends:
        queue_type = importlib.import_module(self.modules[0]).MessageQueue
        queue = queue_type(len(self._handles), len(self._handles), **self.options)
        for mine, _ in self._handles:
            mine.send(queue.export_handle())
        answers = [queue_type.create_from_handle(mine.recv(), 0) for mine, _ in self._handles]
        self._keep_and_wait([queue, *answers])
        return Ends(queue.enqueue, tuple(answer.dequeue for answer in answers))

    def open_reader(self, rank: int) -> Ends:
        queue_type = importlib.import_module(self.modules[0]).MessageQueue
        _, mine = self._handles[rank]
        queue = queue_type.create_from_handle(mine.recv(), rank)
        answers = queue_type(1, 1)
        mine.send(answers.export_handle())
        self._keep_and_wait([queue, answers])
        return Ends(answers.enqueue, (queue.dequeue,))

    def close(self) -> None:
        self._kept.clear()  # unlinks its shared memory when the last reference goes

    def _keep_and_wait(self, queues: list[Any]) -> None:
        self._kept = queues
        for queue in queues:
            queue.wait_until_ready()


class VllmTensorArena(VllmMessageQueue):
    """vLLM's MessageQueue with the shared memory for large tensors that its newer versions have, off by default."""

    name = "vLLM MessageQueue, tensor arena"
    modules: ClassVar[tuple[str, ...]] = (
        *VllmMessageQueue.modules,
        "vllm.distributed.device_communicators.shm_tensor_arena",
    )
    options: ClassVar[dict[str, Any]] = {"enable_shm_tensor_arena": True}
    warm_ups = 9  # it goes round eight slots, and the first message in each pays for its pages
