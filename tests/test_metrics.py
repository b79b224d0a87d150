"""What a scrape says: every declared series with its value, counters that never fall, bad pages counted."""

import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

from arena import Handle, MessageQueue, QueueConfig
from arena.errors import AttachRefused
from arena.probe import BUCKETS, Probe, Role, page
from arena.probe.directory import queue_directory, reader_page
from arena.probe.metrics import ALLREDUCE_PATHS
from telemetry.health import GAP_NS, WINDOW_NS
from telemetry.metrics import LONGEST_FACT, ArenaCollector
from telemetry.names import EXPORTED, PAGE_ERRORS, Per, series_per_communicator, series_per_queue
from telemetry.reader import MAX_QUEUES, Watcher
from tests.support import ranks
from tests.support.fleet import Fleet, Here, attach, create, drain, enqueue, eventually, shut_down
from tests.support.scraping import Scrape, registry_of, scrape


@pytest.fixture
def collector(run_dir) -> Iterator[ArenaCollector]:
    with Watcher() as watcher:
        yield ArenaCollector(watcher)


@pytest.fixture
def fleet(run_dir) -> Iterator[Fleet]:
    with Fleet() as fleet:
        yield fleet


class Pages:
    """The pages of a queue that this test writes itself."""

    def __init__(self, run_dir: Path, name: str = "steps", n_reader: int = 2) -> None:
        self.directory = queue_directory(run_dir, name, "x")
        about = {"queue": name, "n_reader": n_reader, "slots": 8, "slot_bytes": 1024, "views": "readonly"}
        self._common: dict[str, Any] = {"n_reader": n_reader, "about": about}
        self.writer = Probe(self.directory / "writer", Role.WRITER, rank=0, slots=8, **self._common)
        self.readers = [self.attach(rank) for rank in range(n_reader)]

    def attach(self, rank: int, incarnation: str = "a") -> Probe:
        path = reader_page(self.directory, rank, os.getpid(), incarnation)
        return Probe(path, Role.READER, rank=rank, slots=0, **self._common)

    @staticmethod
    def count(probe: Probe, amount: int, name: str, *labels: object) -> None:
        probe.count(probe.word(name, *labels), amount)
        probe.flush(time.monotonic_ns())

    def wait(self, *pending: int, since_ns: int, until_ns: int, alone_since_ns: int = 0) -> None:
        """Let the writer's page say that it waits."""
        mask = sum(1 << rank for rank in pending)
        for now_ns in (since_ns, until_ns):
            self.writer.waiting(2, now_ns, 0, mask, pending[0] + 1, alone_since_ns)


def rank_page(run_dir: Path, rank: int, group: str = "tp", instance: str = "x", **about: Any) -> Probe:
    """The page of a communicator's rank that this test writes itself."""
    directory = run_dir / f"allreduce-{group}@{instance}"
    directory.mkdir(exist_ok=True)
    about = {"world": 2, "device": "cpu", "paths": ["cpu_one_shot", "gloo"], "plan": "default"} | about
    return Probe(directory / f"rank-{rank}", Role.COMMUNICATOR, rank=rank, n_reader=0, slots=0, about=about)


SECOND = 1_000_000_000


def try_to_attach(here: Here, handle: Handle, rank: int) -> str:
    """Attach; what was in the way, as the rank of a reader whose death nobody noticed yet."""
    try:
        attach(here, handle, rank)
    except AttachRefused as refused:
        return str(refused)
    return ""


# --- every series ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("readers", [1, 4, 8, 17])
def test_a_scrape_has_the_series_that_the_declarations_say(run_dir, collector, readers):
    with MessageQueue(readers, config=QueueConfig(name="steps")) as writer:
        handle = writer.export_handle()
        ends = [MessageQueue.create_from_handle(handle, rank) for rank in range(readers)]
        found = scrape(collector)
        of_queue = [name for name, labels in found.samples if ("queue", "steps") in labels]
        assert len(of_queue) == series_per_queue(readers)
        own = sum(one.series(0) for one in EXPORTED.values() if one.per is Per.EXPORTER)
        assert len(found.samples) - len(of_queue) == own
        for end in ends:
            end.shutdown()


