"""The plugin for vLLM, in real processes, on a stand-in that has vLLM's names. `just vllm` has the real engine."""

import contextlib
import os
import pickle
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from arena import MessageQueue, QueueConfig
from arena.errors import HandleMismatch, InvalidArgument, PeerDied, QueueTimeout
from tests.support import stand_in
from tests.support.fleet import Here, eventually
from tests.support.processes import Child, run
from tests.support.ranks import together

A_WHILE_S = 30.0


@pytest.fixture
def place(tmp_path: Path) -> str:
    """Where the plugin is installed."""
    return stand_in.install(tmp_path / "site")


def switched(place: str) -> tuple[Any, stand_in.Told]:
    """In a process of its own: vLLM's module with the plugin loaded, and the log."""
    told = stand_in.enter(place)
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    return shm_broadcast, told


def pair(module: Any, n_reader: int = 1, **options: Any) -> tuple[Any, list[Any]]:
    """A queue with all its readers in one process."""
    queue = module.MessageQueue(n_reader, n_reader, **options)
    handle = pickle.loads(pickle.dumps(queue.export_handle()))
    return queue, [module.MessageQueue.create_from_handle(handle, rank) for rank in range(n_reader)]


def queue_names() -> list[str]:
    """The queues that the run directory tells of."""
    return sorted(path.name.partition("@")[0] for path in Path(os.environ["ARENA_RUN_DIR"]).iterdir())


# ── an engine ────────────────────────────────────────────────────────────────────────────────────
def doubled(rank: int, tensor: torch.Tensor) -> tuple[int, torch.Tensor]:
    return rank, tensor.mul_(2)


def engine(place: str, method: str, world: int) -> tuple[list[str], list[Any], list[str], list[int | None]]:
    """Two tensors through an engine: what queues there are, the answers, what is left, how the workers ended."""
    stand_in.enter(place)
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    executor = MultiprocExecutor(world, method)
    try:
        names = queue_names()
        answers = [executor.collective_rpc(doubled, torch.full((n,), 3)) for n in (4, 1 << 18)]
        summary = [(rank, tensor.numel(), tensor.sum().item()) for answer in answers for rank, tensor in answer]
        for answer in answers:
            for _, tensor in answer:
                tensor.zero_()  # a copy of the engine's own, or memory that it may write to
    finally:
        executor.shutdown()
    return names, summary, queue_names(), [worker.exitcode for worker in executor.workers]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_an_engine_runs_on_arenas_queues_and_leaves_nothing(place, run_dir, method):
    names, summary, left, codes = run(engine, place, method, 2, timeout_s=60)
    assert names == ["vllm:broadcast", "vllm:response:rank0", "vllm:response:rank1"]
    assert summary == [(0, 4, 24), (1, 4, 24), (0, 1 << 18, 6 << 18), (1, 1 << 18, 6 << 18)]
    assert (left, codes) == ([], [0, 0])


def test_the_switch_turns_it_off(place, run_dir, monkeypatch):
    monkeypatch.setenv("ARENA_VLLM", "0")
    names, summary, left, codes = run(engine, place, "fork", 2, timeout_s=60)
    assert (names, left, codes) == ([], [], [0, 0])
    assert summary[-1] == (1, 1 << 18, 6 << 18)


def test_a_switch_that_is_misspelt_is_refused(place, run_dir, monkeypatch):
    monkeypatch.setenv("ARENA_VLLM", "of")
    with pytest.raises(InvalidArgument, match=r"ARENA_VLLM.*expected 1, 0 or observe.*'of'"):
        run(switched, place)


def named_unknown(place: str) -> list[str]:
    from arena.config import unknown_variables

    return unknown_variables()


def test_the_switch_is_no_misspelt_setting(place, monkeypatch):
    monkeypatch.setenv("ARENA_VLLM", "1")
    assert run(named_unknown, place) == []


