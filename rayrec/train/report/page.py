"""A run's record as one HTML page. Everything is inline: the page needs no network and can be mailed or archived."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from rayrec.train.report.evaluations import by_time_table, count_text, epoch_text, evaluations_table, figure_text
from rayrec.train.report.exports import exports_table
from rayrec.train.report.importance import importance_table
from rayrec.train.report.plan import memory_section, plan_section, time_section
from rayrec.train.report.run import ENDS, Line, RunRecord, history, number, of_task, task_names
from rayrec.train.report.skipped import skipped_rows, skipped_section
from rayrec.train.report.svg import Chart, Mark, Points, evenly, svg_chart
from rayrec.train.report.timeline import timeline_section

MOST_EVENTS, MOST_MARKS = 200, 150
KEY = re.compile(r"^(\s*(?:- )*)([\w.\-]+)(?=:)", re.MULTILINE)


def page(run: RunRecord, now: float) -> str:
    """The whole HTML document; `now` (unix seconds) is the time of writing that it states."""
    sections = [
        _header(run),
        _notices(run),
        _cards(run),
        _charts(run),
        _section("Evaluations", evaluations_table(run.evals)),
        _section("Last evaluation by time", by_time_table(run.evals)),
        _section("Permutation importance", importance_table(run.importance)),
        _section("Exports", exports_table(run.exports, run.path)),
        _section("Sharding plan", plan_section(run.plan, run.table_bits) if run.plan and run.plan.plan else ""),
        _section("Memory by rank", memory_section(run.memory) if run.memory else ""),
        _section("Predicted time by rank", time_section(run.times) if run.times else ""),
        _section("Steps by rank", timeline_section(run.timeline, run.times) if run.timeline else ""),
        _section("Profiles", _profiles(run)),
        _section("Rows left out", skipped_section(run.events)),
        _section("Events", _events(run)),
        _section("Configuration", _config(run)),
        f"<footer>rayrec · {escape(str(run.path))} · written {_clock(now)}</footer>",
    ]
    style, script = (Path(__file__).with_name(name).read_text("utf-8") for name in ("report.css", "report.js"))
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(run.name)} · rayrec</title><link rel='icon' href='data:,'>\n<style>{style}</style></head>\n"
        f"<body><main>{''.join(sections)}</main>\n<script>{script}</script></body></html>\n"
    )


def _header(run: RunRecord) -> str:
    when = f"started {_clock(run.first_time)}" if run.first_time is not None else ""
    return (
        f"<header><h1>{escape(run.name)}</h1><span class='status {run.status}'>{run.status}</span>"
        f"<span class='when'>{when}</span></header>"
    )


def _notices(run: RunRecord) -> str:
    """What a reader must know before the figures: how it ended, what could not be read."""
    notices = []
    if run.status in ENDS:
        verb = "failed" if run.status == "failed" else "was interrupted"
        notices.append(("failed", f"The run {verb}. {(run.end or {}).get('message', '')}"))
    elif run.status == "unfinished" and run.last_time is not None:
        notices.append(("", f"No result yet: still running, or ended early. Last entry {_clock(run.last_time)}."))
    recovered = [line for line in run.events if line.get("event") == "recovered"]
    if recovered:
        times = "once" if len(recovered) == 1 else f"{len(recovered)} times"
        notices.append(("recovered", f"Recovered {times}: {recovered[-1].get('message', '')}"))
    skipped = skipped_rows(run.events)
    if skipped:
        notices.append(
            ("", f"Left out {skipped:,} row{'' if skipped == 1 else 's'} that could not be used; see below.")
        )
    warned = (run.result or {}).get("warnings")
    notices += [("", f"Warning: {text}") for text in (warned if isinstance(warned, list) else [])]
    notices += [("failed", f"Not shown: {problem}") for problem in run.problems]
    return "".join(f"<p class='notice {kind}'>{escape(text)}</p>" for kind, text in notices)


def _cards(run: RunRecord) -> str:
    result = run.result or {}
    evaluation = run.evals[-1] if run.evals else result.get("eval") or {}
    rates = [rate for line in run.train if (rate := number(line, "samples_per_second"))]
    rate = number(result, "samples_per_second") or (sorted(rates)[len(rates) // 2] if rates else None)
    train = run.train[-1] if run.train else {}
    world = number(result, "world_size") or (run.plan.min_world_size if run.plan else None)
    checkpoint = str(result.get("checkpoint") or _last_checkpoint(run) or "")
    seconds = run.last_time - run.first_time if run.first_time is not None and run.last_time is not None else None
    attempts = max((int(number(line, "attempt") or 0) for line in run.lines), default=0)
    cards = [
        *(_number_cards if "rmse" in {**train, **evaluation} else _binary_cards)(run, train, evaluation),
        ("Throughput", f"{rate:,.0f}" if rate else "–", "samples / s", ""),
        ("Waiting for data", *_waited(run), ""),
        ("Workers", f"{world:.0f}" if world else "–", f"attempt {attempts}" if attempts > 1 else "", ""),
        ("Steps", f"{run.steps:,}", ", ".join(filter(None, [_epochs(run), _duration(seconds)])), ""),
        *_best_card(result.get("best")),
        ("Checkpoint", checkpoint.rstrip("/").rsplit("/", 1)[-1] or "–", checkpoint, ""),
    ]
    return "<div class='cards'>" + "".join(_card(*card) for card in cards) + "</div>"


Card = tuple[str, str, str, str]  # name, value, what it is about, look


def _best_card(best: object) -> list[Card]:
    """The checkpoint that `storage.keep_best` kept, if the run has one."""
    if not isinstance(best, dict) or number(best, "value") is None:
        return []
    about = f"{best.get('metric')} {number(best, 'value'):.4f}; read with --checkpoint best"
    return [("Best checkpoint", f"step {count_text(best, 'step')}", about, "")]


def _binary_cards(run: RunRecord, train: Line, evaluation: Line) -> list[Card]:
    """Of a label that is 0 or 1."""
    return [
        ("AUC", figure_text(evaluation, "auc"), _best(run.evals, "auc", max) or _training(train, "auc"), "lead"),
        (
            "Normalized entropy",
            figure_text(evaluation, "ne"),
            _best(run.evals, "ne", min) or _training(train, "ne"),
            "lead",
        ),
        (
            "Log loss",
            figure_text(evaluation, "logloss"),
            _evaluated_on(evaluation),
            "lead",
        ),
        ("Calibration", figure_text(evaluation, "calibration"), "predicted / observed positives", "lead"),
    ]


def _number_cards(run: RunRecord, train: Line, evaluation: Line) -> list[Card]:
    """Of a label that is a number."""
    return [
        ("RMSE", figure_text(evaluation, "rmse"), _best(run.evals, "rmse", min) or _training(train, "rmse"), "lead"),
        ("R²", figure_text(evaluation, "r2"), _best(run.evals, "r2", max) or _training(train, "r2"), "lead"),
        ("MAE", figure_text(evaluation, "mae"), _evaluated_on(evaluation), "lead"),
        (
            "Mean",
            figure_text(evaluation, "prediction_mean"),
            f"labels: {figure_text(evaluation, 'label_mean')}",
            "lead",
        ),
    ]


def _evaluated_on(evaluation: Line) -> str:
    samples = number(evaluation, "samples")
    return f"evaluated on {samples:,.0f} rows" if samples else ""


def _waited(run: RunRecord) -> tuple[str, str]:
    """The part of the training time in which some worker waited for rows: of the whole run, or of what is known."""
    whole = (run.result or {}).get("train")
    whole = whole if isinstance(whole, dict) else {}
    fraction, seconds = number(whole, "data_wait_fraction"), number(whole, "seconds")
    if fraction is not None:
        return f"{fraction:.1%}", f"of {_duration(seconds)} of steps" if seconds else "of the training time"
    known = sorted(part for line in run.train if (part := number(line, "data_wait_fraction")) is not None)
    return (f"{known[len(known) // 2]:.1%}", "of the time, median") if known else ("–", "")


def _card(name: str, value: str, about: str, kind: str) -> str:
    hint = escape(about, quote=True)
    return (
        f"<div class='card {kind}'><div class='name'>{escape(name)}</div><div class='value' title='{escape(value)}'>"
        f"{escape(value)}</div><div class='about' title='{hint}'>{escape(about)}</div></div>"
    )


def _charts(run: RunRecord) -> str:
    standing, undone = history(run.train)
    evals, _ = history(run.evals)
    shown = [line for line in run.events if number(line, "step") is not None]
    saved = [line for line in shown if line.get("event") == "checkpoint"]
    others = [line for line in shown if line.get("event") != "checkpoint"]
    drawn_events = [*evenly(saved, MOST_MARKS), *evenly(others, MOST_MARKS)]
    marks = [_mark(line) for line in (shown if len(shown) <= MOST_MARKS else drawn_events)]
    names = task_names([*run.train, *run.evals])

    def curve(key: str, dots: str | None = None, task: str = "", **look: object) -> Chart:
        train, lost, scored = (of_task(lines, task) if task else lines for lines in (standing, undone, evals))
        return Chart(
            curve=_points(train, key),
            undone=_points(lost, key),
            dots=_points(scored, dots) if dots else (),
            marks=marks,
            **look,  # type: ignore[arg-type]
        )

    four = "{:.4f}".format
    ne, auc, calibration = "Normalized entropy", "AUC", "Calibration"
    # The loss of several labels is their sum, which no evaluation has.
    numbers = not names and any("rmse" in line for line in run.train)
    dots = None if names else "mse" if numbers else "logloss"
    title = "Loss" if names else "Squared error" if numbers else "Log loss"
    charts = [curve("loss", dots, title=title, unit=four, smooth=True)]
    for task, of in [(name, f", {name}") for name in names] or [("", "")]:
        if any("rmse" in line for line in (of_task(run.train, task) if task else run.train)):
            charts += [
                curve("rmse", "rmse", task, title="RMSE" + of, unit=four, smooth=True, low=0.0),
                curve("r2", "r2", task, title="R²" + of, unit=four, smooth=True, reference=(0.0, "mean of the labels")),
            ]
            continue
        charts += [
            curve("ne", "ne", task, title=ne + of, unit=four, smooth=True, reference=(1.0, "base rate")),
            curve("auc", "auc", task, title=auc + of, unit=four, smooth=True, reference=(0.5, "chance")),
            curve("calibration", "calibration", task, title=calibration + of, unit=four, reference=(1.0, "calibrated")),
        ]
    charts += [
        curve("samples_per_second", title="Samples / s", unit="{:,.0f}".format, smooth=True, low=0.0, colour="speed"),
        *(
            curve(key, title=f"Time waiting {what}", unit="{:.1%}".format, smooth=True, low=0.0, colour="wait")
            for key, what in (
                ("data_wait_fraction", "for data"),
                ("exchange_fraction", "in exchanges"),
                ("stall_fraction", "for checkpoints and evaluations"),
            )
        ),
    ]
    charts += [_rate_chart(standing, name, marks) for name in _moving_rates(standing)]
    drawn = "".join(svg_chart(chart, run.steps) for chart in charts)
    kinds = [kind for kind in ("checkpoint", "recovered", "resumed", *ENDS) if any(m.kind == kind for m in marks)]
    keys = [("train", "training"), ("dot", "evaluation"), *((kind, kind) for kind in kinds)]
    if undone:
        keys.append(("undone", "done again after going back to a checkpoint"))
    legend = "".join(f"<span class='key {kind}'>{text}</span>" for kind, text in keys)
    return f"<h2>Over steps</h2><div class='charts'>{drawn}</div><div class='legend'>{legend}</div>"


def _moving_rates(lines: Sequence[Line]) -> list[str]:
    """Names of the learning rates that did not stay the same."""
    seen: dict[str, set[float]] = {}
    for line in lines:
        rates = line.get("lr")
        for name, rate in rates.items() if isinstance(rates, dict) else ():
            seen.setdefault(str(name), set()).add(rate)
    return [name for name, rates in seen.items() if len(rates) > 1]


def _rate_chart(lines: Sequence[Line], name: str, marks: Sequence[Mark]) -> Chart:
    rates = [{"step": line.get("step"), "lr": (line.get("lr") or {}).get(name)} for line in lines]
    return Chart(title=f"Learning rate, {name}", curve=_points(rates, "lr"), marks=marks, unit="{:.3g}".format)


def _mark(line: Line) -> Mark:
    kind = str(line.get("event", "event"))
    step = number(line, "step") or 0
    return Mark(step=step, kind=kind, text=f"{kind} at step {step:,.0f}: {line.get('message', '')}".rstrip(": "))


def _points(lines: Sequence[Line], key: str) -> Points:
    pairs = ((number(line, "step"), number(line, key)) for line in lines)
    return [(step, value) for step, value in pairs if step is not None and value is not None]


def _events(run: RunRecord) -> str:
    if not run.events:
        return ""
    rows = "".join(
        f"<tr><td class='soft'>{_clock(number(line, 'time'))}</td><td class='num'>{count_text(line, 'step')}</td>"
        f"<td><span class='key {kind}'>{kind}</span></td>"
        f"<td class='text'>{escape(str(line.get('message', '')))}</td></tr>"
        for line in run.events[-MOST_EVENTS:]
        for kind in [escape(str(line.get("event")), quote=True)]
    )
    head = "<th>time</th><th class='num'>step</th><th>event</th><th>what happened</th>"
    left_out = run.num_events - MOST_EVENTS
    more = f"<p class='note'>{left_out:,} earlier events are in metrics.jsonl</p>" if left_out > 0 else ""
    return f"<div class='wide'><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>{more}"


def _profiles(run: RunRecord) -> str:
    """Links to the traces of torch's profiler."""
    links = [f"<a href='profile/{escape(name, quote=True)}'>{escape(name)}</a>" for name in run.profiles]
    how = "traces of rank 0; open them in <a href='https://ui.perfetto.dev'>ui.perfetto.dev</a>"
    return f"<p>{', '.join(links)}: {how}</p>" if links else ""


