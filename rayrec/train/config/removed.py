"""Removed config options and their replacements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from rayrec._runtime.interval import Interval
from rayrec._runtime.strict import refusal


@dataclass(frozen=True, slots=True)
class Removed:
    """A removed option.

    Args:
        default: its former default, which earlier versions wrote to run folders.
        instead: what to use now.
        interval: the option of the same section that now takes the value as a duration, if it is null or missing.
        unit: unit of that duration.
    """

    default: Any
    instead: str
    interval: str | None = None
    unit: str = ""

    def moved(self, value: Any, values: Mapping[str, Any]) -> dict[str, Any]:
        """The options of the section that replace this one's value, among the section's other `values`."""
        if self.interval is None or values.get(self.interval) is not None:
            return {}
        if value is None:
            return {self.interval: None}
        duration = f"{Decimal(str(value)):f}{self.unit}"
        return {self.interval: Interval.parse(duration).plain}


def _as_duration(option: str, unit: str, default: float | None) -> Removed:
    instead = f"trainer.{option} takes steps or a duration: write e.g. trainer.{option}: {EXAMPLES[unit]}"
    return Removed(default, instead, option, unit)


EXAMPLES = {"s": "10s", "min": "15min"}
REMOVED = {
    "trainer.log_every_s": _as_duration("log_every", "s", 10.0),
    "trainer.checkpoint_every_minutes": _as_duration("checkpoint_every", "min", 15.0),
    "trainer.eval_every_minutes": _as_duration("eval_every", "min", None),
    "trainer.wait_for_resources_s": Removed(
        30.0, "use trainer.wait_for_room_s, which limits the wait at the start too, or rayrec train --no-wait"
    ),
    "trainer.timeout_s": Removed(300, "use trainer.hang_s, the time without progress after which the workers restart"),
    "storage.wait_s": Removed(30.0, "use trainer.checkpoint_every if checkpoints are skipped"),
    "trainer.accumulate_steps": Removed(1, "use trainer.micro_batches, which saves memory at the same result"),
    "trainer.timeline_steps": Removed(3, "use trainer.profile, which records a trace of the steps that it names"),
    "trainer.guards.dead_gradients": Removed(True, "use trainer.guards.max_ne or trainer.guards.min_auc"),
}


def without_removed(raw: Any, *, of_run: bool = False) -> Any:
    """Drop removed options that have their default value, or replace them by the option that took their place.

    Args:
        raw: plain values of the complete config.
        of_run: the config is that of an existing run: drop or replace removed options with any value.

    Raises:
        PydanticCustomError: a removed option has another value; names the replacement.
    """
    raw = _with_loss(raw, of_run)
    for path, option in REMOVED.items():
        section, _, name = path.rpartition(".")
        values = _section(raw, section)
        if values is None or name not in values:
            continue
        if values[name] != option.default and not of_run:
            raise refusal(path, f"this option was removed; {option.instead}")
        remaining = {key: value for key, value in values.items() if key != name}
        raw = _replaced(raw, section.split("."), remaining | option.moved(values[name], values))
    return raw


# Versions with `model.args.loss` had these retrievers, and these fields of the losses of rankers.
RETRIEVERS = frozenset({"sasrec", "hstu", "two_tower"})
FIELDS = {"bce": {"label_smoothing"}, "focal": {"gamma", "alpha"}, "mse": {"label_smoothing"}, "pairwise": set()}


def _with_loss(raw: Any, of_run: bool) -> Any:
    """Move `model.args.loss` of a retriever to `model.loss`, and drop the fields of other kinds in `model.loss`, which
    earlier versions wrote to run folders.

    Raises:
        PydanticCustomError: `model.args.loss` in a new config; names the new place.
    """
    model = _section(raw, "model")
    if model is None:
        return raw
    is_retriever = model.get("factory") is None and model.get("name") in RETRIEVERS
    args, loss = model.get("args"), model.get("loss")
    changed: dict[str, Any] = {}
    if of_run and isinstance(loss, Mapping) and "alpha" in loss:
        kept = {name: value for name, value in loss.items() if name in {"kind", *FIELDS[loss["kind"]]}}
        changed["loss"] = None if is_retriever else kept
    if is_retriever and isinstance(args, Mapping) and "loss" in args:
        moved = args["loss"]
        if moved is not None and not of_run:
            values = (
                ", ".join(f"{k}: {v}" for k, v in moved.items()) if isinstance(moved, Mapping) else f"kind: {moved}"
            )
            raise refusal("model.args.loss", f"this option moved: write model.loss: {{{values}}}")
        changed["args"] = {key: value for key, value in args.items() if key != "loss"}
        changed |= {} if moved is None else {"loss": moved}
    return {**raw, "model": {**model, **changed}} if changed else raw


def _section(raw: Any, path: str) -> Mapping[str, Any] | None:
    for name in path.split("."):
        raw = raw.get(name) if isinstance(raw, Mapping) else None
    return raw if isinstance(raw, Mapping) else None


def _replaced(raw: Mapping[str, Any], path: list[str], values: Mapping[str, Any]) -> dict[str, Any]:
    first, *rest = path
    return {**raw, first: _replaced(raw[first], rest, values) if rest else values}
