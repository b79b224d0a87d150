"""The root of the `arena` command works whatever else is installed."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parent.parent


def arena(*arguments: str, before: str = "pass") -> subprocess.CompletedProcess[str]:
    program = f"import sys; {before}; from telemetry.cli import main; sys.argv[0] = 'arena'; main()"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False, cwd=ROOT
    )


def without(module: str) -> str:
    return f"sys.modules[{module!r}] = None"


def with_part(name: str, source: str) -> str:
    """Stand a module of telemetry.commands in for the real one."""
    lines = f"import types; part = types.ModuleType({name!r}); exec({source!r}, part.__dict__)"
    return f"{lines}; sys.modules['telemetry.commands.{name}'] = part"


def test_version_is_that_of_the_distribution():
    shown = arena("--version")
    assert shown.stdout == f"arena {version('arena-dataplane')}\n", shown.stderr


def test_help_names_every_part_and_loads_none():
    loads = "import atexit; atexit.register(lambda: print(*(m for m in sys.modules if m.startswith('telemetry.'))))"
    shown = arena("--help", before=loads)
    assert shown.returncode == 0, shown.stderr
    *text, loaded = shown.stdout.splitlines()
    assert loaded.split() == ["telemetry.cli"]
    for name in ("demo", "bench", "gc"):
        assert any(name in line.split() for line in text)


def test_arguments_reach_the_part_unread():
    source = "import typer\ndef demo(first: str, second: int = 0, help_me: bool = False): print(first, second, help_me)"
    ran = arena("demo", "--second=7", "one", "--help-me", before=with_part("demo", source))
    assert ran.stdout == "one 7 True\n", ran.stderr


def test_help_of_a_part_comes_from_the_part():
    source = "import typer\ndef demo():\n  'Only this part says so.'"
    ran = arena("demo", "--help", before=with_part("demo", source))
    assert "Only this part says so." in ran.stdout, ran.stderr
    assert "arena demo" in ran.stdout


def test_exit_code_of_a_part_is_that_of_the_command():
    source = "import typer\ndef demo(): raise typer.Exit(3)"
    assert arena("demo", before=with_part("demo", source)).returncode == 3


def test_a_bare_install_says_which_extra_to_install():
    refused = arena("--help", before=without("typer"))
    assert refused.returncode == 1
    assert refused.stderr == "arena: this needs typer; run: pip install 'arena-dataplane[telemetry]'\n"


def test_a_part_without_its_extra_says_which_one_to_install():
    source = "import typer\ndef demo():\n  import zmq"
    refused = arena("demo", before=f"{without('zmq')}; {with_part('demo', source)}")
    assert refused.returncode == 1
    assert refused.stderr == "arena: this needs pyzmq; run: pip install 'arena-dataplane[remote]'\n"


def test_a_demo_of_photographs_without_pillow_names_it_and_starts_nothing(run_dir, tmp_path):
    refused = arena("demo", "--images", str(tmp_path), before=without("PIL"))
    assert refused.returncode == 1
    assert refused.stderr == "arena: this needs Pillow; run: pip install 'arena-dataplane[images]'\n"


def test_a_missing_module_of_our_own_stays_an_error():
    source = "import typer\ndef demo():\n  import arena_lost_this"
    assert "ModuleNotFoundError" in arena("demo", before=with_part("demo", source)).stderr


def test_gc_says_when_there_is_nothing_to_remove(run_dir):
    ran = arena("gc")
    assert ran.stdout == "nothing to remove\n", ran.stderr


def test_gc_makes_no_directory_of_one_that_does_not_exist(run_dir, monkeypatch):
    missing = run_dir / "missing"
    given = arena("gc", "--run-dir", str(missing))
    monkeypatch.setenv("ARENA_RUN_DIR", str(missing))
    for ran in (given, arena("gc")):
        assert (ran.returncode, ran.stdout) == (1, "")
        assert ran.stderr == f"arena gc: {missing} does not exist\n"
    assert not missing.exists()


def test_gc_makes_no_directory_of_a_default_that_does_not_exist(run_dir, monkeypatch):
    monkeypatch.delenv("ARENA_RUN_DIR")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(run_dir))
    ran = arena("gc")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "nothing to remove\n", "")
    assert list(run_dir.iterdir()) == []


def test_gc_refuses_a_file_in_one_line(run_dir):
    (run_dir / "file").touch()
    ran = arena("gc", "--run-dir", str(run_dir / "file"))
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (1, "", 1)
    assert ran.stderr.startswith(f"arena gc: refusing {run_dir}/file as run directory")
