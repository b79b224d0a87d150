"""What the monitor says and draws, from moments made by hand: every width, every state, and nothing that lies."""

from dataclasses import replace
from math import inf

import pytest
import torch
from rich.cells import cell_len

from arena import MessageQueue, QueueConfig
from arena.probe import BlockRecord
from telemetry.health import Verdict
from telemetry.monitor import maps, units, words
from telemetry.monitor.facts import Histogram, Moment, WaitFacts, WriterFacts, plain
from telemetry.monitor.lines import Column, Span, table, text_of
from telemetry.monitor.live import pressed
from telemetry.monitor.local import Pages
from telemetry.monitor.recent import WINDOW_S, Recent
from telemetry.monitor.remote import Metrics
from telemetry.monitor.report import as_json
from telemetry.monitor.screen import HELP, NARROWEST, Choices, Sort, draw, snapshot
from telemetry.monitor.words import BLOCKED_S, LONG_S, Severity
from tests.support import screenshot
from tests.support.moments import group, moment, queue, rank, reader, stall

AS_IT_IS = Choices()


def seen(*moments: Moment) -> Recent:
    recent = Recent()
    for one in moments:
        recent.add(one)
    return recent


def says(*queues, **options):
    one = moment(*queues, **options)
    return words.of_moment(one, seen(one))[0]


def drawn(width=120, height=40, choices=AS_IT_IS, scene=None):
    one, recent = scene or stall()
    return [text_of(line) for line in draw(one, recent, choices, width, height)]


# --- the verdict -----------------------------------------------------------------------------------------------------


def test_a_blocked_writer_is_said_first_with_the_reader_its_process_and_its_state():
    said = says(
        queue(
            wait=WaitFacts(12.4, (1,)),
            readers=(reader(0), reader(1, verdict=Verdict.STALLED, state="working", silent_s=13.0)),
        )
    )
    assert said.severity is Severity.STALLED
    assert said.sentence == (
        "BLOCKED 12.4 s by reader 1 (pid 4711): STALLED in its own code, no sign of life for 13 s · queue steps"
    )


def test_a_wait_that_nobody_notices_is_not_called_blocked():
    assert says(queue(wait=WaitFacts(BLOCKED_S / 2, (1,)))).word == "IDLE"


def test_a_reader_that_works_and_is_waited_for_is_degraded_until_it_takes_long():
    for lasted_s, severity in ((LONG_S - 0.1, Severity.DEGRADED), (LONG_S, Severity.STALLED)):
        said = says(queue(wait=WaitFacts(lasted_s, (1,)), readers=(reader(0), reader(1, state="working"))))
        assert (said.severity, "in its own code, last sign of life" in said.sentence) == (severity, True)


@pytest.mark.parametrize(
    ("ranks", "name"),
    [((0, 1), "readers 0, 1"), ((0, 1, 2, 3), "all 4 readers"), ((1,), "reader 1 (pid 4711)"), ((7,), "reader 7: not")],
)
def test_several_holders_are_counted_and_the_worst_is_named(ranks, name):
    assert f"by {name}" in says(queue(wait=WaitFacts(3.0, ranks))).sentence


@pytest.mark.parametrize(
    ("verdict", "severity", "words_said"),
    [
        (Verdict.STALLED, Severity.DEGRADED, "took nothing and gave no sign of life"),
        (Verdict.STOPPED, Severity.DEGRADED, "is held by a signal or a debugger; the ring has 52 of 64 slots left"),
        (Verdict.GONE, Severity.DEGRADED, "has ended without leaving"),
        (Verdict.LAGGING, Severity.DEGRADED, "is 12 messages behind, 1.5 s, and does not catch up"),
    ],
)
def test_a_reader_in_trouble_is_named_before_the_writer_waits(verdict, severity, words_said):
    said = says(queue(readers=(reader(0), reader(2, verdict=verdict, lag=12, lag_s=1.5))))
    assert (said.severity, said.word) == (severity, verdict.name)
    assert "reader 2 (pid 4712)" in said.sentence
    assert words_said in said.sentence


def test_a_writer_that_is_stopped_or_gone_is_a_stall():
    stopped = queue(writer=WriterFacts(9, True, "T", "working", 1.0, 5))
    gone = queue(writer=WriterFacts(9, False, "X", "working", 1.0, 5))
    assert (says(stopped).word, says(stopped).severity) == ("STOPPED", Severity.STALLED)
    assert (says(gone).word, says(gone).severity) == ("ORPHANED", Severity.STALLED)
    assert "4 readers live" in says(gone).sentence
    waiting = replace(stopped, wait=WaitFacts(9.0, (1,)))
    assert says(waiting).word == "STOPPED", "whatever it waited for, now it is itself that stands"


