"""What can go wrong, by class. Each error says what was expected, what was found, and what to do.

All of them derive from :class:`ArenaError`, and from the built-in exception that a caller who never heard
of Arena would catch: a timeout is a ``TimeoutError``, a bad argument a ``ValueError``, and so on.
"""

from __future__ import annotations

__all__ = [
    "ArenaError",
    "AttachRefused",
    "CommunicatorClosed",
    "CorruptFrame",
    "DecodeFailed",
    "EncodeFailed",
    "HandleMismatch",
    "InvalidArgument",
    "MessageTooLarge",
    "MissingLibrary",
    "NoReader",
    "OperandMismatch",
    "OutOfDescriptors",
    "OutOfMemory",
    "PeerDied",
    "PinFailed",
    "QueueClosed",
    "QueueTimeout",
    "RankMissing",
    "ReentrantUse",
    "RunDirectoryError",
    "SetUpFailed",
    "UnsupportedPlatform",
    "UseAfterFork",
    "WrongEnd",
]


class ArenaError(Exception):
    """Base of everything Arena raises on purpose.

    ``expected``, ``found`` and ``remedy`` are kept apart so that a caller can show or log them separately;
    ``str(error)`` is one readable sentence made of all of them.
    """

    def __init__(self, summary: str, *, expected: str = "", found: str = "", remedy: str = "") -> None:
        parts = [summary]
        if expected:
            parts.append(f"expected {expected}")
        if found:
            parts.append(f"found {found}")
        if remedy:
            parts.append(remedy)
        super().__init__("; ".join(parts))
        self.expected = expected
        self.found = found
        self.remedy = remedy


class InvalidArgument(ArenaError, ValueError):
    """A setting or an argument of the wrong type or outside its range."""


class QueueTimeout(ArenaError, TimeoutError):
    """The deadline passed. Nothing was sent or taken; the next call starts where this one did."""


class QueueClosed(ArenaError):
    """The queue was shut down, by this end or by the other."""


class NoReader(QueueClosed):
    """Nobody is left to read what the writer would send."""


class PeerDied(ArenaError, ConnectionError):
    """A peer's process ended without leaving. Raised once per death; the next call goes on without it.

    ``rank`` is the reader's rank, or None for the writer; ``signal`` is the signal that ended it, or None
    where the kernel can't tell (only a parent, or a kernel with ``PIDFD_GET_INFO``, learns it). Of a process on another
    host nothing is known but that it has been silent for too long; ``pid`` is its number there.
    """

    def __init__(
        self,
        summary: str,
        *,
        rank: int | None = None,
        pid: int | None = None,
        signal: int | None = None,
        expected: str = "",
        found: str = "",
        remedy: str = "",
    ) -> None:
        super().__init__(summary, expected=expected, found=found, remedy=remedy)
        self.rank = rank
        self.pid = pid
        self.signal = signal


class HandleMismatch(ArenaError):
    """A handle, or the memory it led to, is not what this Arena made: version, magic, secret or shape."""


class AttachRefused(ArenaError):
    """The writer answered and said no: the rank is taken or does not exist, or the queue is closing."""


class MessageTooLarge(ArenaError, ValueError):
    """The message is larger than ``max_message_bytes``."""


class CorruptFrame(ArenaError):
    """Shared memory holds something no Arena writer published. Nothing was decoded."""


class EncodeFailed(ArenaError, TypeError):
    """The object can't be pickled; the cause is chained. Blocks it had taken are free again."""


class DecodeFailed(ArenaError):
    """The frame was intact but unpickling raised; the cause is chained. The slot was released."""


class ReentrantUse(ArenaError, RuntimeError):
    """An endpoint was used from inside its own call: a ``__reduce__``, a signal handler, a finaliser."""

    fresh = False  # on its way out of the inner call, which it refused


class UseAfterFork(ArenaError, RuntimeError):
    """An endpoint was used in a forked child. The child attaches for itself, with the handle."""


class WrongEnd(ArenaError, RuntimeError):
    """A writer's verb on a reader, or a reader's verb on the writer."""


class CommunicatorClosed(ArenaError):
    """The communicator was closed, by this rank or by another, or another rank gave up an operation half-way."""


class OperandMismatch(ArenaError, ValueError):
    """The ranks brought different tensors to one operation. All of them are told, and the next one may go on."""


class RankMissing(ArenaError, TimeoutError):
    """Ranks that did not come to a collective set-up, or fell silent in it, before the deadline: ``missing``."""

    def __init__(
        self, summary: str, *, missing: tuple[int, ...] = (), expected: str = "", found: str = "", remedy: str = ""
    ) -> None:
        super().__init__(summary, expected=expected, found=found, remedy=remedy)
        self.missing = missing


class SetUpFailed(ArenaError, RuntimeError):
    """A collective set-up came to nothing, on every rank for the same reason."""


class PinFailed(ArenaError, RuntimeError):
    """A segment could not be registered with the device, and ``pin="required"`` asks for it.

    Attributes:
        reason: memlock_limit, already_registered, unsupported, no_device or driver.
    """

    def __init__(self, summary: str, *, reason: str = "", **parts: str) -> None:
        super().__init__(summary, **parts)
        self.reason = reason


class MissingLibrary(ArenaError, ImportError):
    """A library of an extra that is not installed; the error names the extra."""


class OutOfMemory(ArenaError, MemoryError):
    """The host, the cgroup or the file system has no room for memory that can't be done without."""


class OutOfDescriptors(ArenaError, OSError):
    """This process, or the host, can open no more files; shared memory comes as open files."""


class RunDirectoryError(ArenaError, OSError):
    """The run directory can't be used: wrong owner, too open, a link, or full."""


class UnsupportedPlatform(ArenaError, RuntimeError):
    """A kernel feature or an architecture that Arena needs, or has no memory fence for."""
