"""`arena doctor` explains a stall so that its reader can act, and is a health probe that always answers."""

import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from arena import MessageQueue, QueueConfig
from telemetry.commands.doctor import gpu, kernel, stacks
from telemetry.commands.doctor.checks import Check, Level, of_machine
from telemetry.commands.doctor.gpu import Gpus
from telemetry.monitor.facts import ArenaFacts
from tests.support.fleet import Fleet, Worker, attach, beat, create, enqueue, eventually, hold_the_gil
from tests.support.moments import moment, queue, reader
from tests.support.terminal import ARENA, ROOT, Terminal
from tests.support.traffic import take

HEALTHY, DEGRADED, STALLED, COULD_NOT_LOOK = range(4)
PYTHON = sys.executable


def doctor(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*ARENA, "doctor", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=60,
        env=os.environ | environment,
    )


def full_ring(fleet: Fleet, name: str = "steps") -> tuple[Worker, list[Worker]]:
    """Two readers that take nothing yet, and a writer that is about to wait for them."""
    writer, readers = fleet.start(), [fleet.start(), fleet.start()]
    handle = writer.call(create, 2, name=name, slots=4, on_reader_death="continue")
    for rank, worker in enumerate(readers):
        worker.call(attach, handle, rank)
    return writer, readers


# --- what it says of a queue -----------------------------------------------------------------------------------------


def test_a_frozen_reader_is_named_with_since_when_and_what_to_try(fleet):
    writer, (first, second) = full_ring(fleet)
    first.begin(take)
    second.freeze()
    writer.begin(enqueue, *range(9))
    eventually(lambda: doctor("--quiet").returncode == STALLED, every=0.1)
    ran = doctor()
    assert ran.returncode == STALLED
    said = ran.stdout
    assert said.splitlines()[0].startswith("STALLED: BLOCKED ")
    assert f"by reader 1 (pid {second.pid}): STOPPED by a signal" in said.splitlines()[0]
    assert f"The writer (pid {writer.pid}) has waited for a slot since " in said
    assert "awaiting_readers: reader 1 (" in said
    assert "already_read: reader 0 (" in said
    assert "4 of 4 slots behind" in said
    assert f"try: kill -CONT {second.pid}, or detach the debugger" in said
    second.thaw()
    second.begin(take)
    eventually(lambda: doctor("--quiet").returncode == HEALTHY, every=0.1)


def test_a_reader_that_holds_the_gil_is_stalled_and_one_with_heartbeats_is_working(fleet):
    writer, (first, second) = full_ring(fleet)
    first.begin(take)
    holding = second.begin(hold_the_gil, 4)
    writer.begin(enqueue, *range(9))
    report = eventually(
        lambda: (found := json.loads(doctor("--json").stdout)) and found["exit_code"] == STALLED and found, every=0.1
    )
    (explained,) = report["queues"]
    assert f"reader 1 (pid {second.pid}): STALLED in its own code" in explained["verdict"]
    assert any(f"py-spy dump --pid {second.pid}: it is between two dequeues" in one for one in explained["try"])
    assert list(explained["stacks"]) == [str(second.pid)]
    holding.result()
    second.begin(beat, 20.0)
    report = eventually(
        lambda: (
            (found := json.loads(doctor("--json").stdout)) and "STALLED" not in found["queues"][0]["verdict"] and found
        )
    )
    assert "last sign of life" in report["queues"][0]["verdict"], "busy, and not hung"


def test_a_killed_reader_is_degraded_while_the_queue_goes_on(fleet):
    _, (first, second) = full_ring(fleet)
    first.begin(take)
    second.kill()
    ran = doctor()
    assert ran.returncode == DEGRADED
    assert f"DEGRADED: GONE: reader 1 (pid {second.pid}) has ended without leaving" in ran.stdout
    assert "restart worker 1" in ran.stdout


