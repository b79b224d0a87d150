"""Traces over the wire: every process makes its own spans, and a collector finds them to be one trace."""

import math
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from arena import probe
from arena.errors import DecodeFailed
from telemetry import traces
from telemetry.metrics import ArenaCollector
from telemetry.perfetto import timeline
from telemetry.reader import Watcher
from tests.support import traced
from tests.support.fleet import Fleet, Here, Worker, attach, create, dequeue, drain, enqueue, eventually, shut_down
from tests.support.otlp import GrpcReceiver, Received, Receiver, Silent
from tests.support.ranks import close, make, together
from tests.support.scraping import registry_of

ROOT = Path(__file__).parent.parent


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as running:
        yield running


def start(fleet: Fleet, url: str, readers: int = 1, **settings: object) -> tuple[Worker, list[Worker]]:
    """A writer and its readers, each with tracing of its own."""
    of_queue = {name: settings.pop(name) for name in ("slots", "max_arena_bytes") if name in settings}
    writer, *others = workers = [fleet.start() for _ in range(1 + readers)]
    for call in [worker.begin(traced.trace_on, url, **settings) for worker in workers]:
        call.result()
    handle = writer.call(create, readers, name="steps", **of_queue)
    for call in [worker.begin(attach, handle, rank) for rank, worker in enumerate(others)]:
        call.result()
    return writer, others


def end(writer: Worker, readers: list[Worker]) -> list[traces.Counts]:
    """Shut all down, and send what is left."""
    for worker in [*readers, writer]:
        worker.call(shut_down)
    return [worker.call(traced.trace_off) for worker in [writer, *readers]]


def named(spans: list[Received], name: str) -> list[Received]:
    return [span for span in spans if span.name == name]


def one(spans: list[Received], name: str) -> Received:
    (span,) = named(spans, name)
    return span


# ── one message ──────────────────────────────────────────────────────────────────────────────────
def test_a_message_is_one_trace_across_its_processes(fleet, receiver):
    writer, readers = start(fleet, receiver.url, readers=2, ratio=1.0)
    writer.call(enqueue, {"step": 1})
    for reader in readers:
        reader.call(dequeue)
    end(writer, readers)
    spans = receiver.spans
    send = one(spans, "send steps")
    assert (send.kind, send.parent_id, send.links) == ("PRODUCER", "", ())
    assert send.attributes["messaging.operation.type"] == "send"
    assert send.attributes["messaging.message.id"] == "0"
    assert send.attributes["messaging.arena.path"] == "inline"
    assert send.resource["process.pid"] == writer.pid
    for rank, reader in enumerate(readers):
        (process,) = [span for span in named(spans, "process steps") if span.resource["process.pid"] == reader.pid]
        assert (process.kind, process.parent_id) == ("CONSUMER", send.span_id)
        assert process.links == ((send.trace_id, send.span_id),)
        assert process.attributes["messaging.arena.reader_rank"] == rank
        children = [span for span in spans if span.parent_id == process.span_id]
        assert [span.name for span in children] == ["receive", "deserialize"]
        assert all(process.start_ns <= span.start_ns <= span.end_ns <= process.end_ns for span in children)
    assert {span.trace_id for span in spans} == {send.trace_id}
    assert {span.schema_url for span in spans} == {"https://opentelemetry.io/schemas/1.44.0"}
    assert {span.attributes["messaging.system"] for span in spans} == {"arena"}


def test_a_tensor_s_copy_is_a_child(fleet, receiver):
    writer, (reader,) = start(fleet, receiver.url, ratio=1.0)
    writer.call(traced.send_tensor, 1 << 20)
    reader.call(traced.take_tensor)
    end(writer, [reader])
    send, copy = one(receiver.spans, "send steps"), one(receiver.spans, "memcpy")
    assert (send.attributes["messaging.arena.path"], copy.parent_id) == ("block", send.span_id)
    assert copy.attributes["messaging.arena.bytes"] == 1 << 20
    assert send.start_ns <= one(receiver.spans, "serialize").start_ns <= copy.start_ns <= copy.end_ns <= send.end_ns


def test_fragments_are_one_message(fleet, receiver):
    writer, (reader,) = start(fleet, receiver.url, ratio=1.0, max_arena_bytes=0)
    sent = writer.begin(traced.send_tensor, 4 << 20)
    assert reader.call(traced.take_tensor) == 4 << 20
    sent.result()
    end(writer, [reader])
    assert one(receiver.spans, "send steps").attributes["messaging.arena.path"] == "fragments"
    assert one(receiver.spans, "process steps").parent_id == one(receiver.spans, "send steps").span_id


