"""Feeds a parser cases for as long as it is told to, in a process of its own that may crash, hang or run out of memory.

    python -m tests.fuzz.run --parser frame --cases 5000000
    python -m tests.fuzz.run --all --seconds 30
    python -m tests.fuzz.run --parser plan --seconds 120 --engine atheris --keep
    python -m tests.fuzz.run --report runs.jsonl

A case is one of the corpus, changed in a few places (`mutate.py`). Inputs with an outcome that had not been seen join
the corpus, in memory, and with --keep in `corpus/`, where later runs begin. Each case is written down before it is
tried, so that one that ends the process is known; it is told, with --keep kept as `corpus/PARSER/found-*`, and the run
fails. What is raised where nobody can catch it (a callback, a destructor, a thread) is a finding, too, and so are
descriptors that are left open.

With `--engine atheris` (which has to be installed) libFuzzer chooses the cases, by the lines of `arena` that they
reach, out of its mutations and ours. Each run is a line of JSON; --report makes a table of such lines.
"""

import argparse
import contextlib
import faulthandler
import hashlib
import json
import mmap
import os
import random
import resource
import select
import signal
import struct
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
NAMES = (
    *("frame", "frame-restricted", "header", "table", "spec", "fragment", "hold", "control", "ring", "board"),
    *("hello", "answer", "meeting", "round", "handle", "handle-vllm", "forwarder", "inlet", "report"),
    *("page", "owner", "plan"),
)
HANG_S = 20
ROOM_BYTES = 2 << 30
ROOMS = {"round": 256 << 20}  # a pickle can make CPython fill gigabytes with one opcode, and takes seconds to
MOST_OUTCOMES = 400
MOST_KEPT_BYTES = 4096
LEFT_OPEN = 16
_HEAD = struct.Struct("=QQ")


def corpus_of(parser: str) -> list[bytes]:
    """What was kept of earlier runs."""
    return [path.read_bytes() for path in sorted((CORPUS / parser).glob("*")) if path.is_file()]


def limit_memory(room: int) -> None:
    """A damaged length must not take the host's memory: an allocation beyond this fails."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + room, used + room))


# ── what nobody catches ──────────────────────────────────────────────────────────────────────────
OF_CPYTHON = "deallocated bytearray object has exported buffers"
"""CPython's own, and harmless: up to 3.13 at least, a bytearray that there is no memory for is taken apart before its
count of exports was set (`PyByteArray_FromStringAndSize`), and reads whatever lay there. ``bytearray(b"x") * 2**60``
does it; so does a pickle that announces one of 2**60 bytes. Nothing was exported, and a MemoryError follows."""

_unheard: list[str] = []


def listen() -> None:
    """Hear of what is raised where it can't be caught."""

    def hear(kind: type, error: object, *_: object) -> None:
        if str(error) != OF_CPYTHON:
            _unheard.append("".join(traceback.format_exception(error))[-2000:])

    sys.excepthook = hear  # what PyErr_Print calls
    sys.unraisablehook = lambda told: hear(told.exc_type, told.exc_value)
    threading.excepthook = lambda told: hear(told.exc_type, told.exc_value)


def check_unheard() -> None:
    """Raise it here."""
    if _unheard:
        raise RuntimeError(f"raised where nobody catches it: {_unheard}")


def open_files() -> int:
    """How many descriptors this process has."""
    return len(os.listdir("/proc/self/fd"))


