"""`arena dashboards`: write the dashboards, the rules and what starts them into a directory."""

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

import telemetry

SHIPPED_RUNBOOK = "http://localhost:8000/README.md"
SHIPPED_DATASOURCE = "prometheus"

_BUNDLED = (".json", ".yml", ".md")


def dashboards(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where to write the bundle; made if it is not there.")],
    datasource: Annotated[
        str, typer.Option(metavar="UID", help="The uid of the Prometheus data source in your Grafana.")
    ] = SHIPPED_DATASOURCE,
    runbook: Annotated[
        str, typer.Option(metavar="URL", help="Where you keep the bundle's README.md, for the links to it.")
    ] = SHIPPED_RUNBOOK,
) -> None:
    """Write Grafana dashboards, Prometheus rules, provisioning and the runbook."""
    if not re.fullmatch(r"[\w-]{1,40}", datasource, re.ASCII):
        _refuse(f"--datasource takes a uid of letters, digits, - and _, at most 40, not {datasource!r}")
    if not re.fullmatch(r"https?://[^\s\"'<>()]+", runbook):
        _refuse(f"--runbook takes a URL, not {runbook!r}")
    if out.exists() and not out.is_dir():
        _refuse(f"--out takes a directory, and {out} is none")
    source = _shipped()
    targets = {out / path.relative_to(source): path for path in sorted(source.rglob("*")) if path.suffix in _BUNDLED}
    _refuse_what_is_not_ours(out, source, targets)
    try:
        for target, path in targets.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(_adapted(path, datasource, runbook))
            typer.echo(f"wrote {target}")
    except OSError as error:
        _refuse(f"can't write {error.filename or out}; found {error.strerror}; name another directory with --out")


def _refuse_what_is_not_ours(out: Path, source: Path, targets: Iterable[Path]) -> None:
    """Only an earlier bundle may be overwritten: README.md and prometheus.yml are names that others use too."""
    taken = next((target for target in targets if os.path.lexists(target)), None)
    if taken is not None and _title(out) != _title(source):
        _refuse(f"{taken} is there already, and not from an earlier bundle; name a directory of its own with --out")


def _title(directory: Path) -> str:
    try:
        return (directory / "README.md").read_text().partition("\n")[0]
    except (OSError, ValueError):  # none, or not of text
        return ""


def _refuse(sentence: str) -> None:
    typer.echo(f"arena dashboards: {sentence}", err=True)
    raise typer.Exit(2)


def _shipped() -> Path:
    """In a wheel the bundle lies inside this package, in a checkout beside it."""
    package = Path(telemetry.__file__).parent
    inside = package / "dashboards"
    return inside if inside.is_dir() else package.parent / "dashboards"


def _adapted(path: Path, datasource: str, runbook: str) -> str:
    text = path.read_text().replace(SHIPPED_RUNBOOK, runbook)
    if datasource == SHIPPED_DATASOURCE:
        return text
    if path.suffix == ".json":
        return _with_datasource(text, datasource)
    return re.sub(rf"((?:uid|datasourceUid): ){SHIPPED_DATASOURCE}$", rf"\g<1>{datasource}", text, flags=re.MULTILINE)


def _with_datasource(board: str, uid: str) -> str:
    """Choose the data source in the dashboard's variable; the panels name only the variable."""
    content = json.loads(board)
    for variable in content["templating"]["list"]:
        if variable["type"] == "datasource":
            variable["current"] = {"selected": True, "text": uid, "value": uid}
    return json.dumps(content, sort_keys=True, indent=2) + "\n"
