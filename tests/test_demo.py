"""The demo serves, proves what it served, survives the faults it injects, and leaves nothing behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from telemetry import cli
from telemetry.commands.demo.engine import InFlight
from telemetry.commands.demo.interrupts import Interrupts
from telemetry.commands.demo.layer import HIDDEN, PATCH_VALUES, Layer, digest, sample
from telemetry.commands.demo.options import Refused
from telemetry.commands.demo.pictures import Picture, dynamic_resolution, patches, photographs, synthetic
from telemetry.commands.demo.proof import wrong_tokens
from telemetry.commands.demo.results import spread
from telemetry.commands.demo.scheduler import STEP_TOKENS, Scheduler, Tracked
from telemetry.commands.demo.wire import Answer
from telemetry.commands.demo.workload import Request, plan
from tests.support.fleet import eventually
from tests.support.scraping import scrape

ROOT = Path(__file__).parent.parent
COMMAND = [sys.executable, "-c", "import sys; sys.argv[0] = 'arena'; from telemetry.cli import main; main()", "demo"]


# --- real runs -------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_images(tmp_path: Path) -> Path:
    """Photographs of some two megabytes each once they are patches, so that a run costs little."""
    directory = tmp_path / "images"
    directory.mkdir()
    for number in range(3):
        Image.effect_noise((280, 280 + 28 * number), 40).save(directory / f"{number}.png")
    return directory


@pytest.fixture
def places(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Where a run could leave something: the run directory, and the directory for temporary files."""
    temporary = tmp_path / "t"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # without a tuned plan
    return [run_dir, temporary]


