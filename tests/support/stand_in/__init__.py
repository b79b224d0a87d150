"""vLLM's public names without vLLM, and processes that find them and Arena's plugin as a real engine's would."""

import logging
import multiprocessing
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent.parent
HERE = Path(__file__).parent


def entry_points() -> str:
    """The table of entry points that pyproject.toml gives the wheel, as an installed package has it."""
    table = re.search(r'^\[project\.entry-points\."(.+)"\]\n((?:.+\n)+)', (ROOT / "pyproject.toml").read_text(), re.M)
    assert table, "pyproject.toml has no entry points"
    return f"[{table[1]}]\n" + table[2].replace('"', "")


def install(place: Path) -> str:
    """Make a directory that looks like an installed Arena; what goes onto `sys.path`."""
    about = place / "arena_stand_in-0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: arena-stand-in\nVersion: 0\n")
    (about / "entry_points.txt").write_text(entry_points())
    return str(place)


def enter(place: str) -> "Told":
    """Have this process find the stand-in and the plugin; what is logged from now on."""
    assert "vllm" not in sys.modules, "this process has vLLM already"
    sys.path[:0] = [str(HERE), place]
    multiprocessing.current_process()._config["daemon"] = False  # an engine's process starts others
    return Told()


class Told(logging.Handler):
    """What the plugin wrote into vLLM's log."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        log = logging.getLogger("vllm.arena")
        log.setLevel(logging.INFO)
        log.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")
