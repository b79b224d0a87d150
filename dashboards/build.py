"""Writes the four dashboards, and Grafana's form of the alerts, beside this file: `python -m dashboards.build`.

What they say is in panels.py and rules.yml; how Grafana wants to be told is here. The output is the same to the byte
each time, so that a test can compare it with what is committed.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    dashboard,
    heatmap,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as shared
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from dashboards.panels import BOARDS, Board, Panel, Query, View
from telemetry.names import EXPORTED, PREFIX

HERE = Path(__file__).parent
RUNBOOK = "http://localhost:8000/README.md"  # where compose.yml serves it; `arena dashboards --runbook` changes it
DATASOURCE = shared.DataSourceRef(type_val="prometheus", uid="${datasource}")
COLUMNS = 24
SIZES = {View.STAT: (6, 5), View.TABLE: (24, 8)}  # width and height in Grafana's grid
GREEN, ORANGE, RED = "green", "orange", "red"


# --- expressions -----------------------------------------------------------------------------------------------------


def selected(expr: str) -> str:
    """Write the variables into each selector, and the range that fits Grafana's step into each range."""
    return re.sub(r"([\w:]+)\{(.*?)\}", _selector, expr).replace("[]", "[$__rate_interval]")


def _selector(found: re.Match[str]) -> str:
    metric, matchers = found.groups()
    own = [matchers] if matchers else []
    return f"{metric}{{{', '.join(_variables_of(metric) + own)}}}"


def _variables_of(metric: str) -> list[str]:
    if not re.match("arena[_:]", metric):
        return []  # another program's, which has another job
    of_queue = metric.startswith("arena:") or "queue" in _labels(metric)
    return ['job=~"$job"', 'queue=~"$queue"'] if of_queue else ['job=~"$job"']


def _labels(metric: str) -> tuple[str, ...]:
    name = metric.removeprefix(PREFIX)
    return EXPORTED[name if name in EXPORTED else re.sub("_(bucket|sum|count)$", "", name)].label_names


# --- panels ----------------------------------------------------------------------------------------------------------


def _stat(_: Panel) -> stat.Panel:
    last = common.ReduceDataOptions().calcs(["lastNotNull"])
    named = shared.BigValueTextMode.VALUE_AND_NAME
    return stat.Panel().reduce_options(last).text_mode(named).graph_mode(shared.BigValueGraphMode.AREA)


def _legend() -> common.VizLegendOptions:
    # The SDK's default is a hidden legend, and the legend is what names the reader.
    placed = common.VizLegendOptions().show_legend(True).placement(shared.LegendPlacement.BOTTOM)
    return placed.display_mode(shared.LegendDisplayMode.LIST)


def _lines(panel: Panel) -> timeseries.Panel:
    tooltip = common.VizTooltipOptions().mode(shared.TooltipDisplayMode.MULTI).sort(shared.SortOrder.DESCENDING)
    lines = timeseries.Panel().legend(_legend()).tooltip(tooltip).min(0)
    if panel.view is View.STACK:
        lines.stacking(common.StackingConfig().mode(shared.StackingMode.NORMAL)).fill_opacity(40)
    return lines


def _bars(_: Panel) -> bargauge.Panel:
    last = common.ReduceDataOptions().calcs(["lastNotNull"])
    return bargauge.Panel().reduce_options(last).orientation(shared.VizOrientation.HORIZONTAL).min(0).legend(_legend())


def _states(panel: Panel) -> statetimeline.Panel:
    colours = [GREEN, ORANGE, RED] if len(panel.limits) > 1 else [GREEN, RED]
    options = {
        str(value): model.ValueMappingResult(text=word, color=colours[min(value, len(colours) - 1)], index=value)
        for value, word in enumerate(panel.words)
    }
    states = statetimeline.Panel().mappings([model.ValueMap(options=options)]).legend(_legend())
    return states.merge_values(True).show_value(shared.VisibilityMode.AUTO).row_height(0.8)