def test_every_metric_is_there(run_dir, collector):
    Pages(run_dir)
    rank_page(run_dir, 0)
    families = {family.name: family for family in collector.collect()}
    for exported in EXPORTED.values():
        name = exported.full_name.removesuffix("_total").removesuffix("_info")
        assert (families[name].type, families[name].documentation) == (exported.kind, exported.help)
        for sample in families[name].samples:
            assert sample.name.startswith(exported.full_name)
            assert set(sample.labels) - {"le"} == set(exported.label_names)


def test_both_formats_parse_and_have_no_created(run_dir, collector):
    Pages(run_dir)
    registry = registry_of(collector)
    plain, open_metrics = generate_latest(registry).decode(), openmetrics(registry).decode()
    assert "_created" not in plain + open_metrics
    assert open_metrics.endswith("# EOF\n")
    names = {family.name for family in parse_openmetrics(open_metrics)}
    assert {"arena_writer_blocked_seconds", "arena_build", "arena_queue_delay_seconds"} <= names


def test_values_of_a_real_queue_arrive(fleet, collector):
    writer, reader = fleet.start(), fleet.start()
    reader.call(attach, writer.call(create, 1, name="steps", slots=4), 0)
    writer.call(enqueue, *range(3))
    reader.call(drain, 2)
    found = scrape(collector)
    assert found.value("messages_consumed_total", queue="steps", reader=0) == 2
    assert found.value("reader_lag_messages", queue="steps", reader=0) == 1
    assert 0 < found.value("reader_lag_seconds", queue="steps", reader=0) < 30
    assert found.value("ring_slots", queue="steps") == 4
    assert found.value("ring_slots_used", queue="steps") == 1
    assert found.value("writer_up", queue="steps") == found.value("reader_up", queue="steps", reader=0) == 1
    assert abs(found.value("writer_start_time_seconds", queue="steps") - time.time()) < 60
    assert found.value("exporter_pages") == 2
    ((info, one),) = found.all("reader_info", queue="steps")
    assert (info["pid"], info["liveness"], one) == (str(reader.pid), "alive", 1)
    ((info, one),) = found.all("queue_info", queue="steps")
    assert (info["n_reader"], info["slots"], info["views"], one) == ("1", "4", "readonly", 1)


def test_seconds_are_seconds_and_what_both_ends_keep_is_added_up(run_dir, collector):
    pages = Pages(run_dir)
    pages.count(pages.readers[1], 1_500_000_000, "reader_starved_seconds_total")
    for probe, amount in ((pages.writer, 1), (pages.readers[0], 10), (pages.readers[1], 100)):
        pages.count(probe, amount, "parks_total")
        pages.count(probe, amount, "errors_total", "timeout")
    found = scrape(collector)
    assert found.by("reader", "reader_starved_seconds_total", queue="steps") == {"0": 0, "1": 1.5}
    assert found.value("parks_total", queue="steps") == 111
    assert found.value("errors_total", queue="steps", kind="timeout") == 111
    assert found.value("errors_total", queue="steps", kind="decode") == 0


def histogram(found: Scrape, name: str, **labels: object) -> dict[str, float]:
    return found.by("le", f"{name}_bucket", **labels)


