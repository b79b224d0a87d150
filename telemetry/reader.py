"""Finds the queues and communicators of a run directory and takes snapshots: pure data, of the living and the dead.

A `Watcher` keeps the pages it has found mapped from one look to the next, so a look costs little more than reading
them. What it returns is frozen and needs no file any more. Nothing that it finds can make a look fail: what can't be
read is left out and said so, in `Look.troubles`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from arena.probe import (
    ENDED,
    BadPage,
    BlockRecord,
    EventRecord,
    Identity,
    PageSeries,
    ProbeReader,
    Role,
    RunDirectoryError,
    Sample,
    Wait,
    observed_directory,
    pages,
    process_state,
    published_at,
    queue_directories,
)

MAX_QUEUES: Final = 16
"""Queues in one look; the living first, and the newest of the dead."""

MAX_READERS: Final = 64
"""Readers of one queue in one look: ranks below this."""

MAX_COMMUNICATORS: Final = 16
"""Communicators in one look, chosen like queues."""

MAX_RANKS: Final = 64
"""Ranks of one communicator in one look: those below this."""

COMMUNICATOR_PREFIX: Final = "allreduce-"
"""What the directory of a communicator over a group is called, before the group's name."""

GATE_SINCE: Final = "gate_oldest_since_nanoseconds"
"""On a reader's page: the monotonic time since which the oldest block has waited in its DMA gate."""

SETTING_UP_S: Final = 5.0
"""For so long a file without a magic word is a page that its owner is about to finish."""


@dataclass(frozen=True)
class Page:
    """What never changes about a probe page. `about` is what the endpoint says of itself, unchecked."""

    path: Path
    role: Role
    rank: int
    owner: Identity
    started_ns: int
    about: dict[str, Any]
    series: tuple[PageSeries, ...]

    @property
    def where(self) -> str:
        """host:pid of a reader on another host, whose page the process here only keeps; "" for all others."""
        found = self.about.get("where", "")
        return found if isinstance(found, str) else ""

    def number(self, key: str) -> int:
        """A count among `about`; 0 if there is none."""
        value = self.about.get(key)
        return value if isinstance(value, int) else 0


@dataclass(frozen=True)
class Endpoint:
    """One end of a queue, or one rank of a communicator, at the time of a look.

    Times in ns are the endpoint's own monotonic ones.

    Attributes:
        page: what never changes.
        process: the letter that /proc gives its process, X or Z when it is gone, "" where that can't be told.
        now_ns: the time of the look.
        state: what it is doing, see `arena.probe.EndpointState`.
        sequence: frames published (writer) or taken (reader), or operations of a rank.
        heartbeat_ns: its last sign of life: a message, a look around while it waits, a heartbeat.
        wait: what it waits for.
        values: all counters, gauges and histograms; `page.series` says what is what. Empty if they were not asked for.
        events: its flight recorder, if that holds anything of a sampled message; empty otherwise.
        wall_s: the time of the look, by the wall clock.
    """

    page: Page
    process: str
    now_ns: int
    state: int
    sequence: int
    heartbeat_ns: int
    wait: Wait
    values: tuple[int, ...]
    events: tuple[EventRecord, ...] = ()
    wall_s: float = 0.0

    @property
    def rank(self) -> int:
        """A reader's rank, or that of a communicator's."""
        return self.page.rank

    @property
    def alive(self) -> bool | None:
        """Whether its process lives; None where that can't be told."""
        return self.process not in ENDED if self.process else None

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since its last sign of life."""
        return max(0, self.now_ns - self.heartbeat_ns) / 1e9

    @property
    def gate_age_s(self) -> float:
        """Seconds for which the oldest block in its DMA gate has waited; 0 without any."""
        if not self.values:
            return 0.0
        since_ns = next((self.values[one.word] for one in self.page.series if one.name == GATE_SINCE), 0)
        return max(0, self.now_ns - since_ns) / 1e9 if since_ns else 0.0

    def samples(self) -> list[Sample]:
        """Every series of its page, with its value."""
        return [one.sample(self.values) for one in self.page.series]


@dataclass(frozen=True)
class Queue:
    """One queue at the time of a look.

    Attributes:
        label: its name, unique among the queues of the look: `name`, or `name@instance` for all but the oldest of
            several that live.
        directory: where its pages are.
        writer: None if it left in order, or keeps no page.
        readers: the newest incarnation of each rank that has a page, by rank.
        marks: when frames were published, see `arena.probe.published_at`.
        blocks: the arena's live blocks, as of the last look in which the table held still.
        segments: the arena's segments by number, with their bytes; empty if an older writer does not tell.
    """

    label: str
    directory: Path
    writer: Endpoint | None
    readers: tuple[Endpoint, ...]
    marks: tuple[tuple[int, int], ...]
    blocks: tuple[BlockRecord, ...]
    segments: tuple[tuple[int, int], ...] = ()

    @property
    def instance(self) -> str:
        """What tells queues of one name apart."""
        return self.directory.name.rpartition("@")[2]

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """Writer and readers."""
        return self.readers if self.writer is None else (self.writer, *self.readers)

    @cached_property
    def n_reader(self) -> int:
        """For how many readers the queue was made."""
        return max((one.page.number("n_reader") for one in self.endpoints), default=0)

    @cached_property
    def slots(self) -> int:
        """Slots of the ring; 0 where no writer says it."""
        return self.writer.page.number("slots") if self.writer else 0

    def lag(self, reader: Endpoint) -> int:
        """Frames published that it has not taken; 0 for one that the writer went on without.

        No reader that counts is further behind than the ring is long. (The writer is read first, so that a lag is
        never too large.)
        """
        if self.writer is None:
            return 0
        behind = max(0, self.writer.sequence - reader.sequence)
        return 0 if reader.alive is False and behind > self.slots + 1 else min(behind, self.slots)

    def lag_s(self, reader: Endpoint) -> float:
        """Seconds since the oldest frame that it has not taken was published; 0 without lag.

        Up to the last sign of life of a writer that is dead: what nobody will ever take does not age for ever.
        """
        if self.writer is None or not self.lag(reader) or not self.marks:
            return 0.0
        now_ns = self.writer.heartbeat_ns if self.writer.alive is False else self.writer.now_ns
        return max(0, now_ns - published_at(self.marks, reader.sequence)) / 1e9

    def held_bytes(self, rank: int) -> int:
        """Bytes of the arena's blocks that a reader holds."""
        return sum(block.nbytes for block in self.blocks if rank in block.holders)


