"""Reads a `TrainConfig` from YAML and `--set a.b=value`. Errors name the field, the value and the fix."""

from __future__ import annotations

import errno
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from rayrec.storage.errors import suggestion
from rayrec.storage.secrets import without_secrets
from rayrec.train.config.reference import fields_at, type_at
from rayrec.train.config.train_config import TrainConfig

Location = tuple[str | int, ...]


class ConfigError(ValueError):
    """An invalid config; the message has one line per problem."""


class _Loader(yaml.SafeLoader):
    """YAML loader that refuses duplicate keys, and numbers that YAML 1.1 reads as others: `0123` as 83, `12:30` as 750.

    `1e-8` is a number, as in YAML 1.2; YAML 1.1 reads it as a string.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node)
            if not isinstance(key, Hashable):
                break  # refused below, with its line
            if key in seen:
                raise ConfigError(f"line {key_node.start_mark.line + 1}: key {key!r} is given twice; keep one")
            seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> Any:
        return self._number(node, super().construct_yaml_int(node))

    def construct_yaml_float(self, node: yaml.ScalarNode) -> Any:
        return self._number(node, super().construct_yaml_float(node))

    def _number(self, node: yaml.ScalarNode, number: Any) -> Any:
        text = str(node.value)
        if re.match(r"[-+]?0[\d_b]", text) or ":" in text:
            problem = f"YAML reads {text} as {number}: write '{text}' for a text, or {number} for the number"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return number


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_yaml_float)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)
_Loader.add_constructor("tag:yaml.org,2002:value", lambda loader, node: str(node.value))  # a bare =


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read a config file and apply `a.b.c=value` overrides. Vocabulary paths are relative to the file's folder.

    Args:
        path: a YAML file.
        overrides: `field.path=value` with a YAML value; list items by index or by `name` (`tables.user.dim=16`).

    Raises:
        ConfigError: the file is missing or not YAML, or a field is missing, unknown or invalid.
    """
    raw = read_yaml(path)
    for override in overrides:
        raw = apply_override(raw, override)
    try:
        config = parse_config(raw)
    except ConfigError as error:
        raise ConfigError(f"{path}:\n{error}") from None
    schema = config.data_schema.with_paths_from(Path(path).expanduser().absolute().parent)
    return config.model_copy(update={"data_schema": schema})


def text_of(path: Path) -> str:
    """Read a text file. Refuses devices and pipes, which may be endless.

    Raises:
        OSError: not readable, or not a regular file.
        UnicodeDecodeError: not UTF-8.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is not a plain file", str(path))
    return path.read_text(encoding="utf-8")


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read a YAML file that contains a mapping.

    Raises:
        ConfigError: the file is missing, unreadable, not YAML, or not a mapping.
    """
    file = Path(path)
    try:
        text = text_of(file)
    except FileNotFoundError:
        raise ConfigError(f"config file {file} does not exist (looked in {Path.cwd()})") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {file} cannot be read: {error}") from None
    try:
        raw = parse_yaml(text)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{file}: a mapping with the fields {', '.join(fields_at(()))} is needed")
    return raw


def parse_config(raw: Mapping[str, Any]) -> TrainConfig:
    """Make a `TrainConfig` from plain values.

    Raises:
        ConfigError: has one line per problem, with the field path.
    """
    try:
        return TrainConfig(**raw)
    except ValidationError as error:
        raise ConfigError("\n".join(f"  {line}" for line in _problems(raw, error))) from None


def apply_override(raw: Mapping[str, Any], override: str) -> dict[str, Any]:
    """A copy of `raw` with one `a.b.c=value` applied.

    Raises:
        ConfigError: no `=`, an empty path, a value that is not YAML, or a path through a value without fields.
    """
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"--set {override}: write it as field.path=value, e.g. --set trainer.num_workers=4")
    try:
        value = parse_yaml(text)
    except ConfigError as error:
        raise ConfigError(f"--set {override}: the value is not YAML: {error}") from None
    changed: dict[str, Any] = with_field(raw, keys, value, override)
    return changed


def with_field(raw: Any, keys: Sequence[str], value: Any, override: str) -> Any:
    """A copy of `raw` with one field set.

    Args:
        keys: path of the field; list items by index or by `name`.
        override: the override as named in errors.

    Raises:
        ConfigError: the path leads through a value without fields.
    """
    if not keys:
        return value
    key, rest = keys[0], keys[1:]
    if raw is None or isinstance(raw, Mapping):
        fields = dict(raw or {})
        fields[key] = with_field(fields.get(key), rest, value, override)
        return fields
    if isinstance(raw, list):
        index = _item(raw, key, override)
        return [*raw[:index], with_field(raw[index], rest, value, override), *raw[index + 1 :]]
    raise ConfigError(f"--set {override}: {raw!r} has no field {key!r}")


