"""What the fuzzing found, each as the smallest case of its kind: hostile bytes end in an error of Arena's."""

import json
import os
import pickle
import socket
import struct
from array import array
from dataclasses import replace

import pytest
import torch

from arena import MessageQueue, QueueConfig, layout
from arena.codec import decode, read_table
from arena.device import Declined
from arena.errors import AttachRefused, CorruptFrame, HandleMismatch, QueueClosed, SetUpFailed
from arena.integrations.vllm.handle import MAGIC, VERSION, QueueHandle
from arena.memory import Segment
from arena.peers import wire
from arena.peers.attachment import Attachment
from arena.remote import wire as remote_wire
from arena.remote.forwarder import _said
from arena.remote.link import _resolve
from arena.rounds import Statement, Verdict
from tests.fuzz.common import a_pair
from tests.fuzz.handles import ADDRESS
from tests.fuzz.sockets import _Silent, meeting_seeds, meetings
from tests.fuzz.stores import _Direct, _Store

pytestmark = pytest.mark.usefixtures("run_dir")
DEEP = b"[" * 60_000


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def handle():
    with MessageQueue(1, config=QueueConfig()) as queue:
        yield queue.export_handle()


# ── the attach socket ────────────────────────────────────────────────────────────────────────────
def said(data, fds):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))])
    return ours, theirs


def test_json_too_deep_for_python_is_refused_and_its_descriptors_are_closed(tmp_path):
    with open(tmp_path / "a", "wb") as file:
        before = open_files()
        ours, theirs = said(DEEP, [file.fileno()] * 3)
        with ours, theirs, pytest.raises(HandleMismatch):
            wire.receive(theirs)
        assert open_files() == before


def test_a_refusal_that_brings_descriptors_leaves_none_open(tmp_path):
    with open(tmp_path / "a", "wb") as file:
        before = open_files()
        ours, theirs = said(b'{"refused": "no", "kind": "AttachRefused"}', [file.fileno()] * 3)
        with ours:
            attachment = Attachment.__new__(Attachment)
            attachment._connection, attachment._segments, attachment.process = theirs, {}, _Silent()
            with pytest.raises(AttachRefused):
                attachment._take_answer(0)
            attachment.close()
        assert open_files() == before


@pytest.mark.parametrize(
    "change",
    [{"where": "host:" + "7" * 5000}, {"who": [1 << 64, 1, 1]}, {"who": [-1, 1, 1]}, {"secret": "\ud800"}],
)
def test_a_hello_with_a_field_out_of_range_is_refused_and_its_rank_stays_free(change):
    with MessageQueue(1, config=QueueConfig()) as queue:
        handle = queue.export_handle()
        hello = {"magic": handle.magic, "version": handle.version, "instance": handle.instance, "rank": 0}
        hello |= {"secret": handle.secret, "who": [1, 1, 1], "where": ""} | change
        control = Segment.create("control", handle.geometry.control_bytes)
        ours, theirs = said(json.dumps(hello).encode(), [control.fd])
        with ours, theirs, pytest.raises(HandleMismatch):
            queue._server._answer(theirs)
        control.close()
        with MessageQueue.create_from_handle(handle, 0) as reader:
            queue.enqueue("first")
            assert reader.dequeue() == "first"


# ── handles ──────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("name", ["slots", "slot_bytes", "max_holds"])
@pytest.mark.parametrize("value", [0, True, 1 << 31, 1 << 70, 1.5, None])
def test_a_geometry_that_cannot_be_is_refused(handle, name, value):
    damaged = replace(handle, geometry=replace(handle.geometry, **{name: value}))
    with pytest.raises(HandleMismatch, match=f"geometry.{name}"):
        MessageQueue.create_from_handle(damaged, 0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("endpoint", "ipc:///tmp/x"),
        ("endpoint", "tcp://127.0.0.1:70000"),
        ("endpoint", "tcp://127.0.0.1:" + "9" * 5000),
        ("endpoint", None),
        ("server_key", "a" * 39),
        ("client_key", "#" * 40),  # beyond 32 bits a group
        ("client_secret", "~" * 40),
        ("client_secret", 7),
        ("timeout_s", float("nan")),
        ("timeout_s", "5"),
        ("window_bytes", 1 << 63),
        ("window_bytes", True),
    ],
)
def test_an_address_that_cannot_be_is_refused(handle, name, value):
    damaged = replace(handle, host="elsewhere", remote=replace(ADDRESS, **{name: value}))
    with pytest.raises(HandleMismatch, match=f"remote.{name}"):
        MessageQueue.create_from_handle(damaged, 0)
    with pytest.raises(HandleMismatch, match="remote"):
        MessageQueue.create_from_handle(replace(handle, remote="tcp://host:1"), 0)


def test_an_address_as_a_writer_makes_it_is_good():
    assert ADDRESS.wrong() == []
    assert replace(ADDRESS, endpoint="tcp://[fe80::1%eth0]:5555").wrong() == []
    assert replace(ADDRESS, endpoint="tcp://node-7.cluster_a:5555").wrong() == []
    _resolve(ADDRESS.endpoint)


