"""Feeds a parser cases for as long as it is told to, in a process of its own that may crash, hang or run out of memory.

    python -m tests.fuzz.run --parser frame --cases 5000000
    python -m tests.fuzz.run --all --seconds 30

A case is one of the corpus, changed in a few places (`mutate.py`). Inputs with an outcome that had not been seen join
the corpus, in memory, and with --keep in `corpus/`, where later runs begin. Each case is written down before it is
tried, so that one that ends the process is known; it is told, with --keep kept as `corpus/PARSER/found-*`, and the run
fails.
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
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
HANG_S = 20
ROOM_BYTES = 6 << 30
MOST_OUTCOMES = 400
_HEAD = struct.Struct("=QQ")


def corpus_of(parser: str) -> list[bytes]:
    """What was kept of earlier runs."""
    return [path.read_bytes() for path in sorted((CORPUS / parser).glob("*")) if path.is_file()]


def limit_memory() -> None:
    """A damaged length must not take the host's memory: an allocation beyond this fails."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM_BYTES, used + ROOM_BYTES))


def work(parser: str, cases: int, seconds: float, seed: int, note: mmap.mmap, keep: bool, told: int) -> None:
    """The child: all cases, each noted before it is tried."""
    from tests.fuzz.mutate import mutated
    from tests.fuzz.parsers import IN_PLACE, PARSERS

    seeds, opened = PARSERS[parser]
    corpus = [*seeds(), *corpus_of(parser)]
    chance = random.Random(seed)
    outcomes: Counter[str] = Counter()
    limit_memory()
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    with opened() as run:
        for case in [*corpus, b""]:
            outcomes[run(case)] += 1
        number, ends = 0, time.monotonic() + seconds
        while number < cases and (number % 64 or time.monotonic() < ends):
            data = mutated(chance, corpus, in_place=parser in IN_PLACE)
            note[_HEAD.size : _HEAD.size + len(data)] = data
            note[: _HEAD.size] = _HEAD.pack(number, len(data))
            if number % 256 == 0:
                signal.alarm(HANG_S)
            try:
                outcome = run(data)
            except BaseException:
                os.write(told, json.dumps({"raised": traceback.format_exc()[-3000:]}).encode())
                os._exit(3)
            if outcome not in outcomes and len(outcomes) < MOST_OUTCOMES:
                corpus.append(data)
                if keep:
                    write_case(parser, data)
            outcomes[outcome] += 1
            number += 1
        signal.alarm(0)
    os.write(told, json.dumps({"cases": number, "outcomes": len(outcomes), "most": outcomes.most_common(6)}).encode())


def write_case(parser: str, data: bytes, prefix: str = "") -> Path:
    """Keep a case."""
    path = CORPUS / parser / f"{prefix}{hashlib.sha1(data, usedforsecurity=False).hexdigest()[:12]}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def fuzz(parser: str, cases: int, seconds: float, seed: int, *, keep: bool = False) -> dict:
    """One run in a child; what it did, or what it died of."""
    import tests.fuzz.parsers  # noqa: F401 - once, here: torch takes seconds to load

    note = mmap.mmap(-1, 1 << 20)
    told, tell = os.pipe()
    began = time.monotonic()
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
                work(parser, cases, seconds, seed, note, keep, tell)
            status = 0
        except BaseException:
            os.write(tell, json.dumps({"raised": traceback.format_exc()[-3000:]}).encode())
        finally:
            os._exit(status)
    os.close(tell)
    with open(told, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    number, length = _HEAD.unpack(note[: _HEAD.size])
    outcome = {"parser": parser, "seed": seed, "seconds": round(time.monotonic() - began, 1)}
    if status == 0:
        return outcome | json.loads(said) | {"found": ""}
    case = bytes(note[_HEAD.size : _HEAD.size + length])
    cause = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"exit {os.WEXITSTATUS(status)}"
    reason = json.loads(said)["raised"] if said else ""
    kept = write_case(parser, case, "found-") if keep else None
    return outcome | {"cases": number, "found": cause, "raised": reason, "case": case.hex()[:4000], "kept": str(kept)}


def main() -> int:
    """The command."""
    names = ["frame", "frame-restricted", "table", "spec", "fragment", "hold", "control", "hello", "answer", "handle"]
    names += ["page", "owner", "plan"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parser", choices=names)
    parser.add_argument("--all", action="store_true", help="one after the other")
    parser.add_argument("--cases", type=int, default=1 << 62)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="keep what is new, and what is found, in corpus/")
    options = parser.parse_args()
    if not options.all and options.parser is None:
        parser.error("--parser or --all")
    bad = 0
    for name in names if options.all else [options.parser]:
        outcome = fuzz(name, options.cases, options.seconds, options.seed, keep=options.keep)
        bad += bool(outcome["found"])
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(outcome), flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
