"""Which path serves a call, told beforehand and counted; and set-up that ends alike on every rank, whatever fails."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from arena import AllReduce
from arena import plan as plans
from arena.account import leave_directory
from arena.allreduce import Decision, lookup
from arena.device import Declined, open_device
from arena.errors import InvalidArgument, PeerDied, RankMissing, SetUpFailed
from arena.joining import group_name
from arena.plan import KIB, LARGEST, Plan, Row
from arena.probe import ProbeReader, Role, collect_garbage, identity
from arena.probe.directory import KEPT_DEAD, queue_directory
from tests.support.fleet import Here, within
from tests.support.ranks import close, group, make, together

ALL = ("cpu_one_shot", "cpu_two_shot", "gloo")
CEILING = 128 * KIB  # of the one-shot at two ranks


@pytest.fixture(autouse=True)
def no_cache(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


# --- dispatch -------------------------------------------------------------------------------------------------------


def explain(here: Here, rank: int, counts: list[int], dtype: torch.dtype) -> list[Decision]:
    """What is said beforehand; and that it is what happens."""
    decisions = []
    for count in counts:
        x = torch.ones(count, dtype=dtype)
        decisions.append(here.comm.explain(x))
        before = here.comm.statistics().operations_by_path
        out = here.comm.all_reduce(x)
        after = here.comm.statistics().operations_by_path
        assert {path for path in after if after[path] != before.get(path, 0)} == {decisions[-1].path}
        assert torch.equal(out, torch.full((count,), here.comm.world).to(dtype))
    return decisions


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_size_at_the_ceiling_stays_and_one_element_more_goes_on(two, dtype):
    together(two, make)
    edge = CEILING // dtype.itemsize
    decisions = together(two, explain, [0, 1, 7, 8, edge - 1, edge, edge + 1], dtype)
    assert decisions[0] == decisions[1]
    assert [one.path for one in decisions[0]] == ["cpu_one_shot"] * 6 + ["cpu_two_shot"]
    assert {one.reasons for one in decisions[0]} == {()}


@pytest.mark.parametrize("world", [2, 3, 4, 6, 8])
def test_every_rank_of_every_world_decides_alike(run_dir, tmp_path, world):
    edge = plans.CPU_ONE_SHOT_CEILINGS[world + world % 2] // 2
    with group(world, tmp_path / "store") as workers:
        together(workers, make)
        decisions = together(workers, explain, [0, 1, edge, edge + 1], torch.bfloat16, within=60)
    assert decisions == [decisions[0]] * world
    assert [one.path for one in decisions[0]] == ["cpu_one_shot"] * 3 + ["cpu_two_shot"]


def test_max_size_is_a_ceiling_whose_excess_goes_to_the_fallback_as_too_large(two):
    together(two, make, max_size=64)
    first, second = together(two, explain, [16, 17], torch.float32)
    assert first == second
    assert [one.path for one in first] == ["cpu_one_shot", "gloo"]
    assert first[1].reasons == (("cpu_one_shot", "too_large"), ("cpu_two_shot", "too_large"))
    assert first[1].reason == "too_large"
    assert two[0].call(counts)[2] == {"too_large": 1}  # once an operation, not once a path


@pytest.mark.parametrize("path", ALL)
def test_a_forced_path_serves_everything_it_can(two, path):
    told = together(two, make, force_path=path)
    assert told[0][0] == tuple(dict.fromkeys((path, "gloo")))
    first, _ = together(two, explain, [0, 3, 300_000], torch.float32)
    assert {one.path for one in first} == {path}
    assert set(together(two, explain, [3], torch.int64)[0][0].reasons) >= (
        set() if path == "gloo" else {(path, "dtype")}
    )


def counts(here: Here) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    found = here.comm.statistics()
    return found.operations_by_path, found.bytes_by_path, found.fallbacks


def run(here: Here, rank: int) -> None:
    for count in (4, 4, CEILING):
        here.comm.all_reduce(torch.ones(count, dtype=torch.float32))
    here.comm.all_reduce(torch.ones(4, dtype=torch.int64))


def test_operations_bytes_and_reasons_are_counted_by_path(two):
    together(two, make)
    together(two, run)
    for worker in two:
        assert worker.call(counts) == (
            {"cpu_one_shot": 2, "cpu_two_shot": 1, "gloo": 1},
            {"cpu_one_shot": 32, "cpu_two_shot": 4 * CEILING, "gloo": 32},
            {"dtype": 1},
        )


def test_each_rank_keeps_a_page_that_others_read(two, run_dir):
    together(two, make)
    together(two, run)
    (directory,) = run_dir.iterdir()
    assert directory.name.startswith("allreduce-")
    for worker in two:
        worker.call(counts)  # writes the page out
    assert sorted(path.name for path in directory.iterdir()) == ["owner", "rank-0", "rank-1"]
    for rank, worker in enumerate(two):
        with ProbeReader(directory / f"rank-{rank}") as page:
            assert (page.role, page.rank, page.owner.pid, page.sequence) == (Role.COMMUNICATOR, rank, worker.pid, 4)
            assert page.about["world"] == 2
            assert page.about["paths"] == list(ALL)
            values = {(one.name, *one.labels.values()): one for one in page.samples()}
            assert values["allreduce_total", "cpu_one_shot"].value == 2
            assert values["allreduce_bytes_total", "cpu_two_shot"].value == 4 * CEILING
            assert values["allreduce_fallback_total", "dtype"].value == 1
            assert sum(values["allreduce_seconds", "cpu_one_shot"].buckets) == 1  # a sample, not every one
    together(two, close)
    assert list(run_dir.iterdir()) == []


def test_the_pages_of_the_dead_stay_until_garbage_is_collected(two, run_dir):
    together(two, make)
    for worker in two:
        worker.kill()
    (directory,) = run_dir.iterdir()
    assert collect_garbage(run_dir) == [directory]
    assert list(run_dir.iterdir()) == []


def test_a_crash_loop_leaves_no_more_than_a_few_dead_communicators(two, run_dir):
    for number in range(KEPT_DEAD + 2):
        dead = queue_directory(run_dir, f"allreduce-{two[0].call(default_group)}", str(number))
        (dead / "owner").write_text(f"{(1 << 22) - 1} 1 {identity().pid_namespace}\n")
    together(two, make)
    assert len(list(run_dir.iterdir())) == KEPT_DEAD + 1


def test_leaving_last_and_leaving_after_the_last_are_both_in_order(run_dir):
    directory = queue_directory(run_dir, "allreduce-0", "x")
    for name in ("owner", "meet-0-ab", "meet-1-cd"):
        (directory / name).touch()
    leave_directory(directory, 0)
    assert [path.name for path in directory.iterdir()] == ["meet-1-cd"]
    leave_directory(directory, 1)
    assert not directory.exists()
    leave_directory(directory, 1)
    leave_directory(directory, 0)


def default_group(here: Here) -> str:
    return group_name(dist.group.WORLD)


def without_pages(here: Here, rank: int) -> tuple[float, dict[str, int]]:
    here.comm = AllReduce(None, "cpu", probes=False)
    return here.comm.all_reduce(torch.ones(3)).sum().item(), here.comm.statistics().operations_by_path


def test_probes_can_be_turned_off(two):
    assert together(two, without_pages) == [(6.0, {})] * 2


def test_without_a_run_directory_gloo_serves_and_every_rank_says_why(two, tmp_path, monkeypatch):
    together(two, in_directory, str(tmp_path / "no such" / "place"))
    told = together(two, make)
    assert told[0] == told[1]
    assert told[0][0] == ("gloo",)
    assert {reason for reason, _ in told[0][1].values()} == {"setup_failed"}
    assert "no run directory" in told[0][1]["cpu_one_shot"][1]
    for decision, total in together(two, decide_and_reduce):
        assert decision.reasons == (("cpu_one_shot", "setup_failed"), ("cpu_two_shot", "setup_failed"))
        assert (decision.path, total) == ("gloo", 8.0)


def decide_and_reduce(here: Here, rank: int) -> tuple[Decision, float]:
    x = torch.ones(4)
    return here.comm.explain(x), here.comm.all_reduce(x).sum().item()


def in_directory(here: Here, rank: int, path: str) -> None:
    os.environ["ARENA_RUN_DIR"] = path


# --- set-up: one rank fails, hangs, dies or never comes ------------------------------------------------------------


class Faulty:
    """A CPU whose path `name` goes wrong in its stage number `stage`, on the rank that has it."""

    kind = "cpu"
    fallback = "gloo"

    def __init__(self, name: str, stage: int, how: str) -> None:
        self._real = open_device("cpu")
        self._fault = (name, stage, how)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def paths(self) -> Mapping[str, Any]:
        return {name: self._wrapped(name, set_up) for name, set_up in self._real.paths().items()}

    def _wrapped(self, name: str, set_up: Any) -> Any:
        def wrapped(place: Any, max_bytes: int) -> Any:
            steps = set_up(place, max_bytes)
            said, heard = None, None
            for stage in range(100):
                try:
                    if (name, stage) == self._fault[:2]:
                        go_wrong(self._fault[2])
                    said = next(steps) if heard is None else steps.send(heard)
                except StopIteration as end:
                    return end.value
                except BaseException:
                    steps.close()
                    raise
                try:
                    heard = yield said
                except GeneratorExit:
                    steps.close()
                    raise
            raise AssertionError

        return wrapped


def go_wrong(how: str) -> None:
    if how == "raise":
        raise ValueError("a fault for the test")
    if how == "decline":
        raise Declined("no_peer_access", "a fault for the test")
    if how == "exit":
        raise SystemExit
    if how == "hang":
        time.sleep(60)
    if how == "die":
        os.kill(os.getpid(), 9)


def make_faulty(here: Here, rank: int, bad_rank: int, fault: tuple[str, int, str], **options: Any) -> Any:
    """Set up with a fault on one rank; what each rank ends with."""
    opened = Faulty(*fault) if rank == bad_rank else open_device("cpu")
    try:
        here.comm = AllReduce(None, "cpu", opened=opened, **options)
    except Exception as error:
        return error
    total = here.comm.all_reduce(torch.full((5,), float(rank))).tolist()
    return here.comm.paths, here.comm.declined, total


STAGES = [
    (path, stage) for path, stages in (("cpu_one_shot", 6), ("cpu_two_shot", 4), ("gloo", 5)) for stage in range(stages)
]


@pytest.mark.parametrize(("path", "stage"), STAGES)
def test_one_rank_failing_at_any_stage_gives_all_the_same_paths_and_reasons(three, path, stage):
    with within(10):
        outcomes = together(three, make_faulty, stage % 3, (path, stage, "raise"), deadline_s=6)
    assert outcomes == [outcomes[0]] * 3
    paths, declined, total = outcomes[0]
    assert path not in paths
    assert declined[path] == ("setup_failed", f"rank {stage % 3}: ValueError: a fault for the test")
    assert set(paths) | set(declined) == set(ALL)
    assert total == [3.0] * 5


@pytest.mark.parametrize("how", ["decline", "exit"])
def test_a_rank_that_declines_gives_all_its_own_reason(two, how):
    outcomes = together(two, make_faulty, 1, ("cpu_one_shot", 1, how))
    assert outcomes[0] == outcomes[1]
    reason, text = outcomes[0][1]["cpu_one_shot"]
    assert (reason, text[:6]) == ("no_peer_access" if how == "decline" else "setup_failed", "rank 1")
    assert outcomes[0][0] == ("cpu_two_shot", "gloo")


@pytest.mark.parametrize("stage", [0, 2, 4])
def test_one_rank_hanging_at_a_stage_gives_all_the_same_paths_and_reasons_in_time(three, stage):
    with within(10):
        outcomes = together(three, make_faulty, 1, ("cpu_one_shot", stage, "hang"), deadline_s=6)
    assert outcomes == [outcomes[0]] * 3
    paths, declined, _ = outcomes[0]
    assert declined["cpu_one_shot"][0] == "setup_failed"
    assert f"hung in stage {stage + 1} of cpu_one_shot" in declined["cpu_one_shot"][1]
    assert paths == ("cpu_two_shot", "gloo")


@pytest.mark.parametrize(("path", "stage"), [("cpu_one_shot", 0), ("cpu_one_shot", 3), ("gloo", 1)])
def test_one_rank_dying_in_set_up_is_named_by_all_others(three, path, stage):
    calls = [three[rank].begin(make_faulty, rank, 1, (path, stage, "die")) for rank in range(3)]
    with within(10):
        errors = [calls[rank].result() for rank in (0, 2)]
    for error in errors:
        assert isinstance(error, PeerDied), error
        assert (error.rank, error.pid) == (1, three[1].pid)


def test_no_path_at_all_is_an_error_with_all_reasons(two):
    outcomes = together(two, make_faulty, 0, ("gloo", 0, "raise"), force_path="gloo")
    for error in outcomes:
        assert isinstance(error, SetUpFailed)
        assert "rank 0: ValueError: a fault for the test" in str(error)
    assert str(outcomes[0]) == str(outcomes[1])


def outcome(here: Here, rank: int, **options: Any) -> Any:
    try:
        return make(here, rank, **options)
    except Exception as error:
        return error


def test_a_rank_that_never_comes_is_named_by_the_others(three, run_dir):
    calls = [three[rank].begin(outcome, rank, deadline_s=1.0) for rank in (0, 2)]
    with within(10):
        errors = [call.result() for call in calls]
    for error in errors:
        assert isinstance(error, RankMissing)
        assert error.missing == (1,)
        assert "nothing from rank 1" in str(error)
    assert list(run_dir.iterdir()) == []


def test_a_late_rank_meets_the_others_at_their_next_attempt(three):
    calls = [three[rank].begin(outcome, rank, deadline_s=0.5) for rank in (0, 2)]
    assert {type(call.result()) for call in calls} == {RankMissing}
    told = together(three, make)
    assert told == [(ALL, {})] * 3


def test_a_frozen_rank_is_given_up_and_hears_of_it_when_it_wakes(three):
    slow = three[1].begin(make_faulty, 1, 1, ("cpu_one_shot", 1, "pause"), deadline_s=2.0)
    three[1].freeze()
    calls = [three[rank].begin(outcome, rank, deadline_s=2.0) for rank in (0, 2)]
    with within(10):
        errors = [call.result() for call in calls]
    assert all(isinstance(error, RankMissing) and error.missing == (1,) for error in errors), errors
    three[1].thaw()
    assert isinstance(slow.result(), RankMissing)


def differently(here: Here, rank: int, options: list[dict[str, Any]]) -> Any:
    return outcome(here, rank, **options[rank])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ([{}, {"max_size": 8}], "rank 0 and rank 1 ask for different communicators"),
        ([{"force_path": "gloo"}, {}], "rank 0 and rank 1 ask for different communicators"),
        ([{}, {"force_path": "warp"}], "rank 1 asks for what can't be; found there is no such path"),
        ([{"max_size": -1}, {}], "rank 0 asks for what can't be; found max_size"),
    ],
)
def test_ranks_that_ask_for_different_things_are_all_told(two, run_dir, options, text):
    for error in together(two, differently, options):
        assert isinstance(error, InvalidArgument), error
        assert text in str(error)
    assert list(run_dir.iterdir()) == []


def test_several_communicators_over_one_group_do_not_meet_each_other(two):
    assert together(two, make) == together(two, make) == [(ALL, {})] * 2
    first, _ = together(two, explain, [4], torch.float32)
    assert first[0].path == "cpu_one_shot"


def test_without_a_process_group_it_says_what_to_do():
    with pytest.raises(InvalidArgument, match="init_process_group"):
        AllReduce(None, "cpu")


# --- tuning ---------------------------------------------------------------------------------------------------------


def tune(here: Here, rank: int, **options: Any) -> tuple[Plan, float]:
    tuned = here.comm.autotune([1024, 4096], repeats=3, **options)
    return tuned, here.comm.all_reduce(torch.ones(8)).sum().item()


def kept(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "arena").glob("*"))


def test_tuning_comes_to_one_plan_on_all_ranks_and_is_kept_for_the_next_communicator(two, tmp_path):
    together(two, make)
    together(two, decide_and_reduce)
    (first, total), (second, _) = together(two, tune)
    assert two[0].call(origin_on_the_page) == first.origin == "tuned"
    assert first == second
    assert total == 16.0
    assert {path for row in first.rows for path in row.paths} <= set(ALL)
    assert [row.paths[-1] for row in first.rows] == ["gloo"] * len(first.rows)
    assert len(kept(tmp_path)) == 1
    together(two, make)
    origins = [worker.call(origin) for worker in two]
    assert origins == [f"tuned ({kept(tmp_path)[0]})"] * 2


def origin_on_the_page(here: Here) -> str:
    """What observers read, of a page that goes on counting where the one before ended."""
    account = here.comm._account
    assert sum(here.comm.statistics().operations_by_path.values()) == 2
    with ProbeReader(account._path) as page:
        assert (page.sequence, page.owner.pid) == (2, os.getpid())
        return page.about["plan"]


def origin(here: Here) -> str:
    return here.comm.plan.origin


def test_a_corrupted_plan_falls_back_to_the_default_and_says_so(two, tmp_path):
    together(two, make)
    together(two, tune)
    kept(tmp_path)[0].write_text('{"format": 1}')
    assert together(two, make) == [(ALL, {})] * 2
    assert "default" in two[0].call(origin)
    assert "can't be used" in two[0].call(origin)
    assert two[0].call(origin) == two[1].call(origin)


def test_a_foreign_plan_is_not_used(two, tmp_path):
    together(two, make)
    together(two, tune)
    text = json.loads(kept(tmp_path)[0].read_text())
    text["key"]["world"] = 4
    kept(tmp_path)[0].write_text(json.dumps(text))
    together(two, make)
    assert "'world': 4" in two[1].call(origin)


def test_tuning_can_leave_the_cache_alone(two, tmp_path):
    together(two, make)
    together(two, tune, save=False)
    assert kept(tmp_path) == []


def test_a_given_plan_counts(two):
    given = Plan((Row(16, ("cpu_two_shot", "gloo")), Row(LARGEST, ("gloo",))))
    assert together(two, make, plan=given) == [(("cpu_two_shot", "gloo"), {})] * 2
    first, _ = together(two, explain, [4, 5], torch.float32)
    assert [one.path for one in first] == ["cpu_two_shot", "gloo"]


# --- under load -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world", "operations"), [(2, 250), (5, 60)])
def test_random_sizes_and_stalls_give_exact_sums_and_equal_bits(world, operations):
    ran = subprocess.run(
        [sys.executable, "-m", "tests.stress.allreduce", "--operations", str(operations), "--world", str(world)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent.parent,
        timeout=110,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    outcome = json.loads(ran.stdout)
    assert (outcome["wrong"], outcome["same_bits"], outcome["leaks"]) == (0, True, [])
    assert sum(outcome["by_path"].values()) == operations
    assert set(outcome["by_path"]) == set(ALL)  # this seed has sizes for each


# --- the operator ---------------------------------------------------------------------------------------------------


def through_the_operators(here: Here, rank: int) -> tuple[Any, ...]:
    ops, name, world = torch.ops.arena, here.comm.name, here.comm.world

    def layer(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        summed = ops.all_reduce(x * 2, name) + 1
        normed, residual = ops.all_reduce_rms_norm(x, summed, weight, 1e-6, name)
        moved = ops.all_gather(x, world, name) + 1, ops.all_to_all(x, name) + 1
        return summed, normed, residual, *moved, ops.reduce_scatter(residual, world, name) + 1

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x, weight = torch.full((3, 4), float(rank)).t(), torch.ones(3)
    eager = layer(x, weight)
    same = [torch.equal(one, other) for one, other in zip(eager, compiled(x, weight), strict=True)]
    for operator, operands in (
        (ops.all_reduce, (x, name)),
        (ops.all_gather, (x, world, name)),
        (ops.reduce_scatter, (x, world, name)),
        (ops.all_to_all, (x, name)),
        (ops.all_reduce_rms_norm, (x, x, weight, 1e-6, name)),
    ):
        torch.library.opcheck(operator.default, operands, test_utils=("test_schema", "test_faketensor"))
    return eager[0].tolist(), same, lookup(name) is here.comm


def test_torch_compile_keeps_the_operators_whole(two):
    together(two, make)
    for summed, same, found in together(two, through_the_operators, within=100):
        assert summed == [[3.0] * 3] * 4
        assert same == [True] * 6
        assert found


def wrong_size(here: Here, rank: int) -> str:
    with pytest.raises(InvalidArgument) as refused:
        torch.ops.arena.all_gather(torch.ones(2), 5, here.comm.name)
    return str(refused.value)


def test_an_operator_for_a_group_of_another_size_is_refused(two):
    together(two, make)
    assert "expected 2 ranks; found 5" in together(two, wrong_size)[0]


def unknown_group(here: Here, rank: int) -> str:
    with pytest.raises(InvalidArgument) as refused:
        torch.ops.arena.all_reduce(torch.ones(2), "no such group")
    return str(refused.value)


def test_the_operator_names_the_groups_there_are(two):
    together(two, make)
    assert "no communicator over a group 'no such group'" in two[0].call(unknown_group, 0)