def test_a_histogram_of_seconds_leaves_in_powers_of_four(run_dir, collector):
    pages = Pages(run_dir)
    word = pages.writer.word("writer_wait_seconds")
    for nanoseconds in (1, 1023, 1024, 5000, 1 << 36):
        pages.writer.observe(word, nanoseconds)
    pages.writer.flush(1)
    found = scrape(collector)
    buckets = histogram(found, "writer_wait_seconds", queue="steps")
    assert list(buckets)[:2] == ["1.024e-06", "4.096e-06"]
    assert list(buckets)[-2:] == ["68.719476736", "+Inf"]
    assert list(buckets.values())[:4] == [2, 3, 4, 4]
    assert (buckets["68.719476736"], buckets["+Inf"]) == (4, 5)
    assert found.value("writer_wait_seconds_count", queue="steps") == 5
    total = 1 + 1023 + 1024 + 5000 + (1 << 36)
    assert found.value("writer_wait_seconds_sum", queue="steps") == pytest.approx(total / 1e9)


def test_a_histogram_of_slots_counts_what_is_at_most_its_edge(run_dir, collector):
    pages = Pages(run_dir)
    for slots in range(9):
        pages.writer.observe(pages.writer.word("ring_occupancy_slots"), slots)
    pages.writer.flush(1)
    buckets = histogram(scrape(collector), "ring_occupancy_slots", queue="steps")
    assert {float(edge): count for edge, count in buckets.items()} == {
        0: 1, 1: 2, 3: 4, 7: 8, 15: 9, 31: 9, 63: 9, float("inf"): 9
    }  # fmt: skip


def test_above_16_readers_histograms_are_added_up(run_dir, collector):
    pages = Pages(run_dir, n_reader=17)
    for rank in (3, 16):
        pages.readers[rank].observe(pages.readers[rank].word("queue_delay_seconds"), 2000)
        pages.readers[rank].flush(1)
    found = scrape(collector)
    assert found.value("queue_delay_seconds_count", queue="steps") == 2
    assert found.value("reader_starved_seconds_total", queue="steps", reader=16) == 0


def test_no_value_is_lost_between_page_and_buckets(run_dir, collector):
    pages = Pages(run_dir, n_reader=1)
    for count, bit_length in enumerate(range(BUCKETS), 1):
        pages.writer.observe(pages.writer.word("memcpy_seconds", "write"), (1 << bit_length) >> 1)
        pages.writer.flush(1)
        buckets = list(histogram(scrape(collector), "memcpy_seconds", queue="steps", op="write").values())
        assert buckets == sorted(buckets)
        assert buckets[-1] == count


def test_the_oldest_block_in_a_gate_has_an_age(run_dir, collector):
    pages = Pages(run_dir)
    pages.readers[1].gauge(pages.readers[1].word("gate_oldest_since_nanoseconds"), time.monotonic_ns() - 3 * SECOND)
    pages.readers[1].flush(1)
    ages = scrape(collector).by("reader", "dma_gate_oldest_age_seconds", queue="steps")
    assert ages["0"] == 0
    assert 3 <= ages["1"] < 30


# --- counters never fall ---------------------------------------------------------------------------------------------


def test_counts_go_on_when_a_reader_is_replaced(run_dir, collector):
    pages = Pages(run_dir)
    pages.count(pages.readers[0], 5, "parks_total")
    pages.count(pages.readers[0], 7 * SECOND, "reader_starved_seconds_total")
    pages.readers[0].gauge(pages.readers[0].word("segment_pinned"), 4)
    pages.readers[0].observe(pages.readers[0].word("queue_delay_seconds"), 2000)
    pages.readers[0].flush(1)
    scrape(collector)
    pages.readers[0].unlink()
    again = pages.attach(0, "b")
    pages.count(again, 2, "parks_total")
    pages.count(again, SECOND, "reader_starved_seconds_total")
    found = scrape(collector)
    assert found.value("parks_total", queue="steps") == 7
    assert found.value("reader_starved_seconds_total", queue="steps", reader=0) == 8
    assert found.value("queue_delay_seconds_count", queue="steps", reader=0) == 1
    assert found.value("segment_pinned", queue="steps", reader=0) == 0, "a gauge is of its process"


