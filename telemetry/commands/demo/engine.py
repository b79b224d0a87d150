"""The engine: it broadcasts steps, takes the answers, and lives through the death of a worker.

It paces its steps as a GPU would, runs a bounded number of them ahead of the answers, as engines with asynchronous
scheduling do, and is one thread: while a broadcast blocks it, nobody is served.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from arena.errors import PeerDied, QueueTimeout
from telemetry.commands.demo.fleet import Fleet
from telemetry.commands.demo.scheduler import Scheduler
from telemetry.commands.demo.server import WorkerFailed
from telemetry.commands.demo.wire import Answer, Compared, Regroup, Step
from telemetry.commands.demo.workload import Request

STEP_S = 0.010  # a step does not follow the last one sooner
STALL_S = 0.050
SLOTS = 8
STEPS_AHEAD = SLOTS + 2  # so that a slow reader fills the ring, and the writer has somebody to wait for
WARM_UP = -1  # the number of a request that no user sent
WARM_UP_S = 30.0
LOOK_S = 0.25  # how long the loop may wait before it looks around and shows its progress


@dataclass
class InFlight:
    """A step that was sent: the digests it has to come back with, and who has answered."""

    step: Step
    digests: dict[int, int]
    answers: dict[int, Answer] = field(default_factory=dict)

    def faults(self) -> list[str]:
        """Say where the answers differ from each other, or from what was sent."""
        first = next(iter(self.answers.values()))
        faults = []
        for rank, answer in self.answers.items():
            if answer.tokens != first.tokens:
                faults.append(f"step {self.step.number}: reader {rank} has other tokens")
            if answer.digests != self.digests:
                faults.append(f"step {self.step.number}: reader {rank} has other pixels than were sent")
        return faults


@dataclass
class Sums:
    """How the workers added up their shares: operations by path, and what one took whose workers all told."""

    operations_by_path: dict[str, int] = field(default_factory=dict)
    compared: list[Compared] = field(default_factory=list)

    def note(self, answers: Iterable[Answer]) -> None:
        """Take down one step. A sum is over when the last worker has it."""
        told = [answer.summed for answer in answers if answer.summed is not None]
        for path in {summed.path for summed in told}:
            self.operations_by_path[path] = self.operations_by_path.get(path, 0) + 1
        compared = [summed.compared for summed in told if summed.compared is not None]
        if compared:
            self.compared.append(Compared(*map(max, zip(*compared, strict=True))))


@dataclass
class Death:
    """A worker that went away, as the engine learned of it."""

    rank: int
    pid: int | None
    signal: int | None
    raised: str
    noticed_at: float
    killed_at: float | None
    resumed_at: float | None = None


class Engine:
    """One run of the loop. Times ending in _s are seconds since it began."""

    def __init__(self, fleet: Fleet, scheduler: Scheduler, ends_s: float, on_look: Callable[[Engine], None]) -> None:
        self.fleet = fleet
        self.scheduler = scheduler
        self.in_flight: deque[InFlight] = deque()
        self.steps = 0
        self.stalls_s: list[float] = []
        self.faults: list[str] = []
        self.deaths: list[Death] = []
        self.sums = Sums()
        self.before = fleet.queue.statistics()
        self._ends_s = ends_s
        self._on_look = on_look
        self._epoch = 0
        self._began = time.monotonic()
        self._next_step_s = 0.0
        self._quiet_since_s = 0.0

    def now_s(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._began

    def run(self) -> None:
        """Serve until every request is complete, or the time is up."""
        self.before = self.fleet.queue.statistics()
        self._began = time.monotonic()
        try:
            while self.scheduler.unfinished and self.fleet.answers and self.now_s() < self._ends_s:
                self.scheduler.admit_arrivals(self.now_s())
                if self._step_is_due():
                    self._send_step()
                self._collect()
                self._on_look(self)
        except QueueTimeout:
            pass  # the time was up while a broadcast waited for a slot

    def _step_is_due(self) -> bool:
        return self._may_send() and self.now_s() >= self._next_step_s

    def _may_send(self) -> bool:
        return len(self.in_flight) < STEPS_AHEAD and self.scheduler.has_work

    def _send_step(self) -> None:
        if not self.in_flight:
            self._quiet_since_s = self.now_s()
        self._next_step_s = self.now_s() + STEP_S
        planned = self.scheduler.next_step(self.steps)
        self.steps += 1
        if self._send(planned.step):
            self.in_flight.append(InFlight(planned.step, planned.digests))

    def _send(self, message: Step | Regroup) -> bool:
        """Broadcast; False if a reader died first, so that the rest were regrouped and the message is stale."""
        while True:
            try:
                self.fleet.queue.enqueue(message, timeout=max(STALL_S, self._ends_s - self.now_s()))
            except PeerDied as died:
                if died.rank in self.fleet.answers:
                    self._bury(died.rank, died)
                    return False
            else:
                return True

    def _collect(self) -> None:
        """Take what was answered, and wait for more until something else is due."""
        while True:
            wait_s = max(0.0, self._next_event_s() - self.now_s())
            if not self.in_flight:
                time.sleep(wait_s)
                return
            if not self._answered(self.in_flight[0], time.monotonic() + wait_s):
                return
            self._complete(self.in_flight.popleft())

    def _next_event_s(self) -> float:
        look_s = self.now_s() + LOOK_S
        if self._may_send():
            return min(look_s, self._next_step_s)
        if self.scheduler.arriving:
            return min(look_s, self.scheduler.arriving[0].request.arrival_s)
        return look_s

    def _answered(self, sent: InFlight, deadline: float) -> bool:
        """Take the answers of every worker to one step; False when the deadline, or a death, came first."""
        for rank in list(self.fleet.answers):
            if rank not in sent.answers:
                answer = self._next_answer(rank, deadline)
                if answer is None:
                    return False
                sent.answers[rank] = answer
        return True

    def _next_answer(self, rank: int, deadline: float) -> Answer | None:
        while True:
            try:
                answer: Answer = self.fleet.answers[rank].dequeue(timeout=max(0.0, deadline - time.monotonic()))
            except QueueTimeout:
                return None
            except PeerDied as died:
                self._bury(rank, died)
                return None
            if answer.epoch == self._epoch:  # what was given up when the group changed may still be answered
                return answer

    def _complete(self, sent: InFlight) -> None:
        if any(answer.lost for answer in sent.answers.values()):
            self.faults.append(f"step {sent.step.number}: the group broke, and every worker lives")
            self._regroup()
            return
        self.faults += sent.faults()
        self.sums.note(sent.answers.values())
        now_s = self.now_s()
        self.scheduler.confirm(next(iter(sent.answers.values())).tokens, now_s)
        if now_s - self._quiet_since_s > STALL_S:
            self.stalls_s.append(now_s - self._quiet_since_s)
        self._quiet_since_s = now_s
        for death in self.deaths:
            death.resumed_at = death.resumed_at or time.monotonic()

    def _bury(self, rank: int, died: PeerDied) -> None:
        """Note a death, once: two queues report it. Those that are left go on without the dead one."""
        self.deaths.append(
            Death(
                rank=rank,
                pid=died.pid,
                signal=died.signal,
                raised=type(died).__name__,
                noticed_at=time.monotonic(),
                killed_at=self.fleet.killed_at.get(rank),
            )
        )
        self.fleet.answers.pop(rank).shutdown()
        if self.fleet.answers:
            self._regroup()

    def _regroup(self) -> None:
        self._epoch += 1
        self.in_flight.clear()
        tokens = self.scheduler.roll_back()
        self._send(Regroup(self._epoch, list(self.fleet.answers), self.fleet.new_rendezvous(), tokens))


def warm_up(fleet: Fleet, requests: Sequence[Request]) -> None:
    """Serve the largest request once before the clock runs, as engines do before they take traffic."""
    largest = max(requests, key=lambda request: request.tokens)
    scheduler = Scheduler([largest._replace(number=WARM_UP, arrival_s=0.0, length=1)])
    Engine(fleet, scheduler, WARM_UP_S, lambda _: None).run()
    if scheduler.unfinished:
        raise WorkerFailed(f"the workers did not answer a first step within {WARM_UP_S:.0f} s")