def _heatmap(panel: Panel) -> heatmap.Panel:
    axis = heatmap.YAxisConfig().unit(panel.unit)
    return heatmap.Panel().y_axis(axis).show_legend().calculate(False)


def _table(panel: Panel) -> table.Panel:
    # Of an info every fact is a label, and the value is always 1.
    told_by_labels = all("_info{" in query.expr for query in panel.queries)
    hidden = {"Time": True, "__name__": True, "Value": told_by_labels}
    organised = model.DataTransformerConfig(id_val="organize", options={"excludeByName": hidden})
    return table.Panel().with_transformation(organised).filterable(True)


MAKERS: dict[View, Callable[[Panel], Any]] = {
    View.STAT: _stat,
    View.LINES: _lines,
    View.STACK: _lines,
    View.BARS: _bars,
    View.STATES: _states,
    View.HEATMAP: _heatmap,
    View.TABLE: _table,
}


def _query(panel: Panel, query: Query, letter: str) -> prometheus.Dataquery:
    made = prometheus.Dataquery().datasource(DATASOURCE).expr(selected(query.expr)).ref_id(letter)
    if query.legend:
        made.legend_format(query.legend)
    if panel.view is View.TABLE:
        return made.instant().format(PromQueryFormat.TABLE)
    if panel.view is View.BARS:
        return made.instant()
    if panel.view is View.HEATMAP:
        return made.range().format(PromQueryFormat.HEATMAP).exemplar(True)
    return made.range()


def _thresholds(limits: tuple[float, ...]) -> dashboard.ThresholdsConfig:
    colours = [ORANGE, RED] if len(limits) > 1 else [RED]
    steps = [model.Threshold(value=None, color=GREEN)]
    steps += [model.Threshold(value=limit, color=colour) for limit, colour in zip(limits, colours, strict=False)]
    return dashboard.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(steps)


def _described(panel: Panel) -> str:
    return f"**{panel.question}**\n\nBad: {panel.bad}\n\nDo: {panel.do}\n\n[Runbook]({RUNBOOK})"


def _panel(panel: Panel, number: int, place: model.GridPos) -> Any:
    made = MAKERS[panel.view](panel).id(number).title(panel.title).description(_described(panel))
    made.datasource(DATASOURCE).unit(panel.unit).thresholds(_thresholds(panel.limits)).grid_pos(place)
    for query, letter in zip(panel.queries, "ABCDEFGH", strict=False):
        made.with_target(_query(panel, query, letter))
    return made


def _places(panels: tuple[Panel, ...]) -> Iterator[model.GridPos]:
    """Left to right, a new row where the next does not fit."""
    x = y = row = 0
    for panel in panels:
        width, height = SIZES.get(panel.view, (12, 8))
        if x + width > COLUMNS:
            x, y, row = 0, y + row, 0
        yield model.GridPos(h=height, w=width, x=x, y=y)
        x, row = x + width, max(row, height)


# --- dashboards ------------------------------------------------------------------------------------------------------


def _variables() -> list[Any]:
    source = dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
    return [
        source,
        _variable("job", "label_values(arena_ring_slots, job)"),
        _variable("queue", 'label_values(arena_ring_slots{job=~"$job"}, queue)'),
    ]


def _variable(name: str, query: str) -> dashboard.QueryVariable:
    everything = model.VariableOption(selected=True, text="All", value="$__all")
    made = dashboard.QueryVariable(name).label(name.capitalize()).datasource(DATASOURCE).query(query)
    made.definition(query).refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
    made.sort(model.VariableSort.ALPHABETICAL_ASC)
    return made.multi(True).include_all(True).all_value(".*").current(everything)


