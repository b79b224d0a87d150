"""What an endpoint leaves for others to look at: readable while it lives, hangs or is dead, refused when it lies."""

import contextlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from arena import MessageQueue, QueueConfig, layout
from arena.errors import QueueTimeout, RunDirectoryError
from arena.probe import (
    METRICS,
    BadPage,
    BlockRecord,
    EndpointState,
    Event,
    Identity,
    Kind,
    Probe,
    ProbeReader,
    Role,
    Wait,
    collect_garbage,
    identity,
    is_alive,
    is_degraded,
    page,
    pages,
    published_at,
    queue_directories,
    run_directory,
)
from arena.probe.directory import mark_owner, queue_directory, reader_page, safe_name
from arena.probe.metrics import BUCKETS, lay_out
from tests.support import processes

ROOT = Path(__file__).parent.parent
MASK = (1 << 64) - 1


@pytest.fixture
def place(run_dir) -> Path:
    """The directory of a queue."""
    return queue_directory(run_dir, "test", "abc")


def make_probe(path: Path, role: Role = Role.WRITER, **options: Any) -> Probe:
    values: dict[str, Any] = {"rank": 0, "n_reader": 3, "slots": 8, "about": {"queue": "test"}, **options}
    return Probe(path, role, **values)


@pytest.fixture
def probe(place) -> Probe:
    return make_probe(place / "writer")


@contextlib.contextmanager
def seen(probe: Probe) -> Iterator[ProbeReader]:
    with ProbeReader(probe.path) as reader:
        yield reader


def value_of(reader: ProbeReader, name: str, /, **labels: str) -> Any:
    (sample,) = (one for one in reader.samples() if one.name == name and one.labels == labels)
    return sample.buckets if sample.kind is Kind.HISTOGRAM else sample.value


# --- who wrote it ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", Role)
def test_a_page_says_whose_it_is(place, role):
    probe = make_probe(place / "one", role, rank=2, about={"queue": "test", "instance": "abc"})
    with seen(probe) as reader:
        assert (reader.role, reader.rank, reader.owner) == (role, 2, identity())
        assert (reader.about["queue"], reader.about["instance"]) == ("test", "abc")


def test_a_page_is_there_whole_or_not_at_all(place, monkeypatch):
    # Whoever looks while it is being written finds no magic word yet.
    magic_at_each_step = []
    path = place / "writer"
    real_time_ns = time.time_ns

    def look(*_: object) -> int:
        magic_at_each_step.append(path.read_bytes()[:8])
        return real_time_ns()

    monkeypatch.setattr(page.time, "time_ns", look)
    make_probe(path)
    assert magic_at_each_step == [bytes(8)]
    assert path.read_bytes()[:8] == page.PAGE_MAGIC.to_bytes(8, "little")


def test_only_its_owner_and_group_can_read_a_page(probe):
    mode = stat.S_IMODE(probe.path.stat().st_mode)
    assert not mode & 0o007
    assert not mode & 0o020


def test_a_page_is_never_put_where_something_else_is(probe):
    with pytest.raises(FileExistsError):
        make_probe(probe.path)


# --- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", Role)
def test_every_metric_of_a_role_is_on_its_page_from_the_start_at_zero(place, role):
    probe = make_probe(place / "one", role)
    expected = {
        (metric.name, metric.kind, metric.unit, tuple(labels.items()))
        for metric in METRICS
        if metric.role is role
        for labels in metric.series(3)
    }
    with seen(probe) as reader:
        samples = reader.samples()
    assert {(one.name, one.kind, one.unit, tuple(one.labels.items())) for one in samples} == expected
    assert len(samples) == len(expected)
    assert all(one.value == one.total == sum(one.buckets) == 0 for one in samples)


def test_no_two_series_share_a_word():
    for role in Role:
        series, count = lay_out(role, 5)
        taken = [
            word
            for one in series
            for word in range(one.word, one.word + (BUCKETS + 1 if one.metric.kind is Kind.HISTOGRAM else 1))
        ]
        assert sorted(taken) == list(range(count))


def test_labels_with_a_closed_set_have_every_value_and_ranks_every_reader():
    blocked = next(metric for metric in METRICS if metric.name == "writer_blocked_seconds_total")
    assert blocked.series(3) == [{"reader": "0"}, {"reader": "1"}, {"reader": "2"}]
    errors = next(metric for metric in METRICS if metric.name == "errors_total")
    assert {"kind": "timeout"} in errors.series(3)


def test_counters_and_gauges_arrive_with_a_flush_and_not_before(probe):
    probe.count(probe.word("messages_published_total", "block"))
    probe.count(probe.word("messages_published_total", "block"), 41)
    probe.gauge(probe.word("segments"), 7)
    probe.gauge(probe.word("segments"), 3)
    with seen(probe) as reader:
        assert value_of(reader, "messages_published_total", path="block") == 0
        probe.flush(5000)
        assert value_of(reader, "messages_published_total", path="block") == 42
        assert value_of(reader, "messages_published_total", path="inline") == 0
        assert value_of(reader, "segments") == 3
        assert reader.live(page.L_VALUES_NS) == 5000
    assert probe.next_flush_ns == 5000 + page.FLUSH_NS