# ── the name ─────────────────────────────────────────────────────────────────────────────────────
def bound(place: str) -> tuple[list[bool], int]:
    stand_in.enter(place)
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.plugins import load_general_plugins
    from vllm.v1.executor import multiproc_executor

    from arena.integrations.vllm import register

    original = shm_broadcast.MessageQueue
    load_general_plugins()
    ours = shm_broadcast.MessageQueue
    register()
    from vllm.v1.executor import ray_executor_v2

    modules = (shm_broadcast, multiproc_executor, ray_executor_v2)
    return [one.MessageQueue is ours for one in modules], ours.__mro__.count(original)


def test_the_name_is_bound_anew_wherever_it_stands_and_only_once(place):
    assert run(bound, place) == ([True, True, True], 1)


def without_the_verbs(place: str) -> tuple[bool, list[str]]:
    told = stand_in.enter(place)
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.plugins import load_general_plugins

    del shm_broadcast.MessageQueue.create_from_handle
    original = shm_broadcast.MessageQueue
    load_general_plugins()
    return shm_broadcast.MessageQueue is original, told.lines


def test_a_vllm_that_it_does_not_know_is_left_alone(place):
    untouched, lines = run(without_the_verbs, place)
    assert untouched
    (line,) = set(lines)  # once by hand, and where Arena is installed by its entry point, too
    assert "does not know: create_from_handle" in line


def test_arena_imports_no_vllm_and_the_plugin_none_before_it_is_called():
    code = (
        "import sys; sys.modules['vllm'] = None; import arena, arena.integrations.vllm, arena.integrations.vllm.queue; "
        "import arena.integrations.vllm.observer"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=stand_in.ROOT)


# ── half a set of processes ──────────────────────────────────────────────────────────────────────
def half(place: str, engine_has_it: bool) -> tuple[str, list[str]]:
    """An engine of which only one side loads the plugin; what it says, and the workers' log."""
    os.environ["VLLM_PLUGINS"] = "arena" if engine_has_it else "none"
    stand_in.enter(place)
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    other = "none" if engine_has_it else "arena"
    try:
        MultiprocExecutor(1, "spawn", lambda rank: {"VLLM_PLUGINS": other})
    except Exception as error:
        return f"{type(error).__name__}: {error}", []
    return "it started", []


@pytest.mark.parametrize("engine_has_it", [True, False])
def test_half_a_set_of_processes_says_so_at_the_start(place, run_dir, engine_has_it):
    said, _ = run(half, place, engine_has_it)
    assert "HandleMismatch: a process without Arena's plugin was given a queue of Arena's" in said
    assert "expected the plugin in every process" in said
    assert "ARENA_VLLM" in said


def reads_vllms_own(place: str) -> tuple[Any, list[str]]:
    told = stand_in.enter(place)
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.plugins import load_general_plugins

    queue = shm_broadcast.MessageQueue(1, 1)
    load_general_plugins()
    reader = shm_broadcast.MessageQueue.create_from_handle(queue.export_handle(), 0)
    ready = threading.Thread(target=reader.wait_until_ready, daemon=True)
    ready.start()
    queue.wait_until_ready()
    ready.join(A_WHILE_S)
    queue.enqueue("as ever")
    return reader.dequeue(timeout=A_WHILE_S), told.lines


def test_a_queue_of_vllms_own_goes_on_as_such_and_the_log_says_why(place):
    message, lines = run(reads_vllms_own, place)
    assert message == "as ever"
    assert [line for line in lines if line.startswith("WARNING") and "the process that made it has no plugin" in line]


def other_versions(place: str) -> list[str]:
    module, _ = switched(place)
    queue = module.MessageQueue(1, 1, local_reader_ranks=[5])
    handle = queue.export_handle()
    said = []
    for wrong, rank in (
        (replace(handle, version=99), 5),
        (replace(handle, magic="other"), 5),
        (replace(handle, arena=replace(handle.arena, version=99)), 5),
        (handle, 0),
        (handle, -1),
    ):
        with contextlib.suppress(HandleMismatch, InvalidArgument):
            try:
                module.MessageQueue.create_from_handle(wrong, rank)
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
                raise
    queue.shutdown()
    return said


