"""A whole message to the device: its tensors are there, everything around them as it was."""

import collections
import dataclasses
from typing import Any

import pytest
import torch

import arena
from arena import MessageQueue
from arena.errors import InvalidArgument, WrongEnd
from arena.transfer import map_tensors


class Step(collections.namedtuple("Step", "number tensors")):
    """A tuple with names."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """A class of the user's."""

    name: str
    pixels: torch.Tensor


def doubled(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


def test_tensors_are_found_in_whatever_holds_them():
    one = torch.ones(3)
    message = {
        "list": [one, 1, "text"],
        "tuple": (one, None),
        "step": Step(4, [one]),
        "batch": Batch("b", one),
        "ordered": collections.OrderedDict(x=one),
        "default": collections.defaultdict(list, x=[one]),
        3: one,
    }
    moved = map_tensors(message, doubled)
    assert moved["list"][0].tolist() == [2, 2, 2]
    assert moved["list"][1:] == [1, "text"]
    assert moved["tuple"][0].tolist() == [2, 2, 2]
    assert type(moved["step"]) is Step
    assert moved["step"].tensors[0].tolist() == [2, 2, 2]
    assert type(moved["batch"]) is Batch
    assert moved["batch"].pixels.tolist() == [2, 2, 2]
    assert type(moved["ordered"]) is collections.OrderedDict
    assert moved["default"].default_factory is list
    assert message["list"][0] is one  # the original is as it was


def test_one_tensor_in_two_places_is_copied_once():
    one = torch.ones(3)
    first, second = map_tensors([one, {"again": one}], doubled)
    assert first is second["again"]


def test_a_message_that_holds_itself_is_no_loop():
    message: list[Any] = [torch.ones(1)]
    message.append(message)
    moved = map_tensors(message, doubled)
    assert moved[1] is moved
    assert moved[0].item() == 2


@pytest.fixture
def ends(run_dir):
    with MessageQueue(1) as queue, MessageQueue.create_from_handle(queue.export_handle(), 0) as reader:
        yield queue, reader


TENSORS = {
    "small": lambda: torch.arange(10),
    "large": lambda: torch.arange(100_000),
    "half": lambda: torch.arange(100_000).to(torch.bfloat16),
    "strided": lambda: torch.arange(200_000)[::2],
    "transposed": lambda: torch.arange(100_000.0).view(100, 1000).T,
    "expanded": lambda: torch.arange(10).expand(10_000, 10),
    "conj": lambda: torch.view_as_complex(torch.randn(50_000, 2)).conj(),
    "scalar": lambda: torch.tensor(3.5),
    "empty": lambda: torch.empty(0, 5),
    "sparse": lambda: torch.eye(20).to_sparse(),
    "grad": lambda: torch.randn(50_000, requires_grad=True),
    "parameter": lambda: torch.nn.Parameter(torch.randn(50_000), requires_grad=False),
}


@pytest.mark.parametrize("name", TENSORS)
def test_every_kind_of_tensor_gets_there_bit_by_bit(ends, name):
    queue, reader = ends
    sent = TENSORS[name]()
    queue.enqueue({"it": sent})
    moved = reader.to_device(reader.dequeue(timeout=10), "cpu")["it"]
    assert type(moved) is type(sent)
    assert (moved.shape, moved.dtype, moved.requires_grad) == (sent.shape, sent.dtype, sent.requires_grad)
    assert torch.equal(moved.to_dense(), sent.to_dense()) if sent.is_sparse else torch.equal(moved, sent)


def test_a_writer_has_nothing_to_move(ends):
    with pytest.raises(WrongEnd, match="only the reader"):
        ends[0].to_device(torch.ones(1), "cpu")


def test_a_device_that_nobody_wrote_copies_for_is_refused(ends):
    with pytest.raises(InvalidArgument, match="no copies to 'xpu'"):
        ends[1].to_device(torch.ones(1), "xpu")


def test_record_stream_takes_a_tensor_that_is_nowhere_in_the_arena():
    arena.record_stream(torch.ones(3), None)
