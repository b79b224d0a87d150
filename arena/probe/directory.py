"""The run directory: where probe pages and attach sockets live, and how the dead are cleared away.

`$ARENA_RUN_DIR`, else `$XDG_RUNTIME_DIR/arena`, else a 0700 directory of this user's on /dev/shm, else one in
/tmp (degraded: that may be a disk). Below it, one directory per queue, `<name>@<instance>`, holds `writer`,
`reader-<rank>-<pid>` pages and the `attach` socket; one directory per communicator, `allreduce-<group>@<instance>`,
holds a `rank-<rank>` page for each rank, and for moments the sockets over which the ranks meet. An orderly end removes
its own; death leaves the pages for the post-mortem, and `arena gc`, or the start of another of that name, removes
them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from arena.errors import RunDirectoryError
from arena.probe.page import Identity, identity, namespace
from arena.probe.reader import BadPage, ProbeReader

WRITER_PAGE: Final = "writer"
SOCKET: Final = "attach"
KEPT_DEAD: Final = 4
"""Dead instances of one name that are kept for a post-mortem when another of that name starts."""

ENDED: Final = ("X", "Z")
"""States of a process that is gone: not there, or not yet asked for by its parent."""

_NO_SUCH_PROCESS: Final = (errno.ENOENT, errno.ESRCH)
_OUR_FILE: Final = re.compile(rf"owner|{SOCKET}|{WRITER_PAGE}|(reader|rank|meet)-[^/]*")
_SAFE_NAME: Final = re.compile(r"[^A-Za-z0-9_.:-]+")


def run_directory(configured: str | None = None) -> Path:
    """The run directory, created if need be, and checked.

    Raises:
        RunDirectoryError: it is a link, belongs to somebody else, or others may write to it.
    """
    return _own_directory(_run_path(configured))


def observed_directory(configured: str | None = None) -> Path:
    """The run directory for someone who only looks: not created, and anybody's, if not everybody may write to it.

    So a sidecar under another uid may look into a run directory whose group it is in. Where there is no directory
    yet, there is no queue yet: the path is returned all the same.

    Raises:
        RunDirectoryError: it is a link or a file, or everybody may write to it.
    """
    path = _run_path(configured)
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return path
    except OSError as error:
        raise RunDirectoryError(
            f"can't look into {path}", found=error.strerror or "", remedy="join its group, or run under its uid"
        ) from error
    _check(path, status, owner=None)
    return path


def _run_path(configured: str | None) -> Path:
    explicit = configured or os.environ.get("ARENA_RUN_DIR")
    if explicit:
        return Path(os.path.abspath(explicit))  # the handle takes it to processes with other working directories
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):
        return Path(runtime) / "arena"
    shm = Path("/dev/shm")
    parent = shm if os.access(shm, os.W_OK) else Path("/tmp")
    return parent / f"arena-{os.getuid()}"


def is_degraded(directory: Path) -> bool:
    """Whether the directory may be on a disk, where a page's write-back can stall its owner."""
    try:
        with open("/proc/self/mounts") as lines:
            mounts = [line.split()[1:3] for line in lines]
    except OSError:
        return False
    resolved = str(directory.resolve())
    covering = [(len(where), kind) for where, kind in mounts if _inside(resolved, where)]
    return max(covering, default=(0, "tmpfs"))[1] not in ("tmpfs", "ramfs")


def queue_directory(root: Path, name: str, instance: str) -> Path:
    """Create the directory of a new queue.

    Raises:
        RunDirectoryError: the file system has no room for a directory.
    """
    path = root / f"{safe_name(name)}@{instance}"
    try:
        path.mkdir(mode=0o750)
        if root.stat().st_mode & stat.S_IRGRP:  # its user lets the group look in, whatever this process's umask
            path.chmod(0o750 | stat.S_ISGID & path.stat().st_mode)
    except OSError as error:
        raise RunDirectoryError(
            f"can't create {path}",
            found=error.strerror or "",
            remedy="free some space or set ARENA_RUN_DIR to another tmpfs",
        ) from error
    return path


