"""Large copies by several threads: all bytes, in order, and none once somebody was told that nobody copies."""

import ctypes
import io
import os
import sys
import threading
import time
import types
from typing import Any

import pytest

from arena import copying, machine_code

SIZE = 64 << 10


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "PIECE_BYTES", SIZE)
    monkeypatch.setattr(copying, "_LARGE_PIECE_BYTES", SIZE)


@pytest.fixture(params=[1, 8])
def cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    count: int = request.param
    monkeypatch.setattr(copying, "_cores", lambda: count)
    return count


class Pair:
    """Random bytes, and as much room between two guards."""

    def __init__(self, nbytes: int, to: int = 0, at: int = 0) -> None:
        self.sent = os.urandom(nbytes)
        self._from = ctypes.create_string_buffer(bytes(at) + self.sent, at + nbytes)
        self._room = ctypes.create_string_buffer(b"\xaa" * (to + nbytes + 64), to + nbytes + 64)
        self._lead, self.nbytes = to, nbytes
        self.at = ctypes.addressof(self._from) + at
        self.to = ctypes.addressof(self._room) + to

    @property
    def came(self) -> bytes:
        assert self._room.raw[: self._lead] == b"\xaa" * self._lead
        assert self._room.raw[self._lead + self.nbytes :] == b"\xaa" * 64
        return self._room.raw[self._lead : self._lead + self.nbytes]


NBYTES = [1, 63, 64, 65, 127, 4096, SIZE, SIZE + 1, 3 * SIZE - 7, 20 * SIZE + 13]


@pytest.mark.parametrize("nbytes", NBYTES)
@pytest.mark.parametrize(("to", "at"), [(0, 0), (1, 0), (0, 3), (15, 16), (33, 5)])
def test_every_byte_is_copied_and_no_other(cores, nbytes, to, at):
    pair = Pair(nbytes, to, at)
    copying.copy(pair.to, pair.at, nbytes)
    assert pair.came == pair.sent
    pair = Pair(nbytes, to, at)
    told: list[int] = []

    def reached(there: int) -> None:
        assert pair.came[:there] == pair.sent[:there]
        told.append(there)

    copying.copy_in_order(pair.to, pair.at, nbytes, reached)
    assert told == [end for _, end in copying.pieces(nbytes, SIZE)]
    assert pair.came == pair.sent


def test_where_there_is_no_loop_of_ours_libc_copies(cores, monkeypatch):
    monkeypatch.setattr(machine_code, "stream", lambda: None)
    pair = Pair(5 * SIZE + 1, 3)
    copying.copy(pair.to, pair.at, pair.nbytes)
    assert pair.came == pair.sent


def test_a_system_that_refuses_executable_pages_has_none_and_it_is_asked_once(monkeypatch):
    asked: list[bytes] = []

    def refuse(code: bytes) -> int:
        asked.append(code)
        raise machine_code.UnsupportedPlatform("no")

    monkeypatch.setattr(machine_code, "executable", refuse)
    monkeypatch.setattr(machine_code, "MACHINE", "x86_64")
    machine_code.stream.cache_clear()
    try:
        assert machine_code.stream() is None
        assert machine_code.stream() is None
    finally:
        machine_code.stream.cache_clear()
    assert len(asked) == 1


@pytest.mark.parametrize("machine", ["aarch64", "riscv64"])
def test_other_machines_have_none(monkeypatch, machine):
    monkeypatch.setattr(machine_code, "MACHINE", machine)
    machine_code.stream.cache_clear()
    try:
        assert machine_code.stream() is None
    finally:
        machine_code.stream.cache_clear()


@pytest.mark.skipif(machine_code.MACHINE != "x86_64", reason="there is no loop for other machines")
def test_this_machine_has_one_and_its_page_is_not_writable():
    assert machine_code.stream() is not None
    address = machine_code.executable(machine_code.STREAM_X86_64)
    with open("/proc/self/maps") as maps:
        rights = {line.split("-")[0]: line.split()[1] for line in maps}
    assert rights[f"{address:x}"] == "r-xp"


@pytest.mark.parametrize(
    ("threads", "cores", "running", "better"),
    [(1, 16, 40, True), (8, 16, 40, True), (9, 16, 9, False), (16, 16, 8, True), (4, 4, 9, True), (5, 5, 3, False)],
)
def test_it_is_better_where_torch_has_few_threads_or_cores_are_free(monkeypatch, threads, cores, running, better):
    monkeypatch.setattr(copying, "_cores", lambda: cores)
    monkeypatch.setattr(copying, "_running", lambda: running)
    assert copying.is_better(threads) is better


def test_somebody_is_running_while_we_look():
    assert 1 <= copying._running() <= 10_000


@pytest.mark.parametrize("text", [None, "", "0.1 0.2 0.3", "0.1 0.2 0.3 x/y 7"])
def test_a_machine_that_won_t_say_counts_as_busy(monkeypatch, text):
    def opened(_: str) -> io.StringIO:
        if text is None:
            raise PermissionError
        return io.StringIO(text)

    monkeypatch.setattr("builtins.open", opened)
    assert copying._running() == copying._cores()