def test_copies_to_a_device_and_waits_in_the_gate_are_children_of_process(fleet, receiver, run_dir):
    writer, (reader,) = start(fleet, receiver.url, ratio=1.0)
    for _ in range(2):
        writer.call(traced.send_tensor, 1 << 20)
    reader.call(traced.copy_late, 0.05)
    with Watcher(run_dir) as watcher:
        drawing = timeline(watcher.look().queues[0])["traceEvents"]
    end(writer, [reader])
    processes = {span.start_ns: span for span in named(receiver.spans, "process steps")}
    first, second = (processes[at] for at in sorted(processes))
    copies = {span.parent_id: span for span in named(receiver.spans, "h2d")}
    assert copies[first.span_id].attributes["messaging.arena.copy_mode"] in ("pageable_sync", "pinned_async")
    copy = copies[second.span_id]
    assert copy.attributes["messaging.arena.copy_mode"] == "pinned_async"
    assert copy.attributes["messaging.arena.bytes"] == (1 << 20) + 8
    assert second.start_ns < copy.start_ns < copy.end_ns < second.end_ns
    (gate,) = [span for span in named(receiver.spans, "dma_gate") if span.parent_id == second.span_id]
    assert gate.end_ns - gate.start_ns >= 0.05e9
    assert gate.attributes["messaging.message.id"] == second.attributes["messaging.message.id"]
    # The same, drawn.
    assert [one["args"]["bytes"] for one in drawing if one["ph"] == "X" and one["name"] == "h2d"][-1] == (1 << 20) + 8
    begun, ended = ([one for one in drawing if one["ph"] == phase][-1] for phase in "be")
    assert (begun["name"], begun["id"]) == ("dma_gate", ended["id"])
    assert ended["ts"] - begun["ts"] >= 50_000


def test_what_is_reduced_within_a_message_is_a_child_of_process(two, fleet, receiver, run_dir):
    together(two, make)
    for call in [worker.begin(traced.trace_on, receiver.url, ratio=1.0) for worker in two]:
        call.result()
    writer = fleet.start()
    writer.call(traced.sample_only, ratio=1.0)
    handle = writer.call(create, 2, name="steps")
    together(two, attach_rank, handle)
    writer.call(enqueue, "go")
    together(two, traced.reduce_within, [64, 300_000])
    with Watcher(run_dir) as watcher:
        look = watcher.look()
        drawing = timeline(look.queues[0], look.communicators)["traceEvents"]
    for worker in two:
        worker.call(shut_down)
    together(two, close)
    for worker in two:
        worker.call(traced.trace_off)
    writer.call(shut_down)
    spans = named(receiver.spans, "all_reduce")
    for rank, worker in enumerate(two):
        (process,) = [
            span for span in named(receiver.spans, "process steps") if span.attributes["process.pid"] == worker.pid
        ]
        small, large = sorted(
            (span for span in spans if span.parent_id == process.span_id), key=lambda span: span.start_ns
        )
        assert [span.attributes["messaging.arena.path"] for span in (small, large)] == ["cpu_one_shot", "cpu_two_shot"]
        assert [span.attributes["messaging.arena.bytes"] for span in (small, large)] == [256, 1_200_000]
        assert small.attributes["messaging.arena.rank"] == rank
        assert small.attributes["process.pid"] == small.resource["process.pid"] == worker.pid
        assert process.start_ns <= small.start_ns < small.end_ns <= large.start_ns
    assert len(spans) == len({span.span_id for span in spans}) == 4, "none of what was reduced before any message"
    drawn = [one for one in drawing if one["ph"] == "X" and one["name"] == "all_reduce"]
    assert sorted(one["args"]["bytes"] for one in drawn) == [256, 256, 1_200_000, 1_200_000]
    assert len({one["tid"] for one in drawn}) == 2


def test_of_what_one_message_may_have_many_so_much_is_kept_and_the_rest_is_counted(tmp_path):
    page = probe.Probe(tmp_path / "rank-0", probe.Role.COMMUNICATOR, rank=0, n_reader=0, slots=0, about={})
    for number in range(300):
        page.detail(probe.Event.REDUCE, number, 1_000_000_000, 10, 0, (1, 2, 3))
    page.detail(probe.Event.REDUCE, 300, 3_000_000_000, 10, 0, (1, 2, 3))
    with probe.ProbeReader(page.path) as seen:
        kept = [event.sequence for event in seen.events()]
    assert kept == [*range(129), 300]
    assert page.values[page.word("events_dropped_total")] == 300 - 129


