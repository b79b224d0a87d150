"""What is done to the engine with the plugin, and what its telemetry says of it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from arena.probe import Event, ProbeReader
from telemetry.exporter import start_exporter
from telemetry.names import VERDICTS
from tests.support.prometheus import Prometheus, prometheus
from tests.vllm.driver import ROOT, Engine, eventually

PROMPT: Final = [[6, 28, 496]]
TOKENS: Final = 600
QUICKER: Final = 10  # the shipped alert waits for 30 s of silence and 10 s more; here for a tenth
SCRAPE_MS: Final = 500


def pages(engine: Engine, queue: str) -> list[Path]:
    """The readers' pages of one queue, by rank."""
    return sorted(engine.run_dir.glob(f"{queue}@*/reader-*"))


def queues(engine: Engine) -> list[str]:
    """The engine's queues, by name."""
    return sorted(path.name.partition("@")[0] for path in engine.run_dir.iterdir())


def queue_delays(engine: Engine) -> dict[str, dict[str, float]]:
    """From publishing to receiving, in seconds, of the last messages in the flight recorders."""
    delays = {}
    for queue in queues(engine):
        found: list[int] = []
        for path in pages(engine, queue):
            with ProbeReader(path) as page:
                found += [event.a for event in page.events() if event.kind == Event.CONSUME]
        if len(found) >= 2:
            cuts = statistics.quantiles(found, n=100)
            delays[queue] = {"p50": cuts[49] / 1e9, "p99": cuts[98] / 1e9, "messages": len(found)}
    return delays


def stop_a_worker(own: Engine, arena: Engine, place: Path) -> dict[str, Any]:
    """SIGSTOP to worker 1: who says so? Then it goes on, and so do the tokens.

    Once amid its work, where the others wait for it in a collective and the engine sends nothing more; and once before
    a request, which then waits for it on the queue.
    """
    expected = own.generate(PROMPT, TOKENS)["tokens"]
    (path,) = [path for path in pages(arena, "vllm:broadcast") if path.name.startswith("reader-1-")]
    pid = int(path.name.split("-")[2])
    report: dict[str, Any] = {"pid": pid}
    with start_exporter(0, run_dir=arena.run_dir) as exporter, _prometheus(place, exporter.port) as server:
        with ProbeReader(path) as page:
            arena.begin(PROMPT, TOKENS)
            began = page.sequence
            eventually(lambda: page.sequence > began + 20, "the engine works on the request")
        with _stopped(pid):
            report["said"] = eventually(lambda: _named(arena, pid), "arena top names the stopped worker")
            report["top"] = True
            report["metrics"] = bool(eventually(lambda: _verdict(server), "a metric that says STOPPED for reader 1"))
        report["same_tokens"] = arena.answer()["tokens"] == expected
        with _stopped(pid):
            arena.begin(PROMPT, TOKENS)
            alerts = eventually(lambda: _fired(server, pid), "the alert ReaderStuck for the stopped worker")
        report["same_tokens"] &= arena.answer()["tokens"] == expected
    report["alert"] = True
    report["alerts"] = sorted({one["annotations"]["summary"] for one in alerts})
    return report


@contextlib.contextmanager
def _stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def _prometheus(place: Path, port: int) -> Iterator[Prometheus]:
    """On the shipped rules, made quicker."""
    program = shutil.which("prometheus")
    assert program, "the program 'prometheus' is not installed"
    data = place / "prometheus"
    data.mkdir()
    with prometheus(program, data, [f"127.0.0.1:{port}"], QUICKER, SCRAPE_MS) as server:
        yield server


def _verdict(server: Prometheus) -> list[Any]:
    found = server.query(f'arena_reader_verdict{{queue="vllm:broadcast"}} == {VERDICTS.index("STOPPED")}')
    return [labels for labels, _ in found if labels["reader"] == "1"]


def _fired(server: Prometheus, pid: int) -> list[Any]:
    """What fires about this process, once ReaderStuck is among it."""
    alerts = [one for one in server.firing() if one["labels"].get("pid") == str(pid)]
    return alerts if any(one["labels"]["alertname"] == "ReaderStuck" for one in alerts) else []


def _named(engine: Engine, pid: int) -> str:
    """The verdict of `arena top --once --json`, if it is about this process."""
    seen = json.loads(_arena(engine, "top", "--once", "--json"))
    return str(seen["verdict"]) if f"pid {pid}" in seen["verdict"] and "STOPPED" in seen["verdict"] else ""


def kill(engine: Engine) -> dict[str, Any]:
    """SIGKILL to the front end and the engine core: what is left of it, once the workers have had a minute."""
    engine.memory()
    engine.kill()
    try:
        eventually(lambda: not engine.alive(), "the workers end by themselves")
    except AssertionError:
        pass  # it is told as what is left
    left = {"processes": engine.alive(), "shm": engine.left_in_shm()}
    _arena(engine, "gc")
    return left | {"run_dir_after_gc": sorted(path.name for path in engine.run_dir.iterdir())}


def _arena(engine: Engine, *arguments: str) -> str:
    command = [sys.executable, "-c", "from telemetry.cli import main; main()", *arguments]
    environment = os.environ | {"ARENA_RUN_DIR": str(engine.run_dir)}
    ran = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert ran.returncode in (0, 1, 2), f"arena {arguments} exited with {ran.returncode}: {ran.stderr}"
    return ran.stdout