def test_a_queues_sums_keep_what_a_reader_that_left_had_counted(run_dir, collector):
    pages = Pages(run_dir)
    pages.count(pages.readers[1], 5, "parks_total")
    scrape(collector)
    pages.readers[1].unlink()
    for _ in range(2):
        found = scrape(collector)
        assert found.value("parks_total", queue="steps") == 5
        assert list(found.by("reader", "reader_starved_seconds_total", queue="steps")) == ["0"]
    pages.attach(1, "b")
    assert scrape(collector).value("parks_total", queue="steps") == 5


def test_an_incarnation_that_comes_into_sight_again_is_not_counted_twice(run_dir, collector):
    pages = Pages(run_dir)
    pages.count(pages.readers[0], 5, "parks_total")
    scrape(collector)
    hidden = pages.readers[0].path.rename(pages.directory / "hidden")
    assert scrape(collector).value("parks_total", queue="steps") == 5
    hidden.rename(pages.readers[0].path)
    assert scrape(collector).value("parks_total", queue="steps") == 5
    pages.count(pages.readers[0], 1, "parks_total")
    assert scrape(collector).value("parks_total", queue="steps") == 6


def test_a_killed_reader_is_not_gone_once_its_successor_has_left_in_order(fleet, collector):
    writer, first, second = (fleet.start() for _ in range(3))
    handle = writer.call(create, 1, name="steps", slots=8)
    first.call(attach, handle, 0)
    writer.call(enqueue, 1, 2)
    first.call(drain, 2)
    first.kill()
    counted = scrape(collector).value("parks_total", queue="steps")
    assert scrape(collector).value("reader_up", queue="steps", reader=0) == 0
    eventually(lambda: not second.call(try_to_attach, handle, 0))
    assert scrape(collector).value("reader_up", queue="steps", reader=0) == 1
    second.call(shut_down)
    found = scrape(collector)
    assert found.by("reader", "reader_up", queue="steps") == {}
    assert found.by("reader", "reader_verdict", queue="steps") == {}
    assert found.value("parks_total", queue="steps") < counted + 5
    assert scrape(collector).value("parks_total", queue="steps") == found.value("parks_total", queue="steps")


def test_a_new_queue_of_the_same_name_counts_anew(run_dir, collector):
    for _ in range(2):
        with MessageQueue(1, config=QueueConfig(name="steps")) as writer:
            reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
            writer.enqueue(None)
            reader.dequeue()
            assert scrape(collector).value("messages_consumed_total", queue="steps", reader=0) == 1
            reader.shutdown()


# --- blame in progress -----------------------------------------------------------------------------------------------


def blamed(collector: ArenaCollector) -> tuple[dict[str, float], dict[str, float], float]:
    found = scrape(collector)
    blocked, excess = (
        found.by("reader", f"writer_blocked_{which}seconds_total", queue="steps") for which in ("", "excess_")
    )
    return blocked, excess, found.value("writer_blocked_full_seconds_total", queue="steps")


def test_while_several_hold_the_slot_nobody_is_charged_and_all_is_full(run_dir, collector):
    pages = Pages(run_dir)
    pages.wait(0, 1, since_ns=10 * SECOND, until_ns=13 * SECOND)
    assert blamed(collector) == ({"0": 0, "1": 0}, {"0": 0, "1": 0}, 3)
    found = scrape(collector)
    assert found.value("writer_stall_in_progress_seconds", queue="steps") == 3
    assert found.by("reader", "writer_stall_pending", queue="steps") == {"0": 1, "1": 1}
    assert found.value("ring_slots_used", queue="steps") == 8


def test_once_one_alone_holds_it_it_is_charged_the_wait_and_its_excess(run_dir, collector):
    pages = Pages(run_dir)
    pages.wait(1, since_ns=10 * SECOND, until_ns=13 * SECOND, alone_since_ns=11 * SECOND)
    assert blamed(collector) == ({"0": 0, "1": 3}, {"0": 0, "1": 2}, 0)
    assert scrape(collector).by("reader", "writer_stall_pending", queue="steps") == {"0": 0, "1": 1}


