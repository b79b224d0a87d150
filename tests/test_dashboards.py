"""The dashboards are what their source says, valid, about metrics that exist; `arena dashboards` writes them out."""

import copy
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from telemetry.names import EXPORTED
from tests.support import promql
from tests.support.prometheus import BUNDLE, BundleQuery, alerts, bundle_queries, rules

ROOT = Path(__file__).parent.parent
BOARDS = {path.name: json.loads(path.read_text()) for path in sorted(BUNDLE.glob("*.json"))}
PANELS = [pytest.param(panel, id=panel["title"]) for board in BOARDS.values() for panel in board["panels"]]
RUNBOOK = (BUNDLE / "README.md").read_text()
SHIPPED = sorted(path for path in BUNDLE.rglob("*") if path.suffix in (".json", ".yml", ".md"))
FOREIGN = {"vllm:time_to_first_token_seconds_bucket": {"job", "instance", "model_name", "le"}}

need_sdk = pytest.mark.skipif(sys.version_info < (3, 11), reason="grafana-foundation-sdk needs Python 3.11")
# Schema v1 is what Grafana 10 to 13 load; the SDK would rather have v2.
pytestmark = pytest.mark.filterwarnings("ignore:Prefer using dashboardv2:DeprecationWarning")


# --- what is committed -----------------------------------------------------------------------------------------------


@need_sdk
def test_what_is_committed_is_what_the_sources_make_byte_for_byte():
    from dashboards import build

    made, again = build.outputs(), build.outputs()
    assert made == again
    assert made.keys() == {*BOARDS, "provisioning/alerting/arena.yml"}
    for name, text in made.items():
        assert (BUNDLE / name).read_text() == text, f"{name} is stale: run `python -m dashboards.build`"


@need_sdk
@pytest.mark.parametrize("name", BOARDS)
def test_a_dashboard_is_valid(name):
    from tests.support import grafana

    assert grafana.faults(BOARDS[name]) == []


@need_sdk
@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("panels", 5, "titel"), "x"),
        (("panels", 5, "title"), 5),
        (("panels", 5, "options", "legend", "displayMode"), "liszt"),
        (("panels", 5, "targets", 0, "expr"), 5),
        (("panels", 5, "fieldConfig", "defaults", "thresholds", "mode"), "upwards"),
        (("graphTooltip",), 7),
    ],
)
def test_a_dashboard_that_is_not_valid_is_found(place, value):
    from tests.support import grafana

    board = copy.deepcopy(BOARDS["arena-1-queue.json"])
    *path, last = place
    inner: Any = board
    for step in path:
        inner = inner[step]
    inner[last] = value
    assert grafana.faults(board)


def test_dashboards_come_in_the_order_of_somebody_on_call():
    assert [board["title"] for board in BOARDS.values()] == [
        "1 Is it the queue?",
        "2 Who blocks the ring?",
        "3 Arena, pins, DMA",
        "4 Fallbacks, all-reduce, fleet",
    ]


@pytest.mark.parametrize("name", BOARDS)
def test_a_dashboard_has_what_all_of_them_have(name):
    board = BOARDS[name]
    assert [variable["name"] for variable in board["templating"]["list"]] == ["datasource", "job", "queue"]
    assert board["graphTooltip"] == 1
    assert [note["name"] for note in board["annotations"]["list"]] == ["Reader restarts"]
    assert all(link["keepTime"] and link["includeVars"] for link in board["links"])
    assert all("placement" not in shown for shown in board["links"] + board["annotations"]["list"])  # not in a menu
    elsewhere = {f"/d/{other['uid']}" for other in BOARDS.values() if other is not board}
    assert {link["url"] for link in board["links"]} > elsewhere
    assert board["links"][-1]["title"] == "Runbook"
    assert 0 < len(board["panels"]) <= 10
    assert [panel["id"] for panel in board["panels"]] == list(range(1, len(board["panels"]) + 1))


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_asks_a_question_and_says_what_to_do(panel):
    question, bad, do, runbook = panel["description"].split("\n\n")
    assert re.fullmatch(r"\*\*.*\?.*\*\*", question)
    assert bad.startswith("Bad: ")
    assert do.startswith("Do: ")
    assert runbook.startswith("[Runbook](")
    legend = panel["options"].get("legend")
    assert legend is None or legend.get("showLegend", legend.get("show"))


@pytest.mark.parametrize("name", BOARDS)
def test_no_dashboard_knows_a_data_source_of_its_own(name):
    used = set(re.findall(r'"uid": "([^"]*)"', json.dumps(BOARDS[name])))
    assert used == {"${datasource}", BOARDS[name]["uid"]}


def test_panels_do_not_lie_on_each_other():
    for board in BOARDS.values():
        cells = [
            (x, y)
            for place in (panel["gridPos"] for panel in board["panels"])
            for x in range(place.get("x", 0), place.get("x", 0) + place["w"])
            for y in range(place.get("y", 0), place.get("y", 0) + place["h"])
        ]
        assert len(cells) == len(set(cells))
        assert all(x < 24 for x, _ in cells)


