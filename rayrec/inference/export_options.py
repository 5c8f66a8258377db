"""`ExportOptions`, and the choice of a number format for each table by its loss of quality (`--tables AUTO`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from rayrec.inference import calibration, compilation
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
MAX_LOSS = 1e-5  # total increase of the log loss in nats, without a budget
_MAX_BATCHES = 64  # to measure a loss on


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Options of an export."""

    tables: str = "fp32"
    """Number format of all tables, or "AUTO": chosen for each table by measured loss of quality. Tables of odd width,
    which cannot be int4, become int8."""
    dense: str = "fp32"
    """Number format of the dense layers."""
    target: str = "eager"
    """"eager" runs torch operators; "aoti" also compiles the graph."""
    march: str | None = None
    """With "aoti", the instruction set to compile for: a level ("x86-64-v3"), or "native" for this processor.
    None: a level if there is one for this machine, else "native"."""
    budget: float | None = None
    """With "AUTO", the bytes of the tables as a share of fp32. None: as few as a total loss of 1e-5 nats allows."""
    parity: int | None = SAMPLE_ROWS
    """Approximate number of evaluation rows, sampled from all, to compare scores on. None: all."""
    calibrate: str | None = None
    """Maps the scores of binary labels, so that they match the frequencies of positives in the evaluation rows: "platt"
    scales and shifts logits, "isotonic" fits an increasing map. None: scores as trained."""
    force: bool = False
    """Keeps an export that is outside its limits, or slower than the trained model."""

    def __post_init__(self) -> None:
        if self.tables != AUTO:
            TableFormat.of(self.tables)
        for name, value, allowed in (("dense", self.dense, DENSE), ("target", self.target, TARGETS)):
            if value not in allowed:
                raise ExportError(f"--{name} {value}: choose one of {', '.join(allowed)}")
        if self.calibrate is not None and self.calibrate not in calibration.KINDS:
            raise ExportError(f"--calibrate {self.calibrate}: choose one of {', '.join(calibration.KINDS)}")
        if self.parity is not None and self.parity < 1:
            raise ExportError(f"--parity {self.parity}: must be at least 1, or `all`")
        if self.march is not None and self.target != "aoti":
            raise ExportError(f"--march {self.march}: only compiled graphs have an instruction set; add --target aoti")
        if self.budget is not None and (self.tables != AUTO or not 0 < self.budget <= 1):
            raise ExportError(
                f"--budget {self.budget}: must be a share of the fp32 bytes in (0, 1], with --tables AUTO"
            )

    def check_machine(self) -> ExportOptions:
        """Checks this machine before tables are read; returns the options with the instruction set to compile for.

        Raises:
            ExportError: The compiler is missing, the instruction set is not supported, or, without `force`, a number
                format is slow.
        """
        slow = None if self.force else why_slow({self.tables, self.dense})
        if slow is not None:
            raise ExportError(f"{slow}; export on the machine that serves, choose fp32, or use --force")
        if self.target != "aoti":
            return self
        compilation.check_compiler()
        return replace(self, march=choose_march(self.march))

    def format_of(self, dim: int) -> TableFormat:
        """The format of a table of this width; not for "AUTO"."""
        format = TableFormat.of(self.tables)
        return format if format.holds(dim) else TableFormat.INT8


def choose_formats(
    tables: Sequence[TableConfig],
    score_with: Callable[[Mapping[str, TableFormat]], Score],
    sample: Sequence[Batch],
    inputs: Inputs,
    budget: float | None,
) -> dict[str, TableFormat]:
    """Greedily narrows the table with the least loss per saved byte.

    The loss of each table in each format is measured with all other tables as fp32: losses of small errors add up.

    Args:
        score_with: Scores with tables in these formats; raises ValueError if a format cannot represent a table.
        budget: Share of the fp32 bytes to reach, whatever the loss; None: as few bytes as MAX_LOSS allows.

    Raises:
        ValueError: The budget cannot be met even with int4.
    """
    sample = sample[:_MAX_BATCHES]
    formats = {table.name: TableFormat.FP32 for table in tables}
    base = _loss(score_with(formats), sample, inputs)
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
                continue  # the format does not support this width
            try:
                measured = _loss(score_with({**formats, table.name: format}), sample, inputs) - base
            except ValueError:  # the format cannot represent the numbers
                del bytes_of[table.name, format]
                continue
            loss[table.name, format] = abs(measured)  # a decrease is chance
    total = sum(bytes_of[name, format] for name, format in formats.items())
    limit = 0 if budget is None else int(budget * total)
    spent = 0.0
    while total > limit:
        steps = [
            (
                (loss[name, narrow] - loss[name, formats[name]])
                / (bytes_of[name, formats[name]] - bytes_of[name, narrow]),
                name,
                narrow,
            )
            for name in formats
            for narrow in NARROWING
            if (name, narrow) in bytes_of and bytes_of[name, narrow] < bytes_of[name, formats[name]]
        ]
        if budget is None:
            steps = [
                step for step in steps if spent + loss[step[1], step[2]] - loss[step[1], formats[step[1]]] <= MAX_LOSS
            ]
        if not steps:
            break
        _, name, narrow = min(steps, key=lambda step: step[0])
        spent += loss[name, narrow] - loss[name, formats[name]]
        total -= bytes_of[name, formats[name]] - bytes_of[name, narrow]
        formats[name] = narrow
    if budget is not None and total > limit:
        raise ValueError(f"--budget: all tables as int4 need {total:,} bytes, the budget is {limit:,}; raise it")
    return formats


def _loss(score: Score, sample: Sequence[Batch], inputs: Inputs) -> float:
    """Mean log loss in nats, summed over labels; for a number, of a normal distribution."""
    metrics = LabelMetrics(inputs.kinds, names=inputs.labels)
    for batch in sample:
        metrics.update(score(batch), batch.label, batch.weight)
    by_name = by_label(metrics.compute())
    return sum(
        0.5 * math.log(values["mse"] or 1.0) if "mse" in values else float(values["logloss"] or 0.0)
        for values in by_name.values()
    )