@pytest.mark.parametrize("value", [0, 1, 2, 3, 4, 1023, 1024, (1 << 63) - 1, 1 << 63])
def test_a_histogram_counts_a_value_in_its_power_of_two(probe, value):
    probe.observe(probe.word("writer_wait_seconds"), value)
    probe.observe(probe.word("writer_wait_seconds"), 1)
    probe.flush(1)
    with seen(probe) as reader:
        (sample,) = (one for one in reader.samples() if one.name == "writer_wait_seconds")
    expected = [0] * BUCKETS
    expected[value.bit_length()] += 1
    expected[1] += 1
    assert sample.buckets == tuple(expected)
    assert sample.total == value + 1
    assert sample.scale == 1e-9


def test_a_series_that_does_not_exist_has_no_word(probe):
    for name in (("no_such_metric",), ("messages_published_total", "by_pigeon"), ("messages_published_total",)):
        with pytest.raises(KeyError):
            probe.word(*name)


# --- events ----------------------------------------------------------------------------------------------------------


def test_events_arrive_in_order_with_all_they_say(probe):
    probe.event(Event.GROW, 5, 100, 1, 64)
    probe.message_event(Event.PUBLISH, 6, 200, 3, 4, trace=(MASK, 2, 1))
    probe.event(Event.CLOSE, 7, 300)
    with seen(probe) as reader:
        records = [
            (one.number, one.kind, one.sequence, one.time_ns, one.a, one.b, one.trace) for one in reader.events()
        ]
    assert records == [
        (0, Event.GROW, 5, 100, 1, 64, (0, 0, 0)),
        (1, Event.PUBLISH, 6, 200, 3, 4, (MASK, 2, 1)),
        (2, Event.CLOSE, 7, 300, 0, 0, (0, 0, 0)),
    ]


@pytest.mark.parametrize("count", [page.EVENT_ENTRIES - 1, page.EVENT_ENTRIES, page.EVENT_ENTRIES + 1, 1000])
def test_the_newest_events_are_kept_and_the_one_being_overwritten_is_left_out(probe, count):
    for number in range(count):
        probe.event(Event.ERROR, number, number)
    with seen(probe) as reader:
        numbers = [one.number for one in reader.events()]
        assert [one.sequence for one in reader.events()] == numbers
    assert numbers == list(range(max(0, count - page.EVENT_ENTRIES + 1), count))


def test_events_that_are_overwritten_while_they_are_read_are_left_out(probe, monkeypatch):
    for number in range(100):
        probe.event(Event.ERROR, number, number)
    with seen(probe) as reader:
        real_fence = page.memory.fence
        fences = []

        def overwrite_between_the_looks() -> None:
            real_fence()
            fences.append(1)
            if len(fences) == 2:  # after the copy, before the second look at the head
                for number in range(100, 300):
                    probe.event(Event.ERROR, number, number)

        monkeypatch.setattr(page.memory, "fence", overwrite_between_the_looks)
        assert [one.number for one in reader.events()] == list(range(45, 100))


@pytest.mark.parametrize("value", [-1, 1 << 70])
def test_an_event_takes_any_number(probe, value):
    probe.event(Event.ERROR, 1, 2, value, value)
    with seen(probe) as reader:
        assert [(one.a, one.b) for one in reader.events()] == [(value & MASK, value & MASK)]


def test_the_count_of_dropped_events_never_falls(run_dir):
    with MessageQueue(1) as queue, MessageQueue.create_from_handle(queue.export_handle(), 0) as reader:
        probe = queue._probe
        seen = []
        for _ in range(5):
            probe.next_flush_ns = 0  # as when 100 ms have passed: the frame itself copies everything out
            queue.enqueue(torch.zeros(100_000))
            seen.append(probe.values[probe.events_dropped])
            queue.statistics()  # and so does this, once the message's event has been noted
            seen.append(probe.values[probe.events_dropped])
            reader.dequeue()
        assert seen == sorted(seen)


def test_every_kind_of_event_has_a_name():
    kinds = {value for name, value in vars(Event).items() if isinstance(value, int) and not name.startswith("_")}
    assert set(Event.NAMES) == kinds
    assert len(set(Event.NAMES.values())) == len(kinds)


# --- waits, slots, blocks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [(), (0,), (2, 63), (64, 65, 127, 128), (255,), tuple(range(256))])
def test_a_wait_names_every_reader_that_holds_the_slot(probe, ranks):
    probe.waiting(EndpointState.WAITING, 1000, 77, sum(1 << rank for rank in ranks), 3)
    with seen(probe) as reader:
        assert reader.pending() == ranks
        assert reader.live(page.L_STATE) == EndpointState.WAITING
        assert reader.live(page.L_WAIT_SINCE_NS) == reader.live(page.L_PROGRESS_NS) == 1000
        assert reader.live(page.L_WAIT_SEQUENCE) == 77
        assert reader.live(page.L_WAIT_ON) == 3


def test_a_wait_that_goes_on_keeps_its_beginning(probe):
    probe.waiting(EndpointState.WAITING, 1000, 77, 0b111, 1)
    probe.waiting(EndpointState.WAITING, 2000, 77, 0b100, 3)
    with seen(probe) as reader:
        assert reader.live(page.L_WAIT_SINCE_NS) == 1000
        assert reader.live(page.L_PROGRESS_NS) == 2000
        assert reader.pending() == (2,)


def test_a_wait_says_since_when_one_reader_alone_holds_the_slot(probe):
    with seen(probe) as reader:
        probe.waiting(EndpointState.WAITING, 1000, 77, 0b110, 2)
        assert reader.values_and_wait()[1] == Wait(1000, 1000, 77, (1, 2), None)
        probe.waiting(EndpointState.WAITING, 2000, 77, 0b100, 3, 1500)
        assert reader.values_and_wait()[1] == Wait(1000, 2000, 77, (2,), (2, 1500))
        probe.proceeding(EndpointState.WORKING, 3000)
        assert reader.values_and_wait()[1] == Wait(0, 3000, 0, (), None)