def test_what_is_not_sampled_leaves_nothing(fleet, run_dir):
    writer, reader = fleet.start(), fleet.start()
    handle = writer.call(create, 1, name="steps")
    reader.call(attach, handle, 0)
    for _ in range(2):
        writer.call(traced.send_tensor, 1 << 20)
    reader.call(traced.copy_late, 0.01)
    with Watcher(run_dir) as watcher, probe.ProbeReader(watcher.look().queues[0].readers[0].page.path) as page:
        kinds = {event.kind for event in page.events()}
    assert kinds and not kinds & {probe.Event.TO_DEVICE, probe.Event.GATE}


def attach_rank(here: Here, rank: int, handle: Any) -> None:
    attach(here, handle, rank)


def test_the_user_s_span_is_the_parent_and_goes_on_in_the_worker(fleet, receiver):
    writer, (reader,) = start(fleet, receiver.url, ratio=0.0)
    step = writer.call(traced.enqueue_within, "step", "go")
    forward = reader.call(traced.own_span, "forward")
    end(writer, [reader])
    send, process = one(receiver.spans, "send steps"), one(receiver.spans, "process steps")
    assert (send.trace_id, send.parent_id) == step
    assert forward[0] == step[0]
    assert one(receiver.spans, "forward").parent_id == process.span_id


def test_current_is_only_of_the_last_message(fleet, receiver):
    writer, (reader,) = start(fleet, receiver.url, ratio=0.0)
    writer.call(traced.enqueue_within, "step", "sampled")
    writer.call(enqueue, "not sampled")
    first, second = reader.call(traced.own_span, "first"), reader.call(traced.own_span, "second")
    end(writer, [reader])
    assert first[0] != second[0]
    assert one(receiver.spans, "second").parent_id == ""


@pytest.mark.parametrize("relation", ["both", "parent", "link"])
def test_readers_belong_by_parent_or_by_link(fleet, receiver, relation):
    writer, (reader,) = start(fleet, receiver.url, ratio=1.0, relation=relation)
    writer.call(enqueue, "go")
    own = reader.call(traced.own_span, "own")
    end(writer, [reader])
    send, process = one(receiver.spans, "send steps"), one(receiver.spans, "process steps")
    assert process.parent_id == ("" if relation == "link" else send.span_id)
    assert process.links == (() if relation == "parent" else ((send.trace_id, send.span_id),))
    assert (process.trace_id == send.trace_id) is (relation != "link")
    assert own[0] == process.trace_id
    assert one(receiver.spans, "own").parent_id == process.span_id


def test_a_message_that_can_t_be_decoded_says_so(fleet, receiver):
    writer, (reader,) = start(fleet, receiver.url, ratio=1.0)
    writer.call(traced.send_unloadable)
    with pytest.raises(DecodeFailed):
        reader.call(dequeue)
    writer.call(enqueue, "next")
    assert reader.call(dequeue) == "next"
    end(writer, [reader])
    assert [span.error for span in named(receiver.spans, "process steps")] == ["decode", ""]


def test_a_message_that_is_not_sent_says_why(fleet, receiver):
    writer, (reader,) = start(fleet, receiver.url, ratio=1.0, slots=4)
    for number in range(4):
        writer.call(enqueue, number)
    with pytest.raises(TimeoutError):
        writer.call(enqueue, 4, timeout=0.05)
    reader.call(drain, 4)
    end(writer, [reader])
    failed = [span for span in named(receiver.spans, "send steps") if span.error]
    assert [span.attributes["error.type"] for span in failed] == ["timeout"]
    wait = one(receiver.spans, "wait_for_slot")
    assert (wait.parent_id, wait.attributes["messaging.arena.blame_reader"]) == (failed[0].span_id, 0)


# ── which messages ───────────────────────────────────────────────────────────────────────────────
def test_a_slow_message_is_traced_whatever_the_ratio(fleet, receiver):
    writer, (quick, slow) = start(fleet, receiver.url, readers=2, ratio=0.0, slow_s=0.05, slots=4)
    slow.freeze()
    taken = quick.begin(traced.take_many, 8)
    sent = writer.begin(traced.send_many, 8)
    time.sleep(0.2)
    slow.thaw()
    slow.call(traced.take_many, 8)
    sent.result()
    taken.result()
    end(writer, [quick, slow])
    send = one(receiver.spans, "send steps")
    assert send.attributes["messaging.arena.slow"] is True
    assert send.attributes["messaging.arena.blame_reader"] == 1
    wait = one(receiver.spans, "wait_for_slot")
    assert wait.parent_id == send.span_id
    assert wait.attributes["messaging.arena.relation"] == "awaiting_readers"
    assert wait.end_ns - wait.start_ns >= 0.05e9
    assert len(named(receiver.spans, "process steps")) == 2


