"""A tensor on a device is copied by that device, straight into the block that readers get. On a stand-in for one."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from arena import MessageQueue, QueueConfig, device
from arena.device.cpu import copies as cpu
from arena.errors import PinFailed
from tests.support import elsewhere
from tests.support.fleet import eventually
from tests.support.streams import cpu_streams

MIB = 1 << 20
pytestmark = pytest.mark.usefixtures("run_dir")


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    made = elsewhere._Elsewhere()
    monkeypatch.setattr(elsewhere, "COPIES", made)
    monkeypatch.setitem(device.COPIES, "meta", "tests.support.elsewhere")
    yield made
    assert eventually(lambda: not made.registered or None)


class Ends:
    """A queue and its reader."""

    def __init__(self, **settings: Any) -> None:
        self.queue = MessageQueue(1, config=QueueConfig(**{"segment_bytes": MIB, **settings}))
        self.reader = MessageQueue.create_from_handle(self.queue.export_handle(), 0)

    def send(self, message: Any) -> Any:
        self.queue.enqueue(message, timeout=10)
        return self.reader.dequeue(timeout=10)

    def __enter__(self) -> "Ends":
        return self

    def __exit__(self, *error: object) -> None:
        self.reader.shutdown()
        self.queue.shutdown()


def pinned(ends: Ends) -> dict[int, str]:
    return eventually(lambda: (found := ends.queue.statistics().pins) and "pinning" not in found.values() and found)


KINDS = {
    "large": lambda: torch.arange(40_000),
    "small": lambda: torch.arange(10),
    "half": lambda: torch.arange(90_000).to(torch.bfloat16),
    "transposed": lambda: torch.arange(40_000.0).view(200, 200).T,
    "empty": lambda: torch.empty(0, 3),
    "scalar": lambda: torch.tensor(2.5),
}


@pytest.mark.parametrize("kind", KINDS)
def test_it_arrives_as_a_tensor_on_the_host_bit_by_bit(there, kind):
    sent = KINDS[kind]()
    with Ends() as ends:
        got = ends.send({"it": there.put(sent), "more": 1})
        assert got["it"].device.type == "cpu"
        assert (got["it"].dtype, got["it"].shape) == (sent.dtype, sent.shape)
        assert torch.equal(got["it"], sent)
        assert got["more"] == 1
        assert ends.queue.statistics().fallbacks == {}
        del got


def test_it_is_copied_once_straight_into_a_block_which_is_pinned_from_then_on(there):
    sent = torch.arange(40_000)
    with Ends() as ends:
        first = ends.send(there.put(sent))
        assert pinned(ends) == {1: "pinned"}
        second = ends.send(there.put(sent[1:30_000]))
        assert there.fetched == 2
        assert there.registered_when_fetched == [False, True]
        assert ends.queue.statistics().messages_by_path["block"] == 2
        assert torch.equal(first, sent)
        assert torch.equal(second, sent[1:30_000])
        del first, second


def test_without_room_it_goes_in_fragments(there):
    sent = torch.arange(40_000)
    with Ends(max_arena_bytes=0) as ends:
        assert torch.equal(ends.send(there.put(sent)), sent)
        assert ends.queue.statistics().fallbacks == {"disabled": 1}


def test_a_segment_that_can_not_be_pinned_is_counted_and_the_bytes_are_right(there):
    there.faults.append("memlock_limit")
    sent = torch.arange(40_000)
    with Ends() as ends:
        first = ends.send(there.put(sent))
        assert pinned(ends) == {1: "failed: memlock_limit"}
        second = ends.send(there.put(sent))
        assert torch.equal(first, sent)
        assert torch.equal(second, sent)
        # The second one, and the first where the refusal came before its copy was done.
        assert ends.queue.statistics().fallbacks in ({"pin_failed": 1}, {"pin_failed": 2})
        del first, second


def test_where_it_has_to_be_pinned_and_can_not_nothing_is_sent(there):
    there.faults.append("driver")
    with Ends(pin="required") as ends:
        with pytest.raises(PinFailed):
            ends.queue.enqueue(there.put(torch.arange(40_000)))
        assert ends.queue.statistics().arena_used_bytes == 0
        assert ends.send("next") == "next"


def test_off_copies_all_the_same(there):
    sent = torch.arange(40_000)
    with Ends(pin="off") as ends:
        got = ends.send(there.put(sent))
        assert torch.equal(got, sent)
        assert not there.registered
        assert ends.queue.statistics().pins == {}
        del got


def test_a_block_that_a_copy_still_fills_is_not_lent_again():
    """A lent tensor is the target of a copy, and dropped unsent before that has passed."""
    with cpu_streams() as [stream], stream, Ends(max_arena_bytes=MIB) as ends:
        with ends.queue.lend((MIB,), torch.uint8) as lent:
            address = lent.data_ptr()
        assert pinned(ends) == {1: "pinned"}
        held = stream.hold()
        source = torch.full((MIB,), 7, dtype=torch.uint8)
        stream.submit(lambda: cpu._move(address, source.data_ptr(), MIB))
        del lent
        assert ends.queue.statistics().arena_used_bytes == MIB
        held.set()
        assert eventually(lambda: not ends.queue.statistics().arena_used_bytes or None)