def test_one_alone_whose_charge_is_not_certain_is_not_charged(run_dir, collector):
    pages = Pages(run_dir)
    pages.wait(1, since_ns=10 * SECOND, until_ns=13 * SECOND)
    assert blamed(collector) == ({"0": 0, "1": 0}, {"0": 0, "1": 0}, 0)


def test_between_the_end_of_a_wait_and_its_charge_no_counter_falls(run_dir, collector):
    pages = Pages(run_dir)
    pages.wait(1, since_ns=10 * SECOND, until_ns=13 * SECOND, alone_since_ns=11 * SECOND)
    before = blamed(collector)
    pages.writer.proceeding(1, 13 * SECOND)
    assert blamed(collector) == before
    pages.count(pages.writer, 4 * SECOND, "writer_blocked_seconds_total", 1)
    assert blamed(collector)[0] == {"0": 0, "1": 4}
    assert scrape(collector).value("writer_stall_in_progress_seconds", queue="steps") == 0


def test_a_real_stall_is_charged_while_it_lasts_and_in_the_end_about_as_much(fleet, collector):
    writer, quick, slow = (fleet.start() for _ in range(3))
    handle = writer.call(create, 2, name="steps", slots=2)
    quick.call(attach, handle, 0)
    slow.call(attach, handle, 1)
    slow.freeze()
    waiting = writer.begin(enqueue, 1, 2, 3)
    quick.call(drain, 2)
    eventually(lambda: blamed(collector)[0]["1"] > 0.3)
    seen = [blamed(collector)]
    slow.thaw()
    slow.begin(drain, 3)
    waiting.result()
    seen += [blamed(collector) for _ in range(5)]
    for reader in ("0", "1"):
        assert [one[0][reader] for one in seen] == sorted(one[0][reader] for one in seen)
        assert [one[1][reader] for one in seen] == sorted(one[1][reader] for one in seen)
    blocked, excess, full = seen[-1]
    assert blocked["0"] == excess["0"] == 0
    assert blocked["1"] > 0.3
    assert 0 < excess["1"] <= blocked["1"]
    assert excess["1"] + full == pytest.approx(blocked["1"], rel=0.01)


def test_a_reader_alone_after_another_holder_died_is_not_charged_early(fleet, collector):
    # The dead one never released the slot, and it may be the one that is charged in the end.
    writer, doomed, slow = (fleet.start() for _ in range(3))
    handle = writer.call(create, 2, name="steps", slots=2, on_reader_death="continue")
    doomed.call(attach, handle, 0)
    slow.call(attach, handle, 1)
    waiting = writer.begin(enqueue, 1, 2, 3)
    eventually(lambda: scrape(collector).value("writer_stall_pending", queue="steps", reader=0))
    doomed.kill()
    eventually(lambda: not scrape(collector).value("writer_stall_pending", queue="steps", reader=0))
    assert scrape(collector).value("writer_stall_pending", queue="steps", reader=1) == 1
    early = blamed(collector)
    slow.call(drain, 3)
    waiting.result()
    late = blamed(collector)
    assert early[0]["0"] <= late[0]["0"]
    assert early[0]["1"] <= late[0]["1"]
    assert early[0]["1"] == 0


# --- trouble ---------------------------------------------------------------------------------------------------------


def errors(found: Scrape) -> dict[str, float]:
    return {reason: count for reason, count in found.by("reason", "exporter_page_errors_total").items() if count}


def test_every_reason_is_there_from_the_start(run_dir, collector):
    assert scrape(collector).by("reason", "exporter_page_errors_total") == dict.fromkeys(PAGE_ERRORS, 0)


