"""`arena doctor`: what is wrong with the queues of this host, in sentences, and whether the machine has what they need.

Its exit code is that of a health probe: 0 healthy, 1 degraded, 2 stalled, 3 when it could not look. It answers within
a few seconds whatever hangs: what may take longer runs in a process of its own, and is left behind at a deadline.
"""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from telemetry.commands.doctor.checks import Check
    from telemetry.commands.doctor.queues import Finding
    from telemetry.monitor.facts import Moment
    from telemetry.monitor.lines import Line

COULD_NOT_LOOK = 3
PATIENCE_S = 8.0  # torch alone takes five to load and ask on a machine with two H200


def doctor(
    queue: Annotated[str | None, typer.Option(metavar="NAME", help="Explain this queue alone.")] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Print nothing: the exit code says it. Skips GPUs and stacks.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    patience: Annotated[
        float, typer.Option(metavar="S", min=0, max=600, help="How long to wait for GPUs to answer.")
    ] = PATIENCE_S,
    run_dir: Annotated[
        Path | None,
        typer.Option(help="The run directory to read; left out, the one that a queue started now would use."),
    ] = None,
) -> None:
    """Explain each queue in sentences, and check this machine.

    Says who waits for whom, since when, in what state, and what to
    try. Exit code: 0 healthy, 1 degraded, 2 stalled, 3 could not look.
    """
    from telemetry.commands.doctor import checks, queues
    from telemetry.commands.doctor.gpu import Gpus
    from telemetry.commands.sources import Refused

    deadline = time.monotonic() + patience
    gpus = None if quiet else Gpus()
    try:
        moment, verdict, findings = queues.examine(run_dir, queue, with_stacks=not quiet)
    except Refused as refused:
        if not quiet:
            typer.echo(f"arena doctor: {refused}", err=True)
        raise typer.Exit(COULD_NOT_LOOK) from None
    found = checks.of_machine(moment)
    found += gpus.checks(deadline) if gpus else []
    code = queues.severity(moment, findings, [check.failed for check in found])
    if as_json and not quiet:
        print(json.dumps(_report(moment, verdict, findings, found, code)))
    elif not quiet:
        _print(moment, verdict, findings, found, code)
    raise typer.Exit(code)


def _report(
    moment: "Moment", verdict: str, findings: "list[Finding]", found: "list[Check]", code: int
) -> dict[str, object]:
    return {
        "time": moment.wall_s,
        "source": moment.source,
        "exit_code": code,
        "state": _state(code),
        "verdict": _why(verdict, moment, findings, found, code),
        "queues": [finding.as_json() for finding in findings],
        "machine": [check.as_json() for check in found],
        "troubles": list(moment.troubles),
    }


def _why(verdict: str, moment: "Moment", findings: "list[Finding]", found: "list[Check]", code: int) -> str:
    """What comes to that exit code: the worst queue, or else what is wrong with this machine, or that all is well."""
    if code == max((one.says.severity for one in findings), default=0):
        return verdict
    failed = [check.name for check in found if check.failed]
    lacks = f"this machine has not what is needed: {', '.join(failed)}" if failed else "not everything could be read"
    return f"{lacks} · {verdict}"


def _print(moment: "Moment", verdict: str, findings: "list[Finding]", found: "list[Check]", code: int) -> None:
    from telemetry.commands.doctor.checks import lines_of
    from telemetry.commands.sources import print_lines
    from telemetry.monitor.lines import Span
    from telemetry.monitor.screen import COLOURS
    from telemetry.monitor.words import Severity

    style = f"bold {COLOURS[Severity(code)]}"
    why = _why(verdict, moment, findings, found, code)
    lines: list[Line] = [(Span(_state(code).upper(), style), Span(f": {why}", "bold"))]
    for finding in findings:
        lines += [(), *finding.lines()]
    if not findings:
        lines += [(), (Span(f"There is no queue in {moment.source}."),)]
    lines += [(Span("not read: ", "yellow"), Span(sentence)) for sentence in moment.troubles]
    print_lines([*lines, (), (Span("Machine", "bold"),), *lines_of(found)])


def _state(code: int) -> str:
    return ("healthy", "degraded", "stalled")[code]
