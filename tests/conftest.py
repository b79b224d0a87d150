"""What every test may use."""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fleet import Fleet, Worker
from tests.support.ranks import group

# pytest-xdist tells its workers the size of a terminal that they do not have; the commands they start are to see none.
for _size in ("COLUMNS", "LINES"):
    os.environ.pop(_size, None)


@pytest.fixture(autouse=True)
def torch_on_one_thread() -> None:
    """Once torch has worked on several threads, a forked child that does so too waits for them for ever."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


@pytest.fixture
def run_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run directory for this test alone, for its child processes too.

    Not under tmp_path: the path of a unix socket has to fit into 107 bytes, and tmp_path carries the test's name.
    """
    path = Path(tempfile.mkdtemp(prefix="arena-"))  # mode 0700, as arena asks of a run directory
    monkeypatch.setenv("ARENA_RUN_DIR", str(path))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def fleet(run_dir: Path) -> Iterator[Fleet]:
    """Starts workers in the test's run directory, and ends them with the test."""
    with Fleet() as workers:
        yield workers


def require_program(name: str) -> str:
    """Return the path of a system program; without it the test is skipped, and on CI it fails."""
    path = shutil.which(name)
    if path is None:
        reason = f"the program {name!r} is not installed"
        if os.environ.get("ARENA_CI") == "1":
            pytest.fail(f"{reason}; .ci/run has to install it")
        pytest.skip(reason)
    return path


@pytest.fixture
def two(run_dir: Path, tmp_path: Path) -> Iterator[list[Worker]]:
    """Two workers, joined in one process group."""
    with group(2, tmp_path / "store") as workers:
        yield workers


@pytest.fixture
def three(run_dir: Path, tmp_path: Path) -> Iterator[list[Worker]]:
    """Three workers, joined in one process group."""
    with group(3, tmp_path / "store") as workers:
        yield workers