def test_a_bad_page_is_counted_at_each_scrape_and_told_once_until_it_is_mended(run_dir):
    told: list[str] = []
    pages = Pages(run_dir)
    with Watcher() as watcher:
        collector = ArenaCollector(watcher, told.append)
        bad = pages.directory / "reader-1-1-bad"
        for round_ in (1, 2):
            bad.write_bytes(b"not a page " * 1000)
            for _ in range(3):
                found = scrape(collector)
            assert sum(errors(found).values()) == 3 * round_
            assert len(told) == round_
            assert "reader-1-1-bad" in told[-1]
            assert found.value("exporter_pages") == 3
            bad.unlink()
            scrape(collector)


def test_too_many_queues_and_readers_are_counted_and_the_rest_is_there(run_dir, collector):
    for number in range(MAX_QUEUES):
        Pages(run_dir, f"q{number}", n_reader=1)
    wide = Pages(run_dir, "wide", n_reader=65)
    found = scrape(collector)
    assert errors(found) == {"too_many_queues": 1, "too_many_readers": 1}
    assert len(list(found.all("queue_info"))) == MAX_QUEUES
    assert len(list(found.all("reader_info", queue="wide"))) == 64
    assert len(found.by("reader", "writer_blocked_seconds_total", queue="wide")) == 64
    del wide


@pytest.mark.parametrize("name", [b"st\xffeps@x", b"st\neps@x", b'st"eps\\@x'])
def test_a_name_that_is_no_text_is_still_a_label(run_dir, collector, name):
    pages = Pages(run_dir)
    os.rename(pages.directory, os.path.join(os.fsencode(run_dir), name))
    registry = registry_of(collector)
    assert b"arena_writer_up{" in generate_latest(registry)
    assert list(parse_openmetrics(openmetrics(registry).decode()))


def test_metrics_that_nobody_declared_are_left_out(run_dir, collector):
    pages = Pages(run_dir)
    start, length = pages.writer.words[page.H_METADATA], pages.writer.words[page.H_METADATA_BYTES]
    text = bytes(pages.writer.view[start : start + length])
    renamed = text.replace(b'"parks_total"', b'"newer_total"').replace(b'"reason": "disabled"', b'"reason": "whatever"')
    renamed = renamed.replace(b'"reader": "1"', b'"reader": "x"')
    pages.writer.view[start : start + len(renamed)] = renamed
    pages.writer.words[page.H_METADATA_BYTES] = len(renamed)
    found = scrape(collector)
    assert found.value("parks_total", queue="steps") == 0
    assert "whatever" not in found.by("reason", "fallback_total", queue="steps")
    assert list(found.by("reader", "writer_blocked_seconds_total", queue="steps")) == ["0"]
    assert not [name for name, _ in found.samples if "newer" in name]


def test_where_liveness_is_unknown_nobody_is_said_to_be_up_or_down(run_dir, collector):
    pages = Pages(run_dir, n_reader=1)
    pages.readers[0].words[page.H_PID_NAMESPACE] += 1
    found = scrape(collector)
    assert found.by("reader", "reader_up", queue="steps") == {}
    assert found.value("writer_up", queue="steps") == 1
    ((info, _),) = found.all("reader_info", queue="steps")
    assert info["liveness"] == "unknown"


# --- communicators ---------------------------------------------------------------------------------------------------


def sum_up(here: Here, rank: int) -> None:
    for _ in range(3):
        here.comm.all_reduce(torch.ones(8))
    here.comm.all_reduce(torch.ones(8, dtype=torch.int64))
    here.comm.statistics()  # writes the page out


