"""Traces in a store that somebody else wrote: MLflow's OTLP endpoint. Slow, and needs its server::

ARENA_MLFLOW=/path/to/environment/bin/python pytest -m stress tests/test_traces_mlflow.py
"""

import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from telemetry.traces.collector import POLL_S
from tests.support.fleet import Here, attach, create, dequeue, enqueue, shut_down
from tests.support.prometheus import free_port
from tests.support.traced import trace_off, trace_on

PYTHON = os.environ.get("ARENA_MLFLOW", "")
UP_WITHIN_S = 120
WHOLE_WITHIN_S = 120

pytestmark = [
    pytest.mark.stress,
    pytest.mark.skipif(not PYTHON, reason="ARENA_MLFLOW names no Python that has mlflow"),
]

FIND = """
import json, sys, mlflow
mlflow.set_tracking_uri(sys.argv[1])
traces = mlflow.search_traces(locations=["0"], return_type="list")
print(json.dumps([[[span.name, span.span_id, span.parent_id] for span in trace.data.spans] for trace in traces]))
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """An MLflow server with a store of its own."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [PYTHON, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    store = [
        "--backend-store-uri",
        f"sqlite:///{tmp_path}/store.db",
        "--artifacts-destination",
        str(tmp_path / "files"),
    ]
    with (tmp_path / "log").open("wb") as log:
        running = subprocess.Popen([*command, *store], cwd=tmp_path, stdout=log, stderr=log)
        try:
            wait_for(f"{url}/health", running, tmp_path / "log")
            yield url
        finally:
            running.terminate()
            running.wait(timeout=30)


def wait_for(url: str, running: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + UP_WITHIN_S
    while True:
        assert running.poll() is None and time.monotonic() < deadline, log.read_text()[-2000:]
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except OSError:
            time.sleep(0.5)


def in_experiment(here: Here, number: str) -> None:
    """MLflow wants to be told by a header to which experiment a trace belongs."""
    os.environ["OTEL_EXPORTER_OTLP_HEADERS"] = f"x-mlflow-experiment-id={number}"


def flushed(here: Here) -> None:
    """Have the spans so far made and sent."""
    time.sleep(2 * POLL_S)
    here.provider.force_flush()


def found(url: str) -> list[list[list[str]]]:
    """The spans of each trace in the store."""
    ran = subprocess.run([PYTHON, "-c", FIND, url], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    traces: list[list[list[str]]] = json.loads(ran.stdout.splitlines()[-1])
    return traces


def test_a_message_is_one_trace_in_mlflow(fleet, server):
    writer, reader = workers = [fleet.start(), fleet.start()]
    for worker in workers:
        worker.call(in_experiment, "0")
        worker.call(trace_on, server, ratio=1.0)
    reader.call(attach, writer.call(create, 1, name="steps"), 0)
    deadline = time.monotonic() + WHOLE_WITHIN_S
    whole: list[list[list[str]]] = []
    while not whole:  # its first answers take longer than a sender waits, and what it did not take by then is dropped
        assert time.monotonic() < deadline, found(server)
        writer.call(enqueue, {"step": 1})
        reader.call(dequeue)
        for worker in workers:
            worker.call(flushed)
        whole = [spans for spans in found(server) if len(spans) == 5]
    for worker in (reader, writer):
        worker.call(shut_down)
        worker.call(trace_off)
    spans = whole[0]
    parent_of = {name: parent for name, _, parent in spans}
    id_of = {name: own for name, own, _ in spans}
    assert set(id_of) == {"send steps", "serialize", "process steps", "receive", "deserialize"}
    assert parent_of["send steps"] is None
    assert parent_of["serialize"] == parent_of["process steps"] == id_of["send steps"]
    assert parent_of["receive"] == parent_of["deserialize"] == id_of["process steps"]
