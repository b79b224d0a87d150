"""A setting outside its range is refused, by name, wherever it comes from."""

import dataclasses
import math
import pickle

import pytest

from arena import MessageQueue, QueueConfig, RemoteConfig
from arena.config import check_readers, check_timeout, split_address, unknown_variables
from arena.errors import InvalidArgument, QueueTimeout
from arena.layout import MAX_READERS

NUMBERS = {
    "slots": (2, 1 << 14),
    "slot_bytes": (256, 1 << 30),
    "max_arena_bytes": (0, 1 << 46),
    "segment_bytes": (4096, 1 << 46),
    "min_block_bytes": (1, 1 << 46),
    "max_message_bytes": (1, 1 << 46),
    "max_holds": (1, 1 << 20),
}
SWITCHES = ["prefault", "huge_pages", "probes"]


def len_or_repr(value: object) -> str:
    return f"{len(value)} characters" if isinstance(value, str) and len(value) > 9 else repr(value)


def refused(**settings: object) -> InvalidArgument:
    with pytest.raises(InvalidArgument) as caught:
        QueueConfig(**settings)
    (name,) = settings
    assert name in str(caught.value), "the error names the setting"
    assert caught.value.expected
    assert caught.value.found.startswith(repr(settings[name]))
    return caught.value


def is_of_the_wrong_type(error: InvalidArgument, value: object) -> bool:
    return "is of the wrong type" in str(error) and error.found == f"{value!r} of type {type(value).__name__}"


def test_the_table_here_knows_every_field():
    fields = {field.name for field in dataclasses.fields(QueueConfig)}
    assert fields == {
        *NUMBERS,
        *SWITCHES,
        "name",
        "views",
        "pin",
        "serializer",
        "on_reader_death",
        "stall_warning_s",
        "run_dir",
    }


@pytest.mark.parametrize(("name", "least", "most"), [(name, *bounds) for name, bounds in NUMBERS.items()])
def test_the_ends_of_a_range_are_inside_it(name, least, most):
    for value in (least, most):
        assert getattr(QueueConfig(**{name: value}), name) == value


@pytest.mark.parametrize(("name", "least", "most"), [(name, *bounds) for name, bounds in NUMBERS.items()])
def test_a_number_beyond_its_range_is_refused(name, least, most):
    for value in (least - 1, most + 1, -1, -(1 << 70), 1 << 70):
        error = refused(**{name: value})
        assert f"{name} is out of range" in str(error)
        assert str(least) in error.expected
        assert str(most) in error.expected


@pytest.mark.parametrize("value", ["64", 64.0, math.nan, math.inf, None, True, [64], b"64"], ids=repr)
@pytest.mark.parametrize("name", NUMBERS)
def test_what_is_no_whole_number_is_refused_for_its_type(name, value):
    error = refused(**{name: value})
    assert is_of_the_wrong_type(error, value)
    assert "(int)" in error.expected


@pytest.mark.parametrize("value", [257, 320 + 8, (16 << 10) - 1])
def test_slots_that_share_a_cache_line_are_refused(value):
    assert "multiple of 64" in refused(slot_bytes=value).expected


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("value", [1, 0, "no", "true", None], ids=repr)
def test_a_switch_is_on_or_off(name, value):
    assert is_of_the_wrong_type(refused(**{name: value}), value)


@pytest.mark.parametrize("value", [0, -1, -0.5, math.nan, "1", None, True, [1.0]], ids=repr)
def test_a_stall_takes_a_time_above_zero(value):
    assert ("out of range" in str(refused(stall_warning_s=value))) == (type(value) in (int, float))


@pytest.mark.parametrize("value", [0.001, 1, 3600.0, math.inf])
def test_a_stall_may_take_any_time_above_zero(value):
    assert QueueConfig(stall_warning_s=value).stall_warning_s == value


def test_a_stall_that_is_never_reported_is_a_setting_like_any_other(run_dir):
    with MessageQueue(1, config=QueueConfig(stall_warning_s=math.inf, slots=2)) as writer:
        writer.enqueue(None)
        writer.enqueue(None)
        with pytest.raises(QueueTimeout):
            writer.enqueue(None, timeout=0.001)


@pytest.mark.parametrize("value", ["read-only", "", None, 1, "READONLY", ["readonly"]], ids=repr)
def test_views_are_one_of_three(value):
    assert "'readonly' or 'shared' or 'private'" in refused(views=value).expected


@pytest.mark.parametrize("value", ["ignore", "", None, True], ids=repr)
def test_a_readers_death_is_raised_or_not(value):
    assert "'raise' or 'continue'" in refused(on_reader_death=value).expected


