"""A reader on another host than the writer's: receive, decode, say that it is taken.

The verbs, errors and promises are those of a reader beside the writer. What differs: tensors are in memory of the
reader's own; what has been silent for too long is dead, as nothing tells a dead host from a cut wire; and its page is
on the writer's host, kept by the forwarder.
"""

from __future__ import annotations

import contextlib
import pickle
import time
import weakref
from typing import TYPE_CHECKING, Any, Final

from arena import layout
from arena.assembly import TABLE_SLACK_BYTES, Assembly
from arena.codec import decode_failed, decoder_of, read_table
from arena.config import check_device, check_rank, check_timeout
from arena.errors import (
    ArenaError,
    CorruptFrame,
    PeerDied,
    QueueClosed,
    QueueTimeout,
)
from arena.message_queue import MessageQueue, Statistics, Warn
from arena.observe import kind_of
from arena.peers import Handle
from arena.probe import hooks
from arena.remote import wire
from arena.remote.greeting import greet, none_of_ours, refusal
from arena.remote.inlet import Inlet
from arena.remote.keeper import Keeper
from arena.remote.link import Link
from arena.state import Endpoint, move
from arena.wait import deadline_after

if TYPE_CHECKING:
    import torch

_NOTE_NS: Final = 250_000_000  # how often a reader that waits, or beats, says so
_LATE_NS: Final = 2_000_000  # how long what was taken goes unsaid in a wait; outside, the keeper says it
_NOTHING: Final = -1  # no frame: not even that none has been taken
_loads = pickle.loads
_monotonic_ns = time.monotonic_ns