def remove_if_empty(directory: Path) -> None:
    """Remove a queue's directory once its last page is gone."""
    with contextlib.suppress(OSError):
        directory.rmdir()


def safe_name(name: str) -> str:
    """`name` as it may stand in a file name."""
    return _SAFE_NAME.sub("_", name)[:80] or "queue"


def reader_page(directory: Path, rank: int, pid: int, incarnation: str) -> Path:
    """Where the page of one reader incarnation goes."""
    return directory / f"reader-{rank}-{pid}-{incarnation}"


def queue_directories(root: Path) -> list[Path]:
    """The directories of all queues, dead or alive, oldest first."""
    found = []
    for entry in root.iterdir():
        try:
            if "@" in entry.name and entry.is_dir() and not entry.is_symlink():
                found.append((entry.stat().st_mtime_ns, entry))
        except OSError:
            continue
    return [entry for _, entry in sorted(found)]


def pages(directory: Path) -> list[Path]:
    """The probe pages of a queue, writer first, or of a communicator."""
    try:
        names = sorted(entry.name for entry in directory.iterdir())
    except OSError:
        return []
    others = [name for name in names if name.startswith(("reader-", "rank-"))]
    return [directory / name for name in [*(n for n in names if n == WRITER_PAGE), *others]]


def remove_dead_pages(directory: Path, rank: int, *, keep: int) -> None:
    """Remove what dead incarnations of a rank left, but for the newest: a crash loop must not fill the directory."""
    dead = []
    for path in pages(directory):
        if path.name.startswith(f"reader-{rank}-"):
            try:
                with ProbeReader(path) as page:
                    if is_alive(page.owner) is False:
                        dead.append((path.stat().st_mtime_ns, path))
            except (BadPage, OSError):
                continue
    for _, path in sorted(dead)[: max(0, len(dead) - keep)]:
        path.unlink(missing_ok=True)


def is_alive(owner: Identity) -> bool | None:
    """Whether the process lives; None where this process can't tell."""
    state = process_state(owner)
    return state not in ENDED if state else None