def parse_yaml(text: str) -> Any:
    """Parse YAML.

    Raises:
        ConfigError: not YAML.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        raise ConfigError(f"not YAML: {_with_line(text, error)}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"not YAML: {str(error).strip()}") from None


def _with_line(text: str, error: yaml.MarkedYAMLError) -> str:
    """The problem, and the line of YAML with a marker below the column."""
    mark = error.problem_mark or error.context_mark
    message = ", ".join(filter(None, (error.context, error.problem)))
    if mark is None:
        return message
    lines = text.splitlines() or [""]
    row = min(mark.line, len(lines) - 1)
    column = mark.column if row == mark.line else len(lines[row])
    line, column = (lines[row], column) if column < 80 else (f"…{lines[row][column - 60 :]}", 61)
    return f"{message}, in line {row + 1}:\n  {line[:100]}\n  {' ' * column}^"


def _item(items: Sequence[Any], key: str, override: str) -> int:
    names = [item.get("name") if isinstance(item, Mapping) else None for item in items]
    if key in names:
        return names.index(key)
    if key.isdigit() and int(key) < len(items):
        return int(key)
    item_names = [name for name in names if name]
    raise ConfigError(
        f"--set {override}: the list has no item {key!r}{suggestion(key, item_names)} "
        f"(items 0 to {len(items) - 1}{': ' + ', '.join(item_names) if item_names else ''})"
    )


def _problems(raw: Any, error: ValidationError) -> list[str]:
    """One line per invalid field; pydantic reports one per member of a union."""
    by_field: dict[Location, list[Mapping[str, Any]]] = {}
    for problem in error.errors():
        by_field.setdefault(_in_data(raw, problem["loc"]), []).append(problem)
    return [_problem(_path(raw, location), location, problems) for location, problems in by_field.items()]


def _problem(path: str, location: Location, problems: Sequence[Mapping[str, Any]]) -> str:
    problem = problems[0]
    context, kind, value = problem.get("ctx", {}), problem["type"], problem.get("input")
    if len(problems) > 1:
        return f"{path}: got {_with_type(value)}; allowed: {type_at(location)}"
    match kind:
        case "config":
            return f"{context['path']}: {problem['msg']}"
        case "extra_forbidden":
            names = fields_at(location[:-1])
            allowed = f" (allowed: {', '.join(names)})" if names else ""
            return f"{path}: unknown field{suggestion(str(location[-1]), names)}{allowed}"
        case "missing":
            return f"{path}: is missing; it is required"
        case "value_error":
            return f"{path}: {context['error']}" if path else str(context["error"])
        case "literal_error" | "enum":
            return f"{path}: got {without_secrets(repr(value))}; allowed: {context['expected']}"
        case "union_tag_invalid":
            return f"{path}.kind: got {context['tag']!r}; allowed: {context['expected_tags']}"
        case "model_type" | "model_attributes_type":
            return f"{path}: got {_with_type(value)}; it is a section with the fields {', '.join(fields_at(location))}"
        case _:
            must = problem["msg"].replace("Input should", "must", 1)
            return f"{path}: got {_with_type(value)}; {must[:1].lower()}{must[1:]}"


def _path(raw: Any, location: Location) -> str:
    """A location as a `--set` path; named list items by name."""
    keys, node = [], raw
    for step in location:
        if isinstance(node, list):
            node = node[int(step)]
            name = node.get("name") if isinstance(node, Mapping) else None
            keys.append(str(step) if name is None else str(name))
        else:
            node = node.get(step) if isinstance(node, Mapping) else None
            keys.append(str(step))
    return ".".join(keys)


def _with_type(value: Any) -> str:
    return f"{without_secrets(repr(value))} ({type(value).__name__})"


def _in_data(raw: Any, location: Iterable[str | int]) -> Location:
    """A pydantic location without the names of union members, which are not part of the config."""
    steps_in_data: list[str | int] = []
    steps, node = list(location), raw
    for i, step in enumerate(steps):
        last = i == len(steps) - 1
        if isinstance(node, Mapping) and (step in node or last):
            steps_in_data.append(step)
            node = node.get(step)
        elif isinstance(node, list) and isinstance(step, int):
            steps_in_data.append(step)
            node = node[step]
    return tuple(steps_in_data)