@dataclass(frozen=True)
class Communicator:
    """One communicator at the time of a look. A rank that has left in order is not among the ranks.

    Attributes:
        label: the group's name, unique among the communicators of the look, as a queue's is.
        directory: where its pages are.
        ranks: by rank; none of them waits, as far as the pages say.
    """

    label: str
    directory: Path
    ranks: tuple[Endpoint, ...]

    @property
    def instance(self) -> str:
        """What tells communicators over one group apart."""
        return self.directory.name.rpartition("@")[2]

    @property
    def about(self) -> dict[str, Any]:
        """What its ranks say of it, all the same; unchecked."""
        return self.ranks[0].page.about if self.ranks else {}

    @cached_property
    def world(self) -> int:
        """For how many ranks it was made."""
        return max((one.page.number("world") for one in self.ranks), default=0)

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """The paths that were set up."""
        found = self.about.get("paths")
        return tuple(one for one in found if isinstance(one, str)) if isinstance(found, list) else ()

    @cached_property
    def declined(self) -> dict[str, tuple[str, str]]:
        """The paths that could not be, each with a reason and a sentence."""
        found = self.about.get("declined")
        if not isinstance(found, dict):
            return {}
        whole = {path: why for path, why in found.items() if isinstance(why, list) and len(why) == 2}
        return {path: (str(reason), str(text)) for path, (reason, text) in whole.items()}

    @property
    def plan(self) -> str:
        """Where its plan comes from."""
        return str(self.about.get("plan", ""))


@dataclass(frozen=True)
class Trouble:
    """Something that could not be read: a word to count it by, where, and a sentence that says what to do."""

    reason: str
    path: Path
    message: str


@dataclass(frozen=True)
class Look:
    """Everything there was to see at one time.

    Attributes:
        time_ns: when, by this process's monotonic clock.
        queues: by label.
        pages: how many pages were read.
        troubles: what was left out.
        communicators: by label.
    """

    time_ns: int
    queues: tuple[Queue, ...]
    pages: int
    troubles: tuple[Trouble, ...]
    communicators: tuple[Communicator, ...] = ()


