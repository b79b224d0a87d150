"""What travels to a queue's readers in place of vLLM's own handle, and says so where nobody expects it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Final, NoReturn

from arena.errors import HandleMismatch, InvalidArgument
from arena.peers import Handle

MAGIC: Final = "arena-vllm-queue"
VERSION: Final = 1


@dataclass(frozen=True)
class QueueHandle:
    """How a reader finds an Arena queue that stands in for one of vLLM's.

    It has the two fields that vLLM's executors read. A process without the plugin goes on to vLLM's other fields:
    each of them is an error that says which process lacks what.

    Attributes:
        magic: tells it from anything else that has been pickled.
        version: of this class; both ends need the same.
        kind: "broadcast", "response" or "group": what the queue is for.
        local_reader_ranks: the engine's rank of each reader; a reader's place here is its rank on the queue.
        pid: the process that writes.
        arena: the queue itself.
        remote_subscribe_addr: None: no reader is on another host.
    """

    magic: str
    version: int
    kind: str
    local_reader_ranks: list[int]
    pid: int
    arena: Handle
    remote_subscribe_addr: ClassVar[None] = None

    def check(self) -> None:
        """Refuse a handle of another Arena, or a damaged one.

        Raises:
            HandleMismatch: wrong magic or version, or fields that do not go together.
        """
        if self.magic != MAGIC or self.version != VERSION:
            raise HandleMismatch(
                "this handle was made by another version of Arena",
                expected=f"{MAGIC} version {VERSION}",
                found=f"{self.magic} version {self.version}",
                remedy="install the same Arena for every process of the engine",
            )
        ranks, fields = self.local_reader_ranks, (("kind", str), ("pid", int), ("arena", Handle))
        wrong = [name for name, kind in fields if type(getattr(self, name)) is not kind]
        if type(ranks) is not list or not all(type(rank) is int for rank in ranks):
            wrong.append("local_reader_ranks")
        if not wrong:
            self.arena.check()
            if not 0 < len(ranks) == len(set(ranks)) <= self.arena.n_reader:  # a place on the queue for each
                wrong.append("local_reader_ranks")
        if wrong:
            raise HandleMismatch(
                f"this handle is damaged: {', '.join(wrong)}",
                expected="fields as export_handle() made them",
                found=", ".join(f"{getattr(self, name)!r}"[:40] for name in wrong),
                remedy="send the reader the handle as export_handle() gave it",
            )

    def rank_of(self, reader: int) -> int:
        """The rank on the queue of one of the engine's ranks.

        Raises:
            InvalidArgument: no place is kept for it.
        """
        if reader not in self.local_reader_ranks:
            raise InvalidArgument(
                f"queue {self.arena.name!r} keeps no place for rank {reader}",
                expected=f"one of {self.local_reader_ranks}",
                found=str(reader),
                remedy="a reader on another host needs a queue that was made for one (n_reader > n_local_reader)",
            )
        return self.local_reader_ranks.index(reader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # what pickle and copy ask for
            raise AttributeError(name)
        self._refuse(name)

    def _refuse(self, name: str) -> NoReturn:
        raise HandleMismatch(
            f"a process without Arena's plugin was given a queue of Arena's (it asked for {name!r})",
            expected=f"the plugin in every process of the engine, as in process {self.pid}, which made the queue",
            found="vLLM's own MessageQueue here",
            remedy="install arena-dataplane for all of them and give all the same VLLM_PLUGINS and ARENA_VLLM, "
            "or set ARENA_VLLM=0 for all",
        )