def test_a_wait_that_ends_while_the_values_are_read_is_not_in_progress(probe, monkeypatch):
    probe.waiting(EndpointState.WAITING, 1000, 77, 0b100, 3, 1500)
    with seen(probe) as reader:
        monkeypatch.setattr(page.memory, "fence", lambda: probe.proceeding(EndpointState.WORKING, 3000))
        assert reader.values_and_wait()[1].since_ns == 0


def test_a_page_that_is_written_over_while_it_is_open_says_so(probe):
    with seen(probe) as reader:
        reader.check_unchanged()
        probe.flush(5)
        reader.check_unchanged()
        probe.words[page.H_PID] += 1
        with pytest.raises(BadPage, match="written over") as caught:
            reader.check_unchanged()
    assert caught.value.reason == "changed"


def test_a_wait_that_is_over_leaves_nothing_pending(probe):
    probe.waiting(EndpointState.WAITING, 1000, 77, 1 << 200, 3)
    probe.proceeding(EndpointState.WORKING, 3000)
    with seen(probe) as reader:
        assert reader.pending() == ()
        assert (reader.live(page.L_WAIT_SINCE_NS), reader.live(page.L_WAIT_ON)) == (0, 0)
        assert (reader.live(page.L_STATE), reader.live(page.L_PROGRESS_NS)) == (EndpointState.WORKING, 3000)


def test_a_heartbeat_moves_progress_and_nothing_else(probe):
    probe.waiting(EndpointState.WORKING, 1000, 0, 0, 0)
    probe.progress(5000)
    with seen(probe) as reader:
        assert (reader.live(page.L_PROGRESS_NS), reader.live(page.L_WAIT_SINCE_NS)) == (5000, 1000)


def test_the_newest_frames_say_when_they_were_published(probe):
    with seen(probe) as reader:
        assert published_at(reader.marks(), 5) == 0
        for sequence in range(20):
            probe.mark(sequence, 1000 + sequence)
        assert [published_at(reader.marks(), sequence) for sequence in range(12, 20)] == list(range(1012, 1020))
        assert published_at(reader.marks(), 3) == 1012, "older than all marks, that much is known"


def test_a_frame_without_a_mark_is_as_old_as_the_marked_one_before_it(probe):
    for sequence in (0, 16, 32):
        probe.mark(sequence, 1000 + sequence)
    with seen(probe) as reader:
        assert [published_at(reader.marks(), sequence) for sequence in (0, 15, 16, 20, 32, 99)] == [
            1000,
            1000,
            1016,
            1016,
            1032,
            1032,
        ]


def test_a_mark_that_is_rewritten_while_it_is_read_is_left_out(probe, monkeypatch):
    for sequence in range(8):
        probe.mark(sequence, 1000 + sequence)
    with seen(probe) as reader:
        monkeypatch.setattr(page.memory, "fence", lambda: probe.mark(8, 1008))  # in the place of sequence 0
        assert published_at(reader.marks(), 0) == 1001
    with seen(probe) as reader:
        probe.words[probe.words[page.H_MARKS]] = 0  # in the middle of being written
        assert published_at(reader.marks(), 9) == 1007


def test_a_readers_page_has_no_marks_and_no_blocks(place):
    probe = make_probe(place / "one", Role.READER, slots=0)
    with seen(probe) as reader:
        assert published_at(reader.marks(), 5) == 0
        assert reader.blocks() == []
    assert probe.path.stat().st_size < make_probe(place / "writer").path.stat().st_size


def test_blocks_are_listed_with_their_holders_and_the_free_ones_are_not(probe):
    probe.block(0, 1, 4096, 8192, 0b101)
    probe.block(3, 2, 0, 4096, 1 << 63 | 0b10)
    probe.block(5, 1, 0, 4096, 1)
    probe.block(5, 0, 0, 0, 0)
    with seen(probe) as reader:
        assert reader.blocks() == [
            BlockRecord(segment=0, offset=4096, nbytes=8192, holders=(0, 2), lent=False),
            BlockRecord(segment=1, offset=0, nbytes=4096, holders=(1,), lent=True),
        ]


def test_blocks_beyond_the_table_are_not_shown_and_harm_nothing(probe):
    probe.event(Event.GROW, 1, 2, 3, 4)
    probe.block(page.BLOCK_ENTRIES - 1, 1, 0, 4096, 1)
    probe.block(page.BLOCK_ENTRIES, 9, 9, 9, 9)
    with seen(probe) as reader:
        assert len(reader.blocks()) == 1
        assert [one.kind for one in reader.events()] == [Event.GROW]


def test_a_block_table_in_the_middle_of_a_change_is_not_believed(probe):
    probe.block(0, 1, 0, 4096, 1)
    probe.words[page.L_BLOCK_SEAL] += 1
    with seen(probe) as reader:
        assert reader.blocks() == []


def test_while_the_block_table_changes_the_last_known_one_stands(probe):
    probe.block(0, 1, 0, 4096, 1)
    with seen(probe) as reader:
        before = reader.blocks()
        probe.block(1, 1, 4096, 4096, 1)
        probe.words[page.L_BLOCK_SEAL] += 1
        assert reader.blocks() == before
        probe.words[page.L_BLOCK_SEAL] += 1
        assert len(reader.blocks()) == 2