# --- expressions -----------------------------------------------------------------------------------------------------


def records() -> dict[str, set[str]]:
    """The recorded series and their labels, as their last aggregation or their metric leaves them."""
    return {
        "arena:reader:identity": {"job", "instance", "queue", "reader", "pid"},
        "arena:writer_blocked:rate1m": {"job", "instance", "queue"},
        "arena:writer_blocked_excess:rate1m": {"job", "instance", "queue", "reader"},
        "arena:fallback:ratio5m": {"job", "instance", "queue", "reason"},
        "arena:segments_unpinned:count": {"job", "instance", "queue", "reader"},
    } | FOREIGN


def test_every_recorded_series_is_known():
    assert {rule["record"] for rule in rules() if "record" in rule} == records().keys() - FOREIGN.keys()


@pytest.mark.parametrize("query", bundle_queries(), ids=str)
def test_an_expression_is_about_metrics_that_exist_and_takes_each_as_its_kind(query):
    assert promql.faults(query.plain, records()) == []


@pytest.mark.parametrize("query", [query for query in bundle_queries() if query.in_panel], ids=str)
def test_an_expression_of_a_panel_follows_the_variables(query: BundleQuery):
    assert "[]" not in query.expr
    assert set(re.findall(r"\[(.*?)\]", query.expr)) <= {"$__rate_interval"}
    for one in re.findall(r"(arena[\w:]*)\{(.*?)\}", query.expr):
        needed = {'job=~"$job"'}
        if "queue" in (promql.labels_of(one[0], records()) or ()):
            needed.add('queue=~"$queue"')
        assert needed <= set(one[1].split(", "))


@pytest.mark.parametrize(
    ("expr", "fault"),
    [
        ("arena_no_such_metric", "is no metric"),
        ("arena_writer_wait_seconds", "is no metric"),
        ("arena_ring_slots_total", "is no metric"),
        ("arena_parks_total", "taken as it is"),
        ("arena_writer_wait_seconds_count", "taken as it is"),
        ("rate(arena_ring_slots[1m])", "is a gauge in rate()"),
        ("rate(arena_parks_total)", "does not parse"),
        ("sum by (job, instance) (arena_ring_slots)", "loses ['queue']"),
        ("max(up)", "loses ['instance', 'job']"),
        ("arena_reader_up * on (queue, reader) arena_reader_info", "meets without ['instance', 'job']"),
        ('rate(arena_fallback_total{reason="full"}[1m])', "has no reason ['full']"),
        ('arena_ring_slots{reader="1"}', "has no label reader"),
    ],
)
def test_a_wrong_expression_is_found(expr, fault):
    (found,) = promql.faults(expr, records())
    assert fault in found


def test_every_metric_can_be_seen_somewhere():
    seen = " ".join(query.expr for query in bundle_queries())
    unseen = {name for name, one in EXPORTED.items() if one.full_name not in seen}
    assert unseen == {
        # facts that `arena export` and a look at the target answer
        "allreduce_plan_info",
        "queue_info",
        "exporter_pages",
        # what tuning asks for, not a person on call
        "collapse_failures_total",
        "events_dropped_total",
        "gate_releases_total",
        "holds_used",
        "parks_total",
        "pin_seconds_total",
        "segment_pinned_bytes",
        "spin_seconds_total",
        # said better by others on the same dashboard
        "allreduce_bytes_total",
        "blocks_in_gate",
        "writer_blocked_total",
        "writer_start_time_seconds",
    }


# --- alerts ----------------------------------------------------------------------------------------------------------


def test_the_alerts_and_who_is_woken():
    assert {alert["alert"]: alert["labels"]["severity"] for alert in alerts()} == {
        "WriterStalled": "page",
        "ReaderGone": "page",
        "ReaderStopped": "page",
        "ReaderStuck": "page",
        "HeadOfLineBlocking": "page",
        "FallbackRate": "ticket",
        "ArenaUnpinned": "ticket",
        "ExporterDown": "ticket",
    }


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert["alert"])
def test_an_alert_says_where_and_has_its_entry_in_the_runbook(alert):
    text = alert["annotations"]["summary"]
    assert "$labels.instance" in text
    if "reader" in alert["expr"] or "unpinned" in alert["expr"]:
        assert {"$labels.reader", "$labels.pid"} <= set(re.findall(r"\$labels\.\w+", text))
    assert alert["annotations"]["runbook_url"].endswith(f"/README.md#{alert['alert'].lower()}")
    entry = re.search(rf"^## {alert['alert']}\n(.*?)(?=^## |\Z)", RUNBOOK, re.MULTILINE | re.DOTALL)
    assert entry
    assert all(f"**{part}**" in entry[1] for part in ("Means", "Look", "Do"))