# ── the child ────────────────────────────────────────────────────────────────────────────────────
class Session:
    """One parser in this process: tries cases, and remembers what came out."""

    def __init__(self, parser: str, run: Callable[[bytes], str], corpus: list[bytes], note: mmap.mmap, keep: bool):
        self.parser, self.corpus = parser, corpus
        self.number = 0
        self.outcomes: Counter[str] = Counter()
        self._run, self._note, self._keep = run, note, keep
        self._files = 0
        for case in [*corpus, b""]:
            self.outcomes[run(case)] += 1

    def attempt(self, data: bytes) -> None:
        """One case."""
        note = self._note
        note[_HEAD.size : _HEAD.size + len(data)] = data
        note[: _HEAD.size] = _HEAD.pack(self.number, len(data))
        if self.number % 4096 == 256:
            self._look_around()
        outcome = self._run(data)
        if _unheard:
            check_unheard()
        if outcome not in self.outcomes and len(self.outcomes) < MOST_OUTCOMES:
            self.corpus.append(data)
            if self._keep and len(data) <= MOST_KEPT_BYTES:
                write_case(self.parser, data)
        self.outcomes[outcome] += 1
        self.number += 1

    def _look_around(self) -> None:
        files = open_files()
        self._files = self._files or files
        if files > self._files + LEFT_OPEN:
            raise RuntimeError(f"{files} descriptors are open, and there were {self._files}")

    def told(self) -> bytes:
        """What the parent is to know."""
        most = self.outcomes.most_common(6)
        return json.dumps({"cases": self.number, "outcomes": len(self.outcomes), "most": most}).encode()


def work(parser: str, cases: int, seconds: float, seed: int, note: mmap.mmap, keep: bool, told: int) -> None:
    """The child: all cases, each noted before it is tried."""
    from tests.fuzz.common import prepare
    from tests.fuzz.mutate import mutated
    from tests.fuzz.parsers import IN_PLACE, PARSERS

    prepare()
    seeds, opened = PARSERS[parser]
    corpus = [*seeds(), *corpus_of(parser)]
    chance = random.Random(seed)
    limit_memory(ROOMS.get(parser, ROOM_BYTES))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    listen()
    with opened() as run:
        session = Session(parser, run, corpus, note, keep)
        ends = time.monotonic() + seconds
        while session.number < cases and (session.number % 64 or time.monotonic() < ends):
            attempt(session, mutated(chance, corpus, in_place=parser in IN_PLACE), told)
    check_unheard()
    os.write(told, session.told())


def attempt(session: Session, data: bytes, told: int) -> None:
    """One case; whatever it raises ends the process, and is told."""
    try:
        session.attempt(data)
    except BaseException:
        os.write(told, json.dumps({"raised": traceback.format_exc()[-3000:]}).encode())
        os._exit(3)


def work_with_atheris(
    parser: str, cases: int, seconds: float, seed: int, note: mmap.mmap, keep: bool, told: int
) -> None:
    """The same with libFuzzer's choice of cases. Does not return: libFuzzer would go on for ever."""
    import atheris

    from tests.fuzz.common import prepare
    from tests.fuzz.mutate import mutated
    from tests.fuzz.parsers import IN_PLACE, PARSERS

    prepare()
    seeds, opened = PARSERS[parser]
    corpus = [*seeds(), *corpus_of(parser)]
    listen()
    stack = contextlib.ExitStack()
    session = Session(parser, stack.enter_context(opened()), corpus, note, keep)
    ends = time.monotonic() + seconds

    def test(data: bytes) -> None:
        attempt(session, data, told)
        if session.number >= cases or (session.number % 64 == 0 and time.monotonic() >= ends):
            os.write(told, session.told())
            os._exit(0)

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        chance = random.Random(seed)
        if chance.random() < 0.5:
            return atheris.Mutate(data, most)
        return mutated(chance, [bytes(data) or b"\0"], in_place=parser in IN_PLACE)[:most]

    place = Path("corpus")
    place.mkdir()
    for number, case in enumerate(corpus):
        (place / f"seed-{number}").write_bytes(case)
    ours = [
        f"-handle_{name}=0" for name in ("segv", "bus", "abrt", "ill", "fpe", "int", "term", "xfsz", "usr1", "usr2")
    ]
    longest = max(MOST_KEPT_BYTES, *map(len, corpus))
    options = [f"-seed={seed}", f"-max_len={longest}", "-rss_limit_mb=0", "-timeout=0", "-verbosity=0", *ours]
    atheris.Setup(["fuzz", *options, str(place)], test, custom_mutator=mutate)
    limit_memory(ROOMS.get(parser, ROOM_BYTES))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    atheris.Fuzz()


def write_case(parser: str, data: bytes, prefix: str = "") -> Path:
    """Keep a case."""
    path = CORPUS / parser / f"{prefix}{hashlib.sha1(data, usedforsecurity=False).hexdigest()[:12]}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


