"""Starts an engine in another interpreter, tells it what to do, and looks at its processes from outside."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from tests.support.fleet import cpu_seconds, process_state

ROOT: Final = Path(__file__).parent.parent.parent
START_WITHIN_S: Final = 600.0
ANSWER_WITHIN_S: Final = 300.0
SEGMENTS: Final = "/dev/shm/psm_"  # what Python's shared_memory makes

OFFLINE: Final = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}


@dataclass(frozen=True)
class Memory:
    """Shared memory of an engine, in bytes: what is there to be used, and what of it has been touched."""

    size_bytes: int
    touched_bytes: int


class Engine:
    """One engine, by its commands. Killed with all its processes on leaving the `with` block."""

    def __init__(
        self, python: Path, place: Path, *, arena: str, tensor_parallel: int = 2, method: str = "fork"
    ) -> None:
        self.run_dir = Path(tempfile.mkdtemp(prefix="arena-vllm-"))
        self.log = place / f"engine-{arena}-{method}-{self.run_dir.name}.log"
        answers, theirs = os.pipe()
        self._answers = os.fdopen(answers)
        cores = sorted(os.sched_getaffinity(0))
        binding = "|".join(str(cores[rank % len(cores)]) for rank in range(tensor_parallel))
        environment = os.environ | OFFLINE | {
            "ARENA_VLLM": arena,
            "ARENA_RUN_DIR": str(self.run_dir),
            "VLLM_CPU_OMP_THREADS_BIND": binding,
            "VLLM_WORKER_MULTIPROC_METHOD": method,
        }  # fmt: skip
        command = [str(python), "-m", "tests.vllm.engine", f"--answers={theirs}", f"--model={place / 'model'}"]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, f"--tensor-parallel={tensor_parallel}"],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs],
            )
        os.close(theirs)
        self._known: set[int] = set()
        self._segments: set[str] = set()

    def wait_ready(self) -> float:
        """Wait for the model; how long the engine took to start, in seconds, without its imports."""
        return float(self.answer(START_WITHIN_S)["ready_s"])

    def begin(self, prompts: list[list[int]], tokens: int, temperature: float = 0.0) -> None:
        """Send requests, and do not wait."""
        assert self._process.stdin is not None
        request = {"prompts": prompts, "tokens": tokens, "temperature": temperature}
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self, within_s: float = ANSWER_WITHIN_S) -> dict[str, Any]:
        """What the engine answers next."""
        assert select.select([self._answers], [], [], within_s)[0], f"no answer in {within_s} s; see {self.log}"
        line = self._answers.readline()
        assert line, f"the engine ended; see {self.log}\n{self.log.read_text()[-3000:]}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def generate(self, prompts: list[list[int]], tokens: int, temperature: float = 0.0) -> dict[str, Any]:
        """Send requests and wait for all of their tokens."""
        self.begin(prompts, tokens, temperature)
        return self.answer()

    # ── looking from outside ─────────────────────────────────────────────────────────────────────
    def pids(self) -> list[int]:
        """Its processes: the front end, the engine core, the workers, and what Python starts beside them."""
        found, todo = [], [self._process.pid]
        while todo:
            pid = todo.pop()
            found.append(pid)
            try:
                tasks = list(Path(f"/proc/{pid}/task").iterdir())
                todo += [int(child) for task in tasks for child in (task / "children").read_text().split()]
            except OSError:
                continue
        self._known.update(found)
        return found

    def cpu_s(self) -> float:
        """User and system time of all its processes so far."""
        return sum(cpu_seconds(pid) for pid in self.pids() if process_state(pid) != "X")

    def memory(self) -> Memory:
        """Its shared memory: segments in /dev/shm and memfds that its processes hold, and its run directory."""
        paths = [path for path in self.run_dir.rglob("*") if path.is_file()]
        for pid in self.pids():
            for path in _descriptors(pid):
                leads_to = _target(path)
                if leads_to.startswith(SEGMENTS):
                    self._segments.add(Path(leads_to).name)
                if leads_to.startswith((SEGMENTS, "/memfd:arena")):
                    paths.append(path)
        seen = {(status.st_dev, status.st_ino): status for status in map(os.stat, paths)}
        return Memory(
            sum(status.st_size for status in seen.values()), sum(status.st_blocks * 512 for status in seen.values())
        )

    def left_in_shm(self) -> list[str]:
        """Segments that its processes held at the last look at its memory, and that are still there."""
        return sorted(name for name in self._segments if Path("/dev/shm", name).exists())

    def kill(self) -> None:
        """SIGKILL to the front end and the engine core, which leaves the workers to themselves."""
        workers = {pid for pid in self.pids() if "Worker" in _title(pid)}
        for pid in set(self.pids()) - workers:
            if "resource_tracker" not in _title(pid):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()

    def alive(self) -> list[int]:
        """Which of its processes are left."""
        return [pid for pid in sorted(self._known) if process_state(pid) not in "XZ"]

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.memory()
        for pid in self.alive():
            os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._answers.close()
        for name in self.left_in_shm():
            Path("/dev/shm", name).unlink()
        shutil.rmtree(self.run_dir, ignore_errors=True)


def eventually(condition: Any, what: str, within_s: float = 60.0) -> Any:
    """Wait until `condition()` is true, and return its value."""
    deadline = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        time.sleep(0.2)
    return value


def _descriptors(pid: int) -> list[Path]:
    try:
        return list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return []


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