class _File:
    """A page that was found. It stays mapped only while it is part of the looks."""

    def __init__(self, path: Path, key: tuple[int, ...]) -> None:
        self.key = key
        self._open: ProbeReader | None = ProbeReader(path)
        found = self._open
        self.page = Page(path, found.role, found.rank, found.owner, found.started_ns, found.about, found.series)

    def opened(self) -> ProbeReader:
        if self._open is None:
            again, page = ProbeReader(self.page.path), self.page
            if (again.owner, again.started_ns, again.series) != (page.owner, page.started_ns, page.series):
                again.close()
                raise BadPage(f"{page.path} was written over", reason="changed", expected="what it was when found")
            self._open = again
        return self._open

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None


@dataclass(frozen=True)
class _Found:
    """A queue's or communicator's directory with its readable pages."""

    directory: Path
    files: list[_File]
    living: bool
    started_ns: int

    @property
    def name(self) -> str:
        return self.full_name.rpartition("@")[0]

    @property
    def full_name(self) -> str:
        """With the instance."""
        name = self.directory.name
        return name.removeprefix(COMMUNICATOR_PREFIX) if self.of_communicator else name

    @property
    def of_communicator(self) -> bool:
        """A page that does not belong where it lies makes no queue a communicator."""
        return all(file.page.role is Role.COMMUNICATOR for file in self.files)


@dataclass(frozen=True)
class _Limits:
    """How many of a kind are shown, and what to do where there are more."""

    what: str
    most: int
    members: str
    most_members: int
    remedy: str


_QUEUES: Final = _Limits("queue", MAX_QUEUES, "reader", MAX_READERS, "use several queues")
_COMMUNICATORS: Final = _Limits("communicator", MAX_COMMUNICATORS, "rank", MAX_RANKS, "use smaller groups")


@dataclass(frozen=True)
class _Seen:
    """A queue of the last look: what was found of it, which of that was read, and what that said."""

    found: list[_File]
    files: list[_File]
    queue: Queue


