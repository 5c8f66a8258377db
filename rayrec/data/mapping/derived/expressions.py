"""Expressions over columns: Python's syntax of arithmetic and comparisons, computed by Arrow. Nothing is evaluated."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

_BINARY: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: pc.add,
    ast.Sub: pc.subtract,
    ast.Mult: pc.multiply,
    ast.Div: pc.divide,
    ast.Pow: pc.power,
    ast.BitAnd: pc.and_kleene,
    ast.BitOr: pc.or_kleene,
    ast.Eq: pc.equal,
    ast.NotEq: pc.not_equal,
    ast.Lt: pc.less,
    ast.LtE: pc.less_equal,
    ast.Gt: pc.greater,
    ast.GtE: pc.greater_equal,
}
_FUNCTIONS: dict[str, tuple[int, Callable[..., Any]]] = {
    "abs": (1, pc.abs),
    "floor": (1, pc.floor),
    "sqrt": (1, pc.sqrt),
    "exp": (1, pc.exp),
    "log": (1, pc.ln),
    "log1p": (1, pc.log1p),
    "min": (2, lambda a, b: pc.min_element_wise(a, b, skip_nulls=False)),
    "max": (2, lambda a, b: pc.max_element_wise(a, b, skip_nulls=False)),
    "where": (3, pc.if_else),
    "coalesce": (2, pc.coalesce),
}


def names_in(text: str) -> list[str]:
    """The columns that an expression reads, in their order.

    Raises:
        ValueError: it is none, or has something else than columns, numbers, texts, operators and known functions.
    """
    found: list[str] = []
    _walk(_parsed(text), lambda name: found.append(name), lambda value: None, lambda _, *given: None)
    if not found:
        raise ValueError(f"expression {text!r} names no column")
    return list(dict.fromkeys(found))


def compute(text: str, columns: Mapping[str, pa.Array]) -> Any:
    """The expression's value, an Arrow array; numbers are computed as float64.

    Raises:
        pa.ArrowException: types that do not fit.
    """
    return _walk(_parsed(text), columns.__getitem__, pa.scalar, lambda function, *given: function(*given))


def _parsed(text: str) -> ast.AST:
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"expression {text!r} cannot be parsed: {error}") from error


def _walk(node: ast.AST, column: Callable[[str], Any], constant: Callable[[Any], Any], call: Callable[..., Any]) -> Any:
    def value(inner: ast.AST) -> Any:
        return _walk(inner, column, constant, call)

    match node:
        case ast.Name(id=name):
            return column(name)
        case ast.Call(func=ast.Name(id="col"), args=[ast.Constant(value=str(name))], keywords=[]):
            return column(name)
        case ast.Constant(value=str() | bool() as one):
            return constant(one)
        case ast.Constant(value=int() | float() as one):
            return constant(float(one))
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return call(pc.negate, value(inner))
        case ast.UnaryOp(op=ast.Invert(), operand=inner):
            return call(pc.invert, value(inner))
        case ast.BinOp(left=left, op=op, right=right) | ast.Compare(left=left, ops=[op], comparators=[right]) if (
            type(op) in _BINARY
        ):
            return call(_BINARY[type(op)], value(left), value(right))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if _FUNCTIONS.get(name, (-1,))[0] == len(args):
            return call(_FUNCTIONS[name][1], *map(value, args))
    known = ", ".join(f"{name} ({count})" for name, (count, _) in _FUNCTIONS.items())
    raise ValueError(
        f"an expression cannot hold {ast.unparse(node)!r}: it has columns (col('a b') for odd names), numbers, texts, "
        f"+ - * / ** & | ~, one comparison at a time, and these functions (arguments): {known}"
    )