# ── the parent ───────────────────────────────────────────────────────────────────────────────────
ENGINES = {"random": work, "atheris": work_with_atheris}


def load_parsers(engine: str) -> None:
    """Once, before a child is forked: torch takes seconds to load. For atheris, arena with counters in it."""
    if engine == "atheris":
        import atheris

        with atheris.instrument_imports(include=["arena"]):
            import tests.fuzz.parsers
    import tests.fuzz.parsers  # noqa: F401


def fuzz(parser: str, cases: int, seconds: float, seed: int, *, keep: bool = False, engine: str = "random") -> dict:
    """One run in a child; what it did, or what it died of."""
    load_parsers(engine)
    note = mmap.mmap(-1, 1 << 20)
    told, tell = os.pipe()
    began, used = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    child = os.fork()
    if child == 0:
        status = 4
        try:
            os.close(told)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            faulthandler.enable()
            with tempfile.TemporaryDirectory(prefix="arena-fuzz-", dir="/dev/shm") as place:
                os.environ["ARENA_RUN_DIR"] = place
                os.chdir(place)
                ENGINES[engine](parser, cases, seconds, seed, note, keep, tell)
            status = 0
        except BaseException:
            os.write(tell, json.dumps({"raised": traceback.format_exc()[-3000:]}).encode())
        finally:
            os._exit(status)
    os.close(tell)
    watch(child, told, note)
    with open(told, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    number, length = _HEAD.unpack(note[: _HEAD.size])
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    outcome = {"parser": parser, "engine": engine, "seed": seed, "seconds": round(time.monotonic() - began, 1)}
    outcome["cpu_s"] = round(cpu_s, 1)
    if status == 0 and said:
        return outcome | json.loads(said) | {"found": ""}
    case = bytes(note[_HEAD.size : _HEAD.size + length])
    cause = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"exit {os.WEXITSTATUS(status)}"
    reason = json.loads(said)["raised"] if said else ""
    kept = write_case(parser, case, "found-") if keep else None
    return outcome | {"cases": number, "found": cause, "raised": reason, "case": case.hex()[:4000], "kept": str(kept)}


def watch(child: int, told: int, note: mmap.mmap) -> None:
    """Until the child has something to tell, or has ended; one that is at the same case for too long is ended.

    Counted in looks, not by a clock: the two of them may be stopped for a while.
    """
    at, looks = None, 0
    while not select.select([told], [], [], 1.0)[0]:
        at, before = note[: _HEAD.size], at
        looks = looks + 1 if at == before else 0
        if looks > HANG_S:
            os.kill(child, signal.SIGALRM)
            return


def report(lines: list[str]) -> str:
    """A table of runs, summed up by parser."""
    cases, seconds, found = Counter(), Counter(), Counter()
    for line in filter(str.strip, lines):
        one = json.loads(line)
        cases[one["parser"]] += one["cases"]
        seconds[one["parser"]] += one["seconds"]
        found[one["parser"]] += bool(one["found"])
    rows = [name for name in NAMES if name in cases]
    table = ["| parser | cases | s | found |", "|---|---|---|---|"]
    table += [f"| {name} | {cases[name]:,} | {seconds[name]:,.0f} | {found[name]} |" for name in rows]
    table.append(f"| all | {cases.total():,} | {seconds.total():,.0f} | {found.total()} |")
    return "\n".join(table)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parser", choices=NAMES)
    parser.add_argument("--all", action="store_true", help="one after the other")
    parser.add_argument("--cases", type=int, default=1 << 62)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engine", choices=ENGINES, default="random", help="who chooses the cases")
    parser.add_argument("--keep", action="store_true", help="keep what is new, and what is found, in corpus/")
    parser.add_argument("--report", type=Path, metavar="FILE", help="a table of the lines that runs have left in FILE")
    options = parser.parse_args()
    if options.report is not None:
        print(report(options.report.read_text().splitlines()))
        return 0
    if not options.all and options.parser is None:
        parser.error("--parser, --all or --report")
    bad = 0
    for name in NAMES if options.all else [options.parser]:
        outcome = fuzz(name, options.cases, options.seconds, options.seed, keep=options.keep, engine=options.engine)
        bad += bool(outcome["found"])
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(outcome), flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