def test_a_queue_of_the_dead_is_dead():
    dead = replace(queue(), writer=WriterFacts(9, False, "X", "", 90.0, 5), readers=(reader(0, alive=False),))
    assert (says(dead).word, says(dead).severity) == ("DEAD", Severity.HEALTHY), "nobody waits on it"
    assert says(dead, replace(dead, label="more")).sentence.startswith(
        "DEAD: all 2 queues have ended, the last process"
    )
    assert says(queue("a"), dead).sentence.endswith("no message in the last seconds · 1 dead queue left behind")
    one = moment(dead, queue("well"))
    rows = [line for line in drawn(scene=(one, seen(one))) if "4 of 4" not in line and line.startswith(("  ", "▶"))]
    assert [row.split()[1 if row[0] == "▶" else 0] for row in rows[1:3]] == ["well", "steps"], "the dead come last"


def test_the_worst_queue_has_the_first_line_and_the_others_are_counted():
    lagging = queue("a", readers=(reader(0, verdict=Verdict.LAGGING, lag=9),))
    blocked = queue("b", wait=WaitFacts(9.0, (0,)))
    said = says(lagging, queue("c"), blocked)
    assert said.sentence.endswith("queue b · 1 more in trouble")


def test_a_writer_that_waits_much_in_short_waits_is_slowed_by_the_reader_that_costs_most():
    before = queue()
    costly = [
        reader(rank, blocked_s=0.2 * rank + 4 * (rank == 2), excess_s=0.1 * rank + 3 * (rank == 2)) for rank in range(4)
    ]
    after = replace(before, waited_s=before.waited_s + 5, published=before.published + 9, readers=tuple(costly))
    looks = moment(before), moment(after, at_s=10.0)
    said = words.of_moment(looks[1], seen(*looks))[0]
    assert said.severity is Severity.DEGRADED, "one of four holds the others up"
    assert said.sentence.startswith(
        "SLOWED: the writer waited 50 % of the last seconds, 40 % for reader 2 (pid 4712), 30 %"
    )


def test_a_writer_that_waits_for_all_readers_alike_is_slowed_and_healthy():
    before = queue()
    alike = [reader(rank, blocked_s=0.2 * rank + 1, excess_s=0.1 * rank + 0.2) for rank in range(4)]
    looks = moment(before), moment(replace(before, waited_s=6.0, readers=tuple(alike)), at_s=10.0)
    said = words.of_moment(looks[1], seen(*looks))[0]
    assert (said.word, said.severity) == ("SLOWED", Severity.HEALTHY)


def test_where_all_is_well_it_says_so():
    assert says(queue("a"), queue("b")).sentence == "IDLE: 2 queues, 8 readers, no message in the last seconds"
    assert says().sentence == "NO QUEUE in /run/user/1000/arena; waiting for one"


# --- over the last seconds -------------------------------------------------------------------------------------------


def test_rates_and_shares_are_those_of_the_window():
    looks = [moment(queue(published=100 * at, waited_s=0.3 * at), at_s=float(at)) for at in range(40)]
    recent = seen(*looks)
    rates = recent.queue(looks[-1].queues[0])
    assert rates.messages_per_s == pytest.approx(100)
    assert rates.blocked == pytest.approx(0.3)
    assert len(recent._moments["steps", "5f3a"]) <= WINDOW_S + 2


def test_after_a_single_look_nothing_is_made_up():
    one = moment(queue())
    rates = seen(one).queue(one.queues[0])
    assert (rates.messages_per_s, rates.blocked, rates.fallbacks) == (None, None, None)
    assert as_json(one, seen(one))["queues"][0]["messages_per_s"] is None


def test_hold_times_are_recent_ones_or_else_all_there_are():
    fast = Histogram((0.001, 0.1, inf), (1000, 0, 0))
    slow = Histogram((0.001, 0.1, inf), (1000, 10, 0))
    first, then = (
        moment(queue(readers=(reader(0, hold=fast),))),
        moment(queue(readers=(reader(0, hold=slow),)), at_s=1.0),
    )
    recent = seen(first, then)
    assert recent.reader(then.queues[0], then.queues[0].readers[0]).hold_p50_s > 0.001
    still = moment(queue(readers=(reader(0, hold=slow),)), at_s=30.0)
    recent = seen(then, still)
    assert recent.reader(still.queues[0], still.queues[0].readers[0]).hold_p50_s < 0.001


