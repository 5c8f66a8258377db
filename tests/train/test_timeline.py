"""What steps are spent on: the clock of exchanges, the timeline of a few steps, and how a report shows it."""

from __future__ import annotations

import re

import pytest

from rayrec.distributed.comm.trace import EXCHANGE, LOOKUP
from rayrec.train.report.timeline import timeline_section
from rayrec.train.worker.profiling import ExchangeClock, Stalls


def test_only_exchanges_count() -> None:
    clock = ExchangeClock()
    for name, began, ended in ((EXCHANGE, 1.0, 1.5), (LOOKUP, 2.0, 9.0), (EXCHANGE, 3.0, 3.25)):
        clock(name, began, ended)
    assert clock.seconds == 0.75


def test_a_stop_within_a_stop_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 2.0, 4.0, 5.0, 8.0, 10.0])
    monkeypatch.setattr("rayrec.train.worker.profiling.time.perf_counter", lambda: next(clock))
    stalls = Stalls()
    with stalls.measured(), stalls.measured():  # from 1 to 5, and from 2 to 4
        pass
    assert stalls.close() == 0.5
    assert stalls.close() == 0.0


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
