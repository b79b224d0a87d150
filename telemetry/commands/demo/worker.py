"""One worker of the demo: it takes steps from the engine's queue and answers over a queue of its own.

The collective couples the workers: while one is late, all wait in the all-reduce. That is how it is on GPUs too, and
why the engine needs to be told who came back to the queue last.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from contextlib import closing
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch
from torch import Tensor

from arena import Handle, MessageQueue, QueueConfig
from arena.errors import PeerDied, QueueClosed
from telemetry.commands.demo.collective import Collective, GroupBroken
from telemetry.commands.demo.layer import Layer, digest, sample
from telemetry.commands.demo.wire import Answer, Prefill, Ready, Regroup, Step, Summed

PR_SET_PDEATHSIG = 1


class Post(NamedTuple):
    """What a worker is told when it starts: its place, the engine's queue, and how late it is to come back to it."""

    rank: int
    readers: int
    handle: Handle
    rendezvous: str
    late_s: float
    answers: QueueConfig


def work(post: Post, engine: Connection) -> None:
    """Be a worker until the engine closes its queue, or dies."""
    _die_with_the_parent()
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        with (
            MessageQueue.create_from_handle(post.handle, post.rank) as steps,
            MessageQueue(1, 1, config=post.answers) as answers,
        ):
            engine.send(answers.export_handle())
            with closing(Worker(post.rank)) as worker:
                worker.regroup(Regroup(0, list(range(post.readers)), post.rendezvous, {}))
                answers.enqueue(Ready(post.rank))
                _serve(worker, steps, answers, post.late_s)
    except (QueueClosed, PeerDied):
        pass
    except GroupBroken as broken:
        print(f"arena demo: {broken}", file=sys.stderr)


def _serve(worker: Worker, steps: MessageQueue, answers: MessageQueue, late_s: float) -> None:
    while True:
        time.sleep(late_s)  # before the queue, not after it: the collective would make the others as late
        answer = worker.take(steps.dequeue())  # no name for the message: its pixels go back before the next wait
        if answer:
            answers.enqueue(answer)


class Worker:
    """A share of the layer, and the last token of each request."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.epoch = 0
        self.ranks: list[int] = []
        self.layer = Layer(0, 1)
        self.collective: Collective | None = None  # none for a worker alone, or in a group that broke
        self.tokens: dict[int, tuple[int, int]] = {}  # request: its last token, and where that stands

    def take(self, message: Step | Regroup) -> Answer | None:
        """Do what the engine says; only a step has an answer."""
        if isinstance(message, Step):
            return self.answer(message)
        try:
            self.regroup(message)
        except GroupBroken:
            pass  # one more died: the answers say that they are lost, until the engine has noticed
        return None

    def regroup(self, order: Regroup) -> None:
        """Take a new share of the layer among those that are left, and forget what they had not confirmed."""
        self.epoch, self.ranks = order.epoch, order.ranks
        part, parts = order.ranks.index(self.rank), len(order.ranks)
        self.layer = Layer(part, parts)
        self.tokens = {request: (tokens[-1], len(tokens) - 1) for request, tokens in order.tokens.items()}
        self.close()
        if parts > 1:
            self.collective = Collective(part, parts, order.rendezvous)

    def close(self) -> None:
        """Leave the group."""
        collective, self.collective = self.collective, None
        if collective is not None:
            collective.close()

    def answer(self, step: Step) -> Answer:
        """Run the layer for every request of the step, and sample a token for each."""
        if self.collective is None and len(self.ranks) > 1:  # broken: nothing is known of the tokens in between
            return Answer(step.number, self.epoch, {}, {}, lost=True)
        requests = [prefill.request for prefill in step.prefills] + step.decodes
        states = [self._first_state(prefill) for prefill in step.prefills]
        states += [self.layer.token_state(*self.tokens[request]) for request in step.decodes]
        try:
            output, summed = self._add_up(self.layer.partial_sum(torch.stack(states)), step.number)
        except GroupBroken:
            self.close()
            return Answer(step.number, self.epoch, {}, {}, lost=True)
        tokens = dict(zip(requests, sample(output), strict=True))
        self._remember(step, tokens)
        return Answer(step.number, self.epoch, tokens, self._digests(step), lost=False, summed=summed)

    def _first_state(self, prefill: Prefill) -> Tensor:
        picture = None if prefill.pixels is None else self.layer.embed_picture(prefill.pixels)
        return self.layer.prompt_state(prefill.prompt, picture)

    def _add_up(self, share: Tensor, step: int) -> tuple[Tensor, Summed | None]:
        return (share, None) if self.collective is None else self.collective.add_up(share, step)

    def _remember(self, step: Step, tokens: dict[int, int]) -> None:
        for request in step.finished:
            self.tokens.pop(request, None)
        for request, token in tokens.items():
            _, position = self.tokens.get(request, (0, -1))
            self.tokens[request] = (token, position + 1)

    @staticmethod
    def _digests(step: Step) -> dict[int, int]:
        return {prefill.request: int(digest(prefill.pixels)) for prefill in step.prefills if prefill.pixels is not None}


def _die_with_the_parent() -> None:
    """A parent that is killed can't end its children; the kernel can."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
