"""A reader's end: poll, decode, release; and what it knows of a writer that says nothing."""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final

from arena import layout, memory
from arena.assembly import TABLE_SLACK_BYTES, Assembly
from arena.borrow import Borrower
from arena.codec import HoldWords, Table, decode_failed, decoder_of, finder_of, read_table, rehearse
from arena.config import check_device, check_rank, check_timeout
from arena.device_log import device_log
from arena.errors import (
    ArenaError,
    CorruptFrame,
    HandleMismatch,
    PeerDied,
    QueueClosed,
    QueueTimeout,
)
from arena.filling import Fill, GivenUp
from arena.layout import HEAD_SENT_NS, KIND_INLINE, WRITER_PARKED
from arena.memory import UNLOCK_IS_A_FENCE, Segment
from arena.message_queue import MessageQueue, Statistics, Warn
from arena.observe import ReaderLog
from arena.peers import Attachment, Handle
from arena.probe import Probe, Role, hooks
from arena.probe.directory import reader_page, remove_dead_pages, remove_if_empty
from arena.probe.page import L_SEQUENCE
from arena.ring import ReaderRing
from arena.state import Endpoint, move
from arena.tickets import Tickets
from arena.wait import Waiter, deadline_after

if TYPE_CHECKING:
    import torch

    from arena.device import Copies, Stream
    from arena.follow import Follower
    from arena.transfer import Mover, Moving

_HOLD: Final = struct.Struct(layout.HOLD)
_monotonic_ns = time.monotonic_ns
_loads = pickle.loads


