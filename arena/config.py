"""The settings of a queue: one frozen dataclass, one place that refuses, overridable from the environment."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final

from arena.errors import InvalidArgument
from arena.layout import MAX_READERS, PAGE, PAYLOAD_OFFSET

if TYPE_CHECKING:
    import torch

VIEWS: Final = ("readonly", "shared", "private")
ON_READER_DEATH: Final = ("raise", "continue")
PIN: Final = ("auto", "required", "off")
SERIALIZERS: Final = ("pickle", "restricted")
_LARGEST: Final = 1 << 46
_NAME_BYTES: Final = 200  # a memfd carries the name, and may have 249 bytes
_PREFIX: Final = "ARENA_"
_ADDRESS: Final = re.compile(r"(\[(?P<v6>[0-9A-Fa-f:.%\w]+)\]|(?P<host>[^\s\[\]:/*]+))(:(?P<port>[0-9]{1,5}))?")
_WILDCARDS: Final = ("0.0.0.0", "::")
# What the tests go by; what a host goes by; what the plugin for vLLM goes by.
_NOT_SETTINGS: Final = ("ARENA_CI", "ARENA_HOST_ID", "ARENA_VLLM")


@dataclass(frozen=True)
class QueueConfig:
    """Settings of a queue, chosen by its writer. ``ARENA_<NAME>`` in the environment overrides a field.

    Attributes:
        name: what the queue is called in metrics, traces and errors.
        slots: frames the ring holds; the writer waits for the slowest reader when it is full.
        slot_bytes: bytes of one slot, header included. A frame that fits rides inline.
        max_arena_bytes: limit of shared memory for tensors; 0 sends them through the ring in fragments.
        segment_bytes: the arena grows by segments of this size, or of one larger tensor.
        min_block_bytes: tensors and buffers from this size up go to a block of their own.
        max_message_bytes: larger messages are refused.
        max_holds: how many (message, block) pairs may be out at once.
        views: what readers get of a tensor in the arena. "readonly": zero-copy, an in-place write is a
            segmentation fault (numpy arrays refuse it properly); "shared": zero-copy and writable, one reader's
            write is everybody's; "private": a writable copy of each reader's own.
        prefault: make the first segment at the start, and every segment with all its pages at once; readers map what
            is there when they attach.
        huge_pages: back large blocks with huge pages where the kernel can (MADV_COLLAPSE).
        pin: how segments are registered with a device, so that it copies from them by itself. "auto": once a process
            uses a device, in the background, and where it can't be, copies go the slow way, counted; "required":
            `to_device` waits for it, and raises where it can't be; "off": not at all.
        serializer: "pickle", or "restricted": None, bool, numbers, str, bytes, lists, tuples, dicts, tensors and
            arrays, through msgpack; nothing that comes over a network can make a reader run code. Extra: ``remote``.
        on_reader_death: "raise" tells the writer once per death, before it sends; "continue" only counts it.
        probes: keep a probe page for telemetry.
        stall_warning_s: a wait for a slot that lasts this long is reported through `on_warning`, once.
        run_dir: where probe pages and the attach socket live; see `arena.probe.directory`.
    """

    name: str = "queue"
    slots: int = 64
    slot_bytes: int = 16 << 10
    max_arena_bytes: int = 2 << 30
    segment_bytes: int = 64 << 20
    min_block_bytes: int = 64 << 10
    max_message_bytes: int = 4 << 30
    max_holds: int = 1024
    views: str = "readonly"
    prefault: bool = False
    huge_pages: bool = True
    pin: str = "auto"
    serializer: str = "pickle"
    on_reader_death: str = "raise"
    probes: bool = True
    stall_warning_s: float = 1.0
    run_dir: str | None = None

    def __post_init__(self) -> None:
        for name, least, most in (
            ("slots", 2, 1 << 14),
            ("slot_bytes", PAYLOAD_OFFSET + 192, 1 << 30),
            ("max_arena_bytes", 0, _LARGEST),
            ("segment_bytes", PAGE, _LARGEST),
            ("min_block_bytes", 1, _LARGEST),
            ("max_message_bytes", 1, _LARGEST),
            ("max_holds", 1, 1 << 20),
        ):
            _check_int(name, getattr(self, name), least, most)
        for name, choices in (
            ("views", VIEWS),
            ("pin", PIN),
            ("serializer", SERIALIZERS),
            ("on_reader_death", ON_READER_DEATH),
        ):
            if getattr(self, name) not in choices:
                raise _refused(name, "is none of its choices", " or ".join(map(repr, choices)), getattr(self, name))
        if self.slot_bytes % 64:
            expected = "a multiple of 64, so that slots keep off each other's cache lines"
            raise _refused("slot_bytes", "does not fill cache lines", expected, self.slot_bytes)
        self._check_name(f"a printable name of 1 to {_NAME_BYTES} bytes")
        for switch in ("prefault", "huge_pages", "probes"):
            _check_type(switch, getattr(self, switch), "True or False", bool)
        if isinstance(self.run_dir, str) and "\0" in self.run_dir:
            raise _refused("run_dir", "is no path", "a path without a null character", self.run_dir)
        _check_type("run_dir", self.run_dir, "a path (str or os.PathLike) or None", str, os.PathLike, type(None))
        _check_type("stall_warning_s", self.stall_warning_s, "seconds above 0 (int or float)", int, float)
        if not self.stall_warning_s > 0:
            raise _refused("stall_warning_s", "is out of range", "seconds above 0", self.stall_warning_s)

    def _check_name(self, expected: str) -> None:
        _check_type("name", self.name, f"{expected} (str)", str)
        if not (self.name.isprintable() and 0 < len(self.name.encode()) <= _NAME_BYTES):
            raise _refused("name", "can't be shown or does not fit", expected, self.name)

    def from_environment(self) -> QueueConfig:
        """This configuration with ``ARENA_*`` variables laid over it.

        Raises:
            InvalidArgument: a variable is not of its field's type, or outside its range.
        """
        changes: dict[str, Any] = {}
        for field in fields(self):
            text = os.environ.get(_variable(field.name))
            if text is not None:
                changes[field.name] = _parsed(_variable(field.name), text, getattr(type(self), field.name))
        return replace(self, **changes) if changes else self


@dataclass(frozen=True)
class RemoteConfig:
    """Where readers on other hosts reach a queue, and how long they may be silent.

    Attributes:
        bind: the writer's address that is listened on, and no other: "host" or "host:port", a name or a number, an
            IPv6 one in brackets. Without a port the kernel chooses one. A name must lead to one address.
        connect: what readers connect to, where that is another: behind a NAT, or with a wildcard as `bind`.
        timeout_s: a reader whose host is silent for about so long is dead, and so is a writer to its readers.
        window_bytes: how much may be on the way to one reader, or lie there before it comes for it.
    """

    bind: str
    connect: str | None = None
    timeout_s: float = 5.0
    window_bytes: int = 32 << 20

    def __post_init__(self) -> None:
        for name, value in (("bind", self.bind), ("connect", self.connect)):
            if value is not None:
                split_address(name, value)
        if self.connect is None and split_address("bind", self.bind)[0] in _WILDCARDS:
            raise _refused("connect", "is missing", "an address that readers can connect to, as bind is none", None)
        _check_type("timeout_s", self.timeout_s, "seconds (int or float)", int, float)
        if not 0.2 <= self.timeout_s <= 3600:
            raise _refused("timeout_s", "is out of range", "seconds from 0.2 to 3600", self.timeout_s)
        _check_int("window_bytes", self.window_bytes, 1 << 20, _LARGEST)


def check_remote(remote: object) -> RemoteConfig | None:
    """What `MessageQueue` takes as `remote`: an address alone is a `RemoteConfig` with it."""
    _check_type("remote", remote, "a RemoteConfig, an address or None", RemoteConfig, str, type(None))
    return RemoteConfig(remote) if isinstance(remote, str) else remote  # type: ignore[return-value]


def split_address(name: str, address: object) -> tuple[str, int]:
    """Host and port of "host", "host:port", "[v6]" or "[v6]:port"; port 0 where there is none."""
    expected = "host or host:port, an IPv6 host in brackets"
    _check_type(name, address, f"{expected} (str)", str)
    found = _ADDRESS.fullmatch(str(address))
    if found is None or int(found["port"] or 0) > 65535:
        raise _refused(name, "is no address", expected, address)
    return found["v6"] or found["host"], int(found["port"] or 0)


def unknown_variables() -> list[str]:
    """The ``ARENA_*`` variables that set nothing, misspelt most likely, each with the setting that is nearest."""
    names = [field.name for field in fields(QueueConfig)]
    known = {*_NOT_SETTINGS, *map(_variable, names)}
    return [_and_the_nearest(one, names) for one in sorted(os.environ) if one.startswith(_PREFIX) and one not in known]


def _and_the_nearest(variable: str, names: list[str]) -> str:
    from difflib import get_close_matches

    near = get_close_matches(variable.removeprefix(_PREFIX).lower(), names, n=1, cutoff=0.7)
    return f"{variable} (did you mean {_variable(near[0])}?)" if near else variable


def _variable(name: str) -> str:
    return _PREFIX + name.upper()


def _parsed(variable: str, text: str, default: object) -> object:
    if isinstance(default, bool):
        known = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
        if text.lower() not in known:
            raise _refused(variable, "is neither on nor off", "1 or 0", text)
        return known[text.lower()]
    if not isinstance(default, (int, float)):
        return text
    kind = "a whole number" if isinstance(default, int) else "a number"
    try:
        return type(default)(text)
    except ValueError:
        raise _refused(variable, f"is not {kind}", kind, text) from None


def check_readers(n_reader: object, n_local_reader: object, remote: RemoteConfig | None) -> tuple[int, int]:
    """How many readers, and how many of them on the writer's host."""
    count = _check_int("n_reader", n_reader, 1, MAX_READERS)
    if n_local_reader is None:
        return count, count
    local = _check_int("n_local_reader", n_local_reader, 0, count)
    if local != count and remote is None:
        raise InvalidArgument(
            "readers on other hosts need an address to come to",
            expected=f"remote, an address of this host, for {count - local} of {count} readers",
            found="none",
            remedy="pass remote='10.0.0.1', or attach every reader on the writer's host",
        )
    return count, local


