"""From the CUDA source beside this file to a program for the GPU at hand, at run time (NVRTC).

Compiling takes half a second for two ranks, and two for eight, where the three element types have a core each (1.8 and
5.2 s of CPU together, an AMD EPYC, 2026-11-30), so it is done once a process and kept nowhere else: a cache on disk
would save less than torch's own start takes, and could be stale or damaged.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, Final

_SOURCE = Path(__file__).with_name("push.cu")


class BuildFailed(RuntimeError):
    """The kernels can't be compiled here."""


ELEMENTS: Final = ("Float32", "Float16", "BFloat16")
"""The element types, by their names in push.cu."""


@cache
def compile_push(world: int, capability: tuple[int, int]) -> dict[str, bytes]:
    """The kernels of push.cu for so many ranks and this chip: a program for each element type.

    Raises:
        BuildFailed: there is no compiler, or it refused; the text says which and why.
    """
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise BuildFailed(f"the package cuda-bindings is not installed: {error}") from None
    source = _SOURCE.read_bytes()
    options = [f"--gpu-architecture=sm_{capability[0]}{capability[1]}", "--std=c++17", f"--define-macro=WORLD={world}"]

    def compiled(element: str) -> bytes:
        given = [*options, f"--define-macro=ELEMENT={element}"]
        return _compile(nvrtc, source, [option.encode() for option in given])

    try:
        with ThreadPoolExecutor(len(ELEMENTS)) as threads:  # the compiler lets go of the interpreter's lock
            return dict(zip(ELEMENTS, threads.map(compiled, ELEMENTS), strict=True))
    except RuntimeError as error:  # cuda.bindings raises it if the library itself is missing
        raise BuildFailed(str(error)) from error


def _compile(nvrtc: Any, source: bytes, options: list[bytes]) -> bytes:
    program = _checked(nvrtc, nvrtc.nvrtcCreateProgram(source, _SOURCE.name.encode(), 0, [], []))
    try:
        status = nvrtc.nvrtcCompileProgram(program, len(options), options)[0]
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = bytes(_checked(nvrtc, nvrtc.nvrtcGetProgramLogSize(program)))
            _checked(nvrtc, nvrtc.nvrtcGetProgramLog(program, log))
            raise BuildFailed(log.rstrip(b"\0\n").decode(errors="replace"))
        image = bytes(_checked(nvrtc, nvrtc.nvrtcGetCUBINSize(program)))
        _checked(nvrtc, nvrtc.nvrtcGetCUBIN(program, image))
        return image
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _checked(nvrtc: Any, answer: tuple[Any, ...]) -> Any:
    status, *values = answer
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise BuildFailed(str(status))
    return values[0] if values else None