def test_a_change_that_an_interrupt_cut_short_does_not_hide_the_table_for_ever(probe):
    probe.block(0, 1, 0, 4096, 1)
    probe.words[page.L_BLOCK_SEAL] += 1  # as far as the interrupted change came
    probe.block(1, 1, 4096, 4096, 1)
    with seen(probe) as reader:
        assert len(reader.blocks()) == 2


def test_the_last_words_of_an_endpoint_are_all_of_its_values(probe):
    probe.waiting(EndpointState.WAITING, 1, 2, 3, 1)
    probe.count(probe.word("parks_total"), 5)
    probe.closed(EndpointState.CLOSED, 9000)
    with seen(probe) as reader:
        assert value_of(reader, "parks_total") == 5
        assert reader.live(page.L_STATE) == EndpointState.CLOSED
        assert reader.pending() == ()


def test_an_unlinked_page_can_be_unlinked_again(probe):
    probe.unlink()
    probe.unlink()
    assert not probe.path.exists()


# --- pages that lie --------------------------------------------------------------------------------------------------


def rewritten(probe: Probe, change: Any) -> Path:
    """A copy of a page, with a change to its bytes."""
    data = bytearray(probe.path.read_bytes())
    changed = change(data)
    path = probe.path.with_name("changed")
    path.write_bytes(data if changed is None else changed)
    return path


def set_word(index: int, value: int) -> Any:
    def change(data: bytearray) -> None:
        data[index * 8 : index * 8 + 8] = value.to_bytes(8, "little")

    return change


def set_metadata(text: bytes) -> Any:
    """Put another text where the metadata are."""

    def change(data: bytearray) -> bytearray:
        start = int.from_bytes(data[page.H_METADATA * 8 :][:8], "little")
        set_word(page.H_METADATA_BYTES, len(text))(data)
        return data[:start] + text + bytes(-len(text) % 8)

    return change


def a_series(**changes: Any) -> bytes:
    series = {"name": "n", "kind": "counter", "unit": "u", "scale": 1.0, "labels": {}, "word": 0, **changes}
    return json.dumps({"series": [{key: value for key, value in series.items() if value is not None}]}).encode()


def test_the_way_pages_are_changed_here_leaves_a_good_page_good(probe):
    with ProbeReader(rewritten(probe, set_metadata(a_series()))) as reader:
        assert [one.name for one in reader.samples()] == ["n"]


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 100, 511, 512, 519, 520, 4096, 30_000])
def test_a_page_that_was_cut_short_is_bad(probe, nbytes):
    assert nbytes < probe.path.stat().st_size
    with pytest.raises(BadPage):
        ProbeReader(rewritten(probe, lambda data: data[:nbytes]))