def check_rank(rank: object) -> int:
    """A rank, as far as its type goes: which ones there are, only the writer knows."""
    if not isinstance(rank, int) or isinstance(rank, bool):
        raise InvalidArgument(
            "rank is of the wrong type", expected="a whole number", found=f"{rank!r} of type {type(rank).__name__}"
        )
    return rank


def check_timeout(timeout: object) -> float | None:
    """A timeout in seconds: None for none, else a number from 0 up."""
    if timeout is None:
        return None
    _check_type("timeout", timeout, "seconds (int or float), or None to wait for ever", int, float)
    assert isinstance(timeout, (int, float))
    if not timeout >= 0:  # NaN is not, either
        raise _refused("timeout", "is out of range", "seconds from 0 up, or None to wait for ever", timeout)
    return float(min(timeout, 10**9))


def check_poll(poll_s: object) -> int:
    """How long to poll for at least, in ns: seconds from 0 to 60."""
    _check_type("poll_s", poll_s, "seconds (int or float)", int, float)
    assert isinstance(poll_s, (int, float))
    if not 0 <= poll_s <= 60:
        raise _refused("poll_s", "is out of range", "seconds from 0 to 60", poll_s)
    return int(poll_s * 1e9)


def check_config(config: object) -> QueueConfig:
    """Settings, or the ones that nobody changed."""
    if config is None:
        return QueueConfig()
    _check_type("config", config, "a QueueConfig, such as QueueConfig(slots=128)", QueueConfig)
    assert isinstance(config, QueueConfig)
    return config


