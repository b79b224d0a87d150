"""The plan is a pure table: the same bytes, the same path, on every rank; and what is on disk is never trusted."""

import json
from pathlib import Path

import pytest

from arena import plan as plans
from arena.device import Traits
from arena.device.cuda import shapes
from arena.errors import InvalidArgument
from arena.plan import (
    GPU_MOVE_CEILING,
    KIB,
    LARGEST,
    MIB,
    MOVES,
    MOVING_PATHS,
    Key,
    Plan,
    Row,
    default_plan,
    forced,
    from_times,
    limited,
    only,
)  # fmt: skip
from arena.probe.metrics import ALLREDUCE_PATHS, DECLINE_REASONS

CPU = Traits("cpu", "x86_64", "torch 2.13")
HOPPER = Traits("cuda", "NVIDIA H200", "580.1", (9, 0))
BLACKWELL = Traits("cuda", "NVIDIA B200", "580.1", (10, 0))
ULTRA = Traits("cuda", "NVIDIA B300", "580.1", (10, 3))
OLD = Traits("cuda", "NVIDIA A100", "580.1", (8, 0))
CHIPS = [CPU, HOPPER, BLACKWELL, ULTRA, OLD]
WORLDS = range(1, 10)


def every_default() -> list[tuple[Traits, int, Plan]]:
    return [(traits, world, default_plan(traits, world)) for traits in CHIPS for world in WORLDS]


def test_every_default_ends_in_the_fallback_at_every_size():
    for traits, world, plan in every_default():
        fallback = "gloo" if traits.kind == "cpu" else "nccl"
        for nbytes in (0, 2, 14, 16, 8 * KIB, 64 * MIB, 1 << 35):
            assert plan.candidates(nbytes)[-1] == fallback, (traits, world, nbytes)


def test_every_default_speaks_of_known_paths_and_reasons_only():
    for _, _, plan in every_default():
        assert set(plan.paths()) | set(plan.excluded) <= set(ALLREDUCE_PATHS)
        assert set(plan.excluded.values()) <= set(DECLINE_REASONS)


@pytest.mark.parametrize("element", [2, 4, 8])
def test_a_ceiling_belongs_to_its_row_one_element_more_does_not(element):
    for _, _, plan in every_default():
        for row, after in zip(plan.rows, plan.rows[1:], strict=False):
            assert plan.candidates(row.up_to - element) == row.paths
            assert plan.candidates(row.up_to) == row.paths
            assert plan.candidates(row.up_to + element) == after.paths


@pytest.mark.parametrize(
    ("traits", "world", "own", "symmetric"),
    [
        (HOPPER, 2, 64 * MIB, 64 * MIB),
        (HOPPER, 4, 32 * MIB, 32 * MIB),
        (HOPPER, 6, 512 * KIB, 64 * MIB),
        (HOPPER, 8, 256 * KIB, 64 * MIB),
        (BLACKWELL, 2, 2 * MIB, 8 * MIB),
        (BLACKWELL, 8, MIB, 128 * MIB),
        (ULTRA, 6, 8 * MIB, 32 * MIB),
        (ULTRA, 8, 4 * MIB, 64 * MIB),
    ],
)
def test_the_ceilings_on_gpus_are_those_that_others_ship(traits, world, own, symmetric):
    plan = default_plan(traits, world)
    assert max(plan.ceiling("one_shot"), plan.ceiling("two_shot")) == own
    assert plan.ceiling("symm_mem_two_shot") == symmetric
    assert plan.ceiling("nccl") == LARGEST


@pytest.mark.parametrize(("traits", "worlds"), [(HOPPER, {4, 6, 8}), (BLACKWELL, {6, 8}), (ULTRA, {6, 8})])
def test_multicast_is_planned_only_where_it_pays(traits, worlds):
    planned = {world for world in range(2, 9) if "symm_mem_multimem" in default_plan(traits, world).paths()}
    assert planned == worlds
    assert default_plan(traits, 2).why_not("symm_mem_multimem", 8 * KIB) == "world_size"


def test_two_hopper_gpus_take_one_shot_at_every_size():
    plan = default_plan(HOPPER, 2)
    assert {plan.candidates(nbytes)[0] for nbytes in (0, 8 * KIB, MIB, 64 * MIB)} == {"one_shot"}
    assert plan.candidates(64 * MIB + 2) == ("nccl",)


