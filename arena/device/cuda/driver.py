"""The few calls to the CUDA driver that torch has no door for, and the fastest way to launch a kernel from Python.

Through ctypes: nothing to install beside the driver, and the cheapest launch there is without compiled code. On one
H200's host `cuLaunchKernelEx` with everything prepared took 3.5 µs through ctypes and 4.5 µs through cuda.bindings
(2026-11-30; 2 µs of either are the driver's own).
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, Final

_IPC_LAZY_PEER_ACCESS: Final = 1
_PROGRAMMATIC_STREAM_SERIALIZATION: Final = 6
_CAN_USE_64_BIT_STREAM_MEM_OPS: Final = 122
_NOT_FOUND: Final = 500
IPC_HANDLE_BYTES: Final = 64


class DriverError(RuntimeError):
    """The driver refused, with this status; 0 if there is no driver."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_byte * IPC_HANDLE_BYTES),)


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_uint64 * 8))


class _Config(ctypes.Structure):
    _fields_ = (
        ("blocks", ctypes.c_uint * 3),
        ("threads", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


def version() -> str:
    """The CUDA version that the driver speaks."""
    number = ctypes.c_int()
    _call("cuDriverGetVersion", ctypes.byref(number))
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


# --- memory ----------------------------------------------------------------------------------------------------------


def has_context(index: int) -> bool:
    """Whether this process uses that GPU already; 0 is the first that it sees."""
    device, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
    _call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
    _call("cuDevicePrimaryCtxGetState", device, ctypes.byref(flags), ctypes.byref(active))
    return active.value != 0


def need_context(index: int) -> None:
    """Make that GPU's context this thread's if it has none, as its first call of CUDA's runtime would.

    A thread that has not used CUDA yet has none, however long other threads have used it.
    """
    context = ctypes.c_void_p()
    _call("cuCtxGetCurrent", ctypes.byref(context))
    if context.value:
        return
    device = ctypes.c_int()
    _call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    try:
        _call("cuCtxSetCurrent", context)
    finally:
        _call("cuDevicePrimaryCtxRelease_v2", device)  # torch keeps it


def is_capturing(stream: int, index: int) -> bool:
    """Whether what is queued on a stream of that GPU now becomes part of a graph."""
    need_context(index)
    status = ctypes.c_int()
    _call("cuStreamIsCapturing", ctypes.c_void_p(stream), ctypes.byref(status))
    return status.value != 0


def can_write_words(index: int) -> bool:
    """Whether that GPU's streams can store 64-bit words by themselves; 0 is the first that this process sees."""
    device, able = ctypes.c_int(), ctypes.c_int()
    _call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
    _call("cuDeviceGetAttribute", ctypes.byref(able), ctypes.c_int(_CAN_USE_64_BIT_STREAM_MEM_OPS), device)
    return able.value != 0


def stream_id(stream: int) -> int:
    """A number that no other stream of this process has, or will have: handles are used again."""
    number = ctypes.c_ulonglong()
    _call("cuStreamGetId", ctypes.c_void_p(stream), ctypes.byref(number))
    return number.value


def write_word(stream: int, address: int, number: int) -> None:
    """Queue a store of 64 bits behind what is queued on a stream, and behind a fence for the whole system."""
    _call(
        "cuStreamWriteValue64_v2",
        ctypes.c_void_p(stream),
        ctypes.c_uint64(address),
        ctypes.c_uint64(number),
        ctypes.c_uint(0),
    )


def device_address(address: int) -> int:
    """Where the current device sees a range of the host that is registered, by its first byte."""
    found = ctypes.c_uint64()
    _call("cuMemHostGetDevicePointer_v2", ctypes.byref(found), ctypes.c_void_p(address), ctypes.c_uint(0))
    return found.value


RELAXED: Final = 2


def exchange_capture_mode(mode: int) -> int:
    """Set how strictly this thread is held to other threads' captures; returns what it was."""
    given = ctypes.c_int(mode)
    _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(given))
    return given.value


class Relaxed:
    """Around calls that the driver takes for unsafe while *another* thread captures a graph: they would end that.

    They are not: nothing of ours waits for, or adds to, what is being captured.
    """

    __slots__ = ("_mode",)

    def __enter__(self) -> None:
        self._mode = exchange_capture_mode(RELAXED)

    def __exit__(self, *error: object) -> None:
        exchange_capture_mode(self._mode)


def register(address: int, nbytes: int, flags: int) -> None:
    """Lock pages of the host, and tell the driver of them."""
    _call("cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_uint(flags))


def unregister(address: int) -> None:
    """Undo `register`. Waits for copies from there."""
    _call("cuMemHostUnregister", ctypes.c_void_p(address))


def allocate(size_bytes: int) -> int:
    """Device memory of its own, which no allocator hands out in pieces: another process may get to see all of it."""
    address = ctypes.c_uint64()
    _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size_bytes))
    return address.value