def test_a_page_that_lacks_only_its_last_word_is_bad(probe):
    start, length = probe.words[page.H_METADATA], probe.words[page.H_METADATA_BYTES]
    with pytest.raises(BadPage):
        ProbeReader(rewritten(probe, lambda data: data[: (start + length) // 8 * 8 - 8]))


@pytest.mark.parametrize(
    ("word", "value", "says"),
    [
        (page.H_MAGIC, 0, "not a probe page"),
        (page.H_MAGIC, layout.RING_MAGIC, "not a probe page"),
        (page.H_VERSION, page.PAGE_VERSION + 1, "another layout.*version 2"),
        (page.H_VERSION, 0, "another layout"),
        (page.H_ROLE, 0, "damaged"),
        (page.H_ROLE, 4, "damaged"),
        (page.H_VALUES, MASK, "damaged"),
        (page.H_VALUES_COUNT, MASK, "damaged"),
        (page.H_MARKS_COUNT, 1 << 40, "damaged"),
        (page.H_BLOCKS, 1 << 40, "damaged"),
        (page.H_BLOCKS_COUNT, 1 << 60, "damaged"),
        (page.H_EVENTS, 1 << 40, "damaged"),
        (page.H_EVENTS_COUNT, 1 << 60, "damaged"),
        (page.H_METADATA, MASK, "damaged"),
        (page.H_METADATA_BYTES, MASK, "damaged"),
        (page.H_METADATA_BYTES, 10, "metadata"),
        (page.H_VALUES_COUNT, 3, "metadata"),
    ],
)
def test_a_page_of_another_kind_or_version_is_bad_and_says_why(probe, word, value, says):
    with pytest.raises(BadPage, match=says):
        ProbeReader(rewritten(probe, set_word(word, value)))


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"{}",
        b'{"series": 3}',
        b'{"series": {"a": 1}}',
        b'{"series": [3]}',
        b"[" * 100_000,
        a_series(name=None),
        a_series(name=3),
        a_series(kind="thermometer"),
        a_series(kind=["counter"]),
        a_series(word=-1),
        a_series(word=1.5),
        a_series(word="0"),
        a_series(word=1 << 70),
        a_series(kind="histogram", word=10_000),
        a_series(labels=[]),
        a_series(labels={"reader": [1]}),
        a_series(scale=-1.0),
        a_series(scale=float("nan")),
        a_series(scale=float("inf")),
        a_series(scale="1"),
        a_series(scale=10**400),
        a_series(unit=None),
    ],
    ids=lambda text: text[-60:].decode(errors="replace"),
)
def test_metadata_that_make_no_sense_are_bad(probe, text):
    with pytest.raises(BadPage, match="metadata"):
        ProbeReader(rewritten(probe, set_metadata(text)))


def test_what_is_no_file_is_bad_and_holds_nobody_up(place):
    os.mkfifo(place / "pipe")
    (place / "directory").mkdir()
    (place / "link").symlink_to(make_probe(place / "writer").path)
    for name in ("pipe", "directory", "link", "absent"):
        with pytest.raises(BadPage):
            ProbeReader(place / name)


def test_a_page_that_may_not_be_read_is_bad(place, monkeypatch):
    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")  # root may read anything

    with monkeypatch.context() as patched, pytest.raises(BadPage, match="Permission denied"):
        patched.setattr(os, "open", refuse)
        ProbeReader(place / "writer")


def test_a_bad_page_leaves_no_file_and_no_mapping_open(probe):
    path = rewritten(probe, set_metadata(b"{"))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with pytest.raises(BadPage):
            ProbeReader(path)
    assert len(os.listdir("/proc/self/fd")) == before
    assert "changed" not in Path("/proc/self/maps").read_text()


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150, deadline=None)
def test_whatever_is_in_a_page_reading_it_ends_in_values_or_in_bad_page(probe, data):
    """Random words anywhere in header and live words, and random bytes in the metadata."""
    page_bytes = bytearray(probe.path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        if data.draw(st.booleans()):
            index = data.draw(st.integers(1, 63))
            set_word(index, data.draw(st.integers(0, MASK) | st.integers(0, 5000)))(page_bytes)
        else:
            at = data.draw(st.integers(probe.words[page.H_METADATA], len(page_bytes) - 1))
            page_bytes[at] = data.draw(st.integers(0, 255))
    path = probe.path.with_name("changed")
    path.write_bytes(page_bytes)
    try:
        reader = ProbeReader(path)
    except BadPage:
        return
    with reader:
        assert isinstance(reader.samples(), list)
        assert isinstance(reader.events(), list)
        assert isinstance(reader.blocks(), list)
        assert isinstance(reader.pending(), tuple)
        assert isinstance(published_at(reader.marks(), data.draw(st.integers(0, MASK))), int)


# --- the run directory -----------------------------------------------------------------------------------------------


@pytest.fixture
def no_settings(monkeypatch):
    for name in ("ARENA_RUN_DIR", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_a_run_directory_named_in_the_environment_comes_first(no_settings, tmp_path):
    no_settings.setenv("ARENA_RUN_DIR", str(tmp_path / "mine"))
    no_settings.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert run_directory() == tmp_path / "mine"
    assert run_directory(str(tmp_path / "configured")) == tmp_path / "configured"


def test_the_users_runtime_directory_comes_next(no_settings, tmp_path):
    no_settings.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert run_directory() == tmp_path / "arena"


@pytest.mark.parametrize("runtime", ["", "/proc/no/such/place"])
def test_without_any_it_is_a_directory_of_the_users_on_tmpfs(no_settings, runtime, monkeypatch, tmp_path):
    no_settings.setenv("XDG_RUNTIME_DIR", runtime)
    made = []
    monkeypatch.setattr("arena.probe.directory._own_directory", lambda path: made.append(path) or path)
    assert run_directory() == Path(f"/dev/shm/arena-{os.getuid()}")
    assert made == [Path(f"/dev/shm/arena-{os.getuid()}")]


def test_without_tmpfs_it_is_in_tmp(no_settings, monkeypatch):
    monkeypatch.setattr("arena.probe.directory._own_directory", lambda path: path)
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != "/dev/shm")
    assert run_directory() == Path(f"/tmp/arena-{os.getuid()}")


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_a_run_directory_is_made_for_its_owner_alone(tmp_path, umask):
    before = os.umask(umask)
    try:
        made = run_directory(str(tmp_path / "new"))
    finally:
        os.umask(before)
    assert stat.S_IMODE(made.stat().st_mode) == 0o700


def test_an_existing_directory_is_used_as_it_is(tmp_path):
    (tmp_path / "there").mkdir(mode=0o750)
    (tmp_path / "there" / "file").touch()
    assert run_directory(str(tmp_path / "there")) == tmp_path / "there"
    assert stat.S_IMODE((tmp_path / "there").stat().st_mode) == 0o750


def refusal(path: Path) -> RunDirectoryError:
    with pytest.raises(RunDirectoryError) as caught:
        run_directory(str(path))
    assert "ARENA_RUN_DIR" in caught.value.remedy
    return caught.value


def test_a_link_is_no_run_directory(tmp_path):
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert refusal(tmp_path / "link").found == "a symbolic link"
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    refusal(tmp_path / "dangling")
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o702])
def test_a_directory_that_anybody_may_write_to_is_refused(tmp_path, mode):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(mode)
    assert refusal(tmp_path / "open").found == "a directory that anybody may write to"


def test_somebody_elses_directory_is_refused(tmp_path, monkeypatch):
    (tmp_path / "theirs").mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: (tmp_path / "theirs").stat().st_uid + 1)
    assert refusal(tmp_path / "theirs").found == f"a directory of uid {(tmp_path / 'theirs').stat().st_uid}"


def test_a_file_is_no_run_directory(tmp_path):
    (tmp_path / "file").touch()
    assert "exists" in refusal(tmp_path / "file").found


def test_a_directory_that_can_not_be_made_says_why(tmp_path):
    assert "No such file" in refusal(tmp_path / "no" / "such" / "parent").found


