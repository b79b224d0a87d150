"""The writer's end: encode, place, claim, write, publish; and whom it waits for when the ring is full."""

from __future__ import annotations

import contextlib
import secrets
import struct
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from arena import layout, memory
from arena.blame import Charge, charge, charge_unfinished
from arena.blocks import BlockPool, Hold, NoRoom, PoolLimits, PoolSegment
from arena.codec import Encoder, HoldWords, Message, Source, build_payload
from arena.config import QueueConfig, check_readers, check_timeout
from arena.errors import ArenaError, MessageTooLarge, NoReader, OutOfMemory, PeerDied, QueueClosed, QueueTimeout
from arena.layout import READER_PARKED, Geometry
from arena.memory import UNLOCK_IS_A_FENCE, Segment
from arena.message_queue import MessageQueue, Statistics, Warn
from arena.peers import MAGIC, PROTOCOL, AttachServer, Handle, Roster, Seat, signal_name
from arena.probe import Event, Probe, Role, collect_garbage, hooks, identity, run_directory
from arena.probe.directory import KEPT_DEAD, SOCKET, WRITER_PAGE, mark_owner, queue_directory, remove_if_empty
from arena.probe.metrics import ERROR_KINDS, FALLBACK_REASONS, PATHS
from arena.probe.page import L_SEQUENCE, MANY_MESSAGES, SAMPLE
from arena.ring import WriterRing, released_at
from arena.state import Endpoint, move
from arena.state import Message as MessageState
from arena.wait import Waiter, deadline_after

if TYPE_CHECKING:
    import torch

_LOOK_NS: Final = 200_000_000  # how often a writer that never waits asks whether its readers live
_FRAGMENT: Final = struct.Struct(layout.FRAGMENT_HEADER)
_HOLD: Final = struct.Struct(layout.HOLD)
_monotonic_ns = time.monotonic_ns


class _RosterChanged(Exception):
    """While waiting, a reader attached, left or died: look again for whom to wait."""


class _Words:
    """Where the writer's counters lie in its probe's values."""

    def __init__(self, probe: Probe) -> None:
        self.messages = {path: probe.word("messages_published_total", path) for path in PATHS}
        self.bytes = {path: probe.word("published_bytes_total", path) for path in PATHS}
        self.inline_messages = self.messages["inline"]
        self.inline_bytes = self.bytes["inline"]
        self.occupancy = probe.word("ring_occupancy_slots")
        self.serialize = probe.word("serialize_seconds", "dump")
        self.memcpy = probe.word("memcpy_seconds", "write")
        self.memcpy_bytes = probe.word("memcpy_bytes_total", "write")
        self.fallback = {reason: probe.word("fallback_total", reason) for reason in FALLBACK_REASONS}
        self.error = {kind: probe.word("errors_total", kind) for kind in ERROR_KINDS}
        self.full = probe.word("writer_blocked_full_seconds_total")
        self.waits = probe.word("writer_blocked_total")
        self.wait = probe.word("writer_wait_seconds")
        self.parks = probe.word("parks_total")
        self.missed = probe.word("missed_wakes_total")
        self.spin = probe.word("spin_seconds_total")
        self.blocked = probe.word("writer_blocked_seconds_total", 0)
        self.excess = probe.word("writer_blocked_excess_seconds_total", 0)
        gauges = ("segments", "segment_size_bytes", "block_used_bytes", "block_used_max_bytes", "holds_used")
        self.gauge = {name: probe.word(name) for name in (*gauges, "block_budget_bytes", "block_largest_free_bytes")}