def test_a_handle_of_another_version_and_a_rank_without_a_place_are_refused(place, run_dir):
    version, magic, arena, rank, remote = run(other_versions, place)
    assert version.startswith("HandleMismatch: this handle was made by another version of Arena")
    assert "found arena-vllm-queue version 99" in version
    assert "found other version 1" in magic
    assert "found arena-queue protocol 99" in arena
    assert rank.startswith("InvalidArgument: queue 'vllm:broadcast' keeps no place for rank 0; expected one of [5]")
    assert "no place for rank -1" in remote


def of_another_layout(handle: Any) -> str:
    from arena import layout

    layout.VERSION += 1
    try:
        MessageQueue.create_from_handle(handle, 0, timeout=10)
    except HandleMismatch as error:
        return str(error)
    return "attached"


def test_a_reader_of_another_version_is_told_of_it(run_dir):
    with MessageQueue(1, config=QueueConfig(name="steps")) as queue:
        said = run(of_another_layout, queue.export_handle())
    assert said.startswith("the reader has another version of Arena than the writer of queue 'steps'")
    assert said.endswith("run the same Arena version in every process of the engine")


# ── signatures and exceptions ────────────────────────────────────────────────────────────────────
def face(place: str) -> dict[str, Any]:
    module, told = switched(place)
    queue, (reader,) = pair(module, max_chunk_bytes=64, max_chunks=2, enable_shm_tensor_arena=True, numa_node=3)
    handle = queue.export_handle()
    queue.wait_until_ready()
    reader.wait_until_ready()
    facts: dict[str, Any] = {
        "is a": isinstance(queue, module.MessageQueue.__mro__[2]),
        "handle": (handle.local_reader_ranks, handle.remote_subscribe_addr),
        "knows": [
            (one._is_writer, one._is_local_reader, one._is_remote_reader, one.local_reader_rank, one.shutting_down)
            for one in (queue, reader)
        ],
        "counts": (queue.n_local_reader, queue.n_remote_reader),
    }
    queue.broadcast_object({"step": 1})
    facts["broadcast"] = reader.broadcast_object()
    with queue.acquire_write(timeout=1) as chunk:
        chunk[:3] = b"abc"
    with reader.acquire_read(timeout=1) as chunk:
        facts["chunk"] = (bytes(chunk[:3]), len(chunk))
    with contextlib.suppress(ZeroDivisionError), queue.acquire_write() as chunk:
        raise ZeroDivisionError  # not sent
    queue.enqueue("a message", 1)
    facts["after a chunk that failed"] = reader.dequeue(1, True)
    queue.enqueue("no chunk")
    with contextlib.suppress(InvalidArgument), reader.acquire_read():
        facts["took it"] = True
    for call in (queue.dequeue, lambda: reader.enqueue(1)):
        with contextlib.suppress(RuntimeError):
            call()
            facts["wrong end"] = True
    facts["told"] = told.lines
    return facts


def test_it_has_vllms_signatures(place, run_dir):
    facts = run(face, place)
    assert facts["is a"]
    assert facts["handle"] == ([0], None)
    assert facts["knows"] == [(True, False, False, -1, False), (False, True, False, 0, False)]
    assert facts["counts"] == (1, 0)
    assert facts["broadcast"] == {"step": 1}
    assert facts["chunk"] == (b"abc", 64)
    assert facts["after a chunk that failed"] == "a message"
    assert "took it" not in facts
    assert "wrong end" not in facts
    assert "WARNING queue vllm:broadcast is Arena's, where numa_node has no effect" in facts["told"]


