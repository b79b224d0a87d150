"""Two hosts on one machine, as `arena bench remote` makes them, and a cable between them that can be pulled.

A worker moves into one with `enter`, before it has threads or sockets. Memory and run directory stay those of this
machine, so who is where is said by ``ARENA_HOST_ID``, as it is for containers.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from telemetry.commands.bench.cable import Host, NoCable, cable
from tests.support.fleet import Here


@dataclass(frozen=True)
class Hosts:
    """Both, and the cable between them."""

    a: Host
    b: Host

    def cut(self) -> None:
        """Pull it out: what is sent from now on is lost."""
        self.b.run("ip", "link", "set", self.b.device, "down")

    def heal(self) -> None:
        """Plug it in again."""
        self.b.run("ip", "link", "set", self.b.device, "up")


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Make them, and take them away again; skips where that can't be, and fails there on CI."""
    try:
        with cable() as (a, b):
            yield Hosts(a, b)
    except NoCable as error:
        if os.environ.get("ARENA_CI") == "1":
            pytest.fail(str(error))
        pytest.skip(str(error))


def enter(here: Here, host: Host) -> None:
    """For a worker: be on that host from now on."""
    host.enter()
    os.environ["GLOO_SOCKET_IFNAME"] = host.device
