"""A run as one HTML page. Everything is inline, so the page works offline and can be mailed or archived."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from html import escape

from markupsafe import Markup

from rayrec.train.config.metric_titles import cutoff
from rayrec.train.report.plan import lookups_section, memory_section, plan_section, time_section
from rayrec.train.report.run import ENDS, Line, RunRecord, history, number, of_task, points_of, task_names
from rayrec.train.report.svg import Chart, Mark, evenly, svg_chart
from rayrec.train.report.tables import (
    by_time_table,
    by_value_table,
    count_text,
    dynamic_ids_table,
    epoch_text,
    evaluations_table,
    exports_table,
    figure_text,
    importance_table,
    popularity_table,
    reliability_section,
    skipped_rows,
    skipped_section,
)
from rayrec.train.report.templates import Column, render, table

MOST_EVENTS, MOST_MARKS = 200, 150
KEY = re.compile(r"^(\s*(?:- )*)([\w.\-]+)(?=:)", re.MULTILINE)
KIND = Markup("<span class='key {}'>{}</span>")
PROFILE = Markup("<a href='profile/{}'>{}</a>")


def page(run: RunRecord, now: float) -> str:
    """The complete HTML document; `now` (Unix seconds) is printed as the time of writing."""
    charts, keys = _charts(run)
    sections = {
        "Evaluations": evaluations_table(run.evals),
        "Beside popularity": popularity_table(run.evals),
        "Reliability of the last evaluation": reliability_section(run.evals),
        "Last evaluation by time": by_time_table(run.evals),
        "Last evaluation by value": by_value_table(run.evals),
        "Permutation importance": importance_table(run.importance),
        "Exports": exports_table(run.exports, run.path),
        "Sharding plan": plan_section(run.plan, run.table_bits) if run.plan and run.plan.plan else "",
        "Memory by rank": memory_section(run.memory) if run.memory else "",
        "Predicted time by rank": time_section(run.times) if run.times else "",
        "Lookups by rank": lookups_section(lookups) if (lookups := _lookups(run)) else "",
        "Dynamic ids": dynamic_ids_table(run.train),
        "Profiles": _profiles(run),
        "Rows left out": skipped_section(run.events),
        "Events": _events(run),
        "Configuration": _config(run),
    }
    return render(
        "report",
        run=run,
        title=run.name,
        when=f"started {_clock(run.first_time)}" if run.first_time is not None else "",
        notices=list(_notices(run)),
        cards=_cards(run),
        charts=Markup("").join(svg_chart(chart, run.steps) for chart in charts),
        keys=keys,
        sections=list(sections.items()),
        written=_clock(now),
    )


def _notices(run: RunRecord) -> Iterator[tuple[str, str]]:
    """(CSS class, text) of the notices above the metrics: end of the run, recoveries, skipped rows, warnings."""
    if run.status in ENDS:
        verb = "failed" if run.status == "failed" else "was interrupted"
        yield "failed", f"The run {verb}. {(run.last or {}).get('message', '')}"
    elif run.status == "unfinished" and run.last_time is not None:
        yield "", f"No result yet: still running, or ended early. Last entry {_clock(run.last_time)}."
    recovered = [line for line in run.events if line.get("event") == "recovered"]
    if recovered:
        times = "once" if len(recovered) == 1 else f"{len(recovered)} times"
        yield "recovered", f"Recovered {times}: {recovered[-1].get('message', '')}"
    skipped = skipped_rows(run.events)
    if skipped:
        yield "", f"Left out {skipped:,} row{'' if skipped == 1 else 's'} that could not be used; see below."
    warned = (run.result or {}).get("warnings")
    for text in warned if isinstance(warned, list) else []:
        yield "", f"Warning: {text}"
    for problem in run.problems:
        yield "failed", f"Not shown: {problem}"


Card = tuple[str, str, str, str]  # title, value, explanation, CSS class


def _cards(run: RunRecord) -> list[Card]:
    result = run.result or {}
    evaluation = run.evals[-1] if run.evals else result.get("eval") or {}
    rates = [rate for line in run.train if (rate := number(line, "samples_per_second"))]
    rate = number(result, "samples_per_second") or (sorted(rates)[len(rates) // 2] if rates else None)
    train = run.train[-1] if run.train else {}
    world = number(result, "world_size") or (run.plan.min_world_size if run.plan else None)
    checkpoint = str(result.get("checkpoint") or _last_checkpoint(run) or "")
    seconds = run.last_time - run.first_time if run.first_time is not None and run.last_time is not None else None
    attempts = max((int(number(line, "attempt") or 0) for line in run.lines), default=0)
    return [
        *_lead_cards(run, train, evaluation),
        ("Throughput", f"{rate:,.0f}" if rate else "–", "samples / s", ""),
        ("Waiting for data", *_waited(run), ""),
        ("Workers", f"{world:.0f}" if world else "–", f"attempt {attempts}" if attempts > 1 else "", ""),
        ("Steps", f"{run.steps:,}", ", ".join(filter(None, [_epochs(run), _duration(seconds)])), ""),
        *_best_card(result.get("best")),
        ("Checkpoint", checkpoint.rstrip("/").rsplit("/", 1)[-1] or "–", checkpoint, ""),
    ]


def _best_card(best: object) -> list[Card]:
    """The card of the checkpoint that `storage.keep_best` keeps; empty without one."""
    if not isinstance(best, dict) or number(best, "value") is None:
        return []
    about = f"{best.get('metric')} {number(best, 'value'):.4f}; read with --checkpoint best"
    return [("Best checkpoint", f"step {count_text(best, 'step')}", about, "")]


def _lead_cards(run: RunRecord, train: Line, evaluation: Line) -> list[Card]:
    """The main metrics of a binary or numeric label."""

    def card(name: str, key: str, about: str = "", choose: Callable[..., Line] | None = None) -> Card:
        if choose is not None:
            about = _best(run.evals, key, choose) or _training(train, key)
        return name, figure_text(evaluation, key), about, "lead"

    samples = number(evaluation, "samples")
    rows = f"evaluated on {samples:,.0f} rows" if samples else ""
    if "rmse" in {**train, **evaluation}:
        mean = card("Mean", "prediction_mean", f"labels: {figure_text(evaluation, 'label_mean')}")
        return [card("RMSE", "rmse", choose=min), card("R²", "r2", choose=max), card("MAE", "mae", rows), mean]
    if "mrr" in evaluation:
        k = cutoff(evaluation)
        lead = [card(f"{name}@{k}", f"{key}@{k}", choose=max) for name, key in (("Recall", "recall"), ("NDCG", "ndcg"))]
        unseen = "without seen items, " if "mrr/unseen" in evaluation else ""
        items = number(evaluation, "num_items")
        among = f"{unseen}among {items:,.0f} items" if items else ""
        popular = evaluation.get("popularity")
        beside = [] if not isinstance(popular, dict) else [_popular_card(popular, k)]
        return [*lead, card("MRR", "mrr", among), *beside, ("Targets", count_text(evaluation, "samples"), "", "lead")]
    lead = [card("AUC", "auc", choose=max), card("Normalized entropy", "ne", choose=min)]
    calibration = card("Calibration", "calibration", "predicted / observed positives")
    return [*lead, card("Log loss", "logloss", rows), calibration]


def _popular_card(popular: Line, k: int) -> Card:
    return f"Popularity, recall@{k}", figure_text(popular, f"recall@{k}"), "the most frequent training items", "lead"


def _waited(run: RunRecord) -> tuple[str, str]:
    """Fraction of training time in which a worker waited for rows, and its explanation.

    Covers the whole run if it has a result; else this is the median over the logged intervals.
    """
    train = (run.result or {}).get("train")
    totals = train if isinstance(train, dict) else {}
    fraction, seconds = number(totals, "data_wait_fraction"), number(totals, "seconds")
    if fraction is not None:
        return f"{fraction:.1%}", f"of {_duration(seconds)} of steps" if seconds else "of the training time"
    fractions = sorted(value for line in run.train if (value := number(line, "data_wait_fraction")) is not None)
    return (f"{fractions[len(fractions) // 2]:.1%}", "of the time, median") if fractions else ("–", "")


def _charts(run: RunRecord) -> tuple[list[Chart], list[tuple[str, str]]]:
    """The charts, and their legend as (CSS class, text)."""
    standing, undone = history(run.train)
    evals, _ = history(run.evals)
    events = [line for line in run.events if number(line, "step") is not None]
    if len(events) > MOST_MARKS:
        saves = [line for line in events if line.get("event") == "checkpoint"]
        incidents = [line for line in events if line.get("event") != "checkpoint"]
        events = [*evenly(saves, MOST_MARKS), *evenly(incidents, MOST_MARKS)]
    marks = [_mark(line) for line in events]
    names = task_names([*run.train, *run.evals])

    def curve(key: str, dots: str | None = None, task: str = "", **look: object) -> Chart:
        train, lost, scored = (of_task(lines, task) if task else lines for lines in (standing, undone, evals))
        return Chart(
            curve=points_of(train, key),
            undone=points_of(lost, key),
            dots=points_of(scored, dots) if dots else (),
            marks=marks,
            **look,  # type: ignore[arg-type]
        )

    four = "{:.4f}".format
    ne, auc, calibration = "Normalized entropy", "AUC", "Calibration"
    # With several labels the loss is their sum, which evaluations do not report.
    numbers = not names and any("rmse" in line for line in run.train)
    dots = None if names else "mse" if numbers else "logloss"
    title = "Loss" if names else "Squared error" if numbers else "Log loss"
    ranks_items = any("mrr" in line for line in run.evals)
    if ranks_items:
        dots, title = None, "Loss"
    charts = [curve("loss", dots, title=title, unit=four, smooth=True)]
    if ranks_items:
        k = cutoff(evals[-1] if evals else {})
        for name, key in ((f"Recall@{k}", f"recall@{k}"), (f"NDCG@{k}", f"ndcg@{k}"), ("MRR", "mrr")):
            charts.append(curve(key, key, title=name, unit=four, low=0.0))
    for task, suffix in [] if ranks_items else [(name, f", {name}") for name in names] or [("", "")]:
        if any("rmse" in line for line in (of_task(run.train, task) if task else run.train)):
            charts += [
                curve("rmse", "rmse", task, title="RMSE" + suffix, unit=four, smooth=True, low=0.0),
                curve(
                    "r2", "r2", task, title="R²" + suffix, unit=four, smooth=True, reference=(0.0, "mean of the labels")
                ),
            ]
            continue
        charts += [
            curve("ne", "ne", task, title=ne + suffix, unit=four, smooth=True, reference=(1.0, "base rate")),
            curve("auc", "auc", task, title=auc + suffix, unit=four, smooth=True, reference=(0.5, "chance")),
            curve(
                "calibration", "calibration", task, title=calibration + suffix, unit=four, reference=(1.0, "calibrated")
            ),
        ]
    charts += [
        curve("samples_per_second", title="Samples / s", unit="{:,.0f}".format, smooth=True, low=0.0, colour="speed"),
        *(
            curve(key, title=f"Time waiting {reason}", unit="{:.1%}".format, smooth=True, low=0.0, colour="wait")
            for key, reason in (
                ("data_wait_fraction", "for data"),
                ("exchange_fraction", "in exchanges"),
                ("stall_fraction", "for checkpoints and evaluations"),
            )
        ),
    ]
    charts += [_rate_chart(standing, name, marks) for name in _moving_rates(standing)]
    kinds = [kind for kind in ("checkpoint", "recovered", "resumed", *ENDS) if any(m.kind == kind for m in marks)]
    keys = [("train", "training"), ("dot", "evaluation"), *((kind, kind) for kind in kinds)]
    return charts, [*keys, *([("undone", "done again after going back to a checkpoint")] if undone else [])]


def _lookups(run: RunRecord) -> list[float]:
    """The newest lookups by rank; empty if no line has valid ones."""
    for line in reversed(run.train):
        counts = line.get("lookups_by_rank")
        if isinstance(counts, list) and counts and all(isinstance(count, int | float) for count in counts):
            return counts
    return []


def _moving_rates(lines: Sequence[Line]) -> list[str]:
    """Names of the learning rates that changed."""
    seen: dict[str, set[float]] = {}
    for line in lines:
        rates = line.get("lr")
        for name, rate in rates.items() if isinstance(rates, dict) else ():
            seen.setdefault(str(name), set()).add(rate)
    return [name for name, rates in seen.items() if len(rates) > 1]


def _rate_chart(lines: Sequence[Line], name: str, marks: Sequence[Mark]) -> Chart:
    rates = [{"step": line.get("step"), "lr": (line.get("lr") or {}).get(name)} for line in lines]
    return Chart(title=f"Learning rate, {name}", curve=points_of(rates, "lr"), marks=marks, unit="{:.3g}".format)


def _mark(line: Line) -> Mark:
    kind = str(line.get("event", "event"))
    step = number(line, "step") or 0
    return Mark(step=step, kind=kind, text=f"{kind} at step {step:,.0f}: {line.get('message', '')}".rstrip(": "))


def _events(run: RunRecord) -> Markup:
    rows = [
        [_clock(number(line, "time")), count_text(line, "step"), KIND.format(kind, kind), line.get("message", "")]
        for line in run.events[-MOST_EVENTS:]
        for kind in [line.get("event")]
    ]
    columns = (Column("time", "soft"), Column("step", "num"), Column("event"), Column("what happened", "text"))
    left_out = run.num_events - MOST_EVENTS
    note = f"<p class='note'>{left_out:,} earlier events are in metrics.jsonl</p>" if left_out > 0 else ""
    return table(columns, rows) + Markup(note)


def _profiles(run: RunRecord) -> Markup:
    """Links to the PyTorch profiler traces."""
    links = Markup(", ").join(PROFILE.format(name, name) for name in run.profiles)
    hint = Markup("traces of rank 0; open them in <a href='https://ui.perfetto.dev'>ui.perfetto.dev</a>")
    return Markup("<p>{}: {}</p>").format(links, hint) if links else Markup("")


def _config(run: RunRecord) -> Markup:
    if run.config_text is None:
        return Markup("")
    text = KEY.sub(r"\1<b>\2</b>", escape(run.config_text, quote=False))
    return Markup(f"<details><summary>config.yaml, as resolved</summary><pre>{text}</pre></details>")


def _epochs(run: RunRecord) -> str:
    done = number(run.result or {}, "epochs")
    if done is not None:
        return f"{done:,.0f} epoch{'' if done == 1 else 's'}"
    return f"in epoch {epoch_text(run.train[-1])}" if run.train else ""


def _best(lines: Sequence[Line], key: str, choose: Callable[..., Line]) -> str:
    """`best 0.7041 at step 300`; empty with fewer than two evaluations."""
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