def test_values_of_a_real_communicator_arrive(run_dir, tmp_path, collector, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # without a tuned plan
    with ranks.group(2, tmp_path / "store") as workers:
        ranks.together(workers, ranks.make)
        ranks.together(workers, sum_up)
        found = scrape(collector)
        of_group = [name for name, labels in found.samples if ("group", "0") in labels]
        assert len(of_group) == series_per_communicator(2, 3)
        for rank in (0, 1):
            one = {"group": "0", "rank": rank}
            served = found.by("path", "allreduce_total", **one)
            assert served == {"cpu_one_shot": 3, "cpu_two_shot": 0, "gloo": 1}
            assert found.value("allreduce_bytes_total", path="cpu_one_shot", **one) == 3 * 32
            assert {
                reason for reason, count in found.by("reason", "allreduce_fallback_total", **one).items() if count
            } == {"dtype"}
            assert found.value("allreduce_seconds_count", path="cpu_one_shot", **one) == 1
            assert 0 < found.value("allreduce_seconds_sum", path="cpu_one_shot", **one) < 30
            ((info, is_there),) = found.all("allreduce_plan_info", **one)
            assert (info["world"], info["device"], info["plan"], is_there) == ("2", "cpu", "default", 1)
            assert info["paths"] == "cpu_one_shot,cpu_two_shot,gloo"
        assert found.value("exporter_pages") == 2


@pytest.mark.parametrize("paths", [["gloo"], ["cpu_one_shot", "gloo"], list(ALLREDUCE_PATHS), ["whatever", 3], None])
def test_only_paths_that_were_set_up_have_series(run_dir, collector, paths):
    rank_page(run_dir, 0, paths=paths)
    found = scrape(collector)
    known = [path for path in paths or [] if path in ALLREDUCE_PATHS]
    assert len([name for name, labels in found.samples if ("group", "tp") in labels]) == (
        series_per_communicator(1, len(known))
    )
    assert set(found.by("path", "allreduce_seconds_count", group="tp")) == set(known)


def test_no_counter_of_a_rank_falls_when_others_leave_or_come(run_dir, collector):
    made = [rank_page(run_dir, rank) for rank in range(3)]
    seen: dict[Any, float] = {}
    for round_, probe in enumerate(made):
        for other in made[round_:]:
            Pages.count(other, 10, "allreduce_total", "gloo")
        found = scrape(collector)
        now = {which: value for which, value in found.samples.items() if which[0] == "allreduce_total"}
        assert all(value >= seen.get(which, 0) for which, value in now.items())
        assert found.by("rank", "allreduce_total", group="tp", path="gloo") == {
            str(rank): 10 * (round_ + 1) for rank in range(round_, 3)
        }
        seen |= now
        probe.unlink()
    assert not list(scrape(collector).all("allreduce_total", group="tp"))
    assert collector._group_books == {}


def test_what_a_communicator_says_of_itself_is_cut_short(run_dir, collector):
    rank_page(run_dir, 0, plan="because " * 1000, device="\ud800")
    registry = registry_of(collector)
    ((info, _),) = scrape(collector).all("allreduce_plan_info", group="tp")
    assert len(info["plan"]) == LONGEST_FACT
    assert list(parse_openmetrics(openmetrics(registry).decode()))


# --- over and over ---------------------------------------------------------------------------------------------------


def test_scraping_again_and_again_leaves_nothing_behind(run_dir, collector):
    pages = Pages(run_dir)
    registry = registry_of(collector)

    def objects_after(scrapes: int) -> int:
        for _ in range(scrapes):
            generate_latest(registry)
        gc.collect()
        return len(gc.get_objects())

    before = objects_after(30)
    windows = len(pages.readers) * (WINDOW_NS // GAP_NS + 2)  # fill up on a slow machine, and no further
    assert objects_after(300) - before < 20 + windows
    del pages


def test_books_of_queues_that_are_gone_are_closed(run_dir, collector):
    for _ in range(3):
        with MessageQueue(1, config=QueueConfig(name="steps")):
            scrape(collector)
    scrape(collector)
    assert collector._books == {}


def labels_of(collector: Any) -> list[dict[str, str]]:
    return [sample.labels for family in collector.collect() for sample in family.samples if "le" in sample.labels]


def test_labels_are_made_once(run_dir, collector):
    pages = Pages(run_dir)
    assert all(one is other for one, other in zip(labels_of(collector), labels_of(collector), strict=True))
    del pages