@pytest.mark.parametrize("value", ["", None, 7, b"queue", "a\0b", "a\nb", "x" * 201, "\u00e4" * 101], ids=len_or_repr)
def test_a_name_is_a_short_text(value):
    assert is_of_the_wrong_type(refused(name=value), value) == (type(value) is not str)


@pytest.mark.parametrize("value", ["q", "tp 0/engine@2", "x" * 200, "\u00e4" * 100, "日本"], ids=len_or_repr)
def test_a_name_may_hold_anything_that_prints(value):
    assert QueueConfig(name=value).name == value


@pytest.mark.parametrize("value", [7, b"/tmp", True], ids=repr)
def test_a_run_directory_is_a_path(value):
    assert is_of_the_wrong_type(refused(run_dir=value), value)


def test_a_configuration_can_neither_change_nor_lose_anything_on_its_way():
    config = QueueConfig(slots=7, views="private")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.slots = 8  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(config)) == config


# --- the environment -------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch):
    for field in dataclasses.fields(QueueConfig):
        monkeypatch.delenv(f"ARENA_{field.name.upper()}", raising=False)


def test_without_variables_the_environment_changes_nothing():
    config = QueueConfig(slots=7)
    assert config.from_environment() is config


@pytest.mark.parametrize(
    ("variable", "text", "field", "value"),
    [
        ("ARENA_NAME", "engine", "name", "engine"),
        ("ARENA_SLOTS", "8", "slots", 8),
        ("ARENA_SLOT_BYTES", "1024", "slot_bytes", 1024),
        ("ARENA_MAX_ARENA_BYTES", "0", "max_arena_bytes", 0),
        ("ARENA_SEGMENT_BYTES", "4096", "segment_bytes", 4096),
        ("ARENA_MIN_BLOCK_BYTES", "1", "min_block_bytes", 1),
        ("ARENA_MAX_MESSAGE_BYTES", "99", "max_message_bytes", 99),
        ("ARENA_MAX_HOLDS", "3", "max_holds", 3),
        ("ARENA_VIEWS", "private", "views", "private"),
        ("ARENA_PREFAULT", "1", "prefault", True),
        ("ARENA_HUGE_PAGES", "no", "huge_pages", False),
        ("ARENA_PROBES", "False", "probes", False),
        ("ARENA_ON_READER_DEATH", "continue", "on_reader_death", "continue"),
        ("ARENA_STALL_WARNING_S", "2.5", "stall_warning_s", 2.5),
        ("ARENA_RUN_DIR", "/dev/shm/x", "run_dir", "/dev/shm/x"),
    ],
)
def test_a_variable_overrides_its_field_and_no_other(variable, text, field, value, monkeypatch):
    monkeypatch.setenv(variable, text)
    expected = dataclasses.replace(QueueConfig(), **{field: value})
    assert QueueConfig().from_environment() == expected


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("text", ["", "many", "1.5", "0x10", "nan", "-1", str(1 << 70)])
def test_a_variable_that_is_no_number_in_range_is_refused(name, text, monkeypatch):
    monkeypatch.setenv(f"ARENA_{name.upper()}", text)
    with pytest.raises(InvalidArgument, match=name if text in ("-1", str(1 << 70)) else f"ARENA_{name.upper()}"):
        QueueConfig().from_environment()


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("text", ["", "maybe", "2", "on!"])
def test_a_variable_that_is_no_switch_is_refused(name, text, monkeypatch):
    monkeypatch.setenv(f"ARENA_{name.upper()}", text)
    with pytest.raises(InvalidArgument, match=f"ARENA_{name.upper()} .* 1 or 0"):
        QueueConfig().from_environment()


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("ARENA_STALL_WARNING_S", "soon"),
        ("ARENA_STALL_WARNING_S", "0"),
        ("ARENA_STALL_WARNING_S", "nan"),
        ("ARENA_VIEWS", "x"),
        ("ARENA_ON_READER_DEATH", "x"),
        ("ARENA_NAME", ""),
    ],
)
def test_any_other_variable_is_checked_like_its_field(variable, text, monkeypatch):
    monkeypatch.setenv(variable, text)
    with pytest.raises(InvalidArgument):
        QueueConfig().from_environment()


