"""The declarations are complete, and small enough for a Prometheus server."""

import pytest

from arena.probe import METRICS, Kind, Role
from telemetry import names
from telemetry.health import Verdict
from telemetry.names import (
    EXPORTED,
    INFO,
    INTERNAL,
    PAGE_ERRORS,
    SUMMED,
    Exported,
    Per,
    series_per_communicator,
    series_per_queue,
)

KINDS = {*(kind.value for kind in Kind), INFO}


def of(exported: Exported) -> str:
    return exported.name


def test_every_metric_of_the_pages_has_its_two_sentences_and_no_other_has():
    assert {metric.name for metric in METRICS} - INTERNAL == set(names._TEXTS)


def test_what_pages_declare_is_not_declared_again():
    assert {one.name for one in names.DERIVED} & {metric.name for metric in METRICS} == set()
    assert len({one.name for one in names.DERIVED}) == len(names.DERIVED)


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: f"{metric.role.value}-{metric.name}")
def test_what_leaves_is_what_the_page_declares(metric):
    if metric.name in INTERNAL:
        assert metric.name not in EXPORTED
        return
    exported = EXPORTED[metric.name]
    assert (exported.kind, exported.unit) == (metric.kind.value, metric.unit)
    if metric.role is Role.COMMUNICATOR and exported.per is not Per.COMMUNICATOR:
        return  # kept at every end, and declared with the queue's
    for label, values in metric.labels:
        assert label in exported.label_names
        if label != "reader":
            assert set(values) <= set(dict(exported.labels)[label])


@pytest.mark.parametrize("exported", EXPORTED.values(), ids=of)
def test_help_and_why_are_sentences(exported):
    for text in (exported.help, exported.why):
        assert text[0].isupper()
        assert text[-1] in ".?"
        assert "\n" not in text


@pytest.mark.parametrize("exported", EXPORTED.values(), ids=of)
def test_names_follow_prometheus(exported):
    assert exported.full_name == f"arena_{exported.name}"
    assert exported.kind in KINDS
    assert exported.name.endswith("_total") == (exported.kind == Kind.COUNTER)
    assert exported.name.endswith("_info") == (exported.kind == INFO)
    if exported.unit in ("seconds", "bytes"):
        assert exported.name.removesuffix("_total").endswith(exported.unit)


def test_no_label_is_one_that_prometheus_puts_on_itself():
    taken = {"job", "instance", "le", "quantile"}
    assert not {label for exported in EXPORTED.values() for label in exported.label_names} & taken


def test_labels_are_closed_sets_but_for_facts_that_infos_carry():
    for exported in EXPORTED.values():
        for label, values in exported.labels:
            assert bool(values) == (exported.kind != INFO), (exported.name, label)


def test_what_is_kept_at_both_ends_is_exported_once_a_queue():
    kept_twice = {one.name for one in METRICS if one.role is Role.WRITER} & {
        one.name for one in METRICS if one.role is Role.READER
    }
    assert kept_twice | {"gate_releases_total"} == SUMMED  # that one by every reader
    assert all(EXPORTED[name].per is Per.QUEUE for name in SUMMED)
    assert dict(EXPORTED["memcpy_seconds"].labels)["op"] == ("write", "read")


def test_the_verdicts_are_those_of_health():
    assert tuple(verdict.name for verdict in Verdict) == names.VERDICTS
    assert [verdict.value for verdict in Verdict] == list(range(len(names.VERDICTS)))
    assert len(set(PAGE_ERRORS)) == len(PAGE_ERRORS)


@pytest.mark.parametrize(("readers", "limit"), [(4, 500), (8, 800)])
def test_a_queue_has_few_enough_series(readers, limit):
    assert series_per_queue(readers) <= limit


@pytest.mark.parametrize(("world", "paths", "limit"), [(2, 3, 170), (8, 3, 660), (8, 6, 1210), (64, 1, 2310)])
def test_a_communicator_has_few_enough_series(world, paths, limit):
    assert series_per_communicator(world, paths) <= limit


def test_above_16_readers_a_reader_costs_less_than_half():
    assert series_per_queue(18) - series_per_queue(17) < (series_per_queue(16) - series_per_queue(15)) / 2


def test_bucket_edges_are_powers_of_four_for_time_and_fit_a_ring_for_slots():
    edges = EXPORTED["writer_wait_seconds"].edges
    assert len(edges) == 14
    assert [2**edge for edge in edges] == [1024 * 4**step for step in range(14)]
    assert [2**edge - 1 for edge in EXPORTED["ring_occupancy_slots"].edges] == [0, 1, 3, 7, 15, 31, 63]