def test_a_name_longer_than_the_kernel_takes_is_cut_for_it(handle):
    with Segment.create("é" * 300, 4096).mapping.view() as view:
        assert len(view) == 4096
    with MessageQueue.create_from_handle(replace(handle, name="n" * 300), 0) as reader:
        assert reader.statistics().name == "n" * 300


def test_a_directory_that_cannot_be_looked_into_is_a_queue_out_of_reach(handle):
    with pytest.raises((QueueClosed, AttachRefused)):
        MessageQueue.create_from_handle(replace(handle, directory="/" + "d" * 300), 0)


@pytest.mark.parametrize(
    ("name", "value"),
    [*(("local_reader_ranks", value) for value in (None, ["0"], [], [4, 9], [0, 0])), ("arena", 7)],
)
def test_a_damaged_handle_of_the_plugin_is_refused(handle, name, value):
    good = QueueHandle(MAGIC, VERSION, "group", [0], os.getpid(), handle)
    good.check()
    with pytest.raises(HandleMismatch, match=name):
        replace(good, **{name: value}).check()


# ── frames ───────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("at", [1, 8, 15])
def test_a_tensor_at_a_crooked_address_is_copied_to_a_straight_one(at):
    room = torch.arange(100, dtype=torch.uint8)  # its address is a multiple of 64
    text = pickle.dumps([(0, ("complex128", 0, (2,), (1,), False, False))], 5)
    pickled = pickle.dumps(pickle.PickleBuffer(bytearray()), 5, buffer_callback=[].append)
    hold = (1, at, 32, 0, 1)
    payload = struct.pack("QQQQQQQQ", 1, len(text), len(pickled), *hold) + text + pickled
    view = memoryview(room.numpy())[at : at + 32]
    decoded = decode(read_table(memoryview(payload)), {hold: view}, "readonly")
    assert decoded.data_ptr() % 16 == 0
    assert decoded.view(torch.uint8).tolist() == list(range(at, at + 32))


def test_a_pickle_on_a_queue_without_pickles_is_not_read():
    with a_pair(serializer="restricted") as (queue, reader):
        slot = queue._segment.mapping.view(layout.SLOTS_OFFSET, 256)
        pickled = pickle.dumps("read")
        slot[layout.PAYLOAD_OFFSET : layout.PAYLOAD_OFFSET + len(pickled)] = pickled
        slot[:24].cast("Q")[:] = memoryview(array("Q", [layout.KIND_INLINE, 1, len(pickled)]))
        queue._ring.published[0] = 1
        with pytest.raises(CorruptFrame, match="pickle"):
            reader.dequeue(timeout=0)
        assert reader.statistics().consumed_by_reader == {0: 1}


# ── the ranks of a group ─────────────────────────────────────────────────────────────────────────
def test_a_segment_that_gives_itself_out_for_ours_is_a_stranger():
    with meetings() as run:
        outcomes = [run(seed) for seed in meeting_seeds()]
    assert outcomes[0] == "rank 1"
    assert all(outcome.startswith(("Declined", "HandleMismatch")) for outcome in outcomes[1:])


@pytest.mark.parametrize("posted", [b"", b"\x80", pickle.dumps(7), pickle.dumps(Statement("shouted"))])
def test_what_a_rank_says_and_nobody_can_read_ends_the_round_alike_on_all(posted):
    kept = {"arena/0/0/1": posted}
    texts = []
    for rank in (0, 2):
        store = _Store(kept | {f"arena/0/0/{other}": pickle.dumps(Statement("said")) for other in (0, 2)})
        with pytest.raises(Declined) as declined:
            _Direct(store, 0, rank, 3).exchange("meeting", Statement("said"), 0)
        texts.append((declined.value.reason, str(declined.value)))
    assert texts[0] == texts[1]
    assert "what rank 1 said can't be read" in texts[0][1]


@pytest.mark.parametrize("kept", [b"", b"zz", pickle.dumps(Verdict("died", ranks=(7,))).hex().encode()])
def test_a_verdict_that_nobody_can_read_is_an_error_that_says_so(kept):
    store = _Store({"arena/0/0/1": pickle.dumps(Statement("said")), "arena/0/0/verdict": kept})
    with pytest.raises(SetUpFailed, match="verdict"):
        _Direct(store, 0, 0, 2)


# ── other hosts ──────────────────────────────────────────────────────────────────────────────────
def test_messages_from_another_host_that_nobody_sends_are_malformed():
    with pytest.raises(remote_wire.Malformed):
        remote_wire.unpack_json(b"H" + DEEP)
    tail = remote_wire.pack_frame_tail(layout.KIND_INLINE, 0, (0, 0, 0), [], b"N.")
    for first, sequence in ((0, (1 << 64) - 1), ((1 << 64) - 1, 0)):
        with pytest.raises(remote_wire.Malformed):
            remote_wire.unpack_frame(memoryview(remote_wire.pack_frame(0, first, sequence, tail)))


def test_a_line_of_the_forwarder_that_is_none_is_nothing():
    assert _said(b'{"port": 5}\n') == {"port": 5}
    assert [_said(line) for line in (b"", b"hello\n", b"[1]\n", b"\xff\n", DEEP)] == [{}] * 5
