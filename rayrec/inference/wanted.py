"""`Wanted`: how a model is to be exported."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rayrec.inference import compiled
from rayrec.inference.artifact import ExportError
from rayrec.inference.parity import SAMPLE_ROWS
from rayrec.inference.processor import choose_march, why_slow
from rayrec.quant import TableFormat

AUTO = "AUTO"
TARGETS = ("eager", "aoti")
DENSE = ("fp32", "bf16")


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
