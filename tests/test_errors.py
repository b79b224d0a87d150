"""An error says what was expected, what was found and what to do, and survives the way to another process."""

import ast
import copy
import inspect
import pickle
from pathlib import Path

import pytest

from arena import errors
from arena.errors import ArenaError, PeerDied
from arena.probe import BadPage
from tests.support import processes

CLASSES = [getattr(errors, name) for name in errors.__all__] + [BadPage]
ARENA_FILES = sorted((Path(__file__).parent.parent / "arena").rglob("*.py"))


def an_error(kind: type[ArenaError]) -> ArenaError:
    return kind("the summary", expected="an egg", found="a hen", remedy="boil it")


def test_every_error_class_is_exported():
    defined = [name for name, one in vars(errors).items() if inspect.isclass(one) and issubclass(one, ArenaError)]
    assert sorted(defined) == sorted(errors.__all__)


@pytest.mark.parametrize("kind", CLASSES)
def test_an_error_reads_as_one_sentence_and_keeps_its_parts(kind):
    error = an_error(kind)
    assert str(error) == "the summary; expected an egg; found a hen; boil it"
    assert (error.expected, error.found, error.remedy) == ("an egg", "a hen", "boil it")


@pytest.mark.parametrize("kind", CLASSES)
def test_parts_that_are_not_known_leave_no_trace(kind):
    assert str(kind("the summary")) == "the summary"
    assert str(kind("the summary", remedy="boil it")) == "the summary; boil it"


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.InvalidArgument, ValueError),
        (errors.QueueTimeout, TimeoutError),
        (errors.PeerDied, ConnectionError),
        (errors.MessageTooLarge, ValueError),
        (errors.EncodeFailed, TypeError),
        (errors.ReentrantUse, RuntimeError),
        (errors.UseAfterFork, RuntimeError),
        (errors.WrongEnd, RuntimeError),
        (errors.OutOfMemory, MemoryError),
        (errors.RunDirectoryError, OSError),
        (errors.UnsupportedPlatform, RuntimeError),
    ],
)
def test_who_never_heard_of_arena_catches_it_all_the_same(kind, builtin):
    with pytest.raises(builtin) as caught:
        raise an_error(kind)
    assert isinstance(caught.value, ArenaError)


def test_nobody_left_to_read_is_a_way_of_being_closed():
    assert issubclass(errors.NoReader, errors.QueueClosed)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("kind", CLASSES)
def test_an_error_is_the_same_after_pickling(kind, protocol):
    error = an_error(kind)
    again = pickle.loads(pickle.dumps(error, protocol))
    assert type(again) is kind
    assert str(again) == str(error)
    assert vars(again) == vars(error)


@pytest.mark.parametrize("kind", CLASSES)
def test_an_error_is_the_same_after_copying(kind):
    error = an_error(kind)
    again = copy.deepcopy(error)
    assert (type(again), str(again), vars(again)) == (kind, str(error), vars(error))


def test_a_death_names_who_died_and_how():
    error = PeerDied("reader 2 died", rank=2, pid=4711, signal=9, found="its process gone")
    assert (error.rank, error.pid, error.signal) == (2, 4711, 9)
    again = pickle.loads(pickle.dumps(error))
    assert (again.rank, again.pid, again.signal, again.found) == (2, 4711, 9, "its process gone")


def test_what_a_death_does_not_know_is_none():
    error = PeerDied("the writer died")
    assert (error.rank, error.pid, error.signal) == (None, None, None)


def raise_one() -> None:
    raise PeerDied("reader 2 died", rank=2, pid=4711, signal=9, remedy="go on")


def test_an_error_reaches_another_process_whole():
    with pytest.raises(PeerDied, match="reader 2 died; go on") as caught:
        processes.run(raise_one)
    assert (caught.value.rank, caught.value.pid, caught.value.signal, caught.value.remedy) == (2, 4711, 9, "go on")


NAMES = {kind.__name__ for kind in CLASSES}
SAID_ALREADY = {"QueueClosed"}  # "was shut down by this end" leaves nothing to expect or to do


def calls_that_make_an_error(path: Path) -> list[ast.Call]:
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return [call for call in calls if isinstance(call.func, ast.Name) and call.func.id in NAMES - SAID_ALREADY]


@pytest.mark.parametrize("path", ARENA_FILES, ids=lambda path: path.stem)
def test_no_error_in_arena_leaves_its_reader_alone(path):
    silent = [
        f"{path.name}:{call.lineno}"
        for call in calls_that_make_an_error(path)
        if not {"expected", "found", "remedy"} & {keyword.arg for keyword in call.keywords}
    ]
    assert silent == []


def test_the_check_above_sees_errors_being_made():
    assert sum(len(calls_that_make_an_error(path)) for path in ARENA_FILES) > 40