def test_a_replaced_reader_starts_anew():
    old, new = Histogram((1.0, inf), (9, 0)), Histogram((1.0, inf), (2, 0))
    assert new.since(old) is new
    assert new.quantile(1.0) == 1.0
    assert Histogram((1.0, inf), (0, 3)).quantile(0.5) == 1.0, "beyond the last bound nothing is known"


def test_what_an_exporter_said_last_is_not_taken_for_news():
    first = moment(queue())
    recent = seen(first, replace(first, stale_s=3.0, time_s=first.time_s + 3))
    assert len(recent._moments["steps", "5f3a"]) == 1


def test_a_rank_s_path_and_declines_are_those_of_the_window_or_else_of_all():
    before = group(ranks=(rank(0), rank(1)))
    now = {"one_shot": 96_100, "symm_mem_multimem": 33_000}
    busy = rank(0, operations=now, nbytes={"one_shot": 1, "nccl": 5_000}, declines={"too_large": 32_000, "dtype": 7})
    after = group(ranks=(busy, rank(1), rank(2)))
    looks = moment(groups=(before,)), moment(groups=(after,), at_s=10.0)
    recent = seen(*looks)
    first, still, new = (recent.rank(after, one) for one in after.ranks)
    assert (first.path, first.declined, first.declines) == ("symm_mem_multimem", "dtype", 7)
    assert (first.operations_per_s, first.bytes_per_s) == (pytest.approx(110.0), pytest.approx(500.0))
    assert (still.path, still.declined, still.operations_per_s, still.lately) == ("one_shot", "too_large", 0.0, False)
    assert (new.path, new.operations_per_s) == ("one_shot", None)


# --- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 s"),
        (3e-8, "<1 µs"),
        (3.4e-4, "340 µs"),
        (0.0012, "1.2 ms"),
        (12.4, "12 s"),
        (300, "5.0 min"),
        (1e6, "12 d"),
    ],
)
def test_durations(value, text):
    assert units.seconds(value) == text


def test_no_number_is_wider_than_its_column():
    for exponent in range(-9, 7):
        for mantissa in (1.0, 9.949, 9.96, 99.49, 999.4, 999.6):
            value = mantissa * 10**exponent
            assert max(len(form(value)) for form in (units.seconds, units.size, units.count)) <= 7, value
    assert units.share(0.001) == "<1 %"
    assert units.share(None) == units.seconds(None) == "–"


# --- the screen ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ascii", [False, True])
def test_no_line_is_wider_than_the_terminal_and_there_are_not_more_of_them(ascii):
    scene = stall()
    for width in (1, 5, 19, 20, 39, 40, 41, 59, 60, 61, 79, 80, 100, 120, 139, 160, 200, 239, 240):
        for height in (1, 2, 5, 9, 14, 24, 50):
            for help in (False, True):
                lines = drawn(width, height, Choices(ascii=ascii, help=help), scene)
                assert len(lines) <= height
                assert max(map(cell_len, lines)) <= width
                assert not ascii or all(line.isascii() for line in lines)
        assert max(cell_len(text_of(line)) for line in snapshot(*scene, Choices(), width)) <= width


def test_the_verdict_comes_first_however_small_the_terminal():
    assert drawn(120, 1)[0].startswith("BLOCKED 12.4 s by reader 1 (pid 4711): STALLED")
    assert drawn(20, 3)[:2] == ["BLOCKED 12.4 s by", "reader 1 (pid 4711):"]
    assert len(drawn(NARROWEST - 1, 30)) <= 3


def test_columns_go_by_importance_and_the_names_stay():
    for width, present, absent in (
        (60, {"READER", "VERDICT", "LAG", "EXCESS"}, {"STARVED", "RELATION", "HELD"}),
        (120, {"READER", "PID", "VERDICT", "STATE", "LAG", "BLOCKED", "EXCESS", "HOLD", "STARVED"}, {"RELATION"}),
        (240, {"READER", "RELATION", "PIN", "GATE", "HELD", "TREND"}, set()),
    ):
        (titles,) = [line for line in drawn(width) if line.startswith("READER")]
        assert present <= set(titles.split())
        assert not absent & set(titles.split())


