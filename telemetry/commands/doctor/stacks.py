"""Where a process stands in its Python code, as py-spy tells, if it is installed and may look."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

DEADLINE_S: Final = 2.0
_LINES: Final = 14


def stack_of(pid: int) -> list[str]:
    """The stack, the innermost call first; or one line that says why there is none."""
    program = _py_spy()
    if program is None:
        return ["py-spy is not installed; `pip install py-spy` lets the doctor show where the process stands"]
    # Without stopping it: a process that is stopped already, or in the kernel, would hold up who looks.
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    except subprocess.TimeoutExpired:
        return [f"py-spy did not answer within {DEADLINE_S:g} s"]
    except OSError as error:
        return [f"py-spy can't be run: {error.strerror}"]
    if ran.returncode:
        return [f"py-spy can't look: {_reason(ran.stderr)}"]
    lines = [line.rstrip() for line in ran.stdout.splitlines() if line.strip()]
    frames = lines[next((at for at, line in enumerate(lines) if line.startswith("Thread")), 0) :]
    return frames[:_LINES] + ([f"... {len(frames) - _LINES} more lines"] if len(frames) > _LINES else [])


def _reason(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return next((line for line in lines if "ermission" in line), lines[0] if lines else "no reason given")


def _py_spy() -> str | None:
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")
