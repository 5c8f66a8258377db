"""What steps are spent on: the clock of exchanges, the timeline of a few steps, and how a report shows it."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from torch.distributed import ProcessGroup

from rayrec.distributed.comm.trace import EXCHANGE, LOOKUP, span
from rayrec.train.report.timeline import timeline_section
from rayrec.train.worker.lockstep import Control
from rayrec.train.worker.timeline import MOST_SPANS, STEPS_BEFORE, ExchangeClock, Stalls, Timeline
from tests.ranks import on_ranks

ALONE = Control(0, 1, None)


def test_only_exchanges_count() -> None:
    clock = ExchangeClock()
    for name, began, ended in ((EXCHANGE, 1.0, 1.5), (LOOKUP, 2.0, 9.0), (EXCHANGE, 3.0, 3.25)):
        clock(name, began, ended)
    assert clock.seconds == 0.75


def trained(timeline: Timeline, steps: range) -> list[dict[str, Any]]:
    """What is told over some steps, each with one lookup."""
    told = []
    for step in steps:
        with span(LOOKUP):
            pass
        if (found := timeline.after_step(step)) is not None:
            told.append(found)
    return told


def test_a_stop_within_a_stop_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 2.0, 4.0, 5.0, 8.0, 10.0])
    monkeypatch.setattr("rayrec.train.worker.timeline.time.perf_counter", lambda: next(clock))
    stalls = Stalls()
    with stalls.measured(), stalls.measured():  # from 1 to 5, and from 2 to 4
        pass
    assert stalls.close() == 0.5
    assert stalls.close() == 0.0


def test_the_steps_after_the_first_ones_are_told_once() -> None:
    (found,) = trained(Timeline(ALONE, 3), range(101, 201))
    assert found["first_step"] == 101 + STEPS_BEFORE
    ((*spans,),) = found["ranks"]
    assert [name for name, _, _ in spans] == [LOOKUP] * 3
    starts = [start for _, start, _ in spans]
    assert starts == sorted(starts) and starts[0] >= 0 and all(ms >= 0 for _, _, ms in spans)


def test_none_is_told_where_none_is_wanted_or_there_are_too_few_steps() -> None:
    assert trained(Timeline(ALONE, 0), range(1, 100)) == []
    assert trained(Timeline(ALONE, 3), range(1, STEPS_BEFORE + 3)) == []
    assert len(trained(Timeline(ALONE, 3), range(1, STEPS_BEFORE + 4))) == 1


def test_what_comes_between_two_steps_begins_it_again() -> None:
    timeline = Timeline(ALONE, 3)
    assert trained(timeline, range(1, STEPS_BEFORE + 2)) == []
    timeline.interrupt()
    with span("evaluation"):
        pass
    (found,) = trained(timeline, range(STEPS_BEFORE + 2, 100))
    assert found["first_step"] == 2 * STEPS_BEFORE + 2
    assert [name for name, _, _ in found["ranks"][0]] == [LOOKUP] * 3


def test_an_interrupt_leaves_nobody_listening() -> None:
    timeline = Timeline(ALONE, 3)
    trained(timeline, range(1, STEPS_BEFORE + 2))
    timeline.interrupt()
    timeline.interrupt()
    trained(timeline, range(1, 2))
    assert timeline._spans == []


def test_the_spans_of_a_rank_are_limited() -> None:
    timeline = Timeline(ALONE, 1)
    trained(timeline, range(1, STEPS_BEFORE + 1))
    for _ in range(MOST_SPANS + 5):
        with span(LOOKUP):
            pass
    found = timeline.after_step(STEPS_BEFORE + 1)
    assert found is not None and len(found["ranks"][0]) == MOST_SPANS


def test_all_ranks_begin_at_once() -> None:
    for found in on_ranks(2, _late):
        slow, fast = (spans[0][1] for spans in found["ranks"])
        assert slow < 50 and fast < 50  # ms: the slow one's 200 ms lie before the common start


def _late(group: ProcessGroup) -> dict[str, Any]:
    timeline = Timeline(Control(group.rank(), 2, group), 1)
    for step in range(1, STEPS_BEFORE):
        timeline.after_step(step)
    time.sleep(0.2 * (group.rank() == 0))
    (found,) = trained(timeline, range(STEPS_BEFORE, STEPS_BEFORE + 2))
    return found


LINE = {
    "first_step": 1021,
    "ranks": [
        [["rows", 0.0, 1.0], ["forward", 1.0, 4.0], ["lookup", 1.5, 3.0], ["exchange", 1.2, 0.5], ["update", 8.0, 1.0]],
        [["rows", 0.0, 2.0], ["forward", 2.0, 2.0], ["lookup", 2.5, 1.0], ["update", 8.0, 2.0]],
    ],
}


def cells(html: str) -> list[list[str]]:
    return [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", html)[1:]]


def test_a_report_shows_each_rank_beside_what_was_planned() -> None:
    html = timeline_section(LINE, [{"rank": 0, "lookup_s": 0.001}, {"rank": 1, "lookup_s": 0.003}])
    assert "from step 1,021 on" in html
    assert cells(html) == [
        ["0", "6.00 ms", "1.00 ms", "0.50 ms", "3.00 ms", "1.50 ×", "0.50 ×"],
        ["1", "6.00 ms", "2.00 ms", "0.00 ms", "1.00 ms", "0.50 ×", "1.50 ×"],
    ]
    drawn = re.findall(r"<rect class='span span-(\w+)' x='([\d.]+)' y='(\d+)' width='([\d.]+)' height='(\d+)'", html)
    assert len(drawn) == 9
    by_name = {(name, y): (float(x), float(width)) for name, x, y, width, _ in drawn}
    scale = (1100 - 70 - 10) / 10.0  # 10 ms are the end of the last span
    assert by_name["forward", "6"] == (pytest.approx(70 + 1.0 * scale, abs=0.06), pytest.approx(4.0 * scale, abs=0.06))
    assert {y for (name, y) in by_name if name == "lookup"} == {"24", "72"}  # under the step's lane, rank by rank
    assert "span-backward" not in html and html.count("class='key span-") == 5


def test_several_steps_are_told_as_their_mean() -> None:
    spans = [["update", 0.0, 1.0], ["update", 5.0, 3.0], ["lookup", 1.0, 4.0]]
    ((_, step, _, _, lookup, share, planned),) = cells(timeline_section({"ranks": [spans]}, []))
    assert (step, lookup, share, planned) == ("2.00 ms", "2.00 ms", "1.00 ×", "–")


@pytest.mark.parametrize(
    "ranks",
    [None, 7, [], [[]], [7], [[7]], [[["lookup", 1.0]]], [[["<b>", 0.0, 1.0]]], [[["lookup", "x", 1.0]]],
     [[["lookup", float("nan"), 1.0]]], [[["lookup", 0.0, float("inf")]]], [[["lookup", -1.0, 1.0]]]],
)  # fmt: skip
def test_what_cannot_be_read_is_not_shown(ranks: object) -> None:
    assert timeline_section({"ranks": ranks}, []) == ""