def test_a_table_keeps_its_first_column_whatever_there_is_room_for():
    columns = [
        Column[int]("NAME", 10, 0, lambda row: Span(f"row {row}"), left=True),
        Column[int]("X", 5, 1, lambda row: Span("x")),
    ]
    assert [text_of(line) for line in table(columns, [1], 6)] == ["NAME", "row 1"]


def test_the_waited_for_reader_is_marked_and_stands_first():
    lines = drawn(120)
    at = next(number for number, line in enumerate(lines) if line.startswith("READER"))
    assert lines[at + 1].split()[:3] == ["◀1", "4711", "STALLED"]


def test_the_ring_shows_who_holds_what_and_who_is_where():
    one, _ = stall()
    steps = one.queue("steps")
    assert [text_of(line) for line in maps.ring(steps, 80)] == ["░" * 64, f"{' ' * 46}1W"]
    assert text_of(maps.ring(steps, 80, ascii=True)[0]) == "1" * 64
    half = queue(readers=(reader(0, lag=4), reader(1, lag=2)), writer=WriterFacts(1, True, "S", "", 0, 8), slots=8)
    assert [text_of(line) for line in maps.ring(half, 8)] == ["····░░██", "W   0 1"]
    assert len(text_of(maps.ring(replace(half, slots=1000), 100)[0])) == 100


def test_the_arena_shows_who_alone_holds_a_range():
    blocks = [
        BlockRecord(0, 0, 250, (1,), False),
        BlockRecord(0, 500, 250, (0, 1), False),
        BlockRecord(1, 0, 500, (), True),
    ]
    assert [text_of(line) for line in maps.arena(blocks, [(0, 1000), (1, 1000)], 8)] == ["11··++··", "wwww····"]
    assert [text_of(line) for line in maps.arena(blocks, [(0, 2000), (1, 500)], 16)] == ["11··++··········", "wwww"]
    tiny = [BlockRecord(0, 999, 1, (2,), False)]
    assert text_of(maps.arena(tiny, [(0, 1000)], 10)[0]) == "·········2", "a small block is not lost"
    assert text_of(maps.arena([], [(0, 1 << 40), (1, 1)], 10)[1]) == "·", "nor a small segment"


def test_the_true_sizes_of_segments_come_from_the_writer_s_page(run_dir):
    with (
        MessageQueue(1, config=QueueConfig(name="steps", segment_bytes=1 << 20)) as writer,
        MessageQueue.create_from_handle(writer.export_handle(), 0) as reader,
    ):
        for nbytes in (1 << 19, 6 << 20):
            writer.enqueue(torch.zeros(nbytes, dtype=torch.uint8))
            reader.dequeue(timeout=10)
        writer.statistics()
        source = Pages()
        (seen,) = source.look().queues
        source.close()
    assert [number for number, _ in seen.segments] == [0, 1]
    assert seen.segments[0][1] == 1 << 20
    assert seen.segments[1][1] >= 6 << 20
    assert sum(nbytes for _, nbytes in seen.segments) == seen.arena.size


def test_where_no_sizes_are_told_segments_are_taken_to_be_of_one_size():
    beyond = [BlockRecord(1, 0, 5000, (), True)]
    assert maps.guessed(beyond, 2, 2000) == [(0, 1000), (1, 5000)]


def ranks_drawn(width, height=60, **changes):
    scene = moment(queue(), groups=(group(world=8, **changes),))
    lines = drawn(width, height, scene=(scene, seen(scene)))
    at = next((at for at, line in enumerate(lines) if line.startswith("all-reduce: ")), len(lines))
    return [line for line in lines[at:-1] if line]


def test_communicators_have_a_table_that_loses_columns_and_rows_and_is_never_torn():
    for width, titles in (
        (40, ["GROUP", "RANK", "PATH", "OPS/S"]),
        (60, ["GROUP", "RANK", "PATH", "OPS/S", "BYTES/S"]),
        (120, ["GROUP", "RANK", "PROCESS", "PID", "PATH", "OPS/S", "BYTES/S", "DECLINED", "OPS"]),
    ):
        head, columns, *rows = ranks_drawn(width)
        assert head.startswith("all-reduce: 8 of 8 ranks on cuda:0")
        assert columns.split() == titles
        assert [row.split()[:2] for row in rows] == [["tp:0", str(number)] for number in range(8)]
    assert "too_large 32 k" in rows[0]
    assert ranks_drawn(120, 29)[-1].startswith("… ")
    assert ranks_drawn(120, 20) == []


