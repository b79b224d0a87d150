"""The seam with telemetry, and the only door between the two halves.

Arena writes probe pages and looks at nobody else's; telemetry finds and reads them, and imports nothing of
Arena but this package: the metric table, the page's layout, its reader, the run directory's rule, the names
of states.
"""

from arena.errors import ArenaError, RunDirectoryError
from arena.probe import hooks
from arena.probe.directory import (
    ENDED,
    collect_garbage,
    is_alive,
    is_degraded,
    observed_directory,
    owners,
    pages,
    process_state,
    queue_directories,
    run_directory,
)
from arena.probe.metrics import (
    ALLREDUCE_PATHS,
    BUCKETS,
    COPY_MODES,
    ERROR_KINDS,
    FALLBACK_REASONS,
    HISTOGRAM_WORDS,
    METRICS,
    OPERATIONS,
    PATHS,
    READER_LABEL,
    REFUSALS,
    Kind,
    Metric,
    Role,
)
from arena.probe.page import MODE_BITS, PATH_BITS, Event, Identity, Probe, identity
from arena.probe.reader import BadPage, BlockRecord, EventRecord, PageSeries, ProbeReader, Sample, Wait, published_at
from arena.state import Endpoint as EndpointState

__all__ = [
    "ALLREDUCE_PATHS",
    "BUCKETS",
    "COPY_MODES",
    "ENDED",
    "ERROR_KINDS",
    "FALLBACK_REASONS",
    "HISTOGRAM_WORDS",
    "METRICS",
    "MODE_BITS",
    "OPERATIONS",
    "PATHS",
    "PATH_BITS",
    "READER_LABEL",
    "REFUSALS",
    "ArenaError",
    "BadPage",
    "BlockRecord",
    "EndpointState",
    "Event",
    "EventRecord",
    "Identity",
    "Kind",
    "Metric",
    "PageSeries",
    "Probe",
    "ProbeReader",
    "Role",
    "RunDirectoryError",
    "Sample",
    "Wait",
    "collect_garbage",
    "hooks",
    "identity",
    "is_alive",
    "is_degraded",
    "observed_directory",
    "owners",
    "pages",
    "process_state",
    "published_at",
    "queue_directories",
    "run_directory",
]