def test_odd_worlds_go_by_the_next_even_one():
    assert default_plan(BLACKWELL, 3).rows == default_plan(BLACKWELL, 4).rows
    assert default_plan(HOPPER, 5).ceiling("two_shot") == default_plan(HOPPER, 6).ceiling("two_shot")
    assert default_plan(CPU, 7).rows == default_plan(CPU, 8).rows


@pytest.mark.parametrize(("traits", "world", "reason"), [(OLD, 2, "capability"), (CPU, 9, "world_size")])
def test_what_the_tables_lack_goes_to_the_library_and_says_why(traits, world, reason):
    plan = default_plan(traits, world)
    assert len(plan.paths()) == 1
    assert set(plan.excluded.values()) == {reason}


def test_why_not_tells_too_large_from_disabled():
    plan = default_plan(HOPPER, 2)
    assert plan.why_not("one_shot", 64 * MIB + 2) == "too_large"
    assert plan.why_not("cpu_one_shot", 8) == "disabled"


# --- the other operations -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", MOVES)
def test_what_is_moved_goes_by_paths_that_can_move_and_ends_in_the_fallback(operation):
    for traits in CHIPS:
        for world in WORLDS:
            plan = default_plan(traits, world, operation)
            assert set(plan.paths()) | set(plan.excluded) <= set(MOVING_PATHS), (traits, world)
            assert plan.candidates(1 << 35)[-1] == ("gloo" if traits.kind == "cpu" else "nccl")


def test_the_own_kernels_move_up_to_what_they_have_room_for():
    plan = default_plan(HOPPER, 2, "all_gather")
    assert plan.candidates(GPU_MOVE_CEILING) == ("one_shot", "nccl")
    assert plan.candidates(GPU_MOVE_CEILING + 2) == ("nccl",)
    assert plan.why_not("one_shot", GPU_MOVE_CEILING + 2) == "too_large"
    assert GPU_MOVE_CEILING == shapes.MOVED_BYTES


@pytest.mark.parametrize(("path", "paths"), [("cpu_two_shot", ("gloo",)), ("cpu_one_shot", ("cpu_one_shot", "gloo"))])
def test_a_forced_path_that_can_not_move_leaves_it_to_the_fallback(path, paths):
    plan = forced(path, "gloo", default_plan(CPU, 2, "all_to_all"), "all_to_all")
    assert plan.candidates(8) == paths
    assert path in paths or plan.why_not(path, 8) == "disabled"


def test_a_plan_can_be_kept_to_some_paths():
    plan = only(("one_shot",), "nccl", default_plan(HOPPER, 4))
    assert plan.candidates(8) == ("one_shot", "nccl")
    assert plan.candidates(1 << 30) == ("nccl",)
    assert plan.why_not("two_shot", 8) == "disabled"
    assert plan.excluded["symm_mem_multimem"] == "disabled"


def test_no_size_is_left_without_a_path():
    with pytest.raises(InvalidArgument, match="no path for up to 65536 bytes"):
        Plan((Row(1 << 16, ()), Row(LARGEST, ("gloo",))))
    plan = only(("two_shot",), "nccl", Plan((Row(1 << 16, ("one_shot",)), Row(LARGEST, ("two_shot",)))))
    assert plan.candidates(8) == ("nccl",)


# --- variations -----------------------------------------------------------------------------------------------------


def test_a_forced_path_is_alone_with_the_fallback():
    plan = forced("two_shot", "nccl", default_plan(HOPPER, 2))
    assert plan.candidates(8) == plan.candidates(1 << 30) == ("two_shot", "nccl")
    assert plan.why_not("one_shot", 8) == "disabled"
    assert forced("nccl", "nccl", plan).candidates(8) == ("nccl",)


@pytest.mark.parametrize("max_size", [0, 16, 256 * KIB, MIB, 128 * MIB, LARGEST - 2])
def test_max_size_is_the_new_ceiling_lower_or_higher(max_size):
    plan = limited(default_plan(HOPPER, 2), max_size, "nccl")
    assert plan.candidates(max_size)[0] == "one_shot"
    assert plan.candidates(max_size + 2) == ("nccl",)
    assert plan.why_not("one_shot", max_size + 2) == "too_large"


def test_a_limited_plan_keeps_the_rows_below():
    plan = limited(default_plan(CPU, 4), MIB, "gloo")
    assert [row.up_to for row in plan.rows] == [64 * KIB, MIB, LARGEST]