def process_state(owner: Identity) -> str:
    """The letter that /proc gives the process (R, S, D, T stopped, ...), one of `ENDED`, or "" where it can't be told.

    It can't from another pid namespace, nor under another uid where /proc hides what belongs to others.
    """
    if owner.pid_namespace != namespace("pid"):
        return ""
    try:
        fd = os.open(f"/proc/{owner.pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in _NO_SUCH_PROCESS:  # as with too many open files: that says nothing of the process
            return ""
        return "" if _is_hidden(owner.pid) else "X"
    try:
        status = os.read(fd, 4096)
    except OSError:  # it ended in between
        return "X"
    finally:
        os.close(fd)
    letter, *fields = status[status.rindex(b")") + 2 :].split()
    return letter.decode() if int(fields[18]) == owner.start_ticks else "X"


def _is_hidden(pid: int) -> bool:
    """Whether there is a process behind a number that /proc does not show."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OverflowError, ProcessLookupError):
        return False
    return False  # it could be signalled, so it would have been shown: it ended in between


def collect_garbage(
    run_dir: str | os.PathLike[str] | None = None, *, name: str | None = None, keep: int = 0
) -> list[Path]:
    """Remove the directories of queues and communicators whose processes are all gone; returns what was removed.

    Args:
        run_dir: the run directory; the usual one by default.
        name: only those of this name.
        keep: how many of the newest dead instances of each name stay.
    """
    root = run_directory(os.fspath(run_dir) if run_dir is not None else None)
    dead: dict[str, list[Path]] = {}
    for directory in queue_directories(root):
        of = directory.name.rpartition("@")[0]
        if (name is None or of == safe_name(name)) and _is_dead(directory):
            dead.setdefault(of, []).append(directory)
    removed = [path for paths in dead.values() for path in paths[: max(0, len(paths) - keep)]]
    for path in removed:
        shutil.rmtree(path, ignore_errors=True)
    return removed


def _is_dead(directory: Path) -> bool:
    """No page of a live or unknown process, no such maker, and not just being set up."""
    found = list(owners(directory))
    if found:
        return all(is_alive(owner) is False for owner in found)
    return _age_s(directory) > 60 and _is_ours(directory)


def owners(directory: Path) -> Iterator[Identity]:
    """The processes that a queue's or a communicator's directory speaks of: whose pages lie there, and who made it."""
    for path in pages(directory):
        try:
            with ProbeReader(path) as page:
                yield page.owner
        except BadPage:
            continue
    yield from _maker(directory)


def mark_owner(directory: Path) -> None:
    """Leave the creator's identity, for a queue without probes and for the moments before its page exists."""
    own, path = identity(), directory / "owner"
    try:
        path.write_text(f"{own.pid} {own.start_ticks} {own.pid_namespace}\n")
    except OSError as error:
        path.unlink(missing_ok=True)
        free = os.statvfs(directory)
        raise RunDirectoryError(
            f"no room in {directory}",
            expected=f"a block of {free.f_frsize} bytes free",
            found=f"{free.f_bavail * free.f_frsize} bytes free ({error.strerror})",
            remedy="free some, or set ARENA_RUN_DIR to another tmpfs",
        ) from error


def _maker(directory: Path) -> Iterator[Identity]:
    """What `mark_owner` left, if all of it is there yet."""
    try:
        pid, ticks, inode = map(int, (directory / "owner").read_text().split())
    except (OSError, ValueError):
        return
    yield Identity(pid, ticks, inode)


def _is_ours(directory: Path) -> bool:
    """Whether all that is in it has a name that Arena gives: an `@` alone does not make a queue's directory."""
    try:
        return all(_OUR_FILE.fullmatch(name) for name in os.listdir(directory))
    except OSError:
        return False


def _age_s(directory: Path) -> float:
    import time

    try:
        return time.time() - directory.stat().st_mtime
    except OSError:
        return 0.0


def _inside(path: str, mount: str) -> bool:
    return path == mount or path.startswith(mount.rstrip("/") + "/")


def _own_directory(path: Path) -> Path:
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        status = os.lstat(path)
    except OSError as error:
        raise RunDirectoryError(
            f"can't use {path} as run directory",
            found=error.strerror or "",
            remedy="set ARENA_RUN_DIR to a directory of yours",
        ) from error
    _check(path, status, owner=os.getuid())
    _check_parent(path)
    return path


def _check_parent(path: Path) -> None:
    """Where anybody may rename what is there, the directory that was checked is not the one that is used next."""
    parent = path.absolute().parent
    mode = parent.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise RunDirectoryError(
            f"refusing {path} as run directory",
            expected="a parent in which nobody but the owner of an entry can replace it",
            found=f"{parent} that anybody may write to, without the sticky bit",
            remedy=f"chmod +t {parent}, or set ARENA_RUN_DIR to a directory elsewhere",
        )


def _check(path: Path, status: os.stat_result, *, owner: int | None) -> None:
    trouble = ""
    if stat.S_ISLNK(status.st_mode):
        trouble = "a symbolic link"
    elif not stat.S_ISDIR(status.st_mode):
        trouble = "a file"
    elif owner is not None and status.st_uid != owner:
        trouble = f"a directory of uid {status.st_uid}"
    elif status.st_mode & stat.S_IWOTH:
        trouble = "a directory that anybody may write to"
    if trouble:
        whose = "a directory" if owner is None else f"a directory of uid {owner}"
        raise RunDirectoryError(
            f"refusing {path} as run directory",
            expected=f"{whose} that others can't write to",
            found=trouble,
            remedy="remove it or set ARENA_RUN_DIR to a directory of yours",
        )
