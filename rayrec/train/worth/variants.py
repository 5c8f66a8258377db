"""Variants of a config: what `rayrec worth --vary FILE` compares with the config itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from rayrec._runtime.strict import Strict
from rayrec.data import WindowsConfig
from rayrec.train.config.file import parse_config, with_field
from rayrec.train.config.train_config import TrainConfig
from rayrec.train.errors import TrainError

CONFIG = "config"  # the name of the config without changes


class Changes(Strict):
    """The changes of a variant, applied in this order.

    Args:
        set: fields of the config with their values, as `--set`: `{schema.sequences.history.last: 100}`.
        without: features that the variant does not read.
        width: factor of the dims of tables and the widths of layers, but the last of `over_arch`.
        delay: time from a row to training on it, such as `1h`. A row is scored when it comes.
    """

    set: dict[str, Any] = Field(default={})
    without: list[str] = Field(default=[])
    width: float | None = Field(default=None, gt=0)
    delay: str | None = Field(default=None, pattern=r"^[1-9][0-9]* ?(s|min|h|d)$")


@dataclass(frozen=True, slots=True)
class Variant:
    """A config to train.

    Args:
        delay_us: µs from a row to training on it.
    """

    name: str
    config: TrainConfig
    delay_us: int = 0


def variants_of(raw: Mapping[str, Any], changes: Mapping[str, Any], folder: Path) -> list[Variant]:
    """The config itself, named `config`, and its variants.

    Args:
        raw: the config as plain values.
        changes: by name, the fields of `Changes`.
        folder: of the config; vocabulary paths are relative to it.

    Raises:
        ValueError: unknown fields or features, or a variant that is not a config; names the variant.
    """
    if not changes or CONFIG in changes:
        raise TrainError(f"--vary: name one or more variants, none of them {CONFIG!r}")
    variants = [Variant(CONFIG, _parsed(raw, folder))]
    for name, fields in changes.items():
        try:
            change = Changes.model_validate(fields)
            config = _parsed(_changed(raw, change), folder)
        except ValidationError as error:
            raise TrainError(f"--vary: {name}: {error.errors()[0]['loc']}: {error.errors()[0]['msg']}") from None
        except ValueError as error:
            raise TrainError(f"--vary: {name}: {error}") from None
        seconds = None if change.delay is None else WindowsConfig(time=change.delay).seconds
        variants.append(Variant(name, config, 1_000_000 * (seconds or 0)))
    return variants


def _parsed(raw: Mapping[str, Any], folder: Path) -> TrainConfig:
    config = parse_config(raw)
    return config.model_copy(update={"data_schema": config.data_schema.with_paths_from(folder)})


def _changed(raw: Mapping[str, Any], change: Changes) -> Mapping[str, Any]:
    for path, value in change.set.items():
        raw = with_field(raw, path.split("."), value, f"{path}={value}")
    if change.without:
        raw = _without(raw, change.without)
    return raw if change.width is None else _scaled(raw, change.width)


def _without(raw: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    schema, model = dict(raw["schema"]), dict(raw["model"])
    features = {one["name"] for kind in ("dense", "sparse") for one in schema.get(kind, [])}
    if unknown := [name for name in names if name not in features]:
        raise TrainError(f"without: no feature {unknown[0]!r}; the schema has {', '.join(sorted(features))}")
    for kind in ("dense", "sparse"):
        schema[kind] = [one for one in schema.get(kind, []) if one["name"] not in names]
    schema["sequences"] = [
        one | {"ids": [each for each in one["ids"] if each not in names]} if "ids" in one else one
        for one in schema.get("sequences", [])
    ]
    tables = [one | {"features": [each for each in one["features"] if each not in names]} for one in raw["tables"]]
    model["args"] = _args_without(model.get("args") or {}, names)
    return {**raw, "schema": schema, "model": model, "tables": [one for one in tables if one["features"]]}


def _args_without(value: Any, names: Sequence[str]) -> Any:
    """Arguments of a model without features; a history loses the target at the same place."""
    if isinstance(value, Mapping):
        if {"history", "target"} <= {*value}:
            pairs = zip(value["history"], value["target"], strict=True)
            kept = [pair for pair in pairs if not {*pair} & {*names}]
            return {**value, "history": [one for one, _ in kept], "target": [one for _, one in kept]}
        return {key: _args_without(each, names) for key, each in value.items()}
    if isinstance(value, list):
        return [_args_without(each, names) for each in value if each not in names]
    return value


def _scaled(raw: Mapping[str, Any], factor: float) -> dict[str, Any]:
    def scaled(width: int) -> int:
        return max(4, round(width * factor / 4) * 4)  # a multiple of 4, as of tables

    args: dict[str, Any] = {}
    for name, value in (raw["model"].get("args") or {}).items():
        if isinstance(value, list) and all(isinstance(each, int) for each in value) and value:
            last = value[-1:] if name == "over_arch" else []
            args[name] = [*map(scaled, value[: len(value) - len(last)]), *last]
        else:
            args[name] = scaled(value) if name == "dim" and value is not None else value
    tables = [one | {"dim": scaled(one["dim"])} for one in raw["tables"]]
    return {**raw, "tables": tables, "model": {**raw["model"], "args": args}}
