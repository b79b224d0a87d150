"""The parsers: what each is fed, and what may come out. `run` returns the outcome's name, and raises on a wrong one.

An outcome is a value that passed its own checks, or a class of `arena.errors`. Anything else that is raised, a signal,
a case without an end or memory beyond the limit is a finding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from tests.fuzz import files, frames, handles, remotes, sockets, stores, words
from tests.fuzz.common import Run

PARSERS: dict[str, tuple[Callable[[], list[bytes]], Callable[[], contextlib.AbstractContextManager[Run]]]] = {
    "frame": (frames.frame_seeds, frames.frames),
    "frame-restricted": (
        lambda: frames.frame_seeds(serializer="restricted"),
        lambda: frames.frames(serializer="restricted"),
    ),
    "header": (frames.header_seeds, frames.headers),
    "table": (frames.table_seeds, frames.tables),
    "spec": (frames.spec_seeds, frames.specs),
    "fragment": (frames.fragment_seeds, frames.fragments),
    "hold": (frames.hold_seeds, frames.holds),
    "control": (words.control_seeds, words.controls),
    "ring": (words.ring_seeds, words.rings),
    "board": (words.board_seeds, words.others),
    "hello": (sockets.hello_seeds, sockets.hellos),
    "answer": (sockets.answer_seeds, sockets.answers),
    "meeting": (sockets.meeting_seeds, sockets.meetings),
    "round": (stores.round_seeds, stores.rounds),
    "handle": (handles.handle_seeds, handles.handles),
    "handle-vllm": (handles.vllm_seeds, handles.vllm_handles),
    "forwarder": (remotes.forwarder_seeds, remotes.forwarders),
    "inlet": (remotes.inlet_seeds, remotes.inlets),
    "report": (remotes.report_seeds, remotes.reports),
    "page": (files.page_seeds, files.pages),
    "owner": (files.owner_seeds, files.makers),
    "plan": (files.plan_seeds, files.plans),
}
IN_PLACE = frozenset(("frame", "frame-restricted", "header", "control", "ring", "board", "hold", "page", "spec"))
"""What has its fields at fixed places: bytes are changed there, and none are added or taken away."""
