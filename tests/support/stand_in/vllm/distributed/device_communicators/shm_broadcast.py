"""Part of the stand-in: a queue with the names and the behaviour that callers of vLLM's know.

Chunks and their flags lie in a memfd; what is too large for a chunk, and readers elsewhere, get it over a socket.
"""

import mmap
import os
import pickle
import secrets
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Listener

POLL_S = 0.001


class Ring:
    def __init__(self, n_reader, max_chunk_bytes, max_chunks, path=None):
        self.n_reader, self.max_chunk_bytes, self.max_chunks = n_reader, max_chunk_bytes, max_chunks
        size = max_chunks * (max_chunk_bytes + 1 + n_reader)
        self._fd = os.memfd_create("stand-in") if path is None else os.open(path, os.O_RDWR)
        os.ftruncate(self._fd, size)
        self._memory = memoryview(mmap.mmap(self._fd, size))

    def handle(self):
        return self.n_reader, self.max_chunk_bytes, self.max_chunks, f"/proc/{os.getpid()}/fd/{self._fd}"

    @contextmanager
    def get_data(self, index):
        with self._memory[index * self.max_chunk_bytes :][: self.max_chunk_bytes] as chunk:
            yield chunk

    @contextmanager
    def get_metadata(self, index):
        flags = 1 + self.n_reader
        with self._memory[self.max_chunks * self.max_chunk_bytes + index * flags :][:flags] as flags:
            yield flags


@dataclass
class Handle:
    local_reader_ranks: list[int] = field(default_factory=list)
    buffer_handle: tuple | None = None
    local_subscribe_addr: str | None = None
    remote_subscribe_addr: str | None = None
    remote_addr_ipv6: bool = False


