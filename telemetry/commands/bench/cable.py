"""Two hosts on one machine: network namespaces joined by a veth pair. Takes root, and `ip` of iproute2."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

_CLONE_NEWNET: Final = 0x40000000


class NoCable(Exception):
    """Two hosts can't be made here; says why."""


@dataclass(frozen=True)
class Host:
    """One end: a namespace, the address in it, and the device that has it."""

    name: str
    address: str
    device: str

    def run(self, *command: str) -> None:
        """A command in it."""
        _run("ip", "netns", "exec", self.name, *command)

    def enter(self) -> None:
        """Move this thread, and what it starts from now on, into it; to Arena it is a host of its own."""
        fd = os.open(f"/run/netns/{self.name}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if ctypes.CDLL(None, use_errno=True).setns(fd, _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"can't enter network namespace {self.name}")
        finally:
            os.close(fd)
        os.environ["ARENA_HOST_ID"] = self.name


@contextmanager
def cable() -> Iterator[tuple[Host, Host]]:
    """Two hosts, for as long as the block lasts.

    Raises:
        NoCable: no `ip`, no rights, or a kernel without namespaces.
    """
    if shutil.which("ip") is None:
        raise NoCable("the program 'ip' is not installed (package iproute2)")
    if os.geteuid() != 0:
        raise NoCable("making network namespaces takes root")
    number = os.getpid()
    here, there = (
        Host(f"arena{number}{end}", f"10.231.{number % 250}.{index}", f"v{end}{number}")
        for index, end in enumerate("ab", 1)
    )
    try:
        _make(here, there)
        yield here, there
    finally:
        for host in (here, there):
            subprocess.run(["ip", "netns", "delete", host.name], capture_output=True, check=False)


def _make(here: Host, there: Host) -> None:
    try:
        for host in (here, there):
            _run("ip", "netns", "add", host.name)
        _run("ip", "link", "add", here.device, "type", "veth", "peer", "name", there.device)
        for host in (here, there):
            _run("ip", "link", "set", host.device, "netns", host.name)
            host.run("ip", "address", "add", f"{host.address}/24", "dev", host.device)
            host.run("ip", "link", "set", "lo", "up")
            host.run("ip", "link", "set", host.device, "up")
    except subprocess.CalledProcessError as error:
        raise NoCable(f"{' '.join(error.cmd)}: {error.stderr.decode().strip()}") from error


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=30)