def test_a_killed_writer_leaves_readers_that_are_told_of_and_a_dead_queue_is_history(fleet, run_dir):
    writer, readers = full_ring(fleet)
    writer.kill()
    ran = doctor()
    assert ran.returncode == STALLED
    assert f"ORPHANED: the writer (pid {writer.pid}) has ended, and 2 readers live" in ran.stdout
    for worker in readers:
        worker.kill()
    ran = doctor()
    assert (ran.returncode, "`arena gc` removes what it left" in ran.stdout) == (HEALTHY, True)
    assert ran.stdout.startswith("HEALTHY: no queue is alive, and nobody waits; the last process ended ")
    with MessageQueue(1, config=QueueConfig(name="another")):
        assert doctor().stdout.startswith("HEALTHY: 1 queue, 0 readers, no writer waits · 1 dead queue left behind\n")
    subprocess.run([*ARENA, "gc"], check=True, cwd=ROOT, capture_output=True)
    assert doctor("--quiet").returncode == HEALTHY


def test_a_queue_that_forms_is_healthy_and_says_who_is_missing(run_dir):
    with MessageQueue(2, config=QueueConfig(name="steps")):
        ran = doctor()
    assert ran.returncode == HEALTHY
    assert "FORMING: 2 of 2 readers are not attached" in ran.stdout
    assert "Not attached: readers 0, 1" in ran.stdout


def test_without_a_queue_it_is_healthy_and_checks_the_machine(run_dir):
    ran = doctor()
    assert (ran.returncode, ran.stderr) == (HEALTHY, "")
    assert f"There is no queue in {run_dir}" in ran.stdout
    for name in ("run directory", "memfd", "futex", "pidfd", "MADV_COLLAPSE", "memory", "memlock", "CPUs", "NUMA"):
        assert name in ran.stdout
    assert "\x1b" not in ran.stdout


# --- as a probe ------------------------------------------------------------------------------------------------------


def test_quiet_says_nothing_whatever_it_finds(fleet, run_dir):
    writer, _ = full_ring(fleet)
    writer.freeze()
    assert [doctor("--quiet").returncode, doctor("--quiet").stdout] == [STALLED, ""]
    ran = doctor("--quiet", "--queue", "nothing")
    assert (ran.returncode, ran.stdout, ran.stderr) == (COULD_NOT_LOOK, "", "")


def test_what_it_can_not_look_at_is_one_line_and_its_own_code(run_dir):
    with MessageQueue(1, config=QueueConfig(name="steps")):
        ran = doctor("--queue", "stepz")
        assert (ran.returncode, ran.stdout) == (COULD_NOT_LOOK, "")
        assert ran.stderr == f"arena doctor: no queue 'stepz' in {run_dir}; did you mean 'steps'?\n"
        run_dir.chmod(0o777)
        ran = doctor()
        run_dir.chmod(0o700)
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (COULD_NOT_LOOK, "", 1)
    assert "ARENA_RUN_DIR" in ran.stderr


def test_a_page_that_can_not_be_read_is_degraded_and_told(run_dir):
    with MessageQueue(1, config=QueueConfig(name="steps")):
        (directory,) = run_dir.glob("steps@*")
        (directory / "reader-0-1-x").write_bytes(b"x" * 9000)
        ran = doctor()
    assert ran.returncode == DEGRADED
    assert "not read: " in ran.stdout and "reader-0-1-x" in ran.stdout


def test_on_a_terminal_it_has_colours_and_takes_nothing_over(run_dir):
    with Terminal("doctor", columns=100) as terminal:
        assert terminal.end() == HEALTHY
        assert "HEALTHY" in terminal.text
        assert b"\x1b[32m" in terminal.raw or b"\x1b[1;32m" in terminal.raw
        assert b"\x1b[?1049h" not in terminal.raw
        assert terminal.is_restored()


# --- stacks ----------------------------------------------------------------------------------------------------------


