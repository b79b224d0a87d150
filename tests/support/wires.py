"""A wire that misbehaves: a TCP relay that breaks, cuts short, repeats or garbles what runs through it."""

import contextlib
import socket
import threading
from collections.abc import Callable
from types import TracebackType

Harm = Callable[[bytes], tuple[bytes, bool]]
"""What becomes of a piece that passes, and whether the connection lives on after it."""


def no_harm(data: bytes) -> tuple[bytes, bool]:
    """What a good wire does."""
    return data, True


class Wire:
    """Listens on loopback and relays to a port there.

    `harm` is what happens to what comes from the far end, `harm_back` to what goes there.
    """

    def __init__(self, port: int) -> None:
        self._to = port
        self.harm: Harm = no_harm
        self.harm_back: Harm = no_harm
        self.connections = 0
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._start(self._accept)

    def __enter__(self) -> "Wire":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """Break every connection there is."""
        for one in list(self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _start(self, target: Callable[..., None], *args: object) -> None:
        threading.Thread(target=target, args=args, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._to))
                self.connections += 1
                self._open |= {near, far}
                self._start(self._relay, near, far, False)
                self._start(self._relay, far, near, True)

    def _relay(self, source: socket.socket, target: socket.socket, back: bool) -> None:
        lives = True
        with contextlib.suppress(OSError):
            while lives and (data := source.recv(1 << 16)):
                data, lives = (self.harm if back else self.harm_back)(data)
                target.sendall(data)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            self._open.discard(one)
            one.close()