def failures(place: str) -> dict[str, Any]:
    module, told = switched(place)
    queue, (reader,) = pair(module)
    facts: dict[str, Any] = {}

    def fails(name: str, call: Any) -> None:
        try:
            facts[name] = call()
        except Exception as error:
            facts[name] = (type(error), str(error), isinstance(error, (TimeoutError, RuntimeError)))

    for timeout in (0, 0.01, -1.0):
        fails(f"nothing came in {timeout}", lambda timeout=timeout: reader.dequeue(timeout=timeout))

    def lines() -> list[str]:
        return [line for line in told.lines if "awaiting_write" in line]

    reader._interval_s = 0.02
    fails("indefinite", lambda: reader.dequeue(timeout=0.1, indefinite=True))
    facts["lines of an indefinite wait"] = lines()
    threading.Thread(target=lambda: (eventually(lines), queue.enqueue("at last")), daemon=True).start()
    fails("after a line in the log", reader.dequeue)
    for number in range(64):
        queue.enqueue(number)
    fails("full", lambda: queue.enqueue("one more", timeout=0.01))
    facts["in order"] = [reader.dequeue(timeout=1) for _ in range(64)] == list(range(64))
    cancel = threading.Event()
    threading.Timer(0.1, cancel.set).start()
    fails("cancelled", lambda: reader.dequeue(None, cancel, True))
    fails("and stays so", reader.dequeue)

    queue, (reader,) = pair(module)
    threading.Timer(0.1, reader.shutdown).start()
    fails("shut down by another thread", lambda: reader.dequeue(indefinite=True))
    queue, (reader,) = pair(module)
    threading.Timer(0.1, queue.shutdown).start()
    fails("shut down by the writer", reader.dequeue)
    fails("a writer that was", lambda: queue.enqueue(1))
    queue = module.MessageQueue(1, 1)
    threading.Timer(0.1, queue.shutdown).start()
    fails("not ready", queue.wait_until_ready)
    return facts


def test_what_callers_catch_is_what_they_get(place, run_dir):
    facts = run(failures, place)
    for name in ("nothing came in 0", "nothing came in 0.01", "nothing came in -1.0", "indefinite", "full"):
        assert facts[name][0] is QueueTimeout, name
        assert facts[name][2], name
    assert "reader 0" in facts["full"][1]
    assert facts["lines of an indefinite wait"] == []
    assert facts["after a line in the log"] == "at last"
    assert facts["in order"]
    for name in ("cancelled", "and stays so", "not ready", "a writer that was"):
        assert facts[name] == (RuntimeError, "cancelled", True), name
    for end in ("another thread", "the writer"):
        assert facts[f"shut down by {end}"] == (RuntimeError, "cancelled", True)


def writes(place: str, path: str) -> None:
    module, _ = switched(place)
    queue = module.MessageQueue(1, 1)
    queue.enqueue("the last word")
    Path(path + "~").write_bytes(pickle.dumps(queue.export_handle()))
    os.replace(path + "~", path)
    time.sleep(A_WHILE_S)


def reads(place: str, path: str) -> tuple[str, str, Any]:
    module, _ = switched(place)
    reader = module.MessageQueue.create_from_handle(pickle.loads(Path(path).read_bytes()), 0)
    first = reader.dequeue(timeout=A_WHILE_S)
    Path(path).unlink()
    try:
        reader.dequeue(indefinite=True)
    except PeerDied as died:
        return first, str(died), died.pid
    return first, "", None


def test_a_writer_that_is_killed_is_told_and_not_waited_for(place, run_dir, tmp_path):
    path = tmp_path / "handle"
    with Child(writes, place, str(path)) as writer:
        eventually(path.exists)
        with Child(reads, place, str(path)) as reader:
            eventually(lambda: not path.exists())
            writer.kill()
            first, said, pid = reader.result()
    assert (first, pid) == ("the last word", writer.pid)
    assert "the writer of queue 'vllm:broadcast' died" in said


def test_a_reader_polls_for_as_long_as_it_is_told_before_it_sleeps(run_dir):
    with MessageQueue(2) as queue:
        handle = queue.export_handle()
        parks = []
        for rank, how in enumerate(({}, {"poll_s": 30.0})):
            with MessageQueue.create_from_handle(handle, rank, **how) as reader:
                with pytest.raises(QueueTimeout):
                    reader.dequeue(timeout=0.2)
                parks.append(reader.statistics().parks)
    assert parks[0] > 0
    assert parks[1] == 0