def test_a_directory_on_a_disk_is_degraded_and_one_on_tmpfs_is_not(monkeypatch, tmp_path):
    mounts = tmp_path / "mounts"
    mounts.write_text("/dev/sda / ext4 rw 0 0\ntmpfs /run tmpfs rw 0 0\n/dev/sdb /run/disk xfs rw 0 0\n")
    monkeypatch.setattr("arena.probe.directory.open", lambda path: mounts.open(), raising=False)
    expected = {"/var/x": True, "/run": False, "/run/user": False, "/run/disk/x": True, "/running": True}
    assert {path: is_degraded(Path(path)) for path in expected} == expected


@pytest.mark.parametrize("name", ["q", "a/b", "../../etc", "", "@", "x" * 300, "a b\n", "日本", "."])
def test_any_name_is_one_directory_below_the_run_directory(run_dir, name):
    made = queue_directory(run_dir, name, "0123456789ab")
    assert made.parent == run_dir
    assert made.name.endswith("@0123456789ab")
    assert queue_directories(run_dir) == [made]
    assert "/" not in safe_name(name)


def test_the_same_instance_is_never_made_twice(run_dir):
    queue_directory(run_dir, "q", "1")
    with pytest.raises(RunDirectoryError, match="exists"):
        queue_directory(run_dir, "q", "1")


def test_the_pages_of_a_queue_are_listed_writer_first_and_nothing_else(place):
    for name in ("reader-1-20-a", "attach", "owner", "writer", "reader-0-10-b", "notes.txt"):
        (place / name).touch()
    assert [path.name for path in pages(place)] == ["writer", "reader-0-10-b", "reader-1-20-a"]
    assert pages(place / "absent") == []
    assert reader_page(place, 3, 44, "abc").name == "reader-3-44-abc"


def test_the_pages_of_a_communicator_are_listed_and_nothing_else(place):
    for name in ("rank-1", "owner", "meet-0-ab12", "rank-0", "ranks"):
        (place / name).touch()
    assert [path.name for path in pages(place)] == ["rank-0", "rank-1"]


def test_queues_are_listed_oldest_first_and_nothing_else(run_dir):
    made = [queue_directory(run_dir, "q", str(number)) for number in range(3)]
    for age, path in enumerate(reversed(made)):
        os.utime(path, ns=(0, 1_000_000_000 - age))
    (run_dir / "file@1").touch()
    (run_dir / "plain").mkdir()
    (run_dir / "link@1").symlink_to(made[0])
    assert queue_directories(run_dir) == made


# --- no room ---------------------------------------------------------------------------------------------------------

FILL_THEN_MAKE = """
import os, sys
from arena import MessageQueue, QueueConfig
from arena.errors import RunDirectoryError
room = int(sys.argv[1])
with open("/mnt/ballast", "wb") as ballast:
    free = os.statvfs("/mnt").f_bavail * 4096
    os.posix_fallocate(ballast.fileno(), 0, free - room) if free > room else None
try:
    MessageQueue(2, config=QueueConfig(name="q", run_dir="/mnt"))
except RunDirectoryError as error:
    print(error.expected, "|", error.found, "|", sorted(os.listdir("/mnt")))
else:
    print("made")
"""


def on_a_small_tmpfs(room: int) -> str:
    """Make a queue whose run directory has that much room; what came of it."""
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("the program 'unshare' is not installed")
    script = f"mount -t tmpfs -o size=1m,mode=700 none /mnt && exec {sys.executable} -c '{FILL_THEN_MAKE}' {room}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("ARENA_RUN_DIR", None)
    ran = subprocess.run(
        [unshare, "-rm", "sh", "-c", script], capture_output=True, text=True, timeout=60, env=environment, check=False
    )
    if "unshare failed" in ran.stderr or "permission denied" in ran.stderr:
        pytest.skip(f"no mount namespace here: {ran.stderr.strip()}")
    assert ran.returncode == 0, f"exit {ran.returncode}: {ran.stderr}"
    return ran.stdout.strip()


@pytest.mark.parametrize("pages_free", [0, 1, 5])
def test_a_run_directory_without_room_is_an_error_that_says_how_much_is_needed_and_free(pages_free):
    needed, free, left = on_a_small_tmpfs(pages_free * 4096).split(" | ")
    assert "bytes free" in needed
    assert int(needed.split(" bytes")[0].split()[-1]) > int(free.split(" bytes")[0])
    assert "No space left" in free
    assert left == "['ballast']", "nothing of the queue stays behind"


def test_a_run_directory_with_just_enough_room_is_enough():
    assert on_a_small_tmpfs(512 << 10) == "made"


# --- garbage ---------------------------------------------------------------------------------------------------------

GONE = Identity(pid=(1 << 22) - 1, start_ticks=1, pid_namespace=page.namespace("pid"))  # above the usual pid_max


def leave_a_queue_behind(run_dir: str, name: str, instance: str) -> int:
    place = queue_directory(Path(run_dir), name, instance)
    mark_owner(place)
    make_probe(place / "writer")
    (place / "attach").touch()
    return os.getpid()


def a_dead_queue(run_dir: Path, name: str, instance: str) -> Path:
    """A directory as a killed process leaves it."""
    processes.run(leave_a_queue_behind, str(run_dir), name, instance)
    return run_dir / f"{name}@{instance}"