def check_on_warning(on_warning: Any) -> Any:
    """Something to call with a sentence, or None."""
    if on_warning is not None and not callable(on_warning):
        raise _refused("on_warning", "can't be called", "a function of one string, or None", on_warning)
    return on_warning


def check_device(device: Any) -> torch.device:
    """A device that torch knows by that name."""
    import torch

    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        expected = "a torch.device, its name such as 'cuda:0', or a GPU's number"
        raise _refused("device", "is none", expected, device) from error
    if found.type == "cuda" and not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        raise _refused("device", "is out of reach", "a torch that was built with CUDA", torch.__version__)
    return found


def check_tensor(shape: Any, dtype: Any) -> torch.Tensor:
    """What is asked for, as a tensor on the meta device, which costs no memory: torch is the judge of a shape."""
    import torch

    _check_type("dtype", dtype, "a torch.dtype, such as torch.float32", torch.dtype)
    try:
        if str(dtype).startswith(("torch.quint", "torch.qint")):
            raise TypeError("a quantized tensor has a scale of its own, which nothing here would say")
        return torch.empty(shape, dtype=dtype, device="meta")
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InvalidArgument(
            "there is no tensor of this shape and dtype",
            expected="whole numbers from 0 up, as torch.empty takes them, and a dtype that is not quantized",
            found=f"{shape!r} of {dtype}",
            remedy="nothing was lent; correct the shape, or lend the integers underneath",
        ) from error


def _check_int(name: str, value: object, least: int, most: int) -> int:
    expected = f"a whole number from {least} to {most}"
    _check_type(name, value, f"{expected} (int)", int)
    assert isinstance(value, int)
    if not least <= value <= most:
        raise _refused(name, "is out of range", expected, value)
    return value


def _check_type(name: str, value: object, expected: str, *types: type) -> None:
    """Refuse what is of another type; True is no number here."""
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        found = f"{value!r} of type {type(value).__name__}"
        raise InvalidArgument(f"{name} is of the wrong type", expected=expected, found=found)


def _refused(name: str, trouble: str, expected: str, found: object) -> InvalidArgument:
    return InvalidArgument(f"{name} {trouble}", expected=expected, found=repr(found))