@contextmanager
def running(*arguments: str | Path) -> Iterator["subprocess.Popen[str]"]:
    """Start the demo in a session of its own, so that no process of it can outlive the test."""
    process = subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        for pid in members(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.communicate()


def wait_until_it_serves(process: "subprocess.Popen[str]") -> None:
    wait_until_it_says(process, " s  step")


def wait_until_it_says(process: "subprocess.Popen[str]", words: str) -> None:
    assert process.stderr
    assert any(words in line for line in process.stderr), f"it ended before it said {words!r}"


def members(session: int) -> list[int]:
    """Name the living processes of a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, of_session = path.read_text().rpartition(")")[2].split()[:4]
        except OSError:  # it ended while we looked
            continue
        if int(of_session) == session and state != "Z":
            found.append(int(path.parent.name))
    return found


def assert_nothing_is_left(session: int, places: list[Path]) -> None:
    deadline = time.monotonic() + 5
    while (alive := members(session)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert alive == []
    assert {str(place): sorted(map(str, place.rglob("*"))) for place in places} == {str(place): [] for place in places}


def finished(process: "subprocess.Popen[str]", code: int = 0) -> str:
    output, errors = process.communicate(timeout=50)
    assert process.returncode == code, errors
    return output


def test_compared_runs_serve_the_same_requests_and_prove_it(small_images, places):
    with running("--compare", "--json", "--seconds", "1", "--images", small_images) as process:
        output, progress = process.communicate(timeout=50)
        assert_nothing_is_left(process.pid, places)
    report = json.loads(output)
    off, on = report["runs"]
    said = [line.rstrip() for line in progress.splitlines()]
    assert said[:2] == ["loading torch, here and for the workers", "photographs: 3, of 2 to 2 MB as patches"]
    arms = [line.split()[1].strip(":") for line in said[2:]]
    assert arms == sorted(arms), "first off, then on, and each line says which"
    for arm in ("arena off", "arena on"):
        assert f"{arm}: starting 2 workers" in said
        assert any(line.startswith(f"{arm}   0.0 s  step 1: ") for line in said)
    assert report["ok"]
    assert (off["arena"], on["arena"]) == ("off", "on")
    assert off["offered"] == on["offered"] == off["completed"] == on["completed"]
    assert off["mismatches"] == on["mismatches"] == []
    assert off["bytes_by_path"]["fragments"] > 1e6
    assert off["fallbacks"]["disabled"] > 0
    assert on["bytes_by_path"]["block"] > 1e6
    assert on["fallbacks"] == {}
    for run in (off, on):
        assert sum(run["collective"]["operations_by_path"].values()) == run["steps"]
        assert set(run["collective"]["operations_by_path"]) <= {"cpu_one_shot", "cpu_two_shot"}
        assert run["collective"]["compared"] > 0
        assert min(run["collective"][name] for name in ("arena_us", "gloo_us", "times_as_fast")) > 0
    assert 0 < on["ttft_ms"]["all"]["p50"] <= on["ttft_ms"]["all"]["p99"] <= on["ttft_ms"]["all"]["max"]


def test_survivors_go_on_without_a_killed_reader(small_images, places):
    arguments = ("--json", "--readers", "3", "--kill-reader", "1:0.5", "--seconds", "1", "--images", small_images)
    with running(*arguments) as process:
        report = json.loads(finished(process))
        assert_nothing_is_left(process.pid, places)
    (run,) = report["runs"]
    (death,) = run["deaths"]
    assert (death["rank"], death["injected"], death["raised"]) == (1, True, "PeerDied")
    assert death["signal"] in (signal.SIGKILL, None)  # older kernels tell the signal to the parent only
    assert death["detected_ms"] <= death["resumed_ms"] < 2000
    assert run["completed"] == run["offered"]
    assert run["mismatches"] == []
    assert run["collective"]["operations_by_path"].keys() <= {"cpu_one_shot", "cpu_two_shot"}


@pytest.mark.parametrize("readers", [2, 9], ids=["one is left, alone", "more than shared memory is for"])
def test_whoever_is_left_goes_on_in_any_number(readers, small_images, places):
    arguments = ("--readers", str(readers), "--kill-reader", "0:0.5", "--seconds", "1", "--images", small_images)
    with running("--json", *arguments) as process:
        report = json.loads(finished(process))
        assert_nothing_is_left(process.pid, places)
    (run,) = report["runs"]
    assert [death["rank"] for death in run["deaths"]] == [0]
    assert run["completed"] == run["offered"]
    assert sum(run["collective"]["operations_by_path"].values()) > 0
    assert ("gloo" in run["collective"]["operations_by_path"]) == (readers > 8)


def test_two_that_die_at_once_hang_nobody(small_images, places):
    with running("--json", "--readers", "4", "--seconds", "2", "--images", small_images) as process:
        wait_until_it_serves(process)
        for rank in (0, 2):
            (page,) = places[0].glob(f"demo:steps@*/reader-{rank}-*")
            os.kill(int(page.name.split("-")[2]), signal.SIGKILL)
        report = json.loads(finished(process, 1))
        assert_nothing_is_left(process.pid, places)
    (run,) = report["runs"]
    assert {death["rank"]: death["injected"] for death in run["deaths"]} == {0: False, 2: False}


def test_it_serves_metrics_that_name_a_slow_reader_meanwhile(small_images, places):
    arguments = ("--metrics-port", "0", "--slow-reader", "1:30", "--seconds", "4", "--images", small_images)
    with running(*arguments) as process:
        line = next(line for line in process.stderr if line.startswith("serving "))
        exporter = SimpleNamespace(url=line.split()[-1])
        excess = eventually(lambda: _excess_of_readers(exporter), every=0.1)
        assert excess["1"] > excess["0"]
        finished(process)
        assert_nothing_is_left(process.pid, places)


def _excess_of_readers(exporter: SimpleNamespace) -> dict[str, float] | None:
    found = scrape(exporter)
    excess = found.by("reader", "writer_blocked_excess_seconds_total", queue="demo:steps")
    answers = {labels["queue"] for labels, _ in found.all("queue_info")} - {"demo:steps"}
    enough = excess.get("1", 0) > 0.5 and answers == {"demo:answers:0", "demo:answers:1"}
    return excess if enough else None


def test_a_metrics_port_that_is_taken_is_one_clear_line(places):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with running("--metrics-port", port, "--seconds", "1") as process:
            _, errors = process.communicate(timeout=50)
            assert process.returncode == 1
            assert_nothing_is_left(process.pid, places)
    assert f"arena demo: can't serve metrics at 127.0.0.1 port {port}" in errors.splitlines()[-1]


def test_the_table_names_a_slow_reader(small_images, places):
    with running("--slow-reader", "1:30", "--seconds", "1", "--images", small_images) as process:
        table = finished(process)
        assert_nothing_is_left(process.pid, places)
    cells = [line.split("  ")[-1].strip() for line in table.splitlines() if line.startswith("writer blocked most by")]
    assert cells == ["reader 1"], table
    rows = [line.split() for line in table.splitlines()]
    assert ["fallbacks", "none"] in rows
    assert ["with", "a", "picture", "2"] in rows
    assert {"all-reduces, cpu_one_shot", "one takes, p50", "the same with gloo"} <= {
        line.strip().split("  ")[0] for line in table.splitlines()
    }
    assert "Every worker found the pixels that were sent, and every token is the layer's." in table


@pytest.mark.parametrize("to_all", [True, False], ids=["ctrl-c", "sigterm"])
def test_an_interrupt_ends_it_with_what_there_is(to_all, small_images, places):
    with running("--seconds", "60", "--images", small_images) as process:
        wait_until_it_serves(process)
        interrupted_at = time.monotonic()
        if to_all:
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.terminate()
        output, errors = process.communicate(timeout=20)
        assert time.monotonic() - interrupted_at < 8  # about one when the machine is free
        assert process.returncode == 128 + (signal.SIGINT if to_all else signal.SIGTERM)
        assert "Traceback" not in errors
        assert "Interrupted after" in output
        assert "time to first token, p99" in output
        assert_nothing_is_left(process.pid, places)


@pytest.mark.parametrize("words", ["loading torch", "arena on: starting 2 workers"])
def test_an_interrupt_before_anything_was_measured_says_so(words, small_images, places):
    with running("--seconds", "60", "--images", small_images) as process:
        wait_until_it_says(process, words)
        os.killpg(process.pid, signal.SIGINT)
        output, errors = process.communicate(timeout=40)
        assert (process.returncode, output) == (128 + signal.SIGINT, "")
        assert errors.splitlines()[-1] == "arena demo: interrupted before anything was measured"
        assert "Traceback" not in errors
        assert_nothing_is_left(process.pid, places)


def test_an_interrupt_that_was_swallowed_is_insisted_on():
    with Interrupts() as interrupts:
        interrupts.insist()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            interrupts.insist()


def test_workers_do_not_outlive_a_killed_engine(small_images, run_dir):
    with running("--seconds", "60", "--images", small_images) as process:
        wait_until_it_serves(process)
        assert len(members(process.pid)) >= 3
        process.kill()
        process.wait()
        assert_nothing_is_left(process.pid, [])


# --- what it refuses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--readers", "0"], "--readers takes 1 to 16, not 0"),
        (["--seconds", "-1"], "--seconds takes a number above 0, not -1"),
        (["--seconds", "nan"], "--seconds takes a number above 0, not nan"),
        (["--images", "/nowhere"], "--images takes a directory, and /nowhere is none"),
        (["--metrics-port", "-1"], "--metrics-port takes a port, or 0 for a free one, not -1"),
        (["--slow-reader", "1"], "--slow-reader takes RANK:MS, such as 1:20, not '1'"),
        (["--slow-reader", "1:-5"], "--slow-reader takes RANK:MS, neither of them negative, not '1:-5'"),
        (["--slow-reader", "2:5"], "--slow-reader names reader 2, and the readers are 0 to 1"),
        (["--kill-reader", "2:1"], "--kill-reader names reader 2, and the readers are 0 to 1"),
        (["--kill-reader", "1:99"], "--kill-reader takes a time before the end of the run, 10 s"),
        (
            ["--readers", "1", "--kill-reader", "0:1"],
            "--kill-reader needs --readers 2 or more: nobody would be left to answer",
        ),
    ],
)
def test_an_option_that_makes_no_sense_is_refused_in_one_line(arguments, sentence):
    refused = CliRunner().invoke(cli.app, ["demo", *arguments])
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert refused.stderr == f"arena demo: {sentence}\n"


def test_a_directory_without_a_photograph_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("no photograph")
    complaints: list[str] = []
    with pytest.raises(Refused, match=f"--images: {tmp_path} holds no photograph that can be decoded"):
        photographs(tmp_path, complaints.append)
    assert [complaint.split(":")[0] for complaint in complaints] == ["skipped notes.txt"]


# --- its parts -------------------------------------------------------------------------------------------------------


def small_picture() -> Picture:
    return Picture("small", torch.empty(200, PATCH_VALUES).random_(0, 256).div_(128).sub_(1))


def request(number: int, picture: Picture | None = None, length: int = 3) -> Request:
    return Request(number, 0.0, [number, number + 1], picture, length)


def test_a_seed_makes_the_same_requests_again():
    picture = small_picture()
    first, again, other = (plan(seed, 5.0, [0], [picture].__getitem__) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert [asked.arrival_s for asked in first] == sorted(asked.arrival_s for asked in first)


def test_percentiles_are_values_that_were_seen():
    assert spread(float(value) for value in range(1, 101)) == (100, 50.0, 90.0, 99.0, 100.0)
    assert spread([7.0]) == (1, 7.0, 7.0, 7.0, 7.0)
    assert spread([]) is None


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_the_shares_of_a_layer_add_up_exactly(parts):
    states = torch.randint(-4, 5, (16, HIDDEN)).float()
    whole = Layer(0, 1).partial_sum(states)
    assert torch.equal(sum(Layer(part, parts).partial_sum(states) for part in range(parts)), whole)


def test_a_digest_sees_a_changed_value_and_patches_in_the_wrong_order():
    picture = small_picture()
    sent = picture.stamp(1)
    assert int(digest(picture.pixels)) == sent
    assert int(digest(picture.pixels.roll(1, 0))) != sent
    picture.pixels[199, 1175] += 1 / 128
    assert int(digest(picture.pixels)) != sent


def test_a_stamp_tells_the_steps_apart():
    picture = small_picture()
    assert len({picture.stamp(step) for step in range(100)}) == 100


def test_a_wrong_answer_is_a_fault():
    sent = InFlight(Scheduler([request(0)]).next_step(4).step, {0: 5})
    sent.answers = {0: Answer(4, 0, {0: 1}, {0: 5}, lost=False), 1: Answer(4, 0, {0: 2}, {0: 6}, lost=False)}
    assert sent.faults() == ["step 4: reader 1 has other tokens", "step 4: reader 1 has other pixels than were sent"]


def test_a_wrong_token_is_found_where_it_begins():
    layer, picture = Layer(0, 1), small_picture()
    asked = request(0, picture)
    state = layer.prompt_state(asked.prompt, layer.embed_picture(picture.pixels))
    tokens: list[int] = []
    for position in range(3):
        tokens += sample(layer.partial_sum(state[None]))
        state = layer.token_state(tokens[-1], position)
    right, wrong = Tracked(asked, tokens=tokens), Tracked(request(0, picture), tokens=[tokens[0], -1, tokens[2]])
    assert wrong_tokens([right]) == []
    assert wrong_tokens([wrong]) == ["request 0: token 1 is not the layer's"]


def test_a_picture_larger_than_a_step_goes_alone():
    large = Picture("large", torch.zeros(1, PATCH_VALUES).expand(STEP_TOKENS * 4, PATCH_VALUES))
    scheduler = Scheduler([request(0), request(1, large), request(2)])
    scheduler.admit_arrivals(0.0)
    steps = [scheduler.next_step(number).step for number in range(3)]
    assert [[prefill.request for prefill in step.prefills] for step in steps] == [[0], [1], [2]]


def test_what_was_in_flight_when_a_worker_died_is_scheduled_again():
    scheduler = Scheduler([request(0), request(1)])
    scheduler.admit_arrivals(0.0)
    scheduler.next_step(0)
    scheduler.confirm({0: 7}, 0.1)
    scheduler.next_step(1)
    assert scheduler.roll_back() == {0: [7]}
    again = scheduler.next_step(2).step
    assert [prefill.request for prefill in again.prefills] == [1]
    assert again.decodes == [0]


def test_photographs_become_patches_of_normalised_pixels(tmp_path):
    path = tmp_path / "two-colours.png"
    image = Image.new("RGB", (56, 28), (0, 128, 255))
    image.paste((255, 128, 0), (28, 0, 56, 28))
    image.save(path)
    pixels = patches(path)
    assert pixels.shape == (8, PATCH_VALUES)
    assert pixels[0].view(3, 2, 14, 14).amax((1, 2, 3)).tolist() == [-1.0, 0.0, 127 / 128]
    assert pixels[3].view(3, 2, 14, 14).amin((1, 2, 3)).tolist() == [127 / 128, 0.0, -1.0]


def test_unreadable_photographs_are_skipped_with_a_message(tmp_path):
    Image.new("RGB", (40, 40)).save(tmp_path / "good.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "good.png").read_bytes()[:60])
    (tmp_path / "notes.txt").write_text("no photograph")
    complaints: list[str] = []
    (picture,) = photographs(tmp_path, complaints.append)
    assert picture.kind == "photograph"
    assert [complaint.split(":")[0] for complaint in complaints] == ["skipped cut.png", "skipped notes.txt"]


@pytest.mark.parametrize(("size", "fitted"), [((100, 60), (112, 56)), ((1, 9000), (28, 8988)), ((8000, 6000), None)])
def test_resolution_is_dynamic_within_bounds(size, fitted):
    width, height = dynamic_resolution(*size)
    assert width % 28 == height % 28 == 0
    assert width * height <= 16384 * 28 * 28 * 1.01
    assert fitted in (None, (width, height))


def test_synthetic_pictures_have_the_size_they_are_named_after():
    picture = synthetic(23)
    assert picture.kind == "23 MB"
    assert abs(picture.nbytes - 23_000_000) < PATCH_VALUES * 4