def test_the_ratio_is_kept_and_follows_from_the_trace_id(fleet, receiver):
    writer, (reader,) = start(fleet, receiver.url, ratio=0.1, slow_s=math.inf)
    taken = reader.begin(traced.take_many, 2000)
    writer.call(traced.send_many, 2000)
    taken.result()
    sampled, dropped = writer.call(traced.traces_dropped)
    end(writer, [reader])
    assert 120 < sampled + dropped < 280  # 200, give or take six standard deviations
    assert all(int(span.trace_id[16:], 16) < 0.1 * 2**64 for span in receiver.spans)


@pytest.mark.parametrize("wrong", [{"ratio": 1.5}, {"ratio": math.nan}, {"relation": "sibling"}, {"per_second": 0}])
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        traces.install(spans=False, **wrong)
    assert probe.hooks.trace_source is None


# ── many of them ─────────────────────────────────────────────────────────────────────────────────
def test_of_ten_thousand_messages_every_kept_trace_is_whole(fleet, receiver):
    writer, readers = start(fleet, receiver.url, readers=4, ratio=1.0)
    calls = [reader.begin(traced.take_many, 10_000) for reader in readers]
    writer.call(traced.send_many, 10_000)
    assert [call.result() for call in calls] == [9_999] * 4
    sampled, dropped = writer.call(traced.traces_dropped)
    counts = end(writer, readers)
    assert sampled + dropped == 10_000
    assert dropped > 0  # far more a second than the flight recorders can keep
    assert [count.events_lost for count in counts] == [0] * 5
    by_trace = defaultdict(list)
    for span in receiver.spans:
        by_trace[span.trace_id].append(span)
    assert len(by_trace) == sampled
    for spans in by_trace.values():
        check_whole(spans, readers=4)


def check_whole(spans: list[Received], readers: int) -> None:
    """One send, a process each, every parent and link resolves, and the clocks of all processes agree."""
    send = one(spans, "send steps")
    known = {span.span_id: span for span in spans}
    assert len(known) == len(spans)
    assert sorted(span.attributes["messaging.arena.reader_rank"] for span in named(spans, "process steps")) == list(
        range(readers)
    )
    for span in spans:
        assert span.parent_id in known or span is send
        assert all(link == (send.trace_id, send.span_id) for link in span.links)
    for process in named(spans, "process steps"):
        published_ns = process.start_ns - process.attributes["messaging.arena.queue_delay_ns"]
        assert abs(published_ns - send.end_ns) < 1e6


def test_times_are_wall_clock_times(fleet, receiver):
    writer, (reader,) = start(fleet, receiver.url, ratio=1.0)
    before = time.time_ns()
    writer.call(enqueue, "go")
    reader.call(dequeue)
    after = time.time_ns()
    end(writer, [reader])
    send, receive = one(receiver.spans, "send steps"), one(receiver.spans, "receive")
    assert before - 1e6 < send.start_ns < send.end_ns < receive.end_ns < after + 1e6