def test_a_rank_that_ended_stands_first_and_says_so():
    ranks = (rank(0), rank(1, alive=False, process="X"), rank(2, process="T"))
    rows = ranks_drawn(120, ranks=ranks)[2:]
    assert [row.split()[1:3] for row in rows] == [["1", "ENDED"], ["2", "STOPPED"], ["0", "alive"]]


def test_communicators_without_a_queue_are_shown_and_several_are_counted():
    scene = moment(groups=(group("a", 1), group("b", 2)))
    lines = drawn(100, 12, scene=(scene, seen(scene)))
    assert lines[0].startswith("NO QUEUE")
    assert "all-reduce: 2 groups" in lines
    paper = [text_of(line) for line in snapshot(scene, seen(scene), Choices(), 100)]
    assert sum(line.startswith(("a ", "b ")) for line in paper) == 3
    assert as_json(scene, seen(scene))["allreduce"][1]["ranks"][1]["path"] == "one_shot"
    assert not scene.only("steps").groups


def test_a_sparkline_has_its_newest_value_at_the_end():
    assert maps.sparkline([0, 1, 4, 8], 3) == "▂▅█"
    assert maps.sparkline([0, 0], 5, 8) == "▁▁"
    assert maps.sparkline([], 5) == ""
    assert maps.sparkline([8], 5, 8, ascii=True).isascii()


def test_more_queues_than_lines_scroll_around_the_chosen_one():
    queues = [queue(f"q{number:02}") for number in range(16)]
    one = moment(*queues)
    recent = seen(one)
    lines = drawn(80, 18, Choices(chosen="q12", sort=Sort.NAME), (one, recent))
    assert any(line.startswith("▶ q12") for line in lines)
    assert any("more queues" in line for line in lines)
    assert sum(line.startswith(("READER", "     0")) for line in lines) == 2, "at least one reader"
    assert lines[-1].startswith("q quit")


def test_a_name_from_elsewhere_can_not_write_on_the_terminal():
    assert plain("a\x1b[2Jb\nü") == "a?[2Jb??"


def test_troubles_are_told_at_the_end_and_counted_beyond_two():
    one = moment(queue(), troubles=("page a", "page b", "page c"))
    lines = drawn(120, 40, Choices(), (one, seen(one)))
    assert [line for line in lines if line.startswith("not read")] == ["not read: page a", "not read: 2 more"]


def test_help_explains_every_title_that_is_not_plain():
    text = "\n".join(HELP)
    for title in ("BLOCKED", "FULL", "EXCESS", "STARVED", "HOLD", "SILENT", "OFF PATH", "TREND", "READERS"):
        assert title in text
    assert "quit" in "\n".join(drawn(80, 30, Choices(help=True)))


def test_keys_change_what_is_shown():
    one, recent = stall()

    def after(*keys: str) -> Choices:
        choices = Choices()
        for key in keys:
            choices = pressed(key, choices, one, recent)
        return choices

    assert after(" ").paused and not after(" ", "p").paused
    assert [after(*"s" * count).sort for count in range(5)] == [Sort.BLAME, Sort.LAG, Sort.HOLD, Sort.NAME, Sort.BLAME]
    assert after("down").chosen == "answers-0", "below the worst one, which is shown without a choice"
    assert after("down", "j", "down").chosen == "answers-2"
    assert after("up").chosen == "answers-3"
    assert after("k", "down").chosen == "steps", "round and round"
    assert after("enter").alone
    assert after("down", "enter", "escape") == Choices()
    assert after("h").help and not after("?", "q").help
    assert after("x", "~") == Choices()


def test_a_queue_alone_is_shown_without_the_others():
    lines = drawn(120, 40, Choices(chosen="answers-2", alone=True))
    assert any(line.lstrip().startswith("answers-2") for line in lines)
    assert not any("answers-1" in line for line in lines)


def test_the_picture_in_the_readme_is_what_the_monitor_draws():
    assert screenshot.TOP.read_text() == screenshot.top(), "run: python -m tests.support.screenshot"


@pytest.mark.parametrize("url", ["", "foo", "ftp://h/metrics", "http://", "http://h:port/", "file:///etc/passwd"])
def test_what_is_no_url_of_a_web_server_is_refused(url):
    with pytest.raises(ValueError):
        Metrics(url)