def test_the_runbook_knows_every_panel_group_and_every_reason():
    for name in dict(EXPORTED["fallback_total"].labels)["reason"]:
        assert f"| `{name}` |" in RUNBOOK
    for board in BOARDS.values():
        assert board["title"] in RUNBOOK


@pytest.mark.parametrize("alert", [alert["alert"] for alert in alerts()])
def test_an_alert_has_a_unit_test_in_which_it_fires_and_one_in_which_it_ends(alert):
    cases = [case for test in yaml.safe_load((BUNDLE / "rules_test.yml").read_text())["tests"]
             for case in test["alert_rule_test"] if case["alertname"] == alert]  # fmt: skip
    assert [bool(case["exp_alerts"]) for case in cases][:2] != [True, True]
    assert any(case["exp_alerts"] for case in cases)
    assert not cases[0]["exp_alerts"]


def test_who_is_named_already_silences_those_that_wait_behind():
    inhibited = yaml.safe_load((BUNDLE / "alertmanager.yml").read_text())["inhibit_rules"]
    assert [(rule["source_matchers"], rule["target_matchers"], rule["equal"]) for rule in inhibited] == [
        ([f'alertname="{source}"'], [f'alertname="{target}"'], ["job", "instance", "queue", *further])
        for source, target, *further in (
            ("ReaderStopped", "ReaderStuck", "reader"),
            ("ReaderGone", "HeadOfLineBlocking"),
            ("WriterStalled", "HeadOfLineBlocking"),
        )
    ]


# --- arena dashboards ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The packages as a wheel brings them, away from this checkout."""
    place = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", place]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=100)
    (wheel,) = place.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(place / "site")
    return place / "site"


def arena_dashboards(site: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    program = "import sys; sys.argv[0] = 'arena'; from telemetry.cli import main; main()"
    command = [sys.executable, "-c", program, "dashboards", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(site)}
    return subprocess.run(command, cwd=site, env=environment, capture_output=True, text=True, check=False, timeout=60)


def test_an_installed_package_writes_the_bundle(installed, tmp_path):
    wrote = arena_dashboards(installed, "--out", tmp_path / "bundle")
    assert wrote.returncode == 0, wrote.stderr
    written = {path.relative_to(tmp_path / "bundle"): path.read_text() for path in (tmp_path / "bundle").rglob("*.*")}
    assert written == {path.relative_to(BUNDLE): path.read_text() for path in SHIPPED}


def test_the_bundle_takes_a_data_source_and_a_runbook(installed, tmp_path):
    arena_dashboards(installed, "--out", tmp_path)
    arena_dashboards(installed, "--out", tmp_path, "--datasource", "mimir-7", "--runbook", "https://wiki/arena")
    board = json.loads((tmp_path / "arena-2-blame.json").read_text())
    assert board["templating"]["list"][0]["current"]["value"] == "mimir-7"
    assert [panel["datasource"]["uid"] for panel in board["panels"]] == ["${datasource}"] * 10
    assert board["links"][-1]["url"] == "https://wiki/arena"
    assert "https://wiki/arena#readergone" in (tmp_path / "rules.yml").read_text()
    source, _ = yaml.safe_load((tmp_path / "provisioning/datasources/arena.yml").read_text())["datasources"]
    assert source["uid"] == "mimir-7"
    (group,) = yaml.safe_load((tmp_path / "provisioning/alerting/arena.yml").read_text())["groups"]
    assert {rule["data"][0]["datasourceUid"] for rule in group["rules"]} == {"mimir-7"}


@pytest.mark.parametrize("name", ["README.md", "prometheus.yml"])
def test_the_bundle_overwrites_nothing_of_somebody_elses(installed, tmp_path, name):
    (tmp_path / name).write_text("# mine\n")
    refused = arena_dashboards(installed, "--out", tmp_path)
    assert refused.returncode == 2
    assert refused.stderr == (
        f"arena dashboards: {tmp_path / name} is there already, and not from an earlier bundle; "
        "name a directory of its own with --out\n"
    )
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "# mine\n")]


def test_a_place_that_can_not_be_written_is_one_clear_line(installed, tmp_path):
    (tmp_path / "file").touch()
    refused = arena_dashboards(installed, "--out", tmp_path / "file" / "bundle")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "name another directory with --out" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--datasource", "a b"], "--datasource takes a uid of letters, digits, - and _, at most 40, not 'a b'"),
        (["--runbook", "wiki"], "--runbook takes a URL, not 'wiki'"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused_in_one_line(installed, tmp_path, arguments, sentence):
    refused = arena_dashboards(installed, "--out", tmp_path / "bundle", *arguments)
    assert (refused.returncode, refused.stderr) == (2, f"arena dashboards: {sentence}\n")
    assert not (tmp_path / "bundle").exists()