class RemoteReader(MessageQueue):
    """What `MessageQueue.create_from_handle` makes on another host. See there."""

    __slots__ = (
        "_acked",
        "_assembly",
        "_batch",
        "_decode_table",
        "_end",
        "_errors",
        "_gone",
        "_handle",
        "_heard_ns",
        "_inlet",
        "_keeper",
        "_link",
        "_listened_ns",
        "_noted_ns",
        "_pending_chunk",
        "_published",
        "_ready",
        "_said",
        "_taken",
        "_trace",
        "_waited_ns",
        "rank",
    )

    def __init__(self, handle: Handle, rank: Any, *, timeout: float | None, on_warning: Warn | None) -> None:
        assert handle.remote is not None
        self._begin(handle.name, on_warning)
        self.rank = check_rank(rank)
        self._handle = handle
        self._decode_table = decoder_of(handle.serializer)
        self._errors: dict[str, int] = {}
        self._trace: hooks.Trace | None = None
        self._end: tuple[int, ArenaError] | None = None  # what comes after the frame before this one: nothing, and why
        self._pending_chunk: wire.Chunk | None = None  # whose bytes are the next thing to be received
        self._ready = self._gone = False
        self._published = self._taken = self._said = self._acked = self._waited_ns = self._noted_ns = 0
        self._assembly = Assembly(handle.max_message_bytes + TABLE_SLACK_BYTES)
        self._inlet = Inlet(handle.max_message_bytes + TABLE_SLACK_BYTES)
        geometry = handle.geometry
        self._batch = max(1, geometry.slots // 4)  # so many frames are never taken without a word
        self._link = Link(handle.remote, geometry.slot_bytes + 8 * geometry.max_holds)
        self._heard_ns = self._listened_ns = _monotonic_ns()
        try:
            greet(self._link, handle, self.rank, check_timeout(timeout))
        except BaseException:
            self._link.close()
            raise
        self._state = move(self._state, "attach")
        self._keeper = Keeper(self.name, self._link.news_fd, weakref.WeakMethod(self._see_to))
        weakref.finalize(self, self._keeper.stop).atexit = False

    @property
    def _address(self) -> str:
        assert self._handle.remote is not None
        return self._handle.remote.endpoint

    # ── the story ────────────────────────────────────────────────────────────────────────────────
    def dequeue(self, timeout: float | None = None) -> Any:
        try:
            if not self._acquire(False):
                self._contend(timeout)
            deadline_ns = None
            if self._attention or self._busy or timeout is not None:
                deadline_ns = self._prepare(timeout)
            self._busy = True
            obj = self._message(deadline_ns)
        except BaseException as error:
            self._leave(error)
            raise
        self._busy = False
        if self._closing:
            self._finish()
        self._release()
        return obj

    def _message(self, deadline_ns: int | None) -> Any:
        """The loop is in a function of its own: see `_new_lock`."""
        obj, complete, arrived = None, False, self._inlet.complete
        while not complete:
            if not arrived:
                self._receive_all()  # what lies here counts before silence does
            if not arrived:
                self._wait(deadline_ns)
            complete, obj = self._take(*arrived[0])
        return obj

    def _prepare(self, timeout: float | None) -> int | None:
        self._enter()
        deadline_ns = deadline_after(check_timeout(timeout))
        self._attention = False
        if self._trace is not None:
            self._trace = None
            hooks.inside.set(None)
        return deadline_ns

    def _take(self, frame: wire.Frame, buffers: list[memoryview]) -> tuple[bool, Any]:
        """Take a frame: (whether a message is complete, the message). An interrupt before the end leaves it here."""
        kind, complete = frame.kind, frame.kind != layout.KIND_ABORT
        if kind == layout.KIND_FRAGMENT:
            self._assembly.add(frame.sequence, frame.payload)
            complete = self._assembly.complete
        try:
            obj = self._decoded(frame, buffers) if complete else None
        finally:
            if kind == layout.KIND_ABORT or (kind == layout.KIND_FRAGMENT and complete):
                self._assembly.drop()
            self._taken = frame.sequence + 1
            self._inlet.complete.popleft()
            # Said at once where it frees much, else a little later, with what is taken by then.
            if buffers or self._taken - self._said >= self._batch:
                self._tell(wire.STATE_WORKING)
            elif not self._keeper.awake:
                self._keeper.rouse()
        if complete and any(frame.trace):
            self._trace = frame.trace
            self._attention = True
            hooks.inside.set((frame.trace, self.rank))
        return complete, obj

    # ── receiving ────────────────────────────────────────────────────────────────────────────────
    def _receive_all(self, *, ahead: bool = False) -> None:
        """Take what is here until a frame is whole, or, `ahead` of what was asked for, until nothing is left."""
        inlet, receive = self._inlet, self._link.receive
        while (ahead or not inlet.complete) and (message := receive(self._pending_chunk is not None)) is not None:
            self._heard_ns = _monotonic_ns()
            if isinstance(message, bytes) and inlet.on_short(message):
                self._published = max(self._published, inlet.expected)
                continue
            try:
                self._feed(memoryview(message) if isinstance(message, bytes) else message.buffer)
            except wire.Malformed as error:
                raise none_of_ours(self.name, error) from None

    def _feed(self, message: memoryview) -> None:
        inlet, chunk = self._inlet, self._pending_chunk
        if chunk is not None:
            self._pending_chunk = None
            whole = inlet.on_chunk(chunk, message)
            self._grant()
        else:
            kind, whole = bytes(message[:1]), True
            if kind == wire.FRAME:
                frame = wire.unpack_frame(message)
                self._published = max(self._published, frame.sequence + 1)
                whole = inlet.on_frame(frame)
            elif kind == wire.CHUNK:
                self._pending_chunk = wire.unpack_chunk(message)
            elif kind == wire.PING:
                whole = self._on_ping(wire.unpack_ping(message))
            elif kind == wire.END:
                self._on_end(*wire.unpack_end(message))
            elif kind == wire.REFUSED:
                self._give_up(refusal(wire.unpack_json(bytes(message))))
            elif kind != wire.WELCOME:  # one more of those comes where a hello had to be said twice
                raise wire.Malformed(f"a message of kind {kind!r}")
        if not whole:
            self._link.send(wire.pack_resume(inlet.epoch, inlet.expected))

    def _on_ping(self, ping: wire.Ping) -> bool:
        self._ready = self._ready or bool(ping.ready)
        self._published = max(self._published, ping.published)
        whole = self._inlet.on_progress(ping.epoch, ping.sent)
        self._tell(wire.STATE_ALIVE)
        return whole

    def _on_end(self, epoch: int, following: int, why: dict[str, Any]) -> None:
        if epoch < self._inlet.epoch:
            return
        if why.get("kind") == "QueueClosed":
            text = f"queue {self.name!r} was shut down by its writer, and everything in it has been taken"
            self._end = following, QueueClosed(text)
            return
        signal = why.get("signal")
        self._end = (
            following,
            PeerDied(
                f"the writer of queue {self.name!r} died ({why.get('ending')})",
                pid=why.get("pid"),
                signal=signal if isinstance(signal, int) else None,
                expected="the writer to shut the queue down when it is done",
                found="its process gone; everything it published has been taken",
                remedy="shut this end down; start the writer anew and attach to its new queue",
            ),
        )

    def _grant(self) -> None:
        """Let more be sent, once a good part of the window is free again."""
        assert self._handle.remote is not None
        if self._inlet.received - self._acked >= self._handle.remote.window_bytes // 4:
            self._tell(wire.STATE_WORKING)

    def _tell(self, state: int) -> None:
        """Say how far we have come."""
        inlet = self._inlet
        self._acked, self._said = inlet.received, self._taken
        self._noted_ns = _monotonic_ns()
        taken = wire.Taken(state, inlet.epoch, self._taken, inlet.received, self._waited_ns)
        self._link.send(wire.pack_taken(taken))

    # ── waiting ──────────────────────────────────────────────────────────────────────────────────
    def _wait(self, deadline_ns: int | None) -> None:
        """Until a frame is whole."""
        began_ns = now_ns = _monotonic_ns()
        self._state = Endpoint.WAITING
        if now_ns - self._listened_ns > _NOTE_NS:
            self._heard_ns = now_ns  # we have not been listening
        try:
            while True:
                owed = self._said != self._taken
                if owed and now_ns - began_ns >= _LATE_NS:
                    self._tell(wire.STATE_WAITING)
                    owed = False
                self._look(now_ns)
                sleep_ns = _LATE_NS if owed else _NOTE_NS
                if deadline_ns is not None:
                    sleep_ns = min(sleep_ns, deadline_ns - now_ns)
                wakes_ns = now_ns + sleep_ns
                self._link.wait(max(0, -(-sleep_ns // 1_000_000)))
                self._receive_all()
                now_ns = _monotonic_ns()
                if self._inlet.complete:
                    return
                if deadline_ns is not None and now_ns >= deadline_ns:
                    raise self._timed_out()
                # A time in which we did not run, suspended or stopped, is nobody's silence.
                self._heard_ns = min(now_ns, self._heard_ns + max(0, now_ns - wakes_ns))
        finally:
            self._listened_ns = _monotonic_ns()
            self._waited_ns += self._listened_ns - began_ns
            if self._state is Endpoint.WAITING:
                self._state = Endpoint.WORKING

    def _look(self, now_ns: int) -> None:
        """While waiting: be heard of, and see whether anything can still come."""
        if self._closing:
            raise self._closed()
        if self._end is not None and self._inlet.expected >= self._end[0]:
            self._assembly.drop()
            self._say_goodbye()
            raise self._end[1].with_traceback(None)
        if self._link.news or self._link.broken:
            self._mend()
        if self._link.broken and not self._keeper.awake:
            self._keeper.rouse()  # we may be gone before it can be mended
        assert self._handle.remote is not None
        silent_s = (now_ns - self._heard_ns) / 1e9
        if silent_s > self._handle.remote.timeout_s:
            self._give_up(
                PeerDied(
                    f"nothing was heard from the writer's host of queue {self.name!r} for {silent_s:.1f} s",
                    expected=f"a sign of life from {self._address} every {self._handle.remote.timeout_s / 5:.1f} s",
                    found="none: it, its forwarder or the network between is down",
                    remedy="shut this end down; attach again once the host is back",
                )
            )
            self._look(now_ns)
        if now_ns - self._noted_ns >= _NOTE_NS:
            self._tell(wire.STATE_WAITING)

    def _see_to(self) -> bool:
        """For the keeper: do what is to be done while nobody is in a call; whether there is, or was, something."""
        if not self._acquire(False):
            return self._said != self._taken or self._link.broken
        try:
            if self._state in (Endpoint.CLOSED, Endpoint.FORKED):
                return False
            self._mend()
            owed = self._said != self._taken
            if owed and not self._link.broken:
                self._tell(wire.STATE_WORKING)
            return owed or self._link.broken
        finally:
            self._release()

    def _mend(self) -> None:
        """See to the connection; what was said last may be lost with one that broke."""
        if self._link.failures():
            self._said = _NOTHING

    def _give_up(self, error: ArenaError) -> None:
        """Whatever comes later, this reader is dead: to take more could skip what the writer sent meanwhile."""
        self._end = 0, error

    def _timed_out(self) -> QueueTimeout:
        return QueueTimeout(
            f"no message on queue {self.name!r}: awaiting_write of frame {self._inlet.expected}",
            expected="a frame within the timeout",
            found=f"a connection to {self._address} that lives",
            remedy="nothing was lost; the next dequeue waits for the same message",
        )

    # ── decoding ─────────────────────────────────────────────────────────────────────────────────
    def _decoded(self, frame: wire.Frame, buffers: list[memoryview]) -> Any:
        try:
            if frame.kind != layout.KIND_INLINE:
                return self._decode(frame, buffers)
            if self._handle.serializer != "pickle":
                raise CorruptFrame("a pickle came on a queue that has none", expected="serializer='restricted'")
            return _loads(frame.payload)
        except ArenaError:
            raise
        except Exception as error:
            raise decode_failed(self.name, error) from error

    def _decode(self, frame: wire.Frame, buffers: list[memoryview]) -> Any:
        payload = frame.payload
        if frame.kind == layout.KIND_BLOCK and buffers:
            payload, buffers = buffers[0], buffers[1:]
        elif frame.kind == layout.KIND_FRAGMENT:
            payload = self._assembly.whole()
        table = read_table(payload)
        holds = table.holds
        if [hold[2] for hold in holds] != [buffer.nbytes for buffer in buffers]:
            raise CorruptFrame(
                f"frame {frame.sequence} came with other buffers than it names",
                expected=f"{[hold[2] for hold in holds]} bytes",
                found=f"{[buffer.nbytes for buffer in buffers]} bytes",
            )
        # What is here is ours: "private" would copy it once more.
        views = "readonly" if self._handle.views == "readonly" else "shared"
        return self._decode_table(table, dict(zip(holds, buffers, strict=True)), views)

    # ── the rest of the face ─────────────────────────────────────────────────────────────────────
    def to_device(
        self, message: Any, device: torch.device | str | int, stream: Any = None, *, shard: Any = None
    ) -> Any:
        from arena.transfer import Mover

        self._refuse_forked()
        return Mover(check_device(device), stream, None, contextlib.nullcontext, shard=shard).message(message)

    def broadcast_object(self, obj: object = None) -> Any:
        return self.dequeue()

    def heartbeat(self) -> None:
        if _monotonic_ns() - self._noted_ns < _NOTE_NS or not self._acquire(False):
            return
        try:
            if not self._busy and self._state is Endpoint.WORKING:
                self._tell(wire.STATE_ALIVE)
        finally:
            self._release()

    def wait_until_ready(self, timeout: float | None = None) -> None:
        deadline_ns = deadline_after(check_timeout(timeout))
        with self._lock:
            self._refuse_use()
            self._heard_ns = _monotonic_ns()
            self._await_everyone(deadline_ns)

    def _await_everyone(self, deadline_ns: int | None) -> None:
        while not self._ready:
            self._look(_monotonic_ns())
            if deadline_ns is not None and _monotonic_ns() >= deadline_ns:
                raise QueueTimeout(
                    f"not every reader of queue {self.name!r} has attached",
                    expected=f"{self._handle.n_reader} readers",
                    found="fewer; the writer's wait_until_ready names them",
                    remedy="see whether all workers started and were given the handle",
                )
            self._link.wait(20)
            self._receive_all(ahead=True)

    def statistics(self) -> Statistics:
        self._refuse_forked()
        published = max(self._published, self._taken)
        return Statistics(
            name=self.name,
            role="reader",
            state=self._state.name.lower(),
            published=published,
            consumed_by_reader={self.rank: self._taken},
            lag_by_reader={self.rank: published - self._taken},
            errors=dict(self._errors),
            starved_s=self._waited_ns / 1e9,
        )

    def __repr__(self) -> str:
        if self._state is Endpoint.FORKED:
            return f"<MessageQueue {self.name!r} reader {self.rank}, forked: only the process that made it can use it>"
        return (
            f"<MessageQueue {self.name!r} reader {self.rank} of {self._address}, {self._state.name.lower()}: "
            f"consumed {self._taken} <= published {max(self._published, self._taken)}>"
        )

    # ── closing ──────────────────────────────────────────────────────────────────────────────────
    def _say_closing(self) -> None:
        self._link.wake()

    def _say_goodbye(self) -> None:
        if not self._gone:
            self._gone = True
            if self._said != self._taken:
                self._tell(wire.STATE_WORKING)
            self._link.send(wire.BYE)

    def _release_everything(self) -> None:
        self._assembly.drop()
        self._say_goodbye()
        self._keeper.stop()
        self._link.close()

    def _count_error(self, error: ArenaError) -> None:
        kind = kind_of(error)
        if kind:
            self._errors[kind] = self._errors.get(kind, 0) + 1