def disowned(place: Path, owner: Identity = GONE) -> Path:
    """Give a queue's directory to another process."""
    for path in pages(place):
        data = bytearray(path.read_bytes())
        for word, value in ((page.H_PID, owner.pid), (page.H_START_TICKS, owner.start_ticks)):
            set_word(word, value)(data)
        set_word(page.H_PID_NAMESPACE, owner.pid_namespace)(data)
        path.write_bytes(data)
    (place / "owner").write_text(f"{owner.pid} {owner.start_ticks} {owner.pid_namespace}\n")
    return place


def make_queue_directory(run_dir: Path, name: str, instance: str) -> Path:
    leave_a_queue_behind(str(run_dir), name, instance)
    return run_dir / f"{name}@{instance}"


def test_only_the_dead_are_removed(run_dir):
    alive = make_queue_directory(run_dir, "alive", "1")
    dead = a_dead_queue(run_dir, "dead", "1")
    assert collect_garbage(run_dir) == [dead]
    assert sorted(run_dir.iterdir()) == [alive]
    assert collect_garbage(run_dir) == []


def test_a_queue_with_one_living_process_is_not_dead(run_dir):
    place = disowned(make_queue_directory(run_dir, "q", "1"))
    make_probe(reader_page(place, 0, os.getpid(), "a"), Role.READER)
    assert collect_garbage(run_dir) == []


def test_a_process_of_another_pid_namespace_may_be_alive(run_dir):
    disowned(make_queue_directory(run_dir, "q", "1"), Identity(GONE.pid, 1, GONE.pid_namespace + 1))
    assert collect_garbage(run_dir) == []


def test_a_pid_that_another_process_has_now_is_not_its_owner(run_dir):
    own = identity()
    place = disowned(make_queue_directory(run_dir, "q", "1"), Identity(own.pid, own.start_ticks - 1, own.pid_namespace))
    assert collect_garbage(run_dir) == [place]


@pytest.mark.parametrize("text", ["", "1", "not a pid\n"])
def test_a_queue_that_is_just_being_set_up_is_left_alone(run_dir, text):
    place = queue_directory(run_dir, "q", "1")
    (place / "owner").write_text(text)
    assert collect_garbage(run_dir) == []
    os.utime(place, (1, 1))
    assert collect_garbage(run_dir) == [place]


def test_a_directory_with_other_files_is_not_a_queues_because_of_its_name(run_dir):
    place = run_dir / "backup@2026"
    place.mkdir()
    (place / "thesis.tex").touch()
    os.utime(place, (1, 1))
    assert collect_garbage(run_dir) == []


def test_an_empty_directory_is_removed_once_it_is_old(run_dir):
    place = queue_directory(run_dir, "q", "1")
    assert collect_garbage(run_dir) == []
    os.utime(place, (1, 1))
    assert collect_garbage(run_dir) == [place]


def test_a_queue_without_probes_is_judged_by_its_maker(run_dir):
    alive, dead = queue_directory(run_dir, "alive", "1"), queue_directory(run_dir, "dead", "1")
    mark_owner(alive)
    mark_owner(dead)
    disowned(dead)
    assert collect_garbage(run_dir) == [dead]


@pytest.mark.parametrize("living", ["maker", "rank", None])
def test_a_communicator_lives_as_long_as_its_maker_or_a_rank(run_dir, living):
    place = queue_directory(run_dir, "allreduce-0", "1")
    make_probe(place / "rank-1", Role.COMMUNICATOR)
    disowned(place)
    if living == "maker":  # rank 0, before its page is there
        mark_owner(place)
    if living == "rank":  # rank 0 is dead, and another one has not noticed
        make_probe(place / "rank-2", Role.COMMUNICATOR)
    assert collect_garbage(run_dir) == ([] if living else [place])


def test_ranks_that_died_while_they_met_are_garbage_once_they_are_old(run_dir):
    place = queue_directory(run_dir, "allreduce-0", "1")
    (place / "meet-0-ab12").touch()
    assert collect_garbage(run_dir) == []
    os.utime(place, (1, 1))
    assert collect_garbage(run_dir) == [place]


def test_a_bad_page_saves_nobody_and_harms_nobody(run_dir):
    alive, dead = make_queue_directory(run_dir, "alive", "1"), disowned(make_queue_directory(run_dir, "dead", "1"))
    for place in (alive, dead):
        (place / "reader-0-1-a").write_bytes(b"no page")
    assert collect_garbage(run_dir) == [dead]


@pytest.mark.parametrize(("dead", "keep"), [(count, keep) for count in (0, 1, 3, 4, 5) for keep in (0, 1, 4, 9)])
def test_the_newest_dead_are_kept_for_a_post_mortem(run_dir, dead, keep):
    made = []
    for number in range(dead):
        made.append(disowned(make_queue_directory(run_dir, "q", str(number))))
        os.utime(made[-1], ns=(0, number))
    removed = collect_garbage(run_dir, name="q", keep=keep)
    assert removed == made[: max(0, dead - keep)]
    assert [path.exists() for path in made] == [path not in removed for path in made]


def test_garbage_of_another_name_is_left_when_one_is_asked_for(run_dir):
    mine, other = (disowned(make_queue_directory(run_dir, name, "1")) for name in ("mine", "other"))
    assert collect_garbage(run_dir, name="mine") == [mine]
    assert other.exists()


def test_what_arena_did_not_make_is_left_alone(run_dir):
    (run_dir / "notes@home").write_text("mine")
    (run_dir / "plain").mkdir()
    os.utime(run_dir / "plain", (1, 1))
    assert collect_garbage(run_dir) == []


def sleep_for_ever() -> None:
    signal.pause()