# ── processes ────────────────────────────────────────────────────────────────────────────────────
def script(name: str, url: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.traced", name, url],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_forked_and_spawned_workers_have_spans_of_their_own(run_dir, receiver):
    with script("families", receiver.url) as engine:
        printed, errors = engine.communicate(timeout=60)
    assert (engine.returncode, errors) == (0, "")
    trace_id, engine_pid, *pids = printed.split()
    spans = [span for span in receiver.spans if span.trace_id == trace_id]
    send = one(spans, "send steps")
    assert send.resource["process.pid"] == int(engine_pid)
    processes = named(spans, "process steps")
    assert sorted(span.resource["process.pid"] for span in processes) == sorted(map(int, pids))
    assert {span.parent_id for span in processes} == {send.span_id}
    own = [span for span in spans if span.name != "step"]
    assert all(span.attributes["process.pid"] == span.resource["process.pid"] for span in own)


@pytest.mark.parametrize("dies", [False, True], ids=["never answers", "dies mid-run"])
def test_a_collector_that_fails_costs_neither_messages_nor_the_end(run_dir, dies):
    with Receiver() if dies else Silent() as collector, script("steady", collector.url) as running:
        try:
            assert running.stdout.readline() == "half\n"
            if dies:
                eventually(lambda: collector.spans)
                collector.die()
            running.stdin.write("\n")
            running.stdin.flush()
            assert running.stdout.readline() == "done\n"
            began = time.monotonic()
            took, handed, delivered, dropped = running.stdout.readline().split()
            assert running.wait(timeout=30) == 0
            assert time.monotonic() - began < 3
        finally:
            running.kill()
    assert float(took) < 3
    assert int(handed) == int(delivered) + int(dropped) > 500
    assert (int(delivered) > 0) is dies
    assert int(dropped) > 100


def test_a_process_that_just_ends_sends_what_it_has(run_dir, receiver):
    with script("careless", receiver.url) as running:
        printed, errors = running.communicate(timeout=60)
    assert (running.returncode, printed, errors) == (0, "done\n", "")
    assert len(named(receiver.spans, "send steps")) == len(named(receiver.spans, "process steps")) == 20


def test_a_process_that_just_ends_does_so_even_if_nobody_listens(run_dir):
    with Silent() as collector, script("careless", collector.url) as running:
        try:
            assert running.stdout.readline() == "done\n"
            began = time.monotonic()
            assert running.wait(timeout=30) == 0
            assert time.monotonic() - began < 3
        finally:
            running.kill()


def test_what_is_made_is_not_lost_when_the_process_ends(run_dir, receiver):
    with script("steady", receiver.url) as running:
        running.communicate("\n", timeout=60)
    assert len(named(receiver.spans, "send steps")) == len(named(receiver.spans, "process steps")) > 100


# ── exemplars ────────────────────────────────────────────────────────────────────────────────────
def test_histograms_name_the_trace_of_a_value(fleet, run_dir):
    writer, slow = fleet.start(), fleet.start()
    writer.call(traced.sample_only, ratio=1.0)
    handle = writer.call(create, 1, name="steps", slots=2)
    slow.call(attach, handle, 0)
    sent = writer.begin(traced.send_many, 3)
    time.sleep(0.05)
    slow.call(drain, 3)
    sent.result()
    with Watcher(run_dir) as watcher:
        registry = registry_of(ArenaCollector(watcher))
        families = text_string_to_metric_families(generate_latest(registry).decode())
        (look,) = watcher.look().queues
    sampled = {f"{event.trace[0]:016x}{event.trace[1]:016x}" for event in look.writer.events} - {"0" * 32}
    found = defaultdict(list)
    for family in families:
        for sample in family.samples:
            if sample.exemplar:
                found[family.name].append((float(sample.labels["le"]), sample.exemplar))
    assert set(found) == {"arena_queue_delay_seconds", "arena_reader_hold_seconds", "arena_writer_wait_seconds"}
    for of_buckets in found.values():
        for bound, exemplar in of_buckets:
            assert bound / 4 <= exemplar.value < bound or bound < 2e-6
            assert exemplar.labels["trace_id"] in sampled
            assert abs(float(exemplar.timestamp) - time.time()) < 30


# ── from outside ─────────────────────────────────────────────────────────────────────────────────
def test_the_exporter_makes_the_spans_of_processes_that_make_none(fleet, receiver, run_dir):
    writer, reader = fleet.start(), fleet.start()
    for worker in (writer, reader):
        worker.call(traced.sample_only, ratio=1.0)
    handle = writer.call(create, 1, name="steps")
    reader.call(attach, handle, 0)
    provider = traces.otlp_provider(receiver.url)
    try:
        with traces.HostTraces(provider, run_dir) as outside:
            writer.call(enqueue, "go", "on")
            reader.call(dequeue)
            eventually(lambda: outside.counts().spans >= 4)
            reader.call(dequeue)
            reader.kill(signal.SIGKILL)  # with its second message in hand
            eventually(lambda: outside.counts().spans >= 9)
        assert provider.force_flush()
    finally:
        provider.shutdown()
    assert [span.resource["process.pid"] for span in named(receiver.spans, "send steps")] == [writer.pid] * 2
    assert [span.error for span in named(receiver.spans, "process steps")] == ["", "never_back"]


def test_inside_and_outside_make_the_same_spans(fleet, receiver, run_dir):
    writer, (reader,) = start(fleet, receiver.url, ratio=1.0)
    provider = traces.otlp_provider(receiver.url)
    try:
        with traces.HostTraces(provider, run_dir) as outside:
            writer.call(enqueue, "go")
            reader.call(dequeue)
            end(writer, [reader])
            eventually(lambda: outside.counts().spans >= 5)
        assert provider.force_flush()
    finally:
        provider.shutdown()
    ids = [(span.name, span.span_id, span.parent_id) for span in receiver.spans]
    assert len(ids) == 2 * len(set(ids)) == 10


def test_a_page_that_takes_another_s_place_is_followed_too(receiver, run_dir):
    directory = run_dir / "allreduce-tp@ab"
    directory.mkdir(mode=0o700)

    def page(name: str) -> probe.Probe:
        about = {"group": "tp", "instance": "ab"}
        return probe.Probe(directory / name, probe.Role.COMMUNICATOR, rank=0, n_reader=0, slots=0, about=about)

    first = page("rank-0")
    provider = traces.otlp_provider(receiver.url)
    try:
        with traces.HostTraces(provider, run_dir) as outside:
            first.detail(probe.Event.REDUCE, 1, time.monotonic_ns(), 10, 8 << 16, (1, 2, 3))
            eventually(lambda: outside.counts().spans == 1)
            second = page(".rank-0")
            os.replace(second.path, first.path)
            second.detail(probe.Event.REDUCE, 2, time.monotonic_ns(), 10, 9 << 16, (1, 2, 3))
            eventually(lambda: outside.counts().spans == 2)
        assert provider.force_flush()
    finally:
        provider.shutdown()
    assert [span.attributes["messaging.arena.bytes"] for span in named(receiver.spans, "all_reduce")] == [8, 9]


def test_the_command_sends_traces_and_says_what_became_of_them(fleet, receiver, run_dir):
    writer, reader = fleet.start(), fleet.start()
    writer.call(traced.sample_only, ratio=1.0)
    handle = writer.call(create, 1, name="steps")
    reader.call(attach, handle, 0)
    program = "import sys; from telemetry.cli import main; sys.argv[0] = 'arena'; main()"
    command = [sys.executable, "-c", program, "export", "--port", "0", "--otlp", receiver.url]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as exporter:
        try:
            assert exporter.stdout.readline().startswith("serving http://127.0.0.1:")
            writer.call(enqueue, "go")
            reader.call(dequeue)
            reader.call(shut_down)
            eventually(lambda: named(receiver.spans, "process steps"))
            os.kill(exporter.pid, signal.SIGTERM)
            assert exporter.wait(timeout=10) == 0
            assert exporter.stderr.read() == "arena export: 5 spans made, 5 delivered, 0 dropped\n"
        finally:
            exporter.kill()


@pytest.mark.parametrize("url", ["", "collector:4318", "ftp://collector", "http://", "http://h:99999", "grpc:4317"])
def test_a_url_that_names_no_collector_is_refused_in_one_line(url, run_dir):
    with pytest.raises(traces.BadEndpoint, match="http://host:4318"):
        traces.otlp_provider(url)
    program = "import sys; from telemetry.cli import main; sys.argv[0] = 'arena'; main()"
    ran = subprocess.run(
        [sys.executable, "-c", program, "export", "--once", "--otlp", url],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 1
    assert ran.stderr.count("\n") == 1
    assert ran.stderr.startswith("arena export: traces can't be sent there")


@pytest.mark.parametrize("receiver_of", [Receiver, GrpcReceiver], ids=["http", "grpc"])
def test_a_process_that_has_sent_spans_and_forks_goes_on_and_so_do_its_children(run_dir, receiver_of):
    with receiver_of() as receiver, script("late_family", receiver.url) as engine:
        printed, errors = engine.communicate(timeout=60)
        assert engine.returncode == 0, errors
        trace_id, engine_pid, *pids = printed.split()
        spans = [span for span in receiver.spans if span.trace_id == trace_id]
        assert named(receiver.spans, "before")
    assert one(spans, "send steps").resource["process.pid"] == int(engine_pid)
    assert sorted(span.resource["process.pid"] for span in named(spans, "process steps")) == sorted(map(int, pids))
    assert errors == "", "gRPC says so if it can't work in a child"


def test_grpc_works_too(run_dir):
    with GrpcReceiver() as receiver, script("careless", receiver.url) as running:
        printed, errors = running.communicate(timeout=60)
        assert (running.returncode, printed, errors) == (0, "done\n", "")
        assert len(named(receiver.spans, "send steps")) == len(named(receiver.spans, "process steps")) == 20