@pytest.mark.parametrize(
    ("variable", "told"),
    [
        ("ARENA_SLOT", "ARENA_SLOT (did you mean ARENA_SLOTS?)"),
        ("ARENA_MAXARENA_BYTES", "ARENA_MAXARENA_BYTES (did you mean ARENA_MAX_ARENA_BYTES?)"),
        ("ARENA_RUNDIR", "ARENA_RUNDIR (did you mean ARENA_RUN_DIR?)"),
        ("ARENA_SERVICE_HOST", "ARENA_SERVICE_HOST"),
    ],
)
def test_a_variable_that_is_no_setting_is_told_once_to_whoever_listens(variable, told, monkeypatch, run_dir):
    monkeypatch.setenv(variable, "3")
    assert unknown_variables() == [told]
    warnings: list[str] = []
    with MessageQueue(1, config=QueueConfig(name="steps"), on_warning=warnings.append) as queue:
        assert queue.config == QueueConfig(name="steps", run_dir=str(run_dir))
    assert warnings == [f"no setting of queue 'steps' is called {told}"]


def test_a_variable_that_means_something_is_no_misspelt_setting(monkeypatch):
    for field in dataclasses.fields(QueueConfig):
        monkeypatch.setenv(f"ARENA_{field.name.upper()}", "1")
    monkeypatch.setenv("ARENA_CI", "1")
    assert unknown_variables() == []


# --- arguments of the verbs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_reader", [1, 4, MAX_READERS])
def test_a_queue_has_at_least_one_reader(n_reader):
    assert check_readers(n_reader, None, None) == check_readers(n_reader, n_reader, None) == (n_reader, n_reader)


@pytest.mark.parametrize("n_reader", [0, -1, MAX_READERS + 1, 1.0, "1", None, True])
def test_a_number_of_readers_that_is_none_is_refused(n_reader):
    trouble = "out of range" if type(n_reader) is int else "of the wrong type"
    with pytest.raises(InvalidArgument, match=f"n_reader is {trouble}"):
        check_readers(n_reader, None, None)


@pytest.mark.parametrize("n_local_reader", [0, 3, 5, -1, "4", True])
def test_readers_on_other_hosts_need_an_address(n_local_reader):
    with pytest.raises(InvalidArgument):
        check_readers(4, n_local_reader, None)


def test_with_an_address_some_readers_may_be_elsewhere():
    assert check_readers(4, 0, RemoteConfig("10.0.0.1")) == (4, 0)
    assert check_readers(4, None, RemoteConfig("10.0.0.1")) == (4, 4)
    for n_local_reader in (5, -1, "4", True):
        with pytest.raises(InvalidArgument):
            check_readers(4, n_local_reader, RemoteConfig("10.0.0.1"))


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("10.0.0.1", "10.0.0.1", 0),
        ("node-7:5555", "node-7", 5555),
        ("[fe80::1]", "fe80::1", 0),
        ("[::1]:80", "::1", 80),
    ],
)
def test_an_address_is_a_host_with_or_without_a_port(address, host, port):
    assert split_address("bind", address) == (host, port)


@pytest.mark.parametrize(
    "address", ["", "*", "a b", "host:port", "host:70000", "::1", "tcp://host:1", "[::1", "x/y", 7]
)
def test_what_is_no_address_is_refused(address):
    with pytest.raises(InvalidArgument, match="bind"):
        RemoteConfig(address)


def test_a_wildcard_is_no_address_that_readers_can_connect_to():
    with pytest.raises(InvalidArgument, match="connect is missing"):
        RemoteConfig("0.0.0.0:5555")
    assert RemoteConfig("0.0.0.0:5555", connect="node-7").connect == "node-7"


@pytest.mark.parametrize("settings", [{"timeout_s": 0.1}, {"timeout_s": "5"}, {"window_bytes": 5}, {"connect": "a b"}])
def test_a_setting_of_the_network_out_of_range_is_refused(settings):
    with pytest.raises(InvalidArgument, match=next(iter(settings))):
        RemoteConfig("10.0.0.1", **settings)


@pytest.mark.parametrize(("timeout", "seconds"), [(None, None), (0, 0.0), (1.5, 1.5), (math.inf, 1e9), (10**30, 1e9)])
def test_a_timeout_is_none_or_seconds(timeout, seconds):
    assert check_timeout(timeout) == seconds


@pytest.mark.parametrize("timeout", [-1, -0.001, math.nan, -math.inf, "1", [1], True], ids=repr)
def test_a_timeout_that_is_no_time_is_refused(timeout):
    with pytest.raises(InvalidArgument, match="timeout") as caught:
        check_timeout(timeout)
    assert is_of_the_wrong_type(caught.value, timeout) == (type(timeout) not in (int, float))
    assert caught.value.found.startswith(repr(timeout))