@pytest.mark.parametrize("poll_s", ["1", -0.1, 61, float("nan"), None])
def test_a_time_to_poll_that_is_none_is_refused(run_dir, poll_s):
    with MessageQueue(1) as queue, pytest.raises(InvalidArgument, match="poll_s"):
        MessageQueue.create_from_handle(queue.export_handle(), 0, poll_s=poll_s)


# ── what readers get ─────────────────────────────────────────────────────────────────────────────
def written(place: str, n_reader: int) -> list[list[bool]]:
    """For tensors and arrays from 16 bytes to 2 MiB: is one reader's write seen by the last one?"""
    import numpy

    module, _ = switched(place)
    queue, readers = pair(module, n_reader)
    seen = []
    for nbytes in (16, 10_000, 100_000, 2 << 20):
        queue.enqueue((torch.zeros(nbytes, dtype=torch.uint8), numpy.zeros(nbytes, dtype=numpy.uint8)))
        messages = [reader.dequeue(timeout=A_WHILE_S) for reader in readers]
        for part in messages[0]:
            part[0] = 1
        seen.append([bool(part[0]) for part in messages[-1]])
    return seen


def test_on_a_cpu_each_reader_writes_to_its_own(place, run_dir):
    assert run(written, place, 2) == [[False, False]] * 4


def test_for_gpu_workers_large_tensors_are_shared_and_writable(place, run_dir, monkeypatch):
    monkeypatch.setenv("STAND_IN_PLATFORM", "gpu")
    assert run(written, place, 2) == [[False, False]] * 2 + [[True, True]] * 2


