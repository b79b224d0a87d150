"""Files that another process wrote: probe pages, owners, plans."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from arena.errors import ArenaError
from arena.layout import WORD
from arena.plan import LARGEST, Key, Plan, Row, load, save
from arena.probe import BadPage, ProbeReader, identity, is_alive, page
from arena.probe.directory import owners
from arena.probe.metrics import HISTOGRAM_WORDS
from tests.fuzz.common import Run, Wrong, a_pair, name_of


def page_seeds() -> list[bytes]:
    """A writer's page and a reader's; and, most of all, short ones of few series, which are read ten times as fast."""
    with a_pair() as (queue, reader):
        for number in range(6):
            queue.enqueue([number, torch.ones(20_000)], timeout=1)
            reader.dequeue(timeout=1)
        directory = Path(queue.export_handle().directory)
        whole = [path.read_bytes() for path in directory.iterdir() if path.name.startswith(("writer", "reader-"))]
    return whole + [_short(one) for one in whole for _ in range(8)]


_FEW = 2
_PARTS = (
    (page.H_VALUES, page.H_VALUES_COUNT, 1, 0),
    (page.H_MARKS, page.H_MARKS_COUNT, page.MARK_WORDS, 4),
    (page.H_BLOCKS, page.H_BLOCKS_COUNT, page.BLOCK_WORDS, 4),
    (page.H_SEGMENTS, page.H_SEGMENTS_COUNT, 1, 4),
    (page.H_EVENTS, page.H_EVENTS_COUNT, page.EVENT_WORDS, 4),
)


def _short(whole: bytes) -> bytes:
    """A page with a few of its series, and the beginning of each of its tables: as right as the whole one."""
    words = list(struct.unpack(f"={len(whole) // WORD}Q", whole))
    start, length = words[page.H_METADATA], words[page.H_METADATA_BYTES]
    about = json.loads(whole[start : start + length])
    kinds = {kind: [one for one in about["series"] if one["kind"] == kind][:_FEW] for kind in ("counter", "histogram")}
    about["series"], values = [], []
    for one in (*kinds["counter"], *kinds["histogram"]):
        size = HISTOGRAM_WORDS if one["kind"] == "histogram" else 1
        old = words[words[page.H_VALUES] + one["word"] :][:size]
        about["series"].append({**one, "word": len(values)})
        values += old
    head = words[: words[page.H_VALUES]]
    for at, count, width, most in _PARTS:
        n = len(values) if at == page.H_VALUES else min(most, words[count])
        part = values if at == page.H_VALUES else words[words[at] : words[at] + n * width]
        head[at], head[count] = len(head), n
        head += part
    text = json.dumps(about).encode()
    head[page.H_METADATA], head[page.H_METADATA_BYTES] = len(head) * WORD, len(text)
    return struct.pack(f"={len(head)}Q", *head) + text + bytes(-len(text) % WORD)


class _File:
    """A file whose content changes from case to case, without being made anew."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        self._mapped = mmap.mmap(-1, 1)

    def put(self, data: bytes) -> None:
        """Write it."""
        if len(data) != len(self._mapped) or os.fstat(self._fd).st_size != len(data):
            os.ftruncate(self._fd, len(data))
            self._mapped = mmap.mmap(self._fd, len(data)) if data else mmap.mmap(-1, 1)
        if data:
            self._mapped[:] = data


@contextlib.contextmanager
def pages() -> Iterator[Run]:
    """A probe page: what is in it, or BadPage."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        file = _File(Path(place) / "writer")

        def run(data: bytes) -> str:
            file.put(data)
            try:
                with ProbeReader(file.path) as reader:
                    for one in reader.samples():
                        if type(one.value) is not int or not isinstance(one.labels, dict):
                            raise Wrong(f"{one}")
                    for number, event in enumerate(events := reader.events()):
                        if event.number != events[0].number + number:
                            raise Wrong("events out of order")
                    reader.blocks(), reader.marks(), reader.values_and_wait(), reader.segments(), reader.traced()
                    reader.now_ns(), reader.heartbeat_ns, is_alive(reader.owner)
                    reader.check_unchanged()
                    return f"a page of a {reader.role.name}, {min(len(events), 3)} events"
            except BadPage as error:
                return name_of(error)

        yield run


def owner_seeds() -> list[bytes]:
    """What a queue's maker leaves."""
    own = identity()
    here = own.pid_namespace
    return [
        f"{own.pid} {own.start_ticks} {here}\n".encode(),
        f"1 1 {here}\n".encode(),
        f"-1 1 {here}\n".encode(),
        f"99999999999999999999 1 {here}".encode(),
        f"{'9' * 4000} 1 {here}".encode(),
        b"4711 123456 4026531836\n",
        b"",
        b"1 2",
        b"-1 -1 -1",
        b"99999999999999999999 1 1",
    ]


@contextlib.contextmanager
def makers() -> Iterator[Run]:
    """The owner file in a queue's directory, as `arena gc` reads it, and whether that process lives."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        file = _File(Path(place) / "owner")

        def run(data: bytes) -> str:
            file.put(data)
            return f"owners that live: {[is_alive(owner) for owner in owners(Path(place))]}"

        yield run


KEY = Key("cpu", "x86", "none", 2, "1")


def plan_seeds() -> list[bytes]:
    """A plan as it is kept."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "plan.json"
        save(Plan((Row(1 << 16, ("cpu_one_shot", "gloo")), Row(LARGEST, ("gloo",)))), KEY, path)
        return [path.read_bytes(), b"[" * 1500]


@contextlib.contextmanager
def plans() -> Iterator[Run]:
    """A tuned plan in the cache directory."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        file = _File(Path(place) / "plan.json")

        def run(data: bytes) -> str:
            file.put(data)
            try:
                plan = load(KEY, file.path)
            except ArenaError as error:
                return name_of(error)
            found = plan.candidates(12345)
            if not found or not all(isinstance(one, str) for one in found):
                raise Wrong(f"{found}")
            return "a plan"

        yield run