class Reader(MessageQueue):
    """What `MessageQueue.create_from_handle` makes. See there."""

    __slots__ = (
        "_admitted",
        "_assembly",
        "_attachment",
        "_borrower",
        "_consumed",
        "_consumed_futex",
        "_decode_table",
        "_device_log",
        "_directory",
        "_find_tensors",
        "_followed",
        "_followers",
        "_handle",
        "_heads",
        "_inline_kind",
        "_log",
        "_parked",
        "_payloads",
        "_published",
        "_published_futex",
        "_ranks",
        "_released",
        "_ring",
        "_slots",
        "_spin",
        "_trace",
        "_waiter",
        "_wanted",
        "_where",
        "_writer_words",
        "rank",
    )

    def __init__(
        self,
        handle: Handle,
        rank: Any,
        *,
        timeout: float | None,
        on_warning: Warn | None,
        poll_ns: int = 0,
        where: str = "",
    ) -> None:
        handle.check()
        self._begin(handle.name, on_warning)
        self.rank = check_rank(rank)
        self._handle = handle
        self._where = where  # host:pid of the reader on another host that this one stands in for
        self._directory = Path(handle.directory)
        control = self._make_control()
        try:
            self._attachment = Attachment(
                handle, self.rank, control, timeout_s=check_timeout(timeout), where=self._where
            )
            try:
                self._set_up(handle, control)
                self._waiter.min_budget_ns = max(self._waiter.min_budget_ns, poll_ns)
            except BaseException:
                self._give_up()
                raise
        except BaseException:
            # The writer may come to the request yet, or have seated us; and nobody is here any more.
            control.mapping.words(layout.LIVE_OFFSET, layout.READER_WORDS)[layout.READER_CLOSED] = layout.LEFT
            raise
        finally:
            control.close()

    # ── setting up ───────────────────────────────────────────────────────────────────────────────
    def _set_up(self, handle: Handle, control: Segment) -> None:
        """With the writer's answer here: everything that the verbs use."""
        geometry = handle.geometry
        ring = self._map_ring()
        if handle.probes:
            self._probe = self._make_probe()
        self._ring = ReaderRing(ring, control.mapping, geometry)
        self._ranks = ring.words(layout.RANKS_OFFSET, layout.MAX_READERS)
        self._published_futex = ring.futex(layout.LIVE_OFFSET + layout.PUBLISHED * layout.WORD)
        self._consumed = self._ring.consumed
        self._published = self._ring.published
        self._payloads = self._ring.payloads
        self._heads = self._ring.heads
        self._released = self._ring.released
        self._trace: hooks.Trace | None = None  # of the message that our caller has
        self._slots = geometry.slots
        self._parked = control.mapping.words(layout.LIVE_OFFSET + layout.READER_PARKED * layout.WORD, 1)
        self._consumed_futex = control.mapping.futex(layout.LIVE_OFFSET + layout.CONSUMED * layout.WORD)
        returned = control.mapping.words(geometry.returned_offset, geometry.max_holds)
        self._device_log = device_log(self._probe)
        self._borrower = Borrower(
            self._attachment.segment,
            self._attachment.drop_segment,
            self._consumed,
            returned,
            geometry.max_holds,
            views=handle.views,
            pin=handle.pin,
            log=self._device_log,
            tickets=None if handle.pin == "off" else Tickets(control.mapping, geometry, _register_tickets),
        )
        if handle.prefault:
            self._borrower.prefault(self._attachment.segments())
            rehearse()
        self._waiter = Waiter(handle.n_reader + 1)
        self._spin = self._waiter.spin
        self._writer_words = self._ring.writer
        self._wanted = 0
        self._decode_table = decoder_of(handle.serializer)
        self._inline_kind = KIND_INLINE if handle.serializer == "pickle" else 0  # which no frame has
        self._find_tensors = finder_of(handle.serializer)
        self._followers: dict[int, Follower] = {}  # by thread: what has a streamed message on its way while it comes
        self._followed: tuple[Copies, Stream] | None = None  # where that may be reading from a frame not released yet
        self._assembly = Assembly(handle.max_message_bytes + TABLE_SLACK_BYTES)
        self._log = ReaderLog(self._probe, self._waiter) if self._probe is not None else None
        self._keep_parts(self._attachment, self._ring, self._borrower, self._probe)
        self._state = move(self._state, "attach")
        if self._probe is not None:
            self._probe.proceeding(Endpoint.WORKING, _monotonic_ns())
        self._admitted = self._take_place()
        self._attention = not self._admitted

    def _give_up(self) -> None:
        """Attaching came to nothing: leave nothing behind."""
        self._state = Endpoint.CLOSED
        self._forget_parts()
        if self._probe is not None:
            self._probe.unlink()
        self._attachment.close()

    def _make_control(self) -> Segment:
        geometry = self._handle.geometry
        segment = Segment.create(f"{self.name}:{self.rank}", geometry.control_bytes)
        words = segment.mapping.raw_words(0, layout.IDENTITY_WORDS)
        words[layout.IDENTITY_VERSION] = layout.VERSION
        words[layout.IDENTITY_PID] = os.getpid()
        words[layout.IDENTITY_RANK] = self.rank & ((1 << 64) - 1)
        words[layout.IDENTITY_SLOTS] = geometry.slots
        words[layout.IDENTITY_SLOT_BYTES] = geometry.slot_bytes
        words[layout.IDENTITY_HOLDS] = geometry.max_holds
        words[layout.IDENTITY_MAGIC] = layout.CONTROL_MAGIC
        return segment

    def _map_ring(self) -> memory.Mapping:
        geometry = self._handle.geometry
        handed_over = self._attachment.segment(0)
        if handed_over is None:
            raise CorruptFrame("the writer handed over no ring", expected="segment 0 in its answer")
        _, fd = handed_over
        segment = Segment.attach(os.dup(fd), geometry.ring_bytes)
        segment.close()
        self._attachment.drop_segment(0)
        words = segment.mapping.raw_words(0, layout.IDENTITY_WORDS)
        found = tuple(words[index] for index in range(layout.IDENTITY_WORDS) if index not in _NOT_COMPARED)
        expected = (layout.RING_MAGIC, layout.VERSION, geometry.slots, geometry.slot_bytes, geometry.max_holds)
        if found != expected:
            raise HandleMismatch(
                "the ring is not the one that the handle describes",
                expected=str(expected),
                found=str(found),
                remedy="run the same Arena version in every process of the engine",
            )
        segment.mapping.populate(0, geometry.ring_bytes)
        return segment.mapping

    def _make_probe(self) -> Probe | None:
        about = {"queue": self.name, "instance": self._handle.instance, "n_reader": self._handle.n_reader}
        if self._where:
            about["where"] = self._where
        remove_dead_pages(self._directory, self.rank, keep=1)
        path = reader_page(self._directory, self.rank, os.getpid(), secrets.token_hex(3))
        try:
            return Probe(path, Role.READER, rank=self.rank, n_reader=self._handle.n_reader, slots=0, about=about)
        except FileNotFoundError:
            return None  # the writer has shut down meanwhile; what it published is there to be read all the same
        except BaseException:
            path.unlink(missing_ok=True)  # half-made
            raise

    def _take_place(self) -> bool:
        """Start at the first sequence that this incarnation takes part in, once the writer has said which."""
        first = self._ranks[self.rank]
        if first == layout.NOT_ADMITTED:
            return False
        self._consumed[0] = first
        return True

    # ── the story ────────────────────────────────────────────────────────────────────────────────
    def dequeue(self, timeout: float | None = None) -> Any:  # noqa: C901, PLR0912, PLR0915 - calls cost
        try:
            if not self._acquire(False):
                self._contend(timeout)
            deadline_ns = None
            if self._attention or self._busy or timeout is not None:
                deadline_ns = self._prepare(timeout)
            self._busy = True
            log = self._log
            while True:
                sequence = self._consumed[0]
                # SYNC POINT frame-visible (observe): the slot's bytes came before this store
                if self._published[0] > sequence:
                    received_ns = _monotonic_ns()
                else:
                    if log is not None and log.pending is not None:
                        log.settle()
                    if self._spin(self._published, sequence, deadline_ns):
                        received_ns = self._waiter.ended_ns
                    else:
                        received_ns = self._wait(sequence, deadline_ns)
                slot = sequence % self._slots
                head = self._heads[slot]
                # HEAD_SENT_NS, read before the release lets the writer overwrite it; 0 for a message not looked at
                sent_ns = 0 if log is None or sequence & log.sample != log.phase else head[1]
                if head[0] - sequence == self._inline_kind:  # HEAD_TAG
                    try:
                        obj = _loads(self._payloads[slot])
                    except Exception as error:
                        raise decode_failed(self.name, error) from error
                    finally:
                        # Also its release time: decoding one small pickle is not worth a second clock.
                        self._released[slot] = now_ns = received_ns
                        # SYNC POINT slot-reusable (publish): the slot has been read before this store is seen
                        self._consumed[0] = sequence + 1
                    complete = True
                else:
                    complete, obj, now_ns = self._take(sequence, received_ns, deadline_ns)
                if log is not None:
                    log.page[L_SEQUENCE] = sequence + 1
                    if sent_ns:
                        log.frame(sequence, sent_ns, received_ns, now_ns)
                if complete:
                    break
                self._wake_writer()  # the loop ends in a call: see `_new_lock`
        except BaseException as error:
            self._leave(error)
            raise
        self._busy = False
        if self._closing:
            self._finish()
        self._release()  # on x86, also the fence between `consumed` and the look at `parked`
        if not UNLOCK_IS_A_FENCE:
            memory.fence()
        if self._writer_words[WRITER_PARKED]:
            self._consumed_futex.wake()
        return obj

    def _prepare(self, timeout: float | None) -> int | None:
        self._enter()
        deadline_ns = deadline_after(check_timeout(timeout))
        if self._trace is not None:
            self._end_trace()
        if not self._admitted:
            self._await_admission(deadline_ns)
        self._attention = False
        return deadline_ns

    def _await_admission(self, deadline_ns: int | None) -> None:
        """A joiner's first wait: the writer admits it with its next message."""
        while True:
            seen = self._published[0]  # before the look: a frame that admits us and comes after it moves this on
            if self._take_place():
                break
            self._wanted = seen
            if not self._park(seen, deadline_ns) and not self._take_place():
                raise self._timed_out(seen)
        self._admitted = True

    # ── waiting ──────────────────────────────────────────────────────────────────────────────────
    def _wait(self, sequence: int, deadline_ns: int | None) -> int:
        """Wait for a frame; returns when it was seen."""
        self._wanted = sequence
        if not self._park(sequence, deadline_ns):
            raise self._timed_out(sequence)
        return self._waiter.ended_ns

    def _park(self, sequence: int, deadline_ns: int | None) -> bool:
        try:
            return self._waiter.park(
                self._published,
                sequence,
                futex=self._published_futex,
                parked=self._parked,
                code=1,
                look=self._look,
                deadline_ns=deadline_ns,
            )
        finally:
            self._proceed()

    def _proceed(self) -> None:
        """A wait is over, one way or another."""
        if self._state is Endpoint.WAITING:
            self._state = move(self._state, "proceed")
            if self._log is not None:
                self._log.proceeding()

    def _look(self, now_ns: int) -> None:
        """While waiting: be seen to live, and see whether the writer does."""
        if self._closing:
            raise self._closed()
        self._state = Endpoint.WAITING
        self._borrower.sweep()
        self._borrower.see_to_device()
        if self._device_log is not None:
            self._device_log.settle()
        if self._log is not None:
            self._log.waiting(self._wanted, now_ns)
        if self._ring.writer[layout.WRITER_CLOSED]:
            self._raise_unless_published(
                QueueClosed(f"queue {self.name!r} was shut down by its writer, and everything in it has been taken")
            )
        elif self._attachment.process.is_alive() is False:
            if self._closing:  # another thread shuts us down, and has let go of what we just looked at
                raise self._closed()
            self._raise_unless_published(self._writer_died())

    def _writer_died(self, *, within: bool = False) -> PeerDied:
        process = self._attachment.process
        return PeerDied(
            f"the writer of queue {self.name!r} died ({process.ending()})",
            pid=process.who.pid,
            signal=process.signal(),
            expected="the writer to shut the queue down when it is done",
            found="its process gone" + (" within a message" if within else "; everything it published has been taken"),
            remedy="shut this end down; start the writer anew and attach to its new queue",
        )

    def _raise_unless_published(self, error: ArenaError) -> None:
        """What was published before the end is still taken: look once more, now that no more can come."""
        if self._published[0] <= self._wanted:
            self._assembly.drop()
            raise error

    def _timed_out(self, sequence: int) -> QueueTimeout:
        return QueueTimeout(
            f"no message on queue {self.name!r}: awaiting_write of frame {sequence}",
            expected="a frame, all of it, within the timeout",
            found=f"{self._published[0]} published, a writer (pid {self._attachment.process.who.pid}) that lives",
            remedy="nothing was lost; the next dequeue waits for the same message",
        )

    def _wake_writer(self) -> None:
        memory.fence()
        if self._ring.writer[layout.WRITER_PARKED]:
            self._consumed_futex.wake()

    # ── messages of several parts ────────────────────────────────────────────────────────────────
    def _take(self, sequence: int, received_ns: int, deadline_ns: int | None) -> tuple[bool, Any, int]:
        """Take a frame that is not just one inline pickle: (whether a message is complete, the message, time).

        What it borrows dies after the release: only then does a death give anything back. An interrupt before it
        leaves the frame to be taken again.
        """
        kind, traced = self._ring.kind(sequence)
        slot = layout.slot_of(sequence, self._slots)
        # Read before the release lets the writer overwrite them.
        trace = self._ring.trace(sequence) if traced else None
        sent_ns = self._heads[slot][HEAD_SENT_NS]
        # An inline pickle comes here only with trace context, and without its length.
        payload = self._payloads[slot] if kind == KIND_INLINE else self._ring.payload(sequence)
        if kind == layout.KIND_FRAGMENT:
            self._add_piece(sequence, payload)
        complete = kind != layout.KIND_ABORT and (kind != layout.KIND_FRAGMENT or self._assembly.complete)
        borrowed: list[memoryview] = []
        if kind == layout.KIND_STREAMED:
            complete = self._await_filled(sequence, payload, borrowed, deadline_ns)
        decode_ns = _monotonic_ns()
        try:
            obj = self._decode(sequence, kind, payload, borrowed) if complete else None
        except Exception:
            now_ns = self._release_frame(sequence, kind, complete)
            borrowed.clear()
            if trace is not None:
                self._begin_trace(sequence, trace, (sent_ns, received_ns, decode_ns, now_ns))
            raise
        now_ns = self._release_frame(sequence, kind, complete)
        borrowed.clear()
        if trace is not None and complete:
            self._begin_trace(sequence, trace, (sent_ns, received_ns, decode_ns, now_ns))
        return complete, obj, now_ns

    def _begin_trace(self, sequence: int, trace: hooks.Trace, times_ns: tuple[int, int, int, int]) -> None:
        """A sampled message is about to be with our caller. The next call sees to its end."""
        self._trace = trace
        self._attention = True
        if self._log is not None:
            self._log.taken(sequence, trace, times_ns)
        hooks.inside.set((trace, self.rank))

    def _end_trace(self) -> None:
        self._trace = None
        if self._log is not None:
            self._log.done()
        hooks.inside.set(None)

    def _add_piece(self, sequence: int, payload: memoryview) -> None:
        began_ns = _monotonic_ns()
        nbytes = self._assembly.add(sequence, payload)
        if self._log is not None:
            self._log.copied(nbytes, _monotonic_ns() - began_ns)

    def _release_frame(self, sequence: int, kind: int, complete: bool) -> int:
        now_ns = _monotonic_ns()
        self._ring.release(sequence, now_ns)
        if kind == layout.KIND_ABORT or (kind == layout.KIND_FRAGMENT and complete):
            self._assembly.drop()
        elif kind == layout.KIND_STREAMED:
            self._followed = None  # from here on it is for the gates
        return now_ns

    def _decode(self, sequence: int, kind: int, payload: memoryview, borrowed: list[memoryview]) -> Any:
        if kind == KIND_INLINE:
            if self._handle.serializer != "pickle":
                raise CorruptFrame("a pickle came on a queue that has none", expected="serializer='restricted'")
            return self._decoded(lambda: _loads(payload))
        began_ns = _monotonic_ns()
        if kind == layout.KIND_BLOCK:
            hold: HoldWords = _HOLD.unpack_from(payload.tobytes().ljust(_HOLD.size, b"\0"))
            borrowed.append(self._borrower.borrow(hold, sequence))
            payload = borrowed[0].toreadonly()
        elif kind == layout.KIND_FRAGMENT:
            payload = self._assembly.whole()
        table = read_table(payload)
        if kind == layout.KIND_STREAMED:
            views = dict(zip(table.holds, borrowed, strict=True))
        else:
            views = self._borrow(table, sequence, borrowed)
        obj = self._decoded(lambda: self._decode_table(table, views, self._handle.views))
        if self._log is not None:
            self._log.decoded(_monotonic_ns() - began_ns)
        return obj

    def _borrow(self, table: Table, sequence: int, borrowed: list[memoryview]) -> dict[HoldWords, memoryview]:
        self._borrower.sweep()
        views: dict[HoldWords, memoryview] = {}
        for hold in table.holds:
            borrowed.append(self._borrower.borrow(hold, sequence))
            views[hold] = borrowed[-1]
        return views

    def _decoded(self, decoder: Any) -> Any:
        try:
            return decoder()
        except ArenaError:
            raise
        except Exception as error:
            raise decode_failed(self.name, error) from error

    # ── streamed hand-over ───────────────────────────────────────────────────────────────────────
    def _await_filled(
        self, sequence: int, payload: memoryview, borrowed: list[memoryview], deadline_ns: int | None
    ) -> bool:
        """Wait until all bytes of a streamed frame are there (`arena.filling`); False if they will not come.

        It borrows the frame's holds. Where the message goes to a device, that follows meanwhile. What ends the wait
        otherwise leaves the frame to be taken again.
        """
        try:
            table = read_table(payload)
            views = self._borrow(table, sequence, borrowed)
            total = sum([hold[2] for hold in table.holds])
            self._wanted = sequence
            fill = Fill(
                self._ring.filled(sequence),
                total,
                self._look_while_filled,
                deadline_ns,
                lambda: self._timed_out(sequence),
            )
            self._follow(fill, table, sequence, views)
            fill.beyond(total - 1)
        except GivenUp:
            return False
        except CorruptFrame:
            self._release_frame(sequence, layout.KIND_STREAMED, complete=False)
            borrowed.clear()
            raise
        except BaseException:
            self._borrower.void(sequence)
            borrowed.clear()
            raise
        finally:
            self._proceed()
        return True

    def _follow(self, fill: Fill, table: Table, sequence: int, views: dict[HoldWords, memoryview]) -> None:
        leases = self._borrower.leases(sequence)
        if self._followed is not None:  # an earlier attempt's copies may still read
            self._borrower.remember(leases.values(), *self._followed)
        follower = self._followers.get(get_ident())
        if follower is None or self._handle.views == "private":
            return
        try:
            tensors = self._find_tensors(table)
        except Exception:  # a damaged frame: decoding it will tell
            return
        self._followed = follower.copies, follower.stream
        holds = [(entry, index in tensors) for index, entry in enumerate(table.entries) if entry in views]
        follower.follow(fill, holds, leases, views)

    def _look_while_filled(self, now_ns: int) -> ArenaError | None:
        """While a frame is being filled: the same looks as in any other wait, and what its writer's end means."""
        self._look(now_ns)
        return None if self._attachment.process.is_alive() is not False else self._writer_died(within=True)

    # ── to the device ────────────────────────────────────────────────────────────────────────────
    def to_device(
        self, message: Any, device: torch.device | str | int, stream: Any = None, *, shard: Any = None
    ) -> Any:
        self._refuse_forked()
        return self._mover(device, stream, shard).message(message, self._moving())

    def dequeue_to(
        self, device: torch.device | str | int, timeout: float | None = None, *, stream: Any = None, shard: Any = None
    ) -> Any:
        self._refuse_forked()
        mover = self._mover(device, stream, shard)
        self._ring.control[layout.READER_MOVES] = 1
        self._borrower.prepare(mover.follower.copies)
        thread = get_ident()
        try:
            self._followers[thread] = mover.follower
            message = self.dequeue(timeout)
        finally:
            self._followers.pop(thread, None)
        return mover.message(message, self._moving())

    def _mover(self, device: torch.device | str | int, stream: Any, shard: Any) -> Mover:
        from arena.transfer import Mover

        return Mover(check_device(device), stream, self._device_log, self._gated, shard=shard)

    def _moving(self) -> Moving | None:
        """What takes down the copies of the sampled message that our caller has, if it has one."""
        sampled = None if self._log is None else self._log.sampled
        if sampled is None or self._probe is None:
            return None
        from arena.transfer import Moving

        return Moving(self._probe, *sampled)

    @contextlib.contextmanager
    def _gated(self) -> Iterator[None]:
        """While the caller waits for a copy that is not the device's own work."""
        if self._state is not Endpoint.WORKING:  # another thread has the endpoint, and says what it does
            yield
            return
        self._state = move(self._state, "gate")
        if self._probe is not None:
            self._probe.proceeding(Endpoint.GATE, _monotonic_ns())
        try:
            yield
        finally:
            self._leave_gate()

    def _leave_gate(self) -> None:
        if self._state is Endpoint.GATE:
            self._state = move(self._state, "proceed")
            if self._probe is not None:
                self._probe.proceeding(Endpoint.WORKING, _monotonic_ns())

    # ── the rest of the face ─────────────────────────────────────────────────────────────────────
    def broadcast_object(self, obj: object = None) -> Any:
        return self.dequeue()

    def wait_until_ready(self, timeout: float | None = None) -> None:
        deadline_ns = deadline_after(check_timeout(timeout))
        self._refuse_forked()
        try:
            while True:
                if self._ring.writer[layout.READY]:
                    return
                self._wanted = self._published[0]
                self._look(_monotonic_ns())
                if deadline_ns is not None and _monotonic_ns() >= deadline_ns:
                    raise QueueTimeout(
                        f"not every reader of queue {self.name!r} has attached",
                        expected=f"{self._handle.n_reader} readers",
                        found="fewer; the writer's wait_until_ready names them",
                        remedy="see whether all workers started and were given the handle",
                    )
                time.sleep(0.005)
        finally:
            self._proceed()

    def statistics(self) -> Statistics:
        self._refuse_forked()
        consumed, published = self._consumed[0], self._published[0]
        return Statistics(
            name=self.name,
            role="reader",
            state=self._state.name.lower(),
            published=published,
            consumed_by_reader={self.rank: consumed},
            lag_by_reader={self.rank: max(0, published - consumed)},
            errors={} if self._log is None else self._log.errors(),
            starved_s=self._waiter.waited_ns / 1e9,
            parks=self._waiter.parks,
            missed_wakes=self._waiter.missed_wakes,
            pins=self._borrower.pins.described() if self._borrower.pins is not None else {},
        )

    def __repr__(self) -> str:
        if self._state is Endpoint.FORKED:
            return f"<MessageQueue {self.name!r} reader {self.rank}, forked: only the process that made it can use it>"
        return (
            f"<MessageQueue {self.name!r} reader {self.rank}, {self._state.name.lower()}: "
            f"consumed {self._consumed[0]} <= published {self._published[0]}>"
        )

    # ── closing ──────────────────────────────────────────────────────────────────────────────────
    def _say_closing(self) -> None:
        self._published_futex.wake()

    def _release_everything(self) -> None:
        self._assembly.drop()
        if not self._ring.control[layout.READER_CLOSED]:
            self._ring.control[layout.READER_CLOSED] = layout.LEFT
        self._consumed_futex.wake()
        self._attachment.close()
        self._borrower.close()
        if self._log is not None:
            # With its successor gone in order, a dead predecessor's page would speak of a rank that nobody misses.
            remove_dead_pages(self._directory, self.rank, keep=0)
            self._log.close(self._consumed[0])
        remove_if_empty(self._directory)

    def _count_error(self, error: ArenaError) -> None:
        if self._log is not None:
            self._log.error(error, self._consumed[0])


def _register_tickets(tickets: Tickets, copies: Copies) -> None:
    from arena.pin import register_tickets

    register_tickets(tickets, copies)


_NOT_COMPARED: Final = (layout.IDENTITY_PID, layout.IDENTITY_RANK)
