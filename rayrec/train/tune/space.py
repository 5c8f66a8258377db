"""Parses the search space: `FIELD=SPACE` on the command line to Ray Tune domains."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rayrec.train.config.file import ConfigError, parse_config, parse_yaml, with_field

RANGE = re.compile(r"(log|uniform|int)\((.*)\)", re.DOTALL)
FORMS = "[a, b, …], uniform(low, high), log(low, high) or int(low, high)"


def space_of(params: Sequence[str]) -> dict[str, Any]:
    """Config field → Ray Tune domain.

    Args:
        params: `FIELD=SPACE`, where SPACE is a YAML list to choose from, `uniform(low, high)`, `log(low, high)`
            (log-uniform), or `int(low, high)`, which includes `high`.

    Raises:
        ConfigError: invalid syntax, a repeated field, or an empty range.
    """
    space: dict[str, Any] = {}
    for param in params:
        field, equals, text = (text.strip() for text in param.partition("="))
        if not equals or not field:
            raise ConfigError(f"--param {param}: write it as FIELD=SPACE, SPACE as {FORMS}")
        if field in space:
            raise ConfigError(f"--param {param}: {field} is given twice")
        space[field] = _space(param, text)
    if not space:
        raise ConfigError(f"nothing to search over: give --param FIELD=SPACE, SPACE as {FORMS}")
    return space


def with_values(raw: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the raw config with the sampled values set."""
    changed = dict(raw)
    for field, value in values.items():
        changed = with_field(changed, field.split("."), value, f"{field}={value}")
    return changed


def holds(domain: Any, value: Any) -> bool:
    """Whether a Ray Tune domain contains the value."""
    choices = getattr(domain, "categories", None)
    if choices is not None:
        return value in choices
    return isinstance(value, int | float) and bool(domain.lower <= value <= _last(domain))


def check_space(raw: Mapping[str, Any], space: Mapping[str, Any]) -> None:
    """Check that every choice, and both ends of every range, make a valid config.

    Raises:
        ConfigError: an unknown field, or a value that is invalid for it.
    """
    for field, domain in space.items():
        choices = getattr(domain, "categories", None)
        ends = choices if choices is not None else [domain.lower, _last(domain)]
        for value in ends:
            try:
                parse_config(with_values(raw, {field: value}))
            except ConfigError as error:
                raise ConfigError(f"--param {field}: with {value!r}: {error}") from None


def _last(domain: Any) -> Any:
    from ray.tune.search.sample import Integer

    return domain.upper - 1 if isinstance(domain, Integer) else domain.upper


def _space(param: str, text: str) -> Any:
    from ray import tune

    ranged = RANGE.fullmatch(text)
    if ranged is None:
        choices = parse_yaml(text)
        if not isinstance(choices, list) or not choices:
            raise ConfigError(f"--param {param}: got {text!r}; expected {FORMS}")
        return tune.choice(choices)
    kind, inside = ranged.groups()
    bounds = parse_yaml(f"[{inside}]")
    types = int if kind == "int" else (int, float)
    if len(bounds) != 2 or not all(isinstance(bound, types) and not isinstance(bound, bool) for bound in bounds):
        raise ConfigError(
            f"--param {param}: {kind}(…) takes two {'whole ' if kind == 'int' else ''}numbers, low and high"
        )
    low, high = bounds
    if low >= high or (kind == "log" and low <= 0):
        raise ConfigError(f"--param {param}: low must be below high{', and above 0' if kind == 'log' else ''}")
    if kind == "int":
        return tune.randint(low, high + 1)
    return tune.loguniform(low, high) if kind == "log" else tune.uniform(low, high)
