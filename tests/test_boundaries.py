"""The rules that hold the halves apart, and the checkers that hold the rest."""

import ast
import io
import re
import subprocess
import sys
import tokenize
import zipfile
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ARENA_FILES = sorted((ROOT / "arena").rglob("*.py"))


def run_python(*arguments: str) -> None:
    """Run this interpreter in the repository root; what it printed is the message of a failure."""
    ran = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert ran.returncode == 0, f"{' '.join(arguments)} exited with {ran.returncode}\n{ran.stdout}"


def test_ruff_finds_nothing():
    run_python("-m", "ruff", "check", ".")


def test_ruff_would_format_nothing():
    run_python("-m", "ruff", "format", "--check", ".")


@pytest.mark.timeout(600)  # without a cache it reads all of torch
def test_every_type_checks():
    run_python("-m", "mypy", "--strict", "arena", "telemetry")


def test_every_import_goes_down_a_layer():
    run_python("-c", "from importlinter.cli import lint_imports_command; lint_imports_command(['--no-cache'])")


def test_importing_arena_loads_nothing_heavy():
    heavy = {"torch", "telemetry", "prometheus_client", "opentelemetry", "rich", "typer", "triton", "cuda", "zmq"}
    run_python(
        "-c", f"import arena, sys; loaded = {heavy} & sys.modules.keys(); sys.exit(f'{{loaded}}' if loaded else 0)"
    )


def imported_modules(source: str) -> set[str]:
    """Top-level names of what a source imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names


def test_arena_does_not_log():
    assert ARENA_FILES
    assert [path.name for path in ARENA_FILES if "logging" in imported_modules(path.read_text())] == []


def test_the_wheel_holds_the_two_packages_and_nothing_else(tmp_path):
    run_python("-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path))
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    (metadata,) = {name.partition("/")[0] for name in names} - {"arena", "telemetry"}
    assert re.fullmatch(r"arena_dataplane-[\d.]+\.dist-info", metadata)
    assert {"arena/__init__.py", "arena/py.typed", "telemetry/__init__.py", "telemetry/py.typed"} <= set(names)
    assert [name for name in names if Path(name).name.startswith(".")] == []


SYNC_POINT = re.compile(r"# SYNC POINT (?P<label>[a-z0-9-]+) \((?P<end>publish|observe)\)")


def sync_point_faults(sources: dict[str, str]) -> list[str]:
    """Name every SYNC POINT comment that is malformed, and every label that lacks one of its two ends."""
    faults = []
    ends_of_label = defaultdict(set)
    for name, source in sources.items():
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type != tokenize.COMMENT or "SYNC POINT" not in token.string:
                continue
            if point := SYNC_POINT.match(token.string):
                ends_of_label[point["label"]].add(point["end"])
            else:
                faults.append(
                    f"{name}:{token.start[0]}: {token.string!r} is not '# SYNC POINT label (publish|observe)'"
                )
    for label, ends in sorted(ends_of_label.items()):
        faults += [f"{label}: no {end} end anywhere" for end in sorted({"publish", "observe"} - ends)]
    return faults


def test_every_ordering_names_both_its_ends():
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in ARENA_FILES}
    assert any("SYNC POINT" in source for source in sources.values())
    assert sync_point_faults(sources) == []


@pytest.mark.parametrize(
    ("sources", "faults"),
    [
        (["store()  # SYNC POINT a (publish)", "load()  # SYNC POINT a (observe): pairs with the store"], []),
        (
            ["# SYNC POINT a (publish)\n# SYNC POINT b (observe)"],
            ["a: no observe end anywhere", "b: no publish end anywhere"],
        ),
        (["# SYNC POINT a"], ["0:1: '# SYNC POINT a' is not '# SYNC POINT label (publish|observe)'"]),
        (["'''SYNC POINT in prose'''"], []),
    ],
)
def test_an_unpaired_ordering_is_found(sources, faults):
    assert sync_point_faults({str(number): source for number, source in enumerate(sources)}) == faults
