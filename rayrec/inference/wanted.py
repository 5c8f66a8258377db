"""`Wanted`: how a model is to be exported; of `--tables AUTO`, the format of each table by its loss of quality."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from rayrec.inference import compiled
from rayrec.inference.artifact import ExportError
from rayrec.inference.graph import Inputs
from rayrec.inference.parity import SAMPLE_ROWS, Score, by_label
from rayrec.inference.processor import choose_march, why_slow
from rayrec.metrics import LabelMetrics
from rayrec.models import Batch
from rayrec.quant import TableFormat
from rayrec.quant.layout import TableConfig

AUTO = "AUTO"
TARGETS = ("eager", "aoti")
DENSE = ("fp32", "bf16")
NARROWING = (TableFormat.FP32, TableFormat.FP16, TableFormat.INT8, TableFormat.INT4)
FREE_LOSS = 1e-5  # nats of log loss in all that a choice without a budget may cost
_BATCHES = 64  # scored for every step, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """How to export.

    Args:
        tables: format of all tables, or AUTO: each table's is chosen by measured loss of quality. A table of an odd
            width, which int4 cannot hold, becomes int8.
        dense: number format of the dense layers.
        target: "eager" runs torch operators, "aoti" is compiled as well.
        march: with "aoti", the instruction set to compile for: a level such as "x86-64-v3", or "native", this
            processor's own. None: the level, where there is one.
        budget: with AUTO, the tables' bytes as a share of fp32; None: as few as the limits of int8 allow.
        parity: about so many evaluation rows, drawn from all of them, on which scores are compared; None: all.
        force: keep an export that is outside its limits, or slower than the trained model.
    """

    tables: str = "fp32"
    dense: str = "fp32"
    target: str = "eager"
    march: str | None = None
    budget: float | None = None
    parity: int | None = SAMPLE_ROWS
    force: bool = False

    def __post_init__(self) -> None:
        if self.tables != AUTO:
            TableFormat.of(self.tables)
        for name, value, allowed in (("dense", self.dense, DENSE), ("target", self.target, TARGETS)):
            if value not in allowed:
                raise ExportError(f"--{name} {value}: choose one of {', '.join(allowed)}")
        if self.parity is not None and self.parity < 1:
            raise ExportError(f"--parity {self.parity}: compare scores on at least one row, or on all")
        if self.march is not None and self.target != "aoti":
            raise ExportError(f"--march {self.march}: only a compiled graph has an instruction set; add --target aoti")
        if self.budget is not None and (self.tables != AUTO or not 0 < self.budget <= 1):
            raise ExportError(f"--budget {self.budget}: it is a share of the fp32 bytes in (0, 1], for --tables AUTO")

    def check_machine(self) -> Wanted:
        """What can be known before the tables are read; returns it with the instruction set to compile for.

        Raises:
            ExportError: no compiler, another instruction set, or, without `force`, a slow number format.
        """
        slow = None if self.force else why_slow({self.tables, self.dense})
        if slow is not None:
            raise ExportError(f"{slow}; export where it is served, choose fp32, or keep it all the same with --force")
        if self.target != "aoti":
            return self
        compiled.check_compiler()
        return replace(self, march=choose_march(self.march))

    def format_of(self, dim: int) -> TableFormat:
        """That of a table of this width, where it is not to be chosen."""
        wanted = TableFormat.of(self.tables)
        return wanted if wanted.holds(dim) else TableFormat.INT8


def choose_formats(
    tables: Sequence[TableConfig],
    score_with: Callable[[Mapping[str, TableFormat]], Score],
    sample: Sequence[Batch],
    inputs: Inputs,
    budget: float | None,
) -> dict[str, TableFormat]:
    """Narrows one table after the other, always that which loses least for the bytes it saves.

    Each table's loss in each format is measured with all others as fp32; losses of small errors add up.

    Args:
        score_with: scores with tables in these formats; raises ValueError where one cannot hold a table's numbers.
        budget: share of the fp32 bytes to get down to, whatever it costs; None: as few bytes as FREE_LOSS allows.

    Raises:
        ValueError: not even int4 everywhere meets the budget.
    """
    sample = sample[:_BATCHES]
    chosen = {table.name: TableFormat.FP32 for table in tables}
    base = _loss(score_with(chosen), sample, inputs)
    bytes_of = {
        (table.name, format): table.num_embeddings * format.row_bytes(table.embedding_dim)
        for table in tables
        for format in NARROWING
        if format.holds(table.embedding_dim)
    }
    loss = {(table.name, TableFormat.FP32): 0.0 for table in tables}
    for table in tables:
        for format in NARROWING[1:]:
            if (table.name, format) not in bytes_of:
                continue  # it has no rows of this width
            try:
                measured = _loss(score_with({**chosen, table.name: format}), sample, inputs) - base
            except ValueError:  # numbers beyond what it can hold
                del bytes_of[table.name, format]
                continue
            loss[table.name, format] = abs(measured)  # a gain is chance
    total = sum(bytes_of[name, format] for name, format in chosen.items())
    limit = 0 if budget is None else int(budget * total)
    spent = 0.0
    while total > limit:
        steps = [
            (
                (loss[name, narrow] - loss[name, chosen[name]])
                / (bytes_of[name, chosen[name]] - bytes_of[name, narrow]),
                name,
                narrow,
            )
            for name in chosen
            for narrow in NARROWING
            if (name, narrow) in bytes_of and bytes_of[name, narrow] < bytes_of[name, chosen[name]]
        ]
        if budget is None:
            steps = [
                step for step in steps if spent + loss[step[1], step[2]] - loss[step[1], chosen[step[1]]] <= FREE_LOSS
            ]
        if not steps:
            break
        _, name, narrow = min(steps, key=lambda step: step[0])
        spent += loss[name, narrow] - loss[name, chosen[name]]
        total -= bytes_of[name, chosen[name]] - bytes_of[name, narrow]
        chosen[name] = narrow
    if budget is not None and total > limit:
        raise ValueError(f"--budget: int4 everywhere takes {total:,} bytes, the budget is {limit:,}; raise it")
    return chosen


def _loss(score: Score, sample: Sequence[Batch], inputs: Inputs) -> float:
    """Mean log loss, in nats, for a number that of a normal distribution around it; summed over several labels."""
    metrics = LabelMetrics(inputs.kinds, names=inputs.labels)
    for batch in sample:
        metrics.update(score(batch), batch.label, batch.weight)
    figures = by_label(metrics.compute()).values()
    return sum(0.5 * math.log(of["mse"] or 1.0) if "mse" in of else float(of["logloss"] or 0.0) for of in figures)