def _restarts() -> dashboard.AnnotationQuery:
    """A line at the moment that each reader attached, which after the first time is a restart."""
    expr = selected("arena_reader_start_time_seconds{} * 1000")
    made = dashboard.AnnotationQuery().name("Reader restarts").datasource(DATASOURCE).enable(True).icon_color("blue")
    made.expr(expr).use_value_for_time(True).step("60s")
    return made.title_format("Reader started").text_format("{{queue}} reader {{reader}}").tag_keys("queue,reader")


def _link(title: str, url: str) -> dashboard.DashboardLink:
    return dashboard.DashboardLink(title).type(model.DashboardLinkType.LINK).url(url).keep_time(True).include_vars(True)


def dashboard_of(board: Board) -> str:
    """The JSON of one dashboard."""
    made = dashboard.Dashboard(board.title).uid(board.uid).description(board.description).tags(["arena"])
    made.refresh("10s").time("now-30m", "now").timezone("browser").readonly()
    made.tooltip(model.DashboardCursorSync.CROSSHAIR).variables(_variables()).annotation(_restarts())
    for other in BOARDS:
        if other is not board:
            made.link(_link(other.title, f"/d/{other.uid}"))
    made.link(_link("Runbook", RUNBOOK).target_blank(True))
    for number, (panel, place) in enumerate(zip(board.panels, _places(board.panels), strict=True), 1):
        made.with_panel(_panel(panel, number, place))
    return JSONEncoder(sort_keys=True, indent=2).encode(_in_sight(made.build())) + "\n"


def _in_sight(made: model.Dashboard) -> model.Dashboard:
    """Links and the switch of the annotation: the SDK's default puts them into a menu, where nobody on call looks."""
    for shown in [*(made.links or []), *(made.annotations.list_val or [])]:
        shown.placement = None
    return made


# --- alerts for Grafana's own alerting -------------------------------------------------------------------------------


def grafana_alerts(rules: dict[str, Any]) -> str:
    """The alerts of rules.yml for those who let Grafana evaluate and notify instead of Alertmanager."""
    alerts = [rule for group in rules["groups"] for rule in group["rules"] if "alert" in rule]
    group = {
        "orgId": 1,
        "name": "arena",
        "folder": "Arena",
        "interval": "10s",
        "rules": [_grafana_alert(rule) for rule in alerts],
    }
    note = "# Made by `python -m dashboards.build` from ../../rules.yml. Use this or Alertmanager, not both.\n"
    return note + yaml.safe_dump({"apiVersion": 1, "groups": [group]}, sort_keys=False, width=120)


def _grafana_alert(rule: dict[str, Any]) -> dict[str, Any]:
    # The expression filters by itself, and what it lets through may be 0: anything that is there fires.
    there = {"evaluator": {"type": "gt", "params": [-1]}}
    threshold = {"refId": "fires", "type": "threshold", "expression": "value", "conditions": [there]}
    query = {"refId": "value", "expr": rule["expr"].strip(), "instant": True}
    return {
        "uid": "arena-" + rule["alert"].lower(),
        "title": rule["alert"],
        "condition": "fires",
        "for": rule["for"],
        "noDataState": "OK",
        "execErrState": "Error",
        "labels": rule["labels"],
        "annotations": {
            name: text.strip().replace("$value", "$values.value.Value") for name, text in rule["annotations"].items()
        },
        "data": [
            {
                "refId": "value",
                "datasourceUid": "prometheus",
                "relativeTimeRange": {"from": 600, "to": 0},
                "model": query,
            },
            {"refId": "fires", "datasourceUid": "__expr__", "model": threshold},
        ],
    }


def outputs() -> dict[str, str]:
    """Every file that is made here, by its path below this directory."""
    rules = yaml.safe_load((HERE / "rules.yml").read_text())
    made = {f"{board.uid}.json": dashboard_of(board) for board in BOARDS}
    return made | {"provisioning/alerting/arena.yml": grafana_alerts(rules)}


if __name__ == "__main__":
    for name, text in outputs().items():
        (HERE / name).parent.mkdir(parents=True, exist_ok=True)
        (HERE / name).write_text(text)