def test_a_zombie_is_dead(run_dir):
    with processes.Child(sleep_for_ever) as child:
        who = identity(child.pid)
        assert is_alive(who) is True
        assert is_alive(Identity(who.pid, who.start_ticks + 1, who.pid_namespace)) is False
        assert is_alive(Identity(who.pid, who.start_ticks, who.pid_namespace + 1)) is None
    assert is_alive(who) is False
    assert is_alive(GONE) is False
    with pytest.raises(ProcessLookupError):
        identity(GONE.pid)
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert is_alive(identity(pid)) is False, "it has ended, though its parent has not asked yet"
    os.waitpid(pid, 0)


# --- the pages of real queues ----------------------------------------------------------------------------------------


@pytest.fixture
def queue(run_dir) -> Iterator[MessageQueue]:
    with MessageQueue(2, config=QueueConfig(name="real", slots=4, huge_pages=False)) as writer:
        yield writer


def pages_of(run_dir: Path) -> list[Path]:
    (directory,) = queue_directories(run_dir)
    return pages(directory)


def test_each_end_of_a_queue_leaves_a_page_that_tells_its_story(run_dir, queue):
    readers = [MessageQueue.create_from_handle(queue.export_handle(), rank) for rank in (0, 1)]
    for step in range(3):
        queue.enqueue({"step": step})
        for reader in readers:
            reader.dequeue()
    queue.enqueue(torch.zeros(100_000))
    kept = readers[0].dequeue()
    for reader in readers:
        reader.heartbeat()
    writer_page, *reader_pages = pages_of(run_dir)
    with ProbeReader(writer_page) as reader:
        assert (reader.role, reader.about["queue"], reader.about["n_reader"]) == (Role.WRITER, "real", 2)
        assert reader.live(page.L_SEQUENCE) == 4
        assert {Event.PUBLISH, Event.ATTACH, Event.COPY, Event.GROW} <= {one.kind for one in reader.events()}
        (block,) = reader.blocks()
        assert block.nbytes >= 400_000
        assert set(block.holders) >= {0, 1}
        assert published_at(reader.marks(), 3) >= published_at(reader.marks(), 2) > 0
    ranks = []
    for path in reader_pages:
        with ProbeReader(path) as reader:
            ranks.append((reader.rank, reader.live(page.L_SEQUENCE)))
            assert reader.owner == identity()
    assert ranks == [(0, 4), (1, 3)]
    del kept
    for reader in readers:
        reader.shutdown()


def test_a_stalled_writers_page_names_the_readers_it_waits_for(run_dir):
    seen_while_waiting = []

    def look_from_outside(warning: str) -> None:
        with ProbeReader(pages_of(run_dir)[0]) as reader:
            live = [reader.live(word) for word in (page.L_STATE, page.L_WAIT_ON, page.L_WAIT_SEQUENCE)]
            seen_while_waiting.append((live, reader.pending()))
        assert "reader 1" in warning

    config = QueueConfig(slots=4, stall_warning_s=1e-6)
    with contextlib.ExitStack() as stack:
        writer = stack.enter_context(MessageQueue(2, config=config, on_warning=look_from_outside))
        quick, _ = (
            stack.enter_context(MessageQueue.create_from_handle(writer.export_handle(), rank)) for rank in (0, 1)
        )
        for _ in range(4):
            writer.enqueue(None)
            quick.dequeue()
        with pytest.raises(QueueTimeout, match="reader 1"):
            writer.enqueue(None, timeout=0.01)
        assert seen_while_waiting == [([EndpointState.WAITING, 2, 0], (1,))]
        with ProbeReader(pages_of(run_dir)[0]) as reader:
            assert reader.live(page.L_STATE) == EndpointState.WORKING
            assert value_of(reader, "writer_blocked_total") == 1
            assert value_of(reader, "writer_blocked_seconds_total", reader="1") > 0
            assert value_of(reader, "writer_blocked_seconds_total", reader="0") == 0
            assert value_of(reader, "writer_blocked_full_seconds_total") == 0


def test_an_orderly_end_leaves_nothing_in_the_run_directory(run_dir, queue):
    reader = MessageQueue.create_from_handle(queue.export_handle(), 0)
    assert len(pages_of(run_dir)) == 2
    queue.shutdown()
    reader.shutdown()
    assert list(run_dir.iterdir()) == []


def test_a_queue_without_probes_leaves_no_page(run_dir):
    with MessageQueue(1, config=QueueConfig(probes=False)) as writer:
        reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
        writer.enqueue([1, torch.zeros(100_000)])
        assert reader.dequeue()[0] == 1
        assert pages_of(run_dir) == []
        assert collect_garbage(run_dir) == []
        reader.shutdown()
    assert list(run_dir.iterdir()) == []


def enqueue_then_die(run_dir: str) -> None:
    writer = MessageQueue(1, config=QueueConfig(name="dying", run_dir=run_dir))
    for step in range(3):
        writer.enqueue(step)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_leaves_its_page_for_the_post_mortem(run_dir):
    with pytest.raises(processes.ChildDied, match="-9"):
        processes.run(enqueue_then_die, str(run_dir))
    (path,) = pages_of(run_dir)
    with ProbeReader(path) as reader:
        assert is_alive(reader.owner) is False
        assert reader.live(page.L_SEQUENCE) == 3
        assert Event.PUBLISH in {one.kind for one in reader.events()}
    assert [one.name.partition("@")[0] for one in collect_garbage(run_dir)] == ["dying"]
    assert list(run_dir.iterdir()) == []
