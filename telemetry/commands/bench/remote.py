"""`arena bench remote`: readers on another host, over a veth pair, against pyzmq as one would use it by hand.

Both sides send the same bytes to the same readers and hear of it over the same pipes. pyzmq is measured with CURVE, as
Arena's readers on other hosts always are, and that is what is required; without, for whoever wonders what it costs.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, ClassVar, Final

import typer

from telemetry.commands.bench import options
from telemetry.commands.bench.cable import Host, NoCable, cable
from telemetry.commands.bench.children import run_apart
from telemetry.commands.bench.contenders import READY_TIMEOUT_S, Contender, Ends, crew, preload
from telemetry.commands.bench.harness import Block, Side, alternate, p50s, paired, summarise
from telemetry.commands.bench.options import Settings
from telemetry.commands.bench.report import Report, figure, run

_READERS: Final = 2
_LARGE_BYTES: Final = 200_000_000
_QUICK_BYTES: Final = 8 << 20
_REPEATS: Final = 5
_DELAY_LIMIT: Final = 1.3
_TIME_LIMIT: Final = 1 / 0.7  # 70 % of the throughput
_SMALL: Final = {"step": 1, "ids": list(range(16)), "text": "x" * 100}


def command(
    pairs: options.Pairs = options.COMPARABLE_PAIRS,
    messages: options.Messages = options.COMPARABLE_MESSAGES,
    quick: options.Quick = False,
    as_json: options.Json = False,
    check: options.Check = False,
) -> None:
    """200 MB, and small steps, to two readers on another host, made of network namespaces. Takes root."""
    settings = options.settings(pairs=pairs, messages=messages, quick=quick)
    try:
        with cable() as hosts:
            run(partial(measure, hosts), settings, as_json=as_json, check=check)
    except NoCable as error:
        raise typer.BadParameter(f"two hosts can't be made here: {error}") from error


def measure(hosts: tuple[Host, Host], settings: Settings) -> Report:
    """The large tensor, then small messages; within each the contenders alternate."""
    preload("arena", "torch", "zmq")
    report = Report("remote", settings)
    size = _QUICK_BYTES if settings.quick else _LARGE_BYTES
    contenders: tuple[type[_Distant], ...] = (ArenaRemote, PyzmqCurve, PyzmqPlain)
    for case, task, limit, text in (
        (f"{size / 1e6:.0f} MB, {_READERS} readers", partial(large, size), _TIME_LIMIT, "p50 over pyzmq's with CURVE"),
        (f"small, {_READERS} readers", partial(small, settings), _DELAY_LIMIT, "delay p50 over pyzmq's with CURVE"),
    ):
        sides = [_side(settings, hosts, one, task) for one in contenders]
        turns = alternate(sides, partial(_note, case))
        arena = turns.blocks[ArenaRemote.name]
        report.figures += [figure(case, name, blocks, arena) for name, blocks in turns.blocks.items()]
        report.require(f"{case}: {text}", limit, "x", paired(p50s(arena), p50s(turns.blocks[PyzmqCurve.name])))
    return report


def large(size: int, ends: Ends) -> Block:
    """Times in ns from the call until the last reader has the whole tensor; the first one is not timed."""
    import torch

    tensor = torch.arange(size // 8, dtype=torch.int64)
    times = []
    for _ in range(_REPEATS + 1):
        start = time.monotonic_ns()
        ends.send(tensor)
        times.append(max(receive() for receive in ends.receives) - start)
    ends.send(None)
    return summarise(times[1:])


def small(settings: Settings, ends: Ends) -> Block:
    """Delays in ns from the call until the last reader has the message. One clock: both hosts are one kernel."""
    count = max(20, settings.messages // 10)
    delays = []
    for _ in range(count):
        start = time.monotonic_ns()
        ends.send(_SMALL)
        delays.append(max(receive() for receive in ends.receives) - start)
    ends.send(None)
    return summarise(delays[count // 10 :])


def _answer(ends: Ends) -> None:
    """Say when each message was here."""
    (receive,) = ends.receives
    while receive() is not None:
        ends.send(time.monotonic_ns())


class _Distant(Contender):
    """A contender whose readers are on the other host; answers come by pipes, which no host is in the way of."""

    def __init__(self, hosts: tuple[Host, Host]) -> None:
        self.here, self.there = hosts
        self._pipes: list[tuple[Connection, Connection]] = []

    def prepare(self, readers: int) -> None:
        self._pipes = [Pipe() for _ in range(readers)]

    @property
    def _answers(self) -> tuple[Callable[[], Any], ...]:
        return tuple(mine.recv for mine, _ in self._pipes)

    def _tell(self, message: Any) -> None:
        for mine, _ in self._pipes:
            mine.send(message)


class ArenaRemote(_Distant):
    """One queue with both readers elsewhere."""

    name = "arena"

    def __init__(self, hosts: tuple[Host, Host]) -> None:
        super().__init__(hosts)
        self._queue: Any = None

    def open_writer(self) -> Ends:
        from arena import MessageQueue, QueueConfig

        self.here.enter()
        config = QueueConfig(name="bench-remote")
        self._queue = MessageQueue(len(self._pipes), 0, config=config, remote=self.here.address)
        self._tell(self._queue.export_handle())
        self._queue.wait_until_ready(READY_TIMEOUT_S)
        return Ends(self._queue.enqueue, self._answers)

    def open_reader(self, rank: int) -> Ends:
        from arena import MessageQueue

        self.there.enter()
        pipe = self._pipes[rank][1]
        self._queue = MessageQueue.create_from_handle(pipe.recv(), rank)
        return Ends(pipe.send, (self._queue.dequeue,))

    def close(self) -> None:
        if self._queue is not None:
            self._queue.shutdown()


class PyzmqCurve(_Distant):
    """A socket a reader, a pickle and the tensor's bytes in frames of their own, neither copied."""

    name = "pyzmq, CURVE"
    curve: ClassVar[bool] = True

    def __init__(self, hosts: tuple[Host, Host]) -> None:
        super().__init__(hosts)
        self._sockets: list[Any] = []
        self._context: Any = None

    def open_writer(self) -> Ends:
        import zmq

        self.here.enter()
        self._context = zmq.Context()
        public, secret = zmq.curve_keypair()
        for mine, _ in self._pipes:
            socket = self._context.socket(zmq.PAIR)
            if self.curve:
                socket.curve_server, socket.curve_secretkey = True, secret
            port = socket.bind_to_random_port(f"tcp://{self.here.address}")
            self._sockets.append(socket)
            mine.send((port, public))
        for receive in self._answers:
            receive()
        return Ends(self._send, self._answers)

    def _send(self, message: Any) -> None:
        is_tensor = hasattr(message, "numpy")
        frames = [b"tensor", memoryview(message.numpy())] if is_tensor else [pickle.dumps(message, 5)]
        for socket in self._sockets:
            socket.send_multipart(frames, copy=False)

    def open_reader(self, rank: int) -> Ends:
        import zmq

        self.there.enter()
        pipe = self._pipes[rank][1]
        port, server = pipe.recv()
        self._context = zmq.Context()
        socket = self._context.socket(zmq.PAIR)
        if self.curve:
            socket.curve_serverkey = server
            socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.connect(f"tcp://{self.here.address}:{port}")
        self._sockets.append(socket)
        pipe.send(os.getpid())
        return Ends(pipe.send, (partial(_receive, socket),))

    def close(self) -> None:
        if self._context is not None:
            self._context.destroy(linger=1000)


class PyzmqPlain(PyzmqCurve):
    """The same in the clear."""

    name = "pyzmq, in the clear"
    curve = False


def _receive(socket: Any) -> Any:
    import torch

    frames = socket.recv_multipart(copy=False)
    if len(frames) == 2:
        return torch.frombuffer(frames[1].buffer, dtype=torch.int64)
    return pickle.loads(frames[0].buffer)


def _note(case: str, text: str) -> None:
    options.note(f"{case}, {text}")


def _side(
    settings: Settings, hosts: tuple[Host, Host], contender: type[_Distant], task: Callable[[Ends], Block]
) -> Side[Block]:
    def block() -> Block:
        with crew(contender(hosts), _READERS, _answer) as at_work:
            return task(at_work.ends)

    return Side(contender.name, partial(run_apart, block, settings.block_deadline_s), settings.pairs, False)
