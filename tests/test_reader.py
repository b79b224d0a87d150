"""Which queues are found, which of several are shown, and what a snapshot says of the living and the dead."""

import contextlib
import gc
import os
import resource
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from arena import MessageQueue, QueueConfig
from arena.probe import EndpointState, Probe, ProbeReader, Role, page, queue_directories
from arena.probe.directory import queue_directory, reader_page
from telemetry.reader import MAX_COMMUNICATORS, MAX_QUEUES, MAX_RANKS, MAX_READERS, Look, Watcher
from tests.support import processes, ranks
from tests.support.fleet import (
    A_WHILE_S,
    Fleet,
    Here,
    arena_maps,
    attach,
    create,
    drain,
    enqueue,
    eventually,
    keep,
    open_fds,
)


@pytest.fixture
def watcher(run_dir) -> Iterator[Watcher]:
    with Watcher() as watcher:
        yield watcher


@pytest.fixture
def fleet(run_dir) -> Iterator[Fleet]:
    with Fleet() as fleet:
        yield fleet


def make_page(directory: Path, role: Role = Role.WRITER, rank: int = 0, **options: Any) -> Probe:
    """A page of this process's without a queue behind it."""
    n_reader = options.pop("n_reader", 2)
    incarnation = secrets.token_hex(3)
    path = directory / "writer" if role is Role.WRITER else reader_page(directory, rank, os.getpid(), incarnation)
    about = {"queue": "test", "n_reader": n_reader, "slots": 8}
    return Probe(path, role, rank=rank, n_reader=n_reader, slots=8 if role is Role.WRITER else 0, about=about)


def make_rank(directory: Path, rank: int, **about: Any) -> Probe:
    """A page of this process's without a communicator behind it."""
    about = {"group": "0", "world": 2, "device": "cpu", "paths": ["cpu_one_shot", "gloo"], "plan": "default"} | about
    return Probe(directory / f"rank-{rank}", Role.COMMUNICATOR, rank=rank, n_reader=0, slots=0, about=about)


def labels(look: Look) -> list[str]:
    return [queue.label for queue in look.queues]


def reasons(look: Look) -> list[str]:
    return [trouble.reason for trouble in look.troubles]


# --- finding ---------------------------------------------------------------------------------------------------------


def test_where_nothing_is_there_is_nothing_to_see_and_nothing_is_made(run_dir):
    with Watcher(run_dir / "later") as watcher:
        assert (watcher.look().queues, watcher.look().troubles) == ((), ())
    assert not (run_dir / "later").exists()


def test_a_queue_is_found_with_all_its_ends(watcher):
    with MessageQueue(2, config=QueueConfig(name="steps", slots=4)) as writer:
        readers = [MessageQueue.create_from_handle(writer.export_handle(), rank) for rank in (1, 0)]
        writer.enqueue("one")
        writer.enqueue("two")
        readers[0].dequeue()
        (queue,) = watcher.look().queues
        assert (queue.label, queue.n_reader, queue.slots) == ("steps", 2, 4)
        assert [reader.rank for reader in queue.readers] == [0, 1]
        assert queue.writer is not None
        assert (queue.writer.sequence, queue.writer.alive, queue.writer.state) == (2, True, EndpointState.WORKING)
        assert [queue.lag(reader) for reader in queue.readers] == [2, 1]
        assert 0 < queue.lag_s(queue.readers[0]) < A_WHILE_S
        assert all(end.page.owner.pid == os.getpid() for end in queue.endpoints)
        assert {sample.name for sample in queue.writer.samples()} >= {"messages_published_total", "segments"}
        for reader in readers:
            reader.shutdown()
    assert watcher.look().queues == ()


def test_a_snapshot_stays_as_it_was(watcher):
    with MessageQueue(1, config=QueueConfig(name="steps")) as writer:
        before = watcher.look().queues[0].writer
        for step in range(10):
            writer.enqueue(step)
        after = watcher.look().queues[0].writer
        assert before is not None and after is not None
        assert (before.sequence, after.sequence) == (0, 10)
        assert before.page is after.page


