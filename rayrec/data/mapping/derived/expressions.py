"""Expressions over columns in Python syntax, computed by Arrow functions; no Python code is evaluated."""

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
    """The columns that an expression reads, in order.

    Raises:
        ValueError: a syntax error, no column, or an operator or function that is not supported.
    """
    names: list[str] = []
    _walk(_parsed(text), lambda name: names.append(name), lambda value: None, lambda _, *arguments: None)
    if not names:
        raise ValueError(f"expression {text!r} reads no column")
    return list(dict.fromkeys(names))


def compute(text: str, columns: Mapping[str, pa.Array]) -> Any:
    """The value of the expression, an Arrow array. Pass numbers as float64.

    Raises:
        pa.ArrowException: unsupported types.
    """
    return _walk(_parsed(text), columns.__getitem__, pa.scalar, lambda function, *arguments: function(*arguments))


def _parsed(text: str) -> ast.AST:
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"cannot parse expression {text!r}: {error}") from error


def _walk(node: ast.AST, column: Callable[[str], Any], constant: Callable[[Any], Any], call: Callable[..., Any]) -> Any:
    def value(inner: ast.AST) -> Any:
        return _walk(inner, column, constant, call)

    match node:
        case ast.Name(id=name):
            return column(name)
        case ast.Call(func=ast.Name(id="col"), args=[ast.Constant(value=str(name))], keywords=[]):
            return column(name)
        case ast.Constant(value=str() | bool() as literal):
            return constant(literal)
        case ast.Constant(value=int() | float() as literal):
            return constant(float(literal))
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
    functions = ", ".join(f"{name} ({count})" for name, (count, _) in _FUNCTIONS.items())
    raise ValueError(
        f"unsupported in an expression: {ast.unparse(node)!r}; supported: columns (col('a b') for names with spaces), "
        f"numbers, texts, + - * / ** & | ~, single comparisons, and these functions (number of arguments): {functions}"
    )
