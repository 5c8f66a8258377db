"""Puts a fault into a function, to show that a check finds it."""

from __future__ import annotations
import __future__

import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def mutated(owner: Any, name: str, old: str, new: str) -> Iterator[None]:
    """`owner.name` with `old` in its source, which comes once, replaced by `new`; as it was afterwards.

    Args:
        owner: a class, or the module that calls the function.
    """
    function = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{old!r} comes {source.count(old)} times in {name}"
    code = compile(source.replace(old, new), name, "exec", flags=__future__.annotations.compiler_flag)
    made: dict[str, Any] = {}
    exec(code, function.__globals__, made)
    setattr(owner, name, made[name])
    try:
        yield
    finally:
        setattr(owner, name, function)
