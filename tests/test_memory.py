"""Shared memory that a peer can't pull away or write to, words that do not tear, mappings that go when unused."""

import contextlib
import ctypes
import errno
import fcntl
import gc
import mmap
import os
import sys
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from arena import layout, memory
from arena.errors import CorruptFrame, OutOfMemory
from arena.memory import Futex, Mapping, Segment, copy_bytes
from tests.support import processes
from tests.support.asleep import wait_until_asleep_on

MIB = 1 << 20
F_GET_SEALS = 1034
SHRINK, GROW, FUTURE_WRITE, SEAL = 0x2, 0x4, 0x10, 0x1


@pytest.fixture
def segment():
    one = Segment.create("test", 4 * MIB)
    yield one
    one.close()


def maps_at(address: int, nbytes: int) -> list[str]:
    """Lines of /proc/self/maps that overlap a range."""
    with open("/proc/self/maps") as lines:
        found = []
        for line in lines:
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            if start < address + nbytes and address < end:
                found.append(line.strip())
        return found


# --- seals -----------------------------------------------------------------------------------------------------------


def test_a_segment_is_sealed_against_shrinking_growing_and_writing(segment):
    assert fcntl.fcntl(segment.fd, F_GET_SEALS) == SHRINK | GROW | FUTURE_WRITE | SEAL
    for size in (0, MIB, 8 * MIB):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(segment.fd, 1033, 0x8)  # nor can anybody add the seal that would stop its owner


def ways_to_write(fd: int, nbytes: int) -> list[str]:
    """Try every way to change a segment's bytes that is not its owner's mapping; the ways that worked."""
    reopened = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    readable = mmap.mmap(fd, nbytes, prot=mmap.PROT_READ)
    address = np.frombuffer(readable, np.uint8).__array_interface__["data"][0]
    attempts = {
        "map the fd": lambda: mmap.mmap(fd, nbytes, prot=mmap.PROT_READ | mmap.PROT_WRITE),
        "map it reopened": lambda: mmap.mmap(reopened, nbytes, prot=mmap.PROT_READ | mmap.PROT_WRITE),
        "write to the fd": lambda: os.pwrite(fd, b"x", 0),
        "write to it reopened": lambda: os.pwrite(reopened, b"x", 0),
        "make a mapping writable": lambda: mprotect_writable(address),
    }
    worked = []
    for way, attempt in attempts.items():
        try:
            attempt()
            worked.append(way)
        except PermissionError:
            pass
    os.close(reopened)
    return worked


def mprotect_writable(address: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(layout.PAGE), mmap.PROT_READ | mmap.PROT_WRITE):
        raise OSError(ctypes.get_errno(), "mprotect")


def test_nobody_else_gets_a_writable_mapping_not_even_by_reopening(segment):
    segment.mapping.view()[:4] = b"mine"
    assert ways_to_write(segment.fd, segment.nbytes) == []
    assert bytes(segment.mapping.view(0, 4)) == b"mine"


def test_attaching_writable_is_refused_by_the_kernel(segment):
    with pytest.raises(OutOfMemory, match="refused") as caught:
        Segment.attach(os.dup(segment.fd), segment.nbytes, writable=True)
    assert os.strerror(errno.EPERM) in str(caught.value)


def test_a_segment_that_peers_may_write_is_still_sealed_against_shrinking():
    owner = Segment.create("test", MIB, peers_may_write=True)
    assert fcntl.fcntl(owner.fd, F_GET_SEALS) == SHRINK | GROW | SEAL
    with pytest.raises(PermissionError):
        os.ftruncate(owner.fd, 0)
    peer = Segment.attach(os.dup(owner.fd), MIB, writable=True)
    peer.mapping.view()[10:14] = b"both"
    assert bytes(owner.mapping.view(10, 4)) == b"both"
    owner.close()
    peer.close()


# --- attaching -------------------------------------------------------------------------------------------------------


def fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_a_peer_sees_the_owners_bytes_and_can_not_write_them(segment):
    peer = Segment.attach(os.dup(segment.fd), segment.nbytes)
    segment.mapping.view()[100:105] = b"hello"
    seen = peer.mapping.view(100, 5)
    assert bytes(seen) == b"hello"
    assert seen.readonly
    with pytest.raises(TypeError):
        seen[0] = 1
    peer.close()


@pytest.mark.parametrize("nbytes", [0, 1, 4 * MIB - 1, 4 * MIB + 1, 8 * MIB, -1])
def test_attaching_with_another_size_is_refused_and_closes_the_fd(segment, nbytes):
    before = fds()
    with pytest.raises(CorruptFrame, match="not as large") as caught:
        Segment.attach(os.dup(segment.fd), nbytes)
    assert (caught.value.expected, caught.value.found) == (f"{nbytes} bytes", f"{4 * MIB} bytes")
    assert fds() == before


def test_attaching_an_unsealed_file_is_refused(tmp_path):
    before = fds()
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, MIB)
    with pytest.raises(CorruptFrame, match="not sealed"):
        Segment.attach(unsealed, MIB)
    assert fds() == before


@pytest.mark.parametrize("where", ["file", "pipe"])
def test_attaching_what_is_no_memfd_is_refused(where, tmp_path):
    if where == "file":
        (tmp_path / "plain").write_bytes(bytes(layout.PAGE))
        fd = os.open(tmp_path / "plain", os.O_RDWR)
    else:
        fd, other = os.pipe()
        os.close(other)
    with pytest.raises((CorruptFrame, OSError)):
        Segment.attach(fd, layout.PAGE)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_segment_without_bytes_is_an_error_that_leaves_nothing():
    before = fds()
    with pytest.raises(OutOfMemory):
        Segment.create("empty", 0)
    assert fds() == before


def test_a_segment_larger_than_the_address_space_is_an_error_that_leaves_nothing():
    before = fds()
    with pytest.raises((OutOfMemory, OSError)):
        Segment.create("huge", 1 << 60)
    assert fds() == before


def test_closing_twice_closes_one_fd(segment):
    segment.close()
    another = os.dup(0)  # takes the number that became free
    segment.close()
    os.fstat(another)
    os.close(another)


# --- words -----------------------------------------------------------------------------------------------------------


def test_words_are_whole_64_bit_numbers(segment):
    words = segment.mapping.words(1024, 4)
    for value in (0, 1, (1 << 32) - 1, 1 << 32, (1 << 64) - 1):
        words[2] = value
        assert words[2] == value
        assert int.from_bytes(segment.mapping.view(1024 + 16, 8), "little") == value
    assert (words[0], words[1], words[3]) == (0, 0, 0)


@pytest.mark.parametrize("value", [-1, 1 << 64])
def test_a_word_takes_nothing_larger_than_itself(segment, value):
    words = segment.mapping.words(0, 1)
    words[0] = 5
    with pytest.raises(ValueError):
        words[0] = value
    assert words[0] == 5


def test_words_of_a_peer_can_not_be_stored_to(segment):
    peer = Segment.attach(os.dup(segment.fd), segment.nbytes)
    words = peer.mapping.words(0, 1)
    with pytest.raises(TypeError):
        words[0] = 1
    peer.close()


@pytest.mark.parametrize(("offset", "nbytes"), [(-8, 8), (0, 4 * MIB + 1), (4 * MIB, 8), (4 * MIB - 4, 8), (0, -1)])
def test_a_range_outside_the_segment_is_corrupt(segment, offset, nbytes):
    mapping = segment.mapping
    attempts = [
        lambda: mapping.view(offset, nbytes),
        lambda: mapping.export(offset, nbytes, print),
    ]
    if nbytes == layout.WORD:
        attempts += [lambda: mapping.futex(offset), lambda: mapping.words(offset, 1)]
    for attempt in attempts:
        with pytest.raises(CorruptFrame, match="outside its segment"):
            attempt()


def store_both_patterns(fd: Any, started: Any) -> None:
    words = Mapping(fd.detach(), layout.PAGE, writable=True).words(0, 1)
    started.send(True)
    for _ in range(20_000):
        words[0] = 0
        words[0] = (1 << 64) - 1
    words[0] = 7