def program(path: Path, text: str) -> None:
    path.write_text(f"#!{PYTHON}\n{text}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def path_alone(tmp_path, monkeypatch):
    """No py-spy but the one that a test puts here."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(stacks.sys, "executable", str(tmp_path / "python"))
    return tmp_path


def test_without_py_spy_it_says_how_to_get_it(path_alone):
    assert "pip install py-spy" in stacks.stack_of(1)[0]


def test_a_py_spy_that_hangs_is_given_up_and_one_that_may_not_look_is_quoted(path_alone, monkeypatch):
    program(path_alone / "py-spy", "import time; time.sleep(60)")
    monkeypatch.setattr(stacks, "DEADLINE_S", 0.5)
    assert stacks.stack_of(1) == ["py-spy did not answer within 0.5 s"]
    monkeypatch.setattr(stacks, "DEADLINE_S", 20.0)
    program(
        path_alone / "py-spy",
        "import sys; print('Error: x\\nPermission Denied: use sudo', file=sys.stderr); sys.exit(1)",
    )
    assert stacks.stack_of(1) == ["py-spy can't look: Permission Denied: use sudo"]


def _seen(stack: list[str], name: str) -> list[str]:
    """The stack once it has come that far, or the reason why there is none."""
    return stack if any(name in line for line in stack) or stack[0].startswith("py-spy") else []


def test_the_culprits_stack_names_the_function_it_stands_in(fleet):
    worker = fleet.start()
    worker.begin(hold_the_gil, 20)
    stack = eventually(lambda: _seen(stacks.stack_of(worker.pid), "hold_the_gil"))
    if stack[0].startswith("py-spy"):
        pytest.skip(stack[0])
    assert any("hold_the_gil" in line for line in stack)


# --- the machine -----------------------------------------------------------------------------------------------------


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_the_machine_that_runs_these_tests_has_what_is_needed(run_dir):
    checks = by_name(of_machine(moment()))
    assert not [check for check in checks.values() if check.failed and check.name != "run directory"]
    assert checks["memfd, sealed"].level is checks["futex"].level is Level.OK
    assert all(check.found for check in checks.values())
    assert all(check.todo for check in checks.values() if check.level in (Level.NOTE, Level.FAILED))


def test_a_processes_of_another_pid_namespace_is_told(run_dir):
    there = queue(readers=(reader(0, process="", alive=None),))
    check = by_name(of_machine(moment(there)))["descriptors over a socket, pid namespace"]
    assert (check.level, "1 of 2 processes" in check.found) == (Level.NOTE, True)


def test_a_memlock_limit_is_read_against_what_the_arena_may_grow_to(run_dir):
    huge = queue(arena=ArenaFacts(budget=1 << 60))
    check = by_name(of_machine(moment(huge)))["memlock limit"]
    assert check.level is Level.OK or check.needed.startswith("1153 PB")


def test_the_quota_is_the_tightest_on_the_way_up(tmp_path):
    own = next(
        (line.split(":", 2)[2] for line in Path("/proc/self/cgroup").read_text().split() if line[:3] == "0::"), "/"
    )
    deepest = tmp_path / own.strip("/")
    deepest.mkdir(parents=True, exist_ok=True)
    assert kernel.cpu_quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert kernel.cpu_quota(tmp_path) == 1.5
    (deepest / "cpu.max").write_text("max 100000\n" if deepest != tmp_path else "150000 100000\n")
    assert kernel.cpu_quota(tmp_path) == 1.5


def test_a_gpu_that_does_not_answer_is_left_behind(monkeypatch):
    monkeypatch.setattr(gpu, "_PROGRAM", "import time; time.sleep(60)")
    monkeypatch.setattr(gpu, "_DEVICE_FILES", ("/",))
    began = time.monotonic()
    (check,) = Gpus().checks(began + 0.3)
    assert (check.level, check.todo) == (Level.NOT_CHECKED, "--patience 60 waits longer")
    assert time.monotonic() - began < 10


def test_what_gpus_answer_is_told():
    device = {"name": "H", "bytes": 1, "capability": [9, 0], "multicast": True, "node": 1}
    found = {"available": True, "devices": [device, device], "peers": [[0, 1, True], [1, 0, False]]}
    cuda, peers, multicast = gpu.of_answer("noise\nARENA" + json.dumps(found), "")
    assert cuda.found == "0: H (9.0, NUMA node 1); 1: H (9.0, NUMA node 1)"
    assert (peers.level, peers.found) == (Level.NOTE, "not between 1-0")
    assert multicast.found == "all 2 devices"
    (broken,) = gpu.of_answer("", "Traceback\nImportError: libcuda.so.1")
    assert broken.found == "torch can't ask: ImportError: libcuda.so.1"
    (unusable,) = gpu.of_answer('ARENA{"available": false, "devices": [], "peers": []}', "")
    assert unusable.level is Level.NOTE
