"""A real Prometheus for tests, and what the shipped bundle asks of one."""

from __future__ import annotations

import json
import math
import re
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

BUNDLE = Path(__file__).parent.parent.parent / "dashboards"
READY_WITHIN_S = 30.0
UNITS = {"s": 1000, "m": 60_000, "h": 3_600_000}

Labels = dict[str, str]


# --- what is shipped -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BundleQuery:
    """One expression of a dashboard or of the rules, and where it stands."""

    where: str
    expr: str
    legend: str = ""
    in_panel: bool = True

    def __str__(self) -> str:
        return self.where

    @property
    def plain(self) -> str:
        """With values in place of Grafana's variables."""
        return self.with_range("1m")

    def with_range(self, rate_interval: str) -> str:
        """The same, with this as the range that Grafana would choose."""
        text = self.expr.replace("$__rate_interval", rate_interval)
        return text.replace('"$job"', '"arena"').replace('"$queue"', '".*"')


def rules() -> list[dict[str, Any]]:
    """Every rule of rules.yml."""
    groups = yaml.safe_load((BUNDLE / "rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def alerts() -> list[dict[str, Any]]:
    """Its alerts."""
    return [rule for rule in rules() if "alert" in rule]


def bundle_queries() -> list[BundleQuery]:
    """Every expression of every panel, annotation and rule."""
    found = []
    for path in sorted(BUNDLE.glob("*.json")):
        board = json.loads(path.read_text())
        found += [BundleQuery(f"{path.stem}: {note['name']}", note["expr"]) for note in board["annotations"]["list"]]
        for panel in board["panels"]:
            found += [
                BundleQuery(f"{path.stem}: {panel['title']} {one['refId']}", one["expr"], one.get("legendFormat", ""))
                for one in panel["targets"]
            ]
    named = [(rule.get("alert") or rule["record"], rule["expr"]) for rule in rules()]
    return found + [BundleQuery(f"rules: {name}", expr, in_panel=False) for name, expr in named]


def quickened(rules_text: str, factor: int) -> str:
    """The same rules for a test without patience: every `for`, range and threshold in seconds, divided.

    A whole number above 0 that something is compared with is in seconds; rules.yml says so at its head.
    """
    text = re.sub(r"(?<=for: )\w+", lambda found: _divided(found[0], factor), rules_text)
    text = re.sub(r"\[(\w+)\]", lambda found: f"[{_divided(found[1], factor)}]", text)
    return re.sub(r"> (\d+)$", lambda found: f"> {int(found[1]) / factor:g}", text, flags=re.MULTILINE)


def _divided(duration: str, factor: int) -> str:
    return f"{int(duration[:-1]) * UNITS[duration[-1]] // factor}ms"


# --- a server --------------------------------------------------------------------------------------------------------


class Prometheus:
    """A server that runs, by its HTTP interface."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def query(self, expr: str) -> list[tuple[Labels, float]]:
        """Its value now: the labels and the value of each series."""
        found = self._get("query", query=expr)["result"]
        return [(series["metric"], float(series["value"][1])) for series in found]

    def history(self, expr: str, since: float, until: float, step_s: float) -> list[tuple[Labels, list[float]]]:
        """Its values over a time, without those that are not a number."""
        found = self._get("query_range", query=expr, start=since, end=until, step=step_s)["result"]
        values = [(series["metric"], [float(value) for _, value in series["values"]]) for series in found]
        return [(labels, numbers) for labels, given in values if (numbers := [n for n in given if not math.isnan(n)])]

    def firing(self) -> list[dict[str, Any]]:
        """Alerts that fire: labels, annotations, value."""
        return [alert for alert in self._get("alerts")["alerts"] if alert["state"] == "firing"]

    def _get(self, path: str, **parameters: object) -> Any:
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from None


@contextmanager
def prometheus(program: str, place: Path, targets: list[str], factor: int, scrape_ms: int) -> Iterator[Prometheus]:
    """Start one on the shipped configuration, made quicker; it scrapes `targets` and ends with the block."""
    config = yaml.safe_load((BUNDLE / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": f"{scrape_ms}ms", "evaluation_interval": f"{scrape_ms}ms"}
    config["scrape_configs"][0]["static_configs"] = [{"targets": targets}]
    del config["alerting"]
    (place / "prometheus.yml").write_text(yaml.safe_dump(config))
    (place / "rules.yml").write_text(quickened((BUNDLE / "rules.yml").read_text(), factor))
    port = free_port()
    command = [
        program,
        f"--config.file={place / 'prometheus.yml'}",
        f"--storage.tsdb.path={place / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
    with running(command, place / "prometheus.log", f"http://127.0.0.1:{port}/-/ready"):
        yield Prometheus(port)


@contextmanager
def running(command: list[str], log: Path, url: str) -> Iterator[None]:
    """Run a server until the end of the block, from when it answers at `url`."""
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as process:
        try:
            deadline = time.monotonic() + READY_WITHIN_S
            while not _answers(url):
                assert process.poll() is None, f"{command[0]} ended: {log.read_text()}"
                assert time.monotonic() < deadline, f"{command[0]} is not ready: {log.read_text()}"
                time.sleep(0.02)
            yield
        finally:
            process.kill()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