def test_held_bytes_are_those_of_the_blocks_a_reader_keeps(fleet, watcher):
    torch = pytest.importorskip("torch")
    with MessageQueue(2, config=QueueConfig(name="steps", huge_pages=False)) as writer:
        keeper, _ = fleet.readers(writer, 0, 1)
        writer.enqueue(torch.zeros(1_000_000, dtype=torch.uint8))
        keeper.call(keep, "one")
        (queue,) = watcher.look().queues
        assert queue.held_bytes(0) >= 1_000_000
        assert queue.held_bytes(5) == 0


def sum_up(here: Here, rank: int, operations: int) -> None:
    import torch

    for _ in range(operations):
        here.comm.all_reduce(torch.ones(8))
    here.comm.statistics()  # writes the page out


def test_a_communicator_is_found_beside_a_queue_with_all_its_ranks(run_dir, tmp_path, watcher):
    with MessageQueue(1, config=QueueConfig(name="steps")), ranks.group(2, tmp_path / "store") as workers:
        ranks.together(workers, ranks.make, force_path="cpu_two_shot")
        ranks.together(workers, sum_up, 3)
        look = watcher.look()
        assert labels(look) == ["steps"]
        (group,) = look.communicators
        assert (group.label, group.world, group.paths) == ("0", 2, ("cpu_two_shot", "gloo"))
        assert group.declined.keys() <= {"cpu_one_shot"}
        assert group.plan.startswith("forced to cpu_two_shot")
        assert group.directory.name == f"allreduce-0@{group.instance}"
        assert [(rank.rank, rank.page.owner.pid) for rank in group.ranks] == [(0, workers[0].pid), (1, workers[1].pid)]
        for rank in group.ranks:
            assert (rank.sequence, rank.alive, rank.state) == (3, True, EndpointState.WORKING)
            served = {one.labels["path"]: one.value for one in rank.samples() if one.name == "allreduce_total"}
            assert served["cpu_two_shot"] == 3
        assert look.pages == 3
        workers[1].kill()
        assert [rank.alive for rank in watcher.look().communicators[0].ranks] == [True, False]
        workers[0].kill()
        assert [rank.alive for rank in watcher.look().communicators[0].ranks] == [False, False]


def test_what_a_communicator_says_of_itself_may_be_nonsense(run_dir, watcher):
    make_rank(queue_directory(run_dir, "allreduce-0", "x"), 0, world="two", paths={"a": 1}, declined=[3], plan=None)
    (group,) = watcher.look().communicators
    assert (group.world, group.paths, group.declined, group.plan) == (0, (), {}, "None")
    make_rank(queue_directory(run_dir, "allreduce-1", "x"), 0, paths=[["a"], "gloo"], declined={"a": "b", "c": [1, 2]})
    group = watcher.look().communicators[1]
    assert (group.paths, group.declined) == (("gloo",), {"c": ("1", "2")})


# --- which of several ------------------------------------------------------------------------------------------------


def test_of_two_living_queues_of_a_name_the_older_has_it_alone(watcher):
    with MessageQueue(1, config=QueueConfig(name="a")) as older:
        with MessageQueue(1, config=QueueConfig(name="a")) as younger:
            first, second = watcher.look().queues
            assert (first.label, first.instance) == ("a", older.export_handle().instance)
            assert (second.label, second.instance) == (f"a@{second.instance}", younger.export_handle().instance)
        assert labels(watcher.look()) == ["a"]


def die(run_dir: str, name: str) -> None:
    writer = MessageQueue(1, config=QueueConfig(name=name, run_dir=run_dir))
    writer.enqueue("last words")
    os.kill(os.getpid(), 9)


def kill_a_writer(run_dir: Path, name: str) -> None:
    with pytest.raises(processes.ChildDied, match="-9"):
        processes.run(die, str(run_dir), name)


def test_of_dead_queues_of_a_name_the_newest_is_shown_until_one_lives(run_dir, watcher):
    kill_a_writer(run_dir, "a")
    kill_a_writer(run_dir, "a")
    (dead,) = watcher.look().queues
    assert dead.label == "a"
    assert dead.writer is not None
    assert (dead.writer.alive, dead.writer.sequence) == (False, 1)
    directories = {one.name: one.stat().st_mtime_ns for one in queue_directories(run_dir)}
    assert dead.directory.name == max(directories, key=lambda name: directories[name])
    with MessageQueue(1, config=QueueConfig(name="a")) as living:
        (queue,) = watcher.look().queues
        assert (queue.label, queue.instance) == ("a", living.export_handle().instance)


