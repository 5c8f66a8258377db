"""All faults that could be put into some files, and a random sample of them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator

# Faults that a person makes. What is left out: most of the 11 × 11 arithmetic swaps, which end in a TypeError wherever
# they are met and so would flatter the tests, and `|`, which nearly always stands in a type.
OPERATORS = tuple(
    f"core/{name}"
    for name in (
        "AddNot",
        "NumberReplacer",
        "ReplaceAndWithOr",
        "ReplaceOrWithAnd",
        "ReplaceBinaryOperator_Add_Sub",
        "ReplaceBinaryOperator_Sub_Add",
        "ReplaceBinaryOperator_Mul_Add",
        "ReplaceBinaryOperator_Mul_Div",
        "ReplaceBinaryOperator_Div_Mul",
        "ReplaceBinaryOperator_FloorDiv_Mul",
        "ReplaceBinaryOperator_Mod_FloorDiv",
        "ReplaceBreakWithContinue",
        "ReplaceContinueWithBreak",
        "ReplaceComparisonOperator_Eq_NotEq",
        "ReplaceComparisonOperator_NotEq_Eq",
        "ReplaceComparisonOperator_Lt_LtE",
        "ReplaceComparisonOperator_LtE_Lt",
        "ReplaceComparisonOperator_Gt_GtE",
        "ReplaceComparisonOperator_GtE_Gt",
        "ReplaceComparisonOperator_Is_IsNot",
        "ReplaceComparisonOperator_IsNot_Is",
        "ReplaceFalseWithTrue",
        "ReplaceTrueWithFalse",
        "ReplaceUnaryOperator_Delete_Not",
        "ReplaceUnaryOperator_Delete_USub",
        "ZeroIterationForLoop",
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """The `occurrence`-th place of a file where `operator` can change something, at `line`."""

    path: str
    operator: str
    occurrence: int
    line: int

    def source(self, original: str) -> str:
        """The file's text with the fault in it."""
        changed = mutate_code(original, get_operator(self.operator)(), self.occurrence)
        if changed is None:
            raise ValueError(f"{self.path} has changed since {self} was drawn")
        return str(changed)


def mutants_of(root: Path, path: str) -> list[Mutant]:
    """Every fault that could be put into one file."""
    tree = get_ast((root / path).read_text(encoding="utf-8"))
    nodes = list(ast_nodes(tree))
    found = []
    for name in OPERATORS:
        operator = get_operator(name)()
        lines = [start[0] for node in nodes for start, _ in operator.mutation_positions(node)]
        found += [Mutant(path=path, operator=name, occurrence=n, line=line) for n, line in enumerate(lines)]
    return found


def sample(root: Path, paths: Sequence[str], size: int, seed: int) -> list[Mutant]:
    """`size` faults on as many lines of the Python files under `paths`.

    Lines are drawn first, each equally likely, then one kind of fault on each: otherwise lines full of numbers would
    have most of the sample.
    """
    of_line: dict[tuple[str, int], dict[str, list[Mutant]]] = {}
    for path in python_files(root, paths):
        for mutant in mutants_of(root, path):
            of_line.setdefault((path, mutant.line), {}).setdefault(mutant.operator, []).append(mutant)
    drawing = random.Random(seed)
    lines = drawing.sample(sorted(of_line), min(size, len(of_line)))
    return [mutant for line in sorted(lines) for mutant in _one_that_compiles(root, of_line[line], drawing)]


def _one_that_compiles(root: Path, by_operator: dict[str, list[Mutant]], drawing: random.Random) -> Iterator[Mutant]:
    """A kind of fault, and a place for it; none where no fault of the line is Python (the `*` among arguments)."""
    kinds = list(by_operator)
    for operator in drawing.sample(kinds, len(kinds)):
        for mutant in drawing.sample(by_operator[operator], len(by_operator[operator])):
            try:
                compile(mutant.source((root / mutant.path).read_text(encoding="utf-8")), mutant.path, "exec")
            except SyntaxError:
                continue
            yield mutant
            return


def python_files(root: Path, paths: Iterable[str]) -> list[str]:
    """Python files under `paths`, relative to `root`, sorted."""
    found: set[Path] = set()
    for path in paths:
        whole = root / path
        if not whole.exists():
            raise FileNotFoundError(f"PATHS names {path}, which is not there")
        found |= {whole} if whole.is_file() else set(whole.rglob("*.py"))
    return sorted(path.relative_to(root).as_posix() for path in found)