class Writer(MessageQueue):
    """What ``MessageQueue(n_reader)`` makes. See there."""

    __slots__ = (
        "_directory",
        "_encode",
        "_encoder",
        "_futex",
        "_handed",
        "_handle",
        "_in_flight",
        "_inline_bytes",
        "_inline_total",
        "_instance",
        "_message",
        "_next_look_ns",
        "_other_frames",
        "_parked",
        "_pool",
        "_published",
        "_ring",
        "_roster",
        "_sample",
        "_sampled_from",
        "_segment",
        "_server",
        "_short_bytes",
        "_slots",
        "_tabled",
        "_waiter",
        "_words",
        "config",
        "n_reader",
    )

    def __init__(
        self,
        n_reader: int,
        n_local_reader: int | None = None,
        *,
        config: QueueConfig | None = None,
        on_warning: Warn | None = None,
    ) -> None:
        n_reader = check_readers(n_reader, n_local_reader)
        self.config = config = (config or QueueConfig()).from_environment()
        self._begin(config.name, on_warning)
        self.n_reader = n_reader
        self._instance = secrets.token_hex(6)
        geometry = Geometry(config.slots, config.slot_bytes, config.max_holds)
        root = run_directory(config.run_dir)
        collect_garbage(root, name=config.name, keep=KEPT_DEAD)
        self._directory = queue_directory(root, config.name, self._instance)
        with contextlib.ExitStack() as undo:
            undo.callback(remove_if_empty, self._directory)
            mark_owner(self._directory)
            undo.callback((self._directory / "owner").unlink, missing_ok=True)
            if config.probes:
                self._probe = self._make_probe(geometry)
                undo.callback(self._probe.unlink)
            self._make_ring(geometry)
            undo.callback(self._segment.close)
            self._handed: list[tuple[int, int, int]] = [(0, self._segment.nbytes, self._segment.fd)]
            self._server: AttachServer | None = None
            self._pool = BlockPool(config.name, self._pool_limits(), self._probe, self._hand_over)
            undo.callback(self._pool.close)
            self._handle = self._make_handle(geometry)
            self._server = AttachServer(
                self._directory, SOCKET, self._handle, self._roster, self._handed.copy, self._note_attach
            )
            undo.pop_all()
        self._encoder = Encoder()
        self._encode = self._encoder.encode
        self._waiter = Waiter(n_reader + 1)
        self._inline_bytes = geometry.payload_bytes
        self._short_bytes = min(geometry.payload_bytes, config.max_message_bytes)
        self._message = MessageState.NONE
        self._in_flight: list[Hold] = []
        self._slots = geometry.slots
        self._sample = 0
        self._sampled_from = 0
        self._inline_total = 0  # bytes of messages that rode inline
        self._other_frames = 0  # frames that were not one small message each
        self._tabled = 0  # those among them that were an inline message all the same
        self._next_look_ns = 0
        self._words = _Words(self._probe) if self._probe is not None else None
        self._state = move(self._state, "attach")
        self._show_arena()

    # ── setting up ───────────────────────────────────────────────────────────────────────────────
    def _make_probe(self, geometry: Geometry) -> Probe:
        about = {
            "queue": self.name,
            "instance": self._instance,
            "n_reader": self.n_reader,
            "slots": geometry.slots,
            "slot_bytes": geometry.slot_bytes,
            "max_arena_bytes": self.config.max_arena_bytes,
            "views": self.config.views,
        }
        path = self._directory / WRITER_PAGE
        return Probe(path, Role.WRITER, rank=0, n_reader=self.n_reader, slots=geometry.slots, about=about)

    def _make_ring(self, geometry: Geometry) -> None:
        self._segment = Segment.create(self.name, geometry.ring_bytes)
        mapping = self._segment.mapping
        words = mapping.raw_words(0, layout.IDENTITY_WORDS)
        words[layout.IDENTITY_VERSION] = layout.VERSION
        words[layout.IDENTITY_PID] = identity().pid
        words[layout.IDENTITY_SLOTS] = geometry.slots
        words[layout.IDENTITY_SLOT_BYTES] = geometry.slot_bytes
        words[layout.IDENTITY_HOLDS] = geometry.max_holds
        words[layout.IDENTITY_MAGIC] = layout.RING_MAGIC
        self._ring = WriterRing(mapping, geometry)
        self._published = self._ring.published
        self._futex = mapping.futex(layout.LIVE_OFFSET + layout.PUBLISHED * layout.WORD)
        self._parked = mapping.words(layout.LIVE_OFFSET + layout.WRITER_PARKED * layout.WORD, 1)
        self._roster = Roster(self.n_reader, mapping, geometry)

    def _pool_limits(self) -> PoolLimits:
        config = self.config
        return PoolLimits(
            max_arena_bytes=config.max_arena_bytes,
            segment_bytes=config.segment_bytes,
            max_holds=config.max_holds,
            prefault=config.prefault,
            huge_pages=config.huge_pages,
            peers_may_write=config.views == "shared",
        )

    def _make_handle(self, geometry: Geometry) -> Handle:
        return Handle(
            magic=MAGIC,
            version=PROTOCOL,
            name=self.name,
            instance=self._instance,
            directory=str(self._directory),
            secret=secrets.token_hex(32),
            n_reader=self.n_reader,
            n_local_reader=self.n_reader,
            geometry=geometry,
            views=self.config.views,
            max_message_bytes=self.config.max_message_bytes,
            max_arena_bytes=self.config.max_arena_bytes,
            probes=self.config.probes,
        )

    def _hand_over(self, new: PoolSegment) -> bool:
        """Give a new segment to whoever is attached, and to whoever attaches later."""
        segment = new.segment
        if self._server is None:
            self._handed.append((new.number, segment.nbytes, segment.fd))
            return True
        with self._server.lock:
            delivered = self._server.push(new.number, segment.nbytes, segment.fd)
            if delivered:
                self._handed.append((new.number, segment.nbytes, segment.fd))
        if self._probe is not None and delivered:
            self._probe.event(Event.GROW, self._published[0], _monotonic_ns(), new.number, segment.nbytes)
        return delivered

    def _note_attach(self) -> None:
        """Called by the attach thread: the writer may be asleep on a reader that has only now come."""
        self._attention = True
        self._wake_self()

    # ── the story ────────────────────────────────────────────────────────────────────────────────
    def enqueue(self, obj: object, timeout: float | None = None) -> None:
        try:
            if not self._acquire(False):
                self._contend(timeout)
            deadline_ns = None
            if self._attention or self._busy or timeout is not None:
                deadline_ns = self._prepare(timeout)
            self._busy = True
            sequence = self._published[0]
            began_ns = 0 if sequence & self._sample else _monotonic_ns()
            message = self._encode(obj)
            if type(message) is bytes and (nbytes := len(message)) <= self._short_bytes:
                ring = self._ring
                if sequence >= ring.limit:
                    self._wait_for_slot(sequence, deadline_ns, first=True)
                now_ns = _monotonic_ns()
                ring.write(sequence, message, nbytes, now_ns)
                if hooks.trace_source is not None:
                    self._write_trace(sequence)
                ring.publish(sequence)
                if self._probe is not None:
                    self._observe_inline(sequence, nbytes, began_ns, now_ns)
                if now_ns >= self._next_look_ns:
                    self._attention = True
            else:
                self._send(message, deadline_ns)
        except BaseException as error:
            self._leave(error)
            raise
        self._busy = False
        if self._closing:
            self._finish()
        self._release()  # on x86, also the fence between `published` and the look at `parked`
        if not UNLOCK_IS_A_FENCE:
            memory.fence()
        for words in self._roster.words:
            if words[READER_PARKED]:
                self._futex.wake()
                break

    def _prepare(self, timeout: float | None) -> int | None:
        """See to what came up since the last message; returns the deadline."""
        self._enter()
        deadline_ns = deadline_after(check_timeout(timeout))
        if self._attention:
            self._attention = False
            try:
                self._next_look_ns = _monotonic_ns() + _LOOK_NS
                self._roster.reap()
                self._see_to_roster()
                if self._message is MessageState.OWED_ABORT:
                    self._publish_abort(deadline_ns)
            except BaseException:
                self._attention = True  # the rest is still to be seen to
                raise
        return deadline_ns

    # ── messages of several parts ────────────────────────────────────────────────────────────────
    def _send(self, message: bytes | Message, deadline_ns: int | None) -> None:
        """Send what does not fit one slot as it is: with blocks, or in fragments."""
        whole = Message([message]) if isinstance(message, bytes) else message
        if whole.nbytes > self.config.max_message_bytes:
            raise MessageTooLarge(
                f"message of {whole.nbytes} bytes",
                expected=f"at most max_message_bytes = {self.config.max_message_bytes}",
                remedy="send it in parts, or raise max_message_bytes",
            )
        began_ns = _monotonic_ns()
        reasons: set[str] = set()
        if whole.fallbacks:
            reasons.add("unsupported_tensor")
        if self._pool.torn:
            self._pool.repair(self._published[0])
        try:
            placed = [self._place(source, reasons) for source in whole.sources]
            payload = build_payload(whole, placed)
            path = self._send_payload(payload, deadline_ns, reasons)
        except Exception:
            self._take_back_unsent()
            raise
        except BaseException:  # ctrl-C, at any point of this
            self._in_flight = []
            self._pool.repair(self._published[0])
            raise
        self._in_flight = []
        self._observe_message(path, whole.nbytes, began_ns, reasons)

    def _take_back_unsent(self) -> None:
        """The holds of a message that was not published are nobody's."""
        holds, self._in_flight = self._in_flight, []
        for hold in holds:
            if not hold.seats or hold.sequence >= self._published[0]:
                self._pool.unhold(hold)

    def _send_payload(self, payload: list[memoryview], deadline_ns: int | None, reasons: set[str]) -> str:
        nbytes = sum(piece.nbytes for piece in payload)
        if nbytes <= self._inline_bytes:
            path = "block" if self._in_flight else "inline"
            self._publish(layout.KIND_TABLE, payload, deadline_ns, first=True)
            return path
        hold = self._place_payload(payload, nbytes, reasons)
        if hold is not None:
            self._publish(layout.KIND_BLOCK, [memoryview(_HOLD.pack(*hold))], deadline_ns, first=True)
            return "block"
        self._publish_fragments(payload, nbytes, deadline_ns)
        return "fragments"

    def _place(self, source: Source, reasons: set[str]) -> HoldWords | None:
        """A hold on a block with the source's bytes; None where they have to ride in the payload."""
        if source.nbytes < self.config.min_block_bytes:
            return None
        address = source.address
        lent = self._pool.find(address, source.nbytes) if address is not None else None
        try:
            if lent is not None:
                return self._keep(self._pool.hold(lent[0], lent[1], source.nbytes))
            return self._keep(self._copy_to_block(source.nbytes, source.write_to))
        except NoRoom as no_room:
            reasons.add(no_room.reason)
            return None

    def _place_payload(self, payload: list[memoryview], nbytes: int, reasons: set[str]) -> HoldWords | None:
        """A block for a payload that is too long for a slot."""

        def write(target: memoryview) -> None:
            at = 0
            for piece in payload:
                memory.copy_bytes(target[at : at + piece.nbytes], piece)
                at += piece.nbytes

        try:
            return self._keep(self._copy_to_block(nbytes, write))
        except NoRoom as no_room:
            reasons.add(no_room.reason)
            return None

    def _copy_to_block(self, nbytes: int, write: Any) -> Hold:
        block = self._pool.lend(nbytes)
        try:
            began_ns = _monotonic_ns()
            write(block.view(nbytes))
            self._observe_copy(nbytes, _monotonic_ns() - began_ns)
            return self._pool.hold(block, block.offset, nbytes)
        finally:
            self._pool.drop(block)

    def _keep(self, hold: Hold) -> HoldWords:
        self._in_flight.append(hold)
        return hold.words()

    def _publish(self, kind: int, pieces: list[memoryview], deadline_ns: int | None, *, first: bool) -> None:
        """Claim a slot, fill it, publish it. Holds in flight become the readers' with this frame."""
        sequence = self._published[0]
        if sequence >= self._ring.limit:
            self._wait_for_slot(sequence, deadline_ns, first=first)
        now_ns = _monotonic_ns()
        self._ring.write_pieces(sequence, kind, pieces, now_ns)
        if hooks.trace_source is not None:
            self._write_trace(sequence)
        if kind != layout.KIND_FRAGMENT:
            self._hand_holds_over(sequence)
        self._ring.publish(sequence)
        self._observe_frame(sequence, now_ns)
        if kind in (layout.KIND_FRAGMENT, layout.KIND_ABORT):
            self._wake_readers()  # the call goes on; readers may sleep already

    def _hand_holds_over(self, sequence: int) -> None:
        seats = list(self._roster.counted)
        for hold in self._in_flight:
            self._pool.send(hold, sequence, seats)

    def _publish_fragments(self, payload: list[memoryview], nbytes: int, deadline_ns: int | None) -> None:
        """Cut a payload over as many slots as it takes. Back-pressure, bounded memory, no deadlock."""
        first_sequence = self._published[0]
        room = self._inline_bytes - layout.FRAGMENT_HEADER_BYTES
        at = 0
        try:
            for pieces in _cut(payload, room):
                length = sum(piece.nbytes for piece in pieces)
                head = memoryview(_FRAGMENT.pack(nbytes, at, first_sequence))
                if at + length == nbytes:
                    self._hand_holds_over(self._published[0])
                self._publish(layout.KIND_FRAGMENT, [head, *pieces], deadline_ns, first=at == 0)
                at += length
                self._message = move(self._message, "fragment")
            self._message = move(self._message, "complete")
        except BaseException:
            if self._published[0] > first_sequence and at < nbytes:
                self._message = MessageState.OWED_ABORT
                self._attention = True
            raise

    def _publish_abort(self, deadline_ns: int | None) -> None:
        """Tell the readers that the message they have parts of will not be completed."""
        self._publish(layout.KIND_ABORT, [memoryview(b"\0")], deadline_ns, first=False)
        self._message = move(self._message, "abort")
        if self._probe is not None:
            self._probe.event(Event.ABORT, self._published[0], _monotonic_ns())

    def _write_trace(self, sequence: int) -> None:
        source = hooks.trace_source
        trace = source() if source is not None else None
        if trace is not None:
            self._ring.write_trace(sequence, trace)

    def _wake_readers(self) -> None:
        memory.fence()
        if any(words[layout.READER_PARKED] for words in self._roster.words):
            self._futex.wake()

    # ── waiting for a slot ───────────────────────────────────────────────────────────────────────
    def _wait_for_slot(self, sequence: int, deadline_ns: int | None, *, first: bool) -> None:
        """Return once every counted reader has released the frame `slots` before `sequence`."""
        floor = sequence - self._ring.slots
        if self._pending(floor):
            self._block(floor, deadline_ns, first=first)
        counted = self._roster.counted
        if not counted:
            raise self._nobody_left()
        self._ring.limit = min(seat.consumed for seat in counted) + self._ring.slots

    def _pending(self, floor: int) -> list[Seat]:
        return [seat for seat in self._roster.counted if seat.consumed <= floor]

    def _block(self, floor: int, deadline_ns: int | None, *, first: bool) -> None:
        started_ns = _monotonic_ns()
        holders = {seat.rank: seat for seat in self._pending(floor)}
        n_counted = len(self._roster.counted)
        warned = False

        def look(now_ns: int) -> None:
            nonlocal warned
            if self._closing:
                raise self._closed()
            changed = self._roster.reap() or self._roster.changed
            pending = self._pending(floor)
            self._show_wait(floor, pending, now_ns)
            if not warned and now_ns - started_ns >= self.config.stall_warning_s * 1e9:
                warned = True
                self._report_stall(floor, pending, now_ns - started_ns)
            if changed:
                raise _RosterChanged

        try:
            while pending := self._pending(floor):
                straggler = min(pending, key=lambda seat: seat.consumed)
                try:
                    passed = self._waiter.spin(straggler.words, floor, deadline_ns) or self._waiter.park(
                        straggler.words,
                        floor,
                        futex=straggler.futex or self._futex,
                        parked=self._parked,
                        code=straggler.rank + 1,
                        look=look,
                        deadline_ns=deadline_ns,
                    )
                except _RosterChanged:
                    self._see_to_roster(report=first)
                    continue
                if not passed:
                    raise self._timed_out(floor)
        finally:
            self._show_proceeding()
            self._charge_wait(floor, started_ns, holders, n_counted)

    def _charge_wait(self, floor: int, started_ns: int, holders: dict[int, Seat], n_counted: int) -> None:
        ended_ns = _monotonic_ns()
        lags = {rank: self._lag(seat) for rank, seat in holders.items() if seat.consumed <= floor}
        passed = [seat for rank, seat in holders.items() if rank not in lags]
        released_ns = {seat.rank: released_at(seat.released, floor, self._ring.slots) for seat in passed}
        if lags:
            self._charge(charge_unfinished(started_ns, ended_ns, released_ns, lags, n_counted), ended_ns)
        elif released_ns:
            self._charge(charge(started_ns, ended_ns, released_ns, n_counted), ended_ns)

    def _lag(self, seat: Seat) -> int:
        return max(0, self._published[0] - seat.consumed)

    def _see_to_roster(self, *, report: bool = True) -> None:
        """Admit joiners, record arrivals, and raise for the dead, once each.

        Args:
            report: between two messages. Inside one, joiners and the report of deaths wait for its end.
        """
        if not report:
            self._roster.changed = False
            self._attention = True
            return
        self._roster.admit(self._published[0])
        now_ns = _monotonic_ns()
        for what, seat in self._roster.take_news():
            if self._probe is not None:
                kind = {"attach": Event.ATTACH, "leave": Event.LEAVE, "death": Event.DEATH}[what]
                self._probe.event(kind, self._published[0], now_ns, seat.rank, seat.pid or 0)
        if self._roster.departed:
            self._roster.let_go(self._pool.owing())
        while self._roster.deaths:
            seat = self._roster.take_death()
            self._count("peer_died")
            if self.config.on_reader_death == "raise":
                self._attention = True
                raise self._died(seat)
        if not self._roster.counted:
            raise self._nobody_left()

    def _died(self, seat: Seat) -> PeerDied:
        signal = seat.process.signal() if seat.process is not None else None
        return PeerDied(
            f"{seat.describe()} of queue {self.name!r} died ({signal_name(signal)})",
            rank=seat.rank,
            pid=seat.pid,
            signal=signal,
            expected="every reader to live until it leaves",
            found=f"its process gone at lag {self._lag(seat)}",
            remedy="nothing was sent; the next enqueue goes on without it, and a new process may attach as this rank",
        )

    def _nobody_left(self) -> NoReader:
        states = ", ".join(f"{seat.describe()} {seat.state.name}" for seat in self._roster.seats)
        self._attention = True
        return NoReader(
            f"queue {self.name!r} has no reader left", found=states, remedy="attach a reader, or shut the queue down"
        )

    def _timed_out(self, floor: int) -> QueueTimeout:
        return QueueTimeout(
            f"queue {self.name!r} is full: {self._verdict(self._pending(floor))}",
            expected=f"frame {floor} released by all {len(self._roster.counted)} readers",
            found=f"{self._published[0]} published",
            remedy="nothing was sent; see what that reader does (py-spy dump --pid), or allow more time",
        )

    def _verdict(self, pending: list[Seat]) -> str:
        """Who holds the line, in the three words' sense: awaiting_readers."""
        return "awaiting_readers " + ", ".join(f"{seat.describe()} lag {self._lag(seat)}" for seat in pending)

    def _report_stall(self, floor: int, pending: list[Seat], waited_ns: int) -> None:
        if self._probe is not None and pending:
            self._probe.event(Event.STALL, floor, _monotonic_ns(), waited_ns, pending[0].rank)
        self._warn(f"queue {self.name!r} blocked for {waited_ns / 1e9:.1f} s: {self._verdict(pending)}")

    # ── lending ──────────────────────────────────────────────────────────────────────────────────
    @contextlib.contextmanager
    def lend(self, shape: Any, dtype: torch.dtype, *, or_private: bool = False) -> Iterator[torch.Tensor]:
        import torch

        # Let torch judge the shape; a meta tensor costs no memory.
        wanted = torch.empty(shape, dtype=dtype, device="meta")
        yield self._lent_tensor(wanted, or_private=or_private)

    def _lent_tensor(self, wanted: torch.Tensor, *, or_private: bool) -> torch.Tensor:
        import torch

        nbytes = wanted.numel() * wanted.element_size()
        with self._lock:
            self._refuse_use()
            if not nbytes:
                return torch.empty(wanted.shape, dtype=wanted.dtype, device="cpu")  # torch has no view of no bytes
            self._busy = True
            try:
                if self._pool.torn:
                    self._pool.repair(self._published[0])
                exported = self._pool.export(self._pool.lend(nbytes))
                self._show_arena()
            except NoRoom as no_room:
                self._count_fallback({no_room.reason}, nbytes)
                if or_private:
                    return torch.empty(wanted.shape, dtype=wanted.dtype, device="cpu")
                raise OutOfMemory(
                    f"no room in the arena for {nbytes} bytes ({no_room.reason})",
                    expected=f"{nbytes} bytes within max_arena_bytes = {self.config.max_arena_bytes}",
                    found=f"{self._pool.used_bytes} of {self._pool.size_bytes} bytes used",
                    remedy="drop tensors, raise max_arena_bytes, or pass or_private=True",
                ) from None
            except BaseException:
                self._pool.torn = True
                raise
            finally:
                self._busy = False
                if self._closing:
                    self._finish()
        return torch.frombuffer(exported, dtype=wanted.dtype, count=wanted.numel()).view(wanted.shape)

    # ── the rest of the face ─────────────────────────────────────────────────────────────────────
    def broadcast_object(self, obj: object = None) -> Any:
        self.enqueue(obj)
        return obj

    def export_handle(self) -> Handle:
        return self._handle

    def wait_until_ready(self, timeout: float | None = None) -> None:
        deadline_ns = deadline_after(check_timeout(timeout))
        self._refuse_forked()
        while not self._roster.everyone_came.wait(0.05):
            if self._closing:
                self._refuse_use()
            if deadline_ns is not None and _monotonic_ns() >= deadline_ns:
                missing = self._roster.missing()
                raise QueueTimeout(
                    f"readers {missing} of queue {self.name!r} have not attached",
                    expected=f"{self.n_reader} readers",
                    found=f"{self.n_reader - len(missing)}",
                    remedy="see whether those workers started and were given the handle",
                )

    def statistics(self) -> Statistics:
        self._refuse_forked()
        published = self._published[0]
        seats = list(self._roster.seats)
        values, words = (self._probe.values, self._words) if self._probe is not None else ([], None)
        counted = {} if words is None else self._counted(values, words)
        return Statistics(
            name=self.name,
            role="writer",
            state=self._state.name.lower(),
            published=published,
            consumed_by_reader={seat.rank: seat.consumed for seat in seats},
            lag_by_reader={seat.rank: max(0, published - seat.consumed) for seat in seats},
            peers={seat.rank: seat.state.name.lower() for seat in seats},
            arena_used_bytes=self._pool.used_bytes,
            arena_used_max_bytes=self._pool.used_max_bytes,
            arena_size_bytes=self._pool.size_bytes,
            held_bytes_by_reader=self._pool.holders(),
            segments=len(self._pool.segments),
            holds_used=self._pool.holds_used,
            holds_reclaimed=self._pool.reclaimed,
            parks=self._waiter.parks,
            missed_wakes=self._waiter.missed_wakes,
            **counted,
        )

    def _counted(self, values: list[int], words: _Words) -> dict[str, Any]:
        if self._probe is not None:
            self._settle_counts(self._probe, words)
        ranks = range(self.n_reader)
        return {
            "messages_by_path": {path: values[word] for path, word in words.messages.items()},
            "bytes_by_path": {path: values[word] for path, word in words.bytes.items()},
            "fallbacks": {reason: values[word] for reason, word in words.fallback.items() if values[word]},
            "errors": {kind: values[word] for kind, word in words.error.items() if values[word]},
            "blocked_s_by_reader": {rank: values[words.blocked + rank] / 1e9 for rank in ranks},
            "excess_s_by_reader": {rank: values[words.excess + rank] / 1e9 for rank in ranks},
            "blocked_full_s": values[words.full] / 1e9,
        }

    def __repr__(self) -> str:
        if self._state is Endpoint.FORKED:
            return f"<MessageQueue {self.name!r} writer, forked: only the process that made it can use it>"
        published = self._published[0]
        consumed = [seat.consumed for seat in self._roster.counted]
        low, high = (min(consumed), max(consumed)) if consumed else (published, published)
        return (
            f"<MessageQueue {self.name!r} writer, {self._state.name.lower()}: consumed {low}..{high} <= "
            f"published {published} <= {low} + {self._ring.slots} slots, {len(consumed)} of {self.n_reader} readers, "
            f"arena {self._pool.used_bytes >> 20}/{self._pool.size_bytes >> 20} MiB>"
        )

    # ── closing ──────────────────────────────────────────────────────────────────────────────────
    def _say_closing(self) -> None:
        self._ring.live[layout.WRITER_CLOSED] = 1
        self._futex.wake()
        self._wake_self()

    def _wake_self(self) -> None:
        for seat in self._roster.seats:
            if seat.futex is not None:
                seat.futex.wake()
        self._futex.wake()

    def _release_everything(self) -> None:
        if self._server is not None:
            self._server.stop()
        self._roster.close()
        self._pool.close()
        self._segment.close()
        if self._probe is not None:
            self._probe.event(Event.CLOSE, self._published[0], _monotonic_ns())
            self._probe.closed(Endpoint.CLOSED, _monotonic_ns())
            self._probe.unlink()
        (self._directory / "owner").unlink(missing_ok=True)
        remove_if_empty(self._directory)

    # ── observing: after the fact, and unable to fail ────────────────────────────────────────────
    def _observe_inline(self, sequence: int, nbytes: int, began_ns: int, now_ns: int) -> None:
        """One small message. Its count is `published` less the other frames, so only bytes are added up."""
        probe = self._probe
        assert probe is not None
        self._inline_total += nbytes
        probe.words[L_SEQUENCE] = sequence + 1
        probe.slot_times[sequence % self._slots] = now_ns
        if now_ns >= probe.next_flush_ns:
            self._adapt_sampling(sequence)
            self._flush(now_ns)
        if began_ns:
            self._observe_closely(sequence, nbytes, began_ns, now_ns)

    def _observe_closely(self, sequence: int, nbytes: int, began_ns: int, now_ns: int) -> None:
        probe, words = self._probe, self._words
        assert probe is not None and words is not None
        probe.observe(words.serialize, now_ns - began_ns)
        self._observe_occupancy(sequence)
        if now_ns >= probe.next_event_ns:
            probe.message_event(Event.PUBLISH, sequence, now_ns, now_ns - began_ns, nbytes)

    def _adapt_sampling(self, sequence: int) -> None:
        """Look closely at every small message while they are few, at one in 16 while there are many."""
        many = sequence - self._sampled_from > MANY_MESSAGES
        self._sampled_from = sequence
        self._sample = SAMPLE if many else 0

    def _observe_occupancy(self, sequence: int) -> None:
        probe, words = self._probe, self._words
        assert probe is not None and words is not None
        low = sequence + 1
        for reader in self._roster.words:
            consumed = reader[0]
            if consumed < low:
                low = consumed
        probe.observe(words.occupancy, min(sequence + 1 - low, self._slots))

    def _observe_frame(self, sequence: int, now_ns: int) -> None:
        """One frame that is not a whole small message."""
        probe = self._probe
        if probe is not None:
            self._other_frames += 1
            probe.words[L_SEQUENCE] = sequence + 1
            probe.slot_times[sequence % self._slots] = now_ns
            self._observe_occupancy(sequence)
            if now_ns >= probe.next_flush_ns:
                self._flush(now_ns)

    def _observe_message(self, path: str, nbytes: int, began_ns: int, reasons: set[str]) -> None:
        now_ns = _monotonic_ns()
        if now_ns >= self._next_look_ns:
            self._attention = True
        probe, words = self._probe, self._words
        if probe is None or words is None:
            return
        if path == "inline":  # a table in one slot: counted with the small messages
            self._tabled += 1
            self._inline_total += nbytes
        else:
            probe.count(words.messages[path])
            probe.count(words.bytes[path], nbytes)
        self._count_fallback(reasons, nbytes)
        probe.message_event(Event.PUBLISH, self._published[0] - 1, now_ns, now_ns - began_ns, nbytes)

    def _observe_copy(self, nbytes: int, took_ns: int) -> None:
        probe, words = self._probe, self._words
        if probe is not None and words is not None:
            probe.observe(words.memcpy, took_ns)
            probe.count(words.memcpy_bytes, nbytes)
            probe.event(Event.COPY, self._published[0], _monotonic_ns(), took_ns, nbytes)

    def _count_fallback(self, reasons: set[str], nbytes: int) -> None:
        probe, words = self._probe, self._words
        if probe is not None and words is not None:
            for reason in reasons:
                probe.count(words.fallback[reason])
                index = FALLBACK_REASONS.index(reason)
                probe.event(Event.FALLBACK, self._published[0], _monotonic_ns(), index, nbytes)

    def _count_error(self, error: ArenaError) -> None:
        kinds = {"QueueTimeout": "timeout", "CorruptFrame": "corrupt_frame", "EncodeFailed": "encode"}
        kind = kinds.get(type(error).__name__)
        if kind is not None and not isinstance(error, QueueClosed):
            self._count(kind)

    def _count(self, kind: str) -> None:
        probe, words = self._probe, self._words
        if probe is not None and words is not None:
            probe.count(words.error[kind])
            probe.event(Event.ERROR, self._published[0], _monotonic_ns(), ERROR_KINDS.index(kind))

    def _charge(self, charged: Charge, now_ns: int) -> None:
        probe, words = self._probe, self._words
        if probe is None or words is None:
            return
        probe.count(words.blocked + charged.rank, charged.blocked_ns)
        probe.count(words.excess + charged.rank, charged.excess_ns)
        probe.count(words.full, charged.full_ns)
        probe.count(words.waits)
        probe.observe(words.wait, charged.blocked_ns)
        probe.event(Event.WAIT, self._published[0], now_ns, charged.blocked_ns, charged.rank)
        self._flush(now_ns)

    def _show_wait(self, floor: int, pending: list[Seat], now_ns: int) -> None:
        self._state = Endpoint.WAITING
        if self._probe is not None:
            mask = sum(1 << seat.rank for seat in pending)
            on = pending[0].rank + 1 if pending else 0
            self._probe.waiting(Endpoint.WAITING, now_ns, floor, mask, on)
            self._flush(now_ns)

    def _show_proceeding(self) -> None:
        if self._state is Endpoint.WAITING:
            self._state = move(self._state, "proceed")
            if self._probe is not None:
                self._probe.proceeding(Endpoint.WORKING, _monotonic_ns())

    def _show_arena(self) -> None:
        probe, words = self._probe, self._words
        if probe is None or words is None:
            return
        pool = self._pool
        for name, value in (
            ("segments", len(pool.segments)),
            ("segment_size_bytes", pool.size_bytes),
            ("block_used_bytes", pool.used_bytes),
            ("block_used_max_bytes", pool.used_max_bytes),
            ("block_budget_bytes", self.config.max_arena_bytes),
            ("block_largest_free_bytes", pool.largest_free_bytes),
            ("holds_used", pool.holds_used),
        ):
            probe.gauge(words.gauge[name], value)

    def _flush(self, now_ns: int) -> None:
        probe, words = self._probe, self._words
        if probe is not None and words is not None:
            waiter = self._waiter
            probe.gauge(words.parks, waiter.parks)
            probe.gauge(words.missed, waiter.missed_wakes)
            probe.gauge(words.spin, waiter.spin_ns)
            self._settle_counts(probe, words)
            self._show_arena()
            probe.flush(now_ns)

    def _settle_counts(self, probe: Probe, words: _Words) -> None:
        """Put the counts that the hot path keeps elsewhere where they are read."""
        probe.gauge(words.inline_messages, self._published[0] - self._other_frames + self._tabled)
        probe.gauge(words.inline_bytes, self._inline_total)
        probe.gauge(probe.events_dropped, max(0, self._published[0] - probe.message_events))


def _cut(payload: list[memoryview], room: int) -> Iterator[list[memoryview]]:
    """The payload in groups of pieces of `room` bytes; the last one may be shorter."""
    group: list[memoryview] = []
    free = room
    for piece in payload:
        at = 0
        while at < piece.nbytes:
            part = piece[at : at + free]
            group.append(part)
            at += part.nbytes
            free -= part.nbytes
            if not free:
                yield group
                group, free = [], room
    if group:
        yield group