def test_more_queues_than_the_limit_lose_the_dead_first(run_dir, watcher):
    kill_a_writer(run_dir, "dead")
    for number in range(MAX_QUEUES):
        make_page(queue_directory(run_dir, f"living-{number}", "x"))
    look = watcher.look()
    assert len(look.queues) == MAX_QUEUES
    assert "dead" not in labels(look)
    assert reasons(look) == ["too_many_queues"]
    assert "arena gc" in look.troubles[0].message


def test_ranks_beyond_the_limit_are_left_out(run_dir, watcher):
    directory = queue_directory(run_dir, "wide", "x")
    kept = [make_page(directory, n_reader=MAX_READERS + 1)]
    kept += [
        make_page(directory, Role.READER, rank, n_reader=MAX_READERS + 1) for rank in (0, MAX_READERS - 1, MAX_READERS)
    ]
    look = watcher.look()
    assert [reader.rank for reader in look.queues[0].readers] == [0, MAX_READERS - 1]
    assert reasons(look) == ["too_many_readers"]


def test_of_two_living_communicators_over_groups_of_a_name_the_older_has_it_alone(run_dir, watcher):
    for instance in ("y", "x"):
        make_rank(queue_directory(run_dir, "allreduce-0", instance), 0)
    assert [group.label for group in watcher.look().communicators] == ["0", "0@x"]


def test_more_communicators_and_ranks_than_the_limits_are_left_out(run_dir, watcher):
    for number in range(MAX_COMMUNICATORS + 1):
        make_rank(queue_directory(run_dir, f"allreduce-{number}", "x"), 0)
    wide = queue_directory(run_dir, "allreduce-wide", "x")
    for rank in (0, MAX_RANKS - 1, MAX_RANKS):
        make_rank(wide, rank)
    look = watcher.look()
    assert len(look.communicators) == MAX_COMMUNICATORS
    assert [rank.rank for rank in look.communicators[-1].ranks] == [0, MAX_RANKS - 1]
    assert sorted(reasons(look)) == ["too_many_communicators"] * 2 + ["too_many_ranks"]
    assert look.queues == ()


def test_a_rank_page_in_a_queues_directory_does_not_hide_the_queue(run_dir, watcher):
    directory = queue_directory(run_dir, "steps", "x")
    make_page(directory)
    make_rank(directory, 0)
    look = watcher.look()
    assert (labels(look), look.communicators) == (["steps"], ())


def test_the_newest_incarnation_of_a_rank_is_shown_and_a_living_one_before_a_dead(fleet, watcher):
    writer = fleet.start()
    handle = writer.call(create, 1, name="steps", on_reader_death="continue")
    first, second = fleet.start(), fleet.start()
    first.call(attach, handle, 0)
    first.kill()
    (queue,) = watcher.look().queues
    assert [(reader.alive, reader.page.owner.pid) for reader in queue.readers] == [(False, first.pid)]
    second.call(attach, handle, 0)
    (queue,) = watcher.look().queues
    assert [(reader.alive, reader.page.owner.pid) for reader in queue.readers] == [(True, second.pid)]


# --- the dead and the stopped ----------------------------------------------------------------------------------------


def test_a_wait_names_who_is_waited_for_and_since_when_one_alone_is(fleet, watcher):
    writer, quick, slow = (fleet.start() for _ in range(3))
    handle = writer.call(create, 2, name="steps", slots=2)
    quick.call(attach, handle, 0)
    slow.call(attach, handle, 1)
    waiting = writer.begin(enqueue, 1, 2, 3)

    def wait() -> Any:
        end = watcher.look().queues[0].writer
        assert end is not None
        return end.wait

    both = eventually(lambda: wait() if wait().since_ns else None)
    assert (both.pending, both.alone) == ((0, 1), None)
    quick.call(drain, 2)
    one = eventually(lambda: wait() if wait().alone else None)
    assert one.pending == (1,)
    rank, alone_ns = one.alone
    assert (rank, one.since_ns) == (1, both.since_ns)
    assert both.since_ns < alone_ns <= one.progress_ns
    slow.call(drain, 3)
    waiting.result()
    assert (wait().since_ns, wait().pending, wait().alone) == (0, (), None)


