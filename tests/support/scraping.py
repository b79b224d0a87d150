"""Metrics as a test wants to ask for them: by name and labels."""

import urllib.request
from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families


class Scrape:
    """Everything that one scrape gave."""

    def __init__(self, families: Iterable[Any]) -> None:
        self.samples = {
            (sample.name.removeprefix("arena_"), tuple(sorted(sample.labels.items()))): sample.value
            for family in families
            for sample in family.samples
        }

    def value(self, name: str, /, **labels: object) -> float:
        """The one sample with these labels."""
        return self.samples[name, tuple(sorted((label, str(value)) for label, value in labels.items()))]

    def by(self, label: str, name: str, /, **labels: object) -> dict[str, float]:
        """The values of a metric by one of its labels, the others given."""
        return {found[label]: value for found, value in self.all(name, **labels)}

    def all(self, name: str, /, **labels: object) -> Iterator[tuple[dict[str, str], float]]:
        """Every sample of a name that has these labels, and perhaps more."""
        wanted = {(label, str(value)) for label, value in labels.items()}
        for (found, pairs), value in self.samples.items():
            if found == name and wanted <= set(pairs):
                yield dict(pairs), value


def scrape(source: Any) -> Scrape:
    """Scrape an exporter over HTTP, or a collector directly."""
    if not hasattr(source, "url"):
        return Scrape(source.collect())
    with urllib.request.urlopen(source.url, timeout=10) as answer:
        assert answer.status == 200
        return Scrape(text_string_to_metric_families(answer.read().decode()))


def registry_of(collector: Any) -> CollectorRegistry:
    """A registry with this collector alone."""
    registry = CollectorRegistry()
    registry.register(collector)
    return registry