class MessageQueue:
    def __init__(
        self,
        n_reader,
        n_local_reader,
        local_reader_ranks=None,
        max_chunk_bytes=1 << 16,
        max_chunks=10,
        connect_ip=None,
        enable_shm_tensor_arena=False,
    ):
        self.n_reader, self.n_local_reader, self.n_remote_reader = n_reader, n_local_reader, n_reader - n_local_reader
        self._is_writer, self._is_local_reader, self._is_remote_reader = True, False, False
        self.shutting_down = False
        self.buffer = Ring(n_local_reader, max_chunk_bytes, max_chunks)
        self.current_idx = 0
        address = "\0stand-in-" + secrets.token_hex(8)
        self._listener = Listener(address, "AF_UNIX")
        self.handle = Handle(
            local_reader_ranks=list(range(n_local_reader)) if local_reader_ranks is None else local_reader_ranks,
            buffer_handle=self.buffer.handle(),
            local_subscribe_addr=address,
            remote_subscribe_addr=address if self.n_remote_reader else None,
        )

    def export_handle(self):
        return self.handle

    @staticmethod
    def create_from_handle(handle, rank):
        self = MessageQueue.__new__(MessageQueue)
        self.handle, self.shutting_down, self._is_writer = handle, False, False
        self._is_local_reader = rank in handle.local_reader_ranks
        self._is_remote_reader = not self._is_local_reader
        if self._is_local_reader:
            assert handle.buffer_handle is not None
            self.buffer = Ring(*handle.buffer_handle)
            self.current_idx = 0
            self.local_reader_rank = handle.local_reader_ranks.index(rank)
            address = handle.local_subscribe_addr
        else:
            address = None if handle.remote_addr_ipv6 else handle.remote_subscribe_addr
        self._connection = Client(address, "AF_UNIX")
        self._connection.send(self._is_local_reader)
        return self

    def wait_until_ready(self):
        if not self._is_writer:
            assert self._connection.recv_bytes() == b"READY"
            return
        everybody = [self._listener.accept() for _ in range(self.n_reader)]
        self._sockets = {True: [], False: []}
        for reader in everybody:
            self._sockets[reader.recv()].append(reader)
            reader.send_bytes(b"READY")

    def shutdown(self):
        self.shutting_down = True

    @contextmanager
    def acquire_write(self, timeout=None):
        assert self._is_writer, "Only writers can acquire write"
        with self.buffer.get_metadata(self.current_idx) as flags:
            self._poll(lambda: not flags[0] or all(flags[1:]), timeout)
            with self.buffer.get_data(self.current_idx) as chunk:
                yield chunk
            flags[:] = bytes(len(flags))
            flags[0] = 1
        self.current_idx = (self.current_idx + 1) % self.buffer.max_chunks

    @contextmanager
    def acquire_read(self, timeout=None, indefinite=False):
        assert self._is_local_reader, "Only readers can acquire read"
        own = 1 + self.local_reader_rank
        with self.buffer.get_metadata(self.current_idx) as flags:
            self._poll(lambda: flags[0] and not flags[own], timeout)
            with self.buffer.get_data(self.current_idx) as chunk:
                yield chunk
            flags[own] = 1
        self.current_idx = (self.current_idx + 1) % self.buffer.max_chunks

    def _poll(self, done, timeout):
        ends = None if timeout is None else time.monotonic() + timeout
        while not done():
            if self.shutting_down:
                raise RuntimeError("cancelled")
            if ends is not None and time.monotonic() > ends:
                raise TimeoutError
            time.sleep(POLL_S)

    def enqueue(self, obj, timeout=None):
        assert self._is_writer, "Only writers can enqueue"
        data = pickle.dumps(obj)
        fits = len(data) < self.buffer.max_chunk_bytes
        with self.acquire_write(timeout) as chunk:
            chunk[0] = not fits
            if fits:
                chunk[1 : 1 + len(data)] = data
        if not fits or self.n_remote_reader:
            for reader in self._sockets[False] + ([] if fits else self._sockets[True]):
                reader.send_bytes(data)

    def dequeue(self, timeout=None, indefinite=False):
        if self._is_writer:
            raise RuntimeError("Only readers can dequeue")
        if self._is_local_reader:
            with self.acquire_read(timeout, indefinite) as chunk:
                if not chunk[0]:
                    return pickle.loads(chunk[1:])
        if not self._connection.poll(timeout):
            raise TimeoutError
        return pickle.loads(self._connection.recv_bytes())

    def broadcast_object(self, obj=None):
        if not self._is_writer:
            return self.dequeue()
        self.enqueue(obj)
        return obj

    @staticmethod
    def create_from_process_group_single_reader(pg, max_chunk_bytes, max_chunks, reader_rank=0, blocking=False):
        import torch.distributed as dist

        queue = MessageQueue(n_reader=1, n_local_reader=1, max_chunk_bytes=max_chunk_bytes, max_chunks=max_chunks)
        handles = [None] * dist.get_world_size(pg) if dist.get_rank() == reader_rank else None
        dist.gather_object(queue.export_handle(), handles, dst=reader_rank, group=pg)
        if blocking:
            queue.wait_until_ready()
        return queue, handles or []

    @staticmethod
    def create_from_process_group(
        pg, max_chunk_bytes, max_chunks, writer_rank=0, external_writer_handle=None, blocking=True
    ):
        import torch.distributed as dist

        rank, world = dist.get_rank(pg), dist.get_world_size(pg)
        offer = [None]
        if rank == writer_rank:
            others = [other for other in range(world) if other != writer_rank]
            queue = MessageQueue(
                n_reader=world - 1,
                n_local_reader=world - 1,
                local_reader_ranks=others,
                max_chunk_bytes=max_chunk_bytes,
                max_chunks=max_chunks,
            )
            offer = [queue.export_handle()]
        dist.broadcast_object_list(offer, src=dist.get_process_group_ranks(pg)[writer_rank], group=pg)
        if rank != writer_rank:
            queue = MessageQueue.create_from_handle(offer[0], rank)
        if blocking:
            queue.wait_until_ready()
        return queue
