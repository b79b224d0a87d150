"""A slice of the fuzzing of every byte that comes from another process; `python -m tests.fuzz.run` is the long run."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from arena.codec import decode, read_table
from arena.errors import CorruptFrame
from tests.fuzz.common import SLOT_BYTES
from tests.fuzz.parsers import PARSERS
from tests.fuzz.run import NAMES, report

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.usefixtures("run_dir")
WORDS = st.integers(0, (1 << 64) - 1) | st.integers(0, 5000) | st.sampled_from([1 << 31, 1 << 32, 1 << 62, 1 << 63])
A_FEW = settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def test_the_parsers_are_those_that_the_command_knows():
    assert list(PARSERS) == list(NAMES)


def test_some_hundred_cases_for_each_parser_end_in_a_value_or_in_an_error_of_arenas():
    finished = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.run", "--all", "--cases", "500", "--seconds", "0.3"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=200,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    outcomes = [json.loads(line) for line in finished.stdout.splitlines()]
    assert [one["parser"] for one in outcomes] == list(PARSERS)
    assert all(one["cases"] and one["outcomes"] for one in outcomes)


BROKEN = """
import contextlib, ctypes, json, os, tests.fuzz.parsers as p, tests.fuzz.run as r
from tests.fuzz.common import WalledBuffer, address_of

class Fails:
    def __del__(self):
        raise KeyError("nobody hears of this")

def believes_a_length(data):
    view = room.put(data)
    return str(len(ctypes.string_at(address_of(view), len(data) + (len(data) > 9))))

def fails_in_a_destructor(data):
    return str(len(data) > 9 and Fails() is None)

def leaves_files_open(data):
    return str(len(data) > 9 and os.open("/dev/null", os.O_RDONLY) < 0)

room = WalledBuffer(1 << 17)
for name in ("believes_a_length", "fails_in_a_destructor", "leaves_files_open"):
    p.PARSERS[name] = (lambda: [b"12345678"], lambda run=globals()[name]: contextlib.nullcontext(run))
    print(json.dumps(r.fuzz(name, 20000, 20, 1)))
"""


def test_what_is_wrong_is_found_and_named():
    """Parsers that read one byte too far, fail where nobody catches it, or forget a descriptor."""
    ran = subprocess.run(
        [sys.executable, "-c", BROKEN], capture_output=True, text=True, check=True, cwd=ROOT, timeout=90
    )
    too_far, unheard, left_open = (json.loads(line) for line in ran.stdout.splitlines())
    assert too_far["found"] == "SIGSEGV"
    assert len(bytes.fromhex(too_far["case"])) > 9
    assert "nobody hears of this" in unheard["raised"]
    assert "descriptors are open" in left_open["raised"]


def test_runs_are_summed_up_by_parser():
    one = {"parser": "plan", "cases": 1000, "seconds": 2.5, "found": ""}
    table = report([json.dumps(one), json.dumps(one), json.dumps(one | {"parser": "frame", "found": "SIGSEGV"})])
    assert "| plan | 2,000 | 5 | 0 |" in table
    assert "| all | 3,000 | 8 | 1 |" in table


@A_FEW
@given(words=st.lists(WORDS, min_size=8, max_size=8))
def test_the_head_of_a_frame_can_be_anything(run_dir, words):
    _, opened = PARSERS["frame"]
    with opened() as run:
        assert run(struct.pack("=8Q", *words))
        assert run(struct.pack("=8Q", *words).ljust(SLOT_BYTES, b"\x80"))


@A_FEW
@given(
    cases=st.lists(st.binary(max_size=200), min_size=20, max_size=20),
    name=st.sampled_from(["table", "fragment", "hold"]),
)
def test_a_payload_can_be_anything(run_dir, cases, name):
    _, opened = PARSERS[name]
    with opened() as run:
        assert all(run(case) for case in cases)


@pytest.mark.parametrize(
    ("shape", "stride", "offset"),
    [
        # The product of the first overflows 64 bits to something small; torch's own check believed it.
        ((0x0700000000000000,), (0x0300000000000000,), 0),
        ((1 << 32, 1 << 32), (1 << 32, 1 << 32), 0),
        ((2,), (32,), 0),
        ((2,), (1,), 31),
        ((1,), (1,), -1),
        ((2,), (-1,), 1),
        ((1 << 40, 1 << 40), (0, 0), 0),
    ],
)
def test_no_tensor_reaches_beyond_its_buffer(shape, stride, offset):
    import pickle

    text = pickle.dumps([(0, ("float32", offset, shape, stride, False, False))], 5)
    pickled = pickle.dumps(pickle.PickleBuffer(bytearray()), 5, buffer_callback=[].append)
    payload = struct.pack("QQQQQQQQ", 1, len(text), len(pickled), 0, 64 + len(text), 128, 0, 0)
    payload += text + bytes(128) + pickled
    with pytest.raises((CorruptFrame, RuntimeError)):
        decode(read_table(memoryview(payload)), {}, "readonly")


def test_a_tensor_that_fills_its_buffer_to_the_last_element_is_right():
    import pickle

    text = pickle.dumps([(0, ("float32", 0, (32,), (1,), False, False))], 5)
    pickled = pickle.dumps(pickle.PickleBuffer(bytearray()), 5, buffer_callback=[].append)
    payload = struct.pack("QQQQQQQQ", 1, len(text), len(pickled), 0, 64 + len(text), 128, 0, 0)
    decoded = decode(read_table(memoryview(payload + text + bytes(128) + pickled)), {}, "readonly")
    assert torch.equal(decoded, torch.zeros(32))