class Slow:
    """Pieces that take as long as the test says, and are counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Semaphore(0)
        self.begun = self.ended = 0
        self._lock = threading.Lock()
        monkeypatch.setattr(copying, "_copy_piece", self)

    def __call__(self, to: int, at: int, nbytes: int) -> None:
        with self._lock:
            self.begun += 1
        assert self.go.acquire(timeout=30)
        ctypes.memmove(to, at, nbytes)
        with self._lock:
            self.ended += 1


@pytest.mark.parametrize("nth", [0, 2])
def test_once_it_has_raised_nobody_copies(monkeypatch, nth):
    monkeypatch.setattr(copying, "_cores", lambda: 8)
    slow = Slow(monkeypatch)
    pair = Pair(20 * SIZE)
    told: list[int] = []

    def reached(there: int) -> None:
        told.append(there)
        if len(told) > nth:
            threading.Timer(0.05, slow.go.release, [100]).start()  # those that are at it take a while
            raise KeyboardInterrupt

    for _ in range(nth + 1):
        slow.go.release()
    slow.go.release(2)  # pieces may end in any order
    with pytest.raises(KeyboardInterrupt):
        copying.copy_in_order(pair.to, pair.at, pair.nbytes, reached)
    begun, came = slow.begun, pair.came
    assert slow.ended == begun < 20
    time.sleep(0.05)
    assert (slow.begun, pair.came) == (begun, came)


def test_a_second_interrupt_waits_for_the_pieces_under_way(monkeypatch):
    monkeypatch.setattr(copying, "_cores", lambda: 8)
    slow = Slow(monkeypatch)
    pair = Pair(20 * SIZE)
    left = [5]

    def nap(seconds: float) -> None:
        left[0] -= 1
        if left[0] == 0:
            slow.go.release(100)
        if left[0] >= 0:
            raise KeyboardInterrupt
        time.sleep(seconds)

    def reached(there: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(copying, "time", types.SimpleNamespace(sleep=nap))
    slow.go.release(1)
    with pytest.raises(KeyboardInterrupt):
        copying.copy_in_order(pair.to, pair.at, SIZE * 20, reached)
    assert left[0] <= 0
    begun, came = slow.begun, pair.came
    assert slow.ended == begun < 20
    time.sleep(0.05)
    assert (slow.begun, pair.came) == (begun, came)


def test_a_pool_whose_thread_an_interrupt_left_half_started_is_given_up(monkeypatch):
    ended: list[bool] = []

    class Torn:
        def submit(self, _: Any) -> None:
            raise KeyboardInterrupt

        def shutdown(self, *, wait: bool) -> None:
            ended.append(wait)

    pools = iter([Torn()])
    real = copying._pool
    real.cache_clear()
    monkeypatch.setattr(copying, "_cores", lambda: 8)
    monkeypatch.setattr(copying, "ThreadPoolExecutor", lambda *_: next(pools))
    pair = Pair(7 * SIZE)
    with pytest.raises(KeyboardInterrupt):
        copying.copy(pair.to, pair.at, pair.nbytes)
    assert ended == [False]
    assert real.cache_info().currsize == 0


def test_an_error_of_a_helper_is_the_caller_s(monkeypatch):
    monkeypatch.setattr(copying, "_cores", lambda: 8)

    def fail(*_: int) -> None:
        raise MemoryError("no")

    monkeypatch.setattr(copying, "_copy_piece", fail)
    pair = Pair(20 * SIZE)
    with pytest.raises(MemoryError):
        copying.copy_in_order(pair.to, pair.at, pair.nbytes, lambda there: None)
    with pytest.raises(MemoryError):
        copying.copy(pair.to, pair.at, pair.nbytes)


def test_an_interpreter_that_starts_no_threads_copies_all_the_same(cores, monkeypatch):
    class Ending:
        def submit(self, _: Any) -> None:
            raise RuntimeError("cannot schedule new futures after shutdown")

    monkeypatch.setattr(copying, "_pool", lambda cores: Ending())
    pair = Pair(7 * SIZE)
    copying.copy(pair.to, pair.at, pair.nbytes)
    assert pair.came == pair.sent
    pair = Pair(7 * SIZE)
    copying.copy_in_order(pair.to, pair.at, pair.nbytes, lambda there: None)
    assert pair.came == pair.sent


def test_a_forked_child_has_threads_of_its_own(monkeypatch):
    monkeypatch.setattr(copying, "_cores", lambda: 8)
    pair = Pair(7 * SIZE)
    copying.copy(pair.to, pair.at, pair.nbytes)
    pid = os.fork()
    if not pid:
        pair = Pair(7 * SIZE)
        copying.copy(pair.to, pair.at, pair.nbytes)
        os._exit(0 if pair.came == pair.sent else 1)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.parametrize("way", ["copy", "copy_in_order"])
def test_an_interrupt_at_any_line_leaves_nobody_copying(monkeypatch, way):
    monkeypatch.setattr(copying, "_cores", lambda: 8)
    line, interrupted = 0, True
    while interrupted:
        line += 1
        pair = Pair(6 * SIZE)
        interrupted = _interrupted_at(line, way, pair)
        came = pair.came
        assert interrupted or came == pair.sent
        time.sleep(0.002)
        assert pair.came == came
    assert line > 20


def _interrupted_at(count: int, way: str, pair: Pair) -> bool:
    """Copy, with an interrupt before the n-th line of `copying` that the calling thread runs."""
    lines = 0

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal lines
        if frame.f_code.co_filename != copying.__file__:
            return None
        if event == "line":
            lines += 1
            if lines == count:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        if way == "copy":
            copying.copy(pair.to, pair.at, pair.nbytes)
        else:
            copying.copy_in_order(pair.to, pair.at, pair.nbytes, lambda there: None)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False
