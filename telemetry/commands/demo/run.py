"""One demo from its first process to its result: the composition of the parts beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

from arena import QueueConfig
from telemetry.commands.demo.engine import SLOTS, STEPS_AHEAD, Engine, warm_up
from telemetry.commands.demo.fleet import Fleet
from telemetry.commands.demo.options import Options
from telemetry.commands.demo.pictures import photographs, synthetic
from telemetry.commands.demo.progress import Watch
from telemetry.commands.demo.proof import wrong_tokens
from telemetry.commands.demo.results import Result, summarise
from telemetry.commands.demo.scheduler import Scheduler
from telemetry.commands.demo.workload import SYNTHETIC_DECK, Request, plan

DRAIN_S = 5.0  # for what is still under way when the last request has arrived

STEPS = QueueConfig(name="demo:steps", slots=SLOTS, slot_bytes=128 << 10, max_message_bytes=2 << 30)
ANSWERS = QueueConfig(name="demo:answers", slots=2 * STEPS_AHEAD, max_arena_bytes=0)


def run(options: Options, watch: Watch, insist: Callable[[], None]) -> list[Result]:
    """Run the workload, once or with the arena off and on; an interrupt ends it early, with what there is.

    `insist` raises KeyboardInterrupt if there was an interrupt that nobody has taken notice of.
    """

    def look(engine: Engine) -> None:
        insist()
        watch.look(engine)

    results: list[Result] = []
    try:
        insist()
        requests = _requests(options, watch.say)
        for arena in ("off", "on") if options.compare else ("on",):
            results.append(_run_once(options, requests, arena, watch, look))
            if results[-1].interrupted:
                break
    except KeyboardInterrupt:
        if results:  # who called us says the rest
            watch.say("interrupted before the run with the arena on was measured")
    return results


def _requests(options: Options, say: Callable[[str], None]) -> list[Request]:
    if options.images is None:
        return plan(options.seed, options.seconds, SYNTHETIC_DECK, cache(synthetic))
    found = photographs(options.images, say)
    sizes = [picture.nbytes / 1e6 for picture in found]
    say(f"photographs: {len(found)}, of {min(sizes):,.0f} to {max(sizes):,.0f} MB as patches")
    return plan(options.seed, options.seconds, range(len(found)), found.__getitem__)


def _run_once(
    options: Options, requests: Sequence[Request], arena: str, watch: Watch, look: Callable[[Engine], None]
) -> Result:
    config = STEPS if arena == "on" else replace(STEPS, max_arena_bytes=0)
    late_s = dict([options.slow_reader]) if options.slow_reader else {}
    interrupted = False

    def say(sentence: str) -> None:
        watch.say(f"arena {arena}: {sentence}")

    say(f"starting {options.readers} worker{'s' if options.readers > 1 else ''}")
    with Fleet(options.readers, config, ANSWERS, late_s, say) as fleet:
        fleet.wait_until_ready()
        say("serving the largest request once, to warm up")
        warm_up(fleet, requests)
        engine = Engine(fleet, Scheduler(requests), options.seconds + DRAIN_S, look)
        watch.begin(f"arena {arena}", options.seconds)
        if options.kill_reader:
            fleet.kill_later(*options.kill_reader)
        try:
            engine.run()
        except KeyboardInterrupt:
            interrupted = True
        if options.kill_reader and not engine.deaths:
            say("the run was over before anybody could notice that a reader was killed")
        result = summarise(engine, arena=arena, interrupted=interrupted)
    return replace(result, mismatches=engine.faults + wrong_tokens(engine.scheduler.all))
