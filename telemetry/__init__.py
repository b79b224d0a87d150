"""Reads what arena leaves behind, and tells it to people and to monitoring systems.

Everything here works from the probe pages that a queue's processes write, so it also works while those processes are
hung, and after they are dead. `arena` knows nothing of this package.

`start_exporter` serves the metrics from a thread of this process, and `register` adds them to a registry that somebody
else serves; both need the extra `telemetry`, and load its libraries only when they are asked for.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from telemetry.exporter import register as register
    from telemetry.exporter import start_exporter as start_exporter

__version__: str


def __getattr__(name: str) -> Any:
    if name in ("register", "start_exporter"):
        from telemetry import exporter

        return getattr(exporter, name)
    # pyproject.toml is the one place that states the version; nobody pays for reading it back unless they ask.
    if name == "__version__":
        from importlib.metadata import version

        return version("arena-dataplane")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