def test_a_word_never_tears_between_processes():
    owner = Segment.create("test", layout.PAGE, peers_may_write=True)
    words = owner.mapping.words(0, 1)
    started, there = processes.context.Pipe(duplex=False)
    with processes.Child(store_both_patterns, processes.context.reducer.DupFd(owner.fd), there) as child:
        assert started.poll(20)
        seen = set()
        while 7 not in seen:
            seen.add(words[0])
        child.result()
    assert seen <= {0, (1 << 64) - 1, 7}
    owner.close()


def test_fenced_words_put_a_barrier_after_each_load_and_before_each_store():
    steps = []

    class Recorded:
        def __getitem__(self, index):
            steps.append("load")
            return 42

        def __setitem__(self, index, value):
            steps.append(f"store {value}")

    words = memory.FencedWords(Recorded(), lambda: steps.append("fence"))
    assert words[0] == 42
    words[0] = 3
    assert steps == ["load", "fence", "fence", "store 3"]


def test_a_fence_can_be_called_from_many_threads():
    threads = [threading.Thread(target=lambda: [memory.fence() for _ in range(1000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# --- how long a mapping lives ----------------------------------------------------------------------------------------


def test_a_mapping_goes_with_its_segment():
    segment = Segment.create("test", 4 * MIB)
    address = segment.mapping.address
    assert len(maps_at(address, 4 * MIB)) == 1
    segment.close()
    del segment
    assert maps_at(address, 4 * MIB) == []


@pytest.mark.parametrize(
    "take",
    [
        lambda mapping: mapping.view(4096, 8),
        lambda mapping: mapping.view()[10:20],
        lambda mapping: mapping.raw_words(0, 8),
        lambda mapping: mapping.words(0, 8),
        lambda mapping: mapping.futex(0),
        lambda mapping: mapping.export(0, 64, lambda: None),
        lambda mapping: torch.frombuffer(mapping.export(0, 64, lambda: None), dtype=torch.float32)[3:5].unsqueeze(0),
        lambda mapping: np.frombuffer(mapping.view(0, 64), np.uint8)[::2],
    ],
    ids=["view", "slice", "raw_words", "words", "futex", "export", "tensor", "array"],
)
def test_a_mapping_lives_as_long_as_anything_taken_from_it(take):
    segment = Segment.create("test", 4 * MIB)
    address = segment.mapping.address
    taken = take(segment.mapping)
    segment.close()
    del segment
    gc.collect()
    assert len(maps_at(address, 4 * MIB)) == 1
    del taken
    gc.collect()
    assert maps_at(address, 4 * MIB) == []


def test_many_segments_leave_maps_and_fds_as_they_were():
    def some_use():
        segments = [Segment.create("test", 64 << 10) for _ in range(20)]
        peers = [Segment.attach(os.dup(one.fd), one.nbytes) for one in segments]
        views = [one.mapping.view(0, 8) for one in (*segments, *peers)]
        for one in (*segments, *peers):
            one.close()
        assert sum(map(len, views)) == 320

    some_use()
    gc.collect()
    before = memfd_maps(), fds()
    some_use()
    gc.collect()
    assert (memfd_maps(), fds()) == before


def memfd_maps() -> int:
    with open("/proc/self/maps") as lines:
        return sum("memfd:arena" in line for line in lines)


def test_the_death_of_the_last_view_is_told_once(segment):
    deaths = []
    exported = segment.mapping.export(4096, 4096, deaths.append, "gone")
    tensor = torch.frombuffer(exported, dtype=torch.int32)
    views = [tensor[1:], torch.nn.Parameter(tensor.view(torch.float32)), tensor.numpy(), memoryview(exported)[3:]]
    del exported, tensor
    while views:
        assert deaths == []
        del views[0]
        gc.collect()
    assert deaths == ["gone"]


def test_two_exports_of_one_range_die_apart(segment):
    deaths = []
    first = segment.mapping.export(0, 64, deaths.append, "first")
    second = segment.mapping.export(0, 64, deaths.append, "second")
    first[:4] = b"same"
    assert bytes(second[:4]) == b"same"
    del second
    assert deaths == ["second"]
    del first
    assert deaths == ["second", "first"]


def look_at_it_from_a_forked_child() -> str:
    segment = Segment.create("test", layout.PAGE)
    pid = os.fork()
    if pid == 0:
        # What the child inherits is not there for it: MADV_DONTFORK, then a range that nobody may touch.
        lines = maps_at(segment.mapping.address, layout.PAGE)
        os._exit(0 if len(lines) == 1 and " ---p " in lines[0] else 1)
    _, status = os.waitpid(pid, 0)
    segment.mapping.view()[:2] = b"ok"
    return "untouched" if os.waitstatus_to_exitcode(status) == 0 else "reachable"


def test_a_forked_child_can_not_reach_what_its_parent_writes():
    assert processes.run(look_at_it_from_a_forked_child) == "untouched"


# --- pages -----------------------------------------------------------------------------------------------------------


def test_large_mappings_start_where_huge_pages_can():
    assert Segment.create("small", layout.PAGE).mapping.address % layout.PAGE == 0
    for nbytes in (layout.HUGE_PAGE, layout.HUGE_PAGE + layout.PAGE, 8 * MIB):
        assert Segment.create("large", nbytes).mapping.address % layout.HUGE_PAGE == 0


def test_collapsed_memory_is_zero_and_works_like_any_other(segment):
    collapsed = segment.mapping.collapse(0, 4 * MIB)
    assert collapsed in (True, False)  # the kernel may have no huge page to give
    view = segment.mapping.view()
    assert view == bytes(4 * MIB)
    view[2 * MIB - 2 : 2 * MIB + 2] = b"edge"
    peer = Segment.attach(os.dup(segment.fd), segment.nbytes)
    assert bytes(peer.mapping.view(2 * MIB - 2, 4)) == b"edge"
    peer.close()


def test_collapsing_part_of_a_segment_leaves_the_rest_alone(segment):
    view = segment.mapping.view()
    view[2 * MIB : 2 * MIB + 4] = b"kept"
    segment.mapping.collapse(0, 2 * MIB)
    assert bytes(view[2 * MIB : 2 * MIB + 4]) == b"kept"


def resident(address: int) -> int:
    """Resident bytes of the mapping that holds an address."""
    with open("/proc/self/smaps") as lines:
        inside = False
        for line in lines:
            head = line.split()[0]
            if "-" in head and not head.endswith(":"):
                start, end = (int(part, 16) for part in head.split("-"))
                inside = start <= address < end
            elif inside and line.startswith("Rss:"):
                return int(line.split()[1]) * 1024
    raise AssertionError("no such mapping")


def test_populating_brings_pages_in_without_changing_them(segment):
    segment.mapping.view()[5:8] = b"abc"
    assert segment.mapping.populate(0, 4 * MIB)
    assert resident(segment.mapping.address) == 4 * MIB
    assert bytes(segment.mapping.view(4, 5)) == b"\0abc\0"


def test_a_reader_can_populate_too(segment):
    segment.mapping.populate(0, 4 * MIB)
    peer = Segment.attach(os.dup(segment.fd), segment.nbytes)
    assert peer.mapping.populate(0, 4 * MIB)
    assert resident(peer.mapping.address) == 4 * MIB
    peer.close()


# --- copies ----------------------------------------------------------------------------------------------------------

LARGE = memory._GIL_FREE_COPY_BYTES


@pytest.mark.parametrize("nbytes", [0, 1, 4095, LARGE - 1, LARGE, LARGE + 1, 3 * MIB])
@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview, lambda data: np.frombuffer(data, np.uint8)])
def test_a_copy_is_exact_and_stays_inside_its_target(nbytes, wrap):
    source = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8).tobytes()
    target = bytearray(b"\xee" * (nbytes + 32))
    copy_bytes(memoryview(target)[16 : 16 + nbytes], wrap(source))
    assert target == b"\xee" * 16 + source + b"\xee" * 16


@pytest.mark.parametrize("nbytes", [100, LARGE])
@pytest.mark.parametrize("difference", [-1, 1])
def test_a_copy_of_another_length_is_refused(nbytes, difference):
    target = bytearray(nbytes)
    with pytest.raises(ValueError):
        copy_bytes(memoryview(target), bytes(b"x" * (nbytes + difference)))
    assert target == bytes(nbytes)


@pytest.mark.parametrize("nbytes", [100, LARGE])
def test_a_copy_into_read_only_memory_is_refused(nbytes):
    with pytest.raises((BufferError, TypeError)):
        copy_bytes(memoryview(bytes(nbytes)), bytes(nbytes))


@pytest.mark.parametrize("nbytes", [100, LARGE])
def test_a_copy_keeps_hold_of_neither_end(nbytes):
    source, target = bytearray(nbytes), bytearray(nbytes)
    copy_bytes(memoryview(target), source)
    source.clear()  # BufferError while anybody has a view
    target.clear()


def test_a_large_copy_lets_other_threads_run():
    source, target = bytes(8 * MIB), memoryview(bytearray(8 * MIB))
    copying, somebody_ran = threading.Event(), threading.Event()
    noticed = []

    def copy_until_somebody_ran():
        copying.set()
        for _ in range(200):
            copy_bytes(target, source)
            if somebody_ran.is_set():
                noticed.append(True)
                return

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # nobody is made to give the interpreter up: it has to be given up for the copy
    try:
        thread = threading.Thread(target=copy_until_somebody_ran)
        thread.start()
        copying.wait()
        somebody_ran.set()
        thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert noticed


# --- room ------------------------------------------------------------------------------------------------------------


def test_headroom_is_no_more_than_the_machine_has():
    with open("/proc/meminfo") as lines:
        total = int(next(line for line in lines if line.startswith("MemTotal:")).split()[1]) * 1024
    assert 0 < memory.headroom_bytes() <= total


def test_headroom_is_the_least_of_host_and_every_cgroup(tmp_path, monkeypatch):
    files = []
    for number, (limit, usage) in enumerate([("max", "5"), ("1000", "400"), ("800", "700"), ("10", "99")]):
        (tmp_path / f"limit{number}").write_text(f"{limit}\n")
        (tmp_path / f"usage{number}").write_text(f"{usage}\n")
        files.append((str(tmp_path / f"limit{number}"), str(tmp_path / f"usage{number}")))
    monkeypatch.setattr(memory, "_available_bytes", lambda: 10_000)
    for count, expected in [(0, 10_000), (1, 10_000), (2, 600), (3, 100), (4, 0)]:
        monkeypatch.setattr(memory, "_cgroup_files", lambda count=count: iter(files[:count]))
        assert memory.headroom_bytes() == expected


@pytest.mark.parametrize("text", ["", "lots\n", "-\n"])
def test_a_cgroup_file_that_makes_no_sense_is_no_limit(text, tmp_path, monkeypatch):
    (tmp_path / "limit").write_text(text)
    (tmp_path / "usage").write_text("5")
    pairs = [(str(tmp_path / "limit"), str(tmp_path / "usage")), (str(tmp_path / "absent"), str(tmp_path / "absent"))]
    monkeypatch.setattr(memory, "_available_bytes", lambda: 10_000)
    monkeypatch.setattr(memory, "_cgroup_files", lambda: iter(pairs))
    assert memory.headroom_bytes() == 10_000


def read_as(contents: dict[str, str], tmp_path, monkeypatch):
    """Let memory.py open files of ours in place of the kernel's."""
    real_open = open

    def fake_open(path, *args, **kwargs):
        if path in contents:
            replaced = tmp_path / path.replace("/", "_")
            replaced.write_text(contents[path])
            return real_open(replaced, *args, **kwargs)
        return real_open(path, *args, **kwargs)

    monkeypatch.setattr(memory, "open", fake_open, raising=False)


@pytest.mark.parametrize(
    ("cgroup", "roots"),
    [
        ("0::/\n", ["/sys/fs/cgroup"]),
        ("0::/a/b\n", ["/sys/fs/cgroup/a/b", "/sys/fs/cgroup/a", "/sys/fs/cgroup"]),
        ("0::/../a\n", ["/sys/fs/cgroup/a", "/sys/fs/cgroup"]),
        ("4:memory:/a\n3:cpu:/b\n", ["/sys/fs/cgroup/memory/a", "/sys/fs/cgroup/memory"]),
        ("4:cpu,memory:/\n", ["/sys/fs/cgroup/memory/", "/sys/fs/cgroup/memory"]),
        ("nonsense\n", []),
    ],
)
def test_this_process_and_its_ancestors_are_asked_for_their_limits(cgroup, roots, tmp_path, monkeypatch):
    read_as({"/proc/self/cgroup": cgroup}, tmp_path, monkeypatch)
    assert [limit.rpartition("/")[0] for limit, _ in memory._cgroup_files()] == roots


@pytest.mark.parametrize(
    ("text", "expected"), [("MemTotal: 9 kB\nMemAvailable:   12 kB\n", 12 << 10), ("nothing\n", 1 << 62)]
)
def test_available_memory_is_what_the_kernel_says(text, expected, tmp_path, monkeypatch):
    read_as({"/proc/meminfo": text}, tmp_path, monkeypatch)
    assert memory._available_bytes() == expected


# --- futexes ---------------------------------------------------------------------------------------------------------


def test_a_word_that_has_moved_already_is_not_slept_on(segment):
    futex, words = segment.mapping.futex(64), segment.mapping.words(64, 1)
    words[0] = 6
    assert futex.wait(5, 10_000_000_000)


@pytest.mark.parametrize("word", [0, 5, 5 + (1 << 32), (1 << 63) + 5])
def test_only_the_low_half_of_a_word_is_compared(segment, word):
    futex, words = segment.mapping.futex(64), segment.mapping.words(64, 1)
    words[0] = word
    assert not futex.wait(word, 1000), "equal: it sleeps until the timeout"
    assert futex.wait(word + 1, 10_000_000_000), "unequal: it does not sleep"


def test_a_sleep_that_nobody_ends_says_so(segment):
    assert segment.mapping.futex(0).wait(0, 2_000_000) is False


def sleep_on(fd: Any, nbytes: int, offset: int, announce: Any) -> tuple[bool, int]:
    segment = Segment.attach(fd.detach(), nbytes)
    futex = segment.mapping.futex(offset)
    announce.send((os.getpid(), segment.mapping.address + offset))
    woken = futex.wait(0, 30_000_000_000)
    return woken, segment.mapping.words(offset, 1)[0]


@pytest.mark.parametrize("sleepers", [1, 3])
def test_a_wake_reaches_every_process_that_sleeps_on_a_read_only_mapping(segment, sleepers):
    with contextlib.ExitStack() as stack:
        children = []
        for _ in range(sleepers):
            asleep, there = processes.context.Pipe(duplex=False)
            fd = processes.context.reducer.DupFd(segment.fd)
            child = stack.enter_context(processes.Child(sleep_on, fd, segment.nbytes, 1024, there))
            children.append((child, asleep))
        for _, asleep in children:
            assert asleep.poll(20)
            pid, address = asleep.recv()
            wait_until_asleep_on(address, pid=pid)
        segment.mapping.words(1024, 1)[0] = 9
        segment.mapping.futex(1024).wake()
        assert [child.result() for child, _ in children] == [(True, 9)] * sleepers


def test_a_wake_with_nobody_asleep_does_nothing(segment):
    segment.mapping.futex(0).wake()


def test_a_futex_keeps_its_mapping_for_as_long_as_somebody_may_sleep_on_it():
    segment = Segment.create("test", layout.PAGE)
    mapping, futex = weakref.ref(segment.mapping), segment.mapping.futex(0)
    segment.close()
    del segment
    gc.collect()
    assert mapping() is None
    assert isinstance(futex, Futex)
    assert futex.wait(0, 1000) is False