class Watcher:
    """Looks at a run directory, again and again. Close it, or use it as a context manager.

    Args:
        run_dir: the run directory; the one that a queue made in this process would use by default.
    """

    def __init__(self, run_dir: str | os.PathLike[str] | None = None) -> None:
        self._configured = os.fspath(run_dir) if run_dir is not None else None
        self._files: dict[Path, _File] = {}
        self._listed: dict[Path, tuple[list[str], list[Path]]] = {}
        self._last_directories: list[Path] = []
        self._last: dict[str, _Seen] = {}
        self._newest: dict[Path, dict[int, int]] = {}
        self._states: dict[Identity, str] = {}
        self._ended: set[Identity] = set()
        self._troubles: list[Trouble] = []

    def __enter__(self) -> Watcher:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Unmap every page."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def look(self, readers_of: Collection[str] | None = None, repeat: Collection[str] = ()) -> Look:
        """Look at every queue and communicator, now. Never raises for what it finds.

        Args:
            readers_of: labels of queues; the readers of all others come without values, and both their ends without
                events, which are most of what a look costs. None is all queues.
            repeat: labels of queues that are returned as the last look saw them, if they still have the same pages.
        """
        self._troubles = []
        self._states = {}
        directories = self._directories()
        self._listed = {one: self._listed[one] for one in directories if one in self._listed}
        self._newest = {one: self._newest.get(one, {}) for one in directories}
        found = [self._find(directory) for directory in directories]
        readable = [one for one in found if one.files]
        chosen = self._choose([one for one in readable if not one.of_communicator], _QUEUES)
        groups = self._choose([one for one in readable if one.of_communicator], _COMMUNICATORS)
        ranks = {label: self._each_rank(one) for label, one in groups.items()}
        repeated = {label: self._last[label] for label, one in chosen.items() if self._may_repeat(label, one, repeat)}
        exported = {
            label: repeated[label].files if label in repeated else self._newest_of_each_rank(one)
            for label, one in chosen.items()
        }
        shown = [*exported.values(), *ranks.values()]
        self._forget_all_but({file.page.path: file for one in found for file in one.files}, shown)
        queues = [
            repeated[label].queue
            if label in repeated
            else self._queue(label, chosen[label].directory, files, whole=readers_of is None or label in readers_of)
            for label, files in sorted(exported.items())
        ]
        self._last = {one.label: _Seen(chosen[one.label].files, exported[one.label], one) for one in queues}
        communicators = [
            self._communicator(label, groups[label].directory, files) for label, files in sorted(ranks.items())
        ]
        pages_read = sum(len(one.endpoints) for one in queues) + sum(len(one.ranks) for one in communicators)
        return Look(time.monotonic_ns(), tuple(queues), pages_read, tuple(self._troubles), tuple(communicators))

    def _may_repeat(self, label: str, found: _Found, repeat: Collection[str]) -> bool:
        return label in repeat and label in self._last and self._last[label].found == found.files

    # ── what is there ────────────────────────────────────────────────────────────────────────────
    def _directories(self) -> list[Path]:
        root = Path(self._configured or "")
        try:
            root = observed_directory(self._configured)
            self._last_directories = queue_directories(root)
            return self._last_directories
        except FileNotFoundError:
            pass  # no queue yet
        except RunDirectoryError as refused:
            self._troubles.append(Trouble("directory", root, str(refused)))
        except OSError as error:
            remedy = "join its group, or run under its uid"
            self._troubles.append(Trouble("directory", root, f"can't list {root}; found {error.strerror}; {remedy}"))
            return self._last_directories  # too many open files are no reason to forget what is mapped
        return []

    def _find(self, directory: Path) -> _Found:
        if not os.access(directory, os.R_OK | os.X_OK):
            remedy = "let the group read the run directory before queues are made in it, or run under their uid"
            self._troubles.append(Trouble("unreadable", directory, f"can't look into {directory}; {remedy}"))
        files = [file for path in self._pages(directory) if (file := self._file(path)) is not None]
        living = any(self._state(file.page.owner) not in ENDED for file in files)
        started_ns = min((file.page.started_ns for file in files), default=0)
        return _Found(directory, files, living, started_ns)

    def _pages(self, directory: Path) -> list[Path]:
        """The paths of its pages: the same objects as last time if they are the same, which saves parsing them."""
        try:
            names = os.listdir(directory)
        except FileNotFoundError:
            names = []
        except OSError:
            names = self._listed[directory][0] if directory in self._listed else []
        known = self._listed.get(directory)
        if known is None or known[0] != names:
            known = self._listed[directory] = (names, pages(directory))
        return known[1]

    def _file(self, path: Path) -> _File | None:
        try:
            status = os.lstat(path)
        except OSError:
            return None  # it left meanwhile
        key = (status.st_dev, status.st_ino, status.st_size)
        known = self._files.get(path)
        if known is not None and known.key == key:
            return known
        self._drop(path)
        try:
            self._files[path] = _File(path, key)
        except BadPage as bad:
            if bad.reason != "unfinished" or time.time() - status.st_mtime > SETTING_UP_S:
                self._trouble(path, bad)
        except OSError as error:
            self._troubles.append(Trouble("unreadable", path, f"can't map {path}; found {error.strerror}"))
        return self._files.get(path)

    def _trouble(self, path: Path, bad: BadPage) -> None:
        if os.path.lexists(path):  # it may have left meanwhile, and that is no trouble
            reason = "foreign" if bad.reason == "unfinished" else bad.reason
            self._troubles.append(Trouble(reason, path, str(bad)))

    def _drop(self, path: Path) -> None:
        file = self._files.pop(path, None)
        if file is not None:
            file.close()

    def _forget_all_but(self, there: dict[Path, _File], exported: Iterable[list[_File]]) -> None:
        for path in self._files.keys() - there.keys():
            self._drop(path)
        kept = {id(file) for files in exported for file in files}
        for file in there.values():
            if id(file) not in kept:
                file.close()
        if self._ended:
            self._ended &= {file.page.owner for file in there.values()}

    def _state(self, owner: Identity) -> str:
        """The state of a process: asked for once a look, and never again once it has ended."""
        state = self._states.get(owner)
        if state is None:
            state = self._states[owner] = ENDED[0] if owner in self._ended else process_state(owner)
            if state in ENDED:
                self._ended.add(owner)
        return state

    # ── what of it is shown ──────────────────────────────────────────────────────────────────────
    def _choose(self, found: list[_Found], limits: _Limits) -> dict[str, _Found]:
        """The queues or communicators to show, by label: of each name those that live, or else the newest dead one."""
        by_name: dict[str, list[_Found]] = {}
        for one in sorted(found, key=lambda one: (one.started_ns, one.directory.name)):
            by_name.setdefault(one.name, []).append(one)
        labelled: dict[str, _Found] = {}
        for name, all_of_name in by_name.items():
            oldest, *others = [one for one in all_of_name if one.living] or all_of_name[-1:]
            labelled[name] = oldest
            labelled |= {one.full_name: one for one in others}
        if len(labelled) <= limits.most:
            return labelled
        by_rank = sorted(labelled, key=lambda label: (not labelled[label].living, -labelled[label].started_ns))
        for label in by_rank[limits.most :]:
            message = f"{limits.what} {label} is left out; expected at most {limits.most}, found {len(labelled)}; "
            message += "remove dead ones with `arena gc`, or give each engine a run directory and an exporter"
            self._troubles.append(Trouble(f"too_many_{limits.what}s", labelled[label].directory, message))
        return {label: labelled[label] for label in by_rank[: limits.most]}

    def _newest_of_each_rank(self, found: _Found) -> list[_File]:
        """The writer's page, and of each rank the page of its newest incarnation, a living one before a dead one."""
        writer = [file for file in found.files if file.page.role is Role.WRITER]
        readers = self._by_rank(found, Role.READER, _QUEUES)
        return writer[:1] + [file for file in readers if not self._was_replaced(found, file)]

    def _each_rank(self, found: _Found) -> list[_File]:
        """The page of each rank of a communicator. It has one for good: who joins anew makes another communicator."""
        return self._by_rank(found, Role.COMMUNICATOR, _COMMUNICATORS)

    def _by_rank(self, found: _Found, role: Role, limits: _Limits) -> list[_File]:
        """The newest page of each rank within the limits, in order; a living one is newer than any dead one."""
        there = [file for file in found.files if file.page.role is role]
        shown = [file for file in there if file.page.rank < limits.most_members]
        if len(shown) < len(there):
            message = f"{limits.members}s of {found.name} are left out; expected ranks below {limits.most_members}, "
            message += f"found {max(file.page.rank for file in there)}; {limits.remedy}"
            self._troubles.append(Trouble(f"too_many_{limits.members}s", found.directory, message))
        by_rank = {file.page.rank: file for file in sorted(shown, key=self._age_order)}
        return [by_rank[rank] for rank in sorted(by_rank)]

    def _was_replaced(self, found: _Found, file: _File) -> bool:
        """Whether a dead reader had a successor in an earlier look: then its rank left in order, and is not gone."""
        newest = self._newest[found.directory]
        rank, started_ns = file.page.rank, file.page.started_ns
        if self._state(file.page.owner) in ENDED and started_ns < newest.get(rank, 0):
            return True
        newest[rank] = started_ns
        return False

    def _age_order(self, file: _File) -> tuple[bool, int]:
        return self._state(file.page.owner) not in ENDED, file.page.started_ns

    # ── taking the snapshot ──────────────────────────────────────────────────────────────────────
    def _queue(self, label: str, directory: Path, files: list[_File], *, whole: bool) -> Queue:
        writer: Endpoint | None = None
        marks: list[tuple[int, int]] = []
        blocks: list[BlockRecord] = []
        segments: tuple[tuple[int, int], ...] = ()
        readers = []
        for file, opened in self._readable(files):  # the writer first: see `Queue.lag`
            if file.page.role is Role.WRITER:
                writer = self._endpoint(file.page, opened, *opened.values_and_wait(), whole=whole)
                marks, blocks, segments = opened.marks(), opened.blocks(), opened.segments()
            else:
                values, wait = opened.values_and_wait() if whole else ([], opened.wait())
                readers.append(self._endpoint(file.page, opened, values, wait, whole=whole))
        return Queue(label, directory, writer, tuple(readers), tuple(marks), tuple(blocks), segments)

    def _communicator(self, label: str, directory: Path, files: list[_File]) -> Communicator:
        ranks = [
            self._endpoint(file.page, opened, *opened.values_and_wait(), whole=False)
            for file, opened in self._readable(files)
        ]
        return Communicator(label, directory, tuple(ranks))

    def _readable(self, files: list[_File]) -> Iterator[tuple[_File, ProbeReader]]:
        for file in files:
            try:
                opened = file.opened()
                opened.check_unchanged()
            except BadPage as bad:
                self._trouble(file.page.path, bad)
                self._drop(file.page.path)
            else:
                yield file, opened

    def _endpoint(self, about: Page, opened: ProbeReader, values: list[int], wait: Wait, *, whole: bool) -> Endpoint:
        return Endpoint(
            page=about,
            process=self._state(about.owner),
            now_ns=opened.now_ns(),
            state=opened.state,
            sequence=opened.sequence,
            heartbeat_ns=opened.heartbeat_ns,
            wait=wait,
            values=tuple(values),
            events=tuple(opened.events()) if whole and opened.traced() else (),
            wall_s=time.time(),
        )
