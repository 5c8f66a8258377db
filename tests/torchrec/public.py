"""Records TorchRec 1.8's public classes and functions by module: `python -m tests.torchrec.public` writes
`recorded/public.json`. TorchRec must be importable, and rayrec need not be; modules of its own tests are left out."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
from types import ModuleType

from tests.torchrec.case import HERE

NOT_PUBLIC = {"tests", "benchmark", "benchmarks", "examples", "github"}


def names_of(module: ModuleType) -> list[str]:
    """The classes and functions that a module defines; a package's, also those that it hands on."""
    package = hasattr(module, "__path__")
    return sorted(
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and (value.__module__ == module.__name__ or (package and value.__module__.startswith("torchrec.")))
    )


def main() -> None:
    root = importlib.import_module("torchrec")
    found = {}
    for item in pkgutil.walk_packages(root.__path__, "torchrec.", onerror=lambda name: None):
        if NOT_PUBLIC & set(item.name.split(".")):
            continue
        try:
            found[item.name.removeprefix("torchrec.")] = names_of(importlib.import_module(item.name))
        except Exception:
            found[item.name.removeprefix("torchrec.")] = []  # it needs what is not installed
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(names)}" for name, names in sorted(found.items()))
    (HERE / "recorded" / "public.json").write_text("{\n" + lines + "\n}\n", encoding="utf-8")
    print(f"{len(found)} modules, {sum(map(len, found.values()))} names")


if __name__ == "__main__":
    main()