def test_what_a_dead_writer_waited_for_stays_and_does_not_grow(fleet, watcher):
    writer, reader = fleet.start(), fleet.start()
    reader.call(attach, writer.call(create, 1, name="steps", slots=2), 0)
    reader.freeze()
    writer.begin(enqueue, 1, 2, 3)

    def lasted() -> int:
        end = watcher.look().queues[0].writer
        assert end is not None
        return end.wait.since_ns and end.wait.progress_ns - end.wait.since_ns

    eventually(lambda: lasted() > 100_000_000)
    writer.kill()
    reader.kill()
    once = lasted()
    time.sleep(0.2)
    assert lasted() == once > 0
    (queue,) = watcher.look().queues
    assert [end.alive for end in queue.endpoints] == [False, False]
    assert queue.lag(queue.readers[0]) == 2


def test_the_lag_of_a_dead_queue_does_not_grow(fleet, watcher):
    writer, reader = fleet.start(), fleet.start()
    reader.call(attach, writer.call(create, 1, name="steps", slots=8), 0)
    writer.call(enqueue, 1, 2)
    reader.freeze()
    for worker in (writer, reader):
        worker.kill()
    lags = []
    for _ in range(2):
        (queue,) = watcher.look().queues
        lags.append((queue.lag(queue.readers[0]), queue.lag_s(queue.readers[0])))
        time.sleep(0.05)
    assert lags[0] == lags[1]
    assert lags[0][0] == 2


def test_a_dead_reader_that_the_writer_went_on_without_has_no_lag(run_dir, watcher):
    directory = queue_directory(run_dir, "steps", "x")
    writer, reader = make_page(directory), make_page(directory, Role.READER)
    writer.words[page.L_SEQUENCE] = 50
    reader.words[page.L_SEQUENCE] = 3
    assert watcher.look().queues[0].lag(watcher.look().queues[0].readers[0]) == 8, "alive: the length of the ring"
    reader.words[page.H_START_TICKS] += 1  # nobody's any more
    with Watcher() as another:  # to the first one, a header that changes is a page to be read anew
        (queue,) = another.look().queues
    assert (queue.readers[0].alive, queue.lag(queue.readers[0])) == (False, 0)


# --- pages that can't be read ----------------------------------------------------------------------------------------


def spoil(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "truncated":
        path.write_bytes(data[:4096])
        return
    word, value = {"foreign": (page.H_MAGIC, 7), "older": (page.H_VERSION, 0), "newer": (page.H_VERSION, 99)}[how]
    data[word * 8 : word * 8 + 8] = value.to_bytes(8, "little")
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("how", "reason"), [("truncated", "truncated"), ("foreign", "foreign"), ("older", "version"), ("newer", "version")]
)
@pytest.mark.parametrize("looked_before", [False, True])
def test_a_bad_page_is_left_out_and_said_and_the_rest_is_shown(run_dir, watcher, how, reason, looked_before):
    directory = queue_directory(run_dir, "steps", "x")
    kept, bad = make_page(directory), make_page(directory, Role.READER, 1)
    make_page(directory, Role.READER, 0)
    if looked_before:
        assert len(watcher.look().queues[0].readers) == 2
    spoil(bad.path, how)
    look = watcher.look()
    assert [reader.rank for reader in look.queues[0].readers] == [0]
    assert reasons(look) in ([reason], ["changed"])
    assert bad.path.name in look.troubles[0].message
    assert reasons(watcher.look()) == [reason], "said at every look"
    bad.path.unlink()
    assert reasons(watcher.look()) == []
    assert kept.path.exists()


@pytest.mark.parametrize(
    ("how", "reason"), [("truncated", "truncated"), ("foreign", "foreign"), ("older", "version"), ("newer", "version")]
)
@pytest.mark.parametrize("looked_before", [False, True])
def test_a_bad_page_of_a_rank_is_left_out_and_said_and_the_rest_is_shown(run_dir, watcher, how, reason, looked_before):
    directory = queue_directory(run_dir, "allreduce-0", "x")
    made = [make_rank(directory, rank) for rank in range(3)]
    if looked_before:
        assert len(watcher.look().communicators[0].ranks) == 3
    spoil(made[1].path, how)
    look = watcher.look()
    assert [rank.rank for rank in look.communicators[0].ranks] == [0, 2]
    assert reasons(look) in ([reason], ["changed"])
    assert reasons(watcher.look()) == [reason], "said at every look"


