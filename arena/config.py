"""The settings of a queue: one frozen dataclass, one place that refuses, overridable from the environment."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from arena.errors import InvalidArgument
from arena.layout import MAX_READERS, PAGE, PAYLOAD_OFFSET

VIEWS: Final = ("readonly", "shared", "private")
ON_READER_DEATH: Final = ("raise", "continue")
_LARGEST: Final = 1 << 46
_NAME_BYTES: Final = 200  # a memfd carries the name, and may have 249 bytes


@dataclass(frozen=True)
class QueueConfig:
    """Settings of a queue, chosen by its writer. ``ARENA_<NAME>`` in the environment overrides a field.

    Attributes:
        name: what the queue is called in metrics, traces and errors.
        slots: frames the ring holds; the writer waits for the slowest reader when it is full.
        slot_bytes: bytes of one slot, header included. A frame that fits rides inline.
        max_arena_bytes: limit of shared memory for tensors; 0 sends them through the ring in fragments.
        segment_bytes: the arena grows by segments of this size, or of one larger tensor.
        min_block_bytes: tensors and buffers from this size up go to a block of their own.
        max_message_bytes: larger messages are refused.
        max_holds: how many (message, block) pairs may be out at once.
        views: what readers get of a tensor in the arena. "readonly": zero-copy, an in-place write is a
            segmentation fault (numpy arrays refuse it properly); "shared": zero-copy and writable, one reader's
            write is everybody's; "private": a writable copy of each reader's own.
        prefault: make the first segment at the start, and every segment with all its pages at once; readers map what
            is there when they attach.
        huge_pages: back large blocks with huge pages where the kernel can (MADV_COLLAPSE).
        on_reader_death: "raise" tells the writer once per death, before it sends; "continue" only counts it.
        probes: keep a probe page for telemetry.
        stall_warning_s: a wait for a slot that lasts this long is reported through `on_warning`, once.
        run_dir: where probe pages and the attach socket live; see `arena.probe.directory`.
    """

    name: str = "queue"
    slots: int = 64
    slot_bytes: int = 16 << 10
    max_arena_bytes: int = 2 << 30
    segment_bytes: int = 64 << 20
    min_block_bytes: int = 64 << 10
    max_message_bytes: int = 4 << 30
    max_holds: int = 1024
    views: str = "readonly"
    prefault: bool = False
    huge_pages: bool = True
    on_reader_death: str = "raise"
    probes: bool = True
    stall_warning_s: float = 1.0
    run_dir: str | None = None

    def __post_init__(self) -> None:
        for name, least, most in (
            ("slots", 2, 1 << 14),
            ("slot_bytes", PAYLOAD_OFFSET + 192, 1 << 30),
            ("max_arena_bytes", 0, _LARGEST),
            ("segment_bytes", PAGE, _LARGEST),
            ("min_block_bytes", 1, _LARGEST),
            ("max_message_bytes", 1, _LARGEST),
            ("max_holds", 1, 1 << 20),
        ):
            _check_int(name, getattr(self, name), least, most)
        for name, choices in (("views", VIEWS), ("on_reader_death", ON_READER_DEATH)):
            if getattr(self, name) not in choices:
                raise _refused(name, " or ".join(map(repr, choices)), getattr(self, name))
        if self.slot_bytes % 64:
            raise _refused(
                "slot_bytes", "a multiple of 64, so that slots keep off each other's cache lines", self.slot_bytes
            )
        given: Any = self.name
        name_bytes = len(given.encode()) if isinstance(given, str) and given.isprintable() else 0
        if not 0 < name_bytes <= _NAME_BYTES:
            raise _refused("name", f"a printable name of at most {_NAME_BYTES} bytes", self.name)
        for switch in ("prefault", "huge_pages", "probes"):
            if not isinstance(getattr(self, switch), bool):
                raise _refused(switch, "True or False", getattr(self, switch))
        if not isinstance(self.run_dir, (str, os.PathLike, type(None))):
            raise _refused("run_dir", "a path or None", self.run_dir)
        if not _is_number(self.stall_warning_s) or not self.stall_warning_s > 0:
            raise _refused("stall_warning_s", "seconds above 0", self.stall_warning_s)

    def from_environment(self) -> QueueConfig:
        """This configuration with ``ARENA_*`` variables laid over it.

        Raises:
            InvalidArgument: a variable is not of its field's type, or outside its range.
        """
        changes: dict[str, Any] = {}
        for field in fields(self):
            text = os.environ.get(f"ARENA_{field.name.upper()}")
            if text is not None:
                changes[field.name] = _parsed(field.name, text, getattr(type(self), field.name))
        return replace(self, **changes) if changes else self


def _parsed(name: str, text: str, default: object) -> object:
    if isinstance(default, bool):
        known = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
        if text.lower() not in known:
            raise _refused(f"ARENA_{name.upper()}", "1 or 0", text)
        return known[text.lower()]
    try:
        return type(default)(text) if isinstance(default, (int, float)) else text
    except ValueError:
        raise _refused(f"ARENA_{name.upper()}", f"a {type(default).__name__}", text) from None


def check_readers(n_reader: object, n_local_reader: object) -> int:
    """The number of readers, if it is one."""
    count = _check_int("n_reader", n_reader, 1, MAX_READERS)
    if n_local_reader is not None and _check_int("n_local_reader", n_local_reader, 0, count) != count:
        raise InvalidArgument(
            "readers on other hosts are not part of this version",
            expected=f"n_local_reader == n_reader == {count}",
            found=f"n_local_reader == {n_local_reader}",
            remedy="attach every reader on the writer's host",
        )
    return count


def check_timeout(timeout: object) -> float | None:
    """A timeout in seconds: None for none, else a number from 0 up."""
    if timeout is None:
        return None
    if not _is_number(timeout) or math.isnan(timeout) or timeout < 0:  # type: ignore[arg-type, operator]
        raise _refused("timeout", "seconds from 0 up, or None to wait for ever", timeout)
    return min(float(timeout), 1e9)  # type: ignore[arg-type]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_int(name: str, value: object, least: int, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise _refused(name, f"a whole number from {least} to {most}", value)
    return value


def _refused(name: str, expected: str, found: object) -> InvalidArgument:
    return InvalidArgument(f"{name} is out of range", expected=expected, found=repr(found))
