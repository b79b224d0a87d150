"""What other users, processes and readers can not do; `.github/SECURITY.md` says what is left."""

import ast
import contextlib
import ctypes
import json
import mmap
import os
import signal
import socket
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from arena import Handle, MessageQueue, QueueConfig
from arena.errors import ArenaError, AttachRefused, HandleMismatch, RunDirectoryError
from arena.peers import attachment
from arena.probe import run_directory
from tests.support import processes
from tests.support.fleet import Here

pytestmark = pytest.mark.usefixtures("run_dir")
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
NOBODY = 65534
ARENA = Path(__file__).parent.parent / "arena"


# ── another user ─────────────────────────────────────────────────────────────────────────────────
def become_nobody() -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    ctypes.CDLL(None).prctl(4, 1)  # dumpable again: what is refused below is refused for the uid


def attempts(handle: Handle, writer: int, fd: int) -> dict[str, str]:
    """Everything that another user may try, and how it went."""
    become_nobody()
    directory = Path(handle.directory)
    ways = {
        "list": lambda: os.listdir(directory),
        "read the writer's page": (directory / "writer").read_bytes,
        "connect": lambda: socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect(f"{directory}/attach"),
        "attach": lambda: MessageQueue.create_from_handle(handle, 0, timeout=5),
        "unlink the socket": lambda: os.unlink(directory / "attach"),
        "unlink a page": lambda: os.unlink(directory / "writer"),
        "put something there": lambda: (directory / "reader-0-1-x").write_bytes(b""),
        "rename it": lambda: os.rename(directory, directory.with_name("mine")),
        "signal": lambda: os.kill(writer, signal.SIGUSR1),
        "its descriptors": lambda: os.open(f"/proc/{writer}/fd/{fd}", os.O_RDONLY),
        "its memory": lambda: os.open(f"/proc/{writer}/mem", os.O_RDONLY),
        "use its run directory": lambda: run_directory(str(directory.parent)),
    }
    return {name: _tried(way) for name, way in ways.items()}


def _tried(way: Any) -> str:
    try:
        way()
    except (ArenaError, OSError) as error:
        return type(error).__name__
    return "done"


@needs_root
@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_another_user_can_not_attach_read_signal_or_unlink_anything(run_dir, mode):
    run_dir.chmod(mode)
    with MessageQueue(1) as queue, MessageQueue.create_from_handle(queue.export_handle(), 0) as reader:
        handle = queue.export_handle()
        outcomes = processes.run(attempts, handle, os.getpid(), queue._segment.fd)
        assert {name for name, outcome in outcomes.items() if outcome == "done"} == set()
        assert {"PermissionError", "AttachRefused", "RunDirectoryError"} >= set(outcomes.values()), outcomes
        queue.enqueue("as before")
        assert reader.dequeue(timeout=20) == "as before"


def say_hello_as_nobody(handle: Handle) -> bytes:
    """With the secret, and with every door on the way opened."""
    become_nobody()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(20)
        connection.connect(f"{handle.directory}/attach")
        memfd = os.memfd_create("mine")
        hello = {"magic": handle.magic, "version": handle.version, "instance": handle.instance}
        hello |= {"secret": handle.secret, "rank": 0, "who": [os.getpid(), 0, 0]}
        with contextlib.suppress(OSError):
            connection.sendmsg(
                [json.dumps(hello).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [memfd]))]
            )
        try:
            return connection.recv(1 << 16)
        except ConnectionResetError:
            return b""


@needs_root
def test_another_user_is_hung_up_on_even_with_the_secret_and_all_doors_open(run_dir):
    with MessageQueue(1) as queue:
        directory = Path(queue.export_handle().directory)
        for path in (run_dir, directory, directory / "attach"):
            path.chmod(0o777)
        assert processes.run(say_hello_as_nobody, queue.export_handle()) == b""
        assert queue.statistics().peers == {0: "expected"}


def test_the_secret_goes_to_nobody_but_the_writers_user(monkeypatch):
    """Whoever could put a socket in the writer's place would otherwise be told it."""
    said = []
    monkeypatch.setattr(attachment, "credentials", lambda connection: (os.getpid(), os.getuid() + 1, 0))
    monkeypatch.setattr(attachment, "send", lambda *_: said.append(_))
    with MessageQueue(1) as queue, pytest.raises(AttachRefused, match="somebody else answers"):
        MessageQueue.create_from_handle(queue.export_handle(), 0, timeout=20)
    assert said == []


# ── the same user, by accident ───────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("change", [{"secret": "0" * 64}, {"instance": "0" * 12}])
def test_without_the_secret_nothing_is_handed_over(change):
    with MessageQueue(1) as queue:
        queue.enqueue(torch.ones(1 << 16))
        handle = replace(queue.export_handle(), **change)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(20)
            connection.connect(f"{handle.directory}/attach")
            hello = {"magic": handle.magic, "version": handle.version, "instance": handle.instance}
            connection.send(json.dumps(hello | {"secret": handle.secret, "rank": 0, "who": [1, 2, 3]}).encode())
            answer, rights, _, _ = connection.recvmsg(1 << 16, socket.CMSG_LEN(64 * 4))
        assert json.loads(answer)["kind"] == "HandleMismatch"
        assert rights == []
        assert queue.export_handle().secret.encode() not in answer
        with pytest.raises(HandleMismatch):
            MessageQueue.create_from_handle(handle, 0, timeout=20)