def test_a_page_that_is_cut_short_while_it_is_mapped_does_not_kill_who_looks(run_dir, watcher):
    directory = queue_directory(run_dir, "steps", "x")
    make_page(directory)
    reader = make_page(directory, Role.READER)
    watcher.look()
    os.truncate(reader.path, 4096)
    assert reasons(watcher.look()) == ["truncated"]


def test_a_page_that_is_still_being_made_is_no_trouble_until_it_is_old(run_dir, watcher):
    directory = queue_directory(run_dir, "steps", "x")
    path = directory / "writer"
    path.write_bytes(bytes(65536))
    assert (watcher.look().queues, watcher.look().troubles) == ((), ())
    os.utime(path, (0, 0))
    assert reasons(watcher.look()) == ["foreign"]


def test_what_is_no_page_at_all_holds_nobody_up(run_dir, watcher):
    directory = queue_directory(run_dir, "steps", "x")
    make_page(directory)
    os.mkfifo(directory / "reader-0-1-a")
    (directory / "reader-1-1-a").mkdir()
    (directory / "reader-2-1-a").symlink_to("/dev/zero")
    look = watcher.look()
    assert labels(look) == ["steps"]
    assert len(look.troubles) == 3


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o702])
def test_a_run_directory_that_anybody_may_write_to_is_refused(run_dir, watcher, mode):
    make_page(queue_directory(run_dir, "steps", "x"))
    run_dir.chmod(mode)
    look = watcher.look()
    assert (look.queues, reasons(look)) == ((), ["directory"])
    assert "ARENA_RUN_DIR" in look.troubles[0].message
    run_dir.chmod(0o700)
    assert labels(watcher.look()) == ["steps"]


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_run_directory_that_is_none_is_refused(run_dir, kind):
    path = run_dir / "elsewhere"
    path.write_text("x") if kind == "file" else path.symlink_to(run_dir)
    with Watcher(path) as watcher:
        assert reasons(watcher.look()) == ["directory"]


# --- somebody else's -------------------------------------------------------------------------------------------------

NOBODY = 65534
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")


def look_as(uid: int, gid: int, run_dir: str) -> tuple[list[str], list[bool | None], list[str]]:
    os.setgroups([])
    os.setgid(gid)
    os.setuid(uid)
    with Watcher(run_dir) as watcher:
        look = watcher.look()
    return labels(look), [end.alive for queue in look.queues for end in queue.endpoints], reasons(look)


@needs_root
@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_a_sidecar_of_the_group_reads_what_the_run_directorys_group_may(run_dir, umask):
    os.chown(run_dir, 0, NOBODY)
    run_dir.chmod(0o2750)
    before = os.umask(umask)
    try:
        with MessageQueue(1, config=QueueConfig(name="steps")) as writer:
            reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
            (directory,) = queue_directories(run_dir)
            assert directory.stat().st_gid == NOBODY
            assert not stat.S_IMODE(directory.stat().st_mode) & 0o027
            seen = processes.run(look_as, NOBODY - 1, NOBODY, str(run_dir))
            assert seen[0] == ["steps"]
            assert set(seen[1]) <= {True, None}, "alive, or unknown where /proc is hidden"
            assert (len(seen[1]), seen[2]) == (2, [])
            reader.shutdown()
    finally:
        os.umask(before)


@needs_root
def test_whoever_is_not_in_the_group_is_told_what_to_do(run_dir):
    with MessageQueue(1, config=QueueConfig(name="steps")):
        assert processes.run(look_as, NOBODY - 1, NOBODY, str(run_dir)) == ([], [], ["directory"])
        run_dir.chmod(0o755)
        assert processes.run(look_as, NOBODY - 1, NOBODY, str(run_dir)) == ([], [], ["unreadable"])