# ── groups ───────────────────────────────────────────────────────────────────────────────────────
def remote(place: str) -> tuple[Any, list[Any], list[str], list[str]]:
    module, told = switched(place)
    queue = module.MessageQueue(2, 1, connect_ip="127.0.0.1")
    handle = queue.export_handle()
    readers = [module.MessageQueue.create_from_handle(handle, rank) for rank in (0, -1)]
    threads = [threading.Thread(target=one.wait_until_ready, daemon=True) for one in (queue, *readers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(A_WHILE_S)
    queue.enqueue("far")
    return type(handle).__name__, [one.dequeue(timeout=A_WHILE_S) for one in readers], told.lines, queue_names()


def test_a_group_with_readers_elsewhere_keeps_vllms_queue_and_the_log_says_why(place, run_dir):
    kind, messages, lines, names = run(remote, place)
    assert (kind, messages, names) == ("Handle", ["far", "far"], [])
    assert [line for line in lines if line.startswith("WARNING") and "1 of its 2 readers are on other hosts" in line]


def over_a_group(here: Here, rank: int, place: str) -> dict[str, Any]:
    import torch.distributed as dist

    module, _ = switched(place)
    queue = module.MessageQueue.create_from_process_group(dist.group.WORLD, 1 << 22, 6, writer_rank=1)
    facts = {"told": queue.broadcast_object("all" if rank == 1 else None), "kind": type(queue.handle).__name__}
    one, handles = module.MessageQueue.create_from_process_group_single_reader(dist.group.WORLD, 1 << 22, 6)
    readers = [module.MessageQueue.create_from_handle(handle, 0) for handle in handles]
    one.enqueue(f"from {rank}")
    facts["answers"] = [reader.dequeue(timeout=A_WHILE_S) for reader in readers]
    dist.barrier()
    facts["names"] = queue_names()
    dist.barrier()
    for each in (queue, one, *readers):
        each.shutdown()
    return facts


def test_queues_over_a_process_group(place, two):
    first, second = together(two, over_a_group, place)
    assert first["told"] == second["told"] == "all"
    assert (first["answers"], second["answers"]) == (["from 0", "from 1"], [])
    assert first["names"] == ["vllm:group:0-1", "vllm:response:rank0", "vllm:response:rank1"]
    assert first["kind"] == "QueueHandle"


def dropped(place: str) -> list[str]:
    module, _ = switched(place)
    queue, readers = pair(module)
    del queue, readers
    return queue_names()


def test_a_queue_that_is_only_dropped_is_left_in_order(place, run_dir):
    assert run(dropped, place) == []


# ── only measured ────────────────────────────────────────────────────────────────────────────────
def observed(place: str) -> dict[str, Any]:
    """One of two readers of a ring of four does not read; what its pages say meanwhile."""
    from telemetry.blame import in_progress
    from telemetry.reader import Watcher

    module, told = switched(place)
    queue = module.MessageQueue(2, 2, max_chunks=4, max_chunk_bytes=1 << 16)
    readers = [module.MessageQueue.create_from_handle(queue.export_handle(), rank) for rank in (0, 1)]
    threads = [threading.Thread(target=one.wait_until_ready, daemon=True) for one in (queue, *readers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(A_WHILE_S)
    facts: dict[str, Any] = {"names": queue_names(), "told": told.lines}
    for number in range(4):
        queue.enqueue(number if number else "x" * (1 << 17))
        readers[0].dequeue(timeout=A_WHILE_S)
    sender = threading.Thread(target=queue.enqueue, args=("held up",), daemon=True)
    sender.start()
    with Watcher() as watcher:

        def blocked() -> Any:
            (one,) = watcher.look().queues
            return one if in_progress(one).pending else None

        seen = eventually(blocked)
        facts["blocked by"] = in_progress(seen).pending
        facts["lags"] = {reader.rank: seen.lag(reader) for reader in seen.readers}
        with contextlib.suppress(TimeoutError):
            readers[0].dequeue(timeout=0.01)
        facts["read"] = [len(str(readers[1].dequeue(timeout=A_WHILE_S))) for _ in range(4)]
        sender.join(A_WHILE_S)
        page = queue._page
        facts["blocked"] = [page.values[page.word("writer_blocked_seconds_total", rank)] for rank in (0, 1)]
        facts["paths"] = [page.values[page.word("messages_published_total", path)] for path in ("inline", "fragments")]
    for one in (*readers, queue):
        one.shutdown()
    facts["left"] = queue_names()
    return facts


def test_vllms_own_queue_can_be_measured_and_the_flags_say_who_holds_a_chunk(place, run_dir, monkeypatch):
    monkeypatch.setenv("ARENA_VLLM", "observe")
    facts = run(observed, place)

    assert facts["names"] == ["vllm:broadcast"]
    assert facts["lags"] == {0: 0, 1: 4}
    assert facts["read"] == [1 << 17, 1, 1, 1]
    assert facts["blocked"][1] > facts["blocked"][0] == 0
    assert facts["paths"] == [4, 1]
    assert facts["left"] == []
    assert list(facts["blocked by"]) == [1]


def test_a_measured_engine_answers_as_ever(place, run_dir, monkeypatch):
    monkeypatch.setenv("ARENA_VLLM", "observe")
    names, summary, left, codes = run(engine, place, "fork", 2, timeout_s=60)
    assert names == ["vllm:broadcast", "vllm:response:rank0", "vllm:response:rank1"]
    assert summary == [(0, 4, 24), (1, 4, 24), (0, 1 << 18, 6 << 18), (1, 1 << 18, 6 << 18)]
    assert (left, codes) == ([], [0, 0])


def cut_off(place: str) -> list[list[str]]:
    """What is left when a daemon thread was first to shut an end down, and got no further."""
    module, _ = switched(place)
    from arena.integrations.vllm import observer

    queue = module.MessageQueue(1, 1)
    close, began, never = observer._close, threading.Event(), threading.Event()

    def stuck(page: Any) -> None:
        began.set()
        never.wait()

    observer._close = stuck
    threading.Thread(target=queue.shutdown, daemon=True).start()
    assert began.wait(A_WHILE_S)
    before, observer._close = queue_names(), close
    queue.shutdown()
    return [before, queue_names()]


def test_a_page_is_gone_after_a_shutdown_though_another_thread_was_to_remove_it(place, run_dir, monkeypatch):
    monkeypatch.setenv("ARENA_VLLM", "observe")
    (before,), left = run(cut_off, place)
    assert before.startswith("vllm:")
    assert left == []
