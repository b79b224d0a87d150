"""The writer's end: encode, place, claim, write, publish; and whom it waits for when the ring is full."""

from __future__ import annotations

import contextlib
import os
import secrets
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar
from weakref import WeakMethod

from arena import layout, memory
from arena.blocks import Block, BlockPool, Hold, NoRoom, PoolLimits, PoolSegment
from arena.claim import Claim
from arena.codec import DeviceSource, Encoder, HoldWords, Message, Piece, Source, build_payload, rehearse
from arena.config import (
    QueueConfig,
    RemoteConfig,
    check_config,
    check_readers,
    check_remote,
    check_tensor,
    check_timeout,
)
from arena.device import Copies, copies_in_use
from arena.errors import ArenaError, MessageTooLarge, NoReader, OutOfMemory, PeerDied, QueueTimeout
from arena.filling import Filling
from arena.gate import Gate
from arena.layout import READER_PARKED, Geometry
from arena.memory import UNLOCK_IS_A_FENCE, Segment
from arena.message_queue import MessageQueue, Statistics, Warn, weakly
from arena.observe import Sending, WriterLog
from arena.peers import MAGIC, PROTOCOL, AttachServer, Handle, Roster, Seat, host_id, naming_descriptors
from arena.pin import Pinned, Pins
from arena.probe import Event, Probe, Role, collect_garbage, hooks, identity, run_directory
from arena.probe.directory import KEPT_DEAD, SOCKET, WRITER_PAGE, mark_owner, queue_directory, remove_if_empty
from arena.probe.page import L_SEQUENCE
from arena.ring import SizedWriterRing, WriterRing
from arena.state import Endpoint, Peer, move
from arena.state import Message as MessageState
from arena.wait import Waiter, deadline_after

if TYPE_CHECKING:
    import torch

    from arena.remote.forwarder import Forwarder

_LOOK_NS: Final = 200_000_000  # how often a writer that never waits asks whether its readers live
_FRAGMENT: Final = struct.Struct(layout.FRAGMENT_HEADER)
_HOLD: Final = struct.Struct(layout.HOLD)
_monotonic_ns = time.monotonic_ns
_sched_yield = os.sched_yield
_Taken = TypeVar("_Taken")


