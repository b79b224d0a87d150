"""The protocol as a model: the labels of the code are in it, and leaving any of them out makes a property fail."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.conftest import require_program
from tests.model import check

ROOT = Path(__file__).parent.parent
IN_CODE = re.compile(r"SYNC POINT (?P<label>[a-z0-9-]+)(?: \((?P<end>publish|observe)\))?")


def labels_of_the_code() -> set[tuple[str, str]]:
    """The labels of arena/; one without an end, as in push.cu, stands for both."""
    found = set()
    for path in sorted((ROOT / "arena").rglob("*")):
        if path.suffix in (".py", ".cu"):
            for point in IN_CODE.finditer(path.read_text()):
                ends = [point["end"]] if point["end"] else ["publish", "observe"]
                found |= {(point["label"], end) for end in ends}
    return found


def labels_of_the_models() -> set[tuple[str, str]]:
    return {point for path in check.HERE.glob("*.pml") for point in check.sync_points(path.read_text())}


def test_every_ordering_of_the_code_is_in_a_model_and_no_other():
    assert labels_of_the_code()
    assert labels_of_the_models() == labels_of_the_code()


def test_every_ordering_is_left_out_by_some_search():
    left_out = {one.left_out for one in check.searches()}
    assert {f"{label.replace('-', '_')}_{end}" for label, end in labels_of_the_models()} <= left_out


def test_whatever_can_be_left_out_is_left_out_by_some_search():
    switches = {name for path in check.HERE.glob("*.pml") for name in re.findall(r"\bNO_(\w+)", path.read_text())}
    assert switches <= {one.left_out for one in check.searches()}


@pytest.mark.timeout(300)
def test_nothing_fails_and_whatever_is_left_out_does():
    for program in ("spin", "gcc"):
        require_program(program)
    quick = [one for one in check.searches() if one.quick]
    assert {one.model for one in quick if not one.left_out} == {path.stem for path in check.HERE.glob("*.pml")} - {
        "memory"
    }
    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(lambda one: check.search(one, quick=True), quick))
    unexpected = [
        check.row(one, found) for one, found in zip(quick, outcomes, strict=True) if not found.as_expected(one)
    ]
    assert unexpected == []
    held = [found.states for one, found in zip(quick, outcomes, strict=True) if not one.left_out]
    assert min(held) > 500, "a model without states proves nothing"


@pytest.mark.stress
@pytest.mark.timeout(7200)
def test_every_search():
    for one in check.searches():
        found = check.search(one, quick=False)
        assert found.as_expected(one), check.row(one, found)
