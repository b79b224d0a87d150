"""The seam with telemetry, and the only door between the two halves.

Arena writes probe pages and looks at nobody else's; telemetry finds and reads them, and imports nothing of
Arena but this package: the metric table, the page's layout, its reader, the run directory's rule, the names
of states.
"""

from arena.probe import hooks
from arena.probe.directory import (
    collect_garbage,
    is_alive,
    is_degraded,
    pages,
    queue_directories,
    run_directory,
)
from arena.probe.metrics import METRICS, Kind, Metric, Role
from arena.probe.page import Event, Identity, Probe, identity
from arena.probe.reader import BadPage, BlockRecord, EventRecord, ProbeReader, Sample
from arena.state import Endpoint as EndpointState

__all__ = [
    "METRICS",
    "BadPage",
    "BlockRecord",
    "EndpointState",
    "Event",
    "EventRecord",
    "Identity",
    "Kind",
    "Metric",
    "Probe",
    "ProbeReader",
    "Role",
    "Sample",
    "collect_garbage",
    "hooks",
    "identity",
    "is_alive",
    "is_degraded",
    "pages",
    "queue_directories",
    "run_directory",
]