class Writer(MessageQueue):
    """What ``MessageQueue(n_reader)`` makes. See there."""

    __slots__ = (
        "_began_ns",
        "_claim",
        "_directory",
        "_encode",
        "_encoder",
        "_filling",
        "_forwarder",
        "_futex",
        "_handed",
        "_handle",
        "_in_flight",
        "_inline_bytes",
        "_instance",
        "_later",
        "_log",
        "_look_due",
        "_message",
        "_n_local_reader",
        "_next_look_ns",
        "_parked",
        "_pins",
        "_pool",
        "_published",
        "_ring",
        "_roster",
        "_segment",
        "_sending",
        "_server",
        "_short_bytes",
        "_waiter",
        "config",
        "n_reader",
    )

    _later: dict[Hold, Source] | None  # what the holds in flight are to be filled with, of those that are not yet
    _filling: Filling | None  # a frame that readers may see, and whose holds are being filled

    def __init__(
        self,
        n_reader: int,
        n_local_reader: int | None = None,
        *,
        config: QueueConfig | None = None,
        remote: RemoteConfig | str | None = None,
        on_warning: Warn | None = None,
    ) -> None:
        remote = check_remote(remote)
        n_reader, self._n_local_reader = check_readers(n_reader, n_local_reader, remote)
        self.config = config = check_config(config).from_environment()
        self._begin(config.name, on_warning)
        self.n_reader = n_reader
        self._instance = secrets.token_hex(6)
        geometry = Geometry(config.slots, config.slot_bytes, config.max_holds)
        with naming_descriptors(f"can't make queue {config.name!r}"), contextlib.ExitStack() as undo:
            self._directory = self._make_directory()
            undo.callback(remove_if_empty, self._directory)
            mark_owner(self._directory)
            undo.callback((self._directory / "owner").unlink, missing_ok=True)
            if config.probes:
                self._probe = self._make_probe(geometry)
                undo.callback(self._probe.unlink)
            self._segment = Segment.create(self.name, geometry.ring_bytes)
            undo.callback(self._segment.close)
            self._make_ring(geometry, SizedWriterRing if remote else WriterRing)
            self._handed: list[tuple[int, int, int]] = [(0, self._segment.nbytes, self._segment.fd)]
            self._server: AttachServer | None = None
            self._pool = BlockPool(config.name, self._pool_limits(), self._probe, weakly(self._hand_over))
            undo.callback(self._pool.close)
            self._handle = self._make_handle(geometry)
            self._server = AttachServer(
                self._directory, SOCKET, self._handle, self._roster, self._handed.copy, WeakMethod(self._note_attach)
            )
            undo.callback(self._server.stop)
            self._encoder = self._make_encoder()
            self._forwarder = None if remote is None else self._start_forwarder(remote)
            undo.pop_all()
        self._pins: Pins | None = None  # until a device is to copy to or from our memory
        self._encode = self._encoder.encode
        if config.prefault:
            rehearse()
        self._waiter = Waiter(n_reader + 1)
        self._inline_bytes = geometry.payload_bytes
        self._short_bytes = min(geometry.payload_bytes, config.max_message_bytes)
        self._message = MessageState.NONE
        self._in_flight: list[Hold] = []
        self._later = self._filling = None
        self._next_look_ns, self._look_due = 0, False
        self._claim = self._make_claim()
        self._sending: Sending | None = None  # of a message of several parts, and since when that is sent
        self._began_ns = 0
        self._log = None
        if self._probe is not None:
            self._log = WriterLog(self._probe, self._waiter, self._roster, self._pool, geometry.slots)
            self._claim.log = self._log
        self._keep_parts(self._segment, self._ring, self._roster, self._pool, self._claim, self._probe, self._server)
        self._state = move(self._state, "attach")
        if self._probe is not None:
            self._probe.proceeding(Endpoint.WORKING, _monotonic_ns())

    # ── setting up ───────────────────────────────────────────────────────────────────────────────
    def _make_directory(self) -> Path:
        root = run_directory(self.config.run_dir)
        collect_garbage(root, name=self.config.name, keep=KEPT_DEAD)
        return queue_directory(root, self.config.name, self._instance)

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

    def _make_ring(self, geometry: Geometry, kind: type[WriterRing]) -> None:
        mapping = self._segment.mapping
        words = mapping.raw_words(0, layout.IDENTITY_WORDS)
        words[layout.IDENTITY_VERSION] = layout.VERSION
        words[layout.IDENTITY_PID] = identity().pid
        words[layout.IDENTITY_SLOTS] = geometry.slots
        words[layout.IDENTITY_SLOT_BYTES] = geometry.slot_bytes
        words[layout.IDENTITY_HOLDS] = geometry.max_holds
        words[layout.IDENTITY_MAGIC] = layout.RING_MAGIC
        mapping.populate(0, geometry.ring_bytes)  # no message of the first lap should pay for its slot's page
        self._ring = kind(mapping, geometry)
        self._published = self._ring.published
        self._futex = mapping.futex(layout.LIVE_OFFSET + layout.PUBLISHED * layout.WORD)
        self._parked = mapping.words(layout.LIVE_OFFSET + layout.WRITER_PARKED * layout.WORD, 1)
        self._roster = Roster(self.n_reader, mapping, geometry)

    def _make_claim(self) -> Claim:
        return Claim(
            self.name,
            self._ring,
            self._roster,
            self._waiter,
            futex=self._futex,
            parked=self._parked,
            check_open=weakly(self._check_open),
            see_to_roster=weakly(self._see_to_roster),
            warn=weakly(self._warn),
            stall_warning_s=self.config.stall_warning_s,
        )

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
            n_local_reader=self._n_local_reader,
            geometry=geometry,
            views=self.config.views,
            max_message_bytes=self.config.max_message_bytes,
            max_arena_bytes=self.config.max_arena_bytes,
            prefault=self.config.prefault,
            probes=self.config.probes,
            pin=self.config.pin,
            serializer=self.config.serializer,
            host=host_id(),
        )

    def _start_forwarder(self, remote: RemoteConfig) -> Forwarder:
        from arena.remote.bell import Bell
        from arena.remote.forwarder import Forwarder

        bell = Bell(self._futex)
        # Not `_warn`: its thread would keep a writer alive that nobody else does.
        warn = self._on_warning or _unheard
        forwarder = Forwarder(self._handle, remote, bell.fd, self._probe, warn)
        self._futex = bell
        self._handle = replace(self._handle, remote=forwarder.address)
        return forwarder

    def _make_encoder(self) -> Encoder:
        if self.config.serializer == "pickle":
            return Encoder()
        from arena.restricted import RestrictedEncoder

        return RestrictedEncoder()

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
    def enqueue(self, obj: object, timeout: float | None = None) -> None:  # noqa: C901, PLR0912, PLR0915 - as in dequeue
        try:
            if not self._acquire(False):
                self._contend(timeout)
            deadline_ns = None
            if self._attention or self._busy or timeout is not None:
                deadline_ns = self._prepare(timeout)
            self._busy = True
            sequence = self._published[0]
            log = self._log
            began_ns = 0 if log is None or sequence & log.sample else _monotonic_ns()
            sending = None
            if (source := hooks.trace_source) is not None:
                if (left := source.left) and source.context() is source.plain:
                    source.left = left - 1
                elif (sampled := source(0)) is not None:
                    sending = self._admit(sampled, 0, source.gap_ns)
            message = self._encode(obj)
            if sending is not None:
                sending.encode_ns = _monotonic_ns() - sending.began_ns
            if type(message) is bytes and (nbytes := len(message)) <= self._short_bytes:
                ring = self._ring
                if sequence >= ring.limit:
                    self._claim.wait(sequence, deadline_ns, first=True)
                    if began_ns:
                        began_ns += self._claim.waited_ns  # what is looked at is the encoding
                    if sending is None and hooks.trace_source is not None and self._claim.waited_ns:
                        sending = self._sample_slow(self._claim.waited_ns)
                now_ns = _monotonic_ns()
                if sending is None:
                    ring.put(sequence, message, nbytes, now_ns)
                else:
                    self._put_traced(sending, sequence, message, now_ns)
                if log is not None:
                    log.page[L_SEQUENCE] = sequence + 1
                    log.inline_bytes += nbytes
                if now_ns >= self._next_look_ns:
                    self._look_due = True
            else:
                self._send(message, deadline_ns, sending)
                began_ns = nbytes = now_ns = 0
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
                if self._waiter.crowded and (began_ns or self._forwarder is not None):
                    _sched_yield()  # on one core with us, they need not wait for what is only looking, or for an answer
                break
        if began_ns:
            self._look_at(sequence, nbytes, began_ns, now_ns)
        if self._look_due:
            self._look_around()

    def _look_at(self, sequence: int, nbytes: int, began_ns: int, now_ns: int) -> None:
        """Observe one small message closely, unless another thread is in a call: nobody waits in order to observe."""
        if not self._acquire(False):
            return
        try:
            if self._log is not None and self._state is Endpoint.WORKING:
                self._log.small(sequence, nbytes, began_ns, now_ns)
        finally:
            self._release()

    def _look_around(self) -> None:
        """Now and then, with the message on its way: do all readers live? The next call sees to it if not."""
        self._look_due = False
        self._next_look_ns = _monotonic_ns() + _LOOK_NS
        if not self._acquire(False):
            return  # another thread is in a call, and will look
        self._busy = True  # a signal handler's call must not meet the roster's lock
        try:
            if self._roster.reap():
                self._attention = True
            if self._log is not None:
                self._log.catch_up(self._published[0], self._next_look_ns - _LOOK_NS)
        finally:
            self._busy = False
            if self._closing:
                self._finish()
            self._release()

    def _prepare(self, timeout: float | None) -> int | None:
        """See to what came up since the last message; returns the deadline."""
        self._enter()
        deadline_ns = deadline_after(check_timeout(timeout))
        if self._attention:
            self._attention = False
            try:
                self._end_filling()
                self._roster.reap()
                self._see_to_roster(True)
                if self._message is MessageState.OWED_ABORT:
                    self._publish_abort(deadline_ns)
            except BaseException:
                self._attention = True  # the rest is still to be seen to
                raise
        return deadline_ns

    # ── traces ───────────────────────────────────────────────────────────────────────────────────
    def _sample_slow(self, slow_ns: int) -> Sending | None:
        """Ask telemetry whether to trace a message that has been slow."""
        source = hooks.trace_source
        sampled = None if source is None else source(slow_ns)
        return None if sampled is None else self._admit(sampled, slow_ns, 0)

    def _admit(self, sampled: hooks.Sampled, slow_ns: int, gap_ns: int) -> Sending | None:
        """Begin to trace a message that has been under way for so long, if there is room for it."""
        log = self._log
        now_ns = _monotonic_ns()
        sending = Sending(sampled, now_ns - slow_ns)
        return sending if log is None or log.admit(sending, now_ns, gap_ns) else None

    def _put_traced(self, sending: Sending, sequence: int, pickled: bytes, now_ns: int) -> None:
        """What `WriterRing.put` does, for a sampled message. Its readers need not wait for what is only recording."""
        ring = self._ring
        ring.write_pieces(sequence, layout.KIND_INLINE, [pickled], now_ns)
        ring.write_trace(sequence, sending.trace)
        ring.publish(sequence)
        self._wake_readers()
        if self._log is not None:
            self._log.sent(sending, "inline", sequence, len(pickled), now_ns)

    # ── messages of several parts ────────────────────────────────────────────────────────────────
    def _send(self, message: bytes | Message, deadline_ns: int | None, sending: Sending | None) -> None:
        """Send what does not fit one slot as it is: with blocks, or in fragments."""
        whole = Message([message]) if isinstance(message, bytes) else message
        nbytes = whole.nbytes
        if nbytes > self.config.max_message_bytes:
            raise MessageTooLarge(
                f"message of {nbytes} bytes",
                expected=f"at most max_message_bytes = {self.config.max_message_bytes}",
                remedy="send it in parts, or raise max_message_bytes",
            )
        self._sending, self._began_ns = sending, _monotonic_ns()
        self._in_flight = []  # an interrupt right behind the last message may have left it its own
        reasons: set[str] = set()
        if whole.fallbacks:
            reasons.add("unsupported_tensor")
        if self._pool.torn:
            self._pool.repair(self._published[0])
        try:
            self._later = {} if self._is_followed(whole) else None
            placed = [self._place(source, reasons) for source in whole.sources]
            payload = build_payload(whole, placed)
            path = self._send_payload(payload, deadline_ns, reasons)
        except Exception:
            self._end_filling()
            self._take_back_unsent()
            raise
        except BaseException:  # ctrl-C, at any point of this
            self._end_filling()
            self._in_flight = []
            self._pool.repair(self._published[0])
            raise
        sending, self._sending = self._sending, None
        if path == "block" and self._forwarder is not None:
            path = self._far_path(reasons)
        self._in_flight = []
        now_ns = _monotonic_ns()
        self._look_due = now_ns >= self._next_look_ns
        if self._log is not None:
            self._log.message(path, self._published[0] - 1, nbytes, now_ns - self._began_ns, reasons, sending)

    def _far_path(self, reasons: set[str]) -> str:
        """How a message with blocks goes where readers are on other hosts: their bytes travel, all of them or some."""
        elsewhere = [seat.where for seat in self._roster.counted if seat.where]
        if elsewhere:
            reasons.add("remote_reader")
        return "remote" if len(elsewhere) == len(self._roster.counted) else "block"

    def _take_back_unsent(self) -> None:
        """The holds of a message that was not published are nobody's."""
        holds, self._in_flight = self._in_flight, []
        for hold in holds:
            if not hold.seats or hold.sequence >= self._published[0]:
                self._pool.unhold(hold)

    def _send_payload(self, payload: list[Piece], deadline_ns: int | None, reasons: set[str]) -> str:
        nbytes = sum(map(len, payload))
        if self._later:
            if nbytes <= self._inline_bytes:
                self._publish(layout.KIND_STREAMED, payload, deadline_ns, first=True)
                self._fill(self._later)
                return "block"
            self._fill(self._later)
        if nbytes <= self._inline_bytes:
            path = "block" if self._in_flight else "inline"
            self._publish(layout.KIND_TABLE, payload, deadline_ns, first=True)
            return path
        hold = self._place_payload(payload, nbytes, reasons)
        if hold is not None:
            self._publish(layout.KIND_BLOCK, [_HOLD.pack(*hold)], deadline_ns, first=True)
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
                return self._keep(self._take_room(self._pool.hold, lent[0], lent[1], source.nbytes))
            if isinstance(source, DeviceSource):
                return self._fetch(source, reasons)
            if self._later is not None:
                return self._keep_for_later(source, self._later)
            return self._keep(self._copy_to_block(source.nbytes, source.write_to))
        except NoRoom as no_room:
            reasons.add(no_room.reason)
            return None

    def _place_payload(self, payload: list[Piece], nbytes: int, reasons: set[str]) -> HoldWords | None:
        """A block for a payload that is too long for a slot."""

        def write(target: memoryview) -> None:
            at = 0
            for piece in payload:
                memory.copy_bytes(target[at : at + len(piece)], piece)
                at += len(piece)

        try:
            return self._keep(self._copy_to_block(nbytes, write))
        except NoRoom as no_room:
            reasons.add(no_room.reason)
            return None

    def _take_room(self, take: Callable[..., _Taken], *args: Any) -> _Taken:
        """Take from the arena; where there is no room, first see whether somebody who holds some has died or left."""
        try:
            return take(*args)
        except NoRoom as no_room:
            if no_room.reason in ("disabled", "too_large") or not self._roster.reap():
                raise
            self._attention = True
            return take(*args)

    def _copy_to_block(self, nbytes: int, write: Any) -> Hold:
        block = self._take_room(self._pool.lend, nbytes)
        try:
            began_ns = _monotonic_ns()
            write(block.view(nbytes))
            if self._log is not None:
                self._log.copied(self._published[0], nbytes, _monotonic_ns() - began_ns)
            return self._take_room(self._pool.hold, block, block.offset, nbytes)
        finally:
            self._pool.drop(block)

    # ── streamed hand-over ───────────────────────────────────────────────────────────────────────
    def _is_followed(self, message: Message) -> bool:
        """Whether to publish this message before its blocks are filled (`arena.filling`): some reader moves it to its
        device meanwhile. A forwarder would only have to wait."""
        if not any([source.is_worth_following for source in message.sources]):
            return False
        if self._forwarder is not None and not all([one.process and not one.where for one in self._roster.counted]):
            return False
        return any([words[layout.READER_MOVES] for words in self._roster.words])

    def _keep_for_later(self, source: Source, later: dict[Hold, Source]) -> HoldWords:
        """A hold on a block that is still to be filled."""
        block = self._take_room(self._pool.lend, source.nbytes)
        try:
            hold = self._take_room(self._pool.hold, block, block.offset, source.nbytes)
        finally:
            self._pool.drop(block)
        later[hold] = source
        return self._keep(hold)

    def _fill(self, later: dict[Hold, Source]) -> None:
        """Fill the holds in flight, in their order, and say how far that is if readers see the frame by now."""
        filling = self._filling
        for hold in self._in_flight:
            source = later.get(hold)
            if source is not None:
                began_ns = _monotonic_ns()
                if filling is None:
                    source.write_to(hold.view())
                else:
                    source.write_in_order(hold.view(), filling.reached)
                if self._log is not None:
                    sequence = self._published[0] if filling is None else filling.sequence
                    self._log.copied(sequence, hold.nbytes, _monotonic_ns() - began_ns)
            if filling is not None:
                filling.done(hold.nbytes)
        self._later = self._filling = None

    def _end_filling(self) -> None:
        """Give up a frame that was published and is not filled, and tell whoever follows it."""
        filling, self._later = self._filling, None
        if filling is not None:
            if self._published[0] > filling.sequence and filling.give_up() and self._probe is not None:
                self._probe.event(Event.ABORT, filling.sequence, _monotonic_ns())
            self._filling = None

    def _fetch(self, source: DeviceSource, reasons: set[str]) -> HoldWords:
        """A tensor from a device, by DMA where the block is pinned: it is there when this returns."""
        hold = self._copy_to_block(source.nbytes, source.write_to)
        words = self._keep(hold)
        if self.config.pin != "off" and self._pin(hold.block, source.copies).reason:  # the next one will be faster
            reasons.add("pin_failed")
        return words

    def _pin(self, block: Block, copies: Copies) -> Pinned:
        """See to it that a block's segment gets pinned; how that stands."""
        if self._pins is None:
            self._pins = Pins(copies, self.config.pin, None)
        self._pins.want(block.segment.number, block.segment.segment.mapping)
        return self._pins.state(block.segment.number)

    def _keep(self, hold: Hold) -> HoldWords:
        self._in_flight.append(hold)
        return hold.words()

    def _publish(self, kind: int, pieces: list[Piece], deadline_ns: int | None, *, first: bool) -> None:
        """Claim a slot, fill it, publish it. Holds in flight become the readers' with this frame."""
        sequence = self._published[0]
        if sequence >= self._ring.limit:
            self._claim.wait(sequence, deadline_ns, first=first)
        now_ns = _monotonic_ns()
        if first and self._sending is None and hooks.trace_source is not None:
            self._sending = self._sample_slow(now_ns - self._began_ns)
        self._ring.write_pieces(sequence, kind, pieces, now_ns)
        if self._sending is not None:
            self._ring.write_trace(sequence, self._sending.trace)
        if kind != layout.KIND_FRAGMENT:
            self._hand_holds_over(sequence)
        if kind == layout.KIND_STREAMED:
            self._filling = Filling(sequence, self._ring.filled(sequence), [hold.nbytes for hold in self._in_flight])
            self._attention = True  # should this and what makes up for it be interrupted, the next call is to see to it
        self._ring.publish(sequence)
        if kind in (layout.KIND_FRAGMENT, layout.KIND_ABORT, layout.KIND_STREAMED) or not self._waiter.crowded:
            # The call goes on, and readers may sleep already. Where cores are few, who is woken takes the writer's: so
            # there they hear of a whole message at the end of the call.
            self._wake_readers()
        if self._log is not None:
            self._log.frame(sequence, now_ns)

    def _hand_holds_over(self, sequence: int) -> None:
        seats = list(self._roster.counted)
        for hold in self._in_flight:
            self._pool.send(hold, sequence, seats)

    def _publish_fragments(self, payload: list[Piece], nbytes: int, deadline_ns: int | None) -> None:
        """Cut a payload over as many slots as it takes. Back-pressure, bounded memory, no deadlock."""
        first_sequence = self._published[0]
        room = self._inline_bytes - layout.FRAGMENT_HEADER_BYTES
        at = 0
        try:
            for pieces in _cut(payload, room):
                length = sum(map(len, pieces))
                head = _FRAGMENT.pack(nbytes, at, first_sequence)
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
        self._publish(layout.KIND_ABORT, [b"\0"], deadline_ns, first=False)
        self._message = move(self._message, "abort")
        if self._probe is not None:
            self._probe.event(Event.ABORT, self._published[0], _monotonic_ns())

    def _wake_readers(self) -> None:
        memory.fence()
        if any(words[layout.READER_PARKED] for words in self._roster.words):
            self._futex.wake()

    # ── who is there ─────────────────────────────────────────────────────────────────────────────
    def _check_open(self) -> None:
        if self._closing:
            raise self._closed()

    def _see_to_roster(self, between_messages: bool) -> None:
        """Admit joiners, record who came and went, and raise for the dead, once each.

        Inside a message of several frames, joiners and the report of deaths wait for its end.
        """
        if not between_messages:
            self._roster.changed = False
            self._attention = True
            return
        self._roster.admit(self._published[0])
        for what, seat in self._roster.take_news():
            if self._log is not None:
                self._log.news(what, seat, self._published[0])
        if self._roster.departed:
            self._roster.let_go(self._pool.owing())
        while self._roster.deaths:
            died = self._died(self._roster.take_death())
            if self.config.on_reader_death == "raise":
                self._attention = True
                raise died
            if self._log is not None:
                self._log.error(died, self._published[0])
        if not self._roster.counted:
            raise self._nobody_left()

    def _died(self, seat: Seat) -> PeerDied:
        lag = max(0, self._published[0] - seat.consumed)
        return PeerDied(
            f"{seat.describe()} of queue {self.name!r} died ({seat.ending()})",
            rank=seat.rank,
            pid=seat.pid,
            signal=seat.signal(),
            expected="every reader to live until it leaves with shutdown()",
            found=f"its process gone, {lag} published frames never taken",
            remedy="this message was not sent; the next enqueue goes on without it, a new process may take its rank",
        )

    def _nobody_left(self) -> NoReader:
        states = ", ".join(f"{seat.describe()} {seat.state.name}" for seat in self._roster.seats)
        self._attention = True
        return NoReader(
            f"queue {self.name!r} has no reader left", found=states, remedy="attach a reader, or shut the queue down"
        )

    # ── lending ──────────────────────────────────────────────────────────────────────────────────
    @contextlib.contextmanager
    def lend(self, shape: Any, dtype: torch.dtype, *, or_private: bool = False) -> Iterator[torch.Tensor]:
        yield self._lent_tensor(check_tensor(shape, dtype), or_private=or_private)

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
                block = self._take_room(self._pool.lend, nbytes)
                exported = self._pool.export(block)
                self._prepare_for_device(block)
            except NoRoom as no_room:
                if self._log is not None:
                    self._log.fallback({no_room.reason}, self._published[0], nbytes)
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

    def _prepare_for_device(self, block: Block) -> None:
        """Where this process uses a device, a lent tensor is pinned: a copy may still fill it when it has died."""
        copies = copies_in_use()
        if copies is None or self.config.pin == "off":
            return
        self._pin(block, copies)
        gate = Gate(None, None)
        gate.remember(copies, copies.current_stream())
        self._pool.guard(block, gate)

    # ── the rest of the face ─────────────────────────────────────────────────────────────────────
    def broadcast_object(self, obj: object = None) -> Any:
        self.enqueue(obj)
        return obj

    def export_handle(self) -> Handle:
        if self._closing:
            raise self._closed()
        return self._handle

    def wait_until_ready(self, timeout: float | None = None) -> None:
        deadline_ns = deadline_after(check_timeout(timeout))
        self._refuse_forked()
        while not self._roster.everyone_came.wait(0.05):
            if self._closing:
                raise self._closed()
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
        self._take_stock()
        counted = {} if self._log is None else self._log.counts(self.n_reader)
        return Statistics(
            name=self.name,
            role="writer",
            state=self._state_name(),
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
            pins={} if self._pins is None else self._pins.described(),
            **counted,
        )

    def _state_name(self) -> str:
        return (Endpoint.WAITING if self._claim.waiting else self._state).name.lower()

    def _take_stock(self) -> None:
        """Take back blocks that came free since the last message, if no call is under way."""
        if self._state is Endpoint.WORKING and self._acquire(False):
            try:
                if not self._busy and not self._pool.torn:
                    self._pool.collect()
            finally:
                self._release()

    def __repr__(self) -> str:
        if self._state is Endpoint.FORKED:
            return f"<MessageQueue {self.name!r} writer, forked: only the process that made it can use it>"
        published = self._published[0]
        consumed = [seat.consumed for seat in self._roster.counted]
        low, high = (min(consumed), max(consumed)) if consumed else (published, published)
        attached = sum(seat.state is Peer.ATTACHED for seat in self._roster.seats)
        return (
            f"<MessageQueue {self.name!r} writer, {self._state_name()}: consumed {low}..{high} <= "
            f"published {published} <= {low} + {self._ring.slots} slots, {attached} of {self.n_reader} attached, "
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
        self._end_filling()
        if self._server is not None:
            self._server.stop()
            self._server = None
        if self._forwarder is not None:
            self._forwarder.stop()
        self._roster.close()
        self._pool.close()
        self._segment.close()
        self._claim.close()
        if self._log is not None:
            self._log.close(self._published[0])
        (self._directory / "owner").unlink(missing_ok=True)
        remove_if_empty(self._directory)

    def _count_error(self, error: ArenaError) -> None:
        if self._log is not None:
            self._log.error(error, self._published[0])


def _unheard(warning: str) -> None:
    pass


def _cut(payload: list[Piece], room: int) -> Iterator[list[Piece]]:
    """The payload in groups of pieces of `room` bytes; the last one may be shorter."""
    group: list[Piece] = []
    free = room
    for piece in payload:
        whole, at = memoryview(piece), 0
        while at < len(whole):
            part = whole[at : at + free]
            group.append(part)
            at += len(part)
            free -= len(part)
            if not free:
                yield group
                group, free = [], room
    if group:
        yield group
