"""Numbers as people read them: three digits at most, the unit behind them, never wider than seven columns."""

from __future__ import annotations

from typing import Final

UNKNOWN: Final = "–"

_SECONDS: Final = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_LONGER: Final = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"))


def seconds(value: float | None) -> str:
    """A duration: 340 µs, 1.2 ms, 12 s, 3.4 min."""
    if value is None:
        return UNKNOWN
    if value <= 0:
        return "0 s"
    for unit_s, unit in _LONGER:
        if value >= 2 * unit_s:
            return f"{_digits(value / unit_s)} {unit}"
    for unit_s, unit in _SECONDS:
        if value >= 0.9995 * unit_s:
            return f"{_digits(value / unit_s)} {unit}"
    return "<1 µs"


def size(value: float | None) -> str:
    """Bytes: 512 B, 1.2 MB, 34 GB."""
    return UNKNOWN if value is None else _scaled(value, ("B", "kB", "MB", "GB", "TB", "PB"))


def count(value: float | None) -> str:
    """A number of things, or a rate of them: 0.5, 12, 3.4 k, 12 M."""
    if value is None:
        return UNKNOWN
    if isinstance(value, int) and value < 1000:
        return str(value)
    return _scaled(value, ("", "k", "M", "G", "T", "P")).strip()


def share(value: float | None) -> str:
    """A part of the time: 0 %, <1 %, 34 %."""
    if value is None:
        return UNKNOWN
    return "<1 %" if 0 < value < 0.005 else f"{100 * value:.0f} %"


def _scaled(value: float, units: tuple[str, ...]) -> str:
    at = 0
    while value >= 999.5 and at < len(units) - 1:
        value, at = value / 1000, at + 1
    return f"{_digits(value)} {units[at]}"


def _digits(value: float) -> str:
    if value and value < 9.95:
        return f"{value:.1f}"
    return f"{value:.0f}"
