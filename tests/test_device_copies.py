"""The CPU's copy engine is as fast, as late and as careless as a real one."""

import threading
import time

import pytest
import torch

from arena.device import PinRefused, copies_in_use, open_copies
from arena.device.cpu.copies import COPIES
from arena.errors import InvalidArgument
from tests.support.fleet import eventually
from tests.support.processes import run
from tests.support.streams import cpu_streams

CPU = torch.device("cpu")


class Registered:
    """A tensor in memory that the engine knows of."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __enter__(self) -> torch.Tensor:
        COPIES.register(self.tensor.data_ptr(), self.tensor.numel() * self.tensor.element_size(), writable=True)
        return self.tensor

    def __exit__(self, *error: object) -> None:
        COPIES.unregister(self.tensor.data_ptr())


def test_a_copy_from_registered_memory_reads_whatever_is_there_when_its_turn_comes():
    with cpu_streams() as [stream], Registered(torch.zeros(1000)) as source:
        held = stream.hold()
        made = COPIES.to_device(source, CPU, stream, pinned=True)
        passage = COPIES.record(stream)
        assert not passage.passed()
        source.fill_(7)
        held.set()
        passage.wait()
        assert passage.passed()
        assert bool((made == 7).all())


def test_a_copy_from_other_memory_has_been_made_when_the_call_returns():
    with cpu_streams() as [stream]:
        stream.delay(0.01)
        source = torch.zeros(1000)
        made = COPIES.to_device(source, CPU, stream, pinned=True)  # it is not, whatever the caller thinks
        source.fill_(7)
        assert not made.any()


@pytest.mark.parametrize("view", ["strided", "conj", "neg", "empty"])
def test_whatever_is_not_one_piece_is_packed_first(view):
    whole = torch.view_as_complex(torch.arange(60.0).view(5, 6, 2))
    source = {
        "strided": whole.T,
        "conj": whole.conj(),
        "neg": torch._neg_view(whole.real.contiguous()),
        "empty": whole[:0],
    }[view]
    with cpu_streams() as [stream], Registered(whole):
        made = COPIES.to_device(source, CPU, stream, pinned=True)
        stream.synchronize()
        assert torch.equal(made, source)


def test_a_stream_keeps_its_order_and_two_overlap():
    with cpu_streams(2) as [one, other]:
        order: list[str] = []
        held = one.hold()
        one.submit(lambda: order.append("first"))
        one.submit(lambda: order.append("second"))
        other.submit(lambda: order.append("other"))
        other.synchronize()
        assert order == ["other"]
        held.set()
        one.synchronize()
        assert order == ["other", "first", "second"]


def test_the_point_that_every_stream_has_come_to_passes_with_the_last():
    with cpu_streams(2) as [one, other]:
        held, also_held = one.hold(), other.hold()
        everything = COPIES.record_everything()
        held.set()
        one.synchronize()
        assert not everything.passed()
        also_held.set()
        everything.wait()
        assert everything.passed()


def test_the_current_stream_is_a_matter_of_the_thread():
    with cpu_streams(2) as [one, other]:
        assert COPIES.current_stream() is None
        with one:
            with other:
                assert COPIES.current_stream() is other
            assert COPIES.current_stream() is one
            seen = []
            thread = threading.Thread(target=lambda: seen.append(COPIES.current_stream()))
            thread.start()
            thread.join()
            assert seen == [None]


def test_who_made_no_stream_has_its_copies_at_once_and_uses_no_device():
    source = torch.arange(10)
    assert copies_in_use() is None
    made = COPIES.to_device(source, CPU, None, pinned=False)
    assert torch.equal(made, source)
    assert made.data_ptr() != source.data_ptr()
    assert COPIES.record(None).passed()
    with cpu_streams():
        assert copies_in_use() is COPIES
    assert copies_in_use() is None


def test_memory_is_registered_once():
    with Registered(torch.zeros(1000)) as source, pytest.raises(PinRefused) as refused:
        COPIES.register(source.data_ptr() + 100, 10, writable=True)
    assert refused.value.reason == "already_registered"


def test_no_more_memory_is_registered_than_may_be_locked():
    with cpu_streams():
        COPIES.lockable_bytes = 1000
        with pytest.raises(PinRefused) as refused:
            COPIES.register(4096, 1001, writable=True)
    assert refused.value.reason == "memlock_limit"


@pytest.mark.parametrize("pinned", [True, False])
def test_a_copy_across_ranges_is_refused_as_by_a_real_driver(pinned):
    with cpu_streams() as [stream]:
        source = torch.arange(1000)
        COPIES.register(source.data_ptr(), 4000, writable=True)
        with pytest.raises(RuntimeError, match="not in one registered range"):
            COPIES.to_device(source, CPU, stream, pinned=pinned)
        COPIES.unregister(source.data_ptr())


def test_there_are_no_copies_to_what_nobody_wrote_an_engine_for():
    with pytest.raises(InvalidArgument, match="no copies to 'xpu'"):
        open_copies("xpu")


def in_a_forked_child() -> tuple[bool, int]:
    import os

    with cpu_streams():
        COPIES.register(4096, 10, writable=True)
        ours, theirs = os.pipe()
        child = os.fork()
        if not child:
            os.write(theirs, bytes([copies_in_use() is None, len(COPIES.registered)]))
            os._exit(0)
        answer = os.read(ours, 2)
        os.waitpid(child, 0)
        return bool(answer[0]), answer[1]


def test_a_forked_child_uses_no_device():
    assert run(in_a_forked_child) == (True, 0)


def test_a_closed_stream_still_does_what_was_queued():
    with cpu_streams() as [stream]:
        done = threading.Event()
        stream.submit(lambda: time.sleep(0.01))
        stream.submit(done.set)
    assert eventually(done.is_set)
