"""The floor of waking up: what a sleep and a wake cost in Python when nothing else is done."""

from __future__ import annotations

import ctypes
import mmap
import pickle
import platform
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Final

from telemetry.commands.bench.contenders import Contender, Ends

_SYS_FUTEX: Final = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_FUTEX_WAIT: Final = 0
_FUTEX_WAKE: Final = 1


class BareFutex(Contender):
    """The floor of waking: one pickled object, one futex, nothing else that a Python program could leave out.

    For one reader. A message that comes before the last one was taken waits for that, the plain way.
    """

    name = "a bare futex"

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, 1 << 16)
        self._words = memoryview(self._shared).cast("Q")
        self._address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(self._shared)))
        self._syscall = ctypes.CDLL(None).syscall
        self._answers: tuple[Connection, Connection] | None = None

    def prepare(self, readers: int) -> None:
        self._answers = Pipe()

    def open_writer(self) -> Ends:
        assert self._answers is not None
        return Ends(self._send, (self._answers[0].recv,))

    def open_reader(self, rank: int) -> Ends:
        assert self._answers is not None
        return Ends(self._answers[1].send, (self._receive,))

    def close(self) -> None:
        for end in self._answers or ():
            end.close()

    def _send(self, obj: Any) -> None:
        data = pickle.dumps(obj, 5)
        while self._words[1] != self._words[0]:
            time.sleep(0)
        self._shared[64 : 64 + len(data)] = data
        self._words[0] += 1
        self._syscall(_SYS_FUTEX, self._address, _FUTEX_WAKE, 1, None, None, 0)

    def _receive(self) -> Any:
        seen = self._words[1]
        while self._words[0] == seen:
            self._syscall(_SYS_FUTEX, self._address, _FUTEX_WAIT, seen, None, None, 0)
        obj = pickle.loads(self._shared[64:])
        self._words[1] = seen + 1  # from here on the writer may overwrite it
        return obj
