"""Proof with a real engine: Arena's plugin in vLLM, on the CPU, beside vLLM's own queue.

    python -m tests.vllm.prove --environment ~/.cache/arena/vllm --json proof.json

Two engines of a tiny Llama with random weights, tensor parallel 2, run side by side on this machine: one with vLLM's
own queue (``ARENA_VLLM=0``), one with the plugin. They take turns, so that other work on the machine meets both, and a
figure is the median of the ratios of such pairs: of short bursts of requests for the time of a step, of longer ones
with a pause after each for CPU seconds. No burst begins while the other engine still polls after its own. Then, in
the engine with the plugin, a worker is stopped and has to be named, and at last both engines are killed. It takes
minutes, prints a table, writes JSON, and exits with 1 where a bound is not held. Makes the environment first where
there is none.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from telemetry.commands.bench.machine import facts
from tests.vllm import faults
from tests.vllm.driver import Engine, Memory
from tests.vllm.environment import make

STEP_RATIO: Final = 1.03
CPU_RATIO: Final = 0.8
QUEUE_BYTES: Final = 16 << 20
PAUSE_S: Final = 1.5  # vLLM's readers poll for a second after their last message
SHORT: Final = 40
LONG: Final = 120
PROMPTS: Final = [[3, 5, 7, 9], [11, 13, 17, 19, 23], [4] * 40]
MIB: Final = 1 << 20


@dataclass(frozen=True)
class Burst:
    """One turn of one engine: seconds a step, at the median, and CPU seconds without and with the pause."""

    step_s: float
    busy_cpu_s: float
    cpu_s: float


def burst(engine: Engine, tokens: int) -> Burst:
    """Some requests together, and a pause after them, as between the requests of a day."""
    before_s = engine.cpu_s()
    steps = engine.generate(PROMPTS, tokens)["steps_s"]
    busy_cpu_s = engine.cpu_s() - before_s
    time.sleep(PAUSE_S)
    return Burst(statistics.median(steps), busy_cpu_s, engine.cpu_s() - before_s)


def same_tokens(own: Engine, arena: Engine) -> bool:
    """Greedy and sampled, in a batch and alone."""
    return all(
        own.generate(prompts, 60, temperature)["tokens"] == arena.generate(prompts, 60, temperature)["tokens"]
        for prompts in (PROMPTS, PROMPTS[:1])
        for temperature in (0.0, 1.0)
    )


def take_turns(own: Engine, arena: Engine, pairs: int, tokens: int) -> list[tuple[Burst, Burst]]:
    """Pairs of bursts, each engine first in every other one."""
    found = []
    for number in range(pairs):
        order = (own, arena) if number % 2 == 0 else (arena, own)
        done = {id(engine): burst(engine, tokens) for engine in order}
        found.append((done[id(own)], done[id(arena)]))
        print(f"pair {number + 1} of {pairs}: {_pair(*found[-1])}", flush=True)
    return found


def _pair(own: Burst, arena: Burst) -> str:
    return f"step {own.step_s * 1e3:.2f} and {arena.step_s * 1e3:.2f} ms, CPU {own.cpu_s:.2f} and {arena.cpu_s:.2f} s"


def speed(short: list[tuple[Burst, Burst]], long: list[tuple[Burst, Burst]]) -> dict[str, Any]:
    """Medians of both, and of the paired ratios."""
    report: dict[str, Any] = {
        name: [[vars(one) for one in pair] for pair in turns] for name, turns in (("short", short), ("long", long))
    }
    for name, turns in (("step_s", short), ("busy_cpu_s", long), ("cpu_s", long)):
        own, arena = ([getattr(pair[side], name) for pair in turns] for side in (0, 1))
        ratios = [after / before for before, after in zip(own, arena, strict=True)]
        report[name] = {
            "vllm": statistics.median(own),
            "arena": statistics.median(arena),
            "ratio": statistics.median(ratios),
            "ratio_quartiles": statistics.quantiles(ratios, n=4)[::2],
        }
    return report


def prove(python: Path, place: Path, pairs: int, method: str) -> dict[str, Any]:
    """All of it; the figures."""
    report: dict[str, Any] = {"machine": facts(), "method": method}
    with ExitStack() as engines:
        made: dict[str, Engine] = {}
        for name, switch in (("vllm", "0"), ("arena", "1")):
            made[name] = engine = engines.enter_context(Engine(python, place, arena=switch, method=method))
            report[name] = {"start_s": engine.wait_ready(), "memory": vars(engine.memory())}
            print(f"{name}: started in {report[name]['start_s']:.0f} s", flush=True)
        own, arena = made["vllm"], made["arena"]
        report["queues"] = faults.queues(arena)
        report["same_tokens"] = same_tokens(own, arena)
        report["speed"] = speed(take_turns(own, arena, 4 * pairs, SHORT), take_turns(own, arena, pairs, LONG))
        report["queue_delay_s"] = faults.queue_delays(arena)
        report["stopped"] = faults.stop_a_worker(own, arena, place)
        report["killed"] = {name: faults.kill(engine) for name, engine in made.items()}
    return report


# ── what is said of it ───────────────────────────────────────────────────────────────────────────
def bounds(report: dict[str, Any]) -> dict[str, bool]:
    """What has to hold, and whether it does."""
    stopped, killed, n_queues = report["stopped"], report["killed"]["arena"], max(1, len(report["queues"]))
    return {
        "the same tokens": report["same_tokens"] and stopped["same_tokens"],
        f"step at most {STEP_RATIO} times vLLM's own": report["speed"]["step_s"]["ratio"] <= STEP_RATIO,
        f"CPU at most {CPU_RATIO} times": report["speed"]["cpu_s"]["ratio"] <= CPU_RATIO,
        f"at most {QUEUE_BYTES // MIB} MiB a queue": report["arena"]["memory"]["size_bytes"] <= n_queues * QUEUE_BYTES,
        "arena top names the stopped worker": stopped["top"],
        "metrics name it": stopped["metrics"],
        "the alert names it": stopped["alert"],
        "nothing is left after SIGKILL": not (killed["processes"] or killed["shm"] or killed["run_dir_after_gc"]),
    }


def table(report: dict[str, Any]) -> str:
    """For people."""
    memory = {name: Memory(**report[name]["memory"]) for name in ("vllm", "arena")}
    rows = [("", "vLLM's own", "Arena", "ratio")]
    for name, key, scale, unit in (
        ("step, median", "step_s", 1e3, "ms"),
        ("CPU, burst and pause", "cpu_s", 1, "s"),
        ("CPU, burst alone", "busy_cpu_s", 1, "s"),
    ):
        one = report["speed"][key]
        rows.append(
            (name, f"{one['vllm'] * scale:.2f} {unit}", f"{one['arena'] * scale:.2f} {unit}", f"{one['ratio']:.3f}")
        )
    for name, field in (("shared memory before traffic", "size_bytes"), ("of it touched", "touched_bytes")):
        own, arena = (getattr(memory[engine], field) / MIB for engine in ("vllm", "arena"))
        rows.append((name, f"{own:.1f} MiB", f"{arena:.1f} MiB", ""))
    for name, field in (("left in /dev/shm after SIGKILL", "shm"), ("processes left", "processes")):
        rows.append((name, *(str(len(report["killed"][engine][field])) for engine in ("vllm", "arena")), ""))
    lines = [f"{a:<32}{b:>14}{c:>14}{d:>8}" for a, b, c, d in rows]
    for queue, delay in report["queue_delay_s"].items():
        lines.append(f"queue delay, {queue}: p50 {delay['p50'] * 1e6:.0f} µs, p99 {delay['p99'] * 1e6:.0f} µs")
    lines += [f"said: {report['stopped']['said']}", *(f"alert: {text}" for text in report["stopped"]["alerts"])]
    lines += [f"{'held' if held else 'NOT HELD':<9}{name}" for name, held in report["bounds"].items()]
    return "\n".join(lines)


def main() -> int:
    """Parse, prove, tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environment", type=Path, default=Path("~/.cache/arena/vllm"), help="made where it is not")
    parser.add_argument("--pairs", type=int, default=6, help="of long bursts; of short ones four times as many")
    parser.add_argument("--method", choices=["fork", "spawn"], default="fork", help="how workers are started")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    python = make(options.environment.expanduser().absolute())
    with tempfile.TemporaryDirectory(prefix="arena-proof-", ignore_cleanup_errors=True) as place:
        report = prove(python, Path(place), options.pairs, options.method)
    report["bounds"] = bounds(report)
    print(table(report))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(report["bounds"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