# --- keeping pages mapped --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def no_file_descriptor_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_too_many_open_files_make_nobody_dead_and_hide_nothing(run_dir, watcher):
    with MessageQueue(1, config=QueueConfig(name="steps")):
        (before,) = watcher.look().queues
        with no_file_descriptor_left():
            look = watcher.look()
        assert [one.reason for one in look.troubles] == ["directory"]
        (during,) = look.queues
        assert (during.label, [end.alive for end in during.endpoints]) == (before.label, [None])
        (after,) = watcher.look().queues
        assert [end.alive for end in after.endpoints] == [True]


def test_a_page_that_is_another_one_when_it_is_mapped_again_is_said(run_dir, watcher):
    place = queue_directory(run_dir, "steps", "1")
    about: dict[str, Any] = {"n_reader": 1, "about": {"queue": "steps"}}
    old = Probe(reader_page(place, 0, os.getpid(), "a"), Role.READER, rank=0, slots=0, **about)
    new = Probe(reader_page(place, 0, os.getpid(), "b"), Role.READER, rank=0, slots=0, **about)
    watcher.look()  # the old one is known from now on, and not mapped
    other = Probe(run_dir / "other", Role.READER, rank=0, slots=0, n_reader=1, about={"queue": "after"})
    old.path.write_bytes(other.path.read_bytes())
    new.unlink()
    assert [one.reason for one in watcher.look().troubles] == ["changed"]
    (queue,) = watcher.look().queues
    assert queue.readers[0].page.about["queue"] == "after"


def test_pages_stay_mapped_without_a_file_descriptor_and_go_with_their_files(run_dir, watcher):
    directory = queue_directory(run_dir, "steps", "x")
    ends = [make_page(directory), *(make_page(directory, Role.READER, rank) for rank in range(5))]
    before, fds = len(arena_maps()), len(open_fds())
    for _ in range(20):
        assert watcher.look().pages == 6
    assert (len(arena_maps()) - before, len(open_fds())) == (6, fds)
    shutil.rmtree(directory)
    watcher.look()
    assert len(arena_maps()) == before
    del ends


def test_only_what_is_shown_stays_mapped(run_dir, watcher):
    directory = queue_directory(run_dir, "steps", "x")
    kept = [make_page(directory)]
    for _ in range(4):
        kept.append(make_page(directory, Role.READER, 0))
    before = len(arena_maps())
    assert watcher.look().pages == 2
    assert len(arena_maps()) - before == 2


def test_a_replaced_page_is_read_anew(run_dir, watcher):
    directory = queue_directory(run_dir, "steps", "x")
    make_page(directory).words[page.L_SEQUENCE] = 5
    assert watcher.look().queues[0].writer.sequence == 5
    (directory / "writer").unlink()
    make_page(directory).words[page.L_SEQUENCE] = 9
    assert watcher.look().queues[0].writer.sequence == 9


def test_looking_again_and_again_leaves_nothing_behind(run_dir):
    directory = queue_directory(run_dir, "steps", "x")
    ends = [make_page(directory), make_page(directory, Role.READER)]
    with Watcher() as watcher:
        for _ in range(50):
            watcher.look()
        gc.collect()
        objects = len(gc.get_objects())
        for _ in range(500):
            watcher.look()
        gc.collect()
        grown = len(gc.get_objects()) - objects
    assert grown < 20
    del ends


def test_a_page_is_never_written_to(run_dir, watcher):
    make_page(queue_directory(run_dir, "steps", "x"))
    watcher.look()
    assert [line.split()[1] for line in arena_maps() if "writer" in line].count("r--s") == 1
    with ProbeReader(next(iter(queue_directories(run_dir))) / "writer") as reader, pytest.raises(TypeError):
        reader._words[0] = 1


def test_a_queue_may_be_returned_as_the_last_look_saw_it_while_its_pages_are_the_same(run_dir, watcher):
    directory = queue_directory(run_dir, "steps", "x")
    writer = make_page(directory)
    (before,) = watcher.look().queues
    writer.words[page.L_SEQUENCE] = 5
    assert watcher.look(repeat=["steps"]).queues == (before,)
    reader = make_page(directory, Role.READER)
    assert watcher.look(repeat=["steps"]).queues[0].writer.sequence == 5
    assert watcher.look(readers_of=[]).queues[0].readers[0].values == ()
    assert watcher.look(readers_of=["steps"]).queues[0].readers[0].values
    del reader
