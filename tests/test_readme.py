"""README's commands are the ones that work, and the ones that CI runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from arena import state

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()

DEMO = "python3 -m venv .venv && .venv/bin/pip install '.[telemetry]' && .venv/bin/arena demo"
TEST = (
    "python3 -m venv .venv && .venv/bin/pip install -e '.[test]' && .venv/bin/python -m pytest -n auto --dist loadfile"
)


def fenced_blocks(markdown: str) -> list[str]:
    return re.findall(r"^```\w*\n(.*?)^```$", markdown, re.MULTILINE | re.DOTALL)


def quick_start() -> str:
    section = re.search(r"^## Quick start\n(.*?)(?=^## |\Z)", README, re.MULTILINE | re.DOTALL)
    assert section, "README has no Quick start"
    return section.group(1)


def test_the_quick_start_is_the_demo_and_the_tests():
    assert fenced_blocks(quick_start()) == [f"{DEMO}\n", f"{TEST}\n"]


def test_ci_runs_the_marked_command():
    assert f"<!-- test command -->\n```bash\n{TEST}\n```" in quick_start()
    shown = subprocess.run(
        ["bash", ROOT / ".ci/run", "print-test-command"], capture_output=True, text=True, check=True, cwd="/"
    )
    assert shown.stdout == f"{TEST}\n"


def test_ci_refuses_a_readme_whose_command_it_cannot_tell(tmp_path):
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci/run").write_bytes((ROOT / ".ci/run").read_bytes())
    marked = f"<!-- test command -->\n```bash\n{TEST}\n```\n"
    for readme in ("no marker\n", marked + marked, marked.replace("-->\n", "-->\nprose\n")):
        (tmp_path / "README.md").write_text(readme)
        refused = subprocess.run(
            ["bash", tmp_path / ".ci/run", "print-test-command"], capture_output=True, text=True, check=False
        )
        assert refused.returncode == 1, readme
        assert "README.md needs one fenced block" in refused.stderr


def test_ci_is_executable():
    assert os.access(ROOT / ".ci/run", os.X_OK)


@pytest.mark.parametrize("machine", [state.Endpoint, state.Peer, state.Block, state.Message, state.Pin])
def test_the_state_diagrams_are_those_of_the_table_that_the_code_moves_by(machine):
    assert f"### {machine.__name__}\n\n```mermaid\n{state.diagram(machine)}\n```" in README


def test_the_table_of_rooms_names_every_module():
    rooms = README[README.index("| file | room |") : README.index("## API")]
    modules = {path.name for path in (ROOT / "arena").glob("*.py")} - {"__init__.py"}
    packages = {f"{path.parent.name}/" for path in (ROOT / "arena").glob("*/__init__.py")}
    assert {name for name in modules | packages if f"{name}`" not in rooms} == set()


def test_the_example_runs_as_it_stands(tmp_path, run_dir):
    example = re.search(r"<!-- example -->\n```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert example
    script = tmp_path / "example.py"
    script.write_text(example.group(1))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=False, timeout=100, env=environment
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.splitlines() == [f"worker 0: step {step}, {step * 1000000}" for step in range(3)]
    assert list(run_dir.iterdir()) == []
