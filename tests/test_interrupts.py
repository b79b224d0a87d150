"""Ctrl-C at a loop's end: whatever a `try` or a `with` is there to let go of, is let go of.

CPython delivers signals after calls and where a loop jumps back to its head. From 3.12 on its compiler makes two jumps
of a conditional one backwards, and the second of them is in no entry of the function's exception table: what is raised
there passes by each `finally`, `except` and `with` of that function (those of its callers see it). `test_crash.py`
found this on 3.13, as a queue whose lock nobody gave back.
"""

import ast
import dis
import random
import signal
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from arena import memory
from arena.held import HeldLock
from tests.support import processes

ARENA = Path(__file__).parent.parent / "arena"
HARMLESS = {
    "device/cuda/inbox.py:exchange": "while ranks set up, before anything is shared; the process ends with its inbox",
    "device/cuda/push.py:PushPath.connect": "while ranks set up, before anything is shared",
    "group.py:create_from_process_group": "catches only what is to be told to the other ranks",
    "integrations/vllm/__init__.py:_original": "catches only what an import may raise",
    "integrations/vllm/observer.py:_Observed._await_chunk": "leaves a memoryview, which goes with the frame",
    "memory.py:_available_bytes": "leaves a file, which goes with the frame",
    "memory.py:_cgroup_headrooms": "leaves a file, which goes with the frame",
    "plan.py:load": "catches only what a file may be wrong in",
    "probe/directory.py:_is_ours": "catches only what a directory may be wrong in",
    "remote/server.py:Server._tick": "the forwarder's, which no Ctrl-C reaches",
    "remote/server.py:Server._turn": "the forwarder's, which no Ctrl-C reaches",
    "remote/server.py:Server._wait_for_predecessor": "the forwarder's, which no Ctrl-C reaches",
    "remote/server.py:Server.serve": "the forwarder's, which no Ctrl-C reaches",
}
SIMPLE = (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Delete, ast.Return, ast.Raise, ast.Break)
LOOPS = (ast.For, ast.While)
OF_THEIR_OWN = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.GeneratorExp, ast.ClassDef)


# ── what the compiler made ───────────────────────────────────────────────────────────────────────
def functions(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from functions(constant)


def escapes(code: types.CodeType) -> set[int]:
    """Lines with a jump to a loop's head that a handler around that loop does not see."""
    table = dis._parse_exception_table(code)  # type: ignore[attr-defined]
    names = {each.offset: each.opname for each in dis.get_instructions(code)}
    found = set()
    for each in dis.get_instructions(code):
        if each.opname == "JUMP_BACKWARD":
            around = _around(table, each.argval) - _around(table, each.offset)
            handlers = around.union(*(_around(table, handler) for handler in around))
            if any(names[handler] == "PUSH_EXC_INFO" for handler in handlers - _around(table, each.offset)):
                found.add(each.positions.lineno)  # type: ignore[attr-defined]
    return found


def _around(table: list, offset: int) -> set[int]:
    return {entry.target for entry in table if entry.start <= offset < entry.end}


@pytest.mark.skipif(
    sys.version_info < (3, 12), reason="this compiler makes no such jumps; the test below reads the source"
)
def test_no_jump_of_the_compiler_s_leaves_a_handler_out():
    found = {}
    for path in sorted(ARENA.rglob("*.py")):
        for code in functions(compile(path.read_text(), str(path), "exec", dont_inherit=True)):
            if lines := escapes(code):
                found[f"{path.relative_to(ARENA)}:{code.co_qualname}"] = sorted(lines)  # type: ignore[attr-defined]
    assert {where: lines for where, lines in found.items() if where not in HARMLESS} == {}


# ── what the source says, for compilers that are not here ────────────────────────────────────────
def guards(node: ast.AST) -> bool:
    """Whether this must see every exception of its body: it holds a lock, or lets go of something at its end."""
    if isinstance(node, ast.With):
        return any(ast.unparse(item.context_expr).endswith("lock") for item in node.items)
    if isinstance(node, ast.Try):
        return bool(node.finalbody) or any(
            handler.type is None or ast.unparse(handler.type) == "BaseException" for handler in node.handlers
        )
    return False


def within(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Everything in these statements that the same function runs."""
    waiting: list[ast.AST] = list(body)
    while waiting:
        node = waiting.pop()
        if not isinstance(node, OF_THEIR_OWN):
            yield node
            waiting += ast.iter_child_nodes(node)


def may_jump_back_on_a_condition(node: ast.AST) -> bool:
    if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp):
        return any(part.ifs for part in node.generators)
    if isinstance(node, LOOPS):
        if isinstance(node, ast.While) and not isinstance(node.test, ast.Constant):
            return True
        return not isinstance(node.body[-1], SIMPLE) or any(isinstance(one, ast.Continue) for one in within(node.body))
    return False


def guarded_loops(source: str) -> Iterator[tuple[str, int]]:
    """Functions, and lines of loops in them."""
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef):
            for guard in within(function.body):
                if guards(guard):
                    for node in within(guard.body):  # type: ignore[attr-defined]
                        if may_jump_back_on_a_condition(node):
                            yield function.name, node.lineno  # type: ignore[attr-defined]


def test_no_loop_in_a_guard_ends_in_a_condition():
    found = set()
    for path in sorted(ARENA.rglob("*.py")):
        for name, line in guarded_loops(path.read_text()):
            found.add((path.relative_to(ARENA).as_posix(), name, line))
    harmless = {(where.split(":")[0], where.split(":")[1].split(".")[-1]) for where in HARMLESS}
    assert {loop for loop in found if loop[:2] not in harmless} == set()


@pytest.mark.parametrize(
    "loop",
    ["while not done: done = step()", "for one in many:\n  if one: step()", "kept = [one for one in many if one]"],
)
def test_such_loops_are_found(loop):
    body = loop.replace("\n", "\n   ")
    assert list(guarded_loops(f"def f(self):\n with self.lock:\n   {body}\n"))


# ── a lock of one's own ──────────────────────────────────────────────────────────────────────────
def storm(seconds: float) -> tuple[int, int]:
    """Ctrl-C at any moment of taking a lock and of a fence: how often, and how often the lock was held afterwards."""
    lock, armed, struck, held = HeldLock(), False, 0, 0

    def strike(*_: object) -> None:
        nonlocal armed, struck
        if armed:
            armed = False
            struck += 1
            raise KeyboardInterrupt

    def hold() -> None:
        with lock:
            memory.fence()

    signal.signal(signal.SIGALRM, strike)
    moments, ends = random.Random(1), time.monotonic() + seconds
    while time.monotonic() < ends:
        try:
            armed = True
            signal.setitimer(signal.ITIMER_REAL, moments.uniform(1e-6, 1e-4))
            for _ in range(200):
                hold()
        except KeyboardInterrupt:
            pass
        armed = False
        while lock._is_owned():
            held += 1
            lock.release()
    return struck, held


def test_a_lock_is_not_left_behind_and_a_fence_waits_for_nobody():
    struck, held = processes.run(storm, 1.5)
    assert struck > 100
    assert held == 0


def test_a_held_lock_may_be_taken_again_by_its_thread_and_by_no_other():
    lock = HeldLock()
    with lock:
        with lock:
            pass
        assert lock._is_owned()
    assert not lock._is_owned()