def _config(run: RunRecord) -> str:
    if run.config_text is None:
        return ""
    text = KEY.sub(r"\1<b>\2</b>", escape(run.config_text, quote=False))
    return f"<details><summary>config.yaml, as resolved</summary><pre>{text}</pre></details>"


def _section(title: str, body: str) -> str:
    return f"<h2>{title}</h2><div class='panel'>{body}</div>" if body else ""


def _epochs(run: RunRecord) -> str:
    done = number(run.result or {}, "epochs")
    if done is not None:
        return f"{done:,.0f} epoch{'' if done == 1 else 's'}"
    return f"in epoch {epoch_text(run.train[-1])}" if run.train else ""


def _best(lines: Sequence[Line], key: str, choose: Callable[..., Line]) -> str:
    """`best 0.7041 at step 300`, where there is more than one evaluation to choose from."""
    defined = [line for line in lines if number(line, key) is not None]
    if len(defined) < 2:
        return ""
    best = choose(defined, key=lambda line: number(line, key))
    return f"best {figure_text(best, key)} at step {count_text(best, 'step')}"


def _training(line: Line, key: str) -> str:
    return f"in training {figure_text(line, key)}" if number(line, key) is not None else ""


def _last_checkpoint(run: RunRecord) -> str:
    saved = [line for line in run.events if line.get("event") == "checkpoint" and number(line, "step") is not None]
    return f"step {count_text(saved[-1], 'step')}" if saved else ""


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _clock(unix_s: float | None) -> str:
    return "" if unix_s is None else time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(unix_s))