def free(address: int) -> None:
    """Give back what `allocate` gave. Waits for kernels that are running."""
    _call("cuMemFree_v2", ctypes.c_uint64(address))


def fill(address: int, byte: int, size_bytes: int) -> None:
    """Set every byte, in the order of the default stream."""
    _call("cuMemsetD8_v2", ctypes.c_uint64(address), ctypes.c_ubyte(byte), ctypes.c_size_t(size_bytes))


def synchronize() -> None:
    """Wait until everything that was queued in the current context is over."""
    _call("cuCtxSynchronize")


def store_word(address: int, word: int) -> None:
    """Write 32 bits, in a peer's memory too."""
    given = ctypes.c_uint32(word)
    _call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), ctypes.byref(given), ctypes.c_size_t(ctypes.sizeof(given)))


def read_words(address: int, count: int) -> list[int]:
    """Read so many times 32 bits."""
    taken = (ctypes.c_uint32 * count)()
    _call("cuMemcpyDtoH_v2", taken, ctypes.c_uint64(address), ctypes.c_size_t(ctypes.sizeof(taken)))
    return list(taken)


def copy(target: int, source: int, size_bytes: int, stream: int) -> None:
    """Queue a copy, by a copy engine. Both addresses may be anywhere."""
    _call(
        "cuMemcpyAsync",
        ctypes.c_uint64(target),
        ctypes.c_uint64(source),
        ctypes.c_size_t(size_bytes),
        ctypes.c_void_p(stream),
    )


def export_memory(address: int) -> bytes:
    """A handle by which another process of this host can map the memory. It stays valid while the memory is there."""
    handle = _IpcHandle()
    _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
    return bytes(handle)


def map_memory(handle: bytes) -> int:
    """Map another process's memory for the current device, wherever it lies."""
    address = ctypes.c_uint64()
    given = _IpcHandle.from_buffer_copy(handle)
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, ctypes.c_uint(_IPC_LAZY_PEER_ACCESS))
    return address.value


def unmap_memory(address: int) -> None:
    """Undo `map_memory`."""
    _call("cuIpcCloseMemHandle", ctypes.c_uint64(address))


# --- kernels ---------------------------------------------------------------------------------------------------------


def load_module(image: bytes) -> int:
    """Load a compiled program into the current context."""
    module = ctypes.c_void_p()
    _call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(image))
    assert module.value is not None
    return module.value


def get_function(module: int, name: str) -> int:
    """A kernel of a loaded program, by its C name."""
    function = ctypes.c_void_p()
    _call("cuModuleGetFunction", ctypes.byref(function), ctypes.c_void_p(module), ctypes.c_char_p(name.encode()))
    assert function.value is not None
    return function.value


class Launch:
    """A kernel that takes (input, output, vectors, a structure by value), with all but addresses and stream prepared.

    One thread at a time: the arguments live here until the driver has copied them.
    """

    __slots__ = ("_attribute", "_config", "_everything", "_function", "_launch", "_out", "_reference", "_x")

    def __init__(
        self, function: int, shape: tuple[int, int], vectors: int, constants: ctypes.Structure, *, early: bool
    ) -> None:
        """`shape` is (blocks, threads). `early`: a programmatic dependent launch; the kernel has to wait by itself."""
        self._function = ctypes.c_void_p(function)
        self._x, self._out = ctypes.c_void_p(), ctypes.c_void_p()
        arguments = (self._x, self._out, ctypes.c_uint(vectors), constants)
        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        self._everything = pointers, arguments
        self._attribute = _Attribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION)
        self._attribute.value[0] = 1
        self._config = _Config(attributes=ctypes.addressof(self._attribute), attribute_count=int(early))
        self._config.blocks[:], self._config.threads[:] = (shape[0], 1, 1), (shape[1], 1, 1)
        self._reference = ctypes.byref(self._config)
        self._launch = _driver().cuLaunchKernelEx

    def __call__(self, stream: int, x: int, out: int) -> None:
        """Queue it."""
        self._config.stream = stream
        self._x.value = x
        self._out.value = out
        status = self._launch(self._reference, self._function, self._everything[0], None)
        if status:
            raise DriverError(_describe("cuLaunchKernelEx", status))


def _call(name: str, *arguments: Any) -> None:
    try:
        function = getattr(_driver(), name)
    except AttributeError:
        raise DriverError(f"{name}: this driver has no such call", _NOT_FOUND) from None
    status = function(*arguments)
    if status:
        raise DriverError(_describe(name, status), status)


def _describe(name: str, status: int) -> str:
    text = ctypes.c_char_p()
    _driver().cuGetErrorString(ctypes.c_int(status), ctypes.byref(text))
    return f"{name}: {text.value.decode() if text.value else 'unknown error'} ({status})"


@cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError(f"there is no CUDA driver: {error}") from None