def test_times_become_rows_and_sizes_in_between_go_to_the_nearer_one():
    plan = from_times(
        {
            1000: {"one_shot": 1.0, "two_shot": 2.0, "nccl": 9.0},
            4000: {"one_shot": 2.0, "two_shot": 2.5, "nccl": 9.0},
            16000: {"one_shot": 8.0, "two_shot": 3.0, "nccl": 9.0},
            64000: {"one_shot": 80.0, "two_shot": 30.0, "nccl": 9.0},
        },
        "nccl",
    )
    assert plan.rows == (
        Row(8000, ("one_shot", "two_shot", "nccl")),
        Row(32000, ("two_shot", "one_shot", "nccl")),
        Row(LARGEST, ("nccl",)),
    )


@pytest.mark.parametrize(
    "rows",
    [
        (),
        (Row(8, ("nccl",)),),
        (Row(16, ("nccl",)), Row(8, ("nccl",)), Row(LARGEST, ("nccl",))),
        (Row(8, ("nccl",)), Row(8, ("nccl",)), Row(LARGEST, ("nccl",))),
        (Row(LARGEST, ("ring",)),),
    ],
)
def test_rows_that_make_no_sense_are_refused(rows):
    with pytest.raises(InvalidArgument, match="no plan"):
        Plan(rows)


# --- on disk --------------------------------------------------------------------------------------------------------

KEY = Key("cuda", "NVIDIA H200", "580.1", 2, "0.1.0")
TUNED = Plan((Row(8 * KIB, ("one_shot", "nccl")), Row(LARGEST, ("nccl",))))


def test_a_plan_comes_back_as_it_was_kept(tmp_path):
    plans.save(TUNED, KEY, tmp_path / "plan.json")
    found = plans.load(KEY, tmp_path / "plan.json")
    assert found.rows == TUNED.rows
    assert "tuned" in found.origin


def test_a_plan_is_kept_under_everything_it_depends_on(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    others = [
        Key("cuda", "NVIDIA H100", "580.1", 2, "0.1.0"),
        Key("cuda", "NVIDIA H200", "580.2", 2, "0.1.0"),
        Key("cuda", "NVIDIA H200", "580.1", 4, "0.1.0"),
        Key("cuda", "NVIDIA H200", "580.1", 2, "0.2.0"),
    ]
    assert len({key.path() for key in (KEY, *others)}) == 5
    assert plans.save(TUNED, KEY) == KEY.path()
    assert KEY.path().is_relative_to(tmp_path)
    assert list(KEY.path().parent.iterdir()) == [KEY.path()]
    for key in others:
        with pytest.raises(FileNotFoundError):
            plans.load(key)


def test_a_plan_for_something_else_is_foreign_and_says_for_what(tmp_path):
    path = plans.save(TUNED, KEY, tmp_path / "plan.json")
    with pytest.raises(InvalidArgument, match=r"'world': 4.*found.*'world': 2"):
        plans.load(Key("cuda", "NVIDIA H200", "580.1", 4, "0.1.0"), path)


def damaged(path: Path) -> dict[str, str]:
    whole = json.loads(path.read_text())
    return {
        "empty": "",
        "cut short": path.read_text()[:-20],
        "not an object": "[1, 2]",
        "nothing in it": "{}",
        "another format": json.dumps(whole | {"format": 99}),
        "no rows": json.dumps(whole | {"rows": []}),
        "rows without sizes": json.dumps(whole | {"rows": [{"paths": ["nccl"]}]}),
        "sizes in words": json.dumps(whole | {"rows": [{"up_to": "8 KiB", "paths": ["nccl"]}]}),
        "an unknown path": json.dumps(whole | {"rows": [{"up_to": LARGEST, "paths": ["warp"]}]}),
        "deep": "[" * 100_000,
    }


CASES = [
    "empty", "cut short", "not an object", "nothing in it", "another format", "no rows", "rows without sizes",
    "sizes in words", "an unknown path", "deep",
]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_damaged_plan_is_refused_with_its_file_and_a_remedy(tmp_path, case):
    path = plans.save(TUNED, KEY, tmp_path / "plan.json")
    path.write_text(damaged(path)[case])
    with pytest.raises(InvalidArgument, match=r"plan\.json can't be used.*remove it"):
        plans.load(KEY, path)