# ── a reader among readers ───────────────────────────────────────────────────────────────────────
def try_to_write(here: Here) -> tuple[list[str], list[str]]:
    """As a reader: make every mapping writable, in place and by mapping it anew; what worked, and what there is."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    worked, seen = [], []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:arena:" not in line:
            continue
        span, rights, *_ = line.split()
        name = line.split("memfd:arena:")[1].split()[0]
        seen.append(name)
        if "w" in rights:
            continue  # its own control segment
        start, end = (int(one, 16) for one in span.split("-"))
        if libc.mprotect(start, end - start, mmap.PROT_READ | mmap.PROT_WRITE) == 0:
            worked.append(f"mprotect {name}")
        with contextlib.suppress(OSError):  # by its file, which root may open for writing
            fd = os.open(f"/proc/self/map_files/{start:x}-{end:x}", os.O_RDWR)
            with contextlib.suppress(OSError):
                mmap.mmap(fd, end - start, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
                worked.append(f"mmap {name}")
            with contextlib.suppress(OSError):
                os.pwrite(fd, b"x", 0)
                worked.append(f"write {name}")
            os.close(fd)
    return worked, seen


def attach_and_take(here: Here, handle: Handle, rank: int) -> int:
    here.queue = MessageQueue.create_from_handle(handle, rank, timeout=30)
    here.kept = here.queue.dequeue(timeout=30)
    return int(here.kept.sum())


def test_a_reader_can_write_neither_data_nor_anybody_elses_words(fleet):
    with MessageQueue(2, config=QueueConfig(name="steps")) as queue:
        readers = [fleet.start() for _ in range(2)]
        calls = [reader.begin(attach_and_take, queue.export_handle(), rank) for rank, reader in enumerate(readers)]
        queue.enqueue(torch.ones(1 << 16))
        assert [call.result() for call in calls] == [1 << 16] * 2
        for rank, reader in enumerate(readers):
            worked, seen = reader.call(try_to_write)
            assert worked == []
            # The ring, the segment of the tensor, its own words; another reader's are not even there.
            assert sorted(seen) == ["steps", "steps", f"steps:{rank}"]


# ── the run directory ────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("mode", [0o777, 0o757, 0o703])
def test_a_run_directory_that_others_could_swap_is_refused(tmp_path, mode):
    parent = tmp_path / "open"
    parent.mkdir()
    parent.chmod(mode)
    with pytest.raises(RunDirectoryError, match="sticky"):
        run_directory(str(parent / "arena"))
    parent.chmod(0o1777)
    assert run_directory(str(parent / "arena")).is_dir()


@pytest.mark.parametrize("kind", ["link", "file", "directory"])
def test_a_name_that_is_there_before_the_queue_is_never_used(run_dir, tmp_path, monkeypatch, kind):
    """The names are random; here somebody has guessed one."""
    monkeypatch.setattr("secrets.token_hex", lambda nbytes=32: "0" * (2 * nbytes))
    planted = run_dir / f"steps@{'0' * 12}"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    {"link": lambda: planted.symlink_to(elsewhere), "file": planted.touch, "directory": planted.mkdir}[kind]()
    with pytest.raises(RunDirectoryError, match="exists"):
        MessageQueue(1, config=QueueConfig(name="steps"))
    assert list(elsewhere.iterdir()) == []


def test_garbage_collection_follows_no_link(run_dir, tmp_path):
    from arena.probe import collect_garbage

    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "owner").write_text("1 1 1\n")
    (run_dir / "steps@1").symlink_to(precious)
    dead = run_dir / "steps@2"
    dead.mkdir()
    (dead / "owner").write_text(f"{2**22 + 1} 1 {os.stat('/proc/self/ns/pid').st_ino}\n")
    (dead / "attach").symlink_to(precious)
    assert collect_garbage(run_dir) == [dead]
    assert (precious / "owner").exists()


# ── what is unpickled ────────────────────────────────────────────────────────────────────────────
def unpicklers() -> set[str]:
    """Modules of arena/ that name anything which builds objects from pickles."""
    found = set()
    for path in sorted(ARENA.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            called = isinstance(node, ast.Attribute) and node.attr in ("loads", "load", "Unpickler")
            if called and isinstance(node.value, ast.Name) and node.value.id in ("pickle", "marshal", "dill"):
                found.add(str(path.relative_to(ARENA)))
    return found


def test_nothing_is_unpickled_but_what_lies_in_memory_that_an_attached_peer_handed_over():
    """Queues here; on another host what came through CURVE; the group's own store, which ranks set up themselves.

    `remote/main.py` reads from its parent's pipe.
    """
    assert unpicklers() <= {"codec.py", "reader.py", "remote/reader.py", "remote/main.py", "rounds.py"}


def test_a_stranger_is_refused_before_anything_of_it_is_unpickled(monkeypatch):
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("unpickled")

    with MessageQueue(1) as queue:
        monkeypatch.setattr("pickle.loads", refuse)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(20)
            connection.connect(f"{queue.export_handle().directory}/attach")
            connection.send(
                b"\x80\x05\x95\x1e\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x02id\x94\x85\x94R\x94."
            )
            assert b"HandleMismatch" in connection.recv(1 << 16)
