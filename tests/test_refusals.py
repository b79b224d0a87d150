"""What a queue refuses, and what is left of a call that was cut off: found by trying to break it."""

import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import arena.reader
from arena import MessageQueue, QueueConfig
from arena.errors import EncodeFailed, InvalidArgument

Pair = tuple[MessageQueue, MessageQueue]


@pytest.fixture
def pair(run_dir: Path) -> Iterator[Pair]:
    queue = MessageQueue(1)
    reader = MessageQueue.create_from_handle(queue.export_handle(), 0)
    yield queue, reader
    reader.shutdown()
    queue.shutdown()


def shrunken(shape: tuple[int, ...], nbytes: int) -> torch.Tensor:
    """A tensor whose storage was resized under it, as sharded training does."""
    tensor = torch.ones(shape)
    tensor.untyped_storage().resize_(nbytes)
    return tensor


@pytest.mark.parametrize(
    "tensor",
    [shrunken((100,), 0), shrunken((1000, 1000), 4096), torch._efficientzerotensor((1000, 1000))],
    ids=["no storage", "less storage", "zero tensor"],
)
def test_a_tensor_without_its_memory_is_refused_and_the_queue_goes_on(pair, tensor):
    queue, reader = pair
    with pytest.raises(EncodeFailed):
        queue.enqueue(tensor)
    queue.enqueue("next")
    assert reader.dequeue(timeout=10) == "next"


def test_a_view_into_the_end_of_a_storage_goes(pair):
    queue, reader = pair
    tensor = torch.arange(100_000).view(100, 1000)[:, 500:][7:, ::3]
    queue.enqueue(tensor)
    assert torch.equal(reader.dequeue(timeout=10), tensor)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_goes_torch_s_own_way(pair):
    queue, reader = pair
    queue.enqueue(torch.nested.nested_tensor([torch.ones(4, 5), torch.zeros(3, 5)]))
    assert [part.shape for part in reader.dequeue(timeout=10).unbind()] == [(4, 5), (3, 5)]
    assert queue.statistics().fallbacks == {"unsupported_tensor": 1}


WRONG: dict[str, Callable[[MessageQueue, MessageQueue], Any]] = {
    "settings": lambda queue, reader: MessageQueue(1, config={"slots": 4}),  # type: ignore[arg-type]
    "warning": lambda queue, reader: MessageQueue(1, on_warning="x"),  # type: ignore[arg-type]
    "null in a path": lambda queue, reader: MessageQueue(1, config=QueueConfig(run_dir="a\0b")),
    "no device": lambda queue, reader: reader.to_device(torch.zeros(3), "nonsense"),
    "device none": lambda queue, reader: reader.to_device(torch.zeros(3), None),  # type: ignore[arg-type]
    "quantized": lambda queue, reader: queue.lend((2,), torch.quint8).__enter__(),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_makes_no_sense_is_an_argument_s_error(pair, what):
    with pytest.raises(InvalidArgument):
        WRONG[what](*pair)


def test_a_timeout_longer_than_any_float_is_a_long_one(pair):
    queue, reader = pair
    queue.enqueue(1, timeout=10**400)
    assert reader.dequeue(timeout=10**400) == 1


def test_a_relative_run_directory_is_one_place_for_every_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    queue = MessageQueue(1, config=QueueConfig(run_dir="rel"))
    handle = queue.export_handle()
    monkeypatch.chdir("/")
    reader = MessageQueue.create_from_handle(handle, 0)
    reader.shutdown()
    queue.shutdown()


@pytest.mark.parametrize("where", ["ReaderRing", "Borrower", "ReaderLog", "Probe"])
def test_an_attach_that_is_interrupted_anywhere_leaves_the_rank_free(run_dir, monkeypatch, where):
    queue = MessageQueue(1)
    handle = queue.export_handle()

    def interrupted(*args: object, **settings: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(arena.reader, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            MessageQueue.create_from_handle(handle, 0)
    pages = sorted(path.name for path in queue._directory.iterdir())
    assert pages == ["attach", "owner", "writer"]
    reader = MessageQueue.create_from_handle(handle, 0, timeout=10)
    queue.enqueue("here")
    assert reader.dequeue(timeout=10) == "here"
    reader.shutdown()
    queue.shutdown()


ATTACHER = """
import errno, os, pickle, resource, sys
import arena.reader
from arena import MessageQueue
from arena.errors import ArenaError
MessageQueue(1).shutdown()  # everything is imported
handle = pickle.load(sys.stdin.buffer)
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 20, hard))
taken = []
try:
    while True:
        taken.append(os.open("/dev/null", os.O_RDONLY))
except OSError as error:
    assert error.errno == errno.EMFILE
for free in range(10):
    try:
        MessageQueue(1).shutdown()
        sys.stderr.write("made ")
    except ArenaError as error:
        sys.stderr.write(type(error).__name__ + " ")
    try:
        MessageQueue.create_from_handle(handle, 0, timeout=10).shutdown()
        print("attached")
    except ArenaError as error:
        print(type(error).__name__)
    os.close(taken.pop())
"""


def test_attaching_without_descriptors_says_so_and_leaves_the_rank_free(run_dir):
    queue = MessageQueue(1)
    given = pickle.dumps(queue.export_handle())
    ran = subprocess.run([sys.executable, "-c", ATTACHER], input=given, capture_output=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr.decode()
    found = ran.stdout.decode().split()
    assert len(found) == 10
    assert set(found) == {"OutOfDescriptors", "attached"}, ran.stderr.decode()
    assert found == sorted(found)  # no more refusals once there is room
    assert ran.stderr.decode().split()[0] == "OutOfDescriptors"
    assert set(ran.stderr.decode().split()) == {"OutOfDescriptors", "made"}
    queue.shutdown()
